"""Sides that are versions of one script: in two folders, of two commits, in two environments."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import run
from making import write_program
from test_side import plan_of

from compare import keep
from compare import run as run_command
from compare.evidence.record import FILE, read_comparison
from compare.page.report import Report
from compare.plan.environment import COMMITS, ROOT, shell_line
from compare.plan.plan_file import scripts_sha256
from compare.running.checks import check_tools
from compare.running.commits import full_name
from recipe.errors import UserError

STEPS = """
import time
from comparison_side import Side
side = Side()
while True:
    time.sleep({seconds})
    side.step(images=4)
"""
Compare = Callable[..., tuple[int, str]]


def text_of(seconds: float, before: str = "") -> str:
    """A script that does nothing for so many seconds a step."""
    return before + STEPS.format(seconds=seconds)


def git(*words: str) -> str:
    return subprocess.run(["git", *words], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder `here`, to be in."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def repository(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with two commits of jobs/train.py, of which the second one is slower; its folder
    jobs, to be in."""
    for who in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{who}_NAME", "a")
        monkeypatch.setenv(f"GIT_{who}_EMAIL", "a@b")
    git("init", "--quiet", "--initial-branch", "main")
    (here / "jobs").mkdir()
    for seconds in (0.002, 0.02):
        (here / "jobs/train.py").write_text(text_of(seconds))
        git("add", "jobs")
        git("commit", "--quiet", "--message", f"sleep {seconds}")
    git("tag", "v/1", "HEAD~")
    monkeypatch.chdir(here / "jobs")
    return here / "jobs"


@pytest.fixture
def compare(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Runs the command with short blocks; returns its exit code and output."""
    monkeypatch.setattr("compare.running.scheduler.TURN_SECONDS", 0.02)
    monkeypatch.setattr("compare.running.scheduler.PATIENCE", 0.0)

    def compare(*words: str, blocks: int = 1) -> tuple[int, str]:
        how = ["--turns", "2", "--blocks", str(blocks), "--out", "out", "--timeout", "60"]
        code = run_command.main([*how, *words])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return compare


def environment(folder: Path, *programs: str) -> Path:
    """Make an environment whose interpreter, and these programs, tell that they are its own."""
    (folder / "bin").mkdir(parents=True)
    for name in ("python", *programs):
        (folder / "bin" / name).write_text(
            f'#!/bin/sh\nOF={folder.name} exec {sys.executable} "$@"\n'
        )
        (folder / "bin" / name).chmod(0o755)
    return folder / "bin/python"


# ------------------------------------------------------------------------ folder and environment


def test_flags_and_a_file_say_the_same_of_a_side(here: Path) -> None:
    (here / "own.toml").write_text(
        '[side.a]\ncommand = "python t.py"\ndirectory = "../old"\nenvironment = { X = "1" }\n'
        '[side.b]\ncommand = "python t.py"\npython = "v/bin/python"\ncommit = "main"\n'
    )
    words = ["--side", "a=X=1 directory=../old python t.py"]
    words += ["--side", "b=python=v/bin/python commit=main python t.py"]
    assert plan_of(*words).side == plan_of("own.toml").side


def test_a_side_runs_in_its_folder_and_environment(
    here: Path, compare: Compare, capsys: pytest.CaptureFixture[str]
) -> None:
    told = "import os, sys\nprint(os.getcwd(), os.environ.get('OF'), sys.argv[1], flush=True)\n"
    for folder in ("old", "new one"):
        (here.parent / folder).mkdir()
        (here.parent / folder / "t.py").write_text(text_of(0.002, told))
    python = environment(here.parent / "venv")
    words = ["--side", "old=directory=../old python t.py {folder}/x"]
    words += [
        "--side",
        "new=directory='../new one' python=../venv/bin/python python t.py {folder}/x",
    ]
    code, output = compare(*words)
    assert code == 0, output
    at = here / "out/turns/block-1"
    told_by = {name: (at / name / "0/output.log").read_text() for name in ("old", "new")}
    assert told_by["old"].split() == [str(here.parent / "old"), "None", f"{at}/old/0/x"]
    assert told_by["new"] == f"{here.parent}/new one venv {at}/new/0/x\n"
    record = read_comparison(here / "out")
    assert {*record.plan.scripts} == {"../old/t.py", "../new one/t.py"}
    commands = {side.configuration: side.command for side in record.sides}
    assert commands["old"] == "env -C ../old python t.py runs/by-hand/x"
    path = f'PATH={python.parent}:"$PATH"'
    assert commands["new"] == f"env -C '../new one' {path} python t.py runs/by-hand/x"
    (here / "results").mkdir()
    question = ["--machine", "m", "--question", "q", "--results", "results"]
    assert keep.main(["out", *question]) == 0
    [kept] = here.glob("results/m/*/record.jsonl")
    assert str(here.parent) not in kept.read_text() and "venv/bin" in kept.read_text()
    assert run_command.main([*words, "--dry-run"]) == 0
    assert f"{path} python t.py {here}/runs/compare-" in capsys.readouterr().out
    (here.parent / "old/t.py").write_text("changed")
    assert compare(*words, blocks=2)[1].startswith("compare/run.py: out holds another plan")


def test_what_is_kept_tells_two_places_apart(here: Path, compare: Compare) -> None:
    """Each has a folder proj with a train.py, and the second one an environment without bin/, which
    is in the first place; the comparison's folder is in the next one."""
    for name in ("one", "two"):
        (here.parent / name / "proj").mkdir(parents=True)
        (here.parent / name / "proj/train.py").write_text(text_of(0.002))
    python = environment(here.parent / "env").rename(here.parent / "env/python")
    code, output = compare(
        "--side",
        f"one=directory={here.parent}/one/proj python train.py",
        "--side",
        f"two=directory={here.parent}/two/proj/ python={python} python train.py {here.parent}2/x",
    )
    assert code == 0, output
    (here / "elsewhere").mkdir()
    os.chdir(here / "elsewhere")
    question = ["--machine", "m", "--question", "q", "--results", "results"]
    assert keep.main(["../out", *question]) == 0
    [kept] = Path("results").glob("m/*")
    assert str(here.parent) not in (kept / FILE).read_text().replace(f"{here.parent}2/x", "")
    record = read_comparison(kept)
    assert {*record.plan.scripts} == {"...2/proj/train.py", "...3/proj/train.py"}
    scripts = {side.configuration: side.environment.script for side in record.sides}
    assert scripts == {"one": "...2/proj/train.py", "two": "...3/proj/train.py"}
    [two] = [side for side in record.sides if side.configuration == "two"]
    assert two.command.startswith("env -C ...3/proj/ PATH=.../env:")


def test_a_line_for_a_shell_starts_what_run_py_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/a b/bin:/usr/bin:/bin")
    words = ["env", "PATH=/c d/bin:/a b/bin:/usr/bin:/bin", "X=$Y", "sh", "-c", "echo $PATH,$X"]
    for run_by in (words, ["sh", "-c", shell_line(words)]):
        done = subprocess.run(run_by, capture_output=True, text=True, check=True)
        assert done.stdout == "/c d/bin:/a b/bin:/usr/bin:/bin,$Y\n"
    assert shell_line(words).startswith("env 'PATH=/c d/bin':\"$PATH\" 'X=$Y' sh")
    assert shell_line(["env", "PATH=/usr/bin"]) == "env PATH=/usr/bin"


@pytest.mark.parametrize(
    ("side", "message"),
    [
        ("directory=../nowhere python t.py", r"there is no folder \.\./nowhere, seen from "),
        ("python=venv python t.py", "python venv: is a folder; give an environment's bin/python"),
        ("python=no/python python t.py", "python no/python: is no interpreter"),
        ("no-such-launcher t.py", "its command needs no-such-launcher, which is not on its PATH$"),
        ("directory=d ./start.sh", r"its command needs \./start\.sh"),
        ("srun python t.py", r"its command needs srun, .* \(it comes with Slurm"),
        ("PATH=d env X=1 srun python t.py", r"its command needs srun, "),
        (
            "python=venv/bin/python torchrun t.py",
            "there is no torchrun beside venv/bin/python; it comes with torch$",
        ),
        ("python=venv/bin/python X=1 mpirun -np 2 torchrun t.py", "there is no torchrun beside"),
        ("python=venv/bin/other python t.py", "`python` in that folder is another interpreter"),
        ("dir=../old python t.py", "there is no key dir; .*begin the command with `env dir="),
        (
            f"torchrun {ROOT}/ddp_train/train.py",
            r"ddp_train/train\.py is a trainer of this project",
        ),
        (f"directory={ROOT}/baselines python fsdp.py", r"baselines/fsdp\.py is a trainer of"),
        ("python 't.py", "No closing quotation; quote as in a shell"),
    ],
)
def test_what_a_side_lacks_is_said_before_anything_starts(
    side: str, message: str, here: Path, compare: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    write_program(here / "d/env", "exit")
    environment(here / "venv", "other", "mpirun")
    code, output = compare("--side", f"x={side}", "--side", "y=python t.py")
    assert code == 2 and output.count("\n") == 1 and re.search(f"side x.*{message}", output), output
    assert not (here / "out").exists()


def test_what_is_there_is_not_refused(here: Path) -> None:
    """A trainer under another program, a trainer's name in a user's own project, a shell."""
    environment(here / "venv", "torchrun")
    (here / "ddp_train").mkdir()
    (here / "ddp_train/train.py").touch()
    for side in (
        f"torchrun {ROOT}/benchmarks/programs/trainer.py ddp_train/train.py",
        "torchrun ddp_train/train.py --launcher srun",
        "python=venv/bin/python torchrun t.py",
        "bash -c 'srun python t.py'",
        "sh wrapper.sh srun --ntasks 2 python t.py",
        "env x=1 python t.py",
    ):
        check_tools(plan_of("--side", f"x={side}", "--side", "y=OMP_NUM_THREADS=1 python t.py"))
    (here / "plan.toml").write_text(
        "[side.a]\ncommand = 'X=1 python t.py'\n[side.b]\ncommand = 'sh t'\n"
    )
    check_tools(plan_of("plan.toml"))


# ------------------------------------------------------------------------------------------ commits


def test_two_commits_are_compared_and_nothing_stays(
    repository: Path, compare: Compare, capsys: pytest.CaptureFixture[str]
) -> None:
    (repository / "train.py").write_text("not committed")
    words = ["--commits", "v/1", "HEAD", "--", "X=1", "python", "train.py"]
    code, output = compare(*words)
    assert code == 0 and "v-1 / HEAD " in output, output
    assert "note: uncommitted changes are not part of" in output
    record, shas = read_comparison(repository / "out"), git("rev-parse", "v/1", "HEAD").split()
    assert [own.commit for own in record.plan.side.values()] == shas
    assert record.plan.scripts == {}  # the commits' names stand for them
    assert record.sides[0].command.startswith(f"env -C {COMMITS}/")
    assert git("worktree", "list").count("\n") == 1 and not COMMITS.exists()
    assert compare(*words)[0] == 0  # there is nothing left to measure
    # The record can be repeated, as the report's command for a longer comparison does.
    code, output = compare("out/record.jsonl", blocks=2)
    assert code == 0 and read_comparison(repository / "out").num_blocks == 2, output
    # A dry run makes no worktree: its lines do, and then start the script.
    assert run_command.main([*words[:3], "--dry-run", *words[3:]]) == 0
    assert not COMMITS.exists()
    lines = capsys.readouterr().out.splitlines()
    [made] = [line for line in lines if shas[0] in line]
    [of_side] = [line for line in lines if line.startswith("export PYTHONPATH=")]
    [start] = [line.removeprefix("#") for line in lines if f" -C {COMMITS}/{shas[0][:12]}" in line]
    ended = "SIGALRM"  # a script that finds its Side trains until something ends it
    pasted = "\n".join([made, of_side, f"timeout --signal {ended} 3 {start}"])
    assert subprocess.run(["bash", "-e", "-c", pasted], check=False).returncode == 124
    assert (COMMITS / shas[0][:12] / "jobs/train.py").read_text() == text_of(0.002)


def test_what_a_killed_command_has_left_is_removed(repository: Path, compare: Compare) -> None:
    """A changed worktree, one of a commit that the plan does not have, one that git was just making
    (it is locked), and one that no git knows any more."""
    first, second = git("rev-parse", "v/1", "HEAD").split()
    git("commit", "--quiet", "--message", "third", "--allow-empty")
    third = git("rev-parse", "HEAD").strip()
    for sha in (first, second, third):
        git("worktree", "add", "--quiet", "--detach", f"{COMMITS}/{sha[:12]}", sha)
    git("worktree", "lock", "--reason", "initializing", f"{COMMITS}/{second[:12]}")
    (COMMITS / second[:12] / ".git").unlink()
    git("worktree", "lock", "--reason", "initializing", f"{COMMITS}/{third[:12]}")
    (COMMITS / first[:12] / "jobs/train.py").write_text("changed")
    (COMMITS / "unknown").mkdir()
    code, output = compare("--commits", "v/1", "HEAD~", "--", "python", "train.py")
    assert code == 0 and not COMMITS.exists(), output
    assert git("worktree", "list").count("\n") == 1


def test_a_hooks_variables_and_hooks_are_not_those_of_the_worktrees(
    repository: Path, compare: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a pre-commit hook, in which GIT_INDEX_FILE names the index of the user's commit."""
    root = repository.parent
    hook = root / ".git/hooks/post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\ntouch ran; exit 1\n")
    hook.chmod(0o755)
    git("rm", "--quiet", "--cached", "train.py")
    index = (root / ".git/index").read_bytes()
    with monkeypatch.context() as in_hook:
        in_hook.setenv("GIT_INDEX_FILE", str(root / ".git/index"))
        in_hook.setenv("GIT_DIR", str(root / ".git"))
        in_hook.setenv("GIT_PREFIX", "jobs/")
        code, output = compare("--commits", "v/1", "HEAD", "--", "python", "train.py")
    assert code == 0, output
    assert (root / ".git/index").read_bytes() == index and not (root / "ran").exists()
    commits = {side.environment.git_commit for side in read_comparison(repository / "out").sides}
    assert commits == {sha[:12] for sha in git("rev-parse", "v/1", "HEAD").split()}


def test_one_pythonpath_serves_all_commits(
    repository: Path, compare: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a package comes from the user's own work tree, as after pip install -e."""
    library = repository.parent / "src/lib.py"
    library.parent.mkdir()
    for seconds in (0.002, 0.003):
        library.write_text(f"seconds = {seconds}")
        (repository / "train.py").write_text(text_of(0.002, "import lib"))
        git("add", "--all", str(repository.parent))
        git("commit", "--quiet", "--message", f"library {seconds}")
    monkeypatch.setenv("PYTHONPATH", str(library.parent))
    code, output = compare("--commits", "HEAD", "HEAD~", "--", "python", "train.py")
    assert code == 1 and f"imports lib from {library.parent}, another work tree" in output
    [given] = {*re.findall(r"set (PYTHONPATH=\S+) for it", output)}
    assert given == "PYTHONPATH=../src"
    words = ["--out", "own", "--commits", "HEAD", "HEAD~", "--", given, "python", "train.py"]
    code, output = compare(*words)
    assert code == 0, output


def test_two_names_that_would_be_one_sides_name(repository: Path) -> None:
    git("tag", "v-1", "HEAD")
    options = run_command.parse_options(["--commits", "v/1", "v-1", "--", "python", "t.py"], "")
    run_command.take_commits(options)
    sides = [side.partition("=")[0] for side in options.side]
    assert sides == ["v-1", full_name("HEAD")[:12]]


def test_a_repository_of_another_user_is_named(
    repository: Path, compare: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    code, output = compare("--commits", "v/1", "HEAD", "--", "python", "t.py")
    assert code == 2 and output.count("\n") == 1
    assert f"{repository.parent} belongs to another user" in output
    assert output.endswith(f"--add safe.directory {repository.parent}\n")


INTERRUPT = """
import os, signal
with open({count!r}, "a") as file:
    file.write("x")
    file.flush()
    if file.tell() == 3:
        os.kill(os.getppid(), signal.SIGINT)
"""


def test_after_an_interruption_the_same_command_goes_on(repository: Path, compare: Compare) -> None:
    """It comes from the third start of a script, that of the second block."""
    before = INTERRUPT.format(count=str(repository.parent / "starts"))
    for seconds in (0.002, 0.003):
        (repository / "train.py").write_text(text_of(seconds, before))
        git("commit", "--quiet", "--all", "--message", f"sleep {seconds}")
    words = ["--commits", "HEAD^", "HEAD", "--", "python", "train.py"]
    code, output = compare(*words, blocks=2)
    assert code == 130 and "what was measured is kept" in output, output
    assert git("worktree", "list").count("\n") == 1 and not COMMITS.exists()
    # The report, too, says how it goes on, though what the commits ran is gone.
    text, command = Report(read_comparison(repository / "out")).next_step
    assert text == "This command continues the measurement:"
    assert f"--out {repository}/out" in command
    lines = (repository / "out/record.jsonl").read_text().splitlines()
    code, output = compare(*words, blocks=2)
    assert code == 0 and read_comparison(repository / "out").num_blocks == 2, output
    assert (repository / "out/record.jsonl").read_text().splitlines()[: len(lines)] == lines


def test_a_commit_that_fails_leaves_no_worktree(repository: Path, compare: Compare) -> None:
    git("rm", "--quiet", "train.py")
    git("commit", "--quiet", "--message", "gone", "--allow-empty")
    (repository.parent / "x").touch()
    git("add", "--all", str(repository.parent))
    git("commit", "--quiet", "--message", "without jobs")
    code, output = compare("--commits", "v/1", "HEAD", "--", "python", "train.py")
    assert code == 2 and re.search(r"side HEAD: there is no folder \., in commit", output), output
    (repository / "no").mkdir()
    (repository / "no/python").symlink_to(sys.executable)
    code, output = compare("--commits", "v/1", "HEAD~2", "--", "no/python", "train.py")
    assert code == 2 and re.search("needs no/python, .* no program of commit .*python=FILE", output)
    code, output = compare("--commits", "v/1", "HEAD~2", "--", "python", "wrong.py")
    assert code == 1 and "can't open file" in output
    assert git("worktree", "list").count("\n") == 1 and not COMMITS.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["main", "HEAD~1", "--", "python t.py"], "-- 'python t.py': is one word; leave out its"),
        (["main", "HEAD", "--", "python", "t.py"], "main and HEAD are the same commit, .* --null$"),
        (["main", "nothing", "--", "python", "t.py"], "commit nothing: there is no such commit"),
        (["main..HEAD", "v/1", "--", "python", "t.py"], r"commit main\.\.HEAD: there is no such"),
        (["main", "--", "python", "t.py"], "--commits main: name two commits, or give --null"),
        (["main", "v/1"], "--commits main v/1: give the command .*, as in .* -- torchrun"),
    ],
)
def test_a_mistake_in_commits_is_one_message(
    words: list[str], message: str, repository: Path, compare: Compare
) -> None:
    code, output = compare("--commits", *words)
    assert code == 2 and output.count("\n") == 1 and re.search(message, output), output


def test_commits_need_git_and_a_repository(
    here: Path, compare: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--commits", "a", "b", "--", "python", "t.py"]
    assert re.search(f"commit a: {here} has no git work tree .*not a git", compare(*words)[1])
    (here / "bin").mkdir()
    monkeypatch.setenv("PATH", str(here / "bin"))
    assert compare(*words) == (
        2,
        "compare/run.py: a commit as a side needs git, which is not installed\n",
    )


def test_a_commit_as_a_side_of_a_file(repository: Path) -> None:
    """Of another folder's repository, too; a null test runs one commit in both."""
    other = repository.parent.parent / "elsewhere"
    other.mkdir()
    plan = plan_of("--side", f"a=directory={repository} commit=v/1 python train.py", "--null")
    plan = run_command.with_full_names(plan)
    place = f"{COMMITS}/{full_name('v/1')[:12]}/jobs"
    assert [member.place for member in plan.members()] == [place, place]
    with run_command.locked(COMMITS, ""), run_command.worktrees(plan):
        assert Path(place, "train.py").read_text() == text_of(0.002)
        assert scripts_sha256(plan) == {}
        assert git("status", "--short", str(repository.parent)) == ""
    with pytest.raises(UserError, match=r"commit x: .*/elsewhere has no git work tree"):
        plan = plan_of("--side", f"a=directory={other} commit=x python t.py", "--null")
        run_command.with_full_names(plan)


# ------------------------------------------------------------------------------- real launchers


@pytest.mark.launch
def test_torchrun_starts_two_commits(repository: Path) -> None:
    """Each rank in its commit's worktree, in the folder that the command was given in."""
    for number, before in enumerate(("seconds = 1\n", "seconds = 2\n")):
        # In one piece: torchrun starts python -u, which writes each argument of print by itself.
        ranks = "import os\nos.write(1, f'rank {os.environ[\"RANK\"]} {os.getcwd()}\\n'.encode())\n"
        (repository / "train.py").write_text(text_of(0.002, before + ranks))
        git("commit", "--quiet", "--all", "--message", f"number {number}")
    words = ["--commits", "HEAD~1", "HEAD", "--blocks", "1", "--turns", "2", "--out", "out"]
    words += ["--", "torchrun", "--nproc-per-node", "2", "train.py"]
    command = ["env", "-C", str(repository), sys.executable, f"{ROOT}/compare/run.py", *words]
    run(command, 400).checked()
    for name in ("HEAD-1", "HEAD"):
        log = (repository / f"out/turns/block-1/{name}/0/output.log").read_text()
        assert {*re.findall(r"rank (\d)", log)} == {"0", "1"}
        sha = full_name(name.replace("-", "~"))
        assert f"{repository}/{COMMITS}/{sha[:12]}/jobs" in log
    assert git("worktree", "list").count("\n") == 1
