"""From a file's bytes to the pixels of an image, strictly: what is damaged is an error, not grey.

Needs no torch, so that recipe/data/prepare.py begins at once.
"""

import io
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import simplejpeg
from PIL import Image, PngImagePlugin, TiffImagePlugin, UnidentifiedImageError

from recipe.data.image_folder import Listing
from recipe.errors import UserError

# Of so many images one may be suspect: also ImageNet has some with bytes left over.
ONE_IN = 10_000
MAX_NAMES = 100
# What the colours of the last rows may be mixed with, and a whole block of colours.
ROWS_BELOW = 2
# Of an image of any format: half a GiB as RGB. Asked of its head, before anything is decoded.
MAX_PIXELS = 2**29 // 3
# Of its sides: resized, so that the short one is as a network wants it, a longer strip would fill
# the memory.
MAX_RATIO = 1000
Image.MAX_IMAGE_PIXELS = None  # Pillow's own limit is for some formats only, and warns below it
# As much for a PNG's texts and its colour profile; Pillow refuses the image for more than 1 MiB.
PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY = 3 * MAX_PIXELS
# libjpeg-turbo's only warning that need not be about damage: the marker is that of the image's end.
LEFT_OVER = re.compile(r"(\d+) extraneous bytes before marker 0xd9")


def decode(content: bytes, name: str, rows: int = MAX_PIXELS) -> tuple[np.ndarray, int]:
    """Decode at least the upper `rows` rows of an image of any format that Pillow reads into RGB:
    uint8 [at least rows, width, 3]. And how many bytes are left over behind a JPEG's last row,
    where all were decoded: most damage leaves some, but so do some programs.

    Grey becomes equal channels, 12- and 16-bit grey keeps its upper 8 bits (16-bit colour does so
    in Pillow), transparency is dropped and the colour below it kept, of an animation the first
    frame is taken. CMYK JPEGs are read as Adobe writes them, inverted, which is what Pillow does
    even where the Adobe marker is missing. EXIF orientation is ignored but in TIFF, as in
    torchvision and hence in the published ImageNet results. A JPEG's colours are upsampled without
    a filter, as DALI does on GPUs by default.

    UserError, with `name` for the file, if it is no image, larger than MAX_PIXELS or longer than
    MAX_RATIO, truncated, grey
    in floating-point, 32-bit or signed numbers, or a JPEG with damaged data, which Pillow would
    silently fill with grey.
    """
    with named(name, content):
        size = _jpeg_size(content)
        return _decode_jpeg(content, *size, rows) if size else (_decode_by_pillow(content), 0)


def suspect(name: str, left_over: int, note: str = "") -> UserError:
    """The error about an image with so many bytes more than it needs."""
    return UserError(
        f"{name}: {left_over:,} bytes more than its pixels need, as most damage leaves a JPEG file"
        f"{note}. Replace the file by a good copy, save it again if it looks right, or remove it."
    )


def image_size(content: bytes, name: str) -> tuple[int, int]:
    """Height and width of an image in pixels, from its head; UserError as in `decode`."""
    with named(name, content):
        return _jpeg_size(content) or _open_by_pillow(content).size[::-1]


@contextmanager
def named(name: str, content: bytes) -> Iterator[None]:
    """Turn any exception of a decoder or a transform into a UserError about the file `name`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # Pillow's plugins raise whatever their parsing runs into
        # Pillow's own words on an unknown format speak of an object at an address; Python's
        # MemoryError has none.
        reason = (
            "of no known format"
            if isinstance(error, UnidentifiedImageError)
            else str(error) or type(error).__name__
        )
        # Its first bytes show a page of text, or a pointer of git-lfs.
        raise UserError(
            f"{name}: cannot be read as an image ({reason}). It has {len(content):,} bytes and "
            f"begins with {content[:24]!r}. Replace the file by a good copy, or remove it."
        ) from error


def _jpeg_size(content: bytes) -> tuple[int, int] | None:
    """Height and width of a JPEG that libjpeg-turbo decodes; None for what is left to Pillow."""
    if content[:2] != b"\xff\xd8":
        return None
    try:
        height, width, color_space, _ = simplejpeg.decode_jpeg_header(content)
    except ValueError:
        return None
    _check_size(height, width)
    return None if color_space in ("CMYK", "YCCK") else (height, width)


def _check_size(height: int, width: int) -> None:
    short, long = sorted((height, width))
    if short * long > MAX_PIXELS or long > MAX_RATIO * short:
        raise ValueError(
            f"{width:,} x {height:,} pixels; {MAX_PIXELS:,} and a strip of 1 : {MAX_RATIO:,} are "
            "the limits"
        )


def _decode_jpeg(content: bytes, height: int, width: int, rows: int) -> tuple[np.ndarray, int]:
    shorter, is_shortened = min(height, rows + ROWS_BELOW), False
    if shorter < height and (position := _height_position(content)) is not None:
        # Of a JPEG that claims to be less high libjpeg-turbo decodes less, since its rows come one
        # after the other, and then finds the rest to be too much.
        content = content[:position] + shorter.to_bytes(2, "big") + content[position + 2 :]
        height, is_shortened = shorter, True
    image = np.empty((height, width, 3), dtype=np.uint8)
    try:
        simplejpeg.decode_jpeg(content, "RGB", fastupsample=True, buffer=image)
    except ValueError as error:
        if is_shortened and "extraneous bytes" in str(error):
            return image, 0
        found = LEFT_OVER.search(str(error))
        if found is None:
            raise
        return image, int(found[1])
    return image, 0


def _height_position(content: bytes) -> int | None:
    """Where a JPEG's height (two bytes) is, if its rows come one after the other: not in several
    scans, as in a progressive one. None if not."""
    position, at, components = 2, None, 0
    while position + 4 <= len(content) and content[position] == 0xFF:
        marker = content[position + 1]
        length = int.from_bytes(content[position + 2 : position + 4], "big")
        if marker in (0xC0, 0xC1):  # start of a frame: baseline, extended
            at, components = position + 5, content[position + 9]
        elif marker == 0xDA:  # start of a scan
            return at if components == content[position + 4] else None
        position += 2 + length
    return None


def _decode_by_pillow(content: bytes) -> np.ndarray:
    image = _open_by_pillow(content)
    image.load()
    if image.mode.startswith("I"):  # 16-bit grey; Pillow's own conversion clips it at 255
        bits = getattr(image, "tag_v2", {}).get(TiffImagePlugin.BITSPERSAMPLE, (16,))[0]  # or 12
        image = Image.fromarray((np.asarray(image) >> bits - 8).astype(np.uint8))
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # the same colours, without Pillow's warning
    return np.array(image.convert("RGB"))  # a copy: Pillow's is read-only


def _open_by_pillow(content: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(content))
    _check_size(image.height, image.width)
    # In PGM and, by an older Pillow, PNG the levels of mode I go to 65,535.
    if image.mode == "F" or (image.mode == "I" and image.format not in ("PPM", "PNG")):
        raise ValueError("float, 32-bit or signed levels of no known range: convert it to 8 bits")
    return image


class SuspectImages:
    """The images of `listing` that had bytes left over when they were decoded for this rank."""

    def __init__(self, listing: Listing) -> None:
        self.listing, self.allowed = listing, len(listing) // ONE_IN
        self.found: set[int] = set()

    def add(self, index: int, left_over: int) -> None:
        """Note image `index`, with a warning if it is new; UserError if there are too many."""
        if index in self.found:
            return
        self.found.add(index)
        name = self.listing.name(index)
        if len(self.found) > self.allowed:
            note = f" ({self.allowed:,} such files in {len(self.listing):,} are let pass)"
            raise suspect(name, left_over, note if self.allowed else "")
        print(
            f"warning: {name}: {left_over:,} bytes more than its pixels need; it may be damaged",
            file=sys.stderr,
            flush=True,
        )

    @property
    def names(self) -> list[str]:
        """The first MAX_NAMES of them."""
        return [self.listing.name(index) for index in sorted(self.found)[:MAX_NAMES]]
