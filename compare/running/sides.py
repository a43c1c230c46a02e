"""The sides of a measurement by turns: what is started, by which command, and what it is to do."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from compare.errors import UserError

TAKE_TURNS = "compare/running/take_turns.py"


class MeasurementError(UserError):
    """Something that keeps sides from being measured; said without a traceback."""


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
