"""What all benchmarks share: rows and their verdicts, flags, the record, the table."""

import argparse
import json
import os
import platform
import signal
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import tabulate

from benchmarks.harness.blocks import OPEN, Options, verdict_of
from compare.errors import run_main
from compare.evidence import packed
from compare.evidence.paired import CONFIDENCE, Estimate
from compare.evidence.turns import Block, Turn, estimate, throughput
from compare.keep import without_paths
from compare.running.launch import utc_now, utc_stamp
from compare.running.sides import MeasurementError, Side
from recipe.files import write_json

NO_GOAL = "for reference"

# The trainer's own best settings on a CPU with bf16 units and on a GPU of today.
BEST_FLAGS = ("--precision", "bf16", "--channels-last")


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
        """What the interval says of the goal (blocks.verdict_of), or why it says nothing."""
        if self.value is None:
            return f"needs {self.needs}" if self.needs else OPEN
        if self.goal is None:
            return NO_GOAL
        return verdict_of(self.low, self.high, self.goal, self.at_least)

    def measured(self, found: Estimate, *notes: str) -> "Row":
        """The row with an estimate in it."""
        return replace(
            self,
            value=found.ratio,
            low=found.low,
            high=found.high,
            blocks=found.ratios,
            notes=(*self.notes, *notes),
        )

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
        return self.measured(estimate(blocks, first, second, value, confidence), *noise)


def with_note(row: Row, note: str) -> Row:
    """The row with one more note."""
    return replace(row, notes=(*row.notes, note))


@dataclass
class Measured:
    """What a benchmark returns: its rows, and what they came from."""

    rows: list[Row]
    sides: Sequence[Side] = ()
    blocks: dict[str, list[Block]] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)


Measure = Callable[[Options], Measured]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that all benchmarks have."""
    add = parser.add_argument
    add(
        "--blocks",
        type=int,
        metavar="N",
        help="launches of each side; an interval needs 3 (default: 4, or up to 16 for a verdict)",
    )
    add("--turns", type=int, metavar="N", help="quiet turns of each side in a block (2 N at most)")
    add("--patience", type=float, default=2.0, metavar="S", help="wait after a disturbed turn (2)")
    add("--quick", action="store_true", help="one short block of a tiny network: does it run?")
    add("--out", type=Path, metavar="DIR", help="the record's folder (default: runs/bench/TIME)")
    add("--gpu", action="store_true", help="sizes for a GPU, which must be there")
    add("--profile", action="store_true", help="say what binds, even of goals that are reached")
    add("--seed", type=int, default=0, metavar="N", help="of the order of starts (default: 0)")


def options_from(arguments: argparse.Namespace) -> Options:
    """The options, with defaults for what was not given; MeasurementError for what cannot be."""
    for flag in ("blocks", "turns"):
        value = getattr(arguments, flag)
        if value is not None and value < 1:
            raise MeasurementError(f"--{flag} {value}: must be at least 1")
    if arguments.gpu and not gpu_name():
        raise MeasurementError(
            "--gpu: torch finds no GPU here; on a machine with one, `make bench-gpu` measures"
        )
    return Options(
        out=arguments.out or Path("runs") / "bench" / utc_stamp(),
        blocks=arguments.blocks or (1 if arguments.quick else 4),
        turns=arguments.turns or (2 if arguments.quick else 8),
        patience=0.0 if arguments.quick else arguments.patience,
        quick=arguments.quick,
        gpu=arguments.gpu,
        profile=arguments.profile,
        seed=arguments.seed,
        blocks_given=arguments.blocks is not None,
        turns_given=arguments.turns is not None,
    )


def gpu_name() -> str | None:
    """The GPU that the trainers would take; None if there is none."""
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


def main(name: str, doc: str | None, measure: Measure) -> int:
    """What each benchmark does when it is started alone; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog=f"python benchmarks/{name}.py",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flags(parser)
    return guarded(lambda: alone(name, measure, options_from(parser.parse_args())))


def alone(name: str, measure: Measure, options: Options) -> int:
    """Measure, write the record, print its table."""
    rows = measure_and_keep(name, measure, options)
    print(table(rows))
    print(f"record: {record_path(options.out, name)}")
    return 0


def guarded(body: Callable[[], int]) -> int:
    """Run `body`; turn what a user can do something about into one message and exit code 2.

    SIGTERM (a time limit) ends everything in order, as Ctrl-C does.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    goes_on = "interrupted: the same command with this --out goes on"
    return run_main("error", body, interrupted=goes_on)


# ---------------------------------------------------------------------------------- the record


def record_path(folder: Path, name: str) -> Path:
    """Where a benchmark's record is written."""
    return folder / f"{name}.json"


def measure_and_keep(name: str, measure: Measure, options: Options) -> list[Row]:
    """Measure, write the record, return its rows."""
    options.out.mkdir(parents=True, exist_ok=True)
    started = utc_now()
    measured = measure(options)
    record = {
        "benchmark": name,
        "created_utc": started,
        "ended_utc": utc_now(),
        "rows": [as_dict(row) for row in measured.rows],
        "options": {**asdict(options), "out": str(options.out)},
        "machine": machine(),
        "commands": {side.name: side.shown() for side in measured.sides},
        "details": measured.details,
        "blocks": {
            case: [asdict(block) for block in blocks] for case, blocks in measured.blocks.items()
        },
    }
    write_json(record_path(options.out, name), json.loads(without_paths(json.dumps(record))))
    return measured.rows


def as_dict(row: Row) -> dict[str, Any]:
    """A row as it stands in the record."""
    return {**asdict(row), "verdict": row.verdict}


def row_from(values: dict[str, Any]) -> Row:
    """A row from its record."""
    kept = {key: value for key, value in values.items() if key != "verdict"}
    return Row(**{**kept, "blocks": tuple(kept["blocks"]), "notes": tuple(kept["notes"])})


def read_rows(folder: Path, name: str, options: Options | None = None) -> list[Row] | None:
    """The rows of a finished benchmark; None if it has not been measured in this folder.

    MeasurementError if it was measured with --gpu or --quick, and `options` say otherwise, or the
    other way round.
    """
    path = record_path(folder, name)
    if not packed.exists(path):
        return None
    try:
        record = json.loads(packed.read_text(path))
        rows = [row_from(values) for values in record["rows"]]
        measured = record.get("options", {})
    except (ValueError, KeyError, TypeError) as error:
        raise MeasurementError(f"{path}: is no record of a benchmark ({error!r})") from None
    for flag in ("gpu", "quick"):
        if options is not None and measured.get(flag, False) != getattr(options, flag):
            how = "with" if measured.get(flag) else "without"
            raise MeasurementError(f"{path}: was measured {how} --{flag}; take another --out")
    return rows


def machine() -> dict[str, Any]:
    """What these figures were measured on."""
    import torch

    from recipe.record.environment import cpu_model, git_commit

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


# ----------------------------------------------------------------------------------- the table

HEADERS = ("", "what", "goal", "found", "interval", "blocks", "verdict")


def table(rows: Sequence[Row], markdown: bool = False) -> str:
    """The rows as a table, for a terminal or as Markdown; notes stand below it."""
    cells = [
        (
            str(row.number),
            row.name,
            "–"
            if row.goal is None
            else f"{'≥' if row.at_least else '≤'} {shown(row.goal, row.unit)}",
            "–" if row.value is None else shown(row.value, row.unit),
            "–"
            if row.low is None or row.high is None
            else f"{shown(row.low, row.unit)} – {shown(row.high, row.unit)}",
            str(len(row.blocks) or "–"),
            row.verdict,
        )
        for row in sorted(rows, key=lambda row: row.number)
    ]
    align = ("right", "left", "right", "right", "right", "right", "left")
    text = tabulate.tabulate(
        cells,
        HEADERS,
        tablefmt="github" if markdown else "simple",
        disable_numparse=True,
        colalign=align if cells else None,
    )
    return f"{text}\n\n{notes(rows, markdown)}".rstrip()


def shown(value: float, unit: str) -> str:
    """A figure with the digits that its goal is told with."""
    if unit == "ratio":
        return f"{value:.3f}" if value < 10 else f"{value:.1f}"
    return f"{value:,.0f} {unit}"


def notes(rows: Sequence[Row], markdown: bool) -> str:
    """What stands below the table: on what each row was measured, what binds."""
    mark = "- " if markdown else ""
    lines = []
    for row in sorted(rows, key=lambda row: row.number):
        lines += [f"{mark}{row.number}, {row.name}: {note}" for note in row.notes]
    return "\n".join(lines)


def unexpected(error: Exception) -> str:
    """A bug's last words, for a row that could not be measured."""
    return traceback.format_exception_only(error)[-1].strip()
