"""Compare engines by the same training, until their speed ratios are known or the time is over.

    python compare/run.py                     2 workers: the embedded digits, DDP and Horovod, each
                                              over Gloo and MPI (the plan square); on GPUs ResNet-50
                                              on synthetic images, over NCCL (square-nccl)
    python compare/run.py wire-format         a ready plan; --list-plans shows them all
    python compare/run.py my-plan.toml --workers 4 --until-interval 1% --minutes 60
    python compare/run.py --workers 2 --configurations ddp-torchrun horovod-mpi horovod-gloo
    python compare/run.py tuning              which value of an engine's setting is fastest here
    python compare/run.py --commits main HEAD -- torchrun --nproc-per-node 2 my_ddp.py
                                              two commits of your own script (docs/ab-tests.md)
    python compare/run.py -- --data /data/imagenet --arch resnet50 --epochs 1

Everything after `--` goes to both trainers unchanged; `-- --help` shows their flags. The same
command, given again after Ctrl-C, a crash or a reboot, goes on where the comparison stopped.
"""

import contextlib
import fcntl
import importlib.util
import os
import re
import secrets
import shlex
import shutil
import signal
import sys
import time
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import make_dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

if not importlib.util.find_spec("recipe"):
    tool = Path(__file__).resolve().parents[1]
    sys.exit(
        f"compare/run.py: {sys.executable} is not of this project's environment: activate that (`. "
        f"{tool}/.venv/bin/activate`; `make setup` makes it), or call {tool}/.venv/bin/python"
    )

from msgspec.structs import fields, replace
from tyro.conf import Positional, UseAppendAction, arg
from tyro.constructors import PrimitiveConstructorSpec

from compare.evidence.paired import INTERVAL
from compare.evidence.record import LOCK, Record, newest_comparison, record_to_write
from compare.evidence.stopping import MOST_STRETCH
from compare.evidence.words import count
from compare.plan.blocks import MIN_BLOCKS
from compare.plan.configurations import DEFAULT_CONFIGURATIONS
from compare.plan.environment import (
    ALLOCATIONS,
    COMMITS,
    most_on_a_host,
    path_from_here,
    shell_line,
    shell_lines,
)
from compare.plan.plan import (
    FIELDS,
    KEYS,
    OwnScript,
    Plan,
    Words,
    block_place,
    meta_of,
    percentage,
    trainer_config,
)
from compare.plan.plan_file import (
    FIELD_OF,
    check_plan,
    flag_of,
    list_plans,
    parse_goal,
    plan_differences,
    plan_record,
    read_plan_file,
    split_words_at_dashes,
    take_hostfile,
    typed,
)
from compare.running import checks
from compare.running.checks import check_tools, missing_for
from compare.running.commits import full_name, with_full_names, worktrees, worktrees_of
from compare.running.comparison import (
    check_same_plan,
    is_finished,
    make_missing,
    measure,
    record_plan,
    resumed,
    show_outcome,
)
from compare.running.launch import duration, print_line, start_and_wait, utc_stamp
from compare.running.scheduler import MeasurementError, reaching_side_file, with_side_file
from recipe.command import call_tool, run_main
from recipe.errors import UserError, near_match, refuse, system_errors
from recipe.settings.config import PRESET_OF_DATA, default_preset
from recipe.settings.flags import given_flags

SCRIPT = "compare/run.py"
RUNS = Path("runs")
WARM_UP_STEPS = 5  # steps after which a warm-up has touched all that it should
# The keys whose tables name sides or pairs of them, FIRST:SECOND.
BY_SIDES = ("goals", "top1_goals", "margins")
# What a flag takes the place of in a plan file, beside its own key.
REPLACED = {
    "blocks": ("until_interval", "minutes"),
    "until_interval": ("blocks",),
    "minutes": ("blocks",),
    "null": ("pairs", *BY_SIDES),
}
# The first field of each group of flags, and the group's name in --help.
GROUPS = {
    "configurations": "comparison",
    "workers": "workers",
    "measure": "measuring",
    "seed": "runs",
}


# Flags that are no part of a plan: those of the task, and how it is done.
TASK = [
    ("plan", Annotated[str | None, Positional, arg(metavar="[plan]", help="a ready plan's name "
     "(--list-plans), a plan file (TOML), or a comparison's record.jsonl, to repeat it; flags "
     "override it")], None),
    ("list_plans", Annotated[bool, arg(help="show the ready plans, and nothing else")], False),
]  # fmt: skip
PROCEDURE = [
    ("commits", Annotated[tuple[str, ...] | None, arg(metavar="COMMIT COMMIT [...]", help="compare "
     "commits of the git repository here: the command after the -- runs in a worktree of each, "
     "which is removed at the end, as in --commits main HEAD -- torchrun --nproc-per-node 2 "
     "my_ddp.py")], None),
    ("hostfile", Annotated[str | None, arg(metavar="FILE", help="hosts, in lines of the form 'name "
     "slots=N', in place of --hosts")], None),
    ("no_warm_up", Annotated[bool, arg(help="with --measure runs: leave out the short run of each "
     "engine before the first measured one")], False),
    ("out", Annotated[Path | None, arg(metavar="DIR", help="the comparison's folder; one that "
     "exists is continued (default: runs/compare-<UTC time>, or the newest one there if it holds "
     "this plan unfinished)")], None),
    ("new", Annotated[bool, arg(help="start afresh, even if this plan is unfinished")], False),
    ("dry_run", Annotated[bool, arg(help="print the commands and the peak learning rates, and "
     "nothing else")], False),
]  # fmt: skip


# The command.


def answer(argv: list[str]) -> int:
    """Run what the command line asks for and return the exit code."""
    options = parse_options(argv, __doc__ or "")
    if options.list_plans:
        print(list_plans())
        return 0
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, signal.default_int_handler)
    take_commits(options)
    take_default_plan(options)
    plan = with_full_names(leave_out_missing(make_plan(options), options))
    if options.dry_run or not worktrees_of(plan):
        return compare(plan, options, argv)
    with locked(COMMITS, "start this one in another folder"), worktrees(plan):
        return compare(plan, options, argv)


def compare(plan: Plan, options: SimpleNamespace, argv: list[str]) -> int:
    """Run the plan, or show its commands, and return the exit code."""
    if not plan.side:
        check_trainers(plan)
    if not (options.dry_run and worktrees_of(plan)):  # which a dry run does not make
        check_tools(plan)
    folder = choose_folder(plan, options)
    if options.dry_run:
        print("\n".join(dry_run_lines(plan, folder, not options.no_warm_up)))
        return 0
    with locked(folder, "start another comparison with --new"):
        try:
            return run_plan(plan, folder, options, argv)
        except KeyboardInterrupt:
            record = Record.open(folder)
            is_begun = not record.is_empty and record.written
            kept = "what was measured is kept. To go on where it stopped:"
            print(f"\nstopped: {kept if is_begun else 'nothing was measured yet. To begin again:'}")
            print(f"    {shlex.join(command_words(argv, folder))}")
            return 130


def take_commits(options: SimpleNamespace) -> None:
    """Make a side of each commit that --commits names, with the command after the dashes."""
    if options.commits is None:
        return
    given, command = " ".join(["--commits", *options.commits]), options.arguments_after_dashes
    refuse(
        (
            not command,
            f"{given}: give the command that each is to run, as in {given} -- torchrun "
            "--nproc-per-node 2 my_ddp.py",
        ),
        (
            len(options.commits) < 2 and not (options.plan or options.side or options.null),
            f"{given}: name two commits, or give --null to compare one with itself",
        ),
        (
            len(command) == 1 and " " in command[0] and not Path(command[0]).exists(),
            f"{given} -- '{' '.join(command)}': is one word; leave out its quotes",
        ),
    )
    names = dict[str, str]()
    for commit in options.commits:
        sha = full_name(commit)
        if other := names.get(sha):
            raise UserError(
                f"{given}: {other} and {commit} are the same commit, {sha[:12]}; name another, or "
                f"compare it with itself: --commits {commit} --null"
            )
        names[sha] = commit
        name = re.sub(r"[^\w.-]", "-", commit, flags=re.ASCII).lstrip("-._")
        if not name or any(side.startswith(f"{name}=") for side in options.side):
            name = sha[:12]  # as of feature/x beside feature-x
        options.side += (f"{name}=commit={sha} {shlex.join(command)}",)
    options.arguments_after_dashes = []


def choose_folder(plan: Plan, options: SimpleNamespace) -> Path:
    """Return the folder that the user names, that of the same unfinished comparison, or a new one,
    whose name is its date and time, so that names sort by age."""
    if options.out is not None:
        return Path(options.out)
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
    try:
        record = Record.open(folder)
        if record.is_empty:
            return None
        plan = resumed(plan, record)
        old = record.plan
    except UserError:  # which report.py would say: it is another comparison in any case
        return None
    is_this = not plan_differences(old, plan_record(plan, "")) and old.end == plan.end
    return folder if is_this and not is_finished(plan, record) else None


def take_default_plan(options: SimpleNamespace) -> None:
    """Where the command line names neither what is to be compared nor where: both engines over each
    transport that both have, on this machine. On its GPUs that is NCCL, with both wire formats."""
    if any(
        (
            options.plan,
            options.configurations,
            options.configuration,
            options.side,
            options.null,
            options.hosts,
            options.hostfile,
        )
    ):
        return
    options.plan, gpus = "square", checks.visible_gpus()
    if not gpus:
        return
    config = trainer_config("ddp", 1, ("--data", "synthetic", *options.arguments_after_dashes))
    if config.cuda:
        options.plan = "square-nccl"
        most = 2 if config.share_gpu else min(2, gpus)
        options.workers = options.workers or (str(most),)


def leave_out_missing(plan: Plan, options: SimpleNamespace) -> Plan:
    """Return the plan with what can run here, and say so: without the configurations whose engine
    or transport is not installed, unless nothing would be left, or the command line names some."""
    if plan.side:
        return plan
    missing = {name: missing_for(plan.known()[name]) for name in plan.configurations}
    there = tuple(name for name, reason in missing.items() if not reason)
    gone = tuple(name for name, reason in missing.items() if reason)
    if not gone or not there or options.configurations or options.configuration:
        return plan
    for reason in dict.fromkeys(filter(None, missing.values())):
        print(reason, file=sys.stderr)
    print(f"Left out: {', '.join(gone)}. The comparison goes on without.", file=sys.stderr)
    return replace(
        plan,
        configurations=there,
        judged_pairs=tuple(pair for pair in plan.judged_pairs if {*there} >= {*pair}),
        **{key: of_sides(there, getattr(plan, key)) for key in BY_SIDES},
        left_out=gone,
    )


def of_sides(names: Sequence[str], table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a table of goals or margins whose sides all have one of these names."""
    return {key: value for key, value in table.items() if {*names} >= {*key.split(":")}}


@contextlib.contextmanager
def locked(folder: Path, instead: str) -> Iterator[None]:
    """Keep a second run.py out of the folder; the lock ends with this process, however it ends.
    `instead`: what its user can do rather than wait."""
    remedy = "Start in a folder that you may write to, or give another --out DIR"
    with system_errors(folder, "cannot be written", remedy):
        folder.mkdir(parents=True, exist_ok=True)
        opened = (folder / LOCK).open("a")
    with opened as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{folder} is being written by another run.py: wait for its end, or {instead}"
            ) from None
        except OSError as error:
            print(f"warning: {folder} cannot be locked ({error.strerror}): start no second run.py")
        try:
            yield
        finally:
            if os.listdir(folder) == [LOCK]:  # refused: nothing was made
                shutil.rmtree(folder)


def run_plan(plan: Plan, folder: Path, options: SimpleNamespace, argv: list[str]) -> int:
    """Run what is missing of the plan in this folder and return the exit code."""
    record = record_to_write(folder)
    if options.new and not record.is_empty:
        raise UserError(
            f"--new: {folder} holds a comparison already; leave --new out to go on with it, or "
            "take another --out DIR"
        )
    plan = resumed(plan, record)
    if plan.order_seed is None:
        plan = replace(plan, order_seed=secrets.randbelow(2**31))
    plan_there = check_same_plan(plan, record)
    if record.is_empty or not is_finished(plan, record):
        warnings = (*plan_there.warnings, *checks.warn(plan, folder))
        plan_there = replace(plan_there, warnings=tuple(dict.fromkeys(warnings)))
    record_plan(plan_there, record)
    print_outlook(plan, record)
    is_cold = record.missing(plan.runs()) or not record.num_blocks
    if is_cold and not options.no_warm_up and not warm_up(plan, folder):
        return 1
    return carry_out(plan, record, argv)


def carry_out(plan: Plan, record: Record, argv: list[str]) -> int:
    """Make whole runs, then blocks until enough is known; return the exit code."""
    is_measured, failed = True, make_missing(plan.runs(), plan, record)
    if not failed:
        try:
            failed = measure(plan, record)
        except MeasurementError as error:
            is_measured = False
            print_line(f"a block of turns failed: {error}")
    if failed or not is_measured:
        runs = f"{len(failed)} of {len(record.runs)} runs failed: " if failed else ""
        print(
            f"{runs}the output of what failed is kept, and no verdict is drawn from it. To try "
            f"again:\n    {shlex.join(command_words(argv, record.folder))}"
        )
    if plan.side and not is_measured and not record.num_blocks:
        return 1
    print(f"record: {count(record.num_blocks, 'block')}, SHA-256 {record.head}")
    report = shlex.join(["python", path_from_here("compare/report.py"), str(record.folder)])
    print(f"report:\n    {report}")
    if plan.goals or plan.top1_goals:
        print(f"whether the goals are reached, as an exit code:\n    {report} --check")
    return 1 if failed or not is_measured else 0


def print_outlook(plan: Plan, record: Record) -> None:
    """Say what will be done, before anything is."""
    runs, done = "", len(plan.runs()) - len(record.missing(plan.runs()))
    if plan.runs():
        runs = f"{count(len(plan.runs()), 'run')}, {done} of them there already, "
    until = (
        f"at least {MIN_BLOCKS}, until the {INTERVAL} of each pair is within "
        f"+-{percentage(plan.until_interval)}, or for {plan.minutes:g} undisturbed minutes (where "
        f"other processes use the cores, no block begins after {MOST_STRETCH * plan.minutes:g})"
    )
    how = "in which all take turns" if plan.measure == "turns" else "of whole runs"
    print(f"{runs}into {record.folder}; blocks {how}: {plan.blocks or until}")
    if plan.time:
        print(f"{plan.plan_file} as it is takes {plan.time}")


def dry_run_lines(plan: Plan, folder: Path, with_warm_up: bool) -> list[str]:
    """Return shell lines that do what run.py does; they can be pasted as they are."""
    runs = [*(plan.warm_up_runs() if with_warm_up else []), *plan.runs()]
    lines = [shlex.join(["git", "-C", at, *words]) for at, words in worktrees_of(plan).values()]
    lines += [shell_line(run.command((folder / run.folder).parent)) for run in runs]
    if plan.measure == "turns" and plan.pairs():
        if plan.side:
            folder = folder.absolute()  # they may run elsewhere
            path = with_side_file(os.environ.get("PYTHONPATH", ""))
            lines.append(f"export PYTHONPATH={shlex.quote(path)}")
        lines.append("# then, in each block of turns, these at once:")
        for case, workers in plan.groups():
            for run in plan.in_order(1, case, workers):
                command = run.command(folder / block_place(case, workers, 1))
                command = reaching_side_file(command) if run.is_script else command
                lines.append(f"#   {shell_line(command)}")
    return [*shell_lines(), *peak_rates(plan), *lines]


def peak_rates(plan: Plan) -> list[str]:
    """Return shell comments that tell how many images each training's step has, and its peak
    learning rate. A user's own scripts keep that to themselves."""
    trainings = dict[str, list[str]]()
    for run in plan.block(1) if not plan.side else ():
        config, engine = run.config, run.configuration.trained_by
        batches = config.batches_per_allreduce * (1 if engine.has_one_replica else run.workers)
        rate = f"{config.base_lr * batches:.4g}"
        if config.use_adasum:
            rate = "as docs/recipe.md says of --use-adasum"
        text = f"{config.batch_size * batches:,} images a step, peak learning rate {rate}"
        trainings.setdefault(text, []).append(run.cell)
    return [f"# {', '.join(cells)}: {text}" for text, cells in trainings.items()]


def warm_up(plan: Plan, folder: Path) -> bool:
    """Start each engine for a few steps; return False, and say why, if one cannot train."""
    for run in plan.warm_up_runs():
        label = f"warm-up  {run.cell}"
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


# Its flags, derived from Plan, and the plan that they and a plan file make.


def parse_options(argv: list[str], about: str) -> SimpleNamespace:
    """Read the flags; what stands after the first `--` is the trainers'. A flag that says something
    about the plan bears the name of its key, and is None or () where it was not given."""
    own, trainer = split_words_at_dashes(argv)
    groups: dict[str, list[Any]] = {
        "task": TASK,
        **{name: [] for name in GROUPS.values()},
        "procedure": PROCEDURE,
    }
    for field in FIELDS:
        meta, key = meta_of(field.type), field.encode_name
        if key in GROUPS:
            group = groups[GROUPS[key]]
        if meta.description:
            given, word = typing.get_args(field.type)[0], (meta.extra or {})["metavar"]
            part = PrimitiveConstructorSpec(
                nargs=1,
                metavar=word,
                instance_from_str=itemgetter(0),
                is_instance=bool,
                str_from_instance=list,  # of defaults, which there are none of
            )
            kinds: dict[Any, tuple[Any, Any, str | None]] = {
                bool: (bool | None, None, None),
                dict: (UseAppendAction[tuple[Annotated[str, part], ...]], (), word),
                tuple: (tuple[str, ...] | None, None, f"{word} [{word} ...]"),
                typing.Literal: (given | None, None, None),
            }
            kind, default, shown = kinds.get(
                typing.get_origin(given) or given, (str | None, None, word)
            )
            text = arg(name=flag_of(field)[2:], metavar=shown, help=meta.description)
            group.append((key, Annotated[kind, text], default))
    flags = make_dataclass("Flags", [(name, make_dataclass(name, groups[name])) for name in groups])
    parsed = vars(call_tool(SCRIPT, flags, about, own)).values()
    options = {key: value for group in parsed for key, value in vars(group).items()}
    return SimpleNamespace(**options, arguments_after_dashes=trainer)


NAMED = ("configuration", "case", "side", *BY_SIDES)
# What may stand before the command of a script, beside its variables.
KEYS_OF_SCRIPTS = [field.name for field in fields(OwnScript) if field.type is str]


def parse_named_value(key: str, text: str) -> tuple[str, Any]:
    """Read what a flag says of a thing with a name: `NAME=BASE [VARIABLE=VALUE ...] [flags]`, a
    configuration; `NAME=[KEY=VALUE ...] [VARIABLE=VALUE ...] command`, a script of a user's own;
    `NAME=flags`, a case; `FIRST:SECOND=VALUE`, a goal or a margin. UserError if it is wrong."""
    if key == "goals":
        return parse_goal(text)
    if key in ("margins", "top1_goals"):
        pair, _, value = text.rpartition("=")
        return pair, value
    name, sign, rest = text.partition("=")
    if key == "side" and (not sign or " -" in name):
        raise UserError(f"--side {text}: its name is missing; write --side 'NAME={text}'")
    try:
        words, variables = shlex.split(rest), dict[str, str]()
    except ValueError as error:
        raise UserError(f"{flag_of(FIELD_OF[key])} {text}: {error}; quote as in a shell") from None
    if key == "case":
        return name, {"flags": words}
    base = words.pop(0) if key == "configuration" and words else ""
    while words and (found := re.fullmatch(r"([A-Za-z_]\w*)=(.*)", words[0], re.DOTALL)):
        variables[found[1]] = found[2]
        del words[0]
    if key == "configuration":
        return name, {"base": base, "flags": words, "environment": variables}
    settings = {word: variables.pop(word) for word in KEYS_OF_SCRIPTS if word in variables}
    for word in filter(str.islower, variables):
        known = near_match(word, KEYS_OF_SCRIPTS)
        remedy = known if known.endswith("?") else f"{known}."
        raise UserError(
            f"--side {name}: {word}={variables[word]}: there is no key {word}; "
            f"{remedy} To set a variable with a small name, begin the command with `env {word}=...`"
        )
    return name, {"command": words, "environment": variables, **settings}


def given_table(options: SimpleNamespace) -> dict[str, Any]:
    """Return what the flags say about the plan, by the keys of a plan file."""
    given = ((key, getattr(options, key, None)) for key in KEYS)
    table = {key: value for key, value in given if value not in (None, ())}
    for key in table.keys() & {*NAMED}:
        pairs = [parse_named_value(key, text) for text in table[key]]
        names = [name for name, _ in pairs]
        for name in {name for name in names if names.count(name) > 1}:
            raise UserError(f"{flag_of(FIELD_OF[key])} {name}: is given twice; name each once")
        table[key] = dict(pairs)
    if "pairs" in table:
        refuse(
            *(
                (text.count(":") != 1, f"--pairs {text}: write FIRST:SECOND, two configurations")
                for text in table["pairs"]
            )
        )
        table["pairs"] = [text.split(":") for text in table["pairs"]]
    take_hostfile(table)
    return table


def merged(file: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return what a plan file says with what the flags say on top of it."""
    replaced = {other for key in given for other in REPLACED.get(key, ())}
    table = {key: value for key, value in file.items() if key not in replaced} | given
    if "configuration" in given:
        table["configuration"] = {**file.get("configuration", {}), **given["configuration"]}
        if "configurations" not in given:
            chosen = file.get("configurations", DEFAULT_CONFIGURATIONS)
            table["configurations"] = [*chosen, *given["configuration"]]
    if "side" in given:
        table["side"] = {**file.get("side", {}), **given["side"]}
        if "configurations" not in given:
            table["configurations"] = list(table["side"])
    if "configurations" in given:  # then the file's other configurations are left out
        chosen, of_file = given["configurations"], table.keys() - given.keys()
        if "pairs" in of_file:
            table["pairs"] = [pair for pair in file["pairs"] if {*chosen} >= {*pair}]
        for key in of_file & {*BY_SIDES}:
            table[key] = of_sides(chosen, file[key])
    return table


def make_plan(options: SimpleNamespace) -> Plan:
    """Return the plan of the file, if one is named, with what the flags say on top of it."""
    file = read_plan_file(options.plan) if options.plan else {}
    plan = typed(merged(file, given_table(options)), Plan, strict=False)
    words = list(plan.trainer_arguments)
    own, given = given_flags(words), given_flags(options.arguments_after_dashes)
    preset = default_preset(own | given)
    if own.get("data") in PRESET_OF_DATA and preset != default_preset(own):
        words += ["--preset", preset]  # instead of the plan's, which is for its own images
    plan = replace(
        plan,
        configurations=tuple(dict.fromkeys(plan.configurations)),
        workers=tuple(sorted(set(plan.workers))),
        trainer_arguments=Words((*words, *options.arguments_after_dashes)),
        allocation=ALLOCATIONS[plan.named_hosts]() if plan.named_hosts in ALLOCATIONS else None,
    )
    check_plan(plan)
    for key in ("configurations", "pairs", "workers"):
        if getattr(options, key) == ():
            raise UserError(f"--{key}: give at least one value")
    if plan.side:
        return plan
    most = most_on_a_host(max(plan.workers), plan.hosts)
    return replace(plan, trainer_arguments=with_defaults(plan.trainer_arguments, most))


def with_defaults(trainer_arguments: Sequence[str], most_workers: int) -> Words:
    """Add what a comparison sets for the trainers, unless the user set it.

    `--threads`, the cores divided by the most workers on a host: by the trainers' own rule one
    worker would get all cores and each of two half of them, and a worker's work would not be the
    same. And no checkpoints: they are not measured, and would fill the disk.
    """
    given = given_flags(trainer_arguments)
    threads = max(1, len(os.sched_getaffinity(0)) // most_workers)
    words = list(trainer_arguments)
    if "threads" not in given:
        words += ["--threads", str(threads)]
    if "keep_checkpoints" not in given:
        words += ["--keep-checkpoints", "0"]
    return Words(words)


def check_trainers(plan: Plan) -> None:
    """Raise UserError if a trainer would refuse its flags, before the first run finds that out.
    SystemExit after a value that they do not know, or --help: their parser has answered then."""
    for run in plan.block(1):
        trainer_config(run.configuration.engine, run.workers, run.arguments)


def command_words(argv: list[str], folder: Path) -> list[str]:
    """Return the command that goes on in this very folder, from the flags of the first one."""
    own, trainer = split_words_at_dashes(argv)
    own = [word for word in own if word not in ("--new", "--dry-run")]
    if not any(word == "--out" or word.startswith("--out=") for word in own):
        own = ["--out", str(folder), *own]
    return ["python", path_from_here(SCRIPT), *own, *(["--"] if trainer else []), *trainer]


main = partial(run_main, "compare/run.py", answer, interrupted="stopped before the first run")

if __name__ == "__main__":
    sys.exit(main())
