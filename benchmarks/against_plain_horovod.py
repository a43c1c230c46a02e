"""Row 9: is our Horovod path faster than a plain script by Horovod's own benchmark's method?

    python benchmarks/against_plain_horovod.py

ResNet-50 at 224 pixels on two workers (on one GPU: one). Three sides take turns:
harness/plain_horovod.py, our trainer in the same precision (fp32) with --channels-last, and our
trainer with bench.BEST_FLAGS.
"""

import sys
from dataclasses import replace

from benchmarks.harness import bench
from benchmarks.harness.blocks import run_blocks
from benchmarks.harness.sides import Workload, trainer_side
from benchmarks.harness.workloads import QUICK
from compare.running.sides import Side

GOAL = 1.25
SIDES = {"fp32": "same precision (fp32, channels_last)", "best": "best precision (bf16)"}


def measure(options: bench.Options) -> bench.Measured:
    """Measure both rows."""
    workload, workers, steps = Workload("resnet50", 224, 8), 2, {"plain": 1, "fp32": 1, "best": 2}
    if options.gpu:
        workload, workers = Workload("resnet50", 224, 128, threads=None), 1
        steps = {"plain": 10, "fp32": 10, "best": 40}
    if options.quick:
        workload, steps = QUICK, dict.fromkeys(steps, 2)
    flags = {"fp32": ("--channels-last",), "best": bench.BEST_FLAGS}
    ours = [
        trainer_side(name, "horovod", workload, steps[name], workers=workers, flags=flags[name])
        for name in SIDES
    ]
    program = ("benchmarks/harness/plain_horovod.py", *workload.words())
    plain: Side = replace(ours[0], name="plain", program=program, steps=steps["plain"])
    sides = [plain, *ours]
    blocks = run_blocks(sides, options, "9", [(name, "plain", GOAL) for name in SIDES])
    rows = []
    for name, told in SIDES.items():
        row = bench.Row(9, f"our Horovod path / plain script, {told}", GOAL)
        row = row.compared(blocks, name, "plain", confidence=options.confidence)
        rows.append(bench.with_note(row, f"{workload}, {workers} worker(s); {told}"))
    return bench.Measured(rows, sides, {"9": blocks})


if __name__ == "__main__":
    sys.exit(bench.main("against_plain_horovod", __doc__, measure))
