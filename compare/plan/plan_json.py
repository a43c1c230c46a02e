"""plan.json: a plan as a comparison's folder keeps it, and in what two of them differ."""

import hashlib
import json
import os
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from compare.plan.environment import (
    REMOVED_VARIABLES,
    ROOT,
    set_variables,
    steering_variables,
    trainers_sha256,
)
from compare.plan.plan import NOT_EMPTY, Plan, Text, meta_of
from compare.plan.plan_file import check_names, typed
from recipe.errors import UserError
from recipe.files import write_json
from recipe.record.schema import Whole
from recipe.settings.flags import last_value

IDENTIFIES = Meta(extra={"identifies": True})
MOST_SCRIPT_BYTES = 10_000_000  # what is larger is data
FORMAT = 4  # of plan.json and what lies beside it; 4: with seals (compare/evidence/chain.py)
END = ("blocks", "until_interval", "minutes")  # the fields that say when the measuring ends


class Variables(Struct, frozen=True, kw_only=True):
    """The environment of all runs."""

    set: dict[str, str] = {}
    removed: tuple[str, ...] = ()
    inherited: dict[str, str] = {}
    affinity: tuple[int, ...] = ()  # inherited, too: no launcher binds


class PlanRecord(Plan, frozen=True, kw_only=True):
    """plan.json: a plan, and what was added when it was run. Enough for the report, and to go on
    after an interruption."""

    created_utc: Text
    format: Whole
    warnings: tuple[Text, ...] = ()
    # When each end was set, and which; the last is the one that counts. Later ones are extensions.
    ends: Annotated[tuple[dict[str, str | int | float | None], ...], NOT_EMPTY]
    trainers_sha256: str | None = None
    # The digest of each file of knobs, and of each file that the commands of scripts name.
    knobs: Annotated[dict[str, str | None], IDENTIFIES] = msgspec.field(default_factory=dict)
    scripts: Annotated[dict[str, str], IDENTIFIES] = msgspec.field(default_factory=dict)
    environment: Annotated[Variables, IDENTIFIES]


def plan_record(plan: Plan, created_utc: str) -> PlanRecord:
    """Return what plan.json holds of a plan that is run here and now."""
    inherited, affinity = steering_variables(), tuple(sorted(os.sched_getaffinity(0)))
    if plan.is_allocation:  # another job may get other cores and GPUs; each run writes down its own
        inherited.pop("CUDA_VISIBLE_DEVICES", None)
        affinity = ()
    knobs = {last_value(words, "--knobs") for words in plan.flag_lists}
    paths = {name: Path(os.path.expanduser(name)) for name in sorted(filter(None, knobs))}
    fields = {name: getattr(plan, name) for name in Plan.__struct_fields__}
    return PlanRecord(
        **fields | {"allocation": None, "blocks_there": plan.run_blocks},
        created_utc=created_utc,
        format=FORMAT,
        ends=({"created_utc": created_utc, **{name: getattr(plan, name) for name in END}},),
        trainers_sha256=sources_sha256(plan),
        scripts=scripts_sha256(plan),
        knobs={
            name: hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
            for name, path in paths.items()
        },
        environment=Variables(
            set={name: value for name, value in set_variables().items() if name != "PATH"},
            removed=REMOVED_VARIABLES,
            inherited=inherited,
            affinity=affinity,
        ),
    )


def scripts_sha256(plan: Plan) -> dict[str, str]:
    """Return the digest of each file that the commands of a user's own scripts name. What these
    import is not seen."""
    found = dict[str, str]()
    for word in dict.fromkeys(word for own in plan.side.values() for word in own.command):
        with suppress(OSError):  # too long for a path, or not for us to read
            if Path(word).is_file() and Path(word).stat().st_size <= MOST_SCRIPT_BYTES:
                found[word] = hashlib.sha256(Path(word).read_bytes()).hexdigest()
    return found


def sources_sha256(plan: Plan) -> str:
    """Return the digest of all sources of what is measured: the trainers', or a user's scripts,
    which may start a trainer."""
    if not plan.side:
        return trainers_sha256()
    scripts = scripts_sha256(plan)
    is_ours = any(Path(name).resolve().is_relative_to(ROOT) for name in scripts)
    told = {**scripts, "trainers": trainers_sha256() if is_ours else ""}
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def write_plan(path: Path, record: PlanRecord) -> None:
    """Write plan.json."""
    write_json(path, msgspec.to_builtins(record, enc_hook=float))


def read_plan(path: Path) -> PlanRecord:
    """Read plan.json; UserError names file and field."""
    try:
        told = msgspec.convert(json.loads(path.read_text("utf-8")), dict)
        if (format := told.get("format")) != FORMAT:
            raise UserError(
                f"format is {format!r}, and this version reads {FORMAT}: report it with the "
                "version that measured it, or measure again"
            )
        plan = typed(told, PlanRecord)
        check_names(plan)
        plan.runs()  # which raises if they cannot be made
        datetime.fromisoformat(plan.created_utc).astimezone(timezone.utc)
        if any(getattr(plan, name) != plan.ends[-1].get(name) for name in END):
            raise UserError(f"{', '.join(END)}: they are not those of the last of its ends")
    except (OSError, RecursionError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    return plan


def plan_differences(old: PlanRecord, new: PlanRecord) -> list[str]:
    """Return in what a new plan would make other runs than an old one; more blocks are none."""
    differences = [
        f"{field.encode_name}: {getattr(old, field.name)!r} there, {getattr(new, field.name)!r} now"
        for field in msgspec.structs.fields(PlanRecord)
        if (meta_of(field.type).extra or {}).get("identifies")
        and getattr(old, field.name) != getattr(new, field.name)
        # Where the seed of the order is open, it is that of the plan which is there.
        and (field.name != "order_seed" or new.order_seed is not None)
    ]
    if new.trainers_sha256 != old.trainers_sha256:
        differences.append("the sources of what is measured were changed since")
    return differences
