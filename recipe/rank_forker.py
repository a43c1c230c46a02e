"""Starts ranks fast: forks them from a process that has already imported what they need.

That process watches its rank, and forks a new one in its place when a rank is lost. It has one
thread, and no MPI, no CUDA and no process group: each rank makes those for itself. If it has more
threads or CUDA after all, it trains itself, unwatched.
"""

import math
import os
import signal
import sys
import time
from contextlib import suppress
from multiprocessing import resource_tracker

from recipe.errors import EXIT_LOST_PEER
from recipe.fork_server import POLL_S, fork_process, load, why_not_to_fork
from recipe.marks import marks
from recipe.watch import SIGNALS
from recipe.world import FINISH_S

GENERATION = "TRAINING_GENERATION"  # counts the starts of all ranks, from 0
# After another rank's loss, a rank's time to keep its state and end, beside that of two batches.
NOTICE_S = 5.0
MOST_STARTS = 3  # of ranks that are killed one after the other before they have made a step
# The least time between a watcher's polls for lost ranks; the most polls a second, of all watchers.
LOOK_S, LOOKS_PER_SECOND = 0.2, 100

# Files in this host's memory that outlive a rank and end with its watcher (record/kept_state.py).
files: tuple[int, int] | None = None


class RankForker:
    """Starts ranks, one after the other. It imports `module`, which they need."""

    def __init__(self, module: str) -> None:
        global files
        files = os.memfd_create("state"), os.memfd_create("notes")
        load([module])
        resource_tracker.ensure_running()  # removes what loader workers leave, and outlives a rank
        self.rank, self.asked = 0, False  # the rank's process; whether a signal asked it to end
        self.starts = 0  # since a rank made a step
        self.exit_code: int | None = None

    def start(self) -> bool:
        """Fork a rank. Return True in the rank, which is to train with the current environment and
        ends with this process; False in this process. If this process cannot fork, it says so, and
        is to train itself: True."""
        self.starts = 1 if marks.has_made_step else self.starts + 1
        marks.clear()
        marks.is_watched = True  # also if it cannot fork: all ranks must resume alike
        if problem := why_not_to_fork():
            print(
                f"warning: process {os.getpid()} cannot fork its rank: {problem}; if the rank is "
                "lost, nothing replaces it",
                file=sys.stderr,
                flush=True,
            )
            return True
        sys.stdout.flush()
        handled = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        signal.pthread_sigmask(signal.SIG_BLOCK, handled)
        self.rank, self.exit_code = fork_process(), None
        if self.rank == 0:
            os.setsid()  # signals to this process's group do not reach it and its loader workers
        for number in handled:
            signal.signal(number, signal.SIG_DFL if self.rank == 0 else self._pass_on)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)
        return self.rank == 0

    def _pass_on(self, number: int, _: object) -> None:
        self.asked = True
        with suppress(ProcessLookupError):
            os.kill(self.rank, number)

    def wait(self, seconds: float) -> int | None:
        """Wait for the rank's end, at most `seconds`. Return its exit code, negative for a signal,
        or None if it still runs."""
        until = time.monotonic() + seconds
        while self.exit_code is None and time.monotonic() < until:
            pid, status = os.waitpid(self.rank, os.WNOHANG)
            if pid:
                self.exit_code = os.waitstatus_to_exitcode(status)
            else:
                time.sleep(POLL_S)
        return self.exit_code

    def end(self) -> int:
        """Ask the rank to end, and give it NOTICE_S and the time of two batches (FINISH_S at most:
        one may have compiled the network); FINISH_S more as long as it writes, or is about to end
        by itself. Then kill it, and any loader workers that it left. Return its exit code."""
        marks.is_asked = self.exit_code is None
        until = time.monotonic() + NOTICE_S + min(2 * marks.batch_s, FINISH_S)
        while self.wait(POLL_S) is None:
            is_busy = marks.is_writing or marks.is_leaving or marks.is_complete
            if time.monotonic() > until + FINISH_S * is_busy:
                break
        with suppress(ProcessLookupError):
            os.killpg(self.rank, signal.SIGKILL)
        exit_code = self.wait(math.inf)
        assert exit_code is not None
        return exit_code

    def is_lost(self, exit_code: int, on_one_host: bool = True) -> bool:
        """Return whether a rank with this exit code was lost and is to be restarted: no signal
        asked it to end, and it had no error of its own.

        As long as it has made no step, what looks like another rank's loss is an error of its own,
        since on one host that rank's watcher would tell of it; and what kills a rank may kill the
        next one, so there are only MOST_STARTS.
        """
        if self.asked or marks.is_complete:
            return False
        if marks.is_asked or marks.has_made_step:
            return exit_code < 0 or exit_code == EXIT_LOST_PEER
        is_sure = exit_code < 0 or (exit_code == EXIT_LOST_PEER and not on_one_host)
        return is_sure and self.starts < MOST_STARTS


def look_s(ranks: int) -> float:
    """Return the seconds between two polls of a watcher for lost ranks."""
    return max(LOOK_S, ranks / LOOKS_PER_SECOND)
