"""A data set that needs no download: handwritten digits, as JPEG images in a NumPy file.

All 1,797 images of scikit-learn's `load_digits` (8x8 pixels, 17 grey levels; the test part of the
UCI set "Optical Recognition of Handwritten Digits", CC BY 4.0), enlarged to 32x32 by Pillow's
bicubic interpolation and stored as grey JPEG of quality 95. A fifth of each digit's images is for
validation: 1,438 images train, 359 validate. They were encoded once, so that all machines train on
the same bytes.
"""

from pathlib import Path

from recipe.data.image_folder import read_arrays
from recipe.data.memory import ImagesInMemory

FILE = Path(__file__).with_suffix(".npz")


def open_digits(part: str) -> ImagesInMemory:
    """Return the digits of the part `train` or `val`."""
    stored = read_arrays(FILE)
    kinds = (stored[f"{part}_{kind}"] for kind in ("paths", "labels", "contents", "offsets"))
    return ImagesInMemory(FILE, tuple("0123456789"), *kinds)
