"""The phases of a step: cut without gaps, equally on both engines, communication by ablation."""

import sys
from dataclasses import asdict
from pathlib import Path
from statistics import median

import pytest
from launching import ENGINES, LAUNCHERS, TRAINERS, rarely, read_json, read_lines, run
from making import CPU, a_config

from recipe.record.meter import PhaseSums
from recipe.record.schema import Phases
from recipe.training import phases
from recipe.training.phases import (
    PHASES,
    StepClock,
    begins_stretch,
    exchanges_gradients,
)

DDP, HOROVOD, HOROVOD_GLOO = ENGINES
TINY = (
    "--arch shufflenet_v2_x0_5 --train-crop-size 16 --val-crop-size 16 --val-resize-size 16 "
    "--batch-size 4 --epochs 1 --threads 1 --keep-checkpoints 0"
)
DELAY_SECONDS = 0.2  # as in slow_phases.py


def test_phases_leave_no_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(phases.time, "perf_counter", lambda: now)
    clock = StepClock(CPU)
    told = [("data", 1), ("forward", 2), ("backward", 4), ("data", 8), ("backward", 16)]
    for phase, seconds in [*told, ("optimizer", 32)]:
        now += seconds
        clock.lap(phase)
    clock.end_step()
    now += 1000
    clock.restart()  # after a checkpoint
    now += 3
    clock.lap("data")
    (step,) = map(clock.seconds, clock.take())
    assert step == {"data": 9, "forward": 2, "backward": 20, "optimizer": 32}
    now += 5
    clock.lap("optimizer")
    clock.end_step()
    assert [*map(clock.seconds, clock.take())] == [
        {"data": 3, "forward": 0, "backward": 0, "optimizer": 5}
    ]
    assert clock.take() == []


def test_stretches_alternate() -> None:
    config = a_config(ablation_steps=3)
    assert [exchanges_gradients(config, step) for step in range(7)] == [True] * 3 + [False] * 3 + [
        True
    ]
    assert [step for step in range(10) if begins_stretch(config, step)] == [0, 3, 6, 9]
    assert all(exchanges_gradients(a_config(), step) for step in range(10))
    assert not any(begins_stretch(a_config(), step) for step in range(10))


def a_step(data: float, forward: float, backward: float, optimizer: float) -> dict[str, float]:
    return dict(zip(PHASES, (data, forward, backward, optimizer), strict=True))


def test_exposed_communication_is_what_the_exchange_adds_to_backward() -> None:
    sums = PhaseSums()
    assert sums.means() == Phases()
    sums.add(a_step(1, 2, 10, 3), exchanged=True)
    assert asdict(sums.means()) == {
        "steps": 1, "step_seconds": 16, "data_seconds": 1, "forward_seconds": 2,
        "backward_seconds": 10, "exposed_communication_seconds": None, "optimizer_seconds": 3,
    }  # fmt: skip
    sums.add(a_step(3, 2, 14, 3), exchanged=True)
    sums.add(a_step(50, 50, 7, 0), exchanged=False)
    assert asdict(sums.means()) == {
        "steps": 2, "step_seconds": 19, "data_seconds": 2, "forward_seconds": 2,
        "backward_seconds": 7, "exposed_communication_seconds": 5, "optimizer_seconds": 3,
    }  # fmt: skip


def train_slowly(where: str, launcher: str, engine: str, arguments: str, folder: Path) -> None:
    command = LAUNCHERS[launcher].format(
        python=sys.executable, ranks=2, trainer=f"tests/slow_phases.py {where} {TRAINERS[engine]}"
    )
    finished = run(
        [*command.split(), *TINY.split(), *arguments.split(),
         "--log-dir", str(folder.parent), "--name", folder.name],
    )  # fmt: skip
    assert finished.returncode == 0, finished.output


@pytest.mark.launch
@pytest.mark.parametrize(("launcher", "engine"), [HOROVOD, rarely(*DDP), rarely(*HOROVOD_GLOO)])
def test_a_delay_shows_up_in_its_phase_and_nowhere_else(
    launcher: str, engine: str, tmp_path: Path
) -> None:
    """Each step is slow in another phase, in which it takes longer than the steps that are slow
    elsewhere. Medians, since others use the cores, too."""
    train_slowly("cycle", launcher, engine, "--max-steps 35", tmp_path / "run")
    steps = read_lines(tmp_path / "run", "step")[5:]
    slow_in = ("data", "forward", "backward", "backward", "optimizer")
    for phase in PHASES:
        seconds = [
            median(line[f"{phase}_seconds"] for line in steps if (line["step"] - 1) % 5 == kind)
            for kind in range(5)
        ]
        slow = [value for value, place in zip(seconds, slow_in, strict=True) if place == phase]
        others = [value for value, place in zip(seconds, slow_in, strict=True) if place != phase]
        assert min(slow) >= DELAY_SECONDS, (phase, seconds)
        assert max(others) < min(slow) - DELAY_SECONDS / 2, (phase, seconds)
    for line in steps:
        total = sum(line[f"{phase}_seconds"] for phase in PHASES)
        assert total == pytest.approx(line["seconds"], rel=1e-9)


@pytest.mark.launch
@pytest.mark.parametrize(("launcher", "engine"), [DDP, rarely(*HOROVOD), rarely(*HOROVOD_GLOO)])
def test_a_slow_exchange_is_exposed_communication(
    launcher: str, engine: str, tmp_path: Path
) -> None:
    arguments = "--max-steps 29 --ablation-steps 4"
    train_slowly("exchange", launcher, engine, arguments, tmp_path / "run")
    lines = read_lines(tmp_path / "run", "step")
    assert [line["exchanged"] for line in lines[:9]] == [True] * 4 + [False] * 4 + [True]
    summary = read_json(tmp_path / "run" / "summary.json")
    assert len(summary["ranks"]) == 2
    for told in [summary["phases"], *summary["ranks"]]:
        assert told["steps"] == 9  # of steps 9-12, 17-20 and 25-28, without the first of each four
        exposed = told["exposed_communication_seconds"]
        assert exposed > DELAY_SECONDS / 2
        assert all(told[f"{phase}_seconds"] < exposed for phase in PHASES)
        parts = sum(told[f"{phase}_seconds"] for phase in PHASES) + exposed
        assert parts == pytest.approx(told["step_seconds"], rel=0.02)
