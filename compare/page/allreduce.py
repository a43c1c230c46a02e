"""The figures of compare/collectives.py: how long the all-reduce of each message took, in each wire
format by each backend, as a table and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from textwrap import fill
from typing import Any

import tabulate

from compare.evidence.group import Group
from compare.evidence.paired import CONFIDENCE, Estimate
from compare.evidence.record import Record
from compare.evidence.rows import ratio_between
from compare.evidence.turns import estimate
from compare.evidence.verdicts import Verdict, judge
from compare.evidence.words import count, difference_text, ratio_text, three_digits
from compare.page.labels import labels_of
from compare.page.sentences import interval_text
from recipe.errors import UserError
from recipe.settings.flags import WIRE_FORMATS

WIDTH = 100  # of lines below the table
UNITS = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10, "B": 1}
OPPOSITE = {"faster": "slower", "slower": "faster"}
FULL = next(iter(WIRE_FORMATS))  # the wire format that others are compared with


@dataclass(frozen=True)
class Figure:
    """The all-reduce of one message in one wire format by one backend, over all blocks."""

    message: str  # its size, or the model and how its gradients are sent
    wire: str
    backend: str
    bytes: int  # in fp32, as the user sees it, whatever the wire format
    seconds: float
    algbw: float  # algorithm bandwidth in bytes/s: payload / time
    # Bus bandwidth in bytes/s, the least that each link must carry: algorithm bandwidth x
    # 2 (n - 1) / n (nccl-tests, doc/PERFORMANCE.md).
    busbw: float
    against_first: Estimate | None  # its speed / the first backend's
    against_fp32: Estimate | None  # its speed / the same backend's in fp32
    decision: str  # against the first backend: "faster", "slower", "equal" or "undecided"


def figures_of(record: Record) -> list[Figure]:
    """Return all figures, in the plan's order. UserError if the record holds something else."""
    if record.unit != "bytes":
        raise UserError(
            f"{record.folder}: holds no measurement of all-reduces; compare/report.py shows others"
        )
    verdicts = {
        (verdict.case, verdict.second): verdict for verdict in judge(record, labels_of(record))
    }
    groups = {group.case: group for group in record.groups if group.blocks}
    return [
        figure_of(group, name, groups, verdicts.get((case, name)))
        for case, group in groups.items()
        for name in record.configurations
    ]


def figure_of(
    group: Group, backend: str, groups: dict[str, Group], verdict: Verdict | None
) -> Figure:
    """Return one figure. `groups`: all groups by case; `verdict`: on the first backend against this
    one; None for the first itself."""
    message, _, wire = group.case.rpartition("-")
    block = group.blocks[0]
    num_bytes = round(block.counted(backend)[0].images / block.steps[backend])
    algbw = estimate(group.blocks, {backend: 1}).ratio
    ranks = group.sides[0].environment.world_size
    full = groups.get(f"{message}-{FULL}") if wire != FULL and not group.ranks_per_gpu else None
    return Figure(
        message=label_of(message, num_bytes),
        wire=wire,
        backend=backend,
        bytes=num_bytes,
        seconds=num_bytes / algbw,
        algbw=algbw,
        busbw=algbw * 2 * (ranks - 1) / ranks,
        against_first=verdict.speed.inverse() if verdict and verdict.speed else None,
        against_fp32=ratio_between(group, full, backend) if full else None,
        decision=OPPOSITE.get(verdict.decision, verdict.decision) if verdict else "undecided",
    )


def label_of(message: str, num_bytes: int) -> str:
    """Return a message in words: its size, such as `4 KiB`, or `resnet50 fused`."""
    if "." in message:
        return message.replace(".", " ")
    unit, size = next((unit, size) for unit, size in UNITS.items() if num_bytes >= size)
    return f"{num_bytes / size:.4g} {unit}"


def text_report(record: Record) -> str:
    """Return what was measured on, the table, the meaning of the figures, and caveats."""
    figures = figures_of(record)
    environments = {side.configuration: side.environment for side in record.sides}
    first = environments[figures[0].backend]
    heading = (
        f"All-reduce over {count(first.world_size, 'worker')} on {count(len(first.hosts), 'host')} "
        f"({first.device_name}), {count(min(group.num_blocks for group in record.groups), 'block')}"
    )
    backends = [
        f"{name}: {used.transport} on the {used.device.upper()}, {used.version}"
        for name, used in ((name, environments[name]) for name in record.configurations)
    ]
    paragraphs = [
        [heading],
        [table(figures)],
        [fill(line, WIDTH, subsequent_indent="  ") for line in notes_of(first.world_size)],
        [fill(line, WIDTH, subsequent_indent="  ") for line in backends],
        [fill(line, WIDTH, subsequent_indent="  ") for line in caveats_of(record)],
    ]
    if any(group.ranks_per_gpu for group in record.groups):
        caution = (
            "Ranks shared a GPU: the sums were checked and are right; their times mean nothing."
        )
        paragraphs.insert(0, [caution])
    return "\n\n".join("\n".join(lines) for lines in paragraphs if lines)


def table(figures: Sequence[Figure]) -> str:
    """Return the table: a row for each backend, below its message and wire format."""
    rows, above = list[list[str]](), ("", "")
    for figure in figures:
        place = figure.message, figure.wire
        against_first = ratio_and_interval(figure.against_first)
        if figure.decision != "undecided":
            against_first += " *"
        rows.append(
            [
                *(place if place != above else ("", "")),
                figure.backend,
                three_digits(1000 * figure.seconds),
                f"{figure.algbw / 1e9:.3f}",
                f"{figure.busbw / 1e9:.3f}",
                against_first,
                ratio_and_interval(figure.against_fp32),
            ]
        )
        above = place
    first = figures[0].backend
    head = ["message", "wire", "", "ms", "algbw", "busbw", f"speed / {first}", f"/ {FULL}"]
    align = ["right", "left", "left", "right", "right", "right", "left", "left"]
    return tabulate.tabulate(rows, head, colalign=align, disable_numparse=True)


def ratio_and_interval(speed: Estimate | None) -> str:
    if speed is None:
        return ""
    interval = interval_text(speed).partition("interval ")[2]
    return f"{ratio_text(speed)} ({interval})" if interval else ratio_text(speed)


def notes_of(ranks: int) -> list[str]:
    """Return what the figures mean."""
    return [
        "ms: the time of an all-reduce, from when all ranks begin; the mean over ranks and turns, "
        "and the geometric mean over blocks.",
        f"algbw, busbw: GB/s, as nccl-tests defines them: fp32 bytes / time, and algbw x "
        f"2 ({ranks} - 1) / {ranks}.",
        f"speed / ...: ratios, paired by block, with their {100 * CONFIDENCE:g} % intervals, which "
        "need 3 blocks. *: decided (faster, slower, or equal within the margin), by Holm's method "
        "over all ratios of this column.",
        "fused: a model's gradients as one message; layers: as one message for each parameter.",
    ]


def caveats_of(record: Record) -> list[str]:
    """Return what is missing, and what makes the figures doubtful."""
    facts = (fact for group in record.groups for fact in group.facts if fact.is_confounder)
    differences = dict.fromkeys(difference_text(fact) for fact in facts)
    lines = [f"not the same in all launches, so nothing is decided: {text}" for text in differences]
    unfinished = dict.fromkeys(record.unfinished.values())
    lines += [f"unfinished, so nothing is decided: {how_far}" for how_far in unfinished]
    disturbed = sum(group.disturbed_seconds for group in record.groups)
    if disturbed:
        lines.append(
            f"other processes used the cores for {disturbed:.0f} s; their turns are left out"
        )
    return [
        f"warning: {line}"
        for line in (*lines, *filter(None, [record.problem]), *record.plan.warnings)
    ]


def as_json(record: Record) -> dict[str, Any]:
    """Return all figures as JSON: rates in bytes/s, times in seconds."""
    return {
        "head": record.head,
        "blocks": min(group.num_blocks for group in record.groups),
        # Several: their times mean nothing.
        "ranks_per_gpu": max(group.ranks_per_gpu or 1 for group in record.groups),
        "figures": [asdict(figure) for figure in figures_of(record)],
    }
