"""The whole result of a comparison in a few plain sentences, for who reads nothing else."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from compare.evidence.accuracy import AccuracyVerdict
from compare.evidence.goals import Goal
from compare.evidence.judgement import UNDECIDED, Obstacle
from compare.evidence.paired import Estimate
from compare.evidence.verdicts import Verdict
from compare.evidence.words import count, place_text, ratio_text
from compare.page.accuracy import accuracy_claim
from compare.page.sentences import (
    capitalised,
    claim,
    ends_text,
    goal_figure,
    goal_sides,
    goal_verdict,
    said,
)
from compare.plan.blocks import MIN_BLOCKS

MOST_LISTED = 6  # findings that a few sentences can hold; of more, most are only counted
OF_ENGINES = "the ratio DDP / Horovod"  # begins the name of an interaction
DIFFERENT, UNFINISHED = "different", "not finished"
NO_VERDICT = {
    Obstacle.OTHER_WORK: "whose runs differ in more than the plan varies",
    Obstacle.SHARED_GPU: "whose ranks share a GPU",
    Obstacle.FAILED: "with trainings that failed",
    Obstacle.ENDED_EARLY: "whose trainings --desired-acc ended",
    Obstacle.NOT_REACHED: "without a ratio of times, since trainings did not reach the accuracy",
    Obstacle.NO_BLOCKS: f"with fewer than {MIN_BLOCKS} blocks",
    Obstacle.UNFINISHED: UNFINISHED,
    Obstacle.FEW_BLOCKS: f"with fewer than {MIN_BLOCKS} blocks",
}


def headline(verdicts: Sequence[Verdict], goals: Sequence[Goal]) -> list[str]:
    """Return the result in sentences. Of a pair that has a goal, the goal's verdict is told."""
    with_goals = {goal.name for goal in goals if goal.accuracy is None}
    pairs = [
        pair
        for pair in verdicts
        if pair.target_top1 is not None or f"{pair.first}:{pair.second}" not in with_goals
    ]
    findings: list[Verdict | Goal] = [*goals, *pairs]
    is_placed = len({finding.place for finding in findings}) > 1
    if {kind(finding) for finding in findings} == {UNFINISHED}:
        return ["Nothing is decided yet: the measurement is not finished."]
    is_short = len(findings) <= MOST_LISTED
    sentences = listed(goals, pairs, is_placed) if is_short else counted(goals, pairs)
    return [capitalised(text, pairs) for text in sentences]


def listed(goals: Sequence[Goal], pairs: Sequence[Verdict], is_placed: bool) -> list[str]:
    """Return a sentence with all that is decided, and one with the undecided pairs."""
    undecided = [clause(pair, is_placed) for pair in pairs if kind(pair) == UNDECIDED]
    others = [goal_clause(goal, is_placed) for goal in goals]
    others += [clause(pair, is_placed) for pair in pairs if kind(pair) != UNDECIDED]
    sentences = [f"{'; '.join(others)}."] if others else []
    if undecided:
        number = f"{len(undecided)} of {count(len(pairs), 'pair')} " if len(pairs) > 1 else ""
        sentences.append(f"{number}undecided: {'; '.join(undecided)}.")
    return sentences


def counted(goals: Sequence[Goal], pairs: Sequence[Verdict]) -> list[str]:
    """Return how many goals and pairs ended in which way."""
    ways = {"goal": Counter(map(kind, goals)), "pair": Counter(map(kind, pairs))}
    return [
        f"{count(found.total(), noun)}: "
        f"{', '.join(f'{number} {way}' for way, number in found.most_common())}."
        for noun, found in ways.items()
        if found
    ]


def headline_of_accuracy(verdicts: Sequence[AccuracyVerdict]) -> list[str]:
    """Return in a sentence how the final accuracies of all pairs compare; of many only how many
    ended in which way."""
    decisions = Counter(verdict.decision for verdict in verdicts)
    if not verdicts:
        return []
    if {*decisions} == {"identical"}:
        seeds = count(min(verdict.seeds for verdict in verdicts), "seed")
        return [f"Final top-1 is the same in each of {seeds}: the weights are identical."]
    if len(verdicts) > MOST_LISTED:
        ways = ", ".join(f"{number} {way}" for way, number in decisions.most_common())
        return [f"Final top-1 of {len(verdicts)} pairs: {ways}."]
    is_placed = len({verdict.place for verdict in verdicts}) > 1
    return [said(verdict, accuracy_claim(verdict), is_placed) for verdict in verdicts]


def kind(finding: Verdict | Goal) -> str:
    """Return in a few words how a finding ended, as in "2 undecided"."""
    if finding.obstacle:
        return NO_VERDICT[finding.obstacle]
    if isinstance(finding, Goal):
        return finding.decision
    if finding.delay is not None:
        return f"{'with' if finding.decision == 'faster' else 'without'} the known delay"
    if finding.decision in ("faster", "slower"):
        return DIFFERENT
    return "without a difference" if finding.is_null_test else finding.decision


def clause(verdict: Verdict, is_placed: bool) -> str:
    """Return a verdict with its interval as a part of a sentence."""
    speed, way = verdict.speed, kind(verdict)
    place = place_text(*verdict.place)
    lead = f"at {place}{',' if verdict.case else ''} " if is_placed else ""
    if speed is None or way not in (DIFFERENT, UNDECIDED) or verdict.is_null_test:
        shown = f" ({ends_text(speed)})" if speed and speed.low else ""
        return f"{lead}{claim(verdict)}{shown}"
    did = "trained"
    if verdict.target_top1 is not None:
        did = f"reached {verdict.target_top1:g} % top-1"
    text = trained(verdict.first_label, verdict.second_label, speed, way == DIFFERENT, did)
    low, high = speed.low or 0, speed.high or 0
    is_narrow = not low <= 1 <= high or speed.bound < verdict.margin
    remark = corrected("verdict", verdict.family) if way == UNDECIDED and is_narrow else ""
    return f"{lead}{text}{remark}"


def corrected(noun: str, family: int) -> str:
    """Return why so many findings together leave open what an interval alone would decide."""
    return f", before the correction for {count(family, noun)}"


def trained(
    first: str, second: str, speed: Estimate, is_decided: bool, did: str = "trained"
) -> str:
    """Return how many times as fast as the other a side trained, or did something else: the ratio
    of the faster one with its interval, or undecided the interval alone. A transport that both
    share stands in front."""
    if is_decided and speed.ratio < 1:
        first, second, speed = second, first, speed.inverse()
    engine, _, transport = first.partition(" over ")
    other_engine, _, other_transport = second.partition(" over ")
    lead = ""
    if transport and transport == other_transport:
        lead, first, second = f"over {transport} ", engine, other_engine
    shown = f"{ratio_text(speed)} ({ends_text(speed)})" if is_decided else ends_text(speed)
    return f"{lead}{first} {did} {shown} times as fast as {second}"


def headline_of_occasions(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return in a sentence what several occasions say together of each pair, of as many pairs as it
    can hold; "" without rows. `rows`: of `over_occasions`."""
    pairs = [row for row in rows if not row["first_label"].startswith(OF_ENGINES)]
    if not pairs:
        return ""
    is_placed = len({(row["case"], row["workers"]) for row in pairs}) > 1
    number, texts = len(pairs[0]["found"]), []
    for row in pairs[:MOST_LISTED]:
        place = f"at {place_text(row['case'], row['workers'])}, " if is_placed else ""
        speed, known = row["pooled"], sum(found is not None for found in row["found"])
        is_decided = not speed.low <= 1 <= speed.high
        text = trained(row["first_label"], row["second_label"], speed, is_decided)
        texts.append(f"{place}{text}{f' on {known} of them' if known < number else ''}")
    if len(pairs) > MOST_LISTED:
        texts.append(f"and {len(pairs) - MOST_LISTED} more in the table")
    return f"Over {count(number, 'occasion')}: {'; '.join(texts)}."


def goal_clause(goal: Goal, is_placed: bool) -> str:
    """Return a goal's verdict with its interval as a part of a sentence."""
    place = f" at {place_text(*goal.place)}" if is_placed else ""
    shown, found = "", goal.found
    if found and found.ends:
        low, high = found.ends
        figures = [goal_figure(goal, value) for value in (found.value, low, high)]
        shown = ", {} ({} to {})".format(*figures)
        if kind(goal) == UNDECIDED and (low >= goal.tolerated or high < goal.least):
            shown += corrected("goal", goal.family)
    elif found and goal.obstacle is None:
        shown = f", {goal_figure(goal, found.value)}, as the weights are identical"
    least = goal_figure(goal, goal.least)
    return f"goal {goal_sides(goal)} ≥ {least}{place}: {goal_verdict(goal)}{shown}"
