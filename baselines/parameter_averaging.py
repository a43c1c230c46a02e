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

from recipe.config import Config
from recipe.errors import one_message
from recipe.start import Hooks, start
from recipe.world import World

ENGINE = "parameter_averaging"
PERIOD = 4  # steps from one average to the next

if __name__ == "__main__":  # before torch is loaded
    config, world = start(ENGINE)

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.utils import average_parameters
from torch.nn.parallel import DistributedDataParallel

from recipe.loop import Parts, Rung, prepare, train
from recipe.ranks import process_group

# Each rank would have a moving average of its own, and leave out its own steps; it is SGD's state
# that is averaged; and its warm-up is counted in steps of one size.
LACKS = ("model_ema", "precision fp16", "loss_scale", "optimizer", "batch_size_warmup_epochs")


def warm_up_steps(parts: Parts) -> int:
    """Steps in which the ranks average their gradients."""
    config, size = parts.config, dist.get_world_size()
    epoch_steps = parts.data.num_train / (config.batch_size * config.batches_per_allreduce * size)
    return math.ceil(config.warmup_epochs * epoch_steps)


def distribute(parts: Parts) -> None:
    """DDP averages gradients until the warm-up is over; then an averager sees to the weights."""
    warm_up = warm_up_steps(parts)
    parts.network = DistributedDataParallel(parts.model)
    parts.network.broadcast_buffers = False  # BatchNorm's statistics travel as --batch-norm says
    local = PostLocalSGDState(None, None, warm_up, post_local_gradient_allreduce=False)
    averager = PeriodicModelAverager(PERIOD, warm_up)
    local.iter = averager.step = parts.progress.step
    parts.network.register_comm_hook(local, post_localSGD_hook)
    parts.optimizer.register_step_post_hook(
        lambda *_: averager.average_parameters(parts.model.parameters())
    )


def whole(parts: Parts) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The ranks' average, from which all of them go on."""
    if parts.progress.step > warm_up_steps(parts):
        momenta = [state.get("momentum_buffer") for state in parts.optimizer.state.values()]
        trained = [*parts.model.parameters(), *filter(torch.is_tensor, momenta)]
        average_parameters(iter(trained), dist.group.WORLD)
    return parts.model, parts.optimizer


def main(config: Config, world: World, hooks: Hooks) -> None:
    """Train as `config` says. Every rank calls this."""
    device = prepare(config, world, LACKS)
    with process_group(config, world):
        rung = Rung(name=ENGINE, distribute=distribute, whole=whole)
        train(config, world, device, rung, hooks)


if __name__ == "__main__":
    with one_message(world):
        main(config, world, Hooks())
