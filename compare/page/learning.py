"""The plots of a case at one number of workers: accuracy and speed over each run."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from compare.evidence.records import RunRecord
from compare.page.chart import MUTED, Key, Scale, linear, logarithmic
from compare.page.plot import Axis, Layer, Plot, Selection, Series, thinned, values_of
from recipe.record.schema import EpochLine, EvalLine

MAX_POINTS = 160  # of a line: a run of 450,000 steps must not make a page of 50 MB
ALL_POINTS = 900  # of all lines of a plot
MAX_TABLE_ROWS = 24
MAX_MARKS = 30  # of a line


def plots(selection: Selection) -> Iterator[Plot | None]:
    yield plot_by_epoch(selection, Metric("loss", "Loss", "cross-entropy", "{:.4g}"))
    yield from plot_loss_differences(selection)
    yield plot_by_epoch(selection, Metric("top1", "Top-1", "top-1, %", "{:.2f} %"))
    yield plot_by_epoch(selection, Metric("top5", "Top-5", "top-5, %", "{:.2f} %"))
    yield plot_time_to_accuracy(selection)


@dataclass(frozen=True)
class Metric:
    """A figure of epochs and evaluations."""

    field: str  # in metrics.jsonl
    name: str
    label: str  # of the axis
    pattern: str  # how a value is printed

    def points(self, lines: Sequence[EpochLine | EvalLine]) -> list[tuple[float, float]]:
        return [(line.epoch + 1, getattr(line, self.field)) for line in lines]


def plot_by_epoch(selection: Selection, metric: Metric) -> Plot | None:
    """Show a figure of training and validation against epochs; None if no run has any."""
    series = [epoch_series(selection, metric, run) for run in selection.runs]
    x, y = values_of(series)
    if not x:
        return None
    values = [value for value in y if math.isfinite(value)]
    is_loss = metric.field == "loss"
    # A logarithm where one bad epoch would press all others to the floor.
    steep = is_loss and values and min(values) > 0 and max(values) / min(values) > 30
    return Plot(
        selection.file_name(metric.field),
        selection.title(f"{metric.name} by epoch"),
        "Short dashes: training (augmented images); other lines: validation."
        f"{coincidence(selection.runs)}",
        Axis("epoch", linear(x)),
        Axis(metric.label, logarithmic(values) if steep else linear(values, zero=is_loss)),
        in_table(series),
        (("run", ""), ("last training", ""), ("last validation", "")),
        keys=[
            *selection.keys(run.configuration for run in selection.runs),
            Key("training", MUTED, dash="2 3.6", width=1.2),
            Key("validation", MUTED, width=1.6),
        ],
    )


def epoch_series(selection: Selection, metric: Metric, run: RunRecord) -> Series:
    look, name = selection.look(run.configuration), run_name(run)
    layers, last = [], []
    for kind, lines in (("training", run.epochs), ("validation", run.evaluations)):
        points = metric.points(lines)
        last.append(metric.pattern.format(points[-1][1]) if points else "–")
        shown = thinned(points, points_each(selection))
        texts = [f"{name}, {kind}, epoch {x:.3g}: {metric.pattern.format(y)}" for x, y in shown]
        if kind == "training":
            # Dashes of equal curves stand beside each other: each series has a length of its own.
            dash = f"2 {3.6 + 1.3 * look.index:g}"
            layers.append(Layer("line", shown, look.colour, 1.2, dash, 0.9, texts=texts))
        else:
            layers.append(look.line(shown, 1.5, 0.9, texts))
    return Series(layers, (name, *last))


def coincidence(runs: Sequence[RunRecord]) -> str:
    """Say why curves coincide, where they do."""
    weights = {(run.block, run.summary.weights_sha256) for run in runs}
    blocks = {run.block for run in runs}
    if len({run.configuration for run in runs}) > 1 and len(weights) == len(blocks):
        return (
            " The final weights of each block are bit-equal: the configurations’ curves coincide."
        )
    return ""


def plot_loss_differences(selection: Selection) -> Iterator[Plot | None]:
    """Show the difference of each judged pair's losses at the same step."""
    by_run = {(run.block, run.configuration): run for run in selection.runs}
    for first, second in selection.comparison.pairs:
        lines = {}
        for block in sorted({run.block for run in selection.runs}):
            a, b = by_run.get((block, first)), by_run.get((block, second))
            if a and b and (points := loss_difference(a, b)):
                lines[block] = points
        if lines:
            yield plot_loss_difference(selection, first, second, lines)


def loss_difference(a: RunRecord, b: RunRecord) -> list[tuple[float, float]]:
    """Return the loss of one run less the other's at each step in common, by epoch."""
    losses = {line.step: line.loss for line in b.steps}
    return [
        (line.samples_seen / images_per_epoch(a), line.loss - losses[line.step])
        for line in a.steps
        if line.step in losses
    ]


def plot_loss_difference(
    selection: Selection, first: str, second: str, lines: dict[int, list[tuple[float, float]]]
) -> Plot:
    look, most = selection.look(second), min(MAX_POINTS, max(24, ALL_POINTS // len(lines)))
    series = []
    for block, line in lines.items():
        shown = thinned(line, most, farthest_from_zero)
        texts = [f"block {block}, epoch {x:.3g}: {y:.3g}" for x, y in shown]
        apart = abs(farthest_from_zero([y for _, y in line]))
        layers = [Layer("line", shown, look.colour, 1.1, opacity=0.75, texts=texts)]
        series.append(Series(layers, (f"block {block}", str(len(line)), f"{apart:.3g}")))
    x, y = values_of(series)
    largest = max((abs(value) for value in y if math.isfinite(value)), default=0.0)
    return Plot(
        selection.file_name("loss-difference", first, second),
        selection.title(f"Loss of {first} minus {second}"),
        "Both computed the same training loss at every step, bit for bit."
        if not any(y)
        else "Difference of the training losses at the same step, one line per block (in long "
        "runs, the largest of neighbouring steps).",
        Axis("epoch", linear(x, zero=True)),
        Axis(
            "difference of loss",
            linear([-largest, largest], ticks=4) if largest else Scale(-1, 1, ((0, "0"),)),
        ),
        series,
        (("block", ""), ("steps in common", ""), ("largest difference", "")),
        height=150 if largest else 90,
    )


def plot_time_to_accuracy(selection: Selection) -> Plot | None:
    """Show validation top-1 against the training clock."""
    series = []
    runs = [run for run in selection.runs if run.evaluations]
    for run in runs:
        line = [(one.train_seconds_so_far, one.top1) for one in run.evaluations]
        shown, look = thinned(line, points_each(selection)), selection.look(run.configuration)
        texts = [f"{run_name(run)}: {y:.2f} % after {x:,.4g} s" for x, y in shown]
        layers = [look.line(shown, 1.3, 0.9, texts)]
        if len(line) <= MAX_MARKS:
            layers.append(Layer(look.marker, shown, look.colour, 2, opacity=look.opacity(0.9)))
        seconds, top1 = line[-1]
        series.append(Series(layers, (run_name(run), f"{top1:.2f}", f"{seconds:,.4g}")))
    if not runs:
        return None
    x, y = values_of(series)
    return Plot(
        selection.file_name("time-to-accuracy"),
        selection.title("Top-1 against time"),
        "Validation top-1 against training time, evaluation included. One line per run.",
        Axis("seconds since training began, evaluation included", linear(x, zero=True)),
        Axis("validation top-1, %", linear(y)),
        in_table(series),
        (("run", ""), ("last top-1", "%"), ("after", "s")),
        keys=selection.keys(run.configuration for run in runs),
    )


# --------------------------------------------------------------------------------------- helpers


def in_table(series: Sequence[Series]) -> list[Series]:
    """Leave all but the first MAX_TABLE_ROWS out of the table."""
    return [*series[:MAX_TABLE_ROWS], *(Series(one.layers) for one in series[MAX_TABLE_ROWS:])]


def points_each(selection: Selection) -> int:
    """Return how many points a line may have where so many runs are drawn."""
    return max(24, min(MAX_POINTS, ALL_POINTS // len(selection.runs)))


def farthest_from_zero(values: Sequence[float]) -> float:
    return max(values, key=lambda value: (math.isnan(value), abs(value)))


def run_name(run: RunRecord) -> str:
    return f"{run.configuration}, block {run.block}"


def images_per_epoch(run: RunRecord) -> float:
    return run.summary.samples_seen / run.summary.epochs
