"""The README's start lines on two hosts: each runs as it stands there and ends with the weights
that the same training on one host ends with."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hosts import SEARCH_PATH, Host, hosts, left_behind
from launching import GUARD_S, ROOT, SMALL, Finished, read_json

pytestmark = pytest.mark.cluster

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
    line: str,
    two_hosts: list[Host],
    one_host_weights: dict[str, str],
    hostfile: Path,
    tmp_path: Path,
) -> None:
    command = line.replace("HOSTFILE", str(hostfile)).split()
    command += f"{TRAINING} --log-dir {tmp_path} --name run".split()
    two_hosts[0].run(command, **ENVIRONMENT).checked()
    assert left_behind(two_hosts) == []
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
        two_hosts[1].inside(*line),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PATH": SEARCH_PATH},
    )
    try:
        two_hosts[0].run(line).checked()
        assert away.wait(GUARD_S) == 0
    finally:
        away.kill()
        away.wait()
    assert weights(tmp_path / "torchrun", TWO_AND_TWO) == one_host_weights["ddp-gloo"]


@pytest.mark.full
def test_a_comparison_over_two_hosts(two_hosts: list[Host], hostfile: Path, tmp_path: Path) -> None:
    """From one place, each engine by its launchers."""
    names = ("ddp-torchrun", "ddp-mpirun", "horovod-mpi", "horovod-gloo", "horovod-mpirun")
    command = [
        "python",
        "compare/run.py",
        "--hostfile",
        str(hostfile),
        "--network-interface",
        "eth0",
        "--configurations",
        *names,
        "--workers",
        "4",
        "--measure",
        "runs",
        "--blocks",
        "1",
        "--no-warm-up",
        "--out",
        str(tmp_path / "comparison"),
        "--",
        *TRAINING.split(),
    ]
    two_hosts[0].run(command, **ENVIRONMENT).checked()
    assert left_behind(two_hosts) == []
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
    assert left_behind(two_hosts) == []


def test_nothing_stays_of_the_hosts(tmp_path: Path) -> None:
    def names(mark: str) -> set[str]:
        """Of these hosts' network interfaces and namespaces."""
        shown = [subprocess.check_output(["ip", *w], text=True) for w in (["link"], ["netns"])]
        return {word for text in shown for word in re.findall(r"[\w-]+", text) if mark in word}

    with pytest.raises(KeyboardInterrupt), hosts(tmp_path / "hosts", ("left0", "left1")) as made:
        pids, mark = [host.sshd.pid for host in made], made[0].namespace.partition("-")[2]
        assert len(names(mark)) == 5  # two namespaces, two ends of wires, a bridge
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
    assert names(mark) == set()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


# ---- a user who is not root, as nearly all users are ----


UID = 4711
NEEDED = (ROOT, Path(sys.prefix), Path(sys.base_prefix))  # what each host must let the user read


@dataclass
class User:
    """A user whom the hosts know, and this machine does not."""

    home: Path
    hosts: list[Host]

    def run(self, command: list[str]) -> Finished:
        """Run a command on the first host, as this user would at a shell."""
        variables = [f"HOME={self.home}", "USER=someone", "LOGNAME=someone"]
        who = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "env"]
        return self.hosts[0].run([*who, *variables, *command])


@pytest.fixture(scope="module")
def user() -> Iterator[User]:
    # Not pytest's own temporary folder, which is root's alone.
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        place.chmod(0o755)
        with hosts(place / "hosts") as made:
            (place / "hosts").chmod(0o755)  # sshd reads the key as the user
            home = make_home(place)
            for host in made:
                host.run(["sh", "-ec", open_up(place)])
            yield User(home, made)


def make_home(place: Path) -> Path:
    """Make the user's home and key, and what the hosts are to know of the user."""
    home = place / "home"
    (home / ".ssh").mkdir(parents=True, mode=0o700)
    shutil.copy(place / "hosts/key", home / ".ssh/key")
    (home / ".ssh/config").write_text("IdentityFile ~/.ssh/key\n")
    for path in (home, *home.rglob("*")):
        shutil.chown(path, UID, UID)
    lines = {
        "passwd": f"someone:x:{UID}:{UID}::{home}:/bin/bash\n",
        "group": f"someone:x:{UID}:\n",
        "shadow": "someone:*:20000::::::\n",
    }
    for name, line in lines.items():
        (place / name).write_text(Path("/etc", name).read_text() + line)
    return home


def open_up(place: Path) -> str:
    """A script that makes a host know the user, and puts a folder open to all in the place of one
    that only root may pass (/root, where pyenv keeps its Pythons) on the way to what is NEEDED."""
    lines = [f"mount --bind {place}/{name} /etc/{name}" for name in ("passwd", "group", "shadow")]
    closed: dict[Path, list[Path]] = {}
    for path in {path.resolve() for path in NEEDED}:
        for parent in reversed(path.parents):
            if not parent.stat().st_mode & 0o001:
                closed.setdefault(parent, []).append(path)
                break
    for parent, paths in closed.items():
        kept = {path: f"/run/kept{number}" for number, path in enumerate(paths)}
        lines += [f"mkdir {there}; mount --bind {path} {there}" for path, there in kept.items()]
        lines.append(f"mount -t tmpfs -o mode=755 none {parent}")
        lines += [f"mkdir -p {path}; mount --bind {there} {path}" for path, there in kept.items()]
    return "\n".join(lines)


@pytest.mark.full
@pytest.mark.parametrize(
    "line",
    [
        "horovodrun -np 2 -H node0:1,node1:1 python horovod_train/train.py",
        "mpirun -np 2 -H node0:1,node1:1 --bind-to none python ddp_train/train.py",
    ],
)
def test_an_ordinary_user_trains_on_two_hosts(line: str, user: User) -> None:
    name = line.split()[0]
    training = f"{SMALL.replace('--max-steps 70', '--max-steps 4')} --log-dir {user.home}/runs"
    user.run(f"{line} {training} --name {name}".split()).checked()
    folder = user.home / "runs" / name
    assert read_json(folder / "environment.json")["rank_hosts"] == ["node0", "node1"]
    assert (folder / "summary.json").stat().st_uid == UID
    assert left_behind(user.hosts) == []
