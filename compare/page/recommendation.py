"""What to take: one line for each question of a plan, with the bound of what it rests on."""

import math
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
    """Say which configuration to take, and what that rests on; empty if nothing is decided.

    To take are those that beat one and are beaten by none, and those that were compared with them;
    of others that none beats, only what is not known of them is said.
    """
    labels = {v.first: v.first_label for v in verdicts}
    labels |= {v.second: v.second_label for v in verdicts}
    decided = [verdict for verdict in verdicts if verdict.decision in ("faster", "slower")]
    winner_of = {id(v): v.first if v.decision == "faster" else v.second for v in decided}
    winners = set(winner_of.values())
    beaten = {name for v in decided for name in (v.first, v.second) if name != winner_of[id(v)]}
    unbeaten = [name for name in order if name in labels and name not in beaten]
    if not unbeaten:
        return "No recommendation: each one is slower than another."
    groups = connected([v for v in verdicts if {v.first, v.second} <= set(unbeaten)])
    among = [v for group in groups for v in group if not winners or winners & names_of(group)]
    taken = (winners & set(unbeaten)) | names_of(among)
    left = [name for name in unbeaten if name in taken]
    wins = [
        win_text(verdict, labels, name, many=len(left) > 1)
        for name in left
        for verdict in decided
        if name == winner_of[id(verdict)]
    ]
    open_ones = [
        open_text(verdict, labels, name)
        for name in unbeaten
        if name not in taken
        for verdict in verdicts
        if name in (verdict.first, verdict.second)
    ]
    named, rest = " or ".join(labels[name] for name in left), "; ".join(["", *wins, *open_ones])
    if not among:  # a single one, or such as nobody compared with each other
        apart = ", which were not compared" if len(left) > 1 else ""
        return f"Take {named}{apart}: {rest.removeprefix('; ')}." if left else ""
    pairs = {frozenset((verdict.first, verdict.second)) for verdict in among}
    is_whole = len(pairs) == math.comb(len(left), 2)
    widest = max((v.speed for v in among if v.speed), key=lambda speed: speed.bound)
    if all(verdict.decision == "equal" for verdict in among):
        each = "" if is_whole else "each compared pair is "
        return f"Take either, {named}: {each}equal within {bound_text(widest)}{rest}."
    if widest.low is None or not wins:
        return ""  # the verdict's own sentence says all that is known
    differ = "they differ" if is_whole else "each compared pair differs"
    return f"Not decided: {named}; {differ} by at most {bound_text(widest)}{rest}."


def names_of(verdicts: Sequence[Verdict]) -> set[str]:
    return {name for verdict in verdicts for name in (verdict.first, verdict.second)}


def open_text(verdict: Verdict, labels: dict[str, str], name: str) -> str:
    """Say what a verdict leaves open about a configuration that it does not decide on."""
    other = labels[verdict.second if name == verdict.first else verdict.first]
    if verdict.decision == "equal":
        assert verdict.speed is not None
        return f"{labels[name]} and {other} are equal within {bound_text(verdict.speed)}"
    return f"{labels[name]} is not decided against {other}"


def win_text(verdict: Verdict, labels: dict[str, str], winner: str, many: bool) -> str:
    """Say how much faster the winner of a verdict is, with its interval."""
    assert verdict.speed is not None
    is_first = winner == verdict.first
    speed = verdict.speed if is_first else verdict.speed.inverse()
    loser = labels[verdict.second if is_first else verdict.first]
    who = f"{labels[winner]} " if many else ""
    low, high = (f"{bound:.{digits(speed)}f}" for bound in (speed.low, speed.high))
    return f"{who}{ratio_text(speed)} times as fast as {loser} ({low} to {high})"
