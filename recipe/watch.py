"""Ends this rank in time: when a signal asks it to, when its launcher is gone, and when no batch
has come for too long.

A thread looks for all three, since the main thread may hang in an engine's native code, where no
Python signal handler runs and no exception is raised.
"""

import math
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from recipe.errors import FAILING, RESUME_HINT, fail, job_on_host, leave
from recipe.world import LAUNCHERS, World

POLL_S = 1.0
PROGRAMS = {program for launcher in LAUNCHERS.values() for program in launcher.programs}

# Engines give up by themselves, with a traceback that blames a rank that waits: later than this
# watch, and no sooner than torch.distributed does as it comes (Horovod over Gloo: 30 s).
ENGINE_TIMEOUT_S = 1800

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

_signs_of_life = 0
_obeys = False  # whether the training loop ends by itself when it is asked to
_asked: signal.Signals | None = None  # the first that came since


def heartbeat() -> None:
    """Tell the watch that this rank is alive; the first call, when all ranks have met, starts its
    clock."""
    global _signs_of_life
    _signs_of_life += 1


def obey_signals() -> None:
    """Training begins: from now on the loop around its steps looks whether it `is_asked_to_end`,
    and then ends with a checkpoint. It has the launcher's patience for that, or until the same
    signal comes again."""
    global _obeys
    _obeys = True


def is_asked_to_end() -> bool:
    """Whether a signal has asked this rank to end."""
    return _asked is not None


def engine_timeout(stall_timeout: int) -> int:
    """Seconds after which an engine itself is to give up waiting."""
    return max(ENGINE_TIMEOUT_S, 2 * stall_timeout) if stall_timeout else 1_000_000


def start_watchdog(world: World, stall_timeout: int = 0) -> None:
    """Start to watch; call it from the main thread, before anything slow.

    After `stall_timeout` seconds without a sign of life of this rank the run counts as frozen; 0:
    never.
    """
    os.environ.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", str(engine_timeout(stall_timeout)))
    woken, waker = socket.socketpair()
    waker.setblocking(False)
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup and a shell's & may leave it
            signal.signal(number, lambda *_: None)
    # Written to from C code, whatever the main thread does.
    signal.set_wakeup_fd(waker.detach(), warn_on_full_buffer=False)
    threading.Thread(
        target=_watch, args=(world, woken, launchers_of(world), stall_timeout), daemon=True
    ).start()


def is_launcher(words: Sequence[str]) -> bool:
    """Whether a process with this command line starts ranks, or waits for what does: an
    interpreter, `timeout`, a shell (horovodrun over MPI becomes `sh -c 'mpirun ...'`).

    A shell that starts a launcher in its background may end before it, and is none.
    """
    first, rest = words[:1], list(words[1:])
    if first and os.path.basename(first[0]).startswith("python"):
        while rest and rest[0].startswith("-"):  # up to the script or module
            del rest[: 2 if rest[0] in ("-X", "-W") else 1]
    return any(
        os.path.basename(word.split()[0]).rstrip(":") in PROGRAMS and "&" not in word
        for word in [*first, *rest][:3]
        if word.split()
    )


def launchers_of(world: World) -> dict[int, str]:
    """The processes that this rank must not outlive, and when each was started: its
    ancestors up to the first of its launchers; none if no launcher started it, regardless of nohup,
    tmux or a shell."""
    if world.launcher == "none":
        return {}
    ancestors = []
    with suppress(psutil.Error):  # another user's process may not be looked at
        process = psutil.Process().parent()
        while process is not None:
            ancestors.append(process)
            process = process.parent()
    places = [place for place, one in enumerate(ancestors) if is_launcher(_command_line(one))]
    found = {one.pid: _started(one.pid) for one in ancestors[: max(places, default=-1) + 1]}
    return {pid: started for pid, started in found.items() if started is not None}


def _command_line(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):
        return process.cmdline()
    return []


def _started(pid: int, before: str | None = None) -> str | None:
    """When a process was started, by the kernel's own clock, which is never set; None if it has
    ended, and the answer of `before` if that is not to be seen."""
    try:
        state, *others = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    except OSError:  # such as of a process that has no file descriptor left
        return before
    return None if state in "ZX" else others[18]


def _watch(
    world: World, signals: socket.socket, launchers: dict[int, str], stall_timeout: int
) -> None:
    global _asked
    seen, silent, asked_at = 0, 0.0, math.inf
    while True:
        if select.select([signals], [], [], POLL_S)[0]:
            for number in signals.recv(64):
                if number not in SIGNALS or _asked not in (None, number):
                    continue
                if not _obeys or _asked or FAILING.is_set():
                    _end_by_signal(world, signal.Signals(number))
                _asked, asked_at = signal.Signals(number), time.monotonic()
                _say(world, _words_for(_asked))
            continue
        if _asked:  # its launcher may be gone by now
            if FAILING.is_set() or time.monotonic() - asked_at > world.started_by.patience_s / 2:
                leave(128 + _asked, world.started_by.patience_s / 2)
        elif any(_started(pid, started) != started for pid, started in launchers.items()):
            _say(world, "the launcher is gone")
            with suppress(OSError):
                _remove_shared_memory()
            leave(1)
        # Counted in ticks: to a job that was suspended as a whole no time has passed.
        silent = silent + POLL_S if _signs_of_life == seen else 0.0
        seen = _signs_of_life
        if seen and stall_timeout and silent > stall_timeout:
            fail(world, _stall_message(stall_timeout, world))


def _end_by_signal(world: World, number: signal.Signals) -> None:
    _say(world, _words_for(number))
    leave(128 + number, world.started_by.patience_s)


def _words_for(number: signal.Signals) -> str:
    return "interrupted" if number == signal.SIGINT else f"asked to end by {number.name}"


def _say(world: World, what: str) -> None:
    """One line for the whole run: all its ranks end alike."""
    if world.is_first:
        line = f"{what}: {RESUME_HINT}" if _signs_of_life else what
        with suppress(OSError):  # who would read it may be gone, too
            print(line, file=sys.stderr, flush=True)


def _remove_shared_memory() -> None:
    """Remove the files in /dev/shm by which Open MPI's ranks on a host speak with each other, as
    its mpirun does if it lives."""
    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[-1].strip() for line in maps if "/vader_segment." in line}
    for path in paths:
        with suppress(OSError):  # another rank was first
            os.unlink(path)


def _stall_message(seconds: int, world: World) -> str:
    stopped = ", ".join(_stopped_ranks(world)) or "look for it by `py-spy dump --pid PID`"
    return (
        f"error: no batch for {seconds} s (--stall-timeout): another rank is frozen, late or cut "
        f"off, or a disk hangs ({stopped}). {RESUME_HINT}"
    )


def _stopped_ranks(world: World) -> list[str]:
    """The ranks of this job on this host that are stopped, or wait for a disk that hangs."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            environ = process.environ()
            rank = environ.get(world.started_by.variables[0])
            stopped = process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_DISK_SLEEP)
            if rank and stopped and job_on_host(environ) == job_on_host():
                found.append(f"rank {rank} on {world.host}, process {process.pid}, is stopped")
    return found
