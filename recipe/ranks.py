"""How ranks meet at MASTER_ADDR, and what those of a script in baselines/ tell each other for
figures. The one module here that knows torch.distributed: both train.py show such calls themselves.
"""

import os
import time
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist

from recipe.config import Config
from recipe.errors import UserError
from recipe.meeting import prepare_gloo
from recipe.watch import engine_timeout
from recipe.world import World

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
    store = dist.TCPStore(*address, world.size, is_master=False, timeout=timeout)
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
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if not interface:
        raise UserError(
            "RPC runs any code that is sent to its ports: set GLOO_SOCKET_IFNAME to the interface "
            "of a network that only your hosts can reach; there are "
            + ", ".join(psutil.net_if_addrs())
        )
    os.environ["TP_SOCKET_IFNAME"] = interface
