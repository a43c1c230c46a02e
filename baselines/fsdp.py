"""Everything sharded: fully_shard (FSDP), each rank holds 1/N of weights, gradients and optimizer.

    torchrun --nproc-per-node 2 baselines/fsdp.py

Each Sequential of the network (of a ResNet its layers 1 to 4) is a group; the rest is one more.
Before a group computes, the ranks gather its weights from each other; afterwards they drop what is
not theirs. In the backward pass they gather again, and each rank gets the average of that part of
the gradients whose weights it holds. The optimizer sees its rank's part alone. The script prints
what each rank holds.

Use it where a network does not fit a GPU with its gradients and its optimizer. It costs half as
many bytes again as DDP: weights are gathered twice and gradients sent once, where DDP's all-reduce
sends as much as two of these. A network that fits is as a rule faster under DDP.

A checkpoint is made whole: it is the same file as the trainers', and each can go on from the
other's. Here every rank has the whole network on its device while it is evaluated or kept; what
does not fit even so needs torch.distributed.checkpoint, and an evaluation in shards.

The weights are those of ddp_train but for rounding. torch's fused SGD does not take sharded
weights, and the plain one rounds more often (torch 2.14.1). Also, with more than two ranks the
gradients may be added up in another order, and --clip-grad-norm adds up the norm in parts.
"""

from recipe.errors import leave, one_message
from recipe.start import Hooks, start

ENGINE = "fsdp"

if __name__ == "__main__":  # before torch is loaded
    config, world = start(ENGINE)

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from recipe.loop import Rung
from recipe.record.schema import RungFigures
from recipe.training.model import build_model, build_optimizer
from recipe.training.state import Trainables


def gathered(state: dict) -> dict:
    """A state dict with all sharded tensors whole, on every rank."""
    whole = {}
    for key, value in state.items():
        value = value.full_tensor() if isinstance(value, DTensor) else value
        whole[key] = gathered(value) if isinstance(value, dict) else value
    return whole


class Sharded(Rung):
    """Each rank holds its shard of everything."""

    name = ENGINE
    # Each would need code of its own for sharded weights.
    lacks = ("model_ema", "precision fp16", "loss_scale", "optimizer", "compile")

    def distribute(self) -> None:
        """Shard the network, which becomes another one in place, and a checkpoint's momentum."""
        kept = self.optimizer.state_dict()["state"]
        mesh = init_device_mesh(self.device.type, (dist.get_world_size(),))
        for child in self.model.children():
            if isinstance(child, nn.Sequential):
                fully_shard(child, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = build_optimizer(self.model, self.config)
        for group in self.optimizer.param_groups:
            group["fused"] = False  # it does not take sharded weights
        weights = [weight for group in self.optimizer.param_groups for weight in group["params"]]
        for number, state in kept.items():
            weight = weights[number]
            for name, value in state.items():
                shard = distribute_tensor(value, weight.device_mesh, weight.placements)
                self.optimizer.state[weight][name] = shard

    def whole(self) -> Trainables:
        """A copy of network and optimizer, whole on every rank; the buffers are no copies."""
        with torch.device("meta"):  # no values: the gathered ones take their place
            model = build_model(self.config, self.data.num_classes, download=False)
        model.load_state_dict(gathered(self.model.state_dict()), assign=True)
        optimizer = build_optimizer(model, self.config)
        optimizer.load_state_dict(gathered(self.optimizer.state_dict()))
        return Trainables(model, optimizer, self.scaler, None)

    def measured(self) -> RungFigures:
        """The memory of each rank."""
        return self.memory_by_rank(self.optimizer)


main = Sharded.main

if __name__ == "__main__":
    with one_message(world):
        main(config, world, Hooks())
    # Exchanges of sharded weights can outlive their process group, and Python's own end may then
    # abort (pytorch pull request 179291).
    leave(0)
