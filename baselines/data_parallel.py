"""torch.nn.DataParallel, which guides use first for several GPUs: one process for all of them.

    python baselines/data_parallel.py

In each step the process copies the weights to every GPU, sends each a part of the batch, and adds
up their gradients on the first GPU. --batch-size is for all GPUs together, and the learning rate is
that of one worker. Only one line of a script changes, which is why guides begin with it.

Use it to try several GPUs in a notebook, but not for long trainings. One Python process drives all
GPUs, the weights are copied in each step, the first GPU holds all outputs, and a second machine
cannot take part: DDP is faster on any number of GPUs.

Without GPUs, or with one, DataParallel trains on a single device, and says so: the weights are then
bit-equal to single_process.py. With several GPUs they are not: in BatchNorm each GPU normalises its
own part of the batch, and the parts' gradients are added up in another order.
"""

from recipe.start import run_script

if __name__ == "__main__":  # before torch is loaded
    run_script(__file__)

import torch
from torch import nn

from recipe.loop import Rung


class OneProcess(Rung):
    """One process for all GPUs that are visible."""

    name, launcher, has_group = "data_parallel", "none", False
    lacks = ("compile",)  # the copies on other GPUs would run the compiled network of the first

    def prepare(self) -> None:
        """Take all GPUs."""
        gpus = torch.cuda.device_count() if self.device.type == "cuda" else 0
        self.devices = [torch.device("cuda", gpu) for gpu in range(gpus)]

    def distribute(self) -> None:
        """Split each batch over the GPUs; on a CPU there is nothing to split."""
        gpus = len(self.devices)
        if gpus < 2:
            device = "one GPU" if gpus else "the CPU"
            print(
                f"{self.name}: runs on one device, {device}: sharing a batch needs two GPUs or more"
            )
        if gpus or not torch.cuda.is_available():  # DataParallel would use GPUs despite --no-cuda
            self.network = nn.DataParallel(self.model)


main = OneProcess.main
