"""The sides of a measurement by turns: what is started, by which command, and what it is to do."""

import functools
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compare.plan.blocks import RUN_MARK
from compare.plan.environment import ROOT
from compare.plan.plan import Plan, Run
from compare.running.take_turns import SCHEDULER
from recipe.errors import UserError
from recipe.settings.config import read_flags
from recipe.settings.flags import flag_name

TAKE_TURNS = str(ROOT / "compare" / "running" / "take_turns.py")


class MeasurementError(UserError):
    """Something that keeps sides from being measured; said without a traceback. `side` is the name
    of the one that failed."""

    def __init__(self, text: str, side: str | None = None) -> None:
        super().__init__(text)
        self.side = side


class NoTurns(MeasurementError):
    """Something that keeps these sides from taking turns; one after the other they may train."""


@dataclass(frozen=True)
class Program:
    """One of those that are compared: what starts it, and how much it does in a turn."""

    name: str  # a folder's, too
    launcher: tuple[str, ...]  # up to and with `python`, or torchrun's words
    program: tuple[str, ...]  # the script and its arguments; {folder} is where it may write
    images_per_step: int = 0  # of one copy, over all its ranks; 0: as its script says
    steps: int = 0  # optimizer steps a turn; 0: as many as fill it, the same for all sides
    ranks: int = 1  # processes that train together; 0: as many as its launcher's variables say
    copies: int = 1  # started at once, knowing nothing of each other
    warm_up: int = 5  # steps
    environment: dict[str, str] = field(default_factory=dict)
    directory: Path = ROOT  # in which it is started
    joins: bool = False  # does its script say itself when a step has ended? (compare/side.py)
    ablates: bool = False  # can it leave out the exchange of gradients?
    over_hosts: bool = False  # some of its ranks are on other hosts, or may be
    interface: str | None = None  # of the network between them; None: any that leads here

    def command(self, folder: Path, by_turns: bool = False) -> list[str]:
        """What starts a copy: as a person would, or so that it takes turns."""
        program = [word.replace("{folder}", str(folder)) for word in self.program]
        command = [*self.launcher, *[TAKE_TURNS] * (by_turns and not self.joins), *program]
        if (
            by_turns and self.over_hosts and "mpirun" in command
        ):  # others take the environment along
            at = command.index("mpirun") + 1
            command[at:at] = ["-x", RUN_MARK, "-x", SCHEDULER, *["-x", "PYTHONPATH"] * self.joins]
        return command

    def shown(self) -> str:
        """The command for a reader, who may paste it."""
        words = [f"{name}={value}" for name, value in self.environment.items()]
        text = shlex.join([*words, *self.command(Path("runs/by-hand"))])
        return text if self.copies == 1 else f"{text}   # {self.copies} of them at once"


def side_of(run: Run, plan: Plan, folder: Path) -> Program:
    """A planned run as a side of the block that is written into `folder`, named as its
    configuration is. NoTurns where steps are not those of ranks that train a batch each."""
    own = {"steps": plan.steps or 0, "warm_up": plan.warm_up_steps}
    if plan.side:
        return script_side(run, **own)
    return training_side(run, folder, plan.no_phases, **own)


def training_side(run: Run, folder: Path, no_phases: bool = False, **others: Any) -> Program:
    """A run of a trainer as a side. Its training never comes to an epoch's end, nor to --max-steps
    (take_turns.py sees to that)."""
    configuration = run.configuration
    engine = configuration.trained_by
    if engine.servers or engine.has_one_replica:
        raise NoTurns(f"not each rank of {configuration.name} trains a batch of its own")
    return Program(
        name=configuration.name,
        launcher=tuple(run.launch_words(folder / configuration.name)),
        program=(str(ROOT / engine.trainer), *run.trainer_words("{folder}", "run")),
        images_per_step=images_per_step(configuration.engine, run.workers, run.arguments),
        ranks=run.workers,
        ablates=engine.ablates
        and not (no_phases or "--use-adasum" in map(flag_name, run.arguments)),
        directory=Path.cwd(),
        over_hosts=run.leaves_this_host or configuration.has_daemons,
        interface=configuration.interface,
        **others,
    )


def script_side(run: Run, **others: Any) -> Program:
    """A script of a user's own as a side: the command as it was given, in this folder."""
    configuration = run.configuration
    return Program(
        name=configuration.name,
        launcher=(),
        program=configuration.command,
        ranks=0,
        copies=configuration.copies,
        joins=True,
        environment=configuration.environment,
        directory=Path.cwd(),
        over_hosts=run.hosts is not None,
        **others,
    )


@functools.cache
def images_per_step(engine: str, workers: int, arguments: tuple[str, ...]) -> int:
    """Images between two optimizer steps, over all workers, as the trainer's flags say."""
    config, *_ = read_flags(engine, workers, list(arguments), talk=False)
    return config.batch_size * config.batches_per_allreduce * workers
