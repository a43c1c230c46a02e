"""What slurm/ asks of Slurm, where no Slurm is needed to see it."""

import os
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from making import write_program

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted((ROOT / "slurm").glob("*.sbatch"))
# A job's script that gets its warning at once, and whose training ends with a checkpoint.
WARNED = """
. slurm/job.sh
mkdir -p "$folder/checkpoints"; touch "$folder/checkpoints/step-2.pt"
SECONDS=$1
train bash -c 'kill -USR1 $0; until [ -e "$1" ]; do sleep 0.01; done; rm "$1"' $$ "$folder/stop"
"""
# Its ranks get the signal themselves, and end with this code.
SIGNALLED = """
. slurm/job.sh
mkdir -p "$folder/checkpoints"; touch "$folder/checkpoints/step-2.pt"
SECONDS=100
train bash -c "exit $1"
"""
NOT_PREEMPTED = "PreemptTime=None"


def test_a_rank_that_fails_ends_the_others() -> None:
    """Else a job whose rank 0 could not start waits for it until its time is over."""
    lines = [
        line
        for script in SCRIPTS
        for line in re.findall(r"^train srun(?:.*\\\n)*.*", script.read_text(), re.MULTILINE)
    ]
    assert len(lines) == 3
    for line in lines:
        assert "--kill-on-bad-exit=1" in line or '"${ending[@]}"' in line
    torchrun = (ROOT / "slurm/ddp_torchrun.sbatch").read_text()
    assert "\nending=(--kill-on-bad-exit=1)" in torchrun
    assert torchrun.count("--no-kill)") == 1
    assert 'if [ -n "${MIN_NODES:-}" ]; then ending=(--kill-on-bad-exit=0 --no-kill)' in torchrun


def test_srun_without_a_script_starts_ranks_as_the_scripts_do() -> None:
    script = (ROOT / "slurm/ddp_srun.sbatch").read_text()
    [of_script] = re.findall(r"^train srun ((?:.*\\\n)*)", script, re.MULTILINE)
    [of_readme] = re.findall(r"^srun ((?:.*\\\n)*)", (ROOT / "README.md").read_text(), re.MULTILINE)
    [of_horovod] = re.findall(r"`.* srun (--mpi.*?)`", (ROOT / "docs/launching.md").read_text())
    for line in (of_readme, of_horovod):
        assert {"--exclusive", *of_script.split()} - {"\\"} <= {*line.split()}


def test_the_tasks_of_mpi_wait_for_each_other() -> None:
    """tests/cluster/test_slurm.py shows that they do so with this setting only."""
    before, _, _ = (ROOT / "slurm/horovod_srun.sbatch").read_text().partition("\ntrain srun")
    assert "\nexport SLURM_PMIX_FENCE=${SLURM_PMIX_FENCE:-ring}" in before


def test_a_job_outlives_a_lost_node_only_if_asked() -> None:
    for script in SCRIPTS:
        assert "#SBATCH --no-kill" not in script.read_text(), script.name


def run_in_job(folder: Path, code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run shell code as a job of Slurm does, with programs of `folder` before others."""
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "ddp", "SLURM_SUBMIT_DIR": str(ROOT)}
    environ |= {"PATH": f"{folder}:{os.environ['PATH']}", **variables}
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code],
        env=os.environ | environ,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


def test_a_job_asks_the_project_for_hosts_and_a_port(tmp_path: Path) -> None:
    write_program(tmp_path / "scontrol", "printf 'a\\nb\\n'\n")
    variables = {"SLURM_JOB_NODELIST": "[a-b]", "SLURM_TASKS_PER_NODE": "4(x2)"}
    done = run_in_job(tmp_path, ". slurm/job.sh; allocated_hosts; rendezvous_port", **variables)
    assert done.returncode == 0, done.stderr
    hosts, port = done.stdout.split()
    assert hosts == "a:4,b:4" and port.isdecimal()


def test_a_job_whose_name_has_a_slash(tmp_path: Path) -> None:
    code = '. slurm/job.sh; echo "$folder"'
    done = run_in_job(tmp_path, code, SLURM_JOB_NAME="net/big", RUNS=f"{tmp_path}/runs")
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}/runs/net-big-7\n")
    done = run_in_job(tmp_path, code, NAME="net/big")
    assert done.returncode == 2 and "a run's name has no slash" in done.stderr


@pytest.mark.parametrize("flag", ["--name", "--log-dir=runs"])
def test_flags_that_the_scripts_need_for_themselves_are_refused(flag: str, tmp_path: Path) -> None:
    done = run_in_job(tmp_path, f"set -- --batch-size 3 {flag} other; . slurm/job.sh; echo on")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"{flag}: set NAME or RUNS before sbatch")


@pytest.mark.parametrize(
    ("limit", "preempted", "seconds", "is_queued_again"),
    [
        ("TimeLimit=00:04:00", NOT_PREEMPTED, 20, False),  # the warning comes five minutes before
        ("TimeLimit=00:04:00", "", 20, False),  # a site that does not preempt writes no such line
        ("TimeLimit=00:10:00", NOT_PREEMPTED, 300, True),
        ("TimeLimit=1-00:00:00", NOT_PREEMPTED, 20, True),  # scancel --signal, by hand
        ("TimeLimit=00:30:00", "PreemptTime=2026-11-22T10:00:00", 20, True),
    ],
)
def test_a_warned_job_is_queued_again(
    limit: str, preempted: str, seconds: int, is_queued_again: bool, tmp_path: Path
) -> None:
    """Unless its time is so short that each start would end where it began."""
    write_program(
        tmp_path / "scontrol",
        f'if [ "$1" = show ]; then printf "Run=1 {limit}\\n {preempted}\\n"; '
        f'else echo "$@" > {tmp_path}/asked; fi\n',
    )
    done = run_in_job(tmp_path, f"set -- {seconds}\n{WARNED}", RUNS=str(tmp_path / "runs"))
    asked = tmp_path / "asked"
    assert (done.returncode == 0, asked.exists()) == (is_queued_again,) * 2, done.stderr
    if is_queued_again:
        assert asked.read_text() == "requeue 7\n"
    else:
        assert "--time is hardly longer" in done.stderr and "NAME=ddp-7" in done.stderr


@pytest.mark.parametrize("status", [75, 76, 1, 0])
def test_a_job_whose_ranks_kept_a_checkpoint_is_queued_again(status: int, tmp_path: Path) -> None:
    write_program(tmp_path / "scontrol", f'echo "$@" >> {tmp_path}/asked\n')
    done = run_in_job(tmp_path, f"set -- {status}\n{SIGNALLED}", RUNS=str(tmp_path / "runs"))
    assert done.returncode == status
    asked = tmp_path / "asked"
    assert asked.exists() == (status == 75)
    assert not asked.exists() or asked.read_text() == "requeue 7\n"


@pytest.fixture
def compare_in_job(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs slurm/compare.sbatch, in which run.py and report.py only say what they are asked for,
    and end with these exit codes."""

    def compared(
        *words: str, check: str = "", run: int = 0, report: int = 0, venv: str = ""
    ) -> subprocess.CompletedProcess[str]:
        says = f'echo "$@"; case $1 in *run.py) exit {run} ;; esac; exit {report}\n'
        write_program(tmp_path / "bin/python", says)
        (tmp_path / "bin/activate").write_text(f"PATH={tmp_path}/bin:$PATH\n")
        code = shlex.join(["bash", "slurm/compare.sbatch", *words])
        return run_in_job(tmp_path, code, VENV=venv or str(tmp_path), CHECK=check, RUNS="runs")

    return compared


@pytest.mark.parametrize(
    ("run", "report", "code"), [(0, 0, 0), (0, 1, 1), (0, 2, 2), (0, 3, 3), (1, 0, 3), (2, 0, 3)]
)
def test_a_checked_comparison_has_the_exit_code_of_its_goals(
    run: int, report: int, code: int, compare_in_job: Callable[..., Any]
) -> None:
    """1 and 2 are answers: a measurement that fails does not end with them."""
    flags = "--check --undecided-passes"
    done = compare_in_job("plan.toml", check=flags, run=run, report=report)
    assert done.returncode == code
    asked = ["compare/run.py --hosts slurm --out runs/slurm-compare-7 plan.toml"]
    asked += [] if run else [f"compare/report.py runs/slurm-compare-7 {flags}"]
    assert done.stdout.splitlines() == asked
    assert compare_in_job("plan.toml", run=run, report=9).returncode == run


def test_a_comparison_is_checked_where_it_was_written(compare_in_job: Callable[..., Any]) -> None:
    for words, folder in (
        (["--out", "a b"], "a b"),
        (["--out=c", "--", "--out", "d"], "c"),
        (["--", "--out", "d"], "runs/slurm-compare-7"),
    ):
        done = compare_in_job(*words, check="--check")
        assert done.stdout.splitlines()[-1] == f"compare/report.py {folder} --check"


@pytest.mark.parametrize(
    ("words", "venv"), [(["--name", "x"], ""), (["plan.toml", "--out"], ""), ([], "nowhere")]
)
def test_no_error_of_the_job_looks_like_an_answer(
    words: list[str], venv: str, compare_in_job: Callable[..., Any]
) -> None:
    """Neither what job.sh refuses, nor a flag without its value, nor a missing environment."""
    done = compare_in_job(*words, check="--check", venv=venv)
    assert (done.returncode, done.stdout) == (3, "") and done.stderr


def test_what_is_no_check_is_refused_before_anything_is_measured(
    compare_in_job: Callable[..., Any],
) -> None:
    done = compare_in_job("plan.toml", check="1")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == "CHECK=1: give --check, or --check --undecided-passes\n"
