"""Report a comparison: a table and a verdict on the terminal, and one self-contained HTML page.

    python compare/report.py                       the newest comparison under runs/
    python compare/report.py runs/compare-20261121-120000 --html page.html
    python compare/report.py runs/compare-... --markdown | gh issue create --body-file -
    python compare/report.py runs/compare-... --csv > runs.csv
    python compare/report.py BEFORE AFTER          several side by side, and what those that ask
                                                   the same on several occasions say together

Without one of the flags for formats it prints the table and writes report.html into DIR.
Reads run folders only: it needs neither torch nor Horovod, and no machine like the measured one.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

from recipe.command import Flags, parser_of, run_main
from recipe.errors import UserError, refuse
from recipe.files import replace_file

SCRIPT = "compare/report.py"
FLAGS: Flags = {
    "comparisons": {"type": Path, "nargs": "*", "metavar": "DIR", "help": "comparisons' folders "
                    "(default: the newest one under runs/)"},
    "--markdown": {"action": "store_true", "help": "print table and verdicts as Markdown, for an "
                   "issue"},
    "--csv": {"action": "store_true", "help": "print one line per run, columns named with their "
              "units"},
    "--json": {"action": "store_true", "help": "print all of the report and every run's figures"},
    "--html": {"type": Path, "metavar": "FILE", "help": "the page (default: "
               "report.html in DIR, for one comparison in no other form)"},
    "--svg": {"type": Path, "metavar": "FOLDER", "help": "write every plot as a file"},
    "--no-html": {"action": "store_true", "help": "no page"},
}  # fmt: skip


def guarded_report(argv: list[str]) -> int:
    """Print the report that the command line asks for; UserError for whatever can be expected to go
    wrong."""
    options = parser_of(SCRIPT, __doc__, FLAGS).parse_args(argv)
    printed = [name for name in ("markdown", "csv", "json") if getattr(options, name)]
    several = len(options.comparisons) > 1
    refuse(
        (len(printed) > 1, f"--{' and --'.join(printed)}: ask for one at a time"),
        (options.html and options.no_html, "--html and --no-html exclude each other"),
        (options.html == Path(), "--html: name a file"),
        (several and options.svg, "--svg: several comparisons have no plots"),
    )
    try:
        report(options, printed[0] if printed else "text")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "compare":
            raise
        packages = "msgspec scipy tabulate jinja2"
        raise UserError(f"this needs {error.name}: pip install {packages}") from None
    return 0


def report(options: argparse.Namespace, form: str) -> None:
    """Print and write what is asked for. Packages are imported here, where one that is missing
    becomes a message."""
    from compare.evidence.occasions import refuse_copies
    from compare.evidence.records import find_comparisons, load_comparison
    from compare.page import formats
    from compare.page.chart import standalone
    from compare.page.findings import Report
    from compare.page.plots import draw_plots

    comparisons = [load_comparison(folder) for folder in find_comparisons(options.comparisons)]
    refuse_copies(comparisons)
    reports = [Report(one) for one in comparisons]
    files, page = dict[Path, str](), options.html
    if form == "text" and len(reports) == 1 and not (options.no_html or options.svg):
        page = page or comparisons[0].folder / "report.html"
    if page:
        files[page] = formats.as_page(reports)
    for plot in draw_plots(reports[0]) if options.svg else []:
        files[options.svg / f"{plot.name}.svg"] = standalone(plot.svg)
    for path, text in files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, text)
        except OSError as error:
            raise UserError(
                f"{error.filename}: {error.strerror}; --html FILE writes the page elsewhere, "
                "--no-html none"
            ) from None
        print(f"written: {path}\n", file=sys.stdout if form == "text" else sys.stderr)
    # Last: where a reader looks first stands the answer.
    text = getattr(formats, f"as_{form}")(reports)
    print(text, end="" if text.endswith("\n") else "\n")


main = partial(run_main, SCRIPT, guarded_report, exit_code=1)

if __name__ == "__main__":
    sys.exit(main())
