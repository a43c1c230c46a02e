"""Hosts and how many workers each takes: from flags, hostfiles and Slurm's allocations.

Everything here speaks of hosts in the one form that all launchers take with -H: `a:4,b:2`. Hosts
are filled in their order, as horovodrun and mpirun fill them.
"""

import functools
import ipaddress
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

import psutil

from recipe.errors import UserError
from recipe.world import tasks_per_node

SLURM = "slurm"  # in place of hosts: those of the allocation that run.py was started in


def read_hosts(text: str) -> dict[str, int]:
    """Return the slots of each host of `a:2,b:2`; raises UserError."""
    hosts: dict[str, int] = {}
    for part in text.split(","):
        name, _, slots = part.strip().partition(":")
        if not name or not slots.isdecimal() or int(slots) < 1 or name in hosts:
            raise UserError(
                f"--hosts {text}: {part.strip() or 'nothing'!r} does not say one host and how many "
                "workers it takes; write name:N, with commas between hosts and each host once"
            )
        hosts[name] = int(slots)
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
    hosts: list[str] = []
    for number, line in enumerate(lines, start=1):
        text = " ".join(line.partition("#")[0].split())
        if not text:
            continue
        found = re.fullmatch(r"([^\s:=]+)(?: slots ?= ?|:)([1-9]\d*)", text)
        if found is None:
            raise UserError(
                f"{path}, line {number}: {line.strip()!r} is not of the form 'name slots=N' (or "
                "MPICH's 'name:N')"
            )
        hosts.append(f"{found[1]}:{found[2]}")
    if not hosts:
        raise UserError(f"--hostfile {path} names no host: write lines of the form 'name slots=N'")
    named = ",".join(hosts)
    try:
        read_hosts(named)
    except UserError:
        raise UserError(f"--hostfile {path} names a host twice: give each one line") from None
    return named


def read_allocation(environ: Mapping[str, str]) -> str:
    """Return the hosts of this Slurm allocation as `a:2,b:2`; raises UserError.

    A host takes as many workers as the job has tasks there.
    """
    nodes = environ.get("SLURM_JOB_NODELIST")
    if nodes is None:
        raise UserError(
            "--hosts slurm: this is no Slurm allocation (SLURM_JOB_NODELIST is not set); start it "
            "inside salloc or sbatch, or name the hosts"
        )
    tasks = environ.get("SLURM_TASKS_PER_NODE")  # such as 4(x2),2
    if tasks is None:
        raise UserError(
            "--hosts slurm: the allocation does not say how many workers a node takes "
            "(SLURM_TASKS_PER_NODE is not set); ask for --ntasks-per-node"
        )
    scontrol = shutil.which("scontrol", path=environ.get("PATH"))
    if scontrol is None:
        raise UserError("--hosts slurm: scontrol, which spells out a node list, is not on the PATH")
    done = subprocess.run([scontrol, "show", "hostnames", nodes], capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"--hosts slurm: scontrol show hostnames {nodes}: {done.stderr.strip()}")
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
