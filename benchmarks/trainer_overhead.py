"""Row 1: what do the trainers cost beside the training itself?

    python benchmarks/trainer_overhead.py

One worker of each engine, as a user starts it, and harness/bare_loop.py take turns at the same
network, batch and threads. Whatever the recipe and the engine add to each step (batches, metrics,
clocks, the optimizer's wrapper) is in the ratio of their throughputs. What comes every tenth step,
the record's lines, is in row 6.

The bare loop is there twice: as torch comes, and with the trainers' fused optimizer and their way
with freed memory (recipe/device.py). The second ratio is what the trainers cost; the first, what a
user has who changes from such a loop to them.
"""

import itertools
import sys

from benchmarks.harness import bench, phases
from benchmarks.harness.blocks import REACHED, run_blocks
from benchmarks.harness.sides import Workload, trainer_side
from benchmarks.harness.workloads import QUICK, gpu_workload
from compare.evidence.records import ENGINES
from compare.evidence.turns import estimate, work_per_cpu_second
from compare.running.sides import Side

GOAL = 0.985
LOOPS = {"bare": "bare loop", "bare-as-trainers": "bare loop with the trainers' settings"}


def measure(options: bench.Options) -> bench.Measured:
    """Measure both engines and the bare loop."""
    workload, steps = Workload("resnet18", 224, 8), 1
    if options.gpu:
        workload, steps = gpu_workload(), 30
    if options.quick:
        workload, steps = QUICK, 2
    program = ("benchmarks/harness/bare_loop.py", *workload.words())
    if not options.gpu:
        program = (*program, "--phases", "{folder}/phases.jsonl")
    programs = {"bare": program, "bare-as-trainers": (*program, "--as-trainers")}
    sides = [
        *(Side(name, ("python",), programs[name], workload.batch_size, steps) for name in LOOPS),
        *(trainer_side(engine, engine, workload, steps) for engine in ENGINES),
    ]
    judged = [(engine, loop, GOAL) for engine in ENGINES for loop in LOOPS]
    blocks = run_blocks(sides, options, "1", judged)
    rows = []
    for (engine, name), (loop, told) in itertools.product(ENGINES.items(), LOOPS.items()):
        row = bench.Row(1, f"trainer / {told}, {name}", GOAL, notes=(f"{workload}, 1 worker",))
        cpu = estimate(blocks, engine, loop, work_per_cpu_second)
        row = row.compared(blocks, engine, loop, confidence=options.confidence)
        row = bench.with_note(row, f"images per CPU-second: {cpu.ratio:.3f}")
        if not options.gpu and (options.profile or row.verdict != REACHED):
            folder = options.out / "blocks" / "1"
            found = phases.difference(folder, engine, loop, sides[0].warm_up)
            row = bench.with_note(row, f"binds: {found}")
        rows.append(row)
    return bench.Measured(rows, sides, {"1": blocks})


if __name__ == "__main__":
    sys.exit(bench.main("trainer_overhead", __doc__, measure))
