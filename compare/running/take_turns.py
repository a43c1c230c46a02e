"""Run a training script, unmodified, so that it takes turns with what it is compared with.

    python compare/running/take_turns.py --side NAME --warm-up 3 -- SCRIPT ...

Started under the script's own launcher, once for each rank. A trainer's `main` is called with
`Hooks`: what a step entails, be it a line of the record or a checkpoint, is inside a turn. Other
scripts call `compare.running.turn_client.step_ended` themselves.
"""

import argparse
import importlib
import os
import runpy
import sys
from dataclasses import replace
from pathlib import Path

from compare.running import turn_client
from compare.running.agent import start_agent
from recipe.errors import one_message
from recipe.start import Hooks, start

# Longer than a side ever stands still: Horovod's background threads on Gloo wait for each other all
# the time, and by a clock that goes on.
NEVER_S = "1000000"
TRAINERS = {"ddp_train", "horovod_train", "baselines"}  # folders whose scripts take hooks
ENDLESS_IMAGES = 1 << 22  # of an epoch, so that none ends in a turn


def main() -> None:
    """Start the agent, then be the script."""
    parser = argparse.ArgumentParser(
        prog="python compare/running/take_turns.py", description=__doc__
    )
    add = parser.add_argument
    add("--side", required=True, metavar="NAME", help="what this process is a part of")
    add("--copy", type=int, default=0, metavar="N", help="which of several alike on that side")
    add("--warm-up", type=int, required=True, metavar="STEPS", help="before the first turn")
    add("--overruns", action="store_true", help="go on after a turn until told to hold")
    add("program", nargs=argparse.REMAINDER, help="-- the script and its arguments")
    options = parser.parse_args()
    program = options.program[1:] if options.program[:1] == ["--"] else options.program
    agent = start_agent(options.side, options.copy)
    turn_client.CLIENT = turn_client.Client(agent, options.warm_up, options.overruns)
    os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = NEVER_S
    sys.argv = program
    folder = Path(program[0]).resolve().parent
    sys.path[0] = str(folder)  # as `python SCRIPT` has it
    if folder.name in TRAINERS:
        train(folder.name, Path(program[0]).stem)
    else:
        runpy.run_path(program[0], run_name="__main__")


def train(folder: str, script: str) -> None:
    """Be this trainer, whose steps are counted, all of batches as large as --batch-size says: it
    goes on past --max-steps, and no epoch ends in a turn. It keeps the waiting out of its clocks.
    """
    engine = (folder if script == "train" else script).removesuffix("_train")
    config, world = start(engine)
    config = replace(config, max_steps=None, batch_size_warmup_epochs=0)
    trainer = importlib.import_module(f"{folder}.{script}")  # loads torch: after the knobs are set
    with one_message(world):
        trainer.main(config, world, Hooks(turn_client.step_ended, ENDLESS_IMAGES))


if __name__ == "__main__":
    main()
