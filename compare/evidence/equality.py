"""What must be equal between runs that are compared, what the plan has differ, and what does."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from compare.evidence.records import Comparison, RunRecord
from compare.evidence.run_folder import recorded
from compare.evidence.words import short
from recipe.flags import FLAGS, names_of

# What may differ between two runs that are compared, whatever the plan: where they were written.
PLACES = {"log_dir", "name"}
# What may differ as well where the plan starts the two in different ways.
START = {"engine", "launcher", "transport"}
EQUAL_IN_SUMMARY = ("epochs", "steps", "samples_seen")
EQUAL_IN_ENVIRONMENT = ("hosts", "local_size", "device_name", "cpu_model", "cores")
# What environment.json calls it, and its name here; records of earlier trainers lack these.
EQUAL_WHERE_WRITTEN = {
    "kernel": "kernel",
    "cuda": "CUDA version",  # `cuda` is a setting
    "rank_hosts": "rank_hosts",
    "affinity": "affinity",
    "allocator": "allocator",
}
# Software that not every configuration uses: equal among those that do.
EQUAL_WHERE_USED = ("horovod", "mpi")
# Of a side of a block of turns, which has no fingerprint.
EQUAL_OF_SIDES = ("world_size", "threads", "device", "python", "torch", "torchvision")
ABSENT = "absent"
# What each block has of its own.
OF_BLOCK = {"seed", "data_order_sha256", "initial_weights_sha256"}
# And where each block is a job of its own, which the scheduler puts where it likes.
OF_JOB = {"hosts", "rank_hosts", "affinity", "CUDA_VISIBLE_DEVICES"}


class Row(NamedTuple):
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
    is_flag: bool  # one of the lesser flags
    is_of_sides: bool  # of blocks of turns, not of whole runs
    is_of_block: bool  # each block has its own, such as the seed
    unvaried: tuple[tuple[str, str], ...]  # judged pairs between which the plan has it equal
    rows: tuple[Row, ...]  # by block

    @property
    def is_same(self) -> bool:
        """Tell whether all runs of all blocks say the same."""
        return all(row.value == self.rows[0].value for row in self.rows)

    @cached_property
    def unequal_blocks(self) -> list[int]:
        """The blocks within which it differs."""
        firsts: dict[int, Any] = {}
        unequal = (r for r in self.rows if r.value != firsts.setdefault(r.block, r.value))
        return sorted({row.block for row in unequal})

    @cached_property
    def changed(self) -> tuple[Row, ...]:
        """Two rows of a configuration, between whose blocks it must not have changed and did."""
        firsts: dict[str, Row] = {}
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


def comparison_keys(run: RunRecord) -> dict[str, tuple[Any, bool]]:
    """Return everything of a run that must be equal; True marks what is one of its lesser flags.

    Not the git commit: run.py watches the trainers' sources themselves, and whoever commits a text
    between two blocks has not changed the training.
    """
    environment, flags = recorded(run.environment), run.config.flags
    summary = run.written.summary if run.written else None
    started = vars(summary or run.environment)
    others = {name: environment[name] for name in EQUAL_IN_ENVIRONMENT}
    others |= {name: started[name] for name in (EQUAL_IN_SUMMARY if summary else EQUAL_OF_SIDES)}
    for name, shown in EQUAL_WHERE_WRITTEN.items():
        if name in environment:
            others[shown] = environment[name]
    others |= {name: environment[name] for name in EQUAL_WHERE_USED if environment[name]}
    others |= {name: started[name] for name in START} | run.environment.variables
    fingerprint = summary.fingerprint if summary else {}
    lesser = {name for name in flags if not (name in FLAGS and FLAGS[name].chief)}
    keys = {name: (value, True) for name, value in flags.items()}
    keys |= {name: (value, False) for name, value in others.items()}
    keys |= {name: (value, name in lesser) for name, value in fingerprint.items()}
    return {name: key for name, key in keys.items() if name not in PLACES}


def varied_fields(comparison: Comparison, first: str, second: str) -> set[str]:
    """Return what the plan has differ between two configurations: how they are started, settings
    that the flags of only one of them make, variables that only one of them sets, and what is in
    their files of knobs."""
    a, b = comparison.configurations[first], comparison.configurations[second]
    varied = tuned_fields(comparison, first, second)
    if a.kind != b.kind:
        varied |= START
    if a.flags != b.flags:
        for field in comparison.plan.varied:
            varied |= {field, *(FLAGS[field].decides if field in FLAGS else ())}
    if a.environment != b.environment:
        varied |= {name for name, _ in a.environment.items() ^ b.environment.items()}
        varied.add("transport")  # which a variable may choose
    return varied


def tuned_fields(comparison: Comparison, first: str, second: str) -> set[str]:
    """Return what a file of knobs may have differ between two configurations; nothing if neither
    was given one. Each engine reads its own tables of the file, and nothing in it changes what is
    computed (recipe/knobs.py sees to that): only how fast."""
    tuned = [
        run.config
        for run in comparison.written
        if run.configuration in (first, second) and run.config.knobs
    ]
    variables = {name for config in tuned for name in config.knob_variables}
    return {*names_of("speed"), *variables} if tuned else set()


def compared_text(comparison: Comparison, first: str, second: str) -> str:
    """Say in words what the plan has differ between two configurations."""
    a, b = comparison.configurations[first], comparison.configurations[second]
    if (a.flags, a.environment) != (b.flags, b.environment):
        return "what the plan varies"
    if a.engine != b.engine:
        tuned = tuned_fields(comparison, first, second)
        return "the engine and its knobs" if tuned else "the engine"
    return "the order" if comparison.plan.null else "the launcher"


def compare_facts(comparison: Comparison, runs: Iterable[RunRecord]) -> list[Fact]:
    """Compare what complete runs of one case at one number of workers say of themselves, block by
    block; without what the labels of configurations tell. ValueError if they are of several.

    The seed, and all that follows from it, is meant to differ between blocks; so is what differs
    between configurations that are not judged against each other.
    """
    order = [*comparison.configurations].index
    runs = sorted(runs, key=lambda run: (run.block, order(run.configuration)))
    told = [(run, comparison_keys(run)) for run in runs]
    written = told[0][0].written if told else None
    if len(places := {(run.case, run.workers) for run, _ in told}) > 1:
        raise ValueError(f"runs of several cases or numbers of workers: {sorted(places)}")
    varied = {pair: varied_fields(comparison, *pair) for pair in comparison.pairs}
    own = OF_BLOCK | (OF_JOB if comparison.plan.is_allocation else set())
    facts = []
    for name in dict.fromkeys(name for _, keys in told for name in keys):
        fact = Fact(
            field=name,
            case=told[0][0].case,
            workers=told[0][0].workers,
            is_flag=all(keys[name][1] for _, keys in told if name in keys),
            is_of_sides=written is not None and written.summary is None,
            is_of_block=name in own,
            unvaried=tuple(pair for pair, fields in varied.items() if name not in fields),
            rows=tuple(
                Row(run.block, run.configuration, keys.get(name, (ABSENT, False))[0])
                for run, keys in told
                if name in keys or name not in EQUAL_WHERE_USED
            ),
        )
        if name not in START or (fact.unequal_blocks and not fact.is_varied):
            facts.append(fact)
    return facts


def compare_place(comparison: Comparison, case: str, workers: int) -> list[Fact]:
    """Compare the whole runs of a case at a number of workers, and the sides of turns there."""
    runs = [run for run in comparison.complete if (run.case, run.workers) == (case, workers)]
    sides = comparison.turn_sides(case, workers)
    return [*compare_facts(comparison, runs), *compare_facts(comparison, sides)]


def difference_text(fact: Fact) -> str:
    """Say in what runs differ: the field, each configuration's value, and in which blocks."""
    if fact.changed and (fact.is_varied or not fact.unequal_blocks):
        values = ", ".join(f"{short(row.value)} (block {row.block})" for row in fact.changed)
        return f"{fact.field} changed between blocks: {values}"
    rows = (row for row in fact.rows if row.block == fact.unequal_blocks[0])
    values = ", ".join(f"{short(row.value)} ({row.configuration})" for row in rows)
    blocks = ", ".join(map(str, fact.unequal_blocks))
    return f"{fact.field}: {values}; block{'' if len(fact.unequal_blocks) == 1 else 's'} {blocks}"
