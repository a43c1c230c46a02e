"""Measure torch.distributed's all-reduce.

    torchrun --nproc-per-node 2 ddp_train/torch_allreduce.py --sizes 4096 67108864
    mpirun -np 2 python ddp_train/torch_allreduce.py --transport mpi --no-cuda

compare/collectives.py starts this script and those of the other engines, and compares them.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from ddp_train.rendezvous import choose_transport, rendezvous_arguments
from recipe.allreduce_loop import Backend, run
from recipe.device import choose_device
from recipe.settings.flags import WIRE_FORMATS, Config, WireFormat
from recipe.world import World


def prepare(tensors: Sequence[torch.Tensor], wire: WireFormat) -> Callable[[], None]:
    """Return a function that sums the tensors as DDP does, and in fp16 as fp16_compress_hook does.
    (The hook also divides the fp16 values; this pass is left out here for all engines.)"""
    dtype = getattr(torch, WIRE_FORMATS[wire].dtype)

    def reduce() -> None:
        sent = []
        for tensor in tensors:
            message = tensor.to(dtype)  # the tensor itself if it has this type
            sent.append((tensor, message, dist.all_reduce(message, async_op=True)))
        for tensor, message, work in sent:
            work.wait()
            if message is not tensor:
                tensor.copy_(message)

    return reduce


def connect(config: Config, world: World) -> Backend:
    """Connect the ranks as in DDP."""
    device = choose_device(config, world)
    transport, backend = choose_transport(config, world, device)
    dist.init_process_group(backend, **rendezvous_arguments(world, backend))
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
    run(__doc__, connect)
