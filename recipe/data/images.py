"""From a file's bytes to a uint8 image in the batch: decoding, and augmentation drawn from its key.

Most of the time goes into decoding by libjpeg-turbo (decoding.py), which stops where the crop ends.
Only the crop is resized, by torch's vectorised integer arithmetic, directly into the batch.
(benchmarks/plans/input-pipeline.toml measures it.)
"""

import hashlib
import itertools
import math
import random
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from recipe.data.decoding import decode, image_size
from recipe.errors import UserError
from recipe.settings.config import Config

RATIO = (3 / 4, 4 / 3)  # of a random crop's width to its height, as torchvision's
CROP_ATTEMPTS = 10  # torchvision's number; after them, the largest central crop is used

# (seed, number of the pass, index of the image in its data set), all at least 0: see batches.py.
Key = tuple[int, int, int]


# -- Training images -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Draw:
    """The random choices for one training image: its crop, in pixels; whether it is flipped; and
    the seed of the later augmentations. With --random-crop-padding a crop may reach beyond the
    image: `top` and `left` may be negative."""

    top: int
    left: int
    height: int
    width: int
    flip: bool
    seed: int


class TrainTransform:
    """The training transform: a random crop of --random-crop-scale times the area, 3:4 to 4:3 wide,
    resized, or a random square of the image with --random-crop-padding; a horizontal flip;
    torchvision's --auto-augment or timm's; random erasing.

    The order is that of torchvision's reference training, which erases with 0 after normalisation.
    Here the image is normalised later, on the device, so the rectangle is filled with the mean
    colour, which normalisation turns into 0 except for rounding.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.after_crop = tuple(_steps_after_crop(config))  # torchvision's steps after the flip

    def size_in(self, epoch: int) -> int:
        """Return the side length of the images of steps that begin in `epoch`, pixels. While it
        grows, it is rounded to multiples of 32 (as in FFCV's ImageNet training)."""
        first, last = self.config.first_crop_size, self.config.train_crop_size
        begin, end = self.config.resize_epochs or (0, 0)
        if first is None or epoch >= end:
            return last
        if epoch <= begin:
            return first
        between = first + (last - first) * (epoch - begin) / (end - begin)
        return min(max(first, 32 * round(between / 32)), last)

    def _looks_for_damage(self, number: int) -> bool:
        """Return whether files are decoded completely in this pass, to find damage: always if bad
        images are to be replaced, else only when a file is used for the first time. With repeats an
        epoch has only some of the files, so the first time may be in any epoch: there the answer is
        yes in one pass of each epoch."""
        repeats = self.config.augment_repeats
        is_first = number == 0 or (repeats > 1 and number % repeats == 0)
        return is_first or self.config.bad_images == "replace"

    def draw(self, height: int, width: int, key: Key) -> Draw:
        """Draw the augmentation of an image of this size, in pixels, from its key alone.

        So a resumed run, another number of ranks or loader workers, and the other engine see the
        same pixels. The crop is drawn like torchvision's RandomResizedCrop, or its RandomCrop.
        """
        uniform = uniform_numbers(key)
        flip, across, down = next(uniform), next(uniform), next(uniform)
        after = next(uniform)
        is_flipped, seed = flip < self.config.hflip_prob, int(after * 2**32)
        padding, size = self.config.random_crop_padding, self.config.train_crop_size
        if padding is not None:
            rows, columns = (side + 2 * padding - size + 1 for side in (height, width))
            if min(rows, columns) < 1:
                raise UserError(
                    f"--train-crop-size {size}: there is an image of {width} x {height} pixels, "
                    f"which --random-crop-padding {padding} makes no larger than "
                    f"{width + 2 * padding} x {height + 2 * padding}; give a smaller size"
                )
            top, left = int(down * rows) - padding, int(across * columns) - padding
            return Draw(top, left, size, size, is_flipped, seed)
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
        top, left = int(down * (height - crop_height + 1)), int(across * (width - crop_width + 1))
        return Draw(top, left, crop_height, crop_width, is_flipped, seed)

    def __call__(self, content: bytes, name: str, key: Key, out: Tensor) -> int:
        """Decode an image file's `content`, augment it, and write it to `out` (uint8 [3, size,
        size], channels-last). Return how many bytes were left over; BadImage as in `decode`."""
        height, width = image_size(content, name)
        drawn = self.draw(height, width, key)
        rows = height if self._looks_for_damage(key[1]) else drawn.top + drawn.height
        image, left_over = decode(content, name, rows)
        bottom, right = drawn.top + drawn.height, drawn.left + drawn.width
        top, left = max(0, drawn.top), max(0, drawn.left)
        part = image[top:bottom, left:right]
        if self.config.random_crop_padding is None:
            resize(part, out, self.config.interpolation)
        else:
            place(part, out, top - drawn.top, left - drawn.left)
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
    from torchvision.transforms import InterpolationMode, v2  # takes the loader's server 2 seconds

    if name := config.auto_augment:
        kinds = {
            "ra": v2.RandAugment,
            "ta_wide": v2.TrivialAugmentWide,
            "autoaugment": v2.AutoAugment,  # the policy learned on ImageNet
            "augmix": v2.AugMix,
        }
        mode = InterpolationMode(config.interpolation)
        if name == "augmix" and mode == InterpolationMode.BICUBIC:
            mode = InterpolationMode.BILINEAR  # AugMix turns tensors; bicubic is for PIL images
        kind = kinds.get(name)
        augment = kind(interpolation=mode) if kind is not None else TimmRandAugment(name, config)
        yield from (v2.ToPILImage(), augment, v2.PILToTensor())
    if config.random_erase:
        yield v2.RandomErasing(config.random_erase, value=mean_color(config))


class TimmRandAugment:
    """timm's RandAugment, by its `notation` (rand-m7-mstd0.5-inc1). It draws from the global
    generators of Python and NumPy: each call seeds them from torch's generator, and restores their
    state afterwards."""

    def __init__(self, notation: str, config: Config) -> None:
        from timm.data.auto_augment import rand_augment_transform
        from timm.data.transforms import str_to_pil_interp

        settings = {  # those of timm's own transforms_imagenet_train
            "translate_const": int(config.train_crop_size * 0.45),
            "img_mean": tuple(mean_color(config)),
            "interpolation": str_to_pil_interp(config.interpolation),
        }
        self.augment = rand_augment_transform(notation, settings)

    def __call__(self, image: Image.Image) -> Image.Image:
        """Return the augmented image; its size stays the same."""
        seed = int(torch.randint(2**32, ()))
        pythons, numpys = random.getstate(), np.random.get_state()
        random.seed(seed)
        np.random.seed(seed)
        try:
            return self.augment(image)
        finally:
            random.setstate(pythons)
            np.random.set_state(numpys)


def uniform_numbers(key: Key) -> Iterator[float]:
    """Yield numbers in [0, 1) that depend only on the key, by hashing it. This is ten times as fast
    as seeding one of numpy's generators, and no version of a library changes them."""
    for block in itertools.count():
        digest = hashlib.blake2b(struct.pack("<4Q", *key, block)).digest()
        for word in struct.unpack("<8Q", digest):
            yield (word >> 11) * 2.0**-53


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's CPU generator, from which torchvision's transforms draw, and restore its state
    afterwards."""
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would seed the GPUs' generators too, and dropout masks would then repeat
        # with every image.
        torch.default_generator.manual_seed(seed)
        yield


# -- Validation images -----------------------------------------------------------------------------


class ValTransform:
    """The validation transform, without any randomness: the short side is resized to
    --val-resize-size, then the central --val-crop-size pixels are cut out."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, content: bytes, name: str, key: Key, out: Tensor) -> int:
        """As for TrainTransform, but the key has no effect."""
        image, left_over = decode(content, name)
        size, crop = self.config.val_resize_size, self.config.val_crop_size
        height, width = (size * side // min(image.shape[:2]) for side in image.shape[:2])
        resized = empty_batch(1, height, width)[0]
        resize(image, resized, self.config.interpolation)
        top, left = round((height - crop) / 2), round((width - crop) / 2)
        out.copy_(resized[:, top : top + crop, left : left + crop])
        return left_over


# -- Both ------------------------------------------------------------------------------------------


def empty_batch(count: int, height: int, width: int) -> Tensor:
    """Return memory for a batch: uint8 [count, 3, height, width], with the channels of a pixel next
    to each other (channels-last), as decoders write them."""
    return torch.empty(
        (count, 3, height, width), dtype=torch.uint8, memory_format=torch.channels_last
    )


def mean_color(config: Config) -> list[int]:
    """Return --image-mean in uint8; normalisation takes it to within 0.01 of 0."""
    return [round(255 * mean) for mean in config.image_mean]


def place(image: np.ndarray, out: Tensor, top: int, left: int) -> None:
    """Copy `image` (uint8 [H, W, 3]) into `out` (uint8 [3, height, width]), its upper left corner
    to (top, left); all around becomes black."""
    height, width = image.shape[:2]
    out.zero_()
    out[:, top : top + height, left : left + width] = torch.from_numpy(image).permute(2, 0, 1)


def resize(image: np.ndarray, out: Tensor, interpolation: str) -> None:
    """Resize `image` (uint8 [H, W, 3]) into `out` (uint8 [3, height, width]), antialiased as in
    Pillow, in integer arithmetic. Levels differ from Pillow's by at most 1."""
    pixels = torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1)[None]
    size = list(out.shape[1:])
    # torch.nn.functional.interpolate has no `out`; allocating a new result costs page faults, and
    # takes 1.5 times as long.
    if interpolation == "nearest":
        torch.ops.aten._upsample_nearest_exact2d.out(pixels, size, None, None, out=out[None])
    else:
        smooth = getattr(torch.ops.aten, f"_upsample_{interpolation}2d_aa")
        smooth.out(pixels, size, False, None, None, out=out[None])
