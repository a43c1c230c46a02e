"""Row 11: how fast is ResNet-50 on this GPU?

    python benchmarks/images_per_second.py --gpu

One worker of DDP, synthetic images at 224 pixels, bench.BEST_FLAGS, batch 256: images per second,
not a ratio, so that the machine's own speed is in it. Each block is a launch of its own.
"""

import sys
from dataclasses import replace

from benchmarks.harness import bench
from benchmarks.harness.blocks import run_blocks
from benchmarks.harness.sides import trainer_side
from benchmarks.harness.workloads import gpu_workload
from compare.evidence.turns import estimate_value, throughput

GOALS = {"H200": 3500.0, "H100": 3200.0}
NAME = "ResNet-50, synthetic, one GPU"


def goal_for(gpu: str | None) -> float:
    """The goal on a GPU of this name; the H100's for any other."""
    return next((goal for name, goal in GOALS.items() if name in (gpu or "")), GOALS["H100"])


def measure(options: bench.Options) -> bench.Measured:
    """Measure the row where there is a GPU."""
    gpu = bench.gpu_name()
    row = bench.Row(11, NAME, goal_for(gpu), unit="images/s")
    if not options.gpu:
        return bench.Measured([replace(row, needs="a GPU")])
    workload = gpu_workload()
    sides = [trainer_side("ddp", "ddp", workload, 40, warm_up=20)]
    blocks = run_blocks(sides, options, "11")
    row = row.measured(estimate_value(blocks, "ddp", throughput), f"{workload}, on one {gpu}")
    return bench.Measured([row], sides, {"11": blocks})


if __name__ == "__main__":
    sys.exit(bench.main("images_per_second", __doc__, measure))
