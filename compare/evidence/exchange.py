"""When each gradient of a step was ready, and when its all-reduce began and ended: of a run with
--profile-steps, on its rank 0, and in the same terms for every engine and transport."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

from tabulate import tabulate

from compare.evidence.profiles import TIMELINES, Event, Lane, read_timeline
from compare.evidence.run_folder import read_record
from recipe.errors import UserError, refuse

BYTES = 4  # of a gradient's element: what a gradient is, not what it is on the wire


@dataclass(frozen=True)
class StepTimes:
    """A step's gradients on one rank, in ns of the Unix clock."""

    backward: int  # it began
    end: int
    ready: dict[str, int]


@dataclass(frozen=True)
class GradientTimes:
    """What one rank wrote into profile/gradients-rank-R.json (recipe/record/probes.py)."""

    elements: dict[str, int]
    steps: list[StepTimes]


class Message(NamedTuple):
    """Gradients that travelled together: a bucket of DDP, or what Horovod fused. Times in ms since
    rank 0 began the step's backward pass."""

    gradients: int
    megabytes: float  # in fp32
    ready: float  # the last of them, on rank 0
    met: float  # the last of them, on the last rank: before that the all-reduce waits
    began: float
    ended: float


Step = list[Message]  # in the order in which they began


def exposed_ms(step: Step) -> float:
    """From the step's last gradient to the end of its last all-reduce."""
    return max(0.0, max(m.ended for m in step) - max(m.ready for m in step))


def hidden_ms(step: Step) -> float:
    """How much of the backward pass had an all-reduce under way."""
    computed, total, reached = max(message.ready for message in step), 0.0, -math.inf
    for message in step:
        ended = min(message.ended, computed)
        total += max(0.0, ended - max(message.began, reached))
        reached = max(reached, ended)
    return total


def exchange_lines(steps: Sequence[Step]) -> list[str]:
    """The messages of a typical step as a table, and what is hidden and exposed in the median."""
    typical = sorted(steps, key=lambda step: max(m.ended for m in step))[(len(steps) - 1) // 2]
    heads = ("gradients", "MB", "ready, ms", "on all ranks", "all-reduce begins", "ends")
    hidden, exposed = (median(map(ms, steps)) for ms in (hidden_ms, exposed_ms))
    return [
        tabulate(typical, heads, floatfmt=".1f"),
        f"All-reduce, medians of {len(steps)} steps: {hidden:.3g} ms hidden, {exposed:.3g} ms "
        "exposed",
    ]


def read_exchange(run: Path) -> list[Step]:
    """Read a profiled run's steps; none where it did not record this: it ran on GPUs, whose times
    the CPU does not see, or with one worker, or its engine did not name each gradient (as Horovod's
    groups do not). UserError if its files are damaged."""
    folder = run / "profile"
    timelines = [folder / name for name in TIMELINES if (folder / name).exists()]
    if not timelines or not (folder / "gradients-rank-0.json").exists():
        return []
    paths = sorted(folder.glob("gradients-rank-*.json"))
    ranks = [read_record(path, GradientTimes) for path in paths]
    lane, elements = read_timeline(timelines[0], ""), ranks[0].elements
    on_all_ranks = [*zip(*(rank.steps for rank in ranks), strict=False)]
    try:
        ready = {name for step in on_all_ranks for one in step for name in one.ready}
        refuse((ready - elements.keys(), f"{folder}: its files are damaged: profile again"))
        steps = [messages_of(step, elements, lane) for step in on_all_ranks]
    except LookupError as error:
        raise UserError(f"{folder}: its files are damaged ({error!r}): profile again") from None
    return [step for step in steps if sum(m.gradients for m in step) == len(elements)]


def messages_of(ranks: Sequence[StepTimes], elements: dict[str, int], lane: Lane) -> Step:
    """Put together a step of rank 0, when every rank had each gradient, and the engine's spans."""
    step = ranks[0]
    spans = [
        event
        for event in lane.events
        if event["name"] == "ALLREDUCE" and step.backward <= event["ts"] < step.end
        and names_in(event, lane)[0] in elements  # and not the loss, say
    ]  # fmt: skip
    messages = []
    for group in fused(spans):
        names = [name for span in group for name in names_in(span, lane)]
        megabytes = sum(elements[name] for name in names) * BYTES / 1e6
        times = (
            max(step.ready[name] for name in names),
            max(rank.ready[name] for rank in ranks for name in names),
            group[0]["ts"],
            max(span["ts"] + span["dur"] for span in group),
        )
        messages.append(
            Message(len(names), megabytes, *((ns - step.backward) / 1e6 for ns in times))
        )
    return messages


def fused(spans: list[Event]) -> list[list[Event]]:
    """Put together what Horovod sent in one message: it carries out one response after the other,
    so that spans which overlap are of the same. A bucket of DDP is one span."""
    groups: list[list[Event]] = []
    for span in sorted(spans, key=lambda span: span["ts"]):
        first = groups[-1][0] if groups and "gradients" not in span["args"] else None
        if first and span["ts"] < first["ts"] + first["dur"]:
            groups[-1].append(span)
        else:
            groups.append([span])
    return groups


def names_in(span: Event, lane: Lane) -> list[str]:
    """The gradients of a span: a bucket's, or the one tensor of Horovod's."""
    tensor = lane.threads[span["tid"]].removeprefix("allreduce.")
    return list(span["args"].get("gradients", [tensor]))
