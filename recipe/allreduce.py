"""How long an allreduce takes: the loop that all engines are measured by. It knows none of them.

An engine's script (horovod_train/allreduce.py, ddp_train/allreduce.py, baselines/mpi_allreduce.py)
says how it sums tensors over the ranks, and hands that to `measure`. compare/collectives.py starts
the scripts and puts their figures side by side.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from recipe.config import Config
from recipe.device import choose_device, gather, own_row
from recipe.errors import UserError
from recipe.files import replace_file
from recipe.wire_formats import WIRE_FORMATS, WireFormat
from recipe.world import World

FP32_BYTES = 4
WIRES = tuple(WIRE_FORMATS)
MIN_REPETITIONS = 3
MAX_REPETITIONS = 200
COPY_REPETITIONS = 3
EXACT_INTEGERS = min(one.exact_integers for one in WIRE_FORMATS.values())
PATTERN_LENGTH = 7  # prime: blocks of a power of two that change places do not go unseen
CHUNK_ELEMENTS = PATTERN_LENGTH << 17  # of filling and checking: 3.7 MB


@dataclass(frozen=True)
class Message:
    """What one allreduce sums: tensors of fp32, in the order in which they are handed over."""

    name: str
    elements: tuple[int, ...]  # of each tensor

    @property
    def bytes(self) -> int:
        """The payload as the user sees it, whatever the wire makes of it."""
        return FP32_BYTES * sum(self.elements)


@dataclass(frozen=True)
class Backend:
    """How one engine sums over its ranks."""

    name: str
    transport: str  # what carries the messages
    device: torch.device  # where the tensors are
    versions: dict[str, str]
    wires: tuple[str, ...]  # that it has
    # Returns what sums these tensors over the ranks, in place, and returns when they are summed.
    # More than one tensor: all are handed over before the first is waited for.
    prepare: Callable[[Sequence[torch.Tensor], WireFormat], Callable[[], object]]
    barrier: Callable[[], object]
    sum_over_ranks: Callable[[torch.Tensor], torch.Tensor]  # for figures; CPU tensors


def parse_options(
    description: str | None, transports: Sequence[str] = ("auto",)
) -> argparse.Namespace:
    """Read the flags of an engine's script, which has these transports to choose from."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--sizes", type=fp32_size, nargs="*", default=[4096, 1 << 20, 64 << 20], metavar="BYTES",
        help="message sizes: bytes of fp32 (default: 4096 1048576 67108864)")  # fmt: skip
    add("--wires", nargs="+", choices=WIRES, default=list(WIRES),
        help=f"number formats on the wire (default: {' '.join(WIRES)})")  # fmt: skip
    add("--model", default="none", metavar="NAME",
        help="any torchvision classification model: its gradients as one message, and as one "
        "tensor per parameter, last first")  # fmt: skip
    add("--seconds", type=float, default=0.3, metavar="S",
        help="time for the repetitions of one message (default: 0.3; at least "
        f"{MIN_REPETITIONS} are made, at most {MAX_REPETITIONS})")  # fmt: skip
    add("--threads", type=int, default=1, metavar="N",
        help="CPU threads of each rank for casts and copies (default: 1)")  # fmt: skip
    add("--no-cuda", dest="cuda", action="store_false", help="stay on the CPU")
    add("--out", type=Path, metavar="FILE", help="JSON lines (default: standard output)")
    add("--transport", choices=transports, default="auto",
        help="what carries the messages (default: auto)")  # fmt: skip
    return parser.parse_args()


def fp32_size(text: str) -> int:
    """Bytes of whole fp32 numbers."""
    if not text.isdecimal() or int(text) < FP32_BYTES or int(text) % FP32_BYTES:
        raise argparse.ArgumentTypeError(f"{text}: must be a positive multiple of {FP32_BYTES}")
    return int(text)


def pick_device(options: argparse.Namespace, world: World) -> torch.device:
    """The device by the trainers' rule; also sets this rank's threads."""
    torch.set_num_threads(options.threads)
    return choose_device(Config(cuda=options.cuda), world)


def model_messages(name: str) -> list[Message]:
    """The gradients of a torchvision model as one message, and as backward hands them over: tensor
    by tensor, the last layer's first."""
    from torchvision.models import get_model  # takes a second, and only this needs it

    try:
        with torch.device("meta"):
            model = get_model(name)
    except ValueError:
        raise UserError(
            f"--model {name}: torchvision has no such model; `python -c 'import "
            "torchvision.models as m; print(*m.list_models(m))'` lists them"
        ) from None
    layers = tuple(parameter.numel() for parameter in model.parameters())[::-1]
    return [Message("model fused", (sum(layers),)), Message("model layers", layers)]


def measure(backend: Backend, world: World, options: argparse.Namespace) -> None:
    """Measure every message on every wire, and the rate of copying memory; rank 0 writes.

    Raises UserError where a sum is wrong, naming backend, message, wire and rank.
    """
    messages = [Message(str(size), (size // FP32_BYTES,)) for size in options.sizes]
    if options.model != "none":
        messages += model_messages(options.model)
    hosts = gather(world.host, world, backend.sum_over_ranks)
    lines: list[dict[str, Any]] = [{
        "kind": "world",
        "backend": backend.name,
        "transport": backend.transport,
        "device": backend.device.type,
        "ranks": world.size,
        "hosts": hosts,
        "launcher": world.launcher,
        "threads": torch.get_num_threads(),
        "wires": [wire for wire in options.wires if wire in backend.wires],
        "model": options.model,
        "python": platform.python_version(),
        "versions": backend.versions,
    }]  # fmt: skip
    for message in messages:
        for wire in options.wires:
            if wire in backend.wires:
                lines.append(time_message(backend, world, message, wire, options.seconds))
    copied_bytes = max((message.bytes for message in messages), default=0)
    lines.append(time_copies(backend, world, copied_bytes))
    if world.is_first:
        from recipe.record.environment import (
            cpu_model,  # slow to import, and nothing waits for it here
        )

        gpu = backend.device.type == "cuda"
        lines[0]["device_name"] = torch.cuda.get_device_name(backend.device) if gpu else cpu_model()
        text = "".join(json.dumps(line) + "\n" for line in lines)
        if options.out is None:
            print(text, end="", flush=True)
        else:
            replace_file(options.out, text)


def time_message(
    backend: Backend, world: World, message: Message, wire: WireFormat, seconds: float
) -> dict[str, Any]:
    """Time the allreduce of one message; as many repetitions as fit into `seconds`.

    The ranks start each repetition together, from a barrier, with fresh values, which lie in the
    cache as far as they fit, as gradients do. A repetition takes as long as its slowest rank.
    """
    tensors = [torch.empty(n, dtype=torch.float32, device=backend.device) for n in message.elements]
    own = pattern_of(world, [world.rank]).to(backend.device)
    expected = pattern_of(world, range(world.size)).to(backend.device)
    reduce = backend.prepare(tensors, wire)

    def repeat(times: int) -> torch.Tensor:
        """Seconds of each repetition: float64 [ranks, times]."""
        spent = torch.zeros(times, dtype=torch.float64)
        for repetition in range(times):
            for tensor in tensors:
                fill(tensor, own)
            synchronize(backend.device)
            backend.barrier()
            began = time.perf_counter()
            reduce()
            synchronize(backend.device)
            spent[repetition] = time.perf_counter() - began
        return backend.sum_over_ranks(own_row(world, spent))

    warm = repeat(1).amax().item()  # pays for connections and page faults
    if warm < seconds:
        warm = repeat(1).amax().item()
    repetitions = min(max(int(seconds / warm), MIN_REPETITIONS), MAX_REPETITIONS)
    times = repeat(repetitions).amax(dim=0)
    for index, tensor in enumerate(tensors):
        if wrong := first_difference(tensor, expected):
            element, value, right = wrong
            raise UserError(
                f"{backend.name}: the allreduce of {message.name} ({message.bytes} bytes, {wire} "
                f"wire) is wrong on rank {world.rank}: element {element} of tensor {index} is "
                f"{value:g} and must be {right:g}. Nothing measured with this build can be "
                "trusted: rebuild it, or leave it out"
            )
    return {
        "kind": "allreduce",
        "message": message.name,
        "bytes": message.bytes,
        "tensors": len(message.elements),
        "wire": wire,
        "repetitions": repetitions,
        "seconds_median": times.median().item(),
        "seconds": [float(f"{value:.4g}") for value in times.tolist()],
    }


def time_copies(backend: Backend, world: World, size: int) -> dict[str, Any]:
    """Time copies of `size` bytes on the tensors' device: rank 0 alone, then all ranks at once.

    A copy counts twice, as bytes read and as bytes written, the way STREAM counts (McCalpin,
    "Memory bandwidth and machine balance in current high performance computers", 1995).
    """
    source = torch.ones(size, dtype=torch.uint8, device=backend.device)
    destination = torch.zeros_like(source)
    rates = []
    for alone in (True, False):
        spent = torch.full((COPY_REPETITIONS,), float("inf"), dtype=torch.float64)
        for repetition in range(COPY_REPETITIONS + 1):
            backend.barrier()
            if world.is_first or not alone:
                began = time.perf_counter()
                destination.copy_(source)
                synchronize(backend.device)
                spent[repetition - 1] = time.perf_counter() - began  # the first is overwritten
        rate = 2 * size / spent.median(dim=0, keepdim=True).values
        rates.append(backend.sum_over_ranks(own_row(world, rate))[:, 0].tolist())
    return {
        "kind": "copy",
        "bytes": size,
        "counted": "bytes read + bytes written",
        "alone_bytes_per_second": rates[0][0],
        "together_bytes_per_second": rates[1],
    }


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that it was told; the CPU already has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# -- Values whose sum is known, and exact in fp32 and in fp16, in whatever order it is formed ------


def pattern_of(world: World, ranks: Iterable[int]) -> torch.Tensor:
    """What the sum over these ranks is, repeated along a message: fp32 [CHUNK_ELEMENTS]. Rank r
    brings (i + r) mod n at position i, so that all partial sums are whole and exact in fp16."""
    values = min(PATTERN_LENGTH, EXACT_INTEGERS // world.size + 1)
    if values < 2:
        raise UserError(
            f"{world.size} ranks: sums over more than {EXACT_INTEGERS} are not exact on all wires "
            "and could not be checked; start fewer"
        )
    members = list(ranks)
    period = [sum((position + rank) % values for rank in members) for position in range(values)]
    length = CHUNK_ELEMENTS // PATTERN_LENGTH * PATTERN_LENGTH
    return torch.tensor(period, dtype=torch.float32).repeat(length // values + 1)[:length]


def fill(tensor: torch.Tensor, pattern: torch.Tensor) -> None:
    """Write the pattern along a tensor, each chunk from its begin."""
    for piece in tensor.split(len(pattern)):
        piece.copy_(pattern[: len(piece)])


def first_difference(
    tensor: torch.Tensor, pattern: torch.Tensor
) -> tuple[int, float, float] | None:
    """Where a tensor first differs from the pattern along it: position, value, right value."""
    for number, piece in enumerate(tensor.split(len(pattern))):
        right = pattern[: len(piece)]
        if not torch.equal(piece, right):
            position = int((piece != right).nonzero()[0])
            element = number * len(pattern) + position
            return element, piece[position].item(), right[position].item()
    return None
