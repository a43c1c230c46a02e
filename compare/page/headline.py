"""The whole result of a comparison in a few plain sentences, for who reads nothing else."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

from compare.evidence.goals import Goal
from compare.evidence.paired import MIN_BLOCKS, Estimate
from compare.evidence.verdicts import Verdict
from compare.evidence.words import count, place_text, ratio_text
from compare.page.sentences import (
    bound_text,
    claim,
    ends_text,
    goal_figure,
    goal_verdict,
    luck_text,
)

MOST_LISTED = 6  # findings that a few sentences can hold; of more, most are only counted
OF_ENGINES = "the ratio DDP / Horovod"  # begins the name of an interaction
DIFFERENT, EQUAL, UNDECIDED, UNFINISHED = "different", "equal", "undecided", "not finished"


def headline(verdicts: Sequence[Verdict], goals: Sequence[Goal]) -> list[str]:
    """Return the result in sentences. Of a pair that has a goal, the goal's verdict is told."""
    with_goals = {goal.name for goal in goals}
    pairs = [one for one in verdicts if f"{one.first}:{one.second}" not in with_goals]
    findings: list[Verdict | Goal] = [*goals, *pairs]
    is_placed = len({(one.case, one.workers) for one in findings}) > 1
    if {kind(one) for one in findings} == {UNFINISHED}:
        return ["Nothing is decided yet: the measurement is not finished."]
    if len(findings) > MOST_LISTED:
        sentences = counted(goals, pairs, is_placed)
    else:
        sentences = listed(goals, pairs, is_placed)
    # A user's own names keep their first letter.
    own = {name for one in pairs if not one.workers for name in (one.first_label, one.second_label)}
    return [
        text if text.startswith(tuple(own)) else f"{text[0].upper()}{text[1:]}"
        for text in sentences
    ]


def listed(goals: Sequence[Goal], pairs: Sequence[Verdict], is_placed: bool) -> list[str]:
    """Return a sentence with all that is decided, and one with the undecided pairs."""
    undecided = [one for one in pairs if kind(one) == UNDECIDED]
    others = [clause(one, is_placed) for one in pairs if one not in undecided]
    others = [*(goal_clause(goal, is_placed) for goal in goals), *others]
    sentences = [f"{'; '.join(others)}."] if others else []
    if undecided:
        number = f"{len(undecided)} of {count(len(pairs), 'pair')} " if len(pairs) > 1 else ""
        texts = [clause(one, is_placed) for one in undecided]
        sentences.append(f"{number}undecided: {'; '.join(texts)}.")
    return sentences


def counted(goals: Sequence[Goal], pairs: Sequence[Verdict], is_placed: bool) -> list[str]:
    """Return how many goals and pairs ended in which way, the largest difference, and the pair that
    is least known."""
    sentences = []
    for findings, noun in ((goals, "goal"), (pairs, "pair")):
        ways = ", ".join(f"{n} {way}" for way, n in Counter(map(kind, findings)).most_common())
        if ways:
            sentences.append(f"{count(len(findings), noun)}: {ways}.")

    def most(way: str, figure: Callable[[Estimate], float]) -> Iterator[str]:
        found = [(figure(one.speed), one) for one in pairs if one.speed and kind(one) == way]
        if found:
            yield clause(max(found, key=itemgetter(0))[1], is_placed)

    largest = most(DIFFERENT, lambda speed: abs(math.log(speed.ratio)))
    sentences += [f"the largest difference: {text}." for text in largest]
    widest = most(UNDECIDED, lambda speed: speed.relative_half_width)
    sentences += [f"the least known: {text}." for text in widest]
    return sentences


def kind(one: Verdict | Goal) -> str:
    """Return in a few words how a finding ended, as in "2 undecided"."""
    if one.differences:
        return "whose runs differ in more than the plan varies"
    if not one.is_finished:
        return UNFINISHED
    if one.speed is None or one.speed.low is None:
        return f"with fewer than {MIN_BLOCKS} blocks"
    if isinstance(one, Goal):
        return one.decision
    if one.delay is not None:
        return f"{'with' if one.decision == 'faster' else 'without'} the known delay"
    if one.decision in ("faster", "slower"):
        return DIFFERENT
    return "without a difference" if one.is_null_test else one.decision


def clause(verdict: Verdict, is_placed: bool) -> str:
    """Return a verdict with its interval as a part of a sentence."""
    speed, labels = verdict.speed, (verdict.first_label, verdict.second_label)
    place = place_text(verdict.case, verdict.workers)
    lead = f"at {place}{',' if verdict.case else ''} " if is_placed else ""
    way = kind(verdict)
    if speed is None or way not in (DIFFERENT, EQUAL, UNDECIDED) or verdict.is_null_test:
        shown = f" ({ends_text(speed)}){luck_text(speed)}" if speed and speed.low else ""
        return f"{lead}{claim(verdict)}{shown}"
    if verdict.decision == "slower":
        speed, labels = speed.inverse(), labels[::-1]
    over, first, second = shortened(*labels)
    lead += over
    ratio, remark = f"{ratio_text(speed)} ({ends_text(speed)})", luck_text(speed)
    if way == EQUAL:
        return f"{lead}{first} and {second} are equally fast within {bound_text(speed)}{remark}"
    if way == UNDECIDED:
        ratio = ends_text(speed)
        if speed.low and speed.high and not speed.low <= 1 <= speed.high:
            remark += f", before the correction for {verdict.family} verdicts"
    return f"{lead}{first} trained {ratio} times as fast as {second}{remark}"


def shortened(first: str, second: str) -> tuple[str, str, str]:
    """Return the transport that two labels share, as the begin of a sentence, and the labels
    without it; an empty text and the labels if they share none."""
    (one, _, over), (other, _, its) = (label.partition(" over ") for label in (first, second))
    return (f"over {over} ", one, other) if over and over == its else ("", first, second)


def headline_of_occasions(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return in a sentence what several occasions say together of each pair, of as many pairs as it
    can hold; "" without rows. `rows`: of `over_occasions`."""
    pairs = [row for row in rows if not row["first_label"].startswith(OF_ENGINES)]
    is_placed = len({(row["case"], row["workers"]) for row in pairs}) > 1
    texts = []
    for row in pairs[:MOST_LISTED]:
        place = f"at {place_text(row['case'], row['workers'])}, " if is_placed else ""
        speed, labels = row["pooled"], (row["first_label"], row["second_label"])
        if speed.high < 1:
            speed, labels = speed.inverse(), labels[::-1]
        over, first, second = shortened(*labels)
        figures, remark = f"{ratio_text(speed)} ({ends_text(speed)})", ""
        if speed.low <= 1:
            figures, remark = ends_text(speed), " (undecided)"
        texts.append(f"{place}{over}{first} trained {figures} times as fast as {second}{remark}")
    occasions = count(len(rows[0]["found"]) if rows else 0, "occasion")
    return f"Over {occasions}: {'; '.join(texts)}." if texts else ""


def goal_clause(goal: Goal, is_placed: bool) -> str:
    """Return a goal's verdict with its interval as a part of a sentence."""
    sides = goal.name.replace(":", " / ")
    place = f" at {place_text(goal.case, goal.workers)}" if is_placed else ""
    found = ""
    if goal.speed is not None and goal.speed.low and goal.speed.high:
        figures = (goal.speed.ratio, goal.speed.low, goal.speed.high)
        found = ", {} ({} to {})".format(*(goal_figure(goal, value) for value in figures))
    return f"goal {sides} ≥ {goal_figure(goal, goal.least)}{place}: {goal_verdict(goal)}{found}"
