"""The rows of the report's tables: a dict for each measured cell. Each row has its case, workers
and configuration; a figure of None was not measured."""

import math
from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean, harmonic_mean, median
from typing import Any

from compare.evidence.group import Group
from compare.evidence.memory import KINDS, most_of
from compare.evidence.paired import Estimate, estimate_logs, mean_interval
from compare.evidence.record import Record
from compare.evidence.runs import RunRecord
from compare.evidence.turns import throughput, work_per_cpu_second
from compare.evidence.verdicts import DIFFERENT, Verdict
from recipe.settings.variables import RANK_START

Row = dict[str, Any]
EXPOSED, BACKWARD = "exposed_communication_seconds", "backward_seconds"


def cells_of(record: Record) -> Iterator[tuple[Group, str]]:
    """Yield each group with each configuration, in the order of the tables."""
    for group in record.groups:
        for name in record.configurations:
            yield group, name


def cell_fields(group: Group, configuration: str) -> Row:
    """Return a row's case, workers and configuration. A user's own scripts record their number of
    ranks themselves."""
    sides = (side for side in group.sides if side.configuration == configuration)
    ranks = next((side.environment.world_size for side in sides), 0)
    return {
        "case": group.case,
        "workers": group.workers or ranks,
        "configuration": configuration,
    }


def speed_rows(record: Record) -> list[Row]:
    """Return how fast each cell trained, by turns or in whole runs:

    images_per_second: harmonic mean over blocks; lowest, highest: of a block;
    scaling: images/s per worker / the same with the fewest workers, paired by block;
    cpu_ms_per_image: of all workers; memory_bytes and gpu_memory_bytes, of all workers after turns;
    blocks; planned_blocks (None: as many as needed).
    """
    fewest, rows = min(record.plan.workers), []
    for group, name in cells_of(record):
        rates = rates_by_block(group, name)
        if not rates:
            continue
        scaling = None
        if group.workers > fewest:
            base = record.group_at(group.case, fewest)
            scaling = ratio_between(group, base, name, ideal=group.workers / fewest)
        blocks = group.blocks_with([name])
        planned = sum(run.configuration == name for run in group.runs)
        rows.append(
            {
                **cell_fields(group, name),
                "images_per_second": harmonic_mean([*rates.values()]),
                "lowest": min(rates.values()),
                "highest": max(rates.values()),
                "scaling": scaling,
                "cpu_ms_per_image": fmean(1000 / b.rate(name, work_per_cpu_second) for b in blocks),
                **{kind: most_of(blocks, name, kind) for kind in KINDS},
                "blocks": len(blocks),
                "planned_blocks": record.plan.blocks if record.is_by_turns else planned,
            }
        )
    return rows


def rates_by_block(group: Group, configuration: str) -> dict[int, float]:
    """Return the images/s of a configuration in each block."""
    return {
        block.number: block.rate(configuration, throughput)
        for block in group.blocks_with([configuration])
    }


def ratio_between(
    group: Group, base: Group, configuration: str, ideal: float = 1
) -> Estimate | None:
    """Return how many times as fast a configuration is in a group as in another, as a share of the
    ideal ratio, paired by block; None if no block has both."""
    rates, of_base = rates_by_block(group, configuration), rates_by_block(base, configuration)
    common = [block for block in rates if block in of_base]
    logs = [math.log(rates[block] / of_base[block] / ideal) for block in common]
    return estimate_logs(logs, group.confidence) if logs else None


def training_rows(record: Record) -> list[Row]:
    """Return what whole trainings of each cell show: the medians of `timed_figures`, of the runs
    that other processes did not disturb, or of all if they disturbed all (`are_disturbed`); those
    of `other_figures`; and

    weights: whether the final weights equal those of the first configuration in the block; runs,
    planned_runs; peak_memory: bytes of the largest rank, with its interval; straggler_ratio: the
    slowest rank's computing time per step / the median rank's.
    """
    first, *_ = record.configurations
    rows = []
    for group, name in cells_of(record):
        runs = group.complete_runs(name)
        if not runs:
            continue
        firsts = {run.block: run.summary.weights_sha256 for run in group.complete_runs(first)}
        equal = [
            run.summary.weights_sha256 == firsts[run.block] for run in runs if run.block in firsts
        ]
        of_equal = "equal" if all(equal) else f"{sum(equal)} of {len(equal)} equal"
        quiet = [run for run in runs if not run.is_disturbed]
        timed = [timed_figures(run) for run in quiet or runs]
        others = [other_figures(run) for run in runs]
        memory = [math.log(run.summary.peak_memory_bytes) for run in runs]
        ablated = [
            turn.straggler_ratio
            for block in group.blocks_with([name])
            for turn in block.of("ablation")
            if turn.side == name
        ]
        rows.append(
            {
                **cell_fields(group, name),
                **medians(timed),
                **medians(others),
                "are_disturbed": not quiet,
                "weights": of_equal if equal else "–",
                "runs": len(runs),
                "planned_runs": sum(run.configuration == name for run in group.runs),
                "peak_memory": estimate_logs(memory, record.confidence),
                "straggler_ratio": median_or_none(ablated),
            }
        )
    return rows


def timed_figures(run: RunRecord) -> dict[str, float | None]:
    """Return the figures of a run that other processes may have disturbed. Start and end are all
    time that is not on the training clock; evaluation includes checkpoints. The start of forks is
    not what users see, and is not shown."""
    summary = run.summary
    starts = run.seconds and run.environment.variables.get(RANK_START) != "fork"
    return {
        "startup_seconds": run.seconds - summary.total_seconds if starts else None,
        "train_seconds": summary.train_seconds,
        "evaluation_seconds": summary.total_seconds - summary.train_seconds,
        **vars(summary.input),
        **vars(summary.energy),
    }


def other_figures(run: RunRecord) -> dict[str, float | None]:
    """Return the figures of a run that do not depend on the time that it took."""
    of_summary = ("top1", "top5", "loss", "network_bytes_per_step")
    return {
        **{name: getattr(run.summary, name) for name in of_summary},
        **{name: getattr(run.summary.rung, name) for name in ("bubble_share", "staleness")},
    }


def medians(runs: Sequence[dict[str, float | None]]) -> dict[str, float | None]:
    """Return the median of each figure of these runs."""
    return {name: median_or_none([figures[name] for figures in runs]) for name in runs[0]}


def median_or_none(values: Sequence[float | None]) -> float | None:
    """Return the median of the values that are not None; None if all are."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


# ------------------------------------------------------------------------------------- the phases


def phases_by_block(group: Group, configuration: str) -> dict[int, dict[str, float]]:
    """Return the seconds of a configuration's mean step by phase, for each block that measured
    them: by turns, or else in whole runs, where the exchange is part of backward. So it is in all
    blocks if one of them had no quiet turns without it: else their means would not add up."""
    by_turns = {
        block.number: block.phases(configuration) for block in group.blocks_with([configuration])
    }
    by_runs = {
        run.block: {
            name: seconds
            for name, seconds in vars(run.summary.phases).items()
            if name.endswith("_seconds") and seconds is not None
        }
        for run in group.complete_runs(configuration)
    }
    by_block = by_turns if any(by_turns.values()) else by_runs
    found = {block: seconds for block, seconds in by_block.items() if "step_seconds" in seconds}
    if all(EXPOSED in seconds for seconds in found.values()):
        return found
    return {block: exchange_in_backward(seconds) for block, seconds in found.items()}


def exchange_in_backward(step: dict[str, float]) -> dict[str, float]:
    """Return a step's seconds as if its exchange had not been measured separately."""
    if EXPOSED not in step:
        return step
    others = {name: seconds for name, seconds in step.items() if name != EXPOSED}
    return others | {BACKWARD: step[BACKWARD] + step[EXPOSED]}


def phase_rows(record: Record) -> list[Row]:
    """Return how the time of each cell's step divides into phases: the seconds of each phase, and
    `step_seconds`, as means over blocks. By turns they are means over ranks, from the same turns as
    the verdicts; in whole runs they are rank 0's."""
    rows = []
    for group, configuration in cells_of(record):
        if blocks := [*phases_by_block(group, configuration).values()]:
            names = [name for name in blocks[0] if all(name in block for block in blocks)]
            means = {name: fmean(block[name] for block in blocks) for name in names}
            rows.append({**cell_fields(group, configuration), **means})
    return rows


def images_per_step(group: Group, configuration: str) -> float:
    """Return the images in a configuration's mean step, over all workers."""
    for block in group.blocks_with([configuration]):
        if block.steps:
            return block.counted(configuration)[0].images / block.steps[configuration]
    summary = group.complete_runs(configuration)[0].summary
    return summary.samples_seen / summary.steps


def phase_differences(record: Record, verdicts: Iterable[Verdict]) -> list[Row]:
    """Return, for each verdict that shows a difference, how the difference divides into phases:
    first minus second (as the ratios are first / second), paired by block, so that the phases add
    up to the step. Steps of different sizes are not compared."""
    rows = []
    for verdict in verdicts:
        group = record.group_at(*verdict.place)
        ours, theirs = (phases_by_block(group, name) for name in (verdict.first, verdict.second))
        both = sorted(ours.keys() & theirs.keys())
        if verdict.is_null_test or verdict.decision not in DIFFERENT or not both:
            continue
        sizes = [images_per_step(group, name) for name in (verdict.first, verdict.second)]
        if not math.isclose(*sizes, rel_tol=1e-6):
            continue
        pairs = [subtract_phases(ours[block], theirs[block]) for block in both]
        rows.append(
            {
                **cell_fields(group, verdict.first),
                "configuration": f"{verdict.first} − {verdict.second}",
                **{
                    name: mean_interval([pair[name] for pair in pairs], record.confidence)
                    for name in pairs[0]
                    if all(name in pair for pair in pairs)
                },
            }
        )
    return rows


def subtract_phases(own: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    """Return one step's seconds minus another's. If only one of them measured the exchange
    separately, it counts as part of backward in both."""
    if (EXPOSED in own) != (EXPOSED in other):
        own, other = exchange_in_backward(own), exchange_in_backward(other)
    return {name: own[name] - other[name] for name in own if name in other}
