"""What compare/collectives.py measured: a folder's figures, and the table, the sentences, the JSON
and the plot that are made from them."""

import contextlib
import json
import textwrap
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import tabulate

from compare.evidence import packed
from compare.evidence.paired import CONFIDENCE, MIN_BLOCKS, Estimate, estimate_ratio
from compare.evidence.turns import least_load
from compare.evidence.verdicts import holm
from compare.evidence.words import digits
from compare.page.chart import (
    COLOURS,
    MARKERS,
    MUTED,
    Layer,
    Plot,
    Scale,
    logarithmic,
    standalone,
)
from recipe.errors import UserError

WIDTH = 100  # of lines
UNSTEADY = 2.0  # ratio of the quartiles of the repetitions, from which on it is mentioned


@dataclass(frozen=True)
class Figure:
    """One message on one wire through one backend, over all complete blocks."""

    backend: str
    message: str  # its bytes, or what it is of a model
    wire: str
    bytes: int  # of fp32, as the user sees it, on either wire
    tensors: int
    repetitions: tuple[int, ...]  # of each block's launch
    seconds: tuple[float, ...]  # of each block: the median over its launch's repetitions
    quartiles: tuple[float, float]  # lower and upper one, of all blocks' repetitions together
    workers: int

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

    def speed_against(self, other: "Figure | None") -> Estimate | None:
        """How many times as fast as another one; None against itself, or where there is none."""
        if other is None or other == self:
            return None
        return estimate_ratio(other.seconds, self.seconds)


@dataclass(frozen=True)
class Measurement:
    """A folder's contents."""

    plan: dict[str, Any]
    worlds: dict[str, dict[str, Any]]  # backend: what it ran on
    figures: dict[tuple[str, str, str], Figure]  # by backend, message and wire
    copies: dict[str, dict[str, Any]]  # by device: bytes, and bytes/s alone and together
    failed: list[str]
    complete_blocks: int
    other_loads: list[float]  # of each launch: cores that other processes kept busy, on average

    @property
    def messages(self) -> dict[str, str]:
        """Each message's label."""
        return {figure.message: figure.label for figure in self.figures.values()}


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
                    launches.pop(name, None)
                    break
                loads += [outcome["other_load"]] if outcome["other_load"] is not None else []
                text = packed.read_text(place / "measurements.jsonl")
                launches.setdefault(name, {})[block] = [*map(json.loads, text.splitlines())]
    if not launches:
        raise UserError(f"{folder}: no launch has ended well; each one's output.log there says why")
    # Blocks in which all were measured; the last one may have been interrupted.
    blocks = sorted(set.intersection(*(set(of_backend) for of_backend in launches.values())))
    if not blocks:
        raise UserError(f"{folder}: was interrupted before its first block was complete")
    worlds = {name: launches[name][blocks[0]][0] for name in launches}
    rows: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    copied: dict[str, list[dict[str, Any]]] = {}
    for name, of_backend in launches.items():
        for block in blocks:
            world, *lines, copies = of_backend[block]
            copied.setdefault(world["device"], []).append(copies)
            for line in lines:
                rows.setdefault((name, line["message"], line["wire"]), []).append(line)
    figures = {}
    for key, lines in rows.items():
        low, _, high = quantiles(
            [s for line in lines for s in line["seconds"]], n=4, method="inclusive"
        )
        repetitions = tuple(line["repetitions"] for line in lines)
        seconds = tuple(line["seconds_median"] for line in lines)
        first = lines[0]
        figures[key] = Figure(
            *key, first["bytes"], first["tensors"], repetitions, seconds, (low, high),
            plan["workers"],
        )  # fmt: skip
    copies_by_device = {
        device: {
            "bytes": of_device[0]["bytes"],
            "counted": "bytes read + bytes written",
            "alone_bytes_per_second": median(c["alone_bytes_per_second"] for c in of_device),
            "together_bytes_per_second_of_each": median(
                rate for c in of_device for rate in c["together_bytes_per_second"]
            ),
        }
        for device, of_device in sorted(copied.items())
    }
    return Measurement(plan, worlds, figures, copies_by_device, failed, len(blocks), loads)


def text_report(measurement: Measurement) -> str:
    """Return what was measured on, the table, and what the figures mean and say."""
    worlds = measurement.worlds.values()
    hosts = len({host for world in worlds for host in world["hosts"]})
    devices = " and ".join(dict.fromkeys(world["device_name"] for world in worlds))
    heading = (
        f"Allreduce over {measurement.plan['workers']} workers on {hosts} host"
        f"{'s' * (hosts > 1)}: {devices}"
    )
    return "\n".join([heading, "", table(measurement), "", *sentences(measurement)])


def table(measurement: Measurement) -> str:
    """Return the table: a row a message and wire, the time and bus bandwidth of each backend."""
    names = [*measurement.worlds, *measurement.failed]
    rows = []
    for wire in measurement.plan["wires"]:
        for message, label in measurement.messages.items():
            found = [measurement.figures.get((name, message, wire)) for name in names]
            missing = ["failed" if name in measurement.failed else "-" for name in names]
            texts = [
                f"{time_text(one.median_seconds)} {one.busbw / 1e9:6.3f}" if one else text
                for one, text in zip(found, missing, strict=True)
            ]
            rows.append([label, wire, *texts])
    align = ["right", "left", *["right"] * len(names)]
    return tabulate.tabulate(rows, ["", "wire", *names], colalign=align, disable_numparse=True)


def sentences(measurement: Measurement) -> list[str]:
    """Return what the figures mean and say, in lines of at most WIDTH characters."""
    plan, n, blocks = measurement.plan, measurement.plan["workers"], measurement.complete_blocks
    lines = [
        f"Each: time, and bus bandwidth in GB/s (fp32 bytes / time x 2 ({n} - 1) / {n}). Times are "
        f"medians of {blocks} launch{'es' if blocks > 1 else ''}, each the median of its "
        "repetitions, each of those its slowest rank's. -: not available."
    ]
    layers = [f for f in measurement.figures.values() if f.message == "model layers"]
    if layers:
        lines.append(
            f"model: the gradients of {plan['model']}, {size_text(layers[0].bytes)}, as one "
            f"message (fused) and as {layers[0].tensors} tensors (layers)."
        )
    for name, world in measurement.worlds.items():
        versions = ", ".join(f"{key} {value}" for key, value in world["versions"].items())
        lines.append(f"{name}: {world['transport']} on the {world['device'].upper()} ({versions}).")
    interval = f"no interval below {MIN_BLOCKS} blocks"
    if blocks >= MIN_BLOCKS:
        interval = "95 % interval; decided by Holm's method over these"
    first = next(iter(measurement.worlds))
    for wire in plan["wires"]:
        if found := verdicts(measurement, wire, first, wire):
            lines += ["", f"Against {first}, {wire} wire ({interval}):", *found]
    if found := verdicts(measurement, "fp16", None, "fp32"):
        lines += ["", f"fp16 wire against fp32 wire, casts included ({interval}):", *found]
    lines.append("")
    for name in measurement.worlds:
        shaky = [
            f"{f.label} {f.wire}"
            for f in measurement.figures.values()
            if f.backend == name and f.quartiles[1] > UNSTEADY * f.quartiles[0]
        ]
        if shaky:
            lines.append(
                f"Unsteady: repetitions on {name} spread more than {UNSTEADY:g}-fold between their "
                f"quartiles at {', '.join(shaky)}."
            )
    for device, copies in measurement.copies.items():
        alone, together = (copies[key] / 1e9 for key in [*copies][-2:])
        lines.append(
            f"Memory copy on the {device.upper()}, {size_text(copies['bytes'])}, "
            f"{copies['counted']}: {alone:.1f} GB/s by one rank alone, {together:.1f} GB/s by each "
            f"of {n} at once."
        )
    lines += [f"{name}: FAILED, no figures; see its output.log." for name in measurement.failed]
    if blocks < plan["blocks"]:
        lines.append(f"warning: interrupted: {blocks} of {plan['blocks']} blocks are complete")
    loads = measurement.other_loads
    disturbed = [load for load in loads if load >= least_load(plan["cores"])]
    if disturbed:
        lines.append(
            f"warning: in {len(disturbed)} of {len(loads)} launches other processes kept cores "
            f"busy, {max(disturbed):.1f} of {plan['cores']} at worst"
        )
    lines += [f"warning: {line}" for line in plan["warnings"]]
    return [
        part
        for line in lines
        for part in textwrap.wrap(line, WIDTH, subsequent_indent="  ") or [""]
    ]


def verdicts(
    measurement: Measurement, wire: str, other_backend: str | None, other_wire: str
) -> list[str]:
    """Return a sentence for each backend (against `other_backend`; None: itself on the other wire),
    for each of the messages that tell the most, decided by Holm's method over all of them."""
    messages = [*measurement.messages]
    sizes = [message for message in messages if message.isdecimal()]
    found: list[tuple[str, str, Estimate]] = []
    for message in dict.fromkeys([*sizes[:1], *sizes[-1:], *messages[len(sizes) :]]):
        for name in measurement.worlds:
            figure = measurement.figures.get((name, message, wire))
            other = measurement.figures.get((other_backend or name, message, other_wire))
            if figure is not None and (speed := figure.speed_against(other)) is not None:
                found.append((figure.label, name, speed))
    p_values = {i: speed.p_difference() for i, (*_, speed) in enumerate(found)}
    decided = holm(p_values, 1 - CONFIDENCE)
    return [
        f"  {label:12}  {verdict(name, speed, i in decided)}"
        for i, (label, name, speed) in enumerate(found)
    ]


def verdict(name: str, speed: Estimate, is_decided: bool) -> str:
    """Say how much faster a backend is; with an interval, if that is decided."""
    places = digits(speed)
    if speed.low is None or speed.high is None:
        return f"{name} is {speed.ratio:.{places}f} times as fast"
    interval = f"{speed.low:.{places}f} to {speed.high:.{places}f}"
    if is_decided:
        return f"{name} is {speed.ratio:.{places}f} times as fast ({interval})"
    return f"not decided for {name} ({speed.ratio:.{places}f}, {interval})"


def size_text(size: int) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:.4g} {unit}"
    return f"{size} B"


def time_text(seconds: float) -> str:
    """Return a time below 1,000 s in 7 characters or less, with three digits."""
    units = {"µs": 1e-6, "ms": 1e-3, "s": 1.0}
    unit = next((u for u, factor in units.items() if seconds < 999.5 * factor), "s")
    value = seconds / units[unit]
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"


def as_json(measurement: Measurement) -> dict[str, Any]:
    """Return all figures, rates in bytes/s, times in seconds."""
    first = next(iter(measurement.worlds))

    def values(one: Figure) -> dict[str, Any]:
        against_first = one.speed_against(measurement.figures.get((first, one.message, one.wire)))
        own_fp32 = measurement.figures.get((one.backend, one.message, "fp32"))
        against_fp32 = one.speed_against(own_fp32)
        return {
            **{name: getattr(one, name) for name in ("backend", "message", "wire", "bytes")},
            "transport": measurement.worlds[one.backend]["transport"],
            "tensors": one.tensors,
            "repetitions": one.repetitions,
            "seconds": one.median_seconds,
            "seconds_of_blocks": one.seconds,
            "seconds_lower_quartile": one.quartiles[0],
            "seconds_upper_quartile": one.quartiles[1],
            "algbw_bytes_per_second": one.algbw,
            "busbw_bytes_per_second": one.busbw,
            "speed_against_first": against_first and against_first.figures(),
            "speed_against_fp32": against_fp32 and against_fp32.figures(),
        }

    return {
        "plan": measurement.plan,
        "blocks": measurement.complete_blocks,
        "backends": measurement.worlds,
        "failed": measurement.failed,
        "figures": [values(one) for one in measurement.figures.values()],
        "memory_copy": measurement.copies,
        "sentences": sentences(measurement),
    }


def plot(measurement: Measurement) -> str:
    """Return an SVG file: bus bandwidth over message sizes, both axes logarithmic."""
    figures = [f for f in measurement.figures.values() if f.message.isdecimal()]
    if not figures:
        raise UserError("--svg: there is nothing to draw without --sizes")
    sizes = sorted({figure.bytes for figure in figures})
    ticks = tuple((float(size), size_text(size)) for size in sizes[:: -(-len(sizes) // 5)])
    x = Scale(sizes[0] / 1.4, sizes[-1] * 1.4, ticks, "message, bytes of fp32", logarithmic=True)
    copies = [copies["alone_bytes_per_second"] / 1e9 for copies in measurement.copies.values()]
    y = logarithmic([*(figure.busbw / 1e9 for figure in figures), *copies], "bus bandwidth, GB/s")
    key = "memory copy by one rank: bytes read + written"
    layers = [
        Layer("line", [(x.low, copy), (x.high, copy)], MUTED, 1, "3 2", key=key) for copy in copies
    ]
    layers.append(Layer("line", (), MUTED, 1.1, "3 2.4", key="fp16 wire"))
    for number, name in enumerate(measurement.worlds):
        colour, marker = COLOURS[number % len(COLOURS)], [*MARKERS][number % len(MARKERS)]
        for wire in measurement.plan["wires"]:
            own = [f for f in figures if (f.backend, f.wire) == (name, wire)]
            thin, told = wire != "fp32", f"{name}, {wire}"
            line = [(float(figure.bytes), figure.busbw / 1e9) for figure in own]
            texts = [f"{told}, {size_text(int(size))}: {rate:.3g} GB/s" for size, rate in line]
            width, dash = (1.1, "3 2.4") if thin else (1.6, "")
            in_legend = "" if thin else name
            layers.append(Layer("line", line, colour, width, dash, key=in_legend))
            layers.append(Layer(marker, line, colour, 2.6, hollow=thin, texts=texts, key=in_legend))
    n = measurement.plan["workers"]
    title = f"Allreduce over {n} workers: bus bandwidth over message size"
    return standalone(Plot("allreduce", title, "", x, y, layers).svg)
