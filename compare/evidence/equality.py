"""What must be equal between compared runs, what the plan varies, and what differs."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

from compare.evidence.runs import RunRecord
from compare.plan.plan import Plan
from recipe.record.schema import Environment
from recipe.settings.flags import FLAGS

# Fields that may differ between compared runs under any plan: where the runs were written.
PLACES = {"log_dir", "name"}
# Fields that describe how a run was started.
START = {"engine", "launcher", "transport"}
# If two configurations differ in a key, the fields of its value may differ, too. A launcher may set
# LD_LIBRARY_PATH for its ranks: mpirun does so if --prefix or its full path was given.
OF_LAUNCHER = {"launcher", "LD_LIBRARY_PATH"}
FOLLOWS = {"engine": {"engine"}, "launcher": OF_LAUNCHER, "controller": OF_LAUNCHER}
EQUAL_IN_SUMMARY = ("epochs", "steps", "samples_seen", "replaced_images")
# With --desired-acc these say when the accuracy was reached: they are results, not conditions.
ENDED_BY_ACCURACY = {"epochs", "steps", "samples_seen"}
# Fields of environment.json that may differ. All others must be equal.
NO_CONDITION = {"format", "version", "command", "started_utc", "git_commit", "gpu_clock_mhz"}
CONDITIONS = [
    field.name
    for field in fields(Environment)
    if field.name not in {*NO_CONDITION, "variables"}  # variables are compared one by one
]
CUDA_VERSION = "CUDA version"  # the name of the environment's `cuda`, which is also a flag
# Fields that scripts alone have. Commit and places may change between blocks: `code_sha256` and the
# versions say whether what runs has changed.
COMMIT = "git_commit"
MAY_CHANGE = {COMMIT, "interpreter", "script"}
OF_SCRIPT = ("interpreter", "script", "script_sha256", "code_sha256")
# Software that not every configuration uses, and what earlier records lack: it must be equal among
# those that have it.
EQUAL_WHERE_USED = ("horovod", "mpi", "nccl", "timm", *OF_SCRIPT, COMMIT)
ABSENT = "absent"
# Fields that differ from block to block.
OF_BLOCK = {"seed", "data_order_sha256", "initial_weights_sha256"}
# These, too, if each block is a job of its own: the cluster's scheduler chooses its nodes.
OF_JOB = {"hosts", "rank_hosts", "affinity", "CUDA_VISIBLE_DEVICES"}


class Said(NamedTuple):
    """The value of a field in one run."""

    block: int
    configuration: str
    value: Any


@dataclass(frozen=True)
class Fact:
    """A field that must be equal among the runs of a block, in one case at one number of workers,
    unless the plan varies it."""

    field: str
    case: str
    workers: int
    is_of_sides: bool  # from sides of turns, not from whole runs
    is_of_block: bool  # each block may have its own value, as of the seed
    unvaried: tuple[tuple[str, str], ...]  # judged pairs between which the plan does not vary it
    rows: tuple[Said, ...]  # in the order of blocks
    results: frozenset[str] = frozenset()  # configurations of which it is a result, no condition

    @cached_property
    def unequal_blocks(self) -> list[int]:
        """The blocks in which the runs' values differ."""
        firsts: dict[int, Any] = {}
        unequal = (r for r in self.rows if r.value != firsts.setdefault(r.block, r.value))
        return sorted({row.block for row in unequal})

    @cached_property
    def changed(self) -> tuple[Said, ...]:
        """Two rows of one configuration whose values differ between blocks but must not; empty if
        there are none."""
        firsts: dict[str, Said] = {}
        conditions = (row for row in self.rows if row.configuration not in self.results)
        for row in () if self.is_of_block else conditions:
            if row.value != (first := firsts.setdefault(row.configuration, row)).value:
                return first, row
        return ()

    @cached_property
    def is_varied(self) -> bool:
        """Return whether values differ within blocks, but only where the plan varies them, or where
        they are results of both sides."""
        values = {(row.block, row.configuration): row.value for row in self.rows}
        return bool(self.unequal_blocks) and all(
            values[block, first] == values[block, second]
            for block in self.unequal_blocks
            for first, second in self.unvaried
            if not {first, second} <= self.results
            if (block, first) in values and (block, second) in values
        )

    @property
    def is_confounder(self) -> bool:
        """Return whether runs differ in this field although the plan does not vary it."""
        return bool(self.changed) or (bool(self.unequal_blocks) and not self.is_varied)

    def between(self, names: set[str], blocks: set[int]) -> "Fact":
        """Return the fact restricted to some configurations and some blocks."""
        rows = (row for row in self.rows if row.configuration in names and row.block in blocks)
        return replace(self, rows=tuple(rows))


def conditions_of(run: RunRecord) -> dict[str, Any]:
    """Return what a run recorded of its machine, software and start, and the variables that steer
    its engine."""
    recorded = {
        CUDA_VERSION if name == "cuda" else name: value
        for name, value in vars(run.environment).items()
        if value is not None and name in CONDITIONS
    }
    return recorded | run.environment.variables


def values_of(run: RunRecord) -> dict[str, Any]:
    """Return all values of a run that must be equal.

    The trainers' git commit does not count: run.py compares their sources themselves, and a commit
    to the docs between two blocks does not change the training. That of a script is only shown.
    """
    values = run.config.flags | conditions_of(run)
    if run.environment.script and run.environment.git_commit:
        values[COMMIT] = run.environment.git_commit
    if not run.is_side:
        values |= {name: getattr(run.summary, name) for name in EQUAL_IN_SUMMARY}
        values |= run.summary.fingerprint
    return {name: value for name, value in values.items() if name not in PLACES}


def varied_fields(plan: Plan, first: str, second: str) -> set[str]:
    """Return the fields that the plan varies between two configurations: engine, launcher, and the
    transport unless both name the same; settings by flags and variables that only one of them sets.
    """
    if plan.side:  # their commands may change any condition
        return {*CONDITIONS, CUDA_VERSION, COMMIT}
    members = {member.name: member for member in plan.members()}
    a, b = members[first], members[second]
    varied = {
        field
        for name, fields in FOLLOWS.items()
        if getattr(a, name) != getattr(b, name)
        for field in fields
    }
    is_same_start = a.kind == b.kind and a.environment == b.environment
    if not is_same_start and not a.transport == b.transport != "":
        varied.add("transport")  # chosen by engine, launcher or a variable
    if a.flags != b.flags:
        for field in plan.varied:
            varied |= {field, *(FLAGS[field].decides if field in FLAGS else ())}
    if a.environment != b.environment:
        varied |= {name for name, _ in a.environment.items() ^ b.environment.items()}
    return varied


def compare_facts(
    plan: Plan, case: str, workers: int, whole: Sequence[RunRecord], sides: Sequence[RunRecord]
) -> list[Fact]:
    """Compare the values of the complete whole runs of a case at a number of workers, block by
    block, and those of the sides of turns there.

    The seed, and all that follows from it, may differ between blocks. Configurations that are not
    judged against each other may differ in anything.
    """
    order = plan.names.index
    varied = {pair: varied_fields(plan, *pair) for pair in plan.pairs()}
    of_block = OF_BLOCK | MAY_CHANGE | (OF_JOB if plan.is_allocation else set())
    names = {run.configuration for run in whole}
    to_the_end = {run.configuration for run in whole if run.desired_acc is None}
    ended_by_accuracy = frozenset(names - to_the_end)
    facts = []
    for is_of_sides, runs in ((False, whole), (True, sides)):
        in_order = sorted(runs, key=lambda run: (run.block, order(run.configuration)))
        values = [(run, values_of(run)) for run in in_order]
        for name in dict.fromkeys(name for _, of_run in values for name in of_run):
            fact = Fact(
                field=name,
                case=case,
                workers=workers,
                is_of_sides=is_of_sides,
                is_of_block=name in of_block,
                unvaried=tuple(pair for pair, fields in varied.items() if name not in fields),
                rows=tuple(
                    Said(run.block, run.configuration, of_run.get(name, ABSENT))
                    for run, of_run in values
                    if name in of_run or name not in EQUAL_WHERE_USED
                ),
                results=ended_by_accuracy if name in ENDED_BY_ACCURACY else frozenset(),
            )
            if name not in START or fact.is_confounder:
                facts.append(fact)
    return facts
