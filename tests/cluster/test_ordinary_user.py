"""The launchers over two hosts for a user who is not root, as nearly all users are."""

import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hosts import Host, hosts
from launching import ROOT, SMALL, Finished, read_json

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

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
    assert [p.cmdline() for host in user.hosts for p in host.processes()] == []
