"""Predict a training on more workers from measured runs of one worker and of two.

    python ddp_train/train.py ... --profile-steps 8 --name one
    torchrun --nproc-per-node 2 ddp_train/train.py ... --name two
    python compare/predict.py runs/one runs/two --network 25-ethernet --html prediction.html

A folder may also hold many runs, of both engines: each engine and transport is predicted
separately. Runs of more workers, or of two workers on two hosts, are not used for predictions, but
shown beside them. So a comparison checks the model:

    python compare/run.py prediction --out runs/check
    python compare/predict.py runs/check

docs/prediction.md describes the model, and its errors where they could be checked.
"""

import math
import sys
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from tyro.conf import Positional, arg

from compare.evidence.words import count
from compare.page.chart import COLOURS, MARKERS, Layer, Plot, Scale, linear, template
from compare.page.tables import Column, Table, table_text
from compare.prediction.inputs import Inputs, MeasuredRun, read_inputs, read_runs, unequal_in
from compare.prediction.model import Cluster, Prediction, at_batch, fit, named_network, predict_step
from recipe.command import run_tool
from recipe.errors import UserError, near_match
from recipe.files import replace_file
from recipe.record.schema import rate_text
from recipe.settings.presets import PRESETS, preset

# The training images of the data sets for which there are presets, by their --data; "": ImageNet.
TRAINING_IMAGES = {"": 1_281_167, "digits": 1_438, "fashion-mnist": 60_000}
# Published efficiencies that the model exceeds, and all published ones (tests check both numbers).
ABOVE_PUBLISHED = 7, 7
# From the recorded check; a test compares its table with this text.
PAST_ERROR = (
    "Past error: on CPUs, up to 8 workers, 128 predictions were off by 6% in the median, 51% at "
    "worst; 91% of the steps lay in their 90 % interval (results/epyc-2-cores/2026-11-25-"
    "prediction)."
)
MOST = 4096  # workers
# Networks in the page's chart, besides the chosen one.
ON_CPUS = ("1-ethernet", "10-ethernet", "25-ethernet", "100-ethernet")
ON_GPUS = ("25-roce", "100-infiniband", "200-infiniband", "400-infiniband")

Steps = list[tuple[Cluster, Prediction]]


@dataclass(frozen=True)
class Forecast:
    """The cluster and the training to predict."""

    # The network between hosts: 1-, 10-, 25-, 100-, 200- or 400-ethernet, 25-roce, 100-, 200- or
    # 400-infiniband. The rate in Gb/s is that of a host's link, which all its workers share.
    network: str = "10-ethernet"
    # Number of such links per host; 0.4 if one carries 40 % of its rate.
    links_per_host: float = 1.0
    # The connection of the GPUs within a host: pcie, nvlink-v100, nvlink-a100 or nvlink-h100.
    island: str | None = None
    workers_per_host: int = 1  # Number of workers per host, which share its links and cores.
    # Number of cores per host. Default: as many as the measured host has.
    cores_per_host: int | None = None
    # Strong scaling: all workers share this batch. Default: each keeps its own (weak scaling).
    global_batch: int | None = None
    price_per_node_hour: float = 0.0  # Price of a host for an hour, in any currency.
    # The training whose time and cost are shown. Default: that of the runs.
    preset: str | None = None
    # Images per epoch. Default: those of the preset's data set, or of the runs.
    images: int | None = None
    # Number of epochs. Default: that of the preset, or of the runs.
    epochs: float | None = None


def predict(
    runs: Positional[tuple[Path, ...]],
    settings: Forecast,
    html: Annotated[Path | None, arg(metavar="FILE")] = None,
) -> list[str]:
    """Predict steps, throughput, time and cost with more workers.

    Args:
        runs: Run folders, folders that hold some, or comparisons.
        settings: The cluster and the training to predict.
        html: Write a page with the tables and charts of the efficiency over several networks.
    """
    for name, value in vars(settings).items():
        is_free = name == "price_per_node_hour" and value == 0
        if isinstance(value, int | float) and not (0 < value < math.inf or is_free):
            raise UserError(f"--{name.replace('_', '-')} {value}: give a number above 0")
    measured = configurations(runs)
    inputs = {name: read_inputs(runs_of_it) for name, runs_of_it in measured.items()}
    settings = training_of(settings, [run for of_it in measured.values() for run in of_it])
    charts = {name: chart_of(inputs[name], settings) for name in measured}
    tables = {
        name: [row_of(step, cluster, settings) for cluster, step in chart[settings.network]]
        for name, chart in charts.items()
    }
    notes = [
        f"Training: {settings.images:,} images in each of {settings.epochs:g} epoch(s), without "
        "validation.",
        *sentences(tables),
        *limits(inputs.values(), settings),
        PAST_ERROR,
    ]
    checks = [
        check_of(name, run, inputs[name], settings)
        for name, runs_of_it in measured.items()
        for run in runs_of_it
        if run.workers > 1 and not run.is_pair
    ]
    doubts = doubts_on(measured)
    notes += [f"Warning: nothing is to be concluded: {doubt}" for doubt in doubts]
    if checks:
        notes += [] if doubts else [summary_of(checks)]
        tables["Measured, and predicted without it"] = checks
    shown = [table_of(name, rows) for name, rows in tables.items()]
    if html:
        plots = {name: plot_efficiency(name, chart) for name, chart in charts.items()}
        page = template("prediction.html.jinja")
        replace_file(html, page.render(tables=shown, plots=plots, sentences=notes))
        notes.append(f"Written: {html}")
    return [*(f"{table.title}\n{table_text(table)}\n" for table in shown), *notes]


def doubts_on(measured: dict[str, list[MeasuredRun]]) -> list[str]:
    """Return why nothing may be concluded from these runs, each reason once."""
    doubts = dict.fromkeys(run.doubt for runs in measured.values() for run in runs if run.doubt)
    for name, runs in measured.items():
        if unequal := unequal_in(runs):
            doubts[f"{name}: the runs differ in {'; '.join(unequal)}"] = None
    return list(doubts)


def table_of(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    """Return a table of these rows; their keys are the names of the columns."""
    columns = [
        Column(
            name,
            name,
            "{:,}" if isinstance(value, int) else "",
            is_number=not isinstance(value, str),
        )
        for name, value in rows[0].items()
    ]
    return Table(title, "", columns, rows, keys=[*rows[0]].index("workers") + 1)


def training_of(settings: Forecast, runs: Sequence[MeasuredRun]) -> Forecast:
    """Return the settings, with the images and epochs of the training whose time is shown.
    UserError if the preset's image size is not that of the runs."""
    trainings = [run.summary.fingerprint for run in runs]
    images = max(training.get("num_images", 0) for training in trainings)
    epochs = max(training.get("epochs", 0) for training in trainings)
    if settings.preset is not None:
        if settings.preset not in PRESETS:
            problem = near_match(settings.preset, PRESETS)
            raise UserError(f"--preset {settings.preset}: {problem}")
        recipe = preset(settings.preset)
        sizes = {training.get("train_crop_size") for training in trainings}
        others = sizes - {recipe.train_crop_size}
        if others:
            raise UserError(
                f"--preset {settings.preset} trains on images of {recipe.train_crop_size} pixels, "
                f"but these runs on {', '.join(map(str, others))}, so they say nothing about its "
                "time. Measure runs of that size, or leave --preset out"
            )
        images, epochs = TRAINING_IMAGES[recipe.data], float(recipe.epochs)
    return replace(settings, images=settings.images or images, epochs=settings.epochs or epochs)


def limits(all_inputs: Collection[Inputs], settings: Forecast) -> list[str]:
    """Return sentences on the limits of predictions from these inputs, where they matter."""
    lines = []
    if any(inputs.transport == "nccl" for inputs in all_inputs):
        lines.append(
            "On GPUs images/s and efficiency are upper bounds: the model was above the published "
            "efficiency in {} of {} cases (docs/prediction.md).".format(*ABOVE_PUBLISHED)
        )
    if any(inputs.pair_seconds is None and inputs.transport != "nccl" for inputs in all_inputs):
        lines.append(
            "No run of two workers on one host was given, so it was not measured what messages "
            "cost, and how much ranks on one host slow each other down."
        )
    if settings.global_batch and any(inputs.fixed_share is None for inputs in all_inputs):
        lines.append(
            "Upper bound: it is not known which part of a step does not shrink with the batch. "
            "Also give runs of one worker with a smaller --batch-size."
        )
    return lines


def configurations(paths: Sequence[Path]) -> dict[str, list[MeasuredRun]]:
    """Return the runs of each model, batch, engine and transport: those of several workers, and
    those of one worker, which use no transport."""
    read = [run for path in paths for run in read_runs(path)]
    where = " ".join(map(str, paths)) or "no folder was given"
    if not read:
        raise UserError(f"{where}: no complete run is there; give run folders or a comparison")
    by_name, trainings = {}, defaultdict[tuple[str, str], list[MeasuredRun]](list)
    for run in {run.folder: run for run in read}.values():
        trainings[str(run.config.arch), run.environment.engine].append(run)
    for (arch, engine), runs in sorted(trainings.items()):
        lone = [run for run in runs if run.workers == 1]
        kinds = {run.kind for run in runs if run.workers > 1}
        for batch, transport in sorted(kinds or {(max(run.batch_size for run in lone), "")}):
            over = f" over {transport}" if transport else ""
            by_name[f"{arch}, batch {batch}, {engine}{over}"] = [
                run
                for run in runs
                if (run.batch_size <= batch if run.workers == 1 else run.kind == (batch, transport))
            ]
    return by_name


def check_of(name: str, run: MeasuredRun, inputs: Inputs, settings: Forecast) -> dict[str, Any]:
    """Return a row for a run that no prediction used: its step as measured and as predicted, and
    the relative error, which is 0.05 if the predicted step is 5 % too long."""
    of = settings.network, inputs.transport, settings.island, settings.links_per_host
    network, per_host = named_network(*of), run.environment.local_size
    cluster = Cluster(math.ceil(run.workers / per_host), per_host, run.environment.cores, network)
    step = predict_step(fit(inputs, network), cluster)
    return {
        "of": name,
        "workers": run.workers,
        "hosts": cluster.hosts,
        "measured, ms": run.seconds * 1e3,
        "predicted": step.step_seconds * 1e3,
        "low": step.low_seconds * 1e3,
        "high": step.high_seconds * 1e3,
        "error": step.step_seconds / run.seconds - 1,
    }


def summary_of(checks: Sequence[dict[str, Any]]) -> str:
    """Return a sentence on the errors of predictions, and on how many intervals were right."""
    errors = [abs(row["error"]) for row in checks]
    inside = sum(row["low"] <= row["measured, ms"] <= row["high"] for row in checks)
    return (
        f"Checked here on {count(len(checks), 'run')} of up to "
        f"{max(row['workers'] for row in checks)} workers that no prediction used: off by "
        f"{median(errors):.1%} in the median, {max(errors):.1%} at worst; "
        f"{inside / len(checks):.0%} of the steps lay in their 90 % interval."
    )


def chart_of(inputs: Inputs, settings: Forecast) -> dict[str, Steps]:
    """Return by network, the chosen one first, the steps at 1, 2, 4, ... workers. Workers fill one
    host after the other, and have at least one image each."""
    others = ON_GPUS if inputs.transport == "nccl" else ON_CPUS
    batch, per_host = settings.global_batch, settings.workers_per_host
    cores = settings.cores_per_host or inputs.cores
    numbers = [2**power for power in range(int(math.log2(MOST)) + 1)]
    chart = dict[str, Steps]()
    for name in dict.fromkeys([settings.network, *others]):
        network = named_network(name, inputs.transport, settings.island, settings.links_per_host)
        fitted = fit(inputs, network)
        chart[name] = []
        for workers in numbers:
            if batch and batch < workers:
                break
            cluster = Cluster(math.ceil(workers / per_host), min(workers, per_host), cores, network)
            inputs_here = at_batch(fitted, batch / workers) if batch else fitted
            chart[name].append((cluster, predict_step(inputs_here, cluster)))
    return chart


def row_of(step: Prediction, cluster: Cluster, settings: Forecast) -> dict[str, float]:
    """Return a row of the table."""
    hours = (settings.images or 0) / step.images_per_second / 3600
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


def sentences(tables: dict[str, list[dict[str, float]]]) -> list[str]:
    """Return sentences: where more workers gain nothing, and where the fastest choice changes."""
    lines = []
    for name, rows in tables.items():
        top = max(rows, key=lambda row: row["images/s"])
        if top != rows[-1]:
            lines.append(f"{name}: more than {top['workers']} workers gain nothing here.")
    for model, group in groupby(sorted(tables), key=lambda name: name.rpartition(", ")[0]):
        names = [*group]  # of one model and batch
        by_size = [*zip(*(tables[name] for name in names), strict=False)][1:]
        ranges = groupby(by_size, key=lambda rows: fastest(names, rows))
        first = [(next(same)[0]["workers"], words) for words, same in ranges]
        if len(names) > 1:
            lines += [f"{model}: from {size} workers on {words}." for size, words in first]
    return lines


def fastest(names: Sequence[str], rows: Sequence[dict[str, float]]) -> str:
    """Return words that name the fastest, if its interval does not overlap with the others'."""
    (first, name), *others = sorted(zip(rows, names, strict=True), key=lambda x: x[0]["step, ms"])
    is_clear = all(first["high"] < row["low"] for row, _ in others)
    return f"{name} is the fastest" if is_clear else f"none of {len(rows)} is clearly the fastest"


# -- The page: tables, and a chart over numbers of workers for several networks --------------------


def plot_efficiency(name: str, chart: dict[str, Steps]) -> Plot:
    """Draw the efficiency over the number of workers (log2 axis), with a line for each network."""
    layers = list[Layer]()
    for (network, steps), colour, marker in zip(chart.items(), COLOURS, MARKERS, strict=False):
        points = [(math.log2(cluster.workers), 100 * step.efficiency) for cluster, step in steps]
        texts = [
            f"{network}, {cluster.workers:,} workers: {100 * step.efficiency:.0f} %, "
            f"{rate_text(step.images_per_second)} images/s, step {1e3 * step.low_seconds:.0f} to "
            f"{1e3 * step.high_seconds:.0f} ms"
            for cluster, step in steps
        ]
        layers.append(Layer("line", points, colour, 1.4, key=network))
        layers.append(Layer(marker, points, colour, 2.6, texts=texts, key=network))
    most = max(doubled for layer in layers for doubled, _ in layer.points)
    ticks = [(power, f"{2**power:,}") for power in range(0, int(most) + 1, 2)]
    return Plot(
        "efficiency",
        name,
        "Images/s of all workers, in per cent of the same number of workers without exchange.",
        Scale(0, most or 1, ticks, "workers"),
        linear([100], "efficiency, %", zero=True),
        layers,
    )


main = partial(run_tool, "compare/predict.py", predict, __doc__)


if __name__ == "__main__":
    sys.exit(main())
