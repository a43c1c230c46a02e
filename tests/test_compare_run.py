"""Running a comparison, with a made-up launcher in the place of torchrun and horovodrun."""

import contextlib
import fcntl
import io
import json
import os
import pty
import runpy
import shlex
import signal
import struct
import subprocess
import sys
import termios
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest
from launching import marked, rarely, wait_until
from records import a_summary

from compare import run
from compare.plan import record
from compare.plan.configurations import Configuration
from compare.plan.environment import REMOVED_VARIABLES
from compare.plan.plan import Plan
from compare.run import main
from compare.running import checks, comparison, launch, tools
from compare.running.comparison import show_outcome
from compare.running.launch import last_step

ROOT = Path(__file__).resolve().parent.parent

# Stands for launcher and trainer at once. It notes each start; what it does then is told by flags
# behind the `--`: one run fails, hangs, ends without a summary or leaves a process behind.
LAUNCHER = """
import json, os, random, signal, subprocess, sys, time
from pathlib import Path
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
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"],
                     start_new_session=True)
if value("--hang") == run:
    # As horovodrun on Gloo does it: a worker in a session of its own; neither heeds SIGTERM.
    program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    subprocess.Popen([sys.executable, "-c", program + "time.sleep(300)"], start_new_session=True)
    if value("--stubborn"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (folder / "hangs").touch()
    time.sleep(300)
print("line before the end")
if value("--fail") == run:
    sys.exit("the gradients went away")
if value("--empty") == run:
    sys.exit(0)
if value("--slow") == run:
    (folder / "metrics.jsonl").write_text(line * 3)
    time.sleep(2)
speed = 1234.5
if value("--spread"):  # of the speeds over the blocks: the first blocks' alone, or all blocks'
    random.seed(run)
    if value("--spread") == "all" or int(run[6:].split("/")[0]) <= int(value("--spread")):
        speed *= random.uniform(0.5, 2)
(folder / "metrics.jsonl").write_text(line * 10)
(folder / "summary.json").write_text(json.dumps({**SUMMARY, "images_per_second": speed}))
"""

DRIVER = """
import sys
from compare import run
from compare.running import comparison, launch, tools
from compare.plan import configurations, record
configurations.Configuration.launcher_words = lambda *_: [sys.executable, {launcher!r}]
tools.has_horovod = lambda: "--without-horovod" not in sys.argv  # a flag of the made-up trainer
run.take_default_plan = lambda options: None
run.check_tools = run.check_trainers = lambda plan: None  # nor are the made-up flags theirs
run.checks.find_warnings = lambda plan, folder: (
    ["other load: a compiler"] if "--loaded" in sys.argv else []
)
launch.GRACE_SECONDS = 1.0
# Not the real digest: somebody may be at work on the trainers while the tests run.
digests = iter("aab" if "--sources-change" in sys.argv else "a" * 99)
record.trainers_sha256 = lambda: "a"
comparison.trainers_sha256 = lambda: next(digests)
sys.exit(run.main(sys.argv[1:]))
"""


# What the driver replaces, to be put back where it runs in this process.
REPLACED = [
    (Configuration, "launcher_words"), (tools, "has_horovod"), (launch, "GRACE_SECONDS"),
    *((run, name) for name in ("take_default_plan", "check_tools", "check_trainers")),
    *((module, "trainers_sha256") for module in (comparison, record)),
    (checks, "find_warnings"),
]  # fmt: skip


class Comparing:
    """A folder, where this process is, in which run.py can be started with the made-up launcher."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.folder, self.monkeypatch = folder, monkeypatch
        (folder / "launcher.py").write_text(f"SUMMARY = {asdict(a_summary())!r}\n{LAUNCHER}")
        (folder / "driver.py").write_text(DRIVER.format(launcher=str(folder / "launcher.py")))
        self.starts_file = folder / "starts.txt"
        os.environ["STARTS"] = os.environ["LAUNCH_MARK"] = str(self.starts_file)
        os.environ["OMP_NUM_THREADS"] = "7"
        monkeypatch.chdir(folder)
        for owner, name in REPLACED:
            monkeypatch.setattr(owner, name, getattr(owner, name))

    def start(self, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "driver.py", "--measure", "runs", *words]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen(command, **pipes, text=True)

    def run(self, *words: str) -> tuple[int, str]:
        """In this process, which has imported all of it: exit code and output."""
        self.monkeypatch.setattr(sys, "argv", ["driver.py", "--measure", "runs", *words])
        with (
            contextlib.redirect_stdout(io.StringIO()) as output,
            contextlib.redirect_stderr(output),
            pytest.raises(SystemExit) as ended,
        ):
            runpy.run_path("driver.py")
        return ended.value.code, output.getvalue()

    def starts(self) -> list[str]:
        return self.starts_file.read_text().splitlines() if self.starts_file.exists() else []

    def processes(self) -> list[psutil.Process]:
        """All processes that come from here and are still there."""
        return marked(str(self.starts_file))

    def wait_for(self, path: str) -> None:
        wait_until(lambda: list(self.folder.glob(path)), 30)


@pytest.fixture
def comparing(tmp_path, monkeypatch):
    comparing = Comparing(tmp_path, monkeypatch)
    yield comparing
    # The watchdog of a run that was interrupted may need a moment to see that nothing is left.
    _, left = psutil.wait_procs(comparing.processes(), timeout=10)
    for process in left:
        process.kill()
    assert not left, f"left behind: {left}"


SMALL = (
    "--blocks",
    "2",
    "--workers",
    "1",
    "--no-warm-up",
    "--no-phases",
    "--out",
    "out",
)  # four runs


def test_every_run_is_made_once_in_blocks_and_said(comparing):
    words = ("--workers", "1", "2", "--blocks", "3", "--no-warm-up", "--no-phases")
    code, output = comparing.run(*words)
    assert code == 0, output
    starts = comparing.starts()
    assert len(starts) == len(set(starts)) == 12
    assert [line[6] for line in starts] == sorted(line[6] for line in starts)  # block by block
    for block in (1, 2, 3):
        inside = [line.split()[0] for line in starts if line.startswith(f"block-{block}/")]
        assert sorted(inside) == [
            f"block-{block}/{name}-{n}" for name in ("ddp-torchrun", "horovod-mpi") for n in (1, 2)
        ]
    (folder,) = comparing.folder.glob("runs/compare-*")
    assert f"python compare/report.py {folder.relative_to(comparing.folder)}" in output
    run = folder / "block-1/horovod-mpi-2"
    assert {path.name for path in run.iterdir()} >= {"output.log", "command.txt", "outcome.json"}
    assert (run / "output.log").read_text() == "line before the end\n"
    line = next(line for line in output.splitlines() if line.startswith("[ 1/12]"))
    assert "block 1" in line and "1,23" in line and "left" in line
    assert "[12/12] block 3" in output


def test_blocks_have_their_seed_and_what_is_done_is_not_run_again(comparing):
    os.environ |= {"MALLOC_ARENA_MAX": "2", "NCCL_DEBUG": "WARN", "HOME_SWEET": "1"}
    assert comparing.run(*SMALL)[0] == 0
    environment = read_plan(comparing)["environment"]
    assert environment["inherited"].items() >= {("MALLOC_ARENA_MAX", "2"), ("NCCL_DEBUG", "WARN")}
    assert "HOME_SWEET" not in environment["inherited"]
    assert environment["removed"] == list(REMOVED_VARIABLES)
    assert environment["affinity"] == sorted(os.sched_getaffinity(0))
    words = [line.split() for line in comparing.starts()]
    seeds = {(name.split("/")[0], seed, threads) for name, seed, threads, *_ in words}
    assert seeds == {("block-1", "42", "None"), ("block-2", "43", "None")}  # none of the shell's
    code, output = comparing.run(*SMALL)
    assert code == 0 and len(comparing.starts()) == 4
    assert "4 of them there already" in output
    assert comparing.run(*SMALL, "--blocks", "3")[0] == 0
    assert len(comparing.starts()) == len(set(comparing.starts())) == 6
    assert read_plan(comparing)["blocks"] == 3
    assert comparing.run(*SMALL[:-1], "own", "--", "--seed", "7")[0] == 0
    assert {line.split()[1] for line in comparing.starts()[6:]} == {"7"}


@pytest.mark.parametrize(
    ("words", "place", "number"),
    [
        (["--blocks", "2", "--no-phases"], "block-2/ddp-torchrun-1", signal.SIGINT),
        (["--blocks", "1"], "phases/horovod-mpi-1", signal.SIGTERM),
        (["--blocks", "2", "--no-phases", "--case", "a=--x 1", "--case", "b=--x 2"],
         "block-2/b/horovod-mpi-1", signal.SIGINT),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stubborn", [["--stubborn", "yes"], rarely([])])
def test_an_interruption_leaves_no_process_and_the_same_command_goes_on(
    comparing, words, place, number, stubborn
):
    trainer = ["--hang", place, *stubborn]
    command = ["--workers", "1", "--no-warm-up", *words, "--", *trainer]
    process = comparing.start(*command)
    comparing.wait_for(f"runs/*/{place}/hangs")
    process.send_signal(number)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130 and "Traceback" not in output
    assert not comparing.processes()
    before = run_names(comparing)
    shown = next(line for line in output.splitlines() if "--out runs/compare-" in line)
    assert shlex.split(shown)[-len(trainer) :] == trainer
    (folder,) = comparing.folder.glob("runs/compare-*")
    assert not (folder / place / "outcome.json").exists()
    # The run would hang again: that it is started at all, and the others are not, is the point.
    process = comparing.start(*command)
    wait_until(lambda: len(comparing.starts()) > len(before), 30)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert run_names(comparing)[len(before) :] == [place]
    assert len(list(comparing.folder.glob("runs/compare-*"))) == 1


@pytest.mark.parametrize(("words", "ended", "said"), [
    (["--", "--empty"], 1, "exit code 0, but no summary.json"),
    (["--timeout", "1", "--", "--stubborn", "yes", "--hang"], 1, "TIMED OUT after"),
    (["--timeout", "1", "--", "--hang"], 1, "(at step 0: give a larger --timeout)"),
    (["--", "--leave"], 0, "left behind, and killed: 1"),
])  # fmt: skip
def test_how_a_run_ended_is_said_and_nothing_of_it_is_left(comparing, words, ended, said):
    run = "block-1/horovod-mpi-1"
    code, output = comparing.run(*SMALL, *words, run)
    assert code == ended and said in output
    assert len(comparing.starts()) == 4 and not comparing.processes()
    outcome = json.loads((comparing.folder / f"out/{run}/outcome.json").read_text())
    assert (outcome["other_load"] is None) == bool(outcome["leftover_processes"])


def test_a_killed_run_py_takes_its_run_with_it(comparing):
    """By kill -9, so that run.py can do nothing: not even stubborn workers outlive it."""
    process = comparing.start(*SMALL, "--", "--hang", "block-1/ddp-torchrun-1", "--stubborn", "yes")
    comparing.wait_for("out/block-1/ddp-torchrun-1/hangs")
    assert len(comparing.processes()) == 4  # run.py, its watchdog, launcher, worker
    process.kill()
    process.communicate(timeout=30)
    wait_until(lambda: not comparing.processes(), 10)
    code, _ = comparing.run(*SMALL, "--new", "--out", "other")  # and the lock is free
    assert code == 0


def test_new_starts_afresh_and_so_does_another_plan(comparing):
    words = ["--blocks", "1", "--workers", "1", "--no-warm-up", "--no-phases"]
    code, _ = comparing.run(*words, "--", "--fail", "block-1/ddp-torchrun-1")
    assert code == 1
    assert comparing.run(*words)[0] == 0  # other flags for the trainers: another comparison
    assert len(list(comparing.folder.glob("runs/compare-*"))) == 2
    comparing.run(*words)  # that one was complete: a third
    assert len(list(comparing.folder.glob("runs/compare-*"))) == 3
    assert len(comparing.starts()) == 6


def test_new_does_not_start_afresh_in_a_folder_that_is_used(comparing):
    assert comparing.run(*SMALL)[0] == 0
    for more in ((), ("--workers", "2")):  # this plan, and another one
        code, output = comparing.run(*SMALL, "--new", *more)
        assert code == 2 and "--new: out holds a comparison already" in output
        assert len(output.splitlines()) == 1
    assert len(comparing.starts()) == 4


def test_a_failed_run_is_kept_shown_and_tried_again(comparing):
    words = [*SMALL, "--", "--fail", "block-1/horovod-mpi-1"]
    code, output = comparing.run(*words)
    assert code == 1
    assert "FAILED after" in output and "(exit code 1)" in output
    assert "| the gradients went away" in output
    assert "1 of 4 runs failed" in output
    assert len(comparing.starts()) == 4  # the others were run
    code, output = comparing.run(*words)
    assert code == 1
    assert len(comparing.starts()) == 5
    aside = comparing.folder / "out/block-1/horovod-mpi-1.failed-1"
    assert "the gradients went away" in (aside / "output.log").read_text()


@pytest.mark.parametrize("mark", ["", "[rank 1 on node1] ", "[1,0]<stderr>:"])
def test_what_a_trainer_said_is_not_hidden_by_its_launcher(mark, tmp_path):
    log = tmp_path / "output.log"
    log.write_text(f"{mark}error: --data /x: is not there\n" + "mpirun: boilerplate\n" * 30)
    first, second, *others = launch.shown_tail(tmp_path).splitlines()
    assert first.endswith(f"| {mark}error: --data /x: is not there") and second.endswith("| ...")
    assert len(others) == launch.TAIL_LINES + 1 and others[-1].endswith(str(log))
    log.write_text(f"{mark}error: --data /x: is not there\n")
    assert launch.shown_tail(tmp_path).count("error:") == 1


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


def test_the_warm_up_is_one_run_an_engine_and_is_thrown_away(comparing):
    code, output = comparing.run("--blocks", "1", "--no-phases", "--out", "out")
    assert code == 0
    assert [line.split()[0] for line in comparing.starts()][:2] == [
        "warm-up/ddp-torchrun-2", "warm-up/horovod-mpi-2",
    ]  # fmt: skip
    assert output.count("thrown away") == 2


def test_a_warm_up_that_fails_ends_the_comparison(comparing):
    code, output = comparing.run("--out", "out", "--", "--fail", "warm-up/horovod-mpi-2")
    assert code == 1
    assert len(comparing.starts()) == 2
    assert "the gradients went away" in output and "nothing was measured" in output


def test_two_do_not_write_to_one_comparison(comparing):
    first = comparing.start(*SMALL, "--", "--hang", "block-1/ddp-torchrun-1")
    comparing.wait_for("out/block-1/ddp-torchrun-1/hangs")
    code, output = comparing.run(*SMALL, "--", "--hang", "block-1/ddp-torchrun-1")
    assert code == 2
    assert f"out is being written by process {first.pid}" in output
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=30)


def test_another_plan_in_the_same_folder_is_refused_by_what_differs(comparing):
    comparing.run(*SMALL)
    code, output = comparing.run(*SMALL, "--seed", "43")
    assert code == 2 and "seed: 42 there, 43 now" in output
    os.environ["HOROVOD_CYCLE_TIME"] = "5"
    code, output = comparing.run(*SMALL)
    assert code == 2 and "HOROVOD_CYCLE_TIME" in output
    (comparing.folder / "photos").mkdir()
    (comparing.folder / "photos/1.jpg").touch()
    code, output = comparing.run(*SMALL[:-1], "photos")
    assert code == 2 and "it is no comparison" in output
    assert len(comparing.starts()) == 4


def test_sources_that_change_meanwhile_end_the_comparison(comparing):
    code, output = comparing.run(*SMALL, "--", "--sources-change")
    assert code == 2 and "were changed meanwhile" in output
    assert len(comparing.starts()) == 2  # the digest is asked for before each run


def test_dry_run_prints_commands_only_and_they_can_be_pasted(comparing):
    code, output = comparing.run("--dry-run", "--blocks", "2", "--", "--leave", "it's nothing")
    assert code == 0
    assert not comparing.starts() and not (comparing.folder / "runs").exists()
    lines = output.splitlines()
    assert lines[0] == f"unset {' '.join(REMOVED_VARIABLES)}"
    commands = [line for line in lines if not line.startswith(("unset ", "export "))]
    assert len(commands) == 2 + 4 + 2
    subprocess.run(["sh", "-e"], input=output, text=True, check=True)
    assert len(comparing.starts()) == 8
    assert len(list(comparing.folder.glob("runs/compare-*/block-2/*/summary.json"))) == 2
    assert len(list(comparing.folder.glob("runs/compare-*/phases/*/summary.json"))) == 2


def test_the_commands_are_those_that_a_person_would_type(monkeypatch):
    monkeypatch.chdir(ROOT)
    commands = {
        run.name: shlex.join(run.command(Path("logs")))
        for run in Plan(
            configurations=("ddp-torchrun", "ddp-mpirun", "horovod-mpi", "horovod-gloo",
                            "horovod-mpirun"), workers=(2,), blocks=1,
            trainer_arguments=("--epochs", "1"),
        ).runs()
    }  # fmt: skip
    end = "--seed 42 --epochs 1"
    assert commands == {
        "ddp-torchrun-2": "torchrun --standalone --nproc-per-node 2 ddp_train/train.py "
        f"--log-dir logs --name ddp-torchrun-2 {end}",
        "ddp-mpirun-2": "mpirun -np 2 -H localhost:2 --bind-to none python ddp_train/train.py "
        f"--log-dir logs --name ddp-mpirun-2 {end}",
        "horovod-mpi-2": "horovodrun --mpi -np 2 python horovod_train/train.py "
        f"--log-dir logs --name horovod-mpi-2 {end}",
        "horovod-gloo-2": "horovodrun --gloo -np 2 python horovod_train/train.py "
        f"--log-dir logs --name horovod-gloo-2 {end}",
        "horovod-mpirun-2": "mpirun -np 2 -H localhost:2 --bind-to none python "
        f"horovod_train/train.py --log-dir logs --name horovod-mpirun-2 {end}",
    }


def test_without_horovod_the_command_that_builds_it_is_said(monkeypatch, capsys):
    monkeypatch.setattr(tools, "has_horovod", lambda: False)
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
    code, output = comparing.run(*SMALL, "--", "--without-horovod", "yes")
    assert code == 0
    assert {line.split()[0] for line in comparing.starts()} == {
        "block-1/ddp-torchrun-1", "block-2/ddp-torchrun-1",
    }  # fmt: skip
    assert "Left out: horovod-mpi. The comparison goes on without" in output
    assert json.loads((comparing.folder / "out/plan.json").read_text())["left_out"] == [
        "horovod-mpi"
    ]
    failing = ("--", "--without-horovod", "yes", "--fail", "block-1/ddp-torchrun-1")
    assert comparing.run(*SMALL, "--new", "--out", "other", *failing)[0] == 1


def test_help_loads_no_torch():
    ended = subprocess.run(
        [sys.executable, "-X", "importtime", str(ROOT / "compare/run.py"), "--help"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 0 and "--configurations" in ended.stdout
    assert " torch\n" not in ended.stderr


def read_plan(comparing, folder="out"):
    return json.loads((comparing.folder / folder / "plan.json").read_text())


def run_names(comparing):
    return [line.split()[0] for line in comparing.starts()]


def test_cases_are_run_side_by_side_each_in_a_folder_of_its_own(comparing):
    code, output = comparing.run(
        *SMALL, "--case", "small=--arch resnet18", "--case", "large=--arch vgg16 --batch-size 4"
    )
    assert code == 0, output
    assert len(comparing.starts()) == len(set(comparing.starts())) == 8
    assert read_plan(comparing)["case"]["small"] == {"flags": ["--arch", "resnet18"]}
    for command in comparing.folder.glob("out/block-*/*/*/command.txt"):
        is_large = command.parts[-3] == "large"
        assert ("--arch vgg16 --batch-size 4" in command.read_text()) == is_large
    assert "block 1  large  ddp-torchrun" in output and "block 1  small  horovod-mpi" in output
    code, output = comparing.run(*SMALL, "--case", "small=--arch alexnet")
    assert code == 2 and "case: " in output  # another plan
    assert len(comparing.starts()) == 8


def test_a_configurations_own_variables_and_flags_reach_its_runs_alone(comparing):
    code, output = comparing.run(
        *SMALL, "--define", "tuned=horovod-mpi HOROVOD_CYCLE_TIME=2.5 --fp16-allreduce"
    )
    assert code == 0, output
    tuned = [line for line in comparing.starts() if "/tuned-1 " in line]
    others = [line for line in comparing.starts() if "/tuned-1 " not in line]
    assert len(tuned) == 2 and len(others) == 4
    assert all(line.split()[3] == "2.5" and "--fp16-allreduce" in line for line in tuned)
    assert all(line.split()[3] == "None" and "--fp16" not in line for line in others)
    assert read_plan(comparing)["configuration"]["tuned"] == {
        "base": "horovod-mpi", "flags": ["--fp16-allreduce"],
        "environment": {"HOROVOD_CYCLE_TIME": "2.5"},
    }  # fmt: skip
    command = (comparing.folder / "out/block-1/tuned-1/command.txt").read_text()
    assert command.startswith("env HOROVOD_CYCLE_TIME=2.5 ")


def test_null_compares_each_configuration_with_itself(comparing):
    code, _ = comparing.run(*SMALL, "--null")
    assert code == 0
    assert read_plan(comparing)["null"] is True
    first, again = (
        (comparing.folder / f"out/block-1/{name}-1/command.txt").read_text()
        for name in ("ddp-torchrun", "ddp-torchrun-again")
    )
    assert first == again.replace("-again", "")
    assert len(comparing.starts()) == 8


UNTIL = ("--workers", "1", "--no-warm-up", "--no-phases", "--out", "out", "--until-interval")


def test_blocks_are_added_until_the_interval_is_narrow(comparing):
    """The made-up speeds scatter in the first blocks and are steady from then on."""
    words = [*UNTIL, "40 %"]
    code, output = comparing.run(*words, "--", "--spread", "3")
    assert code == 0, output
    blocks = read_plan(comparing)["blocks_there"]
    assert 3 < blocks < 40 and read_plan(comparing)["blocks"] is None
    assert len(comparing.starts()) == len(set(comparing.starts())) == 2 * blocks
    assert f"block {blocks} " in output
    code, output = comparing.run(*words, "--", "--spread", "3")  # nothing is measured again
    assert code == 0 and len(comparing.starts()) == 2 * blocks


def test_blocks_end_when_the_minutes_are_over_and_more_blocks_go_on(comparing):
    code, output = comparing.run(*UNTIL, "1%", "--minutes", "0.001", "--", "--spread", "all")
    assert code == 0 and "would pass the 0.001 minutes" in output
    assert "the widest interval is +-" in output and len(comparing.starts()) == 6
    code, _ = comparing.run(*UNTIL[:-1], "--blocks", "4", "--", "--spread", "all")
    assert code == 0 and len(comparing.starts()) == 8
    (extension,) = read_plan(comparing)["extensions"]
    assert extension["blocks"] == 4
    failing = ("--spread", "all", "--fail", "block-2/horovod-mpi-1")
    code, output = comparing.run(*UNTIL, "1%", "--out", "failing", "--", *failing)
    assert code == 1 and "1 of 4 runs failed" in output
    assert read_plan(comparing, "failing")["blocks_there"] == 2


WITH_PHASES = ("--blocks", "1", "--workers", "1", "2", "--no-warm-up", "--out", "out")


def test_the_phases_are_run_once_a_cell_after_the_blocks(comparing):
    code, output = comparing.run(*WITH_PHASES, "--", "--lr", "1")
    assert code == 0, output
    names = run_names(comparing)
    assert names[4:] == [
        f"phases/{name}-{n}" for name in ("ddp-torchrun", "horovod-mpi") for n in (1, 2)
    ]
    for line in comparing.starts():
        in_phases = line.startswith("phases/")
        assert ("--ablation-steps 10 --max-steps 120" in line) == in_phases
        assert line.split()[1] == "42" and "--lr 1" in line
    line = next(line for line in output.splitlines() if line.startswith("[1/4] phases"))
    assert "ddp-torchrun" in line and "images/s" not in line  # half of it was not communicated
    comparing.run(*WITH_PHASES, "--", "--lr", "1")
    assert len(comparing.starts()) == 8  # none is made twice
    comparing.run(*WITH_PHASES, "--blocks", "2", "--", "--lr", "1")
    assert {name.split("/")[0] for name in run_names(comparing)[8:]} == {"block-2"}


def test_a_failed_run_for_the_phases_is_shown_and_is_no_failure_of_a_measured_one(comparing):
    words = [*WITH_PHASES, "--", "--fail", "phases/horovod-mpi-2"]
    code, output = comparing.run(*words)
    assert code == 1
    assert "(exit code 1)" in output and "| the gradients went away" in output
    assert "0 of 4 runs failed, and 1 of 4 short runs for the phases" in output
    code, output = comparing.run(*words)
    assert code == 1 and run_names(comparing)[8:] == ["phases/horovod-mpi-2"]
    assert (comparing.folder / "out/phases/horovod-mpi-2.failed-1/output.log").exists()


def test_warnings_are_printed_and_written_down(comparing):
    code, output = comparing.run(*SMALL, "--", "--loaded")
    assert code == 0 and "warning: other load: a compiler" in output
    assert read_plan(comparing)["warnings"] == ["other load: a compiler"]
    assert len(comparing.starts()) == 4
    code, output = comparing.run(*SMALL, "--blocks", "3", "--", "--loaded")
    assert read_plan(comparing)["warnings"] == ["other load: a compiler"]  # not twice
    code, output = comparing.run(*SMALL, "--blocks", "3", "--", "--loaded")
    assert code == 0 and "warning" not in output  # nothing is left to be run


def test_strict_does_not_start_and_leaves_nothing(comparing):
    code, output = comparing.run(*SMALL, "--strict", "--", "--loaded")
    assert code == 2 and "other load: a compiler" in output and "Traceback" not in output
    assert not comparing.starts() and not (comparing.folder / "out").exists()
    assert comparing.run(*SMALL, "--strict")[0] == 0


def test_a_runs_own_work_is_not_other_load(comparing, monkeypatch):
    """A run that burns a CPU-second on a machine that was busy for four."""
    program = "import time\nwhile time.process_time() < 1: pass"
    monkeypatch.setattr(Configuration, "launcher_words", lambda *_: [sys.executable, "-c", program])
    monkeypatch.setattr(launch, "busy_cpu_seconds", iter([100.0, 104.0]).__next__)
    outcome = launch.start_and_wait(Plan().runs()[0], comparing.folder, 60, "a run")
    assert 2.0 < outcome.other_load * outcome.seconds <= 3.0  # run.py and its watchdog work, too


def test_a_terminal_shows_step_and_speed_while_a_run_is_under_way(comparing):
    run = "block-1/ddp-torchrun-1"
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 200, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "driver.py", "--measure", "runs", *SMALL, "--", "--slow", run],
        stdout=slave, stderr=slave,
    )  # fmt: skip
    os.close(slave)
    shown = b""
    with contextlib.suppress(OSError):  # the end of the terminal
        while part := os.read(master, 65536):
            shown += part
    os.close(master)
    assert process.wait(timeout=60) == 0
    live = [line for line in shown.decode().replace("\n", "\r").split("\r") if "running" in line]
    assert any("ddp-torchrun" in line and "step 7   4,321 images/s" in line for line in live)


def test_the_last_step_is_read_from_the_end_of_a_long_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert last_step(path) is None
    lines = [json.dumps({"kind": "step", "step": step}) for step in range(1, 20_001)]
    path.write_text("\n".join([*lines, json.dumps({"kind": "eval", "top1": 9}), '{"kind": "st']))
    assert last_step(path) == {"kind": "step", "step": 20_000}
    path.write_text("")
    assert last_step(path) is None
