"""Read what a run with --profile-steps wrote: torch's profile of each rank, and the engine's own
timeline of its messages. All times are whole nanoseconds of Unix time. From both it derives when
gradients were ready and exchanged, in the same terms for every engine and transport.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from tabulate import tabulate

from compare.evidence.reading import read_record
from recipe.errors import UserError

STEP_MARK = "ProfilerStep#"  # torch's profiler marks each step with it
# The engines' timelines, which rank 0 writes. DDP has no timeline, so ddp_train/buckets.py writes
# its buckets in Horovod's format.
TIMELINES = {"horovod-timeline.json": "Horovod", "ddp-timeline.json": "DDP's buckets"}
BYTES = 4  # per element of a gradient, whatever the wire format
CYCLES = 0  # the process number of Horovod's marks that belong to no tensor

Event = dict[str, Any]  # of the Trace Event Format, with `ts` and `dur` in ns


@dataclass
class Lane:
    """One process of the merged file: the events of a rank's CPU, of a GPU, or of an engine."""

    name: str
    path: Path
    events: list[Event] = field(default_factory=list)
    threads: dict[Any, str] = field(default_factory=dict)  # name by thread number in the file


def read_profile(run: Path, name: str) -> tuple[list[Lane], int]:
    """Return all profiles of a run folder, and when the first profiled step began; UserError says
    what is wrong with one."""
    paths = {int(p.stem[5:]): p for p in run.glob("profile/rank-*.json") if p.stem[5:].isdigit()}
    missing = "it contains no profile/rank-*.json; train with --profile-steps N"
    if not paths:
        raise UserError(f"{run}: {missing} to have one")
    lanes = []
    for rank, path in sorted(paths.items()):
        lanes += read_torch(path, f"{name}, rank {rank}")
        lanes += [
            read_timeline(path.with_name(file), f"{name}, rank 0, {engine}")
            for file, engine in TIMELINES.items()
            if rank == 0 and path.with_name(file).exists()
        ]
    # Marks of the CPU only: a GPU's marks come later.
    marks = [
        event["ts"]
        for lane in lanes
        for event in lane.events
        if event["name"].startswith(STEP_MARK) and event.get("cat") == "user_annotation"
    ]
    if not marks:
        raise UserError(f"{run}: its profile contains no step; profile more steps")
    return lanes, min(marks)


def read_torch(path: Path, name: str) -> list[Lane]:
    """Read a trace of torch.profiler: first the rank's own process, then its GPUs.

    In the file, `ts` is in microseconds since `baseTimeNanoseconds` of the Unix clock.
    """
    try:
        trace = json.loads(path.read_text())
        base, events = int(trace["baseTimeNanoseconds"]), list(trace["traceEvents"])
        labels = {e["pid"]: e["args"]["labels"] for e in events if e["name"] == "process_labels"}
        of_cpu = next((pid for pid, label in labels.items() if label == "CPU"), None)
        lanes: dict[Any, Lane] = {}
        for event in events:
            # The profiler's own marks are in pseudo-processes called "Spans", "Traces" and "".
            pid = event["pid"] if isinstance(event.get("pid"), int) else of_cpu
            lane = lanes.setdefault(pid, Lane(f"{name}, {labels.get(pid, 'CPU')}", path))
            if event["name"] == "thread_name":
                lane.threads[event.get("tid")] = event["args"]["name"]
            elif event["ph"] != "M" and "ts" in event:
                event |= {"ts": base + round(event["ts"] * 1000), "tid": event.get("tid")}
                if "dur" in event:
                    event["dur"] = round(event["dur"] * 1000)
                lane.events.append(event)
    except (
        OSError,
        AttributeError,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        raise UserError(
            f"{path} cannot be read ({error!r}): it is incomplete, or another torch than the one "
            "that this project pins wrote it; profile again"
        ) from None
    return sorted(lanes.values(), key=lambda lane: (lane.name != f"{name}, CPU", lane.name))


def read_timeline(path: Path, name: str) -> Lane:
    """Read an engine's timeline: a thread for each tensor or bucket, which the file presents as a
    process, and one for Horovod's cycles.

    The first event gives the Unix time in microseconds at which `ts`, of a steady clock, is 0. A
    span consists of a begin and, later, an end without a name. A span that lacks one of them is
    left out: it began before the timeline, or ended after it.
    """
    try:
        events = [
            {"pid": CYCLES, "ts": 0, "name": "", "args": {}, **event}
            for event in json.loads(path.read_bytes())
        ]
        start = int(events[0]["args"]["start_time_since_epoch_in_micros"])
    except (LookupError, RecursionError, TypeError, ValueError) as error:
        raise UserError(
            f"{path} is incomplete, or lacks its start time ({error!r}): delete it, or profile "
            "again"
        ) from None
    lane, engine = Lane(name, path, threads={CYCLES: "cycles"}), path.stem.partition("-")[0]
    open_spans: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        kind, spans, args = event["ph"], open_spans[event["pid"]], event["args"]
        now = (start + event["ts"]) * 1000
        new = {"cat": engine, "name": event["name"], "ts": now, "tid": event["pid"], "args": args}
        if kind == "M" and "name" in args:
            lane.threads[event["pid"]] = args["name"]
        elif kind == "B":
            spans.append(new)
            lane.events.append(new)
        elif kind == "E" and spans:
            span = spans.pop()
            span |= {"ph": "X", "dur": now - span["ts"], "args": span["args"] | args}
        elif kind in "Xi":
            # While Horovod waits for ranks, it writes each ready rank's number as an empty span.
            mark = f"rank {event['name']} is ready" if kind == "X" else event["name"]
            lane.events.append(new | {"ph": "i", "s": "t", "name": mark})
    lane.events = [event for event in lane.events if "ph" in event]
    return lane


# -- When gradients were ready and exchanged -------------------------------------------------------


@dataclass(frozen=True)
class StepTimes:
    """When a step's gradients were ready on one rank, in ns of the Unix clock."""

    backward: int  # begin of the backward pass
    end: int
    ready: dict[str, int]  # by gradient


@dataclass(frozen=True)
class RecordedGradients:
    """What one rank wrote into profile/gradients-rank-R.json (recipe/record/probes.py)."""

    elements: dict[str, int]
    steps: list[StepTimes]


class TimedMessage(NamedTuple):
    """Gradients that were sent together: a bucket of DDP, or what Horovod fused. Times are in ms
    since rank 0 began the step's backward pass."""

    gradients: int
    megabytes: float  # in fp32
    ready: float  # its last gradient is ready on rank 0
    met: float  # its last gradient is ready on the last rank: until then the all-reduce waits
    began: float
    ended: float


Step = list[TimedMessage]  # in the order of their begin


def exchange_lines(steps: Sequence[Step]) -> list[str]:
    """Return the messages of a typical step as a table, and the median time that all-reduces take
    after the last gradient is ready."""
    typical = sorted(steps, key=lambda step: max(m.ended for m in step))[(len(steps) - 1) // 2]
    heads = ("gradients", "MB", "ready, ms", "on all ranks", "all-reduce begins", "ends")
    exposed = [max(0.0, max(m.ended for m in step) - max(m.ready for m in step)) for step in steps]
    return [
        tabulate(typical, heads, floatfmt=".1f"),
        f"After the last gradient is ready, all-reduces take {median(exposed):.3g} ms more (median "
        f"of {len(steps)} steps)",
    ]


def read_exchange(run: Path) -> list[Step]:
    """Read a profiled run's steps. There are none if the run could not record them: on GPUs, whose
    times the CPU does not see; with one worker; or if the engine does not name each gradient, as
    with Horovod's groups. UserError if the files are damaged."""
    folder = run / "profile"
    timelines = [folder / name for name in TIMELINES if (folder / name).exists()]
    if not timelines or not (folder / "gradients-rank-0.json").exists():
        return []
    paths = sorted(folder.glob("gradients-rank-*.json"))
    ranks = [read_record(path, RecordedGradients) for path in paths]
    lane, elements = read_timeline(timelines[0], ""), ranks[0].elements
    on_all_ranks = [*zip(*(rank.steps for rank in ranks), strict=False)]
    try:
        steps = [messages_of(step, elements, lane) for step in on_all_ranks]
    except LookupError as error:
        raise UserError(f"{folder}: its files are damaged ({error!r}); profile again") from None
    return [step for step in steps if sum(m.gradients for m in step) == len(elements)]


def messages_of(ranks: Sequence[StepTimes], elements: dict[str, int], lane: Lane) -> Step:
    """Return a step's messages, from the times of all ranks (rank 0 first) and the engine's
    spans."""
    step = ranks[0]
    spans = [
        event
        for event in lane.events
        if event["name"] == "ALLREDUCE"
        and step.backward <= event["ts"] < step.end
        and names_in(event, lane)[0] in elements  # not the loss, for example
    ]
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
            TimedMessage(len(names), megabytes, *((ns - step.backward) / 1e6 for ns in times))
        )
    return messages


def fused(spans: list[Event]) -> list[list[Event]]:
    """Group the spans that belong to one message. Horovod executes one response after another, so
    overlapping spans belong to the same message. A bucket of DDP is one span."""
    groups: list[list[Event]] = []
    for span in sorted(spans, key=lambda span: span["ts"]):
        first = groups[-1][0] if groups and "gradients" not in span["args"] else None
        if first and span["ts"] < first["ts"] + first["dur"]:
            groups[-1].append(span)
        else:
            groups.append([span])
    return groups


def names_in(span: Event, lane: Lane) -> list[str]:
    """Return the names of a span's gradients: those of a bucket, or Horovod's one tensor."""
    tensor = lane.threads[span["tid"]].removeprefix("allreduce.")
    return list(span["args"].get("gradients", [tensor]))
