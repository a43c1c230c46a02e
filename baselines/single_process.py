"""The first rung: the same training in one process, without an engine.

    python baselines/single_process.py

It changes nothing in the loop of recipe/loop.py; every other rung is defined by its differences
from that loop. On one worker both train.py must give exactly the same bits as this script, which a
test checks.
"""

from recipe.start import run_script

if __name__ == "__main__":  # before torch is loaded
    run_script(__file__)

from recipe.loop import Rung


class SingleProcess(Rung):
    """One process for one device."""

    name, launcher, has_group = "single_process", "none", False
    has = ("precision O2", "precision O3", "keep_batchnorm_fp32")


main = SingleProcess.main
