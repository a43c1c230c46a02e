"""Read what a run with --profile-steps wrote: torch's profile of each rank, and the engine's own
timeline of its messages, all on one clock: whole nanoseconds of Unix time."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipe.errors import UserError

SEPARATOR = re.compile(r"[\s,]*")  # of a list's items
STEP_MARK = "ProfilerStep#"  # torch's profiler marks each step so, if it has a schedule
# The engines' timelines, which rank 0 writes. DDP has none of its own: ddp_train/timeline.py writes
# its buckets in the form of Horovod's.
TIMELINES = {"horovod-timeline.json": "Horovod", "ddp-timeline.json": "DDP's buckets"}

Event = dict[str, Any]  # of the Trace Event Format, with `ts` and `dur` in ns


@dataclass
class Lane:
    """One process of the merged file: what a rank's CPU, a GPU, or an engine did."""

    name: str
    path: Path
    events: list[Event] = field(default_factory=list)
    threads: dict[Any, str] = field(default_factory=dict)  # name by the file's own number
    notes: list[str] = field(default_factory=list)


@dataclass
class RunProfile:
    """What one run's profile/ holds."""

    name: str
    lanes: list[Lane]

    @property
    def steps(self) -> list[tuple[int, int]]:
        """Begin and end of each profiled step of each rank; a GPU is behind with its marks."""
        return [
            (event["ts"], event["ts"] + event["dur"])
            for lane in self.lanes
            for event in lane.events
            if event["name"].startswith(STEP_MARK) and event.get("cat") == "user_annotation"
        ]

    @property
    def begin(self) -> int:
        """Begin of the first profiled step; of the first event where no step is marked."""
        return min(self.steps or ((e["ts"], 0) for lane in self.lanes for e in lane.events))[0]


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
        timelines = [path.with_name(file) for file in TIMELINES] if rank == 0 else []
        lanes += [
            read_timeline(timeline, f"{name}, rank 0, {TIMELINES[timeline.name]}")
            for timeline in timelines
            if timeline.exists()
        ]
    if not any(lane.events for lane in lanes):
        raise UserError(f"{run}: its profile holds no event; profile more steps")
    return RunProfile(name, lanes)


def read_torch(path: Path, name: str) -> list[Lane]:
    """Read a trace of torch.profiler: the rank's own process, then its GPUs.

    `ts` is in microseconds since `baseTimeNanoseconds` of the Unix clock.
    """
    try:
        trace = json.loads(path.read_text())
        base, events = int(trace["baseTimeNanoseconds"]), list(trace["traceEvents"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"{path} cannot be read ({error!r}): it was not written to its end, or not by the "
            "torch that this project pins; profile again"
        ) from None
    labels = {e["pid"]: e["args"]["labels"] for e in events if e["name"] == "process_labels"}
    own = next((pid for pid, label in labels.items() if label == "CPU"), None)
    lanes: dict[Any, Lane] = {}
    for event in events:
        # The profiler's own marks stand in pseudo-processes called "Spans", "Traces" and "".
        pid = event["pid"] if isinstance(event.get("pid"), int) else own
        tid = event.get("tid")
        lane = lanes.setdefault(pid, Lane(f"{name}, {labels.get(pid, 'CPU')}", path))
        if event["name"] == "thread_name":
            lane.threads[tid] = event["args"]["name"]
        elif event["ph"] != "M" and "ts" in event:
            moved = event | {"ts": base + round(event["ts"] * 1000), "tid": tid}
            if "dur" in event:
                moved["dur"] = round(event["dur"] * 1000)
            if event["ph"] == "i":
                moved["s"] = "t"  # on its own thread, not across the runs beside it
            lane.events.append(moved)
    return sorted(lanes.values(), key=lambda lane: (lane.name != f"{name}, CPU", lane.name))


def read_timeline(path: Path, name: str) -> Lane:
    """Read an engine's timeline: a thread for each tensor or bucket, and one for Horovod's cycles.

    Its first event has the Unix time, in microseconds, from which on a steady clock has counted
    `ts`; each tensor poses as a process, and its spans as a begin and an end without a name
    (horovod/common/timeline.cc).
    """
    lane, engine = Lane(name, path, threads={"cycles": "cycles"}), path.stem.partition("-")[0]
    open_spans: dict[Any, list[Event]] = {}
    started, last, ends_alone = None, 0, 0
    for event in events_of(path, lane.notes):
        tensor, args = event.get("pid", "cycles"), event.get("args", {})  # markers have no process
        started = args.get("start_time_since_epoch_in_micros", started)
        if started is None:
            raise UserError(
                f"{path} does not say when it began, so it cannot be put on one clock with the "
                "other profiles; delete it, or profile again"
            )
        if event["ph"] == "M":
            lane.threads |= {tensor: args["name"]} if "name" in args else {}
            continue
        last = (int(started) + event["ts"]) * 1000
        new = {"cat": engine, "ts": last, "tid": tensor, "args": args}
        if event["ph"] == "B":
            new |= {"ph": "X", "name": event["name"]}
            open_spans.setdefault(tensor, []).append(new)
        elif event["ph"] != "E":
            # While ranks are waited for, the number of each that is ready is an empty span.
            mark = f"rank {event['name']} is ready" if event["ph"] == "X" else event["name"]
            new |= {"ph": "i", "s": "t", "name": mark}
        elif open_spans.get(tensor):
            span = open_spans[tensor].pop()
            span |= {"dur": last - span["ts"], "args": span["args"] | args}
            continue
        else:
            ends_alone += 1  # it began before the timeline did
            continue
        lane.events.append(new)
    unfinished = [span for spans in open_spans.values() for span in spans]
    for span in unfinished:
        span |= {"dur": last - span["ts"], "args": span["args"] | {"unfinished": True}}
    if unfinished or ends_alone:
        lane.notes.append(
            f"{path.name}: {len(unfinished)} span(s) had not ended (drawn until its end), and "
            f"{ends_alone} had begun before it (left out)"
        )
    return lane


def events_of(path: Path, notes: list[str]) -> Iterator[Event]:
    """Yield a timeline's events: of a run that was killed, what was written until then."""
    text, decoder, position = path.read_text(errors="replace"), json.JSONDecoder(), 1
    while (gap := SEPARATOR.match(text, position)) and text[gap.end() : gap.end() + 1] != "]":
        try:
            event, position = decoder.raw_decode(text, gap.end())
        except ValueError:
            notes.append(f"{path.name} ends in the middle: what it has is merged")
            return
        if not isinstance(event, dict) or "ph" not in event:
            raise UserError(f"{path} is no timeline of an engine: it holds {event!r:.80}")
        yield event
