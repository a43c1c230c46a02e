"""Hosts are asked by ssh before anything is started, and what is wrong with each is the message."""

from pathlib import Path

import pytest
from making import write_program

from compare import run as run_module
from compare.plan.environment import set_variables
from compare.plan.hosts import WITHOUT_SSH, check_logins, ssh_flags, ssh_remedy, ssh_words
from recipe.errors import UserError

# Says what OpenSSH says, by the name of the host.
SSH = r"""case "$*" in *"-o BatchMode=yes -o ConnectTimeout=10"*) ;; *) exec sleep 300;; esac
case "$*" in
*nowhere*) echo "ssh: Could not resolve hostname nowhere: Name or service not known" >&2;;
*locked*) printf 'Welcome!\nroot@locked: Permission denied (publickey,password).\r\n' >&2;;
*) exit 0;;
esac
exit 255
"""


@pytest.fixture(autouse=True)
def made_up_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_program(tmp_path / "bin/ssh", SSH)
    monkeypatch.setenv("PATH", f"{path.parent}:/usr/bin:/bin")
    for name in ("OMPI_MCA_plm_rsh_args", *WITHOUT_SSH):
        monkeypatch.delenv(name, raising=False)


def test_every_host_that_ssh_does_not_reach_is_named_with_its_remedy() -> None:
    with pytest.raises(UserError) as raised:
        check_logins(4, "localhost:1,nowhere:1,sound:1,locked:1", ["mpirun"])
    first, *others = str(raised.value).splitlines()
    assert first == "nothing was started, because ssh does not reach all hosts:"
    assert [line.split(":")[0].strip() for line in others] == ["nowhere", "locked"]
    assert "not known; write nowhere into /etc/hosts" in others[0]
    assert "Permission denied (publickey,password); `ssh-copy-id locked`" in others[1]
    check_logins(2, "localhost:1,sound:1", ["mpirun", "horovodrun"])
    check_logins(2, None, ["mpirun"])


def test_hosts_without_workers_are_not_asked() -> None:
    check_logins(2, "localhost:1,sound:1,locked:1", ["mpirun", "horovodrun"])


def test_a_comparison_asks_before_it_starts_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_module, "check_tools", lambda plan: None)
    assert run_module.main(["--hosts", "nowhere:2", "--workers", "2"]) == 2
    told = capsys.readouterr()
    assert told.out == "" and "    nowhere: Could not" in told.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", WITHOUT_SSH)
def test_hosts_that_are_not_reached_by_ssh_are_not_asked(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_logins(2, "locked:2", ["srun"])
    monkeypatch.setenv(name, "7")
    check_logins(2, "locked:2", ["srun", "mpirun", "torchrun"])
    with pytest.raises(UserError, match="ssh-copy-id locked"):  # horovodrun asks by ssh there, too
        check_logins(2, "locked:2", ["horovodrun"])


def test_mpirun_never_asks_for_a_password(monkeypatch: pytest.MonkeyPatch) -> None:
    name, ours = "OMPI_MCA_plm_rsh_args", "-o BatchMode=yes -o ConnectTimeout=10"
    assert set_variables()[name] == ours
    monkeypatch.setenv(name, "-p 2222")
    assert set_variables()[name] == ssh_flags() == f"-p 2222 {ours}"
    assert ssh_words("a", "true") == ["ssh", "-p", "2222", *ours.split(), "a", "true"]


@pytest.mark.parametrize(
    ("message", "remedy"),
    [
        ("ssh: Could not resolve hostname nod0: Name or service not known", "/etc/hosts"),
        ("Host key verification failed.", "log in once"),
        ("root@node1: Permission denied (publickey).", "ssh-copy-id node1"),
        ("ssh: connect to host node1 port 22: Connection refused", "start sshd on node1"),
        ("ssh: connect to host node1 port 22: Connection timed out", "firewall"),
        ("ssh: connect to host node1 port 22: No route to host", "node1 is down"),
        ("something else", "ssh -v node1"),
    ],
)
def test_what_ssh_says_has_a_remedy(message: str, remedy: str) -> None:
    assert remedy in ssh_remedy("node1", message)
