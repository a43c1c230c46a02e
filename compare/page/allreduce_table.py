"""What is shown of compare/collectives.py's figures: a table, sentences, JSON and a plot."""

import textwrap
from collections.abc import Iterable
from dataclasses import asdict
from itertools import cycle, product
from typing import Any

import tabulate

from compare.evidence.allreduce_times import Figure, Measurement
from compare.evidence.paired import CONFIDENCE, MIN_BLOCKS, Estimate
from compare.evidence.turns import quiet_load
from compare.evidence.verdicts import holm
from compare.evidence.words import count, interval_text, ratio_text, three_digits
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
from recipe.errors import refuse

WIDTH = 100  # of lines
INTERVAL = f"{100 * CONFIDENCE:g} % interval"


def text_report(measurement: Measurement) -> str:
    """Return what was measured on, the table, and what the figures mean and say, in lines of at
    most WIDTH characters."""
    worlds, workers = measurement.worlds, measurement.plan["workers"]
    hosts = len({host for world in worlds.values() for host in world["hosts"]})
    devices = " and ".join(dict.fromkeys(world["device_name"] for world in worlds.values()))
    heading = f"Allreduce over {workers} workers on {count(hosts, 'host')}: {devices}"
    notes, caveats = wrapped(notes_of(measurement)), wrapped(caveats_of(measurement))
    parts = [heading, table(measurement), notes, speed_table(measurement), caveats]
    return "\n\n".join(part for part in parts if part)


def wrapped(lines: Iterable[str]) -> str:
    parts = [textwrap.wrap(line, WIDTH, subsequent_indent="  ") for line in lines]
    return "\n".join(line for part in parts for line in part)


def table(measurement: Measurement) -> str:
    """Return the table: a row a message and wire, the time and bus bandwidth of each backend."""
    names = [*measurement.worlds, *measurement.failed]
    none = {name: "failed" if name in measurement.failed else "-" for name in names}
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for figure in measurement.figures.values():
        text = f"{three_digits(1000 * figure.seconds)} {figure.busbw / 1e9:6.3f}"
        cells.setdefault((figure.wire, label_of(figure)), dict(none))[figure.backend] = text
    rows = [[label, wire, *own.values()] for (wire, label), own in cells.items()]
    rows.sort(key=lambda row: row[1], reverse=True)  # fp32 first
    align = ["right", "left", *["right"] * len(names)]
    return tabulate.tabulate(rows, ["", "wire", *names], colalign=align, disable_numparse=True)


def notes_of(measurement: Measurement) -> list[str]:
    """Return what the table's figures are, and what carried the messages."""
    n, blocks = measurement.plan["workers"], measurement.complete_blocks
    lines = [
        f"Each: milliseconds, and bus bandwidth in GB/s (fp32 bytes / time x 2 ({n} - 1) / {n}). "
        f"Times are medians of {count(blocks, 'block')}, of each the median of its repetitions, of "
        "those their slowest rank's. -: not available.",
        f"model: the gradients of {measurement.plan['model']}, as one message (fused) and as one "
        "tensor a parameter (layers).",
        "decided: which is faster, by Holm's method over all comparisons of the same two wires.",
    ]
    for name, world in measurement.worlds.items():
        versions = ", ".join(f"{key} {value}" for key, value in world["versions"].items())
        lines.append(f"{name}: {world['transport']} on the {world['device'].upper()} ({versions}).")
    return lines


def speed_table(measurement: Measurement) -> str:
    """Return how many times as fast each backend is as the first one, and on the fp16 wire as on
    the fp32 wire, for the messages that tell the most: the smallest and the largest size, and the
    model's. What is decided, is so by Holm's method over all comparisons of the same wires."""
    sizes = [message for _, message, _ in measurement.figures if message.isdecimal()]
    left_out = {*sizes} - {*sizes[:1], *sizes[-1:]}
    by_wires: dict[tuple[str, str], list[tuple[Figure, Figure, Estimate]]] = {}
    for figure in measurement.figures.values():
        for other in measurement.rivals(figure) if figure.message not in left_out else ():
            speed = figure.speed_against(other)
            by_wires.setdefault((other.wire, figure.wire), []).append((figure, other, speed))
    rows = []
    for speeds in by_wires.values():
        p_values = {i: speed.p_difference() for i, (*_, speed) in enumerate(speeds)}
        decided = holm(p_values, 1 - CONFIDENCE)
        for i, (figure, other, speed) in enumerate(speeds):
            names = [f"{one.backend} {one.wire}" for one in (figure, other)]
            interval = (
                interval_text(speed).removeprefix(f"{INTERVAL} ")
                if speed.blocks >= MIN_BLOCKS
                else "too few blocks"
            )
            decision = "decided" if i in decided else ""
            rows.append([label_of(figure), *names, ratio_text(speed), interval, decision])
    head = ["", "speed of", "against", "ratio", INTERVAL, ""]
    align = ["right", "left", "left", "right", "left", "left"]
    return tabulate.tabulate(rows, head, colalign=align, disable_numparse=True) if rows else ""


def caveats_of(measurement: Measurement) -> list[str]:
    """Return what is missing, and what makes figures doubtful."""
    plan, blocks, loads = measurement.plan, measurement.complete_blocks, measurement.other_loads
    lines = [f"{name}: FAILED, no figures; see its output.log." for name in measurement.failed]
    if blocks < plan["blocks"]:
        lines.append(f"warning: interrupted: {blocks} of {plan['blocks']} blocks are complete")
    disturbed = [load for load in loads if load >= quiet_load(plan["cores"])]
    if disturbed:
        lines.append(
            f"warning: in {len(disturbed)} of {len(loads)} launches other processes kept cores "
            f"busy, {max(disturbed):.1f} of {plan['cores']} at worst"
        )
    return lines + [f"warning: {line}" for line in plan["warnings"]]


def label_of(figure: Figure) -> str:
    return size_text(figure.bytes) if figure.message.isdecimal() else figure.message


def size_text(size: int) -> str:
    units = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10, "B": 1}
    return next(f"{size / one:.4g} {name}" for name, one in units.items() if size >= one)


def as_json(measurement: Measurement) -> dict[str, Any]:
    """Return all figures, rates in bytes/s, times in seconds."""
    figures = []
    for figure in measurement.figures.values():
        rates = {"algbw_bytes_per_second": figure.algbw, "busbw_bytes_per_second": figure.busbw}
        speeds = [
            {"against": [other.backend, other.wire], **figure.speed_against(other).figures()}
            for other in measurement.rivals(figure)
        ]
        figures.append({**asdict(figure), "seconds": figure.seconds, **rates, "speeds": speeds})
    return {
        "plan": measurement.plan,
        "blocks": measurement.complete_blocks,
        "backends": measurement.worlds,
        "failed": measurement.failed,
        "figures": figures,
    }


def plot(measurement: Measurement) -> str:
    """Return an SVG file: bus bandwidth over message sizes, both axes logarithmic."""
    figures = [one for one in measurement.figures.values() if one.message.isdecimal()]
    refuse((not figures, "--svg: there is nothing to draw without --sizes"))
    layers = [Layer("line", (), MUTED, 1.1, "3 2.4", key="fp16 wire")]
    styles = zip(measurement.worlds, cycle(COLOURS), cycle(MARKERS))
    for (name, colour, marker), wire in product(styles, measurement.plan["wires"]):
        own = [one for one in figures if (one.backend, one.wire) == (name, wire)]
        line = [(one.bytes, one.busbw / 1e9) for one in own]
        texts = [f"{name}, {wire}, {label_of(one)}: {one.busbw / 1e9:.3g} GB/s" for one in own]
        width, dash, key = (1.6, "", name) if wire == "fp32" else (1.1, "3 2.4", "")
        layers.append(Layer("line", line, colour, width, dash, key=key))
        layers.append(Layer(marker, line, colour, 2.6, hollow=not key, texts=texts, key=key))
    sizes = sorted({one.bytes for one in figures})
    ticks = [(float(size), size_text(size)) for size in sizes[:: -(-len(sizes) // 5)]]
    x = Scale(sizes[0] / 1.4, sizes[-1] * 1.4, ticks, "message, bytes of fp32", logarithmic=True)
    y = logarithmic([one.busbw / 1e9 for one in figures], "bus bandwidth, GB/s")
    title = f"Allreduce over {measurement.plan['workers']} workers: bus bandwidth over message size"
    return standalone(Plot("allreduce", title, "", x, y, layers).svg)
