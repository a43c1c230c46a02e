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
import itertools
import json
import os
import sys
from collections.abc import Hashable
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
    numbers: dict[Hashable, int] = {}
    metadata: list[Event] = []
    merged: list[Event] = []

    def number(*key: Hashable) -> int:
        return numbers.setdefault(key, len(numbers) + 1)

    def name(kind: str, place: int, text: str, pid: int, tid: int = 0) -> None:
        for what, args in (("name", {"name": text}), ("sort_index", {"sort_index": place})):
            head = {"ph": "M", "name": f"{kind}_{what}", "pid": pid, "tid": tid}
            metadata.append({**head, "args": args})

    for order, (lane, shift) in enumerate(lanes):
        pid = number(order)
        name("process", order, lane.name, pid)
        for place, tid in enumerate(dict.fromkeys(event["tid"] for event in lane.events)):
            thread = lane.threads.get(tid, str(tid or "profiler"))
            name("thread", place, thread, pid, number(order, tid))
        for event in lane.events:
            new = event | {"pid": pid, "tid": number(order, event["tid"])}
            new["ts"] = (event["ts"] + shift - origin) / 1000
            if "dur" in event:
                new["dur"] = event["dur"] / 1000
            if "id" in event and event["ph"] in WITH_ID:
                # An arrow may lead from a rank's CPU to its GPU, but not to another rank.
                new["id"] = number(str(lane.path), event.get("cat"), event["id"])
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


def main(argv: list[str] | None = None) -> int:
    """Merge what the command line names and return the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    return run_main("compare/timeline.py", lambda: merge_runs(parse_options(argv)))


def merge_runs(options: argparse.Namespace) -> int:
    """Write the merged file and the picture, and say what they hold."""
    if len({run.resolve() for run in options.runs}) < len(options.runs):
        raise UserError("a run folder is given twice")
    runs = dict(zip(shortest_unique_names(options.runs), options.runs, strict=True))
    profiles = [read_run(run, name) for name, run in runs.items()]
    folder = Path(os.path.commonpath([run.resolve() for run in options.runs]))
    out = options.out or folder / "timeline.json"
    if out.suffix != ".json" or out.resolve().parent in [
        (r / "profile").resolve() for r in runs.values()
    ]:
        raise UserError(f"{out}: give a name that ends in .json, and lies not among the profiles")
    align = len(profiles) > 1 and options.align == "first-step"
    write_whole(out, json.dumps(merge(profiles, align), separators=(",", ":")))
    for lane in itertools.chain.from_iterable(profile.lanes for profile in profiles):
        threads = len({event["tid"] for event in lane.events})
        print(f"{lane.name}: {len(lane.events):,} events on {threads} thread(s)")
        print("".join(f"    note: {note}\n" for note in lane.notes), end="")
    for profile in profiles:
        if not profile.steps:
            print(f"{profile.name}: no step is marked; it begins with its first event")
    if align:
        print("The runs are shifted so that their first profiled steps begin together.")
    print(f"Written: {out} ({out.stat().st_size / 1e6:.1f} MB). Open it at https://ui.perfetto.dev")
    exchanges = {name: exchange for name, run in runs.items() if (exchange := read_exchange(run))}
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


def parse_options(argv: list[str]) -> argparse.Namespace:
    """Read the flags."""
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
