"""What to take, in one line for each case and number of workers, with the bound of what it rests
on."""

from collections.abc import Sequence

from compare.evidence.records import Comparison
from compare.evidence.verdicts import Verdict
from compare.evidence.words import bound_text, count, digits, ratio_text


def recommendations(comparison: Comparison, verdicts: Sequence[Verdict]) -> list[str]:
    """Return a line for each case and number of workers of which something is decided."""
    places = dict.fromkeys((verdict.case, verdict.workers) for verdict in verdicts)
    lines = []
    for case, workers in places:
        here = [
            verdict
            for verdict in verdicts
            if (verdict.case, verdict.workers) == (case, workers)
            and not (verdict.is_null_test or verdict.is_interaction or verdict.speed is None)
        ]
        if text := recommend(here, comparison.plan["configurations"]):
            at = f"{case}, {count(workers, 'worker')}" if case else f"At {count(workers, 'worker')}"
            lines.append(f"{at}: {text}" if len(places) > 1 else text)
    return lines


def recommend(verdicts: Sequence[Verdict], order: Sequence[str]) -> str:
    """Say which configuration no other one beats, and what that rests on."""
    labels = {v.first: v.first_label for v in verdicts}
    labels |= {v.second: v.second_label for v in verdicts}
    beaten = {v.second if v.decision == "faster" else v.first for v in decided(verdicts)}
    left = [name for name in order if name in labels and name not in beaten]
    among = [v for v in verdicts if v.first in left and v.second in left]
    if not left or not (beaten or among):
        return ""
    wins = [
        win_text(verdict, labels, name, many=len(left) > 1)
        for name in left
        for verdict in decided(verdicts)
        if name in (verdict.first, verdict.second)
    ]
    named = " or ".join(labels[name] for name in left)
    rest = f"; {'; '.join(wins)}" if wins else ""
    if len(left) == 1:
        return f"Take {named}: {'; '.join(wins)}."
    if among and all(verdict.decision == "equal" for verdict in among):
        bound = max((v.speed for v in among if v.speed), key=lambda speed: speed.bound)
        return f"Take either, {named}: equal within {bound_text(bound)}{rest}."
    if not among:  # nobody asked which of these is faster
        return f"Take {named}{rest.replace(';', ':', 1)}."
    return f"Take {named}: which of them is faster is not decided{rest}."


def decided(verdicts: Sequence[Verdict]) -> list[Verdict]:
    return [verdict for verdict in verdicts if verdict.decision in ("faster", "slower")]


def win_text(verdict: Verdict, labels: dict[str, str], winner: str, many: bool) -> str:
    """Say how much faster the winner of a verdict is, with its interval."""
    assert verdict.speed is not None
    is_first = winner == verdict.first
    speed = verdict.speed if is_first else verdict.speed.inverse()
    loser = labels[verdict.second if is_first else verdict.first]
    who = f"{labels[winner]} " if many else ""
    low, high = (f"{bound:.{digits(speed)}f}" for bound in (speed.low, speed.high))
    return f"{who}{ratio_text(speed)} times as fast as {loser} ({low} to {high})"
