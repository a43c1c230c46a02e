"""Read the figures of compare/collectives.py from its folder, and show them: how long the
all-reduce of each message took, by wire format and backend."""

import textwrap
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import tabulate

from compare.evidence.judgement import Finding, holm, judged_together
from compare.evidence.paired import INTERVAL, MIN_BLOCKS, Estimate, estimate_ratio
from compare.evidence.reading import decode, parse, read_object, read_record, read_text
from compare.evidence.turns import quiet_load
from compare.evidence.words import count, interval_text, ratio_text, short, three_digits
from compare.plan.plan import Outcome
from recipe.errors import UserError
from recipe.record.schema import Count, Positive, Text
from recipe.settings.flags import WIRE_BYTES

WIDTH = 100  # of lines
UNITS = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10, "B": 1}
EQUAL = ("ranks", "hosts", "threads")  # among all launches


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What collectives.json holds, as far as it is read."""

    backends: list[Text]
    blocks: Count
    workers: Count
    model: Text
    cores: Count
    warnings: list[Text]


@dataclass(frozen=True, kw_only=True)
class WorldLine:
    """The first line of a launch: what it ran on."""

    transport: Text
    device: Text
    device_name: Text
    ranks: Count
    hosts: list[Text]
    threads: Count
    versions: dict[str, Text]


@dataclass(frozen=True, kw_only=True)
class AllreduceLine:
    """The all-reduce of one message in one wire format, in one launch."""

    message: Text
    wire: Text
    bytes: Count
    tensors: Count
    seconds_median: Positive


LINES = {"world": WorldLine, "allreduce": AllreduceLine}


@dataclass(frozen=True)
class Figure:
    """The all-reduce of one message in one wire format by one backend, over all complete blocks."""

    backend: str
    message: str  # its bytes, or "model fused", "model layers"
    wire: str
    bytes: int  # in fp32, as the user sees it, whatever the wire format
    tensors: int
    workers: int
    seconds_of_blocks: tuple[float, ...]  # block by block: the median over its launch's repetitions

    @property
    def seconds(self) -> float:
        """The median over blocks."""
        return median(self.seconds_of_blocks)

    @property
    def busbw(self) -> float:
        """Bus bandwidth in bytes/s, the least that each link must carry: payload / time x
        2 (n - 1) / n (nccl-tests, doc/PERFORMANCE.md)."""
        return self.bytes / self.seconds * 2 * (self.workers - 1) / self.workers

    @property
    def label(self) -> str:
        """The message in words: its size, such as `4 KiB`, or "model fused" or "model layers"."""
        unit, size = next((unit, size) for unit, size in UNITS.items() if self.bytes >= size)
        return f"{self.bytes / size:.4g} {unit}" if self.message.isdecimal() else self.message

    def speed_against(self, other: "Figure") -> Estimate:
        """Return how many times as fast as `other` it is, paired by block."""
        return estimate_ratio(other.seconds_of_blocks, self.seconds_of_blocks)


@dataclass(frozen=True)
class Measurement:
    """What the folder of a measurement contains."""

    plan: dict[str, Any]
    worlds: dict[str, dict[str, Any]]  # backend: what it ran on
    figures: dict[tuple[str, str, str], Figure]  # by backend, message and wire
    failed: list[str]  # backends
    complete_blocks: int
    other_loads: list[float]  # of each launch: cores that other processes kept busy, on average
    unequal: list[str]  # in what the launches differ that must be equal

    @property
    def is_interrupted(self) -> bool:
        """Whether blocks are missing."""
        return self.complete_blocks < self.plan["blocks"]

    def rivals(self, figure: Figure) -> list[Figure]:
        """Return the figures to compare one with: the first backend's in the same wire format, and
        the same backend's in fp32."""
        backends = (next(iter(self.worlds)), figure.wire), (figure.backend, "fp32")
        rivals = [self.figures.get((name, figure.message, wire)) for name, wire in backends]
        return [other for other in rivals if other not in (None, figure)]


def read_measurement(folder: Path) -> Measurement:
    """Read a folder and compute its figures; UserError if there are none.

    A backend of which any launch failed has no figures: its other launches may be wrong, too, or
    were measured before the fault showed.
    """
    path = folder / "collectives.json"
    if not path.exists():
        raise UserError(f"{folder}: holds no measurement of collectives")
    plan = read_object(path)
    parse(plan, Settings, path)
    launches: dict[str, list[list[dict[str, Any]]]] = {}  # each launch's lines
    failed, loads = list[str](), list[float]()
    for name, block in product(plan["backends"], range(1, plan["blocks"] + 1)):
        place = folder / f"block-{block}" / name
        outcome = Outcome("not run")
        if (place / "outcome.json").exists():
            outcome = read_record(place / "outcome.json", Outcome)
        loads.append(outcome.other_load or 0.0)
        if outcome.status == "completed":
            launches.setdefault(name, []).append(read_launch(place / "measurements.jsonl"))
        elif outcome.status != "not run":  # as after an interruption
            failed.append(name)
    launches = {name: by_block for name, by_block in launches.items() if name not in failed}
    # Blocks in which all backends were measured; the last block may have been interrupted.
    blocks = min(map(len, launches.values()), default=0)
    if not blocks:
        raise UserError(f"{folder}: no block is complete; each launch's output.log there says why")
    figures = dict[tuple[str, str, str], Figure]()
    for name, by_block in launches.items():
        messages = [[(one["message"], one["wire"]) for one in lines[1:]] for lines in by_block]
        if odd := [block for block, told in enumerate(messages, 1) if told != messages[0]]:
            where = folder / f"block-{odd[0]}" / name / "measurements.jsonl"
            raise UserError(f"{where}: block 1 holds other messages; measure again")
        for lines in zip(*(lines[1:] for lines in by_block[:blocks]), strict=True):
            first, seconds = lines[0], tuple(one["seconds_median"] for one in lines)
            figures[name, first["message"], first["wire"]] = Figure(
                name,
                first["message"],
                first["wire"],
                first["bytes"],
                first["tensors"],
                plan["workers"],
                seconds,
            )
    worlds = {name: by_block[0][0] for name, by_block in launches.items()}
    return Measurement(plan, worlds, figures, failed, blocks, loads, unequal_in(launches))


def read_launch(path: Path) -> list[dict[str, Any]]:
    """Read the lines of one launch: what it ran on, then a line for each message and wire format.
    UserError names a damaged line."""
    kept = list[dict[str, Any]]()
    for number, text in enumerate(read_text(path).splitlines(), start=1):
        line = decode(text, where := f"{path}, line {number}")
        kind = LINES.get(str(line.get("kind")))
        if kind is not None:
            parse(line, kind, where)
            kept.append(line)
    kinds = [line["kind"] for line in kept]
    if kinds[:2] != ["world", "allreduce"] or kinds.count("world") > 1:
        raise UserError(f"{path}: lacks what it was measured on, or what was measured")
    return kept


def unequal_in(launches: dict[str, list[list[dict[str, Any]]]]) -> list[str]:
    """Return in what launches differ that must be equal, in words."""
    started = [(name, lines[0]) for name, by_block in launches.items() for lines in by_block]
    unequal = list[str]()
    for field in EQUAL:
        values = [f"{name}: {short(of[field])}" for name, of in started]
        if any(of[field] != started[0][1][field] for _, of in started):
            unequal.append(f"{field} ({', '.join(dict.fromkeys(values))})")
    return unequal


def text_report(measurement: Measurement) -> str:
    """Return the machine, the tables, the meaning of the figures and the caveats, in lines of at
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
    """Return the table: a row for each message and wire format, with the time and bus bandwidth of
    each backend."""
    names = [*measurement.worlds, *measurement.failed]
    none = {name: "failed" if name in measurement.failed else "-" for name in names}
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for figure in measurement.figures.values():
        text = f"{three_digits(1000 * figure.seconds)} {figure.busbw / 1e9:6.3f}"
        cells.setdefault((figure.wire, figure.label), dict(none))[figure.backend] = text
    rows = [[label, wire, *texts.values()] for (wire, label), texts in cells.items()]
    rows.sort(key=lambda row: -WIRE_BYTES[row[1]])
    align = ["right", "left", *["right"] * len(names)]
    return tabulate.tabulate(rows, ["", "wire", *names], colalign=align, disable_numparse=True)


def notes_of(measurement: Measurement) -> list[str]:
    """Return what the table's figures mean, and which transport carried the messages."""
    n, blocks = measurement.plan["workers"], measurement.complete_blocks
    return [
        "Each cell: milliseconds, and bus bandwidth in GB/s (fp32 bytes / time x "
        f"2 ({n} - 1) / {n}). A repetition takes as long as its slowest rank; a time is the median "
        f"over {count(blocks, 'block')} of the medians over repetitions. -: not available.",
        f"model: the gradients of {measurement.plan['model']}, as one message (fused) and as one "
        "tensor per parameter (layers).",
        "decided: it is shown which of the two is faster, by Holm's method over all comparisons of "
        "the same two wire formats.",
        *(
            f"{name}: {world['transport']} on the {world['device'].upper()} "
            f"({', '.join(f'{key} {value}' for key, value in world['versions'].items())})."
            for name, world in measurement.worlds.items()
        ),
    ]


def speed_table(measurement: Measurement) -> str:
    """Return how many times as fast each backend is as the first one, and fp16 on the wire as fp32,
    for the smallest and the largest message and the model's gradients. Holm's method decides, over
    all comparisons of the same wire formats."""
    sizes = [message for _, message, _ in measurement.figures if message.isdecimal()]
    left_out = {*sizes} - {*sizes[:1], *sizes[-1:]}
    pairs = [
        (figure, other)
        for figure in measurement.figures.values()
        for other in measurement.rivals(figure)
        if figure.message not in left_out
    ]
    rows = list[tuple[str, ...]]()
    for wires in sorted({(b.wire, a.wire) for a, b in pairs}, reverse=True):  # fp32 first
        speeds = [(a, b, a.speed_against(b)) for a, b in pairs if (b.wire, a.wire) == wires]
        is_finished = not measurement.is_interrupted and not measurement.unequal
        found = [Finding(speed=speed, is_finished=is_finished) for *_, speed in speeds]
        judged, error = judged_together(found)
        decided = holm({i: speed.p_difference() for i, speed in judged.items()}, error)
        for i, (a, b, speed) in enumerate(speeds):
            interval = interval_text(speed).removeprefix(f"{INTERVAL} ")
            shown = interval if speed.blocks >= MIN_BLOCKS else "too few blocks"
            names = (f"{one.backend} {one.wire}" for one in (a, b))
            verdict = "decided" if i in decided else ""
            rows.append((a.label, *names, ratio_text(speed), shown, verdict))
    head = ["", "speed of", "against", "ratio", INTERVAL, ""]
    align = ["right", "left", "left", "right", "left", "left"]
    return tabulate.tabulate(rows, head, colalign=align, disable_numparse=True) if rows else ""


def caveats_of(measurement: Measurement) -> list[str]:
    """Return which figures are missing, and what makes the others doubtful."""
    plan, blocks, loads = measurement.plan, measurement.complete_blocks, measurement.other_loads
    disturbed = [load for load in loads if load >= quiet_load(plan["cores"])]
    interrupted = (
        f"interrupted: {blocks} of {plan['blocks']} blocks are complete, so nothing is decided"
    )
    unequal = f"the launches differ in {'; '.join(measurement.unequal)}: nothing is decided"
    busy = (
        f"in {len(disturbed)} of {len(loads)} launches other processes kept cores busy, "
        f"{max(disturbed, default=0):.1f} of {plan['cores']} at worst"
    )
    warnings = [interrupted] if measurement.is_interrupted else []
    warnings += [unequal] if measurement.unequal else []
    warnings += [busy] if disturbed else []
    return [
        *(f"{name}: FAILED, no figures; see its output.log." for name in measurement.failed),
        *(f"warning: {line}" for line in (*warnings, *plan["warnings"])),
    ]


def as_json(measurement: Measurement) -> dict[str, Any]:
    """Return all figures as JSON: rates in bytes/s, times in seconds."""
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
