"""Merge the profiles of one or several runs into one file that opens in Perfetto.

    python ddp_train/train.py --profile-steps 5 --name a     writes runs/a/profile/
    python compare/timeline.py runs/a                        merges it into runs/a/timeline.json
    python compare/timeline.py runs/a runs/b -o both.json    two runs, side by side

Open the file at https://ui.perfetto.dev. Each rank has a process of its own for what torch's
profiler saw on the CPU, and one for each GPU; Horovod's timeline, which rank 0 writes, is another
one with a thread for each tensor. All of a run is on one clock, the hosts' own: between hosts it is
as good as their clocks agree. Several runs are shifted so that their first profiled steps begin
together (--align none leaves them where they were). A profile slows a run down, Horovod's timeline
more than torch's: read orders and overlaps from it, and times from a run without.
"""

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compare.errors import UserError, run_main
from compare.evidence import packed
from recipe.files import replace_file

STEP_MARK = "ProfilerStep#"  # torch's profiler marks each step so, if it has a schedule
# What a trace's phase letters mean here (Trace Event Format): complete spans, instants, counters,
# flows (arrows), asynchronous spans, metadata.
WITH_ID = "stfbne"

Event = dict[str, Any]


@dataclass
class Lane:
    """One process of the merged file."""

    name: str
    path: Path  # the file that it was read from
    events: list[Event] = field(
        default_factory=list
    )  # `ts` and `dur` in whole ns of the Unix clock
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


# -- Reading ---------------------------------------------------------------------------------------


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
        timeline = folder / "horovod-timeline.json"
        if rank == 0 and timeline.exists():
            lane, notes = read_horovod(timeline, f"{name}, rank 0, Horovod")
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


def read_horovod(path: Path, name: str) -> tuple[Lane, list[str]]:
    """Read Horovod's timeline: a thread for each tensor, and one for the cycles.

    Its first event tells the Unix time, in microseconds, from which on a steady clock has counted
    `ts`; each tensor poses as a process, and its spans as a begin and an end without a name
    (horovod/common/timeline.cc).
    """
    events, whole = read_array(path)
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
            span = {"ph": "X", "name": event["name"], "cat": "horovod", "ts": last, "tid": tensor,
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
            lane.events.append({"ph": "i", "s": "t", "name": mark, "cat": "horovod", "ts": last,
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
        f"{path} does not tell when it began ({field}), so it cannot be put on one clock with the "
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
        raise UserError(f"{path} is no timeline of Horovod: it does not begin with a list")
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
            raise UserError(f"{path} is no timeline of Horovod: it holds {event!r:.80}")
        events.append(event)


# -- Merging ---------------------------------------------------------------------------------------


def merge(profiles: list[RunProfile], align: bool) -> dict[str, Any]:
    """Return the trace of all runs: `ts` in microseconds since the file's beginning.

    Processes and threads are numbered anew, each number used once, since those of two hosts, or of
    Horovod and torch, may be the same; so are the arrows' numbers.
    """
    reference = profiles[0].begin
    shifts = [reference - profile.begin if align else 0 for profile in profiles]
    origin = min(
        event["ts"] + shift
        for profile, shift in zip(profiles, shifts, strict=True)
        for lane in profile.lanes
        for event in lane.events
    )
    metadata: list[Event] = []
    merged: list[tuple[int, int, Event]] = []  # begin and minus duration, by which they are sorted
    numbers = iter(range(1, sys.maxsize))
    arrows: dict[Any, int] = {}
    order = 0
    for profile, shift in zip(profiles, shifts, strict=True):
        for lane in profile.lanes:
            order += 1
            pid = next(numbers)
            metadata += [
                metadatum("process_name", pid, 0, {"name": lane.name}),
                metadatum("process_sort_index", pid, 0, {"sort_index": order}),
            ]
            tids = {}
            for place, tid in enumerate(dict.fromkeys(event.get("tid") for event in lane.events)):
                tids[tid] = next(numbers)
                thread = lane.threads.get(tid, str(tid))
                metadata += [
                    metadatum("thread_name", pid, tids[tid], {"name": thread}),
                    metadatum("thread_sort_index", pid, tids[tid], {"sort_index": place}),
                ]
            for event in lane.events:
                begin = event["ts"] + shift - origin
                new = event | {"ts": begin / 1000, "pid": pid, "tid": tids[event.get("tid")]}
                if "dur" in event:
                    new["dur"] = event["dur"] / 1000
                if "id" in event and event["ph"] in WITH_ID:
                    # An arrow may lead from a rank's CPU to its GPU, but not to another rank.
                    key = (lane.path, event.get("cat"), event["id"])
                    new["id"] = arrows.setdefault(key, len(arrows) + 1)
                merged.append((begin, -event.get("dur", 0), new))
    merged.sort(key=lambda item: item[:2])  # a span before those within it
    return {
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": origin,
        "otherData": {
            profile.name: {"shifted_by_nanoseconds": shift}
            for profile, shift in zip(profiles, shifts, strict=True)
        },
        "traceEvents": metadata + [event for *_, event in merged],
    }


def metadatum(name: str, pid: int, tid: int, args: dict[str, Any]) -> Event:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}


# -- The command line ------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    """Merge what the command line names and return the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    return run_main("compare/timeline.py", lambda: merge_runs(parse_options(argv)))


def merge_runs(options: argparse.Namespace) -> int:
    names = run_names(options.runs)
    profiles = [read_run(run, name) for run, name in zip(options.runs, names, strict=True)]
    for profile in profiles:
        if not any(lane.events for lane in profile.lanes):
            raise UserError(f"{profile.name}: its profile holds no event; profile more steps")
    folder = Path(os.path.commonpath([run.resolve() for run in options.runs]))
    out = options.out or folder / "timeline.json"
    if out.suffix != ".json":
        raise UserError(f"{out}: the merged file is JSON; give it a name that ends in .json")
    if out.resolve().parent in [(run / "profile").resolve() for run in options.runs]:
        raise UserError(f"{out} would lie among the profiles; take another -o FILE")
    align = len(profiles) > 1 and options.align == "first-step"
    write_trace(out, merge(profiles, align))
    for profile in profiles:
        print("\n".join(summary(profile)))
    if align:
        print("The runs are shifted so that their first profiled steps begin together.")
        if unmarked := [profile.name for profile in profiles if not profile.steps]:
            print(
                f"No step is marked in {', '.join(unmarked)}: aligned at the first event instead."
            )
    print(f"Written: {out} ({out.stat().st_size / 1e6:.1f} MB). Open it at https://ui.perfetto.dev")
    return 0


def write_trace(path: Path, trace: dict[str, Any]) -> None:
    """Write the merged file whole or not at all."""
    try:
        replace_file(path, json.dumps(trace, separators=(",", ":")))
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None


def summary(profile: RunProfile) -> list[str]:
    """Return what was merged of a run, a line each."""
    lines = [f"{profile.name}:"]
    for lane in profile.lanes:
        begins = [event["ts"] for event in lane.events]
        ends = [event["ts"] + event.get("dur", 0) for event in lane.events]
        seconds = (max(ends) - min(begins)) / 1e9 if begins else 0.0
        lines.append(
            f"    {lane.name.removeprefix(profile.name + ', ')}: {len(begins):,} events on "
            f"{len({event.get('tid') for event in lane.events})} thread(s), {seconds:.3f} s"
        )
    if profile.steps:
        first, last = profile.begin, max(end for _, end in profile.steps)
        spans = Counter(
            first <= event["ts"] and event["ts"] + event["dur"] <= last
            for lane in profile.lanes
            for event in lane.events
            if event.get("cat") == "horovod" and event["name"] == "ALLREDUCE"
        )
        if spans:
            lines.append(
                f"    Horovod's allreduces: {spans[True]:,} within the profiled steps, "
                f"{spans[False]:,} before or after them"
            )
    return lines + [f"    note: {note}" for note in profile.notes]


def run_names(runs: Iterable[Path]) -> list[str]:
    """Return what to call the runs: their folders' names, with as much before as they need to
    differ."""
    parts = [run.resolve().parts for run in runs]
    if len(set(parts)) < len(parts):
        raise UserError("a run folder is given twice")
    length = 1
    while len({own[-length:] for own in parts}) < len(parts):
        length += 1
    return ["/".join(own[-length:]) for own in parts]


def parse_options(argv: list[str]) -> argparse.Namespace:
    title, text = (__doc__ or "").split("\n\n", 1)
    parser = argparse.ArgumentParser(
        prog="python compare/timeline.py",
        description=title,
        epilog=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="a run folder with profile/ in it")
    add("-o", "--out", type=Path, metavar="FILE",
        help="the merged file (default: timeline.json in the run's folder; of several runs, in the "
        "folder that holds them all)")  # fmt: skip
    add("--align", choices=("first-step", "none"), default="first-step",
        help="shift several runs so that their first profiled steps begin together (default), or "
        "leave each at the time when it ran")  # fmt: skip
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
