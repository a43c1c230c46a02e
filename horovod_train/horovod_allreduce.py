"""Horovod's all-reduce alone. compare/collectives.py measures it beside those of other engines."""

from collections.abc import Callable, Sequence

import torch

from horovod_train import engine
from horovod_train.engine import COMPRESSION, hvd
from recipe.allreduce_loop import Backend
from recipe.device import choose_device
from recipe.settings.flags import Config, WireFormat
from recipe.world import World


def prepare(tensors: Sequence[torch.Tensor], wire: WireFormat) -> Callable[[], None]:
    """Return a function that sums the tensors as DistributedOptimizer does. Each tensor keeps its
    name: Horovod caches by name what its ranks have agreed on, and negotiates each new name."""
    compression = COMPRESSION[wire]
    count = sum(tensor.numel() for tensor in tensors)
    names = [f"{wire}.{count}.{index}of{len(tensors)}" for index in range(len(tensors))]

    def reduce() -> None:
        sent = []
        for tensor, name in zip(tensors, names, strict=True):
            message, dtype = compression.compress(tensor)
            sent.append((tensor, hvd.allreduce_async_(message, name=name, op=hvd.Sum), dtype))
        for tensor, handle, dtype in sent:
            tensor.set_(compression.decompress(hvd.synchronize(handle), dtype))

    return reduce


def connect(config: Config, world: World) -> Backend:
    """Connect the ranks as in training."""
    device = choose_device(config, world)
    engine.prepare(config, world)
    hvd.init()
    return Backend(
        transport=engine.check_transport(config, world, device),
        device=device,
        prepare=prepare,
        barrier=hvd.barrier,
    )
