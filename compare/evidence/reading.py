"""Read a trainer's run folder strictly. Every field of the records in recipe/record/schema.py must
be there and have its type, and no figure may contradict another; UserError names the file and the
field."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

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


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl as objects."""
    texts = read_text(path).splitlines()
    return [decode(text, f"{path}, line {number}") for number, text in enumerate(texts, start=1)]


def metrics_of(
    lines: Sequence[dict[str, Any]], kind: type[Record], where: Path | str
) -> list[Record]:
    """Return the lines of metrics.jsonl that are of one kind, in their order."""
    return [
        parse(line, kind, f"{where}, line {number}")
        for number, line in enumerate(lines, start=1)
        if METRICS.get(str(line.get("kind"))) is kind
    ]


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


def read_text(path: Path) -> str:
    """Return the text of a file; UserError if it cannot be read."""
    try:
        return path.read_text("utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", error)
        raise UserError(f"{path} cannot be read: {reason}") from None


def decode(text: str, where: Path | str) -> dict[str, Any]:
    """Return the JSON object in a text; UserError if it is not one."""
    try:
        return msgspec.convert(json.loads(text), dict[str, Any])
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not a JSON object: {error}") from None
