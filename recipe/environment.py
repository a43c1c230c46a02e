"""What a run ran on, and the fingerprint that says whether two runs did equal work."""

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import asdict, fields
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from recipe.config import Config, RunFlags
from recipe.data import Data, data_order_sha256
from recipe.device import cpu_seconds, host_names, peak_memory_bytes
from recipe.record import Recorder, utc_now
from recipe.schedule import learning_rate
from recipe.world import World

# Settings that say where files are, not what is computed: the data itself is in data_order_sha256,
# and what --weights brought in initial_weights_sha256.
NOT_WORK = {item.name for item in fields(RunFlags)} | {
    "train_dir",
    "val_dir",
    "data",
    "weights",
    "cache_dir",
    "cuda",
    "preset",
    "threads",
}


def describe(
    world: World,
    engine: str,
    transport: str,
    device: torch.device,
    threads: int,
    cores: torch.Tensor,
) -> dict[str, Any]:
    """Everything about this run's surroundings that a reader of its figures may want to know."""
    with_mpi = world.launcher == "mpirun" or transport == "MPI"
    return {
        "engine": engine,
        "version": metadata.version("horovod") if engine == "horovod" else torch.__version__,
        "launcher": world.launcher,
        "transport": transport,
        "world_size": world.size,
        "local_size": world.local_size,
        "hosts": host_names(cores),
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_model(),
        "cpu_model": cpu_model(),
        "cores": os.cpu_count(),
        "threads": threads,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": metadata.version("torchvision"),
        "horovod": metadata.version("horovod") if engine == "horovod" else None,
        "mpi": mpi_version() if with_mpi else None,
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "kernel": platform.release(),
        "command": [Path(sys.executable).name, *sys.argv],
        "started_utc": utc_now(),
        "git_commit": git_commit(),
    }


def cpu_model() -> str:
    """The processor's name."""
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def mpi_version() -> str | None:
    """First line of `mpirun --version`."""
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        return None
    output = subprocess.run(
        [mpirun, "--version"], capture_output=True, text=True, timeout=30
    ).stdout
    return output.splitlines()[0] if output else None


def git_commit() -> str | None:
    """The checkout's commit, with a + if files were changed since; None outside a checkout."""
    command = [
        "git",
        "-C",
        str(Path(__file__).parent),
        "describe",
        "--always",
        "--abbrev=12",
        "--dirty=+",
    ]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def fingerprint(
    config: Config,
    world: World,
    data: Data,
    model: nn.Module,
    device: torch.device,
    threads: int,
    scale: float,
) -> dict[str, Any]:
    """All that must be equal between two runs for their difference to be the engine's; `model` as
    training begins."""
    rates = [learning_rate(config, config.epochs * part / 1000, scale) for part in range(1001)]
    work = {key: value for key, value in asdict(config).items() if key not in NOT_WORK}
    return {
        "data_order_sha256": data_order_sha256(data, config),
        "initial_weights_sha256": weights_sha256(model),
        "learning_rates_sha256": hashlib.sha256(json.dumps(rates).encode()).hexdigest(),
        "world_size": world.size,
        "num_images": data.num_train,
        "num_val_images": data.num_val,
        "epochs": config.epochs,
        "max_steps": config.max_steps,
        "threads": threads,
        "wire_format": "fp16" if config.fp16_allreduce else "fp32",
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_model(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": metadata.version("torchvision"),
        **work,
    }


def usage_row(recorder: Recorder, model: nn.Module, device: torch.device) -> torch.Tensor:
    """What this rank used, and a digest of its weights, for the ranks to exchange: float64 [3]."""
    digest = int(weights_sha256(model, buffers=False)[:12], 16)  # 48 bits: exact in a float64
    used = cpu_seconds() - recorder.cpu_seconds_before
    return torch.tensor([used, peak_memory_bytes(device), digest], dtype=torch.float64)


def summarize(
    recorder: Recorder, figures: dict[str, float], usage: torch.Tensor, model: nn.Module
) -> dict[str, Any]:
    """The run's summary; `usage` holds every rank's `usage_row` [ranks, 3].

    Raises RuntimeError if the ranks ended with different weights: then an engine or this project is
    at fault, and no figure of the run means anything.
    """
    if len(set(usage[:, 2].tolist())) > 1:
        raise RuntimeError(
            f"the ranks ended with different weights: digests {usage[:, 2].tolist()}"
        )
    progress, environment = recorder.progress, recorder.environment
    images = progress.samples_seen - recorder.first_samples_seen
    cpu = float(usage[:, 0].sum())
    return {
        **{
            key: environment[key]
            for key in ("engine", "launcher", "transport", "world_size", "threads")
        },
        "epochs": progress.samples_seen / recorder.data.num_train,
        "steps": progress.step,
        "samples_seen": progress.samples_seen,
        "images_per_second": recorder.images_per_second,
        "train_seconds": recorder.step_seconds,
        "total_seconds": recorder.train_seconds,
        "cpu_seconds": cpu,
        "cpu_seconds_per_image": cpu / images if images else None,
        "peak_memory_bytes": int(usage[:, 1].max()),
        **figures,
        "best_top1": max(progress.best_top1, figures["top1"]),
        "weights_sha256": weights_sha256(model),
        "fingerprint": recorder.fingerprint,
        "ended_utc": utc_now(),
    }


def weights_sha256(model: nn.Module, buffers: bool = True) -> str:
    """Digest of all weights, and of BatchNorm's statistics with `buffers`, bit by bit."""
    digest = hashlib.sha256()
    for name, value in (model.state_dict() if buffers else dict(model.named_parameters())).items():
        digest.update(name.encode())
        values = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
        digest.update(values.numpy().tobytes())
    return digest.hexdigest()
