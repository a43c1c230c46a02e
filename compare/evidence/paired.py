"""Ratios of configurations that were measured side by side in blocks, with their intervals.

The unit of evidence is a block: one launch of each side. What the machine does to all sides of a
block (a neighbour, a warm processor) cancels in the block's ratio, if both sides react alike. A
process that slows one engine and not the other becomes part of the ratio; the interval does not
show it.

The interval is Student's t on the logarithms of the blocks' ratios (Student, Biometrika 6, 1908).
Three blocks hardly show their variance, but the turns within them predict it. Where they do, on
CPUs, `moderated` uses both: a moderated t (Smyth, Statistical Applications in Genetics and
Molecular Biology 3, 2004). docs/statistics.md reports the simulations behind it;
tests/test_compare_coverage.py repeats them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import NamedTuple

import numpy as np
from scipy.special import fdtri, ndtr, stdtr, stdtrit

from compare.plan.blocks import MIN_BLOCKS

CONFIDENCE = 0.95
INTERVAL = f"{100 * CONFIDENCE:g} % interval"
# A true difference as large as the half-width is shown with a probability of 50 %, one of 1.5 times
# the half-width with 80 %: (1.96 + 0.84) / 1.96 = 1.43 if the noise is known; a little less with
# few blocks, (2.36 + 0.90) / 2.36 = 1.38 with eight, by Student's quantiles.
HALF_WIDTHS_OF_80_PERCENT = 1.5
# Variance of a side's speed from launch to launch / from turn to turn, in training on CPUs. So the
# variance between blocks of eight rounds is 1.2 times the one that their turns predict. This
# differs between comparisons as if each had estimated it with so many degrees of freedom. Both are
# cautious: the records under results/ show 1.0 to 1.1 (six to ten rounds), and 16 or more.
LAUNCH_SHARE, LAUNCH_DEGREES = 1 / 40, 8
MIN_SCATTER_DEGREES = 4  # with fewer a moderated t covers 91 to 94 % where launches add much more


def confidence_after(extensions: int) -> float:
    """Return the confidence of each interval after a number of extensions: 95 %, 97.5 %, 98.75 %
    and so on. Extensions come after the report could be read, so each gives another chance to stop
    when the figures please. Each look may err half as often as the one before. So all looks
    together err in less than 10 % of measurements, if each end is set before its figures can be
    seen. Even if each next end is chosen after a look to be the most promising, they err in 9.4 %
    (simulated). An end before the plan's own is refused: stopping when the figures please errs in
    19 %."""
    return 1 - (1 - CONFIDENCE) / 2**extensions


@dataclass(frozen=True)
class Estimate:
    """The ratio first / second: its geometric mean over blocks, with its interval.

    `low` and `high` are None if there are fewer than MIN_BLOCKS blocks.
    """

    ratio: float
    low: float | None
    high: float | None
    ratios: tuple[float, ...]
    error: float = 0.0  # standard error of the ratio's logarithm
    degrees: float = 0  # degrees of freedom of that error
    confidence: float = CONFIDENCE
    turn_error: float = 0.0  # `error` as predicted from the turns within blocks; 0: not known

    @property
    def blocks(self) -> int:
        return len(self.ratios)

    @property
    def ends(self) -> tuple[float, float] | None:
        """The ends of the interval; None without one."""
        return None if self.low is None or self.high is None else (self.low, self.high)

    @property
    def block_error(self) -> float:
        """`error` as the blocks alone show it, with one degree of freedom less than blocks."""
        return float(np.std(np.log(self.ratios), ddof=1)) / math.sqrt(self.blocks)

    @property
    def relative_half_width(self) -> float:
        """The interval's relative half-width: 0.02 is 2 %; infinite without an interval. The
        interval is symmetric on logarithms, where it was computed."""
        return math.sqrt(self.high / self.low) - 1 if self.low and self.high else math.inf

    @property
    def bound(self) -> float:
        """The largest relative difference, in either direction, that the interval allows."""
        return max(self.high, 1 / self.low) - 1 if self.low and self.high else math.inf

    def corrected_half_width(self, family: int) -> float:
        """Return the interval's relative half-width at the confidence of the first step of Holm's
        correction for so many findings."""
        confidence = 1 - (1 - self.confidence) / family
        return math.expm1(student_quantile(confidence, self.degrees) * self.error)

    def inverse(self) -> "Estimate":
        """Return the estimate of second / first."""
        low, high = self.low and 1 / self.low, self.high and 1 / self.high
        ratios = tuple(1 / ratio for ratio in self.ratios)
        return replace(self, ratio=1 / self.ratio, low=high, high=low, ratios=ratios)

    def serial_correlation(self) -> tuple[float, float]:
        """Return the lag-1 correlation of the blocks' logarithms, and the one-sided p-value of the
        hypothesis that it is zero or negative. Under independence its mean is -1 / n; the variance
        is Moran's (Biometrika 35, 1948)."""
        n, errors = self.blocks, np.log(np.array(self.ratios) / self.ratio)
        lag_1 = float(errors[1:] @ errors[:-1]) / max(1e-20, float(errors @ errors))
        return lag_1, float(ndtr(-(n * lag_1 + 1) * math.sqrt(n - 1) / max(1, n - 2)))

    def p_difference(self, value: float = 1) -> float:
        """Return the two-sided p-value of the hypothesis that the true ratio is `value`: by
        default, that both are equally fast."""
        return 2 * self.p_beyond(abs(math.log(self.ratio / value)))

    def p_below(self, value: float) -> float:
        """Return the one-sided p-value of the hypothesis that the true ratio is below `value`."""
        return self.p_beyond(math.log(self.ratio / value))

    def p_equality(self, margin: float) -> float:
        """Return the p-value of the hypothesis that they differ by at least `margin` (0.03 is 3 %),
        by two one-sided tests (Schuirmann, Journal of Pharmacokinetics and Biopharmaceutics 15,
        1987)."""
        return self.p_beyond(math.log1p(margin) - abs(math.log(self.ratio)))

    def p_beyond(self, distance: float) -> float:
        """Return P(error of the logarithm > distance); one half without an interval."""
        return 0.5 if self.low is None else p_error_beyond(distance, self.error, self.degrees)


def estimate_logs(logs: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """Estimate a ratio from its logarithms, one for each block: A/B and B/A then give the same
    result, and errors of times and rates are proportional."""
    if not logs:
        raise ValueError("no blocks: a ratio needs at least one")
    n, ratios = len(logs), tuple(math.exp(value) for value in logs)
    center = math.fsum(logs) / n
    if n < MIN_BLOCKS:
        return Estimate(math.exp(center), None, None, ratios, confidence=confidence)
    error = float(np.std(logs, ddof=1)) / math.sqrt(n)
    found = Estimate(math.exp(center), None, None, ratios, confidence=confidence)
    return with_error(found, error, n - 1)


def with_error(estimate: Estimate, error: float, degrees: float) -> Estimate:
    """Return the estimate with the interval that follows from this standard error."""
    factor = math.exp(student_quantile(estimate.confidence, degrees) * error)
    low, high = estimate.ratio / factor, estimate.ratio * factor
    return replace(estimate, low=low, high=high, error=error, degrees=degrees)


class Scatter(NamedTuple):
    """How much more the blocks of a group scatter than their turns predict: over all its sides,
    because three blocks of one pair hardly show it."""

    variance_ratio: float  # variance between blocks / the variance predicted
    degrees: int  # degrees of freedom of the variance between blocks
    turn_degrees: int  # degrees of freedom of the variance between turns
    rounds: float  # of a block, on average

    @property
    def expected(self) -> float:
        """The value of `variance_ratio` to be expected: what launches add weighs the more, the more
        rounds a block has."""
        return 1 + LAUNCH_SHARE * self.rounds

    @property
    def predicted_degrees(self) -> float:
        """The degrees of freedom of the variance predicted: the relative variances add of what
        launches add and of what the turns show."""
        return 1 / (1 / LAUNCH_DEGREES + 1 / self.turn_degrees)

    def quantile(self, probability: float) -> float:
        """Return the value that `variance_ratio` does not exceed with this probability."""
        f_quantile = fdtri(self.degrees, self.predicted_degrees, probability)
        return self.expected * float(f_quantile)


def moderated(estimate: Estimate, scatter: Scatter) -> Estimate:
    """Return Student's estimate with the error of a moderated t, if turns predict one.

    The variance predicted by the turns, times what launches add, stands beside the variance of the
    pair's own blocks, each with the weight of its degrees of freedom. What launches add is
    estimated from the records and from all sides of the group; it is never less than in the
    records. If the group's blocks scatter more than in three of four such groups, turns may
    predict too little: then the wider of this interval and Student's is returned. (Which is wider
    is asked at the estimate's confidence; Holm's correction then uses the same error and degrees.)
    Two sides with three or four blocks show too little of what launches add: Student's.
    """
    if estimate.low is None or not estimate.turn_error or scatter.degrees < MIN_SCATTER_DEGREES:
        return estimate
    prior, own, of_group = scatter.predicted_degrees, estimate.blocks - 1, scatter.degrees
    known = prior * scatter.expected + of_group * scatter.variance_ratio
    predicted = max(scatter.expected, known / (prior + of_group)) * estimate.turn_error**2
    error = math.sqrt((prior * predicted + own * estimate.error**2) / (prior + own))
    found = with_error(estimate, error, prior + own)
    if scatter.variance_ratio > scatter.quantile(0.75):
        return max(found, estimate, key=lambda either: either.relative_half_width)
    return found


@dataclass(frozen=True)
class PointDifference:
    """Top-1 of the first minus that of the second, in percentage points, as the mean over seeds
    with its interval: Student's t on the seeds' differences (Biometrika 6, 1908)."""

    mean: float
    half_width: float | None  # of the interval; None: fewer than MIN_BLOCKS seeds
    values: tuple[float, ...]  # seed by seed
    error: float = 0.0  # standard error of the mean
    confidence: float = CONFIDENCE

    @property
    def degrees(self) -> int:
        return len(self.values) - 1

    @property
    def ends(self) -> tuple[float, float] | None:
        """The ends of the interval; None without one."""
        half = self.half_width
        return None if half is None else (self.mean - half, self.mean + half)

    @property
    def deviation(self) -> float:
        """The standard deviation of a seed's difference."""
        return self.error * math.sqrt(len(self.values))

    def p_difference(self, value: float = 0) -> float:
        """Return the two-sided p-value of the hypothesis that the true difference is `value`: by
        default, that both are equally accurate."""
        return 2 * p_error_beyond(abs(self.mean - value), self.error, self.degrees)

    def p_below(self, value: float) -> float:
        """Return the one-sided p-value of the hypothesis that the true difference is below
        `value`."""
        return p_error_beyond(self.mean - value, self.error, self.degrees)

    def p_equality(self, margin: float) -> float:
        """Return the p-value of the hypothesis that they differ by at least `margin` points, by two
        one-sided tests (Schuirmann 1987)."""
        return p_error_beyond(margin - abs(self.mean), self.error, self.degrees)


def point_difference(
    values: Sequence[float], image: float, confidence: float = CONFIDENCE
) -> PointDifference:
    """Estimate a difference of top-1 from those of some seeds, in points.

    `image`: by how many points one validation image changes top-1; 0 of values without such steps.
    Few seeds may agree because accuracies have them. So the standard error is at least the one of
    seeds that all agree but for one, by one image.
    """
    center, number = fmean(values), len(values)
    if number < MIN_BLOCKS:
        return PointDifference(center, None, tuple(values), confidence=confidence)
    error = max(stdev(values) / math.sqrt(number), image / number)
    half = student_quantile(confidence, number - 1) * error
    return PointDifference(center, half, tuple(values), error, confidence)


class Difference(NamedTuple):
    """The difference of two times or speeds: its mean over blocks, with its interval."""

    mean: float
    half_width: float | None  # of the interval; None: fewer than MIN_BLOCKS blocks


def mean_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Difference:
    """Estimate a difference from its values, one for each block."""
    found = point_difference(values, image=0.0, confidence=confidence)
    return Difference(found.mean, found.half_width)


def p_error_beyond(distance: float, error: float, degrees: float) -> float:
    """Return P(error of an estimate > distance), by Student's distribution with this standard
    error."""
    if distance == 0:
        return 0.5
    errors = distance / error if error else math.copysign(math.inf, distance)
    return float(stdtr(degrees, -errors))


def student_quantile(confidence: float, degrees: float) -> float:
    """Return t such that a Student variable lies in -t..t with this probability."""
    return float(stdtrit(degrees, 0.5 + confidence / 2))
