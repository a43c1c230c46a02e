"""Run a comparison: the same training under both engines, in blocks, as often as the plan says.

    python compare/run.py                     the embedded digits, DDP and Horovod, 1 and 2 workers
    python compare/run.py wire-format         a ready plan; --list-plans shows them all
    python compare/run.py my-plan.toml --workers 4 --blocks 5
    python compare/run.py --workers 2 --configurations ddp-torchrun horovod-mpi horovod-gloo
    python compare/run.py scaling --slurm='--nodes 2 --ntasks-per-node 4 --gpus-per-node 4'
    python compare/run.py --tune knobs.toml --workers 2 -- --data synthetic --arch resnet50
    python compare/run.py -- --data /data/imagenet --arch resnet50 --epochs 1

Everything after `--` goes to both trainers unchanged; `-- --help` shows their flags. The same
command, given again after Ctrl-C, a crash or a reboot, goes on where the comparison stopped.
"""

import argparse
import contextlib
import fcntl
import os
import secrets
import shlex
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from compare.errors import UserError, run_main
from compare.plan.blocks import seconds_left
from compare.plan.environment import shell_lines
from compare.plan.options import check_trainers, command_words, make_plan, parse_options
from compare.plan.plan import Plan, Run
from compare.plan.plan_file import check_plan, list_plans
from compare.plan.record import end_of, plan_differences, plan_record
from compare.plan.sources import trainers_sha256
from compare.plan.ssh import check_logins
from compare.running import preflight
from compare.running.launch import duration, print_line, start_and_wait, utc_now
from compare.running.progress import (
    another_plan,
    interval_widths,
    is_finished,
    missing,
    new_folder,
    number_of,
    numbered_label,
    reach,
    read_json,
    recorded_seconds,
    resumed,
    run_label,
    show_outcome,
    wants_block,
)
from compare.running.slurm import SLURM_FOLDER, submit_and_follow
from compare.running.tools import NO_HOROVOD, check_tools, has_horovod
from compare.running.tune import dry_tune_lines, tune, tune_folder, tuning_plan
from recipe.files import write_json

WARM_UP_STEPS = 5  # steps after which a warm-up has touched all that it should


def main(argv: list[str] | None = None) -> int:
    """Run what the command line asks for and return the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    stopped = "stopped before the first run"
    return run_main("compare/run.py", lambda: answer(argv), interrupted=stopped)


def answer(argv: list[str]) -> int:
    options = parse_options(argv, __doc__ or "")
    if options.list_plans:
        print(list_plans())
        return 0
    plan = leave_out_horovod(make_plan(options), options)
    if options.tune is not None:
        plan = tuning_plan(plan, options)
    check_trainers(plan)
    check_tools(plan)
    if options.slurm is not None:
        return submit_and_follow(plan, options, argv)
    if options.dry_run:
        if options.tune is not None:
            lines = dry_tune_lines(plan, options.rounds)
        else:
            folder = options.out or new_folder(options.runs)
            lines = dry_run_lines(plan, folder, options.warm_up, options.block)
        with contextlib.suppress(BrokenPipeError):  # `--dry-run | head` has seen enough
            print("\n".join(lines), flush=True)
        return 0
    launchers = {configuration.launcher for configuration in plan.members()}
    check_logins(max(plan.workers), plan.hosts, launchers)
    signal.signal(signal.SIGTERM, raise_interrupt)
    if options.tune is not None:
        with locked(folder := tune_folder(options)):
            return tune(plan, folder, options, argv)
    folder = options.out
    if folder is None and not options.new:
        folder = unfinished_folder(options.runs, plan)
    folder = folder or new_folder(options.runs)
    with locked(folder):
        return run_plan(plan, folder, options, argv)


def leave_out_horovod(plan: Plan, options: argparse.Namespace) -> Plan:
    """Return the plan with what can run here, and say so: without Horovod's configurations if it is
    not installed, unless nothing would be left, or the command line names configurations."""
    there = [name for name in plan.configurations if plan.known()[name].engine != "horovod"]
    gone = tuple(name for name in plan.configurations if name not in there)
    if not gone or not there or options.configurations or options.define or has_horovod():
        return plan
    print(
        f"{NO_HOROVOD}\nLeft out: {', '.join(gone)}. What follows is DDP's alone.", file=sys.stderr
    )
    pairs = tuple(pair for pair in plan.judged_pairs if set(there).issuperset(pair))
    plan = replace(plan, configurations=tuple(there), judged_pairs=pairs, left_out=gone)
    check_plan(plan)
    return plan


def unfinished_folder(runs: Path, plan: Plan) -> Path | None:
    """Return the newest comparison if it holds exactly this plan and is not complete.

    Only the newest: an older one that was left behind was left for a reason.
    """
    folders = sorted(path.parent for path in runs.glob("compare-*/plan.json"))
    if not folders:
        return None
    newest = folders[-1]
    old = read_json(newest / "plan.json")
    plan = resumed(plan, newest)
    new = plan_record(plan, "")
    if plan_differences(old, new) or end_of(old) != end_of(new):
        return None
    return None if is_finished(plan, newest) else newest


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep a second run.py out of the folder; the lock ends with this process, however it ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise UserError(
                f"{folder} is being written by process {lock.read().strip() or 'unknown'}: wait "
                "for its end, or start another comparison with --new"
            ) from None
        except OSError as error:
            print(f"warning: {folder} cannot be locked ({error.strerror}): start no second run.py")
        else:
            for left_by_a_killed_one in folder.glob(".*.partial"):
                left_by_a_killed_one.unlink()
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        try:
            yield
        finally:
            if [child.name for child in folder.iterdir()] == ["lock"]:  # refused: nothing was made
                (folder / "lock").unlink()
                folder.rmdir()


def run_plan(plan: Plan, folder: Path, options: argparse.Namespace, argv: list[str]) -> int:
    """Run what is missing of the plan in this folder and return the exit code."""
    plan = resumed(plan, folder)
    if plan.order_seed is None:
        plan = replace(plan, order_seed=secrets.randbelow(2**31))
    record = checked_record(plan, folder)
    if not is_finished(plan, folder):
        record["warnings"] += warn(plan, folder, options.strict, known=record["warnings"])
    write_json(folder / "plan.json", record)
    runs, phase_runs = plan.runs(), plan.phase_runs()
    sources = trainers_sha256()
    print(
        f"{number_of(runs, 'run')} in {number_of(range(plan.run_blocks), 'block')}, into {folder}"
    )
    if phase_runs:
        print(f"then {number_of(phase_runs, 'short run')} for the phases of a step")
    waiting = missing(runs, folder)
    if done := len(runs) - len(waiting):
        print(f"{done} of them are there already and are not measured again (--new starts afresh)")
    try:
        if options.warm_up and waiting and not warm_up(plan, folder):
            return 1
        failed = make_missing(runs, plan, folder, sources, options.block)
        while not failed and wants_block(plan, folder):
            print(f"{interval_line(plan, folder)}; another block")
            plan = replace(plan, blocks_there=plan.run_blocks + 1)
            write_json(folder / "plan.json", checked_record(plan, folder))
            runs = plan.runs()
            failed = make_missing(runs, plan, folder, sources)
        if plan.measure == "runs" and plan.blocks is None and plan.pairs():
            print(until_interval_ending(plan, folder, failed))
        failed_phases = []
        if options.block is None or not missing(runs, folder):  # of an array's jobs, the last
            failed_phases = make_missing(phase_runs, plan, folder, sources)
    except KeyboardInterrupt:
        done = len(runs) - len(missing(runs, folder))
        print(f"\nstopped: {done} of {len(runs)} runs are done. To go on where it stopped:")
        print(f"    {shlex.join(command_words(argv, folder))}")
        return 130
    if failed:
        print(
            f"{len(failed)} of {len(runs)} runs failed: their output is kept, and no verdict is "
            "drawn from them."
        )
    if failed_phases:
        print(
            f"{len(failed_phases)} of {len(phase_runs)} short runs for the phases failed: their "
            "output is kept, and the measured runs are not touched by it."
        )
    if failed or failed_phases:
        print(f"To try again what failed:\n    {shlex.join(command_words(argv, folder))}")
    print(f"report:\n    python compare/report.py {shlex.quote(str(folder))}")
    return 1 if failed or failed_phases else 0


def make_missing(
    runs: list[Run], plan: Plan, folder: Path, sources: str, block: int | None = None
) -> list[Run]:
    """Start those of the runs that are not complete, one after the other; return which failed.

    `sources` is the digest of the trainers when the comparison began; `block` names the only block
    that is wanted.
    """
    waiting, failed = [r for r in missing(runs, folder) if block in (None, r.block)], []
    cells = [run.cell for run in waiting]
    durations = recorded_seconds(folder, runs)
    for index, run in enumerate(waiting):
        if trainers_sha256() != sources:
            raise UserError(
                "the sources of the recipe or the trainers were changed while the comparison "
                "was running: the runs would not be of one training. Put them back and go on, "
                "or start another with --new"
            )
        label = numbered_label(run, runs, plan)
        left = seconds_left(durations, cells[index:])
        outcome = start_and_wait(run, folder, plan.timeout, label, seconds_left=left)
        durations.append((run.cell, outcome.seconds))
        left = seconds_left(durations, cells[index + 1 :])
        # A speed that is in part one without communication would mislead.
        over_hosts, with_speed = run.leaves_this_host, run.block > 0
        show_outcome(label, folder / run.folder, outcome, left, over_hosts, with_speed)
        if outcome.status != "completed":
            failed.append(run)
    return failed


def warn(plan: Plan, folder: Path, strict: bool, known: list[str]) -> list[str]:
    """Print what would make the result worthless and return what of it is not known yet."""
    warnings = preflight.find_warnings(plan, folder)
    if strict and warnings:
        lines = "\n".join(f"    {line}" for line in warnings)
        raise UserError(f"not started (--strict), because of\n{lines}")
    for line in warnings:
        print(f"warning: {line}")
    return [line for line in warnings if line not in known]


def interval_line(plan: Plan, folder: Path) -> str:
    estimate, name = interval_widths(plan, folder)[0]
    width = f"+-{100 * reach(estimate):.1f} %"
    return f"after {plan.run_blocks} blocks the widest interval is {width} ({name})"


def until_interval_ending(plan: Plan, folder: Path, failed: list[Run]) -> str:
    """Say why no further block follows."""
    asked = f"+-{100 * plan.until_interval:g} %"
    if failed:
        return f"no further blocks for an interval of {asked}: a run failed"
    line = interval_line(plan, folder)
    if reach(interval_widths(plan, folder)[0][0]) <= plan.until_interval:
        return f"{line}: no wider than the {asked} that were asked for"
    return f"{line}: wider than {asked}, but another would pass the {plan.minutes:g} minutes"


def raise_interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def checked_record(plan: Plan, folder: Path) -> dict[str, Any]:
    """Return what plan.json is to hold, after a check that the folder's own plan is this one, with
    no more blocks; date and warnings are those of the start."""
    path = folder / "plan.json"
    record = plan_record(plan, utc_now())
    if path.exists():
        old = read_json(path)
        differences = plan_differences(old, record)
        there = max((run["block"] for run in old.get("runs", [])), default=0)
        if plan.measure == "runs" and there > plan.run_blocks:
            differences.append(f"blocks: {there} there, {plan.run_blocks} now")
        if differences:
            raise another_plan(folder, differences)
        record["created_utc"] = old["created_utc"]
        record["warnings"] = old["warnings"]
        record["extensions"] = old.get("extensions", [])
        if end_of(old) != end_of(record):
            names = ("blocks", "until_interval", "minutes")
            asked = {name: record[name] for name in names}
            record["extensions"] += [{"created_utc": utc_now(), **asked}]
    elif any(child.name not in ("lock", SLURM_FOLDER) for child in folder.iterdir()):
        raise UserError(
            f"{folder} is not empty and holds no plan.json: it is no comparison; take another "
            "--out DIR"
        )
    return record


def dry_run_lines(
    plan: Plan, folder: Path, with_warm_up: bool, block: int | None = None
) -> list[str]:
    """Return shell lines that do what run.py does; they can be pasted as they are."""
    lines = shell_lines()
    for run in plan.warm_up_runs() if with_warm_up else []:
        lines.append(shlex.join(run.command((folder / "warm-up" / run.cell).parent)))
    runs = [run for run in plan.runs() if block in (None, run.block)]
    for run in [*runs, *(plan.phase_runs() if block in (None, plan.run_blocks) else [])]:
        lines.append(shlex.join(run.command((folder / run.folder).parent)))
    return lines


def warm_up(plan: Plan, folder: Path) -> bool:
    """Start each engine for a few steps; return False, and say why, if one cannot train."""
    for run in plan.warm_up_runs():
        target = folder / "warm-up" / run.cell
        label = f"warm-up  {run_label(run, plan)}"
        outcome = start_and_wait(
            run,
            folder,
            plan.warm_up_timeout,
            label,
            log_dir=target.parent,
            end_after_steps=WARM_UP_STEPS,
        )
        if outcome.status != "completed":
            show_outcome(label, target, outcome, None, run.leaves_this_host)
            print("nothing was measured: what fails in the warm-up fails in every run")
            return False
        print_line(f"{label}   {duration(outcome.seconds)}, thrown away")
    return True


if __name__ == "__main__":
    sys.exit(main())
