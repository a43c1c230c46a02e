"""Ranks that share a GPU (--share-gpu): what lets NCCL do so, and which ranks they are."""

import ctypes
import os
import re
from collections import Counter
from collections.abc import Sequence

from recipe.errors import UserError
from recipe.files import read_proc
from recipe.world import World

Version = tuple[int, ...]

MULTI_RANK = "NCCL_MULTI_RANK_GPU_ENABLE"  # its user chooses NCCL's own way of sharing a GPU
MULTI_RANK_SINCE: Version = (2, 30)


def let_nccl_share(world: World) -> None:
    """Set the variables with which NCCL accepts several ranks on a GPU; call this before it makes a
    communicator. UserError if the user asks for a way that this NCCL does not have.

    NCCL refuses two ranks of a host on one GPU, and tells hosts apart by their IDs. So each rank
    gets an ID of its own, and ranks exchange messages through sockets, as between hosts. Launchers
    pass their environment on, and a value from there would be the same on all ranks: it is
    replaced. Between hosts NCCL would also look for NVLink (MNNVL), which ranks of one GPU lack.
    With NCCL_MULTI_RANK_GPU_ENABLE=1, NCCL shares a GPU by itself, and ranks exchange messages
    through its memory; NVLink SHARP (NVLS) serves no two ranks of a GPU.
    """
    chosen = os.environ.get(MULTI_RANK) or "0"
    if chosen not in ("0", "1"):
        raise UserError(f"{MULTI_RANK}={chosen}: must be 0 or 1")
    if chosen == "1":
        if too_old := [version for version in nccl_versions() if version < MULTI_RANK_SINCE]:
            raise UserError(
                f"{MULTI_RANK}=1: needs NCCL {version_text(MULTI_RANK_SINCE)} or newer, and this "
                f"process has loaded {version_text(too_old[0])}; unset it: the ranks then exchange "
                "messages through sockets"
            )
        os.environ["NCCL_NVLS_ENABLE"] = "0"
        return
    os.environ["NCCL_HOSTID"] = f"{world.host}/{world.rank}"
    os.environ["NCCL_NET"] = "Socket"
    os.environ["NCCL_MNNVL_ENABLE"] = "0"
    if world.local_size == world.size:
        os.environ["NCCL_SOCKET_IFNAME"] = "=lo"  # "=": no other interface whose name begins so


def ranks_per_gpu(gpus: Sequence[str], hosts: Sequence[str], may_share: bool) -> int | None:
    """Return how many ranks have the GPU that most ranks share; None if each has its own, or the
    CPU. `gpus`: each rank's GPU by its UUID, "" without one; `hosts`: each rank's host.

    UserError, on all ranks alike, if ranks share a GPU and may not: that would fail inside NCCL, or
    train at half speed without a message. Also if they may, and do not: NCCL would send everything
    through sockets for nothing.
    """
    users = Counter(filter(None, gpus))
    second = next((rank for rank, gpu in enumerate(gpus) if gpu and gpu in gpus[:rank]), 0)
    if second and not may_share:
        raise UserError(
            f"ranks {gpus.index(gpus[second])} and {second} on {hosts[second]} have the same GPU: "
            "start at most as many ranks on a host as it has GPUs, give each rank its own GPU "
            "(CUDA_VISIBLE_DEVICES), pass --no-cuda to train on the CPU, or pass --share-gpu to "
            "check correctness, not speed"
        )
    if may_share and len(gpus) > 1 and not second:
        raise UserError(
            "--share-gpu: each rank has a GPU of its own; leave it out, or let the ranks of a host "
            "share one by CUDA_VISIBLE_DEVICES=0"
        )
    return max(users.values()) if second else None


# -- The NCCL of this process ----------------------------------------------------------------------


def nccl_versions() -> list[Version]:
    """Return the versions of the NCCL that this process has loaded, for torch or for Horovod; more
    than one if they have loaded different ones, and none if they have loaded none."""
    libraries = set(re.findall(r"/.*/libnccl\.so.*", read_proc("/proc/self/maps")))
    versions, code = list[Version](), ctypes.c_int()
    for library in sorted(libraries):
        ctypes.CDLL(library).ncclGetVersion(ctypes.byref(code))
        versions.append((code.value // 10_000, code.value // 100 % 100, code.value % 100))
    return versions


def version_text(version: Version) -> str:
    """Return a version such as 2.27.3."""
    return ".".join(map(str, version))
