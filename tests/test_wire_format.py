"""`--wire-format auto` takes what trains faster, and all ranks take the same."""

from dataclasses import replace
from typing import Any, get_args
from unittest.mock import Mock, patch

import pytest
import torch
from making import CPU, a_config, a_world
from torch import nn

from recipe.config import Config
from recipe.device import own_row
from recipe.training import wire_format
from recipe.training.wire_format import settle_wire_format
from recipe.wire_formats import WIRE_FORMATS, WireFormat

MODEL = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 10))
AUTO = a_config(wire_format="auto", train_crop_size=8, batches_per_allreduce=3)


def settle(
    slow: str,
    others: list[float] | None = None,
    config: Config = AUTO,
    rounds_seen: list[int] | None = None,
) -> tuple[Config, list[Config]]:
    """Rank 0 of two, whose steps are slow with one number format, by a clock that the steps alone
    move; `others` are the seconds of the other rank, which is ready at once if they are left out.
    Also what was distributed; `rounds_seen` gets the rounds after which the ranks compared."""
    distributed: list[Config] = []
    now = 0.0

    def distribute(model: nn.Module, config: Config) -> tuple[nn.Module, torch.optim.Optimizer]:
        assert model is not MODEL  # which must not be trained
        distributed.append(config)

        def pass_time(*_: object) -> None:
            nonlocal now
            now += 0.02 if config.wire_format == slow else 0.001

        model.register_forward_pre_hook(pass_time)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
        if others is not None and len(values) > 1:
            rounds = values.numel() // 4  # of two ranks and two formats
            if rounds_seen is not None:
                rounds_seen.append(rounds)
            row = torch.tensor(others * rounds, dtype=torch.float64)
            return values + own_row(a_world(1, 2), row)
        return values

    with patch.object(wire_format.time, "perf_counter", lambda: now):
        chosen = settle_wire_format(config, a_world(0, 2), MODEL, CPU, distribute, sum_over_ranks)
    return chosen, distributed


def test_the_faster_format_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    before = {name: value.clone() for name, value in MODEL.state_dict().items()}
    chosen, distributed = settle(slow="fp32")
    assert all(torch.equal(before[name], value) for name, value in MODEL.state_dict().items())
    assert all(parameter.grad is None for parameter in MODEL.parameters())
    assert chosen.wire_format == "fp16" and chosen.batches_per_allreduce == 3
    assert [one.wire_format for one in distributed] == list(WIRE_FORMATS)
    assert all(one.batches_per_allreduce == 1 for one in distributed)
    assert settle(slow="fp16")[0].wire_format == "fp32"
    lines = capsys.readouterr().out.splitlines()
    assert [line[:17] for line in lines] == ["wire format: fp16", "wire format: fp32"]


@pytest.mark.parametrize(
    "settings", [{"evaluate": True}, *({"wire_format": name} for name in WIRE_FORMATS)]
)
def test_what_is_not_measured(settings: dict[str, Any]) -> None:
    chosen, distributed = settle(slow="fp32", config=replace(AUTO, **settings))
    assert chosen.wire_format == settings.get("wire_format", "fp32") and not distributed


def test_one_worker_sends_nothing() -> None:
    chosen = settle_wire_format(AUTO, a_world(0, 1), MODEL, CPU, Mock(), Mock())
    assert chosen.wire_format == "fp32"


@pytest.mark.parametrize(
    ("slow", "others", "chosen"),
    [
        # fp16 rounds: of two that are equally fast, as far as timing can tell, fp32 is taken.
        ("none", [1.0, 0.992], "fp32"),
        ("none", [1.0, 0.98], "fp16"),
        ("fp32", [0.001, 5.0], "fp32"),  # the slowest rank, not this one, decides for all
    ],
)
def test_what_the_other_rank_measured_counts(slow: str, others: list[float], chosen: str) -> None:
    assert settle(slow, others)[0].wire_format == chosen


def test_close_formats_are_measured_longer() -> None:
    for seconds, rounds in ((0.95, [6, 21]), (0.5, [6])):  # the first of each does not count
        seen: list[int] = []
        settle(slow="none", others=[1.0, seconds], rounds_seen=seen)
        assert seen == rounds


def test_each_format_is_known_to_both_engines() -> None:
    """One that is in the table alone would be an error at once, not fp32 in silence."""
    from ddp_train.buckets import HOOKS
    from horovod_train.engine import COMPRESSION

    assert set(get_args(WireFormat)) == WIRE_FORMATS.keys() == HOOKS.keys() == COMPRESSION.keys()
    for one in WIRE_FORMATS.values():
        dtype = getattr(torch, one.dtype)
        assert one.bytes == torch.empty(0, dtype=dtype).element_size()
        exact = torch.tensor([one.exact_integers, one.exact_integers + 1]).to(dtype).long()
        assert exact.tolist() == [one.exact_integers, one.exact_integers]
