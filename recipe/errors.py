"""How a run ends when something is wrong: one clear message, from one rank, and a non-zero code."""

import concurrent.futures
import difflib
import errno
import json
import os
import re
import resource
import socket
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from recipe.files import control_groups, read_proc, remove_partial_files
from recipe.marks import marks
from recipe.world import FINISH_S, LAUNCHERS, World

# Ranks other than 0 delay their message, so that an error of all ranks is printed once: rank 0
# prints it and ends, and the launcher ends the other ranks while they wait. An error that only
# rank 3 has is printed 4 s late.
OTHER_RANK_DELAY_S = 4.0
# A rank that lost its peer waits, so that the rank that failed prints first. It prints its own
# error only if nothing has ended it by then: no launcher, and no watcher of a rank that was lost.
LOST_PEER_DELAY_S = 15.0
ASKED_POLL_S = 0.02
LATE_RANK_0_S = 1.0
REMOVAL_S = 0.2  # to remove partially written files
# Checkpoints that a thread of this process is writing: `leave` waits for them.
WRITES: list[Future[None]] = []
# Set when this rank ends because of an error: a signal then comes from the launcher, which has seen
# another rank end.
FAILING = threading.Event()
# A signal asked the run to end, and it has saved a checkpoint: EX_TEMPFAIL of sysexits.h, after
# which a caller may start it again.
EXIT_SAVED = 75
# Another rank is gone or frozen, as far as this one can tell: EX_PROTOCOL.
EXIT_LOST_PEER = 76
RESUME_HINT = (
    "`--resume auto` with the --name of the run's folder resumes from its last checkpoint, if it "
    "has saved one"
)
# Together these variables distinguish the jobs on a host, whichever launchers started them.
JOB_VARIABLES = [name for launcher in LAUNCHERS.values() for name in launcher.job]
AS_STARTED = dict(os.environ)  # a copy, since engines set more variables for themselves
LOST_PEER_SIGNS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection refused",
    "Horovod has been shut down",
    "Shutdown msg from rank",
    "shutdown in progress",
    "Read error",
    "gloo/transport/tcp/pair.cc",  # Gloo's source files for a connection and for its messages;
    "buffer.cc",  # not device.cc, whose errors are about this host
    "tensorpipe/transport",
    "ncclRemoteError",
    "ncclSystemError",
)
# For each system limit: a pattern of the errors that it causes (also inside a loader worker's
# traceback), the limit, what it counts, and what a rank needs.
LIMITS = (
    (
        "Too many open files|ancdata",
        resource.RLIMIT_NOFILE,
        "open files in a process (ulimit -n)",
        "50, plus 12 for each of its loader workers",
    ),
    (
        r"start new thread|(^|\[Errno 11\] )Resource temporarily unavailable|^unexpected EOF$",
        resource.RLIMIT_NPROC,
        "processes and threads of this user (ulimit -u)",
        "30, plus 6 for each of its loader workers",
    ),
)
OF_MEMORY = (
    "out of memory|[Cc]an(not|'t) allocate memory|Unable to allocate|nsufficient memory|"
    "STATUS_ALLOC_FAILED"
)
OF_TAKEN_GPU = "CUDA-capable device(s) is/are busy or unavailable"  # cudaErrorDevicesUnavailable
OF_CONTAINER = "of this container or job (its control group's {})"


# Line ends and escape characters, which could forge lines in a terminal, and text-direction marks.
CONTROL = "\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069"


class UserError(ValueError):
    """An error that the user can fix: the message has the value, what is wrong with it, and what to
    do. Control characters in it, as from other people's files, are replaced by "?"."""

    def __init__(self, message: str) -> None:
        super().__init__(re.sub(rf"(?![\n\t])[{CONTROL}]", "?", message))


class BadImage(UserError):
    """An image cannot be read or decoded: --bad-images replace puts another one in its place."""


class LostPeer(Exception):
    """This rank's watcher asks it to end, since another rank was lost."""


def refuse(*mistakes: tuple[object, str]) -> None:
    """Raise UserError if any of these mistakes was made, with a line for each that was. A mistake
    is a pair: whether it was made, and its message."""
    if made := [message for is_made, message in mistakes if is_made]:
        raise UserError("\n".join(made))


@contextmanager
def system_errors(
    path: str | Path, failure: str, remedy: str, kind: type[UserError] = UserError
) -> Iterator[None]:
    """Turn an OSError about `path`, or about something in it, into an error of this `kind`.
    `failure` says what is wrong ("cannot be read"), and `remedy` what to do. UserError for what is
    no fault of `path`: this process may not open more files, or memory ran out."""
    try:
        yield
    except OSError as error:
        is_limit = error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
        is_own_limit = is_limit and error.errno != errno.ENFILE  # that is the whole system's
        raise (UserError if is_limit else kind)(
            (is_own_limit and limit_reached(error))
            or f"{os.fsdecode(error.filename or path)}: {failure} ({error.strerror or error}). "
            f"{remedy}"
        ) from error


def near_match(name: str, known: Collection[str]) -> str:
    """Return the end of a message about an unknown name: a similar one, or all that there are."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"


def sentence(error: UserError) -> str:
    """Return the message of `error`, without the traceback that a DataLoader worker wraps it in."""
    kind = type(error)
    return str(error).rpartition(f"{kind.__module__}.{kind.__qualname__}: ")[2].strip()


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its kind if it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def is_lost_peer(error: BaseException) -> bool:
    """Return whether another rank's end has caused `error`, rather than this rank itself."""
    return type(error).__name__ in ("HorovodInternalError", "LostPeer") or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in LOST_PEER_SIGNS)
    )


def limit_reached(error: BaseException) -> str:
    """Return the message for an error that a limit of the system or of memory has caused; "" for
    any other error."""
    text = str(error)
    for signs, limit, what, need in LIMITS:
        limits = [(resource.getrlimit(limit)[0], what)]
        if limit == resource.RLIMIT_NPROC:
            whose = f"processes and threads {OF_CONTAINER.format('pids.max')}"
            limits += [(number, whose) for number in _of_groups("pids", "pids.max")]
        finite = [(number, what) for number, what in limits if number != resource.RLIM_INFINITY]
        if re.search(signs, text) and finite:
            number, what = min(finite)
            return (
                f"{text.splitlines()[-1]}: the limit here is {number} {what}, and a rank has about "
                f"{need}; raise it where the job is started, or give fewer --workers"
            )
    if OF_TAKEN_GPU in text:
        return (
            f"{OF_TAKEN_GPU}: probably another process uses this GPU, and its compute mode admits "
            "only one (nvidia-smi -q -d COMPUTE shows it); end that process, or, as root: "
            "nvidia-smi --compute-mode 0"
        )
    if isinstance(error, MemoryError) or re.search(OF_MEMORY, text):
        return _out_of_memory(text)
    return ""


def _out_of_memory(text: str) -> str:
    on_gpu = re.search(r"CUDA out of memory\..*? is free\.|.*C(UDA|uda|UBLAS|UDNN).*", text)
    of_torch = re.search(r"you tried to allocate \d+ bytes", text)
    words = of_torch[0] if of_torch else (text.strip().splitlines() or ["MemoryError"])[-1]
    where = on_gpu[0] if on_gpu else f"{words}: the limit here is {memory_limit()}"
    more = "" if on_gpu else ", or give the job more memory"
    return (
        f"memory ran out: {where.removesuffix('.')}; give a smaller --batch-size, with more "
        f"--batches-per-allreduce if the global batch is to stay{more}"
    )


def memory_limit() -> str:
    """Return, in words, the lowest limit of this process's memory: its own, its control group's, or
    what the host has."""
    limits = [
        (os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "of this host"),
        (resource.getrlimit(resource.RLIMIT_AS)[0], "of a process (ulimit -v)"),
        *(
            (number, OF_CONTAINER.format(name))
            for name in ("memory.max", "memory.limit_in_bytes")
            for number in _of_groups("memory", name)
        ),
    ]
    number, whose = min(limit for limit in limits if limit[0] != resource.RLIM_INFINITY)
    return f"{number / 2**30:.3g} GiB {whose}"


def _of_groups(controller: str, name: str) -> list[int]:
    """Return the limits that a file `name` of this process's control groups gives."""
    limits = []
    for group in control_groups(controller):
        with suppress(OSError):
            text = read_proc(group / name).strip()
            limits += [int(text)] if text.isdecimal() else []  # else "max"
    return limits


def fail(
    world: World, message: str, exit_code: int = 1, last: Callable[[], object] | None = None
) -> NoReturn:
    """Print `message` from one rank and end this process with `exit_code`; the launcher then ends
    the other ranks. `last`: what to do before the end. Give it only where all ranks find the error
    within about a second: they then do not wait for rank 0 to print first."""
    FAILING.set()
    if world.rank != 0:
        # Also without a message: else the launcher would end rank 0 before it has printed its own.
        _wait(0 if last else OTHER_RANK_DELAY_S)
        message = message and f"[rank {world.rank} on {world.host}] {message}"
    if message:
        lock = world.size == 1 or acquire_lock("speaker")
        if not lock:
            _wait(LOST_PEER_DELAY_S)  # another rank prints; the launcher ends this one
        else:
            print(message, file=sys.stderr, flush=True)
            _tell_torchrun(message)
            # While this rank lives, a late rank 0 with the same error finds the lock taken.
            time.sleep(LATE_RANK_0_S if world.rank != 0 or last else 0)
    if last:
        last()
    leave(exit_code)


def _wait(seconds: float) -> None:
    """Wait, or end this process when its watcher asks for it: another rank was lost, and that is
    no error to print."""
    for _ in range(round(seconds / ASKED_POLL_S)):
        if marks.is_asked:
            leave(EXIT_LOST_PEER)
        time.sleep(ASKED_POLL_S)


def _tell_torchrun(message: str) -> None:
    """Put our message at the end of the traceback that torchrun prints after a failure: torchrun
    reads it from the file in which torch.distributed.elastic.multiprocessing.errors.record would
    write an exception."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        shown = {"py_callstack": message, "timestamp": str(int(time.time()))}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": "", "extraInfo": shown}}))


def leave(exit_code: int, within_s: float = FINISH_S) -> NoReturn:
    """End this process when the checkpoint that it writes is on disk, or after `within_s` seconds,
    when the launcher would kill it. A partial file has only a temporary name, and is removed.

    `os._exit`, because orderly exits (MPI_Finalize, Horovod's shutdown) wait for all ranks, and the
    others may hang in a collective that this rank never joins.
    """
    try:
        concurrent.futures.wait(WRITES, within_s)
        removing = threading.Thread(target=remove_partial_files, daemon=True)
        removing.start()
        removing.join(REMOVAL_S)  # the disk may hang
    finally:
        os._exit(exit_code)


def job_on_host(environ: Mapping[str, str] = AS_STARTED) -> str:
    """Return a name for this job that is the same for all of its ranks on a host."""
    job = "/".join(environ.get(name, "") for name in JOB_VARIABLES)
    return f"imagenet-horovod-ddp/{os.getuid()}/{zlib.crc32(os.fsencode(job))}"


def acquire_lock(topic: str) -> socket.socket | bool:
    """Return the right to print about this topic for this job on this host, which one process at a
    time has; False if it is taken.

    It is an abstract Unix socket, whose name vanishes with its process.
    """
    try:
        lock = socket.socket(socket.AF_UNIX)
        lock.bind(f"\0{job_on_host()}/{topic}")
    except OSError as error:
        # Any other error, such as no free file descriptor: better print twice than never.
        return error.errno != errno.EADDRINUSE
    return lock


@contextmanager
def one_message(world: World) -> Iterator[None]:
    """Turn any exception in the body into one message and a non-zero exit code."""
    try:
        yield
    except UserError as error:
        fail(world, f"error: {sentence(error)}")
    except KeyboardInterrupt:
        fail(world, f"interrupted: {RESUME_HINT}", 130)
    except Exception as error:
        FAILING.set()
        if "have a deterministic implementation" in str(error):  # torch's words
            operation = str(error).partition(",")[0]
            reason = f"--deterministic: {operation}; choose another --arch, or leave it out"
        else:
            reason = limit_reached(error)
        is_lost = not reason and is_lost_peer(error)
        if is_lost:
            marks.is_leaving = True
            if marks.is_watched and marks.has_made_step and world.local_size < world.size:
                leave(EXIT_LOST_PEER)  # the lost rank's watcher may be lost with its host
            _wait(LOST_PEER_DELAY_S)
        message = f"error: {reason}" if reason else traceback.format_exc()
        fail(world, message, EXIT_LOST_PEER if is_lost else 1)
