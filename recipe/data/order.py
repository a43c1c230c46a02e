"""The order of the training images: one endless stream, the same for any number of ranks."""

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

# (which pass, index of the image in the listing): the augmentation is drawn from both. An epoch is
# one pass, or with repeats several, one for each time that its images come.
Sample = tuple[int, int]


@functools.lru_cache(maxsize=2)  # a batch begins in the epoch in which the last one ended
def permutation(num_images: int, seed: int, epoch: int) -> np.ndarray:
    """The images of one epoch in their order: int64 [num_images]."""
    return np.random.default_rng([seed, epoch]).permutation(num_images)


@dataclass(frozen=True)
class SampleStream:
    """Permutations of `num_images` images, one an epoch, end to end.

    A position is a count of samples since the start of training, over all ranks. A global batch is
    simply the next samples of the stream, across the end of an epoch if need be, so each image is
    seen exactly once an epoch at any world size, no batch is short, none is padded, and a run
    resumes at another world size where it stopped.

    With `repeats` each image comes so many times, one after the other, so that ranks that take
    turns share it. An epoch is as long as without, and holds the first images of its permutation
    (Hoffer et al. 2020, arXiv 1901.09335; the order is that of torchvision's RASampler).
    """

    num_images: int
    seed: int
    num_files: int | None = None  # if fewer, they come again in each epoch
    repeats: int = 1

    def samples(self, positions: np.ndarray) -> list[Sample]:
        """(pass, index) at each of `positions` (int64, ascending)."""
        epochs, offsets = np.divmod(positions, self.num_images)
        places, copies = np.divmod(offsets, self.repeats)
        passes = epochs * self.repeats + copies
        indices = np.concatenate(
            [
                permutation(self.num_images, self.seed, int(epoch))[places[epochs == epoch]]
                for epoch in np.unique(epochs)
            ]
        ) % (self.num_files or self.num_images)
        return list(zip(passes.tolist(), indices.tolist(), strict=True))

    def batches(
        self, places: Iterable[tuple[int, int]], rank: int, size: int
    ) -> Iterator[list[Sample]]:
        """This rank's batches: one for each position in `places`, of so many samples.

        Of each `batch_size * size` samples rank r takes every `size`-th, beginning with the r-th.
        """
        for position, batch_size in places:
            yield self.samples(position + rank + size * np.arange(batch_size))
