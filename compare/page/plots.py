"""The page's plots, in their groups."""

import datetime
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import median

from compare.evidence.exchange import Exchange, read_exchange
from compare.evidence.records import RunRecord
from compare.evidence.rows import ALONE, PHASES, PhaseRow, in_detail
from compare.evidence.verdicts import Verdict
from compare.evidence.words import count, digits, place_text, three_digits
from compare.page.chart import (
    COLOURS,
    GRID,
    INK,
    MARKERS,
    MUTED,
    ROW_HEIGHT,
    Layer,
    Plot,
    Points,
    Scale,
    Series,
    at_ticks,
    bar,
    linear,
    logarithmic,
)
from compare.page.exchange import plot_exchanges
from compare.page.report import Report
from recipe.errors import UserError

DASHES = ("", "6 2.4", "1.8 1.8", "8 2 1.6 2", "3.6 1.4")
MAX_RINGS = 60  # of a verdict: of a thousand blocks none is made out among the others
MAX_POINTS = 900  # of all lines of a plot: 450,000 steps must not make a page of 50 MB
MAX_TABLE_ROWS = 24
# Colour and opacity of each phase: greys for computing, colours of their own for waiting.
PHASE_STYLES = {
    "data_seconds": ("var(--waiting)", 0.9),
    "forward_seconds": (MUTED, 0.35),
    "backward_seconds": (MUTED, 0.65),
    "exposed_communication_seconds": ("var(--communication)", 0.95),
    "optimizer_seconds": (INK, 0.85),
}


@dataclass(frozen=True)
class PlotGroup:
    """Plots under a common heading; folded away where they say less than the others."""

    title: str
    plots: Sequence[Plot]
    folded: bool = False


def draw_plots(report: Report) -> list[PlotGroup]:
    """Return the page's plots but the verdict's, which stands with its sentence.

    Those of learning are folded away for all numbers of workers but the largest, and with several
    cases for all.
    """
    groups, comparison = [], report.comparison
    order = list(comparison.configurations).index
    for case in comparison.cases:
        runs = [run for run in comparison.complete if run.case == case]
        runs.sort(key=lambda run: order(run.configuration))
        numbers = sorted({run.workers for run in runs}, reverse=True)
        most = [run for run in runs if run.workers == numbers[0]]
        speed = [draw(report, case) for draw in (plot_throughput, plot_clock, plot_phases)]
        groups.append(group("Speed", [*speed, plot_exchange(most)], [case]))
        for workers in numbers:
            chosen = in_detail([run for run in runs if run.workers == workers])
            plots = [*plot_loss_differences(report, chosen), plot_time_to_accuracy(report, chosen)]
            folded = workers != numbers[0] or len(comparison.cases) > 1
            groups.append(group("Learning", plots, [case, count(workers, "worker")], folded))
    return groups


def group(
    title: str, plots: Iterable[Plot | None], place: Sequence[str], folded: bool = False
) -> PlotGroup:
    """Put plots under a heading, and give them names and titles of their place."""
    placed = []
    for plot in plots:
        if plot is not None:
            name = "-".join(filter(None, (plot.name, *place)))
            name = "".join(
                letter if letter.isalnum() or letter in "-_." else "-" for letter in name
            )
            title_of = ", ".join(filter(None, (plot.title, *place)))
            placed.append(replace(plot, name=name, title=title_of))
    return PlotGroup(", ".join(filter(None, (title, *place))), placed, folded)


def all_plots(report: Report) -> list[Plot]:
    """Return every plot, the verdict's first."""
    first = plot_verdicts(report.verdicts, report.comparison.plan.margin)
    plots = [first, *(plot for group in draw_plots(report) for plot in group.plots)]
    return [plot for plot in plots if plot is not None]


def curve(
    report: Report, name: str, points: Points, texts: Sequence[str], width: float, mark: float = 0
) -> list[Layer]:
    """Return a configuration's line, and marks of half this width; it looks the same in all plots.

    The first one is drawn broad, below the others: equal curves both stay in sight.
    """
    index = list(report.comparison.configurations).index(name)
    shape = (index + index // len(COLOURS)) % len(MARKERS)  # a new one where colours come again
    colour, opacity = COLOURS[index % len(COLOURS)], 0.9 if index else 0.55
    style = width if index else 2.2 * width, DASHES[shape], opacity
    line = Layer("line", points, colour, *style, texts=texts, key=name)
    marks = Layer(list(MARKERS)[shape], points, colour, mark, key=name)
    return [line, marks] if mark else [line]


# ------------------------------------------------------------------------------------ the verdict


def plot_verdicts(verdicts: Sequence[Verdict], margin: float | None = None) -> Plot | None:
    """Show each verdict's interval around equal speed, against the margin within which the plan
    calls two equal, and the blocks' ratios."""
    shown = [verdict for verdict in verdicts if verdict.speed is not None]
    if not shown:
        return None
    pairs = {(verdict.first, verdict.second) for verdict in shown}
    first, second = pairs.pop() if len(pairs) == 1 else ("the first", "the second")
    series = [verdict_series(y, one, first == "the first", margin) for y, one in enumerate(shown)]
    ratios = [x for one in series for layer in one.layers for x, _ in layer.points]
    most = max(0.01, *(abs(ratio - 1) for ratio in ratios))
    ticks = linear([max(0.02, 1 - most), 1 + most]).ticks
    caption = (
        "Diamond and line: point estimate and interval. Rings: the ratio of each block. Dashed "
        f"line: equal speed; right of it {first} is faster, left of it {second}."
    )
    if margin:
        caption += f" Grey: within {100 * margin:g} %; an interval inside is equal"
        caption += ", unless the correction for several verdicts forbids it."
    heads, label = (
        ("compared", "speed ratio", "interval", "decision", "blocks"),
        f"{first} / {second}",
    )
    return Plot(
        "verdict",
        "Speed ratios and their intervals",
        caption,
        Scale(max(0.0, 1 - 1.12 * most), 1 + 1.12 * most, ticks, f"speed of {label}"),
        Scale(len(shown) - 0.5, -0.5),
        series,
        [(head, "") for head in heads],
        ROW_HEIGHT * len(shown),
    )


def verdict_series(y: int, verdict: Verdict, with_pair: bool, margin: float | None) -> Series:
    """Return a verdict's row: interval and ratios, below its name."""
    speed = verdict.speed
    assert speed is not None
    pair = f"{verdict.first} / {verdict.second}" if with_pair else ""
    what = "interaction" if verdict.is_interaction else pair
    name = place_text(", ".join(filter(None, (verdict.case, what))), verdict.workers)
    layers, interval, places = [], "none", max(3, digits(speed))
    if margin:
        layers.append(bar(1 / (1 + margin), 1 + margin, y + 0.175, GRID, 0.65 * ROW_HEIGHT, 0.7))
    layers.append(Layer("line", [(1, y - 0.15), (1, y + 0.5)], MUTED, 1, "3 2"))
    if speed.low is not None and speed.high is not None:
        layers.append(Layer("line", [(speed.low, y), (speed.high, y)], INK, 1.6))
        interval = f"{speed.low:.{places}f} to {speed.high:.{places}f}"
    ratio = f"{speed.ratio:.{places}f}"
    told = f"{name}: ratio {ratio}, interval {interval}, {verdict.decision}"
    layers.append(Layer("diamond", [(speed.ratio, y)], INK, 3.4, texts=[told]))
    ratios = speed.ratios[:: -(-len(speed.ratios) // MAX_RINGS)]
    blocks = [f"{name}, ratio of a block: {ratio:.3f}" for ratio in ratios]
    rings = [(ratio, y + 0.26) for ratio in ratios]
    layers.append(Layer("circle", rings, MUTED, 2, hollow=True, texts=blocks))
    return Series(layers, (name, ratio, interval, verdict.decision, str(speed.blocks)), name)


# ------------------------------------------------------------------------------------------ speed


def plot_throughput(report: Report, case: str) -> Plot | None:
    """Show each configuration's speed against workers; None if none was measured. With references
    both axes are logarithmic: theirs may be far away."""
    rows = [row for row in report.speed if row.case == case]
    if not rows:
        return None
    by_workers: dict[str, dict[int, float]] = {row.configuration: {} for row in rows}
    for row in rows:
        by_workers[row.configuration][row.workers] = row.images_per_second
    measured = list(by_workers)
    by_workers |= {one.name: one.images_per_second for one in report.references}
    numbers = sorted({n for line in by_workers.values() for n in line})
    series: list[Series] = []
    for name, line in by_workers.items():
        fewest, points = min(line), sorted(line.items())
        ideal = [(n, line[fewest] * n / fewest) for n in line]
        texts = [f"{place_text(name, n)}: {three_digits(rate)} images/s" for n, rate in points]
        layers = [Layer("line", ideal, MUTED, 1, "1.5 2", key="ideal")]
        if name in measured:
            layers += curve(report, name, points, texts, 1.3, 3)
            layers += [
                Layer("line", [(row.workers, row.lowest), (row.workers, row.highest)], INK, 1)
                for row in rows
                if row.configuration == name
            ]
        else:
            marker = list(MARKERS)[len(series) % len(MARKERS)]
            layers.append(Layer("line", points, MUTED, 1.6, key=name))
            layers.append(Layer(marker, points, MUTED, 3, hollow=True, texts=texts, key=name))
        told = (three_digits(line[n]) if n in line else "–" for n in numbers)
        series.append(Series(layers, (name, *told)))
    sources = "; ".join(f"{one.name}: {one.source}" for one in report.references)
    grey = f" Grey: {sources}." if sources else ""
    _, y = values_of(series)
    return Plot(
        "throughput",
        "Training throughput",
        "Training images per second of all workers, without the first steps and evaluation. Marks: "
        f"medians; upright lines: the range of the blocks; dotted: ideal scaling.{grey}",
        at_ticks([(n, str(n)) for n in numbers], "workers", bool(sources)),
        logarithmic(y, "images/s") if sources else linear(y, "images/s", zero=True),
        series,
        (("configuration", ""), *((count(n, "worker"), "images/s") for n in numbers)),
    )


def plot_clock(report: Report, case: str) -> Plot | None:
    """Show speed over the time of the experiment, for drift; None where no time was recorded."""
    by_turns, names = report.comparison.is_by_turns, list(report.comparison.configurations)
    parts = list(turns_by_clock(report, case) if by_turns else runs_by_clock(report, case))
    parts = [part for part in parts if part[2]]
    if not parts:
        return None
    began = min(x for _, _, points in parts for x, _ in points)
    lines: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for name, workers, points in sorted(parts, key=lambda part: names.index(part[0])):
        shown = thinned(points, max(3, MAX_POINTS // len(parts)))
        line = lines.setdefault((name, workers), [])
        line += [*(((x - began) / 60, y) for x, y in shown), (math.nan, math.nan)]
    series = []
    for cell, line in lines.items():
        texts = [f"{place_text(*cell)}, minute {x:.1f}: {y:,.4g} images/s" for x, y in line]
        series.append(Series(curve(report, cell[0], line, texts, 1.1, 0 if by_turns else 2)))
    what = "turns that count; lines break between blocks" if by_turns else "whole runs"
    x, y = values_of(series)
    return Plot(
        "clock",
        "Speed over the experiment",
        f"Images per second of {what}. A slope that all share is the machine's drift, which "
        "ratios within blocks leave out.",
        linear(x, "minutes since the first", zero=True),
        linear(y, "images/s"),
        series,
    )


def turns_by_clock(report: Report, case: str) -> Iterator[tuple[str, int, Points]]:
    """Yield of each block the turns that count, by configuration and workers: seconds and
    images/s."""
    for workers in report.comparison.workers:
        for block in report.comparison.blocks(case, workers):
            turns = [turn for turn in block.turns if turn.round in block.quiet_rounds]
            for name in block.order:
                own = [turn for turn in turns if turn.side == name]
                points = [(turn.began, turn.images_per_second) for turn in own if turn.began]
                yield name, workers, points


def runs_by_clock(report: Report, case: str) -> Iterator[tuple[str, int, Points]]:
    """Yield whole runs, by configuration and workers: start in seconds, and images/s."""
    for _, workers, name in (cell for cell in report.comparison.cells if cell[0] == case):
        points = []
        for run in report.comparison.complete_runs((case, workers, name)):
            with suppress(ValueError):  # a damaged time
                started = datetime.datetime.fromisoformat(run.environment.started_utc)
                points.append((started.timestamp(), run.summary.images_per_second))
        yield name, workers, sorted(points)


def plot_phases(report: Report, case: str) -> Plot | None:
    """Show what a step's time is made of; None if no run measured it."""
    rows = [row for row in report.phases if row.case == case]
    alone = f" (one worker: {ALONE['exposed_communication_seconds']})"
    heads = [name + alone * (field in ALONE) for field, name in PHASES.items()]
    if not rows:
        return None
    return Plot(
        "step-breakdown",
        "Time per step by phase",
        "Means over the steps of rank 0. Exposed communication: how much longer a step takes "
        "because of the gradient exchange; what overlaps with the backward pass does not count, "
        "and where it was not measured separately, it is part of backward. With one worker there "
        f"is no exchange: in its place stands {ALONE['exposed_communication_seconds']}.",
        linear([1000 * row.step_seconds for row in rows], "milliseconds per step", zero=True),
        Scale(len(rows) - 0.5, -0.5),
        [phase_series(y, row) for y, row in enumerate(rows)],
        (("configuration", ""), *((head, "ms") for head in heads), ("step", "ms")),
        ROW_HEIGHT * len(rows),
    )


def phase_series(y: int, row: PhaseRow) -> Series:
    """Return a row of bars, one behind the other."""
    name, step = place_text(row.configuration, row.workers), 1000 * row.step_seconds
    at, texts, layers = 0.0, [], []
    for field, words in row.words.items():
        seconds = getattr(row, field)
        texts.append("not measured" if seconds is None else f"{1000 * seconds:.3g}")
        if seconds is not None:
            ms = 1000 * seconds
            told = f"{name}: {words} {ms:.3g} ms, {100 * ms / step:.1f} % of the step"
            # Noise may bring the difference of two means below 0; a bar cannot be there.
            end = at + max(0.0, ms)
            colour, opacity = PHASE_STYLES[field]
            layers.append(bar(at, end, y + 0.14, colour, 13, opacity, told, PHASES[field]))
            at = end
    return Series(layers, (name, *texts, f"{step:.3g}"), name, f"{step:.3g} ms")


def plot_exchange(runs: Iterable[RunRecord]) -> Plot | None:
    """Show the exchange of gradients in each configuration's first run with --profile-steps; None
    if there is none."""
    found: dict[str, Exchange] = {}
    for run in runs:
        with suppress(UserError):  # a damaged profile keeps back no report; timeline.py names it
            if run.configuration not in found and (exchange := read_exchange(run.folder)):
                found[run.configuration] = exchange
    return plot_exchanges(list(found.items())) if found else None


# --------------------------------------------------------------------------------------- learning


def plot_loss_differences(report: Report, runs: Sequence[RunRecord]) -> Iterator[Plot]:
    """Show the difference of each judged pair's training losses at the same step, where there is
    one."""
    by_run = {(run.configuration, run.block): run for run in runs}
    blocks = sorted({run.block for run in runs})
    for first, second in report.comparison.plan.pairs():
        series: list[Series] = []
        for block in blocks:
            a, b = by_run.get((first, block)), by_run.get((second, block))
            if line := loss_difference(a, b) if a and b else []:
                shown = thinned(line, max(24, MAX_POINTS // len(blocks)), farthest_from_zero)
                texts = [f"block {block}, epoch {x:.3g}: {y:.3g}" for x, y in shown]
                largest = f"{abs(farthest_from_zero([y for _, y in line])):.3g}"
                layers = curve(report, second, shown, texts, 1.1)
                series.append(Series(layers, (f"block {block}", str(len(line)), largest)))
        x, y = values_of(series)
        if any(y):
            yield Plot(
                f"loss-difference-{first}-{second}",
                f"Loss of {first} minus {second}",
                "Difference of the training losses at the same step, one line per block (in long "
                "runs, the largest of neighbouring steps).",
                linear(x, "epoch", zero=True),
                linear([*y, *(-value for value in y)], "difference of loss", ticks=4),
                series,
                (("block", ""), ("steps in common", ""), ("largest difference", "")),
                150,
            )


def loss_difference(a: RunRecord, b: RunRecord) -> Points:
    """Return the loss of one run less the other's at each step in common, by epoch."""
    losses = {line.step: line.loss for line in b.steps}
    images = a.summary.samples_seen / a.summary.epochs  # of an epoch
    steps = [line for line in a.steps if line.step in losses]
    return [(line.samples_seen / images, line.loss - losses[line.step]) for line in steps]


def plot_time_to_accuracy(report: Report, runs: Sequence[RunRecord]) -> Plot | None:
    """Show validation top-1 against the training clock."""
    series: list[Series] = []
    for run in (run for run in runs if run.evaluations):
        line = [(one.train_seconds_so_far, one.top1) for one in run.evaluations]
        shown = thinned(line, max(24, MAX_POINTS // len(runs)))
        name, (seconds, top1) = f"{run.configuration}, block {run.block}", line[-1]
        texts = [f"{name}: {y:.2f} % after {x:,.4g} s" for x, y in shown]
        layers = curve(report, run.configuration, shown, texts, 1.3, 2 if len(line) <= 30 else 0)
        cells = (name, f"{top1:.2f}", f"{seconds:,.4g}") if len(series) < MAX_TABLE_ROWS else ()
        series.append(Series(layers, cells))
    x, y = values_of(series)
    if not series:
        return None
    return Plot(
        "time-to-accuracy",
        "Top-1 against time",
        "Validation top-1 against training time, evaluation included. One line per run.",
        linear(x, "seconds since training began, evaluation included", zero=True),
        linear(y, "validation top-1, %"),
        series,
        (("run", ""), ("last top-1", "%"), ("after", "s")),
    )


# ---------------------------------------------------------------------------------------- helpers


def values_of(series: Iterable[Series]) -> tuple[list[float], list[float]]:
    """Return the x and the y of all points, for the axes."""
    points = [point for one in series for layer in one.layers for point in layer.points]
    return [x for x, _ in points], [y for _, y in points]


def thinned(
    points: Points, most: int, choose: Callable[[Sequence[float]], float] = median
) -> list[tuple[float, float]]:
    """Thin a long line out: equally many neighbours become their median, or another of them."""
    size = -(-len(points) // most) or 1
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    return [(median([x for x, _ in part]), choose([y for _, y in part])) for part in parts]


def farthest_from_zero(values: Sequence[float]) -> float:
    return max(values, key=lambda value: (math.isnan(value), abs(value)))
