"""Which launcher started a rank, and the cores that mpirun leaves it."""

import errno
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import psutil
import pytest
from launching import ROOT
from making import a_world

from recipe import ancestors
from recipe.ancestors import launcher_program, rightful_world
from recipe.world import LAUNCHERS


def test_a_process_without_a_launcher_may_outlive_its_parent() -> None:
    """A shell, nohup or tmux may end before it."""
    assert ancestors.launchers_of(a_world(launcher="none")) == {}


@pytest.mark.parametrize(
    ("launcher", "parent", "above", "nearest"),
    [
        ("torchrun", ["python", "torchrun"], ["slurmstepd: [12.batch]"], "parent"),
        ("torchrun", ["sh", "-c", "python train.py"], ["python", "torchrun"], "above"),
        # Horovod's elastic driver, here or on another host, and the watcher that it has started.
        ("horovodrun", ["python", "-u", "train.py"], ["python", "horovodrun"], "above"),
        ("horovodrun", ["python", "-u", "train.py"], ["sshd"], "parent"),
        ("horovodrun", ["python", "train.py"], ["sshd"], "own"),
        ("none", ["python", "torchrun"], ["slurmstepd: [12.batch]"], "own"),
        ("torchrun", ["python", "torchrun"], [], "parent"),  # another user's process is hidden
    ],
)
def test_the_process_that_restarts_ranks(
    launcher: str,
    parent: list[str],
    above: list[str],
    nearest: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = {"own": ["/bin/python", "-u", "train.py"], "parent": parent, "above": above}
    found = {name: mock.Mock(pid=pid) for pid, name in enumerate(words)}
    for name, following in (("own", "parent"), ("parent", "above"), ("above", None)):
        found[name].cmdline.return_value = words[name]
        found[name].as_dict.return_value = {"cmdline": words[name]}
        found[name].parent.return_value = found.get(following or "")
    if not above:  # where /proc is mounted with hidepid=1
        found["parent"].parent.side_effect = psutil.AccessDenied(2)
    monkeypatch.setattr(ancestors.psutil, "Process", lambda pid=0: [*found.values()][pid])
    assert ancestors.nearest_launcher(a_world(0, 2, launcher=launcher)) is found[nearest]


# A stand-in for mpirun, which binds each rank to a core; and a rank that prints how many it uses.
BINDING = """
import os, subprocess, sys
own = sorted(os.sched_getaffinity(0))
subprocess.run(sys.argv[1:], check=True, preexec_fn=lambda: os.sched_setaffinity(0, own[:1]))
"""
USES = """
import os
from recipe.start import undo_mpirun_binding
from recipe.world import read_world
undo_mpirun_binding(read_world())
print(len(os.sched_getaffinity(0)))
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@pytest.mark.parametrize(
    ("variables", "bound"),
    [
        ({"OMPI_MCA_orte_bound_at_launch": "1"}, False),
        ({}, True),  # bound by something else
        *(
            ({"OMPI_MCA_orte_bound_at_launch": "1", f"OMPI_MCA_{name}": value}, True)
            for name, value in {
                "hwloc_base_binding_policy": "core",
                "rmaps_base_mapping_policy": "slot:PE=1",
                "orte_rankfile": "/ranks",
            }.items()
        ),
    ],
)
def test_mpirun_s_default_binding_is_undone(
    variables: dict[str, str], bound: bool, tmp_path: Path
) -> None:
    """Otherwise all jobs on a host would share its first cores."""
    (tmp_path / "mpirun").write_text(BINDING)
    words = [sys.executable, str(tmp_path / "mpirun"), "sh", "-c", '"$@" ; true', "sh"]
    rank = dict(zip(LAUNCHERS["mpirun"].variables, "0101", strict=True))
    environ = {**os.environ, **rank, **variables}
    finished = subprocess.run(
        [*words, sys.executable, "-c", USES],
        env=environ,
        cwd=ROOT,
        check=True,
        text=True,
        stdout=subprocess.PIPE,
    )
    assert int(finished.stdout) == (1 if bound else len(os.sched_getaffinity(0)))


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "7"),
        (PermissionError(), "7"),
        (FileNotFoundError(), None),
        (ProcessLookupError(), None),  # it ended while its file was read
    ],
)
def test_a_launcher_whose_start_time_cannot_be_read_is_not_gone(
    error: OSError, answer: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ancestors.Path, "read_bytes", mock.Mock(side_effect=error))
    assert ancestors.start_time(os.getppid(), "7") == answer
    assert ancestors.start_time(os.getppid()) is None


@pytest.mark.parametrize(
    ("words", "launches"),
    [
        (["/venv/bin/python", "/venv/bin/torchrun", "--nproc-per-node", "2"], True),
        (["python", "-m", "torch.distributed.run", "train.py"], True),
        (["python", "-u", "-m", "torch.distributed.run", "train.py"], True),
        (["python3", "-X", "faulthandler", "-W", "ignore", "/venv/bin/torchrun", "a.py"], True),
        (["python", "-um", "torch.distributed.run", "train.py"], True),
        (["python", "-u", "compare/run.py", "--launcher", "torchrun"], False),
        (["python"], False),
        (["mpirun", "-np", "2", "python", "train.py"], True),
        (["/bin/sh", "-c", "mpirun --allow-run-as-root -np 2 python train.py"], True),
        (["timeout", "60", "horovodrun", "-np", "2"], True),
        (["/usr/bin/orted", "-mca", "ess", "env"], True),
        (["slurmstepd: [12.batch]"], True),
        (["bash", "-c", "mpirun -np 2 python train.py & sleep 5"], False),
        (["bash", "-c", "cd project; nohup torchrun train.py"], False),
        (["bash", "train_with_torchrun.sh"], False),
        (["tmux", "new", "-s", "torchrun"], False),
        (["python", "compare/run.py", "--configurations", "ddp-torchrun"], False),
        (["bash", ""], False),
        ([], False),
    ],
)
def test_command_lines_of_launchers(words: list[str], launches: bool) -> None:
    assert bool(launcher_program(words)) == launches


TORCHRUN, HOROVODRUN = ["python", "/venv/bin/torchrun"], ["python", "horovodrun", "--gloo"]
MPIRUN, ORTED, SLURM = ["mpirun", "-np", "2"], ["orted"], ["slurmstepd: [12.0]"]
HYDRA, SHELL = ["hydra_pmi_proxy"], ["sh", "-c", "RANK=0 python ddp_train/train.py; true"]


@pytest.mark.parametrize(
    ("places", "above", "rightful"),
    [
        # Left over from torchrun in another job: each rank would train alone.
        ("torchrun 0/1, mpirun 1/2", [MPIRUN], "mpirun"),
        ("torchrun 0/1, mpirun 1/2", [SHELL, ORTED], "mpirun"),
        ("torchrun 0/1, mpirun 1/2", [], "mpirun"),  # in a container
        ("torchrun 0/1, mpirun 1/2", [SHELL], "mpirun"),
        ("torchrun 0/1, horovodrun 1/2", [["/bin/bash", "-c", "..."], HOROVODRUN], "horovodrun"),
        ("torchrun 0/1, srun 1/2", [SLURM], "srun"),
        ("torchrun 0/8, mpirun 1/2", [MPIRUN], "mpirun"),  # else it would wait forever
        ("torchrun 0/2, mpirun 1/2", [MPIRUN], "mpirun"),
        ("torchrun 0/1, mpirun 0/2", [MPIRUN, TORCHRUN], "mpirun"),  # started by a rank of torchrun
        # Left over from other launchers.
        ("horovodrun 0/1, mpirun 1/2", [MPIRUN], "mpirun"),
        ("mpirun 0/1, srun 1/2", [SLURM], "srun"),
        ("mpirun 0/4, mpich 1/2", [HYDRA, ["mpirun"]], "mpich"),
        ("mpirun 0/1, mpich 1/2, srun 0/1", [HYDRA, SLURM], "mpich"),
        # One launcher inside another.
        ("torchrun 3/4, srun 1/2", [TORCHRUN, SLURM], "torchrun"),
        ("torchrun 3/4, mpirun 1/2", [TORCHRUN, MPIRUN], "torchrun"),
        ("torchrun 0/1, srun 1/2", [TORCHRUN, SLURM], "torchrun"),  # each task trains another model
        ("torchrun 3/4, srun 1/2", [], "torchrun"),
        ("mpirun 1/2, srun 0/1", [MPIRUN, SLURM], "mpirun"),  # from an interactive step
        ("mpirun 1/2, srun 0/1", [ORTED, SLURM], "mpirun"),
        ("mpirun 1/2, srun 0/1", [["mpiexec", "-n", "2"]], "mpirun"),  # Open MPI's other name
        ("horovodrun 3/4, srun 0/1", [HOROVODRUN, SLURM], "horovodrun"),
        ("horovodrun 3/4, srun 0/2", [["sshd: me@notty"]], "horovodrun"),
        ("srun 1/2, mpich 1/2", [SLURM], "srun"),  # srun --mpi=pmi2
        # Set by hand.
        ("torchrun 1/2, mpirun 1/2", [SHELL, MPIRUN], "torchrun"),
        ("torchrun 1/2, srun 0/1", [SHELL, SLURM], "torchrun"),
        ("torchrun 3/4, mpirun 1/2", [["python", "accelerate", "launch"], MPIRUN], "torchrun"),
        ("torchrun 0/1, none 0/1", [SHELL], "torchrun"),
        # In Slurm's batch step, which is no rank.
        ("torchrun 0/2, none 0/1", [SHELL, SLURM], "torchrun"),
        ("none 0/1", [], "none"),
    ],
)
def test_the_innermost_launcher_decides(places: str, above: list[list[str]], rightful: str) -> None:
    worlds = [
        a_world(*map(int, place.split("/")), launcher=name)
        for name, place in (pair.split() for pair in places.split(", "))
    ]
    assert rightful_world(worlds, above).launcher == rightful


@pytest.mark.parametrize(
    ("variables", "code", "said"),
    [
        (
            "RANK=abc WORLD_SIZE=2 LOCAL_RANK=0",
            2,
            "RANK=abc WORLD_SIZE=2 LOCAL_RANK=0: these do "
            "not describe a rank of a job; unset or correct them\n",
        ),
        (
            "RANK=0 WORLD_SIZE=1 MASTER_PORT=29500 OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2",
            2,
            "RANK=0 WORLD_SIZE=1 MASTER_PORT=29500: left over from another job, since mpirun "
            "started this process as rank 0 of 2; unset them\n",
        ),
        (
            "WORLD_SIZE=2",
            2,
            "WORLD_SIZE=2: RANK is not set, so this process would train alone; "
            "start it with a launcher, which sets both, or unset WORLD_SIZE\n",
        ),
        ("WORLD_SIZE=4 OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1", 0, ""),  # a script's own
        ("RANK=0 WORLD_SIZE=1", 0, ""),
    ],
)
def test_variables_of_another_job_are_refused(variables: str, code: int, said: str) -> None:
    launchers_variables = {
        name for launcher in LAUNCHERS.values() for name in (*launcher.variables, *launcher.job)
    }
    environ = {name: value for name, value in os.environ.items() if name not in launchers_variables}
    environ |= dict(pair.split("=") for pair in variables.split())
    done = subprocess.run(
        [sys.executable, "-c", "from recipe.ancestors import own_world; print(own_world().size)"],
        env=environ,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code and re.fullmatch(f"error: {said}" if said else "", done.stderr)
