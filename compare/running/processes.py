"""Processes of this machine: those of a run, and how busy they keep the cores.

A script of a user's own loads this, in whichever environment it runs (compare/side.py): it needs
psutil alone.
"""

import contextlib
import signal
from collections.abc import Iterable

import psutil

from compare.plan.blocks import RUN_MARK


def kill_marked(mark: str) -> None:
    """Kill until none is left: one may be started while the others are killed.

    Not for ever: a process that waits for a broken disk cannot be killed.
    """
    for _ in range(10):
        processes = marked_processes(mark)
        if not processes:
            return
        send_signal(processes, signal.SIGKILL)
        psutil.wait_procs(processes, timeout=1.0)


def marked_processes(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(RUN_MARK) == mark:
                found.append(process)
    return found


def send_signal(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    """Send processes a signal; those that have ended are left out."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


def busy_cpu_seconds() -> float:
    """Return for how long, in seconds times cores, this machine has been busy since it started.

    Time that a hypervisor gave to other guests ("steal") counts: those cores were not ours. So does
    that of guests of this machine, once: Linux has it in `user`.
    """
    times = psutil.cpu_times()
    names = ("user", "nice", "system", "irq", "softirq", "steal")
    return sum(float(getattr(times, name, 0.0)) for name in names)


def own_cpu_seconds() -> float:
    """Return the CPU time of this process and of all descendants that have ended and were waited
    for: a launcher that ends in order has waited for its workers."""
    return float(sum(psutil.Process().cpu_times()[:4]))  # user, system, and both of children
