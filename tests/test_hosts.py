"""Hosts and their slots, however the user names them."""

import socket
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from making import write_program

from compare.plan.environment import ROOT, set_variables
from compare.plan.hosts import (
    is_here,
    is_only_here,
    most_on_a_host,
    placement,
    read_allocation,
    read_hostfile,
    read_hosts,
    ssh_flags,
    ssh_remedy,
    ssh_words,
    used_hosts,
)
from recipe.errors import UserError

READY = sorted((ROOT / "hostfiles").glob("*.txt"))


@pytest.mark.parametrize(
    "text",
    [
        "node1 slots=4\nnode2 slots=2\n",
        "# the cluster\nnode1 slots=4\n\nnode2   slots = 2  # small\n",
        "node1:4\nnode2:2",  # MPICH
    ],
)
def test_every_form_of_a_hostfile(text: str, tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    assert read_hostfile(path) == "node1:4,node2:2"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("node1 slots=4\nnode2 slots=x", "'node2:x' does not say one host"),
        ("-F/home/me/ssh_config slots=2", "'-F/home/me/ssh_config:2' does not say one host"),
        ("node1 slots=0", "node1:0"),
        ("node1", "'node1'"),
        ("node1 slots=2 max_slots=4", "max_slots"),
        ("node1:4:2", "node1:4:2"),
        ("\n# nothing\n", "nothing"),
        ("node1:2\nnode1:2", "each host once"),
    ],
)
def test_a_hostfile_that_cannot_be_meant(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(UserError, match=f"--hostfile {path}:.*{told}"):
        read_hostfile(path)


def test_hosts_are_filled_in_their_order() -> None:
    assert read_hosts("a:4, b:2") == {"a": 4, "b": 2}
    assert placement(5, "a:4,b:2") == {"a": 4, "b": 1}
    assert placement(4, "a:4,b:2") == {"a": 4}
    assert used_hosts(4, "a:4,b:2") == "a:4"
    assert used_hosts(5, "a:4,b:2") == "a:4,b:2"
    assert most_on_a_host(5, "a:4,b:2") == 4
    assert most_on_a_host(3, "a:4,b:2") == 3
    assert most_on_a_host(3, None) == 3


def test_what_runs_here() -> None:
    assert is_only_here(8, None)
    assert is_only_here(2, "localhost:2,elsewhere:2")
    assert not is_only_here(3, "localhost:2,elsewhere:2")


@pytest.mark.parametrize(
    ("host", "here"),
    [
        ("localhost", True),
        ("node0.cluster", True),
        ("node0", True),  # its short name
        ("login", True),  # another name for its address
        ("192.0.2.7", True),
        ("127.0.1.1", True),
        ("node0.elsewhere", False),
        ("node1", False),
        ("192.0.2.8", False),
        ("nowhere", False),
        ("a..b", False),
    ],
)
def test_this_host_by_each_of_its_names(
    host: str, here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node0.cluster")
    monkeypatch.setattr(socket, "getfqdn", lambda: "node0.cluster")
    own = [SimpleNamespace(address="192.0.2.7")]
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": own})
    known = {"login": "192.0.2.7", "node0.elsewhere": "192.0.2.8", "node1": "192.0.2.8"}
    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda name, port: real(known.get(name, name), port))
    assert is_here.__wrapped__(host) is here


def test_hosts_of_a_slurm_allocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = r'[ "$*" = "show hostnames rack[1-3]" ] && printf "rack1\nrack2\nrack3\n"'
    monkeypatch.setenv("SLURM_JOB_NODELIST", "rack[1-3]")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "4(x2),2")
    write_program(tmp_path / "scontrol", names)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_allocation() == "rack1:4,rack2:4,rack3:2"
    write_program(tmp_path / "scontrol", "echo Invalid hostlist >&2; exit 1")
    with pytest.raises(UserError, match=r"rack\[1-3\].*Invalid hostlist"):
        read_allocation()
    monkeypatch.delenv("SLURM_TASKS_PER_NODE")
    with pytest.raises(UserError, match="with --ntasks-per-node"):
        read_allocation()


@pytest.mark.parametrize("path", READY, ids=lambda path: path.name)
def test_ready_hostfiles_are_read_by_horovod_and_by_us(path: Path) -> None:
    """Horovod's reader dies on comments and blank lines; Open MPI's is tested by the cluster
    tests."""
    name = "horovod.runner.common.util.hosts"
    horovod_hosts = pytest.importorskip(name, reason="Horovod is missing: make setup builds it")
    assert horovod_hosts.parse_host_files(str(path)) == read_hostfile(path)


def test_mpirun_never_asks_for_a_password(monkeypatch: pytest.MonkeyPatch) -> None:
    name, ours = "OMPI_MCA_plm_rsh_args", "-o BatchMode=yes -o ConnectTimeout=10"
    assert set_variables()[name] == ours
    monkeypatch.setenv(name, "-p 2222")
    assert set_variables()[name] == ssh_flags() == f"-p 2222 {ours}"
    assert ssh_words("a", "true") == ["ssh", "-p", "2222", *ours.split(), "--", "a", "true"]


@pytest.mark.parametrize(
    ("message", "remedy"),
    [
        ("ssh: Could not resolve hostname nod0: Name or service not known", "/etc/hosts"),
        ("Host key verification failed.", "log in once"),
        ("root@node1: Permission denied (publickey).", "ssh-copy-id node1"),
        ("ssh: connect to host node1 port 22: Connection refused", "start sshd on node1"),
        ("ssh: connect to host node1 port 22: Connection timed out", "firewall"),
        ("ssh: connect to host node1 port 22: No route to host", "node1 is down"),
        ("something else", "ssh -v node1"),
    ],
)
def test_what_ssh_says_has_a_remedy(message: str, remedy: str) -> None:
    assert remedy in ssh_remedy("node1", message)
