"""What a comparison shows: the table's rows, the verdicts, and what was and was not equal."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

from compare.paired import MIN_BLOCKS, Estimate, estimate_ratio
from compare.records import Comparison, RunRecord

# What may differ between two runs that are compared: it is what the plan varies, or where they
# were written. Everything else that a run says of itself must be equal.
VARIED = {"engine", "launcher", "transport", "log_dir", "name"}
EQUAL_IN_SUMMARY = ("epochs", "steps", "samples_seen")
EQUAL_IN_ENVIRONMENT = ("hosts", "local_size", "device_name", "cpu_model", "cores")
# Flags that tell what was compared; the page shows the others folded away.
CHIEF_FLAGS = (
    "arch", "batch_size", "batches_per_allreduce", "precision", "batch_norm", "epochs", "threads",
    "seed",
)  # fmt: skip
ABSENT = "absent"


@dataclass(frozen=True)
class Row:
    """One line of the table: a configuration at a number of workers, over its complete runs."""

    configuration: str
    label: str
    workers: int
    images_per_second: float  # median
    lowest: float
    highest: float
    efficiency: float | None  # median; None without a run at fewer workers in the same block
    cpu_ms_per_image: float  # median
    peak_memory_bytes: float  # largest
    train_seconds: float  # median
    top1: float | None  # median; None if nothing was evaluated
    top5: float | None
    loss: float | None
    weights: str  # are the final weights those of the other configurations?
    blocks: int
    planned_blocks: int


@dataclass(frozen=True)
class Fact:
    """One thing that must be equal among the runs of a block at one number of workers."""

    field: str
    workers: int
    is_flag: bool  # one of the lesser flags
    unequal_blocks: tuple[int, ...]
    values: tuple[tuple[str, Any], ...]  # configuration and value, of the first (unequal) block
    varies_over_blocks: bool

    @property
    def is_equal(self) -> bool:
        return not self.unequal_blocks


@dataclass(frozen=True)
class LossGap:
    """Where the training losses of two runs are farthest apart."""

    largest: float
    block: int
    step: int
    steps: int


@dataclass(frozen=True)
class Verdict:
    """What is said of two configurations at one number of workers."""

    workers: int
    first: str
    second: str
    first_label: str
    second_label: str
    speed: Estimate | None  # first / second, images a second
    cpu: Estimate | None  # first / second, CPU time an image
    differences: tuple[Fact, ...]
    missing_blocks: tuple[int, ...]
    equal_weights: tuple[bool, ...]  # block by block
    loss_gap: LossGap | None

    def sentence(self) -> str:
        """Say the verdict in hyperfine's manner, or why there is none."""
        at = f"At {count(self.workers, 'worker')}"
        if self.differences:
            return (
                f"{at} no verdict on {self.first_label} and {self.second_label}: the runs "
                "differ in more than the engine."
            )
        if self.speed is None:
            return (
                f"{at} no verdict: no block holds a complete run of both "
                f"{self.first_label} and {self.second_label}."
            )
        blocks = count(self.speed.blocks, "block")
        if self.speed.low is None:
            return (
                f"{at} {self.first_label} trained at {ratio_text(self.speed)} times the speed "
                f"of {self.second_label} in {blocks}: too few for an interval, which needs "
                f"{MIN_BLOCKS}, so no difference is shown."
            )
        if not self.speed.shows_difference:
            return (
                f"{at} no difference was shown between {self.first_label} and "
                f"{self.second_label}: speed ratio {ratio_text(self.speed)}, "
                f"{interval_text(self.speed)}, {blocks}."
            )
        faster, slower, speed = self.first_label, self.second_label, self.speed
        if speed.ratio < 1:
            faster, slower, speed = slower, faster, speed.inverse()
        return (
            f"{at} {faster} trained {ratio_text(speed)} times faster than {slower}, "
            f"{interval_text(speed)}, {blocks}."
        )

    def cpu_sentence(self) -> str:
        """Say which of the two used less CPU time; empty when there is no verdict."""
        if self.differences or self.cpu is None:
            return ""
        if self.cpu.low is None:
            return (
                f"{self.first_label} used {ratio_text(self.cpu)} times the CPU time per image "
                f"of {self.second_label}."
            )
        if not self.cpu.shows_difference:
            return (
                f"No difference in CPU time per image was shown: ratio "
                f"{ratio_text(self.cpu)}, {interval_text(self.cpu)}."
            )
        more, less, cpu = self.first_label, self.second_label, self.cpu
        if cpu.ratio < 1:
            more, less, cpu = less, more, cpu.inverse()
        return (
            f"{more} used {ratio_text(cpu)} times the CPU time per image of {less}, "
            f"{interval_text(cpu)}."
        )

    def training_sentence(self) -> str:
        """Say whether both did the same training, by their final weights and their losses."""
        if not self.equal_weights:
            return ""
        equal, blocks = sum(self.equal_weights), len(self.equal_weights)
        if equal == blocks:
            return f"Final weights bit-equal in {equal} of {count(blocks, 'block')}."
        text = f"Final weights bit-equal in only {equal} of {count(blocks, 'block')}"
        if gap := self.loss_gap:
            return (
                f"{text}; the training losses differ by at most {gap.largest:.2g} "
                f"(step {gap.step} of {gap.steps}, block {gap.block})."
            )
        return f"{text}; they have no training step in common."


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def digits(estimate: Estimate) -> int:
    """Return the decimals to print: enough that a narrow interval does not round away."""
    if estimate.low is None or estimate.high is None:
        return 2
    return 3 if min(estimate.high - estimate.low, abs(estimate.ratio - 1)) < 0.05 else 2


def ratio_text(estimate: Estimate) -> str:
    return f"{estimate.ratio:.{digits(estimate)}f}"


def interval_text(estimate: Estimate) -> str:
    places = digits(estimate)
    return f"95 % interval {estimate.low:.{places}f} to {estimate.high:.{places}f}"


def facts_of(run: RunRecord) -> dict[str, tuple[Any, bool]]:
    """Return everything of a run that must be equal; True marks what is one of its lesser flags.

    Not the git commit: run.py watches the trainers' sources themselves, and whoever commits a text
    between two blocks has not changed the training.
    """
    facts = {
        field: (value, field in run.config and field not in CHIEF_FLAGS)
        for field, value in run.summary["fingerprint"].items()
    }
    for field in EQUAL_IN_SUMMARY:
        facts.setdefault(field, (run.summary[field], False))
    for field in EQUAL_IN_ENVIRONMENT:
        facts.setdefault(field, (run.environment[field], False))
    for flag, value in run.config.items():
        facts.setdefault(flag, (value, True))
    return {field: fact for field, fact in facts.items() if field not in VARIED}


def compare_facts(runs: Iterable[RunRecord]) -> list[Fact]:
    """Compare what complete runs at one number of workers say of themselves, block by block.

    What differs between blocks only (the seed, and all that follows from it) is meant to.
    """
    blocks: dict[int, list[RunRecord]] = {}
    for run in runs:
        blocks.setdefault(run.block, []).append(run)
    facts = {run.folder: facts_of(run) for members in blocks.values() for run in members}
    fields = list(dict.fromkeys(field for told in facts.values() for field in told))
    compared = []
    for field in fields:
        values = {
            block: [
                (run.configuration, facts[run.folder].get(field, (ABSENT, False))[0])
                for run in members
            ]
            for block, members in sorted(blocks.items())
        }
        unequal = tuple(
            block
            for block, pairs in values.items()
            if any(value != pairs[0][1] for _, value in pairs)
        )
        shown = values[unequal[0] if unequal else min(values)]
        firsts = [pairs[0][1] for pairs in values.values()]
        is_flag = all(told[field][1] for told in facts.values() if field in told)
        workers = next(iter(blocks.values()))[0].workers
        compared.append(
            Fact(
                field,
                workers,
                is_flag,
                unequal,
                tuple(shown),
                any(value != firsts[0] for value in firsts),
            )
        )
    return compared


def compared_pairs(comparison: Comparison) -> list[tuple[str, str]]:
    """Return the pairs of configurations to judge: each one against the first of the plan."""
    first, *others = comparison.plan["configurations"]
    return [(first, other) for other in others]


def all_workers(comparison: Comparison) -> list[int]:
    return sorted({run.workers for run in comparison.runs})


def judge(comparison: Comparison) -> list[Verdict]:
    """Return a verdict for each number of workers and each pair of configurations."""
    return [
        judge_pair(comparison, first, second, workers)
        for workers in all_workers(comparison)
        for first, second in compared_pairs(comparison)
    ]


def judge_pair(comparison: Comparison, first: str, second: str, workers: int) -> Verdict:
    """Compare two configurations over the blocks in which both are complete."""
    blocks = sorted({run.block for run in comparison.runs})
    pairs, missing = [], []
    for block in blocks:
        a = comparison.find(block, first, workers)
        b = comparison.find(block, second, workers)
        if a.is_complete and b.is_complete:
            pairs.append((a, b))
        else:
            missing.append(block)
    facts = compare_facts(run for pair in pairs for run in pair)
    differences = tuple(fact for fact in facts if not fact.is_equal)
    speed = cpu = gap = None
    if pairs and not differences:
        speed = estimate(pairs, "images_per_second")
        cpu = estimate(pairs, "cpu_seconds_per_image")
    equal = tuple(a.summary["weights_sha256"] == b.summary["weights_sha256"] for a, b in pairs)
    if not all(equal):
        gap = largest_loss_gap(pair for pair, same in zip(pairs, equal, strict=True) if not same)
    return Verdict(
        workers,
        first,
        second,
        label_of(comparison, first),
        label_of(comparison, second),
        speed,
        cpu,
        differences,
        tuple(missing),
        equal,
        gap,
    )


def estimate(pairs: list[tuple[RunRecord, RunRecord]], field: str) -> Estimate:
    first, second = zip(*((a.summary[field], b.summary[field]) for a, b in pairs), strict=True)
    return estimate_ratio(first, second)


def label_of(comparison: Comparison, configuration: str) -> str:
    """Name a configuration by what its complete runs used; by its own name if it has none."""
    labels = {run.label for run in comparison.complete if run.configuration == configuration}
    return labels.pop() if len(labels) == 1 else configuration


def largest_loss_gap(pairs: Iterable[tuple[RunRecord, RunRecord]]) -> LossGap | None:
    """Find where two runs' training losses are farthest apart, over the steps both have."""
    gap = None
    for a, b in pairs:
        losses = {line["step"]: line["loss"] for line in b.metrics("step")}
        steps = [line for line in a.metrics("step") if line["step"] in losses]
        for line in steps:
            difference = abs(line["loss"] - losses[line["step"]])
            # `not <=` so that a loss that became NaN counts as the largest gap, not as none
            if gap is None or not difference <= gap.largest:
                gap = LossGap(difference, a.block, line["step"], steps[-1]["step"])
    return gap


def table_rows(comparison: Comparison) -> list[Row]:
    """Return the table, ordered by workers and then as in the plan."""
    rows = []
    for workers in all_workers(comparison):
        for configuration in comparison.plan["configurations"]:
            cell = [
                run
                for run in comparison.runs
                if (run.configuration, run.workers) == (configuration, workers)
            ]
            complete = [run for run in cell if run.is_complete]
            if complete:
                rows.append(table_row(comparison, complete, len(cell)))
    return rows


def table_row(comparison: Comparison, runs: list[RunRecord], planned: int) -> Row:
    def middle(field: str) -> float:
        return float(median(run.summary[field] for run in runs))

    def validated(field: str) -> float | None:
        return None if any(run.summary[field] is None for run in runs) else middle(field)

    speeds = [run.summary["images_per_second"] for run in runs]
    efficiencies = [e for run in runs if (e := efficiency(comparison, run)) is not None]
    return Row(
        configuration=runs[0].configuration,
        label=runs[0].label,
        workers=runs[0].workers,
        images_per_second=median(speeds),
        lowest=min(speeds),
        highest=max(speeds),
        efficiency=median(efficiencies) if efficiencies else None,
        cpu_ms_per_image=1000 * middle("cpu_seconds_per_image"),
        peak_memory_bytes=max(run.summary["peak_memory_bytes"] for run in runs),
        train_seconds=middle("train_seconds"),
        top1=validated("top1"),
        top5=validated("top5"),
        loss=validated("loss"),
        weights=weights_text(comparison, runs),
        blocks=len(runs),
        planned_blocks=planned,
    )


def efficiency(comparison: Comparison, run: RunRecord) -> float | None:
    """Return images a second and worker, against the same block's run at the fewest workers."""
    fewest = min(all_workers(comparison))
    if run.workers == fewest:
        return None
    base = comparison.find(run.block, run.configuration, fewest)
    if not base.is_complete:
        return None
    per_worker = run.summary["images_per_second"] / run.workers
    return float(per_worker / (base.summary["images_per_second"] / fewest))


def weights_text(comparison: Comparison, runs: list[RunRecord]) -> str:
    """Say in how many blocks all other configurations ended with the same weights."""
    equal = compared = 0
    for run in runs:
        others = [
            other
            for other in comparison.complete
            if (other.block, other.workers) == (run.block, run.workers)
            and other.configuration != run.configuration
        ]
        if others:
            compared += 1
            digest = run.summary["weights_sha256"]
            equal += all(other.summary["weights_sha256"] == digest for other in others)
    if not compared:
        return "–"
    return "equal" if equal == compared else f"{equal} of {compared} equal"


def troubles(comparison: Comparison) -> list[str]:
    """Return a line for every planned run that is in no figure, and for every earlier failure."""
    lines = []
    for run in comparison.runs:
        if run.is_complete:
            continue
        what = run.status
        if what == "failed" and run.exit_code is not None:
            what += f" with exit code {run.exit_code}"
        where = "" if run.status == "not run" else f"; see {run.folder / 'output.log'}"
        lines.append(
            f"block {run.block}, {run.configuration}, {count(run.workers, 'worker')}: {what}{where}"
        )
    for folder in comparison.earlier_failures:
        lines.append(
            f"{folder.parent.name}, {folder.name}: failed, and was run again; "
            f"see {folder / 'output.log'}"
        )
    return lines


def difference_text(fact: Fact) -> str:
    """Say in what runs differ: the field, each configuration's value, and in which blocks."""
    values = ", ".join(f"{short(value)} ({name})" for name, value in fact.values)
    blocks = ", ".join(map(str, fact.unequal_blocks))
    return f"{fact.field}: {values}; block{'' if len(fact.unequal_blocks) == 1 else 's'} {blocks}"


def three_digits(value: float) -> str:
    """Print a positive number with at least three digits, zeros at the end included, so that a
    column of like numbers stands in line."""
    return f"{value:,.{max(0, 2 - math.floor(math.log10(value)))}f}"


def loss_text(loss: float | None) -> str:
    if loss is None:
        return "–"
    return f"{loss:.4f}" if loss < 1000 else f"{loss:.2e}"  # of a training that diverged


def short(value: Any) -> str:
    """Print a value; of a digest, its first 12 digits."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, list | tuple):
        return ", ".join(short(part) for part in value) or "none"
    if isinstance(value, str) and len(value) == 64 and not value.strip("0123456789abcdef"):
        return f"{value[:12]}…"
    return str(value)
