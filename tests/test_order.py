"""Which images each step reads, how many, and at which learning rate."""

import math
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from making import a_config, a_world

from recipe.data.batches import (
    Data,
    Sample,
    SampleStream,
    batch_places,
    permutation,
    samples_per_step,
    training_end,
)
from recipe.settings.config import Config
from recipe.training.optimizers import learning_rate

counts = st.integers(1, 200)
small = st.integers(1, 8)
quick = settings(max_examples=60, deadline=None)


def read(stream: SampleStream, start: int, stop: int, batch: int, size: int) -> list[Sample]:
    """The samples that all ranks together read, step by step."""
    places = [(position, batch) for position in range(start, stop, batch * size)]
    ranks = [list(stream.batches(places, rank, size)) for rank in range(size)]
    assert all(len(one) == batch for batches in ranks for one in batches)
    return [sample for step in zip(*ranks, strict=True) for one in step for sample in one]


@quick
@given(counts, st.integers(0, 500), st.sampled_from([6, 12, 24]), st.data())
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
@given(counts, small, small, st.integers(1, 5), small, small, st.integers(0, 20))
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


# ---- batches that grow from epoch to epoch ----


def images(count: int) -> Data:
    return Data(None, None, num_train=count, num_val=1, num_classes=2)


def sizes(config: Config) -> list[int]:
    return [samples_per_step(config, a_world(), epoch) for epoch in range(5)]


def test_batches_grow_by_equal_steps_and_are_rounded_up() -> None:
    assert sizes(a_config(batch_size=12, batch_size_warmup_epochs=2)) == [4, 8, 12, 12, 12]
    assert sizes(a_config(batch_size=10, batch_size_warmup_epochs=2)) == [4, 7, 10, 10, 10]
    assert sizes(a_config(batch_size=49, batch_size_warmup_epochs=47))[:3] == [2, 3, 4]
    assert sizes(a_config(batch_size=10)) == [10] * 5
    several = a_config(batch_size=4, batches_per_allreduce=3, batch_size_warmup_epochs=1)
    assert [samples_per_step(several, a_world(0, 5), epoch) for epoch in (0, 1)] == [30, 60]
    assert samples_per_step(several, a_world(0, 5)) == 60


def places_of(config: Config, size: int, count: int, start: int, stop: int) -> list:
    return list(batch_places(config, a_world(0, size), count, start, stop))


def test_steps_that_are_left_out_are_not_made() -> None:
    config = a_config(batch_size=2, batches_per_allreduce=2)
    places = [*batch_places(config, a_world(0, 3), 100, 0, 60, left_out=[12, 48])]
    assert places == [(start, 2) for start in (0, 6, 24, 30, 36, 42)]


@quick
@given(st.integers(1, 150), st.integers(3, 9), small, small, st.integers(0, 3), st.data())
def test_a_resumed_run_goes_on_exactly(
    count: int, batch: int, size: int, passes: int, warmup: int, drawn: st.DataObject
) -> None:
    """Where each step begins, how many images it has, and where training ends; at another number
    of workers each image still comes once an epoch."""
    config = a_config(
        batch_size=batch, batches_per_allreduce=passes, batch_size_warmup_epochs=warmup, epochs=5
    )
    world = a_world(0, size)
    last_step, stop = training_end(config, world, images(count), 0, 0)
    whole = places_of(config, size, count, 0, stop)
    starts = [position for position, _ in whole[::passes]]
    assert len(starts) == last_step and starts[-1] < 5 * count <= stop
    for start, end in pairwise([*starts, stop]):
        assert end - start == samples_per_step(config, world, start // count)
    step = drawn.draw(st.integers(0, last_step - 1))
    assert training_end(config, world, images(count), step, starts[step]) == (last_step, stop)
    assert places_of(config, size, count, starts[step], stop) == whole[step * passes :]

    other = drawn.draw(small)
    _, end = training_end(config, a_world(0, other), images(count), step, starts[step])
    stream, seen = SampleStream(count, 7), list[Sample]()
    for places, ranks in (
        (whole[: step * passes], size),
        (places_of(config, other, count, starts[step], end), other),
    ):
        for rank in range(ranks):
            seen += [sample for one in stream.batches(places, rank, ranks) for sample in one]
    assert len(set(seen)) == len(seen)
    assert {(epoch, index) for epoch in range(5) for index in range(count)} <= set(seen)


@pytest.mark.parametrize(
    ("max_steps", "step", "seen", "end"),
    [
        (None, 0, 0, (5 + 5, 5 * 4 + 5 * 8)),  # of 20 images an epoch
        (None, 5, 20, (10, 60)),
        (7, 0, 0, (7, 20 + 16)),
        (7, 7, 36, (7, 36)),
        (7, 9, 52, (9, 52)),  # a run that went on with fewer steps has had them
        (None, 10, 60, (10, 60)),
    ],
)
def test_training_ends(max_steps: int | None, step: int, seen: int, end: tuple[int, int]) -> None:
    config = a_config(batch_size=8, batch_size_warmup_epochs=1, epochs=3, max_steps=max_steps)
    assert training_end(config, a_world(), images(20), step, seen) == end


def test_what_is_only_evaluated_has_ended() -> None:
    assert training_end(a_config(evaluate=True), a_world(), images(20), 3, 12) == (3, 12)


def test_the_rate_grows_with_the_batch() -> None:
    """Also where the batch is rounded: the schedule knows epochs alone."""
    base = a_config(base_lr=0.1, warmup_epochs=2.0, epochs=5, batch_size=10)
    growing = a_config(**{**vars(base), "batch_size_warmup_epochs": 2})
    for epoch, share in {0: 1 / 3, 0.9: 1 / 3, 1: 2 / 3, 1.9: 2 / 3, 2: 1, 4: 1}.items():
        for scale in (1, 8):
            rate = learning_rate(base, epoch, scale)
            assert learning_rate(growing, epoch, scale) == pytest.approx(share * rate)
    assert learning_rate(growing, 4.5, 8) == learning_rate(base, 4.5, 8)


# ---- the learning rate ----


STEP = a_config(
    lr_scheduler="step",
    base_lr=0.1,
    warmup_epochs=5.0,
    lr_step_epochs=(30, 60, 80),
    lr_gamma=0.1,
    epochs=90,
)
COSINE = a_config(lr_scheduler="cosine", base_lr=0.1, warmup_epochs=5.0, epochs=25, lr_min=0.01)
JUST_BELOW = 1 - 1e-12


QUARTER = 0.5 * (1 + math.cos(math.pi / 4))
# Settings, and the rates of eight workers by epoch.
RATES: dict[str, tuple[Config, dict[str, Any], dict[float, float]]] = {
    **{
        f"gradual warm-up, from one worker's rate, {config.lr_scheduler}": (
            config, {}, {0: 0.1, 2.5: 0.45, 5 * JUST_BELOW: 0.8, 5: 0.8}
        )
        for config in (STEP, COSINE)
    },
    "linear warm-up, from near zero": (
        STEP, {"warmup_method": "linear"}, {0: 0.008, 2.5: 0.404, 5: 0.8}
    ),
    "none": (STEP, {"warmup_epochs": 0.0}, {0: 0.8}),
    "steps": (
        STEP, {},
        {
            30 * JUST_BELOW: 0.8, 30: 0.08, 60 * JUST_BELOW: 0.08, 60: 0.008,
            80 * JUST_BELOW: 0.008, 80: 0.0008, 90: 0.0008,
        },
    ),
    # The last batch may pass the end.
    "cosine": (
        COSINE, {}, {5: 0.8, 10: 0.01 + 0.79 * QUARTER, 15: 0.405, 25: 0.01, 26: 0.01}
    ),
    "linear": (
        COSINE, {"lr_scheduler": "linear"}, {5: 0.8, 10: 0.6025, 15: 0.405, 25: 0.01, 26: 0.01}
    ),
    "a cosine with restarts is several: of the lengths 5, 10 and 5": (
        COSINE, {"lr_restart_epochs": (10, 20)},
        {
            5: 0.8, 7.5: 0.405, 10 * JUST_BELOW: 0.01, 10: 0.8, 15: 0.405, 20 * JUST_BELOW: 0.01,
            20: 0.8, 22.5: 0.405, 25: 0.01, 26: 0.01,
        },
    ),
    "warm-up to the end": (
        COSINE, {"warmup_epochs": 25.0}, {25 * JUST_BELOW: 0.8, 25: 0.8}  # no time is left
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", RATES)
def test_rates(case: str) -> None:
    base, settings, rates = RATES[case]
    config = a_config(**{**vars(base), **settings})
    assert {at: learning_rate(config, at, 8) for at in rates} == pytest.approx(rates)


def test_one_worker_needs_no_gradual_warm_up() -> None:
    assert {learning_rate(STEP, epoch / 10, 1) for epoch in range(50)} == {0.1}


@given(st.floats(0, 90), st.integers(1, 1024))
def test_scaled_by_the_world_after_warm_up(epoch: float, size: int) -> None:
    one, all_of_them = learning_rate(STEP, epoch, 1), learning_rate(STEP, epoch, size)
    if epoch >= 5:
        assert all_of_them == pytest.approx(size * one)
    else:
        assert one <= all_of_them * (1 + 1e-12)
        assert all_of_them <= size * one * (1 + 1e-12)


@given(st.floats(0, 24), st.integers(1, 64))
def test_no_jump_but_at_steps(epoch: float, size: int) -> None:
    now, soon = (learning_rate(COSINE, at, size) for at in (epoch, epoch + 1e-6))
    assert abs(now - soon) < 1e-6 * size
