"""Read JPEG files into batches with one thread, like a loader process.

    python benchmarks/programs/decode.py pipeline runs/bench-jpegs

raw: libjpeg-turbo's bare decoding (read, simplejpeg.decode_jpeg with its defaults; the pixels are
not used). pipeline: the trainer's (read, decode, crop, resize, flip, copy into a uint8 batch).
first-epoch: the same as in the first epoch, where the trainer decodes each whole file to find
damage. For reference, torchvision-v2: v2 transforms on uint8 after torchvision's decode_jpeg; and
pillow: the classic pipeline of Pillow, ToTensor and Normalize, which ends in normalised fp32.
"""

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Literal

import numpy as np
import simplejpeg
import torch
import tyro
from PIL import Image
from torchvision import io, transforms
from torchvision.transforms import v2
from tyro.conf import Positional

from compare.for_scripts.comparison_side import Side
from recipe.data.image_folder import Listing, list_images
from recipe.data.images import TrainTransform
from recipe.data.loading import Images
from recipe.data.order import SampleStream
from recipe.device import keep_freed_memory
from recipe.settings.config import Config, home_path

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def main(
    kind: Literal["raw", "pipeline", "first-epoch", "torchvision-v2", "pillow"],
    /,
    data: Positional[Path],
    batch_size: int = 32,
    batches: int | None = None,
) -> None:
    """Decode `batches` batches of `batch_size` images (None: for ever), in the training's order."""
    side, config = Side(), Config()
    torch.set_num_threads(1)
    torch.manual_seed(config.seed)  # of torchvision's crops
    keep_freed_memory()
    listing = list_images(data / "train", Path(home_path("--cache-dir", config.cache_dir)))
    decode, stream = decoder(kind, listing, config), SampleStream(len(listing), config.seed)
    for number in count() if batches is None else range(batches):
        first = number * batch_size
        decode([index for _, index in stream.samples(np.arange(first, first + batch_size))])
        side.step(images=batch_size)


def decoder(kind: str, listing: Listing, config: Config) -> Callable[[list[int]], object]:
    """Return the function that makes a batch of the images with given indices."""
    images, size = Images(listing, config, TrainTransform(config)), config.train_crop_size
    by_v2 = v2.Compose([v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip()])
    by_pillow = transforms.Compose(
        [
            transforms.RandomResizedCrop(size),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )

    def raw(indices: list[int]) -> None:
        for index in indices:
            with open(listing.name(index), "rb", buffering=0) as file:
                simplejpeg.decode_jpeg(file.read())

    def torchvision_v2(indices: list[int]) -> object:
        files = (io.read_file(listing.name(index)) for index in indices)
        return torch.stack([by_v2(io.decode_jpeg(file, io.ImageReadMode.RGB)) for file in files])

    def pillow(indices: list[int]) -> object:
        pictures = (Image.open(listing.name(index)).convert("RGB") for index in indices)
        return torch.stack([by_pillow(picture) for picture in pictures])

    return {
        "raw": raw,
        "pipeline": lambda indices: images.__getitems__((size, [(1, index) for index in indices])),
        "first-epoch": lambda indices: images.__getitems__(
            (size, [(0, index) for index in indices])
        ),
        "torchvision-v2": torchvision_v2,
        "pillow": pillow,
    }[kind]


if __name__ == "__main__":
    tyro.cli(main, prog="benchmarks/programs/decode.py", description=__doc__)
