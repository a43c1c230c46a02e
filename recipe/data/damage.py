"""Images that may be damaged: refused, but for the few that a large set has."""

import sys
from multiprocessing.sharedctypes import RawArray

import numpy as np

from recipe.data.image_folder import Listing
from recipe.data.images import suspect

# Of so many images one may be suspect: also ImageNet has some with bytes left over.
ONE_IN = 10_000
MAX_NAMES = 100


class SuspectImages:
    """The images of `listing` that had bytes left over when this rank decoded them, here or in its
    loader processes.

    One byte an image, in memory that these processes share: each sets it when it meets the image,
    so that none waits for another. On its way into a worker it may only travel as part of what
    starts the worker.
    """

    def __init__(self, listing: Listing) -> None:
        self.listing, self.allowed = listing, len(listing) // ONE_IN
        self._is_suspect = RawArray("B", len(listing))

    def add(self, index: int, left_over: int) -> None:
        """Note image `index`, with a warning if it is new; UserError if there are too many."""
        if self._is_suspect[index]:
            return
        self._is_suspect[index] = 1
        name = self.listing.name(index)
        if self.count > self.allowed:
            note = f" ({self.allowed:,} such files in {len(self.listing):,} are let pass)"
            raise suspect(name, left_over, note if self.allowed else "")
        print(
            f"warning: {name}: {left_over:,} bytes more than its pixels need; it may be damaged",
            file=sys.stderr,
            flush=True,
        )

    @property
    def count(self) -> int:
        """How many there are so far."""
        return bytes(self._is_suspect).count(1)

    @property
    def names(self) -> list[str]:
        """The first MAX_NAMES of them."""
        indices = np.flatnonzero(np.frombuffer(self._is_suspect, dtype=np.uint8))[:MAX_NAMES]
        return [self.listing.name(index) for index in indices.tolist()]
