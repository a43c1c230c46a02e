"""When each gradient of a step was ready, and when its all-reduce began and ended: of a run with
--profile-steps, on its rank 0, and in the same terms for every engine and transport."""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec

from compare.evidence.profiles import TIMELINES, Event, Lane, read_timeline
from recipe.errors import UserError

BYTES = 4  # of a gradient's element: what a gradient is, not what it is on the wire


class StepTimes(msgspec.Struct):
    """A step's gradients on one rank, in ns of the Unix clock."""

    backward: int  # it began
    end: int
    ready: dict[str, int]


class GradientTimes(msgspec.Struct):
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
    ready: float | None  # the last of them, on rank 0; None where the engine does not name them
    met: float | None  # the last of them, on the last rank: before that the all-reduce waits
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
    def late(self) -> float:
        """Milliseconds of `exposed` in which another rank still computed."""
        return max(0.0, min(self.met[-1][0], self.ended) - self.computed)

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

    def median(self, part: str) -> float:
        """The median of a step's time over the steps, ms."""
        return float(median(getattr(step, part) for step in self.steps))

    def sentence(self) -> str:
        """The medians over the steps, in words."""
        computed, hidden, exposed, late = map(
            self.median, ("computed", "hidden", "exposed", "late")
        )
        messages = median(len(step.messages) for step in self.steps)
        return (
            f"{sum(size for _, size in self.typical.ready):.1f} MB of gradients in {messages:g} "
            f"messages a step; backward takes {computed:.1f} ms, all-reduce {hidden:.1f} ms of it, "
            f"hidden, and {exposed:.1f} ms after it, exposed (for {late:.1f} ms of it another rank "
            "was still computing)"
        )


def read_exchange(run: Path) -> Exchange | None:
    """Read a profiled run; None where it did not record this: it ran on GPUs, whose times the CPU
    does not see, or with one worker, or it is older than this record. UserError if its files are
    damaged."""
    decoder = msgspec.json.Decoder(GradientTimes)
    path = folder = run / "profile"
    try:
        times = {}
        for path in folder.glob("gradients-rank-*.json"):
            times[path.stem] = decoder.decode(path.read_bytes())
        found = [folder / name for name in TIMELINES if (folder / name).exists()]
        if "gradients-rank-0" not in times or not found:
            return None
        path = found[0]
        lane, own = read_timeline(path, path.name), times["gradients-rank-0"]
        steps = [
            exchange_of(step, [t.steps[i].ready for t in times.values()], own.elements, lane)
            for i, step in enumerate(own.steps[: min(len(t.steps) for t in times.values())])
        ]
    except (msgspec.MsgspecError, OSError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"{path} is damaged ({error!r}): profile again") from None
    kept = tuple(step for step in steps if step.ready and step.messages)
    return Exchange(kept) if kept else None


def exchange_of(
    step: StepTimes, ranks: list[dict[str, int]], elements: dict[str, int], lane: Lane
) -> ExchangeStep:
    """Put together a step of rank 0, when every rank had each gradient, and the engine's spans."""

    def ms(ns: int) -> float:
        return (ns - step.backward) / 1e6

    def in_order(times: dict[str, int]) -> tuple[tuple[float, float], ...]:
        return tuple(sorted((ms(ns), elements[n] * BYTES / 1e6) for n, ns in times.items()))

    met = {name: max(ready[name] for ready in ranks) for name in step.ready}
    messages: list[Message] = []
    for spans in fused([
        event
        for event in lane.events
        if event["name"] == "ALLREDUCE" and step.backward <= event["ts"] < step.end
        and (lane.threads[event["tid"]].startswith(("bucket", "grouped"))
             or names_in(event, lane)[0] in elements)  # and not the loss, say
    ]):  # fmt: skip
        names = [name for span in spans for name in names_in(span, lane)]
        known = all(name in elements for name in names)
        size = sum(elements[name] for name in names) if known else sum(map(num_elements, spans))
        messages.append(
            Message(
                len(names),
                size * BYTES / 1e6,
                ms(max(step.ready[name] for name in names)) if known else None,
                ms(max(met[name] for name in names)) if known else None,
                ms(spans[0]["ts"]),
                ms(max(span["ts"] + span["dur"] for span in spans)),
            )
        )
        if any("unfinished" in span["args"] for span in spans):
            raise ValueError(f"the all-reduce of {names[0]} has no end")
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


def num_elements(span: Event) -> int:
    """Of the tensor whose shape Horovod wrote: "[64, 3, 7, 7]"."""
    return math.prod(map(int, re.findall(r"\d+", span["args"]["shape"])))
