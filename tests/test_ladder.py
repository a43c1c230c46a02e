"""The rungs in baselines/: equal to DDP step by step where they can be, and able to learn."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from launching import launch, losses, read_json

pytestmark = [pytest.mark.launch, pytest.mark.timeout(600)]

Trained = Callable[..., Path]


@dataclass(frozen=True)
class Rung:
    """How a rung is started here, and with how many workers DDP trains the same; None: nobody
    trains the same."""

    launcher: str = "torchrun"
    ranks: int = 2
    as_ddp_with: int | None = 2


RUNGS = {
    "data_parallel": Rung("python", ranks=1, as_ddp_with=1),
}
EQUAL = [name for name, rung in RUNGS.items() if rung.as_ddp_with is not None]


def trained_as(name: str, trained: Trained, arguments: str) -> Path:
    return trained(RUNGS[name].launcher, name, arguments, RUNGS[name].ranks)


@pytest.mark.parametrize("name", EQUAL)
def test_the_steps_are_those_of_ddp(name: str, trained: Trained) -> None:
    """Which with one worker are those of single_process.py (test_same_training)."""
    few, workers = "--max-steps 12", RUNGS[name].as_ddp_with
    rung = trained_as(name, trained, few)
    ddp = trained("torchrun" if workers == 2 else "python", "ddp", few, workers)
    assert losses(rung) == losses(ddp)
    mine, theirs = (read_json(folder / "summary.json") for folder in (rung, ddp))
    assert mine["weights_sha256"] == theirs["weights_sha256"]
    assert mine["fingerprint"] == theirs["fingerprint"]


@pytest.mark.full
@pytest.mark.parametrize("name", RUNGS)
def test_it_learns_the_digits(name: str, tmp_path: Path) -> None:
    rung = RUNGS[name]
    place = f"--log-dir {tmp_path} --name run"
    finished = launch(rung.launcher, name, place, rung.ranks)
    assert finished.returncode == 0, finished.output
    assert read_json(tmp_path / "run" / "summary.json")["top1"] > 96


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--bucket-cap-mb 5", "--bucket-cap-mb 5.0: this script has no such thing"),
        ("--transport mpi", "--transport mpi: this script has no such thing"),
    ],
)
def test_what_a_rung_lacks_is_refused(flags: str, message: str) -> None:
    finished = launch("python", "data_parallel", flags)
    assert finished.returncode != 0
    assert message in finished.output
