"""Where the ranks of a DDP run meet, under any launcher; the user never sets MASTER_ADDR."""

import ipaddress
import os
import re
import socket
import time
from contextlib import suppress
from datetime import timedelta
from threading import Thread
from typing import Any

import psutil
import torch.distributed as dist

from recipe.config import Config
from recipe.errors import UserError
from recipe.watch import ENGINE_TIMEOUT_S, engine_timeout
from recipe.world import World, lone_copy_message, prepare_gloo, prepare_mpi

# Under srun: how long the other ranks look for rank 0, which may be late to load torch from a
# shared file system, or to list its data; how long a process at a port may take to answer; what a
# rank says for it.
MEETING_SECONDS, ANSWER_SECONDS, THANKS = ENGINE_TIMEOUT_S, 2.0, b"thanks"


def meeting_point(world: World, backend: str = "gloo") -> dict[str, Any]:
    """Arguments of `init_process_group` for the launcher that started this process."""
    # Also where NCCL carries the gradients Gloo carries what lies in the CPU's memory.
    interface = os.environ.get("NCCL_SOCKET_IFNAME", "").removeprefix("=")
    if interface in psutil.net_if_addrs():  # and no list of prefixes
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    prepare_gloo(world)
    if world.launcher == "none" or backend == "mpi4py":  # MPI's ranks know each other
        return {"store": dist.HashStore(), "rank": world.rank, "world_size": world.size}
    meeting = world.started_by.meeting
    if not meeting:
        raise UserError(
            f"{world.started_by.shown} started this process and gives DDP no address to meet at: "
            "start ddp_train/train.py with torchrun, mpirun or horovodrun --mpi"
        )
    first_host = os.environ.get("MASTER_ADDR", "")
    arguments: dict[str, Any] = {"rank": world.rank, "world_size": world.size}
    if meeting == "environment":
        arguments = {"init_method": "env://"}
    elif first_host:
        port = os.environ.get("MASTER_PORT", "29500")
        arguments["init_method"] = f"tcp://{first_host}:{port}"
    elif meeting == "Slurm":
        first_host = slurm_address(os.environ)[0]
        arguments["store"] = _store_through_slurm(world)
    else:
        arguments["store"], first_host = _store_through_mpi(world)
    if world.local_size < world.size and "GLOO_SOCKET_IFNAME" not in os.environ:
        _keep_gloo_off_loopback(first_host)
    return arguments


def _keep_gloo_off_loopback(first_host: str) -> None:
    """Name the interface that leads to `first_host` for Gloo, which listens at the address of
    this host's name: on Debian and Ubuntu that is 127.0.1.1, which no other host reaches.

    UserError if there is none.
    """
    name = socket.gethostname()
    own = "127.0.0.1"  # Gloo's address for a host without one
    with suppress(OSError):
        own = str(socket.getaddrinfo(name, None)[0][4][0]).partition("%")[0]
    if not ipaddress.ip_address(own).is_loopback:
        return
    interfaces = _interfaces()
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


def _interfaces() -> dict[str, str]:
    """The interface of each IPv4 address of this host that others may reach."""
    return {
        address.address: interface
        for interface, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family == socket.AF_INET
        and not ipaddress.ip_address(address.address).is_loopback
    }


def patience(config: Config) -> timedelta:
    """How long the process group waits for a rank: until after the watch has ended the run."""
    return timedelta(seconds=engine_timeout(config.stall_timeout))


def slurm_address(environ: os._Environ[str] | dict[str, str]) -> tuple[str, list[int], bytes]:
    """The step's first node, the ports at which its rank 0 may be asked where the ranks meet, and
    the words that identify it: another job may be at any of the ports."""
    nodes = environ["SLURM_STEP_NODELIST"]  # such as rack[1-2]n[003-006,9],gpu1
    # The list up to its first comma outside brackets, and of each bracket the first number.
    node = re.match(r"(\[[^\]]*\]|[^\[,])+", nodes)
    assert node is not None, nodes
    first = re.sub(r"\[(\w+)[^\]]*\]", r"\1", node[0])
    job, step = environ["SLURM_JOB_ID"], environ["SLURM_STEP_ID"]
    start = int(job) * 101 + int(step)
    ports = [20_000 + (start + number * 1_499) % 12_000 for number in range(8)]
    mark = f"DDP of job {job}.{step}.{environ.get('SLURM_RESTART_COUNT', '0')} at "
    return first, ports, mark.encode()


def _store_through_slurm(world: World) -> dist.Store:
    """A store on a free port of rank 0's host, which rank 0 announces at the first free one of
    the ports that all ranks can work out from the job's and the step's number."""
    host, ports, mark = slurm_address(os.environ)
    if world.local_size == world.size:
        host = "127.0.0.1"
    if not world.is_first:
        return dist.TCPStore(host, _ask_for_port(host, ports, mark), world.size, is_master=False)
    store = dist.TCPStore(host, 0, world.size, is_master=True, wait_for_workers=False)
    for port in ports:
        with suppress(OSError):
            listener = socket.create_server((host if host == "127.0.0.1" else "", port))
            answer = mark + str(store.port).encode()
            Thread(target=_tell, args=(listener, answer, world.size - 1), daemon=True).start()
            return store
    raise UserError(
        f"{host}: no port of {', '.join(map(str, ports))} is free for the ranks to meet at; set "
        "MASTER_ADDR and MASTER_PORT"
    )


def _tell(listener: socket.socket, answer: bytes, ranks: int) -> None:
    """Answer each connection, until so many ranks have confirmed."""
    with listener:
        while ranks:
            asking, _ = listener.accept()
            with asking, suppress(OSError):
                asking.settimeout(ANSWER_SECONDS)
                asking.sendall(answer + b"\n")
                ranks -= asking.recv(len(THANKS)) == THANKS


def _ask_for_port(host: str, ports: list[int], mark: bytes) -> int:
    """The port of the store; UserError if no process at `ports` knows it within MEETING_SECONDS."""
    deadline, error = time.monotonic() + MEETING_SECONDS, OSError("other jobs answer there")
    while time.monotonic() < deadline:
        for port in ports:
            try:
                with socket.create_connection((host, port), ANSWER_SECONDS) as asking:
                    line = asking.makefile("rb").readline(100)
                    if line.startswith(mark) and line.endswith(b"\n"):
                        asking.sendall(THANKS)
                        return int(line[len(mark) :])
            except OSError as failed:
                error = failed
        time.sleep(0.2)
    raise UserError(
        f"rank 0 was not found on {host} in {MEETING_SECONDS:.0f} s, at ports "
        f"{', '.join(map(str, ports))} ({error}): did it start, and do the nodes reach each other?"
    )


def start_mpi(world: World, instead: str) -> Any:
    """mpi4py's MPI, initialised; UserError, with what to do `instead`, where it is missing or sees
    other ranks than the launcher has started."""
    prepare_mpi(world)
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # the latter: it finds no library of MPI
        raise UserError(
            f"DDP needs mpi4py here ({error}): pip install mpi4py, or {instead}"
        ) from None
    remedy = (
        "mpi4py was built for another MPI: reinstall it with this mpirun's mpicc on PATH, or "
        f"{instead}"
    )
    if message := lone_copy_message(world, MPI.COMM_WORLD.size, remedy):
        raise UserError(message)
    return MPI


def _store_through_mpi(world: World) -> tuple[dist.Store, str]:
    """A store on a free port of rank 0's host, and that host; MPI carries them to the others."""
    comm = start_mpi(world, "start with torchrun").COMM_WORLD
    address: tuple[str, int] | None = None
    if world.is_first:
        host = "127.0.0.1" if world.local_size == world.size else _own_address()
        # By which address the others come to a host's name is not known; else it listens at one
        # alone, and a listener of the store's own would be open to all networks.
        listener = socket.create_server(("" if host == socket.gethostname() else host, 0))
        store = dist.TCPStore(
            host,
            listener.getsockname()[1],
            world.size,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        address = (host, store.port)
    host, port = comm.bcast(address, root=0)
    if not world.is_first:
        store = dist.TCPStore(host, port, world.size, is_master=False)
    return store, host


def _own_address() -> str:
    """This host as the others reach it: by the interface that the user chose for Gloo or NCCL, else
    by its name."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("NCCL_SOCKET_IFNAME")
    if interface is None:
        return socket.gethostname()
    for address, name in _interfaces().items():
        if name == interface:
            return address
    raise UserError(
        f"GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME={interface}: this host has no such interface "
        "with an IPv4 address; it has " + ", ".join(psutil.net_if_addrs())
    )
