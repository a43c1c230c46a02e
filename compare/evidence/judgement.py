"""What may be judged, and which of several findings hold together: one rule, which verdicts, goals
and the all-reduces' speeds obey."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from compare.evidence.equality import Fact
from compare.evidence.group import Group
from compare.evidence.paired import CONFIDENCE, Estimate
from compare.evidence.record import Record


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What the blocks of one case at one number of workers show of some sides."""

    case: str = ""
    workers: int = 0
    differences: tuple[Fact, ...] = ()  # that forbid a judgement
    ranks_per_gpu: int | None = None  # several: their speeds mean nothing
    is_finished: bool = True  # False: the plan needs more blocks, and nothing is decided yet
    speed: Estimate | None = None  # of a ratio, or a speed; None: no blocks, or one of the above
    family: int = 1  # number of findings that Holm's correction covers

    @property
    def is_judged(self) -> bool:
        """Whether anything may be concluded: the measurement is finished, the sides differ only in
        what the plan varies, and there is an interval. (Stopping whenever the figures look good
        finds differences that do not exist.)"""
        has_interval = self.speed is not None and self.speed.low is not None
        return has_interval and self.is_finished and not self.differences


def find(record: Record, group: Group, powers: Mapping[str, float]) -> Finding:
    """Return what the blocks of a group show of the product of these sides' speeds, each raised to
    its power (as in `estimate`)."""
    between = group.facts_between([*powers])
    differences = {fact.field: fact for fact in between if fact.is_confounder}
    return Finding(
        case=group.case,
        workers=group.workers,
        differences=tuple(differences.values()),
        ranks_per_gpu=group.ranks_per_gpu,
        is_finished=group.place not in record.unfinished,
        speed=None if differences else group.estimate(powers),
    )


def judged_together(findings: Sequence[Finding]) -> tuple[dict[int, Estimate], float]:
    """Return the estimates that may be judged, by index, and the error that all decisions on them
    together may have."""
    judged = {
        index: finding.speed
        for index, finding in enumerate(findings)
        if finding.is_judged and finding.speed is not None
    }
    return judged, 1 - min((speed.confidence for speed in judged.values()), default=CONFIDENCE)


def holm(p_values: Mapping[int, float], error: float) -> set[int]:
    """Return which hypotheses Holm's test rejects (Scandinavian Journal of Statistics 6, 1979). It
    takes them by rising p-value, compares each p-value with the error divided by the number of
    hypotheses left, and stops at the first that it does not reject."""
    rejected: set[int] = set()
    for index in sorted(p_values, key=lambda index: p_values[index]):
        if p_values[index] > error / (len(p_values) - len(rejected)):
            break
        rejected.add(index)
    return rejected
