"""Report a comparison: a table and a verdict on the terminal, and one self-contained HTML page.

    python compare/report.py                       the newest comparison under runs/
    python compare/report.py runs/compare-20261121-120000 --html page.html
    python compare/report.py runs/compare-... --markdown | gh issue create --body-file -
    python compare/report.py runs/compare-... --csv > runs.csv
    python compare/report.py BEFORE AFTER          several side by side, and what those that ask
                                                   the same on several occasions say together
    python compare/report.py runs/compare-... --svg curves/    the plots as files, for a paper
    python compare/report.py RUN [RUN...]          learning curves of trainings that no comparison
                                                   made; those that differ only in seed as a band
    python compare/report.py runs/compare-... --check    a gate for CI: the exit code is 0 if each
                                                   goal is reached, 1 if one is missed, 2 if one is
                                                   undecided, 3 if it cannot be judged

Without one of the flags for formats it prints the table and writes report.html into DIR.
Reads the record only: it needs neither torch nor Horovod, and no machine like the measured one.
"""

import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

sys.path.append(str(Path(__file__).resolve().parents[1]))  # an environment may lack this project

from recipe.command import call_tool, run_main
from recipe.errors import refuse, system_errors
from recipe.files import replace_file

if TYPE_CHECKING:  # `report` says why it is imported later
    from compare.page.chart import Plot
    from compare.page.report import Report

SCRIPT = "compare/report.py"
ELSEWHERE = "--html FILE writes the page elsewhere, --no-html none"
CHECK, NOT_CHECKED = "--check", 3  # the flag; its exit code after any error
NO_GATE = "Gate: not judged"  # begins the message of an error there


def report(
    comparisons: tuple[Path, ...] = (),
    /,
    markdown: bool = False,
    csv: bool = False,
    json: bool = False,
    html: Path | None = None,
    svg: Path | None = None,
    no_html: bool = False,
    check: bool = False,
    undecided_passes: bool = False,
) -> int:
    """Print and write a report. Packages are imported where they are needed: there `main` turns a
    missing one into a message.

    Args:
        comparisons: Comparisons' folders (default: the newest one under runs/); or folders of
            complete trainings, for their learning curves.
        markdown: Print table and verdicts as Markdown, for an issue or a pull request.
        csv: Print one line per run, columns named with their units.
        json: Print all of the report and every run's figures.
        html: The page (default: report.html in the folder, for one comparison in no other form; of
            trainings learning-curves.html in the folder that holds them).
        svg: Write every plot as a file into this folder.
        no_html: No page.
        check: End with exit code 0 if each goal is reached, 1 if one is missed, 2 if one is
            undecided, 3 if it cannot be judged, and say so in a last line (of an error, and in
            another form than text: on stderr).
        undecided_passes: With --check: 0 also if a goal is undecided.
    """
    are_trainings = bool(comparisons) and all(map(is_training, comparisons))
    forms = {"markdown": markdown, "csv": csv, "json": json}
    printed = [form for form, is_asked_for in forms.items() if is_asked_for]
    refuse(
        (len(printed) > 1, f"--{' and --'.join(printed)}: ask for one at a time"),
        (html and no_html, "--html and --no-html exclude each other"),
        (html == Path(), "--html: name a file"),
        (
            len(comparisons) > 1 and svg and not are_trainings,
            "--svg: several comparisons have no plots",
        ),
        (
            are_trainings and (printed or check),
            f"{comparisons[0] if comparisons else ''} is a training, not a comparison: leave out "
            "--csv, --json, --markdown and --check",
        ),
        (
            undecided_passes and not check,
            f"--undecided-passes: says what {CHECK} lets pass; add it",
        ),
    )
    if are_trainings:
        return report_trainings(comparisons, html, svg, no_html)
    form = printed[0] if printed else "text"
    reports = report_comparisons(comparisons, form, html, svg, no_html)
    if not check:
        return 0
    from compare.page.gate import end_of_check, gate_of

    exit_code, line = end_of_check(gate_of(reports), undecided_passes)
    print(line, file=remarks_beside(form))
    return exit_code


def remarks_beside(form: str) -> TextIO:
    """Return where all but the report itself is printed."""
    return sys.stdout if form == "text" else sys.stderr


def report_comparisons(
    comparisons: tuple[Path, ...], form: str, html: Path | None, svg: Path | None, no_html: bool
) -> list["Report"]:
    """Print and write the report of comparisons, and return it: one for each."""
    from compare.evidence.occasions import refuse_copies
    from compare.evidence.record import find_comparisons, read_comparison
    from compare.page import formats
    from compare.page.plots import draw_plots
    from compare.page.report import Report

    found = [read_comparison(folder) for folder in find_comparisons(comparisons)]
    refuse_copies(found)
    for record in found:
        if record.problem and form != "text":
            print(f"warning: {record.problem}", file=sys.stderr)
    reports = [Report(record) for record in found]
    if form == "text" and len(reports) == 1 and not (no_html or svg):
        html = html or found[0].folder / "report.html"
    page, plots = partial(formats.as_page, reports), partial(draw_plots, reports[0])
    write_files(html, page, svg, plots, remarks_beside(form))
    # Last: where a reader looks first stands the answer.
    text = getattr(formats, f"as_{form}")(reports)
    print(text, end="" if text.endswith("\n") else "\n")
    return reports


def is_training(folder: Path) -> bool:
    """Return whether a folder is that of a training, not of a comparison."""
    return (folder / "metrics.jsonl").exists()


def report_trainings(
    folders: tuple[Path, ...], html: Path | None, svg: Path | None, no_html: bool
) -> int:
    """Print the final accuracies of trainings, and draw their learning curves."""
    from compare.page.learning import learning_plots
    from compare.page.trainings import read_trainings, trainings_page, trainings_text

    trainings = read_trainings(folders)
    if not (no_html or svg):
        common = os.path.commonpath([folder.resolve().parent for folder in folders])
        html = html or Path(common, "learning-curves.html")
    page, plots = partial(trainings_page, trainings), partial(learning_plots, trainings)
    write_files(html, page, svg, plots, sys.stdout)
    print(trainings_text(trainings))
    return 0


def write_files(
    html: Path | None,
    page: Callable[[], str],
    svg: Path | None,
    plots: Callable[[], list["Plot"]],
    log: TextIO,
) -> None:
    """Write the page and the plots, each if a path for it is given, and say where they are."""
    from compare.page.chart import standalone

    files = {html: page()} if html else {}
    if svg:
        files |= {svg / f"{plot.name}.svg": standalone(plot.svg) for plot in plots()}
    for path, text in files.items():
        with system_errors(path, "cannot be written", ELSEWHERE):
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, text)
        print(f"written: {path}\n", file=log)


def run_report(words: list[str], name: str, error_code: int) -> int:
    """Run the command and return the exit code. An error that its user can mend, such as a missing
    package, ends it with one message, which begins with `name`."""

    def body(words: list[str]) -> int:
        code: int = call_tool(SCRIPT, report, __doc__, words)
        return code

    try:
        return run_main(name, body, words, exit_code=error_code, interrupted=f"{name}: interrupted")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "compare":
            raise
        packages = "msgspec psutil scipy tabulate jinja2 tyro"
        python = Path(__file__).resolve().parents[1] / ".venv/bin/python"
        remedy = f"pip install {packages}, or call it with {python}"
        print(f"{name}: this needs {error.name}: {remedy}", file=sys.stderr)
        return error_code


def main(argv: list[str] | None = None) -> int:
    """Run the command and return the exit code. With --check, where 1 and 2 are answers, no error
    ends with them: neither one in the flags nor a mistake in this project. Its line says so."""
    words = sys.argv[1:] if argv is None else argv
    if all(word.partition("=")[0] != CHECK for word in words):
        return run_report(words, SCRIPT, 1)
    try:
        return run_report(words, NO_GATE, NOT_CHECKED)
    except SystemExit as ended:
        if not ended.code:  # after --help
            return 0
        reason = "the flags are wrong; see above"
    except Exception as error:
        traceback.print_exc()
        reason = f"a mistake in this project: {type(error).__name__}: {error}"
    print(f"{NO_GATE}: {reason}", file=sys.stderr)
    return NOT_CHECKED


if __name__ == "__main__":
    sys.exit(main())
