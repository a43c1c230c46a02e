"""The state that training changes: model, optimizer and loss scale, and the progress so far.

fp16 weights follow Apex's levels O2 and O3. O3 trains a network that is fp16 throughout. Under O2
the model keeps fp32 weights, the masters: the optimizer changes them, a moving average follows
them, and checkpoints hold them. Forward and backward pass use a copy with fp16 weights. BatchNorm
is the same fp32 module in both, unless --keep-batchnorm-fp32 False asks for an fp16 copy.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from recipe.errors import UserError
from recipe.ranks import Ranks
from recipe.settings.config import Config

BatchNorm = nn.modules.batchnorm._BatchNorm


def make_half(network: nn.Module, config: Config) -> None:
    """Cast the weights and buffers of `network` to fp16; it still takes fp32 images and returns
    fp32 outputs. BatchNorm stays fp32 if --keep-batchnorm-fp32 says so."""
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
    """Return the network that runs the forward and backward passes: under O2 an fp16 copy of
    `model`, else `model` itself.

    BatchNorm's running statistics always belong to `model`. If its layers are copied too, the copy
    gets the statistics before each forward pass, and returns them afterwards.
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
    """Copy the BatchNorm statistics of `source` to `target`: all floats at once, then integers."""
    pairs = list(zip(source.buffers(), target.buffers(), strict=True))
    for is_float in (True, False):
        _copy([pair for pair in pairs if pair[0].is_floating_point() == is_float])


def _pairs(
    fp16_model: nn.Module | None, model: nn.Module
) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Return the fp16 weights of `fp16_model`, each with its fp32 master in `model`."""
    if fp16_model is None or fp16_model is model:  # there are no masters
        return []
    both = zip(fp16_model.parameters(), model.parameters(), strict=True)
    return [(weight, master) for weight, master in both if weight is not master]


def train_masters(
    optimizer: torch.optim.Optimizer,
    fp16_model: nn.Module,
    model: nn.Module,
    ranks: Ranks,
) -> None:
    """Make an optimizer that was built for `fp16_model` change the masters instead, and give all
    ranks rank 0's masters. The engine's hooks stay on the fp16 weights, whose gradients it
    averages."""
    master_of = dict(_pairs(fp16_model, model))
    for values in model.state_dict().values() if master_of else []:
        values.copy_(ranks.from_first(values))
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
    """Set the fp16 weights, if there are any, to the rounded masters."""
    _copy([(master, weight) for weight, master in _pairs(fp16_model, model)])


def _copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the first tensor of each pair into the second; on a GPU in a few kernels for all."""
    if pairs:
        sources, targets = zip(*pairs, strict=True)
        torch._foreach_copy_(targets, sources)


@dataclass
class Progress:
    """How far training has come. Of the best top-1 and the clock, rank 0's values are saved."""

    step: int = 0  # optimizer steps
    samples_seen: int = 0  # over all ranks: the position in the stream of samples
    best_top1: float = -1.0  # percent; below 0 before the first evaluation
    total_seconds: float = 0.0  # on the training clock, over all sessions of the run
    skipped_steps: int = 0  # steps among `step` that changed no weight: their gradients overflowed

    def end_step(self, num_samples: int, total_seconds: float, skipped_steps: int) -> None:
        """Count an optimizer step on `num_samples` images over all ranks. `skipped_steps` is the
        number of skipped steps so far."""
        self.step += 1
        self.samples_seen += num_samples
        self.total_seconds = total_seconds
        self.skipped_steps = skipped_steps

    def take_best(self, top1: float) -> bool:
        """Update the best top-1; return whether the last evaluation's `top1` improved it."""
        is_best = top1 > self.best_top1
        self.best_top1 = max(self.best_top1, top1)
        return is_best


# Loss scaling: gradients that fp16 would round to zero are computed multiplied by a factor.
FIRST_SCALE = 2.0**16  # as in Apex; halves when gradients overflow, doubles after 2,000 good steps
LEAST_SCALE = 2.0**-14  # if gradients overflow even at this scale, training has diverged


class LossScaler(torch.amp.GradScaler):
    """torch's GradScaler, which here also takes fp16 gradients and can have a fixed scale
    (--loss-scale N).

    A step whose gradients overflow is skipped and counted. All ranks skip the same steps, since
    they have the same averaged gradients. Does nothing for a scale of 1, so that the training loop
    has only one path.
    """

    def __init__(self, device: str, fixed: float | None) -> None:
        self.fixed = None if fixed is None else float(fixed)
        first = FIRST_SCALE if self.fixed is None else self.fixed
        super().__init__(device, init_scale=first, enabled=self.fixed != 1)
        self.skipped_steps = 0

    def _unscale_grads_(self, optimizer: Any, inv_scale: Any, found_inf: Any, _: bool) -> Any:
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, True)  # True: allow fp16

    def _maybe_opt_step(
        self, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any
    ) -> float | None:
        if not sum(found.item() for found in optimizer_state["found_inf_per_device"].values()):
            return optimizer.step(*args, **kwargs)
        self.skipped_steps += 1
        if self.fixed is None and self.get_scale() <= LEAST_SCALE:
            raise UserError(
                f"gradients overflow even at a loss scale of {self.get_scale():.2g}: training has "
                "diverged; lower --base-lr, lengthen --warmup-epochs or use --precision bf16"
            )
        return None

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Update the scale as torch does; a fixed scale stays."""
        super().update(new_scale if self.fixed is None else self.fixed)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state as torch does; a fixed scale keeps the value of --loss-scale."""
        if self.fixed is None:
            super().load_state_dict(state_dict)


@dataclass
class Trainables:
    """Everything that training changes, without any engine's wrapper."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: LossScaler
    ema: AveragedModel | None
    fp16_model: nn.Module | None = None  # computes in place of `model`: itself, or its copy (O2)
    devices: Sequence[torch.device] = ()  # where they are, if not on the one that images go to

    def unsharded(self) -> "Trainables":
        """Return everything that is trained, unsharded, to be evaluated, saved and compared. All
        ranks call this; only rank 0 needs the optimizer's state. BatchNorm's statistics must be
        those of the trained network and not copies, since callers may overwrite them."""
        return self


def unscale_and_clip(parts: Trainables, clip_grad_norm: float | None) -> None:
    """Turn the averaged gradients into those that the optimizer uses: in fp32 for masters, divided
    by the loss scale, and clipped to --clip-grad-norm."""
    take_gradients(parts.fp16_model, parts.model)
    parts.scaler.unscale_(parts.optimizer)
    if clip_grad_norm is not None:
        nn.utils.clip_grad_norm_(parts.model.parameters(), clip_grad_norm)
