"""One ratio from several occasions: comparisons that asked the same question at different times.

The interval of one comparison covers what varies from block to block. It does not cover what stays
the same for an hour and is different in the next, such as the host of a virtual machine, or its
neighbours. So the occasions' ratios are pooled by a random-effects model: each occasion has a true
ratio of its own, which varies about the common one with a standard deviation that is estimated,
too. The resulting interval is for the common ratio. Two or three occasions hardly show that
standard deviation, so what the records under results/ show counts beside them.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from scipy.optimize import brentq

from compare.evidence.paired import Estimate, with_error
from compare.evidence.record import Record
from recipe.errors import UserError

Key = tuple[str, int, str, str]  # case, workers, and the labels of first and second
MIN_OCCASIONS = 4  # to give a standard deviation between them: from fewer it is often 0 by chance
# The standard deviation of a ratio's logarithm between occasions of training on CPUs: the root mean
# square of those of the 23 ratios that had been measured on several occasions by 28 November 2026,
# each with the weight of its degrees of freedom. It stays as it is while all records, with those
# that were added since, agree within a tenth (tests/test_quotes.py): so a new record changes no
# earlier interval.
RECORDED_SPREAD = 0.0177
RECORDED_DEGREES = 6  # it counts as much as so many further occasions


def refuse_copies(comparisons: Sequence[Record]) -> None:
    """Raise UserError if two folders hold the same comparison (kept, copied or given twice): a
    duplicate would narrow the interval without new information."""
    for record, other in combinations(comparisons, 2):
        made = (record.plan.created_utc, record.plan.order_seed)
        if made == (other.plan.created_utc, other.plan.order_seed):
            raise UserError(
                f"{record.folder} and {other.folder} are the same comparison, begun at {made[0]}: "
                "a copy adds no information; give one of them"
            )


def over_occasions(
    comparisons: Sequence[Mapping[Key, Estimate]], are_as_recorded: bool = True
) -> list[dict[str, Any]]:
    """Return a row for each ratio that at least two of the comparisons have; all must have asked
    the same question. A row has each comparison's estimate (None if it has no such verdict), the
    pooled one, and the spread: the standard deviation between occasions, on logarithms (0.02 is
    2 %), or None with too few occasions. `are_as_recorded`: see `pool`."""
    rows = []
    for key in dict.fromkeys(key for ratios in comparisons for key in ratios):
        estimates = tuple(ratios.get(key) for ratios in comparisons)
        known = [estimate for estimate in estimates if estimate]
        if len(known) > 1:
            pooled, spread = pool(known, are_as_recorded)
            names = ("case", "workers", "first_label", "second_label")
            rows.append(
                {
                    **dict(zip(names, key, strict=True)),
                    "found": estimates,
                    "pooled": pooled,
                    "spread": spread if len(known) >= MIN_OCCASIONS else None,
                }
            )
    return rows


def pool(estimates: Sequence[Estimate], are_as_recorded: bool = True) -> tuple[Estimate, float]:
    """Return the common ratio of some occasions with its interval, and the standard deviation that
    these occasions show. Both are computed on logarithms, with each occasion's standard error
    (> 0).

    The variance between occasions is the value at which the weighted sum of squares about the mean
    equals its degrees of freedom (Paule and Mandel, Journal of Research of the National Bureau of
    Standards 87, 1982), or 0 if the sum is smaller. If occasions may be taken to differ as the
    recorded ones did (`are_as_recorded`: of training on CPUs), the interval takes it as at least
    RECORDED_SPREAD squared, and has RECORDED_DEGREES degrees of freedom more than one less than
    there are occasions: so even a single one has an interval. Else at least two are needed, whose
    interval is very wide. It never has more degrees than the occasions' own errors together, so
    that of a single one is no narrower than its own; its confidence is the highest of theirs.

    Few occasions may agree by chance, so Hartung and Knapp's factor
    (Statistics in Medicine 20, 2001) is at least 1, as Röver, Knapp and Friede advise (BMC Medical
    Research Methodology 15:99, 2015), and thus always 1.
    """
    ratios = tuple(estimate.ratio for estimate in estimates)
    logs, variances = np.log(ratios), np.square([estimate.error for estimate in estimates])
    degrees = len(logs) - 1

    def pooled(between: float) -> tuple[float, float, float]:
        """Mean, its standard error, and the weighted sum of squares minus its degrees of
        freedom."""
        weights = 1 / (variances + between)
        mean = float(np.average(logs, weights=weights))
        return mean, float(weights.sum()) ** -0.5, float(weights @ (logs - mean) ** 2) - degrees

    between = 0.0
    if degrees and pooled(0.0)[-1] > 0:
        between = brentq(lambda value: pooled(value)[-1], 0.0, np.var(logs, ddof=1))
    mean, error, _ = pooled(max(between, RECORDED_SPREAD**2) if are_as_recorded else between)
    confidence = max(estimate.confidence for estimate in estimates)
    found = Estimate(math.exp(mean), None, None, ratios, confidence=confidence)
    of_errors = sum(estimate.degrees for estimate in estimates)
    known = min(of_errors, degrees + (RECORDED_DEGREES if are_as_recorded else 0))
    return with_error(found, error, known), math.sqrt(between)
