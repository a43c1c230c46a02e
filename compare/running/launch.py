"""Start runs, wait for their end, and leave none of their processes behind.

Run as a script, with a run's mark, this file is the run's watchdog: see `Launches`.
"""

import contextlib
import datetime
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import psutil

from compare.for_scripts.comparison_side import busy_cpu_seconds
from compare.plan.blocks import FORK_SERVERS, RUN_MARK
from compare.plan.environment import path_from_here, run_environment, shell_line
from compare.plan.launchers import has_daemons, pass_on
from compare.plan.plan import Outcome, Run, Status
from recipe.errors import UserError
from recipe.record.schema import rate_text
from recipe.settings.variables import RANK_START

FORKED_RANK = "compare/running/forked_rank.py"
GRACE_SECONDS = 10.0  # between asking a run to end and killing it
POLL_SECONDS = 0.5  # between two checks of a run, and updates of its line on a terminal
TAIL_BYTES = 8192  # read from the end of metrics.jsonl; its last step line is shorter
TAIL_LINES = 20  # shown of a failed run's output
TAIL_INDENT = " " * 8
# An error of recipe/errors.py or of Python, perhaps after the prefix of a rank, of horovodrun or of
# torchrun; one of the interpreter, which has not found its script; or one of ssh.
CAUSE = re.compile(
    r"(\[[^]]*\](<stderr>:|:? ))*(error|[\w.]*(Error|Exception)): |"
    r"\S+: (can't open file '|No module named )|ssh: |Host key |"
    r".*Permission denied \("
)


def start_and_wait(
    run: Run,
    comparison: Path,
    timeout: float,
    label: str,
    end_after_steps: int | None = None,
    fork_servers: str = "",
) -> Outcome:
    """Start one run in a clean folder, wait for its end and return how it ended. None of its
    processes is left behind, whatever happens. Its ranks are forks of the servers of this name, if
    there is one.

    It is "completed" if it exits with 0 and has written its summary, or after `end_after_steps`
    steps (a warm-up); else "timed out" or "failed".
    """
    folder = comparison / run.folder
    clear_folder(folder)
    status: Status | None = None
    busy, before = busy_cpu_seconds(), own_cpu_seconds(fork_servers)
    through, variables = forking(run, fork_servers, default="fork")
    command = run.command(folder.parent, through=through)
    if run.leaves_this_host:
        command = pass_on(command, variables)
    began = time.monotonic()
    with Launches() as launches:
        launcher = launches.launch(command, folder, variables)
        while launcher.poll() is None and not status:
            elapsed = time.monotonic() - began
            step = last_step(folder / "metrics.jsonl")
            show_progress(label, step, elapsed)
            if elapsed > timeout:
                status = "timed out"
            elif end_after_steps and step["step"] >= end_after_steps:
                status = "completed"
            launches.wait(POLL_SECONDS)
        left = launches.end()
    seconds = time.monotonic() - began
    after = own_cpu_seconds(fork_servers)
    own = sum(now - before.get(process, 0) for process, now in after.items())
    others = busy_cpu_seconds() - busy - own
    # The CPU time of killed processes is not known: they are not waited for.
    is_counted = not has_daemons(run.configuration) and not status and left == 0
    is_good = launcher.returncode == 0 and (folder / "summary.json").exists()
    return Outcome(
        status or ("completed" if is_good else "failed"),
        launcher.returncode,
        round(max(0.0, others) / seconds, 3) if is_counted else None,
        round(seconds, 3),
        left,
    )


def show_progress(label: str, step: dict[str, Any], elapsed: float) -> None:
    """Show the last step of a run, and for how long it has been running."""
    speed = step.get("images_per_second")
    at = f"step {step['step']:,}   {rate_text(speed)} images/s" if speed else ""
    print_live([label, at, f"running {duration(elapsed)}"])


def forking(run: Run, fork_servers: str, default: str) -> tuple[list[str], dict[str, str]]:
    """Return the script through which a trainer is started for its ranks to be forks of the servers
    of this name, and the variables that the ranks need; neither if RANK_START (`default` where it
    is not set) is "exec"."""
    start = run.configuration.environment.get(RANK_START, os.environ.get(RANK_START, default))
    if start not in ("exec", "fork"):
        raise UserError(f"{RANK_START}={start}: set it to exec or fork, or unset it")
    if start == "exec" or not fork_servers:
        return [], {}
    return [path_from_here(FORKED_RANK)], {FORK_SERVERS: fork_servers, RANK_START: "fork"}


class Launches:
    """Commands that run at the same time. Used as a context, it leaves none of their processes.

    All their processes have a mark in their environment, and every process with the mark is ended.
    (The launchers' process groups are not enough: horovodrun on Gloo puts each worker into a
    session of its own.) If this process dies, even by `kill -9`, a watchdog ends them: it waits for
    the end of its standard input, which the kernel then closes.
    """

    def __init__(self) -> None:
        self.mark = f"{os.getpid()}-{time.time_ns()}"
        self.launchers: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Launches":
        self.watchdog = subprocess.Popen(
            [sys.executable, __file__, self.mark, str(GRACE_SECONDS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()
        self.watchdog.communicate()

    def launch(
        self,
        command: list[str],
        folder: Path,
        variables: Mapping[str, str],
    ) -> subprocess.Popen[bytes]:
        """Start a command in a session of its own; write its words and its output to `folder`."""
        (folder / "command.txt").write_bytes(os.fsencode(shell_line(command) + "\n"))
        with (folder / "output.log").open("wb") as log:
            launcher = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**run_environment(), RUN_MARK: self.mark, **variables},
                start_new_session=True,
            )
        self.launchers.append(launcher)
        return launcher

    def wait(self, seconds: float) -> None:
        """Wait until all launchers have ended, but at most `seconds`."""
        deadline = time.monotonic() + seconds
        for launcher in self.launchers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.wait(max(0.0, deadline - time.monotonic()))

    def end(self) -> int:
        """End every process; return the number of processes that the launchers left behind. Needed
        after a normal end, too: a process that is left would slow the next run."""
        for launcher in self.launchers:
            if launcher.poll() is None:
                os.killpg(launcher.pid, signal.SIGTERM)
        self.wait(GRACE_SECONDS)
        # Workers of a launcher that has just ended may be about to end.
        _, alive = psutil.wait_procs(marked_processes(self.mark, RUN_MARK), timeout=1.0)
        kill_marked(self.mark)
        self.wait(GRACE_SECONDS)
        return len(alive)


def kill_marked(mark: str) -> None:
    """Kill all marked processes, repeatedly: one may start another while the rest are killed.

    Not for ever: a process that waits for a broken disk cannot be killed.
    """
    for _ in range(10):
        processes = marked_processes(mark)
        if not processes:
            return
        send_signal(processes, signal.SIGKILL)
        psutil.wait_procs(processes, timeout=1.0)


def send_signal(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    """Send a signal to processes, skipping those that have ended."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


def marked_processes(mark: str, *variables: str) -> list[psutil.Process]:
    """Return the processes that began with this value of one of these variables, and their forks.
    By default they are RUN_MARK, which a fork server and its forks lack, and FORK_SERVERS."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if mark in map(process.environ().get, variables or (RUN_MARK, FORK_SERVERS)):
                found.append(process)
    return found


def own_cpu_seconds(fork_servers: str) -> dict[psutil.Process, float]:
    """Return the CPU time, in s, of this process and of each fork server of this name, with all
    their descendants that have ended and were waited for. A launcher that ends normally has waited
    for its workers."""
    servers = marked_processes(fork_servers, FORK_SERVERS) if fork_servers else []
    seconds = dict[psutil.Process, float]()
    for process in [psutil.Process(), *servers]:
        with contextlib.suppress(psutil.NoSuchProcess):
            seconds[process] = sum(process.cpu_times()[:4])  # user, system, and both of children
    return seconds


def watch(mark: str, grace_seconds: float) -> None:
    """Be the watchdog: wait for the end of the input, then end all marked processes."""
    sys.stdin.buffer.read()
    send_signal(marked_processes(mark, RUN_MARK), signal.SIGTERM)
    psutil.wait_procs(marked_processes(mark), timeout=grace_seconds)
    kill_marked(mark)


def clear_folder(folder: Path) -> None:
    """Make an empty folder; what an interrupted run has left there is deleted."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def failed_folder(folder: Path) -> Path:
    """Return the first free name to put a failed run's folder aside."""
    names = (folder.with_name(f"{folder.name}.failed-{n}") for n in itertools.count(1))
    return next(name for name in names if not name.exists())


def print_live(parts: Sequence[str]) -> None:
    """Write a line that the next one overwrites; on a terminal only."""
    if sys.stdout.isatty():
        # A line that the terminal wraps could not be overwritten.
        text = "   ".join(filter(None, parts))[: shutil.get_terminal_size().columns - 1]
        print(f"\r{text}", end="\033[K", flush=True)


def print_line(text: str) -> None:
    """Print a finished line; on a terminal it overwrites the live one."""
    print(f"\r{text}\033[K" if sys.stdout.isatty() else text, flush=True)


def shown_tail(folder: Path, indent: str = "  ", kept: Path | None = None) -> str:
    """Return the last lines of a failed run's output, and the path of all of it (in `kept`, if the
    folder will be moved there). If an error of a rank or of ssh comes before these lines, it is
    put first."""
    lines = (folder / "output.log").read_text(errors="replace").splitlines()
    earlier, cause = lines[:-TAIL_LINES], list[str]()
    for at, line in enumerate(earlier):
        if CAUSE.match(line):  # an error's further lines are indented
            rest = takewhile(lambda line: line.startswith("  "), earlier[at + 1 :])
            cause = [line, *rest, "..."]
            break
    shown = [*cause, *lines[-TAIL_LINES:]]
    marked = [f"{indent}| {line}" for line in shown]
    return "\n".join([*marked, f"{indent}all of it: {kept or folder}/output.log"])


def last_step(metrics: Path) -> dict[str, Any]:
    """Return the last step line of a metrics.jsonl; {"step": 0} if there is none yet. Only the end
    of the file is read, since it may be long."""
    steps = [b'{"step": 0}']
    with contextlib.suppress(OSError), metrics.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        # The last line may be half written, and the first one is cut off.
        steps += re.findall(rb'^{"kind": "step".*}$', file.read(), re.MULTILINE)
    return dict(json.loads(steps[-1]))


def duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def utc_now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def utc_stamp() -> str:
    """Return the UTC time for a folder's name: 20260131-120000. Such names sort by age."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%d-%H%M%S")


if __name__ == "__main__":
    watch(sys.argv[1], float(sys.argv[2]))
