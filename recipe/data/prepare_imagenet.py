"""Unpack ImageNet's own archives into class folders, with torchvision's functions.

    python -m recipe.data.prepare_imagenet ARCHIVES OUT

ARCHIVES holds ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar and ILSVRC2012_devkit_t12.tar.gz,
as image-net.org gives them out; 161 GB are needed beside them. Afterwards `--data OUT` trains on
them. The MD5 of each is compared with the published one. OUT/val and OUT/train appear when they are
complete; after an interruption the same command keeps the one that is, and unpacks the other from
its start.
"""

import os
import shutil
import sys
from functools import partial
from pathlib import Path

from torchvision.datasets.imagenet import (
    ARCHIVE_META,
    parse_devkit_archive,
    parse_train_archive,
    parse_val_archive,
)
from tyro.conf import Positional

from recipe.command import RESUMES, run_tool
from recipe.data.image_folder import UNFINISHED, locked
from recipe.errors import UserError

# In this order: the first says what the images of the second show.
PARSERS = {"devkit": parse_devkit_archive, "val": parse_val_archive, "train": parse_train_archive}


def prepare(archives: Positional[Path], out: Positional[Path]) -> list[str]:
    """Write the images to `out`/val and `out`/train, as class folders; a line about each.

    What is there already is kept. UserError if an archive is missing, or not the one published; if
    `out` cannot be written.

    Args:
        archives: The folder with the three archives.
        out: Where train/ and val/ are written.
    """
    files = {part: (archives / ARCHIVE_META[part][0]).absolute() for part in PARSERS}
    if missing := [str(file) for file in files.values() if not file.is_file()]:
        raise UserError(
            f"{', '.join(missing)}: not there. Name the folder with image-net.org's archives. For "
            "Kaggle's files and for unpacked images see docs/data.md."
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
        with locked(out / ".lock"):
            shutil.rmtree(out / UNFINISHED, ignore_errors=True)
            (out / UNFINISHED).mkdir()
            for part, file in files.items():
                _unpack(part, file, out)
            shutil.rmtree(out / UNFINISHED)
    except OSError as error:
        raise UserError(
            f"{error.filename or out}: cannot be written ({error.strerror or error}). Fix that and "
            "run the same command again."
        ) from error
    return [f"{out / part}: complete" for part in ("val", "train")]


def _unpack(part: str, archive: Path, out: Path) -> None:
    """Unpack an archive beside `out`/`part`, and give it that name when it is complete."""
    if (out / part).exists():
        return
    print(f"checking and unpacking {archive}", file=sys.stderr, flush=True)
    try:
        PARSERS[part](out / UNFINISHED, str(archive))
    except RuntimeError as error:
        raise UserError(
            f"{archive}: its MD5 is not {ARCHIVE_META[part][1]}, the published one. It is "
            "damaged, or another file. Download it again."
        ) from error
    if part != "devkit":
        os.sync()  # the name must not reach the disk before the images
        (out / UNFINISHED / part).rename(out / part)


main = partial(
    run_tool,
    "python -m recipe.data.prepare_imagenet",
    prepare,
    __doc__,
    exit_code=1,
    interrupted=RESUMES,
)


if __name__ == "__main__":
    sys.exit(main())
