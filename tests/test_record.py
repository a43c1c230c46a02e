"""The run folder: what is written, and how a resumed run goes on in it."""

import json
import math
import re
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from launching import read_json
from making import CPU, TinyNet, a_config, a_world, files_in
from records import a_summary, an_environment
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from recipe import session as sessions
from recipe import watch
from recipe.data.batches import BatchReader, Data
from recipe.data.order import samples_per_step
from recipe.errors import EXIT_SAVED, LostPeer, UserError
from recipe.files import partial_name
from recipe.marks import Marks
from recipe.ranks import Ranks
from recipe.record import checkpoint
from recipe.record import console as console_module
from recipe.record import meter as measuring
from recipe.record import recorder as record
from recipe.record.console import LINE_S
from recipe.record.kept_state import KeptState
from recipe.record.meter import StepMeter
from recipe.record.probes import StepProfiler, write_trace
from recipe.record.recorder import Recorder
from recipe.record.resume import steps_left_out, take_over
from recipe.record.schema import WARM_UP_STEPS
from recipe.session import LOOK_SECONDS, HostShare, Session
from recipe.settings.config import Config
from recipe.training.metrics import Evaluation
from recipe.training.model import build_optimizer, build_scaler
from recipe.training.state import Progress, Trainables
from recipe.world import World

NUM_TRAIN = 20  # five steps an epoch
DATA = Data(None, None, num_train=NUM_TRAIN, num_val=8, num_classes=10)
CONFIG = a_config(name="run", epochs=3, batch_size=4)
AUTO = replace(CONFIG, resume="auto")
ENVIRONMENT = an_environment(version="2", world_size=1, hosts=["here"], device_name="a CPU")
SUMMARY = a_summary(top1=50.0, loss=0.5, images_per_second=8.0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stands in for time.perf_counter: goes on only when told."""
    it = SimpleNamespace(now=100.0)
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: it.now)
    return it


class Training(Session):
    """A session, without training and other ranks: each step takes half a second."""

    def __init__(
        self,
        folder: Path,
        clock: SimpleNamespace,
        progress: Progress | None = None,
        config: Config = CONFIG,
        world: World | None = None,
        parts: Trainables | None = None,
        kept_state: KeptState | None = None,
    ) -> None:
        self.clock, self.progress, self.config = clock, replace(progress or Progress()), config
        world = world or a_world()
        self.ranks, self.folder, self.kept_state = Ranks(world), folder, kept_state
        self.parts = parts or Trainables(*[mock.Mock()] * 4)
        self.share, self.environment, self.lr_scale = HostShare(1, 0, ()), ENVIRONMENT, 1.0
        self.is_complete = self.is_stopped = self.lacks_evaluation = False
        self.reader = BatchReader(config, DATA, world, CPU, workers=0)
        self.reader.begin(self.progress.step, self.progress.samples_seen)
        if world.is_first:
            take_over(folder, config, self.progress)
        self._open_record()
        self.meter = StepMeter(config, world, CPU, DATA, self.progress)
        self.begun = self.training()
        self.begun.__enter__()

    def steps(
        self, count: int, loss: float = 2.0, seconds: float = 0.5, write: bool = True
    ) -> None:
        for _ in range(count):
            self.clock.now += seconds / 4
            self.meter.lap("data")
            self.clock.now += 3 * seconds / 4
            self.meter.lap("optimizer")
            epoch = self.progress.samples_seen // NUM_TRAIN
            # A loss that is another in each step, so that a lost or repeated one would show.
            sums = torch.tensor([loss + self.progress.step + 1, 0.25, 0.5, 1.0]).double()
            sums *= samples_per_step(self.config, self.ranks.world, epoch)
            epoch_ended = self.count_step(sums, 0.1, skipped_steps=0)
            if write:
                self.write_steps(now=True)
            if epoch_ended:
                self.recorder.write_epoch(self.epoch)
                self.evaluate(self.epoch)

    def evaluate(self, epoch: int) -> None:
        self.clock.now += 2.0
        self.progress.total_seconds = self.meter.total_seconds
        is_repeated = self.progress.step == self.reader.first_step
        self.recorder.write_evaluations(epoch, [EVALUATION], is_repeated)
        self.meter.restart()


def test_where_a_rank_is_that_hangs() -> None:
    meter = StepMeter(CONFIG, a_world(), CPU, DATA, Progress(step=7))
    assert watch.whereabouts() == "after step 7"
    meter.lap("forward")
    assert watch.whereabouts() == "in step 8, after forward"


def test_throughput_by_wall_clock(clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies between the steps counts in it, and in no phase; an evaluation in neither."""
    monkeypatch.setattr(measuring.time, "monotonic", lambda: clock.now)
    meter = StepMeter(CONFIG, a_world(), CPU, DATA, progress := Progress())
    meter.start()
    for steps, expected in ((WARM_UP_STEPS, None), (2, 8 / 10)):
        for _ in range(steps):
            clock.now += 3
            meter.lap("backward")
            progress.step += 1
            progress.samples_seen += 4
            meter.end_step(torch.tensor([0, 0, 0, 4.0]).double(), 0.1)
            clock.now += 1  # after the warm-up's last step, too
            meter.restart()
        meter.take_steps(Ranks(a_world()), now=True)
        clock.now += 1  # after the last of them, as for a checkpoint: counts if others follow
        meter.energy.stop()
        assert meter.wall_images_per_second == expected
        clock.now += 1000
        meter.restart()
    assert meter.phases.images_per_second == 8 / 6


EVALUATION = Evaluation("model", {"loss": 1.5, "top1": 50.0, "top5": 75.0}, 8, seconds=2.0)


def lines(folder: Path, kind: str | None = None, field: str | None = None) -> list[Any]:
    """What a run has recorded; of a kind only, and one field of it."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line[field] if field else line for line in found if kind in (None, line["kind"])]


def test_steps_that_were_left_out_are_said(
    tmp_path: Path, clock: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    resumed = Progress(step=7, samples_seen=28, skipped_steps=2)
    for loss_scale, then in ((None, "halved"), (128.0, "one below 128")):
        config = replace(CONFIG, precision="fp16", loss_scale=loss_scale)
        recorder = Training(tmp_path / then, clock, resumed, config).recorder
        capsys.readouterr()
        for skipped in (2, 3, 3):
            recorder.progress.step += 1
            recorder.progress.skipped_steps = skipped
            recorder.end_step()
        assert re.fullmatch(f"step 9 changed no weight: .*{then}\n", capsys.readouterr().out)


def test_a_whole_run(
    tmp_path: Path, clock: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "runs" / "run"
    a_whole_run(folder, clock)
    written = {name: read_json(folder / f"{name}.json") for name in ("environment", "summary")}
    assert written == {"environment": asdict(ENVIRONMENT), "summary": asdict(SUMMARY)}
    assert read_json(folder / "config.json")["batch_size"] == 4
    kinds = ["event"] + (["step"] * 5 + ["epoch", "eval"]) * 3 + ["event"]
    assert lines(folder, field="kind") == kinds
    assert lines(folder, "event", "name") == ["start", "end"]
    assert lines(folder, "step")[6] == {
        "kind": "step",
        "epoch": 1,
        "step": 7,
        "samples_seen": 28,
        "loss": 9.0,
        "top1": 25.0,
        "top5": 50.0,
        "learning_rate": 0.1,
        "seconds": 0.5,
        "data_seconds": 0.125,
        "forward_seconds": 0.0,
        "backward_seconds": 0.0,
        "optimizer_seconds": 0.375,
        "images_per_second": 8.0,
    }
    epoch = {
        "epoch": 1,
        "step": 10,
        "samples_seen": 40,
        "loss": pytest.approx(2.0 + (6 + 7 + 8 + 9 + 10) / 5),
        "seconds": 2.5,
        "images_per_second": 8.0,
    }
    assert lines(folder, "epoch")[1].items() >= epoch.items()
    evaluation = {
        "loss": 1.5,
        "top1": 50.0,
        "top5": 75.0,
        "num_images": 8,
        "weights": "model",
        "train_seconds_so_far": 10 * 0.5 + 2 * 2.0,  # evaluation is on the clock
    }
    assert lines(folder, "eval")[1].items() >= evaluation.items()
    out = capsys.readouterr().out
    said = out.splitlines()
    assert len(said) == 3 + 3 * 2 + 3 and "ddp 2 over Gloo, 1 worker(s)" in said[0]
    assert "epoch   2/3  val    loss 1.5000  top-1  50.00 %" in out
    assert said[-3:] == [
        "best top-1 50.00 %, of epoch 1; 0.2 min, 8.0 images/s",
        f"run folder {folder}; curves: tensorboard --logdir {folder}/tensorboard",
        "to train longer: the same command, --name run --resume auto and more --epochs",
    ]


def test_what_a_folder_holds_besides_images_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = replace(DATA, val=mock.Mock(root="val", left_out="left out: 1 file(s)"))
    Recorder(CONFIG, a_world(), data, tmp_path, Progress(), ENVIRONMENT)
    assert "\nval: left out: 1 file(s)\n" in capsys.readouterr().out


def test_a_gpu_s_steps_are_written_an_interval_later(
    tmp_path: Path, clock: SimpleNamespace
) -> None:
    """So that the host does not wait for what the GPU has just been given; but none is lost. The
    first step is written at once, since what the first write costs belongs to the start."""
    session = Training(tmp_path / "run", clock, config=replace(CONFIG, log_interval=2))
    session.meter.reads_later = True
    written = []
    for _ in range(7):
        session.steps(1, write=False)
        session.write_steps(now=False)
        written.append(len(lines(tmp_path / "run", "step")))
    assert written == [1, 1, 1, 2, 2, 4, 4]  # the first step at once
    session.write_steps(now=True)
    assert [line["step"] for line in lines(tmp_path / "run", "step")] == [1, 2, 3, 4, 5, 6, 7]
    session.steps(1, loss=math.nan, write=False)  # is found as late
    session.write_steps(now=False)
    session.steps(2, write=False)
    with pytest.raises(UserError, match="the loss is nan at step 8 "):
        session.write_steps(now=False)


@pytest.mark.parametrize("progress", [Progress(), Progress(step=7, samples_seen=28)])
@pytest.mark.parametrize(("passes", "size"), [(1, 1), (3, 2)])
def test_throughput_without_warm_up_and_evaluation(
    progress: Progress, passes: int, size: int, tmp_path: Path, clock: SimpleNamespace
) -> None:
    """After a start and after a resume; over all ranks, and all batches of a step."""
    config, world = replace(CONFIG, batches_per_allreduce=passes), a_world(0, size)
    session = Training(tmp_path / "run", clock, progress, config, world)
    session.steps(WARM_UP_STEPS, seconds=100.0)
    assert session.meter.phases.images_per_second is None
    session.steps(6)  # with an evaluation of 2 s among them
    assert session.meter.phases.images_per_second == 8.0 * passes * size
    assert session.meter.made.total_seconds == WARM_UP_STEPS * 100 + 6 * 0.5


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("progress", "steps", "remedy"),
    [
        (Progress(), 2, "--base-lr"),
        (Progress(step=7, samples_seen=28), 0, "bad; use an earlier"),
        (Progress(step=7, samples_seen=28), 1, "--base-lr"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_loss_that_is_not_finite(
    loss: float,
    progress: Progress,
    steps: int,
    remedy: str,
    rank: int,
    tmp_path: Path,
    clock: SimpleNamespace,
) -> None:
    """Every rank stops; and bad weights are told from a divergence."""
    session = Training(tmp_path / "run", clock, progress, AUTO, a_world(rank, 2))
    session.steps(steps)
    place = f"at step {progress.step + steps + 1} "
    with pytest.raises(UserError, match=rf"the loss is -?(nan|inf) {place}.*{remedy}"):
        session.steps(1, loss=loss)
    assert rank > 0 or len(lines(tmp_path / "run", "step")) == steps


@pytest.mark.parametrize(
    ("step", "evaluate", "remedy"),
    [(0, False, "training has diverged"), (7, False, "began with"), (0, True, "began with")],
)
def test_an_evaluation_that_is_not_finite(
    step: int, evaluate: bool, remedy: str, tmp_path: Path, clock: SimpleNamespace, monkeypatch: Any
) -> None:
    """The last step may have broken the weights, after its own loss."""
    figures = {"loss": math.nan, "top1": 0.0, "top5": 0.0}
    broken = [replace(EVALUATION, figures=figures)]
    monkeypatch.setattr(sessions, "validate", lambda *_: broken)
    session = Training(tmp_path, clock, Progress(step), replace(CONFIG, evaluate=evaluate))
    words = f"the loss is nan in the validation after step {step}: .*{remedy}"
    with pytest.raises(UserError, match=words):
        session.validate()
    last = lines(tmp_path)[-1]
    assert (last["name"], last["step"]) == ("diverged", step), "a resume takes the one before"


def test_a_resume_knows_of_a_bad_loss_though_the_run_is_lost_while_it_goes_back(
    tmp_path: Path, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lost(Exception):
        pass

    session = Training(tmp_path, clock, config=replace(CONFIG, rollback=1))
    session.steps(3)
    session.steps(1, loss=math.nan, write=False)
    session.count_step = lambda *_: True
    session.poll_stop_and_save = lambda: (False, True)
    monkeypatch.setattr(sessions, "go_back", mock.Mock(side_effect=Lost))
    with pytest.raises(Lost):
        session.end_step(torch.zeros(4), 0.1)
    last = lines(tmp_path)[-1]
    assert (last["name"], last["step"]) == ("diverged", 4)


@pytest.fixture
def surviving(
    tmp_path: Path, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Training]:
    """A session whose rank keeps its state when another rank is lost; after three steps."""
    monkeypatch.setattr(sessions, "FAILING", threading.Event())
    monkeypatch.setattr(sessions, "marks", Marks())
    model, config = TinyNet(), replace(AUTO, rollback=1)
    parts = Trainables(model, build_optimizer(model, CONFIG), build_scaler(CONFIG, CPU), None)
    with (tmp_path / "state").open("w+b") as state, (tmp_path / "notes").open("w+b") as notes:
        kept_state = KeptState(model, (state.fileno(), notes.fileno()))
        run = tmp_path / "run"
        session = Training(run, clock, config=config, parts=parts, kept_state=kept_state)
        session.steps(3)
        yield session


def test_a_rollback_notes_the_statistics_of_the_step_gone_back_to(
    surviving: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank may be lost in the next step, when its forward pass has changed them."""
    session = surviving
    buffers = [*session.parts.model.buffers()]

    def go_back(*_: Any) -> Progress:
        for buffer in buffers:
            buffer.fill_(5)
        return Progress(step=1, samples_seen=4)

    monkeypatch.setattr(sessions, "go_back", go_back)
    session.steps(1, loss=math.nan, write=False)
    bad = session.write_steps(now=True)
    session.roll_back(bad)
    assert session.reader.left_out == [(12, 4)] and session.reader.last_step == 14
    for buffer in buffers:
        buffer.fill_(7)  # the next step's forward pass
    session.kept_state.take_statistics(1)
    assert buffers and all((buffer == 5).all() for buffer in buffers)


def test_a_rollback_counts_all_steps_that_were_made(
    surviving: Training, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Throughput is of the steps and images of which the seconds are, also of those undone. And the
    warm-up is over after as many steps as without a rollback."""
    monkeypatch.setattr(measuring.time, "monotonic", lambda: clock.now)
    session = surviving
    session.meter.energy.stop()  # which began by the true clock
    session.meter.restart()
    monkeypatch.setattr(sessions, "go_back", lambda *_: Progress(step=1, samples_seen=4))
    session.steps(1, loss=math.nan, write=False)
    session.roll_back(session.write_steps(now=True))
    session.steps(2)
    model, world = session.parts.model, session.ranks.world
    used = measuring.measure_usage(session.meter, world, model, CPU)
    summary = measuring.summarize(ENVIRONMENT, {}, session.meter, {}, [used], model)
    assert (summary.steps, summary.train_seconds) == (3, 6 * 0.5)
    assert summary.input.images_per_second == summary.images_per_second == 8.0
    assert summary.wall_images_per_second == 8.0


@pytest.mark.parametrize(
    ("error", "weight", "is_resumable", "kept"),
    [
        (LostPeer(), 1.0, True, 3),
        (RuntimeError("Connection reset by peer"), 1.0, True, 3),
        # The loss is not recorded yet: the ranks resume from a checkpoint, and --rollback acts.
        (LostPeer(), math.nan, True, 0),
        (LostPeer(), math.inf, True, 0),
        (RuntimeError("Connection reset by peer"), 1.0, False, 0),  # others may have a checkpoint
        (UserError("the disk is full"), 1.0, True, 0),
    ],
)
def test_a_state_is_kept_if_it_is_good_and_another_rank_is_lost(
    error: Exception, weight: float, is_resumable: bool, kept: int, surviving: Training
) -> None:
    with torch.no_grad():
        next(surviving.parts.model.parameters()).view(-1)[-1] = weight
    surviving.is_resumable = is_resumable
    assert not surviving.begun.__exit__(type(error), error, None), "training goes on"
    assert surviving.kept_state is not None and surviving.kept_state.step == kept
    # Then the watcher leaves the process time to end.
    assert sessions.marks.is_leaving != isinstance(error, UserError)


def test_what_is_left_out_stays_in_the_record_when_a_run_goes_further_back(
    tmp_path: Path, clock: SimpleNamespace
) -> None:
    session = Training(tmp_path, clock)
    session.steps(4)
    session.recorder.event("rollback", left_out=[(16, 4)])
    for step in (4, 2, 1):
        session = Training(tmp_path, clock, Progress(step=step, samples_seen=4 * step), AUTO)
        assert steps_left_out(tmp_path) == [(16, 4)]


@pytest.mark.parametrize("part", ["file", "board", "step_board", "summary", "checkpoint"])
def test_a_disk_that_fills_up_is_one_sentence(
    part: str, tmp_path: Path, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Training(tmp_path, clock)
    session.steps(4)
    recorder, failed = session.recorder, Future[None]()
    full = open("/dev/full", "w", buffering=1)  # noqa: SIM115, for closing it fails, too
    failed.set_exception(UserError("cannot be written there (...). Mend it"))
    if part == "file":
        recorder.file = full
    elif part.endswith("board"):
        getattr(recorder, part).file = full.buffer
    elif part == "summary":
        (tmp_path / "summary.json").mkdir()
    else:
        monkeypatch.setattr(checkpoint, "WRITES", [failed])
    with pytest.raises(UserError, match=r"cannot be written there \(.+\). Mend it"):
        session.steps(1)
        recorder.close(SUMMARY)


def test_a_record_that_is_moved_ends_the_run(tmp_path: Path, clock: SimpleNamespace) -> None:
    """Else it would be lost with the files that are open, and another run might write there."""
    session = Training(tmp_path / "run", clock)
    for do in (
        lambda: (tmp_path / "run").rename(tmp_path / "renamed"),
        lambda: Training(tmp_path / "run", clock),
    ):
        do()
        with pytest.raises(UserError, match=r"run/metrics.jsonl: was removed or moved while the"):
            session.steps(2)


@pytest.mark.parametrize("asked", ["the stop file", "a signal on rank 1", "the time"])
def test_ranks_learn_at_the_same_step_that_they_are_to_stop_or_to_save(
    asked: str,
    tmp_path: Path,
    clock: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """They look at the same steps. Only rank 0 looks for the file, which a file system may show
    late to some; a signal may come to any. Rank 0 alone writes and talks."""
    ranks = [Training(tmp_path, clock, world=a_world(rank, 2)) for rank in range(2)]
    for rank in ranks:
        rank.steps(4)
    for rank in ranks:
        rank.looked_at = 0, clock.now - 4 * 0.125  # as if these had taken so long

    def look(signalled: int | None = None) -> list[tuple[bool, bool]]:
        own: list[torch.Tensor] = []
        for rank in ranks:
            is_asked = rank.ranks.world.rank == signalled
            monkeypatch.setattr(sessions, "is_asked_to_end", lambda it=is_asked: it)
            before = rank.next_look
            rank.ranks = Ranks(rank.ranks.world, lambda values: own.append(values) or values)
            rank.poll_stop_and_save()
            rank.next_look = before
            rank.ranks = Ranks(rank.ranks.world, lambda _: torch.stack(own).sum(0))
        return [rank.poll_stop_and_save() for rank in ranks]

    assert look() == [(False, False)] * 2
    assert [rank.next_look for rank in ranks] == [4 + LOOK_SECONDS / 0.125] * 2
    assert ranks[0].poll_stop_and_save() == (False, False)
    for rank in ranks:
        rank.next_look, rank.is_stopped = 0, True
        rank.saved_at -= 60 * CONFIG.checkpoint_minutes * (asked == "the time")
    if asked == "the stop file":
        (tmp_path / "stop").touch()
    assert look(1 if "signal" in asked else None) == [(asked != "the time", True)] * 2
    if asked == "the time":
        return
    by_file = asked == "the stop file"
    for rank in ranks:
        rank.ranks = Ranks(rank.ranks.world, lambda values: values + by_file)
    codes = [rank.end() for rank in ranks]
    assert codes == [0 if by_file else EXIT_SAVED] * 2
    assert capsys.readouterr().out.count("stopped after step 4, as") == 1
    assert len(lines(tmp_path, "step")) == 4
    assert lines(tmp_path)[-1]["name"] == "stop"
    assert not (tmp_path / "summary.json").exists() and not (tmp_path / "stop").exists()


def test_a_wish_to_stop_is_kept_until_it_is_obeyed_or_comes_too_late(
    tmp_path: Path, clock: SimpleNamespace
) -> None:
    stop = tmp_path / "stop"
    stop.touch()  # while the run was starting
    session = Training(tmp_path, clock)
    session.steps(1)
    assert stop.exists()
    session.recorder.close(SUMMARY)
    assert not stop.exists()


# What a power cut, a bad disk or an editor leaves in the middle of metrics.jsonl.
DAMAGED = (
    b"\0\0\0\n\xff\xfe{}\n{'kind': 'step', 'step': 3}\n[]\n"
    b'{"kind": "eval", "step": {"kind": "eval", "step": 5}\n{"kind": "eval", "step": 5}\n'
)


@pytest.mark.parametrize("batch_size", [4, 6])  # with 6, an epoch ends inside a step
@pytest.mark.parametrize("at", [5, 7, 12])
def test_resumed_run_leaves_the_lines_of_a_whole_one(
    at: int,
    batch_size: int,
    tmp_path: Path,
    clock: SimpleNamespace,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = replace(AUTO, batch_size=batch_size)
    Training(tmp_path / "whole", clock, config=config).steps(15)
    first = Training(tmp_path / "run", clock, config=config)
    first.steps(at)
    saved = replace(first.progress)
    first.steps(13 - at)  # which the checkpoint does not hold
    with (tmp_path / "run" / "metrics.jsonl").open("ab") as file:
        file.write(DAMAGED + b'{"kind": "step", "epo')  # it was killed while it wrote
    Training(tmp_path / "run", clock, saved, config).steps(15 - at)
    assert capsys.readouterr().out.count("metrics.jsonl: 6 damaged line(s) are left out") == 1
    for kind in ("step", "epoch", "eval"):
        expected, found = lines(tmp_path / "whole", kind), lines(tmp_path / "run", kind)
        for line in (*expected, *found):  # the sums are of floats, in another order
            line["loss"] = round(line["loss"], 9)
        assert found == expected
    assert lines(tmp_path / "run", "event", "name") == ["start", "resume"]


@pytest.mark.parametrize(
    ("settings", "epochs", "rates", "loss_of_1"),
    [
        # Ends at 6, 12, 18, 24, ...: the last step counts once, in the epoch that it began in.
        ({"batch_size": 6}, [*[0] * 4, *[1] * 3, *[2] * 3], [12.0] * 10, 2 + (5 + 6 + 7) / 3),
        # Five steps of 4, and then of 8, which end at 28, 36, 44, 52 and 60.
        (
            {"batch_size": 8, "batch_size_warmup_epochs": 1},
            [*[0] * 5, *[1] * 3, 2, 2],
            [*[8.0] * 5, *[16.0] * 5],
            2 + (6 + 7 + 8) / 3,
        ),
    ],
)
def test_steps_of_an_epoch(
    settings: dict[str, Any],
    epochs: list[int],
    rates: list[float],
    loss_of_1: float,
    tmp_path: Path,
    clock: SimpleNamespace,
) -> None:
    session = Training(tmp_path, clock, config=replace(CONFIG, **settings))
    session.steps(10)
    assert lines(tmp_path, "step", "epoch") == epochs
    assert lines(tmp_path, "step", "images_per_second") == rates
    assert lines(tmp_path, "epoch", "loss")[1] == pytest.approx(loss_of_1)
    assert lines(tmp_path, "epoch", "seconds")[1] == 0.5 * epochs.count(1)
    warm = rates[WARM_UP_STEPS:]
    assert session.meter.phases.images_per_second == pytest.approx(sum(warm) / len(warm))


def test_epoch_resumed_at_another_world_size(tmp_path: Path, clock: SimpleNamespace) -> None:
    """Four images a step at first, then eight: the figures weigh images, not steps."""
    first = Training(tmp_path, clock)
    first.steps(3)
    Training(tmp_path, clock, first.progress, AUTO, a_world(0, 2)).steps(1)
    (epoch,) = lines(tmp_path, "epoch")
    assert epoch["loss"] == pytest.approx(2 + (1 * 4 + 2 * 4 + 3 * 4 + 4 * 8) / 20)
    assert epoch["images_per_second"] == pytest.approx(20 / 2.0)


def test_refuses_to_overwrite_a_run(tmp_path: Path, clock: SimpleNamespace) -> None:
    run, at_3 = tmp_path / "run", Progress(3, 12)
    Training(run, clock).steps(6)
    # It would cut the other run's record short.
    other = replace(CONFIG, resume=str(tmp_path / "other/checkpoints/step-000000003.pt"))
    for progress, config in [(Progress(), CONFIG), (at_3, other)]:
        with pytest.raises(UserError, match="already holds a run; choose another --name"):
            Training(run, clock, progress, config)
        assert len(lines(run, "step")) == 6
    own = replace(CONFIG, resume=str(run / "checkpoints/step-000000003.pt"))
    Training(run, clock, at_3, own)
    assert len(lines(run, "step")) == 3
    Training(run, clock, Progress(), AUTO)  # nothing was saved yet: a fresh start
    assert lines(run, "step") == []


def a_whole_run(folder: Path, clock: SimpleNamespace) -> Training:
    session = Training(folder, clock)
    session.steps(15)
    session.recorder.close(SUMMARY)
    return session


def test_complete_run_keeps_its_summary(tmp_path: Path, clock: SimpleNamespace) -> None:
    """A batch system may start a job again that was done: its figures must survive that."""
    end, summary = a_whole_run(tmp_path, clock).progress, tmp_path / "summary.json"
    again = Training(tmp_path, clock, end, AUTO)
    again.evaluate(3)  # the epoch that would come next
    assert lines(tmp_path, "eval", "epoch")[-1] == 2
    again.recorder.close(replace(SUMMARY, images_per_second=None))
    assert read_json(summary) == asdict(SUMMARY)
    more = Training(tmp_path, clock, end, AUTO)
    more.steps(1)
    assert not summary.exists()
    more.recorder.close(replace(SUMMARY, top1=51.0))
    assert read_json(summary)["top1"] == 51.0


def test_evaluation_leaves_the_training_s_record(tmp_path: Path, clock: SimpleNamespace) -> None:
    a_whole_run(tmp_path, clock)
    before = files_in(tmp_path)
    evaluation = Training(tmp_path, clock, Progress(7, 28), replace(AUTO, evaluate=True))
    evaluation.evaluate(1)
    evaluation.recorder.close(replace(SUMMARY, top1=49.0))
    assert files_in(tmp_path).items() > before.items()
    (new,) = tmp_path.glob("evaluation-*")
    assert read_json(new / "summary.json")["top1"] == 49.0
    assert len(lines(new, "eval")) == 1


def board_in(folder: Path) -> EventAccumulator:
    """What TensorBoard reads there."""
    return EventAccumulator(str(folder)).Reload()


def test_tensorboard(tmp_path: Path, clock: SimpleNamespace) -> None:
    """One point an epoch, though epoch 2 was drawn twice, and steps 8 to 11. Steps in a run of
    their own: those from which a resumed run goes on are no epochs."""
    first = Training(tmp_path, clock)
    first.steps(7)
    saved = replace(first.progress)
    first.steps(4)
    second = Training(tmp_path, clock, saved, AUTO)
    second.steps(8)
    second.recorder.close(SUMMARY)
    # A batch system starts it once more, though it is complete: it evaluates again.
    third = Training(tmp_path, clock, second.progress, AUTO)
    third.evaluate(3)
    third.recorder.close(SUMMARY)
    epochs, steps = board_in(tmp_path / "tensorboard"), board_in(tmp_path / "tensorboard/steps")
    names = ("Throughput", "Time", "Loss", "Top1", "Top5")
    tags = {"Lr", *(f"{name}/{part}" for name in names for part in ("train", "val"))}
    step_tags = {f"Steps/{name}" for name in ("Loss", "Top1", "Top5", "Lr", "Throughput")}
    for board, found, points in ((epochs, tags, range(1, 4)), (steps, step_tags, range(1, 16))):
        assert set(board.Tags()["scalars"]) == found
        for tag in found:
            assert [event.step for event in board.Scalars(tag)] == [*points], tag
    assert steps.Scalars("Steps/Loss")[8].value == 11.0
    points = {("Throughput/train", 0): 8.0, ("Time/train", 1): 2.5, ("Top5/val", 2): 75.0}
    assert {(tag, n): epochs.Scalars(tag)[n].value for tag, n in points} == points
    assert epochs.Scalars("Lr")[0].value == pytest.approx(0.1)


def test_a_point_is_the_mean_of_its_interval(tmp_path: Path, clock: SimpleNamespace) -> None:
    session = Training(tmp_path, clock)
    session.steps(2, write=False)
    session.steps(1)
    (point,) = board_in(tmp_path / "tensorboard" / "steps").Scalars("Steps/Loss")
    assert (point.step, point.value) == (3, 4.0)


def test_moving_average_has_lines_of_its_own(tmp_path: Path, clock: SimpleNamespace) -> None:
    session = Training(tmp_path, clock)
    session.progress.total_seconds = 10.0
    better = replace(EVALUATION, weights="ema", figures={**EVALUATION.figures, "top1": 62.5})
    session.recorder.write_evaluations(0, [replace(EVALUATION, seconds=1.0), better])
    assert session.recorder.evaluations[-1].top1 == 62.5
    assert lines(tmp_path, "eval", "weights") == ["model", "ema"]
    assert lines(tmp_path, "eval", "train_seconds_so_far") == [8.0, 10.0]


def test_progress_bar_only_on_rank_0_s_terminal(
    tmp_path: Path, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Training(tmp_path / "a", clock).recorder.console.bar.disable
    monkeypatch.setattr(record.sys.stderr, "isatty", lambda: True, raising=False)
    Training(tmp_path / "b", clock, world=a_world(1, 2)).steps(1)
    assert not (tmp_path / "b").exists()
    session = Training(tmp_path / "c", clock)
    session.steps(2)
    console = session.recorder.console
    bar = console.bar
    assert (bar.n, bar.total, bar.desc) == (2, 15, "epoch   1/3")
    assert bar.postfix.endswith("left, 8.0 images/s, loss 3.0000, lr 0.1")
    console.show_evaluation(3)
    assert (console.evaluation.n, bar.n) == (3, 2)
    session.recorder.close(SUMMARY)
    assert console.bar.disable and console.evaluation.disable


def test_a_line_now_and_then_without_a_terminal(
    tmp_path: Path,
    clock: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = SimpleNamespace(s=1000.0)
    monkeypatch.setattr(console_module.time, "monotonic", lambda: now.s)
    session = Training(tmp_path, clock)
    said = []
    for _ in range(4):
        now.s += 0.4 * LINE_S
        session.steps(1)
        said += [re.sub(r"\A(?!epoch).*\n", "", capsys.readouterr().out)]
    step_3 = "epoch   1/3  step 3/15, 02:24 left, 8.0 images/s, loss 4.0000, lr 0.1"
    assert step_3 in said[2] and not any("left" in text for text in (said[0], said[1], said[3]))
    for images in (2, 4, 9):
        now.s += 0.4 * LINE_S
        session.recorder.console.show_evaluation(images)
    assert capsys.readouterr().out == "evaluating: 6 of 8 images\n"


def test_an_evaluation_speaks_of_no_epoch(
    tmp_path: Path, clock: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    session = Training(tmp_path, clock, Progress(7, 28), replace(CONFIG, evaluate=True))
    session.evaluate(1)
    session.recorder.close(SUMMARY)
    out = capsys.readouterr().out
    assert "\nweights of step 7\nval    loss 1.5000" in out and "epoch" not in out


# ---- tensors of the first steps, and the profile ----


def test_a_trace_holds_what_the_step_computed(tmp_path: Path) -> None:
    model = TinyNet()
    loss = model(torch.rand(2, 3, 8, 8)).square().mean()
    loss.backward()
    for step in (7, 8):
        write_trace(a_config(tensor_steps=7), a_world(1, 2), tmp_path, step, model, loss)
    (path,) = tmp_path.rglob("*.*")
    assert path == tmp_path / "trace/rank-1/step-000007.npz"
    arrays = np.load(path)
    names = [name for name, _ in model.named_parameters()]
    assert set(arrays) == {
        "loss",
        *(f"{kind}/{name}" for kind in ("gradient", "weight") for name in names),
        *(f"buffer/norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")),
    }
    assert arrays["loss"] == loss.item()
    assert np.array_equal(arrays["gradient/head.weight"], model.head.weight.grad.numpy())
    assert np.array_equal(arrays["weight/head.weight"], model.head.weight.detach().numpy())


def profiled(folder: Path, steps: int, ended: Iterable[int]) -> list[str]:
    """What the engine's timeline was asked for, and what was said at the end."""
    calls: list[str] = []
    model = TinyNet()
    begin, end = lambda path: calls.append(Path(path).name), lambda: calls.append("end")
    config, timeline = a_config(profile_steps=steps), ("engine", begin, end)
    profiler = StepProfiler(config, a_world(), folder, 0, model, timeline)
    for step in ended:
        for _ in range(2):  # passes of accumulation
            model(torch.rand(2, 3, 8, 8)).square().mean().backward()
        profiler.end_step(step)
    profiler.close(calls.append)
    return calls


def test_a_profile_covers_the_steps_after_the_first_few(tmp_path: Path) -> None:
    assert profiled(tmp_path, 2, range(1, WARM_UP_STEPS + 6)) == ["engine-timeline.json", "end"]
    trace = read_json(tmp_path / "profile/rank-0.json")
    marks = {e["name"] for e in trace["traceEvents"] if e["name"].startswith("ProfilerStep")}
    times = read_json(tmp_path / "profile/gradients-rank-0.json")
    assert (len(marks), len(times["steps"])) == (2, 2)
    assert times["elements"] == {n: p.numel() for n, p in TinyNet().named_parameters()}
    for step in times["steps"]:
        assert step["ready"].keys() == times["elements"].keys()
        assert all(step["backward"] <= ready <= step["end"] for ready in step["ready"].values())


def test_a_disk_that_takes_neither_profile_nor_trace_is_one_message(tmp_path: Path) -> None:
    times = tmp_path / "profile/gradients-rank-0.json"
    times.parent.mkdir()
    partial_name(times).symlink_to("/dev/full")
    with pytest.raises(UserError, match=r"the run cannot be written there \(No space left"):
        profiled(tmp_path, 2, range(1, WARM_UP_STEPS + 6))
    (tmp_path / "trace").touch()
    with pytest.raises(UserError, match=r"the run cannot be written there \(Not a directory"):
        write_trace(a_config(tensor_steps=9), a_world(), tmp_path, 5, TinyNet(), torch.zeros(()))


def test_a_profile_that_the_end_cuts_short_is_said(tmp_path: Path) -> None:
    *_, end, said = profiled(tmp_path / "short", 9, range(1, WARM_UP_STEPS + 3))
    assert end == "end" and "the profile is shorter" in said
    assert (tmp_path / "short/profile/rank-0.json").exists()
    (said,) = profiled(tmp_path / "none", 9, range(1, 3))
    assert "no profile" in said
    assert profiled(tmp_path / "not asked for", 0, range(1, 3)) == []


@pytest.mark.parametrize("last", [WARM_UP_STEPS + 1, WARM_UP_STEPS + 2])  # in the profile; after it
def test_a_profile_is_not_begun_again_after_a_rollback(last: int, tmp_path: Path) -> None:
    ended = [*range(1, last + 1), *range(2, WARM_UP_STEPS + 5)]
    assert profiled(tmp_path, 2, ended) == ["engine-timeline.json", "end"]
