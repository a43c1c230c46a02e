"""What ranks leave in their host's memory for those that take their places (recipe/nursery.py).

A rank that loses another one keeps its state, as of the last step that has ended: like a
checkpoint. BatchNorm's statistics differ from rank to rank, so each one notes its own in each step.
A rank may be two steps ahead of the others when it is lost, for they can be slow to receive what it
has sent: the notes are of three steps.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn

STEPS = 3


class Spare:
    """A rank's state and notes, in the files of its nursery. On CPUs: a GPU would be waited for in
    each step, and over NCCL a rank does not hear of a loss."""

    def __init__(self, model: nn.Module, files: tuple[int, int]) -> None:
        state, notes = (f"/proc/self/fd/{number}" for number in files)
        self.state, self.buffers = Path(state), [*model.buffers()]
        size = 1 + sum(buffer.numel() for buffer in self.buffers)
        table = torch.from_file(notes, shared=True, size=1 + STEPS * size, dtype=torch.float64)
        # The step of the state; and notes, each after its step: 0 is none, since no loss comes
        # before the first step.
        self.step, self.notes = table[:1], table[1:].view(STEPS, size)

    def keep(self, contents: dict[str, Any], step: int) -> None:
        """Keep what a checkpoint of `step` would hold."""
        self.forget()  # until all of it is there
        torch.save(contents, self.state)
        self.step[0] = step

    def forget(self) -> None:
        """Have no state: training goes on, and it is no longer that of the last step."""
        self.step[0] = 0

    def note_statistics(self, step: int) -> None:
        """Note them as they are after the forward passes of `step`."""
        note = self.notes[step % STEPS]
        note[0] = 0  # until all of it is there
        note[1:] = torch.cat([note[:0], *(buffer.flatten() for buffer in self.buffers)])
        note[0] = step

    def take_statistics(self, step: int) -> None:
        """Take those of `step`, if they were noted."""
        note = self.notes[step % STEPS]
        if note[0] == step:
            values = note[1:].split([buffer.numel() for buffer in self.buffers])
            for buffer, own in zip(self.buffers, values, strict=True):
                buffer.copy_(own.view_as(buffer))
