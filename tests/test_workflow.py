"""The workflow that compares a pull request's base and head: GitHub's schema, and its steps as
they stand, on two commits of a tiny script."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from launching import BIN, ROOT, Finished, change_on_rank, run
from making import write_program

WORKFLOW = ROOT / ".github/workflows/compare.yml"
DEFINED = yaml.safe_load(WORKFLOW.read_text())
[JOB] = DEFINED["jobs"].values()
STEPS = {step["name"]: step for step in JOB["steps"] if "run" in step}
SCRIPT = """
import time
from comparison_side import Side
side = Side()
while True:
    time.sleep({seconds})
    side.step(images=1)
"""
# Turns and pauses that are long enough for what sleeps.
SHORT = "module.TURN_SECONDS, module.PATIENCE = 0.05, 0.0"


def test_github_takes_it() -> None:
    check = [str(BIN / "check-jsonschema"), "--builtin-schema", "vendor.github-workflows"]
    subprocess.run([*check, str(WORKFLOW)], check=True)


def test_it_takes_major_versions_of_githubs_own_actions_alone() -> None:
    used = [step["uses"] for step in JOB["steps"] if "uses" in step]
    assert len(used) == 4 and all(re.fullmatch(r"actions/[\w-]+@v\d+", one) for one in used)


def test_no_text_of_a_pull_request_becomes_shell_code() -> None:
    for name, step in STEPS.items():
        assert "${{" not in step["run"], name
    tokens = [name for name, step in STEPS.items() if "GH_TOKEN" in step.get("env", {})]
    assert tokens == ["Comment on the pull request"], "what the base or the head runs has no token"
    checkouts = [step for step in JOB["steps"] if "checkout" in step.get("uses", "")]
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_what_it_watches_and_starts_is_there() -> None:
    for pattern in DEFINED[True]["pull_request"]["paths"]:  # YAML's `on`
        assert (ROOT / pattern.removesuffix("/**")).exists(), pattern
    for file in re.findall(r"\S+\.py", DEFINED["env"]["COMMAND"]):
        assert (ROOT / file).exists(), file


@pytest.fixture
def runner(tmp_path: Path) -> dict[str, str]:
    """What GitHub's runner sets, beside the workflow's own variables, for short measurements."""
    short = change_on_rank(None, "compare.running.scheduler", SHORT, tmp_path)
    own = {name: str(value) for name, value in DEFINED["env"].items()}
    own |= {"COMMAND": f"{sys.executable} train.py", "WIDTH": "50%", "MINUTES": "0.05"}
    return {
        **short,
        **own,
        "GITHUB_WORKFLOW": DEFINED["name"],
        "GITHUB_REPOSITORY": "owner/name",
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
        "NUMBER": "7",
        "MEASURED": "success",
    }


def commit(folder: Path, seconds: float) -> None:
    (folder / "train.py").write_text(SCRIPT.format(seconds=seconds))
    git = ["git", "-C", str(folder), "-c", "user.name=n", "-c", "user.email=e@x"]
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "--quiet", "--message", f"{seconds} s"], check=True)


def do(name: str, folder: Path, runner: dict[str, str]) -> Finished:
    """Run a step as the runner does."""
    script = folder / "step.sh"
    script.write_text(f"cd {folder}\n{STEPS[name]['run']}")
    return run(["bash", "-e", str(script)], **runner)


@pytest.mark.launch
def test_its_steps_find_a_slower_head(tmp_path: Path, runner: dict[str, str]) -> None:
    head = tmp_path / "head"
    subprocess.run(["git", "init", "--quiet", str(head)], check=True)
    commit(head, 0.005)
    commit(head, 0.01)
    (tmp_path / "tools").symlink_to(ROOT)
    measured = do("Measure", tmp_path, runner).checked()
    *_, said, command = measured.output.splitlines()
    assert said == "whether the goals are reached, as an exit code:"
    assert command.endswith("compare/report.py comparison --check")
    do("Report", tmp_path, runner).checked()
    comment = (tmp_path / "comment.md").read_text()
    assert "**Gate: failed.**\n**Goal head / base ≥ 0.975: not reached, " in comment
    assert (tmp_path / "summary.md").read_text() == comment
    assert (tmp_path / "comparison/report.html").exists()
    for flags in ("--check", "--check --undecided-passes"):
        ended = do("Gate", tmp_path, {**runner, "CHECK": flags})
        assert ended.returncode == 1 and ended.output.splitlines()[-1].startswith("Gate: failed: ")


def test_a_measurement_that_fails_is_said_so(tmp_path: Path, runner: dict[str, str]) -> None:
    """In the summary and the comment. A report that fails by itself is an error."""
    (tmp_path / "tools").symlink_to(ROOT)
    do("Report", tmp_path, {**runner, "MEASURED": "failure"}).checked()
    summary = (tmp_path / "summary.md").read_text()
    assert summary == "The measurement failed: the log of its step says why.\n\n"
    assert (tmp_path / "comment.md").read_text() == summary
    assert do("Report", tmp_path, runner).returncode != 0


def test_the_gate_decides_before_a_comment_can_fail() -> None:
    names = [step.get("name") for step in JOB["steps"]]
    assert names.index("Gate") < names.index("Comment on the pull request")
    assert "if" not in STEPS["Gate"]


@pytest.mark.parametrize(
    ("known", "request_"),
    [
        ("", "--method POST repos/owner/name/issues/7/comments"),
        ("12\\n345\\n", "--method PATCH repos/owner/name/issues/comments/12"),
    ],
)
def test_a_pull_request_has_one_comment(
    known: str, request_: str, tmp_path: Path, runner: dict[str, str]
) -> None:
    (tmp_path / "comment.md").write_text("### The table\n")
    programs, asked = tmp_path / "bin", tmp_path / "asked"
    write_program(
        programs / "gh", f'echo "$@" >> {asked}\n[ "$2" != --paginate ] || printf "{known}"'
    )
    path = f"{programs}:{os.environ['PATH']}"
    do("Comment on the pull request", tmp_path, {**runner, "PATH": path}).checked()
    looked, told = asked.read_text().splitlines()
    assert looked == (
        "api --paginate repos/owner/name/issues/7/comments --jq .[] | "
        'select((.user.login == "github-actions[bot]") and (.body | startswith("<!-- compare -->"))'
        ") | .id"
    )
    assert told == f"api --silent {request_} --field body=@body.md"
    body = (tmp_path / "body.md").read_text()
    assert body == "<!-- compare -->\n\n### The table\n"
