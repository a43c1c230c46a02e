"""A user's own script as a side of a comparison: by hand, measured, and with each mistake."""

import json
import mmap
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from multiprocessing import Pipe
from pathlib import Path

import needs
import numpy as np
import pytest
import torch
from launching import launch, run, wait_until
from torch import nn

from compare import report
from compare import run as run_command
from compare.evidence.record import read_comparison
from compare.for_scripts.comparison_side import (
    MOST_BYTES,
    UNREADABLE,
    VERSION,
    Side,
    State,
    WorkTree,
    cpu_seconds,
    digest_of,
    git_commit,
    own_modules,
    receive,
    shortened,
    used,
    work_tree_of,
)
from compare.plan.environment import ROOT
from compare.plan.plan import Plan
from compare.plan.plan_file import plan_table
from compare.run import make_plan, parse_options
from compare.running.checks import has_horovod
from compare.running.scheduler import SIDE_FILE
from recipe.errors import UserError

SCRIPTS = ROOT / "tests/own_scripts"
STEPS = """
import time
from comparison_side import Side
side = Side({of_side})
for step in range({steps}):
    time.sleep({seconds})
    {of_step}
    side.step({done})
print("the end")
"""


def script(
    folder: Path,
    name: str,
    seconds: float = 0.002,
    steps: int = 10**9,
    done: str = "images=4",
    of_side: str = "",
    of_step: str = "",
    before: str = "",
    flags: str = "",
) -> str:
    """Write a script that does nothing for so many seconds a step; return its command."""
    text = STEPS.format(of_side=of_side, steps=steps, seconds=seconds, of_step=of_step, done=done)
    (folder / f"{name}.py").write_text(before + text)
    return f"{name}={sys.executable}{flags} {folder}/{name}.py"


def plan_of(*words: str) -> Plan:
    return make_plan(parse_options([*words], ""))


# ---------------------------------------------------------------------------------------- by hand


BY_HAND = {"PATH": os.environ["PATH"], "PYTHONPATH": str(SIDE_FILE.parent)}


def by_hand(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script without any installed package."""
    command = [sys.executable, "-S", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env=BY_HAND | environment)


def test_by_hand_nothing_happens_and_nothing_is_loaded(tmp_path):
    script(tmp_path, "mine", steps=3, seconds=0)
    code = (
        "import runpy, sys; runpy.run_path(sys.argv[1])\n"
        "print(*{n.split('.')[0] for n in sys.modules} - {*sys.stdlib_module_names})"
    )
    done = by_hand("-c", code, tmp_path / "mine.py")
    end, loaded = done.stdout.splitlines()
    assert end == "the end" and {*loaded.split()} == {"comparison_side", "__main__", "__mp_main__"}
    assert [path.name for path in SIDE_FILE.parent.glob("[!_]*")] == [SIDE_FILE.name]


def test_earlier_scripts_import_the_same_side():
    from compare import side

    assert side.Side is Side


def test_a_run_py_of_before_there_were_versions_is_told(tmp_path):
    """It would fail at the first message."""
    script(tmp_path, "mine")
    done = by_hand(tmp_path / "mine.py", COMPARE_SCHEDULER="127.0.0.1:1 00 mine 5")
    assert done.returncode == 1 and done.stdout == ""
    assert re.fullmatch(
        rf"error: {SIDE_FILE} has version {VERSION} of .* measures has 1: .*\n", done.stderr
    )


def test_a_step_says_what_it_has_done_in_one_unit():
    side = Side()
    side.step(tokens=4096)
    assert side.case == ""
    for done in ({}, {"images": 1, "tokens": 2}):
        with pytest.raises(TypeError, match=r"in one unit, as in step\(images=64\)"):
            side.step(**done)


def test_what_is_no_message_is_told_from_an_end():
    """A long command line is shortened before it is sent."""
    for sent in (b"{", b"[]", b"{}", b'{"state": "x"}', bytes(MOST_BYTES + 1), None):
        here, there = Pipe()
        with ThreadPoolExecutor(1) as pool, suppress(BrokenPipeError):
            done = pool.submit(there.send_bytes, sent) if sent else pool.submit(there.close)
            problem = {"problem": UNREADABLE} if sent else {}
            assert receive(here) == (State.ENDED, problem)
            here.close()  # of what is too long only the beginning was read
            done.result(60)
    words = ["train.py", *["word"] * 10_000]
    shown = shortened(words)
    assert len(" ".join(shown)) < MOST_BYTES / 10 and shown[0] == words[0]
    assert shown[-1] == f"... and {len(words) - len(shown) + 1} more words"
    assert shortened(words[:9]) == words[:9]


def test_the_digest_of_weights_is_that_of_what_was_trained():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).to(torch.bfloat16)
    digest = digest_of(model.state_dict())
    model(torch.ones(4, 2, dtype=torch.bfloat16))  # which changes the running statistics alone
    assert digest_of(nn.DataParallel(model).state_dict()) == digest
    assert digest_of({"a": np.ones(2)}) == digest_of({"a": torch.ones(2, dtype=torch.float64)})
    with torch.no_grad():
        model[0].bias[0] += 1
    assert digest_of(model.state_dict()) != digest
    with pytest.raises(ValueError, match="returned no weights"):
        digest_of({})


# ----------------------------------------------------------------------------------------- plans


def test_a_flag_and_a_plan_file_say_the_same(tmp_path):
    file = tmp_path / "own.toml"
    file.write_text(
        '[side.mine]\ncommand = "torchrun --nproc-per-node 2 a.py"\n'
        'environment = { OMP_NUM_THREADS = "1" }\n[side.theirs]\ncommand = "python b.py"\n'
    )
    told = plan_of(str(file))
    words = ["--side", "mine=OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 a.py"]
    words += ["--side", "theirs=python b.py"]
    assert plan_of(*words).side == told.side
    (file.parent / "plan.json").write_text(json.dumps(plan_table(told)))
    assert plan_of(str(file.parent / "plan.json")).side == told.side
    assert told.names == ["mine", "theirs"] and told.pairs() == [("mine", "theirs")]
    assert told.groups() == [("", 0)] and told.runs() == told.warm_up_runs() == []
    null = plan_of(*words, "--null", "--control", "5%")
    assert null.names == ["mine", "mine-again", "theirs", "theirs-again", "mine-delayed"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--workers", "4"], "^--workers 4: is for this project's trainers; leave it out"),
        (["--measure", "runs"], "--measure runs: is for"),
        (["--", "--arch", "resnet18"], "^-- --arch resnet18: is for this.*; write {flags} in a"),
        (["--define", "x=ddp-torchrun"], "^--define x: is for this project's trainers"),
        (["--no-phases"], "^--no-phases: is for this project's trainers"),
        (["--configurations", "ddp-torchrun"], "--configurations ddp-torchrun: there is no such"),
        (["--side", "x="], "--side x=: give the command"),
        (["--side", "a b=python x.py"], "'a b': is used as a folder's name"),
        (["--side", "torchrun b.py"], "its name is missing; write --side 'NAME=torchrun b.py'$"),
        (["--side", "torchrun -n=2 b.py"], "its name is missing; write --side 'NAME=torchrun -n=2"),
        (["--side", "x=python b.py > log"], "^--side x: >: no shell reads the command; write bash"),
        (["--side", "x=dir=d python b.py"], "there are directory, commit, python. To set a "),
        (["--side", "x=python b.py", "--goals", "x:mine=98.5"], "percentage; give x:mine=0.985$"),
        (["--case", "small=--batch-size 8"], "--case small=--batch-size 8: a script is told only"),
        ([], "--side mine: a comparison needs two --side"),
        (["--side", "mine=python b.py"], "--side mine: is given twice"),
        (["--pairs", "mine"], "--pairs mine: write FIRST:SECOND"),
    ],
)
def test_what_does_not_go_with_scripts_is_refused(words, message):
    with pytest.raises(UserError, match=message):
        plan_of("--side", "mine=python a.py", *words)


# -------------------------------------------------------------------------------------- measured


@pytest.fixture
def compare_scripts(tmp_path, monkeypatch, capsys):
    """Compares the given scripts by the command, in short blocks; returns exit code and output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("compare.running.scheduler.TURN_SECONDS", 0.02)
    monkeypatch.setattr("compare.running.scheduler.PATIENCE", 0.0)

    def compare(
        *scripts: str, blocks: int = 1, timeout: int = 60, more: tuple[str, ...] = ()
    ) -> tuple[int, str]:
        words = [word for one in scripts for word in ("--side", one)]
        words += ["--turns", "2", "--blocks", str(blocks), "--timeout", str(timeout)]
        words += ["--out", "out", *more]
        code = run_command.main(words)
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return compare


def test_two_scripts_are_compared_and_reported(compare_scripts, tmp_path, capsys):
    before = "import numpy\nweights = lambda: {'w': numpy.ones(3)}\n"
    quick = script(tmp_path, "quick", of_side="weights", before=before, done="tokens=8")
    slow = script(tmp_path, "slow", 0.02, of_side="weights", before=before, done="tokens=8")
    code, told = compare_scripts(quick, slow, blocks=3)
    assert code == 0 and "quick / slow " in told
    found = read_comparison(tmp_path / "out")
    [group] = found.groups
    assert len(group.blocks) == 3 and found.problem == ""
    assert {turn.images % 8 for block in group.blocks for turn in block.turns} == {0}
    assert report.main(["out", "--html", "page.html"]) == 0
    shown, page = capsys.readouterr().out, (tmp_path / "page.html").read_text()
    for text in (shown, page):
        assert "quick" in text and "slow" in text and "95 % interval " in text
        assert "Equal work: after the first steps both had bit-equal weights in 3 blocks." in text
        assert "tokens/s" in text and "images/s" not in text.split("Speed, by turns")[1][:200]
    for text in (f"{sys.executable} {tmp_path}/quick.py", f"SHA-256 of {tmp_path}/quick.py"):
        assert text in page.replace("<span>", "").replace("</span>", "")
    for format_ in ("--csv", "--json", "--markdown"):
        assert report.main(["out", format_]) == 0
    steps = capsys.readouterr().out.split("How to reproduce")[-1]
    assert "python TOOL/compare/run.py plan.json --out runs/again" in steps
    assert "python TOOL/compare/report.py runs/again" in steps and "make setup" not in steps
    assert compare_scripts(quick, slow, blocks=3)[0] == 0  # there is nothing left to measure
    path = tmp_path / "out/record.jsonl"
    text = path.read_text()
    path.write_text(text.replace('"disturbed_seconds": ', '"disturbed_seconds": 1', 1))
    code, told = compare_scripts(quick, slow, blocks=4)
    assert code == 2 and "line 2 was changed" in told and "above it: head -n 1 " in told
    path.write_text(text)
    (tmp_path / "slow.py").write_text("changed")
    code, told = compare_scripts(quick, slow, blocks=4)
    assert code == 2 and "scripts: {" in told


def test_equal_work_is_not_shown_without_digests_or_with_others(compare_scripts, tmp_path, capsys):
    silent = script(tmp_path, "silent")
    ones, twos = (
        script(tmp_path, name, of_side=f"lambda: {{'w': numpy.{name}(3)}}", before="import numpy\n")
        for name in ("ones", "zeros")
    )
    double = script(
        tmp_path,
        "double",
        of_side="lambda: {'w': numpy.ones(3)}",
        before="import numpy\n",
        done="images=8",
    )
    assert compare_scripts(ones, twos, silent, double)[0] == 0
    assert report.main(["out", "--no-html"]) == 0
    shown = capsys.readouterr().out
    assert (
        "not shown: after the first steps both had bit-equal weights in only 0 of 1 block" in shown
    )
    assert "Equal work is not shown: silent gave no digest of weights" in shown
    parts = "4 images in all ranks of ones, and 8 images in all ranks of double"
    assert f"Equal work is not shown: a step has {parts}." in " ".join(shown.split())


BUSY = "import time\nwhile time.process_time() < 0.1: pass\nprint(time.process_time(), flush=True)"


def test_the_cpu_time_of_what_has_ended_stays_counted():
    before = cpu_seconds()
    done = subprocess.run([sys.executable, "-c", BUSY], capture_output=True, text=True, check=True)
    assert cpu_seconds() - before >= float(done.stdout)


def test_so_does_that_of_what_a_living_process_has_started():
    """As a server that forks the workers of a DataLoader."""
    code = (
        "import subprocess, sys\n"
        f"subprocess.run([sys.executable, '-c', {BUSY!r}], stdout=1, check=True)\n"
        "input()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    before = cpu_seconds()
    with subprocess.Popen([sys.executable, "-c", code], **pipes, text=True) as server:
        spent = float(server.stdout.readline())
        wait_until(lambda: cpu_seconds() - before >= spent - 0.02)  # counted in hundredths
        server.communicate("\n")


def test_a_mapped_file_is_no_memory_of_a_side(tmp_path):
    """How much of a data set is resident says nothing about a leak."""
    size = 64 << 20
    np.zeros(size, np.uint8).tofile(tmp_path / "tokens")
    _, before = used()
    mapped = np.memmap(tmp_path / "tokens", np.uint8, "r")
    assert mapped.sum() == 0  # which reads all of it
    assert used()[1] - before < size / 4
    # Not from the C library, which may have kept so much freed memory.
    kept = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    kept.write(b"1" * size)
    assert used()[1] - before > size / 2


def test_the_agent_is_no_child_of_the_rank(compare_scripts, tmp_path):
    """A script that waits for all of its children would wait for it for ever."""
    before = "import contextlib, os, time\n"
    step = "with contextlib.suppress(ChildProcessError): os.wait()"
    one = script(tmp_path, "one", before=before, of_step=step)
    code, told = compare_scripts(one, script(tmp_path, "two"))
    assert code == 0, told


def test_a_measured_script_needs_python_alone(compare_scripts, tmp_path):
    """Its own PYTHONPATH stays, and it may have a copy of the file."""
    for folder in ("lib", "copied"):
        (tmp_path / folder).mkdir()
    (tmp_path / "lib/own.py").write_text("")
    shutil.copy(SIDE_FILE, tmp_path / "copied")
    _, _, command = script(tmp_path, "mine", before="import own\n", flags=" -S").partition("=")
    own = (f"one=PYTHONPATH=lib {command}", f"two=env PYTHONPATH=lib {command}")
    code, told = compare_scripts(*own, script(tmp_path / "copied", "copied", flags=" -S"))
    assert code == 0, told


def test_a_copy_of_another_version_is_one_sentence(compare_scripts, tmp_path):
    (tmp_path / "lib").mkdir()
    copy, own = tmp_path / "lib/comparison_side.py", f"\nVERSION = {VERSION}\n"
    assert own in SIDE_FILE.read_text()
    copy.write_text(SIDE_FILE.read_text().replace(own, f"\nVERSION = {VERSION + 1}\n"))
    good, bad = script(tmp_path, "good"), script(tmp_path / "lib", "bad")
    code, told = compare_scripts(good, bad)
    said = f"bad: {copy} has version {VERSION + 1} of .*, but this run.py has {VERSION}: .*"
    assert code == 1 and re.search(f"a block of turns failed: {said}$", told, re.MULTILINE), told
    assert "Traceback" not in told


# ---------------------------------------------------------------- which code a script has run


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=x", "-c", "user.email=x@x.invalid")
    command = ["git", "-C", str(folder), *identity, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_work_trees_of_a_repository_are_known_by_files_alone(tmp_path):
    (tmp_path / "main").mkdir()
    git(tmp_path / "main", "init", "--quiet")
    git(tmp_path / "main", "commit", "--quiet", "--allow-empty", "-m", "one")
    git(tmp_path / "main", "worktree", "add", "--quiet", "../old")
    git(tmp_path, "clone", "--quiet", "main", "main/clone")
    (tmp_path / "old/deep").mkdir()
    main, old, clone = (
        work_tree_of(str(tmp_path / name)) for name in ("main", "old/deep", "main/clone")
    )
    assert main == WorkTree(str(tmp_path / "main"), str(tmp_path / "main/.git"))
    assert old == WorkTree(str(tmp_path / "old"), main.repository)
    assert clone.root != main.root and clone.repository != main.repository
    assert work_tree_of(str(tmp_path)) is None


def test_what_is_installed_is_no_part_of_a_scripts_code():
    """Also if the environment is in the script's work tree, as .venv is here."""
    modules = own_modules(str(ROOT))
    files = {file for file in modules.values() if file.startswith(f"{ROOT}/")}
    assert {modules["recipe.errors"], modules[__name__]} <= files
    folders = {Path(file).relative_to(ROOT).parts[0] for file in files}
    assert {"compare", "recipe", "tests"} <= folders and ".venv" not in folders
    assert "torch" not in modules and "json" not in modules


@pytest.fixture
def two_commits(tmp_path):
    """A repository of a script and of a package, in two work trees; returns their commands."""
    main, commands = tmp_path / "main", {}
    (main / "src/lib").mkdir(parents=True)
    (main / "src/lib/__init__.py").touch()
    (main / "src/lib/speed.py").write_text("SECONDS = 0.002\n")
    for folder in (main, main / "src/lib"):
        script(folder, "train", before="from lib import speed\n")
    git(main, "init", "--quiet")
    git(main, "add", ".")
    for name in ("old", "new"):
        git(main, "commit", "--quiet", "--allow-empty", "-m", name)
        git(main, "worktree", "add", "--quiet", "--detach", f"../{name}")
        commands[name] = f"{sys.executable} {tmp_path}/{name}/train.py"
    return commands


def test_two_sides_that_would_run_one_commits_package_are_refused(
    two_commits, compare_scripts, tmp_path, monkeypatch
):
    """As if it was installed from there by pip install -e, or by one PYTHONPATH for both. A side's
    own PYTHONPATH may lead to a work tree that is no side's."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "new/src"))
    old, new = two_commits["old"], two_commits["new"]
    imported = f"env -C {tmp_path}/old {sys.executable} -m lib.train"
    for number, command in enumerate((old, imported)):
        out = ("--out", f"out-{number}")
        code, told = compare_scripts(f"old={command}", f"new={new}", more=out)
        assert code == 1
        assert f"failed: old imports lib from {tmp_path}/new/src, another work tree" in told
        assert f": set PYTHONPATH={tmp_path}/old/src for it, or " in told
    shared = [
        f"{name}=PYTHONPATH={tmp_path}/new/src {two_commits[name]}" for name in ("old", "new")
    ]
    code, told = compare_scripts(*shared, more=("--out", "shared"))
    assert code == 1 and "failed: old imports lib from" in told
    third = f"third=PYTHONPATH={tmp_path}/main/src {two_commits['old']}"  # of no side
    code, told = compare_scripts(third, f"new={new}", more=("--out", "asked"))
    assert code == 0, told
    monkeypatch.delenv("PYTHONPATH")
    for name in ("old", "new"):  # one script in two environments, each with its own library
        path = tmp_path / f"{name}-env/sitecustomize.py"
        path.parent.mkdir()
        path.write_text(f"import sys\nsys.path.append('{tmp_path}/{name}/src')\n")
    old, new = (f"{name}=PYTHONPATH={name}-env {new}" for name in ("old", "new"))
    code, told = compare_scripts(old, new, more=("--out", "environments"))
    assert code == 0, told


def test_two_clones_that_would_run_one_package_are_refused(
    two_commits, compare_scripts, tmp_path, monkeypatch
):
    for name in ("first", "second"):
        git(tmp_path, "clone", "--quiet", "main", name)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "first/src"))
    sides = [f"{name}={sys.executable} {name}/train.py" for name in ("first", "second")]
    code, told = compare_scripts(*sides)
    assert code == 1 and f"second imports lib from {tmp_path}/first/src, another" in told
    sides[1] = sides[1].replace("=", f"=PYTHONPATH={tmp_path}/second/src ", 1)
    code, told = compare_scripts(*sides, more=("--out", "own"))
    assert code == 0, told


def test_an_installed_package_is_not_recorded_as_the_commit(
    two_commits, compare_scripts, tmp_path, capsys
):
    """The script is started by its module's name, in a work tree that it does not come from."""
    (tmp_path / "site-packages").mkdir()
    shutil.copytree(tmp_path / "main/src/lib", tmp_path / "site-packages/lib")
    sides = [
        f"{name}=PYTHONPATH={tmp_path}/site-packages env -C {tmp_path}/{name} {sys.executable} "
        "-m lib.train"
        for name in two_commits
    ]
    code, told = compare_scripts(*sides)
    assert code == 0, told
    found = [side.environment for side in read_comparison(tmp_path / "out").sides]
    assert {(one.git_commit, one.code_sha256) for one in found} == {(None, None)}
    assert report.main(["out"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "no module of old came from its work tree" in shown


def test_a_file_that_git_does_not_track_is_a_change(two_commits, tmp_path):
    root = tmp_path / "new"
    commit = git(root, "rev-parse", "--short=12", "HEAD")
    (root / "own.py").touch()
    assert git_commit(str(root), [str(root / "train.py")]) == commit
    assert git_commit(str(root), [str(root / "train.py"), str(root / "own.py")]) == f"{commit}+"


def test_the_record_tells_the_code_of_each_side(two_commits, compare_scripts, tmp_path, capsys):
    sides = [f"{n}=PYTHONPATH={tmp_path}/{n}/src {command}" for n, command in two_commits.items()]
    (tmp_path / "new/README").write_text("not yet committed")
    git(tmp_path / "new", "add", "README")
    assert compare_scripts(*sides)[0] == 0
    sides_there = read_comparison(tmp_path / "out").sides
    found = {side.configuration: side.environment for side in sides_there}
    for name, environment in found.items():
        commit = git(tmp_path / name, "rev-parse", "--short=12", "HEAD")
        assert environment.git_commit == commit + {"old": "", "new": "+"}[name]
        assert environment.interpreter == sys.executable
        path = tmp_path / name / "train.py"
        assert environment.script == str(path)
        assert environment.script_sha256 == sha256(path.read_bytes()).hexdigest()
    assert found["old"].code_sha256 == found["new"].code_sha256
    assert report.main(["out"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "old and new ran the same code, though their commits differ" in shown
    differ = shown.partition("They differ in ")[2].partition(". ")[0]
    assert differ.startswith("git_commit: ") and "script" not in differ
    (tmp_path / "new/src/lib/speed.py").write_text("SECONDS = 0.003\n")
    assert compare_scripts(*sides, blocks=3)[0] == 0
    assert report.main(["out"]) == 0
    shown = capsys.readouterr().out
    assert "No verdict on old and new" in shown and "code_sha256 changed between blocks: " in shown
    assert "ran the same code" not in shown


def test_this_project_installed_from_one_checkout_is_not_another(compare_scripts, tmp_path):
    """pip install -e has put it into the environment of these tests."""
    try:
        git(ROOT, "worktree", "add", "--quiet", "--detach", str(tmp_path / "old"))
    except (OSError, subprocess.CalledProcessError):
        pytest.skip(needs.GIT)
    try:
        here, old = (
            script(folder, name, before="import recipe.errors\n")
            for folder, name in ((tmp_path, "here"), (tmp_path / "old/tests", "old"))
        )
        code, told = compare_scripts(here, old)
        assert code == 1 and f"old imports recipe from {ROOT}, another work tree than its" in told
        name, _, command = old.partition("=")
        old = f"{name}=PYTHONPATH={tmp_path}/old {command}"
        code, told = compare_scripts(here, old, more=("--out", "asked"))
        assert code == 0, told
    finally:
        git(ROOT, "worktree", "remove", "--force", str(tmp_path / "old"))


# --------------------------------------------------------------------------------------- mistakes


FORKS = """
import os
if os.fork() and os.fork():
    os.wait()
    os._exit(0)
"""


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (
            {"steps": 12},
            r"bad ended with exit code 0 after at least \d+ steps: it must train until run.py",
        ),
        ({"done": "tokens=3"}, "the sides count different things: .*bad tokens"),
        ({"done": "images=0"}, "bad: its steps did 0 images"),
        ({"before": "exit('alas')\n"}, r"bad ended with exit code 1:\n  \| alas"),
        (
            {"before": "exit()\n"},
            r"bad ended .* 0: no rank has made a Side\(\); each rank must make",
        ),
        (
            {"steps": 0},
            r"bad ended .* 0: it has not called step; each rank must call side.step\(\) after",
        ),
        ({"before": FORKS}, "bad: 2 of its processes take part, but its launcher's .* say 1"),
        (
            {"before": "import sys\nsys.path[:] = []\nimport time\n"},
            "bad ended .* replaces the PYTHONPATH that run.py sets: add ",
        ),
        (
            {"before": "from compare.side import Side\n", "flags": " -S"},
            "bad ended .*write `from comparison_side import Side`",
        ),
    ],
)
def test_a_mistake_is_one_message_that_names_the_side(second, message, compare_scripts, tmp_path):
    good, bad = script(tmp_path, "good"), script(tmp_path, "bad", **second)
    code, told = compare_scripts(good, bad)
    assert code == 1 and re.search(f"a block of turns failed: {message}", told, re.DOTALL), told
    assert "report.py" not in told


# Starts itself as two ranks, as a launcher does.
PAIR = """
import os, signal, subprocess, sys, time
if "RANK" not in os.environ:
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen([sys.executable, *sys.argv], env=os.environ | place | own)
        for own in ({"RANK": "0", "LOCAL_RANK": "0"}, {"RANK": "1", "LOCAL_RANK": "1"})
    ]
    sys.exit(max(rank.wait() for rank in ranks))
IS_FIRST = os.environ["RANK"] == "0"
"""
WAITS = "\nif not IS_FIRST:\n    {first}\n    time.sleep(600)\n"
NO_STEP = WAITS.format(first="from comparison_side import Side; side = Side()")


@pytest.mark.parametrize(
    ("bad", "timeout", "messages"),
    [
        # Where waiting cannot help it ends at once; another side has nothing to do with it.
        (
            {"before": PAIR + NO_STEP},
            60,
            ["bad: after 3 s rank 1 has not called step, rank 0 has; each rank must call"],
        ),
        (
            {"before": PAIR + WAITS.format(first="")},
            60,
            ["after 3 s rank 1 has not made a Side\\(\\), rank 0 has; .* use Side\\(ranks=N\\)"],
        ),
        # A slow start is no mistake.
        ({"before": "import time\ntime.sleep(3)\n"}, 60, []),
        # Else a line says what it waits for; at the end of the time the guilty side alone is named.
        (
            {"before": "import time\ntime.sleep(600)\n"},
            4,
            [
                "waiting for bad .2 s.: no rank has made a Side",
                "bad: after 4 s .--timeout. no rank",
            ],
        ),
        (
            {"seconds": 600},
            4,
            ["waiting for bad .2 s.: it has not called step", "bad: after 4 s .--timeout. it has"],
        ),
        (
            {"of_step": "if step == 20: time.sleep(600)"},
            4,
            [
                "waiting for bad .2 s.: it has not ended its turn",
                "bad: after 4 s .--timeout. it has",
            ],
        ),
        # Whatever ends a rank.
        (
            {"of_step": "if step == 20: os.kill(os.getpid(), signal.SIGKILL)"},
            60,
            ["bad was ended by signal 9 .Killed.:"],
        ),
        (
            {"of_step": "if step == 20: os.kill(os.getpid(), signal.SIGSTOP)"},
            4,
            ["waiting for bad .2 s.: it has not ended its turn"],
        ),
        (
            {"of_step": "if step == 20 and os.fork(): time.sleep(2)"},  # until the fork has spoken
            60,
            ["bad: rank 0 on .*in a fork of the process"],
        ),
        ({"of_step": "if step == 20: os.closerange(3, 99)"}, 60, ["bad.*error: its Side is gone"]),
        (
            {"of_step": "if step == 20: del side; time.sleep(600)"}
            | {"before": "import comparison_side, time\ncomparison_side.CLOSED_SECONDS = 1\n"},
            60,
            ["bad: rank 0 on .*: its Side is gone"],
        ),
        # Its training has ended: it evaluates, and ends as usual.
        (
            {"of_step": "if step == 20: del side; time.sleep(4); sys.exit()"}
            | {"before": "import sys, time\n"},
            60,
            ["bad ended with exit code 0 after at least"],
        ),
    ],
)
def test_a_side_that_misbehaves_is_named_and_nothing_hangs(
    bad, timeout, messages, compare_scripts, tmp_path, monkeypatch
):
    monkeypatch.setattr("compare.running.scheduler.SILENT_SECONDS", 2.0)
    monkeypatch.setattr("compare.running.scheduler.HOPELESS_SECONDS", 3.0)
    bad = script(tmp_path, "bad", **{"before": "import os, signal, time\n"} | bad)
    code, told = compare_scripts(
        script(tmp_path, "good"), bad, more=("--order-seed", "1"), timeout=timeout
    )
    assert code == bool(messages), told
    assert all(re.search(message, told, re.DOTALL) for message in messages), told
    assert "good: " not in told


OUTLIVES = """
import os, subprocess, sys, time
if "INNER" not in os.environ:
    subprocess.run([sys.executable, *sys.argv], env=os.environ | {"INNER": "1"})
    time.sleep(600)
"""


def test_a_launcher_that_outlives_its_rank_is_told(compare_scripts, tmp_path, monkeypatch):
    monkeypatch.setattr("compare.running.scheduler.END_SECONDS", 1.0)
    bad = script(tmp_path, "bad", before=OUTLIVES, steps=12)
    code, told = compare_scripts(script(tmp_path, "good"), bad)
    assert code == 1 and re.search(r"bad: rank 0 on \S+ ended, but its launcher did not", told), (
        told
    )
    assert "more epochs" not in told


def test_memory_that_grows_and_new_memory_in_each_step_are_lines(compare_scripts, tmp_path, capsys):
    kept = {"before": "import time\nkept = []\n", "of_step": "kept.append(b'x' * 2**20)"}
    sides = [script(tmp_path, "tight"), script(tmp_path, "leaks", **kept)]
    assert compare_scripts(*sides, blocks=3, more=("--turns", "5"))[0] == 0
    assert report.main(["out", "--no-html"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    told = re.search(
        r"the memory of leaks grew by (\d+) MB in 100 steps, in each of 3 blocks", shown
    )
    assert told and 90 < int(told[1]) < 120, shown
    pages = re.search(r"each rank of leaks takes (\d+) pages from the system in each step", shown)
    assert pages and 250 < int(pages[1]) < 400, shown  # of 4 KiB
    assert "the memory of tight" not in shown and "of tight takes" not in shown
    assert " memory, " in shown.partition("----")[0]  # the head of the table of speeds


def test_a_script_that_starts_its_own_ranks_says_how_many(compare_scripts, tmp_path):
    pair = script(tmp_path, "pair", before=FORKS, of_side="ranks=2")
    code, told = compare_scripts(script(tmp_path, "one"), pair)
    assert code == 0, told
    found = read_comparison(tmp_path / "out")
    assert [
        side.environment.world_size for side in found.sides if side.configuration == "pair"
    ] == [2]


# --------------------------------------------------------------------------------- real launchers


@pytest.mark.launch
def test_examples_of_ddp_and_of_horovod_are_compared(tmp_path):
    """The scripts do equal work, bit by bit: on two ranks a mean does not depend on the order."""
    if not has_horovod():
        pytest.skip(needs.HOROVOD)
    sides = {
        "mine": f"torchrun --nproc-per-node 2 {SCRIPTS}/ddp_example.py",
        "theirs": f"horovodrun --mpi -np 2 {sys.executable} {SCRIPTS}/horovod_example.py",
    }
    words = [word for side in sides.items() for word in ("--side", "=".join(side))]
    out = str(tmp_path / "out")
    run([sys.executable, "compare/run.py", *words, "--blocks", "1", "--out", out], 1700).checked()
    told = run([sys.executable, "compare/report.py", out]).checked().output
    page = (tmp_path / "out/report.html").read_text()
    for text in (told, page):
        assert "Equal work: after the first steps both had bit-equal weights in 1 block." in text
        assert "Nothing is decided between mine and theirs: an interval needs 3 blocks (" in text


@pytest.mark.launch
def test_an_example_trains_by_hand_as_well():
    path = {"PYTHONPATH": str(SIDE_FILE.parent)}
    finished = launch("torchrun", f"{SCRIPTS}/ddp_example.py", "--epochs 1", warm=True, **path)
    assert "trained for 1 epochs" in finished.checked().output
