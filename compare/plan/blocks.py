"""Blocks: each holds everything once, in a randomised order. All measurements of this project are
made in blocks."""

import random
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")
MIN_BLOCKS = 3  # of an interval: with two, Student's is +-12.7 standard errors, useless
ROUNDS = 8  # in each block of turns, where the plan fixes the number of blocks
RUN_MARK = "COMPARE_RUN"  # environment variable that every process of a run inherits
# Environment variable: the name that the fork servers of a block, or of whole runs, share
# (compare/running/forked_rank.py)
FORK_SERVERS = "FORK_SERVERS"


def shuffled(things: Iterable[T], *place: object) -> list[T]:
    """Return the things in the order of one block.

    The order depends on `place` alone (a seed, the block's number, and whatever else identifies
    it). So a measurement that is resumed or extended has the same orders as one made in one go.
    """
    order = list(things)
    random.Random("/".join(map(str, place))).shuffle(order)
    return order


def balanced(things: Iterable[T], number: int, *place: object) -> list[T]:
    """Return the things in the order of block `number` (from 1). Over the blocks no thing has an
    advantage, however the machine drifts.

    The orders are the rows of a Latin square in which everything follows everything else equally
    often (Williams, Australian Journal of Scientific Research A 2, 1949). Each row is followed by
    the same row backwards: over two such blocks a steady drift cancels. Two things have AB, BA, BA,
    AB. `place` (a seed, and whatever identifies this set of things) decides which thing is which
    letter of the square.
    """
    labels = shuffled(things, *place)
    n = len(labels)
    turn, is_backwards = divmod(number - 1, 2)
    zigzag = [-(step // 2) if step % 2 == 0 else (step + 1) // 2 for step in range(n)]  # 0 1 -1 2
    order = [labels[(step + turn) % n] for step in zigzag]
    return order[::-1] if is_backwards else order


def side_by_side(names: Iterable[str], pairs: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Return the names in groups: names that pairs connect, directly or through other names, are in
    one group."""
    groups = {name: [name] for name in names}
    for first, second in pairs:
        if groups[first] is not groups[second]:
            whole = groups[first] + groups[second]
            groups |= dict.fromkeys(whole, whole)
    return [group for name, group in groups.items() if group[0] == name]
