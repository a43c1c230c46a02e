"""The page's plots."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from compare.evidence.rows import EXPOSED, Row, cells_of
from compare.evidence.verdicts import Verdict
from compare.evidence.words import place_text, ratio_text, three_digits
from compare.page.chart import (
    GRID,
    INK,
    MUTED,
    PAPER,
    ROW_HEIGHT,
    Layer,
    Plot,
    PlotRow,
    Scale,
    bar,
    colour_of,
    linear,
    series_layers,
    thinned,
    values_of,
)
from compare.page.learning import Trainings, learning_plots
from compare.page.report import Report
from compare.page.sentences import interval_text
from compare.page.tables import PHASES

# With one worker there is no exchange: turns without it show this instead.
ALONE = "the engine's own work"
MAX_RINGS = 60  # per verdict: among a thousand no single block can be seen
MOST_TICKS = 12  # numbers of blocks below an axis
WIDTH_OF_BLOCK = 0.8  # of the distance from block to block: what its turns take on the axis
MAX_POINTS = 900  # over all lines of a plot: 450,000 steps must not make a page of 50 MB


def draw_plots(report: Report) -> list[Plot]:
    """Return the plots, that of the verdicts first."""
    kinds = (plot_throughput, plot_drift, plot_phases)
    return [
        *placed([plot_verdicts([*report.times, *report.verdicts])], ""),
        *(
            plot
            for case in report.record.plan.cases
            for plot in placed(
                [*(draw(report, case) for draw in kinds), *plots_of_trainings(report, case)], case
            )
        ),
    ]


def placed(plots: Iterable[Plot], case: str) -> list[Plot]:
    """Add the case to the plots' titles, and to their names, which serve as file names; leave out
    those without points."""
    suffix = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in case)
    return [
        replace(plot, name=f"{plot.name}-{suffix}", title=f"{plot.title}, {case}") if case else plot
        for plot in plots
        if any(layer.points for layer in plot.layers)
    ]


# ------------------------------------------------------------------------------------ the verdict


def plot_verdicts(verdicts: Sequence[Verdict]) -> Plot:
    """Show each verdict's interval beside equal speed and the plan's margin for "equal"."""
    layers: list[Layer] = []
    rows: list[PlotRow] = []
    measured = [verdict for verdict in verdicts if verdict.speed is not None]
    places = {verdict.place for verdict in measured}
    for verdict in measured:
        at = place_text(*verdict.place) if len(places) > 1 else ""
        to = f"to {verdict.target_top1:g} %" if verdict.target_top1 is not None else ""
        name = ", ".join(filter(None, (f"{verdict.first_label} / {verdict.second_label}", to, at)))
        layers += verdict_layers(len(rows), name, verdict)
        rows.append(PlotRow(len(rows), name, found_text(verdict)))
    if any(row.shown != row.name for row in rows):  # no room: hollow marks tell what is undecided
        rows = [replace(row, value="") for row in rows]
    most = max([0.01, *(abs(ratio - 1) for ratio in values_of(layers)[0])])
    ticks = linear([max(0.02, 1 - most), 1 + most]).ticks
    margins = " or ".join(dict.fromkeys(f"{100 * verdict.margin:g}" for verdict in measured))
    return row_plot(
        "verdict",
        "Speed ratios and their intervals",
        "Diamond and line: point estimate and interval, grey and hollow where nothing is decided. "
        "Rings: the ratio of each block. Dashed line: equal speed; right of it the first is "
        "faster, left of it the second. Grey band: the "
        f"margin of {margins} %; an interval inside it means “equal”, unless the correction for "
        "several verdicts forbids it.",
        Scale(max(0.0, 1 - 1.12 * most), 1 + 1.12 * most, ticks, "speed of the first / the second"),
        layers,
        rows,
    )


def found_text(verdict: Verdict) -> str:
    """Return the decision; a null test is as it should be if it shows no difference."""
    if verdict.is_null_test and verdict.delay is None and verdict.decision == "undecided":
        return "no difference"
    return verdict.decision


def row_plot(
    name: str, title: str, caption: str, x: Scale, layers: Sequence[Layer], rows: Sequence[PlotRow]
) -> Plot:
    """Return a plot with one row for each side or verdict."""
    y, height = Scale(len(rows) - 0.5, -0.5), ROW_HEIGHT * len(rows)
    return Plot(name, title, caption, x, y, layers, rows, height)


def verdict_layers(y: int, name: str, verdict: Verdict) -> list[Layer]:
    """Return the layers of a verdict's row: interval and ratios, below its name."""
    speed, margin = verdict.speed, verdict.margin
    assert speed is not None
    found = found_text(verdict)
    texts = filter(None, [ratio_text(speed), interval_text(speed), found])
    rings = [(ratio, y + 0.26) for ratio in thinned(speed.ratios, MAX_RINGS)]
    blocks = [f"{name}, ratio of a block: {ratio:.3f}" for ratio, _ in rings]
    is_open = found == "undecided"
    colour, point = (MUTED if is_open else INK), [(speed.ratio, y)]
    ends = [(end, y) for end in (speed.low, speed.high) if end is not None]
    # Paper below a hollow diamond, so that the line does not run through it.
    below = [Layer("diamond", point, PAPER, 3.4)] if is_open else []
    return [
        bar(1 / (1 + margin), 1 + margin, y + 0.175, GRID, 0.65 * ROW_HEIGHT, 0.7),
        Layer("line", [(1, y - 0.15), (1, y + 0.5)], MUTED, 1, "3 2"),
        Layer("line", ends, colour, 1.1 if is_open else 2),
        *below,
        Layer(
            "diamond",
            point,
            colour,
            3.4,
            hollow=is_open,
            texts=[f"{name}: {', '.join(texts)}"],
        ),
        Layer("circle", rings, MUTED, 2, hollow=True, texts=blocks),
    ]


# ------------------------------------------------------------------------------------------ speed


def plot_throughput(report: Report, case: str) -> Plot:
    """Show each configuration's speed at each number of workers."""
    rows = [row for row in report.speed if row["case"] == case]
    layers, named, unit = list[Layer](), list[PlotRow](), report.record.unit
    names = [*report.record.configurations]
    fewest: dict[str, Row] = {}
    for y, (row, name) in enumerate(zip(rows, row_names(report, rows), strict=True)):
        configuration, rate = row["configuration"], row["images_per_second"]
        base = fewest.setdefault(configuration, row)
        colour = colour_of(names.index(configuration))
        shown = f"{three_digits(rate)} {unit}/s"
        layers.append(bar(0, rate, y + 0.14, colour, 13, 0.7, f"{name}: {shown}"))
        range_ = [(row["lowest"], y + 0.14), (row["highest"], y + 0.14)]
        layers.append(Layer("line", range_, INK, 1.6))
        if row is not base:
            ideal = base["images_per_second"] * row["workers"] / base["workers"]
            ends = [(ideal, y - 0.06), (ideal, y + 0.34)]
            layers.append(Layer("line", ends, MUTED, 1.4, "3 2", key="ideal scaling"))
        named.append(PlotRow(y, name, shown))
    return row_plot(
        "throughput",
        "Training throughput",
        f"Training {unit} per second of all workers, without the first steps and evaluation. Bars: "
        "harmonic mean over blocks; lines: their range; dashed: ideal scaling from the fewest "
        "workers. What slows all sides of a block changes these bars and ranges, "
        "but cancels in the verdicts' ratios.",
        linear(values_of(layers)[0], f"{unit}/s", zero=True),
        layers,
        named,
    )


def row_names(report: Report, rows: Sequence[Row]) -> list[str]:
    """Return the names of a plot's rows, with the number of workers if it differs between them."""
    is_several = len({row["workers"] for row in rows}) > 1
    return [
        place_text(report.labels[row["configuration"]], row["workers"] if is_several else 0)
        for row in rows
    ]


def plot_drift(report: Report, case: str) -> Plot:
    """Show the speeds of each block's turns that count, in the order in which they ran; of whole
    runs, one point a block. Nothing if there is a single point only."""
    layers: list[Layer] = []
    names, unit, last = [*report.record.configurations], report.record.unit, 1
    cells = [cell for cell in cells_of(report.record) if cell[0].case == case]
    num_lines = sum(len(group.blocks) for group, _ in cells)
    most = MAX_POINTS // max(1, num_lines)
    for group, name in cells:
        points, texts = list[tuple[float, float]](), list[str]()
        place = place_text(report.labels[name], group.workers)
        for block in group.blocks_with([name]):
            speeds = [turn.images_per_second for turn in thinned(block.counted(name), most)]
            for at, speed in enumerate(speeds):
                within = WIDTH_OF_BLOCK * ((at + 0.5) / len(speeds) - 0.5)
                points.append((block.number + within, speed))
                texts.append(f"{place}, block {block.number}: {speed:,.4g} {unit}/s")
            points.append((math.nan, math.nan))  # blocks are not joined
            texts.append("")
            last = max(last, block.number)
        index, mark = names.index(name), 0 if report.record.is_by_turns else 2
        layers += series_layers(index, report.labels[name], points, texts, 1.1, mark)
    found = [point for layer in layers for point in layer.points if math.isfinite(point[0])]
    if len({across for across, _ in found}) < 2:
        layers = []
    blocks = range(1, last + 1)
    ticks = [(float(number), str(number)) for number in blocks[:: -(-last // MOST_TICKS)]]
    return Plot(
        "drift",
        "Speed over the experiment",
        f"{unit.capitalize()} per second of whole runs, or of the turns that count, in the order "
        "in which they ran within each block. A slope that all sides share is drift of the "
        "machine; it cancels in ratios within blocks.",
        Scale(0.5, last + 0.5, ticks, "block"),
        linear((up for _, up in found), f"{unit}/s"),
        layers,
    )


def plot_phases(report: Report, case: str) -> Plot:
    """Show how a step's time divides into phases."""
    shown = [row for row in report.phases if row["case"] == case]
    milliseconds = [1000 * row["step_seconds"] for row in shown]
    totals = [f"{three_digits(ms)} ms" for ms in milliseconds]
    rows = [*map(PlotRow, range(len(shown)), row_names(report, shown), totals)]
    return row_plot(
        "step-breakdown",
        "Time per step by phase",
        "Means over the steps. Exposed communication: how much longer a step takes because of the "
        "gradient exchange. Communication that overlaps with the backward pass does not count; "
        "where exposed communication was not measured separately, it is part of backward. With "
        f"one worker there is no exchange: {ALONE} is shown in its place.",
        linear(milliseconds, "milliseconds per step", zero=True),
        [
            layer
            for row, place in zip(shown, rows, strict=True)
            for layer in phase_layers(row, place)
        ],
        rows,
    )


def phase_layers(row: Row, place: PlotRow) -> list[Layer]:
    """Return the bars of a row, end to end."""
    name, y, step = place.name, place.y, 1000 * row["step_seconds"]
    end, layers = 0.0, []
    for field, (words, colour, opacity) in PHASES.items():
        is_alone = row["workers"] == 1 and field == EXPOSED
        ms = 1000 * row.get(field, 0.0)
        if ms > 0:  # noise may make the difference of two means negative, which no bar can show
            shown = ALONE if is_alone else words
            text = f"{name}: {shown} {ms:.3g} ms, {100 * ms / step:.1f} % of the step"
            start, end = end, end + ms
            layers.append(bar(start, end, y + 0.14, colour, 13, opacity, text, words))
    return layers


# ------------------------------------------------------------------------------- learning curves


def plots_of_trainings(report: Report, case: str) -> list[Plot]:
    """Return the learning curves of a case's complete whole runs with the most workers."""
    whole = [run for run in report.record.complete if run.case == case and run.has_accuracy]
    most = max((run.workers for run in whole), default=0)
    trainings = [
        Trainings(report.labels[name], index, runs)
        for index, name in enumerate(report.record.configurations)
        if (runs := [run for run in whole if (run.workers, run.configuration) == (most, name)])
    ]
    targets = [verdict.target_top1 for verdict in report.times if verdict.case == case]
    return learning_plots(trainings, *targets[:1])
