"""Local SGD: average the weights every few steps instead of the gradients in each step.

    torchrun --nproc-per-node 2 baselines/parameter_averaging.py

Each rank trains by itself, and every PERIOD steps the ranks average their weights. This begins
after a warm-up, in which gradients are averaged in each step as under DDP: "post-local" SGD (Lin et
al. 2018, arXiv 1808.07217). If ranks trained separately before the weights have settled, the
average of their weights would be no good. The warm-up is that of the learning rate,
--warmup-epochs; with 0 the ranks train separately from the first step.

Use it if the network is so slow that communication cannot be hidden: the ranks send 1/PERIOD of the
bytes. It costs accuracy, and more with a longer period and a larger learning rate; what a run
learns depends on PERIOD.

During the warm-up the weights are bit-equal to those of ddp_train. Afterwards the training differs:
each rank makes PERIOD steps with its own gradients and momentum. Before an evaluation or a
checkpoint the ranks average both, so a resumed run continues exactly.
"""

from recipe.start import run_script

PERIOD = 4  # steps between two averages

if __name__ == "__main__":  # before torch is loaded
    run_script(__file__)

import math

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.utils import average_parameters
from torch.nn.parallel import DistributedDataParallel

from recipe.data.order import samples_per_step
from recipe.loop import Rung
from recipe.training.state import Trainables


class LocalSGD(Rung):
    """Averages gradients until the warm-up is over, then weights."""

    name = "parameter_averaging"
    # Each rank would have a different moving average, and skip different steps; only SGD's state is
    # averaged; and the warm-up is counted in steps of the same size.
    lacks = (
        "model_ema",
        "precision fp16",
        "loss_scale",
        "optimizer",
        "batch_size_warmup_epochs",
        "weight_check_steps",  # weights are the same only just after they have been averaged
    )

    def distribute(self) -> None:
        """Let DDP average gradients until the warm-up is over; from then on average weights."""
        epoch_steps = self.data.num_train / samples_per_step(self.config, self.world)
        self.warm_up = math.ceil(self.config.warmup_epochs * epoch_steps)
        # BatchNorm's statistics are exchanged by --batch-norm.
        self.network = DistributedDataParallel(self.model, broadcast_buffers=False)
        local = PostLocalSGDState(None, None, self.warm_up, post_local_gradient_allreduce=False)
        averager = PeriodicModelAverager(PERIOD, self.warm_up)
        local.iter = averager.step = self.progress.step
        self.network.register_comm_hook(local, post_localSGD_hook)
        self.optimizer.register_step_post_hook(
            lambda *_: averager.average_parameters(self.model.parameters())
        )

    def unsharded(self) -> Trainables:
        """Average the ranks' weights and momentum; all ranks continue from the result."""
        if self.progress.step > self.warm_up:
            momenta = [state.get("momentum_buffer") for state in self.optimizer.state.values()]
            trained = [*self.model.parameters(), *filter(torch.is_tensor, momenta)]
            average_parameters(iter(trained), dist.group.WORLD)
        return self


main = LocalSGD.main
