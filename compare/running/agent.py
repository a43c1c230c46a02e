"""The agent of a measured process: a small process beside each rank, on whichever host that is.

It holds the connection to who measures (stage.py), stops its rank with all that the rank has
started, lets it go on, and hands messages on to it and from it. It reports the rank's end.
Launchers are never stopped: they only wait.

The rank forks it before it loads anything large. If who measures is gone, or its host, the agent
ends the rank; if the agent is gone, a rank that is not stopped ends itself.

Messages are JSON, one a message of multiprocessing.connection, never pickled. To who measures:
hello, ready (warmed up), turn (its measurements), held, stopped, end (the rank has ended). From it:
go (with the number of steps), hold, stop, end.
"""

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Pipe, wait
from pathlib import Path
from typing import Any

import psutil

from compare.running.launch import busy_cpu_seconds
from recipe.world import read_world

STAGE = "COMPARE_STAGE"  # the variable that says where who measures listens, and with which key
UNREACHABLE = "who measures by turns cannot be reached"  # by which stage.py knows this error
CONNECT_SECONDS = 5.0  # for each address
KEEPALIVE = {  # for a host that has vanished to be missed within a minute or so
    socket.TCP_KEEPIDLE: 30,
    socket.TCP_KEEPINTVL: 10,
    socket.TCP_KEEPCNT: 3,
}
RANK_END_SECONDS = 3.0  # that a rank may take to end
MOST_BYTES = 1 << 16  # of a message


def tell(connection: Connection, kind: str, **values: Any) -> None:
    """Send a message; if nobody is left to read it, `hear` will find that out."""
    with suppress(OSError):
        connection.send_bytes(json.dumps({"kind": kind, **values}).encode())


def hear(connection: Connection) -> dict[str, Any]:
    """Wait for the next message; of kind "end" if nobody is left to send one."""
    try:
        message: dict[str, Any] = json.loads(connection.recv_bytes(MOST_BYTES))
        return message
    except (EOFError, OSError):
        return {"kind": "end"}


def start_agent(side: str, copy: int) -> Connection:
    """Fork this process's agent, and return the connection to it."""
    stage = connect(os.environ[STAGE])
    here, there = Pipe()
    rank = psutil.Process()
    if os.fork() == 0:
        here.close()
        leave_the_ranks_session()
        host = socket.gethostname()
        tell(
            stage, "hello", side=side, copy=copy, rank=read_world().rank, host=host,
            machine=machine_id() or host, cores=os.cpu_count() or 1,
        )  # fmt: skip
        try:
            attend(stage, there, rank)
        finally:
            os._exit(0)
    stage.close()
    there.close()
    return here


def connect(place: str) -> Connection:
    """The connection to who measures, at `/a/socket`, or at the first of `ADDRESS,ADDRESS:PORT KEY`
    that answers and has the key; ends this process if none does."""
    address, _, key = place.partition(" ")
    if address.startswith("/"):
        return Client(address)
    hosts, _, port = address.rpartition(":")
    problems = []
    for host in hosts.split(","):
        try:
            # A Client would wait for minutes where packets vanish.
            socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
            connection = Client((host, int(port)), authkey=bytes.fromhex(key))
            keep_alive(connection)
            return connection
        except (OSError, EOFError, AuthenticationError) as error:
            problems.append(f"{host}: {error or type(error).__name__}")
    sys.exit(f"{socket.gethostname()}: {UNREACHABLE} at port {port} ({'; '.join(problems)})")


def keep_alive(connection: Connection) -> None:
    """Have the system find out, over TCP, whether the other end's host is still there."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE.items():
            same.setsockopt(socket.IPPROTO_TCP, option, value)


def leave_the_ranks_session() -> None:
    """Be no part of what launchers signal, and keep none of their pipes open."""
    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for output in range(3):
        os.dup2(nowhere, output)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def machine_id() -> str:
    """What tells this kernel from others: several hosts may share one, and then its cores, too."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def attend(stage: Connection, rank: Connection, process: psutil.Process) -> None:
    """Serve until the rank or who measures has ended; then leave nothing of the rank."""
    tree, busy, began = [process], 0.0, 0.0
    try:
        while True:
            for speaker in wait([rank, stage]):
                message = hear(speaker)  # type: ignore[arg-type]
                kind = message.pop("kind")
                if kind == "end":
                    return end(stage, rank, process, tree_of(process) or tree)
                if speaker is rank:
                    if kind in ("turn", "held"):
                        message["busy"] -= busy
                        message["window"] = message.pop("until") - began
                    tell(stage, kind, **message)
                elif kind == "stop":
                    tree = stop(process)
                    tell(stage, "stopped")
                else:
                    if kind == "go":
                        busy, began = busy_cpu_seconds(), time.monotonic()
                        send_signal(tree, signal.SIGCONT)
                    tell(rank, kind, **message)
    finally:
        send_signal(tree, signal.SIGKILL)


def end(
    stage: Connection, rank: Connection, process: psutil.Process, tree: list[psutil.Process]
) -> None:
    """Let the rank end itself, and kill what it leaves; say when it is done."""
    send_signal(tree, signal.SIGCONT)
    tell(rank, "end")
    deadline = time.monotonic() + RANK_END_SECONDS
    while os.getppid() == process.pid and time.monotonic() < deadline:
        time.sleep(0.005)
    send_signal(tree, signal.SIGKILL)
    tell(stage, "end")


def tree_of(process: psutil.Process) -> list[psutil.Process]:
    """A process and all that it has started, but for this one; none if it has ended."""
    with suppress(psutil.Error):
        found = [process, *process.children(recursive=True)]
        return [one for one in found if one.pid != os.getpid()]
    return []


def stop(process: psutil.Process) -> list[psutil.Process]:
    """Stop a process and all that it has started; return them. Looks again, in case one of them
    was just starting another."""
    stopped: list[psutil.Process] = []
    while new := [one for one in tree_of(process) if one not in stopped]:
        send_signal(new, signal.SIGSTOP)
        stopped += new
    return stopped


def send_signal(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    """Send processes a signal; those that have ended are left out."""
    for process in processes:
        with suppress(psutil.Error):
            process.send_signal(number)
