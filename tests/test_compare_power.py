"""How long must two sides be compared until a gate finds a slow-down, and how often is it wrong?
Simulated blocks of two sides, judged as the report judges them.

`python tests/test_compare_power.py` prints the tables of docs/ab-tests.md.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from test_compare_coverage import LAUNCH

from compare.evidence.goals import FAILED, PASSED, Goal, gate_result
from compare.evidence.group import Group
from compare.evidence.judgement import UNDECIDED, decided
from compare.evidence.paired import (
    LAUNCH_SHARE,
    Estimate,
    Scatter,
    estimate_logs,
    moderated,
)
from compare.evidence.record import read_comparison
from compare.evidence.stopping import BlockCost, cost_of, narrowest_rounds
from compare.plan.blocks import MIN_BLOCKS, ROUNDS

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/ab-tests.md"
FOUND, EXPERIMENTS = 0.8, 400  # which show such a share as 76 to 84 % (two standard errors)
MANY = 2000  # for small shares: these show 2.5 % as 1.8 to 3.2 %
# The standard deviation of a ratio from block to block, of ROUNDS rounds: the quartiles of the
# recorded comparisons by turns.
NOISE = {"quiet": 0.018, "noisy": 0.037}
ROUND_SECONDS = 0.65  # of a round of one side, as in results/epyc-2-cores/2026-11-28-rank-start
STARTS = (9, 60)  # seconds of a side's start and end: as there, and of a slow one
DIFFERENCES = (0.01, 0.02, 0.03, 0.05)
GOAL, BLOCKS = 0.985, (5, 10, 20)
RATIOS = {"equally fast": 1.0, "as fast as the goal": GOAL, "3 % slower": 0.97}


def goal_to_find(difference: float) -> float:
    """The goal that lies half-way between equal speeds and a slow-down."""
    return 1 - difference / 2


def estimates(ratio: float, noise: float, blocks: int, rounds: int, number: int) -> list[Estimate]:
    """What the report gives of two sides whose true ratio is this one. `noise`: of a block of
    ROUNDS rounds, to which each side's launch adds LAUNCH."""
    random = np.random.default_rng(17)
    of_launches = 2 * LAUNCH**2
    of_turns = (noise**2 - of_launches) * ROUNDS / rounds  # variance of a block's mean over them
    shape = (number, blocks)
    logs = random.normal(math.log(ratio), math.sqrt(of_launches + of_turns), shape)
    predicted = of_turns * random.chisquare(rounds - 1, shape) / (rounds - 1)
    return [
        estimate_of(own, own_predicted, rounds)
        for own, own_predicted in zip(logs.tolist(), predicted.mean(axis=1).tolist(), strict=True)
    ]


def estimate_of(logs: list[float], predicted: float, rounds: int) -> Estimate:
    """As `Group.estimate` has it. `predicted`: the variance of a block, by its turns."""
    blocks = len(logs)
    found = replace(estimate_logs(logs), turn_error=math.sqrt(predicted / blocks))
    over = float(np.var(logs, ddof=1)) / predicted
    return moderated(found, Scatter(over, blocks - 1, blocks * (rounds - 1), rounds))


@cache
def results(
    least: float,
    ratio: float,
    noise: float,
    blocks: int,
    rounds: int = ROUNDS,
    number: int = EXPERIMENTS,
) -> dict[str, float]:
    """How often the gate ends in which way: shares of all measurements."""
    ended = Counter(
        gate_result([decided([Goal(question="", name="new:old", least=least, speed=speed)])])
        for speed in estimates(ratio, noise, blocks, rounds, number)
    )
    return {result: ended[result] / number for result in (PASSED, UNDECIDED, FAILED)}


def plan_of(minutes: float, start: float) -> tuple[int, int]:
    """The blocks of two sides that fit into the time, and their rounds, as run.py chooses them.
    `start`: the seconds of a side's start and end."""
    cost = BlockCost(2 * start, 2 * ROUND_SECONDS)
    rounds = narrowest_rounds(cost, 60 * minutes, [], LAUNCH_SHARE)
    return int(60 * minutes // (cost.start + rounds * cost.round)), rounds


@cache
def minutes_to_find(difference: float, noise: float, start: float) -> int:
    """The least whole minutes after which the gate fails in FOUND of the cases in which a side is
    slower by `difference`, with the goal half-way."""

    def finds(minutes: int) -> bool:
        blocks, rounds = plan_of(minutes, start)
        if blocks < MIN_BLOCKS:
            return False
        ended = results(goal_to_find(difference), 1 - difference, noise, blocks, rounds)
        return ended[FAILED] >= FOUND

    return bisect_left(range(400), True, 1, key=finds)


def rows_of_minutes() -> Iterator[str]:
    """The docs' table of minutes and blocks."""
    for difference in DIFFERENCES:
        cells = []
        for noise in NOISE.values():
            for start in STARTS:
                minutes = minutes_to_find(difference, noise, start)
                blocks, _ = plan_of(minutes, start)
                cells.append(f"{minutes} min ({blocks})")
        yield f"| {100 * difference:g} % | {goal_to_find(difference):g} | {' | '.join(cells)} |"


def rows_of_results() -> Iterator[str]:
    """The docs' table of what the gate says, in percent."""
    for name, ratio in RATIOS.items():
        cells = [
            " / ".join(f"{100 * share:.0f}" for share in ended.values())
            for noise in NOISE.values()
            for blocks in BLOCKS
            for ended in [results(GOAL, ratio, noise, blocks, number=MANY)]
        ]
        yield f"| {name} | {' | '.join(cells)} |"


def test_the_docs_say_how_long_it_takes() -> None:
    page = PAGE.read_text()
    assert [row for row in rows_of_minutes() if row not in page] == []


def test_an_equal_side_passes_after_these_minutes() -> None:
    passed = [
        results(goal_to_find(difference), 1, noise, *plan_of(minutes, STARTS[0]))[PASSED]
        for difference in DIFFERENCES
        for noise in NOISE.values()
        for minutes in [minutes_to_find(difference, noise, STARTS[0])]
    ]
    told = f"passes in {100 * min(passed):.0f} to {100 * max(passed):.0f} of 100 cases"
    assert told in PAGE.read_text()


def test_the_docs_say_when_the_interval_excludes_1() -> None:
    shares = []
    for difference, noise, start in product(DIFFERENCES, NOISE.values(), STARTS):
        minutes = minutes_to_find(difference, noise, start)

        def excludes_1(
            minutes: int, ratio: float = 1 - difference, noise: float = noise, start: int = start
        ) -> bool:
            blocks, rounds = plan_of(minutes, start)
            found = estimates(ratio, noise, max(blocks, MIN_BLOCKS), rounds, EXPERIMENTS)
            ended = fmean((estimate.high or math.inf) < 1 for estimate in found)
            return blocks >= MIN_BLOCKS and ended >= FOUND

        shares.append(bisect_left(range(minutes), True, 1, key=excludes_1) / minutes)
    told = f"takes {100 * min(shares):.0f} to {100 * max(shares):.0f} % of these minutes"
    assert told in PAGE.read_text()


def test_the_docs_say_how_often_the_gate_is_wrong() -> None:
    page = PAGE.read_text()
    assert [row for row in rows_of_results() if row not in page] == []


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("noise", NOISE.values(), ids=NOISE)
def test_noise_alone_fails_in_one_of_forty_at_most(noise: float, blocks: int) -> None:
    """Were the ratio just at the goal; of equal sides in fewer. A slow-down of twice the goal's
    distance passes as seldom."""
    most = 0.025 + 2 * math.sqrt(0.025 / MANY)
    equal, at_goal, slow = (
        results(GOAL, ratio, noise, blocks, number=MANY) for ratio in RATIOS.values()
    )
    assert at_goal[FAILED] <= most and slow[PASSED] <= most
    assert equal[FAILED] <= 0.005


def recorded() -> Iterator[Group]:
    """The groups of trainings by turns on CPUs under results/ with enough blocks."""
    for path in sorted((ROOT / "results").glob("*/*/record.jsonl")):
        for group in read_comparison(path.parent).groups:
            if group.plan.measure == "turns" and group.is_as_recorded and group.num_blocks > 3:
                yield group


def test_the_noise_is_that_of_the_records() -> None:
    ratios = [ratio for group in recorded() for ratio in group.estimates.values()]
    scatter = [float(np.std(np.log(ratio.ratios), ddof=1)) for ratio in ratios]
    assert np.percentile(scatter, [25, 75]) == pytest.approx([*NOISE.values()], rel=0.1)
    rounds = [len(block.quiet_rounds) for group in recorded() for block in group.turns]
    assert fmean(rounds) == pytest.approx(ROUNDS, rel=0.25)


def test_the_cost_of_a_block_is_that_of_a_record() -> None:
    folder = ROOT / "results/epyc-2-cores/2026-11-28-rank-start"
    [group] = read_comparison(folder).groups
    sides = len(group.plan.names)
    cost = [part / sides for part in cost_of(group)]
    assert cost == pytest.approx([STARTS[0], ROUND_SECONDS], rel=0.05)


if __name__ == "__main__":
    print(*rows_of_minutes(), *rows_of_results(), sep="\n")
