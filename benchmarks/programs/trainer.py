"""Be a trainer of this project that takes turns with other programs, on random images if no others
are named.

    python benchmarks/programs/trainer.py ddp_train/train.py --arch resnet18 --batch-size 8
    torchrun --nproc-per-node 2 benchmarks/programs/trainer.py --alone ddp_train/train.py ...
    python benchmarks/programs/trainer.py --without-instruments ddp_train/train.py ...

--alone: each of torchrun's ranks is a trainer by itself, which knows nothing of the others.
--without-instruments: without all that takes time beside training: no clocks, energy, files,
TensorBoard and console, nor the metrics of the training batches.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

from compare.running import take_turns
from recipe.world import LAUNCHERS, read_world

# No epoch ends in a measurement, and nothing is kept.
DEFAULTS = "--epochs 1000 --keep-checkpoints 0 --name run"
RANDOM_IMAGES = "--data synthetic --synthetic-images 1000000"


def main() -> None:
    """Be the trainer; flags of the command line win over those here."""
    defaults = DEFAULTS
    if sys.argv[1] == "--alone":
        del sys.argv[1]
        defaults += f"-{read_world().rank}"
        take_turns.join_if_measured()
        for variable in (*LAUNCHERS["torchrun"].variables, *LAUNCHERS["torchrun"].job):
            os.environ.pop(variable, None)
    elif sys.argv[1] == "--without-instruments":
        del sys.argv[1]
        take_turns.join_if_measured()  # before torch is loaded
        take_instruments_out()
    images = "" if "--data" in sys.argv else RANDOM_IMAGES
    sys.argv[2:2] = f"{defaults} {images}".split()
    take_turns.main()


class Nothing:
    """Stands in for what records and measures: whatever is asked of it, it does and has nothing."""

    input, train_seconds, ended = None, 0.0, ()

    def __init__(self, *_: Any) -> None:
        self.energy = self.clock = self.console = self

    def __getattr__(self, name: str) -> Callable[..., dict[str, float]]:
        return lambda *_: {}


def take_instruments_out() -> None:
    """Put nothing in their place, before the trainer takes them from there."""
    import torch

    from recipe.record import meter, recorder
    from recipe.training import metrics

    no_sums: dict[torch.device, torch.Tensor] = {}

    def batch_sums(outputs: torch.Tensor, *_: Any) -> torch.Tensor:
        if outputs.device not in no_sums:
            no_sums[outputs.device] = torch.zeros(4, dtype=torch.float64, device=outputs.device)
        return no_sums[outputs.device]

    recorder.Recorder = meter.StepMeter = Nothing  # type: ignore[assignment,misc]
    metrics.batch_sums = batch_sums  # type: ignore[assignment]


if __name__ == "__main__":
    main()
