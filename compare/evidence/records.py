"""Read a comparison: its plan, and the run folders that the plan asks for."""

import itertools
import math
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from compare.evidence import packed
from compare.evidence.paired import confidence_after
from compare.evidence.plan_record import plan_dict
from compare.evidence.run_folder import (
    Measured,
    RecordError,
    RunFolder,
    check_end,
    read_block,
    read_metrics,
    read_object,
    read_run_folder,
    read_side_folder,
)
from compare.evidence.turns import Block
from compare.plan.record import PlanRecord, read_plan
from recipe.errors import UserError
from recipe.record.schema import Environment, EpochLine, EvalLine, Settings, StepLine

ENGINES = {"ddp": "DDP", "horovod": "Horovod"}  # as a person writes them
# What one process trains, whatever --workers: on all its GPUs, or by calls to other ranks.
ONE_WORKER = {"data_parallel", "rpc_pipeline"}
STATUSES = ("completed", "failed", "timed out", "not run", "interrupted")
NUMBERED = re.compile(r"block-[1-9][0-9]*")
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
    status: str  # "completed", "failed", "timed out", "not run", "unreadable"
    exit_code: int | None
    other_load: float | None  # cores that other processes kept busy meanwhile; None: not measured
    seconds: float | None  # from its launcher's start to its end; None: not measured
    command: str
    written: RunFolder | None  # None unless it is complete
    reason: str = ""  # why it is unreadable; of a complete run, why its steps are

    @property
    def config(self) -> Settings:
        return self._complete.config

    @property
    def environment(self) -> Environment:
        return self._complete.environment

    @property
    def summary(self) -> Measured:
        assert self._complete.summary is not None, f"{self.folder} is of a side of turns"
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
        return f"{engine} ({self.launcher}, {self.environment.transport})"

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
        """metrics.jsonl, read when it is first asked for: a long training has many lines. None of
        them count if one is damaged, and `reason` says it."""
        try:
            return read_metrics(self.folder / "metrics.jsonl")
        except RecordError as error:
            self.reason = str(error)
            return {StepLine: [], EpochLine: [], EvalLine: []}


@dataclass
class TurnBlock:
    """A block of turns as its folder has it: what was measured, and what each side says of itself;
    or why it cannot be read."""

    folder: Path
    block: Block | None
    sides: list[RunRecord]
    reason: str = ""


@dataclass
class Comparison:
    """A comparison's folder: its plan and all runs that the plan asks for, in their order."""

    folder: Path
    plan: dict[str, Any]
    runs: list[RunRecord]
    phase_runs: list[RunRecord]  # one a cell, short, with --ablation-steps; complete or not
    earlier_failures: list[Path]  # attempts that failed before the same run was made again
    turns: dict[tuple[str, int], list[TurnBlock]] = field(default_factory=dict)  # by case, workers
    record: PlanRecord | None = None  # `plan`, typed

    @cached_property
    def complete(self) -> list[RunRecord]:
        return [run for run in self.runs if run.is_complete]

    @property
    def sides(self) -> list[RunRecord]:
        """The sides of all blocks of turns, each as a run without a summary."""
        return [side for blocks in self.turns.values() for one in blocks for side in one.sides]

    @property
    def written(self) -> list[RunRecord]:
        """All that says of itself what it was: complete runs, and sides of turns."""
        return [*self.complete, *self.sides]

    def turn_blocks(self, case: str, workers: int) -> list[Block]:
        """Return the blocks of turns that can be read."""
        blocks = self.turns.get((case, workers), [])
        return [one.block for one in blocks if one.block is not None]

    def turn_sides(self, case: str, workers: int) -> list[RunRecord]:
        """Return the sides of these blocks."""
        return [side for one in self.turns.get((case, workers), []) for side in one.sides]

    @property
    def cases(self) -> list[str]:
        """The cases' names, in the plan's order; the one name "" in a plan without cases."""
        return [case["name"] for case in self.plan["cases"]]

    @property
    def workers(self) -> list[int]:
        """All numbers of workers, the fewest first."""
        return sorted({run.workers for run in self.runs} | {workers for _, workers in self.turns})

    @property
    def confidence(self) -> float:
        """Of each interval."""
        return confidence_after(len(self.plan["extensions"]))

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The pairs of configurations that are judged against each other."""
        return [(first, second) for first, second in self.plan["pairs"]]

    @property
    def cells(self) -> list[Cell]:
        """The planned cells in the order of the tables."""
        planned = {run.cell for run in (*self.runs, *self.sides)}
        names = self.plan["configurations"]
        cells = itertools.product(self.cases, self.workers, names)
        return [cell for cell in cells if cell in planned]

    def complete_runs(self, cell: Cell) -> list[RunRecord]:
        """Return the complete runs of a cell, that of the phases not among them."""
        return self._complete_by_cell.get(cell, [])

    @cached_property
    def square(self) -> dict[tuple[str, str], str]:
        """The configurations of both engines over two transports each, by engine and the transport
        that really carried the gradients: DDP before Horovod, and Gloo, which every installation
        has, last. Empty if the plan has no such square."""
        found: dict[tuple[str, str], str] = {}
        for name, runs in self.written_by_configuration.items():
            own = self.plan["configuration_details"].get(name, {})
            used = {(run.engine, run.environment.transport) for run in runs}
            if len(used) == 1 and not own.get("flags") and not own.get("environment"):
                found.setdefault(used.pop(), name)
        transports = {transport for _, transport in found}
        for other in sorted(transports - {"Gloo"}):
            places = [(engine, t) for t in (other, "Gloo") for engine in ("ddp", "horovod")]
            if not self.plan["null"] and all(place in found for place in places):
                return {place: found[place] for place in places}
        return {}

    @cached_property
    def written_by_configuration(self) -> dict[str, list[RunRecord]]:
        names: dict[str, list[RunRecord]] = {}
        for run in self.written:
            names.setdefault(run.configuration, []).append(run)
        return names

    @cached_property
    def _complete_by_cell(self) -> dict[Cell, list[RunRecord]]:
        cells: dict[Cell, list[RunRecord]] = {}
        for run in self.complete:
            cells.setdefault(run.cell, []).append(run)
        return cells

    @cached_property
    def _by_place(self) -> dict[tuple[int, Cell], RunRecord]:
        return {(run.block, run.cell): run for run in self.runs}

    def complete_phase_runs(self, cell: Cell) -> list[RunRecord]:
        """Return the cell's run that measured the phases; none if there is none."""
        return [run for run in self.phase_runs if run.cell == cell and run.is_complete]

    def find(self, block: int, configuration: str, workers: int, case: str = "") -> RunRecord:
        """Return a planned run; KeyError if the plan has no such run."""
        return self._by_place[block, (case, workers, configuration)]


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
    """Read a comparison. A missing, unfinished or broken run has such a status; RecordError if the
    plan is broken, or nothing was measured."""
    if not folder.is_dir():
        raise RecordError(
            f"{folder} is not a folder: give the path of a comparison, as in "
            "`python compare/report.py runs/compare-...`"
        )
    plan_path = folder / "plan.json"
    try:
        record = read_plan(plan_path)
    except UserError as error:
        raise RecordError(str(error)) from None
    plan = plan_dict(record)
    runs = [load_run(folder / planned["folder"], planned) for planned in plan["runs"]]
    phase_runs = [load_run(folder / planned["folder"], planned) for planned in plan["phase_runs"]]
    earlier = {
        path
        for pattern in ("block-*/*.failed-*", "block-*/*/*.failed-*", "phases/*.failed-*",
                        "phases/*/*.failed-*", "turns/*/*.failed-*", "turns/*/*/*.failed-*")
        for path in folder.glob(pattern)
    }  # fmt: skip
    # A failed block of turns has a folder for each of its sides.
    found = (re.match(r".+?\.failed-\d+", name) for name in packed.folders(folder))
    earlier |= {folder / match[0] for match in found if match}
    turns = {
        (case["name"], workers): load_turns(folder, plan, case["name"], workers)
        for case in plan["cases"]
        for workers in plan["workers"]
    }
    comparison = Comparison(folder, plan, runs, phase_runs, sorted(earlier), turns, record)
    if not comparison.written:
        reasons = [run.reason for run in runs]
        reasons += [one.reason for blocks in turns.values() for one in blocks]
        if any(reasons):
            raise RecordError(next(filter(None, reasons)))
        ended = [run for run in runs if run.status != "not run"]
        reason = f"{len(ended)} failed" if ended else "none was started"
        where = f"; see {ended[0].folder / 'output.log'}" if ended else ""
        raise RecordError(f"{folder}: none of its {len(runs)} runs is complete ({reason}){where}")
    return comparison


def load_run(folder: Path, planned: dict[str, Any]) -> RunRecord:
    """Read one run folder; if it is broken, or another run than the planned one, its status is
    "unreadable", with the reason."""
    run = RunRecord(
        folder,
        planned["block"],
        planned["case"],
        planned["configuration"],
        planned["engine"],
        planned["launcher"],
        planned["workers"],
        "not run",
        exit_code=None,
        other_load=None,
        seconds=None,
        command="",
        written=None,
    )
    try:
        read_into(run, planned)
    except RecordError as error:
        run.status, run.written, run.reason = "unreadable", None, str(error)
    return run


def read_into(run: RunRecord, planned: dict[str, Any]) -> None:
    """Read what became of a run; RecordError if that cannot be read."""
    outcome_path, summary_path = run.folder / "outcome.json", run.folder / "summary.json"
    # A trainer started by hand, with a pasted command, has no outcome.json.
    outcome = read_object(outcome_path) if packed.exists(outcome_path) else {}
    complete = packed.exists(summary_path) and outcome.get("status", "completed") == "completed"
    run.status = "completed" if complete else outcome.get("status", "not run")
    if run.status not in STATUSES:
        raise RecordError(f"{outcome_path}: status is {run.status!r}")
    if run.status == "completed" and not complete:
        raise RecordError(f"{summary_path} is missing, though the run was completed")
    for name in ("exit_code", "other_load", "seconds"):
        value = outcome.get(name)
        if value is not None and (type(value) not in (int, float) or not math.isfinite(value)):
            raise RecordError(f"{outcome_path}: {name} is {value!r}, which is no number")
        setattr(run, name, value)
    command_path = run.folder / "command.txt"
    run.command = packed.read_text(command_path).strip() if packed.exists(command_path) else ""
    if not complete:
        return
    run.written = read_run_folder(run.folder)
    world_size = 1 if run.engine in ONE_WORKER else run.workers
    for field_, planned_value in (("engine", run.engine), ("world_size", world_size)):
        if (written := getattr(run.summary, field_)) != planned_value:
            raise RecordError(
                f"{summary_path}: {field_} is {written!r}, but the plan has "
                f"{planned_value!r} there: it is another run's folder"
            )
    seed = planned.get("seed")
    if seed is not None and run.config.seed != seed:
        raise RecordError(
            f"{run.folder / 'config.json'}: seed is {run.config.seed}, but the plan has {seed} "
            "there: it is another run's folder"
        )
    check_place(run.config, planned["folder"], run.folder / "config.json")
    check_end(run.folder / "metrics.jsonl", run.summary.steps)


def load_turns(folder: Path, plan: dict[str, Any], case: str, workers: int) -> list[TurnBlock]:
    """Read the blocks of turns of one case at one number of workers, in their order."""
    place = folder / "turns" / case / f"{workers}-workers"
    names = {path.parent.name for path in place.glob("block-*/block.json")}
    within = place.relative_to(folder).as_posix()
    names |= {
        Path(name).name
        for name, files in packed.folders(folder).items()
        if Path(name).parent.as_posix() == within and "block.json" in files
    }
    numbered = sorted((name for name in names if NUMBERED.fullmatch(name)), key=block_number)
    return [load_block(place / name, plan, case, workers) for name in numbered]


def block_number(name: str) -> int:
    return int(name.rpartition("-")[2])


def load_block(folder: Path, plan: dict[str, Any], case: str, workers: int) -> TurnBlock:
    """Read one block of turns, and what its sides say of themselves."""
    try:
        block = read_block(folder / "block.json", plan["configurations"])
        if block.number != block_number(folder.name):
            raise RecordError(f"{folder / 'block.json'}: number is {block.number}")
        sides = [load_side(folder, plan, block.number, case, workers, name) for name in block.order]
    except RecordError as error:
        return TurnBlock(folder, None, [], str(error))
    return TurnBlock(folder, block, sides)


def load_side(
    folder: Path, plan: dict[str, Any], number: int, case: str, workers: int, name: str
) -> RunRecord:
    """Read what one side of a block says of itself, as a run without a summary."""
    written = read_side_folder(folder / name / "0" / "run")
    details = plan["configuration_details"].get(name, {})
    environment = written.environment
    for field_, planned in (("engine", details.get("engine")), ("world_size", workers)):
        if planned is not None and getattr(environment, field_) != planned:
            raise RecordError(
                f"{folder / name / '0/run/environment.json'}: {field_} is "
                f"{getattr(environment, field_)!r}, but the plan has {planned!r} there"
            )
    launcher = details.get("launcher", environment.launcher)  # as whole runs have it
    return RunRecord(
        folder / name, number, case, name, environment.engine, launcher, workers,
        "completed", exit_code=0, other_load=None, seconds=None, command="", written=written,
    )  # fmt: skip


def check_place(config: Settings, planned: str, path: Path) -> None:
    """Raise RecordError if a run was written for another place of the plan: another case, say."""
    written = Path(config.log_dir) / (config.name or "")
    parts = Path(planned).parts
    if written.parts[-len(parts) :] != parts:
        raise RecordError(
            f"{path}: it was written as {written}, but the plan has {planned} there: it is another "
            "run's folder"
        )
