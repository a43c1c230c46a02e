"""The sbatch scripts on a real Slurm of two nodes; requeue and cancel included."""

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import BIN, Host, hosts
from launching import SMALL, read_json, read_lines

from slurm import Slurm, slurm, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

SCRIPTS = {
    "ddp_srun.sbatch": ("2", {}),
    "ddp_torchrun.sbatch": ("1", {"WORKERS_PER_NODE": "2"}),
    "horovod_mpirun.sbatch": ("2", {}),
    "horovodrun.sbatch": ("2", {"CONTROLLER": "gloo"}),
}
ENVIRONMENT = {"OMPI_MCA_rmaps_base_oversubscribe": "1", "VENV": str(BIN.parent)}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    folder = tmp_path_factory.mktemp("slurm")
    with hosts(folder / "hosts") as made, slurm(made, folder / "slurm") as up:
        yield up


def submit(cluster: Slurm, script: str, *words: str, **environ: str) -> str:
    """Submit one of slurm/ and return the job's number."""
    tasks, variables = SCRIPTS[script]
    flags = ["--ntasks-per-node", tasks, "--gpus-per-node", "2"]
    command = ["sbatch", "--parsable", *flags, *words]
    finished = cluster.run(command, 60, **ENVIRONMENT, **variables, **environ)
    assert finished.returncode == 0, finished.output
    return finished.output.strip()


def ended(cluster: Slurm, job: str) -> bool:
    return cluster.state(job) not in ("PENDING", "RUNNING", "CONFIGURING", "COMPLETING")


def leftovers(hosts: list[Host]) -> list[str]:
    """What still trains on the hosts."""
    found = []
    for host in hosts:
        for process in host.processes():
            line = " ".join(process.cmdline())
            if "train.py" in line:
                found.append(line)
    return found


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_trains_on_two_nodes(script: str, cluster: Slurm, tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    training = f"{SMALL} --max-steps 12 --log-dir {tmp_path} --name job".split()
    job = submit(cluster, script, "--output", str(log), f"slurm/{script}", *training)
    wait_for(lambda: ended(cluster, job), cluster, 300)
    assert cluster.state(job) == "COMPLETED", log.read_text()
    environment = read_json(tmp_path / "job/environment.json")
    assert environment["world_size"] == 4
    assert environment["rank_hosts"] == ["node0", "node0", "node1", "node1"]
    assert read_json(tmp_path / "job/summary.json")["steps"] == 12
    assert leftovers(cluster.hosts) == []


def test_a_job_that_is_queued_again_goes_on(cluster: Slurm, tmp_path: Path) -> None:
    """As after a preemption: `scontrol requeue` in mid-training, and the weights are those of a
    training that nobody disturbed. (Of two ranks: DDP orders its buckets anew after its first step,
    also after a resume, and a ring of more ranks then adds in another order.)"""
    digests = []
    for name in ("whole", "requeued"):
        log = tmp_path / f"{name}.log"
        training = (f"{SMALL} --max-steps 60 --log-dir {tmp_path} --checkpoint-steps 10").split()
        one_a_node = ["--ntasks-per-node", "1", "--output", str(log)]
        script = [*one_a_node, "slurm/ddp_srun.sbatch", *training, "--name", name]
        job = submit(cluster, "ddp_srun.sbatch", *script)
        if name == "requeued":
            checkpoints = tmp_path / name / "checkpoints"
            wait_for(lambda folder=checkpoints: len(list(folder.glob("*"))) >= 2, cluster, 200)
            cluster.ask("scontrol", "requeue", job)
        wait_for(lambda job=job: ended(cluster, job), cluster, 400)
        assert cluster.state(job) == "COMPLETED", log.read_text()
        digests.append(read_json(tmp_path / name / "summary.json")["weights_sha256"])
    assert re.search(r"Restarts=1", cluster.ask("scontrol", "show", "job", job))
    events = [event["name"] for event in read_lines(tmp_path / "requeued", "event")]
    assert "resume" in events
    assert digests[0] == digests[1]


def test_a_cancelled_job_leaves_nothing(cluster: Slurm, tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    training = f"{SMALL} --epochs 500 --max-steps 100000 --log-dir {tmp_path} --name job".split()
    script = ["--output", str(log), "slurm/ddp_srun.sbatch", *training]
    job = submit(cluster, "ddp_srun.sbatch", *script)
    metrics = tmp_path / "job/metrics.jsonl"
    wait_for(lambda: metrics.exists() and read_lines(metrics.parent, "step"), cluster, 200)
    assert leftovers(cluster.hosts)
    cluster.ask("scancel", job)
    wait_for(lambda: ended(cluster, job), cluster, 100)
    assert cluster.state(job) == "CANCELLED"
    deadline = time.monotonic() + 30
    while leftovers(cluster.hosts) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert leftovers(cluster.hosts) == []
