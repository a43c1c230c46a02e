"""The rendezvous, in which ranks find each other: the interface at which Gloo listens, addresses
exchanged over MPI (but no gradients), MASTER_ADDR, and for the scripts in baselines/ a process
group or remote calls. Only this module of recipe/ uses torch.distributed: both train.py show such
calls themselves.
"""

import ipaddress
import os
import socket
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import msgspec
import psutil
import torch
import torch.distributed as dist

from recipe import watch
from recipe.errors import UserError, first_line, refuse
from recipe.rank_forker import GENERATION
from recipe.settings.config import Config
from recipe.watch import engine_timeout
from recipe.world import World, prepare_mpi, waits_for

TASK = "meeting the other ranks"  # as the watch names it
ASK_AGAIN_S = 0.05  # between rank 0's polls for ranks that ask


@contextmanager
def awaiting(world: World, missing: Sequence[int]) -> Iterator[None]:
    """Let the watch name the ranks that are still `missing` if the body, which waits for them,
    takes long. The body may change the list."""
    watch.begin(TASK, lambda: waits_for(world, missing))
    yield
    watch.begin(TASK)


def prepare_gloo(world: World) -> None:
    """Choose the interface at which Gloo listens, unless the user has chosen one. Take the one
    chosen for NCCL, beside which Gloo carries tensors in the CPU's memory; or, if all ranks are on
    one host, the loopback, since no other host needs its ports."""
    _lower_debug_level(world)
    interface = os.environ.get("NCCL_SOCKET_IFNAME", "").removeprefix("=")
    if interface not in psutil.net_if_addrs():  # such as a list of prefixes
        interface = "lo" if world.local_size == world.size else ""
    if interface in psutil.net_if_addrs() and not os.environ.get("GLOO_SOCKET_IFNAME"):
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    refuse_unknown_interfaces("GLOO_SOCKET_IFNAME")


def launcher_values(world: World, *names: str) -> list[str]:
    """Return the values of variables that the launcher sets besides the rank. UserError if one is
    not set."""
    missing = [name for name in names if not os.environ.get(name)]
    if missing:
        raise UserError(
            f"{world.variables()}: without {' and '.join(missing)} the ranks cannot meet; start "
            f"them with {world.launcher}, or unset these to train alone"
        )
    return [os.environ[name] for name in names]


def _lower_debug_level(world: World) -> None:
    """Lower TORCH_DISTRIBUTED_DEBUG=DETAIL: with it torch 2.14 crashes in Gloo's collectives."""
    if dist.get_debug_level() == dist.DebugLevel.DETAIL:
        dist.set_debug_level(dist.DebugLevel.INFO)
        if world.is_first:
            print(
                "warning: TORCH_DISTRIBUTED_DEBUG=DETAIL crashes over Gloo, which also runs beside "
                "NCCL; INFO is used instead",
                flush=True,
            )


def refuse_unknown_interfaces(variable: str) -> None:
    """Raise UserError if a variable names a network interface that this host lacks. It may hold
    several names, with commas between them."""
    given, there = os.environ.get(variable, ""), psutil.net_if_addrs()
    unknown = [name for name in given.split(",") if name and name not in there]
    problem = f"{variable}={given}: this host has no network interface {', '.join(unknown)}"
    if unknown:
        raise UserError(f"{problem}; it has {', '.join(there)}")


def keep_gloo_off_loopback(world: World, first_host: str) -> None:
    """On several hosts, let Gloo use the interface that leads to `first_host`, unless one is chosen
    already. Gloo listens at the address of this host's name: on Debian and Ubuntu that is
    127.0.1.1, which no other host reaches.

    UserError if no such interface is found.
    """
    if world.local_size == world.size or os.environ.get("GLOO_SOCKET_IFNAME"):
        return
    name = socket.gethostname()
    address = "127.0.0.1"  # Gloo's address for a host whose name has none
    with suppress(OSError):
        address = str(socket.getaddrinfo(name, None)[0][4][0]).partition("%")[0]
    if not ipaddress.ip_address(address).is_loopback:
        return
    interfaces = own_addresses()
    # On the first host its own name may also resolve to 127.0.1.1. So the second try is the route
    # to the outside, by an address that nobody has (RFC 5737). No packet is sent to either.
    candidates = []
    for other in (first_host, "192.0.2.1"):
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((other, 9))
            candidates.append(interfaces.get(probe.getsockname()[0]))
    if len(set(interfaces.values())) == 1:
        candidates += interfaces.values()
    if chosen := next(filter(None, candidates), None):
        os.environ["GLOO_SOCKET_IFNAME"] = chosen
        return
    raise UserError(
        f"{name}: this host's name resolves to {address}, where other hosts cannot reach it: "
        "correct its address in /etc/hosts, or set GLOO_SOCKET_IFNAME to the interface that leads "
        "to the other hosts; there are " + ", ".join(psutil.net_if_addrs())
    )


def own_addresses() -> dict[str, str]:
    """Return this host's IPv4 addresses that other hosts may reach, each with its interface."""
    return {
        address.address: interface
        for interface, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family == socket.AF_INET
        and not ipaddress.ip_address(address.address).is_loopback
    }


def start_mpi(world: World, instead: str) -> Any:
    """Return mpi4py's MPI, initialised. UserError, with what to do `instead`, if it is missing or
    sees another number of ranks than the launcher has started.

    Its lower-case methods send objects as JSON: nothing from the network is unpickled.
    """
    prepare_mpi(world)
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # the latter: it finds no library of MPI
        raise UserError(
            f"mpi4py is needed here ({error}): pip install mpi4py, or {instead}"
        ) from None
    remedy = (
        "mpi4py was built for another MPI: reinstall it with this mpirun's mpicc on PATH, or "
        f"{instead}"
    )
    refuse_lone_copies(world, MPI.COMM_WORLD.size, remedy)
    MPI.pickle.__init__(msgspec.json.encode, msgspec.json.decode)  # type: ignore[misc]
    return MPI


def refuse_lone_copies(world: World, engine_size: int, remedy: str) -> None:
    """Raise UserError if the engine sees another number of ranks than the launcher started.

    N such processes would each train the whole data set alone, at N times the cost, and overwrite
    each other's files; nothing would look wrong.
    """
    refuse(
        (
            engine_size != world.size and world.launcher == "none",
            f"the engine sees a world of {engine_size}, but the launcher of this process has set "
            f"none of the variables that give its rank. {remedy}",
        ),
        (
            engine_size != world.size and world.launcher != "none",
            f"{world.launcher} started this process as one of {world.size}, but the engine sees a "
            f"world of {engine_size}: it would train as {world.size} independent copies. {remedy}, "
            f"or unset {' and '.join(world.started_by.variables[:2])} if another job has left them",
        ),
    )


def server_address(world: World) -> tuple[str, str]:
    """Return rank 0's host as the other ranks reach it, and the address at which its server is to
    listen.

    If all ranks are on one host, both are the loopback, since no other host needs the server. The
    second is "", all addresses, if the first is a name: it is unknown to which address other hosts
    resolve it.
    """
    host = "127.0.0.1" if world.local_size == world.size else _own_address()
    return host, "" if host == socket.gethostname() else host


def _own_address() -> str:
    """Return this host as other hosts reach it: the address of the interface that the user chose
    for Gloo, or for NCCL if that names an interface (see `prepare_gloo`), else the host's name."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if not interface:
        return socket.gethostname()
    names = interface.split(",")
    addresses = [address for address, name in own_addresses().items() if name in names]
    if not addresses:
        raise UserError(
            f"GLOO_SOCKET_IFNAME={interface}: has no IPv4 address that other hosts can reach; name "
            "another interface"
        )
    return addresses[0]


@contextmanager
def process_group(config: Config, world: World) -> Iterator[None]:
    """Join the ranks of `world`, which torchrun has started, in torch's process group. After an
    error it is not destroyed (no `finally`): that could wait for ranks that wait for this one."""
    watch.begin(TASK)
    prepare_gloo(world)
    timeout = timedelta(seconds=engine_timeout(config.stall_timeout))
    store = store_by_environment(world, timeout)
    dist.init_process_group(store=store, rank=world.rank, world_size=world.size, timeout=timeout)
    yield
    dist.destroy_process_group()


def store_by_environment(world: World, timeout: timedelta) -> dist.Store:
    """Return the store in which ranks meet that know MASTER_ADDR and MASTER_PORT.

    torchrun serves one store there to all of its attempts. After a restart ranks would find the
    last attempt's addresses in it (pytorch issue 135712), so each attempt gets its own part of it.
    """
    host, port = launcher_values(world, "MASTER_ADDR", "MASTER_PORT")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return store_at(host, port, world, timeout)
    store: dist.Store = dist.TCPStore(host, int(port), world.size, is_master=False, timeout=timeout)
    store = dist.PrefixStore(os.environ.get(GENERATION, ""), store)
    return dist.PrefixStore(_name_of_attempt(store, world, timeout), store)


def store_at(host: str, port: str, world: World, timeout: timedelta) -> dist.Store:
    """Return the store that rank 0 serves at this address, when all ranks have come. UserError if
    it cannot be served or reached."""
    try:
        with awaiting(world, [] if world.is_first else [0]):
            store = dist.TCPStore(
                host,
                int(port),
                world.size,
                is_master=world.is_first,
                timeout=timeout,
                wait_for_workers=False,
                multi_tenant=True,
            )
    except (ValueError, dist.DistError) as error:
        raise UserError(
            f"MASTER_ADDR={host} MASTER_PORT={port}: rank {world.rank} cannot meet the others "
            f"there ({first_line(error)}); correct these, or start the ranks with torchrun"
        ) from error
    call_roll(store, world, timeout)
    return store


def call_roll(store: dist.Store, world: World, timeout: timedelta) -> None:
    """Sign in at the store; on rank 0, wait until all ranks have done so."""
    store.set(f"rank {world.rank} is here", "")
    if world.is_first:
        await_ranks(world, timeout, lambda rank: store.check([f"rank {rank} is here"]))


def await_ranks(world: World, timeout: timedelta, has_come: Callable[[int], bool]) -> None:
    """On rank 0, wait until all other ranks have come. UserError if some have not in time."""
    deadline = time.monotonic() + timeout.total_seconds()
    missing = list(range(1, world.size))
    with awaiting(world, missing):
        while True:
            missing[:] = [rank for rank in missing if not has_come(rank)]
            if not missing:
                return
            if time.monotonic() > deadline:
                raise UserError(waits_for(world, missing))
            time.sleep(ASK_AGAIN_S)


def _name_of_attempt(store: dist.Store, world: World, timeout: timedelta) -> str:
    """Return a name that rank 0 makes for this attempt, and that no other attempt has.

    TORCHELASTIC_RESTART_COUNT cannot be used: each torchrun counts the failures of its own ranks.
    And a rank cannot tell this attempt's name in the store from an earlier attempt's. So each rank
    asks with a key that was never used, which only this attempt's rank 0 can answer.
    """
    unique = uuid.uuid4().hex
    if not world.is_first:
        store.set(f"rank {world.rank}", unique)
        with awaiting(world, [0]):
            name = store.get(unique).decode()  # waits for it
        store.set(f"{name} {world.rank}", "")
        return name

    def answer(rank: int) -> bool:
        """Answer the rank, if it asks; return whether it has got the answer."""
        if store.check([f"rank {rank}"]):
            store.set(store.get(f"rank {rank}").decode(), unique)
        return store.check([f"{unique} {rank}"])

    await_ranks(world, timeout, answer)
    return unique


def transport_of(device: torch.device) -> str:
    """Return what carries the process group's messages, as the run folder names it."""
    if not dist.is_initialized():
        return "none"
    return "NCCL" if device.type == "cuda" else "Gloo"


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of the ranks' values in a new tensor, for figures; without a process group, of
    this process alone."""
    total = values.clone()
    if dist.is_initialized():
        dist.all_reduce(total)
    return total


def from_rank_0(values: torch.Tensor) -> torch.Tensor:
    """Return rank 0's values on each rank."""
    if dist.is_initialized():
        dist.broadcast(values, src=0)
    return values


@contextmanager
def remote_calls(config: Config, world: World) -> Iterator[None]:
    """Let each rank of `world` call functions on "rank0", "rank1" and so on. At the end, wait for
    the other ranks; not after an error (no `finally`), since they may wait for this one."""
    from torch.distributed import rpc  # few scripts need it

    watch.begin(TASK)
    prepare_gloo(world)
    launcher_values(world, "MASTER_ADDR", "MASTER_PORT")
    bind_rpc()
    warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)  # torch's own call
    rpc.init_rpc(
        f"rank{world.rank}",
        rank=world.rank,
        world_size=world.size,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
            init_method="env://", rpc_timeout=engine_timeout(config.stall_timeout)
        ),
    )
    yield
    rpc.shutdown()


def bind_rpc() -> None:
    """Let torch.distributed.rpc listen only at the interface that Gloo uses, since it runs any code
    that it is sent. UserError, on several hosts, if none was chosen."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if not interface:
        raise UserError(
            "RPC runs any code that is sent to its ports: set GLOO_SOCKET_IFNAME to the interface "
            "of a network that only your hosts can reach; there are "
            + ", ".join(psutil.net_if_addrs())
        )
    os.environ["TP_SOCKET_IFNAME"] = interface
