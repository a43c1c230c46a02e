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
import contextlib
import math
import sys
import traceback
from pathlib import Path

from compare.errors import run_main
from compare.evidence.records import (
    Comparison,
    find_comparison,
    load_comparison,
    newest_comparison,
    recorded_comparison,
)
from compare.evidence.references import Reference, load_references
from compare.evidence.run_folder import RecordError
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
            f"this needs {error.name}: pip install msgspec tabulate jinja2 (--no-html does without "
            "jinja2)"
        ) from None
    except UserError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # records.py checks what it reads, field by field; this is what it did not think of.
        raise UserError(damage_text(options.comparisons, error)) from None
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UserError(
            f"{error.filename}: {error.strerror}; --html FILE writes the page elsewhere, --no-html "
            "none"
        ) from None
    return 0


def damage_text(comparisons: list[Path], error: Exception) -> str:
    """Say that a record is not as it should be, and where the report stumbled over it."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if Path(frame.filename).is_relative_to(ROOT / "compare")]
    at = "unknown"
    if ours:
        at = f"{Path(ours[-1].filename).relative_to(ROOT)}, line {ours[-1].lineno}"
    where = " ".join(map(str, comparisons)) or "the newest comparison"
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return (
        f"{where}: a record there is damaged, or of another version of this project: a value is "
        f"not what it should be ({reason}; {at})"
    )


def price(text: str) -> float:
    """Read a price; argparse shows the message of what is none."""
    with contextlib.suppress(ValueError):
        if math.isfinite(value := float(text)) and value >= 0:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is no price: write a number, such as 3.06")


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
        "--price-per-hour", type=price, metavar="PRICE",
        help="of all workers together: adds what 90 epochs of ImageNet take and cost at the "
        "measured speed",
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
    options.asked, options.to_terminal = asked, bool(to_terminal)
    return options


def report(options: argparse.Namespace) -> None:
    """Print and write what is asked for."""
    comparisons, note = load_comparisons(options.comparisons)
    price = options.price_per_hour
    single = comparisons[0] if len(comparisons) == 1 else None
    page = page_path(options, comparisons, is_recorded=bool(note))
    references = load_references(options.reference) if options.reference else []
    if references and not (single and (page or options.svg)):
        raise UserError(
            "--reference is drawn in the plots of one comparison: name its folder, and --html FILE "
            "or --svg"
        )
    if not options.to_terminal:
        from compare.page.text import side_by_side_report, terminal_report

        text = terminal_report(single, price) if single else side_by_side_report(comparisons)
        print("\n\n".join(filter(None, [note, text])), flush=True)
    elif note:
        print(note, file=sys.stderr)

    for name in TEXT_FORMATS:
        if (path := getattr(options, name)) is not None:
            write(path, format_text(name, comparisons, price), options)

    if page:
        from compare.page.html import render_page, render_side_by_side

        text = (
            render_page(single, price, references) if single else render_side_by_side(comparisons)
        )
        write(page, text, options)
    elif single and note and (single.folder / "report.html").exists():
        say(f"the whole report: {single.folder / 'report.html'}", options)
    if options.svg is not None:
        say(write_plots(options.svg, comparisons, references), options)


def load_comparisons(paths: list[Path]) -> tuple[list[Comparison], str]:
    """Load the comparisons, and say it if there is none of the user's own to load."""
    if paths:
        return [load_comparison(find_comparison(path)) for path in paths], ""
    try:
        return [load_comparison(newest_comparison(Path("runs")))], ""
    except RecordError:
        recorded = recorded_comparison(ROOT / "results")
        if recorded is None or any(Path("runs").glob("compare-*/plan.json")):
            raise
        shown = (
            recorded.relative_to(Path.cwd()) if recorded.is_relative_to(Path.cwd()) else recorded
        )
        comparison = load_comparison(shown)
        machine = comparison.written[0].environment
        return [comparison], (
            f"Not measured here: there is no comparison under runs/ yet. This one was recorded on "
            f"{machine.device_name or machine.cpu_model} and lies in {shown}.\n"
            "Your own: make compare"
        )


def page_path(
    options: argparse.Namespace, comparisons: list[Comparison], is_recorded: bool
) -> Path | None:
    """Return where the page is to be written; None for none. A record is left as it is."""
    wanted = options.html is not None or not (options.asked or options.no_html or is_recorded)
    if len(comparisons) > 1:
        if options.html == DEFAULT:
            raise RecordError("several comparisons have no folder in common: give --html a FILE")
        return options.html if wanted else None
    if not wanted:
        return None
    given = options.html not in (None, DEFAULT)
    return options.html if given else comparisons[0].folder / "report.html"


def format_text(name: str, comparisons: list[Comparison], price: float | None) -> str:
    from compare.page import text

    if name == "markdown":
        return text.as_markdown(comparisons, price)
    return text.as_csv(comparisons) if name == "csv" else text.as_json(comparisons)


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


def write_plots(folder: Path, comparisons: list[Comparison], references: list[Reference]) -> str:
    """Write every plot as a file that opens by itself, and return what is to be said of it."""
    from compare.page.chart import standalone
    from compare.page.plots import all_plots

    if len(comparisons) > 1:
        raise RecordError("--svg takes one comparison: several have no plots in common")
    folder = comparisons[0].folder / "plots" if folder == DEFAULT else folder
    plots = all_plots(comparisons[0], references)
    folder.mkdir(parents=True, exist_ok=True)
    for plot in plots:
        replace_file(folder / f"{plot.name}.svg", standalone(plot.svg))
    return f"{len(plots)} plots: {folder}"


if __name__ == "__main__":
    sys.exit(main())
