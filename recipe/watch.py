"""Ends this rank in time: when a signal asks it to, when its launcher is gone, and when no batch
has come for too long; and says if others take its cores.

A thread looks for all of it, since the main thread may hang in an engine's native code, where no
Python signal handler runs and no exception is raised.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice, pairwise
from pathlib import Path
from typing import NoReturn

import psutil

from recipe.command import UNREAD_S, prepare_output
from recipe.errors import EXIT_LOST_PEER, FAILING, RESUME_HINT, fail, job_on_host, leave, refuse
from recipe.files import read_proc
from recipe.world import FINISH_S, LAUNCHERS, World, read_worlds

POLL_S = 1.0
SLOW_S = 2.0  # what takes longer than that before training is said
PROGRAMS = {program for launcher in LAUNCHERS.values() for program in launcher.programs}

# Engines give up by themselves, with a traceback that blames a rank that waits: later than this
# watch, and no sooner than torch.distributed does as it comes (Horovod over Gloo: 30 s).
ENGINE_TIMEOUT_S = 1800
# How long no batch may come by default: as long as so many usually take, and a minute at least; but
# where batches do not come regularly yet, or not AGAIN so many since a pause, ten.
BATCHES, LEAST_S, AGAIN, IRREGULAR_S = 20, 60.0, 3, 600.0
FRAMES = 8  # of a stack that a message shows
# Of the first so many seconds with batches, this share is a long time to be without a core.
OBSERVED_S, WITHOUT_CORE = 60.0, 0.25
RETRANSMISSIONS = 3  # of the same data, on a connection to a host that is taken to be cut off
RESTARTS = ("MAX_RESTARTS", "RESTART_COUNT")  # by which torchrun says whether it will start anew
MPIRUN_WAITS = "OMPI_MCA_odls_base_sigkill_timeout"  # before it passes a signal on: for a second

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

_obeys = False  # whether the training loop ends by itself when it is asked to
_asked: signal.Signals | None = None  # the first that came since
_signs_of_life: deque[float] = deque(maxlen=BATCHES + 1)  # when the last ones were, in seconds
_paused_at = -math.inf  # when the last pause began
peers: dict[str, tuple[str, list[int]]] = {}  # the job's hosts, by address: name, and ranks there
whereabouts: Callable[[], str] = str  # of this rank, in words; none before training


_task = "", math.inf  # what this rank does before it trains, and since when


def begin(task: str) -> None:
    """Tell the watch what this rank does from now on; "" is training."""
    global _task
    _task = task, time.monotonic() if task else math.inf


def heartbeat() -> None:
    """Tell the watch that this rank is alive; the first call, when all ranks have met, starts its
    clock."""
    _signs_of_life.append(time.monotonic())


def obey_signals() -> None:
    """Training begins: from now on the loop around its steps looks whether it `is_asked_to_end`,
    and then ends with a checkpoint. It has half a minute for that, if the launcher does not kill it
    before, and the same signal does not come again."""
    global _obeys
    _obeys = True


def is_asked_to_end() -> bool:
    """Whether a signal has asked this rank to end."""
    return _asked is not None


def expect_delay() -> None:
    """Tell the watch that what comes is not as regular as batches were, here or on a rank that this
    one will wait for: an evaluation, a rollback."""
    _signs_of_life.clear()
    heartbeat()


def expect_pause() -> None:
    """Tell the watch that the next batch may be late, and those after it are not: a checkpoint that
    a slow disk takes."""
    global _paused_at
    heartbeat()
    _paused_at = time.monotonic()


def engine_timeout(stall_timeout: int | None) -> int:
    """Seconds after which an engine itself is to give up waiting."""
    return 1_000_000 if stall_timeout == 0 else max(ENGINE_TIMEOUT_S, 2 * (stall_timeout or 0))


def start_watchdog(world: World, stall_timeout: int | None = 0) -> None:
    """Start to watch; call it from the main thread, before anything slow.

    After `stall_timeout` seconds without a sign of life of this rank the run counts as frozen; 0:
    never; None: after as many as `_patience_s` says.
    """
    waits = os.environ.get(MPIRUN_WAITS) or "1"
    refuse((not waits.isdecimal(), f"{MPIRUN_WAITS}={waits}: is no number of seconds; correct it"))
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


def own_world() -> World:
    """Make output safe, and return this process's place. One message ends it where the variables
    that tell it are no numbers, or are left over from another job: ranks would train alone, each as
    a copy of the others."""
    prepare_output(UNREAD_S)
    world, *others = read_worlds()
    rightful = rightful_world([world, *others], ancestors().values())
    if (is_rank := world.rank in range(world.size)) and rightful is world:
        return world
    variables = (*world.started_by.variables, *world.started_by.job)
    told = " ".join(f"{name}={os.environ[name]}" for name in variables if os.environ.get(name))
    reason = (
        f"left over from another job, since {rightful.launcher} started this process as rank "
        f"{rightful.rank} of {rightful.size}; unset them" if is_rank else
        "these name no rank of a job; unset them, or correct them"
    )  # fmt: skip
    return fail(rightful if is_rank else others[0], f"error: {told}: {reason}", exit_code=2)


def rightful_world(worlds: Sequence[World], above: Iterable[Sequence[str]]) -> World:
    """The place that holds: the first of `worlds`, or the one that shows its variables to be left
    over. `above`: the command lines of the process's ancestors, the parent's first.

    The innermost launcher among the ancestors decides. Variables of another launcher are left over
    if they tell of a smaller world; or, where the parent itself is a launcher, of another place.
    (Behind a shell or a program in between they may be right: it may have started more ranks.) If
    no launcher is seen, as in a container, the largest world decides.
    """
    found = (
        [one for one in worlds if launcher_program(words) in one.started_by.programs]
        for words in above
    )
    largest = max(worlds, key=lambda one: one.size)
    distance, around = next((pair for pair in enumerate(found) if pair[1]), (1, [largest]))
    first, other = worlds[0], around[0]
    differs = distance == 0 and (first.rank, first.size) != (other.rank, other.size)
    return other if first not in around and (differs or first.size < other.size) else first


def launcher_program(words: Sequence[str]) -> str:
    """The program by which a process with this command line starts ranks, or waits for what does:
    an interpreter, `timeout`, a shell (horovodrun over MPI becomes `sh -c 'mpirun ...'`); "" if it
    does neither.

    A shell that starts a launcher in its background may end before it, and is none.
    """
    first, rest = words[:1], list(words[1:])
    if first and os.path.basename(first[0]).startswith("python"):
        while rest and rest[0].startswith("-"):  # up to the script or module
            del rest[: 2 if rest[0] in ("-X", "-W") else 1]
    called = (word for word in [*first, *rest][:3] if word.split() and "&" not in word)
    names = (os.path.basename(word.split()[0]).rstrip(":") for word in called)
    return next((name for name in names if name in PROGRAMS), "")


def launchers_of(world: World) -> dict[int, str]:
    """The processes that this rank must not outlive, and when each was started: its
    ancestors up to the first of its launchers; none if no launcher started it, regardless of nohup,
    tmux or a shell."""
    above = ancestors() if world.launcher != "none" else {}
    places = [place for place, words in enumerate(above.values(), 1) if launcher_program(words)]
    found = {pid: _started(pid) for pid in list(above)[: max(places, default=0)]}
    return {pid: started for pid, started in found.items() if started is not None}


def nearest_launcher(world: World) -> psutil.Process:
    """The process that starts this rank, and starts it anew after a loss; this one if none does."""
    own, above = psutil.Process(), ancestors() if world.launcher != "none" else {}
    found = [pid for pid, words in above.items() if launcher_program(words)]
    # Horovod's elastic driver may be on another host. What it has started here lives on, too, and
    # starts processes of its own words (horovod_train/elastic.py).
    if world.launcher == "horovodrun":
        found += [pid for pid, words in [*above.items()][:1] if words[1:] == own.cmdline()[1:]]
    with suppress(IndexError, psutil.Error):  # there is none, or it has just ended
        return psutil.Process(found[0])
    return own


def ancestors() -> dict[int, list[str]]:
    """The command lines of this process's ancestors by process ID, the parent first, as far as they
    may be looked at."""
    found: dict[int, list[str]] = {}
    with suppress(psutil.Error):  # another user's process may not be
        process = psutil.Process().parent()
        while process is not None:
            found[process.pid] = process.as_dict(["cmdline"], [])["cmdline"]
            process = process.parent()
    return found


def _started(pid: int, before: str | None = None) -> str | None:
    """When a process was started, by the kernel's own clock, which is never set; None if it has
    ended, and the answer of `before` if that is not to be seen."""
    try:
        state, *others = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    except OSError:  # such as of a process that has no file descriptor left
        return before
    return None if state in "ZX" else others[18]


def _watch(
    world: World, signals: socket.socket, launchers: dict[int, str], stall_timeout: int | None
) -> None:
    global _asked
    seen, silent, asked_at, said = list[float](), 0.0, math.inf, ""
    cores = _observe_cores(world)
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
        task, since = _task
        if world.is_first and task != said and time.monotonic() - since >= SLOW_S:
            print(f"{task} ...", file=sys.stderr, flush=True)
            said = task
        if _asked:  # its launcher may be gone by now
            # Whoever asked may have asked this rank alone, and then no launcher kills.
            if FAILING.is_set() or time.monotonic() - asked_at > FINISH_S / 2:
                leave(128 + _asked, FINISH_S / 2)
        elif any(_started(pid, started) != started for pid, started in launchers.items()):
            _say(world, "the launcher is gone")
            with suppress(OSError):
                _remove_shared_memory()
            leave(1)
        # Counted in ticks: to a job that was suspended as a whole no time has passed.
        signs = list(_signs_of_life)
        silent = silent + POLL_S if signs == seen else 0.0
        seen = signs
        if signs:
            next(cores, None)
        if signs and silent >= (patience_s := _patience_s(signs, stall_timeout)):
            _end_frozen(world, patience_s, signals, launchers)


def _observe_cores(world: World) -> Iterator[None]:
    """Advanced once a tick: after a minute, say so if this rank was ready to run for much of it
    while its cores ran others."""
    began, before_s = time.monotonic(), _waited_for_core_s()
    while (seconds := time.monotonic() - began) < OBSERVED_S:
        yield
    share = (_waited_for_core_s() - before_s) / seconds
    if share > WITHOUT_CORE:
        print(
            f"warning: rank {world.rank} on {world.host} waited for a core for {share:.0%} of "
            f"{seconds:.0f} s: other programs use the {len(os.sched_getaffinity(0))} core(s) that "
            "it may use, or ranks and loader workers here are more than those",
            file=sys.stderr, flush=True,
        )  # fmt: skip


def _waited_for_core_s() -> float:
    """How long the main thread has been ready to run and had no core; 0 where the kernel does not
    say (Linux, Documentation/scheduler/sched-stats.rst)."""
    with suppress(OSError):
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    return 0.0


def _patience_s(signs: list[float], stall_timeout: int | None) -> float:
    """How long no batch may come after these."""
    if stall_timeout is not None:
        return stall_timeout or math.inf
    if len(signs) <= BATCHES or signs[-AGAIN] <= _paused_at:
        return IRREGULAR_S
    return max(LEAST_S, BATCHES * statistics.median(b - a for a, b in pairwise(signs)))


def _end_by_signal(world: World, number: signal.Signals) -> None:
    _say(world, _words_for(number))
    leave(128 + number, world.started_by.patience_s)


def _words_for(number: signal.Signals) -> str:
    return "interrupted" if number == signal.SIGINT else f"asked to end by {number.name}"


def _say(world: World, what: str) -> None:
    """One line for the whole run: all its ranks end alike."""
    if world.is_first:
        hint = f": {RESUME_HINT}" if _signs_of_life else ""
        print(f"{what}{hint}", file=sys.stderr, flush=True)


def _remove_shared_memory() -> None:
    """Remove the files in /dev/shm by which Open MPI's ranks on a host speak with each other, as
    its mpirun does if it lives."""
    lines = read_proc("/proc/self/maps").splitlines()
    for path in {one.split(maxsplit=5)[-1] for one in lines if "/vader_segment." in one}:
        with suppress(OSError):  # another rank was first
            os.unlink(path)


def _end_frozen(
    world: World, seconds: float, signals: socket.socket, launchers: dict[int, str]
) -> NoReturn:
    """End with one message, and a line of each rank that can still say where it is."""
    place = whereabouts() or "before its first step"
    print(f"[rank {world.rank} on {world.host}] {place}: {_stack()}", file=sys.stderr, flush=True)
    stopped = _stopped_ranks(world)
    cut_off = []
    with suppress(OSError):
        cut_off = [f"{host} does not answer" for host in _unanswering()]
    unknown = ["the rank that has no line here, or waits for no other"]
    names = ", ".join([*stopped, *cut_off] or unknown)
    message = (
        f"error: no batch for {seconds:.0f} s (--stall-timeout): another rank is frozen, late or "
        f"cut off, or a disk hangs ({names}). {RESUME_HINT}"
    )

    def end_others() -> None:
        """What no SIGTERM ends, for which a launcher would wait, and a launcher that waits for
        others than its ranks."""
        for process in stopped.values():
            with suppress(psutil.Error):
                if process.status() == psutil.STATUS_STOPPED:
                    process.kill()
        most, made = (int(os.environ.get(f"TORCHELASTIC_{name}", 0)) for name in RESTARTS)
        if world.local_size < world.size and made >= most:
            _end_launcher(launchers, signals)

    fail(world, message, EXIT_LOST_PEER, last=end_others)


def _end_launcher(launchers: dict[int, str], signals: socket.socket) -> None:
    """End the launcher, which may wait for one on a host that is cut off, and for as long as the
    kernel does: a quarter of an hour. One that can still act sends its ranks a signal."""
    for launcher in list(launchers)[:1]:
        with suppress(OSError):
            os.kill(launcher, signal.SIGTERM)
            answer_s = 2 * float(os.environ.get(MPIRUN_WAITS) or 1)
            until = time.monotonic() + answer_s
            while _started(launcher) == launchers[launcher] and time.monotonic() < until:
                if select.select([signals], [], [], answer_s / 20)[0]:
                    return
            os.kill(launcher, signal.SIGKILL)


def _unanswering() -> list[str]:
    """The job's hosts, by IPv4 address, that do not acknowledge what this one has sent them several
    times, and their ranks."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    silent = {row[2][:8] for row in rows if int(row[6], 16) >= RETRANSMISSIONS}
    addresses = {socket.inet_ntoa(bytes.fromhex(address)[::-1]) for address in silent}
    found = dict(peers[address] for address in sorted(addresses & peers.keys()))
    return [f"{host} (rank {', '.join(map(str, ranks))})" for host, ranks in found.items()]


def _stack() -> str:
    """The innermost calls of the main thread. Reads no source: its disk may be what hangs."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    calls = ((one.f_code, line) for one, line in islice(traceback.walk_stack(frame), FRAMES))
    return ", ".join(
        f"{code.co_name} ({os.path.basename(code.co_filename)}:{line})" for code, line in calls
    )


def _stopped_ranks(world: World) -> dict[str, psutil.Process]:
    """The ranks of this job on this host that are stopped, or wait for a disk, in words."""
    found = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            environ, status = process.environ(), process.status()
            rank = environ.get(world.started_by.variables[0])
            stopped = status in (psutil.STATUS_STOPPED, psutil.STATUS_DISK_SLEEP)
            if rank and stopped and job_on_host(environ) == job_on_host():
                found[f"rank {rank} on {world.host}, process {process.pid}, is {status}"] = process
    return found
