"""How a command begins and ends: its flags, what it tells the user without a traceback, and with
which exit code."""

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from recipe.errors import UserError

RESUMES = "interrupted: the same command resumes where it stopped"
Flags = Mapping[str, Mapping[str, Any]]  # by name, what argparse is told of each


def parser_of(name: str, about: str | None, flags: Flags, **more: Any) -> argparse.ArgumentParser:
    """Return the parser of a command, which `about` describes: in a line, and by examples."""
    first_line, _, examples = (about or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog=f"python {name}",
        description=first_line,
        epilog=examples.strip("\n"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        **more,
    )
    add_flags(parser, flags)
    return parser


def add_flags(parser: Any, flags: Flags) -> None:
    """Add flags to a parser, or to a group of one."""
    for name, settings in flags.items():
        parser.add_argument(name, **settings)


def run_tool(
    name: str,
    tool: Callable[..., Any],
    about: str | None,
    argv: list[str] | None = None,
    **more: Any,
) -> int:
    """Run a function as a command, its parameters being the flags, and return the exit code: the
    function's own, or 0 if it returns lines that say what was done. `more`: as of `run_main`."""
    import tyro  # slow, and other commands do without

    def body(words: list[str]) -> int:
        settings = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)
        answer = tyro.cli(tool, prog=name, description=about, args=words, config=settings)
        if isinstance(answer, int):
            return answer
        for line in answer:
            print(line)
        return 0

    return run_main(name, body, argv, **more)


def run_main(
    name: str,
    body: Callable[[list[str]], int],
    argv: list[str] | None = None,
    errors: tuple[type[Exception], ...] = (UserError,),
    exit_code: int = 2,
    interrupted: str = "interrupted",
) -> int:
    """Run a command's body on its words, those of the command line by default, and return its exit
    code: of `errors`, which the user can set right, one message and `exit_code`; after Ctrl-C 130;
    and 1 if nobody reads what it prints any more."""
    try:
        return body(sys.argv[1:] if argv is None else argv)
    except BrokenPipeError:  # which `errors` may hold
        return 1
    except errors as error:
        print(f"{name}: {error}", file=sys.stderr)
        return exit_code
    except KeyboardInterrupt:
        print(f"\n{interrupted}", file=sys.stderr)
        return 130
    finally:
        try:
            sys.stdout.flush()
        except BrokenPipeError:  # `--help | head`: whoever reads has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
