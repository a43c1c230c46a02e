"""Several comparisons beside each other: before and after a change, or two machines.

Their runs were not made in the same blocks. Whatever the machines did meanwhile is in a ratio of
the two, and no interval could be trusted: there are ratios here, but no verdicts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from compare.evidence.records import Comparison
from compare.evidence.rows import SpeedRow
from compare.evidence.run_folder import recorded
from compare.evidence.words import short, shortest_unique_names
from compare.page.report import Report
from compare.page.tables import Column, Table, column, figure

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

    def ratios(self, field: str) -> list[float | None]:
        """Return the medians of the second and all others over the first's: unpaired ratios; None
        where one lacks it, and between a speed by turns and one of whole runs."""
        first, *others = (
            getattr(row, field, None) if alike else None
            for row, alike in zip(self.rows, self.is_alike, strict=True)
        )
        return [other / first if first and other else None for other in others]


class SideBySide:
    """What several reports show of each other."""

    def __init__(self, reports: Sequence[Report]):
        self.reports = reports
        comparisons = [report.comparison for report in reports]
        self.names = shortest_unique_names([one.folder for one in comparisons])
        # Their own names would make a table too broad.
        self.letters = [chr(ord("A") + i) if i < 26 else str(i + 1) for i in range(len(reports))]
        self.methods: tuple[str, ...] = tuple(one.plan.measure for one in comparisons)
        cells: dict[tuple[str, int, str], list[SpeedRow | None]] = {}
        for at, report in enumerate(reports):
            for row in report.speed:
                cell = (row.case, row.workers, row.configuration)
                cells.setdefault(cell, [None] * len(reports))[at] = row
        alike = tuple(method == self.methods[0] for method in self.methods)
        self.lines = [Line(*cell, tuple(rows), alike) for cell, rows in cells.items()]
        # In what the comparisons differ, beside the order and the noise of their runs: a value of
        # each, several of one joined.
        self.differences = {"measured by": self.methods} if len(set(self.methods)) > 1 else {}
        settings = dict.fromkeys(name for one in comparisons for run in one.written
                                 for name in run.config.flags)  # fmt: skip
        for name in dict.fromkeys((*ENVIRONMENT, *settings)):
            values = tuple(values_text(one, name) for one in comparisons)
            if len(set(values)) > 1 and name not in NOT_SETTINGS:
                self.differences[name] = values

    def table(self) -> Table:
        """Return the table of their speeds."""
        columns = [column("case", "case", scale=None)] * any(line.case for line in self.lines)
        columns.append(column("configuration", "configuration", scale=None))
        columns.append(column("workers", "workers", "{}"))
        for name, field in COMPARED.items():
            columns += [speed_column(f"{name} {x}", field, at) for at, x in enumerate(self.letters)]
            columns += [
                ratio_column(f"{x} / {self.letters[0]} unpaired", field, at)
                for at, x in enumerate(self.letters[1:])
            ]
        rows = tuple(tuple(one.cell(line) for one in columns) for line in self.lines)
        return Table("Results", f"Medians over blocks. {UNPAIRED}", tuple(columns), rows)


def speed_column(name: str, field: str, at: int) -> Column:
    return Column(name, lambda line: figure(getattr(line.rows[at], field, None)))


def ratio_column(name: str, field: str, at: int) -> Column:
    return Column(name, lambda line: figure(line.ratios(field)[at], "{:.3f}"))


def values_text(comparison: Comparison, name: str) -> str:
    """Return the values of a setting, or of a fact, in the order of the cells."""
    runs = sorted(comparison.written, key=lambda run: run.cell)
    told = (recorded(run.environment) if name in ENVIRONMENT else run.config.flags for run in runs)
    values = (fields.get(name, "not recorded") for fields in told)
    return "; ".join(dict.fromkeys(short(value) or "none" for value in values))
