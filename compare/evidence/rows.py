"""The rows of the report's tables: a line for each cell that was measured."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, harmonic_mean, median
from typing import Any

from compare.evidence.paired import Estimate, estimate_logs, estimate_ratio, mean_interval
from compare.evidence.records import CellKey, Comparison, RunRecord
from compare.evidence.turns import throughput, work_per_cpu_second
from compare.evidence.verdicts import DIFFERENT, Verdict
from recipe.record.schema import Energy, Input


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
    mean: Estimate  # over the blocks, with its interval
    scaling: Estimate | None  # images/s a worker over that at the fewest workers, block by block
    cpu_ms_per_image: float
    blocks: int
    planned_blocks: int | None  # None: as many as it takes


@dataclass(frozen=True, kw_only=True)
class TrainingRow(Energy, Input, CellRow):
    """What whole trainings of a cell show, used and read: medians over its complete runs, and of
    times, input and energy over those of them that nobody disturbed."""

    startup_seconds: float | None  # and the end: all that is not on the training clock
    train_seconds: float | None
    evaluation_seconds: float | None  # with checkpoints
    top1: float | None
    top5: float | None
    loss: float | None
    weights: str  # are the final weights those of the first configuration in the block?
    runs: int
    planned_runs: int
    peak_memory: Estimate  # bytes of the largest rank
    straggler_ratio: float | None  # slowest rank's computing time a step over the median rank's
    network_bytes_per_step: float | None
    bubble_share: float | None  # of a pipeline
    staleness: float | None  # of a parameter server, in updates


def fields_of(cell: CellKey) -> dict[str, Any]:
    """Return the fields that say which cell a row is of."""
    return dict(zip(("case", "workers", "configuration"), cell, strict=True))


def speed_rows(comparison: Comparison) -> list[SpeedRow]:
    """Return the speed of each cell."""
    found = {
        cell: {one.number: one.rate(cell[2], throughput) for one in comparison.blocks_of(cell)}
        for cell in comparison.cells
    }
    fewest, rows = min(comparison.plan.workers), []
    for cell, rates in found.items():
        if not rates:
            continue
        case, workers, name = cell
        blocks, speed = comparison.blocks_of(cell), harmonic_mean([*rates.values()])
        base = found.get((case, fewest, name), {}) if workers > fewest else {}
        common = [block for block in rates if block in base]
        scaling = estimate_ratio(
            [rates[block] / workers for block in common],
            [base[block] / fewest for block in common],
            confidence=comparison.confidence,
        ) if common else None  # fmt: skip
        planned = sum(run.cell == cell for run in comparison.runs)
        rows.append(
            SpeedRow(
                **fields_of(cell),
                images_per_second=speed,
                lowest=min(rates.values()),
                highest=max(rates.values()),
                mean=estimate_logs([*map(math.log, rates.values())], comparison.confidence),
                scaling=scaling,
                cpu_ms_per_image=fmean(
                    1000 / one.rate(name, work_per_cpu_second) for one in blocks
                ),
                blocks=len(blocks),
                planned_blocks=comparison.plan.blocks if comparison.is_by_turns else planned,
            )
        )
    return rows


def training_rows(comparison: Comparison) -> list[TrainingRow]:
    """Return what the whole trainings of each cell show."""
    first = next(iter(comparison.configurations))
    firsts = {
        (run.block, run.case, run.workers): run.summary.weights_sha256
        for run in comparison.complete
        if run.configuration == first
    }
    rows = []
    for cell in comparison.cells:
        if not (runs := comparison.complete_runs(cell)):
            continue
        measured = [figures_of(run) for run in runs]
        equal = [
            run.summary.weights_sha256 == firsts[place]
            for run in runs
            if (place := (run.block, run.case, run.workers)) in firsts
        ]
        weights = "equal" if all(equal) else f"{sum(equal)} of {len(equal)} equal"
        memory = [math.log(run.summary.peak_memory_bytes) for run in runs]
        medians = {name: median_or_none([one[name] for one in measured]) for name in measured[0]}
        ablated = [
            turn.straggler_ratio
            for block in comparison.blocks_of(cell)
            for turn in block.of("ablation")
            if turn.side == cell[2]
        ]
        rows.append(
            TrainingRow(
                **fields_of(cell),
                **medians,  # type: ignore[arg-type]  # None only where that may be
                weights=weights if equal else "–",
                runs=len(runs),
                planned_runs=sum(run.cell == cell for run in comparison.runs),
                peak_memory=estimate_logs(memory, comparison.confidence),
                straggler_ratio=median_or_none(ablated),
            )
        )
    return rows


def figures_of(run: RunRecord) -> dict[str, float | None]:
    """Return what the table of trainings shows the median of, by the names of its row; None where
    others disturbed what would be measured."""
    summary = run.summary
    timed = {
        "startup_seconds": run.seconds - summary.total_seconds if run.seconds else None,
        "train_seconds": summary.train_seconds,
        "evaluation_seconds": summary.total_seconds - summary.train_seconds,
        **vars(summary.input),
        **vars(summary.energy),
    }
    return {
        **(dict.fromkeys(timed) if run.is_disturbed else timed),
        "top1": summary.top1,
        "top5": summary.top5,
        "loss": summary.loss,
        "network_bytes_per_step": summary.network_bytes_per_step,
        "bubble_share": summary.rung.bubble_share,
        "staleness": summary.rung.staleness,
    }


def median_or_none(values: Sequence[float | None]) -> float | None:
    """Return the median of those that were measured; None if none was."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


# ------------------------------------------------------------------------------------- the phases


@dataclass(frozen=True, kw_only=True)
class PhaseRow(CellRow):
    """Where the time of a cell's step goes: seconds by the names of the phases, and `step_seconds`,
    means over blocks. By turns they are means over ranks, of the very turns that the verdicts are
    from; of whole runs those of rank 0. Of the difference of two cells each has its interval: the
    first's seconds less the second's, paired by block, so that the phases add up to the step."""

    seconds: dict[str, Any]
    images_per_step: float


def phases_by_block(comparison: Comparison, cell: CellKey) -> dict[int, dict[str, float]]:
    """Return the seconds of a cell's mean step by phase, of each block in which they were measured:
    by turns, or else in whole runs, where the exchange is part of backward."""
    by_turns = {block.number: block.phases(cell[2]) for block in comparison.blocks_of(cell)}
    by_runs = {
        run.block: {
            name: seconds
            for name, seconds in vars(run.summary.phases).items()
            if name.endswith("_seconds") and seconds is not None
        }
        for run in comparison.complete_runs(cell)
    }
    found = by_turns if any(by_turns.values()) else by_runs
    return {block: seconds for block, seconds in found.items() if "step_seconds" in seconds}


def phase_rows(comparison: Comparison) -> list[PhaseRow]:
    """Return the phases of each cell in which they were measured, in the table's order."""
    rows = []
    for cell in comparison.cells:
        if blocks := [*phases_by_block(comparison, cell).values()]:
            names = [name for name in blocks[0] if all(name in block for block in blocks)]
            rows.append(
                PhaseRow(
                    **fields_of(cell),
                    seconds={name: fmean(block[name] for block in blocks) for name in names},
                    images_per_step=images_per_step(comparison, cell),
                )
            )
    return rows


def images_per_step(comparison: Comparison, cell: CellKey) -> float:
    """Return the images of a cell's mean step, of all workers."""
    for block in comparison.blocks_of(cell):
        if block.steps:
            return block.counted(cell[2])[0].images / block.steps[cell[2]]
    summary = comparison.complete_runs(cell)[0].summary
    return summary.samples_seen / summary.steps


def phase_differences(
    comparison: Comparison, rows: Sequence[PhaseRow], verdicts: Iterable[Verdict]
) -> list[PhaseRow]:
    """Return, for each verdict that shows a difference, in which phases it is: first less second,
    as the verdicts' ratios are first over second. Steps of different size are not compared."""
    found = {row.cell: row for row in rows}
    differences = []
    for verdict in verdicts:
        cells = [(verdict.case, verdict.workers, name) for name in (verdict.first, verdict.second)]
        first, second = (found.get(cell) for cell in cells)
        if verdict.is_null_test or verdict.decision not in DIFFERENT or not (first and second):
            continue
        ours, theirs = (phases_by_block(comparison, cell) for cell in cells)
        if both := sorted(ours.keys() & theirs.keys()):
            pairs = [subtract_phases(ours[block], theirs[block]) for block in both]
            if math.isclose(first.images_per_step, second.images_per_step, rel_tol=1e-6):
                seconds = {
                    name: mean_interval([pair[name] for pair in pairs], comparison.confidence)
                    for name in pairs[0]
                    if all(name in pair for pair in pairs)
                }
                names = f"{first.configuration} − {second.configuration}"
                row = replace(first, configuration=names, seconds=seconds)
                differences.append(row)
    return differences


def subtract_phases(own: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    """Return one step's seconds less another's; where one of them did not measure the exchange
    apart, it is part of backward in both."""
    exposed, backward = "exposed_communication_seconds", "backward_seconds"
    if (exposed in own) != (exposed in other):
        own, other = (
            {**one, backward: one.get(backward, 0.0) + one.get(exposed, 0.0)}
            for one in (own, other)
        )
    return {name: own[name] - other[name] for name in own if name in other}
