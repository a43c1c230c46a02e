"""Blocks: each holds everything once, in an order drawn by lot. All that is measured in this
project is measured in blocks, and says on the way how long the rest will take."""

import random
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")


def drawn(things: Iterable[T], *place: object) -> list[T]:
    """Return the things in the order of one block.

    It depends on the block's place alone (a seed, a number, what else tells it from others): a
    measurement that goes on, or takes more blocks, has the orders that it would have had at once.
    """
    order = list(things)
    random.Random("/".join(map(str, place))).shuffle(order)
    return order


def seconds_left(
    done: Sequence[tuple[Hashable, float]], waiting: Iterable[Hashable]
) -> float | None:
    """Estimate the time of what is waiting, by what is done of the same kind, else by all; None as
    long as nothing is. Given are kinds, and of what is done the seconds, too."""
    if not done:
        return None
    average = sum(seconds for _, seconds in done) / len(done)
    left = 0.0
    for kind in waiting:
        same = [seconds for one, seconds in done if one == kind]
        left += sum(same) / len(same) if same else average
    return left
