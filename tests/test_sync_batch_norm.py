"""BatchNorm over several ranks on the CPU is that of a single process with the whole batch."""

from collections.abc import Callable

import pytest
import torch
from making import in_ranks
from torch import nn

from recipe.training.sync_batch_norm import SyncBatchNorm

CHANNELS = 5


@pytest.mark.parametrize("shares", [(4, 4), (2, 3, 7)])
@pytest.mark.parametrize("shape", [(), (3,), (3, 2)])
def test_it_equals_a_single_process(
    shares: tuple[int, ...], shape: tuple[int, ...], momentum: float = 0.3
) -> None:
    """Forward, backward and running statistics, over two steps; values far from zero."""
    draw = torch.Generator().manual_seed(0)
    batches = [torch.randn(sum(shares), CHANNELS, *shape, generator=draw) + 100 for _ in range(2)]
    wanted = torch.randn(batches[0].shape, generator=draw)
    kinds = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}
    whole = kinds[wanted.dim()](CHANNELS, momentum=momentum).double()
    with torch.no_grad():
        whole.weight.uniform_(0.5, 2, generator=draw)
        whole.bias.uniform_(-1, 1, generator=draw)
    start = {name: value.clone() for name, value in whole.state_dict().items()}

    def train(
        norm: nn.Module, batches: list[torch.Tensor], wanted: torch.Tensor
    ) -> tuple[list[torch.Tensor], nn.Module]:
        found = []
        for batch in batches:
            batch = batch.clone().requires_grad_()
            outputs = norm(batch)
            (outputs * wanted).sum().backward()
            assert batch.grad is not None
            found += [outputs.detach(), batch.grad]
        return found, norm

    expected, _ = train(whole, [batch.double() for batch in batches], wanted.double())

    def rank_of(rank: int, sum_over_ranks: Callable) -> object:
        norm = SyncBatchNorm(sum_over_ranks, CHANNELS, 1e-5, momentum)
        norm.load_state_dict(start)
        own = [batch.split(shares)[rank] for batch in batches]
        return train(norm, own, wanted.split(shares)[rank])

    found = in_ranks(len(shares), rank_of)
    for number, values in enumerate(expected):
        parts = torch.cat([results[number] for results, _ in found])
        torch.testing.assert_close(parts, values.float(), rtol=1e-4, atol=1e-4)
    norms = [norm for _, norm in found]
    for name in ("weight", "bias"):
        total = sum(getattr(norm, name).grad for norm in norms)
        torch.testing.assert_close(total, getattr(whole, name).grad.float(), rtol=1e-4, atol=1e-4)
    for norm in norms:
        torch.testing.assert_close(norm.running_mean, whole.running_mean.float())
        torch.testing.assert_close(norm.running_var, whole.running_var.float())
        assert norm.num_batches_tracked == 2
        assert torch.equal(norm.running_var, norms[0].running_var), "equal on all ranks"


def test_an_evaluation_exchanges_nothing() -> None:
    def refuse(values: torch.Tensor) -> torch.Tensor:
        raise AssertionError

    norm = SyncBatchNorm(refuse, CHANNELS).eval()
    images = torch.randn(2, CHANNELS, 3, 3)
    assert torch.equal(norm(images), nn.BatchNorm2d(CHANNELS).eval()(images))


@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16])
def test_other_number_formats_are_normalised_in_fp32(dtype: torch.dtype) -> None:
    images = torch.randn(4, CHANNELS, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    norm = SyncBatchNorm(lambda values: values, CHANNELS)
    outputs = norm(images)
    assert outputs.dtype == dtype
    assert torch.equal(outputs, norm(images.float()).to(dtype))
