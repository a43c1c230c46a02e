"""Measure the rows, and print one table: what `make bench` does.

    python benchmarks/run.py                         all rows that make sense on a CPU
    python benchmarks/run.py --only 4,5 --blocks 7   these rows, with more evidence
    python benchmarks/run.py --out runs/bench/FIRST  go on where an earlier call stopped
    python benchmarks/run.py --table runs/bench/FIRST
    python benchmarks/run.py --table results/*/*-bench   all that was kept, in one table

What has its record in the folder is not measured again, unless --again says so.
"""

import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks import by_turns, input_pipeline, memory, start_time, wire_format
from benchmarks.record import (
    Measured,
    Options,
    Row,
    gpu_name,
    measure_and_keep,
    read_record,
    show_rows,
)
from compare.evidence import packed
from compare.running.launch import utc_now
from compare.running.scheduler import say
from compare.running.sides import MeasurementError
from recipe.command import run_tool
from recipe.files import replace_file, write_json

FAILED = "mending"
DATED = "bench.json"  # whose date compare/keep.py takes


@dataclass(frozen=True)
class Entry:
    """A benchmark: its row, and on which kind of machine it makes sense."""

    name: str
    row: int
    measure: Callable[[Options], Measured]
    on_cpu: bool = True
    on_gpu: bool = True


def entries() -> list[Entry]:
    """All benchmarks, by row."""
    found = [
        Entry("input_pipeline", 3, input_pipeline.measure, on_gpu=False),
        Entry("wire_format", 10, wire_format.measure, on_gpu=False),
        Entry("start_time", 13, start_time.measure),
        Entry("memory", 14, memory.measure),
    ]
    found += [
        Entry(one.name, one.row, partial(by_turns.measure, one), bool(one.work), bool(one.gpu))
        for one in by_turns.read_goals()
    ]
    return sorted(found, key=lambda entry: entry.row)


def bench(
    options: Options, only: str | None = None, again: bool = False, table: tuple[Path, ...] = ()
) -> int:
    """Measure, unless --table names a record, and print the table.

    Args:
        options: How to measure.
        only: These rows alone, as in 4,5.
        again: Also what this folder has a record of.
        table: Measure nothing. Show these records in Markdown, each row by the newest of those
            that have measured it, by the dates in their names.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # a time limit ends all in order, as Ctrl-C does
        signal.signal(number, signal.default_int_handler)
    rows, below = read_records(table) if table else (measure_rows(options, only, again), "")
    if only is None and not options.gpu:
        rows += needing_gpu(rows)
    print(show_rows(rows, markdown=bool(table)) + below)
    if not table:
        replace_file(options.out / "table.md", show_rows(rows, markdown=True) + "\n")
        print(f"\nrecord: {options.out}")
    return int(any(row.needs == FAILED for row in rows))


def measure_rows(options: Options, only: str | None, again: bool) -> list[Row]:
    """Measure what has no record yet; a benchmark that fails does not keep the others from it."""
    if options.blocks is not None and options.blocks < 1:
        raise MeasurementError(f"--blocks {options.blocks}: must be at least 1")
    if options.gpu and not gpu_name():
        raise MeasurementError(
            "--gpu: torch finds no GPU here; on a machine with one, `make bench-gpu` measures"
        )
    chosen = choose(only, options.gpu)
    options.out.mkdir(parents=True, exist_ok=True)
    if not (options.out / DATED).exists():
        write_json(options.out / DATED, {"created_utc": utc_now()})
    rows: list[Row] = []
    for index, entry in enumerate(chosen, start=1):
        say(f"== row {entry.row}, {entry.name}: {index} of {len(chosen)}, {utc_now()}")
        kept = [] if again else read_record(options.out, entry.name, options).rows
        if any(row.value is not None for row in kept):  # else it needed something
            say(f"has its record in {options.out}")
            rows += kept
            continue
        try:
            rows += measure_and_keep(entry.name, entry.measure, options)
        except Exception as error:
            known = isinstance(error, MeasurementError)
            say(f"error: {error if known else traceback.format_exception_only(error)[-1].strip()}")
            rows.append(Row(entry.row, f"{entry.name}: failed, see above", None, needs=FAILED))
    return rows


def needing_gpu(rows: list[Row]) -> list[Row]:
    """The rows that only a GPU can measure, and that are not among these."""
    there = {row.number for row in rows}
    return [
        replace(by_turns.empty_row(name, pair, one), needs="a GPU")
        for one in by_turns.read_goals()
        if not one.work and one.row not in there
        for name, pair in one.pair.items()
    ]


def choose(only: str | None, gpu: bool) -> list[Entry]:
    """The benchmarks that --only names, or all that make sense on this kind of machine."""
    possible = [entry for entry in entries() if (entry.on_gpu if gpu else entry.on_cpu)]
    if only is None:
        return possible
    known, asked = {str(entry.row) for entry in possible}, only.split(",")
    if wrong := [word for word in asked if word not in known]:
        raise MeasurementError(
            f"--only {only}: there is no row {wrong[0]} {'with' if gpu else 'without'} --gpu; "
            f"take of {', '.join(sorted(known, key=int))}"
        )
    return [entry for entry in possible if str(entry.row) in asked]


def read_records(folders: Sequence[Path]) -> tuple[list[Row], str]:
    """The rows of all records in some folders, each from the newest folder that has measured it;
    and a line that says which."""
    found = [
        (folder, row)
        for folder in sorted(folders, key=lambda one: one.name)
        for path in sorted(packed.find(folder, "*.json"))
        if path.parent == folder and path.name != DATED
        for row in read_record(folder, path.stem).rows
        if row.value is not None
    ]
    if missing := {*folders} - {folder for folder, _ in found}:
        raise MeasurementError(f"--table {missing.pop()}: holds no record of a benchmark")
    newest = {row.number: folder for folder, row in found}
    rows = [row for folder, row in found if newest[row.number] == folder]
    lines = [
        f"rows {', '.join(str(n) for n in sorted(newest) if newest[n] == folder)} of {folder}"
        for folder in sorted({*newest.values()}, key=lambda one: one.name)
    ]
    return rows, f"\n\nRecorded: {'; '.join(lines)}"


main = partial(
    run_tool, "benchmarks/run.py", bench, __doc__,
    interrupted="interrupted: the same command with this --out goes on",
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
