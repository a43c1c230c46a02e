"""The memory of a side during its turns: whether it grows steadily, as by a leak, and whether it is
given back to the system and taken anew in each step.

Mapped files and shared memory are no part of it, so a leak in shared memory is not seen.
"""

from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

from compare.evidence.turns import Block
from compare.for_scripts.comparison_side import LEAD_IN_STEPS
from compare.plan.blocks import MIN_BLOCKS

# The fields of a turn, and what they are called.
KINDS = {"memory_bytes": "memory", "gpu_memory_bytes": "GPU memory"}
MIN_TURNS = 6  # of a block that count, two in each third
# The least growth that is told, per 100 steps, as a share of the memory: 1 MB of 1 GB.
LEAST_SHARE = 0.001
# A leak is as steep later on; what fills up once, such as caches, is less and less steep.
LEAST_STEADINESS = 0.8

# The least that the system needs to map a new page and fill it with zeros. (In a virtual machine it
# was 3.3 us: 1,700 pages more made a step of 43 ms 5.5 ms longer.)
PAGE_FAULT_SECONDS = 1e-6
LEAST_FAULT_SHARE = 0.01  # of a step's time for its page faults, from which they are told


class Leak(NamedTuple):
    """Growing memory of a side."""

    side: str
    kind: str  # of KINDS
    bytes_per_100_steps: float  # of all ranks, the median over blocks
    blocks: int  # in all of which it grew


def most_of(blocks: Sequence[Block], side: str, kind: str) -> float | None:
    """Return the bytes of a side's largest turn, as the median over blocks; None if not all of its
    turns have recorded them."""
    if not all(known := [in_turns(block, side, kind) for block in blocks]):
        return None
    return median(max(values) for values in known)


def in_turns(block: Block, side: str, kind: str) -> list[int]:
    """Return the bytes after each of a side's turns; [] if some have not recorded them."""
    found = [getattr(turn, kind) for turn in block.turns if turn.side == side]
    return [] if None in found else found


def leaks(blocks: Sequence[Block], sides: Sequence[str]) -> Iterator[Leak]:
    """Yield the leaks of the sides of these blocks: memory that grows steadily in each of them."""
    if len(blocks) < MIN_BLOCKS:
        return
    for side in sides:
        for kind in KINDS:
            rates = [growth(block, side, kind) for block in blocks]
            if all(rates):
                yield Leak(side, kind, median(rates), len(blocks))


class NewPages(NamedTuple):
    """Memory that a side takes from the system in each step, as the mean over turns."""

    side: str
    per_step: float  # pages of one rank
    share: float  # of the step's time, at least


def new_pages(blocks: Sequence[Block], sides: Sequence[str]) -> Iterator[NewPages]:
    """Yield the sides for which the system prepares so much memory in each step that it matters:
    the C library gave it back after the step before. How much it gives back depends on where blocks
    lie in memory, so it differs from launch to launch, and with it the speed."""
    for side in sides:
        turns = [(block, turn) for block in blocks for turn in block.of("speed")]
        own = [(block.steps[side], turn) for block, turn in turns if turn.side == side]
        faults = [turn.page_faults for _, turn in own if turn.page_faults is not None]
        if not own or len(faults) < len(own):
            continue
        per_step = sum(faults) / sum(LEAD_IN_STEPS + steps for steps, _ in own)
        seconds_of_step = sum(turn.seconds for _, turn in own) / sum(steps for steps, _ in own)
        share = PAGE_FAULT_SECONDS * per_step / seconds_of_step
        if share >= LEAST_FAULT_SHARE:
            yield NewPages(side, per_step, share)


def growth(block: Block, side: str, kind: str) -> float:
    """Return by how many bytes per 100 steps a side's memory grew late in a block; 0 unless it grew
    steadily: from each third of its turns to the next. Turns count from the first one without
    exchange on, for which DDP takes memory that it keeps."""
    purposes = [turn.purpose for turn in block.turns if turn.side == side]
    begin = purposes.index("ablation") if "ablation" in purposes else 0
    found = in_turns(block, side, kind)[begin:]
    size = len(found) // 3
    if len(found) < MIN_TURNS:
        return 0.0
    thirds = (found[-3 * size : -2 * size], found[-2 * size : -size], found[-size:])
    first, second, third = (median(third) for third in thirds)
    before, later = second - first, third - second
    of_100_steps = 100 * later / (size * (LEAD_IN_STEPS + block.steps[side]))
    is_steady = later >= LEAST_STEADINESS * before > 0
    return of_100_steps if is_steady and of_100_steps >= LEAST_SHARE * third else 0.0
