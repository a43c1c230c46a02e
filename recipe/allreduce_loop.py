"""The loop that measures an all-reduce alone. It knows neither the engines nor who measures.

An engine's script (horovod_train/horovod_allreduce.py, ddp_train/torch_allreduce.py and
baselines/mpi_allreduce.py) says how its ranks meet and sum tensors: `connect`. In each turn
compare/collectives.py asks for sums of one case: a message and its number format on the wire, such
as `4K-fp32`.
"""

import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, cast

import torch

from recipe.ancestors import own_world
from recipe.command import call_tool
from recipe.errors import UserError, one_message
from recipe.gpu_sharing import ranks_per_gpu
from recipe.ranks import Ranks
from recipe.settings.flags import WIRE_FORMATS, Config, WireFormat
from recipe.watch import begin, start_watchdog
from recipe.world import World

FP32_BYTES = 4
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
WARM_UP_CASE = "4K-fp32"  # before a turn has asked for one
EXACT_INTEGERS = min(wire.exact_integers for wire in WIRE_FORMATS.values())
PATTERN_LENGTH = 7  # prime: blocks of a power of two that change places do not go unseen
PATTERN_REPEATS = 1024  # so that a copy of it is fast


@dataclass(frozen=True)
class Backend:
    """How one engine sums over its ranks."""

    transport: str  # what carries the messages
    device: torch.device  # where the tensors are
    # Returns what sums these tensors over the ranks, in place, in this wire format, and returns
    # when they are summed. More than one tensor: all are handed over before the first is waited
    # for.
    prepare: Callable[[Sequence[torch.Tensor], WireFormat], Callable[[], object]]
    barrier: Callable[[], object]


class Turns(Protocol):
    """Who measures: says which case is next, and waits at the end of a turn."""

    case: str
    transport: str
    ranks_per_gpu: int | None
    weights: Callable[[], Mapping[str, Any]] | None

    def step_ended(self, *, unit: str, amount: float, seconds: float) -> None:
        """Count a sum."""


def run(connect: Callable[[Config, World], Backend], turns: Turns) -> None:
    """Be an engine's side: read the flags, let the ranks `connect`, and sum until the end."""
    world = own_world()
    with one_message(world):
        start_watchdog(world)
        call_tool(sys.argv[0], partial(sum_for_ever, connect, world, turns), "", sys.argv[1:])


def sum_for_ever(
    connect: Callable[[Config, World], Backend],
    world: World,
    turns: Turns,
    threads: int = 1,
    no_cuda: bool = False,
    share_gpu: bool = False,
    transport: Literal["auto", "nccl", "gloo", "mpi"] = "auto",
) -> None:
    """Sum the messages that the turns ask for, until this process is ended.

    Args:
        connect: How the ranks meet.
        world: This rank's place among them.
        turns: Who measures.
        threads: CPU threads of each rank for casts and copies.
        no_cuda: Stay on the CPU.
        share_gpu: Let the ranks of a host share its GPUs, as in a training.
        transport: What carries the messages, as in a training.
    """
    torch.set_num_threads(threads)
    backend = connect(Config(cuda=not no_cuda, share_gpu=share_gpu, transport=transport), world)
    begin("")  # the ranks have met
    turns.transport = backend.transport
    turns.ranks_per_gpu = check_gpus(backend, world, share_gpu)
    message = Message(WARM_UP_CASE, backend, world)
    turns.weights = lambda: {"sum": message.tensors[0]}
    while True:
        if turns.case not in ("", message.case):
            del message  # its memory is needed
            message = Message(turns.case, backend, world)
        seconds = message.sum()
        turns.step_ended(unit="bytes", amount=message.bytes / world.size, seconds=seconds)


def check_gpus(backend: Backend, world: World, may_share: bool) -> int | None:
    """Return how many ranks share a GPU; None if none do. UserError if they do and may not."""
    if backend.device.type != "cuda":
        return None

    def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
        total = values.clone()
        backend.prepare([total], "fp32")()  # exact: the sums are bytes and lengths of texts
        return total

    own = str(torch.cuda.get_device_properties(backend.device).uuid), world.host
    gpus, hosts = zip(*Ranks(world, sum_over_ranks).gather(own), strict=True)
    return ranks_per_gpu(gpus, hosts, may_share)


class Message:
    """One rank's fp32 tensors, which its backend sums over the ranks."""

    def __init__(self, case: str, backend: Backend, world: World) -> None:
        self.case, self.backend, self.world = case, backend, world
        message, _, wire = case.rpartition("-")
        elements = elements_of(message)
        self.bytes = FP32_BYTES * sum(elements)  # as the user sees it, whatever the wire format
        self.tensors = [torch.empty(n, device=backend.device) for n in elements]
        self.own = pattern_of(world, [world.rank]).to(backend.device)
        self.expected = pattern_of(world, range(world.size)).to(backend.device)
        self.reduce = backend.prepare(self.tensors, cast(WireFormat, wire))

    def sum(self) -> float:
        """Sum fresh values; return the seconds that it took. UserError if the sum is wrong.

        The ranks start together, from a barrier. The values lie in the cache as far as they fit, as
        gradients do.
        """
        for tensor in self.tensors:
            for part, values in side_by_side(tensor, self.own):
                part.copy_(values)
        synchronize(self.backend.device)
        self.backend.barrier()
        began = time.perf_counter()
        self.reduce()
        synchronize(self.backend.device)
        seconds = time.perf_counter() - began
        wrong = sum(
            int((part != values).sum())
            for tensor in self.tensors
            for part, values in side_by_side(tensor, self.expected)
        )
        if wrong:
            raise UserError(
                f"the all-reduce of {self.case} ({self.bytes} bytes) is wrong on rank "
                f"{self.world.rank}, in {wrong} elements. Nothing measured with this build can be "
                "trusted: rebuild it, or leave it out"
            )
        return seconds


def elements_of(message: str) -> list[int]:
    """Return the number of fp32 elements of each tensor of a message: `4K`, `256M` or `4096` bytes;
    or a torchvision model's gradients, as one tensor (`resnet50.fused`) or as one tensor for each
    parameter, in backward order (`resnet50.layers`)."""
    model, _, form = message.rpartition(".")
    if not model:
        return [size_bytes(message) // FP32_BYTES]
    from torchvision.models import get_model  # takes a second, and only this needs it

    try:
        with torch.device("meta"):
            network = get_model(model)
    except ValueError:
        raise UserError(
            f"--model {model}: torchvision has no such model; `python -c 'import "
            "torchvision.models as m; print(*m.list_models(m))'` lists them"
        ) from None
    layers = [parameter.numel() for parameter in network.parameters()][::-1]
    return layers if form == "layers" else [sum(layers)]


def size_bytes(text: str) -> int:
    """Return the bytes of `4096`, `4K` or `256M`."""
    found = re.fullmatch("([0-9]+)([KMG]?)", text)
    size = int(found[1]) * UNITS[found[2]] if found else 0
    if size == 0 or size % FP32_BYTES:
        raise UserError(
            f"--sizes {text}: is no size; write 4096, 4K or 256M, a multiple of 4 bytes"
        )
    return size


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that it was told; the CPU already has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# -- Values whose sum is known, and exact in fp32 and in fp16, in whatever order it is formed ------


def pattern_of(world: World, ranks: Iterable[int]) -> torch.Tensor:
    """Return the sum over these ranks, in fp32, of the values that repeat along a message. Rank r
    brings (i + r) mod n at position i, so that all partial sums are whole and exact in fp16."""
    values = min(PATTERN_LENGTH, EXACT_INTEGERS // world.size + 1)
    if values < 2:
        raise UserError(
            f"{world.size} ranks: sums over more than {EXACT_INTEGERS} are not exact on all wires "
            "and could not be checked; start fewer"
        )
    members = list(ranks)
    period = [sum((position + rank) % values for rank in members) for position in range(values)]
    return torch.tensor(period, dtype=torch.float32).repeat(PATTERN_REPEATS)


def side_by_side(
    tensor: torch.Tensor, pattern: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the parts of a tensor, each with the values that it has if the pattern repeats."""
    whole = len(tensor) // len(pattern) * len(pattern)
    rest = tensor[whole:]
    return [(tensor[:whole].view(-1, len(pattern)), pattern), (rest, pattern[: len(rest)])]
