"""What compare/collectives.py shows: table, sentences, JSON, CSV and the plot."""

import csv
import io
import textwrap
from typing import Any

from compare.evidence.collectives import Cell, Measurement, size_text
from compare.evidence.load import least_load
from compare.evidence.paired import CONFIDENCE, MIN_BLOCKS, Estimate
from compare.evidence.verdicts import holm
from compare.evidence.words import digits
from compare.page.chart import (
    FONT_SIZE,
    MARKERS,
    MUTED,
    WIDTH,
    Chart,
    Key,
    Scale,
    logarithmic,
    series_colour,
    standalone,
)
from recipe.errors import UserError

TABLE_WIDTH = 100
BACKENDS_ABREAST = 4  # in the table
UNSTEADY = 2.0  # ratio of the quartiles of the repetitions, from which on it is told
GAP = 18  # between the plot's two charts


def heading(measurement: Measurement) -> str:
    """Return what was measured on."""
    worlds = measurement.worlds.values()
    hosts = len({host for world in worlds for host in world["hosts"]})
    devices = " and ".join(dict.fromkeys(world["device_name"] for world in worlds))
    return (
        f"Allreduce over {measurement.plan['workers']} workers on {hosts} host"
        f"{'s' * (hosts > 1)}: {devices}"
    )


def table(measurement: Measurement) -> list[str]:
    """Return the lines of the table: a row a message, three columns a backend; several tables, one
    below the other, if it would be too broad."""
    names, lines = measurement.backends + measurement.failed, list[str]()
    for start in range(0, len(names), BACKENDS_ABREAST):
        part = table_of(measurement, names[start : start + BACKENDS_ABREAST])
        lines += ["", *part] if lines else part
    return lines


def table_of(measurement: Measurement, names: list[str]) -> list[str]:
    label_width = max(12, *(len(cell.label) for cell in measurement.cells))
    head = " " * label_width + "".join(f"  {name:>19}" for name in names)
    units = " " * label_width + f"  {'time':>7} {'algbw':>5} {'busbw':>5}" * len(names)
    lines = [head.rstrip(), units]
    for wire in measurement.plan["wires"]:
        lines.append(f"{wire} wire")
        for message in measurement.messages:
            cells = [measurement.cell(name, message, wire) for name in names]
            label = next(c.label for c in measurement.cells if c.message == message)
            row = f"{label:>{label_width}}"
            for name, cell in zip(names, cells, strict=True):
                if cell is not None:
                    rates = f"{rate_text(cell.algbw):>5} {rate_text(cell.busbw):>5}"
                    row += f"  {time_text(cell.median_seconds):>7} {rates}"
                else:
                    row += f"  {'failed' if name in measurement.failed else 'not available':>19}"
            lines.append(row)
    return lines


def sentences(measurement: Measurement) -> list[str]:
    """Return what the figures mean and say, in lines of at most TABLE_WIDTH characters."""
    plan, n = measurement.plan, measurement.plan["workers"]
    blocks = measurement.complete_blocks
    first = measurement.backends[0]
    lines = [
        f"time: median of {blocks} launch{'es' if blocks > 1 else ''}, each the median of its "
        "repetitions, each of those its slowest rank's.",
        f"algbw: fp32 bytes / time; busbw: algbw x 2 ({n} - 1) / {n}; both in GB/s.",
    ]
    layers = next((c for c in measurement.cells if c.message == "model layers"), None)
    if layers is not None:
        lines.append(
            f"model: the gradients of {plan['model']}, {size_text(layers.bytes)}, as one message "
            f"(fused) and as {layers.tensors} tensors (layers)."
        )
    for name, world in measurement.worlds.items():
        versions = ", ".join(f"{key} {value}" for key, value in world["versions"].items())
        lines.append(f"{name}: {world['transport']} on the {world['device'].upper()} ({versions}).")
    interval = f"no interval below {MIN_BLOCKS} blocks"
    if blocks >= MIN_BLOCKS:
        interval = "95 % interval; decided by Holm's method over these"
    for wire in plan["wires"]:
        found = verdicts(measurement, wire, "speed_against_first")
        if found:
            lines += ["", f"Against {first}, {wire} wire ({interval}):", *found]
    found = verdicts(measurement, "fp16", "speed_against_fp32")
    if found:
        lines += ["", f"fp16 wire against fp32 wire, casts included ({interval}):", *found]
    lines += ["", *unsteady(measurement), *copy_sentences(measurement)]
    for name in measurement.failed:
        lines.append(f"{name}: FAILED, no figures; its output.log says why.")
    if blocks < plan["blocks"]:
        lines.append(f"warning: interrupted: {blocks} of {plan['blocks']} blocks are complete")
    disturbed = [load for load in measurement.other_loads if load >= least_load(plan["cores"])]
    if disturbed:
        lines.append(
            f"warning: in {len(disturbed)} of {len(measurement.other_loads)} launches other "
            f"processes kept cores busy, {max(disturbed):.1f} of {plan['cores']} at worst"
        )
    lines += [f"warning: {line}" for line in plan["warnings"]]
    return [
        part
        for line in lines
        for part in textwrap.wrap(line, TABLE_WIDTH, subsequent_indent="  ") or [""]
    ]


def verdicts(measurement: Measurement, wire: str, against: str) -> list[str]:
    """Return a sentence for each backend, for each of the messages that tell the most, decided by
    Holm's method over all of them."""
    found: list[tuple[str, str, Estimate]] = []
    for message in telling_messages(measurement):
        for name in measurement.backends:
            cell = measurement.cell(name, message, wire)
            if cell is not None and (speed := getattr(cell, against)) is not None:
                found.append((cell.label, name, speed))
    p_values = {i: speed.p_difference() for i, (*_, speed) in enumerate(found)}
    decided = holm(p_values, 1 - CONFIDENCE)
    lines, above = [], ""
    for i, (label, name, speed) in enumerate(found):
        shown = "" if label == above else label
        lines.append(f"  {shown:12}  {verdict(name, speed, i in decided)}")
        above = label
    return lines


def unsteady(measurement: Measurement) -> list[str]:
    """Return a line for each backend that takes now this long, now that."""
    lines = []
    for name in measurement.backends:
        shaky = [
            f"{cell.label} {cell.wire}"
            for cell in measurement.cells
            if cell.backend == name and cell.quartiles[1] > UNSTEADY * cell.quartiles[0]
        ]
        if shaky:
            lines.append(
                f"Unsteady: repetitions on {name} spread more than {UNSTEADY:g}-fold between their "
                f"quartiles at {', '.join(shaky)}."
            )
    return lines


def copy_sentences(measurement: Measurement) -> list[str]:
    """Return how fast memory is copied, beside the fastest allreduce of as many bytes."""
    lines = []
    for copies in measurement.copies:
        size = size_text(copies.bytes)
        lines.append(
            f"Memory copy on the {copies.device.upper()}, {size}, bytes read + bytes written: "
            f"{copies.alone / 1e9:.1f} GB/s by one rank alone, {copies.together / 1e9:.1f} GB/s by "
            f"each of {measurement.plan['workers']} at once."
        )
        same = [
            cell
            for cell in measurement.cells
            if measurement.worlds[cell.backend]["device"] == copies.device
            and (cell.bytes, cell.tensors, cell.wire) == (copies.bytes, 1, "fp32")
        ]
        if same:
            fastest = min(same, key=lambda cell: cell.median_seconds)
            lines.append(
                f"So a copy of {size} takes {time_text(2 * copies.bytes / copies.alone)}, and the "
                f"fastest allreduce of it, by {fastest.backend}, "
                f"{time_text(fastest.median_seconds)}."
            )
    return lines


def telling_messages(measurement: Measurement) -> list[str]:
    """Return the messages that sentences are made about: smallest, largest, and the model's."""
    sizes = [message for message in measurement.messages if message.isdecimal()]
    models = [message for message in measurement.messages if not message.isdecimal()]
    return list(dict.fromkeys([*sizes[:1], *sizes[-1:], *models]))


def verdict(name: str, speed: Estimate, is_decided: bool) -> str:
    """Return how fast a backend is, as a ratio to what it is compared with."""
    if speed.low is None or speed.high is None:
        return f"{name} is {factor_text(speed.ratio)} times as fast"
    places = digits(speed)
    ratio, low, high = (factor_text(x, places) for x in (speed.ratio, speed.low, speed.high))
    if not is_decided:
        return f"not decided for {name} ({ratio}, {low} to {high})"
    return f"{name} is {ratio} times as fast ({low} to {high})"


def factor_text(value: float, places: int = 2) -> str:
    if value < 0.095:
        return f"{value:.2g}"
    if value < 10:
        return f"{value:.{places}f}"
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def time_text(seconds: float) -> str:
    """Return a time with three digits and its unit: at most 7 characters below 1,000 s."""
    units = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))
    unit, factor = next((u for u in units if seconds >= 0.9995 * u[1]), units[-1])
    value = seconds / factor
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {unit}"


def rate_text(bytes_per_second: float) -> str:
    """Return GB/s in at most 5 characters below 100,000."""
    rate = bytes_per_second / 1e9
    if rate < 0.0005:
        return "<.001"
    digits = 3 if rate < 9.9995 else 2 if rate < 99.995 else 1 if rate < 999.95 else 0
    return f"{rate:.{digits}f}"


def as_json(measurement: Measurement) -> dict[str, Any]:
    """Return all figures, rates in bytes/s, times in seconds."""
    return {
        "plan": measurement.plan,
        "blocks": measurement.complete_blocks,
        "backends": measurement.worlds,
        "failed": measurement.failed,
        "figures": [
            {
                "backend": cell.backend,
                "transport": cell.transport,
                "message": cell.message,
                "bytes": cell.bytes,
                "tensors": cell.tensors,
                "wire": cell.wire,
                "repetitions": cell.repetitions,
                "seconds": cell.median_seconds,
                "seconds_of_blocks": cell.seconds,
                "seconds_lower_quartile": cell.quartiles[0],
                "seconds_upper_quartile": cell.quartiles[1],
                "algbw_bytes_per_second": cell.algbw,
                "busbw_bytes_per_second": cell.busbw,
                **{
                    name: speed and speed.figures()
                    for name in ("speed_against_first", "speed_against_fp32")
                    for speed in [getattr(cell, name)]
                },
            }
            for cell in measurement.cells
        ],
        "memory_copy": [
            {
                "device": copies.device,
                "bytes": copies.bytes,
                "counted": "bytes read + bytes written",
                "alone_bytes_per_second": copies.alone,
                "together_bytes_per_second_of_each": copies.together,
            }
            for copies in measurement.copies
        ],
        "sentences": sentences(measurement),
    }


def as_csv(measurement: Measurement) -> str:
    """Return a line a cell; an empty field: not measured, or no interval."""
    flat = []
    for figure in as_json(measurement)["figures"]:
        row = {k: v for k, v in figure.items() if not isinstance(v, dict | tuple | type(None))}
        for key in ("speed_against_first", "speed_against_fp32"):
            for part in ("ratio", "low", "high"):
                row[f"{key}_{part}"] = (figure[key] or {}).get(part)
        flat.append(row)
    text = io.StringIO()
    writer = csv.DictWriter(text, flat[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


def plot(measurement: Measurement) -> str:
    """Return an SVG file: time and bus bandwidth over message sizes, both axes logarithmic."""
    cells = [cell for cell in measurement.cells if cell.message.isdecimal()]
    if not cells:
        raise UserError("--svg: there is nothing to draw without --sizes")
    sizes = sorted({cell.bytes for cell in cells})
    step = -(-len(sizes) // 5)
    ticks = tuple((float(size), size_text(size)) for size in sizes[::step])
    x = Scale(sizes[0] / 1.4, sizes[-1] * 1.4, ticks, logarithmic=True)
    backends = [name for name in measurement.backends if any(c.backend == name for c in cells)]
    wires = [wire for wire in measurement.plan["wires"] if any(c.wire == wire for c in cells)]
    keys = [
        Key(name, series_colour(i), marker=MARKERS[i % len(MARKERS)])
        for i, name in enumerate(backends)
    ]
    if len(wires) > 1:
        keys += [
            Key("fp32 wire", MUTED),
            Key("fp16 wire", MUTED, dash="3 2.4", width=1.1),
        ]
    rules = [copies.alone / 1e9 for copies in measurement.copies]
    rates = [cell.busbw / 1e9 for cell in cells]
    milliseconds = [cell.median_seconds * 1e3 for cell in cells]
    n = measurement.plan["workers"]
    charts = [
        Chart(x, logarithmic(milliseconds), "message, bytes of fp32", "time, ms", keys=keys),
        Chart(x, logarithmic([*rates, *rules]), "message, bytes of fp32", "bus bandwidth, GB/s",
              keys=[Key("memory copy by one rank: bytes read + written", MUTED, dash="3 2")]),
    ]  # fmt: skip
    for chart, values, unit in zip(charts, (milliseconds, rates), ("ms", "GB/s"), strict=True):
        draw_cells(chart, cells, values, backends, unit)
    for rule in rules:
        charts[1].rule(y=rule)
    title = f"Allreduce over {n} workers: time and bus bandwidth against message size"
    parts, down = [], 0.0
    for chart, what in zip(charts, ("time", "bus bandwidth"), strict=True):
        svg = chart.as_svg(f"Allreduce: {what} against message size")
        place = f'<svg y="{down:g}" width="{WIDTH}" height="{chart.total_height:g}" '
        parts.append(svg.replace("<svg ", place, 1))
        down += chart.total_height + GAP
    whole = (
        f'<svg role="img" aria-label="{title}" viewBox="0 0 {WIDTH} {down - GAP:g}"'
        f' font-size="{FONT_SIZE}"><title>{title}</title>{"".join(parts)}</svg>'
    )
    return standalone(whole)


def draw_cells(
    chart: Chart, cells: list[Cell], values: list[float], backends: list[str], unit: str
) -> None:
    """Draw the cells' values over their sizes, a line for each backend and wire."""
    series: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for cell, value in zip(cells, values, strict=True):
        series.setdefault((cell.backend, cell.wire), []).append((float(cell.bytes), value))
    for (name, wire), line in series.items():
        index, thin = backends.index(name), wire == "fp16"
        colour, marker = series_colour(index), MARKERS[index % len(MARKERS)]
        chart.line(line, colour, width=1.1 if thin else 1.6, dash="3 2.4" if thin else "")
        for size, value in line:
            chart.mark(size, value, marker, colour, size=2.6, hollow=thin)
            text = f"{name}, {wire}, {size_text(int(size))}: {value:.3g} {unit}"
            chart.hit(size, value, text)
