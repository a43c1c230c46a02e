"""`--wire-format auto`: send gradients in the number format that is faster on this network.

fp16 halves the bytes and costs two casts: it pays off on slow links, but not on a CPU with fast
links. Which format is faster depends on the network, the engine, how much of the exchange overlaps
with the backward pass, and whether the casts take cores from it. So both are measured once before
training: with each format the engine trains a copy of the network on random images.
"""

import copy
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn

from recipe.data.loading import to_device
from recipe.ranks import Ranks
from recipe.settings.config import Config
from recipe.settings.flags import WIRE_FORMATS, WireFormat
from recipe.training.model import autocast
from recipe.watch import expect_delay, heartbeat

LEAST_GAIN = 1.01  # speed ratio by which fp16 must beat fp32; less is within the timing error
# Rounds that count: the second number only if after the first neither format is faster by CLEAR.
# (On a slow network steps take long, and the difference shows early.) One more round comes first,
# for connections and page faults.
ROUNDS = (5, 20)
CLEAR = 1.1
Distribute = Callable[[nn.Module, Config], tuple[nn.Module, torch.optim.Optimizer]]


def settle_wire_format(
    config: Config,
    ranks: Ranks,
    model: nn.Module,
    device: torch.device,
    distribute: Distribute,
) -> Config:
    """Return `config` with `auto` replaced by the faster of fp32 and fp16.

    `distribute` wraps a network for the engine, and builds its optimizer. All ranks make the same
    choice, because each sees the times of all. Rank 0 prints it.
    """
    if config.wire_format != "auto":
        return config
    if ranks.world.size == 1 or config.evaluate or config.has_fp16_weights:
        return replace(config, wire_format="fp32")  # no gradients are sent, or most are fp16
    steps = [
        trial(replace(config, wire_format=name), model, device, distribute) for name in WIRE_FORMATS
    ]
    median_of: dict[WireFormat, float] = dict(
        zip(WIRE_FORMATS, _median_seconds(steps, ranks), strict=True)
    )
    chosen: WireFormat = min(median_of, key=lambda name: median_of[name])
    if LEAST_GAIN * median_of[chosen] >= median_of["fp32"]:
        chosen = "fp32"
    if ranks.world.is_first:
        shown = ", ".join(f"{name} {1000 * median:.3g} ms" for name, median in median_of.items())
        print(f"wire format: {chosen} ({shown} a step)", flush=True)
    expect_delay()  # the first batches may take longer than the trial's steps
    del steps
    gc.collect()  # the engines' hooks and the networks refer to each other
    return replace(config, wire_format=chosen)


def _median_seconds(steps: Sequence[Callable[[], None]], ranks: Ranks) -> list[float]:
    """Return the median time of each of these training steps on the slowest rank, the same on all
    ranks. They take turns in each round."""

    def seconds(step: Callable[[], None]) -> float:
        """Time a training step on this rank."""
        step()  # not timed: after the other format, Horovod must negotiate its messages again
        ranks.sum(torch.zeros(1)).item()  # all ranks start together
        started = time.perf_counter()
        step()
        return time.perf_counter() - started

    times = [[seconds(step) for step in steps]]
    for rounds in ROUNDS:
        times += [[seconds(step) for step in steps] for _ in range(1 + rounds - len(times))]
        # All ranks see the same times, so they continue or stop together.
        rows = ranks.rows(torch.tensor(times, dtype=torch.float64).flatten()).cpu()
        slowest = rows.view(ranks.world.size, len(times), len(steps)).amax(dim=0)
        medians = slowest[1:].median(dim=0).values.tolist()
        fastest, second, *_ = sorted(medians)
        if second > CLEAR * fastest:
            break
    return medians


def trial(
    config: Config, model: nn.Module, device: torch.device, distribute: Distribute
) -> Callable[[], None]:
    """Return a training step of a copy of the network, which exchanges gradients by `config`."""
    config = replace(config, batches_per_allreduce=1)  # accumulation does not affect the choice
    network, optimizer = distribute(copy.deepcopy(model), config)
    size = config.train_crop_size
    pixels = torch.randint(0, 256, (config.batch_size, 3, size, size), dtype=torch.uint8)
    batch = pixels, torch.zeros(config.batch_size, dtype=torch.int64)
    images, targets = to_device(batch, config, device)
    criterion = nn.CrossEntropyLoss()

    def step() -> None:
        heartbeat()
        with autocast(config, device):
            loss = criterion(network(images), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # waits for the device

    return step
