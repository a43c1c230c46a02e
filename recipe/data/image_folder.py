"""Which images a folder of class folders holds: listed once, cached, and checked at each start."""

import difflib
import errno
import fcntl
import hashlib
import os
import re
import shlex
import sys
import time
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import IO, Any

import numpy as np
from tqdm import tqdm

from recipe.errors import UserError, refuse, system_errors
from recipe.files import whole_file

# Raise it whenever a listing would come out differently, or is stored differently.
CACHE_VERSION = 2
# Folder times have steps (4 ms on ext4, 2 s on FAT and old NFS servers). A folder that changed
# just before it was listed may change again without a new time, so such a cache is not trusted.
YOUNGEST_TRUSTED_NS = 2_000_000_000
# Over a network a listing mostly waits for answers, so several questions at once should shorten it.
# On a local disk threads only get in each other's way: 1.28 million files took 3.2 s, alone 1.6 s.
NUM_LISTING_THREADS = 8
# What is said of a path that gives an error of the system (`system_errors`).
UNREADABLE = (
    "cannot be read",
    "Check its permissions, and whether it, or what it links to, is still there.",
)
# What reading a damaged file of arrays may raise.
DAMAGE = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error)


class SharedArray(np.memmap):
    """An array that loader workers share: for one of them it is pickled as an open file."""

    file: IO[bytes]

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (DupFd(self.file.fileno()), self.dtype)


def _received(descriptor: Any, dtype: np.dtype) -> np.ndarray:
    return np.memmap(open(descriptor.detach(), "r+b"), dtype)


@dataclass(frozen=True)
class Listing:
    """The images below `root`, ordered by class and then by path, both as bytes.

    Here each is a file of its own; `Shards` (recipe/data/shards.py) has the same images at the same
    indices, and reads them from elsewhere.

    `paths` (bytes of fixed width, [num_images], relative to `root`) and `labels` (int64,
    [num_images], index into `classes`) are two buffers, not a million Python objects, and loader
    workers share them with the trainer.

    `left_out` says how many files were left out because their suffix is unknown, and which
    suffixes; "" if none.
    """

    root: Path
    classes: tuple[str, ...]
    paths: np.ndarray
    labels: np.ndarray
    left_out: str = field(default="", kw_only=True)

    def __len__(self) -> int:
        return len(self.paths)

    def __getstate__(self) -> dict[str, Any]:
        """For a loader worker. ImageNet's arrays are 67 MB: they move into memory that all workers
        share, not in /dev/shm, which containers keep small."""
        for name, value in vars(self).items():
            if type(value) is np.ndarray:
                file = os.fdopen(os.memfd_create("listing"), "r+b")
                value.tofile(file)
                shared = vars(self)[name] = SharedArray(file, value.dtype)
                shared.file = file  # open as long as the array lives
        return dict(vars(self))

    def name(self, index: int) -> str:
        """What messages call image `index`: here its full path."""
        return os.path.join(self.root, os.fsdecode(self.paths[index]))

    def read(self, index: int) -> bytes:
        """The encoded bytes of image `index`. UserError if its file cannot be read."""
        path = self.name(index)

        def read() -> bytes:
            with open(path, "rb", buffering=0) as file:
                if (content := file.read()) is None:  # how Python's raw files say EAGAIN
                    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
                return content

        return read_patiently(path, read)


def list_images(root: Path, cache_dir: Path) -> Listing:
    """List the images in the class folders of `root`, from a cache in `cache_dir` if it holds.

    Classes are the folders in `root`; sub-folders of a class are walked and belong to it (as in
    torchvision). Links to folders and files are followed. Names that begin with a dot, and those
    that file servers and systems use (PASSED_OVER), are skipped; files without an image suffix
    (SUFFIXES, in upper or lower case) are left out, and counted. The order depends on the names'
    bytes alone, so that all hosts agree.

    The cache holds when the class folders have the same names and each folder that was read has the
    same modification time: one `stat` a folder. A changed *content* of a file needs no new listing.
    Of several processes on a host one lists and the others wait and read. A cache folder that
    cannot be written costs a warning, no more.

    UserError, with what to do, if `root` is missing, holds no class folders, has an empty class or
    a broken link, or is one of ImageNet's archives half unpacked.
    """
    root = Path(os.path.abspath(root))
    classes = _class_names(root)
    cache = Path(cache_dir) / f"listing-{hashlib.sha256(os.fsencode(root)).hexdigest()[:16]}.npz"
    arrays = _read_cache(cache, root, classes)  # without the lock: a cache may be read-only
    try:
        if arrays is None:
            cache.parent.mkdir(parents=True, exist_ok=True)
            with locked(cache.with_suffix(".lock")):
                arrays = _read_cache(cache, root, classes)
                if arrays is None:
                    arrays = _scan(root, classes)
                    with whole_file(cache) as file:
                        np.savez(file, **arrays)
    except OSError as error:
        print(
            f"warning: {cache.parent}: the listing of {root} cannot be kept there "
            f"({error.strerror}), so each process lists it again at each start. Choose a folder "
            "that can be written with --cache-dir DIR.",
            file=sys.stderr,
            flush=True,
        )
        arrays = arrays or _scan(root, classes)
    return Listing(
        root=root,
        classes=tuple(map(os.fsdecode, classes)),
        paths=arrays["paths"],
        labels=np.repeat(np.arange(len(classes), dtype=np.int64), arrays["images_per_class"]),
        left_out=str(arrays["left_out"]),
    )


def check_train_and_val(train: Listing, val: Listing) -> None:
    """UserError unless both have the same classes, else a label would mean two different things,
    and more than one, else there is nothing to learn."""
    in_one = sorted(set(train.classes) ^ set(val.classes))
    refuse(
        (train.classes != val.classes,
         f"{val.root} has other classes ({len(val.classes):,}) than {train.root} "
         f"({len(train.classes):,}). Only in one of them: {first_few(in_one)}. "
         "Both folders must hold class folders of the same names: remove or add what differs."),
        (len(train.classes) < 2,
         f"{train.root}: holds a single class, {train.classes[0]}, so each prediction would be "
         "right. Add a folder for each other class; or are they inside this one?"),
    )  # fmt: skip


@contextmanager
def locked(lock_file: Path) -> Iterator[None]:
    """Hold an exclusive lock on `lock_file` (created if missing) against other processes.

    It only avoids double work: on a file system without locks the body runs all the same, so what
    it writes must be correct without one (temporary file, rename).
    """
    with open(lock_file, "a") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file releases the lock; so does the process's end, however it comes


# ---- listing ----


def _class_names(root: Path) -> list[bytes]:
    """The names of the class folders in `root`, sorted; UserError if it does not look like one."""
    folders: list[str] = []
    files: list[str] = []
    with system_errors(root, *UNREADABLE):
        if not root.is_dir():
            raise UserError(missing_folder(root))
        for entry in os.scandir(root):
            if PASSED_OVER.match(os.fsencode(entry.name)):
                continue
            if entry.is_symlink():
                os.stat(entry.path)  # an error if it leads nowhere
            (folders if entry.is_dir() else files).append(entry.name)
    refuse_other_layouts(root, folders, files)
    return sorted(map(os.fsencode, folders))


def _scan(root: Path, classes: list[bytes]) -> dict[str, Any]:
    """The images of these classes, and what shows that they are out of date: each folder that was
    read, its modification time (ns, taken before it was read), and when the listing began."""
    started_ns = time.time_ns()
    paths: list[np.ndarray] = []
    times_ns: dict[bytes, int] = {}
    others: Counter[bytes] = Counter()
    with ThreadPoolExecutor(NUM_LISTING_THREADS) as pool, system_errors(root, *UNREADABLE):
        scans = pool.map(lambda name: _scan_class(os.fsencode(root), name), classes)
        # Nothing is shown of what takes less than 10 s.
        bar = tqdm(scans, f"listing {root}", len(classes), delay=10, mininterval=30, unit="class")
        for class_paths, class_times_ns, class_others in bar:
            paths.append(class_paths)
            times_ns |= class_times_ns
            others += class_others
    kinds = first_few([f"{n:,} {os.fsdecode(one) or 'without'}" for one, n in others.most_common()])
    left_out = kinds and f"left out: {others.total():,} file(s) without a known suffix ({kinds})"
    counts = [len(class_paths) for class_paths in paths]
    empty = [os.fsdecode(classes[label]) for label, count in enumerate(counts) if not count]
    refuse((
        empty,
        f"{root}: {len(empty):,} of its classes without images: {first_few(empty)}. "
        "Add their images (.jpg, .png and other usual suffixes), or remove the folders in both "
        f"train and val. {left_out.capitalize()}".strip(),
    ))  # fmt: skip
    return {
        "version": np.array(CACHE_VERSION),
        "classes": np.array(classes),
        "paths": np.concatenate(paths),
        "images_per_class": np.array(counts),
        "left_out": np.array(left_out),
        "folders": np.array(list(times_ns)),
        "times_ns": np.array(list(times_ns.values()), dtype=np.int64),
        "started_ns": np.array(started_ns),
    }


def _scan_class(root: bytes, name: bytes) -> tuple[np.ndarray, dict[bytes, int], Counter[bytes]]:
    """The sorted images of one class, relative to `root`, the time of each folder read, and the
    other files' number by suffix."""
    images: list[bytes] = []
    others: Counter[bytes] = Counter()
    times_ns: dict[bytes, int] = {}
    pending = [name]
    while pending:
        folder = pending.pop()
        here = os.path.join(root, folder)
        times_ns[folder] = os.stat(here).st_mtime_ns
        for entry in os.scandir(here):
            path = folder + b"/" + entry.name
            suffix = os.path.splitext(entry.name)[1].lower()
            if PASSED_OVER.match(entry.name):
                continue
            if entry.is_dir():
                _refuse_link_upwards(entry, here)
                pending.append(path)
            elif suffix in SUFFIXES and entry.is_file():
                images.append(path)
            elif suffix in SUFFIXES:
                os.stat(entry.path)  # an error if it is a link that leads nowhere
                raise UserError(f"{os.fsdecode(entry.path)}: is no file to read. Remove it.")
            else:
                others[suffix] += 1
    return np.sort(np.array(images, dtype=np.bytes_)), times_ns, others


def _refuse_link_upwards(entry: os.DirEntry, folder: bytes) -> None:
    """UserError if `entry` in `folder` is a link to a folder above: its images would never end."""
    if not entry.is_symlink():
        return
    target = os.fsdecode(os.path.realpath(entry.path))
    if Path(os.fsdecode(os.path.realpath(folder))).is_relative_to(target):
        raise UserError(
            f"{os.fsdecode(entry.path)}: a link to {target}, a folder above itself, so that its "
            "images would never end. Remove the link."
        )


# ---- the cache ----


def _read_cache(cache: Path, root: Path, classes: list[bytes]) -> dict[str, Any] | None:
    """What `_scan` found, or None if what is kept of it is not readable, whole and up to date."""
    try:
        arrays = read_arrays(cache)
        newest, started_ns = arrays["times_ns"].max(), int(arrays["started_ns"])
        folders = zip(arrays["folders"].tolist(), arrays["times_ns"].tolist(), strict=True)
        holds = (
            arrays["version"] == CACHE_VERSION
            and arrays["classes"].tolist() == classes
            and newest <= started_ns - YOUNGEST_TRUSTED_NS
            and all(
                os.stat(os.path.join(os.fsencode(root), folder)).st_mtime_ns == time_ns
                for folder, time_ns in folders
            )
        )
        return arrays if holds else None
    except DAMAGE:
        return None


def read_arrays(file: Path) -> dict[str, Any]:
    """The arrays in a file that `np.savez` wrote; one of DAMAGE if it is none, or damaged."""
    with np.load(file, allow_pickle=False) as stored:
        return dict(stored)


# What Pillow reads and what image sets are made of. Compared in lower case.
SUFFIXES = frozenset(
    b".jpg .jpeg .jpe .jfif .png .webp .bmp .gif .tif .tiff .ppm .pgm .pbm .pnm .jp2 .avif".split()
)
# What file servers and systems keep among files: thumbnails, what was deleted, Finder's notes.
# These names, and hidden ones, are passed over.
PASSED_OVER = re.compile(
    rb"\.|(@eadir|@tmp|@recycle|@recently-snapshot|#recycle|#snapshot|\$recycle\.bin|lost\+found|"
    rb"system volume information|__macosx|thumbs\.db|desktop\.ini)\Z",
    re.IGNORECASE,
)
# ImageNet's names.
CLASS_NAME = re.compile(r"n\d{8}")
VAL_IMAGE = re.compile(r"(ILSVRC2012_val_\d{8})\.jpe?g", re.IGNORECASE)
# What `prepare.py` keeps beside their output until all of it is there.
UNFINISHED = ".unfinished"
SPLIT_NAMES = frozenset({"train", "val", "valid", "validation", "test"})
# What file servers and disks answer for a while, and the pauses before they are asked again.
PASSING_ERRORS = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN}
PAUSES_S = (0.1, 0.4, 1.6, 6.4)
SAID: set[int | None] = set()  # the errors that this process has warned of


def first_few(names: list[str], count: int = 3) -> str:
    """The first `count` names, and how many more there are: what an error message has room for."""
    more = f" and {len(names) - count:,} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more


def refuse_other_layouts(root: Path, folders: list[str], files: list[str]) -> None:
    """UserError unless the `folders` in `root` can be class folders: it may be one of ImageNet's
    archives half unpacked, hold train/ and val/, or images only."""
    is_flat = any(VAL_IMAGE.fullmatch(name) for name in files)
    refuse(
        (is_flat,
         f"{root}: images of ImageNet's validation set are in it without class folders, as its "
         f"archive has them. Sort them with: python -m recipe.data.prepare sort-val "
         f"{shlex.quote(str(root))} --labels LOC_val_solution.csv (Kaggle's file, or "
         "ILSVRC2012_devkit_t12.tar.gz)"),
        ("train" in folders and len(folders) > 1 and SPLIT_NAMES.issuperset(folders),
         f"{root}: holds {' and '.join(sorted(folders))}, not class folders. "
         f"Name it with --data {root}, or its parts with --train-dir and --val-dir."),
        (not folders and not is_flat,
         f"{root}: holds no class folders. Each class needs a folder with its images: "
         f"{root / 'CLASS' / 'image.jpg'}. Archives are to be unpacked, ImageNet's own with "
         "python -m recipe.data.prepare unpack."),
    )  # fmt: skip


def missing_folder(root: Path) -> str:
    """The message for a `root` that is not a folder, with what there is in its place."""
    there = next(path for path in (root, *root.parents) if path.exists())
    if not there.is_dir():
        return f"{there}: a file, not a folder. If it is an archive, unpack it first."
    if (there / UNFINISHED).is_dir():
        return (
            f"{root}: not complete yet. Run the same python -m recipe.data.prepare unpack "
            "command again."
        )
    missing = root.relative_to(there).parts[0]
    nearest = difflib.get_close_matches(missing, os.listdir(there), n=3, cutoff=0)
    found = f"the closest names in it are {', '.join(nearest)}" if nearest else "it is empty"
    return (
        f"{root}: no such folder. {there} has no {missing}; {found}. --data wants a folder that "
        "holds train/ and val/, which python -m recipe.data.prepare unpack makes of ImageNet's "
        "archives; --train-dir and --val-dir name them one by one. Is the disk mounted?"
    )


def read_patiently(path: str, read: Callable[[], bytes]) -> bytes:
    """What `read` returns, which reads the file at `path`; after an error that may pass it is
    called again, four times within nine seconds. UserError about any other one, and the last."""
    with system_errors(path, *UNREADABLE):
        for pause_s in PAUSES_S:
            try:
                return read()
            except OSError as error:
                if error.errno not in PASSING_ERRORS:
                    raise
                if error.errno not in SAID:
                    SAID.add(error.errno)
                    print(
                        f"warning: {path}: cannot be read ({error.strerror}); trying again for "
                        f"{sum(PAUSES_S):.0f} s, from now on without a word",
                        file=sys.stderr,
                        flush=True,
                    )
            time.sleep(pause_s)
        return read()
