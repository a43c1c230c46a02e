"""Ratios of two configurations that ran side by side in blocks, with an interval.

The unit of evidence is a run. What a machine does to both runs of a block (a neighbour, a warm
processor) cancels in the block's ratio, so that blocks are independent even where runs are not.

Two methods, chosen by the number of blocks alone:

7 and more   Wilcoxon's signed-rank test turned into an interval, around the estimate of Hodges and
             Lehmann. It needs no normal distribution, only a symmetric one, and the order within a
             block, which is drawn by lot, makes the log ratio's symmetric about the truth whatever
             the machine does: drift, or now and then a run that something else slowed.
3 to 6       Student's t. No method without a distribution can reach 95 % with fewer than six
             blocks; with six the one above is the whole range of the ratios, wider than Student's.
             Exact for normal noise; with outliers it covers more than 95 %, and is wide.

Both are tested in simulations (tests/test_compare_coverage.py), in which the percentile bootstrap
of a mean covers the truth in 84 of 100 experiments of five blocks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations_with_replacement
from statistics import median

MIN_BLOCKS = 3  # with two, Student's interval is 12.7 standard errors wide: it tells nothing
MIN_BLOCKS_OF_RANKS = 7
CONFIDENCE = 0.95

# Whoever adds blocks until the interval is narrow stops where it is narrow by chance, and covers
# less than it says: from three blocks on 90 %, from eight on 94 to 96 % (simulated; Chow and
# Robbins, Annals of Mathematical Statistics 36, 1965, show that it vanishes with many blocks).
MIN_BLOCKS_TO_STOP = 8


@dataclass(frozen=True)
class Estimate:
    """The ratio first / second: the median of the means of all pairs of blocks (on logarithms), and
    its 95 % interval if there is one.

    `low` and `high` are None when there are fewer than MIN_BLOCKS blocks.
    """

    ratio: float
    low: float | None
    high: float | None
    ratios: tuple[float, ...]

    @property
    def blocks(self) -> int:
        return len(self.ratios)

    @property
    def method(self) -> str:
        """How the interval was computed, with its source; why there is none."""
        if self.blocks < MIN_BLOCKS:
            return f"no interval: it needs {MIN_BLOCKS} blocks"
        if self.blocks < MIN_BLOCKS_OF_RANKS:
            return "Student's t on the logarithms of the ratios (Student, Biometrika 6, 1908)"
        return (
            "Wilcoxon's signed ranks of the logarithms of the ratios, with the estimate of Hodges "
            "and Lehmann (Annals of Mathematical Statistics 34, 1963)"
        )

    @property
    def shows_difference(self) -> bool:
        """Tell whether there is an interval and it leaves out 1."""
        if self.low is None or self.high is None:
            return False
        return not self.low <= 1.0 <= self.high

    def inverse(self) -> "Estimate":
        """Return the estimate of second / first."""
        return Estimate(
            1 / self.ratio,
            None if self.high is None else 1 / self.high,
            None if self.low is None else 1 / self.low,
            tuple(1 / ratio for ratio in self.ratios),
        )


def estimate_ratio(first: Sequence[float], second: Sequence[float]) -> Estimate:
    """Estimate first / second from pairs of positive values, one pair a block.

    On logarithms, because A/B and B/A must tell the same story, and because times and rates err in
    proportion. The estimate lies in the interval: no more than a standard deviation from the mean,
    where Student's interval of six blocks or less reaches at least 1.05 of them, and in the middle
    of the sorted means of which the other interval cuts as many off below as above.
    """
    ratios = tuple(a / b for a, b in zip(first, second, strict=True))
    if not ratios:
        raise ValueError("no blocks: a ratio needs at least one")
    logs = [math.log(ratio) for ratio in ratios]
    means = sorted((a + b) / 2 for a, b in combinations_with_replacement(logs, 2))
    ratio, n = math.exp(median(means)), len(logs)
    if n < MIN_BLOCKS:
        return Estimate(ratio, None, None, ratios)
    if n < MIN_BLOCKS_OF_RANKS:
        low, high = student_interval(logs)
    else:
        cut = num_cut_off(n)
        low, high = means[cut], means[-1 - cut]
    return Estimate(ratio, math.exp(low), math.exp(high), ratios)


def is_narrow(estimate: Estimate, target: float) -> bool:
    """Tell whether blocks enough were measured: the interval's half width, in proportion, is at
    most `target` (0.02 is 2 %), and there are MIN_BLOCKS_TO_STOP blocks, see there."""
    if estimate.low is None or estimate.high is None or estimate.blocks < MIN_BLOCKS_TO_STOP:
        return False
    return math.sqrt(estimate.high / estimate.low) - 1 <= target


@cache
def num_cut_off(n: int) -> int:
    """Return how many of the n (n + 1) / 2 sorted means of pairs lie outside the interval at each
    end: the largest c with P(T <= c) <= 2.5 %, T being Wilcoxon's signed-rank statistic.

    T is the sum of the ranks 1 to n that got a plus by n tosses of a coin, so that the ways to
    reach each sum are counted. (Hollander, Wolfe and Chicken, Nonparametric Statistical Methods,
    3rd edition, 2014, section 3.3.)
    """
    ways = [1] + [0] * (n * (n + 1) // 2)
    for rank in range(1, n + 1):
        for total in range(len(ways) - 1, rank - 1, -1):
            ways[total] += ways[total - rank]
    cut, at_most = 0, ways[0]
    while (at_most + ways[cut + 1]) / 2**n <= (1 - CONFIDENCE) / 2:
        cut += 1
        at_most += ways[cut]
    return cut


def student_interval(logs: Sequence[float]) -> tuple[float, float]:
    """Return Student's interval of the mean."""
    n = len(logs)
    mean = math.fsum(logs) / n
    variance = math.fsum((value - mean) ** 2 for value in logs) / (n - 1)
    half_width = student_quantile(CONFIDENCE, n - 1) * math.sqrt(variance / n)
    return mean - half_width, mean + half_width


@cache
def student_quantile(confidence: float, degrees: int) -> float:
    """Return t such that a Student variable lies in -t..t with this probability.

    Bisection over theta = atan(t / sqrt(degrees)), where the range is finite. (SciPy has this, but
    takes longer to import than a whole report.)
    """
    low, high = 0.0, math.pi / 2
    for _ in range(100):
        middle = (low + high) / 2
        if student_probability(middle, degrees) < confidence:
            low = middle
        else:
            high = middle
    return math.sqrt(degrees) * math.tan((low + high) / 2)


def student_probability(theta: float, degrees: int) -> float:
    """Return P(|T| < sqrt(degrees) tan(theta)), by the finite sums of Abramowitz and Stegun,
    Handbook of Mathematical Functions (1964), 26.7.3 (odd degrees) and 26.7.4 (even degrees)."""
    sine, cosine = math.sin(theta), math.cos(theta)
    odd = degrees % 2
    term = cosine if odd else 1.0
    total = term if degrees > 1 else 0.0
    for k in range(2 + odd, degrees - 1, 2):
        term *= (k - 1) / k * cosine**2
        total += term
    return 2 / math.pi * (theta + sine * total) if odd else sine * total
