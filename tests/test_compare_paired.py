"""The ratio of two configurations and its interval: against tables, and by hand.

Whether the interval covers the truth is tested in test_compare_coverage.py.
"""

import math
import random
from statistics import mean, variance

import pytest
from records import a_block

from compare.evidence.paired import (
    Estimate,
    estimate_logs,
    estimate_ratio,
    hodges_lehmann,
    student_quantile,
)
from compare.evidence.stopping import (
    MIN_DEGREES_TO_STOP,
    is_enough,
    minutes_to_narrow,
    minutes_to_show,
    reason_to_stop,
)
from compare.evidence.turns import estimate_contrast, throughput
from compare.plan.plan import Plan


def test_quantiles_are_those_of_the_printed_tables():
    printed = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 9: 2.262, 30: 2.042}
    found = {degrees: student_quantile(0.95, degrees) for degrees in printed}
    assert found == pytest.approx(printed, abs=5e-4)


def test_the_ratio_and_its_interval_by_hand():
    """Student's: mean 3, standard deviation 1, 3 blocks, t = 4.303."""
    estimate = estimate_ratio([math.exp(exponent) for exponent in (2, 3, 4)], [1.0] * 3)
    half_width = math.log(estimate.high / estimate.low) / 2
    assert half_width == pytest.approx(4.3027 / math.sqrt(3), rel=1e-4)
    assert math.log(estimate.ratio) == pytest.approx(3)
    assert math.log1p(estimate.relative_half_width) == pytest.approx(half_width)


def test_the_p_values_by_hand():
    """t = 0.05 / 0.01 with 4 degrees: 0.0075 two-sided, as any table says; and a bound of 3 % is
    1.96 standard errors beyond 1 %: 0.0607 one-sided."""
    far = Estimate(math.exp(0.05), 1.0, 1.2, (1.0,) * 5, error=0.01, degrees=4)
    assert far.p_difference() == pytest.approx(0.0075, abs=1e-4)
    assert far.p_equality(0.03) > 0.9
    near = Estimate(1.01, 0.9, 1.1, (1.0,) * 5, error=0.01, degrees=4)
    assert near.p_equality(0.03) == pytest.approx(0.0607, abs=1e-4)
    assert near.p_equality(0.03) == pytest.approx(near.inverse().p_equality(0.03))


@pytest.mark.parametrize("seed", range(20))
def test_an_interval_that_leaves_out_1_is_a_p_value_below_5_percent(seed):
    draw = random.Random(seed)
    estimate = estimate_logs([draw.gauss(0.02, 0.02) for _ in range(4)])
    is_left_out = not estimate.low <= 1 <= estimate.high
    assert is_left_out == (estimate.p_difference() < 0.05)
    within = max(estimate.high, 1 / estimate.low) - 1
    assert estimate.p_equality(within * 1.001) < 0.025 < estimate.p_equality(within * 0.999)


def test_the_pooled_variance_is_that_of_block_plus_side():
    """The mean over all pairs is twice the residual variance of the two-way layout."""
    draw = random.Random(0)
    logs = [[draw.gauss(0, 0.05) for _ in "abcd"] for _ in range(5)]
    blocks = [
        a_block({side: [math.exp(value)] * 2 for side, value in zip("abcd", row, strict=True)})
        for row in logs
    ]
    sides = [mean(column) for column in zip(*logs, strict=True)]
    residuals = [
        value - mean(row) - side + mean(sides)
        for row in logs
        for value, side in zip(row, sides, strict=True)
    ]
    pooled = 2 * math.fsum(r * r for r in residuals) / (4 * 3)
    own = variance(row[0] - row[1] for row in logs)
    found = estimate_contrast(blocks, {"a": 1, "b": -1})
    assert found.error == pytest.approx(math.sqrt((2 * own / 3 + pooled / 3) / 5))
    assert found.degrees == 6  # of two sides alone, 4
    assert estimate_contrast(blocks, {"a": 1, "b": -1, "c": -1, "d": 1}).ratio == (
        pytest.approx(math.exp(sides[0] - sides[1] - sides[2] + sides[3]))
    )


def test_a_few_disturbed_rounds_do_not_move_a_block():
    assert hodges_lehmann([0.1] * 6 + [9.0, -9.0]) == pytest.approx(0.1)
    quiet, loud = [100.0] * 6, [100.0, 60.0, 100.0, 100.0, 100.0, 100.0]
    block = a_block({"a": quiet, "b": loud})
    assert block.log_contrast({"a": 1, "b": -1}, throughput) == pytest.approx(0)


def test_the_method_is_named_with_its_source():
    assert "1908" in estimate_ratio([1.1] * 3, [1.0] * 3).method
    assert "Smyth" in estimate_logs([0.1, 0.2, 0.3], 0.01, sides=3).method


@pytest.mark.parametrize(
    ("half_width", "degrees", "enough"),
    [
        (0.0199, MIN_DEGREES_TO_STOP, True),
        (0.0201, MIN_DEGREES_TO_STOP, False),
        (0.0001, MIN_DEGREES_TO_STOP - 1, False),
        (math.inf, 0, False),
    ],
)
def test_blocks_are_enough_when_the_interval_is_narrow_and_its_width_is_known(
    half_width, degrees, enough
):
    low, high = (None, None) if half_width == math.inf else (1 / (1 + half_width), 1 + half_width)
    assert is_enough([Estimate(1.0, low, high, (1.0,) * 5, 0.01, degrees)], 0.02) == enough


def test_the_reason_to_stop():
    wide, narrow = (estimate_logs([-x, x] * 4) for x in (0.1, 0.01))
    goal = Plan(until_interval=0.03, minutes=10)
    assert reason_to_stop([narrow, wide], 8, 400, 50, goal) == ""
    assert reason_to_stop([narrow, narrow], 8, 400, 50, goal) == "every interval is within +-3 %"
    assert "the 10 minutes" in reason_to_stop([wide], 8, 560, 50, goal)
    assert reason_to_stop([wide], 2, 560, 50, goal) == ""  # two blocks tell nothing
    five = Plan(blocks=5)
    assert reason_to_stop([narrow], 4, 9999, 50, five) == ""
    assert reason_to_stop([wide], 5, 1, 50, five) == "as many blocks as were asked for"


def test_how_many_more_minutes_would_decide():
    estimate = estimate_logs([-0.02, 0.02] * 4)
    more = minutes_to_narrow(estimate, 0.01, 60)
    assert more is not None and 8 + more == pytest.approx(20, abs=2)  # (1.96 x 0.0214 / 0.00995)^2
    assert minutes_to_narrow(estimate, 0.5, 60) == 0
    # 1.5 half-widths: a power of 80 %. Measuring on is an extension, of 97.5 %: (2.24 / 1.96)^2
    shown, of_five = (minutes_to_show(estimate, 0.015, 60, family) for family in (1, 5))
    assert shown is not None and of_five is not None
    assert 8 + shown == pytest.approx(20 * 1.31, abs=2) and of_five > shown
    assert minutes_to_narrow(estimate_logs([0.1]), 0.01, 60) is None
    assert minutes_to_narrow(estimate, 1e-9, 60) is None


def test_two_blocks_have_no_interval_and_none_are_refused():
    estimate = estimate_ratio([110, 120], [100, 100])
    assert (estimate.low, estimate.high) == (None, None)
    assert (estimate.p_difference(), estimate.p_equality(0.03)) == (1, 0.5)
    assert estimate.ratio == pytest.approx(math.sqrt(1.1 * 1.2))
    for first, second in (([1.0, 2.0, 3.0], [1.0, 2.0]), ([], [])):
        with pytest.raises(ValueError):
            estimate_ratio(first, second)


def test_the_inverse_tells_the_same_story():
    first, second = [110.0, 108.0, 107.0], [100.0, 101.0, 99.0]
    there, back = estimate_ratio(first, second), estimate_ratio(second, first).inverse()
    assert (there.ratio, there.low, there.high) == pytest.approx((back.ratio, back.low, back.high))


def test_blocks_that_agree_to_the_last_bit_are_sure():
    equal, faster = estimate_logs([0.0] * 3), estimate_logs([0.5] * 3)
    assert (equal.p_difference(), equal.p_equality(0.03)) == (1, 0)
    assert (faster.p_difference(), faster.p_equality(0.03)) == (0, 1)
