"""The phases of a step: cut without gaps, equally on both engines."""

from pathlib import Path
from statistics import median

import pytest
from launching import ENGINES, TRAINERS, launch, rarely, read_lines
from making import CPU

from recipe.record import meter as phases
from recipe.record.meter import PhaseSums, StepClock
from recipe.record.schema import PHASES, Phases

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
    step = clock.seconds(clock.end_step())
    now += 1000
    clock.restart()  # after a checkpoint
    now += 3
    clock.lap("data")
    assert step == {"data": 9, "forward": 2, "backward": 20, "optimizer": 32}
    now += 5
    clock.lap("optimizer")
    following = {"data": 3, "forward": 0, "backward": 0, "optimizer": 5}
    assert clock.seconds(clock.end_step()) == following
    assert clock.laps == []


def a_step(data: float, forward: float, backward: float, optimizer: float) -> dict[str, float]:
    return dict(zip(PHASES, (data, forward, backward, optimizer), strict=True))


def test_means_add_up_to_the_step() -> None:
    sums = PhaseSums()
    assert sums.means() == Phases() and sums.images_per_second is None
    sums.add(a_step(1, 2, 10, 3), images=30)
    sums.add(a_step(3, 2, 14, 3), images=46)
    assert sums.means() == Phases(
        steps=2,
        step_seconds=19,
        data_seconds=2,
        forward_seconds=2,
        backward_seconds=12,
        optimizer_seconds=3,
    )
    assert sums.images_per_second == 2


@pytest.mark.launch
@pytest.mark.parametrize(("launcher", "engine"), [HOROVOD, rarely(*DDP), rarely(*HOROVOD_GLOO)])
def test_a_delay_shows_up_in_its_phase_and_nowhere_else(
    launcher: str, engine: str, tmp_path: Path
) -> None:
    """Each step is slow in another phase, in which it takes longer than the steps that are slow
    elsewhere. Medians, since others use the cores, too."""
    words = f"{TINY} --max-steps 25 --log-dir {tmp_path} --name run"
    launch(launcher, f"tests/slow_phases.py {TRAINERS[engine]}", words, warm=True).checked()
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
