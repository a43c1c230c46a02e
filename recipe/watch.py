"""The watchdog: ends this rank when a signal asks for it, when its launcher is gone, or when no
batch has come for too long. It also warns if other programs use this rank's cores.

A thread does all of this, since the main thread may hang in an engine's native code, where no
Python signal handler runs and no exception is raised. Python's own
`faulthandler.dump_traceback_later` would not do: it names no rank, host, step or phase; it ends the
process at once, in the middle of a checkpoint, and with the exit code 1, after which no watcher
restarts the rank; and a job that was suspended for longer than its time-out would end on waking.

While the main thread waits in an engine or in CUDA, it releases Python's lock, and this thread
runs. Native code that kept the lock would stop this thread, too: then another rank of the job says
that the run is frozen, and the launcher ends both.
"""

import math
import os
import select
import signal
import socket
import statistics
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice, pairwise
from pathlib import Path
from typing import NoReturn

import psutil

from recipe.ancestors import launchers_of, start_time
from recipe.errors import (
    EXIT_LOST_PEER,
    FAILING,
    RESUME_HINT,
    LostPeer,
    UserError,
    acquire_lock,
    fail,
    job_on_host,
    leave,
)
from recipe.files import read_proc
from recipe.marks import marks
from recipe.world import FINISH_S, World

POLL_S = 1.0
SLOW_S = 2.0  # a task before training that takes longer is printed
LATE_S = 60.0  # ... and what it waits for

# The engines have time-outs of their own, after which a traceback blames a rank that only waits.
# Let them expire later than this watch, and no sooner than torch.distributed's default. (Horovod's
# default over Gloo is 30 s.)
ENGINE_TIMEOUT_S = 1800
# The default stall time-out is the time that BATCHES batches usually take, at least LEAST_S. It is
# IRREGULAR_S until BATCHES batches have come, and after a pause until AGAIN batches have come.
BATCHES, LEAST_S, AGAIN, IRREGULAR_S = 20, 60.0, 3, 600.0
FRAMES = 8  # stack frames that a message shows
# Warn if a rank waited for a core for a larger share of the first OBSERVED_S seconds with batches.
OBSERVED_S, WITHOUT_CORE = 60.0, 0.25
RETRANSMISSIONS = 3  # of the same data to a host, after which it counts as cut off
MPIRUN_WAITS = "OMPI_MCA_odls_base_sigkill_timeout"  # seconds before it passes a signal on; 1

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

_obeys = False  # whether the training loop ends by itself when a signal asks for it
_asked: signal.Signals | None = None  # the first signal since then ...
_asked_at = math.inf  # ... and when it came
_signs_of_life: deque[float] = deque(maxlen=BATCHES + 1)  # times of the last ones, in seconds
_paused_at = -math.inf  # when the last pause began
peers: dict[str, tuple[str, list[int]]] = {}  # the job's hosts, by address: name, and ranks there
whereabouts: Callable[[], str] = str  # where this rank is in training, in words; "" before it


# What this rank does before it trains, since when, and what to say of it if it takes long.
_task: tuple[str, float, Callable[[], str]] = "", math.inf, str


def begin(task: str, explain: Callable[[], str] = str) -> None:
    """Tell the watch what this rank does from now on; "" means training. If it takes longer than
    LATE_S, one rank of a host prints what `explain` returns, unless that is ""."""
    global _task
    _task = task, time.monotonic() if task else math.inf, explain


def heartbeat() -> None:
    """Tell the watch that this rank is alive. The first call, when all ranks have met, starts the
    watch's clock. LostPeer if this rank is to end: a batch begins, so its state is whole."""
    if marks.is_asked:
        raise LostPeer
    _give_sign()


def _give_sign() -> None:
    _signs_of_life.append(time.monotonic())
    batches_s = (after - before for before, after in pairwise(_signs_of_life))
    marks.batch_s = max(batches_s, default=marks.batch_s)


def obey_signals() -> None:
    """Leave signals to the training loop from now on: it polls `is_asked_to_end`, saves a
    checkpoint and ends. It has half a minute, unless the launcher kills it earlier or the same
    signal comes again."""
    global _obeys
    _obeys = True


def is_asked_to_end() -> bool:
    """Return whether a signal has asked this rank to end."""
    return _asked is not None


def expect_delay() -> None:
    """Tell the watch that an irregular task begins, such as an evaluation or a rollback, here or on
    a rank that this one will wait for."""
    _signs_of_life.clear()
    _give_sign()


def expect_pause() -> None:
    """Tell the watch that only the next batch may be late: a slow disk may take a checkpoint."""
    global _paused_at
    _give_sign()
    _paused_at = time.monotonic()


def engine_timeout(stall_timeout: int | None) -> int:
    """Return the seconds after which the engine itself gives up waiting."""
    return 1_000_000 if stall_timeout == 0 else max(ENGINE_TIMEOUT_S, 2 * (stall_timeout or 0))


def start_watchdog(world: World, stall_timeout: int | None = 0) -> None:
    """Start the watchdog; call this from the main thread, before anything slow.

    The run counts as frozen after `stall_timeout` seconds without a sign of life of this rank. 0
    means never; None means the default (see `_patience_s`).
    """
    waits = os.environ.get(MPIRUN_WAITS) or "1"
    if not waits.isdecimal():
        raise UserError(f"{MPIRUN_WAITS}={waits}: not a number of seconds; correct it")
    os.environ.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", str(engine_timeout(stall_timeout)))
    woken, waker = socket.socketpair()
    waker.setblocking(False)
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup and a shell's & may ignore it
            signal.signal(number, lambda *_: None)
    # C code writes to it, whatever the main thread does.
    signal.set_wakeup_fd(waker.detach(), warn_on_full_buffer=False)
    threading.Thread(
        target=_watch, args=(world, woken, launchers_of(world), stall_timeout), daemon=True
    ).start()


def _watch(
    world: World, signals: socket.socket, launchers: dict[int, str], stall_timeout: int | None
) -> None:
    seen, silent_s = list[float](), 0.0
    slow_tasks, cores = _report_slow_tasks(world), _observe_cores(world)
    while True:
        if select.select([signals], [], [], POLL_S)[0]:
            for number in signals.recv(64):
                if number in SIGNALS:
                    _receive(world, signal.Signals(number))
            continue
        next(slow_tasks)
        if _asked:  # its launcher may be gone by now
            # The signal may have gone to this rank alone: then no launcher kills it.
            if FAILING.is_set() or time.monotonic() - _asked_at > FINISH_S / 2:
                leave(128 + _asked, FINISH_S / 2)
        elif any(start_time(pid, since) != since for pid, since in launchers.items()):
            _print_end(world, "the launcher is gone")
            with suppress(OSError):
                _remove_shared_memory()
            leave(1)
        # Counted in ticks: while a whole job is suspended, no time passes for it.
        signs = list(_signs_of_life)
        silent_s = silent_s + POLL_S if signs == seen else 0.0
        seen = signs
        if signs:
            next(cores, None)
            if silent_s >= (patience_s := _patience_s(signs, stall_timeout)):
                _end_frozen(world, patience_s, signals, launchers)


def _receive(world: World, number: signal.Signals) -> None:
    """Do what a signal asks for: the first is left to the training loop if it obeys signals; the
    same one again, or any before that, ends this rank."""
    global _asked, _asked_at
    if _asked not in (None, number):
        return
    ends_now = not _obeys or _asked or FAILING.is_set()
    if not ends_now:  # else the loop would begin to stop while this rank ends
        _asked, _asked_at = number, time.monotonic()
    interrupted = number == signal.SIGINT
    _print_end(world, "interrupted" if interrupted else f"asked to end by {number.name}")
    if ends_now:
        leave(128 + number, world.started_by.patience_s)


def _print_end(world: World, reason: str) -> None:
    """Print why the run ends, on rank 0 for all."""
    if world.is_first:
        hint = f": {RESUME_HINT}" if _signs_of_life else ""
        print(f"{reason}{hint}", file=sys.stderr, flush=True)


def _report_slow_tasks(world: World) -> Iterator[None]:
    """Print which task before training takes long, and, if it is late, what it waits for, once for
    each task. Advance this once a tick."""
    announced, warned_at = "", math.nan
    may_warn: object = world.is_first  # or a lock, held as long as this thread lives
    while True:
        task, began, explain = _task
        seconds = time.monotonic() - began
        if world.is_first and seconds >= SLOW_S and task != announced:
            announced = task
            print(f"{task} ...", file=sys.stderr, flush=True)
        reason = explain() if seconds >= LATE_S and began != warned_at else ""
        if reason:
            warned_at = began
            may_warn = may_warn or acquire_lock("late")
        if reason and may_warn:
            print(f"warning: {reason}", file=sys.stderr, flush=True)
        yield


def _observe_cores(world: World) -> Iterator[None]:
    """Warn, after the first minute, if this rank was ready to run for much of it but had no core.
    Advance this once a tick."""
    began, before_s = time.monotonic(), _waited_for_core_s()
    while (seconds := time.monotonic() - began) < OBSERVED_S:
        yield
    share = (_waited_for_core_s() - before_s) / seconds
    if share > WITHOUT_CORE:
        print(
            f"warning: rank {world.rank} on {world.host} waited for a core for {share:.0%} of "
            f"{seconds:.0f} s: other programs use the {len(os.sched_getaffinity(0))} core(s) that "
            "it may use, or this host has more ranks and loader workers than cores",
            file=sys.stderr,
            flush=True,
        )


def _waited_for_core_s() -> float:
    """Return for how long the main thread was ready to run but had no core; 0 if the kernel does
    not report it (Linux, Documentation/scheduler/sched-stats.rst)."""
    with suppress(OSError):
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    return 0.0


def _patience_s(signs: list[float], stall_timeout: int | None) -> float:
    """Return the seconds within which the next batch must come, after these signs of life."""
    if stall_timeout is not None:
        return stall_timeout or math.inf
    if len(signs) <= BATCHES or signs[-AGAIN] <= _paused_at:
        return IRREGULAR_S
    return max(LEAST_S, BATCHES * statistics.median(b - a for a, b in pairwise(signs)))


def _remove_shared_memory() -> None:
    """Remove the files in /dev/shm through which Open MPI's ranks on a host exchange messages, as a
    living mpirun would."""
    lines = read_proc("/proc/self/maps").splitlines()
    for path in {line.split(maxsplit=5)[-1] for line in lines if "/vader_segment." in line}:
        with suppress(OSError):  # another rank was first
            os.unlink(path)


def _end_frozen(
    world: World, seconds: float, signals: socket.socket, launchers: dict[int, str]
) -> NoReturn:
    """End the run with one message, and a line from each rank that can still say where it is."""
    place = whereabouts() or "before its first step"
    print(f"[rank {world.rank} on {world.host}] {place}: {_stack()}", file=sys.stderr, flush=True)
    stopped = _stopped_ranks(world)
    cut_off = []
    with suppress(OSError):
        cut_off = [f"{host} does not answer" for host in _unanswering()]
    unknown = ["a rank that printed no line here, or whose line shows no wait for another rank"]
    names = ", ".join([*stopped, *cut_off] or unknown)
    message = (
        f"error: no batch for {seconds:.0f} s (--stall-timeout): another rank is frozen, late or "
        f"cut off, or a disk hangs ({names}). {RESUME_HINT}"
    )

    def end_others() -> None:
        """End stopped ranks, which no SIGTERM ends and for which a launcher would wait; and a
        launcher that waits for other hosts."""
        for process in stopped.values():
            with suppress(psutil.Error):
                if process.status() == psutil.STATUS_STOPPED:
                    process.kill()
        allowed = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0))
        restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        if launchers and world.local_size < world.size and restarts >= allowed:
            pid, since = next(iter(launchers.items()))  # the parent
            _end_launcher(pid, since, signals)

    fail(world, message, EXIT_LOST_PEER, last=end_others)


def _end_launcher(pid: int, since: str, signals: socket.socket) -> None:
    """End the launcher, which started at `since`. It may wait for another one on a host that is cut
    off, until the kernel gives up after a quarter of an hour. A launcher that can still act sends
    its ranks a signal."""
    answer_s = 2 * float(os.environ.get(MPIRUN_WAITS) or 1)
    with suppress(OSError):
        os.kill(pid, signal.SIGTERM)
        until = time.monotonic() + answer_s
        while start_time(pid) == since and time.monotonic() < until:
            if select.select([signals], [], [], answer_s / 20)[0]:
                return
        os.kill(pid, signal.SIGKILL)


def _unanswering() -> list[str]:
    """Return the job's hosts, with their ranks, that do not acknowledge what this host has sent
    them several times (over IPv4)."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    silent = {row[2][:8] for row in rows if int(row[6], 16) >= RETRANSMISSIONS}
    addresses = {socket.inet_ntoa(bytes.fromhex(address)[::-1]) for address in silent}
    hosts = dict(peers[address] for address in sorted(addresses & peers.keys()))
    return [f"{host} (rank {', '.join(map(str, ranks))})" for host, ranks in hosts.items()]


def _stack() -> str:
    """Return the innermost calls of the main thread. Reads no source file: the disk may hang."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    calls = [
        f"{frame.f_code.co_name} ({os.path.basename(frame.f_code.co_filename)}:{line})"
        for frame, line in islice(traceback.walk_stack(frame), FRAMES)
    ]
    return ", ".join(calls)


def _stopped_ranks(world: World) -> dict[str, psutil.Process]:
    """Return this job's ranks on this host that are stopped or wait for a disk, by description."""
    ranks = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            environ, status = process.environ(), process.status()
            rank = environ.get(world.started_by.variables[0])
            stopped = status in (psutil.STATUS_STOPPED, psutil.STATUS_DISK_SLEEP)
            if rank and stopped and job_on_host(environ) == job_on_host():
                ranks[f"rank {rank} on {world.host}, process {process.pid}, is {status}"] = process
    return ranks
