"""Each image exactly once an epoch, whatever the sizes, and also over a resume."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.data.order import Sample, SampleStream, permutation

images = st.integers(1, 200)
small = st.integers(1, 8)
quick = settings(max_examples=60, deadline=None)


def read(stream: SampleStream, start: int, stop: int, batch: int, size: int) -> list[Sample]:
    """The samples that all ranks together read, step by step."""
    places = [(position, batch) for position in range(start, stop, batch * size)]
    ranks = [list(stream.batches(places, rank, size)) for rank in range(size)]
    assert all(len(one) == batch for batches in ranks for one in batches)
    return [sample for step in zip(*ranks, strict=True) for one in step for sample in one]


@quick
@given(images, st.integers(0, 500), st.sampled_from([6, 12, 24]), st.data())
def test_a_step_is_the_same_set_for_any_split(
    num_images: int, start: int, step: int, data: st.DataObject
) -> None:
    """Ranks x accumulated batches x batch size: only their product counts."""
    divisors = [n for n in range(1, step + 1) if step % n == 0]
    size = data.draw(st.sampled_from(divisors))
    accumulated = data.draw(st.sampled_from([n for n in divisors if step // size % n == 0]))
    batch = step // size // accumulated
    stream = SampleStream(num_images, 3)
    split = read(stream, start, start + step, batch, size)
    alone = read(stream, start, start + step, step, 1)
    assert Counter(split) == Counter(alone)
    assert Counter(alone) == Counter(stream.samples(np.arange(start, start + step)))


@quick
@given(images, small, small, st.integers(1, 5), small, small, st.integers(0, 20))
def test_each_image_of_an_epoch_so_many_times(
    num_images: int, batch: int, size: int, repeats: int, new_batch: int, new_size: int, steps: int
) -> None:
    """Once, or as often as it repeats: one after the other, each time in another pass; also over a
    resume at another world size."""
    stream, position = SampleStream(num_images, 7, repeats=repeats), steps * batch * size
    before = read(stream, 0, position, batch, size) if steps else []
    end = (position // num_images + 2) * num_images
    seen = before + read(stream, position, end, new_batch, new_size)
    assert len(set(seen)) == len(seen), "no image twice with the same augmentation"
    for epoch in range(end // num_images):
        passes = range(epoch * repeats, (epoch + 1) * repeats)
        times = Counter(index for number, index in seen if number in passes)
        *whole, rest = divmod(num_images, repeats)
        expected = permutation(num_images, 7, epoch)[: -(-num_images // repeats)].tolist()
        assert set(times) == set(expected)
        assert sum(times.values()) == num_images
        assert Counter(times.values()) == Counter([repeats] * whole[0] + [rest] * (rest > 0))
    ahead = stream.samples(np.arange(num_images))
    assert [index for _, index in ahead] == sorted(
        (index for _, index in ahead), key=permutation(num_images, 7, 0).tolist().index
    )


def test_ranks_take_turns() -> None:
    stream = SampleStream(100, 0)
    ahead = stream.samples(np.arange(12))
    assert list(stream.batches([(0, 3), (6, 3)], 1, 2)) == [ahead[1:6:2], ahead[7:12:2]]


@pytest.mark.parametrize(("batch_size", "size"), [(3, 2), (25, 4), (70, 7)])
def test_each_order_is_made_once(batch_size: int, size: int) -> None:
    """Also where a global batch goes several times through the data set."""
    permutation.cache_clear()
    places = ((position, batch_size) for position in range(0, 2000, batch_size * size))
    *_, last = SampleStream(100, 5).batches(places, 0, size)
    assert permutation.cache_info().misses == last[-1][0] + 1


def test_order_depends_on_seed_and_epoch_alone() -> None:
    """And is fixed: else runs of older versions could not be resumed."""
    others = [permutation(8, 1, 0), permutation(8, 42, 1)]
    np.random.seed(5)
    assert permutation(8, 42, 0).tolist() == [3, 4, 2, 7, 6, 1, 5, 0]
    assert not any(np.array_equal(permutation(8, 42, 0), other) for other in others)
