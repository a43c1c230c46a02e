"""The report as text: for the terminal, as Markdown, as CSV and as JSON."""

import csv
import io
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from operator import attrgetter
from typing import Any

import msgspec

from compare.evidence.equality import difference_text
from compare.evidence.records import Comparison
from compare.evidence.rows import PHASES
from compare.evidence.verdicts import Verdict
from compare.page.report import Report
from compare.page.side_by_side import UNPAIRED, SideBySide
from compare.page.tables import Table, grid, of_case, square_tables, table_text, text_tables
from recipe.record.schema import Energy

# ------------------------------------------------------------------------------ for the terminal


def terminal_report(report: Report) -> str:
    """Return tables, verdicts, what differs and what is missing, and last, where a reader of a
    terminal looks first, what was not beaten."""
    tables = text_tables(report)
    parts: list[str] = [report.comparison.plan.question or ""]
    for case in report.comparison.cases:
        parts.append(f"== {case}" if case else "")
        shown = [of_case(table, case) for table in tables] + square_tables(report, case)
        parts += [f"{table.title}\n\n{table_text(table)}" for table in shown if table.rows]
        parts += [verdict_text(verdict) for verdict in report.verdicts if verdict.case == case]
    parts += [report.correction, *notice_texts(report), *report.not_beaten]
    return "\n\n".join(part for part in parts if part)


def verdict_text(verdict: Verdict) -> str:
    return "\n".join([verdict.sentence(), *(f"  {line}" for line in evidence(verdict))])


def evidence(verdict: Verdict) -> list[str]:
    """Return what stands under a verdict: what differs, or what supports it."""
    return [*(difference_text(fact) for fact in verdict.differences), *verdict.support()]


def notice_texts(report: Report, of: str = "") -> list[str]:
    return ["\n".join([f"{of}{title}:", *(f"  {line}" for line in lines)])
            for title, lines in report.notices]  # fmt: skip


def side_by_side_text(reports: Sequence[Report], markdown: bool = False) -> str:
    """Return the comparisons' cells in one table, what differs, and the verdicts of each."""
    both = SideBySide(reports)
    named = zip(both.letters, both.names, strict=True)
    pattern = "- {}: `{}`" if markdown else "{}  {}"
    parts = ["### Side by side" * markdown, "\n".join(pattern.format(*pair) for pair in named)]
    parts += [table_text(both.table(), markdown), UNPAIRED, differences_grid(both, markdown)]
    for letter, report in zip(both.letters, reports, strict=True):
        of = f"{letter}: "
        if markdown:
            parts += [markdown_verdict(verdict, of) for verdict in report.verdicts]
            parts += [report.correction, *markdown_notices(report, of)]
        else:
            lines = [f"{of}{verdict_text(verdict)}" for verdict in report.verdicts]
            lines += [report.correction, *notice_texts(report, of)]
            parts.append("\n".join(filter(None, lines)))
    return "\n\n".join(part for part in parts if part) + "\n" * markdown


def differences_grid(both: SideBySide, markdown: bool) -> str:
    """Return in what comparisons differ as a table; empty if in nothing."""
    longest = 10_000 if markdown else 40
    lines = [
        [name, *(v if len(v) <= longest else f"{v[: longest - 1]}…" for v in values)]
        for name, values in both.differences.items()
    ]
    headers = ["differs", *both.letters]
    return grid(lines, headers, ["left"] * len(headers), markdown) if lines else ""


# ------------------------------------------------------------------------------------- Markdown


def as_markdown(reports: Sequence[Report]) -> str:
    """Return the report as Markdown that can be pasted into an issue."""
    if len(reports) > 1:
        return side_by_side_text(reports, markdown=True)
    report = reports[0]
    tables = text_tables(report)
    parts = [
        f"### {report.title}",
        report.comparison.plan.question or "",
        f"{escaped(report.subtitle)}  \n{report.created}",
        *(f"**{escaped(line)}**" for line in report.not_beaten),
    ]
    for case in report.comparison.cases:
        parts.append(f"#### {escaped(case)}" if case else "")
        parts += [markdown_table(table) for table in square_tables(report, case)]
        parts += [markdown_verdict(one) for one in report.verdicts if one.case == case]
        parts += [markdown_table(of_case(table, case)) for table in tables]
    parts += [report.correction, *markdown_notices(report)]
    reproduce = "\n".join(report.reproduce)
    parts.append(folded("How to reproduce", f"```bash\n{reproduce}\n```"))
    not_shown = "\n".join(f"- {escaped(line)}" for line in report.limits)
    parts.append(folded("What this does not show", not_shown))
    return "\n\n".join(part for part in parts if part) + "\n"


def markdown_verdict(verdict: Verdict, letter: str = "") -> str:
    lines = [f"  - {escaped(line)}" for line in evidence(verdict)]
    return "\n".join([f"- {letter}{escaped(verdict.sentence())}", *lines])


def markdown_notices(report: Report, letter: str = "") -> list[str]:
    return [
        "\n".join([f"**{letter}{title}**", "", *(f"- {escaped(line)}" for line in lines)])
        for title, lines in report.notices
    ]


def markdown_table(table: Table) -> str:
    if not table.rows:
        return ""
    return f"**{table.title}**\n\n{table_text(table, markdown=True)}\n\n{escaped(table.note)}"


def folded(title: str, text: str) -> str:
    return f"<details><summary>{title}</summary>\n\n{text}\n\n</details>"


def escaped(text: str) -> str:
    """Keep Markdown from reading signs in a text as marks; `_` inside of words is none."""
    for sign in "\\`*<|":
        text = text.replace(sign, f"\\{sign}")
    return text


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
    **{f"{field}_per_step": f"summary.phases.{field}" for field in PHASES},
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
    lines = [
        {"comparison": name, **line}
        for name, report in zip(SideBySide(reports).names, reports, strict=True)
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
    for case, workers in dict.fromkeys(cell[:2] for cell in comparison.cells):
        for block in comparison.blocks(case, workers):
            quiet = block.quiet_rounds
            for turn in block.turns:
                yield {
                    "measured_by": "turn",
                    "case": case,
                    "configuration": turn.side,
                    "workers": workers,
                    "block": block.number,
                    "round": turn.round,
                    "counts": int(turn.round in quiet),
                    "turn_seconds": turn.seconds,
                    "images_per_second": turn.images_per_second,
                    "cpu_seconds_per_image": turn.cpu_seconds_per_image,
                    "other_load_cores": turn.other_load,
                }


# ----------------------------------------------------------------------------------------- JSON


def as_json(reports: Sequence[Report]) -> str:
    """Return the whole report as an object; of several comparisons, a list of them and the table
    of their cells. What is no number in JSON (a loss that diverged) is null."""
    if len(reports) == 1:
        value = report_value(reports[0])
    else:
        both = SideBySide(reports)
        value = {
            "comparisons": [report_value(report) for report in reports],
            "side_by_side": [
                {
                    "case": line.case,
                    "workers": line.workers,
                    "configuration": line.configuration,
                    "images_per_second": [row and row.images_per_second for row in line.rows],
                    "unpaired_ratios_to_first": line.ratios("images_per_second"),
                }
                for line in both.lines
            ],
            "differences": both.differences,
            "note": UNPAIRED,
        }
    return json.dumps(finite(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def report_value(report: Report) -> dict[str, Any]:
    """Return a report as a JSON object."""
    comparison = report.comparison
    return {
        "comparison": str(comparison.folder),
        "title": report.title,
        "plan": msgspec.to_builtins(comparison.plan, enc_hook=float),
        "not_beaten": report.not_beaten,
        "verdicts": [
            {
                **asdict(verdict),
                "sentence": verdict.sentence(),
                "interval_method": verdict.speed.method if verdict.speed else None,
            }
            for verdict in report.verdicts
        ],
        "speed": [asdict(row) for row in report.speed],
        "trainings": [asdict(row) for row in report.trainings],
        "phases": [asdict(row) for row in (*report.phases, *report.phase_differences)],
        "steps": [asdict(row) for row in report.steps],
        "runs": list(run_lines(comparison)),
        "turns": list(turn_lines(comparison)),
        "correction": report.correction,
        "notices": dict(report.notices),
        "limits": report.limits,
        "reproduce": report.reproduce,
    }


def finite(value: Any) -> Any:
    """Replace what JSON has no number for."""
    if isinstance(value, dict):
        return {str(name): finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
