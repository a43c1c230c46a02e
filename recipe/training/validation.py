"""Validation over all ranks, exact at any number of them; the engine's collectives come as
arguments."""

import time
from collections.abc import Callable

import torch
from torch import nn

from recipe.config import Config
from recipe.data.batches import validation_batches
from recipe.record.checkpoint import Trainables
from recipe.record.recorder import Recorder
from recipe.training.metrics import evaluate
from recipe.training.model import copy_buffers, flat_batch_norm
from recipe.world import World

Collective = Callable[[torch.Tensor], torch.Tensor]


def align_batch_norm(
    model: nn.Module,
    config: Config,
    world: World,
    sum_over_ranks: Collective,
    from_rank_0: Collective,
) -> None:
    """Give all ranks the same BatchNorm statistics; with --batch-norm sync they have them."""
    if config.batch_norm != "sync":
        with flat_batch_norm(model) as statistics:
            if config.batch_norm == "average":
                statistics.copy_(sum_over_ranks(statistics) / world.size)
            else:
                statistics.copy_(from_rank_0(statistics))


def validate(
    epoch: int,
    parts: Trainables,
    recorder: Recorder,
    device: torch.device,
    workers: int,
    sum_over_ranks: Collective,
    from_rank_0: Collective,
) -> dict[str, float]:
    """Loss, top-1 and top-5 over all validation images, of the better of model and EMA; `epoch`
    (0-based) is what the record calls it by. Nothing for synthetic data, whose labels are random,
    unless a flag asks for it."""
    config, world, model, ema = recorder.config, recorder.world, parts.model, parts.ema
    align_batch_norm(model, config, world, sum_over_ranks, from_rank_0)
    if recorder.data.is_synthetic and not (config.evaluate or config.desired_acc):
        return {}
    results = []
    if ema is not None:
        copy_buffers(model, ema.module)
    for weights, candidate in {"model": model, "ema": ema}.items():
        if candidate is not None:
            started = time.perf_counter()
            batches = validation_batches(recorder.data, config, world, device, workers)
            sums = sum_over_ranks(evaluate(candidate, batches, config, device)).cpu()
            seconds = time.perf_counter() - started
            results.append(recorder.evaluation(epoch, sums, seconds, weights))
    return max(results, key=lambda figures: figures["top1"])
