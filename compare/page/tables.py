"""The report's tables: each column is described once, for the page, the terminal and Markdown."""

import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tabulate

from compare.evidence.paired import Estimate
from compare.evidence.records import ENGINES
from compare.evidence.rows import BLOCKS_IN_DETAIL, IMAGES, PHASES, PhaseRow, TrainingRow, hours
from compare.evidence.words import digits, loss_text, place_text, three_digits
from compare.page.chart import COLOURS
from compare.page.report import Report
from compare.plan.plan import TRAINERS
from compare.plan.sources import ROOT

tabulate.MIN_PADDING = 0  # of headers: the table is to fit into 100 columns
NOT_MEASURED = "not measured"
EQUAL = {True: "equal", False: "other", None: "–"}


@dataclass(frozen=True)
class TableCell:
    """A cell of a table of figures."""

    text: str
    value: float | None = None  # what it is sorted by and copied as, where that is not the text
    aside: str = ""
    is_alarm: bool = False
    series: int | None = None  # the colour of a configuration; -1: a row that is of none


@dataclass(frozen=True)
class Column:
    """A column: its name with the unit, and what it shows of a row."""

    name: str
    cell: Callable[[Any], TableCell]
    is_number: bool = True


@dataclass(frozen=True)
class Table:
    """A table of figures that can be sorted and copied; on a phone each row is a record."""

    title: str
    note: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[TableCell, ...], ...]
    starts_group: tuple[bool, ...] = ()  # row by row: is it parted from the one before?
    is_sortable: bool = True


def figure(value: float | None, pattern: str = "", none: str = "–", aside: str = "") -> TableCell:
    """Return a figure's cell; without a pattern it gets three digits."""
    if value is None:
        return TableCell(none)
    plain = three_digits(value) if value > 0 else f"{value:.3g}"
    return TableCell(pattern.format(value) if pattern else plain, value, aside)


def estimated(estimate: Estimate | None, scale: float, pattern: str) -> TableCell:
    """Return an estimate's cell, its interval beside it if there is one."""
    if estimate is None:
        return TableCell("–")
    aside = ""
    if estimate.low is not None and estimate.high is not None:
        low, high = (pattern.format(scale * end) for end in (estimate.low, estimate.high))
        aside = f"({low}–{high})"
    return figure(scale * estimate.ratio, pattern, aside=aside)


def column(
    name: str, field: str, pattern: str = "", none: str = "–", scale: float | None = 1
) -> Column:
    """Return the column of a row's field: a figure, or without a scale a word."""

    def cell(row: Any) -> TableCell:
        value = getattr(row, field)
        if scale is None:
            return TableCell(str(value))
        return figure(None if value is None else scale * value, pattern, none)

    return Column(name, cell, is_number=scale is not None)


def counted(number: int, planned: int | None) -> TableCell:
    """Return how many there are, in red with the plan's number where some are missing."""
    if planned is None or planned <= number:
        return TableCell(str(number), number)
    return TableCell(f"{number} of {planned}", number, is_alarm=True)


# ------------------------------------------------------------------------------------- the tables

TRAININGS = (
    column("start and end, s", "startup_seconds", "{:,.1f}"),
    column("training, s", "train_seconds", "{:,.1f}"),
    column("evaluation, s", "evaluation_seconds", "{:,.1f}"),
    column("top-1, %", "top1", "{:.2f}"),
    column("top-5, %", "top5", "{:.2f}"),
    Column("loss", lambda row: TableCell(loss_text(row.loss), row.loss)),
    column("weights", "weights", scale=None),
    Column("runs", lambda row: counted(row.runs, row.planned_runs)),
)
STEPS = (
    column("median, ms", "median"),
    column("p95, ms", "p95"),
    column("p99, ms", "p99"),
    column("longest, ms", "longest"),
    column("steps", "steps", "{:,}"),
)
INPUT = (
    column("images/s", "images_per_second", none=NOT_MEASURED),
    column("files/s", "files_per_second"),
    column("MB/s", "megabytes_per_second"),
    column("input wait, %", "wait_share", "{:.2f}", NOT_MEASURED, 100),
)
ENERGY = {
    "gpu_joules_per_image": column("GPU J per image", "gpu_joules_per_image", none=NOT_MEASURED),
    "gpu_watts": column("GPU watts", "gpu_watts", "{:,.0f}", NOT_MEASURED),
    "gpu_utilization_percent": column("GPU busy, %", "gpu_utilization_percent", "{:.0f}",
                                      NOT_MEASURED),
    "cpu_joules_per_image": column("CPU J per image", "cpu_joules_per_image", none=NOT_MEASURED),
}  # fmt: skip


def tables(report: Report) -> list[Table]:
    """Return the page's tables in their order: speed first, and apart from it whole trainings."""
    found = text_tables(report)
    if report.trainings:
        found.append(resource_table(report))
    step_note = (
        f"Of the whole trainings of at most {BLOCKS_IN_DETAIL} blocks, on rank 0. Of 100 steps "
        "95 are shorter than p95, 99 than p99."
    )
    found.append(cell_table(report, "Step times", step_note, STEPS, report.steps))
    if any((row.wait_share, row.images_per_second) != (None, None) for row in report.trainings):
        note = (
            "What all workers read during the whole trainings, which is not the input's limit, and "
            "the share of the step time spent waiting for it. Files and MB: only for images read "
            "from files."
        )
        found.append(cell_table(report, "Input", note, INPUT, report.trainings))
    return [table for table in found if table.rows]


def text_tables(report: Report) -> list[Table]:
    """Return the tables of the terminal and of Markdown."""
    note = (
        "Medians. Start and end: from the launcher's start to its end, without the training clock. "
        "Evaluation: with checkpoints. Top-1, top-5 and loss: last validation. Weights: whether "
        "the final weights are bit-equal to those of the block's other configurations."
    )
    if report.comparison.is_by_turns:
        note += " No verdict on speed uses these runs: that is measured by turns."
    most = max((row.planned_runs for row in report.trainings), default=1)
    title = f"Whole trainings, {'one' if most == 1 else most} each"
    found = [speed_table(report), cell_table(report, title, note, TRAININGS, report.trainings)]
    if any(run.engine not in ENGINES for run in report.comparison.runs):
        found.append(ladder_table(report))
    return [*found, phase_table(report)]


def speed_table(report: Report) -> Table:
    """Return how fast each cell trained, and what that makes of ImageNet's 90 epochs."""
    is_by_turns, price = report.comparison.is_by_turns, report.price_per_hour
    confidence = f"{100 * report.comparison.confidence:.4g}"
    columns = [
        Column(
            "images/s",
            lambda row: figure(
                row.images_per_second,
                aside=f"({three_digits(row.lowest)}–{three_digits(row.highest)})",
            ),
        ),
        column("CPU ms per image", "cpu_ms_per_image"),
        Column("blocks", lambda row: counted(row.blocks, row.planned_blocks)),
    ]
    note = "Medians over blocks; images/s with the range of the blocks. CPU time: of all workers."
    if any(row.scaling for row in report.speed):
        columns[1:1] = [Column("scaling, %", lambda row: estimated(row.scaling, 100, "{:.0f}"))]
        other = "the block of the same number, measured at another time"
        note += (
            " Scaling: images/s per worker, as a percentage of that with the fewest workers in "
            f"{other if is_by_turns else 'the same block'}, with its {confidence} % interval."
        )
    if report.is_of_imagenet:
        columns.append(Column("90 epochs, hours", lambda row: figure(hours(row.images_per_second))))
        note += (
            f" 90 epochs: of ImageNet's {IMAGES:,} images at this speed, of this model and input, "
            "without evaluation"
        )
        if price is not None:
            cost = price  # of all workers
            columns.append(
                Column(
                    "90 epochs, cost",
                    lambda row: figure(cost * hours(row.images_per_second), "{:,.2f}"),
                )
            )
            note += f", at {price:g} an hour for all workers"
        note += "."
    title = "Speed, by turns" if is_by_turns else "Speed, of whole runs"
    return cell_table(report, title, note, columns, report.speed)


def ladder_table(report: Report) -> Table:
    """Return what each way of training costs, where there are others than the two engines. Not a
    speed: that of a pipeline's two ranks, say, is of other work than two workers'."""

    def lines(row: TrainingRow) -> TableCell:
        script = ROOT / TRAINERS[row.engine]
        return figure(len(script.read_text().splitlines()) if script.exists() else None, "{:,}")

    rows = report.trainings
    note = (
        "Network: what the hosts' interfaces sent for all processes, loopback included, from the "
        "first step to the end, with validation; messages through shared memory are not there. "
        "Lines: of the script alone, its text at the top included. Weights: bit-equal to those of "
        f"{next(iter(report.comparison.configurations))}?"
    )
    own = []
    if any(row.bubble_share is not None for row in rows):
        own.append(column("bubble, %", "bubble_share", "{:.0f}", scale=100))
        note += " Bubble: the share of the steps in which the mean stage of a pipeline has no work."
    if any(row.staleness is not None for row in rows):
        own.append(column("staleness, updates", "staleness", "{:.2f}"))
        note += " Staleness: updates since the weights that a gradient is of, in the mean."
    columns = [
        Column("memory, MB", lambda row: figure(1e-6 * row.peak_memory.ratio, "{:,.0f}")),
        column("network, MB a step", "network_bytes_per_step", "{:,.1f}", scale=1e-6),
        *own,
        column("top-1, %", "top1", "{:.2f}"),
        Column("lines", lines),
        Column("weights", lambda row: TableCell(EQUAL[row.has_firsts_weights]), is_number=False),
    ]
    return cell_table(report, "The ladder", note, columns, rows)


def phase_table(report: Report) -> Table:
    """Return the phases of each cell's step, and with signs what each verdict's two differ in."""
    rows, differences = report.phases, report.phase_differences

    def milliseconds(field: str) -> Callable[[PhaseRow], TableCell]:
        def cell(row: PhaseRow) -> TableCell:
            value = getattr(row, field)
            if value is None or not row.is_difference:
                return figure(value and 1000 * value)
            return TableCell(f"{1000 * value:+.1f}".replace("-", "−"), 1000 * value)

        return cell

    # In short words: on a terminal the table is to fit into 100 columns.
    columns = [Column(name.split()[0], milliseconds(field)) for field, name in PHASES.items()]
    columns.append(Column("step", milliseconds("step_seconds")))
    note = (
        "Means over the steps of rank 0, of one run each. Exposed: how much longer a step takes "
        "because of the gradient exchange; with one worker, who has nobody to exchange with, the "
        "engine's own work."
    )
    if differences:
        note += " Under a difference that a verdict shows: first less second, so that a minus is "
        note += "what the first saves."
    ratios = {
        (v.case, v.workers, f"{v.first} − {v.second}"): v.speed.ratio
        for v in report.verdicts
        if v.speed is not None
    }
    denied = [
        f"{row.configuration} ({place_text(row.case, row.workers)})"
        for row in differences
        if (row.step_seconds < 0) != (ratios[row.case, row.workers, row.configuration] > 1)
    ]
    if denied:
        note += " The runs that measured the phases do not show the verdict's difference: "
        note += f"{', '.join(denied)}."
    if sent := dict.fromkeys(f"{row.sent_bytes / 1e6:.1f}" for row in rows if row.sent_bytes):
        note += (
            f" Sent by each worker in a step, if the all-reduce is a ring: {' or '.join(sent)} MB. "
            "Over the exposed time that is the most that the links can have carried."
        )
        columns.append(
            Column(
                "sent / exposed, GB/s",
                lambda row: figure(row.exposed_bandwidth and row.exposed_bandwidth / 1e9),
            )
        )
    cells = report.comparison.cells
    order = {(case, workers): i for i, (case, workers, _) in enumerate(cells)}
    both = sorted([*rows, *differences], key=lambda row: order[row.case, row.workers])
    return cell_table(report, "A step's time by phase, ms", note, columns, both)


def resource_table(report: Report) -> Table:
    """Return memory, stragglers and energy of whole trainings."""
    rows = report.trainings
    measured = [name for name in ENERGY if any(getattr(row, name) is not None for row in rows)]
    energy = [ENERGY[name] for name in measured] or [
        column("energy, J per image", "gpu_joules_per_image", none=NOT_MEASURED)
    ]

    def spread(row: TrainingRow) -> TableCell:
        ratio = row.straggler_ratio
        none = "–" if row.workers == 1 else NOT_MEASURED
        return figure(None if ratio is None else 100 * (ratio - 1), "{:.1f}", none)

    note = (
        f"Memory: of the largest worker, with its {100 * report.comparison.confidence:.4g} % "
        "interval from three runs on."
    )
    phases = dict.fromkeys(row.straggler_phases for row in rows if row.straggler_ratio is not None)
    if phases:
        note += (
            f" Straggler spread: how much longer the slowest rank's {' or '.join(phases)} takes "
            "than the median rank's."
        )
    note += " Energy: of the GPU by NVML, of the processor by RAPL."
    columns = [
        Column("memory, MB", lambda row: estimated(row.peak_memory, 1e-6, "{:,.0f}")),
        Column("straggler spread, %", spread),
        *energy,
    ]
    return cell_table(report, "Resources", note, columns, rows)


def cell_table(
    report: Report, title: str, note: str, columns: Iterable[Column], rows: Sequence[Any]
) -> Table:
    """Return a table with a row for each cell; with a column for the case if there are several."""
    names = [*report.comparison.configurations]

    def configuration(row: Any) -> TableCell:
        name = row.configuration
        return TableCell(name, series=names.index(name) % len(COLOURS) if name in names else -1)

    whole = (
        *(column("case", "case", scale=None),) * (len(report.comparison.cases) > 1),
        Column("configuration", configuration, is_number=False),
        column("workers", "workers", "{}"),
        *columns,
    )
    places = [(row.case, row.workers) for row in rows]
    return Table(
        title,
        note,
        whole,
        tuple(tuple(column.cell(row) for column in whole) for row in rows),
        tuple(i > 0 and places[i] != places[i - 1] for i in range(len(rows))),
    )


def of_case(table: Table, case: str) -> Table:
    """Return the rows of a case, without the column that names it."""
    if table.columns[0].name != "case":
        return table
    rows = tuple(row[1:] for row in table.rows if row[0].text == case)
    return replace(table, columns=table.columns[1:], rows=rows)


# ------------------------------------------------------------------------------------- the square


def square_tables(report: Report, case: str) -> list[Table]:
    """Return, for each number of workers at which both engines ran over the same two transports,
    their speeds, and beside them what engine and transport make of each other."""
    measured = [v for v in report.verdicts if v.case == case and v.speed is not None]
    numbers = dict.fromkeys(verdict.workers for verdict in measured)
    return [square_table(report, case, n) for n in numbers if report.comparison.square]


def square_table(report: Report, case: str, workers: int) -> Table:
    """Return the square of one case at one number of workers."""
    corners = report.comparison.square
    here = [v for v in report.verdicts if (v.case, v.workers) == (case, workers) and v.speed]
    rates = {
        row.configuration: row.images_per_second
        for row in report.speed
        if (row.case, row.workers) == (case, workers)
    }
    ratios = {(v.first, v.second): v.speed for v in here}
    ratios |= {(v.second, v.first): v.speed.inverse() for v in here if v.speed}
    interaction = next((v.speed for v in here if v.is_interaction), None)
    engines = list(dict.fromkeys(engine for engine, _ in corners))
    new, base = dict.fromkeys(transport for _, transport in corners)

    def cell(found: Estimate | None) -> TableCell:
        return estimated(found, 1, f"{{:.{max(3, digits(found))}f}}" if found else "")

    def speed(configuration: str) -> TableCell:
        rate = rates.get(configuration)
        return TableCell("–") if rate is None else TableCell(f"{three_digits(rate)} images/s", rate)

    lines: list[tuple[TableCell, ...]] = []
    for engine in engines:
        of_base, of_new = corners[engine, base], corners[engine, new]
        effect = cell(ratios.get((of_new, of_base)))
        name = TableCell(ENGINES[engine], series=-1)
        lines.append((name, speed(of_base), speed(of_new), effect))
    pairs = [(corners[engines[0], over], corners[engines[1], over]) for over in (base, new)]
    named = TableCell(" / ".join(ENGINES[engine] for engine in engines), series=-1)
    lines.append((named, *(cell(ratios.get(pair)) for pair in pairs), cell(interaction)))
    return Table(
        f"Engine and transport, {place_text(case, workers)}",
        "Ratios of speed with their intervals. Below on the right the interaction: the engines' "
        f"ratio over {new} by that over {base}; it is 1 where engine and transport do not depend "
        "on each other.",
        tuple(
            Column(head, lambda row: row, head != "engine")
            for head in ("engine", f"over {base}", f"over {new}", f"transport: {new} / {base}")
        ),
        tuple(lines),
        (False, False, True),
        is_sortable=False,
    )


# ---------------------------------------------------------------------------------------- as text


def table_text(table: Table, markdown: bool = False) -> str:
    """Return a table for the terminal, or as Markdown."""
    headers = [column.name for column in table.columns]
    cells = [[f"{cell.text} {cell.aside}".rstrip() for cell in row] for row in table.rows]
    align = ["right" if column.is_number else "left" for column in table.columns]
    return grid(cells, headers, align, markdown)


def grid(
    cells: Sequence[Sequence[str]],
    headers: Sequence[str],
    align: Sequence[str],
    markdown: bool = False,
) -> str:
    """Return cells as a grid of text; on the terminal long headers take several lines."""
    if markdown:
        cells = [[cell.replace("|", "\\|") for cell in line] for line in cells]
    else:
        wrapper = textwrap.TextWrapper(8, break_long_words=False, break_on_hyphens=False)
        headers = [wrapper.fill(name) for name in headers]
    return tabulate.tabulate(
        cells,
        headers,
        tablefmt="pipe" if markdown else "simple",
        disable_numparse=True,
        colalign=align,
    )
