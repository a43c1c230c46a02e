"""Read a run folder, strictly: every field of the records in recipe/record/schema.py is there and
of its type, or RecordError names the file and the field."""

import json
import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from compare.evidence import packed
from compare.evidence.turns import Block, Turn
from compare.plan.plan_file import explanation
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
# A setting and a launcher as older trainers wrote them, and as they are called today.
FORMER_NAMES = {
    '"trace_steps":': '"tensor_steps":',
    '"launcher": "slurm"': '"launcher": "srun"',
}


class RecordError(UserError):
    """A run folder that cannot be read; the message names file and field."""


# Fields that a training which diverged makes NaN or infinite; no other number is either.
MAY_DIVERGE = {"loss", "top1", "top5", "best_top1", "learning_rate"}
MAY_BE_NEGATIVE = {"loss", "exposed_communication_seconds", "seed", "exit_code"}
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


def read_run_folder(folder: Path, is_side: bool = False) -> RunFolder:
    """Read what a complete run says of itself, metrics.jsonl aside, or a side of a block of turns,
    which has no summary; RecordError names the file and the field that is wrong."""
    path = folder / "environment.json"
    environment = read_record(path, Environment)
    if environment.format > FORMAT:
        raise RecordError(
            f"{path}: its format is {environment.format}, and this version of the project reads "
            f"formats up to {FORMAT}"
        )
    path = folder / "config.json"
    flags = read_object(path)
    config = replace(parse(flags, Settings, path), flags=flags)
    if is_side:
        return RunFolder(config, environment, None)
    summary = read_summary(folder)
    check_fingerprint(config, summary, folder / "summary.json")
    check_speed(config, summary, folder / "summary.json")
    return RunFolder(config, environment, summary)


def read_summary(folder: Path) -> Measured:
    """Read a complete run's summary.json."""
    return read_record(folder / "summary.json", Measured)


def check_fingerprint(config: Settings, summary: Summary, path: Path) -> None:
    """Raise RecordError if the fingerprint lacks something, or is another run's."""
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
    for field in (factors := ("batch_size", "world_size", "batches_per_allreduce")):
        if type(told[field]) is not int or told[field] < 1:
            raise RecordError(f"{path}: {field} of the fingerprint is {told[field]!r}")
    images = math.prod(told[field] for field in factors)
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
    if not block.turns:
        raise RecordError(f"{path}: it holds no turn")
    for number in {turn.round for turn in block.turns}:
        names = sorted(turn.side for turn in block.turns if turn.round == number)
        if names != expected:
            raise RecordError(f"{path}: round {number} has turns of {names}, not one of each side")
    return block


def read_metrics(path: Path) -> dict[type, list[Any]]:
    """Read the lines of metrics.jsonl by their kind; those of kinds unknown here are left out."""
    lines: dict[type, list[Any]] = {kind: [] for kind in METRICS.values()}
    for number, text in enumerate(read_text(path).splitlines(), start=1):
        line = decode(text, where := f"{path}, line {number}")
        if not isinstance(line.get("kind"), str):
            raise RecordError(f"{where}: the field 'kind' is missing")
        if kind := METRICS.get(line["kind"]):
            lines[kind].append(parse(line, kind, where))
    return lines


def check_end(path: Path, steps: int) -> None:
    """Raise RecordError if metrics.jsonl does not end as that of a run of so many steps: its lines,
    which may be many, are read when they are shown."""
    if path.exists():
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LONGEST_LINE))
            end = file.read().decode(errors="replace")
    else:
        end = read_text(path)
    last = end.strip().rpartition("\n")[2]
    try:
        is_last = json.loads(last)["step"] == steps
    except (ValueError, LookupError, TypeError):
        is_last = False
    if not is_last:
        raise RecordError(f"{path}: its last line is not of step {steps}, the last: {last[:40]!r}")


def read_record(path: Path, kind: type[Record]) -> Record:
    """Read a JSON file that holds one record."""
    return parse(read_object(path), kind, path)


def parse(values: dict[str, Any], kind: type[Record], where: Path | str) -> Record:
    """Make a record of a JSON object; RecordError names the field that is missing or wrong. Fields
    that the record lacks are of a newer version, and passed over."""
    try:
        record = msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise RecordError(f"{where}: {explanation(str(error), values)}") from None
    check_values(record, where)
    return record


def check_values(record: Any, where: Path | str) -> None:
    """Raise RecordError if a record holds what its fields' types allow and no measurement is."""
    above_zero = next((names for kind, names in ABOVE_ZERO.items() if isinstance(record, kind)), ())
    for name, value in vars(record).items():
        for part in value if isinstance(value, list | tuple) else (value,):
            wrong = ""
            if is_dataclass(part):
                check_values(part, f"{where}, {name}")
            elif isinstance(part, str):
                wrong = "which holds a control character" if CONTROL.search(part) else ""
            elif isinstance(part, float | int):
                if not abs(part) < LARGEST and name not in MAY_DIVERGE:
                    wrong = "which is no number"
                elif part < 0 and name not in MAY_BE_NEGATIVE:
                    wrong = "which is below 0"
                elif part == 0 and name in above_zero:
                    wrong = "which is not above 0"
            if wrong:
                raise RecordError(f"{where}: {name} is {part!r}, {wrong}")


def recorded(record: Any) -> dict[str, Any]:
    """Return a record's fields by name, without those that its trainer did not know yet."""
    later = {field.name for field in fields(record) if field.default is None}
    return {
        name: value
        for name, value in vars(record).items()
        if value is not None or name not in later
    }


def read_text(path: Path) -> str:
    """Read a record's file; RecordError if that cannot be."""
    try:
        return packed.read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise RecordError(f"{path} cannot be read: {reason}") from None


def read_object(path: Path) -> dict[str, Any]:
    """Read a file that holds a JSON object, with the names of today."""
    text = read_text(path)
    for former, name in FORMER_NAMES.items():
        text = text.replace(former, name)
    return decode(text, path)


def decode(text: str, where: Path | str) -> dict[str, Any]:
    """Return the JSON object that a text is; RecordError if it is none."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise RecordError(f"{where} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise RecordError(f"{where} is not a JSON object")
    return value
