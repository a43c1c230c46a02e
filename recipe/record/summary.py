"""What a run ran on, and what it measured in all."""

import ctypes
import math
import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from recipe.device import core_ranges, cpu_quota_cores, cpu_seconds, peak_memory_bytes
from recipe.files import read_proc
from recipe.record.energy import EnergyUse, energy_summary, gpu_clocks_mhz
from recipe.record.fingerprint import cpu_model, weights_sha256
from recipe.record.folder import utc_now
from recipe.record.meter import StepMeter
from recipe.record.schema import (
    FORMAT,
    Environment,
    Input,
    Rank,
    Summary,
    SuspectImages,
)
from recipe.settings.flags import WIRE_FORMATS
from recipe.settings.knobs import steers_rank
from recipe.training.precision import working_copy
from recipe.world import World

# Before this process sets any for its engine, as the two engines need other ones.
VARIABLES_AT_START = dict(os.environ)
STRAGGLES = 0.1  # of a step's time, by which a rank takes longer than the typical one
ALLOCATORS = ("jemalloc", "tcmalloc", "mimalloc", "hoard")


def describe(
    world: World,
    engine: str,
    transport: str,
    device: torch.device,
    threads: int,
    places: Sequence[tuple[str, Sequence[int]]],
) -> Environment:
    """Everything about this run's surroundings that a reader of its figures may want to know;
    `places`: each rank's host, and the cores that it may use."""
    rank_hosts = [host for host, _ in places]
    with_mpi = world.started_by.meeting == "MPI" or transport == "MPI"
    on_gpu, quota = device.type == "cuda", cpu_quota_cores()
    clock, clock_limit = gpu_clocks_mhz(device) if on_gpu else (None, None)
    driver = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return Environment(
        format=FORMAT,
        engine=engine,
        version=metadata.version(engine) if engine in ("horovod", "mpi4py") else torch.__version__,
        launcher=world.launcher,
        transport=transport,
        world_size=world.size,
        local_size=world.local_size,
        hosts=list(dict.fromkeys(rank_hosts)),
        rank_hosts=rank_hosts,
        device=device.type,
        device_name=torch.cuda.get_device_name(device) if on_gpu else cpu_model(),
        cpu_model=cpu_model(),
        cores=os.cpu_count() or 1,
        threads=threads,
        affinity=[core_ranges(cores) for _, cores in places],
        allocator=allocator(),
        variables=steering_variables(),
        python=platform.python_version(),
        torch=torch.__version__,
        torchvision=metadata.version("torchvision"),
        horovod=metadata.version("horovod") if engine == "horovod" else None,
        mpi=first_line_of("mpirun", "--version") if with_mpi else None,
        cuda=torch.version.cuda if on_gpu else None,
        nccl=nccl_version() if transport == "NCCL" else None,
        driver=first_line_of(*driver) if on_gpu else None,
        gpu_clock_mhz=clock,
        gpu_clock_limit_mhz=clock_limit,
        kernel=platform.release(),
        cpu_quota_cores=quota if math.isfinite(quota) else None,
        command=[Path(sys.executable).name, *sys.argv],
        started_utc=utc_now(),
        git_commit=git_commit(),
    )


def allocator() -> str:
    """The library that hands out memory in this process: what was preloaded, or the C library."""
    return next(
        (name for name in ALLOCATORS if f"lib{name}" in read_proc("/proc/self/maps")), "C library"
    )


def nccl_version() -> str | None:
    """The version of the NCCL that this process has loaded, for torch or for Horovod, as in 2.27.3;
    None if it has loaded none."""
    libraries = set(re.findall(r"/.*/libnccl\.so.*", read_proc("/proc/self/maps")))
    versions, code = [], ctypes.c_int()
    for library in sorted(libraries):
        ctypes.CDLL(library).ncclGetVersion(ctypes.byref(code))
        versions.append(f"{code.value // 10_000}.{code.value // 100 % 100}.{code.value % 100}")
    return " and ".join(versions) or None


def steering_variables(environ: Mapping[str, str] = VARIABLES_AT_START) -> dict[str, str]:
    """The variables that change what an engine does or how fast, as this rank got them.

    Without those by which launchers tell ranks who they are, which differ in every run.
    """
    return {name: value for name, value in sorted(environ.items()) if steers_rank(name)}


def first_line_of(*command: str) -> str | None:
    """What a command prints, its first line; None if it is not there, or fails."""
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, errors="replace", timeout=30)
        return done.stdout.partition("\n")[0] if done.returncode == 0 else None
    return None


def git_commit() -> str | None:
    """The checkout's commit, with a + if files were changed since; None outside a checkout."""
    here = str(Path(__file__).parent)
    return first_line_of("git", "-C", here, "describe", "--always", "--abbrev=12", "--dirty=+")


@dataclass(frozen=True)
class Usage:
    """What a rank used, as it tells the others; NaN where something was not measured."""

    rank: Rank
    energy: EnergyUse
    weights_sha256: str  # without BatchNorm's statistics, which may differ: see --batch-norm
    files: float
    bytes: float
    suspect_images: int
    network_bytes: float


def measure_usage(meter: StepMeter, world: World, model: nn.Module, device: torch.device) -> Usage:
    """What this rank used in its session."""
    read = meter.input
    return Usage(
        rank=Rank(
            rank=world.rank,
            host=world.host,
            cpu_seconds=cpu_seconds() - meter.cpu_seconds_before,
            peak_memory_bytes=peak_memory_bytes(device),
            **vars(meter.phases.means()),
        ),
        energy=meter.energy.use(),
        weights_sha256=weights_sha256(model, buffers=False),
        files=read.files if read is not None else math.nan,
        bytes=read.bytes if read is not None else math.nan,
        suspect_images=sum(len(images.found) for images in meter.data.suspects),
        network_bytes=meter.network_bytes,
    )


def summarize(
    environment: Environment,
    work: dict[str, Any],
    meter: StepMeter,
    figures: dict[str, float],
    used: Sequence[Usage],
    model: nn.Module,
) -> Summary:
    """The run's summary; `work` is its fingerprint, `used` what each rank used.

    Raises RuntimeError if the ranks ended with different weights: then an engine or this project is
    at fault, and no figure of the run means anything.
    """
    digests = [usage.weights_sha256 for usage in used]
    if len(set(digests)) > 1:
        raise RuntimeError(f"the ranks ended with different weights: digests {digests}")
    progress = meter.progress
    images = progress.samples_seen - meter.first_samples_seen
    ranks = [usage.rank for usage in used]
    cpu = sum(rank.cpu_seconds for rank in ranks)
    sent, steps = sum(usage.network_bytes for usage in used), progress.step - meter.first_step
    return Summary(
        engine=environment.engine,
        launcher=environment.launcher,
        transport=environment.transport,
        world_size=environment.world_size,
        threads=environment.threads,
        epochs=progress.samples_seen / meter.data.num_train,
        steps=progress.step,
        skipped_steps=progress.skipped_steps,
        samples_seen=progress.samples_seen,
        images_per_second=meter.phases.images_per_second,
        wall_images_per_second=meter.wall_images_per_second,
        train_seconds=meter.step_seconds,
        total_seconds=meter.total_seconds,
        cpu_seconds=cpu,
        cpu_seconds_per_image=cpu / images if images else None,
        peak_memory_bytes=max(rank.peak_memory_bytes for rank in ranks),
        phases=meter.phases.means(),
        ranks=ranks,
        input=summarize_input(meter.step_seconds, used, images),
        energy=energy_summary([usage.energy for usage in used], images),
        suspect_images=SuspectImages(
            count=sum(usage.suspect_images for usage in used),
            names=[name for images in meter.data.suspects for name in images.names],
        ),
        replaced_images=len(meter.replaced),
        gradient_bytes=gradient_bytes(working_copy(model, meter.config), work),
        network_bytes_per_step=sent / steps if steps and math.isfinite(sent) else None,
        loss=figures.get("loss"),
        top1=figures.get("top1"),
        top5=figures.get("top5"),
        best_top1=max(progress.best_top1, figures["top1"]) if figures else None,
        weights_sha256=weights_sha256(model),
        fingerprint=work,
        ended_utc=utc_now(),
    )


def straggler(ranks: Sequence[Rank]) -> str:
    """A line on the rank that the others waited for, in all phases but that in which they wait;
    empty if each took about as long as the typical one."""
    seconds = [
        (one.data_seconds or 0.0) + (one.forward_seconds or 0.0) + (one.optimizer_seconds or 0.0)
        for one in ranks
    ]
    slowest, typical = max(seconds), statistics.median_low(seconds)
    rank = ranks[seconds.index(slowest)]
    if slowest - typical <= STRAGGLES * (rank.step_seconds or math.inf):
        return ""
    return (
        f"warning: the others waited for rank {rank.rank} on {rank.host}: data, forward and "
        f"optimizer took it {1000 * slowest:.3g} ms a step, the typical rank {1000 * typical:.3g}"
    )


def gradient_bytes(model: nn.Module, work: dict[str, Any]) -> int:
    """What one worker's gradients take on the wire in a step."""
    on_wire = WIRE_FORMATS[work.get("wire_format", "fp32")].bytes
    return sum(
        weight.numel() * min(on_wire, weight.element_size())
        for weight in model.parameters()
        if weight.requires_grad
    )


def summarize_input(seconds: float, used: Sequence[Usage], images: int) -> Input:
    """What was read for training in each of these `seconds`, over all ranks, and the share of the
    step time that the mean rank waited for it; None where no files were read, or no step
    counted."""
    ranks = [usage.rank for usage in used]
    waits = [(one.data_seconds or 0.0) / (one.step_seconds or 1.0) for one in ranks if one.steps]

    def rate(number: float) -> float | None:
        return number / seconds if seconds and math.isfinite(number) else None

    return Input(
        images_per_second=rate(images),
        files_per_second=rate(sum(usage.files for usage in used)),
        megabytes_per_second=rate(sum(usage.bytes for usage in used) / 1e6),
        wait_share=sum(waits) / len(waits) if waits else None,
    )
