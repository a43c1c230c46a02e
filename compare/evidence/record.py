"""The record of a comparison: one file, record.jsonl, which run.py writes and the report reads.

A line each for the plan, for a block of turns, for a complete whole run, and for an attempt that
failed, in the order in which they were made. A later line of the plan extends its end, adds a
warning, or changes what does not make it another comparison, such as a time-out. run.py
appends each line as a whole, and the disk has it before anything else is started.

Each line holds the SHA-256 of all bytes above it: a line that is edited, dropped, moved or taken
from another comparison is found by the line below it. The SHA-256 of the whole file, its head, is
kept elsewhere (the report prints it, and results/sha256sums.txt holds those of the records): only
with it a change is found of the last line, or by somebody who computed all digests anew.
"""

import fcntl
import hashlib
import json
import math
import os
import shlex
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from compare.evidence.group import Group
from compare.evidence.paired import confidence_after
from compare.evidence.reading import decode
from compare.evidence.runs import (
    RunRecord,
    place_of,
    take_environment,
    take_training,
)
from compare.evidence.stopping import unfinished
from compare.evidence.turns import Block
from compare.plan.configurations import PEERS, Configuration
from compare.plan.plan import Outcome, Run, block_place
from compare.plan.plan_file import PlanRecord, explanation, plan_of_record
from recipe.errors import UserError, system_errors
from recipe.files import sync_folder
from recipe.record.schema import Count, Text, Whole

FILE, LOCK = "record.jsonl", "lock"  # in a comparison's folder; run.py holds the lock


class Line(Struct, frozen=True, kw_only=True, tag_field="line"):
    above: str = ""  # SHA-256 of all bytes above this line


class PlanLine(Line, frozen=True, kw_only=True, tag="plan"):
    """The plan, as `plan_record` returns it."""

    plan: dict[str, Any]


class SideLine(Struct, frozen=True, kw_only=True):
    """A side of a block: its command, and what its trainer recorded of settings and environment."""

    command: str
    settings: dict[str, Any]
    environment: dict[str, Any]


class BlockLine(Line, frozen=True, kw_only=True, tag="block"):
    """A block of turns."""

    case: str
    workers: Whole
    block: Block
    sides: dict[str, SideLine]


class RunLine(Line, frozen=True, kw_only=True, tag="run"):
    """A complete whole run, with what its trainer recorded."""

    place: Text  # its folder, relative to the comparison's
    block: Count
    outcome: Outcome
    command: str
    settings: dict[str, Any]
    environment: dict[str, Any]
    summary: dict[str, Any]
    metrics: list[dict[str, Any]]
    gradients: dict[str, Any] | None = None  # when each gradient was ready, if it was profiled


class FailureLine(Line, frozen=True, kw_only=True, tag="failure"):
    """An attempt at a whole run, or at a block of turns, that failed."""

    place: Text  # as of a RunLine; of a block, the folder that it would have
    block: Count
    outcome: Outcome
    folder: Text  # where its output was put aside, relative to the comparison's folder
    output: str  # its end, or what is wrong with what a run has recorded


class ChangedAboveError(UserError):
    """A line does not follow from the lines above it."""


class NotWrittenError(UserError):
    """A good line could not be written; what it says must be recorded by another attempt."""


AnyLine = PlanLine | BlockLine | RunLine | FailureLine


class Record:
    """A comparison: its plan, and all that was measured of it. `open` reads it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.problem = ""  # what is wrong with the file; nothing is decided then
        self.num_whole_lines = 0  # before the first that is wrong
        self._digest = hashlib.sha256()
        self._num_lines = 0
        self._plans = list[PlanRecord]()
        self._blocks = dict[tuple[str, int], list[Block]]()
        self._sides = dict[tuple[str, int], list[RunRecord]]()
        self._complete = dict[str, RunRecord]()  # by place
        self._failures = list[FailureLine]()

    @classmethod
    def open(cls, folder: Path) -> "Record":
        """Read the record in a folder, up to the first line that is wrong (`problem` then says
        what); an empty one if there is no file. UserError if the file cannot be read, or its first
        line is no plan."""
        record = cls(folder)
        if not record.path.exists():
            return record
        try:
            data = record.path.read_bytes()
        except OSError as error:
            raise UserError(f"{record.path} cannot be read: {error.strerror}") from None
        for text in data.splitlines(keepends=True):
            try:
                record._take(record._decoded(text))
            except UserError as error:
                if not record._plans:
                    raise UserError(
                        f"{record.where}: {error}; restore the file, or start anew with --new"
                    ) from None
                record.problem = f"{record.where}: {error}"
                record.num_whole_lines = record._num_lines
                if isinstance(error, ChangedAboveError):
                    record.num_whole_lines -= 1
                break
            record._count(text)
        return record

    # Writing.

    def append(self, line: AnyLine) -> None:
        """Add a line, in memory and in the file. UserError, and nothing is written, if the line
        contradicts the plan, what stands above it, or itself; NotWrittenError if the disk fails."""
        table = msgspec.to_builtins(replace(line, above=self.head), enc_hook=float)
        text = json.dumps(table).encode() + b"\n"
        self._take(self._decoded(text))  # as it will be read
        is_new = not self.path.exists()
        remedy = "When there is room, the same command goes on where it stopped"
        with system_errors(self.path, "cannot be written", remedy, NotWrittenError):
            with self.path.open("ab") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            if is_new:
                sync_folder(self.folder)
        self._count(text)

    # Reading.

    @property
    def path(self) -> Path:
        return self.folder / FILE

    @property
    def where(self) -> str:
        """The file and the number of its next line, for messages."""
        return f"{self.path}, line {self._num_lines + 1}"

    @property
    def head(self) -> str:
        """The SHA-256 of the whole file, as `sha256sum` prints it; with a problem, of what is above
        it."""
        return self._digest.hexdigest()

    def _count(self, text: bytes) -> None:
        self._digest.update(text)
        self._num_lines += 1

    def _decoded(self, text: bytes) -> AnyLine:
        """Return a line; UserError if it is none, or if something above it was changed."""
        if not text.endswith(b"\n"):
            raise UserError("is incomplete: the file was cut off there")
        try:
            table = decode(text.decode(errors="replace"), "it")
        except UserError:
            raise UserError("is not a JSON object: the file was damaged there") from None
        if table.get("above") != self.head:
            changed = f"line {self._num_lines} was changed, or a line is missing above it"
            raise ChangedAboveError(f"does not follow from what stands above: {changed}")
        try:
            return msgspec.convert(table, AnyLine)
        except msgspec.ValidationError as error:
            raise UserError(explanation(str(error), table)) from None

    def _take(self, line: AnyLine) -> None:
        """Add a line in memory; UserError if it contradicts the plan, an earlier line or itself."""
        self.__dict__.pop("groups", None)  # they are made anew
        self.__dict__.pop("unfinished", None)
        if isinstance(line, PlanLine):
            self._plans.append(plan_of_record(line.plan))
            return
        if not self._plans:
            raise UserError("a record begins with its plan")
        if isinstance(line, BlockLine):
            self._take_block(line)
        elif isinstance(line, RunLine):
            self._take_run(line)
        elif line.outcome.status in ("completed", "not run"):
            raise UserError(f"{line.place} failed, but its status is {line.outcome.status}")
        else:
            self._failures.append(line)

    def _take_block(self, line: BlockLine) -> None:
        place, block = (line.case, line.workers), line.block
        if place not in self.plan.groups():
            raise UserError(f"the plan has no case {line.case!r} at {line.workers} workers")
        there = self._blocks.get(place, [])
        if block.number != len(there) + 1:
            raise UserError(f"is block {block.number}, but {len(there)} are above it")
        sides = []
        for run in self.plan.in_order(block.number, *place):
            name = run.configuration.name
            if name not in line.sides:
                raise UserError(f"side {name} is missing")
            of_side = line.sides[name]
            folder = block_place(*place, block.number) / name
            side = RunRecord(
                **{**place_of(run, self.folder), "folder": self.folder / folder},
                command=of_side.command,
                is_side=True,
            )
            take_environment(side, of_side.settings, of_side.environment, name)
            sides.append(side)
        for problem in contradictions_of_turns(block, sides):
            raise UserError(problem)
        self._blocks[place] = [*there, block]
        self._sides[place] = [*self._sides.get(place, []), *sides]

    def _take_run(self, line: RunLine) -> None:
        planned = {run.folder: run for run in self.plan.block(line.block)}
        if line.place not in planned:
            raise UserError(f"{line.place} is no run of the plan")
        if line.outcome.status != "completed":
            raise UserError(f"{line.place}: its status is {line.outcome.status}")
        if line.place in self._complete:
            raise UserError(f"{line.place} is complete above")
        run = RunRecord(
            **place_of(planned[line.place], self.folder),
            **vars(line.outcome),
            command=line.command,
            gradients=line.gradients,
        )
        take_environment(run, line.settings, line.environment, line.place)
        take_training(run, line.summary, line.metrics, line.place)
        self._complete[line.place] = run

    # What it says.

    @property
    def is_empty(self) -> bool:
        return not self._plans

    @property
    def plan(self) -> PlanRecord:
        """The plan with its last end, and the date of its first line."""
        begun = [run.block for run in self._complete.values()]
        begun += [failure.block for failure in self._failures if not is_of_turns(failure)]
        return replace(
            self._plans[-1],
            created_utc=self._plans[0].created_utc,
            blocks_there=max(begun, default=0),
        )

    @property
    def extensions(self) -> int:
        """How often the plan got a later end, after the report could be read."""
        ends = [plan.end for plan in self._plans]
        return sum(earlier != later for earlier, later in pairwise(ends))

    @property
    def confidence(self) -> float:
        """The confidence of each interval."""
        return confidence_after(self.extensions)

    @property
    def num_blocks(self) -> int:
        """The number of all blocks, of turns or of whole runs."""
        return sum(len(group.blocks) for group in self.groups)

    def outcome(self, run: Run) -> Outcome:
        """Return how a planned run ended last."""
        if run.folder in self._complete:
            return self._complete[run.folder]
        has_failed = any(failure.place == run.folder for failure in self._failures)
        return self.failure(run.folder).outcome if has_failed else Outcome("not run")

    def missing(self, runs: Sequence[Run]) -> list[Run]:
        """Return the runs that are still to be made: those that are not complete, but for those
        whose records cannot be used, which would be the same again."""
        ended = ("completed", "unreadable")
        return [run for run in runs if self.outcome(run).status not in ended]

    def failure(self, place: str) -> FailureLine:
        """Return the last failure of a run that has failed."""
        return [failure for failure in self._failures if failure.place == place][-1]

    @property
    def last_failure(self) -> FailureLine | None:
        return self._failures[-1] if self._failures else None

    @cached_property
    def groups(self) -> list[Group]:
        """Each case at each number of workers."""
        plan, runs = self.plan, self.runs
        return [
            Group(
                plan,
                case,
                workers,
                self.confidence,
                self._blocks.get((case, workers), []),
                self._sides.get((case, workers), []),
                [run for run in runs if (run.case, run.workers) == (case, workers)],
            )
            for case, workers in plan.groups()
        ]

    def group_at(self, case: str, workers: int) -> Group:
        return next(group for group in self.groups if group.place == (case, workers))

    @cached_property
    def unfinished(self) -> dict[tuple[str, int], str]:
        """The groups of which nothing is decided yet, by case and number of workers, each with how
        far it is. All, if something is wrong with the file."""
        if self.problem:
            return dict.fromkeys(self.plan.groups(), "part of the record cannot be read")
        return unfinished(self.plan, self.groups)

    @property
    def runs(self) -> list[RunRecord]:
        """All planned whole runs, in their order."""
        return [
            self._complete.get(run.folder)
            or RunRecord(**place_of(run, self.folder), **vars(self.outcome(run)))
            for run in self.plan.runs()
        ]

    @property
    def complete(self) -> list[RunRecord]:
        """The complete whole runs."""
        return [run for group in self.groups for run in group.complete]

    @property
    def sides(self) -> list[RunRecord]:
        """The sides of all blocks of turns."""
        return [side for group in self.groups for side in group.sides]

    @property
    def written(self) -> list[RunRecord]:
        """All that have records of their settings and environment: complete runs, and sides."""
        return [*self.complete, *self.sides]

    @property
    def earlier_failures(self) -> list[FailureLine]:
        """The attempts that failed before the same run or block was made again."""
        last = {failure.place: failure for failure in self._failures}
        return [
            failure
            for failure in self._failures
            if is_of_turns(failure)
            or failure.place in self._complete
            or failure is not last[failure.place]
        ]

    def output_of(self, failure: FailureLine) -> Path:
        """Return the file that has the output of what failed: its own, or in a kept record the
        record."""
        log = self.folder / failure.folder / "output.log"
        return log if log.exists() else self.path

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
        return next((block.unit for group in self.groups for block in group.turns), "images")

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


def is_of_turns(failure: FailureLine) -> bool:
    """Return whether a block of turns failed, not a whole run."""
    return failure.place.startswith("turns/")


def contradictions_of_turns(block: Block, sides: Sequence[RunRecord]) -> Iterator[str]:
    """Yield where turns contradict each other, the sides' settings, or the rule for leaving turns
    out."""
    for turn in block.of("disturbed"):
        if turn.other_load <= block.quiet_cores:
            yield f"a turn of {turn.side} was left out, but no other process had disturbed it"
    timed = [*block.of("speed"), *block.of("ablation")]
    for side in sides:
        name, workers = side.configuration, side.environment.world_size
        phases = {frozenset(turn.phases) for turn in timed if turn.side == name}
        if len(phases) > 1:  # a bare loop has none
            yield f"the turns of {name} do not all have the same phases"
        of_step = (side.config.batch_size or 0) * side.config.batches_per_allreduce * workers
        expected = block.steps.get(name, 0) * of_step
        for turn in block.turns:
            counts = turn.side == name and turn.purpose != "trial"
            if counts and expected and not math.isclose(turn.images, expected):
                yield f"a turn of {name} has {turn.images:g} images, but its steps have {expected}"


def with_digests(lines: Iterable[dict[str, Any]]) -> tuple[str, str]:
    """Return the text of a record with these lines, their digests computed anew, and its head. For
    an intended change, such as removing paths from it."""
    text, digest = "", hashlib.sha256()
    for line in lines:
        written = json.dumps({**line, "above": digest.hexdigest()}) + "\n"
        digest.update(written.encode())
        text += written
    return text, digest.hexdigest()


def newest_comparison(runs: Path) -> Path | None:
    """Return the newest comparison under a folder of runs, None if there is none. The names of
    comparisons sort by age."""
    return max((path.parent for path in runs.glob(f"compare-*/{FILE}")), default=None)


def find_comparisons(paths: Sequence[Path]) -> list[Path]:
    """Return the folders of the comparisons that a user's paths name; a path is a folder or a file
    in it. Without paths, return the newest one under runs/. UserError if there is none."""
    comparisons = []
    for path in paths or filter(None, [newest_comparison(Path("runs"))]):
        folder = path if path.is_dir() else path.parent
        if not path.exists():
            raise UserError(f"{path} does not exist: give a comparison's path, runs/compare-...")
        if not (folder / FILE).exists():
            hint = "give a comparison's path, runs/compare-..."
            if (folder / "plan.json").exists():
                hint = "it is of an earlier version: report it with that version"
            raise UserError(f"{path} holds no {FILE}: {hint}")
        comparisons.append(folder)
    if not comparisons:
        raise UserError(
            "no comparison under runs/: make one with `make compare` or `python compare/run.py`, "
            "or give the path of one, such as one of those under results/"
        )
    return comparisons


def record_to_write(folder: Path) -> Record:
    """Return the record in a folder, to add to it. A last line that a crash has cut off is removed.
    UserError if the rest is not whole, with what may be done."""
    path = folder / FILE
    if path.exists():
        with system_errors(path, "cannot be read and written", "Give another --out DIR"):
            whole, end, rest = path.read_bytes().rpartition(b"\n")
            if rest:
                os.truncate(path, len(whole) + len(end))
                print(f"{path}: its last line was cut off while it was written, and is removed")
    record = Record.open(folder)
    if record.problem:
        keep, name = record.num_whole_lines, shlex.quote(str(path))
        remedy = (
            "to measure anew what follows, keep the lines above it: "
            f"head -n {keep} {name} > whole && mv whole {name}"
        )
        raise UserError(f"{record.problem}; {remedy if keep else 'start anew with --new'}")
    return record


def read_comparison(folder: Path) -> Record:
    """Return a record for a report; UserError if nothing was measured, with the reason."""
    record = Record.open(folder)
    if not record.is_empty and record.written:
        return record
    reason = "the first block was not finished; the command that began it begins it again"
    if record.last_failure:
        reason = failure_text(record, record.last_failure)
    elif is_being_written(folder):
        reason = "it is still running its first block; wait for it"
    raise UserError(record.problem or f"{folder}: nothing was measured: {reason}")


def failure_text(record: Record, failure: FailureLine) -> str:
    """Say what failed and where its output is."""
    what, where = f"{failure.place} {failure.outcome.status}", record.output_of(failure)
    if is_of_turns(failure):  # its output begins with the reason
        reason = failure.output.partition("\n")[0].removesuffix(":")
        what, where = f"block {failure.block} failed: {reason}", record.folder / failure.folder
    return f"{what}; see {where}"


def is_being_written(folder: Path) -> bool:
    """Return whether a run.py works in this folder now: it holds the folder's lock."""
    try:
        with (folder / LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no lock there, or none possible
        pass
    return False
