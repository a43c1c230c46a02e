"""A network on two devices: its first half on one, its second on the other, inside DDP.

    torchrun --nproc-per-node 2 baselines/model_parallel.py

Each rank has two GPUs. Where the network passes from one to the other, a hook moves what it has
computed so far; autograd brings the gradients back the same way. Each such pair is a worker under
DDP. The script prints what each half takes.

Use it for a network that does not fit one GPU, and then only as the step before a pipeline: one of
the two GPUs waits while the other computes, so that two together are no faster than one. It costs
those waits, and copies of what passes the border.

Without GPUs both halves are on the CPU, and the script says so: all works alike, and nothing is
gained. The weights are bit-equal to those of ddp_train, as the same kernels compute the same
numbers, wherever they are.
"""

from recipe.errors import refuse
from recipe.start import run_script

if __name__ == "__main__":  # before torch is loaded
    run_script(__file__)

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from recipe.loop import Rung
from recipe.training.model import build_optimizer


def split(model: nn.Module, first: torch.device, second: torch.device) -> str:
    """Put the later blocks of a network, which hold the second half of its weights, on the second
    device; what each device holds then, in words. They are taken to compute in the order in which
    they stand, as those of torchvision's networks do."""
    size = sum(weight.numel() for weight in model.parameters())
    before = 0
    blocks = [
        block
        for child in model.children()
        for block in (child if isinstance(child, nn.Sequential) else [child])
    ]
    for block in blocks:
        own = sum(weight.numel() for weight in block.parameters())
        if 2 * before < size:
            before += own
            continue
        block.to(second)
        block.register_forward_pre_hook(lambda _, inputs: tuple(one.to(second) for one in inputs))
    model.register_forward_hook(lambda _, __, outputs: outputs.to(first))  # the targets are there
    return f"{4 * before / 1e6:.2f} MB on {first}, {4 * (size - before) / 1e6:.2f} MB on {second}"


class TwoDevices(Rung):
    """Each worker has two devices, and DDP averages the gradients of both halves."""

    name = "model_parallel"
    lacks = ("model_ema",)  # the average would have to be split as well

    def prepare(self) -> None:
        """Take two GPUs."""
        self.second = self.device
        if self.device.type == "cuda":
            number = torch.cuda.device_count()
            refuse((
                number < 2,
                f"each rank needs two GPUs, and one on {self.world.host} sees {number}: start "
                "fewer ranks, or pass --no-cuda",
            ))  # fmt: skip
            # A rank may see its own two alone; whether two ranks share one is checked later.
            own = 2 * (self.world.local_rank % (number // 2))
            self.device, self.second = torch.device("cuda", own), torch.device("cuda", own + 1)
            self.devices = [self.device, self.second]
            torch.cuda.set_device(self.device)

    def distribute(self) -> None:
        """Split the network."""
        halves = split(self.model, self.device, self.second)
        if self.world.is_first:
            if self.second == self.device:
                print(f"{self.name}: without GPUs both halves of the network are on the CPU")
            print(f"weights of a worker: {halves}")
        kept = self.optimizer.state_dict()
        self.optimizer = build_optimizer(self.model, self.config)  # of them where they are now
        self.optimizer.load_state_dict(kept)
        # BatchNorm's statistics travel as --batch-norm says.
        self.network = DistributedDataParallel(
            self.model, broadcast_buffers=False
        )  # no device_ids: there are two


main = TwoDevices.main
