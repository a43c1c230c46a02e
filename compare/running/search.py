"""The search of --tune: knob by knob, each value beside the best that is known so far.

Knows nothing of starts: whoever searches brings a function that measures.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from compare.evidence.paired import Estimate, estimate_ratio
from compare.plan.blocks import drawn
from recipe.knobs import Knobs

# What a value must gain to be kept. Less is not worth a line in the file.
LEAST_GAIN = 1.01
# So many pairs that all agree are taken for a gain, too: chance alone brings that about in one of
# 32 cases, as it does (one of 40) that a value that gains nothing has its interval above 1. With
# few rounds the interval alone would be too strict, since one disturbed run makes it wide.
AGREEING_PAIRS = 5
LEAST_ROUNDS = 3
TELLING_ROUNDS = 2  # before a value that does not look faster is given up


@dataclass(frozen=True)
class Value:
    """One position of a knob: what it is called, and what it sets."""

    shown: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)

    def on(self, knobs: Knobs) -> Knobs:
        """Return `knobs` with this value on top."""
        return Knobs({**knobs.settings, **self.settings}, {**knobs.variables, **self.variables})


@dataclass(frozen=True)
class Knob:
    """A knob and the values to try; the engine's own default is not among them."""

    name: str
    values: tuple[Value, ...]


@dataclass(frozen=True)
class Trial:
    """What became of one value: `estimate` is its speed over that of the best before it."""

    knob: str
    value: Value
    estimate: Estimate | None  # None: it failed at once
    failed: bool
    kept: bool = False


AS_BEFORE = "as before"
# Images a second with each of these knobs, all in one block of fresh starts; those that fail are
# left out. The text names the block, and is another one for each: knob, round.
Measure = Callable[[str, Mapping[str, Knobs]], dict[str, float]]


def is_gain(estimate: Estimate) -> bool:
    """Tell whether a value is to be kept, by the speed ratio of value and best so far."""
    if estimate.ratio < LEAST_GAIN or estimate.low is None:
        return False
    agree = estimate.blocks >= AGREEING_PAIRS and min(estimate.ratios) > 1
    return estimate.low > 1 or agree


def try_knob(knob: Knob, best: Knobs, measure: Measure, rounds: int, seed: int) -> list[Trial]:
    """Measure a knob's values in rounds; mark the one to be kept, if there is one.

    A round is a block of the best knobs so far and each value, started in random order. A value is
    given up when, after TELLING_ROUNDS, it is not the faster one in the median, or when it fails.

    Raises SearchError if the best knobs so far fail.
    """
    pairs: dict[str, list[tuple[float, float]]] = {value.shown: [] for value in knob.values}
    alive, failed = list(knob.values), set[str]()
    for number in range(1, rounds + 1):
        wanted = {AS_BEFORE: best, **{value.shown: value.on(best) for value in alive}}
        order = drawn(wanted, seed, knob.name, number)
        speeds = measure(f"{knob.name}/round-{number}", {name: wanted[name] for name in order})
        if AS_BEFORE not in speeds:
            raise SearchError(f"{knob.name}: the best knobs so far failed")
        base = speeds.pop(AS_BEFORE)
        failed |= {value.shown for value in alive} - speeds.keys()
        for shown, speed in speeds.items():
            pairs[shown].append((speed, base))
        alive = [
            value
            for value in alive
            if value.shown not in failed
            and (number < TELLING_ROUNDS or median(a / b for a, b in pairs[value.shown]) > 1)
        ]
        if not alive:
            break
    trials = [
        Trial(
            knob.name,
            value,
            estimate_ratio(*zip(*pairs[value.shown], strict=True)) if pairs[value.shown] else None,
            value.shown in failed,
        )
        for value in knob.values
    ]
    survivors = [t for t in trials if t.value in alive and t.estimate and is_gain(t.estimate)]
    winner = max(survivors, key=lambda t: t.estimate.ratio if t.estimate else 0.0, default=None)
    return [replace(trial, kept=trial is winner) for trial in trials]


class SearchError(Exception):
    """Something that ends a search."""


def search(
    knobs: Sequence[Knob],
    measure: Measure,
    rounds: int,
    seed: int,
    tell: Callable[[list[Trial]], None] = lambda trials: None,
) -> tuple[Knobs, list[Trial]]:
    """Go through the knobs, each on top of what was kept before; return what was kept, and all that
    was tried. `tell` is told of each knob when it is done."""
    best, tried = Knobs(), list[Trial]()
    for knob in knobs:
        trials = try_knob(knob, best, measure, rounds, seed)
        for trial in trials:
            if trial.kept:
                best = trial.value.on(best)
        tried += trials
        tell(trials)
    return best, tried
