"""Starts Python scripts fast: forks them from a server, a process that has loaded what they need.
A fork takes 10 ms, loading torch some seconds.

    python recipe/fork_server.py serve NAME IDLE MODULE ...   load modules, and fork for all who
                                                              ask, until nobody has for IDLE s
    python recipe/fork_server.py run NAME SCRIPT ...          what `python SCRIPT ...` does

The process that asks is the one that a launcher started. The fork gets its environment, working
folder, cores and standard streams; signals that reach it reach the fork, and the fork dies with it.
Whoever looks for the fork's launcher (ancestors.py) finds that of the process that asked, by the
variable FORKED.

For each session of processes that ask, the server forks a server with a session of its own, which
makes the forks. For Linux gives all processes of a session one share of the cores
(sched_autogroup_enabled, sched(7)): two ranks of Horovod over MPI on two cores were 7 to 15 %
slower with a session each than with one that they shared, as they have under mpirun.

A server has one thread, and no MPI, no CUDA and no process group: each fork makes those for itself.
It should load no module of this project, some of which hold what they found when they were loaded.
A fork shares the server's hash seed, and all that is read when Python starts or a library is
loaded: PYTHONUTF8, OMP_NUM_THREADS, LD_PRELOAD and the like.
"""

import ctypes
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
from typing import Any, NamedTuple

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


# -- The process that asks -------------------------------------------------------------------------


def run(
    name: str,
    words: Sequence[str],
    modules: Sequence[str] | None = None,
    variables: Mapping[str, str] | None = None,
) -> None:
    """Have the server of this name run a script; end as the script does. If there is no server,
    start one that loads `modules`, with these environment variables."""
    who = {
        "words": words,
        "folder": os.getcwd(),
        "environ": dict(os.environ),
        "cores": sorted(os.sched_getaffinity(0)),
        "asker": os.getpid(),
    }
    pid = 0
    while not pid:  # the server of this session may just have ended
        server = connect(name, modules, variables)
        signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
        answers = server.makefile()
        with suppress(ConnectionError):
            socket.send_fds(server, [b"."], [0, 1, 2])
            server.sendall(json.dumps(who).encode("utf-8", "surrogateescape") + b"\n")
            pid = int(answers.readline() or 0)
    for number in PASSED_ON:
        signal.signal(number, lambda number, _: os.kill(pid, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    status = int(answers.readline() or signal.SIGKILL)  # a fork dies with its server
    if os.WIFSIGNALED(status):
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


def connect(
    name: str, modules: Sequence[str] | None, variables: Mapping[str, str] | None
) -> socket.socket:
    """Return the connection to the server of this process's session, which is started if need
    be."""
    of_session = f"{name}-{os.getsid(0)}"
    if server := connected(of_session):
        return server
    while (root := connected(name)) is None:
        if modules is None:
            sys.exit(f"error: there is no fork server {name}")
        start_server(name, modules, variables)
    with suppress(ConnectionError):
        socket.send_fds(root, [b"."], [])
        root.sendall(json.dumps(of_session).encode() + b"\n")
        root.recv(1)  # the end of the connection: the server of the session listens, or has failed
    if server := connected(of_session):
        return server
    sys.exit(f"error: the fork server {name} has ended")


def connected(name: str) -> socket.socket | None:
    """Return the connection to a server; None if there is no such server."""
    server = socket.socket(socket.AF_UNIX)
    try:
        server.connect(address(name))
    except ConnectionRefusedError:
        server.close()
        return None
    check_user(server)
    return server


def start_server(name: str, modules: Sequence[str], variables: Mapping[str, str] | None) -> None:
    """Start a server, and return when it listens, or has ended because another one does."""
    server = subprocess.Popen(
        [sys.executable, __file__, "serve", name, str(IDLE_S), *modules],
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,  # which it closes when it listens
        start_new_session=True,
    )
    assert server.stdout
    server.stdout.read()


def address(name: str) -> str:
    """Return a server's address. It is in no folder, and vanishes with the server; hosts that have
    a network of their own have their own servers."""
    return f"\0{name}"


def check_user(other_end: socket.socket) -> None:
    """End this process if another user's is at the other end, for it would run that one's code."""
    who = other_end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", who)
    if user != os.getuid():
        sys.exit(f"error: user {user} is at the other end of a fork server's socket")


# -- The server ------------------------------------------------------------------------------------


class Fork(NamedTuple):
    """A running fork: a script, or the server of a session."""

    pid: int
    ended: int  # a file that becomes readable when the fork ends
    asker: socket.socket | None  # becomes readable when the process that asked for a script ends

    def close(self) -> None:
        """Close this process's files for it."""
        os.close(self.ended)
        if self.asker:
            self.asker.close()


def serve(name: str, idle_s: float, modules: Sequence[str]) -> None:
    """Fork for all who ask. Return in each fork, which is then to run the script in sys.argv. End
    this process if there is such a server already, or if nobody has had a fork for `idle_s`; the
    server of a session ends with its last fork."""
    nowhere, is_of_session = os.open(os.devnull, os.O_RDWR), False
    listener, forks = listen(name), list[Fork]()
    os.dup2(nowhere, 1)
    load(modules)
    if problem := why_not_to_fork():
        sys.exit(f"error: the fork server {name} cannot fork: {problem}")
    os.dup2(nowhere, 2)  # a launcher waits until its ranks' output is closed
    os.close(nowhere)
    while True:
        watched = [listener, *(file for fork in forks for file in (fork.ended, fork.asker) if file)]
        ready: list[Any] = select.select(watched, [], [], None if forks else idle_s)[0]
        for fork in [fork for fork in forks if fork.ended in ready or fork.asker in ready]:
            finish(fork)
            forks.remove(fork)
        if not ready or (is_of_session and not forks and listener not in ready):
            sys.exit()
        if listener not in ready:
            continue
        asker, _ = listener.accept()
        check_user(asker)
        _, streams, _, _ = socket.recv_fds(asker, 1, 3)
        wish = json.loads(asker.makefile(errors="surrogateescape").readline())
        is_script = isinstance(wish, dict)
        pid = fork_process()
        if pid:
            forks.append(Fork(pid, os.pidfd_open(pid), asker if is_script else None))
            for stream in streams:
                os.close(stream)
            if is_script:
                asker.sendall(b"%d\n" % pid)
            else:
                asker.close()
            continue
        listener.close()
        for fork in forks:
            fork.close()
        if is_script:
            asker.close()
            become(**wish, streams=streams)
            return
        os.setsid()
        listener, forks, is_of_session = listen(wish), [], True
        asker.close()  # which tells who asked


def listen(name: str) -> socket.socket:
    """Return the socket on which processes ask; end this process if another one has it."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(address(name))
    except OSError:
        sys.exit()
    listener.listen(socket.SOMAXCONN)
    return listener


def finish(fork: Fork) -> None:
    """Tell the process that asked for a fork how the fork has ended. If that process has ended, end
    the fork and its process group."""
    if not select.select([fork.ended], [], [], 0)[0]:
        os.killpg(fork.pid, signal.SIGKILL)
    _, status = os.waitpid(fork.pid, 0)
    if fork.asker:
        with suppress(OSError):
            fork.asker.sendall(b"%d\n" % status)
    fork.close()


def become(
    words: list[str],
    folder: str,
    environ: dict[str, str],
    cores: list[int],
    asker: int,
    streams: list[int],
) -> None:
    """Take on what the process that asked has, and what Python would have made of it."""
    os.setpgid(0, 0)
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
    sys.path[:1] = [own_folder, *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))]
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
        run(name, words)
    serve(name, float(words[0]), words[1:])


if __name__ == "__main__":
    main()
    runpy.run_path(sys.argv[0], run_name="__main__")
