"""A run's environment, and the one definition of "the same training", in sections: software,
settings, sources, data, weights. It must be equal in two runs that are compared, and on all ranks
of a run, which are checked before the first step and at each checkpoint.

Each rank lists its own disk, reads its own command line and runs its own installation. If these
differ, training looks normal for hours and is worthless, or hangs. So the ranks exchange digests of
everything that decides what is computed and, if the digests differ, the values themselves.
"""

import hashlib
import json
import math
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from recipe import watch
from recipe.data.batches import Data, data_order_sha256
from recipe.data.image_folder import Listing
from recipe.device import core_ranges, cpu_quota_cores
from recipe.errors import AS_STARTED, UserError
from recipe.files import read_proc
from recipe.gpu_sharing import nccl_versions, version_text
from recipe.ranks import Ranks
from recipe.record.energy import gpu_clocks_mhz
from recipe.record.folder import utc_now
from recipe.record.schema import (
    FORMAT,
    Environment,
)
from recipe.settings.config import Config
from recipe.settings.flags import FLAGS, names_of, spelled
from recipe.settings.variables import steers_rank
from recipe.training.optimizers import learning_rate
from recipe.watch import heartbeat
from recipe.world import World

# The packages that decode, augment and compute.
PACKAGES = ("torch", "torchvision", "numpy", "pillow", "simplejpeg")
ROOT = Path(__file__).parents[2]
MOST_FIELDS = 4  # in a message
SAMPLE = 500  # files of each folder
BITS = {torch.float32: torch.int32, torch.float16: torch.int16}


# -- The sections: what determines a training, from its software to its data -----------------------


def software(config: Config) -> dict[str, str]:
    """Return the versions of Python and of the packages that compute for both engines."""
    packages = (*PACKAGES, "timm") if config.uses_timm else PACKAGES
    return {"python": platform.python_version()} | {
        package: metadata.version(package) for package in packages
    }


def sources(engine: str) -> dict[str, str]:
    """Return a digest of each source file that takes part in a training."""
    trainer = f"{engine}_train"
    return {
        str(file.relative_to(ROOT)): _digest(file.read_bytes())
        for folder in ("recipe", trainer if (ROOT / trainer).is_dir() else "baselines")
        for file in sorted((ROOT / folder).rglob("*.py"))
    }


def cpu_model() -> str:
    """Return the processor's name."""
    match = re.search("^model name.*?: *(.*)", read_proc("/proc/cpuinfo"), re.MULTILINE)
    return match[1].strip() if match else platform.machine()


def weights_sha256(model: nn.Module, buffers: bool = True) -> str:
    """Return a digest of the bits of all weights and, with `buffers`, of BatchNorm's statistics."""
    digest = hashlib.sha256()
    for name, value in (model.state_dict() if buffers else dict(model.named_parameters())).items():
        digest.update(name.encode())
        values = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
        digest.update(values.numpy().tobytes())
    return digest.hexdigest()


def _digest(content: bytes) -> str:
    return "digest " + hashlib.sha256(content).hexdigest()[:12]


# -- Between two runs that are compared ------------------------------------------------------------


def fingerprint(
    config: Config,
    world: World,
    data: Data,
    model: nn.Module,
    device: torch.device,
    threads: int,
    scale: float,
) -> dict[str, Any]:
    """Return everything that must be equal in two runs, so that only the engine can make a
    difference; `model` is as training begins. File paths are not included, nor how gradients are
    exchanged: data_order_sha256 stands for the data, initial_weights_sha256 for --weights."""
    rates = [learning_rate(config, config.epochs * part / 1000, scale) for part in range(1001)]
    work = {name: getattr(config, name) for name in names_of("work", "measurement")}
    return {
        "data_order_sha256": data_order_sha256(data, config),
        "initial_weights_sha256": weights_sha256(model),
        "learning_rates_sha256": hashlib.sha256(json.dumps(rates).encode()).hexdigest(),
        "world_size": world.size,
        "num_classes": data.num_classes,
        "num_images": data.num_train,
        "num_val_images": data.num_val,
        "max_steps": config.max_steps,
        "threads": threads,
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_model(),
        **software(config),
        **work,
    }


# -- Between ranks ---------------------------------------------------------------------------------


IDENTITY = {  # the fields of a data set's identity, as messages call them
    "num_train": "training images",
    "num_val": "validation images",
    "order_sha256": "numpy's order of images",
    "sha256": "names, labels and classes of the images",
    "train_contents_sha256": "contents of the training images",
    "val_contents_sha256": "contents of the validation images",
}


def comparison_keys(
    engine: str, config: Config, data: Data, device: torch.device
) -> dict[str, str]:
    """Return everything that must be equal on all ranks for them to train the same thing: printable
    values by name, as messages call them."""
    engines = {engine: metadata.version(engine)} if engine == "horovod" else {}
    keys = {"type of device": device.type}
    keys |= {f"{name}'s version": text for name, text in (software(config) | engines).items()}
    for name, flag in FLAGS.items():
        value = getattr(config, name)
        if flag.per_rank == "first":
            keys[spelled(name)] = "given" if value else "not given"
        elif flag.per_rank == "equal":
            keys[spelled(name)] = str(value)
    keys |= {IDENTITY[name]: str(value)[:12] for name, value in data.identity.items()}
    keys["sizes of the image files"] = _digest(json.dumps(sample_of_sizes(data)).encode())
    return keys | {f"the source {name}": digest for name, digest in sources(engine).items()}


def sample_of_sizes(data: Data) -> list[int]:
    """Return the sizes in bytes of some image files: on another host the same names may have other
    contents. They are so few that a network file system reports them in a second. Shards and
    images in memory have checksums instead."""
    files = [
        listing.name(index)
        for listing in (data.train, data.val)
        if type(listing) is Listing
        for index in range(0, len(listing), max(1, len(listing) // SAMPLE))
    ]
    return [os.path.getsize(file) if os.path.exists(file) else -1 for file in files]


def check_same_training(keys: dict[str, str], ranks: Ranks) -> None:
    """Raise UserError, on all ranks alike, if their `keys` (see `comparison_keys`) differ.

    The exchange is in the CPU's memory, so that it works if a rank has found no GPU.
    """
    watch.begin("comparing settings and data with the other ranks'")
    values = _digest(json.dumps(keys).encode()), ranks.world.host
    digests, hosts = zip(*ranks.gather(values), strict=True)
    heartbeat()  # all ranks have met: from now on none may be late
    if len(set(digests)) > 1:
        raise UserError(differences(ranks.gather(keys), hosts))


def check_same_weights(model: nn.Module, step: int, ranks: Ranks) -> None:
    """Raise UserError, on all ranks alike, if their weights differ: then an engine, a library or a
    machine is at fault. BatchNorm's statistics may differ.

    Compares the sum over the bits of each parameter, taken on its device: one pass over the memory,
    while a cryptographic digest would first copy everything from the GPU. (The end of a run has
    one.)
    """
    sums = [
        weight.detach().contiguous().view(-1).view(BITS[weight.dtype]).sum(dtype=torch.int64)
        for weight in model.parameters()
    ]
    # A network may be on two GPUs.
    together = torch.stack([weight_sum.to(sums[0].device) for weight_sum in sums])
    digests = ranks.gather(_digest(together.cpu().numpy().tobytes()))
    if len(set(digests)) > 1:
        hosts = ranks.gather(ranks.world.host)
        columns = zip(*ranks.gather(together.tolist()), strict=True)
        names = (name for name, _ in model.named_parameters())
        differ = [name for name, column in zip(names, columns, strict=True) if len(set(column)) > 1]
        more = f" and {len(differ) - 1} more" if len(differ) > 1 else ""
        raise UserError(
            f"after step {step} the ranks hold different weights in {differ[0]}{more}: "
            f"{ranks_by_value(digests, hosts)}. "
            "A machine, a library or the engine computes wrongly: check it. No checkpoint of this "
            "step is saved: --resume auto resumes from the one before"
        )


def differences(keys_by_rank: list[dict[str, str]], hosts: Sequence[str]) -> str:
    """Return the message for ranks whose keys differ: which ones, and each value's ranks."""
    names = dict.fromkeys(name for keys in keys_by_rank for name in keys)
    lines = [
        f"{name}: {ranks_by_value(values, hosts)}"
        for name in names
        if len(set(values := [keys.get(name, "missing") for keys in keys_by_rank])) > 1
    ]
    more = f"; and {len(lines) - MOST_FIELDS} more" if len(lines) > MOST_FIELDS else ""
    return (
        f"the ranks would not train the same thing: {'; '.join(lines[:MOST_FIELDS])}{more}. Start "
        "all ranks with one command, and give all hosts the same data, sources and packages"
    )


def ranks_by_value(values: list[str], hosts: Sequence[str]) -> str:
    """Return which ranks have which of `values` (one per rank): the values of most ranks first,
    equally frequent ones by their lowest rank."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ", ".join(
        f"{value} on rank {first} ({hosts[first]})" + (f" and {len(others)} more" if others else "")
        for value, (first, *others) in sorted(ranks.items(), key=lambda item: -len(item[1]))
    )


# -- What a run ran on: environment.json -----------------------------------------------------------

ALLOCATORS = ("jemalloc", "tcmalloc", "mimalloc", "hoard")


def describe(
    world: World,
    engine: str,
    transport: str,
    device: torch.device,
    threads: int,
    places: Sequence[tuple[str, Sequence[int]]],
    ranks_per_gpu: int | None = None,
) -> Environment:
    """Return everything about this run's environment that a reader of its figures may want to know;
    `places`: each rank's host, and the cores that it may use; `ranks_per_gpu`: None if no ranks
    share one."""
    rank_hosts = [host for host, _ in places]
    with_mpi = world.started_by.rendezvous == "MPI" or transport == "MPI"
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
        ranks_per_gpu=ranks_per_gpu,
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
        nccl=" and ".join(map(version_text, nccl_versions())) or None
        if transport == "NCCL"
        else None,
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
    """Return what allocates memory in this process: a preloaded library, or the C library."""
    return next(
        (name for name in ALLOCATORS if f"lib{name}" in read_proc("/proc/self/maps")), "C library"
    )


def steering_variables(environ: Mapping[str, str] = AS_STARTED) -> dict[str, str]:
    """Return the variables that change what an engine does, or how fast, as this rank got them.

    Those by which launchers give ranks their places are not included: they differ in every run.
    """
    return {name: value for name, value in sorted(environ.items()) if steers_rank(name)}


def first_line_of(*command: str) -> str | None:
    """Return the first line that a command prints; None if the command is missing or fails."""
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, errors="replace", timeout=30)
        return done.stdout.partition("\n")[0] if done.returncode == 0 else None
    return None


def git_commit() -> str | None:
    """Return the checkout's commit, with a + if files were changed since; None outside one."""
    here = shlex.quote(str(Path(__file__).parent))
    # In a git hook variables name the hook's repository. (GIT_CONFIG_... are the user's settings.)
    no_hook = "unset $(git rev-parse --local-env-vars | grep -v CONFIG)"
    ask = f"git -C {here} describe --always --abbrev=12 --dirty=+"
    return first_line_of("sh", "-c", f"{no_hook}; {ask}")
