"""Images in a few large tar files, read at random: fast on network file systems.

    SHARDS/train/train-000000.tar ...   image and label of each sample, as `webdataset` has them
    SHARDS/train/index.npz              where each image is, and its name in the folder
    SHARDS/val/...                      the same

`python -m recipe.data.prepare shards` writes them from a folder of class folders. Since the index
keeps the folder's names and order, image i is the same image, and training on it the same training.
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
from recipe.errors import UserError, refuse, system_errors

INDEX = "index.npz"
# Raise it whenever an index would be written or read differently.
INDEX_VERSION = 1


@dataclass(frozen=True)
class Shards(Listing):
    """A listing whose images are in tar files in `root`, `images_per_shard` in each but the last.

    `offsets` and `sizes` (int64 [num_images], bytes) are of the encoded image in its shard;
    `checksums` (uint32 [num_images]) its CRC-32. Reading opens a shard once a process, and then
    costs one `pread` an image.
    """

    shards: tuple[str, ...]
    shard_bytes: np.ndarray
    images_per_shard: int
    offsets: np.ndarray
    sizes: np.ndarray
    checksums: np.ndarray

    def shard(self, index: int) -> str:
        """The name of the shard that has image `index`."""
        return self.shards[index // self.images_per_shard]

    def name(self, index: int) -> str:
        """The shard's path, and the image's in the folder that the shards were made from."""
        return f"{self.root / self.shard(index)}: {os.fsdecode(self.paths[index])}"

    def read(self, index: int) -> bytes:
        """The encoded bytes of image `index`; any number of threads may read at once.

        UserError if the shard is gone, too short, or holds something else by now.
        """
        size = int(self.sizes[index])
        path = os.path.join(self.root, self.shard(index))

        def read() -> bytes:
            shard = _opened(path)  # by this reference it stays open, whatever other threads read
            try:
                return os.pread(shard.fileno(), size, int(self.offsets[index]))
            except OSError:
                _opened.cache_clear()  # a stale handle stays so
                raise

        data = read_patiently(path, read)
        # 21 microseconds for a photograph of 108 KB, about a hundredth of its decoding.
        if zlib.crc32(data) != self.checksums[index]:
            found = "ends too early" if len(data) < size else "holds other bytes"
            raise UserError(
                f"{self.name(index)}: the shard {found}. It is damaged, or not the one that "
                f"{INDEX} was written with: copy both again, or make them again with python -m "
                "recipe.data.prepare shards."
            )
        return data


# Below the usual limit of 1,024 open files a process. ImageNet has 129 + 5 shards.
@functools.lru_cache(maxsize=256)
def _opened(shard: str) -> io.FileIO:
    """A shard, opened once a process; closed with its last reference, when the last thread has read
    from it."""
    return open(shard, "rb", buffering=0)


def open_images(folder: Path, cache: Path) -> Listing:
    """The images in `folder`: class folders, or shards made from them; UserError if neither, or if
    the shards are not finished."""
    if (folder / INDEX).is_file():
        return open_shards(folder)
    refuse((
        (folder / UNFINISHED).is_dir(),
        f"{folder}: holds shards that are not all written yet. Run the same "
        "python -m recipe.data.prepare shards command again: it resumes where it stopped.",
    ))  # fmt: skip
    return list_images(folder, cache)


def _check_index(shards: Shards) -> None:
    """ValueError if the index contradicts itself: another image or none would be read."""
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
        raise ValueError(f"{', '.join(wrong)} contradict its {count:,} images")


def open_shards(folder: Path) -> Shards:
    """The listing of the shards in `folder`: reads the index, and looks at the size of each shard.

    UserError if the index is damaged or of another version, or if shards are missing or not as long
    as it says.
    """
    folder = Path(os.path.abspath(folder))
    same = ("paths", "labels", "shard_bytes", "offsets", "sizes", "checksums")
    try:
        arrays = read_arrays(folder / INDEX)
        if arrays["version"] != INDEX_VERSION:
            raise ValueError(f"version {arrays['version']}, and {INDEX_VERSION} is read here")
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
        found = {entry.name: entry.stat().st_size for entry in os.scandir(folder)}
    sizes = zip(shards.shards, shards.shard_bytes.tolist(), strict=True)
    refuse((
        others := [name for name, size in sizes if found.get(name) != size],
        f"{folder}: {len(others):,} of its {len(shards.shards):,} shards are missing, or not "
        f"as long as {INDEX} says: {first_few(others)}. Copy them again.",
    ))  # fmt: skip
    return shards
