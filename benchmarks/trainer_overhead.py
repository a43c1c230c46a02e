"""Row 1: what do the trainers cost beside the training itself?

    python benchmarks/trainer_overhead.py

One worker of each engine, as a user starts it, and benchmarks/bare_loop.py take turns at the same
network, batch and threads. Whatever the recipe and the engine add to a step (batches, metrics,
clocks, records, the optimizer's wrapper) is in the ratio of their throughputs.
"""

import sys

from benchmarks import bench
from benchmarks.blocks import Side, Workload, run_blocks, trainer_side, work_per_cpu_second
from benchmarks.workloads import QUICK, gpu_workload

GOAL = 0.985
NAMES = {"ddp": "trainer / bare loop, DDP", "horovod": "trainer / bare loop, Horovod"}


def measure(options: bench.Options) -> bench.Measured:
    """Measure both engines and the bare loop."""
    workload, steps = Workload("resnet18", 224, 8), 1
    if options.gpu:
        workload, steps = gpu_workload(), 30
    if options.quick:
        workload, steps = QUICK, 2
    program = ("benchmarks/bare_loop.py", *workload.words())
    sides = [
        Side("bare", ("python",), program, workload.batch_size, steps),
        *(trainer_side(engine, engine, workload, steps) for engine in NAMES),
    ]
    blocks = run_blocks(
        sides, options.blocks, options.turns, options.out / "1", options.seed, "row 1"
    )
    rows = []
    for engine, name in NAMES.items():
        row = bench.Row(1, name, GOAL, notes=(f"{workload}, 1 worker",))
        cpu = bench.estimate(blocks, engine, "bare", work_per_cpu_second)
        row = row.compared(blocks, engine, "bare")
        rows.append(bench.with_note(row, f"images per CPU-second: {cpu.ratio:.3f}"))
    return bench.Measured(rows, sides, {"1": blocks})


if __name__ == "__main__":
    sys.exit(bench.main("trainer_overhead", __doc__, measure))
