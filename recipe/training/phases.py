"""Where a step's time goes: one definition for both engines.

A step is cut where one phase ends and the next begins, so that its phases always add up to it:

    data       until the batch is on the device, normalised: waiting for the loader, the copy
    forward    network, loss and its metrics
    backward   until the gradients are ready, averaged over the ranks: computing them, and whatever
               of their exchange does not hide behind the computation
    optimizer  the rest: unscaling, clipping, the update, the moving average

How much of `backward` is exposed communication no clock in the trainer can tell, since the exchange
runs beside the computation, and slows it. compare/run.py measures it, by turns in which gradients
are computed alike but not exchanged. The difference of their `backward` is what the exchange costs
a step: waiting for messages, for slower ranks, copies into buffers, and cores or memory taken from
the computation.
"""

import time
from typing import Any

import torch

PHASES = ("data", "forward", "backward", "optimizer")

# Steps after a start or a resume that do not count for throughput and phases: caches fill and
# kernels are chosen.
WARM_UP_STEPS = 5


Laps = list[tuple[str, Any, Any]]  # of a step: phase, begin, end


class StepClock:
    """Durations of steps and their phases without holding the device up: CUDA events there, the
    system's clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.on_cuda = device.type == "cuda"
        self.steps: list[Laps] = [[]]
        self.ended: Laps = []  # of the last step that has ended
        self.restart()

    def now(self) -> Any:
        """This moment: on CUDA the one when the device is done with what it was given so far."""
        if not self.on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def restart(self) -> None:
        """Leave out what happened since the last step: an evaluation, a checkpoint."""
        self.last = self.now()

    def lap(self, phase: str) -> None:
        """End a phase that began where the last one ended; a step may come to one several times."""
        now = self.now()
        self.steps[-1].append((phase, self.last, now))
        self.last = now

    def end_step(self) -> None:
        """End the step."""
        self.ended = self.steps[-1]
        self.steps.append([])

    def wait_for(self, moment: Any) -> None:
        """Wait until the device has come past this moment."""
        if self.on_cuda:
            moment.synchronize()

    def take(self) -> list[Laps]:
        """The laps of each step that has ended since the last call."""
        *ended, current = self.steps
        self.steps = [current]
        return ended

    def seconds(self, laps: Laps) -> dict[str, float]:
        """Seconds of each phase of these laps; on CUDA the device must have come past them."""
        seconds = dict.fromkeys(PHASES, 0.0)
        for phase, begin, end in laps:
            seconds[phase] += begin.elapsed_time(end) / 1000 if self.on_cuda else end - begin
        return seconds
