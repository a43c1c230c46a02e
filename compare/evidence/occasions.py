"""One ratio from several occasions: comparisons that asked the same question at different times.

The interval of one comparison covers what varies from block to block. It does not cover what stays
the same for an hour and is different in the next, such as the host of a virtual machine, or its
neighbours. So the occasions' ratios are pooled by a random-effects model: each occasion has a true
ratio of its own, which varies about the common one with a standard deviation that is estimated,
too. The resulting interval is for the common ratio.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from scipy.optimize import brentq

from compare.evidence.paired import CONFIDENCE, Estimate, student_quantile
from compare.evidence.record import Record
from recipe.errors import UserError

Key = tuple[str, int, str, str]  # case, workers, and the labels of first and second
MIN_OCCASIONS = 4  # to give a standard deviation between them: from fewer it is often 0 by chance


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


def over_occasions(comparisons: Sequence[Mapping[Key, Estimate]]) -> list[dict[str, Any]]:
    """Return a row for each ratio that at least two of the comparisons have; all must have asked
    the same question. A row has each comparison's estimate (None if it has no such verdict), the
    pooled one, and the spread: the standard deviation between occasions, on logarithms (0.02 is
    2 %), or None with too few occasions."""
    rows = []
    for key in dict.fromkeys(key for ratios in comparisons for key in ratios):
        estimates = tuple(ratios.get(key) for ratios in comparisons)
        known = [estimate for estimate in estimates if estimate]
        if len(known) > 1:
            pooled, spread = pool(known)
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


def pool(estimates: Sequence[Estimate]) -> tuple[Estimate, float]:
    """Return the common ratio of at least two occasions with its interval, and the standard
    deviation between occasions. Both are computed on logarithms, with each occasion's standard
    error (> 0).

    The variance between occasions is the value at which the weighted sum of squares about the mean
    equals its degrees of freedom (Paule and Mandel, Journal of Research of the National Bureau of
    Standards 87, 1982), or 0 if the sum is smaller. Hartung and Knapp (Statistics in Medicine 20,
    2001) multiply the model's variance by the ratio of that sum to its degrees of freedom, which is
    then 1 at most. Röver, Knapp and Friede (BMC Medical Research Methodology 15:99, 2015) take it
    as at least 1: otherwise few occasions that agree by chance get too narrow an interval. So the
    variance is the model's own, and the interval is Student's, with one degree of freedom less than
    there are occasions.
    """
    ratios = tuple(estimate.ratio for estimate in estimates)
    logs, variances = np.log(ratios), np.square([estimate.error for estimate in estimates])
    degrees = len(logs) - 1

    def pooled(between: float) -> tuple[float, float, float]:
        """Mean, its standard error, and the weighted sum of squares minus its degrees of
        freedom."""
        weights = 1 / (variances + between)
        mean = float(np.average(logs, weights=weights))
        return mean, weights.sum() ** -0.5, float(weights @ (logs - mean) ** 2) - degrees

    excess, most = lambda value: pooled(value)[-1], np.var(logs, ddof=1)
    between = brentq(excess, 0.0, most) if excess(0.0) > 0 else 0.0
    mean, error, _ = pooled(between)
    half = student_quantile(CONFIDENCE, degrees) * error
    ratio, low, high = np.exp([mean, mean - half, mean + half]).tolist()
    return Estimate(ratio, low, high, ratios, error, degrees), math.sqrt(between)
