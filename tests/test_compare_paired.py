"""The interval must cover the truth as often as it says."""

import math

import numpy as np
import pytest

from compare.paired import estimate_ratio, student_quantile


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


@pytest.mark.parametrize("blocks", [3, 5, 10])
@pytest.mark.parametrize("ratio", [1.0, 1.08])
def test_the_interval_covers_the_truth_in_95_of_100_experiments(blocks, ratio):
    """Each block has its own speed of the machine, ten times as uncertain as a run itself."""
    experiments, random = 4000, np.random.default_rng(blocks)
    drift = random.normal(0, 0.2, (experiments, blocks))
    first = 1000 * ratio * np.exp(drift + random.normal(0, 0.02, drift.shape))
    second = 1000 * np.exp(drift + random.normal(0, 0.02, drift.shape))
    estimates = [estimate_ratio(a, b) for a, b in zip(first.tolist(), second.tolist(), strict=True)]
    covered = sum(estimate.low <= ratio <= estimate.high for estimate in estimates)
    assert 0.93 <= covered / experiments <= 0.97
    # Drift must not widen the interval: that is what blocks are for.
    half_widths = [math.log(estimate.high / estimate.low) / 2 for estimate in estimates]
    expected = student_quantile(0.95, blocks - 1) * 0.02 * math.sqrt(2 / blocks)
    assert np.median(half_widths) == pytest.approx(expected, rel=0.2)


def test_a_block_that_is_lost_drift_included_is_not_covered_without_pairing():
    """The same data, paired wrongly, gives a far wider interval: the test above can fail."""
    random = np.random.default_rng(0)
    drift = random.normal(0, 0.2, 10)
    first, second = 1080 * np.exp(drift), 1000 * np.exp(drift)
    right = estimate_ratio(first.tolist(), second.tolist())
    wrong = estimate_ratio(first.tolist(), second[::-1].tolist())
    assert right.high - right.low < 1e-6 < 0.1 < wrong.high - wrong.low


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
