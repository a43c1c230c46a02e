"""A network on two devices: its first half on one, its second on the other, inside DDP.

    torchrun --nproc-per-node 2 baselines/model_parallel.py

Each rank has two GPUs. Where the network passes from one to the other, a hook moves the
activations; autograd brings the gradients back the same way. Each pair of GPUs is a worker under
DDP. The script prints the memory of each half.

Use it for a network that does not fit one GPU, and only as a step towards a pipeline: one of the
two GPUs always waits for the other, so both together are no faster than one. It costs these waits,
and the copies between the GPUs.

Without GPUs both halves are on the CPU, and the script says so: it works in the same way, but
brings no advantage. The weights are bit-equal to those of ddp_train, because the same kernels
compute the same numbers on either device.
"""

from recipe.errors import UserError
from recipe.start import run_script

if __name__ == "__main__":  # before torch is loaded
    run_script(__file__)

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from recipe.loop import Rung
from recipe.training.model import build_optimizer


def split(model: nn.Module, first: torch.device, second: torch.device) -> str:
    """Move the later blocks of a network, which hold the second half of its weights, to the second
    device. Return a text that says what each device holds. Blocks must compute in the order in
    which they are listed, as in torchvision's networks."""
    size = sum(weight.numel() for weight in model.parameters())
    before = 0
    blocks = [
        block
        for child in model.children()
        for block in (child if isinstance(child, nn.Sequential) else [child])
    ]
    for block in blocks:
        block_size = sum(weight.numel() for weight in block.parameters())
        if 2 * before < size:
            before += block_size
            continue
        block.to(second)
        block.register_forward_pre_hook(lambda _, inputs: tuple(x.to(second) for x in inputs))
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
            if number < 2:
                raise UserError(
                    f"each rank needs two GPUs, and one on {self.world.host} sees {number}: start "
                    "fewer ranks, or pass --no-cuda"
                )
            # A rank may see only its own two GPUs. That no two ranks share one is checked later.
            first = 2 * (self.world.local_rank % (number // 2))
            self.device, self.second = torch.device("cuda", first), torch.device("cuda", first + 1)
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
        self.optimizer = build_optimizer(self.model, self.config)  # for weights on both devices
        self.optimizer.load_state_dict(kept)
        # BatchNorm's statistics are exchanged by --batch-norm.
        self.network = DistributedDataParallel(
            self.model, broadcast_buffers=False
        )  # no device_ids: there are two


main = TwoDevices.main
