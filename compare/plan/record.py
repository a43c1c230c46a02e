"""plan.json: a plan as a comparison's folder keeps it, and in what two of them differ."""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from compare.plan.configurations import CONFIGURATIONS, Configuration
from compare.plan.environment import REMOVED_VARIABLES, set_variables, steering_variables
from compare.plan.hosts import SLURM, interface_variables
from compare.plan.plan import Case, Plan, Run, knobs_files, varied_fields
from compare.plan.plan_file import check_keys
from compare.plan.sources import trainers_sha256
from recipe.errors import UserError


def knobs_sha256(plan: Plan) -> dict[str, str | None]:
    """Return the digest of each file of knobs: with another content the runs are others."""
    paths = {name: Path(name).expanduser() for name in knobs_files(plan)}
    return {
        name: hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
        for name, path in paths.items()
    }


def plan_record(plan: Plan, created_utc: str, warnings: Sequence[str] = ()) -> dict[str, Any]:
    """Return what plan.json holds: enough for the report, and to go on after an interruption."""
    members = plan.members()
    inherited, affinity = steering_variables(), sorted(os.sched_getaffinity(0))
    if plan.is_allocation:  # another job may get other cores and GPUs; each run writes down its own
        inherited.pop("CUDA_VISIBLE_DEVICES", None)
        affinity = []
    return {
        "question": plan.question,
        "plan_file": plan.plan_file,
        "left_out": list(plan.left_out),
        "configurations": [configuration.name for configuration in members],
        "configuration_details": {
            configuration.name: {
                "engine": configuration.engine,
                "launcher": configuration.launcher,
                "controller": configuration.controller,
                "transport": configuration.transport,
                "flags": list(configuration.flags),
                "environment": configuration.variables,
            }
            for configuration in members
        },
        "pairs": [list(pair) for pair in plan.pairs()],
        "varied": varied_fields(members),
        "cases": [{"name": case.name, "flags": list(case.flags)} for case in plan.cases],
        "workers": list(plan.workers),
        "scaling": "weak" if plan.global_batch_size is None else "strong",
        "global_batch_size": plan.global_batch_size,
        "global_learning_rate": plan.global_learning_rate,
        "hosts": SLURM if plan.is_allocation else plan.hosts,
        "network_interface": plan.network_interface,
        "measure": plan.measure,
        "full_runs": plan.full_runs,
        "blocks": plan.blocks,
        "until_interval": plan.until_interval,
        "minutes": plan.minutes,
        "margin": plan.margin,
        "extensions": [],
        "seed": plan.seed,
        "order_seed": plan.order_seed,
        "null": plan.null,
        "phase_steps": plan.phase_steps,
        "timeout": plan.timeout,
        "trainer_arguments": list(plan.trainer_arguments),
        "warnings": list(warnings),
        "created_utc": created_utc,
        "trainers_sha256": trainers_sha256(),
        "knobs": knobs_sha256(plan),
        "environment": {
            "set": {name: value for name, value in set_variables().items() if name != "PATH"},
            "removed": list(REMOVED_VARIABLES),
            "inherited": inherited,
            "affinity": affinity,  # inherited, too: no launcher binds
        },
        "runs": [run_record(run) for run in plan.runs()],
        "phase_runs": [run_record(run) for run in plan.phase_runs()],
    }


def run_record(run: Run) -> dict[str, Any]:
    return {
        "block": run.block,
        "case": run.case,
        "configuration": run.configuration.name,
        "engine": run.configuration.engine,
        "launcher": run.configuration.launcher,
        "workers": run.workers,
        "seed": run.seed,
        "folder": run.folder,
    }


# What of a plan stands in plan.json as it is in Plan, with the types of the values.
SAME: dict[str, tuple[type, ...]] = {
    "workers": (list, int), "blocks": (int,), "seed": (int,), "trainer_arguments": (list, str),
    "global_batch_size": (int,), "global_learning_rate": (float,), "network_interface": (str,),
    "null": (bool,), "measure": (str,), "full_runs": (int,), "until_interval": (float,),
    "minutes": (float,), "margin": (float,), "order_seed": (int,), "phase_steps": (int,),
    "timeout": (int,), "question": (str,), "plan_file": (str,), "left_out": (list, str),
}  # fmt: skip
# And what reads as something else there.
OTHERS: dict[str, tuple[type, ...]] = {
    "configurations": (list, str), "configuration_details": (dict, dict), "pairs": (list, list),
    "cases": (list, dict), "hosts": (str,), "runs": (list, dict),
}  # fmt: skip
DETAILS: dict[str, tuple[type, ...]] = {
    "engine": (str,), "launcher": (str,), "controller": (str,), "transport": (str,),
    "flags": (list, str), "environment": (dict, str),
}  # fmt: skip
CASE: dict[str, tuple[type, ...]] = {"name": (str,), "flags": (list, str)}
NEEDED = ("configurations", "workers", "seed", "trainer_arguments")


def read_plan(path: Path) -> Plan:
    """Read plan.json back; raises UserError, which names file and field."""
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    return plan_from(record if isinstance(record, dict) else {}, path)


def plan_from(record: dict[str, Any], path: Path) -> Plan:
    """Return the plan whose plan.json holds `record`. What a plan could not yet hold when it was
    written has the value that it then had without a name."""
    known = SAME | OTHERS
    given = {name: value for name, value in record.items() if name in known and value is not None}
    check_fields(path, "", given, known, NEEDED)
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in given.items()
        if name in SAME
    }
    values.setdefault("measure", "runs")  # as before there were turns
    names, interface = given["configurations"], given.get("network_interface")
    if given.get("null"):  # each configuration and the same one again
        names = names[::2]
    defined = []
    for name, details in given.get("configuration_details", {}).items():
        details = {"transport": "", **details}  # which earlier plans had none of
        check_fields(path, f"configuration_details.{name}.", details, DETAILS, DETAILS)
        if name in names and name not in CONFIGURATIONS:
            own = details["environment"].items()
            network = interface_variables(interface).items()  # which the plan says
            environment = dict(pair for pair in own if pair not in network)
            whole = {**details, "flags": tuple(details["flags"]), "environment": environment}
            defined.append(Configuration(name, **whole))
    if unknown := set(names) - CONFIGURATIONS.keys() - {own.name for own in defined}:
        raise UserError(
            f"{path}: configuration_details: says nothing of {', '.join(sorted(unknown))}"
        )
    pairs = []
    for pair in given.get("pairs", []):
        if len(pair) != 2 or not set(pair).issubset(given["configurations"]):
            raise UserError(f"{path}: pairs: {pair!r} is not of two of {', '.join(names)}")
        pairs.append((pair[0], pair[1]))
    cases = []
    for case in given.get("cases", [{"name": "", "flags": []}]):
        check_fields(path, "cases.", case, CASE, CASE)
        cases.append(Case(case["name"], tuple(case["flags"])))
    is_allocation = given.get("hosts") == SLURM
    plan = Plan(
        **values,
        configurations=tuple(names),
        defined=tuple(defined),
        cases=tuple(cases),
        hosts=None if is_allocation else given.get("hosts"),
        is_allocation=is_allocation,
        blocks_there=max(map(block_of, given.get("runs", [])), default=0),
    )
    return plan if pairs == plan.pairs() else replace(plan, judged_pairs=tuple(pairs))


def block_of(run: dict[str, Any]) -> int:
    """Return the number of a planned run's block; 0: it has none."""
    block = run.get("block")
    return block if isinstance(block, int) else 0


def check_fields(
    path: Path,
    prefix: str,
    record: dict[str, Any],
    types: dict[str, tuple[type, ...]],
    needed: Iterable[str],
) -> None:
    """Raise UserError, which names file and field, if one is missing or of another type."""
    for name in needed:
        if name not in record:
            raise UserError(f"{path}: {prefix}{name}: is missing")
    check_keys(path, prefix, record, types)


def end_of(record: dict[str, Any]) -> tuple[Any, ...]:
    """Return what ends the measuring of a plan.json: a number of blocks, or else the rule."""
    if record.get("blocks") is not None:
        return (record["blocks"],)
    return record.get("until_interval"), record.get("minutes")


# What makes other runs when it is changed; the rest (more blocks, other pairs) does not.
IDENTITY = (
    "configurations", "configuration_details", "cases", "workers", "measure", "global_batch_size",
    "global_learning_rate", "hosts", "network_interface", "seed", "order_seed",
    "trainer_arguments", "knobs",
)  # fmt: skip


def asked_differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return in what two plans differ, wherever they were made."""
    new = json.loads(json.dumps(new))
    old = {"knobs": {}, "measure": "runs", **old}  # which earlier plans had none of
    if new["order_seed"] is None:  # then that of the plan which is there
        old["order_seed"] = None
    differences = [
        f"{name}: {old.get(name)!r} there, {new[name]!r} now"
        for name in IDENTITY
        if new[name] != old.get(name)
    ]
    if new["trainers_sha256"] != old.get("trainers_sha256"):
        differences.append("the sources of the recipe or the trainers were changed since")
    return differences


def plan_differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return in what a new plan would make other runs than an old one; more blocks are none."""
    new = json.loads(json.dumps(new))  # as the file would hold it
    differences = asked_differences(old, new)
    if new["environment"] != old.get("environment"):
        differences.append(
            f"environment: {old.get('environment')!r} there, {new['environment']!r} now"
        )
    return differences
