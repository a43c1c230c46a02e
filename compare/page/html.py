"""The report as one self-contained HTML page."""

import shlex
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from compare.evidence.equality import Fact, compare_facts, difference_text
from compare.evidence.notices import ASIDE, notices
from compare.evidence.records import Comparison
from compare.evidence.references import Reference
from compare.evidence.rows import by_turns
from compare.evidence.run_folder import recorded
from compare.evidence.verdicts import correction_text, judge
from compare.evidence.words import count, place_text, short
from compare.page import plots, text
from compare.page.context import created_text, limits, page_title, reproduce_lines, subtitle
from compare.page.recommendation import recommendations
from compare.page.side_by_side import find_differences, letters_of, names_of, side_by_side_table
from compare.page.tables import square_tables, tables

# What environment.json says of the machine and the software, in the order of the page.
MACHINE = ("hosts", "device", "device_name", "cpu_model", "cores", "affinity", "allocator")
SOFTWARE = ("python", "torch", "torchvision", "horovod", "mpi", "cuda", "git_commit")
MAX_COMMANDS = 24
MANY_COLUMNS = 4
MAX_PLOT_CHARACTERS = 600_000  # of all plots: a page is to stay below a megabyte


def render_page(
    comparison: Comparison,
    price_per_hour: float | None = None,
    references: Sequence[Reference] = (),
) -> str:
    """Return the page: no request goes out of it, so that it can be sent, archived and printed."""
    verdicts = judge(comparison)
    groups, left_out = fitting(plots.draw_plots(comparison, references))
    facts = list(facts_by_place(comparison))
    places = list(dict.fromkeys(place_text(fact.case, fact.workers) for fact in facts))
    varied = [fact for fact in facts if fact.is_varied]
    told = [fact for fact in facts if not fact.is_varied]
    squares = [t for case in comparison.cases for t in square_tables(comparison, verdicts, case)]
    return template("report.html.jinja").render(
        title=page_title(comparison),
        question=comparison.plan["question"],
        subtitle=subtitle(comparison),
        created=created_text(comparison),
        folder=comparison.folder.resolve().name,
        correction=correction_text(comparison, verdicts),
        recommendations=recommendations(comparison, verdicts),
        verdicts=verdicts,
        verdict_plot=plots.plot_verdicts(verdicts, comparison.plan.get("margin")),
        squares=squares,
        notices=notices(comparison),
        aside=ASIDE,
        places=places,
        by_place=len(places) <= MANY_COLUMNS,
        facts=fact_lines([fact for fact in told if not fact.is_flag], places),
        flags=fact_lines([fact for fact in told if fact.is_flag], places),
        varied=fact_lines(varied, places),
        tables=tables(comparison, verdicts, price_per_hour),
        groups=groups,
        left_out=left_out,
        commands=commands(comparison),
        machine=environment_lines(comparison, MACHINE),
        software=environment_lines(comparison, SOFTWARE),
        transports=transports(comparison),
        variables=comparison.plan["environment"],
        details=configuration_lines(comparison),
        reproduce=reproduce_lines(comparison),
        limits=limits(comparison, verdicts),
        by_turns=by_turns(comparison),
        methods=list(dict.fromkeys(v.speed.method for v in verdicts if v.speed)),
    )


def render_side_by_side(comparisons: Sequence[Comparison]) -> str:
    """Return the page of several comparisons: one table, and what differs."""
    letters = letters_of(comparisons)
    return template("side_by_side.html.jinja").render(
        title="Comparisons side by side",
        named=list(zip(letters, names_of(comparisons), comparisons, strict=True)),
        subtitle=subtitle,
        created=created_text,
        judge=judge,
        correction=correction_text,
        notices=notices,
        aside=ASIDE,
        results=side_by_side_table(comparisons),
        differences=find_differences(comparisons),
        by_place=True,
        places=(),
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
    environment.filters |= {
        "count": count,
        "breakable": breakable,
        "unbroken": unbroken,
        "together": together,
        "difference_text": difference_text,
        "support": text.support,
    }
    return environment.get_template(name)


def breakable(name: str) -> Markup:
    """Let a long name break after its underscores: a phone's column is narrow."""
    return Markup(escape(name).replace("_", Markup("_<wbr>")))


def together(text: str) -> str:
    """Keep a number and its per cent sign on one line."""
    return text.replace(" %", "\N{NO-BREAK SPACE}%")


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


# ---------------------------------------------------------------------------------- what was equal


def facts_by_place(comparison: Comparison) -> Iterable[Fact]:
    """Compare the runs of each case at each number of workers, and the sides of turns there; of a
    field that both have, what forbids a verdict."""
    for case in comparison.cases:
        for workers in comparison.workers:
            runs = [r for r in comparison.complete if (r.case, r.workers) == (case, workers)]
            facts = {fact.field: fact for fact in compare_facts(comparison, runs)}
            for fact in compare_facts(comparison, comparison.turn_sides(case, workers)):
                if fact.field not in facts or fact.forbids_verdict:
                    facts[fact.field] = fact
            yield from facts.values()


def fact_lines(facts: Sequence[Fact], places: Sequence[str]) -> list[dict[str, Any]]:
    """Arrange facts for the page: a line each, a cell for each place; one cell where all agree.

    With many places there is a single cell, too, in which each value has its places behind it.
    """
    lines = []
    for field in dict.fromkeys(fact.field for fact in facts):
        by_place = {
            place_text(fact.case, fact.workers): fact for fact in facts if fact.field == field
        }
        texts = [fact_text(by_place[place]) if place in by_place else "" for place in places]
        equal = [place not in by_place or by_place[place].is_equal for place in places]
        one = len(set(texts)) == 1
        if not one and len(places) > MANY_COLUMNS:
            where: dict[str, list[str]] = {}
            for place, text in zip(places, texts, strict=True):
                where.setdefault(text, []).append(place)
            texts = ["; ".join(f"{text} ({', '.join(those)})" for text, those in where.items())]
            equal = [all(equal)]
        cells = [{"text": text, "equal": same} for text, same in zip(texts, equal, strict=True)]
        lines.append(
            {
                "field": field,
                "cells": cells[:1] if one else cells,
                "one": one and all(equal),
                "equal": all(equal),
            }
        )
    return sorted(lines, key=lambda line: line["equal"])  # unequal ones first


def fact_text(fact: Fact) -> str:
    if not fact.is_equal:
        return difference_text(fact).split(": ", 1)[1]
    return short(fact.values[0][1]) + (", another in each block" * fact.varies_over_blocks)


# -------------------------------------------------------------------------- commands, environment


def commands(comparison: Comparison) -> list[tuple[str, str]]:
    """Return the commands of the first block: those of others differ in seed and folder only."""
    runs = comparison.runs or comparison.sides
    first = min(run.block for run in runs)
    found = [
        (plots.named(run.case) + run.name, run.command or shlex.join(run.environment.command))
        for run in runs
        if run.block == first and (run.command or run.is_complete)
    ]
    return found[:MAX_COMMANDS]


def environment_lines(comparison: Comparison, fields: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return each field's value; all values, and of which runs, where they do not agree."""
    order = comparison.plan["configurations"]
    runs = sorted(comparison.written, key=lambda run: (order.index(run.configuration), run.workers))
    lines = []
    for field in fields:
        # One that a trainer did not write yet is left out.
        told = [
            (run, short(said[field]) or "none")
            for run in runs
            if field in (said := recorded(run.environment))
        ]
        by_configuration: dict[str, set[str]] = {}
        for run, value in told:
            by_configuration.setdefault(run.configuration, set()).add(value)
        where: dict[str, dict[str, None]] = {}
        for run, value in told:
            one = len(by_configuration[run.configuration]) == 1
            where.setdefault(value, {})[run.configuration if one else run.name] = None
        if len(where) == 1:
            lines.append((field, next(iter(where))))
        elif where:
            texts = [f"{value} ({', '.join(names)})" for value, names in where.items()]
            lines.append((field, "; ".join(texts)))
    return lines


def transports(comparison: Comparison) -> list[tuple[str, str, str, str]]:
    """Return the transport that each configuration's gradients really took."""
    order = comparison.plan["configurations"]
    found = {
        (
            run.workers,
            order.index(run.configuration),
            run.launcher,
            run.environment.transport,
            short(run.environment.threads),
        )
        for run in comparison.written
    }
    return [
        (f"{order[index]}, {count(n, 'worker')}", launcher, transport, threads)
        for n, index, launcher, transport, threads in sorted(found)
    ]


def configuration_lines(comparison: Comparison) -> list[tuple[str, str]]:
    """Return the flags and variables that configurations have of their own."""
    lines = []
    for name, details in comparison.plan["configuration_details"].items():
        words = [f"{key}={value}" for key, value in details.get("environment", {}).items()]
        words += details.get("flags", [])
        if words:
            lines.append((name, shlex.join(words)))
    return lines
