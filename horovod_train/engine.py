"""Import Horovod, or report clearly why that failed, and do what its start needs beside
`hvd.init()`."""

import os
import time
from threading import Thread
from typing import Any

import torch

from recipe import rendezvous, watch
from recipe.errors import UserError, fail, refuse
from recipe.settings.config import Config
from recipe.world import World, prepare_mpi, read_world, waits_for

try:
    import horovod.torch as hvd
except ImportError as error:
    build = "python horovod_train/build_horovod.py"
    fail(read_world(), f"error: Horovod cannot be imported ({error}); build it: {build}")

# The variables that select Horovod's transports: for its controller, and for the gradients.
SELECTORS = ("HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS")
# How a gradient is converted before it is sent, by --wire-format.
COMPRESSION = {"fp32": hvd.Compression.none, "fp16": hvd.Compression.fp16}
POLL_SECONDS = 0.0002  # an exchange takes a hundred times as long


def prepare(config: Config, world: World) -> None:
    """Set the variables that `hvd.init()` reads. UserError if the launcher, or this build of
    Horovod, lacks the requested transport."""
    watch.begin(rendezvous.TASK, lambda: waits_for(world, None))
    prepare_mpi(world)
    if config.profile_steps:
        os.environ["HOROVOD_TIMELINE"] = "DYNAMIC"  # else hvd.start_timeline fails
    if config.deterministic:
        os.environ["HOROVOD_FUSION_THRESHOLD"] = "0"  # which gradients fuse depends on timing
    if config.transport in ("gloo", "mpi"):
        _ask_for(config.transport, world)


def _ask_for(transport: str, world: World) -> None:
    is_built = hvd.gloo_built() if transport == "gloo" else hvd.mpi_built()
    if not is_built:
        raise UserError(
            f"--transport {transport}: this Horovod was built without it; build it again: python "
            "horovod_train/build_horovod.py"
        )
    if transport == "mpi" and world.launcher == "horovodrun":  # over MPI it is mpirun
        raise UserError(
            f"--transport mpi: {world.started_by.shown} started this process, not MPI; start it "
            "with mpirun or horovodrun --mpi"
        )
    for name in SELECTORS:  # Horovod crashes if its controller and its sums use different ones
        if os.environ.setdefault(name, transport).lower() != transport:
            raise UserError(f"--transport {transport}: {name} says otherwise; unset it")
    if transport == "gloo" and world.started_by.starts_mpi:
        rendezvous_through_mpi(world)


def rendezvous_through_mpi(world: World) -> None:
    """Set the variables through which Horovod's ranks find each other. For them rank 0 runs a small
    server until it ends. UserError if MPI cannot send the server's address, or if other hosts would
    not reach it.

    Horovod 0.28.1 crashes in its first all-reduce if its controller uses MPI and its sums use Gloo.
    So Gloo does both, as under horovodrun --gloo: ranks read their place in the world from
    variables, and find each other through the server.
    """
    from horovod.runner.common.util.hosts import SlotInfo  # here: these imports are slow
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    comm = rendezvous.start_mpi(world, "start it with horovodrun --gloo").COMM_WORLD
    rendezvous.prepare_gloo(world)
    rendezvous.refuse_unknown_interfaces("HOROVOD_GLOO_IFACE")
    # The ranks with the same local rank, one per host.
    peers = [
        rank
        for rank, local in enumerate(comm.allgather(world.local_rank))
        if local == world.local_rank
    ]
    slot = SlotInfo(
        hostname=world.host,
        rank=world.rank,
        local_rank=world.local_rank,
        cross_rank=peers.index(world.rank),
        size=world.size,
        local_size=world.local_size,
        cross_size=len(peers),
    )
    slots = comm.gather(slot, root=0)
    address: tuple[str, int] | None = None
    if world.is_first:
        host, listens_at = rendezvous.server_address(world)
        server = RendezvousHTTPServer((listens_at, 0), RendezvousHandler, 0)
        server.daemon_threads = True  # they do not keep this process alive
        server.init([SlotInfo(**fields) for fields in slots])  # gathered as JSON
        Thread(target=server.serve_forever, daemon=True).start()
        address = host, server.server_port
    host, port = comm.bcast(address, root=0)
    rendezvous.keep_gloo_off_loopback(world, host)
    os.environ |= {f"HOROVOD_{name.upper()}": str(value) for name, value in vars(slot).items()}
    os.environ |= {"HOROVOD_GLOO_RENDEZVOUS_ADDR": host, "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port)}
    if interface := os.environ.get("GLOO_SOCKET_IFNAME"):
        os.environ.setdefault("HOROVOD_GLOO_IFACE", interface)


def check_transport(config: Config, world: World, device: torch.device) -> str:
    """Return what carries the gradients, as Horovod reports it: NCCL, MPI or Gloo.

    UserError if the ranks did not find each other, if the transport is not that of --transport, and
    for Adasum without MPI. On GPUs also for a synchronised BatchNorm in fp16, and for a Horovod
    that was built for CPUs: it would abort at the first tensor on a GPU.
    """
    rendezvous.refuse_lone_copies(world, hvd.size(), "Start it with horovodrun or mpirun")
    wanted, on_gpu = config.transport, device.type == "cuda"
    is_half = config.has_fp16_weights and not config.keeps_batch_norm_fp32
    by_nccl = on_gpu and hvd.nccl_built()
    refuse(
        (
            config.use_adasum and not hvd.mpi_enabled(),
            "--use-adasum: needs MPI, not Gloo: start it with horovodrun --mpi or mpirun",
        ),
        (
            on_gpu and is_half and config.batch_norm == "sync",  # Horovod's counts images in fp32
            "--batch-norm sync: Horovod's, on GPUs, has no fp16 statistics; add "
            "--keep-batchnorm-fp32 True, or use average",
        ),
        (
            by_nccl and wanted in ("gloo", "mpi"),
            f"--transport {wanted}: this Horovod sends tensors on GPUs by NCCL; use nccl, or add "
            "--no-cuda",
        ),
        (
            wanted == "nccl" and not by_nccl,
            "--transport nccl: this Horovod has no NCCL: make setup NCCL=1",
        ),
        (
            on_gpu and not hvd.cuda_built(),
            "this Horovod was built for CPUs: build it again by make setup NCCL=1, or add "
            "--no-cuda",
        ),
    )
    if by_nccl:
        return "NCCL"
    if on_gpu and world.is_first:
        print("warning: this Horovod has no NCCL, gradients go through the CPU: make setup NCCL=1")
    # If both are enabled (one for the controller, the other for gradients) Horovod tries Gloo
    # first: see CreateOperationManager in its operations.cc.
    return "Gloo" if hvd.gloo_enabled() else "MPI"


def waiting_asleep(optimizer: Any, config: Config, device: torch.device) -> Any:
    """Make the `synchronize` of a `hvd.DistributedOptimizer` sleep while it waits for gradients, on
    a CPU and unless --no-sleeping-poll is given. Return the optimizer.

    Horovod itself polls in a loop and only yields its core in between (WaitAndClear in its
    torch/mpi_ops_v2.cc). That takes cores from the threads that send and add up the gradients, of
    this rank and of the others on its host.
    """
    synchronize = optimizer.synchronize

    def sleep_and_synchronize() -> None:
        for handle, _ in optimizer._handles.values():
            while handle is not None and not hvd.poll(handle):
                time.sleep(POLL_SECONDS)
        synchronize()

    if config.sleeping_poll and device.type == "cpu":
        optimizer.synchronize = sleep_and_synchronize
    return optimizer
