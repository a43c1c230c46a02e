"""Predictions beside what was measured: the record of benchmarks/prediction.py, its table.

The fit is of points whose role is "fit" alone, and of runs and links measured beside them; what is
held out enters no prediction.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal

import msgspec
import tabulate

from compare.prediction.inputs import Inputs
from compare.prediction.networks import GBIT, Cluster, on_cpus
from compare.prediction.step import Prediction, fit, predict_step
from recipe.errors import UserError
from recipe.files import replace_file, write_json

tabulate.MIN_PADDING = 0  # of headers
RECORD = "points.json"
FIT: Final = "fit"
HELD_OUT: Final = "held out"
SENTENCE = (
    "{points} points; error {median:.1%} in the median (goal 8 %), {worst:.1%} at worst (goal "
    "15 %); {covered:.0%} inside the 90 % interval (goal 85 %). "
    "Turns of a point differ by ±{turns:.1%}."
)
CELL = "{median:.1%}, {worst:.1%}, {covered:.0%}"
# A frame of Ethernet, as the kernel counts it, and what of it is payload of TCP.
PAYLOAD = 1448 / 1514
ENGINES = {"ddp": "DDP", "horovod": "Horovod"}
TRANSPORTS = {"gloo": "Gloo", "mpi": "MPI"}


@dataclass(frozen=True)
class Point:
    """One training at one size, and how long a step of it took."""

    model: str
    batch_size: int  # of one worker
    engine: str
    transport: str
    hosts: int
    workers_per_host: int
    gbit_per_s: float | None  # that each host may send; None: one host
    role: Literal["fit", "held out"]
    step_seconds: float | None = None  # the median over turns; None: not measured
    # The fastest and the slowest turn: of 6 turns an interval of 97 % for the median, of 4 of 88 %.
    low_seconds: float | None = None
    high_seconds: float | None = None
    turns: int = 0
    phases: dict[str, float] = field(default_factory=dict)  # of the step, by Inputs' fields
    failed: str = ""  # why there is no measurement

    @property
    def workers(self) -> int:
        """All of them."""
        return self.hosts * self.workers_per_host

    @property
    def training(self) -> str:
        """What a fit is of."""
        return f"{self.model} {self.engine}-{self.transport}"

    @property
    def column(self) -> str:
        """Engine and transport in words."""
        return f"{ENGINES[self.engine]}, {TRANSPORTS[self.transport]}"

    @property
    def key(self) -> tuple[object, ...]:
        """By which it is the same point, measured or not."""
        return self.training, self.hosts, self.workers, self.gbit_per_s

    @property
    def name(self) -> str:
        """In words."""
        model, hosts, workers, rate = self.place()
        where = f"{workers} workers" if hosts == 1 else f"{hosts} hosts at {rate} Gb/s"
        return f"{model}, {self.column}, {where}"

    def place(self) -> tuple[str, int, int, str]:
        """All but engine and transport."""
        rate = "" if self.gbit_per_s is None else f"{self.gbit_per_s:g}"
        return self.model, self.hosts, self.workers, rate


class Record(msgspec.Struct):
    """points.json."""

    created_utc: str
    machine: dict[str, Any]
    points: list[Point]
    inputs: dict[str, Inputs] = {}  # by training
    # By place ("within" a host or "between" two) and engine-transport, of an all-reduce alone: the
    # latency of a round, and CPU seconds of a byte.
    links: dict[str, tuple[float, float]] = {}


@dataclass(frozen=True)
class Checked:
    """A measured point and its prediction."""

    point: Point
    measured: float  # seconds of a step, as are the following
    predicted: Prediction

    @property
    def error(self) -> float:
        """Of the prediction, in proportion: 0.05 if it is 5 % too slow."""
        return self.predicted.step_seconds / self.measured - 1

    @property
    def covered(self) -> bool:
        """Whether the prediction's interval holds what was measured."""
        return self.predicted.low_seconds <= self.measured <= self.predicted.high_seconds

    def shown(self) -> str:
        """Milliseconds, measured and predicted, and the error; a star where the interval misses."""
        star = "" if self.covered else " \\*"
        figures = f"{1000 * self.measured:.0f} / {1000 * self.predicted.step_seconds:.0f}"
        return f"{figures} ({100 * self.error:+.0f} %{star})"


def read(folder: Path) -> Record:
    """Read a folder's record; UserError if there is none."""
    try:
        return msgspec.json.decode((folder / RECORD).read_bytes(), type=Record)
    except (OSError, msgspec.MsgspecError) as error:
        raise UserError(
            f"{folder / RECORD}: no record of benchmarks/prediction.py ({error})"
        ) from None


def write(folder: Path, record: Record) -> None:
    """Write a folder's record."""
    text = msgspec.json.format(msgspec.json.encode(record, enc_hook=str), indent=1).decode()
    replace_file(folder / RECORD, f"{text}\n")


def check(record: Record) -> list[Checked]:
    """Predict all measured points from what is known of 1 and 2 workers."""
    fits = {
        (point.training, point.workers): point
        for point in record.points
        if point.role == FIT and point.step_seconds
    }
    found = []
    for point in record.points:
        inputs, lone = record.inputs.get(point.training), fits.get((point.training, 1))
        pair = fits.get((point.training, 2))
        if inputs and lone and pair and lone.phases and point.step_seconds:
            inputs = as_by_turns(inputs, lone, pair)
            cluster = cluster_of(point, record)
            inputs = fit(inputs, cluster.network)
            found.append(Checked(point, point.step_seconds, predict_step(inputs, cluster)))
    return found


def as_by_turns(inputs: Inputs, lone: Point, pair: Point) -> Inputs:
    """The inputs as they were in the turns: the phases of one worker's step, and how much longer
    those of two take."""
    assert lone.step_seconds
    later = lone.phases["backward_seconds"] / inputs.backward_seconds
    phases: dict[str, Any] = {**lone.phases}
    return replace(
        inputs,
        **phases,
        ready_seconds=tuple(later * seconds for seconds in inputs.ready_seconds),
        spread_seconds=inputs.spread_seconds * lone.step_seconds / inputs.step_seconds,
        contention=max(1.0, pair.phases["forward_seconds"] / lone.phases["forward_seconds"]),
        pair_seconds=pair.step_seconds,
    )


def cluster_of(point: Point, record: Record) -> Cluster:
    """Where a point was measured: hosts have equal parts of the machine's cores."""
    network, own = on_cpus(point.transport), f"{point.engine}-{point.transport}"
    links = {
        place: replace(
            getattr(network, place), latency_seconds=latency, cpu_seconds_per_byte=per_byte
        )
        for place in ("within", "between")
        for latency, per_byte in [record.links.get(f"{place} {own}", (None, None))]
        if latency is not None
    }
    if point.gbit_per_s is not None and "between" in links:
        rate = point.gbit_per_s * GBIT * PAYLOAD
        links["between"] = replace(links["between"], bytes_per_second=rate)
    network = replace(network, **links)
    cores = record.machine["cores"] / point.hosts
    return Cluster(point.hosts, point.workers_per_host, cores, network, point.hosts)


# ------------------------------------------------------------------------------ what is shown of it


def summary(checked: Sequence[Checked]) -> dict[str, float]:
    """How far predictions were off; in how many their interval held what was measured; and half the
    range of the typical point's turns. All in proportion."""
    errors = [abs(one.error) for one in checked]
    ranges = [(one.point.high_seconds or 0) - (one.point.low_seconds or 0) for one in checked]
    return {
        "points": len(checked),
        "median": median(errors),
        "worst": max(errors),
        "covered": sum(one.covered for one in checked) / len(checked),
        "turns": median(r / 2 / one.measured for r, one in zip(ranges, checked, strict=True)),
    }


def show(record: Record) -> str:
    """What was predicted and measured, as Markdown: how far predictions were off, by what they are
    of, and all points."""
    checked = check(record)
    held_out = [one for one in checked if one.point.role == HELD_OUT]
    parts = []
    for role in (HELD_OUT, FIT):
        if own := [one for one in checked if one.point.role == role]:
            worst = max(own, key=lambda one: abs(one.error)).point
            parts.append(
                f"{role.capitalize()}: "
                + SENTENCE.format_map(summary(own))
                + f" The worst: {worst.name}."
            )
    parts += [
        f"Not measured: {point.name}: {point.failed}" for point in record.points if point.failed
    ]
    parts.append(
        grid(
            held_out,
            lambda point: (point.model, "one host" if point.hosts == 1 else "several hosts"),
            ("", ""),
            lambda own: CELL.format_map(summary(own)),
        )
    )
    head = ("model", "hosts", "workers", "Gb/s")
    parts.append(grid(checked, Point.place, head, lambda own: own[0].shown()))
    return "\n\n".join(parts)


def grid(
    checked: Iterable[Checked],
    row_of: Callable[[Point], tuple[object, ...]],
    head: tuple[str, ...],
    cell: Callable[[list[Checked]], str],
) -> str:
    """A table with a column for each engine and transport, and a row for each of `row_of`."""
    rows = defaultdict[tuple[object, ...], dict[str, list[Checked]]](lambda: defaultdict(list))
    for one in checked:
        rows[row_of(one.point)][one.point.column].append(one)
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    cells = [
        [*place, *(cell(row[column]) if column in row else "–" for column in columns)]
        for place, row in rows.items()
    ]
    return tabulate.tabulate(cells, [*head, *columns], tablefmt="github", disable_numparse=True)


def write_tables(folder: Path) -> str:
    """Write table.md and, for compare/predict.py, table.json beside the record; return the
    table."""
    record = read(folder)
    if not (checked := check(record)):
        raise UserError(f"{folder}: nothing was measured that can be predicted, see {RECORD}")
    text = show(record)
    if held_out := [one for one in checked if one.point.role == HELD_OUT]:
        most = max(one.point.workers for one in held_out)
        write_json(folder / "table.json", {**summary(held_out), "workers": most})
    replace_file(folder / "table.md", f"{text}\n")
    return text
