"""The ratio of two configurations and its interval: against tables, and by hand.

Whether the interval covers the truth is tested in test_compare_coverage.py.
"""

import math
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from records import a_block, estimate_ratio
from scipy.special import stdtr

from compare.evidence.group import Group
from compare.evidence.paired import (
    Estimate,
    Scatter,
    estimate_logs,
    moderated,
    student_quantile,
)
from compare.evidence.stopping import (
    BLOCKS_OVER_TURNS,
    MIN_BLOCKS_TO_STOP,
    cost_of,
    is_enough,
    reason_to_stop,
)
from compare.evidence.turns import estimate, turn_error
from compare.page.report import doubtful_blocks
from compare.plan.plan import Plan, Share


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


def test_the_variance_is_the_pairs_own():
    """A loud third side in the same blocks changes nothing."""
    rates = {"a": [100.0, 104.0, 99.0, 101.0], "b": [100.0] * 4, "c": [50.0, 200.0, 90.0, 10.0]}
    blocks = [a_block({side: [own[at]] * 2 for side, own in rates.items()}) for at in range(4)]
    alone = estimate_ratio(rates["a"], rates["b"])
    assert estimate(blocks, {"a": 1, "b": -1}).error == pytest.approx(alone.error)
    whole = estimate(blocks, {"a": 1, "b": -1, "c": -1}).ratio
    assert whole == pytest.approx(alone.ratio / estimate(blocks, {"c": 1}).ratio)


ENOUGH = MIN_BLOCKS_TO_STOP


@pytest.mark.parametrize(
    ("ratio", "half_width", "blocks", "enough"),
    [
        (1.0, 0.0199, ENOUGH, True),
        (1.0, 0.0201, ENOUGH, False),
        (1.0, 0.0001, ENOUGH - 1, False),
        (1.2, 0.0201, ENOUGH, False),  # where it lies ends nothing
        (1.0, math.inf, 1, False),
    ],
)
def test_blocks_are_enough_when_the_interval_is_narrow_and_its_width_is_known(
    ratio, half_width, blocks, enough
):
    """Student's, whatever the report's interval is."""
    logs = np.array([(-1.0) ** at for at in range(blocks)])
    if half_width < math.inf:
        logs -= logs.mean()
        error = math.log1p(half_width) / student_quantile(0.95, blocks - 1)
        logs *= error * math.sqrt(blocks) / np.std(logs, ddof=1)
    found = estimate_logs((math.log(ratio) + logs).tolist())
    assert found.low is None or found.relative_half_width == pytest.approx(half_width)
    plan = Plan(until_interval=Share(0.02))
    for width in (0.5, 2):
        other = replace(found, error=width * found.error, degrees=30)
        assert is_enough([other], plan) == enough


def test_the_reason_to_stop():
    wide, narrow = (estimate_logs([-x, x] * 6) for x in (0.1, 0.01))
    goal = Plan(until_interval=0.03, minutes=10)
    assert reason_to_stop([narrow, wide], 8, 400, 50, goal) == ""
    enough = "the interval of every pair is within +-3%"
    assert reason_to_stop([narrow, narrow], 8, 400, 50, goal) == enough
    assert "--minutes 10" in reason_to_stop([wide], 8, 560, 50, goal)
    assert reason_to_stop([wide], 2, 560, 50, goal) == ""  # two blocks tell nothing
    five = Plan(blocks=5)
    assert reason_to_stop([narrow], 4, 9999, 50, five) == ""
    assert reason_to_stop([wide], 5, 1, 50, five) == "as many blocks as were asked for"


@pytest.mark.parametrize(("disturbed", "of_round"), [(20.0, 9.0), (90.0, 4.0)])
def test_a_round_costs_at_least_what_its_turns_take(disturbed, of_round):
    """Turns that others disturbed are kept where no quiet comes: here each of a second, behind a
    lead-in of a second, of two sides."""
    block = a_block(dict.fromkeys(Plan().names, [100.0] * 8))
    timed = replace(block, seconds=100.0, start_seconds=8.0, disturbed_seconds=disturbed)
    cost = cost_of(Group(Plan(), "", 2, 0.95, [timed], [], []))
    assert cost == pytest.approx((8.0, of_round))


def test_turns_let_one_expect_the_scatter_of_the_blocks():
    """And an interval that is narrower than that ends nothing."""
    (first, second), dice = Plan().names, np.random.default_rng(3)
    powers, rates = {first: 1, second: -1}, np.exp(dice.normal(0, 0.05, (60, 2, 8)))
    blocks = [a_block({first: list(a), second: list(b)}) for a, b in rates]
    assert turn_error(blocks, powers) == pytest.approx(estimate(blocks, powers).error, rel=0.2)
    whole_runs = [a_block({first: [one[0, 0]], second: [one[1, 0]]}) for one in rates]
    assert turn_error(whole_runs, powers) == 0
    group = Group(Plan(), "", 2, 0.95, blocks, [], [])
    ratios = tuple(1 + 1e-6 * at for at in range(60))
    narrow = replace(group.estimates[first, second], ratios=ratios)
    share = student_quantile(0.95, 59) * BLOCKS_OVER_TURNS * narrow.turn_error
    for factor, enough in ((1.1, True), (0.9, False)):
        assert is_enough([narrow], Plan(until_interval=Share(factor * share))) == enough


LOGS = [0.03, 0.05, 0.04]  # mean 0.04, standard deviation 0.01


@pytest.mark.parametrize(
    ("variance_ratio", "error", "degrees"),
    [
        # 6 degrees predicted and 2 of the blocks: (6 * 1.2 * 0.02**2 / 3 + 2 * 0.01**2 / 3) / 8
        (1.0, math.sqrt((7.2 * 0.02**2 + 2 * 0.01**2) / 24), 8),
        # Of launches (6 * 1.2 + 6 * 1.8) / 12 = 1.5 in place of 1.2.
        (1.8, math.sqrt((9.0 * 0.02**2 + 2 * 0.01**2) / 24), 8),
    ],
)
def test_the_turns_moderate_the_blocks_variance_by_hand(variance_ratio, error, degrees):
    student = replace(estimate_logs(LOGS), turn_error=0.02 / math.sqrt(3))
    found = moderated(student, Scatter(variance_ratio, degrees=6, turn_degrees=24, rounds=8))
    assert (found.error, found.degrees) == (pytest.approx(error), degrees)
    half = student_quantile(0.95, degrees) * error
    assert math.log(found.high / found.low) / 2 == pytest.approx(half)
    assert found.ratio == student.ratio
    assert found.p_difference() == pytest.approx(2 * stdtr(degrees, -0.04 / error))
    assert found.block_error == pytest.approx(student.error)


def test_where_blocks_scatter_more_than_turns_predict_the_wider_interval_counts():
    """F has 6 and 6 degrees of freedom: its upper quartile is 1.78, times 1.2."""
    student = replace(estimate_logs(LOGS), turn_error=0.002)
    below, above = (
        moderated(student, Scatter(variance_ratio, degrees=6, turn_degrees=24, rounds=8))
        for variance_ratio in (1.77 * 1.2, 1.79 * 1.2)
    )
    assert below.degrees > student.degrees and below.high < student.high
    assert above == student
    wide = replace(student, turn_error=0.1)
    assert moderated(wide, Scatter(9.0, degrees=6, turn_degrees=24, rounds=8)).high > student.high


def test_without_turns_and_without_blocks_nothing_is_predicted():
    scatter = Scatter(1.0, degrees=6, turn_degrees=24, rounds=8)
    whole, few = estimate_logs(LOGS), replace(estimate_logs(LOGS[:2]), turn_error=0.01)
    assert moderated(whole, scatter) == whole and moderated(few, scatter) == few
    three = replace(whole, turn_error=0.01)  # of two sides, with two degrees of freedom
    assert moderated(three, scatter._replace(degrees=2)) == three


def test_a_group_tells_how_much_its_blocks_scatter():
    """As predicted if launches add nothing; more if they do; None on a GPU and in whole runs."""
    (first, second), dice = Plan().names[:2], np.random.default_rng(5)
    plan = Plan(configurations=(first, second))

    def group(launch: float, rounds: int = 8, **fields: Any) -> Group:
        logs = dice.normal(0, 0.04, (200, 2, rounds)) + dice.normal(0, launch, (200, 2, 1))
        rates = [{first: list(a), second: list(b)} for a, b in np.exp(logs)]
        blocks = [replace(a_block(both), **fields) for both in rates]
        return Group(plan, "", 2, 0.95, blocks, [], [])

    found = group(0.0).scatter
    assert (found.degrees, found.turn_degrees) == (199, 1400)
    assert found.variance_ratio == pytest.approx(1, abs=0.3)
    assert group(0.04).scatter.variance_ratio == pytest.approx(9, abs=2.5)
    assert group(0.0, rounds=1).scatter is None and group(0.0, unit="bytes").scatter is None
    by_turns = group(0.0)
    assert by_turns.estimates[first, second].degrees > 199
    alone = {"ranks_per_gpu": None}
    unknown = SimpleNamespace(environment=SimpleNamespace(**alone, device="cpu", torch=""))
    assert replace(by_turns, sides=[unknown]).scatter is None  # a script that may use a GPU
    on_gpu = SimpleNamespace(environment=SimpleNamespace(**alone, device="cuda", torch="2"))
    of_gpu = replace(by_turns, sides=[on_gpu])
    assert of_gpu.scatter is None and of_gpu.estimates[first, second].degrees == 199
    assert of_gpu.estimates[first, second].turn_error > 0  # the rule that stops needs it


@pytest.mark.parametrize("number", [8, 11, 20, 40])
def test_a_correlation_of_blocks_is_shown_where_there_is_one(number):
    def shown(correlation: float) -> float:
        """In how many of 1000 series, with one chance in a hundred where there is none."""
        dice, count = np.random.default_rng(4), 0
        for _ in range(1000):
            logs = dice.normal(0, 0.02, number)
            for at in range(1, number):
                logs[at] = correlation * logs[at - 1] + math.sqrt(1 - correlation**2) * logs[at]
            count += estimate_logs(logs.tolist()).serial_correlation()[1] < 0.01
        return count / 1000

    assert shown(-0.3) <= shown(0) <= 0.017 < shown(0.3) < shown(0.7)
    assert number < 20 or shown(0.7) > 0.6


def test_a_series_is_correlated_with_itself_a_block_before():
    logs = [0.03, 0.02, 0.01, 0.0, -0.01, -0.02, -0.03]
    found, p_value = estimate_logs(logs).serial_correlation()
    assert found == pytest.approx(16 / 28) and p_value < 0.01
    for blocks in ([0.1], [0.1, 0.2], [0.1, 0.1, 0.1]):
        assert estimate_logs(blocks).serial_correlation()[1] > 0.05


def test_blocks_from_which_little_follows_are_warned_of():
    """Turns of one step, three blocks, and blocks that scatter far more or less than predicted."""
    plan, dice = Plan(configurations=Plan().names[:2]), np.random.default_rng(6)

    def warnings(launch: float, number: int = 20, steps: int = 3, opposed: bool = False) -> str:
        logs = dice.normal(0, 0.04, (number, 2, 8)) + dice.normal(0, launch, (number, 2, 1))
        if opposed:  # what is lost in one turn is made up for in the next
            logs[:, :, 1::2] = -logs[:, :, ::2]
        rates = [dict(zip(plan.names, map(list, both), strict=True)) for both in np.exp(logs)]
        blocks = [replace(a_block(one), steps=dict.fromkeys(plan.names, steps)) for one in rates]
        groups = [Group(plan, case, 2, 0.95, blocks, [], []) for case in ("one", "other")]
        return " ".join(doubtful_blocks(SimpleNamespace(groups=groups, unfinished={}, plan=plan)))

    assert warnings(0.01) == "" and "3 blocks only" in warnings(0.01, number=3)
    assert "one, 2 workers; other, 2 workers: each turn has one" in warnings(0.01, steps=1)
    assert "launches differ much" in warnings(0.1)
    assert "one, 2 workers (0.0" in warnings(0.0, opposed=True)


def test_two_blocks_have_no_interval_and_none_are_refused():
    estimate = estimate_ratio([110, 120], [100, 100])
    assert (estimate.low, estimate.high) == (None, None)
    assert (estimate.p_difference(), estimate.p_equality(0.03)) == (1, 0.5)
    assert estimate.ratio == pytest.approx(math.sqrt(1.1 * 1.2))
    with pytest.raises(ValueError, match="no blocks"):
        estimate_logs([])


def test_the_inverse_tells_the_same_story():
    first, second = [110.0, 108.0, 107.0], [100.0, 101.0, 99.0]
    there, back = estimate_ratio(first, second), estimate_ratio(second, first).inverse()
    assert (there.ratio, there.low, there.high) == pytest.approx((back.ratio, back.low, back.high))
