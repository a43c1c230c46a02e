"""Optimizers beside SGD: their settings, their origin, and what is said where they are missing."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from making import TinyNet, a_config
from torch import nn

from recipe.data.batches import Data
from recipe.errors import UserError
from recipe.record.fingerprint import weights_sha256
from recipe.settings.config import check
from recipe.training.model import (
    build_model,
    build_optimizer,
    seed_step,
)
from recipe.training.optimizers import apex_optimizers, kind_and_settings

WITHOUT_TIMM = "timm is not installed: pip install -e '.[timm]'"
needs_timm = pytest.mark.skipif(importlib.util.find_spec("timm") is None, reason=WITHOUT_TIMM)
OPTIMIZERS = [
    "sgd", "adamw", *(pytest.param(name, marks=needs_timm) for name in ("lars", "lamb"))
]  # fmt: skip
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
def test_lars_scales_what_decays_by_its_trust_ratio() -> None:
    config = a_config(
        optimizer="lars", momentum=0.0, wd=0.1, norm_weight_decay=0.0, bias_weight_decay=0.0,
        trust_coefficient=0.01,
    )  # fmt: skip
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
    kind, settings = kind_and_settings(config, GPU)
    made: Any = kind([nn.Parameter(torch.ones(1))], lr=0.5, **settings)
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

    monkeypatch.setattr("recipe.training.model.kind_and_settings", lambda *_: (refuse, {}))
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
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", APEX)
def test_apex_itself(name: Any) -> None:
    missing = "NVIDIA Apex is missing: docs/recipe.md says how it is built"
    pytest.importorskip("apex.optimizers", reason=missing, exc_type=ImportError)
    plain = {"apex-sgd": "sgd", "apex-adam": "adamw", "apex-lamb": "lamb"}[name]
    if plain == "lamb":
        pytest.importorskip("timm", reason=WITHOUT_TIMM)
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
