"""A bare training loop: the reference for the overhead of the trainers.

    python benchmarks/programs/bare_loop.py --arch resnet18 --batch-size 16 --steps 20

One random batch, already normalised; forward, loss, backward, SGD with momentum. No data, no
metrics, no schedule, no record, no other ranks.
"""

import time
from collections.abc import Callable
from typing import Literal

import torch
import torchvision
import tyro
from torch import nn

from compare.for_scripts.comparison_side import Side, synchronize
from recipe.device import keep_freed_memory


def main(
    arch: str = "resnet50",
    train_crop_size: int = 224,
    batch_size: int = 32,
    threads: int = 1,
    steps: int | None = None,
    precision: Literal["fp32", "bf16"] = "fp32",
    channels_last: bool = False,
    as_trainers: bool = False,
) -> None:
    """Train until `steps`, or for ever.

    Args:
        arch: A classification model of torchvision.
        train_crop_size: Side of the images, pixels.
        batch_size: Images per step.
        threads: CPU threads.
        steps: End after this number of steps (default: never).
        precision: fp32, or bf16 by autocast.
        channels_last: NHWC images, as with the trainers' flag of this name.
        as_trainers: Use fused SGD and keep freed memory, as the trainers do.
    """
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":  # as the trainers set it
        torch.backends.cudnn.benchmark = True
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    model = torchvision.models.get_model(arch, weights=None).to(device).train()
    images = torch.randn(batch_size, 3, train_crop_size, train_crop_size, device=device)
    if channels_last:
        images = images.contiguous(memory_format=torch.channels_last)
    targets = torch.randint(0, 1000, (batch_size,), device=device)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=1e-3, momentum=0.9, weight_decay=5e-5, fused=as_trainers or None
    )
    if as_trainers and device.type == "cpu":
        keep_freed_memory()
    criterion = nn.CrossEntropyLoss()

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            loss = criterion(model(images), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    print(f"{take_steps(step, steps, batch_size):.1f} images/s")


def take_steps(step: Callable[[], None], steps: int | None, images: int) -> float:
    """Make `steps` steps of `images` images (None: for ever) and return the images per second."""
    side, began, done = Side(), time.perf_counter(), 0
    while steps is None or done < steps:
        step()
        done += 1
        side.step(images=images)
    synchronize()
    return images * done / (time.perf_counter() - began)


if __name__ == "__main__":
    tyro.cli(main, prog="benchmarks/programs/bare_loop.py", description=__doc__)
