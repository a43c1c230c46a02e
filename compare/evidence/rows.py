"""The rows of the report's tables: a line for each cell that was measured."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, harmonic_mean, median
from typing import Any

from compare.evidence.paired import Estimate, estimate_ratio
from compare.evidence.records import CellKey, Comparison, RunRecord
from compare.evidence.turns import tail, throughput, work_per_cpu_second
from compare.evidence.verdicts import DIFFERENT, Verdict
from recipe.record.schema import Energy, Input, Phases

EPOCHS, IMAGES = 90, 1_281_167  # of ImageNet (Russakovsky et al., IJCV 115, 2015, table 2)
IMAGENET_CROPS, IMAGENET_CLASSES = range(160, 321), 1000


@dataclass(frozen=True, kw_only=True)
class CellRow:
    """A line of a table; a figure in it that is None was not measured."""

    case: str
    workers: int
    configuration: str

    @property
    def cell(self) -> CellKey:
        return self.case, self.workers, self.configuration


@dataclass(frozen=True, kw_only=True)
class SpeedRow(CellRow):
    """How fast a cell trained: by turns, or in whole runs, as the plan measures."""

    images_per_second: float  # over all blocks: images over seconds, of turns or whole runs
    lowest: float
    highest: float
    slow_turns: float | None  # see `tail`; None of whole runs
    scaling: Estimate | None  # images/s a worker over that at the fewest workers, block by block
    cpu_ms_per_image: float
    blocks: int
    planned_blocks: int | None  # None: as many as it takes
    hours_of_90_epochs: float | None  # at this speed, on ImageNet; None of other images
    cost_of_90_epochs: float | None  # None without a price


@dataclass(frozen=True, kw_only=True)
class TrainingRow(Energy, Input, CellRow):
    """What whole trainings of a cell show, used and read: medians over its complete runs."""

    startup_seconds: float | None  # and the end: all that is not on the training clock
    train_seconds: float
    evaluation_seconds: float  # with checkpoints
    top1: float | None
    top5: float | None
    loss: float | None
    weights: str  # are the final weights those of the other configurations?
    runs: int
    planned_runs: int
    peak_memory: Estimate  # bytes of the largest rank
    straggler_ratio: float | None  # slowest rank's computing time a step over the median rank's
    network_bytes_per_step: float | None
    bubble_share: float | None  # of a pipeline
    staleness: float | None  # of a parameter server, in updates
    # Bit-equal to those of the plan's first configuration in each block? None: a block lacks that.
    has_firsts_weights: bool | None


def place(cell: CellKey) -> dict[str, Any]:
    """Return the fields that say which cell a row is of."""
    return dict(zip(("case", "workers", "configuration"), cell, strict=True))


def speeds(comparison: Comparison, cell: CellKey) -> dict[int, tuple[float, float]]:
    """Return images per second and CPU-seconds per image of a cell, by block."""
    case, workers, name = cell
    return {
        block.number: (
            block.rate(name, throughput), 1 / block.rate(name, work_per_cpu_second)
        )
        for block in comparison.blocks(case, workers)
        if name in block.order
    }  # fmt: skip


def speed_rows(comparison: Comparison, price_per_hour: float | None = None) -> list[SpeedRow]:
    """Return the speed of each cell; a price is that of all workers together."""
    found = {cell: speeds(comparison, cell) for cell in comparison.cells}
    fewest, hours, cost = min(comparison.workers), None, None
    is_imagenet = is_of_imagenet(comparison)
    rows = []
    for cell, own in found.items():
        if not own:
            continue
        case, workers, name = cell
        own_blocks = [one for one in comparison.blocks(case, workers) if name in one.order]
        rates, cpu_seconds = zip(*own.values(), strict=True)
        base = found.get((case, fewest, name), {}) if workers > fewest else {}
        common = [block for block in own if block in base]
        scaling = estimate_ratio(
            [own[block][0] / workers for block in common],
            [base[block][0] / fewest for block in common],
            confidence=comparison.confidence,
        ) if common else None  # fmt: skip
        if is_imagenet:
            hours = EPOCHS * IMAGES / harmonic_mean(rates) / 3600
            cost = None if price_per_hour is None else price_per_hour * hours
        planned = sum(run.cell == cell for run in comparison.runs)
        rows.append(
            SpeedRow(
                **place(cell),
                images_per_second=harmonic_mean(rates),
                lowest=min(rates),
                highest=max(rates),
                slow_turns=tail(own_blocks, name) if comparison.is_by_turns else None,
                scaling=scaling,
                cpu_ms_per_image=1000 * fmean(cpu_seconds),
                blocks=len(own),
                planned_blocks=comparison.plan.blocks if comparison.is_by_turns else planned,
                hours_of_90_epochs=hours,
                cost_of_90_epochs=cost,
            )
        )
    return rows


def is_of_imagenet(comparison: Comparison) -> bool:
    """Tell whether images had ImageNet's size and number of classes: only of such does a speed say
    what 90 epochs of ImageNet would take."""
    return bool(comparison.complete) and all(
        run.summary.fingerprint.get("num_classes") == IMAGENET_CLASSES
        and run.config.flags.get("train_crop_size") in IMAGENET_CROPS
        for run in comparison.complete
    )


def training_rows(comparison: Comparison) -> list[TrainingRow]:
    """Return what the whole trainings of each cell show."""
    digests: dict[tuple[int, str, int], dict[str, str]] = {}
    for run in comparison.complete:
        group = digests.setdefault((run.block, run.case, run.workers), {})
        group[run.configuration] = run.summary.weights_sha256
    rows = []
    for cell in comparison.cells:
        if not (runs := comparison.complete_runs(cell)):
            continue
        measured = [figures_of(run) for run in runs]
        groups = [digests[run.block, run.case, run.workers] for run in runs]
        equal = [len(set(group.values())) == 1 for group in groups if len(group) > 1]
        weights = "equal" if all(equal) else f"{sum(equal)} of {len(equal)} equal"
        firsts = [group.get(next(iter(comparison.configurations))) for group in groups]
        memory = [float(run.summary.peak_memory_bytes) for run in runs]
        medians = {name: median_or_none([one[name] for one in measured]) for name in measured[0]}
        own = [run.summary.weights_sha256 for run in runs]
        phase_runs = comparison.complete_runs(cell, of_phases=True)
        rows.append(
            TrainingRow(
                **place(cell),
                **medians,  # type: ignore[arg-type]  # None only where that may be
                weights=weights if equal else "–",
                runs=len(runs),
                planned_runs=sum(run.cell == cell for run in comparison.runs),
                peak_memory=estimate_ratio(
                    memory, [1.0] * len(memory), confidence=comparison.confidence
                ),
                straggler_ratio=median_or_none([straggler_ratio(run) for run in phase_runs]),
                has_firsts_weights=None if None in firsts else firsts == own,
            )
        )
    return rows


def figures_of(run: RunRecord) -> dict[str, float | None]:
    """Return what the table of trainings shows the median of, by the names of its row."""
    summary = run.summary
    return {
        "startup_seconds": run.seconds - summary.total_seconds if run.seconds else None,
        "train_seconds": summary.train_seconds,
        "evaluation_seconds": summary.total_seconds - summary.train_seconds,
        "top1": summary.top1,
        "top5": summary.top5,
        "loss": summary.loss,
        "network_bytes_per_step": summary.network_bytes_per_step,
        "bubble_share": summary.rung.bubble_share,
        "staleness": summary.rung.staleness,
        **vars(summary.input),
        **vars(summary.energy),
    }


def straggler_ratio(run: RunRecord) -> float | None:
    """Return how much longer than the median rank the slowest one computes; None for a single rank.

    Only of a run with ablation: without it the backward of a rank says nothing of its own speed,
    since in it the fast ranks wait for the slow.
    """
    times = [
        (rank.forward_seconds, rank.backward_seconds, rank.exposed_communication_seconds)
        for rank in run.summary.ranks
    ]
    if len(times) < 2 or any(None in time for time in times):
        return None
    seconds = [forward + backward for forward, backward, _ in times]  # type: ignore[operator]
    return max(seconds) / median(seconds) if median(seconds) > 0 else None


def median_or_none(values: Sequence[float | None]) -> float | None:
    """Return the median; None if there is no value, or one was not measured."""
    known = [value for value in values if value is not None]
    return median(known) if known and len(known) == len(values) else None


# ------------------------------------------------------------------------------------- the phases

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


@dataclass(frozen=True, kw_only=True)
class PhaseRow(Phases, CellRow):
    """Where the time of a cell's step goes, on rank 0, in seconds.

    Of the cell's run with ablation if there is one, else of that measured run whose step is the
    median one: the phases of one run belong together, medians of each would not add up.
    """

    step_seconds: float
    images_per_step: float
    sent_bytes: float | None = None  # by each worker in a step, if its all-reduce is a ring
    is_difference: bool = False  # of two cells: the first's seconds less the second's
    contradicts_verdict: bool = False  # of a difference: does the verdict say the opposite?

    @property
    def words(self) -> dict[str, str]:
        """The words for each phase by its field."""
        return PHASES | ALONE if self.workers == 1 else PHASES

    @property
    def exposed_bandwidth(self) -> float | None:
        """What was sent over the exposed time, bytes/s: no link was faster, since what overlaps
        with the backward pass took time as well."""
        exposed = self.exposed_communication_seconds
        if not self.sent_bytes or not exposed or exposed <= 0:
            return None
        return self.sent_bytes / exposed


def phase_rows(comparison: Comparison) -> list[PhaseRow]:
    """Return the phases of each cell in which they were measured, in the table's order."""
    rows = []
    for cell in comparison.cells:
        whole, ablated = (
            comparison.complete_runs(cell),
            comparison.complete_runs(cell, of_phases=True),
        )
        runs = [run for run in ablated if run.summary.phases.step_seconds is not None]
        runs = runs or [run for run in whole if run.summary.phases.step_seconds is not None]
        if runs:
            runs.sort(key=lambda run: run.summary.phases.step_seconds or 0.0)
            summary = runs[(len(runs) - 1) // 2].summary
            share = 2 * (cell[1] - 1) / cell[1]  # of a ring: nccl-tests, doc/PERFORMANCE.md
            rows.append(
                PhaseRow(
                    **place(cell),
                    **vars(summary.phases),
                    images_per_step=summary.samples_seen / summary.steps,
                    sent_bytes=share * (summary.gradient_bytes or 0) or None,
                )
            )
    return rows


def phase_differences(rows: Sequence[PhaseRow], verdicts: Iterable[Verdict]) -> list[PhaseRow]:
    """Return, for each verdict that shows a difference, in which phases it is: first less second,
    as the verdicts' ratios are first over second. Steps of different size are not compared."""
    found = {row.cell: row for row in rows}
    differences = []
    for verdict in verdicts:
        first = found.get((verdict.case, verdict.workers, verdict.first))
        second = found.get((verdict.case, verdict.workers, verdict.second))
        if verdict.is_null_test or verdict.decision not in DIFFERENT:
            continue
        if first and second and first.images_per_step == second.images_per_step:
            denied = (first.step_seconds < second.step_seconds) != (verdict.decision == "faster")
            differences.append(replace(subtract_phases(first, second), contradicts_verdict=denied))
    return differences


def subtract_phases(first: PhaseRow, second: PhaseRow) -> PhaseRow:
    """Return one row's seconds less another's; where one of them did not measure the exchange
    apart, it is part of backward in both."""
    own, other = ({name: getattr(row, name) for name in ("step_seconds", *PHASES)}
                  for row in (first, second))  # fmt: skip
    exposed, backward = "exposed_communication_seconds", "backward_seconds"
    if None in (own[exposed], other[exposed]):
        for seconds in (own, other):
            seconds[backward] += seconds[exposed] or 0.0
            seconds[exposed] = None
    return replace(
        first,
        configuration=f"{first.configuration} − {second.configuration}",
        steps=min(first.steps, second.steps),
        sent_bytes=None,
        is_difference=True,
        **{name: None if own[name] is None else own[name] - other[name] for name in own},  # type: ignore[arg-type]
    )
