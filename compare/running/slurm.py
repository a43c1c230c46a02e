"""Do a plan in Slurm jobs, and follow them from where they were submitted.

By turns, and where the number of blocks is open, it is one job. A fixed number of blocks of whole
runs is an array, a block a job, one after the other, so that they do not disturb each other: what
the statistics need on equal terms shares one allocation, and the next block may get other nodes.
"""

import argparse
import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from compare.evidence.run_folder import read_object
from compare.evidence.words import count
from compare.plan.blocks import seconds_left
from compare.plan.options import command_words
from compare.plan.plan import ROOT, Plan, Run
from compare.plan.record import asked_differences, plan_record
from compare.running.launch import LiveLine, Outcome, print_line, print_tail
from compare.running.measurement import block_line, is_finished, measured
from compare.running.progress import (
    another_plan,
    missing,
    new_folder,
    numbered_label,
    recorded_seconds,
    resumed,
    show_outcome,
)
from recipe.errors import UserError
from recipe.files import write_json
from recipe.flags import flag_name, without_flag

SLURM_FOLDER = "slurm"  # in the comparison's folder: the job's number, and what the jobs print
SCRIPT = "slurm/compare.sbatch"
POLL_SECONDS = 10.0  # Slurm's controller serves many
SETTLE_SECONDS = 60.0  # until a network file system shows here what was written elsewhere


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
        folder = folder_of_command(plan, options, argv)
    folder = folder or new_folder(options.runs)
    if differences := differences_there(plan, folder, options):
        raise another_plan(folder, differences)
    # Where turns were not possible the plan is of whole runs, but its words still mean turns.
    is_array = plan.measure == "runs" and plan.blocks is not None
    plan = resumed(plan, folder)
    job = queued_job(folder)
    if job is not None:
        print(f"job {job} is in the queue already, for {folder}")
    elif is_finished(plan, folder):
        print(f"nothing is missing in {folder}")
    else:
        command = sbatch_command(plan, folder, options.slurm, argv, is_array)
        if options.dry_run:
            print(f"mkdir -p {shlex.quote(str(folder / SLURM_FOLDER))}\n{shlex.join(command)}")
            return 0
        job = submit(command, folder, argv)
        print(f"submitted as job {job}, for {folder}")
    again = shlex.join(command_words(argv, folder))
    if job is not None:
        try:
            follow(job, plan, folder)
        except KeyboardInterrupt:
            print(f"\njob {job} goes on without this. To follow it again:\n    {again}")
            print(f"To end it:\n    scancel {job.partition(';')[0]}")
            return 130
    return show_ending(resumed(plan, folder), folder, again)


def folder_of_command(plan: Plan, options: argparse.Namespace, argv: list[str]) -> Path | None:
    """Return the newest comparison that this very command has submitted, if it still is of this
    plan: a plan file or the trainers may have been changed since."""
    for record in sorted(options.runs.glob(f"compare-*/{SLURM_FOLDER}/job.json"), reverse=True):
        folder = record.parent.parent
        if read_object(record).get("command") == command_words(argv, folder):
            return None if differences_there(plan, folder, options) else folder
    return None


def differences_there(plan: Plan, folder: Path, options: argparse.Namespace) -> list[str]:
    """Return in what the folder's plan is another one. The threads of a worker are worked out by
    the job, from its own cores, unless the user gave them."""
    if not (folder / "plan.json").exists():
        return []
    old, new = read_object(folder / "plan.json"), plan_record(resumed(plan, folder), "")
    if "--threads" not in map(flag_name, options.arguments_after_dashes):
        for record in (old, new):
            record["trainer_arguments"] = without_flag(record["trainer_arguments"], "--threads")
    return asked_differences(old, new)


def sbatch_command(
    plan: Plan, folder: Path, flags: str, argv: list[str], is_array: bool
) -> list[str]:
    """Return what submits the blocks that are missing; of the user's own words those that make the
    plan go on to run.py."""
    words = ["sbatch", "--parsable"]
    log = "job"
    if is_array:
        # The runs for the phases of a step come after the last block.
        waiting = missing([*plan.runs(), *plan.phase_runs()], folder)
        blocks = sorted({run.block or plan.run_blocks for run in waiting})
        words += ["--array", ",".join(map(str, blocks)) + "%1"]
        log = "block-%a"
    words += ["--output", str(folder.resolve() / SLURM_FOLDER / f"{log}.log")]
    try:
        words += shlex.split(flags)
    except ValueError as error:
        raise UserError(f"--slurm {flags!r}: {error}; give sbatch's flags") from None
    _, _, *own = command_words(argv, folder.resolve(), without=("--slurm",))
    return [*words, SCRIPT, *own]


def submit(command: list[str], folder: Path, argv: list[str]) -> str:
    """Submit the jobs and return their number."""
    (folder / SLURM_FOLDER).mkdir(parents=True, exist_ok=True)
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"Slurm refused the job:\n    {done.stderr.strip()}\n{shlex.join(command)}")
    job = done.stdout.strip()
    record = {"job": job, "command": command_words(argv, folder), "sbatch": command}
    write_json(folder / SLURM_FOLDER / "job.json", record)
    return job


def queued_job(folder: Path) -> str | None:
    """Return the number of this comparison's job if it waits or runs."""
    record = folder / SLURM_FOLDER / "job.json"
    job = read_object(record)["job"] if record.exists() else None
    return job if job is not None and job_state(job) is not None else None


def job_state(job: str) -> str | None:
    """Return how a job stands, as "running" or "waiting in the queue (Resources)"; None: it is not
    in the queue any more. `job` is a number, or "number;cluster" where there are several."""
    number, _, cluster = job.partition(";")
    words = ["squeue", "--noheader", "--jobs", number, "--format", "%T|%r"]
    words += ["--clusters", cluster] if cluster else []
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode and "Invalid job id" in done.stderr:
        return None
    if done.returncode:
        return f"squeue: {done.stderr.strip()}"  # it may be back in a moment
    tasks = [line.partition("|") for line in done.stdout.splitlines() if "|" in line]
    if not tasks:
        return None
    if any(state != "PENDING" for state, _, _ in tasks):
        return "running"
    return f"waiting in the queue ({tasks[0][2]})"


def follow(job: str, plan: Plan, folder: Path) -> None:
    """Print each run's line when it has ended, until the job has."""
    told = {run.folder: when_ended(folder, run) for run in every_run(plan, folder)}
    groups, last_state = measured(plan, folder), None
    over_at: float | None = None
    while True:
        state = job_state(job)
        runs = every_run(plan, folder)
        waiting = [run.cell for run in missing(runs, folder)]
        left = seconds_left(recorded_seconds(folder, runs), waiting)
        for run in runs:
            ended = when_ended(folder, run)
            if ended is not None and ended != told.get(run.folder):
                told[run.folder] = ended
                show_run(run, runs, plan, folder, left)
        before, groups = groups, measured(resumed(plan, folder), folder)
        if plan.measure == "turns" and (line := block_line(plan, before, groups)):
            print_line(line)
        if state is None:
            over_at = over_at or time.monotonic()
            is_settled = all(when_ended(folder, run) is not None for run in runs)
            if is_settled or time.monotonic() > over_at + SETTLE_SECONDS:
                return
        elif sys.stdout.isatty():
            show_live(state, runs, plan, folder, left)
        elif state != last_state:
            print_line(state)
        last_state = state
        time.sleep(POLL_SECONDS)


def show_run(run: Run, runs: list[Run], plan: Plan, folder: Path, left: float | None) -> None:
    """Print the line of a run that has ended."""
    with contextlib.suppress(UserError):  # it is being made anew at this moment
        outcome = read_object(folder / run.folder / "outcome.json")
        outcome.pop("ended_utc")
        place = folder / run.folder
        name, over_hosts = label(run, runs, plan), True  # the job knows its hosts, not this host
        show_outcome(name, place, Outcome(**outcome), left, over_hosts, run.block > 0)


def label(run: Run, runs: list[Run], plan: Plan) -> str:
    """Return what run.py itself would put in front of the run's line."""
    return numbered_label(run, [r for r in runs if bool(r.block) == bool(run.block)], plan)


def every_run(plan: Plan, folder: Path) -> list[Run]:
    plan = resumed(plan, folder)
    return [*plan.runs(), *plan.phase_runs()]


def when_ended(folder: Path, run: Run) -> str | None:
    """Return the time at which a run ended, well or not; None if it has not."""
    try:
        return str(json.loads((folder / run.folder / "outcome.json").read_text())["ended_utc"])
    except (OSError, ValueError, KeyError):
        return None


def show_live(state: str, runs: list[Run], plan: Plan, folder: Path, left: float | None) -> None:
    """Write the line of the run that is under way, or of the queue, over the last one."""
    for run in runs:
        place = folder / run.folder
        if when_ended(folder, run) is None and (place / "command.txt").exists():
            with contextlib.suppress(OSError):
                elapsed = time.time() - (place / "command.txt").stat().st_mtime
                LiveLine(label(run, runs, plan), place, left).show(elapsed)
                return
    LiveLine(state, folder, None).show(0.0)


def show_ending(plan: Plan, folder: Path, again: str) -> int:
    """Say what came of the plan and return the exit code."""
    runs = [*plan.runs(), *plan.phase_runs()]
    waiting = missing(runs, folder)
    is_done = is_finished(plan, folder)
    if not is_done:
        what = f"{len(waiting)} of {count(len(runs), 'run')}" if waiting else "Blocks"
        print(f"{what} are missing. What the last job printed:")
        logs = sorted((folder / SLURM_FOLDER).glob("*.log"), key=os.path.getmtime)
        if logs:
            print_tail(logs[-1])
        print(f"To try again:\n    {again}")
    print(f"report:\n    python compare/report.py {shlex.quote(str(folder))}")
    return 0 if is_done else 1
