"""Devices, shares of the cores, and what is measured of a process."""

import math
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from making import CPU, a_config, a_world

from recipe import device
from recipe.device import (
    MAX_DEFAULT_WORKERS,
    choose_device,
    core_ranges,
    cpu_quota_cores,
    cpu_seconds,
    gather,
    loader_workers,
    peak_memory_bytes,
    share_of_cores,
)
from recipe.errors import UserError


@pytest.fixture
def no_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "cpu_quota_cores", lambda: float("inf"))


def shares(*places: tuple[str, Sequence[int]]) -> list[int]:
    return [share_of_cores(places, rank) for rank in range(len(places))]


@pytest.mark.usefixtures("no_quota")
def test_shares_of_cores() -> None:
    eight = range(8)
    assert shares(("a", eight)) == [8]
    assert shares(("a", eight), ("a", eight)) == [4, 4]  # torchrun, horovodrun: not bound
    assert shares(("a", [0]), ("a", [1])) == [1, 1]  # mpirun with two ranks: bound to a core
    assert shares(*[("a", range(4))] * 2, *[("a", range(4, 8))] * 2) == [2, 2, 2, 2]  # to sockets
    assert shares(("a", eight), ("b", range(4))) == [8, 4]  # other hosts take nothing away
    assert shares(("a", eight), ("b", range(4)), ("a", eight), ("b", range(4))) == [4, 2, 4, 2]
    assert shares(*[("a", range(2))] * 5) == [1] * 5  # never none
    assert shares(*[("a", eight)] * 3) == [2, 2, 2]  # rounded down, for all alike
    assert shares(("a", range(6)), ("a", range(4, 8))) == [5, 3]  # they share two cores
    for size in (3, 7, 11, 49):  # no rounding error
        assert shares(*[("a", range(size * 3))] * size) == [3] * size


def test_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may be granted less CPU time than its affinity mask shows."""
    monkeypatch.setattr(device, "cpu_quota_cores", lambda: 4.0)
    assert shares(("a", range(64))) == [4]
    assert shares(("a", range(64)), ("a", range(64))) == [2, 2]
    assert shares(("a", [0]), ("a", [1])) == [1, 1]


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


def test_all_ranks_get_what_each_has_to_say() -> None:
    """Of any length, under collectives that add up."""
    values = [("a", [1, 5], 1.5), ("b" * 300, [], None), ("ü", [0], math.inf)]
    barrier, sent = threading.Barrier(3, timeout=20), [torch.empty(0)] * 3

    def as_rank(rank: int) -> list[Any]:
        def sum_over_ranks(row: torch.Tensor) -> torch.Tensor:
            sent[rank] = row
            barrier.wait()
            assert {one.dtype for one in sent} == {torch.int64}, "Horovod adds up no bytes"
            total = torch.stack(sent).sum(dim=0)
            barrier.wait()
            return total

        return gather(values[rank], a_world(rank, 3), sum_over_ranks)

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(as_rank, range(3))) == [[list(value) for value in values]] * 3


def gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> list[torch.device]:
    """Pretend that this host has `count` GPUs; returns the list of those that get chosen."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    return chosen


def test_gpu_by_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = gpus(monkeypatch, 2)
    world = a_world(5, 8, local_rank=1, local_size=2)  # not by the global rank
    assert choose_device(a_config(), world) == torch.device("cuda", 1)
    assert chosen == [torch.device("cuda", 1)]
    assert choose_device(a_config(cuda=False), world) == CPU


@pytest.fixture
def switches(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """The environment in which torch's settings may be changed; they are put back."""
    backends = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [backend.allow_tf32 for backend in backends]
    monkeypatch.setattr(device.os, "environ", environ := dict[str, str]())
    yield environ
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = False
    for backend, value in zip(backends, before, strict=True):
        backend.allow_tf32 = value


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_tf32_is_what_was_asked_for(
    precision: str, switches: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(monkeypatch, 1)
    backends = torch.backends.cuda.matmul, torch.backends.cudnn
    for backend in backends:
        backend.allow_tf32 = precision != "tf32"
    choose_device(a_config(precision=precision), a_world())
    assert [backend.allow_tf32 for backend in backends] == [precision == "tf32"] * 2


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
def test_ranks_take_what_they_see(
    visible: int, indices: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That no two of them have the same one is checked by test_agreement.py::test_gpus."""
    gpus(monkeypatch, visible)
    monkeypatch.delenv("SLURM_GPUS_PER_TASK", raising=False)
    devices = [choose_device(a_config(), a_world(rank, 4, launcher="srun")) for rank in range(4)]
    assert [device.index for device in devices] == indices


@pytest.mark.parametrize(
    "settings", [{"precision": "tf32"}, {"batch_norm": "sync", "compile": True}]
)
def test_what_only_gpus_have(settings: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_peak_memory_is_in_bytes() -> None:
    resident = psutil.Process().memory_info().rss
    assert 0.9 * resident < peak_memory_bytes(CPU) < 100 * resident


def test_cpu_seconds_counts_children() -> None:
    started = cpu_seconds()
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    child = subprocess.Popen([sys.executable, "-c", burn + "\nprint(1, flush=True)\ninput()"],
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    assert child.stdout is not None
    child.stdout.readline()
    alive = cpu_seconds() - started
    child.communicate(b"\n")
    ended = cpu_seconds() - started
    assert alive >= 0.28
    assert ended >= 0.28  # still counted after its end
