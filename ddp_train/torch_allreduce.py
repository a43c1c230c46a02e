"""Measure torch.distributed's allreduce.

    torchrun --nproc-per-node 2 ddp_train/torch_allreduce.py --sizes 4096 67108864
    mpirun -np 2 python ddp_train/torch_allreduce.py --transport mpi --no-cuda

compare/collectives.py starts this and its like, and compares them.
"""

import argparse
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from ddp_train.rendezvous import choose_transport, meeting_point
from recipe.allreduce_loop import Backend, run
from recipe.device import choose_device
from recipe.settings.config import Config
from recipe.settings.flags import WIRE_FORMATS, WireFormat
from recipe.world import World


def prepare(tensors: Sequence[torch.Tensor], wire: WireFormat) -> Callable[[], None]:
    """What sums the tensors: as DDP does it, and on the fp16 wire as its fp16_compress_hook does
    (which also divides: a pass over the halves that is left out here, on all engines)."""
    dtype = getattr(torch, WIRE_FORMATS[wire].dtype)

    def reduce() -> None:
        sent = []
        for tensor in tensors:
            message = tensor.to(dtype)  # the tensor itself where it is of this type
            sent.append((tensor, message, dist.all_reduce(message, async_op=True)))
        for tensor, message, work in sent:
            work.wait()
            if message is not tensor:
                tensor.copy_(message)

    return reduce


def connect(options: argparse.Namespace, world: World) -> Backend:
    """Let the ranks meet as DDP's do."""
    config = Config(cuda=options.cuda, transport=options.transport)
    device = choose_device(config, world)
    transport, backend = choose_transport(config, world, device)
    dist.init_process_group(backend, **meeting_point(world, backend))
    return Backend(
        name="torch-mpi" if transport == "MPI" else "torch.distributed",
        transport=transport,
        device=device,
        versions={"torch": torch.__version__},
        prepare=prepare,
        barrier=dist.barrier,
        close=dist.destroy_process_group,
    )


if __name__ == "__main__":
    run(__doc__, connect, ("auto", "mpi"))
