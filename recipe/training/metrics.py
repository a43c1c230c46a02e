"""Loss, top-1 and top-5 as sums and counts, exact for any split over batches and ranks."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from recipe.data.batches import Data, validation_batches
from recipe.data.loading import Batch, InputMeter, to_device
from recipe.ranks import Ranks
from recipe.settings.config import Config
from recipe.training.batch_norm import align_batch_norm
from recipe.training.model import autocast
from recipe.training.state import Trainables, copy_buffers, working_copy
from recipe.watch import expect_delay, heartbeat

# A vector of sums, float64 [4]: loss, images whose label was the best guess, images whose label was
# among the five best guesses, images.
Sums = torch.Tensor
Show = Callable[[int], object]  # called with the number of images that were just evaluated


@dataclass(frozen=True)
class Evaluation:
    """The result of a pass over all validation images, on all ranks together."""

    weights: str  # "model" or "ema"
    figures: dict[str, float]  # as `means` returns them
    num_images: int
    seconds: float


@torch.no_grad()
def batch_sums(outputs: torch.Tensor, targets: torch.Tensor, loss: torch.Tensor) -> Sums:
    """Return the sums of one batch, on the device. `outputs` are float [N, classes], `loss` is the
    mean over the batch. `targets` are labels, int64 [N], or shares of classes, float [N, classes];
    the class with the largest share is then the label."""
    if targets.dim() == 2:
        targets = targets.argmax(dim=1)
    logits, guesses = outputs.topk(min(5, outputs.shape[1]), dim=1)
    hits = (guesses == targets[:, None]) & ~logits.isnan()  # topk ranks NaN highest
    # Filled on the device: a tensor made on the host would have to be copied, and waited for.
    count = outputs.new_full((), len(targets), dtype=torch.float64)
    return torch.stack(
        [loss.detach().double() * count, hits[:, :1].sum().double(), hits.sum().double(), count]
    )


def means(sums: Sums) -> dict[str, float]:
    """Return the mean loss, and top-1 and top-5 in percent."""
    loss, top1, top5, count = sums.tolist()
    return {"loss": loss / count, "top1": 100 * top1 / count, "top5": 100 * top5 / count}


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    config: Config,
    device: torch.device,
    show: Show = lambda images: None,
) -> Sums:
    """Return the sums over this rank's validation images. The total over ranks is exact at any
    world size. `show` is called with the size of each batch."""
    was_training = model.training
    network = working_copy(model, config).eval()
    sums = torch.zeros(4, dtype=torch.float64, device=device)
    expect_delay()
    for batch in batches:
        heartbeat()
        images, targets = to_device(batch, config, device)
        with autocast(config, device):
            outputs = network(images)
            if config.val_flip:
                outputs = (outputs + network(images.flip(-1))) / 2
        loss = nn.functional.cross_entropy(outputs.float(), targets)
        sums += batch_sums(outputs, targets, loss)
        show(len(targets))
    expect_delay()  # another rank may read its images more slowly
    network.train(was_training)
    return sums


def validate(
    parts: Trainables,
    config: Config,
    ranks: Ranks,
    data: Data,
    device: torch.device,
    workers: int,
    input_meter: InputMeter | None = None,
    show: Show = lambda images: None,
) -> list[Evaluation]:
    """Evaluate the model, and its moving average if there is one, on all validation images. Do
    nothing for synthetic data, whose labels are random, unless a flag asks for it. `show` is called
    with the images that all ranks have evaluated, as many on each as here."""
    model, ema = parts.model, parts.ema
    align_batch_norm(model, config, ranks)
    if data.val is None and not (config.evaluate or config.desired_acc):
        return []
    if ema is not None:
        copy_buffers(model, ema.module)

    def show_all(images: int) -> None:
        show(images * ranks.world.size)

    evaluations = []
    for weights, candidate in {"model": model, "ema": ema}.items():
        if candidate is not None:
            started = time.perf_counter()
            batches = validation_batches(data, config, ranks.world, device, workers, input_meter)
            sums = ranks.sum(evaluate(candidate, batches, config, device, show_all)).cpu()
            seconds = time.perf_counter() - started
            evaluations.append(Evaluation(weights, means(sums), int(sums[3]), seconds))
    return evaluations
