"""Images in a few large tar files, read at random: fast on network file systems.

    SHARDS/train/train-000000.tar ...   image and label of each sample, as `webdataset` has them
    SHARDS/train/index.npz              where each image is, and its name in the folder
    SHARDS/val/...                      the same

`python -m recipe.make_shards` writes them from a folder of class folders. Since the index keeps the
folder's names and order, image i is the same image, and training on it the same training.
"""

import os
import zipfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from recipe.data.folder_errors import UNFINISHED, first_few
from recipe.data.image_folder import Listing
from recipe.errors import UserError

INDEX = "index.npz"
# Raise it whenever an index would be written or read differently.
INDEX_VERSION = 1
# Below the usual limit of 1,024 open files a process. ImageNet has 129 + 5 shards.
MAX_OPEN_SHARDS = 256


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
    _open: dict[str, "_Descriptor"] = field(default_factory=dict, repr=False, compare=False)

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
        try:
            shard = self._descriptor(self.shard(index))
            data = os.pread(shard.number, size, int(self.offsets[index]))
        except OSError as error:
            raise UserError(
                f"{self.name(index)}: cannot be read ({error.strerror}). "
                "Is the disk mounted? Was the shard removed?"
            ) from error
        # 21 microseconds for a photograph of 108 KB, about a hundredth of its decoding.
        if zlib.crc32(data) != self.checksums[index]:
            found = "ends too early" if len(data) < size else "holds other bytes"
            raise UserError(
                f"{self.name(index)}: the shard {found}. It is damaged, or not the one that "
                f"{INDEX} was written with: copy both again, or make them again with python -m "
                "recipe.make_shards."
            )
        return data

    def _descriptor(self, shard: str) -> "_Descriptor":
        opened = self._open.get(shard)
        if opened is None:
            if len(self._open) >= MAX_OPEN_SHARDS:
                # Closed when the last thread that reads from it lets go of it.
                self._open.pop(next(iter(self._open)), None)
            opened = self._open[shard] = _Descriptor(self.root / shard)
        return opened

    def __getstate__(self) -> dict[str, Any]:
        """Without open files: each loader worker opens its own."""
        return {**self.__dict__, "_open": {}}


class _Descriptor:
    """An open file, closed with its last reference."""

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


def holds_shards(folder: Path) -> bool:
    """Whether `folder` holds shards rather than class folders; UserError if they are not
    finished."""
    if (folder / INDEX).is_file():
        return True
    if (folder / UNFINISHED).is_dir():
        raise UserError(
            f"{folder}: holds shards that are not all written yet. Run the same "
            "python -m recipe.make_shards command again: it resumes where it stopped."
        )
    return False


def open_shards(folder: Path) -> Shards:
    """The listing of the shards in `folder`: reads the index, and looks at the size of each shard.

    UserError if the index is damaged or of another version, or if shards are missing or not as long
    as it says.
    """
    folder = Path(os.path.abspath(folder))
    again = "Make the shards again with python -m recipe.make_shards"
    try:
        with np.load(folder / INDEX, allow_pickle=False) as stored:
            version = int(stored["version"])
            if version != INDEX_VERSION:
                raise UserError(
                    f"{folder / INDEX}: is of version {version}, and version {INDEX_VERSION} is "
                    f"read here. {again}, or use the version of this project that wrote them."
                )
            shards = Shards(
                root=folder,
                classes=tuple(map(os.fsdecode, stored["classes"].tolist())),
                paths=stored["paths"],
                labels=stored["labels"],
                shards=tuple(map(os.fsdecode, stored["shards"].tolist())),
                shard_bytes=stored["shard_bytes"],
                images_per_shard=int(stored["images_per_shard"]),
                offsets=stored["offsets"],
                sizes=stored["sizes"],
                checksums=stored["checksums"],
            )
    except UserError:
        raise
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(
            f"{folder / INDEX}: cannot be read as an index of shards ({error}). Copy it again. "
            f"If there is no other: {again}."
        ) from error
    _check_files(shards)
    return shards


def _check_files(shards: Shards) -> None:
    missing, others = [], []
    for name, expected in zip(shards.shards, shards.shard_bytes.tolist(), strict=True):
        try:
            found = os.stat(shards.root / name).st_size
        except FileNotFoundError:
            missing.append(name)
        except OSError as error:
            raise UserError(
                f"{shards.root / name}: cannot be read ({error.strerror}). Check its permissions."
            ) from error
        else:
            if found != expected:
                others.append(f"{name} ({found:,} bytes instead of {expected:,})")
    if missing:
        raise UserError(
            f"{shards.root}: {len(missing):,} of its {len(shards.shards):,} shards are missing: "
            f"{first_few(missing)}. Copy them again."
        )
    if others:
        raise UserError(
            f"{shards.root}: {len(others):,} of its {len(shards.shards):,} shards are not as long "
            f"as {INDEX} says: {first_few(others)}. They are cut off or of another set: copy them "
            "again."
        )
