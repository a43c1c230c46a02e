"""Read what a run with --profile-steps wrote: torch's profile of each rank, and the engine's own
timeline of its messages, all on one clock: whole nanoseconds of Unix time."""

import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from compare.plan.record import DAMAGE
from recipe.errors import UserError, refuse

STEP_MARK = "ProfilerStep#"  # torch's profiler marks each step so
# The engines' timelines, which rank 0 writes. DDP has none of its own: ddp_train/timeline.py writes
# its buckets in the form of Horovod's.
TIMELINES = {"horovod-timeline.json": "Horovod", "ddp-timeline.json": "DDP's buckets"}
CYCLES = 0  # the number under which Horovod's marks that belong to no tensor are

Event = dict[str, Any]  # of the Trace Event Format, with `ts` and `dur` in ns


class TimelineEvent(msgspec.Struct):
    """One of an engine's timeline (horovod/common/timeline.cc)."""

    ph: str
    pid: int = CYCLES  # each tensor or bucket poses as a process
    ts: int = 0  # microseconds since the timeline's start
    name: str = ""
    args: dict[str, Any] = {}


@dataclass
class Lane:
    """One process of the merged file: what a rank's CPU, a GPU, or an engine did."""

    name: str
    path: Path
    events: list[Event] = field(default_factory=list)
    threads: dict[Any, str] = field(default_factory=dict)  # name by the file's own number


@dataclass
class RunProfile:
    """What one run's profile/ holds."""

    name: str
    lanes: list[Lane]
    begin: int  # of the first profiled step


def read_run(run: Path, name: str) -> RunProfile:
    """Read all profiles of a run folder; UserError says what is wrong with one."""
    paths = {int(p.stem[5:]): p for p in run.glob("profile/rank-*.json") if p.stem[5:].isdigit()}
    if not paths:
        raise UserError(
            f"{run}: is no run folder with a profile/rank-*.json in it; train with "
            "--profile-steps N to have one"
        )
    lanes = []
    for rank, path in sorted(paths.items()):
        lanes += read_torch(path, f"{name}, rank {rank}")
        lanes += [
            read_timeline(path.with_name(file), f"{name}, rank 0, {engine}")
            for file, engine in TIMELINES.items()
            if rank == 0 and path.with_name(file).exists()
        ]
    # A GPU is behind with its own marks.
    marks = [
        event["ts"]
        for lane in lanes
        for event in lane.events
        if event["name"].startswith(STEP_MARK) and event.get("cat") == "user_annotation"
    ]
    refuse((not marks, f"{run}: its profile holds no step; profile more steps"))
    return RunProfile(name, lanes, min(marks))


def read_torch(path: Path, name: str) -> list[Lane]:
    """Read a trace of torch.profiler: the rank's own process, then its GPUs.

    `ts` is in microseconds since `baseTimeNanoseconds` of the Unix clock.
    """
    try:
        trace = json.loads(path.read_text())
        base, events = int(trace["baseTimeNanoseconds"]), list(trace["traceEvents"])
        labels = {e["pid"]: e["args"]["labels"] for e in events if e["name"] == "process_labels"}
        own = next((pid for pid, label in labels.items() if label == "CPU"), None)
        lanes: dict[Any, Lane] = {}
        for event in events:
            # The profiler's own marks stand in pseudo-processes called "Spans", "Traces" and "".
            pid = event["pid"] if isinstance(event.get("pid"), int) else own
            lane = lanes.setdefault(pid, Lane(f"{name}, {labels.get(pid, 'CPU')}", path))
            if event["name"] == "thread_name":
                lane.threads[event.get("tid")] = event["args"]["name"]
            elif event["ph"] != "M" and "ts" in event:
                event |= {"ts": base + round(event["ts"] * 1000), "tid": event.get("tid")}
                if "dur" in event:
                    event["dur"] = round(event["dur"] * 1000)
                lane.events.append(event)
    except DAMAGE as error:
        raise UserError(
            f"{path} cannot be read ({error!r}): it was not written to its end, or not by the "
            "torch that this project pins; profile again"
        ) from None
    return sorted(lanes.values(), key=lambda lane: (lane.name != f"{name}, CPU", lane.name))


def read_timeline(path: Path, name: str) -> Lane:
    """Read an engine's timeline: a thread for each tensor or bucket, and one for Horovod's cycles.

    Its first event has the Unix time, in microseconds, from which on a steady clock has counted
    `ts`. A span is a begin and, later, an end without a name; a span without one of them is left
    out: it began before the timeline did, or has not ended in it.
    """
    try:
        events = msgspec.json.decode(path.read_bytes(), type=list[TimelineEvent])
        start = int(events[0].args["start_time_since_epoch_in_micros"])
    except (LookupError, RecursionError, ValueError) as error:
        raise UserError(
            f"{path} is no whole timeline with its start ({error!r}): delete it, or profile again"
        ) from None
    lane, engine = Lane(name, path, threads={CYCLES: "cycles"}), path.stem.partition("-")[0]
    lane.threads |= {e.pid: e.args["name"] for e in events if e.ph == "M" and "name" in e.args}
    open_spans: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        now, spans = (start + event.ts) * 1000, open_spans[event.pid]
        new = {"cat": engine, "name": event.name, "ts": now, "tid": event.pid, "args": event.args}
        if event.ph == "B":
            spans.append(new)
            lane.events.append(new)
        elif event.ph == "E" and spans:
            span = spans.pop()
            span |= {"ph": "X", "dur": now - span["ts"], "args": span["args"] | event.args}
        elif event.ph in "Xi":
            # While ranks are waited for, the number of each that is ready is an empty span.
            mark = f"rank {event.name} is ready" if event.ph == "X" else event.name
            lane.events.append(new | {"ph": "i", "s": "t", "name": mark})
    lane.events = [event for event in lane.events if "ph" in event]
    return lane
