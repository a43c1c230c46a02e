"""Row 14: does memory grow with the steps?

    python benchmarks/memory.py

One worker of each engine, and one that reads JPEG files with a loader process, train a tiny network
for 10,000 steps, all at once: how much memory a process holds does not depend on how fast it goes.
The ratio is of resident memory, added up over the tree of processes, after 10,000 and after 1,000
steps, each a median of several readings. A block is a launch.
"""

import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.harness import bench
from benchmarks.harness.sides import Workload, trainer_side
from benchmarks.real_data import make_jpegs
from compare.evidence.paired import estimate_ratio
from compare.evidence.records import ENGINES
from compare.running.launch import end_processes
from compare.running.sides import MeasurementError, Side
from compare.running.stage import start_process, tail
from compare.running.turns import say

GOAL = 1.01
TINY = Workload("squeezenet1_1", 32, 1)
NAMES = {**ENGINES, "files": "DDP, JPEG files with a loader"}
POLL_SECONDS = 0.2
READINGS = 15  # around each of the two steps
LIMIT_SECONDS = 200.0  # a run, of those that go on at once


@dataclass
class Watched:
    """A run whose memory is read as its steps go by."""

    side: Side
    folder: Path
    process: subprocess.Popen[bytes]
    mark: str
    readings: list[tuple[int, int]] = field(default_factory=list)  # step, bytes

    def read(self) -> int:
        """Read the memory, and return the last step that was written."""
        step = last_step(self.folder / "run" / "metrics.jsonl")
        self.readings.append((step, resident_bytes(self.process.pid)))
        return step

    def after(self, step: int) -> float:
        """The median of the readings right after `step`, bytes."""
        return statistics.median([bytes_ for at, bytes_ in self.readings if at >= step][:READINGS])


def measure(options: bench.Options) -> bench.Measured:
    """Measure all three."""
    first, last = (20, 100) if options.quick else (1_000, 10_000)
    jpegs = make_jpegs(Path("runs") / "bench-jpegs", 40 if options.quick else 640)
    # More steps than are watched: no run is to end, evaluate and write while it is read.
    flags = ("--log-interval", "10")
    sides = [trainer_side(engine, engine, TINY, 1, flags=flags) for engine in ("ddp", "horovod")]
    reading = (*flags, "--workers", "1")
    sides.append(trainer_side("files", "ddp", TINY, 1, flags=reading, data=str(jpegs)))
    ratios: dict[str, list[float]] = {side.name: [] for side in sides}
    details: dict[str, list[float]] = {side.name: [] for side in sides}
    # The readings of one launch agree to a part in thousands; three launches tell more than one.
    num_blocks = options.blocks if options.blocks_given or options.quick else 3
    runs: list[Watched] = []
    try:
        for number in range(1, num_blocks + 1):
            for side in sides:
                folder = options.out / "blocks" / "14" / f"block-{number}" / side.name
                process, mark = start_process(side, side.command(folder.resolve(), 0), folder)
                runs.append(Watched(side, folder, process, mark))
        watch(runs, first, last)
    finally:
        for run in runs:
            end_processes(run.process, run.mark)
    for run in runs:
        ratios[run.side.name].append(run.after(last) / run.after(first))
        details[run.side.name] += [run.after(first), run.after(last)]
    rows = []
    for name, told in NAMES.items():
        row = bench.Row(14, f"memory after 10,000 / 1,000 steps, {told}", GOAL, at_least=False)
        note = f"{TINY}; {statistics.mean(details[name]) / 2**20:,.0f} MiB on average"
        if options.quick:
            note += f"; after {last} and {first} steps"
        row = row.measured(estimate_ratio(ratios[name], [1.0] * len(ratios[name])), note)
        rows.append(row)
    return bench.Measured(rows, sides, details={"bytes": details})


def watch(runs: list[Watched], first: int, last: int) -> None:
    """Read the memory of all runs until each has its readings after step `last`."""
    began, told, limit = time.monotonic(), 0.0, LIMIT_SECONDS * len(runs)
    while True:
        steps = [run.read() for run in runs]
        for run in runs:
            if run.process.poll() is not None:
                raise MeasurementError(f"{run.side.name} ended:\n{tail(run.folder)}")
        if all(sum(at >= last for at, _ in run.readings) >= READINGS for run in runs):
            return
        seconds = time.monotonic() - began
        if seconds > limit:
            raise MeasurementError(f"only {min(steps)} steps within {limit:.0f} s")
        if seconds - told > 20 and min(steps):
            told = seconds
            left = f", about {seconds * (last / min(steps) - 1) / 60:.1f} min left"
            say(f"row 14: the slowest of {len(runs)} at step {min(steps):,}{left}")
        time.sleep(POLL_SECONDS)


def last_step(metrics: Path) -> int:
    """The step of the last line that a run has written; 0 before the first."""
    from compare.running.launch import last_step as last_line

    line = last_line(metrics)
    return int(line["step"]) if line else 0


def resident_bytes(pid: int) -> int:
    """Resident memory of a process and its descendants, added up."""
    total = 0
    try:
        process = psutil.Process(pid)
        for one in [process, *process.children(recursive=True)]:
            try:
                total += one.memory_info().rss
            except psutil.NoSuchProcess:
                pass
    except psutil.NoSuchProcess:
        pass
    return total


if __name__ == "__main__":
    sys.exit(bench.main("memory", __doc__, measure))
