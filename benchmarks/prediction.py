"""Check what compare/predict.py foresees: fit it at 1 and 2 workers, and measure it on more.

    python benchmarks/prediction.py                    measure and predict: 70 minutes, as root
    python benchmarks/prediction.py --hosts            without hosts, which need root
    python benchmarks/prediction.py --table RECORD     predict anew what was measured there

The fit: runs of 1 and 2 workers on this host, and the all-reduce alone between 2, on this host and
on two. Held out: more workers than cores, and 2 to 4 hosts (network namespaces) of one worker each
with links of several rates. All numbers of workers of a training take turns on this host, those of
the fit among them, so that what the machine does in these minutes it does to all; and so do all
trainings of a model between hosts. What fails is recorded as failed, with the reason; the same
command with the same --out measures what is missing.

Writes points.json (the record), table.md and table.json. compare/keep.py keeps them.
"""

import contextlib
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from statistics import median

from benchmarks.checked import FIT, HELD_OUT, RECORD, Point, Record, read, write, write_tables
from benchmarks.programs.trainer import DEFAULTS, RANDOM_IMAGES
from compare.evidence.allreduce_times import read_measurement
from compare.evidence.turns import Block
from compare.plan.blocks import shuffled
from compare.plan.configurations import CONFIGURATIONS
from compare.plan.environment import ROOT
from compare.plan.plan import TRAINERS
from compare.prediction.inputs import Inputs, read_inputs
from compare.prediction.networks import BACKENDS, measured_link
from compare.running.launch import run_to_end, utc_now, utc_stamp
from compare.running.scheduler import PATIENCE, Scheduler, say
from compare.running.sides import MeasurementError, Side
from compare.running.take_turns import State
from recipe.command import RESUMES, run_tool
from recipe.errors import UserError
from recipe.record.fingerprint import cpu_model
from tools import namespaces
from tools.namespaces import Host, HostsError, give_cores, limit_rate

BATCH_SIZE = 8  # of a worker
# Bound by communication, with 46.8 MB of gradients, and by computing, with 9.1 MB.
MODELS = {
    "resnet18": "--arch resnet18 --train-crop-size 32",
    "shufflenet": "--arch shufflenet_v2_x1_0 --train-crop-size 160",
}
# Rounds at a rate (None: one host), and steps of a turn there; on one host so many by all workers
# together, but two at least. At 0.1 Gb/s a step takes up to 6 s, and links vary little.
ROUNDS: dict[float | None, int] = {None: 6, 0.1: 3}
STEPS: dict[float | None, int] = {None: 12, 0.1: 1, 5: 4}
FIT_FLAGS = ["--profile-steps", "8", "--max-steps", "45"]
LIMIT_SECONDS = 240.0  # for a run, for all of a group to start, and for a turn
FITTED = [(1, 1, None), (1, 2, None)]  # hosts, workers on each, rate


@dataclass(frozen=True)
class Settings:
    """What is measured."""

    out: Path = field(default_factory=lambda: Path("runs") / f"prediction-{utc_stamp()}")
    models: tuple[str, ...] = tuple(MODELS)
    engines: tuple[str, ...] = ("ddp", "horovod")
    transports: tuple[str, ...] = ("gloo", "mpi")
    workers: tuple[int, ...] = (1, 2, 3, 4, 6, 8)  # on this host; 1 and 2 are the fit
    hosts: tuple[int, ...] = (2, 3, 4)  # of one worker each
    rates: tuple[float, ...] = (0.1, 0.5, 1, 5)  # Gb/s
    rounds: int | None = None  # of turns; None: 6, between hosts 4, and 3 at 0.1 Gb/s

    def points(self) -> list[Point]:
        """All that there is to measure."""
        sizes: list[tuple[int, int, float | None]] = [(1, n, None) for n in self.workers]
        sizes += [(n, 1, rate) for n, rate in product(self.hosts, self.rates)]
        return [
            Point(model, BATCH_SIZE, engine, transport, *size, FIT if size in FITTED else HELD_OUT)
            for model, engine, transport in product(self.models, self.engines, self.transports)
            for size in sizes
        ]


def main(argv: list[str] | None = None) -> int:
    """Measure and predict what the command line asks for and return the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):  # a time limit ends all in order, as Ctrl-C does
        signal.signal(number, signal.default_int_handler)
    errors = (UserError, HostsError)
    return run_tool(
        "benchmarks/prediction.py", run, __doc__, argv, errors=errors, interrupted=RESUMES
    )


def run(settings: Settings, table: Path | None = None) -> list[str]:
    """Measure, unless --table names a record; predict, and write the table.

    Args:
        settings: What is measured.
        table: Measure nothing: predict anew what this record's points are.
    """
    if table is None:
        measure(settings)
    return [write_tables(table or settings.out)]


def measure(settings: Settings) -> None:
    """Measure what the record in the folder lacks; it is written after each group."""
    if settings.hosts and (missing := namespaces.missing_tools("tc")):
        raise UserError(
            f"needs {', '.join(missing)}: network namespaces stand for hosts with slow links; "
            "--hosts without numbers leaves them out"
        )
    out, began = settings.out.resolve(), time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    cores = {"cpu_model": cpu_model(), "cores": len(os.sched_getaffinity(0))}
    there = read(out) if (out / RECORD).exists() else Record(utc_now(), cores, [])
    points = {point.key: point for point in (*settings.points(), *there.points)}
    groups = dict.fromkeys(map(group_of, points.values()))
    with contextlib.ExitStack() as stack:
        made = list[Host]()
        if settings.hosts:
            keys = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hosts-")), "hosts")
            names = tuple(f"node{number}" for number in range(max(settings.hosts)))
            made = stack.enter_context(namespaces.hosts(keys, names, reach_here=True))
        measure_links(made[:2], out, there)
        for number, name in enumerate(shuffled(groups, 0), start=1):
            minutes = (time.monotonic() - began) / 60
            group = [point for point in points.values() if group_of(point) == name]
            label = f"[{number} of {len(groups)}, {minutes:.0f} min] {name}"
            first = group[0]
            if first.hosts == 1 and first.training not in there.inputs:
                say(f"{label}: runs of 1 and 2 workers, with a profile")
                try:
                    there.inputs[first.training] = fit(first, out / "fit" / name)
                except UserError as error:
                    say(f"{label}: no fit: {error}")
            if all(point.step_seconds for point in group):
                say(f"{label}: is there already")
            else:
                on = made[: first.hosts] if first.hosts > 1 else []
                for point in measure_group(
                    group, on, settings.rounds, out / "blocks" / name, label
                ):
                    points[point.key] = point
            there.points = [*points.values()]
            write(out, there)


def group_of(point: Point) -> str:
    """Those that take turns: on one host all numbers of workers of a training, on several hosts all
    trainings of a model. More at once would not fit into 24 GB."""
    own = f"{point.hosts}-hosts" if point.hosts > 1 else f"{point.engine}-{point.transport}"
    return f"{point.model}-{own}"


def name_of(point: Point) -> str:
    """The side that measures a point; it may measure those of several rates."""
    return f"{point.engine}-{point.transport}-{point.workers}"


def side_of(point: Point, entrance: Sequence[str] = ()) -> Side:
    """What trains at a point; `entrance` leads to its first host."""
    launcher = CONFIGURATIONS[f"{point.engine}-mpirun"]
    hosts = ",".join(f"node{number}:1" for number in range(point.hosts)) if entrance else None
    work = f"{MODELS[point.model]} --batch-size {BATCH_SIZE} --threads 1"
    flags = f"{DEFAULTS} {RANDOM_IMAGES} {work} --transport {point.transport}"
    return Side(
        name=name_of(point),
        launcher=(*entrance, *launcher.launch_words(point.workers, hosts)),
        program=(TRAINERS[point.engine], *flags.split(), "--log-dir", "{folder}"),
        images_per_step=BATCH_SIZE * point.workers,
        ranks=point.workers,
        over_hosts=bool(entrance),
    )


def measure_links(made: list[Host], out: Path, there: Record) -> None:
    """Record the all-reduce alone between two workers, on this host and on these two, as fast as
    they can: seconds of a round, and CPU seconds a byte."""
    for place in ("within", "between") if made else ("within",):
        if f"{place} ddp-gloo" in there.links:
            continue
        say(f"all-reduce between two workers, {place} hosts")
        folder = out / "links" / place
        words = [
            *("python", str(ROOT / "compare" / "collectives.py"), "--backends", *BACKENDS.values()),
            *("--sizes", "4K", "64K", "1M", "16M", "64M", "--wires", "fp32", "--blocks", "1"),
            *("--model", "none", "--out", str(folder / "figures")),
        ]
        if place == "between":
            limit_rate(made, None)
            words = [str(entrance_to(made, out)), *words, "--hosts", "node0:1,node1:1"]
        run_to_end(words, folder, LIMIT_SECONDS, folder / "figures" / "collectives.json")
        measurement = read_measurement(folder / "figures")
        for of in BACKENDS:
            link = measured_link(measurement, *of)
            own = link.latency_seconds, link.cpu_seconds_per_byte
            there.links[f"{place} {'-'.join(of)}"] = own
        write(out, there)


def entrance_to(made: Sequence[Host], folder: Path) -> Path:
    """Give each host its cores, and return a script that runs a command on the first one: a script,
    so that the command is the same in the call that goes on after an interruption."""
    entrance = folder.resolve() / f"on-{made[0].name}.sh"
    entrance.write_text(f'#!/bin/sh\nexec {shlex.join(give_cores(made))} "$@"\n')
    entrance.chmod(0o755)
    return entrance


def fit(point: Point, folder: Path) -> Inputs:
    """What a prediction of this point's training starts from; UserError if a run fails."""
    runs = []
    for workers in (1, 2):
        side, own = side_of(replace(point, workers_per_host=workers)), folder / str(workers)
        command = [*side.command(own), *FIT_FLAGS]
        run_to_end(command, own, LIMIT_SECONDS, own / "run" / "summary.json")
        runs.append(own / "run")
    return read_inputs(runs)


def measure_group(
    group: Sequence[Point], made: list[Host], rounds: int | None, folder: Path, label: str
) -> list[Point]:
    """The points with what was measured, all by turns. A side that fails is left out, and the
    others start anew."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    entrance = [str(entrance_to(made, folder.parent))] if made else []
    sides = {name_of(point): side_of(point, entrance) for point in group}
    failed = dict[str, str]()
    blocks = dict[float | None, Block]()
    while len(failed) < len(sides) and not blocks:
        left = [side for name, side in sides.items() if name not in failed]
        say(f"{label}: starting {', '.join(side.name for side in left)}")
        scheduler = Scheduler(folder, left, LIMIT_SECONDS)
        try:
            with scheduler:
                blocks = take_turns(scheduler, left, group, made, rounds, label)
        except MeasurementError as error:
            late = [side.name for side in left if not scheduler.are(State.PAUSED, side)]
            name = error.side or scheduler.on_turn or (late or [left[-1].name])[0]
            failed[name] = " ".join(str(error).split())[:300]
            say(f"{label}: {name} failed: {error}")
    return [
        replace(point, failed=failed[name_of(point)])
        if name_of(point) in failed
        else measured(point, blocks[point.gbit_per_s])
        for point in group
    ]


def take_turns(
    scheduler: Scheduler, sides: Sequence[Side], group: Sequence[Point], made: list[Host],
    rounds: int | None, label: str,
) -> dict[float | None, Block]:  # fmt: skip
    """Start the sides, and let them take turns at each rate of the group."""
    limit_rate(made, None)
    scheduler.start(*sides)
    blocks = {}
    for rate in dict.fromkeys(point.gbit_per_s for point in group):
        limit_rate(made, rate)
        steps = STEPS.get(rate, 2)
        where = "one host" if rate is None else f"{rate:g} Gb/s"
        paced = [replace(s, steps=steps if made else max(2, steps // s.ranks)) for s in sides]
        turns, _ = scheduler.take_rounds(
            paced,
            rounds or ROUNDS.get(rate, 4),
            PATIENCE,
            lambda line, at=where: say(f"{label}, {at}, {line}"),  # type: ignore[misc]
        )
        counts = {side.name: side.steps for side in paced}
        blocks[rate] = Block(1, (*counts,), tuple(turns), counts, quiet_cores=scheduler.quiet_cores)
    scheduler.weights()  # raises if the ranks of one hold different ones
    return blocks


def measured(point: Point, block: Block) -> Point:
    """The point with its figures, from the turns that count."""
    name = name_of(point)
    turns = block.counted(name)
    seconds = [turn.seconds / block.steps[name] for turn in turns]
    phases = block.phases(name)
    phases.pop("step_seconds", None)
    return replace(
        point, step_seconds=median(seconds), low_seconds=min(seconds), high_seconds=max(seconds),
        turns=len(seconds), phases=phases, failed="",
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
