"""Row 10: does `--wire-format auto` choose the number format that is faster?

    python benchmarks/wire_format.py        as root, with ip, tc, sshd and ssh on the machine

Two hosts, each a network namespace of this machine, train with one worker each, over links of
several rates (`tc ... tbf` on both). At each rate fp32, fp16 and auto of an engine take turns. fp32
and fp16 stay up through all rates of a block; auto, which measures and decides as it starts, is
started anew at each rate. An engine's row is the rate at which auto did worst against the better of
the two, with an interval for the worst of all rates; the record has all, and wire_format.svg beside
it shows the ratio of fp16 to fp32 over the rate, and what auto chose.

Which format is the better one at a rate is read from the blocks that auto is measured in. Of two
that are nearly equal that takes the one which noise favoured, so that auto's ratio is biased
slightly down, never up; so does taking the worst of several rates.
"""

import itertools
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.harness import bench, namespaces
from benchmarks.harness.blocks import OPEN, until_decided
from benchmarks.harness.namespaces import Host, HostsError
from benchmarks.harness.sides import Workload, trainer_side
from benchmarks.harness.workloads import QUICK
from compare.evidence.paired import CONFIDENCE, Estimate
from compare.evidence.records import ENGINES
from compare.evidence.turns import Block, Turn, estimate, estimate_value, throughput
from compare.page.chart import (
    DASHES,
    INK,
    MARKERS,
    Chart,
    Key,
    Scale,
    linear,
    series_colour,
    series_shape,
    standalone,
)
from compare.plan.blocks import drawn
from compare.running.sides import MeasurementError, Side
from compare.running.stage import Stage
from compare.running.turns import Taker, finished_block, in_turn, origin, say
from recipe.files import replace_file, write_json

GOAL = 0.97
FORMATS = ("fp32", "fp16")
TRANSPORTS = {"ddp": "Gloo", "horovod": "MPI"}
TURNS = 16  # by default: what disturbs turns explains most of how blocks scatter
HOSTS = ("node0", "node1")
START = (
    "mpirun", "-np", "2", "-H", ",".join(HOSTS), "--bind-to", "none", "-x", "PYTHONPATH", "python",
)  # fmt: skip
CHOICE = re.compile(r"wire format: (fp32|fp16) \((.*?)\)")
NO_LIMIT_AT = 20.0  # Gb/s: where the plot shows links without a limit


@dataclass(frozen=True)
class Rate:
    """What each host may send, and how many steps are a turn of about half a second there."""

    gigabits: float | None  # 10^9 bits per second; None: no limit
    steps: int

    def __str__(self) -> str:
        return "no limit" if self.gigabits is None else f"{self.gigabits:g} Gb/s"

    @property
    def word(self) -> str:
        """The rate in a folder's name."""
        return str(self).replace(" ", "-").replace("/", "p")


RATES = (Rate(0.2, 2), Rate(0.5, 2), Rate(1, 4), Rate(2, 4), Rate(5, 5), Rate(None, 5))
QUICK_RATES = (Rate(0.5, 3),)


@dataclass(frozen=True)
class AtRate:
    """What an engine did at a rate."""

    rate: Rate
    better: str  # of FORMATS
    fp16: Estimate  # speed with fp16 / with fp32
    auto: bench.Row  # against the better one
    chosen: tuple[str, ...]  # by auto, a block each
    images_per_second: dict[str, float]

    def told(self) -> str:
        """The figures in words."""
        row = self.auto
        interval = ""
        if row.low is not None and row.high is not None:
            interval = f" ({row.low:.3f} – {row.high:.3f})"
        counts = Counter(self.chosen)
        choice = " and ".join(f"{name} in {counts[name]}" for name in FORMATS if counts[name])
        return (
            f"{self.rate}: {row.value:.3f}{interval}; auto took {choice} of {len(self.chosen)} "
            f"starts; fp16 / fp32 {self.fp16.ratio:.3f}"
        )


def measure(options: bench.Options) -> bench.Measured:
    """Measure both engines, or say what is missing."""
    engines: Sequence[str] = ["ddp"] if options.quick else list(ENGINES)
    if missing := namespaces.missing_tools("tc"):
        return not_measured(engines, ", ".join(missing))
    folder = tempfile.TemporaryDirectory(prefix="hosts-")
    try:
        with folder as made_in, namespaces.hosts(Path(made_in) / "hosts", HOSTS) as made:
            namespaces.limit_rate(made, 1.0)  # or there is no need to begin
            share_cores(made)
            return measure_on(made, engines, options)
    except HostsError as error:
        return not_measured(engines, f"hosts: {error}")


def cores_of(host: int) -> list[int]:
    """The cores of this machine that this host has for itself; a single core is everybody's."""
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // len(HOSTS)
    return cores[host * each : (host + 1) * each] or cores


def share_cores(made: Sequence[Host]) -> None:
    """What ssh starts on a host runs on that host's cores.

    Real hosts do not compete for cores. Where these did, both workers of Horovod at times computed
    on one core for a whole turn, and their polling threads had the other.
    """
    for number, host in enumerate(made):
        os.sched_setaffinity(host.sshd.pid, cores_of(number))


def not_measured(engines: Sequence[str], needs: str) -> bench.Measured:
    """Rows that say what they need."""
    say(f"row 10 needs {needs}: two network namespaces stand for hosts with slow links")
    return bench.Measured([replace(a_row(engine), needs=needs) for engine in engines])


def a_row(engine: str, rate: str = "worst rate") -> bench.Row:
    """An engine's row, without figures."""
    return bench.Row(10, f"auto / better of fp32 and fp16, {ENGINES[engine]}, {rate}", GOAL)


def measure_on(made: list[Host], engines: Sequence[str], options: bench.Options) -> bench.Measured:
    """Measure on these hosts."""
    rates: Sequence[Rate] = RATES
    workload = Workload("shufflenet_v2_x1_0", 96, 8)
    rounds = options.turns if options.turns_given else TURNS
    if options.quick:
        workload, rates, rounds = QUICK, QUICK_RATES, options.turns
    blocks: dict[str, list[Block]] = {}
    found: dict[str, list[AtRate]] = {}
    sides: list[Side] = []
    for engine in engines:
        one = EngineBlocks(engine, workload, made, rates, rounds, options)
        measured = until_decided(options, f"10 {engine}", one.finished, one.run, one.is_decided)
        found[engine] = one.at_rates(measured)
        sides += [replace(side, name=f"{engine} {side.name}") for side in one.sides_at(rates[0])]
        for rate in rates:
            blocks[f"10 {engine} {rate}"] = [block[rate][0] for block in measured]
    replace_file(options.out / "wire_format.svg", standalone(draw(found)))
    rows = [summary(engine, at_rates, workload) for engine, at_rates in found.items()]
    details = {engine: [as_dict(one) for one in at_rates] for engine, at_rates in found.items()}
    return bench.Measured(rows, sides, blocks, details)


def a_side(
    engine: str, wire_format: str, workload: Workload, steps: int, name: str | None = None
) -> Side:
    """An engine's two workers with a wire format, as started on the first host."""
    side = trainer_side(
        name or wire_format,
        engine,
        workload,
        steps,
        workers=len(HOSTS),
        flags=("--wire-format", wire_format),
    )
    return replace(side, launcher=START, over_hosts=True)


# The turns at each rate, and what auto chose there.
RateBlocks = dict[Rate, tuple[Block, str]]


@dataclass
class EngineBlocks:
    """The blocks of an engine. In each fp32 and fp16 are started once, auto once at each rate."""

    engine: str
    workload: Workload
    made: list[Host]
    rates: Sequence[Rate]
    rounds: int
    options: bench.Options

    def folder(self, number: int) -> Path:
        return self.options.out / "blocks" / f"10-{self.engine}" / f"block-{number}"

    def sides_at(self, rate: Rate) -> list[Side]:
        """The sides at a rate, without what differs from one call to the next."""
        names = (*FORMATS, "auto")
        return [a_side(self.engine, name, self.workload, rate.steps) for name in names]

    def finished(self, number: int) -> RateBlocks | None:
        """The block that an interrupted call has left, if it has all rates."""
        found = {}
        for rate in self.rates:
            folder = self.folder(number) / auto_at(rate)
            block = finished_block(self.sides_at(rate), self.rounds, folder)
            if block is None:
                return None
            found[rate] = block, read_choice(folder / "0" / "output.log")
        return found

    def run(self, number: int, about: str) -> RateBlocks:
        """Measure a block; the rates come in random order."""
        found = {}
        place = (self.options.seed, self.engine, number)
        sides = [self.side(wire_format) for wire_format in drawn(FORMATS, *place)]
        with Stage(self.folder(number)) as stage:
            say(f"{about}: starting {' and '.join(FORMATS)}")
            namespaces.limit_rate(self.made, None)
            stage.start(*sides)
            for rate in drawn(self.rates, *place, "rates"):
                found[rate] = self.measure_at(rate, stage, sides, number, about)
        return found

    def at_rates(self, measured: Sequence[RateBlocks]) -> list[AtRate]:
        """What the blocks come to at each rate."""
        found = []
        for rate in self.rates:
            blocks, chosen = zip(*(block[rate] for block in measured), strict=True)
            confidence, num_rates = self.options.confidence, len(self.rates)
            found.append(at_rate(self.engine, rate, blocks, chosen, num_rates, confidence))
        return found

    def is_decided(self, measured: Sequence[RateBlocks]) -> bool:
        """Whether the worst rate has a verdict."""
        return summary(self.engine, self.at_rates(measured), self.workload).verdict != OPEN

    def side(self, wire_format: str, name: str | None = None) -> Side:
        """A side on the first host, whose turns' length the rate decides."""
        side = a_side(self.engine, wire_format, self.workload, 1, name)
        cores = ",".join(map(str, cores_of(0)))
        return replace(side, launcher=("taskset", "-c", cores, *self.made[0].inside(*START)))

    def measure_at(
        self, rate: Rate, stage: Stage, sides: list[Side], number: int, about: str
    ) -> tuple[Block, str]:
        """Start auto at this rate, let all take turns, end auto."""
        load = os.getloadavg()[0]
        namespaces.limit_rate(self.made, rate.gigabits)
        auto = self.side("auto", auto_at(rate))
        stage.start(auto)
        for side in sides:  # their connections have known another rate
            stage.take_turn(replace(side, steps=2), 0)
        place = (self.options.seed, self.engine, number, rate)
        order = drawn([replace(side, steps=rate.steps) for side in (*sides, auto)], *place)
        taker = Taker(stage, self.options.patience, spare=self.rounds * len(order))
        turns: list[Turn] = []
        for round_ in range(self.rounds):
            for side in in_turn(order, round_):
                turn = taker.take(side, round_)
                turns.append(replace(turn, side="auto") if side.name == auto.name else turn)
        stage.end(auto)
        folder = stage.folder / auto.name
        choice = read_choice(folder / "0" / "output.log")
        names = ["auto" if side.name == auto.name else side.name for side in order]
        block = Block(
            number, tuple(names), round(load, 2), tuple(turns), quiet_cores=stage.quiet_cores
        )
        made_of = origin(self.sides_at(rate), self.rounds)
        write_json(folder / "block.json", {**made_of, **asdict(block)})
        speeds = [f"{name} {block.median(name, throughput):.4g}" for name in (*FORMATS, "auto")]
        say(f"{about}, {rate}: {', '.join(speeds)} images/s; auto took {choice}")
        return block, choice


def auto_at(rate: Rate) -> str:
    """Auto's folder at a rate, which also keeps the rate's block."""
    return f"auto-{rate.word}"


def read_choice(log: Path) -> str:
    """The wire format that auto said it took."""
    found = CHOICE.search(log.read_text(errors="replace"))
    if found is None:
        raise MeasurementError(f"{log}: auto does not say what it chose")
    return found[1]


def at_rate(
    engine: str,
    rate: Rate,
    blocks: Sequence[Block],
    chosen: Sequence[str],
    num_rates: int = 1,
    confidence: float = CONFIDENCE,
) -> AtRate:
    """What the blocks at a rate come to.

    Auto's interval is one of `num_rates`, whose least lower and least upper end are to hold for
    the worst rate. The lower ends need no correction: the least of them is above the worst ratio
    only if that ratio's own one is. Of the upper ends any may be too low (Bonferroni).
    """
    fp16 = estimate(blocks, "fp16", "fp32")
    better = "fp16" if fp16.ratio > 1 else "fp32"
    row = a_row(engine, str(rate)).compared(blocks, "auto", better, confidence=confidence)
    wide = estimate(blocks, "auto", better, confidence=1 - (1 - confidence) / num_rates)
    row = replace(row, high=wide.high)
    speeds = {name: estimate_value(blocks, name).ratio for name in (*FORMATS, "auto")}
    return AtRate(rate, better, fp16, row, tuple(chosen), speeds)


def worst(found: Sequence[AtRate]) -> AtRate:
    """The rate at which auto did worst, by its point estimate."""

    def value(one: AtRate) -> float:
        assert one.auto.value is not None
        return one.auto.value

    return min(found, key=value)


def summary(engine: str, found: Sequence[AtRate], workload: Workload) -> bench.Row:
    """An engine's row: its worst rate, and notes on all of them.

    Its interval reaches from the least of their lower ends to the least of their upper ends
    (at_rate says why that holds).
    """
    least = worst(found)
    where = f"worst of {len(found)} rates" if len(found) > 1 else str(least.rate)
    lows = [one.auto.low for one in found if one.auto.low is not None]
    highs = [one.auto.high for one in found if one.auto.high is not None]
    row = replace(
        least.auto,
        name=a_row(engine, where).name,
        low=min(lows, default=None),
        high=min(highs, default=None),
    )
    notes = [f"{workload}, 1 worker on each of 2 hosts, {TRANSPORTS[engine]}", *row.notes]
    notes += [f"the worst is {least.rate}", *(one.told() for one in found)]
    if len(found) > 1:
        notes.append(f"upper ends are corrected for {len(found)} rates (Bonferroni)")
    at = crossover(found)
    notes.append("fp16 pays " + (f"below some {at:.2g} Gb/s" if at else no_crossover(found)))
    return replace(row, notes=tuple(notes))


def crossover(found: Sequence[AtRate]) -> float | None:
    """The rate, in Gb/s, up to which fp16 is faster, between two that were measured; None if it
    lies outside of these."""
    points = [(one.rate.gigabits, one.fp16.ratio) for one in found]
    limited = [(rate, ratio) for rate, ratio in points if rate is not None]
    for (slow, above), (fast, below) in itertools.pairwise(limited):
        if above >= 1 > below:
            share = (above - 1) / (above - below)
            return float(slow * (fast / slow) ** share)
    return None


def no_crossover(found: Sequence[AtRate]) -> str:
    """Where fp16 pays if no two neighbouring rates have the crossover between them."""
    limited = [one for one in found if one.rate.gigabits is not None]
    if all(one.fp16.ratio >= 1 for one in limited):
        return "at all limited rates"
    return "at none of the limited rates" if limited[0].fp16.ratio < 1 else "at some rates"


def as_dict(one: AtRate) -> dict[str, Any]:
    """A rate's figures as they stand in the record."""
    values = {**asdict(one), "auto": bench.as_dict(one.auto)}
    return {**values, "rate": {"gigabits_per_second": one.rate.gigabits, "name": str(one.rate)}}


# ------------------------------------------------------------------------------------ the plot


def draw(found: dict[str, list[AtRate]]) -> str:
    """The speed of fp16 / of fp32 over the rate, where that is 1, and what auto chose."""
    rates = [one.rate for one in next(iter(found.values()))]
    places = [place(rate) for rate in rates]
    ticks = [
        (place(rate), "no limit" if rate.gigabits is None else f"{rate.gigabits:g}")
        for rate in rates
    ]
    x = Scale(min(places) / 1.25, max(places) * 1.25, tuple(ticks), logarithmic=True)
    values = [1.0]
    for at_rates in found.values():
        for one in at_rates:
            values += [one.fp16.ratio, *one.fp16.ratios]
    keys = [
        Key(f"{ENGINES[engine]}, {TRANSPORTS[engine]}", series_colour(index), dash=DASHES[index])
        for index, engine in enumerate(found)
    ]
    keys.append(Key("auto took fp16", INK, kind="marker", marker="circle"))
    keys.append(Key("auto took fp32", INK, kind="marker", marker="circle", hollow=True))
    chart = Chart(x, linear(values), "Gb/s of each link", "speed with fp16 / with fp32", keys=keys)
    chart.rule(y=1)
    told = []
    for index, (engine, at_rates) in enumerate(found.items()):
        colour = series_colour(index)
        apart = 1 + 0.03 * (2 * index - len(found) + 1)  # so that engines do not hide each other
        points = [(apart * place(one.rate), one) for one in at_rates]
        limited = [(at, one.fp16.ratio) for at, one in points if one.rate.gigabits is not None]
        chart.line(limited, colour, dash=DASHES[index])
        if crossing := crossover(at_rates):
            chart.rule(x=crossing)
            told.append(f"{ENGINES[engine]}: fp16 is faster below {crossing:.2g} Gb/s")
        for at, one in points:
            for ratio in one.fp16.ratios:
                chart.mark(at, ratio, "circle", colour, size=1.2, opacity=0.5)
            took_fp16 = one.chosen.count("fp16")
            # Where its starts disagree, the outline around the mark of fp16 is seen, too.
            if took_fp16 < len(one.chosen):
                chart.mark(at, one.fp16.ratio, marker_of(index), colour, size=4.5, hollow=True)
            if took_fp16:
                chart.mark(at, one.fp16.ratio, marker_of(index), colour, size=3)
            chart.hit(at, one.fp16.ratio, f"{ENGINES[engine]}, {one.told()}")
    return chart.as_svg(f"Speed with fp16 / with fp32 over the rate. {'. '.join(told)}")


def marker_of(index: int) -> str:
    """An engine's marker."""
    return MARKERS[series_shape(index)]


def place(rate: Rate) -> float:
    """Where on the axis a rate stands, Gb/s."""
    return NO_LIMIT_AT if rate.gigabits is None else rate.gigabits


if __name__ == "__main__":
    sys.exit(bench.main("wire_format", __doc__, measure))
