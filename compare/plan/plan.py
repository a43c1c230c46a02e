"""The plan of a comparison: each field declared once, and the runs that it asks for.

The keys of a plan file, the flags of run.py, its record and the differences between two plans all
follow from the declaration of a field: its type with bounds, its help, and whether it identifies a
comparison (compare/run.py, plan_file.py). A plan file:

    question = "What do 16 bits on the wire bring?"
    time = "about 5 minutes on 2 cores"
    configurations = ["ddp-torchrun", "ddp-fp16"]
    workers = [2]
    flags = "--data synthetic --max-steps 50"     # for the trainers of all runs

    [configuration.ddp-fp16]                      # a configuration of your own
    base = "ddp-torchrun"
    flags = "--fp16-allreduce"                    # override the flags of all runs
    environment = { NCCL_ALGO = "Ring" }

    [case.vgg16]                                  # cases are never compared with each other
    flags = "--arch vgg16"

Instead of configurations, a plan can compare a user's own scripts, which import
compare/for_scripts/comparison_side.py:

    [side.mine]
    command = "torchrun --nproc-per-node 2 my_ddp.py {flags}"    # the plan's flags
    environment = { OMP_NUM_THREADS = "1" }
    directory = "../worktree"                     # where the command runs
    commit = "v1.0"                               # or in a worktree of a commit, made for it
    python = "../venv/bin/python"                 # whose environment comes first on PATH

    [goals]
    "mine:theirs" = 0.98                          # the speed ratio to reach
    "mine" = 3200                                 # the speed to reach, images/s
"""

import dataclasses
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from compare.for_scripts.comparison_side import DELAY
from compare.plan.blocks import balanced, side_by_side
from compare.plan.configurations import (
    CONFIGURATIONS,
    DEFAULT_CONFIGURATIONS,
    SCRIPT,
    Configuration,
)
from compare.plan.environment import ALLOCATIONS, is_only_here, path_from_here
from compare.plan.launchers import launch_words
from recipe.errors import UserError
from recipe.record.schema import Amount, Count, Text, Whole
from recipe.settings.flags import Config, given_flags

# Trainer flags that run.py sets itself, with the message for a user who gives them.
RESERVED_FLAGS = {
    "log_dir": "the plan sets where each run is written: use --out DIR before the --",
    "name": "the plan sets where each run is written: use --out DIR before the --",
    "resume": "every run starts from nothing",
    "evaluate": "a comparison trains",
}


class Share(float):
    """A fraction between 0 and 1, which people write as a percentage: 3%."""


class Words(tuple[str, ...]):
    """Flags as a list of words, which people write as one shell string."""


def decode(kind: type, value: Any) -> Any:
    """Return a Share or Words from the text that people write; raise ValueError if it is wrong."""
    if kind is Words:
        words = shlex.split(value) if isinstance(value, str) else value
        if not all(isinstance(word, str) for word in words):
            raise ValueError("write flags as in a shell")
        return Words(words)
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+) ?%", str(value))
    share = float(match[1]) / 100 if match else value
    if not isinstance(share, float) or not 0 < share < 1:
        raise ValueError("give a percentage between 0 % and 100 %, as in 2%")
    return Share(share)


def percentage(share: float) -> str:
    return f"{100 * share:g}%"


MOST = 10_000  # blocks; a larger number can only come from a damaged record
NOT_EMPTY = Meta(min_length=1)


def flag(text: str, metavar: str = "N", identifies: bool = False, name: str = "") -> Meta:
    """Return the metadata of a field that is a flag: its help, and whether another value makes it
    another comparison (`identifies`)."""
    return Meta(
        description=text, extra={"metavar": metavar, "identifies": identifies, "flag": name}
    )


class OwnConfiguration(Struct, frozen=True, forbid_unknown_fields=True):
    """A configuration that a plan defines: a ready one plus flags and environment variables."""

    base: str
    flags: Words = Words()
    environment: dict[str, str] = {}


class Case(Struct, frozen=True, forbid_unknown_fields=True):
    """A training on which configurations are compared: model, precision, batch, data."""

    flags: Words = Words()


class OwnScript(Struct, frozen=True, forbid_unknown_fields=True):
    """A user's own script: the command that starts all its ranks, and its environment variables.
    In the command {flags} stands for the plan's flags, {folder} for a folder to write to. Relative
    paths are seen from the folder in which run.py is started."""

    command: Words
    environment: dict[str, str] = {}
    directory: str = ""  # in which the command runs; "": where run.py does
    commit: str = ""  # of the directory's repository: a worktree of it replaces the directory
    python: str = ""  # an interpreter; the programs beside it come first on PATH

    def with_flags(self, flags: Sequence[str]) -> tuple[str, ...]:
        """Return the command with the plan's flags in the place of {flags}."""
        return tuple(
            word for part in self.command for word in (flags if part == "{flags}" else [part])
        )


@cache
def trainer_config(engine: str, workers: int, words: tuple[str, ...]) -> Config:
    """Return the settings that a trainer reads from its flags. UserError if it would refuse them;
    SystemExit after --help, or for a value that the parser does not accept."""
    from recipe.settings.config import read_flags  # loads the parser, which reports do without

    program = f"python {path_from_here('compare/run.py')} --"
    try:
        config, *_ = read_flags(engine, workers, list(words), talk=True, program=program)
    except UserError as error:
        raise UserError(f"the trainers refuse their flags: {error}") from None
    return config


@dataclass(frozen=True)
class Run:
    """One start of one trainer or of a user's script: a whole run, or a side of a block."""

    block: int  # 0: in no block
    configuration: Configuration
    workers: int
    seed: int | None  # None: the trainer's arguments hold the user's own --seed
    case: str = ""
    flags: tuple[str, ...] = ()  # of the plan, the case and the configuration; the last one counts
    hosts: str | None = None
    purpose: str = ""  # "warm-up" for a run in no block
    # In strong scaling, what all workers share: images per step, and the learning rate.
    global_batch_size: int | None = None
    global_learning_rate: float | None = None

    @property
    def name(self) -> str:
        return f"{self.configuration.name}-{self.workers}"

    @property
    def side(self) -> str:
        """The run's name among the sides of a comparison."""
        return self.configuration.name

    @property
    def cell(self) -> str:
        """The run's name within a block: each block repeats the same cells."""
        return f"{self.case}/{self.name}" if self.case else self.name

    @property
    def folder(self) -> str:
        """The trainer's folder, relative to the comparison's folder."""
        return f"{self.purpose or f'block-{self.block}'}/{self.cell}"

    @property
    def leaves_this_host(self) -> bool:
        return not is_only_here(self.workers + self.configuration.trained_by.servers, self.hosts)

    @property
    def is_script(self) -> bool:
        """Whether it starts a user's own script, which reports the end of each step itself."""
        return bool(self.configuration.command)

    @property
    def ablates(self) -> bool:
        """Whether its trainer can leave out the exchange of gradients."""
        return self.configuration.trained_by.ablates and not self.config.use_adasum

    @property
    def config(self) -> Config:
        """The settings of its trainer, as the trainer itself reads them."""
        return trainer_config(self.configuration.engine, self.workers, self.arguments)

    @property
    def arguments(self) -> tuple[str, ...]:
        """The trainer's flags, without the run's folder and its seed.

        In strong scaling the workers divide the global batch. The trainers multiply --base-lr by
        the number of workers and by --batches-per-allreduce. Here the global learning rate is
        divided by both, so any number of workers trains with the same rate. A gradual warm-up would
        begin at one worker's rate, which depends on the number of workers; a linear one begins at
        1 % of the global rate.
        """
        if self.global_batch_size is None or self.global_learning_rate is None:
            return self.flags
        config = trainer_config(self.configuration.engine, self.workers, self.flags)
        passes = self.workers * config.batches_per_allreduce
        share, rest = divmod(self.global_batch_size, passes)
        if rest:
            raise UserError(
                f"--global-batch-size {self.global_batch_size} cannot be shared equally by "
                f"{self.workers} workers ({passes} forward passes per step): give a multiple of "
                f"{passes}, or other --workers"
            )
        rate = self.global_learning_rate / passes
        warm_up = ("--warmup-method", "linear") if config.warmup_epochs else ()
        return (*self.flags, "--batch-size", str(share), "--base-lr", repr(rate), *warm_up)

    def command(self, log_dir: Path, name: str = "", through: Sequence[str] = ()) -> list[str]:
        """Return the command as a person would type it in the current directory. `name`: the name
        of the trainer's folder; `through`: a script that runs the trainer, if any."""
        configuration = self.configuration
        if configuration.command:
            words = [word.replace("{folder}", str(log_dir)) for word in configuration.command]
            where = ["-C", configuration.place] if configuration.place else []
            return ["env", *where, *configuration.assignments, *words]
        seed = [] if self.seed is None else ["--seed", str(self.seed)]
        return [
            *launch_words(configuration, self.workers, self.hosts),
            *through,
            path_from_here(configuration.trained_by.trainer),
            "--log-dir",
            str(log_dir),
            "--name",
            name or self.name,
            *seed,
            *self.arguments,
        ]


Status = Literal["completed", "failed", "timed out", "not run", "unreadable"]


@dataclass
class Outcome:
    """How a run ended, as run.py saw it."""

    status: Status = "completed"
    exit_code: int | None = None
    other_load: Amount | None = None  # cores that other processes kept busy; None: not measured
    seconds: Amount = 0.0  # from the launcher's start to its end; 0: not measured
    leftover_processes: int = 0  # processes that the launcher left behind; they were killed


class Plan(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is compared, and in which order. `check_plan` checks that it is valid."""

    question: Text | None = None
    time: Text | None = None  # how long it takes, according to the plan file
    configurations: Annotated[
        Annotated[tuple[str, ...], NOT_EMPTY],
        flag(
            f"configurations to compare: any of {', '.join(CONFIGURATIONS)}, and your own from "
            f"--define (default: {' '.join(DEFAULT_CONFIGURATIONS)}; without a plan, those of the "
            "plan square, or of square-nccl on GPUs)",
            "NAME",
            identifies=True,
        ),
    ] = DEFAULT_CONFIGURATIONS
    configuration: Annotated[
        dict[str, OwnConfiguration],
        flag(
            "define a configuration of your own: a ready one plus environment variables and "
            "trainer flags, as in --define 'tuned=horovod-mpi HOROVOD_CYCLE_TIME=1 "
            "--fp16-allreduce'",
            "'NAME=BASE [VARIABLE=VALUE ...] [flags]'",
            identifies=True,
            name="define",
        ),
    ] = {}
    case: Annotated[
        dict[str, Case],
        flag(
            "a training on which the configurations are compared, as in --case 'vgg16=--arch "
            "vgg16' (may be repeated)",
            "'NAME=flags'",
            identifies=True,
        ),
    ] = {}
    side: Annotated[
        dict[str, OwnScript],
        flag(
            "compare scripts of your own instead of configurations: one --side for each script, "
            "with the command that starts its ranks, as in --side 'mine=torchrun --nproc-per-node "
            "2 my_ddp.py'. The scripts import comparison_side.py (docs/ab-tests.md); {flags} in a "
            "command stands for the flags after the --. Before the command also directory=DIR, "
            "where it runs; commit=COMMIT, to run a commit of the repository there; python=FILE, "
            "the interpreter of its environment",
            "'NAME=[KEY=VALUE ...] [VARIABLE=VALUE ...] command'",
            identifies=True,
        ),
    ] = {}
    judged_pairs: Annotated[
        tuple[tuple[str, str], ...],
        flag(
            "pairs of configurations to judge against each other (default: each against the first)",
            "FIRST:SECOND",
            identifies=True,
        ),
    ] = msgspec.field(default=(), name="pairs")
    goals: Annotated[
        dict[str, float],
        flag(
            "the speed ratio that a pair must reach, as in --goals ddp:bare=0.985, or the speed "
            "that a side must reach, as in --goals ddp=3200; a pair with a goal is one of the "
            "pairs to judge",
            "FIRST:SECOND=RATIO",
            identifies=True,
        ),
    ] = {}
    null: Annotated[
        bool, flag("null test: compare each configuration with itself", "", identifies=True)
    ] = False
    control: Annotated[
        Share | None,
        flag(
            "with --null and --measure turns: also run the first configuration with turns that "
            "take P % longer; the comparison must find this known delay (default: none)",
            "P%",
            identifies=True,
        ),
    ] = None
    workers: Annotated[
        Annotated[tuple[Count, ...], NOT_EMPTY],
        flag("numbers of worker processes (default: 2)", identifies=True),
    ] = (2,)
    named_hosts: Annotated[
        str | None,
        flag(
            "hosts, each with its number of workers, or `slurm` for the hosts of this allocation "
            "(default: this host)",
            "HOST:N,...",
            identifies=True,
        ),
    ] = msgspec.field(default=None, name="hosts")
    network_interface: Annotated[
        str | None,
        flag(
            "the interface of the network that connects the hosts, such as eth0 (default: the "
            "launchers choose one)",
            "NAME",
            identifies=True,
        ),
    ] = None
    global_batch_size: Annotated[
        Count | None,
        flag(
            "strong scaling: images per step, over all workers (default: weak scaling, where each "
            "worker has its own --batch-size)",
            identifies=True,
        ),
    ] = None
    global_learning_rate: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        flag(
            "with --global-batch-size: the learning rate, the same for any number of workers",
            "RATE",
            identifies=True,
        ),
    ] = None
    trainer_arguments: Annotated[Words, Meta(extra={"identifies": True})] = msgspec.field(
        default=Words(), name="flags"
    )
    measure: Annotated[
        Literal["turns", "runs"],
        flag(
            "how to measure speed. turns (the default): start all configurations and let them take "
            "turns of half a second or three steps, which is much more exact on a noisy machine. "
            "runs: make whole runs, one after the other",
            "HOW",
            identifies=True,
        ),
    ] = "turns"
    steps: Annotated[
        Count | None,
        flag(
            "optimizer steps per turn (default: as many as take half a second, but at least 3)",
            identifies=True,
        ),
    ] = None
    rounds: Annotated[
        Whole | None,  # 0: of some early records of whole runs
        flag(
            "turns per side and block (default: as many as make the intervals narrowest when "
            "--minutes are over, at least 4; with --blocks: 8)",
            identifies=True,
            name="turns",
        ),
    ] = None
    warm_up_steps: Annotated[
        Count, flag("steps of each side before its first turn (default: 5)", identifies=True)
    ] = 5
    full_runs: Annotated[
        Annotated[int, Meta(ge=0, le=MOST)],
        flag(
            "with --measure turns: how often each configuration also trains from beginning to end, "
            "which shows what turns cannot: learning curves, final weights, memory (default: 1; 0: "
            "never)"
        ),
    ] = 1
    blocks: Annotated[
        Annotated[int, Meta(ge=1, le=MOST)] | None,
        flag(
            "measure exactly N blocks, each of which starts every configuration once (default: as "
            "many as --until-interval and --minutes require; an interval needs 3)"
        ),
    ] = None
    until_interval: Annotated[
        Share,
        flag(
            "add blocks until the interval of each pair's speed ratio is no wider than +-P % "
            "(default: 1.5%; give at most half of --margin, or equal speeds will hardly ever be "
            "shown to be equal)",
            "P%",
        ),
    ] = Share(0.015)
    minutes: Annotated[
        Annotated[float, Meta(gt=0, le=1e9)],
        flag(
            "stop adding blocks when they and the full runs have taken M minutes, but make at "
            "least three; time in which other processes used the cores does not count, but no "
            "block is added after twice M minutes in all (default: 10)",
            "M",
        ),
    ] = 10.0
    margin: Annotated[
        Share,
        flag(
            "call two speeds equal if the interval shows that they differ by less than P % "
            "(default: 3%)",
            "P%",
            identifies=True,
        ),
    ] = Share(0.03)
    margins: Annotated[
        dict[str, Share],
        flag(
            "a different margin for one pair, as in --margins ddp-mpi:horovod-mpi=1%",
            "FIRST:SECOND=P%",
            identifies=True,
        ),
    ] = {}
    target_top1: Annotated[
        Annotated[float, Meta(gt=0, le=100)] | None,
        flag(
            "of whole runs with several seeds: also judge how soon each configuration reaches this "
            "validation top-1. The trainers' --desired-acc ends the trainings there; with this "
            "they go on to their end, so that their final accuracies can be compared, too",
            "PERCENT",
            identifies=True,
        ),
    ] = None
    top1_goals: Annotated[
        dict[str, Annotated[float, Meta(gt=-100, lt=100)]],
        flag(
            "of whole runs with several seeds: the least difference of final top-1, first minus "
            "second in percentage points, that a pair must reach, as in --top1-goals "
            "fp16:fp32=-0.2, which allows fp16 to lose 0.2; the pair is one of the pairs to judge",
            "FIRST:SECOND=POINTS",
            identifies=True,
        ),
    ] = {}
    top1_margin: Annotated[
        Annotated[float, Meta(gt=0, le=100)],
        flag(
            "of whole runs with several seeds: call two final accuracies equal if the interval "
            "shows that they differ by less than so many percentage points of top-1 (default: 0.2)",
            "POINTS",
            identifies=True,
        ),
    ] = 0.2
    seed: Annotated[
        Whole,
        flag(
            "seed of the trainings: block b trains with seed N + b - 1 (default: 42)",
            identifies=True,
        ),
    ] = 42
    order_seed: Annotated[
        Whole | None,
        flag("seed of the order within blocks (default: a new one each time)", identifies=True),
    ] = None
    timeout: Annotated[
        Count,
        flag(
            "end a run that takes longer than this, counted from its launcher's start, and call it "
            "failed; the same holds for the start of the sides of a block of turns. Give more if "
            "data are listed for the first time on a slow file system (default: 1800; warm-ups: at "
            "least 600)",
            "SECONDS",
        ),
    ] = 1800
    no_phases: Annotated[
        bool,
        flag(
            "leave out the turns without gradient exchange, which measure the exposed "
            "communication of a step",
            "",
            identifies=True,
        ),
    ] = False
    # Not given by the user; run.py fills these in:
    plan_file: Text | None = None
    left_out: tuple[Text, ...] = ()  # configurations that cannot run here, e.g. without Horovod
    allocation: str | None = None  # the hosts of this batch job; the next job may get others
    blocks_there: Annotated[int, Meta(ge=0, le=MOST)] = 0  # blocks of whole runs begun so far

    @property
    def hosts(self) -> str | None:
        """The hosts of the workers, as "a:2,b:2"; None: this host."""
        return self.allocation if self.is_allocation else self.named_hosts

    @property
    def is_allocation(self) -> bool:
        return self.named_hosts in ALLOCATIONS

    @property
    def delay(self) -> Share | None:
        """The control's known delay, as a share of its turns; None without a control."""
        return self.control if self.null and self.measure == "turns" else None

    @property
    def cases(self) -> list[str]:
        """The names of the cases; [""] in a plan without cases."""
        return list(self.case) or [""]

    @property
    def shares_launch(self) -> bool:
        """Whether one launch of each side measures all cases: a user's own scripts are told which
        one is next. A trainer's case is part of its flags."""
        return bool(self.side and self.case)

    def known(self) -> dict[str, Configuration]:
        """Return all configurations that this plan may use, by name."""
        if self.side:
            return {
                name: Configuration(
                    name,
                    SCRIPT,
                    SCRIPT,
                    environment=own.environment,
                    command=own.with_flags(self.trainer_arguments),
                    directory=own.directory,
                    commit=own.commit,
                    python=own.python,
                )
                for name, own in self.side.items()
            }
        return CONFIGURATIONS | {
            name: dataclasses.replace(
                CONFIGURATIONS[own.base], name=name, flags=own.flags, environment=own.environment
            )
            for name, own in self.configuration.items()
        }

    def members(self) -> list[Configuration]:
        """Return the configurations that run. A null test runs each one twice, under two names,
        and a control adds the first one with the known delay."""
        known, nic = self.known(), self.network_interface
        chosen = [dataclasses.replace(known[name], interface=nic) for name in self.configurations]
        if not self.null:
            return chosen
        again = [dataclasses.replace(member, name=f"{member.name}-again") for member in chosen]
        twins = [twin for both in zip(chosen, again, strict=True) for twin in both]
        if self.delay is not None:
            first = chosen[0]
            name, delayed = f"{first.name}-delayed", first.environment | {DELAY: f"{self.delay:g}"}
            twins.append(dataclasses.replace(first, name=name, environment=delayed))
        return twins

    @property
    def names(self) -> list[str]:
        """The names of the configurations that run."""
        return [member.name for member in self.members()]

    @property
    def varied(self) -> list[str]:
        """The field names of the settings that some configuration sets by its own flags."""
        return list(given_flags([word for member in self.members() for word in member.flags]))

    @property
    def flag_lists(self) -> list[tuple[str, ...]]:
        """All lists of trainer flags: of all runs, of cases, of configurations."""
        of_cases = [case.flags for case in self.case.values()]
        own = [configuration.flags for configuration in self.configuration.values()]
        return [self.trainer_arguments, *of_cases, *own]

    @property
    def most_ranks(self) -> int:
        """The number of ranks of the largest run, including parameter servers."""
        return max(self.workers) + max(member.trained_by.servers for member in self.members())

    def pairs(self) -> list[tuple[str, str]]:
        """Return the pairs of configurations to judge; the control's pair comes last."""
        first, *others = self.configurations
        if self.null:
            delayed = [(first, f"{first}-delayed")] if self.delay is not None else []
            return [*((name, f"{name}-again") for name in self.configurations), *delayed]
        with_goals = [(a, b) for a, _, b in (key.partition(":") for key in self.goals) if b]
        asked = [*dict.fromkeys((*self.judged_pairs, *with_goals))]
        for key in self.top1_goals:  # of two goals for both directions one pair
            a, _, b = key.partition(":")
            if (a, b) not in asked and (b, a) not in asked:
                asked.append((a, b))
        return asked or [(first, other) for other in others]

    def margin_of(self, pair: tuple[str, str]) -> float:
        """Return the pair's margin: speeds that differ by less than this share count as equal."""
        return self.margins.get(":".join(pair), self.margin)

    @property
    def end(self) -> tuple[Any, ...]:
        """The end rule as numbers: blocks, 1 - width of the interval, minutes. If all numbers of a
        plan are at least those of another, it ends no earlier. A fixed number of blocks and a rule
        are incomparable: neither surely ends later."""
        return (
            (0, 1 - self.until_interval, self.minutes)
            if self.blocks is None
            else (self.blocks, 0, 0)
        )

    @property
    def run_blocks(self) -> int:
        """The number of blocks of whole runs to make; a user's own scripts have none."""
        if self.side:
            return 0
        whole = self.blocks or max(1, self.blocks_there)
        return self.full_runs if self.measure == "turns" else whole

    def runs(self) -> list[Run]:
        """Return all whole runs, block by block."""
        return [run for block in range(1, self.run_blocks + 1) for run in self.block(block)]

    def block(self, block: int) -> list[Run]:
        """Return the whole runs of a block, which holds every configuration once.

        Runs that are compared are neighbours. The order depends on the block alone, so a plan with
        more blocks begins with the same runs.

        All runs of a block train with the same seed, or the engines would not do the same
        training. Each block has a different seed: with a single one, all blocks would repeat the
        same training, bit by bit, and top-1 would show no spread, as if it were certain.
        """
        return [
            run
            for case, workers in balanced(self.groups(), block, self.order_seed)
            for run in self.in_order(block, case, workers)
        ]

    def groups(self) -> list[tuple[str, int]]:
        """Return each case at each number of workers: the groups within which configurations are
        compared. Only its command knows how many workers a user's own script has: 0 here."""
        workers = (0,) if self.side else self.workers
        return [(case, number) for case in self.cases for number in workers]

    def in_order(self, block: int, case: str, workers: int) -> list[Run]:
        """Return a run of each configuration, in the order of this block. Configurations that are
        judged against each other are neighbours; over the blocks, none is early more often than
        another."""
        members = {configuration.name: configuration for configuration in self.members()}
        place = (self.order_seed, case, workers)
        groups = balanced(side_by_side(members, self.pairs()), block, *place)
        # Each order within a group is combined with each order of the groups. So both ends of a
        # group are equally often at the edge of the block, where a side has two turns in a row.
        number = 2 * ((block - 1) // 2 // len(groups)) + 2 - block % 2
        return [
            self.run(block, case, members[name], workers)
            for group in groups
            for name in balanced(group, number, *place, group[0])
        ]

    def run(
        self,
        block: int,
        case: str,
        configuration: Configuration,
        workers: int,
        purpose: str = "",
    ) -> Run:
        """Return one run."""
        of_case = self.case[case].flags if case else ()
        flags = (*self.trainer_arguments, *of_case, *configuration.arguments)
        seed = None if "seed" in given_flags(flags) else self.seed + max(block, 1) - 1
        return Run(
            block,
            configuration,
            workers,
            seed,
            case,
            flags,
            self.hosts,
            purpose,
            self.global_batch_size,
            self.global_learning_rate,
        )

    def warm_up_runs(self) -> list[Run]:
        """Return one warm-up run for each engine and case, with the largest number of workers;
        none where turns measure speed, since each side of a block has a warm-up of its own.

        Its figures are discarded. It fills the file caches, which would otherwise slow the engine
        that comes first, and it finds a broken set-up in seconds.
        """
        firsts = dict[str, Configuration]()
        for member in self.members() if self.measure == "runs" else ():
            firsts.setdefault(member.engine, member)
        most = max(self.workers)
        return [
            self.run(0, case, first, most, "warm-up")
            for case in self.cases
            for first in firsts.values()
        ]


SIDE_RUN = Path("0", "run")  # the run folder of a side of turns, within the side's folder


def block_place(case: str, workers: int, number: int) -> Path:
    """Return the folder of a block of turns, relative to the comparison's folder."""
    return Path("turns", case, f"{workers}-workers" if workers else "", f"block-{number}")


FIELDS = msgspec.structs.fields(Plan)
NOT_WRITTEN = ("plan_file", "left_out", "allocation", "blocks_there")
# The keys of a plan file.
KEYS = [*(f.encode_name for f in FIELDS if f.name not in NOT_WRITTEN), "hostfile"]


def meta_of(kind: Any) -> Meta:
    """Return the metadata of a field's type, such as its help."""
    metadata = [meta for meta in getattr(kind, "__metadata__", ()) if isinstance(meta, Meta)]
    return metadata[-1] if metadata else Meta()
