"""Read the run folders of a comparison, as the trainers and run.py wrote them."""

import json
import numbers
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from compare.evidence import packed


class RecordError(Exception):
    """A run folder that cannot be read; the message names file and field."""


SUMMARY_NUMBERS = (
    "world_size", "epochs", "steps", "samples_seen", "images_per_second", "train_seconds",
    "total_seconds", "cpu_seconds", "cpu_seconds_per_image", "peak_memory_bytes",
)  # fmt: skip
SUMMARY_VALIDATION = ("loss", "top1", "top5", "best_top1")  # null if nothing was evaluated
SUMMARY_TEXTS = ("engine", "launcher", "transport", "weights_sha256")
ENVIRONMENT_FIELDS = (
    "engine", "launcher", "transport", "world_size", "local_size", "hosts", "device",
    "device_name", "cpu_model", "cores", "threads", "python", "torch", "torchvision", "horovod",
    "mpi", "cuda", "command", "started_utc", "git_commit",
)  # fmt: skip
ENVIRONMENT_TYPES: dict[str, type] = {
    "hosts": list, "cores": int, "threads": int, "variables": dict, "command": list,
}  # fmt: skip
# What a run measured beside its throughput. A part may be missing or null, and so may each of its
# figures: then it was not measured.
PHASE_NUMBERS = (
    "steps", "step_seconds", "data_seconds", "forward_seconds", "backward_seconds",
    "exposed_communication_seconds", "optimizer_seconds",
)  # fmt: skip
RANK_NUMBERS = (
    "rank", "cpu_seconds", "peak_memory_bytes", "data_seconds", "forward_seconds",
    "backward_seconds", "optimizer_seconds",
)  # fmt: skip
INPUT_NUMBERS = ("images_per_second", "files_per_second", "megabytes_per_second", "wait_share")
ENERGY_NUMBERS = (
    "gpu_joules_per_image", "gpu_watts", "gpu_utilization_percent", "cpu_joules_per_image",
)  # fmt: skip
# Fields of plan.json, and of each run that it lists.
PLAN_FIELDS = (
    "created_utc", "seed", "blocks", "configurations", "workers", "trainer_arguments",
    "environment", "runs",
)  # fmt: skip
PLANNED_FIELDS = ("block", "configuration", "engine", "launcher", "workers", "folder")
METRIC_NUMBERS = {
    "step": ("epoch", "step", "loss", "top1", "seconds", "images_per_second"),
    "epoch": ("epoch", "step", "loss", "top1", "seconds"),
    "eval": ("epoch", "step", "loss", "top1", "train_seconds_so_far"),
}


@dataclass
class RunRecord:
    """One planned run: where it stands, what became of it and, if it is complete, what it says."""

    folder: Path
    block: int
    case: str  # "" in a plan without cases
    configuration: str
    engine: str
    launcher: str
    workers: int
    status: str  # "completed", "failed", "timed out", "not run"
    exit_code: int | None
    other_load: float | None  # cores that other processes kept busy meanwhile; None: not measured
    summary: dict[str, Any]
    environment: dict[str, Any]
    config: dict[str, Any]
    command: str

    @property
    def name(self) -> str:
        return f"{self.configuration}-{self.workers}"

    @property
    def cell(self) -> tuple[str, int, str]:
        """Which runs this one is a repetition of: case, workers, configuration."""
        return self.case, self.workers, self.configuration

    @property
    def is_complete(self) -> bool:
        return self.status == "completed"

    @property
    def label(self) -> str:
        """Name the run as the verdict does: engine, launcher, and the transport really used."""
        engine = {"ddp": "DDP", "horovod": "Horovod"}.get(self.engine, self.engine)
        return f"{engine} ({self.launcher}, {self.summary['transport']})"

    def metrics(self, kind: str) -> list[dict[str, Any]]:
        """Return the lines of one kind of metrics.jsonl."""
        return self.metrics_by_kind.get(kind, [])

    @cached_property
    def metrics_by_kind(self) -> dict[str, list[dict[str, Any]]]:
        """metrics.jsonl, read when it is first asked for: a long training has many lines."""
        path = self.folder / "metrics.jsonl"
        lines: dict[str, list[dict[str, Any]]] = {}
        for number, text in enumerate(read_text(path).splitlines(), start=1):
            try:
                line = json.loads(text)
            except ValueError as error:
                raise RecordError(f"{path}, line {number} is not JSON: {error}") from None
            if not isinstance(line, dict) or not isinstance(line.get("kind"), str):
                raise RecordError(f"{path}, line {number}: the field 'kind' is missing")
            check_numbers(line, METRIC_NUMBERS.get(line["kind"], ()), f"{path}, line {number}")
            lines.setdefault(line["kind"], []).append(line)
        return lines


@dataclass
class Comparison:
    """A comparison's folder: its plan and all runs that the plan asks for, in their order."""

    folder: Path
    plan: dict[str, Any]
    runs: list[RunRecord]
    phase_runs: list[RunRecord]  # one a cell, short, with --ablation-steps; complete or not
    earlier_failures: list[Path]  # attempts that failed before the same run was made again

    @property
    def complete(self) -> list[RunRecord]:
        return [run for run in self.runs if run.is_complete]

    @property
    def cases(self) -> list[str]:
        """The cases' names, in the plan's order; the one name "" in a plan without cases."""
        return [case["name"] for case in self.plan["cases"]]

    def find(self, block: int, configuration: str, workers: int, case: str = "") -> RunRecord:
        """Return a planned run; KeyError if the plan has no such run."""
        for run in self.runs:
            if (run.block, *run.cell) == (block, case, workers, configuration):
                return run
        raise KeyError(f"block {block}, case {case!r}, {configuration}, {workers} workers")


def newest_comparison(runs: Path) -> Path:
    """Return the newest comparison under a folder of runs; their names sort by age."""
    folders = sorted(path.parent for path in runs.glob("compare-*/plan.json"))
    if not folders:
        raise RecordError(
            f"no comparison under {runs}/: make one with `make compare` or "
            "`python compare/run.py`, or give the path of one"
        )
    return folders[-1]


def recorded_comparison(results: Path) -> Path | None:
    """Return the newest comparison that was recorded as results/MACHINE/DATE-QUESTION/.

    Those of the question `engines` come first: whoever asks for none in particular means that one.
    None if there is none.
    """
    folders = [path.parent for path in results.glob("*/*/plan.json")]

    def age(folder: Path) -> tuple[bool, str, str]:
        date = re.match(r"\d{4}-?\d{2}-?\d{2}", folder.name)
        digits = date[0].replace("-", "") if date else ""
        return folder.name.endswith("engines"), digits, str(folder)

    return max(folders, key=age, default=None)


def find_comparison(path: Path) -> Path:
    """Return the comparison that a user's path means: its own folder or plan.json, one of its
    blocks or runs, or a folder that holds no other. RecordError says what there is instead."""
    if not path.exists():
        raise RecordError(
            f"{path} does not exist: give the path of a comparison, as in "
            "`python compare/report.py runs/compare-...`"
        )
    folder = path if path.is_dir() else path.parent
    here = folder.resolve()
    for candidate in (here, *here.parents[:3]):  # block-1/CASE/CONFIGURATION-2 lies three below
        if (candidate / "plan.json").exists():
            return folder if candidate == here else candidate
    inside = sorted(plan.parent for plan in folder.glob("*/plan.json"))
    if len(inside) == 1:
        return inside[0]
    if inside:
        names = ", ".join(str(one) for one in inside[-5:])
        raise RecordError(f"{path} holds {len(inside)} comparisons: give one of them, as {names}")
    if (folder / "config.json").exists():
        raise RecordError(
            f"{path} is the folder of a single run: a comparison needs two, which "
            "`python compare/run.py` starts in turn"
        )
    raise RecordError(
        f"{path} holds no plan.json, so that it is no comparison: make one with `make compare` or "
        "`python compare/run.py`"
    )


def load_comparison(folder: Path) -> Comparison:
    """Read a comparison. A missing or unfinished run is told by its status, a broken one raises."""
    if not folder.is_dir():
        raise RecordError(
            f"{folder} is not a folder: give the path of a comparison, as in "
            "`python compare/report.py runs/compare-...`"
        )
    plan_path = folder / "plan.json"
    plan = read_plan(plan_path)
    runs = [load_run(folder / planned["folder"], planned) for planned in plan["runs"]]
    phase_runs = [load_run(folder / planned["folder"], planned) for planned in plan["phase_runs"]]
    earlier = {
        path
        for pattern in ("block-*/*.failed-*", "block-*/*/*.failed-*", "phases/*.failed-*",
                        "phases/*/*.failed-*")
        for path in folder.glob(pattern)
    }  # fmt: skip
    earlier |= {folder / name for name in packed.folders(folder) if ".failed-" in name}
    comparison = Comparison(folder, plan, runs, phase_runs, sorted(earlier))
    if not comparison.complete:
        ended = [run for run in runs if run.status != "not run"]
        reason = f"{len(ended)} failed" if ended else "none was started"
        where = f"; see {ended[0].folder / 'output.log'}" if ended else ""
        raise RecordError(f"{folder}: none of its {len(runs)} runs is complete ({reason}){where}")
    return comparison


def read_plan(path: Path) -> dict[str, Any]:
    """Read plan.json. What a plan could not yet hold when it was written gets the value that it
    then had without a name: one case, each configuration judged against the first, nothing varied.
    """
    plan = read_object(path)
    for field in PLAN_FIELDS:
        require(plan, field, path)
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
        "until_interval": None,
        "warnings": [],
        "phase_runs": [],
        **plan,
    }
    cases = [require(case, "name", path) for case in plan["cases"]]
    for pair in plan["pairs"]:
        if len(pair) != 2 or not set(pair) <= set(names):
            raise RecordError(f"{path}: the pair {pair!r} is not of two of {', '.join(names)}")
    for planned in (*plan["runs"], *plan["phase_runs"]):
        for field in PLANNED_FIELDS:
            require(planned, field, path)
        planned.setdefault("case", "")
        if planned["case"] not in cases:
            raise RecordError(f"{path}: a run of case {planned['case']!r}, which the plan lacks")
    return plan


def load_run(folder: Path, planned: dict[str, Any]) -> RunRecord:
    """Read one run folder. RecordError if it is broken, or another run than the planned one."""
    outcome_path, summary_path = folder / "outcome.json", folder / "summary.json"
    # A trainer started by hand, with a pasted command, has no outcome.json.
    outcome = read_object(outcome_path) if packed.exists(outcome_path) else {}
    complete = packed.exists(summary_path) and outcome.get("status", "completed") == "completed"
    status = "completed" if complete else outcome.get("status", "not run")
    if status == "completed" and not complete:
        raise RecordError(f"{summary_path} is missing, though the run was completed")
    command_path = folder / "command.txt"
    run = RunRecord(
        folder,
        planned["block"],
        planned["case"],
        planned["configuration"],
        planned["engine"],
        planned["launcher"],
        planned["workers"],
        status,
        outcome.get("exit_code"),
        outcome.get("other_load"),
        {},
        {},
        {},
        packed.read_text(command_path).strip() if packed.exists(command_path) else "",
    )
    if complete:
        run.summary = read_object(summary_path)
        check_numbers(run.summary, SUMMARY_NUMBERS, summary_path)
        for field in SUMMARY_VALIDATION:
            if require(run.summary, field, summary_path) is not None:
                check_numbers(run.summary, (field,), summary_path)
        for field in ("images_per_second", "cpu_seconds_per_image"):
            if run.summary[field] <= 0:
                raise RecordError(
                    f"{summary_path}: {field} is {run.summary[field]!r}, which is not above 0"
                )
        for field in SUMMARY_TEXTS:
            if not isinstance(require(run.summary, field, summary_path), str):
                raise RecordError(f"{summary_path}: {field} is {run.summary[field]!r}, not a text")
        for field, planned_value in (("engine", run.engine), ("world_size", run.workers)):
            if run.summary[field] != planned_value:
                raise RecordError(
                    f"{summary_path}: {field} is {run.summary[field]!r}, but the plan has "
                    f"{planned_value!r} there: it is another run's folder"
                )
        check_measured(run.summary, summary_path)
        if not isinstance(require(run.summary, "fingerprint", summary_path), dict):
            raise RecordError(f"{summary_path}: fingerprint is not an object")
        run.environment = read_object(folder / "environment.json")
        for field in ENVIRONMENT_FIELDS:
            require(run.environment, field, folder / "environment.json")
        for field, kind in ENVIRONMENT_TYPES.items():
            value = run.environment.get(field, kind())
            if not isinstance(value, kind):
                raise RecordError(
                    f"{folder / 'environment.json'}: {field} is {value!r}, which is not of type "
                    f"{kind.__name__}"
                )
        run.config = read_object(folder / "config.json")
        check_place(run.config, planned["folder"], folder / "config.json")
    return run


def check_place(config: dict[str, Any], planned: str, path: Path) -> None:
    """Raise RecordError if a run was written for another place of the plan: another case, say."""
    for field in ("log_dir", "name"):
        require(config, field, path)
    written = Path(config["log_dir"]) / config["name"]
    parts = Path(planned).parts
    if written.parts[-len(parts) :] != parts:
        raise RecordError(
            f"{path}: it was written as {written}, but the plan has {planned} there: it is another "
            "run's folder"
        )


def check_measured(summary: dict[str, Any], path: Path) -> None:
    """Raise RecordError if a part of the summary that may be missing is there, but is no such."""
    for part, fields in (
        ("phases", PHASE_NUMBERS),
        ("input", INPUT_NUMBERS),
        ("energy", ENERGY_NUMBERS),
    ):
        if (record := summary.get(part)) is None:
            continue
        if not isinstance(record, dict):
            raise RecordError(f"{path}: {part} is not an object")
        check_optional_numbers(record, fields, f"{path}, {part}")
    ranks = summary.get("ranks")
    if ranks is None:
        return
    if not isinstance(ranks, list) or not all(isinstance(rank, dict) for rank in ranks):
        raise RecordError(f"{path}: ranks is not a list of objects")
    for rank in ranks:
        check_optional_numbers(rank, RANK_NUMBERS, f"{path}, ranks")


def read_text(path: Path) -> str:
    try:
        return packed.read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise RecordError(f"{path} cannot be read: {reason}") from None


def read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(read_text(path))
    except ValueError as error:
        raise RecordError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise RecordError(f"{path} is not a JSON object")
    return value


def require(record: dict[str, Any], field: str, path: Path) -> Any:
    if field not in record:
        raise RecordError(f"{path}: the field '{field}' is missing")
    return record[field]


def check_optional_numbers(record: dict[str, Any], fields: tuple[str, ...], where: str) -> None:
    """Check the numbers of those fields that are there and not null."""
    check_numbers(record, tuple(f for f in fields if record.get(f) is not None), where)


def check_numbers(record: dict[str, Any], fields: tuple[str, ...], where: Path | str) -> None:
    for field in fields:
        if field not in record:
            raise RecordError(f"{where}: the field '{field}' is missing")
        value = record[field]
        if not isinstance(value, numbers.Real) or isinstance(value, bool):
            raise RecordError(f"{where}: {field} is {value!r}, which is not a number")
