"""A gate for CI: whether the reported comparisons reach their goals, in a word and a sentence."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from compare.evidence.goals import FAILED, NOT_JUDGED, PASSED, gate_result
from compare.evidence.judgement import UNDECIDED
from compare.evidence.words import shortest_unique_names
from compare.page.headline import MOST_LISTED, counted, goal_clause
from compare.page.report import Report

EXIT_CODES = {PASSED: 0, FAILED: 1, UNDECIDED: 2, NOT_JUDGED: 3}


@dataclass(frozen=True)
class Gate:
    """What `report.py --check` answers."""

    result: str  # a key of EXIT_CODES
    sentence: str


def gate_of(reports: Sequence[Report]) -> Gate:
    """Return the gate's result for all reports together, with what has decided it."""
    result = gate_result([report.goals for report in reports])
    names = shortest_unique_names([report.record.folder for report in reports])
    named = defaultdict[str, list[str]](list)
    for name, report in zip(names, reports, strict=True):
        if reasons := reasons_of(report, result):
            named["; ".join(reasons)].append(name)
    texts = [f"{', '.join(own)}: {reasons}" for reasons, own in named.items()]
    if sum(len(reasons_of(report, result)) for report in reports) > MOST_LISTED:
        every = counted([goal for report in reports for goal in report.goals], [])
        texts = [f"{', '.join(names)}: {'; '.join(every)}"]
    return Gate(result, f"Gate: {result}: {'; '.join(texts).removesuffix('.')}.")


def end_of_check(gate: Gate, undecided_passes: bool) -> tuple[int, str]:
    """Return the exit code and the last line of `report.py --check`."""
    if undecided_passes and gate.result == UNDECIDED:
        return 0, f"{gate.sentence} It may pass: --undecided-passes."
    return EXIT_CODES[gate.result], gate.sentence


def reasons_of(report: Report, result: str) -> list[str]:
    """Return what in a report has the gate end with this result."""
    record, goals = report.record, report.goals
    if record.problem:
        return [record.problem] if result == NOT_JUDGED else []
    if not goals and result == NOT_JUDGED:
        if record.plan.null:
            return ["a null test has no goals"]
        flags = "--goals FIRST:SECOND=RATIO, or --top1-goals FIRST:SECOND=POINTS"
        return [f"its plan has no goals; give run.py {flags}"]
    is_placed = len(record.groups) > 1
    return [goal_clause(goal, is_placed) for goal in goals if gate_result([[goal]]) == result]
