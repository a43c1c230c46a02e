"""Energy: counters that wrap, that cannot be read, that are not there; and sums over ranks."""

import math
import sys
import time
from dataclasses import astuple, replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from making import CPU

from recipe.record import energy
from recipe.record.energy import EnergyMeter, EnergyUse, energy_summary, gpu_clocks_mhz
from recipe.record.schema import Energy

CUDA = torch.device("cuda", 0)
UUID = "01234567-89ab-cdef-0123-456789abcdef"
RANGE_UJ = 262_143_328_850


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stands in for the system's clock."""
    it = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(time, "monotonic", lambda: it.now)
    return it


# ---- processors ----


@pytest.fixture
def powercap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host of two packages, with all that must not be added to them."""
    monkeypatch.setattr(energy, "POWERCAP", tmp_path)
    (tmp_path / "intel-rapl").mkdir()
    for domain, name in {
        "intel-rapl:0": "package-0",
        "intel-rapl:1": "package-1",
        "intel-rapl:0:0": "core",
        "intel-rapl:0:1": "dram",
        "intel-rapl:2": "psys",
        "intel-rapl-mmio:0": "package-0",  # the same package, by another way
    }.items():
        files = {"name": name, "max_energy_range_uj": RANGE_UJ, "energy_uj": 5_000_000}
        (tmp_path / domain).mkdir()
        for file, content in files.items():
            (tmp_path / domain / file).write_text(f"{content}\n")
    return tmp_path


def use_everywhere(powercap: Path, joules: int) -> None:
    """Let each domain use `joules`."""
    for file in powercap.glob("*/energy_uj"):
        file.write_text(str((int(file.read_text()) + joules * 1_000_000) % RANGE_UJ))


@pytest.fixture
def meter(powercap: Path) -> EnergyMeter:
    """Of a host's first rank, on CPUs."""
    return EnergyMeter([CPU], 0)


def test_packages_alone_are_added_once_a_host_though_counters_wrap(powercap: Path) -> None:
    meters = [EnergyMeter([CPU], local_rank) for local_rank in range(3)]
    for meter in meters:
        meter.start()
    for _ in range(4):  # 800 kJ a package: each counter passes its range three times
        use_everywhere(powercap, 200_000)
        for meter in meters:
            meter.sample()
    assert [meter.use().cpu_joules for meter in meters] == [pytest.approx(1_600_000), 0, 0]


def test_a_gap_in_which_a_counter_may_have_wrapped_is_not_measured(
    meter: EnergyMeter, clock: SimpleNamespace
) -> None:
    meter.start()
    clock.now += 262
    meter.sample()
    assert meter.use().cpu_joules == 0
    clock.now += 263  # 1 kW would have filled the range
    meter.stop()
    assert math.isnan(meter.use().cpu_joules)


def test_only_stretches_between_start_and_stop_count(
    meter: EnergyMeter, powercap: Path, clock: SimpleNamespace
) -> None:
    meter.sample()
    for _ in range(2):
        for call, joules, seconds in ((meter.start, 3, 2), (meter.stop, 500, 1000)):
            for _ in range(2):  # a second call changes nothing
                call()
                use_everywhere(powercap, joules)
                clock.now += seconds
    assert meter.use().cpu_joules == pytest.approx(2 * 2 * 6)
    assert meter.use().seconds == pytest.approx(2 * 4)


@pytest.mark.parametrize(
    ("file", "content", "packages"),
    [
        ("max_energy_range_uj", None, 1),
        ("energy_uj", "\n", 1),
        ("energy_uj", None, 1),
        ("name", "none\n", 2),
    ],
)
def test_processors_that_cannot_be_read(
    file: str, content: str | None, packages: int, powercap: Path
) -> None:
    """Half of a host is no figure either, nor is one with a reading that failed."""
    files = [powercap / f"intel-rapl:{package}" / file for package in range(packages)]
    before = [path.read_text() for path in files]
    for path in files:
        path.unlink() if content is None else path.write_text(content)
    meter = EnergyMeter([CPU], 0)
    meter.start()
    for path, text in zip(files, before, strict=True):
        path.write_text(text)
    meter.stop()
    assert math.isnan(meter.use().cpu_joules)


def fake_nvml(broken: str = "nothing") -> mock.Mock:
    """Stands in for the module pynvml: a host on which torch's GPU takes 400 W."""
    nvml = mock.Mock()
    gpu = {f"GPU-{UUID}": "mine"}
    percents = iter([40, 90, 80])
    nvml.nvmlDeviceGetHandleByUUID.side_effect = gpu.__getitem__
    nvml.nvmlDeviceGetTotalEnergyConsumption.side_effect = lambda _: 400_000 * time.monotonic()
    nvml.nvmlDeviceGetUtilizationRates.side_effect = lambda _: mock.Mock(gpu=next(percents))
    getattr(nvml, broken).side_effect = RuntimeError("Not Supported")
    return nvml


# ---- GPUs ----


@pytest.mark.parametrize(
    ("nvml", "uuid", "row"),
    [
        (fake_nvml(), UUID, [1200, 70, 0, 3]),
        # Older than Volta.
        (fake_nvml("nvmlDeviceGetTotalEnergyConsumption"), UUID, [math.nan, 70, 0, 3]),
        (fake_nvml("nvmlDeviceGetUtilizationRates"), UUID, [1200, math.nan, 0, 3]),
        (fake_nvml("nvmlInit"), UUID, [math.nan, math.nan, 0, 3]),
        (fake_nvml("nvmlDeviceGetHandleByUUID"), UUID, [math.nan, math.nan, 0, 3]),
        (None, UUID, [math.nan, math.nan, 0, 3]),  # import fails
        (fake_nvml(), UUID.replace("0", "f"), [math.nan, math.nan, 0, 3]),  # never another GPU
    ],
)
def test_gpu(
    nvml: mock.Mock | None,
    uuid: str,
    row: list[float],
    monkeypatch: pytest.MonkeyPatch,
    clock: SimpleNamespace,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    properties = mock.Mock(return_value=mock.Mock(uuid=uuid))
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    meter = EnergyMeter([CUDA], 1)
    meter.start()
    for read in (meter.sample, meter.sample, meter.stop):
        clock.now += 1
        read()
    assert list(astuple(meter.use())) == pytest.approx(row, nan_ok=True)


def test_all_gpus_of_a_rank_count(monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace) -> None:
    """As baselines/data_parallel.py and model_parallel.py have them: 400 W each, 40 % and 90 %."""
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml())
    properties = mock.Mock(return_value=mock.Mock(uuid=UUID))
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    meter = EnergyMeter([CUDA, torch.device("cuda", 1)], 1)
    meter.start()
    clock.now += 1
    meter.stop()
    assert list(astuple(meter.use())) == pytest.approx([800, 65, 0, 1])
    assert [call.args[0].index for call in properties.call_args_list] == [0, 1]


@pytest.mark.parametrize(
    ("broken", "clocks"),
    [
        ("nothing", (1200, 1500)),
        ("nvmlDeviceGetApplicationsClock", (1200, 1980)),  # NVIDIA withdraws it
        ("nvmlInit", (None, None)),
    ],
)
def test_clocks(
    broken: str, clocks: tuple[float | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = fake_nvml(broken)
    for name, megahertz in (
        ("ClockInfo", 1200),
        ("ApplicationsClock", 1500),
        ("MaxClockInfo", 1980),
    ):
        getattr(nvml, f"nvmlDeviceGet{name}").return_value = megahertz
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    properties = mock.Mock(return_value=mock.Mock(uuid=UUID))
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    assert gpu_clocks_mhz(CUDA) == clocks


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_real_gpu() -> None:
    import pynvml

    device = torch.device("cuda", torch.cuda.device_count() - 1)
    meter = EnergyMeter([device], 1)
    meter.start()
    matrix = torch.rand(2048, 2048, device=device)
    ends = time.monotonic() + 2
    while time.monotonic() < ends:
        matrix = torch.mm(matrix, matrix).clamp_(0, 1)
        torch.cuda.synchronize(device)
    meter.stop()
    joules, utilization, _, seconds = astuple(meter.use())
    assert utilization > 0
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(
        f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    )
    limit_watts = pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000
    assert 0 < joules / seconds < 1.5 * limit_watts
    assert all(gpu_clocks_mhz(device))


# ---- all ranks ----


NO_GPU = {"gpu_joules_per_image": None, "gpu_watts": None}


@pytest.mark.parametrize(
    ("changes", "lost"),
    [
        ({}, {}),
        ({"gpu_joules": math.nan}, NO_GPU),
        ({"gpu_utilization_percent": math.nan}, {"gpu_utilization_percent": None}),
        ({"cpu_joules": math.nan}, {"cpu_joules_per_image": None}),
    ],
)
def test_summary(changes: dict[str, float], lost: dict[str, None]) -> None:
    """None where one rank could not measure."""
    uses = [EnergyUse(300.0, 60, 50, 2), replace(EnergyUse(500.0, 80, 0, 2), **changes)]
    whole = Energy(
        gpu_joules_per_image=8.0,
        gpu_watts=200.0,
        gpu_utilization_percent=70.0,
        cpu_joules_per_image=0.5,
    )
    assert energy_summary(uses, images=100) == replace(whole, **lost)
    untrained = EnergyUse(0.0, math.nan, 0.0, 0.0)
    assert energy_summary([untrained, untrained], images=0) == Energy()
