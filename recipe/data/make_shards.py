"""Write a folder of images as a few large tar files, and an index to read them at random.

    python -m recipe.data.make_shards IMAGENET SHARDS

IMAGENET holds train/ and val/ in ImageNet's layout, as for --data; afterwards `--data SHARDS` is
the same training, image by image. The images are copied unchanged. A shard is written whole or not
at all, and the same command finishes an interrupted run. The same folder gives the same
bytes. The `webdataset` library reads the tar files, too: 000000123.jpg and 000000123.cls, the
label.
"""

import io
import os
import shutil
import sys
import tarfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm
from tyro.conf import Positional

from recipe.command import RESUMES, run_tool
from recipe.data.decoding import image_size
from recipe.data.image_folder import (
    DAMAGE,
    Listing,
    check_train_and_val,
    list_images,
    locked,
    read_arrays,
)
from recipe.data.shards import INDEX, INDEX_VERSION, UNFINISHED, Shards, open_shards
from recipe.errors import UserError, refuse
from recipe.files import whole_file
from recipe.settings.config import home_path
from recipe.settings.flags import DataFlags

PARTS = ("train", "val")
IMAGES_PER_SHARD = 10_000  # about 1 GB of ImageNet's, 129 shards
# What the index says beside names and labels: of each shard, and of each image in it.
MEASURED = {"shard_bytes": "int64", "offsets": "int64", "sizes": "int64", "checksums": "uint32"}
NUM_READING_THREADS, IMAGES_AHEAD = 8, 64
ONE_SUFFIX = dict.fromkeys((".jpeg", ".jpe", ".jfif"), ".jpg")


def make_shards(
    source: Path, target: Path, cache_dir: Path, images_per_shard: int = IMAGES_PER_SHARD
) -> list[str]:
    """Write train/ and val/ of the folder `source` as shards into `target`; what is there already
    is kept. Returns a line about each.

    UserError if `source` is no folder to train on, or an image in it no image; if `target` holds
    shards of other images, or cannot be written.
    """
    refuse((images_per_shard < 1, f"--images-per-shard {images_per_shard}: must be at least 1"))
    listings = {part: list_images(source / part, cache_dir) for part in PARTS}
    check_train_and_val(listings["train"], listings["val"])
    lines = []
    try:
        target.mkdir(parents=True, exist_ok=True)
        with locked(target / ".lock"):
            for part, listing in listings.items():
                shards = _make_part(listing, target / part, images_per_shard)
                lines.append(
                    f"{shards.root}: {len(shards.shards):,} shards, {len(shards):,} images of "
                    f"{len(shards.classes):,} classes, {shards.shard_bytes.sum() / 1e9:,.3f} GB"
                    f"{listing.left_out and '; '}{listing.left_out}"
                )
        (target / ".lock").unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"{error.filename or target}: cannot be written ({error.strerror}). Fix that and run "
            "the same command again: it resumes where it stopped."
        ) from error
    return lines


def _make_part(listing: Listing, folder: Path, images_per_shard: int) -> Shards:
    """Write the shards of one listing into `folder`, and last the index, which says that all are
    there. Until then the unfinished part says which images they are of, and has a note on each
    shard that is written."""
    starts = range(0, len(listing), images_per_shard)
    names = [f"{folder.name}-{number:06d}.tar" for number in range(len(starts))]
    index: dict[str, Any] = {
        "version": np.int64(INDEX_VERSION),
        "classes": np.array([os.fsencode(name) for name in listing.classes]),
        "paths": listing.paths,
        "labels": listing.labels,
        "shards": np.array([name.encode() for name in names]),
        "images_per_shard": np.int64(images_per_shard),
    }
    work = folder / UNFINISHED
    try:
        begun = read_arrays((folder if (folder / INDEX).is_file() else work) / INDEX)
    except DAMAGE:  # or none yet
        work.mkdir(parents=True, exist_ok=True)
        with whole_file(work / INDEX) as file:
            np.savez(file, **index)
        begun = index
    if not all(np.array_equal(begun[name], value) for name, value in index.items()):
        raise UserError(
            f"{folder}: holds shards of other images than the folder has now, or with another "
            "--images-per-shard. Choose another folder for the shards, or remove this one."
        )
    if not (folder / INDEX).is_file():
        notes = []
        bar = tqdm(names, folder.name, unit="shard", disable=None)
        for name, start in zip(bar, starts, strict=True):
            note = work / f"{name}.npz"
            if not note.is_file() or not (folder / name).is_file():
                indices = range(start, min(start + images_per_shard, len(listing)))
                found = _write_shard(listing, indices, work / name)
                os.replace(work / name, folder / name)
                with whole_file(note, sync=True) as file:
                    np.savez(file, **found)
            notes.append(read_arrays(note))
        for name, dtype in MEASURED.items():
            index[name] = np.concatenate([note[name] for note in notes]).astype(dtype)
        with whole_file(folder / INDEX, sync=True) as file:
            np.savez(file, **index)
    shutil.rmtree(work, ignore_errors=True)
    return open_shards(folder)


def _write_shard(listing: Listing, indices: range, shard: Path) -> dict[str, Any]:
    """Write one shard; returns what the index needs to know of it (MEASURED)."""
    found: dict[str, list[int]] = {name: [] for name in MEASURED}
    with whole_file(shard, sync=True) as file:
        # Without times, owners and rights of the files: the same images give the same bytes.
        with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for index, data in zip(indices, read_ahead(listing, indices), strict=True):
                image_size(data, listing.name(index))  # UserError unless its head is an image's
                suffix = os.path.splitext(listing.name(index))[1].lower()
                _add(tar, f"{index:09d}{ONE_SUFFIX.get(suffix, suffix)}", data)
                blocks = -(-len(data) // tarfile.BLOCKSIZE)
                found["offsets"].append(file.tell() - blocks * tarfile.BLOCKSIZE)
                found["sizes"].append(len(data))
                found["checksums"].append(zlib.crc32(data))
                _add(tar, f"{index:09d}.cls", b"%d" % listing.labels[index])
        found["shard_bytes"].append(file.tell())
    return found


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def read_ahead(listing: Listing, indices: range) -> Iterator[bytes]:
    """The encoded bytes of images `indices`, in this order, read a few at once: the answers of
    network file systems overlap."""
    with ThreadPoolExecutor(NUM_READING_THREADS) as pool:
        for start in range(0, len(indices), IMAGES_AHEAD):
            yield from pool.map(listing.read, indices[start : start + IMAGES_AHEAD])


def run(
    folder: Positional[Path],
    shards: Positional[Path],
    images_per_shard: int = IMAGES_PER_SHARD,
    cache_dir: str = DataFlags.cache_dir,
) -> list[str]:
    """Make shards; returns lines about them.

    Args:
        folder: Holds train/ and val/.
        shards: Where they are written.
        cache_dir: For the folder's listing.
    """
    return make_shards(folder, shards, Path(home_path("--cache-dir", cache_dir)), images_per_shard)


main = partial(
    run_tool, "python -m recipe.data.make_shards", run, __doc__, exit_code=1, interrupted=RESUMES
)


if __name__ == "__main__":
    sys.exit(main())
