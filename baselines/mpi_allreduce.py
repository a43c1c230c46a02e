"""The first rung: MPI's own allreduce, called through mpi4py, with no engine above it.

    mpirun -np 2 python baselines/mpi_allreduce.py --sizes 4096 67108864

What Horovod takes longer over MPI than this, is Horovod's. compare/collectives.py starts this and
its like, and compares them.
"""

import argparse
from collections.abc import Callable, Sequence
from importlib import metadata

import torch

from recipe.allreduce_loop import Backend, run
from recipe.errors import UserError
from recipe.watch import own_world
from recipe.settings.flags import WireFormat
from recipe.world import World, lone_copy_message, prepare_mpi

prepare_mpi(own_world())
from mpi4py import MPI  # its import initialises MPI


def prepare(tensors: Sequence[torch.Tensor], wire: WireFormat) -> Callable[[], object]:
    """What sums the tensors' memory, in place: many of them as non-blocking allreduces."""
    assert wire == "fp32", wire
    comm = MPI.COMM_WORLD
    arrays = [tensor.numpy() for tensor in tensors]
    if len(arrays) == 1:
        return lambda: comm.Allreduce(MPI.IN_PLACE, arrays[0])
    return lambda: MPI.Request.Waitall([comm.Iallreduce(MPI.IN_PLACE, array) for array in arrays])


def connect(options: argparse.Namespace, world: World) -> Backend:
    """Check that MPI has started the ranks."""
    if message := lone_copy_message(world, MPI.COMM_WORLD.size, "Start it with mpirun"):
        raise UserError(message)
    library = MPI.Get_library_version().split(",")[0].strip("\0")
    return Backend(
        name="mpi4py",
        transport="MPI",
        device=torch.device("cpu"),  # also where there are GPUs: not every MPI knows their memory
        versions={"mpi4py": metadata.version("mpi4py"), "mpi": library},
        wires=("fp32",),  # MPI has no sum of 16-bit floating-point numbers
        prepare=prepare,
        barrier=MPI.COMM_WORLD.Barrier,
        close=MPI.Finalize,
    )


if __name__ == "__main__":
    run(__doc__, connect, ("auto", "mpi"))
