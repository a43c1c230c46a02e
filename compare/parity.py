"""Compare what two runs computed, step by step: losses, gradients, weights, BatchNorm's buffers.

    python compare/parity.py RUN_A RUN_B      two recorded runs, made with --tensor-steps N
    python compare/parity.py --ranks RUN      the ranks of one run with each other
    python compare/parity.py                  both engines, run now, on the embedded digits
    python compare/parity.py --workers 2 --steps 5 -- --arch resnet18 --data IMAGENET

Distances. *ulps*: how many steps between neighbouring floating-point numbers of the tensor's type
lie between two values, largest over a tensor; -0 and +0 are 0 apart (equal, but not bit-equal).
*relative*: max|a - b| / max(max|a|, max|b|) of a tensor, for next to zero, where rounding is many
ulps and means nothing. NaN and infinities are equal to their like only, and else beyond any
tolerance. A tensor is within the tolerance if it is by --max-ulps or by --relative.

Exit code: 0 equal or within the tolerance, 1 diverged, 2 a mistake in what was asked.
"""

import argparse
import dataclasses
import math
import sys
import textwrap
from pathlib import Path

import msgspec
from tabulate import tabulate

from compare.errors import run_main
from compare.evidence.parity import Pair, Parity, compare_ranks, compare_runs, numbered
from compare.plan.configurations import CONFIGURATIONS, DEFAULT_CONFIGURATIONS
from compare.plan.options import positive
from compare.plan.plan import RESERVED_FLAGS, Plan, Run
from compare.running.launch import start_and_wait, utc_stamp
from compare.running.tools import check_tools
from recipe.errors import UserError
from recipe.flags import flag_name

TAIL_LINES = 40  # of a failed run's output that are shown; torchrun's own end takes 30
DEFAULT_STEPS = 5
WIDTH = 100  # columns


def run_both(options: argparse.Namespace) -> tuple[Path, Path]:
    """Run two configurations with traces, one after the other, and return their run folders."""
    configurations = [CONFIGURATIONS[name] for name in options.configurations]
    check_tools(Plan(configurations=tuple(options.configurations), workers=(options.workers,)))
    folder = options.out or Path("runs") / f"parity-{utc_stamp()}"
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty: take another --out DIR")
    folders = []
    for number, configuration in enumerate(configurations):
        # A configuration against itself: two folders.
        log_dir = folder / "again" if number and configuration == configurations[0] else folder
        # Of flags that are given twice the trainers take the last. As many threads as each engine's
        # rank gets by the trainers' own rule: with equal numbers of workers that is equal.
        arguments = (
            "--keep-checkpoints", "0", *options.trainer_arguments, *configuration.arguments,
            "--tensor-steps", str(options.steps), "--max-steps", str(options.steps),
        )  # fmt: skip
        run = Run(0, configuration, options.workers, None, arguments=arguments)
        label = f"{run.name}, {options.steps} steps, into {log_dir / run.name}"
        print(label, file=sys.stderr)
        outcome = start_and_wait(run, folder, options.timeout, label, log_dir=log_dir)
        if outcome.status != "completed":
            output = (log_dir / run.name / "output.log").read_text(errors="replace")
            tail = "\n".join(output.splitlines()[-TAIL_LINES:])
            raise UserError(
                f"{run.name} {outcome.status} (exit code {outcome.exit_code}); its output ends:\n"
                f"{tail}"
            )
        folders.append(log_dir / run.name)
    return folders[0], folders[1]


def main(argv: list[str] | None = None) -> int:
    """Compare what the command line asks for and return the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    return run_main("compare/parity.py", lambda: compare(parse_options(argv)))


def compare(options: argparse.Namespace) -> int:
    tolerance = (options.max_ulps, options.relative)
    if options.ranks:
        parity = compare_ranks(options.ranks, *tolerance)
    else:
        run_a, run_b = options.runs or run_both(options)
        parity = compare_runs(run_a, run_b, *tolerance)
    print(json_report(parity) if options.json else text_report(parity))
    return 1 if parity.diverged else 0


def text_report(parity: Parity) -> str:
    """Return the result for a terminal, at most 100 columns wide."""
    told = [f"{parity.a} against {parity.b}: {parity.compared}"]
    told += [f"not compared: {missing}" for missing in parity.not_compared]
    rows = [
        [name, kind.tensors, kind.bit_equal, kind.unequal,
         kind.beyond if kind.judged else "not judged",
         distance_text(kind.most_ulps.distance.ulps) if kind.most_ulps else "0",
         distance_text(kind.most_relative.distance.relative) if kind.most_relative else "0"]
        for name, kind in parity.kinds.items()
    ]  # fmt: skip
    headers = ["kind", "tensors", "bit-equal", "unequal", "beyond", "most ulps", "most relative"]
    alignment = ("left", *["right"] * 6)
    table = tabulate(rows, headers, disable_numparse=True, colalign=alignment).splitlines()
    after = [
        f"{name}, most ulps: {place_text(kind.most_ulps)}"
        for name, kind in parity.kinds.items()
        if kind.most_ulps
    ]
    if parity.final_weights:
        after.append(f"final weights of the whole runs: {parity.final_weights}")
    after += [f"the settings differ: {setting}" for setting in parity.settings] + parity.why
    if first := parity.first_divergence:
        head = "First divergence" if parity.exact else "First beyond the tolerance"
        after.append(f"{head}: {first.kind}, {place_text(first)}")
    tolerance = "" if parity.exact else f" ({parity.max_ulps} ulps or {parity.relative:g} relative)"
    after.append(f"Result: {parity.verdict}{tolerance}")
    return "\n".join([*wrapped(told), "", *table, "", *wrapped(after)])


def wrapped(texts: list[str]) -> list[str]:
    return [
        line
        for text in texts
        for line in textwrap.wrap(text, WIDTH, subsequent_indent="    ", break_on_hyphens=False)
    ]


def distance_text(distance: float | None) -> str:
    if distance is None:
        return "no number"
    return f"{distance:,}" if isinstance(distance, int) and distance < 10**6 else f"{distance:.2e}"


def place_text(pair: Pair) -> str:
    """Return where two tensors differ, and by how much."""
    where = f"step {pair.step}" + f", layer {pair.layer}" * bool(pair.layer)
    where += f", {numbered('rank', pair.ranks)}" * (pair.ranks != [-1])
    ulps, relative = pair.distance.ulps, pair.distance.relative
    far = "" if ulps is None else f" ({distance_text(ulps)} ulps at most, {relative:.2e} relative)"
    return f"{where}: {pair.distance.what}{far}"


def json_report(parity: Parity) -> str:
    """Return the result as JSON; a distance that no number can say is null."""
    judged = {"verdict": parity.verdict, "diverged": parity.diverged}
    text = msgspec.json.encode({**dataclasses.asdict(parity), **judged})
    return msgspec.json.format(text, indent=2).decode()


def parse_options(argv: list[str]) -> argparse.Namespace:
    """Read the flags; what stands after the first `--` is the trainers'."""
    own, trainer = argv, list[str]()
    if "--" in argv:
        own, trainer = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    title, text = (__doc__ or "").split("\n\n", 1)
    parser = argparse.ArgumentParser(
        prog="python compare/parity.py",
        usage="python compare/parity.py [RUN_A RUN_B | --ranks RUN] [flags] [-- trainers' flags]",
        description=title,
        epilog=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("runs", nargs="*", type=Path, metavar="RUN", help="two run folders; none: both engines run")
    add("--ranks", type=Path, metavar="RUN", help="compare the ranks of this run with each other")
    add("--max-ulps", type=not_negative_int, default=0, metavar="U",
        help="tolerance in ulps (default: 0)")  # fmt: skip
    add("--relative", type=not_negative, default=0.0, metavar="R",
        help="tolerance as a share of a tensor's largest value (default: 0)")  # fmt: skip
    add("--json", action="store_true", help="print the result as JSON")
    live = parser.add_argument_group("without run folders: both engines run now")
    names = ", ".join(CONFIGURATIONS)
    live.add_argument("--configurations", nargs=2, metavar="NAME", choices=CONFIGURATIONS,
                      help=f"two of {names} (default: {' '.join(DEFAULT_CONFIGURATIONS)})"
                      )  # fmt: skip
    live.add_argument("--workers", type=positive, metavar="N", help="processes (default: 2)")
    live.add_argument("--steps", type=positive, metavar="N",
                      help=f"steps that are traced (default: {DEFAULT_STEPS})")  # fmt: skip
    live.add_argument("--timeout", type=positive, metavar="SECONDS",
                      help="a run that takes longer is ended (default: 1800)")  # fmt: skip
    live.add_argument("--out", type=Path, metavar="DIR",
                      help="where the runs are written (default: runs/parity-<UTC time>)"
                      )  # fmt: skip
    options = parser.parse_args(own)
    options.trainer_arguments = trainer
    check_options(options)
    options.configurations = options.configurations or list(DEFAULT_CONFIGURATIONS)
    options.workers = options.workers or 2
    options.steps = options.steps or DEFAULT_STEPS
    options.timeout = options.timeout or 1800
    return options


def check_options(options: argparse.Namespace) -> None:
    """Raise UserError about flags that contradict each other."""
    only_live = {
        "--configurations": options.configurations, "--workers": options.workers,
        "--steps": options.steps, "--timeout": options.timeout, "--out": options.out,
        "flags after --": options.trainer_arguments,
    }  # fmt: skip
    given = [name for name, value in only_live.items() if value]
    if options.ranks and options.runs:
        raise UserError("--ranks compares the ranks of one run: leave the other folders out")
    if len(options.runs) not in (0, 2):
        raise UserError(
            f"{len(options.runs)} run folder(s) given: give two to compare them, one with --ranks "
            "to compare its ranks, or none to run both engines now"
        )
    if (options.runs or options.ranks) and given:
        raise UserError(f"{given[0]}: only without run folders, when the engines run now")
    for flag in (*RESERVED_FLAGS, "--tensor-steps", "--max-steps"):
        if flag in map(flag_name, options.trainer_arguments):
            raise UserError(
                f"{flag} cannot be passed to the trainers: --steps and --out before the -- say how "
                "long the runs are and where they are written, and each starts from nothing"
            )


def not_negative_int(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return value


def not_negative(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a finite number from 0 on")
    return value


if __name__ == "__main__":
    sys.exit(main())
