"""Findings on accuracy in sentences."""

import math

from compare.evidence.accuracy import AccuracyVerdict
from compare.evidence.judgement import Obstacle
from compare.evidence.verdicts import NotReached
from compare.evidence.words import count, place_text, points_text
from compare.page.sentences import failed_text, said
from compare.plan.blocks import MIN_BLOCKS

CLAIMS = {
    "identical": "{both} ended with the same top-1 in each of {seeds}, as their weights are "
    "identical: there is nothing to test",
    "equal": "{both} are equally accurate within {bound:.2f} points of top-1",
    "higher": "{first} ended {mean:.2f} points of top-1 above {second}",
    "lower": "{second} ended {mean:.2f} points of top-1 above {first}",
    "undecided": "it is undecided whether {both} are equally accurate",
}
NO_VERDICT = {
    Obstacle.OTHER_WORK: "no verdict on the accuracy of {both}: the runs differ in more than the "
    "plan varies",
    Obstacle.FAILED: "no verdict on the accuracy of {both}: {failed}",
    Obstacle.ENDED_EARLY: "the final accuracies of {both} are not compared: trainings ended when "
    "they had reached {accuracies} (--desired-acc)",
    Obstacle.NO_BLOCKS: "no verdict on the accuracy of {both}: no seed was completed by both",
    Obstacle.UNFINISHED: "nothing is decided on the accuracy of {both} yet",
    Obstacle.FEW_BLOCKS: "nothing is decided on the accuracy of {both}: an interval needs "
    f"{MIN_BLOCKS} seeds",
}


def accuracy_claim(verdict: AccuracyVerdict) -> str:
    """Return a verdict on accuracy in words, with the labels of both sides."""
    both, points = f"{verdict.first_label} and {verdict.second_label}", verdict.points
    if verdict.obstacle:
        return NO_VERDICT[verdict.obstacle].format(
            both=both,
            failed=failed_text(verdict),
            accuracies=" or ".join(f"{one:g} %" for one in verdict.ended_at),
        )
    assert points is not None  # else there is an obstacle
    return CLAIMS[verdict.decision].format(
        both=both,
        first=verdict.first_label,
        second=verdict.second_label,
        seeds=count(verdict.seeds, "seed"),
        mean=abs(points.mean),
        bound=math.ceil(100 * (abs(points.mean) + (points.half_width or 0)) - 1e-9) / 100,
    )


def accuracy_sentence(verdict: AccuracyVerdict) -> str:
    """Return a verdict on accuracy as a sentence with its figures."""
    text, points = accuracy_claim(verdict), verdict.points
    if points is not None and points.ends and not verdict.is_exact:
        low, high = points.ends
        text += (
            f" ({verdict.first_label} − {verdict.second_label}: {points_text(points.mean)} points, "
            f"{100 * points.confidence:.4g} % interval {points_text(low)} to {points_text(high)}, "
            f"{count(verdict.seeds, 'seed')}, paired; equal means within {verdict.margin:g})"
        )
    return said(verdict, text)


def not_reached_text(run: NotReached) -> str:
    """Say how far a training came that did not reach the accuracy."""
    best = math.floor(100 * run.best_top1 + 1e-9) / 100  # never rounded up to the accuracy
    return (
        f"{place_text(run.case, run.workers)}, block {run.block}, seed {run.seed}: "
        f"{run.configuration} did not reach {run.target:g} % in {run.epochs:.3g} epochs (at most "
        f"{best:.2f} %): its time to it is more than {run.seconds:,.0f} s"
    )
