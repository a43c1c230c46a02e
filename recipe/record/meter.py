"""Measures the steps of a session: phases, metrics, throughput, input and energy."""

import math
import time
from collections.abc import Callable
from contextlib import suppress

import psutil
import torch

from recipe.config import Config
from recipe.data.batches import Data, InputMeter
from recipe.device import cpu_seconds
from recipe.record.energy import EnergyMeter
from recipe.record.schema import Phases
from recipe.training.metrics import Step, Sums
from recipe.training.phases import (
    PHASES,
    WARM_UP_STEPS,
    StepClock,
    begins_stretch,
    exchanges_gradients,
)
from recipe.training.state import Progress
from recipe.world import World


class PhaseSums:
    """Adds up the phases of the steps that count."""

    def __init__(self) -> None:
        self.exchanged = dict.fromkeys(PHASES, 0.0)
        self.num_exchanged = self.num_ablated = 0
        self.ablated_backward = 0.0

    def add(self, seconds: dict[str, float], exchanged: bool) -> None:
        """Count one step."""
        if not exchanged:
            self.ablated_backward += seconds["backward"]
            self.num_ablated += 1
            return
        self.num_exchanged += 1
        for phase in PHASES:
            self.exchanged[phase] += seconds[phase]

    def means(self) -> Phases:
        """This rank's mean seconds a step so far; those of the ablation are not among the `steps`.

        With ablation `backward` is that of the steps without exchange, and the exposed
        communication the difference; without, `backward` holds the exchange. Either way the phases
        add up to the mean step in which gradients are exchanged.
        """
        count = self.num_exchanged
        if count == 0:
            return Phases()
        seconds = {f"{phase}_seconds": total / count for phase, total in self.exchanged.items()}
        step_seconds = sum(seconds.values())
        if self.num_ablated:
            computed = self.ablated_backward / self.num_ablated
            seconds["exposed_communication_seconds"] = seconds["backward_seconds"] - computed
            seconds["backward_seconds"] = computed
        return Phases(steps=count, step_seconds=step_seconds, **seconds)


class StepMeter:
    """What the steps of this session took; the sums of metrics stay on the device meanwhile."""

    def __init__(
        self,
        config: Config,
        world: World,
        device: torch.device,
        data: Data,
        progress: Progress,
        workers: int,
    ) -> None:
        self.config, self.data, self.progress = config, data, progress
        self.first_step, self.first_samples_seen = progress.step, progress.samples_seen
        self.earlier_train_seconds = progress.train_seconds
        self.clock = StepClock(device)
        self.lap = self.clock.lap  # ends a phase of the step, one of `phases.PHASES`
        # Sums, learning rate, step, and samples seen.
        self.pending: list[tuple[Sums, float, int, int]] = []
        self.phases = PhaseSums()
        self.input = None if data.is_synthetic else InputMeter(workers)
        self.energy = EnergyMeter(device, world.local_rank)
        self.throughput_images = self.throughput_seconds = 0.0
        self.step_seconds = 0.0  # of this session's steps, evaluations and checkpoints left out
        self.sends_for_host = world.local_rank == 0
        self.started = time.perf_counter()

    def start(self) -> None:
        """Training begins now."""
        self.started, self.cpu_seconds_before = time.perf_counter(), cpu_seconds()
        self.network_bytes_before = network_bytes()
        self.energy.start()
        self.clock.restart()

    def end_step(self, sums: Sums, learning_rate: float) -> None:
        """A step has ended, and is counted in the progress."""
        self.clock.end_step()
        self.pending.append((sums, learning_rate, self.progress.step, self.progress.samples_seen))

    def take_steps(self, sum_over_ranks: Callable[[torch.Tensor], torch.Tensor]) -> list[Step]:
        """The steps since the last call, their metrics over all ranks."""
        rows = sum_over_ranks(torch.stack([sums for sums, *_ in self.pending])).cpu()
        self.energy.sample()
        steps = [
            Step(step, samples_seen, rate, row, phases, exchanges_gradients(self.config, step - 1))
            for row, (_, rate, step, samples_seen), phases in zip(
                rows, self.pending, self.clock.take(), strict=True
            )
        ]
        self.pending.clear()
        for step in steps:
            self.step_seconds += step.seconds
            is_warm = step.number > self.first_step + WARM_UP_STEPS
            if is_warm and not begins_stretch(self.config, step.number - 1):
                self.phases.add(step.phases, step.exchanged)
                self.throughput_images += step.images * step.exchanged
                self.throughput_seconds += step.seconds * step.exchanged
        return steps

    def restart(self) -> None:
        """Keep all since the step out of the next one's duration."""
        self.energy.start()
        self.clock.restart()

    @property
    def train_seconds(self) -> float:
        """The training clock: seconds since training began, evaluation and checkpoints included."""
        return self.earlier_train_seconds + time.perf_counter() - self.started

    @property
    def network_bytes(self) -> float:
        """What this host sent since training began; 0 on ranks that leave that to its first."""
        return (network_bytes() - self.network_bytes_before) * self.sends_for_host

    @property
    def images_per_second(self) -> float | None:
        """Training throughput of all ranks together, without the first steps and evaluation; None
        if too short."""
        return self.throughput_images / self.throughput_seconds if self.throughput_seconds else None


def network_bytes() -> float:
    """Bytes that this host's network interfaces have sent so far, the loopback's among them; NaN
    where the system does not say."""
    with suppress(OSError):
        if counters := psutil.net_io_counters():
            return float(counters.bytes_sent)
    return math.nan
