"""Read the run folders of a comparison, as the trainers and run.py wrote them."""

import json
import numbers
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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
    configuration: str
    engine: str
    launcher: str
    workers: int
    status: str  # "completed", "failed", "timed out", "not run"
    exit_code: int | None
    summary: dict[str, Any]
    environment: dict[str, Any]
    config: dict[str, Any]
    command: str

    @property
    def name(self) -> str:
        return f"{self.configuration}-{self.workers}"

    @property
    def is_complete(self) -> bool:
        return self.status == "completed"

    @property
    def label(self) -> str:
        """Name the run as the verdict does: engine, launcher, and the transport really used."""
        engine = {"ddp": "DDP", "horovod": "Horovod"}.get(self.engine, self.engine)
        return f"{engine} ({self.launcher}, {self.summary['transport']})"

    def metrics(self, kind: str) -> list[dict[str, Any]]:
        """Return the lines of one kind of metrics.jsonl. Read anew each time: seldom needed."""
        path = self.folder / "metrics.jsonl"
        lines = []
        for number, text in enumerate(read_text(path).splitlines(), start=1):
            try:
                line = json.loads(text)
            except ValueError as error:
                raise RecordError(f"{path}, line {number} is not JSON: {error}") from None
            if not isinstance(line, dict) or "kind" not in line:
                raise RecordError(f"{path}, line {number}: the field 'kind' is missing")
            if line["kind"] == kind:
                check_numbers(line, METRIC_NUMBERS[kind], f"{path}, line {number}")
                lines.append(line)
        return lines


@dataclass
class Comparison:
    """A comparison's folder: its plan and all runs that the plan asks for, in their order."""

    folder: Path
    plan: dict[str, Any]
    runs: list[RunRecord]
    earlier_failures: list[Path]  # attempts that failed before the same run was made again

    @property
    def complete(self) -> list[RunRecord]:
        return [run for run in self.runs if run.is_complete]

    def find(self, block: int, configuration: str, workers: int) -> RunRecord:
        return next(
            run
            for run in self.runs
            if (run.block, run.configuration, run.workers) == (block, configuration, workers)
        )


def newest_comparison(runs: Path) -> Path:
    """Return the newest comparison under a folder of runs; their names sort by age."""
    folders = sorted(path.parent for path in runs.glob("compare-*/plan.json"))
    if not folders:
        raise RecordError(
            f"no comparison under {runs}/: make one with `make compare` or "
            "`python compare/run.py`, or give the path of one"
        )
    return folders[-1]


def load_comparison(folder: Path) -> Comparison:
    """Read a comparison. A missing or unfinished run is told by its status, a broken one raises."""
    if not folder.is_dir():
        raise RecordError(
            f"{folder} is not a folder: give the path of a comparison, as in "
            "`python compare/report.py runs/compare-...`"
        )
    plan_path = folder / "plan.json"
    plan = read_object(plan_path)
    for field in (
        "created_utc",
        "seed",
        "blocks",
        "configurations",
        "workers",
        "trainer_arguments",
        "environment",
        "runs",
    ):
        require(plan, field, plan_path)
    runs = []
    for planned in plan["runs"]:
        for field in ("block", "configuration", "engine", "launcher", "workers", "folder"):
            require(planned, field, plan_path)
        runs.append(load_run(folder / planned["folder"], planned))
    earlier = sorted(folder.glob("block-*/*.failed-*"))
    comparison = Comparison(folder, plan, runs, earlier)
    if not comparison.complete:
        ended = [run for run in runs if run.status != "not run"]
        reason = f"{len(ended)} failed" if ended else "none was started"
        where = f"; see {ended[0].folder / 'output.log'}" if ended else ""
        raise RecordError(f"{folder}: none of its {len(runs)} runs is complete ({reason}){where}")
    return comparison


def load_run(folder: Path, planned: dict[str, Any]) -> RunRecord:
    """Read one run folder."""
    outcome_path, summary_path = folder / "outcome.json", folder / "summary.json"
    # A trainer started by hand, with a pasted command, has no outcome.json.
    outcome = read_object(outcome_path) if outcome_path.exists() else {}
    complete = summary_path.exists() and outcome.get("status", "completed") == "completed"
    status = "completed" if complete else outcome.get("status", "not run")
    if status == "completed" and not complete:
        raise RecordError(f"{summary_path} is missing, though the run was completed")
    command_path = folder / "command.txt"
    run = RunRecord(
        folder,
        planned["block"],
        planned["configuration"],
        planned["engine"],
        planned["launcher"],
        planned["workers"],
        status,
        outcome.get("exit_code"),
        {},
        {},
        {},
        command_path.read_text().strip() if command_path.exists() else "",
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
        if not isinstance(require(run.summary, "fingerprint", summary_path), dict):
            raise RecordError(f"{summary_path}: fingerprint is not an object")
        run.environment = read_object(folder / "environment.json")
        for field in ENVIRONMENT_FIELDS:
            require(run.environment, field, folder / "environment.json")
        run.config = read_object(folder / "config.json")
    return run


def read_text(path: Path) -> str:
    try:
        return path.read_text()
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


def check_numbers(record: dict[str, Any], fields: tuple[str, ...], where: Path | str) -> None:
    for field in fields:
        if field not in record:
            raise RecordError(f"{where}: the field '{field}' is missing")
        value = record[field]
        if not isinstance(value, numbers.Real) or isinstance(value, bool):
            raise RecordError(f"{where}: {field} is {value!r}, which is not a number")
