"""Energy of the training by the counters of GPU and processors; without them, not measured.

A figure that no counter gives is NaN here and null in the summary: nothing is estimated. The
counters are those of whole GPUs and whole hosts, so they hold what others ran there meanwhile.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from recipe.record.schema import Energy

# No processor package draws more: what a counter's range is divided by for the time in which it
# cannot wrap twice without being seen.
MOST_PACKAGE_WATTS = 1000


@dataclass(frozen=True)
class EnergyUse:
    """What a rank used; NaN where it was not measured."""

    gpu_joules: float
    gpu_utilization_percent: float  # mean
    cpu_joules: float  # 0 on the ranks that leave them to their host's first
    seconds: float  # of all this


@dataclass
class EnergyCounter:
    """A counter of joules that somebody else keeps; its `read` gives NaN where it cannot be read.

    One that wraps starts at 0 again after `range_joules`; it must be read before it can do so
    twice. For one that never wraps, this is NaN.
    """

    read: Callable[[], float]
    range_joules: float = math.nan
    joules: float = 0.0  # counted so far; NaN for good after one reading that failed
    last: float = 0.0
    last_seconds: float = 0.0

    def start(self, seconds: float) -> None:
        """Count from now on; `seconds` is the clock's time."""
        self.last, self.last_seconds = self.read(), seconds

    def advance(self, seconds: float) -> None:
        """Add what came since the last reading."""
        now = self.read()
        if seconds - self.last_seconds > self.range_joules / MOST_PACKAGE_WATTS:
            self.joules = math.nan
        self.joules += now - self.last + (self.range_joules if now < self.last else 0)
        self.last, self.last_seconds = now, seconds


class EnergyMeter:
    """What this rank's GPU and, on one rank of each host, its processors use between `start` and
    `stop`.

    May be started and stopped again and again, to leave evaluations out; to start twice, or to stop
    twice, does no more than once. Call it when the GPU has done its work (after a synchronisation).
    """

    def __init__(
        self,
        gpu: EnergyCounter,
        gpu_utilization_percent: Callable[[], float],
        packages: list[EnergyCounter],
    ) -> None:
        self.gpu, self.packages = gpu, packages
        self.gpu_utilization_percent = gpu_utilization_percent
        self.utilizations: list[float] = []
        self.seconds = 0.0
        self.last_seconds: float | None = None  # None while stopped

    def start(self) -> None:
        """Count from now on."""
        if self.last_seconds is None:
            self.last_seconds = time.monotonic()
            for counter in (self.gpu, *self.packages):
                counter.start(self.last_seconds)

    def sample(self) -> None:
        """Take a reading, at least every minute: RAPL's counters wrap, and utilisation is only
        known for the last second."""
        if self.last_seconds is None:
            return
        now = time.monotonic()
        for counter in (self.gpu, *self.packages):
            counter.advance(now)
        self.utilizations.append(self.gpu_utilization_percent())
        self.seconds += now - self.last_seconds
        self.last_seconds = now

    def stop(self) -> None:
        """Take a last reading, and count no more until the next start."""
        self.sample()
        self.last_seconds = None

    def use(self) -> EnergyUse:
        """What was used so far."""
        samples = self.utilizations
        utilization = sum(samples) / len(samples) if samples else math.nan
        processors = sum(counter.joules for counter in self.packages)
        return EnergyUse(self.gpu.joules, utilization, processors, self.seconds)


def energy_summary(uses: Sequence[EnergyUse], images: int) -> Energy:
    """The summary's "energy" from every rank's use, and the `images` that all ranks trained on
    meanwhile; None where a rank could not measure.

    Joules are those of all ranks together; watts and utilisation are the mean of the GPUs.
    """
    gpu_joules = sum(use.gpu_joules for use in uses)

    def ratio(value: float, count: float) -> float | None:
        return value / count if count and math.isfinite(value) else None

    return Energy(
        gpu_joules_per_image=ratio(gpu_joules, images),
        gpu_watts=ratio(gpu_joules, sum(use.seconds for use in uses)),
        gpu_utilization_percent=ratio(sum(use.gpu_utilization_percent for use in uses), len(uses)),
        cpu_joules_per_image=ratio(sum(use.cpu_joules for use in uses), images),
    )


def open_energy_meter(
    device: torch.device, local_rank: int, powercap: Path = Path("/sys/class/powercap")
) -> EnergyMeter:
    """A meter of `device`, if it is a GPU, and on `local_rank` 0 of this host's processors."""
    gpu, utilization = _gpu(device) if device.type == "cuda" else (_not_measured, _not_measured)
    packages = _packages(powercap) if local_rank == 0 else []
    return EnergyMeter(EnergyCounter(gpu), utilization, packages)


def _not_measured() -> float:
    return math.nan


def _gpu(device: torch.device) -> tuple[Callable[[], float], Callable[[], float]]:
    """What reads the GPU's joules since its driver was loaded, and its utilisation in percent
    during the last second or less.

    NVML counts every GPU of the host, torch only those that CUDA_VISIBLE_DEVICES leaves, in another
    order: the UUID tells which is meant.
    """
    try:
        import pynvml as nvml
    except ImportError:
        return _not_measured, _not_measured
    try:
        nvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    except nvml.NVMLError:
        return _not_measured, _not_measured

    def joules() -> float:
        try:
            return nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000  # since Volta, in mJ
        except nvml.NVMLError:
            return math.nan

    def utilization_percent() -> float:
        try:
            return float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        except nvml.NVMLError:
            return math.nan

    return joules, utilization_percent


def _packages(powercap: Path) -> list[EnergyCounter]:
    """The counters of this host's processor packages, DRAM not included; where there are none, one
    that cannot be read.

    Cores and caches are domains inside a package's, and psys is around all of them: only packages
    add up. (https://docs.kernel.org/power/powercap/powercap.html)
    """
    packages = []
    for domain in sorted(powercap.glob("intel-rapl:*")):
        try:
            if not (domain / "name").read_text().startswith("package-"):
                continue
            range_joules = int((domain / "max_energy_range_uj").read_text()) / 1e6
        except (OSError, ValueError):
            return [EnergyCounter(_not_measured)]
        packages.append(EnergyCounter(_rapl_reader(domain / "energy_uj"), range_joules))
    return packages or [EnergyCounter(_not_measured)]


def _rapl_reader(energy_uj: Path) -> Callable[[], float]:
    def joules() -> float:
        try:
            return int(energy_uj.read_text()) / 1e6
        except (OSError, ValueError):  # for root only, on most hosts
            return math.nan

    return joules
