"""Measure the rows, and print one table: what `make bench` does.

    python benchmarks/run.py                         all rows that make sense on a CPU
    python benchmarks/run.py --only 4,5 --blocks 7   these rows, with more evidence
    python benchmarks/run.py --out runs/bench/FIRST  go on where an earlier call stopped
    python benchmarks/run.py --table runs/bench/FIRST --markdown docs/performance.md

What has its record in the folder is not measured again, unless --again says so.
"""

import argparse
import re
import signal
import sys
import time
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
    read_rows,
    table,
)
from compare.errors import run_main
from compare.running.launch import utc_now, utc_stamp
from compare.running.scheduler import say
from compare.running.sides import MeasurementError
from recipe.files import replace_file, write_json

FAILED = "mending"
BEGIN, END = "<!-- the table: begin -->", "<!-- the table: end -->"
# Records of earlier versions, which had both engines of rows 4 and 5 in one.
EARLIER = ("compute_bound", "communication_bound")


@dataclass(frozen=True)
class Entry:
    """A benchmark: its row, and on which kind of machine it makes sense."""

    name: str
    row: int
    measure: Callable[[Options], Measured]
    on_cpu: bool = True
    on_gpu: bool = True
    unmeasured: tuple[Row, ...] = ()  # what to show of it on a machine of the other kind


def entries() -> list[Entry]:
    """All benchmarks, by row."""
    found = [
        Entry("input_pipeline", 3, input_pipeline.measure, on_gpu=False),
        Entry("wire_format", 10, wire_format.measure, on_gpu=False),
        Entry("start_time", 13, start_time.measure),
        Entry("memory", 14, memory.measure),
    ]
    for one in by_turns.read_goals():
        rows = tuple(
            Row(one.row, name, pair.goal, "ratio" if len(pair.sides) == 2 else "images/s",
                needs="a GPU")
            for name, pair in one.pair.items()
        )  # fmt: skip
        measure = partial(by_turns.measure, one)
        found.append(Entry(one.name, one.row, measure, bool(one.work), bool(one.gpu), rows))
    return sorted(found, key=lambda entry: entry.row)


def main(argv: list[str] | None = None) -> int:
    """Measure or show what the command line asks for and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/run.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--blocks",
        type=int,
        metavar="N",
        help="launches of each side; an interval needs 3 (default: 4, or up to 16 for a verdict)",
    )
    add("--turns", type=int, metavar="N", help="quiet turns of each side in a block (2 N at most)")
    add("--patience", type=float, metavar="S", help="wait after a disturbed turn (2)")
    add("--quick", action="store_true", help="one short block of a tiny network: does it run?")
    add("--out", type=Path, metavar="DIR", help="the record's folder (default: runs/bench/TIME)")
    add("--gpu", action="store_true", help="sizes for a GPU, which must be there")
    add("--profile", action="store_true", help="say what binds, even of goals that are reached")
    add("--seed", type=int, default=0, metavar="N", help="of the order of starts (default: 0)")
    add("--only", metavar="N,N", help="these rows alone")
    add("--again", action="store_true", help="also what this folder has a record of")
    add("--table", type=Path, metavar="DIR", help="measure nothing, show this record")
    add(
        "--markdown",
        type=Path,
        metavar="FILE",
        help="write the table between this file's marks, without its notes (table.md has them)",
    )
    for number in (signal.SIGINT, signal.SIGTERM):  # a time limit ends all in order, as Ctrl-C does
        signal.signal(number, signal.default_int_handler)
    interrupted = "interrupted: the same command with this --out goes on"
    return run_main("error", lambda: answer(parser.parse_args(argv)), interrupted=interrupted)


def answer(arguments: argparse.Namespace) -> int:
    """Measure, unless --table names a record, and print the table."""
    if arguments.table is not None:
        rows = rows_in(arguments.table)
    else:
        options = options_from(arguments)
        chosen = choose(arguments.only, options.gpu)
        options.out.mkdir(parents=True, exist_ok=True)
        if not (options.out / "bench.json").exists():  # the date that compare/keep.py takes
            write_json(options.out / "bench.json", {"created_utc": utc_now()})
        rows = measure_all(chosen, options, arguments.again)
        if arguments.only is None and not options.gpu:
            rows += [row for one in entries() if not one.on_cpu for row in one.unmeasured]
    print(table(rows))
    if arguments.markdown is not None:
        without_notes = [replace(row, notes=()) for row in rows]  # table.md has them
        write_table(arguments.markdown, table(without_notes, markdown=True))
    if arguments.table is None:
        replace_file(options.out / "table.md", table(rows, markdown=True) + "\n")
        print(f"\nrecord: {options.out}")
    return int(any(row.needs == FAILED for row in rows))


def options_from(arguments: argparse.Namespace) -> Options:
    """The options; MeasurementError for what cannot be."""
    for flag in ("blocks", "turns"):
        value = getattr(arguments, flag)
        if value is not None and value < 1:
            raise MeasurementError(f"--{flag} {value}: must be at least 1")
    if arguments.gpu and not gpu_name():
        raise MeasurementError(
            "--gpu: torch finds no GPU here; on a machine with one, `make bench-gpu` measures"
        )
    names = ("blocks", "turns", "quick", "gpu", "profile", "seed")
    options = Options(
        arguments.out or Path("runs") / "bench" / utc_stamp(),
        **{name: getattr(arguments, name) for name in names},
    )
    patience = 0.0 if options.quick else arguments.patience
    return options if patience is None else replace(options, patience=patience)


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


def measure_all(chosen: Sequence[Entry], options: Options, again: bool) -> list[Row]:
    """Measure what has no record yet; a benchmark that fails does not keep the others from it."""
    rows: list[Row] = []
    began = time.monotonic()
    for index, entry in enumerate(chosen):
        kept = [] if again else read_rows(options.out, entry.name, options)
        if any(row.value is not None for row in kept):  # else it needed something
            say(f"== row {entry.row}, {entry.name}: has its record in {options.out}")
            rows += kept
            continue
        minutes = (time.monotonic() - began) / 60
        about = f"{index + 1} of {len(chosen)}, after {minutes:.0f} min"
        say(f"== row {entry.row}, {entry.name}: {about}")
        try:
            rows += measure_and_keep(entry.name, entry.measure, options)
        except Exception as error:
            known = isinstance(error, MeasurementError)
            say(f"error: {error if known else traceback.format_exception_only(error)[-1].strip()}")
            name = f"{entry.name}: failed, see above"
            rows.append(Row(entry.row, name, None, needs=FAILED))
    return rows


def rows_in(folder: Path) -> list[Row]:
    """The rows of all records in a folder."""
    if not folder.is_dir():
        raise MeasurementError(f"--table {folder}: there is no such folder")
    all_entries = entries()
    names = (*EARLIER, *(entry.name for entry in all_entries))
    rows = [row for name in names for row in read_rows(folder, name)]
    if not rows:
        raise MeasurementError(f"{folder}: holds no record of a benchmark")
    there = {row.number for row in rows}
    missing = [one for one in all_entries if not one.on_cpu and one.row not in there]
    return rows + [row for one in missing for row in one.unmeasured]


def write_table(path: Path, text: str) -> None:
    """Put the table between the marks of a Markdown file, in place of what is there."""
    old = path.read_text() if path.exists() else ""
    if old.count(BEGIN) != 1 or old.count(END) != 1:
        raise MeasurementError(f"--markdown {path}: needs one line {BEGIN} and one {END}")
    pattern = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.DOTALL)
    replace_file(path, pattern.sub(lambda _: f"{BEGIN}\n\n{text}\n\n{END}", old))


if __name__ == "__main__":
    sys.exit(main())
