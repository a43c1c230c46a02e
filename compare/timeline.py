"""Merge the profiles of one or several runs into one file for Perfetto, and list when gradients
were ready and exchanged.

    torchrun ... ddp_train/train.py --profile-steps 5 --name a     writes runs/a/profile/
    python compare/timeline.py runs/a              merges it into runs/a/timeline.json
    python compare/timeline.py runs/a runs/b -o both.json          two runs, side by side

Open the file at https://ui.perfetto.dev. Each rank has one process for the CPU events of torch's
profiler, and one for each GPU. The engine's timeline, which rank 0 writes, is another process, with
a thread for each tensor (Horovod) or, on CPUs, for each bucket (DDP). All events of a run have the
time of the hosts' own clocks, so events of different hosts are only as exact as these clocks agree.
Several runs are shifted so that their first profiled steps begin together. Perfetto and
HolisticTraceAnalysis show overlaps on GPUs and which kernels take the time.

The list is for runs on CPUs with at least two ranks: the messages of a typical step on rank 0, in
ms since its backward pass began. Horovod begins an all-reduce when all ranks have its gradients.
DDP begins one as soon as rank 0 has them and one of Gloo's two threads (MPI has one) is free, and
then waits for the other ranks; this start is inferred.

A profile slows a run down: use it for orders and overlaps, and a run without one for speeds.
"""

import itertools
import json
import os
import sys
from collections import defaultdict
from collections.abc import Hashable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from compare.evidence.profiles import Event, Lane, exchange_lines, read_exchange, read_profile
from compare.evidence.words import shortest_unique_names
from recipe.command import run_tool
from recipe.errors import UserError
from recipe.files import replace_file

# Events that have an id: flows (arrows) and asynchronous spans of the Trace Event Format.
WITH_ID = "stfbne"


def merge(profiles: dict[str, tuple[list[Lane], int]]) -> dict[str, Any]:
    """Return the trace of all runs: `ts` in microseconds since the first event.

    Processes, threads and arrows get new, unique numbers, since two hosts, or Horovod and torch,
    may use the same ones.
    """
    first = next(begin for _, begin in profiles.values())
    shifts = {name: first - begin for name, (_, begin) in profiles.items()}
    lanes = [(lane, shifts[name]) for name, (own, _) in profiles.items() for lane in own]
    origin = min(event["ts"] + shift for lane, shift in lanes for event in lane.events)
    numbers: defaultdict[Hashable, int] = defaultdict(itertools.count(1).__next__)
    metadata: list[Event] = []
    merged: list[Event] = []
    for order, (lane, shift) in enumerate(lanes):
        pid = numbers[order]
        threads = {tid: str(tid or "profiler") for tid in (event["tid"] for event in lane.events)}
        metadata += [
            {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}
            for name, tid, args in (
                ("process_name", pid, {"name": lane.name}),
                ("process_sort_index", pid, {"sort_index": order}),
                *(
                    ("thread_name", numbers[order, tid], {"name": lane.threads.get(tid, name)})
                    for tid, name in threads.items()
                ),
            )
        ]
        for event in lane.events:
            new = event | {"pid": pid, "tid": numbers[order, event["tid"]]}
            new["ts"] = (event["ts"] + shift - origin) / 1000
            if "dur" in event:
                new["dur"] = event["dur"] / 1000
            if "id" in event and event["ph"] in WITH_ID:
                # An arrow may lead from a rank's CPU to its GPU, but not to another rank.
                new["id"] = numbers[str(lane.path), event.get("cat"), event["id"]]
            merged.append(new)
    merged.sort(key=lambda event: (event["ts"], -event.get("dur", 0)))  # a span before its parts
    return {
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": origin,
        "otherData": {name: {"shifted_by_nanoseconds": shift} for name, shift in shifts.items()},
        "traceEvents": metadata + merged,
    }


def merge_runs(
    runs: Positional[tuple[Path, ...]],
    out: Annotated[Path | None, arg(aliases=["-o"])] = None,
) -> int:
    """Write the merged file, and list the exchange of gradients.

    Args:
        runs: Run folders with profile/ in them.
        out: The merged file (default: timeline.json in the run's folder, or for several runs in the
            folder that holds them all).
    """
    if not runs or len({run.resolve() for run in runs}) < len(runs):
        raise UserError("give one run folder or several, each once")
    names = shortest_unique_names(runs)
    profiles = {name: read_profile(run, name) for run, name in zip(runs, names, strict=True)}
    out = out or Path(os.path.commonpath([run.resolve() for run in runs])) / "timeline.json"
    if out.suffix != ".json" or out.resolve().parent.name == "profile":
        raise UserError(f"{out}: give a name that ends in .json, outside of profile/")
    replace_file(out, json.dumps(merge(profiles), separators=(",", ":")))
    print(f"Written: {out} ({out.stat().st_size / 1e6:.1f} MB). Open it at https://ui.perfetto.dev")
    for name, run in zip(names, runs, strict=True):
        if steps := read_exchange(run):
            print("", name, *exchange_lines(steps), sep="\n")
    return 0


main = partial(run_tool, "compare/timeline.py", merge_runs, __doc__)

if __name__ == "__main__":
    sys.exit(main())
