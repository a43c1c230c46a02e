"""Compare what two runs computed, step by step: losses, gradients, weights, BatchNorm's buffers.

    python compare/parity.py RUN_A RUN_B      two recorded runs, made with --tensor-steps N
    python compare/parity.py --ranks RUN      the ranks of one run with each other
    python compare/parity.py                  both engines, run now, on the embedded digits
    python compare/parity.py --workers 2 --steps 5 -- --arch resnet18 --data IMAGENET

Distances. *ulps*: how many steps between neighbouring floating-point numbers of the tensor's type
lie between two values, largest over a tensor; -0 and +0 are 0 apart (equal, but not bit-equal).
*relative*: max|a - b| / max(max|a|, max|b|) of a tensor, for next to zero, where rounding is many
ulps and means nothing. NaN and infinities are equal to their like only, and else beyond any
tolerance. A tensor is within the tolerance if it is by --max-ulps or by --relative.

Exit code: 0 equal or within the tolerance, 1 diverged, 2 a mistake in what was asked.
"""

import argparse
import dataclasses
import json
import math
import re
import sys
import textwrap
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tabulate import tabulate

from compare.errors import UserError, run_main
from compare.plan.configurations import CONFIGURATIONS, DEFAULT_CONFIGURATIONS
from compare.plan.plan import RESERVED_FLAGS, Plan, Run
from compare.plan.plan_file import positive
from compare.run import check_tools
from compare.running.launch import start_and_wait, utc_stamp
from recipe.flags import flag_name

WIDTH = 100  # columns
TAIL_LINES = 40  # of a failed run's output that are shown; torchrun's own end takes 30
DEFAULT_STEPS = 5

# The arrays of a trace, in the order in which a step computes them; buffers never feed back into
# training, and so cannot be the cause of anything.
KINDS = ("loss", "gradient", "weight", "buffer")
PLURALS = {"loss": "losses", "gradient": "gradients", "weight": "weights", "buffer": "buffers"}

INTEGERS = {2: np.int16, 4: np.int32, 8: np.int64}  # as wide as a float of so many bytes
READ_ERRORS = (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error)


@dataclass(frozen=True)
class Element:
    """One element of a tensor, in both runs."""

    index: tuple[int, ...]
    a: float
    b: float


@dataclass(frozen=True)
class Distance:
    """How far apart two tensors are."""

    bit_equal: bool
    ulps: int | None  # largest; None: no number can say (see `problem`)
    relative: float | None
    problem: str | None = None  # what no number can say: NaN on one side only, another shape
    same_tensor: bool = True  # False: of another shape or type, or missing in one run
    most_ulps: Element | None = None
    most_absolute: Element | None = None
    magnitude_a: float = 0.0  # largest finite absolute value
    magnitude_b: float = 0.0

    @property
    def equal(self) -> bool:
        return self.ulps == 0

    def within(self, max_ulps: int, relative: float) -> bool:
        if self.ulps is None or self.relative is None:
            return False
        return self.ulps <= max_ulps or self.relative <= relative


@dataclass(frozen=True)
class Pair:
    """One tensor in both runs; None where a run lacks it."""

    step: int
    rank: int  # -1: a mean over all ranks
    kind: str
    layer: str
    position: int  # in the file, which has the order of the forward pass
    a: np.ndarray | None
    b: np.ndarray | None


@dataclass
class Place:
    """Where tensors differ, and how much there."""

    step: int
    layer: str
    position: int
    ranks: list[int]
    distance: Distance  # on the first of the ranks


@dataclass
class KindResult:
    """What the comparison of all tensors of one kind has shown."""

    tensors: int = 0
    bit_equal: int = 0
    unequal: int = 0  # more than the sign of zeros
    beyond: int = 0  # beyond the tolerance
    judged: bool = True
    most_ulps: Place | None = None
    most_relative: Place | None = None
    first_unequal: Place | None = None
    first_beyond: Place | None = None


@dataclass
class Parity:
    """Two runs, or two ranks, compared."""

    a: str
    b: str
    compared: str
    not_compared: list[str]
    kinds: dict[str, KindResult]
    max_ulps: int
    relative: float
    settings: list[str] = field(default_factory=list)  # of the fingerprints, that differ
    final_weights: str | None = None  # "bit-equal", "different"; None: not known
    why: list[str] = field(default_factory=list)  # sentences

    @property
    def exact(self) -> bool:
        return self.max_ulps == 0 and self.relative == 0

    @property
    def diverged(self) -> bool:
        # A digest knows no distance, so with a tolerance it is told, but does not judge.
        last = self.exact and self.final_weights == "different"
        return last or any(kind.judged and kind.beyond for kind in self.kinds.values())

    @property
    def verdict(self) -> str:
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
        problem = f"{a.dtype}{list(a.shape)} against {b.dtype}{list(b.shape)}"
        return Distance(False, None, None, problem, same_tensor=False)
    shape = a.shape
    a, b = np.ascontiguousarray(a).reshape(-1), np.ascontiguousarray(b).reshape(-1)
    if np.array_equal(a.view(np.uint8), b.view(np.uint8)):
        return Distance(True, 0, 0.0)

    def element(index: int) -> Element:
        where = tuple(int(i) for i in np.unravel_index(index, shape))
        return Element(where, float(a[index]), float(b[index]))

    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    finite = np.isfinite(wide_a) & np.isfinite(wide_b)
    alike = (wide_a == wide_b) | (np.isnan(wide_a) & np.isnan(wide_b))
    magnitude_a, magnitude_b = (
        float(np.abs(values[np.isfinite(values)]).max(initial=0.0)) for values in (wide_a, wide_b)
    )
    odd = np.flatnonzero(~finite & ~alike)
    if odd.size:
        worst = element(int(odd[0]))
        problem = f"{worst.a:.6g} against {worst.b:.6g} in {odd.size} of {a.size} elements"
        return Distance(
            bit_equal=False,
            ulps=None,
            relative=None,
            problem=problem,
            most_ulps=worst,
            most_absolute=worst,
            magnitude_a=magnitude_a,
            magnitude_b=magnitude_b,
        )
    ulps = np.where(finite, ulp_distances(a, b), 0)
    absolute = np.zeros(a.size)
    np.subtract(wide_a, wide_b, out=absolute, where=finite)
    np.abs(absolute, out=absolute)
    farthest, widest = int(ulps.argmax()), int(absolute.argmax())
    scale = max(magnitude_a, magnitude_b)
    return Distance(
        bit_equal=False,
        ulps=int(ulps[farthest]),
        relative=float(absolute[widest] / scale) if scale else 0.0,
        most_ulps=element(farthest),
        most_absolute=element(widest),
        magnitude_a=magnitude_a,
        magnitude_b=magnitude_b,
    )


def compare_pairs(
    pairs: Iterable[Pair], max_ulps: int, relative: float, names: tuple[str, str]
) -> dict[str, KindResult]:
    """Return for each kind what its pairs of tensors show; holds one pair at a time."""
    kinds: dict[str, KindResult] = {}
    for pair in pairs:
        kind = kinds.setdefault(pair.kind, KindResult())
        if pair.a is None or pair.b is None:
            problem = f"in {names[pair.a is None]} only"
            distance = Distance(False, None, None, problem, same_tensor=False)
        else:
            distance = measure(pair.a, pair.b)
        kind.tensors += 1
        kind.bit_equal += distance.bit_equal
        if distance.equal:
            continue
        place = Place(pair.step, pair.layer, pair.position, [pair.rank], distance)
        kind.unequal += 1
        kind.first_unequal = earlier(kind.first_unequal, place)
        if not distance.within(max_ulps, relative):
            kind.beyond += 1
            kind.first_beyond = earlier(kind.first_beyond, place)
        if kind.most_ulps is None or size(distance.ulps) > size(kind.most_ulps.distance.ulps):
            kind.most_ulps = place
        largest = kind.most_relative
        if largest is None or size(distance.relative) > size(largest.distance.relative):
            kind.most_relative = place
    return kinds


def earlier(known: Place | None, new: Place) -> Place:
    """Return the place of the earlier step, and in a step that of the earlier layer; places that
    differ in the rank alone become one."""
    if known is None or (new.step, new.position) < (known.step, known.position):
        return dataclasses.replace(new, ranks=list(new.ranks))
    if (new.step, new.position) == (known.step, known.position):
        known.ranks += new.ranks
    return known


def size(distance: float | None) -> float:
    return math.inf if distance is None else distance


# -- Recorded runs ---------------------------------------------------------------------------------


def trace_files(run: Path) -> dict[int, dict[int, Path]]:
    """Return the files of a run's trace by rank and step."""
    files: dict[int, dict[int, Path]] = {}
    for path in run.glob("trace/rank-*/step-*.npz"):
        rank, step = re.fullmatch(r"rank-(\d+)", path.parent.name), re.findall(r"\d+", path.stem)
        if rank and step:
            files.setdefault(int(rank[1]), {})[int(step[0])] = path
    return files


def open_trace(path: Path) -> Any:
    """Open one step's arrays, each of which is read when it is asked for."""
    try:
        return np.load(path)
    except READ_ERRORS as error:
        raise unreadable(path, error) from None


def read_array(arrays: Any, name: str, path: Path) -> np.ndarray | None:
    """Return one array of an opened trace; None if there is no such."""
    if name not in arrays.files:
        return None
    try:
        return np.asarray(arrays[name])
    except READ_ERRORS as error:
        raise unreadable(path, error) from None


def unreadable(path: Path, error: Exception) -> UserError:
    return UserError(
        f"{path} cannot be read ({error}): it is damaged, or no trace; train again with "
        "--tensor-steps"
    )


def file_pairs(
    step: int, rank: int, path_a: Path, path_b: Path, kinds: tuple[str, ...]
) -> Iterator[Pair]:
    """Yield the tensors of one step of one rank, in the order of the files."""
    with open_trace(path_a) as a, open_trace(path_b) as b:
        for position, name in enumerate(dict.fromkeys([*a.files, *b.files])):
            kind, _, layer = name.partition("/")
            if kind in kinds:
                arrays = read_array(a, name, path_a), read_array(b, name, path_b)
                yield Pair(step, rank, kind, layer, position, *arrays)


def trace_pairs(a: dict[int, dict[int, Path]], b: dict[int, dict[int, Path]]) -> Iterator[Pair]:
    """Yield the tensors of the ranks and steps that two traces share, step by step."""
    ranks = sorted(a.keys() & b.keys())
    for step in sorted({step for rank in ranks for step in a[rank].keys() & b[rank].keys()}):
        for rank in ranks:
            if step in a[rank] and step in b[rank]:
                yield from file_pairs(step, rank, a[rank][step], b[rank][step], KINDS)


def rank_pairs(files: dict[int, dict[int, Path]]) -> Iterator[Pair]:
    """Yield the tensors of each rank beside those of the first; losses are each rank's own."""
    first, *others = sorted(files)
    for step in sorted(files[first]):
        for rank in others:
            if step in files[rank]:
                kinds = tuple(kind for kind in KINDS if kind != "loss")
                yield from file_pairs(step, rank, files[first][step], files[rank][step], kinds)


def metric_pairs(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> Iterator[Pair]:
    """Yield loss and top-1 of the steps that two metrics.jsonl share: means over all ranks."""
    of_b = {line["step"]: line for line in b}
    for line in a:
        if other := of_b.get(line["step"]):
            for position, kind in enumerate(("loss", "top1")):
                values = (np.float64(line[kind]), np.float64(other[kind]))
                yield Pair(line["step"], -1, kind, "", position, *map(np.asarray, values))


def read_steps(run: Path) -> list[dict[str, Any]]:
    """Return the step lines of a run's metrics.jsonl; its last line may be half written."""
    path = run / "metrics.jsonl"
    try:
        texts = path.read_text().splitlines()
    except OSError as error:
        raise UserError(
            f"{run}: no run folder: it holds neither trace/ nor a readable metrics.jsonl "
            f"({error.strerror})"
        ) from None
    steps = []
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
            if line["kind"] == "step":
                float(line["loss"]), float(line["top1"])
                steps.append(line | {"step": int(line["step"])})
        except (ValueError, KeyError, TypeError):
            if number < len(texts):
                raise UserError(
                    f"{path}, line {number} is no record of a step: {text:.80}"
                ) from None
    return steps


def read_object(path: Path) -> dict[str, Any]:
    """Return a JSON file of a run; {} if there is none, as of a run that has not ended."""
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    return value if isinstance(value, dict) else {}


# -- The three comparisons -------------------------------------------------------------------------


def compare_runs(run_a: Path, run_b: Path, max_ulps: int = 0, relative: float = 0.0) -> Parity:
    """Compare two recorded runs: their traces, or else what every run folder has."""
    for run in (run_a, run_b):
        if not run.is_dir():
            raise UserError(f"{run}: there is no such run folder")
    names = distinct_names(run_a, run_b)
    a, b = trace_files(run_a), trace_files(run_b)
    if a and b:
        parity = compare_traces(a, b, names, max_ulps, relative)
    else:
        parity = compare_metrics(run_a, run_b, names, max_ulps, relative)
        lacking = [name for name, files in zip(names, (a, b), strict=True) if not files]
        parity.not_compared.insert(0, (
            f"gradients, weights and buffers of each step: {' and '.join(lacking)} "
            f"{'has' if len(lacking) == 1 else 'have'} no trace (train with --tensor-steps N)"
        ))  # fmt: skip
    ends = [read_object(run / "summary.json") for run in (run_a, run_b)]
    prints = [end.get("fingerprint") or {} for end in ends]
    parity.settings = [
        f"{name}: {prints[0].get(name)!r} against {prints[1].get(name)!r}"
        for name in sorted(prints[0].keys() | prints[1].keys())
        if all(prints) and prints[0].get(name) != prints[1].get(name)
    ]
    parity.final_weights, open_question = compare_ends(ends, names)
    if open_question:
        parity.not_compared.append(open_question)
    parity.why = explain(parity, prints, first_step(a, b) if a and b else 1)
    if parity.why and parity.settings:
        parity.why.append("The settings differ, too (above): they may be all of the cause.")
    return parity


def compare_traces(
    a: dict[int, dict[int, Path]],
    b: dict[int, dict[int, Path]],
    names: tuple[str, str],
    max_ulps: int,
    relative: float,
) -> Parity:
    ranks = sorted(a.keys() & b.keys())
    shared = {rank: a[rank].keys() & b[rank].keys() for rank in ranks}
    if not any(shared.values()):
        raise UserError(
            f"{names[0]} and {names[1]} have no step of a rank in common: {numbered('rank', a)}, "
            f"{numbered('step', *a.values())} against {numbered('rank', b)}, "
            f"{numbered('step', *b.values())}"
        )
    missing = []
    for name, own, other in ((names[0], a, b), (names[1], b, a)):
        if alone := own.keys() - other.keys():
            missing.append(f"{numbered('rank', alone)}: in {name} only; another number of ranks is "
                           "another global batch, unless --batch-size makes up for it")  # fmt: skip
        steps = {step for rank in ranks for step in own[rank].keys() - other[rank].keys()}
        if steps:
            missing.append(f"{numbered('step', steps)}: in {name} only")
    compared = f"{numbered('rank', ranks)}, {numbered('step', *shared.values())}"
    kinds = compare_pairs(trace_pairs(a, b), max_ulps, relative, names)
    return Parity(*names, compared, missing, kinds, max_ulps, relative)


def compare_metrics(
    run_a: Path, run_b: Path, names: tuple[str, str], max_ulps: int, relative: float
) -> Parity:
    steps = [read_steps(run) for run in (run_a, run_b)]
    numbers_a, numbers_b = ({line["step"] for line in lines} for lines in steps)
    if not numbers_a & numbers_b:
        raise UserError(
            f"{names[0]} and {names[1]} have no step in common: "
            f"{numbered('step', numbers_a)} against {numbered('step', numbers_b)}"
        )
    missing = [
        f"{numbered('step', alone)}: in {name} only"
        for name, alone in ((names[0], numbers_a - numbers_b), (names[1], numbers_b - numbers_a))
        if alone
    ]
    compared = f"means over the ranks, {numbered('step', numbers_a & numbers_b)}"
    kinds = compare_pairs(metric_pairs(*steps), max_ulps, relative, names)
    return Parity(*names, compared, missing, kinds, max_ulps, relative)


def compare_ranks(run: Path, max_ulps: int = 0, relative: float = 0.0) -> Parity:
    """Compare the ranks of one run: gradients and weights must be the same on all of them."""
    if not run.is_dir():
        raise UserError(f"{run}: there is no such run folder")
    files = trace_files(run)
    if len(files) < 2:
        raise UserError(
            f"{run}: holds traces of {len(files)} rank(s), and two are needed: train on several "
            "with --tensor-steps N"
        )
    first, *others = sorted(files)
    missing = ["loss: each rank has its own images"]
    if steps := {step for rank in others for step in files[first].keys() ^ files[rank].keys()}:
        missing.append(f"{numbered('step', steps)}: not there on all ranks")
    names = (f"rank {first}", f"{numbered('rank', others)}")
    kinds = compare_pairs(rank_pairs(files), max_ulps, relative, names)
    if not kinds:
        raise UserError(f"{run}: its ranks have no step in common")
    config = read_object(run / "config.json")
    if "buffer" in kinds and config.get("batch_norm") != "sync":
        kinds["buffer"].judged = False  # each rank has its own images
    if "gradient" in kinds and config.get("use_adasum"):
        kinds["gradient"].judged = False  # Adasum combines the updates, not the gradients
    compared = f"{run.name}, {numbered('step', files[first])}"
    parity = Parity(*names, compared, missing, kinds, max_ulps, relative)
    gradient, weight = (
        kind.first_unequal.step if kind and kind.judged and kind.first_unequal else None
        for kind in (kinds.get("gradient"), kinds.get("weight"))
    )
    if gradient is not None and (weight is None or gradient <= weight):
        parity.why = [f"The gradients of the ranks differ first, in step {gradient}: what each "
                      "rank got from the exchange is not the same."]  # fmt: skip
    elif weight is not None:
        parity.why = [f"The weights of the ranks differ first, in step {weight}, with equal "
                      "gradients: the ranks began with other weights, or another state of the "
                      "optimizer."]  # fmt: skip
    return parity


def compare_ends(
    summaries: list[dict[str, Any]], names: tuple[str, str]
) -> tuple[str | None, str | None]:
    """Return how the weights at the end of two whole runs compare, or why that is not known."""
    for name, summary in zip(names, summaries, strict=True):
        if not summary.get("weights_sha256"):
            return None, f"final weights: {name} has no summary.json, so it has not ended"
    steps = [summary.get("steps") for summary in summaries]
    if steps[0] != steps[1]:
        return None, f"final weights: the runs ended after {steps[0]} and {steps[1]} steps"
    same = summaries[0]["weights_sha256"] == summaries[1]["weights_sha256"]
    return "bit-equal" if same else "different", None


def explain(parity: Parity, prints: list[dict[str, Any]], first: int) -> list[str]:
    """Return sentences that say what differed first, and what that points to.

    The first difference of any size counts, not the first beyond the tolerance: a rounding in one
    step's gradients is in the next step's loss.
    """
    since = {
        name: kind.first_unequal.step for name, kind in parity.kinds.items() if kind.first_unequal
    }
    if any(
        kind.first_unequal and not kind.first_unequal.distance.same_tensor
        for kind in parity.kinds.values()
    ):
        return ["The runs do not hold the same tensors: another model, or other layers frozen."]
    sentences = []
    chain = [name for name in ("loss", "gradient", "weight") if name in since]
    start = min((since[name] for name in chain), default=None)
    buffers = since.get("buffer")
    if buffers is not None and (start is None or buffers < start or
                                (buffers == start and since.get("loss") != start)):  # fmt: skip
        sentences.append(
            f"The buffers differ from step {buffers} on, with equal losses: the BatchNorm policy "
            "(whose statistics are kept, and when the ranks share them)."
        )
    if start is None:
        if not sentences and "top1" in since:
            sentences.append(f"The top-1 differs from step {since['top1']} on, with equal losses.")
        if not sentences and parity.final_weights == "different":
            sentences.append("All that was compared is equal, but the final weights are not: the "
                             "runs parted later, or in what was not compared.")  # fmt: skip
        return sentences
    cause = next(name for name in chain if since[name] == start)
    if cause == "loss" and "gradient" not in parity.kinds:
        sentences.append(
            f"The mean losses differ from step {start} on. Whether data, forward, engine or "
            "optimizer came first, only traces can tell."
        )
    elif cause == "loss" and start > first:
        sentences.append(
            f"The losses differ first, in step {start}, with equal weights before it: the data "
            "(order, augmentation) or the forward pass."
        )
    elif cause == "loss":
        begun = [fingerprint.get("initial_weights_sha256") for fingerprint in prints]
        weights = "and of the weights before it nothing is recorded: they, "
        if all(begun):
            weights = (
                "with equal initial weights: " if begun[0] == begun[1]
                else "and the initial weights differ, too: they, or "
            )  # fmt: skip
        sentences.append(
            f"The losses differ first, in step {start}, {weights}the data (order, augmentation) or "
            "the forward pass."
        )
    elif cause == "gradient":
        sentences.append(
            f"The gradients differ first, in step {start}, with equal losses: the backward pass or "
            "the averaging over the ranks (the engine)."
        )
    else:
        sentences.append(
            f"The weights differ first, in step {start}, with equal gradients: the optimizer or "
            "its learning rate."
        )
    return sentences


def first_step(a: dict[int, dict[int, Path]], b: dict[int, dict[int, Path]]) -> int:
    """Return the first step that two traces share."""
    return min(step for rank in a.keys() & b.keys() for step in a[rank].keys() & b[rank].keys())


def distinct_names(a: Path, b: Path) -> tuple[str, str]:
    """Return what to call two runs: their folders' names, with what tells them apart."""
    parts_a, parts_b = a.resolve().parts, b.resolve().parts
    for length in range(1, min(len(parts_a), len(parts_b)) + 1):
        if parts_a[-length] != parts_b[-length]:
            return "/".join(parts_a[-length:]), "/".join(parts_b[-length:])
    return f"{a.name} (first)", f"{b.name} (second)"


def numbered(noun: str, *collections: Iterable[int]) -> str:
    """Return whole numbers as a person writes them: `steps 1 to 5, 7`."""
    numbers = sorted({number for collection in collections for number in collection})
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    texts = [
        str(low) if low == high else f"{low}{' to ' if high > low + 1 else ', '}{high}"
        for low, high in spans
    ]
    return f"{noun}{'s' if len(numbers) != 1 else ''} {', '.join(texts) or 'none'}"


# -- Live runs -------------------------------------------------------------------------------------


def run_both(options: argparse.Namespace) -> tuple[Path, Path]:
    """Run two configurations with traces, one after the other, and return their run folders."""
    # Of flags that are given twice the trainers take the last. As many threads as each engine's
    # rank gets by the trainers' own rule: with equal numbers of workers that is equal.
    arguments = (
        "--keep-checkpoints", "0", *options.trainer_arguments,
        "--tensor-steps", str(options.steps), "--max-steps", str(options.steps),
    )  # fmt: skip
    configurations = [CONFIGURATIONS[name] for name in options.configurations]
    check_tools(Plan(configurations=tuple(options.configurations), workers=(options.workers,)))
    folder = options.out or Path("runs") / f"parity-{utc_stamp()}"
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty: take another --out DIR")
    folders = []
    for number, configuration in enumerate(configurations):
        # A configuration against itself: two folders.
        log_dir = folder / "again" if number and configuration == configurations[0] else folder
        run = Run(0, configuration, options.workers, None, arguments=arguments)
        label = f"{run.name}, {options.steps} steps, into {log_dir / run.name}"
        print(label, file=sys.stderr)
        outcome = start_and_wait(run, folder, options.timeout, label, log_dir=log_dir)
        if outcome.status != "completed":
            output = (log_dir / run.name / "output.log").read_text(errors="replace")
            tail = "\n".join(output.splitlines()[-TAIL_LINES:])
            raise UserError(
                f"{run.name} {outcome.status} (exit code {outcome.exit_code}); its output ends:\n"
                f"{tail}"
            )
        folders.append(log_dir / run.name)
    return folders[0], folders[1]


# -- What is shown ---------------------------------------------------------------------------------


def text_report(parity: Parity) -> str:
    """Return the result for a terminal, at most 100 columns wide."""
    lines = wrapped(f"{parity.a} against {parity.b}: {parity.compared}", "")
    for missing in parity.not_compared:
        lines += wrapped(f"not compared: {missing}", "    ")
    rows = [
        [
            name,
            f"{kind.tensors:,}",
            f"{kind.bit_equal:,}",
            f"{kind.unequal:,}",
            f"{kind.beyond:,}" if kind.judged else "not judged",
            distance_text(kind.most_ulps.distance.ulps) if kind.most_ulps else "0",
            distance_text(kind.most_relative.distance.relative) if kind.most_relative else "0",
        ]
        for name, kind in in_order(parity.kinds)
    ]
    headers = ["kind", "tensors", "bit-equal", "unequal", "beyond", "most ulps",
               "most relative"]  # fmt: skip
    alignment = ("left", *["right"] * 6)
    table = tabulate(rows, headers, disable_numparse=True, colalign=alignment)
    lines += ["", *table.splitlines(), ""]
    for name, kind in in_order(parity.kinds):
        if kind.most_ulps and kind.most_relative:
            where = place_text(kind.most_ulps, "ulps")
            lines += wrapped(f"{name}, most ulps: {where}", "")
            elsewhere = place_text(kind.most_relative, "relative")
            if elsewhere != where:
                lines += wrapped(f"{name}, most relative: {elsewhere}", "")
    if parity.final_weights:
        lines += wrapped(f"final weights of the whole runs: {parity.final_weights}", "")
    for setting in parity.settings:
        lines += wrapped(f"the settings differ: {setting}", "")
    lines += [line for sentence in parity.why for line in wrapped(sentence, "")]
    if first := first_divergence(parity):
        name, place = first
        if not parity.exact:
            where = place_text(place, "ulps")
            lines += wrapped(f"First beyond the tolerance: {name}, {where}", "")
        else:
            lines += wrapped(f"First divergence: {name}, {place_text(place, 'ulps')}", "")
    tolerance = "" if parity.exact else f" ({parity.max_ulps} ulps or {parity.relative:g} relative)"
    lines += wrapped(f"Result: {parity.verdict}{tolerance}", "")
    return "\n".join(lines)


def first_divergence(parity: Parity) -> tuple[str, Place] | None:
    """Return kind and place of the first difference beyond the tolerance: by step, in a step by
    what is computed first."""
    places = [
        (name, kind.first_beyond)
        for name, kind in in_order(parity.kinds)
        if kind.judged and kind.first_beyond
    ]
    return min(places, key=lambda named: named[1].step, default=None)


def in_order(kinds: dict[str, KindResult]) -> list[tuple[str, KindResult]]:
    order = {name: number for number, name in enumerate(KINDS)}
    return sorted(kinds.items(), key=lambda item: order.get(item[0], len(order)))


def distance_text(distance: float | None) -> str:
    if distance is None:
        return "no number"
    return f"{distance:,}" if isinstance(distance, int) and distance < 10**6 else f"{distance:.2e}"


def place_text(place: Place, measured: str) -> str:
    """Return where two tensors differ, by how much, and how large their values are."""
    where = [f"step {place.step}"]
    if place.layer:
        where.append(f"layer {place.layer}")
    if place.ranks != [-1]:
        where.append(f"{numbered('rank', place.ranks)}")
    text = ", ".join(where)
    distance = place.distance
    if distance.problem:
        return f"{text}: {distance.problem}"
    element = distance.most_ulps if measured == "ulps" else distance.most_absolute
    assert element is not None
    at = f" at {list(element.index)}" if element.index else ""
    text += f": {element.a:.9g} against {element.b:.9g}{at} ({distance_text(distance.ulps)} ulps"
    text += f" at most, {distance.relative:.2e} relative"
    if element.index:
        text += f"; largest values {distance.magnitude_a:.3g} and {distance.magnitude_b:.3g}"
    return text + ")"


def wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=indent, subsequent_indent=indent + "    ",
        break_on_hyphens=False,
    )  # fmt: skip


def json_report(parity: Parity) -> str:
    """Return the result as JSON; a distance that no number can say is null, NaN a string."""
    record = dataclasses.asdict(parity)
    record["verdict"], record["diverged"] = parity.verdict, parity.diverged
    first = first_divergence(parity)
    record["first_divergence"] = (
        {"kind": first[0], **dataclasses.asdict(first[1])} if first else None
    )

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        return str(value) if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(plain(record), indent=2, allow_nan=False)


# -- The command line ------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    """Compare what the command line asks for and return the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    return run_main("compare/parity.py", lambda: compare(parse_options(argv)))


def compare(options: argparse.Namespace) -> int:
    tolerance = (options.max_ulps, options.relative)
    if options.ranks:
        parity = compare_ranks(options.ranks, *tolerance)
    else:
        run_a, run_b = options.runs or run_both(options)
        parity = compare_runs(run_a, run_b, *tolerance)
    print(json_report(parity) if options.json else text_report(parity))
    return 1 if parity.diverged else 0


def parse_options(argv: list[str]) -> argparse.Namespace:
    """Read the flags; what stands after the first `--` is the trainers'."""
    own, trainer = argv, list[str]()
    if "--" in argv:
        own, trainer = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    title, text = (__doc__ or "").split("\n\n", 1)
    parser = argparse.ArgumentParser(
        prog="python compare/parity.py",
        usage="python compare/parity.py [RUN_A RUN_B | --ranks RUN] [flags] [-- trainers' flags]",
        description=title,
        epilog=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("runs", nargs="*", type=Path, metavar="RUN", help="two run folders; none: both engines run")
    add("--ranks", type=Path, metavar="RUN", help="compare the ranks of this run with each other")
    add("--max-ulps", type=not_negative_int, default=0, metavar="U",
        help="tolerance in ulps (default: 0)")  # fmt: skip
    add("--relative", type=not_negative, default=0.0, metavar="R",
        help="tolerance as a share of a tensor's largest value (default: 0)")  # fmt: skip
    add("--json", action="store_true", help="print the result as JSON")
    live = parser.add_argument_group("without run folders: both engines run now")
    live.add_argument("--live", action="store_true", help="say so (it is what happens anyway)")
    names = ", ".join(CONFIGURATIONS)
    live.add_argument("--configurations", nargs=2, metavar="NAME", choices=CONFIGURATIONS,
                      help=f"two of {names} (default: {' '.join(DEFAULT_CONFIGURATIONS)})"
                      )  # fmt: skip
    live.add_argument("--workers", type=positive, metavar="N", help="processes (default: 2)")
    live.add_argument("--steps", type=positive, metavar="N",
                      help=f"steps that are traced (default: {DEFAULT_STEPS})")  # fmt: skip
    live.add_argument("--timeout", type=positive, metavar="SECONDS",
                      help="a run that takes longer is ended (default: 1800)")  # fmt: skip
    live.add_argument("--out", type=Path, metavar="DIR",
                      help="where the runs are written (default: runs/parity-<UTC time>)"
                      )  # fmt: skip
    options = parser.parse_args(own)
    options.trainer_arguments = trainer
    only_live = {
        "--live": options.live, "--configurations": options.configurations,
        "--workers": options.workers, "--steps": options.steps, "--timeout": options.timeout,
        "--out": options.out, "flags after --": trainer,
    }  # fmt: skip
    given = [name for name, value in only_live.items() if value]
    if options.ranks and options.runs:
        raise UserError("--ranks compares the ranks of one run: leave the other folders out")
    if len(options.runs) not in (0, 2):
        raise UserError(
            f"{len(options.runs)} run folder(s) given: give two to compare them, one with --ranks "
            "to compare its ranks, or none to run both engines now"
        )
    if (options.runs or options.ranks) and given:
        raise UserError(f"{given[0]}: only without run folders, when the engines run now")
    for flag in (*RESERVED_FLAGS, "--tensor-steps", "--max-steps"):
        if flag in map(flag_name, trainer):
            raise UserError(
                f"{flag} cannot be passed to the trainers: --steps and --out before the -- say how "
                "long the runs are and where they are written, and each starts from nothing"
            )
    options.configurations = options.configurations or list(DEFAULT_CONFIGURATIONS)
    options.workers = options.workers or 2
    options.steps = options.steps or DEFAULT_STEPS
    options.timeout = options.timeout or 1800
    return options


def not_negative_int(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return value


def not_negative(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a finite number from 0 on")
    return value


if __name__ == "__main__":
    sys.exit(main())
