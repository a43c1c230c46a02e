"""What the scripts in baselines/ refuse before they begin."""

from contextlib import nullcontext
from typing import Any

import pytest
from making import a_config, a_world

from baselines import single_process
from baselines.mpi4py_train import PlainMPI
from recipe.errors import UserError
from recipe.loop import Rung


def a_rung(launcher: str, lacks: tuple[str, ...] = (), has: tuple[str, ...] = ()) -> type[Rung]:
    return type("ARung", (Rung,), {"launcher": launcher, "lacks": lacks, "has": has})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"bucket_cap_mb": 5.0}, "--bucket-cap-mb 5.0"),  # no rung has it
        ({"transport": "gloo"}, "--transport gloo"),
        ({"precision": "O2"}, "--precision O2"),
        ({"precision": "fp16"}, "--precision fp16"),  # this one lacks it
        ({"model_ema": True}, "--model-ema True"),
        ({"precision": "bf16"}, None),  # another value than the one that it lacks
        ({"profile_steps": 4}, None),  # it has what others lack
    ],
)
def test_what_a_rung_lacks_is_refused(given: dict[str, Any], message: str | None) -> None:
    refused = pytest.raises(UserError, match=f"^{message}: not supported by this script")
    with refused if message else nullcontext():
        a_rung("none", ("precision fp16", "model_ema"), ("profile_steps",))(
            a_config(**given), a_world()
        )


@pytest.mark.parametrize(
    "given",
    [
        {"bucket_cap_mb": 5.0},
        {"first_bucket_mb": 5.0},
        {"gradient_as_bucket_view": False},
        {"static_graph": True},
        {"num_groups": 2},
        {"wire_format": "fp16"},
    ],
)
def test_mpi_without_an_engine_has_no_buckets(given: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="not supported by this script"):
        PlainMPI(a_config(**given), a_world(0, 2, launcher="mpirun"))


@pytest.mark.parametrize(
    "given",
    [
        {"weights": "w.pt"},
        {"resume": "auto"},
        {"evaluate": True},
        {"desired_acc": 50.0},
        {"model_ema": True},
        {"checkpoint_steps": 5},
        {"bad_images": "replace"},
        {"tensor_steps": 2},
    ],
)
def test_what_a_single_process_would_leave_out_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"^--[a-z-]+ .*: not supported by this script; remove it"):
        single_process.main(a_config(**given), a_world())


@pytest.mark.parametrize(
    ("launcher", "ranks", "message"),
    [
        ("torchrun", 1, "was started by python: start it with torchrun"),
        ("none", 2, "was started by torchrun: start it with python"),
    ],
)
def test_a_rung_that_another_launcher_started_is_refused(
    launcher: str, ranks: int, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        a_rung(launcher)(a_config(), a_world(0, ranks))
