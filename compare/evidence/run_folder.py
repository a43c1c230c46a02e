"""Read a run folder, strictly: every field of the records in recipe/record/schema.py is there and
of its type, and no figure contradicts another, or UserError names the file and the field."""

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from compare.evidence import packed
from compare.evidence.turns import Block, Turn
from compare.plan.plan import Outcome
from compare.plan.plan_file import explanation
from recipe.errors import UserError, refuse
from recipe.record.schema import METRICS, Positive, Settings, Summary

Record = TypeVar("Record")
# What every fingerprint holds, whichever version wrote it.
FACTORS = ("batch_size", "world_size", "batches_per_allreduce")  # of the images in a step
FINGERPRINT = (
    *FACTORS, "data_order_sha256", "initial_weights_sha256", "learning_rates_sha256", "num_images",
    "threads", "device", "python", "torch", "torchvision", "arch", "precision", "wire_format",
    "batch_norm",
)  # fmt: skip
AS_IN_EFFECT = {"threads"}  # in the fingerprint, while config.json has what was asked for
# Deeper than any trainer writes, brackets in texts included; of thousands, reading or writing would
# end in a RecursionError.
NESTED = re.compile(r"(?:[\[{][^\[\]{}]*){20}")
TOLERANCE = 0.05  # between a rate and the time that a step took


@dataclass(frozen=True, kw_only=True)
class Measured(Summary):
    """The summary of a run that is compared: it was long enough for a throughput."""

    images_per_second: Positive
    cpu_seconds_per_image: Positive


def contradictions(config: Settings, summary: Measured, last_step: Any) -> Iterator[str]:
    """Yield what of a run's files does not fit together, `last_step` being that of metrics.jsonl;
    what comes later may rely on what was checked before."""
    told = summary.fingerprint
    yield from (
        f"summary.json: the field {name!r} of the fingerprint is missing"
        for name in FINGERPRINT
        if name not in told
    )
    yield from (
        f"summary.json: {name} is {told[name]!r} in the fingerprint, and {config.flags[name]!r} in "
        "config.json"
        for name in told.keys() & config.flags.keys() - AS_IN_EFFECT
        if told[name] != config.flags[name]
    )
    yield from (
        f"summary.json: {name} of the fingerprint is {told[name]!r}"
        for name in FACTORS
        if type(told[name]) is not int or not 0 < told[name] < 2**31
    )
    images = math.prod(told[name] for name in FACTORS)
    first = images / (1 + config.batch_size_warmup_epochs)  # or a little more: it is rounded up
    size = f"{images}" if first == images else f"{first:g} to {images}"
    seen, steps = summary.samples_seen, summary.steps
    if last_step != steps:
        yield f"metrics.jsonl: its last line is of step {last_step}, but the run had {steps} steps"
    if not first * steps <= seen <= images * steps:
        yield f"summary.json: samples_seen is {seen}, but {steps} steps are of {size} images"
    seconds, margin = summary.phases.step_seconds, math.exp(TOLERANCE)
    if seconds is None or config.flags.get("ablation_steps"):
        return  # not measured; or over other steps than the rate was
    if not first / margin <= summary.images_per_second * seconds <= images * margin:
        yield (
            f"summary.json: images_per_second is {summary.images_per_second:g}, but a step of "
            f"{size} images took {seconds:g} s"
        )


def read_block(path: Path, sides: Iterable[str], told: dict[str, Any] | None = None) -> Block:
    """Read block.json, or what is `told` of it elsewhere; UserError if it is not of each of these
    sides once a round."""
    told, expected = told or read_object(path), sorted(sides)
    # Earlier versions wrote the rate in place of the images. What is wrong here, `parse` names.
    with suppress(ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        for turn in told["turns"]:
            if "images_per_second" in turn and "images" not in turn:
                turn["images"] = float(turn["images_per_second"]) * float(turn["seconds"])
    block = parse(told, Block, path)
    speed = block.of("speed")
    # A bare loop has no phases; of a side that has, each turn has them.
    turns = [*speed, *block.of("ablation")]
    phases = [{frozenset(t.phases) for t in turns if t.side == side} for side in block.order]
    rounds = {
        "order": [*block.order],
        "one of its turns": [*{turn.side for turn in block.turns}],
        "steps": [*block.steps] if block.steps or any(map(any, phases)) else expected,
        **{f"round {n}": [turn.side for turn in speed if turn.round == n]
           for n in {turn.round for turn in speed}},
    }  # fmt: skip
    refuse(
        (not speed, f"{path}: it holds no turn"),
        (
            any(len(own) > 1 or any(n and "backward" not in n for n in own) for own in phases),
            f"{path}: the turns of a side have not the same phases, with backward among them",
        ),
    )
    for what, names in rounds.items():
        if sorted(names) != expected:
            raise UserError(f"{path}: {what} is of {names}, and the plan's are {expected}")
    return block


def read_outcome(folder: Path) -> Outcome:
    """Return how a run ended; one that was started by hand has ended well if it has a summary."""
    if packed.exists(folder / "outcome.json"):
        return read_record(folder / "outcome.json", Outcome)
    return Outcome("completed" if packed.exists(folder / "summary.json") else "not run")


def blocks_of_runs(runs: Iterable[tuple[int, str, Measured, float]]) -> list[Block]:
    """Return blocks of one round, of whole runs: of each its block, configuration, summary, and the
    seconds that all of it took (0: not known)."""
    turns, seconds = defaultdict[int, list[Turn]](list), defaultdict[int, float](float)
    for number, name, one, taken in runs:
        images = one.images_per_second * one.train_seconds
        turn = Turn(name, 0, one.train_seconds, images, one.cpu_seconds_per_image)
        turns[number].append(turn)
        seconds[number] += taken
    return [
        Block(number, tuple(turn.side for turn in own), tuple(own), seconds=seconds[number])
        for number, own in turns.items()
    ]


def read_metrics(path: Path) -> dict[type, list[Any]]:
    """Read the lines of metrics.jsonl by their kind; those of kinds unknown here are left out."""
    lines: dict[type, list[Any]] = {kind: [] for kind in METRICS.values()}
    for number, text in enumerate(read_text(path).splitlines(), start=1):
        line = decode(text, where := f"{path}, line {number}")
        if kind := METRICS.get(str(line.get("kind"))):
            lines[kind].append(parse(line, kind, where))
    return lines


def read_last_step(path: Path) -> Any:
    """Return the step of the last line of metrics.jsonl; the others, which may be many, are parsed
    when they are shown."""
    last, where = read_text(path).rstrip().rpartition("\n")[2], f"{path}, its last line"
    return decode(last, where).get("step")


def read_record(path: Path, kind: type[Record]) -> Record:
    """Read a JSON file that holds one record."""
    return parse(read_object(path), kind, path)


def parse(values: dict[str, Any], kind: type[Record], where: Path | str) -> Record:
    """Make a record of a JSON object; UserError names the field that is missing or wrong. Fields
    that the record lacks are of a newer version, and passed over; `flags` holds them all."""
    try:
        return msgspec.convert({**values, "flags": values}, kind)
    except msgspec.ValidationError as error:
        raise UserError(f"{where}: {explanation(str(error), values)}") from None


def recorded(record: Any) -> dict[str, Any]:
    """Return a record's fields by name, without those that its trainer did not know yet."""
    later = {field.name for field in fields(record) if field.default is None}
    return {
        name: value
        for name, value in vars(record).items()
        if value is not None or name not in later
    }


def read_text(path: Path) -> str:
    """Read a record's file; UserError if that cannot be."""
    try:
        return packed.read_text(path)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {getattr(error, 'strerror', error)}") from None


def read_object(path: Path) -> dict[str, Any]:
    """Read a file that holds a JSON object."""
    return decode(read_text(path), path)


def decode(text: str, where: Path | str) -> dict[str, Any]:
    """Return the JSON object that a text is; UserError if it is none."""
    refuse((NESTED.search(text), f"{where}: more than 20 brackets open one in another"))
    try:
        return msgspec.convert(json.loads(text), dict[str, Any])
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is no JSON object: {error}") from None
