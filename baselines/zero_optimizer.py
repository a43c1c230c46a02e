"""The first thing to shard: DDP with ZeroRedundancyOptimizer, its state divided among the ranks.

    torchrun --nproc-per-node 2 baselines/zero_optimizer.py

Under DDP every rank holds the optimizer's whole state (of SGD the momentum, as large as the
weights; of Adam twice that) and computes the same update. Here each rank updates a part of the
weights, holds the state of that part alone, 1/N of the whole, and sends the new weights to the
others. The script prints what each rank holds.

Use it where DDP fits but for the optimizer's memory: with Adam, or with many weights on few GPUs.
It costs a second exchange: gradients are averaged as before, and then the weights are broadcast. A
checkpoint needs the whole state, so that all ranks send theirs to rank 0 (as pickled objects).

The weights are bit-equal to those of ddp_train: each is updated once, by the same numbers.
"""

from recipe.config import Config
from recipe.errors import one_message
from recipe.start import Hooks, start
from recipe.world import World

ENGINE = "zero_optimizer"

if __name__ == "__main__":  # before torch is loaded
    config, world = start(ENGINE)

from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from recipe.loop import Parts, Rung, memory_by_rank, prepare, train
from recipe.ranks import process_group


def distribute(parts: Parts) -> None:
    """DDP averages the gradients; the optimizer's state is divided among the ranks."""
    parts.network = DistributedDataParallel(parts.model)
    parts.network.broadcast_buffers = False  # BatchNorm's statistics travel as --batch-norm says
    plain = parts.optimizer
    parts.optimizer = ZeroRedundancyOptimizer(
        plain.param_groups, type(plain), lr=parts.config.base_lr
    )
    if plain.state:  # a checkpoint's: each rank keeps its part
        parts.optimizer.load_state_dict(plain.state_dict())


def whole(parts: Parts) -> tuple[nn.Module, ZeroRedundancyOptimizer]:
    """The optimizer's state is brought together on rank 0, for a checkpoint."""
    parts.optimizer.consolidate_state_dict(to=0)
    return parts.model, parts.optimizer


def main(config: Config, world: World, hooks: Hooks) -> None:
    """Train as `config` says. Every rank calls this."""
    device = prepare(config, world)
    with process_group(config, world):
        rung = Rung(
            name=ENGINE,
            distribute=distribute,
            whole=whole,
            measured=lambda parts: memory_by_rank(world, parts.optimizer.optim, parts.model),
        )
        train(config, world, device, rung, hooks)


if __name__ == "__main__":
    with one_message(world):
        main(config, world, Hooks())
