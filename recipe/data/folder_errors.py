"""What to say of a folder of images that is not as it should be, and what to do about it."""

import difflib
import errno
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from recipe.errors import UserError, limit_reached, refuse

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
# What `make_shards` and `prepare_imagenet` keep beside their output until all of it is there.
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
    refuse(
        (any(VAL_IMAGE.fullmatch(name) for name in files),
         f"{root}: images of ImageNet's validation set are in it without class folders, as its "
         f"archive has them. Sort them with: python -m recipe.prepare_val "
         f"{shlex.quote(str(root))} --labels LOC_val_solution.csv (Kaggle's file, or "
         "ILSVRC2012_devkit_t12.tar.gz)"),
        ("train" in folders and len(folders) > 1 and SPLIT_NAMES.issuperset(folders),
         f"{root}: holds {' and '.join(sorted(folders))}, not class folders. "
         f"Name it with --data {root}, or its parts with --train-dir and --val-dir."),
        (not folders,
         f"{root}: holds no class folders. Each class needs a folder with its images: "
         f"{root / 'CLASS' / 'image.jpg'}. Archives are to be unpacked, ImageNet's own with "
         "python -m recipe.prepare_imagenet."),
    )  # fmt: skip


def missing_folder(root: Path) -> str:
    """The message for a `root` that is not a folder, with what there is in its place."""
    there = next(path for path in (root, *root.parents) if path.exists())
    if not there.is_dir():
        return f"{there}: a file, not a folder. If it is an archive, unpack it first."
    if (there / UNFINISHED).is_dir():
        return (
            f"{root}: not complete yet. Run the same python -m recipe.prepare_imagenet command "
            "again."
        )
    missing = root.relative_to(there).parts[0]
    nearest = difflib.get_close_matches(missing, os.listdir(there), n=3, cutoff=0)
    found = f"the closest names in it are {', '.join(nearest)}" if nearest else "it is empty"
    return (
        f"{root}: no such folder. {there} has no {missing}; {found}. --data wants a folder that "
        "holds train/ and val/, which python -m recipe.prepare_imagenet makes of ImageNet's "
        "archives; --train-dir and --val-dir name them one by one. Is the disk mounted?"
    )


@contextmanager
def readable(path: str | Path) -> Iterator[None]:
    """Turn an error of the system about `path`, or about something in it, into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(
            (error.errno == errno.EMFILE and limit_reached(error))
            or f"{os.fsdecode(error.filename or path)}: cannot be read ({error.strerror}). Check "
            "its permissions, and whether it, or what it links to, is still there."
        ) from error


def read_patiently(path: str, read: Callable[[], bytes]) -> bytes:
    """What `read` returns, which reads the file at `path`; after an error that may pass it is
    called again, four times within nine seconds. UserError about any other one, and the last."""
    with readable(path):
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
