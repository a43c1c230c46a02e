"""List the images in a folder of class folders: once, then from a cache that each start checks."""

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

from recipe.errors import BadImage, UserError, refuse, system_errors
from recipe.files import read_proc, whole_file

# Raise this when listings change, or the way they are stored.
CACHE_VERSION = 3
# Times are coarse (4 ms on ext4, 1 s on old NFS servers). A folder that was changed just before it
# was listed may change again and keep its times; such a listing is not cached.
YOUNGEST_TRUSTED_NS = 2_000_000_000
# File systems on which a folder's times may stay when it changes, so that no listing is cached.
# FUSE: object stores and the like, whose programs may give any times. Images of a file system: all
# their times may be made the same, and a new one takes the old one's place. FAT: has no ctime.
WITHOUT_CHANGE_TIMES = re.compile(r"fuse.*|virtiofs|squashfs|erofs|iso9660|vfat|exfat")
# Over a network a listing mostly waits for answers, so several threads should shorten it. On a
# local disk they only slow each other down: 1.28 million files took 3.2 s, with one thread 1.6 s.
NUM_LISTING_THREADS = 8
# The message for a path on which the system reports an error (`system_errors`).
UNREADABLE = (
    "cannot be read",
    "Check its permissions, and whether it, or what it links to, is still there.",
)
# Errors that reading a damaged file of arrays may raise.
DAMAGE = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error)


class SharedArray(np.memmap):
    """An array that loader workers share: it is pickled as an open file."""

    file: IO[bytes]

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (DupFd(self.file.fileno()), self.dtype)


def _received(descriptor: Any, dtype: np.dtype) -> np.ndarray:
    return np.memmap(open(descriptor.detach(), "r+b"), dtype)


@dataclass(frozen=True)
class Listing:
    """The images below `root`, ordered by class and then by path, both as bytes.

    Here each image is a separate file; `Shards` (recipe/data/shards.py) has the same images at the
    same indices, and reads them from tar files.

    `paths` (bytes of fixed width, [num_images], relative to `root`) and `labels` (int64,
    [num_images], index into `classes`) are two buffers, not a million Python objects, and loader
    workers share them with the trainer.

    `left_out` says how many files were left out because of an unknown suffix, and which suffixes;
    "" if none were. `cache` is the file in which the listing is kept, if it is.
    """

    root: Path
    classes: tuple[str, ...]
    paths: np.ndarray
    labels: np.ndarray
    left_out: str = field(default="", kw_only=True)
    cache: Path | None = field(default=None, kw_only=True)

    def __len__(self) -> int:
        return len(self.paths)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the listing for a loader worker. The arrays (67 MB for ImageNet) move into memory
        that all workers share; not into /dev/shm, which is small in containers."""
        for name, value in vars(self).items():
            if type(value) is np.ndarray:
                file = os.fdopen(os.memfd_create("listing"), "r+b")
                value.tofile(file)
                shared = vars(self)[name] = SharedArray(file, value.dtype)
                shared.file = file  # keeps it open as long as the array exists
        return dict(vars(self))

    def name(self, index: int) -> str:
        """Return the name of image `index` for messages: here its full path."""
        return os.path.join(self.root, os.fsdecode(self.paths[index]))

    def read(self, index: int) -> bytes:
        """Return the encoded bytes of image `index`. BadImage if its file cannot be read."""
        path = self.name(index)

        def read() -> bytes:
            try:
                with open(path, "rb", buffering=0) as file:
                    content = file.read()
            except (FileNotFoundError, NotADirectoryError) as error:
                if self.cache is None:
                    raise
                raise BadImage(
                    f"{path}: cannot be read ({error.strerror}), but it is in the listing of "
                    f"{self.root} that is cached in {self.cache}. Restore it, or start again; if "
                    "this message comes again, remove that cache."
                ) from error
            if content is None:  # Python's raw files return None for EAGAIN
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            return content

        return read_patiently(path, read)


def list_images(root: Path, cache_dir: Path) -> Listing:
    """List the images in the class folders of `root`, from the cache in `cache_dir` if it is valid.

    Classes are the folders in `root`; images in their sub-folders belong to the class (as in
    torchvision). Links to folders and files are followed. Names that begin with a dot, and those
    that file servers and systems use (PASSED_OVER), are skipped; files without an image suffix
    (SUFFIXES, in upper or lower case) are left out and counted. The order depends only on the
    names' bytes, so that all hosts agree.

    The cache is valid if the class folders have the same names and each listed folder is the same
    and unchanged (`_state`): one `stat` per folder. A changed *content* of a file needs no new
    listing. If several processes on a host start, one lists, and the others wait and read the
    cache. If the cache folder cannot be written, the only effect is a warning. Where a folder's
    times need not show a change (WITHOUT_CHANGE_TIMES) nothing is cached.

    UserError, with what to do, if `root` is missing, holds no class folders, has an empty class or
    a broken link, or is one of ImageNet's archives half unpacked.
    """
    root = Path(os.path.abspath(root))
    classes = _class_names(root)
    with system_errors(root, *UNREADABLE):
        status = os.stat(root)
    if _times_show_changes({status.st_dev}):
        # Hosts with copies of their own at the same path may share `cache_dir`.
        key = b"%s %d %d" % (os.fsencode(root), _device(status), status.st_ino)
        cache = Path(cache_dir) / f"listing-{hashlib.sha256(key).hexdigest()[:16]}.npz"
        arrays = _read_cache(cache, root, classes) or _list_once(cache, root, classes)
    else:
        cache, (arrays, _) = None, _scan(root, classes)
    return Listing(
        root=root,
        classes=tuple(map(os.fsdecode, classes)),
        paths=arrays["paths"],
        labels=np.repeat(np.arange(len(classes), dtype=np.int64), arrays["images_per_class"]),
        left_out=str(arrays["left_out"]),
        cache=cache if cache and cache.is_file() else None,
    )


def check_train_and_val(train: Listing, val: Listing) -> None:
    """Raise UserError unless both have the same classes (else a label would mean two things), and
    more than one (else there is nothing to learn)."""
    in_one = sorted(set(train.classes) ^ set(val.classes))
    refuse(
        (
            train.classes != val.classes,
            f"{val.root} has other classes ({len(val.classes):,}) than {train.root} "
            f"({len(train.classes):,}). Only in one of them: {first_few(in_one)}. "
            "Both folders must hold class folders of the same names: remove or add what differs.",
        ),
        (
            len(train.classes) < 2,
            f"{train.root}: holds a single class, {train.classes[0]}, so every prediction would be "
            "right. Add a folder for each other class; or are they inside this one?",
        ),
    )


@contextmanager
def locked(lock_file: Path) -> Iterator[None]:
    """Hold an exclusive lock on `lock_file` (created if missing) against other processes.

    It only avoids duplicate work: on a file system without locks the body runs anyway, so what it
    writes must be correct without a lock (temporary file, rename).
    """
    with open(lock_file, "a") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file releases the lock, and so does any end of the process


# ---- listing ----


def _class_names(root: Path) -> list[bytes]:
    """Return the sorted names of the class folders in `root`; UserError for another layout."""
    folders: list[str] = []
    files: list[str] = []
    with system_errors(root, *UNREADABLE):
        if not root.is_dir():
            raise UserError(missing_folder(root))
        for entry in os.scandir(root):
            if PASSED_OVER.match(os.fsencode(entry.name)):
                continue
            if entry.is_symlink():
                os.stat(entry.path)  # an error if the link is broken
            (folders if entry.is_dir() else files).append(entry.name)
    refuse_other_layouts(root, folders, files)
    return sorted(map(os.fsencode, folders))


def _scan(root: Path, classes: list[bytes]) -> tuple[dict[str, Any], bool]:
    """List the images of these classes. Also return what shows later whether the listing is still
    valid: each folder that was read, and its state before it was read; and whether that will show
    it."""
    started_ns = time.time_ns()
    paths: list[np.ndarray] = []
    folders: dict[bytes, os.stat_result] = {}
    others: Counter[bytes] = Counter()
    with ThreadPoolExecutor(NUM_LISTING_THREADS) as pool, system_errors(root, *UNREADABLE):
        scans = pool.map(lambda name: _scan_class(os.fsencode(root), name), classes)
        # The bar appears only after 10 s.
        bar = tqdm(scans, f"listing {root}", len(classes), delay=10, mininterval=30, unit="class")
        for class_paths, class_folders, class_others in bar:
            paths.append(class_paths)
            folders |= class_folders
            others += class_others
    kinds = first_few([f"{n:,} {os.fsdecode(end) or 'without'}" for end, n in others.most_common()])
    left_out = kinds and f"left out: {others.total():,} file(s) without a known suffix ({kinds})"
    counts = [len(class_paths) for class_paths in paths]
    empty = [os.fsdecode(classes[label]) for label, count in enumerate(counts) if not count]
    if empty:
        raise UserError(
            f"{root}: {len(empty):,} of its classes without images: {first_few(empty)}. "
            "Add their images (.jpg, .png and other usual suffixes), or remove the folders in both "
            f"train and val. {left_out.capitalize()}".strip()
        )
    newest_ns = max(max(it.st_mtime_ns, it.st_ctime_ns) for it in folders.values())
    is_settled = newest_ns <= started_ns - YOUNGEST_TRUSTED_NS
    shows_changes = is_settled and _times_show_changes({it.st_dev for it in folders.values()})
    arrays = {
        "version": np.array(CACHE_VERSION),
        "classes": np.array(classes),
        "paths": np.concatenate(paths),
        "images_per_class": np.array(counts),
        "left_out": np.array(left_out),
        "folders": np.array(list(folders)),
        "states": np.array([_state(status) for status in folders.values()]),
    }
    return arrays, shows_changes


def _scan_class(
    root: bytes, name: bytes
) -> tuple[np.ndarray, dict[bytes, os.stat_result], Counter[bytes]]:
    """Return the images of one class, sorted and relative to `root`; each folder with its status;
    and the number of other files by suffix."""
    images: list[bytes] = []
    others: Counter[bytes] = Counter()
    folders: dict[bytes, os.stat_result] = {}
    pending = [name]
    while pending:
        folder = pending.pop()
        here = os.path.join(root, folder)
        folders[folder] = os.stat(here)
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
                os.stat(entry.path)  # an error if it is a broken link
                raise UserError(f"{os.fsdecode(entry.path)}: is not a regular file. Remove it.")
            else:
                others[suffix] += 1
    return np.sort(np.array(images, dtype=np.bytes_)), folders, others


def _refuse_link_upwards(entry: os.DirEntry, folder: bytes) -> None:
    """Raise UserError if `entry` in `folder` links to a folder above, which would never end."""
    if not entry.is_symlink():
        return
    target = os.fsdecode(os.path.realpath(entry.path))
    if Path(os.fsdecode(os.path.realpath(folder))).is_relative_to(target):
        raise UserError(
            f"{os.fsdecode(entry.path)}: a link to {target}, a folder above it, so listing its "
            "images would never end. Remove the link."
        )


# ---- the cache ----


def _list_once(cache: Path, root: Path, classes: list[bytes]) -> dict[str, Any]:
    """Return what `_scan` finds, and keep it in `cache`; or wait for another process that does."""
    arrays = None
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        with locked(cache.with_suffix(".lock")):
            arrays = _read_cache(cache, root, classes)
            if arrays is None:
                arrays, shows_changes = _scan(root, classes)
                if shows_changes:
                    with whole_file(cache) as file:
                        np.savez(file, **arrays)
    except OSError as error:
        print(
            f"warning: {cache.parent}: the listing of {root} cannot be cached there "
            f"({error.strerror}), so each process lists it again at each start. Give a folder "
            "that can be written with --cache-dir DIR.",
            file=sys.stderr,
            flush=True,
        )
    return arrays or _scan(root, classes)[0]


def _read_cache(cache: Path, root: Path, classes: list[bytes]) -> dict[str, Any] | None:
    """Return what `_scan` stored, or None if that is missing, damaged or out of date."""
    try:
        arrays = read_arrays(cache)
        folders = zip(arrays["folders"].tolist(), arrays["states"].tolist(), strict=True)
        holds = (
            arrays["version"] == CACHE_VERSION
            and arrays["classes"].tolist() == classes
            and all(
                _state(os.stat(os.path.join(os.fsencode(root), folder))) == state
                for folder, state in folders
            )
        )
        return arrays if holds else None
    except DAMAGE:
        return None


def _state(status: os.stat_result) -> bytes:
    """Return what tells a folder from another one, and from itself before a change. Copies and
    archives set the time of modification as they like, but not the one of the change, ctime."""
    return b"%d %d %d %d" % (
        _device(status),
        status.st_ino,
        status.st_mtime_ns,
        status.st_ctime_ns,
    )


def _device(status: os.stat_result) -> int:
    """Return the number of the device, if it is one: a network file system's differs from host to
    host, and would make hosts with a common cache list again and again."""
    return status.st_dev if os.major(status.st_dev) else 0


def _times_show_changes(devices: set[int]) -> bool:
    """Return whether all file systems with these numbers are of kinds that give a folder new times
    when it changes."""
    for line in read_proc("/proc/self/mountinfo").splitlines():
        # 27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
        mount, _, source = line.partition(" - ")
        major, minor = map(int, mount.split()[2].split(":"))
        hides_changes = WITHOUT_CHANGE_TIMES.fullmatch(source.split()[0])
        if hides_changes and os.makedev(major, minor) in devices:
            return False
    return True


def read_arrays(file: Path) -> dict[str, Any]:
    """Return the arrays in a file that `np.savez` wrote; one of DAMAGE for any other file."""
    with np.load(file, allow_pickle=False) as stored:
        return dict(stored)


# Formats that Pillow reads and that image sets use. Compared in lower case.
SUFFIXES = frozenset(
    b".jpg .jpeg .jpe .jfif .png .webp .bmp .gif .tif .tiff .ppm .pgm .pbm .pnm .jp2 .avif".split()
)
# Names that file servers and systems add: thumbnails, deleted files, Finder's notes. They are
# skipped, and so are hidden names.
PASSED_OVER = re.compile(
    rb"\.|(@eadir|@tmp|@recycle|@recently-snapshot|#recycle|#snapshot|\$recycle\.bin|lost\+found|"
    rb"system volume information|__macosx|thumbs\.db|desktop\.ini)\Z",
    re.IGNORECASE,
)
# ImageNet's names.
CLASS_NAME = re.compile(r"n\d{8}")
# Images in a folder without class folders: those of ImageNet's validation set, of Tiny ImageNet's,
# and of training sets. Names of training images, and those in other archives than ImageNet's own,
# hold the class.
FLAT_IMAGE = re.compile(
    r"(ILSVRC2012_val_\d{8}|val_\d+|n\d{8}_\d+)(?:_n\d{8})?\.jpe?g", re.IGNORECASE
)
TINY_IMAGES, TINY_LABELS = "images", "val_annotations.txt"  # in Tiny ImageNet's val
# The folder that prepare.py keeps beside its output until that is complete.
UNFINISHED = ".unfinished"
SPLIT_NAMES = frozenset({"train", "val", "valid", "validation", "test"})
# Errors of file servers and disks that may pass, and the pauses before each new try.
PASSING_ERRORS = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN}
PAUSES_S = (0.1, 0.4, 1.6, 6.4)
WARNED_OF: set[int | None] = set()  # the errors that this process has warned of


def first_few(names: list[str], count: int = 3) -> str:
    """Return the first `count` names, and how many more there are, for an error message."""
    more = f" and {len(names) - count:,} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more


def refuse_other_layouts(root: Path, folders: list[str], files: list[str]) -> None:
    """Raise UserError unless the `folders` in `root` can be class folders. `root` may instead be
    one of ImageNet's archives half unpacked, hold train/ and val/, or hold only images."""
    flat = [name for name in files if FLAT_IMAGE.fullmatch(name)]
    # Beside class folders only images of the validation set show that some are not sorted yet.
    has_val = any(name.upper().startswith("ILSVRC2012") for name in flat)
    is_flat = has_val or (flat and not folders)
    has_classes = any(CLASS_NAME.search(name) for name in flat)
    sorting = f"python -m recipe.data.prepare sort-val {shlex.quote(str(root))}"
    if not has_classes:
        sorting += " --labels LOC_val_solution.csv (Kaggle's file, or ILSVRC2012_devkit_t12.tar.gz)"
    is_tiny = TINY_IMAGES in folders and TINY_LABELS in files
    refuse(
        (
            is_flat,
            f"{root}: holds images of ImageNet without class folders, as archives have them. Sort "
            f"them with: {sorting}",
        ),
        (
            is_tiny,
            f"{root}: is Tiny ImageNet's validation set, without class folders. Sort it with: "
            f"python -m recipe.data.prepare sort-val {shlex.quote(str(root))} "
            f"--labels {shlex.quote(str(root / TINY_LABELS))}",
        ),
        (
            "train" in folders and len(folders) > 1 and SPLIT_NAMES.issuperset(folders),
            f"{root}: holds {' and '.join(sorted(folders))}, not class folders. "
            f"Name it with --data {root}, or its parts with --train-dir and --val-dir.",
        ),
        (
            not folders and not is_flat,
            f"{root}: holds no class folders. Each class needs a folder with its images: "
            f"{root / 'CLASS' / 'image.jpg'}. Unpack archives first, ImageNet's own with "
            "python -m recipe.data.prepare unpack.",
        ),
    )


def missing_folder(root: Path) -> str:
    """Return the message for a `root` that is not a folder, with the closest that exists."""
    there = next(path for path in (root, *root.parents) if path.exists())
    if not there.is_dir():
        return f"{there}: a file, not a folder. If it is an archive, unpack it first."
    if (there / UNFINISHED).is_dir():
        return (
            f"{root}: not complete yet. Run the same python -m recipe.data.prepare unpack "
            "command again."
        )
    if any(there.glob("*idx3-ubyte*")):
        return (
            f"{there}: holds images in IDX format. Convert them with: python -m "
            f"recipe.data.prepare idx {shlex.quote(str(there))} OUT. Then train with --data OUT."
        )
    missing = root.relative_to(there).parts[0]
    nearest = difflib.get_close_matches(missing, os.listdir(there), n=3, cutoff=0)
    hint = f"the closest names in it are {', '.join(nearest)}" if nearest else "it is empty"
    return (
        f"{root}: no such folder. {there} has no {missing}; {hint}. --data needs a folder that "
        "holds train/ and val/, which python -m recipe.data.prepare unpack makes from ImageNet's "
        "archives; --train-dir and --val-dir give them separately. Is the disk mounted?"
    )


def read_patiently(path: str, read: Callable[[], bytes]) -> bytes:
    """Return what `read` returns, which reads the file at `path`. After an error that may pass, try
    again, four times within nine seconds. BadImage about any other error, and about the last."""
    with system_errors(path, *UNREADABLE, BadImage):
        for pause_s in PAUSES_S:
            try:
                return read()
            except OSError as error:
                if error.errno not in PASSING_ERRORS:
                    raise
                if error.errno not in WARNED_OF:
                    WARNED_OF.add(error.errno)
                    print(
                        f"warning: {path}: cannot be read ({error.strerror}); trying again for "
                        f"{sum(PAUSES_S):.0f} s (this warning appears only once)",
                        file=sys.stderr,
                        flush=True,
                    )
            time.sleep(pause_s)
        return read()
