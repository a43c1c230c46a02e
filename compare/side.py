"""Make a training script of your own a side of a comparison: one import, and one call a step.

    from compare.side import Side

    side = Side()
    for images, labels in batches:
        ...                            # a step, by whatever library
        side.step(images=len(images))  # at its end: what this rank has done

    python compare/run.py --side mine="torchrun --nproc-per-node 2 my_ddp.py" \\
                          --side theirs="horovodrun -np 2 python my_horovod.py"

Started by hand, the script runs as without it: nothing is loaded and `step` returns at once. In a
comparison `step` waits while others have their turns, and ends the process when all is measured:
let the script train on until then, for a million epochs say.

This file needs nothing but Python; while it is measured also psutil, and this project on the path,
which run.py sees to.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any


class Side:
    """What a rank of the script tells of its steps, where someone measures them.

    Args:
        weights: Returns the trained arrays or tensors by name, as `model.state_dict` does. Called
            once, after the first steps: equal digests show that two scripts do equal work. All
            ranks must hold the same, BatchNorm's running statistics aside.
        ranks: Of this script, in all; by default as many as its launcher's variables say, so that
            it is needed where the script starts its own ranks.
    """

    def __init__(
        self, weights: Callable[[], Mapping[str, Any]] | None = None, ranks: int | None = None
    ) -> None:
        self._client: Any = None
        if "COMPARE_SCHEDULER" in os.environ:
            from compare.running.take_turns import join

            self._client = join(ranks, weights)

    def step(self, **done: float) -> None:
        """Say that a step has ended, and what this rank has done in it, in the unit that speeds are
        to be told in: `images=64`, or `tokens=8192`. Work on a GPU that torch has been given is
        waited for; that of another library the script must wait for itself."""
        if len(done) != 1:
            raise TypeError("say what this step has done in one unit, as in step(images=64)")
        if self._client is not None:
            ((unit, amount),) = done.items()
            self._client.step_ended(unit=unit, amount=float(amount))
