"""Make your own training script a side of a comparison: one import, and one call per step.

    from compare.side import Side

    side = Side()
    for images, labels in batches:
        ...                            # a step, with any library
        side.step(images=len(images))  # at its end: the work of this rank

    python compare/run.py --side mine="torchrun --nproc-per-node 2 my_ddp.py" \\
                          --side theirs="horovodrun -np 2 python my_horovod.py"

Started by hand, the script runs as before: nothing is loaded and `step` returns at once. In a
comparison `step` waits while other sides have their turns, and ends the process when the
measurement is over. The script must keep training until then, for example for a million epochs.

This file needs nothing but Python. In a comparison it also needs psutil, and this project on
PYTHONPATH, which run.py sets.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any


class Side:
    """Reports the steps of one rank of the script while a comparison runs.

    Args:
        weights: Returns the trained arrays or tensors by name, as `model.state_dict` does. Called
            once, after the first steps: equal digests show that two scripts do equal work. All
            ranks must have the same values, except for BatchNorm's running statistics.
        ranks: The script's total number of ranks. By default the launcher's variables give it; give
            it here if the script starts its own ranks.
    """

    def __init__(
        self, weights: Callable[[], Mapping[str, Any]] | None = None, ranks: int | None = None
    ) -> None:
        self._client: Any = None
        if "COMPARE_SCHEDULER" in os.environ:
            from compare.running.take_turns import join

            self._client = join(ranks, weights)

    @property
    def case(self) -> str:
        """The case of the next step, by its name in the plan: one launch measures all cases, and
        changes between them. "" in a plan without cases, in the first steps, and by hand."""
        return self._client.case if self._client is not None else ""

    def step(self, **done: float) -> None:
        """Report the end of a step and this rank's work in it, such as `images=64` or
        `tokens=8192`; speeds have the same unit. torch's work on a GPU is waited for; with another
        library, the script must do so before the call."""
        if len(done) != 1:
            raise TypeError("give the work of this step in one unit, as in step(images=64)")
        if self._client is not None:
            ((unit, amount),) = done.items()
            self._client.step_ended(unit=unit, amount=float(amount))
