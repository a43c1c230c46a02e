"""The ways from JPEG files to batches that row 3 compares, taking turns in one process.

    python benchmarks/harness/pipelines.py IMAGES --out turns.json

Each round hands the same images to all of them, the next ones of the training's own order, forwards
and backwards alternately. The process has one thread and keeps freed memory, as a loader process of
the trainers does.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import simplejpeg
import torch
from PIL import Image
from torchvision import io, transforms
from torchvision.transforms import v2

from compare.evidence.turns import Turn
from compare.running.launch import busy_cpu_seconds
from compare.running.turns import wait_for_quiet
from recipe.config import Config
from recipe.data.batches import TrainImages
from recipe.data.image_folder import Listing, list_images
from recipe.data.order import SampleStream
from recipe.device import keep_freed_memory

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
BATCH_SIZE = 32

Contender = Callable[[list[int]], object]  # from the indices of a batch to what comes out


def contenders(listing: Listing, config: Config) -> dict[str, Contender]:
    """What takes turns, by name; all but the first end in a batch."""
    paths = [listing.path(index) for index in range(len(listing))]
    images = TrainImages(listing, config)
    size = config.train_crop_size
    by_v2 = v2.Compose([v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip()])
    by_pillow = transforms.Compose(
        [
            transforms.RandomResizedCrop(size),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )

    def raw(indices: list[int]) -> None:
        for index in indices:
            with open(paths[index], "rb", buffering=0) as file:
                simplejpeg.decode_jpeg(file.read())

    def steady(indices: list[int]) -> object:
        return images.__getitems__([(1, index) for index in indices])

    def first_epoch(indices: list[int]) -> object:
        return images.__getitems__([(0, index) for index in indices])

    def torchvision_v2(indices: list[int]) -> object:
        files = (io.read_file(paths[index]) for index in indices)
        return torch.stack([by_v2(io.decode_jpeg(file, io.ImageReadMode.RGB)) for file in files])

    def pillow(indices: list[int]) -> object:
        pictures = (Image.open(paths[index]).convert("RGB") for index in indices)
        return torch.stack([by_pillow(picture) for picture in pictures])

    return {
        "raw": raw,
        "pipeline": steady,
        "first-epoch": first_epoch,
        "torchvision-v2": torchvision_v2,
        "pillow": pillow,
    }


def take_turn(name: str, contender: Contender, batches: Sequence[list[int]], round_: int) -> Turn:
    """One contender's turn, over these batches."""
    busy, began, cpu_began = busy_cpu_seconds(), time.monotonic(), time.process_time()
    for batch in batches:
        contender(batch)
    cpu_seconds, seconds = time.process_time() - cpu_began, time.monotonic() - began
    others = max(0.0, busy_cpu_seconds() - busy - cpu_seconds) / seconds
    images = sum(map(len, batches))
    return Turn(name, round_, seconds, images / seconds, cpu_seconds / images, round(others, 3))


def main() -> None:
    """Let all take turns and write what each turn took."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/harness/pipelines.py", description=__doc__
    )
    add = parser.add_argument
    add("images", type=Path, help="a folder with train/ in ImageNet's layout")
    add("--out", type=Path, required=True, metavar="FILE", help="where the turns are written")
    add("--order", metavar="NAME,NAME", help="of the first round (default: all, raw first)")
    add("--rounds", type=int, default=10, metavar="N", help="turns of each (default: 10)")
    add("--batches", type=int, default=3, metavar="N", help="a turn, of 32 images (default: 3)")
    add("--patience", type=float, default=0.0, metavar="S", help="a round waits for quiet (0)")
    add("--seed", type=int, default=0, metavar="N", help="of the order of images (default: 0)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    torch.manual_seed(options.seed)  # torchvision's crops
    config = Config(seed=options.seed)
    listing = list_images(options.images / "train", Path(config.cache_dir).expanduser())
    found = contenders(listing, config)
    names = options.order.split(",") if options.order else list(found)
    stream = SampleStream(len(listing), options.seed)

    def batches(first: int, count: int) -> list[list[int]]:
        positions = np.arange(BATCH_SIZE * first, BATCH_SIZE * (first + count))
        indices = [index for _, index in stream.samples(positions)]
        return [indices[at : at + BATCH_SIZE] for at in range(0, len(indices), BATCH_SIZE)]

    for name in names:
        for batch in batches(0, 2):
            found[name](batch)  # the first calls pay for memory, and fill the page cache
    turns: list[Turn] = []
    for round_ in range(options.rounds):
        chosen = batches(round_ * options.batches, options.batches)
        for batch in chosen:
            for index in batch:
                Path(listing.path(index)).read_bytes()  # so that none pays for the disk
        wait_for_quiet(options.patience)
        for name in names if round_ % 2 == 0 else reversed(names):
            turns.append(take_turn(name, found[name], chosen, round_))
    options.out.write_text(json.dumps([asdict(turn) for turn in turns]) + "\n")


if __name__ == "__main__":
    main()
