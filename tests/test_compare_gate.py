"""The gate for CI: which exit code goals have, alone and together, and that no error has one that
means something else."""

import fcntl
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from records import a_plan, drop_runs, edit
from test_compare_records import make_comparison

from compare import report
from compare.evidence.goals import (
    AT_GOAL,
    FAILED,
    MISSED,
    NOT_JUDGED,
    PASSED,
    REACHED,
    Goal,
    gate_result,
)
from compare.evidence.judgement import UNDECIDED
from compare.evidence.paired import Estimate
from compare.evidence.record import FILE, LOCK, FailureLine, PlanLine, Record
from compare.plan.plan import Outcome
from compare.plan.plan_file import plan_record

PAIR = "ddp-torchrun:horovod-mpi"
WIDE = {"horovod-mpi": 1700.0}  # a side's own speed: it differs much between blocks
Gate = Callable[..., tuple[int, str]]


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """Three blocks of whole runs at two workers, DDP 1.1 times as fast."""
    return make_comparison(tmp_path / "compare-1", a_plan(workers=(2,), goals={PAIR: 1.05}))


@pytest.fixture
def gate(capsys: pytest.CaptureFixture[str]) -> Gate:
    """gate(words): the exit code of --check, and the last line that it says."""

    def told(*words: str | Path) -> tuple[int, str]:
        code = report.main([*map(str, words), "--check", "--no-html"])
        shown = capsys.readouterr()
        return code, (shown.out + shown.err).splitlines()[-1]

    return told


def a_goal(decision: str, **fields: object) -> Goal:
    speed = Estimate(1.0, 0.9, 1.1, (1.0,) * 3, 0.02, 2)
    return replace(Goal(question="", name="a:b", least=1, speed=speed, decision=decision), **fields)


@pytest.mark.parametrize(
    ("decisions", "result"),
    [
        ([[REACHED, AT_GOAL]], PASSED),
        ([[REACHED, UNDECIDED]], UNDECIDED),
        ([[REACHED], [UNDECIDED, MISSED]], FAILED),
        ([[REACHED], []], NOT_JUDGED),
        ([[MISSED], []], FAILED),
        ([[]], NOT_JUDGED),
    ],
)
def test_the_goals_of_all_comparisons_have_one_result(
    decisions: list[list[str]], result: str
) -> None:
    assert gate_result([[a_goal(one) for one in own] for own in decisions]) == result


def test_a_goal_that_is_not_judged_is_not_an_undecided_one() -> None:
    few = Estimate(1.0, None, None, (1.0,) * 2)
    for fields in ({"is_finished": False}, {"speed": few}, {"speed": None}):
        assert gate_result([[a_goal(UNDECIDED, **fields), a_goal(UNDECIDED)]]) == NOT_JUDGED


@pytest.mark.parametrize(
    ("goals", "code", "words"),
    [
        (
            {PAIR: 1.05},
            0,
            "Gate: passed: compare-1: goal ddp-torchrun / horovod-mpi ≥ 1.050: reached, 1.",
        ),
        (
            {PAIR: 1.2},
            1,
            "Gate: failed: compare-1: goal ddp-torchrun / horovod-mpi ≥ 1.200: not reached, 1.",
        ),
        (
            {PAIR: 1.2, "horovod-mpi": 1},
            1,
            "Gate: failed: compare-1: goal ddp-torchrun / horovod-mpi ≥ 1.2",
        ),
        (
            {PAIR: 1.05, **WIDE},
            2,
            "Gate: undecided: compare-1: goal horovod-mpi ≥ 1,700 images/s: undecided, ",
        ),
        (
            {},
            3,
            "Gate: not judged: compare-1: its plan has no goals; give run.py --goals FIRST:SECOND=",
        ),
    ],
)
def test_the_exit_code_is_that_of_the_goals(
    goals: dict[str, float], code: int, words: str, measured: Path, gate: Gate
) -> None:
    edit(measured / "plan.json", goals=goals)
    told = gate(measured)
    assert told[0] == code and told[1].startswith(words)
    assert told[1].count("goal ") <= 1, "only what has decided it is named"
    assert report.main([str(measured), "--no-html"]) == 0, "only --check judges"


def test_undecided_goals_may_pass_and_nothing_else(measured: Path, gate: Gate) -> None:
    for goals, code in ((WIDE, 0), ({PAIR: 1.2}, 1), ({PAIR: 1.05}, 0), ({}, 3)):
        edit(measured / "plan.json", goals=goals)
        told = gate(measured, "--undecided-passes")
        assert told[0] == code
        assert told[1].endswith("It may pass: --undecided-passes.") == (goals == WIDE)


def test_what_is_not_measured_whole_is_not_judged(measured: Path, gate: Gate) -> None:
    runs = [f"block-{block}/horovod-mpi-2" for block in (1, 2, 3)]
    path = measured / FILE
    whole = path.read_text()

    def is_not_judged(words: str) -> None:
        code, told = gate(measured)
        assert code == 3 and told.startswith("Gate: not judged: ") and words in told
        path.write_text(whole)

    path.write_text(whole.replace('"train_seconds": ', '"train_seconds": 1', 1))
    is_not_judged("was changed, or a line is missing above it")
    edit(measured / "plan.json", blocks=9)
    is_not_judged("≥ 1.050: not finished, 1.")
    drop_runs(measured, runs[2])
    edit(measured / "plan.json", blocks=2)
    is_not_judged("≥ 1.050: an interval needs 3 blocks")
    for place in runs:
        edit(measured / place / "environment.json", kernel="6.2")
    is_not_judged("≥ 1.050: no verdict: kernel: 6.1 (ddp-torchrun), 6.2 (horovod-mpi); blocks")
    edit(measured / "plan.json", goals={}, null=True, pairs=[])
    is_not_judged("a null test has no goals")


def test_several_comparisons_pass_if_all_do(
    measured: Path, tmp_path: Path, gate: Gate, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = a_plan(workers=(2,), goals={PAIR: 1.0}, order_seed=2)
    other = make_comparison(tmp_path / "compare-2", plan)
    assert gate(measured, other)[0] == 0
    edit(other / "plan.json", goals={PAIR: 1.2})
    code, told = gate(measured, other)
    assert code == 1 and told.startswith("Gate: failed: compare-2: goal ddp-torchrun / ")
    assert "compare-1" not in told
    edit(other / "plan.json", goals={})
    assert gate(measured, other) == (3, f"Gate: not judged: compare-2: {NO_GOALS}")
    edit(measured / "plan.json", goals={})
    assert gate(measured, other) == (3, f"Gate: not judged: compare-1, compare-2: {NO_GOALS}")
    edit(measured / "plan.json", goals={PAIR: 1.2})
    assert report.main([str(measured), str(other), "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["gate"]["result"] == "failed" and len(value["comparisons"]) == 2


NO_GOALS = (
    "its plan has no goals; give run.py --goals FIRST:SECOND=RATIO, or --top1-goals "
    "FIRST:SECOND=POINTS."
)


@pytest.mark.parametrize("form", ["--json", "--markdown", "--csv"])
def test_other_forms_are_whole_and_the_gates_line_is_on_stderr(
    form: str, measured: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(measured / "plan.json", goals={PAIR: 1.2})
    assert report.main([str(measured), form]) == 0
    without = capsys.readouterr()
    assert report.main([str(measured), form, "--check"]) == 1
    shown = capsys.readouterr()
    assert shown.out == without.out and without.err == ""
    [line] = shown.err.splitlines()
    assert line.startswith("Gate: failed: compare-1: goal ")
    if form == "--json":
        value = json.loads(shown.out)
        assert value["gate"] == {"result": "failed", "sentence": line}
        [goal] = value["goals"]
        assert (goal["name"], goal["decision"]) == (PAIR, "not reached")
    if form == "--markdown":
        first, _, answer, *_ = shown.out.splitlines()
        assert first.startswith("### ") and answer == "**Gate: failed.**"


@pytest.mark.parametrize(
    "words",
    [[], ["nowhere"], ["--bogus"], ["--json", "--csv"], ["."], ["--html"]],
)
def test_no_error_has_an_exit_code_that_means_something(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for flags in (
        [*words, "--check"],
        ["--check", *words, "--undecided-passes"],
        [*words, "--check=True"],
    ):
        assert report.main(flags) == 3
        assert capsys.readouterr().err.count("Gate: not judged: ") == 1


def test_a_comparison_that_measured_nothing_is_not_judged_and_says_why(
    tmp_path: Path, gate: Gate, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "compare-1"
    folder.mkdir()
    plan = PlanLine(plan=msgspec.to_builtins(plan_record(a_plan(), NOW), enc_hook=float))
    Record.open(folder).append(plan)
    before = f"{folder}: nothing was measured: "
    assert gate(folder) == (3, f"Gate: not judged: {before}{UNFINISHED}")
    with (folder / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "it is still running its first block" in gate(folder)[1]
    failure = FailureLine(
        place="turns/block-1",
        block=1,
        outcome=Outcome("failed"),
        folder="turns/block-1.failed-1",
        output="b ended with exit code 1:\n  | much more",
    )
    Record.open(folder).append(failure)
    reason = f"block 1 failed: b ended with exit code 1; see {folder / failure.folder}"
    assert gate(folder) == (3, f"Gate: not judged: {before}{reason}")
    assert report.main([str(folder)]) == 1
    assert capsys.readouterr().err == f"compare/report.py: {before}{reason}\n"


NOW = "2026-11-28T08:00:00+00:00"
UNFINISHED = "the first block was not finished; the command that began it begins it again"


def test_a_mistake_in_this_project_is_no_missed_goal(
    measured: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("compare.page.formats.as_text", lambda _: 1 / 0)
    assert report.main([str(measured), "--check", "--no-html"]) == 3
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith("Gate: not judged: a mistake in this project: ZeroDivisionError")
    with pytest.raises(ZeroDivisionError):
        report.main([str(measured), "--no-html"])


def test_undecided_passes_needs_a_check(measured: Path, refusal: Callable[..., str]) -> None:
    told = refusal(report.main, [str(measured), "--undecided-passes"], code=1)
    assert "--undecided-passes: says what --check lets pass; add it" in told
