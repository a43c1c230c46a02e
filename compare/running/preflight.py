"""What would make a comparison's result worthless, looked for before the first run."""

import contextlib
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import psutil

from compare.evidence.turns import least_load
from compare.plan.environment import REMOVED_VARIABLES, set_variables
from compare.plan.hosts import is_here, most_on_a_host, read_hosts
from compare.plan.plan import Plan, Run
from compare.running.launch import busy_cpu_seconds
from recipe.errors import UserError
from recipe.flags import last_value

BUSIEST_SHOWN = 3
GIB = 2**30
DISK_NEEDED = GIB
MEMORY_NEEDED_PER_WORKER = GIB / 2  # torch and the smallest models


def find_warnings(plan: Plan, folder: Path) -> list[str]:
    """Return what would make the result worthless, each with its remedy. Takes about a second, and
    ten on a machine with a GPU, where Horovod is asked how it was built."""
    return [
        *other_load_warnings(busy_cores(seconds=1.0)),
        *core_warnings(plan, len(os.sched_getaffinity(0))),
        *thread_warnings(plan),
        *gpu_warnings(plan),
        *room_warnings(plan, folder),
        *clock_warnings(Path("/sys/devices/system/cpu")),
    ]


def warn(plan: Plan, folder: Path, strict: bool) -> list[str]:
    """Print what would make the result worthless, and return it; if `strict`, a UserError."""
    warnings = find_warnings(plan, folder)
    if strict and warnings:
        lines = "\n".join(f"    {line}" for line in warnings)
        raise UserError(f"not started (--strict), because of\n{lines}")
    for line in warnings:
        print(f"warning: {line}")
    return warnings


def busy_cores(seconds: float) -> tuple[float, list[str]]:
    """Watch the machine: how many of its cores are busy, and the busiest processes, in words."""
    own = os.getpid()
    before = process_cpu_seconds()
    busy, began = busy_cpu_seconds(), time.monotonic()
    time.sleep(seconds)
    elapsed = time.monotonic() - began
    cores = (busy_cpu_seconds() - busy) / elapsed
    used = [
        ((total - before.get(pid, (0.0, ""))[0]) / elapsed, name, pid)
        for pid, (total, name) in process_cpu_seconds().items()
        if pid != own
    ]
    busiest = [
        f"{name} (process {pid}, {share:.1f} cores)"
        for share, name, pid in sorted(used, reverse=True)[:BUSIEST_SHOWN]
        if share >= 0.05
    ]
    return cores, busiest


def process_cpu_seconds() -> dict[int, tuple[float, str]]:
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            found[process.pid] = (times.user + times.system, process.name())
    return found


def other_load_warnings(load: tuple[float, list[str]]) -> list[str]:
    cores, busiest = load
    if cores < least_load(os.cpu_count() or 1):
        return []
    who = ", ".join(busiest) or "processes that cannot be seen from here"
    return [
        f"other load: {cores:.1f} of this machine's {os.cpu_count()} cores are busy before the "
        f"first run begins, by {who}. It slows runs at random. End it, or wait for its end"
    ]


def workers_here(run: Run) -> int:
    """Return how many of a run's workers will share this machine; 0 if that is not known."""
    if run.configuration.has_daemons:
        return 0
    if run.hosts is not None and not any(map(is_here, read_hosts(run.hosts))):
        return 0
    return most_on_a_host(run.workers, run.hosts)


def threads_of(run: Run) -> int | None:
    text = last_value(run.arguments, "--threads") or ""
    return int(text) if text.isdecimal() else None


def core_warnings(plan: Plan, cores: int) -> list[str]:
    """Warn of more workers, or threads of workers, than cores."""
    runs = plan.block(1)
    most = max(map(workers_here, runs))
    if most > cores:
        return [
            f"too many workers: {most} on this machine, where run.py may use {cores} "
            f"core{'s' * (cores > 1)}. They would wait for each other. Give --workers up to {cores}"
        ]
    worst = max(runs, key=lambda run: workers_here(run) * (threads_of(run) or 0))
    threads = threads_of(worst) or 0
    if workers_here(worst) * threads > cores:
        workers = workers_here(worst)
        return [
            f"too many threads: {worst.name} has {workers} workers of {threads} threads on {cores} "
            "cores, which can make it many times slower. Leave --threads out, or give "
            f"--threads {max(1, cores // workers)}"
        ]
    return []


def thread_warnings(plan: Plan) -> list[str]:
    """Warn of configurations that differ in their threads, and of a setting that does not count."""
    warnings = []
    counts = {run.configuration.name: threads_of(run) for run in plan.block(1)}
    if len(set(counts.values())) > 1:
        told = ", ".join(f"{name} {count or 'its share'}" for name, count in counts.items())
        warnings.append(
            f"unequal threads: by their own flags the configurations have {told}. What is compared "
            "is threads, then. Give --threads once, for all"
        )
    for name in REMOVED_VARIABLES:
        values = {c.name: c.environment.get(name) for c in plan.members()}
        if len(set(values.values())) > 1:
            told = ", ".join(f"{own} {value or 'none'}" for own, value in values.items())
            warnings.append(
                f"unequal threads: {name} is set for some configurations alone ({told}). Take it "
                "out, and give --threads for all"
            )
        used = sorted({str(count) for count in counts.values() if count})
        if os.environ.get(name) not in (None, *used):
            warnings.append(
                f"{name}={os.environ[name]} of your shell reaches no run, because some launchers "
                f"overwrite it and others do not: every worker has {' or '.join(used)} thread(s). "
                f"To change that add --threads N to the trainers' flags; else unset {name}"
            )
    return warnings


def gpu_warnings(plan: Plan) -> list[str]:
    """Warn of what would keep GPUs from being used well; nothing without an NVIDIA GPU."""
    runs = [run for run in plan.block(1) if "--no-cuda" not in run.arguments]
    gpus = visible_gpus()
    if not runs or not gpus:
        return []
    warnings = []
    most = max(map(workers_here, runs))
    if most > gpus:
        warnings.append(
            f"too many workers: {most} on this machine, which has {gpus} visible "
            f"GPU{'s' * (gpus > 1)}. Give --workers up to {gpus}, or --no-cuda to the trainers"
        )
    if any(run.configuration.engine == "horovod" for run in runs) and not horovod_has_nccl():
        warnings.append(
            "Horovod without NCCL on a machine with NVIDIA GPUs: its gradients would go through "
            "the CPU while DDP's do not. Build it with python horovod_train/build_horovod.py "
            "--nccl, or give --no-cuda to the trainers"
        )
    return warnings


def visible_gpus() -> int:
    """Return the number of NVIDIA GPUs that a trainer started here would see."""
    listed = command_output(["nvidia-smi", "-L"], seconds=30) if shutil.which("nvidia-smi") else ""
    gpus = len(re.findall(r"^GPU \d+:", listed, re.MULTILINE))
    if not gpus:  # a container without the tool
        devices = Path("/proc/driver/nvidia/gpus")
        gpus = len(list(devices.iterdir())) if devices.is_dir() else 0
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if gpus and chosen is not None:
        return 0 if chosen in ("", "-1") else min(gpus, len(chosen.split(",")))
    return gpus


def horovod_has_nccl() -> bool:
    """Ask Horovod how it was built, in a process of its own: compare/ never imports it."""
    found = shutil.which("horovodrun", path=set_variables()["PATH"])
    report = command_output([found, "--check-build"], seconds=120) if found else ""
    return re.search(r"\[X\] NCCL", report) is not None


def command_output(command: list[str], seconds: float) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def room_warnings(plan: Plan, folder: Path) -> list[str]:
    """Warn of too little free disk or memory."""
    warnings = []
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < DISK_NEEDED:
        warnings.append(
            f"little disk: {free / GIB:.1f} GiB are free at {existing}, and a full disk ends runs. "
            "Free some, or take --out DIR elsewhere"
        )
    available = psutil.virtual_memory().available
    most = max(map(workers_here, plan.block(1)))
    if plan.measure == "turns":  # all configurations are in memory at once
        most *= len(plan.members())
    if available < most * MEMORY_NEEDED_PER_WORKER:
        warnings.append(
            f"little memory: {available / GIB:.1f} GiB are available to {most} "
            f"worker{'s' * (most > 1)}, which would swap or be killed. End other programs, or give "
            "fewer --workers"
        )
    return warnings


def clock_warnings(cpu_folder: Path) -> list[str]:
    """Warn of a processor whose clock is not held up; nothing where that cannot be read."""
    warnings = []
    governors = set()
    for path in cpu_folder.glob("cpu[0-9]*/cpufreq/scaling_governor"):
        with contextlib.suppress(OSError):
            governors.add(path.read_text().strip())
    if governors - {"performance"}:
        names = ", ".join(sorted(governors))
        warnings.append(
            f"the processor's clock follows the load (governor {names}), with more spread between "
            "runs. As root: cpupower frequency-set --governor performance"
        )
    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    if battery is not None and battery.power_plugged is False:
        warnings.append("the machine runs on its battery, which slows it down: plug it in")
    return warnings
