"""The agent of a measured rank: a small process beside it, on whichever host that is.

It holds the connection to the scheduler (scheduler.py), pauses its rank with all that the rank has
started (SIGSTOP), lets it go on, and passes messages on to it and from it. Launchers are never
paused: they only wait. The rank forks it before it loads anything large. If the scheduler is gone,
or its host, the agent ends the rank; if the agent is gone, a rank that is not paused ends itself.

A message is a `State` with values, as JSON, one a message of multiprocessing.connection, never
pickled. The scheduler sends which state a rank is to take:

    RUNNING   do a turn of `steps` steps
    READY     independent ranks: do no more steps now
    PAUSED    be stopped
    ENDED     end

and it is sent which one the rank has: STARTING, with who it is; READY after its warm-up, and
after a turn with its measurements; PAUSED; ENDED.
"""

import enum
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import (
    Connection,
    Pipe,
    answer_challenge,
    deliver_challenge,
    wait,
)
from pathlib import Path
from typing import Any

import psutil

from compare.running.launch import busy_cpu_seconds
from recipe.world import read_world

# The variable that says where the scheduler listens: ADDRESS,ADDRESS:PORT KEY
SCHEDULER = "COMPARE_SCHEDULER"
UNREACHABLE = "the scheduler of turns cannot be reached"  # by which it knows this error
CONNECT_SECONDS = 5.0  # for each address
KEEPALIVE = {  # for a host that has vanished to be missed within a minute or so
    socket.TCP_KEEPIDLE: 30,
    socket.TCP_KEEPINTVL: 10,
    socket.TCP_KEEPCNT: 3,
}
RANK_END_SECONDS = 3.0  # that a rank may take to end
MOST_BYTES = 1 << 16  # of a message
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # hosts that share a kernel share its cores, too


class State(enum.Enum):
    """What a rank does."""

    STARTING = "starting"  # up to the end of its warm-up
    READY = "ready"  # waits for a turn; threads of it may poll
    RUNNING = "running"  # does a turn
    PAUSED = "paused"
    ENDED = "ended"


def send(connection: Connection, state: State, **values: Any) -> None:
    """Send a message; if nobody is left to read it, `receive` will find that out."""
    with suppress(OSError):
        connection.send_bytes(json.dumps({"state": state.value, **values}).encode())


def receive(connection: Connection) -> tuple[State, dict[str, Any]]:
    """Wait for the next message: a state and its values; ENDED if nobody is left to send one."""
    try:
        values = json.loads(connection.recv_bytes(MOST_BYTES))
    except (EOFError, OSError):
        return State.ENDED, {}
    return State(values.pop("state")), values


def start_agent(side: str, copy: int) -> Connection:
    """Fork this process's agent, and return the connection to it."""
    scheduler = connect(os.environ[SCHEDULER])
    here, there = Pipe()
    rank = psutil.Process()
    if os.fork() == 0:
        here.close()
        try:
            os.setsid()  # no part of what launchers signal, and none of their pipes kept open
            nowhere = os.open(os.devnull, os.O_RDWR)
            for output in range(3):
                os.dup2(nowhere, output)
            send(
                scheduler, State.STARTING, side=side, copy=copy, number=read_world().rank,
                host=socket.gethostname(), machine=BOOT_ID.read_text(), cores=os.cpu_count() or 1,
            )  # fmt: skip
            serve(scheduler, there, rank)
        finally:
            os._exit(0)
    scheduler.close()
    there.close()
    return here


def connect(place: str) -> Connection:
    """Return the connection to the scheduler, at the first address of `ADDRESS,ADDRESS:PORT KEY`
    that answers and has the key; ends this process if none does."""
    addresses, _, key = place.partition(" ")
    hosts, _, port = addresses.rpartition(":")
    problems = []
    for host in hosts.split(","):
        try:
            made = socket.create_connection((host, int(port)), CONNECT_SECONDS)
            made.settimeout(None)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in KEEPALIVE.items():
                made.setsockopt(socket.IPPROTO_TCP, option, value)
            connection = Connection(made.detach())
            answer_challenge(connection, bytes.fromhex(key))
            deliver_challenge(connection, bytes.fromhex(key))
            return connection
        except (OSError, EOFError, AuthenticationError) as error:
            problems.append(f"{host}: {error or type(error).__name__}")
    sys.exit(f"{socket.gethostname()}: {UNREACHABLE} at port {port} ({'; '.join(problems)})")


def serve(scheduler: Connection, client: Connection, rank: psutil.Process) -> None:
    """Serve until the rank or the scheduler has ended; then leave nothing of the rank."""
    tree, busy, began = [rank], 0.0, 0.0
    try:
        while True:
            for sender in wait([client, scheduler]):
                state, values = receive(sender)  # type: ignore[arg-type]
                if state is State.ENDED:
                    tree = tree_of(rank) or tree
                    send_signal(tree, signal.SIGCONT)
                    send(client, State.ENDED)
                    deadline = time.monotonic() + RANK_END_SECONDS  # to end by itself
                    while os.getppid() == rank.pid and time.monotonic() < deadline:
                        time.sleep(0.005)
                    return
                if sender is client:
                    if "busy" in values:
                        values["busy"] -= busy
                        values["window"] = values.pop("until") - began
                    send(scheduler, state, **values)
                elif state is State.PAUSED:
                    tree = pause(rank)
                    send(scheduler, State.PAUSED)
                else:
                    if state is State.RUNNING:
                        busy, began = busy_cpu_seconds(), time.monotonic()
                        send_signal(tree, signal.SIGCONT)
                    send(client, state, **values)
    finally:
        send_signal(tree, signal.SIGKILL)


def tree_of(process: psutil.Process) -> list[psutil.Process]:
    """Return a process and all that it has started, but for this one; none if it has ended."""
    with suppress(psutil.Error):
        found = [process, *process.children(recursive=True)]
        return [one for one in found if one.pid != os.getpid()]
    return []


def pause(rank: psutil.Process) -> list[psutil.Process]:
    """Stop a rank and all that it has started; return them. Looks again, in case one of them was
    just starting another."""
    stopped: list[psutil.Process] = []
    while new := [one for one in tree_of(rank) if one not in stopped]:
        send_signal(new, signal.SIGSTOP)
        stopped += new
    return stopped


def send_signal(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    """Send processes a signal; those that have ended are left out."""
    for process in processes:
        with suppress(psutil.Error):
            process.send_signal(number)
