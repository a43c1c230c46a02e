"""The rows of the report's tables: a line for each cell that was measured, as a dict. Each row says
its case, workers and configuration; a figure that is None was not measured."""

import math
from collections.abc import Iterable, Sequence
from statistics import fmean, harmonic_mean, median
from typing import Any

from compare.evidence.paired import estimate_logs, estimate_ratio, mean_interval
from compare.evidence.records import CellKey, Comparison, RunRecord
from compare.evidence.turns import throughput, work_per_cpu_second
from compare.evidence.verdicts import DIFFERENT, Verdict

Row = dict[str, Any]
EXPOSED, BACKWARD = "exposed_communication_seconds", "backward_seconds"


def cell_fields(comparison: Comparison, cell: CellKey) -> Row:
    """Return which cell a row is of; a user's own scripts say themselves how many ranks took
    part."""
    case, workers, name = cell
    ranks = (one.environment.world_size for one in comparison.sides if one.configuration == name)
    return {"case": case, "workers": workers or next(ranks, 0), "configuration": name}


def speed_rows(comparison: Comparison) -> list[Row]:
    """Return how fast each cell trained, by turns or in whole runs:

    images_per_second over all blocks, as images over seconds; lowest, highest: of a block; mean:
    over the blocks, with its interval; scaling: images/s a worker over that at the fewest workers,
    block by block; cpu_ms_per_image, of all workers; blocks; planned_blocks (None: as many as it
    takes).
    """
    found = {
        cell: {one.number: one.rate(cell[2], throughput) for one in comparison.blocks_of(cell)}
        for cell in comparison.cells
    }
    fewest, rows = min(comparison.plan.workers), []
    for cell, rates in found.items():
        case, workers, name = cell
        base = found.get((case, fewest, name), {}) if workers > fewest else {}
        common = [block for block in rates if block in base]
        blocks = comparison.blocks_of(cell)
        planned = sum(run.cell == cell for run in comparison.runs)
        if not rates:
            continue
        rows.append({
            **cell_fields(comparison, cell),
            "images_per_second": harmonic_mean([*rates.values()]),
            "lowest": min(rates.values()),
            "highest": max(rates.values()),
            "mean": estimate_logs([*map(math.log, rates.values())], comparison.confidence),
            "scaling": estimate_ratio(
                [rates[block] / workers for block in common],
                [base[block] / fewest for block in common],
                confidence=comparison.confidence,
            ) if common else None,
            "cpu_ms_per_image": fmean(1000 / b.rate(name, work_per_cpu_second) for b in blocks),
            "blocks": len(blocks),
            "planned_blocks": comparison.plan.blocks if comparison.is_by_turns else planned,
        })  # fmt: skip
    return rows


def training_rows(comparison: Comparison) -> list[Row]:
    """Return what whole trainings of each cell show, used and read: the medians of `figures_of`,
    and

    weights: are the final weights those of the first configuration in the block? runs,
    planned_runs; peak_memory: bytes of the largest rank, with its interval; straggler_ratio: the
    slowest rank's computing time a step over the median rank's.
    """
    first, *_ = comparison.configurations
    firsts = {
        (run.block, run.case, run.workers): run.summary.weights_sha256
        for run in comparison.complete
        if run.configuration == first
    }
    rows = []
    for cell in comparison.cells:
        runs = comparison.complete_runs(cell)
        measured = [figures_of(run) for run in runs]
        equal = [
            run.summary.weights_sha256 == firsts[place]
            for run in runs
            if (place := (run.block, run.case, run.workers)) in firsts
        ]
        ablated = [
            turn.straggler_ratio
            for block in comparison.blocks_of(cell)
            for turn in block.of("ablation")
            if turn.side == cell[2]
        ]
        if not runs:
            continue
        memory = [math.log(run.summary.peak_memory_bytes) for run in runs]
        of_equal = "equal" if all(equal) else f"{sum(equal)} of {len(equal)} equal"
        rows.append({
            **cell_fields(comparison, cell),
            **{name: median_or_none([one[name] for one in measured]) for name in measured[0]},
            "weights": of_equal if equal else "–",
            "runs": len(runs),
            "planned_runs": sum(run.cell == cell for run in comparison.runs),
            "peak_memory": estimate_logs(memory, comparison.confidence),
            "straggler_ratio": median_or_none(ablated),
        })  # fmt: skip
    return rows


def figures_of(run: RunRecord) -> dict[str, float | None]:
    """Return what the table of trainings shows the median of; None where others disturbed what
    would be measured. Start and end are all that is not on the training clock, evaluation is with
    checkpoints."""
    summary = run.summary
    timed = {
        "startup_seconds": run.seconds - summary.total_seconds if run.seconds else None,
        "train_seconds": summary.train_seconds,
        "evaluation_seconds": summary.total_seconds - summary.train_seconds,
        **vars(summary.input),
        **vars(summary.energy),
    }
    of_summary = ("top1", "top5", "loss", "network_bytes_per_step")
    of_rung = ("bubble_share", "staleness")
    return {
        **(dict.fromkeys(timed) if run.is_disturbed else timed),
        **{name: getattr(summary, name) for name in of_summary},
        **{name: getattr(summary.rung, name) for name in of_rung},
    }


def median_or_none(values: Sequence[float | None]) -> float | None:
    """Return the median of those that were measured; None if none was."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


# ------------------------------------------------------------------------------------- the phases


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


def phase_rows(comparison: Comparison) -> list[Row]:
    """Return where the time of each cell's step goes: seconds by the names of the phases, and
    `step_seconds`, means over blocks. By turns they are means over ranks, of the very turns that
    the verdicts are from; of whole runs those of rank 0."""
    rows = []
    for cell in comparison.cells:
        if blocks := [*phases_by_block(comparison, cell).values()]:
            names = [name for name in blocks[0] if all(name in block for block in blocks)]
            means = {name: fmean(block[name] for block in blocks) for name in names}
            rows.append({**cell_fields(comparison, cell), **means})
    return rows


def images_per_step(comparison: Comparison, cell: CellKey) -> float:
    """Return the images of a cell's mean step, of all workers."""
    for block in comparison.blocks_of(cell):
        if block.steps:
            return block.counted(cell[2])[0].images / block.steps[cell[2]]
    summary = comparison.complete_runs(cell)[0].summary
    return summary.samples_seen / summary.steps


def phase_differences(comparison: Comparison, verdicts: Iterable[Verdict]) -> list[Row]:
    """Return, for each verdict that shows a difference, in which phases it is: first less second,
    as the verdicts' ratios are first over second, paired by block, so that the phases add up to the
    step. Steps of different size are not compared."""
    rows = []
    for verdict in verdicts:
        cells = [(verdict.case, verdict.workers, name) for name in (verdict.first, verdict.second)]
        ours, theirs = (phases_by_block(comparison, cell) for cell in cells)
        both = sorted(ours.keys() & theirs.keys())
        if verdict.is_null_test or verdict.decision not in DIFFERENT or not both:
            continue
        if math.isclose(*(images_per_step(comparison, cell) for cell in cells), rel_tol=1e-6):
            pairs = [subtract_phases(ours[block], theirs[block]) for block in both]
            rows.append({
                **cell_fields(comparison, cells[0]),
                "configuration": f"{verdict.first} − {verdict.second}",
                **{
                    name: mean_interval([pair[name] for pair in pairs], comparison.confidence)
                    for name in pairs[0]
                    if all(name in pair for pair in pairs)
                },
            })  # fmt: skip
    return rows


def subtract_phases(own: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    """Return one step's seconds less another's; where one of them did not measure the exchange
    apart, it is part of backward in both."""
    if (EXPOSED in own) != (EXPOSED in other):
        own, other = (
            {**one, BACKWARD: one.get(BACKWARD, 0.0) + one.get(EXPOSED, 0.0)}
            for one in (own, other)
        )
    return {name: own[name] - other[name] for name in own if name in other}
