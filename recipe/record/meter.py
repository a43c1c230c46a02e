"""Measures a session's steps (phases, metrics, throughput, input, energy) and summarises them."""

import math
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import psutil
import torch
from torch import nn

from recipe import watch
from recipe.data.batches import Data
from recipe.data.loading import InputMeter
from recipe.device import cpu_seconds, forget_peak_memory, peak_memory_bytes
from recipe.errors import UserError
from recipe.ranks import Ranks
from recipe.record.energy import EnergyMeter, EnergyUse, energy_summary
from recipe.record.fingerprint import ranks_by_value, weights_sha256
from recipe.record.folder import utc_now
from recipe.record.schema import (
    PHASES,
    WARM_UP_STEPS,
    Environment,
    Input,
    Phases,
    RankUsage,
    StepLine,
    Summary,
    SuspectImages,
)
from recipe.settings.config import Config
from recipe.settings.flags import WIRE_FORMATS
from recipe.training.metrics import Sums, means
from recipe.training.state import Progress, working_copy
from recipe.world import World

Laps = list[tuple[str, Any, Any]]  # of a step: phase, begin, end


class StepClock:
    """Measures steps and their phases without stalling the device: with CUDA events on a GPU, with
    the system's clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.on_cuda = device.type == "cuda"
        self.laps: Laps = []  # of the step under way
        self.ended: Laps = []  # of the last complete step
        self.restart()

    def now(self) -> Any:
        """Return this moment; on CUDA, when the device has done all work that it has so far."""
        if not self.on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def restart(self) -> None:
        """Leave out what happened since the last step, such as an evaluation or a checkpoint."""
        self.last = self.now()

    def lap(self, phase: str) -> None:
        """End a phase that began where the last one ended. A step may repeat a phase."""
        now = self.now()
        self.laps.append((phase, self.last, now))
        self.last = now

    def end_step(self) -> Laps:
        """End the step, and return its laps."""
        self.ended, self.laps = self.laps, []
        return self.ended

    def wait_for(self, moment: Any) -> None:
        """Wait until the device has passed this moment."""
        if self.on_cuda:
            moment.synchronize()

    def seconds(self, laps: Laps) -> dict[str, float]:
        """Return each phase's seconds in these laps, which a CUDA device must have passed."""
        seconds = dict.fromkeys(PHASES, 0.0)
        for phase, begin, end in laps:
            seconds[phase] += begin.elapsed_time(end) / 1000 if self.on_cuda else end - begin
        return seconds


class PhaseSums:
    """Adds up the phases of steps."""

    def __init__(self) -> None:
        self.seconds, self.images, self.steps = Counter[str](), 0, 0

    def add(self, seconds: dict[str, float], images: int) -> None:
        """Count one step."""
        self.seconds.update(seconds)
        self.images, self.steps = self.images + images, self.steps + 1

    @property
    def total_seconds(self) -> float:
        """The seconds of all steps together."""
        return float(self.seconds.total())

    @property
    def images_per_second(self) -> float | None:
        """Throughput of all ranks together; None if there was no step."""
        return self.images / self.total_seconds if self.images else None

    def means(self) -> Phases:
        """Return this rank's mean seconds per step so far: of the phases, and their sum."""
        if not self.steps:
            return Phases()
        seconds = {f"{phase}_seconds": self.seconds[phase] / self.steps for phase in PHASES}
        return Phases(steps=self.steps, step_seconds=sum(seconds.values()), **seconds)


class EndedStep(NamedTuple):
    """A step of this rank whose metrics are still to be taken."""

    sums: Sums
    learning_rate: float
    step: int
    samples_seen: int
    laps: Laps
    is_warm: bool  # it counts for throughput and phases


class StepMeter:
    """Measures this session's steps; sums of metrics stay on the device until they are taken.
    `devices`: those whose energy is this rank's.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        device: torch.device,
        data: Data,
        progress: Progress,
        train_input: InputMeter | None = None,
        devices: Sequence[torch.device] = (),
    ) -> None:
        self.config, self.data, self.progress = config, data, progress
        self.earlier_seconds = progress.total_seconds
        self.clock = StepClock(device)
        self.reads_later = device.type == "cuda"
        self.lap = self.clock.lap  # ends a phase of the step, one of PHASES
        self.ended_steps = 0  # also those that a rollback has undone
        self.pending: list[EndedStep] = []
        # On the way to the host: this rank's sums, the moment when they arrive, and their steps.
        self.coming: list[tuple[Sums, Any, list[EndedStep]]] = []
        self.made = PhaseSums()  # of all steps that were taken, also those of a warm-up
        self.phases = PhaseSums()
        self.train_input, self.val_input = train_input or InputMeter(), InputMeter()
        self.replaced: dict[int, str] = {}  # why images were bad, by index, on any rank
        self.energy = EnergyMeter(devices, world.local_rank)
        self.warm_up_seconds = self.wall_seconds = 0.0
        self.sends_for_host = world.local_rank == 0
        self.started = time.perf_counter()
        watch.whereabouts = self.whereabouts

    def whereabouts(self) -> str:
        """Return, in words, where this rank is: the step, and its last complete phase."""
        laps, step = self.clock.laps, self.progress.step
        return f"in step {step + 1}, after {laps[-1][0]}" if laps else f"after step {step}"

    def start(self) -> None:
        """Start the clocks: training begins now."""
        self.started, self.cpu_seconds_before = time.perf_counter(), cpu_seconds()
        self.network_bytes_before = network_bytes()
        self.energy.start()
        self.clock.restart()

    def end_step(self, sums: Sums, learning_rate: float) -> None:
        """Count a step that has ended, after `progress` has counted it."""
        self.ended_steps += 1
        self.pending.append(
            EndedStep(
                sums,
                learning_rate,
                self.progress.step,
                self.progress.samples_seen,
                self.clock.end_step(),
                self.ended_steps > WARM_UP_STEPS,
            )
        )
        if self.ended_steps == WARM_UP_STEPS:
            sums.cpu()  # waits for the device
            self.energy.sample()
            self.warm_up_seconds = self.energy.seconds
            forget_peak_memory(sums.device)

    def take_steps(self, ranks: Ranks, now: bool) -> list[StepLine]:
        """Return the steps since the last call, with metrics over all ranks. On a GPU, unless
        `now`, they come one call later: waiting for the GPU's latest work would leave it idle."""
        rows = torch.stack([step.sums for step in self.pending]).to("cpu", non_blocking=True)
        self.coming.append((rows, self.clock.now(), self.pending))
        self.pending = []
        due = len(self.coming) - (self.reads_later and not now)
        taken, self.coming = self.coming[:due], self.coming[due:]
        lines = list[StepLine]()
        for rows, arrival, steps in taken:
            self.clock.wait_for(arrival)
            # In the CPU's memory: with Horovod the host would wait for an exchange on GPUs.
            lines += map(self._count, ranks.sum(rows), steps)
        self.energy.sample()
        self.wall_seconds = self.energy.seconds - self.warm_up_seconds
        return lines

    def take_replaced(self, ranks: Ranks) -> dict[int, str]:
        """Return the bad images that any rank has replaced since the last call, and no rank before
        it: why they were bad, by index."""
        rows = ranks.gather(list(self.train_input.replaced.items()))
        self.train_input.replaced.clear()
        new = {index: why for row in rows for index, why in row if index not in self.replaced}
        self.replaced |= new
        return new

    def _count(self, sums: Sums, step: EndedStep) -> StepLine:
        """Count a step, whose `sums` are over all ranks; return its line of the record."""
        phases = self.clock.seconds(step.laps)
        images, seconds = int(sums[3]), sum(phases.values())
        self.made.add(phases, images)
        if step.is_warm:
            self.phases.add(phases, images)
        return StepLine(
            epoch=(step.samples_seen - images) // self.data.num_train,
            step=step.step,
            samples_seen=step.samples_seen,
            **means(sums),
            learning_rate=step.learning_rate,
            seconds=seconds,
            **{f"{phase}_seconds": value for phase, value in phases.items()},
            images_per_second=images / seconds,
        )

    def restart(self) -> None:
        """Keep everything since the last step out of the next step's duration."""
        self.energy.start()
        self.clock.restart()

    @property
    def wall_images_per_second(self) -> float | None:
        """Throughput of all ranks together since the warm-up, by wall-clock time up to the last
        steps that were taken, without evaluations; None during the warm-up."""
        return self.phases.images / self.wall_seconds if self.phases.images else None

    @property
    def total_seconds(self) -> float:
        """The training clock: seconds since training began, evaluation and checkpoints included."""
        return self.earlier_seconds + time.perf_counter() - self.started

    @property
    def network_bytes(self) -> float:
        """Bytes that this host sent since training began; 0 on all but the host's first rank."""
        return (network_bytes() - self.network_bytes_before) * self.sends_for_host


def network_bytes() -> float:
    """Return the bytes that this host's network interfaces, including the loopback, have sent so
    far; NaN if the system does not report them."""
    with suppress(OSError):
        if counters := psutil.net_io_counters():
            return float(counters.bytes_sent)
    return math.nan


# -- All that a session measured: summary.json -----------------------------------------------------

MAX_NAMES = 100  # of suspect images for training, and for validation
STRAGGLES = 0.1  # a rank straggles if it is slower than the typical rank by this share of a step


@dataclass(frozen=True)
class Usage:
    """What a rank used, as it reports it to the other ranks; NaN where it was not measured."""

    rank: RankUsage
    energy: EnergyUse
    weights_sha256: str  # without BatchNorm's statistics, which may differ: see --batch-norm
    files: float
    bytes: float
    suspect_images: int
    network_bytes: float


def measure_usage(meter: StepMeter, world: World, model: nn.Module, device: torch.device) -> Usage:
    """Return what this rank used in its session."""
    read, reads_files = meter.train_input, meter.data.train is not None
    return Usage(
        rank=RankUsage(
            rank=world.rank,
            host=world.host,
            cpu_seconds=cpu_seconds() - meter.cpu_seconds_before,
            peak_memory_bytes=peak_memory_bytes(device),
            **vars(meter.phases.means()),
        ),
        energy=meter.energy.use(),
        weights_sha256=weights_sha256(model, buffers=False),
        files=read.files if reads_files else math.nan,
        bytes=read.bytes if reads_files else math.nan,
        suspect_images=len(read.suspects) + len(meter.val_input.suspects),
        network_bytes=meter.network_bytes,
    )


def summarize(
    environment: Environment,
    work: dict[str, Any],
    meter: StepMeter,
    figures: dict[str, float],
    used: Sequence[Usage],
    model: nn.Module,
) -> Summary:
    """Return the run's summary; `work` is its fingerprint, `used` what each rank used. UserError if
    the ranks ended with different weights."""
    refuse_different_weights(used)
    ranks = [usage.rank for usage in used]
    progress, images, steps = meter.progress, meter.made.images, meter.made.steps
    cpu = sum(rank.cpu_seconds for rank in ranks)
    sent = sum(usage.network_bytes for usage in used)
    return Summary(
        engine=environment.engine,
        launcher=environment.launcher,
        transport=environment.transport,
        world_size=environment.world_size,
        threads=environment.threads,
        epochs=progress.samples_seen / meter.data.num_train,
        steps=progress.step,
        skipped_steps=progress.skipped_steps,
        samples_seen=progress.samples_seen,
        images_per_second=meter.phases.images_per_second,
        wall_images_per_second=meter.wall_images_per_second,
        train_seconds=meter.made.total_seconds,
        total_seconds=meter.total_seconds,
        cpu_seconds=cpu,
        cpu_seconds_per_image=cpu / images if images else None,
        peak_memory_bytes=max(rank.peak_memory_bytes for rank in ranks),
        phases=meter.phases.means(),
        ranks=ranks,
        input=summarize_input(meter.made.total_seconds, used, images),
        energy=energy_summary([usage.energy for usage in used], images),
        suspect_images=SuspectImages(
            count=sum(usage.suspect_images for usage in used),
            names=[
                name
                for read in (meter.train_input, meter.val_input)
                for _, name in sorted(read.suspects.items())[:MAX_NAMES]
            ],
        ),
        replaced_images=len(meter.replaced),
        gradient_bytes=gradient_bytes(working_copy(model, meter.config), work),
        network_bytes_per_step=sent / steps if steps and math.isfinite(sent) else None,
        loss=figures.get("loss"),
        top1=figures.get("top1"),
        top5=figures.get("top5"),
        best_top1=max(progress.best_top1, figures["top1"]) if figures else None,
        weights_sha256=weights_sha256(model),
        fingerprint=work,
        ended_utc=utc_now(),
    )


def refuse_different_weights(used: Sequence[Usage]) -> None:
    """Raise UserError if the ranks ended with different weights: then the run's figures mean
    nothing."""
    digests = [usage.weights_sha256 for usage in used]
    if len(set(digests)) > 1:
        who = ranks_by_value(digests, [usage.rank.host for usage in used])
        raise UserError(
            f"the ranks ended with different weights: {who}. A machine, a library or the engine "
            "computes wrongly: check it"
        )


def straggler(ranks: Sequence[RankUsage]) -> str:
    """Return a warning about the rank that the other ranks waited for; "" if all ranks took about
    as long as the typical one. Counts all phases except `backward`, in which ranks wait."""
    seconds = [
        (rank.data_seconds or 0.0) + (rank.forward_seconds or 0.0) + (rank.optimizer_seconds or 0.0)
        for rank in ranks
    ]
    slowest, typical = max(seconds), statistics.median_low(seconds)
    rank = ranks[seconds.index(slowest)]
    if slowest - typical <= STRAGGLES * (rank.step_seconds or math.inf):
        return ""
    return (
        f"warning: the other ranks waited for rank {rank.rank} on {rank.host}: its data, forward "
        f"and optimizer phases took {1000 * slowest:.3g} ms a step, the typical rank's "
        f"{1000 * typical:.3g}"
    )


def gradient_bytes(model: nn.Module, work: dict[str, Any]) -> int:
    """Return the bytes of one worker's gradients on the wire, in a step."""
    on_wire = WIRE_FORMATS[work.get("wire_format", "fp32")].bytes
    return sum(
        weight.numel() * min(on_wire, weight.element_size())
        for weight in model.parameters()
        if weight.requires_grad
    )


def summarize_input(seconds: float, used: Sequence[Usage], images: int) -> Input:
    """Return what all ranks read for training per second, over these `seconds`, and the mean share
    of a step that ranks waited for it; None where no files were read, or no step counted."""
    ranks = [usage.rank for usage in used]
    waits = [
        (rank.data_seconds or 0.0) / (rank.step_seconds or 1.0) for rank in ranks if rank.steps
    ]

    def rate(number: float) -> float | None:
        return number / seconds if seconds and math.isfinite(number) else None

    return Input(
        images_per_second=rate(images),
        files_per_second=rate(sum(usage.files for usage in used)),
        megabytes_per_second=rate(sum(usage.bytes for usage in used) / 1e6),
        wait_share=sum(waits) / len(waits) if waits else None,
    )
