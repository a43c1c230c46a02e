"""Several comparisons beside each other: before and after a change, or two machines.

Their runs were not made in the same blocks. Whatever the machines did meanwhile is in a ratio of
the two, and no interval could be trusted: there are ratios here, but no verdicts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

from compare.evidence.records import Comparison
from compare.evidence.rows import SpeedRow, by_turns, speed_rows
from compare.evidence.run_folder import recorded
from compare.evidence.words import short, told_apart
from compare.page.tables import Cell, Column, Table, figure, word

# What environment.json says that may explain a difference, the seed's and the clock's aside.
ENVIRONMENT = (
    "hosts", "device", "device_name", "cpu_model", "cores", "threads", "affinity", "allocator",
    "transport", "kernel", "python", "torch", "torchvision", "horovod", "mpi", "cuda", "git_commit",
)  # fmt: skip
UNPAIRED = (
    "Ratios are of medians and unpaired: these runs were not made in the same blocks, so a change "
    "of the machine between them is part of the ratio. They have no interval; there is no verdict."
)
COMPARED = {"images/s": "images_per_second", "CPU ms per image": "cpu_ms_per_image"}
NOT_SETTINGS = {"log_dir", "name", "seed"}


@dataclass(frozen=True)
class Line:
    """A cell of the comparisons: its row in each of them, None where one lacks it."""

    case: str
    workers: int
    configuration: str
    rows: tuple[SpeedRow | None, ...]
    is_alike: tuple[bool, ...]  # is the comparison measured as the first is: by turns, or in runs?

    def ratios(self, value_of: Callable[[SpeedRow], float]) -> list[float | None]:
        """Return the medians of the second and all others over the first's: unpaired ratios; None
        where one lacks it, and between a speed by turns and one of whole runs."""
        first, *others = [
            row if alike else None for row, alike in zip(self.rows, self.is_alike, strict=True)
        ]
        return [
            None if first is None or other is None else value_of(other) / value_of(first)
            for other in others
        ]


@dataclass(frozen=True)
class Difference:
    """A setting or a fact that is not the same in all comparisons."""

    field: str
    values: tuple[str, ...]  # comparison by comparison; several values of one are joined


def names_of(comparisons: Sequence[Comparison]) -> list[str]:
    """Name comparisons by their folders."""
    return told_apart([comparison.folder for comparison in comparisons])


def match_cells(comparisons: Sequence[Comparison]) -> list[Line]:
    """Return the cells of all comparisons, those of the first in its table's order."""
    found: dict[tuple[str, int, str], list[SpeedRow | None]] = {}
    for at, comparison in enumerate(comparisons):
        for row in speed_rows(comparison):
            cell = (row.case, row.workers, row.configuration)
            found.setdefault(cell, [None] * len(comparisons))[at] = row
    alike = have_one_method(comparisons)
    return [Line(*cell, tuple(rows), alike) for cell, rows in found.items()]


def have_one_method(comparisons: Sequence[Comparison]) -> tuple[bool, ...]:
    """Tell of each comparison whether it is measured as the first one is."""
    return tuple(by_turns(one) == by_turns(comparisons[0]) for one in comparisons)


def letters_of(comparisons: Sequence[Comparison]) -> list[str]:
    """Name comparisons A, B, ...: their own names would make a table too broad."""
    return [chr(ord("A") + i) if i < 26 else str(i + 1) for i in range(len(comparisons))]


def side_by_side_table(comparisons: Sequence[Comparison]) -> Table:
    """Return the table of several comparisons."""
    letters, lines = letters_of(comparisons), match_cells(comparisons)
    columns = [Column("case", word("case"), is_number=False)] * any(line.case for line in lines)
    columns.append(Column("configuration", word("configuration"), is_number=False))
    columns.append(Column("workers", word("workers")))
    for name, field in COMPARED.items():
        columns += [
            Column(f"{name} {letter}", partial(speed_cell, field=field, at=at))
            for at, letter in enumerate(letters)
        ]
        columns += [
            Column(f"{letter} / {letters[0]} unpaired", partial(ratio_cell, field=field, at=at))
            for at, letter in enumerate(letters[1:])
        ]
    rows = tuple(tuple(column.cell(line) for column in columns) for line in lines)
    return Table("Results", f"Medians over blocks. {UNPAIRED}", tuple(columns), rows)


def speed_cell(line: Line, field: str, at: int) -> Cell:
    return figure(getattr(line.rows[at], field, None))


def ratio_cell(line: Line, field: str, at: int) -> Cell:
    return figure(line.ratios(attrgetter(field))[at], "{:.3f}")


def find_differences(comparisons: Sequence[Comparison]) -> list[Difference]:
    """Return in what the comparisons differ, beside the order and the noise of their runs."""
    settings = dict.fromkeys(
        field
        for comparison in comparisons
        for run in comparison.written
        for field in run.config.flags
    )
    told = [("environment", field) for field in ENVIRONMENT]
    told += [("config", field) for field in settings if field not in (*NOT_SETTINGS, *ENVIRONMENT)]
    differences = []
    if not all(have_one_method(comparisons)):
        how = tuple(comparison.plan["measure"] for comparison in comparisons)
        differences.append(Difference("measured by", how))
    for record, field in told:
        values = tuple(values_text(comparison, record, field) for comparison in comparisons)
        if len(set(values)) > 1:
            differences.append(Difference(field, values))
    return differences


def values_text(comparison: Comparison, record: str, field: str) -> str:
    """Return the values that a field has in a comparison, in the order of the cells."""
    runs = sorted(comparison.written, key=lambda run: run.cell)
    told = (
        recorded(run.environment) if record == "environment" else run.config.flags for run in runs
    )
    values = (fields.get(field, "not recorded") for fields in told)
    return "; ".join(dict.fromkeys(short(value) or "none" for value in values))
