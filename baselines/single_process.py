"""The first rung: the same training in one process, with no engine at all.

    python baselines/single_process.py

It leaves everything as it is: its steps are those of recipe/loop.py, from which each other rung
says how it differs. What both train.py do on one worker must come out bit by bit as here; a test
holds them to it.
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
