"""Predict a training on more workers from measured runs of one and of two.

    python ddp_train/train.py ... --profile-steps 8 --name one
    torchrun --nproc-per-node 2 ddp_train/train.py ... --name two
    python compare/predict.py runs/one runs/two --network 25-ethernet --html prediction.html

A folder may also hold many runs, of both engines: each engine and transport is predicted by itself.
docs/prediction.md says what the model holds, and how far it was off where that could be checked.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from tabulate import tabulate
from tyro.conf import Positional, arg

from compare.page.prediction import render_prediction
from compare.prediction.inputs import MIB, Inputs, read_inputs, read_run
from compare.prediction.networks import GBIT, Cluster, named_network
from compare.prediction.step import at_batch, fit, predict_step
from recipe.command import run_tool
from recipe.errors import UserError, refuse
from recipe.files import replace_file

IMAGENET, EPOCHS = 1_281_167, 90
MOST = 4096  # workers


@dataclass(frozen=True)
class Settings:
    """Of the cluster to predict."""

    network: str = "10-ethernet"
    """Between hosts: 1-, 10-, 25-, 100-, 200- or 400-ethernet, 25-roce, 100-, 200- or
    400-infiniband."""
    island: str | None = None
    """Within a host with GPUs: pcie, nvlink-v100, nvlink-a100 or nvlink-h100."""
    workers_per_host: int = 1
    cores_per_host: int | None = None
    """Default: as many as the measured host has."""
    global_batch: int | None = None
    """Strong scaling: all workers share this batch. Default: each keeps its own (weak scaling)."""
    storage_gbyte_per_s: float = math.inf
    """What all hosts together can read."""
    price_per_node_hour: float = 0.0
    images: int = IMAGENET
    epochs: float = EPOCHS


def predict(
    runs: Positional[tuple[Path, ...]],
    settings: Settings,
    html: Annotated[Path | None, arg(metavar="FILE")] = None,
) -> list[str]:
    """Say what more workers would bring.

    Args:
        runs: Run folders, or folders that hold some.
        settings: Of the cluster.
        html: Write the page with sliders.
    """
    positive = settings.workers_per_host, settings.cores_per_host or 1, settings.images
    refuse(
        (min(positive) < 1, "--workers-per-host, --cores-per-host, --images: give 1 or more"),
        (settings.storage_gbyte_per_s <= 0, "--storage-gbyte-per-s: give more than 0"),
    )
    fitted = {}
    for name, inputs in configurations(runs).items():
        one_host = named_network(settings.network, inputs.transport, settings.island)
        fitted[name] = fit(inputs, one_host)
    lines = []
    for name, inputs in fitted.items():
        rows = [row_of(inputs, cluster, settings) for cluster in clusters(inputs, settings)]
        lines += [name, tabulate([row for row in rows if row], headers="keys", floatfmt=".3g"), ""]
    lines += sentences(fitted, settings)
    if html:
        base = {name: clusters(inputs, settings)[0] for name, inputs in fitted.items()}
        replace_file(html, render_prediction(fitted, base, settings))
        lines.append(f"Written: {html}")
    return lines


def configurations(paths: Sequence[Path]) -> dict[str, Inputs]:
    """The inputs of each engine and transport: runs of two workers of it, and those of one worker
    of the same engine, whose transport carries nothing."""
    folders = [one.parent for path in paths for one in sorted(path.rglob("summary.json"))]
    if not (read := [read_run(folder) for folder in folders]):
        raise UserError(f"{' '.join(map(str, paths))}: no complete run is there; give run folders")
    lone = [run for run in read if run.workers == 1]
    found = {}
    for run in read:
        environment, config = run.environment, run.config
        asked = environment.engine, config.arch, config.batch_size
        alone = [
            one.folder for one in lone
            if (one.environment.engine, one.config.arch, one.config.batch_size) == asked
        ]  # fmt: skip
        same = [
            one.folder for one in read
            if (one.environment.engine, one.config.arch, one.config.batch_size) == asked
            and one.workers > 1 and one.environment.transport == environment.transport
        ]  # fmt: skip
        if run.workers > 1 or not any(
            one.environment.engine == asked[0] for one in read if one.workers > 1
        ):
            name = f"{config.arch}, {environment.engine} over {environment.transport}"
            found[name] = read_inputs([*alone, *same])
    return found


def clusters(inputs: Inputs, settings: Settings) -> list[Cluster]:
    """1, 2, 4, ... workers, filling a host before the next."""
    network = named_network(settings.network, inputs.transport, settings.island)
    storage, own = settings.storage_gbyte_per_s * 1e9, settings.workers_per_host
    cores = settings.cores_per_host or inputs.cores
    sizes = [2**power for power in range(int(math.log2(MOST)) + 1)]
    return [Cluster(math.ceil(n / own), min(n, own), cores, network, 1, storage) for n in sizes]


def row_of(inputs: Inputs, cluster: Cluster, settings: Settings) -> dict[str, float]:
    """A line of the table; none where a worker has less than an image."""
    if settings.global_batch:
        if settings.global_batch < cluster.workers:
            return {}
        inputs = at_batch(inputs, settings.global_batch / cluster.workers)
    step = predict_step(inputs, cluster)
    hours = settings.images / step.images_per_second / 3600
    return {
        "workers": cluster.workers,
        "hosts": cluster.hosts,
        "step, ms": step.step_seconds * 1e3,
        "low": step.low_seconds * 1e3,
        "high": step.high_seconds * 1e3,
        "exposed": step.exposed_seconds * 1e3,
        "images/s": step.images_per_second,
        "efficiency": step.efficiency,
        "epoch, h": hours,
        "training, h": hours * settings.epochs,
        "cost": hours * settings.epochs * cluster.hosts * settings.price_per_node_hour,
    }


def sentences(fitted: dict[str, Inputs], settings: Settings) -> list[str]:
    """Where the better choice changes, and the knobs that the model would set."""
    lines = []
    for name, inputs in fitted.items():
        places = [one for one in clusters(inputs, settings) if one.workers > 1]
        rates = [
            rate for rate in (400, 200, 100, 50, 25, 10, 5, 3, 2, 1, 0.5, 0.2, 0.1)
            if fp16_pays(inputs, at_rate(settings, inputs, rate))
        ]  # fmt: skip
        if rates:
            below = f"{max(rates):g} Gb/s and below" if max(rates) < 400 else "all rates tried"
            lines.append(f"{name}: on 8 hosts the fp16 wire pays at {below}.")
        tried = {
            size: predict_step(with_knob(inputs, size * MIB), places[-1]).step_seconds
            for size in (1.0, 5.0, 25.0, 50.0, 100.0)
        }
        best = min(tried, key=tried.__getitem__)
        flag = f"--bucket-cap-mb {best:g}" if inputs.engine == "ddp" else (
            f"HOROVOD_FUSION_THRESHOLD={best * MIB:.0f}"
        )  # fmt: skip
        lines.append(f"{name}: {flag} is best by the model at {MOST} workers; --tune checks it.")
        if settings.global_batch:
            rows = [row for c in places if (row := row_of(inputs, c, settings))]
            top = max(rows, key=lambda row: row["images/s"], default=None)
            if top:
                lines.append(f"{name}: more than {top['workers']} workers gain nothing here.")
    names = list(fitted)
    for first in names:
        for second in names[names.index(first) + 1 :]:
            pair = fitted[first], fitted[second]
            if pair[0].arch != pair[1].arch:
                continue
            before = None  # who was faster, with intervals that lie apart
            for one, two in zip(*(clusters(inputs, settings) for inputs in pair), strict=True):
                own, other = predict_step(pair[0], one), predict_step(pair[1], two)
                if one.workers == 1 or max(own.low_seconds, other.low_seconds) < min(
                    own.high_seconds, other.high_seconds
                ):
                    continue
                now = first if own.step_seconds < other.step_seconds else second
                if now != before:
                    slower = second if now == first else first
                    lines.append(f"From {one.workers} workers on {now} is faster than {slower}.")
                before = now
    return lines


def with_knob(inputs: Inputs, size: float) -> Inputs:
    """Inputs with this bucket size, or fusion threshold."""
    if inputs.engine == "ddp":
        return replace(inputs, bucket_bytes=size)
    return replace(inputs, fusion_bytes=size)


def at_rate(settings: Settings, inputs: Inputs, gbit_per_s: float) -> Cluster:
    """8 hosts, with this rate between them."""
    network = named_network(settings.network, inputs.transport, settings.island)
    link = replace(network.between, bytes_per_second=gbit_per_s * GBIT)
    cores = settings.cores_per_host or inputs.cores
    return Cluster(8, settings.workers_per_host, cores, replace(network, between=link))


def fp16_pays(inputs: Inputs, cluster: Cluster) -> bool:
    """Whether gradients in 16 bits make the step shorter, casts included."""
    times = [
        predict_step(replace(inputs, wire_format=wire), cluster).step_seconds
        for wire in ("fp16", "fp32")
    ]
    return times[0] < times[1]


def main(argv: list[str] | None = None) -> int:
    """Predict what the command line asks for and return the exit code."""
    return run_tool("compare/predict.py", predict, __doc__, argv, errors=(UserError, OSError))


if __name__ == "__main__":
    sys.exit(main())
