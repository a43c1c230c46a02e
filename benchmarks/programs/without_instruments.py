"""Run a trainer without all that takes time beside training: no clocks, energy, files, TensorBoard
and console, nor the metrics of the training batches. Row 6 compares it with the trainer as it is.

    python benchmarks/programs/without_instruments.py TRAINER ...
"""

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.programs.trainer import main
from recipe.record import meter, recorder
from recipe.training import metrics


class Nothing:
    """Stands in for what records and measures: whatever is asked of it, it does and has nothing."""

    input, train_seconds, ended = None, 0.0, ()

    def __init__(self, *_: Any) -> None:
        self.energy = self.clock = self.console = self

    def __getattr__(self, name: str) -> Callable[..., dict[str, float]]:
        return lambda *_: {}


def take_instruments_out() -> None:
    """Put nothing in their place, before the trainer takes them from there."""
    no_sums: dict[torch.device, torch.Tensor] = {}

    def batch_sums(outputs: torch.Tensor, *_: Any) -> torch.Tensor:
        if outputs.device not in no_sums:
            no_sums[outputs.device] = torch.zeros(4, dtype=torch.float64, device=outputs.device)
        return no_sums[outputs.device]

    parts: list[tuple[Any, str, Any]] = [
        (recorder, "Recorder", Nothing),
        (meter, "StepMeter", Nothing),
        (metrics, "batch_sums", batch_sums),
    ]
    for module, name, substitute in parts:
        setattr(module, name, substitute)


if __name__ == "__main__":
    take_instruments_out()
    main()
