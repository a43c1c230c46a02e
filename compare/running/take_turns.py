"""Run a training script, unmodified, so that it takes turns with what it is compared with.

    python compare/running/take_turns.py --side NAME --warm-up 3 -- SCRIPT ...

Started under the script's own launcher, once for each rank. The trainers call
`recipe.record.meter.AT_STEP_END` at the end of each step: whatever it entails, be it a line of the
record or a checkpoint, is inside a turn. Other scripts call
`compare.running.turn_client.step_ended` themselves.
"""

import argparse
import os
import runpy
import sys
from pathlib import Path

from compare.running import turn_client
from compare.running.agent import start_agent

# Longer than a side ever stands still: Horovod's background threads on Gloo wait for each other all
# the time, and by a clock that goes on.
NEVER_S = "1000000"
TRAINERS = {"ddp_train", "horovod_train", "baselines"}  # folders whose scripts use recipe's meter


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
    if Path(program[0]).resolve().parent.name in TRAINERS:
        hook_trainer()
    sys.argv = program
    sys.path[0] = str(Path(program[0]).resolve().parent)  # as `python SCRIPT` has it
    runpy.run_path(program[0], run_name="__main__")


def hook_trainer() -> None:
    """Have the trainer's steps counted, the waiting kept out of its own clocks, and no epoch's end
    in a turn."""
    from recipe.data import batches
    from recipe.record import meter

    meter.AT_STEP_END.append(lambda step: turn_client.step_ended())
    batches.IS_ENDLESS = True


if __name__ == "__main__":
    main()
