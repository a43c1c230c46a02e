"""The doctor on two hosts: sound ones, and with one thing after the other broken for real."""

import json
from pathlib import Path

import pytest
from hosts import Host, hosts

pytestmark = pytest.mark.cluster

ENVIRONMENT = {"OMPI_MCA_rmaps_base_oversubscribe": "1"}


def examine(hosts: list[Host], tmp_path: Path, *words: str) -> tuple[int, dict[str, dict]]:
    """Return the doctor's exit code and what it found wrong, by host and subject."""
    path = tmp_path / "doctor.json"
    command = ["python", "compare/doctor.py", "--json", str(path), *words]
    finished = hosts[0].run(command, **ENVIRONMENT)
    assert path.exists(), finished.output
    findings = json.loads(path.read_text())["findings"]
    wrong = {f"{f['host']}: {f['subject']}": f for f in findings if f["status"] == "failed"}
    return finished.returncode, wrong


@pytest.mark.full
def test_sound_hosts(two_hosts: list[Host], tmp_path: Path) -> None:
    assert examine(two_hosts, tmp_path, "--hosts", "node0:1,node1:1") == (0, {})


@pytest.mark.full
def test_a_second_network_that_leads_nowhere(two_hosts: list[Host], tmp_path: Path) -> None:
    """It has addresses on both hosts, and carries nothing: launchers that choose it hang."""
    for number, host in enumerate(two_hosts):
        for words in (
            "link add dead0 type veth peer name dead1",
            f"address add 10.213.9.{10 + number}/24 dev dead0",
            "link set dead0 up",
            "link set dead1 up",  # on the same host, where nobody listens
        ):
            assert host.run(["ip", *words.split()]).returncode == 0
    try:
        words = ("--hosts", "node0:1,node1:1")
        code, wrong = examine(two_hosts, tmp_path, *words)
        assert code == 1 and list(wrong) == ["all: network"]
        assert "10.213.9.0/24: node0 -> node1 (10.213.9.11): " in wrong["all: network"]["found"]
        words += ("--network-interface", "eth0", "--no-allreduce")
        assert examine(two_hosts, tmp_path, *words) == (0, {})
    finally:
        for host in two_hosts:
            host.run(["ip", "link", "delete", "dead0"])


def test_data_that_one_host_lacks(two_hosts: list[Host], tmp_path: Path) -> None:
    """/run is a place of each host's own."""
    for part in ("train", "val"):
        two_hosts[0].run(["mkdir", "-p", f"/run/data/{part}/cat"])
    words = ("--hosts", "node0:1,node1:1", "--no-allreduce", "--data", "/run/data")
    code, wrong = examine(two_hosts, tmp_path, *words)
    assert code == 1 and list(wrong) == ["node1: data"]


@pytest.mark.full
def test_a_host_that_lets_nobody_in(tmp_path: Path) -> None:
    """First because the key was not copied, then because it has no sshd."""
    with hosts(tmp_path / "locked", ("locked0", "locked1")) as made:
        (tmp_path / "locked/key.pub").write_text("")
        words = ("--hosts", "locked0:1,locked1:1", "--no-allreduce")
        code, wrong = examine(made, tmp_path, *words)
        assert code == 1 and "ssh-copy-id locked1" in wrong["locked1: ssh"]["remedy"]
        made[1].sshd.terminate()
        made[1].sshd.wait(10)
        code, wrong = examine(made, tmp_path, *words)
        assert code == 1 and "start sshd on locked1" in wrong["locked1: ssh"]["remedy"]
