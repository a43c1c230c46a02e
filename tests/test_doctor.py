"""The doctor: what it makes of hosts that answer, or do not, and of this machine."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from compare import doctor
from compare.doctor import agreement, common_networks, connection_problems, network_findings
from compare.plan.environment import ROOT
from compare.running.checks import OWN_NAME, Finding, HostReport

VERSIONS = {"torch": "2.14.1", "Horovod": "0.28.1", "MPI": "Open MPI 4.1.8"}


def report(**addresses: str) -> HostReport:
    """A sound host's, with these addresses."""
    return HostReport([Finding("torch", "ok", "2.14.1")], VERSIONS, addresses)


@pytest.mark.parametrize("name", VERSIONS)
def test_hosts_must_agree(name: str) -> None:
    same = {"a": report(), "b": report()}
    assert (agreement(same).status, agreement(same).found) == ("ok", "equal on 2 hosts")
    other = HostReport([], VERSIONS | {name: "another"})
    found = agreement({**same, "c": other})
    assert found.status == "failed"
    assert found.found == f"{name} is {VERSIONS[name]} on a, {VERSIONS[name]} on b, another on c"


def test_networks_that_hosts_have_in_common() -> None:
    two = {
        "a": report(eth0="10.0.0.1/24", ib0="10.1.0.1/24", docker0="172.17.0.1/16"),
        "b": report(eth0="10.0.0.2/24", ib1="10.1.0.2/24", docker0="172.17.0.1/16"),
    }
    assert common_networks(two, None) == {
        "10.0.0.0/24": {"a": ("10.0.0.1", 0), "b": ("10.0.0.2", 0)},
        "10.1.0.0/24": {"a": ("10.1.0.1", 0), "b": ("10.1.0.2", 0)},
    }
    assert list(common_networks(two, "eth0")) == ["eth0"]
    assert common_networks(two, "ib0") == {}
    routed = {"a": report(eth0="10.0.0.1/32"), "b": report(eth0="10.0.1.1/32")}
    assert common_networks(routed, None) == {}
    assert list(common_networks(routed, "eth0")) == ["eth0"]
    for interface, status in ((None, "warning"), ("ib0", "failed")):
        (found,) = network_findings(two, {}, interface)
        assert found.status == status and "'ib1': '10.1.0.2/24'" in found.found
        assert "--network-interface" in found.remedy


# What a host answers, without a look at it.
ANSWERS = """
from compare import doctor
doctor.report_host = lambda name, data, port: {"port": port}
doctor.answer("a", None)
"""


def test_connections_that_fail_are_told() -> None:
    """Both hosts are this one. `b` listens nowhere, and has another name than it thinks."""
    words, pipe = [sys.executable, "-c", ANSWERS], subprocess.PIPE
    answering = subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True, cwd=ROOT)
    with answering as a, socket.create_server(("127.0.0.2", 0)) as open_port:
        answered, _ = doctor.read_answer(a)
        place = ("127.0.0.1", answered["port"])
        networks = {
            "10.0.0.0/24": {"a": place, "b": open_port.getsockname()},
            OWN_NAME: {"a": place, "b": ("127.0.0.3", open_port.getsockname()[1])},
        }
        problems = connection_problems(networks, {"a": a})
        a.terminate()
        a.wait()
        assert connection_problems(networks, {"a": a})[OWN_NAME] == ["a answers no longer"]
    assert problems == {
        "10.0.0.0/24": [], OWN_NAME: ["a -> b (127.0.0.3): Connection refused"]
    }  # fmt: skip
    found = network_findings({"a": report()}, problems, None)
    assert [one.status for one in found] == ["ok", "ok", "warning"]
    assert "/etc/hosts" in found[-1].remedy and problems[OWN_NAME][0] in found[-1].found
    problems["10.0.0.0/24"] = ["a -> b: no route"] * 5
    _, failed, _ = network_findings({"a": report()}, problems, None)
    assert failed.status == "failed" and "--network-interface" in failed.remedy


@pytest.mark.parametrize(
    ("command", "subject", "found"),
    [
        ("echo Welcome; sleep 60", "environment", "no answer within 1 s"),
        ("echo python: No such file >&2; exit 127", "environment", "python: No such file"),
        ("echo ssh: Connection refused. >&2; exit 255", "ssh", "Connection refused"),
    ],
)
def test_a_host_that_does_not_answer(
    command: str, subject: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "is_here", lambda host: False)
    monkeypatch.setattr(doctor, "ssh_words", lambda host, words: ["sh", "-c", command])
    monkeypatch.setattr(doctor, "ANSWER_SECONDS", 1)
    monkeypatch.setattr(Path, "resolve", None)  # which asks the file system: it may hang, too
    with doctor.ask("node0", Path("data")) as host:
        (finding,) = doctor.read_report("node0", host).findings
    assert (finding.subject, finding.status, finding.found) == (subject, "failed", found)
    assert finding.remedy and finding.host == "node0"


@pytest.mark.parametrize(
    ("skew", "horovod", "status"),
    [
        (1, "0.28.1", "ok"),
        (-7, "0.28.1", "warning"),
        (31, "0.28.1", "failed"),
        (31, None, "warning"),
    ],
)
def test_clocks(skew: float, horovod: Any, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answered = {"findings": [], "versions": {"Horovod": horovod}, "time": 1000.0 + skew}
    monkeypatch.setattr(doctor, "read_answer", lambda host: (answered, ""))
    monkeypatch.setattr("time.time", lambda: 1000.0)
    (clock,) = doctor.read_report("node0", None).findings
    assert (clock.subject, clock.status, clock.host) == ("clock", status, "node0")


def test_an_allreduce_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.CompletedProcess([], 1)
    monkeypatch.setattr(subprocess, "run", lambda words: done)
    found = doctor.measure_allreduce("localhost:1,elsewhere:1", "eth1")
    assert found.status == "failed" and "--network-interface eth1" in found.found
    assert doctor.measure_allreduce("localhost:1", None).status == "ok"  # one worker


def test_this_machine(tmp_path: Path) -> None:
    (tmp_path / "train/cat").mkdir(parents=True)
    words = f"compare/doctor.py --no-allreduce --data {tmp_path} --json {tmp_path}/doctor.json"
    command = [sys.executable, *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, cwd=ROOT)
    assert done.returncode == 1, done.stdout + done.stderr  # there is no val/
    found = json.loads((tmp_path / "doctor.json").read_text())["findings"]
    status = {finding["subject"]: finding["status"] for finding in found}
    assert [name for name in status if status[name] == "failed"] == ["data"]
    assert status["torch"] == status["Horovod"] == status["MPI"] == "ok"
    assert "FAILED   data" in done.stdout and "\n1 failed, " in done.stdout
    assert all(len(line) <= 100 for line in done.stdout.splitlines())
