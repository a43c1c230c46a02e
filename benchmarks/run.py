"""Measure all rows, and print one table: what `make bench` does.

    python benchmarks/run.py                         all rows that make sense on a CPU
    python benchmarks/run.py --only 4,5 --blocks 7   these rows, with more evidence
    python benchmarks/run.py --out runs/bench/FIRST  go on where an earlier call stopped
    python benchmarks/run.py --table runs/bench/FIRST --markdown docs/performance.md

Each benchmark is a module of its own that runs alone, too. One that has its record in the folder is
not measured again, unless --again says so.
"""

import argparse
import importlib
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.harness import bench
from compare.running.launch import utc_now
from compare.running.sides import MeasurementError
from compare.running.turns import say
from recipe.files import replace_file, write_json

FAILED = "mending"
BEGIN, END = "<!-- the table: begin -->", "<!-- the table: end -->"


@dataclass(frozen=True)
class Entry:
    """A benchmark, and the rows that it measures on a CPU and on a GPU."""

    name: str
    cpu: tuple[int, ...]
    gpu: tuple[int, ...] = ()


ENTRIES = (
    Entry("trainer_overhead", (1,), (1,)),
    Entry("best_configuration", (2,), (2,)),
    Entry("input_pipeline", (3,)),
    Entry("compute_bound", (4,)),
    Entry("communication_bound", (5,)),
    Entry("instrumentation", (6,), (6,)),
    Entry("checkpoints", (7,), (7,)),
    Entry("real_data", (8,), (12,)),
    Entry("against_plain_horovod", (9,), (9,)),
    Entry("wire_format", (10,)),
    Entry("images_per_second", (11,), (11,)),
    Entry("start_time", (13,), (13,)),
    Entry("memory", (14,), (14,)),
)
NEEDS_A_GPU = bench.Row(12, "real / synthetic data, on the GPU", 0.95, needs="a GPU")


def main(argv: list[str] | None = None) -> int:
    """Measure or show what the command line asks for and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/run.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    bench.add_flags(parser)
    add = parser.add_argument
    add("--only", metavar="N,N", help="these rows alone")
    add("--again", action="store_true", help="also what this folder has a record of")
    add("--table", type=Path, metavar="DIR", help="measure nothing, show this record")
    add(
        "--markdown",
        type=Path,
        metavar="FILE",
        help="write the table between this file's marks, without its notes (table.md has them)",
    )
    return bench.guarded(lambda: answer(parser.parse_args(argv)))


def answer(arguments: argparse.Namespace) -> int:
    """Measure, unless --table names a record, and print the table."""
    if arguments.table is not None:
        if not arguments.table.is_dir():
            raise MeasurementError(f"--table {arguments.table}: there is no such folder")
        rows = rows_in(arguments.table)
    else:
        options = bench.options_from(arguments)
        entries = chosen(arguments.only, options.gpu)
        begin_record(options.out)
        rows = measure_all(entries, options, arguments.again)
    print(bench.table(rows))
    if arguments.markdown is not None:
        without_notes = [replace(row, notes=()) for row in rows]  # table.md has them
        write_table(arguments.markdown, bench.table(without_notes, markdown=True))
    if arguments.table is None:
        replace_file(options.out / "table.md", bench.table(rows, markdown=True) + "\n")
        print(f"\nrecord: {options.out}")
    return int(any(row.needs == FAILED for row in rows))


def begin_record(folder: Path) -> None:
    """Make the record's folder, with the date that compare/keep.py names its copy by."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "bench.json").exists():
        write_json(folder / "bench.json", {"created_utc": utc_now()})


def chosen(only: str | None, gpu: bool) -> list[Entry]:
    """The benchmarks that --only names, or all that make sense on this kind of machine."""
    possible = [entry for entry in ENTRIES if numbers(entry, gpu)]
    if only is None:
        return possible
    known = {str(number) for entry in possible for number in numbers(entry, gpu)}
    asked = only.split(",")
    if wrong := [word for word in asked if word not in known]:
        raise MeasurementError(
            f"--only {only}: there is no row {wrong[0]} {'with' if gpu else 'without'} --gpu; "
            f"take of {', '.join(sorted(known, key=int))}"
        )
    return [e for e in possible if any(str(number) in asked for number in numbers(e, gpu))]


def numbers(entry: Entry, gpu: bool) -> tuple[int, ...]:
    """The rows that a benchmark measures on this kind of machine."""
    return entry.gpu if gpu else entry.cpu


def measure_all(entries: Sequence[Entry], options: bench.Options, again: bool) -> list[bench.Row]:
    """Measure what has no record yet; a benchmark that fails does not keep the others from it."""
    rows: list[bench.Row] = []
    began = time.monotonic()
    for index, entry in enumerate(entries):
        told = " and ".join(str(number) for number in numbers(entry, options.gpu))
        kept = None if again else bench.read_rows(options.out, entry.name, options)
        if kept and any(row.value is not None for row in kept):  # else it needed something
            say(f"== row {told}, {entry.name}: has its record in {options.out}")
            rows += kept
            continue
        minutes = (time.monotonic() - began) / 60
        say(f"== row {told}, {entry.name}: {index + 1} of {len(entries)}, after {minutes:.0f} min")
        try:
            rows += bench.measure_and_keep(
                entry.name, importlib.import_module(f"benchmarks.{entry.name}").measure, options
            )
        except Exception as error:
            known = isinstance(error, MeasurementError)
            say(f"error: {error if known else bench.unexpected(error)}")
            rows += [failed(number, entry.name) for number in numbers(entry, options.gpu)]
    if not options.gpu and any(entry.name == "real_data" for entry in entries):
        rows.append(NEEDS_A_GPU)
    return rows


def failed(number: int, name: str) -> bench.Row:
    """The row of a benchmark that could not be measured, and has no record."""
    return bench.Row(number, f"{name}: failed, see above", None, needs=FAILED)


def rows_in(folder: Path) -> list[bench.Row]:
    """The rows of all records in a folder."""
    found = [bench.read_rows(folder, entry.name) for entry in ENTRIES]
    rows = [row for some in found if some for row in some]
    if not rows:
        raise MeasurementError(f"{folder}: holds no record of a benchmark")
    return rows if any(row.number == 12 for row in rows) else [*rows, NEEDS_A_GPU]


def write_table(path: Path, text: str) -> None:
    """Put the table between the marks of a Markdown file, in place of what is there."""
    old = path.read_text() if path.exists() else ""
    if old.count(BEGIN) != 1 or old.count(END) != 1:
        raise MeasurementError(f"--markdown {path}: needs one line {BEGIN} and one {END}")
    pattern = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.DOTALL)
    replace_file(path, pattern.sub(lambda _: f"{BEGIN}\n\n{text}\n\n{END}", old))


if __name__ == "__main__":
    sys.exit(main())
