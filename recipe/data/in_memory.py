"""The images' encoded bytes in memory, once a host: its ranks and their loader workers share them.

The memory is a file without a name (memfd): no folder has to be large enough, and it is gone with
the last process that uses it, however that ends. The first rank of a host reads the images and
hands the open file to the others over a local socket; so the ranks need neither a collective nor
common names.
"""

import errno
import fcntl
import itertools
import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import reduction
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from tqdm import tqdm

from recipe.data.image_folder import Listing, read_ahead
from recipe.errors import UserError, job_on_host
from recipe.world import World

# The training itself needs memory, too: the model, and half a gigabyte a loader worker.
LARGEST_SHARE = 0.8
# How long a rank waits until the first rank of its host has come as far as opening its socket.
FIRST_RANK_TIMEOUT_S = 600.0
SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class Memory:
    """An unnamed file in memory, mapped for reading: int64 [num_images + 1] offsets, at which the
    bytes of each image begin and the last one's end, and then these bytes.

    On its way to a loader worker it may only travel as part of what starts the worker, as an open
    file; the bytes are not copied.
    """

    def __init__(self, descriptor: int, num_images: int) -> None:
        self.descriptor, self.num_images = descriptor, num_images
        self.map = mmap.mmap(descriptor, 0, mmap.MAP_SHARED, mmap.PROT_READ)
        self.offsets = np.frombuffer(self.map, dtype=np.int64, count=num_images + 1)

    def read(self, index: int) -> bytes:
        """A copy of the bytes of image `index`."""
        return self.map[int(self.offsets[index]) : int(self.offsets[index + 1])]

    def __getstate__(self) -> dict[str, Any]:
        return {"file": reduction.DupFd(self.descriptor), "num_images": self.num_images}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["file"].detach(), state["num_images"])  # type: ignore[misc]

    def __del__(self) -> None:
        if hasattr(self, "map"):
            os.close(self.descriptor)


@dataclass(frozen=True)
class InMemory(Listing):
    """A listing whose images are in memory, from its image `first` on, named as in its `source`."""

    source: Listing
    memory: Memory
    first: int

    def name(self, index: int) -> str:
        """What messages call image `index`."""
        return self.source.name(index)

    def size(self, index: int) -> int:
        """Bytes of image `index`."""
        place = self.first + index
        return int(self.memory.offsets[place + 1] - self.memory.offsets[place])

    def read(self, index: int) -> bytes:
        """The encoded bytes of image `index`."""
        return self.memory.read(self.first + index)


def keep_in_memory(listings: Sequence[Listing], world: World) -> list[Listing]:
    """`listings` with all their images in the memory of this host. Every rank of it calls this.

    UserError if they would not fit, or one of them cannot be read.
    """
    num_images = sum(map(len, listings))
    if world.local_size == 1:
        memory = _fill(listings, num_images, world)
    elif world.local_rank == 0:
        with _listen() as server:  # before it is read, so that the others can begin to wait
            memory = _fill(listings, num_images, world)
            giver = server.dup()
        # In a thread: a rank that comes late, or never, holds up no other.
        threading.Thread(
            target=_give, args=(giver, memory.descriptor, world.local_size - 1), daemon=True
        ).start()
    else:
        memory = Memory(_take(), num_images)
    firsts = np.cumsum([0, *map(len, listings)])
    return [
        InMemory(
            root=listing.root,
            classes=listing.classes,
            paths=listing.paths,
            labels=listing.labels,
            source=listing,
            memory=memory,
            first=int(first),
        )
        for listing, first in zip(listings, firsts, strict=False)
    ]


def _fill(listings: Sequence[Listing], num_images: int, world: World) -> Memory:
    table_bytes = 8 * (num_images + 1)
    needed = table_bytes + sum(
        listing.size(index) for listing in listings for index in range(len(listing))
    )
    _check_fits(needed, available_memory(), num_images, world.host)
    sizes = [table_bytes]
    try:
        descriptor = os.memfd_create("images", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with open(descriptor, "wb", closefd=False) as file:
            file.seek(table_bytes)
            with tqdm(
                total=num_images,
                unit="image",
                desc="into memory",
                disable=None if world.is_first else True,
                leave=False,
            ) as bar:
                parts = (read_ahead(listing, range(len(listing))) for listing in listings)
                for data in itertools.chain.from_iterable(parts):
                    file.write(data)
                    sizes.append(len(data))
                    bar.update()
            file.seek(0)
            file.write(np.cumsum(sizes, dtype=np.int64).tobytes())
        # From here on it cannot be changed, not even by mistake.
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    except OSError as error:
        raise UserError(
            f"--in-memory: {world.host} gives no memory for {needed / 1e9:,.1f} GB of images "
            f"({error.strerror}). Leave --in-memory out."
        ) from error
    return Memory(descriptor, num_images)


def _check_fits(needed: int, available: int, num_images: int, host: str) -> None:
    if needed > LARGEST_SHARE * available:
        raise UserError(
            f"--in-memory: the {num_images:,} images take {needed / 1e9:,.3f} GB, and {host} has "
            f"{available / 1e9:,.3f} GB of memory left, of which they may take "
            f"{LARGEST_SHARE:.0%}. Leave --in-memory out (the system keeps in memory what fits), "
            "or ask for more memory."
        )


def available_memory(
    cgroups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> int:
    """Bytes that this process could still use: what the host has free, and what each cgroup (v2)
    that it is in, a container's or a Slurm job's, leaves it. File caches count as free."""
    available = psutil.virtual_memory().available
    lines = own.read_text().splitlines() if own.is_file() else []
    places = [line[3:].strip("/") for line in lines if line.startswith("0::")]
    for place in places:
        folder = cgroups / place
        for level in [folder, *folder.parents]:
            if not level.is_relative_to(cgroups):
                break
            try:
                limit = (level / "memory.max").read_text().strip()
                if limit != "max":
                    used = int((level / "memory.current").read_text())
                    stat = dict(
                        line.split() for line in (level / "memory.stat").read_text().splitlines()
                    )
                    cache = int(stat["active_file"]) + int(stat["inactive_file"])
                    available = min(available, int(limit) - used + cache)
            except (OSError, ValueError, KeyError):
                continue  # the root has no limit, and v1 keeps its own elsewhere
    return max(0, available)


# ---- the open file, from the first rank of a host to the others ----


def _address() -> str:
    # Two torchrun agents or slurmd may play two hosts on one.
    node = "/".join(os.environ.get(name, "") for name in ("GROUP_RANK", "SLURM_NODEID"))
    return f"\0{job_on_host()}/{node}/images"  # abstract: vanishes with the process


def _listen() -> socket.socket:
    server = socket.socket(socket.AF_UNIX)
    try:
        server.bind(_address())
    except OSError as error:
        server.close()
        if error.errno != errno.EADDRINUSE:
            raise
        raise UserError(
            "--in-memory: another run on this host, started with the same job number or port, is "
            "reading its images just now. Give this one another (--rdzv-id, --master-port), or "
            "wait until that one trains."
        ) from error
    server.listen(64)
    return server


def _give(server: socket.socket, descriptor: int, num_ranks: int) -> None:
    """Send the open file to so many ranks."""
    with server:
        while num_ranks:
            rank, _ = server.accept()
            with rank:
                if _user_of(rank) == os.getuid():
                    socket.send_fds(rank, [b"images"], [descriptor])
                    num_ranks -= 1


def _take() -> int:
    """The open file that the first rank of this host sends when all images are in it."""
    deadline = time.monotonic() + FIRST_RANK_TIMEOUT_S
    with socket.socket(socket.AF_UNIX) as first_rank:
        while True:
            try:
                first_rank.connect(_address())
                break
            except ConnectionRefusedError:  # not there yet
                if time.monotonic() > deadline:
                    raise UserError(
                        "--in-memory: the first rank of this host was not there after "
                        f"{FIRST_RANK_TIMEOUT_S:.0f} s. If each rank runs in a container of its "
                        "own, they share no memory: leave --in-memory out."
                    ) from None
                time.sleep(0.05)
        if _user_of(first_rank) != os.getuid():
            raise UserError("--in-memory: another user's process has this run's socket.")
        try:
            _, descriptors, _, _ = socket.recv_fds(first_rank, 16, 1)
        except ConnectionResetError:
            descriptors = []
        if not descriptors:  # it has a message of its own, which is the one to be told
            raise RuntimeError("Connection closed by peer: the first rank of this host has ended")
        return descriptors[0]


def _user_of(peer: socket.socket) -> int:
    """The user id of the process at the other end."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])
