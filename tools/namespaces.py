"""Two or three hosts on one machine: each is a network namespace with an sshd, behind a bridge.

Each host has its own network (eth0 behind one bridge), host name, /etc/hosts and ssh keys, all
invisible from outside. Files, processors and processes are the machine's. Needs root, iproute2 and
OpenSSH's server. `limit_rate` slows the links down.
"""

import contextlib
import functools
import os
import pwd
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from compare.plan.environment import ROOT

TOOLS = ("ip", "sshd", "ssh", "ssh-keygen")
SUBNET = "10.213.7"  # of private addresses
SEARCH_PATH = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
# Variables that the login shell of a user who trains there would set.
LOGIN_VARIABLES = {
    "PATH": SEARCH_PATH,
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    # Without it, ranks on other hosts would run the installed tree, which may not be this one.
    "PYTHONPATH": str(ROOT),
}
SSHD_CONFIG = """
Port 22
ListenAddress 0.0.0.0
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
StrictModes no
UsePAM no
MaxStartups 100
SetEnv {variables}
"""
SSH_CONFIG = """
IdentityFile {folder}/key
StrictHostKeyChecking no
UserKnownHostsFile /dev/null
LogLevel ERROR
"""
# The user's .bashrc might set another PATH. /run is a new file system, in which sshd finds its
# folder.
INIT = """
set -e
hostname {name}
mount --make-rprivate /
mount --bind {folder}/hosts /etc/hosts
mount --bind {folder}/ssh_config /etc/ssh/ssh_config
if [ -e {home}/.bashrc ]; then mount --bind {folder}/bashrc {home}/.bashrc; fi
mount -t tmpfs none /run
mkdir /run/sshd
exec {sshd} -D -e -f {folder}/sshd_config
"""
START_SECONDS = 120.0  # until an sshd must accept a login
# A token bucket of one millisecond: large enough to make up for late packets, and small compared
# with a step's bytes. At least two of the largest pieces in which the kernel passes on TCP's data.
BUCKET_SECONDS, MIN_BUCKET_BYTES = 0.001, 128 << 10
QUEUE = "50ms"  # data of this time may wait before the link drops packets


class HostsError(Exception):
    """Hosts could not be made or reached."""


@dataclass
class Host:
    """A running host."""

    name: str
    address: str
    namespace: str
    sshd: subprocess.Popen[bytes]

    def inside(self, *command: str) -> list[str]:
        """Return the words that run a command on this host, in the project's folder."""
        enter = ["nsenter", f"--target={self.sshd.pid}", "--net", "--uts", "--mount"]
        return [*enter, "env", f"--chdir={ROOT}", *command]

    def processes(self) -> list[psutil.Process]:
        """Return the processes in this host's network namespace, without its sshd."""
        processes = []
        for pid in pids_in(self.namespace):
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if pid != self.sshd.pid and process.status() != psutil.STATUS_ZOMBIE:
                    processes.append(process)
        return processes


@contextlib.contextmanager
def hosts(
    folder: Path, names: tuple[str, ...] = ("node0", "node1"), reach_here: bool = False
) -> Iterator[list[Host]]:
    """Make the hosts, and remove everything at the end, even after a failure.

    `folder` is for keys and settings, and must not exist. With `reach_here` the hosts can also
    reach servers on this machine outside of them. HostsError if they cannot be made; call
    `missing_tools` first.
    """
    folder.mkdir(parents=True)
    folder.chmod(0o700)
    write_configuration(folder, names)
    mark = uuid.uuid4().hex[:6]
    bridge = f"br-{mark}"
    made: list[Host] = []
    with contextlib.ExitStack() as undo:
        undo.callback(lambda: [host.sshd.wait(10) for host in made])
        ip("link", "add", bridge, "type", "bridge")
        undo.callback(ip, "link", "delete", bridge, check=False)
        ip("link", "set", bridge, "up")
        if reach_here:
            ip("address", "add", f"{SUBNET}.1/24", "dev", bridge)
        for number, name in enumerate(names):
            namespace = f"{name}-{mark}"
            address = f"{SUBNET}.{10 + number}"
            outside = f"v{number}-{mark}"
            ip("netns", "add", namespace)
            undo.callback(remove_namespace, namespace)
            ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", namespace)
            ip("link", "set", outside, "master", bridge, "up")
            ip("-n", namespace, "address", "add", f"{address}/24", "dev", "eth0")
            ip("-n", namespace, "link", "set", "eth0", "up")
            ip("-n", namespace, "link", "set", "lo", "up")
            made.append(Host(name, address, namespace, start_sshd(folder, name, namespace)))
        for host in made:
            wait_until_reachable(host, made[0], folder)
        yield made


def give_cores(made: Sequence[Host]) -> list[str]:
    """Give each host a part of this machine's cores, or all of them if there are fewer cores than
    hosts. Return the words that run a command on the first host.

    Real hosts do not compete for cores. When these did, both workers of Horovod sometimes computed
    on one core for a whole turn, while their polling threads occupied the other."""
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // len(made)
    parts = [cores[n * each : (n + 1) * each] or cores for n in range(len(made))]
    for host, part in zip(made, parts, strict=True):
        os.sched_setaffinity(host.sshd.pid, part)
    return ["taskset", "-c", ",".join(map(str, parts[0])), *made[0].inside()]


def missing_tools(*others: str) -> list[str]:
    """Return the tools (and "root") that hosts need but this machine or user lacks; `others` are
    further tools to look for."""
    missing = [] if is_root() else ["root"]
    return missing + [tool for tool in (*TOOLS, *others) if shutil.which(tool) is None]


@functools.cache
def is_root() -> bool:
    """Return whether this user may mount and make networks. In many containers root may not."""
    words = ["unshare", "--mount", "--net", "true"]
    return os.geteuid() == 0 and subprocess.run(words, capture_output=True).returncode == 0


def limit_rate(made: Sequence[Host], gigabits: float | None) -> None:
    """Let each host send at most `gigabits` x 10^9 bits per second; None: without a limit.

    Open connections stay open. HostsError if the kernel cannot do it.
    """
    for host in made:
        words = ["-n", host.namespace, "qdisc"]
        if gigabits is None:
            call("tc", *words, "delete", "dev", "eth0", "root", check=False)  # there may be none
            continue
        bucket = max(MIN_BUCKET_BYTES, int(gigabits * 1e9 / 8 * BUCKET_SECONDS))
        words += ["replace", "dev", "eth0", "root", "tbf", "rate", f"{gigabits * 1000:g}mbit"]
        call("tc", *words, "burst", str(bucket), "latency", QUEUE)


def call(*words: str, check: bool = True) -> None:
    """Call a program; HostsError with its error output if it fails."""
    done = subprocess.run(words, capture_output=True, text=True)
    if check and done.returncode:
        raise HostsError(f"{' '.join(words)}: {done.stderr.strip()}")


ip = partial(call, "ip")  # iproute2's


def write_configuration(folder: Path, names: tuple[str, ...]) -> None:
    """Write the keys, and the configuration of ssh, sshd and the hosts."""
    for key in ("key", "host_key"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    lines = [f"{SUBNET}.{10 + number} {name}" for number, name in enumerate(names)]
    (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines]) + "\n")
    variables = " ".join(f'"{name}={value}"' for name, value in LOGIN_VARIABLES.items())
    (folder / "sshd_config").write_text(SSHD_CONFIG.format(folder=folder, variables=variables))
    (folder / "bashrc").write_text("")
    (folder / "ssh_config").write_text(SSH_CONFIG.format(folder=folder))


def start_sshd(folder: Path, name: str, namespace: str) -> subprocess.Popen[bytes]:
    """Start a host's sshd in its own namespaces, without waiting for it."""
    home = pwd.getpwuid(os.getuid()).pw_dir  # as sshd has it, whatever HOME is here
    script = INIT.format(name=name, folder=folder, home=home, sshd=shutil.which("sshd"))
    with (folder / f"{name}-sshd.log").open("wb") as log:
        return subprocess.Popen(
            # Not `ip netns exec`, which replaces the machine's /sys by one without cgroups.
            [
                "nsenter",
                f"--net=/run/netns/{namespace}",
                "unshare",
                "--mount",
                "--uts",
                "sh",
                "-c",
                script,
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def wait_until_reachable(host: Host, first: Host, folder: Path) -> None:
    """Wait until the first host can log in to this one; HostsError if it never can. A machine's
    packet filter (such as Docker's rules) may drop packets between the hosts."""
    deadline, answer = time.monotonic() + START_SECONDS, "no answer"
    command = first.inside("ssh", "-o", "ConnectTimeout=2", host.name, "hostname")
    while time.monotonic() < deadline:
        with contextlib.suppress(subprocess.TimeoutExpired):
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30
            )
            answer = done.stdout + done.stderr
            if done.returncode == 0 and done.stdout.strip() == host.name:
                return
        time.sleep(0.2)
    log = (folder / f"{host.name}-sshd.log").read_text()
    raise HostsError(f"{host.name} cannot be reached: {answer}\n{log}")


def pids_in(namespace: str) -> list[int]:
    """Return the process ids in a network namespace; [] if it does not exist."""
    command = ["ip", "netns", "pids", namespace]
    return [int(pid) for pid in subprocess.run(command, capture_output=True).stdout.split()]


def remove_namespace(namespace: str) -> None:
    """Kill all processes in a network namespace until there are none, then remove it."""
    deadline = time.monotonic() + 2
    while (pids := pids_in(namespace)) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        time.sleep(0.1)
    ip("netns", "delete", namespace, check=False)  # also removes its veth pair
