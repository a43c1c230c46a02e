"""Merge the profiles of one or several runs into one file that opens in Perfetto, and list when
gradients were ready and exchanged.

    torchrun ... ddp_train/train.py --profile-steps 5 --name a     writes runs/a/profile/
    python compare/timeline.py runs/a              merges it into runs/a/timeline.json
    python compare/timeline.py runs/a runs/b -o both.json          two runs, side by side

Open the file at https://ui.perfetto.dev. Each rank has a process of its own for what torch's
profiler saw on the CPU, and one for each GPU; the engine's timeline, which rank 0 writes, is
another one with a thread for each tensor (Horovod) or, on CPUs, bucket (DDP). All of a run is on
one clock, the hosts' own: between hosts it is as good as their clocks agree. Several runs are
shifted so that their first profiled steps begin together (--align none leaves them where they
were).

The list is of runs on CPUs with at least two ranks: the messages of a typical step on rank 0, in ms
since its backward pass began. Horovod begins an all-reduce when all ranks have its gradients. DDP's
begins as soon as rank 0 has them and one of Gloo's two threads (MPI's one) is free, which is
inferred, and waits for the other ranks.

A profile slows a run down: read orders and overlaps from it, and speeds from a run without.
"""

import itertools
import json
import os
import sys
from collections import defaultdict
from collections.abc import Hashable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from compare.evidence.exchange import exchange_lines, read_exchange
from compare.evidence.profiles import Event, RunProfile, read_run
from compare.evidence.words import shortest_unique_names
from recipe.command import run_tool
from recipe.errors import UserError
from recipe.files import replace_file

# Events that bear a number: flows (arrows) and asynchronous spans of the Trace Event Format.
WITH_ID = "stfbne"


def merge(profiles: list[RunProfile], align: bool) -> dict[str, Any]:
    """Return the trace of all runs: `ts` in microseconds since the file's beginning.

    Processes and threads are numbered anew, each number used once, since those of two hosts, or of
    Horovod and torch, may be the same; so are the arrows' numbers.
    """
    shifts = [profiles[0].begin - profile.begin if align else 0 for profile in profiles]
    lanes = [(lane, s) for run, s in zip(profiles, shifts, strict=True) for lane in run.lanes]
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
        "otherData": {
            profile.name: {"shifted_by_nanoseconds": shift}
            for profile, shift in zip(profiles, shifts, strict=True)
        },
        "traceEvents": metadata + merged,
    }


def merge_runs(
    runs: Positional[tuple[Path, ...]],
    out: Annotated[Path | None, arg(aliases=["-o"])] = None,
    align: Literal["first-step", "none"] = "first-step",
) -> int:
    """Write the merged file, and list the exchange of gradients.

    Args:
        runs: Run folders with profile/ in them.
        out: The merged file (default: timeline.json in the run's folder; of several runs, in the
            folder that holds them all).
        align: Shift several runs so that their first profiled steps begin together, or leave each
            at the time when it ran.
    """
    if not runs or len({run.resolve() for run in runs}) < len(runs):
        raise UserError("give one run folder or several, none twice")
    names = shortest_unique_names(runs)
    profiles = [read_run(run, name) for run, name in zip(runs, names, strict=True)]
    out = out or Path(os.path.commonpath([run.resolve() for run in runs])) / "timeline.json"
    if out.suffix != ".json" or out.resolve().parent.name == "profile":
        raise UserError(f"{out}: give a name that ends in .json, and lies not among the profiles")
    replace_file(out, json.dumps(merge(profiles, align == "first-step"), separators=(",", ":")))
    print(f"Written: {out} ({out.stat().st_size / 1e6:.1f} MB). Open it at https://ui.perfetto.dev")
    for name, run in zip(names, runs, strict=True):
        if steps := read_exchange(run):
            print("", name, *exchange_lines(steps), sep="\n")
    return 0


main = partial(run_tool, "compare/timeline.py", merge_runs, __doc__, errors=(UserError, OSError))

if __name__ == "__main__":
    sys.exit(main())
