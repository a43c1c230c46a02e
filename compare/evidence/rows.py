"""The rows of the report's tables: a line for each cell that has complete runs."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from statistics import median
from typing import Any

from compare.evidence.records import Cell, Comparison, RunRecord
from compare.evidence.words import label_of
from recipe.record.schema import Energy, Input

# A rank's own work: with ablation its backward holds no exchange, without it no clock can tell.
ABLATED_COMPUTING = ("forward_seconds", "backward_seconds")
COMPUTING = ("data_seconds", "forward_seconds")


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
class CellRow:
    """A line of one of the other tables; a figure in it that is None was not measured."""

    case: str
    workers: int
    configuration: str
    label: str


@dataclass(frozen=True)
class ResourceRow(CellRow):
    """What a cell used."""

    peak_memory_bytes: float  # of the largest rank, over the complete runs
    cpu_seconds_per_image: float  # median over the runs, as are all that follow
    straggler_ratio: float | None  # slowest rank's computing time a step over the median rank's
    straggler_phases: str  # what that time is of: "forward and backward" or "data and forward"
    gpu_joules_per_image: float | None
    gpu_watts: float | None
    gpu_utilization_percent: float | None
    cpu_joules_per_image: float | None


@dataclass(frozen=True)
class InputRow(Input, CellRow):
    """What a cell read: medians over its complete runs."""


def table_rows(comparison: Comparison) -> list[Row]:
    """Return the table, ordered by case, workers, and configuration as in the plan."""
    return [
        table_row(comparison, cell, runs)
        for cell in comparison.cells
        if (runs := comparison.complete_runs(cell))
    ]


def table_row(comparison: Comparison, cell: Cell, runs: list[RunRecord]) -> Row:
    case, workers, configuration = cell
    summaries = [run.summary for run in runs]
    speeds = [summary.images_per_second for summary in summaries]
    efficiencies = [e for run in runs if (e := efficiency(comparison, run)) is not None]
    return Row(
        case=case,
        configuration=configuration,
        label=label_of(comparison, configuration),
        workers=workers,
        images_per_second=median(speeds),
        lowest=min(speeds),
        highest=max(speeds),
        efficiency=middle(efficiencies),
        cpu_ms_per_image=1000 * median(summary.cpu_seconds_per_image for summary in summaries),
        peak_memory_bytes=max(summary.peak_memory_bytes for summary in summaries),
        train_seconds=median(summary.train_seconds for summary in summaries),
        top1=middle([summary.top1 for summary in summaries]),
        top5=middle([summary.top5 for summary in summaries]),
        loss=middle([summary.loss for summary in summaries]),
        weights=weights_text(comparison, runs),
        blocks=len(runs),
        planned_blocks=sum(run.cell == cell for run in comparison.runs),
    )


def efficiency(comparison: Comparison, run: RunRecord) -> float | None:
    """Return images a second and worker, against the same block's run at the fewest workers."""
    fewest = min(comparison.workers)
    if run.workers == fewest:
        return None
    base = comparison.find(run.block, run.configuration, fewest, run.case)
    if not base.is_complete:
        return None
    per_worker = run.summary.images_per_second / run.workers
    return per_worker / (base.summary.images_per_second / fewest)


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


def resource_rows(comparison: Comparison) -> list[ResourceRow]:
    """Return what each cell with a complete run used, in the table's order."""
    rows = []
    for cell in comparison.cells:
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
        rows.append(
            ResourceRow(
                **place(comparison, cell),
                peak_memory_bytes=max(run.summary.peak_memory_bytes for run in runs),
                cpu_seconds_per_image=median(r.summary.cpu_seconds_per_image for r in runs),
                straggler_ratio=spread,
                straggler_phases=phases,
                **medians([run.summary.energy for run in runs]),
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


def input_rows(comparison: Comparison) -> list[InputRow]:
    """Return what each cell with a complete run read, in the table's order."""
    return [
        InputRow(**place(comparison, cell), **medians([run.summary.input for run in runs]))
        for cell in comparison.cells
        if (runs := comparison.complete_runs(cell))
    ]


def place(comparison: Comparison, cell: Cell) -> dict[str, Any]:
    """Return the fields of CellRow."""
    case, workers, configuration = cell
    label = label_of(comparison, configuration)
    return {"case": case, "workers": workers, "configuration": configuration, "label": label}


def medians(records: Sequence[Input] | Sequence[Energy]) -> dict[str, Any]:
    """Return the median of each figure of these records; None if one did not measure it."""
    names = [field.name for field in fields(records[0])]
    return {name: middle([getattr(record, name) for record in records]) for name in names}


def middle(values: Sequence[float | None]) -> float | None:
    """Return the median; None if there is no value, or one was not measured."""
    known = [value for value in values if value is not None]
    return median(known) if known and len(known) == len(values) else None
