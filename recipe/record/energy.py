"""Energy of the training, from the counters of GPUs and processors; these cover whole GPUs and
whole hosts. A missing counter gives NaN here and null in the summary: nothing is estimated."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recipe.record.schema import Energy

POWERCAP = Path("/sys/class/powercap")
# No processor package draws more. After a longer time than a counter's range lasts at this power,
# the counter may have wrapped unnoticed.
MOST_PACKAGE_WATTS = 1000
NVML_CLOCK_SM = 1  # value from nvml.h


@dataclass(frozen=True)
class EnergyUse:
    """What a rank used; NaN where it was not measured."""

    gpu_joules: float
    gpu_utilization_percent: float  # mean
    cpu_joules: float  # of the whole host on its first rank, 0 on its other ranks
    seconds: float  # over which all of this was measured


class EnergyMeter:
    """Measures what this rank's GPUs and, on one rank of each host, its processors use between
    `start` and `stop`. Call `stop` after a synchronisation, and `sample` at least every minute,
    since RAPL's counters wrap. `devices`: GPUs that no other rank uses; without any, the energy of
    GPUs is not measured."""

    def __init__(self, devices: Sequence[torch.device], local_rank: int) -> None:
        self.gpus: list[Any] = [
            _nvml_of(device) if device.type == "cuda" else None for device in devices
        ] or [None]
        # Cores, caches and memory have domains of their own inside a package, and psys contains
        # everything: so only packages may be added up.
        domains = sorted(POWERCAP.glob("intel-rapl:*"))
        packages = [file for file in domains if "package-" in (file / "name").read_text()]
        packages = (packages or [POWERCAP / "none"]) if local_rank == 0 else []
        self.files = [package / "energy_uj" for package in packages]
        ranges = [_joules_in(package / "max_energy_range_uj") for package in packages]
        self.ranges = np.array([math.inf, *ranges])  # where counters wrap to 0
        self.joules = self.last = np.zeros(len(self.ranges))  # of the GPUs, then of each package
        self.utilizations: list[float] = []
        self.seconds, self.since = 0.0, math.nan  # NaN while stopped

    def start(self) -> None:
        """Count from now on."""
        if math.isnan(self.since):
            self.since, self.last = time.monotonic(), self._read()

    def sample(self) -> None:
        """Add what was used since the last reading."""
        if not math.isnan(self.since):
            seconds, readings = time.monotonic() - self.since, self._read()
            passed = (readings - self.last) % self.ranges
            passed[seconds > self.ranges / MOST_PACKAGE_WATTS] = math.nan
            self.joules, self.last = self.joules + passed, readings
            percent = _or_nan(lambda: sum(ask("UtilizationRates").gpu for ask in self.gpus))
            self.utilizations.append(percent / len(self.gpus))
            self.seconds, self.since = self.seconds + seconds, self.since + seconds

    def stop(self) -> None:
        """Take a last reading, and stop counting until the next start."""
        self.sample()
        self.since = math.nan

    def use(self) -> EnergyUse:
        """Return what was used so far."""
        utilization = sum(self.utilizations) / (len(self.utilizations) or math.nan)
        gpu, *packages = self.joules.tolist()
        return EnergyUse(gpu, utilization, sum(packages), self.seconds)

    def _read(self) -> np.ndarray:  # NVML's in mJ, since Volta
        gpus = _or_nan(lambda: sum(ask("TotalEnergyConsumption") for ask in self.gpus) / 1000)
        return np.array([gpus, *map(_joules_in, self.files)])


def _or_nan(read: Callable[[], float]) -> float:
    with suppress(Exception):  # no counter, no driver, or readable only for root, as on most hosts
        return float(read())
    return math.nan


def _joules_in(file: Path) -> float:
    return _or_nan(lambda: int(file.read_text()) / 1e6)


def _nvml_of(device: torch.device) -> Any:
    with suppress(Exception):  # no pynvml, no driver
        import pynvml

        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"  # NVML orders GPUs otherwise
        gpu = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        return lambda what, *of: getattr(pynvml, f"nvmlDeviceGet{what}")(gpu, *of)
    return None


def gpu_clocks_mhz(device: torch.device) -> tuple[float | None, float | None]:
    """Return the current clock of the GPU's multiprocessors, and the clock to which it is set (its
    application clock) or else its highest; None where no driver reports it."""
    ask = _nvml_of(device)

    def clock(what: str) -> float | None:
        mhz = _or_nan(lambda: ask(what, NVML_CLOCK_SM))
        return None if math.isnan(mhz) else mhz

    return clock("ClockInfo"), clock("ApplicationsClock") or clock("MaxClockInfo")


def energy_summary(uses: Sequence[EnergyUse], images: int) -> Energy:
    """Return the energy of all ranks together, per image of `images`; None where a rank could not
    measure. Watts and utilisation are means over the ranks, most of which have one GPU."""
    gpu, percent, cpu, seconds = (sum(column) for column in zip(*map(astuple, uses), strict=True))
    ratios = {
        "gpu_joules_per_image": gpu / (images or math.nan),
        "gpu_watts": gpu / (seconds or math.nan),
        "gpu_utilization_percent": percent / len(uses),
        "cpu_joules_per_image": cpu / (images or math.nan),
    }
    return Energy(**{name: ratio for name, ratio in ratios.items() if math.isfinite(ratio)})
