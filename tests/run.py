"""What `make test` runs: both halves of the tests at once, and a summary of both at the end.

    python tests/run.py MARKS [ARGUMENTS OF PYTEST]    MARKS: as -m takes them, such as "not full"

The unit tests and those on several hosts run in three processes, as many of them wait (Slurm's
most, so they are first). Beside them run, one at a time, those of launchers, whose ranks wait for
each other: so no core is idle. What these say is shown when the others have ended.

What each half says is also in runs/tests/HALF.log, and what did not pass in HALF.jsonl, which
tests/conftest.py writes. An interruption ends both halves; a unit test that fails with -x, too.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LOGS = ROOT / "runs" / "tests"
PYTEST = (sys.executable, "-m", "pytest", "tests")
IN_THREE_PROCESSES = ("-n", "3", "--dist", "loadfile", "--no-loadscope-reorder")
PASSED, INTERRUPTED, NONE_SELECTED = 0, 2, 5  # pytest's exit codes


def main(words: Sequence[str], pytest: Sequence[str] = PYTEST, logs: Path = LOGS) -> int:
    """Run both halves; return 1 if a test failed or none was selected."""
    asked = list[int]()  # signals, which must not interrupt the start or the end of a half
    before = {
        number: signal.signal(number, lambda number, _: asked.append(number))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
        if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN  # as under nohup
    }
    marks, *arguments = words
    command = [*pytest, *arguments, "-rfE", "--color", "yes" if sys.stdout.isatty() else "no"]
    for_launch = [*command, "--part", f"launch and ({marks})"]
    for_unit = [*command, "--part", f"not launch and ({marks})", *IN_THREE_PROCESSES]
    logs.mkdir(parents=True, exist_ok=True)
    halves = list[Half]()
    try:
        halves.append(Half("launch", logs, for_launch))
        halves.insert(0, Half("unit", logs, for_unit, OMP_NUM_THREADS="1"))
        unit, launch = halves
        unit.show(asked)
        if unit.process.poll() == INTERRUPTED:
            launch.process.terminate()
        launch.show(asked)
    finally:
        if asked:
            print("== interrupted: ending both halves", flush=True)
        for half in halves:
            half.process.terminate()
        for half in halves:
            half.process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)
    print(*what_failed(halves), *what_was_skipped(halves), sep="\n", flush=True)
    codes = {half.process.returncode for half in halves}
    return 0 if PASSED in codes and codes <= {PASSED, NONE_SELECTED} else 1


def what_failed(halves: "list[Half]") -> list[str]:
    """Lines: each failed test, and where more is said of it."""
    lines = list[str]()
    for half in halves:
        failed = half.outcomes("failed", "error")
        lines += [f"{test['outcome'].upper()} {test['test']} - {test['why']}" for test in failed]
        code = half.process.returncode
        if failed or code not in (PASSED, NONE_SELECTED):
            log = os.path.relpath(half.log)
            lines.append(f"  the {half.name} tests ended with exit code {code}: see {log}")
    if {half.process.returncode for half in halves} == {NONE_SELECTED}:
        lines = ["  no test was selected"]
    return ["== what failed", *(lines or ["  nothing"])]


def what_was_skipped(halves: "list[Half]") -> list[str]:
    """Lines: how many tests, for want of what."""
    reasons = Counter(outcome["why"] for half in halves for outcome in half.outcomes("skipped"))
    lines = [f"  {number:3} {reason}" for reason, number in reasons.most_common()]
    return ["== what was skipped", *(lines or ["  nothing"])]


class Half:
    """One half of the tests, which runs."""

    def __init__(self, name: str, logs: Path, command: list[str], **environ: str) -> None:
        """Start it in a session of its own, so that an interruption reaches it once: from here."""
        self.name, self.log, self.lists = name, logs / f"{name}.log", logs / f"{name}.jsonl"
        for earlier in (self.log, self.lists):
            earlier.unlink(missing_ok=True)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--outcomes", str(self.lists)],
                env={**os.environ, **environ},
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def show(self, asked: Sequence[int]) -> None:
        """Show what it has said and goes on to say, until it ends or somebody has `asked` to."""
        print(f"== {self.name} tests", flush=True)
        with self.log.open(errors="replace") as log:
            is_running = True
            while is_running:
                is_running = self.process.poll() is None and not asked
                print(log.read(), end="", flush=True)
                time.sleep(0.2 if is_running else 0)

    def outcomes(self, *kinds: str) -> list[dict[str, Any]]:
        """What it listed of tests that ended as one of these: "failed", "error", "skipped"."""
        lines = self.lists.read_text().splitlines() if self.lists.exists() else []
        return [line for line in map(json.loads, lines) if line["outcome"] in kinds]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
