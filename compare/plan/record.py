"""plan.json: a plan as a comparison's folder keeps it, and in what two of them differ."""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compare.plan.environment import REMOVED_VARIABLES, set_variables, steering_variables
from compare.plan.hosts import SLURM
from compare.plan.plan import Plan, Run, knobs_files, varied_fields
from compare.plan.sources import trainers_sha256


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
        "blocks": plan.blocks,
        "seed": plan.seed,
        "null": plan.null,
        "until_interval": plan.until_interval,
        "max_blocks": plan.max_blocks,
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


# What makes other runs when it is changed; the rest (more blocks, other pairs) does not.
IDENTITY = (
    "configurations", "configuration_details", "cases", "workers", "global_batch_size",
    "global_learning_rate", "hosts", "network_interface", "seed", "trainer_arguments", "knobs",
)  # fmt: skip


def asked_differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return in what two plans differ, wherever they were made."""
    new = json.loads(json.dumps(new))
    old = {"knobs": {}, **old}  # which earlier plans had none of
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
