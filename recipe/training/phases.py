"""Where a step's time goes: one definition for both engines.

A step is cut where one phase ends and the next begins, so that its phases always add up to it:

    data       until the batch is on the device, normalised: waiting for the loader, the copy
    forward    network, loss and its metrics
    backward   until the gradients are ready, averaged over the ranks: computing them, and whatever
               of their exchange does not hide behind the computation
    optimizer  the rest: unscaling, clipping, the update, the moving average

How much of `backward` is exposed communication no clock in the trainer can tell, since the exchange
runs beside the computation, and slows it. It is measured by ablation: with `--ablation-steps N`
stretches of N steps alternate in which the gradients are exchanged, and in which they are computed
alike but thrown away. The difference of their `backward` is what the exchange costs a step: waiting
for messages, for slower ranks, copies into buffers, and cores or memory taken from the computation.
"""

import math
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from recipe.config import Config

PHASES = ("data", "forward", "backward", "optimizer")

# Steps after a start or a resume that do not count for throughput and phases: caches fill and
# kernels are chosen.
WARM_UP_STEPS = 5


def exchanges_gradients(config: Config, step: int) -> bool:
    """Whether the ranks exchange gradients in this step (0-based); always, without ablation."""
    return config.ablation_steps is None or step // config.ablation_steps % 2 == 0


def begins_stretch(config: Config, step: int) -> bool:
    """Whether this step (0-based) is the first after a change between exchange and none: ranks that
    ran apart meet again in it, and the one before it left other data in the caches."""
    return config.ablation_steps is not None and step % config.ablation_steps == 0


class StepClock:
    """Durations of steps and their phases without holding the device up: CUDA events there, the
    system's clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.on_cuda = device.type == "cuda"
        self.steps: list[list[tuple[str, Any, Any]]] = [[]]  # of each step: phase, begin, end
        self.restart()

    def _now(self) -> Any:
        if not self.on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def restart(self) -> None:
        """Leave out what happened since the last step: an evaluation, a checkpoint."""
        self.last = self._now()

    def lap(self, phase: str) -> None:
        """End a phase that began where the last one ended; a step may come to one several times."""
        now = self._now()
        self.steps[-1].append((phase, self.last, now))
        self.last = now

    def end_step(self) -> None:
        """End the step."""
        self.steps.append([])

    def take(self) -> list[dict[str, float]]:
        """Seconds of each phase, of every step since the last call; on CUDA this waits for the
        device."""
        *ended, current = self.steps
        self.steps = [current]
        if self.on_cuda:
            torch.cuda.synchronize()
        seconds = []
        for laps in ended:
            step = dict.fromkeys(PHASES, 0.0)
            for phase, begin, end in laps:
                step[phase] += begin.elapsed_time(end) / 1000 if self.on_cuda else end - begin
            seconds.append(step)
        return seconds


@dataclass(frozen=True)
class PhaseMeans:
    """A rank's mean seconds a step over the steps that count; NaN is not measured.

    With ablation `backward` is that of the steps without exchange, and `exposed_communication` the
    difference; without, `backward` holds the exchange. Either way the phases add up to the mean
    step in which gradients are exchanged.
    """

    data: float
    forward: float
    backward: float
    exposed_communication: float
    optimizer: float
    steps: float  # that were averaged, those of the ablation not among them

    @property
    def step(self) -> float:
        """Seconds of the whole step."""
        hidden = 0.0 if math.isnan(self.exposed_communication) else self.exposed_communication
        return self.data + self.forward + self.backward + hidden + self.optimizer


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

    def means(self) -> PhaseMeans:
        """The means so far; all NaN if no step counted."""
        count = self.num_exchanged
        data, forward, backward, optimizer = (
            self.exchanged[phase] / count if count else math.nan for phase in PHASES
        )
        exposed = math.nan
        if count and self.num_ablated:
            computed = self.ablated_backward / self.num_ablated
            backward, exposed = computed, backward - computed
        return PhaseMeans(data, forward, backward, exposed, optimizer, count)


def phase_record(means: PhaseMeans) -> dict[str, Any]:
    """The means as they stand in summary.json: seconds, null where not measured."""
    record = {f"{name}_seconds": value for name, value in asdict(means).items() if name != "steps"}
    return {
        "steps": int(means.steps),
        "step_seconds": _or_null(means.step),
        **{name: _or_null(value) for name, value in record.items()},
    }


def _or_null(value: float) -> float | None:
    return None if math.isnan(value) else value
