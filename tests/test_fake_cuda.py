"""What prepares batches, metrics, evaluation and averages, on fake CUDA tensors: no GPU is needed.

Fake tensors have shapes, types and devices, and no values. A CPU tensor that slips into work on the
GPU raises, as it would there.
"""

import contextlib
import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from making import TinyNet, a_config, a_world
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import optimizer as optim
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from baselines.model_parallel import TwoDevices, split
from recipe.data import batches as data
from recipe.data.batches import Data, to_device, training_batches, validation_batches
from recipe.errors import UserError
from recipe.training.half_weights import (
    copy_buffers,
    round_weights,
    take_gradients,
    train_masters,
    working_copy,
)
from recipe.training.metrics import align_batch_norm, batch_sums, evaluate
from recipe.training.model import (
    build_ema,
    build_model,
    build_optimizer,
    flat_batch_norm,
    seed_step,
    update_ema,
)

CUDA = torch.device("cuda", 0)
SYNTHETIC = Data(None, None, 20, 10, 1000)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All tensors are fake, and CUDA's streams, too."""
    for name in ("_mean_and_std", "_copying_stream"):
        monkeypatch.setattr(data, name, functools.cache(getattr(data, name).__wrapped__))
    monkeypatch.setattr(torch.cuda, "Stream", Mock())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", Mock())
    monkeypatch.setattr(FakeTensor, "record_stream", lambda tensor, stream: None, raising=False)
    monkeypatch.setattr(FakeTensorMode, "__deepcopy__", lambda mode, memo: mode, raising=False)
    with FakeTensorMode():
        yield


def on_gpu(*tensors: torch.Tensor) -> bool:
    """Whether all of them are there."""
    return {tensor.device for tensor in tensors} == {CUDA}


def files(count: int) -> list[data.Batch]:
    """Batches as a loader hands them out: uint8 pixels and labels, in the CPU's memory."""
    pixels = torch.zeros(4, 3, 8, 8, dtype=torch.uint8)
    return [(pixels, torch.zeros(4, dtype=torch.int64))] * count


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("channels_last", [False, True])
def test_batches(channels_last: bool) -> None:
    config = a_config(channels_last=channels_last, data="synthetic")
    layout = torch.channels_last if channels_last else torch.contiguous_format
    for images, targets in [
        *data._one_ahead(files(3), config, CUDA),
        *(
            to_device(batch, config, CUDA)
            for batch in training_batches(SYNTHETIC, config, a_world(), CUDA, 0, 0, 20)
        ),
        *(
            to_device(batch, config, CUDA)
            for batch in validation_batches(SYNTHETIC, config, a_world(), CUDA, 0)
        ),
    ]:
        assert on_gpu(images, targets)
        assert (images.dtype, targets.dtype) == (torch.float32, torch.int64)
        assert images.is_contiguous(memory_format=layout)
        assert images.shape[1:] == (3, 8, 8)


@pytest.mark.usefixtures("gpu")
def test_one_stream_copies_for_all_evaluations() -> None:
    """Memory that a stream has freed serves that stream alone: each more would keep its own."""
    for _ in range(5):
        assert len(list(data._one_ahead(files(3), a_config(), CUDA))) == 3
    assert torch.cuda.Stream.call_count == 1


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("arch", ["resnet18", "mobilenet_v2"])
def test_evaluation_and_metrics(arch: str) -> None:
    config = a_config(arch=arch, train_crop_size=32)
    with CUDA:
        model = build_model(config, 1000, download=False)
    sums = evaluate(model, data._one_ahead(files(2), config, CUDA), config, CUDA)
    assert on_gpu(sums)
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
    assert ema is not None
    for step in (1, 2):  # the first is a copy
        update_ema(ema, model, config, step)
    copy_buffers(model, ema.module)
    assert on_gpu(*ema.module.parameters(), *ema.module.buffers())
    with flat_batch_norm(model) as statistics:
        assert on_gpu(statistics)
    sent: list[torch.Tensor] = []

    def exchange(values: torch.Tensor) -> torch.Tensor:
        sent.append(values)
        return values.clone()

    align_batch_norm(model, config, a_world(0, 2), exchange, exchange)
    assert len(sent) == 1 and on_gpu(*sent)


class Operations(TorchDispatchMode):
    """Counts what a GPU is given to do, and what makes the CPU wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.done: Counter[str] = Counter()
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor)]
        kinds = {tensor.device.type for tensor in tensors}
        no_kernel = ("empty", "detach", "prim.device")  # memory that is there, names, questions
        if "cuda" in kinds and not any(name in str(func) for name in no_kernel):
            self.done[str(func)] += 1
        is_wait = "local_scalar_dense" in str(func) or ("copy" in str(func) and len(kinds) > 1)
        if "cuda" in kinds and is_wait:
            self.waits.append(str(func))
        return result


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("precision", "most"),
    # Momentum, and two kinds of weight decay. A kernel a weight would be 62 times as many.
    [("fp16", 12), ("O2", 14)],
)
def test_an_update_is_few_operations_and_never_waits(
    precision: Any, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the scaler asks of the GPU (whether gradients have overflowed) is beside this."""
    monkeypatch.setattr(optim, "_foreach_supported_types", [FakeTensor])  # torch asks for the type
    config = a_config(
        arch="resnet18", train_crop_size=32, precision=precision, model_ema=True,
        norm_weight_decay=0.0, wd=0.1, momentum=0.9,
    )  # fmt: skip
    with CUDA:
        model = build_model(config, 10, download=False)
    fp16_model, ema = working_copy(model, config), build_ema(model, config)
    optimizer: Any = build_optimizer(fp16_model, config)  # fused asks for a real GPU
    train_masters(optimizer, fp16_model, model, from_rank_0=lambda values: values)
    for step in (1, 2):  # the first makes the momentum
        for weight in fp16_model.parameters():
            weight.grad = torch.zeros_like(weight)
        with Operations() as operations:
            seed_step(config, step, rank=0)
            take_gradients(fp16_model, model)
            optimizer.step()
            round_weights(fp16_model, model)
            update_ema(ema, model, config, step)
    assert operations.done.total() <= most, operations.done
    assert operations.waits == []
    momenta = [state["momentum_buffer"] for state in optimizer.state.values()]
    assert on_gpu(*model.parameters(), *momenta)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("dtype", "kernel"),
    [(torch.float32, "Cudnn"), (torch.float16, "Cudnn"), (torch.bfloat16, "Native")],
)
def test_whose_kernel_normalises(dtype: torch.dtype, kernel: str) -> None:
    """docs/recipe.md says so."""
    images = torch.zeros(8, 64, 4, 4, device=CUDA, dtype=dtype)
    norm = torch.zeros(64, device=CUDA)
    chosen = torch._C._select_batch_norm_backend(images, norm, norm, norm, norm, True, 1e-5)
    assert chosen.name == kernel


def moved(module: nn.Module, device: torch.device) -> nn.Module:
    """What Module.to does, which fake weights do not let be done in place."""
    for part in module.modules():
        for name, weight in part.named_parameters(recurse=False):
            part._parameters[name] = nn.Parameter(weight.detach().to(device))
        for name, values in part.named_buffers(recurse=False):
            part._buffers[name] = values.to(device)
    return module


@pytest.mark.usefixtures("gpu")
def test_a_network_on_two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """baselines/model_parallel.py: what passes from one to the other is moved, and comes back."""
    config = a_config(arch="resnet18", train_crop_size=32, val_crop_size=32)
    with CUDA:
        model = build_model(config, 10, download=False)
    second = torch.device("cuda", 1)
    monkeypatch.setattr(nn.Module, "to", moved)
    split(model, CUDA, second)
    devices = [weight.device for weight in model.parameters()]
    assert devices == sorted(devices, key=str)
    assert {CUDA, second} == set(devices)
    assert model(torch.zeros(2, 3, 32, 32, device=CUDA)).device == CUDA
    align_batch_norm(model, config, a_world(size=2), torch.clone, torch.clone)


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
