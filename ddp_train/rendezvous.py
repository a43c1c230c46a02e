"""The rendezvous of a DDP run's ranks, under any launcher (the user never sets MASTER_ADDR), and
which backend of torch.distributed carries their messages, or why it cannot."""

import os
import re
import socket
import time
from contextlib import suppress
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from recipe import watch
from recipe.errors import UserError
from recipe.rendezvous import (
    TASK,
    awaiting,
    call_roll,
    keep_gloo_off_loopback,
    launcher_values,
    prepare_gloo,
    server_address,
    start_mpi,
    store_at,
    store_by_environment,
)
from recipe.settings.config import Config
from recipe.watch import ENGINE_TIMEOUT_S, engine_timeout
from recipe.world import World

# Under srun: the time limit for an answer at a port, and a rank's confirmation of the answer.
ANSWER_SECONDS, THANKS = 2.0, b"thanks"
SLURM_STEP = ("SLURM_STEP_NODELIST", "SLURM_JOB_ID", "SLURM_STEP_ID")
PATIENCE = timedelta(seconds=ENGINE_TIMEOUT_S)
BACKENDS = {
    "nccl": ("NCCL", "cpu:gloo,cuda:nccl"),  # Gloo for tensors in the CPU's memory
    "gloo": ("Gloo", "gloo"),
    "mpi": ("MPI", "mpi4py"),
}
MPI_LEVELS = (
    "MPI_THREAD_SINGLE",
    "MPI_THREAD_FUNNELED",
    "MPI_THREAD_SERIALIZED",
    "MPI_THREAD_MULTIPLE",
)


def rendezvous_arguments(
    world: World, backend: str = "gloo", timeout: timedelta = PATIENCE
) -> dict[str, Any]:
    """Return the arguments of `init_process_group` for the launcher that started this process.
    `timeout` is how long a rank waits for another one, which may need long to load torch from a
    shared file system, or to list its data."""
    watch.begin(TASK)
    prepare_gloo(world)
    arguments: dict[str, Any] = {"rank": world.rank, "world_size": world.size, "timeout": timeout}
    if world.size == 1 or backend == "mpi4py":  # MPI's ranks know each other
        return {"store": dist.HashStore(), **arguments}
    kind = world.started_by.rendezvous
    if not kind:
        raise UserError(
            f"{world.started_by.shown} started this process and gives DDP no address to meet at: "
            "start ddp_train/train.py with torchrun, mpirun or horovodrun --mpi"
        )
    first_host = os.environ.get("MASTER_ADDR", "")
    if kind == "environment":
        arguments["store"] = store_by_environment(world, timeout)
    elif first_host:
        port = os.environ.get("MASTER_PORT", "29500")
        arguments["store"] = store_at(first_host, port, world, timeout)
    else:
        store_through = {"Slurm": _store_through_slurm, "MPI": _store_through_mpi}
        arguments["store"], first_host = store_through[kind](world, timeout)
    keep_gloo_off_loopback(world, first_host)
    return arguments


def patience(config: Config) -> timedelta:
    """Return how long the process group waits for a rank: longer than the watch does, which ends
    the run."""
    return timedelta(seconds=engine_timeout(config.stall_timeout))


def slurm_address(environ: os._Environ[str] | dict[str, str]) -> tuple[str, list[int], bytes]:
    """Return the step's first node; the ports at which its rank 0 may announce where the ranks
    meet; and the text that identifies the step, since another job may use any of the ports."""
    # The nodes are written as in rack[1-2]n[003-006,9],gpu1.
    nodes, job, step = (environ[name] for name in SLURM_STEP)
    # The list up to its first comma outside brackets, with the first number of each bracket.
    node = re.match(r"(\[[^\]]*\]|[^\[,])+", nodes)
    assert node is not None, nodes
    first = re.sub(r"\[(\w+)[^\]]*\]", r"\1", node[0])
    start = int(job) * 101 + int(step)
    ports = [20_000 + (start + number * 1_499) % 12_000 for number in range(8)]
    mark = f"DDP of job {job}.{step}.{environ.get('SLURM_RESTART_COUNT', '0')} at "
    return first, ports, mark.encode()


def _store_through_slurm(world: World, timeout: timedelta) -> tuple[dist.Store, str]:
    """Return a store on a free port of rank 0's host, when all ranks have come, and that host. Rank
    0 announces it at the first free one of several ports, which all ranks compute from the numbers
    of job and step."""
    launcher_values(world, *SLURM_STEP)
    node, ports, mark = slurm_address(os.environ)
    host = "127.0.0.1" if world.local_size == world.size else node
    if world.is_first:
        store, reached_at = _serve_store(world, timeout)
        if reached_at == socket.gethostname():
            reached_at = node
        answer = mark + f"{reached_at} {store.port}".encode()
        _announce(answer, host, ports, world.size - 1)
    else:
        with awaiting(world, [0]):
            host, port = _ask_for_store(host, ports, mark, timeout.total_seconds())
            store = dist.TCPStore(host, port, world.size, is_master=False, timeout=timeout)
    call_roll(store, world, timeout)
    return store, node


def _announce(answer: bytes, host: str, ports: list[int], ranks: int) -> None:
    """Give this many ranks the `answer` at the first free port; UserError if none is free."""
    for port in ports:
        with suppress(OSError):
            listener = socket.create_server((host if host == "127.0.0.1" else "", port))
            Thread(target=_tell, args=(listener, answer, ranks), daemon=True).start()
            return
    raise UserError(
        f"{host}: no port of {', '.join(map(str, ports))} is free for the ranks to meet at; set "
        "MASTER_ADDR and MASTER_PORT"
    )


def _tell(listener: socket.socket, answer: bytes, ranks: int) -> None:
    """Answer each connection, until this many ranks have confirmed."""
    with listener:
        while ranks:
            asking, _ = listener.accept()
            with asking, suppress(OSError):
                asking.settimeout(ANSWER_SECONDS)
                asking.sendall(answer + b"\n")
                ranks -= asking.recv(len(THANKS)) == THANKS


def _ask_for_store(host: str, ports: list[int], mark: bytes, seconds: float) -> tuple[str, int]:
    """Return host and port of the store. UserError if no process at `ports` gives them within
    `seconds`."""
    deadline, error = time.monotonic() + seconds, OSError("other jobs answer there")
    while time.monotonic() < deadline:
        for port in ports:
            try:
                with socket.create_connection((host, port), ANSWER_SECONDS) as asking:
                    line = asking.makefile("rb").readline(300)
                    if line.startswith(mark) and line.endswith(b"\n"):
                        asking.sendall(THANKS)
                        reached_at, _, store_port = line[len(mark) :].decode().rpartition(" ")
                        return reached_at, int(store_port)
            except OSError as failed:
                error = failed
        time.sleep(0.2)
    raise UserError(
        f"rank 0 was not found on {host} in {seconds:.0f} s, at ports "
        f"{', '.join(map(str, ports))} ({error}): did it start, and do the nodes reach each other?"
    )


def _store_through_mpi(world: World, timeout: timedelta) -> tuple[dist.Store, str]:
    """Return a store on a free port of rank 0's host, and that host. MPI sends its address to all
    ranks."""
    comm = start_mpi(world, "start with torchrun").COMM_WORLD
    address: tuple[str, int] | None = None
    if world.is_first:
        store, host = _serve_store(world, timeout)
        address = (host, store.port)
    host, port = comm.bcast(address, root=0)
    if not world.is_first:
        store = dist.TCPStore(host, port, world.size, is_master=False, timeout=timeout)
    return store, host


def _serve_store(world: World, timeout: timedelta) -> tuple[dist.TCPStore, str]:
    """Return a store on a free port of this host, at the chosen interface if there is one, and the
    address at which other hosts reach this one."""
    host, listens_at = server_address(world)
    listener = socket.create_server((listens_at, 0))  # the store itself would listen everywhere
    store = dist.TCPStore(
        host,
        listener.getsockname()[1],
        world.size,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listener.detach(),
    )
    return store, host


# -- What carries the messages ---------------------------------------------------------------------


def choose_transport(config: Config, world: World, device: torch.device) -> tuple[str, str]:
    """Return what carries the gradients, by its name in a run's records, and torch's backend.

    UserError for MPI if MPI did not start this process, if tensors are on a GPU, or if MPI cannot
    be called from several threads.
    """
    default = "nccl" if device.type == "cuda" else "gloo"
    transport = default if config.transport == "auto" else config.transport
    if transport == "mpi":
        if default == "nccl":
            raise UserError(
                "--transport mpi: DDP over MPI sends only tensors in the CPU's memory, and this "
                "run is on GPUs; use nccl, or add --no-cuda"
            )
        _prepare_mpi_backend(world)
    return BACKENDS[transport]


def _prepare_mpi_backend(world: World) -> None:
    if world.launcher != "none" and not world.started_by.starts_mpi:
        raise UserError(
            f"--transport mpi: {world.started_by.shown or world.launcher} started this process, "
            "not MPI; start ddp_train/train.py with mpirun or horovodrun --mpi"
        )
    mpi = start_mpi(world, "leave out --transport mpi")
    level = mpi.Query_thread()
    library = mpi.Get_library_version().split(",")[0].strip("\0")
    if level < mpi.THREAD_MULTIPLE:
        raise UserError(
            f"--transport mpi: {library} gives {MPI_LEVELS[level]}, and DDP needs "
            "MPI_THREAD_MULTIPLE, since a separate thread sends its messages; use an MPI that was "
            "built with it, or leave out --transport mpi"
        )
    import ddp_train.mpi_backend  # noqa: F401  it registers itself, and needs a prepared MPI
