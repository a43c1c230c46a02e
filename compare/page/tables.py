"""The report's tables: each column is described once, for the page, the terminal and Markdown."""

import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tabulate

from compare.evidence.paired import Estimate
from compare.evidence.phases import PHASES, PhaseRow, phase_differences, phase_rows
from compare.evidence.records import ENGINES, Comparison
from compare.evidence.rows import (
    BLOCKS_IN_DETAIL,
    IMAGES,
    LadderRow,
    ResourceRow,
    by_turns,
    hours,
    input_rows,
    ladder_rows,
    resource_rows,
    speed_rows,
    step_rows,
    training_rows,
)
from compare.evidence.verdicts import Verdict
from compare.evidence.words import digits, loss_text, place_text, three_digits
from compare.page.chart import COLOURS
from compare.plan.plan import ROOT, TRAINERS

tabulate.MIN_PADDING = 0  # of headers: the table is to fit into 100 columns
NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Cell:
    """A cell of a table of figures."""

    text: str
    value: float | None = None  # what it is sorted by and copied as, where that is not the text
    aside: str = ""
    is_alarm: bool = False
    series: int | None = None  # the colour of a configuration; -1: a row that is of none

    @property
    def whole(self) -> str:
        return f"{self.text} {self.aside}" if self.aside else self.text


@dataclass(frozen=True)
class Column:
    """A column: its name with the unit, and what it shows of a row."""

    name: str
    cell: Callable[[Any], Cell]
    is_number: bool = True


@dataclass(frozen=True)
class Table:
    """A table of figures that can be sorted and copied; on a phone each row is a record."""

    title: str
    note: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    starts_group: tuple[bool, ...] = ()  # row by row: is it parted from the one before?
    is_sortable: bool = True


def figure(value: float | None, pattern: str = "", none: str = "–", aside: str = "") -> Cell:
    """Return a figure's cell; without a pattern it gets three digits."""
    if value is None:
        return Cell(none)
    plain = three_digits(value) if value > 0 else f"{value:.3g}"
    return Cell(pattern.format(value) if pattern else plain, value, aside)


def estimated(estimate: Estimate | None, scale: float, pattern: str) -> Cell:
    """Return an estimate's cell, its interval beside it if there is one."""
    if estimate is None:
        return Cell("–")
    aside = ""
    if estimate.low is not None and estimate.high is not None:
        low, high = (pattern.format(scale * end) for end in (estimate.low, estimate.high))
        aside = f"({low}–{high})"
    return figure(scale * estimate.ratio, pattern, aside=aside)


def of(field: str, pattern: str = "", none: str = "–", scale: float = 1) -> Callable[[Any], Cell]:
    """Return what makes the cell of a row's field."""

    def cell(row: Any) -> Cell:
        value = getattr(row, field)
        return figure(None if value is None else scale * value, pattern, none)

    return cell


def word(field: str) -> Callable[[Any], Cell]:
    return lambda row: Cell(str(getattr(row, field)))


def counted(number: int, planned: int | None) -> Cell:
    """Return how many there are, in red with the plan's number where some are missing."""
    if planned is None or planned <= number:
        return Cell(str(number), number)
    return Cell(f"{number} of {planned}", number, is_alarm=True)


# ------------------------------------------------------------------------------------- the tables

SCALING = Column("scaling, %", lambda row: estimated(row.scaling, 100, "{:.0f}"))
SPEED = (
    Column(
        "images/s",
        lambda row: figure(
            row.images_per_second,
            aside=f"({three_digits(row.lowest)}–{three_digits(row.highest)})",
        ),
    ),
    SCALING,
    Column("CPU ms per image", of("cpu_ms_per_image")),
    Column("blocks", lambda row: counted(row.blocks, row.planned_blocks)),
    Column("90 epochs, hours", lambda row: figure(hours(row.images_per_second))),
)
TRAININGS = (
    Column("start and end, s", of("startup_seconds", "{:,.1f}")),
    Column("training, s", of("train_seconds", "{:,.1f}")),
    Column("evaluation, s", of("evaluation_seconds", "{:,.1f}")),
    Column("top-1, %", of("top1", "{:.2f}")),
    Column("top-5, %", of("top5", "{:.2f}")),
    Column("loss", lambda row: Cell(loss_text(row.loss), row.loss)),
    Column("weights", word("weights"), is_number=False),
    Column("runs", lambda row: counted(row.runs, row.planned_runs)),
)
STEPS = (
    Column("median, ms", of("median")),
    Column("p95, ms", of("p95")),
    Column("p99, ms", of("p99")),
    Column("longest, ms", of("longest")),
    Column("steps", of("steps", "{:,}")),
)
INPUT = (
    Column("images/s", of("images_per_second", none=NOT_MEASURED)),
    Column("files/s", of("files_per_second")),
    Column("MB/s", of("megabytes_per_second")),
    Column("input wait, %", of("wait_share", "{:.2f}", NOT_MEASURED, 100)),
)
# Energy: field of ResourceRow, its column, and how a figure is written.
ENERGY = (
    ("gpu_joules_per_image", "GPU J per image", ""),
    ("gpu_watts", "GPU watts", "{:,.0f}"),
    ("gpu_utilization_percent", "GPU busy, %", "{:.0f}"),
    ("cpu_joules_per_image", "CPU J per image", ""),
)


def tables(
    comparison: Comparison, verdicts: Sequence[Verdict], price_per_hour: float | None = None
) -> list[Table]:
    """Return the tables in the report's order: speed first, and apart from it whole trainings."""
    found = [
        speed_table(comparison, price_per_hour),
        training_table(comparison),
        ladder_table(comparison),
        phase_table(comparison, verdicts),
        resource_table(comparison),
        cell_table(
            comparison,
            "Step times",
            f"Of the whole trainings of at most {BLOCKS_IN_DETAIL} blocks, on rank 0. Of 100 steps "
            "95 are shorter than p95, 99 than p99.",
            STEPS,
            step_rows(comparison),
        ),
    ]
    rows = input_rows(comparison)
    if any(row.wait_share is not None or row.images_per_second is not None for row in rows):
        note = (
            "What all workers read during the whole trainings, which is not the input's limit, and "
            "the share of the step time spent waiting for it. Files and MB: only for images read "
            "from files."
        )
        found.append(cell_table(comparison, "Input", note, INPUT, rows))
    return [table for table in found if table.rows]


def text_tables(
    comparison: Comparison, verdicts: Sequence[Verdict], price_per_hour: float | None = None
) -> list[Table]:
    """Return the tables of the terminal and of Markdown."""
    return [
        speed_table(comparison, price_per_hour),
        training_table(comparison),
        ladder_table(comparison),
        phase_table(comparison, verdicts),
    ]


def speed_table(comparison: Comparison, price_per_hour: float | None) -> Table:
    rows = speed_rows(comparison)
    columns = [column for column in SPEED if column is not SCALING or any(r.scaling for r in rows)]
    note = (
        "Medians over blocks; images/s with the range of the blocks. CPU time: of all workers. 90 "
        f"epochs: of ImageNet's {IMAGES:,} images at this speed, of this model and input, without "
        "evaluation"
    )
    if price_per_hour is not None:
        price = price_per_hour  # of all workers
        columns.append(
            Column(
                "90 epochs, cost",
                lambda row: figure(price * hours(row.images_per_second), "{:,.2f}"),
            )
        )
        note += f", at {price:g} an hour for all workers"
    note += "."
    if SCALING in columns:
        block = "the same block"
        if by_turns(comparison):
            block = "the block of the same number, measured at another time"
        note += (
            " Scaling: images/s per worker, as a percentage of that with the fewest workers in "
            f"{block}, with its {100 * comparison.confidence:.4g} % interval."
        )
    title = "Speed, by turns" if by_turns(comparison) else "Speed, of whole runs"
    return cell_table(comparison, title, note, columns, rows)


def training_table(comparison: Comparison) -> Table:
    rows = training_rows(comparison)
    most = max((row.planned_runs for row in rows), default=1)
    title = f"Whole trainings, {'one' if most == 1 else most} each"
    note = (
        "Medians. Start and end: from the launcher's start to its end, without the training clock. "
        "Evaluation: with checkpoints. Top-1, top-5 and loss: last validation. Weights: whether "
        "the final weights are bit-equal to those of the block's other configurations."
    )
    if by_turns(comparison):
        note += " No verdict on speed uses these runs: that is measured by turns."
    return cell_table(comparison, title, note, TRAININGS, rows)


def ladder_table(comparison: Comparison) -> Table:
    """Return what each way of training costs, where there are others than the two engines."""
    first = comparison.plan["configurations"][0]

    def lines(row: LadderRow) -> Cell:
        script = ROOT / TRAINERS[row.engine]
        return figure(len(script.read_text().splitlines()) if script.exists() else None, "{:,}")

    rows = ladder_rows(comparison)
    note = (
        "Network: what the hosts' interfaces sent for all processes, loopback included, from the "
        "first step to the end, with validation; messages through shared memory are not there. "
        "Lines: of the script alone, its text at the top included. Weights: bit-equal to those of "
        f"{first}?"
    )
    own = []
    if any(row.bubble_share is not None for row in rows):
        own.append(Column("bubble, %", of("bubble_share", "{:.0f}", scale=100)))
        note += " Bubble: the share of the steps in which the mean stage of a pipeline has no work."
    if any(row.staleness is not None for row in rows):
        own.append(Column("staleness, updates", of("staleness", "{:.2f}")))
        note += " Staleness: updates since the weights that a gradient is of, in the mean."
    columns = [
        Column("memory, MB", of("peak_memory_bytes", "{:,.0f}", scale=1e-6)),
        Column("network, MB a step", of("network_bytes_per_step", "{:,.1f}", scale=1e-6)),
        *own,
        Column("top-1, %", of("top1", "{:.2f}")),
        Column("lines", lines),
        Column(
            "weights",
            lambda row: Cell({True: "equal", False: "other", None: "–"}[row.has_firsts_weights]),
            is_number=False,
        ),
    ]
    return cell_table(comparison, "The ladder", note, columns, rows)


def phase_table(comparison: Comparison, verdicts: Sequence[Verdict]) -> Table:
    """Return the phases of each cell's step, and with signs what each verdict's two differ in."""
    rows = phase_rows(comparison)
    differences = phase_differences(rows, verdicts)
    ratios = {
        (v.case, v.workers, f"{v.first} − {v.second}"): v.speed.ratio
        for v in verdicts
        if v.speed is not None
    }
    denied = [
        row
        for row in differences
        if (row.step_seconds < 0) != (ratios[row.case, row.workers, row.configuration] > 1)
    ]

    def milliseconds(field: str) -> Callable[[PhaseRow], Cell]:
        def cell(row: PhaseRow) -> Cell:
            value = getattr(row, field)
            if value is None or not row.is_difference:
                return figure(value and 1000 * value)
            return Cell(f"{1000 * value:+.1f}".replace("-", "−"), 1000 * value)

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
    if denied:
        named = ", ".join(
            f"{row.configuration} ({place_text(row.case, row.workers)})" for row in denied
        )
        note += f" The runs that measured the phases do not show the verdict's difference: {named}."
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
    order = {(case, workers): i for i, (case, workers, _) in enumerate(comparison.cells)}
    both = sorted([*rows, *differences], key=lambda row: order[row.case, row.workers])
    return cell_table(comparison, "A step's time by phase, ms", note, columns, both)


def resource_table(comparison: Comparison) -> Table:
    rows = resource_rows(comparison)
    energy = [
        Column(name, of(field, pattern, NOT_MEASURED))
        for field, name, pattern in ENERGY
        if any(getattr(row, field) is not None for row in rows)
    ] or [Column("energy, J per image", of("gpu_joules_per_image", none=NOT_MEASURED))]

    def spread(row: ResourceRow) -> Cell:
        ratio = row.straggler_ratio
        none = "–" if row.workers == 1 else NOT_MEASURED
        return figure(None if ratio is None else 100 * (ratio - 1), "{:.1f}", none)

    phases = dict.fromkeys(row.straggler_phases for row in rows if row.straggler_ratio is not None)
    note = (
        f"Memory: of the largest worker, with its {100 * comparison.confidence:.4g} % interval "
        "from three runs on."
    )
    if phases:
        note += (
            f" Straggler spread: how much longer the slowest rank's {' or '.join(phases)} takes "
            "than the median rank's."
        )
    note += " Energy: of the GPU by NVML, of the processor by RAPL."
    columns = [
        Column("memory, MB", lambda row: estimated(row.peak_memory_bytes, 1e-6, "{:,.0f}")),
        Column("straggler spread, %", spread),
        *energy,
    ]
    return cell_table(comparison, "Resources", note, columns, rows)


def cell_table(
    comparison: Comparison, title: str, note: str, columns: Iterable[Column], rows: Sequence[Any]
) -> Table:
    """Return a table with a row for each cell; with a column for the case if there are several."""
    names = comparison.plan["configurations"]

    def configuration(row: Any) -> Cell:
        name = row.configuration
        return Cell(name, series=names.index(name) % len(COLOURS) if name in names else -1)

    before = (Column("case", word("case"), is_number=False),) * (len(comparison.cases) > 1)
    before += (Column("configuration", configuration, is_number=False),)
    whole = (*before, Column("workers", lambda row: Cell(str(row.workers))), *columns)
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


def square_tables(comparison: Comparison, verdicts: Sequence[Verdict], case: str) -> list[Table]:
    """Return, for each number of workers at which both engines ran over the same two transports,
    their speeds, and beside them what engine and transport make of each other."""
    corners = comparison.square
    measured = [v for v in verdicts if corners and v.case == case and v.speed is not None]
    numbers = dict.fromkeys(verdict.workers for verdict in measured)
    return [square_table(comparison, verdicts, corners, case, workers) for workers in numbers]


def square_table(
    comparison: Comparison,
    verdicts: Sequence[Verdict],
    corners: dict[tuple[str, str], str],
    case: str,
    workers: int,
) -> Table:
    here = [v for v in verdicts if (v.case, v.workers) == (case, workers)]
    rows = [row for row in speed_rows(comparison) if (row.case, row.workers) == (case, workers)]
    rates = {row.configuration: row.images_per_second for row in rows}
    ratios = {(v.first, v.second): v.speed for v in here if v.speed is not None}
    interaction = next((v.speed for v in here if v.is_interaction), None)
    engines = list(dict.fromkeys(engine for engine, _ in corners))
    new, base = dict.fromkeys(transport for _, transport in corners)

    def cell(found: Estimate | None) -> Cell:
        return estimated(found, 1, f"{{:.{max(3, digits(found))}f}}" if found else "")

    def ratio(first: str, second: str) -> Cell:
        found = ratios.get((first, second))
        if found is None and (inverse := ratios.get((second, first))):
            found = inverse.inverse()
        return cell(found)

    def speed(configuration: str) -> Cell:
        rate = rates.get(configuration)
        return Cell("–") if rate is None else Cell(f"{three_digits(rate)} images/s", rate)

    lines = []
    for engine in engines:
        names = [corners[engine, transport] for transport in (base, new)]
        speeds = map(speed, names)
        lines.append([Cell(ENGINES[engine], series=-1), *speeds, ratio(names[1], names[0])])
    effects = [ratio(*(corners[engine, over] for engine in engines)) for over in (base, new)]
    named = " / ".join(ENGINES[engine] for engine in engines)
    lines.append([Cell(named, series=-1), *effects, cell(interaction)])
    return Table(
        f"Engine and transport, {place_text(case, workers)}",
        "Ratios of speed with their intervals. Below on the right the interaction: the engines' "
        f"ratio over {new} by that over {base}; it is 1 where engine and transport do not depend "
        "on each other.",
        tuple(
            Column(head, lambda row: row, head != "engine")
            for head in ("engine", f"over {base}", f"over {new}", f"transport: {new} / {base}")
        ),
        tuple(map(tuple, lines)),
        (False, False, True),
        is_sortable=False,
    )


# ---------------------------------------------------------------------------------------- as text


def table_text(table: Table, markdown: bool = False) -> str:
    """Return a table for the terminal, or as Markdown."""
    headers = [column.name for column in table.columns]
    cells = [[cell.whole for cell in row] for row in table.rows]
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
