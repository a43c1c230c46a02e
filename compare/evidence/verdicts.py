"""Verdicts: which of two configurations is faster, within a case and a number of workers."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from compare.evidence.equality import difference_text
from compare.evidence.group import Group
from compare.evidence.judgement import Finding, find, holm, judged_together
from compare.evidence.labels import labels_of
from compare.evidence.paired import MIN_BLOCKS, Estimate
from compare.evidence.record import Record
from compare.evidence.turns import estimate, work_per_cpu_second
from compare.evidence.words import (
    bound_text,
    count,
    interval_text,
    percent_text,
    place_text,
    ratio_text,
)

DIFFERENT = ("faster", "slower")
TIMES_AS_FAST = "times as fast as"
CLAIMS = {
    "faster": f"{{first}} trained {{ratio}} {TIMES_AS_FAST} {{second}}",
    "slower": f"{{second}} trained {{inverse}} {TIMES_AS_FAST} {{first}}",
    "equal": "{first} and {second} are tied: equally fast within {bound}",
    "undecided": "nothing is decided between {first} and {second}: they differ by at most {bound} "
    "either way",
}
OF_ITSELF = {
    "faster": "a difference was shown between {first} and itself",
    "slower": "a difference was shown between {first} and itself",
    "equal": "no difference was shown between {first} and itself, as it should be: equal within "
    "{bound}",
    "undecided": "no difference was shown between {first} and itself, as it should be: it differs "
    "from itself by at most {bound}",
}
WITH_DELAY = {
    "faster": "a delay of {delay} was found in {first}",
    "undecided": "a delay of {delay} was not found in {first}",
}
UNFIT = (
    ". This machine or this plan is not fit to measure differences of {difference} (chance alone "
    "does this in one null test of twenty: run it again)"
)
NOT_FOUND = (
    ". This interval should contain the delay and exclude 1; by chance alone it fails to in one "
    "null test of twenty, and more often if it is wide: run it again, or for longer"
)


@dataclass(frozen=True, kw_only=True)
class Verdict(Finding):
    """The verdict on two configurations, in one case at one number of workers; its speed is that of
    the first / that of the second."""

    first: str
    second: str
    first_label: str
    second_label: str
    margin: float  # largest difference that counts as "equal": 0.03 is 3 %
    unit: str = "images"  # what speeds count, per second
    is_null_test: bool = False  # both sides are the same: any difference comes from the machine
    delay: float | None = None  # in a null test's control: the second's steps take this share more
    cpu: Estimate | None = None  # first / second, CPU time per image
    equal_weights: tuple[bool, ...] = ()  # of the full runs, block by block
    equal_work: str = ""  # for a user's own scripts: whether equal work is shown, in words
    decision: str = "undecided"  # "faster", "slower", "equal", "undecided"; see `decided`

    @property
    def is_judged(self) -> bool:
        """A null test's control tests the measurement, by a rule of its own: `finds_delay`."""
        return super().is_judged and self.delay is None

    @property
    def of(self) -> str:
        """What the ratio is of."""
        return f"{self.first_label} / {self.second_label}"

    def headline(self, is_placed: bool) -> str:
        """Return the verdict as one plain sentence, without its interval and number of blocks."""
        return self.said(self.claim(), is_placed)

    def sentence(self) -> str:
        """Return the verdict as a sentence with its figures, or the reason why there is none."""
        text, speed = self.claim(), self.speed
        if speed is None:
            return self.said(text)
        blocks = count(speed.blocks, "block")
        if f" {TIMES_AS_FAST} " in text:
            shown = speed.inverse() if self.decision == "slower" else speed
            return self.said(f"{text}, {interval_text(shown)}, {blocks}")
        figures = filter(None, [f"speed ratio {ratio_text(speed)}", interval_text(speed), blocks])
        return self.said(f"{text} ({', '.join(figures)}){self.remark(speed)}")

    def said(self, text: str, is_placed: bool = True) -> str:
        """Return a text as a sentence; a user's own name at its start keeps its first letter."""
        place = place_text(self.case, self.workers)
        if is_placed and (self.case or self.workers):
            return f"{place}: {text}." if self.case else f"At {place} {text}."
        is_name = not self.workers and text.startswith((self.first_label, self.second_label))
        return f"{text if is_name else text[0].upper() + text[1:]}."

    def claim(self) -> str:
        """Return the verdict in words, with the labels of both sides."""
        speed, both = self.speed, f"{self.first_label} and {self.second_label}"
        if self.differences:
            return f"no verdict on {both}: the runs differ in more than the plan varies"
        if speed is None:
            return f"no verdict on {both}: no block was completed by both"
        if speed.low is None:
            return f"nothing is decided between {both}: an interval needs {MIN_BLOCKS} blocks"
        if not self.is_finished:
            return f"nothing is decided between {both} yet"
        claims = OF_ITSELF if self.is_null_test else CLAIMS
        claims = WITH_DELAY if self.delay is not None else claims
        return claims[self.decision].format(
            first=self.first_label,
            second=self.second_label,
            ratio=ratio_text(speed),
            inverse=ratio_text(speed.inverse()),
            bound=bound_text(speed),
            delay=percent_text(self.delay or 0),
        )

    def remark(self, speed: Estimate) -> str:
        """Return what follows the claim of a null test that failed: what it means, what to do."""
        if not self.is_null_test or not self.is_finished or speed.low is None:
            return ""
        if self.delay is not None:
            return NOT_FOUND if self.decision == "undecided" else ""
        difference = percent_text(max(speed.ratio, 1 / speed.ratio) - 1)
        return UNFIT.format(difference=difference) if self.decision in DIFFERENT else ""

    @property
    def finds_delay(self) -> bool:
        """Whether the interval contains the known delay and excludes 1."""
        if self.delay is None or not self.is_finished or self.differences or self.speed is None:
            return False
        low, high = self.speed.low or 0, self.speed.high or 0
        return 1 < low <= 1 + self.delay <= high

    def below(self) -> list[str]:
        """Return the lines below the verdict: in what its runs differ, and what supports it."""
        return [*map(difference_text, self.differences), *self.support()]

    def support(self) -> list[str]:
        """Return what supports the verdict: whether both sides did the same training, and the
        ratio of their CPU times (a separate finding: the slower side often computes longer)."""
        lines = [self.equal_work] if self.equal_work else []
        if not all(self.equal_weights):
            equal, blocks = sum(self.equal_weights), count(len(self.equal_weights), "block")
            lines.append(
                f"The final weights are bit-equal in only {equal} of {blocks}: compare/parity.py "
                "shows where they diverge."
            )
        if self.cpu is not None and self.is_finished:
            used = (
                f"{self.first_label} used {ratio_text(self.cpu)} times as much CPU time per "
                f"{self.unit.removesuffix('s')} as {self.second_label}"
            )
            finding = ", ".join(filter(None, [used, interval_text(self.cpu)]))
            lines.append(self.said(finding, is_placed=False))
        return lines


def judge(record: Record) -> list[Verdict]:
    """Return a verdict for each group and pair of configurations."""
    labels = labels_of(record)
    return decided(
        [
            judge_pair(record, group, pair, labels)
            for group in record.groups
            for pair in record.plan.pairs()
        ]
    )


def decided(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Return the verdicts with their decisions. In all of them together the probability of any
    false "faster" or "slower" is at most 1 - CONFIDENCE, and so is that of any false "equal".

    Holm's step-down test runs twice: over the hypotheses of no difference, and over those of a
    difference of the margin or more. It may reject both for a verdict whose difference is certain
    but too small to matter. The decision is then "equal", except in a null test, which looks for
    any difference.
    """
    judged, error = judged_together(verdicts)
    unequal = holm({i: speed.p_difference() for i, speed in judged.items()}, error)
    # Half the error: a single verdict is then "equal" if and only if its interval lies within the
    # margin.
    equal = holm(
        {i: speed.p_equality(verdicts[i].margin) for i, speed in judged.items()}, error / 2
    )
    with_decisions = []
    for index, verdict in enumerate(verdicts):
        decision = "undecided"
        if index in equal and not (verdict.is_null_test and index in unequal):
            decision = "equal"
        elif index in unequal:
            decision = "faster" if judged[index].ratio > 1 else "slower"
        elif verdict.finds_delay:
            decision = "faster"
        with_decisions.append(replace(verdict, decision=decision, family=len(judged) or 1))
    return with_decisions


def judge_pair(
    record: Record, group: Group, pair: tuple[str, str], labels: Mapping[str, str]
) -> Verdict:
    """Compare two configurations over the blocks in which both are complete. `labels`: of all
    configurations, by name."""
    first, second = pair
    plan, powers = record.plan, {first: 1, second: -1}
    verdict = Verdict(
        **vars(find(record, group, powers)),
        first=first,
        second=second,
        first_label=labels[first],
        second_label=labels[second],
        margin=plan.margin_of(pair),
        unit=record.unit,
        is_null_test=plan.null,
        delay=plan.delay if pair == plan.pairs()[-1] else None,
        equal_weights=equal_weights(group, pair),
        equal_work=equal_work_text(group, pair, record.unit) if plan.side else "",
    )
    if verdict.speed is None:
        return verdict
    work = estimate(group.blocks, powers, work_per_cpu_second, group.confidence)
    return replace(verdict, cpu=work.inverse())


def equal_weights(group: Group, pair: tuple[str, str]) -> tuple[bool, ...]:
    """Return whether the whole trainings of a pair ended with bit-equal weights, block by block."""
    weights = [
        {run.block: run.summary.weights_sha256 for run in group.complete_runs(name)}
        for name in pair
    ]
    both = sorted(weights[0].keys() & weights[1].keys())
    return tuple(weights[0][block] == weights[1][block] for block in both)


def interaction(record: Record, group: Group, verdicts: Iterable[Verdict]) -> Estimate | None:
    """Return how far engine and transport depend on each other: the engines' ratio over one
    transport divided by that over the other. None unless judged pairs that differ in nothing else
    connect all corners of a square: only for such pairs is it known that nothing else differs."""
    corners = [*record.square.values()]
    known = [{one.first, one.second} for one in verdicts if one.speed is not None]
    joined = {*corners[:1]}
    for _ in corners:
        joined = joined.union(*(pair for pair in known if pair & joined and pair <= {*corners}))
    if not corners or joined != {*corners}:
        return None
    powers = dict(zip(corners, (1, -1, -1, 1), strict=True))
    blocks = group.blocks_with(corners)
    return estimate(blocks, powers, confidence=group.confidence) if blocks else None


def correction_text(record: Record, verdicts: Sequence[Verdict]) -> str:
    """Say how the report corrects for several verdicts, and for extensions of the measurement."""
    parts = []
    percent = f"{100 * (1 - record.confidence):.3g}"
    family = max((verdict.family for verdict in verdicts), default=0)
    if family > 1:
        parts.append(
            f"The decisions of {family} verdicts are corrected by Holm's method: the probability "
            f"of any false difference among them is at most {percent} %, and so is that of any "
            "false “equal”. Each interval covers its own ratio alone, without this correction: it "
            "may exclude 1, or lie within the margin, although nothing is decided."
        )
    if times := record.extensions:
        parts.append(
            f"This comparison was extended {count(times, 'time')} after its report could be read, "
            f"so each of its intervals has a confidence of {100 * record.confidence:.4g} %. "
            "Each look at the figures may err half as often as the one before: all looks together "
            "err in less than 10 % of comparisons, if each end was set before its figures could "
            "be seen."
        )
    return " ".join(parts)


def equal_work_text(group: Group, pair: tuple[str, str], unit: str) -> str:
    """Say whether two scripts of a user's own do equal work, judged by the size of their steps and
    by the digests of weights that they give, and in what else they differ."""
    blocks = group.blocks
    digests = [[block.weights.get(name) for name in pair] for block in blocks]
    steps = [
        fmean(turn.images / block.steps[name] for block in blocks for turn in block.counted(name))
        for name in pair
    ]
    silent = [name for i, name in enumerate(pair) if any(both[i] is None for both in digests)]
    equal, number = sum(first == second for first, second in digests), count(len(digests), "block")
    reason = ""
    if not math.isclose(*steps, rel_tol=0.001):
        reason = "a step has " + ", and ".join(
            f"{number:,.4g} {unit} in all ranks of {name}"
            for number, name in zip(steps, pair, strict=True)
        )
    elif silent:
        reason = f"{' and '.join(silent)} gave no digest of weights; give one by "
        reason += "Side(weights=model.state_dict)"
    elif equal < len(digests):
        reason = f"after the first steps both had bit-equal weights in only {equal} of {number}"
    text = f"Equal work: after the first steps both had bit-equal weights in {number}."
    text = f"Equal work is not shown: {reason}." if reason else text
    differ = [difference_text(fact) for fact in group.facts_between(pair) if fact.is_varied]
    return f"{text} They differ in {' and in '.join(differ)}." if differ else text
