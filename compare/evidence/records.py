"""Read a comparison: its plan, and the run folders that the plan asks for."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from compare.evidence import audit, packed
from compare.evidence.paired import confidence_after
from compare.evidence.run_folder import (
    Measured,
    blocks_of_runs,
    contradictions,
    parse,
    read_block,
    read_last_step,
    read_metrics,
    read_outcome,
    read_record,
)
from compare.evidence.turns import Block
from compare.plan.configurations import CONFIGURATIONS, Configuration
from compare.plan.plan import Outcome, Run, turns_place
from compare.plan.record import PlanRecord, read_plan
from recipe.errors import UserError, refuse
from recipe.record.schema import Environment, EvalLine, Settings, StepLine

ENGINES = {"ddp": "DDP", "horovod": "Horovod"}  # as a person writes them
ONE_WORKER = {one.engine for one in CONFIGURATIONS.values() if one.is_one_worker}
FAILED = re.compile(r".+?\.failed-\d+")
CellKey = tuple[str, int, str]  # case, workers, configuration: runs with the same one are repeats


@dataclass(kw_only=True, eq=False)
class RunRecord(Outcome):
    """One planned run: where it stands, what became of it and, if it is complete, what it says of
    itself; or a side of a block of turns, which has no summary, since it never ends by itself."""

    folder: Path
    block: int
    case: str  # "" in a plan without cases
    configuration: str
    engine: str
    launcher: str
    workers: int
    seed: int | None = None  # None: the user's own
    command: str = ""
    reason: str = ""  # why it is unreadable; of a complete run, why its steps are
    is_side: bool = False
    config: Settings = field(init=False, repr=False)  # these three of complete runs only
    environment: Environment = field(init=False, repr=False)
    summary: Measured = field(init=False, repr=False)

    @property
    def name(self) -> str:
        return f"{self.configuration}-{self.workers}" if self.workers else self.configuration

    @property
    def cell(self) -> CellKey:
        """Which runs this one is a repetition of."""
        return self.case, self.workers, self.configuration

    @property
    def is_complete(self) -> bool:
        return self.status == "completed"

    @property
    def steps(self) -> list[StepLine]:
        return self._metrics[StepLine]

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
        except UserError as error:
            self.reason = str(error)
            return {StepLine: [], EvalLine: []}


@dataclass
class Comparison:
    """A comparison's folder: its plan and all runs that the plan asks for, in their order."""

    folder: Path
    plan: PlanRecord
    runs: list[RunRecord]
    earlier_failures: list[Path]  # attempts that failed before the same run was made again
    turns: dict[tuple[str, int], list[Block]]  # the blocks of turns by case and workers
    sides: list[RunRecord]  # of these blocks
    # Blocks, or lines of a packed record, that cannot be read: case, workers, and why.
    damaged_blocks: list[tuple[str, int, str]]

    @cached_property
    def complete(self) -> list[RunRecord]:
        return [run for run in self.runs if run.is_complete]

    @property
    def written(self) -> list[RunRecord]:
        """All that says of itself what it was: complete runs, and sides of turns."""
        return [*self.complete, *self.sides]

    def blocks(self, case: str, workers: int) -> list[Block]:
        """Return the blocks that speed is measured by: of turns, or of whole runs, in the order in
        which they ran."""
        if self.is_by_turns:
            return self.turns[case, workers]
        return blocks_of_runs(
            (run.block, run.configuration, run.summary, run.seconds)
            for run in self.complete
            if (run.case, run.workers) == (case, workers)
        )

    def blocks_of(self, cell: CellKey) -> list[Block]:
        """Return those of these blocks that hold the cell."""
        case, workers, name = cell
        return [block for block in self.blocks(case, workers) if name in block.order]

    @cached_property
    def configurations(self) -> dict[str, Configuration]:
        """The configurations by name, in the plan's order."""
        return {member.name: member for member in self.plan.members()}

    @property
    def is_by_turns(self) -> bool:
        """Tell whether speed was measured by turns, not in whole runs."""
        return self.plan.measure == "turns"

    @property
    def unit(self) -> str:
        """What turns count: images, or what a user's own scripts say."""
        return next((block.unit for blocks in self.turns.values() for block in blocks), "images")

    @property
    def confidence(self) -> float:
        """Of each interval."""
        return confidence_after(len(self.plan.extensions))

    @property
    def cells(self) -> list[CellKey]:
        """The planned cells in the order of the tables."""
        return [(*group, name) for group in self.plan.groups() for name in self.configurations]

    def complete_runs(self, cell: CellKey) -> list[RunRecord]:
        """Return the complete runs of a cell."""
        return [run for run in self.complete if run.cell == cell]

    @cached_property
    def square(self) -> dict[tuple[str, str], str]:
        """The configurations of both engines over two transports each, by engine and the transport
        that really carried the gradients: DDP before Horovod, and Gloo, which every installation
        has, last. Empty if the plan has no such square."""
        found: dict[tuple[str, str], str] = {}
        for name, own in self.configurations.items():
            runs = [run for run in self.written if run.configuration == name]
            used = {(run.engine, run.environment.transport) for run in runs}
            if len(used) == 1 and not own.flags and not own.environment:
                found.setdefault(used.pop(), name)
        for other in sorted({transport for _, transport in found} - {"Gloo"}):
            places = [(engine, t) for t in (other, "Gloo") for engine in ENGINES]
            if not self.plan.null and found.keys() >= {*places}:
                return {place: found[place] for place in places}
        return {}


def newest_comparison(runs: Path) -> Path | None:
    """Return the newest comparison under a folder of runs, None if there is none; their names sort
    by age."""
    return max((path.parent for path in runs.glob("compare-*/plan.json")), default=None)


def recorded_comparison(results: Path) -> Path | None:
    """Return the newest comparison that was recorded as results/MACHINE/DATE-QUESTION/, None if
    there is none. Those of the question `engines` come first: whoever asks for none in particular
    means that one."""
    folders = [path.parent for path in results.glob("*/*/plan.json")]
    return max(folders, key=lambda one: (one.name.endswith("engines"), one.name), default=None)


def find_comparison(path: Path) -> Path:
    """Return the comparison that a user's path means: its own folder, or what lies in it; UserError
    if there is none."""
    folder = path if path.is_dir() else path.parent
    here = folder.resolve()
    for candidate in (here, *here.parents[:3]):  # block-1/CASE/CONFIGURATION-2 lies three below
        if path.exists() and (candidate / "plan.json").exists():
            return folder if candidate == here else candidate
    what = "holds no plan.json, so that it is no comparison" if path.exists() else "does not exist"
    raise UserError(
        f"{path} {what}: give the path of one, as in `python compare/report.py runs/compare-...`, "
        "or make one with `make compare` or `python compare/run.py`"
    )


def load_comparison(folder: Path) -> Comparison:
    """Read a comparison. A missing, unfinished or broken run has such a status; UserError if the
    plan is broken, or nothing was measured."""
    plan = read_plan(folder / "plan.json")
    runs = [load_run(folder, planned) for planned in plan.runs()]
    # Of a failed block of turns each side has a folder of its own, packed.
    failures = {match[0] for name in packed.folders(folder) if (match := FAILED.match(name))}
    failures |= {str(path.relative_to(folder)) for path in folder.rglob("*.failed-[0-9]*")}
    earlier = sorted(folder / name for name in failures)
    comparison = Comparison(folder, plan, runs, earlier, {}, [], [])
    for case, workers in plan.groups():
        load_turns(comparison, case, workers)
        comparison.damaged_blocks += [
            (case, workers, why) for why in packed.folders(folder)[packed.DAMAGED].values()
        ]
    if not comparison.written:
        reasons = [run.reason for run in runs] + [why for *_, why in comparison.damaged_blocks]
        ended = [run for run in runs if run.status != "not run"]
        where = f"; see {ended[0].folder / 'output.log'}" if ended else ""
        nothing = f"none of its {len(runs)} runs is complete ({len(ended)} failed){where}"
        raise UserError(next(filter(None, reasons), f"{folder}: {nothing}"))
    return comparison


def load_run(comparison: Path, planned: Run) -> RunRecord:
    """Read one run folder; if it is broken, or another run than the planned one, its status is
    "unreadable", with the reason."""
    folder = comparison / planned.folder
    configuration = planned.configuration
    place: dict[str, Any] = {
        "folder": folder, "block": planned.block, "case": planned.case,
        "configuration": configuration.name, "engine": configuration.engine,
        "launcher": configuration.launcher, "workers": planned.workers, "seed": planned.seed,
    }  # fmt: skip
    try:
        run = RunRecord(**place, **vars(read_outcome(folder)))
        if packed.exists(folder / "command.txt"):
            run.command = packed.read_text(folder / "command.txt").strip()
        if run.is_complete:
            read_written(run, folder, planned.folder)
    except (UserError, OSError) as error:
        return RunRecord(**place, status="unreadable", reason=str(error))
    return run


def load_turns(comparison: Comparison, case: str, workers: int) -> None:
    """Read the blocks of turns of one case at one number of workers, in their order."""
    blocks = comparison.turns.setdefault((case, workers), [])
    place, plan = turns_place(case, workers), comparison.plan
    members, problems = comparison.configurations, list[str]()
    found = packed.find(comparison.folder, f"{place}/block-*/block.json")
    closed = [
        one / "block.json"
        for one in (comparison.folder / place).glob("block-*")
        if not os.access(one, os.X_OK)  # where glob finds nothing, and says nothing
    ]
    paths = {
        path.parent.name.removeprefix("block-"): path
        for path in (*found, *closed)
        if not FAILED.fullmatch(path.parent.name)
    }
    for number, path in sorted(paths.items(), key=lambda one: (len(one[0]), one[0])):
        try:
            block = read_block(path, members)
            refuse((f"{block.number}" != number, f"{path}: number is {block.number}"))
            sides = [
                RunRecord(
                    folder=path.parent / name, block=block.number, case=case, configuration=name,
                    engine=members[name].engine, launcher=members[name].launcher, workers=workers,
                    seed=plan.run(block.number, case, members[name], workers).seed, is_side=True,
                )
                for name in block.order
            ]  # fmt: skip
            for side, command in zip(sides, block.commands, strict=False):
                if plan.side:
                    tell_script(side, block, command)
                else:
                    read_written(side, side.folder / "0/run")
            told = {side.configuration: (side.config, side.environment) for side in sides}
            for problem in audit.contradictions(block, blocks, plan, (case, workers), told):
                raise UserError(f"{path}: {problem}")
        except (UserError, OSError) as error:
            problems.append(str(error))
        else:
            blocks.append(block)
            comparison.sides.extend(sides)
    numbers = [name for name in paths if name.isdecimal() and name[0] != "0"]
    missing = {f"{n}" for n in range(1, len(numbers) + 1)} - paths.keys()
    problems += [f"{comparison.folder / place}/block-{number} is missing" for number in missing]
    comparison.damaged_blocks += [(case, workers, problem) for problem in problems]


def tell_script(side: RunRecord, block: Block, command: str) -> None:
    """Take what a block says of a user's own script, which has no folder to say it in."""
    name = side.configuration
    refuse((name not in block.facts, f"facts of {name} are missing"))
    side.command, side.config = command, Settings(log_dir="", name=None)
    side.environment = parse(block.facts[name], Environment, f"facts of {name}")


def read_written(run: RunRecord, folder: Path, planned: str = "") -> None:
    """Read what a complete run or a side says of itself, metrics.jsonl aside; UserError names
    the file and the field that is wrong, or in what it is another run than the planned one."""
    run.config = read_record(folder / "config.json", Settings)
    run.environment = read_record(folder / "environment.json", Environment)
    problems = not_as_planned(run, Path(planned))
    if not run.is_side:
        run.summary = read_record(folder / "summary.json", Measured)
        last = read_last_step(folder / "metrics.jsonl")
        problems = chain(problems, contradictions(run.config, run.summary, last))
    refuse((problem := next(problems, ""), f"{folder}/{problem}"))


def not_as_planned(run: RunRecord, place: Path) -> Iterator[str]:
    """Yield in what a folder holds another run than the plan has there; a side has no place."""
    workers = 1 if run.engine in ONE_WORKER else run.workers
    for name, written, wanted in (
        ("environment.json: engine", run.environment.engine, run.engine),
        ("environment.json: world_size", run.environment.world_size, workers),
        ("config.json: seed", run.config.seed, run.seed),
    ):
        if wanted not in (written, None):
            yield f"{name} is {written!r}, but the plan has {wanted!r} there: it is another run's"
    parts = Path(run.config.log_dir, run.config.name or "").parts
    if parts[len(parts) - len(place.parts) :] != place.parts:
        yield f"config.json: it was written as {Path(*parts)}, but the plan has {place} there"
