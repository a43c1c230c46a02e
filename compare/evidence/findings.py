"""What a comparison shows: the table's rows, the verdicts and what explains them, and what was and
was not equal.

A cell is a case at a number of workers in a configuration. Configurations are compared within a
case and a number of workers, in the same block, and never otherwise.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

from compare.evidence.paired import MIN_BLOCKS, Estimate, estimate_ratio
from compare.evidence.records import Comparison, RunRecord
from compare.evidence.run_folder import recorded

# What may differ between two runs that are compared, whatever the plan: where they were written.
PLACES = {"log_dir", "name"}
# What a file of knobs sets (recipe/knobs.py, which a report does without), beside variables.
KNOBS = (
    "first_bucket_mb", "bucket_cap_mb", "gradient_as_bucket_view", "static_graph", "num_groups",
)  # fmt: skip
# What may differ as well where the plan starts the two in different ways.
START = {"engine", "launcher", "transport"}
# What a setting of the trainers decides beside itself: where a plan varies it, these may differ,
# too. A setting that is missing here decides nothing else that is compared. (The initial weights
# are of one precision, the schedule of one batch: its unit is the epoch, not the step.)
STEPS = ("steps", "samples_seen")
RATES = ("learning_rates_sha256",)
DATA = ("data_order_sha256", "num_images", "num_val_images")
DECIDED_BY = {
    "fp16_allreduce": ("wire_format",),
    "batch_size": STEPS,
    "batches_per_allreduce": (*STEPS, *RATES),
    "epochs": (*STEPS, *RATES),
    "max_steps": STEPS,
    "seed": ("data_order_sha256", "initial_weights_sha256"),
    "arch": ("initial_weights_sha256",),
    "pretrained": ("initial_weights_sha256",),
    "weights": ("initial_weights_sha256",),
    "data": (*DATA, *STEPS, "initial_weights_sha256"),
    "train_dir": (*DATA, *STEPS, "initial_weights_sha256"),
    "val_dir": ("num_val_images",),
    "synthetic_images": (*DATA, *STEPS),
    "cuda": ("device", "device_name", "CUDA version"),
    "use_adasum": RATES,
    **dict.fromkeys(
        ("base_lr", "lr_scheduler", "lr_step_epochs", "lr_gamma", "lr_min", "warmup_epochs",
         "warmup_method"), RATES,
    ),
}  # fmt: skip
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
# Flags that tell what was compared; the page shows the others folded away.
CHIEF_FLAGS = (
    "arch", "batch_size", "batches_per_allreduce", "precision", "batch_norm", "epochs", "threads",
    "seed",
)  # fmt: skip
ABSENT = "absent"
# A step's phases: the field of PhaseRow and of summary.json's `phases`, and the words for it.
PHASES = {
    "data_seconds": "data",
    "forward_seconds": "forward",
    "backward_seconds": "backward",
    "exposed_communication_seconds": "exposed communication",
    "optimizer_seconds": "optimizer",
}
# What leaving the exchange out shows with one worker, who has nobody to exchange gradients with.
ALONE = {"exposed_communication_seconds": "the engine's own work"}
PHASE_TOLERANCE = 0.02  # the phases must add up to the step within so much of it
# A rank's own work: with ablation its backward holds no exchange, without it no clock can tell.
ABLATED_COMPUTING = ("forward_seconds", "backward_seconds")
COMPUTING = ("data_seconds", "forward_seconds")
BUSY_SHARE = 0.1  # of the cores: what other processes may use before the report warns


@dataclass(frozen=True)
class Row:
    """One line of the table: a configuration at a number of workers, over its complete runs."""

    case: str
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

    @property
    def is_equal(self) -> bool:
        return not self.unequal_blocks

    @property
    def forbids_verdict(self) -> bool:
        """Tell whether runs differ here, and were not meant to."""
        return bool(self.unequal_blocks) and not self.is_varied


@dataclass(frozen=True)
class LossGap:
    """Where the training losses of two runs are farthest apart."""

    largest: float
    block: int
    step: int
    steps: int


@dataclass(frozen=True)
class Verdict:
    """What is said of two configurations in one case at one number of workers."""

    case: str
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
    compared: str  # what the plan has differ between the two, in words
    is_null_test: bool  # both are the same: a difference would be the machine's, or the plan's

    @property
    def place(self) -> str:
        """Say where this was measured, as the beginning of a sentence."""
        workers = count(self.workers, "worker")
        return f"{self.case}, {workers}:" if self.case else f"At {workers}"

    def sentence(self) -> str:
        """Say the verdict in hyperfine's manner, or why there is none."""
        at = self.place
        if self.differences:
            return (
                f"{at} no verdict on {self.first_label} and {self.second_label}: the runs "
                f"differ in more than {self.compared}."
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
        if self.is_null_test:
            return f"{at} {self.null_text(self.speed)}"
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

    def null_text(self, speed: Estimate) -> str:
        """Say what a configuration's comparison with itself showed, which has an interval."""
        figures = (
            f"speed ratio {ratio_text(speed)}, {interval_text(speed)}, "
            f"{count(speed.blocks, 'block')}"
        )
        if not speed.shows_difference:
            return (
                f"no difference was shown between {self.first_label} and itself, as it should be: "
                f"{figures}."
            )
        percent = 100 * (math.exp(abs(math.log(speed.ratio))) - 1)
        return (
            f"a difference was shown between {self.first_label} and itself: {figures}. This "
            f"machine or this plan is not fit to tell differences of {percent:.2g} % (by chance "
            "alone this comes about in one null test of twenty: run it again)."
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
        field: (value, field in run.config.flags and field not in CHIEF_FLAGS)
        for field, value in run.summary.fingerprint.items()
    }
    environment = recorded(run.environment)
    for field in EQUAL_IN_SUMMARY:
        facts.setdefault(field, (getattr(run.summary, field), False))
    for field in EQUAL_IN_ENVIRONMENT:
        facts.setdefault(field, (environment[field], False))
    for field, name in EQUAL_WHERE_WRITTEN.items():
        if field in environment:
            facts.setdefault(name, (environment[field], False))
    for field in EQUAL_WHERE_USED:
        if environment[field] is not None:
            facts.setdefault(field, (environment[field], False))
    for field in START:
        facts.setdefault(field, (getattr(run.summary, field), False))
    for name, value in run.environment.variables.items():
        facts.setdefault(name, (value, False))
    for flag, value in run.config.flags.items():
        facts.setdefault(flag, (value, True))
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
    if any(a[field] != b[field] for field in ("engine", "launcher", "controller")):
        varied |= START
    if a["flags"] != b["flags"]:
        for field in comparison.plan["varied"]:
            varied |= {field, *DECIDED_BY.get(field, ())}
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
        for run in comparison.complete
        if run.configuration in (first, second) and run.config.knobs
    ]
    if not tuned:
        return set()
    variables = {name for config in tuned for name in config.knob_variables}
    return {"knob_variables", *KNOBS, *variables}


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

    What differs between blocks only (the seed, and all that follows from it) is meant to; so is
    what differs between configurations that are not judged against each other.
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
    case, workers = cells.pop()
    varied = {pair: varied_fields(comparison, *pair) for pair in compared_pairs(comparison)}
    compared = []
    for field in dict.fromkeys(field for facts in told.values() for field in facts):
        values = {}
        for block, members in blocks.items():
            values[block] = {
                run.configuration: told[run.folder].get(field, (ABSENT, False))[0]
                for run in members
                if field in told[run.folder] or field not in EQUAL_WHERE_USED
            }
        values = {block: by_name for block, by_name in values.items() if by_name}
        firsts = {block: next(iter(by_name.values())) for block, by_name in values.items()}
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
            continue  # the labels tell it
        shown = unequal[0] if unequal else min(values)
        compared.append(
            Fact(
                field=field,
                case=case,
                workers=workers,
                is_flag=all(facts[field][1] for facts in told.values() if field in facts),
                is_varied=bool(unequal) and is_varied,
                unequal_blocks=unequal,
                values=tuple(values[shown].items()),
                varies_over_blocks=any(one != firsts[min(firsts)] for one in firsts.values()),
            )
        )
    return compared


def compared_pairs(comparison: Comparison) -> list[tuple[str, str]]:
    """Return the pairs of configurations to judge."""
    return [(first, second) for first, second in comparison.plan["pairs"]]


def all_workers(comparison: Comparison) -> list[int]:
    return sorted({run.workers for run in comparison.runs})


def all_cells(comparison: Comparison) -> list[tuple[str, int, str]]:
    """Return the cells in the order of the tables: case, workers, configuration."""
    planned = {run.cell for run in comparison.runs}
    return [
        (case, workers, configuration)
        for case in comparison.cases
        for workers in all_workers(comparison)
        for configuration in comparison.plan["configurations"]
        if (case, workers, configuration) in planned
    ]


def complete_runs(comparison: Comparison, cell: tuple[str, int, str]) -> list[RunRecord]:
    """Return the complete runs of a cell, those of the phases not among them."""
    return [run for run in comparison.complete if run.cell == cell]


def complete_phase_runs(comparison: Comparison, cell: tuple[str, int, str]) -> list[RunRecord]:
    """Return the cell's run that measured the phases, in a list that is empty if there is none."""
    return [run for run in comparison.phase_runs if run.cell == cell and run.is_complete]


def judge(comparison: Comparison) -> list[Verdict]:
    """Return a verdict for each case, number of workers, and pair of configurations."""
    return [
        judge_pair(comparison, case, workers, first, second)
        for case in comparison.cases
        for workers in all_workers(comparison)
        for first, second in compared_pairs(comparison)
    ]


def judge_pair(comparison: Comparison, case: str, workers: int, first: str, second: str) -> Verdict:
    """Compare two configurations over the blocks in which both are complete."""
    blocks = sorted({run.block for run in comparison.runs})
    pairs, missing = [], []
    for block in blocks:
        a = comparison.find(block, first, workers, case)
        b = comparison.find(block, second, workers, case)
        if a.is_complete and b.is_complete:
            pairs.append((a, b))
        else:
            missing.append(block)
    facts = compare_facts(comparison, (run for pair in pairs for run in pair))
    differences = tuple(fact for fact in facts if fact.forbids_verdict)
    speed = cpu = gap = None
    if pairs and not differences:
        speed = estimate(pairs, "images_per_second")
        cpu = estimate(pairs, "cpu_seconds_per_image")
    equal = tuple(a.summary.weights_sha256 == b.summary.weights_sha256 for a, b in pairs)
    if not all(equal):
        gap = largest_loss_gap(pair for pair, same in zip(pairs, equal, strict=True) if not same)
    return Verdict(
        case=case,
        workers=workers,
        first=first,
        second=second,
        first_label=label_of(comparison, first),
        second_label=label_of(comparison, second),
        speed=speed,
        cpu=cpu,
        differences=differences,
        missing_blocks=tuple(missing),
        equal_weights=equal,
        loss_gap=gap,
        compared=compared_text(comparison, first, second),
        is_null_test=comparison.plan["null"],
    )


def estimate(pairs: list[tuple[RunRecord, RunRecord]], field: str) -> Estimate:
    first, second = zip(
        *((getattr(a.summary, field), getattr(b.summary, field)) for a, b in pairs), strict=True
    )
    return estimate_ratio(first, second)


def label_of(comparison: Comparison, configuration: str) -> str:
    """Name a configuration by what its complete runs used, and by its own flags and variables; by
    its own name if the runs used different things, or if another one has the same label."""
    names = comparison.plan["configurations"]
    labels = {name: used_and_set(comparison, name) for name in names}
    label = labels[configuration]
    namesakes = [name for name in names if labels[name] == label]
    if len(namesakes) == 1:
        return label
    if comparison.plan["null"] and len(namesakes) == 2:
        return label if configuration == namesakes[0] else f"{label}, again"
    return f"{label} as {configuration}"


def used_and_set(comparison: Comparison, configuration: str) -> str:
    """Return what a configuration's runs used, as in "DDP (torchrun, Gloo) with --static-graph"."""
    labels = {run.label for run in comparison.complete if run.configuration == configuration}
    if len(labels) != 1:
        return configuration
    details = comparison.plan["configuration_details"].get(configuration, {})
    own = [*details.get("flags", ())]
    if "--knobs" not in own:  # but for all configurations: a reader must know that it was tuned
        runs = [run for run in comparison.complete if run.configuration == configuration]
        files = {run.config.knobs for run in runs if run.config.knobs}
        own += [f"--knobs {name}" for name in sorted(files)]
    own += [f"{name}={value}" for name, value in details.get("environment", {}).items()]
    return f"{labels.pop()} with {' '.join(own)}" if own else labels.pop()


def largest_loss_gap(pairs: Iterable[tuple[RunRecord, RunRecord]]) -> LossGap | None:
    """Find where two runs' training losses are farthest apart, over the steps both have."""
    gap = None
    for a, b in pairs:
        losses = {line.step: line.loss for line in b.steps}
        steps = [line for line in a.steps if line.step in losses]
        for line in steps:
            difference = abs(line.loss - losses[line.step])
            # `not <=` so that a loss that became NaN counts as the largest gap, not as none
            if gap is None or not difference <= gap.largest:
                gap = LossGap(difference, a.block, line.step, steps[-1].step)
    return gap


def table_rows(comparison: Comparison) -> list[Row]:
    """Return the table, ordered by case, workers, and configuration as in the plan."""
    rows = []
    for cell in all_cells(comparison):
        planned = sum(run.cell == cell for run in comparison.runs)
        if complete := complete_runs(comparison, cell):
            rows.append(table_row(comparison, complete, planned))
    return rows


def table_row(comparison: Comparison, runs: list[RunRecord], planned: int) -> Row:
    def middle(field: str) -> float:
        return float(median(getattr(run.summary, field) for run in runs))

    def validated(field: str) -> float | None:
        return None if any(getattr(run.summary, field) is None for run in runs) else middle(field)

    speeds = [run.summary.images_per_second for run in runs]
    efficiencies = [e for run in runs if (e := efficiency(comparison, run)) is not None]
    return Row(
        case=runs[0].case,
        configuration=runs[0].configuration,
        label=label_of(comparison, runs[0].configuration),
        workers=runs[0].workers,
        images_per_second=median(speeds),
        lowest=min(speeds),
        highest=max(speeds),
        efficiency=median(efficiencies) if efficiencies else None,
        cpu_ms_per_image=1000 * middle("cpu_seconds_per_image"),
        peak_memory_bytes=max(run.summary.peak_memory_bytes for run in runs),
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
    base = comparison.find(run.block, run.configuration, fewest, run.case)
    if not base.is_complete:
        return None
    per_worker = run.summary.images_per_second / run.workers
    return float(per_worker / (base.summary.images_per_second / fewest))


def weights_text(comparison: Comparison, runs: list[RunRecord]) -> str:
    """Say in how many blocks all other configurations ended with the same weights."""
    equal = compared = 0
    for run in runs:
        others = [
            other
            for other in comparison.complete
            if (other.block, other.case, other.workers) == (run.block, run.case, run.workers)
            and other.configuration != run.configuration
        ]
        if others:
            compared += 1
            digest = run.summary.weights_sha256
            equal += all(other.summary.weights_sha256 == digest for other in others)
    if not compared:
        return "–"
    return "equal" if equal == compared else f"{equal} of {compared} equal"


def troubles(comparison: Comparison) -> list[str]:
    """Return a line for every configuration that could not run, for every planned run that is in
    no figure, and for every earlier failure."""
    lines = [
        f"{name}: Horovod is not installed there; python horovod_train/build_horovod.py builds it"
        for name in comparison.plan["left_out"]
    ]
    for run in (*comparison.runs, *comparison.phase_runs):
        if run.is_complete:
            continue
        what = run.status
        if what == "failed" and run.exit_code is not None:
            what += f" with exit code {run.exit_code}"
        where = "" if run.status == "not run" else f"; see {run.folder / 'output.log'}"
        lines.append(f"{run_text(run)}: {what}{where}")
    for folder in comparison.earlier_failures:
        lines.append(
            f"{folder.relative_to(comparison.folder)}: failed, and was run again; "
            f"see {folder / 'output.log'}"
        )
    return lines


def run_text(run: RunRecord) -> str:
    """Name a run in a message."""
    block = f"block {run.block}" if run.block else "phases"
    case = f"{run.case}, " if run.case else ""
    return f"{block}, {case}{run.configuration}, {count(run.workers, 'worker')}"


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


@dataclass(frozen=True)
class PhaseRow:
    """Where the time of a cell's step goes, on rank 0, in seconds.

    Of the cell's run with ablation if there is one, else of that measured run whose step is the
    median one: the phases of one run belong together, medians of each would not add up.
    """

    case: str
    workers: int
    configuration: str
    label: str
    steps: int  # that were averaged
    step_seconds: float
    data_seconds: float
    forward_seconds: float
    backward_seconds: float  # holds the exchange of gradients where that was not measured apart
    exposed_communication_seconds: float | None  # None: not measured; below 0 by noise alone
    optimizer_seconds: float

    @property
    def words(self) -> dict[str, str]:
        """The words for each phase by its field."""
        return PHASES | ALONE if self.workers == 1 else PHASES

    @property
    def parts(self) -> dict[str, float]:
        """The seconds of each phase by its words, without those that were not measured."""
        parts = {words: getattr(self, field) for field, words in self.words.items()}
        return {words: seconds for words, seconds in parts.items() if seconds is not None}

    @property
    def shares(self) -> dict[str, float]:
        """Each phase's share of the step, 0 to 1."""
        return {words: seconds / self.step_seconds for words, seconds in self.parts.items()}

    @property
    def note(self) -> str:
        """Say it if the phases do not add up to the step; empty if they do, within 2 %."""
        whole = sum(self.shares.values())
        if abs(whole - 1) <= PHASE_TOLERANCE:
            return ""
        return f"the phases add up to {100 * whole:.1f} % of the step"


def phase_rows(comparison: Comparison) -> list[PhaseRow]:
    """Return the phases of each cell in which they were measured, in the table's order."""
    rows = []
    for cell in all_cells(comparison):
        ablated = [run for run in complete_phase_runs(comparison, cell) if has_phases(run)]
        runs = ablated or [run for run in complete_runs(comparison, cell) if has_phases(run)]
        if runs:
            runs.sort(key=lambda run: run.summary.phases.step_seconds or 0.0)
            rows.append(phase_row(comparison, runs[(len(runs) - 1) // 2]))
    return rows


def has_phases(run: RunRecord) -> bool:
    """Tell whether a run measured its phases; exposed communication may be missing."""
    needed = PHASES.keys() - {"exposed_communication_seconds"} | {"step_seconds"}
    return all(getattr(run.summary.phases, field) is not None for field in needed)


def phase_row(comparison: Comparison, run: RunRecord) -> PhaseRow:
    return PhaseRow(
        case=run.case,
        workers=run.workers,
        configuration=run.configuration,
        label=label_of(comparison, run.configuration),
        **vars(run.summary.phases),
    )


def explain(verdict: Verdict, comparison: Comparison) -> str:
    """Say which phase accounts for most of a difference that was shown, or why that is not known;
    empty when no difference was shown."""
    if verdict.speed is None or not verdict.speed.shows_difference or verdict.is_null_test:
        return ""
    rows = {
        row.configuration: row
        for row in phase_rows(comparison)
        if (row.case, row.workers) == (verdict.case, verdict.workers)
    }
    slow, fast = verdict.second, verdict.first
    if verdict.speed.ratio < 1:
        slow, fast = fast, slow
    if slow not in rows or fast not in rows:
        return "Where the difference comes from is not known: the phases were not measured."
    sizes = {
        name: run.summary.samples_seen / run.summary.steps
        for name in (slow, fast)
        for run in complete_runs(comparison, (verdict.case, verdict.workers, name))
    }
    if sizes[slow] != sizes[fast]:
        return (
            "Where the difference comes from is not told: a step of the two holds different "
            "numbers of images, so that their phases do not compare."
        )
    a, b = rows[slow], rows[fast]
    told = (
        f"a step of {a.label} took {1000 * a.step_seconds:.1f} ms, "
        f"of {b.label} {1000 * b.step_seconds:.1f} ms"
    )
    longer = a.step_seconds - b.step_seconds
    if longer <= 0:
        return f"The runs that measured the phases do not show the difference: {told}."
    if None in (a.exposed_communication_seconds, b.exposed_communication_seconds):
        parts, other_parts = with_exchange(a), with_exchange(b)
    else:
        parts, other_parts = a.parts, b.parts
    gaps = {words: seconds - other_parts[words] for words, seconds in parts.items()}
    chief = max(gaps, key=lambda words: gaps[words])
    others = [
        f"{words} {1000 * abs(gap):.1f} ms {'more' if gap > 0 else 'less'}"
        for words, gap in gaps.items()
        if words != chief and abs(gap) >= longer / 5
    ]
    rest = f"; {', '.join(others)}" if others else ""
    share = gaps[chief] / longer
    share_text = f"{100 * share:.0f} %" if share <= 1 else "more than all of it"
    return (
        f"Where it comes from: {told}. Of these {1000 * longer:.1f} ms, {chief} accounts for "
        f"{1000 * gaps[chief]:.1f} ms ({share_text}){rest}."
    )


def with_exchange(row: PhaseRow) -> dict[str, float]:
    """Return the phases with the exchange of gradients as part of backward, whether or not it was
    measured apart."""
    exposed = row.exposed_communication_seconds or 0.0
    return {
        "data": row.data_seconds,
        "forward": row.forward_seconds,
        "backward with the exchange of gradients": row.backward_seconds + exposed,
        "optimizer": row.optimizer_seconds,
    }


@dataclass(frozen=True)
class ResourceRow:
    """What a cell used. None: not measured."""

    case: str
    workers: int
    configuration: str
    label: str
    peak_memory_bytes: float  # of the largest rank, over the complete runs
    cpu_seconds_per_image: float  # median over the runs, as are all that follow
    straggler_ratio: float | None  # slowest rank's computing time a step over the median rank's
    straggler_phases: (
        str  # what that computing time is: "forward and backward" or "data and forward"
    )
    gpu_joules_per_image: float | None
    gpu_watts: float | None
    gpu_utilization_percent: float | None
    cpu_joules_per_image: float | None


def resource_rows(comparison: Comparison) -> list[ResourceRow]:
    """Return what each cell with a complete run used, in the table's order."""
    rows = []
    for cell in all_cells(comparison):
        if not (runs := complete_runs(comparison, cell)):
            continue
        # Of a run without ablation `backward` tells nothing of a rank's own speed: in it the fast
        # ranks wait for the slow.
        phases = "forward and backward"
        ablated = [run for run in complete_phase_runs(comparison, cell) if is_ablated(run)]
        spread = middle([straggler_ratio(run, ABLATED_COMPUTING) for run in ablated])
        if spread is None:
            phases = "data and forward"
            spread = middle([straggler_ratio(run, COMPUTING) for run in runs])
        case, workers, configuration = cell
        rows.append(
            ResourceRow(
                case=case,
                workers=workers,
                configuration=configuration,
                label=label_of(comparison, configuration),
                peak_memory_bytes=max(run.summary.peak_memory_bytes for run in runs),
                cpu_seconds_per_image=median(r.summary.cpu_seconds_per_image for r in runs),
                straggler_ratio=spread,
                straggler_phases=phases,
                gpu_joules_per_image=measured(runs, "energy", "gpu_joules_per_image"),
                gpu_watts=measured(runs, "energy", "gpu_watts"),
                gpu_utilization_percent=measured(runs, "energy", "gpu_utilization_percent"),
                cpu_joules_per_image=measured(runs, "energy", "cpu_joules_per_image"),
            )
        )
    return rows


def is_ablated(run: RunRecord) -> bool:
    """Tell whether every rank measured its backward without the exchange of gradients."""
    ranks = run.summary.ranks
    return all(rank.exposed_communication_seconds is not None for rank in ranks)


def straggler_ratio(run: RunRecord, fields: tuple[str, ...]) -> float | None:
    """Return how much longer than the median rank the slowest one computes; None for a single rank,
    and where the ranks' phases were not measured."""
    ranks = run.summary.ranks
    if len(ranks) < 2 or any(getattr(rank, field) is None for rank in ranks for field in fields):
        return None
    seconds = [sum(getattr(rank, field) for field in fields) for rank in ranks]
    return max(seconds) / median(seconds) if median(seconds) > 0 else None


@dataclass(frozen=True)
class InputRow:
    """What a cell read: medians over its complete runs. None: not measured."""

    case: str
    workers: int
    configuration: str
    label: str
    images_per_second: float | None
    files_per_second: float | None
    megabytes_per_second: float | None
    wait_share: float | None  # of the step time, 0 to 1, spent waiting for images


def input_rows(comparison: Comparison) -> list[InputRow]:
    """Return what each cell with a complete run read, in the table's order."""
    rows = []
    for cell in all_cells(comparison):
        if runs := complete_runs(comparison, cell):
            case, workers, configuration = cell
            rows.append(
                InputRow(
                    case=case,
                    workers=workers,
                    configuration=configuration,
                    label=label_of(comparison, configuration),
                    images_per_second=measured(runs, "input", "images_per_second"),
                    files_per_second=measured(runs, "input", "files_per_second"),
                    megabytes_per_second=measured(runs, "input", "megabytes_per_second"),
                    wait_share=measured(runs, "input", "wait_share"),
                )
            )
    return rows


def measured(runs: list[RunRecord], part: str, field: str) -> float | None:
    """Return the median of a figure of the summaries; None if a run did not measure it."""
    return middle([getattr(getattr(run.summary, part), field) for run in runs])


def middle(values: list[float | None]) -> float | None:
    """Return the median; None if there is no value, or one was not measured."""
    known = [value for value in values if value is not None]
    return median(known) if known and len(known) == len(values) else None


def load_warnings(comparison: Comparison) -> list[str]:
    """Return what may make the figures worthless: what run.py warned of before it began, and the
    runs during which other processes kept more than BUSY_SHARE of the cores busy."""
    lines = list(comparison.plan["warnings"])
    for run in (*comparison.runs, *comparison.phase_runs):
        if not run.is_complete or run.other_load is None:
            continue
        cores = run.environment.cores
        if run.other_load > BUSY_SHARE * cores:
            lines.append(
                f"{run_text(run)}: other processes kept {run.other_load:.1f} of "
                f"{count(cores, 'core')} busy"
            )
    return lines
