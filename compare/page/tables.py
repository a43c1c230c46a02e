"""The report's tables: each column is described once, for the page, the terminal and Markdown."""

import math
import re
import shutil
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tabulate

from compare.evidence.accuracy import POWER, SIZES, AccuracyVerdict
from compare.evidence.goals import Goal
from compare.evidence.judgement import Obstacle
from compare.evidence.occasions import RECORDED_DEGREES, RECORDED_SPREAD
from compare.evidence.paired import INTERVAL, Difference, Estimate
from compare.evidence.words import digits, place_text, points_text, three_digits
from compare.page.chart import COLOURS, INK, MUTED
from compare.page.report import Report, SideBySide
from compare.page.sentences import goal_figure, goal_sides, goal_verdict
from compare.plan.configurations import PEERS

POOLED = (
    f"Speed ratios with their {INTERVAL}s: each occasion's ratio, and their common ratio by a "
    "random-effects model. The standard deviation of the true ratio between occasions is given "
    "from four occasions on. It is hardly known from few of them: so on CPUs the common interval "
    f"takes it as at least {100 * RECORDED_SPREAD:.2f} %, by which the recorded occasions "
    f"differed; they count as much as {RECORDED_DEGREES} further ones. On GPUs these occasions "
    "alone count, and the interval is wide (Student's quantile is 12.7 for two, 4.3 for three, "
    "2.8 for five). Each interval covers its own ratio alone, without a correction for their "
    "number; where a comparison was extended, with its higher confidence. Unfinished measurements "
    "are left out."
)
APART = (
    "These comparisons were not measured in the same blocks. A ratio between two of them would "
    "include any change of the machine in between, so none is given."
)
DISTURBED = "*"  # marks a figure of runs all of which other processes disturbed
# Characters after which a cell's text is wrapped, if there is room and if not; and a column's name,
# unless a figure is longer.
WIDE, NARROW, SHORT = 40, 22, 8
tabulate.MIN_PADDING = 0  # of headers: tables are to fit into a terminal


@dataclass(frozen=True)
class TableCell:
    """A cell of a table of figures."""

    text: str
    value: float | None = None  # for sorting and copying; None: the text serves
    aside: str = ""
    is_alarm: bool = False
    series: int | None = None  # a configuration's colour; -1: the row belongs to no configuration


@dataclass(frozen=True)
class Column:
    """A column: its name with the unit, the figure of a row that it shows, and an explanation."""

    name: str
    # The figure's name or index in a row, or a function of the row. The figure is a number, an
    # estimate, a tuple of a number and the ends of its range, a text, or a cell; None: unknown.
    figure: str | int | Callable[[Any], Any]
    pattern: str = ""  # format of a number; by default at least three digits
    note: str = ""
    scale: float = 1  # from the row's unit to the column's
    is_optional: bool = False  # left out where no row has a value
    is_number: bool = True
    is_timed: bool = False  # other processes may disturb it: marked in rows where they did

    def value(self, row: Any) -> Any:
        """Return the figure of a row."""
        if callable(self.figure):
            return self.figure(row)
        return row.get(self.figure) if isinstance(row, dict) else row[self.figure]

    def cell(self, row: Any) -> TableCell:
        """Return the column's cell in a row."""
        cell = self.unmarked(row)
        if cell.value is not None and self.is_timed and row["are_disturbed"]:
            return replace(cell, text=f"{cell.text}{DISTURBED}")
        return cell

    def unmarked(self, row: Any) -> TableCell:
        """Return the cell without the mark of a disturbed figure."""
        value = self.value(row)
        if isinstance(value, TableCell):
            return value
        if value is None or isinstance(value, str):
            return TableCell(value or "–")
        if isinstance(value, Difference):
            mean, half = (self.scale * (part or 0) for part in value)
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
    lines: Sequence[Any]  # the rows' data, from which the columns take their figures
    keys: int = 1  # number of columns, from the left, that tell one row from another
    starts_group: Sequence[bool] = ()  # for each line: whether a rule separates it from the last
    is_detail: bool = False  # shown on the page alone

    @property
    def rows(self) -> list[list[TableCell]]:
        """The cells of each line."""
        return [[column.cell(line) for column in self.columns] for line in self.lines]


# Of rows that are findings.
PLACE = Column("at", lambda finding: place_text(*finding.place), is_number=False)


def counted(number: int, planned: int | None) -> TableCell:
    """Return a number, in red and with the planned number if some are missing."""
    if planned is None or planned <= number:
        return TableCell(str(number), number)
    return TableCell(f"{number} of {planned}", number, is_alarm=True)


# ------------------------------------------------------------------------------------- the tables


def speed_columns(unit: str) -> tuple[Column, ...]:
    """Return the columns of speed, in images or in the unit that a user's own scripts count."""
    return (
        Column(
            f"{unit}/s",
            lambda row: (row["images_per_second"], row["lowest"], row["highest"]),
            note=f"{unit.capitalize()}/s: harmonic mean over blocks, with their range.",
        ),
        Column(
            "scaling, %",
            "scaling",
            "{:.0f}",
            scale=100,
            is_optional=True,
            note=f"Scaling: {unit}/s per worker, as a percentage of {unit}/s per worker with "
            "the fewest workers in the block of the same number, with its interval.",
        ),
        Column(
            f"CPU ms per {unit.removesuffix('s')}",
            "cpu_ms_per_image",
            note="CPU time: of all workers.",
        ),
        Column(
            "memory, MB",
            "memory_bytes",
            "{:,.0f}",
            "Memory: resident after a turn, without mapped files and shared memory, of all workers "
            "with their child processes (what forks have in common counts for each); of the "
            "largest turn, the median over blocks. GPU memory: allocated by torch.",
            scale=1e-6,
            is_optional=True,
        ),
        Column("GPU memory, MB", "gpu_memory_bytes", "{:,.0f}", scale=1e-6, is_optional=True),
        Column("blocks", lambda row: counted(row["blocks"], row["planned_blocks"])),
    )


TRAININGS = (
    Column(
        "start and end, s",
        "startup_seconds",
        "{:,.1f}",
        "Start and end: from the launcher's start to its end, without the training clock.",
        is_optional=True,
        is_timed=True,
    ),
    Column(
        "training, s",
        "train_seconds",
        "{:,.1f}",
        "Medians over runs; those of times, input and energy leave out runs that other "
        "processes disturbed, unless they disturbed all (*).",
        is_timed=True,
    ),
    Column(
        "evaluation, s",
        "evaluation_seconds",
        "{:,.1f}",
        "Evaluation: checkpoints included.",
        is_timed=True,
    ),
    Column("top-1, %", "top1", "{:.2f}", "Top-1, top-5 and loss: of the last validation."),
    Column("top-5, %", "top5", "{:.2f}"),
    Column("loss", "loss", "{:.4g}"),
    Column(
        "weights",
        "weights",
        is_number=False,
        note="Weights: whether the final weights are bit-equal to those of the first "
        "configuration in the same block.",
    ),
    Column("runs", lambda row: counted(row["runs"], row["planned_runs"])),
)


def accuracy_columns(target: float | None) -> tuple[Column, ...]:
    """Return the columns of accuracy over seeds, with those of a top-1 to reach if there is one."""
    columns = (
        Column(
            "final top-1, %",
            "top1",
            "{:.2f}",
            "Medians over seeds, with the lowest and the highest in brackets.",
        ),
        Column(
            "sd, points",
            "deviation",
            "{:.2f}",
            is_optional=True,
            note="Sd: the standard deviation of final top-1 over the seeds.",
        ),
        Column("seeds", "seeds", "{}"),
    )
    if target is None:
        return columns
    return (
        *columns,
        Column(
            f"reached {target:g} %",
            lambda row: counted(row["reached"], row["seeds"]),
            note=f"To {target:g} %: until an evaluation first shows this top-1, on the training "
            "clock, evaluations included. A training that never does counts as longer than all.",
        ),
        Column(
            f"epochs to {target:g} %",
            lambda row: spread_cell(row["epochs_to_target"], "{:.3g}"),
        ),
        Column(
            f"seconds to {target:g} %",
            lambda row: spread_cell(row["seconds_to_target"], "{:,.1f}"),
            is_timed=True,
        ),
    )


def spread_cell(spread: tuple[float, float, float], pattern: str) -> TableCell:
    """Return a median with its range, if it has one; what is infinite was never reached."""
    middle, low, high = (
        pattern.format(value) if math.isfinite(value) else "never" for value in spread
    )
    value = spread[0] if math.isfinite(spread[0]) else None
    return TableCell(middle, value, "" if low == high else f"({low}–{high})")


RESOURCES = (
    Column(
        "memory, MB",
        "peak_memory",
        "{:,.0f}",
        "Memory: of the worker that uses most, with an interval from three runs on.",
        scale=1e-6,
    ),
    Column(
        "slowest / median rank",
        "straggler_ratio",
        "{:.3f}",
        is_optional=True,
        note="Slowest / median rank: the ratio of their times for forward and backward.",
    ),
    Column(
        "network, MB a step",
        "network_bytes_per_step",
        "{:,.1f}",
        scale=1e-6,
        is_optional=True,
        note="Network: what the hosts' interfaces sent for all processes from the first step "
        "to the end, loopback and validation included; messages through shared memory do not "
        "count.",
    ),
    Column(
        "GPU J per image",
        "gpu_joules_per_image",
        is_optional=True,
        is_timed=True,
        note="Energy: of the GPU by NVML, of the processor by RAPL.",
    ),
    Column("GPU watts", "gpu_watts", "{:,.0f}", is_optional=True, is_timed=True),
    Column("GPU busy, %", "gpu_utilization_percent", "{:.0f}", is_optional=True, is_timed=True),
    Column("CPU J per image", "cpu_joules_per_image", is_optional=True, is_timed=True),
)
# Added if a plan runs a rung of the ladder beside the two engines.
LADDER = (
    Column(
        "bubble, %",
        "bubble_share",
        "{:.0f}",
        scale=100,
        is_optional=True,
        note="Bubble: the share of a step in which a stage of the pipeline has no work, as the "
        "mean over stages.",
    ),
    Column(
        "staleness, updates",
        "staleness",
        "{:.2f}",
        is_optional=True,
        note="Staleness: how many updates the weights are ahead of those that a gradient was "
        "computed from, on average.",
    ),
)
INPUT = (
    Column(
        "images/s",
        "images_per_second",
        is_optional=True,
        is_timed=True,
        note="What all workers read during whole trainings, which is not the most that the "
        "input can deliver, and the share of the step time spent waiting for it.",
    ),
    Column("files/s", "files_per_second", is_optional=True, is_timed=True),
    Column("MB/s", "megabytes_per_second", is_optional=True, is_timed=True),
    Column("input wait, %", "wait_share", "{:.2f}", scale=100, is_optional=True, is_timed=True),
)


# A step's phases: the field of their seconds, their name in words, and how the page draws them.
# Computation is grey, waiting has colours.
PHASES = {
    "data_seconds": ("data", "var(--waiting)", 0.9),
    "forward_seconds": ("forward", MUTED, 0.35),
    "backward_seconds": ("backward", MUTED, 0.65),
    "exposed_communication_seconds": ("exposed communication", "var(--communication)", 0.95),
    "optimizer_seconds": ("optimizer", INK, 0.85),
    "other_seconds": ("other", INK, 0.5),
}
# The first word of each name: on a terminal the table must fit into 100 columns.
PHASE_COLUMNS = [
    *(
        Column(words.split()[0], field, scale=1000, is_optional=True)
        for field, (words, *_) in PHASES.items()
    ),
    Column("step", "step_seconds", scale=1000),
]


def all_tables(report: Report) -> list[Table]:
    """Return the tables in their order: speed first, whole trainings separately."""
    is_by_turns, trainings = report.record.is_by_turns, report.trainings
    has_rungs = any(run.engine not in PEERS for run in report.record.runs)
    phases = (
        "Means over ranks and blocks, of the turns that the verdicts use (in whole runs: of rank "
        "0). Exposed: how much longer a step takes because of the gradient exchange; with one "
        "worker, which exchanges nothing, this is the engine's own work. Other: records, and "
        "whatever else ends a step."
    )
    differences = (
        "First minus second, for each verdict that shows a difference: where it is negative, the "
        "first saves time. Paired by block; the phases add up to the step. Each interval covers "
        "its own phase alone, without a correction for their number."
    )
    unused = "No speed verdict uses these runs: speed is measured by turns." if is_by_turns else ""
    most = max((row["planned_runs"] for row in trainings), default=1)
    costs = RESOURCES + LADDER if has_rungs else RESOURCES
    found = [
        cell_table(
            report,
            f"Speed, {'by turns' if is_by_turns else 'of whole runs'}",
            speed_columns(report.record.unit),
            report.speed,
        ),
        cell_table(
            report,
            f"Whole trainings, {'one' if most == 1 else most} each",
            TRAININGS,
            trainings,
            unused,
        ),
        accuracy_table(report),
        seeds_table(report),
        cell_table(report, "A step's time by phase, ms", PHASE_COLUMNS, report.phases, phases),
        cell_table(
            report,
            "Where a difference lies, ms",
            PHASE_COLUMNS,
            report.phase_differences,
            differences,
        ),
        cell_table(report, "Resources", costs, trainings, is_detail=not has_rungs),
        cell_table(report, "Input", INPUT, trainings, is_detail=True),
    ]
    return [table for table in found if table.lines]


def accuracy_table(report: Report) -> Table:
    """Return how accurate each cell became over its seeds, and how soon."""
    targets = {row["target"] for row in report.accuracy}
    target = targets.pop() if len(targets) == 1 else None
    title = "Accuracy over seeds"
    return cell_table(report, title, accuracy_columns(target), report.accuracy)


def seeds_table(report: Report) -> Table:
    """Return how far each pair's final accuracies differ, and how many seeds show a difference."""
    shown = [verdict for verdict in report.accuracies if verdict.points or verdict.power]
    at = [PLACE] if len({verdict.place for verdict in shown}) > 1 else []

    def needed(index: int) -> Column:
        def cell(verdict: AccuracyVerdict) -> TableCell | None:
            if verdict.power is None:
                return None
            one = verdict.power.needed[index]
            return TableCell(f"{one.seeds:,}", one.seeds, f"({one.fewest:,}–{one.most:,})")

        return Column(f"seeds for {SIZES[index]:g}", cell)

    def deviation(verdict: AccuracyVerdict) -> tuple[float, float, float] | None:
        power = verdict.power
        return (power.deviation, power.low, power.high) if power else None

    def difference(verdict: AccuracyVerdict) -> TableCell | None:
        points = verdict.points
        if points is None:
            return None
        half = points.half_width
        width = "" if verdict.is_exact or half is None else f"±{half:.2f}"
        return TableCell(points_text(points.mean), points.mean, width)

    columns = (
        Column(
            "first − second",
            lambda verdict: f"{verdict.first} − {verdict.second}",
            is_number=False,
        ),
        *at,
        Column("difference", difference),
        Column("verdict", lambda verdict: verdict.decision, is_number=False),
        *(
            (Column("sd of a seed", deviation, "{:.2f}"), *map(needed, range(len(SIZES))))
            if any(verdict.power for verdict in shown)
            else ()
        ),
    )
    note = (
        "Differences of final top-1 in percentage points, the mean over seeds with its interval, "
        "paired by seed; identical: the weights are identical with each seed. Sd of a seed: the "
        "standard deviation of a seed's difference, with its 95 % interval. Seeds for a "
        f"difference: with so many, {100 * POWER:g} of 100 such comparisons show it (by the ends "
        "of that interval). Of identical trainings, both are for another training in place of one "
        "of them, with other weights and as much scatter."
    )
    return Table("Final top-1, points", note, columns, shown, keys=1 + len(at))


def cell_table(
    report: Report,
    title: str,
    columns: Sequence[Column],
    rows: Sequence[Any],
    note: str = "",
    is_detail: bool = False,
) -> Table:
    """Return a table with a row for each cell; it has no lines if no column has a value. Below it
    stand `note` and the columns' notes."""
    names = [*report.record.configurations]

    def configuration(row: Any) -> TableCell:
        name = row["configuration"]
        return TableCell(name, series=names.index(name) % len(COLOURS) if name in names else -1)

    shown = [
        column
        for column in columns
        if not column.is_optional or any(column.value(row) is not None for row in rows)
    ]
    has_cases = len(report.record.plan.cases) > 1
    keys = (
        *([Column("case", "case", is_number=False)] if has_cases else []),
        Column("configuration", configuration, is_number=False),
        Column("workers", "workers", "{}"),
    )
    if any(column.is_timed for column in shown) and any(row["are_disturbed"] for row in rows):
        title += f" ({DISTURBED} disturbed by other processes)"
    places = [(row["case"], row["workers"]) for row in rows]
    return Table(
        title,
        " ".join(filter(None, [note, *(column.note for column in shown)])),
        (*keys, *shown),
        rows if shown else [],
        len(keys),
        [i > 0 and places[i] != places[i - 1] for i in range(len(rows))],
        is_detail,
    )


def goals_tables(reports: Sequence[Report]) -> list[Table]:
    """Return the table of the plans' goals and their verdicts; none if no plan has goals."""
    goals = [goal for report in reports for goal in report.goals]
    at = [PLACE] if len({goal.place for goal in goals}) > 1 else []

    def found(goal: Goal) -> TableCell | None:
        value = goal.found and goal.found.value
        return None if value is None else TableCell(goal_figure(goal, value), value)

    def interval(goal: Goal) -> str | None:
        ends = goal.found and goal.found.ends
        return " – ".join(goal_figure(goal, end) for end in ends) if ends else None

    def blocks(goal: Goal) -> int:
        speeds = goal.speed.blocks if goal.speed else 0
        return goal.accuracy.seeds if goal.accuracy else speeds

    def verdict(goal: Goal) -> TableCell:
        is_alarm = goal.obstacle not in (None, Obstacle.FEW_BLOCKS)
        return TableCell(goal_verdict(goal), is_alarm=is_alarm)

    question = Column("question", lambda goal: goal.question, is_number=False)
    columns = (
        *([question] if len(reports) > 1 else []),
        *at,
        Column("sides", goal_sides, is_number=False),
        Column("goal", lambda goal: f"≥ {goal_figure(goal, goal.least)}"),
        Column("found", found),
        Column("interval", interval),
        Column("blocks", blocks, "{}"),
        Column("verdict", verdict, is_number=False),
    )
    note = (
        "The ratio of two sides' speeds, or a side's speed, against the plan's goal. At the goal: "
        "the interval contains the goal, and its lower end is at most 2 % below it; for a ratio "
        "also at most half as far below it as the goal is from 1."
    )
    if any(goal.accuracy for goal in goals):
        note += (
            " Or the difference of two sides' final top-1, first − second in percentage points, "
            "over the seeds of whole runs."
        )
    family = max((goal.family for goal in goals), default=1)
    if family > 1:
        note += (
            f" The goals of a plan (up to {family} here) are corrected by Holm's method, as "
            "verdicts are: an interval alone may say more than the verdict."
        )
    keys = len(columns) - 5  # up to the sides
    return [Table("Goals", note, columns, goals, keys)] if goals else []


def square_tables(report: Report) -> list[Table]:
    """Return a table for each case and number of workers at which both engines ran over the same
    two transports: their speeds, the ratios of engines and transports, and the interaction."""
    places = dict.fromkeys(v.place for v in report.verdicts if v.speed is not None)
    return [square_table(report, *place) for place in places if report.record.square]


def square_table(report: Report, *place: Any) -> Table:
    """Return the square of one case at one number of workers."""
    corners = report.record.square
    rates = {
        row["configuration"]: f"{three_digits(row['images_per_second'])} images/s"
        for row in report.speed
        if (row["case"], row["workers"]) == place
    }
    here = [v for v in report.verdicts if v.place == place and v.speed]
    ratios = {(v.first, v.second): v.speed for v in here if v.speed}
    ratios |= {(second, first): speed.inverse() for (first, second), speed in ratios.items()}
    first_engine, second_engine = dict.fromkeys(engine for engine, _ in corners)
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
        for engine in (first_engine, second_engine)
    ]
    engines = [ratio((first_engine, over), (second_engine, over)) for over in (base, new)]
    name = TableCell(f"{PEERS[first_engine]} / {PEERS[second_engine]}", series=-1)
    lines.append((name, *engines, ratio_cell(report.interactions.get(place))))
    heads = ("engine", f"over {base}", f"over {new}", f"transport: {new} / {base}")
    return Table(
        f"Engine and transport, {place_text(*place)}",
        f"Speed ratios with their intervals. Of {name.text}, {heads[-1]} is the interaction: the "
        f"engines' ratio over {new} divided by that over {base}. 1 means that {new} speeds up both "
        "engines by the same factor.",
        [Column(head, i, is_number=i > 0) for i, head in enumerate(heads)],
        lines,
        starts_group=(False, False, True),
    )


def ratio_cell(found: Estimate | None) -> TableCell:
    """Return a ratio with its interval, and enough decimals that no bound is rounded to 1."""
    places = max(3, digits(found)) if found else 0
    return Column("", lambda row: row, f"{{:.{places}f}}").cell(found)


def side_by_side_tables(both: SideBySide) -> list[Table]:
    """Return a table of each comparison's speeds, one of the ratios pooled over occasions, and one
    of what differs; the last two if they have lines."""
    speeds = [
        cell_table(
            report,
            f"Speed of {letter}, {name}",
            speed_columns(report.record.unit),
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
    ]
    if all(row["spread"] is None for row in both.occasions):
        del occasions[3]
    heads = ["differs", *both.letters]
    texts = [Column(head, i, is_number=False) for i, head in enumerate(heads)]
    found = [
        *speeds,
        Table("Over occasions", POOLED, occasions, both.occasions),
        Table("What differs", "", texts, [(k, *v) for k, v in both.differences.items()]),
    ]
    return [*goals_tables(both.reports), *(table for table in found if table.lines)]


def escaped(text: str) -> str:
    """Escape the characters of a text that Markdown would interpret. `_` within words is safe."""
    return re.sub(r"[\\`*<|]", r"\\\g<0>", text)


def table_text(table: Table, markdown: bool = False) -> str:
    """Return a table as Markdown, or for the terminal. Long texts are wrapped there; a table that
    is wider than the terminal (80 characters if there is none) is cut into parts, which stand below
    each other, each with the names of the rows."""
    texts = [[f"{cell.text} {cell.aside}".rstrip() for cell in row] for row in table.rows]
    columns = [
        [column.name, *(row[place] for row in texts)] for place, column in enumerate(table.columns)
    ]
    places = range(len(columns))
    if markdown:
        return grid_text(table, [[*map(escaped, column)] for column in columns], places, "pipe")
    room = shutil.get_terminal_size().columns
    for most in (WIDE, NARROW):
        wrapped = [wrapped_column(column, most) for column in columns]
        if width_of(wrapped) <= room:
            break
    keys, others = places[: table.keys], places[table.keys :]
    for number in range(1, len(others) + 1):
        size = math.ceil(len(others) / number)
        parts = [(*keys, *others[at : at + size]) for at in range(0, len(others), size)]
        if all(width_of([wrapped[place] for place in part]) <= room for part in parts):
            break
    return "\n\n".join(grid_text(table, wrapped, part, "simple") for part in parts)


def wrapped_column(column: Sequence[str], most: int) -> list[str]:
    """Return a column, its name first, with texts wrapped after `most` characters. Its name is
    wrapped after SHORT, but no earlier than its longest figure ends."""
    name, *texts = column
    wrapper = textwrap.TextWrapper(most, break_long_words=False, break_on_hyphens=False)
    wrapped = [wrapper.fill(text) for text in texts]
    wrapper.width = max(SHORT, width_of([wrapped]))
    return [wrapper.fill(name), *wrapped]


def width_of(columns: Sequence[Sequence[str]]) -> int:
    """Return the width of a table of these columns, with two spaces between them."""
    widths = [max(len(line) for line in "\n".join(column).split("\n")) for column in columns]
    return sum(widths) + 2 * (len(widths) - 1)


def grid_text(
    table: Table, columns: Sequence[Sequence[str]], places: Sequence[int], form: str
) -> str:
    """Return the columns of a table at these places, their names first, as text."""
    return tabulate.tabulate(
        [*zip(*(columns[place] for place in places), strict=True)],
        headers="firstrow",
        tablefmt=form,
        disable_numparse=True,
        colalign=["right" if table.columns[place].is_number else "left" for place in places],
    )
