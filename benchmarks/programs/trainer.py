"""Be a trainer of this project that takes turns with other programs, on random images if no others
are named.

    python benchmarks/programs/trainer.py ddp_train/train.py --arch resnet18 --batch-size 8
"""

import sys

from compare.running import take_turns

# No epoch ends in a measurement, and nothing is kept.
DEFAULTS = "--epochs 1000 --keep-checkpoints 0 --name run"
RANDOM_IMAGES = "--data synthetic --synthetic-images 1000000"


def main() -> None:
    """Be the trainer; flags of the command line win over those here."""
    defaults = DEFAULTS if "--data" in sys.argv else f"{DEFAULTS} {RANDOM_IMAGES}"
    sys.argv[2:2] = defaults.split()
    take_turns.main()


if __name__ == "__main__":
    main()
