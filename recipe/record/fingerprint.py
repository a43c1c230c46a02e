"""What a run ran on, and one definition of the same training, in sections: software, settings,
sources, data, weights. Two runs that are compared must share it, and the ranks of one: they are
asked before the first step, and at each checkpoint.

Each rank lists its own disk, reads its own command line and runs its own installation. Where these
differ, training looks normal for hours and is worth nothing, or hangs. So the ranks exchange
digests of all that decides what is computed, and if they differ, the values themselves.
"""

import ctypes
import hashlib
import json
import math
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from recipe.data.batches import Data, data_order_sha256
from recipe.data.image_folder import Listing
from recipe.device import core_ranges, cpu_quota_cores
from recipe.errors import UserError, refuse
from recipe.files import read_proc
from recipe.ranks import Ranks
from recipe.record.energy import gpu_clocks_mhz
from recipe.record.folder import utc_now
from recipe.record.schema import (
    FORMAT,
    Environment,
)
from recipe.settings.config import Config
from recipe.settings.flags import FLAGS, names_of, spelled
from recipe.settings.knobs import steers_rank
from recipe.training.optimizers import learning_rate
from recipe.watch import heartbeat
from recipe.world import World

# All that decodes, augments and computes.
PACKAGES = ("torch", "torchvision", "numpy", "pillow", "simplejpeg")
ROOT = Path(__file__).parents[2]
MOST_FIELDS = 4  # in a message
SAMPLE = 500  # files of each folder
BITS = {torch.float32: torch.int32, torch.float16: torch.int16}


# -- The sections: what decides a training, from its software to its data --------------------------


def software(config: Config) -> dict[str, str]:
    """The versions of Python and of what computes for both engines."""
    packages = (*PACKAGES, "timm") if config.uses_timm else PACKAGES
    return {"python": platform.python_version()} | {one: metadata.version(one) for one in packages}


def sources(engine: str) -> dict[str, str]:
    """A digest of each file that trains."""
    own = f"{engine}_train"
    return {
        str(file.relative_to(ROOT)): _digest(file.read_bytes())
        for folder in ("recipe", own if (ROOT / own).is_dir() else "baselines")
        for file in sorted((ROOT / folder).rglob("*.py"))
    }


def cpu_model() -> str:
    """The processor's name."""
    named = re.search("^model name.*?: *(.*)", read_proc("/proc/cpuinfo"), re.MULTILINE)
    return named[1].strip() if named else platform.machine()


def weights_sha256(model: nn.Module, buffers: bool = True) -> str:
    """Digest of all weights, and of BatchNorm's statistics with `buffers`, bit by bit."""
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
    """All that must be equal between two runs for their difference to be the engine's; `model` as
    training begins. Not where files are, nor how gradients travel: the data itself is in
    data_order_sha256, and what --weights brought in initial_weights_sha256."""
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


IDENTITY = {  # of data, as messages call it
    "num_train": "training images",
    "num_val": "validation images",
    "order_sha256": "numpy's order of images",
    "sha256": "names, labels and classes of the images",
    "train_contents_sha256": "contents of the training shards",
    "val_contents_sha256": "contents of the validation shards",
}


def comparison_keys(
    engine: str, config: Config, data: Data, device: torch.device
) -> dict[str, str]:
    """All that the ranks must share to train the same thing: a name, as messages call it, and a
    value that can be printed."""
    own = {engine: metadata.version(engine)} if engine == "horovod" else {}
    facts = {"type of device": device.type}
    facts |= {f"{name}'s version": version for name, version in (software(config) | own).items()}
    for name, flag in FLAGS.items():
        value = getattr(config, name)
        if flag.per_rank == "first":
            facts[spelled(name)] = "given" if value else "not given"
        elif flag.per_rank == "equal":
            facts[spelled(name)] = str(value)
    facts |= {IDENTITY[name]: str(value)[:12] for name, value in data.identity.items()}
    facts["sizes of the image files"] = _digest(json.dumps(sample_of_sizes(data)).encode())
    return facts | {f"the source {name}": digest for name, digest in sources(engine).items()}


def sample_of_sizes(data: Data) -> list[int]:
    """Bytes of some image files: on another host names may stand for other contents. So few that a
    network file system tells them in a second; shards have checksums of their own."""
    files = [
        listing.name(index)
        for listing in (data.train, data.val)
        if type(listing) is Listing
        for index in range(0, len(listing), max(1, len(listing) // SAMPLE))
    ]
    return [os.path.getsize(file) if os.path.exists(file) else -1 for file in files]


def check_same_training(facts: dict[str, str], device: torch.device, ranks: Ranks) -> None:
    """Raise UserError, on all ranks alike, if their `facts` differ or if two have one GPU.

    In the CPU's memory, so that it works where one rank found no GPU.
    """
    is_cuda = device.type == "cuda"
    gpu = str(torch.cuda.get_device_properties(device).uuid) if is_cuda else ""
    own = _digest(json.dumps(facts).encode()), gpu, ranks.world.host
    digests, gpus, hosts = zip(*ranks.gather(own), strict=True)
    heartbeat()  # all ranks have met: from now on none may be late
    if len(set(digests)) > 1:
        raise UserError(differences(ranks.gather(facts), hosts))
    second = next((rank for rank, one in enumerate(gpus) if one and one in gpus[:rank]), 0)
    refuse((
        second,
        f"ranks {gpus.index(gpus[second])} and {second} on {hosts[second]} have the same GPU: "
        "start at most as many ranks on a host as it has GPUs, show each rank another one "
        "(CUDA_VISIBLE_DEVICES), or pass --no-cuda to train on the CPU",
    ))  # fmt: skip


def check_same_weights(model: nn.Module, step: int, ranks: Ranks) -> None:
    """Raise UserError, on all ranks alike, if their weights differ: an engine, a library or a
    machine is at fault then. BatchNorm's statistics may be each rank's own.

    A sum over the bits of each parameter, taken where it lies: one pass over the memory, while a
    cryptographic digest would copy all from the GPU first. (The end of a run has one.)
    """
    sums = [
        weight.detach().contiguous().view(-1).view(BITS[weight.dtype]).sum(dtype=torch.int64)
        for weight in model.parameters()
    ]
    together = torch.stack([one.to(sums[0].device) for one in sums])  # of a network on two GPUs
    digests = ranks.gather(_digest(together.cpu().numpy().tobytes()))
    if len(set(digests)) > 1:
        hosts = ranks.gather(ranks.world.host)
        columns = zip(*ranks.gather(together.tolist()), strict=True)
        names = (name for name, _ in model.named_parameters())
        differ = [name for name, column in zip(names, columns, strict=True) if len(set(column)) > 1]
        more = f" and {len(differ) - 1} more" if len(differ) > 1 else ""
        raise UserError(
            f"after step {step} the ranks hold different weights in {differ[0]}{more}: "
            f"{_groups(digests, hosts)}. "
            "A machine, a library or the engine computes wrongly: check it. No checkpoint of this "
            "step is kept: --resume auto goes on from the one before"
        )


def differences(facts: list[dict[str, str]], hosts: Sequence[str]) -> str:
    """The message for ranks whose `facts` differ: which do, and who has which value."""
    names = dict.fromkeys(name for rank in facts for name in rank)
    told = [
        f"{name}: {_groups(values, hosts)}"
        for name in names
        if len(set(values := [rank.get(name, "missing") for rank in facts])) > 1
    ]
    more = f"; and {len(told) - MOST_FIELDS} more" if len(told) > MOST_FIELDS else ""
    return (
        f"the ranks would not train the same thing: {'; '.join(told[:MOST_FIELDS])}{more}. Start "
        "all ranks by one command, and give all hosts the same data, sources and packages"
    )


def _groups(values: list[str], hosts: Sequence[str]) -> str:
    """Who has which of `values` (one a rank): those of most ranks first, of equally many those of
    the lowest rank."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ", ".join(
        f"{value} on rank {first} ({hosts[first]})" + (f" and {len(others)} more" if others else "")
        for value, (first, *others) in sorted(ranks.items(), key=lambda item: -len(item[1]))
    )


# -- What a run ran on: environment.json -----------------------------------------------------------

# Before this process sets any for its engine, as the two engines need other ones.
VARIABLES_AT_START = dict(os.environ)


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
