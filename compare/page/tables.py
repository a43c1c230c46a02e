"""The report's tables: each column is described once, for the page, the terminal and Markdown."""

import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tabulate

from compare.evidence.goals import goals_of
from compare.evidence.paired import Difference, Estimate
from compare.evidence.records import Comparison
from compare.evidence.words import digits, place_text, three_digits
from compare.page.chart import COLOURS, INK, MUTED
from compare.page.findings import Report, SideBySide
from compare.plan.configurations import PEERS

POOLED = (
    "Ratios of speed with their 95 % intervals: each occasion's, and the common one of a random-"
    "effects model. The standard deviation between the occasions' own truths is told from four "
    "occasions on. Of few it is hardly known, which makes the common interval wide (Student's "
    "quantile is 12.7 for two, 4.3 for three, 2.8 for five). Verdicts of unfinished measurements "
    "are left out."
)
APART = (
    "These were not measured in the same blocks: a change of the machine between them would be in "
    "a ratio of two, so there is none."
)
tabulate.MIN_PADDING = 0  # of headers: the table is to fit into 100 columns


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
    """A column: its name with the unit, what it shows of a row, and what that means."""

    name: str
    # The figure's name or place in a row, or a function of the row: a number, an estimate, a figure
    # with the ends of its range, a text or a cell; None: unknown.
    figure: str | int | Callable[[Any], Any]
    pattern: str = ""  # of a number; three digits without one
    note: str = ""
    scale: float = 1  # from the row's unit to the column's
    is_optional: bool = False  # left out where no row has a value
    is_number: bool = True

    def value(self, row: Any) -> Any:
        """Return what a row has."""
        if callable(self.figure):
            return self.figure(row)
        return row.get(self.figure) if isinstance(row, dict) else row[self.figure]

    def cell(self, row: Any) -> TableCell:
        """Return what the column shows of a row."""
        value = self.value(row)
        if isinstance(value, TableCell):
            return value
        if value is None or isinstance(value, str):
            return TableCell(value or "–")
        if isinstance(value, Difference):
            mean, half = (self.scale * (one or 0) for one in value)
            width = "" if value.half_width is None else f"±{half:.1f}"
            return TableCell(f"{mean:+.1f}".replace("-", "−"), mean, width)
        if isinstance(value, Estimate):
            value = (value.ratio, value.low, value.high)
        figure, *ends = value if isinstance(value, tuple) else (value,)
        shown = "–".join(self.text(end) for end in ends if end is not None)
        return TableCell(self.text(figure), self.scale * figure, f"({shown})" if shown else "")

    def text(self, value: float) -> str:
        """Return a number as text."""
        scaled = self.scale * value
        pattern = self.pattern or ("{:.3g}" if scaled <= 0 else "")
        return pattern.format(scaled).replace("-", "−") if pattern else three_digits(scaled)


@dataclass(frozen=True)
class Table:
    """A table of figures that can be sorted and copied; on a phone each row is a record."""

    title: str
    note: str
    columns: Sequence[Column]
    lines: Sequence[Any]  # what the columns show
    starts_group: Sequence[bool] = ()  # line by line: is it parted from the one before?
    is_detail: bool = False  # for the page alone

    @property
    def rows(self) -> list[list[TableCell]]:
        """The cells of each line."""
        return [[column.cell(line) for column in self.columns] for line in self.lines]


def counted(number: int, planned: int | None) -> TableCell:
    """Return how many there are, in red with the plan's number where some are missing."""
    if planned is None or planned <= number:
        return TableCell(str(number), number)
    return TableCell(f"{number} of {planned}", number, is_alarm=True)


# ------------------------------------------------------------------------------------- the tables


def speed_columns(unit: str) -> tuple[Column, ...]:
    """Return the columns of speed, of images or of what a user's own scripts count."""
    one = unit.removesuffix("s")
    return (
        Column(f"{unit}/s", lambda row: (row["images_per_second"], row["lowest"], row["highest"]),
               note=f"{unit.capitalize()}/s: all {unit} over all seconds, with the range of the "
               "blocks."),
        Column("scaling, %", "scaling", "{:.0f}", scale=100, is_optional=True,
               note=f"Scaling: {unit}/s per worker, as a percentage of that with the fewest "
               "workers in the block of the same number, with its interval."),
        Column(f"CPU ms per {one}", "cpu_ms_per_image", note="CPU time: of all workers."),
        Column("blocks", lambda row: counted(row["blocks"], row["planned_blocks"])),
    )  # fmt: skip


TRAININGS = (
    Column("start and end, s", "startup_seconds", "{:,.1f}",
           "Medians, of times and input without runs that others disturbed. Start and end: from "
           "the launcher's start to its end, without the training clock."),
    Column("training, s", "train_seconds", "{:,.1f}"),
    Column("evaluation, s", "evaluation_seconds", "{:,.1f}", "Evaluation: with checkpoints."),
    Column("top-1, %", "top1", "{:.2f}", "Top-1, top-5 and loss: last validation."),
    Column("top-5, %", "top5", "{:.2f}"),
    Column("loss", "loss", "{:.4g}"),
    Column("weights", "weights", is_number=False,
           note="Weights: whether the final weights are bit-equal to those of the first "
           "configuration in the same block."),
    Column("runs", lambda row: counted(row["runs"], row["planned_runs"])),
)  # fmt: skip
RESOURCES = (
    Column("memory, MB", "peak_memory", "{:,.0f}",
           "Memory: of the largest worker, with its interval from three runs on.", scale=1e-6),
    Column("slowest / median rank", "straggler_ratio", "{:.3f}", is_optional=True,
           note="Slowest / median rank: of their times of forward and backward."),
    Column("network, MB a step", "network_bytes_per_step", "{:,.1f}", scale=1e-6, is_optional=True,
           note="Network: what the hosts' interfaces sent for all processes, loopback included, "
           "from the first step to the end, with validation; messages through shared memory are "
           "not there."),
    Column("GPU J per image", "gpu_joules_per_image", is_optional=True,
           note="Energy: of the GPU by NVML, of the processor by RAPL."),
    Column("GPU watts", "gpu_watts", "{:,.0f}", is_optional=True),
    Column("GPU busy, %", "gpu_utilization_percent", "{:.0f}", is_optional=True),
    Column("CPU J per image", "cpu_joules_per_image", is_optional=True),
)  # fmt: skip
# Beside them where a plan has other ways of training than the two engines.
LADDER = (
    Column("bubble, %", "bubble_share", "{:.0f}", scale=100, is_optional=True,
           note="Bubble: the share of the steps in which a pipeline's mean stage has no work."),
    Column("staleness, updates", "staleness", "{:.2f}", is_optional=True,
           note="Staleness: updates since the weights that a gradient is of, in the mean."),
)  # fmt: skip
INPUT = (
    Column("images/s", "images_per_second", is_optional=True,
           note="What all workers read during the whole trainings, which is not the input's limit, "
           "and the share of the step time spent waiting for it."),
    Column("files/s", "files_per_second", is_optional=True),
    Column("MB/s", "megabytes_per_second", is_optional=True),
    Column("input wait, %", "wait_share", "{:.2f}", scale=100, is_optional=True),
)  # fmt: skip


# A step's phases: the names of their seconds, the words for them, and how the page draws them:
# greys for computing, colours of their own for waiting.
PHASES = {
    "data_seconds": ("data", "var(--waiting)", 0.9),
    "forward_seconds": ("forward", MUTED, 0.35),
    "backward_seconds": ("backward", MUTED, 0.65),
    "exposed_communication_seconds": ("exposed communication", "var(--communication)", 0.95),
    "optimizer_seconds": ("optimizer", INK, 0.85),
    "other_seconds": ("other", INK, 0.5),
}
# In short words: on a terminal the table is to fit into 100 columns.
PHASE_COLUMNS = [
    *(Column(words.split()[0], field, scale=1000, is_optional=True)
      for field, (words, *_) in PHASES.items()),
    Column("step", "step_seconds", scale=1000),
]  # fmt: skip


def all_tables(report: Report) -> list[Table]:
    """Return the tables in their order: speed first, and apart from it whole trainings."""
    is_by_turns, trainings = report.comparison.is_by_turns, report.trainings
    has_rungs = any(run.engine not in PEERS for run in report.comparison.runs)
    phases = (
        "Means over ranks and blocks, of the turns that the verdicts are from (of whole runs: of "
        "rank 0). Exposed: how much longer a step takes because of the gradient exchange; with one "
        "worker, which exchanges nothing, the engine's own work. Other: records, and what "
        "else ends a step."
    )
    differences = (
        "First less second, where a verdict shows a difference: a minus is what the first saves. "
        "Paired by block, with intervals; the phases add up to the step."
    )
    unused = "No verdict on speed uses these runs: that is measured by turns." * is_by_turns
    most = max((row["planned_runs"] for row in trainings), default=1)
    costs = RESOURCES + LADDER * has_rungs
    found = [
        cell_table(report, f"Speed, {'by turns' if is_by_turns else 'of whole runs'}",
                   speed_columns(report.comparison.unit), report.speed),
        cell_table(report, f"Whole trainings, {'one' if most == 1 else most} each",
                   TRAININGS, trainings, unused),
        cell_table(report, "A step's time by phase, ms", PHASE_COLUMNS, report.phases, phases),
        cell_table(report, "Where a difference is, ms",
                   PHASE_COLUMNS, report.phase_differences, differences),
        cell_table(report, "Resources", costs, trainings, is_detail=not has_rungs),
        cell_table(report, "Input", INPUT, trainings, is_detail=True),
    ]  # fmt: skip
    return [table for table in found if table.lines]


def cell_table(
    report: Report,
    title: str,
    columns: Sequence[Column],
    rows: Sequence[Any],
    note: str = "",
    is_detail: bool = False,
) -> Table:
    """Return a table with a row for each cell, without lines if it would show nothing. Its note is
    that of its columns, and what else is given."""
    names = [*report.comparison.configurations]

    def configuration(row: Any) -> TableCell:
        name = row["configuration"]
        return TableCell(name, series=names.index(name) % len(COLOURS) if name in names else -1)

    shown = [
        column
        for column in columns
        if not column.is_optional or any(column.value(row) is not None for row in rows)
    ]
    whole = (
        *[Column("case", "case", is_number=False)] * (len(report.comparison.plan.cases) > 1),
        Column("configuration", configuration, is_number=False),
        Column("workers", "workers", "{}"),
        *shown,
    )
    places = [(row["case"], row["workers"]) for row in rows]
    return Table(
        title,
        " ".join(filter(None, [note, *(column.note for column in shown)])),
        whole,
        rows if shown else [],
        [i > 0 and places[i] != places[i - 1] for i in range(len(rows))],
        is_detail,
    )


def goals_tables(comparisons: Sequence[Comparison]) -> list[Table]:
    """Return the table of what came of the plans' goals; none where no plan has any."""
    goals = [goal for one in comparisons for goal in goals_of(one)]
    columns = (
        *[Column("question", lambda goal: goal.question, is_number=False)] * (len(comparisons) > 1),
        Column("sides", lambda goal: goal.name.replace(":", " / "), is_number=False),
        Column("goal", lambda goal: f"≥ {goal.shown(goal.least)}"),
        Column("found", lambda goal: TableCell(goal.shown(goal.found.ratio), goal.found.ratio)),
        Column("interval", lambda goal: goal.interval),
        Column("blocks", lambda goal: counted(goal.found.blocks, None)),
        Column("verdict", lambda goal: goal.verdict, is_number=False),
    )
    note = (
        "The ratio of two sides' speeds, or a side's speed, against the plan's goal. At the goal: "
        "the interval contains it, and ends no more than 2 % below it, nor more than half of what "
        "it allows or asks for."
    )
    return [Table("Goals", note, columns, goals)] if goals else []


def square_tables(report: Report) -> list[Table]:
    """Return, for each case and number of workers at which both engines ran over the same two
    transports, their speeds, and beside them what engine and transport make of each other."""
    places = dict.fromkeys((v.case, v.workers) for v in report.verdicts if v.speed is not None)
    return [square_table(report, *place) for place in places if report.comparison.square]


def square_table(report: Report, *place: Any) -> Table:
    """Return the square of one case at one number of workers."""
    corners = report.comparison.square
    rates = {
        row["configuration"]: f"{three_digits(row['images_per_second'])} images/s"
        for row in report.speed
        if (row["case"], row["workers"]) == place
    }
    here = [v for v in report.verdicts if (v.case, v.workers) == place and v.speed]
    ratios = {(v.first, v.second): v.speed for v in here if v.speed}
    ratios |= {(second, first): speed.inverse() for (first, second), speed in ratios.items()}
    one, other = dict.fromkeys(engine for engine, _ in corners)
    new, base = dict.fromkeys(transport for _, transport in corners)

    def ratio(first: tuple[str, str], second: tuple[str, str]) -> TableCell:
        return ratio_cell(ratios.get((corners[first], corners[second])))

    lines: list[tuple[Any, ...]] = [
        (
            TableCell(PEERS[engine], series=-1),
            rates.get(corners[engine, base]),
            rates.get(corners[engine, new]),
            ratio((engine, new), (engine, base)),
        )
        for engine in (one, other)
    ]
    engines = [ratio((one, over), (other, over)) for over in (base, new)]
    name = TableCell(f"{PEERS[one]} / {PEERS[other]}", series=-1)
    lines.append((name, *engines, ratio_cell(report.interactions.get(place))))
    heads = ("engine", f"over {base}", f"over {new}", f"transport: {new} / {base}")
    return Table(
        f"Engine and transport, {place_text(*place)}",
        "Ratios of speed with their intervals. Below on the right the interaction: the engines' "
        f"ratio over {new} by that over {base}; it is 1 where engine and transport do not depend "
        "on each other, on the scale of ratios only: differences in images/s would say something "
        "else.",
        [Column(head, i, is_number=i > 0) for i, head in enumerate(heads)],
        lines,
        (False, False, True),
    )


def ratio_cell(found: Estimate | None) -> TableCell:
    """Return a ratio with its interval, with decimals enough that no bound reads 1 which is not."""
    places = max(3, digits(found)) if found else 0
    return Column("", lambda row: row, f"{{:.{places}f}}").cell(found)


def side_by_side_tables(both: SideBySide) -> list[Table]:
    """Return the table of each one's speeds, that of what is pooled over occasions, and that of
    what differs, the latter two if there is anything."""
    speeds = [
        cell_table(
            report,
            f"Speed of {letter}, {name}",
            speed_columns(report.comparison.unit),
            report.speed,
            APART,
        )
        for letter, name, report in zip(both.letters, both.names, both.reports, strict=True)
    ]
    occasions = [
        Column(
            "ratio of",
            lambda row: f"{row['first_label']} to {row['second_label']}",
            is_number=False,
        ),
        Column("at", lambda row: place_text(row["case"], row["workers"]), is_number=False),
        Column("all occasions", "pooled", "{:.3f}"),
        Column("sd between, %", "spread", "{:.1f}", scale=100),
        Column("occasions", lambda row: row["pooled"].blocks, "{}"),
        *(
            Column(letter, lambda row, i=i: row["found"][i], "{:.3f}")  # type: ignore[misc]
            for i, letter in enumerate(both.letters)
        ),
    ]  # fmt: skip
    if all(row["spread"] is None for row in both.occasions):
        del occasions[3]
    heads = ["differs", *both.letters]
    texts = [Column(head, i, is_number=False) for i, head in enumerate(heads)]
    found = [
        *speeds,
        Table("Over occasions", POOLED, occasions, both.occasions),
        Table("What differs", "", texts, [(k, *v) for k, v in both.differences.items()]),
    ]
    return [table for table in found if table.lines]


def escaped(text: str) -> str:
    """Keep Markdown from reading signs in a text as marks; `_` inside of words is none."""
    return re.sub(r"[\\`*<|]", r"\\\g<0>", text)


def table_text(table: Table, markdown: bool = False) -> str:
    """Return a table for the terminal, where long texts take several lines, or as Markdown."""
    headers = [column.name for column in table.columns]
    cells = [[f"{cell.text} {cell.aside}".rstrip() for cell in row] for row in table.rows]
    if markdown:
        cells = [[escaped(cell) for cell in line] for line in cells]
    else:
        cells = [[textwrap.fill(cell, 40) for cell in line] for line in cells]
        wrapper = textwrap.TextWrapper(8, break_long_words=False, break_on_hyphens=False)
        headers = [wrapper.fill(name) for name in headers]
    return tabulate.tabulate(
        cells,
        headers,
        tablefmt="pipe" if markdown else "simple",
        disable_numparse=True,
        colalign=["right" if column.is_number else "left" for column in table.columns],
    )
