"""`--wire-format auto`: gradients travel in the number format that is faster on this network.

fp16 halves the bytes and costs two casts: it pays on slow links, and on a CPU with fast ones it
does not. Which it is depends on the network, the engine, the processors and the number of ranks; so
it is measured, once, before training.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import torch
from torch import nn

from recipe.config import Config
from recipe.device import own_row
from recipe.world import World

MAX_ELEMENTS = 4 << 20  # of the message that is timed: 16 MiB of fp32, about a bucket's size
ROUNDS = 5
WireFormat = Literal["fp32", "fp16"]


def settle_wire_format(
    config: Config,
    world: World,
    model: nn.Module,
    device: torch.device,
    sum_over_ranks: Callable[[torch.Tensor], torch.Tensor],
) -> Config:
    """Return `config` with the faster of fp32 and fp16 for `auto`; as it is for all else.

    `sum_over_ranks` adds up a tensor on the device, by the engine that will send the gradients. All
    ranks come to the same choice, since all of them see all the times. Rank 0 prints it.
    """
    if config.wire_format != "auto":
        return config
    if world.size == 1:
        return replace(config, wire_format="fp32")  # nothing is sent
    num_gradients = sum(parameter.numel() for parameter in model.parameters())
    gradients = torch.ones(min(num_gradients, MAX_ELEMENTS), device=device)

    def exchange(dtype: torch.dtype) -> float:
        """Seconds of one exchange on this rank, casts included."""
        started = time.perf_counter()
        sums = sum_over_ranks(gradients.to(dtype).div(world.size)).to(torch.float32)
        assert sums[-1].item() == 1.0  # waits for the device
        return time.perf_counter() - started

    formats: dict[WireFormat, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16}
    for dtype in formats.values():
        exchange(dtype)  # pays for connections and page faults
    own = torch.tensor(
        [[exchange(dtype) for dtype in formats.values()] for _ in range(ROUNDS)],
        dtype=torch.float64,
    )
    rows = sum_over_ranks(own_row(world, own.flatten()).to(device)).cpu()
    slowest = rows.view(world.size, ROUNDS, len(formats)).amax(dim=0)
    seconds = dict(zip(formats, slowest.median(dim=0).values.tolist(), strict=True))
    chosen: WireFormat = "fp16" if seconds["fp16"] < seconds["fp32"] else "fp32"
    if world.is_first:
        size = 4 * gradients.numel() / 2**20
        times = ", ".join(f"{name} {1000 * value:.3g} ms" for name, value in seconds.items())
        print(f"wire format: {chosen} ({times} for {size:.3g} MiB of gradients)", flush=True)
    return replace(config, wire_format=chosen)
