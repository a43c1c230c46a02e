"""The rungs in baselines/: equal to DDP step by step where they can be, and able to learn."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torchvision
from launching import SMALL, launch, losses, rarely, read_json, resumed_at, train

pytestmark = [pytest.mark.launch, pytest.mark.timeout(600)]

Trained = Callable[..., Path]


@dataclass(frozen=True)
class Rung:
    """How it is started here, how many workers of DDP train the same, and whether bit by bit."""

    launcher: str = "torchrun"
    ranks: int = 2
    workers: int = 2
    is_exact: bool = True


RUNGS = {
    "data_parallel": Rung("python", ranks=1, workers=1),
    "parameter_averaging": Rung(),  # during its warm-up
    "zero_optimizer": Rung(),
    "fsdp": Rung(is_exact=False),
    "model_parallel": Rung(),
}
OFTEN = ("zero_optimizer", "fsdp")  # what make test tries
FEW = "--max-steps 12 --log-interval 1 --checkpoint-steps 7 --keep-checkpoints 5"


def start(name: str) -> tuple[str, str, int]:
    """Launcher, trainer and ranks of a rung; "ddp": of DDP with two workers."""
    rung = RUNGS.get(name, Rung())
    return rung.launcher, name, rung.ranks


def trained_as(name: str, trained: Trained, arguments: str = FEW) -> Path:
    launcher, engine, ranks = start(name)
    return trained(launcher, engine, arguments, ranks)


def check_losses(one: Path, other: Path, is_exact: bool) -> None:
    """The losses of two runs' steps are equal, or, if that is not exact, but for rounding."""
    assert losses(one) == (losses(other) if is_exact else pytest.approx(losses(other), rel=1e-3))


@pytest.mark.parametrize("name", [name if name in OFTEN else rarely(name) for name in RUNGS])
def test_the_steps_are_those_of_ddp(name: str, trained: Trained) -> None:
    """Which with one worker are those of single_process.py (test_same_training)."""
    rung, mine = RUNGS[name], trained_as(name, trained)
    ddp = trained("torchrun" if rung.workers > 1 else "python", "ddp", FEW, rung.workers)
    check_losses(mine, ddp, rung.is_exact)
    one, other = (read_json(folder / "summary.json") for folder in (mine, ddp))
    # On some processors sharded weights are rounded as whole ones are: then they are equal, too.
    if rung.is_exact:
        assert one["weights_sha256"] == other["weights_sha256"]
    assert one["fingerprint"] == other["fingerprint"]


@pytest.mark.full
def test_a_sharded_optimizer_may_be_another_than_sgd(trained: Trained) -> None:
    adamw = f"{FEW} --optimizer adamw"
    zero, ddp = trained_as("zero_optimizer", trained, adamw), trained_as("ddp", trained, adamw)
    check_losses(zero, ddp, is_exact=True)


LOCAL = f"{FEW} --warmup-epochs 0.1"  # gradients are averaged in six steps, then weights


@pytest.mark.parametrize(
    ("first", "second", "arguments"),
    [
        ("fsdp", "ddp", FEW),
        rarely("ddp", "fsdp", FEW),
        rarely("fsdp", "fsdp", FEW),
        rarely("zero_optimizer", "ddp", FEW),
        rarely("ddp", "zero_optimizer", FEW),
        rarely("ddp", "model_parallel", FEW),
        rarely("parameter_averaging", "parameter_averaging", LOCAL),
    ],
)
def test_one_goes_on_with_the_other_s_checkpoint(
    first: str, second: str, arguments: str, trained: Trained, tmp_path: Path
) -> None:
    whole, folder = trained_as(first, trained, arguments), tmp_path / "run"
    shutil.copytree(whole, folder)
    (folder / "checkpoints" / "step-000000012.pt").unlink()
    launcher, engine, ranks = start(second)
    summary = train(folder, launcher, engine, f"{arguments} --resume auto", ranks)
    assert summary["steps"] == 12
    assert resumed_at(folder) == [7]
    check_losses(folder, whole, is_exact=first == second or "fsdp" not in (first, second))


@pytest.mark.full
def test_weights_that_are_averaged_now_and_then_are_another_training_s(trained: Trained) -> None:
    local, ddp = (
        trained_as("parameter_averaging", trained, LOCAL),
        trained_as("ddp", trained, LOCAL),
    )
    assert losses(local)[:7] == losses(ddp)[:7], (
        "the seventh loss is that of the sixth step's weights"
    )
    assert losses(local)[8] != losses(ddp)[8]


@pytest.mark.parametrize("name", OFTEN)
def test_each_rank_holds_a_part_of_the_optimizer(name: str, trained: Trained) -> None:
    held = read_json(trained_as(name, trained) / "summary.json")["rung"]
    network = torchvision.models.shufflenet_v2_x0_5(num_classes=10)
    everything = 4 * sum(weight.numel() for weight in network.parameters())
    assert sum(held["optimizer_bytes"]) == everything
    assert max(held["optimizer_bytes"]) < 0.6 * everything
    if name == "fsdp":
        assert sum(held["weight_bytes"]) == everything
        assert max(held["weight_bytes"]) < 0.6 * everything
    else:
        assert held["weight_bytes"] == [everything] * 2


@pytest.mark.full
@pytest.mark.parametrize("name", RUNGS)
def test_it_learns_the_digits(name: str, tmp_path: Path) -> None:
    rung = RUNGS[name]
    finished = launch(rung.launcher, name, f"--log-dir {tmp_path} --name run", rung.ranks)
    assert finished.returncode == 0, finished.output
    assert read_json(tmp_path / "run" / "summary.json")["top1"] > 96


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("data_parallel", "runs as one device, the CPU"),
        ("model_parallel", "without GPUs both halves of the network are on the CPU"),
    ],
)
def test_what_wants_gpus_says_that_it_has_none(name: str, message: str, tmp_path: Path) -> None:
    launcher, _, ranks = start(name)
    flags = f"{SMALL} --max-steps 1 --no-cuda --log-dir {tmp_path}"
    finished = launch(launcher, name, flags, ranks)
    assert finished.returncode == 0, finished.output
    assert message in finished.output
