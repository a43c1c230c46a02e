"""What compare/collectives.py has measured in a folder: how long the allreduce of each message took
on each wire through each backend."""

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from compare.evidence import packed
from compare.evidence.paired import Estimate, estimate_ratio
from recipe.errors import UserError, refuse


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
    def algbw(self) -> float:
        """Algorithm bandwidth, bytes/s: payload / time (nccl-tests, doc/PERFORMANCE.md)."""
        return self.bytes / self.seconds

    @property
    def busbw(self) -> float:
        """Bus bandwidth, bytes/s: what each link carries at least: algbw x 2 (n - 1) / n."""
        return self.algbw * 2 * (self.workers - 1) / self.workers

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
    try:
        plan = json.loads((folder / "collectives.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: holds no measurement of collectives ({error})") from None
    launches: dict[str, list[list[dict[str, Any]]]] = {}  # each launch's lines
    failed, loads = [], []
    for name in plan["backends"]:
        for block in range(1, plan["blocks"] + 1):
            place = folder / f"block-{block}" / name
            with contextlib.suppress(OSError, ValueError):  # it was not started, or interrupted
                outcome = json.loads(packed.read_text(place / "outcome.json"))
                failed += [name] if outcome["status"] != "completed" else []
                loads.append(outcome["other_load"] or 0.0)
                lines = packed.read_text(place / "measurements.jsonl").splitlines()
                launches.setdefault(name, []).append([json.loads(line) for line in lines])
    launches = {name: own for name, own in launches.items() if name not in failed}
    # Those in which all were measured; the last one may have been interrupted.
    blocks = min(map(len, launches.values()), default=0)
    refuse((not blocks, f"{folder}: no block is complete; each launch's output.log there says why"))
    worlds = {name: own[0][0] for name, own in launches.items()}
    figures = {}
    for name, own in launches.items():
        for lines in zip(*own[:blocks], strict=True):
            first = lines[0]
            if first["kind"] == "allreduce":
                key = name, first["message"], first["wire"]
                seconds = tuple(line["seconds_median"] for line in lines)
                sizes = first["bytes"], first["tensors"], plan["workers"]
                figures[key] = Figure(*key, *sizes, seconds)
    return Measurement(plan, worlds, figures, failed, blocks, loads)
