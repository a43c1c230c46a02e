"""Make a folder of JPEG files as large as ImageNet's, to measure the cost of reading and decoding.

    python tools/make_jpegs.py runs/jpegs --images 640
    python compare/run.py input

The pictures are smooth random colours plus noise: useless for training, but as expensive to read
and decode as photographs of 500 x 375 pixels. (ImageNet's 1.28 million training files take 138 GB,
108 KB each.)
"""

import os
import shutil
import sys
from pathlib import Path

import numpy as np
import tyro
from PIL import Image
from tyro.conf import Positional

WIDTH, HEIGHT = 500, 375
NOISE = 21.0  # standard deviation, of 255 levels; makes a file as large as a photograph
QUALITY = 90
VALIDATION_SHARE = 10  # one image in ten
COPIES = 40  # hard links per file, so that an epoch of the benchmarks is long
JPEGS = "runs/bench-jpegs/640x40"  # the folder that benchmarks/plans name


def main(folder: Positional[Path], images: int = 640, classes: int = 10) -> None:
    """Write the folder, or exit with a message.

    Args:
        folder: The folder to create; must not exist.
        images: Number of training images.
        classes: Number of classes, one sub-folder each.
    """
    if classes < 1 or images < classes:
        sys.exit(f"--images {images} --classes {classes}: give at least one image per class")
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        sys.exit(f"tools/make_jpegs.py: {folder}: {error.strerror}")
    sizes = []
    for part, count in (("train", images), ("val", max(classes, images // VALIDATION_SHARE))):
        for index in range(count):
            file = folder / part / f"{index % classes:03d}" / f"{index:06d}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            picture(seed=(len(part), index)).save(file, quality=QUALITY)
            sizes.append(file.stat().st_size)
    print(f"{len(sizes):,} JPEG files, {np.mean(sizes) / 1000:.0f} KB on average: {folder}")


def picture(seed: tuple[int, int]) -> Image.Image:
    """Return a picture of WIDTH x HEIGHT, the same for the same seed."""
    random = np.random.default_rng(seed)
    coarse = Image.fromarray(random.integers(0, 256, (6, 8, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC), dtype=np.float32)
    noisy = smooth + random.normal(0, NOISE, (HEIGHT, WIDTH, 1)).astype(np.float32)
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


def jpegs_folder(folder: Path) -> Path:
    """Return this folder, with COPIES links to each of 640 training images. Make it if it does not
    exist."""
    if not folder.exists():
        draft = folder.with_name(f".{folder.name}.draft")
        shutil.rmtree(draft, ignore_errors=True)
        main(draft)
        for file in sorted((draft / "train").glob("*/*.jpg")):
            for copy in range(1, COPIES):
                os.link(file, file.with_name(f"{file.stem}-{copy:02d}.jpg"))
        draft.rename(folder)
    return folder


if __name__ == "__main__":
    tyro.cli(main, prog="python tools/make_jpegs.py", description=__doc__)
