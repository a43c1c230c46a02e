"""Where the ranks of a DDP run meet, under whichever launcher; nobody types MASTER_ADDR."""

import os
import re
import socket
from typing import Any

import psutil
import torch.distributed as dist

from recipe.errors import UserError
from recipe.world import World, lone_copy_message, prepare_mpi


def meeting_point(world: World) -> dict[str, Any]:
    """Arguments of `init_process_group` for the launcher that started this process."""
    # Also where NCCL carries the gradients Gloo carries what lies in the CPU's memory.
    interface = os.environ.get("NCCL_SOCKET_IFNAME", "").removeprefix("=")
    if interface in psutil.net_if_addrs():  # and no list of prefixes
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if world.launcher == "none":
        return {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    if world.launcher == "horovodrun":
        raise UserError(
            "horovodrun over Gloo started this process and tells DDP no address to meet at: start "
            "ddp_train/train.py "
            "with torchrun, mpirun or horovodrun --mpi"
        )
    if world.launcher == "torchrun":
        return {"init_method": "env://"}
    if "MASTER_ADDR" in os.environ:
        address = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ.get('MASTER_PORT', '29500')}"
        return {"init_method": address, "rank": world.rank, "world_size": world.size}
    if world.launcher == "slurm":
        return {
            "init_method": slurm_address(os.environ),
            "rank": world.rank,
            "world_size": world.size,
        }
    return {"store": _store_through_mpi(world), "rank": world.rank, "world_size": world.size}


def slurm_address(environ: os._Environ[str] | dict[str, str]) -> str:
    """The step's first node, and a port that all its ranks can work out from the job's and the
    step's number."""
    nodes = environ["SLURM_STEP_NODELIST"]  # such as rack[1-2]n[003-006,9],gpu1
    # The list up to its first comma outside brackets, and of each bracket the first number.
    node = re.match(r"(\[[^\]]*\]|[^\[,])+", nodes)
    assert node is not None, nodes
    first = re.sub(r"\[(\w+)[^\]]*\]", r"\1", node[0])
    port = 20_000 + (int(environ["SLURM_JOB_ID"]) * 101 + int(environ["SLURM_STEP_ID"])) % 12_000
    return f"tcp://{first}:{port}"


def _store_through_mpi(world: World) -> dist.Store:
    """A store on a free port of rank 0's host; MPI carries its address to the other ranks."""
    prepare_mpi(world)
    try:
        from mpi4py import MPI
    except ImportError:
        raise UserError(
            f"{world.launcher} started this process, and DDP needs mpi4py there to meet: pip "
            "install mpi4py, or start with torchrun"
        ) from None
    comm = MPI.COMM_WORLD
    remedy = (
        "mpi4py was built for another MPI: reinstall it with this mpirun's mpicc on PATH, or start "
        "with torchrun"
    )
    if message := lone_copy_message(world, comm.size, remedy):
        raise UserError(message)
    address: tuple[str, int] | None = None
    if world.is_first:
        host = "127.0.0.1" if world.local_size == world.size else _own_address()
        store = dist.TCPStore(host, 0, world.size, is_master=True, wait_for_workers=False)
        address = (host, store.port)
    host, port = comm.bcast(address, root=0)
    return store if world.is_first else dist.TCPStore(host, port, world.size, is_master=False)


def _own_address() -> str:
    """This host as the others reach it: by the interface that the user chose for Gloo or NCCL, else
    by its name."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("NCCL_SOCKET_IFNAME")
    if interface is None:
        return socket.gethostname()
    for address in psutil.net_if_addrs().get(interface, []):
        if address.family == socket.AF_INET:
            return address.address
    raise UserError(
        f"GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME={interface}: this host has no such interface "
        "with an IPv4 address; it has " + ", ".join(psutil.net_if_addrs())
    )
