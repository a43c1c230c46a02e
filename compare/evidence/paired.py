"""Ratios of configurations that were measured side by side in blocks, with an interval.

The unit of evidence is a block: one launch of each side. What a machine does to all sides of a
block (a neighbour, a warm processor) cancels in the block's ratio, as far as both react alike: a
process that slows one engine and not the other is part of what is measured, and no interval knows
of it.

The interval is Student's t on the logarithms of the blocks' ratios (Student, Biometrika 6, 1908).
The variance is the pair's own: engines differ in how noisy they are, and so the other pairs of the
same blocks say little about it. stopping.py has what was simulated, tests/test_compare_coverage.py
simulates it again.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from scipy.special import ndtr, stdtr, stdtrit

MIN_BLOCKS = 3  # with two, Student's interval is 12.7 standard errors wide: it tells nothing
CONFIDENCE = 0.95
# A true difference of the half-width is shown with a probability of one half; one of 1.5 times the
# half-width with 80 % ((1.96 + 0.84) / 1.96 = 1.43 where the noise is known, and a little less from
# few blocks: (2.36 + 0.90) / 2.36 = 1.38 from eight, by Student's quantiles).
HALF_WIDTHS_OF_80_PERCENT = 1.5


def confidence_after(extensions: int) -> float:
    """Return the confidence of each interval of a measurement that was extended so often after its
    report could be read: 95 %, 97.5 %, 98.75 % and so on. Whoever may look and then measure on has
    more than one chance to stop where it suits. Each look may err half as often as the one before:
    all of them together err in less than 10 %, if each end is set before its figures can be seen.
    Picked after each look to suit best, the next ends err in 9.4 % (simulated); an end that may
    come before the plan's is refused, since stopping where it suits errs in 19 %."""
    return 1 - (1 - CONFIDENCE) / 2**extensions


@dataclass(frozen=True)
class Estimate:
    """The ratio first / second: the geometric mean over blocks, and its interval if there is one.

    `low` and `high` are None when there are fewer than MIN_BLOCKS blocks.
    """

    ratio: float
    low: float | None
    high: float | None
    ratios: tuple[float, ...]
    error: float = 0.0  # standard error of the ratio's logarithm
    degrees: int = 0  # of freedom, of that error
    confidence: float = CONFIDENCE
    turn_error: float = 0.0  # what the turns within the blocks say of `error`; 0: nothing

    @property
    def blocks(self) -> int:
        return len(self.ratios)

    @property
    def relative_half_width(self) -> float:
        """The interval's half-width, in proportion: 0.02 is 2 %; infinite without an interval. It
        was computed on logarithms, and is symmetric there."""
        return math.sqrt(self.high / self.low) - 1 if self.low and self.high else math.inf

    @property
    def bound(self) -> float:
        """The largest difference, either way, that the interval leaves possible, in proportion."""
        return max(self.high, 1 / self.low) - 1 if self.low and self.high else math.inf

    def inverse(self) -> "Estimate":
        """Return the estimate of second / first."""
        low, high = self.low and 1 / self.low, self.high and 1 / self.high
        ratios = tuple(1 / ratio for ratio in self.ratios)
        return replace(self, ratio=1 / self.ratio, low=high, high=low, ratios=ratios)

    def serial_correlation(self) -> tuple[float, float]:
        """Return the correlation of each block's logarithm with that of the block before, and the
        p-value of: there is none, or a negative one. Without any its mean is -1 / n; its variance
        is that of Moran (Biometrika 35, 1948)."""
        n, errors = self.blocks, np.log(np.array(self.ratios) / self.ratio)
        found = float(errors[1:] @ errors[:-1]) / max(1e-20, float(errors @ errors))
        return found, float(ndtr(-(n * found + 1) * math.sqrt(n - 1) / max(1, n - 2)))

    def p_difference(self) -> float:
        """Return the p-value of: both are equally fast (two-sided)."""
        return 2 * self.p_beyond(abs(math.log(self.ratio)))

    def p_equality(self, margin: float) -> float:
        """Return the p-value of: they differ by at least `margin` (0.03 is 3 %), by two one-sided
        tests (Schuirmann, Journal of Pharmacokinetics and Biopharmaceutics 15, 1987)."""
        return self.p_beyond(math.log1p(margin) - abs(math.log(self.ratio)))

    def p_beyond(self, distance: float) -> float:
        """Return P(error of the logarithm > distance); one half without an interval."""
        if self.low is None or distance == 0:
            return 0.5
        errors = distance / self.error if self.error else math.copysign(math.inf, distance)
        return float(stdtr(self.degrees, -errors))


def estimate_ratio(
    first: Sequence[float], second: Sequence[float], *, confidence: float = CONFIDENCE
) -> Estimate:
    """Estimate first / second from pairs of positive values, one pair a block.

    On logarithms, because A/B and B/A must tell the same story, and because times and rates err in
    proportion.
    """
    ratios = [math.log(a / b) for a, b in zip(first, second, strict=True)]
    return estimate_logs(ratios, confidence=confidence)


def estimate_logs(logs: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """Estimate the ratio whose logarithm each block has measured once."""
    if not logs:
        raise ValueError("no blocks: a ratio needs at least one")
    n, ratios = len(logs), tuple(math.exp(value) for value in logs)
    center = math.fsum(logs) / n
    if n < MIN_BLOCKS:
        return Estimate(math.exp(center), None, None, ratios, confidence=confidence)
    error = float(np.std(logs, ddof=1)) / math.sqrt(n)
    half = student_quantile(confidence, n - 1) * error
    low, high = math.exp(center - half), math.exp(center + half)
    return Estimate(math.exp(center), low, high, ratios, error, n - 1, confidence)


class Difference(NamedTuple):
    """Of two times or speeds, the mean of what each block has measured once."""

    mean: float
    half_width: float | None  # of its interval; None: from fewer than MIN_BLOCKS blocks


def mean_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Difference:
    """Estimate the difference that each block has measured once."""
    center, n = math.fsum(values) / len(values), len(values)
    if n < MIN_BLOCKS:
        return Difference(center, None)
    error = float(np.std(values, ddof=1)) / math.sqrt(n)
    return Difference(center, student_quantile(confidence, n - 1) * error)


def student_quantile(confidence: float, degrees: int) -> float:
    """Return t such that a Student variable lies in -t..t with this probability."""
    return float(stdtrit(degrees, 0.5 + confidence / 2))
