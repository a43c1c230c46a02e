"""Train ImageNet with Horovod.

    horovodrun -np 8 -H node0:4,node1:4 python horovod_train/train.py --data IMAGENET

Its twin is ddp_train/train.py: `diff horovod_train/train.py ddp_train/train.py` shows all
that the two engines ask for differently. What knows no engine is in recipe/.
"""

from recipe.config import Config, parse_args
from recipe.errors import UserError, fail, one_message
from recipe.watch import keep_watch
from recipe.world import World, prepare_mpi, lone_copy_message, read_world

ENGINE = "horovod"

if __name__ == "__main__":  # before torch is loaded: --help and typing errors are answered at once
    world = read_world()
    config = parse_args(ENGINE, world)
    keep_watch(world, config.stall_timeout)

import math
import os
import sys

import torch
from torch import nn

try:
    import horovod.torch as hvd
except ImportError as error:
    build = "python horovod_train/build_horovod.py"
    fail(read_world(), f"error: Horovod cannot be imported ({error}); build it: {build}")

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
    prepare_mpi(world)
    if config.profile_steps:
        os.environ["HOROVOD_TIMELINE"] = "DYNAMIC"  # or hvd.start_timeline refuses
    if config.deterministic:
        os.environ["HOROVOD_FUSION_THRESHOLD"] = "0"  # what is fused is a matter of timing
    hvd.init()
    if message := lone_copy_message(world, hvd.size(), "Start it with horovodrun or mpirun"):
        raise UserError(message)
    if config.use_adasum and not hvd.mpi_enabled():
        raise UserError("--use-adasum: needs MPI, not Gloo: start it by horovodrun --mpi or mpirun")
    transport = "MPI" if hvd.mpi_enabled() else "Gloo"
    if device.type == "cuda" and hvd.nccl_built():
        transport = "NCCL"
    elif device.type == "cuda" and world.is_first:
        print("warning: this Horovod has no NCCL, gradients go through the CPU: make setup NCCL=1")

    def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
        """For figures, not gradients: the ranks' values added up, in the memory where they are."""
        return hvd.allreduce(values, op=hvd.Sum, name="figures")

    def from_rank_0(values: torch.Tensor) -> torch.Tensor:
        """Rank 0's values, on each rank."""
        return hvd.broadcast(values, root_rank=0, name="from_rank_0")

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
        model = replace_batch_norm(model, hvd.SyncBatchNorm)
    scaler = build_scaler(config, device)
    # Each worker adds its batch to the global one: the linear scaling rule. Adasum makes up for the
    # others' batches by itself, but for those that NCCL averages within a host first.
    lr_scale = config.batches_per_allreduce * world.size
    if config.use_adasum:
        lr_scale = config.batches_per_allreduce * (world.local_size if transport == "NCCL" else 1)
    predivide = config.gradient_predivide_factor or world.size  # as DDP: it keeps fp16 finite

    def distribute(model: nn.Module, config: Config) -> tuple:
        """Network and optimizer, with rank 0's weights. During backward gradients are averaged,
        fused as they get ready: divided by predivide, summed, divided by the rest."""
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        return model, hvd.DistributedOptimizer(
            build_optimizer(model, config),
            named_parameters=model.named_parameters(),
            compression=hvd.Compression.fp16 if config.sends_fp16 else hvd.Compression.none,
            backward_passes_per_step=config.batches_per_allreduce,
            op=hvd.Adasum if config.use_adasum else hvd.Average,
            gradient_predivide_factor=1.0 if config.use_adasum else predivide,
            groups=config.num_groups,
        )

    config = settle_wire_format(config, world, model, device, distribute, sum_over_ranks)
    network, optimizer = distribute(model, config)
    ema = build_ema(model, config)
    criterion = nn.CrossEntropyLoss(label_smoothing=config.label_smoothing)
    parts = Trainables(model, optimizer, scaler, ema)
    folder = open_run_folder(config, world, ENGINE, from_rank_0)
    progress = resume(parts, config, world, data, folder, from_rank_0)
    recorder = Recorder(config, world, device, data, folder, progress, workers)
    recorder.profiler.timeline = hvd.start_timeline, hvd.stop_timeline
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
        if config.ablation_steps:
            passes = config.batches_per_allreduce if exchange else sys.maxsize
            optimizer.set_backward_passes_per_step(passes)
        for _ in range(config.batches_per_allreduce):
            images, targets = to_device(next(batches), config, device)
            recorder.lap("data")
            # Gradients add up on each rank; the optimizer counts backward passes before it sends.
            with autocast(config, device):
                outputs = network(images)
                loss = criterion(outputs, targets)
            sums += batch_sums(outputs, targets, loss)
            recorder.lap("forward")
            scaler.scale(loss / config.batches_per_allreduce).backward()
            recorder.lap("backward")

        if config.use_adasum:
            optimizer.step()  # steps locally, then combines the ranks' updates
        elif exchange:
            optimizer.synchronize()  # the averages, before they are unscaled and clipped
            recorder.lap("backward")
            scaler.unscale_(optimizer)
            if config.clip_grad_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), config.clip_grad_norm)
            with optimizer.skip_synchronize():
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
    hvd.shutdown()


if __name__ == "__main__":
    with one_message(world):
        main(config, world)
