"""Records as a trainer writes them, made up; each field can be given."""

import itertools
import json
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import repeat
from pathlib import Path
from types import MappingProxyType
from typing import Any

from compare.evidence.chain import reseal
from compare.evidence.records import Comparison, RunRecord
from compare.evidence.turns import Block, Turn
from compare.plan.configurations import CONFIGURATIONS, Configuration
from compare.plan.plan import Case, OwnConfiguration, Plan, Run, Share, Words
from compare.plan.plan_file import END, read_plan
from recipe.files import write_json
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


def find(
    comparison: Comparison, block: int, configuration: str, workers: int, case: str = ""
) -> RunRecord:
    """A planned run of a comparison."""
    cell = (case, workers, configuration)
    [run] = [run for run in comparison.runs if (run.block, run.cell) == (block, cell)]
    return run


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


STEPS = 2  # of a made-up turn
UNSEALED = {"digest": "", "ends": 1}  # what `reseal` is to seal
PHASE_SHARES = {"data": 0.05, "forward": 0.25, "backward": 0.6, "optimizer": 0.09}


def make_turns(
    folder: Path, speeds: dict[str, float], blocks: int = 6, rounds: int = 6, noise: float = 0.01
) -> Path:
    """Have a comparison's folder measure by turns: `speeds` are images/s of each configuration at
    one worker. Each block is slower than the one before, and its last round is disturbed. Without
    exchange all are equally fast."""
    own = {"margin": 0.03, "blocks": blocks, "rounds": rounds, "order_seed": 3}
    edit(folder / "plan.json", measure="turns", **own)
    record = read_plan(folder / "plan.json")
    dice, clock = random.Random(5), 1_800_000_000.0
    for number, (case, workers) in itertools.product(range(1, blocks + 1), record.groups()):
        place = folder / "turns" / case / f"{workers}-workers/block-{number}"
        runs = record.in_order(number, case, workers)
        order = [run.configuration.name for run in runs]
        images = {}
        for run in runs:
            source, side = folder / "block-1" / run.cell, place / run.configuration.name / "0/run"
            side.mkdir(parents=True)
            shutil.copy(source / "environment.json", side)
            settings = json.loads((source / "config.json").read_text())
            (side / "config.json").write_text(json.dumps(settings | {"seed": run.seed}))
            images[run.configuration.name] = STEPS * settings["batch_size"] * workers
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
                        {
                            "side": name,
                            "round": at,
                            "seconds": seconds - exchange,
                            "images": images[name],
                            "cpu_seconds_per_image": workers / rate,
                            "other_load": 0.8 if at == rounds - 1 else 0.02,
                            "began": round(clock, 2),
                            "purpose": purpose,
                            "phases": phases,
                            "straggler_ratio": 1.1 if workers > 1 else None,
                        }
                    )
                    clock += seconds + 0.1
        block = {
            "number": number,
            "order": order,
            "rounds": rounds,
            "turns": turns,
            "seconds": 40.0,
            "steps": dict.fromkeys(order, STEPS),
            **UNSEALED,
        }
        (place / "block.json").write_text(json.dumps(block))
        clock += 20
    reseal(folder)
    return folder


def edit(path: Path, **changes: Any) -> None:
    """Change fields of a comparison's JSON file, as if it had been written so: with its seals, and
    a plan with its end. The value `...` removes one."""
    record = json.loads(path.read_text()) | changes
    if path.name == "plan.json" and "ends" not in changes:
        record["ends"] = [{name: record[name] for name in ("created_utc", *END)}]
    write_json(path, {field: value for field, value in record.items() if value is not ...})
    reseal(next(folder for folder in path.parents if (folder / "plan.json").exists()))


class MadeUpBlocks:
    """Stands for run_block: a block takes a minute, and each side has a speed of its own, which
    scatters. It notes what it has measured. `error`, if there is one, comes after so many blocks.
    """

    def __init__(self, speed: Callable[[Run], float], scatter: float) -> None:
        self.speed, self.scatter, self.disturbed = speed, scatter, 0.0
        self.error: BaseException | None = None
        self.error_after = 0
        self.folders, self.orders = list[Path](), list[tuple[str, ...]]()

    def __call__(
        self,
        sides: Sequence[Run],
        plan: Plan,
        folder: Path,
        number: int,
        *_: Any,
        seal: Callable[[dict[str, Any]], dict[str, Any]],
        **__: Any,
    ) -> Block:
        if self.error is not None and len(self.folders) >= self.error_after:
            raise self.error
        noise = random.Random(number)  # the same in every folder
        speeds = [
            (side.side, at, self.speed(side) * noise.lognormvariate(0.0, self.scatter))
            for at in range(plan.rounds)
            for side in sides
        ]
        turns = tuple(Turn(name, at, 64 / speed, 64, 0.001) for name, at, speed in speeds)
        order, seconds = tuple(side.side for side in sides), 60.0 + self.disturbed
        block = Block(number, order, turns, seconds=seconds, disturbed_seconds=self.disturbed)
        folder.mkdir(parents=True)
        write_json(folder / "block.json", seal(asdict(block)))
        self.folders.append(folder)
        self.orders.append(order)
        return block
