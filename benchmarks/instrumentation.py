"""Row 6: what do all the instruments cost?

    python benchmarks/instrumentation.py

The trainer as it is (clocks, phases, metrics, energy, metrics.jsonl, TensorBoard, console) and the
same trainer whose Recorder and batch metrics were replaced by nothing take turns. What is measured
only when asked for (--ablation-steps, --tensor-steps, --profile-steps) is off on both sides.
"""

import sys
from dataclasses import replace

from benchmarks.harness import bench
from benchmarks.harness.blocks import run_blocks
from benchmarks.harness.sides import Workload, trainer_side
from benchmarks.harness.workloads import QUICK, gpu_workload
from compare.evidence.turns import estimate, estimate_value, work_per_cpu_second

GOAL = 0.995


def measure(options: bench.Options) -> bench.Measured:
    """Measure the row, on DDP: the instruments know no engine."""
    # As many as --log-interval: each turn holds one writing of the record.
    workload, steps = Workload("resnet18", 64, 16), 10
    if options.gpu:
        workload, steps = gpu_workload(), 30
    if options.quick:
        workload, steps = QUICK, 2
    off = trainer_side("off", "ddp", workload, steps, flags=("--log-interval", "1000000000"))
    off = replace(off, program=("benchmarks/harness/without_instruments.py", *off.program))
    sides = [trainer_side("on", "ddp", workload, steps), off]
    blocks = run_blocks(sides, options, "6", [("on", "off", GOAL)])
    row = bench.Row(6, "all instrumentation on / off", GOAL)
    row = row.compared(blocks, "on", "off", confidence=options.confidence)
    cpu = estimate(blocks, "on", "off", work_per_cpu_second)
    seconds = estimate_value(blocks, "off", lambda turn: turn.seconds / steps)
    row = bench.with_note(row, f"{workload}, 1 worker, a step of {1000 * seconds.ratio:.0f} ms")
    row = bench.with_note(row, f"images per CPU-second: {cpu.ratio:.3f}")
    return bench.Measured([row], sides, {"6": blocks})


if __name__ == "__main__":
    sys.exit(bench.main("instrumentation", __doc__, measure))
