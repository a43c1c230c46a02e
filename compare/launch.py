"""Start one run, wait for its end, and leave no process of it behind.

Started as a script, with a run's mark, it is the run's watchdog: see `start_watchdog`.
"""

import contextlib
import datetime
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from compare.plan import Run, run_environment

GRACE_SECONDS = 10.0  # between asking a run to end and killing it
RUN_MARK = "COMPARE_RUN"  # variable that every process of a run inherits


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    status: str  # "completed", "failed", "timed out"
    exit_code: int | None
    seconds: float
    leftover_processes: int  # that the launcher left behind, and that were killed


def start_and_wait(
    run: Run,
    comparison: Path,
    trainer_arguments: tuple[str, ...],
    timeout: float,
    label: str,
    log_dir: Path | None = None,
    end_after_steps: int | None = None,
) -> Outcome:
    """Start one run in a clean folder, wait for its end and write how it ended."""
    log_dir = log_dir or (comparison / run.folder).parent
    folder = log_dir / run.name
    clear_folder(folder, keep_failure=end_after_steps is None)
    command = run.command(log_dir, trainer_arguments)
    (folder / "command.txt").write_text(shlex.join(command) + "\n")
    mark = f"{os.getpid()}-{time.time_ns()}"
    environment = run_environment() | {RUN_MARK: mark}
    began = time.monotonic()
    with (folder / "output.log").open("wb") as log, start_watchdog(mark):
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            status = wait(process, folder, began + timeout, label, end_after_steps)
        finally:
            # Also after a normal end: what a launcher leaves behind would slow the next run.
            left = end_processes(process, mark)
    seconds = time.monotonic() - began
    exit_code = process.returncode
    if status == "ended" and exit_code == 0 and (folder / "summary.json").exists():
        status = "completed"
    elif status == "ended":
        status = "failed"
    if status == "warm":
        status = "completed"
    outcome = Outcome(status, exit_code, round(seconds, 3), left)
    write_json(folder / "outcome.json", {**vars(outcome), "ended_utc": utc_now()})
    return outcome


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
        attempt = 1
        while (aside := folder.with_name(f"{folder.name}.failed-{attempt}")).exists():
            attempt += 1
        folder.rename(aside)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def wait(
    process: subprocess.Popen[bytes],
    folder: Path,
    deadline: float,
    label: str,
    end_after_steps: int | None,
) -> str:
    """Wait for the launcher's end, the deadline, or the steps that a warm-up is to make."""
    began = time.monotonic()
    while process.poll() is None:
        now = time.monotonic()
        if now > deadline:
            return "timed out"
        if end_after_steps and count_steps(folder / "metrics.jsonl") >= end_after_steps:
            return "warm"
        if sys.stdout.isatty():
            print(f"\r{label}   running for {now - began:.0f} s", end="\033[K", flush=True)
        time.sleep(0.1)
    return "ended"


def count_steps(metrics: Path) -> int:
    if not metrics.exists():
        return 0
    return sum('"kind": "step"' in line or '"kind":"step"' in line for line in metrics.open())


def end_processes(process: subprocess.Popen[bytes], mark: str) -> int:
    """End every process of a run; return how many the launcher had left behind.

    The launcher's group is not enough: horovodrun on Gloo puts each worker into a session of its
    own. So whatever carries the run's mark in its environment is found and killed as well.
    """
    interrupts = (signal.SIGINT, signal.SIGTERM)
    handlers = [signal.signal(number, signal.SIG_IGN) for number in interrupts]
    try:
        if process.poll() is None:
            signal_group(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)
        # A launcher that has just ended may have workers that are about to.
        _, alive = psutil.wait_procs(marked_processes(mark), timeout=1.0)
        signal_group(process.pid, signal.SIGKILL)
        process.wait()
        kill_marked(mark)
        return len(alive)
    finally:
        for number, handler in zip(interrupts, handlers, strict=True):
            signal.signal(number, handler)


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


def signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def marked_processes(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(RUN_MARK) == mark:
                found.append(process)
    return found


def utc_now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a file so that it is there whole or not at all, whatever happens."""
    draft = path.with_name(f"{path.name}.draft")
    draft.write_text(json.dumps(value, indent=2) + "\n")
    draft.replace(path)


if __name__ == "__main__":
    watch(sys.argv[1], float(sys.argv[2]))
