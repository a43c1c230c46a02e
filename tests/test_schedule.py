"""The learning rate at its turning points."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from making import a_config

from recipe.config import Config
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


QUARTER = 0.5 * (1 + math.cos(math.pi / 4))
# Settings, and the rates of eight workers by epoch.
RATES: dict[str, tuple[Config, dict[str, Any], dict[float, float]]] = {
    **{
        f"gradual warm-up, from one worker's rate, {config.lr_scheduler}": (
            config, {}, {0: 0.1, 2.5: 0.45, 5 * JUST_BELOW: 0.8, 5: 0.8}
        )
        for config in (STEP, COSINE)
    },
    "linear warm-up, from near zero": (
        STEP, {"warmup_method": "linear"}, {0: 0.008, 2.5: 0.404, 5: 0.8}
    ),
    "none": (STEP, {"warmup_epochs": 0.0}, {0: 0.8}),
    "steps": (
        STEP, {},
        {
            30 * JUST_BELOW: 0.8, 30: 0.08, 60 * JUST_BELOW: 0.08, 60: 0.008,
            80 * JUST_BELOW: 0.008, 80: 0.0008, 90: 0.0008,
        },
    ),
    # The last batch may pass the end.
    "cosine": (
        COSINE, {}, {5: 0.8, 10: 0.01 + 0.79 * QUARTER, 15: 0.405, 25: 0.01, 26: 0.01}
    ),
    "linear": (
        COSINE, {"lr_scheduler": "linear"}, {5: 0.8, 10: 0.6025, 15: 0.405, 25: 0.01, 26: 0.01}
    ),
    "a cosine with restarts is several: of the lengths 5, 10 and 5": (
        COSINE, {"lr_restart_epochs": (10, 20)},
        {
            5: 0.8, 7.5: 0.405, 10 * JUST_BELOW: 0.01, 10: 0.8, 15: 0.405, 20 * JUST_BELOW: 0.01,
            20: 0.8, 22.5: 0.405, 25: 0.01, 26: 0.01,
        },
    ),
    "warm-up to the end": (
        COSINE, {"warmup_epochs": 25.0}, {25 * JUST_BELOW: 0.8, 25: 0.8}  # no time is left
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", RATES)
def test_rates(case: str) -> None:
    base, settings, rates = RATES[case]
    config = a_config(**{**vars(base), **settings})
    assert {at: learning_rate(config, at, 8) for at in rates} == pytest.approx(rates)


def test_one_worker_needs_no_gradual_warm_up() -> None:
    assert {learning_rate(STEP, epoch / 10, 1) for epoch in range(50)} == {0.1}


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
