"""Whole steps of training, what prepares batches, metrics, evaluation and averages, on fake CUDA
tensors: no GPU is needed.

Fake tensors have shapes, types and devices, and no values. A CPU tensor that slips into work on the
GPU raises, as it would there.
"""

import ast
import contextlib
import functools
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from making import TinyNet, a_config, a_world
from needs import needs_gpu
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
)
from torch.optim import optimizer as optim
from torch.utils import _foreach_utils as foreach
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from baselines.model_parallel import TwoDevices, split
from ddp_train import train
from recipe.data import batches as batches_module
from recipe.data import loading
from recipe.data.batches import Data, training_batches
from recipe.errors import UserError
from recipe.ranks import Ranks
from recipe.start import Hooks
from recipe.training.batch_norm import align_batch_norm
from recipe.training.metrics import batch_sums, evaluate
from recipe.training.model import build_ema, build_model, update_ema
from recipe.training.state import Progress, Trainables, copy_buffers

CUDA = torch.device("cuda", 0)
SYNTHETIC = Data(None, None, 20, 10, 1000)


def moved(module: nn.Module, device: torch.device) -> nn.Module:
    """What Module.to does, which fake weights do not let be done in place."""
    for part in module.modules():
        for name, weight in part.named_parameters(recurse=False):
            part._parameters[name] = nn.Parameter(weight.detach().to(device))
        for name, values in part.named_buffers(recurse=False):
            part._buffers[name] = values.to(device)
    return module


def strides(tensor: torch.Tensor) -> list[int]:
    """How the values lie."""
    both = zip(tensor.shape, tensor.stride(), strict=True)
    return [stride for size, stride in both if size > 1]


def backward(loss: torch.Tensor) -> None:
    """What torch's engine does, and in its order: it refuses to begin without a GPU. The graph is
    torch's own, and so is what its nodes do. (They think that it is kept, for which cuDNN's
    BatchNorm makes a copy.)"""
    waiting = {loss.grad_fn: {0: torch.ones_like(loss)}}
    with torch.no_grad():
        while waiting:
            node: Any = max(waiting, key=lambda one: one._sequence_nr())
            given = waiting.pop(node)
            if hasattr(node, "variable"):
                weight, gradient = node.variable, given[0]
                if weight.grad is not None:
                    weight.grad.add_(gradient)
                elif strides(gradient) == strides(weight):
                    weight.grad = gradient
                else:
                    weight.grad = torch.empty_like(weight).copy_(gradient)
                continue
            returned = node(*map(given.get, range(len(node._input_metadata))))
            returned = returned if isinstance(returned, tuple) else (returned,)
            for gradient, (other, place) in zip(returned, node.next_functions, strict=True):
                if gradient is not None and other is not None:
                    form = other._input_metadata[place]
                    if gradient.shape != tuple(form.shape):
                        gradient = gradient.sum_to_size(form.shape)
                    gradient = gradient.to(form.dtype)
                    sums = waiting.setdefault(other, {})
                    sums[place] = sums[place] + gradient if place in sums else gradient


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All tensors are fake, and CUDA's streams, too; torch takes the GPU for real."""
    for name in ("_on_device", "_copying_stream"):
        monkeypatch.setattr(loading, name, functools.cache(getattr(loading, name).__wrapped__))
    monkeypatch.setattr(torch.cuda, "Stream", Mock())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", Mock())
    monkeypatch.setattr(FakeTensor, "record_stream", lambda tensor, stream: None, raising=False)
    monkeypatch.setattr(FakeTensorMode, "__deepcopy__", lambda mode, memo: mode, raising=False)
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    for module in (optim, foreach):  # which ask for the type before they take a list's kernel
        monkeypatch.setattr(module, "_foreach_supported_types", [FakeTensor])
    monkeypatch.setattr(nn.Module, "to", moved)
    monkeypatch.setattr(torch.Tensor, "backward", backward)
    with FakeTensorMode():
        yield


def on_gpu(*tensors: torch.Tensor) -> bool:
    """Whether all of them are there."""
    return {tensor.device for tensor in tensors} == {CUDA}


def files(count: int) -> list[loading.Batch]:
    """Batches as a loader hands them out: uint8 pixels and labels, in the CPU's memory."""
    pixels = torch.zeros(4, 3, 8, 8, dtype=torch.uint8)
    return [(pixels, torch.zeros(4, dtype=torch.int64))] * count


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("arch", ["resnet18", "mobilenet_v2"])
def test_evaluation_and_metrics(arch: str) -> None:
    config = a_config(arch=arch, train_crop_size=32)
    with CUDA:
        model = build_model(config, 1000, download=False)
    for _ in range(5):
        sums = evaluate(model, loading._one_ahead(files(2), config, CUDA), config, CUDA)
    # Memory that a stream has freed serves that stream alone: each more would keep its own.
    assert on_gpu(sums) and torch.cuda.Stream.call_count == 1
    assert (sums.shape, sums.dtype) == ((4,), torch.float64)
    outputs = model(torch.zeros(4, 3, 32, 32, device=CUDA))
    targets = torch.zeros(4, dtype=torch.int64, device=CUDA)
    step = batch_sums(outputs, targets, nn.functional.cross_entropy(outputs, targets))
    assert on_gpu(step, sums + step)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("batch_norm", ["local", "average"])
def test_averages(batch_norm: str) -> None:
    config = a_config(model_ema=True, batch_norm=batch_norm)
    with CUDA:
        model = TinyNet()
    ema = build_ema(model, config)
    for step in (1, 2):  # the first is a copy
        update_ema(ema, model, config, step)
    copy_buffers(model, ema.module)
    assert on_gpu(*ema.module.parameters(), *ema.module.buffers())
    sent: list[torch.Tensor] = []

    def exchange(values: torch.Tensor) -> torch.Tensor:
        sent.append(values)
        return values.clone()

    align_batch_norm(model, config, Ranks(a_world(0, 2), exchange, exchange))
    assert len(sent) == 1 and on_gpu(*sent)


class Operations(TorchDispatchMode):
    """Counts what a GPU is given to do, and what makes the CPU wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.done: Counter[str] = Counter()
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = str(func), kwargs or {}
        is_read = "local_scalar_dense" in name
        if is_read:
            result = number_in(*args)
        elif "_fused_sgd_" in name or "_amp_update_scale_" in name:  # unknown to fake tensors
            result = None if "_fused_sgd_" in name else args[0]
        else:
            result = func(*args, **kwargs)
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        made = [one for one in tree_leaves(result) if isinstance(one, torch.Tensor)]
        kinds = {one.device.type for one in given + made}
        if "cuda" not in kinds:
            return result
        no_kernel = ("empty", "as_strided_", "prim.device")  # memory that is there, questions
        if not func.is_view and not any(part in name for part in no_kernel):
            self.done[name] += 1
        if "copy" in name and len(kinds) > 1:
            is_asynchronous = kwargs.get("non_blocking", False) or args[2:] == (True,)
            is_wait = given[-1].device.type == "cuda" or not is_asynchronous
        else:  # a kernel is given numbers; what else it takes from the CPU is copied first
            is_wait = is_read or any(one.dim() for one in given if one.device.type == "cpu")
        if is_wait:
            self.waits.append(name)
        return result


def number_in(tensor: torch.Tensor) -> float:
    """What item() returns: of the GPU that nothing has overflowed; of the CPU a constant, else a
    yes, the first of several, or 1."""
    if tensor.device.type == "cpu":
        with contextlib.suppress(DataDependentOutputException):
            return torch.ops.aten._local_scalar_dense(tensor)
        return float(tensor.dtype == torch.bool or tensor.is_floating_point())
    return 0.0


def between(body: list[ast.stmt], first: str, last: str) -> Any:
    """The code from the statement that begins with `first` to the one that begins with `last`."""
    begin, end = (
        next(n for n, one in enumerate(body) if ast.unparse(one).startswith(words))
        for words in (first, last)
    )
    return compile(ast.Module(body[begin : end + 1], []), train.__file__, "exec")


def begin_training(
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    lap: Callable[[str], None] = lambda phase: None,
) -> tuple[Callable[[], None], Trainables]:
    """What makes a step at each call, and what it trains: main's own statements (of
    ddp_train/train.py, which tests/test_twins.py compares with Horovod's), from where it builds the
    model, and a step's from its seed to its last `lap`. Loaders have read the images."""
    text = Path(train.__file__).read_text()
    main = next(one for one in ast.parse(text).body if isinstance(one, ast.FunctionDef))
    loop = next(node for node in ast.walk(main) if isinstance(node, ast.While))
    build = between(main.body, "model = build_model(", "parts = ")
    step = between(loop.body, "seed_step(", "meter.lap('optimizer')")
    config = a_config(norm_weight_decay=0.0, bias_weight_decay=0.1, **settings)
    images = replace(SYNTHETIC, train=Mock(__len__=lambda _: 20))
    monkeypatch.setattr(
        batches_module, "load_batches", lambda *_: ((*one, 0, [], {}) for one in files(9))
    )
    batches = training_batches(images, config, a_world(), CUDA, 0, 0, 10**9)
    names = vars(train) | {
        "config": config,
        "world": a_world(),
        "hooks": Hooks(),
        "data": images,
        "device": CUDA,
        "lr_scale": 1,
        "ranks": Ranks(a_world()),
        "progress": Progress(),
        "folder": Path(),
        "reader": SimpleNamespace(batches=batches),
        "meter": SimpleNamespace(lap=lap),
    }
    exec(build, names)

    def make_step() -> None:
        exec(step, names)
        names["progress"].step += 1

    return make_step, names["parts"]


# What a step may wait for, in which phase, and why.
MAY_WAIT = {
    ("optimizer", "aten._local_scalar_dense.default"): (
        "with loss scaling the host leaves an update out whose gradients have overflowed"
    ),
}
# How many operations its phases (data, forward, backward, optimizer) have with torch 2.14, and
# whose kernel normalises: torch takes cuDNN's neither for bf16 nor with fp16 statistics. The
# network has 38 weights in three groups, and 12 BatchNorm. Only inside of kernels tf32 is not fp32.
STEPS: list[tuple[dict[str, Any], tuple[int, ...], str]] = [
    ({"precision": "fp32"}, (6, 79, 65, 3), "cudnn"),
    ({"precision": "bf16"}, (6, 95, 69, 3), "native"),
    ({"precision": "fp16"}, (6, 95, 83, 20), "cudnn"),
    ({"precision": "O2"}, (6, 81, 68, 22), "cudnn"),
    ({"precision": "O2", "keep_batchnorm_fp32": False}, (6, 85, 56, 22), "native"),
    ({"precision": "O3"}, (6, 81, 54, 3), "native"),
    ({"precision": "O3", "keep_batchnorm_fp32": True}, (6, 81, 66, 3), "cudnn"),
    (
        {"channels_last": True, "mixup_alpha": 0.2, "cutmix_alpha": 1.0, "model_ema": True},
        (20, 74, 72, 4),
        "cudnn",
    ),
    (
        {"precision": "bf16", "loss": "bce", "optimizer": "adamw", "clip_grad_norm": 1.0},
        (6, 88, 64, 14),
        "native",
    ),
    (
        {
            "precision": "fp16",
            "loss_scale": 128.0,
            "batches_per_allreduce": 2,
            "clip_grad_norm": 1.0,
        },
        (11, 190, 204, 28),
        "cudnn",
    ),
    (
        {"precision": "O2", "optimizer": "adamw", "model_ema": True, "channels_last": True},
        (7, 81, 79, 35),
        "cudnn",
    ),
]


def names_of(steps: list[Any]) -> list[str]:
    return [" ".join(f"{name}={value}" for name, value in row[0].items()) for row in steps]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("settings", "most", "kernel"), STEPS, ids=names_of(STEPS))
def test_operations_and_waits_of_a_step(
    settings: dict[str, Any], most: tuple[int, ...], kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None waits for more than it may, has over a tenth more operations than `most` in a phase,
    normalises by another kernel, or leaves what it trains on the CPU."""
    done, waits = defaultdict[str, Counter[str]](Counter), list[tuple[str, str]]()

    def lap(phase: str) -> None:
        done[phase] += operations.done
        waits.extend((phase, wait) for wait in operations.waits)
        operations.done.clear()
        operations.waits.clear()

    make_step, parts = begin_training(settings, monkeypatch, lap)
    with Operations() as operations:
        make_step()  # makes what stays: momenta, the loss scale, the means of colours
        done.clear()
        waits.clear()
        make_step()
    assert waits == (list(MAY_WAIT) if parts.scaler.is_enabled() else []), waits
    for (phase, counted), budget in zip(done.items(), most, strict=True):
        assert counted.total() <= 1.1 * budget, (phase, counted)
    used = {name for name in done["forward"] if "batch_norm" in name}
    assert used == {f"aten.{kernel}_batch_norm.default"}, used
    states = [one for state in parts.optimizer.state.values() for one in state.values()]
    assert on_gpu(*parts.model.parameters(), *(one for one in states if one.dim()))


def test_gradients_are_those_of_torch_s_engine() -> None:
    """Through branches, a broadcast and a cast; two passes add up."""
    weights = torch.randn(2, 3, 1, requires_grad=True)
    gradients = []
    for run in (torch.Tensor.backward, backward):
        weights.grad = None
        for _ in range(2):
            hidden = weights * torch.ones(3, 4) + weights.sin()
            run((hidden.bfloat16().exp() * hidden).std())
        gradients.append(weights.grad)
    assert torch.equal(*gradients)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("settings", [row[0] for row in STEPS], ids=names_of(STEPS))
def test_waits_of_a_step_on_a_gpu(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_step, parts = begin_training(settings, monkeypatch)
    make_step()  # makes what stays
    torch.set_warn_always(True)  # else a call warns once
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            make_step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.set_warn_always(False)
    waits = [str(one.message) for one in told if "synchronizing CUDA operation" in str(one.message)]
    assert len(waits) == (len(MAY_WAIT) if parts.scaler.is_enabled() else 0), waits


@pytest.mark.usefixtures("gpu")
def test_a_network_on_two_gpus() -> None:
    """baselines/model_parallel.py: what passes from one to the other is moved, and comes back."""
    config = a_config(arch="resnet18", train_crop_size=32, val_crop_size=32)
    with CUDA:
        model = build_model(config, 10, download=False)
    second = torch.device("cuda", 1)
    split(model, CUDA, second)
    devices = [weight.device for weight in model.parameters()]
    assert devices == sorted(devices, key=str)
    assert {CUDA, second} == set(devices)
    assert model(torch.zeros(2, 3, 32, 32, device=CUDA)).device == CUDA
    align_batch_norm(model, config, Ranks(a_world(size=2), torch.clone, torch.clone))


@pytest.mark.parametrize(
    ("visible", "local_rank", "first"),
    [(8, 3, 6), (2, 3, 0), (3, 1, 0), (1, 0, None)],  # all of a host, its own two, odd, too few
)
def test_which_two_gpus_a_rank_takes(
    visible: int, local_rank: int, first: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recipe.loop.choose_device", lambda config, world: CUDA)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", chosen := Mock())
    if first is None:
        with pytest.raises(UserError, match=r"two GPUs, and one on .* sees 1"):
            TwoDevices(a_config(), a_world(local_rank, 4))
        return
    rung = TwoDevices(a_config(), a_world(local_rank, 4))
    assert [one.index for one in (rung.device, rung.second)] == [first, first + 1]
    assert rung.devices == [rung.device, rung.second], "whose energy is counted"
    chosen.assert_called_once_with(rung.device)
