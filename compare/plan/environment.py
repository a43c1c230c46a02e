"""What all runs share: the trainers' sources, environment variables, hosts and ssh.

Hosts come from flags, hostfiles and Slurm's allocations, each with its number of workers. They are
written as all launchers take them with -H: `a:4,b:2`. They are filled in this order, as horovodrun
and mpirun fill them. ssh never asks a question here, and always times out.
"""

import functools
import hashlib
import ipaddress
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from recipe.errors import UserError
from recipe.settings.variables import steers
from recipe.world import tasks_per_node

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("recipe", "baselines", "*_train")  # patterns of the folders that hold training code
COMMITS = Path("runs/commits")  # of the worktrees of sides that run a commit
# The trainers set their threads by one rule. Of all launchers, torchrun alone overwrites a value
# left over from the shell, so with one the two engines would not run under equal conditions.
REMOVED_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def run_environment() -> dict[str, str]:
    """Return the environment in which every run of either engine starts."""
    return {k: v for k, v in os.environ.items() if k not in REMOVED_VARIABLES} | set_variables()


def set_variables() -> dict[str, str]:
    """Return the variables that are set for every run, whatever their values in the shell."""
    variables = {
        # The launchers start `python`, `mpirun` and `orted` by name.
        "PATH": search_path(sys.executable),
        "PYTHONUNBUFFERED": "1",
        MPIRUN_VARIABLE: ssh_flags(),
        "PET_LOG_DIR": os.devnull,  # torchrun would leave an empty folder in TMPDIR
    }
    if hasattr(os, "geteuid") and os.geteuid() == 0:  # containers and CI
        variables |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return variables


def search_path(python: str, after: str | None = None) -> str:
    """Return the PATH on which the programs of an interpreter's environment come first. `after`:
    the folders after it (None: those of this process)."""
    own = os.path.dirname(os.path.abspath(os.path.expanduser(python)))
    return os.pathsep.join([own, path_here() if after is None else after])


def path_here() -> str:
    """Return the PATH of this process."""
    return os.environ.get("PATH", os.defpath)


def shell_line(words: Sequence[str]) -> str:
    """Return a command as a line for a shell. A PATH that ends with this process's ends with $PATH
    there, which is short, and right in other shells."""
    after = os.pathsep + path_here()
    return " ".join(
        f'{shlex.quote(word.removesuffix(after))}:"$PATH"'
        if word.startswith("PATH=") and word.endswith(after)
        else shlex.quote(word)
        for word in words
    )


def shell_lines() -> list[str]:
    """Return shell lines that set up this environment, to paste before a command."""
    variables = set_variables() | {"PATH": f"{Path(sys.executable).parent}:$PATH"}
    exports = [f'export {name}="{value}"' for name, value in variables.items()]
    return [f"unset {' '.join(REMOVED_VARIABLES)}", *exports]


def steering_variables() -> dict[str, str]:
    """Return the variables of the user's shell that may change what the engines do, or their speed.
    Both engines get them as the user set them. The plan records them, so that a resumed comparison
    cannot mix values."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if steers(name)
        and not name.startswith("OMPI_ALLOW_RUN_AS_ROOT")
        and name not in REMOVED_VARIABLES
    }


def trainers_sha256() -> str:
    """Return the digest of the trainers' sources, so that runs of different code are not mixed."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in FOLDERS for path in ROOT.glob(f"{folder}/**/*.py")):
        digest.update(f"{path.relative_to(ROOT)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def path_from_here(name: str) -> str:
    """Return the path of a file of this project as a person would type it in the current folder."""
    path = ROOT / name
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def place_of(directory: str, commit: str) -> str:
    """Return the folder in which the command of a user's own script runs; "": where run.py does.
    With a commit it is the same folder, as that is in a worktree of the commit. A worktree has its
    commit's name, so that a comparison finds it again."""
    folder = os.path.expanduser(directory)
    if not commit:
        return folder
    here = Path(folder).resolve()
    root = next((path for path in (here, *here.parents) if (path / ".git").exists()), here)
    return str(COMMITS / commit[:12] / here.relative_to(root))


# Hosts

MPIRUN_VARIABLE = "OMPI_MCA_plm_rsh_args"
# No password prompt, at which a launcher would wait for ever, and a time-out behind a firewall.
NEVER_ASKING = "-o BatchMode=yes -o ConnectTimeout=10"
# A host name, which ssh and launchers cannot mistake for an option. With an option such as -F or
# -oProxyCommand a hostfile could run a program.
HOST_NAME = r"[A-Za-z0-9_][\w.@-]*"


def read_hosts(text: str, source: str = "--hosts") -> dict[str, int]:
    """Return the slots of each host of `a:2,b:2`; UserError names `source` if the text is wrong."""
    hosts: dict[str, int] = {}
    for part in map(str.strip, text.split(",")):
        found = re.fullmatch(rf"({HOST_NAME}):([1-9]\d*)", part)
        if found is None or found[1] in hosts:
            raise UserError(
                f"{source} {text}: {part or 'nothing'!r} does not name one host and its number of "
                "workers; write name:N (in a hostfile also name slots=N), each host once"
            )
        hosts[found[1]] = int(found[2])
    return hosts


def read_hostfile(path: Path) -> str:
    """Return a hostfile's hosts as `a:2,b:2`; raises UserError.

    Lines are `name slots=N` (Open MPI and Horovod) or `name:N` (MPICH and Intel MPI). Blank lines
    and comments are ignored. Horovod's own reader fails on both, but it never sees the file.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--hostfile {path} cannot be read: {error}") from None
    parts = [" ".join(line.partition("#")[0].split()) for line in lines]
    named = ",".join(re.sub(" slots ?= ?", ":", part) for part in parts if part)
    read_hosts(named, f"--hostfile {path}:")
    return named


def slurm_hosts() -> str:
    """Return the hosts of this Slurm allocation as `a:2,b:2`; raises UserError.

    A host's number of workers is the job's number of tasks on it.
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
        stderr = getattr(error, "stderr", "").strip()
        raise UserError(f"--hosts slurm: the nodes are unknown: {error} {stderr}") from None
    names, counts = done.stdout.split(), tasks_per_node(tasks)
    if len(names) != len(counts):
        raise UserError(
            f"--hosts slurm: SLURM_JOB_NODELIST={nodes} names {len(names)} nodes, but "
            f"SLURM_TASKS_PER_NODE={tasks} is of {len(counts)}: one of them is another job's; name "
            "the hosts"
        )
    return ",".join(f"{node}:{count}" for node, count in zip(names, counts, strict=True))


# The batch systems whose names --hosts takes, for the hosts of the job that this command runs in.
ALLOCATIONS = {"slurm": slurm_hosts}


def placement(workers: int, hosts: str) -> dict[str, int]:
    """Return the number of workers on each host; hosts without workers are left out."""
    placed = {}
    for name, slots in read_hosts(hosts).items():
        if here := min(slots, workers):
            placed[name] = here
        workers -= here
    return placed


def used_hosts(workers: int, hosts: str) -> str:
    """Return the hosts that get workers, as `a:2,b:2`. Launchers log in to every host that they are
    given, so the others must not be named."""
    slots = read_hosts(hosts)
    return ",".join(f"{host}:{slots[host]}" for host in placement(workers, hosts))


def most_on_a_host(workers: int, hosts: str | None) -> int:
    """Return the largest number of workers on one host."""
    return workers if hosts is None else max(placement(workers, hosts).values())


@functools.cache
def is_here(host: str) -> bool:
    """Return whether a host is this one, under any of its names or addresses."""
    names = (socket.gethostname(), socket.getfqdn())
    # A name without a domain is in this host's own domain.
    if host in ("localhost", *names, *(name.partition(".")[0] for name in names)):
        return True
    try:
        resolved = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):  # UnicodeError: a name such as `a..b`
        return False
    here = {a.address for addresses in psutil.net_if_addrs().values() for a in addresses}
    return any(a in here or ipaddress.ip_address(a).is_loopback for a in resolved)


def is_only_here(workers: int, hosts: str | None) -> bool:
    """Return whether all workers run on this host."""
    return hosts is None or all(map(is_here, placement(workers, hosts)))


def ssh_flags() -> str:
    """Return ssh's flags for mpirun. The user's own come first: of an option that is given twice,
    ssh takes the first value."""
    return f"{os.environ.get(MPIRUN_VARIABLE, '')} {NEVER_ASKING}".strip()


def ssh_words(host: str, command: str) -> list[str]:
    """Return the words that run a shell command on another host."""
    return ["ssh", *shlex.split(ssh_flags()), "--", host, command]


def ssh_remedy(host: str, message: str) -> str:
    """Return the remedy for an error message of ssh."""
    remedies = {
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
