"""Read what a measurement of collectives left in its folder."""

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from compare.evidence import packed
from compare.evidence.paired import Estimate, estimate_ratio
from recipe.errors import UserError


@dataclass(frozen=True)
class Cell:
    """One message on one wire through one backend."""

    backend: str
    transport: str
    message: str
    bytes: int  # of fp32, as the user sees it, on either wire
    tensors: int
    wire: str
    repetitions: tuple[int, ...]  # of each block's launch
    seconds: tuple[float, ...]  # of each block: the median over its launch's repetitions
    quartiles: tuple[float, float]  # lower and upper one, of all blocks' repetitions together
    workers: int
    speed_against_first: Estimate | None  # None for the first backend
    speed_against_fp32: Estimate | None  # None on the fp32 wire

    @property
    def label(self) -> str:
        return size_text(self.bytes) if self.message.isdecimal() else self.message

    @property
    def median_seconds(self) -> float:
        return median(self.seconds)

    @property
    def algbw(self) -> float:
        """Algorithm bandwidth, bytes/s: payload / time (nccl-tests, doc/PERFORMANCE.md)."""
        return self.bytes / self.median_seconds

    @property
    def busbw(self) -> float:
        """Bus bandwidth, bytes/s: what each link carries at least: algbw x 2 (n - 1) / n."""
        return self.algbw * 2 * (self.workers - 1) / self.workers


@dataclass(frozen=True)
class Copies:
    """The rate at which memory is copied; a copied byte counts twice, as read and as written."""

    device: str
    bytes: int
    alone: float  # bytes/s of rank 0 while the others wait; median over launches
    together: float  # bytes/s of each rank while all copy; median over launches


@dataclass(frozen=True)
class Measurement:
    """A folder's contents."""

    plan: dict[str, Any]
    worlds: dict[str, dict[str, Any]]  # backend: what it ran on
    cells: list[Cell]
    copies: list[Copies]
    failed: list[str]
    complete_blocks: int
    other_loads: list[float]  # of each launch: cores that other processes kept busy, on average

    def cell(self, backend: str, message: str, wire: str) -> Cell | None:
        found = (
            c for c in self.cells if (c.backend, c.message, c.wire) == (backend, message, wire)
        )
        return next(found, None)

    @property
    def messages(self) -> list[str]:
        return list(dict.fromkeys(cell.message for cell in self.cells))

    @property
    def backends(self) -> list[str]:
        return [name for name in self.plan["backends"] if name in self.worlds]


def read_measurement(folder: Path) -> Measurement:
    """Work a folder's figures out; raises UserError if there are none.

    A backend of which a launch failed has no figures: those of its other launches may be wrong as
    well, or were taken before what broke it was seen.
    """
    try:
        plan = json.loads((folder / "collectives.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: holds no measurement of collectives ({error})") from None
    launches: dict[str, dict[int, list[dict[str, Any]]]] = {}
    failed, loads = [], []
    for name in plan["backends"]:
        for block in range(1, plan["blocks"] + 1):
            place = folder / f"block-{block}" / name
            with contextlib.suppress(OSError, ValueError):
                outcome = json.loads(packed.read_text(place / "outcome.json"))
                if outcome["status"] != "completed":
                    failed.append(name)
                    break
                if outcome["other_load"] is not None:
                    loads.append(outcome["other_load"])
                text = packed.read_text(place / "measurements.jsonl")
                launches.setdefault(name, {})[block] = [*map(json.loads, text.splitlines())]
        if name in failed:
            launches.pop(name, None)
    if not launches:
        raise UserError(f"{folder}: no launch has ended well; each one's output.log there says why")
    # Blocks in which all were measured; the last one may have been interrupted.
    blocks = sorted(set.intersection(*(set(of_backend) for of_backend in launches.values())))
    if not blocks:
        raise UserError(f"{folder}: was interrupted before its first block was complete")
    worlds = {name: launches[name][blocks[0]][0] for name in launches}
    cells = read_cells(plan, {n: [launches[n][b] for b in blocks] for n in launches})
    every = [lines for of_backend in launches.values() for lines in of_backend.values()]
    copies = []
    for device in sorted({lines[0]["device"] for lines in every}):
        rows = [lines[-1] for lines in every if lines[0]["device"] == device]
        copies.append(
            Copies(
                device,
                rows[0]["bytes"],
                median(row["alone_bytes_per_second"] for row in rows),
                median(rate for row in rows for rate in row["together_bytes_per_second"]),
            )
        )
    return Measurement(plan, worlds, cells, copies, failed, len(blocks), loads)


def read_cells(plan: dict[str, Any], launches: dict[str, list[list[dict[str, Any]]]]) -> list[Cell]:
    """Return the cells of all backends, given the lines of each one's launches, a block each."""
    rows: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for name, of_backend in launches.items():
        for lines in of_backend:
            for line in lines:
                if line["kind"] == "allreduce":
                    rows.setdefault((name, line["message"], line["wire"]), []).append(line)
    seconds = {key: [line["seconds_median"] for line in lines] for key, lines in rows.items()}
    first = next(name for name in plan["backends"] if name in launches)

    def against(key: tuple[str, str, str], other: tuple[str, str, str]) -> Estimate | None:
        if key == other or other not in seconds:
            return None
        return estimate_ratio(seconds[other], seconds[key])

    return [
        Cell(
            name,
            launches[name][0][0]["transport"],
            message,
            lines[0]["bytes"],
            lines[0]["tensors"],
            wire,
            tuple(line["repetitions"] for line in lines),
            tuple(seconds[name, message, wire]),
            outer_quartiles([value for line in lines for value in line["seconds"]]),
            plan["workers"],
            against((name, message, wire), (first, message, wire)),
            against((name, message, wire), (name, message, "fp32")),
        )
        for (name, message, wire), lines in rows.items()
    ]


def outer_quartiles(values: list[float]) -> tuple[float, float]:
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, high


def size_text(size: int) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:.4g} {unit}"
    return f"{size} B"
