"""Devices, shares of the cores, and what is measured of a process."""

import itertools
import math
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import psutil
import pytest
import torch
from making import CPU, a_config, a_world, in_ranks

from recipe import device, session
from recipe.device import (
    MAX_DEFAULT_WORKERS,
    choose_device,
    core_ranges,
    cpu_quota_cores,
    cpu_seconds,
    loader_workers,
    peak_memory_bytes,
    share_of_cores,
)
from recipe.errors import UserError
from recipe.ranks import Ranks
from recipe.record import energy
from recipe.record.energy import EnergyMeter, EnergyUse, energy_summary, gpu_clocks_mhz
from recipe.record.schema import Energy

EIGHT = ("a", range(8))  # all of a host's cores
BACKENDS = (torch.backends.cuda.matmul, torch.backends.cudnn)


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([EIGHT], [8]),
        ([EIGHT] * 2, [4, 4]),  # torchrun, horovodrun: not bound
        ([("a", [0]), ("a", [1])], [1, 1]),  # mpirun with two ranks: bound to a core
        ([("a", range(4))] * 2 + [("a", range(4, 8))] * 2, [2, 2, 2, 2]),  # to sockets
        ([EIGHT, ("b", range(4))], [8, 4]),  # other hosts take nothing away
        ([EIGHT, ("b", range(4))] * 2, [4, 2, 4, 2]),
        ([("a", range(2))] * 5, [1] * 5),  # never none
        ([EIGHT] * 3, [2, 2, 2]),  # rounded down, for all alike
        ([("a", range(6)), ("a", range(4, 8))], [5, 3]),  # they share two cores
        *(([("a", range(size * 3))] * size, [3] * size) for size in (3, 7, 11, 49)),  # exactly
        # A container may be granted less CPU time than its affinity mask shows.
        ([("a", range(64))], [40]),
        ([("a", range(64))] * 2, [20, 20]),
    ],
)
def test_shares_of_cores(
    places: list[tuple[str, Sequence[int]]], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    quota = 40.0 if places[0][1] == range(64) else math.inf
    monkeypatch.setattr(device, "cpu_quota_cores", lambda: quota)
    assert [share_of_cores(places, rank) for rank in range(len(places))] == expected


V2 = "0::/slice/job/step\n"
V1 = "4:memory:/slice\n3:cpu,cpuacct:/slice/job\n0::/slice\n"


@pytest.mark.parametrize(
    ("membership", "files", "cores"),
    [
        (V2, {}, math.inf),
        (V2, {"cpu.max": "150000 100000\n"}, 1.5),  # all that a container sees
        (V2, {"slice/job/cpu.max": "max 100000\n"}, math.inf),
        (V2, {"slice/job/cpu.max": "200000 100000\n", "slice/cpu.max": "800000 100000\n"}, 2),
        (V2, {"slice/job/step/cpu.max": "9 1\n", "slice/cpu.max": "4 1\n"}, 4),
        (V2, {"slice/another/cpu.max": "1 1\n"}, math.inf),
        (V1, {"cpu/slice/job/cpu.cfs_quota_us": "-1\n"}, math.inf),
        (V1, {"cpu/slice/cpu.cfs_quota_us": "300000\n"}, 3),
        (None, {"cpu.max": "1 1\n"}, math.inf),
    ],
)
def test_quotas(
    membership: str | None, files: dict[str, str], cores: float, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).with_name("cpu.cfs_period_us").write_text("100000\n")
    if membership is not None:
        (tmp_path / "membership").write_text(membership)
    assert cpu_quota_cores(tmp_path / "membership", tmp_path) == cores
    assert cpu_quota_cores() > 0  # of this host


def test_ranges_of_cores() -> None:
    ranges = {"0": [0], "0-3,8": [0, 1, 2, 3, 8], "5,7-8": [5, 7, 8], "": []}
    assert {core_ranges(cores): cores for cores in ranges.values()} == ranges


def test_all_ranks_get_the_values_of_each() -> None:
    """Of any length, although the only collective is a sum."""
    values = [("a", [1, 5], 1.5), ("b" * 300, [], None), ("ü", [0], math.inf)]
    gathered = in_ranks(3, lambda rank, total: Ranks(a_world(rank, 3), total).gather(values[rank]))
    assert gathered == [[list(value) for value in values]] * 3


def gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> list[torch.device]:
    """Pretend that this host has `count` GPUs; returns the list of those that get chosen."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda gpu: "Test GPU")
    return chosen


@pytest.mark.parametrize(
    ("visible", "message"),
    [
        (None, r"sees no GPU: .*--gpus all"),
        *((hidden, rf"^CUDA_VISIBLE_DEVICES={hidden}: .*: unset it") for hidden in ("", "-1")),
        ("NoDevFiles", r"^CUDA_VISIBLE_DEVICES=NoDevFiles: .*batch system"),
        ("7", "sees no GPU with CUDA_VISIBLE_DEVICES=7: .*driver"),
    ],
)
def test_a_driver_without_a_visible_gpu_is_an_error(
    visible: str | None, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Training on the CPU would take a hundred times as long."""
    gpus(monkeypatch, 0)
    monkeypatch.setattr(device, "NVIDIA_DRIVER", tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with pytest.raises(UserError, match=f"{message}.*--no-cuda"):
        choose_device(a_config(), a_world())
    assert choose_device(a_config(cuda=False), a_world()) == CPU


@pytest.mark.parametrize(
    ("cpu", "precision", "lacking"),
    [
        ("flags\t\t: fpu avx2 avx512f avx512_bf16", "bf16", ""),
        ("flags\t\t: fpu avx512_bf16 amx_bf16 avx512_fp16", "fp16", ""),
        ("flags\t\t: fpu avx2 avx512f", "bf16", "lacks avx512_bf16 and amx_bf16, so bf16 is"),
        ("flags\t\t: fpu avx2 avx512f avx512_bf16", "fp16", "lacks avx512_fp16, so fp16 is"),
        ("flags\t\t: fpu avx2 avx512f avx512_bf16", "O2", "lacks avx512_fp16, so fp16 is"),
        ("flags\t\t: fpu avx2", "fp32", ""),
        ("Features\t: fp asimd bf16", "bf16", ""),  # not x86: nothing was measured
        ("", "bf16", ""),
    ],
)
def test_number_formats_that_the_cpu_emulates_are_warned_of(
    cpu: str,
    precision: str,
    lacking: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Once, by rank 0: training takes ten times as long as in fp32."""
    monkeypatch.setattr(device, "CPUINFO", tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{cpu}\nvmx flags\t: avx512_fp16\n")
    for rank in (0, 1):
        choose_device(a_config(cuda=False, precision=precision), a_world(rank, 2))
    said = capsys.readouterr().out
    assert said.count("warning: ") == bool(lacking) and lacking in said
    assert not lacking or "use --precision fp32" in said


WHEEL = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]  # torch 2.14.1, CUDA 13


@pytest.mark.parametrize(
    ("capability", "archs", "runs"),
    [
        ((7, 0), WHEEL, False),  # V100
        ((8, 9), WHEEL, True),  # by sm_86
        ((10, 3), WHEEL, True),
        ((11, 0), WHEEL, False),
        ((8, 0), ["sm_86"], False),  # not by a later one
        ((12, 0), ["sm_90", "compute_90"], True),  # which the driver compiles
        ((12, 0), ["sm_90a", "compute_90a"], False),  # not for other families
        ((9, 0), ["sm_90a"], True),
        ((7, 0), ["compute_90"], False),
        ((9, 0), ["gfx90a"], False),
        ((9, 0), [], True),
    ],
)
def test_gpus_that_torch_has_no_code_for(
    capability: tuple[int, int], archs: list[str], runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(monkeypatch, 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: capability)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: archs)
    assert (device.lacks_kernels(0) == "") == runs
    if not runs:
        words = f"Test GPU has compute capability {capability[0]}.{capability[1]}, .*--no-cuda"
        with pytest.raises(UserError, match=words):
            choose_device(a_config(), a_world())


@pytest.mark.parametrize(
    ("count", "there", "lacks"),
    [
        (1, {"gcc"}, None),
        (1, {"clang"}, None),
        (1, {"g++"}, r"a compiler \(gcc or clang\);"),
        (0, {"g++"}, None),
        (0, {"gcc"}, r"a compiler \(g\+\+\);"),
    ],
)
def test_compile_needs_a_compiler(
    count: int, there: set[str], lacks: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpus(monkeypatch, count)
    for variable in ("CC", "CXX"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("shutil.which", lambda name: name if name in there else None)
    monkeypatch.setattr("sysconfig.get_path", lambda *_: str(tmp_path))
    with pytest.raises(UserError, match=r"Python's headers \(.*Python.h\); install them"):
        choose_device(a_config(compile=True), a_world())
    (tmp_path / "Python.h").touch()
    if lacks is None:
        choose_device(a_config(compile=True), a_world())
    else:
        with pytest.raises(UserError, match=lacks):
            choose_device(a_config(compile=True), a_world())
    choose_device(a_config(), a_world())


@pytest.fixture
def switches(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """The environment in which torch's settings may be changed; they are put back."""
    before = [backend.allow_tf32 for backend in BACKENDS]
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setattr(device.os, "environ", environ := dict[str, str]())
    yield environ
    torch.use_deterministic_algorithms(False)
    for backend, value in zip(BACKENDS, before, strict=True):
        backend.allow_tf32 = value


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_tf32_is_used_only_if_asked_for(
    precision: str, switches: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(monkeypatch, 1)
    for backend in BACKENDS:
        backend.allow_tf32 = precision != "tf32"
    choose_device(a_config(precision=precision), a_world())
    assert [backend.allow_tf32 for backend in BACKENDS] == [precision == "tf32"] * 2


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("asked", [False, True])
def test_deterministic(
    asked: bool, count: int, switches: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(monkeypatch, count)
    choose_device(a_config(deterministic=asked), a_world())
    assert torch.are_deterministic_algorithms_enabled() == asked
    assert ("CUBLAS_WORKSPACE_CONFIG" in switches) == asked
    assert torch.backends.cudnn.benchmark == (not asked and count > 0)


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        (4, [0, 1, 2, 3]),  # all of the host's
        (1, [0, 0, 0, 0]),  # each its own: a script's CUDA_VISIBLE_DEVICES, --gpu-bind=single:1
        (2, [0, 1, 0, 1]),  # each its own two
    ],
)
def test_ranks_take_a_visible_gpu_by_their_local_rank(
    visible: int, indices: list[int], monkeypatch: pytest.MonkeyPatch, switches: dict[str, str]
) -> None:
    """test_agreement.py::test_gpus checks that no two of them have the same one."""
    chosen = gpus(monkeypatch, visible)
    for local_rank in range(4):
        world = a_world(4 + local_rank, 8, local_rank=local_rank, local_size=4, launcher="srun")
        assert choose_device(a_config(), world) == chosen[-1]
    assert [device.index for device in chosen] == indices


@pytest.mark.parametrize(
    "settings",
    [{"precision": "tf32"}, {"transport": "nccl"}, {"batch_norm": "sync", "compile": True}],
)
def test_settings_for_gpus_are_refused_on_the_cpu(
    settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(monkeypatch, 0)
    assert choose_device(a_config(), a_world()) == CPU
    with pytest.raises(UserError, match=f"^--{next(iter(settings)).replace('_', '-')} "):
        choose_device(a_config(**settings), a_world())


@pytest.mark.parametrize(
    ("workers", "kind", "threads", "expected"),
    [
        (None, "cpu", 8, 0),
        (None, "cuda", 8, 8),
        (None, "cuda", 200, MAX_DEFAULT_WORKERS),
        (3, "cpu", 8, 3),
        (0, "cuda", 8, 0),
    ],
)
def test_loader_workers(workers: int | None, kind: str, threads: int, expected: int) -> None:
    assert loader_workers(a_config(workers=workers), torch.device(kind), threads) == expected


def test_a_rank_has_workers_by_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by its number of threads: a rank with a GPU may have only one."""
    monkeypatch.setattr(session, "share_of_cores", lambda *_: 4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=UUID))
    cuda = torch.device("cuda", 0)
    share = session.share_host(a_config(threads=1, cuda=True), cuda, Ranks(a_world()))
    assert (share.threads, share.workers) == (1, 4)


def test_peak_memory_is_in_bytes() -> None:
    resident = psutil.Process().memory_info().rss
    assert 0.9 * resident < peak_memory_bytes(CPU) < 100 * resident


def test_cpu_seconds_counts_children() -> None:
    started = cpu_seconds()
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint(1, flush=True)\ninput()"
    child = subprocess.Popen(
        [sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    child.stdout.readline()  # type: ignore[union-attr]
    assert cpu_seconds() - started >= 0.28
    child.communicate(b"\n")
    assert cpu_seconds() - started >= 0.28  # still counted after its end


# ---- energy: counters that wrap, that cannot be read, that are not there; and sums over ranks ----


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
    """A host of two packages, with domains that must not be added to theirs."""
    monkeypatch.setattr(energy, "POWERCAP", tmp_path)
    (tmp_path / "intel-rapl").mkdir()
    for domain, name in {
        "intel-rapl:0": "package-0",
        "intel-rapl:1": "package-1",
        "intel-rapl:0:0": "core",
        "intel-rapl:0:1": "dram",
        "intel-rapl:2": "psys",
        "intel-rapl-mmio:0": "package-0",  # the same package again
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


def test_only_packages_count_once_per_host_although_counters_wrap(powercap: Path) -> None:
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
    """The figure of half a host would be wrong, as would one after a failed reading."""
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
    percents = itertools.cycle([40, 90, 80])
    nvml.nvmlDeviceGetHandleByUUID.side_effect = gpu.__getitem__
    nvml.nvmlDeviceGetTotalEnergyConsumption.side_effect = lambda _: 400_000 * time.monotonic()
    nvml.nvmlDeviceGetUtilizationRates.side_effect = lambda _: mock.Mock(gpu=next(percents))
    getattr(nvml, broken).side_effect = RuntimeError("Not Supported")
    return nvml


def use_nvml(monkeypatch: pytest.MonkeyPatch, nvml: mock.Mock | None, uuid: str) -> mock.Mock:
    """Let this be pynvml, and each of torch's GPUs have this UUID; return what is asked for it."""
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    properties = mock.Mock(return_value=mock.Mock(uuid=uuid))
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    return properties


# ---- GPUs ----


@pytest.mark.parametrize(
    ("nvml", "uuid", "row"),
    [
        (fake_nvml(), UUID, [1200, 70, 0, 3]),
        # Two GPUs, as in baselines/data_parallel.py and model_parallel.py.
        (fake_nvml(), UUID, [2400, 70, 0, 3]),
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
    properties = use_nvml(monkeypatch, nvml, uuid)
    devices = [torch.device("cuda", index) for index in range(2 if row[0] == 2400 else 1)]
    meter = EnergyMeter(devices, 1)
    meter.start()
    for read in (meter.sample, meter.sample, meter.stop):
        clock.now += 1
        read()
    assert list(astuple(meter.use())) == pytest.approx(row, nan_ok=True)
    asked = [call.args[0] for call in properties.call_args_list]
    assert asked == devices or math.isnan(row[0])


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
    use_nvml(monkeypatch, nvml, UUID)
    assert gpu_clocks_mhz(CUDA) == clocks


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
