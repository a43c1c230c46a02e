"""The report as one self-contained HTML page."""

import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from compare.evidence.equality import Fact, compare_facts, difference_text
from compare.evidence.notices import load_warnings, troubles
from compare.evidence.phases import explain
from compare.evidence.records import Comparison
from compare.evidence.rows import InputRow, ResourceRow, Row, input_rows, resource_rows, table_rows
from compare.evidence.run_folder import recorded
from compare.evidence.verdicts import judge
from compare.evidence.words import count, loss_text, short, three_digits
from compare.page import plots, text
from compare.page.chart import COLOURS
from compare.page.context import created_text, limits, page_title, reproduce_lines, subtitle
from compare.page.side_by_side import find_differences, names_of

# What environment.json says of the machine and the software, in the order of the page.
MACHINE = ("hosts", "device", "device_name", "cpu_model", "cores", "affinity", "allocator")
SOFTWARE = ("python", "torch", "torchvision", "horovod", "mpi", "cuda", "git_commit")
MANY_COMMANDS = 6
MANY_COLUMNS = 4
MAX_PLOT_CHARACTERS = 650_000  # of all plots: a page is to stay below a megabyte
NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Column:
    """A column of a table of figures."""

    name: str
    is_number: bool = True


@dataclass(frozen=True)
class Cell:
    """A cell of a table of figures."""

    text: str
    value: float | None = None  # what it is sorted by and copied as, where that is not the text
    aside: str = ""
    is_alarm: bool = False
    series: int | None = None  # the colour of a configuration


@dataclass(frozen=True)
class Table:
    """A table of figures that can be sorted and copied; on a phone each row is a record."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    starts_group: tuple[bool, ...]  # row by row: is it parted from the one before?


def render_page(comparison: Comparison) -> str:
    """Return the page: no request goes out of it, so that it can be sent, archived and printed."""
    rows, verdicts = table_rows(comparison), judge(comparison)
    groups, left_out = fitting(plots.draw_plots(comparison))
    facts = list(facts_by_place(comparison))
    places = list(dict.fromkeys(place_text(fact.case, fact.workers) for fact in facts))
    varied = [fact for fact in facts if fact.is_varied]
    told = [fact for fact in facts if not fact.is_varied]
    return template("report.html.jinja").render(
        title=page_title(comparison),
        question=comparison.plan["question"],
        subtitle=subtitle(comparison),
        created=created_text(comparison),
        folder=comparison.folder.resolve().name,
        verdicts=[(verdict, explain(verdict, comparison)) for verdict in verdicts],
        verdict_plot=plots.plot_verdicts(verdicts),
        warnings=load_warnings(comparison),
        troubles=troubles(comparison),
        places=places,
        by_place=len(places) <= MANY_COLUMNS,
        facts=fact_lines([fact for fact in told if not fact.is_flag], places),
        flags=fact_lines([fact for fact in told if fact.is_flag], places),
        varied=fact_lines(varied, places),
        results=results_table(comparison, rows),
        resources=resources_table(comparison, resource_rows(comparison)),
        stragglers=straggler_text(resource_rows(comparison)),
        input=input_table(comparison, input_rows(comparison)),
        groups=groups,
        left_out=left_out,
        commands=commands(comparison),
        many_commands=MANY_COMMANDS,
        machine=environment_lines(comparison, MACHINE),
        software=environment_lines(comparison, SOFTWARE),
        transports=transports(comparison),
        variables=comparison.plan["environment"],
        details=configuration_lines(comparison),
        reproduce=reproduce_lines(comparison),
        limits=limits(comparison, verdicts),
        methods=list(dict.fromkeys(v.speed.method for v in verdicts if v.speed)),
    )


def render_side_by_side(comparisons: Sequence[Comparison]) -> str:
    """Return the page of several comparisons: one table, and what differs."""
    cells, headers, _ = text.side_by_side_table(comparisons)
    words = 3 if headers[0] == "case" else 2  # the columns of words, and the number of workers
    columns = tuple(Column(h.replace("\n", " "), i >= words - 1) for i, h in enumerate(headers))
    rows = tuple(tuple(Cell(cell) for cell in line) for line in cells)
    letters = text.letters_of(comparisons)
    return template("side_by_side.html.jinja").render(
        title="Comparisons side by side",
        named=list(zip(letters, names_of(comparisons), comparisons, strict=True)),
        subtitle=subtitle,
        created=created_text,
        judge=judge,
        notices=text.notices,
        results=Table(columns, rows, tuple(False for _ in rows)),
        note=text.UNPAIRED,
        differences=find_differences(comparisons),
        by_place=True,
        places=(),
    )


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
    """Compare the runs of each case at each number of workers."""
    for case in comparison.cases:
        for workers in comparison.workers:
            runs = [r for r in comparison.complete if (r.case, r.workers) == (case, workers)]
            yield from compare_facts(comparison, runs)


def place_text(case: str, workers: int) -> str:
    return f"{plots.named(case)}{count(workers, 'worker')}"


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


# --------------------------------------------------------------------------------------- the tables


def results_table(comparison: Comparison, rows: Sequence[Row]) -> Table:
    """Return the table of results."""
    columns = (
        Column("workers"),
        Column("images/s"),
        Column("scaling, %"),
        Column("CPU ms per image"),
        Column("training, s"),
        Column("top-1, %"),
        Column("top-5, %"),
        Column("loss"),
        Column("weights", is_number=False),
        Column("blocks"),
    )

    def cells(row: Row) -> tuple[Cell, ...]:
        blocks = f"{row.blocks} of {row.planned_blocks}"
        return (
            Cell(str(row.workers)),
            Cell(
                three_digits(row.images_per_second),
                row.images_per_second,
                aside=f"({three_digits(row.lowest)}–{three_digits(row.highest)})",
            ),
            number_cell(row.efficiency, "{:.0f}", scale=100),
            Cell(three_digits(row.cpu_ms_per_image), row.cpu_ms_per_image),
            Cell(f"{row.train_seconds:,.1f}", row.train_seconds),
            number_cell(row.top1, "{:.2f}"),
            number_cell(row.top5, "{:.2f}"),
            Cell(loss_text(row.loss), row.loss),
            Cell(row.weights),
            Cell(str(row.blocks))
            if row.blocks == row.planned_blocks
            else Cell(blocks, row.blocks, is_alarm=True),
        )

    return cell_table(comparison, columns, rows, cells)


# Energy: field of ResourceRow, its column, and how a figure is written.
ENERGY = (
    ("gpu_joules_per_image", "GPU J per image", None),
    ("gpu_watts", "GPU watts", "{:,.0f}"),
    ("gpu_utilization_percent", "GPU busy, %", "{:.0f}"),
    ("cpu_joules_per_image", "CPU J per image", None),
)


def resources_table(comparison: Comparison, rows: Sequence[ResourceRow]) -> Table:
    """Return the table of what each cell used; energy is a single column if none was measured."""
    energy = [
        (field, name, pattern)
        for field, name, pattern in ENERGY
        if any(getattr(row, field) is not None for row in rows)
    ] or [("gpu_joules_per_image", "energy, J per image", None)]
    columns = (
        Column("workers"),
        Column("memory, MB"),
        Column("CPU s for 1,000 images"),
        Column("straggler spread, %"),
        *(Column(name) for _, name, _ in energy),
    )

    def cells(row: ResourceRow) -> tuple[Cell, ...]:
        spread = None if row.straggler_ratio is None else row.straggler_ratio - 1
        return (
            Cell(str(row.workers)),
            Cell(f"{row.peak_memory_bytes / 1e6:,.0f}", row.peak_memory_bytes / 1e6),
            number_cell(row.cpu_seconds_per_image, scale=1000),
            number_cell(spread, "{:.1f}", "–" if row.workers == 1 else NOT_MEASURED, scale=100),
            *(number_cell(getattr(row, field), p, NOT_MEASURED) for field, _, p in energy),
        )

    return cell_table(comparison, columns, rows, cells)


def straggler_text(rows: Sequence[ResourceRow]) -> str:
    """Say what the straggler spread is taken over."""
    phases = dict.fromkeys(row.straggler_phases for row in rows if row.straggler_ratio is not None)
    return " or ".join(phases)


def input_table(comparison: Comparison, rows: Sequence[InputRow]) -> Table | None:
    """Return the table of what each cell read; None if no run measured it."""
    columns = (
        Column("workers"),
        Column("images/s"),
        Column("files/s"),
        Column("MB/s"),
        Column("input wait, %"),
    )
    if all(row.wait_share is None and row.images_per_second is None for row in rows):
        return None

    def cells(row: InputRow) -> tuple[Cell, ...]:
        return (
            Cell(str(row.workers)),
            number_cell(row.images_per_second, none=NOT_MEASURED),
            number_cell(row.files_per_second, none="–"),
            number_cell(row.megabytes_per_second, none="–"),
            number_cell(row.wait_share, "{:.2f}", NOT_MEASURED, scale=100),
        )

    return cell_table(comparison, columns, rows, cells)


def number_cell(
    value: float | None, pattern: str | None = None, none: str = "–", scale: float = 1
) -> Cell:
    """Return a figure's cell; without a pattern it gets three digits."""
    if value is None:
        return Cell(none)
    scaled = scale * value
    return Cell(pattern.format(scaled) if pattern else plain_number(scaled), scaled)


def plain_number(value: float) -> str:
    return three_digits(value) if value > 0 else f"{value:g}"


def cell_table(
    comparison: Comparison,
    columns: tuple[Column, ...],
    rows: Sequence[Any],
    cells: Callable[[Any], tuple[Cell, ...]],
) -> Table:
    """Return a table with a row for each cell; with a column for the case if there are several."""
    several = len(comparison.cases) > 1
    names = comparison.plan["configurations"]
    before = ((Column("case", is_number=False),) if several else ()) + (
        Column("configuration", is_number=False),
    )
    places = [(row.case, row.workers) for row in rows]
    return Table(
        (*before, *columns),
        tuple(
            (
                *((Cell(row.case),) if several else ()),
                Cell(row.configuration, series=names.index(row.configuration) % len(COLOURS)),
                *cells(row),
            )
            for row in rows
        ),
        tuple(i > 0 and places[i] != places[i - 1] for i in range(len(rows))),
    )


# -------------------------------------------------------------------------- commands, environment


def commands(comparison: Comparison) -> list[dict[str, Any]]:
    """Return the commands in the order in which they ran."""
    return [
        {
            "name": plots.named(run.case) + run.name,
            "block": run.block,
            "text": run.command or shlex.join(run.environment.command),
            "status": run.status,
        }
        for run in comparison.runs
    ]


def environment_lines(comparison: Comparison, fields: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return each field's value; all values, and of which runs, where they do not agree."""
    order = comparison.plan["configurations"]
    runs = sorted(
        comparison.complete, key=lambda run: (order.index(run.configuration), run.workers)
    )
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
            run.summary.transport,
            short(run.environment.threads),
        )
        for run in comparison.complete
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
