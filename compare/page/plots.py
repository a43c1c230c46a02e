"""The page's plots in their groups, and those of speed; those of learning are in learning.py."""

import datetime
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from compare.evidence.paired import Estimate
from compare.evidence.references import Reference
from compare.evidence.rows import ALONE, PHASES, PhaseRow, in_detail, speeds
from compare.evidence.verdicts import Verdict
from compare.evidence.words import count, digits, three_digits
from compare.page import learning
from compare.page.bars import plot_input, plot_time
from compare.page.chart import (
    INK,
    MARKERS,
    MUTED,
    Key,
    Scale,
    categories,
    linear,
    logarithmic,
    powers,
    whole,
)
from compare.page.exchange import plot_exchange
from compare.page.plot import ROW_HEIGHT, Axis, Layer, Plot, Points, Selection, Series, thinned
from compare.page.report import Report

IDEAL = "1.5 2"  # dashes
MAX_MARKS = 60  # of a series: of a thousand runs none is made out among the others
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

    The learning curves of all numbers of workers but the largest are folded away, and with several
    cases all of them.
    """
    groups, comparison = [], report.comparison
    several = len(comparison.cases) > 1
    order = [*comparison.configurations].index
    for case in comparison.cases:
        if not any(run.case == case for run in comparison.written):
            continue
        runs = [run for run in comparison.complete if run.case == case]
        runs.sort(key=lambda run: order(run.configuration))
        selection = Selection(report, case, runs)
        speed = present(draw(selection) for draw in SPEED_PLOTS)
        groups.append(PlotGroup(selection.title("Speed"), speed))
        numbers = sorted({run.workers for run in runs}, reverse=True)
        for workers in numbers[:1]:
            most = [run for run in runs if run.workers == workers]
            speed += present([plot_exchange(Selection(report, case, most, workers))])
        for workers in numbers:
            chosen = in_detail([run for run in runs if run.workers == workers])
            selection = Selection(report, case, chosen, workers)
            folded = several or workers != numbers[0]
            plots = present(learning.plots(selection))
            groups.append(PlotGroup(selection.title("Learning"), plots, folded))
    return groups


def all_plots(report: Report) -> list[Plot]:
    """Return every plot, the verdict's first."""
    grouped = [plot for group in draw_plots(report) for plot in group.plots]
    margin = report.comparison.plan.margin
    return [*present([plot_verdicts(report.verdicts, margin)]), *grouped]


def present(plots: Iterable[Plot | None]) -> list[Plot]:
    return [plot for plot in plots if plot is not None]


def named(case: str) -> str:
    """Return what stands before other words of a title: nothing in a plan without cases."""
    return f"{case}, " if case else ""


# ------------------------------------------------------------------------------------ the verdict


def plot_verdicts(verdicts: Sequence[Verdict], margin: float | None = None) -> Plot | None:
    """Show each verdict's interval around equal speed, against the margin within which the plan
    calls two equal, and the blocks' ratios."""
    shown = [(verdict, verdict.speed) for verdict in verdicts if verdict.speed is not None]
    if not shown:
        return None
    values = [1.0, 1 + (margin or 0)]
    for _, speed in shown:
        values += [*speed.ratios, speed.low or 1, speed.high or 1]
    reach = max(max(values) - 1, 1 - min(values), 0.01)
    ticks = linear([max(0.02, 1 - reach), 1 + reach]).ticks
    pairs = {(verdict.first, verdict.second) for verdict, _ in shown}
    first, second = next(iter(pairs)) if len(pairs) == 1 else ("the first", "the second")
    series = [
        verdict_series(y, verdict_name(verdict, len(pairs) > 1), verdict.decision, speed)
        for y, (verdict, speed) in enumerate(shown)
    ]
    caption = "Diamond and line: point estimate and interval. Rings: the ratio of each block. "
    caption += "Dashed line: equal speed."
    if margin:
        caption += f" Grey: within {100 * margin:g} %; an interval inside is equal"
        caption += ", unless the correction for several verdicts forbids it."
    return Plot(
        "verdict",
        "Speed ratios and their intervals",
        caption,
        Axis(
            f"speed of {first} / speed of {second}",
            Scale(max(0.0, 1 - 1.12 * reach), 1 + 1.12 * reach, ticks),
        ),
        Axis("", categories(len(shown))),
        series,
        (("compared", ""), ("speed ratio", ""), ("interval", ""), ("decision", ""),
         ("blocks", "")),
        height=ROW_HEIGHT * len(shown),
        ends=(f"{second} faster", f"{first} faster"),
        rule=1,
        band=(1 / (1 + margin), 1 + margin) if margin else None,
    )  # fmt: skip


def verdict_name(verdict: Verdict, with_pair: bool) -> str:
    what = "interaction, " if verdict.is_interaction else ""
    if with_pair and not what:
        what = f"{verdict.first} / {verdict.second}, "
    return f"{named(verdict.case)}{what}{count(verdict.workers, 'worker')}"


def verdict_series(y: int, name: str, decision: str, speed: Estimate) -> Series:
    layers, interval, places = [], "none", max(3, digits(speed))
    if speed.low is not None and speed.high is not None:
        layers.append(Layer("line", [(speed.low, y), (speed.high, y)], INK, 1.6))
        interval = f"{speed.low:.{places}f} to {speed.high:.{places}f}"
    ratio = f"{speed.ratio:.{places}f}"
    told = f"{name}: ratio {ratio}, interval {interval}, {decision}"
    layers.append(Layer("diamond", [(speed.ratio, y)], INK, 3.4, texts=[told]))
    ratios = speed.ratios[:: -(-len(speed.ratios) // MAX_MARKS)]
    rings = [(ratio, y + 0.26) for ratio in ratios]
    blocks = [f"{name}, ratio of a block: {ratio:.3f}" for ratio in ratios]
    layers.append(Layer("circle", rings, MUTED, 2, hollow=True, texts=blocks))
    cells = (name, ratio, interval, decision, str(speed.blocks))
    return Series(layers, cells, name)


# ------------------------------------------------------------------------------- against workers


def plot_throughput(selection: Selection) -> Plot | None:
    """Show the speed of each block and its median for each configuration; None without any. With
    references both axes are logarithmic: theirs may be far away."""
    lines: dict[str, dict[int, list[float]]] = {}
    for cell in selection.comparison.cells:
        measured = speeds(selection.comparison, cell) if cell[0] == selection.case else {}
        if measured:
            rates = [speed.images_per_second for speed in measured.values()]
            lines.setdefault(cell[2], {})[cell[1]] = rates
    if not lines:
        return None
    references = selection.references
    medians = [{n: median(rates) for n, rates in line.items()} for line in lines.values()]
    medians += [reference.images_per_second for reference in references]
    numbers = sorted({n for line in medians for n in line})
    ideal = [[(n, line[min(line)] * n / min(line)) for n in line] for line in medians]
    reached = [value for line in ideal for _, value in line]
    reached += [rate for line in lines.values() for rates in line.values() for rate in rates]
    caption = (
        "Training images per second of all workers, without the first steps and evaluation. Lines: "
        "medians; small marks: blocks; dotted: ideal scaling."
    )
    looks = [MARKERS[order % len(MARKERS)] for order in range(len(references))]
    return Plot(
        selection.file_name("throughput"),
        selection.title("Training throughput"),
        f"{caption} Grey: {selection.sources}." if references else caption,
        Axis("workers", powers(numbers) if references else whole(numbers, margin=0.12)),
        Axis("images/s", logarithmic(reached) if references else linear(reached, zero=True)),
        [
            *(Series([Layer("line", line, MUTED, 1, IDEAL)]) for line in ideal),
            *throughput_series(selection, lines, numbers),
            *map(reference_series, references, looks, itertools.repeat(numbers)),
        ],
        (("configuration", ""), *((count(n, "worker"), "images/s") for n in numbers)),
        keys=[
            *selection.keys(lines, True),
            *(
                Key(reference.name, MUTED, marker=marker, hollow=True)
                for reference, marker in zip(references, looks, strict=True)
            ),
            Key("ideal", MUTED, dash=IDEAL, width=1),
        ],
    )


def throughput_series(
    selection: Selection, lines: dict[str, dict[int, list[float]]], numbers: Sequence[int]
) -> list[Series]:
    series = []
    for order, (configuration, by_workers) in enumerate(lines.items()):
        look = selection.look(configuration)
        # Side by side rather than on top of each other.
        shift = (order - (len(lines) - 1) / 2) * (0.03 * (numbers[-1] - numbers[0]) or 0.1)
        shift = 0.0 if selection.references else shift
        marks, texts = [], []
        for n, blocks in by_workers.items():
            for value in blocks[:: -(-len(blocks) // MAX_MARKS)]:
                marks.append((n + shift, value))
                texts.append(speed_text(configuration, n, value))
        middle = {n: median(blocks) for n, blocks in by_workers.items()}
        points = [(n + shift, value) for n, value in middle.items()]
        layers = [
            Layer("line", points, look.colour, 1.7, look.dash),
            Layer(look.marker, marks, look.colour, 2, opacity=0.5, texts=texts),
            Layer(look.marker, points, look.colour, 3.4),
        ]
        series.append(Series(layers, speed_cells(configuration, middle, numbers)))
    return series


def reference_series(reference: Reference, marker: str, numbers: Sequence[int]) -> Series:
    points = sorted(reference.images_per_second.items())
    texts = [speed_text(reference.name, n, value) for n, value in points]
    layers = [
        Layer("line", points, MUTED, 1.6),
        Layer(marker, points, MUTED, 3, hollow=True, texts=texts),
    ]
    return Series(layers, speed_cells(reference.name, reference.images_per_second, numbers))


def speed_text(name: str, workers: int, value: float) -> str:
    return f"{name}, {count(workers, 'worker')}: {three_digits(value)} images/s"


def speed_cells(name: str, by_workers: dict[int, float], numbers: Sequence[int]) -> tuple[str, ...]:
    return name, *(three_digits(by_workers[n]) if n in by_workers else "–" for n in numbers)


# ------------------------------------------------------------------------------- against the clock


def plot_clock(selection: Selection) -> Plot | None:
    """Show speed over the time of the experiment, for drift; None where no time was recorded."""
    lines = (
        turns_by_clock(selection) if selection.comparison.is_by_turns else runs_by_clock(selection)
    )
    lines = {cell: line for cell, line in lines.items() if line}
    if not lines:
        return None
    began = min(x for line in lines.values() for x, _ in line if math.isfinite(x))
    series = []
    for (name, workers), line in lines.items():
        look, cell = selection.look(name), f"{name}, {count(workers, 'worker')}"
        points = [((x - began) / 60, y) for x, y in line]
        texts = [f"{cell}, minute {x:.1f}: {y:,.4g} images/s" for x, y in points]
        layers = [look.line(points, 1.1, 0.9, texts)]
        if not selection.comparison.is_by_turns:
            layers.append(Layer(look.marker, points, look.colour, 2))
        series.append(Series(layers))
    points = [point for one in series for point in one.layers[0].points]
    what = "turns that count; lines break between blocks" if selection.comparison.is_by_turns else (
        "whole runs, at their start"
    )  # fmt: skip
    return Plot(
        selection.file_name("clock"),
        selection.title("Speed over the experiment"),
        f"Images per second of {what}. A slope that all share is the machine's drift, which "
        "ratios within blocks leave out.",
        Axis("minutes since the first", linear([x for x, _ in points], zero=True)),
        Axis("images/s", linear([y for _, y in points])),
        series,
        keys=selection.keys(dict.fromkeys(name for name, _ in lines)),
    )


def turns_by_clock(selection: Selection) -> dict[tuple[str, int], Points]:
    """Return the turns that count, by configuration and workers: seconds and images/s; a block's
    end is a point that is no number."""
    lines: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for workers in selection.comparison.workers:
        for block in selection.comparison.turn_blocks(selection.case, workers):
            quiet = block.quiet_rounds
            for name in block.order:
                points = [
                    (turn.began, turn.images_per_second)
                    for turn in block.turns
                    if turn.side == name and turn.round in quiet and turn.began is not None
                ]
                line = lines.setdefault((name, workers), [])
                line += [*points, (math.nan, math.nan)] if points else []
    most = max(40, learning.ALL_POINTS // max(1, len(lines)))
    return {
        cell: [
            point
            for is_gap, part in itertools.groupby(line, key=lambda point: math.isnan(point[0]))
            for point in (part if is_gap else thinned(list(part), max(3, most * 3 // len(line))))
        ]
        for cell, line in lines.items()
        if line
    }


def runs_by_clock(selection: Selection) -> dict[tuple[str, int], Points]:
    """Return whole runs by configuration and workers: start in seconds, and images/s."""
    lines: dict[tuple[str, int], Points] = {}
    for (workers, name), runs in selection.cells(selection.runs).items():
        points = sorted((started(run.environment.started_utc), run.summary.images_per_second)
                        for run in runs)  # fmt: skip
        points = [point for point in points if math.isfinite(point[0])]
        lines[name, workers] = thinned(points, MAX_MARKS)
    return lines


def started(utc: str) -> float:
    """Return a record's time in seconds; NaN if it is none."""
    try:
        return datetime.datetime.fromisoformat(utc).timestamp()
    except ValueError:
        return math.nan


# ------------------------------------------------------------------------------------- the phases


def plot_phases(selection: Selection) -> Plot | None:
    """Show what a step's time is made of; None if no run measured it."""
    rows = [row for row in selection.report.phases if row.case == selection.case]
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


SPEED_PLOTS: tuple[Callable[[Selection], Plot | None], ...] = (
    plot_throughput, plot_time, plot_clock, plot_phases, plot_input,
)  # fmt: skip
