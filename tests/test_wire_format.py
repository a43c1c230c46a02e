"""`--wire-format auto` takes what is faster, and all ranks take the same."""

import time

import pytest
import torch
from making import CPU, a_config, a_world
from torch import nn

from recipe.config import Config
from recipe.device import own_row
from recipe.wire_format import ROUNDS, settle_wire_format

MODEL = nn.Linear(100, 10)
AUTO = a_config(wire_format="auto")


def settle(slow: torch.dtype, config: Config = AUTO, size: int = 2) -> Config:
    """Two ranks with equal gradients, on a network that is slow with one number format."""

    def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
        if values.dtype == torch.float64:  # the times: the other rank's row is left empty
            return values
        time.sleep(0.02 if values.dtype == slow else 0.001)
        return values * size

    return settle_wire_format(config, a_world(0, size), MODEL, CPU, sum_over_ranks)


def test_the_faster_format_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    assert settle(slow=torch.float32).wire_format == "fp16"
    assert settle(slow=torch.float16).wire_format == "fp32"
    lines = capsys.readouterr().out.splitlines()
    assert [line[:17] for line in lines] == ["wire format: fp16", "wire format: fp32"]


def test_a_format_that_is_named_is_not_measured() -> None:
    def fail(values: torch.Tensor) -> torch.Tensor:
        raise AssertionError("measured")

    for name in ("fp32", "fp16"):
        config = a_config(wire_format=name)
        assert settle_wire_format(config, a_world(0, 2), MODEL, CPU, fail) is config
    alone = settle_wire_format(AUTO, a_world(0, 1), MODEL, CPU, fail)
    assert alone.wire_format == "fp32"


def test_the_slowest_rank_decides_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 of 2 is slow with fp16; rank 0, which is not, comes to the same choice."""
    others = torch.tensor([[0.001, 5.0]] * ROUNDS, dtype=torch.float64).flatten()

    def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
        if values.dtype == torch.float64:
            return values + own_row(a_world(1, 2), others)
        time.sleep(0.02 if values.dtype == torch.float32 else 0.001)
        return values * 2

    chosen = settle_wire_format(AUTO, a_world(0, 2), MODEL, CPU, sum_over_ranks)
    assert chosen.wire_format == "fp32"
