"""The optimizers beside SGD: whose they are, with which settings, and what to do where they are
missing.

None of them clips gradients: --clip-grad-norm does, for all of them alike. LARS and LAMB scale each
weight's update by a trust ratio, of gradients that the engine has averaged; weights without decay
are left out (--norm-weight-decay 0 --bias-weight-decay 0).
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from recipe.config import Config
from recipe.errors import UserError

Optimizer = Callable[..., torch.optim.Optimizer]


def kind_and_settings(config: Config, device: torch.device) -> tuple[Optimizer, dict[str, Any]]:
    """The class of --optimizer, and its arguments beside the learning rate and weight decay.

    Fused: one pass over the weights instead of four; on a CPU SGD then takes 0.4 times as long. Not
    with loss scaling, whose first steps overflow: the fused kernel leaves these out, but takes the
    momentum that it has not yet written for momentum from then on (torch 2.14.1). None, and not
    False: torch then updates all of a GPU's weights by a few kernels, not each by its own.
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
        case _:
            lamb = apex_optimizers(config, device).FusedLAMB
            # Its kernel clips what is longer than this, and divides by it.
            return with_default(lamb, "max_grad_norm", math.inf), {"betas": config.betas}


def with_default(kind: type[torch.optim.Optimizer], name: str, default: Any) -> Optimizer:
    """`kind` with another default of an argument. Horovod makes each optimizer anew, from the
    groups of its weights alone: what else it was given would be lost."""

    class WithDefault(kind):  # type: ignore[misc, valid-type]
        def __init__(self, params: Any, **settings: Any) -> None:
            super().__init__(params, **{name: default, **settings})

    WithDefault.__name__ = kind.__name__
    return WithDefault


def apex_optimizers(config: Config, device: torch.device) -> Any:
    """NVIDIA Apex's module of fused optimizers. UserError where it is missing, where `apex` is
    another package, and without a GPU."""
    flag = f"--optimizer {config.optimizer}"
    instead = {"apex-sgd": "sgd", "apex-adam": "adamw", "apex-lamb": "lamb"}[config.optimizer]
    if device.type != "cuda":
        raise UserError(
            f"{flag}: has kernels for GPUs only, and this run is on the CPU; use {instead}"
        )
    try:
        from apex import optimizers
    except Exception as error:  # whatever another package of that name may raise
        raise UserError(
            f"{flag}: NVIDIA Apex cannot be imported ({type(error).__name__}: {error}); install it "
            "as docs/recipe.md says (PyPI's package apex is another one: pip uninstall apex), or "
            f"use {instead}"
        ) from None
    return optimizers
