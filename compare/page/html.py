"""The report as one self-contained HTML page."""

import shlex
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from compare.evidence.equality import Fact, difference_text
from compare.evidence.notices import ASIDE
from compare.evidence.records import Comparison
from compare.evidence.run_folder import recorded
from compare.evidence.words import count, place_text, short
from compare.page import plots
from compare.page.chart import css_variables
from compare.page.report import Report
from compare.page.side_by_side import SideBySide
from compare.page.tables import square_tables, tables

# What environment.json says of the machine and the software, in the order of the page.
MACHINE = (
    "hosts", "device", "device_name", "cpu_model", "cores", "threads", "affinity", "allocator",
)  # fmt: skip
SOFTWARE = (
    "launcher", "transport", "python", "torch", "torchvision", "horovod", "mpi", "cuda",
    "git_commit",
)  # fmt: skip
MAX_COMMANDS = 24
MAX_PLOT_CHARACTERS = 600_000  # of all plots: a page is to stay below a megabyte


def render_page(report: Report) -> str:
    """Return the page: no request goes out of it, so that it can be sent, archived and printed."""
    comparison, verdicts = report.comparison, report.verdicts
    groups, left_out = fitting(plots.draw_plots(report))
    facts = [fact for found in report.facts.values() for fact in found]
    varied, told = ([f for f in facts if f.is_varied is wanted] for wanted in (True, False))
    return template("report.html.jinja").render(
        report=report,
        comparison=comparison,
        folder=comparison.folder.resolve().name,
        verdict_plot=plots.plot_verdicts(verdicts, comparison.plan.margin),
        squares=[table for case in comparison.cases for table in square_tables(report, case)],
        places=len(report.facts),
        facts=fact_lines(fact for fact in told if not fact.is_flag),
        flags=fact_lines(fact for fact in told if fact.is_flag),
        varied=fact_lines(varied),
        tables=tables(report),
        groups=groups,
        left_out=left_out,
        commands=commands(comparison),
        machine=environment_lines(comparison, MACHINE),
        software=environment_lines(comparison, SOFTWARE),
        details=[
            (name, shlex.join([*(f"{key}={v}" for key, v in own.variables.items()), *own.flags]))
            for name, own in comparison.configurations.items()
            if own.variables or own.flags
        ],
        methods=list(dict.fromkeys(v.speed.method for v in verdicts if v.speed)),
    )


def render_side_by_side(reports: Sequence[Report]) -> str:
    """Return the page of several comparisons: one table, and what differs."""
    both = SideBySide(reports)
    return template("side_by_side.html.jinja").render(both=both, results=both.table())


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
        "breakable": breakable,
        "unbroken": unbroken,
        "difference_text": difference_text,
    }
    return environment.get_template(name)


def breakable(name: str) -> Markup:
    """Let a long name break after its underscores: a phone's column is narrow."""
    return Markup(escape(name).replace("_", Markup("_<wbr>")))


def unbroken(command: str) -> Markup:
    """Keep each word of a command whole where a line ends: `--seed` has no break after a dash."""
    return Markup(" ").join(Markup("<span>{}</span>").format(word) for word in command.split(" "))


def fitting(groups: list[plots.PlotGroup]) -> tuple[list[plots.PlotGroup], int]:
    """Return the groups that the page has room for, and how many plots it leaves out: with many
    cases, folded groups, the last one first."""
    left_out = 0
    while sum(len(plot.svg) for group in groups for plot in group.plots) > MAX_PLOT_CHARACTERS:
        chosen = [group for group in groups if group.folded] or groups
        groups = [group for group in groups if group is not chosen[-1]]
        left_out += len(chosen[-1].plots)
    return groups, left_out


def fact_lines(facts: Iterable[Fact]) -> list[dict[str, Any]]:
    """Arrange facts for the page: a line for each field, unequal ones first; where cases or numbers
    of workers do not agree, each value with its places behind it."""
    by_field: dict[str, dict[str, Fact]] = {}
    for fact in facts:
        places = by_field.setdefault(fact.field, {})
        place = place_text(fact.case, fact.workers)
        if place not in places or fact.is_confounder:  # of runs and of sides, what forbids verdicts
            places[place] = fact
    lines = []
    for field, places in by_field.items():
        texts: dict[str, list[str]] = {}
        for place, fact in places.items():
            texts.setdefault(fact_text(fact), []).append(place)
        told = [f"{text} ({', '.join(where)})" for text, where in texts.items()]
        is_equal = not any(fact.unequal_blocks for fact in places.values())
        text = next(iter(texts)) if len(texts) == 1 else "; ".join(told)
        lines.append({"field": field, "text": text or "none", "is_equal": is_equal})
    return sorted(lines, key=lambda line: line["is_equal"])


def fact_text(fact: Fact) -> str:
    """Say what runs have in common, or in what they differ."""
    if fact.unequal_blocks:
        return difference_text(fact).split(": ", 1)[1]
    return short(fact.rows[0].value) + (", another in each block" * (not fact.is_same))


# -------------------------------------------------------------------------- commands, environment


def commands(comparison: Comparison) -> list[tuple[str, str]]:
    """Return the commands of the first block: those of others differ in seed and folder only."""
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
    return found[:MAX_COMMANDS]


def environment_lines(comparison: Comparison, fields: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return each field's value; all values, and of which runs, where they do not agree."""
    lines = []
    for field in fields:
        where: dict[str, dict[str, None]] = {}
        for run in comparison.written:
            said = recorded(run.environment)
            if field in said:  # one that a trainer did not write yet is left out
                where.setdefault(short(said[field]) or "none", {})[run.name] = None
        texts = [f"{value} ({', '.join(names)})" for value, names in where.items()]
        if where:
            lines.append((field, "; ".join(texts) if len(texts) > 1 else next(iter(where))))
    return lines
