"""Run a comparison: the same training under both engines, until it is known which is faster.

    python compare/run.py                     2 workers: the embedded digits, DDP and Horovod, each
                                              over Gloo and MPI (the plan square); on GPUs ResNet-50
                                              on synthetic images, over NCCL (square-nccl)
    python compare/run.py wire-format         a ready plan; --list-plans shows them all
    python compare/run.py my-plan.toml --workers 4 --until-interval 1% --minutes 60
    python compare/run.py --workers 2 --configurations ddp-torchrun horovod-mpi horovod-gloo
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
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from compare.evidence.paired import MIN_BLOCKS
from compare.evidence.records import newest_comparison
from compare.evidence.words import count
from compare.plan.environment import path_from_here, shell_lines
from compare.plan.hosts import check_logins
from compare.plan.options import check_trainers, command_words, make_plan, parse_options
from compare.plan.plan import Plan, percentage
from compare.plan.plan_file import list_plans
from compare.plan.plan_json import plan_differences, plan_record, read_plan, write_plan
from compare.running import checks
from compare.running.checks import GIB, check_tools, missing_for
from compare.running.comparison import (
    block_folder,
    checked_record,
    is_finished,
    make_missing,
    measure,
    measured,
    missing,
    resumed,
    run_label,
    show_outcome,
)
from compare.running.launch import duration, print_line, start_and_wait, utc_stamp
from compare.running.sides import MeasurementError
from compare.running.tune import tune, tuning_plan
from recipe.command import run_main
from recipe.errors import UserError, refuse

RUNS = Path("runs")
ON_GPUS = "square-nccl"
GIB_EACH = 9  # a side of it, on each GPU: 5 are what the backward pass needs (41 MiB an image)
WARM_UP_STEPS = 5  # steps after which a warm-up has touched all that it should


def answer(argv: list[str]) -> int:
    """Run what the command line asks for and return the exit code."""
    options = parse_options(argv, __doc__ or "")
    if options.list_plans:
        print(list_plans())
        return 0
    take_default_plan(options)
    plan = leave_out_missing(make_plan(options), options)
    if options.tune is not None:
        refuse((plan.side, "--tune: tries knobs of this project's trainers; leave --side out"))
        plan = tuning_plan(plan, options)
    if not plan.side:
        check_trainers(plan)
        check_tools(plan)
    folder = choose_folder(plan, options)
    if options.dry_run:
        print("\n".join(dry_run_lines(plan, folder, options.warm_up, options.block)))
        return 0
    if not plan.side:
        check_logins(plan.most_ranks, plan.hosts, {one.launcher for one in plan.members()})
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, signal.default_int_handler)
    with locked(folder):
        try:
            if options.tune is not None:
                checks.warn(plan, folder, options.strict)
                return tune(plan, folder, options, argv)
            return run_plan(plan, folder, options, argv)
        except KeyboardInterrupt:
            print("\nstopped: what was measured is kept. To go on where it stopped:")
            print(f"    {shlex.join(command_words(argv, folder))}")
            return 130


def choose_folder(plan: Plan, options: argparse.Namespace) -> Path:
    """Return the folder that the user names, that of the same search or unfinished comparison, or a
    new one, whose name is its date and time, so that names sort by age."""
    if options.out is not None:
        return Path(options.out)
    if options.tune is not None:  # the same file, the same place, so that it can go on
        return RUNS / f"tune-{options.tune.stem}"
    if not options.new and (unfinished := unfinished_folder(plan)):
        return unfinished
    while (folder := RUNS / f"compare-{utc_stamp()}").exists():  # of another in the same second
        time.sleep(0.1)
    return folder


def unfinished_folder(plan: Plan) -> Path | None:
    """Return the newest comparison if it holds exactly this plan and is not complete.

    Only the newest: an older one that was left behind was left for a reason.
    """
    folder = newest_comparison(RUNS)
    if folder is None:
        return None
    old, plan = read_plan(folder / "plan.json"), resumed(plan, folder)
    is_this = not plan_differences(old, plan_record(plan, "")) and old.end == plan.end
    return folder if is_this and not is_finished(plan, folder) else None


def take_default_plan(options: argparse.Namespace) -> None:
    """Where the command line names neither what is to be compared nor where: both engines over each
    transport that both have, on this machine. On its GPUs that is NCCL, with both wire formats."""
    named = (options.plan, options.configurations, options.configuration, options.side)
    if any(named) or any((options.null, options.tune, options.hosts, options.hostfile)):
        return
    gpus = 0 if "--no-cuda" in options.arguments_after_dashes else checks.visible_gpus()
    options.plan = ON_GPUS if gpus else "square"
    if gpus:
        options.workers = options.workers or [str(min(2, gpus))]


def leave_out_missing(plan: Plan, options: argparse.Namespace) -> Plan:
    """Return the plan with what can run here, and say so: without the configurations whose engine
    or transport is not installed, or for which the GPUs are too few or too small, unless nothing
    would be left, or the command line names some."""
    if plan.side:
        return plan
    missing = {name: missing_for(plan.known()[name]) for name in plan.configurations}
    if options.plan == ON_GPUS and (reason := too_few(plan)):
        missing |= {name: missing[name] or reason for name in plan.configuration}
    there = tuple(name for name, reason in missing.items() if not reason)
    gone = tuple(name for name, reason in missing.items() if reason)
    if not gone or not there or options.configurations or options.configuration:
        return plan
    for reason in dict.fromkeys(filter(None, missing.values())):
        print(reason, file=sys.stderr)
    print(f"Left out: {', '.join(gone)}. The comparison goes on without.", file=sys.stderr)
    pairs = tuple(pair for pair in plan.judged_pairs if set(there).issuperset(pair))
    return replace(plan, configurations=there, judged_pairs=pairs, left_out=gone)


def too_few(plan: Plan) -> str | None:
    """Say why not all sides of the plan for GPUs make sense on this machine's; None: they do."""
    if max(plan.workers) == 1:
        return "One worker sends no gradients: their wire format makes no difference."
    found, needed = checks.gpu_bytes() / GIB, GIB_EACH * len(plan.configurations)
    text = f"All sides at once need {needed} GiB of memory on each GPU; these have {found:.0f} GiB."
    return text if found < needed else None


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
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        try:
            yield
        finally:
            if os.listdir(folder) == ["lock"]:  # refused: nothing was made
                shutil.rmtree(folder)


def run_plan(plan: Plan, folder: Path, options: argparse.Namespace, argv: list[str]) -> int:
    """Run what is missing of the plan in this folder and return the exit code."""
    if options.new and (folder / "plan.json").exists():
        raise UserError(
            f"--new: {folder} holds a comparison already; leave --new out to go on with it, or "
            "take another --out DIR"
        )
    plan = resumed(plan, folder)
    if plan.order_seed is None:
        plan = replace(plan, order_seed=secrets.randbelow(2**31))
    record = checked_record(plan, folder)
    if not is_finished(plan, folder):
        warnings = (*record.warnings, *checks.warn(plan, folder, options.strict))
        record = replace(record, warnings=tuple(dict.fromkeys(warnings)))
    write_plan(folder / "plan.json", record)
    print_outlook(plan, folder)
    # A block of turns has a warm-up of its own, and only the first one may find the data unread.
    is_cold = missing(plan.runs(), folder) or not any(g.blocks for g in measured(plan, folder))
    if options.warm_up and is_cold and not warm_up(plan, folder):
        return 1
    return carry_out(plan, folder, options.block, argv)


def carry_out(plan: Plan, folder: Path, block: int | None, argv: list[str]) -> int:
    """Make whole runs, then blocks until enough is known; return the exit code. `block` names the
    only block that is wanted."""
    is_measured, failed = True, make_missing(plan.runs(), plan, folder, block)
    if block is None and not failed:
        try:
            plan, failed = measure(plan, folder)
        except MeasurementError as error:
            is_measured = False
            print_line(f"a block of turns failed: {error}")
    if failed or not is_measured:
        runs = f"{len(failed)} of {len(plan.runs())} runs failed: " * bool(plan.runs())
        print(
            f"{runs}the output of what failed is kept, and no verdict is drawn from it. To try "
            f"again:\n    {shlex.join(command_words(argv, folder))}"
        )
    if plan.side and not is_measured and not any(one.blocks for one in measured(plan, folder)):
        return 1
    report = shlex.join(["python", path_from_here("compare/report.py"), str(folder)])
    print(f"report:\n    {report}")
    return 1 if failed or not is_measured else 0


def print_outlook(plan: Plan, folder: Path) -> None:
    """Say what will be done, before anything is."""
    done = len(plan.runs()) - len(missing(plan.runs(), folder))
    runs = f"{count(len(plan.runs()), 'run')}, {done} of them there already, " * bool(plan.runs())
    until = (
        f"until the 95 % interval of each pair is within +-{percentage(plan.until_interval)}, for "
        f"{plan.minutes:g} minutes of undisturbed measuring at most (but at least {MIN_BLOCKS})"
    )
    how = "in which all take turns" if plan.measure == "turns" else "of whole runs"
    print(f"{runs}into {folder}; blocks {how}: {plan.blocks or until}")


def dry_run_lines(
    plan: Plan, folder: Path, with_warm_up: bool, block: int | None = None
) -> list[str]:
    """Return shell lines that do what run.py does; they can be pasted as they are."""
    runs = plan.warm_up_runs() if with_warm_up else []
    runs += [run for run in plan.runs() if block in (None, run.block)]
    lines = [shlex.join(run.command((folder / run.folder).parent)) for run in runs]
    if plan.measure == "turns" and plan.pairs():
        lines.append("# then, in each block of turns, these at once:")
        lines += [
            f"#   {shlex.join(run.command(block_folder(folder, case, workers, 1)))}"
            for case, workers in plan.groups()
            for run in plan.in_order(1, case, workers)
        ]
    return [*shell_lines(), *lines]


def warm_up(plan: Plan, folder: Path) -> bool:
    """Start each engine for a few steps; return False, and say why, if one cannot train."""
    for run in plan.warm_up_runs():
        label = f"warm-up  {run_label(run, plan)}"
        outcome = start_and_wait(
            run,
            folder,
            max(600, plan.timeout),  # it reads the data first, and may list them for the first time
            label,
            end_after_steps=WARM_UP_STEPS,
        )
        if outcome.status != "completed":
            show_outcome(label, run, folder / run.folder, outcome, None)
            print("nothing was measured: what fails in the warm-up fails in every run")
            return False
        print_line(f"{label}   {duration(outcome.seconds)}, thrown away")
    return True


main = partial(run_main, "compare/run.py", answer, interrupted="stopped before the first run")

if __name__ == "__main__":
    sys.exit(main())
