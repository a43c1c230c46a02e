"""Shard the optimizer's state, the first thing to shard: DDP with ZeroRedundancyOptimizer.

    torchrun --nproc-per-node 2 baselines/zero_optimizer.py

Under DDP every rank holds the optimizer's whole state (for SGD the momentum, as large as the
weights; for Adam twice that) and computes the same update. Here each rank updates a part of the
weights, holds only the state of that part, 1/N of the whole, and sends the new weights to the other
ranks. The script prints what each rank holds.

Use it if only the optimizer's memory is too much for DDP: with Adam, or with many weights on few
GPUs. It costs a second exchange: gradients are averaged as before, and then the weights are
broadcast. A checkpoint needs the whole state, so all ranks send their parts to rank 0 (as pickled
objects).

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
    """DDP averages the gradients; the optimizer's state is sharded over the ranks."""

    name = "zero_optimizer"

    def distribute(self) -> None:
        """Shard the optimizer. The state from a checkpoint is whole; each rank keeps its part."""
        # BatchNorm's statistics are exchanged by --batch-norm.
        self.network = DistributedDataParallel(self.model, broadcast_buffers=False)
        plain = self.optimizer
        self.optimizer = ZeroRedundancyOptimizer(
            plain.param_groups, type(plain), lr=self.config.base_lr
        )
        # Its load_state_dict would put Adam's step counts into the CPU's memory, where the fused
        # kernel cannot use them, and would keep the whole state beside this rank's part.
        shard = self.optimizer.optim
        weights = [weight for group in shard.param_groups for weight in group["params"]]
        shard.state.update((w, plain.state[w]) for w in weights if w in plain.state)

    def unsharded(self) -> Trainables:
        """Gather the optimizer's state on rank 0, for a checkpoint."""
        self.optimizer.consolidate_state_dict(to=0)
        return self

    def measured(self) -> RungFigures:
        """Return the memory of each rank."""
        return self.memory_by_rank(self.optimizer.optim)


main = ShardedOptimizer.main
