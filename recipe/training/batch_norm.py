"""BatchNorm over ranks: align the running statistics before an evaluation, and SyncBatchNorm for
tensors in the CPU's memory, which neither torch nor Horovod has.

Forward and backward pass each send one message per layer: sums in float64, so that a variance is
as accurate as one computed in two passes.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from recipe.errors import UserError
from recipe.ranks import Ranks
from recipe.settings.config import Config

SumOverRanks = Callable[[torch.Tensor], torch.Tensor]


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """torch's BatchNorm over [N, C, ...], which in training normalises over the N of all ranks.
    After `sum_over_ranks` the arguments are those of nn.SyncBatchNorm.

    Gradients of weight and bias are this rank's part; they are averaged like all other gradients.
    """

    def __init__(self, sum_over_ranks: SumOverRanks, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.sum_over_ranks = sum_over_ranks

    def _check_input_dim(self, input: torch.Tensor) -> None:
        """Accept any number of dimensions."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise `input`, float [N, C, ...]; the result has its type."""
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
    """(values - mean) * inverse, where mean and inverse depend on the values of all ranks."""

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
        """BatchNorm's backward pass (Ioffe and Szegedy 2015, section 3), with means over ranks."""
        normal, inverse = context.saved_tensors
        means = _over_ranks(context.sum_over_ranks, gradient, gradient * normal)[:2].float()
        centred = gradient - _by_channel(means[0], normal) - normal * _by_channel(means[1], normal)
        return centred * _by_channel(inverse, normal), None, None, None


def _by_channel(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return `values` [C] as [1, C, 1, ...], with as many dimensions as `like`."""
    return values.view(1, -1, *[1] * (like.dim() - 2))


def _over_ranks(
    sum_over_ranks: SumOverRanks, first: torch.Tensor, second: torch.Tensor
) -> torch.Tensor:
    """Return the means of two tensors [N, C, ...] over all ranks, and the number of values:
    float64 [3, C]."""
    not_channels = [dim for dim in range(first.dim()) if dim != 1]
    sums = [values.sum(dim=not_channels, dtype=torch.float64) for values in (first, second)]
    count = torch.full_like(sums[0], first.numel() / first.shape[1])
    means = sum_over_ranks(torch.stack([*sums, count]))
    means[:2] /= means[2]
    return means


BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def replace_batch_norm(
    module: nn.Module,
    kind: type[nn.Module],
    sum_over_ranks: SumOverRanks,
) -> nn.Module:
    """Replace each BatchNorm in `module` by a synchronised one with the same state: the engine's
    `kind` on GPUs, the class above on the CPU. UserError for a BatchNorm that does more than
    normalise, has no running statistics, or averages them over all batches."""
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        statistics = module.running_mean
        if type(module) not in BATCH_NORMS or statistics is None or module.momentum is None:
            raise UserError(
                f"--batch-norm sync: the network's {type(module).__name__} does more than "
                "normalise, or keeps no running statistics with a momentum, so a synchronised one "
                "would compute something else; use average"
            )
        make: Any = kind if statistics.is_cuda else partial(SyncBatchNorm, sum_over_ranks)
        new = make(module.num_features, module.eps, module.momentum, module.affine)
        new.to(statistics).load_state_dict(module.state_dict())
        return new
    for name, child in module.named_children():
        setattr(module, name, replace_batch_norm(child, kind, sum_over_ranks))
    return module


def align_batch_norm(model: nn.Module, config: Config, ranks: Ranks) -> None:
    """Give all ranks the same running means and variances of BatchNorm, exchanged in one message.
    With --batch-norm sync they are already the same."""
    buffers = [
        buffer
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        for name, buffer in module.named_buffers(recurse=False)
        if name in ("running_mean", "running_var")
    ]
    if config.batch_norm != "sync" and buffers:
        shared: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "average": lambda values: ranks.sum(values) / ranks.world.size,
            "local": ranks.from_first,
        }
        # A network on two GPUs has buffers on both.
        flat = _flatten_dense_tensors([buffer.to(buffers[0].device) for buffer in buffers])
        flat = shared[config.batch_norm](flat)
        torch._foreach_copy_(buffers, _unflatten_dense_tensors(flat, buffers))
