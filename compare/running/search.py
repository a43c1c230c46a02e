"""The search of --tune: knob by knob, each value beside the best that is known so far.

Knows nothing of runs: whoever searches brings a function that measures.
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
    estimate: Estimate | None  # None: its first run failed
    failed: bool
    kept: bool = False


# Images a second of one fresh run with these knobs; None if it failed. The text names the run, and
# is another one for each: knob, round, value.
Measure = Callable[[str, Knobs], float | None]


def is_gain(estimate: Estimate) -> bool:
    """Tell whether a value is to be kept, by the speed ratio of value and best so far."""
    if estimate.ratio < LEAST_GAIN or estimate.low is None:
        return False
    agree = estimate.blocks >= AGREEING_PAIRS and min(estimate.ratios) > 1
    return estimate.low > 1 or agree


def try_knob(knob: Knob, best: Knobs, measure: Measure, rounds: int, seed: int) -> list[Trial]:
    """Measure a knob's values in interleaved rounds; mark the one to be kept, if there is one.

    A round runs the best knobs so far and each value once, in random order. A value is given up
    when, after TELLING_ROUNDS, it is not the faster one in the median, or when a run fails.

    Raises SearchError if the best knobs so far fail.
    """
    pairs: dict[str, list[tuple[float, float]]] = {value.shown: [] for value in knob.values}
    alive, failed = list(knob.values), set[str]()
    for number in range(1, rounds + 1):
        speeds = dict[str, float]()
        base = None
        for value in drawn([None, *alive], seed, knob.name, number):
            shown = "as before" if value is None else value.shown
            knobs = best if value is None else value.on(best)
            speed = measure(f"{knob.name}/round-{number}/{shown}", knobs)
            if value is None:
                if speed is None:
                    raise SearchError(f"{knob.name}: a run with the best knobs so far failed")
                base = speed
            elif speed is None:
                failed.add(value.shown)
            else:
                speeds[value.shown] = speed
        assert base is not None
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


def most_runs(knobs: Sequence[Knob], rounds: int) -> int:
    """Return how many runs a search may take, if no value is given up."""
    return sum(rounds * (1 + len(knob.values)) for knob in knobs)
