"""The optimizers from torch, timm and Apex with their settings, and the learning rate at any point
of training.

No optimizer clips gradients: --clip-grad-norm does it for all of them. LARS and LAMB scale each
weight's update by a trust ratio, computed from averaged gradients; weights without decay have no
trust ratio (--norm-weight-decay 0 --bias-weight-decay 0).
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from recipe.errors import UserError
from recipe.settings.config import Config

Optimizer = Callable[..., torch.optim.Optimizer]


def optimizer_class_and_arguments(
    config: Config, device: torch.device
) -> tuple[Optimizer, dict[str, Any]]:
    """Return the class of --optimizer, and its arguments beside learning rate and weight decay.

    A fused optimizer passes over the weights once instead of four times; on a CPU SGD then takes
    0.4 times as long. With loss scaling the fused one is not used: the first steps overflow, and
    its kernel skips them, but later uses a momentum that was never written (torch 2.14.1). `fused`
    is then None and not False, so that torch updates all of a GPU's weights in a few kernels, and
    not in one kernel per weight.
    """
    fused = True if config.scales_loss_by == 1 else None
    with_momentum = {"momentum": config.momentum, "nesterov": config.nesterov}
    match config.optimizer:
        case "sgd":
            return torch.optim.SGD, {**with_momentum, "fused": fused}
        case "adamw":
            return torch.optim.AdamW, {"betas": config.betas, "fused": fused}
        case "lars":
            from timm.optim.lars import Lars

            return Lars, {**with_momentum, "trust_coeff": config.trust_coefficient}
        case "lamb":
            from timm.optim.lamb import Lamb

            return with_default(Lamb, "max_grad_norm", None), {"betas": config.betas}
        case "apex-sgd":
            return apex_optimizers(config, device).FusedSGD, with_momentum
        case "apex-adam":
            return apex_optimizers(config, device).FusedAdam, {"betas": config.betas}
        case "apex-lamb":
            lamb = apex_optimizers(config, device).FusedLAMB
            # Its kernel clips gradients whose norm exceeds this, and divides by it.
            return with_default(lamb, "max_grad_norm", math.inf), {"betas": config.betas}
        case other:
            raise AssertionError(f"no class for --optimizer {other}")


def with_default(kind: type[torch.optim.Optimizer], name: str, default: Any) -> Optimizer:
    """Return `kind` with another default for one argument. Horovod builds each optimizer again from
    its parameter groups alone, which would lose the argument itself."""

    class WithDefault(kind):  # type: ignore[misc, valid-type]
        def __init__(self, params: Any, **settings: Any) -> None:
            super().__init__(params, **{name: default, **settings})

    WithDefault.__name__ = kind.__name__
    return WithDefault


def apex_optimizers(config: Config, device: torch.device) -> Any:
    """Return NVIDIA Apex's module of fused optimizers. UserError if it is missing, if `apex` is
    another package, or if there is no GPU."""
    flag = f"--optimizer {config.optimizer}"
    instead = {"apex-sgd": "sgd", "apex-adam": "adamw", "apex-lamb": "lamb"}[config.optimizer]
    if device.type != "cuda":
        raise UserError(
            f"{flag}: has kernels for GPUs only, and this run is on the CPU; use {instead}"
        )
    try:
        from apex import optimizers
    except Exception as error:  # another package of that name may raise anything
        raise UserError(
            f"{flag}: NVIDIA Apex cannot be imported ({type(error).__name__}: {error}); install it "
            "as docs/recipe.md says (PyPI's package apex is another one: pip uninstall apex), or "
            f"use {instead}"
        ) from None
    return optimizers


def schedule_in_words(config: Config, scale: float) -> str:
    """Describe the learning rate over the epochs in words; `scale` as for `learning_rate`."""
    rate = f"learning rate {config.base_lr * scale:.4g}"
    if scale != 1:
        rate += f" (--base-lr {config.base_lr:.4g} x {scale:g})"
    if config.warmup_epochs:
        rate += f" after {config.warmup_epochs:g} epoch(s) of {config.warmup_method} warm-up"
    if config.lr_scheduler != "step":
        restarts = "".join(f", again from epoch {turn}" for turn in config.lr_restart_epochs)
        how = f"{config.lr_scheduler} down to {config.lr_min:g}{restarts}"
    else:
        steps = " ".join(str(step) for step in config.lr_step_epochs if step < config.epochs)
        how = f"x {config.lr_gamma:g} at epoch(s) {steps}" if steps else "constant"
    return f"{rate}, {how}; {config.epochs} epoch(s)"


def learning_rate(config: Config, epoch: float, scale: float) -> float:
    """Return the learning rate at fractional `epoch` (samples seen / training images).

    `scale` multiplies one worker's --base-lr, by the linear scaling rule of Goyal et al. 2017
    (arXiv 1706.02677, section 2.1). Their warm-up is gradual-256: from 0.1, the rate for 8 workers
    of 32 images, to 3.2 for 256 workers (section 5.2). The cosine falls over the epochs after
    warm-up, as in torchvision's reference, or from one restart to the next (Loshchilov and Hutter
    2017, arXiv 1608.03983, equation 5). While the batch grows, the rate grows with it, which keeps
    the gradient noise constant (Smith et al. 2018, arXiv 1711.00489).
    """
    base_lr = config.base_lr * config.batch_share(epoch)
    peak = base_lr * scale
    if epoch < config.warmup_epochs:
        starts = {
            "gradual": base_lr * min(scale, 1.0),
            "gradual-256": min(config.base_lr * 256 / config.batch_size, peak),
            "linear": 0.01 * peak,
        }
        start = starts[config.warmup_method]
        return start + (peak - start) * epoch / config.warmup_epochs
    if config.lr_scheduler == "step":
        return peak * config.lr_gamma ** sum(epoch >= step for step in config.lr_step_epochs)
    restarts = config.lr_restart_epochs if config.lr_scheduler == "cosine" else ()
    begin = max([config.warmup_epochs, *(turn for turn in restarts if turn <= epoch)])
    end = min([config.epochs, *(turn for turn in restarts if turn > epoch)])
    progress = min(1.0, (epoch - begin) / max(end - begin, 1e-9))
    shares = {"linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress))}
    return config.lr_min + (peak - config.lr_min) * shares[config.lr_scheduler]
