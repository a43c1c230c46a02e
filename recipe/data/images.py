"""From a file's bytes to a uint8 image in the batch: decoding, and augmentation drawn from its key.

Most of the time goes to decoding by libjpeg-turbo, which stops where the crop ends. Only the crop
is resized, by torch's vectorised integer arithmetic, straight into the batch.
(benchmarks/input_pipeline.py measures it.)
"""

import hashlib
import io
import itertools
import math
import random
import re
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import simplejpeg
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from recipe.config import Config
from recipe.data.image_folder import Listing
from recipe.errors import UserError

# ImageNet's mean colour (0.485, 0.456, 0.406) in uint8: after normalisation within 0.01 of zero.
MEAN_COLOR = (124, 116, 104)
# Of so many images one may be suspect: also ImageNet has some with bytes left over.
ONE_IN = 10_000
MAX_NAMES = 100
# What the colours of the last rows may be mixed with, and a whole block of colours.
ROWS_BELOW = 2
# Of an image of any format: half a GiB as RGB. Asked of its head, before anything is decoded.
MAX_PIXELS = 2**29 // 3
Image.MAX_IMAGE_PIXELS = None  # Pillow's own limit is for some formats only, and warns below it
# libjpeg-turbo's only warning that need not be about damage: the marker is that of the image's end.
LEFT_OVER = re.compile(r"(\d+) extraneous bytes before marker 0xd9")
RATIO = (3 / 4, 4 / 3)  # of a random crop's width to its height, as torchvision's
CROP_ATTEMPTS = 10  # torchvision's number, then the largest central crop

# (seed, which pass, index of the image in its data set), all at least 0: see recipe/data/order.py.
Key = tuple[int, int, int]


# -- Decoding --------------------------------------------------------------------------------------


def decode(content: bytes, name: str, rows: int = MAX_PIXELS) -> tuple[np.ndarray, int]:
    """Decode at least the upper `rows` rows of an image of any format that Pillow reads into RGB:
    uint8 [at least rows, width, 3]. And how many bytes are left over behind a JPEG's last row,
    where all were decoded: most damage leaves some, but so do some programs.

    Grey becomes equal channels, 16-bit grey keeps its upper 8 bits (16-bit colour does so in
    Pillow), transparency is dropped and the colour below it kept, of an animation the first frame
    is taken. CMYK JPEGs are read as Adobe writes them, inverted, which is what Pillow does even
    where the Adobe marker is missing. EXIF orientation is ignored, as in torchvision and hence in
    the published ImageNet results. A JPEG's colours are upsampled without a filter, as DALI does on
    GPUs by default.

    UserError, with `name` for the file, if it is no image, larger than MAX_PIXELS, truncated, or a
    JPEG with damaged data, which Pillow would silently fill with grey.
    """
    with _named(name, content):
        if size := _jpeg_size(content):
            return _decode_jpeg(content, *size, rows)
        return _decode_by_pillow(content), 0


def suspect(name: str, left_over: int, note: str = "") -> UserError:
    """The error about an image with so many bytes more than it needs."""
    return UserError(
        f"{name}: {left_over:,} bytes more than its pixels need, as most damage leaves a JPEG file"
        f"{note}. Replace the file by a good copy, save it again if it looks right, or remove it."
    )


def image_size(content: bytes, name: str) -> tuple[int, int]:
    """Height and width of an image in pixels, from its head; UserError as in `decode`."""
    with _named(name, content):
        return _jpeg_size(content) or _open_by_pillow(content).size[::-1]


@contextmanager
def _named(name: str, content: bytes) -> Iterator[None]:
    """Turn any exception of a decoder into a UserError about the file `name`."""
    try:
        yield
    except (MemoryError, UserError):
        raise
    except Exception as error:  # Pillow's plugins raise whatever their parsing runs into
        # Pillow's own words on an unknown format speak of an object at an address.
        reason = "of no known format" if isinstance(error, UnidentifiedImageError) else error
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
    if height * width > MAX_PIXELS:
        raise ValueError(f"{width:,} x {height:,} pixels, and {MAX_PIXELS:,} are the limit")


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
        levels = np.clip(np.asarray(image).astype(np.int64), 0, 65535) >> 8
        image = Image.fromarray(levels.astype(np.uint8))
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # the same colours, without Pillow's warning
    return np.array(image.convert("RGB"))  # a copy: Pillow's is read-only


def _open_by_pillow(content: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(content))
    _check_size(image.height, image.width)
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


# -- Training images -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Draw:
    """What chance decides about one training image: its crop, in pixels; whether it is flipped; and
    the seed of what comes after."""

    top: int
    left: int
    height: int
    width: int
    flip: bool
    seed: int


class TrainTransform:
    """The training transform: a random crop of --random-crop-scale times the area, 3:4 to 4:3 wide,
    resized; a horizontal flip; torchvision's --auto-augment or timm's; random erasing.

    The order is that of torchvision's reference training. It erases with 0 after normalisation;
    here the image is not normalised until it is on the device, so the rectangle is filled with the
    mean colour, which becomes 0 there but for rounding.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.after_crop = tuple(_steps_after_crop(config))  # what torchvision does after the flip

    def size_in(self, number: int) -> int:
        """Side of the images in this pass, pixels; while it grows, the nearest multiple of 32 (as
        in FFCV's ImageNet training)."""
        epoch = number // self.config.augment_repeats
        first, last = self.config.first_crop_size, self.config.train_crop_size
        begin, end = self.config.resize_epochs or (0, 0)
        if first is None or epoch >= end:
            return last
        if epoch <= begin:
            return first
        between = first + (last - first) * (epoch - begin) / (end - begin)
        return min(max(first, 32 * round(between / 32)), last)

    def draw(self, height: int, width: int, key: Key) -> Draw:
        """Draw the augmentation of an image of this size, in pixels, from its key alone.

        Thus a resumed run, another number of ranks or loader workers, and the other engine see the
        same pixels. The crop is torchvision's RandomResizedCrop.
        """
        uniform = _uniform_numbers(key)
        flip, across, down = next(uniform), next(uniform), next(uniform)
        after = next(uniform)
        smallest, largest = self.config.random_crop_scale
        narrow, wide = map(math.log, RATIO)
        for _ in range(CROP_ATTEMPTS):
            area = height * width * (smallest + next(uniform) * (largest - smallest))
            ratio = math.exp(narrow + next(uniform) * (wide - narrow))
            crop_width, crop_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < crop_width <= width and 0 < crop_height <= height:
                break
        else:
            crop_height = min(height, max(1, round(width / RATIO[0])))
            crop_width = min(width, max(1, round(height * RATIO[1])))
            across = down = 0.5
        return Draw(
            top=int(down * (height - crop_height + 1)),
            left=int(across * (width - crop_width + 1)),
            height=crop_height,
            width=crop_width,
            flip=flip < self.config.hflip_prob,
            seed=int(after * 2**32),
        )

    def __call__(self, content: bytes, name: str, key: Key, out: Tensor) -> int:
        """Decode an image file's `content` and write what becomes of it into `out` (uint8 [3, size,
        size], in channels-last order). Returns how many bytes were left over; UserError for what
        else is wrong, as in `decode`."""
        height, width = image_size(content, name)
        drawn = self.draw(height, width, key)
        # In the first pass all of each file is decoded, and so looked at for damage.
        image, left_over = decode(content, name, drawn.top + drawn.height if key[1] else height)
        bottom, right = drawn.top + drawn.height, drawn.left + drawn.width
        resize(image[drawn.top : bottom, drawn.left : right], out, self.config.interpolation)
        if drawn.flip:
            out.copy_(out.flip(-1))
        if self.after_crop:
            with seeded(drawn.seed):
                changed = out
                for step in self.after_crop:
                    changed = step(changed)
            out.copy_(changed)
        return left_over


def _steps_after_crop(config: Config) -> Iterator[Callable]:
    if config.auto_augment is None and not config.random_erase:
        return
    from torchvision.transforms import InterpolationMode, v2  # two seconds of each loader's server

    if name := config.auto_augment:
        kinds = {
            "ra": v2.RandAugment,
            "ta_wide": v2.TrivialAugmentWide,
            "autoaugment": v2.AutoAugment,  # the policy learned on ImageNet
            "augmix": v2.AugMix,
        }
        mode = InterpolationMode(config.interpolation)
        if name == "augmix" and mode == InterpolationMode.BICUBIC:
            mode = InterpolationMode.BILINEAR  # it turns tensors, which have no bicubic
        kind = kinds.get(name)
        augment = kind(interpolation=mode) if kind is not None else TimmRandAugment(name, config)
        yield from (v2.ToPILImage(), augment, v2.PILToTensor())
    if config.random_erase:
        yield v2.RandomErasing(config.random_erase, value=list(MEAN_COLOR))


class TimmRandAugment:
    """timm's RandAugment, as `notation` (rand-m7-mstd0.5-inc1) says. It draws from the global
    generators of Python and NumPy: these get a seed from torch's, and are put back to where they
    were."""

    def __init__(self, notation: str, config: Config) -> None:
        from timm.data.auto_augment import rand_augment_transform
        from timm.data.transforms import str_to_pil_interp

        settings = {  # those of timm's own transforms_imagenet_train
            "translate_const": int(config.train_crop_size * 0.45),
            "img_mean": MEAN_COLOR,
            "interpolation": str_to_pil_interp(config.interpolation),
        }
        self.augment = rand_augment_transform(notation, settings)

    def __call__(self, image: Image.Image) -> Image.Image:
        """Another image of the same size."""
        seed = int(torch.randint(2**32, ()))
        pythons, numpys = random.getstate(), np.random.get_state()
        random.seed(seed)
        np.random.seed(seed)
        try:
            return self.augment(image)
        finally:
            random.setstate(pythons)
            np.random.set_state(numpys)


def _uniform_numbers(key: Key) -> Iterator[float]:
    """Numbers in [0, 1) that the key alone decides, from its digests: ten times as fast as to seed
    one of numpy's generators, and the same for ever."""
    for block in itertools.count():
        digest = hashlib.blake2b(struct.pack("<4Q", *key, block)).digest()
        for word in struct.unpack("<8Q", digest):
            yield (word >> 11) * 2.0**-53


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's CPU generator, from which torchvision's transforms draw, and put it back to
    where it was."""
    # Not torch.manual_seed or torch.random.fork_rng: these reach for the GPU's generators too, and
    # a seeded GPU generator would repeat its dropout masks with every image.
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(state)


# -- Validation images -----------------------------------------------------------------------------


class ValTransform:
    """The validation transform, without any randomness: the short side is resized to
    --val-resize-size, then the central --val-crop-size pixels are cut out."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def size_in(self, number: int) -> int:
        """Side of the images, pixels."""
        return self.config.val_crop_size

    def __call__(self, content: bytes, name: str, key: Key, out: Tensor) -> int:
        """As that of TrainTransform, whatever the key."""
        image, left_over = decode(content, name)
        short, crop = min(image.shape[:2]), self.config.val_crop_size
        height, width = (self.config.val_resize_size * side // short for side in image.shape[:2])
        resized = empty_batch(1, height, width)[0]
        resize(image, resized, self.config.interpolation)
        top, left = round((height - crop) / 2), round((width - crop) / 2)
        out.copy_(resized[:, top : top + crop, left : left + crop])
        return left_over


# -- Both ------------------------------------------------------------------------------------------


def empty_batch(count: int, height: int, width: int) -> Tensor:
    """Memory for a batch: uint8 [count, 3, height, width], the channels of a pixel side by side, as
    decoders write them."""
    shape = (count, 3, height, width)
    return torch.empty(shape, dtype=torch.uint8, memory_format=torch.channels_last)


def resize(image: np.ndarray, out: Tensor, interpolation: str) -> None:
    """Resize `image` (uint8 [H, W, 3]) into `out` (uint8 [3, height, width]), antialiased as Pillow
    does it, in integer arithmetic; levels differ from Pillow's by 1 at most."""
    pixels = torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1)[None]
    size = list(out.shape[1:])
    # torch.nn.functional.interpolate has no `out`: a new result costs page faults, half as much
    # time again.
    if interpolation == "nearest":
        torch.ops.aten._upsample_nearest_exact2d.out(pixels, size, None, None, out=out[None])
    else:
        smooth = getattr(torch.ops.aten, f"_upsample_{interpolation}2d_aa")
        smooth.out(pixels, size, False, None, None, out=out[None])
