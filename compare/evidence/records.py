"""Read a comparison: its plan, and the run folders that the plan asks for."""

import itertools
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from msgspec import structs

from compare.evidence import packed
from compare.evidence.paired import confidence_after
from compare.evidence.run_folder import (
    Measured,
    RecordError,
    RunFolder,
    check_end,
    read_block,
    read_metrics,
    read_record,
    read_run_folder,
)
from compare.evidence.turns import Block
from compare.plan.configurations import Configuration
from compare.plan.record import PlannedRun, PlanRecord, read_plan
from recipe.errors import UserError
from recipe.record.schema import Environment, EpochLine, EvalLine, Settings, StepLine

ENGINES = {"ddp": "DDP", "horovod": "Horovod"}  # as a person writes them
# What one process trains, whatever --workers: on all its GPUs, or by calls to other ranks.
ONE_WORKER = {"data_parallel", "rpc_pipeline"}
FAILED = re.compile(r".+?\.failed-\d+")
BLOCK = re.compile(r"block-([1-9][0-9]*)")
CellKey = tuple[str, int, str]  # case, workers, configuration: runs with the same one are repeats


@dataclass(frozen=True)
class Outcome:
    """outcome.json: how run.py saw a run end. A trainer started by hand has none."""

    status: Literal["completed", "failed", "timed out", "not run", "interrupted"] = "completed"
    exit_code: int | None = None
    other_load: float | None = None  # cores that other processes kept busy; None: not measured
    seconds: float | None = None  # from its launcher's start to its end; None: not measured


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
    seed: int | None = None  # None: the user's own
    status: str = "not run"  # or of Outcome, or "unreadable"
    exit_code: int | None = None
    other_load: float | None = None
    seconds: float | None = None
    command: str = ""
    written: RunFolder | None = None  # None unless it is complete
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
    def cell(self) -> CellKey:
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
    plan: PlanRecord
    runs: list[RunRecord]
    phase_runs: list[RunRecord]  # one a cell, short, with --ablation-steps; complete or not
    earlier_failures: list[Path]  # attempts that failed before the same run was made again
    turns: dict[tuple[str, int], list[TurnBlock]] = field(default_factory=dict)  # by case, workers

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

    @cached_property
    def configurations(self) -> dict[str, Configuration]:
        """The configurations by name, in the plan's order."""
        return {member.name: member for member in self.plan.members()}

    @property
    def cases(self) -> list[str]:
        """The cases' names, in the plan's order; the one name "" in a plan without cases."""
        return [case.name for case in self.plan.cases]

    @property
    def workers(self) -> list[int]:
        """All numbers of workers, the fewest first."""
        return sorted({run.workers for run in self.runs} | {workers for _, workers in self.turns})

    @property
    def is_by_turns(self) -> bool:
        """Tell whether speed was measured by turns, not in whole runs."""
        return self.plan.measure == "turns"

    @property
    def confidence(self) -> float:
        """Of each interval."""
        return confidence_after(len(self.plan.extensions))

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The pairs of configurations that are judged against each other."""
        return self.plan.pairs()

    @property
    def cells(self) -> list[CellKey]:
        """The planned cells in the order of the tables."""
        planned = {run.cell for run in (*self.runs, *self.sides)}
        cells = itertools.product(self.cases, self.workers, self.configurations)
        return [cell for cell in cells if cell in planned]

    def complete_runs(self, cell: CellKey) -> list[RunRecord]:
        """Return the complete runs of a cell, that of the phases not among them."""
        return self._complete_by_cell.get(cell, [])

    @cached_property
    def square(self) -> dict[tuple[str, str], str]:
        """The configurations of both engines over two transports each, by engine and the transport
        that really carried the gradients: DDP before Horovod, and Gloo, which every installation
        has, last. Empty if the plan has no such square."""
        found: dict[tuple[str, str], str] = {}
        for name, runs in self.written_by_configuration.items():
            own = self.configurations[name]
            used = {(run.engine, run.environment.transport) for run in runs}
            if len(used) == 1 and not own.flags and not own.environment:
                found.setdefault(used.pop(), name)
        transports = {transport for _, transport in found}
        for other in sorted(transports - {"Gloo"}):
            places = [(engine, t) for t in (other, "Gloo") for engine in ("ddp", "horovod")]
            if not self.plan.null and all(place in found for place in places):
                return {place: found[place] for place in places}
        return {}

    @cached_property
    def written_by_configuration(self) -> dict[str, list[RunRecord]]:
        names: dict[str, list[RunRecord]] = {}
        for run in self.written:
            names.setdefault(run.configuration, []).append(run)
        return names

    @cached_property
    def _complete_by_cell(self) -> dict[CellKey, list[RunRecord]]:
        cells: dict[CellKey, list[RunRecord]] = {}
        for run in self.complete:
            cells.setdefault(run.cell, []).append(run)
        return cells

    def complete_phase_runs(self, cell: CellKey) -> list[RunRecord]:
        """Return the cell's run that measured the phases; none if there is none."""
        return [run for run in self.phase_runs if run.cell == cell and run.is_complete]


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
    """Return the newest comparison that was recorded as results/MACHINE/DATE-QUESTION/, None if
    there is none. Those of the question `engines` come first: whoever asks for none in particular
    means that one."""
    dated = re.compile(r"(\d{4})-?(\d{2})-?(\d{2})")

    def age(folder: Path) -> tuple[bool, tuple[str, ...], str]:
        date = dated.match(folder.name)
        return folder.name.endswith("engines"), date.groups() if date else (), str(folder)

    return max((path.parent for path in results.glob("*/*/plan.json")), key=age, default=None)


def find_comparison(path: Path) -> Path:
    """Return the comparison that a user's path means: its own folder or plan.json, one of its
    blocks or runs, or a folder that holds no other. RecordError says what there is instead."""
    folder = path if path.is_dir() else path.parent
    here = folder.resolve()
    inside = sorted(plan.parent for plan in folder.glob("*/plan.json"))
    for candidate in (here, *here.parents[:3]):  # block-1/CASE/CONFIGURATION-2 lies three below
        if path.exists() and (candidate / "plan.json").exists():
            return folder if candidate == here else candidate
    if path.exists() and len(inside) == 1:
        return inside[0]
    what = "holds no plan.json, so that it is no comparison"
    if not path.exists():
        what = "does not exist"
    elif inside:
        what = f"holds {len(inside)} comparisons, such as {inside[-1]}"
    elif (folder / "config.json").exists():
        what = "is a single run: a comparison needs two"
    raise RecordError(
        f"{path} {what}: give the path of one, as in `python compare/report.py runs/compare-...`, "
        "or make one with `make compare` or `python compare/run.py`"
    )


def load_comparison(folder: Path) -> Comparison:
    """Read a comparison. A missing, unfinished or broken run has such a status; RecordError if the
    plan is broken, or nothing was measured."""
    if not folder.is_dir():
        raise RecordError(
            f"{folder} is not a folder: give the path of a comparison, as in "
            "`python compare/report.py runs/compare-...`"
        )
    try:
        plan = read_plan(folder / "plan.json")
    except UserError as error:
        raise RecordError(str(error)) from None
    runs = [load_run(folder, planned) for planned in plan.runs_there]
    phase_runs = [load_run(folder, planned) for planned in plan.phase_runs_there]
    # Of a failed block of turns each side has a folder of its own, packed.
    earlier = {match[0] for name in packed.folders(folder) if (match := FAILED.match(name))}
    earlier |= {str(path.relative_to(folder)) for path in folder.rglob("*.failed-[0-9]*")}
    turns = {
        (case.name, workers): load_turns(folder, plan, case.name, workers)
        for case, workers in plan.groups()
    }
    failures = sorted(folder / name for name in earlier)
    comparison = Comparison(folder, plan, runs, phase_runs, failures, turns)
    if not comparison.written:
        reasons = [run.reason for run in runs]
        reasons += [one.reason for blocks in turns.values() for one in blocks]
        if any(reasons):
            raise RecordError(next(filter(None, reasons)))
        ended = [run for run in runs if run.status != "not run"]
        where = f"; see {ended[0].folder / 'output.log'}" if ended else ""
        raise RecordError(
            f"{folder}: none of its {len(runs)} runs is complete ({len(ended)} failed){where}"
        )
    return comparison


def load_run(comparison: Path, planned: PlannedRun) -> RunRecord:
    """Read one run folder; if it is broken, or another run than the planned one, its status is
    "unreadable", with the reason."""
    folder = comparison / planned.folder
    place = structs.asdict(planned) | {"folder": folder}
    try:
        outcome_path, summary_path = folder / "outcome.json", folder / "summary.json"
        has_outcome, has_summary = packed.exists(outcome_path), packed.exists(summary_path)
        outcome = Outcome("completed" if has_summary else "not run")  # as of one started by hand
        if has_outcome:
            outcome = read_record(outcome_path, Outcome)
        is_complete = outcome.status == "completed"
        if is_complete and not has_summary:
            raise RecordError(f"{summary_path} is missing, though the run was completed")
        command = folder / "command.txt"
        run = RunRecord(
            **place,
            **vars(outcome),
            command=packed.read_text(command).strip() if packed.exists(command) else "",
            written=read_run_folder(folder) if is_complete else None,
        )
        if is_complete:
            check_planned(run, planned)
            check_end(folder / "metrics.jsonl", run.summary.steps)
    except RecordError as error:
        return RunRecord(**place, status="unreadable", reason=str(error))
    return run


def check_planned(run: RunRecord, planned: PlannedRun) -> None:
    """Raise RecordError if a folder holds another run than the plan has there."""
    world_size = 1 if run.engine in ONE_WORKER else run.workers
    for file, name, written, wanted in (
        ("summary.json", "engine", run.summary.engine, run.engine),
        ("summary.json", "world_size", run.summary.world_size, world_size),
        ("config.json", "seed", run.config.seed, run.seed),
    ):
        if wanted is not None and written != wanted:
            raise RecordError(
                f"{run.folder / file}: {name} is {written!r}, but the plan has {wanted!r} there: "
                "it is another run's folder"
            )
    written_as, parts = Path(run.config.log_dir) / (run.config.name or ""), planned.folder
    if written_as.parts[-len(Path(parts).parts) :] != Path(parts).parts:
        raise RecordError(
            f"{run.folder / 'config.json'}: it was written as {written_as}, but the plan has "
            f"{parts} there: it is another run's folder"
        )


def load_turns(folder: Path, plan: PlanRecord, case: str, workers: int) -> list[TurnBlock]:
    """Read the blocks of turns of one case at one number of workers, in their order."""
    place = folder / "turns" / case / f"{workers}-workers"
    inside = [path.parent for path in place.glob("block-*/block.json")]
    inside += [folder / name for name, files in packed.folders(folder).items()
               if "block.json" in files]  # fmt: skip
    numbers = {int(match[1]) for path in inside
               if path.parent == place and (match := BLOCK.fullmatch(path.name))}  # fmt: skip
    blocks = []
    for number in sorted(numbers):
        path = place / f"block-{number}"
        try:
            block = read_block(path / "block.json", plan.names)
            if block.number != number:
                raise RecordError(f"{path / 'block.json'}: number is {block.number}")
            sides = [load_side(path, plan, number, case, workers, name) for name in block.order]
            blocks.append(TurnBlock(path, block, sides))
        except RecordError as error:
            blocks.append(TurnBlock(path, None, [], str(error)))
    return blocks


def load_side(
    folder: Path, plan: PlanRecord, number: int, case: str, workers: int, name: str
) -> RunRecord:
    """Read what one side of a block says of itself, as a run without a summary."""
    written = read_run_folder(folder / name / "0" / "run", is_side=True)
    configuration = next(member for member in plan.members() if member.name == name)
    environment = written.environment
    for field_, planned in (("engine", configuration.engine), ("world_size", workers)):
        if getattr(environment, field_) != planned:
            raise RecordError(
                f"{folder / name / '0/run/environment.json'}: {field_} is "
                f"{getattr(environment, field_)!r}, but the plan has {planned!r} there"
            )
    return RunRecord(
        folder / name, number, case, name, configuration.engine, configuration.launcher, workers,
        status="completed", written=written,
    )  # fmt: skip
