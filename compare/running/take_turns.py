"""Run a training script, unmodified, so that it takes turns with what it is compared with.

    python compare/running/take_turns.py --side NAME --warm-up 3 -- SCRIPT ...

Started under the script's own launcher, once for each rank. A trainer's `main` is called with
`Hooks`: what a step entails, be it a line of the record or a checkpoint, is inside a turn. Other
scripts call `step_ended` themselves; it does nothing where nobody measures, so that such a script
also runs alone.
"""

import argparse
import importlib
import os
import runpy
import sys
import time
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

from compare.running.launch import busy_cpu_seconds
from compare.running.rank_agent import State, receive, send, start_agent
from recipe.errors import one_message
from recipe.start import Hooks, start

LEAD_IN_STEPS = 1  # of each turn, before its clock starts
# Longer than a side is ever paused: Horovod's background threads on Gloo wait for each other all
# the time, and by a clock that goes on.
NEVER_S = "1000000"
TRAINERS = {"ddp_train", "horovod_train", "baselines"}  # folders whose scripts take hooks
ENDLESS_IMAGES = 1 << 22  # of an epoch, so that none ends in a turn


class Client:
    """One rank's turns: a turn is a lead-in step and then `steps` optimizer steps on the clock.

    The lead-in is there because a turn's first step is not like the others: all ranks begin it at
    once, and the caches hold what another side left.

    Ranks that train together all do exactly these steps. Independent ones (`overruns`) go on until
    each of them has done its own, so that none of them measures a machine that it has to itself at
    the end.
    """

    def __init__(self, agent: Connection, warm_up: int, overruns: bool) -> None:
        self.agent, self.overruns = agent, overruns
        self.state, self.steps, self.done = State.STARTING, warm_up, 0
        self.began = self.cpu_began = 0.0

    def step_ended(self) -> None:
        """Count a step; at a turn's end report it and wait for the next one."""
        self.done += 1
        if self.state is State.STARTING:
            if self.done == self.steps:
                synchronize()
                send(self.agent, State.READY)
                self.wait()
        elif self.done == LEAD_IN_STEPS:
            synchronize()
            self.began = time.monotonic()
        elif self.done == LEAD_IN_STEPS + self.steps:
            synchronize()
            send(self.agent, State.READY, seconds=time.monotonic() - self.began, **self.spent())
            if not self.overruns:
                self.wait()
        elif self.done > LEAD_IN_STEPS + self.steps and self.agent.poll():
            self.wait()

    def spent(self) -> dict[str, float]:
        """Return the CPU time since the turn began, and until when; and by then that of the whole
        machine, read before this process looks at all others, which would count as theirs."""
        now, busy = time.monotonic(), busy_cpu_seconds()
        return {"cpu_seconds": cpu_seconds() - self.cpu_began, "until": now, "busy": busy}

    def wait(self) -> None:
        """Wait for the next turn; ends the process when there is none."""
        while True:
            self.state, values = receive(self.agent)
            if self.state is State.RUNNING:
                self.steps, self.done, self.cpu_began = values["steps"], 0, cpu_seconds()
                return
            if self.state is State.ENDED:  # tidy ways out would evaluate, and write a checkpoint
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(0)
            synchronize()
            send(self.agent, State.READY, **self.spent())


def synchronize() -> None:
    """Wait until the GPU has done what it was given, if there is one."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def cpu_seconds() -> float:
    """Return the CPU time of this process and its loader workers so far, user and system."""
    total = time.process_time()  # nanoseconds; psutil counts in hundredths of a second
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            total += sum(child.cpu_times()[:2])
    return total


CLIENT: Client | None = None


def step_ended() -> None:
    """Say that an optimizer step has ended; does nothing when nobody measures."""
    if CLIENT is not None:
        CLIENT.step_ended()


def main() -> None:
    """Start the agent, then be the script."""
    global CLIENT
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
    CLIENT = Client(agent, options.warm_up, options.overruns)
    os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = NEVER_S
    sys.argv = program
    folder = Path(program[0]).resolve().parent
    is_trainer = folder.name in TRAINERS  # a module of the project; else as `python SCRIPT` has it
    sys.path[0] = str(folder.parent if is_trainer else folder)
    if is_trainer:
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
        trainer.main(config, world, Hooks(step_ended, ENDLESS_IMAGES))


if __name__ == "__main__":
    from compare.running import take_turns  # the module that scripts import, not this copy of it

    take_turns.main()
