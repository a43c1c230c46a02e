"""Findings in sentences: verdicts, goals, and how several of them are corrected."""

import math
import re
from collections.abc import Iterable, Sequence

from compare.evidence.accuracy import AccuracyVerdict
from compare.evidence.equality import OF_SCRIPT
from compare.evidence.goals import Goal
from compare.evidence.judgement import Obstacle
from compare.evidence.paired import Estimate
from compare.evidence.record import Record
from compare.evidence.verdicts import DIFFERENT, Verdict
from compare.evidence.words import (
    SHARED_GPU,
    count,
    difference_text,
    digits,
    percent_text,
    place_text,
    points_text,
    ratio_text,
)
from compare.plan.blocks import MIN_BLOCKS
from recipe.record.schema import rate_text

CLAIMS = {
    "faster": "{first} trained {ratio} times as fast as {second}",
    "slower": "{second} trained {inverse} times as fast as {first}",
    "equal": "{first} and {second} are tied: equally fast within {bound}",
    "undecided": "it is undecided: {first} is between {low} and {high} times as fast as {second}",
}
OF_ITSELF = {
    "faster": "a difference was shown between {first} and itself",
    "slower": "a difference was shown between {first} and itself",
    "equal": "no difference was shown between {first} and itself, as it should be: equal within "
    "{bound}",
    "undecided": "no difference was shown between {first} and itself, as it should be",
}
TO_ACCURACY = {
    "faster": "{first} reached {target} top-1 {ratio} times as fast as {second}",
    "slower": "{second} reached {target} top-1 {inverse} times as fast as {first}",
    "equal": "{first} and {second} are tied: they reached {target} top-1 equally fast within "
    "{bound}",
    "undecided": "it is undecided which reached {target} top-1 sooner: {first} did so between "
    "{low} and {high} times as fast as {second}",
}
WITH_DELAY = {
    "faster": "a delay of {delay} was found in {first}",
    "undecided": "a delay of {delay} was not found in {first}",
}
NO_VERDICT = {
    Obstacle.OTHER_WORK: "no verdict on {both}: the runs differ in more than the plan varies",
    Obstacle.SHARED_GPU: f"no verdict on the speeds of {{both}}: {SHARED_GPU}",
    Obstacle.NOT_REACHED: "no ratio of times to {target} top-1 between {both}: {unreached}",
    Obstacle.NO_BLOCKS: "no verdict on {both}: no block was completed by both",
    Obstacle.UNFINISHED: "nothing is decided between {both} yet",
    Obstacle.FEW_BLOCKS: f"nothing is decided between {{both}}: an interval needs {MIN_BLOCKS} "
    "blocks",
}
NO_GOAL_VERDICT = {
    Obstacle.OTHER_WORK: "no verdict: {differences}",
    Obstacle.SHARED_GPU: f"no verdict: {SHARED_GPU}",
    Obstacle.FAILED: "no verdict: {failed}",
    Obstacle.ENDED_EARLY: "no verdict: --desired-acc ended the trainings",
    Obstacle.NO_BLOCKS: f"an interval needs {MIN_BLOCKS} blocks",
    Obstacle.UNFINISHED: "not finished",
    Obstacle.FEW_BLOCKS: f"an interval needs {MIN_BLOCKS} blocks",
}
UNFIT = (
    ". This machine or this plan is not fit to measure differences of {difference} (chance alone "
    "does this in one null test of twenty: run it again)"
)
NOT_FOUND = (
    ". This interval should contain the delay and exclude 1; by chance alone it fails to in one "
    "null test of twenty, and more often if it is wide: run it again, or for longer"
)


# The verdicts.


def sentence(verdict: Verdict) -> str:
    """Return a verdict as a sentence with its figures, or the reason why there is none."""
    text, speed = claim(verdict), verdict.speed
    if speed is None:
        return said(verdict, text)
    blocks = count(speed.blocks, "block" if verdict.target_top1 is None else "seed")
    if verdict.decision in DIFFERENT and not verdict.is_null_test:  # the ratio is in the claim
        shown = speed.inverse() if verdict.decision == "slower" else speed
        return said(verdict, f"{text}, {interval_text(shown)}, {blocks}")
    figures = filter(None, [f"speed ratio {ratio_text(speed)}", interval_text(speed), blocks])
    told = f"{text} ({', '.join(figures)})"
    return said(verdict, f"{told}{remark(verdict, speed)}")


def said(verdict: Verdict | AccuracyVerdict, text: str, is_placed: bool = True) -> str:
    """Return a text as a sentence, by default with the place that it is about."""
    place = place_text(*verdict.place)
    if is_placed and verdict.case:
        return f"{place}: {text}."
    if is_placed and verdict.workers:
        return f"At {place} {text}."
    return capitalised(f"{text}.", [verdict])


def capitalised(text: str, verdicts: Iterable[Verdict | AccuracyVerdict]) -> str:
    """Return a text with a capital first letter; not if a user's own name stands there."""
    own = {
        label
        for verdict in verdicts
        if not verdict.workers
        for label in (verdict.first_label, verdict.second_label)
    }
    begins_with_name = any(re.match(rf"{re.escape(label)}(?![\w-])", text) for label in own)
    return text if begins_with_name else f"{text[0].upper()}{text[1:]}"


def claim(verdict: Verdict) -> str:
    """Return a verdict in words, with the labels of both sides."""
    speed, target = verdict.speed, f"{verdict.target_top1 or 0:g} %"
    if verdict.obstacle:
        return NO_VERDICT[verdict.obstacle].format(
            both=f"{verdict.first_label} and {verdict.second_label}",
            target=target,
            unreached=unreached_text(verdict),
        )
    assert speed is not None and speed.ends is not None  # else there is an obstacle
    low, high = speed.ends
    claims = OF_ITSELF if verdict.is_null_test else CLAIMS
    claims = WITH_DELAY if verdict.delay is not None else claims
    claims = TO_ACCURACY if verdict.target_top1 is not None else claims
    return claims[verdict.decision].format(
        first=verdict.first_label,
        second=verdict.second_label,
        ratio=ratio_text(speed),
        inverse=ratio_text(speed.inverse()),
        low=f"{low:.{digits(speed)}f}",
        high=f"{high:.{digits(speed)}f}",
        bound=bound_text(speed),
        delay=percent_text(verdict.delay or 0),
        target=target,
    )


def unreached_text(verdict: Verdict) -> str:
    """Say with which seeds the trainings of a pair did not reach the accuracy, or failed."""
    failed = [failed_text(verdict)] if verdict.failed else []
    labels = {verdict.first: verdict.first_label, verdict.second: verdict.second_label}
    seeds = {
        name: [str(run.seed) for run in verdict.unreached if run.configuration == name]
        for name in labels
    }
    if verdict.unreached and seeds[verdict.first] == seeds[verdict.second]:
        unreached = [f"neither of them reached it with {seeds_text(seeds[verdict.first])}"]
    else:
        unreached = [
            f"{label} did not reach it with {seeds_text(seeds[name])}"
            for name, label in labels.items()
            if seeds[name]
        ]
    return "; ".join([*unreached, *failed])


def failed_text(verdict: Verdict | AccuracyVerdict) -> str:
    """Say which trainings of a pair failed."""
    labels = {verdict.first: verdict.first_label, verdict.second: verdict.second_label}
    return "; ".join(
        f"the training of {labels[run.configuration]} with seed {run.seed} failed"
        for run in verdict.failed
    )


def seeds_text(seeds: Sequence[str]) -> str:
    return f"seed{'' if len(seeds) == 1 else 's'} {', '.join(seeds)}"


def remark(verdict: Verdict, speed: Estimate) -> str:
    """Return what follows the claim of a null test that failed: what it means, what to do."""
    if not verdict.is_null_test or verdict.obstacle:
        return ""
    if verdict.delay is not None:
        return NOT_FOUND if verdict.decision == "undecided" else ""
    difference = percent_text(max(speed.ratio, 1 / speed.ratio) - 1)
    return UNFIT.format(difference=difference) if verdict.decision in DIFFERENT else ""


def below(verdict: Verdict) -> list[str]:
    """Return the lines below a verdict: in what its runs differ, and what supports it."""
    return [*map(difference_text, verdict.differences), *support(verdict)]


def support(verdict: Verdict) -> list[str]:
    """Return what supports a verdict: whether both sides did the same training, and the ratio of
    their CPU times (a separate finding: the slower side often computes longer)."""
    lines = [equal_work_text(verdict)] if verdict.equal_work else []
    if (verdict.unreached or verdict.failed) and verdict.speed is not None:
        lines.append(
            f"{said(verdict, unreached_text(verdict), is_placed=False)} Both are the same "
            "training, bit by bit, so the other seeds tell the ratio."
        )
    if not all(verdict.equal_weights):
        equal, blocks = sum(verdict.equal_weights), count(len(verdict.equal_weights), "block")
        lines.append(
            f"The final weights are bit-equal in only {equal} of {blocks}: compare/parity.py "
            "shows where they diverge."
        )
    if verdict.cpu is not None and verdict.is_finished:
        used = (
            f"{verdict.first_label} used {ratio_text(verdict.cpu)} times as much CPU time per "
            f"{verdict.unit.removesuffix('s')} as {verdict.second_label}"
        )
        finding = ", ".join(filter(None, [used, interval_text(verdict.cpu)]))
        lines.append(said(verdict, finding, is_placed=False))
    return lines


def equal_work_text(verdict: Verdict) -> str:
    """Say whether two scripts of a user's own do equal work, or why that is not shown, and in what
    else they differ; empty for trainers."""
    work = verdict.equal_work
    if work is None:
        return ""
    number = count(work.blocks, "block")
    text = f"Equal work: after the first steps both had bit-equal weights in {number}."
    if not math.isclose(*work.step_sizes, rel_tol=0.001):
        sizes = zip(work.step_sizes, (verdict.first, verdict.second), strict=True)
        of_each = [f"{size:,.4g} {verdict.unit} in all ranks of {name}" for size, name in sizes]
        text = f"Equal work is not shown: a step has {', and '.join(of_each)}."
    elif work.silent:
        text = (
            f"Equal work is not shown: {' and '.join(work.silent)} gave no digest of weights; "
            "give one by Side(weights=model.state_dict)."
        )
    elif work.equal_blocks < work.blocks:
        text = (
            "Equal work is not shown: after the first steps both had bit-equal weights in only "
            f"{work.equal_blocks} of {number}."
        )
    # Where their code is, and its digests, the page shows.
    differ = [difference_text(fact) for fact in work.varied if fact.field not in OF_SCRIPT]
    return f"{text} They differ in {' and in '.join(differ)}." if differ else text


def correction_text(
    record: Record,
    verdicts: Sequence[Verdict],
    times: Sequence[Verdict] = (),
    accuracies: Sequence[AccuracyVerdict] = (),
) -> str:
    """Say how the report corrects for several verdicts of a kind (on speed, on times to an
    accuracy, on final accuracies), and for extensions of the measurement."""
    parts = []
    percent = f"{100 * (1 - record.confidence):.3g}"
    kinds = {"": verdicts, " on times to the accuracy": times, " on accuracy": accuracies}
    families = {
        kind: max((finding.family for finding in findings), default=0)
        for kind, findings in kinds.items()
    }
    corrected = [f"{family} verdicts{kind}" for kind, family in families.items() if family > 1]
    if corrected:
        each = ", each kind by itself" if len(corrected) > 1 else ""
        parts.append(
            f"The decisions of {' and of '.join(corrected)} are corrected by Holm's method{each}: "
            f"the probability of any false difference among them is at most {percent} %, and so is "
            "that of any false “equal”. Each interval covers its own ratio alone, without this "
            "correction: it may exclude 1, or lie within the margin, although nothing is decided."
        )
    if record.extensions:
        parts.append(
            f"This comparison was extended {count(record.extensions, 'time')} after its report "
            "could be read, so each of its intervals has a confidence of "
            f"{100 * record.confidence:.4g} %. Each look at the figures may err half as often as "
            "the one before: all looks together err in less than 10 % of comparisons, if each end "
            "was set before its figures could be seen."
        )
    return " ".join(parts)


# The goals.


def goal_verdict(goal: Goal) -> str:
    """Say whether a goal is reached, or why that is not judged."""
    if goal.obstacle is None:
        return goal.decision
    return NO_GOAL_VERDICT[goal.obstacle].format(
        differences="; ".join(map(difference_text, goal.differences)),
        failed=failed_text(goal.accuracy) if goal.accuracy else "",
    )


def goal_sides(goal: Goal) -> str:
    """Return what a goal is about: a side, or two and how they are compared."""
    if goal.accuracy is not None:
        return f"top-1 of {goal.name.replace(':', ' − ')}"
    return goal.name.replace(":", " / ")


def goal_figure(goal: Goal, value: float) -> str:
    """Return a ratio, or a speed or a difference of top-1 with its unit."""
    if goal.accuracy is not None:
        return f"{points_text(value)} {goal.unit}"
    return f"{rate_text(value)} {goal.unit}" if goal.unit else f"{value:.3f}"


# The intervals.


def interval_text(estimate: Estimate) -> str:
    """Return the interval in words; empty without one."""
    ends, percent = ends_text(estimate), f"{100 * estimate.confidence:.4g}"
    return ends and f"{percent} % interval {ends}"


def ends_text(estimate: Estimate) -> str:
    """Return the ends of the interval; empty without one."""
    if estimate.low is None:
        return ""
    places = digits(estimate)
    return f"{estimate.low:.{places}f} to {estimate.high:.{places}f}"


def bound_text(estimate: Estimate) -> str:
    """Print the largest difference that an interval allows, rounded up."""
    percent = 100 * estimate.bound
    tenths = math.ceil(10 * percent - 1e-9) / 10
    return f"{tenths:.1f} %" if tenths < 10 else f"{math.ceil(percent)} %"
