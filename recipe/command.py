"""How a command begins and ends: its flags, what it tells the user without a traceback, and with
which exit code."""

import inspect
import io
import os
import re
import select
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from recipe.errors import UserError, limit_reached

RESUMES = "interrupted: the same command resumes where it stopped"
DROPPED_BECAUSE = set[str]()  # why output was dropped that may have a reader, in the system's words
UNREAD_S = 1.0  # how long a rank waits for whoever reads what it says
UNSHOWN = ("None", "True", "False", "")  # as defaults of flags


class _LossyOutput(io.FileIO):
    """Output that never fails: text is dropped if its reader is gone or the disk is full. The work
    may matter more than its output; a training's files hold all of it, and the exit code says how
    it ended.

    With `patience_s` text is also dropped that nobody has read by then: a terminal is halted
    (Ctrl-S), or a reader has stopped. From then on nothing waits until something is read.
    """

    def __init__(self, descriptor: int, patience_s: float | None) -> None:
        self.patience_s = self.wait_s = patience_s
        path = f"/proc/self/fd/{descriptor}"
        if patience_s is not None and not os.path.isfile(path):
            with suppress(OSError):  # opened once more, for others' writes are to block as before
                descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
        super().__init__(descriptor, "w", closefd=False)

    def write(self, data: Any, /) -> int:
        try:
            if not select.select([], [self], [], self.wait_s)[1]:
                self.wait_s = 0.0
                return len(data)
            self.wait_s = self.patience_s
            return os.write(self.fileno(), data[: select.PIPE_BUF])
        except BrokenPipeError:  # as in `| head -1`
            return len(data)
        except OSError as error:
            DROPPED_BECAUSE.add(str(error))
            return len(data)


def prepare_output(patience_s: float | None = None) -> None:
    """Call this first. Afterwards printing cannot end the command: not a reader that has gone
    (`| head -1`), a closed stream (`2>&-`), or a character that the encoding lacks, such as a byte
    of a file's name that is not UTF-8 (it is shown as \\udce9). With `patience_s` printing cannot
    make the command wait for longer either."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:  # else a file would take its place
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__"):  # a test's or a notebook's own stays
            buffer = io.BufferedWriter(_LossyOutput(descriptor, patience_s))
            settings = getattr(stream, "encoding", "utf-8"), "backslashreplace"
            setattr(sys, name, io.TextIOWrapper(buffer, *settings, line_buffering=True))


def call_tool(name: str, tool: Any, about: str | None, words: Sequence[str]) -> Any:
    """Call a function with the flags in `words`, its parameters being the flags, or one of several
    functions, as sub-commands; return what it returns. SystemExit after --help (0), which shows
    `about`, its first line above the flags, and after a mistake in the flags (2)."""
    import tyro  # slow, and other commands do without

    first_line, _, examples = (about or "").partition("\n\n")
    for command in [tool] if callable(tool) else tool.values():
        _prepare_help(getattr(command, "func", command))  # of a partial
    parse: Any = tyro.cli if callable(tool) else tyro.extras.subcommand_cli_from_dict
    config = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone)
    program = f"python {name.removeprefix('python ')}"
    try:
        return parse(tool, prog=program, description=first_line, args=words, config=config)
    except SystemExit as ended:
        if not ended.code:
            print(f"\n{examples.rstrip()}")
        raise


@cache
def _prepare_help(function: Any) -> None:
    """Have tyro show a flag's text as one paragraph, and only those defaults that say something:
    what happens without a switch or a path is in its text. Once for each function."""
    import tyro

    def default_hint(default: str) -> str:
        return "" if default in UNSHOWN else f"(default: {default})"

    hint = tyro.conf.arg(help_behavior_hint=default_hint)
    function.__doc__ = re.sub(r"\n {8}", " ", inspect.getdoc(function) or "")
    for group in (function, *filter(is_dataclass, function.__annotations__.values())):
        group.__annotations__ |= {
            flag: Annotated[kind, hint] for flag, kind in group.__annotations__.items()
        }


def run_tool(
    name: str,
    tool: Callable[..., Any] | Mapping[str, Callable[..., Any]],
    about: str | None,
    argv: list[str] | None = None,
    **more: Any,
) -> int:
    """Run a function, or several as sub-commands, by `call_tool`, and return the exit code: the
    function's own, or 0 if it returns lines that say what was done. `more`: as of `run_main`."""

    def body(words: list[str]) -> int:
        answer = call_tool(name, tool, about, words)
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
    errors: tuple[type[Exception], ...] = (UserError, OSError),
    exit_code: int = 2,
    interrupted: str = "interrupted",
) -> int:
    """Run a command's body on its words, by default those of the command line, and return its exit
    code. Of `errors`, and of a system limit that was met, one message is printed, and the code is
    `exit_code`; it is 130 after Ctrl-C, and not 0 if what it printed could not all be written."""
    prepare_output()
    try:
        code = body(sys.argv[1:] if argv is None else argv)
        if DROPPED_BECAUSE:
            raise UserError(f"not all that it printed was written ({DROPPED_BECAUSE.pop()})")
        return code
    except Exception as error:
        limit = "" if isinstance(error, UserError) else limit_reached(error)
        if not limit and not isinstance(error, errors):
            raise
        print(f"{name}: {limit or error}", file=sys.stderr)
        return exit_code
    except KeyboardInterrupt:
        print(f"\n{interrupted}", file=sys.stderr)
        return 130


def run_other_tool(words: Sequence[str], cwd: Path | None = None) -> int:
    """Run another command line, and return its exit code. Ctrl-C reaches both; the other one then
    has as long as it needs to end what it has started. (subprocess.run would kill it.)"""
    process = subprocess.Popen(words, cwd=cwd)
    try:
        return process.wait()
    finally:
        process.wait()
