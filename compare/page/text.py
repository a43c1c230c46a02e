"""The report as text: for the terminal, as Markdown, as CSV and as JSON."""

import csv
import io
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import tabulate

from compare.evidence.equality import difference_text
from compare.evidence.notices import load_warnings, troubles
from compare.evidence.phases import explain, phase_rows
from compare.evidence.records import Comparison, RunRecord
from compare.evidence.rows import Row, input_rows, resource_rows, table_rows
from compare.evidence.verdicts import Verdict, judge
from compare.evidence.words import loss_text, three_digits
from compare.page.context import created_text, limits, page_title, reproduce_lines, subtitle
from compare.page.side_by_side import find_differences, match_cells, names_of

tabulate.MIN_PADDING = 0  # of headers: the table is to fit into 100 columns
UNPAIRED = (
    "Ratios are of medians and unpaired: these runs were not made in the same blocks, so a change "
    "of the machine between them is part of the ratio. They have no interval; there is no verdict."
)

# ------------------------------------------------------------------------------ for the terminal


def terminal_report(comparison: Comparison) -> str:
    """Return tables, verdicts, what explains them, what differs, and what is missing."""
    rows, verdicts = table_rows(comparison), judge(comparison)
    parts = []
    if question := comparison.plan["question"]:
        parts.append(question)
    for case in comparison.cases:
        if case:
            parts.append(f"== {case}")
        if table := [row for row in rows if row.case == case]:
            parts.append(result_table(table))
        parts += [verdict_text(comparison, verdict) for verdict in verdicts if verdict.case == case]
    for title, lines in notices(comparison):
        parts.append("\n".join([f"{title}:", *(f"  {line}" for line in lines)]))
    return "\n\n".join(parts)


def verdict_text(comparison: Comparison, verdict: Verdict) -> str:
    lines = [verdict.sentence(), *(f"  {line}" for line in evidence(comparison, verdict))]
    return "\n".join(lines)


def evidence(comparison: Comparison, verdict: Verdict) -> list[str]:
    """Return what stands under a verdict: what differs, or what explains and supports it."""
    lines = [difference_text(fact) for fact in verdict.differences]
    lines += [explain(verdict, comparison), verdict.training_sentence(), verdict.cpu_sentence()]
    return [line for line in lines if line]


def notices(comparison: Comparison) -> list[tuple[str, list[str]]]:
    """Return the headed lists of what a reader must know beside the figures."""
    found = [
        ("Warnings: these figures may be unreliable", load_warnings(comparison)),
        ("Not in these figures", troubles(comparison)),
    ]
    return [(title, lines) for title, lines in found if lines]


HEADERS = (
    "configuration", "workers", "images/s", "scaling", "CPU ms\n/image", "top-1 %", "top-5 %",
    "loss", "weights", "blocks",
)  # fmt: skip
ALIGN = ("left", *["right"] * 7, "left", "right")


def result_cells(row: Row) -> list[str]:
    blocks = str(row.blocks)
    if row.blocks != row.planned_blocks:
        blocks += f" of {row.planned_blocks}"
    return [
        row.configuration,
        str(row.workers),
        three_digits(row.images_per_second),
        "" if row.efficiency is None else f"{100 * row.efficiency:.0f} %",
        three_digits(row.cpu_ms_per_image),
        "–" if row.top1 is None else f"{row.top1:.2f}",
        "–" if row.top5 is None else f"{row.top5:.2f}",
        loss_text(row.loss),
        row.weights,
        blocks,
    ]


def result_table(rows: Sequence[Row]) -> str:
    return table_text([result_cells(row) for row in rows], HEADERS, ALIGN)


def table_text(
    cells: Sequence[Sequence[str]],
    headers: Sequence[str],
    align: Sequence[str],
    markdown: bool = False,
) -> str:
    if markdown:
        headers = [header.replace("\n", " ") for header in headers]
        cells = [[cell.replace("|", "\\|") for cell in line] for line in cells]
    return tabulate.tabulate(
        cells,
        headers,
        tablefmt="pipe" if markdown else "simple",
        disable_numparse=True,
        colalign=align,
    )


# ---------------------------------------------------------------------------------- side by side


def side_by_side_report(comparisons: Sequence[Comparison]) -> str:
    """Return the comparisons' cells in one table, what differs, and the verdict of each."""
    names = names_of(comparisons)
    letters = letters_of(comparisons)
    parts = ["\n".join(f"{letter}  {name}" for letter, name in zip(letters, names, strict=True))]
    parts += [table_text(*side_by_side_table(comparisons)), UNPAIRED]
    if differences := find_differences(comparisons):
        told = [[d.field, *map(shortened, d.values)] for d in differences]
        table = table_text(told, ["differs", *letters], ["left"] * (1 + len(letters)))
        parts.append(table)
    for letter, comparison in zip(letters, comparisons, strict=True):
        lines = [f"{letter}: {verdict.sentence()}" for verdict in judge(comparison)]
        for title, told_lines in notices(comparison):
            lines += [f"{letter}: {title}:", *(f"  {line}" for line in told_lines)]
        parts.append("\n".join(lines))
    return "\n\n".join(part for part in parts if part)


def letters_of(comparisons: Sequence[Comparison]) -> list[str]:
    """Name comparisons A, B, ...: their own names would make a table too broad."""
    return [chr(ord("A") + i) if i < 26 else str(i + 1) for i in range(len(comparisons))]


def side_by_side_table(
    comparisons: Sequence[Comparison],
) -> tuple[list[list[str]], list[str], list[str]]:
    """Return the cells, the headers and the alignment of the table of several comparisons."""
    letters = letters_of(comparisons)
    lines = match_cells(comparisons)
    with_case = any(line.case for line in lines)
    figures: list[tuple[str, Callable[[Row], float]]] = [
        ("images/s", lambda row: row.images_per_second),
        ("CPU ms\n/image", lambda row: row.cpu_ms_per_image),
    ]
    headers = (["case"] if with_case else []) + ["configuration", "workers"]
    align = ["left"] * (len(headers) - 1) + ["right"]
    for name, _ in figures:
        headers += [f"{name}\n{letter}" for letter in letters]
        headers += [f"{letter} / {letters[0]}\nunpaired" for letter in letters[1:]]
        align += ["right"] * (2 * len(letters) - 1)
    cells = []
    for line in lines:
        texts = ([line.case] if with_case else []) + [line.configuration, str(line.workers)]
        for _, value_of in figures:
            texts += ["–" if row is None else three_digits(value_of(row)) for row in line.rows]
            texts += ["–" if r is None else f"{r:.3f}" for r in line.ratios(value_of)]
        cells.append(texts)
    return cells, headers, align


def shortened(text: str, longest: int = 40) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


# ------------------------------------------------------------------------------------- Markdown


def as_markdown(comparisons: Sequence[Comparison]) -> str:
    """Return the report as Markdown that can be pasted into an issue."""
    if len(comparisons) > 1:
        return markdown_side_by_side(comparisons)
    comparison = comparisons[0]
    rows, verdicts = table_rows(comparison), judge(comparison)
    parts = [
        f"### {page_title(comparison)}",
        comparison.plan["question"] or "",
        f"{escaped(subtitle(comparison))}  \n{created_text(comparison)}",
    ]
    for case in comparison.cases:
        if case:
            parts.append(f"#### {escaped(case)}")
        for verdict in verdicts:
            if verdict.case == case:
                lines = [f"- {escaped(line)}" for line in evidence(comparison, verdict)]
                parts.append("\n".join([f"**{escaped(verdict.sentence())}**", "", *lines]))
        if table := [row for row in rows if row.case == case]:
            cells = [result_cells(row) for row in table]
            parts.append(table_text(cells, HEADERS, ALIGN, markdown=True))
    for title, lines in notices(comparison):
        parts.append("\n".join([f"**{title}**", "", *(f"- {escaped(line)}" for line in lines)]))
    reproduce = "\n".join(reproduce_lines(comparison))
    parts.append(folded("How to reproduce", f"```bash\n{reproduce}\n```"))
    not_shown = "\n".join(f"- {escaped(line)}" for line in limits(comparison, verdicts))
    parts.append(folded("What this does not show", not_shown))
    return "\n\n".join(part for part in parts if part) + "\n"


def markdown_side_by_side(comparisons: Sequence[Comparison]) -> str:
    letters = letters_of(comparisons)
    named = zip(letters, names_of(comparisons), strict=True)
    parts = [
        "### Side by side",
        "\n".join(f"- {letter}: `{name}`" for letter, name in named),
        table_text(*side_by_side_table(comparisons), markdown=True),
        UNPAIRED,
    ]
    if differences := find_differences(comparisons):
        told = [[d.field, *d.values] for d in differences]
        align = ["left"] * (1 + len(letters))
        parts.append(table_text(told, ["differs", *letters], align, markdown=True))
    for letter, comparison in zip(letters, comparisons, strict=True):
        parts.append("\n".join(f"- {letter}: {escaped(v.sentence())}" for v in judge(comparison)))
    return "\n\n".join(part for part in parts if part) + "\n"


def folded(title: str, text: str) -> str:
    return f"<details><summary>{title}</summary>\n\n{text}\n\n</details>"


def escaped(text: str) -> str:
    """Keep Markdown from reading signs in a text as marks; `_` inside of words is none."""
    for sign in "\\`*<|":
        text = text.replace(sign, f"\\{sign}")
    return text


# ------------------------------------------------------------------------------------------ CSV


def as_csv(comparisons: Sequence[Comparison]) -> str:
    """Return a line for each planned run, with units in the names of the columns; a figure that
    was not measured is empty."""
    names = names_of(comparisons)
    lines = [
        run_line(name, run, planned)
        for name, comparison in zip(names, comparisons, strict=True)
        for run, planned in zip(comparison.runs, comparison.plan["runs"], strict=True)
    ]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def run_line(comparison: str, run: RunRecord, planned: dict[str, Any]) -> dict[str, Any]:
    """Return what is known of a run, flat."""
    written = run.written
    config = written and written.config
    summary = written and written.summary
    phases = summary and summary.phases
    return {
        "comparison": comparison,
        "case": run.case,
        "configuration": run.configuration,
        "engine": run.engine,
        "launcher": run.launcher,
        "transport": summary and summary.transport,
        "workers": run.workers,
        "block": run.block,
        "seed": config.seed if config else planned.get("seed"),
        "status": run.status,
        "exit_code": run.exit_code,
        "arch": config and config.arch,
        "batch_size_per_worker": config and config.batch_size,
        "precision": config and config.precision,
        "images_per_second": summary and summary.images_per_second,
        "cpu_seconds_per_image": summary and summary.cpu_seconds_per_image,
        "train_seconds": summary and summary.train_seconds,
        "total_seconds": summary and summary.total_seconds,
        "cpu_seconds": summary and summary.cpu_seconds,
        "peak_memory_bytes": summary and summary.peak_memory_bytes,
        "epochs": summary and summary.epochs,
        "steps": summary and summary.steps,
        "samples_seen": summary and summary.samples_seen,
        "validation_loss": summary and summary.loss,
        "top1_percent": summary and summary.top1,
        "top5_percent": summary and summary.top5,
        "weights_sha256": summary and summary.weights_sha256,
        "step_seconds": phases and phases.step_seconds,
        "data_seconds_per_step": phases and phases.data_seconds,
        "forward_seconds_per_step": phases and phases.forward_seconds,
        "backward_seconds_per_step": phases and phases.backward_seconds,
        "exposed_communication_seconds_per_step": phases and phases.exposed_communication_seconds,
        "optimizer_seconds_per_step": phases and phases.optimizer_seconds,
        "input_files_per_second": summary and summary.input.files_per_second,
        "input_megabytes_per_second": summary and summary.input.megabytes_per_second,
        "input_wait_share_of_step": summary and summary.input.wait_share,
        "gpu_joules_per_image": summary and summary.energy.gpu_joules_per_image,
        "gpu_watts": summary and summary.energy.gpu_watts,
        "gpu_utilization_percent": summary and summary.energy.gpu_utilization_percent,
        "cpu_joules_per_image": summary and summary.energy.cpu_joules_per_image,
        "other_load_cores": run.other_load,
        "cpu_model": written and written.environment.cpu_model,
        "device_name": written and written.environment.device_name,
        "folder": planned["folder"],
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
    return {
        "comparison": str(comparison.folder),
        "title": page_title(comparison),
        "plan": comparison.plan,
        "rows": [asdict(row) for row in table_rows(comparison)],
        "verdicts": [
            {
                **asdict(verdict),
                "sentence": verdict.sentence(),
                "why": explain(verdict, comparison),
                "shows_difference": verdict.speed is not None and verdict.speed.shows_difference,
                "interval_method": verdict.speed.method if verdict.speed else None,
            }
            for verdict in verdicts
        ],
        "phases": [asdict(row) for row in phase_rows(comparison)],
        "resources": [asdict(row) for row in resource_rows(comparison)],
        "input": [asdict(row) for row in input_rows(comparison)],
        "runs": [
            run_line(comparison.folder.resolve().name, run, planned)
            for run, planned in zip(comparison.runs, comparison.plan["runs"], strict=True)
        ],
        "warnings": load_warnings(comparison),
        "troubles": troubles(comparison),
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
