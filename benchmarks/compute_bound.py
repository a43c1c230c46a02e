"""Row 4: what does a second worker cost where computing takes the time?

    python benchmarks/compute_bound.py

Two workers of each engine, started by its launcher, take turns with two independent single workers
that run at once: ResNet-18 at 224 pixels, 16 images a worker. The ratio is of images per second.
See benchmarks/harness/scaling.py for why it is against two at once.
"""

import sys

from benchmarks.harness import bench, scaling
from benchmarks.harness.sides import Workload
from benchmarks.harness.workloads import QUICK

GOALS = {"ddp": 0.98, "horovod": 0.97}


def measure(options: bench.Options) -> bench.Measured:
    """Measure DDP over each transport, and Horovod with its defaults."""
    workload = QUICK if options.quick else Workload("resnet18", 224, 16)
    tunings = {"ddp": scaling.TRANSPORTS_OF_DDP, "horovod": {"over MPI": scaling.Tuning()}}
    return scaling.measure_scaling(options, 4, "compute-bound", workload, 1, GOALS, tunings)


if __name__ == "__main__":
    sys.exit(bench.main("compute_bound", __doc__, measure))
