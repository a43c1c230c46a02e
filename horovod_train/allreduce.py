"""Measure Horovod's allreduce.

    horovodrun -np 2 python horovod_train/allreduce.py --sizes 4096 67108864

compare/collectives.py starts this and its like, and compares them.
"""

import argparse
from collections.abc import Callable, Sequence
from importlib import metadata

import torch

from horovod_train.engine import COMPRESSION, hvd, refuse_lone_copies
from recipe.allreduce import WIRES, Backend, measure, parse_options, pick_device
from recipe.errors import one_message
from recipe.watch import start_watchdog
from recipe.wire_formats import WireFormat
from recipe.world import World, prepare_mpi, read_world


def prepare(tensors: Sequence[torch.Tensor], wire: WireFormat) -> Callable[[], None]:
    """What sums the tensors, as DistributedOptimizer does it. Each has a name that stays: Horovod
    keeps what its ranks agreed on by name, and would negotiate a new name anew."""
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


def main(options: argparse.Namespace, world: World) -> None:
    """Measure as `options` says. Every rank calls this."""
    device = pick_device(options, world)
    prepare_mpi(world)
    hvd.init()
    refuse_lone_copies(world)
    controller = "MPI" if hvd.mpi_enabled() else "Gloo"

    def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
        return hvd.allreduce(values.to(device), op=hvd.Sum, name="figures").cpu()

    measure(
        Backend(
            name=f"horovod-{controller.lower()}",
            transport="NCCL" if device.type == "cuda" and hvd.nccl_built() else controller,
            device=device,
            versions={"torch": torch.__version__, "horovod": metadata.version("horovod")},
            wires=WIRES,
            prepare=prepare,
            barrier=hvd.barrier,
            sum_over_ranks=sum_over_ranks,
        ),
        world,
        options,
    )
    hvd.shutdown()


if __name__ == "__main__":
    world = read_world()
    start_watchdog(world)
    with one_message(world):
        main(parse_options(__doc__), world)
