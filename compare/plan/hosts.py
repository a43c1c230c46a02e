"""Hosts and how many workers each takes, from flags, hostfiles and Slurm's allocations; and ssh, as
launchers reach them by it: without a question, and with an end.

Everything here speaks of hosts in the one form that all launchers take with -H: `a:4,b:2`. Hosts
are filled in their order, as horovodrun and mpirun fill them.
"""

import functools
import ipaddress
import os
import re
import shlex
import socket
import subprocess
from pathlib import Path

import psutil

from recipe.errors import UserError
from recipe.world import tasks_per_node

MPIRUN_VARIABLE = "OMPI_MCA_plm_rsh_args"
# No password prompt, at which a launcher would wait for ever, and an end behind a firewall.
NEVER_ASKING = "-o BatchMode=yes -o ConnectTimeout=10"
# What ssh and launchers take for a name, and never for an option, such as -F or -oProxyCommand, by
# which a hostfile could run a program.
HOST_NAME = r"[A-Za-z0-9_][\w.@-]*"
SLURM = "slurm"  # in place of hosts: those of the allocation that run.py was started in


def read_hosts(text: str, source: str = "--hosts") -> dict[str, int]:
    """Return the slots of each host of `a:2,b:2`; raises UserError, which names the source."""
    hosts: dict[str, int] = {}
    for part in map(str.strip, text.split(",")):
        found = re.fullmatch(rf"({HOST_NAME}):([1-9]\d*)", part)
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


def ssh_flags() -> str:
    """Return ssh's flags for mpirun: the user's own first, since ssh takes the first value of an
    option."""
    return f"{os.environ.get(MPIRUN_VARIABLE, '')} {NEVER_ASKING}".strip()


def ssh_words(host: str, command: str) -> list[str]:
    """Return what runs a command, in a shell's words, on another host."""
    return ["ssh", *shlex.split(ssh_flags()), "--", host, command]


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """Return a failed command's last words, without ssh's name and a full stop."""
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return lines[-1].removeprefix("ssh: ").rstrip(".")


def ssh_remedy(host: str, message: str) -> str:
    """Return what to do about a message of ssh."""
    remedies = {
        "no ssh on the PATH": "install OpenSSH's client, or use srun inside a Slurm allocation",
        "Could not resolve": f"write {host} into /etc/hosts, or give its address",
        "Host key verification": f"log in once, `ssh {host}`, and accept its key",
        "Permission denied": f"`ssh-copy-id {host}`: it must not ask for a password",
        "Connection refused": f"start sshd on {host}",
        "No route to host": f"{host} is down, or in a network that this host does not reach",
        "Network is unreachable": f"{host} is in a network that this host does not reach",
        "timed out": f"{host} is down, or a firewall stands between",
    }
    found = (remedy for sign, remedy in remedies.items() if sign in message)
    return next(found, f"`ssh -v {host} true` says more")
