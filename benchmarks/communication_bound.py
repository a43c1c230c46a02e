"""Row 5: what does a second worker cost where the exchange of gradients takes the time?

    python benchmarks/communication_bound.py

As row 4 with a seventh of the computation a gradient: ResNet-18 at 96 pixels, 8 images a worker.
DDP over each transport, Horovod over MPI, and each with the knobs of TUNED. Try others without
changing this file:

    BENCH_DDP="--bucket-cap-mb 50" BENCH_HOROVOD="HOROVOD_CYCLE_TIME=0.5" \\
        python benchmarks/communication_bound.py --blocks 2

Words NAME=VALUE are variables, the others flags of the trainer.
"""

import os
import sys

from benchmarks.harness import bench, scaling
from benchmarks.harness.sides import Workload
from benchmarks.harness.workloads import QUICK

GOALS = {"ddp": 0.88, "horovod": 0.75}
TUNED = {
    "ddp": "--bucket-cap-mb 100",
    # Open MPI's ring, on pieces that stay in the cache.
    "horovod": "OMPI_MCA_coll_tuned_use_dynamic_rules=1 OMPI_MCA_coll_tuned_allreduce_algorithm=4 "
    "HOROVOD_FUSION_THRESHOLD=4194304",
}


def tuning(words: str) -> scaling.Tuning:
    """Split words into variables and flags."""
    given = words.split()
    variables = [word for word in given if "=" in word and not word.startswith("-")]
    flags = tuple(word for word in given if word not in variables)
    return scaling.Tuning(flags, dict(word.split("=", 1) for word in variables))


def measure(options: bench.Options) -> bench.Measured:
    """Measure both engines with their defaults and tuned, DDP over MPI, too."""
    workload, steps = (QUICK, 2) if options.quick else (Workload("resnet18", 96, 8), 5)
    tuned = {
        engine: tuning(os.environ.get(f"BENCH_{engine.upper()}", TUNED[engine])) for engine in GOALS
    }
    tunings = {
        "ddp": {**scaling.TRANSPORTS_OF_DDP, "over Gloo, tuned": tuned["ddp"]},
        "horovod": {"over MPI": scaling.Tuning(), "over MPI, tuned": tuned["horovod"]},
    }
    return scaling.measure_scaling(
        options, 5, "communication-bound", workload, steps, GOALS, tunings
    )


if __name__ == "__main__":
    sys.exit(bench.main("communication_bound", __doc__, measure))
