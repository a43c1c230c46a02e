"""What carries DDP's messages: which backend of torch.distributed, or why not that one."""

import torch

from recipe.errors import UserError
from recipe.meeting import start_mpi
from recipe.settings.config import Config
from recipe.world import World

BACKENDS = {
    "nccl": ("NCCL", "cpu:gloo,cuda:nccl"),  # Gloo: what lies in the CPU's memory
    "gloo": ("Gloo", "gloo"),
    "mpi": ("MPI", "mpi4py"),
}
MPI_LEVELS = ("MPI_THREAD_SINGLE", "MPI_THREAD_FUNNELED", "MPI_THREAD_SERIALIZED")


def choose_transport(config: Config, world: World, device: torch.device) -> tuple[str, str]:
    """What carries the gradients, as a run's records call it, and torch's backend that does.

    UserError if it is MPI and this process was not started by MPI, its tensors are on a GPU, or
    MPI cannot be called from more than one thread.
    """
    own = "nccl" if device.type == "cuda" else "gloo"
    transport = own if config.transport == "auto" else config.transport
    if transport == "mpi":
        if own == "nccl":
            raise UserError(
                "--transport mpi: DDP over MPI sends what lies in the CPU's memory, and this run "
                "is on GPUs; use nccl, or add --no-cuda"
            )
        _prepare_mpi_backend(world)
    return BACKENDS[transport]


def _prepare_mpi_backend(world: World) -> None:
    if world.launcher != "none" and not world.started_by.starts_mpi:
        by = world.started_by.shown or world.launcher
        raise UserError(
            f"--transport mpi: {by} started this process, and no ranks of MPI; start "
            "ddp_train/train.py with mpirun or horovodrun --mpi"
        )
    mpi = start_mpi(world, "leave out --transport mpi")
    level = mpi.Query_thread()
    if level < mpi.THREAD_MULTIPLE:
        library = mpi.Get_library_version().split(",")[0].strip("\0")
        raise UserError(
            f"--transport mpi: {library} gives {MPI_LEVELS[level]}, and DDP needs "
            "MPI_THREAD_MULTIPLE, since a thread beside the training sends its messages; use an "
            "MPI that was built with it, or leave out --transport mpi"
        )
    import ddp_train.mpi_backend  # noqa: F401  registers itself, and needs an MPI that is prepared
