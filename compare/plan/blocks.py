"""Blocks: each holds everything once, in an order shuffled by lot. All that is measured in this
project is measured in blocks."""

import random
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")
ROUNDS = 8  # of a comparison's block of turns: in each every side has a turn
LEAD_IN_STEPS = 1  # of each turn, before its clock starts
RUN_MARK = "COMPARE_RUN"  # variable that every process of a run inherits
DELAY = "COMPARE_DELAY"  # variable: which share of a turn a rank waits longer, as a known delay


def shuffled(things: Iterable[T], *place: object) -> list[T]:
    """Return the things in the order of one block.

    It depends on the block's place alone (a seed, a number, what else tells it from others): a
    measurement that goes on, or takes more blocks, has the orders that it would have had at once.
    """
    order = list(things)
    random.Random("/".join(map(str, place))).shuffle(order)
    return order


def balanced(things: Iterable[T], number: int, *place: object) -> list[T]:
    """Return the things in the order of block `number`, from 1: one such that over the blocks none
    has an advantage, whatever the machine's drift.

    They follow the rows of a Latin square in which everything follows everything else equally often
    (Williams, Australian Journal of Scientific Research A 2, 1949), each row and then the same
    backwards: over any such two blocks a steady drift cancels. Two things have AB, BA, BA, AB.
    `place` (a seed, and what tells these things from others) decides which thing stands for which
    letter of the square.
    """
    labels = shuffled(things, *place)
    n = len(labels)
    turn, is_backwards = divmod(number - 1, 2)
    zigzag = [-(step // 2) if step % 2 == 0 else (step + 1) // 2 for step in range(n)]  # 0 1 -1 2
    order = [labels[(step + turn) % n] for step in zigzag]
    return order[::-1] if is_backwards else order


def side_by_side(names: Iterable[str], pairs: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Return the names in groups: what is in a pair is in one group, directly or by others."""
    groups = {name: [name] for name in names}
    for first, second in pairs:
        if groups[first] is not groups[second]:
            whole = groups[first] + groups[second]
            groups |= dict.fromkeys(whole, whole)
    return [group for name, group in groups.items() if group[0] == name]
