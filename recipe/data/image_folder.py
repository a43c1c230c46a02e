"""Which images a folder of class folders holds: listed once, cached, checked at each start."""

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
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from recipe.errors import UserError
from recipe.files import whole_file

# What Pillow reads and what image sets are made of. Compared in lower case.
SUFFIXES = frozenset(
    b".jpg .jpeg .jpe .jfif .png .webp .bmp .gif .tif .tiff .ppm .pgm .pbm .pnm .jp2 .avif".split()
)
# Raise it whenever a listing would come out differently, or is stored differently.
CACHE_VERSION = 1
# Folder times have steps (4 ms on ext4, 2 s on FAT and old NFS servers). A folder that changed
# just before it was listed may change again without a new time, so such a cache is not trusted.
YOUNGEST_TRUSTED_NS = 2_000_000_000
# Over a network a listing mostly waits for answers, so several questions at once should shorten it.
# On a local disk threads only get in each other's way: 1.28 million files took 3.2 s, alone 1.6 s.
NUM_LISTING_THREADS = 8
NUM_READING_THREADS = 8  # of `read_ahead`: the answers of network file systems overlap
FLAT_VAL_IMAGE = re.compile(r"ILSVRC2012_val_\d{8}\.jpe?g", re.IGNORECASE)
CLASS_ARCHIVE = re.compile(r"(n\d{8})\.tar")
# Where Kaggle's archive and common set-ups have train/ and val/, below the folder that users name.
LIKELY_INNER_FOLDERS = (
    "ILSVRC/Data/CLS-LOC",
    "Data/CLS-LOC",
    "CLS-LOC",
    "ILSVRC2012",
    "imagenet",
    "images",
)
SPLIT_NAMES = frozenset({"train", "val", "valid", "validation", "test"})


@dataclass(frozen=True)
class Listing:
    """The images below `root`, ordered by class and then by path, both as bytes.

    Here each is a file of its own; `shards` and `in_memory` derive listings from it that have the
    same images at the same indices, and read them from elsewhere.

    `paths` (bytes of fixed width, [num_images], relative to `root`) and `labels` (int64,
    [num_images], index into `classes`) are two buffers, not a million Python objects: forked loader
    workers share them with their parent, since reading them touches no reference count.
    """

    root: Path
    classes: tuple[str, ...]
    paths: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.paths)

    def path(self, index: int) -> str:
        """The full path of image `index`."""
        return os.path.join(self.root, os.fsdecode(self.paths[index]))

    def name(self, index: int) -> str:
        """What messages call image `index`."""
        return self.path(index)

    def size(self, index: int) -> int:
        """Bytes of image `index`, encoded. UserError as in `read`."""
        path = self.path(index)
        try:
            return os.stat(path).st_size
        except OSError as error:
            raise UserError(_unreadable(path, error)) from error

    def read(self, index: int) -> bytes:
        """The encoded bytes of image `index`. UserError if its file cannot be read."""
        path = self.path(index)
        try:
            with open(path, "rb", buffering=0) as file:
                return file.read()
        except OSError as error:
            raise UserError(_unreadable(path, error)) from error


@dataclass(frozen=True)
class _Scan:
    """A listing with what is needed to notice that it is out of date."""

    listing: Listing
    folders: np.ndarray  # bytes [num_folders]: each folder that was read, relative to the root
    times_ns: np.ndarray  # int64 [num_folders]: their modification times, taken before reading
    started_ns: int  # wall clock


def list_images(root: Path, cache_dir: Path) -> Listing:
    """List the images in the class folders of `root`, from a cache in `cache_dir` if it holds.

    Classes are the folders in `root`; sub-folders of a class are walked and belong to it (as in
    torchvision). Links to folders and files are followed. Names that begin with a dot, and files
    without an image suffix (SUFFIXES, in upper or lower case), are skipped. The order depends on
    the names' bytes alone, so that all hosts agree.

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
    listing = _read_cache(cache, root, classes)  # without the lock: a cache may be read-only
    if listing is not None:
        return listing
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        cache.with_suffix(".lock").touch()
    except OSError as error:
        _warn_no_cache(cache, root, error)
        return _scan(root, classes).listing
    with locked(cache.with_suffix(".lock")):
        listing = _read_cache(cache, root, classes)
        if listing is not None:
            return listing
        scan = _scan(root, classes)
        try:
            _write_cache(cache, scan)
        except OSError as error:
            _warn_no_cache(cache, root, error)
        return scan.listing


def check_train_and_val(train: Listing, val: Listing) -> None:
    """UserError unless both have the same classes, else a label would mean two different things,
    and more than one, else there is nothing to learn."""
    if train.classes == val.classes:
        if len(train.classes) > 1:
            return
        raise UserError(
            f"{train.root}: holds a single class, {train.classes[0]}, so that each answer would be "
            "right. Add a folder for each other class; or are they inside this one?"
        )
    only_train = sorted(set(train.classes) - set(val.classes))
    only_val = sorted(set(val.classes) - set(train.classes))
    raise UserError(
        f"{val.root} has other classes ({len(val.classes):,}) than {train.root} "
        f"({len(train.classes):,}). Only in train: {first_few(only_train)}. "
        f"Only in val: {first_few(only_val)}. "
        "Both folders must hold class folders of the same names: remove or add what differs."
    )


@contextmanager
def locked(lock_file: Path) -> Iterator[None]:
    """Hold an exclusive lock on `lock_file` (created if missing) against other processes.

    Only a means to save double work: on a file system without locks the body runs all the same, so
    whatever it writes must be right without one (temporary file, rename).
    """
    with open(lock_file, "a") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file releases the lock; so does the process's end, however it comes


def first_few(names: list[str], count: int = 3) -> str:
    """The first `count` names, and how many more there are: what an error message has room for."""
    if not names:
        return "none"
    more = f" and {len(names) - count:,} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more


def read_ahead(listing: Listing, indices: Iterable[int]) -> Iterator[bytes]:
    """The encoded bytes of images `indices`, in this order, read by a few threads that stay a
    little ahead."""
    with ThreadPoolExecutor(NUM_READING_THREADS) as pool:
        pending: deque[Future[bytes]] = deque()
        try:
            for index in indices:
                pending.append(pool.submit(listing.read, index))
                if len(pending) > 2 * NUM_READING_THREADS:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:  # after an error, or when no more is wanted
                future.cancel()


# ---- listing ----


def _class_names(root: Path) -> list[bytes]:
    """The names of the class folders in `root`, sorted; UserError if it does not look like one."""
    if not root.is_dir():
        raise UserError(_missing_folder(root))
    folders: list[str] = []
    files: list[str] = []
    try:
        with os.scandir(root) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_symlink():
                    _check_link(entry.path)
                (folders if _is_folder(entry) else files).append(entry.name)
    except OSError as error:
        raise UserError(
            f"{root}: cannot be listed ({error.strerror}). Check its rights."
        ) from error
    flat_val_images = sum(bool(FLAT_VAL_IMAGE.fullmatch(name)) for name in files)
    if flat_val_images:
        raise UserError(
            f"{root}: {flat_val_images:,} images of ImageNet's validation set lie in it without "
            f"class folders, as its archive has them. Sort them with: "
            f"python -m recipe.prepare_val {shlex.quote(str(root))} --labels LOC_val_solution.csv "
            "(Kaggle's file, or ILSVRC2012_devkit_t12.tar.gz)"
        )
    archives = [match[1] for name in files if (match := CLASS_ARCHIVE.fullmatch(name))]
    still_packed = sorted(set(archives) - set(folders))
    if still_packed:
        raise UserError(
            f"{root}: {len(still_packed):,} classes are still packed ({first_few(still_packed)}). "
            f"Unpack each into a folder of its own: cd {shlex.quote(str(root))} && "
            'for f in n*.tar; do d="${f%.tar}"; mkdir -p "$d" '
            '&& tar -xf "$f" -C "$d" && rm "$f"; done'
        )
    if "train" in folders and len(folders) > 1 and SPLIT_NAMES.issuperset(folders):
        raise UserError(
            f"{root}: holds {' and '.join(sorted(folders))}, not class folders. "
            f"Name it with --data {root}, or its parts with --train-dir and --val-dir."
        )
    if not folders:
        images = sum(_suffix(os.fsencode(name)) in SUFFIXES for name in files)
        found = f"{images:,} images lie in it directly" if images else "it holds no folders"
        raise UserError(
            f"{root}: no class folders ({found}). Each class needs a folder with its images: "
            f"{root / 'CLASS' / 'image.jpg'}"
        )
    return sorted(map(os.fsencode, folders))


def _scan(root: Path, classes: list[bytes]) -> _Scan:
    started_ns = time.time_ns()
    next_word_s = time.monotonic() + 10
    paths: list[np.ndarray] = []
    folders: list[bytes] = []
    times_ns: list[int] = []
    empty: list[Path] = []
    root_bytes = os.fsencode(root)
    real_root = Path(os.path.realpath(root))
    above = frozenset(_identity(os.stat(folder)) for folder in (real_root, *real_root.parents))
    with ThreadPoolExecutor(NUM_LISTING_THREADS) as pool:
        scans = pool.map(lambda name: _scan_class(root_bytes, name, above), classes)
        for name, (class_paths, class_folders) in zip(classes, scans, strict=True):
            if len(class_paths) == 0:
                empty.append(root / os.fsdecode(name))
            paths.append(class_paths)
            folders += class_folders
            times_ns += class_folders.values()
            if time.monotonic() > next_word_s:
                print(
                    f"listing {root}: {sum(map(len, paths)):,} images in {len(paths):,} of "
                    f"{len(classes):,} class folders so far (kept in the cache for the next time)",
                    file=sys.stderr,
                )
                next_word_s += 30
    if empty:
        raise UserError(_empty_classes(root, empty))
    listing = Listing(
        root=root,
        classes=tuple(map(os.fsdecode, classes)),
        paths=np.concatenate(paths),
        labels=np.repeat(np.arange(len(paths), dtype=np.int64), [len(part) for part in paths]),
    )
    return _Scan(listing, np.array(folders), np.array(times_ns, dtype=np.int64), started_ns)


def _scan_class(
    root: bytes, name: bytes, above_root: frozenset[tuple[int, int]]
) -> tuple[np.ndarray, dict[bytes, int]]:
    """The sorted images of one class, relative to `root`, and the time of each folder read."""
    images: list[bytes] = []
    times_ns: dict[bytes, int] = {}
    # With each folder come the identities of those above it: a link to one of them would never end.
    pending: list[tuple[bytes, frozenset[tuple[int, int]]]] = [(name, above_root)]
    try:
        while pending:
            folder, above = pending.pop()
            status = os.stat(os.path.join(root, folder))
            if _identity(status) in above:
                raise UserError(_endless_link(Path(os.fsdecode(os.path.join(root, folder)))))
            times_ns[folder] = status.st_mtime_ns
            with os.scandir(os.path.join(root, folder)) as entries:
                for entry in entries:
                    if entry.name.startswith(b"."):
                        continue
                    path = folder + b"/" + entry.name
                    if _is_folder(entry):
                        pending.append((path, above | {_identity(status)}))
                    elif _suffix(entry.name) in SUFFIXES:
                        if not entry.is_file():
                            _check_link(entry.path)
                            raise UserError(
                                f"{os.fsdecode(entry.path)}: cannot be read as a file: it is a "
                                "named pipe, a socket or a device. Remove it."
                            )
                        images.append(path)
    except OSError as error:
        where = os.fsdecode(error.filename or os.path.join(root, name))
        raise UserError(
            f"{where}: cannot be listed ({error.strerror}). Check its rights."
        ) from error
    return np.sort(np.array(images, dtype=np.bytes_)), times_ns


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _check_link(path: str | bytes) -> None:
    """UserError if `path` is a link that leads nowhere, or to itself."""
    if not os.path.islink(path):
        return
    name = os.fsdecode(path)
    target = os.readlink(name)
    try:
        os.stat(path)
    except FileNotFoundError as error:
        raise UserError(
            f"{name}: a link to {target}, which is not there. "
            "Is the disk that it points to mounted? If so, remove the link."
        ) from error
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise UserError(
            f"{name}: a link to {target}, which leads back to it. Remove the link."
        ) from error


def _is_folder(entry: os.DirEntry) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        _check_link(entry.path)  # says it better, if it is a link to itself
        raise


def _suffix(name: bytes) -> bytes:
    return name[name.rfind(b".") :].lower()


# ---- the cache ----


def _write_cache(cache: Path, scan: _Scan) -> None:
    with whole_file(cache) as file:
        np.savez(
            file,
            version=np.int64(CACHE_VERSION),
            classes=np.array([os.fsencode(name) for name in scan.listing.classes]),
            paths=scan.listing.paths,
            images_per_class=np.bincount(scan.listing.labels),
            folders=scan.folders,
            times_ns=scan.times_ns,
            started_ns=np.int64(scan.started_ns),
        )


def _read_cache(cache: Path, root: Path, classes: list[bytes]) -> Listing | None:
    """The cached listing, or None if there is none that is readable, whole and up to date."""
    try:
        with np.load(cache, allow_pickle=False) as stored:
            if (
                stored["version"] != CACHE_VERSION
                or stored["classes"].tolist() != classes
                or _changed(root, stored["folders"], stored["times_ns"], int(stored["started_ns"]))
            ):
                return None
            return Listing(
                root=root,
                classes=tuple(map(os.fsdecode, classes)),
                paths=stored["paths"],
                labels=np.repeat(
                    np.arange(len(classes), dtype=np.int64), stored["images_per_class"]
                ),
            )
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def _changed(root: Path, folders: np.ndarray, times_ns: np.ndarray, started_ns: int) -> bool:
    if times_ns.max() > started_ns - YOUNGEST_TRUSTED_NS:
        return True
    root_bytes = os.fsencode(root)
    return any(
        os.stat(os.path.join(root_bytes, folder)).st_mtime_ns != time_ns
        for folder, time_ns in zip(folders.tolist(), times_ns.tolist(), strict=True)
    )


def _warn_no_cache(cache: Path, root: Path, error: OSError) -> None:
    print(
        f"warning: {cache.parent}: the listing of {root} cannot be kept there ({error.strerror}), "
        "so each process lists it anew at each start. Choose a folder that can be written with "
        "--cache-dir DIR.",
        file=sys.stderr,
        flush=True,
    )


# ---- messages ----


def _missing_folder(root: Path) -> str:
    """What to say about a `root` that is not a folder, with a guess at what was meant."""
    if root.exists():
        return (
            f"{root}: a file, not a folder of class folders. If it is an archive, unpack it first."
        )
    file = next((folder for folder in root.parents if folder.is_file()), None)
    if file is not None:
        return (
            f"{file}: a file, not a folder that holds train/ and val/. If it is an archive, unpack "
            "it first."
        )
    parent = root.parent
    if not parent.is_dir():
        nearest = next(folder for folder in root.parents if folder.is_dir())
        missing = root.relative_to(nearest).parts[0]
        close = _close_name(nearest, missing)
        hint = f"did you mean {nearest / close}?" if close else "is the disk mounted?"
        return f"{root}: no such folder; {nearest} has no {missing}: {hint}"
    for inner in LIKELY_INNER_FOLDERS:
        if (parent / inner / root.name).is_dir():
            return f"{root}: no such folder; did you mean --data {parent / inner}?"
    archives = sorted(path.name for path in parent.glob("ILSVRC2012_img_*.tar"))
    if archives:
        archive, folder = shlex.quote(str(parent / archives[0])), shlex.quote(str(root))
        return (
            f"{root}: no such folder, but {parent} holds {first_few(archives)}: unpack first, "
            f"for instance: mkdir {folder} && tar -xf {archive} -C {folder}"
        )
    close = _close_name(parent, root.name)
    if close:
        option = {"train": " (--train-dir)", "val": " (--val-dir)"}.get(root.name, "")
        return f"{root}: no such folder; did you mean {parent / close}{option}?"
    if parent.name in SPLIT_NAMES and (parent.parent / root.name).is_dir():
        return f"{root}: no such folder; did you mean --data {parent.parent}?"
    if root.name in SPLIT_NAMES:
        return (
            f"{root}: no such folder; {parent} has no {root.name}/ inside. --data wants a folder "
            "that holds train/ and val/; name them one by one with --train-dir and --val-dir."
        )
    return f"{root}: no such folder. Check the spelling, and whether the disk is mounted."


def _unreadable(path: str, error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{path}: no such file any more. Was it removed since the folder was listed?"
    return f"{path}: cannot be read ({error.strerror}). Check its rights and its disk."


def _endless_link(folder: Path) -> str:
    """About the last link on the way to `folder`, which led to a folder above itself."""
    link = next(filter(Path.is_symlink, (folder, *folder.parents)), folder)
    return (
        f"{link}: a link to {os.path.realpath(link)}, a folder above itself, so that its images "
        "would never end. Remove the link."
    )


def _close_name(folder: Path, name: str) -> str | None:
    """A folder in `folder` whose name is close to `name`, in another case, or means the same."""
    try:
        names = sorted(path.name for path in folder.iterdir() if path.is_dir())
    except OSError:
        return None
    by_lower = {other.lower(): other for other in names}
    synonyms = ["val", "valid", "validation"] if name.startswith("val") else [name, "training"]
    for wanted in [name.lower(), *(s for s in synonyms if s != name)]:
        if wanted in by_lower:
            return by_lower[wanted]
    close = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return by_lower[close[0]] if close else None


def _empty_classes(root: Path, folders: list[Path]) -> str:
    names = first_few([folder.name for folder in folders])
    suffixes = {path.suffix for path in folders[0].iterdir() if path.is_file()}
    found = (
        f"{folders[0].name} holds files, but with {first_few(sorted(suffixes))} at their ends, "
        "which is no image suffix known here"
        if suffixes
        else f"{folders[0].name} holds no files"
    )
    return (
        f"{root}: {len(folders):,} of its classes without images: {names} ({found}). "
        "Add their images, or remove the folders in both train and val."
    )
