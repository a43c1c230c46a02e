"""Writes the run folder: a run's settings, its measurements, and how it ended.

runs/<name>/config.json        every setting
            lock               of the process that writes here (folder.py)
            environment.json   engine, launcher, transport, hosts, versions
            metrics.jsonl      the original record: one object a line, of kind step, epoch, eval or
                               event; "epoch" counts from 0, as for the order of the images
            summary.json       written last: its presence means that the run is complete
            checkpoints/
            tensorboard/       by epoch, counted from 1 as on the console; by step in steps/
"""

import json
import math
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import datetime
from itertools import takewhile
from pathlib import Path
from shlex import quote
from typing import Any, BinaryIO

import numpy as np

from recipe.data.batches import Data
from recipe.data.image_folder import Listing
from recipe.data.order import samples_per_step
from recipe.errors import UserError
from recipe.files import replace_file, write_json
from recipe.marks import marks
from recipe.record.console import Console
from recipe.record.folder import (
    STOP_FILE,
    lines_in,
    new_folder,
    one_sentence,
    record_in,
    utc_now,
)
from recipe.record.schema import (
    METRICS,
    Environment,
    EpochLine,
    EvalLine,
    EventLine,
    StepLine,
    Summary,
    rate_text,
)
from recipe.settings.config import Config
from recipe.training.metrics import Evaluation
from recipe.training.optimizers import schedule_in_words
from recipe.training.state import Progress
from recipe.world import World

Figures = dict[str, float]  # loss, top1 and top5


class Board:
    """A TensorBoard event file in `folder`, created with its first point. The caller's thread
    writes each point at once, so a full disk ends the run with an error. torch's SummaryWriter has
    a thread of its own, which would only print a traceback and end.

    `first_step`, for a resumed run, is the x-value from which TensorBoard drops the points of
    earlier files in the folder.
    """

    def __init__(self, folder: Path, first_step: int | None) -> None:
        self.folder, self.first_step = folder, first_step
        self.file: BinaryIO | None = None

    def draw(self, step: int, values: dict[str, float]) -> None:
        """Add a point at x = `step` to the curve of each tag; UserError if it cannot be written."""
        from tensorboard.compat.proto import summary_pb2  # rank 0 alone pays for this import

        points = [
            summary_pb2.Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()
        ]
        self._write(step=step, summary=summary_pb2.Summary(value=points))

    def _write(self, **fields: Any) -> None:
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        with one_sentence(self.folder):
            if self.file is None:
                self.folder.mkdir(parents=True, exist_ok=True)
                name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
                self.file = (self.folder / name).open("wb")
                self._write(file_version="brain.Event:2")
                if self.first_step is not None:
                    begins = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
                    self._write(step=self.first_step, session_log=begins)
            event = event_pb2.Event(wall_time=time.time(), **fields)
            RecordWriter(self.file).write(event.SerializeToString())
            self.file.flush()

    def close(self) -> None:
        """Close the file."""
        if self.file is not None:
            self.file.close()


class Silence:
    """Stands in for the Recorder on the other ranks: every call does nothing."""

    def __init__(self, *_: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *_: Any, **others: Any) -> None: ...


class Recorder:
    """Writes the run folder and the console lines, on rank 0."""

    def __init__(
        self,
        config: Config,
        world: World,
        data: Data,
        folder: Path,
        progress: Progress,
        environment: Environment,
        lr_scale: float = 1.0,
    ) -> None:
        if config.evaluate and (folder / "metrics.jsonl").exists():
            # The record of the training that is evaluated stays as it is.
            folder = new_folder(folder / f"evaluation-{datetime.now():%Y%m%d-%H%M%S}")
        self.config, self.world, self.data, self.progress = config, world, data, progress
        self.folder, self.environment, self.lr_scale = folder, environment, lr_scale
        self.first_step, self.skipped_steps = progress.step, progress.skipped_steps
        self.console = Console(config, data, progress)
        self.say = self.console.say
        step, epoch = progress.step, progress.samples_seen // data.num_train
        with one_sentence(folder):
            folder.mkdir(parents=True, exist_ok=True)
            earlier = self._open_metrics()
            write_json(folder / "config.json", asdict(config), allow_nan=False)
            write_json(folder / "environment.json", asdict(environment), allow_nan=False)
        steps = (record for record in earlier if isinstance(record, StepLine))
        self.steps = [line for line in steps if line.epoch == epoch]  # of this epoch so far
        self.evaluations = [record for record in earlier if isinstance(record, EvalLine)]
        recorded = max((record.step for record in earlier), default=0)
        # TensorBoard drops an interrupted run's points of the epochs and steps to be made again.
        self.board = Board(folder / "tensorboard", epoch + 1 if step else None)
        self.step_board = Board(folder / "tensorboard" / "steps", step + 1 if step else None)
        self._introduce()
        if step:
            self.say(f"{'weights of' if config.evaluate else 'resuming after'} step {step}")
        # A rank was lost before the ranks had exchanged their parts of the figures.
        lost = f"no figures of steps {recorded + 1} to {step}: a rank was lost"
        reason = lost if marks.is_watched and recorded < step else None
        self.event("resume" if step else "start", resumed_from=config.resume, reason=reason)

    def _open_metrics(self) -> list[Any]:
        """Open metrics.jsonl to go on with it, and return its records. Leave out an interrupted
        run's lines after the checkpoint: they will be made again; but not which images are left out
        (--rollback)."""
        metrics, step = self.folder / "metrics.jsonl", self.progress.step
        read = [(line, record_in(line)) for line in lines_in(self.folder)] if step else []
        kept = [
            (line, record)
            for line, record in read
            if record and (record.step <= step or getattr(record, "left_out", None))
        ]
        if damaged := sum(record is None for _, record in read):
            self.say(f"warning: {metrics}: {damaged} damaged line(s) are left out")
        replace_file(metrics, "".join(f"{line}\n" for line, _ in kept))
        self.file: Any = metrics.open("a", buffering=1)
        return [record for _, record in kept]

    def _introduce(self) -> None:
        """Print what is trained, and on what."""
        config, ran_on, data = self.config, self.environment, self.data
        batch = samples_per_step(config, self.world)
        first = samples_per_step(config, self.world, epoch=0)
        at_first = f", {first} at first" if first < batch else ""
        launcher = self.world.launcher
        by = "without a launcher" if launcher == "none" else f"by {launcher}"
        self.say(
            f"{ran_on.engine} {ran_on.version} over {ran_on.transport}, {self.world.size} "
            f"worker(s) on {len(ran_on.hosts)} host(s) {by}, "
            f"{ran_on.device_name}, {ran_on.threads} CPU thread(s) each"
        )
        self.say(
            f"{config.arch} in {config.precision}, {data.num_train:,} training and "
            f"{data.num_val:,} validation images of {data.num_classes} classes; "
            f"run folder {self.folder}"
        )
        for listing in (data.train, data.val):
            if listing is not None and listing.left_out:
                self.say(f"{listing.root}: {listing.left_out}")
        if not config.evaluate:
            self.say(
                f"preset {config.preset}: global batch {batch}{at_first}, "
                f"{data.num_train / batch:,.1f} steps an epoch; "
                f"{schedule_in_words(config, self.lr_scale)}"
            )

    def _write(self, line: StepLine | EpochLine | EvalLine | EventLine) -> None:
        kind = next(name for name, record in METRICS.items() if isinstance(line, record))
        with one_sentence(self.folder):
            self.file.write(json.dumps({"kind": kind, **vars(line)}, allow_nan=False) + "\n")
            path, opened = self.file.name, os.fstat(self.file.fileno())
            is_there = os.path.exists(path) and os.path.samestat(os.stat(path), opened)
        if not is_there:
            raise UserError(
                f"{path}: was removed or moved while the run wrote it, so further lines would be "
                "lost; restore its folder, and resume from its last checkpoint with --resume auto"
            )

    def event(self, name: str, **others: Any) -> None:
        """Record an event; `others` are further fields of EventLine."""
        fields: dict[str, Any] = {"time_utc": utc_now(), "step": self.progress.step, **others}
        self._write(EventLine(name=name, **fields))

    def write_replaced(self, listing: Listing, replaced: dict[int, str]) -> None:
        """Record the bad images of `listing` that were replaced by others: the reason, by index."""
        for index, reason in replaced.items():
            self.event("replaced", image=listing.name(index), reason=reason)
            print(f"warning: replaced: {reason}", file=sys.stderr, flush=True)

    def end_step(self) -> None:
        """Show that a step has ended, and say so if it changed no weight."""
        if self.progress.skipped_steps > self.skipped_steps:
            self.skipped_steps, scale = self.progress.skipped_steps, self.config.scales_loss_by
            then = "it is halved" if scale == "dynamic" else f"choose one below {scale:g}"
            self.say(
                f"step {self.progress.step} changed no weight: its gradients overflowed with this "
                f"loss scale; {then}"
            )
        self.console.end_step()

    def write_steps(self, steps: Sequence[StepLine]) -> None:
        """Write these steps, up to the first whose loss is not finite: JSON lacks such numbers."""
        with one_sentence(self.folder):
            (self.folder / "summary.json").unlink(missing_ok=True)  # the run is no longer complete
        for line in takewhile(lambda line: math.isfinite(line.loss), steps):
            self._write(line)
        self.steps += steps
        last, (figures, _, speed) = steps[-1], total(steps)
        points = {**figures, "lr": last.learning_rate, "throughput": speed}
        points = {f"Steps/{name.capitalize()}": value for name, value in points.items()}
        self.step_board.draw(last.step, points)
        self.console.latest = (
            f", {rate_text(speed)} images/s, loss {figures['loss']:.4f}, "
            f"lr {last.learning_rate:.3g}"
        )

    def write_epoch(self, epoch: int) -> None:
        """Write the training figures of a complete epoch (0-based), and start those of the next."""
        figures, seconds, speed = total(self.steps)
        self._write(
            EpochLine(
                epoch=epoch,
                step=self.progress.step,
                samples_seen=self.progress.samples_seen,
                **figures,
                seconds=seconds,
                images_per_second=speed,
            )
        )
        points = epoch_points("train", figures, seconds, speed)
        self.board.draw(epoch + 1, {**points, "Lr": self.steps[-1].learning_rate})
        self.say(f"{self._figures_line(epoch, 'train', figures)}  {rate_text(speed)} images/s")
        self.steps = []

    def write_evaluations(
        self, epoch: int, evaluations: Sequence[Evaluation], is_repeated: bool = False
    ) -> None:
        """Write evaluations that have just ended, in the order in which they ran."""
        self.console.end_evaluation()
        epoch = min(epoch, self.config.epochs - 1)  # for a complete run, the last epoch
        so_far = self.progress.total_seconds - sum(evaluation.seconds for evaluation in evaluations)
        for evaluation in evaluations:
            figures, count = evaluation.figures, evaluation.num_images
            so_far += evaluation.seconds
            line = EvalLine(
                epoch=epoch,
                step=self.progress.step,
                samples_seen=self.progress.samples_seen,
                **figures,
                num_images=count,
                seconds=evaluation.seconds,
                train_seconds_so_far=so_far,
                weights=evaluation.weights,
            )
            self._write(line)
            self.evaluations.append(line)
            part = "val" if evaluation.weights == "model" else f"val_{evaluation.weights}"
            if not is_repeated:  # else it is drawn already
                points = epoch_points(part, figures, evaluation.seconds, count / evaluation.seconds)
                self.board.draw(epoch + 1, points)
            self.say(self._figures_line(epoch, part.removeprefix("val_"), figures))

    def _figures_line(self, epoch: int, name: str, figures: Figures) -> str:
        place = "" if self.config.evaluate else f"epoch {epoch + 1:>3}/{self.config.epochs}  "
        return (
            f"{place}{name:<5}  loss {figures['loss']:.4f}  "
            f"top-1 {figures['top1']:6.2f} %  top-5 {figures['top5']:6.2f} %"
        )

    def close(self, summary: Summary) -> None:
        """Write the summary, which marks the run as complete."""
        self.event("end")
        path, has_trained = self.folder / "summary.json", self.progress.step > self.first_step
        # A run that was already complete keeps its summary, whose figures are of more steps.
        is_kept = path.exists() and not has_trained
        self.close_files()
        with one_sentence(self.folder):
            if not is_kept:
                write_json(path, asdict(summary), allow_nan=False)
            (self.folder / STOP_FILE).unlink(missing_ok=True)  # came too late
        for line in self._conclusion(summary):
            self.say(line)

    def _conclusion(self, summary: Summary) -> Iterator[str]:
        """Yield lines that say what was reached, where it is, and how to train longer."""
        config, folder = self.config, self.folder
        if self.evaluations and not config.evaluate:
            best = max(self.evaluations, key=lambda line: line.top1)
            minutes, speed = summary.total_seconds / 60, summary.images_per_second
            took = f"{minutes / 60:.1f} h" if minutes >= 60 else f"{minutes:.1f} min"
            rate = f", {rate_text(speed)} images/s" if speed else ""
            yield f"best top-1 {best.top1:.2f} %, of epoch {best.epoch + 1}; {took}{rate}"
        yield f"run folder {folder}; curves: tensorboard --logdir {quote(f'{folder}/tensorboard')}"
        if config.keep_checkpoints and not config.evaluate:
            more = "--max-steps" if self.progress.step == config.max_steps else "--epochs"
            name = quote(folder.name)
            yield f"to train longer: the same command, --name {name} --resume auto and more {more}"

    def stop(self) -> bool:
        """End the record of a run that was asked to stop: without a summary, since it is not
        complete and can be resumed. Return, on rank 0, whether the stop file asked for it."""
        kept = (
            f"the same command with --name {quote(self.folder.name)} --resume auto resumes it"
            if self.config.keep_checkpoints
            else "no checkpoint was saved, since --keep-checkpoints is 0"
        )
        asked = self.folder / STOP_FILE
        by = asked if asked.exists() else "a signal"
        self.say(f"stopped after step {self.progress.step}, as {by} asked: {kept}")
        self.event("stop")
        self.close_files()
        with one_sentence(self.folder):
            asked.unlink(missing_ok=True)  # last, since its maker may wait for this
        return by == asked

    def close_files(self) -> None:
        """Close all files: nothing more is written."""
        self.console.close()
        with one_sentence(self.folder):
            for file in (self.file, self.board, self.step_board):
                file.close()


def total(steps: Sequence[StepLine]) -> tuple[Figures, float, float]:
    """Return several steps' figures, averaged over their images, their total seconds, and images
    per second."""
    images, seconds = [line.images for line in steps], sum(line.seconds for line in steps)
    figures = {
        name: float(np.average([getattr(line, name) for line in steps], weights=images))
        for name in ("loss", "top1", "top5")
    }
    return figures, seconds, sum(images) / seconds


def epoch_points(part: str, figures: Figures, seconds: float, speed: float) -> Figures:
    """Return TensorBoard's points for an epoch's training, or for an evaluation."""
    points = {**figures, "time": seconds, "throughput": speed}
    return {f"{name.capitalize()}/{part}": value for name, value in points.items()}
