"""How large the buckets are in which DDP exchanges gradients."""

import inspect
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from recipe.config import Config
from recipe.errors import UserError

DEFAULT_CAP_MB = 25.0  # torch's own


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
