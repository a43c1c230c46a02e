"""The README's start lines on two hosts: each runs as it stands there and ends with the weights
that the same training on one host ends with."""

import contextlib
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from hosts import SEARCH_PATH, Host, hosts
from launching import SMALL, read_json, wait_until

from tools.namespaces import ip

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

TRAINING = f"{SMALL} --max-steps 12"
# Two ranks on each of two hosts, by the README's lines; and the transport that adds them up, each
# in an order of its own.
STARTS = {
    "horovodrun --gloo -np 4 -H node0:2,node1:2 python horovod_train/train.py": "horovod-gloo",
    "horovodrun -np 4 -H node0:2,node1:2 python horovod_train/train.py": "horovod-mpi",
    "mpirun -np 4 --hostfile HOSTFILE -x HOROVOD_FUSION_THRESHOLD python horovod_train/train.py": (
        "horovod-mpi"
    ),
    "mpirun -np 4 --hostfile HOSTFILE -x HOROVOD_FUSION_THRESHOLD python horovod_train/train.py "
    "--transport gloo": "horovod-gloo",
    "mpirun -np 4 --hostfile HOSTFILE python ddp_train/train.py": "ddp-gloo",
}
# The same four ranks on one host.
ON_ONE_HOST = {
    "horovod-gloo": "horovodrun --gloo -np 4 python horovod_train/train.py",
    "horovod-mpi": "horovodrun -np 4 python horovod_train/train.py",
    "ddp-gloo": "torchrun --nproc-per-node 4 ddp_train/train.py",
}
TWO_AND_TWO = ["node0", "node0", "node1", "node1"]
ENVIRONMENT = {
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    # What Horovod fuses into one message depends on time, and the order in which a ring of four
    # adds depends on where a message is cut: weights are equal to the bit only without fusion.
    "HOROVOD_FUSION_THRESHOLD": "0",
}


@pytest.fixture
def hostfile(tmp_path: Path) -> Path:
    path = tmp_path / "hostfile"
    path.write_text("node0 slots=2\nnode1 slots=2\n")
    return path


@pytest.fixture(scope="module")
def one_host_weights(
    two_hosts: list[Host], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """The digest of the weights after the training on one host, by who moves the gradients."""
    folder = tmp_path_factory.mktemp("one-host")
    for name, line in ON_ONE_HOST.items():
        command = f"{line} {TRAINING} --log-dir {folder} --name {name}"
        two_hosts[0].run(command.split(), **ENVIRONMENT).checked()
    return {name: weights(folder / name, ["node0"] * 4) for name in ON_ONE_HOST}


def weights(folder: Path, rank_hosts: list[str]) -> str:
    """Return the digest of a run's weights, after a look at where its ranks were."""
    assert read_json(folder / "environment.json")["rank_hosts"] == rank_hosts
    return str(read_json(folder / "summary.json")["weights_sha256"])


@pytest.mark.full
@pytest.mark.parametrize("line", STARTS)
def test_two_hosts_train_what_one_does(
    line: str, two_hosts: list[Host], one_host_weights: dict[str, str], hostfile: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    command = line.replace("HOSTFILE", str(hostfile)).split()
    command += f"{TRAINING} --log-dir {tmp_path} --name run".split()
    two_hosts[0].run(command, **ENVIRONMENT).checked()
    assert [p.cmdline() for host in two_hosts for p in host.processes()] == []
    assert weights(tmp_path / "run", TWO_AND_TWO) == one_host_weights[STARTS[line]]


@pytest.mark.full
def test_torchrun_on_each_host(
    two_hosts: list[Host], one_host_weights: dict[str, str], tmp_path: Path
) -> None:
    """The same command on each host, and nobody types MASTER_ADDR."""
    line = (
        "torchrun --nnodes 2 --nproc-per-node 2 --rdzv-id JOB --rdzv-backend c10d "
        f"--rdzv-endpoint node0:29500 "
        f"ddp_train/train.py {TRAINING} --log-dir {tmp_path} --name torchrun"
    ).split()
    away = subprocess.Popen(
        two_hosts[1].inside(*line), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env={**os.environ, "PATH": SEARCH_PATH},
    )  # fmt: skip
    try:
        two_hosts[0].run(line).checked()
        assert away.wait(60) == 0
    finally:
        away.kill()
        away.wait()
    assert weights(tmp_path / "torchrun", TWO_AND_TWO) == one_host_weights["ddp-gloo"]


@pytest.mark.full
def test_jobs_with_ids_of_their_own_do_not_merge(two_hosts: list[Host], tmp_path: Path) -> None:
    """Two at one port: of each, one host is there before the other one. Without ids the two that
    are there would train together."""
    worker = f"echo > {tmp_path}/$TORCHELASTIC_RUN_ID-$(hostname)-$GROUP_RANK"
    worker += f"; until [ $(ls {tmp_path} | wc -l) = 4 ]; do sleep 0.1; done"
    line = "torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint node0:29500 --rdzv-id"
    node0, node1 = two_hosts
    processes = []
    with contextlib.ExitStack() as running:
        for host, job in ((node0, "a"), (node1, "b"), (node0, "b"), (node1, "a")):
            command = host.inside(*line.split(), job, "--no-python", "sh", "-c", worker)
            process = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                env={**os.environ, "PATH": SEARCH_PATH},
            )  # fmt: skip
            running.callback(process.wait)
            running.callback(process.terminate)
            processes.append(process)
        wait_until(lambda: len(list(tmp_path.iterdir())) == 4)
        # One that is terminated while the others end keeps them waiting for 300 s.
        assert [process.wait(60) for process in processes] == [0] * 4
    places = {tuple(path.name.split("-")) for path in tmp_path.iterdir()}
    assert {place[:2] for place in places} == {
        (job, node) for job in "ab" for node in ("node0", "node1")
    }
    assert {(job, rank) for job, _, rank in places} == {(j, r) for j in "ab" for r in "01"}


@pytest.mark.full
def test_a_comparison_over_two_hosts(two_hosts: list[Host], hostfile: Path, tmp_path: Path) -> None:
    """From one place, each engine by its launchers."""
    names = ("ddp-torchrun", "ddp-mpirun", "horovod-mpi", "horovod-gloo", "horovod-mpirun")
    command = [
        "python", "compare/run.py", "--hostfile", str(hostfile), "--network-interface", "eth0",
        "--configurations", *names, "--workers", "4", "--measure", "runs",
        "--blocks", "1", "--no-warm-up", "--out", str(tmp_path / "comparison"),
        "--", *TRAINING.split(),
    ]  # fmt: skip
    two_hosts[0].run(command, 500, **ENVIRONMENT).checked()
    assert [p.cmdline() for host in two_hosts for p in host.processes()] == []
    runs = sorted((tmp_path / "comparison/block-1").iterdir())
    digests = {run.name.removesuffix("-4"): weights(run, TWO_AND_TWO) for run in runs}
    assert digests.keys() == set(names)
    assert digests["ddp-torchrun"] == digests["ddp-mpirun"]
    assert digests["horovod-mpi"] == digests["horovod-mpirun"]
    report = ["python", "compare/report.py", str(tmp_path / "comparison")]
    assert "4 workers" in two_hosts[0].run(report).checked().output


def test_a_rank_that_fails_on_another_host_ends_all_with_one_message(
    two_hosts: list[Host], tmp_path: Path
) -> None:
    command = (
        "horovodrun -np 4 -H node0:2,node1:2 python horovod_train/train.py --data /nowhere "
        f"--log-dir {tmp_path} --name failed"
    )
    finished = two_hosts[0].run(command.split(), **ENVIRONMENT)
    assert finished.returncode != 0
    assert finished.output.count("/nowhere") >= 1 and "Traceback" not in finished.output
    assert [p.cmdline() for host in two_hosts for p in host.processes()] == []


TORCHRUN = (
    "torchrun --nnodes 2 --rdzv-id JOB --rdzv-backend c10d --rdzv-endpoint node0:29500 "
    "ddp_train/train.py"
)


@pytest.mark.full
@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([TORCHRUN, TORCHRUN], "no batch for 10 s (--stall-timeout)"),
        (
            [
                "mpirun -np 2 -H node0:1,node1:1 --mca oob_tcp_keepalive_time 2 --mca "
                "oob_tcp_keepalive_intvl 1 --mca oob_tcp_keepalive_probes 3 "
                "python ddp_train/train.py"
            ],
            "lost communication with a remote daemon",
        ),
    ],
)
def test_hosts_that_are_cut_off_from_each_other_end_with_their_launchers(
    lines: list[str], said: str, two_hosts: list[Host], tmp_path: Path
) -> None:
    mark = two_hosts[1].namespace.partition("-")[2]
    wire = ("link", "set", f"v1-{mark}")
    options = f"{SMALL} --max-steps 100000 --epochs 9999 --stall-timeout 10 --log-dir {tmp_path}"
    metrics, log = tmp_path / "run" / "metrics.jsonl", tmp_path / "log"

    def stayed() -> list[str]:
        names = [process.name() for host in two_hosts for process in host.processes()]
        return [name for name in names if name != "sshd"]  # which has such limits of its own

    with contextlib.ExitStack() as running:
        output = running.enter_context(log.open("a"))
        for host, line in zip(two_hosts, lines, strict=False):
            process = subprocess.Popen(
                host.inside(*f"{line} {options} --name run".split()), stdout=output, stderr=output,
                start_new_session=True, env={**os.environ, "PATH": SEARCH_PATH, **ENVIRONMENT},
            )  # fmt: skip
            running.callback(process.wait)
            running.callback(process.kill)
        wait_until(lambda: metrics.exists() and '"loss"' in metrics.read_text())
        running.callback(ip, *wire, "master", f"br-{mark}")
        ip(*wire, "nomaster")
        wait_until(lambda: not stayed(), 60)
    assert said in log.read_text()
    named = re.search(r"node[01] \(rank [01]\) does not answer", log.read_text())
    assert len(lines) == 1 or named


def test_nothing_stays_of_the_hosts(tmp_path: Path) -> None:
    def names() -> set[str]:
        """Of network interfaces and namespaces."""
        links = subprocess.check_output(["ip", "-o", "link"], text=True).splitlines()
        namespaces = subprocess.check_output(["ip", "netns", "list"], text=True).splitlines()
        return {line.split()[1] for line in links} | {line.split()[0] for line in namespaces}

    before = names()
    with pytest.raises(KeyboardInterrupt), hosts(tmp_path / "hosts", ("left0", "left1")) as made:
        pids = [host.sshd.pid for host in made]
        assert len(names() - before) == 5  # two namespaces, two ends of wires, a bridge
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
    assert names() - before == set()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
