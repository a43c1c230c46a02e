"""Measuring by turns over several hosts, and under Slurm."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import Host
from launching import read_json

from slurm import Slurm, slurm

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

# A block of two rounds, of two ranks on a host each.
BLOCK = """
import sys
from pathlib import Path
from compare.plan.configurations import CONFIGURATIONS
from compare.plan.plan import Run
from compare.running.scheduler import run_block
from compare.running.sides import training_side
hosts = "node0:1,node1:1"
training = ("--arch", "shufflenet_v2_x0_5", "--train-crop-size", "16", "--threads", "1")
folder, *names = sys.argv[1:]
runs = [Run(1, CONFIGURATIONS[name], 2, 1, arguments=training, hosts=hosts) for name in names]
place = Path(folder)
run_block([training_side(run, place, steps=2) for run in runs], 2, place, 1, "block 1", 0.0)
"""


def check(folder: Path, names: tuple[str, ...]) -> None:
    """Each side had a rank on each host, and its turns."""
    every = read_json(folder / "block.json")["turns"]
    turns = [turn for turn in every if turn["purpose"] == "speed"]  # what others disturbed stays
    assert [turn["side"] for turn in turns] == [*names, *reversed(names)]
    assert all(turn["images"] > 0 and turn["seconds"] > 0 for turn in turns)
    for name in names:
        environment = read_json(folder / name / "0" / "run" / "environment.json")
        assert environment["rank_hosts"] == ["node0", "node1"]


def test_turns_over_two_hosts(two_hosts: list[Host], tmp_path: Path) -> None:
    names = ("ddp-torchrun", "horovod-gloo")
    folder = tmp_path / "block-1"
    two_hosts[0].run(["python", "-c", BLOCK, str(folder), *names]).checked()
    check(folder, names)
    assert [p.cmdline() for host in two_hosts for p in host.processes()] == []


@pytest.fixture
def cluster(two_hosts: list[Host], tmp_path: Path) -> Iterator[Slurm]:
    with slurm(two_hosts, tmp_path / "slurm") as up:
        yield up


@pytest.mark.full
def test_turns_inside_an_allocation(cluster: Slurm, tmp_path: Path) -> None:
    """Steps of one job at once: each has all its cores."""
    names = ("ddp-srun", "horovod-srun", "ddp-mpirun")
    folder = tmp_path / "block-1"
    allocate = ["salloc", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=2"]
    cluster.run([*allocate, "python", "-c", BLOCK, str(folder), *names]).checked()
    check(folder, names)
