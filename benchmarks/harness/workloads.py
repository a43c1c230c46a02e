"""The trainings that benchmarks measure, by machine."""

from benchmarks.harness.bench import BEST_FLAGS
from benchmarks.harness.sides import Workload

QUICK = Workload("shufflenet_v2_x0_5", 32, 4)  # a step takes hundredths of a second


def gpu_workload(batch_size: int = 256) -> Workload:
    """ResNet-50 as it is trained on a GPU of today."""
    return Workload("resnet50", 224, batch_size, BEST_FLAGS, threads=None)
