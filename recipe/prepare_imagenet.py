"""Unpack ImageNet's own archives into class folders, or write them as shards.

    python -m recipe.prepare_imagenet ARCHIVES OUT
    python -m recipe.prepare_imagenet ARCHIVES OUT --shards

ARCHIVES holds ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar and ILSVRC2012_devkit_t12.tar.gz,
as image-net.org gives them out. Afterwards `--data OUT` trains on them. Each archive is read twice:
once to compare its MD5 with the published one, and once for the images. OUT/train and OUT/val
appear when they are complete. The same command finishes an interrupted run.
"""

import argparse
import hashlib
import os
import shutil
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import numpy as np
from tqdm import tqdm

from recipe.data.folder_errors import CLASS_ARCHIVE, TRAIN_IMAGE, UNFINISHED, first_few
from recipe.data.image_folder import NUM_READING_THREADS, Listing, check_train_and_val, locked
from recipe.errors import UserError, run_command
from recipe.files import whole_file
from recipe.make_shards import IMAGES_PER_SHARD, write_shards
from recipe.prepare_val import read_labels

READ_BYTES = 1 << 20
STREAM_BYTES = 1 << 16  # tarfile copies what is left of its buffer for each header that it reads
CLASS_BYTES = "S9"  # n01440764
BLOCK_BYTES = 4096  # what a file system rounds a file's size up to; a shard adds less to an image


@dataclass(frozen=True)
class Archive:
    """A published file. A wrong length saves reading a large one for its MD5."""

    name: str
    md5: str
    num_bytes: int | None = None
    num_images: int = 0


@dataclass(frozen=True)
class Release:
    """The three files of a classification task."""

    train: Archive
    val: Archive
    devkit: Archive


# MD5: image-net.org's download page, and ARCHIVE_META in torchvision/datasets/imagenet.py. Lengths:
# SIZES in taming/data/imagenet.py of CompVis/taming-transformers. Counts: Russakovsky et al. 2015
# (arXiv 1409.0575), table 2.
ILSVRC2012 = Release(
    Archive(
        "ILSVRC2012_img_train.tar", "1d675b47d978889d74fa0da5fadfb00e", 147_897_477_120, 1_281_167
    ),
    Archive("ILSVRC2012_img_val.tar", "29b22e2961454d5413ddabcf34fc5622", 6_744_924_160, 50_000),
    Archive("ILSVRC2012_devkit_t12.tar.gz", "fa75699e90414af021442c21a62c3abf"),
)


@dataclass(frozen=True)
class PackedImages(Listing):
    """The images of one archive, in the order that they have in class folders.

    `root` is the archive and `descriptor` what it is open as. `offsets` and `sizes` (int64
    [num_images], bytes) say where each encoded image is in it.
    """

    descriptor: int
    offsets: np.ndarray
    sizes: np.ndarray

    def name(self, index: int) -> str:
        """The archive, and the image's path in the folder to be."""
        return f"{self.root}: {os.fsdecode(self.paths[index])}"

    def size(self, index: int) -> int:
        """Bytes of image `index`, encoded."""
        return int(self.sizes[index])

    def read(self, index: int) -> bytes:
        """The encoded bytes of image `index`; any number of threads may read at once."""
        try:
            data = os.pread(self.descriptor, self.size(index), int(self.offsets[index]))
        except OSError as error:
            raise UserError(
                f"{self.name(index)}: cannot be read ({error.strerror}). Check its disk."
            ) from error
        if len(data) < self.size(index):
            raise UserError(f"{self.root}: has become shorter since it was checked. Copy it again.")
        return data


def prepare(archives: Path, out: Path, shards: bool, release: Release = ILSVRC2012) -> list[str]:
    """Write the images of `release` in the folder `archives` to `out`/train and `out`/val, as class
    folders or as shards. Returns a line about each.

    What is there already is kept. UserError if an archive is missing, or not the one published; if
    `out` holds something else, has too little room, or cannot be written.
    """
    with ExitStack() as stack:
        files = {
            archive: stack.enter_context(_open(archives / archive.name, archive))
            for archive in (release.devkit, release.val, release.train)
        }
        devkit = _Hashed(files[release.devkit])
        devkit.read(-1)
        devkit.check(release.devkit)
        labels = read_labels(archives / release.devkit.name)
        try:
            return _prepare(files, labels, out, shards, release)
        except OSError as error:
            raise UserError(
                f"{error.filename or out}: cannot be written ({error.strerror}). Fix that and run "
                "the same command again: it resumes where it stopped."
            ) from error


def _prepare(
    files: dict[Archive, BinaryIO],
    labels: dict[str, str],
    out: Path,
    shards: bool,
    release: Release,
) -> list[str]:
    work = out / UNFINISHED
    work.mkdir(parents=True, exist_ok=True)
    with locked(work / "lock"):
        work.mkdir(exist_ok=True)  # who had the lock before has deleted it
        parts = {
            part: _list_archive(files[archive], archive, labels, work / f"{part}.npz")
            for part, archive in (("val", release.val), ("train", release.train))
        }
        check_train_and_val(parts["train"], parts["val"])
        _check_room(parts, out)
        if shards:
            _refuse_class_folders(out, parts)
            lines = write_shards(parts, out, IMAGES_PER_SHARD)
        else:
            lines = [_unpack(images, out / part) for part, images in parts.items()]
    shutil.rmtree(work)
    return lines


# ---- archives ----


def _open(path: Path, archive: Archive) -> BinaryIO:
    try:
        file = path.open("rb")
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}). Name the folder with {archive.name} from "
            "image-net.org. For Kaggle's files and for unpacked images see docs/data.md."
        ) from error
    found = os.fstat(file.fileno()).st_size
    if archive.num_bytes not in (None, found):
        file.close()
        raise UserError(
            f"{path}: has {found:,} bytes instead of {archive.num_bytes:,}. It was not downloaded "
            "to its end, or is another file. Download it again."
        )
    return file


class _Hashed:
    """A file that is read from its start to its end, for its MD5."""

    def __init__(self, file: BinaryIO, progress: tqdm | None = None) -> None:
        self.file, self.progress = file, progress
        self.md5 = hashlib.md5(usedforsecurity=False)

    def read(self, size: int) -> bytes:
        try:
            data = self.file.read(size)
        except OSError as error:
            raise UserError(
                f"{self.file.name}: cannot be read ({error.strerror}). Check its disk."
            ) from error
        self.md5.update(data)
        if self.progress is not None:
            self.progress.update(len(data))
        return data

    def check(self, archive: Archive) -> None:
        """UserError unless what was read is the archive that was published."""
        if self.md5.hexdigest() != archive.md5:
            raise UserError(
                f"{self.file.name}: has the MD5 {self.md5.hexdigest()} instead of {archive.md5}, "
                "the published one. It is damaged, or another file. Download it again."
            )


def _list_archive(
    file: BinaryIO, archive: Archive, labels: dict[str, str], kept: Path
) -> PackedImages:
    """The images in an archive; UserError unless it is the published one. What is found goes into
    the file `kept`, and comes from there as long as the archive keeps its modification time."""
    mark = f"{archive.md5} {os.fstat(file.fileno()).st_mtime_ns}"
    arrays: dict[str, Any] | None = _read_kept(kept, mark)
    if arrays is None:
        found = sorted(_find_images(file, archive, labels))
        paths, offsets, sizes = zip(*found, strict=True)
        arrays = {
            "paths": np.array(paths, dtype=np.bytes_),
            "offsets": np.array(offsets, dtype=np.int64),
            "sizes": np.array(sizes, dtype=np.int64),
        }
        with whole_file(kept, sync=True) as stored:
            np.savez(stored, mark=np.array(mark), **arrays)
    classes, labels_found = np.unique(arrays["paths"].astype(CLASS_BYTES), return_inverse=True)
    return PackedImages(
        root=Path(file.name),
        classes=tuple(map(os.fsdecode, classes.tolist())),
        labels=labels_found.astype(np.int64),
        descriptor=file.fileno(),
        **arrays,
    )


def _read_kept(kept: Path, mark: str) -> dict[str, Any] | None:
    try:
        with np.load(kept, allow_pickle=False) as stored:
            if str(stored["mark"]) != mark:
                return None
            return {key: stored[key] for key in ("paths", "offsets", "sizes")}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def _find_images(
    file: BinaryIO, archive: Archive, labels: dict[str, str]
) -> list[tuple[str, int, int]]:
    """Read an archive from end to end: the path of each image (class folder and name), its offset
    and its size in bytes. UserError if the MD5 is wrong, or an image has no class."""
    images: list[tuple[str, int, int]] = []
    unknown: list[str] = []
    with tqdm(
        total=archive.num_bytes, unit="B", unit_scale=True, desc=archive.name, disable=None
    ) as progress:
        stream = _Hashed(file, progress)
        try:
            for packed_class, member, start in _members(stream):
                name = PurePosixPath(member.name).name
                found = _class_of(name, packed_class, labels)
                if found is None:
                    unknown.append(name)
                else:
                    images.append((f"{found}/{name}", start, member.size))
        except tarfile.TarError as error:
            unknown.append(f"{error}")  # unless the MD5 says it better
        while stream.read(READ_BYTES):
            pass
    stream.check(archive)
    if unknown or len(images) != archive.num_images:
        raise UserError(
            f"{file.name}: holds {len(images):,} images with a class instead of "
            f"{archive.num_images:,}; others: {first_few(unknown)}. Is it ImageNet's archive?"
        )
    return images


def _members(stream: _Hashed) -> Iterator[tuple[str | None, tarfile.TarInfo, int]]:
    """The files in a tar file, and in the tar files in it that bear a class's name: that class or
    None, the file, and its offset in the stream."""
    options: dict[str, Any] = {"mode": "r|", "bufsize": STREAM_BYTES}  # in order, once
    outer_file: Any = stream  # of a file's methods it has the one that is used
    with tarfile.open(fileobj=outer_file, **options) as outer:
        for member in filter(tarfile.TarInfo.isfile, outer):
            packed = CLASS_ARCHIVE.fullmatch(PurePosixPath(member.name).name)
            if packed is None:
                yield None, member, member.offset_data
                continue
            with tarfile.open(fileobj=outer.extractfile(member), **options) as inner:
                for image in filter(tarfile.TarInfo.isfile, inner):
                    yield packed[1], image, member.offset_data + image.offset_data


def _class_of(name: str, packed_class: str | None, labels: dict[str, str]) -> str | None:
    """The class of an image: that of its inner tar file or of its label. None if it has neither."""
    if packed_class is None:
        return labels.get(name.removesuffix(".JPEG"))
    match = TRAIN_IMAGE.fullmatch(name)
    return packed_class if match and match[1] == packed_class else None


# ---- class folders ----


def _unpack(images: PackedImages, folder: Path) -> str:
    """Write the class folders beside `folder`, and give them its name when they are complete."""
    summary = f"{folder}: {len(images):,} images of {len(images.classes):,} classes"
    if folder.exists():
        others = _each_class(images, folder, _check_class)
        if sum(others):
            raise UserError(
                f"{folder}: is there already, and {sum(others):,} of its files are others than "
                f"in {images.root}. Remove it, or choose another folder."
            )
        return f"{summary} were there already"
    unfinished = folder.parent / UNFINISHED / folder.name
    _each_class(images, unfinished, _write_class)
    os.sync()  # the name must not reach the disk before the images
    unfinished.rename(folder)
    return summary


def _each_class(
    images: PackedImages, root: Path, work: Callable[[PackedImages, range, Path], int]
) -> list[int]:
    """Call `work` for each class, a few at once, with the indices of its images and its folder."""
    bounds = np.searchsorted(images.labels, np.arange(len(images.classes) + 1)).tolist()
    pool = ThreadPoolExecutor(NUM_READING_THREADS)
    try:
        futures = {
            pool.submit(work, images, range(start, end), root / name): end - start
            for name, (start, end) in zip(images.classes, pairwise(bounds), strict=True)
        }
        with tqdm(total=len(images), unit="image", desc=str(root), disable=None) as bar:
            for future in as_completed(futures):
                future.result()
                bar.update(futures[future])
        return [future.result() for future in futures]
    finally:
        pool.shutdown(cancel_futures=True)  # after an error


def _write_class(images: PackedImages, indices: range, folder: Path) -> int:
    """Write the images of one class that are not in `folder`, or not whole; returns how many."""
    folder.mkdir(parents=True, exist_ok=True)
    there = _sizes(folder)
    missing = [index for index in indices if there.get(_file(images, index)) != images.size(index)]
    for index in missing:
        (folder / _file(images, index)).write_bytes(images.read(index))
    return len(missing)


def _check_class(images: PackedImages, indices: range, folder: Path) -> int:
    """How many names are in `folder` or should be, and do not have the image's size."""
    expected = {_file(images, index): images.size(index) for index in indices}
    return len({name for name, _ in expected.items() ^ _sizes(folder).items()})


def _file(images: PackedImages, index: int) -> str:
    return os.path.basename(os.fsdecode(images.paths[index]))


def _sizes(folder: Path) -> dict[str, int]:
    if not folder.is_dir():
        return {}
    with os.scandir(folder) as entries:
        return {entry.name: entry.stat().st_size for entry in entries}


# ---- what is refused ----


def _check_room(parts: dict[str, PackedImages], out: Path) -> None:
    """UserError unless the disk has room for what is not in `out` yet."""
    blocks = sum(int((-(-images.sizes // BLOCK_BYTES)).sum()) for images in parts.values())
    there = sum(
        os.lstat(os.path.join(folder, name)).st_blocks * 512
        for part in parts
        for root in (out / part, out / UNFINISHED / part)
        for folder, _, names in os.walk(root)
        for name in names
    )
    missing = blocks * BLOCK_BYTES - there
    free = shutil.disk_usage(out).free
    if missing > free:
        raise UserError(
            f"{out}: needs {missing / 1e9:,.1f} GB more, and its disk has {free / 1e9:,.1f} GB. "
            "Make room, or choose another folder."
        )


def _refuse_class_folders(out: Path, parts: dict[str, PackedImages]) -> None:
    for part, images in parts.items():
        if (out / part / images.classes[0]).exists():
            raise UserError(
                f"{out / part}: holds class folders. Choose another folder for the shards, or pack "
                f"these: python -m recipe.make_shards {out} SHARDS"
            )


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit code (`run_command`)."""
    parser = argparse.ArgumentParser(prog="python -m recipe.prepare_imagenet", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("archives", type=Path, help="the folder with the three archives")
    parser.add_argument("out", type=Path, help="where train/ and val/ are written")
    parser.add_argument("--shards", action="store_true", help="write shards, not class folders")
    options = parser.parse_args(arguments)
    return run_command(lambda: prepare(options.archives, options.out, options.shards))


if __name__ == "__main__":
    sys.exit(main())
