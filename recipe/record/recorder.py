"""Writes the run folder: what a run was, what it measured, and how it ended.

runs/<name>/config.json        every setting
            lock               of the process that writes here (run_folder.py)
            environment.json   engine, launcher, transport, hosts, versions
            metrics.jsonl      the truth: one object a line, of kind step, epoch, eval or event;
                               its "epoch" counts from 0, as the order of the images does
            summary.json       written last: its presence means that the run is complete
            checkpoints/
            tensorboard/       by epoch, counted from 1 as on the console; by step in steps/
"""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from recipe.config import Config
from recipe.data.batches import Data
from recipe.files import replace_file
from recipe.record import lines
from recipe.record.run_folder import STOP_FILE, new_folder, one_sentence, utc_now
from recipe.record.schema import (
    METRICS,
    Environment,
    EpochLine,
    EvalLine,
    EventLine,
    StepLine,
    Summary,
)
from recipe.training.metrics import Evaluation, Step, means
from recipe.training.state import Progress
from recipe.world import World

if TYPE_CHECKING:
    from recipe.record.board import Board


class Recorder:
    """Writes the run folder and the console lines, on rank 0 alone."""

    def __init__(
        self,
        config: Config,
        world: World,
        data: Data,
        folder: Path,
        progress: Progress,
        environment: Environment,
    ) -> None:
        self.config, self.world, self.data, self.progress = config, world, data, progress
        self.folder, self.environment = folder, environment
        self.first_step, self.skipped_steps = progress.step, progress.skipped_steps
        self.epoch_sums = torch.zeros(4, dtype=torch.float64)
        self.epoch_seconds = 0.0
        self.learning_rate = 0.0
        self.earlier_summary: str | None = None
        self.file: Any = None
        self.board: Board | None = None  # its x-axis: epochs, counted from 1
        self.step_board: Board | None = None
        self.bar: tqdm | None = None
        if world.is_first:
            self._open()

    def _open(self) -> None:
        if self.config.evaluate and (self.folder / "metrics.jsonl").exists():
            # The record of the training that is evaluated stays as it is.
            self.folder = new_folder(self.folder / f"evaluation-{datetime.now():%Y%m%d-%H%M%S}")
        folder, step = self.folder, self.progress.step
        epoch = self.progress.samples_seen // self.data.num_train
        metrics, summary = folder / "metrics.jsonl", folder / "summary.json"
        with one_sentence(folder):
            folder.mkdir(parents=True, exist_ok=True)
            kept = lines.lines_until(metrics, step) if step else []
            self.epoch_sums, self.epoch_seconds = lines.epoch_so_far(kept, epoch)
            replace_file(metrics, "".join(kept))
            self.file = metrics.open("a", buffering=1)
            replace_file(folder / "config.json", pretty(asdict(self.config)))
            if summary.exists():
                self.earlier_summary = summary.read_text()
                summary.unlink()
            replace_file(folder / "environment.json", pretty(asdict(self.environment)))
        from recipe.record.board import Board  # rank 0 alone pays for TensorBoard's import

        # What an interrupted run drew of the epochs and steps that are to be made again goes.
        self.board = Board(folder / "tensorboard", epoch + 1 if step else None)
        self.step_board = Board(folder / "tensorboard" / "steps", step + 1 if step else None)
        for line in lines.introduction(
            self.config, self.world, self.data, self.environment, folder
        ):
            self.say(line)
        if step:
            self.say(f"going on after step {step}")
        self.event("resume" if step else "start", resumed_from=self.config.resume)

    def _write(self, line: StepLine | EpochLine | EvalLine | EventLine) -> None:
        if self.file is not None:
            kind = next(name for name, record in METRICS.items() if isinstance(line, record))
            with one_sentence(self.folder):
                self.file.write(json.dumps({"kind": kind, **vars(line)}, allow_nan=False) + "\n")

    def _draw(self, board: "Board | None", x: int, points: dict[str, float]) -> None:
        if board is not None:
            with one_sentence(self.folder):
                board.draw(x, points)

    def say(self, line: str) -> None:
        """A console line, from rank 0, above the progress bar if there is one."""
        if self.world.is_first:
            tqdm.write(line) if self.bar is not None else print(line, flush=True)

    def event(self, name: str, resumed_from: str | None = None) -> None:
        """Something that happened: start, resume, stop, end."""
        step = self.progress.step
        self._write(EventLine(name=name, time_utc=utc_now(), step=step, resumed_from=resumed_from))

    def open_bar(self, last_step: int) -> None:
        """Training begins: show a progress bar up to `last_step`, if anybody can see it."""
        if self.world.is_first and sys.stderr.isatty():
            self.bar = tqdm(
                total=last_step,
                initial=self.progress.step,
                unit="step",
                dynamic_ncols=True,
                leave=False,
            )

    def show_step(self) -> None:
        """Show on the progress bar that a step has ended, and say so if it was left out."""
        if self.progress.skipped_steps > self.skipped_steps:
            self.skipped_steps = self.progress.skipped_steps
            self.say(lines.skipped_line(self.progress.step, self.config))
        if self.bar is not None:
            self.bar.update()

    def write_steps(self, steps: Sequence[Step]) -> None:
        """Write these steps; only those before a loss that is not finite, which JSON lacks."""
        if not self.world.is_first:
            return
        finite = list(takewhile(lambda step: math.isfinite(float(step.sums[0])), steps))
        for step in finite:
            self._write(lines.step_line(step, self.data.num_train))
        if len(finite) < len(steps):
            return
        sums = torch.stack([step.sums for step in steps]).sum(dim=0)
        seconds = sum(step.seconds for step in steps)
        self.epoch_sums += sums
        self.epoch_seconds += seconds
        self.learning_rate = steps[-1].learning_rate
        points = lines.step_points(means(sums), self.learning_rate, float(sums[3]) / seconds)
        self._draw(self.step_board, self.progress.step, points)
        if self.bar is not None:
            loss = means(steps[-1].sums)["loss"]
            self.bar.set_postfix(loss=f"{loss:.4f}", lr=f"{self.learning_rate:.3g}")

    def write_epoch(self, epoch: int) -> None:
        """Write the training figures of an epoch (0-based) that is complete, and start the next
        one's."""
        if not self.world.is_first:
            return
        figures, seconds = means(self.epoch_sums), self.epoch_seconds
        speed = float(self.epoch_sums[3]) / seconds
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
        points = lines.epoch_points("train", figures, seconds, speed) | {"Lr": self.learning_rate}
        self._draw(self.board, epoch + 1, points)
        line = lines.console_line(epoch, self.config.epochs, "train", figures)
        self.say(f"{line}  {speed:,.0f} images/s")
        self.epoch_sums.zero_()
        self.epoch_seconds = 0.0

    def write_evaluations(self, epoch: int, evaluations: Sequence[Evaluation]) -> dict[str, float]:
        """Write evaluations that have just ended, one after the other, and return, on each rank,
        the figures of the one with the best top-1; none if there are none."""
        epoch = min(epoch, self.config.epochs - 1)  # of a run that is complete, the last
        train_seconds = self.progress.train_seconds - sum(one.seconds for one in evaluations)
        for one in evaluations:
            figures, count = means(one.sums), int(one.sums[3])
            train_seconds += one.seconds
            self._write(
                EvalLine(
                    epoch=epoch,
                    step=self.progress.step,
                    samples_seen=self.progress.samples_seen,
                    **figures,
                    num_images=count,
                    seconds=one.seconds,
                    train_seconds_so_far=train_seconds,
                    weights=one.weights,
                )
            )
            if self._has_trained or self.config.evaluate:  # else it is drawn already
                part = "val" if one.weights == "model" else f"val_{one.weights}"
                points = lines.epoch_points(part, figures, one.seconds, count / one.seconds)
                self._draw(self.board, epoch + 1, points)
            name = "val" if one.weights == "model" else one.weights
            self.say(lines.console_line(epoch, self.config.epochs, name, figures))
        best = max(evaluations, key=lambda one: means(one.sums)["top1"], default=None)
        return means(best.sums) if best is not None else {}

    @property
    def _has_trained(self) -> bool:
        """Whether this session has made a step."""
        return self.progress.step > self.first_step

    def close(self, summary: Summary) -> None:
        """Write the summary, which marks the run as complete, and the hyper-parameters beside
        TensorBoard's scalars."""
        if not self.world.is_first:
            return
        self.event("end")
        text = pretty(asdict(summary))
        if not self._has_trained and not self.config.evaluate:
            # A run that was complete already: its figures of speed are not this short session's.
            text = self.earlier_summary or text
        else:
            assert self.board is not None
            settings = lines.hyper_parameters(self.config, self.environment, summary)
            with one_sentence(self.folder):
                self.board.describe(*settings)
        self._close_files()
        with one_sentence(self.folder):
            replace_file(self.folder / "summary.json", text)
            (self.folder / STOP_FILE).unlink(missing_ok=True)  # came too late

    def stop(self) -> None:
        """End the record of a run that was asked to stop: without a summary, for it is not complete
        and goes on with --resume."""
        if not self.world.is_first:
            return
        kept = "the same command with --resume auto goes on"
        if self.config.keep_checkpoints == 0:
            kept = "--keep-checkpoints 0 keeps nothing to go on from"
        asked = self.folder / STOP_FILE
        self.say(f"stopped after step {self.progress.step}, as {asked} asked: {kept}")
        self.event("stop")
        self._close_files()
        asked.unlink(missing_ok=True)  # last: whoever made it may wait

    def _close_files(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None
        with one_sentence(self.folder):
            for file in (self.file, self.board, self.step_board):
                if file is not None:
                    file.close()


def pretty(values: dict[str, Any]) -> str:
    """JSON for readers; ValueError for a NaN, which JSON does not have."""
    return json.dumps(values, indent=2, allow_nan=False) + "\n"
