"""Row 10: does `--wire-format auto` choose the number format that is faster?

Two hosts, each a network namespace of this machine with its part of the cores, train with one
worker each, over links of several rates (`tc ... tbf` on both; as root). At each rate fp32, fp16
and auto of an engine take turns, in each block started anew. An engine's row is the rate at which
auto did worst against the better of the two, with an interval for the worst of all rates.

Which format is the better one at a rate is read from the blocks that auto is measured in. Of two
that are nearly equal that takes the one which noise favoured, so that auto's ratio is biased
slightly down, never up; so does taking the worst of several rates.
"""

import os
import re
import shlex
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.by_turns import QUICK, Contender, make_side, run_block, until_decided
from benchmarks.record import Measured, Options, Row
from compare.evidence.turns import Block, estimate
from compare.plan.blocks import shuffled
from compare.running.scheduler import say
from compare.running.sides import MeasurementError, Side
from tools import namespaces
from tools.namespaces import Host, HostsError

GOAL = 0.97
ENGINES = {"ddp-torchrun": "DDP, Gloo", "horovod-mpi": "Horovod, MPI"}
HOSTS = ("node0", "node1")
START = (
    "mpirun", "-np", "2", "-H", ",".join(HOSTS), "--bind-to", "none", "python",
)  # fmt: skip
CHOICE = re.compile(r"wire format: (fp32|fp16) \(")
WORK = "--arch shufflenet_v2_x1_0 --train-crop-size 96 --batch-size 8 --threads 1"
# Gb/s that each host may send (None: no limit), and how many steps are a turn of half a second.
RATES: dict[float | None, int] = {0.2: 2, 0.5: 2, 1: 4, 2: 4, 5: 5, None: 5}
TURNS = 16  # by default: what disturbs turns explains most of how blocks scatter
AtRate = dict[float | None, tuple[Block, str]]  # a block at each rate, and what auto chose


def measure(options: Options) -> Measured:
    """Measure both engines, or say what is missing."""
    engines = dict(list(ENGINES.items())[: 1 if options.quick else None])
    needs = ", ".join(namespaces.missing_tools("tc"))
    try:
        if not needs:
            with (
                tempfile.TemporaryDirectory(prefix="hosts-") as folder,
                namespaces.hosts(Path(folder) / "hosts", HOSTS, reach_here=True) as made,
            ):
                return measure_on(made, engines, options)
    except HostsError as error:
        needs = f"hosts: {error}"
    say(f"row 10 needs {needs}: two network namespaces stand for hosts with slow links")
    return Measured([replace(empty_row(name), needs=needs) for name in engines.values()])


def empty_row(engine: str) -> Row:
    """An engine's row, without figures."""
    return Row(10, f"auto / better of fp32 and fp16, {engine.split(',')[0]}, worst rate", GOAL)


def cores_of(host: int, hosts: int = len(HOSTS)) -> list[int]:
    """The cores of this machine that one of so many hosts has for itself; where they are fewer than
    the hosts, they are everybody's."""
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // hosts
    return cores[host * each : (host + 1) * each] or cores


def entrance_to(made: Sequence[Host], folder: Path) -> Path:
    """Give each host its cores, and return a script that runs a command on the first one: a script,
    so that the command is the same in the call that goes on after an interruption."""
    # Real hosts do not compete for cores. Where these did, both workers of Horovod at times
    # computed on one core for a whole turn, and their polling threads had the other.
    for number, host in enumerate(made):
        os.sched_setaffinity(host.sshd.pid, cores_of(number, len(made)))
    entrance, own = folder.resolve() / f"on-{made[0].name}.sh", cores_of(0, len(made))
    enter = shlex.join(["taskset", "-c", ",".join(map(str, own)), *made[0].inside()])
    entrance.write_text(f'#!/bin/sh\nexec {enter} "$@"\n')
    entrance.chmod(0o755)
    return entrance


def measure_on(made: list[Host], engines: dict[str, str], options: Options) -> Measured:
    """Measure on these hosts."""
    entrance = entrance_to(made, options.out)
    rates = dict([*RATES.items()][1:2] if options.quick else RATES)
    rounds = options.rounds(TURNS)
    found = Measured([])
    for configuration, engine in engines.items():

        def block_of(number: int, label: str, configuration: str = configuration) -> AtRate:
            place = (configuration, number)
            at_rates = {}
            for rate in shuffled(list(rates), *place):
                namespaces.limit_rate(made, rate)
                sides = sides_at(configuration, rates[rate], (str(entrance), *START), options)
                folder = options.out / "blocks" / f"10-{configuration}" / f"{number}-{rate}"
                order, name = shuffled(sides, *place, rate), f"{label}, {rate_name(rate)}"
                block = run_block(order, rounds, folder, number, name, options.patience)
                at_rates[rate] = block, read_choice(folder / "auto" / "0" / "output.log")
            return at_rates

        def rows_of(blocks: Sequence[AtRate], engine: str = engine) -> list[Row]:
            return [worst_row(engine, blocks, options.confidence)]

        blocks = until_decided(options, f"row 10, {engine}", block_of, rows_of)
        found.rows += rows_of(blocks)
        sides = sides_at(configuration, 1, START, options)  # as a reader may paste them there
        found.sides += [replace(side, name=f"{engine} {side.name}") for side in sides]
        for rate in rates:
            found.blocks[f"10 {engine} {rate_name(rate)}"] = [one[rate][0] for one in blocks]
    return found


def sides_at(
    configuration: str, steps: int, start: tuple[str, ...], options: Options
) -> list[Side]:
    """The sides, two workers each, started by these words."""
    work, real = QUICK if options.quick else WORK, replace(options, quick=False)
    contenders = {
        name: Contender(configuration, workers=2, flags=f"--wire-format {name}")
        for name in ("fp32", "fp16", "auto")
    }
    sides = [make_side(name, one, work, real, steps) for name, one in contenders.items()]
    return [replace(side, launcher=start, over_hosts=True) for side in sides]


def rate_name(rate: float | None) -> str:
    """A rate in words."""
    return "no limit" if rate is None else f"{rate:g} Gb/s"


def read_choice(log: Path) -> str:
    """The wire format that auto said it took."""
    found = CHOICE.search(log.read_text(errors="replace"))
    if found is None:
        raise MeasurementError(f"{log}: auto does not say what it chose")
    return found[1]


def worst_row(engine: str, blocks: Sequence[AtRate], confidence: float) -> Row:
    """An engine's row: the rate at which auto did worst by its point estimate, and notes on all.

    Its interval reaches from the least of the rates' lower ends to the least of their upper ends,
    and so holds for the worst of all rates. The lower ends need no correction: the least of them is
    above the worst ratio only if that ratio's own one is. Of the upper ends any may be too low,
    and they are corrected for the number of rates (Bonferroni).
    """
    rows, notes = {}, []
    for rate in sorted(blocks[0], key=lambda rate: rate or float("inf")):
        at_rate = [one[rate][0] for one in blocks]
        chosen = Counter(one[rate][1] for one in blocks)
        fp16 = estimate(at_rate, {"fp16": 1, "fp32": -1}).ratio
        better = "fp16" if fp16 > 1 else "fp32"
        row = empty_row(engine).compared(at_rate, "auto", better, confidence=confidence)
        wide = 1 - (1 - confidence) / len(blocks[0])
        corrected = estimate(at_rate, {"auto": 1, better: -1}, confidence=wide)
        rows[rate] = replace(row, high=corrected.high)
        interval = f" ({row.low:.3f} – {row.high:.3f})" if row.low and row.high else ""
        took = " and ".join(f"{name} in {number}" for name, number in sorted(chosen.items()))
        notes += [
            f"{rate_name(rate)}: {row.value:.3f}{interval}; auto took {took} of {len(blocks)} "
            f"starts; fp16 / fp32 {fp16:.3f}",
            *row.notes,
        ]
    worst = min(rows, key=lambda rate: rows[rate].value or 0.0)
    return replace(
        rows[worst],
        low=min((row.low for row in rows.values() if row.low is not None), default=None),
        high=min((row.high for row in rows.values() if row.high is not None), default=None),
        notes=(f"1 worker on each of 2 hosts, {engine}; worst: {rate_name(worst)}", *notes),
    )
