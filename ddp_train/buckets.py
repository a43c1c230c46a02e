"""How large the buckets are in which DDP exchanges gradients, and how one travels."""

import inspect
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from ddp_train.timeline import Hook, noted
from recipe.errors import UserError
from recipe.settings.config import Config

DEFAULT_CAP_MB = 25.0  # torch's own
HOOKS = {"fp32": default_hooks.allreduce_hook, "fp16": default_hooks.fp16_compress_hook}  # by wire


def bucket_sizes(config: Config) -> dict[str, Any]:
    """DDP's arguments for --bucket-cap-mb and --first-bucket-mb; UserError where this torch cannot
    size the first bucket by itself."""
    first, cap = config.first_bucket_mb, config.bucket_cap_mb
    if first is None:
        return {"bucket_cap_mb": cap}
    if "bucket_cap_mb_list" not in inspect.signature(DistributedDataParallel).parameters:
        raise UserError(
            f"--first-bucket-mb {first}: the DDP of torch {torch.__version__} does not take it; "
            "leave it out, or install torch 2.14"
        )
    return {"bucket_cap_mb_list": [first, cap or DEFAULT_CAP_MB]}  # the last holds for all others


def bucket_hook(config: Config, model: nn.Module) -> Hook | None:
    """What sends a bucket in place of DDP's own all-reduce; None: nothing need be."""
    hook = HOOKS[config.wire_format]
    # On a GPU the host's clock would tell when NCCL was asked: its futures are complete then.
    if config.profile_steps and next(model.parameters()).device.type == "cpu":
        return noted(hook, model)
    return None if config.wire_format == "fp32" else hook
