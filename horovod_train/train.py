"""Train ImageNet with Horovod.

    horovodrun -np 8 -H node0:4,node1:4 python horovod_train/train.py --data IMAGENET

`diff horovod_train/train.py ddp_train/train.py` shows everything that the two engines do
differently. Code that does not depend on the engine is in recipe/.
"""

from horovod_train.elastic import supervise
from recipe.settings.config import Config
from recipe.start import Hooks, run_script
from recipe.watch import heartbeat
from recipe.world import World

ENGINE = "horovod"

if __name__ == "__main__":  # before torch is loaded
    supervise()  # if lost ranks are to be replaced, this process watches and another one trains
    run_script(__file__)  # reads the flags, and calls `main`

import sys

import torch
from torch import nn

from horovod_train.engine import COMPRESSION, check_transport, hvd, prepare, waiting_asleep
from recipe.data.batches import BatchReader, open_data
from recipe.data.loading import to_device
from recipe.device import choose_device
from recipe.ranks import Ranks
from recipe.record.probes import StepProfiler, write_trace
from recipe.record.checkpoint import load_weights
from recipe.record.fingerprint import check_same_training, comparison_keys
from recipe.session import Session, share_host
from recipe.training.batch_norm import replace_batch_norm
from recipe.training.compilation import compile_network
from recipe.training.metrics import batch_sums
from recipe.training.model import autocast, build_criterion, build_ema, build_model, build_optimizer
from recipe.training.model import build_scaler, seed_step, update_ema
from recipe.training.optimizers import learning_rate
from recipe.training.state import Trainables, round_weights, train_masters, unscale_and_clip
from recipe.training.state import working_copy
from recipe.training.wire_trial import settle_wire_format


def main(config: Config, world: World, hooks: Hooks) -> int:
    """Train, or only evaluate, by `config`, and return the exit code. Every rank calls this."""
    data = open_data(config, hooks.epoch_images)
    device = choose_device(config, world)

    # -- The engine: who takes part, and what carries the messages ---------------------------------
    prepare(config, world)
    hvd.init()
    transport = check_transport(config, world, device)

    def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
        """Add up the ranks' values (metrics, not gradients); the sum stays on their device."""
        return hvd.allreduce(values, op=hvd.Sum, name="figures")

    def from_rank_0(values: torch.Tensor) -> torch.Tensor:
        """Return rank 0's values on every rank."""
        return hvd.broadcast(values, root_rank=0, name="from_rank_0")

    ranks = Ranks(world, sum_over_ranks, from_rank_0)
    check_same_training(comparison_keys(ENGINE, config, data, device), ranks)
    share = share_host(config, device, ranks)
    reader = BatchReader(config, data, world, device, share.workers)

    # -- The model, and what trains it -------------------------------------------------------------
    model = build_model(config, data.num_classes, download=world.is_first)
    if world.is_first:
        load_weights(model, config, data)  # the other ranks get them below
    model.to(device)
    if config.batch_norm == "sync" and world.size > 1:
        model = replace_batch_norm(model, hvd.SyncBatchNorm, ranks.sum)
    if config.compile:
        compile_network(model, world.size)
    scaler = build_scaler(config, device)
    # Each worker adds its batch to the global one: the linear scaling rule.
    lr_scale = config.batches_per_allreduce * world.size
    if config.use_adasum:  # it accounts for other ranks' batches, except those NCCL averages first
        lr_scale = config.batches_per_allreduce * (world.local_size if transport == "NCCL" else 1)
    predivide = config.gradient_predivide_factor or world.size  # as DDP: no overflow in fp16

    def distribute(model: nn.Module, config: Config) -> tuple:
        """Return network and optimizer: rank 0's weights, gradients averaged during backward."""
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        distributed = hvd.DistributedOptimizer(
            build_optimizer(model, config),
            named_parameters=model.named_parameters(),
            compression=COMPRESSION[config.wire_format],
            backward_passes_per_step=config.batches_per_allreduce,
            op=hvd.Adasum if config.use_adasum else hvd.Average,
            gradient_predivide_factor=1.0 if config.use_adasum else predivide,
            groups=config.num_groups,
        )
        return model, waiting_asleep(distributed, config, device)

    config = settle_wire_format(config, ranks, model, device, distribute)
    fp16_model = working_copy(model, config)  # under O2 a copy with fp16 weights, else the model
    network, optimizer = distribute(fp16_model, config)
    train_masters(optimizer, fp16_model, model, ranks)
    ema = build_ema(model, config)
    criterion = build_criterion(config)
    parts = Trainables(model, optimizer, scaler, ema, fp16_model)
    session = Session(ENGINE, config, ranks, reader, share, parts, lr_scale)
    session.open_record(transport)
    folder, progress, meter = session.folder, session.progress, session.meter
    timeline = ENGINE, hvd.start_timeline, hvd.stop_timeline
    profiler = StepProfiler(config, world, folder, progress.step, fp16_model, timeline)

    # -- Training ----------------------------------------------------------------------------------
    with session.training():
        network.train()
        while session.goes_on:
            seed_step(config, progress.step, world.rank)
            rate = learning_rate(config, progress.samples_seen / data.num_train, lr_scale)
            for group in optimizer.param_groups:
                group["lr"] = rate

            # Each lap ends a phase of the step: data, forward, backward, optimizer.
            exchange = hooks.exchanges()
            sums = torch.zeros(4, dtype=torch.float64, device=device)
            passes = config.batches_per_allreduce if exchange else sys.maxsize
            optimizer.set_backward_passes_per_step(passes)
            for _ in range(config.batches_per_allreduce):
                heartbeat()
                images, targets = to_device(next(reader.batches), config, device)
                meter.lap("data")
                # Gradients add up on each rank; the optimizer counts passes before it sends.
                with autocast(config, device):
                    outputs = network(images)
                    loss = criterion(outputs, targets)
                sums += batch_sums(outputs, targets, loss)
                meter.lap("forward")
                scaler.scale(loss / config.batches_per_allreduce).backward()
                meter.lap("backward")

            if config.use_adasum:
                optimizer.step()  # steps locally, then combines the ranks' updates
            elif exchange:
                optimizer.synchronize()  # before the averages are unscaled and clipped
                meter.lap("backward")
                unscale_and_clip(parts, config.clip_grad_norm)
                with optimizer.skip_synchronize():
                    scaler.step(optimizer)
                scaler.update()
                round_weights(fp16_model, model)
            write_trace(config, world, folder, progress.step + 1, model, loss)
            network.zero_grad()
            update_ema(ema, model, config, progress.step + 1)
            meter.lap("optimizer")

            # The step is done. What follows: signals, record, checks, checkpoint, evaluation.
            profiler.end_step(progress.step + 1)
            session.end_step(sums, rate)
            hooks.step_ended(session, model)
            meter.restart()

    profiler.close(session.recorder.say)
    exit_code = session.end()
    hvd.shutdown()
    return exit_code
