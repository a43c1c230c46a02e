"""Train ImageNet with PyTorch DistributedDataParallel (DDP).

    torchrun --nproc-per-node 8 ddp_train/train.py --data IMAGENET

Its twin is horovod_train/train.py: `diff horovod_train/train.py ddp_train/train.py` shows all
that the two engines ask for differently. What knows no engine is in recipe/.
"""

from recipe.config import Config, parse_args
from recipe.errors import one_message
from recipe.watch import keep_watch
from recipe.world import World, read_world

ENGINE = "ddp"

if __name__ == "__main__":  # before torch is loaded: --help and typing errors are answered at once
    world = read_world()
    config = parse_args(ENGINE, world)
    keep_watch(world, config.stall_timeout)

import math
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from ddp_train.buckets import bucket_sizes
from ddp_train.rendezvous import meeting_point, patience
from recipe.training.agreement import check_same_training, check_same_weights, facts_of
from recipe.record.checkpoint import Trainables, keep_checkpoint, load_weights, resume
from recipe.data.batches import open_data, remaining_steps, samples_per_step
from recipe.data.batches import to_device, training_batches
from recipe.device import choose_device, core_row, loader_workers, own_row, share_of_cores
from recipe.record.environment import describe, fingerprint, summarize, usage_row
from recipe.training.metrics import batch_sums
from recipe.training.model import autocast, build_ema, build_model, build_optimizer, build_scaler
from recipe.training.model import replace_batch_norm, seed_step
from recipe.training.phases import exchanges_gradients
from recipe.record.recorder import Recorder
from recipe.record.run_folder import open_run_folder
from recipe.training.schedule import learning_rate
from recipe.training.validation import align_batch_norm, validate
from recipe.training.wire_format import settle_wire_format


def main(config: Config, world: World) -> None:
    """Train, or only evaluate, as `config` says. Every rank calls this."""
    data = open_data(config, world)
    device = choose_device(config, world)

    # -- The engine: who takes part, and what carries the messages ---------------------------------
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"  # Gloo: without GPU, too
    dist.init_process_group(backend, **meeting_point(world), timeout=patience(config))
    transport = "NCCL" if device.type == "cuda" else "Gloo"

    def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
        """For figures, not gradients: the ranks' values added up, in the memory where they are."""
        dist.all_reduce(values := values.clone(), op=dist.ReduceOp.SUM)
        return values

    def from_rank_0(values: torch.Tensor) -> torch.Tensor:
        """Rank 0's values, on each rank."""
        dist.broadcast(values, src=0)
        return values

    check_same_training(facts_of(ENGINE, config, data, device), world, device, sum_over_ranks)
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
    if config.batch_norm == "sync":
        model = replace_batch_norm(model, nn.SyncBatchNorm)
    scaler = build_scaler(config, device)
    # Each worker adds its batch to the global one: the linear scaling rule.
    lr_scale = config.batches_per_allreduce * world.size

    def distribute(model: nn.Module, config: Config) -> tuple:
        """Network and optimizer, with rank 0's weights. During backward each bucket of gradients
        is averaged, divided by the number of ranks and then summed, as soon as it is full."""
        network = DistributedDataParallel(
            model,
            device_ids=[device] if device.type == "cuda" else None,
            **bucket_sizes(config),
            gradient_as_bucket_view=config.gradient_as_bucket_view,
            static_graph=config.static_graph,
        )
        # BatchNorm's statistics travel as --batch-norm says, not in each forward.
        network.broadcast_buffers = False
        if config.sends_fp16:
            network.register_comm_hook(None, fp16_compress_hook)
        return network, build_optimizer(model, config)

    config = settle_wire_format(config, world, model, device, distribute, sum_over_ranks)
    network, optimizer = distribute(model, config)
    ema = build_ema(model, config)
    criterion = nn.CrossEntropyLoss(label_smoothing=config.label_smoothing)
    parts = Trainables(model, optimizer, scaler, ema)
    folder = open_run_folder(config, world, ENGINE, from_rank_0)
    progress = resume(parts, config, world, data, folder, from_rank_0)
    recorder = Recorder(config, world, device, data, folder, progress, workers)
    recorder.begin(
        describe(world, ENGINE, transport, device, threads, cores),
        fingerprint(config, world, data, model, device, threads, lr_scale),
    )

    collectives = sum_over_ranks, from_rank_0
    validation = parts, recorder, device, workers, *collectives

    # -- Training ----------------------------------------------------------------------------------
    step_samples = samples_per_step(config, world)
    start = progress.samples_seen
    stop = start + step_samples * remaining_steps(config, world, data, progress.step, start)
    batches = training_batches(data, config, world, device, workers, start, stop, recorder.input)
    finished, stopped = start == stop, False
    figures = validate(start // data.num_train, *validation) if finished else {}
    recorder.start_clock()
    network.train()
    while not finished and not stopped:
        seed_step(config, progress.step, world.rank)
        rate = learning_rate(config, progress.samples_seen / data.num_train, lr_scale)
        for group in optimizer.param_groups:
            group["lr"] = rate

        exchange = exchanges_gradients(config, progress.step)
        sums = torch.zeros(4, dtype=torch.float64, device=device)
        for batch_number in range(1, config.batches_per_allreduce + 1):
            images, targets = to_device(next(batches), config, device)
            recorder.lap("data")
            # Gradients add up on each rank; only the last backward pass of the step sends them.
            sends = exchange and batch_number == config.batches_per_allreduce
            with nullcontext() if sends else network.no_sync():
                with autocast(config, device):
                    outputs = network(images)
                    loss = criterion(outputs, targets)
                sums += batch_sums(outputs, targets, loss)
                recorder.lap("forward")
                scaler.scale(loss / config.batches_per_allreduce).backward()
            recorder.lap("backward")

        if exchange:
            scaler.unscale_(optimizer)
            if config.clip_grad_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), config.clip_grad_norm)
            scaler.step(optimizer)
            scaler.update()
        recorder.trace(model, loss)
        model.zero_grad()
        if ema is not None:
            ema.update_parameters(model)

        epoch = progress.samples_seen // data.num_train
        progress.step += 1
        progress.samples_seen += step_samples
        recorder.step(sums, rate)
        epoch_ended = progress.samples_seen // data.num_train > epoch
        finished = progress.samples_seen >= stop
        save = epoch_ended or finished or progress.step % (config.checkpoint_steps or math.inf) == 0
        if save or progress.step % config.log_interval == 0:
            stopped = recorder.write_steps(sum_over_ranks(recorder.pending_sums()))
        if epoch_ended or finished:
            recorder.end_epoch(epoch, complete=epoch_ended)
            figures = validate(epoch, *validation)
            finished = finished or figures.get("top1", 0) >= (config.desired_acc or math.inf)
        if save or stopped:
            align_batch_norm(model, config, world, *collectives)
            check_same_weights(model, progress.step, world, sum_over_ranks)
            keep_checkpoint(parts, progress, config, world, data, folder, figures, sum_over_ranks)
        recorder.restart_clock()

    if finished:
        usage = sum_over_ranks(own_row(world, usage_row(recorder, model, device)))
        recorder.close(summarize(recorder, figures, usage, model))
    else:
        recorder.stop()
    dist.destroy_process_group()


if __name__ == "__main__":
    with one_message(world):
        main(config, world)
