"""The rows of the report's tables: a line for each cell that was measured."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from statistics import median
from typing import Any

from compare.evidence.paired import Estimate, estimate_ratio
from compare.evidence.records import ENGINES, Cell, Comparison, RunRecord
from compare.evidence.turns import throughput, work_per_cpu_second
from compare.evidence.words import label_of
from recipe.record.schema import Energy, Input

# A rank's own work: with ablation its backward holds no exchange, without it no clock can tell.
ABLATED_COMPUTING = ("forward_seconds", "backward_seconds")
COMPUTING = ("data_seconds", "forward_seconds")
EPOCHS, IMAGES = 90, 1_281_167  # of ImageNet (Russakovsky et al., IJCV 115, 2015, table 2)
BLOCKS_IN_DETAIL = 8  # whose single steps and epochs are read: of hundreds nobody sees more


@dataclass(frozen=True)
class CellRow:
    """A line of a table; a figure in it that is None was not measured."""

    case: str
    workers: int
    configuration: str
    label: str


@dataclass(frozen=True)
class SpeedRow(CellRow):
    """How fast a cell trained: by turns, or in whole runs, as the plan measures."""

    images_per_second: float  # median of the blocks
    lowest: float
    highest: float
    scaling: Estimate | None  # images/s a worker over that at the fewest workers, block by block
    cpu_ms_per_image: float  # median
    blocks: int
    planned_blocks: int | None  # None: as many as it takes


@dataclass(frozen=True)
class TrainingRow(CellRow):
    """What whole trainings of a cell show: medians over its complete runs."""

    startup_seconds: float | None  # and the end: all that is not on the training clock
    train_seconds: float
    evaluation_seconds: float  # with checkpoints
    top1: float | None
    top5: float | None
    loss: float | None
    weights: str  # are the final weights those of the other configurations?
    runs: int
    planned_runs: int


@dataclass(frozen=True)
class ResourceRow(CellRow):
    """What a cell used."""

    peak_memory_bytes: Estimate  # of the largest rank
    straggler_ratio: float | None  # slowest rank's computing time a step over the median rank's
    straggler_phases: str  # what that time is of: "forward and backward" or "data and forward"
    gpu_joules_per_image: float | None  # medians over the runs, as all that follow
    gpu_watts: float | None
    gpu_utilization_percent: float | None
    cpu_joules_per_image: float | None


@dataclass(frozen=True)
class LadderRow(CellRow):
    """What a way of training costs, and whether it trains the same: medians over the cell's runs.
    Not a speed: that of a pipeline's two ranks, say, is of other work than two workers'."""

    engine: str
    peak_memory_bytes: float  # of the largest rank
    network_bytes_per_step: float | None
    bubble_share: float | None  # of a pipeline
    staleness: float | None  # of a parameter server, in updates
    top1: float | None
    # Bit-equal to those of the plan's first configuration in each block? None: a block lacks that.
    has_firsts_weights: bool | None


@dataclass(frozen=True)
class StepRow(CellRow):
    """How long the single steps of a cell's runs took, in milliseconds."""

    steps: int
    median: float
    p95: float
    p99: float
    longest: float


@dataclass(frozen=True)
class InputRow(Input, CellRow):
    """What a cell read: medians over its complete runs."""


@dataclass(frozen=True)
class Speed:
    """What one block measured of a cell."""

    images_per_second: float
    cpu_seconds_per_image: float


def by_turns(comparison: Comparison) -> bool:
    """Tell whether speed was measured by turns, not in whole runs."""
    return bool(comparison.plan.get("measure") == "turns")


def speeds(comparison: Comparison, cell: Cell) -> dict[int, Speed]:
    """Return what each block measured of a cell."""
    case, workers, name = cell
    if by_turns(comparison):
        return {
            block.number: Speed(
                block.median(name, throughput), 1 / block.median(name, work_per_cpu_second)
            )
            for block in comparison.turn_blocks(case, workers)
            if name in block.order
        }
    return {
        run.block: Speed(run.summary.images_per_second, run.summary.cpu_seconds_per_image)
        for run in comparison.complete_runs(cell)
    }


def places(comparison: Comparison) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Yield each cell in the tables' order, and the fields of its CellRow."""
    labels = {name: label_of(comparison, name) for name in comparison.plan["configurations"]}
    for cell in comparison.cells:
        case, workers, name = cell
        yield (
            cell,
            {"case": case, "workers": workers, "configuration": name, "label": labels[name]},
        )


def speed_rows(comparison: Comparison) -> list[SpeedRow]:
    """Return the speed of each cell."""
    found = {cell: speeds(comparison, cell) for cell in comparison.cells}
    fewest = min(comparison.workers)
    rows = []
    for cell, place in places(comparison):
        if not (own := found[cell]):
            continue
        rates = [speed.images_per_second for speed in own.values()]
        base = found.get((cell[0], fewest, cell[2]), {}) if cell[1] > fewest else {}
        common = [block for block in own if block in base]
        planned = sum(run.cell == cell for run in comparison.runs)
        rows.append(
            SpeedRow(
                **place,
                images_per_second=median(rates),
                lowest=min(rates),
                highest=max(rates),
                scaling=estimate_ratio(
                    [own[block].images_per_second / cell[1] for block in common],
                    [base[block].images_per_second / fewest for block in common],
                    confidence=comparison.confidence,
                )
                if common
                else None,
                cpu_ms_per_image=1000 * median(s.cpu_seconds_per_image for s in own.values()),
                blocks=len(own),
                planned_blocks=comparison.plan["blocks"] if by_turns(comparison) else planned,
            )
        )
    return rows


def hours(images_per_second: float) -> float:
    """Return how long 90 epochs of ImageNet take at a speed."""
    return EPOCHS * IMAGES / images_per_second / 3600


def training_rows(comparison: Comparison) -> list[TrainingRow]:
    """Return what the whole trainings of each cell show."""
    digests: dict[tuple[int, str, int], set[str]] = {}
    configurations: dict[tuple[int, str, int], int] = {}
    for run in comparison.complete:
        group = (run.block, run.case, run.workers)
        digests.setdefault(group, set()).add(run.summary.weights_sha256)
        configurations[group] = configurations.get(group, 0) + 1
    rows = []
    for cell, place in places(comparison):
        if not (runs := comparison.complete_runs(cell)):
            continue
        groups = [(run.block, run.case, run.workers) for run in runs]
        equal = [len(digests[group]) == 1 for group in groups if configurations[group] > 1]
        weights = "equal" if all(equal) else f"{sum(equal)} of {len(equal)} equal"
        summaries = [run.summary for run in runs]
        rows.append(
            TrainingRow(
                **place,
                startup_seconds=middle([startup_seconds(run) for run in runs]),
                train_seconds=median(summary.train_seconds for summary in summaries),
                evaluation_seconds=median(s.total_seconds - s.train_seconds for s in summaries),
                top1=middle([summary.top1 for summary in summaries]),
                top5=middle([summary.top5 for summary in summaries]),
                loss=middle([summary.loss for summary in summaries]),
                weights=weights if equal else "–",
                runs=len(runs),
                planned_runs=sum(run.cell == cell for run in comparison.runs),
            )
        )
    return rows


def startup_seconds(run: RunRecord) -> float | None:
    """Return what a run took beside training, from its launcher's start to its end; None for one
    that was started by hand."""
    return None if run.seconds is None else run.seconds - run.summary.total_seconds


def resource_rows(comparison: Comparison) -> list[ResourceRow]:
    """Return what each cell with a complete run used, in the table's order."""
    rows = []
    for cell, place in places(comparison):
        if not (runs := comparison.complete_runs(cell)):
            continue
        # Without ablation the backward of a rank says nothing of its own speed: in it the fast
        # ranks wait for the slow.
        phases = "forward and backward"
        ablated = [run for run in comparison.complete_phase_runs(cell) if is_ablated(run)]
        spread = middle([straggler_ratio(run, ABLATED_COMPUTING) for run in ablated])
        if spread is None:
            phases = "data and forward"
            spread = middle([straggler_ratio(run, COMPUTING) for run in runs])
        memory = [float(run.summary.peak_memory_bytes) for run in runs]
        rows.append(
            ResourceRow(
                **place,
                peak_memory_bytes=estimate_ratio(
                    memory, [1.0] * len(memory), confidence=comparison.confidence
                ),
                straggler_ratio=spread,
                straggler_phases=phases,
                **medians([run.summary.energy for run in runs]),
            )
        )
    return rows


def ladder_rows(comparison: Comparison) -> list[LadderRow]:
    """Return what the ways of training of a ladder cost; none where only the two engines train."""
    if all(run.engine in ENGINES for run in comparison.runs):
        return []
    first = comparison.plan["configurations"][0]
    digests = {
        (run.block, run.case, run.workers): run.summary.weights_sha256
        for run in comparison.complete
        if run.configuration == first
    }
    rows = []
    for cell, place in places(comparison):
        if not (runs := comparison.complete_runs(cell)):
            continue
        summaries = [run.summary for run in runs]
        firsts = [digests.get((run.block, run.case, run.workers)) for run in runs]
        rows.append(
            LadderRow(
                **place,
                engine=runs[0].engine,
                peak_memory_bytes=median(summary.peak_memory_bytes for summary in summaries),
                network_bytes_per_step=middle([s.network_bytes_per_step for s in summaries]),
                bubble_share=middle([summary.rung.bubble_share for summary in summaries]),
                staleness=middle([summary.rung.staleness for summary in summaries]),
                top1=middle([summary.top1 for summary in summaries]),
                has_firsts_weights=None
                if None in firsts
                else firsts == [summary.weights_sha256 for summary in summaries],
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


def step_rows(comparison: Comparison) -> list[StepRow]:
    """Return how long the steps of each cell took, over all steps of its runs `in_detail`."""
    rows = []
    for cell, place in places(comparison):
        runs = in_detail(comparison.complete_runs(cell))
        if times := sorted(1000 * line.seconds for run in runs for line in run.steps):
            rows.append(
                StepRow(
                    **place,
                    steps=len(times),
                    median=quantile(times, 0.5),
                    p95=quantile(times, 0.95),
                    p99=quantile(times, 0.99),
                    longest=times[-1],
                )
            )
    return rows


def in_detail(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Return the runs whose single steps and epochs are shown: of some blocks, evenly chosen."""
    blocks = sorted({run.block for run in runs})
    chosen = set(blocks[:: -(-len(blocks) // BLOCKS_IN_DETAIL) or 1])
    return [run for run in runs if run.block in chosen]


def quantile(ordered: Sequence[float], part: float) -> float:
    """Return the value that this part of the ordered ones lie below."""
    return ordered[min(int(part * len(ordered)), len(ordered) - 1)]


def input_rows(comparison: Comparison) -> list[InputRow]:
    """Return what each cell with a complete run read, in the table's order."""
    return [
        InputRow(**place, **medians([run.summary.input for run in runs]))
        for cell, place in places(comparison)
        if (runs := comparison.complete_runs(cell))
    ]


def medians(records: Sequence[Input] | Sequence[Energy]) -> dict[str, Any]:
    """Return the median of each figure of these records; None if one did not measure it."""
    names = [field.name for field in fields(records[0])]
    return {name: middle([getattr(record, name) for record in records]) for name in names}


def middle(values: Sequence[float | None]) -> float | None:
    """Return the median; None if there is no value, or one was not measured."""
    known = [value for value in values if value is not None]
    return median(known) if known and len(known) == len(values) else None
