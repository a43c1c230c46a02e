"""One verdict from several occasions: comparisons that asked the same at other times.

An interval of one comparison covers what varies from block to block. What stays for an hour and is
another in the next (the host that a machine got, its neighbours) is in none. So the occasions'
ratios are pooled by a random-effects model: each has a truth of its own, drawn about the common one
with a standard deviation that is estimated, too. The interval is then of the common ratio.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from scipy.optimize import brentq

from compare.evidence.paired import CONFIDENCE, Estimate, student_quantile
from compare.evidence.records import Comparison
from recipe.errors import refuse

Key = tuple[str, int, str, str]  # case, workers, and the labels of first and second
MIN_OCCASIONS = 4  # for a standard deviation between them: of fewer it is often 0 by chance


def refuse_copies(comparisons: Sequence[Comparison]) -> None:
    """Raise UserError if two folders hold the same comparison, kept, copied or given twice: as
    another occasion it would make the interval narrower and say nothing new."""
    for one, other in combinations(comparisons, 2):
        made = (one.plan.created_utc, one.plan.order_seed)
        refuse((
            made == (other.plan.created_utc, other.plan.order_seed),
            f"{one.folder} and {other.folder} are the same comparison, begun at {made[0]}: a copy "
            "tells nothing new; give one of them",
        ))  # fmt: skip


def over_occasions(comparisons: Sequence[Mapping[Key, Estimate]]) -> list[dict[str, Any]]:
    """Return a row of each ratio that at least two of the comparisons have, which must have asked
    the same: what each found (None where it has no such verdict), what is pooled, and the spread,
    which is the standard deviation between occasions, of logarithms: 0.02 is 2 %; None: they are
    too few."""
    rows = []
    for key in dict.fromkeys(key for own in comparisons for key in own):
        found = tuple(own.get(key) for own in comparisons)
        known = [estimate for estimate in found if estimate]
        if len(known) > 1:
            pooled, spread = pool(known)
            names = ("case", "workers", "first_label", "second_label")
            rows.append({
                **dict(zip(names, key, strict=True)), "found": found, "pooled": pooled,
                "spread": spread if len(known) >= MIN_OCCASIONS else None,
            })  # fmt: skip
    return rows


def pool(estimates: Sequence[Estimate]) -> tuple[Estimate, float]:
    """Return the common ratio of at least two occasions with its interval, and the standard
    deviation between occasions, both from logarithms and each occasion's standard error (> 0).

    The variance between occasions is that under which the weighted squares about the mean are as
    large as their degrees of freedom (Paule and Mandel, Journal of Research of the National Bureau
    of Standards 87, 1982). So the variance of Hartung and Knapp (Statistics in Medicine 20, 2001),
    where it is taken as at least the model's own (Röver, Knapp and Friede, BMC Medical Research
    Methodology 15:99, 2015: else few occasions that agree by chance have too narrow an interval),
    is the model's own, and the interval Student's with one degree less than occasions.
    """
    ratios = tuple(estimate.ratio for estimate in estimates)
    logs, variances = np.log(ratios), np.square([estimate.error for estimate in estimates])
    degrees = len(logs) - 1

    def pooled(between: float) -> tuple[float, float, float]:
        """Mean, its error, and what the weighted squares exceed their degrees of freedom by."""
        weights = 1 / (variances + between)
        mean = float(np.average(logs, weights=weights))
        return mean, weights.sum() ** -0.5, float(weights @ (logs - mean) ** 2) - degrees

    excess, most = lambda value: pooled(value)[-1], np.var(logs, ddof=1)
    between = brentq(excess, 0.0, most) if excess(0.0) > 0 else 0.0
    mean, error, _ = pooled(between)
    half = student_quantile(CONFIDENCE, degrees) * error
    ratio, low, high = np.exp([mean, mean - half, mean + half]).tolist()
    return Estimate(ratio, low, high, ratios, error, degrees), math.sqrt(between)
