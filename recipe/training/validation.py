"""Validation over all ranks, exact at any number of them; the engine's collectives come as
arguments."""

import time
from collections.abc import Callable

import torch
from torch import nn

from recipe.config import Config
from recipe.data.batches import Data, validation_batches
from recipe.training.metrics import Evaluation, evaluate
from recipe.training.model import copy_buffers, flat_batch_norm
from recipe.training.state import Trainables
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
    parts: Trainables,
    config: Config,
    world: World,
    data: Data,
    device: torch.device,
    workers: int,
    sum_over_ranks: Collective,
    from_rank_0: Collective,
) -> list[Evaluation]:
    """The model and its moving average, if it has one, on all validation images. Nothing for
    synthetic data, whose labels are random, unless a flag asks for it."""
    model, ema = parts.model, parts.ema
    align_batch_norm(model, config, world, sum_over_ranks, from_rank_0)
    if data.is_synthetic and not (config.evaluate or config.desired_acc):
        return []
    if ema is not None:
        copy_buffers(model, ema.module)
    evaluations = []
    for weights, candidate in {"model": model, "ema": ema}.items():
        if candidate is not None:
            started = time.perf_counter()
            batches = validation_batches(data, config, world, device, workers)
            sums = sum_over_ranks(evaluate(candidate, batches, config, device)).cpu()
            evaluations.append(Evaluation(weights, sums, time.perf_counter() - started))
    return evaluations
