"""Do a plan in Slurm jobs, a block each, and follow them from where they were submitted.

A block is what the statistics need on equal terms: its runs share one allocation, and the next
block may get other nodes. One job after the other, so that they do not disturb each other.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from compare.errors import UserError
from compare.files import write_json
from compare.launch import LiveLine, Outcome, print_line, print_tail
from compare.options import command_words
from compare.plan import ROOT, Plan, Run
from compare.progress import (
    missing,
    new_folder,
    number_of,
    numbered_label,
    read_json,
    recorded_seconds,
    seconds_left,
    show_outcome,
    with_blocks_there,
)

SLURM_FOLDER = "slurm"  # in the comparison's folder: the job's number, and what the jobs print
SCRIPT = "slurm/compare.sbatch"
POLL_SECONDS = 1.0


def submit_and_follow(plan: Plan, options: argparse.Namespace, argv: list[str]) -> int:
    """Submit what is missing of the plan, unless its jobs are in the queue already; follow them to
    their end; return the exit code."""
    for tool in ("sbatch", "squeue"):
        if shutil.which(tool) is None:
            raise UserError(
                f"--slurm needs {tool}, which is not on the PATH: start it where jobs are submitted"
            )
    if Path.cwd() != ROOT:
        raise UserError(f"--slurm: start it in the project's folder, {ROOT}, as the jobs will be")
    folder = options.out
    if folder is None and not options.new:
        folder = folder_of_command(options.runs, argv)
    folder = folder or new_folder(options.runs)
    plan = with_blocks_there(plan, folder)
    waiting = missing([*plan.runs(), *plan.phase_runs()], folder)
    command = sbatch_command(plan, waiting, folder, options.slurm, argv)
    if options.dry_run:
        print(shlex.join(command))
        return 0
    job = queued_job(folder)
    if job is not None:
        print(f"job {job} is in the queue already, for {folder}")
    elif waiting:
        job = submit(command, folder, argv)
        print(f"submitted as job {job}, for {folder}")
    else:
        print(f"nothing is missing in {folder}")
    again = shlex.join(command_words(argv, folder))
    try:
        if job is not None:
            follow(job, plan, folder)
    except KeyboardInterrupt:
        print(f"\njob {job} goes on without this. To follow it again:\n    {again}")
        print(f"To end it:\n    scancel {job}")
        return 130
    return show_ending(with_blocks_there(plan, folder), folder, again)


def folder_of_command(runs: Path, argv: list[str]) -> Path | None:
    """Return the newest comparison if this very command has submitted it."""
    records = sorted(runs.glob(f"compare-*/{SLURM_FOLDER}/job.json"))
    if not records or read_json(records[-1]).get("argv") != argv:
        return None
    return records[-1].parent.parent


def sbatch_command(
    plan: Plan, waiting: list[Run], folder: Path, flags: str, argv: list[str]
) -> list[str]:
    """Return what submits the blocks that are missing; of the user's own words those that make the
    plan go on to run.py."""
    words = ["sbatch", "--parsable"]
    log = "job"
    if plan.until_interval is None:
        # The runs for the phases of a step come after the last block.
        blocks = sorted({run.block or plan.blocks for run in waiting})
        words += ["--array", ",".join(map(str, blocks)) + "%1"]
        log = "block-%a"
    words += ["--output", str(folder.resolve() / SLURM_FOLDER / f"{log}.log"), *shlex.split(flags)]
    _, _, *own = command_words(argv, folder.resolve(), without=("--slurm",))
    return [*words, SCRIPT, *own]


def submit(command: list[str], folder: Path, argv: list[str]) -> str:
    """Submit the jobs and return their number."""
    (folder / SLURM_FOLDER).mkdir(parents=True, exist_ok=True)
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"Slurm refused the job:\n    {done.stderr.strip()}\n{shlex.join(command)}")
    job = done.stdout.strip().partition(";")[0]  # "number;cluster" where there are several
    write_json(folder / SLURM_FOLDER / "job.json", {"job": job, "command": command, "argv": argv})
    return job


def queued_job(folder: Path) -> str | None:
    """Return the number of this comparison's job if it waits or runs."""
    record = folder / SLURM_FOLDER / "job.json"
    job = read_json(record)["job"] if record.exists() else None
    return job if job is not None and job_state(job) is not None else None


def job_state(job: str) -> str | None:
    """Return how a job stands, as "running" or "waiting in the queue (Resources)"; None: it is not
    in the queue any more."""
    words = ["squeue", "--noheader", "--jobs", job, "--format", "%T|%r"]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode and "Invalid job id" in done.stderr:
        return None
    if done.returncode:
        return f"squeue: {done.stderr.strip()}"  # it may be back in a moment
    tasks = [line.partition("|") for line in done.stdout.splitlines() if line.strip()]
    if not tasks:
        return None
    if any(state != "PENDING" for state, _, _ in tasks):
        return "running"
    return f"waiting in the queue ({tasks[0][2]})"


def follow(job: str, plan: Plan, folder: Path) -> None:
    """Print each run's line when it has ended, until the job has."""
    told = {run.folder for run in every_run(plan, folder) if is_ended(folder, run)}
    last_state = None
    while True:
        state = job_state(job)  # asked first: what ended before it was answered is on the disk
        runs = every_run(plan, folder)
        measured = [run for run in runs if run.block]
        durations = recorded_seconds(folder, runs)
        left = seconds_left(durations, [run for run in runs if not is_ended(folder, run)])
        for run in runs:
            if run.folder not in told and is_ended(folder, run):
                told.add(run.folder)
                outcome = read_json(folder / run.folder / "outcome.json")
                outcome.pop("ended_utc", None)
                of = measured if run.block else [one for one in runs if not one.block]
                label = numbered_label(run, of, plan)
                place = folder / run.folder
                show_outcome(label, place, Outcome(**outcome), left, with_speed=run.block > 0)
        if state is None:
            return
        if state != last_state and not sys.stdout.isatty():
            print_line(state)
        elif sys.stdout.isatty():
            show_live(state, runs, plan, folder, left)
        last_state = state
        time.sleep(POLL_SECONDS)


def every_run(plan: Plan, folder: Path) -> list[Run]:
    plan = with_blocks_there(plan, folder)
    return [*plan.runs(), *plan.phase_runs()]


def is_ended(folder: Path, run: Run) -> bool:
    return (folder / run.folder / "outcome.json").exists()


def show_live(state: str, runs: list[Run], plan: Plan, folder: Path, left: float | None) -> None:
    """Write the line of the run that is under way, or of the queue, over the last one."""
    waiting = [run for run in runs if not is_ended(folder, run)]
    begun = [run for run in waiting if (folder / run.folder / "command.txt").exists()]
    if not begun:
        LiveLine(state, folder, None).show(0.0)
        return
    place = folder / begun[0].folder
    elapsed = time.time() - (place / "command.txt").stat().st_mtime
    LiveLine(numbered_label(begun[0], runs, plan), place, left).show(elapsed)


def show_ending(plan: Plan, folder: Path, again: str) -> int:
    """Say what came of the plan and return the exit code."""
    runs = [*plan.runs(), *plan.phase_runs()]
    waiting = missing(runs, folder)
    if waiting:
        print(f"{len(waiting)} of {number_of(runs, 'run')} are missing. What the last job printed:")
        logs = sorted((folder / SLURM_FOLDER).glob("*.log"), key=os.path.getmtime)
        if logs:
            print_tail(logs[-1])
        print(f"To try again:\n    {again}")
    print(f"report:\n    python compare/report.py {shlex.quote(str(folder))}")
    return 1 if waiting else 0
