"""Plans in files: TOML, which people write, and the plan in a comparison's record, which can be
repeated. Also the checks of a plan, and the differences between two plans."""

import hashlib
import json
import math
import os
import re
import shlex
import sys
from collections.abc import Collection
from contextlib import suppress
from datetime import datetime, timezone
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from compare.plan.blocks import MIN_BLOCKS, RUN_MARK
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
from compare.plan.launchers import launch_words
from compare.plan.plan import (
    FIELDS,
    KEYS,
    RESERVED_FLAGS,
    OwnScript,
    Plan,
    decode,
    meta_of,
    percentage,
)
from recipe.errors import UserError, near_match, refuse
from recipe.record.schema import Text, Whole
from recipe.settings.flags import given_flags

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")
PLANS = ROOT / "compare/plans"
# The keys of a plan, and of a configuration, case or side.
KNOWN_KEYS = [*dict.fromkeys((*KEYS, "base", "flags", *OwnScript.__struct_fields__))]
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# Trainer flags that are refused in strong scaling, and why.
OF_GLOBAL_BATCH = {
    "batch_size": "--global-batch-size sets it",
    "base_lr": "--global-learning-rate sets it",
    "use_adasum": "its rule for the learning rate does not fit --global-batch-size",
    "warmup_method": "--global-batch-size needs a linear one, and sets it",
}
# Fields that cannot be combined with a user's own scripts.
OF_SEEDS = ("target_top1", "top1_goals", "top1_margin")
OF_TRAINERS = (
    "configuration",
    "workers",
    "network_interface",
    "global_batch_size",
    "trainer_arguments",
    "measure",
    "full_runs",
    *OF_SEEDS,
    "no_phases",
)
FIELD_OF = {field.name: field for field in FIELDS}
OF_A_RULE = ("until_interval", "minutes")
# Words that only a shell understands.
SHELL_ONLY = {">", ">>", "<", "2>", "2>&1", "&>", "|", "||", "&&", "&", ";"}
MOST_RATIO = 50  # a larger goal of a ratio is a percentage
# Fields that a plan to be repeated always gives, even with their default values.
ALWAYS_SAID = ("configurations", "workers", *OF_A_RULE, "seed")
IDENTIFIES = Meta(extra={"identifies": True})
MOST_SCRIPT_BYTES = 10_000_000  # a larger file is data, not a script
FORMAT = 5  # of record.jsonl (compare/evidence/record.py)


def typed(table: dict[str, Any], kind: type[T], strict: bool = True) -> T:
    """Return a table from a file or from flags as `kind`; UserError names key and value."""
    try:
        return msgspec.convert(table, kind, strict=strict, dec_hook=decode)
    except msgspec.ValidationError as error:
        raise UserError(explanation(str(error), table)) from None


def explanation(message: str, table: dict[str, Any]) -> str:
    """Return msgspec's message about a table, preceded by the key and its value."""
    what, _, path = message.partition(" - at `$")
    place = path.removeprefix(".").rstrip("`")
    what = what[0].lower() + what[1:]
    if unknown := re.search("unknown field `(.*)`", what):
        key, of_flags = unknown[1], {flag_of(field): field.encode_name for field in FIELDS}
        of_flag = of_flags.get(f"--{key.replace('_', '-')}")  # --turns is the key rounds
        known = [of_flag] if of_flag else KNOWN_KEYS
        what = f"there is no key {key}; {near_match(of_flag or key, known)}"
    if "matching regex" in what:
        what = "holds a control character"
    part = table.get(place.removesuffix("[...]"))
    if isinstance(part, dict) and not any(isinstance(value, dict) for value in part.values()):
        lines = (f'"{key}" = {json.dumps(own, default=str)}' for key, own in part.items())
        return f"[{place.removesuffix('[...]')}] {', '.join(lines)}: {what}"
    if not place or "..." in place:  # msgspec does not name the part of the table
        return f"{place}: {what}".removeprefix(": ")
    value: Any = table
    for key, index in re.findall(r"\.(\w+)|\[(\d+)\]", path):
        value = value[key or int(index)]
    return f"{place} = {value!r}: {what}"


def read_plan_file(name: str) -> dict[str, Any]:
    """Return the table of a plan file, or of the ready plan with this name. UserError names file
    and key if the plan is invalid."""
    path = Path(name)
    if path.suffix != ".toml" and not path.is_file():
        check_known("plan", name, sorted(path.stem for path in PLANS.glob("*.toml")))
        path = PLANS / f"{name}.toml"
    try:
        text = path.read_text()
        if path.suffix == ".json":
            table = plan_table(msgspec.convert(json.loads(text), dict[str, Any]))
        elif path.suffix == ".jsonl":
            table = plan_table(last_plan(text))
        else:
            table = tomllib.loads(text)
        take_hostfile(table)
        for key in ("side", "configuration"):
            if "configurations" not in table and key in table:
                table["configurations"] = list(table[key])
        check_plan(typed(table, Plan), in_file=True)
    except (OSError, ValueError, LookupError) as error:
        raise UserError(f"{path}: {error}") from None
    shown = path.relative_to(ROOT) if path.parent == PLANS else path
    return {**table, "plan_file": str(shown)}


def last_plan(text: str) -> Any:
    """Return the last plan in the text of a comparison's record. UserError if a line is damaged, as
    the last one is after a crash."""
    plans = list[Any]()
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            entry = msgspec.convert(json.loads(line), dict[str, Any])
        except (ValueError, RecursionError):
            remedy = "give another record.jsonl"
            if plans:
                remedy = (
                    "to repeat the plan above it, give a copy of the lines above it: "
                    f"head -n {number - 1} record.jsonl > copy.jsonl"
                )
            raise UserError(f"line {number} is cut off or damaged; {remedy}") from None
        if entry.get("line") == "plan":
            plans.append(entry["plan"])
    if not plans:
        raise UserError("holds no plan; give a comparison's record.jsonl")
    return plans[-1]


def take_hostfile(table: dict[str, Any]) -> None:
    """Replace a table's key `hostfile` by the hosts in that file; UserError if it has both."""
    if (hostfile := table.pop("hostfile", None)) is not None:
        if table.get("hosts") is not None:
            raise UserError("--hostfile and --hosts both name hosts; give one of them")
        table["hosts"] = read_hostfile(Path(hostfile))


def list_plans() -> str:
    """Return a text that lists the ready plans: name, question and time of each."""
    lines = ["Ready plans, for python compare/run.py NAME (what they hold: compare/plans/):", ""]
    for path in sorted(PLANS.glob("*.toml")):
        table = tomllib.loads(path.read_text())
        time = table.get("time") or f"up to {table['minutes']:g} minutes"
        lines += [path.stem, f"    {table['question']}", f"    {time}"]
    return "\n".join(lines)


def flag_of(field: msgspec.structs.FieldInfo) -> str:
    """Return the flag that sets a field."""
    name = (meta_of(field.type).extra or {}).get("flag") or field.encode_name.replace("_", "-")
    return f"--{name}"


def plan_table(plan: Any) -> dict[str, Any]:
    """Return the table of a plan file that makes this plan again; `plan` may also come from a
    record. The order's seed is left out: a repetition draws a new one."""
    values, default = (msgspec.to_builtins(source, enc_hook=float) for source in (plan, Plan()))
    never = {"order_seed"} if values.get("blocks") is None else {"order_seed", *OF_A_RULE}
    keys = [key for key in KEYS if key in values and key not in never]
    return {key: values[key] for key in keys if values[key] != default[key] or key in ALWAYS_SAID}


def parse_goal(text: str) -> tuple[str, float]:
    """Read a goal as a flag gives it, `FIRST:SECOND=RATIO` or `SIDE=SPEED`; raises UserError."""
    name, sign, value = re.findall(r"^([^=<>]*)([=<>]*)(.*)", text)[0]
    if "<" in sign:
        raise UserError(
            f"--goals {text}: a goal is the least ratio that reaches it; turn the pair around, as "
            "in SECOND:FIRST=0.98"
        )
    if sign != "=":
        raise UserError(
            f"--goals {text}: a goal is the least value that reaches it, and is written with =, as "
            f"in {name or 'FIRST:SECOND'}={value or 0.98}"
        )
    try:
        return name, float(value)
    except ValueError:
        raise UserError(
            f"--goals {text}: {value!r} is no number; give a ratio, as in FIRST:SECOND=0.98, or a "
            "speed, as in SIDE=3200"
        ) from None


def split_words_at_dashes(argv: list[str]) -> tuple[list[str], list[str]]:
    """Return the words before the first `--`, which are the command's own, and the words after it,
    which are for the trainers."""
    place = argv.index("--") if "--" in argv else len(argv)
    return argv[:place], argv[place + 1 :]


def check_known(what: str, name: str, known: Collection[str]) -> None:
    """Raise UserError if a name is not among the known ones; `what` begins the message."""
    if name not in known:
        raise UserError(f"{what} {name}: there is no such name; {near_match(name, known)}")


def check_plan(plan: Plan, in_file: bool = False) -> None:
    """Raise UserError if the plan is invalid. Later checks may rely on earlier ones. `in_file`: the
    plan is a plan file's, and not yet changed by flags."""
    check_names(plan)
    check_trainer_flags(plan)
    check_measuring(plan)
    if plan.side:
        check_scripts(plan, in_file)
    else:
        check_hosts(plan)


def check_names(plan: Plan) -> None:
    """Check the names of configurations, cases and pairs."""
    for name in (*plan.configuration, *plan.case, *plan.side):
        if not NAME.fullmatch(name):
            raise UserError(
                f"{name!r}: is used as a folder's name; use letters, digits, '-', '_' and '.'"
            )
    for name, own in plan.configuration.items():
        if name in CONFIGURATIONS:
            raise UserError(
                f"configuration {name}: is a ready one; give yours another name, as in {name}-tuned"
            )
        check_known(f"configuration {name}: base", own.base, CONFIGURATIONS)
    for name in plan.configurations:
        check_known("--configurations", name, plan.known())
    for key, goal in plan.goals.items():
        names = key.split(":", 1)
        for name in names:
            check_known(f"--goals {key}:", name, plan.configurations)
        refuse(
            (not 0 < goal < math.inf, f"--goals {key}={goal:g}: give a number above 0"),
            (
                len(names) > 1 and goal >= MOST_RATIO,
                f"--goals {key}={goal:g}: is a ratio of speeds, not a percentage; give "
                f"{key}={goal / 100:g}",
            ),
            (
                len(set(names)) < len(names),
                f"--goals {key}: name two sides, or one side for its own speed",
            ),
            (plan.null, f"--goals {key}: a null test judges no goals; leave --null or it out"),
        )
    for key in plan.top1_goals:
        first, _, second = key.partition(":")
        for name in (first, second):
            check_known(f"--top1-goals {key}:", name, plan.configurations)
        if first == second:
            raise UserError(f"--top1-goals {key}: name two sides")
    for key in plan.margins:
        check_known("--margins", key, [":".join(pair) for pair in plan.pairs()])
    for first, second in plan.judged_pairs:
        for name in (first, second):
            check_known(f"--pairs {first}:{second}:", name, plan.configurations)
        if first == second or plan.null:
            raise UserError(
                f"--pairs {first}:{second}: to compare a configuration with itself, use --null "
                "without --pairs"
            )


def check_trainer_flags(plan: Plan) -> None:
    """Check that the trainers' flags contain none that the plan sets itself."""
    refused = RESERVED_FLAGS | (OF_GLOBAL_BATCH if plan.global_batch_size else {})
    for word in chain(*plan.flag_lists):
        for name in refused.keys() & given_flags([word]):
            raise UserError(f"{word} cannot be passed to the trainers: {refused[name]}")
    for name, own in plan.configuration.items():
        if "seed" in given_flags(own.flags) or RUN_MARK in own.environment:
            raise UserError(
                f"configuration {name}: sets a seed or {RUN_MARK}, which must be the same for all "
                "configurations; leave it out"
            )


def check_measuring(plan: Plan) -> None:
    """Check how speed is measured, the end rule, and the fields of strong scaling."""
    default = Plan()
    if plan.measure == "turns" and plan.pairs():
        check_sides(plan)
    of_a_rule = [name for name in OF_A_RULE if getattr(plan, name) != getattr(default, name)]
    refuse(
        (
            plan.blocks is not None and of_a_rule,
            f"--blocks {plan.blocks}: fixes the number of blocks; leave "
            f"{' and '.join(flag_of(FIELD_OF[name]) for name in of_a_rule)} out, or --blocks",
        ),
        (
            plan.control is not None and not plan.null,
            f"--control {percentage(plan.control or 0)}: needs a null test; also give --null",
        ),
        (
            plan.measure == "runs" and plan.full_runs != default.full_runs,
            f"--full-runs {plan.full_runs}: with --measure runs all runs are full ones; give "
            "--blocks instead",
        ),
        (
            (plan.global_batch_size is None) != (plan.global_learning_rate is None),
            "--global-batch-size and --global-learning-rate: give both. In strong scaling any "
            "number of workers shares one global batch and trains with one global rate",
        ),
    )
    check_accuracy(plan)


def check_accuracy(plan: Plan) -> None:
    """Check that the fields on accuracy have an effect: several whole runs of each configuration,
    and one accuracy to reach."""
    default = Plan()
    given = [name for name in OF_SEEDS if getattr(plan, name) != getattr(default, name)]
    if not given:
        return
    names = " and ".join(flag_of(FIELD_OF[name]) for name in given)
    seeds = plan.full_runs if plan.measure == "turns" else plan.blocks
    flags = [given_flags(words) for words in plan.flag_lists]
    refuse(
        (
            plan.null or (seeds is not None and seeds < MIN_BLOCKS),
            f"{names}: needs whole runs of different configurations with at least {MIN_BLOCKS} "
            "seeds; give --measure runs --blocks 5, or --full-runs 5, and no --null",
        ),
        (
            any(own.get("data") == "synthetic" for own in flags),
            f"{names}: on random images (--data synthetic) accuracy means nothing; give other "
            "data, or leave it out",
        ),
        (
            any("desired_acc" in own for own in flags),
            f"{names}: the trainers' --desired-acc ends the trainings where they reach an "
            "accuracy, so their final accuracies say nothing; leave one of them out",
        ),
    )


def check_sides(plan: Plan) -> None:
    """Check that each rank of each configuration can take turns."""
    for member in plan.members():
        if member.trained_by.servers or member.trained_by.has_one_replica:
            raise UserError(
                f"{member.name}: some of its ranks do not train a batch of their own, so it cannot "
                "take turns; give --measure runs"
            )


def as_written(name: str, value: Any, in_file: bool) -> str:
    """Return a field of a plan with its value as its user wrote them."""
    field = FIELD_OF[name]
    if name == "trainer_arguments":
        return f'flags = "{shlex.join(value)}"' if in_file else f"-- {shlex.join(value)}"
    if in_file and isinstance(value, dict):
        return ", ".join(f"[{field.encode_name}.{part}]" for part in value)
    if in_file:
        return f"{field.encode_name} = {json.dumps(value)}"
    words = value if isinstance(value, tuple | dict) else () if value is True else (value,)
    return " ".join([flag_of(field), *map(str, words)])


def check_scripts(plan: Plan, in_file: bool) -> None:
    """Check a plan that compares a user's own scripts: it must give no settings of trainers."""
    default, takes_flags = Plan(), any("{flags}" in side.command for side in plan.side.values())
    for name, side in plan.side.items():
        of_shell = [word for word in side.command if word in SHELL_ONLY]
        refuse(
            (not side.command, f"--side {name}=: give the command that starts its ranks"),
            (
                of_shell,
                f"--side {name}: {' '.join(of_shell)}: no shell reads the command; write "
                "bash -c '...' around it",
            ),
        )
    for name, case in plan.case.items():
        if case.flags:
            raise UserError(
                f"--case {name}={shlex.join(case.flags)}: a script is told only the name, by "
                f"side.case; give --case {name}="
            )
    for name in OF_TRAINERS:
        given = None if name == "trainer_arguments" and takes_flags else getattr(plan, name)
        if given not in (None, getattr(default, name)):
            remedy = (
                "write {flags} in a command to say where they belong"
                if name == "trainer_arguments"
                else "leave it out. Your script's flags and number of workers belong in its command"
            )
            raise UserError(
                f"{as_written(name, given, in_file)}: is for this project's trainers; {remedy}"
            )
    if len(plan.side) < 2 and not plan.null:
        raise UserError(f"--side {next(iter(plan.side))}: a comparison needs two --side, or --null")


def check_hosts(plan: Plan) -> None:
    """Check that the hosts, if they are known by now, have room for all ranks."""
    if plan.hosts is None:
        return
    slots = sum(read_hosts(plan.hosts).values())
    if plan.most_ranks > slots:
        raise UserError(
            f"--hosts {plan.hosts}: has slots for {slots} ranks, but the plan needs "
            f"{plan.most_ranks}; give more slots, or fewer --workers"
        )
    for configuration in plan.members():
        for workers in plan.workers:
            launch_words(configuration, workers, plan.hosts)  # refuses ranks that it cannot place


# The plan in a record.


class Variables(Struct, frozen=True, kw_only=True):
    """The environment of all runs."""

    set: dict[str, str] = {}
    removed: tuple[str, ...] = ()
    inherited: dict[str, str] = {}
    affinity: tuple[int, ...] = ()  # also inherited: no launcher binds to cores


class PlanRecord(Plan, frozen=True, kw_only=True):
    """The plan in a record: a plan, plus the facts added when it was run. Enough to make the report
    and to resume after an interruption."""

    created_utc: Text
    format: Whole
    warnings: tuple[Text, ...] = ()
    trainers_sha256: str | None = None
    # The digests of the files that the commands of scripts name.
    scripts: Annotated[dict[str, str], IDENTIFIES] = msgspec.field(default_factory=dict)
    environment: Annotated[Variables, IDENTIFIES]


def plan_record(plan: Plan, created_utc: str) -> PlanRecord:
    """Return the plan as its record holds it, if it is run here and now."""
    inherited, affinity = steering_variables(), tuple(sorted(os.sched_getaffinity(0)))
    if plan.is_allocation:  # another job may get other cores and GPUs; each run records its own
        inherited.pop("CUDA_VISIBLE_DEVICES", None)
        affinity = ()
    fields = {name: getattr(plan, name) for name in Plan.__struct_fields__}
    return PlanRecord(
        **fields | {"allocation": None, "blocks_there": 0},
        created_utc=created_utc,
        format=FORMAT,
        trainers_sha256=sources_sha256(plan),
        scripts=scripts_sha256(plan),
        environment=Variables(
            set={name: value for name, value in set_variables().items() if name != "PATH"},
            removed=REMOVED_VARIABLES,
            inherited=inherited,
            affinity=affinity,
        ),
    )


def scripts_sha256(plan: Plan) -> dict[str, str]:
    """Return the digest of each file that the commands of a user's own scripts name, by its path
    from here. The modules that these files import are not covered, nor what a commit holds: its
    name stands for that, also when its worktree is gone."""
    digests, known = dict[str, str](), plan.known()
    for name in dict.fromkeys(
        os.path.join(known[name].place, word)
        for name, side in plan.side.items()
        for word in side.command
        if not side.commit or os.path.isabs(word)
    ):
        with suppress(OSError):  # too long for a path, or not readable
            if Path(name).is_file() and Path(name).stat().st_size <= MOST_SCRIPT_BYTES:
                digests[name] = hashlib.sha256(Path(name).read_bytes()).hexdigest()
    return digests


def sources_sha256(plan: Plan) -> str:
    """Return the digest of all sources that are measured: the trainers', or those of a user's
    scripts, plus the trainers' if a script belongs to this project and may start a trainer."""
    if not plan.side:
        return trainers_sha256()
    scripts = scripts_sha256(plan)
    is_ours = any(Path(name).resolve().is_relative_to(ROOT) for name in scripts)
    digests = {**scripts, "trainers": trainers_sha256() if is_ours else ""}
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest()


def plan_of_record(table: dict[str, Any]) -> PlanRecord:
    """Return the plan that a record holds; UserError names the field that is wrong."""
    if (format := table.get("format")) != FORMAT:
        raise UserError(
            f"format is {format!r}, and this version reads {FORMAT}: report it with the version "
            "that measured it, or measure again"
        )
    try:
        plan = typed(table, PlanRecord)
        check_names(plan)
        plan.runs()  # raises if the plan makes no valid runs
        datetime.fromisoformat(plan.created_utc).astimezone(timezone.utc)
    except (RecursionError, ValueError) as error:
        raise UserError(f"the plan cannot be read: {error}") from None
    return plan


def plan_differences(old: PlanRecord, new: PlanRecord) -> list[str]:
    """Return the differences by which a new plan would make other runs than an old one. The number
    of blocks does not count."""
    differences = [
        f"{field.encode_name}: {getattr(old, field.name)!r} there, {getattr(new, field.name)!r} now"
        for field in msgspec.structs.fields(PlanRecord)
        if (meta_of(field.type).extra or {}).get("identifies")
        and getattr(old, field.name) != getattr(new, field.name)
        # A new plan that leaves the order's seed open takes the old plan's.
        and (field.name != "order_seed" or new.order_seed is not None)
    ]
    if new.trainers_sha256 != old.trainers_sha256:
        differences.append("the sources of what is measured were changed since then")
    return differences
