"""Read a run folder, strictly: every field of the records in recipe/record/schema.py is there and
of its type, or RecordError names the file and the field."""

import json
import math
import os
import re
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from compare.evidence import packed
from compare.evidence.turns import Block, Turn
from recipe.errors import UserError
from recipe.record.schema import (
    FORMAT,
    METRICS,
    Environment,
    EpochLine,
    Settings,
    StepLine,
    Summary,
)

Record = TypeVar("Record")
FORMER_NAMES = {"trace_steps": "tensor_steps"}  # of settings, in the folders of older trainers


class RecordError(UserError):
    """A run folder that cannot be read; the message names file and field."""


# What a value of each type may be in JSON, where true is no number, and the words for it.
JSON_TYPES: dict[Any, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((float, int), "a number"),
    str: ((str,), "a text"),
    list: ((list,), "a list"),
    tuple: ((list,), "a list"),
    dict: ((dict,), "an object"),
}
# Fields that a training which diverged makes NaN or infinite; no other number is either.
MAY_DIVERGE = {"loss", "top1", "top5", "best_top1", "learning_rate"}
MAY_BE_NEGATIVE = {"loss", "exposed_communication_seconds", "seed"}
ABOVE_ZERO = {
    Summary: ("world_size", "steps", "samples_seen", "train_seconds", "images_per_second",
              "cpu_seconds_per_image", "epochs"),
    StepLine: ("step", "seconds", "images_per_second"),
    EpochLine: ("step", "seconds", "images_per_second"),
    Turn: ("seconds", "images_per_second", "cpu_seconds_per_image"),
    Block: ("number",),
}  # fmt: skip
# What every fingerprint holds, whichever version wrote it.
FINGERPRINT = (
    "data_order_sha256", "initial_weights_sha256", "learning_rates_sha256", "world_size",
    "num_images", "threads", "device", "python", "torch", "torchvision", "arch", "batch_size",
    "precision", "batches_per_allreduce", "wire_format", "batch_norm",
)  # fmt: skip
AS_IN_EFFECT = {"threads"}  # in the fingerprint, while config.json has what was asked for
LARGEST = 1e300
LONGEST_LINE = 16_384  # bytes
# Line ends forge lines in a terminal, escapes colour it, and some turn the direction of writing.
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
TOLERANCE = 0.05  # between a rate and the time that a step took


@dataclass(frozen=True, kw_only=True)
class Measured(Summary):
    """The summary of a run that is compared: it was long enough for a throughput."""

    images_per_second: float
    cpu_seconds_per_image: float


@dataclass(frozen=True)
class RunFolder:
    """What a complete run says of itself."""

    config: Settings
    environment: Environment
    summary: Measured | None  # None of a side of a block of turns, which never ends by itself


def read_run_folder(folder: Path) -> RunFolder:
    """Read what a complete run says of itself, metrics.jsonl aside; RecordError names the file and
    the field that is wrong."""
    side, summary = read_side_folder(folder), read_summary(folder)
    check_fingerprint(side.config, summary, folder)
    check_speed(side.config, summary, folder / "summary.json")
    return replace(side, summary=summary)


def read_side_folder(folder: Path) -> RunFolder:
    """Read what a side of a block of turns says of itself."""
    path = folder / "environment.json"
    environment = read_record(path, Environment)
    if environment.format > FORMAT:
        raise RecordError(
            f"{path}: its format is {environment.format}, and this version of the project reads "
            f"formats up to {FORMAT}"
        )
    return RunFolder(read_settings(folder), environment, None)


def check_fingerprint(config: Settings, summary: Summary, folder: Path) -> None:
    """Raise RecordError if the fingerprint lacks something, or is another run's."""
    path = folder / "summary.json"
    told = summary.fingerprint
    for field in FINGERPRINT:
        if field not in told:
            raise RecordError(f"{path}: the field '{field}' of the fingerprint is missing")
    for field in told.keys() & config.flags.keys() - AS_IN_EFFECT:
        if told[field] != config.flags[field]:
            raise RecordError(
                f"{path}: {field} is {told[field]!r} in the fingerprint, and "
                f"{config.flags[field]!r} in config.json"
            )


def check_speed(config: Settings, summary: Measured, path: Path) -> None:
    """Raise RecordError if steps, images and times do not fit together."""
    told = summary.fingerprint
    images = 1
    for field in ("batch_size", "world_size", "batches_per_allreduce"):
        if type(told[field]) is not int or told[field] < 1:
            raise RecordError(f"{path}: {field} of the fingerprint is {told[field]!r}")
        images *= told[field]
    first = images / (1 + config.batch_size_warmup_epochs)  # or a little more: it is rounded up
    size = f"{images}" if first == images else f"{first:g} to {images}"
    seen, steps = summary.samples_seen, summary.steps
    if not first * steps <= seen <= images * steps:
        raise RecordError(f"{path}: samples_seen is {seen}, but {steps} steps are of {size} images")
    seconds = summary.phases.step_seconds
    if seconds is None or config.flags.get("ablation_steps"):
        return  # not measured; or over other steps than the rate was
    told_images, margin = summary.images_per_second * seconds, math.exp(TOLERANCE)
    if not first / margin <= told_images <= images * margin:
        raise RecordError(
            f"{path}: images_per_second is {summary.images_per_second:g}, but a step of {size} "
            f"images took {seconds:g} s"
        )


def read_block(path: Path, sides: Iterable[str]) -> Block:
    """Read block.json; RecordError if it is not of each of these sides once a round."""
    block = read_record(path, Block)
    expected = sorted(sides)
    if sorted(block.order) != expected:
        raise RecordError(f"{path}: order is of {block.order}, and the plan's are {expected}")
    rounds: dict[int, list[str]] = {}
    for turn in block.turns:
        rounds.setdefault(turn.round, []).append(turn.side)
    if not rounds:
        raise RecordError(f"{path}: it holds no turn")
    for number, names in rounds.items():
        if sorted(names) != expected:
            raise RecordError(f"{path}: round {number} has turns of {names}, not one of each side")
    return block


def read_settings(folder: Path) -> Settings:
    path = folder / "config.json"
    flags = read_object(path)
    return replace(parse(flags, Settings, path), flags=flags)


def read_summary(folder: Path) -> Measured:
    return read_record(folder / "summary.json", Measured)


def read_metrics(path: Path) -> dict[type, list[Any]]:
    """Read the lines of metrics.jsonl by their kind; those of kinds unknown here are left out."""
    lines: dict[type, list[Any]] = {kind: [] for kind in METRICS.values()}
    for number, text in enumerate(read_text(path).splitlines(), start=1):
        where = f"{path}, line {number}"
        try:
            line = json.loads(text)
        except ValueError as error:
            raise RecordError(f"{where} is not JSON: {error}") from None
        if not isinstance(line, dict) or not isinstance(line.get("kind"), str):
            raise RecordError(f"{where}: the field 'kind' is missing")
        if kind := METRICS.get(line["kind"]):
            lines[kind].append(parse(line, kind, where))
    return lines


def check_end(path: Path, steps: int) -> None:
    """Raise RecordError if metrics.jsonl does not end as that of a run of so many steps: its lines
    are read when they are shown."""
    text = last_line(path)
    try:
        line = json.loads(text)
    except ValueError:
        raise RecordError(f"{path}: its last line is no JSON: {text[:40]!r}") from None
    if not isinstance(line, dict) or line.get("step") != steps:
        raise RecordError(
            f"{path}: its last line is not of step {steps}, the last one: {text[:40]!r}"
        )


def last_line(path: Path) -> str:
    """Return the last line of a record's file; the file may be long."""
    if not path.exists():
        return read_text(path).strip().rpartition("\n")[2]
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - LONGEST_LINE))
        return file.read().decode(errors="replace").strip().rpartition("\n")[2]


def read_record(path: Path, kind: type[Record]) -> Record:
    return parse(read_object(path), kind, path)


def recorded(record: Any) -> dict[str, Any]:
    """Return a record's fields by name, without those that its trainer did not know yet."""
    later = {field.name for field in fields(record) if field.default is None}
    return {
        name: value
        for name, value in vars(record).items()
        if value is not None or name not in later
    }


def parse(values: dict[str, Any], kind: type[Record], where: Path | str) -> Record:
    """Make a record of a JSON object; RecordError names the field that is missing or of another
    type. Fields that the record lacks are of a newer version, and passed over."""
    known = {}
    for name, is_required, shape in fields_of(kind):  # type: ignore[arg-type]  # a class is hashable
        if name in values:
            known[name] = checked(values[name], shape, where, name)
        elif is_required:
            raise RecordError(f"{where}: the field '{name}' is missing")
    for name in above_zero(kind):  # type: ignore[arg-type]
        if known[name] is not None and not known[name] > 0:
            raise RecordError(f"{where}: {name} is {known[name]!r}, which is not above 0")
    return kind(**known)


@dataclass(frozen=True)
class Shape:
    """What a field's value may be in JSON, the words for it, and what is in it."""

    types: tuple[type, ...]
    words: str
    record: type | None  # that an object is
    parts: "Shape | None"  # of a list
    is_tuple: bool


def checked(value: Any, shape: Shape, where: Path | str, name: str) -> Any:
    """Return a field's value, records made of the objects in it, if it is of this shape."""
    kind = type(value)
    if kind not in shape.types:
        raise RecordError(f"{where}: {name} is {value!r}, which is not {shape.words}")
    if kind is str:
        if CONTROL.search(value):
            raise RecordError(f"{where}: {name} is {value!r}, which holds a control character")
    elif kind is float or kind is int:
        check_number(value, where, name)
    elif kind is list and shape.parts is not None:
        parts = [checked(part, shape.parts, where, name) for part in value]
        return tuple(parts) if shape.is_tuple else parts
    elif kind is dict and shape.record is not None:
        return parse(value, shape.record, f"{where}, {name}")
    return value


def check_number(value: float, where: Path | str, name: str) -> None:
    if not abs(value) < LARGEST and name not in MAY_DIVERGE:
        raise RecordError(f"{where}: {name} is {value!r}, which is no number")
    if value < 0 and name not in MAY_BE_NEGATIVE:
        raise RecordError(f"{where}: {name} is {value!r}, which is below 0")


@cache
def above_zero(kind: type) -> tuple[str, ...]:
    """Return the fields of a record that are never 0."""
    return next((names for one, names in ABOVE_ZERO.items() if issubclass(kind, one)), ())


@cache
def fields_of(kind: type) -> list[tuple[str, bool, Shape]]:
    """Return the name of each field, whether it must be there, and its shape."""
    hints = get_type_hints(kind)
    return [
        (field.name, field.default is MISSING and field.default_factory is MISSING,
         shape_of(hints[field.name]))
        for field in fields(kind)
    ]  # fmt: skip


def shape_of(hint: Any) -> Shape:
    """Return the shape that a type hint asks for."""
    may_be_null = isinstance(hint, UnionType)
    if may_be_null:
        hint = get_args(hint)[0]
    is_record = is_dataclass(hint)
    outer = dict if is_record else get_origin(hint) or hint
    types, words = JSON_TYPES[outer]
    inner = next(iter(get_args(hint)), None) if outer in (list, tuple) else None
    return Shape(
        (*types, type(None)) if may_be_null else types,
        words,
        hint if is_record else None,
        shape_of(inner) if inner else None,
        outer is tuple,
    )


def read_text(path: Path) -> str:
    try:
        return packed.read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise RecordError(f"{path} cannot be read: {reason}") from None


def with_names_of_today(values: dict[str, Any]) -> dict[str, Any]:
    return {FORMER_NAMES.get(name, name): value for name, value in values.items()}


def read_object(path: Path) -> dict[str, Any]:
    try:
        text = read_text(path)
        is_old = any(f'"{name}"' in text for name in FORMER_NAMES)
        value = json.loads(text, object_hook=with_names_of_today if is_old else None)
    except ValueError as error:
        raise RecordError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise RecordError(f"{path} is not a JSON object")
    return value
