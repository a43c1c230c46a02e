"""Rank facts from each launcher's variables."""

import os
import socket
from collections.abc import Callable
from importlib import metadata
from typing import Any

import pytest
from making import a_world

from recipe.errors import UserError
from recipe.rendezvous import refuse_lone_copies
from recipe.world import (
    LAUNCHERS,
    World,
    half_a_place,
    prepare_mpi,
    read_world,
    waits_for,
)

HOST = socket.gethostname()


def facts(world: World) -> tuple[str, int, int, int, int]:
    assert world.host == HOST
    return world.launcher, world.rank, world.size, world.local_rank, world.local_size


def environ(launcher: str, rank: int, size: int, local_rank: int, local_size: int | str) -> dict:
    values = map(str, (rank, size, local_rank, local_size))
    return dict(zip(LAUNCHERS[launcher].variables, values, strict=True))


@pytest.mark.parametrize(
    ("launcher", "names"),
    [
        ("torchrun", "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE"),
        ("horovodrun", "HOROVOD_RANK HOROVOD_SIZE HOROVOD_LOCAL_RANK HOROVOD_LOCAL_SIZE"),
        (
            "mpirun",
            "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK "
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ),
        ("srun", "SLURM_PROCID SLURM_STEP_NUM_TASKS SLURM_LOCALID SLURM_STEP_TASKS_PER_NODE"),
    ],
)
def test_the_variables_are_those_that_launchers_set(launcher: str, names: str) -> None:
    """Spelled out, since a wrong name would only be noticed on a cluster."""
    variables = dict(zip(names.split(), "3412", strict=True))
    assert facts(read_world(variables)) == (launcher, 3, 4, 1, 2)


@pytest.mark.parametrize(
    ("tasks", "sizes"),
    [
        ("4", [4]),
        ("4(x2)", [4, 4]),
        ("2(x3),1", [2, 2, 2, 1]),
        ("4(x2),2,8(x2)", [4, 4, 2, 8, 8]),
        ("1,16(x10)", [1] + [16] * 10),
    ],
)
def test_slurm_task_counts(tasks: str, sizes: list[int]) -> None:
    for node, size in enumerate(sizes):
        variables = environ("srun", 0, sum(sizes), 0, tasks) | {"SLURM_NODEID": str(node)}
        assert read_world(variables).local_size == size


MPICH_OF_SLURM = {"PMI_RANK": "3", "PMI_SIZE": "4"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, ("none", 0, 1, 0, 1)),
        ({"RANK": "3"}, ("none", 0, 1, 0, 1)),  # anyone may have such a variable
        ({"RANK": "", "WORLD_SIZE": ""}, ("none", 0, 1, 0, 1)),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": ""}, ("torchrun", 3, 4, 3, 1)),
        # An allocation alone starts nothing: a script under sbatch has Slurm's variables of the
        # job, but is no task of a step.
        (
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "1"},
            ("none", 0, 1, 0, 1),
        ),
        # Slurm's PMI plugin sets MPICH's global variables, but not its local ones.
        (environ("srun", 3, 4, 1, "2(x2)") | MPICH_OF_SLURM, ("srun", 3, 4, 1, 2)),
        # Nor do Kubeflow's PyTorchJob and Azure ML say how many are on a host.
        (MPICH_OF_SLURM, ("mpich", 3, 4, 3, 1)),
        ({"RANK": "3", "WORLD_SIZE": "4"}, ("torchrun", 3, 4, 3, 1)),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}, ("torchrun", 3, 4, 0, 1)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, ("torchrun", 0, 1, 0, 1)),
        # The innermost launcher counts.
        *(
            (environ(outer, 1, 2, 0, 1) | environ(inner, 5, 8, 1, 4), (inner, 5, 8, 1, 4))
            for inner, outer in (
                ("torchrun", "srun"),
                ("torchrun", "mpirun"),
                ("mpirun", "srun"),
                ("mpich", "srun"),
            )
        ),
        *((environ(name, 5, 8, 1, 4), (name, 5, 8, 1, 4)) for name in LAUNCHERS),
    ],
)
def test_launchers_and_none(variables: dict, expected: tuple) -> None:
    assert facts(read_world(variables)) == expected


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2: RANK is not set"),
        ({"RANK": "3", "WORLD_SIZE": ""}, "RANK=3: WORLD_SIZE is not set"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, "SLURM_STEP_NUM_TASKS=2: SLURM_PROCID is not set"),
        ({"HOROVOD_SIZE": "2"}, "HOROVOD_SIZE=2: HOROVOD_RANK is not set"),
        ({"WORLD_SIZE": "1"}, ""),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, ""),  # a script under sbatch
        ({"RANK": "captain"}, ""),
        ({}, ""),
    ],
)
def test_half_a_place(variables: dict[str, str], words: str) -> None:
    """Such a process would train alone, as one of several copies."""
    message = half_a_place(variables)
    assert message.startswith(words) and bool(message) == bool(words)


@pytest.mark.parametrize(
    ("place", "is_possible"),
    [
        ((3, 4, 1, 2), True),
        ((3, 4, 3, 1), True),  # it is not said how many are here
        ((4, 4, 0, 1), False),
        ((0, 2, -1, 1), False),  # LOCAL_RANK is no number
        ((0, 2, 0, 4), False),
        ((0, 1, 1, 1), False),
    ],
)
def test_places_that_contradict_themselves(place: tuple, is_possible: bool) -> None:
    assert World(*place, launcher="torchrun", host=HOST).is_possible == is_possible


def test_what_is_said_of_missing_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.environ", environ("srun", 0, 12, 0, 12))
    world = read_world(os.environ)
    assert waits_for(world, []) == ""
    message = waits_for(world, range(1, 12))
    assert message.startswith("rank 0 of 12 still waits for rank 1, 2, 3, 4, 5, 6, 7, 8 and 3 more")
    assert "SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=12" in message and "pty" not in message
    monkeypatch.setenv("SLURM_PTY_PORT", "1234")
    assert "other ranks (" in waits_for(world, None) and "srun --pty" in waits_for(world, None)


def test_lone_copies() -> None:
    refuse_lone_copies(a_world(1, 4), 4, "Use mpirun")
    refuse_lone_copies(a_world(), 1, "Use mpirun")
    with pytest.raises(UserError) as refusal:
        refuse_lone_copies(a_world(1, 4), 1, "Use mpirun")
    words = ("torchrun", "one of 4", "world of 1", "4 independent copies", "Use mpirun, or unset")
    assert [word for word in words if word not in str(refusal.value)] == []
    with pytest.raises(UserError, match=r"^(?!.*copies).*world of 4"):
        refuse_lone_copies(a_world(), 4, "Use mpirun")


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, str]]:
    """The variables that MPI finds, of a rank that was given some."""

    def prepare(
        world: World, room: int = 2**30, has_wheel: bool = False, **given: str
    ) -> dict[str, str]:
        def wheel(name: str) -> None:
            if not has_wheel:
                raise metadata.PackageNotFoundError(name)

        monkeypatch.setattr("os.environ", given)
        monkeypatch.setattr("sys.prefix", "/environment")
        monkeypatch.setattr("importlib.metadata.distribution", wheel)
        monkeypatch.setattr("recipe.world._free_shared_memory", lambda: room)
        prepare_mpi(world)
        return given

    return prepare


@pytest.mark.parametrize(
    ("launcher", "isolated"), [("none", True), ("torchrun", True), ("mpirun", False)]
)
def test_mpi_singleton(launcher: str, isolated: bool, prepared: Callable[..., Any]) -> None:
    always = {"OMPI_MCA_mpi_yield_when_idle": "1", "OMPI_MCA_btl": "^tcp"}
    alone = {"OMPI_MCA_ess_singleton_isolated": "1"} if isolated else {}
    assert prepared(a_world(launcher=launcher)) == always | alone
    known = {"OMPI_MCA_ess_singleton_isolated": "0", "OMPI_MCA_mpi_yield_when_idle": "0"}
    found = prepared(a_world(launcher=launcher), **known)  # whoever set them knows better
    assert found == known | {"OMPI_MCA_btl": "^tcp"}


@pytest.mark.parametrize(
    ("local_size", "room", "given", "found"),
    [
        (2, 2**30, None, None),  # there are other hosts
        (4, 2**24, None, None),  # no room: they speak by TCP
        (4, 2**30, "^openib", "^openib,tcp"),
        (4, 2**30, "self,tcp", "self,tcp"),
        (4, 2**30, None, "^tcp"),
    ],
)
def test_mpi_listens_to_no_network_for_ranks_that_share_memory(
    local_size: int,
    room: int,
    given: str | None,
    found: str | None,
    prepared: Callable[..., Any],
) -> None:
    variables = {"OMPI_MCA_btl": given} if given else {}
    world = a_world(0, 4, local_size=local_size, launcher="mpirun")
    assert prepared(world, room, **variables).get("OMPI_MCA_btl") == found


def test_a_rank_on_another_host_finds_its_mpi(prepared: Callable[..., Any]) -> None:
    world = a_world(launcher="mpirun")
    assert "OPAL_PREFIX" not in prepared(world)  # the system's MPI, which knows where it lies
    assert prepared(world, has_wheel=True)["OPAL_PREFIX"] == "/environment"
    assert prepared(world, has_wheel=True, OPAL_PREFIX="/mine")["OPAL_PREFIX"] == "/mine"
