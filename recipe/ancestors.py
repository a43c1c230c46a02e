"""Which launcher has started this process, as its ancestors' command lines show."""

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from recipe.command import UNREAD_S, prepare_output
from recipe.errors import fail
from recipe.fork_server import FORKED
from recipe.world import LAUNCHERS, World, half_a_place, read_worlds

PROGRAMS = {program for launcher in LAUNCHERS.values() for program in launcher.programs}


def own_world() -> World:
    """Make output safe, and return this process's place in the job.

    Ends the process with one message if the launcher's variables contradict each other, are not
    complete, or are left over from another job: ranks would train alone, each as a copy of the
    others.
    """
    prepare_output(UNREAD_S)
    world, *others = read_worlds()
    if not others and (problem := half_a_place()):
        fail(world, f"error: {problem}", exit_code=2)
    if not world.is_possible:
        problem = "these do not describe a rank of a job; unset or correct them"
        fail(others[0], f"error: {world.variables()}: {problem}", exit_code=2)
    rightful = rightful_world([world, *others], ancestors().values())
    if rightful is not world:
        problem = (
            f"left over from another job, since {rightful.launcher} started this process as rank "
            f"{rightful.rank} of {rightful.size}; unset them"
        )
        fail(rightful, f"error: {world.variables()}: {problem}", exit_code=2)
    return world


def rightful_world(worlds: Sequence[World], above: Iterable[Sequence[str]]) -> World:
    """Return this process's true place: the first of `worlds`, unless its variables are left over
    from another job. `above`: the command lines of the process's ancestors, the parent's first.

    The innermost launcher among the ancestors decides. Another launcher's variables are left over
    if they describe a smaller world; or, if the parent itself is a launcher, another place. (If a
    shell or another program is in between, it may have started more ranks, and they may be right.)
    If no launcher is visible, as in a container, the largest world decides.
    """
    first = worlds[0]
    rightful, is_by_parent = [max(worlds, key=lambda world: world.size)], False
    for distance, words in enumerate(above):
        program = launcher_program(words)
        started_by_it = [world for world in worlds if program in world.started_by.programs]
        if started_by_it:
            rightful, is_by_parent = started_by_it, distance == 0
            break
    if first in rightful:
        return first
    innermost = rightful[0]
    differs = (first.rank, first.size) != (innermost.rank, innermost.size)
    is_left_over = first.size < innermost.size or (is_by_parent and differs)
    return innermost if is_left_over else first


def launcher_program(words: Sequence[str]) -> str:
    """Return the launcher program in a process's command line; "" if there is none.

    The process may itself be an interpreter, `timeout` or a shell that waits for the launcher
    (horovodrun over MPI becomes `sh -c 'mpirun ...'`). A shell that starts a launcher in its
    background does not count, since it may end first.
    """
    first, rest = words[:1], list(words[1:])
    if first and os.path.basename(first[0]).startswith("python"):
        while rest and rest[0].startswith("-"):  # up to the script or module
            del rest[: 2 if rest[0] in ("-X", "-W") else 1]
    called = (word for word in [*first, *rest][:3] if word.split() and "&" not in word)
    names = (os.path.basename(word.split()[0]).rstrip(":") for word in called)
    return next((name for name in names if name in PROGRAMS), "")


def launchers_of(world: World) -> dict[int, str]:
    """Return the processes that this rank must not outlive, with their start times: its ancestors
    up to the outermost launcher. Empty if no launcher started this rank: it may outlive nohup, tmux
    or a shell."""
    above = ancestors() if world.launcher != "none" else {}
    places = [place for place, words in enumerate(above.values(), 1) if launcher_program(words)]
    times = {pid: start_time(pid) for pid in list(above)[: max(places, default=0)]}
    return {pid: time for pid, time in times.items() if time is not None}


def nearest_launcher(world: World) -> psutil.Process:
    """Return the process that starts this rank, and restarts it after a loss; this process itself
    if there is none."""
    own, above = psutil.Process(), ancestors() if world.launcher != "none" else {}
    launchers = [pid for pid, words in above.items() if launcher_program(words)]
    # Horovod's elastic driver may be on another host. The process that it has started here also
    # stays, and starts processes with its own arguments (horovod_train/elastic.py).
    if world.launcher == "horovodrun":
        launchers += [pid for pid, words in [*above.items()][:1] if words[1:] == own.cmdline()[1:]]
    with suppress(IndexError, psutil.Error):  # there is none, or it has just ended
        return psutil.Process(launchers[0])
    return own


def ancestors() -> dict[int, list[str]]:
    """Return the command lines of this process's ancestors by process ID, the parent first, as far
    as they can be read."""
    commands: dict[int, list[str]] = {}
    with suppress(psutil.Error):  # another user's process may be hidden
        process = started_by(psutil.Process())
        while process is not None:
            commands[process.pid] = process.as_dict(["cmdline"], [])["cmdline"]
            process = started_by(process)
    return commands


def started_by(process: psutil.Process) -> psutil.Process | None:
    """Return a process's parent; of a fork of a server, the parent of the process that asked."""
    fork, asker = map(int, os.environ.get(FORKED, "0 0").split())
    return psutil.Process(asker if process.pid == fork else process.pid).parent()


def start_time(pid: int, before: str | None = None) -> str | None:
    """Return a process's start time in ticks since boot, which no change of the clock affects; None
    if it has ended, and `before` if it cannot be read."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    except OSError:  # such as: this process has no file descriptor left
        return before
    return None if state in "ZX" else fields[18]
