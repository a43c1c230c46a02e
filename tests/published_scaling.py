"""What others published, beside what the model says with inputs that are assumed.

python tests/published_scaling.py         the table of docs/prediction.md
"""

from tabulate import tabulate

from compare.prediction.inputs import Inputs
from compare.prediction.model import Cluster, Prediction, named_network, predict_step

MB = 1e6
EVENLY = tuple((number + 1) / 50 for number in range(50))


def training(
    engine: str,
    batch_size: int,
    speed: float,
    megabytes: tuple[float, ...],
    ready: tuple[float, ...] = EVENLY,
) -> Inputs:
    """A lone worker of `speed` images/s: two thirds of a step are the backward pass, 2 % the
    optimizer; sizes of messages, and when they are ready in shares of backward, are assumed."""
    seconds = batch_size / speed
    return Inputs(
        engine=engine,
        transport="nccl",
        batch_size=batch_size,
        gradient_bytes=tuple(size * MB for size in megabytes),
        ready_seconds=tuple(share * 0.66 * seconds for share in ready),
        data_seconds=0.0,
        forward_seconds=0.32 * seconds,
        backward_seconds=0.66 * seconds,
        optimizer_seconds=0.02 * seconds,
        spread_seconds=0.01 * seconds,
        cycle_seconds=0.005 if engine == "horovod" else 0.0,
        negotiates=engine == "horovod",
    )


# Between hosts and within, workers of a host, and efficiencies by workers, as a share of that of
# the last number's workers. A lone step follows from images/s of one GPU: on a P100, on a V100 (a
# quarter of what four do), on an A100. VGG-16's largest layers are ready first.
Row = tuple[str, Inputs, str, str, int, dict[int, float], int]
PUBLISHED: list[Row] = [
    (
        "ResNet-101, Horovod",
        training("horovod", 64, 130, (178 / 50,) * 50),
        "25-roce",
        "pcie",
        4,
        {512: 0.90},
        1,
    ),
    (
        "VGG-16, Horovod",
        training("horovod", 64, 150, (16.4, 67.1, 411.1, 30, 29), (0.02, 0.04, 0.08, 0.4, 1.0)),
        "25-roce",
        "pcie",
        4,
        {512: 0.68},
        1,
    ),
    (
        "ResNet-50, 4 V100 a host",
        training("ddp", 208, 729, (102 / 50,) * 50),
        "100-infiniband",
        "nvlink-v100",
        4,
        {n: 39536 * 4 / (s * n) for n, s in {8: 20904, 16: 10969, 32: 6653, 64: 4071}.items()},
        4,
    ),
    (
        "ResNet-50, 8 A100",
        training("ddp", 256, 2470, (102 / 50,) * 50),
        "100-infiniband",
        "nvlink-a100",
        8,
        {8: 0.84},
        1,
    ),
]


def cases() -> list[tuple[Row, int, float, Prediction, float]]:
    """Each publication's row, number of workers and efficiency, the model's step, and the step of
    its base in seconds."""
    found = []
    for row in PUBLISHED:
        _, inputs, between, island, own, efficiencies, base = row
        network = named_network(between, "nccl", island)
        steps = {
            workers: predict_step(inputs, Cluster(hosts, workers // hosts, 1024, network))
            for workers in (base, *efficiencies)
            for hosts in [max(1, workers // own)]
        }
        alone = steps[base].step_seconds
        found += [(row, n, share, steps[n], alone) for n, share in efficiencies.items()]
    return found


def table() -> str:
    """All of it as Markdown."""
    rows = [
        {
            "training": training,
            "workers": workers,
            "published": f"{100 * published:.0f} %",
            "model": f"{100 * alone / step.step_seconds:.0f} %",
            "90 % interval": f"{100 * alone / step.high_seconds:.0f} to "
            f"{min(100, 100 * alone / step.low_seconds):.0f} %",
            "assumed": f"{between}, {island}, lone step {inputs.step_seconds * 1e3:.0f} ms",
        }
        for (training, inputs, between, island, *_), workers, published, step, alone in cases()
    ]
    return tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True)


if __name__ == "__main__":
    print(table())
