"""The started sides and their ranks, as the scheduler of turns knows them, and what they have not
done yet."""

import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from compare.evidence.words import count
from compare.for_scripts.comparison_side import LEAD_IN_STEPS, SCHEDULER, VERSIONED, State, send
from compare.plan.plan import Run

SHOWN_RANKS = 8  # in a message


@dataclass
class Rank:
    """A handle of a process that takes turns: its identity, its state, and its last turn."""

    number: int
    host: str
    machine: str  # its boot id; hosts that share a kernel share its cores
    cores: int  # of the machine
    connection: Connection
    state: State = State.STARTING
    measured: dict[str, Any] = field(default_factory=dict)
    size: int = 1  # the world size, according to its launcher
    launcher: str = "none"  # by its variables
    steps: int = 0  # that it has made, or more: it reports the first one, and ends of turns
    steps_asked: int = 0  # that it will have made when it is ready again


@dataclass
class StartedSide:
    """A side whose launcher was started, with those of its ranks that have connected."""

    run: Run
    launcher: subprocess.Popen[bytes]
    ranks: list[Rank] = field(default_factory=list)
    # When it last reported something, or was asked to do something.
    heard: float = field(default_factory=time.monotonic)
    is_told: bool = False  # that it is silent: a line says so

    @property
    def num_ranks(self) -> int:
        """Its number of ranks, from the plan or else from its launcher; -1: not known before the
        first one has connected."""
        return self.run.workers or next((rank.size for rank in self.ranks), -1)

    @property
    def lag(self) -> "Lag | None":
        """What its hindmost ranks have not done; None if it is ready or paused."""
        return lag_of(self.ranks, self.num_ranks, self.run.is_script)

    def are(self, state: State) -> bool:
        """Return whether all its ranks have connected and are in this state."""
        states = [rank.state for rank in self.ranks]
        return len(states) == self.num_ranks and {*states} == {state}

    def hear(self) -> None:
        """Note that it has reported something, or was asked to do something."""
        self.heard, self.is_told = time.monotonic(), False

    def send(self, wanted: State, **values: Any) -> None:
        """Tell all its ranks to take a state. They count as running until they confirm it."""
        self.hear()
        for rank in self.ranks:
            rank.state = State.RUNNING
            if wanted is State.RUNNING:
                rank.steps_asked += LEAD_IN_STEPS + values["steps"]
            send(rank.connection, wanted, **values)

    def facts(self) -> dict[str, Any]:
        """Return a script's environment, as its first rank reports it, with the hosts of all its
        ranks."""
        ranks = sorted(self.ranks, key=lambda rank: rank.number)
        hosts = [rank.host for rank in ranks]
        return ranks[0].measured["facts"] | {
            "launcher": ranks[0].launcher,
            "world_size": len(hosts),
            "local_size": hosts.count(ranks[0].host),
            "rank_hosts": hosts,
            "hosts": sorted({*hosts}),
        }

    def ended_early(self) -> str:
        """Return what a user's own script has not done that has ended without an error; "" for a
        trainer."""
        if not self.run.is_script:
            return ""
        if (lag := self.lag) and not lag.began:
            return f": {lag.text}; {lag.remedy}"
        steps = count(max(rank.steps for rank in self.ranks), "step")
        return f" after at least {steps}: it must train until run.py ends it; give it more epochs"


class Task(NamedTuple):
    """What each rank must do, for a sentence such as "rank 1 has not called step"."""

    of_script: str
    of_trainer: str
    remedy: str  # for a user's own script that does not do it


SLOW = "if it is only slow, give a larger --timeout"
# What a rank needs to take part; launchers of other hosts and containers may drop it.
PASS_ON = f"its launcher must pass on {SCHEDULER} and {VERSIONED}"
# In the order in which a rank does them, by the state in which it has not done it yet.
TASKS = {
    None: Task(
        "made a Side()", "started", f"each rank must make one `side = Side()`, and {PASS_ON}"
    ),
    State.STARTING: Task(
        "called step", "made a step", "each rank must call side.step() after each training step"
    ),
    State.WARMING_UP: Task("made its first steps", "made its first steps", SLOW),
    State.RUNNING: Task("ended its turn", "ended its turn", SLOW),
}


class Lag(NamedTuple):
    """What some ranks of a side have not done yet."""

    text: str  # "rank 1 has not called step, rank 0 has"
    remedy: str
    began: bool  # whether all ranks have called step
    is_hopeless: bool  # another rank is so far ahead that waiting cannot help


def lag_of(ranks: Sequence[Rank], num_ranks: int, is_script: bool) -> Lag | None:
    """Return what the hindmost ranks of a side have not done; None if it is ready or paused.
    `ranks` are those that have connected, of `num_ranks` (-1: not known).

    Ranks that train together wait for each other in each step. If one of them has made its first
    steps, so have the others: those that have not called step by then never will.
    """
    num_missing = num_ranks - len(ranks) if num_ranks >= 0 else 1
    states = {rank.state for rank in ranks} | ({None} if num_missing else set())
    behind = next((state for state in TASKS if state in states), State.READY)
    if behind is State.READY:
        return None
    ahead = [rank for rank in ranks if rank.state is not behind]
    task, began = TASKS[behind], behind in (State.WARMING_UP, State.RUNNING)
    done, remedy = (task.of_script, task.remedy) if is_script else (task.of_trainer, SLOW)
    if behind is None and ahead:
        remedy += "; if fewer ranks take part, use Side(ranks=N)"
    text = f"{who_has_not(ahead, num_ranks)} {done}"
    if numbers := {rank.number for rank in ahead}:
        text += f", {ranks_text(sorted(numbers))} {has(len(numbers))}"
    is_ready = any(rank.state in (State.READY, State.PAUSED) for rank in ahead)
    is_hopeless = is_script and is_ready and not began
    if is_hopeless:
        remedy += "; if it is only slow, let its ranks wait for each other in the first steps"
    return Lag(text, remedy, began, is_hopeless)


def who_has_not(ahead: Sequence[Rank], num_ranks: int) -> str:
    """Return "rank 1 has not": the ranks but for those that are ahead. Ranks that a script starts
    itself all have the number 0, and are only counted."""
    if not ahead:
        one_of = {-1: "no rank has", 1: "it has not"}
        return one_of.get(num_ranks, f"none of its {num_ranks} ranks has")
    numbers = {*range(num_ranks)} - {rank.number for rank in ahead}
    if len(numbers) != num_ranks - len(ahead):
        behind = num_ranks - len(ahead)
        return f"{behind} of its {num_ranks} ranks {has(behind)} not"
    return f"{ranks_text(sorted(numbers))} {has(len(numbers))} not"


def ranks_text(numbers: Sequence[int]) -> str:
    """Return "rank 1", or "ranks 0, 2 and 3"; of many, the first and how many more."""
    shown = [str(number) for number in numbers[:SHOWN_RANKS]]
    if len(numbers) > SHOWN_RANKS:
        shown.append(f"{len(numbers) - SHOWN_RANKS} more")
    *first, last = shown
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"


def has(number: int) -> str:
    return "has" if number == 1 else "have"
