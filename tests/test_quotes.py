"""Figures that pages quote are what the records beside them say today.

A quote is a ratio with its interval, such as 1.20 (1.18 to 1.23). Its record is linked in its row
of a table, else at the top of its column, else in its section. If the section links several
comparisons that asked the same, their common ratio may be quoted, too.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import permutations
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest
from records import estimate_ratio

from compare.evidence.goals import AT_GOAL, MISSED, REACHED, Goal
from compare.evidence.judgement import UNDECIDED, holm
from compare.evidence.occasions import RECORDED_SPREAD, pool
from compare.evidence.paired import Estimate, estimate_logs, point_difference
from compare.evidence.record import FILE, read_comparison
from compare.evidence.turns import Block
from compare.evidence.words import points_text, ratio_text
from compare.page import allreduce
from compare.page.chart import standalone
from compare.page.formats import as_markdown
from compare.page.plots import draw_plots
from compare.page.report import Report, SideBySide
from compare.page.sentences import interval_text
from recipe.settings.presets import PRESETS

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
LINK = re.compile(r"results/([\w.-]+/[\w.?*-]+)")
NUMBER = r"(\d[\d,]*(?:\.\d+)?)"
QUOTE = re.compile(
    rf"{NUMBER}(?: %| times as [^(,.]*)?(?: \(|, (?:95 % interval )?){NUMBER} to {NUMBER}(?!\.?\d)"
)
INTERVAL = re.compile(r"\d\.\d+ to \d\.\d+(?! %)")
PICTURED = "epyc-2-cores/2026-11-28-stock-3"
PICTURES = {  # of docs/, each with its record
    "verdict.svg": PICTURED,
    "torch-versions.svg": "epyc-2-cores/2026-11-28-torch-versions",
}
Figures = tuple[float, float, float]  # a ratio and the ends of its interval


@cache
def report_of(folder: str) -> Report:
    return Report(read_comparison(ROOT / "results" / folder))


def figures_of(folder: str) -> Iterator[Figures]:
    """What one record says."""
    path = ROOT / "results" / folder
    if (path / "bench.json").exists():
        rows = [row for row in rows_of_bench(folder) if row["value"] and row["low"]]
        yield from ((row["value"], row["low"], row["high"]) for row in rows)
        for a, b in permutations([row["blocks"] for row in rows], 2):
            if len(a) == len(b) and all((*a, *b)):  # sides that were compared with the same one
                yield from figures(estimate_ratio(a, b))
    elif (path / FILE).exists():
        report = report_of(folder)
        verdicts = [*report.verdicts, *report.times]
        found = [one for verdict in verdicts for one in (verdict.speed, verdict.cpu)]
        found += [*report.interactions.values(), *(row["scaling"] for row in report.speed)]
        if report.record.unit == "bytes":
            for one in allreduce.figures_of(report.record):
                found += [one.against_first, one.against_fp32]
        for one in found:
            yield from figures(one)


def rows_of_bench(folder: str) -> list[dict[str, Any]]:
    """The rows of an earlier `make bench`, which are read by these tests alone."""
    kept = map(json.loads, (ROOT / "results" / folder / "runs.jsonl").read_text().splitlines())
    found = next(one for one in kept if one["folder"] == ".").values()
    return [row for one in found if isinstance(one, dict) for row in one.get("rows", ())]


def figures(one: Estimate | None) -> Iterator[Figures]:
    """An estimate's, as a ratio and in percent."""
    if one and one.low and one.high:
        yield one.ratio, one.low, one.high
        yield 100 * one.ratio, 100 * one.low, 100 * one.high


def question_of(report: Report) -> Any:
    """What a comparison asked, and of which machine: by another launcher, or with another torch, it
    is another question."""
    plan, one = report.record.plan, report.record.written[0]
    return report.record.folder.parent, plan.question, plan.configurations, one.environment.torch


@cache
def together(folders: tuple[str, ...]) -> list[SideBySide]:
    """Those of these comparisons that asked the same on one machine, beside each other."""
    by_question = defaultdict[Any, list[Report]](list)
    for folder in folders:
        if (ROOT / "results" / folder / FILE).exists():
            by_question[question_of(report_of(folder))].append(report_of(folder))
    return [SideBySide(own) for own in by_question.values() if len(own) > 1]


def linked(text: str) -> tuple[str, ...]:
    """The records that a text links, each once."""
    found = [
        str(path.relative_to(ROOT / "results"))
        for name in LINK.findall(text)
        for path in sorted((ROOT / "results").glob(name))
    ]
    return tuple(dict.fromkeys(found))


def sections(page: str) -> list[str]:
    return re.split(r"\n(?=#|\*\*)", (ROOT / page).read_text())


def passages(page: str) -> Iterator[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """A page's paragraphs and cells of tables, each with its records, and those of its section."""
    for section in sections(page):
        all_of_it = linked(section)
        for block in section.split("\n\n"):
            lines = [line for line in block.splitlines() if line]
            if not block.startswith("|"):
                yield " ".join(block.split()), all_of_it, all_of_it
                continue
            for line in lines:
                for cell, head in zip(line.split("|"), lines[0].split("|"), strict=False):
                    yield cell, linked(line) or linked(head) or all_of_it, all_of_it


def speeds_of(folder: str) -> list[str]:
    return [f"{row['images_per_second']:.0f}" for row in report_of(folder).speed]


@pytest.mark.parametrize("page", PAGES)
def test_quoted_ratios_are_those_of_the_records(page: str) -> None:
    wrong = []
    for text, folders, section in passages(page):
        quotes = [*QUOTE.finditer(text)]
        known = [found for folder in folders for found in figures_of(folder)] if quotes else []
        if quotes and folders == section:
            for both in together(section):
                known += [found for one in both.occasions for found in figures(one["pooled"])]
        for quote in quotes:
            decimals = [len(number.partition(".")[2]) for number in quote.groups()]
            said = [
                tuple(f"{v:,.{n}f}" for v, n in zip(one, decimals, strict=True)) for one in known
            ]
            if quote.groups() not in said:
                wrong.append(quote[0])
        if page in ("README.md", "docs/results.md"):  # nothing there escapes the pattern
            spans = [quote.span() for quote in quotes]
            wrong += [
                one[0]
                for one in INTERVAL.finditer(text)
                if not any(begin <= one.start() < end for begin, end in spans)
            ]
    assert wrong == []


def test_rows_of_ratios_are_in_the_order_of_the_verdicts() -> None:
    seen = 0
    for section in sections("docs/results.md"):
        folders = linked(section)
        known = [[one["pooled"].ratio for one in both.occasions] for both in together(folders)]
        for folder in folders if re.search("square|stock", section) else ():
            known.append([one.ratio for one in report_of(folder).ratios.values()])
        for row in re.findall(r"^\|.*", section, re.MULTILINE):
            said = [float(ratio) for ratio, *_ in QUOTE.findall(row)]
            if len(said) > 3:
                close = [pytest.approx(own[: len(said)], abs=0.006) for own in known]
                assert said in close, row
                seen += 1
    assert seen


def test_other_quoted_figures_are_those_of_the_records() -> None:
    """Standard deviations between occasions, and times of an all-reduce."""
    deviations = times = 0
    for section in sections("docs/results.md"):
        for row in re.findall(r"\| sd between occasions \|(.*) \|", section):
            found = [
                [
                    f"{100 * one['spread']:.1f} %"
                    for one in both.occasions
                    if one["spread"] is not None
                ]
                for both in together(linked(section))
            ]
            assert [cell.strip() for cell in row.split("|")] in found
            deviations += 1
        if milliseconds := re.findall(r"\| ([\d.]+) ms", section):
            figures = allreduce.figures_of(report_of(linked(section)[0]).record)
            shown = {f"{1000 * one.seconds:.{n}f}" for one in figures for n in range(4)}
            assert shown >= {*milliseconds}
            times += 1
    assert deviations and times


GOAL_ROW = re.compile(
    r"\| (?P<limit>[≥≤]) (?P<goal>[\d.,]+) \| (?P<measured>[^|]*) \| \d+ \| "
    r"(?P<verdict>[a-z ]+?)(?:,| \|)"
)


def verdict_of(limit: str, least: float, low: float, high: float) -> str:
    """What docs/performance.md says of an interval and a goal; of the worse end if it is to be
    small."""
    if limit == "≤":
        least, low, high = 1 / least, 1 / high, 1 / low
    if low >= least:
        return REACHED
    if high < least:
        return MISSED
    tolerated = Goal(question="", name="", least=least, unit="" if least < 100 else "images/s")
    return AT_GOAL if low >= tolerated.tolerated else UNDECIDED


@pytest.mark.parametrize("page", ["docs/performance.md", "docs/gpu.md"])
def test_quoted_verdicts_follow_from_the_quoted_intervals(page: str) -> None:
    rows = [*GOAL_ROW.finditer((ROOT / page).read_text())]
    assert len(rows) > 4
    for row in rows:
        least = float(row["goal"].replace(",", ""))
        for quote in QUOTE.finditer(row["measured"]):
            _, low, high = (float(number.replace(",", "")) for number in quote.groups())
            assert verdict_of(row["limit"], least, low, high) == row["verdict"], row[0]


def test_the_confidence_of_the_rows_of_earlier_benchmarks_is_said() -> None:
    page = (ROOT / "docs/performance.md").read_text()
    records = re.findall(r"results/([^)]*-bench)/table\.md\) \(([^)]*)\)", page)
    of_row = dict[int, set[float]]()
    for folder, told in records:
        shown = {int(number) for number in re.findall(r"\d+", told)}
        for row in rows_of_bench(folder):
            if row["number"] in shown - {10} and row["low"]:
                logs = [math.log(ratio) for ratio in row["blocks"]]
                known = [estimate_logs(logs, one) for one in (0.95, 1 - 0.05 / 3)]
                width = row["high"] / row["low"]
                found = min(known, key=lambda one: abs(one.high / one.low - width))
                of_row.setdefault(row["number"], set()).add(found.confidence)
    assert [*sorted(of_row)] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 14]
    of_95 = re.search(r"intervals of rows ([\d, and]+) are of 95 %", page)
    assert of_95
    assert {row for row, found in of_row.items() if found == {0.95}} == {
        int(row) for row in re.findall(r"\d+", of_95[1])
    }
    assert all(len(found) == 1 for found in of_row.values())


def all_reports() -> list[Report]:
    """Those of all recorded comparisons."""
    found = sorted((ROOT / "results").glob("*/*/record.jsonl"))
    return [report_of(str(path.parent.relative_to(ROOT / "results"))) for path in found]


def blocks_of(report: Report) -> list[Block]:
    """Its blocks of turns."""
    return [block for group in report.record.groups for block in group.turns]


def test_nothing_that_happens_once_fell_into_the_turns_of_records() -> None:
    """Outside the phases of its steps a first turn takes what later ones take. One record has its
    profile there, as docs/prediction.md says."""
    for report in all_reports():
        folder = report.record.folder
        seconds = defaultdict[int, list[float]](list)  # of turns, outside phases; by round
        for block in blocks_of(report):
            for turn in block.of("speed"):
                in_phases = block.steps[turn.side] * sum(turn.phases.values())
                seconds[turn.round].append(turn.seconds - in_phases)
        if seconds and folder.name != "2026-11-27-prediction-by-turns":
            first, *later = (median(seconds[number]) for number in sorted(seconds))
            assert first <= 2 * max(later), folder


def test_the_page_says_how_much_occasions_differed() -> None:
    """The standard deviations between occasions of everything that was measured more than once."""
    asked = defaultdict[Any, list[Report]](list)
    for report in all_reports():
        asked[question_of(report)].append(report)
    largest = {True: 0.0, False: 0.0}  # of squares, of others
    squares = degrees = ratios = 0.0
    for reports in asked.values():
        if len(reports) < 2:
            continue
        is_square = "square" in reports[0].record.folder.name
        for row in SideBySide(reports).occasions:
            known = [one for one in row["found"] if one]
            _, spread = pool(known)
            squares, degrees = squares + (len(known) - 1) * spread**2, degrees + len(known) - 1
            ratios += 1
            largest[is_square] = max(largest[is_square], spread)
    [limit] = [one for one in report_of(PICTURED).limits if one.startswith("Other occasions")]
    of_all, of_squares = (float(one) for one in re.findall(r"([\d.]+) %", limit))
    assert of_squares == round(100 * largest[True], 1)
    assert of_all == round(100 * max(largest.values()), 1)
    of_records = math.sqrt(squares / degrees)
    told = f"With the later ones it is {100 * of_records:.2f} %, over {ratios:.0f} ratios."
    assert told in (ROOT / "docs/statistics.md").read_text()
    assert of_records == pytest.approx(RECORDED_SPREAD, rel=0.1)


def test_what_the_readme_pools_is_decided_if_it_is_corrected() -> None:
    found = linked((ROOT / "README.md").read_text())
    pooled = [row["pooled"] for both in together(found) for row in both.occasions]
    table = (ROOT / "README.md").read_text().partition("## Start here")[0]
    quoted = dict(enumerate(one for one in pooled if f"({one.low:.3f} to {one.high:.3f})" in table))
    assert len(quoted) == 7  # ratios in the table
    assert "with that correction all seven are decided" in " ".join(table.split())
    assert holm({at: one.p_difference() for at, one in quoted.items()}, 0.05) == {*quoted}


def test_the_docs_say_how_long_a_block_takes() -> None:
    seconds = [
        fmean(block.seconds / len(block.order) for block in blocks_of(report))
        for report in all_reports()
        if blocks_of(report) and not report.record.plan.side
    ]
    told = f"took {min(seconds):.0f} to {max(seconds):.0f} s for each of its sides"
    assert told in (ROOT / "docs/ab-tests.md").read_text()


def test_the_docs_say_where_the_difference_of_the_squares_lies() -> None:
    page = " ".join((ROOT / "docs/results.md").read_text().split())
    for number in (1, 2):
        report = report_of(f"xeon-amx-2-cores/2026-11-25-square-{number}")
        row = next(one for one in report.phase_differences if "gloo − " in one["configuration"])
        mean, half = (1000 * part for part in row["exposed_communication_seconds"])
        assert f"({-mean:.1f} ± {half:.1f} ms)" in page
        assert row["step_seconds"].mean == pytest.approx(
            -0.030 if number == 1 else -0.028, abs=5e-4
        )


def test_a_record_that_an_earlier_rule_ended_says_so() -> None:
    """Their plans give the number of blocks that they had reached, as if it had been asked for."""
    ended = [
        report.record.folder.name
        for report in all_reports()
        if "not fixed in advance" in str(report.notices)
    ]
    assert len(ended) == 11
    assert "2026-11-25-square-1" in ended and "2026-11-25-stock-1" not in ended


def test_the_ladders_figures_are_those_of_its_record() -> None:
    """Images/s, memory and network of each rung."""
    page = (ROOT / "docs/ladder.md").read_text()
    record = linked(page)[0]
    text, speeds = as_markdown([report_of(record)]), speeds_of(record)
    rows = re.findall(r"\| (\d+) \| ([\d,]+) \| ([\d.]+) \| \w+ \|", page)
    assert len(rows) == len(speeds)
    for speed, *others in rows:
        assert speed in speeds
        assert all(re.search(rf"\| +{cell} ", text) for cell in others), others


def test_pictures_are_of_their_records() -> None:
    readme = (ROOT / "README.md").read_text()
    assert {*re.findall(r"!\[.*?\]\(docs/(.*?)\)", readme)} == {*PICTURES}
    for name, record in PICTURES.items():
        picture = (ROOT / "docs" / name).read_text()
        for verdict in report_of(record).verdicts:
            assert verdict.speed
            assert f"{ratio_text(verdict.speed)}, {interval_text(verdict.speed)}" in picture


FASHION_QUICK = "epyc-2-cores/2026-11-28-fashion-quick"


def test_the_preset_s_accuracy_is_that_of_its_record() -> None:
    for row in report_of(FASHION_QUICK).accuracy:
        middle, lowest, highest = row["top1"]
        assert PRESETS["fashion-quick"].top1 == f"{middle:.2f} ({lowest:.2f} to {highest:.2f})"
        assert f"reproduced here: {middle:.2f} %" in (ROOT / "README.md").read_text()


def test_the_accuracies_of_settings_are_those_of_the_record() -> None:
    """With each seed, and the mean difference from the plain recipe with its interval."""
    page = (ROOT / "docs/results.md").read_text()
    top1 = r"\d\d\.\d\d"
    quoted = re.findall(rf"\n\| `([\w-]+)`.*?\| ({top1}(?:, {top1})*) \| ?(.*?) ?\|", page)
    of_seeds = defaultdict[str, list[float]](list)
    for run in report_of("epyc-2-cores/2026-11-28-settings").record.complete:
        *_, last = (line["top1"] for line in run.metrics if line["kind"] == "eval")
        of_seeds[run.configuration].append(last)  # of "average" the moving average's
    found = dict[str, tuple[str, str]]()
    for name, values in of_seeds.items():
        less_plain = [a - b for a, b in zip(values, of_seeds["plain"], strict=True)]
        one = point_difference(less_plain, image=0.01)
        shown = "" if name == "plain" else f"{points_text(one.mean)} ± {one.half_width:.2f}"
        found[name] = ", ".join(f"{value:.2f}" for value in values), shown
    assert {name: (seeds, less) for name, seeds, less in quoted} == found


def test_the_learning_curves_are_those_of_the_record() -> None:
    """If plots are drawn in another way: python compare/report.py results/... --svg FOLDER."""
    [curves] = [
        plot for plot in draw_plots(report_of(FASHION_QUICK)) if plot.name == "learning-top1"
    ]
    assert standalone(curves.svg) == (ROOT / "docs/learning-curves.svg").read_text()
