"""Read a comparison: its plan, and the run folders that the plan asks for."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

from compare.evidence import packed
from compare.evidence.chain import block_number, read_sealed
from compare.evidence.paired import confidence_after
from compare.evidence.reading import (
    TimedSummary,
    blocks_of_runs,
    contradictions,
    parse,
    parse_block,
    read_last_step,
    read_metrics,
    read_outcome,
    read_record,
)
from compare.evidence.turns import Block
from compare.plan.configurations import ENGINES, PEERS, Configuration
from compare.plan.plan import SIDE_RUN, Outcome, Run, turns_place
from compare.plan.plan_file import PlanRecord, read_plan
from recipe.errors import UserError, refuse
from recipe.record.schema import Environment, EvalLine, Settings

MOST_LOAD = 0.1  # share of the cores that others may keep busy before a run's times are doubtful
FAILED = re.compile(r".+?\.failed-\d+")
CellKey = tuple[str, int, str]  # case, workers, configuration: runs of one cell repeat each other


@dataclass(kw_only=True, eq=False)
class RunRecord(Outcome):
    """One planned run: its place in the plan, its outcome and, if it is complete, its own records.
    Or a side of a block of turns, which has no summary because it never ends by itself."""

    folder: Path
    block: int
    case: str  # "" in a plan without cases
    configuration: str
    engine: str
    launcher: str
    workers: int
    seed: int | None = None  # None: the user's own
    command: str = ""
    reason: str = ""  # why it is unreadable; for a complete run, why its metrics are
    is_side: bool = False
    config: Settings = field(init=False, repr=False)  # these three in complete runs only
    environment: Environment = field(init=False, repr=False)
    summary: TimedSummary = field(init=False, repr=False)
    # Of the trained weights, not of their moving average; none if a line of metrics.jsonl is
    # damaged.
    evaluations: list[EvalLine] = field(default_factory=list, repr=False)

    @property
    def name(self) -> str:
        return f"{self.configuration}-{self.workers}" if self.workers else self.configuration

    @property
    def cell(self) -> CellKey:
        """The cell that this run belongs to."""
        return self.case, self.workers, self.configuration

    @property
    def is_complete(self) -> bool:
        return self.status == "completed"

    @property
    def is_disturbed(self) -> bool:
        """Return whether other processes kept so many cores busy that its times are doubtful."""
        return (self.other_load or 0.0) > MOST_LOAD * self.environment.cores


@dataclass
class Comparison:
    """A comparison's folder: its plan, and all planned runs in their order."""

    folder: Path
    plan: PlanRecord
    runs: list[RunRecord]
    earlier_failures: list[Path]  # attempts that failed before the same run was made again
    turns: dict[tuple[str, int], list[Block]]  # blocks of turns, by case and workers
    sides: list[RunRecord]  # the sides of these blocks
    # Blocks that cannot be read: case, workers, and why.
    damaged_blocks: list[tuple[str, int, str]]

    @cached_property
    def complete(self) -> list[RunRecord]:
        return [run for run in self.runs if run.is_complete]

    @property
    def written(self) -> list[RunRecord]:
        """All that have records of their settings and environment: complete runs, and sides."""
        return [*self.complete, *self.sides]

    def blocks(self, case: str, workers: int) -> list[Block]:
        """Return the blocks that measure speed, of turns or of whole runs, in the order in which
        they ran."""
        if self.is_by_turns:
            return self.turns[case, workers]
        return blocks_of_runs(
            (run.block, run.configuration, run.summary, run.seconds)
            for run in self.complete
            if (run.case, run.workers) == (case, workers)
        )

    def blocks_of(self, cell: CellKey) -> list[Block]:
        """Return the blocks that contain the cell."""
        case, workers, name = cell
        return [block for block in self.blocks(case, workers) if name in block.order]

    @cached_property
    def configurations(self) -> dict[str, Configuration]:
        """The configurations by name, in the plan's order."""
        return {member.name: member for member in self.plan.members()}

    @property
    def is_by_turns(self) -> bool:
        """Return whether speed was measured by turns, not in whole runs."""
        return self.plan.measure == "turns"

    @property
    def unit(self) -> str:
        """What turns count: images, or the unit that a user's own scripts name."""
        return next((block.unit for blocks in self.turns.values() for block in blocks), "images")

    @property
    def confidence(self) -> float:
        """The confidence of each interval."""
        return confidence_after(len(self.plan.ends) - 1)

    @property
    def cells(self) -> list[CellKey]:
        """The planned cells in the order of the tables."""
        return [(*group, name) for group in self.plan.groups() for name in self.configurations]

    def complete_runs(self, cell: CellKey) -> list[RunRecord]:
        """Return the complete runs of a cell."""
        return [run for run in self.complete if run.cell == cell]

    @cached_property
    def square(self) -> dict[tuple[str, str], str]:
        """The configurations of two engines over two transports each, by engine and the transport
        that really carried the gradients: DDP before Horovod, and Gloo, which every installation
        has, last. Empty if the plan has no such square."""
        names: dict[tuple[str, str], str] = {}
        for name, configuration in self.configurations.items():
            runs = [run for run in self.written if run.configuration == name]
            used = {(run.engine, run.environment.transport) for run in runs}
            if len(used) == 1 and not configuration.flags and not configuration.environment:
                names.setdefault(used.pop(), name)
        for other in sorted({transport for _, transport in names} - {"Gloo"}):
            for pair in combinations(PEERS, 2):
                corners = [(engine, t) for t in (other, "Gloo") for engine in pair]
                if not self.plan.null and names.keys() >= {*corners}:
                    return {corner: names[corner] for corner in corners}
        return {}


def newest_comparison(runs: Path) -> Path | None:
    """Return the newest comparison under a folder of runs, None if there is none. The names of
    comparisons sort by age."""
    return max((path.parent for path in runs.glob("compare-*/plan.json")), default=None)


def find_comparisons(paths: Sequence[Path]) -> list[Path]:
    """Return the folders of the comparisons that a user's paths name; a path is a folder or a file
    in it. Without paths, return the newest one under runs/. UserError if there is none."""
    comparisons = []
    for path in paths or filter(None, [newest_comparison(Path("runs"))]):
        folder = path if path.is_dir() else path.parent
        is_there = path.exists() and (folder / "plan.json").exists()
        what = "holds no plan.json" if path.exists() else "does not exist"
        if not is_there:
            raise UserError(f"{path} {what}: give a comparison's path, as in runs/compare-...")
        comparisons.append(folder)
    if not comparisons:
        raise UserError(
            "no comparison under runs/: make one with `make compare` or `python compare/run.py`, "
            "or give the path of one, such as one of those under results/"
        )
    return comparisons


def load_comparison(folder: Path) -> Comparison:
    """Read a comparison. The status of a run says if it is missing, unfinished or broken. UserError
    if the plan is broken, or nothing was measured."""
    plan = read_plan(folder / "plan.json")
    runs = [load_run(folder, planned) for planned in plan.runs()]
    # In a packed record, each side of a failed block of turns has a folder of its own.
    failures = {match[0] for name in packed.folders(folder) if (match := FAILED.match(name))}
    failures |= {str(path.relative_to(folder)) for path in folder.rglob("*.failed-[0-9]*")}
    earlier = sorted(folder / name for name in failures)
    comparison = Comparison(folder, plan, runs, earlier, {}, [], [])
    for case, workers in plan.groups():
        load_turns(comparison, case, workers)
    if not comparison.written:
        reasons = [run.reason for run in runs] + [why for *_, why in comparison.damaged_blocks]
        ended = [run for run in runs if run.status != "not run"]
        where = f"; see {ended[0].folder / 'output.log'}" if ended else ""
        nothing = f"none of its {len(runs)} runs is complete ({len(ended)} failed){where}"
        raise UserError(next(filter(None, reasons), f"{folder}: {nothing}"))
    return comparison


def load_run(comparison: Path, planned: Run) -> RunRecord:
    """Read one run folder. If it is broken, or not the planned run, its status is "unreadable",
    with the reason."""
    folder = comparison / planned.folder
    place = place_of(planned, folder)
    try:
        run = RunRecord(**place, **vars(read_outcome(folder)))
        if packed.exists(folder / "command.txt"):
            run.command = packed.read_text(folder / "command.txt").strip()
        if run.is_complete:
            read_sealed(folder / "outcome.json", comparison)
            read_written(run, folder)
            run.summary = read_record(folder / "summary.json", TimedSummary)
            last = read_last_step(folder / "metrics.jsonl")
            refuse(
                *(
                    (True, f"{folder}/{one}")
                    for one in contradictions(run.config, run.summary, last)
                )
            )
            # Here, although only plots show them: all that is damaged must be known before the
            # report says what is.
            read_evaluations(run)
    except (UserError, OSError) as error:
        return RunRecord(**place, status="unreadable", reason=str(error))
    return run


def read_evaluations(run: RunRecord) -> None:
    """Read the run's evaluations. A damaged line costs only its learning curve."""
    try:
        lines: list[EvalLine] = read_metrics(run.folder / "metrics.jsonl")[EvalLine]
        run.evaluations = [line for line in lines if line.weights == "model"]
    except UserError as error:
        run.reason = str(error)


def place_of(planned: Run, folder: Path) -> dict[str, Any]:
    """Return the fields of a run, or of a side, that the plan determines."""
    configuration = planned.configuration
    return {
        "folder": folder,
        "block": planned.block,
        "case": planned.case,
        "configuration": configuration.name,
        "engine": configuration.engine,
        "launcher": configuration.launcher,
        "workers": planned.workers,
        "seed": planned.seed,
    }


def load_turns(comparison: Comparison, case: str, workers: int) -> None:
    """Read the blocks of turns of one case at one number of workers in order, up to the first
    that is damaged or breaks the chain."""
    before = ""
    blocks = comparison.turns.setdefault((case, workers), [])
    paths = packed.find(comparison.folder, f"{turns_place(case, workers)}/*/block.json")
    numbered = {block_number(path.parent): path for path in paths}
    for number in sorted(numbered.keys() - {0}):
        path = numbered[number]
        try:
            record = read_sealed(path, comparison.folder, before)
            block = parse_block(record, path)
            sides = []
            for run in comparison.plan.in_order(number, case, workers):
                folder = path.parent / run.configuration.name
                sides.append(RunRecord(**place_of(run, folder), is_side=True))
                if comparison.plan.side:  # a user's own script writes no run folder
                    side, name = sides[-1], run.configuration.name
                    if name not in block.facts:
                        raise UserError(f"{path}: facts of {name} are missing")
                    side.command = block.commands[block.order.index(name)]
                    side.config = Settings(log_dir="", name=None)
                    side.environment = parse(block.facts[name], Environment, f"{path}: {name}")
                else:
                    read_written(sides[-1], folder / SIDE_RUN)
            for problem in contradictions_of_turns(block, sides):
                raise UserError(f"{path}: {problem}")
        except (UserError, OSError) as error:
            comparison.damaged_blocks.append((case, workers, str(error)))
            return
        before = record["digest"]
        blocks.append(block)
        comparison.sides.extend(sides)


def read_written(run: RunRecord, folder: Path) -> None:
    """Read the settings and environment of a complete run or a side. UserError names the file and
    the field that is wrong, also if the number of workers is not the planned one."""
    run.config = read_record(folder / "config.json", Settings)
    run.environment = read_record(folder / "environment.json", Environment)
    planned = 1 if ENGINES[run.engine].is_one_worker else run.workers
    ran = run.environment.world_size
    problem = f"{folder}/environment.json: world_size is {ran}, but the plan has {planned}"
    if ran != planned:
        raise UserError(problem)


def contradictions_of_turns(block: Block, sides: Sequence[RunRecord]) -> Iterator[str]:
    """Yield where turns contradict the sides' settings, or the rule for leaving turns out. This
    finds honest mistakes; the chain of digests finds changes after the measurement."""
    for turn in block.of("disturbed"):
        if turn.other_load <= block.quiet_cores:
            yield f"a turn of {turn.side} was left out, but no other process had disturbed it"
    for side in sides:
        name, workers = side.configuration, side.environment.world_size
        of_step = (side.config.batch_size or 0) * side.config.batches_per_allreduce * workers
        expected = block.steps.get(name, 0) * of_step
        for turn in block.turns:
            counts = turn.side == name and turn.purpose != "trial"
            if counts and expected and not math.isclose(turn.images, expected):
                yield f"a turn of {name} has {turn.images:g} images, but its steps have {expected}"
