"""What a run can write for a closer look: the tensors of its first steps, and a profile."""

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from recipe.files import whole_file, write_json
from recipe.record.folder import one_sentence
from recipe.record.schema import WARM_UP_STEPS
from recipe.settings.config import Config
from recipe.watch import expect_delay
from recipe.world import World


def write_trace(
    config: Config, world: World, folder: Path, step: int, model: nn.Module, loss: torch.Tensor
) -> None:
    """For each of the first --tensor-steps steps (`step` counts from 1), write what this rank
    computed to trace/rank-R/step-NNNNNN.npz. UserError if it cannot be written.

    Its arrays: `loss` (mean over this rank's last batch), `gradient/NAME` as the optimizer used it,
    `weight/NAME` and `buffer/NAME` (BatchNorm's statistics) after the step.
    """
    if step > (config.tensor_steps or 0):
        return
    tensors = {"loss": loss}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            tensors[f"gradient/{name}"] = parameter.grad
        tensors[f"weight/{name}"] = parameter
    tensors |= {f"buffer/{name}": values for name, values in model.named_buffers()}
    arrays: dict[str, Any] = {name: value.detach().cpu().numpy() for name, value in tensors.items()}
    path = folder / "trace" / f"rank-{world.rank}" / f"step-{step:06d}.npz"
    with one_sentence(folder):
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            np.savez(file, **arrays)


class GradientTimes:
    """Notes when a rank's gradients of the profiled steps are ready, in ns of the Unix clock."""

    def __init__(self, model: nn.Module) -> None:
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.elements = {name: parameter.numel() for name, parameter in trained.items()}
        self.steps: list[dict[str, Any]] = []
        self.step: dict[str, Any] = {}
        self.handles: list[Any] = [model.register_forward_hook(self._begin)]
        for name, parameter in trained.items():
            mark = partial(self._mark, name)
            self.handles.append(parameter.register_post_accumulate_grad_hook(mark))

    def _begin(self, *_: Any) -> None:
        """Note the end of a forward pass. Of several in a step the last counts, whose backward pass
        sends the gradients."""
        self.step = {"backward": time.time_ns(), "ready": {}}

    def _mark(self, name: str, _: torch.Tensor) -> None:
        self.step["ready"][name] = time.time_ns()

    def end_step(self, counts: bool) -> None:
        """End a step; keep it if it `counts` and all of its gradients were seen."""
        if counts and len(self.step.get("ready", ())) == len(self.elements):
            self.steps.append({**self.step, "end": time.time_ns()})
        self.step = {}

    def write(self, path: Path) -> None:
        """Remove the hooks, and write the steps, if there are any."""
        for handle in self.handles:
            handle.remove()
        if self.steps:
            write_json(path, {"elements": self.elements, "steps": self.steps})


class StepProfiler:
    """Runs torch's profiler over --profile-steps steps of every rank, after the warm-up. Writes
    profile/rank-R.json, which Perfetto opens and compare/timeline.py merges; on a CPU also
    profile/gradients-rank-R.json, with the times when each gradient was ready.

    `timeline`: the engine's name, and two functions that start (given a path) and end the engine's
    own record of its messages. Rank 0 writes this to profile/ENGINE-timeline.json (DDP's only on
    CPUs).
    """

    def __init__(
        self,
        config: Config,
        world: World,
        folder: Path,
        first_step: int,
        model: nn.Module,
        timeline: tuple[str, Callable[[str], Any], Callable[[], Any]],
    ) -> None:
        self.num_steps = config.profile_steps or 0  # 0: nothing is left to be profiled
        self.first = first_step + WARM_UP_STEPS  # of the profiled steps, 0-based
        self.folder, self.rank, self.model = folder / "profile", world.rank, model
        self.timeline = timeline
        self.profile: torch.profiler.profile | None = None
        self.gradients: GradientTimes | None = None

    def end_step(self, step: int) -> None:
        """Count `step` steps as ended; start or end the profile if it is due. After a rollback a
        step may end again, with which nothing starts anew."""
        if self.profile is not None:
            self.profile.step()
            if self.gradients is not None:
                self.gradients.end_step(counts=step > self.first)
            if step == self.first + self.num_steps:
                self._stop()
        elif self.num_steps and step == self.first - 1:  # one before: the profiler's own warm-up
            self._start()

    def close(self, say: Callable[[str], object]) -> None:
        """End a profile that the training's end cuts short; `say` a warning that it is missing or
        incomplete."""
        if not self.num_steps:
            return
        end = self.first + self.num_steps
        warning = f"warning: --profile-steps {self.num_steps}: the training ended before step"
        if self.profile is None:
            say(f"{warning} {self.first + 1}, the first to be profiled: no profile")
            return
        self._stop()
        say(f"{warning} {end}: the profile is shorter")

    def _start(self) -> None:
        expect_delay()
        with one_sentence(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            # C++ libraries accept this name, whatever bytes are in the folder's own. The folder
            # stays open, since Horovod writes its timeline from a thread of its own.
            place = f"/proc/self/fd/{os.open(self.folder, os.O_RDONLY)}"
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self.profile = torch.profiler.profile(
            activities=activities,
            schedule=torch.profiler.schedule(wait=0, warmup=1, active=self.num_steps, repeat=1),
            on_trace_ready=lambda profile: profile.export_chrome_trace(
                f"{place}/rank-{self.rank}.json"
            ),
        )
        self.profile.start()
        # A GPU runs behind the CPU, whose clock does not show when a gradient is ready.
        if next(self.model.parameters()).device.type == "cpu":
            self.gradients = GradientTimes(self.model)
        if self.rank == 0:
            engine, start, _ = self.timeline
            start(f"{place}/{engine}-timeline.json")

    def _stop(self) -> None:
        assert self.profile is not None
        expect_delay()  # the profile may be large, and another rank's disk slower
        self.profile.stop()
        self.profile, self.num_steps = None, 0
        with one_sentence(self.folder):
            if self.rank == 0:
                self.timeline[2]()
            if self.gradients is not None:
                self.gradients.write(self.folder / f"gradients-rank-{self.rank}.json")
                self.gradients = None
