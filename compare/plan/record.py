"""plan.json: a plan as a comparison's folder keeps it, and in what two of them differ."""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from compare.plan.configurations import CONFIGURATIONS
from compare.plan.environment import REMOVED_VARIABLES, set_variables, steering_variables
from compare.plan.hosts import interface_variables
from compare.plan.plan import Plan, Run, Text, knobs_files, meta_of
from compare.plan.plan_file import typed, wrong_names
from compare.plan.sources import trainers_sha256
from recipe.errors import UserError
from recipe.files import write_json

IDENTIFIES = Meta(extra={"identifies": True})


class PlannedRun(Struct, frozen=True, kw_only=True):
    """A run that a plan asks for, as plan.json names it."""

    block: int
    case: Text = ""
    configuration: Text
    engine: str
    launcher: str
    workers: int
    seed: int | None = None
    folder: Text


class Variables(Struct, frozen=True, kw_only=True):
    """The environment of all runs."""

    set: dict[str, str] = {}
    removed: tuple[str, ...] = ()
    inherited: dict[str, str] = {}
    affinity: tuple[int, ...] = ()  # inherited, too: no launcher binds


class Extension(Struct, frozen=True):
    """When a comparison that had an end was given a later one."""

    created_utc: str
    blocks: int | None = None
    until_interval: float | None = None
    minutes: float | None = None


class PlanRecord(Plan, frozen=True, kw_only=True):
    """plan.json: a plan, and what was added when it was run. Enough for the report, and to go on
    after an interruption."""

    created_utc: Text
    is_search: bool = False  # of --tune: no comparison
    warnings: tuple[Text, ...] = ()
    extensions: tuple[Extension, ...] = ()
    trainers_sha256: str | None = None
    # The digest of each file of knobs.
    knobs: Annotated[dict[str, str | None], IDENTIFIES] = msgspec.field(default_factory=dict)
    environment: Annotated[Variables, IDENTIFIES]
    runs_there: tuple[PlannedRun, ...] = msgspec.field(name="runs")
    phase_runs_there: tuple[PlannedRun, ...] = msgspec.field(default=(), name="phase_runs")


def plan_record(plan: Plan, created_utc: str, warnings: Sequence[str] = ()) -> PlanRecord:
    """Return what plan.json holds of a plan that is run here and now."""
    inherited, affinity = steering_variables(), tuple(sorted(os.sched_getaffinity(0)))
    if plan.is_allocation:  # another job may get other cores and GPUs; each run writes down its own
        inherited.pop("CUDA_VISIBLE_DEVICES", None)
        affinity = ()
    paths = {name: Path(name).expanduser() for name in knobs_files(plan)}
    fields = {name: getattr(plan, name) for name in Plan.__struct_fields__}
    return PlanRecord(
        **fields | {"allocation": None, "blocks_there": 0},
        created_utc=created_utc,
        warnings=tuple(warnings),
        trainers_sha256=trainers_sha256(),
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
        runs_there=tuple(map(run_record, plan.runs())),
        phase_runs_there=tuple(map(run_record, plan.phase_runs())),
    )


def run_record(run: Run) -> PlannedRun:
    """Return how plan.json names a run."""
    configuration = run.configuration
    return PlannedRun(
        block=run.block,
        case=run.case,
        configuration=configuration.name,
        engine=configuration.engine,
        launcher=configuration.launcher,
        workers=run.workers,
        seed=run.seed,
        folder=run.folder,
    )


def write_plan(path: Path, record: PlanRecord) -> None:
    """Write plan.json."""
    write_json(path, msgspec.to_builtins(record, enc_hook=float))


def read_plan(path: Path) -> PlanRecord:
    """Read plan.json, whichever version of run.py wrote it; UserError names file and field."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} is no plan: it holds no object")
    try:
        plan = typed(upgraded(found), PlanRecord)
    except (AttributeError, KeyError, TypeError) as error:
        raise UserError(f"{path}: {error!r}: is missing, or of another type") from None
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    if problem := next(wrong_names(plan), None) or wrong_runs(plan):
        raise UserError(f"{path}: {problem}")
    blocks = max((run.block for run in plan.runs_there), default=0)
    return replace(plan, blocks_there=blocks)


def wrong_runs(plan: PlanRecord) -> str:
    """Say what is wrong with the runs that plan.json lists; empty if nothing is."""
    names, cases = plan.names, [case.name for case in plan.cases]
    for run in (*plan.runs_there, *plan.phase_runs_there):
        if run.configuration not in names:
            return f"a run of {run.configuration!r}, which the plan lacks"
        if run.case not in cases:
            return f"a run of case {run.case!r}, which the plan lacks"
        folder = PurePosixPath(run.folder)
        if not folder.parts or folder.is_absolute() or ".." in folder.parts:
            return f"the folder {run.folder!r} is not in this comparison"
    return ""


def upgraded(old: dict[str, Any]) -> dict[str, Any]:
    """Return a plan.json of any version as today's: the one place that knows earlier ones. What a
    plan could not yet hold when it was written has the value that it then had without a name."""
    if "trainer_arguments" not in old:
        return old
    fields = {field.encode_name for field in msgspec.structs.fields(PlanRecord)}
    new = {name: value for name, value in old.items() if name in fields and value is not None}
    new["flags"] = old["trainer_arguments"]
    names, interface = old["configurations"], old.get("network_interface")
    if old.get("null"):  # each configuration and the same one again
        new["configurations"] = names = names[::2]
    pairs = [list(pair) for pair in old.get("pairs", ())]
    if old.get("null") or pairs == [[names[0], other] for other in names[1:]]:
        new.pop("pairs", None)  # those that are meant where none are named
    new["case"] = {case["name"]: {"flags": case["flags"]}
                   for case in old.get("cases", ()) if case["name"]}  # fmt: skip
    kinds = {ready.kind: ready.name for ready in CONFIGURATIONS.values()}
    of_network = interface_variables(interface).items()  # which the plan says
    new["configuration"] = {}
    for name, own in old.get("configuration_details", {}).items():
        if name in names and name not in CONFIGURATIONS:
            kind = (own["engine"], own["launcher"], own["controller"], own.get("transport", ""))
            variables = [one for one in own["environment"].items() if one not in of_network]
            new["configuration"][name] = {
                "base": kinds.get(kind, " ".join(kind)),
                "flags": own["flags"],
                "environment": dict(variables),
            }
    return {"measure": "runs"} | new  # as before there were turns


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
        differences.append("the sources of the recipe or the trainers were changed since")
    return differences
