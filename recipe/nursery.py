"""Ranks that start in a moment: forked from a process that has imported all that they need.

That process watches over its rank, and forks another one in its place when a rank is lost. It has
one thread, and holds no MPI, no CUDA and no process group: a rank makes those for itself. Where
that is not so when the rank is to be started, it is a new interpreter, as without a nursery.
"""

import ctypes
import gc
import importlib
import math
import os
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing import resource_tracker
from typing import NoReturn

from recipe.errors import EXIT_LOST_PEER, OWN_RANK
from recipe.watch import SIGNALS

GENERATION = "TRAINING_GENERATION"  # which start of the ranks this is, the first being 0
POLL_S = 0.02
ENDED_S = 0.5  # a thread that has ended is counted for a moment more
NOTICE_S = 5.0  # a rank that hears of another's loss has so long to keep its state and end
LOOK_S, LOOKS_PER_SECOND = 0.5, 100  # one watches so often for others' losses; all do together
PR_SET_PDEATHSIG = 1  # of linux/prctl.h
LIBC = ctypes.CDLL(None)

# Files in this host's memory that outlive a rank, and end with its nursery (record/spare.py).
files: tuple[int, int] | None = None


class Nursery:
    """Starts a rank, again and again, one at a time; `module` is what a rank will need, and
    `variables` are set while that is imported."""

    def __init__(self, module: str, variables: Iterable[str] = ()) -> None:
        global files
        files = os.memfd_create("state"), os.memfd_create("notes")
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy's would start its threads
        importlib.import_module(module)
        for name in variables:  # a rank sets them itself, and records that it has
            del os.environ[name]
        gc.freeze()  # else a collection in a rank copies the memory of all that was imported
        resource_tracker.ensure_running()  # removes what loader workers leave, and outlives a rank
        self.rank, self.asked = 0, False  # the rank's process; whether it was asked to end
        self.exit_code: int | None = None

    def start(self) -> bool:
        """Fork a rank, in which this is True: it is to train, with the variables that are set now,
        and ends with this process."""
        until = time.monotonic() + ENDED_S
        while (threads := len(os.listdir("/proc/self/task"))) > 1 and time.monotonic() < until:
            time.sleep(POLL_S)
        is_bare = threads == 1 and not sys.modules["torch"].cuda.is_initialized()
        sys.stdout.flush()
        heard = [one for one in SIGNALS if signal.getsignal(one) is not signal.SIG_IGN]
        signal.pthread_sigmask(signal.SIG_BLOCK, heard)
        own = os.getpid()
        self.rank, self.exit_code = os.fork(), None
        if self.rank == 0:
            LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != own:
                os._exit(1)
            os.setsid()  # with its loader workers: what this process is sent is not for them
            os.environ[OWN_RANK] = "1"
        for one in heard:
            signal.signal(one, signal.SIG_DFL if self.rank == 0 else self._pass_on)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, heard)
        if self.rank == 0 and not is_bare:
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
        return self.rank == 0

    def _pass_on(self, number: int, _: object) -> None:
        self.asked = True
        with suppress(ProcessLookupError):
            os.kill(self.rank, number)

    def wait(self, seconds: float) -> int | None:
        """The rank's exit code, below 0 that of a signal, or None if it still lives after so many
        seconds."""
        until = time.monotonic() + seconds
        while self.exit_code is None and time.monotonic() < until:
            pid, status = os.waitpid(self.rank, os.WNOHANG)
            if pid:
                self.exit_code = os.waitstatus_to_exitcode(status)
            else:
                time.sleep(POLL_S)
        return self.exit_code

    def end(self, notice_s: float = NOTICE_S) -> int:
        """The rank's exit code, as soon as it ends by itself or this time is over; with it end the
        loader workers that it has left."""
        self.wait(notice_s)
        with suppress(ProcessLookupError):
            os.killpg(self.rank, signal.SIGKILL)
        exit_code = self.wait(math.inf)
        assert exit_code is not None
        return exit_code

    def is_lost(self, exit_code: int) -> bool:
        """Whether a rank that ended so is to be started anew: nobody asked it to end, and no error
        of its own made it."""
        return not self.asked and (exit_code < 0 or exit_code == EXIT_LOST_PEER)


def look_s(ranks: int) -> float:
    """Seconds between two looks of a watcher at what others tell."""
    return max(LOOK_S, ranks / LOOKS_PER_SECOND)


def leave_like(exit_code: int) -> NoReturn:
    """End this process as its rank has ended."""
    if exit_code < 0:
        signal.signal(-exit_code, signal.SIG_DFL)
        os.kill(os.getpid(), -exit_code)
    sys.exit(exit_code)
