"""What the doctor looks at on each host, in a process there."""

import contextlib
import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from compare.plan.environment import set_variables
from compare.plan.sources import trainers_sha256

PROBE_SECONDS = 120  # until a host's answer is given up: torch's import over a network is slow
CONNECT_SECONDS = 5.0


def probe(data: Path | None) -> dict[str, Any]:
    """Return this host's facts; what cannot be found out is None, or says why in a text."""
    facts: dict[str, Any] = {
        "host": socket.gethostname(),
        "time": time.time(),
        "python": platform.python_version(),
        "torch": None,
        "torchvision": None,
        "cuda": None,
        "nccl": None,
        "gpus": [],
        "gpu_driver": Path("/proc/driver/nvidia/version").exists(),
        "horovod": None,
        "mpi": mpi_version(),
        "is_root": os.geteuid() == 0,
        "shared_memory_bytes": shared_memory_bytes(),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "own_name": own_name(),
        "interfaces": interfaces(),
        "trainers_sha256": trainers_sha256(),
        "data": None if data is None else data_problem(data),
        "errors": {},
    }
    try:
        import torch

        facts |= {"torch": torch.__version__, "cuda": torch.version.cuda}
        if torch.cuda.is_available():
            facts["gpus"] = [
                torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())
            ]
        if torch.distributed.is_nccl_available():
            facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        import torchvision

        facts["torchvision"] = torchvision.__version__
    except Exception as error:
        facts["errors"]["torch"] = f"{type(error).__name__}: {error}"
    facts |= horovod_facts(facts["errors"])
    return facts


def horovod_facts(errors: dict[str, str]) -> dict[str, Any]:
    """Ask Horovod, in a process of its own, what it was built with: its import may not survive."""
    program = (
        "import json, horovod, horovod.torch as hvd; print(json.dumps({'horovod': "
        "horovod.__version__, 'horovod_mpi': hvd.mpi_built(), 'horovod_gloo': hvd.gloo_built(), "
        "'horovod_nccl': bool(hvd.nccl_built())}))"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=PROBE_SECONDS
        )
    except subprocess.TimeoutExpired:
        errors["horovod"] = f"its import had not ended after {PROBE_SECONDS} s"
        return {"horovod": None}
    lines = done.stdout.splitlines()
    if done.returncode == 0 and lines:
        return dict(json.loads(lines[-1]))
    errors["horovod"] = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return {"horovod": None}


def mpi_version() -> str | None:
    mpirun = shutil.which("mpirun", path=set_variables()["PATH"])
    if mpirun is None:
        return None
    done = subprocess.run([mpirun, "--version"], capture_output=True, text=True)
    first = (done.stdout.splitlines() or [""])[0]
    return re.sub(r"^mpirun \((.*)\) ", r"\1 ", first) or "unknown"


def shared_memory_bytes() -> int | None:
    with contextlib.suppress(OSError):
        return shutil.disk_usage("/dev/shm").free
    return None


def own_name() -> str | None:
    """Return this host's own address, as its name resolves here; None if it does not."""
    with contextlib.suppress(OSError):
        return str(socket.getaddrinfo(socket.gethostname(), None)[0][4][0])
    return None


def interfaces() -> list[dict[str, Any]]:
    """Return the interfaces that are up and have an IPv4 address, the loopback left out."""
    stats = psutil.net_if_stats()
    found = []
    for name, addresses in psutil.net_if_addrs().items():
        ipv4 = [a for a in addresses if a.family == socket.AF_INET]
        if not ipv4 or ipv4[0].address.startswith("127.") or not stats[name].isup:
            continue
        entry: dict[str, Any] = {
            "name": name,
            "address": ipv4[0].address,
            "netmask": ipv4[0].netmask,
        }
        found.append(entry | {"megabits_per_second": stats[name].speed or None})
    return found


def data_problem(data: Path) -> str:
    """Return what is wrong with a data folder; "" if nothing is."""
    for part in ("train", "val"):
        folder = data / part
        if not folder.is_dir():
            return f"there is no folder {folder}"
        if not os.access(folder, os.R_OK | os.X_OK):
            return f"{folder} cannot be read"
        if not any(inner.is_dir() for inner in folder.iterdir()):
            return f"{folder} holds no sub-folder: one a class is needed"
    return ""


def reach(addresses: list[str]) -> None:
    """Listen at these addresses of this host and say at which ports; read others' addresses and
    ports, and say of each why it cannot be connected to; listen until the input ends."""
    with contextlib.ExitStack() as stack:
        ports = []
        for address in addresses:
            listener = stack.enter_context(socket.create_server((address, 0), backlog=1024))
            ports.append(listener.getsockname()[1])
        print(json.dumps(ports), flush=True)
        others = json.loads(sys.stdin.readline())
        with ThreadPoolExecutor(max_workers=64) as pool:
            print(json.dumps(list(pool.map(connection_problem, others))), flush=True)
        sys.stdin.read()


def connection_problem(place: tuple[str, int]) -> str:
    """Return why a place cannot be connected to; "" if it can."""
    try:
        socket.create_connection((place[0], place[1]), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""
