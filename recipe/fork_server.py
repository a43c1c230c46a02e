"""Starts Python scripts fast: forks them from a server, a process that has loaded what they need.
A fork takes 10 ms, loading torch some seconds.

    python recipe/fork_server.py serve NAME IDLE MODULE ...   load modules, and fork for all who
                                                              ask, until nobody has for IDLE s
    python recipe/fork_server.py run NAME SCRIPT ...          what `python SCRIPT ...` does

The process that asks is the one that a launcher started. The fork gets its environment, working
folder, cores and standard streams; signals that reach it reach the fork, and the fork dies with it.
Whoever looks for the fork's launcher (ancestors.py) finds that of the process that asked, by the
variable FORKED.

Forks share sessions as the processes that asked do: for each of these sessions the server forks a
second server with a session of its own, which makes the forks. The reason: Linux may divide the
cores among sessions (sched_autogroup_enabled, sched(7)), and ranks with a session each were slower
(docs/results.md).

A server has one thread, and no MPI, no CUDA and no process group: each fork makes those for itself.
It should load no module of this project, some of which hold what they found when they were loaded.
A fork shares the server's hash seed, and all that is read when Python starts or a library is
loaded: PYTHONUTF8, OMP_NUM_THREADS, LD_PRELOAD and the like.
"""

import atexit
import ctypes
import errno
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

FORKED = "FORKED_FOR"  # variable of a fork: its process ID, and that of the process that asked
PASSED_ON = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
PR_SET_PDEATHSIG = 1  # of linux/prctl.h
IDLE_S = 60  # a server that was started by need ends when it has been without a fork for so long
ENDED_S = 0.5  # the system may still count a thread for a moment after its end
POLL_S = 0.02
LIBC = ctypes.CDLL(None)


# -- What every process does that forks ------------------------------------------------------------


def load(modules: Iterable[str]) -> None:
    """Import modules for forks of this process."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy's would start its threads
    for module in modules:
        importlib.import_module(module)
    gc.freeze()  # else a collection in a fork copies the memory of all imported modules
    atexit.register(gc.unfreeze)  # else triton (3.9 on) says at a fork's end that it leaked objects


def why_not_to_fork() -> str:
    """Return what keeps this process from forking, which a fork would not survive; "" if nothing
    does."""
    until = time.monotonic() + ENDED_S
    while (threads := len(os.listdir("/proc/self/task"))) > 1 and time.monotonic() < until:
        time.sleep(POLL_S)
    if threads > 1:
        return f"it has {threads} threads"
    torch = sys.modules.get("torch")
    return "it uses CUDA" if torch is not None and torch.cuda.is_initialized() else ""


def fork_process() -> int:
    """Fork this process. The fork dies with it. Return its process ID; 0 in the fork."""
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    return child


def leave_like(exit_code: int) -> NoReturn:
    """End this process as a fork has ended: with its exit code, or by the signal, if negative."""
    if exit_code < 0:
        with suppress(OSError):  # SIGKILL has no other
            signal.signal(-exit_code, signal.SIG_DFL)
        os.kill(os.getpid(), -exit_code)
    sys.exit(exit_code)


# -- The process that asks -------------------------------------------------------------------------


def run(
    name: str,
    words: Sequence[str],
    modules: Sequence[str] | None = None,
    variables: Mapping[str, str] | None = None,
) -> NoReturn:
    """Have the server of this name run a script; end as the script does. If there is no server,
    start one that loads `modules`, with these environment variables. RuntimeError if none can be
    had."""
    who = {
        "words": words,
        "folder": os.getcwd(),
        "environ": dict(os.environ),
        "cores": sorted(os.sched_getaffinity(0)),
        "asker": os.getpid(),
    }
    pid = 0
    while not pid:  # the server of this session may just have ended
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        server = connect(name, modules, variables)
        signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
        answers = server.makefile()
        with suppress(ConnectionError):
            socket.send_fds(server, [b"."], [0, 1, 2])
            server.sendall(json.dumps(who).encode("utf-8", "surrogateescape") + b"\n")
            answer = answers.readline().strip()
            if answer and not answer.isdecimal():
                raise RuntimeError(answer)
            pid = int(answer or 0)

    def pass_on(number: int, _: object) -> None:
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(pid, number)

    for number in PASSED_ON:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    status = int(answers.readline() or signal.SIGKILL)  # a fork dies with its server
    leave_like(os.waitstatus_to_exitcode(status))


def connect(
    name: str, modules: Sequence[str] | None, variables: Mapping[str, str] | None
) -> socket.socket:
    """Return the connection to the server of this process's session, which is started if need
    be."""
    of_session, started = f"{name}-{os.getsid(0)}", None
    if server := connected(of_session):
        return server
    while (root := connected(name)) is None:
        if modules is None or (started and started.wait() != 0):
            raise RuntimeError(f"there is no fork server {name}")
        started = start_server(name, modules, variables)
    with suppress(ConnectionError):
        socket.send_fds(root, [b"."], [])
        root.sendall(json.dumps(of_session).encode() + b"\n")
        root.recv(1)  # the end of the connection: the server of the session listens, or has failed
    if server := connected(of_session):
        return server
    raise RuntimeError(f"the fork server {name} has ended")


def connected(name: str) -> socket.socket | None:
    """Return the connection to a server; None if there is no such server."""
    server = socket.socket(socket.AF_UNIX)
    try:
        server.connect(address(name))
    except ConnectionRefusedError:
        server.close()
        return None
    if not is_own(server):
        raise RuntimeError(f"the fork server {name} is another user's")
    return server


def start_server(
    name: str, modules: Sequence[str], variables: Mapping[str, str] | None
) -> subprocess.Popen[bytes]:
    """Start a server, and return it when it listens or has ended: with the exit code 0 if another
    one listens."""
    server = subprocess.Popen(
        [sys.executable, __file__, "serve", name, str(IDLE_S), *modules],
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,  # which it closes when it listens
        start_new_session=True,
    )
    assert server.stdout
    server.stdout.read()
    return server


def address(name: str) -> str:
    """Return a server's address. It is in no folder, and vanishes with the server; hosts that have
    a network of their own have their own servers."""
    return f"\0{name}"


def is_own(other_end: socket.socket) -> bool:
    """Return whether a process of this user is at the other end. Another one's would run code as
    this user, or have its code run."""
    who = other_end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", who)
    return bool(user == os.getuid())


# -- The server ------------------------------------------------------------------------------------


class Fork(NamedTuple):
    """A running fork: a script, or the server of a session."""

    pid: int
    asker: socket.socket | None  # becomes readable when the process that asked for a script ends


class Wish(NamedTuple):
    """What a process has asked for: a script, as arguments of `become`, or the server of a session,
    by its name; and its standard streams."""

    what: Any
    streams: list[int]
    asker: socket.socket


class Server:
    """Where processes ask, and the forks that run."""

    def __init__(self, name: str) -> None:
        """End this process if there is such a server already."""
        self.listener, self.forks = socket.socket(socket.AF_UNIX), list[Fork]()
        try:
            self.listener.bind(address(name))
        except OSError as error:
            sys.exit(error.errno != errno.EADDRINUSE)
        self.listener.listen(socket.SOMAXCONN)
        self.woken, self.waker = socket.socketpair()  # readable when a fork has ended
        self.waker.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.waker.fileno(), warn_on_full_buffer=False)

    def wait(self, seconds: float | None) -> list[Any]:
        """Wait until something can be read, and return what; first see to forks that have ended, or
        whose askers have."""
        askers = [fork.asker for fork in self.forks if fork.asker]
        ready: list[Any] = select.select(
            [self.listener, self.woken, *askers], [], [], None if self.forks else seconds
        )[0]
        if self.woken in ready:
            self.woken.recv(4096)
        for fork in [*self.forks]:
            if fork.asker in ready:
                kill_group(fork.pid)
            pid, status = os.waitpid(fork.pid, 0 if fork.asker in ready else os.WNOHANG)
            if pid:
                self.forks.remove(fork)
                kill_group(fork.pid)  # what the script has left
                if fork.asker:
                    with suppress(OSError):
                        fork.asker.sendall(b"%d\n" % status)
                    fork.asker.close()
        return ready

    def answer(self) -> Wish | None:
        """Fork for a process that asks. Return in the fork what was asked for; None in this
        process, or if it asks no more."""
        asker, _ = self.listener.accept()
        if not is_own(asker):  # it is not even listened to: it may say nothing, for ever
            asker.close()
            return None
        streams = list[int]()
        with suppress(OSError, ValueError):  # of an asker that has just ended
            _, streams, _, _ = socket.recv_fds(asker, 1, 3)
            what = json.loads(asker.makefile(errors="surrogateescape").readline())
            is_script = isinstance(what, dict)
            try:
                pid = fork_process()
            except OSError as error:  # there may be no more processes, or no memory
                asker.sendall(f"cannot fork: {error.strerror}\n".encode())
                raise
            if pid == 0:
                self.close()
                return Wish(what, streams, asker)
            self.forks.append(Fork(pid, asker if is_script else None))
            if is_script:
                os.setpgid(pid, pid)  # to end it with what it starts
                asker.sendall(b"%d\n" % pid)
            else:
                asker.close()
        for stream in streams:
            os.close(stream)
        return None

    def close(self) -> None:
        """Close what a fork does not need."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for file in (self.listener, self.woken, self.waker, *(fork.asker for fork in self.forks)):
            if file:
                file.close()


def kill_group(leader: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def serve(name: str, idle_s: float, modules: Sequence[str]) -> None:
    """Fork for all who ask. Return in each fork, which is then to run the script in sys.argv. End
    this process if there is such a server already, or if nobody has had a fork for `idle_s`; the
    server of a session ends with its last fork."""
    nowhere, is_of_session = os.open(os.devnull, os.O_RDWR), False
    server = Server(name)
    os.dup2(nowhere, 1)
    del sys.path[0]  # this file's folder
    load(modules)
    if problem := why_not_to_fork():
        sys.exit(f"error: the fork server {name} cannot fork: {problem}")
    os.dup2(nowhere, 2)  # a launcher waits until its ranks' output is closed
    os.close(nowhere)
    while True:
        had_forks, ready = bool(server.forks), server.wait(idle_s)
        if server.listener in ready:
            wish = server.answer()
            if wish is None:
                continue
            if isinstance(wish.what, dict):
                wish.asker.close()
                become(**wish.what, streams=wish.streams)
                return
            os.setsid()
            server, is_of_session = Server(wish.what), True
            wish.asker.close()  # which tells who asked
        elif not server.forks and (is_of_session or not had_forks):
            sys.exit()


def become(
    words: list[str],
    folder: str,
    environ: dict[str, str],
    cores: list[int],
    asker: int,
    streams: list[int],
) -> None:
    """Take on what the process that asked has, and what Python would have made of it."""
    for own, stream in enumerate(streams):
        os.dup2(stream, own)
        os.close(stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ, **{FORKED: f"{os.getpid()} {asker}"})
    os.sched_setaffinity(0, cores)
    is_unbuffered = words[0] == "-u"  # as torchrun starts Python
    sys.argv[:] = words[is_unbuffered:]
    sys.stdout.reconfigure(  # type: ignore[union-attr]
        line_buffering=os.isatty(1), write_through=is_unbuffered or "PYTHONUNBUFFERED" in environ
    )
    own_folder = os.path.dirname(os.path.abspath(sys.argv[0]))
    sys.path[:0] = [own_folder, *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))]
    with suppress(ModuleNotFoundError):
        importlib.import_module("sitecustomize")
    tempfile.tempdir = None  # as TMPDIR says
    for module in ("torch", "numpy.random"):  # no two forks begin with the same random numbers
        if module in sys.modules:
            sys.modules[module].seed()


def main() -> None:
    """Answer the command line; return in a fork, which is to run the script in sys.argv."""
    command, name, *words = sys.argv[1:]
    if command == "run":
        try:
            run(name, words)
        except RuntimeError as error:
            sys.exit(f"error: {error}")
    serve(name, float(words[0]), words[1:])


if __name__ == "__main__":
    main()
    runpy.run_path(sys.argv[0], run_name="__main__")
