"""Weights in fp16, as Apex's levels O2 and O3 have them.

O3 trains a network that is fp16 throughout. Under O2 the model keeps its fp32 weights, the masters:
the optimizer changes them, a moving average follows them, and checkpoints hold them. Forward and
backward pass go through a copy whose weights are fp16. BatchNorm is the same fp32 module in both,
unless --keep-batchnorm-fp32 False asks for a fp16 copy.
"""

import copy
from collections.abc import Callable, Sequence

import torch
from torch import nn

from recipe.config import Config

BatchNorm = nn.modules.batchnorm._BatchNorm


def make_half(network: nn.Module, config: Config) -> None:
    """Cast the weights and buffers of `network` to fp16, and have it take fp32 images and return
    fp32 outputs. BatchNorm stays fp32 where --keep-batchnorm-fp32 says so."""
    for module in network.modules():
        if not (config.keeps_batch_norm_fp32 and isinstance(module, BatchNorm)):
            for weight in module.parameters(recurse=False):
                weight.data = weight.data.half()
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point():
                    setattr(module, name, buffer.half())
    network.register_forward_pre_hook(lambda _, arguments: (arguments[0].half(),))
    network.register_forward_hook(lambda _, __, outputs: outputs.float())


def working_copy(model: nn.Module, config: Config) -> nn.Module:
    """What runs forward and backward for `model`: under O2 a fp16 copy, else `model` itself.

    BatchNorm's running statistics are the model's, also where its layers are copied: the copy takes
    them before each forward pass, and gives them back.
    """
    if config.precision != "O2":
        return model
    shared = {
        id(module): module
        for module in model.modules()
        if config.keeps_batch_norm_fp32 and isinstance(module, BatchNorm)
    }
    fp16_model = copy.deepcopy(model, shared)
    make_half(fp16_model, config)
    if not config.keeps_batch_norm_fp32:
        fp16_model.register_forward_pre_hook(lambda *_: copy_buffers(model, fp16_model))
        fp16_model.register_forward_hook(lambda *_: copy_buffers(fp16_model, model))
    return fp16_model


def copy_buffers(source: nn.Module, target: nn.Module) -> None:
    """Give `target` the BatchNorm statistics of `source`: numbers of one kind at once."""
    pairs = list(zip(source.buffers(), target.buffers(), strict=True))
    for is_float in (True, False):
        _copy([pair for pair in pairs if pair[0].is_floating_point() == is_float])


def _pairs(
    fp16_model: nn.Module | None, model: nn.Module
) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """The fp16 weights of `fp16_model`, each with its fp32 master in `model`."""
    if fp16_model is None or fp16_model is model:  # without masters no weight is looked at
        return []
    both = zip(fp16_model.parameters(), model.parameters(), strict=True)
    return [(weight, master) for weight, master in both if weight is not master]


def train_masters(
    optimizer: torch.optim.Optimizer,
    fp16_model: nn.Module,
    model: nn.Module,
    from_rank_0: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Have an optimizer that was made for `fp16_model` change the masters instead, which are rank
    0's on all ranks. An engine's hooks stay on the fp16 weights: it averages their gradients."""
    master_of = dict(_pairs(fp16_model, model))
    for values in model.state_dict().values() if master_of else []:
        values.copy_(from_rank_0(values))
    for group in optimizer.param_groups:
        group["params"] = [master_of.get(weight, weight) for weight in group["params"]]


@torch.no_grad()
def take_gradients(fp16_model: nn.Module | None, model: nn.Module) -> None:
    """Give the masters the averaged gradients of the fp16 weights."""
    pairs = []
    for weight, master in _pairs(fp16_model, model):
        master.grad = None
        if weight.grad is not None:
            master.grad = torch.empty_like(weight.grad, dtype=master.dtype)
            pairs.append((weight.grad, master.grad))
    _copy(pairs)


@torch.no_grad()
def round_weights(fp16_model: nn.Module | None, model: nn.Module) -> None:
    """Set the fp16 weights, if there are any, to the masters, rounded."""
    _copy([(master, weight) for weight, master in _pairs(fp16_model, model)])


def _copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the first of each pair into the second: on a GPU by a few kernels for all."""
    if pairs:
        sources, targets = zip(*pairs, strict=True)
        torch._foreach_copy_(targets, sources)
