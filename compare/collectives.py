"""Measure what the engines build on: the allreduce, over message sizes, side by side.

    python compare/collectives.py                        this host, 2 workers
    python compare/collectives.py --workers 4 --hosts a:2,b:2 --json allreduce.json
    python compare/collectives.py --show runs/collectives-20260131-120000

torch.distributed, the same over MPI (as ddp-mpi trains), Horovod over MPI and over Gloo (with NCCL
where there are GPUs and its build has it) and plain mpi4py sum the same messages, on the fp32 and
on the fp16 wire; every sum is checked. The unit of evidence is a launch: each block starts each
backend once, in random order.
"""

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from compare.page.allreduce import as_json, read_measurement, text_report
from compare.plan.blocks import shuffled
from compare.plan.configurations import CONFIGURATIONS
from compare.plan.environment import most_on_a_host, path_from_here, read_hosts
from compare.plan.launchers import launch_words
from compare.plan.plan_file import check_known
from compare.running.checks import check_cores, check_load, missing_for, warning_texts
from compare.running.launch import shown_tail, start_command, utc_now, utc_stamp
from recipe.command import run_tool
from recipe.errors import UserError, refuse
from recipe.files import write_json
from recipe.settings.flags import WIRE_FORMATS, WireFormat

SCRIPT = "compare/collectives.py"
# Each backend's configuration, which says how its script is started.
BACKENDS = {
    "torch.distributed": "ddp-torchrun",
    "torch-mpi": "ddp-mpi",
    "horovod-mpi": "horovod-mpi",
    "horovod-gloo": "horovod-gloo",
    "mpi4py": "mpi4py-mpirun",
}
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def size_bytes(text: str) -> int:
    """Return the bytes of `4096`, `4K` or `256M`."""
    found = re.fullmatch("([0-9]+)([KMG]?)", text.upper())
    size = int(found[1]) * UNITS[found[2]] if found else 0
    if size == 0 or size % 4:
        raise UserError(
            f"--sizes {text}: is no size; write 4096, 4K or 256M, a multiple of 4 bytes"
        )
    return size


def measure_or_show(
    workers: int = 2,
    hosts: str | None = None,
    network_interface: str | None = None,
    backends: tuple[str, ...] = (),
    sizes: tuple[str, ...] = ("4K", "16K", "64K", "256K", "1M", "4M", "16M", "64M", "256M"),
    wires: tuple[WireFormat, ...] = tuple(WIRE_FORMATS),
    model: str = "resnet50",
    blocks: int = 3,
    seconds: float = 0.1,
    threads: int = 1,
    no_cuda: bool = False,
    timeout: int = 300,
    out: Path | None = None,
    json: Path | None = None,
    show: Path | None = None,
) -> int:
    """Measure, or show what was measured, and return the exit code.

    Args:
        workers: Worker processes.
        hosts: Hosts and their slots, as in a:2,b:2; the first must see the results folder (default:
            this host).
        network_interface: The one that connects the hosts, such as eth0.
        backends: Any of torch.distributed, torch-mpi, horovod-mpi, horovod-gloo and mpi4py
            (default: all); the first is what others are compared with.
        sizes: Such as 4K or 256M: bytes of fp32, K = 1024.
        wires: Number formats on the wire.
        model: The torchvision model whose gradients are summed, too, as one message and tensor by
            tensor; none: leave it out.
        blocks: Launches of each backend; 3 is the least for an interval.
        seconds: For the repetitions of one message in one launch, at least 3 of them.
        threads: CPU threads of each rank for casts and copies.
        no_cuda: Stay on the CPU.
        timeout: Seconds; a launch that takes longer is ended and counts as failed.
        out: Folder for raw figures (default: runs/collectives-<UTC time>).
        json: Write the figures as JSON.
        show: Measure nothing: show an earlier folder.
    """
    folder = show or out or Path("runs") / f"collectives-{utc_stamp()}"
    if show is None:
        if json and not json.parent.is_dir():
            raise UserError(f"{json}: make its folder first")
        settings = {
            "workers": workers,
            "hosts": hosts,
            "network_interface": network_interface,
            "blocks": blocks,
            "sizes": [*map(size_bytes, sizes)],
            "wires": wires,
            "model": model,
            "seconds": seconds,
            "threads": threads,
            "cuda": not no_cuda,
        }
        measure_backends(settings, backends, timeout, folder)
    measurement = read_measurement(folder)
    print(f"\n{text_report(measurement)}")
    if json is not None:
        write_json(json, as_json(measurement))
    return 1 if measurement.failed else 0


def measure_backends(
    settings: dict[str, Any], named: Sequence[str], timeout: int, folder: Path
) -> None:
    """Start each backend that is there once a block, one after the other, and keep what each wrote
    in `folder`; UserError about settings that make no measurement, and about a backend that was
    named and is missing. `settings`: the flags that collectives.json keeps."""
    workers, hosts = settings["workers"], settings["hosts"]
    slots = workers if hosts is None else sum(read_hosts(hosts).values())
    refuse(
        (workers < 2, f"--workers {workers}: nothing is exchanged; give 2 or more"),
        (settings["seconds"] <= 0, f"--seconds {settings['seconds']:g}: give a positive number"),
        (
            min(settings["blocks"], settings["threads"], timeout) < 1,
            "--blocks, --threads and --timeout: give positive whole numbers",
        ),
        (slots < workers, f"--hosts {hosts}: has fewer slots than --workers"),
        (
            folder.exists() and any(folder.iterdir()),
            f"--out {folder}: is not empty; name a new folder",
        ),
        (
            not (settings["sizes"] and settings["wires"]),
            "--sizes and --wires: name at least one of each",
        ),
    )
    for name in named:
        check_known("--backends", name, BACKENDS)
    asked = named or [*BACKENDS]
    reasons = {name: missing_for(CONFIGURATIONS[BACKENDS[name]]) for name in asked}
    missing = [f"{name}: not available. {why}" for name, why in reasons.items() if why]
    if named and missing:
        raise UserError("\n".join(missing))
    findings = [check_load(), check_cores(most_on_a_host(workers, hosts), settings["threads"])]
    warnings = [*missing, *warning_texts(findings)]
    print(f"raw figures and commands: {folder}", *warnings, sep="\nwarning: ", flush=True)
    backends = [name for name in asked if not reasons[name]]
    folder.mkdir(parents=True, exist_ok=True)
    write_json(
        folder / "collectives.json",
        {
            "created_utc": utc_now(),
            "backends": backends,
            "cores": os.cpu_count() or 1,
            "warnings": warnings,
            **settings,
        },
    )
    failed: set[str] = set()
    for block in range(1, settings["blocks"] + 1):
        for name in (one for one in shuffled(backends, block) if one not in failed):
            place = folder / f"block-{block}" / name
            place.mkdir(parents=True)
            words, out = command(name, settings, place), place / "measurements.jsonl"
            outcome = start_command(words, place, timeout, out)
            told = f"block {block}  {name:17}  {outcome.seconds:5.1f} s  {outcome.status}"
            print(told, flush=True)
            if outcome.status != "completed":
                failed.add(name)
                print(shown_tail(place), flush=True)


def command(name: str, settings: dict[str, Any], place: Path) -> list[str]:
    """Return what starts a backend, as a person would type it in the current directory."""
    configuration = CONFIGURATIONS[BACKENDS[name]]
    if configuration.launcher == "torchrun" and settings["hosts"] is not None:
        configuration = CONFIGURATIONS["ddp-mpirun"]  # whose hosts may take unequal numbers
    configuration = replace(configuration, interface=settings["network_interface"])
    # An MPI may know no GPU's memory.
    no_cuda = [] if settings["cuda"] and configuration.transport != "mpi" else ["--no-cuda"]
    return [
        *launch_words(configuration, settings["workers"], settings["hosts"]),
        path_from_here(configuration.trained_by.allreduce),
        "--sizes",
        *map(str, sorted({*settings["sizes"]})),
        "--wires",
        *settings["wires"],
        "--seconds",
        str(settings["seconds"]),
        "--threads",
        str(settings["threads"]),
        "--model",
        settings["model"],
        *configuration.arguments,
        *no_cuda,
        "--out",
        str(place / "measurements.jsonl"),
    ]


main = partial(
    run_tool, SCRIPT, measure_or_show, __doc__,
    interrupted="interrupted: all processes were ended",
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
