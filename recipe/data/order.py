"""The order in which images are trained on: one endless stream of samples, the same for any number
of ranks; and the position in it at which each step begins."""

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from recipe.settings.config import Config
from recipe.world import World

# (number of the pass, index of the image in the listing): both seed the augmentation. An epoch is
# one pass; with repeats it is several, one for each repeat of its images.
Sample = tuple[int, int]
# Spans of the stream whose images are not trained on (--rollback): position and number of samples.
Spans = Sequence[tuple[int, int]]


class Place(NamedTuple):
    """Where a batch comes from: its position in the stream, its images on each rank, and the epoch
    in which its step begins."""

    position: int
    batch_size: int
    epoch: int


@functools.lru_cache(maxsize=2)  # a batch may span two epochs
def permutation(num_images: int, seed: int, epoch: int) -> np.ndarray:
    """Return the order of the images in one epoch: int64 [num_images]."""
    return np.random.default_rng([seed, epoch]).permutation(num_images)


@dataclass(frozen=True)
class SampleStream:
    """Permutations of `num_images` images, one per epoch, one after the other.

    A position is a count of samples since the start of training, over all ranks. A global batch is
    the next samples of the stream, across the end of an epoch if necessary. So each image is seen
    exactly once per epoch at any world size, no batch is short or padded, and a run resumes where
    it stopped, even at another world size.

    With `repeats` each image comes that many times in a row, so the copies go to different ranks.
    An epoch has the same length as without, and uses only the first images of its permutation
    (Hoffer et al. 2020, arXiv 1901.09335; the order is that of torchvision's RASampler).
    """

    num_images: int
    seed: int
    num_files: int | None = None  # if there are fewer files, they are used several times per epoch
    repeats: int = 1

    def samples(self, positions: np.ndarray) -> list[Sample]:
        """Return the sample at each of `positions` (int64, ascending)."""
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

    def batches(self, places: Iterable[Place], rank: int, size: int) -> Iterator[list[Sample]]:
        """Yield this rank's batches: one for each of `places`.

        Of the `batch_size * size` samples from a position on, rank r takes every `size`-th,
        starting with number r.
        """
        for position, batch_size, _ in places:
            yield self.samples(position + rank + size * np.arange(batch_size))


def samples_per_step(config: Config, world: World, epoch: float = math.inf) -> int:
    """Return the global batch: the images over all ranks of an optimizer step that begins in
    `epoch`; by default the final one, after any batch-size warm-up."""
    share = config.batch_share(epoch)
    return math.ceil(config.batch_size * share) * config.batches_per_allreduce * world.size


def next_step(config: Config, world: World, num_train: int, position: int, left_out: Spans) -> int:
    """Return where the next step begins, from `position` on. Steps that would have any of the
    `left_out` samples are not made; their other samples count as seen, too."""
    while True:
        end = position + samples_per_step(config, world, position // num_train)
        if not any(begin < end and position < begin + count for begin, count in left_out):
            return position
        position = end


def training_end(
    config: Config, world: World, num_train: int, step: int, samples_seen: int, left_out: Spans = ()
) -> tuple[int, int]:
    """Return the step and stream position at which training ends, from its current `step` and
    position `samples_seen`: when all epochs are complete, or --max-steps is reached. Each of the
    spans `left_out` that training has passed counts as a step towards --max-steps."""
    last = math.inf if config.max_steps is None else config.max_steps
    end = 0 if config.evaluate else config.epochs * num_train
    begins = [begin for begin, _ in left_out]
    while samples_seen < end:
        left = last - step - sum(begin < samples_seen for begin in begins)
        if left <= 0:
            break
        epoch = samples_seen // num_train
        step_samples = samples_per_step(config, world, epoch)
        until_epoch_ends = math.ceil(((epoch + 1) * num_train - samples_seen) / step_samples)
        until_left_out = [(b - samples_seen) // step_samples for b in begins if b >= samples_seen]
        steps = int(min(left, until_epoch_ends, *until_left_out))
        position = samples_seen + steps * step_samples
        samples_seen = next_step(config, world, num_train, position, left_out)
        step += steps
    return step, samples_seen


def batch_places(
    config: Config,
    world: World,
    num_train: int,
    start: int,
    stop: int,
    left_out: Spans = (),
) -> Iterator[Place]:
    """Yield the place of each batch from `start` until `stop` is reached or passed, both where a
    step begins. All batches of a step have the same size."""
    while start < stop:
        epoch = start // num_train
        step_samples = samples_per_step(config, world, epoch)
        batch_samples = step_samples // config.batches_per_allreduce
        end = start + step_samples
        for position in range(start, end, batch_samples):
            yield Place(position, batch_samples // world.size, epoch)
        start = next_step(config, world, num_train, end, left_out)
