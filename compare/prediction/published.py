"""What others published, beside what the model says with inputs that are assumed.

python -m compare.prediction.published         the table of docs/prediction.md
"""

from dataclasses import dataclass

from tabulate import tabulate

from compare.prediction.inputs import Inputs
from compare.prediction.networks import Cluster, named_network
from compare.prediction.step import predict_step

MB = 1e6
EVENLY = tuple((number + 1) / 50 for number in range(50))


@dataclass(frozen=True)
class Published:
    """A speed-up; `seconds` of a lone step, sizes and shares of backward are assumed."""

    what: str
    engine: str
    batch_size: int
    seconds: float
    network: str
    island: str
    workers_per_host: int
    megabytes: tuple[float, ...]
    ready: tuple[float, ...]
    efficiencies: dict[int, float]  # by workers, as a share of that of `base` workers
    base: int = 1


# A lone step follows from images/s of one GPU: 130 and 150 on a P100, 729 on a V100 (a quarter of
# what four do), 2,470 on an A100. VGG-16's largest layers are ready first.
PUBLISHED = [
    Published("ResNet-101, Horovod", "horovod", 64, 64 / 130, "25-roce", "pcie", 4,
              (178 / 50,) * 50, EVENLY, {512: 0.90}),
    Published("VGG-16, Horovod", "horovod", 64, 64 / 150, "25-roce", "pcie", 4,
              (16.4, 67.1, 411.1, 30, 29), (0.02, 0.04, 0.08, 0.4, 1.0), {512: 0.68}),
    Published("ResNet-50, 4 V100 a host", "ddp", 208, 208 / 729, "100-infiniband", "nvlink-v100", 4,
              (102 / 50,) * 50, EVENLY,
              {n: 39536 * 4 / (s * n) for n, s in
               {8: 20904, 16: 10969, 32: 6653, 64: 4071}.items()}, base=4),
    Published("ResNet-50, 8 A100", "ddp", 256, 256 / 2470, "100-infiniband", "nvlink-a100", 8,
              (102 / 50,) * 50, EVENLY, {8: 0.84}),
]  # fmt: skip


def rows_of(one: Published) -> list[dict[str, object]]:
    """Lines of the table: two thirds of a step are the backward pass, 2 % the optimizer."""
    backward = 0.66 * one.seconds
    inputs = Inputs(
        engine=one.engine,
        transport="nccl",
        arch=one.what,
        batch_size=one.batch_size,
        gradient_bytes=tuple(size * MB for size in one.megabytes),
        ready_seconds=tuple(share * backward for share in one.ready),
        data_seconds=0.0,
        forward_seconds=0.32 * one.seconds,
        backward_seconds=backward,
        optimizer_seconds=0.02 * one.seconds,
        spread_seconds=0.01 * one.seconds,
        cycle_seconds=0.005 if one.engine == "horovod" else 0.0,
        negotiates=one.engine == "horovod",
        threads=1,
    )
    network, own = named_network(one.network, "nccl", one.island), one.workers_per_host

    def at(workers: int) -> Cluster:
        hosts = max(1, workers // own)
        return Cluster(hosts, workers // hosts, 1024, network)

    base = predict_step(inputs, at(one.base)).step_seconds
    steps = {workers: predict_step(inputs, at(workers)) for workers in one.efficiencies}
    return [
        {
            "training": one.what,
            "workers": workers,
            "published": f"{100 * one.efficiencies[workers]:.0f} %",
            "model": f"{100 * base / step.step_seconds:.0f} %",
            "90 % interval": f"{100 * base / step.high_seconds:.0f} to "
            f"{min(100, 100 * base / step.low_seconds):.0f} %",
            "assumed": f"{one.network}, {one.island}, lone step {one.seconds * 1e3:.0f} ms",
        }
        for workers, step in steps.items()
    ]


def table() -> str:
    """All of it as Markdown."""
    rows = [row for one in PUBLISHED for row in rows_of(one)]
    return tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True)


if __name__ == "__main__":
    print(table())
