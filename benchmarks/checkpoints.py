"""Row 7: what does a checkpoint every 100 steps cost?

    python benchmarks/checkpoints.py

The trainer with --checkpoint-steps 100 and without any checkpoint take turns of 100 steps, so that
each turn holds one whole checkpoint, in its middle: what is written beside the training counts,
too. The network is chosen so that 100 steps take some 15 s, no longer than ResNet-50's 100 steps of
256 images on a GPU of today; its checkpoint is 94 MB, to ResNet-50's 205. What one checkpoint costs
is also told in seconds, and what it would come to at ResNet-50's step.
"""

import sys

from benchmarks.harness import bench
from benchmarks.harness.blocks import run_blocks
from benchmarks.harness.sides import Workload, trainer_side
from benchmarks.harness.workloads import QUICK, gpu_workload
from compare.evidence.turns import Block, estimate_value

GOAL = 0.99
PERIOD = 100  # steps
PARAMETERS = {"resnet18": 11.69e6, "resnet50": 25.56e6, "shufflenet_v2_x0_5": 1.37e6}
# A rank's step of ResNet-50 at 224, batch 32, on one core (bf16, channels_last, 9.2 images/s) and
# batch 256 on a GPU at the goal of row 11: seconds.
STEPS_OF_RESNET50 = {"a CPU core, batch 32": 32 / 9.2, "an H100, batch 256": 256 / 3200}


def measure(options: bench.Options) -> bench.Measured:
    """Measure the row on DDP: rank 0 writes the same files under either engine."""
    workload, steps, warm_up = Workload("resnet18", 64, 12), PERIOD, PERIOD // 2
    if options.gpu:
        workload = gpu_workload()
    if options.quick:
        workload, steps, warm_up = QUICK, 10, 5
    kept = ("--checkpoint-steps", str(steps), "--keep-checkpoints", "2")
    sides = [
        trainer_side("with", "ddp", workload, steps, flags=kept, warm_up=warm_up),
        trainer_side("without", "ddp", workload, steps, warm_up=warm_up),
    ]
    # A turn is ten times as long as elsewhere, and fewer of them do.
    given = options.quick or options.turns_given
    rounds = options.turns if given else max(3, options.turns // 3)
    blocks = run_blocks(sides, options, "7", [("with", "without", GOAL)], rounds=rounds)
    row = bench.Row(7, "throughput with a checkpoint every 100 steps / without", GOAL)
    row = row.compared(blocks, "with", "without", confidence=options.confidence)
    row = bench.with_note(row, f"{workload}, 1 worker")
    row = bench.with_note(row, cost(blocks, row, workload))
    return bench.Measured([row], sides, {"7": blocks})


def cost(blocks: list[Block], row: bench.Row, workload: Workload) -> str:
    """What one checkpoint costs, in seconds, here and at ResNet-50's size and steps."""
    period = estimate_value(blocks, "without", lambda turn: turn.seconds).ratio
    seconds = period * (1 / (row.value or 1.0) - 1)
    larger = seconds * PARAMETERS["resnet50"] / PARAMETERS[workload.arch]
    parts = ", ".join(
        f"{1 / (1 + larger / (PERIOD * step)):.4f} on {where}"
        for where, step in STEPS_OF_RESNET50.items()
    )
    return (
        f"a period without takes {period:.1f} s, a checkpoint {1000 * seconds:+.0f} ms of it; in "
        f"proportion to the parameters, ResNet-50 at 224 would come to {parts}"
    )


if __name__ == "__main__":
    sys.exit(bench.main("checkpoints", __doc__, measure))
