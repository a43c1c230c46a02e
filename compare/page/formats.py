"""The report in each of its forms: for the terminal, as Markdown, CSV and JSON, and as one HTML
page. The page loads nothing from elsewhere, so it can be sent, archived and printed."""

import csv
import io
import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any

import msgspec

from compare.evidence.accuracy import target_of
from compare.evidence.equality import CUDA_VERSION, MAY_CHANGE, Fact
from compare.evidence.record import Record
from compare.evidence.words import count, difference_text, place_text, short, shortest_unique_names
from compare.page.accuracy import accuracy_sentence
from compare.page.chart import Plot, template
from compare.page.gate import gate_of
from compare.page.plots import draw_plots
from compare.page.report import ASIDE, ENVIRONMENT, Report, SideBySide
from compare.page.sentences import below, equal_work_text, goal_verdict, sentence, support
from compare.page.tables import (
    APART,
    POOLED,
    Table,
    all_tables,
    escaped,
    goals_tables,
    side_by_side_tables,
    square_tables,
    table_text,
)
from recipe.files import json_for_readers
from recipe.record.schema import Energy

# Facts of machine and software; the others are settings and digests.
OF_MACHINE = {*ENVIRONMENT, CUDA_VERSION} - {"cuda"}

# ------------------------------------------------------------- for the terminal, and as Markdown


def main_tables(report: Report) -> list[Table]:
    """Return the tables that every form shows."""
    first = [*goals_tables([report]), *square_tables(report)]
    return [*first, *(table for table in all_tables(report) if not table.is_detail)]


def as_text(reports: Sequence[Report]) -> str:
    """Return the reports as text for a terminal."""
    return rendered("report.txt.jinja", reports)


def as_markdown(reports: Sequence[Report]) -> str:
    """Return the reports as Markdown that can be pasted into an issue."""
    return rendered("report.md.jinja", reports)


def rendered(name: str, reports: Sequence[Report]) -> str:
    """Return the reports by a template of text, with one empty line between its parts."""
    both = SideBySide(reports) if len(reports) > 1 else None
    text = template(name).render(
        reports=reports,
        both=both,
        gate=gate_of(reports) if any(report.goals for report in reports) else None,
        tables=side_by_side_tables(both) if both else main_tables(reports[0]),
        apart=APART,
        pooled=POOLED,
        table_text=table_text,
        escaped=escaped,
        sentence=sentence,
        below=below,
        accuracy_sentence=accuracy_sentence,
    )
    return re.sub(r"\n{3,}", "\n\n", str(text).strip()) + "\n"


# ------------------------------------------------------------------------------------------- HTML


def as_page(reports: Sequence[Report]) -> str:
    """Return the page of one comparison, or of several."""
    shared = {
        "aside": ASIDE,
        "sentence": sentence,
        "support": support,
        "difference_text": difference_text,
        "accuracy_sentence": accuracy_sentence,
    }
    if len(reports) > 1:
        both = SideBySide(reports)
        page = template("side_by_side.html.jinja")
        return str(page.render(both=both, tables=side_by_side_tables(both), **shared))
    [report] = reports
    record = report.record
    varied, others = (
        [fact for fact in report.facts if fact.is_varied is wanted] for wanted in (True, False)
    )
    plots, sections = draw_plots(report), defaultdict[str, list[Plot]](list)
    for plot in plots:
        if plot.name != "verdict":  # which stands at the top
            sections[plot.section].append(plot)
    page = template("report.html.jinja").render(
        report=report,
        record=record,
        folder=record.folder.resolve().name,
        squares=[*goals_tables([report]), *square_tables(report)],
        places=len(record.groups),
        machine=fact_lines(fact for fact in others if fact.field in OF_MACHINE),
        settings=fact_lines(fact for fact in others if fact.field not in OF_MACHINE),
        varied=fact_lines(varied),
        tables=all_tables(report),
        plots=plots,
        sections=sections,
        commands=commands(record),
        has_prediction=(record.folder / "prediction.html").exists(),
        count=count,
        **shared,
    )
    return str(page)


def fact_lines(facts: Iterable[Fact]) -> list[dict[str, Any]]:
    """Arrange facts for the page: a line for each field, unequal ones first. A line of an unequal
    field says in what the runs differ, and at which case and number of workers."""
    by_field = defaultdict[str, list[Fact]](list)
    for fact in facts:
        by_field[fact.field].append(fact)
    lines = []
    for field, same_field in by_field.items():
        unequal = [fact for fact in same_field if fact.unequal_blocks]
        texts = dict.fromkeys(fact_text(fact) for fact in unequal or same_field)
        text = "; ".join(filter(None, texts)) or "none"
        lines.append({"field": field, "text": text, "is_equal": not unequal})
    return sorted(lines, key=lambda line: line["is_equal"])


def fact_text(fact: Fact) -> str:
    """Return the value that runs have in common, or in what they differ."""
    if fact.unequal_blocks:
        return f"{difference_text(fact).split(': ', 1)[1]} ({place_text(fact.case, fact.workers)})"
    values = dict.fromkeys(short(row.value) for row in fact.rows)
    if fact.field in MAY_CHANGE:
        return ", then ".join(values)
    value = next(iter(values))
    is_of_block = fact.is_of_block or (fact.results and len(values) > 1)
    return f"{value}, another in each block" if is_of_block else value


def commands(record: Record) -> list[tuple[str, str]]:
    """Return the commands of the first block (those of other blocks differ only in seed and
    folder), and the digests of a user's own scripts."""
    runs = record.runs or record.sides
    of_first_block = [
        (
            ", ".join(filter(None, (run.case, run.name))),
            run.command or shlex.join(run.environment.command),
        )
        for run in runs
        if run.block == runs[0].block and (run.command or run.is_complete)
    ]
    scripts = record.plan.scripts.items()
    return [*of_first_block, *((f"SHA-256 of {name}", digest) for name, digest in scripts)]


# -------------------------------------------------------------------------------------------- CSV


# The columns of a complete run's figures, and where its record holds them.
RUN_FIGURES = {
    "transport": "summary.transport", "arch": "config.arch",
    "batch_size_per_worker": "config.batch_size", "precision": "config.precision",
    "ranks_per_gpu": "environment.ranks_per_gpu",
    "images_per_second": "summary.images_per_second",
    "cpu_seconds_per_image": "summary.cpu_seconds_per_image",
    "train_seconds": "summary.train_seconds", "total_seconds": "summary.total_seconds",
    "cpu_seconds": "summary.cpu_seconds", "peak_memory_bytes": "summary.peak_memory_bytes",
    "gradient_bytes_per_step": "summary.gradient_bytes",
    "network_bytes_per_step": "summary.network_bytes_per_step", "epochs": "summary.epochs",
    "steps": "summary.steps", "samples_seen": "summary.samples_seen",
    "validation_loss": "summary.loss", "top1_percent": "summary.top1",
    "top5_percent": "summary.top5", "weights_sha256": "summary.weights_sha256",
    **{
        f"{phase}_seconds_per_step": f"summary.phases.{phase}_seconds"
        for phase in ("data", "forward", "backward", "exposed_communication", "optimizer")
    },
    "step_seconds": "summary.phases.step_seconds",
    "input_files_per_second": "summary.input.files_per_second",
    "input_megabytes_per_second": "summary.input.megabytes_per_second",
    "input_wait_share_of_step": "summary.input.wait_share",
    **{field.name: f"summary.energy.{field.name}" for field in fields(Energy)},
    "cpu_model": "environment.cpu_model", "device_name": "environment.device_name",
}  # fmt: skip
OF_RUN = ("case", "configuration", "engine", "launcher", "workers", "block", "status", "exit_code")


def as_csv(reports: Sequence[Report]) -> str:
    """Return a line for each planned run and each turn. Columns have units in their names; a
    figure that was not measured is empty."""
    names = shortest_unique_names([report.record.folder for report in reports])
    lines = [
        {"comparison": name, **line}
        for name, report in zip(names, reports, strict=True)
        for line in (*run_lines(report.record), *turn_lines(report.record))
    ]
    text = io.StringIO()
    columns = dict.fromkeys(column for line in lines for column in line)
    writer = csv.DictWriter(text, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def run_lines(record: Record) -> Iterator[dict[str, Any]]:
    """Yield a line for each planned run."""
    groups = {group.place: group for group in record.groups}
    for run in record.runs:
        figures = {
            name: attrgetter(path)(run) if run.is_complete else None
            for name, path in RUN_FIGURES.items()
        }
        group = groups[run.case, run.workers]
        target = target_of(group, [run.configuration]) if run.is_complete else None
        reached = None if target is None else run.first_to_reach(target)
        figures["target_top1_percent"] = target
        figures["epochs_to_target"] = run.epochs_at(reached) if reached else None
        figures["seconds_to_target"] = reached.train_seconds_so_far if reached else None
        figures["seed"] = run.config.seed if run.is_complete else run.seed
        yield {
            "measured_by": "run",
            **{name: getattr(run, name) for name in OF_RUN},
            **figures,
            "other_load_cores": run.other_load,
            "folder": str(run.folder.relative_to(record.folder)),
        }


def turn_lines(record: Record) -> Iterator[dict[str, Any]]:
    """Yield a line for each turn."""
    if not record.is_by_turns:
        return
    for group in record.groups:
        for block in group.turns:
            for turn in block.turns:
                yield {
                    "measured_by": "turn",
                    "case": group.case,
                    "configuration": turn.side,
                    "workers": group.workers,
                    "block": block.number,
                    "round": turn.round,
                    "purpose": turn.purpose,
                    "counts": int(turn.purpose == "speed" and turn.round in block.quiet_rounds),
                    "turn_seconds": turn.seconds,
                    "images_per_second": turn.images_per_second,
                    "cpu_seconds_per_image": turn.cpu_seconds_per_image,
                    "other_load_cores": turn.other_load,
                }


# ------------------------------------------------------------------------------------------- JSON


def as_json(reports: Sequence[Report]) -> str:
    """Return the whole report as an object; for several comparisons, a list of their reports, and
    what they show together. Either has the result of the gate. A number that JSON does not have (a
    loss that diverged) is null."""
    value = report_value(reports[0])
    if len(reports) > 1:
        both = SideBySide(reports)
        value = {
            "comparisons": [report_value(report) for report in reports],
            "headline": both.headline,
            "differences": both.differences,
            "occasions": both.occasions,
            "not_pooled": both.not_pooled,
        }
    value["gate"] = gate_of(reports)
    return json_for_readers(msgspec.to_builtins(value, enc_hook=float)) + "\n"  # plans' fractions


def report_value(report: Report) -> dict[str, Any]:
    """Return a report as a JSON object."""
    record = report.record
    return {
        "comparison": str(record.folder),
        "title": report.title,
        "plan": record.plan,
        "headline": report.headline,
        "next_step": report.next_step[1],
        "verdicts": [
            {
                **vars(verdict),
                "equal_work": equal_work_text(verdict),
                "sentence": sentence(verdict),
            }
            for verdict in report.verdicts
        ],
        "times_to_accuracy": [
            {**vars(verdict), "sentence": sentence(verdict)} for verdict in report.times
        ],
        "accuracies": [
            {**vars(verdict), "sentence": accuracy_sentence(verdict)}
            for verdict in report.accuracies
        ],
        "goals": [{**vars(goal), "verdict": goal_verdict(goal)} for goal in report.goals],
        "interactions": [
            {"case": case, "workers": workers, "speed": speed}
            for (case, workers), speed in report.interactions.items()
        ],
        "speed": report.speed,
        "trainings": report.trainings,
        "accuracy": report.accuracy,
        "phases": [*report.phases, *report.phase_differences],
        "runs": list(run_lines(record)),
        "turns": list(turn_lines(record)),
        "equal_weights": report.equal_weights,
        "ours": report.ours,
        "correction": report.correction,
        "counted": report.counted,
        "notices": dict(report.notices),
        "limits": report.limits,
        "reproduce": report.reproduce,
    }
