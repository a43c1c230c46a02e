"""Row 2: what do the best settings gain over fp32 as torch comes?

    python benchmarks/best_configuration.py

ResNet-50 at 224 pixels on one thread: the trainer with bench.BEST_FLAGS and the trainer with its
defaults (fp32, NCHW, eager) take turns. The ratio is of images per CPU-second, which other
processes on the machine move less than images per second; on a GPU of images per second.
"""

import sys

from benchmarks.harness import bench
from benchmarks.harness.blocks import run_blocks
from benchmarks.harness.sides import Workload, trainer_side
from benchmarks.harness.workloads import QUICK
from compare.evidence.turns import estimate, estimate_value, throughput, work_per_cpu_second

GOAL = 2.7


def measure(options: bench.Options) -> bench.Measured:
    """Measure the row; DDP with one worker stands for both engines, which add the same."""
    workload, fast, slow = Workload("resnet50", 224, 16), 1, 1
    if options.gpu:
        workload, fast, slow = Workload("resnet50", 224, 128, threads=None), 40, 10
    if options.quick:
        workload, fast, slow = QUICK, 2, 2
    sides = [
        trainer_side("best", "ddp", workload, fast, flags=bench.BEST_FLAGS),
        trainer_side("fp32", "ddp", workload, slow),
    ]
    value = throughput if options.gpu else work_per_cpu_second
    blocks = run_blocks(sides, options, "2", [("best", "fp32", GOAL)], value)
    flags = " ".join(bench.BEST_FLAGS)
    row = bench.Row(2, "best configuration / fp32 NCHW eager, ResNet-50", GOAL)
    row = row.compared(blocks, "best", "fp32", value, options.confidence)
    row = bench.with_note(row, f"{workload}, 1 worker of DDP; best: {flags}")
    other = estimate(blocks, "best", "fp32", throughput)
    row = bench.with_note(row, f"images per second: {other.ratio:.3f}")
    for side in sides:
        speeds = estimate_value(blocks, side.name, value)
        per = "second" if options.gpu else "CPU-second"
        row = bench.with_note(row, f"{side.name}: {speeds.ratio:.2f} images per {per}")
    return bench.Measured([row], sides, {"2": blocks})


if __name__ == "__main__":
    sys.exit(bench.main("best_configuration", __doc__, measure))
