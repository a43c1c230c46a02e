"""What training changes: the trained parts, in their number formats, and how far it has come.

Weights in fp16 are as Apex's levels O2 and O3 have them.

O3 trains a network that is fp16 throughout. Under O2 the model keeps its fp32 weights, the masters:
the optimizer changes them, a moving average follows them, and checkpoints hold them. Forward and
backward pass go through a copy whose weights are fp16. BatchNorm is the same fp32 module in both,
unless --keep-batchnorm-fp32 False asks for a fp16 copy.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from recipe.errors import refuse
from recipe.ranks import Ranks
from recipe.settings.config import Config

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
    ranks: Ranks,
) -> None:
    """Have an optimizer that was made for `fp16_model` change the masters instead, which are rank
    0's on all ranks. An engine's hooks stay on the fp16 weights: it averages their gradients."""
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
    """Set the fp16 weights, if there are any, to the masters, rounded."""
    _copy([(master, weight) for weight, master in _pairs(fp16_model, model)])


def _copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the first of each pair into the second: on a GPU by a few kernels for all."""
    if pairs:
        sources, targets = zip(*pairs, strict=True)
        torch._foreach_copy_(targets, sources)


@dataclass
class Progress:
    """How far training has come; of its best top-1 and its clock, rank 0's are what is kept."""

    step: int = 0  # optimizer steps
    samples_seen: int = 0  # over all ranks: the position in the stream of samples
    best_top1: float = -1.0  # percent; below 0 before the first evaluation
    total_seconds: float = 0.0  # on the training clock, over all the run's sessions
    skipped_steps: int = 0  # of `step`, those that changed no weight: their gradients overflowed

    def end_step(self, num_samples: int, total_seconds: float, skipped_steps: int) -> None:
        """Count an optimizer step on `num_samples` images over all ranks; `skipped_steps` have been
        left out so far."""
        self.step += 1
        self.samples_seen += num_samples
        self.total_seconds = total_seconds
        self.skipped_steps = skipped_steps

    def take_best(self, figures: dict[str, float]) -> bool:
        """Keep the best top-1 so far; whether it is that of the last evaluation's `figures`."""
        is_best = figures.get("top1", -1.0) > self.best_top1
        self.best_top1 = max(self.best_top1, figures.get("top1", -1.0))
        return is_best


# Loss scaling: gradients that fp16 would round to zero are computed as multiples of themselves.
FIRST_SCALE = 2.0**16  # as Apex's; halves when gradients overflow, doubles after 2,000 good steps
LEAST_SCALE = 2.0**-14  # where gradients overflow still, no scale is small enough


class LossScaler(torch.amp.GradScaler):
    """torch's, for fp16 gradients too, and with a scale that stays as it is (--loss-scale N).

    With either a step whose gradients overflow is left out, and counted. All ranks leave out the
    same ones: they have the same averages. Does nothing for a scale of 1, so that the loop has one
    path.
    """

    def __init__(self, device: str, fixed: float | None) -> None:
        self.fixed = None if fixed is None else float(fixed)
        first = FIRST_SCALE if self.fixed is None else self.fixed
        super().__init__(device, init_scale=first, enabled=self.fixed != 1)
        self.skipped_steps = 0

    def _unscale_grads_(self, optimizer: Any, inv_scale: Any, found_inf: Any, _: bool) -> Any:
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, True)  # True: fp16, too

    def _maybe_opt_step(
        self, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any
    ) -> float | None:
        if not sum(found.item() for found in optimizer_state["found_inf_per_device"].values()):
            return optimizer.step(*args, **kwargs)
        self.skipped_steps += 1
        refuse((
            self.fixed is None and self.get_scale() <= LEAST_SCALE,
            f"gradients overflow at a loss scale of {self.get_scale():.2g} still: training "
            "has diverged; lower --base-lr, lengthen --warmup-epochs or use --precision bf16",
        ))  # fmt: skip
        return None

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """As torch's; a fixed scale stays."""
        super().update(new_scale if self.fixed is None else self.fixed)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; a fixed scale is what --loss-scale says."""
        if self.fixed is None:
            super().load_state_dict(state_dict)


@dataclass
class Trainables:
    """Everything that training changes, without any engine's wrapper."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: LossScaler
    ema: AveragedModel | None
    fp16_model: nn.Module | None = None  # what computes for it: itself, or under O2 a fp16 copy

    def whole(self) -> "Trainables":
        """All that is trained, as one process has it, to be evaluated, kept and compared. All ranks
        call this; the optimizer's state is asked for on rank 0 alone. BatchNorm's statistics are to
        be the trained network's own, not copies: they may be overwritten."""
        return self


def unscale_and_clip(parts: Trainables, clip_grad_norm: float | None) -> None:
    """Make the averaged gradients those that the optimizer takes: of the fp32 weights, divided by
    the loss scale, and no longer than --clip-grad-norm."""
    take_gradients(parts.fp16_model, parts.model)
    parts.scaler.unscale_(parts.optimizer)
    if clip_grad_norm is not None:
        nn.utils.clip_grad_norm_(parts.model.parameters(), clip_grad_norm)
