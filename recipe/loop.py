"""The loop around a training step, for the rungs in baselines/: data, meter, recorder, validation,
checkpoints, the wish to stop and the summary, in the order of both train.py.

A rung says what it does differently from one process in a `Rung`; all its defaults are the step of
baselines/single_process.py, bit by bit.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from recipe.config import Config
from recipe.data.batches import (
    Batch,
    Data,
    open_data,
    samples_per_step,
    to_device,
    training_batches,
    training_end,
)
from recipe.device import choose_device, core_row, loader_workers, own_row, share_of_cores
from recipe.errors import UserError
from recipe.flags import spelled
from recipe.ranks import from_rank_0, sum_over_ranks, transport_of
from recipe.record.checkpoint import finish_checkpoint, keep_checkpoint
from recipe.record.environment import describe, fingerprint, summarize, usage_row
from recipe.record.lines import rung_lines
from recipe.record.meter import StepMeter
from recipe.record.recorder import Recorder
from recipe.record.resume import resume
from recipe.record.run_folder import open_run_folder, stop_is_asked
from recipe.record.schema import RungFigures
from recipe.record.weights import load_weights
from recipe.start import Hooks
from recipe.training.agreement import check_same_training, check_same_weights, comparison_keys
from recipe.training.loss_scale import unscale_and_clip
from recipe.training.metrics import Sums, batch_sums, check_evaluations, check_steps
from recipe.training.model import (
    autocast,
    build_criterion,
    build_ema,
    build_model,
    build_optimizer,
    build_scaler,
    seed_step,
    update_ema,
)
from recipe.training.schedule import learning_rate
from recipe.training.state import Progress, Trainables
from recipe.training.validation import align_batch_norm, validate
from recipe.watch import heartbeat
from recipe.world import World

# Settings that no rung has: they belong to one of the engines, or measure its exchange. Fields of
# Config; with a value, only that is meant.
ENGINES_OWN = (
    "transport", "batch_norm sync", "precision O2", "precision O3", "keep_batchnorm_fp32",
    "wire_format", "gradient_predivide_factor", "use_adasum", "knobs", "bucket_cap_mb",
    "first_bucket_mb", "gradient_as_bucket_view", "static_graph", "num_groups", "ablation_steps",
    "tensor_steps", "profile_steps",
)  # fmt: skip


@dataclass(kw_only=True)
class Parts(Trainables):
    """What a rung's functions work on; the `model` is as one process has it."""

    config: Config
    device: torch.device
    data: Data
    progress: Progress
    network: nn.Module  # what the forward pass calls: the model, or what a rung makes of it
    criterion: nn.Module


def forward_backward(
    parts: Parts, images: torch.Tensor, targets: torch.Tensor, sync_gradients: bool, lap: Callable
) -> Sums:
    """Add a batch's gradients to those of the step, and return its metrics. `sync_gradients`: it is
    the step's last batch, and they may be exchanged. `lap` ends a phase."""
    no_sync = getattr(parts.network, "no_sync", nullcontext)  # DDP has it
    with autocast(parts.config, parts.device), nullcontext() if sync_gradients else no_sync():
        outputs = parts.network(images)
        loss = parts.criterion(outputs, targets)
    sums = batch_sums(outputs, targets, loss)
    lap("forward")
    parts.scaler.scale(loss / parts.config.batches_per_allreduce).backward()
    return sums


def update(parts: Parts, rate: float) -> None:
    """Change the weights by the gradients of the step, at this learning rate, and clear these."""
    for group in parts.optimizer.param_groups:
        group["lr"] = rate
    unscale_and_clip(parts, parts.config.clip_grad_norm)
    parts.scaler.step(parts.optimizer)
    parts.scaler.update()
    parts.model.zero_grad()


def whole(parts: Parts) -> tuple[nn.Module, Any]:
    """Model and optimizer as one process has them, to be evaluated, kept and compared. All ranks
    call this; the optimizer's state is asked for on rank 0 alone. BatchNorm's statistics are to be
    the trained network's own, not copies: they may be overwritten."""
    return parts.model, parts.optimizer


@dataclass(frozen=True)
class Rung:
    """What a way of training does differently from one process."""

    name: str  # of the engine, in the run folder
    transport: str = ""  # what carries its messages, there; "": its process group, if it has one
    # Called once, with rank 0's weights on all ranks, and a checkpoint's momentum in the optimizer:
    # replaces the network and the optimizer.
    distribute: Callable[[Parts], object] = lambda parts: None
    forward_backward: Callable[[Parts, torch.Tensor, torch.Tensor, bool, Callable], Sums] = (
        forward_backward
    )
    update: Callable[[Parts, float], object] = update
    whole: Callable[[Parts], tuple[nn.Module, Any]] = whole
    # Called once, on each rank, when training is complete.
    measured: Callable[[Parts], RungFigures] = lambda parts: RungFigures()
    # This rank's place among those that read different images, where not all ranks do.
    readers: World | None = None


def prepare(
    config: Config, world: World, lacks: tuple[str, ...] = (), launcher: str = "torchrun"
) -> torch.device:
    """This rank's device. UserError for settings that no rung has, for those that this one `lacks`
    (as in ENGINES_OWN), and if another `launcher` started this process."""
    default = Config()
    for name, _, value in (words.partition(" ") for words in (*ENGINES_OWN, *lacks)):
        given = getattr(config, name)
        if str(given) == value if value else given != getattr(default, name):
            raise UserError(f"{spelled(name)} {given}: not supported by this script; remove it")
    if world.launcher != launcher:
        by = {"none": "python"}
        raise UserError(
            f"this script was started by {by.get(world.launcher, world.launcher)}: start it with "
            f"{by.get(launcher, launcher)}, as its first lines say"
        )
    return choose_device(config, world)


def memory_by_rank(world: World, optimizer: torch.optim.Optimizer, model: nn.Module) -> RungFigures:
    """What each rank holds of an optimizer's state and of the weights, of sharded ones its part."""

    def by_rank(tensors: Iterable[Any]) -> list[int]:
        parts = (one.to_local() if hasattr(one, "to_local") else one for one in tensors)
        own = torch.tensor([sum(part.nbytes for part in parts)])
        return sum_over_ranks(own_row(world, own)).flatten().tolist()

    values = (value for state in optimizer.state.values() for value in state.values())
    return RungFigures(
        optimizer_bytes=by_rank(filter(torch.is_tensor, values)),
        weight_bytes=by_rank(model.parameters()),
    )


@dataclass
class _Session:
    """What stays the same from the first step to the last."""

    config: Config
    world: World
    readers: World
    rung: Rung
    parts: Parts
    folder: Path
    meter: StepMeter
    recorder: Recorder
    workers: int
    work: dict[str, Any]  # the fingerprint
    lr_scale: int


def _begin(
    config: Config, world: World, device: torch.device, rung: Rung, hooks: Hooks
) -> _Session:
    """Data, model, and what was kept of an earlier run; open the record."""
    readers = rung.readers or world
    data = open_data(config, world, hooks.epoch_images)
    check_same_training(
        comparison_keys(rung.name, config, data, device), world, device, sum_over_ranks
    )
    cores = sum_over_ranks(own_row(world, core_row(world)))
    threads = config.threads or share_of_cores(cores, world.rank)
    torch.set_num_threads(threads)
    workers = loader_workers(config, device, threads)

    model = build_model(config, data.num_classes, download=world.is_first)
    if config.weights is not None and world.is_first:
        load_weights(model, config.weights)
    model.to(device)
    if config.weights is not None or config.pretrained:
        for values in model.state_dict().values():
            values.copy_(from_rank_0(values.clone()))
    optimizer, scaler = build_optimizer(model, config), build_scaler(config, device)
    criterion, ema = build_criterion(config), build_ema(model, config)
    folder = open_run_folder(config, world, rung.name, from_rank_0)
    kept = Trainables(model, optimizer, scaler, ema)
    progress = resume(kept, config, world, data, folder, from_rank_0)
    lr_scale = config.batches_per_allreduce * readers.size
    work = fingerprint(config, readers, data, model, device, threads, lr_scale)
    parts = Parts(
        **vars(kept), config=config, device=device, data=data, progress=progress, network=model,
        criterion=criterion,
    )  # fmt: skip
    rung.distribute(parts)

    transport = rung.transport or transport_of(device)
    environment = describe(world, rung.name, transport, device, threads, cores)
    reporting = replace(world, size=readers.size)  # rank 0 speaks; who reads makes up a step
    recorder = Recorder(config, reporting, data, folder, progress, environment)
    meter = StepMeter(config, readers, device, data, progress, workers)
    return _Session(
        config, world, readers, rung, parts, folder, meter, recorder, workers, work, lr_scale,
    )  # fmt: skip


def _step(session: _Session, batches: Iterator[Batch]) -> tuple[Sums, float]:
    """One step: its metrics on this rank, and its learning rate."""
    config, parts, meter = session.config, session.parts, session.meter
    seed_step(config, parts.progress.step, session.readers.rank)
    epoch = parts.progress.samples_seen / parts.data.num_train
    rate = learning_rate(config, epoch, session.lr_scale)
    sums = torch.zeros(4, dtype=torch.float64, device=parts.device)
    for batch_number in range(1, config.batches_per_allreduce + 1):
        heartbeat()
        images, targets = to_device(next(batches), config, parts.device)
        meter.lap("data")
        sync_gradients = batch_number == config.batches_per_allreduce
        sums += session.rung.forward_backward(parts, images, targets, sync_gradients, meter.lap)
        meter.lap("backward")
    session.rung.update(parts, rate)
    update_ema(parts.ema, parts.model, config, parts.progress.step + 1)
    meter.lap("optimizer")
    return sums, rate


def _whole(session: _Session) -> Trainables:
    """Everything that training changes, as one process has it; every rank calls this."""
    model, optimizer = session.rung.whole(session.parts)
    return Trainables(model, optimizer, session.parts.scaler, session.parts.ema)


def _validate(session: _Session, trained: Trainables, epoch: int) -> dict[str, float]:
    """The figures of the better of model and moving average, on all validation images."""
    config, parts = session.config, session.parts
    evaluations = validate(
        trained, config, session.world, parts.data, parts.device, session.workers,
        sum_over_ranks, from_rank_0,
    )  # fmt: skip
    check_evaluations(evaluations, parts.progress.step, config, session.meter.first_step)
    parts.progress.train_seconds = session.meter.train_seconds
    return session.recorder.write_evaluations(epoch, evaluations)


def _keep(session: _Session, trained: Trainables, figures: dict[str, float]) -> None:
    """Keep a checkpoint."""
    config, world = session.config, session.world
    progress = session.parts.progress
    align_batch_norm(trained.model, config, world, sum_over_ranks, from_rank_0)
    check_same_weights(trained.model, progress.step, world, sum_over_ranks)
    is_best, data = progress.take_best(figures), session.parts.data
    keep_checkpoint(trained, progress, config, world, data, session.folder, is_best, sum_over_ranks)


def train(config: Config, world: World, device: torch.device, rung: Rung, hooks: Hooks) -> None:
    """Train, or only evaluate, as `config` says, and write the run folder. Every rank that trains
    calls this."""
    session = _begin(config, world, device, rung, hooks)
    parts, meter, recorder = session.parts, session.meter, session.recorder
    data, progress = parts.data, parts.progress
    start = progress.samples_seen
    last_step, stop = training_end(config, session.readers, data, progress.step, start)
    batches = training_batches(
        data, config, session.readers, device, session.workers, start, stop, meter.input
    )
    finished, stopped = start == stop, False
    figures: dict[str, float] = {}
    if finished:
        trained = _whole(session)
        figures = _validate(session, trained, start // data.num_train)
    recorder.open_bar(last_step)
    meter.start()
    parts.network.train()
    while not finished and not stopped:
        sums, rate = _step(session, batches)
        epoch = progress.samples_seen // data.num_train
        step_samples = samples_per_step(config, session.readers, epoch)
        progress.end_step(step_samples, meter.train_seconds, parts.scaler.skipped_steps)
        meter.end_step(sums, rate)
        recorder.show_step()
        finish_checkpoint(timeout=0)  # if the last one could not be written, that is an error now
        epoch_ended = progress.samples_seen // data.num_train > epoch
        finished = progress.samples_seen >= stop
        save = epoch_ended or finished or progress.step % (config.checkpoint_steps or math.inf) == 0
        if save or progress.step % config.log_interval == 0:
            steps = meter.take_steps(sum_over_ranks)
            recorder.write_steps(steps)
            check_steps(steps, meter.first_step)
            stopped = stop_is_asked(session.folder, world, from_rank_0)
        if save or stopped:
            trained = _whole(session)
        if epoch_ended or finished:
            meter.energy.stop()  # an evaluation follows
            if epoch_ended:
                recorder.write_epoch(epoch)
            figures = _validate(session, trained, epoch)
            finished = finished or figures.get("top1", 0) >= (config.desired_acc or math.inf)
        if save or stopped:
            _keep(session, trained, figures)
            if not finished:
                del trained  # which may be a copy
        hooks.step_ended()
        meter.restart()

    if finished:
        usage = sum_over_ranks(own_row(world, usage_row(meter, trained.model, device)))
        ran_on, work = recorder.environment, session.work
        summary = summarize(ran_on, work, meter, figures, usage, trained.model)
        summary = replace(summary, rung=rung.measured(parts))
    finish_checkpoint()
    recorder.close(summary) if finished else recorder.stop()
    for line in rung_lines(summary.rung) if finished and world.is_first else ():
        print(line)
