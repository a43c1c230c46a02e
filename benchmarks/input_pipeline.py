"""Row 3: how much of the input pipeline's time is more than decoding?

The trainer's pipeline (a JPEG file is read, decoded, cropped, resized, flipped, and is part of a
uint8 batch) and libjpeg-turbo's bare decoding of the same files (read, simplejpeg.decode_jpeg with
its defaults, nothing done with the pixels) take short turns in one process, with one thread, as a
loader process has it. A block is a process. The ratio is of images per CPU-second. Files are those
of tools/make_jpegs.py, 500 x 375 pixels of some 100 KB, and are in the page cache.

The goal belongs to the steady state, where decoding ends where the crop ends: all epochs but the
first. In the first one each file is decoded whole, and so looked at for damage; that has a row
without a goal. So have, for reference, torchvision's v2 transforms on uint8 after its decode_jpeg,
and the classic pipeline of Pillow, ToTensor and Normalize, which ends in normalised fp32.
"""

import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import simplejpeg
import torch
from PIL import Image
from torchvision import io, transforms
from torchvision.transforms import v2

from benchmarks.by_turns import (
    QUICK_JPEGS,
    Benchmark,
    Pair,
    jpegs_folder,
    make_rows,
    until_decided,
)  # fmt: skip
from benchmarks.record import Measured, Options
from compare.evidence.turns import Block, Turn
from compare.plan.blocks import shuffled
from compare.running.launch import busy_cpu_seconds
from compare.running.scheduler import say, wait_for_quiet
from recipe.data.batches import Images, SampleStream
from recipe.data.image_folder import Listing, list_images
from recipe.data.images import TrainTransform
from recipe.device import keep_freed_memory
from recipe.settings.config import Config, home_path

RAW = "raw"
NAMES = {
    "pipeline": "input pipeline / raw JPEG decoding",
    "first-epoch": "input pipeline / raw JPEG decoding, first epoch",
    "torchvision-v2": "torchvision v2 on uint8 / raw JPEG decoding",
    "pillow": "Pillow, ToTensor, Normalize / raw JPEG decoding",
}
# Turns of some 0.15 s: nothing has to be started, stopped or settle down between them, and the more
# there are, the less does a moment in which the processor was slower weigh.
BATCH_SIZE, BATCHES, SHORT_TURNS = 32, 3, 4  # images; a turn; for each turn that is asked for
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LIMIT_SECONDS = 1200.0  # of a block
DECLARED = Benchmark(
    name="input_pipeline",
    row=3,
    side={},
    pair={
        label: Pair((name, RAW), 0.80 if name == "pipeline" else None)
        for name, label in NAMES.items()
    },
    value="images per CPU-second",
)

Contender = Callable[[list[int]], object]  # from the indices of a batch to what comes out


def measure(options: Options) -> Measured:
    """Measure the row, and what stands beside it for reference."""
    jpegs = jpegs_folder(QUICK_JPEGS if options.quick else 640)
    rounds = options.rounds() * (1 if options.quick else SHORT_TURNS)

    def block_of(number: int, label: str) -> Block:
        say(label)
        order = shuffled([RAW, *NAMES], number)
        # A new process, which knows nothing of this one's threads and memory.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            turns = pool.submit(take_turns, jpegs, order, rounds, number, options.patience).result(
                LIMIT_SECONDS
            )
        return Block(number, tuple(order), tuple(turns))

    rows_of = partial(make_rows, DECLARED, "JPEG files of 500 x 375 pixels", options=options)
    blocks = until_decided(options, "row 3", block_of, rows_of)
    return Measured(rows_of(blocks), blocks={DECLARED.name: blocks})


def contenders(listing: Listing, config: Config) -> dict[str, Contender]:
    """What takes turns, by name; all but the first end in a batch."""
    paths = [listing.name(index) for index in range(len(listing))]
    images = Images(listing, config, TrainTransform(config))
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

    def torchvision_v2(indices: list[int]) -> object:
        files = (io.read_file(paths[index]) for index in indices)
        return torch.stack([by_v2(io.decode_jpeg(file, io.ImageReadMode.RGB)) for file in files])

    def pillow(indices: list[int]) -> object:
        pictures = (Image.open(paths[index]).convert("RGB") for index in indices)
        return torch.stack([by_pillow(picture) for picture in pictures])

    return {
        RAW: raw,
        "pipeline": lambda indices: images.__getitems__([(1, index) for index in indices]),
        "first-epoch": lambda indices: images.__getitems__([(0, index) for index in indices]),
        "torchvision-v2": torchvision_v2,
        "pillow": pillow,
    }


def take_turns(
    jpegs: Path, order: Sequence[str], rounds: int, seed: int, patience: float
) -> list[Turn]:
    """Let all contenders take turns in this process. Each round hands the same images to all of
    them, the next ones of the training's own order, forwards and backwards alternately."""
    torch.set_num_threads(1)
    keep_freed_memory()
    torch.manual_seed(seed)  # torchvision's crops
    config = Config(seed=seed)
    listing = list_images(jpegs / "train", Path(home_path("--cache-dir", config.cache_dir)))
    found, stream = contenders(listing, config), SampleStream(len(listing), seed)

    def batches(first: int, count: int) -> list[list[int]]:
        positions = np.arange(BATCH_SIZE * first, BATCH_SIZE * (first + count))
        indices = [index for _, index in stream.samples(positions)]
        return [indices[at : at + BATCH_SIZE] for at in range(0, len(indices), BATCH_SIZE)]

    for name in order:
        for batch in batches(0, 2):
            found[name](batch)  # the first calls pay for memory, and fill the page cache
    turns: list[Turn] = []
    for round_ in range(rounds):
        chosen = batches(round_ * BATCHES, BATCHES)
        for batch in chosen:
            for index in batch:
                Path(listing.name(index)).read_bytes()  # so that none pays for the disk
        wait_for_quiet(patience)
        for name in order if round_ % 2 == 0 else reversed(order):
            turns.append(take_turn(name, found[name], chosen, round_))
    return turns


def take_turn(name: str, contender: Contender, batches: Sequence[list[int]], round_: int) -> Turn:
    """One contender's turn, over these batches."""
    busy, began, cpu_began = busy_cpu_seconds(), time.monotonic(), time.process_time()
    for batch in batches:
        contender(batch)
    cpu_seconds, seconds = time.process_time() - cpu_began, time.monotonic() - began
    others = max(0.0, busy_cpu_seconds() - busy - cpu_seconds) / seconds
    images = sum(map(len, batches))
    return Turn(name, round_, seconds, images, cpu_seconds / images, round(others, 3))
