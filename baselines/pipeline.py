"""Pipeline parallelism: each rank computes one stage of the network, for many micro-batches.

    torchrun --nproc-per-node 2 baselines/pipeline.py --batch-size 10 --batches-per-allreduce 4

Each rank computes its own layers: it gets activations from the rank before it, and gradients from
the one after it. A step has --batches-per-allreduce micro-batches of --batch-size images each, so
that the stages can work at the same time. The schedule is 1F1B, one forward and one backward in
turn (Narayanan et al. 2021, arXiv 2104.04473): a stage holds the activations of at most as many
micro-batches as there are stages.

Use it for a network that does not fit on one device, or if links are too slow to exchange all
gradients: only activations and their gradients are sent, where the network is split.

It costs the bubble: stages are idle while the pipeline fills and drains. With p equal stages, m
micro-batches and messages that take no time, the bubble's share of a step is (p - 1) / (m + p - 1)
(Huang et al. 2019, arXiv 1811.06965). The run measures its own share and prints both. Each rank
also reads all images and holds all weights, for validation. It holds gradients, momentum and
activations only for its stage; rank 0, which writes checkpoints, has all momentum.

Weights are bit-equal to single_process.py with the same flags, BatchNorm included: that script adds
up the gradients of the same micro-batches in the same order. They differ from those of one large
batch, where BatchNorm normalises over all images. Without BatchNorm (and without dropout, for which
each stage draws its own numbers) only the order of additions differs.
"""

from recipe.errors import UserError
from recipe.start import run_script

if __name__ == "__main__":  # before torch is loaded
    run_script(__file__)

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from recipe.loop import BEYOND_PLAIN_SGD, Rung
from recipe.record.schema import RungFigures
from recipe.training.metrics import Sums, batch_sums
from recipe.training.model import split_resnet
from recipe.record.meter import Laps, StepClock
from recipe.training.state import Trainables


class Pipeline(Rung):
    """The pipeline's stages, one of which this rank computes."""

    name = "pipeline"
    lacks = (
        *BEYOND_PLAIN_SGD,
        "channels_last",
        "compile",
        "first_crop_size",
        "batch_size_warmup_epochs",  # micro-batches have one shape
        "weight_check_steps",  # each rank has its own
    )

    def prepare(self) -> None:
        """Make each rank read all images, and start its clock."""
        stages, count = self.world.size, self.config.batches_per_allreduce
        if count < stages:
            raise UserError(
                f"--batches-per-allreduce {count}: is the number of micro-batches, and 1F1B needs "
                f"at least one per stage; give {stages} or more, and a smaller --batch-size"
            )
        self.readers = replace(self.world, rank=0, size=1)  # each rank reads all images
        self.waiting: list[tuple[torch.Tensor, torch.Tensor]] = []  # the step's micro-batches
        self.clock, self.laps = StepClock(self.device), list[Laps]()  # of steps to be added up
        self.seconds = self.idle_seconds = 0.0  # time of all steps, and idle time of this rank

    def distribute(self) -> None:
        """Split the network into stages."""
        rank, stages = self.world.rank, self.world.size
        self.stages = split_resnet(self.model, self.config, stages)
        self.network = self.stages[rank]
        size, count = self.config.train_crop_size, self.config.batches_per_allreduce
        passed = [torch.empty(self.config.batch_size, 3, size, size, device="meta")]
        for stage in copy.deepcopy(self.stages):  # shapes of the activations, without values
            passed.append(stage.to("meta")(passed[-1]))

        def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            loss = self.criterion(outputs, targets)
            self.sums += batch_sums(outputs, targets, loss)
            return loss / count

        mine = PipelineStage(self.network, rank, stages, self.device, *passed[rank : rank + 2])
        mine.forward_one_chunk = self.timed(mine.forward_one_chunk, "forward")
        mine.backward_one_chunk = self.timed(mine.backward_one_chunk, "backward")
        self.schedule = Schedule1F1B(mine, count, loss_of, scale_grads=False)

    def timed(self, compute: Callable, phase: str) -> Callable:
        """Wrap `compute` so that its time counts as the step's `phase`. The time since the phase
        before it counts as "data": then the schedule waits for messages, on a GPU in its stream."""

        def timed_compute(*args: Any, **kwargs: Any) -> Any:
            self.clock.lap("data")
            result = compute(*args, **kwargs)
            self.clock.lap(phase)
            return result

        return timed_compute

    def forward_backward(
        self, images: torch.Tensor, targets: torch.Tensor, sync_gradients: bool, lap: Callable
    ) -> Sums:
        """Run all micro-batches through the pipeline, once the step's last one has arrived. Only
        the last stage has the metrics."""
        self.waiting.append((images, targets))
        self.sums = torch.zeros(4, dtype=torch.float64, device=self.device)
        if sync_gradients:
            self.clock.restart()
            all_images, all_targets = map(torch.cat, zip(*self.waiting, strict=True))
            given = [all_images] if self.world.rank == 0 else []
            is_last = self.world.rank == self.world.size - 1
            self.schedule.step(*given, target=all_targets if is_last else None)
            self.waiting.clear()
            self.clock.lap("data")
            self.laps.append(self.clock.end_step())
            if len(self.laps) == self.config.log_interval:
                self.take_times()
        return self.sums

    def take_times(self) -> None:
        """Add up the times of the steps since the last call; the host waits for the device."""
        self.clock.wait_for(self.clock.now())
        for phases in map(self.clock.seconds, self.laps):
            self.seconds += sum(phases.values())
            self.idle_seconds += phases["data"]
        self.laps.clear()

    def unsharded(self) -> Trainables:
        """Send all weights to every rank, from the rank that trains them, and all momentum to
        rank 0."""
        self.take_times()
        state = self.optimizer.state
        has_momentum = any("momentum_buffer" in state[w] for w in self.network.parameters())
        for owner, layers in enumerate(self.stages):
            for values in [*layers.parameters(), *layers.buffers()]:
                dist.broadcast(values.detach(), owner)
            for weight in layers.parameters() if has_momentum else ():
                is_own = owner == self.world.rank
                momentum = state[weight]["momentum_buffer"] if is_own else torch.empty_like(weight)
                dist.broadcast(momentum, owner)
                if self.world.is_first:
                    state[weight]["momentum_buffer"] = momentum
        return self

    def measured(self) -> RungFigures:
        """Return how long the stages waited for each other, as a share of the steps' time."""
        if not self.seconds:
            return RungFigures()
        stages, count = self.world.size, self.config.batches_per_allreduce
        idle = self.sum_over_ranks(torch.tensor([self.idle_seconds / self.seconds]))
        return RungFigures(
            bubble_share=float(idle) / stages,
            equal_bubble_share=(stages - 1) / (count + stages - 1),
        )


main = Pipeline.main
