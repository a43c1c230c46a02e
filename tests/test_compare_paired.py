"""The ratio of two configurations and its interval: against tables, and by hand.

Whether the interval covers the truth is tested in test_compare_coverage.py.
"""

import math
import random
import statistics

import pytest

from compare.evidence.paired import (
    MIN_BLOCKS_OF_RANKS,
    MIN_BLOCKS_TO_STOP,
    Estimate,
    estimate_ratio,
    is_narrow,
    num_cut_off,
    student_quantile,
)


@pytest.mark.parametrize(
    ("degrees", "expected"),  # any printed table of Student's distribution
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (9, 2.262), (30, 2.042)],
)
def test_quantiles_are_those_of_the_printed_tables(degrees, expected):
    assert student_quantile(0.95, degrees) == pytest.approx(expected, abs=5e-4)
    assert student_quantile(0.5, degrees) < student_quantile(0.95, degrees)


def test_quantiles_are_scipys():
    stats = pytest.importorskip("scipy.stats")
    for degrees in range(1, 60):
        for confidence in (0.5, 0.9, 0.95, 0.999):
            expected = stats.t.ppf(0.5 + confidence / 2, degrees)
            assert student_quantile(confidence, degrees) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("blocks", "critical"),  # any printed table of Wilcoxon's signed ranks, 5 %, two-sided
    [(6, 0), (7, 2), (8, 3), (9, 5), (10, 8), (11, 10), (12, 13), (15, 25), (20, 52), (25, 89)],
)
def test_ranks_are_cut_off_as_in_the_printed_tables(blocks, critical):
    assert num_cut_off(blocks) == critical


def test_the_ratio_and_its_interval_by_hand():
    """Seven ratios e^1 to e^7: of the 28 means of pairs the middle ones are 4 and 4, and with two
    cut off at either end the interval reaches from (1 + 3) / 2 = 2 (a pair of 2 is equal) to 6."""
    ratios = [math.exp(exponent) for exponent in range(1, 8)]
    estimate = estimate_ratio(ratios, [1.0] * 7)
    told = (math.log(estimate.low), math.log(estimate.ratio), math.log(estimate.high))
    assert told == pytest.approx((2, 4, 6))
    # Student's: mean 3, standard deviation 1, 3 blocks, t = 4.303.
    estimate = estimate_ratio(ratios[1:4], [1.0] * 3)
    half_width = math.log(estimate.high / estimate.low) / 2
    assert half_width == pytest.approx(4.3027 / math.sqrt(3), rel=1e-4)
    assert math.log(estimate.ratio) == pytest.approx(3)


def test_one_slow_run_moves_the_ratio_less_than_the_mean():
    ratios = [1.10, 1.11, 1.09, 1.10, 1.10, 1.12, 1.08, 1.10, 1.55]
    estimate = estimate_ratio(ratios, [1.0] * len(ratios))
    assert estimate.ratio == pytest.approx(1.10, abs=0.006)
    assert statistics.geometric_mean(ratios) > 1.14


@pytest.mark.parametrize("blocks", [*range(3, 13), 20])
def test_the_ratio_lies_in_its_interval(blocks):
    draw = random.Random(blocks)
    for _ in range(200):
        ratios = [draw.paretovariate(0.7) for _ in range(blocks)]  # as skewed as can be
        estimate = estimate_ratio(ratios, [1.0] * blocks)
        assert estimate.low <= estimate.ratio <= estimate.high


def test_drift_that_both_runs_of_a_block_share_does_not_widen_the_interval():
    """Paired wrongly, the same data give a far wider interval: that is what blocks are for."""
    draw = random.Random(0)
    speeds = [1000 * math.exp(draw.gauss(0, 0.2)) for _ in range(10)]
    first = [1.08 * speed for speed in speeds]
    right, wrong = estimate_ratio(first, speeds), estimate_ratio(first, speeds[::-1])
    assert right.high - right.low < 1e-6 < 0.1 < wrong.high - wrong.low


def test_the_method_is_named_with_its_source():
    methods = {n: estimate_ratio([1.1] * n, [1.0] * n).method for n in (2, 3, 6, 7, 20)}
    assert "it needs 3 blocks" in methods[2]
    assert methods[3] == methods[6] and "Student" in methods[3] and "1908" in methods[3]
    assert methods[7] == methods[20] and "Hodges and Lehmann" in methods[7]
    assert MIN_BLOCKS_OF_RANKS == 7


def test_blocks_are_enough_when_the_interval_is_narrow_and_they_are_not_few():
    def estimate(half_width: float, blocks: int) -> Estimate:
        return Estimate(1.0, 1 / (1 + half_width), 1 + half_width, (1.0,) * blocks)

    enough = MIN_BLOCKS_TO_STOP
    assert is_narrow(estimate(0.0199, enough), 0.02)
    assert not is_narrow(estimate(0.0201, enough), 0.02)
    assert is_narrow(estimate(0.0201, enough), 0.021)
    assert not is_narrow(estimate(0.0001, enough - 1), 0.02)
    assert not is_narrow(estimate_ratio([1.0, 1.0], [1.0, 1.0]), 0.02)


def test_two_blocks_have_no_interval():
    estimate = estimate_ratio([110, 120], [100, 100])
    assert (estimate.low, estimate.high, estimate.shows_difference) == (None, None, False)
    assert estimate.ratio == pytest.approx(math.sqrt(1.1 * 1.2))


def test_the_inverse_tells_the_same_story():
    first, second = [110.0, 108.0, 107.0], [100.0, 101.0, 99.0]
    there, back = estimate_ratio(first, second), estimate_ratio(second, first).inverse()
    assert (there.ratio, there.low, there.high) == pytest.approx((back.ratio, back.low, back.high))
    assert there.shows_difference and back.shows_difference


def test_blocks_that_do_not_pair_are_refused():
    with pytest.raises(ValueError):
        estimate_ratio([1.0, 2.0, 3.0], [1.0, 2.0])


def test_no_block_at_all_is_refused():
    with pytest.raises(ValueError, match="no blocks"):
        estimate_ratio([], [])
