"""MPI's own all-reduce, called through mpi4py, without an engine.

compare/collectives.py measures it beside those of the engines: the time that Horovod over MPI needs
beyond this is Horovod's overhead.
"""

from collections.abc import Callable, Sequence

import torch

from recipe.allreduce_loop import Backend
from recipe.ancestors import own_world
from recipe.rendezvous import refuse_lone_copies
from recipe.settings.flags import WIRE_FORMATS, Config, WireFormat
from recipe.world import World, prepare_mpi

prepare_mpi(own_world())
from mpi4py import MPI  # its import initialises MPI

from ddp_train.mpi_backend import memory_of, sum_of


def prepare(tensors: Sequence[torch.Tensor], wire: WireFormat) -> Callable[[], None]:
    """Return a function that sums the tensors in place; several by non-blocking all-reduces."""
    dtype = getattr(torch, WIRE_FORMATS[wire].dtype)

    def reduce() -> None:
        messages = [tensor.to(dtype) for tensor in tensors]  # the tensors themselves in fp32
        sums = [(MPI.IN_PLACE, memory_of(message), sum_of(message)) for message in messages]
        if len(sums) == 1:
            MPI.COMM_WORLD.Allreduce(*sums[0])
        else:
            MPI.Request.Waitall([MPI.COMM_WORLD.Iallreduce(*one_sum) for one_sum in sums])
        for tensor, message in zip(tensors, messages, strict=True):
            if message is not tensor:
                tensor.copy_(message)

    return reduce


def connect(config: Config, world: World) -> Backend:
    """Check that MPI started the ranks."""
    refuse_lone_copies(world, MPI.COMM_WORLD.size, "Start it with mpirun")
    return Backend(
        transport="MPI",
        device=torch.device("cpu"),  # even with GPUs: not every MPI can access their memory
        prepare=prepare,
        barrier=MPI.COMM_WORLD.Barrier,
    )
