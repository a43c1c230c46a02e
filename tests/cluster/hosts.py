"""Two or three real hosts on one machine, for tests: those of tools/namespaces.py."""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
from launching import GUARD_S, Finished, run
from needs import skip_if_missing

from tools import namespaces
from tools.namespaces import SEARCH_PATH

__all__ = ["BIN", "SEARCH_PATH", "Host", "hosts", "left_behind"]
BIN = Path(sys.executable).parent


class Host(namespaces.Host):
    """A host that is up."""

    def run(self, command: list[str], timeout: float = GUARD_S, **environ: str) -> Finished:
        """Run a command there, in the project's folder, as a user logged in there would."""
        return run(self.inside(*command), timeout, **environ)


@contextlib.contextmanager
def hosts(folder: Path, names: tuple[str, ...] = ("node0", "node1")) -> Iterator[list[Host]]:
    """Make the hosts, or skip, naming what is missing; remove all of it at the end."""
    skip_if_missing(namespaces.missing_tools(), "several hosts")
    with namespaces.hosts(folder, names) as made:
        yield [Host(**vars(host)) for host in made]


def left_behind(hosts: Sequence[namespaces.Host]) -> list[list[str]]:
    """Return the command lines that still run on these hosts. Only what removes the loader workers'
    semaphores may outlive the ranks, by a moment; a process that is ending has no line any more."""
    lines = dict[psutil.Process, list[str]]()
    for process in (process for host in hosts for process in host.processes()):
        with contextlib.suppress(psutil.NoSuchProcess):
            lines[process] = process.cmdline()
    last = [
        process for process, words in lines.items() if not words or "resource_tracker" in words[-1]
    ]
    _, alive = psutil.wait_procs(last, timeout=60)
    return [words for process, words in lines.items() if process not in last or process in alive]
