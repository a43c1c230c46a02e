"""One session of a training, on each rank: its run folder, record, clocks and checkpoints.

The training loops (both train.py, and loop.py for the rungs in baselines/) make the steps. What
follows a step is the same for all of them, and is here.
"""

import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from msgspec import convert

from recipe import rank_forker, watch
from recipe.data.batches import BatchReader
from recipe.data.loading import check_replaced
from recipe.data.order import samples_per_step
from recipe.device import loader_workers, share_of_cores
from recipe.errors import EXIT_SAVED, FAILING, UserError, is_lost_peer
from recipe.gpu_sharing import ranks_per_gpu
from recipe.marks import marks
from recipe.ranks import Ranks
from recipe.record.checkpoint import (
    contents_of,
    finish_checkpoint,
    keep_checkpoint,
    mark_best,
    not_finite,
    step_path,
)
from recipe.record.fingerprint import check_same_weights, describe, fingerprint
from recipe.record.folder import STOP_FILE, open_run_folder
from recipe.record.kept_state import KeptState
from recipe.record.meter import StepMeter, Usage, measure_usage, straggler, summarize
from recipe.record.recorder import Recorder, Silence
from recipe.record.resume import go_back, repair_best, resume, steps_left_out
from recipe.record.schema import RungFigures, StepLine
from recipe.rendezvous import own_addresses
from recipe.settings.config import Config
from recipe.training.batch_norm import align_batch_norm
from recipe.training.metrics import Sums, validate
from recipe.training.state import Trainables
from recipe.watch import expect_delay, expect_pause, is_asked_to_end, obey_signals

LOOK_SECONDS = 1.0  # of training, between two checks for a stop


@dataclass(frozen=True)
class HostShare:
    """A rank's share of its host: CPU threads, and loader workers; and who has what."""

    threads: int
    workers: int
    places: tuple[tuple[str, tuple[int, ...]], ...]  # each rank's host and possible cores
    ranks_per_gpu: int | None = None  # on the GPU that most ranks share; None: none is shared

    def measured(self, devices: Sequence[torch.device]) -> Sequence[torch.device]:
        """Return those of this rank's `devices` whose energy is its own. The counters cover whole
        GPUs: each of the ranks that share one would count all of it."""
        return () if self.ranks_per_gpu else devices


def share_host(config: Config, device: torch.device, ranks: Ranks) -> HostShare:
    """Divide each host's cores among its ranks, and return this rank's share; torch uses it from
    now on. Each launcher binds ranks to cores and limits threads in its own way. UserError, on all
    ranks alike, if two have the same GPU, unless --share-gpu is given."""
    cores_here, on_gpu = sorted(os.sched_getaffinity(0)), device.type == "cuda"
    gpu = str(torch.cuda.get_device_properties(device).uuid) if on_gpu else ""
    rows = ranks.gather((ranks.world.host, cores_here, [*own_addresses()], gpu))
    hosts, cores, addresses, gpus = zip(*rows, strict=True)
    for rank, of_rank in enumerate(addresses):
        for address in of_rank:
            watch.peers.setdefault(address, (hosts[rank], []))[1].append(rank)
    places = tuple(zip(hosts, map(tuple, cores), strict=True))
    num_cores = share_of_cores(places, ranks.world.rank)
    share = HostShare(
        config.threads or num_cores,
        loader_workers(config, device, num_cores),
        places,
        ranks_per_gpu(gpus, hosts, config.share_gpu),
    )
    torch.set_num_threads(share.threads)
    return share


class Session:
    """A training from its start, or from a checkpoint, to its end or the next stop."""

    def __init__(
        self,
        engine: str,
        config: Config,
        ranks: Ranks,
        reader: BatchReader,
        share: HostShare,
        parts: Trainables,
        lr_scale: float,
    ) -> None:
        """Open the run folder, and resume from a checkpoint if --resume gives one. With --resume
        `reader` begins here, else it has begun."""
        self.engine, self.config, self.ranks, self.reader = engine, config, ranks, reader
        self.share, self.parts, self.lr_scale = share, parts, lr_scale
        self.folder = open_run_folder(config, ranks, engine)
        can_keep = reader.device.type == "cpu" and not config.use_adasum
        self.kept_state = (
            KeptState(parts.model, rank_forker.files) if can_keep and rank_forker.files else None
        )
        self.progress, was_kept = resume(
            parts, config, ranks, reader.data, self.folder, self.kept_state
        )
        if was_kept:  # the last checkpoint may be old, or was lost before it was on disk
            self.keep_checkpoint(parts.unsharded())
        known = -1.0, False
        if ranks.world.is_first:
            known = repair_best(config, self.folder, self.progress)
        # On the device, so that NCCL starts before the first step: a single worker of DDP sends
        # nothing else before its tenth step.
        values = torch.tensor(known, dtype=torch.float64, device=reader.device)
        top1, lacks_evaluation = ranks.from_first(values).tolist()
        self.lacks_evaluation = bool(lacks_evaluation)
        if config.resume is not None:
            # What made the loss infinite or NaN stays left out, also with another --rollback.
            left_out = steps_left_out(self.folder) if ranks.world.is_first else []
            reader.left_out = ranks.gather(left_out)[0]
            self._read_on()
        # The epoch in which the last step began; after a resume the one in which the next begins.
        self.epoch = self.progress.samples_seen // reader.data.num_train - self.lacks_evaluation
        self.figures: dict[str, float] = {}  # of the last evaluation
        is_over = self.progress.samples_seen == reader.stop
        self.is_complete, self.is_stopped = is_over or self.is_good_enough(top1), False
        self.fingerprint = fingerprint(
            config, reader.world, reader.data, parts.model, reader.device, share.threads, lr_scale
        )
        self.meter = StepMeter(
            config,
            reader.world,
            reader.device,
            reader.data,
            self.progress,
            reader.meter,
            share.measured(parts.devices or [reader.device]),
        )

    def _read_on(self) -> None:
        """Read batches from the current position on, behind what is left out there."""
        self.progress.samples_seen = self.reader.next_step(self.progress.samples_seen)
        self.reader.begin(self.progress.step, self.progress.samples_seen)

    def open_record(self, transport: str) -> None:
        """Write to the run folder and the console what is trained, and on what; `transport` carries
        the gradients."""
        self.environment = describe(
            self.ranks.world,
            self.engine,
            transport,
            self.reader.device,
            self.share.threads,
            self.share.places,
            self.share.ranks_per_gpu,
        )
        self._open_record()

    def _open_record(self) -> None:
        world = self.ranks.world
        kind: Any = Recorder if world.is_first else Silence
        self.recorder: Recorder = kind(
            self.config,
            replace(world, size=self.reader.world.size),  # a step has the readers' images
            self.reader.data,
            self.folder,
            self.progress,
            self.environment,
            self.lr_scale,
        )

    @property
    def keeps_checkpoints(self) -> bool:
        """Whether this session writes checkpoints."""
        return self.config.keep_checkpoints > 0 and not self.config.evaluate

    @property
    def goes_on(self) -> bool:
        """Whether there is more to train."""
        return not (self.is_complete or self.is_stopped)

    @contextmanager
    def training(self) -> Iterator[None]:
        """Evaluate if an evaluation was interrupted or the training is complete, and start the
        clocks. The body trains while `goes_on`. If another rank is lost meanwhile, keep the state
        after the last complete step."""
        self.trained = self.parts
        if self.is_complete or self.lacks_evaluation:
            self.trained = self.parts.unsharded()
            self.validate()
            self._release_trained()
        watch.begin("compiling the network" if self.config.compile else "making the first step")
        self.recorder.console.begin_training(self.reader.last_step)
        self.meter.start()
        self.next_look, self.saved_at = self.reader.first_step, time.monotonic()
        self.looked_at = self.next_look, time.perf_counter()
        if self.keeps_checkpoints:
            obey_signals()
        if self.kept_state:
            self._note_statistics(self.kept_state)
        self.is_resumable = True  # from the state after the last complete step
        try:
            yield
        except Exception as error:
            # Ranks notice a loss when they exchange data: before an update, or while they count
            # the step.
            if self.kept_state and is_lost_peer(error):
                FAILING.set()
                marks.is_leaving = True
                with suppress(Exception):  # if it fails, the last checkpoint counts
                    self._keep_state(self.kept_state)
            raise

    def _note_statistics(self, kept_state: KeptState) -> None:
        """Note BatchNorm's statistics now, and after each forward pass of a step."""
        # Not `self`: the network would keep the session alive, and so its loader workers.
        network, progress = self.parts.fp16_model or self.parts.model, self.progress

        def note(*_: object) -> None:
            if network.training:
                kept_state.note_statistics(progress.step + 1)

        kept_state.note_statistics(progress.step)
        network.register_forward_hook(note)

    def _keep_state(self, kept_state: KeptState) -> None:
        if self.is_resumable:
            kept_state.take_statistics(self.progress.step)
            contents = contents_of(
                self.parts, self.progress, self.config, self.reader.data, self.ranks.world.size
            )
            if not not_finite(contents):  # else the last checkpoint counts
                kept_state.keep(contents, self.progress.step)

    def end_step(self, sums: Sums, learning_rate: float) -> None:
        """Do all that follows a step; `goes_on` then says whether training continues. `sums` are
        this rank's metrics of the step.

        All ranks do this in the same order: count the step, look for signals, write the record,
        roll back if the loss is not finite, compare the weights, save a checkpoint, evaluate.
        UserError if any of this finds a problem.
        """
        epoch_ended = self.count_step(sums, learning_rate, self.parts.scaler.skipped_steps)
        is_last = self.progress.samples_seen >= self.reader.stop
        self.is_resumable = not (epoch_ended or is_last)  # until record and checkpoint are written
        stops, save = self.poll_stop_and_save()
        save = save or epoch_ended or is_last
        bad_step = self.write_steps(now=save)
        if bad_step is not None:
            self.roll_back(bad_step)
            return
        self.check_weights()
        self.is_resumable = not save  # while some ranks may have aligned statistics, others not
        self.is_stopped, self.is_complete = stops, is_last
        if epoch_ended:
            self.recorder.write_epoch(self.epoch)
        if save:
            expect_pause()
            self.trained = self.parts.unsharded()
            self.keep_checkpoint(self.trained)
            self.is_resumable = True
            if (epoch_ended or is_last) and not stops:
                self.validate()
            self._release_trained()

    def count_step(self, sums: Sums, learning_rate: float, skipped_steps: int) -> bool:
        """Count a step, and return whether an epoch has ended. `sums` are this rank's metrics of
        the step.

        UserError if the last checkpoint could not be written.
        """
        progress, num_train = self.progress, self.reader.data.num_train
        self.epoch = progress.samples_seen // num_train
        step_samples = samples_per_step(self.config, self.reader.world, self.epoch)
        watch.begin("")
        marks.has_made_step = True
        if self.kept_state:
            self.kept_state.forget()
        progress.end_step(step_samples, self.meter.total_seconds, skipped_steps)
        self.meter.end_step(sums, learning_rate)
        progress.samples_seen = self.reader.next_step(progress.samples_seen)
        self.recorder.end_step()
        finish_checkpoint(timeout=0)
        return progress.samples_seen // num_train > self.epoch

    def poll_stop_and_save(self) -> tuple[bool, bool]:
        """Return whether the run stops here, because a rank got a signal or rank 0 finds the stop
        file; and whether it saves a checkpoint here, because it stops or --checkpoint-steps or
        --checkpoint-minutes is due.

        All ranks decide this together at the same step, about every LOOK_SECONDS of training. Rank
        0 decides how many steps that is.
        """
        step, config, is_first = self.progress.step, self.config, self.ranks.world.is_first
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

    def write_steps(self, now: bool) -> StepLine | None:
        """Write the steps since the last call: the first one, then every --log-interval steps, or
        `now`. On a GPU they are written one interval later, unless `now`. Return the first of them
        whose loss is not finite, if --rollback allows another rollback; otherwise raise UserError
        for it."""
        # What the first write costs, such as loading TensorBoard, then belongs to the start.
        now = now or self.progress.step == self.reader.first_step + 1
        if not now and self.progress.step % self.config.log_interval:
            return None
        steps = self.meter.take_steps(self.ranks, now)
        if steps:
            self.recorder.write_steps(steps)
        if self.config.bad_images == "replace" and (listing := self.reader.data.train) is not None:
            replaced = self.meter.take_replaced(self.ranks)
            self.recorder.write_replaced(listing, replaced)
            check_replaced(listing, self.meter.replaced)
        bad = next((line for line in steps if not math.isfinite(line.loss)), None)
        if bad is not None:  # a resume needs this if the run is lost during the rollback
            self.recorder.event("diverged", step=bad.step)
        if bad is not None and len(self.reader.left_out) >= self.config.rollback:
            place = f"at step {bad.step} (learning rate {bad.learning_rate:.4g})"
            check_loss(bad.loss, place, 0 < self.reader.first_step == bad.step - 1)
        return bad

    def roll_back(self, bad: StepLine) -> None:
        """Go back to a checkpoint from before the step whose loss is not finite, and leave that
        step's images out from now on. UserError if there is none."""
        expect_delay()  # for rank 0's disk, and then for the start of loader workers
        finish_checkpoint()
        self.is_resumable = False
        self.recorder.close_files()
        data, left_out = self.reader.data, self.reader.left_out
        earlier = go_back(self.parts, self.config, self.ranks, data, self.folder, bad.step)
        vars(self.progress).update(vars(earlier) | {"total_seconds": self.meter.total_seconds})
        self.meter.coming.clear()  # the steps after the bad one
        left_out.append((bad.samples_seen - bad.images, bad.images))
        if self.kept_state:
            self.kept_state.note_statistics(self.progress.step)
        self._read_on()
        self._open_record()
        self.recorder.say(
            f"the loss of step {bad.step} was {bad.loss}: back at step {self.progress.step}, "
            f"without the images of that step; rollback {len(left_out)} of "
            f"{self.config.rollback}"
        )
        self.recorder.event("rollback", left_out=left_out)
        self.recorder.console.begin_training(self.reader.last_step)
        self.next_look = self.reader.first_step
        self.is_resumable = True

    def check_weights(self) -> None:
        """Every --weight-check-steps, raise UserError if the ranks' weights differ."""
        step = self.progress.step
        if self.config.weight_check_steps and step % self.config.weight_check_steps == 0:
            check_same_weights(self.parts.model, step, self.ranks)

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
            keep_checkpoint(parts, progress, config, ranks, self.reader.data, self.folder)

    def validate(self) -> None:
        """Evaluate what was trained, and its moving average, on all validation images, and keep the
        better one's `figures`, which may complete the training."""
        self.meter.energy.stop()
        watch.begin("")
        evaluations = validate(
            self.trained,
            self.config,
            self.ranks,
            self.reader.data,
            self.reader.device,
            self.share.workers,
            self.meter.val_input,
            self.recorder.console.show_evaluation,
        )
        step = self.progress.step
        is_session_start = step == self.reader.first_step and (step > 0 or self.config.evaluate)
        for evaluation in evaluations:
            loss = evaluation.figures["loss"]
            if not math.isfinite(loss):
                self.recorder.event("diverged")
            check_loss(loss, f"in the validation after step {step}", is_session_start)
        self.progress.total_seconds = self.meter.total_seconds
        is_repeated = is_session_start and not (self.config.evaluate or self.lacks_evaluation)
        self.recorder.write_evaluations(self.epoch, evaluations, is_repeated)
        figures = [evaluation.figures for evaluation in evaluations]
        self.figures = max(figures, key=lambda values: values["top1"], default={})
        top1 = self.figures.get("top1", -1.0)
        is_best = self.progress.take_best(top1)
        if is_best and self.ranks.world.is_first and self.keeps_checkpoints:
            mark_best(step_path(self.folder / "checkpoints", step))
        self.is_complete = self.is_complete or self.is_good_enough(top1)

    def is_good_enough(self, top1: float) -> bool:
        """Return whether an evaluation's top-1 reaches --desired-acc."""
        return top1 >= (self.config.desired_acc or math.inf)

    def _release_trained(self) -> None:
        """Release what was evaluated and saved, which may be a copy, if training continues."""
        if self.goes_on:
            self.trained = self.parts

    def end(self, rung: RungFigures | None = None) -> int:
        """End the record, and return the exit code: EXIT_SAVED if a signal asked for the stop.

        A complete training gets a summary, with the last evaluation's figures and a rung's own
        measurements. One that was asked to stop gets none, since it can be resumed.
        """
        finish_checkpoint()
        marks.is_complete = True  # all is on disk: whatever happens now, no rank is replaced
        world, model = self.ranks.world, self.trained.model
        if self.is_stopped:
            # All ranks together: a launcher that sees one rank end like this may kill the others.
            asked_by_file = self.ranks.sum(torch.tensor([int(self.recorder.stop() or 0)]))
            return 0 if asked_by_file.item() else EXIT_SAVED
        usage = measure_usage(self.meter, world, model, self.reader.device)
        used = convert(self.ranks.gather(asdict(usage)), list[Usage])
        summary = summarize(
            self.environment, self.fingerprint, self.meter, self.figures, used, model
        )
        if self.reader.world.size == world.size and (slow := straggler(summary.ranks)):
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
