"""Verdicts: which of two configurations is faster, within a case and a number of workers."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from compare.evidence.equality import Fact, compare_place, compared_text
from compare.evidence.paired import CONFIDENCE, MIN_BLOCKS, Estimate, estimate_logs
from compare.evidence.records import ENGINES, Comparison, RunRecord
from compare.evidence.stopping import minutes_to_show
from compare.evidence.turns import Turn, estimate_contrast, throughput
from compare.evidence.words import (
    bound_text,
    count,
    interval_text,
    label_of,
    percent_text,
    ratio_text,
)


@dataclass(frozen=True, kw_only=True)
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
    compared: str  # what the plan has differ between the two, in words
    differences: tuple[Fact, ...]  # that forbid a verdict
    measured_by: str  # "turns" or "runs": where speed and CPU time come from
    margin: float  # within which "equal" is said
    is_null_test: bool = False  # both are the same: a difference would be the machine's
    is_interaction: bool = False
    speed: Estimate | None = None  # first / second, images a second
    cpu: Estimate | None = None  # first / second, CPU time an image
    equal_weights: tuple[bool, ...] = ()  # of the full runs, block by block
    loss_gap: str = ""  # where the training losses are farthest apart, of unequal weights
    decision: str = "undecided"  # "faster", "slower", "equal", "undecided"; see `decided`
    family: int = 1  # verdicts of the report that Holm's correction is over
    first_in: tuple[int, int] = (0, 0)  # in how many of how many blocks `first` began
    block_seconds: float | None = None  # that a block of turns usually takes; None: not known

    @property
    def corrected_half_width(self) -> float:
        """The half-width, in proportion, of the interval that the first step of Holm's method asks
        for; infinite without an interval."""
        if self.speed is None or self.speed.low is None:
            return math.inf
        return self.speed.half_width(1 - (1 - self.speed.confidence) / self.family)

    def sentence(self) -> str:
        """Say the verdict, or why there is none."""
        workers = count(self.workers, "worker")
        at = f"{self.case}, {workers}:" if self.case else f"At {workers}"
        both, speed = f"{self.first_label} and {self.second_label}", self.speed
        if self.differences:
            return f"{at} no verdict on {both}: the runs differ in more than {self.compared}."
        if speed is None:
            what = "turns" if self.measured_by == "turns" else "a complete run"
            return f"{at} no verdict: no block holds {what} of both {both}."
        times = f"{self.first_label} trained {ratio_text(speed)} times as fast as"
        if self.is_interaction:
            times = f"{self.first_label} is {ratio_text(speed)} times"
        blocks = count(speed.blocks, "block")
        if speed.low is None:
            return (
                f"{at} {times} {self.second_label} in {blocks}: too few for an interval, which "
                f"needs {MIN_BLOCKS}, so nothing is decided."
            )
        figures, is_decided = f"{interval_text(speed)}, {blocks}", self.decision in DIFFERENT
        if is_decided and not self.is_null_test:
            return f"{at} {times} {self.second_label}, {figures}."
        ratio = f"{'' if self.is_interaction else 'speed '}ratio {ratio_text(speed)}, {figures}"
        bound = bound_text(speed)
        if self.is_null_test and is_decided:
            percent = percent_text(max(speed.ratio, 1 / speed.ratio) - 1)
            return (
                f"{at} a difference was shown between {self.first_label} and itself: {ratio}. This "
                f"machine or this plan is not fit to tell differences of {percent} (by chance "
                "alone this comes about in one null test of twenty: run it again)."
            )
        if self.is_null_test:
            is_equal = self.decision == "equal"
            within = "equal within" if is_equal else "it differs from itself by at most"
            return (
                f"{at} no difference was shown between {self.first_label} and itself, as it should "
                f"be: {within} {bound}, {ratio}."
            )
        if self.decision == "equal":
            return f"{at} {both} are equal within {bound}: {ratio}."
        return (
            f"{at} not decided between {both}: the difference is at most {bound} either way "
            f"({ratio}){self.open_text(speed)}."
        )

    def open_text(self, speed: Estimate) -> str:
        """Explain an interval that would decide if it were the only one, and say how much longer a
        measurement would show a difference of the margin's size, if that is known."""
        text, margin = "", percent_text(self.margin)
        alone = ["a difference"] * speed.shows_difference
        alone += [f"that they are equal within {margin}"] * (speed.bound <= self.margin)
        if alone:
            shown = " and ".join(alone)
            text = f"; by itself it would show {shown}, among {self.family} verdicts it does not"
        if self.block_seconds is None:
            return text
        more = minutes_to_show(speed, self.margin, self.block_seconds, self.family)
        if not more:
            return text
        minutes = count(max(1, round(more)), "more minute")
        return f"{text}; about {minutes} would show a difference of {margin}"

    def support(self) -> list[str]:
        """Say what supports a verdict: whether both did the same training, their CPU time (a
        finding of its own: who takes longer often computes longer), and who began how often."""
        lines = []
        if self.equal_weights:
            equal, blocks = sum(self.equal_weights), count(len(self.equal_weights), "block")
            told = f"{'' if all(self.equal_weights) else 'only '}{equal} of {blocks}"
            lines.append(f"Final weights bit-equal in {told}{self.loss_gap}.")
        if self.cpu is not None:
            interval = f", {interval_text(self.cpu)}" if self.cpu.low is not None else ""
            lines.append(
                f"{self.first_label} used {ratio_text(self.cpu)} times the CPU time per image of "
                f"{self.second_label}{interval}."
            )
        began, of = self.first_in
        if of and not self.is_interaction:
            lines.append(f"{self.first_label} was first in {began} of {count(of, 'block')}.")
        return lines


DIFFERENT = ("faster", "slower")
Facts = Mapping[tuple[str, int], Sequence[Fact]]  # by case and number of workers


def judge(comparison: Comparison, facts: Facts | None = None) -> list[Verdict]:
    """Return a verdict for each case, number of workers, and pair of configurations; where the
    configurations make a square, one on the interaction as well. `facts` are those of
    `compare_place`, for whoever has them already."""
    verdicts = []
    for case in comparison.cases:
        for workers in comparison.workers:
            found = (facts or {}).get((case, workers)) or compare_place(comparison, case, workers)
            differing = [fact for fact in found if not fact.is_same]
            pairs = [judge_pair(comparison, case, workers, p, differing) for p in comparison.pairs]
            verdicts += [*pairs, *judge_interaction(comparison, case, workers, pairs)]
    return decided(verdicts)


def decided(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Return the verdicts with their decisions, each of two kinds of error in all of them together
    rarer than 1 - CONFIDENCE: a false positive, and "equal" that is not.

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


def judge_pair(
    comparison: Comparison, case: str, workers: int, pair: tuple[str, str], facts: Iterable[Fact]
) -> Verdict:
    """Compare two configurations over the blocks in which both are complete."""
    first, second = pair
    runs, others = (
        {run.block: run for run in comparison.complete_runs((case, workers, name))} for name in pair
    )
    both = [(runs[block], others[block]) for block in sorted(runs.keys() & others.keys())]
    sides = {block.number for block in comparison.turn_blocks(case, workers)}
    measured = {a.block for a, _ in both}
    between = [fact.between(pair, sides if fact.is_of_sides else measured) for fact in facts]
    equal = tuple(a.summary.weights_sha256 == b.summary.weights_sha256 for a, b in both)
    unequal = [one for one, same in zip(both, equal, strict=True) if not same]
    verdict = Verdict(
        case=case,
        workers=workers,
        first=first,
        second=second,
        first_label=label_of(comparison, first),
        second_label=label_of(comparison, second),
        compared=compared_text(comparison, first, second),
        differences=confounders(between),
        measured_by=comparison.plan.measure,
        margin=comparison.plan.margin,
        is_null_test=comparison.plan.null,
        equal_weights=equal,
        loss_gap=loss_gap_text(unequal),
    )
    return with_speed(verdict, comparison, {first: 1, second: -1})


def confounders(facts: Iterable[Fact]) -> tuple[Fact, ...]:
    """Return those that forbid a verdict, each once."""
    return tuple({fact.field: fact for fact in facts if fact.is_confounder}.values())


def with_speed(verdict: Verdict, comparison: Comparison, powers: Mapping[str, int]) -> Verdict:
    """Return the verdict with the product of the configurations' speeds, each to its power, over
    the blocks that hold them all; as it is where differences forbid it."""
    if verdict.differences:
        return verdict
    first, second, *_ = powers
    place = (verdict.case, verdict.workers)
    seconds: list[float] = []
    if verdict.measured_by == "turns":
        blocks = comparison.turn_blocks(*place)
        both = [block for block in blocks if powers.keys() <= {*block.order}]
        orders: list[Sequence[str]] = [block.order for block in both]
        seconds = [block.measuring_seconds for block in both if block.seconds > 0]

        def estimate(
            of_turn: Callable[[Turn], float], of_run: Callable[[RunRecord], float]
        ) -> Estimate:
            return estimate_contrast(blocks, powers, of_turn, comparison.confidence)

    else:
        by_block: dict[int, dict[str, RunRecord]] = {}
        for run in comparison.complete:  # in the order in which they ran
            if (run.case, run.workers) == place and run.configuration in powers:
                by_block.setdefault(run.block, {})[run.configuration] = run
        whole = [runs for runs in by_block.values() if len(runs) == len(powers)]
        orders = [list(runs) for runs in whole]

        def estimate(
            of_turn: Callable[[Turn], float], of_run: Callable[[RunRecord], float]
        ) -> Estimate:
            logs = [
                math.fsum(power * math.log(of_run(runs[name])) for name, power in powers.items())
                for runs in whole
            ]
            return estimate_logs(logs, confidence=comparison.confidence)

    if not orders:
        return verdict
    return replace(
        verdict,
        speed=estimate(throughput, lambda run: run.summary.images_per_second),
        cpu=estimate(
            lambda turn: turn.cpu_seconds_per_image, lambda run: run.summary.cpu_seconds_per_image
        ),
        first_in=(sum(o.index(first) < o.index(second) for o in orders), len(orders)),
        block_seconds=median(seconds) if seconds else None,
    )


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
        compared="engine and transport",
        differences=confounders(fact for pair in sides for fact in pair.differences),
        measured_by=comparison.plan.measure,
        margin=comparison.plan.margin,
        is_interaction=True,
    )
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
            f"together a false positive has a probability of at most {percent} "
            "%, and so is “equal” said of what is not. Each interval is for its own ratio alone."
        )
    if times := len(comparison.plan.extensions):
        often = {1: "once", 2: "twice"}.get(times, f"{times} times")
        parts.append(
            f"This comparison was extended {often}, after its report could be read: its intervals "
            f"are of {100 * comparison.confidence:.4g} % each. Each look may err half as often as "
            "the one before, so that all looks together err in less than 10 %, however often it "
            "is extended."
        )
    return " ".join(parts)


def loss_gap_text(pairs: Sequence[tuple[RunRecord, RunRecord]]) -> str:
    """Say where two runs' training losses are farthest apart, over the steps that both have."""
    gaps = []
    for a, b in pairs:
        losses = {line.step: line.loss for line in b.steps}
        gaps += [
            (abs(line.loss - losses[line.step]), f"step {line.step} of {a.steps[-1].step}", a.block)
            for line in a.steps
            if line.step in losses
        ]
    if not gaps:
        return "; they have no training step in common" if pairs else ""
    # A loss that became NaN is the largest gap, not none.
    apart, step, block = max(gaps, key=lambda gap: (math.isnan(gap[0]), gap[0]))
    return f"; the training losses differ by at most {apart:.2g} ({step}, block {block})"
