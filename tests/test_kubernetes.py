"""The jobs of docker/k8s/: they fit their schemas, and agree with the trainers and the image.

No cluster is needed, and none is here: what docs/kubernetes.md says was not run, was not.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from making import write_program
from torch.distributed.run import get_args_parser

from recipe.settings.config import Config, parse_args
from recipe.world import World

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docker" / "k8s"
IMAGE = "imagenet-horovod-ddp:cuda"
HOROVOD = ("horovod-mpijob.yaml", "horovod-mpijob-elastic.yaml")
DDP = ("ddp-trainjob.yaml", "ddp-trainjob-elastic.yaml")
JOBS = HOROVOD + DDP
WORKERS, NODES = 8, 2  # in all jobs, so that their runs can be compared

Document = dict[str, Any]


def documents(name: str) -> list[Document]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def of_kind(name: str, kind: str) -> Document:
    [found] = [document for document in documents(name) if document["kind"] == kind]
    return found


# ---- schemas


def fields(required: str = "", **properties: Document) -> Document:
    """The schema of an object that has these fields and no other."""
    known = {"type": "object", "properties": properties, "additionalProperties": False}
    return known | {"required": required.split()}


TEXT, NUMBER, FLAG, OBJECT = ({"type": t} for t in ("string", "integer", "boolean", "object"))
REPLICAS = fields(
    "replicas restartPolicy template",
    replicas=NUMBER,
    restartPolicy={"enum": ["Never", "OnFailure"]},  # of its schema's the operator takes these
    template=OBJECT,  # a core v1 PodTemplateSpec
)
# MPIJob v2beta1, as of MPI Operator 0.8: no package has its schema, so its few own fields are
# described here. What is in it of Kubernetes itself, the pods, has one (see `check`).
MPIJOB = fields(
    "apiVersion kind metadata spec",
    apiVersion={"const": "kubeflow.org/v2beta1"},
    kind={"const": "MPIJob"},
    metadata=fields("name", name=TEXT),
    spec=fields(
        "mpiReplicaSpecs runPolicy",
        launcherCreationPolicy={"enum": ["AtStartup", "WaitForWorkersReady"]},
        mpiImplementation={"enum": ["OpenMPI", "Intel", "MPICH"]},
        mpiReplicaSpecs=fields("Launcher Worker", Launcher=REPLICAS, Worker=REPLICAS),
        runLauncherAsWorker=FLAG,
        runPolicy=fields(
            activeDeadlineSeconds=NUMBER,
            backoffLimit=NUMBER,
            cleanPodPolicy={"enum": ["None", "Running", "All"]},
            managedBy=TEXT,
            schedulingPolicy=OBJECT,
            suspend=FLAG,
            ttlSecondsAfterFinished=NUMBER,
        ),
        slotsPerWorker=NUMBER,
        sshAuthMountPath=TEXT,
    ),
)
# The models that Kubeflow generates from the schemas of its CRDs and of Kubernetes.
MODELS = {
    ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"): "TrainerV1alpha1TrainingRuntime",
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): "TrainerV1alpha1TrainJob",
    ("v1", "PersistentVolumeClaim"): "IoK8sApiCoreV1PersistentVolumeClaim",
}


def check(document: Document) -> None:
    """Raise an error if `document` does not fit the schema of its kind."""
    kind = document["kind"]
    if kind == "MPIJob":
        jsonschema.validate(document, MPIJOB)
        for role, replicas in document["spec"]["mpiReplicaSpecs"].items():
            check_model("IoK8sApiCoreV1PodTemplateSpec", replicas["template"], role)
    else:
        check_model(MODELS[document["apiVersion"], kind], document, kind)


def worker(name: str) -> Document:
    """The container that trains."""
    [container] = pods(name)["Worker"]["containers"]
    return container


def check_model(name: str, document: Document, path: str) -> None:
    """These models see wrong types, but leave out what they do not know: so nothing may be lost."""
    from kubeflow_trainer_api import models  # takes a second, and each process collects all tests

    known = getattr(models, name).from_dict(document).to_dict()  # which may have defaults besides
    assert set(leaves(document, path)) <= set(leaves(known, path))


def leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (dict, list)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(inner, f"{path}.{key}")
    else:
        yield path, value


@pytest.mark.parametrize("name", [*JOBS, "volumes.yaml"])
def test_each_document_fits_its_schema(name: str) -> None:
    for document in documents(name):
        check(document)


# ---- what is started


def pods(name: str) -> dict[str, Document]:
    """The specs of a job's pods, by their role."""
    found = {}
    for document in documents(name):
        spec = document["spec"]
        if document["kind"] == "MPIJob":
            for role, replicas in spec["mpiReplicaSpecs"].items():
                found[role] = replicas["template"]["spec"]
        elif document["kind"] == "TrainingRuntime":
            [job] = spec["template"]["spec"]["replicatedJobs"]
            found["Worker"] = job["template"]["spec"]["template"]["spec"]
    return found


def limits(name: str) -> Document:
    """Of its resources."""
    if name in DDP:
        return of_kind(name, "TrainJob")["spec"]["trainer"]["resourcesPerNode"]["limits"]
    return worker(name)["resources"]["limits"]


def command(name: str) -> list[str]:
    """What is started, if all workers are there."""
    if name in DDP:
        trainer = of_kind(name, "TrainJob")["spec"]["trainer"]
        return trainer["command"] + trainer["args"]
    if name == "horovod-mpijob.yaml":
        [launcher] = pods(name)["Launcher"]["containers"]
        return launcher["command"] + launcher["args"]
    with tempfile.TemporaryDirectory() as folder:
        return started(launch(Path(folder), [FIRST, SECOND], [FIRST, SECOND]))


def started(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The command that the elastic launcher's script has come to."""
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()
    return words[words.index("mpirun") :]


def flags(name: str) -> Config:
    """The trainer's own view of its flags."""
    words = command(name)
    [script] = [word for word in words if word.endswith("train.py")]
    engine = "horovod" if name in HOROVOD else "ddp"
    assert script == f"{engine}_train/train.py"
    assert (ROOT / script).exists()
    world = World(0, WORKERS, 0, WORKERS // NODES, "torchrun", "here")
    return parse_args(engine, world, words[words.index(script) + 1 :])


@pytest.fixture(autouse=True)
def refused_flags_end_no_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "_exit", sys.exit)


@pytest.mark.parametrize("name", JOBS)
def test_the_trainers_take_their_flags(name: str) -> None:
    config = flags(name)
    kind = "MPIJob" if name in HOROVOD else "TrainJob"
    assert config.name == of_kind(name, kind)["metadata"]["name"]
    # So a job that is started anew goes on.
    assert (config.resume, config.checkpoint_steps) == ("auto", 500)
    mounts = worker(name)["volumeMounts"]
    folders = {m["mountPath"]: (m["name"], m.get("readOnly", False)) for m in mounts}
    assert folders[config.data] == ("data", True)
    assert folders[config.log_dir] == ("runs", False)
    assert config.cache_dir.startswith(config.log_dir + "/")


def test_all_jobs_train_the_same() -> None:
    first, *others = [flags(name) for name in JOBS]
    for other in others:
        assert vars(other) == {**vars(first), "name": other.name}
    assert len({flags(name).name for name in JOBS}) == len(JOBS)  # no run writes into another's


@pytest.mark.parametrize("name", HOROVOD)
def test_mpirun_starts_a_rank_a_gpu(name: str) -> None:
    spec, words = of_kind(name, "MPIJob")["spec"], command(name)
    assert words[0] == "mpirun" and words[words.index("-np") + 1] == str(WORKERS)
    assert spec["mpiReplicaSpecs"]["Worker"]["replicas"] * spec["slotsPerWorker"] == WORKERS
    assert limits(name)["nvidia.com/gpu"] == spec["slotsPerWorker"]


@pytest.mark.parametrize("name", DDP)
def test_torchrun_starts_a_rank_a_gpu(name: str) -> None:
    job, runtime = of_kind(name, "TrainJob")["spec"], of_kind(name, "TrainingRuntime")
    expected = {"name": runtime["metadata"]["name"], "kind": runtime["kind"]}
    assert job["runtimeRef"].items() >= expected.items()
    assert runtime["spec"]["mlPolicy"] == {"numNodes": NODES, "torch": {}}
    [replicated] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    labels = replicated["template"]["metadata"]["labels"]
    assert labels["trainer.kubeflow.org/trainjob-ancestor-step"] == "trainer"
    # Trainer looks for these names, and leaves alone what is called otherwise.
    assert (replicated["name"], worker(name)["name"]) == ("node", "node")
    trainer = job["trainer"]
    assert trainer["numNodes"] * trainer["numProcPerNode"] == WORKERS
    assert limits(name)["nvidia.com/gpu"] == trainer["numProcPerNode"]


def test_torchrun_takes_the_flags_that_make_it_elastic() -> None:
    program, *words = command("ddp-trainjob-elastic.yaml")
    job = of_kind("ddp-trainjob-elastic.yaml", "TrainJob")
    expected = {
        "nnodes": f"1:{NODES}",
        "nproc_per_node": str(WORKERS // NODES),
        "rdzv_id": job["metadata"]["name"],
        "rdzv_backend": "c10d",  # the default, static, has no way to grow or shrink
        "rdzv_endpoint": "$(PET_MASTER_ADDR):$(PET_MASTER_PORT)",  # Kubernetes fills it in
        "training_script": "ddp_train/train.py",
    }
    assert program == "torchrun"
    assert vars(get_args_parser().parse_args(words)).items() >= expected.items()
    variable = {"name": "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "value": "1"}
    assert variable in job["spec"]["trainer"]["env"]


# The elastic launcher's script, with an mpirun that says what it was told and an ssh that reaches
# the hosts which are named in ALIVE.
MPIRUN = 'printf "%s\\n" mpirun "$@"\n'
SSH = 'case " $ALIVE " in *" $3 "*) exit 0;; *) exit 255;; esac\n'


def launch(folder: Path, listed: list[str], alive: list[str]) -> subprocess.CompletedProcess[str]:
    """Run the elastic launcher's script."""
    discover = "".join(f"echo {host}\n" for host in listed)  # as the operator's
    programs = {"mpirun": MPIRUN, "ssh": SSH, "sleep": "", "discover": discover}
    for name, text in programs.items():
        write_program(folder / name, text)
    [launcher] = pods("horovod-mpijob-elastic.yaml")["Launcher"]["containers"]
    assert "/etc/mpi/discover_hosts.sh" in launcher["args"][0]
    script = launcher["args"][0].replace("/etc/mpi/discover_hosts.sh", f"{folder}/discover")
    environ = {"PATH": f"{folder}:{os.environ['PATH']}", "ALIVE": " ".join(alive)}
    words = [*launcher["command"], script]
    return subprocess.run(words, env=environ, capture_output=True, text=True)


FIRST, SECOND = "horovod-elastic-worker-0.horovod-elastic.default.svc", "worker-1.job.default.svc"


@pytest.mark.parametrize(
    ("listed", "alive", "ranks", "hosts"),
    [
        ([FIRST, SECOND], [FIRST, SECOND], "8", f"{FIRST}:4,{SECOND}:4"),
        ([FIRST], [FIRST], "4", f"{FIRST}:4"),
        ([FIRST, SECOND], [SECOND], "4", f"{SECOND}:4"),  # the list may be a minute old
    ],
)
def test_the_elastic_launcher_takes_the_workers_that_answer(
    listed: list[str], alive: list[str], ranks: str, hosts: str, tmp_path: Path
) -> None:
    words = started(launch(tmp_path, listed, alive))
    assert (words[words.index("-np") + 1], words[words.index("-H") + 1]) == (ranks, hosts)


@pytest.mark.parametrize("listed", [[FIRST, SECOND], []])
def test_the_elastic_launcher_fails_without_a_worker(listed: list[str], tmp_path: Path) -> None:
    done = launch(tmp_path, listed, [])
    assert done.returncode == 1 and "no worker answers" in done.stderr
    assert "mpirun" not in done.stdout


@pytest.mark.parametrize("name", HOROVOD)
def test_a_drained_worker_tells_its_ranks(name: str, tmp_path: Path) -> None:
    """And waits for their end: a rank here ends a second after it was told."""
    worker = of_kind(name, "MPIJob")["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]
    words = worker["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert worker["terminationGracePeriodSeconds"] == 60
    told, proc = tmp_path / "told", tmp_path / "proc"
    dies = f"trap 'touch {told}; sleep 1; rm -r {proc}/$$; exit' USR1; echo; "
    dies += "while :; do sleep 0.1; done"
    with subprocess.Popen(["sh", "-c", dies], stdout=subprocess.PIPE) as rank:
        assert rank.stdout.readline()
        for pid, cmdline in ((rank.pid, "python\0horovod_train/train.py\0"), (1, "sshd\0-D\0")):
            (proc / str(pid)).mkdir(parents=True)
            (proc / str(pid) / "cmdline").write_text(cmdline)
        try:
            own = [word.replace("/proc", str(proc)) for word in words]
            subprocess.run(own, check=True)
            assert told.exists() and not (proc / str(rank.pid)).exists()
        finally:
            rank.kill()


# ---- volumes and the image


@pytest.mark.parametrize("name", JOBS)
def test_volumes_exist(name: str) -> None:
    claimed = set()
    for pod in pods(name).values():
        mounted = [m["name"] for c in pod["containers"] for m in c.get("volumeMounts", [])]
        volumes = pod.get("volumes", [])
        assert sorted(mounted) == sorted(volume["name"] for volume in volumes)
        for volume in volumes:
            if claim := volume.get("persistentVolumeClaim"):
                claimed.add((volume["name"], claim["claimName"], claim.get("readOnly", False)))
    assert claimed == {("data", "imagenet-data", True), ("runs", "imagenet-runs", False)}
    claims = documents("volumes.yaml")
    modes = {claim["metadata"]["name"]: claim["spec"]["accessModes"] for claim in claims}
    assert modes == {"imagenet-data": ["ReadOnlyMany"], "imagenet-runs": ["ReadWriteMany"]}


@pytest.mark.parametrize("name", JOBS)
def test_shared_memory_is_memory_and_fits_into_the_limit(name: str) -> None:
    mounts = {m["mountPath"]: m["name"] for m in worker(name)["volumeMounts"]}
    volumes = {v["name"]: v for v in pods(name)["Worker"]["volumes"]}
    memory = volumes[mounts["/dev/shm"]]["emptyDir"]
    sizes = [
        re.fullmatch(r"(\d+)Gi", size) for size in (memory["sizeLimit"], limits(name)["memory"])
    ]
    assert memory["medium"] == "Memory" and int(sizes[0][1]) < int(sizes[1][1])


@pytest.mark.parametrize("name", JOBS)
def test_the_image_is_meant(name: str) -> None:
    """Its user, who is not root; its home; its sshd's port; and the folder that commands start in,
    which no job changes."""
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text()
    sshd_config = (ROOT / "docker" / "sshd_config").read_text()
    user = re.search(r"useradd --uid (\d+) .*?(\w+) *\\?$", dockerfile, re.MULTILINE)
    port = re.search(r"^Port (\d+)$", sshd_config, re.MULTILINE)
    assert re.search(r"^FROM .* AS cuda$", dockerfile, re.MULTILINE)  # IMAGE's target
    assert "WORKDIR /workspace" in dockerfile
    may = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    who = dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), int(user[1]))
    for pod in pods(name).values():
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"].items() >= {"runAsNonRoot": True, **who}.items()
        for container in pod["containers"]:
            assert container["image"] == IMAGE and "workingDir" not in container
            assert container["securityContext"].items() >= may.items()
    if name in HOROVOD:
        home = f"/home/{user[2]}/.ssh"
        assert of_kind(name, "MPIJob")["spec"]["sshAuthMountPath"] == home
        assert f"HostKey {home}/id_rsa" in sshd_config  # the name that the operator gives it
        number, sshd = int(port[1]), ["/usr/sbin/sshd", "-D", "-e"]
        expected = {"command": sshd, "ports": [{"containerPort": number}]}
        assert worker(name).items() >= expected.items()
        assert worker(name)["startupProbe"]["tcpSocket"] == {"port": number}


def test_the_page_names_every_file() -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    files = {file.name for file in FOLDER.iterdir()}
    assert files == {*JOBS, "volumes.yaml"}
    assert all(name in page for name in files)
    assert set(re.findall(r"docker/k8s/([\w-]+\.yaml)", page)) <= files
