"""What a run can be asked to write for closer looks: its first steps' tensors, and a profile."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from recipe.config import Config
from recipe.files import whole_file
from recipe.record.run_folder import one_sentence
from recipe.training.phases import WARM_UP_STEPS
from recipe.world import World


def write_trace(
    config: Config, world: World, folder: Path, step: int, model: nn.Module, loss: torch.Tensor
) -> None:
    """Of the first --tensor-steps steps (`step` counts from 1) write trace/rank-R/step-NNNNNN.npz:
    what one rank computed. UserError if it cannot be written.

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


class StepProfiler:
    """torch's profiler over --profile-steps steps of every rank, after the first few: writes
    profile/rank-R.json, which Perfetto opens, and which compare/timeline.py merges.

    `timeline`, two functions that start (given a path) and end an engine's own record of its
    messages, may be set by the trainer; rank 0 then writes profile/horovod-timeline.json as well.
    """

    def __init__(self, config: Config, world: World, folder: Path, first_step: int) -> None:
        self.num_steps = config.profile_steps or 0
        self.first = first_step + WARM_UP_STEPS  # of the profiled steps, 0-based
        self.folder, self.rank = folder / "profile", world.rank
        self.timeline: tuple[Callable[[str], Any], Callable[[], Any]] | None = None
        self.profile: torch.profiler.profile | None = None
        self.done = False

    def end_step(self, step: int) -> None:
        """Tell that `step` steps have ended; starts and ends the profile."""
        if not self.num_steps:
            return
        if step == self.first - 1:  # one step before: the profiler's own warm-up
            self._start()
        elif self.profile is not None:
            self.profile.step()
            if step == self.first + self.num_steps:
                self._stop()

    def close(self, say: Callable[[str], object]) -> None:
        """End a profile that the training's end has cut short; `say` a warning if there is none, or
        a part."""
        if not self.num_steps or self.done:
            return
        asked = f"warning: --profile-steps {self.num_steps}: the training ended before step"
        if self.profile is None:
            say(f"{asked} {self.first + 1}, the first to be profiled: no profile")
            return
        self._stop()
        say(f"{asked} {self.first + self.num_steps}: the profile is shorter")

    def _start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self.profile = torch.profiler.profile(
            activities=activities,
            schedule=torch.profiler.schedule(wait=0, warmup=1, active=self.num_steps, repeat=1),
            on_trace_ready=lambda profile: profile.export_chrome_trace(
                str(self.folder / f"rank-{self.rank}.json")
            ),
        )
        self.profile.start()
        if self.timeline is not None and self.rank == 0:
            self.timeline[0](str(self.folder / "horovod-timeline.json"))

    def _stop(self) -> None:
        assert self.profile is not None
        self.profile.stop()
        self.profile, self.done = None, True
        if self.timeline is not None and self.rank == 0:
            self.timeline[1]()
