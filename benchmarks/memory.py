"""Row 14: does memory grow with the steps?

One worker of each engine, and one that reads JPEG files with a loader process, train a tiny network
for 10,000 steps, all at once: how much memory a process holds does not depend on how fast it goes.
The ratio is of resident memory, added up over the tree of processes, after 10,000 and after 1,000
steps, each a median of several readings. A block is a launch.
"""

import contextlib
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from benchmarks.by_turns import Contender, make_side
from benchmarks.record import Measured, Options, Row
from compare.evidence.paired import estimate_ratio
from compare.running.launch import Launches, last_step, shown_tail
from compare.running.scheduler import start_side
from compare.running.sides import MeasurementError

GOAL = 1.01
TINY = "--arch squeezenet1_1 --train-crop-size 32 --batch-size 1 --threads 1"
# More steps than are watched: no run is to end, evaluate and write while it is read.
FLAGS = "--log-interval 10"
CONTENDERS = {
    "DDP": Contender(flags=FLAGS),
    "Horovod": Contender("horovod-mpi", flags=FLAGS),
    "DDP, JPEG files with a loader": Contender(flags=f"{FLAGS} --workers 1", jpegs=640),
}
POLL_SECONDS = 0.2
READINGS = 15  # around each of the two steps
LIMIT_SECONDS = 200.0  # a run, of those that go on at once


def measure(options: Options) -> Measured:
    """Measure all three."""
    first, last = (20, 100) if options.quick else (1_000, 10_000)
    sides = {name: make_side(name, c, TINY, options) for name, c in CONTENDERS.items()}
    # The readings of one launch agree to a part in thousands; three launches tell more than one.
    count, runs = options.num_blocks(3), list[tuple[int, Path]]()
    with Launches() as launches:
        for number in range(count * len(sides)):
            side = [*sides.values()][number // count]
            folder = (options.out / "blocks" / "memory" / str(number)).resolve()
            process = start_side(side, side.command(folder), folder, launches)
            runs.append((process.pid, folder))
        readings = watch(runs, first, last)
    rows = []
    for number, name in enumerate(sides):
        before, after = zip(*readings[number * count : (number + 1) * count], strict=True)
        row = Row(14, f"memory after 10,000 / 1,000 steps, {name}", GOAL, at_least=False)
        mean = statistics.mean(before + after) / 2**20
        note = f"{TINY}; {mean:,.0f} MiB on average, after {last:,} and {first:,} steps"
        rows.append(row.measured(estimate_ratio(after, before), note))
    return Measured(rows, [*sides.values()], details={"bytes": [[*sides], readings]})


def watch(runs: Sequence[tuple[int, Path]], first: int, last: int) -> list[tuple[float, float]]:
    """Read the memory of all runs, each a process and its folder, until each has its readings after
    step `last`. The medians after `first` and after `last`, bytes."""
    deadline = time.monotonic() + LIMIT_SECONDS * len(runs)
    readings: list[list[tuple[int, int]]] = [[] for _ in runs]  # step, bytes
    while not all(sum(at >= last for at, _ in one) >= READINGS for one in readings):
        for (pid, folder), kept in zip(runs, readings, strict=True):
            line = last_step(folder / "run" / "metrics.jsonl") or {"step": 0}
            kept.append((line["step"], resident_bytes(pid)))
            if kept[-1][1] == 0 or time.monotonic() > deadline:
                raise MeasurementError(
                    f"{folder}: ended, or late, at step {line['step']}:\n{shown_tail(folder)}"
                )
        time.sleep(POLL_SECONDS)

    def after(kept: list[tuple[int, int]], step: int) -> float:
        return statistics.median([size for at, size in kept if at >= step][:READINGS])

    return [(after(kept, first), after(kept, last)) for kept in readings]


def resident_bytes(pid: int) -> int:
    """Resident memory of a process and its descendants, added up; 0 if it has ended."""
    total, process = 0, psutil.Process(pid)
    for one in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            total += one.memory_info().rss
    return total
