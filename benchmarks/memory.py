"""Row 14: does memory grow with the steps?

One worker of each engine, and one that reads JPEG files with a loader process, train a tiny network
for 10,000 steps, all at once: how much memory a process holds does not depend on how fast it goes.
The ratio is of resident memory, added up over the tree of processes, after 10,000 and after 1,000
steps, each a median of several readings. A block is a launch.
"""

import contextlib
import statistics
import time
from pathlib import Path

import psutil

from benchmarks.by_turns import Benchmark, Contender, Work, make_side
from benchmarks.record import Measured, Options, Row
from compare.evidence.paired import estimate_ratio
from compare.running.launch import end_processes, last_step, new_mark, shown_tail
from compare.running.scheduler import say, start_side
from compare.running.sides import MeasurementError

GOAL = 1.01
TINY = Work("squeezenet1_1", 32, 1)
# More steps than are watched: no run is to end, evaluate and write while it is read.
FLAGS = "--log-interval 10"
CONTENDERS = {
    "DDP": Contender(flags=FLAGS),
    "Horovod": Contender("horovod-mpi", flags=FLAGS),
    "DDP, JPEG files with a loader": Contender(flags=f"{FLAGS} --workers 1", jpegs=640),
}
BENCHMARK = Benchmark(name="memory", row=14, side={}, pair={})
POLL_SECONDS = 0.2
READINGS = 15  # around each of the two steps
LIMIT_SECONDS = 200.0  # a run, of those that go on at once


def measure(options: Options) -> Measured:
    """Measure all three."""
    first, last = (20, 100) if options.quick else (1_000, 10_000)
    sides = {name: make_side(name, c, BENCHMARK, TINY, options) for name, c in CONTENDERS.items()}
    # The readings of one launch agree to a part in thousands; three launches tell more than one.
    started, names = [], []
    try:
        for number in range(1, options.num_blocks(3) + 1):
            for name, side in sides.items():
                word = name.replace(",", "").replace(" ", "-")
                folder = options.out / "blocks" / "memory" / str(number) / word
                command, mark = side.command(folder.resolve(), 0), new_mark()
                started.append((start_side(side, command, folder, mark), mark, folder))
                names.append(name)
        readings = watch([(process.pid, folder) for process, _, folder in started], first, last)
    finally:
        for process, mark, _ in started:
            end_processes(process, mark)
    rows = []
    for name in sides:
        found = [pair for owner, pair in zip(names, readings, strict=True) if owner == name]
        before, after = zip(*found, strict=True)
        row = Row(14, f"memory after 10,000 / 1,000 steps, {name}", GOAL, at_least=False)
        note = f"{TINY}; {statistics.mean(before + after) / 2**20:,.0f} MiB on average"
        if options.quick:
            note += f"; after {last} and {first} steps"
        rows.append(row.measured(estimate_ratio(after, before), note))
    return Measured(rows, [*sides.values()], details={"bytes": [names, readings]})


def watch(runs: list[tuple[int, Path]], first: int, last: int) -> list[tuple[float, float]]:
    """Read the memory of all runs, each a process and its folder, until each has its readings after
    step `last`. The medians after `first` and after `last`, bytes."""
    began, told, limit = time.monotonic(), 0.0, LIMIT_SECONDS * len(runs)
    readings: list[list[tuple[int, int]]] = [[] for _ in runs]  # step, bytes
    while not all(sum(at >= last for at, _ in one) >= READINGS for one in readings):
        for (pid, folder), kept in zip(runs, readings, strict=True):
            if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                raise MeasurementError(f"{folder.name} ended:\n{shown_tail(folder)}")
            line = last_step(folder / "run" / "metrics.jsonl")
            kept.append((int(line["step"]) if line else 0, resident_bytes(pid)))
        slowest, seconds = min(one[-1][0] for one in readings), time.monotonic() - began
        if seconds > limit:
            raise MeasurementError(f"only {slowest} steps within {limit:.0f} s")
        if seconds - told > 20:
            told = seconds
            say(f"row 14: the slowest of {len(runs)} at step {slowest:,}")
        time.sleep(POLL_SECONDS)

    def after(kept: list[tuple[int, int]], step: int) -> float:
        return statistics.median([size for at, size in kept if at >= step][:READINGS])

    return [(after(kept, first), after(kept, last)) for kept in readings]


def resident_bytes(pid: int) -> int:
    """Resident memory of a process and its descendants, added up."""
    total, process = 0, psutil.Process(pid)
    for one in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            total += one.memory_info().rss
    return total
