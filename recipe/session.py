"""What a training keeps account of on each rank: its data, run folder, record, clocks, checkpoints.

The loops that train (both train.py, and loop.py for the rungs in baselines/) say what happens when.
A session decides nothing and calls nobody back: where ranks have to talk, it is given the
collective for it by the line that asks.
"""

import math
import os
from dataclasses import asdict, replace

import torch
from msgspec import convert
from torch import nn

from recipe.config import Config
from recipe.data.batches import (
    Data,
    check_replaced,
    samples_per_step,
    training_batches,
    training_end,
)
from recipe.device import gather, loader_workers, share_of_cores
from recipe.errors import UserError
from recipe.record.checkpoint import finish_checkpoint, keep_checkpoint
from recipe.record.environment import Usage, describe, fingerprint, measure_usage, summarize
from recipe.record.meter import StepMeter
from recipe.record.recorder import Recorder
from recipe.record.resume import resume
from recipe.record.run_folder import STOP_FILE, open_run_folder
from recipe.record.schema import RungFigures
from recipe.training.agreement import check_same_training, check_same_weights, comparison_keys
from recipe.training.metrics import (
    Collective,
    Sums,
    align_batch_norm,
    means,
    validate,
)
from recipe.training.state import Trainables
from recipe.world import World


class Session:
    """A training from its start, or from a checkpoint, to its end or the next stop.

    `readers` is this rank's place among those that read different images: all of them, but for a
    few rungs.
    """

    def __init__(
        self,
        engine: str,
        config: Config,
        world: World,
        data: Data,
        device: torch.device,
        sum_over_ranks: Collective,
        readers: World | None = None,
    ) -> None:
        self.engine, self.world, self.data, self.device = engine, world, data, device
        self.readers = readers or world
        keys = comparison_keys(engine, config, data, device)
        check_same_training(keys, world, device, sum_over_ranks)
        # Launchers bind ranks to cores and limit threads, each in its own way: work out the shares.
        own = world.host, sorted(os.sched_getaffinity(0))
        self.places = gather(own, world, sum_over_ranks)
        self.threads = config.threads or share_of_cores(self.places, world.rank)
        torch.set_num_threads(self.threads)
        self.workers = loader_workers(config, device, self.threads)

    def resume(
        self, config: Config, parts: Trainables, lr_scale: float, from_rank_0: Collective
    ) -> None:
        """Open the run folder, and go on from its checkpoint if --resume means one; until then no
        setting may change."""
        data, readers = self.data, self.readers
        self.config = config
        self.folder = open_run_folder(config, self.world, self.engine, from_rank_0)
        self.progress = resume(parts, config, self.world, data, self.folder, from_rank_0)
        self.first_step, start = self.progress.step, self.progress.samples_seen
        self.epoch = start // data.num_train  # the one that the last step began in
        self.last_step, self.stop = training_end(config, readers, data, self.first_step, start)
        self.work = fingerprint(
            config, readers, data, parts.model, self.device, self.threads, lr_scale
        )
        self.meter = StepMeter(config, readers, self.device, data, self.progress)
        self.batches = training_batches(
            data, config, readers, self.device, self.workers, start, self.stop, self.meter.input
        )

    def open_record(self, transport: str) -> None:
        """Say what is trained, on what, in the run folder and on the console; `transport` is what
        carries the gradients."""
        self.environment = describe(
            self.world, self.engine, transport, self.device, self.threads, self.places
        )
        speaker = replace(self.world, size=self.readers.size)  # who reads makes up a step
        self.recorder = Recorder(
            self.config, speaker, self.data, self.folder, self.progress, self.environment
        )

    def start_clocks(self) -> None:
        """Training begins now."""
        self.recorder.open_bar(self.last_step)
        self.meter.start()

    def end_step(self, sums: Sums, learning_rate: float, skipped_steps: int) -> bool:
        """Count a step, of which `sums` are this rank's metrics; whether an epoch has ended.

        UserError if the last checkpoint could not be written.
        """
        progress, num_train = self.progress, self.data.num_train
        self.epoch = progress.samples_seen // num_train
        step_samples = samples_per_step(self.config, self.readers, self.epoch)
        progress.end_step(step_samples, self.meter.train_seconds, skipped_steps)
        self.meter.end_step(sums, learning_rate)
        self.recorder.show_step()
        finish_checkpoint(timeout=0)
        return progress.samples_seen // num_train > self.epoch

    def write_steps(self, sum_over_ranks: Collective) -> None:
        """Write the steps since the last call; UserError for a loss that is not finite."""
        steps = self.meter.take_steps(sum_over_ranks)
        self.recorder.write_steps(steps)
        if self.config.bad_images == "replace" and (listing := self.data.train) is not None:
            replaced = self.meter.take_replaced(self.world, sum_over_ranks)
            self.recorder.write_replaced(listing, replaced)
            check_replaced(listing, self.meter.replaced)
        for line in steps:
            place = f"at step {line.step} (learning rate {line.learning_rate:.4g})"
            check_loss(line.loss, place, is_first=0 < self.first_step == line.step - 1)

    def stop_is_asked(self, from_rank_0: Collective) -> bool:
        """Whether somebody has asked for the end, by a file in the run folder."""
        # Rank 0 alone looks, so that all learn of it at the same step, however late their file
        # systems show it.
        found = self.world.is_first and (self.folder / STOP_FILE).exists()
        return bool(from_rank_0(torch.tensor([found], dtype=torch.uint8)))

    def validate(
        self, parts: Trainables, sum_over_ranks: Collective, from_rank_0: Collective
    ) -> dict[str, float]:
        """The figures of the better of model and moving average, on all validation images."""
        self.meter.energy.stop()
        evaluations = validate(
            parts, self.config, self.world, self.data, self.device, self.workers,
            sum_over_ranks, from_rank_0,
        )  # fmt: skip
        step = self.progress.step
        is_first = step == self.first_step and (step > 0 or self.config.evaluate)
        for one in evaluations:
            check_loss(means(one.sums)["loss"], f"of validation after step {step}", is_first)
        self.progress.train_seconds = self.meter.train_seconds
        return self.recorder.write_evaluations(self.epoch, evaluations)

    def keep_checkpoint(
        self,
        parts: Trainables,
        figures: dict[str, float],
        sum_over_ranks: Collective,
        from_rank_0: Collective,
    ) -> None:
        """Keep a checkpoint, as the best one if the last evaluation's `figures` are; UserError if
        the ranks' weights differ."""
        config, world, progress = self.config, self.world, self.progress
        align_batch_norm(parts.model, config, world, sum_over_ranks, from_rank_0)
        check_same_weights(parts.model, progress.step, world, sum_over_ranks)
        is_best = progress.take_best(figures)
        keep_checkpoint(
            parts, progress, config, world, self.data, self.folder, is_best, sum_over_ranks
        )

    def complete(
        self,
        model: nn.Module,
        figures: dict[str, float],
        sum_over_ranks: Collective,
        rung: RungFigures | None = None,
    ) -> None:
        """Training is over: write the summary, with the last evaluation's `figures`, and what a
        rung has measured of itself."""
        own = measure_usage(self.meter, self.world, model, self.device)
        used = convert(gather(asdict(own), self.world, sum_over_ranks), list[Usage])
        summary = summarize(self.environment, self.work, self.meter, figures, used, model)
        finish_checkpoint()
        self.recorder.close(replace(summary, rung=rung or RungFigures()))

    def interrupt(self) -> None:
        """Training was asked to stop: the record ends where another session may go on."""
        finish_checkpoint()
        self.recorder.stop()


def check_loss(loss: float, place: str, is_first: bool) -> None:
    """UserError, on all ranks alike, for a loss that is not finite; `is_first`: of weights with
    which this session began."""
    if not math.isfinite(loss):
        remedy = (
            "the weights that it began with are no good; take an earlier checkpoint"
            if is_first
            else "training has diverged; lower --base-lr, lengthen --warmup-epochs or set "
            "--clip-grad-norm"
        )
        raise UserError(f"the loss is {loss} {place}: {remedy}")
