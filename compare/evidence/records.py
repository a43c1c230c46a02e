"""Read a comparison: its plan, and the run folders that the plan asks for."""

import itertools
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from compare.evidence import packed
from compare.evidence.run_folder import (
    Measured,
    RecordError,
    RunFolder,
    read_metrics,
    read_object,
    read_run_folder,
)
from recipe.record.schema import Environment, EpochLine, EvalLine, Settings, StepLine

# Fields of plan.json, and of each run that it lists.
PLAN_FIELDS = (
    "created_utc", "seed", "blocks", "configurations", "workers", "trainer_arguments",
    "environment", "runs",
)  # fmt: skip
PLANNED_FIELDS = ("block", "configuration", "engine", "launcher", "workers", "folder")
ENGINES = {"ddp": "DDP", "horovod": "Horovod"}  # as a person writes them
Cell = tuple[str, int, str]  # case, workers, configuration: the runs of a cell repeat each other


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
    seconds: float | None  # from its launcher's start to its end; None: not measured
    command: str
    written: RunFolder | None  # None unless it is complete

    @property
    def config(self) -> Settings:
        return self._complete.config

    @property
    def environment(self) -> Environment:
        return self._complete.environment

    @property
    def summary(self) -> Measured:
        return self._complete.summary

    @property
    def _complete(self) -> RunFolder:
        assert self.written is not None, f"{self.folder} holds no complete run"
        return self.written

    @property
    def name(self) -> str:
        return f"{self.configuration}-{self.workers}"

    @property
    def cell(self) -> Cell:
        """Which runs this one is a repetition of."""
        return self.case, self.workers, self.configuration

    @property
    def is_complete(self) -> bool:
        return self.status == "completed"

    @property
    def label(self) -> str:
        """Name the run as the verdict does: engine, launcher, and the transport really used."""
        engine = ENGINES.get(self.engine, self.engine)
        return f"{engine} ({self.launcher}, {self.summary.transport})"

    @property
    def steps(self) -> list[StepLine]:
        return self._metrics[StepLine]

    @property
    def epochs(self) -> list[EpochLine]:
        return self._metrics[EpochLine]

    @property
    def evaluations(self) -> list[EvalLine]:
        """Those of the trained weights, not of their moving average."""
        return [line for line in self._metrics[EvalLine] if line.weights == "model"]

    @cached_property
    def _metrics(self) -> dict[type, list[Any]]:
        """metrics.jsonl, read when it is first asked for: a long training has many lines."""
        return read_metrics(self.folder / "metrics.jsonl")


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

    @property
    def workers(self) -> list[int]:
        """All numbers of workers, the fewest first."""
        return sorted({run.workers for run in self.runs})

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The pairs of configurations that are judged against each other."""
        return [(first, second) for first, second in self.plan["pairs"]]

    @property
    def cells(self) -> list[Cell]:
        """The planned cells in the order of the tables."""
        planned = {run.cell for run in self.runs}
        names = self.plan["configurations"]
        cells = itertools.product(self.cases, self.workers, names)
        return [cell for cell in cells if cell in planned]

    def complete_runs(self, cell: Cell) -> list[RunRecord]:
        """Return the complete runs of a cell, that of the phases not among them."""
        return [run for run in self.complete if run.cell == cell]

    def complete_phase_runs(self, cell: Cell) -> list[RunRecord]:
        """Return the cell's run that measured the phases; none if there is none."""
        return [run for run in self.phase_runs if run.cell == cell and run.is_complete]

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
    """Read a comparison. A missing or unfinished run has such a status, a broken one raises."""
    if not folder.is_dir():
        raise RecordError(
            f"{folder} is not a folder: give the path of a comparison, as in "
            "`python compare/report.py runs/compare-...`"
        )
    plan_path = folder / "plan.json"
    plan = read_plan_record(plan_path)
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


def read_plan_record(path: Path) -> dict[str, Any]:
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
        outcome.get("seconds"),
        packed.read_text(command_path).strip() if packed.exists(command_path) else "",
        read_run_folder(folder) if complete else None,
    )
    if complete:
        for field, planned_value in (("engine", run.engine), ("world_size", run.workers)):
            if (written := getattr(run.summary, field)) != planned_value:
                raise RecordError(
                    f"{summary_path}: {field} is {written!r}, but the plan has "
                    f"{planned_value!r} there: it is another run's folder"
                )
        check_place(run.config, planned["folder"], folder / "config.json")
    return run


def check_place(config: Settings, planned: str, path: Path) -> None:
    """Raise RecordError if a run was written for another place of the plan: another case, say."""
    written = Path(config.log_dir) / (config.name or "")
    parts = Path(planned).parts
    if written.parts[-len(parts) :] != parts:
        raise RecordError(
            f"{path}: it was written as {written}, but the plan has {planned} there: it is another "
            "run's folder"
        )


def require(record: dict[str, Any], field: str, path: Path) -> Any:
    if field not in record:
        raise RecordError(f"{path}: the field '{field}' is missing")
    return record[field]
