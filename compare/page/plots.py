"""The page's plots in their groups, and those of speed; those of learning are in learning.py."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from compare.evidence.paired import Estimate
from compare.evidence.phases import ALONE, PHASES, PhaseRow, phase_rows
from compare.evidence.records import Comparison, RunRecord
from compare.evidence.rows import efficiency
from compare.evidence.verdicts import Verdict, judge
from compare.evidence.words import count, three_digits
from compare.page import learning
from compare.page.chart import INK, LINE, MUTED, Key, Scale, categories, linear, whole
from compare.page.plot import ROW_HEIGHT, Axis, Layer, Plot, Selection, Series

IDEAL = "1.5 2"  # dashes
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
BOX_GAP = 6.0  # between the boxes of a row
# Colour and opacity of each phase: greys for computing, colours for waiting.
PHASE_STYLES = {
    "data_seconds": ("var(--series-2)", 0.9),
    "forward_seconds": (MUTED, 0.35),
    "backward_seconds": (MUTED, 0.65),
    "exposed_communication_seconds": ("var(--series-1)", 0.95),
    "optimizer_seconds": (INK, 0.85),
}


@dataclass(frozen=True)
class PlotGroup:
    """Plots under a common heading; folded away where they say less than the others."""

    title: str
    plots: Sequence[Plot]
    folded: bool = False


def draw_plots(comparison: Comparison) -> list[PlotGroup]:
    """Return the page's plots but the verdict's, which stands with its sentence.

    The learning curves of all numbers of workers but the largest are folded away, and with several
    cases all of them.
    """
    groups = []
    several = len(comparison.cases) > 1
    order = comparison.plan["configurations"].index
    for case in comparison.cases:
        runs = [run for run in comparison.complete if run.case == case]
        if not runs:
            continue
        runs.sort(key=lambda run: order(run.configuration))
        selection = Selection(comparison, case, runs)
        speed = present(draw(selection) for draw in SPEED_PLOTS)
        groups.append(PlotGroup(selection.title("Speed"), speed))
        numbers = sorted({run.workers for run in runs}, reverse=True)
        for workers in numbers:
            chosen = [run for run in runs if run.workers == workers]
            selection = Selection(comparison, case, chosen, workers)
            folded = several or workers != numbers[0]
            plots = present(learning.plots(selection))
            groups.append(PlotGroup(selection.title("Learning"), plots, folded))
    return groups


def all_plots(comparison: Comparison) -> list[Plot]:
    """Return every plot, the verdict's first."""
    grouped = [plot for group in draw_plots(comparison) for plot in group.plots]
    return [*present([plot_verdicts(judge(comparison))]), *grouped]


def present(plots: Iterable[Plot | None]) -> list[Plot]:
    return [plot for plot in plots if plot is not None]


def named(case: str) -> str:
    """Return what stands before other words of a title: nothing in a plan without cases."""
    return f"{case}, " if case else ""


# ------------------------------------------------------------------------------------ the verdict


def plot_verdicts(verdicts: Sequence[Verdict]) -> Plot | None:
    """Show each block's ratio, the point estimate and its interval, around equal speed."""
    shown = [(verdict, verdict.speed) for verdict in verdicts if verdict.speed is not None]
    if not shown:
        return None
    values = [1.0]
    for _, speed in shown:
        values += [*speed.ratios, speed.low or 1, speed.high or 1]
    reach = max(max(values) - 1, 1 - min(values), 0.01)
    ticks = linear([max(0.02, 1 - reach), 1 + reach]).ticks
    pairs = {(verdict.first, verdict.second) for verdict, _ in shown}
    first, second = next(iter(pairs)) if len(pairs) == 1 else ("the first", "the second")
    series = []
    for y, (verdict, speed) in enumerate(shown):
        pair = f"{verdict.first} / {verdict.second}, " if len(pairs) > 1 else ""
        name = f"{named(verdict.case)}{pair}{count(verdict.workers, 'worker')}"
        series.append(verdict_series(y, name, speed))
    return Plot(
        "verdict",
        "Speed ratio and its 95 % interval",
        "Diamond and line: point estimate and 95 % interval. Rings: the ratio of each block. "
        "Dashed line: equal speed.",
        Axis(
            f"speed of {first} / speed of {second}",
            Scale(max(0.0, 1 - 1.12 * reach), 1 + 1.12 * reach, ticks),
        ),
        Axis("", categories(len(shown))),
        series,
        (("compared", ""), ("speed ratio", ""), ("95 % interval", ""), ("blocks", "")),
        height=ROW_HEIGHT * len(shown),
        ends=(f"{second} faster", f"{first} faster"),
        rule=1,
    )


def verdict_series(y: int, name: str, speed: Estimate) -> Series:
    layers, interval = [], "none"
    if speed.low is not None and speed.high is not None:
        layers.append(Layer("line", [(speed.low, y), (speed.high, y)], INK, 1.6))
        interval = f"{speed.low:.3f} to {speed.high:.3f}"
    told = f"{name}: ratio {speed.ratio:.3f}, interval {interval}"
    layers.append(Layer("diamond", [(speed.ratio, y)], INK, 3.4, texts=[told]))
    blocks = [
        f"{name}, ratio {block} of {speed.blocks}: {ratio:.3f}"
        for block, ratio in enumerate(speed.ratios, start=1)
    ]
    rings = [(ratio, y + 0.26) for ratio in speed.ratios]
    layers.append(Layer("circle", rings, MUTED, 2, hollow=True, texts=blocks))
    return Series(layers, (name, f"{speed.ratio:.3f}", interval, str(speed.blocks)), name)


# ------------------------------------------------------------------------------- against workers


@dataclass(frozen=True)
class Figure:
    """A figure that each run has, plotted against the number of workers."""

    name: str
    title: str
    unit: str
    pattern: str  # how a value is printed
    caption: str
    value_of: Callable[[RunRecord], float | None]


def plot_throughput(selection: Selection) -> Plot:
    figure = Figure(
        "throughput",
        "Training throughput",
        "images/s",
        "{:,.4g}",
        "Training images per second of all workers, without the first steps and evaluation. Lines: "
        "medians; small marks: single runs; dotted: ideal scaling.",
        lambda run: run.summary.images_per_second,
    )
    medians = median_lines(selection, figure)
    ideal = [[(n, line[0][1] * n / line[0][0]) for n, _ in line] for line in medians.values()]
    return plot_against_workers(selection, figure, ideal)


def plot_efficiency(selection: Selection) -> Plot | None:
    """Show scaling efficiency; None if only one number of workers was measured."""
    numbers = sorted({run.workers for run in selection.runs})
    if len(numbers) == 1:
        return None

    def percent(run: RunRecord) -> float | None:
        if run.workers == numbers[0]:
            return 100.0
        share = efficiency(selection.comparison, run)
        return None if share is None else 100 * share

    figure = Figure(
        "efficiency",
        "Scaling efficiency",
        "% of ideal",
        "{:.1f}",
        "Images per second per worker, as a percentage of the same block’s run with "
        f"{count(numbers[0], 'worker')}.",
        percent,
    )
    return plot_against_workers(selection, figure, [[(n, 100.0) for n in numbers]])


def plot_train_seconds(selection: Selection) -> Plot | None:
    """Show the training time; None if only one number of workers was measured."""
    if len({run.workers for run in selection.runs}) == 1:
        return None
    # The last step of an epoch reaches into the next one: 4.0056 epochs are printed as 4.
    epochs = {float(f"{run.summary.epochs:.2g}") for run in selection.runs}
    steps = {run.summary.steps for run in selection.runs}
    what = "what each run trained"
    if len(epochs) == 1:
        what = f"{min(epochs):g} epoch{'s' * (epochs != {1.0})}"
    caption = f"Training time for {what}, evaluation included."
    if len(steps) == 1:
        made = count(min(steps), "step")
        caption += f" Every run made {made}, so more workers saw more images."
    figure = Figure(
        "training-time",
        "Training time",
        "seconds",
        "{:,.4g}",
        caption,
        lambda run: run.summary.train_seconds,
    )
    return plot_against_workers(selection, figure, [])


def median_lines(selection: Selection, figure: Figure) -> dict[str, list[tuple[int, float]]]:
    """Return each configuration's medians by number of workers, those that were measured."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for (workers, name), runs in selection.cells(selection.runs).items():
        values = [value for run in runs if (value := figure.value_of(run)) is not None]
        if values:
            lines.setdefault(name, []).append((workers, median(values)))
    return lines


def plot_against_workers(
    selection: Selection, figure: Figure, ideal: list[list[tuple[int, float]]]
) -> Plot:
    """Show a figure of each run and its median for each configuration."""
    numbers = sorted({run.workers for run in selection.runs})
    span = numbers[-1] - numbers[0]
    medians = median_lines(selection, figure)
    series = [Series([Layer("line", line, MUTED, 1, IDEAL)]) for line in ideal]
    values = [value for line in ideal for _, value in line]
    for order, (name, line) in enumerate(medians.items()):
        look = selection.look(name)
        # Side by side rather than on top of each other.
        shift = (order - (len(medians) - 1) / 2) * (0.03 * span or 0.1)
        runs = [
            (run.workers, value)
            for run in sorted(selection.runs, key=lambda run: run.workers)
            if run.configuration == name and (value := figure.value_of(run)) is not None
        ]
        values += [value for _, value in runs]
        texts = [
            f"{name}, {count(n, 'worker')}: {figure.pattern.format(value)} {figure.unit}"
            for n, value in runs
        ]
        shifted = [(n + shift, value) for n, value in line]
        marks = [(n + shift, value) for n, value in runs]
        printed = {n: figure.pattern.format(value) for n, value in line}
        series.append(
            Series(
                [
                    Layer("line", shifted, look.colour, 1.7, look.dash),
                    Layer(look.marker, marks, look.colour, 2, opacity=0.5, texts=texts),
                    Layer(look.marker, shifted, look.colour, 3.4),
                ],
                (name, *(printed.get(n, "–") for n in numbers)),
            )
        )
    keys = selection.keys((run for run in selection.runs if run.configuration in medians), True)
    return Plot(
        selection.file_name(figure.name),
        selection.title(figure.title),
        figure.caption,
        Axis("workers", whole(numbers, margin=0.12)),
        Axis(figure.unit, linear(values, zero=True)),
        series,
        (("configuration", ""), *((count(n, "worker"), figure.unit) for n in numbers)),
        keys=keys + [Key("ideal", MUTED, dash=IDEAL, width=1)] * bool(ideal),
    )


# ----------------------------------------------------------------------------- a row for each cell


def plot_step_times(selection: Selection) -> Plot | None:
    """Show how the times of single steps are distributed, a box for each run's steps."""
    boxes = {
        run.folder: quantiles([1000 * line.seconds for line in run.steps])
        for run in selection.runs
        if run.steps
    }
    cells = selection.cells(run for run in selection.runs if run.folder in boxes)
    if not cells:
        return None
    row_height = LINE + BOX_GAP * max(map(len, cells.values())) + 8
    series = []
    for y, ((workers, name), runs) in enumerate(cells.items()):
        look, cell = selection.look(name), f"{name}, {count(workers, 'worker')}"
        layers = []
        for order, run in enumerate(runs):
            at = y + (LINE / 2 + (order - (len(runs) - 1) / 2) * BOX_GAP) / row_height
            low, first, middle, third, high = boxes[run.folder]
            told = (
                f"{name}, {count(workers, 'worker')}, block {run.block}: median "
                f"{three_digits(middle)} ms, 5 to 95 %: {three_digits(low)} to "
                f"{three_digits(high)} ms"
            )
            layers += [
                Layer("line", [(low, at), (high, at)], look.colour, 1),
                Layer("bar", [(first, at), (third, at)], look.colour, 4, opacity=0.5),
                Layer(look.marker, [(middle, at)], look.colour, 2.3, texts=[told]),
            ]
        parts = zip(*(boxes[run.folder] for run in runs), strict=True)
        medians = [three_digits(median(part)) for part in parts]
        series.append(Series(layers, (cell, *medians), cell))
    return Plot(
        selection.file_name("step-times"),
        selection.title("Step times"),
        "One line per run, from the 5th to the 95th percentile of its step times; thick: 25th to "
        "75th percentile; mark: median.",
        Axis("milliseconds per step", linear([box[4] for box in boxes.values()], zero=True)),
        Axis("", categories(len(cells))),
        series,
        (("configuration", ""), *((f"{100 * part:.0f} %", "ms") for part in QUANTILES)),
        height=row_height * len(cells),
        above=row_height / 2 - LINE + 2,
    )


def quantiles(values: Iterable[float]) -> list[float]:
    """Return the values at QUANTILES."""
    ordered = sorted(values)
    return [ordered[min(int(part * len(ordered)), len(ordered) - 1)] for part in QUANTILES]


def plot_phases(selection: Selection) -> Plot | None:
    """Show what a step's time is made of; None if no run measured it."""
    rows = [row for row in phase_rows(selection.comparison) if row.case == selection.case]
    if not rows:
        return None
    unsplit = [row for row in rows if row.exposed_communication_seconds is None]
    names = dict(PHASES)
    if any(row.workers == 1 and row not in unsplit for row in rows):
        names |= {f: f"{PHASES[f]} (one worker: {name})" for f, name in ALONE.items()}
    return Plot(
        selection.file_name("step-breakdown"),
        selection.title("Time per step by phase"),
        phases_caption(rows, unsplit),
        Axis("milliseconds per step", linear([1000 * row.step_seconds for row in rows], zero=True)),
        Axis("", categories(len(rows))),
        [phase_series(y, row) for y, row in enumerate(rows)],
        (("configuration", ""), *((name, "ms") for name in names.values()), ("step", "ms")),
        height=ROW_HEIGHT * len(rows),
        keys=[
            Key(name, PHASE_STYLES[field][0], "box", opacity=PHASE_STYLES[field][1])
            for field, name in PHASES.items()
            if field != "exposed_communication_seconds" or len(unsplit) < len(rows)
        ],
    )


def phase_series(y: int, row: PhaseRow) -> Series:
    cell = f"{row.configuration}, {count(row.workers, 'worker')}"
    at, texts, layers = 0.0, [], []
    for field, name in row.words.items():
        seconds = getattr(row, field)
        if seconds is None:
            texts.append("not measured")
            continue
        ms, share = 1000 * seconds, 100 * seconds / row.step_seconds
        # Noise may bring the difference of two means below 0; a bar cannot be there.
        end = at + max(0.0, ms)
        told = f"{cell}: {name} {ms:.3g} ms, {share:.1f} % of the step"
        colour, opacity = PHASE_STYLES[field]
        bar = [(at, y + 0.14), (end, y + 0.14)]
        layers.append(Layer("bar", bar, colour, 13, opacity=opacity, texts=[told]))
        texts.append(f"{ms:.3g}")
        at = end
    step = f"{1000 * row.step_seconds:.3g}"
    return Series(layers, (cell, *texts, step), cell, f"{step} ms")


def phases_caption(rows: list[PhaseRow], unsplit: list[PhaseRow]) -> str:
    sentences = ["Means over the steps of rank 0."]
    if len(unsplit) < len(rows):
        sentences.append(
            "Exposed communication: how much longer a step takes because of the gradient "
            "exchange; what overlaps with the backward pass does not count."
        )
    if any(row.workers == 1 and row not in unsplit for row in rows):
        sentences.append(
            "With one worker there is no exchange: the time shown in its place is "
            f"{ALONE['exposed_communication_seconds']}."
        )
    if unsplit:
        sentences.append("Where the exchange was not measured separately, it is part of backward.")
    sentences += [
        f"{row.configuration}, {count(row.workers, 'worker')}: {row.note}."
        for row in rows
        if row.note
    ]
    return " ".join(sentences)


def plot_input(selection: Selection) -> Plot | None:
    """Show which share of the step each run waited for its input; None if none measured it."""
    shares = {
        run.folder: 100 * share
        for run in selection.runs
        if (share := run.summary.input.wait_share) is not None
    }
    cells = selection.cells(run for run in selection.runs if run.folder in shares)
    if not cells:
        return None
    series = []
    for y, ((workers, name), runs) in enumerate(cells.items()):
        look, cell = selection.look(name), f"{name}, {count(workers, 'worker')}"
        middle = median(shares[run.folder] for run in runs)
        marks = [(shares[run.folder], y + 0.14) for run in runs]
        texts = [f"{cell}, block {run.block}: {shares[run.folder]:.3g} %" for run in runs]
        layers = [
            Layer("bar", [(0, y + 0.14), (middle, y + 0.14)], look.colour, 9, opacity=0.5),
            Layer(look.marker, marks, look.colour, 2, texts=texts),
        ]
        series.append(Series(layers, (cell, f"{middle:.3g}"), cell, f"{middle:.3g} %"))
    return Plot(
        selection.file_name("input"),
        selection.title("Waiting for input"),
        "Share of the step time spent waiting for the batch. Bars: medians; marks: single runs. "
        "Near zero, the input keeps up and does not affect the result.",
        Axis("% of the step spent waiting for its batch", linear([*shares.values(), 1], zero=True)),
        Axis("", categories(len(cells))),
        series,
        (("configuration", ""), ("input wait", "% of step")),
        height=ROW_HEIGHT * len(cells),
    )


SPEED_PLOTS: tuple[Callable[[Selection], Plot | None], ...] = (
    plot_throughput, plot_efficiency, plot_train_seconds, plot_step_times, plot_phases, plot_input,
)  # fmt: skip
