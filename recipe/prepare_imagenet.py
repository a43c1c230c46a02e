"""Unpack ImageNet's own archives into class folders, with torchvision's functions.

    python -m recipe.prepare_imagenet ARCHIVES OUT

ARCHIVES holds ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar and ILSVRC2012_devkit_t12.tar.gz,
as image-net.org gives them out. Afterwards `--data OUT` trains on them. The MD5 of each is compared
with the published one. OUT/val and OUT/train appear when they are complete; after an interruption
the same command keeps the one that is, and unpacks the other from its start.
"""

import os
import shutil
import sys
from pathlib import Path

import tyro
from torchvision.datasets.imagenet import ARCHIVE_META, parse_train_archive, parse_val_archive
from tyro.conf import Positional

from recipe.data.folder_errors import UNFINISHED
from recipe.data.image_folder import locked
from recipe.errors import UserError, run_command
from recipe.prepare_val import devkit_classes

# Russakovsky et al. 2015 (arXiv 1409.0575), table 2.
NUM_IMAGES = {"val": 50_000, "train": 1_281_167}
OVERHEAD = 1.04  # of files over an archive: a file system rounds each size up


def prepare(archives: Positional[Path], out: Positional[Path]) -> list[str]:
    """Write the images to `out`/val and `out`/train, as class folders; a line about each.

    What is there already is kept. UserError if an archive is missing, or not the one published; if
    `out` holds something else, has too little room, or cannot be written.

    Args:
        archives: The folder with the three archives.
        out: Where train/ and val/ are written.
    """
    files = {part: archives / name for part, (name, _) in ARCHIVE_META.items()}
    for file in files.values():
        try:
            file.open("rb").close()
        except OSError as error:
            raise UserError(
                f"{file}: cannot be read ({error.strerror}). Name the folder with {file.name} from "
                "image-net.org. For Kaggle's files and for unpacked images see docs/data.md."
            ) from error
    classes = devkit_classes(files["devkit"])
    try:
        out.mkdir(parents=True, exist_ok=True)
        with locked(out / ".lock"):
            shutil.rmtree(out / UNFINISHED, ignore_errors=True)
            left = [files[part] for part in NUM_IMAGES if not (out / part).exists()]
            needed = OVERHEAD * sum(file.stat().st_size for file in left)
            if needed > (free := shutil.disk_usage(out).free):
                raise UserError(
                    f"{out}: needs {needed / 1e9:,.1f} GB more, and its disk has "
                    f"{free / 1e9:,.1f} GB. Make room, or choose another folder."
                )
            lines = [_unpack(part, files[part], classes, out) for part in NUM_IMAGES]
            shutil.rmtree(out / UNFINISHED)
    except OSError as error:
        raise UserError(
            f"{error.filename or out}: cannot be written ({error.strerror or error}). Fix that and "
            "run the same command again."
        ) from error
    return lines


def _unpack(part: str, archive: Path, classes: list[str], out: Path) -> str:
    """Unpack an archive beside `out`/`part`, and give it that name when it is complete."""
    work, there = (out / UNFINISHED).absolute(), (out / part).exists()
    folder = out / part if there else work / part
    work.mkdir(exist_ok=True)
    if not there:
        print(f"checking and unpacking {archive}", file=sys.stderr, flush=True)
        try:
            if part == "train":
                parse_train_archive(archive.parent, folder=str(folder))
            else:
                parse_val_archive(archive.parent, wnids=classes, folder=str(folder))
        except RuntimeError as error:
            raise UserError(
                f"{archive}: its MD5 is not {ARCHIVE_META[part][1]}, the published one. It is "
                "damaged, or another file. Download it again."
            ) from error
    count = sum(1 for _ in folder.glob("n*/*.JPEG"))
    if count != NUM_IMAGES[part]:
        remedy = "Remove it, or choose another folder." if there else f"Is {archive} ImageNet's?"
        raise UserError(
            f"{folder}: holds {count:,} images instead of {NUM_IMAGES[part]:,}. {remedy}"
        )
    if not there:
        os.sync()  # the name must not reach the disk before the images
        folder.rename(out / part)
    note = " were there already" if there else ""
    return f"{out / part}: {count:,} images of {len(set(classes)):,} classes{note}"


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit code (`run_command`)."""
    name = "python -m recipe.prepare_imagenet"
    return run_command(lambda: tyro.cli(prepare, prog=name, description=__doc__, args=arguments))


if __name__ == "__main__":
    sys.exit(main())
