"""Measure MPI's own all-reduce, called through mpi4py, without an engine.

    mpirun -np 2 python baselines/mpi_allreduce.py --sizes 4096 67108864

The time that Horovod over MPI needs beyond this is Horovod's overhead. compare/collectives.py
starts this script and those of the engines, and compares them.
"""

from collections.abc import Callable, Sequence
from importlib import metadata

import torch

from recipe.allreduce_loop import Backend, run
from recipe.ancestors import own_world
from recipe.errors import UserError
from recipe.settings.flags import Config, WireFormat
from recipe.world import World, lone_copy_message, prepare_mpi

prepare_mpi(own_world())
from mpi4py import MPI  # its import initialises MPI


def prepare(tensors: Sequence[torch.Tensor], wire: WireFormat) -> Callable[[], object]:
    """Return a function that sums the tensors in place; several by non-blocking all-reduces."""
    assert wire == "fp32", wire
    comm = MPI.COMM_WORLD
    arrays = [tensor.numpy() for tensor in tensors]
    if len(arrays) == 1:
        return lambda: comm.Allreduce(MPI.IN_PLACE, arrays[0])
    return lambda: MPI.Request.Waitall([comm.Iallreduce(MPI.IN_PLACE, array) for array in arrays])


def connect(config: Config, world: World) -> Backend:
    """Check that MPI started the ranks."""
    message = lone_copy_message(world, MPI.COMM_WORLD.size, "Start it with mpirun")
    if message:
        raise UserError(message)
    if config.transport not in ("auto", "mpi"):
        raise UserError(
            f"--transport {config.transport}: this script uses MPI itself; leave it out"
        )
    library = MPI.Get_library_version().split(",")[0].strip("\0")
    return Backend(
        name="mpi4py",
        transport="MPI",
        device=torch.device("cpu"),  # even with GPUs: not every MPI can access their memory
        versions={"mpi4py": metadata.version("mpi4py"), "mpi": library},
        wires=("fp32",),  # MPI has no sum of 16-bit floating-point numbers
        prepare=prepare,
        barrier=MPI.COMM_WORLD.Barrier,
        close=MPI.Finalize,
    )


if __name__ == "__main__":
    run(__doc__, connect)
