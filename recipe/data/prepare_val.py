"""Sort ImageNet's flat validation folder into class folders.

    python -m recipe.data.prepare_val VAL_DIR --labels LOC_val_solution.csv
    python -m recipe.data.prepare_val VAL_DIR --labels ILSVRC2012_devkit_t12.tar.gz

ImageNet's archive of validation images (and Kaggle's) has all 50,000 in one folder; which class
each shows is in a second file. Everything is checked before the first image is moved, nothing is
copied or deleted, and the same command finishes an interrupted run.
"""

import csv
import os
import sys
import tempfile
from functools import partial
from pathlib import Path

from torchvision.datasets.imagenet import ARCHIVE_META, load_meta_file, parse_devkit_archive
from tyro.conf import Positional

from recipe.command import RESUMES, run_tool
from recipe.data.image_folder import CLASS_NAME, VAL_IMAGE, first_few
from recipe.errors import UserError, refuse


def read_labels(file: Path) -> dict[str, str]:
    """The class (n01440764) of each image (its name without suffix), from Kaggle's table or
    ImageNet's development kit. UserError if `file` is neither."""
    if file.suffix in (".gz", ".tgz"):
        return {f"ILSVRC2012_val_{i:08}": name for i, name in enumerate(devkit_classes(file), 1)}
    try:
        with open(file, newline="", encoding="utf-8") as stream:
            # PredictionString is class and box, class and box, ...
            rows = [(row["ImageId"], row["PredictionString"]) for row in csv.DictReader(stream)]
        labels = {image: boxes.split()[0] for image, boxes in rows}
        for image, name in labels.items() or {("", "")}:
            if not VAL_IMAGE.fullmatch(f"{image}.JPEG") or not CLASS_NAME.fullmatch(name):
                raise ValueError(f"{image!r} with class {name!r} is none of ImageNet's images")
        return labels
    except (OSError, ValueError, csv.Error, KeyError, AttributeError, IndexError) as error:
        raise UserError(
            f"{file}: cannot be read as a table of labels ({error}). Give Kaggle's "
            "LOC_val_solution.csv, or ImageNet's ILSVRC2012_devkit_t12.tar.gz."
        ) from error


def devkit_classes(file: Path) -> list[str]:
    """The class of each validation image, in the order of their numbers, from the development kit.
    UserError unless it is the published file."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            parse_devkit_archive(folder, os.path.abspath(file))
        except RuntimeError as error:
            raise UserError(
                f"{file}: is not there, or its MD5 is not the published one, "
                f"{ARCHIVE_META['devkit'][1]}. Download it again."
            ) from error
        return list(load_meta_file(folder)[1])


def prepare(val_dir: Positional[Path], labels: Path) -> list[str]:
    """Sort a folder into class folders and return a line that says what was done.

    Args:
        val_dir: The folder with ILSVRC2012_val_*.JPEG.
        labels: LOC_val_solution.csv from Kaggle, or ILSVRC2012_devkit_t12.tar.gz.
    """
    class_of = read_labels(labels)
    paths = [*val_dir.glob("*"), *val_dir.glob("n*/*")]
    images = [(match[1], path) for path in paths if (match := VAL_IMAGE.fullmatch(path.name))]
    flat = {image: path for image, path in images if path.parent == val_dir}
    in_place = {image: path.parent.name for image, path in images if path.parent != val_dir}
    misplaced = {image for image, name in in_place.items() if class_of.get(image) != name}
    mistakes = (
        (flat.keys() - class_of.keys(), "without a label: {}. Is it the right label file?"),
        (in_place.keys() & flat.keys(), "both in it and in a class folder: {}. Delete one."),
        (misplaced, "in another class folder than the labels say: {}. Move them back into it."),
        (class_of.keys() - flat.keys() - in_place.keys(), "not in it: {}. Unpack again."),
    )
    for wrong, message in mistakes:
        names = f"{first_few(sorted(wrong))} ({len(wrong):,} in all)"
        refuse((wrong, f"{val_dir}: images {message.format(names)}"))
    try:
        for image, path in sorted(flat.items()):  # a rename each: none is half moved
            (val_dir / class_of[image]).mkdir(exist_ok=True)
            os.rename(path, val_dir / class_of[image] / path.name)
    except OSError as error:
        raise UserError(
            f"{error.filename}: cannot be moved ({error.strerror}). "
            "Fix that and run the same command again: it resumes where it stopped."
        ) from error
    return [f"{val_dir}: moved {len(flat):,} images, {len(in_place):,} were in place"]


main = partial(
    run_tool,
    "python -m recipe.data.prepare_val",
    prepare,
    __doc__,
    exit_code=1,
    interrupted=RESUMES,
)


if __name__ == "__main__":
    sys.exit(main())
