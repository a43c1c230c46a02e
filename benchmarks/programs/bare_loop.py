"""The loop of training with nothing around it: what a trainer's own overhead is measured against.

    python benchmarks/programs/bare_loop.py --arch resnet18 --batch-size 16 --steps 20

One random batch, normalised once and for all; forward, loss, backward, SGD with momentum. No data,
no metrics, no schedule, no record, no other ranks.
"""

import argparse
import time

import torch
import torchvision
from torch import nn

from compare.running import take_turns
from recipe.device import keep_freed_memory


def loop_parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """The flags that the reference loops have in common with the trainers, and --steps."""
    parser = argparse.ArgumentParser(
        prog=f"python benchmarks/programs/{name}.py",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--arch", default="resnet50", help="a classification model of torchvision")
    add("--train-crop-size", type=int, default=224, help="side of the images, pixels")
    add("--batch-size", type=int, default=32, help="images a step and rank")
    add("--threads", type=int, help="CPU threads (default: torch's)")
    add("--steps", type=int, help="end after so many (default: never)")
    return parser


def main() -> None:
    """Train until --steps, or for ever."""
    parser = loop_parser("bare_loop", __doc__)
    parser.set_defaults(threads=1)
    add = parser.add_argument
    add("--precision", choices=("fp32", "bf16"), default="fp32", help="bf16: by autocast")
    add("--channels-last", action="store_true", help="NHWC images, as the trainers have them")
    add("--as-trainers", action="store_true", help="fused SGD, and freed memory is kept, as there")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":  # as the trainers set it
        torch.backends.cudnn.benchmark = True
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    model = torchvision.models.get_model(options.arch, weights=None).to(device).train()
    size = options.train_crop_size
    images = torch.randn(options.batch_size, 3, size, size, device=device)
    if options.channels_last:
        images = images.contiguous(memory_format=torch.channels_last)
    targets = torch.randint(0, 1000, (options.batch_size,), device=device)
    fused = options.as_trainers or None
    optimizer = torch.optim.SGD(
        model.parameters(), lr=1e-3, momentum=0.9, weight_decay=5e-5, fused=fused
    )
    if options.as_trainers and device.type == "cpu":
        keep_freed_memory()
    criterion = nn.CrossEntropyLoss()

    started, step = time.perf_counter(), 0
    while options.steps is None or step < options.steps:
        with torch.autocast(device.type, torch.bfloat16, enabled=options.precision == "bf16"):
            loss = criterion(model(images), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        take_turns.step_ended()
    take_turns.synchronize()
    print(f"{step * options.batch_size / (time.perf_counter() - started):.1f} images/s")


if __name__ == "__main__":
    main()
