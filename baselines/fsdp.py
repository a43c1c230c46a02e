"""Everything sharded: fully_shard (FSDP), each rank holds 1/N of weights, gradients and optimizer.

    torchrun --nproc-per-node 2 baselines/fsdp.py

Each Sequential of the network (a ResNet's layers 1 to 4) is a group, and all other layers are one
more group. Before a group computes, the ranks gather its weights from each other; afterwards each
rank drops the parts that are not its own. In the backward pass they gather again, and each rank
gets the averaged gradients of its part of the weights. Its optimizer updates only this part. The
script prints what each rank holds.

Use it if a network with its gradients and optimizer state does not fit a GPU. It sends 1.5 times as
many bytes as DDP: weights are gathered twice and gradients are sent once, while DDP's all-reduce
costs as much as two of these. A network that fits usually trains faster under DDP.

Checkpoints are unsharded: the file is the same as the trainers', and each can resume from the
other's. While the network is evaluated or saved, every rank has all of it on its device. A network
too large for that needs torch.distributed.checkpoint, and a sharded evaluation.

The weights equal those of ddp_train except for rounding. torch's fused SGD does not accept sharded
weights, and the plain one rounds more often (torch 2.14.1). Also, with more than two ranks the
gradients may be added up in another order, and --clip-grad-norm adds up the norm in parts.
"""

from recipe.errors import leave
from recipe.start import run_script

if __name__ == "__main__":  # before torch is loaded
    # Exchanges of sharded weights can outlive their process group, and Python may then abort when
    # it exits (pytorch pull request 179291).
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
    # Each of these would need extra code for sharded weights; and no two ranks hold the same ones.
    lacks = (
        "model_ema",
        "precision fp16",
        "loss_scale",
        "optimizer",
        "compile",
        "weight_check_steps",
    )

    def distribute(self) -> None:
        """Shard the network in place, and the momentum of a checkpoint."""
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
            group["fused"] = None  # fused takes no sharded weights; GPUs then use grouped kernels

    def unsharded(self) -> Trainables:
        """Return an unsharded copy of network and optimizer on every rank; the network's buffers
        are not copies."""
        weights, state = get_state_dict(self.model, self.optimizer, options=WHOLE)
        with torch.device("meta"):  # without values: the gathered ones are assigned below
            model = build_model(self.config, self.data.num_classes, download=False)
        model.load_state_dict(weights, assign=True)
        optimizer = build_optimizer(model, self.config)
        set_optimizer_state_dict(model, optimizer, state)
        return Trainables(model, optimizer, self.scaler, None)

    def measured(self) -> RungFigures:
        """Return the memory of each rank."""
        return self.memory_by_rank(self.optimizer)


main = Sharded.main
