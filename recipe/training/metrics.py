"""Loss, top-1 and top-5 as sums and counts: exact at any split over batches and ranks."""

from collections.abc import Iterable

import torch
from torch import nn

from recipe.config import Config
from recipe.data.batches import Batch, to_device
from recipe.training.model import autocast

# A vector of sums: loss, images whose label was the best guess, among the five best, images;
# float64 [4].
Sums = torch.Tensor


@torch.no_grad()
def batch_sums(outputs: torch.Tensor, targets: torch.Tensor, loss: torch.Tensor) -> Sums:
    """Sums of one batch, left on the device; `outputs` float [N, classes], `loss` its mean over the
    batch."""
    logits, guesses = outputs.topk(min(5, outputs.shape[1]), dim=1)
    hits = (guesses == targets[:, None]) & ~logits.isnan()  # which topk takes for the greatest
    # Filled there: a tensor made from a number here would be copied, and the copy waited for.
    count = outputs.new_full((), len(targets), dtype=torch.float64)
    return torch.stack(
        [loss.detach().double() * count, hits[:, :1].sum().double(), hits.sum().double(), count]
    )


def means(sums: Sums) -> dict[str, float]:
    """Mean loss, and top-1 and top-5 in percent."""
    loss, top1, top5, count = sums.tolist()
    return {"loss": loss / count, "top1": 100 * top1 / count, "top5": 100 * top5 / count}


@torch.no_grad()
def evaluate(
    model: nn.Module, batches: Iterable[Batch], config: Config, device: torch.device
) -> Sums:
    """Sums over this rank's validation images; the ranks' sums added up are exact, whatever their
    number."""
    was_training = model.training
    model.eval()
    sums = torch.zeros(4, dtype=torch.float64, device=device)
    for batch in batches:
        images, targets = to_device(batch, config, device)
        with autocast(config, device):
            outputs = model(images)
        loss = nn.functional.cross_entropy(outputs.float(), targets)
        sums += batch_sums(outputs, targets, loss)
    model.train(was_training)
    return sums
