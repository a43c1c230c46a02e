"""Optimizers beside SGD: their settings, their origin, and what is said where they are missing."""

import importlib.util
import io
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import pytest
import torch
from making import CPU, TinyNet, a_config, a_world
from needs import needs_gpu, needs_timm
from torch import nn

from recipe.data.batches import Data
from recipe.errors import UserError
from recipe.ranks import Ranks
from recipe.record.checkpoint import contents_of
from recipe.record.fingerprint import weights_sha256
from recipe.record.resume import restore
from recipe.settings.config import SCHEDULES, Config, check
from recipe.settings.presets import preset
from recipe.training.batch_norm import align_batch_norm
from recipe.training.model import (
    autocast,
    build_criterion,
    build_ema,
    build_model,
    build_optimizer,
    build_scaler,
    seed_step,
    update_ema,
)
from recipe.training.optimizers import (
    apex_optimizers,
    learning_rate,
    optimizer_class_and_arguments,
    schedule_in_words,
)
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

OPTIMIZERS = ["sgd", "adamw", *(pytest.param(name, marks=needs_timm) for name in ("lars", "lamb"))]
DATA = Data(None, None, num_train=100, num_val=8, num_classes=3)
GPU = torch.device("cuda", 0)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    images = torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    nn.functional.cross_entropy(model(images), torch.arange(8) % 3).backward()
    optimizer.step()
    model.zero_grad()


def as_horovod_makes_it(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Anew, from the groups of weights alone, under a class that is derived from the first."""
    kind = type(type(optimizer).__name__, (type(optimizer),), {})
    return kind(optimizer.param_groups)


@pytest.mark.parametrize(
    ("flag", "use"),
    [
        ("optimizer", lambda config: optimizer_class_and_arguments(config, CPU)),
        ("lr_scheduler", lambda config: learning_rate(config, epoch=5.0, scale=1.0)),
        ("precision", lambda config: autocast(config, CPU)),
        ("loss", build_criterion),
        ("batch_norm", lambda config: align_batch_norm(TinyNet(), config, Ranks(a_world()))),
    ],
)
def test_a_value_that_code_forgets_is_an_error(flag: str, use: Callable[[Config], object]) -> None:
    """And not silently treated as another one. Each value that the flag takes is known."""
    for value in get_args(get_type_hints(Config)[flag]):
        if value not in (*SCHEDULES, "lars", "lamb") and not value.startswith("apex"):
            use(a_config(**{flag: value}))
    with pytest.raises((AssertionError, KeyError), match="forgotten"):
        use(a_config(**{flag: "forgotten"}))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_each_engines_is_the_same(name: Any, precision: Any) -> None:
    """Gradients a hundred times as long as LAMB clips unless it is told not to."""
    config = a_config(optimizer=name, precision=precision, wd=0.1, base_lr=0.01)
    models = []
    for remake in (lambda optimizer: optimizer, as_horovod_makes_it):
        torch.manual_seed(0)
        model = TinyNet()
        with torch.no_grad():
            model.head.weight *= 100
        optimizer = remake(build_optimizer(model, config))
        before = weights_sha256(model, buffers=False)
        for _ in range(3):
            step(model, optimizer)
        models.append(weights_sha256(model, buffers=False))
        assert models[-1] != before
    assert models[0] == models[1]


@needs_timm
@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        (
            "goyal-90",
            {"batch_size": 208, "base_lr": 0.08125},
            "learning rate 0.65 (--base-lr 0.08125 x 8) after 5 epoch(s) of gradual-256 warm-up, "
            "x 0.1 at epoch(s) 30 60 80; 90 epoch(s)",
        ),
        (
            "goyal-90",
            {"epochs": 20, "warmup_epochs": 0.0},
            "learning rate 0.1 (--base-lr 0.0125 x 8), constant; 20 epoch(s)",
        ),
        (
            "digits",
            {"lr_min": 1e-6, "lr_restart_epochs": (2,)},
            "learning rate 0.04 (--base-lr 0.005 x 8) after 1 epoch(s) of gradual warm-up, cosine "
            "down to 1e-06, again from epoch 2; 4 epoch(s)",
        ),
    ],
)
def test_the_learning_rate_in_words(name: str, settings: dict[str, Any], words: str) -> None:
    assert schedule_in_words(replace(preset(name), **settings), scale=8) == words


@needs_timm
def test_lars_scales_what_decays_by_its_trust_ratio() -> None:
    config = a_config(
        optimizer="lars",
        momentum=0.0,
        wd=0.1,
        norm_weight_decay=0.0,
        bias_weight_decay=0.0,
        trust_coefficient=0.01,
    )
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone(), model.bias.detach().clone()
    optimizer = build_optimizer(model, config)
    for group in optimizer.param_groups:
        group["lr"] = 0.5
    gradient = torch.arange(6.0).view(2, 3)
    model.weight.grad, model.bias.grad = gradient.clone(), torch.ones(2)
    optimizer.step()
    weight, bias = before
    ratio = 0.01 * weight.norm() / (gradient.norm() + 0.1 * weight.norm())
    torch.testing.assert_close(
        model.weight.detach(), weight - 0.5 * ratio * (gradient + 0.1 * weight)
    )
    torch.testing.assert_close(model.bias.detach(), bias - 0.5)


@pytest.mark.parametrize(
    "settings",
    [{"optimizer": "lars"}, {"arch": "timm:resnet18"}, {"auto_augment": "rand-m7"}],
)
def test_timm_is_missing(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        UserError,
        match=r"^--(optimizer lars|arch timm:resnet18|auto-augment rand-m7): needs timm, .*pip",
    ):
        check(a_config(**settings), "ddp", 1)


@needs_timm
def test_stochastic_depth_is_drawn_for_each_step() -> None:
    """As dropout is: the same again after a resume, and under the other engine."""
    sizes = {"train_crop_size": 32, "val_crop_size": 32}
    config = a_config(arch="timm:resnet10t", drop_path=0.5, **sizes)
    model = build_model(config, 7, download=True).train()
    for module in model.modules():  # of which timm makes some 0: blocks without an effect
        if isinstance(module, nn.BatchNorm2d):
            nn.init.ones_(module.weight)
    outputs = []
    for number in (3, 4, 3):
        seed_step(config, number, rank=0)
        outputs.append(model(torch.ones(8, 3, 32, 32)))
    assert outputs[0].shape == (8, 7)
    assert torch.equal(outputs[0], outputs[2])
    assert not torch.equal(outputs[0], outputs[1])


APEX = {"apex-sgd": "FusedSGD", "apex-adam": "FusedAdam", "apex-lamb": "FusedLAMB"}


class StandIn(torch.optim.SGD):
    """In the place of Apex's: notes how it was made."""

    def __init__(self, params: Any, lr: float = 0.1, **settings: Any) -> None:
        super().__init__(params, lr=lr)
        self.settings = settings


@pytest.fixture
def apex(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {kind: type(kind, (StandIn,), {}) for kind in APEX.values()}
    module = SimpleNamespace(**kinds)
    monkeypatch.setitem(sys.modules, "apex", SimpleNamespace(optimizers=module))
    monkeypatch.setitem(sys.modules, "apex.optimizers", module)


@pytest.mark.usefixtures("apex")
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("apex-sgd", {"momentum": 0.7, "nesterov": True}),
        ("apex-adam", {"betas": (0.8, 0.9)}),
        ("apex-lamb", {"betas": (0.8, 0.9), "max_grad_norm": float("inf")}),
    ],
)
def test_how_apex_is_called(name: Any, expected: dict[str, Any]) -> None:
    config = a_config(optimizer=name, momentum=0.7, nesterov=True, betas=(0.8, 0.9))
    optimizer_class, arguments = optimizer_class_and_arguments(config, GPU)
    made: Any = optimizer_class([nn.Parameter(torch.ones(1))], lr=0.5, **arguments)
    assert (type(made).__name__, made.settings) == (APEX[name], expected)
    remade: Any = as_horovod_makes_it(made)
    assert remade.settings == {k: v for k, v in expected.items() if k == "max_grad_norm"}


@pytest.mark.usefixtures("apex")
def test_apex_without_a_gpu_or_without_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    config = a_config(optimizer="apex-lamb")
    with pytest.raises(
        UserError, match=r"--optimizer apex-lamb: has kernels for GPUs only.* lamb$"
    ):
        build_optimizer(TinyNet(), config)

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("apex.optimizers.FusedLAMB requires cuda extensions")

    monkeypatch.setattr(
        "recipe.training.model.optimizer_class_and_arguments", lambda *_: (refuse, {})
    )
    with pytest.raises(UserError, match="FusedLAMB requires cuda extensions; install Apex as"):
        build_optimizer(TinyNet(), config)


def test_apex_is_missing_or_another_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyPI has a package of that name that is not NVIDIA's."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "apex", raising=False)
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("from pyramid_of_another import session")
    with pytest.raises(UserError, match=r"cannot be imported .*pyramid.* pip uninstall.* adamw$"):
        apex_optimizers(a_config(optimizer="apex-adam"), GPU)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", APEX)
def test_apex_itself(name: Any) -> None:
    missing = "needs NVIDIA Apex: docs/recipe.md says how it is built"
    pytest.importorskip("apex.optimizers", reason=missing, exc_type=ImportError)
    plain = {"apex-sgd": "sgd", "apex-adam": "adamw", "apex-lamb": "lamb"}[name]
    weights = []
    for optimizer in (name, plain):
        torch.manual_seed(0)
        model = nn.Linear(8, 4).to(GPU)
        config = a_config(optimizer=optimizer, wd=0.1, base_lr=0.01)
        built = build_optimizer(model, config)
        for _ in range(3):
            model(torch.ones(2, 8, device=GPU)).square().sum().backward()
            built.step()
            model.zero_grad()
        weights.append(model.weight.detach())
    torch.testing.assert_close(*weights, rtol=1e-3, atol=1e-5)


# ---- fp16 weights with and without fp32 masters, the loss scale, and exact resumes ----


O2 = a_config(precision="O2", arch="tiny", base_lr=0.1, momentum=0.5)
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
        with torch.no_grad():
            parts.model.head.bias.fill_(1.0)
        round_weights(parts.fp16_model, parts.model)
        for _ in range(100):
            parts.scaler.scale(torch.zeros(1))
            for weight in parts.fp16_model.parameters():
                weight.grad = torch.full_like(weight, -8 * 2.0**-10 / 5)
            update(parts, None)
        moved[level] = float(parts.fp16_model.head.bias.detach()[0]) - 1
    assert moved == {"O2": pytest.approx(20 * 2.0**-10, abs=2.0**-10), "O3": 0.0}


def test_a_weight_without_a_gradient_has_no_earlier_one() -> None:
    parts = trainables(O2)
    train(parts, 1)
    assert parts.model.head.weight.grad is not None
    unscale_and_clip(parts, None)
    assert parts.model.head.weight.grad is None


@pytest.mark.parametrize("keep", [None, False])
def test_the_copy_has_the_models_statistics(keep: bool | None) -> None:
    parts = trainables(replace(O2, keep_batchnorm_fp32=keep))
    parts.fp16_model(IMAGES)
    statistics = parts.model.norm.running_mean.clone()
    assert statistics.abs().sum() > 0
    parts.model.norm.running_mean.fill_(0.25)
    parts.fp16_model.eval()(IMAGES)
    assert torch.equal(parts.fp16_model.norm.running_mean.float(), torch.full((4,), 0.25))


@pytest.mark.parametrize(("precision", "keep"), [("fp16", None), ("O2", None), ("O2", False)])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_resume_is_exact(optimizer: Any, precision: Any, keep: bool | None) -> None:
    own = {"optimizer": optimizer, "precision": precision, "keep_batchnorm_fp32": keep}
    config = replace(O2, **own, model_ema=True)
    whole = trainables(config)
    train(whole, 4)
    if precision == "fp16":
        whole.scaler.update(1234.0)
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
    with pytest.raises(UserError, match=r"overflow even at a loss scale of .* has diverged"):
        for _ in range(40):
            step_with(scaler, float("nan"))
    assert scaler.get_scale() == LEAST_SCALE
