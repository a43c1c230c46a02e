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

from recipe.start import run_script

if __name__ == "__main__":  # before torch is loaded
    run_script(__file__)

from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from recipe.loop import Rung
from recipe.record.schema import RungFigures
from recipe.training.state import Trainables


class ShardedOptimizer(Rung):
    """DDP averages the gradients; the optimizer's state is divided among the ranks."""

    name = "zero_optimizer"

    def distribute(self) -> None:
        """A checkpoint's state comes whole: each rank keeps its part."""
        # BatchNorm's statistics travel as --batch-norm says.
        self.network = DistributedDataParallel(self.model, broadcast_buffers=False)
        plain = self.optimizer
        self.optimizer = ZeroRedundancyOptimizer(
            plain.param_groups, type(plain), lr=self.config.base_lr
        )
        # Its own load_state_dict would put Adam's counts of steps where the fused kernel does not
        # look for them, into the CPU's memory, and keep the whole state beside this rank's part.
        own = self.optimizer.optim
        weights = [weight for group in own.param_groups for weight in group["params"]]
        own.state.update((one, plain.state[one]) for one in weights if one in plain.state)

    def whole(self) -> Trainables:
        """The optimizer's state is brought together on rank 0, for a checkpoint."""
        self.optimizer.consolidate_state_dict(to=0)
        return self

    def measured(self) -> RungFigures:
        """The memory of each rank."""
        return self.memory_by_rank(self.optimizer.optim)


main = ShardedOptimizer.main
