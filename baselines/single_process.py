"""The first rung: the same training in one process, with no engine at all.

    python baselines/single_process.py

What both train.py do on one worker must come out bit by bit as here; a test holds them to it.
"""

from recipe.settings.config import Config, parse_args
from recipe.errors import one_message
from recipe.watch import own_world
from recipe.world import World

if __name__ == "__main__":  # before torch is loaded
    world = own_world()
    config = parse_args("single", world)

import os

import torch

from recipe.data.batches import (
    open_data,
    samples_per_step,
    to_device,
    training_batches,
    training_end,
    validation_batches,
)
from recipe.device import choose_device, loader_workers, share_of_cores
from recipe.record.fingerprint import weights_sha256
from recipe.errors import UserError
from recipe.settings.flags import MeasurementFlags, RunFlags
from recipe.loop import refuse_settings
from recipe.ranks import Ranks
from recipe.training.state import round_weights, train_masters, working_copy
from recipe.training.state import unscale_and_clip
from recipe.training.metrics import evaluate, means
from recipe.training.model import (
    autocast,
    build_criterion,
    build_model,
    build_optimizer,
    build_scaler,
    seed_step,
)
from recipe.training.optimizers import learning_rate
from recipe.training.state import Trainables

# It begins anew, keeps nothing, sends nothing, and measures nothing.
LACKS = (
    *(name for name in RunFlags.__annotations__ if name != "max_steps"),
    *MeasurementFlags.__annotations__,
    "weights", "new_head", "model_ema", "bad_images", "transport", "knobs",
)  # fmt: skip


def main(config: Config, world: World) -> None:
    """Train as `config` says, print each epoch's validation and, last, a digest of the weights."""
    refuse_settings(config, LACKS)
    if world.size > 1:
        raise UserError(
            f"{world.launcher} started {world.size} processes: this script is for a single one; "
            "start it with python"
        )
    data = open_data(config)
    for one in (data.train, data.val):
        if one is not None and one.left_out:
            print(f"{one.root}: {one.left_out}")
    device = choose_device(config, world)
    cores = share_of_cores([(world.host, sorted(os.sched_getaffinity(0)))], rank=0)
    torch.set_num_threads(config.threads or cores)
    workers = loader_workers(config, device, cores)
    num_steps, stop = training_end(config, world, data, step=0, samples_seen=0)
    batches = training_batches(data, config, world, device, workers, 0, stop)

    model = build_model(config, data.num_classes, download=True).to(device)
    fp16_model = working_copy(model, config)  # under O2 a copy with fp16 weights, else the model
    optimizer, scaler = build_optimizer(fp16_model, config), build_scaler(config, device)
    train_masters(optimizer, fp16_model, model, Ranks(world))
    parts = Trainables(model, optimizer, scaler, None, fp16_model)
    criterion = build_criterion(config)

    position = 0  # in the stream of samples
    fp16_model.train()
    for step in range(num_steps):
        seed_step(config, step, rank=0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(
                config, position / data.num_train, config.batches_per_allreduce
            )
        for _ in range(config.batches_per_allreduce):
            images, targets = to_device(next(batches), config, device)
            with autocast(config, device):
                loss = criterion(fp16_model(images), targets)
            scaler.scale(loss / config.batches_per_allreduce).backward()
        unscale_and_clip(parts, config.clip_grad_norm)
        scaler.step(optimizer)
        scaler.update()
        round_weights(fp16_model, model)
        fp16_model.zero_grad()

        epoch = position // data.num_train
        position += samples_per_step(config, world, epoch)
        if position // data.num_train > epoch or position >= stop:
            figures = means(
                evaluate(
                    model, validation_batches(data, config, world, device, workers), config, device
                )
            )
            print(
                f"epoch {epoch + 1:>3}/{config.epochs}  val  loss {figures['loss']:.4f}  "
                f"top-1 {figures['top1']:.2f} %"
            )
    print(f"weights {weights_sha256(model)}")


if __name__ == "__main__":
    with one_message(world):
        main(config, world)
