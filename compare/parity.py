"""Compare what two runs computed, step by step: losses, gradients, weights, BatchNorm's buffers.

    python compare/parity.py RUN_A RUN_B      two recorded runs, made with --tensor-steps N
    python compare/parity.py --ranks RUN      the ranks of one run with each other
    python compare/parity.py                  both engines, run now, on the embedded digits
    python compare/parity.py --workers 2 --steps 5 -- --arch resnet18 --data IMAGENET

Distances. *ulps*: the number of steps from one floating-point number of the tensor's type to the
next that lie between two values, the largest of a tensor; -0 and +0 are 0 apart (equal, but not
bit-equal). *relative*: max|a - b| / max(max|a|, max|b|) of a tensor. It is for values near zero,
where rounding amounts to many ulps and means nothing. NaN and infinities equal only themselves, and
otherwise exceed any tolerance. A tensor must be within --max-ulps or within --relative.

Exit code: 0 equal or within the tolerance, 1 diverged, 2 wrong usage.
"""

import math
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec
from tabulate import tabulate
from tyro.conf import Positional

from compare.evidence.parity import Parity, compare_ranks, compare_runs
from compare.plan.configurations import CONFIGURATIONS, DEFAULT_CONFIGURATIONS
from compare.plan.plan import Plan, Words
from compare.plan.plan_file import check_plan, split_words_at_dashes
from compare.running.checks import check_tools
from compare.running.launch import shown_tail, start_and_wait, utc_stamp
from recipe.command import run_tool
from recipe.errors import UserError, refuse
from recipe.files import json_for_readers


@dataclass(frozen=True)
class Live:
    """Used without run folders: both engines run now. Trainers' flags follow a --."""

    # Names of two configurations of compare/run.py.
    configurations: tuple[str, str] = DEFAULT_CONFIGURATIONS
    workers: int = 2  # number of processes
    steps: int = 5  # number of traced steps
    timeout: int = 1800  # seconds after which a run is ended
    out: Path | None = None  # folder for the runs (default: runs/parity-<UTC time>)


def main(argv: list[str] | None = None) -> int:
    """Compare what the command line asks for and return the exit code."""
    words, trainer_flags = split_words_at_dashes(sys.argv[1:] if argv is None else argv)
    return run_tool(
        "compare/parity.py",
        partial(compare, trainer_flags),
        __doc__,
        words,
    )


def compare(
    trainer_flags: list[str],
    runs: Positional[tuple[Path, ...]] = (),
    ranks: Path | None = None,
    max_ulps: int = 0,
    relative: float = 0.0,
    json: bool = False,
    live: Live = Live(),
) -> int:
    """Compare two runs, or the ranks of one, print the result, and return the exit code.

    Args:
        trainer_flags: Trainer flags for runs that are started now.
        runs: Two run folders; without any, both engines run now.
        ranks: Compare the ranks of this run with each other.
        max_ulps: Tolerance in ulps.
        relative: Tolerance as a share of a tensor's largest value.
        json: Print the result as JSON.
        live: How both engines run now.
    """
    refuse(
        (
            max_ulps < 0 or not 0 <= relative < math.inf,
            "--max-ulps and --relative: give finite numbers that are not negative",
        ),
        (
            len(runs) not in (0, 2) or (runs and ranks),
            f"{len(runs)} run folder(s) given: give two to compare them, only --ranks RUN to "
            "compare the ranks of one, or none to run both engines now",
        ),
        (
            (runs or ranks) and (trainer_flags or live != Live()),
            "--configurations, --workers, --steps, --timeout, --out and trainers' flags: leave "
            "them out with run folders; they are for engines that run now",
        ),
        (
            min(live.workers, live.steps, live.timeout) < 1,
            "--workers, --steps and --timeout: give positive whole numbers",
        ),
    )
    if ranks:
        parity = compare_ranks(ranks, max_ulps, relative)
    else:
        parity = compare_runs(runs or run_both(live, trainer_flags), max_ulps, relative)
    print(json_report(parity) if json else text_report(parity))
    return 1 if parity.verdict == "diverged" else 0


def run_both(live: Live, trainer_flags: list[str]) -> list[Path]:
    """Run two configurations with traces, one after the other, and return their run folders."""
    steps = str(live.steps)
    arguments = ("--keep-checkpoints", "0", "--tensor-steps", steps, "--max-steps", steps)
    plan = Plan(
        configurations=tuple(dict.fromkeys(live.configurations)),
        measure="runs",
        workers=(live.workers,),
        # If a flag is given twice, the last value counts.
        trainer_arguments=Words((*arguments, *trainer_flags)),
    )
    check_plan(plan)
    check_tools(plan)
    folder = live.out or Path("runs") / f"parity-{utc_stamp()}"
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty: give another --out DIR")
    folders: list[Path] = []
    for number, name in enumerate(live.configurations, start=1):
        run = plan.run(1, plan.cases[0], CONFIGURATIONS[name], live.workers)
        run = replace(run, block=number)  # both have the seed of block 1
        folders.append(folder / run.folder)
        label = f"{run.name}, {live.steps} steps, into {folders[-1]}"
        print(label, file=sys.stderr)
        outcome = start_and_wait(run, folder, live.timeout, label)
        if outcome.status != "completed":
            raise UserError(
                f"{run.name} {outcome.status} (exit code {outcome.exit_code}):\n"
                f"{shown_tail(folders[-1])}"
            )
    return folders


def text_report(parity: Parity) -> str:
    """Return the result as text for a terminal."""
    rows = [[name, *vars(kind).values()] for name, kind in parity.kinds.items()]
    headers = ["kind", "tensors", "bit-equal", "beyond", "from step", "most ulps", "most relative"]
    table = tabulate(rows, headers, intfmt=",", floatfmt=".2e")
    lines = [f"{parity.a} against {parity.b}: {parity.compared}", "", table, "", *parity.notes]
    if parity.final_weights:
        lines.append(f"final weights of the whole runs: {parity.final_weights}")
    if first := parity.first_divergence:
        layer = f", layer {first.layer}" if first.layer else ""
        ranks = f", rank {', '.join(map(str, first.ranks))}" if first.ranks != [-1] else ""
        far = f"{first.values} ({first.ulps:,} ulps, {first.relative:.2e} relative)"
        lines.append(f"First divergence: {first.kind}, step {first.step}{layer}{ranks}: {far}")
    if parity.hint:
        lines.append(f"Hint: {parity.hint}")
    tolerance = f"tolerance: {parity.max_ulps} ulps or {parity.relative:g} relative"
    return "\n".join([*lines, f"Result: {parity.verdict} ({tolerance})"])


def json_report(parity: Parity) -> str:
    """Return the result as JSON; an infinite distance is null."""
    judged = {**vars(parity), "verdict": parity.verdict, "hint": parity.hint}
    return json_for_readers(msgspec.to_builtins(judged))


if __name__ == "__main__":
    sys.exit(main())
