"""Read a run folder strictly. Every field of the records in recipe/record/schema.py must be there
and have its type, and no figure may contradict another; UserError names the file and the field."""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from compare.evidence import packed
from compare.evidence.packed import read_text
from compare.evidence.turns import Block, Turn
from compare.plan.plan import Outcome
from compare.plan.plan_file import explanation
from recipe.errors import UserError
from recipe.record.schema import METRICS, Positive, Settings, Summary

Record = TypeVar("Record")
FACTORS = ("batch_size", "world_size", "batches_per_allreduce")  # product: images in a step
TOLERANCE = 0.05  # relative, between a rate and the time of a step


@dataclass(frozen=True, kw_only=True)
class TimedSummary(Summary):
    """The summary of a run that was long enough to measure a throughput."""

    images_per_second: Positive
    cpu_seconds_per_image: Positive


def contradictions(config: Settings, summary: TimedSummary, last_step: Any) -> Iterator[str]:
    """Yield the contradictions between a run's figures. `last_step` is that of metrics.jsonl."""
    most = math.prod(summary.fingerprint[name] for name in FACTORS)
    fewest = most / (1 + config.batch_size_warmup_epochs)  # or slightly more: it is rounded up
    size = f"{most}" if fewest == most else f"{fewest:g} to {most}"
    seen, steps = summary.samples_seen, summary.steps
    if last_step != steps:
        yield f"metrics.jsonl: its last line is of step {last_step}, but the run had {steps} steps"
    if not fewest * steps <= seen <= most * steps:
        yield f"summary.json: samples_seen is {seen}, but {steps} steps have {size} images each"
    seconds, margin = summary.phases.step_seconds, math.exp(TOLERANCE)
    speed = summary.images_per_second
    if seconds and not fewest / margin <= speed * seconds <= most * margin:
        yield (
            f"summary.json: images_per_second is {speed:g}, but a step of {size} images took "
            f"{seconds:g} s"
        )


def read_block(path: Path) -> Block:
    """Read block.json."""
    return parse_block(read_object(path), path)


def parse_block(values: dict[str, Any], path: Path) -> Block:
    """Make a block of a JSON object; UserError if the turns of a side do not all have the same
    phases. (A bare loop has none.)"""
    block = parse(values, Block, path)
    turns = [*block.of("speed"), *block.of("ablation")]
    phases = [{frozenset(t.phases) for t in turns if t.side == side} for side in block.order]
    problem = f"{path}: the turns of a side do not all have the same phases"
    if any(len(of_side) > 1 for of_side in phases):
        raise UserError(problem)
    return block


def read_outcome(folder: Path) -> Outcome:
    """Return how a run ended, as run.py recorded it."""
    path = folder / "outcome.json"
    return read_record(path, Outcome) if packed.exists(path) else Outcome("not run")


def blocks_of_runs(runs: Iterable[tuple[int, str, TimedSummary, float]]) -> list[Block]:
    """Return blocks of whole runs, in which each run is one turn of a single round. `runs` gives
    for each its block, configuration, summary, and total seconds (0: not known)."""
    turns, seconds = defaultdict[int, list[Turn]](list), defaultdict[int, float](float)
    for number, name, one, taken in runs:
        images = one.images_per_second * one.train_seconds
        turn = Turn(name, 0, one.train_seconds, images, one.cpu_seconds_per_image)
        turns[number].append(turn)
        seconds[number] += taken
    return [
        Block(number, tuple(turn.side for turn in sides), tuple(sides), seconds=seconds[number])
        for number, sides in turns.items()
    ]


def read_metrics(path: Path) -> dict[type, list[Any]]:
    """Read the lines of metrics.jsonl by kind; lines of unknown kinds are left out."""
    lines: dict[type, list[Any]] = {kind: [] for kind in METRICS.values()}
    for number, text in enumerate(read_text(path).splitlines(), start=1):
        line = decode(text, where := f"{path}, line {number}")
        if kind := METRICS.get(str(line.get("kind"))):
            lines[kind].append(parse(line, kind, where))
    return lines


def read_last_step(path: Path) -> Any:
    """Return the step of the last line of metrics.jsonl, also where another line is damaged."""
    last, where = read_text(path).rstrip().rpartition("\n")[2], f"{path}, its last line"
    return decode(last, where).get("step")


def read_record(path: Path, kind: type[Record]) -> Record:
    """Read a JSON file that holds one record."""
    return parse(read_object(path), kind, path)


def parse(values: dict[str, Any], kind: type[Record], where: Path | str) -> Record:
    """Make a record of a JSON object; UserError names the field that is missing or wrong. Fields
    unknown to the record come from a newer version and are ignored. `flags` receives all fields."""
    try:
        return msgspec.convert({**values, "flags": values}, kind)
    except msgspec.ValidationError as error:
        raise UserError(f"{where}: {explanation(str(error), values)}") from None


def read_object(path: Path) -> dict[str, Any]:
    """Read a file that holds a JSON object."""
    return decode(read_text(path), path)


def decode(text: str, where: Path | str) -> dict[str, Any]:
    """Return the JSON object in a text; UserError if it is not one."""
    try:
        return msgspec.convert(json.loads(text), dict[str, Any])
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not a JSON object: {error}") from None
