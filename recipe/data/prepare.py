"""Prepare data for training, and check it.

    python -m recipe.data.prepare unpack ARCHIVES IMAGENET
    python -m recipe.data.prepare sort-val VAL_DIR --labels LOC_val_solution.csv
    python -m recipe.data.prepare idx MNIST OUT
    python -m recipe.data.prepare shards IMAGENET SHARDS
    python -m recipe.data.prepare check IMAGENET

After an interruption run the same command again. For details see
`python -m recipe.data.prepare COMMAND --help`, and docs/data.md for all steps in order.
"""

import csv
import io
import itertools
import math
import os
import shutil
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from json import dumps
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from tqdm import tqdm
from tyro.conf import Positional

from recipe.command import run_tool
from recipe.data.decoding import ONE_SUSPECT_IN, decode, image_size, suspect
from recipe.data.idx import find_idx, open_idx, read_idx
from recipe.data.image_folder import (
    CLASS_NAME,
    DAMAGE,
    FLAT_IMAGE,
    PASSED_OVER,
    SPLIT_NAMES,
    TINY_IMAGES,
    UNFINISHED,
    Listing,
    check_train_and_val,
    first_few,
    list_images,
    locked,
    read_arrays,
)
from recipe.data.shards import INDEX, INDEX_VERSION, Shards, open_images, open_shards
from recipe.errors import BadImage, UserError, system_errors
from recipe.files import whole_file, write_json
from recipe.settings.config import home_path
from recipe.settings.flags import DataFlags

IMAGES_PER_SHARD = 10_000  # ImageNet: 129 shards of about 1 GB
UNWRITABLE = ("cannot be written", "Fix that and run the same command again.")

Result = TypeVar("Result")


def in_threads(
    work: Callable[[int], Result], indices: range, num_threads: int, ahead: int
) -> Iterator[Result]:
    """Yield `work(index)` for each of `indices`, in this order. At most `ahead` results are
    computed in advance, which bounds memory, and the wait after an interruption."""
    with ThreadPoolExecutor(num_threads) as pool:
        for start in range(0, len(indices), ahead):
            yield from pool.map(work, indices[start : start + ahead])


# -- ImageNet's own archives -----------------------------------------------------------------------

# In this order: the devkit has the labels of the val images.
ARCHIVES = ("devkit", "val", "train")


def unpack(archives: Positional[Path], out: Positional[Path]) -> list[str]:
    """Unpack ImageNet's own archives into class folders, with torchvision's functions.

    The MD5 of each archive is compared with the published one. Unpacking needs 161 GB of disk in
    addition to the archives. OUT/val and OUT/train appear when they are complete. After an
    interruption run the same command again: it keeps a complete one, and unpacks the other from the
    start. Then `--data OUT` trains on them.

    UserError if an archive is missing or not the published one, or if OUT cannot be written.

    Args:
        archives: Folder with ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar and
            ILSVRC2012_devkit_t12.tar.gz, as downloaded from image-net.org.
        out: Folder in which train/ and val/ are written.
    """
    from torchvision.datasets.imagenet import ARCHIVE_META  # here: it loads torch, which is slow

    files = {part: (archives / ARCHIVE_META[part][0]).absolute() for part in ARCHIVES}
    if missing := [str(file) for file in files.values() if not file.is_file()]:
        raise UserError(
            f"{', '.join(missing)}: not there. Name the folder with image-net.org's archives. For "
            "Kaggle's files and for unpacked images see docs/data.md."
        )
    unfinished = out / UNFINISHED
    with system_errors(out, *UNWRITABLE):
        out.mkdir(parents=True, exist_ok=True)
        with locked(out / ".lock"):
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            for part, file in files.items():
                if not (out / part).exists():
                    print(f"checking and unpacking {file}", file=sys.stderr, flush=True)
                    _unpack(part, file, unfinished)
                    if part != "devkit":
                        os.sync()  # the images must be on the disk before the final name
                        (unfinished / part).rename(out / part)
            shutil.rmtree(unfinished)
    return [f"{out / part}: complete" for part in ("val", "train")]


def _unpack(part: str, archive: Path, folder: Path) -> None:
    """Unpack one of ImageNet's archives to `folder`; UserError if it is not the published one."""
    from torchvision.datasets import imagenet

    try:
        getattr(imagenet, f"parse_{part}_archive")(folder, os.path.abspath(archive))
    except RuntimeError as error:
        raise UserError(
            f"{archive}: is not there, or its MD5 is not {imagenet.ARCHIVE_META[part][1]}, the "
            "published one: the file is damaged, or the wrong one. Download it again."
        ) from error


# -- Images without class folders ------------------------------------------------------------------


def read_labels(file: Path) -> dict[str, str]:
    """Return the class (n01440764) of each image (its name without suffix), from Kaggle's table,
    ImageNet's development kit or Tiny ImageNet's annotations. UserError if `file` is none of
    them."""
    if file.suffix in (".gz", ".tgz"):
        from torchvision.datasets.imagenet import load_meta_file

        with tempfile.TemporaryDirectory() as folder:
            _unpack("devkit", file, Path(folder))
            _, classes = load_meta_file(folder)
        return {f"ILSVRC2012_val_{number:08}": name for number, name in enumerate(classes, 1)}
    try:
        with open(file, newline="", encoding="utf-8-sig") as stream:  # programs write BOMs
            labels = _labels_of_lines(stream, file.suffix == ".csv")
        if not labels:
            raise ValueError("it is empty")
        for image, name in labels.items():
            if not FLAT_IMAGE.fullmatch(f"{image}.JPEG") or not CLASS_NAME.fullmatch(name):
                raise ValueError(f"{image!r} with class {name!r} is not an image of ImageNet")
        return labels
    except (OSError, ValueError, csv.Error, AttributeError, IndexError) as error:
        raise UserError(
            f"{file}: cannot be read as a table of labels ({error}). Give Kaggle's "
            "LOC_val_solution.csv, ImageNet's ILSVRC2012_devkit_t12.tar.gz, or Tiny ImageNet's "
            "val_annotations.txt."
        ) from error


def _labels_of_lines(lines: Iterable[str], has_header: bool) -> dict[str, str]:
    """Return the class of each image in a table: Kaggle's with a header, or Tiny ImageNet's."""
    if not has_header:  # name, class and box, with tabs between them
        rows = [line.split("\t") for line in lines]
        return {os.path.splitext(row[0])[0]: row[1] for row in rows}
    table = csv.DictReader(lines)
    if not {"ImageId", "PredictionString"} <= {*(table.fieldnames or ())}:
        raise ValueError(f"its columns are {table.fieldnames}, not ImageId and PredictionString")
    # PredictionString is class and box, class and box, ...
    return {row["ImageId"]: row["PredictionString"].split()[0] for row in table}


def sort_val(val_dir: Positional[Path], labels: Path | None = None) -> list[str]:
    """Sort ImageNet's flat validation folder into class folders.

    ImageNet's archive of validation images (and Kaggle's) has all 50,000 in one folder; a second
    file gives the class of each. Other archives have it in the images' names, also of training
    images. Everything is checked before the first image is moved, and nothing is copied or deleted.
    UserError, with what to do, if images and labels do not match.

    Args:
        val_dir: Folder with ILSVRC2012_val_*.JPEG, or Tiny ImageNet's val.
        labels: LOC_val_solution.csv from Kaggle, ILSVRC2012_devkit_t12.tar.gz, or Tiny ImageNet's
            val_annotations.txt. Not needed if the images' names hold their classes.
    """
    unsorted = (val_dir, val_dir / TINY_IMAGES)
    paths = [*val_dir.glob("*"), *val_dir.glob("n*/*"), *unsorted[1].glob("*")]
    images = [(match[1], path) for path in paths if (match := FLAT_IMAGE.fullmatch(path.name))]
    flat = {image: path for image, path in images if path.parent in unsorted}
    in_place = {image: path.parent.name for image, path in images if path.parent not in unsorted}
    class_of = classes_in_names(images) if labels is None else read_labels(labels)
    misplaced = {image for image, name in in_place.items() if class_of.get(image, name) != name}
    remedy = "Is it the right label file?" if labels else "Give a label file with --labels."
    mistakes = (
        (flat.keys() - class_of.keys(), f"without a label: {{}}. {remedy}"),
        (in_place.keys() & flat.keys(), "both here and in a class folder: {}. Delete one of each."),
        (misplaced, "in the wrong class folder, by the labels: {}. Move them back into {dir}."),
        (class_of.keys() - flat.keys() - in_place.keys(), "missing: {}. Unpack the archive again."),
    )
    for wrong, message in mistakes:
        names = f"{first_few(sorted(wrong))} ({len(wrong):,} in all)"
        if wrong:
            raise UserError(f"{val_dir}: images {message.format(names, dir=val_dir)}")
    with system_errors(val_dir, *UNWRITABLE):
        for image, path in sorted(flat.items()):  # by renaming: no image is ever half moved
            (val_dir / class_of[image]).mkdir(exist_ok=True)
            os.rename(path, val_dir / class_of[image] / path.name)
        if unsorted[1].exists():  # it would count as a class
            unsorted[1].rmdir()
    return [f"{val_dir}: moved {len(flat):,} images, {len(in_place):,} were in place"]


def classes_in_names(images: Iterable[tuple[str, Path]]) -> dict[str, str]:
    """Return the class in each image's name, of those that have one."""
    found = ((image, CLASS_NAME.search(path.name)) for image, path in images)
    return {image: match[0] for image, match in found if match}


# -- Images in IDX format --------------------------------------------------------------------------


def convert_idx(
    folder: Positional[Path],
    out: Positional[Path],
    prefix: str | None = None,
    shards: bool = False,
) -> list[str]:
    """Convert a data set in IDX format (MNIST, Fashion-MNIST, KMNIST, EMNIST) for --data OUT.

    Images become PGM files of the same pixels, in class folders, or in shards with --shards. The
    classes are named by their labels, such as 0 or 07; Fashion-MNIST's and, if the file of its
    mapping is there, EMNIST's have their names, too: 9-Ankle-boot. EMNIST's images, which are
    stored column by column, become upright. Class folders appear when they are complete; shards
    that are there already are kept.

    UserError for files that are damaged or do not fit together; if OUT is there already, or with
    --shards, if it holds class folders or shards of other images.

    Args:
        folder: Folder with the four files as they were published, packed or unpacked.
        out: New folder in which train/ and val/ are written.
        prefix: What the files' names begin with, if FOLDER holds several data sets, such as
            emnist-letters-.
        shards: Write shards instead of class folders.
    """
    files = find_idx(folder, prefix)
    listings = dict(zip(("train", "val"), open_idx(files), strict=True))
    check_train_and_val(listings["train"], listings["val"])
    of_pixels = mean_and_std(read_idx(files.files["train", "images"], 3))
    mean, std = (" ".join(3 * [f"{value:.4f}"]) for value in of_pixels)
    if shards:
        lines = write_shards(listings, out, IMAGES_PER_SHARD)
    else:
        _write_class_folders(listings, out)
        lines = [
            f"{out / part}: {len(listing):,} images of {len(listing.classes)} classes"
            for part, listing in listings.items()
        ]
    upright = ["images were stored column by column, as in all of EMNIST, and are upright now"]
    return [
        *lines,
        *(upright if files.is_transposed else []),
        f"normalise them with --image-mean {mean} --image-std {std}",
    ]


def mean_and_std(images: np.ndarray) -> tuple[float, float]:
    """Return the mean and the standard deviation of all pixels (uint8), as shares of 255."""
    counts = np.bincount(images.reshape(-1), minlength=256)
    levels = np.arange(256) / 255
    mean = np.average(levels, weights=counts)
    return float(mean), math.sqrt(np.average((levels - mean) ** 2, weights=counts))


def _write_class_folders(listings: Mapping[str, Listing], out: Path) -> None:
    """Write each listing's images to OUT/train and OUT/val; UserError if OUT is there already."""
    if out.exists():
        raise UserError(f"{out}: is there already; name a new folder, or remove this one")
    unfinished = out.with_name(f"{out.name}{UNFINISHED}")
    with system_errors(out, *UNWRITABLE):
        shutil.rmtree(unfinished, ignore_errors=True)
        for part, listing in listings.items():
            for name in listing.classes:
                (unfinished / part / name).mkdir(parents=True)
            bar = tqdm(listing.paths.tolist(), part, unit="image", disable=None)
            for index, path in enumerate(bar):
                (unfinished / part / os.fsdecode(path)).write_bytes(listing.read(index))
        os.sync()  # the images must be on the disk before the final name
        unfinished.rename(out)


# -- Shards ----------------------------------------------------------------------------------------

# What the index holds beside names and labels: one array for shards, and three for images.
MEASURED = {"shard_bytes": "int64", "offsets": "int64", "sizes": "int64", "checksums": "uint32"}
NUM_READING_THREADS, IMAGES_AHEAD = 8, 64
ONE_SUFFIX = dict.fromkeys((".jpeg", ".jpe", ".jfif"), ".jpg")


def make_shards(
    folder: Positional[Path],
    shards: Positional[Path],
    cache_dir: str = DataFlags.cache_dir,
    images_per_shard: int = IMAGES_PER_SHARD,
) -> list[str]:
    """Write a folder of images as a few large tar files, with an index for random access.

    FOLDER holds train/ and val/ in ImageNet's layout, as for --data. Training with `--data SHARDS`
    is then the same, image by image. The images are copied unchanged. A shard is written completely
    or not at all, and the same folder gives the same bytes. The `webdataset` library can read the
    tar files, too: 000000123.jpg is an image, 000000123.cls its label.

    UserError if FOLDER cannot be trained on or has a file that is no image; if SHARDS holds shards
    of other images, or cannot be written.

    Args:
        folder: Folder with train/ and val/.
        shards: Folder for the shards; those that are there already are kept.
        cache_dir: Folder in which the listing of the images is cached.
        images_per_shard: Images in each shard but the last one of train and of val.
    """
    cache = Path(home_path("--cache-dir", cache_dir))
    listings = {part: list_images(folder / part, cache) for part in ("train", "val")}
    check_train_and_val(listings["train"], listings["val"])
    return write_shards(listings, shards, images_per_shard)


def write_shards(listings: Mapping[str, Listing], shards: Path, images_per_shard: int) -> list[str]:
    """Write the shards of the listings `train` and `val`, and return a line about each. UserError
    if `shards` holds those of other images or class folders, or cannot be written."""
    if images_per_shard < 1:
        raise UserError(f"--images-per-shard {images_per_shard}: must be at least 1")
    lines = []
    with system_errors(shards, *UNWRITABLE):
        for part in listings:
            _refuse_class_folders(shards / part)
        shards.mkdir(parents=True, exist_ok=True)
        with locked(shards / ".lock"):
            for part, listing in listings.items():
                made = _make_part(listing, shards / part, images_per_shard)
                lines.append(
                    f"{made.root}: {len(made.shards):,} shards, {len(made):,} images of "
                    f"{len(made.classes):,} classes, {made.shard_bytes.sum() / 1e9:,.3f} GB"
                    f"{listing.left_out and '; '}{listing.left_out}"
                )
        (shards / ".lock").unlink(missing_ok=True)
    return lines


def _refuse_class_folders(folder: Path) -> None:
    """Raise UserError if `folder`, which is to hold shards, holds class folders: with shards beside
    them, they would no longer be read."""
    paths = folder.iterdir() if folder.is_dir() else ()
    names = sorted(
        path.name
        for path in paths
        if path.is_dir() and not PASSED_OVER.match(os.fsencode(path.name))
    )
    if names:
        raise UserError(
            f"{folder}: holds class folders ({first_few(names)}). Choose another folder for the "
            "shards."
        )


def _make_part(listing: Listing, folder: Path, images_per_shard: int) -> Shards:
    """Write the shards of one listing into `folder`, and then the index, which marks them complete.
    Until then the folder UNFINISHED holds a preliminary index, which identifies the images, and a
    note on each shard that is written."""
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
        earlier = read_arrays((folder if (folder / INDEX).is_file() else work) / INDEX)
    except DAMAGE:  # or there is none yet
        work.mkdir(parents=True, exist_ok=True)
        with whole_file(work / INDEX) as file:
            np.savez(file, **index)
        earlier = index
    if not all(np.array_equal(earlier[name], value) for name, value in index.items()):
        raise UserError(
            f"{folder}: holds shards of other images than the image folder has now, or with "
            "another --images-per-shard. Choose another folder for the shards, or remove this one."
        )
    if not (folder / INDEX).is_file():
        bar = tqdm(names, folder.name, unit="shard", disable=None)
        spans = (range(len(listing))[start : start + images_per_shard] for start in starts)
        notes = [
            _note_on(listing, indices, folder / name, work)
            for name, indices in zip(bar, spans, strict=True)
        ]
        index |= {
            name: np.concatenate([note[name] for note in notes]).astype(dtype)
            for name, dtype in MEASURED.items()
        }
        with whole_file(folder / INDEX, sync=True) as file:
            np.savez(file, **index)
    shutil.rmtree(work, ignore_errors=True)
    return open_shards(folder)


def _note_on(listing: Listing, indices: range, shard: Path, work: Path) -> dict[str, Any]:
    """Return what the index holds about a shard, from the note on it in the folder `work`; first
    write shard and note, if one of them is missing."""
    note = work / f"{shard.name}.npz"
    if not note.is_file() or not shard.is_file():
        measured = _write_shard(listing, indices, work / shard.name)
        os.replace(work / shard.name, shard)
        with whole_file(note, sync=True) as file:
            np.savez(file, **measured)
    return read_arrays(note)


def _write_shard(listing: Listing, indices: range, shard: Path) -> dict[str, Any]:
    """Write one shard; return what the index holds about it (MEASURED)."""
    measured: dict[str, list[int]] = {name: [] for name in MEASURED}
    # Several reads at once, so that the waits for a network file system overlap.
    read = in_threads(listing.read, indices, NUM_READING_THREADS, IMAGES_AHEAD)
    with whole_file(shard, sync=True) as file:
        # Without the files' times, owners and permissions: the same images give the same bytes.
        with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for index, data in zip(indices, read, strict=True):
                image_size(data, listing.name(index))  # UserError if the header is not an image's
                suffix = os.path.splitext(listing.name(index))[1].lower()
                _add(tar, f"{index:09d}{ONE_SUFFIX.get(suffix, suffix)}", data)
                blocks = -(-len(data) // tarfile.BLOCKSIZE)
                measured["offsets"].append(file.tell() - blocks * tarfile.BLOCKSIZE)
                measured["sizes"].append(len(data))
                measured["checksums"].append(zlib.crc32(data))
                _add(tar, f"{index:09d}.cls", b"%d" % listing.labels[index])
        measured["shard_bytes"].append(file.tell())
    return measured


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


# -- Checking --------------------------------------------------------------------------------------

# Decoders run in parallel in threads. Two per core, so that one may wait for the file system.
THREADS_PER_CORE = 2
CHECKED_AHEAD = 500  # images per thread


def fault_of(listing: Listing, index: int) -> tuple[str, str, str] | None:
    """Check an image: return "bad" or "suspect", its name, and the reason; None if it is good."""
    name = listing.name(index)
    try:
        _, left_over = decode(listing.read(index), name)
    except BadImage as error:
        return "bad", name, str(error)
    return ("suspect", name, str(suspect(name, left_over))) if left_over else None


def faults_of(listing: Listing) -> list[tuple[str, str, str]]:
    """Return the faults of the images of `listing`, in order, and print each as it is found."""
    faults, threads = [], THREADS_PER_CORE * len(os.sched_getaffinity(0))
    fault_at, indices = partial(fault_of, listing), range(len(listing))
    checked = in_threads(fault_at, indices, threads, threads * CHECKED_AHEAD)
    bar = tqdm(checked, str(listing.root), len(listing), unit="image", disable=None)
    for fault in filter(None, bar):
        faults.append(fault)
        bar.write(f"{fault[0]}: {fault[2]}", file=sys.stderr)
    return faults


def check_images(
    folder: Positional[Path], json: Path | None = None, cache_dir: str = DataFlags.cache_dir
) -> list[str]:
    """Read and decode every image of a data set, as training does, and list the bad ones.

    Images are decoded completely; those in shards are also compared with their checksums. The exit
    code is 0 if training can use all images. It is 1 if an image is bad, or if more images than
    training allows have bytes left over. The command starts at once, since it needs no torch, and
    uses all cores.

    Args:
        folder: Class folders, shards, or a folder with train/ and val/ of either kind.
        json: File to which all faults are written; -: standard output.
        cache_dir: Folder in which the listing of the images is cached.
    """
    inner = {
        path.name
        for path in folder.glob("*")
        if path.is_dir() and not PASSED_OVER.match(os.fsencode(path.name))
    }
    parts = sorted(inner & {"train", "val"}) if inner <= SPLIT_NAMES else []
    cache = Path(home_path("--cache-dir", cache_dir))
    listings = [open_images(folder / part, cache) for part in parts or [""]]
    faults = [faults_of(listing) for listing in listings]
    report: dict[str, Any] = {
        "images": sum(map(len, listings)),
        "left_out": [
            f"{listing.root}: {listing.left_out}" for listing in listings if listing.left_out
        ],
        "bad": [],
        "suspect": [],
    }
    for kind, name, reason in itertools.chain(*faults):
        report[kind].append({"image": name, "reason": reason})
    is_printed = json == Path("-")
    if is_printed:
        print(dumps(report, indent=2))
    elif json is not None:
        with system_errors(json, *UNWRITABLE):
            write_json(json, report)
    summary = (
        f"{folder}: {report['images']:,} images, {len(report['bad']):,} bad, "
        f"{len(report['suspect']):,} that may be damaged"
        + "".join(f"; {line}" for line in report["left_out"])
    )
    if report["bad"] or any(
        len(wrong) > len(listing) // ONE_SUSPECT_IN
        for listing, wrong in zip(listings, faults, strict=True)
    ):
        raise UserError(
            f"{summary}. Replace them by good copies, or remove them; --bad-images replace trains "
            "without them."
        )
    return [] if is_printed else [summary]


COMMANDS: dict[str, Callable[..., Any]] = {
    "unpack": unpack,
    "sort-val": sort_val,
    "idx": convert_idx,
    "shards": make_shards,
    "check": check_images,
}
main = partial(
    run_tool,
    "python -m recipe.data.prepare",
    COMMANDS,
    __doc__,
    exit_code=1,
    interrupted="interrupted: run the same command again",
)


if __name__ == "__main__":
    sys.exit(main())
