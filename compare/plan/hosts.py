"""Hosts and how many workers each takes: from flags, hostfiles and Slurm's allocations.

Everything here speaks of hosts in the one form that all launchers take with -H: `a:4,b:2`. Hosts
are filled in their order, as horovodrun and mpirun fill them.
"""

import functools
import ipaddress
import os
import re
import socket
import subprocess
from pathlib import Path

import psutil

from recipe.errors import UserError
from recipe.world import tasks_per_node

SLURM = "slurm"  # in place of hosts: those of the allocation that run.py was started in


def read_hosts(text: str, source: str = "--hosts") -> dict[str, int]:
    """Return the slots of each host of `a:2,b:2`; raises UserError, which names the source."""
    hosts: dict[str, int] = {}
    for part in map(str.strip, text.split(",")):
        found = re.fullmatch(r"([^\s:=]+):([1-9]\d*)", part)
        if found is None or found[1] in hosts:
            raise UserError(
                f"{source} {text}: {part or 'nothing'!r} does not say one host and how many "
                "workers it takes; write name:N (in a hostfile also name slots=N), each host once"
            )
        hosts[found[1]] = int(found[2])
    return hosts


def read_hostfile(path: Path) -> str:
    """Return a hostfile's hosts as `a:2,b:2`; raises UserError.

    Lines are `name slots=N` (Open MPI and Horovod) or `name:N` (MPICH and Intel MPI). Blank lines
    and comments are passed over, though Horovod's own reader stumbles over both: it never sees
    the file.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--hostfile {path} cannot be read: {error}") from None
    parts = [" ".join(line.partition("#")[0].split()) for line in lines]
    named = ",".join(re.sub(" slots ?= ?", ":", part) for part in parts if part)
    read_hosts(named, f"--hostfile {path}:")
    return named


def read_allocation() -> str:
    """Return the hosts of this Slurm allocation as `a:2,b:2`; raises UserError.

    A host takes as many workers as the job has tasks there.
    """
    nodes = os.environ.get("SLURM_JOB_NODELIST")
    tasks = os.environ.get("SLURM_TASKS_PER_NODE")  # such as 4(x2),2
    if nodes is None or tasks is None:
        raise UserError(
            "--hosts slurm: SLURM_JOB_NODELIST and SLURM_TASKS_PER_NODE are not both set; start "
            "this inside salloc or sbatch, with --ntasks-per-node, or name the hosts"
        )
    try:
        done = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", "").strip()
        raise UserError(f"--hosts slurm: the nodes are not known: {error} {said}") from None
    nodes_and_tasks = zip(done.stdout.split(), tasks_per_node(tasks), strict=True)
    return ",".join(f"{node}:{count}" for node, count in nodes_and_tasks)


def placement(workers: int, hosts: str) -> dict[str, int]:
    """Return how many of the workers each host gets; hosts that get none are left out."""
    placed = {}
    for name, slots in read_hosts(hosts).items():
        if here := min(slots, workers):
            placed[name] = here
        workers -= here
    return placed


def used_hosts(workers: int, hosts: str) -> str:
    """Return those of the hosts that get workers, as `a:2,b:2`: launchers log in to each one that
    is named to them."""
    slots = read_hosts(hosts)
    return ",".join(f"{host}:{slots[host]}" for host in placement(workers, hosts))


def most_on_a_host(workers: int, hosts: str | None) -> int:
    """Return how many of the workers share a host."""
    return workers if hosts is None else max(placement(workers, hosts).values())


@functools.cache
def is_here(host: str) -> bool:
    """Tell whether a host is this one, by whichever of its names or addresses."""
    names = (socket.gethostname(), socket.getfqdn())
    # A name without a domain is one of this host's own domain.
    if host in ("localhost", *names, *(name.partition(".")[0] for name in names)):
        return True
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):  # the latter of `a..b`
        return False
    own = {a.address for addresses in psutil.net_if_addrs().values() for a in addresses}
    return any(a in own or ipaddress.ip_address(a).is_loopback for a in found)


def is_only_here(workers: int, hosts: str | None) -> bool:
    """Tell whether all of the workers run on this host."""
    return hosts is None or all(map(is_here, placement(workers, hosts)))


def interface_variables(interface: str | None) -> dict[str, str]:
    """Return the variables by which Gloo, NCCL and Open MPI take one network interface."""
    if interface is None:
        return {}
    names = (
        "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMPI_MCA_btl_tcp_if_include",
        "OMPI_MCA_oob_tcp_if_include",
    )  # fmt: skip
    return dict.fromkeys(names, interface)
