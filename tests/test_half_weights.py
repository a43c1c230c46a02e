"""fp16 weights with and without fp32 masters, the loss scale, and exact resumes."""

import io
from dataclasses import replace
from typing import Any

import pytest
import torch
from making import CPU, TinyNet, a_config, a_world
from test_optimizers import OPTIMIZERS
from torch import nn

from recipe.data.batches import Data
from recipe.errors import UserError
from recipe.ranks import Ranks
from recipe.record.checkpoint import contents_of
from recipe.record.fingerprint import weights_sha256
from recipe.record.resume import restore
from recipe.settings.config import Config
from recipe.training.model import build_ema, build_optimizer, build_scaler, update_ema
from recipe.training.state import (
    LEAST_SCALE,
    LossScaler,
    Progress,
    Trainables,
    make_half,
    round_weights,
    train_masters,
    unscale_and_clip,
    working_copy,
)

O2 = a_config(precision="O2", arch="tiny", base_lr=0.1, momentum=0.5)
DATA = Data(None, None, num_train=100, num_val=8, num_classes=3)
IMAGES = torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(0))


def trainables(config: Config, seed: int = 0) -> Trainables:
    """As a trainer makes them."""
    torch.manual_seed(seed)
    model = TinyNet()
    if config.precision == "O3":
        make_half(model, config)
    fp16_model = working_copy(model, config)
    optimizer = build_optimizer(fp16_model, config)
    train_masters(optimizer, fp16_model, model, Ranks(a_world()))
    ema = build_ema(model, config)
    return Trainables(model, optimizer, build_scaler(config, CPU), ema, fp16_model)


def update(parts: Trainables, clip_grad_norm: float | None) -> None:
    unscale_and_clip(parts, clip_grad_norm)
    parts.scaler.step(parts.optimizer)
    parts.scaler.update()
    round_weights(parts.fp16_model, parts.model)


def train(parts: Trainables, steps: int) -> None:
    for _ in range(steps):
        assert parts.fp16_model is not None
        loss = nn.functional.cross_entropy(parts.fp16_model(IMAGES), torch.arange(8) % 3)
        parts.scaler.scale(loss).backward()
        update(parts, 1.0)
        parts.fp16_model.zero_grad()
        update_ema(parts.ema, parts.model, O2, 1)


def dtypes(network: nn.Module) -> dict[str, set[torch.dtype]]:
    """Of the weights and of the statistics, by layer."""
    values = [(n, v) for n, v in network.state_dict().items() if v.is_floating_point()]
    layers = {name.partition(".")[0] for name, _ in values}
    return {layer: {v.dtype for n, v in values if n.startswith(layer)} for layer in layers}


HALF, FULL = {torch.half}, {torch.float32}


@pytest.mark.parametrize(
    ("level", "keep", "model", "norm"),
    [
        ("O2", None, FULL, FULL),
        ("O2", False, FULL, HALF),
        ("O3", None, HALF, HALF),
        ("O3", True, HALF, FULL),
        ("fp32", None, FULL, FULL),
    ],
)
def test_what_is_fp16(level: Any, keep: bool | None, model: Any, norm: Any) -> None:
    parts = trainables(a_config(precision=level, keep_batchnorm_fp32=keep))
    assert parts.fp16_model is not None
    trained = FULL if level == "fp32" else HALF
    assert dtypes(parts.fp16_model) == {"conv": trained, "norm": norm, "head": trained}
    assert dtypes(parts.model)["conv"] == model
    assert parts.fp16_model(IMAGES).dtype == torch.float32, "the loss is computed in fp32"
    kept = {weight.dtype for group in parts.optimizer.param_groups for weight in group["params"]}
    assert kept == (FULL if level != "O3" else HALF | norm)


def test_masters_keep_what_fp16_rounds_away() -> None:
    """A hundred updates of a fifth of fp16's spacing at 1 are 20 spacings; O3 takes none."""
    moved = {}
    for level in ("O2", "O3"):
        config = a_config(precision=level, momentum=0.0, wd=0.0, loss_scale=8.0, base_lr=1.0)
        parts = trainables(config)
        assert parts.fp16_model is not None
        with torch.no_grad():
            parts.model.head.bias.fill_(1.0)  # type: ignore[operator, union-attr]
        round_weights(parts.fp16_model, parts.model)
        for _ in range(100):
            parts.scaler.scale(torch.zeros(1))
            for weight in parts.fp16_model.parameters():
                weight.grad = torch.full_like(weight, -8 * 2.0**-10 / 5)
            update(parts, None)
        moved[level] = float(parts.fp16_model.head.bias.detach()[0]) - 1  # type: ignore[index, union-attr]
    assert moved == {"O2": pytest.approx(20 * 2.0**-10, abs=2.0**-10), "O3": 0.0}


def test_a_weight_without_a_gradient_has_no_earlier_one() -> None:
    parts = trainables(O2)
    train(parts, 1)
    assert parts.model.head.weight.grad is not None  # type: ignore[union-attr]
    unscale_and_clip(parts, None)
    assert parts.model.head.weight.grad is None  # type: ignore[union-attr]


def test_without_masters_a_step_looks_at_no_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """To walk through a large network's weights takes milliseconds."""
    parts = trainables(a_config())
    monkeypatch.delattr(nn.Module, "parameters")
    unscale_and_clip(parts, None)
    round_weights(parts.fp16_model, parts.model)


@pytest.mark.parametrize("keep", [None, False])
def test_the_copy_has_the_models_statistics(keep: bool | None) -> None:
    parts = trainables(replace(O2, keep_batchnorm_fp32=keep))
    assert parts.fp16_model is not None
    parts.fp16_model(IMAGES)
    statistics = parts.model.norm.running_mean.clone()  # type: ignore[operator, union-attr]
    assert statistics.abs().sum() > 0
    parts.model.norm.running_mean.fill_(0.25)  # type: ignore[operator, union-attr]
    parts.fp16_model.eval()(IMAGES)
    assert torch.equal(parts.fp16_model.norm.running_mean.float(), torch.full((4,), 0.25))  # type: ignore[operator, union-attr]


@pytest.mark.parametrize("keep", [None, False])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_resume_is_exact(optimizer: Any, keep: bool | None) -> None:
    config = replace(O2, optimizer=optimizer, keep_batchnorm_fp32=keep, model_ema=True)
    whole = trainables(config)
    train(whole, 4)
    file = io.BytesIO()
    progress = Progress(step=4, samples_seen=32, skipped_steps=whole.scaler.skipped_steps)
    torch.save(contents_of(whole, progress, config, DATA), file)
    file.seek(0)
    contents = torch.load(file, weights_only=True)
    assert {value.dtype for value in contents["model"].values()} == FULL | {torch.int64}
    resumed = trainables(config, seed=1)
    assert restore(contents, resumed, config, a_world(), DATA, "c.pt") == progress
    assert resumed.scaler.skipped_steps == whole.scaler.skipped_steps
    for parts in (whole, resumed):
        train(parts, 4)
    assert weights_sha256(whole.model) == weights_sha256(resumed.model)
    del contents["progress"]["skipped_steps"]  # as earlier versions wrote it
    assert restore(contents, resumed, config, a_world(), DATA, "c.pt").skipped_steps == 0


def step_with(scaler: LossScaler, gradient: float) -> float:
    """The weight after a step from 1 at a rate of 1."""
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler.scale(torch.zeros(1))
    weight.grad = torch.tensor([gradient])
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return float(weight.detach())


def test_steps_that_overflow_are_left_out_and_counted() -> None:
    scaler = LossScaler("cpu", None)
    assert [step_with(scaler, bad) for bad in (float("inf"), float("nan"))] == [1.0, 1.0]
    assert (scaler.skipped_steps, scaler.get_scale()) == (2, 2.0**14)
    assert step_with(scaler, 2.0**13) == 0.5
    assert scaler.skipped_steps == 2


def test_a_fixed_scale_stays() -> None:
    scaler = LossScaler("cpu", 128)
    assert step_with(scaler, float("inf")) == 1.0 and step_with(scaler, 64.0) == 0.5
    assert (scaler.skipped_steps, scaler.get_scale()) == (1, 128.0)
    other = LossScaler("cpu", None)
    step_with(other, float("inf"))
    scaler.load_state_dict(other.state_dict())
    assert scaler.get_scale() == 128.0, "as the flag says, whatever the checkpoint had"
    no_scale = LossScaler("cpu", 1)
    assert step_with(no_scale, 0.5) == 0.5 and no_scale.state_dict() == {}


def test_a_training_that_only_leaves_out_steps_ends() -> None:
    scaler = LossScaler("cpu", None)
    with pytest.raises(UserError, match=r"gradients overflow at a loss scale of .* has diverged"):
        for _ in range(40):
            step_with(scaler, float("nan"))
    assert scaler.get_scale() == LEAST_SCALE
