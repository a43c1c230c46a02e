"""A timeline of DDP's buckets, as Horovod has one of its tensors: it is for --profile-steps, and
compare/timeline.py reads both."""

import heapq
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future

from recipe.files import replace_file

Hook = Callable[[Any, dist.GradBucket], Future[torch.Tensor]]
# How many messages a backend carries at once, each by a thread of its own; the next ones wait.
THREADS = {"gloo": 2}


# A bucket of a step: its number and its gradients; when the last of these was ready, and when their
# average was back, in ns of the Unix clock.
Message = tuple[int, list[str], int, int]
Moment = int | torch.cuda.Event  # ns of the Unix clock, or on a GPU what its stream comes to
_origin: tuple[torch.cuda.Event, int] | None = None  # on a GPU: the same moment in both
_path: Path | None = None  # while a timeline is made
_moments: list[tuple[int, list[str], Moment, Moment]] = []  # of a message, as in Message


def start_timeline(path: str) -> None:
    """From now on note what becomes of each bucket."""
    global _origin, _path
    _path = Path(path)
    _moments.clear()
    if torch.cuda.is_initialized():
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        event.synchronize()
        _origin = event, time.time_ns()


def _now() -> Moment:
    """On a GPU the host's clock would tell when NCCL was asked: its futures are complete then."""
    if _origin is None:
        return time.time_ns()
    event = torch.cuda.Event(enable_timing=True)
    event.record()  # in a future's callback on a stream that waits for its message
    return event


def _unix_ns(moment: Moment) -> int:
    if isinstance(moment, int):
        return moment
    assert _origin is not None
    return _origin[1] + round(1e6 * _origin[0].elapsed_time(moment))


def stop_timeline() -> None:
    """Write what was noted, in the form of Horovod's timeline."""
    global _origin, _path
    assert _path is not None
    if _origin is not None:
        torch.cuda.synchronize()
    messages = [
        (bucket, gradients, _unix_ns(full), _unix_ns(ended))
        for bucket, gradients, full, ended in _moments
    ]
    replace_file(_path, json.dumps(trace_of(messages, THREADS.get(dist.get_backend(), 1))))
    _origin = _path = None


def noted(hook: Hook, model: nn.Module) -> Hook:
    """The same hook, which notes when each bucket was full and when its average was back."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def noting(state: Any, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        if _path is None:
            return hook(state, bucket)
        gradients, full = [names[id(one)] for one in bucket.parameters()], _now()
        number = bucket.index()

        def end(future: Future[torch.Tensor]) -> torch.Tensor:
            average = future.value()
            _moments.append((number, gradients, full, _now()))
            return average

        return hook(state, bucket).then(end)

    return noting


def trace_of(messages: list[Message], threads: int) -> list[dict[str, Any]]:
    """Horovod's form: spans of each bucket, QUEUE until its message was on its way, and ALLREDUCE.

    A backend does not say when it took a message up: at once if one of its threads was free, else
    as soon as one was.
    """
    messages = sorted(messages, key=lambda message: message[2])
    start = messages[0][2] if messages else time.time_ns()
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros": start // 1000}}
    ]
    free = [0] * threads  # when each thread is
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
