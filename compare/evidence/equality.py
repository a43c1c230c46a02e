"""What must be equal between runs that are compared, what the plan has differ, and what does."""

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

from compare.evidence.records import Comparison, RunRecord
from compare.evidence.words import short
from recipe.record.schema import Environment
from recipe.settings.flags import FLAGS, names_of

# What may differ between two runs that are compared, whatever the plan: where they were written.
PLACES = {"log_dir", "name"}
# What a run says of its start.
START = {"engine", "launcher", "transport"}
# What may differ as well where two configurations differ in one of these. A launcher may set the
# variable for its ranks: mpirun does, where it is given --prefix or its whole path.
OF_LAUNCHER = {"launcher", "LD_LIBRARY_PATH"}
FOLLOWS = {"engine": {"engine"}, "launcher": OF_LAUNCHER, "controller": OF_LAUNCHER}
EQUAL_IN_SUMMARY = ("epochs", "steps", "samples_seen", "replaced_images")
# Of environment.json: what is no condition of a comparison. All else must be equal.
NO_CONDITION = {"format", "version", "command", "started_utc", "git_commit", "gpu_clock_mhz"}
CONDITIONS = [
    field.name
    for field in fields(Environment)
    if field.name not in {*NO_CONDITION, "variables"}  # which count one by one
]
# Software that not every configuration uses: equal among those that do.
EQUAL_WHERE_USED = ("horovod", "mpi", "nccl")
ABSENT = "absent"
# What each block has of its own.
OF_BLOCK = {"seed", "data_order_sha256", "initial_weights_sha256"}
# And where each block is a job of its own, which the scheduler puts where it likes.
OF_JOB = {"hosts", "rank_hosts", "affinity", "CUDA_VISIBLE_DEVICES"}


class Said(NamedTuple):
    """What one run says of a field."""

    block: int
    configuration: str
    value: Any


@dataclass(frozen=True)
class Fact:
    """One thing that must be equal among the runs of a block in one case at one number of workers,
    unless the plan varies it."""

    field: str
    case: str
    workers: int
    is_of_sides: bool  # of blocks of turns, not of whole runs
    is_of_block: bool  # each block has its own, such as the seed
    unvaried: tuple[tuple[str, str], ...]  # judged pairs between which the plan has it equal
    rows: tuple[Said, ...]  # by block

    @cached_property
    def unequal_blocks(self) -> list[int]:
        """The blocks within which it differs."""
        firsts: dict[int, Any] = {}
        unequal = (r for r in self.rows if r.value != firsts.setdefault(r.block, r.value))
        return sorted({row.block for row in unequal})

    @cached_property
    def changed(self) -> tuple[Said, ...]:
        """Two rows of a configuration, between whose blocks it must not have changed and did."""
        firsts: dict[str, Said] = {}
        for row in () if self.is_of_block else self.rows:
            if row.value != (first := firsts.setdefault(row.configuration, row)).value:
                return first, row
        return ()

    @cached_property
    def is_varied(self) -> bool:
        """Tell whether it differs within blocks only where the plan has it differ."""
        values = {(row.block, row.configuration): row.value for row in self.rows}
        return bool(self.unequal_blocks) and all(
            values[block, first] == values[block, second]
            for block in self.unequal_blocks
            for first, second in self.unvaried
            if (block, first) in values and (block, second) in values
        )

    @property
    def is_confounder(self) -> bool:
        """Tell whether runs differ here, and were not meant to."""
        return bool(self.changed) or (bool(self.unequal_blocks) and not self.is_varied)

    def between(self, pair: tuple[str, str], blocks: set[int]) -> "Fact":
        """Return the same of two configurations in some blocks."""
        rows = (row for row in self.rows if row.configuration in pair and row.block in blocks)
        return replace(self, rows=tuple(rows))


def facts_of(run: RunRecord) -> dict[str, Any]:
    """Return everything of a run that must be equal.

    Not the git commit: run.py watches the trainers' sources themselves, and whoever commits a text
    between two blocks has not changed the training.
    """
    facts = run.config.flags | {
        "CUDA version" if name == "cuda" else name: value  # `cuda` is a flag
        for name, value in vars(run.environment).items()
        if value is not None and name in CONDITIONS
    }
    facts |= run.environment.variables
    if not run.is_side:
        facts |= {name: getattr(run.summary, name) for name in EQUAL_IN_SUMMARY}
        facts |= run.summary.fingerprint
    return {name: value for name, value in facts.items() if name not in PLACES}


def varied_fields(comparison: Comparison, first: str, second: str) -> set[str]:
    """Return what the plan has differ between two configurations: engine, launcher, and a transport
    that they do not both name; settings that the flags of only one of them make, variables that
    only one of them sets, and what is in their files of knobs: each engine reads its own tables of
    such a file, and nothing in it changes what is computed (recipe/settings/knobs.py sees to that),
    only how fast."""
    if comparison.plan.side:  # whatever their commands make of it
        return {*CONDITIONS, "CUDA version"}
    a, b = comparison.configurations[first], comparison.configurations[second]
    varied = {
        field
        for name, fields in FOLLOWS.items()
        if getattr(a, name) != getattr(b, name)
        for field in fields
    }
    is_same_start = a.kind == b.kind and a.environment == b.environment
    if not is_same_start and not a.transport == b.transport != "":
        varied.add("transport")  # which engine, launcher or a variable chose
    if a.flags != b.flags:
        for field in comparison.plan.varied:
            varied |= {field, *(FLAGS[field].decides if field in FLAGS else ())}
    if a.environment != b.environment:
        varied |= {name for name, _ in a.environment.items() ^ b.environment.items()}
    for run in comparison.written:
        if run.configuration in (first, second) and run.config.knobs:
            varied |= {*names_of("speed"), *run.config.knob_variables}
    return varied


def compare_facts(comparison: Comparison, case: str, workers: int) -> list[Fact]:
    """Compare what the whole runs of a case at a number of workers say of themselves, block by
    block, and what the sides of turns there say.

    The seed, and all that follows from it, is meant to differ between blocks; so is what differs
    between configurations that are not judged against each other.
    """
    order = [*comparison.configurations].index
    varied = {pair: varied_fields(comparison, *pair) for pair in comparison.plan.pairs()}
    own = OF_BLOCK | (OF_JOB if comparison.plan.is_allocation else set())
    facts = []
    for is_of_sides, runs in ((False, comparison.complete), (True, comparison.sides)):
        here = [run for run in runs if (run.case, run.workers) == (case, workers)]
        here.sort(key=lambda run: (run.block, order(run.configuration)))
        told = [(run, facts_of(run)) for run in here]
        for name in dict.fromkeys(name for _, found in told for name in found):
            fact = Fact(
                field=name,
                case=case,
                workers=workers,
                is_of_sides=is_of_sides,
                is_of_block=name in own,
                unvaried=tuple(pair for pair, fields in varied.items() if name not in fields),
                rows=tuple(
                    Said(run.block, run.configuration, found.get(name, ABSENT))
                    for run, found in told
                    if name in found or name not in EQUAL_WHERE_USED
                ),
            )
            if name not in START or fact.is_confounder:
                facts.append(fact)
    return facts


def difference_text(fact: Fact) -> str:
    """Say in what runs differ: the field, each configuration's value, and in which blocks."""
    if fact.changed and (fact.is_varied or not fact.unequal_blocks):
        values = ", ".join(f"{short(row.value)} (block {row.block})" for row in fact.changed)
        return f"{fact.field} changed between blocks: {values}"
    rows = (row for row in fact.rows if row.block == fact.unequal_blocks[0])
    values = ", ".join(f"{short(row.value)} ({row.configuration})" for row in rows)
    blocks = ", ".join(map(str, fact.unequal_blocks))
    return f"{fact.field}: {values}; block{'' if len(fact.unequal_blocks) == 1 else 's'} {blocks}"
