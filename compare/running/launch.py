"""Start one run, wait for its end, and leave no process of it behind.

Started as a script, with a run's mark, it is the run's watchdog: see `start_watchdog`.
"""

import contextlib
import datetime
import json
import math
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from compare.plan.environment import RUN_MARK, run_environment
from compare.plan.plan import Run
from recipe.files import write_json

GRACE_SECONDS = 10.0  # between asking a run to end and killing it
POLL_SECONDS = 0.5  # between two looks at a run, and updates of its line on a terminal
# Until it is asked whether workers on several hosts reach each other. It is no limit: a first
# listing of the data may take longer.
MEETING_SECONDS = 300.0
REACH_QUESTION = (
    "do its workers reach each other? `python compare/doctor.py --hosts ...` tests the networks"
)
TAIL_BYTES = 8192  # of metrics.jsonl: more than its last step line takes
TAIL_LINES = 20  # of a failed run's output that are shown
TAIL_INDENT = " " * 8
# What recipe/errors.py prints, behind the mark of a rank or of horovodrun if there is one.
TRAINERS_ERROR = re.compile(r"(\[[^]]*\](<stderr>:| ))*error: ")


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    status: str  # "completed", "failed", "timed out"
    exit_code: int | None
    seconds: float
    leftover_processes: int  # that the launcher left behind, and that were killed
    other_load: float | None  # mean number of cores that others kept busy; None: not known


def start_and_wait(
    run: Run,
    comparison: Path,
    timeout: float,
    label: str,
    log_dir: Path | None = None,
    end_after_steps: int | None = None,
    seconds_left: float | None = None,
) -> Outcome:
    """Start one run in a clean folder, wait for its end and write how it ended.

    `seconds_left`, if known, is what this run and those after it will take: shown on a terminal.
    """
    log_dir = log_dir or (comparison / run.folder).parent
    folder = log_dir / run.name
    clear_folder(folder, keep_failure=end_after_steps is None)
    meeting = MEETING_SECONDS if run.leaves_this_host else math.inf
    line = LiveLine(label, folder, seconds_left, timeout, end_after_steps, meeting)
    is_counted = not run.configuration.has_daemons
    outcome = start_command(run.command(log_dir), folder, timeout, line.show, is_counted)
    if outcome.status == "ended":
        is_good = outcome.exit_code == 0 and (folder / "summary.json").exists()
        outcome = replace(outcome, status="completed" if is_good else "failed")
    write_outcome(folder, outcome)
    return outcome


def start_command(
    command: list[str],
    folder: Path,
    timeout: float,
    look: Callable[[float], str] = lambda elapsed: "",
    counts_load: bool = True,
) -> Outcome:
    """Start a command, its output in `folder`, and leave no process of it, whatever happens.

    The outcome's status is "ended" if it ends on its own, "timed out", or what `look` returns once
    that is not empty: it is called again and again, with the seconds so far.
    """
    mark, status = new_mark(), ""
    busy, own = busy_cpu_seconds(), own_cpu_seconds()
    began = time.monotonic()
    with start_watchdog(mark):
        process = start_process(command, folder, mark)
        try:
            while not status:
                elapsed = time.monotonic() - began
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_SECONDS)
                    status = "ended"
                status = status or ("timed out" if elapsed > timeout else look(elapsed))
        finally:
            # Also after a normal end: what a launcher leaves behind would slow the next run.
            left = end_processes(process, mark)
    seconds = time.monotonic() - began
    busy, own = busy_cpu_seconds() - busy, own_cpu_seconds() - own
    # What was killed is not among the children that were waited for.
    is_counted = counts_load and status == "ended" and left == 0
    other_load = round(max(0.0, busy - own) / seconds, 3) if is_counted else None
    return Outcome(status, process.returncode, round(seconds, 3), left, other_load)


def new_mark() -> str:
    """Return what all processes of a run bear in their environment, and no others."""
    return f"{os.getpid()}-{time.time_ns()}"


def start_process(
    command: list[str],
    folder: Path,
    mark: str,
    variables: Mapping[str, str] | None = None,
    directory: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Start a command, in a session of its own, with its words and its output in `folder`."""
    (folder / "command.txt").write_text(shlex.join(command) + "\n")
    with (folder / "output.log").open("wb") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**run_environment(), RUN_MARK: mark, **(variables or {})},
            cwd=directory,
            start_new_session=True,
        )


def write_outcome(folder: Path, outcome: Outcome) -> None:
    write_json(folder / "outcome.json", {**vars(outcome), "ended_utc": utc_now()})


def busy_cpu_seconds() -> float:
    """Return for how long, in seconds times cores, this machine has been busy since it started.

    Time that a hypervisor gave to other guests ("steal") counts: those cores were not ours. So does
    that of guests of this machine, once: Linux has it in `user`.
    """
    times = psutil.cpu_times()
    names = ("user", "nice", "system", "irq", "softirq", "steal")
    return sum(float(getattr(times, name, 0.0)) for name in names)


def own_cpu_seconds() -> float:
    """Return the CPU time of this process and of all descendants that have ended and were waited
    for: a launcher that ends in order has waited for its workers."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def start_watchdog(mark: str) -> subprocess.Popen[bytes]:
    """Start a process that ends the run when run.py is gone, were it by `kill -9`.

    It waits for the end of its input, which the kernel closes when run.py ends in whatever way.
    (A death signal to the launcher alone is not enough: horovodrun turns into a shell that has
    mpirun as its child, and mpirun would go on.)
    """
    return subprocess.Popen(
        [sys.executable, __file__, mark, str(GRACE_SECONDS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def watch(mark: str, grace_seconds: float) -> None:
    """Wait for the end of the input, then end whatever is left of the run."""
    sys.stdin.buffer.read()
    processes = marked_processes(mark)
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    psutil.wait_procs(processes, timeout=grace_seconds)
    kill_marked(mark)


def clear_folder(folder: Path, keep_failure: bool) -> None:
    """Make an empty folder; what an interruption left is deleted, what failed is put aside."""
    if keep_failure and (folder / "outcome.json").exists():
        folder.rename(failed_folder(folder))
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def failed_folder(folder: Path) -> Path:
    """Return where what failed in this folder is put aside."""
    attempt = 1
    while (aside := folder.with_name(f"{folder.name}.failed-{attempt}")).exists():
        attempt += 1
    return aside


@dataclass
class LiveLine:
    """The line of a run that is under way, on a terminal only."""

    label: str
    folder: Path
    seconds_left: float | None  # when the run begins
    timeout: float = math.inf
    end_after_steps: int | None = None  # of a warm-up
    meeting: float = math.inf  # seconds after which it is asked whether the workers have met

    def show(self, elapsed: float) -> str:
        """Write the line anew; return "completed" after a warm-up's last step. Ask once if the
        workers have not met in time: that alone ends no run."""
        # Rank 0 writes environment.json when all are ready.
        if elapsed > self.meeting and not (self.folder / "environment.json").exists():
            self.meeting = math.inf
            print_line(
                f"{self.label}   not training after {duration(elapsed)}: large data take long to "
                f"open (--timeout ends it after {duration(self.timeout)}), or {REACH_QUESTION}"
            )
        step = last_step(self.folder / "metrics.jsonl") or {}
        if self.end_after_steps and step.get("step", 0) >= self.end_after_steps:
            return "completed"
        parts = [self.label]
        if step:
            parts.append(f"step {step['step']:,}")
            if speed := step.get("images_per_second"):
                parts.append(f"{speed:,.0f} images/s")
        parts.append(f"running {duration(elapsed)}")
        if self.seconds_left is not None and self.seconds_left > elapsed:
            parts.append(f"about {duration(self.seconds_left - elapsed)} left")
        print_live(parts)
        return ""


def print_live(parts: Sequence[str]) -> None:
    """Write a line that the next one overwrites; on a terminal only."""
    if not sys.stdout.isatty():
        return
    # A line that the terminal wraps could not be written over: what does not fit is left out.
    width = shutil.get_terminal_size().columns - 1
    text = parts[0][:width]
    for part in parts[1:]:
        if part and len(text) + 3 + len(part) <= width:
            text += f"   {part}"
    print(f"\r{text}", end="\033[K", flush=True)


def print_line(text: str) -> None:
    """Print a finished line, over the running one on a terminal."""
    print(f"\r{text}\033[K" if sys.stdout.isatty() else text, flush=True)


def shown_tail(folder: Path, indent: str = "  ") -> str:
    """Return the last lines of a failed run's output; first what a trainer said, if its launcher
    has said more than that since."""
    lines = (folder / "output.log").read_text(errors="replace").splitlines()
    said = [line for line in lines[:-TAIL_LINES] if TRAINERS_ERROR.match(line)]
    shown = [*said[:1], *["..."][: len(said)], *lines[-TAIL_LINES:]]
    return "\n".join(f"{indent}| {line}" for line in shown)


def print_tail(log: Path) -> None:
    """Print the end of a failed run's output, and where all of it is."""
    print(f"{shown_tail(log.parent, TAIL_INDENT)}\n{TAIL_INDENT}all of it: {log}", flush=True)


def last_step(metrics: Path) -> dict[str, Any] | None:
    """Return the last step line of a metrics.jsonl, by reading its end alone: it may be long."""
    with contextlib.suppress(OSError), metrics.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        for line in reversed(file.read().splitlines()):
            with contextlib.suppress(ValueError):  # it is being written, or cut off in front
                record = json.loads(line)
                if isinstance(record, dict) and record.get("kind") == "step":
                    return record
    return None


def duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def end_processes(process: subprocess.Popen[bytes], mark: str) -> int:
    """End every process of a run; return how many the launcher had left behind.

    The launcher's group is not enough: horovodrun on Gloo puts each worker into a session of its
    own. So whatever carries the run's mark in its environment is found and killed as well.
    """
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
    # A launcher that has just ended may have workers that are about to.
    _, alive = psutil.wait_procs(marked_processes(mark), timeout=1.0)
    kill_marked(mark)
    process.wait()
    return len(alive)


def kill_marked(mark: str) -> None:
    """Kill until none is left: one may be started while the others are killed.

    Not for ever: a process that waits for a broken disk cannot be killed.
    """
    for _ in range(10):
        processes = marked_processes(mark)
        if not processes:
            return
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(processes, timeout=1.0)


def marked_processes(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(RUN_MARK) == mark:
                found.append(process)
    return found


def utc_now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def utc_stamp() -> str:
    """Return the time as a part of a folder's name: 20260131-120000. Such names sort by age."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%d-%H%M%S")


if __name__ == "__main__":
    watch(sys.argv[1], float(sys.argv[2]))
