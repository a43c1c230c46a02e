"""Make an engine's all-reduce a side that takes turns.

    torchrun --nproc-per-node 2 compare/running/allreduce_side.py ddp_train/torch_allreduce.py ...

compare/collectives.py starts this file on each rank, with the engine's script, which knows nothing
of comparisons. It takes part before anything large is loaded, like a trainer (take_turns.py).
"""

import importlib
import sys
from pathlib import Path

from compare.running import take_turns


def main() -> None:
    """Load the script, and sum what the turns ask for."""
    client = take_turns.join()
    script = Path(sys.argv.pop(1)).resolve()
    sys.path[0] = str(script.parents[1])
    module = importlib.import_module(f"{script.parent.name}.{script.stem}")
    from recipe.allreduce_loop import run  # loads torch

    run(module.connect, client)


if __name__ == "__main__":
    main()
