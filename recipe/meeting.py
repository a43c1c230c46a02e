"""How ranks meet: at which interface Gloo listens, by addresses that MPI carries (and no gradient),
at MASTER_ADDR, and for the scripts in baselines/ in a process group or by remote calls. The one
module here that knows torch.distributed: both train.py show such calls themselves.
"""

import ipaddress
import os
import socket
import time
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import msgspec
import psutil
import torch
import torch.distributed as dist

from recipe import watch
from recipe.errors import UserError, refuse
from recipe.nursery import GENERATION
from recipe.settings.config import Config
from recipe.watch import engine_timeout
from recipe.world import World, lone_copy_message, prepare_mpi


def prepare_gloo(world: World) -> None:
    """Choose the interface at which Gloo listens, unless the user has: the one chosen for NCCL,
    beside which Gloo carries what lies in the CPU's memory; or, if all ranks are on one host, the
    loopback, since others have no business with its ports."""
    watch.begin("meeting the other ranks")
    interface = os.environ.get("NCCL_SOCKET_IFNAME", "").removeprefix("=")
    if interface not in psutil.net_if_addrs():  # such as a list of prefixes
        interface = "lo" if world.local_size == world.size else ""
    if interface in psutil.net_if_addrs() and not os.environ.get("GLOO_SOCKET_IFNAME"):
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    refuse_unknown_interfaces("GLOO_SOCKET_IFNAME")


def refuse_unknown_interfaces(variable: str) -> None:
    """UserError if a variable names a network interface that this host lacks; it may hold several,
    with commas."""
    given, there = os.environ.get(variable, ""), psutil.net_if_addrs()
    unknown = [name for name in given.split(",") if name and name not in there]
    told = f"{variable}={given}: this host has no network interface {', '.join(unknown)}"
    refuse((unknown, f"{told}; it has {', '.join(there)}"))


def keep_gloo_off_loopback(world: World, first_host: str) -> None:
    """On several hosts, unless an interface is chosen, name the one that leads to `first_host` for
    Gloo, which listens at the address of this host's name: on Debian and Ubuntu that is 127.0.1.1,
    which no other host reaches.

    UserError if there is none.
    """
    if world.local_size == world.size or os.environ.get("GLOO_SOCKET_IFNAME"):
        return
    name = socket.gethostname()
    own = "127.0.0.1"  # Gloo's address for a host without one
    with suppress(OSError):
        own = str(socket.getaddrinfo(name, None)[0][4][0]).partition("%")[0]
    if not ipaddress.ip_address(own).is_loopback:
        return
    interfaces = own_addresses()
    # On the first host itself its name may stand for 127.0.1.1, too: then the way to the outside,
    # by an address that is nobody's (RFC 5737). Nothing is sent to either.
    found = []
    for other in (first_host, "192.0.2.1"):
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            asking.connect((other, 9))
            found.append(interfaces.get(asking.getsockname()[0]))
    if len(set(interfaces.values())) == 1:
        found += interfaces.values()
    if chosen := next(filter(None, found), None):
        os.environ["GLOO_SOCKET_IFNAME"] = chosen
        return
    raise UserError(
        f"{name}: this host's name resolves to {own}, where other hosts cannot reach it: let "
        "/etc/hosts give it the address that they reach, or set GLOO_SOCKET_IFNAME to the "
        "interface that leads to them; there are " + ", ".join(psutil.net_if_addrs())
    )


def own_addresses() -> dict[str, str]:
    """The interface of each IPv4 address of this host that others may reach."""
    return {
        address.address: interface
        for interface, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family == socket.AF_INET
        and not ipaddress.ip_address(address.address).is_loopback
    }


def start_mpi(world: World, instead: str) -> Any:
    """mpi4py's MPI, initialised; UserError, with what to do `instead`, where it is missing or sees
    other ranks than the launcher has started. What ranks tell each other by its lower-case methods
    travels as JSON: nothing that comes over the network is unpickled."""
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
    if message := lone_copy_message(world, MPI.COMM_WORLD.size, remedy):
        raise UserError(message)
    MPI.pickle.__init__(msgspec.json.encode, msgspec.json.decode)  # type: ignore[misc]
    return MPI


def server_address(world: World) -> tuple[str, str]:
    """Rank 0's host as the others reach it, and where its server is to listen: on one host nobody
    else has business with it. By which address the others come to a host's name is not known."""
    host = "127.0.0.1" if world.local_size == world.size else _own_address()
    return host, "" if host == socket.gethostname() else host


def _own_address() -> str:
    """This host as the others reach it: by the interface that the user chose for Gloo, or for NCCL
    if that is the name of one (see `prepare_gloo`), else by its name."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if not interface:
        return socket.gethostname()
    names = interface.split(",")
    found = [address for address, name in own_addresses().items() if name in names]
    refuse((not found, f"GLOO_SOCKET_IFNAME={interface}: has no IPv4 address that others reach"))
    return found[0]


ASK_AGAIN_S = 0.05  # how often rank 0 looks who asks


@contextmanager
def process_group(config: Config, world: World) -> Iterator[None]:
    """The ranks of `world`, which torchrun has started, as torch's process group. After an error it
    is not taken down (no `finally`): that could wait for ranks which wait for this one."""
    prepare_gloo(world)
    timeout = timedelta(seconds=engine_timeout(config.stall_timeout))
    dist.init_process_group(**meeting_by_environment(world, timeout))
    yield
    dist.destroy_process_group()


def meeting_by_environment(world: World, timeout: timedelta) -> dict[str, Any]:
    """Arguments of `init_process_group` for ranks that meet at MASTER_ADDR and MASTER_PORT.

    A torchrun serves a store there to all of its attempts, and after a restart ranks would find the
    last attempt's addresses in it (pytorch issue 135712): each gets a part of it for itself.
    """
    place = {"rank": world.rank, "world_size": world.size, "timeout": timeout}
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {"init_method": "env://", **place}
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store: dist.Store = dist.TCPStore(*address, world.size, is_master=False, timeout=timeout)
    store = dist.PrefixStore(os.environ.get(GENERATION, ""), store)
    return {"store": dist.PrefixStore(_name_of_attempt(store, world, timeout), store), **place}


def _name_of_attempt(store: dist.Store, world: World, timeout: timedelta) -> str:
    """A name that all ranks of this attempt know, and none of another; its rank 0 makes it.

    TORCHELASTIC_RESTART_COUNT is none: each torchrun counts the failures of its own ranks. Nor can
    a rank tell a name that lies there from one of an attempt before. So it asks by a word that was
    never used, which only a rank 0 that lives now can answer.
    """
    own = uuid.uuid4().hex
    if not world.is_first:
        store.set(f"rank {world.rank}", own)
        name = store.get(own).decode()  # waits for it
        store.add(name, 1)
        return name
    deadline = time.monotonic() + timeout.total_seconds()
    asking = [f"rank {rank}" for rank in range(1, world.size)]
    while store.add(own, 0) < len(asking) and time.monotonic() < deadline:
        for key in filter(lambda key: store.check([key]), asking):
            store.set(store.get(key).decode(), own)
        time.sleep(ASK_AGAIN_S)
    return own


def transport_of(device: torch.device) -> str:
    """What carries the messages of the process group, as the run folder says it."""
    if not dist.is_initialized():
        return "none"
    return "NCCL" if device.type == "cuda" else "Gloo"


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """For figures: the ranks' values added up, in a new tensor; without a process group, one
    process's."""
    total = values.clone()
    if dist.is_initialized():
        dist.all_reduce(total)
    return total


def from_rank_0(values: torch.Tensor) -> torch.Tensor:
    """Rank 0's values, on each rank."""
    if dist.is_initialized():
        dist.broadcast(values, src=0)
    return values


@contextmanager
def remote_calls(config: Config, world: World) -> Iterator[None]:
    """Let each rank of `world` call functions on "rank0", "rank1" and so on. At the end it waits
    for the others; not after an error (no `finally`), for they may wait for this one."""
    from torch.distributed import rpc  # most scripts do without

    prepare_gloo(world)
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
    """Have torch.distributed.rpc listen at the interface that Gloo uses, and at no other, for it
    runs what it is sent. UserError, on several hosts, if none was chosen."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    refuse((
        not interface,
        "RPC runs any code that is sent to its ports: set GLOO_SOCKET_IFNAME to the interface of a "
        "network that only your hosts can reach; there are " + ", ".join(psutil.net_if_addrs()),
    ))  # fmt: skip
    os.environ["TP_SOCKET_IFNAME"] = interface
