"""The report's plots: what is drawn, in which colours, and what each says in words."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from compare.evidence.phases import ALONE, PHASES, phase_rows
from compare.evidence.records import Comparison, RunRecord
from compare.evidence.rows import efficiency
from compare.evidence.verdicts import Verdict, judge
from compare.evidence.words import count, three_digits
from compare.page.chart import (
    DASHES,
    INK,
    LINE,
    MARKERS,
    MUTED,
    Chart,
    Key,
    Scale,
    categories,
    linear,
    logarithmic,
    series_colour,
    series_shape,
    whole,
)
from recipe.record.schema import EpochLine, EvalLine, StepLine

MAX_POINTS = 160  # of a line: a run of 450,000 steps must not make a page of 50 MB
ALL_POINTS = 900  # of all lines of a plot
MAX_TABLE_ROWS = 24  # of a plot's values in words
ROW_HEIGHT = 40  # of a chart with a row for each cell

Table = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Plot:
    """A figure of the page."""

    name: str  # of a file
    title: str
    caption: str
    svg: str
    values: Table = ()  # what the plot shows as a table, its first row the header


@dataclass(frozen=True)
class PlotGroup:
    """Plots under a common heading; folded away where they say less than the others."""

    title: str
    plots: tuple[Plot, ...]
    folded: bool = False


@dataclass(frozen=True)
class Curves:
    """What a run wrote while it trained."""

    run: RunRecord
    steps: list[StepLine]
    epochs: list[EpochLine]
    evaluations: list[EvalLine]  # of the trained weights; an average of weights is another curve


def read_curves(run: RunRecord) -> Curves:
    return Curves(run, run.steps, run.epochs, run.evaluations)


def draw_plots(comparison: Comparison) -> list[PlotGroup]:
    """Return the page's plots but the verdict's, which stands with its sentence.

    The learning curves of all numbers of workers but the largest are folded away, and with several
    cases all of them.
    """
    groups = []
    for case in comparison.cases:
        runs = [run for run in comparison.complete if run.case == case]
        if not runs:
            continue
        runs.sort(key=lambda run: comparison.plan["configurations"].index(run.configuration))
        curves = [read_curves(run) for run in runs]
        speed = [
            plot_throughput(comparison, case, runs),
            plot_efficiency(comparison, case, runs),
            plot_train_seconds(comparison, case, runs),
            plot_step_times(comparison, case, curves),
            plot_phases(comparison, case),
            plot_input(comparison, case, runs),
        ]
        several = len(comparison.cases) > 1
        groups.append(PlotGroup(f"Speed, {case}" if several else "Speed", present(speed)))
        for workers in sorted({run.workers for run in runs}, reverse=True):
            chosen = [curve for curve in curves if curve.run.workers == workers]
            learning = [
                plot_loss(comparison, case, chosen, workers),
                *plot_loss_differences(comparison, case, chosen, workers),
                plot_accuracy(comparison, case, chosen, workers, "top1", "Top-1"),
                plot_accuracy(comparison, case, chosen, workers, "top5", "Top-5"),
                plot_time_to_accuracy(comparison, case, chosen, workers),
                plot_steps(comparison, case, chosen, workers),
            ]
            title = f"Learning, {named(case)}{count(workers, 'worker')}"
            fewer = workers != max(run.workers for run in runs)
            groups.append(PlotGroup(title, present(learning), folded=fewer or several))
    return groups


def all_plots(comparison: Comparison) -> list[Plot]:
    """Return every plot, the verdict's first."""
    grouped = [plot for group in draw_plots(comparison) for plot in group.plots]
    return [*present([plot_verdicts(judge(comparison))]), *grouped]


def present(plots: Iterable[Plot | None]) -> tuple[Plot, ...]:
    return tuple(plot for plot in plots if plot is not None)


def named(case: str) -> str:
    """Return what stands before other words of a title: nothing in a plan without cases."""
    return f"{case}, " if case else ""


def file_name(*words: object) -> str:
    """Return a plot's name as a file may bear it."""
    text = "-".join(str(word) for word in words if word != "")
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in text)


# ------------------------------------------------------------------------------------ the verdict


def plot_verdicts(verdicts: Sequence[Verdict]) -> Plot | None:
    """Draw each block's ratio, their mean and its interval, around the line of equal speed."""
    shown = [verdict for verdict in verdicts if verdict.speed is not None]
    if not shown:
        return None
    pairs = {(verdict.first, verdict.second) for verdict in shown}
    values = [1.0]
    for verdict in shown:
        assert verdict.speed is not None
        values += [*verdict.speed.ratios, verdict.speed.low or 1, verdict.speed.high or 1]
    reach = max(max(values) - 1, 1 - min(values), 0.01)
    ticks = linear([max(0.02, 1 - reach), 1 + reach])
    one = len(pairs) == 1
    first, second = shown[0].first, shown[0].second
    chart = Chart(
        Scale(max(0.0, 1 - 1.12 * reach), 1 + 1.12 * reach, ticks.ticks),
        categories(len(shown)),
        x_label=f"speed of {first} / speed of {second}"
        if one
        else "speed of the first / the second",
        height=ROW_HEIGHT * len(shown),
        ends=(f"{second} faster", f"{first} faster") if one else ("second faster", "first faster"),
    )
    chart.rule(x=1)
    table = [("compared", "speed ratio", "95 % interval", "blocks")]
    for y, verdict in enumerate(shown):
        speed = verdict.speed
        assert speed is not None
        pair = "" if one else f"{verdict.first} / {verdict.second}, "
        name = f"{named(verdict.case)}{pair}{count(verdict.workers, 'worker')}"
        chart.row_name(y, name, above=9)
        for ratio in speed.ratios:
            chart.mark(ratio, y + 0.26, "circle", MUTED, size=2, hollow=True)
        interval = "none"
        if speed.low is not None and speed.high is not None:
            chart.line([(speed.low, y), (speed.high, y)], INK, width=1.6)
            interval = f"{speed.low:.3f} to {speed.high:.3f}"
        chart.mark(speed.ratio, y, "diamond", INK, size=3.4)
        chart.hit(speed.ratio, y, f"{name}: ratio {speed.ratio:.3f}, interval {interval}")
        for block, ratio in enumerate(speed.ratios, start=1):
            chart.hit(ratio, y + 0.26, f"{name}, ratio {block} of {speed.blocks}: {ratio:.3f}")
        table.append((name, f"{speed.ratio:.3f}", interval, str(speed.blocks)))
    title = "Speed ratio and its 95 % interval"
    return Plot(
        "verdict",
        title,
        "Diamond and line: ratio and 95 % interval. Rings: one ratio for each block. At the "
        "dashed line both are equally fast.",
        chart.as_svg(f"{title}. " + " ".join(verdict.sentence() for verdict in shown)),
        tuple(table),
    )


# ------------------------------------------------------------------------------- against workers


def plot_throughput(comparison: Comparison, case: str, runs: list[RunRecord]) -> Plot:
    """Draw images a second against workers, with the line of ideal scaling."""
    cells = by_cell(runs, lambda run: run.summary.images_per_second)
    ideal = []
    for cell in cells.values():
        base = min(cell)
        start = median(cell[base])
        ideal.append([(n, start * n / base) for n in sorted(cell)])
    return plot_against_workers(
        comparison,
        cells,
        file_name("throughput", case),
        f"Training throughput{', ' + case if case else ''}",
        "images/s",
        "Training images a second, all workers together, without the first steps and without "
        "evaluation. Lines: medians; small marks: each run. Dotted: ideal, as many times the "
        "speed as workers.",
        "{:,.4g}",
        ideal,
    )


def plot_efficiency(comparison: Comparison, case: str, runs: list[RunRecord]) -> Plot | None:
    """Draw scaling efficiency against workers; None if only one number of workers was measured."""
    fewest = min(run.workers for run in runs)
    if all(run.workers == fewest for run in runs):
        return None

    def percent(run: RunRecord) -> float | None:
        if run.workers == fewest:
            return 100.0
        share = efficiency(comparison, run)
        return None if share is None else 100 * share

    cells = by_cell(runs, percent)
    all_workers = sorted({run.workers for run in runs})
    return plot_against_workers(
        comparison,
        cells,
        file_name("efficiency", case),
        f"Scaling efficiency{', ' + case if case else ''}",
        "% of ideal",
        f"Images a second and worker, in per cent of the same block’s run with "
        f"{count(fewest, 'worker')}.",
        "{:.1f} %",
        [[(n, 100.0) for n in all_workers]],
    )


def plot_train_seconds(comparison: Comparison, case: str, runs: list[RunRecord]) -> Plot | None:
    """Draw the training time against workers; None if only one number was measured."""
    if len({run.workers for run in runs}) == 1:
        return None
    # The last step of an epoch reaches into the next one: 4.0056 epochs are told as 4.
    epochs = {float(f"{run.summary.epochs:.2g}") for run in runs}
    steps = {run.summary.steps for run in runs}
    told = f"{next(iter(epochs)):g} epoch{'s' * (epochs != {1.0})}"
    what = told if len(epochs) == 1 else "what each run trained"
    same_steps = len(steps) == 1
    return plot_against_workers(
        comparison,
        by_cell(runs, lambda run: run.summary.train_seconds),
        file_name("training-time", case),
        f"Training time{', ' + case if case else ''}",
        "seconds",
        f"Seconds on the training clock for {what}, evaluation included."
        + (
            f" Every run made {count(steps.pop(), 'step')}, so that more workers saw more images."
            if same_steps
            else ""
        ),
        "{:,.4g} s",
        [],
    )


def plot_against_workers(
    comparison: Comparison,
    cells: dict[str, dict[int, list[float]]],
    name: str,
    title: str,
    unit: str,
    caption: str,
    print_value: str,
    ideal: list[list[tuple[int, float]]],
) -> Plot:
    """Draw a figure of each run and its median a configuration, against the number of workers."""
    all_n = sorted({n for cell in cells.values() for n in cell})
    values = [value for cell in cells.values() for those in cell.values() for value in those]
    span = max(all_n) - min(all_n)
    chart = Chart(
        whole(all_n, margin=0.12),
        linear([*values, *(value for line in ideal for _, value in line)], zero=True),
        x_label="workers",
        y_label=unit,
        keys=[*series_keys(comparison, cells, marked=True)]
        + ([Key("ideal", MUTED, dash="1.5 2", width=1)] if ideal else []),
    )
    for line in ideal:
        chart.line(line, MUTED, width=1, dash="1.5 2")
    table = [("workers", *(f"{name}, {unit}" for name in cells))]
    rows: dict[int, list[str]] = {n: [str(n)] for n in all_n}
    for order, (configuration, cell) in enumerate(cells.items()):
        index = comparison.plan["configurations"].index(configuration)
        colour, shape = series_colour(index), series_shape(index)
        # Side by side rather than on top of each other.
        shift = (order - (len(cells) - 1) / 2) * (0.03 * span or 0.1)
        middle = [(n + shift, median(cell[n])) for n in sorted(cell)]
        chart.line(middle, colour, width=1.7, dash=DASHES[shape])
        for n in all_n:
            for value in cell.get(n, []):
                chart.mark(n + shift, value, MARKERS[shape], colour, size=2, opacity=0.5)
                chart.hit(
                    n + shift, value, f"{configuration}, {workers_text(n)}: "
                    + print_value.format(value),
                )  # fmt: skip
            rows[n].append(print_value.format(median(cell[n])) if n in cell else "–")
        for x, value in middle:
            chart.mark(x, value, MARKERS[shape], colour, size=3.4)
    told = "; ".join(
        f"{configuration}: "
        + ", ".join(f"{print_value.format(median(cell[n]))} at {n}" for n in sorted(cell))
        for configuration, cell in cells.items()
    )
    alternative = f"{title}, medians in {unit} by number of workers. {told}."
    return Plot(
        name, title, caption, chart.as_svg(alternative), (*table, *map(tuple, rows.values()))
    )


def by_cell(runs: Iterable[RunRecord], value_of: Any) -> dict[str, dict[int, list[float]]]:
    """Return the values of all runs by configuration and number of workers."""
    cells: dict[str, dict[int, list[float]]] = {}
    for run in sorted(runs, key=lambda run: run.workers):
        value = value_of(run)
        if value is not None:
            cells.setdefault(run.configuration, {}).setdefault(run.workers, []).append(value)
    return cells


# -------------------------------------------------------------------------------- step by step


def plot_step_times(comparison: Comparison, case: str, curves: list[Curves]) -> Plot | None:
    """Draw how the times of single steps are distributed, a box for each run's steps."""
    cells: dict[tuple[int, str], list[Curves]] = defaultdict(list)
    for curve in curves:
        if curve.steps:
            cells[curve.run.workers, curve.run.configuration].append(curve)
    if not cells:
        return None
    ordered = in_table_order(comparison, cells)
    parts = (0.05, 0.25, 0.5, 0.75, 0.95)
    boxes = {
        cell: [
            (curve.run.block, quantiles([1000 * line.seconds for line in curve.steps], parts))
            for curve in cells[cell]
        ]
        for cell in ordered
    }
    most = max(len(runs) for runs in boxes.values())
    gap = 6.0
    row_height = LINE + gap * most + 8
    highest = max(box[4] for runs in boxes.values() for _, box in runs)
    chart = Chart(
        linear([0, highest], zero=True),
        categories(len(ordered)),
        x_label="milliseconds a step",
        height=row_height * len(ordered),
    )
    table = [("configuration", "workers", *(f"{100 * part:.0f} %, ms" for part in parts))]
    for y, (workers, name) in enumerate(ordered):
        index = comparison.plan["configurations"].index(name)
        colour = series_colour(index)
        chart.row_name(y, f"{name}, {workers_text(workers)}", above=row_height / 2 - LINE + 2)
        runs = boxes[workers, name]
        for order, (block, box) in enumerate(runs):
            at = y + (LINE / 2 + (order - (len(runs) - 1) / 2) * gap) / row_height
            low, first, middle, third, high = box
            chart.line([(low, at), (high, at)], colour, width=1)
            chart.bar(first, third, at, 4, colour, opacity=0.5)
            chart.mark(middle, at, MARKERS[series_shape(index)], colour, size=2.3)
            chart.hit(
                middle, at, f"{name}, {workers_text(workers)}, block {block}: median "
                f"{three_digits(middle)} ms, 5 to 95 %: {three_digits(low)} to "
                f"{three_digits(high)} ms",
            )  # fmt: skip
        medians = [median(box[part] for _, box in runs) for part in range(len(parts))]
        table.append((name, str(workers), *map(three_digits, medians)))
    title = f"Step times{', ' + case if case else ''}"
    told = "; ".join(f"{line[0]} at {line[1]}: {line[4]} ms" for line in table[1:])
    return Plot(
        file_name("step-times", case),
        title,
        "One line a run: 5th to 95th percentile of its steps; thick: the middle half; mark: the "
        "median.",
        chart.as_svg(f"{title}, median time of a step. {told}."),
        tuple(table),
    )


# Colour and opacity of each phase: greys for computing, colours for waiting.
PHASE_STYLES = {
    "data_seconds": ("var(--series-2)", 0.9),
    "forward_seconds": (MUTED, 0.35),
    "backward_seconds": (MUTED, 0.65),
    "exposed_communication_seconds": ("var(--series-1)", 0.95),
    "optimizer_seconds": (INK, 0.85),
}


def plot_phases(comparison: Comparison, case: str) -> Plot | None:
    """Draw what a step's time is made of; None if no run measured it."""
    rows = [row for row in phase_rows(comparison) if row.case == case]
    if not rows:
        return None
    unsplit = [row for row in rows if row.exposed_communication_seconds is None]
    chart = Chart(
        linear([0, *(1000 * row.step_seconds for row in rows)], zero=True),
        categories(len(rows)),
        x_label="milliseconds a step",
        height=ROW_HEIGHT * len(rows),
        keys=[
            Key(name, PHASE_STYLES[field][0], kind="box", opacity=PHASE_STYLES[field][1])
            for field, name in PHASES.items()
            if field != "exposed_communication_seconds" or len(unsplit) < len(rows)
        ],
    )
    table: list[tuple[str, ...]] = [
        ("configuration", "workers", *(f"{name}, ms" for name in PHASES.values()), "step, ms")
    ]
    told = []
    for y, row in enumerate(rows):
        cell = f"{row.configuration}, {workers_text(row.workers)}"
        chart.row_name(y, cell, above=9)
        chart.row_value(y, f"{1000 * row.step_seconds:.3g} ms", above=9)
        at = 0.0
        texts = []
        for field, name in row.words.items():
            seconds = getattr(row, field)
            texts.append("not measured" if seconds is None else f"{1000 * seconds:.3g}")
            if seconds is not None:
                ms = 1000 * seconds
                # Noise may bring the difference of two means below 0; a bar cannot be there.
                end = at + max(0.0, ms)
                chart.bar(at, end, y + 0.14, 13, *PHASE_STYLES[field])
                share = 100 * seconds / row.step_seconds
                chart.hit(
                    (at + end) / 2, y + 0.14, f"{cell}: {name} {ms:.3g} ms, {share:.1f} % of a step"
                )
                at = end
        table.append(
            (row.configuration, str(row.workers), *texts, f"{1000 * row.step_seconds:.3g}")
        )
        told.append(
            f"{cell}: "
            + ", ".join(f"{name} {1000 * seconds:.3g} ms" for name, seconds in row.parts.items())
            + (f"; {row.note}" if row.note else "")
        )
    title = f"What a step’s time goes into{', ' + case if case else ''}"
    notes = [f" {row.configuration}, {workers_text(row.workers)}: {row.note}." for row in rows
             if row.note]  # fmt: skip
    return Plot(
        file_name("step-breakdown", case),
        title,
        "Means over the steps of rank 0."
        + (
            " Exposed communication: by how much the exchange of gradients makes a step longer; "
            "what hides behind the backward pass is no part of it."
            if len(unsplit) < len(rows)
            else ""
        )
        + (
            " With one worker nobody is there to talk to: what stands in its place is "
            f"{ALONE['exposed_communication_seconds']}."
            if any(row.workers == 1 and row not in unsplit for row in rows)
            else ""
        )
        + (" Where the exchange was not measured apart, backward holds it." if unsplit else "")
        + "".join(notes),
        chart.as_svg(f"{title}. {'. '.join(told)}."),
        tuple(table),
    )


def plot_input(comparison: Comparison, case: str, runs: list[RunRecord]) -> Plot | None:
    """Draw which share of the step each run waited for its input; None if none measured it."""
    cells: dict[tuple[int, str], list[RunRecord]] = defaultdict(list)
    for run in runs:
        if run.summary.input.wait_share is not None:
            cells[run.workers, run.configuration].append(run)
    if not cells:
        return None
    ordered = in_table_order(comparison, cells)
    shares = {
        cell: [100 * (run.summary.input.wait_share or 0.0) for run in cells[cell]]
        for cell in ordered
    }
    chart = Chart(
        linear([0, *(share for those in shares.values() for share in those), 1], zero=True),
        categories(len(ordered)),
        x_label="% of a step waited for its batch",
        height=ROW_HEIGHT * len(ordered),
    )
    table = [("configuration", "workers", "input wait, % of step")]
    for y, (workers, name) in enumerate(ordered):
        index = comparison.plan["configurations"].index(name)
        colour, marker = series_colour(index), MARKERS[series_shape(index)]
        cell = f"{name}, {workers_text(workers)}"
        middle = median(shares[workers, name])
        chart.row_name(y, cell, above=9)
        chart.row_value(y, f"{middle:.3g} %", above=9)
        chart.bar(0, middle, y + 0.14, 9, colour, opacity=0.5)
        for run, share in zip(cells[workers, name], shares[workers, name], strict=True):
            chart.mark(share, y + 0.14, marker, colour, size=2)
            chart.hit(share, y + 0.14, f"{cell}, block {run.block}: {share:.3g} %")
        table.append((name, str(workers), f"{middle:.3g}"))
    title = f"Waiting for input{', ' + case if case else ''}"
    told = "; ".join(f"{line[0]} at {line[1]}: {line[2]} %" for line in table[1:])
    return Plot(
        file_name("input", case),
        title,
        "Share of a step’s time in which its batch was not there yet. Bars: medians; marks: each "
        "run. Near zero, the input keeps up and has no part in the result.",
        chart.as_svg(f"{title}, median share of a step. {told}."),
        tuple(table),
    )


def plot_steps(
    comparison: Comparison, case: str, curves: list[Curves], workers: int
) -> Plot | None:
    """Draw each run's speed from its first step to its last: drift and hiccups show here."""
    lines = [
        (
            curve.run,
            binned(
                [
                    (line.step / steps_per_epoch(curve.run), line.images_per_second)
                    for line in curve.steps
                ],
                points_each(curves),
            ),
        )
        for curve in curves
        if curve.steps
    ]
    if not lines:
        return None
    chart = Chart(
        linear([x for _, line in lines for x, _ in line], zero=True),
        linear([y for _, line in lines for _, y in line], zero=True),
        x_label="epoch",
        y_label="images/s",
        keys=series_keys(comparison, [run.configuration for run, _ in lines]),
    )
    for run, line in lines:
        draw_run(chart, comparison, run, line, width=1, opacity=0.8)
        for x, y in line:
            chart.hit(x, y, f"{run_name(run)}, epoch {x:.3g}: {y:,.4g} images/s")
    title = f"Throughput over the run, {named(case)}{workers_text(workers)}"
    return Plot(
        file_name("steps", case, workers),
        title,
        "Images a second of single steps, one line a run (medians of neighbouring steps where "
        "there are many): drift and hiccups show here.",
        chart.as_svg(f"{title}: images a second at each step, one line a run."),
    )


def plot_loss(comparison: Comparison, case: str, curves: list[Curves], workers: int) -> Plot | None:
    """Draw training and validation loss against epochs, all runs over each other."""
    return plot_by_epoch(
        comparison, case, curves, workers, "loss", "Loss", "cross-entropy", "{:.4g}", is_loss=True
    )


def plot_accuracy(
    comparison: Comparison, case: str, curves: list[Curves], workers: int, field: str, name: str
) -> Plot | None:
    """Draw training and validation accuracy against epochs."""
    return plot_by_epoch(
        comparison, case, curves, workers, field, name, f"{name.lower()}, %", "{:.2f} %"
    )


def plot_by_epoch(
    comparison: Comparison,
    case: str,
    curves: list[Curves],
    workers: int,
    field: str,
    name: str,
    unit: str,
    print_value: str,
    is_loss: bool = False,
) -> Plot | None:
    """Draw a figure of training and validation against epochs; None if no run has any."""

    def points(lines: Sequence[EpochLine | EvalLine]) -> list[tuple[float, float]]:
        return [(line.epoch + 1, getattr(line, field)) for line in lines]

    drawn = [(curve.run, points(curve.epochs), points(curve.evaluations)) for curve in curves]
    drawn = [(run, train, test) for run, train, test in drawn if train or test]
    if not drawn:
        return None
    everything = [point for _, train, test in drawn for point in (*train, *test)]
    values = [y for _, y in everything if math.isfinite(y)]
    # A logarithm where one bad epoch would press all others to the floor.
    steep = is_loss and values and min(values) > 0 and max(values) / min(values) > 30
    chart = Chart(
        linear([x for x, _ in everything]),
        logarithmic(values) if steep else linear(values, zero=is_loss),
        x_label="epoch",
        y_label=unit,
        keys=[
            *series_keys(comparison, [run.configuration for run, _, _ in drawn]),
            Key("training", MUTED, dash="2 3.6", width=1.2),
            Key("validation", MUTED, width=1.6),
        ],
    )
    last: dict[str, dict[int, tuple[str, str]]] = defaultdict(dict)
    most = points_each(curves)
    for run, train, test in drawn:
        draw_run(chart, comparison, run, binned(train, most), width=1.2, opacity=0.9, dotted=True)
        draw_run(chart, comparison, run, binned(test, most), width=1.5, opacity=0.9)
        for kind, line in (("training", train), ("validation", test)):
            for x, y in binned(line, most):
                value = print_value.format(y)
                chart.hit(x, y, f"{run_name(run)}, {kind}, epoch {x:.3g}: {value}")
        last[run.configuration][run.block] = (
            print_value.format(train[-1][1]) if train else "–",
            print_value.format(test[-1][1]) if test else "–",
        )
    title = f"{name} by epoch, {named(case)}{workers_text(workers)}"
    table = [("configuration", "block", "training, last", "validation, last")]
    table += [(c, str(b), *values) for c, blocks in last.items() for b, values in blocks.items()]
    told = "; ".join(f"{c} block {b}: {value}" for c, b, _, value in table[1:])
    return Plot(
        file_name(field, case, workers),
        title,
        "Every run is drawn; short dashes are training figures (of augmented images), the others "
        f"validation.{coincidence(curves)}",
        chart.as_svg(f"{title}. Last validation values: {told}."),
        tuple(table[: MAX_TABLE_ROWS + 1]),
    )


def coincidence(curves: list[Curves]) -> str:
    """Say why curves lie on each other, where they do."""
    weights = {(curve.run.block, curve.run.summary.weights_sha256) for curve in curves}
    blocks = {curve.run.block for curve in curves}
    several = len({curve.run.configuration for curve in curves}) > 1
    if several and len(weights) == len(blocks):
        return " All final weights of a block are bit-equal: the configurations’ curves coincide."
    return ""


def plot_loss_differences(
    comparison: Comparison, case: str, curves: list[Curves], workers: int
) -> list[Plot]:
    """Draw for each judged pair how far the losses of the same step are apart."""
    by_run = {(curve.run.block, curve.run.configuration): curve for curve in curves}
    plots = []
    for first, second in comparison.plan["pairs"]:
        lines = []
        for block in sorted({curve.run.block for curve in curves}):
            a, b = by_run.get((block, first)), by_run.get((block, second))
            if a is None or b is None:
                continue
            losses = {line.step: line.loss for line in b.steps}
            points = [
                (line.step / steps_per_epoch(a.run), line.loss - losses[line.step])
                for line in a.steps
                if line.step in losses
            ]
            if points:
                lines.append((block, a.run, points))
        if not lines:
            continue
        largest = max(
            (abs(y) for _, _, line in lines for _, y in line if math.isfinite(y)), default=0.0
        )
        equal = largest == 0
        chart = Chart(
            linear([x for _, _, line in lines for x, _ in line], zero=True),
            Scale(-1, 1, ((0, "0"),)) if equal else linear([-largest, largest], ticks=4),
            x_label="epoch",
            y_label="difference of loss",
            height=90 if equal else 150,
        )
        most = max(24, ALL_POINTS // len(lines))
        index = comparison.plan["configurations"].index(second)
        table = [("block", "steps in common", "largest difference")]
        for block, _, line in lines:
            shown = binned(line, min(MAX_POINTS, most), farthest_from_zero)
            chart.line(shown, series_colour(index), width=1.1, opacity=0.75)
            for x, y in shown:
                chart.hit(x, y, f"block {block}, epoch {x:.3g}: {y:.3g}")
            apart = max((abs(y) for _, y in line), key=lambda y: (math.isnan(y), y))
            table.append((str(block), str(len(line)), f"{apart:.3g}"))
        title = f"Loss of {first} minus {second}, {named(case)}{workers_text(workers)}"
        caption = (
            "The two computed the same training loss at every step, bit by bit."
            if equal and all(line[2] == "0" for line in table[1:])
            else "Difference of the training losses at the same step, a line a block (the largest "
            "of neighbouring steps where there are many)."
        )
        told = "; ".join(f"block {block}: {apart}" for block, _, apart in table[1:])
        plots.append(
            Plot(
                file_name("loss-difference", first, second, case, workers),
                title,
                caption,
                chart.as_svg(f"{title}. Largest difference of {told}."),
                tuple(table),
            )
        )
    return plots


def plot_time_to_accuracy(
    comparison: Comparison, case: str, curves: list[Curves], workers: int
) -> Plot | None:
    """Draw validation top-1 against the training clock."""
    lines = [
        (curve.run, [(line.train_seconds_so_far, line.top1) for line in curve.evaluations])
        for curve in curves
        if curve.evaluations
    ]
    if not lines:
        return None
    chart = Chart(
        linear([x for _, line in lines for x, _ in line], zero=True),
        linear([y for _, line in lines for _, y in line]),
        x_label="seconds since training began, evaluation included",
        y_label="validation top-1, %",
        keys=series_keys(comparison, [run.configuration for run, _ in lines]),
    )
    table = [("configuration", "block", "last top-1, %", "after, s")]
    most = points_each(curves)
    for run, line in lines:
        draw_run(chart, comparison, run, binned(line, most), 1.3, 0.9, marked=len(line) <= 30)
        for x, y in binned(line, most):
            chart.hit(x, y, f"{run_name(run)}: {y:.2f} % after {x:,.4g} s")
        table.append(
            (run.configuration, str(run.block), f"{line[-1][1]:.2f}", f"{line[-1][0]:,.4g}")
        )
    title = f"Top-1 against time, {named(case)}{workers_text(workers)}"
    told = "; ".join(f"{c} block {b}: {top1} % after {s} s" for c, b, top1, s in table[1:])
    return Plot(
        file_name("time-to-accuracy", case, workers),
        title,
        "Validation top-1 on the training clock, which evaluation is on. One line a run.",
        chart.as_svg(f"{title}. {told}."),
        tuple(table[: MAX_TABLE_ROWS + 1]),
    )


# --------------------------------------------------------------------------------------- helpers


def series_keys(comparison: Comparison, names: Iterable[str], marked: bool = False) -> list[Key]:
    """Return the legend's entries of the configurations, in the plan's order."""
    present_names = set(names)
    keys = []
    for index, name in enumerate(comparison.plan["configurations"]):
        if name in present_names:
            shape = series_shape(index)
            keys.append(
                Key(
                    name,
                    series_colour(index),
                    dash=DASHES[shape],
                    width=1.7 if marked else line_width(index, 1.5),
                    marker=MARKERS[shape] if marked else "",
                    opacity=1 if marked or index else 0.6,
                )
            )
    return keys


def line_width(index: int, width: float) -> float:
    """The first series is drawn broad, below the others: equal curves both stay in sight."""
    return width * (2.2 if index == 0 else 1.0)


def draw_run(
    chart: Chart,
    comparison: Comparison,
    run: RunRecord,
    points: Sequence[tuple[float, float]],
    width: float,
    opacity: float,
    dotted: bool = False,
    marked: bool = False,
) -> None:
    """Draw one run's line in its configuration's colour."""
    index = comparison.plan["configurations"].index(run.configuration)
    colour, shape = series_colour(index), series_shape(index)
    if dotted:
        # Dashes of equal curves stand beside each other: each series has a length of its own.
        chart.line(points, colour, width, f"2 {3.6 + 1.3 * index:g}", opacity)
        return
    faint = opacity * (0.6 if index == 0 else 1.0)
    chart.line(points, colour, line_width(index, width), DASHES[shape], faint)
    if marked:
        for x, y in points:
            chart.mark(x, y, MARKERS[shape], colour, size=2, opacity=faint)


def points_each(curves: list[Curves]) -> int:
    """Return how many points a line may have where so many runs are drawn."""
    return max(24, min(MAX_POINTS, ALL_POINTS // len(curves)))


def middle_of(values: Sequence[float]) -> float:
    return float(median(values))


def farthest_from_zero(values: Sequence[float]) -> float:
    return max(values, key=lambda value: (math.isnan(value), abs(value)))


def binned(
    points: Sequence[tuple[float, float]], most: int, choose: Any = middle_of
) -> list[tuple[float, float]]:
    """Thin a long line out: equally many neighbours become their median, or another of them."""
    size = -(-len(points) // most)
    if size <= 1:
        return list(points)
    return [
        (
            middle_of([x for x, _ in points[start : start + size]]),
            choose([y for _, y in points[start : start + size]]),
        )
        for start in range(0, len(points), size)
    ]


def quantiles(values: Iterable[float], parts: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered[min(int(part * len(ordered)), len(ordered) - 1)] for part in parts]


def in_table_order(
    comparison: Comparison, cells: Iterable[tuple[int, str]]
) -> list[tuple[int, str]]:
    """Sort cells as the table does: by workers, then as in the plan."""
    names = comparison.plan["configurations"]
    return sorted(cells, key=lambda cell: (cell[0], names.index(cell[1])))


def run_name(run: RunRecord) -> str:
    return f"{run.configuration}, block {run.block}"


def steps_per_epoch(run: RunRecord) -> float:
    return run.summary.steps / max(1, run.summary.epochs)


def workers_text(workers: int) -> str:
    return count(workers, "worker")
