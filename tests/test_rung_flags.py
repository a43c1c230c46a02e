"""Each flag has its effect in each script of baselines/, or is refused, or a warning says that it
has none."""

import importlib.util
import inspect
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import CodeType
from typing import Any, ClassVar

import pytest
from making import a_config, a_world, folder_config, write_images

import baselines
import recipe.loop
import recipe.start
from recipe.data.batches import open_data
from recipe.errors import UserError
from recipe.loop import ENGINES_OWN, Rung
from recipe.settings import config as settings_of
from recipe.settings.config import Config
from recipe.settings.flags import SECTIONS
from recipe.start import Hooks

HAS_TIMM = importlib.util.find_spec("timm") is not None
OF_TIMM = {"drop_path", "trust_coefficient"}  # read of its networks and optimizers alone
NAMES = [
    name
    for section in SECTIONS.values()
    for name in section.__annotations__
    if HAS_TIMM or name not in OF_TIMM
]
ARCH, OPTIMIZER = ("timm:resnet10t", "lars") if HAS_TIMM else ("resnet18", "sgd")
SCRIPTS = {path.stem for path in Path(baselines.__file__).parent.glob("*.py")}
RUNGS = sorted(SCRIPTS - {"__init__", "mpi_allreduce"})
Readers = dict[str, set[CodeType]]  # by flag: the functions that ask for it by name


class Noted(Config):
    """Settings that note who asks for them."""

    readers: ClassVar[Readers] = {}

    def __getattribute__(self, name: str) -> Any:
        code = sys._getframe(1).f_code
        if name in NAMES and name in code.co_names:  # no loop over all settings
            Noted.readers[name].add(code)
        return super().__getattribute__(name)


class Alone(Rung):
    """A rung that leaves all as it is in one process, and lacks nothing."""

    name, launcher, has_group, has = "alone", "none", False, ENGINES_OWN


# Between them they ask for all that is asked for where other flags are given.
TRAININGS: list[dict[str, Any]] = [
    {
        "arch": "timm:resnet10t" if HAS_TIMM else "resnet18",
        "optimizer": "adamw",
        "loss": "bce",
        "mixup_alpha": 0.1,
    },
    {
        "optimizer": OPTIMIZER,
        "first_crop_size": 32,
        "resize_epochs": (0, 1),
        "lr_scheduler": "step",
    },
    {"lr_scheduler": "cosine", "precision": "bf16"},
    {"warmup_epochs": 1, "precision": "O2"},
    {"name": "kept", "model_ema": True, "checkpoint_steps": 1},
    {
        "name": "kept",
        "model_ema": True,
        "resume": "auto",
        "max_steps": 3,
        "allow_changed_data": True,
    },
    {"name": "other", "weights": "kept/checkpoints/best.pt", "new_head": True},
]


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> Readers:
    """Who asks for which flag while a rung trains."""
    root = tmp_path_factory.mktemp("images")
    write_images(root / "train", 4)
    write_images(root / "val", 2)
    common = {"arch": "resnet18", "epochs": 2, "max_steps": 2, "warmup_epochs": 0}
    common |= dict.fromkeys(("train_crop_size", "val_resize_size", "val_crop_size"), 64)
    Noted.readers = defaultdict(set)
    for flags in TRAININGS:
        if "resume" in flags:
            (root / "val" / "a" / "0.png").unlink()
        if "weights" in flags:
            flags["weights"] = str(root / flags["weights"])
        config = Noted(**vars(folder_config(root, log_dir=str(root), **common | flags)))
        Alone.main(config, a_world(), Hooks())
    open_data(replace(config, data="synthetic", train_dir=None))
    settings_of._resolve(config)
    return Noted.readers


def methods(kind: type) -> dict[str, CodeType]:
    return {name: value.__code__ for name, value in vars(kind).items() if inspect.isfunction(value)}


def is_read(name: str, rung: type[Rung], readers: Readers) -> bool:
    """Whether a rung that trains asks for this flag: at its start, in what it has of its own, or
    where one that leaves all as it is does, but for what it has of its own instead."""
    own, base = methods(rung), methods(Rung)
    instead = {base[one] for one in own if one in base and "super" not in own[one].co_names}
    start = recipe.start.start.__code__
    others = start, *own.values()
    return bool(readers[name] - instead) or any(name in one.co_names for one in others)


def given(name: str) -> Config:
    """Settings of which this one is another than usual."""
    is_number = type(getattr(a_config(), name)) in (int, float)
    return replace(a_config(), **{name: 7 if is_number else "another"})


class Went(Exception):
    """It was not refused."""


def went(*_: Any) -> None:
    raise Went


@pytest.mark.parametrize("script", RUNGS)
def test_each_flag_has_its_effect_or_is_refused(
    script: str, readers: Readers, monkeypatch: pytest.MonkeyPatch
) -> None:
    rung = importlib.import_module(f"baselines.{script}").main.__self__
    monkeypatch.setattr(recipe.loop, "choose_device", went)
    world = a_world(0, 4, launcher=rung.launcher or "mpirun")
    ignored = []
    for name in NAMES:
        with pytest.raises((Went, UserError)) as found:
            rung(given(name), world)
        if found.type is Went and not is_read(name, rung, readers):
            ignored.append(name)
    assert ignored == []


@pytest.mark.parametrize("script", sorted({*RUNGS} - {"mpi4py_train"}))  # which asks MPI first
def test_the_session_gets_the_ranks_that_train(script: str) -> None:
    """Of those that serve, or hold a part of a driver's network, it knows nothing."""
    kind = importlib.import_module(f"baselines.{script}").main.__self__
    micro_batches = 4 if script == "pipeline" else 1
    config = a_config(cuda=False, batches_per_allreduce=micro_batches)
    rung = kind(config, a_world(0, 4, launcher=kind.launcher or "mpirun"))
    assert rung.ranks.world == rung.world


@pytest.mark.parametrize("script", ["fsdp", "pipeline"])
def test_no_check_of_weights_may_be_asked_for_where_there_is_none(
    script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rung = importlib.import_module(f"baselines.{script}").main.__self__
    monkeypatch.setattr(recipe.loop, "choose_device", went)
    for steps, ends in ((0, Went), (7, UserError)):
        with pytest.raises(ends):
            rung(replace(a_config(), weight_check_steps=steps), a_world(0, 2, launcher="torchrun"))
