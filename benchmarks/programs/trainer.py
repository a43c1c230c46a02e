"""Run a trainer of this project that takes turns with other programs. Images are random unless
--data is given.

    python benchmarks/programs/trainer.py ddp_train/train.py --arch resnet18 --batch-size 8
    torchrun --nproc-per-node 2 benchmarks/programs/trainer.py --alone ddp_train/train.py ...
    python benchmarks/programs/trainer.py --without-instruments ddp_train/train.py ...

--alone: each of torchrun's ranks trains alone and does not communicate with the others.
--without-instruments: leave out everything that takes time besides training: clocks, energy, files,
TensorBoard, console, and the metrics of the training batches.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

from compare.running import take_turns
from recipe.settings.flags import given_flags
from recipe.world import LAUNCHERS, read_world

# No epoch ends during a measurement, and no checkpoint is kept.
DEFAULTS = "--epochs 1000 --keep-checkpoints 0 --name run"
RANDOM_IMAGES = "--data synthetic --synthetic-images 1000000"


def main() -> None:
    """Run the trainer; flags of the command line override the defaults here."""
    defaults = DEFAULTS
    take_turns.TrainerClient.gives_facts = take_turns.TrainerClient.digest = True
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
    images = "" if "data" in given_flags(sys.argv) else RANDOM_IMAGES
    sys.argv[2:2] = f"{defaults} {images}".split()
    take_turns.main()


class Nothing:
    """Replaces the classes that record and measure: all its methods do nothing and return {}."""

    val_input, train_seconds, ended = None, 0.0, ()

    def __init__(self, *_: Any) -> None:
        self.energy = self.clock = self.console = self

    def __getattr__(self, name: str) -> Callable[..., dict[str, float]]:
        return lambda *_: {}


def take_instruments_out() -> None:
    """Replace the instruments by Nothing, before the trainer imports them."""
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
