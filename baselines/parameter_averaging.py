"""Average the weights now and then, not the gradients in each step: local SGD.

    torchrun --nproc-per-node 2 baselines/parameter_averaging.py

Each rank trains by itself, and every PERIOD steps the ranks average their weights. It begins after
a warm-up, in which gradients are averaged in each step as under DDP: "post-local" SGD (Lin et al.
2018, arXiv 1808.07217), since ranks that part before the weights have settled end in places whose
average is no good. The warm-up is that of the learning rate, --warmup-epochs; 0 makes it local from
the first step.

Use it where the network is so slow that its share of a step cannot be hidden: the bytes on the wire
go down to 1/PERIOD. It costs accuracy, more of it the longer the period and the larger the rate,
and what a run learns depends on PERIOD.

During the warm-up the weights are bit-equal to those of ddp_train. Afterwards they are another
training's: each rank takes PERIOD steps along its own gradients, with a momentum of its own. Before
an evaluation and a checkpoint the ranks average both, so that a run that goes on from a checkpoint
does what it would have done.
"""

from recipe.start import run_script

PERIOD = 4  # steps from one average to the next

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

from recipe.data.batches import samples_per_step
from recipe.loop import Rung
from recipe.training.state import Trainables


class LocalSGD(Rung):
    """Gradients are averaged until the warm-up is over, then weights."""

    name = "parameter_averaging"
    # Each rank would have a moving average of its own, and leave out its own steps; it is SGD's
    # state that is averaged; and its warm-up is counted in steps of one size.
    lacks = (
        "model_ema", "precision fp16", "loss_scale", "optimizer", "batch_size_warmup_epochs",
        "weight_check_steps",  # they are the same only where they have just been averaged
    )  # fmt: skip

    def distribute(self) -> None:
        """DDP averages gradients until the warm-up is over; then an averager does weights."""
        epoch_steps = self.data.num_train / samples_per_step(self.config, self.world)
        self.warm_up = math.ceil(self.config.warmup_epochs * epoch_steps)
        # BatchNorm's statistics travel as --batch-norm says.
        self.network = DistributedDataParallel(self.model, broadcast_buffers=False)
        local = PostLocalSGDState(None, None, self.warm_up, post_local_gradient_allreduce=False)
        averager = PeriodicModelAverager(PERIOD, self.warm_up)
        local.iter = averager.step = self.progress.step
        self.network.register_comm_hook(local, post_localSGD_hook)
        self.optimizer.register_step_post_hook(
            lambda *_: averager.average_parameters(self.model.parameters())
        )

    def whole(self) -> Trainables:
        """The ranks' average, from which all of them go on."""
        if self.progress.step > self.warm_up:
            momenta = [state.get("momentum_buffer") for state in self.optimizer.state.values()]
            trained = [*self.model.parameters(), *filter(torch.is_tensor, momenta)]
            average_parameters(iter(trained), dist.group.WORLD)
        return self


main = LocalSGD.main
