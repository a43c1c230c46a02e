"""How long an allreduce takes: the loop that all engines are measured by. It knows none of them.

An engine's script (horovod_train/horovod_allreduce.py, ddp_train/torch_allreduce.py and
baselines/mpi_allreduce.py) says how it sums tensors over the ranks, and calls `run`.
compare/collectives.py starts the scripts and puts their figures side by side.
"""

import json
import platform
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch

from recipe.ancestors import own_world
from recipe.command import call_tool
from recipe.errors import UserError, one_message
from recipe.files import replace_file
from recipe.ranks import Ranks
from recipe.settings.flags import WIRE_FORMATS, Config, WireFormat
from recipe.watch import begin, start_watchdog
from recipe.world import World

FP32_BYTES = 4
WIRES = tuple(WIRE_FORMATS)
MIN_REPETITIONS = 3
MAX_REPETITIONS = 200
EXACT_INTEGERS = min(wire.exact_integers for wire in WIRE_FORMATS.values())
PATTERN_LENGTH = 7  # prime: blocks of a power of two that change places do not go unseen


@dataclass(frozen=True)
class Backend:
    """How one engine sums over its ranks."""

    name: str
    transport: str  # what carries the messages
    device: torch.device  # where the tensors are
    versions: dict[str, str]
    # Returns what sums these tensors over the ranks, in place, and returns when they are summed.
    # More than one tensor: all are handed over before the first is waited for.
    prepare: Callable[[Sequence[torch.Tensor], WireFormat], Callable[[], object]]
    barrier: Callable[[], object]
    close: Callable[[], object]
    wires: tuple[str, ...] = WIRES  # that it has

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """The ranks' values added up, in fp32, which is enough for figures."""
        sums = values.to(self.device, torch.float32, copy=True)
        self.prepare([sums], "fp32")()
        return sums.to("cpu", values.dtype)


def run(about: str | None, connect: Callable[[Config, World], Backend]) -> None:
    """Be an engine's script: read the flags, let the ranks `connect`, and measure."""
    world = own_world()
    start_watchdog(world)
    with one_message(world):
        call_tool(sys.argv[0], partial(measure_allreduce, connect, world), about, sys.argv[1:])


def model_messages(name: str) -> dict[str, list[int]]:
    """The elements of a torchvision model's gradients: as one message, and as one message per
    parameter, in backward order."""
    from torchvision.models import get_model  # takes a second, and only this needs it

    try:
        with torch.device("meta"):
            model = get_model(name)
    except ValueError:
        raise UserError(
            f"--model {name}: torchvision has no such model; `python -c 'import "
            "torchvision.models as m; print(*m.list_models(m))'` lists them"
        ) from None
    layers = [parameter.numel() for parameter in model.parameters()][::-1]
    return {"model fused": [sum(layers)], "model layers": layers}


def measure_allreduce(
    connect: Callable[[Config, World], Backend],
    world: World,
    sizes: tuple[int, ...] = (4096, 1 << 20, 64 << 20),
    wires: tuple[WireFormat, ...] = WIRES,
    model: str = "none",
    seconds: float = 0.3,
    threads: int = 1,
    no_cuda: bool = False,
    transport: Literal["auto", "nccl", "gloo", "mpi"] = "auto",
    out: Path | None = None,
) -> None:
    """Measure every message on every wire; rank 0 writes.

    Raises UserError where a sum is wrong, naming backend, message, wire and rank.

    Args:
        connect: How the ranks meet.
        world: This rank's place among them.
        sizes: Message sizes: bytes of fp32.
        wires: Number formats on the wire.
        model: Any torchvision classification model: its gradients as one message, and as one tensor
            per parameter, last first.
        seconds: Time for the repetitions of one message; at least 3 are made, at most 200.
        threads: CPU threads of each rank for casts and copies.
        no_cuda: Stay on the CPU.
        transport: What carries the messages, as in a training.
        out: JSON lines (default: standard output).
    """
    if not wires:
        raise UserError("--wires: name at least one")
    torch.set_num_threads(threads)
    backend = connect(Config(cuda=not no_cuda, transport=transport), world)
    begin("")  # the ranks have met
    messages = {str(size): [max(1, size // FP32_BYTES)] for size in sizes}
    if model != "none":
        messages |= model_messages(model)
    measured = [wire for wire in wires if wire in backend.wires]
    lines = [{**world_line(backend, world), "wires": measured, "model": model}]
    for name, elements in messages.items():
        for wire in measured:
            timed = time_message(backend, world, elements, wire, seconds)
            if timed["wrong_elements"]:
                raise UserError(
                    f"{backend.name}: the allreduce of {name} ({timed['bytes']} bytes, {wire} "
                    f"wire) is wrong on rank {world.rank}, in {timed['wrong_elements']} elements. "
                    "Nothing measured with this build can be trusted: rebuild it, or leave it out"
                )
            lines.append({"kind": "allreduce", "message": name, "wire": wire, **timed})
    backend.barrier()  # which a rank with a wrong sum does not reach
    text = "".join(json.dumps(line) + "\n" for line in lines)
    if world.is_first and out is not None:
        replace_file(out, text)
    elif world.is_first:
        print(text, end="", flush=True)
    backend.close()


def world_line(backend: Backend, world: World) -> dict[str, Any]:
    """What is measured on, for the first line of the output."""
    from recipe.record.fingerprint import cpu_model  # slow to import, for one line

    on_gpu = backend.device.type == "cuda"
    return {
        "kind": "world",
        "backend": backend.name,
        "transport": backend.transport,
        "device": backend.device.type,
        "device_name": torch.cuda.get_device_name(backend.device) if on_gpu else cpu_model(),
        "ranks": world.size,
        "hosts": Ranks(world, backend.sum_over_ranks).gather(world.host),
        "launcher": world.launcher,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": backend.versions,
    }


def time_message(
    backend: Backend, world: World, elements: Sequence[int], wire: WireFormat, seconds: float
) -> dict[str, Any]:
    """Time the allreduce of fp32 tensors with so many elements; as many repetitions as fit into
    `seconds`. Also counts what is wrong in the last sums.

    The ranks start each repetition together, from a barrier, with fresh values, which lie in the
    cache as far as they fit, as gradients do. A repetition takes as long as its slowest rank.
    """
    tensors = [torch.empty(n, dtype=torch.float32, device=backend.device) for n in elements]
    longest = max(elements)
    own = pattern_of(world, [world.rank], longest).to(backend.device)
    expected = pattern_of(world, range(world.size), longest).to(backend.device)
    reduce = backend.prepare(tensors, wire)

    def repeat(times: int) -> list[float]:
        """Seconds of each repetition, on its slowest rank."""
        spent = []
        for _ in range(times):
            for tensor in tensors:
                tensor.copy_(own[: len(tensor)])
            synchronize(backend.device)
            backend.barrier()
            began = time.perf_counter()
            reduce()
            synchronize(backend.device)
            spent.append(time.perf_counter() - began)
        rows = Ranks(world, backend.sum_over_ranks).rows(torch.tensor(spent, dtype=torch.float64))
        return list(rows.amax(dim=0).tolist())

    for _ in range(2):  # the first one pays for connections and page faults
        (warm,) = repeat(1)
    times = repeat(min(max(int(seconds / warm), MIN_REPETITIONS), MAX_REPETITIONS))
    return {
        "bytes": FP32_BYTES * sum(elements),  # as the user sees it, whatever the wire makes of it
        "tensors": len(elements),
        "repetitions": len(times),
        "seconds_median": median(times),
        "seconds": [float(f"{value:.4g}") for value in times],
        "wrong_elements": sum(int((tensor != expected[: len(tensor)]).sum()) for tensor in tensors),
    }


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that it was told; the CPU already has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# -- Values whose sum is known, and exact in fp32 and in fp16, in whatever order it is formed ------


def pattern_of(world: World, ranks: Iterable[int], length: int) -> torch.Tensor:
    """What the sum over these ranks is: fp32 [length]. Rank r brings (i + r) mod n at position i,
    so that all partial sums are whole and exact in fp16."""
    values = min(PATTERN_LENGTH, EXACT_INTEGERS // world.size + 1)
    if values < 2:
        raise UserError(
            f"{world.size} ranks: sums over more than {EXACT_INTEGERS} are not exact on all wires "
            "and could not be checked; start fewer"
        )
    members = list(ranks)
    period = [sum((position + rank) % values for rank in members) for position in range(values)]
    return torch.tensor(period, dtype=torch.float32).repeat(length // values + 1)[:length]
