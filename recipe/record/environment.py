"""What a run ran on, and the fingerprint that says whether two runs did equal work."""

import hashlib
import json
import math
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, astuple
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from recipe.config import Config
from recipe.data.batches import Data, data_order_sha256
from recipe.device import core_ranges, cpu_seconds, host_names, peak_memory_bytes
from recipe.flags import names_of
from recipe.record.energy import energy_summary
from recipe.record.meter import StepMeter
from recipe.record.run_folder import utc_now
from recipe.training.phases import PhaseMeans, phase_record
from recipe.training.schedule import learning_rate
from recipe.variables import steers_rank
from recipe.world import World

# Settings that say where files are or how gradients travel, not what is computed: the data itself
# is in data_order_sha256, and what --weights brought in initial_weights_sha256.
NOT_WORK = set(names_of("speed", "place", "run"))


# Before this process sets any for its engine, as the two engines need other ones.
VARIABLES_AT_START = dict(os.environ)
ALLOCATORS = ("jemalloc", "tcmalloc", "mimalloc", "hoard")


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
        "hosts": list(dict.fromkeys(host_names(cores))),
        "rank_hosts": host_names(cores),
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_model(),
        "cpu_model": cpu_model(),
        "cores": os.cpu_count(),
        "threads": threads,
        "affinity": core_ranges(cores),
        "allocator": allocator(),
        "variables": steering_variables(),
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


def allocator() -> str:
    """The library that hands out memory in this process: what was preloaded, or the C library."""
    maps = Path("/proc/self/maps")
    loaded = maps.read_text() if maps.exists() else ""
    return next((name for name in ALLOCATORS if f"lib{name}" in loaded), "C library")


def steering_variables(environ: Mapping[str, str] = VARIABLES_AT_START) -> dict[str, str]:
    """The variables that change what an engine does or how fast, as this rank got them.

    Without those by which launchers tell ranks who they are, which differ in every run.
    """
    return {name: value for name, value in sorted(environ.items()) if steers_rank(name)}


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
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_model(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": metadata.version("torchvision"),
        **work,
    }


def usage_row(meter: StepMeter, model: nn.Module, device: torch.device) -> torch.Tensor:
    """What this rank used, and a digest of its weights, for the ranks to exchange: float64 [n], NaN
    where something was not measured."""
    digest = int(weights_sha256(model, buffers=False)[:12], 16)  # 48 bits: exact in a float64
    used = cpu_seconds() - meter.cpu_seconds_before
    means = astuple(meter.phases.means())
    files = meter.input
    read = [files.files, files.bytes] if files is not None else [math.nan, math.nan]
    suspects = sum(images.count for images in meter.data.suspects)
    row = [digest, used, peak_memory_bytes(device), *means, *read, suspects]
    return torch.cat([torch.tensor(row, dtype=torch.float64), meter.energy.row()])


def summarize(
    environment: dict[str, Any],
    work: dict[str, Any],
    meter: StepMeter,
    figures: dict[str, float],
    usage: torch.Tensor,
    model: nn.Module,
) -> dict[str, Any]:
    """The run's summary; `work` is its fingerprint, `usage` holds every rank's `usage_row`
    [ranks, n].

    Raises RuntimeError if the ranks ended with different weights: then an engine or this project is
    at fault, and no figure of the run means anything.
    """
    digests = usage[:, 0].tolist()
    if len(set(digests)) > 1:
        raise RuntimeError(f"the ranks ended with different weights: digests {digests}")
    progress = meter.progress
    images = progress.samples_seen - meter.first_samples_seen
    cpu = float(usage[:, 1].sum())
    return {
        **{
            key: environment[key]
            for key in ("engine", "launcher", "transport", "world_size", "threads")
        },
        "epochs": progress.samples_seen / meter.data.num_train,
        "steps": progress.step,
        "samples_seen": progress.samples_seen,
        "images_per_second": meter.images_per_second,
        "train_seconds": meter.step_seconds,
        "total_seconds": meter.train_seconds,
        "cpu_seconds": cpu,
        "cpu_seconds_per_image": cpu / images if images else None,
        "peak_memory_bytes": int(usage[:, 2].max()),
        "phases": phase_record(meter.phases.means()),
        "ranks": [
            {
                "rank": rank,
                "host": environment["rank_hosts"][rank],
                "cpu_seconds": row[1],
                "peak_memory_bytes": int(row[2]),
                **phase_record(PhaseMeans(*row[3:9])),
            }
            for rank, row in enumerate(usage.tolist())
        ],
        "input": input_summary(meter, usage[:, 3:9], usage[:, 9:11], images),
        "energy": energy_summary(usage[:, 12:], images),
        "suspect_images": {
            "count": int(usage[:, 11].sum()),  # one that two ranks have met counts twice
            "names": [name for images in meter.data.suspects for name in images.names],
        },
        **{name: figures.get(name) for name in ("loss", "top1", "top5")},  # None: not evaluated
        "best_top1": max(progress.best_top1, figures["top1"]) if figures else None,
        "weights_sha256": weights_sha256(model),
        "fingerprint": work,
        "ended_utc": utc_now(),
    }


def input_summary(
    meter: StepMeter, phases: torch.Tensor, read: torch.Tensor, images: int
) -> dict[str, float | None]:
    """What was read for training a second, over all ranks, and the share of the step time that the
    mean rank waited for it; None where no files were read, or no step counted."""
    seconds = meter.step_seconds
    files, num_bytes = (float(value) for value in read.sum(dim=0))
    waits = [means.data / means.step for row in phases if (means := PhaseMeans(*row)).steps]

    def rate(number: float) -> float | None:
        return number / seconds if seconds and math.isfinite(number) else None

    return {
        "images_per_second": rate(images),
        "files_per_second": rate(files),
        "megabytes_per_second": rate(num_bytes / 1e6),
        "wait_share": float(sum(waits) / len(waits)) if waits else None,
    }


def weights_sha256(model: nn.Module, buffers: bool = True) -> str:
    """Digest of all weights, and of BatchNorm's statistics with `buffers`, bit by bit."""
    digest = hashlib.sha256()
    for name, value in (model.state_dict() if buffers else dict(model.named_parameters())).items():
        digest.update(name.encode())
        values = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
        digest.update(values.numpy().tobytes())
    return digest.hexdigest()
