"""Horovod's hosts come and go, in network namespaces of this machine."""

import subprocess
from pathlib import Path

import psutil
import pytest
from elastic import checked_steps, command, images_of, ranks_among, steps_in, write_slots
from hosts import SEARCH_PATH, Host
from launching import resumed_at, run, wait_until

pytestmark = [pytest.mark.launch, pytest.mark.cluster, pytest.mark.timeout(400)]


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
        rank = there()
        rank.parent().kill()
        ranks_come_to(1)
        assert not rank.is_running(), "it has outlived what watched over it"
        ranks_come_to(3)
        (tmp_path / "stop").touch()

    cooldown = "--blacklist-cooldown-range 5 10"
    words = command(tmp_path, "--checkpoint-steps 5", "eth0", cooldown)
    run(node0.inside(*words), 380, meanwhile, PATH=SEARCH_PATH).checked()
    assert [process.cmdline() for host in two_hosts for process in host.processes()] == []
    assert images_of(checked_steps(tmp_path)[-1]) == 36
    assert len(resumed_at(tmp_path)) == 5
