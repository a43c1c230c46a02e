"""Merge the profiles of one or several runs into one file that opens in Perfetto, and draw the
exchange of gradients.

    torchrun ... ddp_train/train.py --profile-steps 5 --name a     writes runs/a/profile/
    python compare/timeline.py runs/a              merges it into runs/a/timeline.json
    python compare/timeline.py runs/a runs/b -o both.json          two runs, side by side

Open the file at https://ui.perfetto.dev. Each rank has a process of its own for what torch's
profiler saw on the CPU, and one for each GPU; the engine's timeline, which rank 0 writes, is
another one with a thread for each tensor (Horovod) or bucket (DDP). All of a run is on one clock,
the hosts' own: between hosts it is as good as their clocks agree. Several runs are shifted so that
their first profiled steps begin together (--align none leaves them where they were).

Of runs on CPUs with at least two ranks, a picture lies beside the file (.svg): when each gradient
of a step was ready, and when its all-reduce began and ended, with the same axes for all runs.

A profile slows a run down: read orders and overlaps from it, and speeds from a run without.
"""

import argparse
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from compare.errors import run_main
from compare.evidence.exchange import read_exchange
from compare.evidence.profiles import Event, RunProfile, read_run
from compare.evidence.words import shortest_unique_names
from compare.page.chart import standalone
from compare.page.exchange import plot_exchanges
from recipe.errors import UserError
from recipe.files import replace_file

# What a trace's phase letters mean here (Trace Event Format): complete spans, instants, counters,
# flows (arrows), asynchronous spans, metadata.
WITH_ID = "stfbne"

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
    if len({run.resolve() for run in options.runs}) < len(options.runs):
        raise UserError("a run folder is given twice")
    names = shortest_unique_names(options.runs)
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
    write_whole(out, json.dumps(merge(profiles, align), separators=(",", ":")))
    for profile in profiles:
        print("\n".join(summary(profile)))
    if align:
        print("The runs are shifted so that their first profiled steps begin together.")
        if unmarked := [profile.name for profile in profiles if not profile.steps]:
            print(
                f"No step is marked in {', '.join(unmarked)}: aligned at the first event instead."
            )
    print(f"Written: {out} ({out.stat().st_size / 1e6:.1f} MB). Open it at https://ui.perfetto.dev")
    exchanges = {
        name: exchange
        for run, name in zip(options.runs, names, strict=True)
        if (exchange := read_exchange(run))
    }
    for name, exchange in exchanges.items():
        print(f"{name}: {exchange.sentence()}")
    if exchanges:
        picture = out.with_suffix(".svg")
        write_whole(picture, standalone(plot_exchanges(list(exchanges.items())).svg))
        print(f"Written: {picture}, the exchange of gradients")
    return 0


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    try:
        replace_file(path, text)
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
