"""Report a comparison: a table and a verdict on the terminal, and one self-contained HTML page.

    python compare/report.py                       the newest comparison under runs/
    python compare/report.py runs/compare-20261121-120000 --html /tmp/page.html
    python compare/report.py runs/compare-... --markdown | gh issue create --body-file -
    python compare/report.py BEFORE AFTER          several side by side, without a verdict

Without one of the flags for formats it prints the table and writes report.html into DIR; with
some of them it writes what they ask for, and the table, unless a format goes to the terminal.
Reads run folders only: it needs neither torch nor Horovod, and no machine like the measured one.
"""

import argparse
import math
import sys
from pathlib import Path

from compare.errors import run_main
from compare.evidence.records import (
    find_comparison,
    load_comparison,
    newest_comparison,
    recorded_comparison,
)
from compare.evidence.references import load_references
from recipe.errors import UserError
from recipe.files import replace_file

ROOT = Path(__file__).resolve().parent.parent
STDOUT = Path("-")
DEFAULT = Path("<default>")  # --html and --svg without a path
TEXT_FORMATS = ("markdown", "csv", "json")


def main(argv: list[str] | None = None) -> int:
    """Print the report that the command line asks for and return the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if hasattr(sys.stdout, "reconfigure"):  # a terminal that cannot write × or – gets a ?
        sys.stdout.reconfigure(errors="replace")
    return run_main(
        "compare/report.py",
        lambda: guarded_report(parse_options(argv)),
        exit_code=1,
    )


def guarded_report(options: argparse.Namespace) -> int:
    """Make the report; UserError for whatever can be expected to go wrong."""
    try:
        report(options)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "compare":
            raise
        raise UserError(
            f"this needs {error.name}: pip install msgspec scipy tabulate jinja2 (--no-html does "
            "without jinja2)"
        ) from None
    except (UserError, BrokenPipeError):
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # Records are checked when they are read; this is what no check thought of.
        where = " ".join(map(str, options.comparisons)) or "the newest comparison"
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(
            f"{where}: a record there is damaged, or of another version of this project ({reason})"
        ) from error
    except OSError as error:
        raise UserError(
            f"{error.filename}: {error.strerror}; --html FILE writes the page elsewhere, --no-html "
            "none"
        ) from None
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
        "comparisons",
        type=Path,
        nargs="*",
        metavar="DIR",
        help="comparisons' folders (default: the newest one under runs/; if there is none, the "
        "recorded one under results/)",
    )
    terminal = "; without a FILE, or with -, to the terminal"
    for name, const, metavar, text in (
        ("markdown", STDOUT, "FILE", f"table and verdicts as Markdown, for an issue{terminal}"),
        ("csv", STDOUT, "FILE", f"one line per run, columns named with their units{terminal}"),
        ("json", STDOUT, "FILE", f"all of the report and every run's figures{terminal}"),
        ("html", DEFAULT, "FILE", "the page (default: report.html in DIR)"),
        ("svg", DEFAULT, "FOLDER", "every plot as a file (default: the folder plots in DIR)"),
    ):
        add(f"--{name}", type=Path, nargs="?", const=const, metavar=metavar, help=text)
    add("--no-html", action="store_true", help="no page")
    add(
        "--price-per-hour", type=float, metavar="PRICE",
        help="of all workers together: adds what 90 epochs cost at the measured speed, where "
        "images have ImageNet's size and number of classes",
    )  # fmt: skip
    add(
        "--reference", type=Path, metavar="FILE",
        help="published speeds to draw beside the measured ones: a CSV file with the columns "
        "name,workers,images_per_second,source, such as compare/references/resnet50-v100.csv",
    )  # fmt: skip
    options = parser.parse_args(argv)
    asked = [name for name in (*TEXT_FORMATS, "html", "svg") if getattr(options, name)]
    to_terminal = [f"--{name}" for name in asked if getattr(options, name) == STDOUT]
    if len(to_terminal) > 1:
        parser.error(f"{' and '.join(to_terminal)} cannot both go to the terminal: name a FILE")
    if options.svg == STDOUT:
        parser.error("--svg writes several files: give it a FOLDER")
    if options.html and options.no_html:
        parser.error("--html and --no-html exclude each other")
    for name in (*TEXT_FORMATS, "html"):
        path = getattr(options, name)
        if path and path.is_dir():
            parser.error(
                f"--{name} takes a file, and {path} is a folder: write the comparison before "
                f"--{name}"
            )
    if options.price_per_hour is not None and not 0 <= options.price_per_hour < math.inf:
        parser.error("--price-per-hour is no price: write a number, such as 3.06")
    options.asked, options.to_terminal = asked, bool(to_terminal)
    return options


def report(options: argparse.Namespace) -> None:
    """Print and write what is asked for."""
    from compare.page import text
    from compare.page.report import Report

    folders, note = find_comparisons(options.comparisons)
    references = load_references(options.reference) if options.reference else []
    reports = [
        Report(load_comparison(folder), references, options.price_per_hour) for folder in folders
    ]
    single = reports[0] if len(reports) == 1 else None
    wants_page = options.html is not None or not (options.asked or options.no_html or note)
    page = options.html
    if wants_page and page in (None, DEFAULT) and single:
        page = folders[0] / "report.html"
    elif page == DEFAULT:
        raise UserError("several comparisons have no folder in common: give --html a FILE")
    if references and not (single and (page or options.svg)):
        raise UserError(
            "--reference is drawn in the plots of one comparison: name its folder, and --html FILE "
            "or --svg"
        )
    if not options.to_terminal:
        told = text.terminal_report(single) if single else text.side_by_side_text(reports)
        print("\n\n".join(filter(None, [note, told])), flush=True)
    elif note:
        print(note, file=sys.stderr)
    writers = {"markdown": text.as_markdown, "csv": text.as_csv, "json": text.as_json}
    for name, writer in writers.items():
        if (path := getattr(options, name)) is not None:
            write(path, writer(reports), options)
    if page:
        from compare.page.html import render_page, render_side_by_side

        write(page, render_page(single) if single else render_side_by_side(reports), options)
    elif single and note and (folders[0] / "report.html").exists():
        say(f"the whole report: {folders[0] / 'report.html'}", options)
    if options.svg is not None and single is None:
        raise UserError("--svg takes one comparison: several have no plots in common")
    if options.svg is not None and single:
        from compare.page.chart import standalone
        from compare.page.plots import all_plots

        folder = folders[0] / "plots" if options.svg == DEFAULT else options.svg
        folder.mkdir(parents=True, exist_ok=True)
        for plot in (plots := all_plots(single)):
            replace_file(folder / f"{plot.name}.svg", standalone(plot.svg))
        say(f"{len(plots)} plots: {folder}", options)


def find_comparisons(paths: list[Path]) -> tuple[list[Path], str]:
    """Find the comparisons, and say it if there is none of the user's own: then it is the recorded
    one, which is left as it is."""
    if paths:
        return [find_comparison(path) for path in paths], ""
    if newest := newest_comparison(Path("runs")):
        return [newest], ""
    if (recorded := recorded_comparison(ROOT / "results")) is None:
        raise UserError(
            "no comparison under runs/: make one with `make compare` or `python compare/run.py`, "
            "or give the path of one"
        )
    if recorded.is_relative_to(Path.cwd()):
        recorded = recorded.relative_to(Path.cwd())
    machine = load_comparison(recorded).written[0].environment
    return [recorded], (
        f"Not measured here: there is no comparison under runs/ yet. This one was recorded on "
        f"{machine.device_name or machine.cpu_model} and lies in {recorded}.\n"
        "Your own: make compare"
    )


def write(path: Path, content: str, options: argparse.Namespace) -> None:
    """Write a file, at once and as a whole, and say so; or print its content."""
    if path == STDOUT:
        print(content, end="" if content.endswith("\n") else "\n")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, content)
    say(f"{'the whole report' if path.suffix == '.html' else 'written'}: {path}", options)


def say(text: str, options: argparse.Namespace) -> None:
    """Report what was written, on stderr if a report goes to the terminal."""
    print(f"\n{text}", file=sys.stderr if options.to_terminal else sys.stdout)


if __name__ == "__main__":
    sys.exit(main())
