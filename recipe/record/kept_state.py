"""State that ranks keep in their host's memory for their replacements (recipe/rank_forker.py).

When another rank is lost, a rank keeps its state after the last complete step, like a checkpoint.
BatchNorm's statistics differ from rank to rank, so each rank notes its own in each step. A lost
rank may have been two steps ahead of the others, which can be slow to receive its messages: so the
notes cover three steps.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn

STEPS = 3


class KeptState:
    """A rank's state and notes, in its watcher's files. For CPUs only: each step would have to wait
    for a GPU, and over NCCL a rank does not learn of a loss."""

    def __init__(self, model: nn.Module, files: tuple[int, int]) -> None:
        state, notes = (f"/proc/self/fd/{number}" for number in files)
        self.state, self.buffers = Path(state), [*model.buffers()]
        size = 1 + sum(buffer.numel() for buffer in self.buffers)
        table = torch.from_file(notes, shared=True, size=1 + STEPS * size, dtype=torch.float64)
        # The state's step, then the notes, each preceded by its step. 0 means none: there is no
        # state to keep before the first step.
        self.step, self.notes = table[:1], table[1:].view(STEPS, size)

    def keep(self, contents: dict[str, Any], step: int) -> None:
        """Keep what a checkpoint of `step` would hold."""
        self.forget()  # until it is complete
        torch.save(contents, self.state)
        self.step[0] = step

    def forget(self) -> None:
        """Drop the state: training continues, so it is no longer the last step's."""
        self.step[0] = 0

    def note_statistics(self, step: int) -> None:
        """Note BatchNorm's statistics as they are after the forward passes of `step`."""
        note = self.notes[step % STEPS]
        note[0] = 0  # until it is complete
        note[1:] = torch.cat([note[:0], *(buffer.flatten() for buffer in self.buffers)])
        note[0] = step

    def take_statistics(self, step: int) -> None:
        """Restore BatchNorm's statistics of `step`, if they were noted."""
        note = self.notes[step % STEPS]
        if note[0] == step:
            values = note[1:].split([buffer.numel() for buffer in self.buffers])
            for buffer, noted in zip(self.buffers, values, strict=True):
                buffer.copy_(noted.view_as(buffer))
