"""Predict a training on more workers from measured runs of one and of two.

    python ddp_train/train.py ... --profile-steps 8 --name one
    torchrun --nproc-per-node 2 ddp_train/train.py ... --name two
    python compare/predict.py runs/one runs/two --network 25-ethernet --html prediction.html

A folder may also hold many runs, of both engines: each engine and transport is predicted by itself.
docs/prediction.md says what the model holds, and how far it was off where that could be checked.
"""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

from tabulate import tabulate
from tyro.conf import Positional, arg

from compare.evidence.collectives import read_measurement
from compare.page.prediction import render_prediction
from compare.plan.environment import ROOT
from compare.prediction.inputs import MIB, Inputs, read_inputs, read_run
from compare.prediction.networks import GBIT, Cluster, Network, measured_link, named_network
from compare.prediction.step import at_batch, fit, predict_step, simulate
from recipe.command import run_tool
from recipe.errors import UserError, near_match, refuse
from recipe.files import replace_file
from recipe.presets import PRESETS

IMAGENET = 1_281_167
MOST = 4096  # workers
RATES = (0.1, 0.2, 0.5, 1, 2, 3, 5, 10, 25, 50, 100, 200, 400)  # Gb/s at which fp16 is tried


@dataclass(frozen=True)
class Settings:
    """Of the cluster to predict."""

    network: str = "10-ethernet"
    """Between hosts: 1-, 10-, 25-, 100-, 200- or 400-ethernet, 25-roce, 100-, 200- or
    400-infiniband."""
    island: str | None = None
    """Within a host with GPUs: pcie, nvlink-v100, nvlink-a100 or nvlink-h100."""
    collectives: Path | None = None
    """What compare/collectives.py measured with two workers on CPUs: on one host, or with --hosts
    on two, whose network is then this one."""
    workers_per_host: int = 1
    cores_per_host: int | None = None
    """Default: as many as the measured host has."""
    global_batch: int | None = None
    """Strong scaling: all workers share this batch. Default: each keeps its own (weak scaling)."""
    storage_gbyte_per_s: float = math.inf
    """What all hosts together can read."""
    price_per_node_hour: float = 0.0
    preset: str = "goyal-90"
    """The training whose time and cost are shown, by its epochs and images."""
    images: int | None = None
    """Of an epoch. Default: the preset's data, 1,281,167 of ImageNet or those of the runs."""
    epochs: float | None = None
    """Default: the preset's."""


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
    positive = (
        settings.workers_per_host, settings.cores_per_host or 1, settings.images or 1,
        settings.epochs or 1, settings.global_batch or 1,
    )  # fmt: skip
    refuse(
        (
            min(positive) <= 0,
            "--workers-per-host, --cores-per-host, --images, --epochs, --global-batch: above 0",
        ),
        (settings.storage_gbyte_per_s <= 0, "--storage-gbyte-per-s: give more than 0"),
        (
            settings.preset not in PRESETS,
            f"--preset {settings.preset}: {near_match(settings.preset, PRESETS)}",
        ),
    )
    known, recipe = configurations(runs), PRESETS[settings.preset]()
    own_images = max(inputs.images for inputs in known.values())
    images = settings.images or (own_images if recipe.data else IMAGENET)
    settings = replace(settings, images=images, epochs=settings.epochs or float(recipe.epochs))
    fitted, places, tables, lines = {}, {}, {}, []
    for name, inputs in known.items():
        places[name] = clusters(inputs, settings)
        fitted[name] = fit(inputs, places[name][0].network)
        rows = [row_of(fitted[name], cluster, settings) for cluster in places[name]]
        tables[name] = [row for row in rows if row]
        shown = [
            {of: f"{x if isinstance(x, int) else float(f'{x:.3g}'):,.9g}" for of, x in row.items()}
            for row in tables[name]
        ]
        lines += [
            name,
            tabulate(shown, headers="keys", disable_numparse=True, stralign="right"),
            "",
        ]
    lines.append(f"Training: {settings.epochs:g} epochs of {images:,} images, validation left out.")
    lines += [*sentences(fitted, places, tables), past_error()]
    if html:
        base = {name: clusters[0] for name, clusters in places.items()}
        replace_file(html, render_prediction(fitted, base, settings, past_error()))
        lines.append(f"Written: {html}")
    return lines


def past_error(results: Path = ROOT / "results") -> str:
    """How far predictions were off, by the newest check among the recorded results."""
    tables = sorted(results.glob("*/*-prediction/table.json"), key=lambda path: path.parent.name)
    if not tables:
        return "Past error: not checked on recorded runs yet."
    return (
        "Past error: on CPUs, up to {workers} workers, {points} predictions were off by "
        "{median:.0%} in the median, {worst:.0%} at worst; {covered:.0%} of the steps lay in their "
        "90 % interval ({folder})."
    ).format(
        **json.loads(tables[-1].read_text()), folder=tables[-1].parent.relative_to(results.parent)
    )


def configurations(paths: Sequence[Path]) -> dict[str, Inputs]:
    """The inputs of each model, batch, engine and transport: from its runs of several workers and
    those of one worker, whose transport carries nothing."""
    folders = {one.parent for path in paths for one in sorted(path.rglob("summary.json"))}
    if not (read := [read_run(folder) for folder in sorted(folders)]):
        raise UserError(f"{' '.join(map(str, paths))}: no complete run is there; give run folders")
    groups: dict[tuple[object, ...], dict[str, list[Path]]] = {}
    for run in read:
        config, environment = run.config, run.environment
        training = config.arch, config.batch_size, environment.engine
        transport = environment.transport if run.workers > 1 else ""
        groups.setdefault(training, {}).setdefault(transport, []).append(run.folder)
    found = {}
    for (arch, batch, engine), by_transport in groups.items():
        alone = by_transport.pop("", [])
        for transport, folders_of in (by_transport or {"": []}).items():
            over = f" over {transport}" if transport else ""
            found[f"{arch}, batch {batch}, {engine}{over}"] = read_inputs([*alone, *folders_of])
    return found


def network_of(inputs: Inputs, settings: Settings) -> Network:
    """The named network, with the link that was measured."""
    named = settings.network, inputs.transport, settings.island
    if settings.collectives is None:
        return named_network(*named)
    measurement = read_measurement(settings.collectives)
    link = measured_link(measurement, inputs.engine, inputs.transport)
    if not measurement.plan.get("hosts"):
        return named_network(*named, link)
    network = named_network(*named)  # between hosts a byte takes the link's time, not a CPU's
    rate = 1 / max(link.cpu_seconds_per_byte, 1e-15)
    between = replace(
        network.between, latency_seconds=link.latency_seconds, bytes_per_second=rate,
        both_ways_factor=1.0,
    )  # fmt: skip
    return replace(network, between=between)


def clusters(inputs: Inputs, settings: Settings) -> list[Cluster]:
    """1, 2, 4, ... workers, filling a host before the next."""
    network, own = network_of(inputs, settings), settings.workers_per_host
    storage, cores = settings.storage_gbyte_per_s * 1e9, settings.cores_per_host or inputs.cores
    sizes = [2**power for power in range(int(math.log2(MOST)) + 1)]
    return [Cluster(math.ceil(n / own), min(n, own), cores, network, 1, storage) for n in sizes]


def row_of(inputs: Inputs, cluster: Cluster, settings: Settings) -> dict[str, float]:
    """A line of the table; none where a worker has less than an image."""
    if settings.global_batch:
        if settings.global_batch < cluster.workers:
            return {}
        inputs = at_batch(inputs, settings.global_batch / cluster.workers)
    step = predict_step(inputs, cluster)
    hours = (settings.images or IMAGENET) / step.images_per_second / 3600
    training = hours * (settings.epochs or 1)
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
        "training, h": training,
        "cost": training * cluster.hosts * settings.price_per_node_hour,
    }


def sentences(
    fitted: dict[str, Inputs],
    places: dict[str, list[Cluster]],
    tables: dict[str, list[dict[str, float]]],
) -> list[str]:
    """The knobs that the model would set, and where the better choice changes."""
    lines = []
    rivals: dict[object, list[str]] = {}
    for name, inputs in fitted.items():
        tried = {}
        for size in (1.0, 5.0, 25.0, 50.0, 100.0):
            # Each engine looks at its own.
            own = replace(
                inputs, first_bucket_bytes=size * MIB, bucket_bytes=size * MIB,
                fusion_bytes=size * MIB,
            )  # fmt: skip
            tried[size] = simulate(own, places[name][-1]).seconds
        best = min(tried, key=tried.__getitem__)
        ddp = inputs.engine == "ddp"
        flag = f"--bucket-cap-mb {best:g}" if ddp else f"HOROVOD_FUSION_THRESHOLD={best * MIB:.0f}"
        rates = [rate for rate in RATES if fp16_pays(inputs, places[name][-1], rate)]
        pays = f"pays up to {rates[-1]:g} Gb/s" if rates else "does not pay"
        lines.append(
            f"{name}: on 8 hosts the fp16 wire {pays}; at {MOST} workers {flag} is best "
            "(compare/run.py --tune checks it)."
        )
        top = max(tables[name], key=lambda row: row["images/s"])
        if top != tables[name][-1]:
            lines.append(f"{name}: more than {top['workers']} workers gain nothing here.")
        rivals.setdefault((inputs.arch, inputs.batch_size), []).append(name)
    for names in rivals.values():
        before = ""
        for at in range(1, len(tables[names[0]]) if len(names) > 1 else 0):
            rows = {name: tables[name][at] for name in names}
            first, *others = sorted(names, key=lambda name: rows[name]["step, ms"])
            apart = all(rows[first]["high"] < rows[name]["low"] for name in others)
            now = (
                f"{first} is the fastest." if apart else f"none of {len(names)} is clearly faster."
            )
            if now != before:
                lines.append(f"From {rows[first]['workers']} workers on {now}")
            before = now
    return lines


def fp16_pays(inputs: Inputs, cluster: Cluster, gbit_per_s: float) -> bool:
    """Whether gradients in 16 bits make a step on 8 hosts shorter, casts included, with links of
    this rate."""
    link = replace(cluster.network.between, bytes_per_second=gbit_per_s * GBIT)
    cluster = replace(cluster, hosts=8, network=replace(cluster.network, between=link))
    narrow, wide = (
        simulate(replace(inputs, wire_format=wire), cluster).seconds for wire in ("fp16", "fp32")
    )
    return narrow < wide


main = partial(run_tool, "compare/predict.py", predict, __doc__, errors=(UserError, OSError))


if __name__ == "__main__":
    sys.exit(main())
