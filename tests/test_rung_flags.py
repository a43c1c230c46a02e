"""Each flag has its effect in each script of baselines/, or is refused, or a warning says that it
has none."""

import ast
import importlib
import inspect
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from making import a_config, a_world

import baselines
import recipe.loop
from recipe.errors import UserError
from recipe.loop import Rung
from recipe.settings.config import Config
from recipe.settings.flags import SECTIONS

NAMES = [name for section in SECTIONS.values() for name in section.__annotations__]
SCRIPTS = {path.stem for path in Path(baselines.__file__).parent.glob("*.py")}
RUNGS = sorted(SCRIPTS - {"__init__", "mpi_allreduce"})


def flags_in(code: ast.AST) -> set[str]:
    """The flags that are asked for here by name: config.NAME, or self.NAME in Config itself."""
    asked = (node for node in ast.walk(code) if isinstance(node, ast.Attribute))
    owners = ("config", "self.config", "rung.config", "self")
    return {node.attr for node in asked if ast.unparse(node.value) in owners} & set(NAMES)


def functions_in(file: Path) -> dict[str, set[str]]:
    """The flags that the functions of each name in a file ask for."""
    found = defaultdict[str, set[str]](set)
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef):
            found[node.name] |= flags_in(node)
    return found


# By flag: the functions of the recipe that ask for it. What only checks or describes flags does not
# count, nor what rungs do not have.
NOT_FOR_RUNGS = ("fingerprint", "other_trainers", "probes", "wire_trial")
READERS = {name: set[str]() for name in NAMES}
for file in Path(recipe.loop.__file__).parent.rglob("*.py"):
    for function, asked in functions_in(file).items():
        if file.stem not in NOT_FOR_RUNGS and (file.stem != "config" or function == "_resolve"):
            for name in asked:
                READERS[name].add(f"{file.stem}.{function}")


def is_read(name: str, rung: type[Rung]) -> bool:
    """Whether a rung that trains asks for this flag: in what it has of its own, or where one that
    leaves all as it is does, but for what it has of its own instead."""
    own = functions_in(Path(inspect.getfile(rung)))
    methods = {method for method in own if method in vars(rung) and method in vars(Rung)}
    instead = {
        method for method in methods if "super()" not in inspect.getsource(getattr(rung, method))
    }
    others = READERS[name] - {f"loop.{method}" for method in instead}
    return bool(others) or any(name in asked for asked in own.values())


def given(name: str) -> Config:
    """Settings of which this one is another than usual."""
    is_number = type(getattr(a_config(), name)) in (int, float)
    return replace(a_config(), **{name: 7 if is_number else "another"})


class Went(Exception):
    """It was not refused."""


def went(*_: Any) -> None:
    raise Went


def rung_of(script: str) -> type[Rung]:
    return importlib.import_module(f"baselines.{script}").main.__self__


@pytest.mark.parametrize("script", RUNGS)
def test_a_flag_that_nobody_asks_for_is_found(script: str) -> None:
    rung = rung_of(script)
    assert not is_read("num_groups", rung)  # Horovod's alone
    assert not is_read("tensor_steps", rung)  # of the engines' probes
    assert is_read("arch", rung)
    # Those that step in their own way lack what the common step asks for.
    own_steps = ("ddp_with_rpc", "parameter_server", "rpc_pipeline")
    assert is_read("clip_grad_norm", rung) == (script not in own_steps)


@pytest.mark.parametrize("script", RUNGS)
def test_each_flag_has_its_effect_or_is_refused(
    script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rung = rung_of(script)
    monkeypatch.setattr(recipe.loop, "choose_device", went)
    world = a_world(0, 4, launcher=rung.launcher or "mpirun")
    ignored = []
    for name in NAMES:
        with pytest.raises((Went, UserError)) as found:
            rung(given(name), world)
        if found.type is Went and not is_read(name, rung):
            ignored.append(name)
    assert ignored == []


@pytest.mark.parametrize("script", sorted({*RUNGS} - {"mpi4py_train"}))  # which asks MPI first
def test_the_session_gets_the_ranks_that_train(script: str) -> None:
    """Of those that serve, or hold a part of a driver's network, it knows nothing."""
    kind = rung_of(script)
    micro_batches = 4 if script == "pipeline" else 1
    config = a_config(cuda=False, batches_per_allreduce=micro_batches)
    rung = kind(config, a_world(0, 4, launcher=kind.launcher or "mpirun"))
    assert rung.ranks.world == rung.world


@pytest.mark.parametrize("script", ["fsdp", "pipeline"])
def test_no_check_of_weights_may_be_asked_for_where_there_is_none(
    script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe.loop, "choose_device", went)
    for steps, ends in ((0, Went), (7, UserError)):
        with pytest.raises(ends):
            rung_of(script)(
                replace(a_config(), weight_check_steps=steps), a_world(0, 2, launcher="torchrun")
            )
