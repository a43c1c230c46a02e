"""Write a folder of images as a few large tar files, and an index to read them at random.

    python -m recipe.make_shards IMAGENET SHARDS
    python -m recipe.make_shards SHARDS --verify

IMAGENET holds train/ and val/ in ImageNet's layout, as for --data; afterwards `--data SHARDS` is
the same training, image by image. The images are copied unchanged. A shard is written whole or not
at all, and the same command finishes an interrupted run. The same folder gives the same
bytes. The `webdataset` library reads the tar files, too: 000000123.jpg and 000000123.cls, the
label.
"""

import argparse
import hashlib
import io
import json
import os
import shutil
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from recipe.config import cache_folder
from recipe.data.damage import SuspectImages
from recipe.data.image_folder import Listing, check_train_and_val, list_images, locked, read_ahead
from recipe.data.images import decode_and_look, image_size
from recipe.data.shards import INDEX, INDEX_VERSION, UNFINISHED, Shards, holds_shards, open_shards
from recipe.errors import UserError, run_command
from recipe.files import whole_file
from recipe.flags import DataFlags

PARTS = ("train", "val")
IMAGES_PER_SHARD = 10_000  # about 1 GB of ImageNet's, 129 shards
PLAN = "plan.json"
JPEG_SUFFIXES = (".jpeg", ".jpe", ".jfif")


@dataclass(frozen=True)
class _Part:
    """What the index says about one shard: three arrays, one entry an image, and the shard's
    size."""

    offsets: np.ndarray
    sizes: np.ndarray
    checksums: np.ndarray
    shard_bytes: int


def make_shards(
    source: Path, target: Path, cache_dir: Path, images_per_shard: int = IMAGES_PER_SHARD
) -> list[str]:
    """Write train/ and val/ of the folder `source` as shards into `target`; what is there already
    is kept. Returns a line about each.

    UserError if `source` is no folder to train on, or an image in it no image; if `target` holds
    shards of other images, or cannot be written.
    """
    if images_per_shard < 1:
        raise UserError(f"--images-per-shard {images_per_shard}: must be at least 1")
    listings = {part: list_images(source / part, cache_dir) for part in PARTS}
    check_train_and_val(listings["train"], listings["val"])
    return write_shards(listings, target, images_per_shard)


def write_shards(listings: Mapping[str, Listing], target: Path, images_per_shard: int) -> list[str]:
    """Write the images of each listing, wherever they are, as shards into `target`/NAME; what is
    there already is kept. Returns a line about each. UserError as in `make_shards`."""
    lines = []
    try:
        target.mkdir(parents=True, exist_ok=True)
        with locked(target / ".lock"):
            for part, listing in listings.items():
                shards = _make_part(listing, target / part, images_per_shard)
                lines.append(
                    f"{shards.root}: {len(shards.shards):,} shards, {len(shards):,} images of "
                    f"{len(shards.classes):,} classes, {shards.shard_bytes.sum() / 1e9:,.3f} GB"
                )
        (target / ".lock").unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"{error.filename or target}: cannot be written ({error.strerror}). Fix that and run "
            "the same command again: it resumes where it stopped."
        ) from error
    return lines


def verify_shards(root: Path) -> list[str]:
    """Read and decode every image of the shards in `root`/train and `root`/val; a line about each.

    UserError about the first image whose checksum is another, or which cannot be decoded, or is
    suspect where that is too many.
    """
    lines = []
    for part in PARTS:
        if not holds_shards(root / part):
            raise UserError(
                f"{root / part}: holds no shards to verify. Name the folder that was written."
            )
        shards = open_shards(root / part)
        suspects = SuspectImages(shards)
        with tqdm(total=len(shards), unit="image", desc=f"verifying {part}", disable=None) as bar:
            for index, data in enumerate(read_ahead(shards, range(len(shards)))):
                try:
                    _, left_over = decode_and_look(data, shards.name(index))
                    if left_over:
                        suspects.add(index, left_over)
                except UserError as error:
                    raise UserError(
                        f"{error} That is, in the folder that the shards were made from; then "
                        f"remove {shards.root} and make its shards again: what is there is kept."
                    ) from error
                bar.update()
        note = f", {suspects.count:,} may be damaged" if suspects.count else ""
        lines.append(f"{shards.root}: {len(shards):,} images are whole and can be decoded{note}")
    return lines


def _make_part(listing: Listing, folder: Path, images_per_shard: int) -> Shards:
    """Write the shards of one listing into `folder`, and the index last: it says that all are
    there."""
    if (folder / INDEX).is_file():
        shards = open_shards(folder)
        same = (listing.paths.dtype, images_per_shard) == (
            shards.paths.dtype, shards.images_per_shard
        )  # fmt: skip
        if same and _identity(listing) == _identity(shards):
            return shards
        raise UserError(_of_others(folder))
    work = folder / UNFINISHED
    work.mkdir(parents=True, exist_ok=True)
    plan = {
        "version": INDEX_VERSION,
        "images_per_shard": images_per_shard,
        "images": _identity(listing),
    }
    if (work / PLAN).is_file():
        if _read_plan(work / PLAN) != plan:
            raise UserError(_of_others(folder))
    else:
        with whole_file(work / PLAN, sync=True) as file:
            file.write(json.dumps(plan).encode())
    starts = range(0, len(listing), images_per_shard)
    names = [f"{folder.name}-{number:06d}.tar" for number in range(len(starts))]
    parts = []
    with tqdm(total=len(listing), unit="image", desc=folder.name, disable=None) as bar:
        for name, start in zip(names, starts, strict=True):
            indices = range(start, min(start + images_per_shard, len(listing)))
            part = _finished_part(folder, name)
            if part is None:
                part = _write_shard(listing, indices, folder, name, bar)
            else:
                bar.update(len(indices))
            parts.append(part)
    with whole_file(work / INDEX, sync=True) as file:  # so that all rests are in there
        np.savez(
            file,
            version=np.int64(INDEX_VERSION),
            classes=np.array([os.fsencode(name) for name in listing.classes]),
            paths=listing.paths,
            labels=listing.labels,
            shards=np.array([name.encode() for name in names]),
            shard_bytes=np.array([part.shard_bytes for part in parts], dtype=np.int64),
            images_per_shard=np.int64(images_per_shard),
            offsets=np.concatenate([part.offsets for part in parts]),
            sizes=np.concatenate([part.sizes for part in parts]),
            checksums=np.concatenate([part.checksums for part in parts]),
        )
    os.replace(work / INDEX, folder / INDEX)
    shutil.rmtree(work)
    return open_shards(folder)


def _write_shard(listing: Listing, indices: range, folder: Path, name: str, bar: tqdm) -> _Part:
    """Write one shard under another name, what the index needs to know of it, and then rename
    it."""
    # Of its own: on a file system without locks two processes may write the same shard.
    temporary = folder / UNFINISHED / f"{name}.{os.uname().nodename}-{os.getpid()}"
    offsets, sizes, checksums = [], [], []
    with open(temporary, "wb") as file:
        # Without times, owners and rights of the files: the same images give the same bytes.
        with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for index, data in zip(indices, read_ahead(listing, indices), strict=True):
                image_size(data, listing.name(index))  # UserError unless its head is an image's
                label = b"%d" % listing.labels[index]
                suffix = os.path.splitext(listing.name(index))[1].lower()
                suffix = ".jpg" if suffix in JPEG_SUFFIXES else suffix
                _add(tar, f"{index:09d}{suffix}", data)
                offsets.append(file.tell() - _padded(len(data)))
                sizes.append(len(data))
                checksums.append(zlib.crc32(data))
                _add(tar, f"{index:09d}.cls", label)
                bar.update()
        file.flush()
        os.fsync(file.fileno())
        shard_bytes = file.tell()
    part = _Part(
        offsets=np.array(offsets, dtype=np.int64),
        sizes=np.array(sizes, dtype=np.int64),
        checksums=np.array(checksums, dtype=np.uint32),
        shard_bytes=shard_bytes,
    )
    with whole_file(_part_file(folder, name), sync=True) as file:
        np.savez(file, **vars(part))
    os.replace(temporary, folder / name)
    return part


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def _padded(size: int) -> int:
    return -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE


def _part_file(folder: Path, name: str) -> Path:
    return folder / UNFINISHED / f"{name}.npz"


def _finished_part(folder: Path, name: str) -> _Part | None:
    """What an interrupted run has kept about a shard that it finished, or None."""
    try:
        with np.load(_part_file(folder, name), allow_pickle=False) as stored:
            part = _Part(
                offsets=stored["offsets"],
                sizes=stored["sizes"],
                checksums=stored["checksums"],
                shard_bytes=int(stored["shard_bytes"]),
            )
        return part if os.stat(folder / name).st_size == part.shard_bytes else None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def _identity(listing: Listing) -> str:
    """Digest of the names of images and classes, in order."""
    digest = hashlib.sha256(listing.paths.tobytes())
    digest.update(listing.labels.tobytes())
    digest.update("\0".join(listing.classes).encode(errors="surrogateescape"))
    return digest.hexdigest()


def _read_plan(path: Path) -> object:
    try:
        return json.loads(path.read_bytes())
    except ValueError:
        return None


def _of_others(folder: Path) -> str:
    return (
        f"{folder}: holds shards of other images than the folder has now, or with another "
        "--images-per-shard. Choose another folder for the shards, or remove this one."
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit code (`run_command`)."""
    parser = argparse.ArgumentParser(prog="python -m recipe.make_shards", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("folder", type=Path, help="holds train/ and val/; with --verify: the shards")
    add("shards", type=Path, nargs="?", help="where they are written")
    add("--verify", action="store_true", help="read all shards, and decode every image")
    add(
        "--images-per-shard",
        type=int,
        default=IMAGES_PER_SHARD,
        metavar="N",
        help=f"default: {IMAGES_PER_SHARD:,}",
    )
    add(
        "--cache-dir",
        default=DataFlags.cache_dir,
        metavar="DIR",
        help=f"for the folder's listing; default: {DataFlags.cache_dir}",
    )
    options = parser.parse_args(arguments)
    if (options.shards is None) != options.verify:
        parser.error("name the folder and where to write its shards, or the shards and --verify")
    if options.verify:
        return run_command(lambda: verify_shards(options.folder))
    cache = Path(cache_folder(options.cache_dir))
    return run_command(
        lambda: make_shards(options.folder, options.shards, cache, options.images_per_shard)
    )


if __name__ == "__main__":
    sys.exit(main())
