"""Small worlds, settings, models and folders of images for the tests of the recipe."""

import multiprocessing
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils.data
from PIL import Image
from torch import nn

from recipe.data.digits import open_digits
from recipe.settings.config import Config
from recipe.settings.presets import preset
from recipe.world import World

CPU = torch.device("cpu")
torch.set_num_threads(1)  # the tests share their cores with others
# Where an error has kept a loader until garbage is collected, its workers are not told to end, and
# torch waits so many seconds for each before it ends them.
torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.5


def a_world(rank: int = 0, size: int = 1, **others: Any) -> World:
    """Rank `rank` of `size` on one host, started by torchrun if there are several."""
    world = World(rank, size, rank, size, "torchrun" if size > 1 else "none", "here")
    return replace(world, **others)


def a_config(**others: Any) -> Config:
    """Settings for runs that take milliseconds."""
    return replace(
        preset("digits"),
        **{
            "train_crop_size": 8,
            "random_crop_scale": (0.3, 1.0),
            "val_resize_size": 8,
            "val_crop_size": 8,
            "batch_size": 4,
            "val_batch_size": 4,
            "threads": 1,
            **others,
        },
    )


def folder_config(root: Path, cache: Path | None = None, **others: Any) -> Config:
    """Settings that name `root`/train and `root`/val."""
    return a_config(
        data=str(root),
        train_dir=str(root / "train"),
        val_dir=str(root / "val"),
        cache_dir=str(cache or root / "cache"),
        **others,
    )


class TinyNet(nn.Module):
    """A convolution, BatchNorm, and a linear layer: [N, 3, any, any] to [N, classes]."""

    def __init__(self, num_classes: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.conv(images)).relu()
        logits: torch.Tensor = self.head(hidden.mean(dim=(2, 3)))
        return logits


def write_images(root: Path, per_class: int, classes: str = "abc") -> Path:
    """A folder of random 12x10 PNG images, one sub-folder a class."""
    rng = np.random.default_rng(0)
    for label in classes:
        (root / label).mkdir(parents=True)
        for index in range(per_class):
            pixels = rng.integers(0, 256, (10, 12, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / label / f"{index}.png")
    return root


def files_in(folder: Path) -> dict[str, bytes]:
    """The contents of all files below a folder, by their paths in it."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def write_digits(root: Path) -> Path:
    """The embedded digits, as class folders in train/ and val/."""
    for part in ("train", "val"):
        digits = open_digits(part)
        for index, path in enumerate(digits.paths.tolist()):
            file = root / part / path.decode()
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(digits.read(index))
    return root


def write_program(path: Path, text: str) -> Path:
    """A shell script that stands in for a program."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return path


def in_ranks(size: int, run: Callable[[int, Callable], Any]) -> list[Any]:
    """run(rank, sum_over_ranks) in as many threads as there are ranks; what each returned."""
    meeting, given = threading.Barrier(size, timeout=300), dict[int, torch.Tensor]()

    def of(rank: int) -> Any:
        def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
            given[rank] = values
            meeting.wait()
            forms = {(tensor.shape, tensor.dtype) for tensor in given.values()}
            assert len(forms) == 1, "engines hang, or worse"
            assert values.dtype.itemsize > 1, "Horovod adds up no bytes"
            ordered = [given[rank] for rank in range(size)]
            total = torch.stack(ordered).sum(dim=0, dtype=values.dtype)
            meeting.wait()  # before anybody gives the next ones
            return total

        return run(rank, sum_over_ranks)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(of, range(size)))


def at_once(work: Callable[[], bool], count: int = 4) -> None:
    """Have so many processes begin the same work at the same moment; all of it is to succeed."""
    context = multiprocessing.get_context("fork")
    start = context.Barrier(count)

    def run() -> None:
        start.wait()
        sys.exit(not work())

    processes = [context.Process(target=run) for _ in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * count
