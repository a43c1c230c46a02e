"""Ranks that share a GPU: what NCCL is told, which ranks they are, and what is refused."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from launching import launch, rarely
from making import a_config, a_world, in_ranks
from test_device import fake_nvml, gpus, use_nvml

from recipe import allreduce_loop, gpu_sharing, session
from recipe.allreduce_loop import Backend
from recipe.device import choose_device
from recipe.errors import UserError, limit_reached
from recipe.gpu_sharing import MULTI_RANK, nccl_versions, ranks_per_gpu
from recipe.ranks import Collective, Ranks
from recipe.record.energy import EnergyMeter, energy_summary
from recipe.record.schema import Energy
from recipe.session import HostShare
from recipe.world import LAUNCHERS, read_world

NCCL_SETS = (
    "NCCL_HOSTID", "NCCL_NET", "NCCL_SOCKET_IFNAME", "NCCL_MNNVL_ENABLE", "NCCL_NVLS_ENABLE",
)  # fmt: skip
BY_SOCKETS = {"NCCL_NET": "Socket", "NCCL_MNNVL_ENABLE": "0"}
SHARES = a_config(cuda=True, share_gpu=True)
CUDA = torch.device("cuda", 0)


def told_to_nccl() -> dict[str, str]:
    return {name: os.environ[name] for name in NCCL_SETS if name in os.environ}


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with a GPU, and an NCCL that is not of its own."""
    gpus(monkeypatch, 1)
    monkeypatch.setattr(gpu_sharing, "nccl_versions", lambda: [(2, 28, 9)])
    for name in (*NCCL_SETS, MULTI_RANK):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_each_rank_is_a_host_of_its_own(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under each launcher, whatever it passes on."""
    told = []
    for rank in range(2):
        variables = dict(zip(LAUNCHERS[launcher].variables, f"{rank}2{rank}2", strict=True))
        monkeypatch.setenv("NCCL_HOSTID", "of the shell, and so of all ranks")
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")  # horovodrun sets it
        world = read_world(variables)
        assert (world.rank, world.launcher) == (rank, launcher)
        assert choose_device(SHARES, world) == CUDA
        told.append(told_to_nccl())
    assert [one.pop("NCCL_HOSTID").rpartition("/")[2] for one in told] == ["0", "1"]
    assert told == [BY_SOCKETS | {"NCCL_SOCKET_IFNAME": "=lo"}] * 2


@pytest.mark.usefixtures("one_gpu")
def test_hosts_keep_their_network() -> None:
    """Two hosts of two ranks do not meet on the loopback interface."""
    choose_device(SHARES, a_world(3, 4, local_rank=1, local_size=2, host="b"))
    assert told_to_nccl() == BY_SOCKETS | {"NCCL_HOSTID": "b/3"}


@pytest.mark.usefixtures("one_gpu")
def test_what_does_not_share_tells_nccl_nothing() -> None:
    choose_device(SHARES, a_world())  # alone
    choose_device(a_config(cuda=True), a_world(0, 2))
    assert told_to_nccl() == {}


@pytest.mark.usefixtures("one_gpu")
def test_nccl_s_own_way_needs_a_new_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MULTI_RANK, "1")
    with pytest.raises(UserError, match=f"{MULTI_RANK}=1: needs NCCL 2.30 .* loaded 2.28.9; unset"):
        choose_device(SHARES, a_world(0, 2))
    assert told_to_nccl() == {}
    # One that torch has loaded and one that Horovod has.
    monkeypatch.setattr(gpu_sharing, "nccl_versions", lambda: [(2, 30, 0), (2, 29, 3)])
    with pytest.raises(UserError, match=r"loaded 2\.29\.3"):
        choose_device(SHARES, a_world(0, 2))
    monkeypatch.setattr(gpu_sharing, "nccl_versions", lambda: [(2, 30, 0), (2, 31, 1)])
    choose_device(SHARES, a_world(0, 2))
    assert told_to_nccl() == {"NCCL_NVLS_ENABLE": "0"}
    monkeypatch.setenv(MULTI_RANK, "true")  # which NCCL would take as 0
    with pytest.raises(UserError, match=f"^{MULTI_RANK}=true: must be 0 or 1$"):
        choose_device(SHARES, a_world(0, 2))
    for off in ("0", ""):
        monkeypatch.setenv(MULTI_RANK, off)
        monkeypatch.delenv("NCCL_HOSTID", raising=False)
        choose_device(SHARES, a_world(0, 2))
        assert "NCCL_HOSTID" in told_to_nccl()


def test_the_version_of_nccl_is_that_of_the_library_that_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if torch.version.cuda:  # then torch loads it, with a GPU or without
        assert nccl_versions() == [torch.cuda.nccl.version()]
    monkeypatch.setattr(gpu_sharing, "read_proc", lambda _: "7f00 r-xp /usr/lib/libc.so.6\n")
    assert nccl_versions() == []


def test_there_is_no_gpu_to_share_on_a_cpu() -> None:
    with pytest.raises(UserError, match=r"^--share-gpu: lets .*this run is on the CPU; leave it"):
        choose_device(a_config(cuda=False, share_gpu=True), a_world(0, 2))


# What a rank does under a launcher up to the first communicator, where there is no GPU.
RANK = """
import os, sys, torch
from recipe import gpu_sharing
from recipe.ancestors import own_world
from recipe.device import choose_device
from recipe.settings.flags import Config
of_cuda = {"is_available": True, "device_count": 1, "set_device": None, "get_arch_list": []}
of_cuda |= {"get_device_capability": (9, 0)}
for name, value in of_cuda.items():
    setattr(torch.cuda, name, lambda *_, value=value: value)
choose_device(Config(share_gpu=True), own_world())
said = " ".join(f"{name}={os.environ.get(name)}" for name in sys.argv[1:])
sys.stdout.write(f"told {said} .\\n")  # in one piece
"""


@pytest.mark.launch
@pytest.mark.parametrize(
    "launcher",
    ["torchrun", "horovodrun --gloo", rarely("horovodrun --mpi"), rarely("mpirun")],
)
def test_real_launchers(launcher: str, tmp_path: Path) -> None:
    """Each rank overwrites what they pass on from the shell."""
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    shell = {"NCCL_HOSTID": "shell", "NCCL_SOCKET_IFNAME": "eth9"}
    done = launch(launcher, str(script), " ".join(NCCL_SETS[:3]), **shell).checked()
    host = os.uname().nodename
    for rank in range(2):
        told = f"told NCCL_HOSTID={host}/{rank} NCCL_NET=Socket NCCL_SOCKET_IFNAME==lo ."
        assert done.output.count(told) == 1, done.output


@pytest.mark.parametrize(
    ("uuids", "may_share", "most", "told"),
    [
        ("abc", False, None, ""),
        (["", "", ""], False, None, ""),
        ("aba", False, None, "^ranks 0 and 2 on node1 have the same GPU: .*--share-gpu"),
        ("abb", False, None, "^ranks 1 and 2 on node1"),
        ("aba", True, 2, ""),
        ("aaa", True, 3, ""),
        ("a", True, None, ""),  # alone, as the smallest of several numbers of workers
        ("abc", True, None, "^--share-gpu: each rank has a GPU of its own; leave it out, or"),
    ],
)
def test_which_ranks_share(uuids: str, may_share: bool, most: int | None, told: str) -> None:
    hosts = ["node0", "node0", "node1"]
    if told:
        with pytest.raises(UserError, match=told):
            ranks_per_gpu(uuids, hosts, may_share)
    else:
        assert ranks_per_gpu(uuids, hosts, may_share) == most


@pytest.mark.parametrize("may_share", [True, False])
def test_ranks_find_out_who_shares(may_share: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may see one GPU alone: only their UUIDs tell whether it is the same one. A training asks
    so, and an all-reduce alone."""
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(uuid="abb"[device.index]),
    )
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    config = a_config(cuda=True, share_gpu=may_share)

    def of_training(rank: int, total: Collective) -> int | None:
        device, ranks = torch.device("cuda", rank), Ranks(a_world(rank, 3), total)
        return session.share_host(config, device, ranks).ranks_per_gpu

    def of_all_reduce(rank: int, total: Collective) -> int | None:
        def prepare(tensors: list[torch.Tensor], wire: str) -> Collective:
            return lambda: tensors[0].copy_(total(tensors[0].float()))

        backend = Backend("NCCL", torch.device("cuda", rank), prepare, lambda: None)
        return allreduce_loop.check_gpus(backend, a_world(rank, 3), may_share)

    for ask in (of_training, of_all_reduce):
        if may_share:
            assert in_ranks(3, ask) == [2] * 3
        else:
            with pytest.raises(UserError, match="ranks 1 and 2 on here have the same GPU"):
                in_ranks(3, ask)


def test_a_gpu_that_admits_one_process_is_one_sentence() -> None:
    """Where a rank meets it depends on the driver: in any call of CUDA."""
    text = (
        "CUDA error: CUDA-capable device(s) is/are busy or unavailable\n"
        "CUDA kernel errors might be asynchronously reported at some other API call"
    )
    told = limit_reached(RuntimeError(text))
    assert told.startswith("CUDA-capable device(s) is/are busy or unavailable: probably another")
    assert told.endswith("as root: nvidia-smi --compute-mode 0") and "\n" not in told


@pytest.mark.parametrize("ranks_per_gpu", [None, 2])
def test_energy_of_a_shared_gpu_is_no_rank_s(
    ranks_per_gpu: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_nvml(monkeypatch, fake_nvml(), "01234567-89ab-cdef-0123-456789abcdef")
    meter = EnergyMeter(HostShare(1, 0, (), ranks_per_gpu).measured([CUDA]), local_rank=1)
    meter.start()
    meter.stop()
    summary = energy_summary([meter.use()], images=10)
    of_gpu = (summary.gpu_joules_per_image, summary.gpu_watts, summary.gpu_utilization_percent)
    is_shared = ranks_per_gpu is not None
    assert (of_gpu == (None, None, None)) == is_shared
    assert is_shared == (summary == Energy(cpu_joules_per_image=summary.cpu_joules_per_image))
