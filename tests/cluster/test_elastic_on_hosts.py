"""Hosts come and go, in network namespaces of this machine."""

import os
import subprocess
from pathlib import Path

import psutil
import pytest
from elastic import (
    audited,
    check_audit,
    checked_steps,
    command,
    images_of,
    ranks_among,
    steps_in,
    write_slots,
)
from hosts import SEARCH_PATH, Host, left_behind
from launching import GUARD_S, SMALL, TRAINERS, resumed_at, run, wait_until

pytestmark = [pytest.mark.launch, pytest.mark.cluster]


@pytest.mark.full
def test_a_host_leaves_returns_and_is_lost(two_hosts: list[Host], tmp_path: Path) -> None:
    """A rank there is killed, too. A lost host returns after its cooldown."""
    node0, node1 = two_hosts
    write_slots(tmp_path, "node0:1\nnode1:1")

    def ranks_come_to(number: int) -> None:
        wait_until(lambda: images_of(steps_in(tmp_path)[-1]) == 12 * number)

    def there() -> psutil.Process:  # which rank, Horovod leaves to chance
        return next(iter(ranks_among(node1.processes()).values()))

    def meanwhile(launcher: subprocess.Popen) -> None:
        wait_until(lambda: len(steps_in(tmp_path)) > 20)
        there().kill()
        wait_until(lambda: len(resumed_at(tmp_path)) == 1)
        write_slots(tmp_path, "node0:1")
        ranks_come_to(1)
        write_slots(tmp_path, "node0:1\nnode1:2")
        ranks_come_to(3)
        rank, resumes = there(), len(resumed_at(tmp_path))
        rank.parent().kill()
        # On a slow machine the host may be back before the one that is left has trained alone.
        wait_until(lambda: len(resumed_at(tmp_path)) > resumes)
        assert not rank.is_running(), "it has outlived what watched over it"
        wait_until(lambda: steps_in(tmp_path)[-1]["step"] > resumed_at(tmp_path)[-1])
        ranks_come_to(3)
        (tmp_path / "stop").touch()

    cooldown = "--blacklist-cooldown-range 5 10"
    words = command(tmp_path, "--checkpoint-steps 5", "eth0", cooldown)
    run(node0.inside(*words), 1700, meanwhile, PATH=SEARCH_PATH).checked()
    assert left_behind(two_hosts) == []
    assert images_of(checked_steps(tmp_path)[-1]) == 36
    assert len(resumed_at(tmp_path)) in (4, 5)


# So that a torchrun which is gone is missed within seconds, and others are waited for no longer.
ATTENTIVE = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=5"


@pytest.mark.full
def test_a_torchrun_leaves_and_another_joins(two_hosts: list[Host], tmp_path: Path) -> None:
    """Of two workers one is left, and then there are three."""
    node0, node1 = two_hosts
    variables = audited(tmp_path) | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    environ = [f"{name}={value}" for name, value in {**variables, "PATH": SEARCH_PATH}.items()]
    training = f"{SMALL.partition('--max-steps')[0]} --epochs 100000 --log-interval 1"

    def torchrun(host: Host, ranks: int) -> list[str]:
        words = (
            f"torchrun --nnodes 1:2 --nproc-per-node {ranks} --max-restarts 100 --rdzv-id elastic "
            f"--rdzv-backend c10d --rdzv-endpoint node0:29500 --rdzv-conf {ATTENTIVE} "
            f"{TRAINERS['ddp']} {training} --checkpoint-steps 5 --resume auto "
            f"--log-dir {tmp_path.parent} --name {tmp_path.name}"
        )
        return host.inside("env", *environ, *words.split())

    def workers_come_to(number: int) -> None:
        wait_until(lambda: steps_in(tmp_path) and images_of(steps_in(tmp_path)[-1]) == 12 * number)

    def meanwhile(launcher: subprocess.Popen) -> None:
        process = psutil.Process(launcher.pid)
        wait_until(lambda: "LAUNCH_MARK" in process.environ())
        mark = {"LAUNCH_MARK": process.environ()["LAUNCH_MARK"]}
        with subprocess.Popen(torchrun(node1, 1), env=os.environ | mark) as first:
            try:
                workers_come_to(2)
                wait_until(lambda: len(steps_in(tmp_path)) > 20)
            finally:
                for process in node1.processes():
                    process.kill()
                first.kill()
        workers_come_to(1)
        with subprocess.Popen(torchrun(node1, 2), env=os.environ | mark) as second:
            try:
                workers_come_to(3)
                wait_until(lambda: steps_in(tmp_path)[-1]["epoch"] > 0)
                (tmp_path / "stop").touch()
                launcher.wait(GUARD_S)
            finally:
                second.kill()

    run(torchrun(node0, 1), 1700, meanwhile).checked()
    checked_steps(tmp_path)
    check_audit(tmp_path)
