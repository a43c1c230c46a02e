"""Verdicts: which of two configurations is faster, within a case and a number of workers."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from compare.evidence import turns
from compare.evidence.equality import Fact, compare_facts, compared_text
from compare.evidence.paired import CONFIDENCE, MIN_BLOCKS, Estimate, estimate_logs
from compare.evidence.records import ENGINES, Comparison, RunRecord
from compare.evidence.stopping import minutes_to_show
from compare.evidence.words import (
    bound_text,
    count,
    interval_text,
    label_of,
    percent_text,
    ratio_text,
)


@dataclass(frozen=True)
class LossGap:
    """Where the training losses of two runs are farthest apart."""

    largest: float
    block: int
    step: int
    steps: int


@dataclass(frozen=True)
class Verdict:
    """What is said of two configurations in one case at one number of workers; or, where
    `is_interaction`, of how far the ratio of two depends on the transport: then `first` and
    `second` are each such a ratio."""

    case: str
    workers: int
    first: str
    second: str
    first_label: str
    second_label: str
    speed: Estimate | None  # first / second, images a second
    cpu: Estimate | None  # first / second, CPU time an image
    differences: tuple[Fact, ...]
    missing_blocks: tuple[int, ...]
    equal_weights: tuple[bool, ...]  # of the full runs, block by block
    loss_gap: LossGap | None
    compared: str  # what the plan has differ between the two, in words
    is_null_test: bool  # both are the same: a difference would be the machine's, or the plan's
    is_interaction: bool = False
    measured_by: str = "runs"  # "turns" or "runs": where speed and CPU time come from
    decision: str = "undecided"  # "faster", "slower", "equal", "undecided"; see `decided`
    family: int = 1  # verdicts of the report that Holm's correction is over
    margin: float = 0.03  # within which "equal" is said
    first_in: tuple[int, int] = (0, 0)  # in how many of how many blocks `first` began
    block_seconds: float | None = None  # that a block of turns usually takes; None: not known

    @property
    def place(self) -> str:
        """Say where this was measured, as the beginning of a sentence."""
        workers = count(self.workers, "worker")
        return f"{self.case}, {workers}:" if self.case else f"At {workers}"

    def sentence(self) -> str:
        """Say the verdict, or why there is none."""
        at = self.place
        if self.differences:
            return (
                f"{at} no verdict on {self.first_label} and {self.second_label}: the runs "
                f"differ in more than {self.compared}."
            )
        if self.speed is None:
            what = "turns" if self.measured_by == "turns" else "a complete run"
            return (
                f"{at} no verdict: no block holds {what} of both {self.first_label} and "
                f"{self.second_label}."
            )
        if self.speed.low is None:
            return (
                f"{at} {self.claim(self.speed)} in {count(self.speed.blocks, 'block')}: too few "
                f"for an interval, which needs {MIN_BLOCKS}, so nothing is decided."
            )
        if self.is_null_test:
            return f"{at} {self.null_text(self.speed)}"
        if self.decision in ("faster", "slower"):
            return f"{at} {self.claim(self.speed)}, {self.figures(self.speed)}."
        what = "ratio" if self.is_interaction else "speed ratio"
        ratio = f"{what} {ratio_text(self.speed)}, {self.figures(self.speed)}"
        if self.decision == "equal":
            return (
                f"{at} {self.first_label} and {self.second_label} are equal within "
                f"{bound_text(self.speed)}: {ratio}."
            )
        more = f"; {self.more_text}" if self.more_text else ""
        return (
            f"{at} not decided between {self.first_label} and {self.second_label}: the difference "
            f"is at most {bound_text(self.speed)} either way ({ratio}){self.corrected_text}{more}."
        )

    def claim(self, speed: Estimate) -> str:
        times = f"{ratio_text(speed)} times"
        if self.is_interaction:
            return f"{self.first_label} is {times} {self.second_label}"
        return f"{self.first_label} trained {times} as fast as {self.second_label}"

    @property
    def more_text(self) -> str:
        """Say how much longer a measurement would show a difference of the margin's size; empty if
        that is not known, or if this one would have shown it."""
        if self.speed is None or self.block_seconds is None:
            return ""
        more = minutes_to_show(self.speed, self.margin, self.block_seconds, self.family)
        if not more:
            return ""
        minutes = count(max(1, round(more)), "more minute")
        return f"about {minutes} would show a difference of {percent_text(self.margin)}"

    @property
    def corrected_reach(self) -> float:
        """The half-width, in proportion, of the interval that the first step of Holm's method asks
        for; infinite without an interval."""
        if self.speed is None or self.speed.low is None:
            return math.inf
        return self.speed.half_width(1 - (1 - self.speed.confidence) / self.family)

    @property
    def corrected_text(self) -> str:
        """Explain an interval that leaves out 1, or lies within the margin, where nothing is
        decided."""
        if self.speed is None:
            return ""
        alone = ["a difference"] if self.speed.shows_difference else []
        if self.speed.bound <= self.margin:
            alone.append(f"that they are equal within {percent_text(self.margin)}")
        if not alone:
            return ""
        shown = " and ".join(alone)
        return f"; by itself it would show {shown}, among {self.family} verdicts it does not"

    def figures(self, speed: Estimate) -> str:
        return f"{interval_text(speed)}, {count(speed.blocks, 'block')}"

    def null_text(self, speed: Estimate) -> str:
        """Say what a configuration's comparison with itself showed, which has an interval."""
        ratio = f"speed ratio {ratio_text(speed)}, {self.figures(speed)}"
        if self.decision not in ("faster", "slower"):
            is_equal = self.decision == "equal"
            within = "equal within" if is_equal else "it differs from itself by at most"
            return (
                f"no difference was shown between {self.first_label} and itself, as it should be: "
                f"{within} {bound_text(speed)}, {ratio}."
            )
        percent = percent_text(max(speed.ratio, 1 / speed.ratio) - 1)
        return (
            f"a difference was shown between {self.first_label} and itself: {ratio}. This "
            f"machine or this plan is not fit to tell differences of {percent} (by chance alone "
            "this comes about in one null test of twenty: run it again)."
        )

    def cpu_sentence(self) -> str:
        """Say which of the two used less CPU time; empty when there is no verdict. It is a finding
        of its own, no second witness of the speed: who takes longer often computes longer."""
        if self.differences or self.cpu is None:
            return ""
        told = f"{self.first_label} used {ratio_text(self.cpu)} times the CPU time per image"
        interval = f", {interval_text(self.cpu)}" if self.cpu.low is not None else ""
        return f"{told} of {self.second_label}{interval}."

    def training_sentence(self) -> str:
        """Say whether both did the same training, by their final weights and their losses."""
        if not self.equal_weights:
            return ""
        equal, blocks = sum(self.equal_weights), len(self.equal_weights)
        if equal == blocks:
            return f"Final weights bit-equal in {equal} of {count(blocks, 'block')}."
        text = f"Final weights bit-equal in only {equal} of {count(blocks, 'block')}"
        if gap := self.loss_gap:
            return (
                f"{text}; the training losses differ by at most {gap.largest:.2g} "
                f"(step {gap.step} of {gap.steps}, block {gap.block})."
            )
        return f"{text}; they have no training step in common."


def judge(comparison: Comparison) -> list[Verdict]:
    """Return a verdict for each case, number of workers, and pair of configurations; where the
    configurations make a square, one on the interaction as well."""
    verdicts = []
    for case in comparison.cases:
        for workers in comparison.workers:
            these = [judge_pair(comparison, case, workers, *pair) for pair in comparison.pairs]
            verdicts += [*these, *judge_interaction(comparison, case, workers, these)]
    return decided(verdicts)


def decided(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Return the verdicts with their decisions, each of two kinds of error in all of them together
    rarer than 1 - CONFIDENCE: a difference that is none, and "equal" that is not.

    Holm's step-down test (Scandinavian Journal of Statistics 6, 1979) once over the hypotheses of
    no difference, and once over those of a difference of the margin or more. Both may be rejected,
    where a difference is sure and too small to matter: then it is "equal", but not in a null test,
    which asks for any difference.
    """
    judged = {
        index: verdict.speed
        for index, verdict in enumerate(verdicts)
        if verdict.speed is not None and verdict.speed.low is not None and not verdict.differences
    }
    error = 1 - min((speed.confidence for speed in judged.values()), default=CONFIDENCE)
    unequal = holm({i: speed.p_difference() for i, speed in judged.items()}, error)
    # Half the error: then a single verdict is "equal" where its interval lies within the margin.
    equal = holm(
        {i: speed.p_equality(verdicts[i].margin) for i, speed in judged.items()}, error / 2
    )
    found = []
    for index, verdict in enumerate(verdicts):
        decision = "undecided"
        if index in equal and not (verdict.is_null_test and index in unequal):
            decision = "equal"
        elif index in unequal:
            decision = "faster" if judged[index].ratio > 1 else "slower"
        found.append(replace(verdict, decision=decision, family=len(judged)))
    return found


def holm(p_values: Mapping[int, float], error: float) -> set[int]:
    """Return which hypotheses are rejected: from the least p-value on, each against the error
    shared by those that are left, until one is not."""
    rejected: set[int] = set()
    for index in sorted(p_values, key=lambda index: p_values[index]):
        if p_values[index] > error / (len(p_values) - len(rejected)):
            break
        rejected.add(index)
    return rejected


def judge_pair(comparison: Comparison, case: str, workers: int, first: str, second: str) -> Verdict:
    """Compare two configurations over the blocks in which both are complete."""
    pairs, missing = [], []
    for block in sorted({run.block for run in comparison.runs}):
        a = comparison.find(block, first, workers, case)
        b = comparison.find(block, second, workers, case)
        if a.is_complete and b.is_complete:
            pairs.append((a, b))
        else:
            missing.append(block)
    sides = [
        side
        for side in comparison.turn_sides(case, workers)
        if side.configuration in (first, second)
    ]
    facts = [
        *compare_facts(comparison, (run for pair in pairs for run in pair)),
        *compare_facts(comparison, sides),
    ]
    differences = tuple({fact.field: fact for fact in facts if fact.forbids_verdict}.values())
    equal = tuple(a.summary.weights_sha256 == b.summary.weights_sha256 for a, b in pairs)
    gap = None
    if not all(equal):
        gap = largest_loss_gap(pair for pair, same in zip(pairs, equal, strict=True) if not same)
    verdict = Verdict(
        case=case,
        workers=workers,
        first=first,
        second=second,
        first_label=label_of(comparison, first),
        second_label=label_of(comparison, second),
        speed=None,
        cpu=None,
        differences=differences,
        missing_blocks=tuple(missing),
        equal_weights=equal,
        loss_gap=gap,
        compared=compared_text(comparison, first, second),
        is_null_test=comparison.plan["null"],
        margin=comparison.plan["margin"],
    )
    if differences:
        return verdict
    return with_speed(verdict, comparison, {first: 1, second: -1})


def with_speed(verdict: Verdict, comparison: Comparison, powers: Mapping[str, int]) -> Verdict:
    """Return the verdict with the product of the configurations' speeds, each to its power."""
    measured = with_turns if comparison.plan["measure"] == "turns" else with_runs
    return measured(verdict, comparison, powers)


def with_turns(verdict: Verdict, comparison: Comparison, powers: Mapping[str, int]) -> Verdict:
    """Return the verdict with speed and CPU time from the blocks of turns that hold these sides."""
    blocks = comparison.turn_blocks(verdict.case, verdict.workers)
    sure, both = comparison.confidence, [b for b in blocks if powers.keys() <= {*b.order}]
    if not both:
        return replace(verdict, measured_by="turns")
    speed = turns.estimate_contrast(blocks, powers, turns.throughput, sure)
    used = turns.estimate_contrast(blocks, powers, lambda turn: turn.cpu_seconds_per_image, sure)
    first, second, *_ = powers
    seconds = [block.measuring_seconds for block in both if block.seconds > 0]
    return replace(
        verdict, speed=speed, cpu=used, measured_by="turns",
        first_in=first_count([block.order for block in both], first, second),
        block_seconds=median(seconds) if seconds else None,
    )  # fmt: skip


def with_runs(verdict: Verdict, comparison: Comparison, powers: Mapping[str, int]) -> Verdict:
    """Return the verdict with speed and CPU time from the whole runs of the blocks in which these
    configurations are all complete."""
    blocks: dict[int, dict[str, RunRecord]] = {}
    for name in powers:
        for run in comparison.complete_runs((verdict.case, verdict.workers, name)):
            blocks.setdefault(run.block, {})[name] = run
    whole = [runs for runs in blocks.values() if len(runs) == len(powers)]
    if not whole:
        return verdict

    def estimate(value: Callable[[RunRecord], float]) -> Estimate:
        logs = [
            math.fsum(power * math.log(value(runs[name])) for name, power in powers.items())
            for runs in whole
        ]
        return estimate_logs(logs, confidence=comparison.confidence)

    place = {run.folder: number for number, run in enumerate(comparison.runs)}
    first, second, *_ = powers
    orders = [sorted(runs, key=lambda name: place[runs[name].folder]) for runs in whole]
    return replace(
        verdict,
        speed=estimate(lambda run: run.summary.images_per_second),
        cpu=estimate(lambda run: run.summary.cpu_seconds_per_image),
        first_in=first_count(orders, first, second),
    )


def first_count(orders: Iterable[Sequence[str]], first: str, second: str) -> tuple[int, int]:
    """Return in how many blocks `first` came before `second`, and how many had both; of each block
    the order of what ran in it is given."""
    both = [order for order in orders if first in order and second in order]
    return sum(order.index(first) < order.index(second) for order in both), len(both)


def judge_interaction(
    comparison: Comparison, case: str, workers: int, pairs: Sequence[Verdict]
) -> list[Verdict]:
    """Return the verdict on the interaction of engine and transport: nothing without a square whose
    corners the judged pairs connect, since only of these it is known that nothing else differs."""
    corners = comparison.square
    sides = [pair for pair in pairs if {pair.first, pair.second} <= {*corners.values()}]
    reached = {pair.first for pair in sides[:1]}
    for pair in sides * len(sides):
        if reached & {pair.first, pair.second}:
            reached |= {pair.first, pair.second}
    if not corners or len(reached) < len(corners):
        return []
    a, b, c, d = corners.values()
    (engine, transport), (other_engine, _), (_, other_transport), _ = corners
    ratio = f"{ENGINES[engine]} / {ENGINES[other_engine]}"
    verdict = Verdict(
        case=case,
        workers=workers,
        first=f"{a}/{b}",
        second=f"{c}/{d}",
        first_label=f"the ratio {ratio} over {transport}",
        second_label=f"that over {other_transport}",
        speed=None,
        cpu=None,
        differences=tuple({f.field: f for pair in sides for f in pair.differences}.values()),
        missing_blocks=(),
        equal_weights=(),
        loss_gap=None,
        compared="engine and transport",
        is_null_test=False,
        is_interaction=True,
        margin=comparison.plan["margin"],
    )
    if verdict.differences:
        return [verdict]
    verdict = with_speed(verdict, comparison, {a: 1, b: -1, c: -1, d: 1})
    return [replace(verdict, cpu=None)]  # which nobody asks of a ratio of ratios


def correction_text(comparison: Comparison, verdicts: Sequence[Verdict]) -> str:
    """Say how this report corrects for its number of verdicts, and for having been extended."""
    parts = []
    percent = f"{100 * (1 - comparison.confidence):.3g}"
    family = max((verdict.family for verdict in verdicts), default=0)
    if family > 1:
        parts.append(
            f"Decisions on {family} verdicts are corrected by Holm's method: in all of them "
            f"together a difference that is none is named with a probability of at most {percent} "
            "%, and so is “equal” said of what is not. Each interval is for its own ratio alone."
        )
    if times := len(comparison.plan["extensions"]):
        often = {1: "once", 2: "twice"}.get(times, f"{times} times")
        parts.append(
            f"This comparison was extended {often}, after its report could be read: its intervals "
            f"are of {100 * comparison.confidence:.4g} % each. Each look may err half as often as "
            "the one before, so that all looks together err in less than 10 %, however often it "
            "is extended."
        )
    return " ".join(parts)


def largest_loss_gap(pairs: Iterable[tuple[RunRecord, RunRecord]]) -> LossGap | None:
    """Find where two runs' training losses are farthest apart, over the steps both have."""
    gap = None
    for a, b in pairs:
        losses = {line.step: line.loss for line in b.steps}
        steps = [line for line in a.steps if line.step in losses]
        for line in steps:
            difference = abs(line.loss - losses[line.step])
            # `not <=` so that a loss that became NaN counts as the largest gap, not as none
            if gap is None or not difference <= gap.largest:
                gap = LossGap(difference, a.block, line.step, steps[-1].step)
    return gap
