"""The report as one self-contained HTML page."""

import shlex
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from compare.evidence.equality import Fact, difference_text
from compare.evidence.records import Comparison
from compare.evidence.words import count, place_text, short
from compare.page.chart import css_variables
from compare.page.findings import ASIDE, ENVIRONMENT, Report, SideBySide
from compare.page.plots import draw_plots
from compare.page.tables import all_tables, goals_tables, side_by_side_tables, square_tables


def render_side_by_side(reports: Sequence[Report]) -> str:
    """Return the page of several comparisons."""
    both = SideBySide(reports)
    return template("side_by_side.html.jinja").render(both=both, tables=side_by_side_tables(both))


def render_page(report: Report) -> str:
    """Return the page: no request goes out of it, so that it can be sent, archived and printed."""
    comparison = report.comparison
    facts = [fact for found in report.facts.values() for fact in found]
    varied, told = ([f for f in facts if f.is_varied is wanted] for wanted in (True, False))
    return template("report.html.jinja").render(
        report=report,
        comparison=comparison,
        folder=comparison.folder.resolve().name,
        squares=[*goals_tables([comparison]), *square_tables(report)],
        places=len(report.facts),
        machine=fact_lines(fact for fact in told if fact.field in ENVIRONMENT),
        settings=fact_lines(fact for fact in told if fact.field not in ENVIRONMENT),
        varied=fact_lines(varied),
        tables=all_tables(report),
        plots=draw_plots(report),
        commands=commands(comparison),
        has_prediction=(comparison.folder / "prediction.html").exists(),
    )


@cache
def template(name: str) -> Any:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.globals |= {"aside": ASIDE, "colours": css_variables}
    environment.filters |= {
        "count": count,
        "unbroken": unbroken,
        "difference_text": difference_text,
    }
    return environment.get_template(name)


def unbroken(command: str) -> Markup:
    """Keep each word of a command whole where a line ends: `--seed` has no break after a dash."""
    return Markup(" ").join(Markup("<span>{}</span>").format(word) for word in command.split(" "))


def fact_lines(facts: Iterable[Fact]) -> list[dict[str, Any]]:
    """Arrange facts for the page: a line for each field, unequal ones first; of these in what runs
    differ, with its place."""
    by_field = defaultdict[str, list[Fact]](list)
    for fact in facts:
        by_field[fact.field].append(fact)
    lines = []
    for field, own in by_field.items():
        unequal = [fact for fact in own if fact.unequal_blocks]
        texts = dict.fromkeys(fact_text(fact) for fact in unequal or own)
        text = "; ".join(filter(None, texts)) or "none"
        lines.append({"field": field, "text": text, "is_equal": not unequal})
    return sorted(lines, key=lambda line: line["is_equal"])


def fact_text(fact: Fact) -> str:
    """Say what runs have in common, or in what they differ."""
    if fact.unequal_blocks:
        return f"{difference_text(fact).split(': ', 1)[1]} ({place_text(fact.case, fact.workers)})"
    return short(fact.rows[0].value) + (", another in each block" * fact.is_of_block)


def commands(comparison: Comparison) -> list[tuple[str, str]]:
    """Return the commands of the first block: those of others differ in seed and folder only; and
    the digests of a user's own scripts."""
    runs = comparison.runs or comparison.sides
    first = min(run.block for run in runs)
    found = [
        (
            ", ".join(filter(None, (run.case, run.name))),
            run.command or shlex.join(run.environment.command),
        )
        for run in runs
        if run.block == first and (run.command or run.is_complete)
    ]
    scripts = comparison.plan.scripts.items()
    return [*found, *((f"SHA-256 of {name}", digest) for name, digest in scripts)]
