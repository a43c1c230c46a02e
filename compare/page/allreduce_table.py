"""What is shown of compare/collectives.py's figures: a table, sentences, and JSON."""

import textwrap
from dataclasses import asdict
from typing import Any

import tabulate

from compare.evidence.allreduce_times import Figure, Measurement
from compare.evidence.paired import CONFIDENCE, MIN_BLOCKS
from compare.evidence.turns import quiet_load
from compare.evidence.verdicts import holm
from compare.evidence.words import count, interval_text, ratio_text, three_digits
from recipe.settings.flags import WIRE_BYTES

WIDTH = 100  # of lines
INTERVAL = f"{100 * CONFIDENCE:g} % interval"


def text_report(measurement: Measurement) -> str:
    """Return what was measured on, the tables, and what the figures mean and say, in lines of at
    most WIDTH characters."""
    worlds, workers = measurement.worlds, measurement.plan["workers"]
    hosts = len({host for world in worlds.values() for host in world["hosts"]})
    devices = " and ".join(dict.fromkeys(world["device_name"] for world in worlds.values()))
    heading = f"Allreduce over {workers} workers on {count(hosts, 'host')}: {devices}"
    notes, caveats = (
        "\n".join(textwrap.fill(line, WIDTH, subsequent_indent="  ") for line in lines)
        for lines in (notes_of(measurement), caveats_of(measurement))
    )
    parts = [heading, table(measurement), notes, speed_table(measurement), caveats]
    return "\n\n".join(part for part in parts if part)


def table(measurement: Measurement) -> str:
    """Return the table: a row a message and wire, the time and bus bandwidth of each backend."""
    names = [*measurement.worlds, *measurement.failed]
    none = {name: "failed" if name in measurement.failed else "-" for name in names}
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for figure in measurement.figures.values():
        text = f"{three_digits(1000 * figure.seconds)} {figure.busbw / 1e9:6.3f}"
        cells.setdefault((figure.wire, label_of(figure)), dict(none))[figure.backend] = text
    rows = [[label, wire, *own.values()] for (wire, label), own in cells.items()]
    rows.sort(key=lambda row: -WIRE_BYTES[row[1]])
    align = ["right", "left", *["right"] * len(names)]
    return tabulate.tabulate(rows, ["", "wire", *names], colalign=align, disable_numparse=True)


def notes_of(measurement: Measurement) -> list[str]:
    """Return what the table's figures are, and what carried the messages."""
    n, blocks = measurement.plan["workers"], measurement.complete_blocks
    return [
        f"Each: milliseconds, and bus bandwidth in GB/s (fp32 bytes / time x 2 ({n} - 1) / {n}). "
        f"Times are medians of {count(blocks, 'block')}, of each the median of its repetitions, of "
        "those their slowest rank's. -: not available.",
        f"model: the gradients of {measurement.plan['model']}, as one message (fused) and as one "
        "tensor a parameter (layers).",
        "decided: which is faster, by Holm's method over all comparisons of the same two wires.",
        *(
            f"{name}: {world['transport']} on the {world['device'].upper()} "
            f"({', '.join(f'{key} {value}' for key, value in world['versions'].items())})."
            for name, world in measurement.worlds.items()
        ),
    ]


def speed_table(measurement: Measurement) -> str:
    """Return how many times as fast each backend is as the first one, and on the fp16 wire as on
    the fp32 wire, for the messages that tell the most: the smallest and the largest size, and the
    model's. What is decided, is so by Holm's method over all comparisons of the same wires."""
    sizes = [message for _, message, _ in measurement.figures if message.isdecimal()]
    left_out = {*sizes} - {*sizes[:1], *sizes[-1:]}
    speeds = [
        (figure, other, figure.speed_against(other))
        for figure in measurement.figures.values()
        for other in measurement.rivals(figure)
        if figure.message not in left_out
    ]
    speeds.sort(key=lambda one: [-WIRE_BYTES[x.wire] for x in (one[1], one[0])])
    decided = set[int]()
    for wires in {(other.wire, figure.wire) for figure, other, _ in speeds}:
        p_values = {
            i: speed.p_difference()
            for i, (figure, other, speed) in enumerate(speeds)
            if (other.wire, figure.wire) == wires
        }
        decided |= holm(p_values, 1 - CONFIDENCE)
    rows = [
        (
            label_of(figure),
            *(f"{one.backend} {one.wire}" for one in (figure, other)),
            ratio_text(speed),
            interval_text(speed).removeprefix(f"{INTERVAL} ")
            if speed.blocks >= MIN_BLOCKS
            else "too few blocks",
            "decided" if i in decided else "",
        )
        for i, (figure, other, speed) in enumerate(speeds)
    ]
    head = ["", "speed of", "against", "ratio", INTERVAL, ""]
    align = ["right", "left", "left", "right", "left", "left"]
    return tabulate.tabulate(rows, head, colalign=align, disable_numparse=True) if rows else ""


def caveats_of(measurement: Measurement) -> list[str]:
    """Return what is missing, and what makes figures doubtful."""
    plan, blocks, loads = measurement.plan, measurement.complete_blocks, measurement.other_loads
    disturbed = [load for load in loads if load >= quiet_load(plan["cores"])]
    interrupted = f"interrupted: {blocks} of {plan['blocks']} blocks are complete"
    busy = (
        f"in {len(disturbed)} of {len(loads)} launches other processes kept cores busy, "
        f"{max(disturbed, default=0):.1f} of {plan['cores']} at worst"
    )
    warnings = [interrupted] * (blocks < plan["blocks"]) + [busy] * bool(disturbed)
    return [
        *(f"{name}: FAILED, no figures; see its output.log." for name in measurement.failed),
        *(f"warning: {line}" for line in (*warnings, *plan["warnings"])),
    ]


def label_of(figure: Figure) -> str:
    """Name a message: `4 KiB`, or what of a model it is."""
    if not figure.message.isdecimal():
        return figure.message
    units = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10, "B": 1}
    return next(f"{figure.bytes / one:.4g} {u}" for u, one in units.items() if figure.bytes >= one)


def as_json(measurement: Measurement) -> dict[str, Any]:
    """Return all figures, rates in bytes/s, times in seconds."""
    return {
        "plan": measurement.plan,
        "blocks": measurement.complete_blocks,
        "backends": measurement.worlds,
        "failed": measurement.failed,
        "figures": [
            {
                **asdict(figure),
                "seconds": figure.seconds,
                "algbw_bytes_per_second": figure.bytes / figure.seconds,
                "busbw_bytes_per_second": figure.busbw,
                "speeds": [
                    {"against": [other.backend, other.wire], **asdict(figure.speed_against(other))}
                    for other in measurement.rivals(figure)
                ],
            }
            for figure in measurement.figures.values()
        ],
    }
