"""plan.json as the report reads it: what was planned, by whichever version of run.py."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compare.evidence.run_folder import CONTROL, RecordError, parse, read_object

# Fields of plan.json, and of each run that it lists.
PLAN_FIELDS = (
    "created_utc", "seed", "blocks", "configurations", "workers", "trainer_arguments",
    "environment", "runs",
)  # fmt: skip
PLANNED_FIELDS = ("block", "configuration", "engine", "launcher", "workers", "folder")


@dataclass(frozen=True)
class Judging:
    """What decides how a comparison is judged."""

    measure: str
    blocks: int | None
    until_interval: float | None
    minutes: float | None
    margin: float
    extensions: list[dict[str, Any]]
    null: bool


@dataclass(frozen=True)
class Variables:
    """The environment variables of all runs."""

    set: dict[str, Any] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    inherited: dict[str, Any] = field(default_factory=dict)


def read_plan_record(path: Path) -> dict[str, Any]:
    """Read plan.json. What a plan could not yet hold when it was written gets the value that it
    then had without a name: one case, each configuration judged against the first, nothing varied.
    """
    plan = read_object(path)
    for name in PLAN_FIELDS:
        require(plan, name, path)
    names = plan["configurations"]
    plan = {
        "question": None,
        "plan_file": None,
        "left_out": [],
        "configuration_details": {},
        "pairs": [[names[0], other] for other in names[1:]],
        "varied": [],
        "cases": [{"name": "", "flags": []}],
        "scaling": "weak",
        "hosts": None,
        "null": False,
        "measure": "runs",
        "until_interval": None,
        "minutes": None,
        "margin": 0.03,
        "extensions": [],
        "warnings": [],
        "phase_runs": [],
        **plan,
    }
    judging = parse(plan, Judging, path)
    if judging.measure not in ("turns", "runs"):
        raise RecordError(f"{path}: measure is {judging.measure!r}: neither turns nor runs")
    if judging.margin == 0:
        raise RecordError(f"{path}: margin is 0, which is not above 0")
    plan["environment"] |= vars(parse(plan["environment"], Variables, path))
    cases = [require(case, "name", path) for case in plan["cases"]]
    for name in (*names, *cases, *plan["left_out"], *plan["warnings"], plan["question"] or ""):
        if not isinstance(name, str) or CONTROL.search(name):
            raise RecordError(f"{path}: {name!r} is no name, or holds a control character")
    for folder in (*names, *filter(None, cases)):  # of blocks of turns
        check_inside(folder, path)
    if not all(type(workers) is int for workers in plan["workers"]):
        raise RecordError(f"{path}: workers is {plan['workers']!r}, which are not whole numbers")
    for pair in plan["pairs"]:
        if len(pair) != 2 or not set(pair) <= set(names):
            raise RecordError(f"{path}: the pair {pair!r} is not of two of {', '.join(names)}")
    for planned in (*plan["runs"], *plan["phase_runs"]):
        for name in PLANNED_FIELDS:
            require(planned, name, path)
        planned.setdefault("case", "")
        check_inside(planned["folder"], path)
        if planned["configuration"] not in names:
            raise RecordError(
                f"{path}: a run of {planned['configuration']!r}, which the plan lacks"
            )
        if planned["case"] not in cases:
            raise RecordError(f"{path}: a run of case {planned['case']!r}, which the plan lacks")
    return plan


def check_inside(folder: str, path: Path) -> None:
    """Raise RecordError if a folder is not one within its comparison."""
    parts = Path(folder).parts
    if not parts or Path(folder).is_absolute() or ".." in parts or CONTROL.search(folder):
        raise RecordError(f"{path}: the folder {folder!r} is not in this comparison")


def require(record: dict[str, Any], field: str, path: Path) -> Any:
    if field not in record:
        raise RecordError(f"{path}: the field '{field}' is missing")
    return record[field]
