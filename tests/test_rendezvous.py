"""Where the ranks of a DDP run meet."""

import os
import socket
import sys
import time
from collections import namedtuple
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from itertools import count
from threading import Thread
from unittest.mock import Mock

import psutil
import pytest
import torch.distributed as dist
from making import a_world

from ddp_train import rendezvous as ddp
from ddp_train.rendezvous import PATIENCE, rendezvous_arguments, slurm_address
from recipe import rendezvous
from recipe.errors import UserError
from recipe.settings.config import Config
from recipe.world import read_world


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks have come to the given address."""
    monkeypatch.setenv("MASTER_ADDR", "node7")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setattr(rendezvous, "store_at", lambda *_: dist.HashStore())


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


def variables_of(job: int, step: int, nodes: str = "n") -> dict[str, str]:
    """Slurm's, of a step."""
    values = {"STEP_NODELIST": nodes, "JOB_ID": str(job), "STEP_ID": str(step)}
    return {f"SLURM_{name}": value for name, value in values.items()}


def ports_of(job: int, step: int) -> list[int]:
    return slurm_address(variables_of(job, step))[1]


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n3", "n3"),
        ("n3,n4", "n3"),
        ("n[3-6]", "n3"),
        ("n[003-006,9],gpu1", "n003"),
        ("n[7,9]", "n7"),
        ("login,n[1-2]", "login"),
        ("gpu-a[01-12]", "gpu-a01"),
        ("rack[1-2]n[3-4]", "rack1n3"),
        ("n[3-6]-ib", "n3-ib"),
        ("n1.site.org,n2.site.org", "n1.site.org"),
    ],
)
def test_first_node_of_a_slurm_step(nodes: str, first: str) -> None:
    assert slurm_address(variables_of(7, 0, nodes))[0] == first


def test_ports_of_a_slurm_step() -> None:
    """Fixed by job and step, others for neighbours, and free for a server to listen at."""
    firsts = [ports_of(job, step)[0] for job in range(1000, 1050) for step in range(50)]
    assert len(set(firsts)) == len(firsts)
    assert ports_of(1000, 0)[0] == firsts[0]
    for ports in (ports_of(1000, 0), ports_of(2**31, 2**32 - 2)):
        assert len(set(ports)) == 8 and all(1024 < port < 32768 for port in ports)


@pytest.mark.parametrize(
    ("nccl", "gloo"),
    [("ib0", "ib0"), ("=ib0", "ib0"), ("ib", None), ("^docker0", None), ("", None)],
)
def test_gloo_takes_the_network_that_was_chosen_for_nccl(
    nccl: str, gloo: str | None, met: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gloo sends tensors in the CPU's memory. It understands a name, but no prefix or list."""
    monkeypatch.setattr(
        rendezvous.psutil, "net_if_addrs", lambda: {"lo": [], "ib0": [], "eth0": []}
    )
    monkeypatch.setattr(
        rendezvous.socket, "getaddrinfo", lambda *_: [(0, 0, 0, "", ("10.0.0.7", 0))]
    )
    for chosen in ({}, {"GLOO_SOCKET_IFNAME": "eth0"}):
        environ = {"MASTER_ADDR": "node7", "MASTER_PORT": "29500", "NCCL_SOCKET_IFNAME": nccl}
        environ |= chosen
        monkeypatch.setattr(rendezvous.os, "environ", environ)
        rendezvous_arguments(a_world(1, 4, local_size=2))
        assert environ.get("GLOO_SOCKET_IFNAME") == chosen.get("GLOO_SOCKET_IFNAME", gloo)
        # Nor is the loopback used if the launcher does not say how many ranks are here.
        rendezvous_arguments(read_world({"RANK": "1", "WORLD_SIZE": "2"}))
        assert environ.get("GLOO_SOCKET_IFNAME") == chosen.get("GLOO_SOCKET_IFNAME", gloo)
        rendezvous_arguments(a_world(1, 2))  # all are on this host, and no other needs its ports
        assert environ["GLOO_SOCKET_IFNAME"] == chosen.get("GLOO_SOCKET_IFNAME", gloo or "lo")


@pytest.mark.parametrize(
    ("own", "way", "gloo"),
    [
        ("127.0.1.1", {"node7": "10.0.0.7"}, "eth0"),
        ("127.0.1.1", {"node7": "127.0.0.1", "192.0.2.1": "10.1.0.7"}, "ib0"),  # node7 itself
        ("127.0.1.1", {"192.0.2.1": "10.1.0.7"}, "ib0"),  # a name that this host does not know
        ("::1", {"node7": "10.0.0.7"}, "eth0"),
        ("10.0.0.7", {"node7": "10.1.0.7"}, None),  # Gloo finds its way
        ("127.0.1.1", {}, "error"),
    ],
)
def test_a_host_whose_name_resolves_to_loopback(
    own: str, way: dict[str, str], gloo: str | None, met: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in /etc/hosts of Debian and Ubuntu. `way`: this host's address on the route to another
    host."""

    class Asking(ExitStack):
        def connect(self, address: tuple[str, int]) -> None:
            if address[0] not in way:
                raise OSError("no such way")
            self.here = way[address[0]]

        def getsockname(self) -> tuple[str, int]:
            return self.here, 1234

    lines = {"lo": "127.0.0.1", "eth0": "10.0.0.7", "ib0": "10.1.0.7"}
    interfaces = {name: [Address(socket.AF_INET, address)] for name, address in lines.items()}
    monkeypatch.setattr(rendezvous.psutil, "net_if_addrs", lambda: interfaces)
    monkeypatch.setattr(rendezvous.socket, "socket", lambda *_: Asking())
    monkeypatch.setattr(rendezvous.socket, "getaddrinfo", lambda *_: [(0, 0, 0, "", (own, 0))])
    world = a_world(1, 4, local_size=2)
    # Removed after the test, whatever it is set to.
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    rendezvous_arguments(world)
    assert os.environ.pop("GLOO_SOCKET_IFNAME") == "lo"
    if gloo == "error":
        with pytest.raises(UserError, match=r"127.0.1.1, .*/etc/hosts, .*GLOO_SOCKET_IFNAME"):
            rendezvous_arguments(world)
        del interfaces["ib0"]  # only one interface is left
        gloo = "eth0"
    rendezvous_arguments(world)
    assert os.environ.get("GLOO_SOCKET_IFNAME") == gloo


def test_launchers_that_need_no_address() -> None:
    arguments = rendezvous_arguments(a_world())
    assert isinstance(arguments.pop("store"), dist.HashStore)
    assert arguments == {"rank": 0, "world_size": 1, "timeout": PATIENCE}
    with pytest.raises(UserError, match=r"torchrun, mpirun or horovodrun --mpi"):
        rendezvous_arguments(a_world(1, 2, launcher="horovodrun"))


def test_each_attempt_of_torchrun_has_a_store_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although torchrun has only one, with keys of killed ranks in it; whichever rank is last."""
    agents = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(agents.port))
    for rank in (1, 2):
        agents.set(f"rank {rank}", "of a rank that was killed while it waited")
    for last in (0, 1, 2, 0):
        with ThreadPoolExecutor() as pool:
            early = [pool.submit(rendezvous_arguments, a_world(i, 3)) for i in {0, 1, 2} - {last}]
            time.sleep(0.3)  # they ask, or wait
            assert not any(answer.done() for answer in early if last == 0)
            answers = [pool.submit(rendezvous_arguments, a_world(last, 3)), *early]
            stores = {answer.result()["rank"]: answer.result()["store"] for answer in answers}
        assert not stores[0].check(["key"]), "an earlier attempt's"
        stores[1].set("key", "value")
        assert [stores[rank].get("key") for rank in range(3)] == [b"value"] * 3
        assert stores[2].timeout == PATIENCE


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    """A free one, at which the ranks are to meet."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    return port


def meet(launcher: str, timeout: timedelta = PATIENCE, **place: int) -> dist.Store:
    """Let two ranks meet, of which rank 1 comes first; return rank 0's store."""
    worlds = [a_world(rank, 2, launcher=launcher, **place) for rank in range(2)]
    with ThreadPoolExecutor() as pool:
        first = pool.submit(rendezvous_arguments, worlds[1], timeout=timeout)
        found = [rendezvous_arguments(worlds[0], timeout=timeout), first.result(60)]
    assert [arguments["rank"] for arguments in found] == [0, 1]
    store, other_store = (arguments["store"] for arguments in found)
    store.set("key", "value")
    assert other_store.get("key") == b"value"
    assert store.timeout == other_store.timeout == timeout
    return store


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun", "srun"])
def test_an_address_that_the_user_gives(launcher: str, port: int) -> None:
    meet(launcher)


def test_who_chooses_gloo_s_interface_still_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Horovod's ranks do so while they wait: the watch still says for whom."""
    monkeypatch.setattr(rendezvous.watch, "begin", begin := Mock())
    rendezvous.prepare_gloo(a_world(0, 2))
    assert not begin.called


@pytest.mark.parametrize(
    ("here", "missing", "message"),
    [
        (0, [1, 2], "rank 0 of 3 still waits for rank 1, 2 .*MASTER_ADDR=127.0.0.1 .*all start"),
        (1, [0], r"MASTER_PORT=\d+: rank 1 cannot meet the others there"),
    ],
)
def test_ranks_that_do_not_come(
    here: int, missing: list[int], message: str, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The waiting rank knows which are missing: after a minute its watchdog prints them."""
    told: list[Callable[[], str]] = []
    monkeypatch.setattr(rendezvous.watch, "begin", lambda task, late=str: told.append(late))
    who = f"still waits for rank {', '.join(map(str, missing))} "
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(rendezvous_arguments, a_world(here, 3), timeout=timedelta(seconds=3))
        while not (told and who in told[-1]()) and not waiting.done():
            time.sleep(0.01)
        assert not waiting.done()
        with pytest.raises(UserError, match=message):
            waiting.result(60)


@pytest.mark.parametrize(
    ("launcher", "given", "missing"),
    [
        ("torchrun", {}, "MASTER_ADDR and MASTER_PORT"),
        ("torchrun", {"MASTER_ADDR": "node7"}, "MASTER_PORT"),
        ("torchrun", {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": "1"}, "MASTER_ADDR"),
        ("srun", {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}, "SLURM_STEP_NODELIST"),
        ("srun", {"SLURM_STEP_NODELIST": "n[1-2]"}, "SLURM_JOB_ID and SLURM_STEP_ID"),
    ],
)
def test_half_a_set_of_variables_is_refused_at_once(
    launcher: str, given: dict[str, str], missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    words = f"without {missing} the ranks cannot meet; start them with {launcher}"
    with pytest.raises(UserError, match=words):
        rendezvous_arguments(a_world(0, 2, launcher=launcher))


STEPS = count()


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A step on this host; returns its ports."""
    for name, value in variables_of(os.getpid(), next(STEPS)).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ddp, "ANSWER_SECONDS", 0.1)
    return slurm_address(os.environ)[1]


def tell_once(listener: socket.socket, words: bytes) -> None:
    asking, _ = listener.accept()
    asking.sendall(words)
    asking.recv(100)


def test_slurm_with_ports_that_others_took(step: list[int]) -> None:
    """A server there may be silent, an sshd, or of the same step of another job. The store waits as
    long as the process group, which depends on --stall-timeout."""
    timeout = ddp.patience(Config(stall_timeout=3600))
    assert timeout > max(PATIENCE, timedelta(seconds=3600))
    words = [b"", b"SSH-2.0-OpenSSH\r\n", b"DDP of job 1.0.0 at 29500\n"]
    with ExitStack() as others:
        for port, told in zip(step, words, strict=False):
            listener = others.enter_context(socket.create_server(("127.0.0.1", port)))
            Thread(target=tell_once, args=(listener, told), daemon=True).start()
        meet("srun", timeout)


def test_slurm_s_store_listens_at_the_chosen_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """On several hosts; the other ranks learn its address where they ask for the port."""
    for name, value in variables_of(os.getpid(), next(STEPS), "127.0.0.1").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(rendezvous, "own_addresses", lambda: {"127.0.0.5": "lo"})
    store = meet("srun", local_size=1)
    listening = [here.laddr for here in psutil.net_connections("tcp") if here.status == "LISTEN"]
    assert [address.ip for address in listening if address.port == store.port] == ["127.0.0.5"]


def test_slurm_without_a_free_port(step: list[int]) -> None:
    with ExitStack() as others, pytest.raises(UserError, match="MASTER_PORT"):
        for port in step:
            others.enter_context(socket.create_server(("127.0.0.1", port)))
        rendezvous_arguments(a_world(0, 2, launcher="srun"))


def test_slurm_without_a_rank_0(step: list[int]) -> None:
    with pytest.raises(UserError, match=r"rank 0 was not found on 127.0.0.1.*did it start"):
        rendezvous_arguments(a_world(1, 2, launcher="srun"), timeout=timedelta(seconds=0.1))


Address = namedtuple("Address", "family address")


def fake_mpi(monkeypatch: pytest.MonkeyPatch, size: int) -> Mock:
    """Stands in for MPI's world of which this process is rank 0; returns its communicator."""
    comm = Mock(size=size, bcast=Mock(side_effect=lambda value, root: value))
    monkeypatch.setitem(sys.modules, "mpi4py", Mock(MPI=Mock(COMM_WORLD=comm)))
    return comm


def test_mpirun(monkeypatch: pytest.MonkeyPatch) -> None:
    comm = fake_mpi(monkeypatch, size=2)
    arguments = rendezvous_arguments(a_world(0, 2, launcher="mpirun"))
    store = arguments.pop("store")
    assert arguments == {"rank": 0, "world_size": 2, "timeout": PATIENCE}
    assert store.timeout == PATIENCE
    (sent,) = comm.bcast.call_args.args
    assert sent == ("127.0.0.1", store.port)  # both ranks are on this host
    sockets = psutil.Process().net_connections()
    listening = [here.laddr for here in sockets if here.status == "LISTEN"]
    assert sent in listening and all(ip == "127.0.0.1" for ip, _ in listening)
    store.set("key", "value")
    assert dist.TCPStore("127.0.0.1", store.port, 2, is_master=False).get("key") == b"value"


def test_mpi4py_that_is_missing_or_of_another_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    """Built for another MPI, it sees a world of one rank: two copies would train."""
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(UserError, match="pip install mpi4py, or start with torchrun"):
        rendezvous_arguments(a_world(0, 2, launcher="mpirun"))
    fake_mpi(monkeypatch, size=1)
    with pytest.raises(UserError, match=r"^mpirun started .* one of 2.*built for another MPI"):
        rendezvous_arguments(a_world(0, 2, launcher="mpirun"))


def test_own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    interfaces = {
        "eth0": [Address(socket.AF_INET6, "fe80::1"), Address(socket.AF_INET, "10.0.0.7")],
        "ib0": [Address(socket.AF_INET6, "fe80::2")],
    }
    monkeypatch.setattr(rendezvous.psutil, "net_if_addrs", lambda: interfaces)
    assert rendezvous._own_address() == socket.gethostname()
    for chosen, expected in (("^docker0,lo", socket.gethostname()), ("eth0", "10.0.0.7")):
        monkeypatch.setenv(
            "NCCL_SOCKET_IFNAME", chosen
        )  # a name, or a list that only NCCL understands
        rendezvous.prepare_gloo(a_world(0, 4, local_size=2))
        assert rendezvous._own_address() == expected
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0,eth0")
    assert rendezvous._own_address() == "10.0.0.7"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    with pytest.raises(UserError, match="=ib0: has no IPv4 address"):
        rendezvous._own_address()
    for given, unknown in (("eth9", "eth9"), ("eth0,wlan0", "wlan0")):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", given)
        with pytest.raises(UserError, match=f"={given}: .* interface {unknown}; it has eth0, ib0"):
            rendezvous.prepare_gloo(a_world(0, 4, local_size=2))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # counts as not set, as in Gloo
    assert rendezvous._own_address() == socket.gethostname()
