"""What the numbers and words of flags must be."""

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple


class Bound(NamedTuple):
    """What a flag's number must be."""

    holds: Callable[[Any], bool]
    advice: str


def at_least(smallest: int) -> Bound:
    return Bound(lambda value: value >= smallest, f"must be at least {smallest}")


# Not a number lies within none of them.
SHARE = Bound(lambda v: 0 <= v <= 1, "is a share or probability; give a number from 0 to 1")
SHARE_ABOVE_0 = Bound(lambda v: 0 < v <= 1, "is a share; give a number above 0 and up to 1")
NOT_NEGATIVE = Bound(lambda v: 0 <= v < math.inf, "give a number that is not negative")
ABOVE_0 = Bound(lambda v: 0 < v < math.inf, "give a number above 0")
PERCENTAGE = Bound(lambda v: 1 < v <= 100, "is a percentage; 75 percent is written 75")
LOSS_SCALE = Bound(
    lambda v: v == "dynamic" or 0 < v < math.inf, 'give "dynamic" or a number above 0'
)
AUTO_AUGMENTS = ("ra", "ta_wide", "autoaugment", "augmix")  # torchvision's
RAND_AUGMENT = r"rand(-(m|n|mmax)\d+|-(p|mstd)\d+(\.\d+)?|-inc[01])+"  # timm's
AUTO_AUGMENT = Bound(
    lambda v: v in AUTO_AUGMENTS or bool(re.fullmatch(RAND_AUGMENT, v)),
    f"choose {', '.join(AUTO_AUGMENTS)}, or RandAugment as timm writes it: rand-m7-mstd0.5-inc1",
)
SEED = Bound(lambda v: 0 <= v < 2**63, "must be at least 0 and less than 2^63")
