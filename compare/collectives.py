"""Measure what the engines build on: the all-reduce, over message sizes, side by side.

    python compare/collectives.py                        this host, 2 workers
    python compare/collectives.py --workers 4 --hosts a:2,b:2 --json allreduce.json
    python compare/collectives.py --show runs/collectives-20260131-120000

torch.distributed, the same over MPI (as ddp-mpi trains), Horovod over MPI and over Gloo (with NCCL
where there are GPUs and its build has it) and plain mpi4py sum the same messages, in fp32 and in
fp16 on the wire; every sum is checked. In each block all backends are started, and then take turns
at one message after the other, as in a comparison of trainings: compare/report.py shows the folder,
too.
"""

import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec

from compare.evidence.record import Record, read_comparison
from compare.page.allreduce import as_json, text_report
from compare.plan.configurations import CONFIGURATIONS
from compare.plan.environment import most_on_a_host, path_from_here, read_hosts
from compare.plan.launchers import launch_words
from compare.plan.plan import Case, OwnScript, Plan, Words
from compare.plan.plan_file import check_known, plan_record
from compare.running import checks
from compare.running.comparison import measure, record_plan
from compare.running.launch import utc_now, utc_stamp
from compare.running.scheduler import MeasurementError
from recipe.command import run_tool
from recipe.errors import UserError, refuse
from recipe.files import write_json
from recipe.settings.flags import WIRE_FORMATS, WireFormat

SCRIPT = "compare/collectives.py"
SIDE = "compare/running/allreduce_side.py"
# Each backend's configuration, which says how its ranks are started.
BACKENDS = {
    "torch.distributed": "ddp-torchrun",
    "torch-mpi": "ddp-mpi",
    "horovod-mpi": "horovod-mpi",
    "horovod-gloo": "horovod-gloo",
    "mpi4py": "mpi4py-mpirun",
}
ROUNDS = 2  # in a block: there and back


@dataclass(frozen=True)
class Measuring:
    """What is measured, and where."""

    workers: int = 2  # Worker processes.
    # Hosts and their slots, as in a:2,b:2; the first must see the results folder (default: this
    # host).
    hosts: str | None = None
    network_interface: str | None = None  # The one that connects the hosts, such as eth0.
    # Any of torch.distributed, torch-mpi, horovod-mpi, horovod-gloo and mpi4py (default: all that
    # are installed); the first is what others are compared with.
    backends: tuple[str, ...] = ()
    # Such as 4K or 256M: bytes of fp32, K = 1024. Each rank of each backend holds a message.
    sizes: tuple[str, ...] = ("4K", "16K", "64K", "256K", "1M", "4M", "16M", "64M")
    wires: tuple[WireFormat, ...] = tuple(WIRE_FORMATS)  # Number formats on the wire.
    # The torchvision model whose gradients are summed, too, as one message and tensor by tensor;
    # none: leave it out.
    model: str = "resnet50"
    blocks: int = 3  # Launches of all backends; 3 is the least for an interval.
    threads: int = 1  # CPU threads of each rank for casts and copies.
    no_cuda: bool = False  # Stay on the CPU.
    # Let the workers of a host share its GPUs, to check sums; times then mean nothing.
    share_gpu: bool = False
    timeout: int = 300  # Seconds for the start of all backends, and for each turn.
    out: Path | None = None  # New folder for the record (default: runs/collectives-<UTC time>).


def measure_or_show(settings: Measuring, json: Path | None = None, show: Path | None = None) -> int:
    """Measure, or show what was measured, and return the exit code.

    Args:
        settings: What is measured, and where.
        json: Write the figures as JSON.
        show: Measure nothing: show an earlier folder.
    """
    if json and not json.parent.is_dir():
        raise UserError(f"{json}: make its folder first")
    folder = show or settings.out or Path("runs") / f"collectives-{utc_stamp()}"
    is_measured = show is not None or measure_all(settings, folder)
    if not is_measured and not Record.open(folder).num_blocks:
        return 1
    record = read_comparison(folder)
    print(f"\n{text_report(record)}")
    if json is not None:
        write_json(json, as_json(record))
    return 0 if is_measured else 1


def measure_all(settings: Measuring, folder: Path) -> bool:
    """Measure into a new folder; return False, and name the backend, if one failed."""
    check(settings, folder)
    cases = cases_of(settings.sizes, settings.wires, settings.model)
    names, missing = available(settings.backends)
    plan = Plan(
        side={name: OwnScript(Words(command(name, settings))) for name in names},
        configurations=tuple(names),
        case=dict.fromkeys(cases, Case()),
        named_hosts=settings.hosts,
        blocks=settings.blocks,
        rounds=ROUNDS,
        order_seed=secrets.randbelow(2**31),
        timeout=settings.timeout,
    )
    most = most_on_a_host(settings.workers, settings.hosts)
    cores = checks.check_cores(most, settings.threads)
    warnings = [*missing, *checks.warning_texts([cores])]
    print(f"record and commands: {folder}", *warnings, sep="\nwarning: ", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    record = Record(folder)
    warnings += checks.warn(plan, folder)
    planned = msgspec.structs.replace(plan_record(plan, utc_now()), warnings=tuple(warnings))
    record_plan(planned, record)
    try:
        measure(plan, record)
    except MeasurementError as error:
        print(f"a block failed: {error}")
        return False
    return True


def check(settings: Measuring, folder: Path) -> None:
    """Raise UserError about settings that make no measurement."""
    workers, hosts = settings.workers, settings.hosts
    refuse(
        (workers < 2, f"--workers {workers}: nothing is exchanged; give 2 or more"),
        (
            min(settings.blocks, settings.threads, settings.timeout) < 1,
            "--blocks, --threads and --timeout: give positive whole numbers",
        ),
        (
            hosts is not None and sum(read_hosts(hosts).values()) < workers,
            f"--hosts {hosts}: has fewer slots than --workers",
        ),
        (
            folder.exists() and any(folder.iterdir()),
            f"--out {folder}: is not empty; name a new folder",
        ),
    )


def cases_of(sizes: Sequence[str], wires: Sequence[str], model: str) -> list[str]:
    """Return a case for each message in each wire format; UserError about a size or model that is
    none."""
    from recipe.allreduce_loop import elements_of  # loads torch

    forms = () if model == "none" else ("fused", "layers")
    messages = [*(size.upper() for size in sizes), *(f"{model}.{form}" for form in forms)]
    for message in messages:
        elements_of(message)
    if not messages or not wires:
        raise UserError("--sizes and --wires: name at least one of each")
    return [f"{message}-{wire}" for message in messages for wire in wires]


def available(named: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the backends to measure, and warnings about those that are not installed; UserError if
    a named one is not."""
    for name in named:
        check_known("--backends", name, BACKENDS)
    reasons = {
        name: checks.missing_for(CONFIGURATIONS[BACKENDS[name]]) for name in named or BACKENDS
    }
    missing = [f"{name}: not available. {why}" for name, why in reasons.items() if why]
    if named and missing:
        raise UserError("\n".join(missing))
    return [name for name, why in reasons.items() if not why], missing


def command(name: str, settings: Measuring) -> list[str]:
    """Return what starts a backend, as a person would type it in the current directory."""
    configuration = CONFIGURATIONS[BACKENDS[name]]
    if configuration.launcher == "torchrun" and settings.hosts is not None:
        configuration = CONFIGURATIONS["ddp-mpirun"]  # whose hosts may take unequal numbers
    configuration = replace(configuration, interface=settings.network_interface)
    asked_for = {"--no-cuda": settings.no_cuda, "--share-gpu": settings.share_gpu}
    if configuration.transport == "mpi":  # which may know no GPU's memory
        asked_for = {"--no-cuda": True}
    return [
        *launch_words(configuration, settings.workers, settings.hosts),
        path_from_here(SIDE),
        path_from_here(configuration.trained_by.allreduce),
        "--threads",
        str(settings.threads),
        *configuration.arguments,
        *(flag for flag, is_asked_for in asked_for.items() if is_asked_for),
    ]


main = partial(
    run_tool,
    SCRIPT,
    measure_or_show,
    __doc__,
    interrupted="interrupted: all processes were ended; --show FOLDER shows the blocks before",
)

if __name__ == "__main__":
    sys.exit(main())
