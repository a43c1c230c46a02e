"""Which device and how many CPU threads a rank gets: one rule for both engines."""

import ctypes
import math
import os
import re
import resource
import shutil
import sysconfig
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path

import psutil
import torch

from recipe.errors import UserError, refuse
from recipe.files import control_groups, read_proc
from recipe.gpu_sharing import let_nccl_share
from recipe.settings.config import Config
from recipe.world import NVIDIA_DRIVER, World, why_no_gpu

MAX_DEFAULT_WORKERS = 16
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # names and values from malloc.h, man 3 mallopt
LARGEST_INT = 2**31 - 1
CPUINFO = Path("/proc/cpuinfo")
# For each number format the instructions of x86 CPUs of which one makes it fast.
FAST_BY = {"bf16": ("avx512_bf16", "amx_bf16"), "fp16": ("avx512_fp16",)}


def choose_device(config: Config, world: World) -> torch.device:
    """Return the GPU of this rank among those that it sees, or the CPU.

    A rank may see all GPUs of its host, or only those that Slurm or a script has given it. Their
    number does not show which, so two ranks may choose the same GPU: `share_host` refuses that,
    unless --share-gpu is given.
    """
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its start
        torch.use_deterministic_algorithms(True)
    on_gpu = config.cuda and torch.cuda.is_available()
    if config.cuda and not on_gpu and NVIDIA_DRIVER.exists():
        found, remedy = why_no_gpu()
        raise UserError(f"{found}: {remedy}; or pass --no-cuda to train on the CPU")
    lacking = missing_to_compile(on_gpu) if config.compile else []
    if lacking:
        raise UserError(
            f"--compile: this host lacks {' and '.join(lacking)}; install them (Debian: apt-get "
            "install g++ python3-dev), or leave --compile out"
        )
    if not on_gpu:
        _refuse_settings_of_gpus(config)
        keep_freed_memory()
        if world.is_first:
            _warn_of_slow_format(config.precision)
        return torch.device("cpu")
    device = torch.device("cuda", world.local_rank % torch.cuda.device_count())
    if reason := lacks_kernels(device.index):
        raise UserError(f"{reason}, or pass --no-cuda")
    torch.cuda.set_device(device)
    if config.share_gpu and world.size > 1:
        let_nccl_share(world)
    torch.backends.cudnn.benchmark = not config.deterministic
    # Set both, so that fp32 means fp32 whatever the defaults of the installed torch are.
    torch.backends.cuda.matmul.allow_tf32 = config.precision == "tf32"
    torch.backends.cudnn.allow_tf32 = config.precision == "tf32"
    return device


def _refuse_settings_of_gpus(config: Config) -> None:
    """Raise UserError for settings that do not work on the CPU."""
    refuse(
        (
            config.precision == "tf32",
            "--precision tf32: is a GPU's number format, but this run is on the CPU; use fp32 "
            "or bf16",
        ),
        (
            config.transport == "nccl",
            "--transport nccl: carries gradients between GPUs, but this run is on the CPU; use "
            "gloo or mpi",
        ),
        (
            config.share_gpu,
            "--share-gpu: lets ranks share a GPU, but this run is on the CPU; leave it out",
        ),
        (
            config.batch_norm == "sync" and config.compile,
            "--batch-norm sync: cannot be combined with --compile on the CPU, since it "
            "exchanges sums inside the compiled network; leave --compile out",
        ),
    )


def _warn_of_slow_format(precision: str) -> None:
    number_format = "fp16" if precision in ("O2", "O3") else precision
    if lacking := lacking_instructions(number_format):
        print(
            f"warning: --precision {precision}: this processor lacks {lacking}, so {number_format} "
            "is emulated and usually slower than fp32, up to ten times; use --precision fp32",
            flush=True,
        )


def lacking_instructions(number_format: str) -> str:
    """Return the instructions of which the CPU would need one to compute fast in `number_format`,
    as Linux names them; "" if it has one, or none is needed, or it is not known (not an x86 CPU).

    Without them oneDNN emulates bf16 by AVX-512, and torch computes the rest by slow loops. Seen
    with ResNet-18 and torch 2.14.1: bf16 at 0.65 (AVX-512) and 0.13 (AVX2) times the speed of fp32,
    fp16 at 0.1.
    """
    needed = FAST_BY.get(number_format, ())
    lines = (line.partition(":") for line in read_proc(CPUINFO).splitlines())
    flags = next((value.split() for name, _, value in lines if name.strip() == "flags"), None)
    return "" if flags is None or set(needed) & set(flags) else " and ".join(needed)


def lacks_kernels(gpu: int) -> str:
    """Return why this torch has no code for the GPU of this number, and what to do; "" if it has.

    Binaries (sm_80) run on GPUs of the same major number and the same or a higher minor number;
    code that the driver compiles (compute_90) runs on all newer GPUs (CUDA C++ Programming Guide,
    "Application Compatibility").
    """
    archs, capability = torch.cuda.get_arch_list(), torch.cuda.get_device_capability(gpu)
    for kind, number, special in re.findall(r"(sm|compute)_(\d+)([af]?)", " ".join(archs)):
        code = divmod(int(number), 10)
        is_any_major = kind == "compute" and not special
        if code <= capability and (is_any_major or code[0] == capability[0]):
            return ""
    if torch.version.cuda is None or not archs:  # ROCm; not known
        return ""
    return (
        f"{torch.cuda.get_device_name(gpu)} has compute capability {capability[0]}.{capability[1]},"
        f" and this torch (CUDA {torch.version.cuda}) has code for {' '.join(archs)} only; install "
        "a torch that is built for this GPU (for an old GPU, one with an older CUDA)"
    )


def missing_to_compile(on_gpu: bool) -> list[str]:
    """Return what this host lacks for torch.compile. Triton needs a C compiler, Inductor on the CPU
    needs g++, and both need Python's headers."""
    variable, names = ("CC", ["gcc", "clang"]) if on_gpu else ("CXX", ["g++"])
    chosen = [os.environ[variable]] if variable in os.environ else names
    header = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")
    missing = {
        f"a compiler ({' or '.join(chosen)})": not any(map(shutil.which, chosen)),
        f"Python's headers ({header})": not header.exists(),
    }
    return [name for name, is_missing in missing.items() if is_missing]


def keep_freed_memory() -> None:
    """Let the C library keep large blocks of freed memory for the next step, which needs the same
    sizes, instead of returning them to the system.

    Each new page costs a page fault and is filled with zeros first: on the CPU a step of ResNet-18
    at 224 pixels had 96,000 page faults and took 8 to 10 % longer.
    """
    libc = ctypes.CDLL(None)  # GNU's, which torch needs
    libc.mallopt(M_MMAP_THRESHOLD, LARGEST_INT)
    libc.mallopt(M_TRIM_THRESHOLD, LARGEST_INT)


def share_of_cores(places: Sequence[tuple[str, Sequence[int]]], rank: int) -> int:
    """Return the number of threads for `rank`, at least 1. `places`: each rank's host, and the
    cores that it may use. Each core is divided among the ranks that may use it.

    This holds whether the launcher bound ranks to cores, to sockets (as mpirun does if asked to),
    or not at all (horovodrun, torchrun).
    """
    own_host, own_cores = places[rank]
    masks = [cores for host, cores in places if host == own_host]
    users = Counter(core for cores in masks for core in cores)
    share = sum(1 / users[core] for core in own_cores)
    return max(1, int(min(share, cpu_quota_cores() / len(masks)) + 1e-6))


def core_ranges(cores: Sequence[int]) -> str:
    """Return these cores, given in ascending order, as text such as "0-3,8"."""
    runs = groupby(enumerate(cores), lambda pair: pair[1] - pair[0])  # both grow by one
    ranges = [[core for _, core in run] for _, run in runs]
    return ",".join(f"{run[0]}-{run[-1]}" if run[1:] else f"{run[0]}" for run in ranges)


def cpu_quota_cores(
    membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> float:
    """Return the CPU time, in cores, that this process's control group (v2 or v1) and its parents
    grant; inf if it is unlimited. Affinity masks do not show this limit."""
    groups = control_groups("cpu", membership, root)
    return min(map(_granted_cores, groups), default=math.inf)


def _granted_cores(group: Path) -> float:
    for names in (["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]):
        try:
            quota, period = " ".join((group / name).read_text() for name in names).split()
        except OSError:  # the other version, or the root group, or a view from inside a container
            continue
        return math.inf if quota in ("max", "-1") else int(quota) / int(period)
    return math.inf


def loader_workers(config: Config, device: torch.device, cores: int) -> int:
    """Return the number of loader processes for this rank: --workers, or its share of `cores` if it
    trains on a GPU. On a CPU none: there they cost more than they save (docs/data.md)."""
    if config.workers is not None:
        return config.workers
    return min(cores, MAX_DEFAULT_WORKERS) if device.type == "cuda" else 0


def peak_memory_bytes(device: torch.device) -> int:
    """Return this rank's peak memory: on CUDA what it has allocated on its GPUs (several in a few
    rungs) since `forget_peak_memory`, on the CPU its resident memory."""
    if device.type == "cuda":
        return sum(map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count())))
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # Linux counts in KiB


def forget_peak_memory(device: torch.device) -> None:
    """Measure peak GPU memory from now on: without cuDNN's trials of kernels, and the networks of
    `--wire-format auto`."""
    for gpu in range(torch.cuda.device_count() if device.type == "cuda" else 0):
        torch.cuda.reset_peak_memory_stats(gpu)


def cpu_seconds() -> float:
    """Return the CPU time of this process and all its descendants so far, user and system, in
    seconds.

    Ended processes, such as an evaluation's loader workers, count if their parent has waited for
    them.
    """
    this = psutil.Process()
    total = 0.0
    for process in [this, *this.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:4])  # user, system, and both of ended children
    return total
