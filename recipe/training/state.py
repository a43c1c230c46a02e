"""What training changes: the trained parts, and how far it has come."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

if TYPE_CHECKING:
    from recipe.training.precision import LossScaler


@dataclass
class Progress:
    """How far training has come; of its best top-1 and its clock, rank 0's are what is kept."""

    step: int = 0  # optimizer steps
    samples_seen: int = 0  # over all ranks: the position in the stream of samples
    best_top1: float = -1.0  # percent; below 0 before the first evaluation
    total_seconds: float = 0.0  # on the training clock, over all the run's sessions
    skipped_steps: int = 0  # of `step`, those that changed no weight: their gradients overflowed

    def end_step(self, num_samples: int, total_seconds: float, skipped_steps: int) -> None:
        """Count an optimizer step on `num_samples` images over all ranks; `skipped_steps` have been
        left out so far."""
        self.step += 1
        self.samples_seen += num_samples
        self.total_seconds = total_seconds
        self.skipped_steps = skipped_steps

    def take_best(self, figures: dict[str, float]) -> bool:
        """Keep the best top-1 so far; whether it is that of the last evaluation's `figures`."""
        is_best = figures.get("top1", -1.0) > self.best_top1
        self.best_top1 = max(self.best_top1, figures.get("top1", -1.0))
        return is_best


@dataclass
class Trainables:
    """Everything that training changes, without any engine's wrapper."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: "LossScaler"
    ema: AveragedModel | None
    fp16_model: nn.Module | None = None  # what computes for it: itself, or under O2 a fp16 copy

    def whole(self) -> "Trainables":
        """All that is trained, as one process has it, to be evaluated, kept and compared. All ranks
        call this; the optimizer's state is asked for on rank 0 alone. BatchNorm's statistics are to
        be the trained network's own, not copies: they may be overwritten."""
        return self
