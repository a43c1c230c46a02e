"""The flags of run.py, and the plan that they and a plan file make."""

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from compare.plan.configurations import CONFIGURATIONS, DEFAULT_CONFIGURATIONS
from compare.plan.hosts import SLURM, most_on_a_host, read_allocation, read_hostfile
from compare.plan.plan import MEASURES, ROOT, Plan, knobs_files, percentage
from compare.plan.plan_file import (
    check_end,
    check_plan,
    find_plan_file,
    read_case,
    read_definition,
    read_pair,
    read_percentage,
    read_plan_file,
)
from recipe.config import are_digits, check, read_flags
from recipe.errors import UserError
from recipe.flags import flag_name, last_value, without_flag
from recipe.knobs import read_all_knobs

TUNING_ROUNDS = 5


def parse_options(argv: list[str], about: str) -> argparse.Namespace:
    """Read the flags; what stands after the first `--` is the trainers'. A flag that says something
    about the plan bears the name of its field and is None where it was not given."""
    own, trainer = split_words_at_dashes(argv)
    first_line, _, examples = about.partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python compare/run.py",
        usage="python compare/run.py [plan] [flags] [-- flags of the trainers]",
        description=first_line,
        epilog=examples.strip("\n"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_task(parser.add_argument)
    for title, add_flags in {
        "what is compared": add_comparison,
        "with how many workers, and where": add_workers,
        "how speed is measured, and how long": add_measuring,
        "the runs": add_runs,
        "how it is done": add_procedure,
    }.items():
        add_flags(parser.add_argument_group(title).add_argument)
    options = parser.parse_args(own)
    options.runs = Path("runs")
    options.arguments_after_dashes = trainer
    out = None if options.tune else options.out  # a search's folder is emptied by --new
    if options.new and out is not None and (out / "plan.json").exists():
        raise UserError(
            f"--new: {out} holds a comparison already; leave --new out to go on with it, or take "
            "another --out DIR"
        )
    return options


def split_words_at_dashes(argv: list[str]) -> tuple[list[str], list[str]]:
    """Return the command's own words, and those of the trainers after the first `--`."""
    place = argv.index("--") if "--" in argv else len(argv)
    return argv[:place], argv[place + 1 :]


def add_task(add: Callable[..., Any]) -> None:
    add(
        "plan",
        nargs="?",
        metavar="plan",
        help="a ready plan's name or a plan file (TOML; compare/plans/ has them); flags "
        "win over it",
    )
    add("--list-plans", action="store_true", help="show the ready plans, and nothing else")
    add(
        "--tune",
        type=Path,
        metavar="FILE",
        help="do not compare, but search for the settings with which each engine exchanges "
        "gradients fastest here, and write them into this file, for the trainers' --knobs",
    )
    add(
        "--rounds",
        type=int,
        metavar="N",
        help="with --tune: in how many blocks each value of a knob takes turns with the best one "
        "so far "
        f"(default: {TUNING_ROUNDS})",
    )


def add_comparison(add: Callable[..., Any]) -> None:
    add(
        "--configurations",
        nargs="+",
        metavar="NAME",
        help=f"any of {', '.join(CONFIGURATIONS)}, and your own "
        f"(default: {' '.join(DEFAULT_CONFIGURATIONS)}; without a plan on a machine without GPUs: "
        "those of the plan square)",
    )
    add(
        "--define",
        action="append",
        metavar="'NAME=BASE [VARIABLE=VALUE ...] [flags]'",
        help="a configuration of your own: a ready one with environment variables and trainer "
        "flags, as in --define 'tuned=horovod-mpi HOROVOD_CYCLE_TIME=1 --fp16-allreduce'",
    )
    add(
        "--case",
        dest="cases",
        action="append",
        type=read_case,
        metavar="'NAME=flags'",
        help="a training that the configurations are compared on, as in --case 'vgg16=--arch "
        "vgg16' (may be repeated)",
    )
    add(
        "--pairs",
        dest="judged_pairs",
        nargs="+",
        type=read_pair,
        metavar="FIRST:SECOND",
        help="configurations that are judged against each other (default: each against the first)",
    )
    add("--null", action="store_const", const=True, help="compare each configuration with itself")


def add_workers(add: Callable[..., Any]) -> None:
    add(
        "--workers",
        nargs="+",
        type=int,
        metavar="N",
        help="numbers of worker processes (default: 2)",
    )
    add(
        "--hosts",
        metavar="HOST:N,...",
        help="hosts with the number of workers that each takes, or `slurm`: those of this "
        "allocation (default: this host)",
    )
    add(
        "--hostfile", type=Path, metavar="FILE", help="the same in lines of the form 'name slots=N'"
    )
    add(
        "--network-interface",
        metavar="NAME",
        help="the network that connects the hosts, such as eth0 (default: the launchers look for "
        "one)",
    )
    add(
        "--global-batch-size",
        type=int,
        metavar="N",
        help="strong scaling: images a step of all workers together (default: weak scaling, each "
        "worker has its own --batch-size)",
    )
    add(
        "--global-learning-rate",
        type=float,
        metavar="RATE",
        help="with --global-batch-size: the learning rate, whatever the number of workers",
    )


def add_measuring(add: Callable[..., Any]) -> None:
    default = Plan()
    add(
        "--measure",
        choices=MEASURES,
        help="what speed is measured by: all configurations at once, which take turns of half a "
        "second (turns, the default: much the more exact on a noisy machine), or whole runs, one "
        "after the other (runs)",
    )
    add(
        "--full-runs",
        type=int,
        metavar="N",
        help="with turns: how often each configuration also trains from beginning to end, for what "
        f"turns cannot see: learning curves, final weights, memory (default: {default.full_runs}; "
        "0: not at all)",
    )
    add(
        "--blocks",
        type=int,
        metavar="N",
        help="measure in so many blocks (default: as many as --until-interval and --minutes ask "
        "for; an interval needs 3). Each block starts each configuration once",
    )
    add(
        "--until-interval",
        type=partial(read_percentage, flag="--until-interval"),
        metavar="P%",
        help="add blocks until the 95 %% interval of each speed ratio is no wider than +-P %% "
        f"(default: {percentage(default.until_interval)}%)",
    )
    add(
        "--minutes",
        type=float,
        metavar="M",
        help="add no block after so many minutes of undisturbed measuring, but three at least; "
        "time in which others used the cores does not count (default: "
        f"{default.minutes:g}; the plan square has 8)",
    )
    add(
        "--margin",
        type=partial(read_percentage, flag="--margin"),
        metavar="P%",
        help="two speeds count as equal if the interval shows that they differ by less than P %% "
        f"(default: {percentage(default.margin)}%)",
    )


def add_runs(add: Callable[..., Any]) -> None:
    default = Plan()
    add(
        "--seed",
        type=int,
        metavar="N",
        help=f"of the trainings: block b trains with the seed N + b - 1 (default: {default.seed})",
    )
    add(
        "--order-seed",
        type=int,
        metavar="N",
        help="of the order within blocks (default: another one each time)",
    )
    add(
        "--timeout",
        type=int,
        metavar="SECONDS",
        help="a run that takes longer, from its launcher's start on, is ended and counts as "
        "failed, and so does a block of turns whose sides take longer to start; give more where "
        "data are listed for the first time on a slow file system, or read into memory "
        f"(default: {default.timeout}; warm-ups: at least 600)",
    )
    add(
        "--phase-steps",
        type=int,
        metavar="N",
        help="after the blocks each configuration runs once more for N steps, half of them without "
        "exchanging gradients, which shows the phases of a step "
        f"(default: {default.phase_steps}, or the trainers' --max-steps)",
    )
    add(
        "--no-phases",
        dest="phase_steps",
        action="store_const",
        const=0,
        help="leave out those runs",
    )
    add(
        "--no-warm-up",
        dest="warm_up",
        action="store_false",
        help="leave out the short run of each engine before the first measured one",
    )


def add_procedure(add: Callable[..., Any]) -> None:
    add(
        "--slurm",
        metavar="'FLAGS'",
        help="do it in a Slurm job, which is followed (--measure runs --blocks N: in one a block); "
        "FLAGS are sbatch's, as in --slurm='--nodes 2 --ntasks-per-node 4'",
    )
    add(
        "--block",
        type=int,
        metavar="N",
        help="with --measure runs --blocks N: run this block alone (for job arrays); the last one "
        "that is missing also runs those for the phases",
    )
    add(
        "--out",
        type=Path,
        metavar="DIR",
        help="the comparison's folder; one that exists is continued (default: runs/compare-<UTC "
        "time>, or the newest one there if it holds this plan unfinished)",
    )
    add("--new", action="store_true", help="start afresh, even if this plan is unfinished")
    add("--dry-run", action="store_true", help="print the commands, and nothing else")
    add(
        "--strict",
        action="store_true",
        help="do not start when something would make the result worthless (other load, unequal "
        "threads, ...), where otherwise a warning is printed",
    )


def make_plan(options: argparse.Namespace) -> Plan:
    """Return the plan of the file, if one is named, with what the flags say on top of it."""
    values = read_plan_file(find_plan_file(options.plan)) if options.plan else {}
    check_end(vars(options))
    if options.until_interval is not None or options.minutes is not None:
        values.pop("blocks", None)  # the file's
    if options.arguments_after_dashes or any(
        getattr(options, name) is not None
        for name in ("workers", "cases", "configurations", "define", "minutes", "blocks")
    ):
        values.pop("time", None)  # which the file says of itself as it stands
    values |= {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in vars(options).items()
        if name in {item.name for item in fields(Plan)} and value is not None
    }
    if options.hostfile is not None:
        if options.hosts is not None:
            raise UserError(f"--hostfile {options.hostfile}: --hosts names hosts, too; give one")
        values["hosts"] = read_hostfile(options.hostfile)
    if options.define:
        new = {c.name: c for c in map(read_definition, options.define)}
        kept = [c for c in values.get("defined", ()) if c.name not in new]
        values["defined"] = (*kept, *new.values())
        if options.configurations is None:
            chosen = values.get("configurations", DEFAULT_CONFIGURATIONS)
            values["configurations"] = (*chosen, *new)
    if options.configurations is not None and options.judged_pairs is None:
        # Of the file's pairs those that are still there.
        chosen = set(options.configurations)
        pairs = [pair for pair in values.get("judged_pairs", ()) if chosen.issuperset(pair)]
        values["judged_pairs"] = tuple(pairs)
    if values.get("null") and options.judged_pairs is None:
        values["judged_pairs"] = ()
    file_arguments = values.get("trainer_arguments", ())
    of_digits = last_value(file_arguments, "--data") == "digits"
    if of_digits and not are_digits(options.arguments_after_dashes):
        file_arguments = without_flag(file_arguments, "--preset")  # other images have their own
    plan = replace(
        Plan(**values), trainer_arguments=(*file_arguments, *options.arguments_after_dashes)
    )
    if plan.hosts == SLURM or options.slurm is not None:
        # Those of the job that --slurm submits are not known before it runs.
        hosts = None if options.slurm is not None else read_allocation(os.environ)
        plan = replace(plan, hosts=hosts, is_allocation=True)
    check_plan(plan)
    check_slurm(plan, options)
    if options.tune is None:
        if options.rounds is not None:
            raise UserError(f"--rounds {options.rounds}: belongs to --tune; here give --blocks")
        check_knobs(plan)
    workers = tuple(sorted(set(plan.workers)))
    most = most_on_a_host(max(workers), plan.hosts)
    return replace(
        plan,
        configurations=tuple(dict.fromkeys(plan.configurations)),
        workers=workers,
        trainer_arguments=tuple(with_defaults(list(plan.trainer_arguments), most)),
    )


def check_knobs(plan: Plan) -> None:
    """Raise UserError if a file of knobs cannot be used, before the first run finds that out."""
    for name in knobs_files(plan):
        read_all_knobs(Path(name).expanduser())


def check_trainers(plan: Plan) -> None:
    """Raise UserError if a trainer would refuse its flags, before the first run finds that out.
    SystemExit after a value that they do not know, or --help: their parser has answered then."""
    script = f"python {script_path()}"
    runs = plan.block(1)
    for engine, arguments in dict.fromkeys((r.configuration.engine, r.arguments) for r in runs):
        try:
            config, *_ = read_flags(
                engine, plan.workers[0], list(arguments), talk=True, program=f"{script} --"
            )
            for workers in plan.workers[1:]:
                check(config, engine, workers)
        except UserError as error:
            raise UserError(f"the trainers refuse their flags: {error}") from None


def check_slurm(plan: Plan, options: argparse.Namespace) -> None:
    if options.slurm is not None:
        for name in ("hosts", "hostfile", "block"):
            if (value := getattr(options, name)) is not None:
                raise UserError(
                    f"--{name} {value}: --slurm submits all blocks, and each job takes the hosts "
                    "that Slurm gives it; leave one of the two out"
                )
    if options.block is not None:
        if plan.measure != "runs" or plan.blocks is None:
            raise UserError(
                f"--block {options.block}: a block alone is one of whole runs whose number is "
                "fixed; give --measure runs and --blocks, too"
            )
        if not 1 <= options.block <= plan.blocks:
            raise UserError(f"--block {options.block}: the plan has blocks 1 to {plan.blocks}")


def command_words(argv: list[str], folder: Path, without: Sequence[str] = ()) -> list[str]:
    """Return the command that goes on in this very folder, from the flags of the first one;
    `without` names flags with a value that are left out."""
    own, trainer = split_words_at_dashes(argv)
    own = [word for word in own if word not in ("--new", "--dry-run")]
    for flag in without:
        own = without_flag(own, flag)
    if not any(word == "--out" or word.startswith("--out=") for word in own):
        own = ["--out", str(folder), *own]
    return ["python", script_path(), *own, *(["--"] if trainer else []), *trainer]


def script_path() -> str:
    """Return run.py's path as one would type it here."""
    script = ROOT / "compare/run.py"
    return str(script.relative_to(Path.cwd()) if script.is_relative_to(Path.cwd()) else script)


def with_defaults(trainer_arguments: list[str], most_workers: int) -> list[str]:
    """Add what a comparison sets for the trainers, unless the user set it.

    `--threads`, the cores divided by the most workers on a host: by the trainers' own rule one
    worker would get all cores and each of two half of them, and a worker's work would not be the
    same. And no checkpoints: they are not measured, and would fill the disk.
    """
    given = {flag_name(word) for word in trainer_arguments}
    threads = max(1, len(os.sched_getaffinity(0)) // most_workers)
    added = {"--threads": str(threads), "--keep-checkpoints": "0"}
    return [
        *trainer_arguments,
        *(word for pair in added.items() if pair[0] not in given for word in pair),
    ]
