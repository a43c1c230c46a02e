"""The data set that needs no download: handwritten digits, as JPEG files in a file of NumPy's.

All 1,797 images of scikit-learn's `load_digits` (8x8 pixels, 17 grey levels; the test part of the
UCI set "Optical Recognition of Handwritten Digits", CC BY 4.0), enlarged to 32x32 by Pillow's
bicubic interpolation, as grey JPEG files of quality 95. A fifth of each digit is for validation:
1,438 and 359 images. They were encoded once, so that all machines train on the same bytes.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from recipe.data.image_folder import Listing, read_arrays

FILE = Path(__file__).with_suffix(".npz")


@dataclass(frozen=True)
class Digits(Listing):
    """A listing whose images are in memory, one after the other: `contents` (uint8), of which image
    i begins at `offsets` [i] (int64 [num_images + 1])."""

    contents: np.ndarray
    offsets: np.ndarray

    def read(self, index: int) -> bytes:
        """The encoded bytes of image `index`."""
        begin, end = self.offsets[index : index + 2]
        return self.contents[begin:end].tobytes()


def open_digits(part: str) -> Digits:
    """Those of `train` or `val`."""
    stored = read_arrays(FILE)
    kinds = (stored[f"{part}_{kind}"] for kind in ("paths", "labels", "contents", "offsets"))
    return Digits(FILE, tuple("0123456789"), *kinds)
