"""What to take: one line for each question of a plan, with the bound of what it rests on."""

from collections.abc import Sequence

from compare.evidence.records import Comparison
from compare.evidence.verdicts import Verdict
from compare.evidence.words import bound_text, count, digits, ratio_text


def recommendations(comparison: Comparison, verdicts: Sequence[Verdict]) -> list[str]:
    """Return a line for each case, number of workers, and group of configurations that verdicts
    connect: nothing is said of two that no verdict compares."""
    places = dict.fromkeys((verdict.case, verdict.workers) for verdict in verdicts)
    lines = []
    for case, workers in places:
        at = f"{case}, {count(workers, 'worker')}" if case else f"At {count(workers, 'worker')}"
        found = [
            verdict
            for verdict in verdicts
            if (verdict.case, verdict.workers) == (case, workers)
            and not (verdict.is_null_test or verdict.is_interaction or verdict.speed is None)
        ]
        for group in connected(found):
            if text := recommend(group, comparison.plan["configurations"]):
                lines.append(f"{at}: {text}" if len(places) > 1 else text)
    return lines


def connected(verdicts: Sequence[Verdict]) -> list[list[Verdict]]:
    """Part verdicts into groups that share no configuration."""
    groups: list[list[Verdict]] = []
    for verdict in verdicts:
        pair = {verdict.first, verdict.second}
        same = [g for g in groups if any(pair & {v.first, v.second} for v in g)]
        groups = [group for group in groups if group not in same]
        groups.append([*(one for group in same for one in group), verdict])
    return groups


def recommend(verdicts: Sequence[Verdict], order: Sequence[str]) -> str:
    """Say which configuration no other one beats, and what that rests on; empty if nothing is
    decided."""
    labels = {v.first: v.first_label for v in verdicts}
    labels |= {v.second: v.second_label for v in verdicts}
    decided = [verdict for verdict in verdicts if verdict.decision in ("faster", "slower")]
    beaten = {v.second if v.decision == "faster" else v.first for v in decided}
    left = [name for name in order if name in labels and name not in beaten]
    among = [verdict for verdict in verdicts if {verdict.first, verdict.second} <= set(left)]
    wins = [
        win_text(verdict, labels, name, many=len(left) > 1)
        for name in left
        for verdict in decided
        if name in (verdict.first, verdict.second)
    ]
    named, rest = " or ".join(labels[name] for name in left), "; ".join(["", *wins])
    if not left:
        return "No recommendation: each one is slower than another."
    if not among:  # a single one, or such as nobody compared with each other
        return f"Take {named}: {'; '.join(wins)}."
    widest = max((v.speed for v in among if v.speed), key=lambda speed: speed.bound)
    if all(verdict.decision == "equal" for verdict in among):
        return f"Take either, {named}: equal within {bound_text(widest)}{rest}."
    if widest.low is None or not wins:
        return ""  # the verdict's own sentence says all that is known
    return f"Not decided: {named}; they differ by at most {bound_text(widest)}{rest}."


def win_text(verdict: Verdict, labels: dict[str, str], winner: str, many: bool) -> str:
    """Say how much faster the winner of a verdict is, with its interval."""
    assert verdict.speed is not None
    is_first = winner == verdict.first
    speed = verdict.speed if is_first else verdict.speed.inverse()
    loser = labels[verdict.second if is_first else verdict.first]
    who = f"{labels[winner]} " if many else ""
    low, high = (f"{bound:.{digits(speed)}f}" for bound in (speed.low, speed.high))
    return f"{who}{ratio_text(speed)} times as fast as {loser} ({low} to {high})"
