"""When each gradient of a step was ready, and when its all-reduce began and ended: of a run with
--profile-steps, on its rank 0, and in the same terms for every engine and transport."""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from compare.evidence.profiles import TIMELINES, Event, Lane, read_timeline
from recipe.errors import UserError

BYTES = 4  # of a gradient's element: what a gradient is, not what it is on the wire


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

    def sentence(self) -> str:
        """The medians over the steps, in words."""

        def middle(name: str) -> str:
            return f"{median(getattr(step, name) for step in self.steps):.1f} ms"

        messages = median(len(step.messages) for step in self.steps)
        megabytes = sum(size for _, size in self.typical.ready)
        return (
            f"{megabytes:.1f} MB of gradients in {messages:g} messages a step; backward takes "
            f"{middle('computed')}, all-reduce {middle('hidden')} of it, hidden, and "
            f"{middle('exposed')} after it, exposed (for {middle('late')} of it another rank was "
            "still computing)"
        )


def read_exchange(run: Path) -> Exchange | None:
    """Read a profiled run; None where it did not record this: it ran on GPUs, whose times the CPU
    does not see, or with one worker, or it is older than this record. UserError if its files are
    damaged."""
    try:
        return exchange_in(run / "profile")
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(
            f"{run / 'profile'}: the gradients' times or the engine's timeline are damaged "
            f"({error!r}): profile again"
        ) from None


def exchange_in(folder: Path) -> Exchange | None:
    """Read a run's profile; any error that a damaged file may cause."""
    times = {
        int(path.stem.rpartition("-")[2]): read_times(path)
        for path in folder.glob("gradients-rank-*.json")
    }
    found = [name for name in TIMELINES if (folder / name).exists()]
    if 0 not in times or not found:
        return None
    lane, _ = read_timeline(folder / found[0], found[0])
    own = times[0]
    steps = []
    for number, step in enumerate(own["steps"]):
        others = [t["steps"][number]["ready"] for t in times.values() if len(t["steps"]) > number]
        met = {name: max(other[name] for other in others) for name in step["ready"]}
        if step["ready"] and (messages := messages_of(lane, own["elements"], step, met)):
            ready, last = (
                sorted(
                    (ms(ns, step), own["elements"][name] * BYTES / 1e6) for name, ns in of.items()
                )
                for of in (step["ready"], met)
            )
            steps.append(ExchangeStep(tuple(ready), tuple(last), tuple(messages)))
    return Exchange(tuple(steps)) if steps else None


def ms(ns: int, step: dict[str, Any]) -> float:
    """Milliseconds since the step's backward pass began."""
    return float(ns - step["backward"]) / 1e6


def read_times(path: Path) -> dict[str, Any]:
    """Read one rank's times (`GradientTimes` in recipe/record/probes.py)."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({error!r}): profile again") from None


def messages_of(
    lane: Lane, elements: dict[str, int], step: dict[str, Any], met: dict[str, int]
) -> list[Message]:
    """The messages of one step; `met`: when each gradient was ready on the last rank, ns."""
    spans = [
        event
        for event in lane.events
        if event["name"] == "ALLREDUCE" and step["backward"] <= event["ts"] < step["end"]
        and is_of_gradients(lane.threads[event["tid"]], elements)
    ]  # fmt: skip
    found = []
    for group in fused(sorted(spans, key=lambda span: span["ts"])):
        names = [name for span in group for name in names_in(span, lane)]
        known = all(name in elements for name in names)
        size = sum(map(num_elements, group)) if "shape" in group[0]["args"] else 0
        size = sum(elements[name] for name in names) if known else size
        found.append(
            Message(
                len(names),
                size * BYTES / 1e6,
                ms(max(step["ready"][name] for name in names), step) if known else None,
                ms(max(met[name] for name in names), step) if known else None,
                ms(group[0]["ts"], step),
                ms(max(span["ts"] + span["dur"] for span in group), step),
            )
        )
    return found


def fused(spans: list[Event]) -> list[list[Event]]:
    """Put together what Horovod sent in one message: it carries out one response after the other,
    so that spans which overlap are of the same. A bucket of DDP is one span."""
    groups: list[list[Event]] = []
    for span in spans:
        is_bucket = "gradients" in span["args"]
        if groups and not is_bucket and span["ts"] < groups[-1][0]["ts"] + groups[-1][0]["dur"]:
            groups[-1].append(span)
        else:
            groups.append([span])
    return groups


def names_in(span: Event, lane: Lane) -> list[str]:
    """The gradients of a span: a bucket's, or the one tensor of Horovod's."""
    tensor = lane.threads[span["tid"]].removeprefix("allreduce.")
    return list(span["args"].get("gradients", [tensor]))


def is_of_gradients(thread: str, elements: dict[str, int]) -> bool:
    """Whether a thread of a timeline is of gradients, and not of figures such as the loss."""
    return thread.startswith(("bucket", "grouped")) or thread.removeprefix("allreduce.") in elements


def num_elements(span: Event) -> int:
    """Of the tensor whose shape Horovod wrote: "[64, 3, 7, 7]"."""
    return math.prod(map(int, re.findall(r"\d+", span["args"]["shape"])))
