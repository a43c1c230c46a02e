"""The data set that needs no download: handwritten digits, as an ImageFolder of JPEG files."""

import os
from pathlib import Path

import numpy as np
from PIL import Image

from recipe.data.image_folder import locked
from recipe.errors import system_errors
from recipe.files import whole_file

# Raise it whenever the files would come out differently: an older cache is then left unused.
VERSION = 1
IMAGE_SIZE = 32
SPLIT_SEED = 20120
VAL_FRACTION = 0.2
JPEG_QUALITY = 95
NUM_IMAGES = 1797


def prepare_digits(cache_dir: Path) -> Path:
    """Write the digits below `cache_dir` unless they are there, and return their folder.

    The folder holds `train/0` .. `train/9` (1,438 images) and `val/0` .. `val/9` (359 images): all
    1,797 images of scikit-learn's `load_digits` (8x8 pixels, 17 grey levels; the test part of the
    UCI set "Optical Recognition of Handwritten Digits"), enlarged to 32x32 by bicubic
    interpolation, as grey JPEG files. The split is fixed: a fifth of each digit, drawn with one
    seed, is for validation.

    Any number of processes, on one host or on several that share `cache_dir`, may call it at once:
    each file is written whole or not at all, with the same bytes. Where they are not all there,
    they are written again.

    UserError if `cache_dir` cannot be written.
    """
    root = Path(os.path.abspath(cache_dir)) / f"digits-v{VERSION}"
    if _is_complete(root):
        return root
    with system_errors(
        root,
        "the embedded digits cannot be written there",
        "Choose a folder that can be written with --cache-dir DIR, or name your own images with "
        "--data DIR.",
    ):
        root.parent.mkdir(parents=True, exist_ok=True)
        with locked(root.with_suffix(".lock")):
            if not _is_complete(root):
                _write_images(root)
    return root


def _is_complete(root: Path) -> bool:
    """Whether all files are there (about 5 ms): cleaners of temporary folders remove single ones,
    and a power cut can leave empty ones."""
    sizes = [file.stat().st_size for file in root.glob("*/*/*.jpg")]
    return len(sizes) == NUM_IMAGES and all(sizes)


def _write_images(root: Path) -> None:
    from sklearn.datasets import load_digits  # half a second that only the first call must pay

    digits = load_digits()
    pixels = np.round(digits.images * (255 / 16)).astype(np.uint8)  # [1797, 8, 8], levels 0 .. 16
    is_val = _validation_part(digits.target)
    for index, (image, label) in enumerate(zip(pixels, digits.target, strict=True)):
        folder = root / ("val" if is_val[index] else "train") / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{index:04d}.jpg"
        enlarged = Image.fromarray(image).resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BICUBIC)
        with whole_file(file) as stream:
            enlarged.save(stream, "JPEG", quality=JPEG_QUALITY)


def _validation_part(labels: np.ndarray) -> np.ndarray:
    """bool[N]: True for a fifth of each class; the same whatever the order of the classes."""
    is_val = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        # Raw bits, since numpy promises these for ever, but not `permutation`.
        order = np.argsort(np.random.PCG64([SPLIT_SEED, int(label)]).random_raw(len(members)))
        is_val[members[order[: round(VAL_FRACTION * len(members))]]] = True
    return is_val
