"""Make a folder of JPEG files as large as ImageNet's, to measure what reading and decoding cost.

    python tools/make_jpegs.py runs/jpegs --images 640
    python compare/run.py input

The pictures are smooth random colours with some noise on top: useless for training, but as
expensive to read and decode as photographs of 500 x 375 pixels. (ImageNet's 1.28 million files for
training take 138 GB: 108 KB each.)
"""

import argparse
import sys
from pathlib import Path

import numpy as np
from PIL import Image

WIDTH, HEIGHT = 500, 375
NOISE = 21.0  # standard deviation, of 255 levels: makes the file as large as a photograph's
QUALITY = 90
VALIDATION_SHARE = 10  # one image in ten


def main(argv: list[str] | None = None) -> int:
    """Write the folder that the command line names and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python tools/make_jpegs.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("folder", type=Path, help="will be created; must not exist")
    add("--images", type=int, default=640, metavar="N", help="for training (default: 640)")
    add("--classes", type=int, default=10, metavar="N", help="sub-folders (default: 10)")
    options = parser.parse_args(argv)
    if options.classes < 1 or options.images < options.classes:
        parser.error(f"--images {options.images} --classes {options.classes}: at least one a class")
    try:
        options.folder.mkdir(parents=True)
    except OSError as error:
        print(f"tools/make_jpegs.py: {options.folder}: {error.strerror}", file=sys.stderr)
        return 1
    total_bytes = 0
    parts = {
        "train": options.images,
        "val": max(options.classes, options.images // VALIDATION_SHARE),
    }
    for part, images in parts.items():
        for index in range(images):
            file = options.folder / part / f"{index % options.classes:03d}" / f"{index:06d}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            picture(seed=(len(part), index)).save(file, quality=QUALITY)
            total_bytes += file.stat().st_size
    images = sum(parts.values())
    print(
        f"{images:,} JPEG files, {total_bytes / images / 1000:.0f} KB on average: {options.folder}"
    )
    return 0


def picture(seed: tuple[int, int]) -> Image.Image:
    """Return a picture of WIDTH x HEIGHT: the same for the same seed."""
    random = np.random.default_rng(seed)
    coarse = Image.fromarray(random.integers(0, 256, (6, 8, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC), dtype=np.float32)
    noisy = smooth + random.normal(0, NOISE, (HEIGHT, WIDTH, 1)).astype(np.float32)
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


if __name__ == "__main__":
    sys.exit(main())
