"""The report as text: for the terminal, as Markdown, as CSV and as JSON."""

import csv
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any

import msgspec

from compare.evidence.equality import difference_text
from compare.evidence.records import Comparison
from compare.evidence.words import shortest_unique_names
from compare.page.findings import Report, SideBySide
from compare.page.tables import (
    APART,
    POOLED,
    Table,
    all_tables,
    goals_tables,
    side_by_side_tables,
    square_tables,
    table_text,
)
from recipe.files import json_for_readers
from recipe.record.schema import Energy

# ------------------------------------------------------------- for the terminal, and as Markdown


def as_text(reports: Sequence[Report], markdown: bool = False) -> str:
    """Return what the reports say: for the terminal, with the answer to the plan's question last,
    where a reader looks first; or as Markdown that can be pasted into an issue."""
    first = reports[0]
    question = first.comparison.plan.question or ""
    tables = [*goals_tables([first.comparison]), *square_tables(first)]
    tables += [table for table in all_tables(first) if not table.is_detail]
    if len(reports) > 1:
        both = SideBySide(reports)
        parts = [table_part(table, markdown) for table in side_by_side_tables(both)]
        notes = [APART, POOLED * bool(both.occasions)]  # which Markdown has below the tables
        parts += [both.not_pooled, *([] if markdown else notes)]
        for letter, name, report in zip(both.letters, both.names, reports, strict=True):
            parts += [heading(f"{letter}: {name}", markdown), *finding_parts(report, markdown)]
    elif markdown:
        parts = [
            f"### {first.title}",
            question,
            escaped(first.subtitle),
            *(heading(line, markdown) for line in first.headline),
            *finding_parts(first, markdown),
            *(table_part(table, markdown) for table in tables),
            folded("How to reproduce", ["```bash", *first.reproduce, "```"]),
            folded("What this does not show", [f"- {escaped(line)}" for line in first.limits]),
        ]
    else:
        parts = [question, *(table_part(table, markdown) for table in tables)]
        parts += [*finding_parts(first, markdown), *first.headline]
    return "\n\n".join(part for part in parts if part) + "\n" * markdown


def finding_parts(report: Report, markdown: bool) -> list[str]:
    """Return the verdicts, each with what differs or what supports it, and what a reader must know
    beside them."""
    verdicts = [
        (verdict.sentence(), [*map(difference_text, verdict.differences), *verdict.support()])
        for verdict in report.verdicts
    ]
    return [
        *(listed(sentence, below, markdown) for sentence, below in verdicts),
        report.equal_weights,
        report.ours,
        report.correction,
        *(listed(f"{title}:", lines, markdown) for title, lines in report.notices),
    ]


def table_part(table: Table, markdown: bool) -> str:
    note = f"\n\n{escaped(table.note)}" if markdown and table.note else ""
    return f"{heading(table.title, markdown)}\n\n{table_text(table, markdown)}{note}"


def heading(text: str, markdown: bool) -> str:
    return f"**{escaped(text)}**" if markdown else text


def listed(text: str, lines: Sequence[str], markdown: bool) -> str:
    """Return a text with what belongs to it below."""
    if markdown:
        return "\n".join([f"- {escaped(text)}", *(f"  - {escaped(line)}" for line in lines)])
    return "\n".join([text, *(f"  {line}" for line in lines)])


def folded(title: str, lines: Sequence[str]) -> str:
    text = "\n".join(lines)
    return f"<details><summary>{title}</summary>\n\n{text}\n\n</details>"


def escaped(text: str) -> str:
    """Keep Markdown from reading signs in a text as marks; `_` inside of words is none."""
    return re.sub(r"[\\`*<|]", r"\\\g<0>", text)


# ------------------------------------------------------------------------------------------ CSV


# What a complete run says of itself, and where.
RUN_FIGURES = {
    "transport": "summary.transport", "arch": "config.arch",
    "batch_size_per_worker": "config.batch_size", "precision": "config.precision",
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
    """Return a line for each planned run and each turn, with units in the names of the columns; a
    figure that was not measured is empty."""
    names = shortest_unique_names([report.comparison.folder for report in reports])
    lines = [
        {"comparison": name, **line}
        for name, report in zip(names, reports, strict=True)
        for line in (*run_lines(report.comparison), *turn_lines(report.comparison))
    ]
    text = io.StringIO()
    columns = dict.fromkeys(column for line in lines for column in line)
    writer = csv.DictWriter(text, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def run_lines(comparison: Comparison) -> Iterator[dict[str, Any]]:
    """Yield what is known of each run, flat."""
    for run in comparison.runs:
        figures = {
            name: attrgetter(path)(run) if run.is_complete else None
            for name, path in RUN_FIGURES.items()
        }
        figures["seed"] = run.config.seed if run.is_complete else run.seed
        yield {
            "measured_by": "run",
            **{name: getattr(run, name) for name in OF_RUN},
            **figures,
            "other_load_cores": run.other_load,
            "folder": str(run.folder.relative_to(comparison.folder)),
        }


def turn_lines(comparison: Comparison) -> Iterator[dict[str, Any]]:
    """Yield a line for each turn, flat."""
    if not comparison.is_by_turns:
        return
    for case, workers in comparison.plan.groups():
        for block in comparison.blocks(case, workers):
            for turn in block.turns:
                yield {
                    "measured_by": "turn",
                    "case": case,
                    "configuration": turn.side,
                    "workers": workers,
                    "block": block.number,
                    "round": turn.round,
                    "purpose": turn.purpose,
                    "counts": int(turn.purpose == "speed" and turn.round in block.quiet_rounds),
                    "turn_seconds": turn.seconds,
                    "images_per_second": turn.images_per_second,
                    "cpu_seconds_per_image": turn.cpu_seconds_per_image,
                    "other_load_cores": turn.other_load,
                }


# ----------------------------------------------------------------------------------------- JSON


def as_json(reports: Sequence[Report]) -> str:
    """Return the whole report as an object; of several comparisons, a list of them and the table
    of their cells. What is no number in JSON (a loss that diverged) is null."""
    value = report_value(reports[0])
    if len(reports) > 1:
        both = SideBySide(reports)
        value = {
            "comparisons": [report_value(report) for report in reports],
            "differences": both.differences,
            "occasions": both.occasions,
            "not_pooled": both.not_pooled,
        }
    return json_for_readers(msgspec.to_builtins(value, enc_hook=float)) + "\n"  # plans' fractions


def report_value(report: Report) -> dict[str, Any]:
    """Return a report as a JSON object."""
    comparison = report.comparison
    return {
        "comparison": str(comparison.folder),
        "title": report.title,
        "plan": comparison.plan,
        "headline": report.headline,
        "verdicts": [
            {**vars(verdict), "sentence": verdict.sentence()} for verdict in report.verdicts
        ],
        "interactions": [
            {"case": case, "workers": workers, "speed": speed}
            for (case, workers), speed in report.interactions.items()
        ],
        "speed": report.speed,
        "trainings": report.trainings,
        "phases": [*report.phases, *report.phase_differences],
        "runs": list(run_lines(comparison)),
        "turns": list(turn_lines(comparison)),
        "equal_weights": report.equal_weights,
        "ours": report.ours,
        "correction": report.correction,
        "notices": dict(report.notices),
        "limits": report.limits,
        "reproduce": report.reproduce,
    }
