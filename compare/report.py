"""Report a comparison: a table and a verdict on the terminal, and one self-contained HTML page.

    python compare/report.py                       the newest comparison under runs/
    python compare/report.py runs/compare-20261121-120000 --html /tmp/page.html

Reads run folders only: it needs neither torch nor Horovod, and no machine like the measured one.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from compare.findings import (
    Row,
    Verdict,
    difference_text,
    judge,
    loss_text,
    table_rows,
    three_digits,
    troubles,
)
from compare.records import Comparison, RecordError, load_comparison, newest_comparison


def main(argv: list[str] | None = None) -> int:
    """Print the report that the command line asks for and return the exit code."""
    options = parse_options(sys.argv[1:] if argv is None else argv)
    try:
        folder = options.comparison or newest_comparison(Path("runs"))
        comparison = load_comparison(folder)
        rows, verdicts = table_rows(comparison), judge(comparison)
        if options.json:
            print(json.dumps(as_json(comparison, rows, verdicts), indent=2))
        else:
            print(terminal_report(comparison, rows, verdicts), flush=True)
        if options.html or not (options.json or options.no_html):
            page = options.html or folder / "report.html"
            write_page(comparison, rows, verdicts, page)
            if not options.json:
                print(f"\nthe whole report: {page}")
    except RecordError as error:
        print(f"compare/report.py: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `report.py | head`: whoever reads has seen enough
        sys.stderr.close()
        return 1
    return 0


def parse_options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python compare/report.py",
        description=(__doc__ or "").split("\n\n", 1)[0],
        epilog=(__doc__ or "").split("\n\n", 1)[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "comparison",
        type=Path,
        nargs="?",
        metavar="DIR",
        help="a comparison's folder (default: the newest one under runs/)",
    )
    add(
        "--html",
        type=Path,
        metavar="FILE",
        help="where the page is written (default: report.html in DIR)",
    )
    add("--no-html", action="store_true", help="print the table and the verdict only")
    add(
        "--json",
        action="store_true",
        help="print JSON instead of the table; a page is written only with --html",
    )
    options = parser.parse_args(argv)
    if options.html and options.no_html:
        parser.error("--html and --no-html exclude each other")
    return options


def terminal_report(comparison: Comparison, rows: list[Row], verdicts: list[Verdict]) -> str:
    """Return the report as text: table, verdicts, what differs, what is missing."""
    parts = [terminal_table(rows)]
    for verdict in verdicts:
        lines = [verdict.sentence()]
        lines += [f"  {difference_text(fact)}" for fact in verdict.differences]
        lines += [
            f"  {text}" for text in (verdict.training_sentence(), verdict.cpu_sentence()) if text
        ]
        parts.append("\n".join(lines))
    if lines := troubles(comparison):
        parts.append("\n".join(["Not in these figures:", *(f"  {line}" for line in lines)]))
    return "\n\n".join(parts)


def terminal_table(rows: list[Row]) -> str:
    import tabulate

    tabulate.MIN_PADDING = 0  # of headers: the table is to fit into 100 columns
    headers = [
        "configuration",
        "workers",
        "images/s",
        "scaling",
        "CPU ms\n/image",
        "top-1 %",
        "top-5 %",
        "loss",
        "weights",
        "blocks",
    ]
    cells = [
        [
            row.configuration,
            str(row.workers),
            three_digits(row.images_per_second),
            "" if row.efficiency is None else f"{100 * row.efficiency:.0f} %",
            three_digits(row.cpu_ms_per_image),
            "–" if row.top1 is None else f"{row.top1:.2f}",
            "–" if row.top5 is None else f"{row.top5:.2f}",
            loss_text(row.loss),
            row.weights,
            str(row.blocks)
            if row.blocks == row.planned_blocks
            else f"{row.blocks} of {row.planned_blocks}",
        ]
        for row in rows
    ]
    align = ("left", *["right"] * 7, "left", "right")
    return tabulate.tabulate(
        cells, headers, tablefmt="simple", disable_numparse=True, colalign=align
    )


def as_json(comparison: Comparison, rows: list[Row], verdicts: list[Verdict]) -> dict[str, Any]:
    """Return the whole report as plain values."""
    return {
        "comparison": str(comparison.folder),
        "plan": comparison.plan,
        "rows": [asdict(row) for row in rows],
        "verdicts": [
            {
                **asdict(verdict),
                "sentence": verdict.sentence(),
                "shows_difference": verdict.speed is not None and verdict.speed.shows_difference,
            }
            for verdict in verdicts
        ],
        "troubles": troubles(comparison),
    }


def write_page(
    comparison: Comparison, rows: list[Row], verdicts: list[Verdict], path: Path
) -> None:
    """Write the HTML page. Its libraries are imported here: the table does without them."""
    try:
        from compare.page import render_page
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "compare":
            raise
        raise RecordError(
            f"the page needs {error.name}: pip install matplotlib jinja2, or use --no-html"
        ) from None
    text = render_page(comparison, rows, verdicts)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
