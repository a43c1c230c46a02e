"""Records as a trainer writes them, made up; each field can be given."""

import copy
import itertools
import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import repeat
from pathlib import Path
from types import MappingProxyType
from typing import Any

from msgspec import structs

from compare.evidence.paired import Estimate, estimate_logs
from compare.evidence.record import FILE, BlockLine, Record, SideLine, with_digests
from compare.evidence.runs import NO_SETTINGS, RunRecord
from compare.evidence.stopping import BlockCost
from compare.evidence.turns import Block, Turn
from compare.evidence.verdicts import Verdict, judge
from compare.page.labels import labels_of
from compare.plan.configurations import CONFIGURATIONS, Configuration
from compare.plan.plan import Case, OwnConfiguration, Plan, Run, Share, Words, block_place
from recipe.record.schema import Environment, Summary


def a_plan(
    cases: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
    defined: tuple[Configuration, ...] = (),
    **fields: Any,
) -> Plan:
    """Both engines at one and at two workers, in three blocks of whole runs."""
    values: dict[str, Any] = {"measure": "runs", "blocks": 3, "workers": (1, 2), **fields}
    values |= {key: Share(values[key]) for key in values.keys() & {"margin", "until_interval"}}
    bases = {ready.kind: name for name, ready in CONFIGURATIONS.items()}
    own = {
        one.name: OwnConfiguration(bases[one.kind], Words(one.flags), one.environment)
        for one in defined
    }
    case = {name: Case(Words(flags)) for name, flags in cases.items()}
    return Plan(**values, configuration=own, case=case)


def an_environment(**fields: Any) -> Environment:
    """A trainer of two workers on one host."""
    values: dict[str, Any] = {
        "engine": "ddp",
        "version": "1",
        "launcher": "torchrun",
        "transport": "Gloo",
        "world_size": 2,
        "local_size": 2,
        "hosts": ["node"],
        "rank_hosts": ["node", "node"],
        "device": "cpu",
        "device_name": "",
        "cpu_model": "A Processor 9000",
        "cores": 2,
        "threads": 1,
        "affinity": ["0-1", "0-1"],
        "allocator": "C library",
        "python": "3.11.7",
        "torch": "2.14.1",
        "torchvision": "0.29.2",
        "horovod": None,
        "mpi": None,
        "cuda": None,
        "kernel": "6.1",
        "command": ["python", "train.py"],
        "started_utc": "2026-11-21T12:00:00Z",
        "git_commit": "abc123",
    }
    return Environment(**values | fields)


def a_summary(**fields: Any) -> Summary:
    """Six epochs on two workers, at 1000 images a second."""
    values: dict[str, Any] = {
        "engine": "ddp",
        "launcher": "torchrun",
        "transport": "Gloo",
        "world_size": 2,
        "threads": 1,
        "epochs": 6,
        "steps": 72,
        "samples_seen": 4608,
        "images_per_second": 1000.0,
        "train_seconds": 4.608,
        "total_seconds": 12.0,
        "cpu_seconds": 11.0,
        "cpu_seconds_per_image": 0.002,
        "peak_memory_bytes": 400_000_000,
        "loss": 0.1,
        "top1": 97.5,
        "top5": 99.9,
        "best_top1": 97.8,
        "weights_sha256": "a" * 64,
        "fingerprint": {},
        "ended_utc": "2026-11-21T12:01:00Z",
    }
    return Summary(**values | fields)


def find(record: Record, block: int, configuration: str, workers: int, case: str = "") -> RunRecord:
    """A planned run of a comparison."""
    [run] = [
        run
        for run in record.group_at(case, workers).runs
        if (run.block, run.configuration) == (block, configuration)
    ]
    return run


def anew(record: Record) -> Record:
    """The record, after a test has changed its runs: everything is computed anew."""
    for name in ("groups", "unfinished", "square"):
        record.__dict__.pop(name, None)
    return record


def with_plan(record: Record, *plans: Mapping[str, Any]) -> Record:
    """The same measurements under another plan, which differs in these fields; of several plans
    each follows the one before."""
    other = copy.copy(record)
    other._plans = [structs.replace(record.plan, **fields) for fields in plans]
    return anew(other)


def verdicts_of(record: Record) -> list[Verdict]:
    """The verdicts of a record, as its report draws them."""
    return judge(record, labels_of(record))


def a_block(
    rates: Mapping[str, Sequence[float]], loads: Sequence[float] | None = None, number: int = 1
) -> Block:
    """Turns of these images/s, of each side round by round, and others' load in each round."""
    turns = [
        Turn(side, round_, 1.0, rate, 1 / rate, load)
        for side, of_rounds in rates.items()
        for round_, (rate, load) in enumerate(zip(of_rounds, loads or repeat(0.0), strict=False))
    ]
    return Block(number, tuple(rates), tuple(turns))


def estimate_ratio(first: Sequence[float], second: Sequence[float]) -> Estimate:
    """The estimate of first / second from a pair of values of each block."""
    return estimate_logs([math.log(a / b) for a, b in zip(first, second, strict=True)])


STEPS = 2  # of a made-up turn
PHASE_SHARES = {"data": 0.05, "forward": 0.25, "backward": 0.6, "optimizer": 0.09}


def make_turns(
    folder: Path, speeds: dict[str, float], blocks: int = 6, rounds: int = 6, noise: float = 0.01
) -> Path:
    """Have a comparison measure by turns: `speeds` are images/s of each configuration at one
    worker. Each block is slower than the one before, and its last round is disturbed. Without
    exchange all are equally fast."""
    own = {"margin": 0.03, "blocks": blocks, "rounds": rounds, "order_seed": 3}
    edit(folder / "plan.json", measure="turns", **own)
    whole = {line["place"]: line for line in lines_of(folder) if line["line"] == "run"}
    record = Record.open(folder)
    dice, clock = random.Random(5), 1_800_000_000.0
    for number, (case, workers) in itertools.product(range(1, blocks + 1), record.plan.groups()):
        runs = record.plan.in_order(number, case, workers)
        order = [run.configuration.name for run in runs]
        sides, images = {}, {}
        for run in runs:
            written = whole[f"block-1/{run.cell}"]
            settings = written["settings"] | {"seed": run.seed}
            sides[run.side] = SideLine(
                command="", settings=settings, environment=written["environment"]
            )
            images[run.side] = STEPS * settings["batch_size"] * workers
        launch = {name: dice.gauss(1 - 0.01 * number, noise) for name in order}
        turns, slowest = [], min(speeds.values())
        for at in range(rounds):
            for purpose in ("speed", "ablation") if at % 3 == 2 else ("speed",):
                for name in order if at % 2 == 0 else order[::-1]:
                    rate = speeds[name] * workers**0.8 * launch[name] * dice.gauss(1, noise)
                    seconds = images[name] / rate
                    # What the slower ones take longer is their exchange.
                    exchange = 0.0 if purpose == "speed" else seconds * (1 - slowest / 120)
                    phases = {
                        phase: share * seconds / STEPS for phase, share in PHASE_SHARES.items()
                    }
                    phases["backward"] -= exchange / STEPS
                    turns.append(
                        Turn(
                            side=name,
                            round=at,
                            seconds=seconds - exchange,
                            images=images[name],
                            cpu_seconds_per_image=workers / rate,
                            other_load=0.8 if at == rounds - 1 else 0.02,
                            began=round(clock, 2),
                            purpose=purpose,
                            phases=phases,
                            straggler_ratio=1.1 if workers > 1 else None,
                        )
                    )
                    clock += seconds + 0.1
        steps = dict.fromkeys(order, STEPS)
        block = Block(number, tuple(order), tuple(turns), steps=steps, seconds=40.0)
        record.append(BlockLine(case=case, workers=workers, block=block, sides=sides))
        clock += 20
    return folder


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """The lines of a comparison's record."""
    return [json.loads(line) for line in (folder / FILE).read_text().splitlines()]


def write_lines(folder: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Write a record with these lines, as if they had been measured: with right digests."""
    (folder / FILE).write_text(with_digests(lines)[0])


def part_of(lines: Sequence[dict[str, Any]], name: Path) -> dict[str, Any]:
    """The part of a record that holds a file: `plan.json`, a file of a run's folder such as
    `block-1/ddp-mpi-2/summary.json`, `turns/2-workers/block-2/block.json`, or a file of a side in
    that folder, such as `ddp-mpi/config.json`."""
    key = {"config": "settings"}.get(name.stem, name.stem)
    if key == "plan":
        return next(line["plan"] for line in reversed(lines) if line["line"] == "plan")
    for line in lines:
        if line["line"] == "run" and line["place"] == str(name.parent):
            return line[key]
        if line["line"] == "block":
            number = line["block"]["number"]
            place = block_place(line["case"], line["workers"], number)
            if key == "block" and name.parent == place:
                return line["block"]
            if name.parent.parent == place:
                return line["sides"][name.parent.name][key]
    raise KeyError(name)


def edit(path: Path, **changes: Any) -> None:
    """Change fields of what a comparison recorded, as if it had been measured so: with right
    digests. The value `...` removes one. `path`: the comparison's folder and a name of `part_of`.
    """
    folder = next(parent for parent in path.parents if (parent / FILE).exists())
    lines = lines_of(folder)
    part = part_of(lines, path.relative_to(folder))
    part.update(changes)
    for field in [field for field, value in changes.items() if value is ...]:
        del part[field]
    write_lines(folder, lines)


def fail_run(folder: Path, place: str, **outcome: Any) -> None:
    """Have a whole run of a record failed, with nothing recorded but its outcome."""
    lines = lines_of(folder)
    for line in lines:
        if line.get("place") == place:
            outcome = {"status": "failed", **outcome}
            line.update(line="failure", outcome=outcome, folder=place, output="an error")
    write_lines(folder, lines)


def drop_runs(folder: Path, *places: str) -> None:
    """Remove whole runs from a record; all of them if none is named."""
    lines = lines_of(folder)
    dropped = [
        line for line in lines if line["line"] == "run" and (not places or line["place"] in places)
    ]
    write_lines(folder, [line for line in lines if line not in dropped])


class MadeUpBlocks:
    """Stands for run_blocks: a block of 8 rounds takes a minute, and each side has a speed of its
    own, which scatters. It notes what it has measured. `error`, if there is one, comes after so
    many blocks.
    """

    def __init__(self, speed: Callable[[Run], float], scatter: float, unit: str = "images") -> None:
        self.unit, self.ranks = unit, 2  # of a user's own script
        self.speed, self.scatter, self.disturbed = speed, scatter, 0.0
        self.error: BaseException | None = None
        self.error_after = 0
        self.cost = BlockCost(start=20.0, round=5.0)
        self.folders, self.orders = list[Path](), list[tuple[str, ...]]()

    def __call__(
        self,
        cases: Sequence[Sequence[Run]],
        plan: Plan,
        folder: Path,
        report: Callable[[str], None],
        choose_rounds: Callable[[BlockCost, str, int], int],
    ) -> list[BlockLine]:
        if self.error is not None and len(self.folders) >= self.error_after:
            raise self.error
        self.folders.append(folder)
        places = [(sides[0].case, sides[0].workers) for sides in cases]
        return [
            self.line(sides, choose_rounds(self.cost, *place))
            for sides, place in zip(cases, places, strict=True)
        ]

    def line(self, sides: Sequence[Run], rounds: int) -> BlockLine:
        noise = random.Random(sides[0].block)  # the same in every folder
        speeds = [
            (side.side, at, self.speed(side) * noise.lognormvariate(0.0, self.scatter))
            for at in range(rounds)
            for side in sides
        ]
        turns = tuple(Turn(name, at, 64 / speed, 64, 0.001) for name, at, speed in speeds)
        order, start = tuple(side.side for side in sides), self.cost.start
        seconds = start + rounds * self.cost.round + self.disturbed
        block = Block(
            sides[0].block,
            order,
            turns,
            steps=dict.fromkeys(order, 1),
            seconds=seconds,
            start_seconds=start,
            disturbed_seconds=self.disturbed,
            unit=self.unit,
        )
        self.orders.append(order)
        return BlockLine(
            case=sides[0].case,
            workers=sides[0].workers,
            block=block,
            sides={
                side.side: SideLine(
                    command="",
                    settings=NO_SETTINGS,
                    environment=asdict(an_environment(world_size=side.workers or self.ranks)),
                )
                for side in sides
            },
        )
