"""Two runs, or the ranks of one, compared: where they differ first, and what that points to."""

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compare.evidence import packed
from compare.evidence.distances import Distance, measure
from compare.evidence.traces import (
    Pair,
    metric_pairs,
    rank_pairs,
    read_if_there,
    read_steps,
    trace_files,
    trace_pairs,
)
from compare.evidence.words import shortest_unique_names
from recipe.errors import UserError


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
        # A digest knows no distance, so with a tolerance it is shown, but does not judge.
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


def compare_runs(run_a: Path, run_b: Path, max_ulps: int = 0, relative: float = 0.0) -> Parity:
    """Compare two recorded runs: their traces, or else what every run folder has."""
    for run in (run_a, run_b):
        if not packed.is_folder(run):
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
    ends = [read_if_there(run / "summary.json") for run in (run_a, run_b)]
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
    if not packed.is_folder(run):
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
    config = read_if_there(run / "config.json")
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
    return [*sentences, cause_sentence(cause, start, parity, prints, first)]


def cause_sentence(
    cause: str, start: int, parity: Parity, prints: list[dict[str, Any]], first: int
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
    begun = [fingerprint.get("initial_weights_sha256") for fingerprint in prints]
    if start > first:
        weights = "with equal weights before it: "
    elif not all(begun):
        weights = "and of the weights before it nothing is recorded: they, "
    elif begun[0] == begun[1]:
        weights = "with equal initial weights: "
    else:
        weights = "and the initial weights differ, too: they, or "
    return (
        f"The losses differ first, in step {start}, {weights}the data (order, augmentation) or the "
        "forward pass."
    )


def first_step(a: dict[int, dict[int, Path]], b: dict[int, dict[int, Path]]) -> int:
    """Return the first step that two traces share."""
    return min(step for rank in a.keys() & b.keys() for step in a[rank].keys() & b[rank].keys())


def distinct_names(a: Path, b: Path) -> tuple[str, str]:
    """Return what to call two runs: their folders' names, with what tells them apart."""
    first, second = shortest_unique_names([a, b])
    if first != second:
        return first, second
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
