"""Be a trainer of this project that takes turns with other programs, on random images if no others
are named.

    python benchmarks/programs/trainer.py ddp_train/train.py --arch resnet18 --batch-size 8
    torchrun --nproc-per-node 2 benchmarks/programs/trainer.py --alone ddp_train/train.py ...

--alone: each of torchrun's ranks is a trainer by itself, which knows nothing of the others.
"""

import os
import sys

from compare.running import take_turns
from recipe.world import LAUNCHERS, read_world

# No epoch ends in a measurement, and nothing is kept.
DEFAULTS = "--epochs 1000 --keep-checkpoints 0 --name run"
RANDOM_IMAGES = "--data synthetic --synthetic-images 1000000"


def main() -> None:
    """Be the trainer; flags of the command line win over those here."""
    is_alone = sys.argv[1] == "--alone"
    images = "" if "--data" in sys.argv else RANDOM_IMAGES
    name = f"-{read_world().rank}" if is_alone else ""
    if is_alone:
        del sys.argv[1]
        take_turns.join_if_measured()
        for variable in (*LAUNCHERS["torchrun"].variables, *LAUNCHERS["torchrun"].job):
            os.environ.pop(variable, None)
    sys.argv[2:2] = f"{DEFAULTS}{name} {images}".split()
    take_turns.main()


if __name__ == "__main__":
    main()
