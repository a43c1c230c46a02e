"""Ratios of two configurations that ran side by side in blocks, with an interval.

The unit of evidence is a run. What a machine does to both runs of a block (a neighbour, a warm
processor) cancels in the block's ratio, so that blocks are independent even where runs are not.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

MIN_BLOCKS = 3  # with two, Student's interval is 12.7 standard errors wide: it tells nothing
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """The ratio first / second: geometric mean over the blocks, and its interval if there is one.

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

    The interval is Student's t interval (Student, "The probable error of a mean", Biometrika 6,
    1908) of the mean log ratio, carried back by exp: exact for any number of blocks when log
    ratios are normal, where a bootstrap of so few values covers far less than it says. Logarithms,
    because A/B and B/A must tell the same story, and because times and rates err in proportion.
    """
    ratios = tuple(a / b for a, b in zip(first, second, strict=True))
    logs = [math.log(ratio) for ratio in ratios]
    n = len(logs)
    mean = math.fsum(logs) / n
    if n < MIN_BLOCKS:
        return Estimate(math.exp(mean), None, None, ratios)
    variance = math.fsum((value - mean) ** 2 for value in logs) / (n - 1)
    half_width = student_quantile(CONFIDENCE, n - 1) * math.sqrt(variance / n)
    return Estimate(
        math.exp(mean), math.exp(mean - half_width), math.exp(mean + half_width), ratios
    )


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
