"""Figures that pages quote are what the records beside them say today.

A quote is a ratio with its interval, such as 1.20 (1.18 to 1.23). Its record is linked in its row
of a table, else at the top of its column, else in its section. If the section links several
comparisons that asked the same, their common ratio may be quoted, too.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from compare.evidence import packed
from compare.evidence.paired import Estimate
from compare.evidence.records import load_comparison
from compare.evidence.words import interval_text, ratio_text
from compare.page.allreduce import read_measurement
from compare.page.findings import Report, SideBySide
from compare.page.formats import as_markdown

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
LINK = re.compile(r"results/([\w.-]+/[\w.?*-]+)")
NUMBER = r"(\d+(?:\.\d+)?)"
QUOTE = re.compile(
    rf"{NUMBER}(?: %| times as [^(,.]*)?(?: \(|, (?:95 % interval )?){NUMBER} to {NUMBER}(?!\.?\d)"
)
INTERVAL = re.compile(r"\d\.\d+ to \d\.\d+(?! %)")
Figures = tuple[float, float, float]  # a ratio and the ends of its interval


@cache
def report_of(folder: str) -> Report:
    return Report(load_comparison(ROOT / "results" / folder))


def figures_of(folder: str) -> Iterator[Figures]:
    """What one record says."""
    path = ROOT / "results" / folder
    if (path / "bench.json").exists():
        # Recorded by an earlier `make bench`, whose rows are read by this test alone.
        kept = map(json.loads, (path / packed.PACKED).read_text().splitlines())
        found = next(one for one in kept if one["folder"] == ".").values()
        rows = [row for one in found if isinstance(one, dict) for row in one.get("rows", ())]
        yield from ((r["value"], r["low"], r["high"]) for r in rows if r["value"] and r["low"])
    elif (path / "collectives.json").exists():
        measured = read_measurement(path)
        for one in measured.figures.values():
            for speed in map(one.speed_against, measured.rivals(one)):
                yield from (*figures(speed), *figures(speed.inverse()))
    elif (path / "plan.json").exists():
        report = report_of(folder)
        found = [one for verdict in report.verdicts for one in (verdict.speed, verdict.cpu)]
        found += [*report.interactions.values(), *(row["scaling"] for row in report.speed)]
        for one in found:
            yield from figures(one)


def figures(one: Estimate | None) -> Iterator[Figures]:
    """An estimate's, as a ratio and in percent."""
    if one and one.low and one.high:
        yield one.ratio, one.low, one.high
        yield 100 * one.ratio, 100 * one.low, 100 * one.high


@cache
def together(folders: tuple[str, ...]) -> list[SideBySide]:
    """Those of these comparisons that asked the same on one machine, beside each other."""
    by_question = defaultdict[tuple[str, str | None], list[Report]](list)
    for folder in folders:
        if (ROOT / "results" / folder / "plan.json").exists():
            report, machine = report_of(folder), folder.partition("/")[0]
            by_question[machine, report.comparison.plan.question].append(report)
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
                tuple(f"{v:.{n}f}" for v, n in zip(one, decimals, strict=True)) for one in known
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
        for folder in folders if "square" in section else ():
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
            (both,) = together(linked(section))
            found = [f"{100 * one['spread']:.1f} %" for one in both.occasions]
            assert [cell.strip() for cell in row.split("|")] == found
            deviations += 1
        if milliseconds := re.findall(r"\| ([\d.]+) ms", section):
            figures = read_measurement(ROOT / "results" / linked(section)[0]).figures.values()
            assert {f"{1000 * one.seconds:.{n}f}" for one in figures for n in range(4)} >= {
                *milliseconds
            }
            times += 1
    assert deviations and times


def test_the_ladders_figures_are_those_of_its_record() -> None:
    """Images/s, memory and network of each rung."""
    page = (ROOT / "docs/ladder.md").read_text()
    record = linked(page)[0]
    text, speeds = as_markdown([report_of(record)]), speeds_of(record)
    rows = re.findall(r"\| (\d+) \| ([\d,]+) \| ([\d.]+) \| \d+ \| \w+ \|", page)
    assert len(rows) == len(speeds)
    for speed, *others in rows:
        assert speed in speeds
        assert all(re.search(rf"\| +{cell} ", text) for cell in others), others


def test_the_picture_of_the_readme_is_of_its_record() -> None:
    picture = (ROOT / "docs/verdict.svg").read_text()
    for verdict in report_of("xeon-amx-2-cores/2026-11-25-stock-1").verdicts:
        assert verdict.speed
        assert f"{ratio_text(verdict.speed)}, {interval_text(verdict.speed)}" in picture
