"""Train ImageNet with PyTorch DistributedDataParallel (DDP).

    torchrun --nproc-per-node 8 ddp_train/train.py --data IMAGENET

`diff horovod_train/train.py ddp_train/train.py` shows all that the two engines ask for
differently. What knows no engine is in recipe/.
"""

from recipe.config import Config
from recipe.errors import one_message
from recipe.start import Hooks, start
from recipe.watch import heartbeat
from recipe.world import World

ENGINE = "ddp"

if __name__ == "__main__":  # before torch is loaded
    config, world = start(ENGINE)

import math
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_train.buckets import bucket_hook, bucket_sizes
from ddp_train.rendezvous import meeting_point, patience
from ddp_train.timeline import start_timeline, stop_timeline
from ddp_train.transport import choose_transport
from recipe.data.batches import open_data, samples_per_step, to_device
from recipe.data.batches import training_batches, training_end
from recipe.device import choose_device, core_row, loader_workers, own_row, share_of_cores
from recipe.record.checkpoint import finish_checkpoint, keep_checkpoint
from recipe.record.environment import describe, fingerprint, summarize, usage_row
from recipe.record.meter import StepMeter
from recipe.record.probes import StepProfiler, write_trace
from recipe.record.recorder import Recorder
from recipe.record.resume import resume
from recipe.record.run_folder import open_run_folder, stop_is_asked
from recipe.record.weights import load_weights
from recipe.training.agreement import check_same_training, check_same_weights, comparison_keys
from recipe.training.half_weights import round_weights, train_masters, working_copy
from recipe.training.loss_scale import unscale_and_clip
from recipe.training.metrics import batch_sums, check_evaluations, check_steps
from recipe.training.model import autocast, build_criterion, build_ema, build_model
from recipe.training.model import build_optimizer, build_scaler, replace_batch_norm, seed_step
from recipe.training.model import update_ema
from recipe.training.phases import exchanges_gradients
from recipe.training.schedule import learning_rate
from recipe.training.state import Trainables
from recipe.training.validation import align_batch_norm, validate
from recipe.training.wire_format import settle_wire_format


def main(config: Config, world: World, hooks: Hooks) -> None:
    """Train, or only evaluate, as `config` says. Every rank calls this."""
    data = open_data(config, world, hooks.epoch_images)
    device = choose_device(config, world)

    # -- The engine: who takes part, and what carries the messages ---------------------------------
    transport, backend = choose_transport(config, world, device)
    dist.init_process_group(backend, **meeting_point(world, backend), timeout=patience(config))

    def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
        """For figures, not gradients: the ranks' values added up, in the memory where they are."""
        total = values.clone()
        dist.all_reduce(total, op=dist.ReduceOp.SUM)
        return total

    def from_rank_0(values: torch.Tensor) -> torch.Tensor:
        """Rank 0's values, on each rank."""
        dist.broadcast(values, src=0)
        return values

    check_same_training(
        comparison_keys(ENGINE, config, data, device), world, device, sum_over_ranks
    )
    # Launchers bind ranks to cores and limit threads, each in its own way: work out the shares.
    cores = sum_over_ranks(own_row(world, core_row(world)))
    threads = config.threads or share_of_cores(cores, world.rank)
    torch.set_num_threads(threads)
    workers = loader_workers(config, device, threads)

    # -- The model, and what trains it -------------------------------------------------------------
    model = build_model(config, data.num_classes, download=world.is_first)
    if config.weights is not None and world.is_first:
        load_weights(model, config.weights)  # the other ranks get them from this one, below
    model.to(device)
    if config.batch_norm == "sync" and world.size > 1:
        model = replace_batch_norm(model, nn.SyncBatchNorm, sum_over_ranks)
    scaler = build_scaler(config, device)
    # Each worker adds its batch to the global one: the linear scaling rule.
    lr_scale = config.batches_per_allreduce * world.size

    def distribute(model: nn.Module, config: Config) -> tuple:
        """Network and optimizer, with rank 0's weights; gradients are averaged during backward."""
        if world.size == 1:  # nobody to exchange with, but DDP would copy each gradient
            return model, build_optimizer(model, config)
        network = DistributedDataParallel(
            model,
            device_ids=[device] if device.type == "cuda" else None,
            **bucket_sizes(config),
            gradient_as_bucket_view=config.gradient_as_bucket_view,
            static_graph=config.static_graph,
        )
        # BatchNorm's statistics travel as --batch-norm says, not in each forward.
        network.broadcast_buffers = False
        if hook := bucket_hook(config, model):  # sums in fp16, or notes times for a profile
            network.register_comm_hook(None, hook)
        return network, build_optimizer(model, config)

    config = settle_wire_format(config, world, model, device, distribute, sum_over_ranks)
    fp16_model = working_copy(model, config)  # under O2 a copy with fp16 weights, else the model
    network, optimizer = distribute(fp16_model, config)
    train_masters(optimizer, fp16_model, model, from_rank_0)
    ema = build_ema(model, config)
    criterion = build_criterion(config)
    parts = Trainables(model, optimizer, scaler, ema, fp16_model)
    folder = open_run_folder(config, world, ENGINE, from_rank_0)
    progress = resume(parts, config, world, data, folder, from_rank_0)
    first_step, start = progress.step, progress.samples_seen
    environment = describe(world, ENGINE, transport, device, threads, cores)
    work = fingerprint(config, world, data, model, device, threads, lr_scale)
    recorder = Recorder(config, world, data, folder, progress, environment)
    meter = StepMeter(config, world, device, data, progress, workers)
    timeline = ENGINE, start_timeline, stop_timeline
    profiler = StepProfiler(config, world, folder, first_step, fp16_model, timeline)

    def validate_all(epoch: int) -> dict[str, float]:
        """The figures of the better of model and moving average, on all validation images."""
        collectives = sum_over_ranks, from_rank_0
        evaluations = validate(parts, config, world, data, device, workers, *collectives)
        check_evaluations(evaluations, progress.step, config, first_step)
        progress.train_seconds = meter.train_seconds
        return recorder.write_evaluations(epoch, evaluations)

    # -- Training ----------------------------------------------------------------------------------
    last_step, stop = training_end(config, world, data, first_step, start)
    batches = training_batches(data, config, world, device, workers, start, stop, meter.input)
    finished, stopped = start == stop, False
    figures = validate_all(start // data.num_train) if finished else {}
    recorder.open_bar(last_step)
    meter.start()
    network.train()
    while not finished and not stopped:
        seed_step(config, progress.step, world.rank)
        rate = learning_rate(config, progress.samples_seen / data.num_train, lr_scale)
        for group in optimizer.param_groups:
            group["lr"] = rate

        # Each lap ends a phase of the step: data, forward, backward, optimizer.
        exchange = exchanges_gradients(config, progress.step)
        sums = torch.zeros(4, dtype=torch.float64, device=device)
        for batch_number in range(1, config.batches_per_allreduce + 1):
            heartbeat()
            images, targets = to_device(next(batches), config, device)
            meter.lap("data")
            # Gradients add up on each rank; only the last backward pass of the step sends them.
            is_last = batch_number == config.batches_per_allreduce
            sync_gradients = world.size == 1 or (exchange and is_last)
            with autocast(config, device), nullcontext() if sync_gradients else network.no_sync():
                outputs = network(images)
                loss = criterion(outputs, targets)
            sums += batch_sums(outputs, targets, loss)
            meter.lap("forward")
            scaler.scale(loss / config.batches_per_allreduce).backward()
            meter.lap("backward")

        if exchange:
            unscale_and_clip(parts, config.clip_grad_norm)
            scaler.step(optimizer)
            scaler.update()
            round_weights(fp16_model, model)
        write_trace(config, world, folder, progress.step + 1, model, loss)
        network.zero_grad()
        update_ema(ema, model, config, progress.step + 1)
        meter.lap("optimizer")

        # -- The step is done: what its end entails ------------------------------------------------
        epoch = progress.samples_seen // data.num_train
        step_samples = samples_per_step(config, world, epoch)
        progress.end_step(step_samples, meter.train_seconds, scaler.skipped_steps)
        meter.end_step(sums, rate)
        profiler.end_step(progress.step)
        recorder.show_step()
        finish_checkpoint(timeout=0)  # if the last one could not be written, that is an error now
        epoch_ended = progress.samples_seen // data.num_train > epoch
        finished = progress.samples_seen >= stop
        save = epoch_ended or finished or progress.step % (config.checkpoint_steps or math.inf) == 0
        if save or progress.step % config.log_interval == 0:
            steps = meter.take_steps(sum_over_ranks)
            recorder.write_steps(steps)
            check_steps(steps, first_step)
            stopped = stop_is_asked(folder, world, from_rank_0)
        if epoch_ended or finished:
            meter.energy.stop()  # an evaluation follows
            if epoch_ended:
                recorder.write_epoch(epoch)
            figures = validate_all(epoch)
            finished = finished or figures.get("top1", 0) >= (config.desired_acc or math.inf)
        if save or stopped:
            align_batch_norm(model, config, world, sum_over_ranks, from_rank_0)
            check_same_weights(model, progress.step, world, sum_over_ranks)
            is_best = progress.take_best(figures)
            keep_checkpoint(parts, progress, config, world, data, folder, is_best, sum_over_ranks)
        hooks.step_ended()
        meter.restart()

    if finished:
        usage = sum_over_ranks(own_row(world, usage_row(meter, model, device)))
        summary = summarize(environment, work, meter, figures, usage, model)
    finish_checkpoint()
    profiler.close(recorder.say)
    recorder.close(summary) if finished else recorder.stop()
    dist.destroy_process_group()


if __name__ == "__main__":
    with one_message(world):
        main(config, world, Hooks())
