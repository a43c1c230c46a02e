"""The guides' first rung with several GPUs: torch.nn.DataParallel, one process for all of them.

    python baselines/data_parallel.py

In each step the process copies the weights to every GPU, sends each a part of the batch, and adds
up their gradients on the first. --batch-size is that of all GPUs together, and the learning rate
that of one worker. Nothing but this one line changes, which is why guides begin with it.

Use it to try several GPUs in a notebook, and for nothing that takes long. One Python process
drives all GPUs, the weights are copied anew in each step, the first GPU holds all outputs, and
there is no way to a second machine: DDP is faster on any number of GPUs.

Without GPUs, or with one, DataParallel trains on that one device, and says so: the weights are then
bit-equal to single_process.py. With several they are not: each GPU normalises its own part of the
batch in BatchNorm, and the parts' gradients are added up in another order.
"""

from recipe.start import run_script

if __name__ == "__main__":  # before torch is loaded
    run_script(__file__)

import torch
from torch import nn

from recipe.loop import Rung


class OneProcess(Rung):
    """One process for all GPUs that it sees."""

    name, launcher, has_group = "data_parallel", "none", False

    def distribute(self) -> None:
        """Let the GPUs share each batch; on a CPU there is nothing to share."""
        gpus = torch.cuda.device_count() if self.device.type == "cuda" else 0
        if gpus < 2:
            one = "one GPU" if gpus else "the CPU"
            print(
                f"{self.name}: runs as one device, {one}: to share a batch takes two GPUs or more"
            )
        if gpus or not torch.cuda.is_available():  # it would use GPUs in spite of --no-cuda
            self.network = nn.DataParallel(self.model)
            self.devices = [torch.device("cuda", gpu) for gpu in range(gpus)] or self.devices


main = OneProcess.main
