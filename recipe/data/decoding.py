"""Decode image files, strictly: damage is an error, and not filled with grey.

Needs no torch, so that recipe/data/prepare.py starts at once.
"""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import simplejpeg
from PIL import Image, PngImagePlugin, TiffImagePlugin, UnidentifiedImageError

from recipe.errors import BadImage

# One image in this many may be suspect: ImageNet, too, has some with bytes left over.
ONE_SUSPECT_IN = 10_000
# Rows decoded below the last one that is needed: upsampling may mix its colours with theirs, and
# colours come in whole blocks.
ROWS_BELOW = 2
# Limit for an image of any format: half a GiB as RGB. Checked by its header, before decoding.
MAX_PIXELS = 2**29 // 3
# Limit of the ratio of its sides: a longer strip would fill the memory when it is resized so that
# its short side has the size that the network needs.
MAX_RATIO = 1000
Image.MAX_IMAGE_PIXELS = None  # Pillow's own limit covers only some formats, and warns below it
# The same limit for a PNG's texts and colour profile; Pillow's default refuses more than 1 MiB.
PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY = 3 * MAX_PIXELS
# libjpeg-turbo's only warning that may have another cause than damage: 0xd9 marks the image's end.
LEFT_OVER = re.compile(r"(\d+) extraneous bytes before marker 0xd9")


def decode(content: bytes, name: str, rows: int = MAX_PIXELS) -> tuple[np.ndarray, int]:
    """Decode at least the upper `rows` rows of an image, in any format that Pillow reads, to RGB:
    uint8 [at least rows, width, 3]. Also return how many bytes are left over after a JPEG's last
    row, if all rows were decoded: most damage leaves some, but so do some programs.

    Grey images get equal channels; 12- and 16-bit grey keeps its upper 8 bits (as Pillow does for
    16-bit colour). Transparency is dropped, and the colour below it kept. Of an animation the first
    frame is used. CMYK JPEGs are read inverted, as Adobe writes them, and as Pillow reads them even
    without the Adobe marker. EXIF orientation is ignored except in TIFF, as in torchvision and so
    in the published ImageNet results. A JPEG's colours are upsampled without a filter, as DALI does
    on GPUs by default.

    BadImage, which names the file by `name`, for a file that is no image, has more than MAX_PIXELS
    or a ratio of sides above MAX_RATIO, is truncated, has floating-point, 32-bit or signed grey
    levels, or is a JPEG with damaged data, which Pillow would silently fill with grey.
    """
    with bad_images_named(name, content):
        size = _jpeg_size(content)
        return _decode_jpeg(content, *size, rows) if size else (_decode_by_pillow(content), 0)


def suspect(name: str, left_over: int, note: str = "") -> BadImage:
    """Return the error for an image that has `left_over` bytes more than its pixels need."""
    return BadImage(
        f"{name}: {left_over:,} bytes more than its pixels need, as most damage leaves a JPEG file"
        f"{note}. Replace the file by a good copy, save it again if it looks right, or remove it."
    )


def image_size(content: bytes, name: str) -> tuple[int, int]:
    """Return height and width of an image in pixels, from its header; BadImage as in `decode`."""
    with bad_images_named(name, content):
        return _jpeg_size(content) or _open_by_pillow(content).size[::-1]


@contextmanager
def bad_images_named(name: str, content: bytes) -> Iterator[None]:
    """Turn a decoder's exception about `content` into a BadImage about the file `name`. Others,
    such as a lack of memory, are no fault of the image."""
    try:
        yield
    except Exception as error:  # Pillow's plugins let any error of their parsers through
        if is_no_fault_of_the_image(error):
            raise
        # Pillow's message about an unknown format names an object by its address.
        reason = (
            "of no known format"
            if isinstance(error, UnidentifiedImageError)
            else str(error) or type(error).__name__
        )
        # The first bytes show if the file is a web page, or a pointer of git-lfs.
        raise BadImage(
            f"{name}: cannot be read as an image ({reason}). It has {len(content):,} bytes and "
            f"begins with {content[:24]!r}. Replace the file by a good copy, or remove it; "
            "python -m recipe.data.prepare check DIR finds all such files."
        ) from error


def is_no_fault_of_the_image(error: Exception) -> bool:
    """Return whether an exception in decoding has another cause than the image's bytes: memory ran
    out (which libjpeg-turbo says in words), the system refuses something, or a program is wrong."""
    return (
        isinstance(error, (MemoryError, NameError, ImportError))  # Pillow asserts things of files
        or (isinstance(error, OSError) and error.errno is not None)  # Pillow's own have no number
        or "nsufficient memory" in str(error)
    )


def _jpeg_size(content: bytes) -> tuple[int, int] | None:
    """Return height and width of a JPEG; None if Pillow must decode the file, not libjpeg-turbo."""
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
            f"{width:,} x {height:,} pixels; the limits are {MAX_PIXELS:,} pixels and a ratio of "
            f"sides of 1 : {MAX_RATIO:,}"
        )


def _decode_jpeg(content: bytes, height: int, width: int, rows: int) -> tuple[np.ndarray, int]:
    shorter, is_shortened = min(height, rows + ROWS_BELOW), False
    if shorter < height and (position := _height_position(content)) is not None:
        # Write a smaller height into the header: libjpeg-turbo then decodes only these rows, which
        # come first in the file, and warns of extraneous bytes after them.
        content = content[:position] + shorter.to_bytes(2, "big") + content[position + 2 :]
        height, is_shortened = shorter, True
    image = np.empty((height, width, 3), dtype=np.uint8)
    try:
        simplejpeg.decode_jpeg(content, "RGB", fastupsample=True, buffer=image)
    except ValueError as error:
        if is_shortened and "extraneous bytes" in str(error):
            return image, 0
        warning = LEFT_OVER.search(str(error))
        if warning is None:
            raise
        return image, int(warning[1])
    return image, 0


def _height_position(content: bytes) -> int | None:
    """Return the position of a JPEG's height (two bytes); None unless all its rows come one after
    the other in a single scan. (Progressive JPEGs have several.)"""
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
    # In mode I, levels go to 65,535 for PGM and, with older versions of Pillow, for PNG.
    if image.mode == "F" or (image.mode == "I" and image.format not in ("PPM", "PNG")):
        raise ValueError("float, 32-bit or signed levels of unknown range: convert it to 8 bits")
    return image
