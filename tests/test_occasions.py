"""What several comparisons that asked the same say together."""

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from records import edit, lines_of, write_lines
from test_compare_keep import kept_of
from test_compare_turns import by_turns

from compare import keep, report
from compare.evidence.occasions import over_occasions, pool
from compare.evidence.paired import Estimate, with_error
from compare.evidence.record import read_comparison
from compare.evidence.words import ratio_text
from compare.page.formats import as_json, as_markdown, as_page, as_text
from compare.page.report import Report, SideBySide, asks_other
from compare.page.sentences import interval_text


def an_estimate(log: float, error: float) -> Estimate:
    ratio = math.exp(log)
    return Estimate(ratio, ratio * 0.9, ratio * 1.1, (ratio,) * 5, error, 4)


# By hand, with errors of 0.01: the variance between is that of the logarithms less 0.01 ** 2, and
# the error is the sd of the logarithms, or 0.01 if that is larger, over the root of their number.
# Student's quantiles: 4.303 with 2, 12.706 with 1 degree of freedom. As recorded, the variance
# between is at least 0.0177 ** 2, and there are 6 degrees more: 2.306 with 8, 2.365 with 7. One
# occasion has no more than its own four: 2.776.
LEAST = math.hypot(0.0177, 0.01)


@pytest.mark.parametrize(
    ("logs", "mean", "spread", "half", "as_recorded"),
    [
        ([0.06, 0.10, 0.14], 0.10, math.sqrt(0.0015), 4.303 * 0.04, 2.306 * 0.04),
        ([0.095, 0.1, 0.105], 0.10, 0, 4.303 * 0.01, 2.306 * LEAST),  # closer than their errors
        ([0.0, 0.1], 0.05, math.sqrt(0.0049), 12.706 * math.sqrt(0.005), 2.365 * math.sqrt(0.005)),
        ([0.1], 0.1, 0, None, 2.776 * LEAST),
    ],
)
def test_occasions_are_pooled_as_by_hand(logs, mean, spread, half, as_recorded):
    for error, are_as_recorded in ((half, False), (as_recorded, True)):
        if error is not None:
            found = pool([an_estimate(log, 0.01) for log in logs], are_as_recorded)
            assert_pooled(*found, mean, spread, error / math.sqrt(len(logs)))


def assert_pooled(pooled, between, mean, spread, half):
    assert math.log(pooled.ratio) == pytest.approx(mean)
    assert between == pytest.approx(spread, abs=1e-12)
    assert math.log(pooled.high / pooled.low) / 2 == pytest.approx(half, rel=1e-3)


def test_a_precise_occasion_counts_for_more():
    pooled, _ = pool([an_estimate(0.10, 0.001), an_estimate(0.11, 0.01)], are_as_recorded=False)
    assert math.log(pooled.ratio) == pytest.approx((0.10 * 100 + 0.11) / 101)


def test_what_two_comparisons_have_of_the_same_two_is_pooled():
    key, other = ("", 2, "A", "B"), ("", 4, "A", "B")
    estimate = an_estimate(0.1, 0.01)
    [row] = over_occasions([{key: estimate}, {other: estimate}, {key: estimate}])
    assert row["found"] == (estimate, None, estimate)
    assert row["pooled"].ratio == pytest.approx(estimate.ratio)
    assert over_occasions([{key: estimate}, {other: estimate}]) == []


def comparisons_of(folder: Path, number: int) -> list[Path]:
    """So many squares, which began a day apart."""
    folders = [by_turns(folder / f"runs/compare-{i}", blocks=7) for i in range(number)]
    for day, square in enumerate(folders):
        edit(square / "plan.json", created_utc=f"2026-11-{10 + day}T12:00:00+00:00")
    return folders


def change_all(folder: Path, part: str, **changes: object) -> None:
    """Change the settings or the environments of all runs and sides of a comparison."""
    lines = lines_of(folder)
    for line in lines:
        for written in (line, *line.get("sides", {}).values()):
            written.get(part, {}).update(changes)
    write_lines(folder, lines)


def two_comparisons(folder: Path, **environment: object) -> list[Report]:
    """Reports of two squares, the second of which was measured in another environment."""
    folders = comparisons_of(folder, 2)
    change_all(folders[1], "environment", **environment)
    return [Report(read_comparison(folder)) for folder in folders]


def test_comparisons_of_one_question_are_summarized(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # no cell is wrapped
    same = {"git_commit": "f" * 40, "hosts": ["another"], "gpu_clock_mhz": 1700.0}
    variables = {"CUDA_VISIBLE_DEVICES": "3"}
    reports = two_comparisons(tmp_path, **same, variables=variables)
    told = SideBySide(reports)
    assert not told.not_pooled and len(told.occasions) == 5  # with the interaction
    for text in (as_text(reports), as_markdown(reports), as_page(reports)):
        for words in ("12.7 for two", "Over occasions", "DDP over MPI to Horovod over MPI"):
            assert words in text
    for text in (as_text(reports), as_markdown(reports), as_json(reports)):
        assert told.headline.startswith("Over 2 occasions: ") and told.headline in text
    [row, *_] = json.loads(as_json(reports))["occasions"]
    assert row["pooled"]["low"] < row["pooled"]["ratio"] < row["pooled"]["high"]


def test_one_occasion_says_how_far_it_reaches(tmp_path):
    """On a CPU, as if it were pooled alone; no record says how much GPUs vary."""
    [folder] = comparisons_of(tmp_path, 1)
    told = Report(read_comparison(folder))
    speed = told.verdicts[0].speed
    wider, _ = pool([speed])
    for degrees in (2, 4, 20):
        own = replace(with_error(replace(speed, confidence=0.975), 0.05, degrees), turn_error=0)
        reach, _ = pool([own])
        assert reach.relative_half_width > own.relative_half_width and reach.confidence == 0.975
    for text in (as_text([told]), as_markdown([told]), as_page([told])):
        assert f"over all occasions is {ratio_text(wider)}, {interval_text(wider)}" in text
    change_all(folder, "environment", device="cuda")
    assert Report(read_comparison(folder)).reach == ""


def test_comparisons_of_other_questions_are_not_and_the_reason_is_said(tmp_path):
    reports = two_comparisons(tmp_path, torch="3.0", hosts=["one", "two"], cores=99)
    for text in (as_text(reports), as_markdown(reports), as_page(reports)):
        [fields] = re.findall(r"They differ in: (.*?)\.", " ".join(text.split()))
        assert {*fields.split(", ")} == {"torch", "hosts", "cores"}
        assert "Over occasions" not in text
    assert json.loads(as_json(reports))["occasions"] == []


@pytest.mark.parametrize(
    ("name", "values", "is_other"),
    [
        ("optimizer", ("sgd", "not recorded"), False),  # older versions had no other
        ("optimizer", ("lars", "not recorded"), True),
        ("optimizer", ("not recorded", "not recorded"), False),
        ("preset", ("digits", "digits-resnet18"), False),  # what it sets is compared by itself
        ("batch_size", ("32", "64"), True),
        ("measured by", ("turns", "runs"), True),
        ("ranks_per_gpu", ("none", "not recorded"), False),  # which no older version allowed
        ("ranks_per_gpu", ("2", "not recorded"), True),
        ("torch", ("2.15.0", "not recorded"), True),
    ],
)
def test_what_makes_another_question(name, values, is_other):
    assert asks_other(name, values) is is_other


@pytest.mark.parametrize("number", [3, 4])
def test_a_standard_deviation_is_told_from_four_occasions_on(tmp_path, number):
    first, second = (Report(read_comparison(folder)) for folder in comparisons_of(tmp_path, 2))
    reports = [first, *[second] * (number - 1)]
    spreads = [row["spread"] for row in SideBySide(reports).occasions]
    assert [spread is not None for spread in spreads] == [number > 3] * 5
    assert bool(re.search(r"\bsd\b", as_text(reports))) == (number > 3)


def test_a_copy_is_no_further_occasion(tmp_path, refusal):
    first, other = comparisons_of(tmp_path, 2)
    copied = shutil.copytree(first, tmp_path / "copied")
    kept = kept_of(first)
    for copy in (first, copied, kept):
        for form in ("--no-html", "--json", "--csv"):
            told = refusal(report.main, [*map(str, (first, other, copy)), form], code=1)
            assert f"{first} and {copy} are the same comparison" in told


@pytest.mark.parametrize(
    ("fields", "is_other"),
    [
        (("data", "weights", "cache_dir"), False),
        (("train_dir",), True),
    ],
)
def test_what_is_kept_asks_the_same_as_what_is_not(tmp_path, monkeypatch, fields, is_other):
    """keep.py has replaced the paths of the home directory and of the project."""
    monkeypatch.setenv("HOME", str(tmp_path))
    folders = comparisons_of(tmp_path, 2)
    for i, folder in enumerate(folders):
        place = f"{tmp_path}/one/{i * is_other}"
        change_all(folder, "settings", **dict.fromkeys(fields, place), val_dir=f"{keep.ROOT}/x")
    both = [kept_of(folders[0]), folders[1]]
    assert "~/one/0" in (both[0] / "record.jsonl").read_text()
    told = SideBySide([Report(read_comparison(folder)) for folder in both])
    assert bool(told.not_pooled) == is_other and len(told.occasions) == 5 * (not is_other)
    assert not is_other or "differ in: train_dir." in told.not_pooled


def test_a_record_of_a_version_that_had_files_of_settings_asks_the_same(tmp_path):
    folders = comparisons_of(tmp_path, 2)
    change_all(folders[0], "settings", knobs=None, knob_variables={})
    told = SideBySide([Report(read_comparison(folder)) for folder in folders])
    assert told.not_pooled == "" and len(told.occasions) == 5
