"""Read a run folder, strictly: every field of the records in recipe/record/schema.py is there and
of its type, or RecordError names the file and the field."""

import json
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from compare.errors import UserError
from compare.evidence import packed
from recipe.record.schema import FORMAT, METRICS, Environment, Settings, Summary

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
    dict: ((dict,), "an object"),
}


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
    summary: Measured


def read_run_folder(folder: Path) -> RunFolder:
    """Read what a complete run says of itself, metrics.jsonl aside; RecordError names the file and
    the field that is wrong."""
    path = folder / "environment.json"
    environment = read_record(path, Environment)
    if environment.format > FORMAT:
        raise RecordError(
            f"{path}: its format is {environment.format}, and this version of the project reads "
            f"formats up to {FORMAT}"
        )
    return RunFolder(read_settings(folder), environment, read_summary(folder))


def read_settings(folder: Path) -> Settings:
    path = folder / "config.json"
    flags = read_object(path)
    return replace(parse(flags, Settings, path), flags=flags)


def read_summary(folder: Path) -> Measured:
    path = folder / "summary.json"
    summary = read_record(path, Measured)
    for field in ("images_per_second", "cpu_seconds_per_image"):
        if not (value := getattr(summary, field)) > 0:
            raise RecordError(f"{path}: {field} is {value!r}, which is not above 0")
    return summary


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
    for name, is_required, hint in fields_of(kind):  # type: ignore[arg-type]  # a class is hashable
        if name in values:
            known[name] = checked(values[name], hint, where, name)
        elif is_required:
            raise RecordError(f"{where}: the field '{name}' is missing")
    return kind(**known)


def checked(value: Any, hint: Any, where: Path | str, name: str) -> Any:
    """Return a field's value, records made of the objects in it, if it is as its hint says."""
    types, words, inner = shape_of(hint)
    if type(value) not in types:
        raise RecordError(f"{where}: {name} is {value!r}, which is not {words}")
    if isinstance(value, list):
        return [checked(part, inner, where, name) for part in value]
    if value is None or not is_dataclass(inner):
        return value
    assert isinstance(inner, type)
    return parse(value, inner, f"{where}, {name}")


@cache
def fields_of(kind: type) -> list[tuple[str, bool, Any]]:
    """Return the name of each field, whether it must be there, and its type hint."""
    hints = get_type_hints(kind)
    return [
        (field.name, field.default is MISSING and field.default_factory is MISSING,
         hints[field.name])
        for field in fields(kind)
    ]  # fmt: skip


@cache
def shape_of(hint: Any) -> tuple[tuple[type, ...], str, Any]:
    """Return what a value of this hint may be in JSON, the words for it, and the hint of what is
    in it: the record itself of an object, the elements of a list."""
    may_be_null = isinstance(hint, UnionType)
    if may_be_null:
        hint = get_args(hint)[0]
    outer = dict if is_dataclass(hint) else get_origin(hint) or hint
    types, words = JSON_TYPES[outer]
    inner = hint if is_dataclass(hint) else next(iter(get_args(hint)), None)
    return (*types, type(None)) if may_be_null else types, words, inner


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
        value = json.loads(read_text(path), object_hook=with_names_of_today)
    except ValueError as error:
        raise RecordError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise RecordError(f"{path} is not a JSON object")
    return value
