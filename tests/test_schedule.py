"""The learning rate at its turning points."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from making import a_config

from recipe.training.schedule import learning_rate

STEP = a_config(
    lr_scheduler="step",
    base_lr=0.1,
    warmup_epochs=5.0,
    lr_step_epochs=(30, 60, 80),
    lr_gamma=0.1,
    epochs=90,
)
COSINE = a_config(lr_scheduler="cosine", base_lr=0.1, warmup_epochs=5.0, epochs=25, lr_min=0.01)
JUST_BELOW = 1 - 1e-12


@pytest.mark.parametrize("config", [STEP, COSINE])
def test_gradual_warm_up_begins_at_one_worker_s_rate(config) -> None:
    assert learning_rate(config, 0.0, 8) == pytest.approx(0.1)
    assert learning_rate(config, 2.5, 8) == pytest.approx(0.45)
    assert learning_rate(config, 5.0 * JUST_BELOW, 8) == pytest.approx(0.8)
    assert learning_rate(config, 5.0, 8) == pytest.approx(0.8)


def test_linear_warm_up_begins_near_zero() -> None:
    config = a_config(**{**vars(STEP), "warmup_method": "linear"})
    assert learning_rate(config, 0.0, 8) == pytest.approx(0.008)
    assert learning_rate(config, 2.5, 8) == pytest.approx(0.404)
    assert learning_rate(config, 5.0, 8) == pytest.approx(0.8)


def test_one_worker_needs_no_gradual_warm_up() -> None:
    assert {learning_rate(STEP, epoch / 10, 1) for epoch in range(50)} == {0.1}
    config = a_config(**{**vars(STEP), "warmup_epochs": 0.0})
    assert learning_rate(config, 0.0, 8) == pytest.approx(0.8), "nor does who asks for none"


def test_steps() -> None:
    for epoch, rate in {30: 0.08, 60: 0.008, 80: 0.0008}.items():
        assert learning_rate(STEP, epoch * JUST_BELOW, 8) == pytest.approx(rate * 10)
        assert learning_rate(STEP, epoch, 8) == pytest.approx(rate)
    assert learning_rate(STEP, 90, 8) == pytest.approx(0.0008)


@pytest.mark.parametrize(
    ("scheduler", "quarter"), [("cosine", 0.5 * (1 + math.cos(math.pi / 4))), ("linear", 3 / 4)]
)
def test_cosine_and_linear(scheduler: str, quarter: float) -> None:
    config = a_config(**{**vars(COSINE), "lr_scheduler": scheduler})
    left = {5: 1, 10: quarter, 15: 0.5, 25: 0, 26: 0}  # the last batch may pass the end
    for epoch, share in left.items():
        assert learning_rate(config, epoch, 8) == pytest.approx(0.01 + 0.79 * share)


def test_a_cosine_with_restarts_is_several_cosines() -> None:
    """Of the lengths 5, 10 and 5."""
    config = a_config(**{**vars(COSINE), "lr_restart_epochs": (10, 20)})
    for start, length in {5: 5, 10: 10, 20: 5}.items():
        assert learning_rate(config, start, 8) == pytest.approx(0.8)
        assert learning_rate(config, start + length / 2, 8) == pytest.approx((0.8 + 0.01) / 2)
        assert learning_rate(config, (start + length) * JUST_BELOW, 8) == pytest.approx(0.01)
    assert learning_rate(config, 26, 8) == pytest.approx(0.01)


def test_warm_up_may_last_to_the_end() -> None:
    config = a_config(**{**vars(COSINE), "warmup_epochs": 25.0})
    assert learning_rate(config, 25, 8) == pytest.approx(0.8)  # and the cosine has no time left
    assert learning_rate(config, 24.999, 8) == pytest.approx(0.8, rel=1e-3)


@given(st.floats(0, 90), st.integers(1, 1024))
def test_scaled_by_the_world_after_warm_up(epoch: float, size: int) -> None:
    one, all_of_them = learning_rate(STEP, epoch, 1), learning_rate(STEP, epoch, size)
    if epoch >= 5:
        assert all_of_them == pytest.approx(size * one)
    else:
        assert one <= all_of_them * (1 + 1e-12)
        assert all_of_them <= size * one * (1 + 1e-12)


@given(st.floats(0, 24), st.integers(1, 64))
def test_no_jump_but_at_steps(epoch: float, size: int) -> None:
    now, soon = (learning_rate(COSINE, at, size) for at in (epoch, epoch + 1e-6))
    assert abs(now - soon) < 1e-6 * size
