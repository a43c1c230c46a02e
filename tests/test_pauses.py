"""What may keep a rank, or rank 0, from the next batch for long is announced to the watch before it
begins, which then waits longer than a minute."""

import math
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from making import CPU, TinyNet, a_config, a_world

from recipe import session, watch
from recipe.ranks import Ranks
from recipe.record import probes, resume
from recipe.record.probes import StepProfiler
from recipe.session import Session
from recipe.training.metrics import evaluate


class Slow(Exception):
    """It has begun to take long."""


@pytest.fixture
def take_long(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """What takes long: to begin with, batches have come as they usually do."""
    monkeypatch.setattr(watch, "_signs_of_life", signs := deque[float](maxlen=watch.BATCHES + 1))
    monkeypatch.setattr(watch, "_paused_at", -math.inf)
    patience: list[float] = []

    def begin(*_: Any) -> None:
        patience.append(watch._patience_s(list(signs), None))
        raise Slow

    usual_batches()
    assert watch._patience_s(list(signs), None) == watch.LEAST_S
    yield begin
    assert patience == [watch.IRREGULAR_S]


def usual_batches() -> None:
    for _ in range(watch.BATCHES + 1):
        watch.heartbeat()


def at_the_end_of_a_step(bad_step: Any = None, **methods: Any) -> None:
    """All that follows a step with which a checkpoint is due."""
    it = mock.Mock(
        spec=Session, config=a_config(), progress=SimpleNamespace(samples_seen=4), stop=8
    )
    it.count_step.return_value, it.poll_stop_and_save.return_value = False, (False, True)
    it.write_steps.return_value = bad_step
    it.roll_back = lambda *words: Session.roll_back(it, *words)
    Session.end_step(it, mock.Mock(**methods), torch.zeros(4), 0.1)


def test_a_rollback(take_long: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "finish_checkpoint", take_long)
    with pytest.raises(Slow):
        at_the_end_of_a_step(bad_step=mock.Mock())


def test_what_ranks_hold_is_gathered(take_long: Callable[..., None]) -> None:
    """Of a rung, and before its checkpoint."""
    with pytest.raises(Slow):
        at_the_end_of_a_step(whole=take_long)


@pytest.mark.parametrize("part", ["start", "stop"])
def test_a_profile(
    part: str, take_long: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = mock.Mock()
    getattr(profile, part).side_effect = take_long
    monkeypatch.setattr(probes.torch.profiler, "profile", lambda **_: profile)
    timeline = "engine", mock.Mock(), mock.Mock()
    profiler = StepProfiler(a_config(profile_steps=1), a_world(), tmp_path, 0, TinyNet(), timeline)
    with pytest.raises(Slow):
        for step in range(10):
            usual_batches()
            profiler.end_step(step)


def test_compiling_for_the_last_batch_of_an_evaluation(take_long: Callable[..., None]) -> None:
    batch = torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)
    network = mock.Mock()
    network.side_effect = lambda images: (
        torch.zeros(2, 3) if network.call_count < 30 else take_long()
    )
    network.eval.return_value = network
    with pytest.raises(Slow):
        evaluate(network, [batch] * 30, a_config(compile=True), CPU)


def test_a_checkpoint_is_read_in_pieces(
    take_long: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path := tmp_path / "checkpoint").write_bytes(bytes(100))
    monkeypatch.setattr(resume, "PIECE_BYTES", 2)
    pieces = []

    def broadcast(values: torch.Tensor) -> torch.Tensor:
        pieces.append(values)
        watch.heartbeat()
        return values if len(pieces) < 40 else take_long()  # type: ignore[func-returns-value]

    with pytest.raises(Slow):
        resume.load_on_all_ranks(path, Ranks(a_world(), from_first=broadcast))


def test_ranks_wait_for_a_slow_disk_while_that_is_announced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the checkpoint, and not several batches later."""
    calls = mock.Mock()
    parts = ("finish_checkpoint", "align_batch_norm", "check_same_weights", "keep_checkpoint")
    for name in parts:
        monkeypatch.setattr(session, name, getattr(calls, name))
    Session.keep_checkpoint(mock.Mock(), mock.Mock())
    assert [name for name, *_ in calls.mock_calls] == [*parts]
