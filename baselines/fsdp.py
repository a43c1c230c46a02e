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

from recipe.errors import leave
from recipe.start import run_script

if __name__ == "__main__":  # before torch is loaded
    # Exchanges of sharded weights can outlive their process group, and Python's own end may then
    # abort (pytorch pull request 179291).
    run_script(__file__, end=leave)

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from recipe.loop import Rung
from recipe.record.schema import RungFigures
from recipe.training.model import build_model, build_optimizer
from recipe.training.state import Trainables


WHOLE = StateDictOptions(full_state_dict=True)


class Sharded(Rung):
    """Each rank holds its shard of everything."""

    name = "fsdp"
    # Each would need code of its own for sharded weights; and no two ranks hold the same ones.
    lacks = (
        "model_ema", "precision fp16", "loss_scale", "optimizer", "compile", "weight_check_steps",
    )  # fmt: skip

    def distribute(self) -> None:
        """Shard the network, which becomes another one in place, and a checkpoint's momentum."""
        kept = get_optimizer_state_dict(self.model, self.optimizer) if self.optimizer.state else {}
        mesh = init_device_mesh(self.device.type, (dist.get_world_size(),))
        for child in self.model.children():
            if isinstance(child, nn.Sequential):
                fully_shard(child, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = build_optimizer(self.model, self.config)
        if kept:
            set_optimizer_state_dict(self.model, self.optimizer, kept, options=WHOLE)
        for group in self.optimizer.param_groups:
            group["fused"] = None  # it does not take sharded weights; on GPUs: in groups

    def whole(self) -> Trainables:
        """A copy of network and optimizer, whole on every rank; the buffers are no copies."""
        weights, state = get_state_dict(self.model, self.optimizer, options=WHOLE)
        with torch.device("meta"):  # no values: the gathered ones take their place
            model = build_model(self.config, self.data.num_classes, download=False)
        model.load_state_dict(weights, assign=True)
        optimizer = build_optimizer(model, self.config)
        set_optimizer_state_dict(model, optimizer, state)
        return Trainables(model, optimizer, self.scaler, None)

    def measured(self) -> RungFigures:
        """The memory of each rank."""
        return self.memory_by_rank(self.optimizer)


main = Sharded.main
