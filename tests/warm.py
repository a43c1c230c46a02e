"""Starts Python programs from a process that has loaded torch: a fork takes 10 ms, torch 3 s.

    python tests/warm.py serve SOCKET          load torch, and fork for each program asked for
    python tests/warm.py run SOCKET PROGRAM    what `python PROGRAM` does

For tests whose subject is not how processes start or end. The program's parent is the server. It
gets environment, working folder, cores, files and signals of the process that asked for it, and
dies with that one. It shares the server's hash seed, and what is read only when Python starts: a
locale, limits, PYTHONUTF8.
"""

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys

PASSED_ON = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
SIGNAL_OF_PARENTS_DEATH = 1  # PR_SET_PDEATHSIG, prctl(2)


def run(path: str, words: list[str]) -> None:
    """Have the server start a program; end as it does."""
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        socket.send_fds(server, [b"."], [0, 1, 2])
        asked = (words, os.getcwd(), dict(os.environ), sorted(os.sched_getaffinity(0)))
        server.sendall(json.dumps(asked).encode("utf-8", "surrogateescape") + b"\n")
        told = server.makefile()
        pid = int(told.readline())
        for number in PASSED_ON:
            signal.signal(number, lambda number, _: os.kill(pid, number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        status = int(told.readline())
    if os.WIFSIGNALED(status):
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


def serve(path: str) -> None:
    """Fork for each program; returns in the forked process, which is then to run sys.argv."""
    for name in ("torch._dynamo", "torch.distributed.run", "torchvision.transforms.v2"):
        importlib.import_module(name)
    gc.freeze()  # else a collection in a fork copies its memory
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # who waits for a program's end is its parent
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{path}.new")
        listener.listen()
        os.rename(f"{path}.new", path)  # once it is there it answers
        while True:
            asking = listener.accept()[0]
            if os.fork() == 0:
                break
            asking.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    die_with_parent()
    _, files, _, _ = socket.recv_fds(asking, 1, 3)
    asked = json.loads(asking.makefile(errors="surrogateescape").readline())
    if (pid := os.fork()) == 0:
        die_with_parent()
        become(*asked, files)
        return
    for file in files:
        os.close(file)
    asking.sendall(b"%d\n" % pid)
    ended = os.pidfd_open(pid)
    if asking in select.select([ended, asking], [], [])[0]:  # who asked for it has ended
        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(OSError):
        asking.sendall(b"%d\n" % os.waitpid(pid, 0)[1])
    os._exit(0)


def die_with_parent() -> None:
    import ctypes  # which those that ask do not wait for

    ctypes.CDLL(None).prctl(SIGNAL_OF_PARENTS_DEATH, signal.SIGKILL)


def become(
    words: list[str], folder: str, environ: dict, cores: list[int], files: list[int]
) -> None:
    """Take on what the process that asked has."""
    import tempfile

    import numpy
    import torch

    torch.seed()  # no two programs begin with the same random numbers
    numpy.random.seed()
    for own, file in enumerate(files):
        os.dup2(file, own)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    os.sched_setaffinity(0, cores)
    if words[0] == "-u":  # as torchrun says
        words = words[1:]
        sys.stdout.reconfigure(write_through=True)
    tempfile.tempdir = None  # as TMPDIR says
    sys.argv[:] = words
    script_folder = os.path.dirname(os.path.abspath(words[0]))
    sys.path[:1] = [script_folder, *environ.get("PYTHONPATH", "").split(":")]
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("sitecustomize")


if __name__ == "__main__":
    command, path, *words = sys.argv[1:]
    if command == "run":
        run(path, words)
    import runpy

    serve(path)
    runpy.run_path(sys.argv[0], run_name="__main__")
