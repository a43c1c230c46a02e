"""A process that is measured by turns: it does its own, and waits while others do theirs.

It connects to the socket of who measures and calls `step_ended` after each optimizer step. Without
one (`CLIENT` is None) that does nothing, so that a script which calls it also runs alone.

Messages are JSON, one a line. To who measures: hello, ready (warmed up), turn (its measurements),
held. From it: go (with the number of steps), hold, end.
"""

import json
import os
import select
import socket
import sys
import time
from typing import Any, NoReturn

import psutil


class Client:
    """One process's turns: a turn is `steps` optimizer steps from the word "go" on.

    Processes that train together all do exactly these steps. Independent ones (`overruns`) go on
    until each of them has done its own, so that none of them measures a machine that it has to
    itself at the end.
    """

    def __init__(self, address: str, side: str, copy: int, warm_up: int, overruns: bool) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(address)
        self.lines = self.socket.makefile("r")
        self.overruns, self.is_warm, self.steps_left = overruns, False, warm_up
        self.start = self.cpu_start = 0.0
        self.tell("hello", side=side, copy=copy, pid=os.getpid())

    def tell(self, kind: str, **values: Any) -> None:
        """Send a message."""
        self.socket.sendall((json.dumps({"kind": kind, **values}) + "\n").encode())

    def step_ended(self) -> None:
        """Count a step; at a turn's end report it and wait for the next one."""
        self.steps_left -= 1
        if self.steps_left == 0:
            synchronize()
            end, cpu_end = time.monotonic(), cpu_seconds()
            if not self.is_warm:
                self.is_warm = True
                self.tell("ready")
                self.wait()
                return
            self.tell("turn", start=self.start, end=end, cpu_seconds=cpu_end - self.cpu_start)
            if not self.overruns:
                self.wait()
        elif self.steps_left < 0 and select.select([self.socket], [], [], 0)[0]:
            self.wait()

    def wait(self) -> None:
        """Wait for the next turn; ends the process when there is none."""
        while True:
            line = self.lines.readline()
            message: dict[str, Any] = json.loads(line) if line else {"kind": "end"}
            if message["kind"] == "hold":
                synchronize()
                self.tell("held", cpu_seconds=cpu_seconds() - self.cpu_start)
                continue
            if message["kind"] == "go":
                self.steps_left = message["steps"]
                # The system's clock, which is the same for all processes of a host.
                self.start, self.cpu_start = time.monotonic(), cpu_seconds()
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
