"""Report a comparison: a table and a verdict on the terminal, and one self-contained HTML page.

    python compare/report.py                       the newest comparison under runs/
    python compare/report.py runs/compare-20261121-120000 --html page.html
    python compare/report.py runs/compare-... --markdown | gh issue create --body-file -
    python compare/report.py runs/compare-... --csv > runs.csv
    python compare/report.py BEFORE AFTER          several side by side, and what those that ask
                                                   the same on several occasions say together

Without one of the flags for formats it prints the table and writes report.html into DIR.
Reads the record only: it needs neither torch nor Horovod, and no machine like the measured one.
"""

import sys
from pathlib import Path

from recipe.command import run_tool
from recipe.errors import refuse, system_errors
from recipe.files import replace_file

SCRIPT = "compare/report.py"
ELSEWHERE = "--html FILE writes the page elsewhere, --no-html none"


def report(
    comparisons: tuple[Path, ...] = (),
    /,
    markdown: bool = False,
    csv: bool = False,
    json: bool = False,
    html: Path | None = None,
    svg: Path | None = None,
    no_html: bool = False,
) -> int:
    """Print and write a report. Packages are imported here, where `main` turns a missing one into a
    message.

    Args:
        comparisons: Comparisons' folders (default: the newest one under runs/).
        markdown: Print table and verdicts as Markdown, for an issue.
        csv: Print one line per run, columns named with their units.
        json: Print all of the report and every run's figures.
        html: The page (default: report.html in the folder, for one comparison in no other form).
        svg: Write every plot as a file into this folder.
        no_html: No page.
    """
    forms = {"markdown": markdown, "csv": csv, "json": json}
    printed = [form for form, is_asked_for in forms.items() if is_asked_for]
    refuse(
        (len(printed) > 1, f"--{' and --'.join(printed)}: ask for one at a time"),
        (html and no_html, "--html and --no-html exclude each other"),
        (html == Path(), "--html: name a file"),
        (len(comparisons) > 1 and svg, "--svg: several comparisons have no plots"),
    )
    form = printed[0] if printed else "text"
    from compare.evidence.occasions import refuse_copies
    from compare.evidence.record import find_comparisons, read_comparison
    from compare.page import formats
    from compare.page.chart import standalone
    from compare.page.plots import draw_plots
    from compare.page.report import Report

    found = [read_comparison(folder) for folder in find_comparisons(comparisons)]
    refuse_copies(found)
    reports = [Report(record) for record in found]
    files = dict[Path, str]()
    if form == "text" and len(reports) == 1 and not (no_html or svg):
        html = html or found[0].folder / "report.html"
    if html:
        files[html] = formats.as_page(reports)
    if svg:
        plots = draw_plots(reports[0])
        files |= {svg / f"{plot.name}.svg": standalone(plot.svg) for plot in plots}
    for path, text in files.items():
        with system_errors(path, "cannot be written", ELSEWHERE):
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, text)
        print(f"written: {path}\n", file=sys.stdout if form == "text" else sys.stderr)
    # Last: where a reader looks first stands the answer.
    text = getattr(formats, f"as_{form}")(reports)
    print(text, end="" if text.endswith("\n") else "\n")
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run the command and return the exit code; a missing package ends it with one message."""
    try:
        return run_tool(SCRIPT, report, __doc__, argv, exit_code=1)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "compare":
            raise
        packages = "msgspec scipy tabulate jinja2 tyro"
        sys.exit(f"{SCRIPT}: this needs {error.name}: pip install {packages}")


if __name__ == "__main__":
    sys.exit(main())
