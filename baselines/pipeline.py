"""Pipeline parallelism: the network is cut into one stage a rank, and micro-batches flow through.

    torchrun --nproc-per-node 2 baselines/pipeline.py --batch-size 10 --batches-per-allreduce 4

Each rank computes its own layers: it gets activations from the rank before it, and gradients from
the one after it. A step has as many micro-batches as --batches-per-allreduce says, of --batch-size
images each, so that the stages can work at the same time. The schedule is 1F1B, one forward and one
backward in turn (Narayanan et al. 2021, arXiv 2104.04473): a stage holds the activations of no more
micro-batches than there are stages.

Use it for a network that does not fit into one device, or where links are too slow to exchange all
gradients: only activations and their gradients travel, where the network is cut.

It costs the bubble: a stage has nothing to do while the pipeline fills and drains. With p equal
stages, m micro-batches, and messages that take no time, that is the share (p - 1) / (m + p - 1) of
a step (Huang et al. 2019, arXiv 1811.06965). The run measures its own share and prints both. Each
rank also reads all images and holds all weights, for validation. Gradients, momentum and
activations are those of its stage alone; rank 0, which writes checkpoints, has all momentum.

Weights are bit-equal to single_process.py with the same flags, BatchNorm included: it adds up the
gradients of the same micro-batches in the same order. They differ from those of one large batch:
there BatchNorm normalises by all images. Without BatchNorm (or dropout, which each stage draws by
itself) only the order of additions differs.
"""

from recipe.errors import refuse
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

from recipe.loop import Rung
from recipe.record.schema import RungFigures
from recipe.training.metrics import Sums, batch_sums
from recipe.training.model import split_resnet
from recipe.record.meter import StepClock
from recipe.training.state import Trainables


class Pipeline(Rung):
    """The stages, of which this rank computes one."""

    name = "pipeline"
    lacks = (
        "optimizer", "precision", "loss_scale", "clip_grad_norm", "model_ema", "channels_last",
        "compile", "first_crop_size", "batch_size_warmup_epochs",  # micro-batches have one shape
        "weight_check_steps",  # each rank has its own
    )  # fmt: skip

    def prepare(self) -> None:
        """Have each rank read all images, and count its time."""
        stages, count = self.world.size, self.config.batches_per_allreduce
        refuse((
            count < stages,
            f"--batches-per-allreduce {count}: is the number of micro-batches, and 1F1B needs "
            f"one a stage; give {stages} or more, and a smaller --batch-size",
        ))  # fmt: skip
        self.readers = replace(self.world, rank=0, size=1)  # each rank reads all images
        self.waiting: list[tuple[torch.Tensor, torch.Tensor]] = []  # the step's micro-batches
        self.clock = StepClock(self.device)
        self.seconds = self.idle_seconds = 0.0  # of all steps; of this rank without work in them

    def distribute(self) -> None:
        """Cut the network into stages."""
        rank, stages = self.world.rank, self.world.size
        self.stages = split_resnet(self.model, self.config, stages)
        self.network = self.stages[rank]
        size, count = self.config.train_crop_size, self.config.batches_per_allreduce
        passed = [torch.empty(self.config.batch_size, 3, size, size, device="meta")]
        for stage in copy.deepcopy(self.stages):  # what travels, as shapes without values
            passed.append(stage.to("meta")(passed[-1]))

        def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            loss = self.criterion(outputs, targets)
            self.sums += batch_sums(outputs, targets, loss)
            return loss / count

        own = PipelineStage(self.network, rank, stages, self.device, *passed[rank : rank + 2])
        own.forward_one_chunk = self.timed(own.forward_one_chunk, "forward")
        own.backward_one_chunk = self.timed(own.backward_one_chunk, "backward")
        self.schedule = Schedule1F1B(own, count, loss_of, scale_grads=False)

    def timed(self, compute: Callable, phase: str) -> Callable:
        """`compute`, whose time is the step's `phase`, and that since the last one "data": the
        schedule waits for messages before, on a GPU by its stream."""

        def timed_compute(*args: Any, **kwargs: Any) -> Any:
            self.clock.lap("data")
            result = compute(*args, **kwargs)
            self.clock.lap(phase)
            return result

        return timed_compute

    def forward_backward(
        self, images: torch.Tensor, targets: torch.Tensor, sync_gradients: bool, lap: Callable
    ) -> Sums:
        """Let all micro-batches flow through, once the step's last is there; the last stage knows
        the metrics."""
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
            self.clock.end_step()
            if len(self.clock.steps) > self.config.log_interval:
                self.take_times()
        return self.sums

    def take_times(self) -> None:
        """Count the steps since the last time; the host waits for the device."""
        self.clock.wait_for(self.clock.now())
        for phases in map(self.clock.seconds, self.clock.take()):
            self.seconds += sum(phases.values())
            self.idle_seconds += phases["data"]

    def whole(self) -> Trainables:
        """All weights on each rank, from the rank that trains them, and all momentum on rank 0."""
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
        """How long the stages have waited for each other."""
        if not self.seconds:
            return RungFigures()
        stages, count = self.world.size, self.config.batches_per_allreduce
        idle = self.sum_over_ranks(torch.tensor([self.idle_seconds / self.seconds]))
        return RungFigures(
            bubble_share=float(idle) / stages,
            equal_bubble_share=(stages - 1) / (count + stages - 1),
        )


main = Pipeline.main
