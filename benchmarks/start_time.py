"""Row 13: how long is it from the command to the first optimizer step?

One worker of each engine with a tiny network, and `python -c "import torch, torchvision"`, which
no trainer can do without, are started one after the other in random order, after one start of each
that fills the page cache. A trainer's first step has ended when its line is in metrics.jsonl. The
ratio is of seconds of wall time.
"""

import time
from pathlib import Path

from benchmarks.by_turns import QUICK, Contender, make_side
from benchmarks.record import Measured, Options, Row
from compare.evidence.paired import estimate_ratio
from compare.plan.blocks import shuffled
from compare.running.launch import Launches, last_step, shown_tail
from compare.running.scheduler import say, start_side, wait_for_quiet
from compare.running.sides import MeasurementError, Side

GOAL = 2.0
FLAGS = "--log-interval 1 --max-steps 1"
CONTENDERS = {"DDP": Contender(flags=FLAGS), "Horovod": Contender("horovod-mpi", flags=FLAGS)}
IMPORT = Side("import", ("python",), ("-c", "import torch, torchvision"), 1, 1)
POLL_SECONDS = 0.005
LIMIT_SECONDS = 120.0
TIMES_PER_BLOCK = 2  # starts of each; a block's figure is the fastest: what nothing delayed


def measure(options: Options) -> Measured:
    """Measure both engines."""
    made = [make_side(name, c, QUICK, options) for name, c in CONTENDERS.items()]
    sides, folder = [IMPORT, *made], options.out / "blocks" / "start_time"
    for side in sides:
        seconds_to_first_step(side, folder / "warm-up" / side.name)
    seconds: dict[str, list[float]] = {side.name: [] for side in sides}
    for number in range(1, options.num_blocks() + 1):
        starts: dict[str, list[float]] = {side.name: [] for side in sides}
        for time_ in range(1 if options.quick else TIMES_PER_BLOCK):
            for side in shuffled(sides, number, time_):
                wait_for_quiet(options.patience)
                starts[side.name].append(
                    seconds_to_first_step(side, folder / str(number) / f"{side.name}-{time_}")
                )
        for name, values in starts.items():
            seconds[name].append(min(values))
        say(f"row 13: block {number}: seconds {starts}")
    note = f"{QUICK}, warm page cache; import {min(seconds['import']):.2f} s at best"
    rows = [
        Row(13, f"command to first step / import torch, {name}", GOAL, at_least=False).measured(
            estimate_ratio(seconds[name], seconds["import"]), note
        )
        for name in CONTENDERS
    ]
    return Measured(rows, sides, details={"seconds": seconds})


def seconds_to_first_step(side: Side, folder: Path) -> float:
    """Seconds from the start of a command to its first step, or to its end if it makes none."""
    metrics, launches, began = folder / "run" / "metrics.jsonl", Launches(), time.monotonic()
    try:
        process = start_side(side, side.command(folder.resolve()), folder, launches)
        while not (process.poll() == 0 if side is IMPORT else last_step(metrics)):
            seconds = time.monotonic() - began
            if process.poll() is not None or seconds > LIMIT_SECONDS:
                raise MeasurementError(
                    f"{side.name}: no step in {seconds:.0f} s:\n{shown_tail(folder)}"
                )
            time.sleep(POLL_SECONDS)
        seconds = time.monotonic() - began
        launches.wait(20)  # of one step: it ends in order
    finally:
        launches.end()
    return seconds
