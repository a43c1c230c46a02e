"""Make an engine's all-reduce a side that takes turns.

    torchrun --nproc-per-node 2 compare/running/allreduce_side.py ddp_train/torch_allreduce.py ...

compare/collectives.py starts this file on each rank, with the engine's script, which knows nothing
of comparisons. It takes part before anything large is loaded, like a trainer (take_turns.py).
"""

import importlib
import sys
from pathlib import Path
from typing import Any

from compare.for_scripts.comparison_side import Client, join


class AllReduceClient(Client):
    """An all-reduce's turns. Only a step's own seconds count: what it does between two sums is no
    part of them. The record names the transport, and how many ranks share a GPU."""

    timed, transport = 0.0, ""
    ranks_per_gpu: int | None = None

    def step_ended(self, unit: str, amount: float, seconds: float = 0.0) -> None:
        self.timed += seconds
        super().step_ended(unit, amount)

    def begin(self) -> None:
        self.timed = 0.0
        super().begin()

    def measured(self) -> dict[str, Any]:
        values = super().measured() | {"seconds": self.timed}
        if "facts" in values:
            values["facts"] |= {"transport": self.transport, "ranks_per_gpu": self.ranks_per_gpu}
        return values


def main() -> None:
    """Load the script, and sum what the turns ask for."""
    client = AllReduceClient(*join())
    script = Path(sys.argv.pop(1)).resolve()
    sys.path[0] = str(script.parents[1])
    module = importlib.import_module(f"{script.parent.name}.{script.stem}")
    from recipe.allreduce_loop import run  # loads torch

    run(module.connect, client)


if __name__ == "__main__":
    main()
