"""Compare two runs, or the ranks of one: where they differ first, how far, and where to look.

Distances are in ulps and relative: see compare/parity.py.
"""

import math
import zipfile
import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from compare.evidence.reading import metrics_of, read_metrics, read_object, read_record
from compare.evidence.words import shortest_unique_names
from recipe.errors import UserError
from recipe.record.schema import StepLine, Summary

# The kinds of arrays in a trace, in the order in which a step computes them, and what to look at if
# the first difference is in one of them.
HINTS = {
    "loss": "look at the data (order, augmentation) and the forward pass; in a first step also at "
    "the initial weights",
    "gradient": "look at the backward pass and the exchange of gradients",
    "weight": "look at the optimizer: its settings, its state, and the weights that it began with",
    "buffer": "look at the BatchNorm policy",
}
KINDS = tuple(HINTS)
READ_ERRORS = (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile, zlib.error)

# What a run computed, by step and rank (-1: mean over all ranks): arrays by name, or their file.
Arrays = dict[str, np.ndarray]
Steps = dict[tuple[int, int], Path | Arrays]


@dataclass(frozen=True)
class TensorPair:
    """One tensor in both runs, and how far apart its values are."""

    step: int
    ranks: list[int]
    kind: str
    layer: str
    position: int  # in the file, whose order is that of the forward pass
    ulps: float  # largest; infinite with, for example, NaN on one side only
    relative: float
    values: str  # the two values that are farthest apart; empty: bit-equal


@dataclass
class Kind:
    """The result of comparing all tensors of one kind."""

    tensors: int
    bit_equal: int
    beyond: int  # beyond the tolerance
    first_step: int | None  # first step with a difference other than the sign of zeros
    ulps: float  # largest
    relative: float  # largest


@dataclass
class Parity:
    """Two runs, or two ranks, compared."""

    a: str
    b: str
    compared: str
    max_ulps: int
    relative: float
    kinds: dict[str, Kind] = field(default_factory=dict)
    first_divergence: TensorPair | None = None  # first pair beyond the tolerance
    final_weights: str | None = None  # "bit-equal", "different"; None: not known
    notes: list[str] = field(default_factory=list)  # what was not compared; settings that differ

    @property
    def verdict(self) -> str:
        """The result in a few words."""
        # A digest has no distance: with a tolerance it is shown, but does not affect the verdict.
        is_exact = self.max_ulps == 0 and self.relative == 0
        if self.first_divergence or (is_exact and self.final_weights == "different"):
            return "diverged"
        is_equal = all(kind.bit_equal == kind.tensors for kind in self.kinds.values())
        return "bit-equal" if is_equal else "within the tolerance"

    @property
    def hint(self) -> str:
        """What to look at; empty without traces, or without a difference.

        The first difference of any size counts: a rounding difference in one step's gradients
        reaches the next step's loss. Buffers come last, because they never feed back into training.
        """
        steps = {name: kind.first_step for name, kind in self.kinds.items() if kind.first_step}
        if not steps or self.kinds.keys() == {"loss"}:
            return ""
        first = min(steps, key=lambda name: (name == "buffer", steps[name], KINDS.index(name)))
        return f"{first} differs first, in step {steps[first]}: {HINTS[first]}"


# -- Distances -------------------------------------------------------------------------------------


def ulp_distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return, for each element, how many representable numbers apart two arrays are, as uint64.

    The bits of a float, read as a signed integer, have the order of the numbers once those of
    negative numbers are mirrored; neighbours differ by 1 (B. Dawson, "Comparing Floating Point
    Numbers, 2012 Edition"). For integers from 0 on it is the plain difference.
    """

    def ordered(values: np.ndarray) -> np.ndarray:
        integers = values.view(f"i{values.dtype.itemsize}")
        bits = integers.astype(np.int64)
        return np.where(bits < 0, np.iinfo(integers.dtype).min - bits, bits)

    x, y = ordered(a), ordered(b)
    # As uint64, the difference is right even if the signed one of two float64 would overflow.
    return np.maximum(x, y).view(np.uint64) - np.minimum(x, y).view(np.uint64)


def distance_of(a: np.ndarray, b: np.ndarray) -> tuple[float, float, str]:
    """Return how far apart two tensors of the same shape and type are: in ulps, relative, and the
    values that are farthest apart. The distances are infinite if a value is not finite and the
    other tensor has a different value there.

    The relative distance is that of the tensors in the maximum norm (N. Higham, "Accuracy and
    Stability of Numerical Algorithms", section 6).
    """
    a, b = a.ravel(), b.ravel()
    if a.tobytes() == b.tobytes():
        return 0, 0.0, ""
    x, y = a.astype(np.float64), b.astype(np.float64)
    finite = np.isfinite(x) & np.isfinite(y)
    alike = finite | (x == y) | (np.isnan(x) & np.isnan(y))
    ulps = np.where(finite, ulp_distances(a, b), 0)
    worst = ulps.argmax() if alike.all() else alike.argmin()
    values = f"{x[worst]:.9g} against {y[worst]:.9g}"
    if not alike.all():
        return math.inf, math.inf, values
    x, y = x[finite], y[finite]
    largest = np.abs([x, y]).max(initial=0.0) or 1.0
    return int(ulps[worst]), float(np.abs(x - y).max(initial=0.0) / largest), values


# -- Reading ---------------------------------------------------------------------------------------


def read_trace(run: Path) -> Steps:
    """Return the files of a run's trace (recipe/record/probes.py), by step and rank."""
    return {
        (int(path.stem.removeprefix("step-")), int(path.parent.name.removeprefix("rank-"))): path
        for path in run.glob("trace/rank-[0-9]*/step-[0-9]*.npz")
    }


def read_losses(run: Path) -> Steps:
    """Return each step's loss, the mean over all ranks, from a run's metrics.jsonl."""
    return {
        (line.step, -1): {"loss": np.asarray(line.loss)}
        for line in metrics_of(read_metrics(run / "metrics.jsonl"), StepLine, run / "metrics.jsonl")
    }


def load(source: Path | Arrays) -> Arrays:
    """Return the arrays of one step of one rank."""
    if isinstance(source, dict):
        return source
    try:
        with np.load(source) as arrays:
            return dict(arrays)
    except READ_ERRORS as error:
        raise UserError(
            f"{source} cannot be read ({error}): it is damaged, or not a trace; train again with "
            "--tensor-steps"
        ) from None


# -- Comparing -------------------------------------------------------------------------------------


def compare_steps(
    names: Sequence[str],
    sides: Sequence[Steps],
    tolerance: tuple[int, float],
    kinds: Collection[str] = KINDS,
) -> Parity:
    """Compare the steps and ranks that two sides share; UserError if there are none."""
    a, b = sides
    shared = a.keys() & b.keys()
    both, ranges = " and ".join(names), f"{described(a.keys())} against {described(b.keys())}"
    if not shared:
        raise UserError(f"{both} have no step of a rank in common: {ranges}")
    max_ulps, relative = tolerance
    parity = Parity(names[0], names[1], described(shared), max_ulps, relative)
    parity.notes = [
        f"not compared: {described(alone)}: only {name} has them"
        for name, steps in zip(names, sides, strict=True)
        if (alone := steps.keys() - shared)
    ]
    pairs = [
        pair
        for place in sorted(shared)
        for pair in compare_step(*place, load(a[place]), load(b[place]), kinds)
    ]
    beyond = [pair for pair in pairs if pair.ulps > max_ulps and pair.relative > relative]
    for kind in KINDS:
        if of_kind := [pair for pair in pairs if pair.kind == kind]:
            parity.kinds[kind] = Kind(
                tensors=len(of_kind),
                bit_equal=sum(not pair.values for pair in of_kind),
                beyond=sum(pair.kind == kind for pair in beyond),
                first_step=min((pair.step for pair in of_kind if pair.ulps > 0), default=None),
                ulps=max(pair.ulps for pair in of_kind),
                relative=max(pair.relative for pair in of_kind),
            )
    if beyond:
        first = min(beyond, key=lambda pair: (pair.step, KINDS.index(pair.kind), pair.position))
        same = [
            p for p in beyond if (p.step, p.kind, p.layer) == (first.step, first.kind, first.layer)
        ]
        parity.first_divergence = replace(first, ranks=[r for pair in same for r in pair.ranks])
    return parity


def compare_step(
    step: int, rank: int, x: Arrays, y: Arrays, kinds: Collection[str]
) -> Iterator[TensorPair]:
    """Yield the pairs of tensors of one step and rank; UserError if a tensor has another shape or
    type in the second run, or is missing there."""
    for position, name in enumerate(x | y):
        kind, _, layer = name.partition("/")
        if kind not in kinds:
            continue
        types = [f"{s[name].dtype}{[*s[name].shape]}" if name in s else "none" for s in (x, y)]
        if types[0] != types[1]:
            raise UserError(
                f"step {step}, rank {rank}: tensor {name} is {types[0]} in one run and {types[1]} "
                "in the other: the model, the precision or the frozen layers differ"
            )
        yield TensorPair(step, [rank], kind, layer, position, *distance_of(x[name], y[name]))


def compare_runs(runs: Sequence[Path], max_ulps: int = 0, relative: float = 0.0) -> Parity:
    """Compare two recorded runs: their traces, or else the losses, which every run folder has."""
    names = shortest_unique_names(runs)
    sides = [read_trace(run) for run in runs]
    lacking = [name for name, steps in zip(names, sides, strict=True) if not steps]
    if lacking:
        sides = [read_losses(run) for run in runs]
    parity = compare_steps(names, sides, (max_ulps, relative))
    if lacking:
        parity.notes.append(
            "not compared: gradients, weights and buffers of each step: no trace in "
            f"{' and '.join(lacking)} (train with --tensor-steps N)"
        )
    a, b = (
        read_record(path, Summary) if path.exists() else None  # the run has not ended
        for path in (run / "summary.json" for run in runs)
    )
    if a and b and a.steps == b.steps:
        is_equal = a.weights_sha256 == b.weights_sha256
        parity.final_weights = "bit-equal" if is_equal else "different"
    else:
        ends = [f"{end.steps} steps" if end else "no summary.json yet" for end in (a, b)]
        parity.notes.append(f"not compared: final weights: {ends[0]} against {ends[1]}")
    x, y = (summary.fingerprint if summary else {} for summary in (a, b))
    parity.notes += [
        f"the settings differ: {name}: {x.get(name)!r} against {y.get(name)!r}"
        for name in sorted(x.keys() | y.keys())
        if x and y and x.get(name) != y.get(name)
    ]
    return parity


def compare_ranks(run: Path, max_ulps: int = 0, relative: float = 0.0) -> Parity:
    """Compare all ranks of a run with its first one: all must have the same gradients and
    weights."""
    files = read_trace(run)
    first, *others = sorted({rank for _, rank in files}) or [0]
    lacking = "it has no traces of two ranks or more; train on several with --tensor-steps N"
    if not others:
        raise UserError(f"{run}: {lacking}")
    path = run / "config.json"
    config = read_object(path) if path.exists() else {}
    differs = {  # by kind: whether each rank has its own values
        "loss": True,
        "buffer": config.get("batch_norm") != "sync",
        "gradient": config.get("use_adasum", False),  # it combines the updates, not the gradients
    }
    kinds = [kind for kind in KINDS if not differs.get(kind)]
    a = {(step, rank): files[step, first] for step, r in files if r == first for rank in others}
    b = {place: file for place, file in files.items() if place[1] != first}
    parity = compare_steps(
        (f"{run.name}, rank {first}", "its other ranks"), (a, b), (max_ulps, relative), kinds
    )
    left_out = ", ".join(kind for kind in KINDS if kind not in kinds)
    parity.notes.append(f"not compared: {left_out}: each rank has its own")
    return parity


def described(places: Collection[tuple[int, int]]) -> str:
    """Return a text that names steps and ranks."""
    steps, ranks = {step for step, _ in places}, {rank for _, rank in places}
    who = "all ranks" if -1 in ranks else f"rank {', '.join(map(str, sorted(ranks)))}"
    return f"{len(steps)} steps ({min(steps)} to {max(steps)}) of {who}" if steps else "no step"
