"""The run folder: what a run was, what it measured, and how it ended.

    runs/<name>/config.json        every setting
                lock               of the process that writes here (run_folder.py)
                environment.json   engine, launcher, transport, hosts, versions
                metrics.jsonl      the truth: one object a line, of kind step, epoch, eval or event;
                                   its "epoch" counts from 0, as the order of the images does
                summary.json       written last: its presence means that the run is complete
                checkpoints/
                tensorboard/       by epoch, counted from 1 as on the console; by step in steps/

Only rank 0 writes. The other ranks hold a Recorder, too, since the metrics of the steps are summed
over ranks.
"""

import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from tqdm import tqdm

from recipe.config import Config
from recipe.data.batches import Data, open_input_meter, samples_per_step
from recipe.device import cpu_seconds
from recipe.errors import UserError
from recipe.files import replace_file
from recipe.record.checkpoint import Progress, checkpoints_in, finish_checkpoint, set_aside
from recipe.record.energy import open_energy_meter
from recipe.record.probes import StepProfiler, write_trace
from recipe.record.run_folder import STOP_FILE, cannot_write, new_folder, utc_now
from recipe.training.metrics import Sums, means
from recipe.training.phases import (
    WARM_UP_STEPS,
    PhaseSums,
    StepClock,
    begins_stretch,
    exchanges_gradients,
)
from recipe.world import World

if TYPE_CHECKING:
    from recipe.record.board import Board


class Recorder:
    """Collects the steps' metrics on the device, and on rank 0 writes the run folder and the
    console lines."""

    def __init__(
        self,
        config: Config,
        world: World,
        device: torch.device,
        data: Data,
        folder: Path,
        progress: Progress,
        workers: int,
    ) -> None:
        self.config, self.world, self.data, self.progress = config, world, data, progress
        self.folder = folder
        if config.evaluate and world.is_first and (folder / "metrics.jsonl").exists():
            # The record of the training that is evaluated stays as it is.
            self.folder = new_folder(folder / f"evaluation-{datetime.now():%Y%m%d-%H%M%S}")
        self.steps_per_epoch = data.num_train / samples_per_step(config, world)
        self.clock = StepClock(device)
        # Sums, learning rate, step, and samples seen.
        self.pending: list[tuple[Sums, float, int, int]] = []
        self.epoch_sums = torch.zeros(4, dtype=torch.float64)
        self.epoch_seconds = 0.0
        self.phases = PhaseSums()
        self.input = open_input_meter(data, workers)
        self.energy = open_energy_meter(device, world.local_rank)
        self.profiler = StepProfiler(config, world, self.folder, progress.step)
        self.throughput_images = self.throughput_seconds = 0.0
        self.first_step, self.first_samples_seen = progress.step, progress.samples_seen
        self.step_seconds = 0.0  # of this session's steps, evaluations and checkpoints left out
        self.environment: dict[str, Any] = {}
        self.fingerprint: dict[str, Any] = {}
        self.cpu_seconds_before = 0.0
        self.learning_rate = 0.0
        self.started = time.perf_counter()
        self.earlier_train_seconds = progress.train_seconds
        self.earlier_summary: str | None = None
        self.file: Any = None
        self.board: Board | None = None  # its x-axis: epochs, counted from 1
        self.step_board: Board | None = None
        self.bar: tqdm | None = None
        if world.is_first:
            self._open()

    def _open(self) -> None:
        metrics, summary = self.folder / "metrics.jsonl", self.folder / "summary.json"
        with one_sentence(self.folder):
            holds_run = metrics.exists() or checkpoints_in(self.folder / "checkpoints")
            if holds_run and not self._goes_on_here():
                raise UserError(
                    f"{self.folder}: already holds a run; choose another --name, or go on with it "
                    "by --resume auto"
                )
            self.folder.mkdir(parents=True, exist_ok=True)
            if not self.config.evaluate and set_aside(self.folder, self.progress.step):
                self.progress.best_top1 = Progress.best_top1
            kept = _lines_until(metrics, self.progress.step) if self.progress.step else []
            self._take_up_epoch(kept)
            replace_file(metrics, "".join(kept))
            self.file = metrics.open("a", buffering=1)
            replace_file(self.folder / "config.json", pretty(asdict(self.config)))
            if summary.exists():
                self.earlier_summary = summary.read_text()
                summary.unlink()
        from recipe.record.board import Board  # rank 0 alone pays for TensorBoard's import

        # What an interrupted run drew of the epochs and steps that are to be made again goes.
        epoch, step = self.progress.samples_seen // self.data.num_train, self.progress.step
        folder = self.folder / "tensorboard"
        self.board = Board(folder, epoch + 1 if step else None)
        self.step_board = Board(folder / "steps", step + 1 if step else None)

    def _goes_on_here(self) -> bool:
        """Whether --resume means a checkpoint of this folder, and not another run's."""
        if self.config.resume in ("auto", None):
            return self.config.resume == "auto"
        path = Path(self.config.resume or "").expanduser().resolve()
        return path.is_relative_to(self.folder.resolve())

    def _take_up_epoch(self, lines: list[str]) -> None:
        """Count the steps of the epoch that a resumed run is in the middle of, so that its figures
        cover all of it."""
        epoch = self.progress.samples_seen // self.data.num_train
        samples_before = 0
        for step in map(json.loads, lines):
            if step["kind"] != "step":
                continue
            if step["epoch"] == epoch:
                # Not this run's images per step: the world may have had another size.
                images = step["samples_seen"] - samples_before
                figures = [step["loss"], step["top1"] / 100, step["top5"] / 100, 1.0]
                self.epoch_sums += images * torch.tensor(figures, dtype=torch.float64)
                self.epoch_seconds += step["seconds"]
            samples_before = step["samples_seen"]

    def _write(self, kind: str, **values: Any) -> None:
        if self.file is not None:
            with one_sentence(self.folder):
                self.file.write(json.dumps({"kind": kind, **values}, allow_nan=False) + "\n")

    def say(self, line: str) -> None:
        """A console line, from rank 0, above the progress bar if there is one."""
        if self.world.is_first:
            tqdm.write(line) if self.bar is not None else print(line, flush=True)

    def event(self, name: str, **details: Any) -> None:
        """Something that happened: start, resume, checkpoint, end."""
        self._write("event", name=name, time_utc=utc_now(), step=self.progress.step, **details)

    def begin(self, environment: dict[str, Any], fingerprint: dict[str, Any]) -> None:
        """Write down what the run runs on, and tell it."""
        self.environment, self.fingerprint = environment, fingerprint
        if not self.world.is_first:
            return
        with one_sentence(self.folder):
            replace_file(self.folder / "environment.json", pretty(environment))
        config, world = self.config, self.world
        self.say(
            f"{environment['engine']} {environment['version']} over {environment['transport']}, "
            f"{world.size} worker(s) on "
            f"{len(environment['hosts'])} host(s) by {world.launcher}, "
            f"{environment['device_name']}, "
            f"{environment['threads']} CPU thread(s) each"
        )
        self.say(
            f"{config.arch} in {config.precision}, {self.data.num_train:,} training and "
            f"{self.data.num_val:,} validation "
            f"images of {self.data.num_classes} classes, global batch "
            f"{samples_per_step(config, world)}, "
            f"{self.steps_per_epoch:,.1f} steps an epoch; run folder {self.folder}"
        )
        if self.progress.step:
            self.say(f"going on after step {self.progress.step}")
        self.event("resume" if self.progress.step else "start", resumed_from=self.config.resume)

    @property
    def train_seconds(self) -> float:
        """The training clock: seconds since training began, evaluation and checkpoints included."""
        return self.earlier_train_seconds + time.perf_counter() - self.started

    def start_clock(self) -> None:
        """Training begins now."""
        self.started = time.perf_counter()
        self.cpu_seconds_before = cpu_seconds()
        self.energy.start()
        self.clock.restart()
        if self.world.is_first and sys.stderr.isatty():
            total = math.ceil(self.config.epochs * self.steps_per_epoch)
            self.bar = tqdm(
                total=total,
                initial=self.progress.step,
                unit="step",
                dynamic_ncols=True,
                leave=False,
            )

    def lap(self, phase: str) -> None:
        """A phase of the step has ended: "data", "forward" or "backward"; "optimizer" is the rest
        of the step."""
        self.clock.lap(phase)

    def trace(self, model: nn.Module, loss: torch.Tensor) -> None:
        """Write this rank's tensors of one of the first --trace-steps steps: the gradients as the
        optimizer used them, the weights that it left."""
        if self.progress.step < (self.config.trace_steps or 0):
            with one_sentence(self.folder):
                write_trace(self.folder, self.world.rank, self.progress.step + 1, model, loss)

    def step(self, sums: Sums, learning_rate: float) -> None:
        """A step has ended; its sums stay on the device until `pending_sums` is asked for."""
        self.clock.lap("optimizer")
        self.clock.end_step()
        finish_checkpoint(timeout=0)  # tells of one that could not be written as soon as it failed
        self.profiler.end_step(self.progress.step)
        self.progress.train_seconds = self.train_seconds
        self.learning_rate = learning_rate
        self.pending.append((sums, learning_rate, self.progress.step, self.progress.samples_seen))
        if self.bar is not None:
            self.bar.update()

    def pending_sums(self) -> torch.Tensor:
        """This rank's sums of the steps not yet written, to be summed over ranks: float64
        [steps + 1, 4]. The last row is not zero where rank 0 finds that it is to stop: so all ranks
        learn of it at the same step, by a message that is sent anyhow."""
        is_asked = self.world.is_first and (self.folder / STOP_FILE).exists()
        rows = [sums for sums, *_ in self.pending]
        return torch.stack([*rows, torch.full_like(rows[0], float(is_asked))])

    def write_steps(self, sums_over_ranks: torch.Tensor) -> bool:
        """Write the pending steps and return whether the run is to stop now, before its end; raises
        UserError if the loss is no longer finite."""
        *all_sums, is_asked = sums_over_ranks.cpu()
        self.energy.sample()
        images_per_step, interval = samples_per_step(self.config, self.world), 0.0
        for row, (_, rate, step, samples_seen), phases in zip(
            all_sums, self.pending, self.clock.take(), strict=True
        ):
            seconds = sum(phases.values())
            exchanged = exchanges_gradients(self.config, step - 1)
            # A step belongs to the epoch that it begins in, in the epoch's figures as well.
            epoch = (samples_seen - images_per_step) // self.data.num_train
            figures = means(row)
            if not math.isfinite(figures["loss"]):
                place = f"the loss is {figures['loss']} at step {step} (learning rate {rate:.4g})"
                raise self._diverged(place, at_once=step == self.first_step + 1)
            self._write(
                "step",
                epoch=epoch,
                step=step,
                samples_seen=samples_seen,
                **figures,
                learning_rate=rate,
                seconds=seconds,
                **{f"{phase}_seconds": value for phase, value in phases.items()},
                exchanged=exchanged,
                images_per_second=images_per_step / seconds,
            )
            self.epoch_seconds += seconds
            self.step_seconds += seconds
            interval += seconds
            if step > self.first_step + WARM_UP_STEPS and not begins_stretch(self.config, step - 1):
                self.phases.add(phases, exchanged)
                self.throughput_images += images_per_step * exchanged
                self.throughput_seconds += seconds * exchanged
        sums = torch.stack(all_sums).sum(dim=0)
        self.epoch_sums += sums
        self._draw_steps(means(sums), len(all_sums) * images_per_step / interval)
        self.pending.clear()
        if self.bar is not None:
            self.bar.set_postfix(loss=f"{figures['loss']:.4f}", lr=f"{rate:.3g}")
        return bool(is_asked.any())

    def restart_clock(self) -> None:
        """Keep what happened since the last step out of the next one's duration."""
        self.energy.start()
        self.clock.restart()

    def end_epoch(self, epoch: int, complete: bool) -> None:
        """Write the training figures of an epoch (0-based), if it is complete, and start the next
        one's."""
        self.energy.stop()  # an evaluation follows
        if not complete:
            return
        figures = means(self.epoch_sums)
        speed = float(self.epoch_sums[3]) / self.epoch_seconds
        self._write(
            "epoch",
            epoch=epoch,
            step=self.progress.step,
            samples_seen=self.progress.samples_seen,
            **figures,
            seconds=self.epoch_seconds,
            images_per_second=speed,
        )
        self._draw("train", epoch, figures, seconds=self.epoch_seconds, speed=speed)
        self.say(
            f"epoch {epoch + 1:>3}/{self.config.epochs}  train  loss {figures['loss']:.4f}  top-1 "
            f"{figures['top1']:6.2f} %  "
            f"top-5 {figures['top5']:6.2f} %  {speed:,.0f} images/s"
        )
        self.epoch_sums.zero_()
        self.epoch_seconds = 0.0

    def evaluation(
        self, epoch: int, sums: Sums, seconds: float, weights: str = "model"
    ) -> dict[str, float]:
        """Write an evaluation, its `sums` already over all ranks, and return its loss, top-1 and
        top-5."""
        figures = means(sums)
        if not math.isfinite(figures["loss"]):
            place = f"the validation loss is {figures['loss']} after step {self.progress.step}"
            raise self._diverged(place, at_once=not self._has_trained)
        count = int(sums[3])
        epoch = min(epoch, self.config.epochs - 1)  # of a run that is complete, the last
        self.progress.train_seconds = self.train_seconds  # for the checkpoint that comes next
        self._write(
            "eval",
            epoch=epoch,
            step=self.progress.step,
            samples_seen=self.progress.samples_seen,
            **figures,
            num_images=count,
            seconds=seconds,
            train_seconds_so_far=self.train_seconds,
            weights=weights,
        )
        if self._has_trained or self.config.evaluate:  # else it is drawn already
            part = "val" if weights == "model" else f"val_{weights}"
            self._draw(part, epoch, figures, seconds, count / seconds)
        name = "val" if weights == "model" else weights
        self.say(
            f"epoch {epoch + 1:>3}/{self.config.epochs}  {name:<5}  loss {figures['loss']:.4f}  "
            f"top-1 {figures['top1']:6.2f} %  "
            f"top-5 {figures['top5']:6.2f} %"
        )
        return figures

    def _draw(
        self, part: str, epoch: int, figures: dict[str, float], seconds: float, speed: float
    ) -> None:
        if self.board is None:
            return
        tags = {
            "Loss": figures["loss"],
            "Top1": figures["top1"],
            "Top5": figures["top5"],
            "Time": seconds,
            "Throughput": speed,
        }
        points = {f"{tag}/{part}": value for tag, value in tags.items()}
        if part == "train":
            points["Lr"] = self.learning_rate
        with one_sentence(self.folder):
            self.board.draw(epoch + 1, points)

    def _draw_steps(self, figures: dict[str, float], speed: float) -> None:
        if self.step_board is None:
            return
        points = {
            "Steps/Loss": figures["loss"],
            "Steps/Top1": figures["top1"],
            "Steps/Top5": figures["top5"],
            "Steps/Lr": self.learning_rate,
            "Steps/Throughput": speed,
        }
        with one_sentence(self.folder):
            self.step_board.draw(self.progress.step, points)

    @property
    def _has_trained(self) -> bool:
        """Whether this session has made a step."""
        return self.progress.step > self.first_step

    def _diverged(self, place: str, at_once: bool) -> UserError:
        if at_once and (self.first_step or self.config.evaluate):
            remedy = "the weights that it began with are no good; take an earlier checkpoint"
            return UserError(f"{place}: {remedy}")
        return UserError(
            f"{place}: training has diverged; lower --base-lr, lengthen --warmup-epochs or set "
            "--clip-grad-norm"
        )

    def stop(self) -> None:
        """End the record of a run that was asked to stop: without a summary, for it is not complete
        and goes on with --resume; UserError if its checkpoint could not be written."""
        finish_checkpoint()
        self._close_instruments()
        kept = "the same command with --resume auto goes on"
        if self.config.keep_checkpoints == 0:
            kept = "--keep-checkpoints 0 keeps nothing to go on from"
        self.say(
            f"stopped after step {self.progress.step}, as {self.folder / STOP_FILE} asked: {kept}"
        )
        self.event("stop")
        if self.world.is_first:
            self._close_files()
            (self.folder / STOP_FILE).unlink(missing_ok=True)  # last: whoever made it may wait

    def _close_instruments(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None
        if warning := self.profiler.close():
            self.say(f"warning: {warning}")

    def close(self, summary: dict[str, Any]) -> None:
        """Write the summary, which marks the run as complete, and the hyper-parameters beside
        TensorBoard's scalars; UserError if the last checkpoint could not be written."""
        finish_checkpoint()
        self._close_instruments()
        if not self.world.is_first:
            return
        self.event("end")
        text = pretty(summary)
        if not self._has_trained and not self.config.evaluate:
            # A run that was complete already: its figures of speed are not this short session's.
            text = self.earlier_summary or text
        else:
            self._draw_settings(summary)
        self._close_files()
        with one_sentence(self.folder):
            replace_file(self.folder / "summary.json", text)
            (self.folder / STOP_FILE).unlink(missing_ok=True)  # came too late

    def _draw_settings(self, summary: dict[str, Any]) -> None:
        assert self.board is not None
        of_the_world = ("engine", "launcher", "transport", "world_size", "threads")
        values = asdict(self.config) | {key: self.environment[key] for key in of_the_world}
        settings = {
            key: value if isinstance(value, (int, float, str, bool)) else str(value)
            for key, value in values.items()
        }
        results = {
            f"hparam/{key}": summary[key]
            for key in ("top1", "loss", "images_per_second")
            if summary[key] is not None
        }
        with one_sentence(self.folder):
            self.board.describe(settings, results)

    def _close_files(self) -> None:
        with one_sentence(self.folder):
            for file in (self.file, self.board, self.step_board):
                if file is not None:
                    file.close()

    @property
    def images_per_second(self) -> float | None:
        """Training throughput of all ranks together, without the first steps and evaluation; None
        if too short."""
        return self.throughput_images / self.throughput_seconds if self.throughput_seconds else None


def _lines_until(metrics: Path, step: int) -> list[str]:
    """The lines of an interrupted run up to the checkpoint that it goes on from; the rest will be
    made again."""
    if not metrics.exists():
        return []
    lines = metrics.read_text().splitlines(keepends=True)
    return [
        line for line in lines if line.endswith("\n") and json.loads(line).get("step", 0) <= step
    ]


@contextmanager
def one_sentence(folder: Path) -> Iterator[None]:
    """Turn the error of a full or broken disk into a UserError that names the run's folder."""
    try:
        yield
    except OSError as error:
        raise cannot_write(folder, error) from None


def pretty(values: dict[str, Any]) -> str:
    """JSON for readers; ValueError for a NaN, which JSON does not have."""
    return json.dumps(values, indent=2, allow_nan=False) + "\n"
