"""torch.distributed's all-reduce alone. compare/collectives.py measures it beside those of other
engines."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from ddp_train.rendezvous import choose_transport, rendezvous_arguments
from recipe.allreduce_loop import Backend
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
        transport=transport,
        device=device,
        prepare=prepare,
        barrier=dist.barrier,
    )
