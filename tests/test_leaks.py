"""Which growth of a side's memory is told as a leak, and when new memory in each step is told."""

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from records import a_block

from compare.evidence.memory import leaks, most_of, new_pages
from compare.evidence.turns import Block

MB, STEPS, TURNS = 10**6, 19, 30  # a turn has 20 steps with its lead-in


def block(memory: Callable[[int], float]) -> Block:
    """A block of a side with this memory, in MB, after so many steps."""
    made = a_block({"mine": [1.0] * TURNS})
    turns = [
        replace(turn, memory_bytes=round(MB * memory(20 * (at + 1))))
        for at, turn in enumerate(made.turns)
    ]
    return replace(made, turns=tuple(turns), steps={"mine": STEPS})


def found(*blocks: Block) -> list[tuple[str, float]]:
    """The leaks of these blocks: what grows, and by how many MB in 100 steps."""
    return [(one.kind, round(one.bytes_per_100_steps / MB, 2)) for one in leaks(blocks, ["mine"])]


@pytest.mark.parametrize("per_step", [0.005, 0.1, 1.0])
def test_memory_that_grows_with_each_step_is_a_leak(per_step: float) -> None:
    noise = random.Random(1)
    leaking = [block(lambda step: 400 + per_step * step + noise.random() / 10) for _ in range(3)]
    [(kind, grown)] = found(*leaking)
    assert kind == "memory_bytes" and grown == pytest.approx(100 * per_step, rel=0.1)
    assert most_of(leaking, "mine", kind) == pytest.approx(MB * (400 + 600 * per_step), rel=0.01)


@pytest.mark.parametrize(
    "memory",
    [
        lambda step: 400,
        lambda step: 400 + 0.0005 * step,  # little
        lambda step: 500 - 0.1 * step,
        lambda step: 600 - 200 * math.exp(-step / 150),  # caches fill up
        lambda step: 400 + 50 * math.log(step),
        lambda step: 400 + 50 * math.log(step + 100),
        lambda step: 400 + 2 * math.sqrt(step),
        lambda step: 400 if step < 350 else 450,  # something is loaded once
        lambda step: 400 + (step % 130) / 2,  # freed again
    ],
)
def test_memory_that_fills_up_or_is_freed_again_is_none(memory: Callable[[int], float]) -> None:
    assert found(*(block(memory) for _ in range(3))) == []


def test_what_the_first_turn_without_exchange_takes_is_none() -> None:
    """DDP took 60 MB in its turn before the last of six, and caches a little before that."""

    def with_ablation(leak: float, turns: int) -> Block:
        made = block(lambda step: 1300 + step / 20 + leak * step + 60 * (step > 80))
        purposes = ["trial", "speed", "speed", "speed", "ablation", *["speed"] * (turns - 5)]
        changed = [replace(t, purpose=p) for t, p in zip(made.turns, purposes, strict=False)]
        return replace(made, turns=tuple(changed))

    assert found(*[with_ablation(leak=0.0, turns=6)] * 3) == []
    [(_, grown)] = found(*[with_ablation(leak=0.5, turns=20)] * 3)
    assert grown == pytest.approx(55)


def test_one_block_without_growth_says_that_it_is_none() -> None:
    grows, rests = block(lambda step: 400 + step), block(lambda step: 400)
    assert found(grows, grows, grows) and not found(grows, grows, rests)
    assert not found(grows, grows)  # two blocks are few


def test_memory_at_random_is_seldom_called_a_leak() -> None:
    """A random walk of all blocks, which is the worst case: it has no place to return to."""
    chance, wrong = random.Random(1), 0

    def walk() -> Callable[[int], float]:
        at = [400.0]
        for _ in range(TURNS):
            at.append(at[-1] + chance.gauss(0, 2))
        return lambda step: at[step // 20]

    for _ in range(500):
        wrong += bool(found(*(block(walk()) for _ in range(3))))
        assert not found(*(block(lambda _: 400 + chance.gauss(0, 5)) for _ in range(4)))
    assert wrong <= 8


def test_a_record_without_memory_shows_none() -> None:
    old = a_block({"mine": [1.0] * TURNS})
    assert found(old, old, old) == []
    assert most_of([old], "mine", "memory_bytes") is None


def test_new_memory_in_each_step_is_told_if_it_takes_a_hundredth_of_the_time() -> None:
    made = a_block({"mine": [1.0] * TURNS})

    def with_faults(of_turn: float | None) -> Block:
        turns = [replace(turn, page_faults=of_turn) for turn in made.turns]
        return replace(made, turns=tuple(turns), steps={"mine": STEPS})

    step = made.turns[0].seconds / STEPS
    many, few = 20 * 0.02 * step / 1e-6, 20 * 0.009 * step / 1e-6
    [told] = new_pages([with_faults(many), with_faults(1.5 * many)], ["mine"])
    assert told.share == pytest.approx(0.025) and told.per_step == pytest.approx(1.25 * many / 20)
    assert not [*new_pages([with_faults(few)], ["mine"])]
    assert not [*new_pages([with_faults(many), with_faults(None)], ["mine"])]
