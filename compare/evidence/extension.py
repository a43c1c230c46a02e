"""How much longer a comparison would have to be measured to decide what its end has left open."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from compare.evidence.goals import Goal
from compare.evidence.judgement import UNDECIDED, Obstacle
from compare.evidence.paired import (
    HALF_WIDTHS_OF_80_PERCENT,
    confidence_after,
    student_quantile,
)
from compare.evidence.record import Record
from compare.evidence.verdicts import Verdict
from compare.plan.blocks import MIN_BLOCKS
from compare.plan.plan import MOST

MOST_TIMES = 10  # as long as so far: one pair of many may be hopeless


@dataclass(frozen=True)
class Extension:
    """A later end of a comparison, counted from its begin."""

    blocks: int  # of each case at each number of workers
    until_interval: float  # where a width ends the measurement: what all that count need
    seconds: float  # of measuring, without the time in which other processes use the cores
    seconds_left: float  # with it, if they use them as much as so far


def is_open(finding: Verdict | Goal) -> bool:
    """Return whether a finished comparison has left this undecided, and more blocks can decide it:
    not if the sides differ, or if a known delay lies outside of the interval."""
    if finding.speed is None or finding.obstacle not in (None, Obstacle.FEW_BLOCKS):
        return False
    if isinstance(finding, Verdict) and finding.delay is not None and finding.speed.low:
        low, high = finding.speed.low, finding.speed.high or math.inf
        return finding.decision == UNDECIDED and low <= 1 + finding.delay <= high
    return finding.decision == UNDECIDED


def extension_of(record: Record, findings: Sequence[Verdict | Goal]) -> Extension | None:
    """Return the end by which the open ones of these findings would probably be decided, without
    those that would take many times as long as the comparison has taken; None if there are no
    others, or if it has not ended."""
    groups = record.groups
    most = MOST_TIMES * max(group.num_blocks for group in groups)
    wanted = [
        (blocks, width_to_decide(finding))
        for finding in findings
        if is_open(finding) and (blocks := blocks_to_decide(record, finding)) <= most
    ]
    if not wanted or record.unfinished:
        return None
    blocks = max(blocks for blocks, _ in wanted)
    width = min(width for _, width in wanted)
    until = min(record.plan.until_interval, float(f"{width:.2g}"))  # as people write it
    used = sum(group.used_seconds for group in groups)
    seconds = used + sum(
        group.block_seconds * max(0, blocks - group.num_blocks) for group in groups
    )
    disturbed = sum(group.disturbed_seconds for group in groups)
    return Extension(blocks, until, seconds, (seconds - used) * (1 + disturbed / max(1.0, used)))


def blocks_to_decide(record: Record, finding: Verdict | Goal) -> int:
    """Return the number of blocks after which a finding would be decided with a probability of
    80 %, if its true ratio is the estimated one.

    The standard error falls as 1/sqrt(n). Of the error from the blocks and the one that their turns
    predict the larger one counts: few blocks may agree by chance.
    """
    speed = finding.speed
    assert speed is not None
    if speed.low is None:
        return MIN_BLOCKS
    confidence = 1 - (1 - confidence_after(record.extensions + 1)) / finding.family
    error, narrow = max(speed.error, speed.turn_error), math.log1p(width_to_decide(finding))

    def is_narrow(blocks: int) -> bool:
        quantile = student_quantile(confidence, speed.degrees + blocks - speed.blocks)
        return quantile * error * math.sqrt(speed.blocks / blocks) <= narrow

    return bisect_left(range(MOST), True, speed.blocks + 1, key=is_narrow)


def width_to_decide(finding: Verdict | Goal) -> float:
    """Return the half-width of the interval at which a finding is decided with a probability of
    80 %, if its true ratio is the estimated one."""
    return math.expm1(distance(finding) / HALF_WIDTHS_OF_80_PERCENT)


def distance(finding: Verdict | Goal) -> float:
    """Return how far, on logarithms, the estimate lies inside of what it would show if there were
    no error: the half-width of the interval has to be smaller."""
    assert finding.speed is not None
    ratio = finding.speed.ratio
    if isinstance(finding, Goal):
        beside, near = math.log(ratio / finding.least), math.log(ratio / finding.tolerated)
        return max(abs(beside), near)
    if finding.delay is not None:
        return math.log1p(finding.delay)
    return max(abs(math.log(ratio)), math.log1p(finding.margin) - abs(math.log(ratio)))
