"""A process that is measured by turns: it does its own, and waits while others do theirs.

It calls `step_ended` after each optimizer step. Without a `CLIENT`, which take_turns.py sets, that
does nothing, so that a script which calls it also runs alone. Messages go through the process's
agent (agent.py).
"""

import os
import sys
import time
from multiprocessing.connection import Connection
from typing import NoReturn

import psutil

from compare.running.agent import hear, tell
from compare.running.launch import busy_cpu_seconds

LEAD_IN_STEPS = 1  # of each turn, before its clock starts


class Client:
    """One process's turns: a turn is a lead-in step and then `steps` optimizer steps on the clock.

    The lead-in is there because a turn's first step is not like the others: all ranks begin it at
    once, and the caches hold what another side left.

    Processes that train together all do exactly these steps. Independent ones (`overruns`) go on
    until each of them has done its own, so that none of them measures a machine that it has to
    itself at the end.
    """

    def __init__(self, agent: Connection, warm_up: int, overruns: bool) -> None:
        self.agent, self.overruns = agent, overruns
        self.is_warm, self.steps_left, self.steps = False, warm_up, 0
        self.start = self.cpu_start = 0.0

    def step_ended(self) -> None:
        """Count a step; at a turn's end report it and wait for the next one."""
        self.steps_left -= 1
        if self.is_warm and self.steps_left == self.steps:
            synchronize()
            self.start = time.monotonic()
        elif self.steps_left == 0:
            synchronize()
            end = time.monotonic()
            if not self.is_warm:
                self.is_warm = True
                tell(self.agent, "ready")
                self.wait()
                return
            tell(self.agent, "turn", seconds=end - self.start, **self.spent())
            if not self.overruns:
                self.wait()
        elif self.steps_left < 0 and self.agent.poll():
            self.wait()

    def spent(self) -> dict[str, float]:
        """CPU time since the turn began, and until when; and by then that of the whole machine,
        read before this process looks at all others, which would count as theirs."""
        now, busy = time.monotonic(), busy_cpu_seconds()
        return {"cpu_seconds": cpu_seconds() - self.cpu_start, "until": now, "busy": busy}

    def wait(self) -> None:
        """Wait for the next turn; ends the process when there is none."""
        while True:
            message = hear(self.agent)
            if message["kind"] == "hold":
                synchronize()
                tell(self.agent, "held", **self.spent())
                continue
            if message["kind"] == "go":
                self.steps = message["steps"]
                self.steps_left = LEAD_IN_STEPS + self.steps
                self.cpu_start = cpu_seconds()
                return
            leave()


def leave() -> NoReturn:
    """End here: the tidy ways out would evaluate, write a checkpoint, and wait for other ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def synchronize() -> None:
    """Wait until the GPU has done what it was given, if there is one."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def cpu_seconds() -> float:
    """CPU time of this process and its loader workers so far, user and system, in seconds."""
    total = time.process_time()  # nanoseconds; psutil counts in hundredths of a second
    for child in psutil.Process().children(recursive=True):
        try:
            times = child.cpu_times()
            total += times.user + times.system
        except psutil.NoSuchProcess:
            pass
    return total


CLIENT: Client | None = None


def step_ended() -> None:
    """Say that an optimizer step has ended; does nothing when nobody measures."""
    if CLIENT is not None:
        CLIENT.step_ended()
