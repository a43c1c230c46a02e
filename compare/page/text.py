"""The report as text: for the terminal, as Markdown, as CSV and as JSON."""

import csv
import io
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from operator import attrgetter
from typing import Any

from compare.evidence.equality import difference_text
from compare.evidence.notices import notices
from compare.evidence.phases import PHASES, phase_differences, phase_rows
from compare.evidence.records import Comparison, RunRecord
from compare.evidence.rows import (
    by_turns,
    input_rows,
    ladder_rows,
    resource_rows,
    speed_rows,
    step_rows,
    training_rows,
)
from compare.evidence.verdicts import Verdict, correction_text, judge
from compare.evidence.words import count
from compare.page.context import created_text, limits, page_title, reproduce_lines, subtitle
from compare.page.recommendation import recommendations
from compare.page.side_by_side import (
    UNPAIRED,
    find_differences,
    letters_of,
    match_cells,
    names_of,
    side_by_side_table,
)
from compare.page.tables import Table, grid, of_case, square_tables, table_text, text_tables
from recipe.record.schema import Energy

# ------------------------------------------------------------------------------ for the terminal


def terminal_report(comparison: Comparison, price_per_hour: float | None = None) -> str:
    """Return tables, verdicts, what differs and what is missing, and last, where a reader of a
    terminal looks first, the recommendation."""
    verdicts = judge(comparison)
    tables = text_tables(comparison, verdicts, price_per_hour)
    parts: list[str] = [comparison.plan["question"] or ""]
    for case in comparison.cases:
        if case:
            parts.append(f"== {case}")
        shown = [of_case(table, case) for table in tables]
        shown += square_tables(comparison, verdicts, case)
        parts += [f"{table.title}\n\n{table_text(table)}" for table in shown if table.rows]
        parts += [verdict_text(verdict) for verdict in verdicts if verdict.case == case]
    parts.append(correction_text(comparison, verdicts))
    for title, lines in notices(comparison):
        parts.append("\n".join([f"{title}:", *(f"  {line}" for line in lines)]))
    parts += recommendations(comparison, verdicts)
    return "\n\n".join(part for part in parts if part)


def verdict_text(verdict: Verdict) -> str:
    return "\n".join([verdict.sentence(), *(f"  {line}" for line in evidence(verdict))])


def evidence(verdict: Verdict) -> list[str]:
    """Return what stands under a verdict: what differs, or what supports it."""
    return [*(difference_text(fact) for fact in verdict.differences), *support(verdict)]


def support(verdict: Verdict) -> list[str]:
    """Return what supports a verdict: weights, CPU time, and the order in which the two began."""
    lines = [verdict.training_sentence(), verdict.cpu_sentence()]
    began, blocks = verdict.first_in
    if blocks and not (verdict.differences or verdict.is_interaction):
        lines.append(f"{verdict.first_label} was first in {began} of {count(blocks, 'block')}.")
    return [line for line in lines if line]


# ---------------------------------------------------------------------------------- side by side


def side_by_side_report(comparisons: Sequence[Comparison]) -> str:
    """Return the comparisons' cells in one table, what differs, and the verdict of each."""
    names = names_of(comparisons)
    letters = letters_of(comparisons)
    parts = ["\n".join(f"{letter}  {name}" for letter, name in zip(letters, names, strict=True))]
    parts += [table_text(side_by_side_table(comparisons)), UNPAIRED]
    if differences := find_differences(comparisons):
        told = [[d.field, *map(shortened, d.values)] for d in differences]
        parts.append(grid(told, ["differs", *letters], ["left"] * (1 + len(letters))))
    for letter, comparison in zip(letters, comparisons, strict=True):
        verdicts = judge(comparison)
        lines = [f"{letter}: {verdict_text(verdict)}" for verdict in verdicts]
        lines += filter(None, [correction_text(comparison, verdicts)])
        for title, told_lines in notices(comparison):
            lines += [f"{letter}: {title}:", *(f"  {line}" for line in told_lines)]
        parts.append("\n".join(lines))
    return "\n\n".join(part for part in parts if part)


def shortened(text: str, longest: int = 40) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


# ------------------------------------------------------------------------------------- Markdown


def as_markdown(comparisons: Sequence[Comparison], price_per_hour: float | None = None) -> str:
    """Return the report as Markdown that can be pasted into an issue."""
    if len(comparisons) > 1:
        return markdown_side_by_side(comparisons)
    comparison = comparisons[0]
    verdicts = judge(comparison)
    tables = text_tables(comparison, verdicts, price_per_hour)
    parts = [
        f"### {page_title(comparison)}",
        comparison.plan["question"] or "",
        f"{escaped(subtitle(comparison))}  \n{created_text(comparison)}",
        *(f"**{escaped(line)}**" for line in recommendations(comparison, verdicts)),
    ]
    for case in comparison.cases:
        if case:
            parts.append(f"#### {escaped(case)}")
        parts += [markdown_table(t) for t in square_tables(comparison, verdicts, case)]
        parts += [markdown_verdict(verdict) for verdict in verdicts if verdict.case == case]
        parts += [markdown_table(of_case(table, case)) for table in tables]
    parts += [correction_text(comparison, verdicts), *markdown_notices(comparison)]
    reproduce = "\n".join(reproduce_lines(comparison))
    parts.append(folded("How to reproduce", f"```bash\n{reproduce}\n```"))
    not_shown = "\n".join(f"- {escaped(line)}" for line in limits(comparison, verdicts))
    parts.append(folded("What this does not show", not_shown))
    return "\n\n".join(part for part in parts if part) + "\n"


def markdown_verdict(verdict: Verdict, letter: str = "") -> str:
    lines = [f"  - {escaped(line)}" for line in evidence(verdict)]
    return "\n".join([f"- {letter}{escaped(verdict.sentence())}", *lines])


def markdown_notices(comparison: Comparison, letter: str = "") -> list[str]:
    return [
        "\n".join([f"**{letter}{title}**", "", *(f"- {escaped(line)}" for line in lines)])
        for title, lines in notices(comparison)
    ]


def markdown_table(table: Table) -> str:
    if not table.rows:
        return ""
    return f"**{table.title}**\n\n{table_text(table, markdown=True)}\n\n{escaped(table.note)}"


def markdown_side_by_side(comparisons: Sequence[Comparison]) -> str:
    letters = letters_of(comparisons)
    named = zip(letters, names_of(comparisons), strict=True)
    parts = [
        "### Side by side",
        "\n".join(f"- {letter}: `{name}`" for letter, name in named),
        table_text(side_by_side_table(comparisons), markdown=True),
        UNPAIRED,
    ]
    if differences := find_differences(comparisons):
        told = [[d.field, *d.values] for d in differences]
        align = ["left"] * (1 + len(letters))
        parts.append(grid(told, ["differs", *letters], align, markdown=True))
    for letter, comparison in zip(letters, comparisons, strict=True):
        verdicts, of = judge(comparison), f"{letter}: "
        parts += [markdown_verdict(verdict, of) for verdict in verdicts]
        parts += [correction_text(comparison, verdicts), *markdown_notices(comparison, of)]
    return "\n\n".join(part for part in parts if part) + "\n"


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
    "transport": "summary.transport", "seed": "config.seed", "arch": "config.arch",
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


def as_csv(comparisons: Sequence[Comparison]) -> str:
    """Return a line for each planned run and each turn, with units in the names of the columns; a
    figure that was not measured is empty."""
    lines: list[dict[str, Any]] = []
    for name, comparison in zip(names_of(comparisons), comparisons, strict=True):
        lines += [
            {"comparison": name, **run_line(run, planned)}
            for run, planned in zip(comparison.runs, comparison.plan["runs"], strict=True)
        ]
        lines += [{"comparison": name, **line} for line in turn_lines(comparison)]
    text = io.StringIO()
    columns = dict.fromkeys(column for line in lines for column in line)
    writer = csv.DictWriter(text, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def run_line(run: RunRecord, planned: dict[str, Any]) -> dict[str, Any]:
    """Return what is known of a run, flat."""
    figures = {
        name: attrgetter(path)(run.written) if run.written else None
        for name, path in RUN_FIGURES.items()
    }
    if run.written is None:
        figures["seed"] = planned.get("seed")
    return {
        "measured_by": "run",
        "case": run.case,
        "configuration": run.configuration,
        "engine": run.engine,
        "launcher": run.launcher,
        "workers": run.workers,
        "block": run.block,
        "status": run.status,
        "exit_code": run.exit_code,
        **figures,
        "other_load_cores": run.other_load,
        "folder": planned["folder"],
    }


def turn_lines(comparison: Comparison) -> Iterator[dict[str, Any]]:
    """Yield a line for each turn, flat."""
    if not by_turns(comparison):
        return
    for case, workers in dict.fromkeys(cell[:2] for cell in comparison.cells):
        for block in comparison.turn_blocks(case, workers):
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


def as_json(comparisons: Sequence[Comparison]) -> str:
    """Return the whole report as an object; of several comparisons, a list of them and the table
    of their cells. What is no number in JSON (a loss that diverged) is null."""
    if len(comparisons) == 1:
        value = report_value(comparisons[0])
    else:
        value = {
            "comparisons": [report_value(comparison) for comparison in comparisons],
            "side_by_side": [
                {
                    "case": line.case,
                    "workers": line.workers,
                    "configuration": line.configuration,
                    "images_per_second": [
                        None if row is None else row.images_per_second for row in line.rows
                    ],
                    "unpaired_ratios_to_first": line.ratios(lambda row: row.images_per_second),
                }
                for line in match_cells(comparisons)
            ],
            "differences": [asdict(difference) for difference in find_differences(comparisons)],
            "note": UNPAIRED,
        }
    return json.dumps(finite(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def report_value(comparison: Comparison) -> dict[str, Any]:
    verdicts = judge(comparison)
    phases = phase_rows(comparison)
    rows: dict[str, Sequence[Any]] = {
        "speed": speed_rows(comparison),
        "trainings": training_rows(comparison),
        "ladder": ladder_rows(comparison),
        "phases": [*phases, *phase_differences(phases, verdicts)],
        "resources": resource_rows(comparison),
        "steps": step_rows(comparison),
        "input": input_rows(comparison),
    }
    return {
        "comparison": str(comparison.folder),
        "title": page_title(comparison),
        "plan": comparison.plan,
        "recommendations": recommendations(comparison, verdicts),
        "verdicts": [
            {
                **asdict(verdict),
                "sentence": verdict.sentence(),
                "interval_method": verdict.speed.method if verdict.speed else None,
            }
            for verdict in verdicts
        ],
        **{name: [asdict(row) for row in found] for name, found in rows.items()},
        "runs": [
            run_line(run, planned)
            for run, planned in zip(comparison.runs, comparison.plan["runs"], strict=True)
        ],
        "turns": list(turn_lines(comparison)),
        "correction": correction_text(comparison, verdicts),
        "notices": dict(notices(comparison)),
        "limits": limits(comparison, verdicts),
        "reproduce": reproduce_lines(comparison),
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
