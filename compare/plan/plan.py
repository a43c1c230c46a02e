"""The plan of a comparison: which configuration runs in which block, and by which command."""

import hashlib
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from compare.plan.blocks import balanced, side_by_side
from compare.plan.configurations import CONFIGURATIONS, DEFAULT_CONFIGURATIONS, Configuration
from compare.plan.hosts import SLURM, is_only_here
from compare.plan.sources import ROOT
from recipe.errors import UserError
from recipe.flags import flag_name, last_value, without_flag

TRAINERS = {one.engine: f"baselines/{one.engine}.py" for one in CONFIGURATIONS.values()} | {
    "ddp": "ddp_train/train.py",
    "horovod": "horovod_train/train.py",
    "mpi4py": "baselines/mpi4py_train.py",
}

# Flags by which run.py itself steers a trainer, and what the user is told instead.
RESERVED_FLAGS = {
    "--log-dir": "the plan sets where each run is written: use --out DIR before the --",
    "--name": "the plan sets where each run is written: use --out DIR before the --",
    "--resume": "every run starts from nothing",
    "--evaluate": "a comparison trains",
    "--ablation-steps": "it would measure steps without communication; runs of their own do that "
    "after the blocks (--phase-steps)",
}

ABLATION_STEPS = 10  # length of a stretch with the exchange of gradients, and of one without
MEASURES = ("turns", "runs")  # what speed is measured by: sides that take turns, or whole runs


@dataclass(frozen=True)
class Case:
    """A training that configurations are compared on: model, precision, batch, data."""

    name: str = ""
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Run:
    """One start of one trainer: the unit of evidence."""

    block: int  # 0: none, the run shows the phases of a step
    configuration: Configuration
    workers: int
    seed: int | None  # None: the user's own --seed stands among the trainer's arguments
    case: str = ""
    arguments: tuple[str, ...] = ()  # the trainer's, all but the run's place and its seed
    hosts: str | None = None

    @property
    def name(self) -> str:
        return f"{self.configuration.name}-{self.workers}"

    @property
    def cell(self) -> str:
        """What is repeated in each block."""
        return f"{self.case}/{self.name}" if self.case else self.name

    @property
    def folder(self) -> str:
        """Where the trainer writes, seen from the comparison's folder."""
        return f"block-{self.block}/{self.cell}" if self.block else f"phases/{self.cell}"

    @property
    def leaves_this_host(self) -> bool:
        return not is_only_here(self.workers + self.configuration.servers, self.hosts)

    def command(self, log_dir: Path) -> list[str]:
        """Return the command for the current directory, as a person would type it there."""
        trainer = ROOT / TRAINERS[self.configuration.engine]
        if trainer.is_relative_to(Path.cwd()):
            trainer = trainer.relative_to(Path.cwd())
        job = hashlib.sha256(str(log_dir.resolve() / self.name).encode()).hexdigest()[:12]
        words = [*self.configuration.launch_words(self.workers, self.hosts, job), str(trainer)]
        words += ["--log-dir", str(log_dir), "--name", self.name]
        if self.seed is not None:
            words += ["--seed", str(self.seed)]
        return [*words, *self.arguments]


@dataclass(frozen=True)
class Plan:
    """What is compared, and in which order. `check_plan` tells whether it can be meant."""

    configurations: tuple[str, ...] = DEFAULT_CONFIGURATIONS
    workers: tuple[int, ...] = (2,)
    measure: str = "turns"  # or "runs", see MEASURES
    full_runs: int = 1  # blocks of whole runs beside turns: for what turns cannot see
    blocks: int | None = None  # in which speed is measured; None: as many as it takes
    until_interval: float = 0.03  # that ends the blocks: half the width of every 95 % interval
    minutes: float = 10.0  # that end them, too
    margin: float = 0.03  # within which two speeds count as equal
    seed: int = 42  # of the trainings
    order_seed: int | None = None  # of the order in blocks; None: run.py draws one
    blocks_there: int = 0  # of whole runs, that were begun because their number is open
    trainer_arguments: tuple[str, ...] = ()
    cases: tuple[Case, ...] = (Case(),)
    defined: tuple[Configuration, ...] = ()  # by the plan itself, beside CONFIGURATIONS
    judged_pairs: tuple[tuple[str, str], ...] = ()  # empty: each against the first
    global_batch_size: int | None = None  # of all workers together: strong scaling
    global_learning_rate: float | None = None
    hosts: str | None = None  # "a:2,b:2"; None: this host
    is_allocation: bool = False  # `hosts` are this Slurm job's: the next one's may be others
    network_interface: str | None = None  # between the hosts; None: the launchers find one
    null: bool = False
    phase_steps: int = 120  # 0: no runs that show the phases of a step
    timeout: int = 1800  # seconds
    question: str | None = None
    plan_file: str | None = None
    time: str | None = None  # that its file says it takes
    left_out: tuple[str, ...] = ()  # configurations that cannot run here, since Horovod is missing

    def known(self) -> dict[str, Configuration]:
        """Return all configurations that this plan may name."""
        return CONFIGURATIONS | {
            configuration.name: configuration for configuration in self.defined
        }

    def members(self) -> list[Configuration]:
        """Return the configurations that run; in a null test each runs again, as another one."""
        nic = self.network_interface
        chosen = [replace(self.known()[name], interface=nic) for name in self.configurations]
        if not self.null:
            return chosen
        return [twin for c in chosen for twin in (c, replace(c, name=f"{c.name}-again"))]

    @property
    def most_ranks(self) -> int:
        """Return how many ranks the largest start has, its servers among them."""
        return max(self.workers) + max(configuration.servers for configuration in self.members())

    def pairs(self) -> list[tuple[str, str]]:
        """Return which configurations are judged against each other."""
        if self.null:
            return [(name, f"{name}-again") for name in self.configurations]
        first, *others = self.configurations
        return list(self.judged_pairs) or [(first, other) for other in others]

    def words(self) -> list[str]:
        """Return the flags of run.py that make this plan; those that would say what it does anyway
        are left out."""
        words = ["--configurations", *self.configurations]
        for name in self.configurations:
            if name not in CONFIGURATIONS:
                words += ["--define", self.known()[name].definition()]
        for case in self.cases:
            if case.name:
                words += ["--case", f"{case.name}={shlex.join(case.flags)}"]
        if self.null:
            words.append("--null")
        elif self.judged_pairs:
            words += ["--pairs", *map(":".join, self.judged_pairs)]
        words += ["--workers", *map(str, self.workers)]
        words += [*self.repetition_words(), "--seed", str(self.seed)]
        if self.hosts is not None or self.is_allocation:
            words += ["--hosts", SLURM if self.is_allocation else str(self.hosts)]
        if not self.phase_steps:
            words.append("--no-phases")
        default = Plan()
        for name in ("network_interface", "global_batch_size", "global_learning_rate",
                     "phase_steps", "timeout"):  # fmt: skip
            if (value := getattr(self, name)) and value != getattr(default, name):
                words += [f"--{name.replace('_', '-')}", str(value)]
        return [*words, "--", *self.trainer_arguments] if self.trainer_arguments else words

    def repetition_words(self) -> list[str]:
        """Return the flags that say how often. Not the seed of the order: who repeats a comparison
        draws another one."""
        words, default = [], Plan()
        if self.measure != default.measure:
            words += ["--measure", self.measure]
        if self.full_runs != default.full_runs:
            words += ["--full-runs", str(self.full_runs)]
        if self.blocks is not None:
            words += ["--blocks", str(self.blocks)]
        else:
            words += ["--until-interval", percentage(self.until_interval)]
            words += ["--minutes", f"{self.minutes:g}"]
        if self.margin != default.margin:
            words += ["--margin", percentage(self.margin)]
        return words

    @property
    def run_blocks(self) -> int:
        """How many blocks of whole runs there are to be."""
        if self.measure == "turns":
            return self.full_runs
        return self.blocks or max(1, self.blocks_there)

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
            self.run(block, case, configuration, workers)
            for case, workers in balanced(self.groups(), block, self.order_seed)
            for configuration in self.in_order(block, case, workers)
        ]

    def groups(self) -> list[tuple[Case, int]]:
        """Return each case at each number of workers: within these, configurations are compared."""
        return [(case, workers) for case in self.cases for workers in self.workers]

    def in_order(self, block: int, case: Case, workers: int) -> list[Configuration]:
        """Return the configurations in their order in a block: those that are judged against each
        other side by side, and none oftener early than another."""
        members = {configuration.name: configuration for configuration in self.members()}
        place = (self.order_seed, case.name, workers)
        groups = balanced(side_by_side(members, self.pairs()), block, *place)
        return [
            members[name] for group in groups for name in balanced(group, block, *place, group[0])
        ]

    def run(self, block: int, case: Case, configuration: Configuration, workers: int) -> Run:
        """Return one run; what stands later among its arguments wins."""
        arguments = (*self.trainer_arguments, *case.flags, *configuration.arguments)
        own_seed = last_value(arguments, "--seed") is not None
        seed = None if own_seed else self.seed + max(block, 1) - 1
        if self.global_batch_size is not None:
            arguments = (*arguments, *self.share_of_global_batch(arguments, workers))
        return Run(block, configuration, workers, seed, case.name, arguments, self.hosts)

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

    @property
    def warm_up_timeout(self) -> int:
        """Return the time limit of a warm-up, in seconds: it reads the data first, and may list
        them for the first time."""
        return max(600, self.timeout)

    def warm_up_runs(self) -> list[Run]:
        """Return one run for each engine and case, at its most workers; its figures are thrown
        away.

        It pays for cold file caches and for the embedded data's one-time writing, which would
        otherwise fall on whichever engine comes first, and it finds a broken set-up in seconds.
        """
        first_of_engine: dict[str, Configuration] = {}
        for configuration in self.members():
            first_of_engine.setdefault(configuration.engine, configuration)
        return [
            self.run(0, case, configuration, max(self.workers))
            for case in self.cases
            for configuration in first_of_engine.values()
        ]

    def phase_runs(self) -> list[Run]:
        """Return one short run of each cell, in which stretches of steps with and without the
        exchange of gradients alternate: what the exchange costs is their difference.

        They end no later than the measured runs do.
        """
        if not self.phase_steps:
            return []
        runs = []
        for case in self.cases:
            for configuration in self.members():
                for workers in self.workers:
                    run = self.run(0, case, configuration, workers)
                    if "--use-adasum" in map(flag_name, run.arguments):
                        continue  # it combines updates, and has no gradients to leave unexchanged
                    steps = self.phase_steps
                    if own := last_value(run.arguments, "--max-steps"):
                        # Below two stretches nothing would be measured.
                        steps = min(steps, max(int(own), 2 * ABLATION_STEPS))
                    arguments = (
                        *without_flag(run.arguments, "--max-steps"),
                        "--ablation-steps", str(ABLATION_STEPS), "--max-steps", str(steps),
                    )  # fmt: skip
                    runs.append(replace(run, arguments=arguments))
        return runs


def varied_fields(configurations: Iterable[Configuration]) -> list[str]:
    """Return the settings that configurations give by flags of their own, by their field's name."""
    flags = [flag_name(word) for c in configurations for word in c.flags]
    names = [flag.removeprefix("--").removeprefix("no-").replace("-", "_") for flag in flags]
    return list(dict.fromkeys(name for name in names if name))


def percentage(share: float) -> str:
    return f"{100 * share:g}%"


def knobs_files(plan: Plan) -> list[str]:
    """Return the files of knobs that the trainers of a plan will read."""
    parts = [plan.trainer_arguments, *(case.flags for case in plan.cases)]
    parts += [configuration.flags for configuration in plan.members()]
    files = [last_value(words, "--knobs") for words in parts]
    return sorted({name for name in files if name})
