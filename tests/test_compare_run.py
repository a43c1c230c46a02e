"""Running a comparison, with a made-up launcher in the place of torchrun and horovodrun."""

import contextlib
import io
import json
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from launching import marked, rarely, wait_until
from records import a_summary, an_environment, lines_of

from compare import run
from compare.evidence.record import Record
from compare.page.report import Report
from compare.plan import launchers, plan_file
from compare.plan.environment import REMOVED_VARIABLES
from compare.plan.launchers import START_COMMANDS, StartCommand
from compare.plan.plan import Plan
from compare.run import main
from compare.running import checks, comparison, launch
from compare.running.comparison import show_outcome
from compare.running.launch import last_step

ROOT = Path(__file__).resolve().parent.parent

# Stands for launcher and trainer at once. It notes each start; what it does then is told by flags
# behind the `--`: one run fails, hangs, ends without a summary or leaves a process behind.
LAUNCHER = """
import json, os, random, signal, subprocess, sys, time
from pathlib import Path
from typing import Any
words = sys.argv[1:]
value = lambda flag: words[words.index(flag) + 1] if flag in words else None
folder = Path(value("--log-dir")) / value("--name")
parts = folder.parts  # from the block on: block-1/case/configuration-workers
run = "/".join(parts[next(i for i, part in enumerate(parts)
                          if part.startswith(("block-", "phases", "warm-up"))):])
with open(os.environ["STARTS"], "a") as starts:
    starts.write(f"{run} {value('--seed')} {os.environ.get('OMP_NUM_THREADS')} "
                 f"{os.environ.get('HOROVOD_CYCLE_TIME')} {' '.join(words)}\\n")
folder.mkdir(exist_ok=True, parents=True)
line = json.dumps({"kind": "step", "step": 7, "images_per_second": 4321.0}) + "\\n"
if value("--leave") == run:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"],
                     start_new_session=True)
if value("--hang") == run:
    # As horovodrun on Gloo does it: a worker in a session of its own; neither heeds SIGTERM.
    program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    subprocess.Popen([sys.executable, "-c", program + "time.sleep(3600)"], start_new_session=True)
    if value("--stubborn"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (folder / "hangs").touch()
    time.sleep(3600)
print("line before the end")
if value("--fail") == run:
    sys.exit("the gradients went away")
if value("--empty") == run:
    sys.exit(0)
if value("--slow") == run:
    (folder / "metrics.jsonl").write_text(line * 3)
    time.sleep(2)
speed = None if value("--speedless") == run else 1234.5
if "--spread" in words:  # the speeds of the blocks differ
    random.seed(run)
    speed *= random.uniform(0.5, 2)
(folder / "metrics.jsonl").write_text(line * 10)
workers, own = int(value("--name").rpartition("-")[2]), {"batch_size": 32}
sizes = {**own, "world_size": workers, "batches_per_allreduce": 1}
summary = {"steps": 7, "samples_seen": 7 * 32 * workers, "fingerprint": sizes}
(folder / "config.json").write_text(json.dumps({**own, "log_dir": "", "name": None}))
(folder / "environment.json").write_text(json.dumps({**ENVIRONMENT, "world_size": workers}))
(folder / "summary.json").write_text(
    json.dumps({**SUMMARY, **summary, "images_per_second": speed}))
"""

DRIVER = """
import sys
from compare import run
from compare.running import checks, comparison, launch
from compare.plan import launchers, plan_file
made_up = launchers.StartCommand(lambda *_: [sys.executable, {launcher!r}], comes_with="")
launchers.START_COMMANDS = dict.fromkeys(launchers.START_COMMANDS, made_up)
checks.has_horovod = lambda: "--without-horovod" not in sys.argv  # a flag of the made-up trainer
run.take_default_plan = lambda options: None
run.check_tools = run.check_trainers = lambda plan: None  # nor are the made-up flags theirs
run.peak_rates = lambda plan: []
run.checks.find_warnings = lambda plan, folder: (
    ["other load: a compiler"] if "--loaded" in sys.argv else []
)
launch.GRACE_SECONDS = 1.0
# Not the real digest: somebody may be at work on the trainers while the tests run.
digests = iter("aab" if "--sources-change" in sys.argv else "a" * 99)
plan_file.trainers_sha256 = lambda: "a"
comparison.sources_sha256 = lambda plan: next(digests)
sys.exit(run.main(sys.argv[1:]))
"""


# What the driver replaces, to be put back where it runs in this process.
REPLACED = [
    (launchers, "START_COMMANDS"),
    (checks, "has_horovod"),
    (launch, "GRACE_SECONDS"),
    *((run, name) for name in ("take_default_plan", "check_tools", "check_trainers", "peak_rates")),
    (plan_file, "trainers_sha256"),
    (comparison, "sources_sha256"),
    (checks, "find_warnings"),
]


class Comparing:
    """A folder, where this process is, in which run.py can be started with the made-up launcher."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.folder, self.monkeypatch = folder, monkeypatch
        records = {"SUMMARY": a_summary(), "ENVIRONMENT": an_environment()}
        told = "".join(f"{name} = {asdict(record)!r}\n" for name, record in records.items())
        (folder / "launcher.py").write_text(told + LAUNCHER)
        (folder / "driver.py").write_text(DRIVER.format(launcher=str(folder / "launcher.py")))
        self.starts_file = folder / "starts.txt"
        self.starts_file.touch()
        os.environ["STARTS"] = os.environ["LAUNCH_MARK"] = str(self.starts_file)
        os.environ["OMP_NUM_THREADS"] = "7"
        monkeypatch.chdir(folder)
        for owner, name in REPLACED:
            monkeypatch.setattr(owner, name, getattr(owner, name))

    def start(self, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "driver.py", "--measure", "runs", *words]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen(command, **pipes, text=True)

    def run(self, *words: str, code: int = 0) -> str:
        """In this process, which has imported all of it, to end with this exit code; its output."""
        self.monkeypatch.setattr(sys, "argv", ["driver.py", "--measure", "runs", *words])
        with (
            contextlib.redirect_stdout(io.StringIO()) as output,
            contextlib.redirect_stderr(output),
            pytest.raises(SystemExit) as ended,
        ):
            runpy.run_path("driver.py")
        assert ended.value.code == code, output.getvalue()
        return output.getvalue()

    def starts(self) -> list[str]:
        """A line for each start of the launcher: run, seed, two variables, and its words."""
        return self.starts_file.read_text().splitlines()

    def names(self) -> list[str]:
        """The runs that were started."""
        return [line.split()[0] for line in self.starts()]

    def processes(self) -> list[psutil.Process]:
        """All processes that come from here and are still there."""
        return marked(str(self.starts_file))

    def wait_for(self, path: str) -> None:
        wait_until(lambda: list(self.folder.glob(path)))

    def plan(self, folder: str = "out") -> dict[str, Any]:
        """The last plan in the record there."""
        lines = lines_of(self.folder / folder)
        return next(line["plan"] for line in reversed(lines) if line["line"] == "plan")


@pytest.fixture
def comparing(tmp_path, monkeypatch):
    comparing = Comparing(tmp_path, monkeypatch)
    yield comparing
    # The watchdog of a run that was interrupted may need a moment to see that nothing is left.
    _, left = psutil.wait_procs(comparing.processes(), timeout=60)
    for process in left:
        process.kill()
    assert not left, f"left behind: {left}"


SMALL = (
    "--blocks",
    "2",
    "--workers",
    "1",
    "--no-warm-up",
    "--out",
    "out",
)  # four runs


def test_every_run_is_made_once_in_blocks_and_said(comparing):
    words = ("--workers", "1", "2", "--blocks", "3", "--no-warm-up")
    output = comparing.run(*words)
    cells = [f"{name}-{n}" for name in ("ddp-torchrun", "horovod-mpi") for n in (1, 2)]
    assert sorted(comparing.names()) == [f"block-{n}/{cell}" for n in (1, 2, 3) for cell in cells]
    blocks = [name[:7] for name in comparing.names()]
    assert blocks == sorted(blocks)
    (folder,) = comparing.folder.glob("runs/compare-*")
    assert f"compare/report.py {folder.relative_to(comparing.folder)}" in output
    run = folder / "block-1/horovod-mpi-2"
    assert {path.name for path in run.iterdir()} >= {"output.log", "command.txt"}
    assert (run / "output.log").read_text() == "line before the end\n"
    assert re.search(r"^\[ 1/12\] block 1.* 1,23.* left", output, re.MULTILINE)
    assert "[12/12] block 3" in output


def test_blocks_have_their_seed_and_what_is_done_is_not_run_again(comparing):
    os.environ |= {"MALLOC_ARENA_MAX": "2", "NCCL_DEBUG": "WARN", "HOME_SWEET": "1"}
    comparing.run(*SMALL)
    environment = comparing.plan()["environment"]
    assert environment["inherited"].items() >= {("MALLOC_ARENA_MAX", "2"), ("NCCL_DEBUG", "WARN")}
    assert "HOME_SWEET" not in environment["inherited"]
    assert environment["removed"] == list(REMOVED_VARIABLES)
    assert environment["affinity"] == sorted(os.sched_getaffinity(0))
    words = [line.split() for line in comparing.starts()]
    seeds = {(name.split("/")[0], seed, threads) for name, seed, threads, *_ in words}
    assert seeds == {("block-1", "42", "None"), ("block-2", "43", "None")}  # none of the shell's
    assert "4 of them there already" in comparing.run(*SMALL)
    assert len(comparing.starts()) == 4
    comparing.run(*SMALL, "--blocks", "3")
    assert len(comparing.starts()) == len(set(comparing.starts())) == 6
    assert comparing.plan()["blocks"] == 3
    comparing.run(*SMALL[:-1], "own", "--", "--seed", "7")
    assert {line.split()[1] for line in comparing.starts()[6:]} == {"7"}


@pytest.mark.parametrize(
    ("words", "place", "number"),
    [
        (["--blocks", "2"], "block-2/ddp-torchrun-1", signal.SIGINT),
        (["--blocks", "1"], "block-1/horovod-mpi-1", signal.SIGTERM),
        (
            ["--blocks", "2", "--case", "a=--x 1", "--case", "b=--x 2"],
            "block-2/b/horovod-mpi-1",
            signal.SIGINT,
        ),
    ],
)
@pytest.mark.parametrize("stubborn", [["--stubborn", "yes"], rarely([])])
def test_an_interruption_leaves_no_process_and_the_same_command_goes_on(
    comparing, words, place, number, stubborn
):
    trainer = ["--hang", place, *stubborn]
    command = ["--workers", "1", "--no-warm-up", *words, "--", *trainer]
    process = comparing.start(*command)
    comparing.wait_for(f"runs/*/{place}/hangs")
    process.send_signal(number)
    output, _ = process.communicate()
    assert process.returncode == 130 and "Traceback" not in output
    assert not comparing.processes()
    before = comparing.names()
    shown = next(line for line in output.splitlines() if "--out runs/compare-" in line)
    assert shlex.split(shown)[-len(trainer) :] == trainer
    (folder,) = comparing.folder.glob("runs/compare-*")
    assert place not in {line.get("place") for line in lines_of(folder)}
    # The run would hang again: that it is started at all, and the others are not, is the point.
    process = comparing.start(*command)
    wait_until(lambda: len(comparing.starts()) > len(before))
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert comparing.names() == [*before, place]
    assert len(list(comparing.folder.glob("runs/compare-*"))) == 1


@pytest.mark.parametrize(
    ("words", "ended", "said"),
    [
        (["--", "--empty"], 1, "exit code 0, but no summary.json"),
        (["--timeout", "1", "--", "--stubborn", "yes", "--hang"], 1, "TIMED OUT after"),
        (["--timeout", "1", "--", "--hang"], 1, "(at step 0: give a larger --timeout)"),
        (["--", "--leave"], 0, "killed leftover processes: 1"),
    ],
)
def test_how_a_run_ended_is_said_and_nothing_of_it_is_left(comparing, words, ended, said):
    run = "block-1/horovod-mpi-1"
    assert said in comparing.run(*SMALL, *words, run, code=ended)
    assert len(comparing.starts()) == 4 and not comparing.processes()
    [outcome] = [
        line["outcome"] for line in lines_of(comparing.folder / "out") if line.get("place") == run
    ]
    assert (outcome["other_load"] is None) == bool(outcome["leftover_processes"])


def test_a_killed_run_py_takes_its_run_with_it(comparing):
    """By kill -9, so that run.py can do nothing: not even stubborn workers outlive it."""
    process = comparing.start(*SMALL, "--", "--hang", "block-1/ddp-torchrun-1", "--stubborn", "yes")
    comparing.wait_for("out/block-1/ddp-torchrun-1/hangs")
    assert len(comparing.processes()) == 4  # run.py, its watchdog, launcher, worker
    process.kill()
    process.communicate()
    wait_until(lambda: not comparing.processes())
    comparing.run(*SMALL, "--new", "--out", "other")  # and the lock is free


def test_another_plan_starts_afresh(comparing):
    words = ["--blocks", "1", "--workers", "1", "--no-warm-up"]
    comparing.run(*words, "--", "--fail", "block-1/ddp-torchrun-1", code=1)
    for number in (2, 3):  # other flags for the trainers; and that one is complete then
        comparing.run(*words)
        assert len(list(comparing.folder.glob("runs/compare-*"))) == number
    assert len(comparing.starts()) == 6


def test_a_failed_run_is_kept_shown_and_tried_again(comparing):
    place, runs, failed = "block-1/horovod-mpi-1", 4, "1 of 4 runs failed"
    command = [*SMALL, "--", "--fail", place]
    output = comparing.run(*command, code=1)
    for said in ("FAILED after", "(exit code 1)", "| the gradients went away", failed):
        assert said in output
    assert len(comparing.starts()) == runs  # the others were run
    comparing.run(*command, code=1)
    assert comparing.names()[runs:] == [place]
    log = comparing.folder / f"out/{place}.failed-1/output.log"
    assert "the gradients went away" in log.read_text()


def test_a_run_that_cannot_be_used_is_not_made_again_and_the_command_ends(comparing):
    command = [*SMALL, "--", "--speedless", "block-1/horovod-mpi-1"]
    for _ in range(2):
        assert "1 of 4 runs failed" in comparing.run(*command, code=1)
        assert len(comparing.starts()) == 4


@pytest.mark.parametrize("mark", ["", "[rank 1 on node1] ", "[1,0]<stderr>:"])
def test_what_a_trainer_said_is_not_hidden_by_its_launcher(mark, tmp_path):
    log = tmp_path / "output.log"
    log.write_text(f"{mark}error: --data /x: is not there\n" + "mpirun: boilerplate\n" * 30)
    first, second, *others = launch.shown_tail(tmp_path).splitlines()
    assert first.endswith(f"| {mark}error: --data /x: is not there") and second.endswith("| ...")
    assert len(others) == launch.TAIL_LINES + 1 and others[-1].endswith(str(log))
    log.write_text(f"{mark}error: --data /x: is not there\n")
    assert launch.shown_tail(tmp_path).count("error:") == 1


@pytest.mark.parametrize(
    ("script", "code", "words"),
    [
        ("run.py", 1, "is not of this project's environment: activate that (`. "),
        ("report.py", 1, "compare/report.py: this needs "),
        ("report.py --check", 3, "Gate: not judged: this needs "),
    ],
)
def test_another_environment_is_one_sentence(script, code, words, tmp_path):
    python = [sys.executable, "-S", "-I"]  # without any installed package
    name, *flags = script.split()
    command = [*python, str(ROOT / "compare" / name), *flags]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    [line] = ended.stderr.splitlines()
    assert ended.returncode == code and words in line and f"{ROOT}/.venv/bin/python" in line


@pytest.mark.parametrize("script", ["nosuch.py", "-m nosuch"])
def test_that_python_finds_no_script_is_not_hidden_by_a_launcher(script, tmp_path):
    command = f"{sys.executable} {script}; seq -f 'torchrun: line %g' 30"
    log = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=tmp_path)
    (tmp_path / "output.log").write_text(log.stderr + log.stdout)
    first, second, *_ = launch.shown_tail(tmp_path).splitlines()
    assert "nosuch" in first and second.endswith("| ...")


def test_a_time_limit_before_the_training_asks_for_the_network_only_where_there_is_one(
    tmp_path, capsys
):
    outcome, here = launch.Outcome("timed out", -15, seconds=9.0), Plan().runs()[0]
    (tmp_path / "output.log").touch()
    show_outcome("a run", here, tmp_path, outcome, None)
    show_outcome("a run", replace(here, hosts="elsewhere:2"), tmp_path, outcome, None)
    (tmp_path / "metrics.jsonl").write_text('{"kind": "step", "step": 1200}\n')
    show_outcome("a run", here, tmp_path, outcome, None)
    alone, over_hosts, late = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("a run")
    ]
    assert alone == "a run   TIMED OUT after 9 s (at step 0: give a larger --timeout)"
    assert "or do its workers reach each other? `python compare/doctor" in over_hosts
    assert "(at step 1,200: give a larger --timeout" in late


def test_the_warm_up_is_one_run_an_engine_thrown_away_and_a_failed_one_ends_all(comparing):
    output = comparing.run("--blocks", "1", "--out", "out")
    assert comparing.names()[:2] == ["warm-up/ddp-torchrun-2", "warm-up/horovod-mpi-2"]
    assert output.count("thrown away") == 2 and len(comparing.starts()) == 4
    output = comparing.run("--out", "other", "--", "--fail", "warm-up/horovod-mpi-2", code=1)
    assert len(comparing.starts()) == 6
    assert "the gradients went away" in output and "nothing was measured" in output


def test_two_do_not_write_to_one_comparison(comparing):
    words = (*SMALL, "--", "--hang", "block-1/ddp-torchrun-1")
    first = comparing.start(*words)
    comparing.wait_for("out/block-1/ddp-torchrun-1/hangs")
    assert "out is being written by another run.py" in comparing.run(*words, code=2)
    first.send_signal(signal.SIGINT)
    first.communicate()


def test_a_folder_that_is_used_is_refused_with_what_is_in_it(comparing):
    comparing.run(*SMALL)
    (comparing.folder / "photos").mkdir()
    (comparing.folder / "photos/1.jpg").touch()
    for words, said in (
        (["--new"], "--new: out holds a comparison already"),
        (["--new", "--workers", "2"], "--new: out holds a comparison already"),
        (["--seed", "43"], "seed: 42 there, 43 now"),
        (["--case", "small=--arch alexnet"], "case: "),
        (["--out", "photos"], "holds no comparison"),
        (["--out", "photos/1.jpg"], "run.py: photos/1.jpg: cannot be written (File exists). Start"),
    ):
        assert said in comparing.run(*SMALL, *words, code=2)
    os.environ["HOROVOD_CYCLE_TIME"] = "5"
    assert "HOROVOD_CYCLE_TIME" in comparing.run(*SMALL, code=2)
    assert len(comparing.starts()) == 4


def test_sources_that_change_meanwhile_end_the_comparison(comparing):
    assert "have changed since" in comparing.run(*SMALL, "--", "--sources-change", code=2)
    assert len(comparing.starts()) == 2  # the digest is asked for before each run


def test_dry_run_prints_commands_only_and_they_can_be_pasted(comparing):
    output = comparing.run("--dry-run", "--blocks", "2", "--", "--leave", "it's nothing")
    assert not comparing.starts() and not (comparing.folder / "runs").exists()
    lines = output.splitlines()
    assert lines[0] == f"unset {' '.join(REMOVED_VARIABLES)}"
    commands = [line for line in lines if not line.startswith(("unset ", "export "))]
    assert len(commands) == 2 + 4
    subprocess.run(["sh", "-e"], input=output, text=True, check=True)
    assert len(comparing.starts()) == 6
    assert len(list(comparing.folder.glob("runs/compare-*/block-2/*/summary.json"))) == 2


MPIRUN = "mpirun -np 2 -H localhost:2 --bind-to none --mca pml ob1 --mca btl '^openib' python"


def test_the_commands_are_those_that_a_person_would_type(monkeypatch):
    monkeypatch.chdir(ROOT)
    begins = {
        "ddp-torchrun": "torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 2 "
        "ddp_train/train.py",
        "ddp-mpirun": f"{MPIRUN} ddp_train/train.py",
        "horovod-mpi": "horovodrun --mpi -np 2 python horovod_train/train.py",
        "horovod-gloo": "horovodrun --gloo -np 2 python horovod_train/train.py",
        "horovod-mpirun": f"{MPIRUN} horovod_train/train.py",
    }
    plan = Plan(
        configurations=tuple(begins), workers=(2,), blocks=1, trainer_arguments=("--epochs", "1")
    )
    assert {shlex.join(run.command(Path("logs"))) for run in plan.runs()} == {
        f"{begin} --log-dir logs --name {name}-2 --seed 42 --epochs 1"
        for name, begin in begins.items()
    }


def test_without_horovod_the_command_that_builds_it_is_said(monkeypatch, capsys):
    monkeypatch.setattr(checks, "has_horovod", lambda: False)
    for words in (
        ["--configurations", "ddp-torchrun", "horovod-mpi"],
        ["--define", "x=horovod-mpi"],
    ):
        assert main(["--dry-run", *words]) == 2
        told = capsys.readouterr()
        assert told.out == "" and "python horovod_train/build_horovod.py" in told.err
    if (Path(sys.executable).parent / "torchrun").exists():
        assert main(["--dry-run", "--configurations", "ddp-torchrun"]) == 0


def test_without_horovod_the_rest_of_the_default_runs_and_says_so(comparing):
    output = comparing.run(*SMALL, "--", "--without-horovod", "yes")
    assert {*comparing.names()} == {"block-1/ddp-torchrun-1", "block-2/ddp-torchrun-1"}
    assert "Left out: horovod-mpi. The comparison goes on without" in output
    assert comparing.plan()["left_out"] == ["horovod-mpi"]
    failing = ("--", "--without-horovod", "yes", "--fail", "block-1/ddp-torchrun-1")
    comparing.run(*SMALL, "--new", "--out", "other", *failing, code=1)


def test_help_loads_no_torch():
    ended = subprocess.run(
        [sys.executable, "-X", "importtime", str(ROOT / "compare/run.py"), "--help"],
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0 and "--configurations" in ended.stdout
    assert " torch\n" not in ended.stderr


def test_cases_are_run_side_by_side_each_in_a_folder_of_its_own(comparing):
    output = comparing.run(
        *SMALL, "--case", "small=--arch resnet18", "--case", "large=--arch vgg16 --batch-size 4"
    )
    assert len(comparing.starts()) == len(set(comparing.starts())) == 8
    for line in comparing.starts():
        assert ("--arch vgg16 --batch-size 4" in line) == ("/large/" in line.split()[0])
    assert "block 1  large/ddp-torchrun-1 " in output and "block 1  small/horovod-mpi-1" in output


def test_a_configurations_own_variables_and_flags_reach_its_runs_alone(comparing):
    own = "tuned=horovod-mpi HOROVOD_CYCLE_TIME=2.5 --fp16-allreduce"
    comparing.run(*SMALL, "--define", own)
    assert len(comparing.starts()) == 6
    for line in comparing.starts():
        is_own = "/tuned-1 " in line
        assert line.split()[3] == ("2.5" if is_own else "None")
        assert ("--fp16-allreduce" in line) == is_own
    command = (comparing.folder / "out/block-1/tuned-1/command.txt").read_text()
    assert command.startswith("env HOROVOD_CYCLE_TIME=2.5 ")


UNTIL = ("--workers", "1", "--no-warm-up", "--out", "out", "--until-interval")


def test_blocks_end_when_the_minutes_are_over_and_more_blocks_go_on(comparing):
    output = comparing.run(*UNTIL, "1%", "--minutes", "0.001", "--", "--spread", "yes")
    assert "as another would exceed --minutes 0.001" in output
    assert "the widest interval is +-" in output and len(comparing.starts()) == 6
    comparing.run(*UNTIL[:-1], "--blocks", "4", "--", "--spread", "yes")
    assert Record.open(comparing.folder / "out").extensions == 1
    assert comparing.plan()["blocks"] == 4 and len(comparing.starts()) == 8
    _, command = Report(Record.open(Path("out"))).next_step
    python, script, *words = shlex.split(command)
    assert (python, Path(script)) == ("python", ROOT / "compare/run.py")
    comparing.run(*words)  # what the report ends with extends this very comparison
    assert Record.open(comparing.folder / "out").extensions == 2
    assert comparing.plan()["blocks"] == int(words[-1]) > 4
    failing = ("--spread", "yes", "--fail", "block-2/horovod-mpi-1")
    output = comparing.run(*UNTIL, "1%", "--out", "failing", "--", *failing, code=1)
    assert "1 of 4 runs failed" in output
    assert Record.open(comparing.folder / "failing").plan.blocks_there == 2


def test_an_empty_record_is_no_comparison(comparing):
    """As a full disk leaves it."""
    (comparing.folder / "runs/compare-20260101-000000").mkdir(parents=True)
    (comparing.folder / "runs/compare-20260101-000000/record.jsonl").touch()
    words = [word for word in SMALL if word not in ("--out", "out")]
    assert "4 runs, 0 of them there already" in comparing.run(*words)


def test_warnings_are_printed_and_written_down(comparing):
    for blocks, starts, is_said in (("2", 4, True), ("3", 6, True), ("3", 6, False)):
        output = comparing.run(*SMALL, "--blocks", blocks, "--", "--loaded")
        assert ("warning: other load: a compiler" in output) == is_said  # if runs are left
        assert comparing.plan()["warnings"] == ["other load: a compiler"]  # not twice
        assert len(comparing.starts()) == starts


def test_a_runs_own_work_is_not_other_load(comparing, monkeypatch):
    """A run that burns a CPU-second on a machine that was busy for four."""
    program = "import time\nwhile time.process_time() < 1: pass"
    burning = StartCommand(lambda *_: [sys.executable, "-c", program], comes_with="")
    monkeypatch.setitem(START_COMMANDS, "torchrun", burning)
    monkeypatch.setattr(launch, "busy_cpu_seconds", iter([100.0, 104.0]).__next__)
    outcome = launch.start_and_wait(Plan().runs()[0], comparing.folder, 60, "a run")
    assert 2.0 < outcome.other_load * outcome.seconds <= 3.0  # run.py and its watchdog work, too


def test_a_terminal_shows_step_and_speed_while_a_run_is_under_way(comparing, monkeypatch):
    terminal = type("Terminal", (io.StringIO,), {"isatty": lambda output: True})
    monkeypatch.setattr(io, "StringIO", terminal)
    monkeypatch.setenv("COLUMNS", "200")
    shown = comparing.run(*SMALL, "--", "--slow", "block-1/ddp-torchrun-1").split("\r")
    live = [line for line in shown if "ddp-torchrun" in line and "running" in line]
    assert any("step 7   4,321 images/s" in line for line in live)


def test_the_last_step_is_read_from_the_end_of_a_long_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert last_step(path) == {"step": 0}
    lines = [json.dumps({"kind": "step", "step": step}) for step in range(1, 20_001)]
    path.write_text("\n".join([*lines, json.dumps({"kind": "eval", "top1": 9}), '{"kind": "st']))
    assert last_step(path) == {"kind": "step", "step": 20_000}
    path.write_text("")
    assert last_step(path) == {"step": 0}
