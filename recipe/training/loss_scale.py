"""Loss scaling: gradients that fp16 would round to zero are computed as multiples of themselves."""

from typing import Any

import torch
from torch import nn

from recipe.errors import UserError
from recipe.training.half_weights import take_gradients
from recipe.training.state import Trainables

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
        if self.fixed is None and self.get_scale() <= LEAST_SCALE:
            raise UserError(
                f"gradients overflow at a loss scale of {self.get_scale():.2g} still: training "
                "has diverged; lower --base-lr, lengthen --warmup-epochs or use --precision bf16"
            )
        return None

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """As torch's; a fixed scale stays."""
        super().update(new_scale if self.fixed is None else self.fixed)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; a fixed scale is what --loss-scale says."""
        if self.fixed is None:
            super().load_state_dict(state_dict)


def unscale_and_clip(parts: Trainables, clip_grad_norm: float | None) -> None:
    """Make the averaged gradients those that the optimizer takes: of the fp32 weights, divided by
    the loss scale, and no longer than --clip-grad-norm."""
    take_gradients(parts.fp16_model, parts.model)
    parts.scaler.unscale_(parts.optimizer)
    if clip_grad_norm is not None:
        nn.utils.clip_grad_norm_(parts.model.parameters(), clip_grad_norm)
