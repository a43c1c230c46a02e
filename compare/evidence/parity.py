"""Two runs, or the ranks of one, compared: where they differ first, and what that points to.

Distances are in ulps and relative: see compare/parity.py.
"""

import json
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from compare.evidence import packed
from compare.evidence.run_folder import read_object, read_text
from compare.evidence.words import shortest_unique_names
from recipe.errors import UserError

# The arrays of a trace, in the order in which a step computes them; buffers never feed back into
# training, and so cannot be the cause of anything. `top1` is of runs without traces.
KINDS = ("loss", "gradient", "weight", "buffer", "top1")
INTEGERS = {2: np.int16, 4: np.int32, 8: np.int64}  # as wide as a float of so many bytes
READ_ERRORS = (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile, zlib.error)

# What a run computed: by step and rank (-1: means over all ranks) arrays by name, or their file.
Arrays = dict[str, np.ndarray]
Steps = dict[tuple[int, int], Path | Arrays]


@dataclass(frozen=True)
class Distance:
    """How far apart two tensors are."""

    ulps: int | None  # largest; None: no number can say, as with NaN on one side only
    relative: float | None
    what: str = ""  # the values that lie farthest apart; empty: bit-equal
    same_tensor: bool = True  # False: of another shape or type, or missing in one run

    def within(self, max_ulps: int, relative: float) -> bool:
        """Tell whether the distance is within either tolerance."""
        if self.ulps is None or self.relative is None:
            return False
        return self.ulps <= max_ulps or self.relative <= relative


@dataclass(frozen=True)
class Pair:
    """One tensor in both runs."""

    step: int
    ranks: list[int]
    kind: str
    layer: str
    position: int  # in the file, which has the order of the forward pass
    distance: Distance


@dataclass
class Kind:
    """What the comparison of all tensors of one kind has shown."""

    tensors: int
    bit_equal: int
    unequal: int  # more than the sign of zeros
    beyond: int  # beyond the tolerance
    judged: bool
    first: Pair | None  # unequal
    most_ulps: Pair | None
    most_relative: Pair | None


@dataclass
class Parity:
    """Two runs, or two ranks, compared."""

    a: str
    b: str
    compared: str
    not_compared: list[str]
    max_ulps: int
    relative: float
    kinds: dict[str, Kind] = field(default_factory=dict)
    first_divergence: Pair | None = None  # beyond the tolerance
    settings: list[str] = field(default_factory=list)  # of the fingerprints, that differ
    final_weights: str | None = None  # "bit-equal", "different"; None: not known
    why: list[str] = field(default_factory=list)  # sentences

    @property
    def exact(self) -> bool:
        """Tell whether no tolerance was given."""
        return self.max_ulps == 0 and self.relative == 0

    @property
    def diverged(self) -> bool:
        """Tell whether anything is beyond the tolerance. A digest knows no distance, so with a
        tolerance it is shown, but does not judge."""
        return self.first_divergence is not None or (
            self.exact and self.final_weights == "different"
        )

    @property
    def verdict(self) -> str:
        """The result in a few words."""
        judged = [kind for kind in self.kinds.values() if kind.judged]
        if self.diverged:
            return "diverged"
        if any(kind.unequal for kind in judged):
            return "within the tolerance"
        if any(kind.bit_equal < kind.tensors for kind in judged):
            return "equal, but for the sign of zeros"
        return "bit-equal"


# -- Distances -------------------------------------------------------------------------------------


def ulp_distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return element by element how many representable numbers apart two arrays are: uint64.

    The bits of a float, read as an integer with a sign, are in the order of the numbers once the
    negative ones are mirrored, and neighbours differ by 1 (B. Dawson, "Comparing Floating Point
    Numbers, 2012 Edition"). Of integers it is the plain difference.
    """

    def ordered(values: np.ndarray) -> np.ndarray:
        if values.dtype.kind != "f":
            return values.astype(np.int64)
        kind = INTEGERS[values.dtype.itemsize]
        bits = values.view(kind).astype(np.int64)
        return np.where(bits < 0, np.iinfo(kind).min - bits, bits)

    x, y = ordered(a), ordered(b)
    # Two's complement: right even where the signed difference of two float64 would overflow.
    return np.maximum(x, y).view(np.uint64) - np.minimum(x, y).view(np.uint64)


def measure(a: np.ndarray, b: np.ndarray) -> Distance:
    """Return how far apart two tensors of the same step are. The relative distance is normwise, in
    the maximum norm (N. Higham, "Accuracy and Stability of Numerical Algorithms", section 6)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        what = f"{a.dtype}{list(a.shape)} against {b.dtype}{list(b.shape)}"
        return Distance(None, None, what, same_tensor=False)
    shape = a.shape
    a, b = np.ascontiguousarray(a).reshape(-1), np.ascontiguousarray(b).reshape(-1)
    if np.array_equal(a.view(np.uint8), b.view(np.uint8)):
        return Distance(0, 0.0)
    x, y = a.astype(np.float64), b.astype(np.float64)
    finite = np.isfinite(x) & np.isfinite(y)
    odd = ~finite & (x != y) & ~(np.isnan(x) & np.isnan(y))
    ulps = np.where(finite, ulp_distances(a, b), 0)
    worst = int(odd.argmax() if odd.any() else ulps.argmax())
    what = f"{x[worst]:.9g} against {y[worst]:.9g}"
    if odd.any():
        return Distance(None, None, f"{what} in {odd.sum()} of {a.size} elements")
    largest = [float(np.abs(v[np.isfinite(v)]).max(initial=0.0)) for v in (x, y)]
    if shape:
        what += f" at {[int(i) for i in np.unravel_index(worst, shape)]}"
        what += f", largest values {largest[0]:.3g} and {largest[1]:.3g}"
    apart = float(np.abs(np.subtract(x, y, out=np.zeros(a.size), where=finite)).max())
    return Distance(int(ulps[worst]), apart / max(largest) if any(largest) else 0.0, what)


# -- Reading ---------------------------------------------------------------------------------------


def read_trace(run: Path) -> Steps:
    """Return the files of a run's trace (recipe/record/probes.py), by step and rank."""
    return {
        (int(path.stem.removeprefix("step-")), int(path.parent.name.removeprefix("rank-"))): path
        for path in run.glob("trace/rank-*/step-*.npz")
    }


def read_means(run: Path) -> Steps:
    """Return loss and top-1 of the steps in a run's metrics.jsonl, whose last line may be half
    written: means over all ranks."""
    path, steps = run / "metrics.jsonl", Steps()
    texts = read_text(path).splitlines()
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
            if line["kind"] == "step":
                values = {name: np.asarray(float(line[name])) for name in ("loss", "top1")}
                steps[int(line["step"]), -1] = values
        except (ValueError, KeyError, TypeError):
            if number < len(texts):
                raise UserError(
                    f"{path}, line {number} is no record of a step: {text:.80}"
                ) from None
    return steps


def load(source: Path | Arrays) -> Arrays:
    """Return the arrays of one step of one rank."""
    if isinstance(source, dict):
        return source
    try:
        with np.load(source) as arrays:
            return dict(arrays)
    except READ_ERRORS as error:
        raise UserError(
            f"{source} cannot be read ({error}): it is damaged, or no trace; train again with "
            "--tensor-steps"
        ) from None


# -- Comparing -------------------------------------------------------------------------------------


def compare_steps(parity: Parity, a: Steps, b: Steps, unjudged: Iterable[str] = ()) -> None:
    """Fill in what the steps and ranks that two sides share have shown; kinds that are `unjudged`
    are compared, and no divergence."""
    pairs: dict[str, list[Pair]] = {}
    for step, rank in sorted(a.keys() & b.keys()):
        x, y = load(a[step, rank]), load(b[step, rank])
        for position, name in enumerate(dict.fromkeys([*x, *y])):
            kind, _, layer = name.partition("/")
            if name in x and name in y:
                distance = measure(np.asarray(x[name]), np.asarray(y[name]))
            else:
                only = f"in {parity.a if name in x else parity.b} only"
                distance = Distance(None, None, only, same_tensor=False)
            pair = Pair(step, [rank], kind, layer, position, distance)
            pairs.setdefault(kind, []).append(pair)
    beyond = []
    for name in sorted(pairs.keys() & {*KINDS}, key=KINDS.index):
        unequal = [pair for pair in pairs[name] if pair.distance.ulps != 0]
        far = [p for p in unequal if not p.distance.within(parity.max_ulps, parity.relative)]
        parity.kinds[name] = Kind(
            len(pairs[name]),
            sum(not pair.distance.what for pair in pairs[name]),
            len(unequal),
            len(far),
            name not in unjudged,
            first_of(unequal),
            max(unequal, key=lambda pair: size(pair.distance.ulps), default=None),
            max(unequal, key=lambda pair: size(pair.distance.relative), default=None),
        )
        beyond += far if name not in unjudged else []
    parity.first_divergence = first_of(beyond)


def size(distance: float | None) -> float:
    return float("inf") if distance is None else distance


def first_of(pairs: Sequence[Pair]) -> Pair | None:
    """Return the pair of the earliest step, and in a step what is computed first, with all ranks
    that differ there."""

    def place(pair: Pair) -> tuple[int, int, int]:
        return pair.step, KINDS.index(pair.kind), pair.position

    first = min(pairs, key=place, default=None)
    if first is None:
        return None
    ranks = [rank for pair in pairs if place(pair) == place(first) for rank in pair.ranks]
    return replace(first, ranks=ranks)


def compare_runs(run_a: Path, run_b: Path, max_ulps: int = 0, relative: float = 0.0) -> Parity:
    """Compare two recorded runs: their traces, or else what every run folder has."""
    for run in (run_a, run_b):
        if not packed.is_folder(run):
            raise UserError(f"{run}: there is no such run folder")
    names = shortest_unique_names([run_a, run_b])
    if names[0] == names[1]:
        names = [f"{names[0]} (first)", f"{names[1]} (second)"]
    a, b = read_trace(run_a), read_trace(run_b)
    lacking = [name for name, steps in zip(names, (a, b), strict=True) if not steps]
    if lacking:
        a, b = read_means(run_a), read_means(run_b)
    ranks, shared = {rank for _, rank in a} & {rank for _, rank in b}, a.keys() & b.keys()
    if not shared:
        raise UserError(
            f"{names[0]} and {names[1]} have no step of a rank in common: "
            f"{described(a)} against {described(b)}"
        )
    missing = []
    if lacking:
        missing.append(
            f"gradients, weights and buffers of each step: {' and '.join(lacking)} "
            f"{'has' if len(lacking) == 1 else 'have'} no trace (train with --tensor-steps N)"
        )
    for name, own in ((names[0], a), (names[1], b)):
        if alone := {rank for _, rank in own} - ranks:
            missing.append(f"{numbered('rank', alone)}: in {name} only; another number of ranks is "
                           "another global batch, unless --batch-size makes up for it")  # fmt: skip
        if steps := {step for step, rank in own.keys() - shared if rank in ranks}:
            missing.append(f"{numbered('step', steps)}: in {name} only")
    parity = Parity(names[0], names[1], described(shared), missing, max_ulps, relative)
    compare_steps(parity, a, b)
    ends = [read_if_there(run / "summary.json") for run in (run_a, run_b)]
    prints = [end.get("fingerprint") or {} for end in ends]
    if all(prints):
        parity.settings = [
            f"{name}: {prints[0].get(name)!r} against {prints[1].get(name)!r}"
            for name in sorted(prints[0].keys() | prints[1].keys())
            if prints[0].get(name) != prints[1].get(name)
        ]
    compare_ends(parity, ends)
    starts = [fingerprint.get("initial_weights_sha256") for fingerprint in prints]
    parity.why = explain(parity, starts, min(step for step, _ in shared))
    if parity.why and parity.settings:
        parity.why.append("The settings differ, too (above): they may be all of the cause.")
    return parity


def compare_ends(parity: Parity, summaries: list[dict[str, Any]]) -> None:
    """Fill in how the weights at the end of two whole runs compare, or why that is not known."""
    digests = [summary.get("weights_sha256") for summary in summaries]
    steps = [summary.get("steps") for summary in summaries]
    if not all(digests):
        name = parity.a if not digests[0] else parity.b
        open_question = f"{name} has no summary.json, so it has not ended"
        parity.not_compared.append(f"final weights: {open_question}")
    elif steps[0] != steps[1]:
        open_question = f"the runs ended after {steps[0]} and {steps[1]} steps"
        parity.not_compared.append(f"final weights: {open_question}")
    else:
        parity.final_weights = "bit-equal" if digests[0] == digests[1] else "different"


def explain(parity: Parity, starts: list[str | None], first: int) -> list[str]:
    """Return sentences that say what differed first, and what that points to, given the digests of
    both runs' initial weights and the first step.

    The first difference of any size counts, not the first beyond the tolerance: a rounding in one
    step's gradients is in the next step's loss.
    """
    unequal = {name: kind.first for name, kind in parity.kinds.items() if kind.first}
    if not all(pair.distance.same_tensor for pair in unequal.values()):
        return ["The runs do not hold the same tensors: another model, or other layers frozen."]
    since = {name: pair.step for name, pair in unequal.items()}
    start = min((since[name] for name in KINDS[:3] if name in since), default=None)
    cause = next((name for name in KINDS[:3] if since.get(name) == start), "")
    sentences = []
    buffers = since.get("buffer")
    if buffers and (not start or buffers < start or (buffers == start and cause != "loss")):
        sentences.append(
            f"The buffers differ from step {buffers} on, with equal losses: the BatchNorm policy "
            "(whose statistics are kept, and when the ranks share them)."
        )
    if start:
        sentences.append(cause_sentence(cause, start, parity, starts, first))
    elif not sentences and "top1" in since:
        sentences.append(f"The top-1 differs from step {since['top1']} on, with equal losses.")
    elif not sentences and parity.final_weights == "different":
        sentences.append("All that was compared is equal, but the final weights are not: the runs "
                         "parted later, or in what was not compared.")  # fmt: skip
    return sentences


def cause_sentence(
    cause: str, start: int, parity: Parity, starts: list[str | None], first: int
) -> str:
    """Return what it points to that the tensors of a kind differ first."""
    if cause == "gradient":
        return (
            f"The gradients differ first, in step {start}, with equal losses: the backward pass or "
            "the averaging over the ranks (the engine)."
        )
    if cause == "weight":
        return (
            f"The weights differ first, in step {start}, with equal gradients: the optimizer or "
            "its learning rate."
        )
    if "gradient" not in parity.kinds:
        return (
            f"The mean losses differ from step {start} on. Whether data, forward, engine or "
            "optimizer came first, only traces can tell."
        )
    if start > first:
        weights = "with equal weights before it: "
    elif not all(starts):
        weights = "and of the weights before it nothing is recorded: they, "
    elif starts[0] == starts[1]:
        weights = "with equal initial weights: "
    else:
        weights = "and the initial weights differ, too: they, or "
    return (
        f"The losses differ first, in step {start}, {weights}the data (order, augmentation) or the "
        "forward pass."
    )


def compare_ranks(run: Path, max_ulps: int = 0, relative: float = 0.0) -> Parity:
    """Compare the ranks of one run: gradients and weights must be the same on all of them."""
    if not packed.is_folder(run):
        raise UserError(f"{run}: there is no such run folder")
    files = read_trace(run)
    ranks = sorted({rank for _, rank in files})
    if len(ranks) < 2:
        raise UserError(
            f"{run}: holds traces of {len(ranks)} rank(s), and two are needed: train on several "
            "with --tensor-steps N"
        )
    steps = {step for step, rank in files if rank == ranks[0]}
    missing = ["loss: each rank has its own images"]
    if partial := {step for step, _ in files if any((step, rank) not in files for rank in ranks)}:
        missing.append(f"{numbered('step', partial)}: not there on all ranks")
    others = {(step, rank): file for (step, rank), file in files.items() if rank != ranks[0]}
    first = {(step, rank): files[step, ranks[0]] for step, rank in others if step in steps}
    if not first:
        raise UserError(f"{run}: its ranks have no step in common")
    names = (f"rank {ranks[0]}", numbered("rank", ranks[1:]))
    config = read_if_there(run / "config.json")
    unjudged = {"loss"}
    if config.get("batch_norm") != "sync":
        unjudged.add("buffer")  # each rank has its own images
    if config.get("use_adasum"):
        unjudged.add("gradient")  # Adasum combines the updates, not the gradients
    compared = f"{run.name}, {numbered('step', steps)}"
    parity = Parity(*names, compared, missing, max_ulps, relative)
    compare_steps(parity, first, others, unjudged)
    del parity.kinds["loss"]
    since = {n: k.first.step for n, k in parity.kinds.items() if k.judged and k.first}
    gradient, weight = since.get("gradient"), since.get("weight")
    if gradient and (not weight or gradient <= weight):
        parity.why = [f"The gradients of the ranks differ first, in step {gradient}: what each "
                      "rank got from the exchange is not the same."]  # fmt: skip
    elif weight:
        parity.why = [f"The weights of the ranks differ first, in step {weight}, with equal "
                      "gradients: the ranks began with other weights, or another state of the "
                      "optimizer."]  # fmt: skip
    return parity


def read_if_there(path: Path) -> dict[str, Any]:
    """Return a JSON file of a run; {} if there is none, as of a run that has not ended."""
    return read_object(path) if packed.exists(path) else {}


def described(places: Iterable[tuple[int, int]]) -> str:
    """Return steps and ranks in words."""
    ranks = {rank for _, rank in places}
    who = "means over the ranks" if ranks == {-1} else numbered("rank", ranks)
    return f"{who}, {numbered('step', {step for step, _ in places})}"


def numbered(noun: str, numbers: Iterable[int]) -> str:
    """Return whole numbers as a person writes them: `steps 1 to 5, 7`."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    texts = [
        str(low) if low == high else f"{low}{' to ' if high > low + 1 else ', '}{high}"
        for low, high in spans
    ]
    plural = "" if texts and len(spans) == 1 and spans[0][0] == spans[0][1] else "s"
    return f"{noun}{plural} {', '.join(texts) or 'none'}"
