"""The sides of a benchmark: what is started, by which command, and what it is to do."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compare.errors import UserError
from compare.plan.configurations import CONFIGURATIONS
from compare.plan.plan import TRAINERS

TAKE_TURNS = "benchmarks/harness/take_turns.py"
LAUNCHED_BY = {"ddp": "ddp-torchrun", "horovod": "horovod-mpi"}  # in compare's table


class BenchmarkError(UserError):
    """Something that keeps a benchmark from being measured; told without a traceback."""


@dataclass(frozen=True)
class Side:
    """One of those that are compared: what starts it, and how much it does in a turn."""

    name: str  # a folder's, too
    launcher: tuple[str, ...]  # up to and with `python`, or torchrun's words
    program: tuple[str, ...]  # the script and its arguments; {folder} is where it may write
    images_per_step: int  # of one copy, over all its ranks
    steps: int  # optimizer steps a turn
    ranks: int = 1  # processes that train together
    copies: int = 1  # started at once, knowing nothing of each other
    warm_up: int = 3  # steps
    with_instruments: bool = True
    environment: dict[str, str] = field(default_factory=dict)

    def command(self, folder: Path, copy: int, turns: Sequence[str] = ()) -> list[str]:
        """What starts a copy: as a person would, or with `turns`, the wrapper's flags."""
        program = [word.replace("{folder}", str(folder)) for word in self.program]
        if not turns:
            return [*self.launcher, *program]
        flags = [*turns, "--side", self.name, "--copy", str(copy), "--warm-up", str(self.warm_up)]
        if self.copies > 1:
            flags.append("--overruns")
        if not self.with_instruments:
            flags.append("--without-instruments")
        return [*self.launcher, TAKE_TURNS, *flags, "--", *program]

    def shown(self) -> str:
        """The command for a reader, who may paste it."""
        words = [f"{name}={value}" for name, value in self.environment.items()]
        text = shlex.join([*words, *self.command(Path("runs/bench-by-hand"), 0)])
        if not self.with_instruments:
            text += "   # its Recorder replaced by nothing"
        return text if self.copies == 1 else f"{text}   # {self.copies} of them at once"


@dataclass(frozen=True)
class Workload:
    """What is trained: enough to give a trainer and a bare loop the same work."""

    arch: str
    image_size: int
    batch_size: int  # per worker
    flags: tuple[str, ...] = ()  # that trainers and bare_loop.py share
    threads: int | None = 1  # per worker; None: the trainer's own choice

    def words(self) -> list[str]:
        """Flags that trainers and bare_loop.py share."""
        words = ["--arch", self.arch, "--train-crop-size", str(self.image_size)]
        words += ["--batch-size", str(self.batch_size), *self.flags]
        return words if self.threads is None else [*words, "--threads", str(self.threads)]

    def __str__(self) -> str:
        threads = "" if self.threads is None else f", {self.threads} thread"
        flags = f", {' '.join(self.flags)}" if self.flags else ""
        return f"{self.arch} at {self.image_size} pixels, batch {self.batch_size}{threads}{flags}"


STEPS_OF_AN_EPOCH = 20_000  # more than a benchmark makes: no evaluation comes in between


def trainer_side(
    name: str,
    engine: str,
    workload: Workload,
    steps: int,
    workers: int = 1,
    copies: int = 1,
    flags: Sequence[str] = (),
    environment: dict[str, str] | None = None,
    data: str = "synthetic",
    **others: Any,
) -> Side:
    """A trainer as a side: `engine` is "ddp" or "horovod"; one worker is started by python."""
    launcher = ["python"]
    if workers > 1:
        launcher = CONFIGURATIONS[LAUNCHED_BY[engine]].launch_words(workers, None)
    program = [TRAINERS[engine], "--data", data, *workload.words()]
    program += ["--val-crop-size", str(workload.image_size), "--epochs", "1000"]
    if data == "synthetic":
        images = workload.batch_size * workers * STEPS_OF_AN_EPOCH
        program += ["--synthetic-images", str(images)]
    if "--checkpoint-steps" not in flags:
        program += ["--keep-checkpoints", "0"]
    program += ["--log-dir", "{folder}", "--name", "run", *flags]
    return Side(
        name=name,
        launcher=tuple(launcher),
        program=tuple(program),
        images_per_step=workload.batch_size * workers,
        steps=steps,
        ranks=workers,
        copies=copies,
        environment=environment or {},
        **others,
    )
