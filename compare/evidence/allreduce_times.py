"""What compare/collectives.py has measured in a folder: how long the allreduce of each message took
on each wire through each backend."""

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from compare.evidence import packed
from compare.evidence.paired import Estimate, estimate_ratio
from compare.evidence.reading import decode, read_object, read_outcome, read_text
from recipe.errors import refuse


@dataclass(frozen=True)
class Figure:
    """One message on one wire through one backend, over all complete blocks."""

    backend: str
    message: str  # its bytes, or "model fused", "model layers"
    wire: str
    bytes: int  # of fp32, as the user sees it, on either wire
    tensors: int
    workers: int
    seconds_of_blocks: tuple[float, ...]  # the median over the repetitions of each block's launch

    @property
    def seconds(self) -> float:
        """The median over blocks."""
        return median(self.seconds_of_blocks)

    @property
    def busbw(self) -> float:
        """Bus bandwidth, bytes/s: what each link carries at least: payload / time x 2 (n - 1) / n
        (nccl-tests, doc/PERFORMANCE.md)."""
        return self.bytes / self.seconds * 2 * (self.workers - 1) / self.workers

    def speed_against(self, other: "Figure") -> Estimate:
        """How many times as fast as another one, by blocks."""
        return estimate_ratio(other.seconds_of_blocks, self.seconds_of_blocks)


@dataclass(frozen=True)
class Measurement:
    """A folder's contents."""

    plan: dict[str, Any]
    worlds: dict[str, dict[str, Any]]  # backend: what it ran on
    figures: dict[tuple[str, str, str], Figure]  # by backend, message and wire
    failed: list[str]  # backends
    complete_blocks: int
    other_loads: list[float]  # of each launch: cores that other processes kept busy, on average

    def rivals(self, figure: Figure) -> list[Figure]:
        """Return what a figure is compared with: the first backend's on the same wire, and its own
        on the fp32 wire."""
        backends = (next(iter(self.worlds)), figure.wire), (figure.backend, "fp32")
        found = [self.figures.get((name, figure.message, wire)) for name, wire in backends]
        return [other for other in found if other not in (None, figure)]


def read_measurement(folder: Path) -> Measurement:
    """Work a folder's figures out; raises UserError if there are none.

    A backend of which a launch failed has no figures: those of its other launches may be wrong as
    well, or were taken before what broke it was seen.
    """
    path = folder / "collectives.json"
    refuse((not packed.exists(path), f"{folder}: holds no measurement of collectives"))
    plan = read_object(path)
    launches: dict[str, list[list[dict[str, Any]]]] = {}  # each launch's lines
    failed, loads = list[str](), list[float]()
    for name, block in product(plan["backends"], range(1, plan["blocks"] + 1)):
        place = folder / f"block-{block}" / name
        outcome, path = read_outcome(place), place / "measurements.jsonl"
        loads.append(outcome.other_load or 0.0)
        if outcome.status == "completed":
            lines = [decode(line, path) for line in read_text(path).splitlines()]
            launches.setdefault(name, []).append(lines)
        elif outcome.status != "not run":  # as after an interruption
            failed.append(name)
    launches = {name: own for name, own in launches.items() if name not in failed}
    # Those in which all were measured; the last one may have been interrupted.
    blocks = min(map(len, launches.values()), default=0)
    refuse((not blocks, f"{folder}: no block is complete; each launch's output.log there says why"))
    figures = {}
    for name, own in launches.items():
        for lines in zip(*own[:blocks], strict=False):
            if (first := lines[0])["kind"] == "allreduce":
                key = name, first["message"], first["wire"]
                seconds = tuple(one["seconds_median"] for one in lines)
                size = first["bytes"], first["tensors"], plan["workers"]
                figures[key] = Figure(*key, *size, seconds)
    worlds = {name: own[0][0] for name, own in launches.items()}
    return Measurement(plan, worlds, figures, failed, blocks, loads)
