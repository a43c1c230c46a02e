"""DDP's buckets: their sizes, how each is sent, and, for --profile-steps on CPUs, a timeline like
Horovod's timeline of its tensors. On GPUs torch's profile already shows NCCL's kernels.
compare/timeline.py reads the timelines of both engines."""

import heapq
import inspect
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from recipe.errors import UserError
from recipe.files import replace_file
from recipe.settings.config import Config

Hook = Callable[[Any, dist.GradBucket], Future[torch.Tensor]]

DEFAULT_CAP_MB = 25.0  # torch's own
# The hook for each wire format.
HOOKS = {"fp32": default_hooks.allreduce_hook, "fp16": default_hooks.fp16_compress_hook}
# How many messages a backend sends at once, each in a separate thread; further messages wait.
THREADS = {"gloo": 2}

# A bucket in a step: its number and the names of its gradients; when the last gradient was ready,
# and when their average was back, in ns of Unix time.
Message = tuple[int, list[str], int, int]
_path: Path | None = None  # set while a timeline is recorded
_messages: list[Message] = []


def bucket_sizes(config: Config) -> dict[str, Any]:
    """Return DDP's arguments for --bucket-cap-mb and --first-bucket-mb. UserError if this torch has
    no separate size for the first bucket."""
    first, cap = config.first_bucket_mb, config.bucket_cap_mb
    if first is None:
        return {"bucket_cap_mb": cap}
    if "bucket_cap_mb_list" not in inspect.signature(DistributedDataParallel).parameters:
        raise UserError(
            f"--first-bucket-mb {first}: the DDP of torch {torch.__version__} does not take it; "
            "leave it out, or install torch 2.14"
        )
    return {"bucket_cap_mb_list": [first, cap or DEFAULT_CAP_MB]}  # the last is for all others


def bucket_hook(config: Config, model: nn.Module) -> Hook | None:
    """Return the hook that sends a bucket; None if DDP's own all-reduce is enough."""
    hook = HOOKS[config.wire_format]
    # On a GPU the host's clock would show when NCCL was called: its futures are complete by then.
    if config.profile_steps and next(model.parameters()).device.type == "cpu":
        return noted(hook, model)
    return None if config.wire_format == "fp32" else hook


# -- A timeline ------------------------------------------------------------------------------------


def start_timeline(path: str) -> None:
    """Start recording the times of each bucket."""
    global _path
    _path = Path(path)
    _messages.clear()


def stop_timeline() -> None:
    """Write the recorded times in the format of Horovod's timeline; write nothing on GPUs."""
    global _path
    assert _path is not None
    if _messages:
        trace = trace_of(_messages, THREADS.get(dist.get_backend(), 1))
        replace_file(_path, json.dumps(trace))
    _path = None


def noted(hook: Hook, model: nn.Module) -> Hook:
    """Wrap `hook` so that it records when each bucket was full and when its average was back."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def noting(state: Any, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        if _path is None:
            return hook(state, bucket)
        gradients, full = [names[id(weight)] for weight in bucket.parameters()], time.time_ns()
        number = bucket.index()

        def end(future: Future[torch.Tensor]) -> torch.Tensor:
            average = future.value()
            _messages.append((number, gradients, full, time.time_ns()))
            return average

        return hook(state, bucket).then(end)

    return noting


def trace_of(messages: list[Message], threads: int) -> list[dict[str, Any]]:
    """Return the events in Horovod's format: for each bucket a span QUEUE until its message was
    sent, and a span ALLREDUCE.

    A backend does not report when it starts a message. It does so at once if one of its threads is
    free, else as soon as one is.
    """
    messages = sorted(messages, key=lambda message: message[2])
    start = messages[0][2]
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros": start // 1000}}
    ]
    free = [0] * threads  # when each thread is free again
    for bucket, gradients, full, ended in messages:
        began = min(ended, max(full, heapq.heapreplace(free, ended)))
        queued, begin, end = ((ns - start) // 1000 for ns in (full, began, ended))
        pid, args = bucket + 1, {"name": f"bucket {bucket}"}
        events += [
            {"ph": "M", "name": "process_name", "pid": pid, "args": args},
            {"ph": "B", "name": "QUEUE", "ts": queued, "pid": pid},
            {"ph": "E", "ts": begin, "pid": pid},
            {"ph": "B", "name": "ALLREDUCE", "ts": begin, "pid": pid},
            {"ph": "E", "ts": end, "pid": pid, "args": {"gradients": gradients}},
        ]
    return events
