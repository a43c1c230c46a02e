"""The training loop of the rungs in baselines/, in the same order as both train.py.

Each rung is a subclass of `Rung`, which overrides what differs from training in one process. The
rung that overrides nothing, baselines/single_process.py, is the bit-exact reference for both
train.py.
"""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from recipe import rendezvous
from recipe.data.batches import BatchReader, Data, open_data
from recipe.data.loading import to_device
from recipe.device import choose_device
from recipe.errors import UserError
from recipe.ranks import Ranks
from recipe.record.checkpoint import load_weights
from recipe.record.fingerprint import check_same_training, comparison_keys
from recipe.record.schema import RungFigures
from recipe.session import Session, share_host
from recipe.settings.config import Config
from recipe.settings.flags import spelled
from recipe.start import Hooks
from recipe.training.compilation import compile_network
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

# Settings that rungs do not support: they belong to one of the engines, or measure its exchange.
# They are fields of Config; a value behind a field means that only this value is not supported.
ENGINES_OWN = (
    "transport", "batch_norm sync", "precision O2", "precision O3", "keep_batchnorm_fp32",
    "wire_format", "gradient_predivide_factor", "use_adasum", "bucket_cap_mb",
    "first_bucket_mb", "gradient_as_bucket_view", "static_graph", "num_groups", "sleeping_poll",
    "rollback", "tensor_steps", "profile_steps",
)  # fmt: skip
# What scripts lack that update weights by plain SGD in fp32, each in its own place.
BEYOND_PLAIN_SGD = ("optimizer", "precision", "loss_scale", "clip_grad_norm", "model_ema")


def refuse_settings(config: Config, lacking: Iterable[str]) -> None:
    """Raise UserError for the first of the settings `lacking` (written as in ENGINES_OWN) that is
    given. A setting of 0 is accepted: it turns the feature off, and this script does without it."""
    default = Config()
    for words in lacking:
        name, _, value = words.partition(" ")
        given = getattr(config, name)
        is_off = given == 0 and not isinstance(given, bool)
        is_given = str(given) == value if value else given != getattr(default, name) and not is_off
        if is_given:
            raise UserError(f"{spelled(name)} {given}: not supported by this script; remove it")


class Rung(Trainables):
    """Training in one process; a script in baselines/ overrides what it does differently.

    The `model` is the same as in one process. Every rank that trains makes one, before the ranks
    meet.
    """

    name: str  # of the engine, in the run folder
    transport = ""  # what carries its messages, there; "": its process group, if it has one
    launcher: str | None = "torchrun"  # None: any
    lacks: tuple[str, ...] = ()  # further settings that it does not support, as in ENGINES_OWN
    has: tuple[str, ...] = ()  # settings of ENGINES_OWN that it supports
    has_group = True  # its ranks meet in a process group
    has_remote_calls = False
    servers = 0  # the number of last ranks, which do not train
    is_for_cpu = False  # it sends tensors in the CPU's memory
    readers: World | None = None  # its place among ranks that read different images; None: all do

    sum_over_ranks = staticmethod(rendezvous.sum_over_ranks)
    from_rank_0 = staticmethod(rendezvous.from_rank_0)
    data: Data
    progress: Progress
    network: nn.Module  # what the forward pass calls: the model, or what the rung makes of it
    criterion: Criterion

    def __init__(self, config: Config, world: World) -> None:
        """Raise UserError for settings that the rung lacks, and for a wrong launcher."""
        missing = [setting for setting in ENGINES_OWN if setting not in self.has]
        refuse_settings(config, (*missing, *self.lacks))
        if self.launcher is not None and world.launcher != self.launcher:
            by = {"none": "python"}
            raise UserError(
                f"this script was started by {by.get(world.launcher, world.launcher)}: start it "
                f"with {by.get(self.launcher, self.launcher)}, as its first lines say"
            )
        if "weight_check_steps" in self.lacks:  # between exchanges its ranks' weights differ
            config = replace(config, weight_check_steps=0)
        self.config, self.device = config, choose_device(config, world)
        trainers = world.size - self.servers
        if trainers < 1:
            raise UserError("1 rank: the last one only serves; start at least 2")
        if self.is_for_cpu and self.device.type != "cpu":
            raise UserError("this script sends tensors in the CPU's memory; add --no-cuda")
        self.trains, self.server = world.rank < trainers, f"rank{trainers}"  # for remote calls
        self.world = replace(world, size=trainers, local_size=min(world.local_size, trainers))
        self.ranks = Ranks(self.world, self.sum_over_ranks, self.from_rank_0)
        self.prepare()

    @classmethod
    def main(cls, config: Config, world: World, hooks: Hooks) -> int:
        """Train, or serve the ranks that train, as `config` says, and return the exit code. Every
        rank calls this."""
        rung = cls(config, world)
        if config.threads is not None:
            torch.set_num_threads(config.threads)  # also in ranks that only serve
        calls = rendezvous.remote_calls(config, world) if rung.has_remote_calls else nullcontext()
        group = rendezvous.process_group(config, rung.world) if rung.has_group else nullcontext()
        with calls:
            if rung.trains:
                with group:
                    return train(rung, hooks)
        return 0

    def prepare(self) -> None:
        """Make what else the rung needs, before data is read; UserError if that is impossible."""

    def distribute(self) -> None:
        """Replace the network and the optimizer by versions that train over all ranks. Called once,
        when all ranks have rank 0's weights and the optimizer has a checkpoint's momentum."""

    def forward_backward(
        self, images: torch.Tensor, targets: torch.Tensor, sync_gradients: bool, lap: Callable
    ) -> Sums:
        """Add a batch's gradients to the step's, and return the batch's metrics. `sync_gradients`:
        this is the step's last batch, so gradients may be exchanged. `lap` ends a phase."""
        no_sync = getattr(self.network, "no_sync", nullcontext)  # DDP has it
        with autocast(self.config, self.device), nullcontext() if sync_gradients else no_sync():
            outputs = self.network(images)
            loss = self.criterion(outputs, targets)
        sums = batch_sums(outputs, targets, loss)
        lap("forward")
        self.scaler.scale(loss / self.config.batches_per_allreduce).backward()
        return sums

    def update(self, rate: float) -> None:
        """Update the weights with the step's gradients. `rate` is the learning rate, which the
        optimizer already has."""
        unscale_and_clip(self, self.config.clip_grad_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        round_weights(self.fp16_model, self.model)

    def measured(self) -> RungFigures:
        """Return what the rung has measured itself; called when training is complete."""
        return RungFigures()

    def memory_by_rank(self, optimizer: torch.optim.Optimizer) -> RungFigures:
        """Return each rank's bytes of optimizer state and weights; of sharded ones, its part."""

        def by_rank(tensors: Iterable[Any]) -> list[int]:
            # Of a sharded tensor (DTensor), this rank's part.
            parts = (
                tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors
            )
            num_bytes = torch.tensor([sum(part.nbytes for part in parts)])
            return self.ranks.rows(num_bytes).flatten().tolist()

        values = (value for state in optimizer.state.values() for value in state.values())
        return RungFigures(
            optimizer_bytes=by_rank(filter(torch.is_tensor, values)),
            weight_bytes=by_rank(self.model.parameters()),
        )


def _begin(rung: Rung, hooks: Hooks) -> Session:
    """Load data and model, resume from an earlier run, and open the record."""
    config, world, device = rung.config, rung.world, rung.device
    data = rung.data = open_data(config, hooks.epoch_images)
    check_same_training(comparison_keys(rung.name, config, data, device), rung.ranks)
    share = share_host(config, device, rung.ranks)
    reader = BatchReader(config, data, rung.readers or world, device, share.workers)
    model = build_model(config, data.num_classes, download=world.is_first)
    if world.is_first:
        load_weights(model, config, data)
    rung.model = model.to(device)
    if config.compile:
        compile_network(model, world.size)
    if config.weights is not None or config.pretrained:
        for values in model.state_dict().values():
            values.copy_(rung.ranks.from_first(values.clone()))
    rung.network = rung.fp16_model = fp16_model = working_copy(model, config)
    rung.optimizer, rung.scaler = build_optimizer(fp16_model, config), build_scaler(config, device)
    train_masters(rung.optimizer, fp16_model, model, rung.ranks)
    rung.criterion, rung.ema = build_criterion(config), build_ema(model, config)
    lr_scale = config.batches_per_allreduce * reader.world.size
    session = Session(rung.name, config, rung.ranks, reader, share, rung, lr_scale)
    rung.progress = session.progress
    rung.distribute()
    session.open_record(rung.transport or rendezvous.transport_of(device))
    return session


def _step(rung: Rung, session: Session, exchange: bool) -> tuple[Sums, float]:
    """Make one step; return its metrics on this rank, and its learning rate."""
    config, progress, meter, reader = rung.config, rung.progress, session.meter, session.reader
    seed_step(config, progress.step, reader.world.rank)
    rate = learning_rate(config, progress.samples_seen / rung.data.num_train, session.lr_scale)
    for group in rung.optimizer.param_groups:
        group["lr"] = rate
    sums = torch.zeros(4, dtype=torch.float64, device=rung.device)
    for batch_number in range(1, config.batches_per_allreduce + 1):
        heartbeat()
        images, targets = to_device(next(reader.batches), config, rung.device)
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
    """Train, or only evaluate, as the rung's settings say; write the run folder, and return the
    exit code. Every rank that trains calls this."""
    session = _begin(rung, hooks)
    with session.training():
        rung.network.train()
        while session.goes_on:
            sums, rate = _step(rung, session, hooks.exchanges())
            session.end_step(sums, rate)
            hooks.step_ended(session)
            session.meter.restart()

    measured = rung.measured()
    code = session.end(measured)
    for name, value in vars(measured).items():
        if rung.world.is_first and value is not None:
            print(f"{name}: {value}")
    return code
