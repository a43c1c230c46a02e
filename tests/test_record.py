"""The run folder: what is written, and how a resumed run goes on in it."""

import json
import math
import re
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from making import CPU, TinyNet, a_config, a_world
from records import a_summary, an_environment
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from recipe import session as sessions
from recipe.config import Config
from recipe.data.batches import Data, samples_per_step
from recipe.errors import UserError
from recipe.record import checkpoint
from recipe.record import meter as measuring
from recipe.record import recorder as record
from recipe.record.meter import StepMeter
from recipe.record.probes import write_trace
from recipe.record.recorder import Recorder
from recipe.record.resume import take_over
from recipe.session import Session
from recipe.training.metrics import Evaluation
from recipe.training.phases import WARM_UP_STEPS
from recipe.training.state import Progress, Trainables
from recipe.world import World

NUM_TRAIN = 20  # five steps an epoch
DATA = Data(None, None, num_train=NUM_TRAIN, num_val=8, num_classes=10)
CONFIG = a_config(name="run", epochs=3, batch_size=4)
AUTO = replace(CONFIG, resume="auto")
ENVIRONMENT = an_environment(version="2", world_size=1, hosts=["here"], device_name="a CPU")
SUMMARY = a_summary(top1=50.0, loss=0.5, images_per_second=8.0)


class Clock:
    """Stands in for time.perf_counter: goes on only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    it = Clock()
    monkeypatch.setattr(measuring.time, "perf_counter", it)
    return it


class Training(Session):
    """A session, without training and other ranks: each step takes half a second."""

    def __init__(
        self,
        folder: Path,
        clock: Clock,
        progress: Progress | None = None,
        config: Config = CONFIG,
        world: World | None = None,
    ) -> None:
        self.clock, self.progress, self.config = clock, progress or Progress(), config
        self.world = self.readers = world or a_world()
        if self.world.is_first:
            take_over(folder, config, self.progress)
        self.data, self.first_step, self.last_step = DATA, self.progress.step, 15
        self.recorder = Recorder(config, self.world, DATA, folder, self.progress, ENVIRONMENT)
        self.meter = StepMeter(config, self.world, CPU, DATA, self.progress)
        self.start_clocks()

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
            sums *= samples_per_step(self.config, self.world, epoch)
            epoch_ended = self.end_step(sums, 0.1, skipped_steps=0)
            if write:
                self.write_steps(lambda sums: sums)
            if epoch_ended:
                self.recorder.write_epoch(self.epoch)
                self.evaluate(self.epoch)

    def evaluate(self, epoch: int, seconds: float = 2.0) -> None:
        self.clock.now += seconds
        sums = torch.tensor([12.0, 4.0, 6.0, 8.0], dtype=torch.float64)
        self.progress.train_seconds = self.meter.train_seconds
        self.recorder.write_evaluations(epoch, [Evaluation("model", sums, seconds)])
        self.meter.restart()


def lines(folder: Path, kind: str | None = None) -> list[dict[str, Any]]:
    text = (folder / "metrics.jsonl").read_text()
    assert text == "" or text.endswith("\n")
    return [one for one in map(json.loads, text.splitlines()) if kind in (None, one["kind"])]


def test_steps_that_were_left_out_are_said(
    tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    resumed = Progress(step=7, samples_seen=28, skipped_steps=2)
    fixed = replace(CONFIG, precision="fp16", loss_scale=128.0)
    for config, then in ((replace(fixed, loss_scale=None), "halved"), (fixed, "one below 128")):
        recorder = Training(tmp_path / then, clock, replace(resumed), config).recorder
        capsys.readouterr()
        for skipped in (2, 3, 3):
            recorder.progress.step += 1
            recorder.progress.skipped_steps = skipped
            recorder.show_step()
        assert re.fullmatch(f"step 9 changed no weight: .*{then}\n", capsys.readouterr().out)


def test_a_whole_run(tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "runs" / "run"
    a_whole_run(folder, clock)
    assert json.loads((folder / "config.json").read_text())["batch_size"] == 4
    assert json.loads((folder / "environment.json").read_text()) == asdict(ENVIRONMENT)
    assert json.loads((folder / "summary.json").read_text()) == asdict(SUMMARY)
    kinds = [line["kind"] for line in lines(folder)]
    assert kinds == ["event"] + (["step"] * 5 + ["epoch", "eval"]) * 3 + ["event"]
    assert [line["name"] for line in lines(folder, "event")] == ["start", "end"]
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
        "exchanged": True,
        "images_per_second": 8.0,
    }
    epoch = lines(folder, "epoch")[1]
    assert (epoch["epoch"], epoch["step"], epoch["samples_seen"]) == (1, 10, 40)
    assert epoch["loss"] == pytest.approx(2.0 + (6 + 7 + 8 + 9 + 10) / 5)
    assert (epoch["seconds"], epoch["images_per_second"]) == (2.5, 8.0)
    evaluation = lines(folder, "eval")[1]
    assert (evaluation["loss"], evaluation["top1"], evaluation["top5"]) == (1.5, 50.0, 75.0)
    assert (evaluation["num_images"], evaluation["weights"]) == (8, "model")
    assert evaluation["train_seconds_so_far"] == 10 * 0.5 + 2 * 2.0  # evaluation is on the clock
    out = capsys.readouterr().out
    assert out.count("\n") == 2 + 3 * 2
    assert "ddp 2 over Gloo, 1 worker(s)" in out
    assert "epoch   2/3  val    loss 1.5000  top-1  50.00 %" in out


def test_only_rank_0_writes_and_talks(
    tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    session = Training(tmp_path / "run", clock, world=a_world(1, 2))
    session.steps(3)
    session.recorder.close(SUMMARY)
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("progress", [Progress(), Progress(step=7, samples_seen=28)])
@pytest.mark.parametrize(("passes", "size"), [(1, 1), (3, 2)])
def test_throughput_without_warm_up_and_evaluation(
    progress: Progress, passes: int, size: int, tmp_path: Path, clock: Clock
) -> None:
    """After a start and after a resume; over all ranks, and all batches of a step."""
    config, world = replace(CONFIG, batches_per_allreduce=passes), a_world(0, size)
    session = Training(tmp_path / "run", clock, replace(progress), config, world)
    session.steps(WARM_UP_STEPS, seconds=100.0)
    assert session.meter.phases.images_per_second is None
    session.steps(6)  # with an evaluation of 2 s among them
    assert session.meter.phases.images_per_second == 8.0 * passes * size
    assert session.meter.step_seconds == WARM_UP_STEPS * 100 + 6 * 0.5


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rank", [0, 1])
def test_loss_that_is_not_finite(loss: float, rank: int, tmp_path: Path, clock: Clock) -> None:
    """Every rank stops."""
    session = Training(tmp_path / "run", clock, world=a_world(rank, 2))
    session.steps(2)
    with pytest.raises(UserError, match=r"the loss is -?(nan|inf) at step 3 .*--base-lr"):
        session.steps(1, loss=loss)
    assert rank > 0 or len(lines(tmp_path / "run", "step")) == 2


@pytest.mark.parametrize(("earlier", "remedy"), [(0, "no good; take an earlier"), (1, "--base-lr")])
def test_bad_weights_are_told_from_a_divergence(
    earlier: int, remedy: str, tmp_path: Path, clock: Clock
) -> None:
    config = replace(CONFIG, resume="auto")
    session = Training(tmp_path / "run", clock, Progress(step=7, samples_seen=28), config)
    session.steps(earlier)
    with pytest.raises(UserError, match=f"at step {8 + earlier} .*{remedy}"):
        session.steps(1, loss=math.nan)


@pytest.mark.parametrize(
    ("step", "evaluate", "remedy"),
    [(0, False, "training has diverged"), (7, False, "began with"), (0, True, "began with")],
)
def test_an_evaluation_that_is_not_finite(
    step: int, evaluate: bool, remedy: str, tmp_path: Path, clock: Clock, monkeypatch: Any
) -> None:
    """The last step may have broken the weights, after its own loss."""
    broken = [Evaluation("model", torch.tensor([math.nan, 0.0, 0.0, 8.0]), 1.0)]
    monkeypatch.setattr(sessions, "validate", lambda *_: broken)
    session = Training(tmp_path, clock, Progress(step), replace(CONFIG, evaluate=evaluate))
    session.device, session.workers, parts = CPU, 0, Trainables(*[None] * 4)  # type: ignore[arg-type]
    with pytest.raises(
        UserError, match=f"the loss is nan of validation after step {step}: .*{remedy}"
    ):
        session.validate(parts, lambda sums: sums, lambda sums: sums)


@pytest.mark.parametrize("part", ["file", "board", "step_board", "trace", "summary"])
def test_a_disk_that_fills_up_is_one_sentence(part: str, tmp_path: Path, clock: Clock) -> None:
    config = replace(CONFIG, tensor_steps=9)
    session = Training(tmp_path / "run", clock, config=config)
    session.steps(4)
    recorder = session.recorder
    full = open("/dev/full", "w", buffering=1)  # noqa: SIM115, for closing it fails, too
    with pytest.raises(UserError, match=r"run: .* cannot be written there \(.+\); make room, or "):
        if part == "file":
            recorder.file = full
        elif part.endswith("board"):
            getattr(recorder, part).file = full.buffer
        elif part == "trace":
            (tmp_path / "run/trace").touch()
            write_trace(config, a_world(), tmp_path / "run", 5, TinyNet(), torch.zeros(()))
        elif part == "summary":
            (tmp_path / "run/summary.json").mkdir()
        session.steps(1)
        recorder.close(SUMMARY)


def test_a_file_asks_rank_0_alone_to_stop(
    tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only rank 0 looks, so that a file system that shows the file late to some cannot split the
    ranks; the others learn of it from rank 0's answer."""
    first, second = (Training(tmp_path, clock, world=a_world(rank, 2)) for rank in range(2))
    first.folder = second.folder = tmp_path
    sent: list[torch.Tensor] = []

    def from_rank_0(values: torch.Tensor) -> torch.Tensor:
        sent.append(values)
        return sent[0]

    for is_asked in (False, True):
        if is_asked:
            (tmp_path / "stop").touch()
        sent.clear()
        for session in (first, second):
            session.steps(1)
            assert session.stop_is_asked(from_rank_0) == is_asked
        assert sent[1] == 0
    for session in (first, second):
        session.recorder.stop()
    assert capsys.readouterr().out.count("stopped after step 2") == 1
    assert lines(tmp_path)[-1]["name"] == "stop"
    assert not (tmp_path / "summary.json").exists() and not (tmp_path / "stop").exists()


def test_a_wish_to_stop_is_kept_until_it_is_obeyed_or_comes_too_late(
    tmp_path: Path, clock: Clock
) -> None:
    (tmp_path / "stop").touch()  # while the run was starting
    session = Training(tmp_path, clock)
    session.steps(1)
    assert (tmp_path / "stop").exists()
    session.recorder.close(SUMMARY)
    assert not (tmp_path / "stop").exists()


@pytest.mark.parametrize("at", [5, 7, 12])
def test_resumed_run_leaves_the_lines_of_a_whole_one(at: int, tmp_path: Path, clock: Clock) -> None:
    Training(tmp_path / "whole", clock).steps(15)
    first = Training(tmp_path / "run", clock)
    first.steps(at)
    saved = replace(first.progress)
    first.steps(13 - at)  # which the checkpoint does not hold
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "epo')  # it was killed while it wrote
    Training(tmp_path / "run", clock, saved, AUTO).steps(15 - at)
    for kind in ("step", "epoch", "eval"):
        expected, found = lines(tmp_path / "whole", kind), lines(tmp_path / "run", kind)
        for line in (*expected, *found):  # the sums are of floats, in another order
            line["loss"] = round(line["loss"], 9)
        assert found == expected
    names = [line["name"] for line in lines(tmp_path / "run", "event")]
    assert names == ["start", "resume"]


def test_epoch_that_ends_inside_a_step(tmp_path: Path, clock: Clock) -> None:
    """Its last step counts once, in the figures of the epoch that it began in, resumed or not."""
    config = replace(AUTO, batch_size=6)  # steps end at 6, 12, 18, 24, ...
    Training(tmp_path / "whole", clock, config=config).steps(10)
    first = Training(tmp_path / "run", clock, config=config)
    first.steps(5)
    Training(tmp_path / "run", clock, replace(first.progress), config).steps(5)
    for folder in (tmp_path / "whole", tmp_path / "run"):
        epochs = [line["epoch"] for line in lines(folder, "step")]
        assert epochs == [*[0] * 4, *[1] * 3, *[2] * 3]
        first_epoch, second_epoch, *_ = lines(folder, "epoch")
        assert first_epoch["loss"] == pytest.approx(2 + (1 + 2 + 3 + 4) / 4)
        assert second_epoch["loss"] == pytest.approx(2 + (5 + 6 + 7) / 3)
        assert second_epoch["seconds"] == 1.5


def test_batches_that_grow(tmp_path: Path, clock: Clock) -> None:
    """Of 20 images: five steps of 4, and then of 8, which end at 28, 36, 44 and 52."""
    config = replace(CONFIG, batch_size=8, batch_size_warmup_epochs=1)
    session = Training(tmp_path / "run", clock, config=config)
    session.steps(9)
    steps = lines(tmp_path / "run", "step")
    assert [line["epoch"] for line in steps] == [*[0] * 5, *[1] * 3, 2]
    assert [line["images_per_second"] for line in steps] == [*[8.0] * 5, *[16.0] * 4]
    warm = [*[4] * 5, *[8] * 4][WARM_UP_STEPS:]
    assert session.meter.phases.images_per_second == sum(warm) / (len(warm) * 0.5)
    _, second = lines(tmp_path / "run", "epoch")
    assert second["loss"] == pytest.approx(2 + (6 + 7 + 8) / 3)


def test_epoch_resumed_at_another_world_size(tmp_path: Path, clock: Clock) -> None:
    """Four images a step at first, then eight: the figures weigh images, not steps."""
    first = Training(tmp_path, clock)
    first.steps(3)
    config, progress = replace(CONFIG, resume="auto"), replace(first.progress)
    Training(tmp_path, clock, progress, config, a_world(0, 2)).steps(1)
    (epoch,) = lines(tmp_path, "epoch")
    assert epoch["loss"] == pytest.approx(2 + (1 * 4 + 2 * 4 + 3 * 4 + 4 * 8) / 20)
    assert epoch["images_per_second"] == pytest.approx(20 / 2.0)


def test_refuses_to_overwrite_a_run(tmp_path: Path, clock: Clock) -> None:
    session = Training(tmp_path / "run", clock)
    session.steps(6)
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    other = tmp_path / "other" / "checkpoints" / "step-000000003.pt"
    own = tmp_path / "run" / "checkpoints" / "step-000000003.pt"
    at_3 = Progress(3, 12)
    for progress, config in [
        (Progress(), CONFIG),
        (at_3, replace(CONFIG, resume=str(other))),  # it would cut the other run's record short
    ]:
        with pytest.raises(UserError, match="already holds a run; choose another --name"):
            Training(tmp_path / "run", clock, progress, config)
        assert (tmp_path / "run" / "metrics.jsonl").read_text() == before
    Training(tmp_path / "run", clock, at_3, replace(CONFIG, resume=str(own)))
    assert len(lines(tmp_path / "run", "step")) == 3
    # Nothing was saved yet: a fresh start.
    Training(tmp_path / "run", clock, Progress(), replace(CONFIG, resume="auto"))
    assert lines(tmp_path / "run", "step") == []


def test_going_back_sets_aside_what_came_later(tmp_path: Path, clock: Clock) -> None:
    session = Training(tmp_path / "run", clock)
    session.steps(6)
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir()
    (folder / "best.pt").write_bytes(b"of a step that is not known, for it is damaged")
    own = replace(CONFIG, resume=str(folder / "step-000000003.pt"))
    progress = Progress(3, 12, best_top1=50.0)
    evaluating = replace(own, evaluate=True)
    Training(tmp_path / "run", clock, replace(progress), evaluating)
    assert list(folder.iterdir()) == [folder / "best.pt"]
    Training(tmp_path / "run", clock, progress, own)
    (aside,) = folder.iterdir()
    assert (aside / "best.pt").exists()
    assert (aside / "metrics.jsonl").read_text() == before
    assert progress.best_top1 < 0, "the next evaluation is the best that is left"


def test_a_checkpoint_that_failed_ends_the_run_at_the_next_step(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, failed = Training(tmp_path / "run", clock), Future[None]()
    failed.set_exception(UserError("the disk is full"))
    monkeypatch.setattr(checkpoint, "WRITES", [failed])
    with pytest.raises(UserError, match="the disk is full"):
        session.steps(1)


def a_whole_run(folder: Path, clock: Clock) -> Training:
    session = Training(folder, clock)
    session.steps(15)
    session.recorder.close(SUMMARY)
    return session


def test_complete_run_keeps_its_summary(tmp_path: Path, clock: Clock) -> None:
    """A batch system may start a job again that was done: its figures must survive that."""
    end, summary = a_whole_run(tmp_path, clock).progress, tmp_path / "summary.json"
    again = Training(tmp_path, clock, replace(end), AUTO)
    again.evaluate(3)  # the epoch that would come next
    assert lines(tmp_path, "eval")[-1]["epoch"] == 2
    again.recorder.close(replace(SUMMARY, images_per_second=None))
    assert json.loads(summary.read_text()) == asdict(SUMMARY)
    more = Training(tmp_path, clock, replace(end), AUTO)
    more.steps(1)
    assert not summary.exists()
    more.recorder.close(replace(SUMMARY, top1=51.0))
    assert json.loads(summary.read_text())["top1"] == 51.0


def test_evaluation_leaves_the_training_s_record(tmp_path: Path, clock: Clock) -> None:
    a_whole_run(tmp_path, clock)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    evaluation = Training(tmp_path, clock, Progress(7, 28), replace(AUTO, evaluate=True))
    evaluation.evaluate(1)
    evaluation.recorder.close(replace(SUMMARY, top1=49.0))
    assert {path: path.read_bytes() for path in before} == before
    (new,) = tmp_path.glob("evaluation-*")
    assert json.loads((new / "summary.json").read_text())["top1"] == 49.0
    assert len(lines(new, "eval")) == 1


def test_folder_that_cannot_be_written(tmp_path: Path, clock: Clock) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be written .*choose another --log-dir"):
        Training(tmp_path / "file" / "run", clock)


@pytest.fixture
def board(tmp_path: Path, clock: Clock) -> EventAccumulator:
    """What TensorBoard reads of a run that was resumed after it had drawn epoch 2."""
    session = Training(tmp_path / "run", clock)
    session.steps(7)
    saved = replace(session.progress)
    session.steps(4)
    second = Training(tmp_path / "run", clock, saved, AUTO)
    second.steps(8)
    second.recorder.close(SUMMARY)
    # A batch system starts it once more, though it is complete: it evaluates again.
    third = Training(tmp_path / "run", clock, second.progress, AUTO)
    third.evaluate(3)
    third.recorder.close(SUMMARY)
    return EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()


def test_tensorboard(board: EventAccumulator) -> None:
    names = ("Throughput", "Time", "Loss", "Top1", "Top5")
    tags = {"Lr", *(f"{name}/{part}" for name in names for part in ("train", "val"))}
    assert {tag for tag in board.Tags()["scalars"] if not tag.startswith("hparam/")} == tags
    for tag in tags:  # one point an epoch, though epoch 2 was drawn twice
        assert [event.step for event in board.Scalars(tag)] == [1, 2, 3], tag
    points = {("Throughput/train", 0): 8.0, ("Time/train", 1): 2.5, ("Top5/val", 2): 75.0}
    assert {(tag, n): board.Scalars(tag)[n].value for tag, n in points} == points
    assert board.Scalars("Lr")[0].value == pytest.approx(0.1)
    content = board.PluginTagToContent("hparams")["_hparams_/session_start_info"]
    for name in (b"batch_size", b"engine", b"launcher", b"transport", b"world_size", b"threads"):
        assert name in content
    assert [event.value for event in board.Scalars("hparam/top1")] == [50.0]


def test_tensorboard_by_step(board: EventAccumulator, tmp_path: Path) -> None:
    """In a run of its own: steps from which a resumed run goes on are no epochs."""
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard" / "steps")).Reload()
    tags = {f"Steps/{name}" for name in ("Loss", "Top1", "Top5", "Lr", "Throughput")}
    assert set(events.Tags()["scalars"]) == tags
    for tag in tags:  # though steps 8 to 11 were drawn twice
        assert [event.step for event in events.Scalars(tag)] == list(range(1, 16)), tag
    assert events.Scalars("Steps/Loss")[8].value == 11.0


def test_a_point_is_the_mean_of_its_interval(tmp_path: Path, clock: Clock) -> None:
    session = Training(tmp_path / "run", clock)
    session.steps(2, write=False)
    session.steps(1)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard" / "steps")).Reload()
    for tag, mean in {"Steps/Loss": 4.0, "Steps/Throughput": 8.0}.items():
        assert [(point.step, point.value) for point in events.Scalars(tag)] == [(3, mean)]


def test_moving_average_has_lines_of_its_own(tmp_path: Path, clock: Clock) -> None:
    session = Training(tmp_path / "run", clock)
    sums = torch.tensor([12.0, 4.0, 6.0, 8.0], dtype=torch.float64)
    session.progress.train_seconds = 10.0
    better = Evaluation("ema", sums + torch.tensor([0, 1, 0, 0]), 2.0)
    figures = session.recorder.write_evaluations(0, [Evaluation("model", sums, 1.0), better])
    assert figures["top1"] == 62.5
    written = lines(tmp_path / "run", "eval")
    told = [(line["weights"], line["train_seconds_so_far"]) for line in written]
    assert told == [("model", 8.0), ("ema", 10.0)]


def test_progress_bar_only_on_rank_0_s_terminal(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Training(tmp_path / "a", clock).recorder.bar is None
    monkeypatch.setattr(record.sys.stderr, "isatty", lambda: True, raising=False)
    assert Training(tmp_path / "b", clock, world=a_world(1, 2)).recorder.bar is None
    session = Training(tmp_path / "c", clock)
    session.steps(2)
    bar = session.recorder.bar
    assert bar is not None and (bar.n, bar.total) == (2, 15)
    session.recorder.close(SUMMARY)


def test_only_steps_with_an_exchange_count_for_throughput(tmp_path: Path, clock: Clock) -> None:
    session = Training(tmp_path / "run", clock, config=replace(CONFIG, ablation_steps=4))
    session.steps(8)
    assert session.meter.phases.images_per_second is None  # steps 6 to 8 were without
    session.steps(1, seconds=100.0)  # the first of a stretch
    session.steps(3)
    session.steps(3, seconds=100.0)  # without again
    assert session.meter.phases.images_per_second == 8.0
    assert session.meter.phases.means().steps == 3
    exchanged = [line["exchanged"] for line in lines(tmp_path / "run", "step")]
    assert exchanged[:12] == [True] * 4 + [False] * 4 + [True] * 4
