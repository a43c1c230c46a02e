"""The sbatch scripts on a real Slurm of two nodes; requeue and cancel included."""

import contextlib
import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from hosts import BIN, Host
from launching import SMALL, change_on_rank, rarely, read_json, read_lines, wait_until

from compare.evidence.record import Record
from compare.plan.configurations import CONFIGURATIONS
from compare.plan.launchers import srun_words
from slurm import Slurm, slurm, wait_for

pytestmark = pytest.mark.cluster

# script: tasks on a node, and what is set for it
SCRIPTS = {
    "ddp_srun.sbatch": ("2", {}),
    "ddp_torchrun.sbatch": ("1", {"WORKERS_PER_NODE": "2"}),
    "horovod_srun.sbatch": ("2", {}),
    "horovod_mpirun.sbatch": ("2", {}),
    "horovodrun.sbatch": ("2", {"CONTROLLER": "mpi"}),
    "horovodrun.sbatch over Gloo": ("2", {"CONTROLLER": "gloo"}),
}
ENVIRONMENT = {"OMPI_MCA_rmaps_base_oversubscribe": "1", "VENV": str(BIN.parent)}
LOGGED = "--log-interval 2"
CHECKPOINTED = f"{SMALL} {LOGGED} --checkpoint-steps 10"
LONG = f"{SMALL} --epochs 500 --max-steps 100000"
# Slurm may take some seconds until it preempts a job.
SLOW = """
import time
real = module.seed_step
def seed_step(*words):
    time.sleep(0.2)
    real(*words)
module.seed_step = seed_step
"""


@pytest.fixture(scope="module")
def cluster(two_hosts: list[Host], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm(two_hosts, tmp_path_factory.mktemp("slurm") / "slurm") as up:
        yield up


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a job's run."""
    return tmp_path / "job"


def submit(cluster: Slurm, script: str, folder: Path, training: str, *words: str) -> str:
    """Submit one of slurm/, whose run and log are to be in `folder`; return the job's number."""
    tasks, variables = SCRIPTS[script]
    folder.parent.mkdir(parents=True, exist_ok=True)
    place = {"RUNS": str(folder.parent), "NAME": folder.name}
    flags = ["--ntasks-per-node", tasks, "--gpus-per-node", "2", "--output", f"{folder}.log"]
    command = ["sbatch", "--parsable", *flags, *words, f"slurm/{script.split()[0]}"]
    environ = {**ENVIRONMENT, **variables, **place}
    return cluster.run([*command, *training.split()], **environ).checked().output.strip()


def wait_for_requeue(cluster: Slurm, job: str) -> None:
    """Wait until a job is in the queue again, where Slurm would let it wait for two minutes; not
    at all would be too short: its nodes refuse a job whose last start they ended a second ago."""

    wait_for(lambda: cluster.state(job) == "PENDING", cluster)
    cluster.ask("scontrol", "update", f"JobId={job}", "StartTime=now+4")


def wait_for_end(cluster: Slurm, job: str, folder: Path, state: str = "COMPLETED") -> None:
    wait_for(lambda: ended(cluster, job), cluster)
    assert cluster.state(job) == state, Path(f"{folder}.log").read_text()


def wait_for_steps(cluster: Slurm, folder: Path, count: int = 1) -> None:
    def there() -> bool:
        return (folder / "metrics.jsonl").exists() and len(read_lines(folder, "step")) >= count

    wait_for(there, cluster)


def ended(cluster: Slurm, job: str) -> bool:
    return cluster.state(job) not in ("PENDING", "RUNNING", "CONFIGURING", "COMPLETING")


def training_processes(host: Host) -> list[psutil.Process]:
    """What trains on a host, and what starts it there."""
    found = []
    for process in host.processes():
        with contextlib.suppress(psutil.Error):
            if any("train.py" in word for word in process.cmdline()):
                found.append(process)
    return found


def leftovers(hosts: list[Host]) -> list[psutil.Process]:
    return [process for host in hosts for process in training_processes(host)]


@pytest.mark.parametrize(
    "script", [s if s == "horovod_srun.sbatch" else rarely(s) for s in SCRIPTS]
)
def test_a_script_trains_on_two_nodes(script: str, cluster: Slurm, folder: Path) -> None:
    job = submit(cluster, script, folder, f"{SMALL} --max-steps 12")
    wait_for_end(cluster, job, folder)
    environment = read_json(folder / "environment.json")
    assert environment["world_size"] == 4
    assert environment["rank_hosts"] == ["node0", "node0", "node1", "node1"]
    assert read_json(folder / "summary.json")["steps"] == 12
    assert "Restarts=0" in cluster.ask("scontrol", "show", "job", job)
    assert leftovers(cluster.hosts) == []


@pytest.mark.parametrize(
    ("how", "stops"), [("preempted", [["stop"]]), rarely("requeued", [["stop"], []])]
)
def test_a_job_that_is_ended_early_goes_on(
    how: str, stops: list[list[str]], trained: Callable[..., Path], cluster: Slurm, folder: Path
) -> None:
    """By `scontrol requeue` in mid-training, with a SIGTERM that may come in time or not; or by a
    job that may preempt it, with the warning that --signal asks for. Both end with the weights of a
    training on one host that nobody disturbed. (Of two ranks: DDP orders its buckets anew after its
    first step, also after a resume, and a ring of more ranks then adds in another order.)"""
    slow = change_on_rank(None, "recipe.training.model", SLOW, folder.parent)
    words = ("--ntasks-per-node", "1", f"--export=ALL,PYTHONPATH={slow['PYTHONPATH']}")
    job = submit(cluster, "ddp_srun.sbatch", folder, CHECKPOINTED, *words)
    wait_for_steps(cluster, folder, 12)
    if how == "requeued":
        cluster.ask("scontrol", "requeue", job)
    else:
        urgent = ["--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null"]
        cluster.ask("sbatch", *urgent, "--wrap", "true")
    wait_for_requeue(cluster, job)
    wait_for_end(cluster, job, folder)
    first, *stop, second, last = [event["name"] for event in read_lines(folder, "event")]
    assert stop in stops and [first, second, last] == ["start", "resume", "end"]
    assert "Restarts=1" in cluster.ask("scontrol", "show", "job", job)
    whole = read_json(trained("torchrun", "ddp", LOGGED) / "summary.json")
    assert read_json(folder / "summary.json")["weights_sha256"] == whole["weights_sha256"]


@pytest.mark.full
def test_torchrun_goes_on_with_the_nodes_that_are_left(cluster: Slurm, folder: Path) -> None:
    """One node's torchrun and its workers vanish at once: the other goes on at half the size."""
    training = f"{SMALL} --epochs 3 --max-steps 90 --checkpoint-steps 2"
    words = ("--no-kill", "--export=ALL,MIN_NODES=1")
    job = submit(cluster, "ddp_torchrun.sbatch", folder, training, *words)
    wait_for_steps(cluster, folder, 4)
    for process in training_processes(cluster.hosts[1]):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    wait_for(lambda: (folder / "summary.json").exists(), cluster)
    wait_for(lambda: ended(cluster, job), cluster)
    assert read_json(folder / "environment.json")["world_size"] == 2
    steps = read_lines(folder, "step")
    assert [step["step"] for step in steps] == list(range(1, 91))
    samples = [step["samples_seen"] for step in steps]
    assert {after - before for before, after in pairwise(samples)} == {4 * 12, 2 * 12}


# Each rank in turn comes late to a fence.
FENCES = """
import ctypes, json, os, sys, time
pmix, rank = ctypes.CDLL("libpmix.so"), int(os.environ["SLURM_PROCID"])
assert pmix.PMIx_Init(ctypes.create_string_buffer(1024), None, 0) == 0
times = []
for turn in range(8):
    time.sleep(0.2 * (turn % 4 == rank))
    came = time.time()
    assert pmix.PMIx_Fence(None, 0, None, 0) == 0
    times.append((came, time.time()))
with open(f"{sys.argv[1]}/{rank}.json", "w") as file:
    json.dump(times, file)
pmix.PMIx_Finalize(None, 0)
"""


def test_no_rank_passes_a_fence_before_all_have_come(cluster: Slurm, tmp_path: Path) -> None:
    """Else MPI_Init of Horovod's ranks crashes at times: see slurm/horovod_srun.sbatch."""
    _, *flags, _ = srun_words(CONFIGURATIONS["horovod-srun"], 4, None)
    command = ["srun", "--nodes=2", "--ntasks-per-node=2", *flags, "python", "-c", FENCES]
    cluster.run([*command, str(tmp_path)]).checked()
    ranks = [read_json(tmp_path / f"{rank}.json") for rank in range(4)]
    for fence in zip(*ranks, strict=True):
        last_came = max(came for came, _ in fence)
        assert all(went >= last_came for _, went in fence), fence


@pytest.mark.full
def test_a_job_that_loses_a_node_is_queued_again(cluster: Slurm, folder: Path) -> None:
    """Without MIN_NODES: nobody waits for what is gone."""
    job = submit(cluster, "ddp_torchrun.sbatch", folder, LONG)
    wait_for_steps(cluster, folder)
    cluster.ask("scontrol", "update", "NodeName=node1", "State=DOWN", "Reason=lost")
    try:
        wait_for(lambda: cluster.state(job) == "PENDING", cluster)
    finally:
        cluster.ask("scancel", job)
        # An error if it has come back by itself, since its slurmd still lives.
        cluster.run(["scontrol", "update", "NodeName=node1", "State=RESUME"])
    assert leftovers(cluster.hosts[:1]) == []


@pytest.mark.full
def test_a_rank_0_that_cannot_start_ends_its_job(cluster: Slurm, folder: Path) -> None:
    """Its port is taken, here by sshd, and the others would wait for it there."""
    taken = "--export=ALL,MASTER_ADDR=node0,MASTER_PORT=22"
    job = submit(cluster, "ddp_srun.sbatch", folder, LONG, taken)
    wait_for_end(cluster, job, folder, "FAILED")
    assert "address already in use" in Path(f"{folder}.log").read_text()


@pytest.mark.full
def test_a_comparison_in_a_job(cluster: Slurm, tmp_path: Path) -> None:
    folder = tmp_path / "comparison"
    training = SMALL.replace("--max-steps 70", "--max-steps 20")
    command = [
        "sbatch",
        "--parsable",
        "--wait",
        "--ntasks-per-node",
        "2",
        "--gpus-per-node",
        "2",
        "--output",
        f"{tmp_path}/job.log",
        "slurm/compare.sbatch",
        "--out",
        str(folder),
        "--workers",
        "4",
        "--measure",
        "runs",
        "--blocks",
        "1",
        "--no-warm-up",
        "--goals",
        "ddp-srun:horovod-srun=0.9",
        "--configurations",
        "ddp-srun",
        "horovod-srun",
        "--",
        *training.split(),
    ]
    finished = cluster.run(command, **ENVIRONMENT, CHECK="--check")
    log = (tmp_path / "job.log").read_text()
    assert finished.returncode == 3, (finished.output, log)
    assert log.splitlines()[-1].endswith("≥ 0.900: an interval needs 3 blocks.")
    assert log.partition("\nrecord: ")[0].count(" images/s") == 2
    for name in ("ddp-srun", "horovod-srun"):
        environment = read_json(folder / f"block-1/{name}-4/environment.json")
        assert environment["rank_hosts"] == ["node0"] * 2 + ["node1"] * 2
    assert Record.open(folder).plan.named_hosts == "slurm"
    report = cluster.run(["python", "compare/report.py", str(folder), "--json"]).checked()
    verdicts = json.loads(report.output)["verdicts"]
    assert [verdict["differences"] for verdict in verdicts] == [[]]


@pytest.mark.parametrize("script", ["horovod_mpirun.sbatch", rarely("ddp_srun.sbatch")])
def test_a_cancelled_job_leaves_nothing(script: str, cluster: Slurm, folder: Path) -> None:
    job = submit(cluster, script, folder, LONG, "--ntasks-per-node", "1")
    wait_for_steps(cluster, folder)
    assert all(map(training_processes, cluster.hosts))
    cluster.ask("scancel", job)
    wait_for_end(cluster, job, folder, "CANCELLED")
    wait_until(lambda: leftovers(cluster.hosts) == [])


# ---- measuring by turns over several hosts, and in an allocation ----


# A block of two rounds, of two ranks on a host each.
BLOCK = """
import sys
from pathlib import Path
import msgspec
from compare.plan.configurations import CONFIGURATIONS
from compare.plan.plan import Plan, Run
from compare.running import scheduler
scheduler.PATIENCE = 0.0
hosts = "node0:1,node1:1"
training = ("--arch", "shufflenet_v2_x0_5", "--train-crop-size", "16", "--threads", "1")
folder, *names = sys.argv[1:]
runs = [Run(1, CONFIGURATIONS[name], 2, 1, flags=training, hosts=hosts) for name in names]
place = Path(folder)
[line] = scheduler.run_blocks([runs], Plan(steps=2), place, print, lambda *_: 2)
(place / "block.json").write_bytes(msgspec.json.encode(line.block))
"""


def check(folder: Path, names: tuple[str, ...]) -> None:
    """Each side had a rank on each host, and its turns."""
    every = read_json(folder / "block.json")["turns"]
    turns = [turn for turn in every if turn["purpose"] == "speed"]  # what others disturbed stays
    assert [turn["side"] for turn in turns] == [*names, *reversed(names)]
    assert all(turn["images"] > 0 and turn["seconds"] > 0 for turn in turns)
    for name in names:
        environment = read_json(folder / name / "0" / "run" / "environment.json")
        assert environment["rank_hosts"] == ["node0", "node1"]


@pytest.mark.launch  # turns need both cores
def test_turns_over_two_hosts(two_hosts: list[Host], tmp_path: Path) -> None:
    names = ("ddp-torchrun", "horovod-gloo")
    folder = tmp_path / "block-1"
    two_hosts[0].run(["python", "-c", BLOCK, str(folder), *names]).checked()
    check(folder, names)
    assert leftovers(two_hosts) == []


@pytest.mark.full
@pytest.mark.launch
def test_turns_inside_an_allocation(cluster: Slurm, tmp_path: Path) -> None:
    """Steps of one job at once: each has all its cores."""
    names = ("ddp-srun", "horovod-srun", "ddp-mpirun")
    folder = tmp_path / "block-1"
    allocate = ["salloc", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=2"]
    cluster.run([*allocate, "python", "-c", BLOCK, str(folder), *names]).checked()
    check(folder, names)
