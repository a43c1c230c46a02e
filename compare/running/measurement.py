"""Speed, block after block until it is known: what the blocks say so far, and what comes next.

What shares blocks is a group: the configurations of one case at one number of workers. The same
functions decide and estimate as in the report (compare/evidence), so that both say the same.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from compare.evidence.paired import MIN_BLOCKS, Estimate, confidence_after, estimate_ratio
from compare.evidence.run_folder import Measured, read_block, read_object, read_record
from compare.evidence.stopping import (
    Goal,
    at_next_look,
    is_enough,
    minutes_to_narrow,
    reason_to_stop,
)
from compare.evidence.turns import Block, estimate
from compare.evidence.words import count, digits
from compare.plan.plan import Case, Plan, Run, percentage
from compare.running.launch import duration, print_live
from compare.running.scheduler import run_block
from compare.running.sides import training_side

ROUNDS = 10  # of a block of turns: in each every side has a turn


@dataclass(frozen=True)
class Group:
    """What the blocks of one case and number of workers say so far."""

    case: Case
    workers: int
    blocks: int
    seconds: float  # of measuring; those in which others used the cores are not among them
    disturbed_seconds: float
    estimates: dict[tuple[str, str], Estimate]  # by pair: first / second

    @property
    def block_seconds(self) -> float:
        """What a block usually takes."""
        return self.seconds / max(1, self.blocks)


def is_complete(folder: Path) -> bool:
    """Tell whether a run is complete: its trainer wrote the summary, and nothing failed after."""
    if not (folder / "summary.json").exists():
        return False
    outcome = folder / "outcome.json"
    return not outcome.exists() or read_object(outcome).get("status") == "completed"


def missing(runs: Sequence[Run], folder: Path) -> list[Run]:
    """Return those of the runs that are not complete."""
    return [run for run in runs if not is_complete(folder / run.folder)]


def measured(plan: Plan, folder: Path) -> list[Group]:
    """Return what has been measured in this folder, for each case and number of workers."""
    path = folder / "plan.json"
    extensions = read_object(path).get("extensions", []) if path.exists() else []
    confidence = confidence_after(len(extensions))  # of the intervals, as the report has it
    read = read_turns if plan.measure == "turns" else read_runs
    return [read(plan, folder, case, workers, confidence) for case, workers in plan.groups()]


def block_folder(folder: Path, case: Case, workers: int, number: int) -> Path:
    return folder / "turns" / case.name / f"{workers}-workers" / f"block-{number}"


def read_turns(plan: Plan, folder: Path, case: Case, workers: int, confidence: float) -> Group:
    names, blocks = [member.name for member in plan.members()], list[Block]()
    while (path := block_folder(folder, case, workers, len(blocks) + 1) / "block.json").exists():
        blocks.append(read_block(path, names))
    disturbed = sum(block.disturbed_seconds for block in blocks)
    seconds = sum(block.seconds for block in blocks) - disturbed
    pairs = plan.pairs() if blocks else []
    estimates = {pair: estimate(blocks, *pair, confidence=confidence) for pair in pairs}
    return Group(case, workers, len(blocks), seconds, disturbed, estimates)


def read_runs(plan: Plan, folder: Path, case: Case, workers: int, confidence: float) -> Group:
    speeds: dict[str, dict[int, float]] = {member.name: {} for member in plan.members()}
    seconds = 0.0
    for run in plan.runs():
        place = folder / run.folder
        if (run.case, run.workers) == (case.name, workers) and is_complete(place):
            summary = read_record(place / "summary.json", Measured)
            speeds[run.configuration.name][run.block] = summary.images_per_second
            if (outcome := place / "outcome.json").exists():
                seconds += read_object(outcome)["seconds"]
    estimates = {}
    for first, second in plan.pairs():
        a, b = speeds[first], speeds[second]
        if both := sorted(a.keys() & b.keys()):
            estimates[first, second] = estimate_ratio(
                [a[i] for i in both], [b[i] for i in both], confidence=confidence
            )
    blocks = min(len(found) for found in speeds.values())
    return Group(case, workers, blocks, seconds, 0.0, estimates)


def estimates_of(groups: Sequence[Group]) -> list[Estimate]:
    """Return the estimates of all pairs."""
    return [estimate for group in groups for estimate in group.estimates.values()]


def next_group(plan: Plan, groups: Sequence[Group]) -> Group:
    """Return the group whose turn it is: with the fewest blocks of those that need more."""
    wide = [
        group
        for group in groups
        if not group.blocks or not is_enough(group.estimates.values(), plan.until_interval)
    ]
    return min((plan.blocks is None and wide) or groups, key=lambda group: group.blocks)


def reason_to_end(plan: Plan, groups: Sequence[Group]) -> str:
    """Say why no further block is measured; empty if one is."""
    if not plan.pairs() and plan.blocks is None:
        return "there is nothing to compare: one configuration only"
    blocks = min(group.blocks for group in groups)
    if not blocks:
        return ""
    # Whole runs are measured a block of all groups at a time.
    following = [next_group(plan, groups)] if plan.measure == "turns" else groups
    return reason_to_stop(
        estimates_of(groups),
        blocks,
        sum(group.seconds for group in groups),
        sum(group.block_seconds for group in following),
        Goal(plan.until_interval, plan.minutes, plan.blocks),
    )


def is_finished(plan: Plan, folder: Path) -> bool:
    """Tell whether nothing of the plan is left to be run in this folder."""
    if missing([*plan.runs(), *plan.phase_runs()], folder):
        return False
    return bool(reason_to_end(plan, measured(plan, folder)))


def measure_block(plan: Plan, folder: Path, groups: Sequence[Group]) -> None:
    """Measure the next block of turns; raises NoTurns where there can be none, MeasurementError
    where a side fails."""
    group = next_group(plan, groups)
    number = group.blocks + 1
    order = plan.in_order(number, group.case, group.workers)
    runs = [plan.run(number, group.case, member, group.workers) for member in order]
    so_far = [*ratio_texts(group), time_left(plan, groups)]
    place = block_folder(folder, group.case, group.workers, number)
    run_block(
        [training_side(run, place) for run in runs],
        ROUNDS,
        place,
        number,
        block_label(plan, group, number),
        report=lambda text: print_live([text.partition(": ")[0], *so_far]),
        timeout=plan.timeout,
    )


def block_label(plan: Plan, group: Group, number: int) -> str:
    workers = count(group.workers, "worker") if len(plan.workers) > 1 else ""
    return ", ".join(filter(None, [f"block {number}", group.case.name, workers]))


def ratio_texts(group: Group) -> list[str]:
    """Return what the blocks say of each pair so far, the widest interval first."""
    texts = []
    for (first, second), one in sorted(
        group.estimates.items(), key=lambda item: -item[1].relative_half_width
    ):
        text = f"{first} / {second} {one.ratio:.{digits(one)}f}"
        if one.low is not None:
            text += f" ({one.low:.{digits(one)}f} to {one.high:.{digits(one)}f})"
        texts.append(text)
    return texts


def time_left(plan: Plan, groups: Sequence[Group]) -> str:
    """Say how long the blocks will take that are still needed; empty if that is not known."""
    if not all(group.blocks for group in groups):
        return ""
    used = sum(group.seconds for group in groups)
    if plan.blocks is not None:
        left = sum((plan.blocks - group.blocks) * group.block_seconds for group in groups)
    else:
        most, needed = 60 * plan.minutes - used, seconds_to_narrow(plan, groups)
        least = sum(max(0, MIN_BLOCKS - group.blocks) * group.block_seconds for group in groups)
        left = max(least, most if needed is None else min(most, needed))
    # As much of the time that is to come will be disturbed as of what is over.
    left *= 1 + sum(group.disturbed_seconds for group in groups) / used
    return f"about {duration(left)} left" if left > 0 else ""


def seconds_to_narrow(plan: Plan, groups: Sequence[Group]) -> float | None:
    """Estimate how long it would take until all intervals are as narrow as asked for; None: not
    known."""
    total = 0.0
    for group in groups:
        minutes = [
            minutes_to_narrow(estimate, plan.until_interval, group.block_seconds)
            for estimate in group.estimates.values()
        ]
        if None in minutes:
            return None
        total += 60 * max(filter(None, minutes), default=0.0)
    return total


def block_line(plan: Plan, before: Sequence[Group], groups: Sequence[Group]) -> str:
    """Say what the block that was measured since `before` has changed; empty if there is none."""
    told = [
        f"{block_label(plan, group, group.blocks)}: {', '.join(ratio_texts(group))}"
        for old, group in zip(before, groups, strict=True)
        if group.blocks > old.blocks
    ]
    seconds = sum(g.seconds + g.disturbed_seconds for g in groups)
    seconds -= sum(g.seconds + g.disturbed_seconds for g in before)
    ending = [duration(seconds), time_left(plan, groups)]
    return "   ".join(filter(None, [*told, *ending])) if told else ""


def ending_lines(plan: Plan, groups: Sequence[Group], reason: str) -> list[str]:
    """Say why the measuring is over, and what it took."""
    line = f"{reason}: {duration(sum(group.seconds for group in groups))} of measuring"
    if (disturbed := sum(group.disturbed_seconds for group in groups)) >= 1:
        line += f", beside {duration(disturbed)} in which others used the cores"
    reach = max((estimate.relative_half_width for estimate in estimates_of(groups)), default=0.0)
    if plan.blocks is not None or reach <= plan.until_interval:
        return [line]
    asked = percentage(plan.until_interval)
    return [line, f"the widest interval is +-{100 * reach:.1f} %, wider than +-{asked}"]


def minutes_for_more(plan: Plan, groups: Sequence[Group]) -> int:
    """Return what --minutes would have to be for intervals as narrow as --until-interval asks for;
    0 if they are, if a number of blocks was given, or if that is not known."""
    if plan.blocks is not None or is_enough(estimates_of(groups), plan.until_interval):
        return 0
    extended = [  # whose intervals are wider
        replace(group, estimates={p: at_next_look(one) for p, one in group.estimates.items()})
        for group in groups
    ]
    more = seconds_to_narrow(plan, extended) or 0.0
    return math.ceil((sum(group.seconds for group in groups) + more) / 60) if more else 0
