"""From an image file to a uint8 tensor: decoding, and augmentation that its key alone decides."""

import io
from collections.abc import Callable

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torchvision.transforms import InterpolationMode, v2

from recipe.errors import UserError

# The images stay Pillow images until the last step. Its resampling is integer arithmetic, equal on
# all CPUs, always antialiased, and what the published accuracies were reached with.
# (torchvision's own JPEG decoder is a third faster, but on its way out since torchvision 0.29.)
Transform = Callable[[Image.Image], Tensor]

INTERPOLATIONS = ("nearest", "bilinear", "bicubic")
AUTO_AUGMENTS = ("ra", "ta_wide", "autoaugment", "augmix")
# ImageNet's mean colour (0.485, 0.456, 0.406) in uint8: after normalisation within 0.01 of zero.
MEAN_COLOR = (124, 116, 104)


def decode(data: bytes, name: str) -> Image.Image:
    """Decode the bytes of an image file of any format that Pillow reads, whatever its suffix says,
    into RGB.

    Grey becomes equal channels, 16-bit grey keeps its upper 8 bits (16-bit colour does so in
    Pillow), transparency is dropped and the colour below it kept, of an animation the first frame
    is taken. CMYK JPEGs are read as Adobe writes them, inverted, which is what Pillow does even
    where the Adobe marker is missing. EXIF orientation is ignored, as in torchvision and hence in
    the published ImageNet results.

    UserError, which calls the image `name`, if it is truncated or no image.
    """
    try:
        return _to_rgb(Image.open(io.BytesIO(data)))
    except MemoryError:
        raise
    except Exception as error:  # Pillow's plugins raise whatever their parsing runs into
        unknown = isinstance(error, UnidentifiedImageError)  # whose text is about a BytesIO object
        reason = "no format that Pillow knows" if unknown else error
        raise UserError(
            f"{name}: cannot be read as an image ({reason}). "
            "Replace the file by a good copy, or remove it."
        ) from error


def _to_rgb(image: Image.Image) -> Image.Image:
    image.load()
    if image.mode == "RGB":
        return image
    if image.mode.startswith("I"):  # 16-bit grey; Pillow's own conversion clips it at 255
        levels = np.clip(np.asarray(image).astype(np.int64), 0, 65535) >> 8
        return Image.fromarray(levels.astype(np.uint8)).convert("RGB")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # the same colours, without Pillow's warning
    return image.convert("RGB")


def train_transform(
    size: int,
    *,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    interpolation: str = "bilinear",
    flip_probability: float = 0.5,
    auto_augment: str | None = None,
    ra_magnitude: int = 9,
    augmix_severity: int = 3,
    erase_probability: float = 0.0,
    erase_color: tuple[int, int, int] = MEAN_COLOR,
) -> Transform:
    """The training transform: an RGB image to uint8 [3, size, size]. Call it through `augment`.

    A random crop of `scale` times the area and `ratio` width by height, resized to `size` pixels;
    a horizontal flip; one of AUTO_AUGMENTS, if named (`ra_magnitude` serves `ra`,
    `augmix_severity` serves `augmix`); random erasing. The order is that of torchvision's reference
    training. It erases with 0 after normalisation; here the image is not normalised until it is on
    the device, so the rectangle is filled with `erase_color`, the mean colour, which becomes 0
    there but for rounding.

    UserError on an unknown name or a value out of range.
    """
    _check(size >= 1, f"train image size {size}: must be at least 1 pixel")
    _check(0 < scale[0] <= scale[1] <= 1, f"crop scale {scale}: wants 0 < from <= to <= 1")
    _check(0 < ratio[0] <= ratio[1], f"crop ratio {ratio}: wants 0 < from <= to")
    _check(0 <= flip_probability <= 1, f"flip probability {flip_probability}: wants 0 to 1")
    _check(0 <= erase_probability <= 1, f"erase probability {erase_probability}: wants 0 to 1")
    mode = _interpolation(interpolation)
    steps: list[torch.nn.Module] = [
        v2.RandomResizedCrop(size, scale=scale, ratio=ratio, interpolation=mode)
    ]
    if flip_probability > 0:
        steps.append(v2.RandomHorizontalFlip(flip_probability))
    if auto_augment == "ra":
        _check(0 <= ra_magnitude <= 30, f"RandAugment magnitude {ra_magnitude}: wants 0 to 30")
        steps.append(v2.RandAugment(magnitude=ra_magnitude, interpolation=mode))
    elif auto_augment == "ta_wide":
        steps.append(v2.TrivialAugmentWide(interpolation=mode))
    elif auto_augment == "autoaugment":
        steps.append(v2.AutoAugment(interpolation=mode))  # the policy learned on ImageNet
    elif auto_augment == "augmix":
        _check(1 <= augmix_severity <= 10, f"AugMix severity {augmix_severity}: wants 1 to 10")
        # AugMix mixes tensors, which torchvision cannot turn with bicubic interpolation.
        turn = (
            InterpolationMode.NEAREST if interpolation == "nearest" else InterpolationMode.BILINEAR
        )
        steps.append(v2.AugMix(severity=augmix_severity, interpolation=turn))
    elif auto_augment is not None:
        raise UserError(f"auto augment {auto_augment!r}: choose one of {', '.join(AUTO_AUGMENTS)}")
    steps.append(v2.PILToTensor())
    if erase_probability > 0:
        steps.append(v2.RandomErasing(erase_probability, value=erase_color))
    transform: Transform = v2.Compose(steps)
    return transform


def val_transform(resize: int, crop: int, *, interpolation: str = "bilinear") -> Transform:
    """The validation transform: an RGB image to uint8 [3, crop, crop], without any randomness.

    The short side is resized to `resize` pixels, then the central `crop` pixels are cut out.
    UserError if `crop` is larger than `resize`, or on an unknown interpolation.
    """
    _check(crop >= 1, f"validation crop {crop}: must be at least 1 pixel")
    _check(
        crop <= resize,
        f"validation crop {crop} is larger than the resized short side {resize}: "
        "the border would be black. Make the resize size larger or the crop smaller",
    )
    transform: Transform = v2.Compose(
        [
            v2.Resize(resize, interpolation=_interpolation(interpolation)),
            v2.CenterCrop(crop),
            v2.PILToTensor(),
        ]
    )
    return transform


def augment(image: Image.Image, transform: Transform, seed: int, epoch: int, index: int) -> Tensor:
    """Apply `transform` with randomness that (seed, epoch, index) alone decides; all at least 0.

    `index` is the sample's place in the data set. Thus a resumed run, another number of ranks or
    loader workers, and the other engine see the same pixels. The transforms of this module draw
    from torch's global CPU generator only; it is put back to where it was.
    """
    # Not torch.manual_seed or torch.random.fork_rng: these reach for the GPU's generators too, and
    # a seeded GPU generator would repeat its dropout masks with every image.
    generator = torch.default_generator
    state = generator.get_state()
    # torch's Mersenne twister takes 32 bits of a seed, so that two keys share theirs with a chance
    # of 2**-32: harmless, since nothing else about the two images is the same.
    generator.manual_seed(int(np.random.SeedSequence((seed, epoch, index)).generate_state(1)[0]))
    try:
        return transform(image)
    finally:
        generator.set_state(state)


def _interpolation(name: str) -> InterpolationMode:
    _check(name in INTERPOLATIONS, f"interpolation {name!r}: wants {', '.join(INTERPOLATIONS)}")
    return InterpolationMode(name)


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(f"{message}.")
