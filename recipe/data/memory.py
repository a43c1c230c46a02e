"""Images that are in memory: those of data sets so small that each rank reads them whole."""

import functools
import zlib
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from recipe.data.image_folder import Listing


@dataclass(frozen=True)
class ImagesInMemory(Listing):
    """A listing whose encoded images are in memory, one after the other in `contents` (uint8).
    Image i begins at `offsets[i]` (int64 [num_images + 1]). `root` is the file that held them."""

    contents: np.ndarray
    offsets: np.ndarray

    def read(self, index: int) -> bytes:
        """Return the encoded bytes of image `index`."""
        begin, end = self.offsets[index : index + 2]
        return self.contents[begin:end].tobytes()

    @functools.cached_property
    def checksums(self) -> np.ndarray:
        """The CRC-32 of each encoded image (uint32 [num_images]), as an index of shards has it."""
        contents = self.contents.data  # whose parts are no copies: 70,000 images take 0.06 s
        images = (contents[begin:end] for begin, end in pairwise(self.offsets.tolist()))
        return np.fromiter(map(zlib.crc32, images), np.uint32, len(self))
