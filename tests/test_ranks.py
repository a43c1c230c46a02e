"""What is said of sides that are waited for, and of whom."""

import re
import signal
from multiprocessing.connection import Pipe
from types import SimpleNamespace

import pytest

from compare.evidence.memory import Leak, NewPages
from compare.for_scripts.comparison_side import CLOSED, FORKED, State
from compare.page.report import leak_text, pages_text
from compare.plan.environment import ROOT
from compare.running.ranks import Lag, Rank, StartedSide, lag_of
from compare.running.scheduler import ended_text

STARTING, WARMING_UP, READY, RUNNING, PAUSED = (
    State.STARTING,
    State.WARMING_UP,
    State.READY,
    State.RUNNING,
    State.PAUSED,
)


def lag(*states: State | None, num_ranks: int | None = None, is_script: bool = True) -> Lag | None:
    """Of ranks in these states; those without one have not connected."""
    there = [
        Rank(number, "a", "a", 2, Pipe()[0], state)
        for number, state in enumerate(states)
        if state is not None
    ]
    return lag_of(there, len(states) if num_ranks is None else num_ranks, is_script)


@pytest.mark.parametrize(
    ("states", "text"),
    [
        ([None], "it has not made a Side()"),
        ([None, None], "none of its 2 ranks has made a Side()"),
        ([STARTING, None], "rank 1 has not made a Side(), rank 0 has"),
        ([STARTING, STARTING], "none of its 2 ranks has called step"),
        ([READY, STARTING], "rank 1 has not called step, rank 0 has"),
        ([WARMING_UP, STARTING, STARTING], "ranks 1 and 2 have not called step, rank 0 has"),
        ([READY, WARMING_UP], "rank 1 has not made its first steps, rank 0 has"),
        ([READY, READY, RUNNING], "rank 2 has not ended its turn, ranks 0 and 1 have"),
        (
            [STARTING] * 12 + [READY],
            "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 4 more have not called step, rank 12 has",
        ),
    ],
)
def test_the_hindmost_ranks_are_named(states: list[State | None], text: str) -> None:
    found = lag(*states)
    assert found and found.text == text


def test_a_side_that_has_done_all_is_not_accused() -> None:
    assert lag(READY, READY) is None
    assert lag(PAUSED, PAUSED) is None


def test_the_ranks_of_an_unknown_number_or_of_one_number_are_counted() -> None:
    nobody = lag(num_ranks=-1)
    assert nobody and nobody.text == "no rank has made a Side()"
    own = [Rank(0, "a", "a", 2, Pipe()[0]) for _ in range(2)]  # it starts them itself
    found = lag_of(own, 3, is_script=True)
    assert found and found.text == "1 of its 3 ranks has not made a Side(), rank 0 has"


@pytest.mark.parametrize(
    ("states", "is_hopeless"),
    [
        ([READY, STARTING], True),
        ([READY, None], True),
        ([READY, WARMING_UP], False),  # slow
        ([STARTING, None], False),  # rank 0 may wait for the other one in its first step
        ([WARMING_UP, STARTING], False),  # perhaps in its warm-up they do not wait for each other
        ([None, None], False),
        ([READY, RUNNING], False),
    ],
)
def test_waiting_ends_where_ranks_are_so_far_ahead_that_it_cannot_help(
    states: list[State | None], is_hopeless: bool
) -> None:
    found, of_trainer = lag(*states), lag(*states, is_script=False)
    assert found and found.is_hopeless == is_hopeless
    assert of_trainer and not of_trainer.is_hopeless  # it calls step on all ranks


def failure(code: int, *states: State) -> str:
    """What is said of a script of such ranks, each after 31 steps, that ended with this code."""
    there = [
        Rank(number, "a", "a", 2, Pipe()[0], state, steps=31) for number, state in enumerate(states)
    ]
    script = SimpleNamespace(is_script=True, workers=len(there))
    side = StartedSide(script, SimpleNamespace(), there)
    return ended_text("mine", code) + ("" if code < 0 else side.ended_early())


def test_the_docs_quote_what_is_said() -> None:
    found = [lag(num_ranks=-1), lag(STARTING, None), lag(READY, STARTING), lag(RUNNING)]
    said = [one.text for one in found if one]
    said += [FORKED, CLOSED, failure(0, READY), failure(-signal.SIGKILL, READY)]
    said.append(leak_text(Leak("mine", "memory_bytes", 2.1e6, 3)))
    said.append(pages_text(NewPages("mine", 1500, 0.03)))
    page = (ROOT / "docs/ab-tests.md").read_text().partition("## When something is wrong")[2]
    quoted = re.findall(r"^\| `(?!run.py)([^`]*)` \|", page, re.MULTILINE)
    assert len(quoted) == len(said)
    assert [quote for quote in quoted if not any(quote in text for text in said)] == []
