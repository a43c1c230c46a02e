"""Plans as people write them: TOML files, or the plan.json of a comparison that is to be repeated;
and what is wrong in a plan."""

import json
import re
import sys
from collections.abc import Collection
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from compare.plan.blocks import RUN_MARK
from compare.plan.configurations import CONFIGURATIONS
from compare.plan.environment import ROOT
from compare.plan.hosts import read_hostfile, read_hosts
from compare.plan.plan import (
    FIELDS,
    KEYS,
    RESERVED_FLAGS,
    Plan,
    decode,
    meta_of,
    percentage,
)
from recipe.errors import UserError, near_match, refuse
from recipe.settings.flags import flag_name, last_value

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")
PLANS = ROOT / "compare/plans"
# Of a configuration, case or side.
KEYS_OF_PARTS = ("base", "flags", "environment", "command", "copies")
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
        for own in ("configuration", "side"):
            if "configurations" not in table and own in table:
                table["configurations"] = list(table[own])
        check_plan(typed(table, Plan))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {error}") from None
    shown = path.relative_to(ROOT) if path.parent == PLANS else path
    return {**table, "plan_file": str(shown)}


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
    """Check what ends the measuring, and what strong scaling needs."""
    default = Plan()
    refuse(
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
