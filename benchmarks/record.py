"""A row of the benchmarks: one figure beside its goal; the record that it is kept in, and the table
of all rows."""

import json
import math
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import psutil
import tabulate
import torch

from compare.evidence import packed
from compare.evidence.paired import CONFIDENCE, Estimate
from compare.evidence.turns import Block, Turn, estimate, throughput
from compare.keep import without_paths
from compare.running.launch import utc_now, utc_stamp
from compare.running.scheduler import PATIENCE
from compare.running.sides import MeasurementError, Side, commands_of
from recipe.files import write_json
from recipe.record.fingerprint import cpu_model, git_commit

# Numbers of blocks after which a row's verdict is looked for, unless the user gives a number. Each
# look could be wrong, so each has an interval that is the wider the more there are (Bonferroni).
LOOKS = (4, 8, 16)
REACHED, AT_GOAL, MISSED, OPEN = "reached", "at the goal", "not reached", "not shown"
NO_GOAL = "for reference"
# An interval that contains its goal decides, too, if it ends no more than this share beyond it, on
# the wrong side: on which side the truth lies could take hours to show, and would change no choice.
# Of a ratio it is half the goal's distance from 1 where that is less: that distance is the cost
# that the goal allows, or the gain that it asks for, and twice the cost or no gain is another
# answer. So a goal of 1, which allows no cost, has no tolerance; other units have no such 1.
NEAR = 0.02


@dataclass(frozen=True)
class Options:
    """How to measure."""

    # The record's folder.
    out: Path = field(default_factory=lambda: Path("runs") / "bench" / utc_stamp())
    blocks: int | None = None  # launches of each side, 3 for an interval; None: until a verdict
    quick: bool = False  # one short block of a tiny network: does it run?
    gpu: bool = False  # sizes for a GPU, which must be there

    @property
    def patience(self) -> float:
        """Seconds of waiting for quiet after a disturbed turn."""
        return 0.0 if self.quick else PATIENCE

    @property
    def looks(self) -> tuple[int, ...]:
        """The numbers of blocks after which it is asked whether they are enough."""
        return (self.num_blocks(),) if self.blocks or self.quick else LOOKS

    @property
    def confidence(self) -> float:
        """Of the interval at each look: all of them hold in 95 of 100 measurements."""
        return 1 - 0.05 / len(self.looks)

    def num_blocks(self, default: int = 4) -> int:
        """Of a row that does not look for its verdict."""
        return self.blocks or (1 if self.quick else default)

    def rounds(self, default: int = 8) -> int:
        """How many turns each side has in a block."""
        return 2 if self.quick else default


@dataclass(frozen=True)
class Row:
    """One figure, its goal, and what was found.

    `value` is an estimate with its interval from `low` to `high`, which are None where there
    were too few blocks; a row that was not measured has no value and says in `needs` what it needs.
    A row without a goal stands beside others for reference.
    """

    number: int
    name: str
    goal: float | None
    unit: str = "ratio"
    at_least: bool = True  # the goal is a lower bound
    value: float | None = None
    low: float | None = None
    high: float | None = None
    blocks: tuple[float, ...] = ()
    needs: str = ""
    notes: tuple[str, ...] = ()  # what it was measured on; what binds

    @property
    def verdict(self) -> str:
        """What the interval says of the goal, or why it says nothing."""
        if self.value is None:
            return f"needs {self.needs}" if self.needs else OPEN
        if self.goal is None:
            return NO_GOAL
        if self.low is None or self.high is None:
            return OPEN
        worse, better = (self.low, self.high) if self.at_least else (-self.high, -self.low)
        goal = self.goal if self.at_least else -self.goal
        if worse >= goal:
            return REACHED
        if better < goal:
            return MISSED
        allowed = abs(1 - self.goal) / 2 if self.unit == "ratio" else math.inf
        return AT_GOAL if worse >= goal - min(NEAR * abs(goal), allowed) else OPEN

    def measured(self, found: Estimate, *notes: str) -> "Row":
        """The row with an estimate in it, and more notes."""
        return replace(
            self, value=found.ratio, low=found.low, high=found.high, blocks=found.ratios,
            notes=(*self.notes, *notes),
        )  # fmt: skip

    def compared(
        self,
        blocks: Sequence[Block],
        first: str,
        second: str,
        value: Callable[[Turn], float] = throughput,
        confidence: float = CONFIDENCE,
    ) -> "Row":
        """The row with the ratio first / second of two sides in it."""
        load = max(block.other_load for block in blocks)
        is_quiet = all(block.other_load <= block.quiet_cores for block in blocks)
        noise = [] if is_quiet else [f"others kept up to {load:.1f} cores busy meanwhile"]
        return self.measured(estimate(blocks, {first: 1, second: -1}, value, confidence), *noise)


@dataclass
class Measured:
    """What a benchmark returns: its rows, and what they came from."""

    rows: list[Row]
    sides: list[Side] = field(default_factory=list)
    blocks: dict[str, list[Block]] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)


class Record(msgspec.Struct):
    """What is read of a benchmark's record."""

    rows: list[Row]
    options: dict[str, Any] = {}


def measure_and_keep(
    name: str, measure: Callable[[Options], Measured], options: Options
) -> list[Row]:
    """Measure, write the record, return its rows."""
    options.out.mkdir(parents=True, exist_ok=True)
    started, measured = utc_now(), measure(options)
    record = {
        "benchmark": name,
        "created_utc": started,
        "ended_utc": utc_now(),
        "rows": [{**asdict(row), "verdict": row.verdict} for row in measured.rows],
        "options": {**asdict(options), "out": str(options.out)},
        "machine": machine(),
        "commands": commands_of(measured.sides),
        "details": measured.details,
        "blocks": {case: [asdict(one) for one in found] for case, found in measured.blocks.items()},
    }
    write_json(options.out / f"{name}.json", json.loads(without_paths(json.dumps(record))))
    return measured.rows


def read_record(folder: Path, name: str, options: Options | None = None) -> Record:
    """The record of a benchmark; an empty one if it has not been measured in this folder.

    MeasurementError if it was measured with --gpu or --quick, and `options` say otherwise, or the
    other way round.
    """
    path = folder / f"{name}.json"
    if not packed.exists(path):
        return Record([])
    try:
        record = msgspec.json.decode(packed.read_text(path), type=Record)
    except (OSError, RecursionError, ValueError) as error:
        raise MeasurementError(f"{path}: is no record of a benchmark ({error})") from None
    for flag in ("gpu", "quick"):
        if options is not None and record.options.get(flag, False) != getattr(options, flag):
            how = "with" if record.options.get(flag) else "without"
            raise MeasurementError(f"{path}: was measured {how} --{flag}; take another --out")
    return record


def gpu_name() -> str | None:
    """The GPU that the trainers would take; None if there is none."""
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


def machine() -> dict[str, Any]:
    """What these figures were measured on."""
    return {
        "cpu_model": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpu": gpu_name(),
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "git_commit": git_commit(),
    }


HEADERS = ("", "what", "goal", "found", "interval", "blocks", "verdict")
ALIGN = ("right", "left", "right", "right", "right", "right", "left")


def show_rows(rows: Sequence[Row], markdown: bool = False) -> str:
    """The rows as a table, for a terminal or as Markdown; notes stand below it."""

    def shown(value: float | None, unit: str) -> str:
        if value is None:
            return "–"
        if unit == "ratio":
            return f"{value:.3f}" if value < 10 else f"{value:.1f}"
        return f"{value:,.0f} {unit}"

    cells, notes = [], []
    for row in sorted(rows, key=lambda row: row.number):
        goal, low, high = (shown(value, row.unit) for value in (row.goal, row.low, row.high))
        cells.append(
            (
                str(row.number),
                row.name,
                "–" if row.goal is None else f"{'≥' if row.at_least else '≤'} {goal}",
                shown(row.value, row.unit),
                "–" if row.low is None else f"{low} – {high}",
                str(len(row.blocks) or "–"),
                row.verdict,
            )
        )
        mark = "- " if markdown else ""
        notes += [f"{mark}{row.number}, {row.name}: {note}" for note in row.notes]
    text = tabulate.tabulate(
        cells, HEADERS, tablefmt="github" if markdown else "simple", disable_numparse=True,
        colalign=ALIGN if cells else None,
    )  # fmt: skip
    return "\n\n".join(filter(None, [text, "\n".join(notes)]))
