"""Images in a few large tar files with random access: fast on network file systems.

    SHARDS/train/train-000000.tar ...   image and label of each sample, in `webdataset`'s format
    SHARDS/train/index.npz              where each image is, and its name in the image folder
    SHARDS/val/...                      the same

`python -m recipe.data.prepare shards` makes them from a folder of class folders. The index keeps
the folder's names and order, so image i is the same image, and training on shards is the same
training.
"""

import functools
import io
import os
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from recipe.data.image_folder import (
    DAMAGE,
    UNFINISHED,
    UNREADABLE,
    Listing,
    first_few,
    list_images,
    read_arrays,
    read_patiently,
)
from recipe.errors import BadImage, UserError, system_errors

INDEX = "index.npz"
# Raise this when an index would be written or read differently.
INDEX_VERSION = 1


@dataclass(frozen=True)
class Shards(Listing):
    """A listing whose images are in tar files in `root`, `images_per_shard` in each but the last.

    `offsets` and `sizes` (int64 [num_images], bytes) locate the encoded image in its shard;
    `checksums` (uint32 [num_images]) are its CRC-32. A process opens each shard once, and then
    reads each image with one `pread`.
    """

    shards: tuple[str, ...]
    shard_bytes: np.ndarray
    images_per_shard: int
    offsets: np.ndarray
    sizes: np.ndarray
    checksums: np.ndarray

    def shard(self, index: int) -> str:
        """Return the name of the shard that holds image `index`."""
        return self.shards[index // self.images_per_shard]

    def name(self, index: int) -> str:
        """Return the shard's path, and the image's path in the folder that the shards come from."""
        return f"{self.root / self.shard(index)}: {os.fsdecode(self.paths[index])}"

    def read(self, index: int) -> bytes:
        """Return the encoded bytes of image `index`; many threads may read at the same time.

        BadImage if the shard is gone, is too short, or now holds other bytes.
        """
        size = int(self.sizes[index])
        path = os.path.join(self.root, self.shard(index))

        def read() -> bytes:
            shard = _opened(path)  # this reference keeps it open if others push it from the cache
            try:
                return os.pread(shard.fileno(), size, int(self.offsets[index]))
            except OSError:
                _opened.cache_clear()  # a stale handle never recovers
                raise

        data = read_patiently(path, read)
        # Takes 21 microseconds for a photograph of 108 KB, about 1 % of the time to decode it.
        if zlib.crc32(data) != self.checksums[index]:
            fault = "ends too early" if len(data) < size else "holds other bytes"
            raise BadImage(
                f"{self.name(index)}: the shard {fault}. It is damaged, or not the one that "
                f"{INDEX} was written with: copy both again, or make them again with python -m "
                "recipe.data.prepare shards."
            )
        return data


# Below the usual limit of 1,024 open files per process. ImageNet has 129 + 5 shards.
@functools.lru_cache(maxsize=256)
def _opened(shard: str) -> io.FileIO:
    """Open a shard, once per process. It is closed with its last reference, when no thread reads
    from it any more."""
    return open(shard, "rb", buffering=0)


def open_images(folder: Path, cache: Path) -> Listing:
    """List the images in `folder`, which holds class folders, or shards made from them. UserError
    if it holds neither, or unfinished shards."""
    if (folder / INDEX).is_file():
        return open_shards(folder)
    if (folder / UNFINISHED).is_dir():
        raise UserError(
            f"{folder}: holds unfinished shards. Run the same "
            "python -m recipe.data.prepare shards command again: it resumes where it stopped."
        )
    return list_images(folder, cache)


def _check_index(shards: Shards) -> None:
    """Raise ValueError if the index contradicts itself, so that wrong images would be read."""
    count = len(shards.paths)
    each = {name: getattr(shards, name) for name in ("labels", "offsets", "sizes", "checksums")}
    wrong = [name for name, values in each.items() if values.shape != (count,)]
    if shards.images_per_shard < 1 or len(shards.shards) * shards.images_per_shard < count:
        wrong.append("images_per_shard")
    if not set(np.unique(shards.labels)) <= set(range(len(shards.classes))):
        wrong.append("labels")
    if shards.shard_bytes.shape != (len(shards.shards),):
        wrong.append("shard_bytes")
    if wrong:
        raise ValueError(f"{', '.join(wrong)} contradict its number of images, {count:,}")


def open_shards(folder: Path) -> Shards:
    """Return the listing of the shards in `folder`, from its index; check the size of each shard.

    UserError if the index is damaged or has another version, or if shards are missing or do not
    have the size that it gives.
    """
    folder = Path(os.path.abspath(folder))
    same = ("paths", "labels", "shard_bytes", "offsets", "sizes", "checksums")
    try:
        arrays = read_arrays(folder / INDEX)
        if arrays["version"] != INDEX_VERSION:
            raise ValueError(f"it has version {arrays['version']}, not {INDEX_VERSION}")
        shards = Shards(
            root=folder,
            classes=tuple(map(os.fsdecode, arrays["classes"].tolist())),
            shards=tuple(map(os.fsdecode, arrays["shards"].tolist())),
            images_per_shard=int(arrays["images_per_shard"]),
            **{name: arrays[name] for name in same},
        )
        _check_index(shards)
    except DAMAGE as error:
        raise UserError(
            f"{folder / INDEX}: cannot be read as an index of shards ({error}). Copy it again, or "
            "make the shards again with python -m recipe.data.prepare shards."
        ) from error
    with system_errors(folder, *UNREADABLE):
        sizes_here = {entry.name: entry.stat().st_size for entry in os.scandir(folder)}
    sizes = zip(shards.shards, shards.shard_bytes.tolist(), strict=True)
    if wrong := [name for name, size in sizes if sizes_here.get(name) != size]:
        raise UserError(
            f"{folder}: {len(wrong):,} of its {len(shards.shards):,} shards are missing, or do not "
            f"have the size that {INDEX} gives: {first_few(wrong)}. Copy them again."
        )
    return shards
