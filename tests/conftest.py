"""What holds for all tests."""

import functools
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings

# No property fails because others use the cores, too.
settings.register_profile("loaded", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("loaded")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="MARKEXPR", help="as -m; with both, both have to hold")
    parser.addoption("--outcomes", metavar="FILE", help="list in it what did not pass, and why")
    parser.addoption("--skipped-in", metavar="FOLDER", help="only what those lists say was skipped")
    parser.addoption("--dry", action="store_true", help="tests/test_gpu.py: on the CPU, and small")


def pytest_configure(config: pytest.Config) -> None:
    """Make a test run end in order by SIGTERM (a time limit, a cancelled job) as by Ctrl-C:
    launched processes and network namespaces go with it. And let what the tests start be
    interrupted though they were themselves started in the background, where SIGINT is ignored.
    They have a home of their own: neither the user's settings nor caches, such as horovodrun's, of
    which hosts it can reach, are theirs, and a user may have no home."""
    home = tempfile.mkdtemp(prefix="home-")
    config.add_cleanup(functools.partial(shutil.rmtree, home, ignore_errors=True))
    os.environ["HOME"] = home
    os.environ.pop("XDG_CACHE_HOME", None)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    both = filter(None, (config.option.part, config.option.markexpr))
    config.option.markexpr = " and ".join(f"({expression})" for expression in both)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what was not skipped in the run of which --skipped-in has the lists."""
    if folder := config.option.skipped_in:
        lines = [line for file in Path(folder).glob("*.jsonl") for line in file.open()]
        outcomes = [json.loads(line) for line in lines]
        skipped = {outcome["test"] for outcome in outcomes if outcome["outcome"] == "skipped"}
        config.hook.pytest_deselected(items=[x for x in items if x.nodeid not in skipped])
        items[:] = [x for x in items if x.nodeid in skipped]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """List what did not pass, for tests/run.py."""
    if file := config.option.outcomes:
        lines = [
            json.dumps({"outcome": outcome, "test": report.nodeid, "why": why(report)}) + "\n"
            for outcome in ("failed", "error", "skipped")
            for report in terminalreporter.stats.get(outcome, [])
        ]
        Path(file).write_text("".join(lines))


def why(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The reason of a skip, or the first line that tells of a failure."""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = (crash.message if crash else str(report.longrepr)).strip().splitlines()
    return lines[0 if crash else -1][:200] if lines else ""


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """What a test, or what it calls, sets in the environment goes with it: the next test of this
    process would find it set by the user."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """refusal(main, words): the one line that a command says which does not do what the words ask
    for; it ends with exit code 2, or another one that is given."""

    def told(main: Callable[[list[str]], int], words: list[str], code: int = 2) -> str:
        capsys.readouterr()
        assert main(words) == code
        shown = capsys.readouterr()
        assert shown.out == "" and len(shown.err.splitlines()) == 1, shown
        return shown.err

    return told


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """trained(launcher, engine, arguments, ranks): the run folder of such a training, made once,
    with a checkpoint of every 20th step. Copy it before you go on with it."""
    from launching import train

    @functools.cache
    def made(launcher: str, engine: str, arguments: str, ranks: int) -> Path:
        folder = tmp_path_factory.mktemp("trained") / "run"
        checkpoints = "--checkpoint-steps 20 --keep-checkpoints 5"
        # The plain ones start for real, for test_launch.py, with each launcher and engine once.
        warm = bool(arguments) or launcher in ("python", "mpirun --transport gloo")
        train(folder, launcher, engine, f"{checkpoints} {arguments}", ranks, warm)
        return folder

    def folder_of(launcher: str, engine: str, arguments: str = "", ranks: int = 2) -> Path:
        return made(launcher, engine, arguments, ranks)

    return folder_of
