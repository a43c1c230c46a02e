"""From a file's bytes to a uint8 image in the batch: decoding, and augmentation drawn from its key.

Most of the time goes to decoding by libjpeg-turbo (decoding.py), which stops where the crop ends.
Only the crop is resized, by torch's vectorised integer arithmetic, straight into the batch.
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
from recipe.settings.config import Config

# ImageNet's mean colour (0.485, 0.456, 0.406) in uint8: after normalisation within 0.01 of zero.
MEAN_COLOR = (124, 116, 104)
RATIO = (3 / 4, 4 / 3)  # of a random crop's width to its height, as torchvision's
CROP_ATTEMPTS = 10  # torchvision's number, then the largest central crop

# (seed, which pass, index of the image in its data set), all at least 0: see batches.py.
Key = tuple[int, int, int]


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

    def _looks_for_damage(self, number: int) -> bool:
        """Whether all of each file is decoded in this pass: each time that bad images are to be
        replaced, and else when the file first comes. With repeats that may be in any epoch, each of
        which has some of the files only: there it is so in one pass of each epoch."""
        repeats = self.config.augment_repeats
        is_first = number == 0 or (repeats > 1 and number % repeats == 0)
        return is_first or self.config.bad_images == "replace"

    def draw(self, height: int, width: int, key: Key) -> Draw:
        """Draw the augmentation of an image of this size, in pixels, from its key alone.

        Thus a resumed run, another number of ranks or loader workers, and the other engine see the
        same pixels. The crop is torchvision's RandomResizedCrop.
        """
        uniform = uniform_numbers(key)
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
        rows = height if self._looks_for_damage(key[1]) else drawn.top + drawn.height
        image, left_over = decode(content, name, rows)
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


def uniform_numbers(key: Key) -> Iterator[float]:
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
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed: it reaches for the GPU's generators too, and a seeded one would
        # repeat its dropout masks with every image.
        torch.default_generator.manual_seed(seed)
        yield


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
        size, crop = self.config.val_resize_size, self.config.val_crop_size
        height, width = (size * side // min(image.shape[:2]) for side in image.shape[:2])
        resized = empty_batch(1, height, width)[0]
        resize(image, resized, self.config.interpolation)
        top, left = round((height - crop) / 2), round((width - crop) / 2)
        out.copy_(resized[:, top : top + crop, left : left + crop])
        return left_over


# -- Both ------------------------------------------------------------------------------------------


def empty_batch(count: int, height: int, width: int) -> Tensor:
    """Memory for a batch: uint8 [count, 3, height, width], the channels of a pixel side by side, as
    decoders write them."""
    return torch.empty(
        (count, 3, height, width), dtype=torch.uint8, memory_format=torch.channels_last
    )


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
