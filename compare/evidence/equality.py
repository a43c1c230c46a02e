"""What must be equal between runs that are compared, what the plan has differ, and what does."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compare.evidence.records import Comparison, RunRecord
from compare.evidence.run_folder import recorded
from compare.evidence.words import short
from recipe.flags import FLAGS, names_of

# What may differ between two runs that are compared, whatever the plan: where they were written.
PLACES = {"log_dir", "name"}
# What may differ as well where the plan starts the two in different ways.
START = {"engine", "launcher", "transport"}
START_DETAILS = ("engine", "launcher", "controller", "transport")  # earlier plans lack the last
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


@dataclass(frozen=True)
class Fact:
    """One thing that must be equal among the runs of a block in one case at one number of workers,
    unless the plan varies it."""

    field: str
    case: str
    workers: int
    is_flag: bool  # one of the lesser flags
    is_varied: bool  # the plan has it differ between these configurations
    unequal_blocks: tuple[int, ...]
    values: tuple[tuple[str, Any], ...]  # configuration and value, of the first (unequal) block
    varies_over_blocks: bool
    changed: tuple[tuple[int, Any], ...]  # two blocks between which it must not have changed

    @property
    def is_equal(self) -> bool:
        return not self.unequal_blocks

    @property
    def forbids_verdict(self) -> bool:
        """Tell whether runs differ here, and were not meant to."""
        return bool(self.changed) or (bool(self.unequal_blocks) and not self.is_varied)


def facts_of(run: RunRecord) -> dict[str, tuple[Any, bool]]:
    """Return everything of a run that must be equal; True marks what is one of its lesser flags.

    Not the git commit: run.py watches the trainers' sources themselves, and whoever commits a text
    between two blocks has not changed the training.
    """
    environment, flags = recorded(run.environment), run.config.flags
    summary = run.written.summary if run.written else None
    if summary is None:
        others = {field: environment[field] for field in EQUAL_OF_SIDES}
    else:
        others = {field: getattr(summary, field) for field in EQUAL_IN_SUMMARY}
    others |= {field: environment[field] for field in EQUAL_IN_ENVIRONMENT}
    written = [field for field in EQUAL_WHERE_WRITTEN if field in environment]
    others |= {EQUAL_WHERE_WRITTEN[field]: environment[field] for field in written}
    used = [field for field in EQUAL_WHERE_USED if environment[field] is not None]
    others |= {field: environment[field] for field in used}
    started = summary or run.environment
    others |= {field: getattr(started, field) for field in START} | run.environment.variables
    facts = {
        field: (value, field in flags and not (field in FLAGS and FLAGS[field].chief))
        for field, value in (summary.fingerprint if summary else {}).items()
    }
    for field, value in others.items():
        facts.setdefault(field, (value, False))
    for field, value in flags.items():
        facts.setdefault(field, (value, True))
    return {field: fact for field, fact in facts.items() if field not in PLACES}


def varied_fields(comparison: Comparison, first: str, second: str) -> set[str]:
    """Return what the plan has differ between two configurations: how they are started, settings
    that the flags of only one of them make, variables that only one of them sets, and what is in
    their files of knobs."""
    details = comparison.plan["configuration_details"]
    if first not in details or second not in details:  # of a plan whose configurations had neither
        return set(START)
    a, b = details[first], details[second]
    varied = tuned_fields(comparison, first, second)
    if any(a.get(field) != b.get(field) for field in START_DETAILS):
        varied |= START
    if a["flags"] != b["flags"]:
        for field in comparison.plan["varied"]:
            varied |= {field, *(FLAGS[field].decides if field in FLAGS else ())}
    if a["environment"] != b["environment"]:
        names = a["environment"].keys() | b["environment"].keys()
        varied |= {n for n in names if a["environment"].get(n) != b["environment"].get(n)}
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
    if not tuned:
        return set()
    variables = {name for config in tuned for name in config.knob_variables}
    return {*names_of("speed"), *variables}


def compared_text(comparison: Comparison, first: str, second: str) -> str:
    """Say in words what the plan has differ between two configurations."""
    details = comparison.plan["configuration_details"]
    if first not in details or second not in details:
        return "the engine"
    a, b = details[first], details[second]
    if (a["flags"], a["environment"]) != (b["flags"], b["environment"]):
        return "what the plan varies"
    if a["engine"] != b["engine"]:
        tuned = tuned_fields(comparison, first, second)
        return "the engine and its knobs" if tuned else "the engine"
    return "the order" if comparison.plan["null"] else "the launcher"


def compare_facts(comparison: Comparison, runs: Iterable[RunRecord]) -> list[Fact]:
    """Compare what complete runs of one case at one number of workers say of themselves, block by
    block. ValueError if they are of several.

    The seed, and all that follows from it, is meant to differ between blocks; so is what differs
    between configurations that are not judged against each other.
    """
    blocks: dict[int, list[RunRecord]] = {}
    for run in sorted(runs, key=lambda run: run.block):
        blocks.setdefault(run.block, []).append(run)
    told = {run.folder: facts_of(run) for members in blocks.values() for run in members}
    cells = {(run.case, run.workers) for members in blocks.values() for run in members}
    if not cells:
        return []
    if len(cells) > 1:
        raise ValueError(f"runs of several cases or numbers of workers: {sorted(cells)}")
    varied = {pair: varied_fields(comparison, *pair) for pair in comparison.pairs}
    own = OF_BLOCK | (OF_JOB if comparison.plan["hosts"] == "slurm" else set())
    fields = dict.fromkeys(field for facts in told.values() for field in facts)
    compared = (compare_field(field, blocks, told, varied, own) for field in fields)
    return [fact for fact in compared if fact is not None]


def compare_field(
    field: str,
    blocks: dict[int, list[RunRecord]],
    told: dict[Path, dict[str, tuple[Any, bool]]],
    varied: dict[tuple[str, str], set[str]],
    own: set[str],
) -> Fact | None:
    """Compare what runs, by block, say of one field: `told` is all that they say, by folder,
    `varied` what the plan has differ between each pair, `own` what each block has of its own. None
    where the labels tell the difference."""
    values: dict[int, dict[str, Any]] = {}
    first_fact = next(iter(told.values())).get(field)
    is_same = first_fact is not None and all(f.get(field) == first_fact for f in told.values())
    # Most are the same in all runs: then the first block's say all.
    for block, members in [*blocks.items()][: 1 if is_same else None]:
        values[block] = {
            run.configuration: told[run.folder].get(field, (ABSENT, False))[0]
            for run in members
            if field in told[run.folder] or field not in EQUAL_WHERE_USED
        }
    values = {block: by_name for block, by_name in values.items() if by_name}
    firsts = {block: next(iter(by_name.values())) for block, by_name in values.items()}
    first_of_all = firsts[min(firsts)]
    unequal = tuple(
        block
        for block, by_name in values.items()
        if any(value != firsts[block] for value in by_name.values())
    )
    is_varied = all(
        field in fields or by_name.get(first) == by_name.get(second)
        for (first, second), fields in varied.items()
        for by_name in values.values()
        if first in by_name and second in by_name
    )
    if field in START and is_varied:
        return None
    one = next(iter(blocks.values()))[0]
    shown = unequal[0] if unequal else min(values)
    return Fact(
        field=field,
        case=one.case,
        workers=one.workers,
        is_flag=all(facts[field][1] for facts in told.values() if field in facts),
        is_varied=bool(unequal) and is_varied,
        unequal_blocks=unequal,
        values=tuple(values[shown].items()),
        varies_over_blocks=any(value != first_of_all for value in firsts.values()),
        changed=() if field in own else change_over(values),
    )


def change_over(values: dict[int, dict[str, Any]]) -> tuple[tuple[int, Any], ...]:
    """Return two blocks, with the value of each, between which a configuration's value changed;
    nothing if none did."""
    firsts: dict[str, tuple[int, Any]] = {}
    for block, by_name in values.items():
        for name, value in by_name.items():
            first = firsts.setdefault(name, (block, value))
            if first[1] != value:
                return first, (block, value)
    return ()


def difference_text(fact: Fact) -> str:
    """Say in what runs differ: the field, each configuration's value, and in which blocks."""
    if fact.changed and (fact.is_varied or fact.is_equal):
        values = ", ".join(f"{short(value)} (block {block})" for block, value in fact.changed)
        return f"{fact.field} changed between blocks: {values}"
    values = ", ".join(f"{short(value)} ({name})" for name, value in fact.values)
    blocks = ", ".join(map(str, fact.unequal_blocks))
    return f"{fact.field}: {values}; block{'' if len(fact.unequal_blocks) == 1 else 's'} {blocks}"
