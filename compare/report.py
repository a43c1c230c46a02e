"""Report a comparison: a table and a verdict on the terminal, and one self-contained HTML page.

    python compare/report.py                       the newest comparison under runs/
    python compare/report.py runs/compare-20261121-120000 --html /tmp/page.html
    python compare/report.py runs/compare-... --markdown | gh issue create --body-file -
    python compare/report.py BEFORE AFTER          several side by side, and what those that ask
                                                   the same on several occasions say together

Without one of the flags for formats it prints the table and writes report.html into DIR; with
some of them it writes what they ask for, and the table, unless a format goes to the terminal.
Reads run folders only: it needs neither torch nor Horovod, and no machine like the measured one.
"""

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

from recipe.command import Flags, parser_of, run_main
from recipe.errors import UserError, refuse
from recipe.files import replace_file

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = "compare/report.py"
STDOUT = Path("-")
DEFAULT = Path("<default>")  # --html and --svg without a path
TO_TERMINAL = "; without a FILE, or with -, to the terminal"
TEXT: dict[str, Any] = {"type": Path, "nargs": "?", "const": STDOUT, "metavar": "FILE"}
FLAGS: Flags = {
    "comparisons": {"type": Path, "nargs": "*", "metavar": "DIR", "help": "comparisons' folders "
                    "(default: the newest one under runs/; if there is none, the recorded one "
                    "under results/)"},
    "--markdown": TEXT | {"help": f"table and verdicts as Markdown, for an issue{TO_TERMINAL}"},
    "--csv": TEXT | {"help": f"one line per run, columns named with their units{TO_TERMINAL}"},
    "--json": TEXT | {"help": f"all of the report and every run's figures{TO_TERMINAL}"},
    "--html": TEXT | {"const": DEFAULT, "help": "the page (default: report.html in DIR)"},
    "--svg": TEXT | {"const": DEFAULT, "metavar": "FOLDER", "help": "every plot as a file "
                     "(default: the folder plots in DIR)"},
    "--no-html": {"action": "store_true", "help": "no page"},
}  # fmt: skip


def guarded_report(argv: list[str]) -> int:
    """Print the report that the command line asks for; UserError for whatever can be expected to go
    wrong."""
    options = parse_options(argv)
    try:
        report(options)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "compare":
            raise
        raise UserError(
            f"this needs {error.name}: pip install msgspec scipy tabulate jinja2 (--no-html does "
            "without jinja2)"
        ) from None
    except OSError as error:
        raise UserError(
            f"{error.filename}: {error.strerror}; --html FILE writes the page elsewhere, --no-html "
            "none"
        ) from None
    return 0


def parse_options(argv: list[str]) -> argparse.Namespace:
    options = parser_of(SCRIPT, __doc__, FLAGS).parse_args(argv)
    formats = {name: getattr(options, name) for name in ("markdown", "csv", "json", "html")}
    to_terminal = [f"--{name}" for name, path in formats.items() if path == STDOUT]
    folders = [f"--{name} {path}" for name, path in formats.items() if path and path.is_dir()]
    refuse(
        (len(to_terminal) > 1,
         f"{' and '.join(to_terminal)} cannot both go to the terminal: name a FILE"),
        (folders, f"{' '.join(folders)}: this is a folder: write the comparison before the flag"),
        (options.svg == STDOUT, "--svg writes several files: give it a FOLDER"),
        (options.html and options.no_html, "--html and --no-html exclude each other"),
    )  # fmt: skip
    options.is_default = not any((*formats.values(), options.svg, options.no_html))
    options.to_terminal = bool(to_terminal)
    return options


def report(options: argparse.Namespace) -> None:
    """Print and write what is asked for. Packages are imported here, where one that is missing
    becomes a message."""
    from compare.evidence.occasions import refuse_copies
    from compare.evidence.records import load_comparison
    from compare.page import text
    from compare.page.findings import Report

    folders, note = find_comparisons(options.comparisons)
    is_single, page, plots = len(folders) == 1, options.html, options.svg
    if options.is_default and is_single and not note:
        page = DEFAULT
    refuse(
        (
            not is_single and (plots or page == DEFAULT),
            "several comparisons have no folder and no plots: give --html a FILE",
        ),
    )
    comparisons = [load_comparison(folder) for folder in folders]
    refuse_copies(comparisons)
    reports = [Report(one) for one in comparisons]
    if page == DEFAULT:
        page = folders[0] / "report.html"
    for path, made in (
        (options.markdown, partial(text.as_text, markdown=True)),
        (options.csv, text.as_csv),
        (options.json, text.as_json),
        (page, as_page),
    ):
        if path:
            write(path, made(reports), options)
    if plots:
        from compare.page.chart import standalone
        from compare.page.plots import draw_plots

        folder = folders[0] / "plots" if plots == DEFAULT else plots
        for plot in draw_plots(reports[0]):
            write(folder / f"{plot.name}.svg", standalone(plot.svg), options)
    if not options.to_terminal:  # last: where a reader looks first stands the answer
        print("\n\n".join(filter(None, [note, text.as_text(reports)])))
    elif note:
        print(note, file=sys.stderr)


def as_page(reports: list[Any]) -> str:
    """Return the page; Jinja is needed for it alone."""
    from compare.page.html import render_page, render_side_by_side

    return render_page(reports[0]) if len(reports) == 1 else render_side_by_side(reports)


def find_comparisons(paths: list[Path]) -> tuple[list[Path], str]:
    """Find the comparisons, and say it if there is none of the user's own: then it is the recorded
    one, which is left as it is."""
    from compare.evidence.records import find_comparison, newest_comparison, recorded_comparison

    if paths:
        return [find_comparison(path) for path in paths], ""
    if newest := newest_comparison(Path("runs")):
        return [newest], ""
    if (recorded := recorded_comparison(ROOT / "results")) is None:
        raise UserError(
            "no comparison under runs/: make one with `make compare` or `python compare/run.py`, "
            "or give the path of one"
        )
    return [recorded], (
        f"Not measured here: there is no comparison under runs/ yet. This one was recorded, and "
        f"lies in {recorded}; --html FILE writes its page.\nYour own: make compare"
    )


def write(path: Path, content: str, options: argparse.Namespace) -> None:
    """Print a text, or write a file as a whole and say so: on stderr if a report goes to the
    terminal."""
    if path == STDOUT:
        print(content, end="" if content.endswith("\n") else "\n")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, content)
    print(f"written: {path}\n", file=sys.stderr if options.to_terminal else sys.stdout)


main = partial(run_main, SCRIPT, guarded_report, exit_code=1)

if __name__ == "__main__":
    sys.exit(main())
