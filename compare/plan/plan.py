"""The plan of a comparison: each field declared once, and the runs that it asks for.

What stands on a field (its type with bounds, its help, whether it identifies a comparison) makes
the keys of a plan file, the flags of run.py, plan.json, and the differences between two plans
(compare/run.py, plan_file.py). A plan file names the fields:

    question = "What do 16 bits on the wire bring?"
    time = "about 5 minutes on 2 cores"
    configurations = ["ddp-torchrun", "ddp-fp16"]
    workers = [2]
    flags = "--data synthetic --max-steps 50"     # the trainers', of all runs

    [configuration.ddp-fp16]                      # one of one's own
    base = "ddp-torchrun"
    flags = "--fp16-allreduce"                    # come after those of all runs, and win
    environment = { NCCL_ALGO = "Ring" }

    [case.vgg16]                                  # each case is compared by itself
    flags = "--arch vgg16"

Or scripts of a user's own, which call compare/side.py, in place of configurations:

    [side.mine]
    command = "torchrun --nproc-per-node 2 my_ddp.py {flags}"    # the flags of all
    environment = { OMP_NUM_THREADS = "1" }

    [goals]
    "mine:theirs" = 0.98                          # the ratio of speeds that is asked for
    "mine" = 3200                                 # images/s
"""

import dataclasses
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from compare.plan.blocks import DELAY, ROUNDS, balanced, side_by_side
from compare.plan.configurations import (
    CONFIGURATIONS,
    DEFAULT_CONFIGURATIONS,
    SCRIPT,
    Configuration,
)
from compare.plan.environment import SLURM, is_only_here, path_from_here
from recipe.errors import UserError
from recipe.record.schema import Amount, Count, Text, Whole
from recipe.settings.flags import flag_name, last_value

# Flags by which run.py itself steers a trainer, and what the user is told instead.
RESERVED_FLAGS = {
    "--log-dir": "the plan sets where each run is written: use --out DIR before the --",
    "--name": "the plan sets where each run is written: use --out DIR before the --",
    "--resume": "every run starts from nothing",
    "--evaluate": "a comparison trains",
}


class Share(float):
    """A part of one, which people write as a percentage: 3%."""


class Words(tuple[str, ...]):
    """Flags, which people write as in a shell."""


def decode(kind: type, value: Any) -> Any:
    """Read a Share or Words as people write them; ValueError says what is wrong."""
    if kind is Words:
        words = shlex.split(value) if isinstance(value, str) else value
        if not all(isinstance(word, str) for word in words):
            raise ValueError("write flags as in a shell")
        return Words(words)
    found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+) ?%", str(value))
    share = float(found[1]) / 100 if found else value
    if not isinstance(share, float) or not 0 < share < 1:
        raise ValueError("give a percentage between 0 % and 100 %, as in 2%")
    return Share(share)


def percentage(share: float) -> str:
    return f"{100 * share:g}%"


MOST = 10_000  # blocks: more would only be the number of a damaged plan.json
NOT_EMPTY = Meta(min_length=1)


def flag(text: str, metavar: str = "N", identifies: bool = False, name: str = "") -> Meta:
    """Return what stands on a field that is a flag: its help, and whether other values make
    another comparison."""
    return Meta(
        description=text, extra={"metavar": metavar, "identifies": identifies, "flag": name}
    )


class OwnConfiguration(Struct, frozen=True, forbid_unknown_fields=True):
    """A configuration that a plan defines: a ready one with flags and variables."""

    base: str
    flags: Words = Words()
    environment: dict[str, str] = {}


class Case(Struct, frozen=True, forbid_unknown_fields=True):
    """A training that configurations are compared on: model, precision, batch, data."""

    flags: Words = Words()


class OwnScript(Struct, frozen=True, forbid_unknown_fields=True):
    """A script of a user's own: the command that starts all its ranks, and its variables. In the
    command {flags} stands for the plan's flags, {folder} for where it may write."""

    command: Words
    environment: dict[str, str] = {}

    def with_flags(self, flags: Sequence[str]) -> tuple[str, ...]:
        """The command with the plan's flags in it."""
        return tuple(
            word for own in self.command for word in (flags if own == "{flags}" else [own])
        )


@dataclass(frozen=True)
class Run:
    """One start of one trainer: the unit of evidence."""

    block: int  # 0: none
    configuration: Configuration
    workers: int
    seed: int | None  # None: the user's own --seed stands among the trainer's arguments
    case: str = ""
    arguments: tuple[str, ...] = ()  # the trainer's, all but the run's place and its seed
    hosts: str | None = None
    purpose: str = ""  # of a run in no block: to warm up

    @property
    def name(self) -> str:
        return f"{self.configuration.name}-{self.workers}"

    @property
    def side(self) -> str:
        """Its name beside those with which it takes turns."""
        return self.configuration.name

    @property
    def cell(self) -> str:
        """What is repeated in each block."""
        return f"{self.case}/{self.name}" if self.case else self.name

    @property
    def folder(self) -> str:
        """Where the trainer writes, seen from the comparison's folder."""
        return f"{self.purpose or f'block-{self.block}'}/{self.cell}"

    @property
    def leaves_this_host(self) -> bool:
        return not is_only_here(self.workers + self.configuration.trained_by.servers, self.hosts)

    @property
    def is_script(self) -> bool:
        """Whether it starts a script of a user's own, which says when a step has ended."""
        return bool(self.configuration.command)

    @property
    def ablates(self) -> bool:
        """Whether its trainer can leave out the exchange of gradients."""
        is_adasum = "--use-adasum" in map(flag_name, self.arguments)
        return self.configuration.trained_by.ablates and not is_adasum

    def command(self, log_dir: Path, name: str = "", through: Sequence[str] = ()) -> list[str]:
        """Return the command for the current directory, as a person would type it there. `name`: of
        the trainer's folder; `through`: the script, if there is one, that is to run the trainer."""
        own = self.configuration
        if own.command:
            words = [word.replace("{folder}", str(log_dir)) for word in own.command]
            return ["env", *own.assignments, *words]
        seed = [] if self.seed is None else ["--seed", str(self.seed)]
        return [
            *own.launch_words(self.workers, self.hosts), *through,
            path_from_here(own.trained_by.trainer), "--log-dir", str(log_dir),
            "--name", name or self.name, *seed, *self.arguments,
        ]  # fmt: skip


Status = Literal["completed", "failed", "timed out", "not run", "interrupted", "unreadable"]


@dataclass
class Outcome:
    """outcome.json: how run.py saw a run end."""

    status: Status = "completed"
    exit_code: int | None = None
    other_load: Amount | None = None  # cores that other processes kept busy; None: not measured
    seconds: Amount = 0.0  # from its launcher's start to its end; 0: not measured
    leftover_processes: int = 0  # that the launcher left behind, and that were killed
    digest: str = ""  # of a complete run's seal: compare/evidence/chain.py


class Plan(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is compared, and in which order. `check_plan` tells whether it is valid."""

    question: Text | None = None
    time: Text | None = None  # that its file says it takes
    configurations: Annotated[
        Annotated[tuple[str, ...], NOT_EMPTY],
        flag(
            f"any of {', '.join(CONFIGURATIONS)}, and your own (default: "
            f"{' '.join(DEFAULT_CONFIGURATIONS)}; without a plan those of the plan square, on GPUs "
            "of square-nccl)",
            "NAME",
            identifies=True,
        ),
    ] = DEFAULT_CONFIGURATIONS
    configuration: Annotated[
        dict[str, OwnConfiguration],
        flag(
            "a configuration of your own: a ready one with environment variables and trainer "
            "flags, as in --define 'tuned=horovod-mpi HOROVOD_CYCLE_TIME=1 --fp16-allreduce'",
            "'NAME=BASE [VARIABLE=VALUE ...] [flags]'",
            identifies=True,
            name="define",
        ),
    ] = {}
    case: Annotated[
        dict[str, Case],
        flag(
            "a training that the configurations are compared on, as in --case 'vgg16=--arch "
            "vgg16' (may be repeated)",
            "'NAME=flags'",
            identifies=True,
        ),
    ] = {}
    side: Annotated[
        dict[str, OwnScript],
        flag(
            "a script of your own, which calls compare/side.py, by the command that starts its "
            "ranks, as in --side 'mine=torchrun --nproc-per-node 2 my_ddp.py'; in place of "
            "configurations (to be given for each). {flags} in it stands for what follows --",
            "'NAME=[VARIABLE=VALUE ...] command'",
            identifies=True,
        ),
    ] = {}
    judged_pairs: Annotated[
        tuple[tuple[str, str], ...],
        flag(
            "configurations that are judged against each other (default: each against the first)",
            "FIRST:SECOND",
            identifies=True,
        ),
    ] = msgspec.field(default=(), name="pairs")
    goals: Annotated[
        dict[str, float],
        flag(
            "the ratio of speeds that a pair is to reach, as in --goals ddp:bare=0.985, or a "
            "side's speed, as in --goals ddp=3200; the pairs with goals are those that are judged",
            "FIRST:SECOND=RATIO",
            identifies=True,
        ),
    ] = {}
    null: Annotated[bool, flag("compare each configuration with itself", "", identifies=True)] = (
        False
    )
    control: Annotated[
        Share | None,
        flag(
            "with --null, by turns: the first configuration once more, with turns that take P % "
            "longer: a known delay, which must be found (default: none)",
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
            "hosts with the number of workers that each takes, or `slurm`: those of this "
            "allocation (default: this host)",
            "HOST:N,...",
            identifies=True,
        ),
    ] = msgspec.field(default=None, name="hosts")
    network_interface: Annotated[
        str | None,
        flag(
            "the network that connects the hosts, such as eth0 (default: the launchers look for "
            "one)",
            "NAME",
            identifies=True,
        ),
    ] = None
    global_batch_size: Annotated[
        Count | None,
        flag(
            "strong scaling: images a step of all workers together (default: weak scaling, each "
            "worker has its own --batch-size)",
            identifies=True,
        ),
    ] = None
    global_learning_rate: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        flag(
            "with --global-batch-size: the learning rate, whatever the number of workers",
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
            "what speed is measured by: all configurations at once, which take turns of half a "
            "second (turns, the default: much the more exact on a noisy machine), or whole runs, "
            "one after the other (runs)",
            "HOW",
            identifies=True,
        ),
    ] = "turns"
    steps: Annotated[
        Count | None,
        flag("optimizer steps of a turn (default: as many as take half a second)", identifies=True),
    ] = None
    rounds: Annotated[
        Whole, flag("turns of each side in a block (default: 8)", identifies=True, name="turns")
    ] = ROUNDS
    warm_up_steps: Annotated[
        Count, flag("steps of each side before its first turn (default: 5)", identifies=True)
    ] = 5
    full_runs: Annotated[
        Annotated[int, Meta(ge=0, le=MOST)],
        flag(
            "with turns: how often each configuration also trains from beginning to end, for what "
            "turns cannot see: learning curves, final weights, memory (default: 1; 0: not at all)"
        ),
    ] = 1
    blocks: Annotated[
        Annotated[int, Meta(ge=1, le=MOST)] | None,
        flag(
            "measure in so many blocks (default: as many as --until-interval and --minutes ask "
            "for; an interval needs 3). Each block starts each configuration once"
        ),
    ] = None
    until_interval: Annotated[
        Share,
        flag(
            "add blocks until the 95 % interval of each pair's speed ratio is no wider than +-P % "
            "(default: 1.5%; half the margin, or equal speeds are hardly ever shown to be equal)",
            "P%",
        ),
    ] = Share(0.015)
    minutes: Annotated[
        Annotated[float, Meta(gt=0, le=1e9)],
        flag(
            "add no block after so many minutes of undisturbed measuring, but three at least; "
            "time in which others used the cores does not count (default: 10)",
            "M",
        ),
    ] = 10.0
    margin: Annotated[
        Share,
        flag(
            "two speeds count as equal if the interval shows that they differ by less than P % "
            "(default: 3%)",
            "P%",
            identifies=True,
        ),
    ] = Share(0.03)
    margins: Annotated[
        dict[str, Share],
        flag(
            "another margin for one of the pairs, as in --margins ddp-mpi:horovod-mpi=1%",
            "FIRST:SECOND=P%",
            identifies=True,
        ),
    ] = {}
    seed: Annotated[
        Whole,
        flag(
            "of the trainings: block b trains with the seed N + b - 1 (default: 42)",
            identifies=True,
        ),
    ] = 42
    order_seed: Annotated[
        Whole | None,
        flag("of the order within blocks (default: another one each time)", identifies=True),
    ] = None
    timeout: Annotated[
        Count,
        flag(
            "a run that takes longer, from its launcher's start on, is ended and counts as "
            "failed, and so does a block of turns whose sides take longer to start; give more "
            "where data are listed for the first time on a slow file system (default: 1800; "
            "warm-ups: at least 600)",
            "SECONDS",
        ),
    ] = 1800
    no_phases: Annotated[
        bool,
        flag(
            "leave out the turns without the exchange of gradients, which show what of a step is "
            "exposed communication",
            "",
            identifies=True,
        ),
    ] = False
    # What no one writes, but run.py finds out:
    plan_file: Text | None = None
    left_out: tuple[Text, ...] = ()  # configurations that cannot run here, without Horovod say
    allocation: str | None = None  # the hosts of this Slurm job; the next one's may be others
    blocks_there: Annotated[int, Meta(ge=0, le=MOST)] = 0  # of whole runs, that were begun so far

    @property
    def hosts(self) -> str | None:
        """Where the workers run, as "a:2,b:2"; None: on this host."""
        return self.allocation if self.named_hosts == SLURM else self.named_hosts

    @property
    def is_allocation(self) -> bool:
        return self.named_hosts == SLURM

    @property
    def delay(self) -> Share | None:
        """The control's known delay, as a share of its turns; None where there is none."""
        return self.control if self.null and self.measure == "turns" else None

    @property
    def cases(self) -> list[str]:
        """The cases' names; the one name "" in a plan without cases."""
        return list(self.case) or [""]

    def known(self) -> dict[str, Configuration]:
        """Return all configurations that this plan may name."""
        if self.side:
            return {
                name: Configuration(
                    name,
                    SCRIPT,
                    SCRIPT,
                    environment=own.environment,
                    command=own.with_flags(self.trainer_arguments),
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
        """Return the configurations that run; in a null test each runs again, as another one, and
        the first one with the known delay."""
        known, nic = self.known(), self.network_interface
        chosen = [dataclasses.replace(known[name], interface=nic) for name in self.configurations]
        if not self.null:
            return chosen
        again = [dataclasses.replace(one, name=f"{one.name}-again") for one in chosen]
        twins = [twin for both in zip(chosen, again, strict=True) for twin in both]
        if self.delay is not None:
            first = chosen[0]
            name, own = f"{first.name}-delayed", first.environment | {DELAY: f"{self.delay:g}"}
            twins.append(dataclasses.replace(first, name=name, environment=own))
        return twins

    @property
    def names(self) -> list[str]:
        """The names of what runs."""
        return [member.name for member in self.members()]

    @property
    def varied(self) -> list[str]:
        """The settings that configurations give by flags of their own, by their field's name."""
        flags = [flag_name(word) for member in self.members() for word in member.flags]
        names = [flag.removeprefix("--").removeprefix("no-").replace("-", "_") for flag in flags]
        return list(dict.fromkeys(name for name in names if name))

    @property
    def flag_lists(self) -> list[tuple[str, ...]]:
        """All lists of flags for the trainers: of all runs, of cases, of configurations."""
        own = [one.flags for one in self.configuration.values()]
        return [self.trainer_arguments, *(one.flags for one in self.case.values()), *own]

    @property
    def most_ranks(self) -> int:
        """How many ranks the largest start has, its servers among them."""
        return max(self.workers) + max(one.trained_by.servers for one in self.members())

    def pairs(self) -> list[tuple[str, str]]:
        """Return which configurations are judged against each other; the control comes last."""
        first, *others = self.configurations
        if self.null:
            delayed = [(first, f"{first}-delayed")] if self.delay is not None else []
            return [*((name, f"{name}-again") for name in self.configurations), *delayed]
        with_goals = [(a, b) for a, _, b in (key.partition(":") for key in self.goals) if b]
        return list(self.judged_pairs) or with_goals or [(first, other) for other in others]

    def margin_of(self, pair: tuple[str, str]) -> float:
        """Return within which share of each other two speeds count as equal."""
        return self.margins.get(":".join(pair), self.margin)

    @property
    def end(self) -> tuple[Any, ...]:
        """What ends the measuring, as numbers: blocks, narrowness and minutes. A plan whose numbers
        are all at least another's ends no earlier. A number of blocks and a rule cannot be
        compared: each has a number that is less."""
        return (
            (0, 1 - self.until_interval, self.minutes)
            if self.blocks is None
            else (self.blocks, 0, 0)
        )

    @property
    def run_blocks(self) -> int:
        """How many blocks of whole runs there are to be; scripts of a user's own have none."""
        if self.side:
            return 0
        whole = self.blocks or max(1, self.blocks_there)
        return self.full_runs if self.measure == "turns" else whole

    def runs(self) -> list[Run]:
        """Return all whole runs, block by block."""
        return [run for block in range(1, self.run_blocks + 1) for run in self.block(block)]

    def block(self, block: int) -> list[Run]:
        """Return the whole runs of a block, which holds every configuration once.

        What is compared stands side by side, in an order that is the block's own, so that a plan
        with more blocks begins with the same runs.

        Within a block every run trains with the same seed, else the engines would not do the same
        training; each block has another one. Blocks with one seed would repeat one training, bit
        by bit, and show a top-1 without any spread, as if it were certain.
        """
        return [
            run
            for case, workers in balanced(self.groups(), block, self.order_seed)
            for run in self.in_order(block, case, workers)
        ]

    def groups(self) -> list[tuple[str, int]]:
        """Return each case at each number of workers: within these, configurations are compared.
        How many workers a script of a user's own has, only its command knows: 0."""
        if self.side:
            return [("", 0)]
        return [(case, workers) for case in self.cases for workers in self.workers]

    def in_order(self, block: int, case: str, workers: int) -> list[Run]:
        """Return a run of each configuration, in their order in a block: those that are judged
        against each other side by side, and none oftener early than another."""
        members = {configuration.name: configuration for configuration in self.members()}
        place = (self.order_seed, case, workers)
        groups = balanced(side_by_side(members, self.pairs()), block, *place)
        # Each order within a group meets all of the groups: each end of it is equally often at the
        # edge of the block, where a side has two turns in a row.
        own = 2 * ((block - 1) // 2 // len(groups)) + 2 - block % 2
        return [
            self.run(block, case, members[name], workers)
            for group in groups
            for name in balanced(group, own, *place, group[0])
        ]

    def run(
        self,
        block: int,
        case: str,
        configuration: Configuration,
        workers: int,
        purpose: str = "",
    ) -> Run:
        """Return one run; what stands later among its arguments wins."""
        of_case = self.case[case].flags if case else ()
        arguments = (*self.trainer_arguments, *of_case, *configuration.arguments)
        own_seed = last_value(arguments, "--seed") is not None
        seed = None if own_seed else self.seed + max(block, 1) - 1
        if self.global_batch_size is not None:
            arguments = (*arguments, *self.share_of_global_batch(arguments, workers))
        return Run(block, configuration, workers, seed, case, arguments, self.hosts, purpose)

    def share_of_global_batch(self, arguments: Sequence[str], workers: int) -> list[str]:
        """Return the flags by which `workers` workers share the global batch (strong scaling).

        The trainers multiply --base-lr by the number of workers and by --batches-per-allreduce, so
        the global rate is divided by both: then any number of workers trains with the same rate. A
        gradual warm-up would begin at one worker's rate, which is another one at each number of
        workers; a linear one begins at 1 % of the global rate.
        """
        assert self.global_batch_size is not None and self.global_learning_rate is not None
        passes = workers * int(last_value(arguments, "--batches-per-allreduce") or 1)
        share, rest = divmod(self.global_batch_size, passes)
        if rest:
            raise UserError(
                f"--global-batch-size {self.global_batch_size} cannot be shared equally by "
                f"{workers} workers ({passes} forward passes a step): give a multiple of {passes}, "
                "or other --workers"
            )
        flags = ["--batch-size", str(share), "--base-lr", repr(self.global_learning_rate / passes)]
        if last_value(arguments, "--warmup-epochs") not in ("0", "0.0"):
            flags += ["--warmup-method", "linear"]
        return flags

    def warm_up_runs(self) -> list[Run]:
        """Return one run for each engine and case, at its most workers; its figures are thrown
        away.

        It pays for cold file caches, which would otherwise fall on whichever engine comes first,
        and it finds a broken set-up in seconds.
        """
        firsts = dict[str, Configuration]()
        for one in () if self.side else self.members():
            firsts.setdefault(one.engine, one)
        most = max(self.workers)
        return [
            self.run(0, case, one, most, "warm-up")
            for case in self.cases
            for one in firsts.values()
        ]


def turns_place(case: str, workers: int) -> Path:
    """Return where in a comparison's folder the blocks of turns of one group are."""
    return Path("turns", case, f"{workers}-workers" if workers else "")


FIELDS = msgspec.structs.fields(Plan)
NOT_WRITTEN = ("plan_file", "left_out", "allocation", "blocks_there")
# The keys of a plan file.
KEYS = [*(f.encode_name for f in FIELDS if f.name not in NOT_WRITTEN), "hostfile"]


def meta_of(kind: Any) -> Meta:
    """Return what stands on a field, its help among it."""
    found = [meta for meta in getattr(kind, "__metadata__", ()) if isinstance(meta, Meta)]
    return found[-1] if found else Meta()
