"""Read what a run with --profile-steps wrote: torch's profile of each rank, and the engine's own
timeline of its messages, all on one clock."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compare.evidence import packed
from recipe.errors import UserError

STEP_MARK = "ProfilerStep#"  # torch's profiler marks each step so, if it has a schedule
# The engines' timelines, which rank 0 writes, and how a person calls them. DDP has none of its own:
# ddp_train/timeline.py writes its buckets in the form of Horovod's.
TIMELINES = {"horovod-timeline.json": "Horovod", "ddp-timeline.json": "DDP's buckets"}

Event = dict[str, Any]


@dataclass
class Lane:
    """One process of the merged file."""

    name: str
    path: Path  # the file that it was read from
    events: list[Event] = field(default_factory=list)  # `ts`, `dur`: whole ns of the Unix clock
    threads: dict[Any, str] = field(default_factory=dict)  # name by the file's own thread number


@dataclass
class RunProfile:
    """What one run's profile/ holds."""

    name: str
    lanes: list[Lane]
    steps: list[tuple[int, int]]  # begin and end of each profiled step of each rank, ns
    notes: list[str]

    @property
    def begin(self) -> int:
        """Begin of the first profiled step; of the first event where no step is marked."""
        if self.steps:
            return min(begin for begin, _ in self.steps)
        return min(event["ts"] for lane in self.lanes for event in lane.events)


def read_run(run: Path, name: str) -> RunProfile:
    """Read all profiles of a run folder."""
    folder = run / "profile"
    paths = {
        int(path.stem[5:]): path for path in folder.glob("rank-*.json") if path.stem[5:].isdigit()
    }
    if not paths:
        is_there = packed.is_folder(run)
        what = "holds no profile/rank-*.json" if is_there else "there is no such run folder"
        raise UserError(f"{run}: {what}; train with --profile-steps N to have one")
    profile = RunProfile(name, [], [], [])
    for rank, path in sorted(paths.items()):
        lanes = read_torch(path, f"{name}, rank {rank}")
        profile.lanes += lanes
        steps = [
            (event["ts"], event["ts"] + event["dur"])
            for lane in lanes
            for event in lane.events
            if event["ph"] == "X" and event["name"].startswith(STEP_MARK)
            and event.get("cat") != "gpu_user_annotation"  # the same mark, as the GPU met it
        ]  # fmt: skip
        if not steps:
            profile.notes.append(f"rank {rank}: no step is marked ({STEP_MARK}...)")
        profile.steps += steps
        for file, engine in TIMELINES.items() if rank == 0 else ():
            if (folder / file).exists():
                lane, notes = read_timeline(folder / file, f"{name}, rank 0, {engine}")
                profile.lanes.append(lane)
                profile.notes += notes
    return profile


def read_torch(path: Path, name: str) -> list[Lane]:
    """Read a trace of torch.profiler: the rank's own process, then its GPUs.

    `ts` is in microseconds since `baseTimeNanoseconds` of the Unix clock.
    """
    try:
        trace = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} cannot be read ({error}): it was not written to its end; profile again"
        ) from None
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise UserError(f"{path} is no trace of torch.profiler: it has no list `traceEvents`")
    if "baseTimeNanoseconds" not in trace:
        raise UserError(
            f"{path} has no baseTimeNanoseconds, so its clock is not known: it is not from the "
            "torch that this project pins; profile again"
        )
    base = int(trace["baseTimeNanoseconds"])
    lanes: dict[Any, Lane] = {}
    metadata = [event for event in trace["traceEvents"] if event.get("ph") == "M"]
    labels = {
        event["pid"]: str(event["args"].get("labels"))
        for event in metadata
        if event["name"] == "process_labels"
    }
    # The profiler's own marks stand in pseudo-processes called "Spans", "Traces" and "".
    own = next((pid for pid, label in labels.items() if label == "CPU"), None)

    def lane_of(event: Event) -> Lane:
        pid = event.get("pid")
        pid = pid if isinstance(pid, int) else own
        label = labels.get(pid, "CPU" if pid == own else f"process {pid}")
        return lanes.setdefault(pid, Lane(f"{name}, {label}", path))

    for event in trace["traceEvents"]:
        if event.get("ph") == "M" or "ts" not in event:
            continue
        moved = event | {"ts": base + round(event["ts"] * 1000)}
        if "dur" in event:
            moved["dur"] = round(event["dur"] * 1000)
        if event["ph"] == "i":
            moved["s"] = "t"  # on its own thread, not across the runs beside it
        lane = lane_of(event)
        lane.events.append(moved)
        lane.threads.setdefault(event.get("tid"), str(event.get("tid") or "profiler"))
    for event in metadata:
        known = lanes.get(event["pid"])
        if event["name"] == "thread_name" and known and event.get("tid") in known.threads:
            known.threads[event["tid"]] = event["args"]["name"]
    return sorted(lanes.values(), key=lambda lane: (lane.name != f"{name}, CPU", lane.name))


def read_timeline(path: Path, name: str) -> tuple[Lane, list[str]]:
    """Read an engine's timeline: a thread for each tensor or bucket, and one for Horovod's cycles.

    Its first event has the Unix time, in microseconds, from which on a steady clock has counted
    `ts`; each tensor poses as a process, and its spans as a begin and an end without a name
    (horovod/common/timeline.cc).
    """
    events, whole = read_array(path)
    engine = path.stem.partition("-")[0]
    started = horovod_start(events, path)
    lane = Lane(name, path)
    open_spans: dict[Any, list[Event]] = {}
    ends_alone = 0
    last = 0
    for event in events:
        tensor = event.get("pid", "cycles")  # markers have no process
        if event["ph"] == "M":
            if "name" in event["args"]:
                lane.threads[tensor] = event["args"]["name"]
            continue
        last = (started + event["ts"]) * 1000
        args = event.get("args", {})
        if event["ph"] == "B":
            span = {"ph": "X", "name": event["name"], "cat": engine, "ts": last, "tid": tensor,
                    "args": args}  # fmt: skip
            open_spans.setdefault(tensor, []).append(span)
            lane.events.append(span)
        elif event["ph"] == "E":
            if not open_spans.get(tensor):
                ends_alone += 1  # it began before the timeline did
                continue
            span = open_spans[tensor].pop()
            span["dur"] = last - span["ts"]
            span["args"] = span["args"] | args
        else:
            # While ranks are waited for, the number of each that is ready is an empty span.
            mark = f"rank {event['name']} is ready" if event["ph"] == "X" else event["name"]
            lane.events.append({"ph": "i", "s": "t", "name": mark, "cat": engine, "ts": last,
                                "tid": tensor, "args": args})  # fmt: skip
    lane.threads["cycles"] = "cycles"
    unfinished = [span for spans in open_spans.values() for span in spans]
    for span in unfinished:
        span["dur"] = last - span["ts"]
        span["args"] = span["args"] | {"unfinished": True}
    notes = []
    if not whole:
        notes.append(f"{path.name} ends in the middle: what it has is merged")
    if unfinished or ends_alone:
        notes.append(
            f"{path.name}: {len(unfinished)} span(s) had not ended (drawn until its end), and "
            f"{ends_alone} had begun before it (left out)"
        )
    return lane, notes


def horovod_start(events: list[Event], path: Path) -> int:
    """Return the Unix time, in microseconds, at which Horovod's timeline begins."""
    field = "start_time_since_epoch_in_micros"
    for event in events:
        if field in event.get("args", {}):
            return int(event["args"][field])
    raise UserError(
        f"{path} does not say when it began ({field}), so it cannot be put on one clock with the "
        "other profiles; delete it, or profile again"
    )


def read_array(path: Path) -> tuple[list[Event], bool]:
    """Return a JSON array's objects, and whether it is whole: of a run that was killed, what was
    written until then."""
    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    if not text.lstrip().startswith("["):
        raise UserError(f"{path} is no timeline of an engine: it does not begin with a list")
    events: list[Event] = []
    decoder, position = json.JSONDecoder(), text.index("[") + 1
    while True:
        while position < len(text) and text[position] in ", \t\r\n":
            position += 1
        if text[position : position + 1] == "]":
            return events, True
        try:
            event, position = decoder.raw_decode(text, position)
        except ValueError:
            return events, False
        if not isinstance(event, dict) or "ph" not in event:
            raise UserError(f"{path} is no timeline of an engine: it holds {event!r:.80}")
        events.append(event)
