"""ssh, as launchers reach other hosts by it: without a question, and with an end."""

import os
import shlex
import subprocess
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

from compare.plan.hosts import is_here, placement
from recipe.errors import UserError
from recipe.world import LAUNCHERS, NO_LAUNCHER

MPIRUN_VARIABLE = "OMPI_MCA_plm_rsh_args"
# No password prompt, at which a launcher would wait for ever, and an end behind a firewall.
NEVER_ASKING = "-o BatchMode=yes -o ConnectTimeout=10"
# Where one of these is set, mpirun starts its daemons without ssh: by Slurm, PBS or LSF, or by an
# agent that the user names, who then knows how hosts are reached.
WITHOUT_SSH = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "OMPI_MCA_plm_rsh_agent")
LOGIN_SECONDS = 30  # ConnectTimeout does not limit a login that hangs


def ssh_flags() -> str:
    """Return ssh's flags for mpirun: the user's own first, since ssh takes the first value of an
    option."""
    return f"{os.environ.get(MPIRUN_VARIABLE, '')} {NEVER_ASKING}".strip()


def ssh_words(host: str, command: str) -> list[str]:
    """Return what runs a command, in a shell's words, on another host."""
    return ["ssh", *shlex.split(ssh_flags()), host, command]


def check_logins(workers: int, hosts: str | None, launchers: Collection[str]) -> None:
    """Raise UserError if a host that gets some of the workers cannot be reached by ssh, and one of
    the launchers reaches it so."""
    has_agent = any(name in os.environ for name in WITHOUT_SSH)
    by_ssh = {"ssh"} if has_agent else {"ssh", "agent"}
    if hosts is None or not any(
        LAUNCHERS.get(name, NO_LAUNCHER).reaches in by_ssh for name in launchers
    ):
        return
    away = [name for name in placement(workers, hosts) if not is_here(name)]
    with ThreadPoolExecutor(max_workers=64) as pool:
        problems = dict(zip(away, pool.map(login_problem, away), strict=True))
    lines = [f"{host}: {said}; {ssh_remedy(host, said)}" for host, said in problems.items() if said]
    if lines:
        text = "\n    ".join(["nothing was started, because ssh does not reach all hosts:", *lines])
        raise UserError(text)


def login_problem(host: str) -> str:
    """Return why no one can log in to a host; "" if one can."""
    try:
        done = subprocess.run(
            ssh_words(host, "true"), stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=LOGIN_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"no answer within {LOGIN_SECONDS} s"
    except FileNotFoundError:
        return "there is no ssh on the PATH"
    return last_line(done) if done.returncode else ""


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """Return a failed command's last words, without ssh's name and a full stop."""
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return lines[-1].removeprefix("ssh: ").rstrip(".")


def ssh_remedy(host: str, message: str) -> str:
    """Return what to do about a message of ssh."""
    for sign, remedy in {
        "no ssh on the PATH": "install OpenSSH's client, or use srun inside a Slurm allocation",
        "Could not resolve": f"write {host} into /etc/hosts, or give its address",
        "Host key verification": f"log in once, `ssh {host}`, and accept its key",
        "Permission denied": f"`ssh-copy-id {host}`: it must not ask for a password",
        "Connection refused": f"start sshd on {host}",
        "No route to host": f"{host} is down, or in a network that this host does not reach",
        "Network is unreachable": f"{host} is in a network that this host does not reach",
        "timed out": f"{host} is down, or a firewall stands between",
    }.items():
        if sign in message:
            return remedy
    return f"`ssh -v {host} true` says more"
