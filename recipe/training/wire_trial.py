"""`--wire-format auto`: gradients travel in the number format that is faster on this network.

fp16 halves the bytes and costs two casts: it pays on slow links, and on a CPU with fast ones it
does not. Which it is depends on the network, the engine, how much of the exchange hides behind the
backward pass, and whether the casts take cores from it. So it is measured, once, before training:
both formats train copies of the network, by the engine itself, on made-up images.
"""

import copy
import gc
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from recipe.data.batches import to_device
from recipe.ranks import Ranks
from recipe.settings.config import Config
from recipe.settings.flags import WIRE_FORMATS, WireFormat
from recipe.training.model import autocast, compile_stages
from recipe.watch import expect_delay, heartbeat

LEAST_GAIN = 1.01  # of what rounds as it sends, over fp32; less is within what timing can tell
# Rounds that count: the second number if the first leaves neither format CLEAR ahead. (On a slow
# network steps take long, and show it soon.) A round more pays for connections and page faults.
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
    """Return `config` with the faster of fp32 and fp16 for `auto`; as it is for all else.

    `distribute` makes of a network what the engine trains, and the optimizer for it. All ranks come
    to the same choice, since all of them see all the times. Rank 0 prints it.
    """
    if config.wire_format != "auto":
        return config
    if ranks.world.size == 1 or config.evaluate or config.has_fp16_weights:
        return replace(config, wire_format="fp32")  # none are sent, or most are fp16 already
    steps = [
        trial(replace(config, wire_format=name), model, device, distribute) for name in WIRE_FORMATS
    ]

    def seconds(step: Callable[[], None]) -> float:
        """How long a training step takes on this rank."""
        step()  # after the other format's, Horovod agrees anew on what it sends
        ranks.sum(torch.zeros(1)).item()  # the ranks begin together
        started = time.perf_counter()
        step()
        return time.perf_counter() - started

    own = [[seconds(step) for step in steps]]
    for rounds in ROUNDS:
        own += [[seconds(step) for step in steps] for _ in range(1 + rounds - len(own))]
        # The same on all, who go on or stop together.
        rows = ranks.rows(torch.tensor(own, dtype=torch.float64).flatten()).cpu()
        slowest = rows.view(ranks.world.size, len(own), len(WIRE_FORMATS)).amax(dim=0)
        medians = slowest[1:].median(dim=0).values.tolist()
        found: dict[WireFormat, float] = dict(zip(WIRE_FORMATS, medians, strict=True))
        fastest, second, *_ = sorted(found.values())
        if second > CLEAR * fastest:
            break
    chosen: WireFormat = min(found, key=lambda name: found[name])
    if LEAST_GAIN * found[chosen] >= found["fp32"]:
        chosen = "fp32"
    if ranks.world.is_first:
        times = ", ".join(f"{name} {1000 * seconds:.3g} ms" for name, seconds in found.items())
        print(f"wire format: {chosen} ({times} a step)", flush=True)
    expect_delay()  # the first batches are no such steps
    del steps
    gc.collect()  # the engines' hooks and their networks hold each other
    return replace(config, wire_format=chosen)


def trial(
    config: Config, model: nn.Module, device: torch.device, distribute: Distribute
) -> Callable[[], None]:
    """A training step of a copy of the network, which exchanges gradients as `config` says."""
    config = replace(config, batches_per_allreduce=1)  # only the exchange makes a difference
    replica = copy.deepcopy(model)
    if config.compile:
        compile_stages(replica)  # which is not copied
    network, optimizer = distribute(replica, config)
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
