"""BatchNorm over the batches of all ranks, for tensors in the CPU's memory, where neither torch nor
Horovod has one; the collective comes as an argument.

Forward and backward pass send one message a layer each: sums in float64, so that a variance is as
good as if it were computed in two passes.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

SumOverRanks = Callable[[torch.Tensor], torch.Tensor]


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """torch's BatchNorm over [N, C, ...], in training over all ranks' N. The arguments are those of
    nn.SyncBatchNorm, after `sum_over_ranks`.

    Gradients of weight and bias are this rank's part, to be averaged as all others are.
    """

    def __init__(self, sum_over_ranks: SumOverRanks, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.sum_over_ranks = sum_over_ranks

    def _check_input_dim(self, input: torch.Tensor) -> None:
        """Each number of dimensions will do."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """float [N, C, ...], of `input`'s type."""
        if not self.training:
            return super().forward(input)
        values, doubles = input.float(), input.detach().double()
        moments = _over_ranks(self.sum_over_ranks, doubles, doubles.square())
        mean = moments[0]
        variance = (moments[1] - mean.square()).clamp_(min=0)
        self._keep_statistics(mean, variance, float(moments[2, 0]))
        inverse = (variance + self.eps).rsqrt()
        normal = _Normalise.apply(values, mean.float(), inverse.float(), self.sum_over_ranks)
        if self.affine:
            normal = normal * _by_channel(self.weight, normal) + _by_channel(self.bias, normal)
        return normal.to(input.dtype)

    @torch.no_grad()
    def _keep_statistics(self, mean: torch.Tensor, variance: torch.Tensor, count: float) -> None:
        share, tracked = self.momentum, self.num_batches_tracked
        assert share is not None and tracked is not None
        assert self.running_mean is not None and self.running_var is not None
        tracked += 1
        unbiased = variance * count / max(count - 1, 1)
        for kept, new in ((self.running_mean, mean), (self.running_var, unbiased)):
            kept.copy_((1 - share) * kept + share * new)


class _Normalise(torch.autograd.Function):
    """(values - mean) * inverse, whose mean and inverse depend on all ranks' values."""

    @staticmethod
    def forward(
        context: Any,
        values: torch.Tensor,
        mean: torch.Tensor,
        inverse: torch.Tensor,
        sum_over_ranks: SumOverRanks,
    ) -> torch.Tensor:
        normal = (values - _by_channel(mean, values)) * _by_channel(inverse, values)
        context.save_for_backward(normal, inverse)
        context.sum_over_ranks = sum_over_ranks
        return normal

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """Of BatchNorm (Ioffe and Szegedy 2015, section 3), with means over all ranks."""
        normal, inverse = context.saved_tensors
        means = _over_ranks(context.sum_over_ranks, gradient, gradient * normal)[:2].float()
        own = gradient - _by_channel(means[0], normal) - normal * _by_channel(means[1], normal)
        return own * _by_channel(inverse, normal), None, None, None


def _by_channel(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """[C] as [1, C, 1, ...], with as many dimensions as `like`."""
    return values.view(1, -1, *[1] * (like.dim() - 2))


def _over_ranks(
    sum_over_ranks: SumOverRanks, one: torch.Tensor, other: torch.Tensor
) -> torch.Tensor:
    """The means of two [N, C, ...] over all ranks, and the number of values: float64 [3, C]."""
    others = [dim for dim in range(one.dim()) if dim != 1]
    sums = [values.sum(dim=others, dtype=torch.float64) for values in (one, other)]
    count = torch.full_like(sums[0], one.numel() / one.shape[1])
    means = sum_over_ranks(torch.stack([*sums, count]))
    means[:2] /= means[2]
    return means
