"""The data set that needs no download: handwritten digits, as an ImageFolder of JPEG files."""

import json
import os
import socket
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from recipe.data.image_folder import locked
from recipe.errors import UserError

# Raise it whenever the files would come out differently: an older cache is then left unused.
VERSION = 1
NUM_TRAIN_IMAGES = 1438
NUM_VAL_IMAGES = 359
IMAGE_SIZE = 32
SPLIT_SEED = 20120
VAL_FRACTION = 0.2
JPEG_QUALITY = 95
STAMP = "complete.json"


def prepare_digits(cache_dir: Path) -> Path:
    """Write the digits below `cache_dir` unless they are there, and return their folder.

    The folder holds `train/0` .. `train/9` (1,438 images) and `val/0` .. `val/9` (359 images): all
    1,797 images of scikit-learn's `load_digits` (8x8 pixels, 17 grey levels; the test part of the
    UCI set "Optical Recognition of Handwritten Digits"), enlarged to 32x32 by bicubic
    interpolation, as grey JPEG files. The split is fixed: a fifth of each digit, drawn with one
    seed, is for validation.

    Any number of processes, on one host or on several that share `cache_dir`, may call it at once:
    the files are written into a folder of the caller's own, which is then renamed. A folder whose
    files are not all there, in full length, is replaced.

    UserError if `cache_dir` cannot be written.
    """
    root = Path(os.path.abspath(cache_dir)) / f"digits-v{VERSION}"
    if _is_complete(root):
        return root
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        with locked(root.with_suffix(".lock")):
            if not _is_complete(root):
                _write_and_rename(root)
    except OSError as error:
        raise UserError(
            f"{root}: the embedded digits cannot be written there ({error.strerror or error}). "
            "Choose a folder that can be written with --cache-dir DIR, or name your own images "
            "with --data DIR."
        ) from error
    return root


def _is_complete(root: Path) -> bool:
    """Whether `root` holds as many files and bytes as its stamp says (about 5 ms).

    Cleaners of temporary folders remove single files, and a power cut can leave empty ones.
    """
    try:
        stamp = json.loads((root / STAMP).read_text())
        sizes = [file.stat().st_size for file in root.glob("*/*/*.jpg")]
        return bool(stamp == {"version": VERSION, "images": len(sizes), "bytes": sum(sizes)})
    except (OSError, ValueError):
        return False


def _write_and_rename(root: Path) -> None:
    prefix = f"{root.name}.{socket.gethostname()}-{os.getpid()}-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=root.parent) as folder:
        work = Path(folder)
        _write_images(work / "new")
        try:
            if root.exists() and not _is_complete(root):  # a rename replaces empty folders only
                os.rename(root, work / "incomplete")
            os.rename(work / "new", root)
        except OSError:
            # Where hosts share a file system without locks, another host may have been first.
            if not _is_complete(root):
                raise


def _write_images(root: Path) -> None:
    from sklearn.datasets import load_digits  # half a second that only the first call must pay

    digits = load_digits()
    pixels = np.round(digits.images * (255 / 16)).astype(np.uint8)  # [1797, 8, 8], levels 0 .. 16
    is_val = _validation_part(digits.target)
    num_bytes = 0
    for index, (image, label) in enumerate(zip(pixels, digits.target, strict=True)):
        folder = root / ("val" if is_val[index] else "train") / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{index:04d}.jpg"
        enlarged = Image.fromarray(image).resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BICUBIC)
        enlarged.save(file, quality=JPEG_QUALITY)
        num_bytes += file.stat().st_size
    stamp = {"version": VERSION, "images": len(pixels), "bytes": num_bytes}
    (root / STAMP).write_text(json.dumps(stamp))


def _validation_part(labels: np.ndarray) -> np.ndarray:
    """bool[N]: True for a fifth of each class; the same whatever the order of the classes."""
    is_val = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        # Raw bits, since numpy promises these for ever, but not `permutation`.
        order = np.argsort(np.random.PCG64([SPLIT_SEED, int(label)]).random_raw(len(members)))
        is_val[members[order[: round(VAL_FRACTION * len(members))]]] = True
    return is_val
