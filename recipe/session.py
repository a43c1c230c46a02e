"""One session of a training, on each rank: its data, run folder, record, clocks and checkpoints.

The training loops (both train.py, and loop.py for the rungs in baselines/) make the steps. What
follows a step is the same for all of them, and is here.
"""

import math
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import torch
from msgspec import convert
from torch import nn

from recipe import errors, rank_forker, watch
from recipe.data.batches import Data, training_batches
from recipe.data.loading import Batch, InputMeter, check_replaced
from recipe.data.order import next_step, samples_per_step, training_end
from recipe.device import loader_workers, share_of_cores
from recipe.errors import EXIT_SAVED, UserError
from recipe.marks import marks
from recipe.meeting import own_addresses
from recipe.ranks import Ranks
from recipe.record.checkpoint import (
    contents_of,
    finish_checkpoint,
    keep_checkpoint,
    mark_best,
    not_finite,
    step_path,
)
from recipe.record.fingerprint import (
    check_same_training,
    check_same_weights,
    comparison_keys,
    describe,
    fingerprint,
)
from recipe.record.folder import STOP_FILE, open_run_folder
from recipe.record.kept_state import KeptState
from recipe.record.meter import StepMeter, Usage, measure_usage, straggler, summarize
from recipe.record.recorder import Recorder, Silence
from recipe.record.resume import go_back, repair_best, resume, steps_left_out
from recipe.record.schema import RungFigures, StepLine
from recipe.settings.config import Config
from recipe.training.batch_norm import align_batch_norm
from recipe.training.metrics import Sums, means, validate
from recipe.training.state import Progress, Trainables
from recipe.watch import expect_delay, expect_pause, is_asked_to_end, obey_signals
from recipe.world import World

LOOK_SECONDS = 1.0  # of training, between two checks for a stop


class Session:
    """A training from its start, or from a checkpoint, to its end or the next stop.

    `readers` is this rank's place among the ranks that read different images. Those are all ranks,
    except in a few rungs.
    """

    def __init__(
        self,
        engine: str,
        config: Config,
        ranks: Ranks,
        data: Data,
        device: torch.device,
        readers: World | None = None,
    ) -> None:
        self.engine, self.ranks, self.data, self.device = engine, ranks, data, device
        watch.begin("comparing settings and data with the other ranks'")
        self.world = world = ranks.world
        self.readers = readers or world
        keys = comparison_keys(engine, config, data, device)
        check_same_training(keys, device, ranks)
        # Each launcher binds ranks to cores and limits threads in its own way: compute the shares.
        rows = ranks.gather((world.host, sorted(os.sched_getaffinity(0)), [*own_addresses()]))
        self.places = [(host, cores) for host, cores, _ in rows]
        for rank, (host, _, addresses) in enumerate(rows):
            for address in addresses:
                watch.peers.setdefault(address, (host, []))[1].append(rank)
        cores = share_of_cores(self.places, world.rank)
        self.threads = config.threads or cores
        torch.set_num_threads(self.threads)
        self.workers = loader_workers(config, device, cores)
        for listing in (data.train, data.val):
            if world.is_first and listing is not None and listing.left_out:
                print(f"{listing.root}: {listing.left_out}", flush=True)
        self.config, self.progress, self.left_out = config, Progress(), list[tuple[int, int]]()
        self.train_input, self.val_input = InputMeter(), InputMeter()
        self._find_end()
        watch.begin("building the network")
        if config.resume is None:  # else the checkpoint says from which image
            self._read_on()  # the first batches are decoded while the network is built

    def resume(self, config: Config, parts: Trainables, lr_scale: float) -> None:
        """Open the run folder, and resume from a checkpoint if --resume gives one. `config` has the
        final settings, with --wire-format auto decided."""
        data, readers, ranks = self.data, self.readers, self.ranks
        self.config, self.lr_scale = config, lr_scale
        self.keeps_checkpoints = config.keep_checkpoints > 0 and not config.evaluate
        self.folder = open_run_folder(config, ranks, self.engine)
        can_keep = self.device.type == "cpu" and not config.use_adasum
        self.kept_state = (
            KeptState(parts.model, rank_forker.files) if can_keep and rank_forker.files else None
        )
        self.progress, was_kept = resume(parts, config, ranks, data, self.folder, self.kept_state)
        if was_kept:  # the last checkpoint may be old, or was lost before it was on disk
            self.keep_checkpoint(parts.unsharded())
        is_first, known = self.world.is_first, (-1.0, False)
        known = repair_best(config, self.folder, self.progress) if is_first else known
        # On the device, so that NCCL starts before the first step: a single worker of DDP sends
        # nothing else before its tenth step.
        values = torch.tensor(known, dtype=torch.float64, device=self.device)
        top1, lacks_evaluation = ranks.from_first(values).tolist()
        # What made the loss infinite or NaN stays left out, also with another --rollback.
        self.left_out = ranks.gather(steps_left_out(self.folder) if is_first else [])[0]
        self._find_end()
        start = self.progress.samples_seen
        # The epoch in which the last step began; after a resume the one in which the next begins.
        self.epoch = start // data.num_train - int(lacks_evaluation)
        self.is_complete = start == self.stop or self.is_good_enough({"top1": top1})
        self.lacks_evaluation = bool(lacks_evaluation)
        self.work = fingerprint(
            config, readers, data, parts.model, self.device, self.threads, lr_scale
        )
        self.meter = StepMeter(
            config,
            readers,
            self.device,
            data,
            self.progress,
            self.train_input,
            self.val_input,
        )
        if config.resume is not None:
            self._read_on()

    def _read_on(self) -> None:
        """Read batches from the current position on; loader workers start at once."""
        self.batches: Iterator[Batch] = iter(())  # ends earlier workers, and frees shared memory
        self.first_step, start = self.progress.step, self.progress.samples_seen
        self.batches = training_batches(
            self.data,
            self.config,
            self.readers,
            self.device,
            self.workers,
            start,
            self.stop,
            self.train_input,
            self.left_out,
        )

    def _find_end(self) -> None:
        """Find where training ends, once it is known where it begins and what is left out."""
        self._pass_over()
        self.last_step, self.stop = training_end(
            self.config,
            self.readers,
            self.data.num_train,
            self.progress.step,
            self.progress.samples_seen,
            self.left_out,
        )

    def _pass_over(self) -> None:
        """Count the left-out images at this position as seen."""
        self.progress.samples_seen = next_step(
            self.config,
            self.readers,
            self.data.num_train,
            self.progress.samples_seen,
            self.left_out,
        )

    def open_record(self, transport: str) -> None:
        """Write to the run folder and the console what is trained, and on what; `transport` carries
        the gradients."""
        self.environment = describe(
            self.world, self.engine, transport, self.device, self.threads, self.places
        )
        self._open_record()

    def _open_record(self) -> None:
        world = replace(self.world, size=self.readers.size)  # a step has the readers' images
        kind: Any = Recorder if self.world.is_first else Silence
        self.recorder: Recorder = kind(
            self.config,
            world,
            self.data,
            self.folder,
            self.progress,
            self.environment,
            self.lr_scale,
        )

    def begin_training(self, parts: Trainables) -> bool:
        """Evaluate if an evaluation was interrupted or the training is complete, start the clocks,
        and return whether there is anything to train."""
        self.stopped, self.figures, self.trained = False, dict[str, float](), parts
        if self.is_complete or self.lacks_evaluation:
            self.trained = parts.unsharded()
            self.validate(self.trained)
        watch.begin("compiling the network" if self.config.compile else "making the first step")
        self.recorder.console.begin_training(self.last_step)
        self.meter.start()
        self.next_look, self.saved_at = self.first_step, time.monotonic()
        self.looked_at = self.first_step, time.perf_counter()
        if self.keeps_checkpoints:
            obey_signals()
        if self.kept_state:
            self._survive_losses(self.kept_state, parts)
        return self._goes_on(parts)

    def _survive_losses(self, kept_state: KeptState, parts: Trainables) -> None:
        """When another rank is lost, keep the state after the last complete step. Ranks notice a
        loss when they exchange data: before an update, or while they count the step."""
        network, progress = parts.fp16_model or parts.model, self.progress
        self.is_resumable = True

        def keep() -> None:
            if self.is_resumable:
                kept_state.take_statistics(progress.step)
                contents = contents_of(parts, progress, self.config, self.data)
                if not not_finite(contents):  # else the last checkpoint counts
                    kept_state.keep(contents | {"world_size": self.world.size}, progress.step)

        def note(*_: object) -> None:
            if network.training:
                kept_state.note_statistics(progress.step + 1)

        errors.keep_state = keep
        kept_state.note_statistics(progress.step)
        network.register_forward_hook(note)

    def _goes_on(self, parts: Trainables) -> bool:
        """Return whether there is more to train. If so, release the result of `parts.unsharded()`,
        which may be a copy."""
        goes_on = not (self.is_complete or self.stopped)
        self.trained = parts if goes_on else self.trained
        return goes_on

    def end_step(self, parts: Trainables, sums: Sums, learning_rate: float) -> bool:
        """Do all that follows a step, and return whether training continues. `sums` are this rank's
        metrics of the step.

        All ranks do this in the same order: count the step, look for signals, write the record,
        roll back if the loss is not finite, compare the weights, save a checkpoint, evaluate.
        UserError if any of this finds a problem.
        """
        epoch_ended = self.count_step(sums, learning_rate, parts.scaler.skipped_steps)
        is_last = self.progress.samples_seen >= self.stop
        self.is_resumable = not (epoch_ended or is_last)  # until record and checkpoint are written
        stops, save = self.poll_stop_and_save()
        save = save or epoch_ended or is_last
        if bad_step := self.write_steps(now=save):
            self.roll_back(parts, bad_step)
            return True
        self.check_weights(parts.model)
        self.is_resumable = not save  # while some ranks may have aligned statistics, others not
        self.stopped, self.is_complete = stops, is_last
        if epoch_ended:
            self.recorder.write_epoch(self.epoch)
        if save:
            expect_pause()
            self.trained = parts.unsharded()
            self.keep_checkpoint(self.trained)
            self.is_resumable = True
        if (epoch_ended or is_last) and not stops:
            self.validate(self.trained)
        return self._goes_on(parts)

    def count_step(self, sums: Sums, learning_rate: float, skipped_steps: int) -> bool:
        """Count a step, and return whether an epoch has ended. `sums` are this rank's metrics of
        the step.

        UserError if the last checkpoint could not be written.
        """
        progress, num_train = self.progress, self.data.num_train
        self.epoch = progress.samples_seen // num_train
        step_samples = samples_per_step(self.config, self.readers, self.epoch)
        watch.begin("")
        marks.has_made_step = True
        if self.kept_state:
            self.kept_state.forget()
        progress.end_step(step_samples, self.meter.total_seconds, skipped_steps)
        self.meter.end_step(sums, learning_rate)
        self._pass_over()
        self.recorder.end_step()
        finish_checkpoint(timeout=0)
        return progress.samples_seen // num_train > self.epoch

    def write_steps(self, now: bool) -> StepLine | None:
        """Write the steps since the last call: the first one, then every --log-interval steps, or
        `now`. On a GPU they are written one interval later, unless `now`. Return the first of them
        whose loss is not finite, if --rollback allows another rollback; otherwise raise UserError
        for it."""
        # What the first write costs, such as loading TensorBoard, then belongs to the start.
        now = now or self.progress.step == self.first_step + 1
        if not now and self.progress.step % self.config.log_interval:
            return None
        steps = self.meter.take_steps(self.ranks, now)
        if steps:
            self.recorder.write_steps(steps)
        if self.config.bad_images == "replace" and (listing := self.data.train) is not None:
            replaced = self.meter.take_replaced(self.ranks)
            self.recorder.write_replaced(listing, replaced)
            check_replaced(listing, self.meter.replaced)
        bad = next((line for line in steps if not math.isfinite(line.loss)), None)
        if bad is not None:  # a resume needs this if the run is lost during the rollback
            self.recorder.event("diverged", step=bad.step)
        if bad is not None and len(self.left_out) >= self.config.rollback:
            place = f"at step {bad.step} (learning rate {bad.learning_rate:.4g})"
            check_loss(bad.loss, place, 0 < self.first_step == bad.step - 1)
        return bad

    def roll_back(self, parts: Trainables, bad: StepLine) -> None:
        """Go back to a checkpoint from before the step whose loss is not finite, and leave that
        step's images out from now on. UserError if there is none."""
        expect_delay()  # for rank 0's disk, and then for the start of loader workers
        finish_checkpoint()
        self.is_resumable = False
        self.recorder.close_files()
        earlier = go_back(parts, self.config, self.ranks, self.data, self.folder, bad.step)
        vars(self.progress).update(vars(earlier) | {"total_seconds": self.meter.total_seconds})
        self.meter.coming.clear()  # the steps after the bad one
        self.left_out.append((bad.samples_seen - bad.images, bad.images))
        if self.kept_state:
            self.kept_state.note_statistics(self.progress.step)
        self._find_end()
        self._read_on()
        self._open_record()
        self.recorder.say(
            f"the loss of step {bad.step} was {bad.loss}: back at step {self.progress.step}, "
            f"without the images of that step; rollback {len(self.left_out)} of "
            f"{self.config.rollback}"
        )
        self.recorder.event("rollback", left_out=self.left_out)
        self.recorder.console.begin_training(self.last_step)
        self.next_look = self.first_step
        self.is_resumable = True

    def poll_stop_and_save(self) -> tuple[bool, bool]:
        """Return whether the run stops here, because a rank got a signal or rank 0 finds the stop
        file; and whether it saves a checkpoint here, because it stops or --checkpoint-steps or
        --checkpoint-minutes is due.

        All ranks decide this together at the same step, about every LOOK_SECONDS of training. Rank
        0 decides how many steps that is.
        """
        step, config, is_first = self.progress.step, self.config, self.world.is_first
        is_due = step % (config.checkpoint_steps or math.inf) == 0
        if step < self.next_look:
            return False, is_due
        has_stop_file = is_first and (self.folder / STOP_FILE).exists()
        minutes = (time.monotonic() - self.saved_at) / 60 if self.keeps_checkpoints else 0.0
        # Wall-clock time, since ranks may wait for each other outside the measured phases.
        (last_look, then), self.looked_at = self.looked_at, (step, time.perf_counter())
        pace = LOOK_SECONDS * (step - last_look) / (self.looked_at[1] - then or math.inf)
        votes = torch.tensor(
            [
                is_asked_to_end() or has_stop_file,
                is_first and minutes >= (config.checkpoint_minutes or math.inf),
                max(1, int(pace)) if is_first else 0,
            ]
        )
        stops, saves, steps = self.ranks.sum(votes).tolist()
        self.next_look = step + steps
        return bool(stops), bool(stops or saves or is_due)

    def validate(self, parts: Trainables) -> None:
        """Evaluate the model and its moving average on all validation images, and keep the better
        one's `figures`, which may complete the training."""
        self.meter.energy.stop()
        watch.begin("")
        evaluations = validate(
            parts,
            self.config,
            self.ranks,
            self.data,
            self.device,
            self.workers,
            self.val_input,
            self.recorder.console.show_evaluation,
        )
        step = self.progress.step
        is_session_start = step == self.first_step and (step > 0 or self.config.evaluate)
        figures = [means(one.sums) for one in evaluations]
        for loss in (one["loss"] for one in figures):
            if not math.isfinite(loss):
                self.recorder.event("diverged")
            check_loss(loss, f"in the validation after step {step}", is_session_start)
        self.progress.total_seconds = self.meter.total_seconds
        is_repeated = is_session_start and not (self.config.evaluate or self.lacks_evaluation)
        self.recorder.write_evaluations(self.epoch, evaluations, is_repeated)
        self.figures = max(figures, key=lambda one: one["top1"], default={})
        is_best = self.progress.take_best(self.figures)
        if is_best and self.world.is_first and self.keeps_checkpoints:
            mark_best(step_path(self.folder / "checkpoints", step))
        self.is_complete = self.is_complete or self.is_good_enough(self.figures)

    def is_good_enough(self, figures: dict[str, float]) -> bool:
        """Return whether an evaluation's figures reach --desired-acc."""
        return figures.get("top1", 0.0) >= (self.config.desired_acc or math.inf)

    def check_weights(self, model: nn.Module) -> None:
        """Every --weight-check-steps, raise UserError if the ranks' weights differ."""
        step = self.progress.step
        if self.config.weight_check_steps and step % self.config.weight_check_steps == 0:
            check_same_weights(model, step, self.ranks)

    def keep_checkpoint(self, parts: Trainables) -> None:
        """Save a checkpoint; UserError if the ranks' weights differ. Call it before the evaluation,
        which may fail or be interrupted."""
        config, ranks, progress = self.config, self.ranks, self.progress
        finish_checkpoint()  # here: the watch expects a pause, and the other ranks wait just below
        align_batch_norm(parts.model, config, ranks)
        if self.kept_state:
            self.kept_state.note_statistics(progress.step)
        check_same_weights(parts.model, progress.step, ranks)
        if self.keeps_checkpoints:
            self.saved_at = time.monotonic()
            keep_checkpoint(parts, progress, config, ranks, self.data, self.folder)

    def end(self, rung: RungFigures | None = None) -> int:
        """End the record, and return the exit code: EXIT_SAVED if a signal asked for the stop.

        A complete training gets a summary, with the last evaluation's figures and a rung's own
        measurements. One that was asked to stop gets none, since it can be resumed.
        """
        finish_checkpoint()
        marks.is_complete = True  # all is on disk: whatever happens now, no rank is replaced
        errors.keep_state = None  # it refers to this session, and loader workers end with that
        model = self.trained.model
        if self.stopped:
            # All ranks together: a launcher that sees one rank end like this may kill the others.
            asked_by_file = self.ranks.sum(torch.tensor([int(self.recorder.stop() or 0)]))
            return 0 if asked_by_file.item() else EXIT_SAVED
        usage = measure_usage(self.meter, self.world, model, self.device)
        used = convert(self.ranks.gather(asdict(usage)), list[Usage])
        summary = summarize(self.environment, self.work, self.meter, self.figures, used, model)
        if self.readers.size == self.world.size and (slow := straggler(summary.ranks)):
            self.recorder.say(slow)
        self.recorder.close(replace(summary, rung=rung or RungFigures()))
        return 0


def check_loss(loss: float, place: str, is_session_start: bool) -> None:
    """Raise UserError, on all ranks alike, if a loss is not finite. `is_session_start`: this
    session began with the weights of this loss."""
    remedy = (
        "the weights that it began with are bad; use an earlier checkpoint"
        if is_session_start
        else "training has diverged; lower --base-lr, lengthen --warmup-epochs or set "
        "--clip-grad-norm"
    )
    if not math.isfinite(loss):
        raise UserError(f"the loss is {loss} {place}: {remedy}")
