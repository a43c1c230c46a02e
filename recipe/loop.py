"""The loop around a training step, for the rungs in baselines/, in the order of both train.py.

A rung says what it does differently from one process in a subclass of `Rung`. The one that leaves
all as it is, baselines/single_process.py, is the reference for both train.py, bit by bit.
"""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from recipe import meeting
from recipe.data.batches import Data, open_data, to_device
from recipe.device import choose_device
from recipe.errors import UserError, refuse
from recipe.ranks import Ranks
from recipe.record.checkpoint import load_weights
from recipe.record.energy import EnergyMeter
from recipe.record.schema import RungFigures
from recipe.session import Session
from recipe.settings.config import Config
from recipe.settings.flags import spelled
from recipe.start import Hooks
from recipe.training.metrics import Sums, batch_sums
from recipe.training.model import (
    Criterion,
    autocast,
    build_criterion,
    build_ema,
    build_model,
    build_optimizer,
    build_scaler,
    seed_step,
    update_ema,
)
from recipe.training.optimizers import learning_rate
from recipe.training.state import (
    Progress,
    Trainables,
    round_weights,
    train_masters,
    unscale_and_clip,
    working_copy,
)
from recipe.watch import heartbeat
from recipe.world import World

# Settings that rungs do not have: they belong to one of the engines, or measure its exchange.
# Fields of Config; with a value, only that is meant.
ENGINES_OWN = (
    "transport", "batch_norm sync", "precision O2", "precision O3", "keep_batchnorm_fp32",
    "wire_format", "gradient_predivide_factor", "use_adasum", "knobs", "bucket_cap_mb",
    "first_bucket_mb", "gradient_as_bucket_view", "static_graph", "num_groups", "sleeping_poll",
    "rollback", "tensor_steps", "profile_steps",
)  # fmt: skip


def refuse_settings(config: Config, lacking: Iterable[str]) -> None:
    """UserError for the first of these settings, written as ENGINES_OWN, that is given. A number
    that is 0 turns it off, which is what this script does."""
    default = Config()
    for words in lacking:
        name, _, value = words.partition(" ")
        given = getattr(config, name)
        is_off = given == 0 and not isinstance(given, bool)
        is_given = str(given) == value if value else given != getattr(default, name) and not is_off
        refuse((is_given, f"{spelled(name)} {given}: not supported by this script; remove it"))


class Rung(Trainables):
    """One process's training, from which a script in baselines/ differs by what it overrides.

    The `model` is as one process has it. Every rank that trains makes one, before the ranks meet.
    """

    name: str  # of the engine, in the run folder
    transport = ""  # what carries its messages, there; "": its process group, if it has one
    launcher: str | None = "torchrun"  # None: any
    lacks: tuple[str, ...] = ()  # further settings, as in ENGINES_OWN
    has: tuple[str, ...] = ()  # of ENGINES_OWN
    has_group = True  # its ranks meet in a process group
    has_remote_calls = False
    servers = 0  # of the ranks, the last ones, which do not train
    is_for_cpu = False  # sends what lies in the CPU's memory
    readers: World | None = None  # this rank among those that read different images, if not all do

    sum_over_ranks = staticmethod(meeting.sum_over_ranks)
    from_rank_0 = staticmethod(meeting.from_rank_0)
    data: Data
    progress: Progress
    network: nn.Module  # what the forward pass calls: the model, or what the rung makes of it
    criterion: Criterion

    def __init__(self, config: Config, world: World) -> None:
        """UserError for settings that it lacks, and if it was not started as it must be."""
        refuse_settings(config, (*(one for one in ENGINES_OWN if one not in self.has), *self.lacks))
        if self.launcher is not None and world.launcher != self.launcher:
            by = {"none": "python"}
            raise UserError(
                f"this script was started by {by.get(world.launcher, world.launcher)}: start it "
                f"with {by.get(self.launcher, self.launcher)}, as its first lines say"
            )
        if "weight_check_steps" in self.lacks:  # its ranks hold different weights in between
            config = replace(config, weight_check_steps=0)
        self.config, self.device = config, choose_device(config, world)
        self.devices = [self.device]  # whose energy is this rank's
        trainers = world.size - self.servers
        refuse(
            (trainers < 1, "1 rank: the last one only serves; start at least 2"),
            (
                self.is_for_cpu and self.device.type != "cpu",
                "this script sends what lies in the CPU's memory; add --no-cuda",
            ),
        )
        self.trains, self.server = world.rank < trainers, f"rank{trainers}"  # for remote calls
        self.world = replace(world, size=trainers, local_size=min(world.local_size, trainers))
        self.ranks = Ranks(self.world, self.sum_over_ranks, self.from_rank_0)
        self.prepare()

    @classmethod
    def main(cls, config: Config, world: World, hooks: Hooks) -> int:
        """Train, or serve those that do, as `config` says; the exit code. Every rank calls this."""
        rung = cls(config, world)
        if config.threads is not None:
            torch.set_num_threads(config.threads)  # of ranks that only serve, too
        with meeting.remote_calls(config, world) if rung.has_remote_calls else nullcontext():
            if rung.trains:
                with meeting.process_group(config, rung.world) if rung.has_group else nullcontext():
                    return train(rung, hooks)
        return 0

    def prepare(self) -> None:
        """Make, before anything is read, what else it takes; UserError if that cannot be."""

    def distribute(self) -> None:
        """Replace the network and the optimizer by what trains over all ranks; called once, with
        rank 0's weights on all of them, and a checkpoint's momentum in the optimizer."""

    def forward_backward(
        self, images: torch.Tensor, targets: torch.Tensor, sync_gradients: bool, lap: Callable
    ) -> Sums:
        """Add a batch's gradients to those of the step, and return its metrics. `sync_gradients`:
        it is the step's last batch, and they may be exchanged. `lap` ends a phase."""
        no_sync = getattr(self.network, "no_sync", nullcontext)  # DDP has it
        with autocast(self.config, self.device), nullcontext() if sync_gradients else no_sync():
            outputs = self.network(images)
            loss = self.criterion(outputs, targets)
        sums = batch_sums(outputs, targets, loss)
        lap("forward")
        self.scaler.scale(loss / self.config.batches_per_allreduce).backward()
        return sums

    def update(self, rate: float) -> None:
        """Change the weights by the gradients of the step, at this learning rate, which the
        optimizer has."""
        unscale_and_clip(self, self.config.clip_grad_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        round_weights(self.fp16_model, self.model)

    def measured(self) -> RungFigures:
        """What the rung has measured of itself, when training is complete."""
        return RungFigures()

    def memory_by_rank(self, optimizer: torch.optim.Optimizer) -> RungFigures:
        """What each rank holds of an optimizer's state and of the weights, of sharded ones its
        part."""

        def by_rank(tensors: Iterable[Any]) -> list[int]:
            parts = (one.to_local() if hasattr(one, "to_local") else one for one in tensors)
            own = torch.tensor([sum(part.nbytes for part in parts)])
            return self.ranks.rows(own).flatten().tolist()

        values = (value for state in optimizer.state.values() for value in state.values())
        return RungFigures(
            optimizer_bytes=by_rank(filter(torch.is_tensor, values)),
            weight_bytes=by_rank(self.model.parameters()),
        )


def _begin(rung: Rung, hooks: Hooks) -> tuple[Session, int]:
    """Data, model, and what was kept of an earlier run; open the record. Also returns what one
    worker's learning rate is multiplied by."""
    config, world, device = rung.config, rung.world, rung.device
    data = rung.data = open_data(config, hooks.epoch_images)
    session = Session(rung.name, config, rung.ranks, data, device, rung.readers)
    model = build_model(config, data.num_classes, download=world.is_first)
    if config.weights is not None and world.is_first:
        load_weights(model, config, data.num_classes)
    rung.model = model.to(device)
    if config.weights is not None or config.pretrained:
        for values in model.state_dict().values():
            values.copy_(rung.ranks.from_first(values.clone()))
    rung.network = rung.fp16_model = fp16_model = working_copy(model, config)
    rung.optimizer, rung.scaler = build_optimizer(fp16_model, config), build_scaler(config, device)
    train_masters(rung.optimizer, fp16_model, model, rung.ranks)
    rung.criterion, rung.ema = build_criterion(config), build_ema(model, config)
    lr_scale = config.batches_per_allreduce * session.readers.size
    session.resume(config, rung, lr_scale)
    rung.progress = session.progress
    rung.distribute()
    session.meter.energy = EnergyMeter(rung.devices, rung.world.local_rank)
    session.open_record(rung.transport or meeting.transport_of(device))
    return session, lr_scale


def _step(rung: Rung, session: Session, lr_scale: int, exchange: bool) -> tuple[Sums, float]:
    """One step: its metrics on this rank, and its learning rate."""
    config, progress, meter = rung.config, rung.progress, session.meter
    seed_step(config, progress.step, session.readers.rank)
    rate = learning_rate(config, progress.samples_seen / rung.data.num_train, lr_scale)
    for group in rung.optimizer.param_groups:
        group["lr"] = rate
    sums = torch.zeros(4, dtype=torch.float64, device=rung.device)
    for batch_number in range(1, config.batches_per_allreduce + 1):
        heartbeat()
        images, targets = to_device(next(session.batches), config, rung.device)
        meter.lap("data")
        sync_gradients = exchange and batch_number == config.batches_per_allreduce
        sums += rung.forward_backward(images, targets, sync_gradients, meter.lap)
        meter.lap("backward")
    if exchange:
        rung.update(rate)
    rung.network.zero_grad()
    update_ema(rung.ema, rung.model, config, progress.step + 1)
    meter.lap("optimizer")
    return sums, rate


def train(rung: Rung, hooks: Hooks) -> int:
    """Train, or only evaluate, as the rung's settings say, and write the run folder; the exit code.
    Every rank that trains calls this."""
    session, lr_scale = _begin(rung, hooks)
    goes_on = session.begin_training(rung)
    rung.network.train()
    while goes_on:
        sums, rate = _step(rung, session, lr_scale, hooks.exchanges())
        goes_on = session.end_step(rung, sums, rate)
        hooks.step_ended(session)
        session.meter.restart()

    measured = rung.measured()
    code = session.end(measured)
    for name, value in vars(measured).items():
        if rung.world.is_first and value is not None:
            print(f"{name}: {value}")
    return code
