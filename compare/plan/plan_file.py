"""Plans in files: TOML as people write it, and plan.json as a comparison's folder keeps it, which
can be repeated; what is wrong in a plan, and in what two of them differ."""

import hashlib
import json
import os
import re
import sys
from collections.abc import Collection
from contextlib import suppress
from datetime import datetime, timezone
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from compare.plan.blocks import RUN_MARK
from compare.plan.configurations import CONFIGURATIONS
from compare.plan.environment import (
    REMOVED_VARIABLES,
    ROOT,
    read_hostfile,
    read_hosts,
    set_variables,
    steering_variables,
    trainers_sha256,
)
from compare.plan.plan import (
    FIELDS,
    KEYS,
    NOT_EMPTY,
    RESERVED_FLAGS,
    Plan,
    decode,
    meta_of,
    percentage,
)
from recipe.errors import UserError, near_match, refuse
from recipe.files import write_json
from recipe.record.schema import Text, Whole
from recipe.settings.flags import flag_name, last_value

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")
PLANS = ROOT / "compare/plans"
# Of a configuration, case or side.
KEYS_OF_PARTS = ("base", "flags", "environment", "command")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# In strong scaling, flags that the plan sets itself.
OF_GLOBAL_BATCH = {
    "--batch-size": "--global-batch-size sets it",
    "--base-lr": "--global-learning-rate sets it",
    "--use-adasum": "its learning rate follows another rule than --global-batch-size needs",
    "--warmup-method": "--global-batch-size needs a linear one, and sets it",
}
# Fields that do not go with scripts of a user's own.
OF_TRAINERS = (
    "configuration", "case", "workers", "network_interface", "global_batch_size",
    "trainer_arguments", "measure", "full_runs", "no_phases",
)  # fmt: skip
FIELD_OF = {field.name: field for field in FIELDS}
# What a plan that is to be repeated says of these, whatever their values.
OF_A_RULE = ("until_interval", "minutes")
ALWAYS_SAID = ("configurations", "workers", *OF_A_RULE, "seed")
IDENTIFIES = Meta(extra={"identifies": True})
MOST_SCRIPT_BYTES = 10_000_000  # what is larger is data
FORMAT = 4  # of plan.json and what lies beside it; 4: with seals (compare/evidence/chain.py)
END = ("blocks", "until_interval", "minutes")  # the fields that say when the measuring ends


def typed(table: dict[str, Any], kind: type[T], strict: bool = True) -> T:
    """Return a table of a file, or of flags, as `kind`; UserError names key and value."""
    try:
        return msgspec.convert(table, kind, strict=strict, dec_hook=decode)
    except msgspec.ValidationError as error:
        raise UserError(explanation(str(error), table)) from None


def explanation(message: str, table: dict[str, Any]) -> str:
    """Return msgspec's message about a table, with the key and its value before it."""
    what, _, path = message.partition(" - at `$")
    place = path.removeprefix(".").rstrip("`")
    what = what[0].lower() + what[1:]
    if unknown := re.search("unknown field `(.*)`", what):
        what = f"there is no key {unknown[1]}; {near_match(unknown[1], [*KEYS, *KEYS_OF_PARTS])}"
    if "matching regex" in what:
        what = "holds a control character"
    if not place or "..." in place:  # msgspec does not say in which part of a table
        return f"{place}: {what}".removeprefix(": ")
    value: Any = table
    for key, index in re.findall(r"\.(\w+)|\[(\d+)\]", path):
        value = value[key or int(index)]
    return f"{place} = {value!r}: {what}"


def read_plan_file(name: str) -> dict[str, Any]:
    """Return what a plan file, or the ready plan of this name, says; UserError names file and key
    if that is no valid plan."""
    path = Path(name)
    if path.suffix != ".toml" and not path.is_file():
        check_known("plan", name, sorted(path.stem for path in PLANS.glob("*.toml")))
        path = PLANS / f"{name}.toml"
    try:
        text = path.read_text()
        if path.suffix == ".json":
            table = plan_table(msgspec.convert(json.loads(text), dict[str, Any]))
        else:
            table = tomllib.loads(text)
        take_hostfile(table)
        take_copies(table)
        for own in ("configuration", "side"):
            if "configurations" not in table and own in table:
                table["configurations"] = list(table[own])
        check_plan(typed(table, Plan))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {error}") from None
    shown = path.relative_to(ROOT) if path.parent == PLANS else path
    return {**table, "plan_file": str(shown)}


def take_copies(table: dict[str, Any]) -> None:
    """Take out of a plan of before that each of its scripts is started once, as all are now;
    UserError if one was to be started more often."""
    sides = table.get("side")
    for name, side in sides.items() if isinstance(sides, dict) else ():
        copies = side.pop("copies", 1) if isinstance(side, dict) else 1
        refuse((
            copies != 1,
            f"side.{name}.copies = {copies!r}: a side is started once now; let one launcher start "
            "its processes, and report what was measured so with the version that did it",
        ))  # fmt: skip


def take_hostfile(table: dict[str, Any]) -> None:
    """Put the hosts of a hostfile that a table names in its place."""
    if (hostfile := table.pop("hostfile", None)) is not None:
        if table.get("hosts") is not None:
            raise UserError("--hostfile and --hosts both name hosts; give one of them")
        table["hosts"] = read_hostfile(Path(hostfile))


def list_plans() -> str:
    """Return the ready plans: name, question and time of each."""
    lines = ["Ready plans, for python compare/run.py NAME (what they hold: compare/plans/):", ""]
    for path in sorted(PLANS.glob("*.toml")):
        table = tomllib.loads(path.read_text())
        lines += [path.stem, f"    {table['question']}", f"    {table['time']}"]
    return "\n".join(lines)


def flag_of(field: msgspec.structs.FieldInfo) -> str:
    """Return the flag that gives a field."""
    name = (meta_of(field.type).extra or {}).get("flag") or field.encode_name.replace("_", "-")
    return f"--{name}"


def plan_table(plan: Any) -> dict[str, Any]:
    """Return what a plan file says that makes this plan, or that of a plan.json, without the seed
    of the order: who repeats a comparison draws another one."""
    told, default = (msgspec.to_builtins(one, enc_hook=float) for one in (plan, Plan()))
    never = {"order_seed"} if told.get("blocks") is None else {"order_seed", *OF_A_RULE}
    said = [key for key in KEYS if key in told and key not in never]
    return {key: told[key] for key in said if told[key] != default[key] or key in ALWAYS_SAID}


def split_words_at_dashes(argv: list[str]) -> tuple[list[str], list[str]]:
    """Return a command's own words, and those of the trainers after the first `--`."""
    place = argv.index("--") if "--" in argv else len(argv)
    return argv[:place], argv[place + 1 :]


def check_known(what: str, name: str, known: Collection[str]) -> None:
    """Raise UserError if a name is none of the known ones; `what` is what bears it."""
    if name not in known:
        raise UserError(f"{what} {name}: there is no such name; {near_match(name, known)}")


def check_plan(plan: Plan) -> None:
    """Raise UserError if the plan is invalid. What is checked later may rely on what was checked
    before."""
    check_names(plan)
    check_trainer_flags(plan)
    check_measuring(plan)
    if plan.side:
        check_scripts(plan)
    else:
        check_hosts(plan)


def check_names(plan: Plan) -> None:
    """Check the names of configurations, cases and pairs."""
    for name in (*plan.configuration, *plan.case, *plan.side):
        refuse((
            not NAME.fullmatch(name),
            f"{name!r}: a folder will bear this name; use letters, digits, '-', '_' and '.'",
        ))  # fmt: skip
    for name, own in plan.configuration.items():
        refuse((
            name in CONFIGURATIONS,
            f"configuration {name}: is a ready one; name yours otherwise, as in {name}-tuned",
        ))  # fmt: skip
        check_known(f"configuration {name}: base", own.base, CONFIGURATIONS)
    for name in plan.configurations:
        check_known("--configurations", name, plan.known())
    for key in plan.goals:
        for name in key.split(":", 1):
            check_known(f"--goals {key}:", name, plan.configurations)
    for key in plan.margins:
        check_known("--margins", key, [":".join(pair) for pair in plan.pairs()])
    for first, second in plan.judged_pairs:
        for name in (first, second):
            check_known(f"--pairs {first}:{second}:", name, plan.configurations)
        refuse((
            first == second or plan.null,
            f"--pairs {first}:{second}: to compare configurations with themselves use --null, "
            "without --pairs",
        ))  # fmt: skip


def check_trainer_flags(plan: Plan) -> None:
    """Check that no flags of the trainers are those by which the plan itself steers them."""
    refused = RESERVED_FLAGS | (OF_GLOBAL_BATCH if plan.global_batch_size else {})
    for word in chain(*plan.flag_lists):
        reason = refused.get(flag_name(word))
        refuse((reason, f"{word} cannot be passed to the trainers: {reason}"))
    for name, own in plan.configuration.items():
        refuse((
            last_value(own.flags, "--seed") is not None or RUN_MARK in own.environment,
            f"configuration {name}: gives a seed or {RUN_MARK}, which are the same for all "
            "configurations; leave it out",
        ))  # fmt: skip


def check_measuring(plan: Plan) -> None:
    """Check how speed is measured, what ends that, and what strong scaling needs."""
    default, by_turns = Plan(), plan.measure == "turns" and plan.pairs()
    known = [one for one in plan.members() if by_turns]
    shared = [one.name for one in known if one.trained_by.servers or one.trained_by.has_one_replica]
    refuse(
        (
            shared,
            f"{', '.join(shared)}: not each of its ranks trains a batch of its own, so that it "
            "takes no turns; give --measure runs",
        ),
        *(
            (
                plan.blocks is not None and getattr(plan, name) != getattr(default, name),
                f"--blocks {plan.blocks}: so many blocks are measured, however long they take and "
                f"whatever they show; leave --{name.replace('_', '-')} out, or --blocks",
            )
            for name in OF_A_RULE
        ),
        (
            plan.control is not None and not plan.null,
            f"--control {percentage(plan.control or 0)}: belongs to a null test; give --null, too",
        ),
        (
            plan.measure == "runs" and plan.full_runs != default.full_runs,
            f"--full-runs {plan.full_runs}: with --measure runs all runs are full ones; give "
            "--blocks, or leave it out",
        ),
        (
            (plan.global_batch_size is None) != (plan.global_learning_rate is None),
            "--global-batch-size and --global-learning-rate: give both. In strong scaling the "
            "workers share a global batch and train with one global rate, whatever their number",
        ),
    )
    plan.block(1)  # which refuses a global batch that does not divide


def check_scripts(plan: Plan) -> None:
    """Check that what is compared are scripts of the user's own alone, without what belongs to
    trainers."""
    default, takes_flags = Plan(), any("{flags}" in own.command for own in plan.side.values())
    for name, own in plan.side.items():
        refuse((not own.command, f"--side {name}=: say the command that starts its ranks"))
    for name in OF_TRAINERS:
        given = None if name == "trainer_arguments" and takes_flags else getattr(plan, name)
        refuse((
            given not in (None, getattr(default, name)),
            f"{flag_of(FIELD_OF[name])} {given}: belongs to this project's trainers; what a script "
            "of your own does, and how many workers it has, stands in its command",
        ))  # fmt: skip
    refuse((
        len(plan.side) < 2 and not plan.null,
        f"--side {next(iter(plan.side))}: is one side alone; give another --side, or --null",
    ))  # fmt: skip


def check_hosts(plan: Plan) -> None:
    """Check that the hosts, if they are known by now, take what is to run on them."""
    if plan.hosts is None:
        return
    slots = sum(read_hosts(plan.hosts).values())
    if plan.most_ranks > slots:
        raise UserError(
            f"--hosts {plan.hosts}: takes {slots} ranks, but {plan.most_ranks} are asked for; give "
            "more slots, or fewer --workers"
        )
    for configuration in plan.members():
        for workers in plan.workers:
            configuration.launch_words(workers, plan.hosts)  # which refuses what it cannot place


# plan.json


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
        take_copies(told)
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
