"""How much longer a comparison has to be measured to decide more, and the command for it."""

import math
import shlex
from dataclasses import replace
from typing import Any

import pytest
from records import verdicts_of, with_plan
from scipy.stats import norm
from test_compare_records import make_square

from compare.evidence.extension import blocks_to_decide, extension_of
from compare.evidence.goals import Goal
from compare.evidence.paired import Estimate
from compare.evidence.record import Record, read_comparison
from compare.evidence.verdicts import Verdict
from compare.page import report as report_module
from compare.page.report import Report


@pytest.fixture(scope="module")
def record(tmp_path_factory) -> Record:
    """Six blocks of 40 s each."""
    return read_comparison(make_square(tmp_path_factory.mktemp("square") / "results/compare-1"))


def a_finding(record: Record, ratio: float, blocks: int, **fields: Any) -> Verdict:
    """An undecided verdict on this ratio, whose logarithm has a standard error of 5 %."""
    low, high = ratio / 1.2, ratio * 1.2
    speed = Estimate(ratio, low, high, (ratio,) * blocks, 0.05, blocks - 1)
    verdict = verdicts_of(record)[0]
    return replace(verdict, speed=speed, decision="undecided", family=1, **fields)


@pytest.mark.parametrize(
    ("ratio", "fields", "narrow"),
    [
        (1.05, {}, math.log(1.05) / 1.5),
        (1 / 1.05, {}, math.log(1.05) / 1.5),
        (1.001, {"margin": 0.1}, (math.log(1.1) - math.log(1.001)) / 1.5),  # equal, presumably
        (1.02, {"delay": 0.03}, math.log(1.03) / 1.5),
    ],
)
def test_so_many_blocks_make_the_interval_narrow(record, ratio, fields, narrow):
    """Of the extended comparison, whose intervals have a confidence of 97.5 %."""
    wanted = blocks_to_decide(record, a_finding(record, ratio, 100, **fields))
    assert wanted == pytest.approx(100 * (norm.ppf(0.9875) * 0.05 / narrow) ** 2, rel=0.02)
    # With few blocks, further ones also make Student's quantile smaller.
    few = blocks_to_decide(record, a_finding(record, ratio, 5, **fields))
    assert 0.05 * wanted < few < 0.07 * wanted  # by the quantile of five it would be 0.12


def test_corrections_and_turns_that_predict_more_take_more_blocks(record):
    finding = a_finding(record, 1.05, 20)
    wanted = blocks_to_decide(record, finding)
    scattered = replace(finding.speed, turn_error=0.1)
    for other in (replace(finding, family=4), replace(finding, speed=scattered)):
        assert blocks_to_decide(record, other) > 1.2 * wanted
    extended = with_plan(record, {"blocks": 4}, {"blocks": 6})
    assert blocks_to_decide(extended, finding) > wanted
    goal = Goal(question="", name="a:b", least=1.05 / 1.05, speed=finding.speed)
    assert blocks_to_decide(record, goal) == wanted


def test_what_cannot_be_decided_in_ten_times_the_time_is_left_out(record):
    easy, hopeless = a_finding(record, 1.2, 6), a_finding(record, 1.001, 6)
    decided = replace(hopeless, decision="equal")
    found = extension_of(record, [easy, decided, hopeless])
    assert found and found.blocks == blocks_to_decide(record, easy) < 60
    [group] = record.groups
    assert found.seconds == pytest.approx(
        40 * found.blocks + sum(run.seconds for run in group.runs)
    )
    assert found.seconds_left == pytest.approx(40 * (found.blocks - 6))
    for nothing in (hopeless, decided, replace(easy, delay=0.5), replace(easy, speed=None)):
        assert extension_of(record, [nothing]) is None


def test_the_next_step_is_a_command(record, monkeypatch):
    report = Report(record)
    assert report.next_step == ("", "")  # all is decided
    report.verdicts = [a_finding(record, 1.2, 6)]
    text, command = report.next_step
    assert text.startswith("To decide more, measure about ") and " minutes more" in text
    folder = str(record.folder)
    words = shlex.split(command)
    assert words[2:5] == [f"{folder}/record.jsonl", "--out", folder]
    assert words[5] == "--blocks" and int(words[6]) > 6
    by_rule = Report(with_plan(record, {"blocks": None, "until_interval": 0.1, "minutes": 4.2}))
    by_rule.verdicts = report.verdicts
    words_of_rule = shlex.split(by_rule.next_step[1])[5:]
    assert words_of_rule[::2] == ["--minutes", "--until-interval"] and int(words_of_rule[1]) >= 5
    assert words_of_rule[3] == "10%"
    # A width that ended the measurement without a decision does not end it again.
    by_rule.verdicts = [a_finding(record, 1.1, 6)]
    assert by_rule.next_step[1].endswith("--until-interval 6.6%")
    more = Report(with_plan(record, {"blocks": 9}))
    assert more.next_step[0] == "This command continues the measurement:"
    assert shlex.split(more.next_step[1]) == words[:5]
    changed = Report(with_plan(record, {"blocks": 9, "trainers_sha256": "0" * 64}))
    assert changed.next_step == ("", "")
    monkeypatch.setattr(report_module, "ROOT", record.folder.parent.parent)
    assert more.next_step == ("", "")  # a kept record


def test_a_record_without_times_has_no_division_by_zero(record):
    timeless = with_plan(record, {})
    timeless._blocks = {
        place: [replace(block, seconds=0.0) for block in blocks]
        for place, blocks in record._blocks.items()
    }
    found = extension_of(timeless, [a_finding(record, 1.2, 6)])
    assert found and found.seconds_left == 0
