"""What a rank leaves in its host's memory for the one that takes its place (recipe/nursery.py).

A rank that loses another one keeps its state there, as of the step that has ended last: like a
checkpoint, whole or not at all. BatchNorm's statistics differ from rank to rank, so each one on a
CPU keeps its own after each forward pass. It may be two steps ahead of what the others have when it
is lost: they can be slow to receive what it has sent. Outside of a nursery nothing is kept.
"""

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from recipe import nursery

# The file of the notes: the state's step; then, of each of the last three steps, one more than its
# number, and the statistics.
NUMBER_BYTES, STEPS = 8, 3


def _note(number: int, place: int = 0) -> None:
    os.pwrite(nursery.notes, number.to_bytes(NUMBER_BYTES, "little"), place)


def _noted(place: int = 0) -> int:
    return int.from_bytes(os.pread(nursery.notes, NUMBER_BYTES, place), "little")


def keep_state(contents: dict[str, Any], step: int) -> None:
    """Keep what a checkpoint of `step` would hold."""
    forget_state()
    with open(nursery.state, "wb", closefd=False) as file:
        torch.save(contents, file)
    _note(step)


def forget_state() -> None:
    """Drop it: the training has gone on."""
    if nursery.state:
        _note(0)
        os.ftruncate(nursery.state, 0)
        os.lseek(nursery.state, 0, os.SEEK_SET)


def kept_state() -> tuple[Path | None, int]:
    """The file that holds a state, and its step; None and 0 without one."""
    step = _noted() if nursery.state else 0
    return Path(f"/proc/self/fd/{nursery.state}") if step else None, step


def _statistics_of(model: nn.Module, step: int) -> tuple[list[torch.Tensor], int]:
    """The buffers, none of which is kept on a GPU, where it would be waited for; their place."""
    buffers = [one for one in model.buffers() if nursery.notes and not one.is_cuda]
    count = sum(buffer.numel() for buffer in buffers)
    return buffers, NUMBER_BYTES * (1 + step % STEPS * (1 + count))


def keep_statistics(model: nn.Module, step: int) -> None:
    """Keep BatchNorm's statistics after the forward passes of `step`."""
    buffers, place = _statistics_of(model, step)
    if buffers:
        _note(0, place)  # until all of it is there
        values = torch.cat([buffer.flatten().double() for buffer in buffers])
        os.pwrite(nursery.notes, values.numpy().data, place + NUMBER_BYTES)
        _note(step + 1, place)


def take_statistics(model: nn.Module, step: int) -> None:
    """Take those of `step`, if they are there."""
    buffers, place = _statistics_of(model, step)
    if buffers and _noted(place) == step + 1:
        sizes = [buffer.numel() for buffer in buffers]
        content = os.pread(nursery.notes, NUMBER_BYTES * sum(sizes), place + NUMBER_BYTES)
        values = torch.frombuffer(bytearray(content), dtype=torch.float64)
        for buffer, own in zip(buffers, values.split(sizes), strict=True):
            buffer.copy_(own.view_as(buffer))
