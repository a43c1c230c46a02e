"""When each gradient of a step was ready, and when its all-reduce began and ended: of a run with
--profile-steps, on its rank 0, and in the same terms for every engine and transport."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from compare.evidence.profiles import TIMELINES, Event, Lane, read_timeline
from compare.evidence.run_folder import read_record
from recipe.errors import UserError

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


@dataclass(frozen=True)
class Message:
    """Gradients that travelled together: a bucket of DDP, or a fused response of Horovod.

    Times in ms since rank 0 began the step's backward pass.
    """

    gradients: int
    megabytes: float
    ready: float  # the last of them, on rank 0
    met: float  # the last of them, on the last rank: before that the all-reduce waits
    began: float
    ended: float


@dataclass(frozen=True)
class ExchangeStep:
    """The exchange of a step's gradients, as rank 0 saw it; times as in `Message`."""

    ready: tuple[tuple[float, float], ...]  # of each gradient, in order: when, and its MB
    met: tuple[tuple[float, float], ...]  # the same, on the last rank to have it
    messages: tuple[Message, ...]  # in the order in which they began

    @property
    def computed(self) -> float:
        """When the last gradient was ready: what travels later hides behind nothing."""
        return self.ready[-1][0]

    @property
    def ended(self) -> float:
        """When the last all-reduce ended."""
        return max(message.ended for message in self.messages)

    @property
    def exposed(self) -> float:
        """Milliseconds from the last gradient to the end of the last all-reduce."""
        return max(0.0, self.ended - self.computed)

    @property
    def hidden(self) -> float:
        """Milliseconds of the backward pass in which at least one all-reduce was under way."""
        total, reached = 0.0, -math.inf
        for message in self.messages:
            ended = min(message.ended, self.computed)
            total += max(0.0, ended - max(message.began, reached))
            reached = max(reached, ended)
        return total


@dataclass(frozen=True)
class Exchange:
    """The profiled steps of a run."""

    steps: tuple[ExchangeStep, ...]

    @property
    def typical(self) -> ExchangeStep:
        """The step whose exchange ended neither early nor late; the first of two such."""
        return sorted(self.steps, key=lambda step: step.ended)[(len(self.steps) - 1) // 2]

    def sentence(self) -> str:
        """The medians over the steps, in words."""
        hidden = median(step.hidden for step in self.steps)
        exposed = median(step.exposed for step in self.steps)
        return f"{hidden:.3g} ms hidden, {exposed:.3g} ms exposed"


def read_exchange(run: Path) -> Exchange | None:
    """Read a profiled run; None where it did not record this: it ran on GPUs, whose times the CPU
    does not see, or with one worker, or its engine did not name each gradient (as Horovod's groups
    do not). UserError if its files are damaged."""
    folder = run / "profile"
    timelines = [folder / name for name in TIMELINES if (folder / name).exists()]
    if not timelines or not (folder / "gradients-rank-0.json").exists():
        return None
    paths = sorted(folder.glob("gradients-rank-*.json"))
    ranks = [read_record(path, GradientTimes) for path in paths]
    lane, elements = read_timeline(timelines[0], ""), ranks[0].elements
    on_all_ranks = zip(*(rank.steps for rank in ranks), strict=False)
    try:
        steps = [exchange_of(step, elements, lane) for step in on_all_ranks]
    except LookupError as error:
        raise UserError(f"{folder}: its files are damaged ({error!r}): profile again") from None
    whole = [s for s in steps if sum(m.gradients for m in s.messages) == len(elements)]
    return Exchange(tuple(whole)) if whole else None


def exchange_of(ranks: Sequence[StepTimes], elements: dict[str, int], lane: Lane) -> ExchangeStep:
    """Put together a step of rank 0, when every rank had each gradient, and the engine's spans."""
    step = ranks[0]

    def ms(ns: int) -> float:
        return (ns - step.backward) / 1e6

    def in_order(times: dict[str, int]) -> tuple[tuple[float, float], ...]:
        return tuple(sorted((ms(ns), elements[n] * BYTES / 1e6) for n, ns in times.items()))

    met = {name: max(rank.ready[name] for rank in ranks) for name in step.ready}
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
            max(step.ready[name] for name in names), max(met[name] for name in names),
            group[0]["ts"], max(span["ts"] + span["dur"] for span in group),
        )  # fmt: skip
        messages.append(Message(len(names), megabytes, *map(ms, times)))
    return ExchangeStep(in_order(step.ready), in_order(met), tuple(messages))


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
