"""How a run ends when something is wrong: one clear message, from one rank, and exit code not 0."""

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

from recipe.files import remove_partial_files
from recipe.world import FINISH_S, LAUNCHERS, World

# Ranks other than 0 hold their message back, so that an error that all ranks share is told once:
# rank 0 tells it and leaves, and the launcher ends the others while they wait. An error that only
# rank 3 has comes out 4 s late.
OTHER_RANK_DELAY_S = 4.0
# A rank that lost its peer is a victim: the rank that failed speaks first. It speaks up only if
# nobody ended it.
LOST_PEER_DELAY_S = 15.0
LATE_RANK_0_S = 1.0
REMOVAL_S = 0.2  # of a file that is half written
# Checkpoints that a thread of this process is writing: `leave` waits for them.
WRITES: list[Future[None]] = []
# Set when this rank ends because of an error: a signal is then the launcher's, which has seen
# another rank end.
FAILING = threading.Event()
# Set for a rank whose watcher starts it anew when it ends because another one is lost
# (recipe/nursery.py): of that it says nothing.
OWN_RANK = "TRAINED_UNDER_WATCH"
keep_state: Callable[[], object] | None = None  # what it does instead, if it can
# A run was asked to end by a signal, and has kept a checkpoint: EX_TEMPFAIL of sysexits.h, which
# invites to start it again.
EXIT_SAVED = 75
# Another rank is gone or frozen, as far as this one can tell: EX_PROTOCOL.
EXIT_LOST_PEER = 76
RESUME_HINT = (
    "`--resume auto` with the --name of the run's folder goes on from its last checkpoint, if it "
    "has kept one"
)
# Together they tell one job on a host from another, whichever launcher started it.
JOB_VARIABLES = [name for launcher in LAUNCHERS.values() for name in launcher.job]
AS_STARTED = dict(os.environ)  # an engine adds variables of that kind, for itself
LOST_PEER_SIGNS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection refused",
    "Horovod has been shut down",
    "Shutdown msg from rank",
    "shutdown in progress",
    "Read error",
    "gloo/transport/tcp/pair.cc",  # Gloo's files about a connection, and those about what
    "buffer.cc",  # was sent through it; not device.cc, which is about this host
    "tensorpipe/transport",
    "ncclRemoteError",
    "ncclSystemError",
)
# What an error says that has met a limit of the system (also inside a loader worker's traceback),
# the limit, and what it counts.
LIMITS = (
    ("Too many open files|ancdata", resource.RLIMIT_NOFILE,
     "open files in a process (ulimit -n), and a rank has about 50, and 12 more for each of its "
     "loader workers"),
    (r"start new thread|(^|\[Errno 11\] )Resource temporarily unavailable|^unexpected EOF$",
     resource.RLIMIT_NPROC,
     "processes and threads of this user (ulimit -u), and a rank has about 30, and 6 more for each "
     "of its loader workers"),
    ("Cannot allocate memory", resource.RLIMIT_AS, "bytes of memory in a process (ulimit -v)"),
)  # fmt: skip


# Line ends and escapes, which would forge lines in a terminal, and marks of direction.
CONTROL = "\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069"


class UserError(ValueError):
    """An error that the user can fix: the message has the value, what is wrong with it, and
    what to do. Of others' files and records it repeats nothing that steers a terminal."""

    def __init__(self, message: str) -> None:
        super().__init__(re.sub(rf"(?![\n\t])[{CONTROL}]", "?", message))


def refuse(*mistakes: tuple[object, str]) -> None:
    """Raise UserError for those of these mistakes that were made: whether it was, and what to say
    then; a line each."""
    if made := [message for is_made, message in mistakes if is_made]:
        raise UserError("\n".join(made))


@contextmanager
def system_errors(path: str | Path, failure: str, remedy: str) -> Iterator[None]:
    """Turn an error of the system about `path`, or about something in it, into a UserError: that it
    `failure` ("cannot be read"), and what to do."""
    try:
        yield
    except OSError as error:
        raise UserError(
            (error.errno == errno.EMFILE and limit_reached(error))
            or f"{os.fsdecode(error.filename or path)}: {failure} ({error.strerror or error}). "
            f"{remedy}"
        ) from error


def near_match(name: str, known: Collection[str]) -> str:
    """The end of a message about a name that is not known."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"


def sentence(error: UserError) -> str:
    """The message of `error`, without the traceback that a DataLoader's worker wraps it in."""
    return str(error).rpartition(f"{UserError.__module__}.{UserError.__qualname__}: ")[2].strip()


def is_lost_peer(error: BaseException) -> bool:
    """Whether `error` is the consequence of another rank's end rather than a cause of its own."""
    return type(error).__name__ == "HorovodInternalError" or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in LOST_PEER_SIGNS)
    )


def limit_reached(error: BaseException) -> str:
    """What to say of an error that one of the system's limits has caused; "" of another one."""
    found = (
        f"{str(error).splitlines()[-1]}: the limit here is {resource.getrlimit(limit)[0]} {what}; "
        "raise it where the job is started, or give fewer --workers"
        for signs, limit, what in LIMITS
        if re.search(signs, str(error)) and resource.getrlimit(limit)[0] != resource.RLIM_INFINITY
    )
    return next(found, "")


def fail(
    world: World, message: str, exit_code: int = 1, last: Callable[[], object] | None = None
) -> NoReturn:
    """Print `message` from one rank and end this process with `exit_code`; the launcher then ends
    the rest. `last`: what to do before, where all ranks find out within a second or so."""
    FAILING.set()
    if world.rank != 0:
        # Also without a message: the launcher would end rank 0 before it has told its own.
        time.sleep(0 if last else OTHER_RANK_DELAY_S)
        message = message and f"[rank {world.rank} on {world.host}] {message}"
    if message:
        lock = world.size == 1 or _acquire_speaker_lock()
        if not lock:
            time.sleep(LOST_PEER_DELAY_S)  # another rank is speaking; the launcher ends this one
        else:
            print(message, file=sys.stderr, flush=True)
            _tell_torchrun(message)
            # A late rank 0 with the same error finds the lock taken, as long as this one lives.
            time.sleep(LATE_RANK_0_S if world.rank != 0 or last else 0)
    if last:
        last()
    leave(exit_code)


def _tell_torchrun(message: str) -> None:
    """Have torchrun, whose traceback follows any exit code but 0, end it with our words: it reads
    them where torch.distributed.elastic.multiprocessing.errors.record would write an exception."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        shown = {"py_callstack": message, "timestamp": str(int(time.time()))}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": "", "extraInfo": shown}}))


def leave(exit_code: int, within_s: float = FINISH_S) -> NoReturn:
    """End this process when the checkpoint that it writes is on disk, or after `within_s`, the
    launcher's patience: a file that is half written by then has only a temporary name, and goes.

    `os._exit`, because the tidy ways out (MPI_Finalize, Horovod's shutdown) wait for all ranks, and
    the others may hang in a collective that this rank never joins.
    """
    try:
        concurrent.futures.wait(WRITES, within_s)
        removing = threading.Thread(target=remove_partial_files, daemon=True)
        removing.start()
        removing.join(REMOVAL_S)  # the disk may hang
    finally:
        os._exit(exit_code)


def job_on_host(environ: Mapping[str, str] = AS_STARTED) -> str:
    """A name for this job that its ranks on a host share: for what they share there."""
    job = "/".join(environ.get(name, "") for name in JOB_VARIABLES)
    return f"imagenet-horovod-ddp/{os.getuid()}/{zlib.crc32(os.fsencode(job))}"


def _acquire_speaker_lock() -> socket.socket | bool:
    """The right to speak for this job on this host, held by one process at a time; False if taken.

    An abstract Unix socket, whose name vanishes with the process that holds it.
    """
    try:
        lock = socket.socket(socket.AF_UNIX)
        lock.bind(f"\0{job_on_host()}")
    except OSError as error:
        return (
            error.errno != errno.EADDRINUSE
        )  # no descriptor is left, say: better twice than never
    return lock


@contextmanager
def one_message(world: World) -> Iterator[None]:
    """Turn whatever ends the body early into one message and an exit code that is not 0."""
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
            told = f"--deterministic: {operation}; choose another --arch, or leave it out"
        else:
            told = limit_reached(error)
        is_lost = not told and is_lost_peer(error)
        if is_lost and OWN_RANK in os.environ:
            with suppress(Exception):  # the last checkpoint is there
                if keep_state:
                    keep_state()
            leave(EXIT_LOST_PEER)
        time.sleep(LOST_PEER_DELAY_S if is_lost else 0)
        message = f"error: {told}" if told else traceback.format_exc()
        fail(world, message, EXIT_LOST_PEER if is_lost else 1)
