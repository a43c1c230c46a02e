"""Sort ImageNet's flat validation folder into class folders.

    python -m recipe.prepare_val VAL_DIR --labels LOC_val_solution.csv
    python -m recipe.prepare_val VAL_DIR --labels ILSVRC2012_devkit_t12.tar.gz

ImageNet's archive of validation images (and Kaggle's) has all 50,000 in one folder; which class
each shows is in a second file. Everything is checked before the first image is moved, nothing is
copied or deleted, and the same command finishes an interrupted run.
"""

import argparse
import csv
import io
import os
import sys
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from recipe.data.folder_errors import CLASS_NAME, VAL_IMAGE, first_few
from recipe.errors import UserError, run_command

META = "meta.mat"
GROUND_TRUTH = "ILSVRC2012_validation_ground_truth.txt"
LABELS_HELP = (
    "Kaggle's LOC_val_solution.csv, or ImageNet's ILSVRC2012_devkit_t12.tar.gz, packed or unpacked"
)


@dataclass(frozen=True)
class Plan:
    """What to do: `moves` maps file names to class folders; the rest counts and reports."""

    moves: dict[str, str]
    num_done: int  # images that are in their class folder already
    num_classes: int
    missing: list[str]  # labelled images that are in neither place, without suffix


def read_labels(file: Path) -> dict[str, str]:
    """The class (n01440764) of each image (its name without suffix), from `file`.

    `file` is Kaggle's table, or ImageNet's development kit, packed or unpacked. UserError if it is
    neither, or damaged.
    """
    try:
        if file.is_dir():
            return _labels_from_devkit(_find(file, META), _find(file, GROUND_TRUTH))
        if tarfile.is_tarfile(file):
            with tarfile.open(file) as archive:
                contents = {
                    Path(member.name).name: extracted.read()
                    for member in archive
                    if Path(member.name).name in (META, GROUND_TRUTH)
                    and (extracted := archive.extractfile(member))
                }
            if contents.keys() != {META, GROUND_TRUTH}:
                raise UserError(f"{file}: lacks {META} or {GROUND_TRUTH}. Give {LABELS_HELP}.")
            return _labels_from_devkit(contents[META], contents[GROUND_TRUTH])
        return _labels_from_table(file)
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{file}: cannot be read ({reason}). Give {LABELS_HELP}.") from error


def make_plan(val_dir: Path, labels: dict[str, str]) -> Plan:
    """Compare `val_dir` with `labels` and change nothing; UserError if something does not match."""
    if not val_dir.is_dir():
        raise UserError(f"{val_dir}: no such folder. It should hold ILSVRC2012_val_*.JPEG.")
    if not os.access(val_dir, os.W_OK | os.X_OK):
        raise UserError(
            f"{val_dir}: no permission to move files there. Run as the owner of the folder."
        )
    flat: dict[str, str] = {}  # image -> file name
    filed: dict[str, str] = {}  # image -> its folder
    with os.scandir(val_dir) as entries:
        for entry in entries:
            is_class = CLASS_NAME.fullmatch(entry.name)
            if entry.is_dir():
                names = os.listdir(entry.path) if is_class else []
                images = filter(None, map(VAL_IMAGE.fullmatch, names))
                filed |= {image[1]: entry.name for image in images}
            elif match := VAL_IMAGE.fullmatch(entry.name):
                flat[match[1]] = entry.name
            elif is_class:
                raise UserError(f"{entry.path}: a file where a class folder must be. Move it away.")
    if not flat and not filed:
        raise UserError(f"{val_dir}: holds no ILSVRC2012_val_*.JPEG. Name the folder that does.")
    _refuse(
        flat.keys() - labels.keys(), f"{val_dir}: without a label", "Is it the right label file?"
    )
    _refuse(
        filed.keys() & flat.keys(), f"{val_dir}: both in it and in a class folder", "Delete one."
    )
    misfiled = {image for image, folder in filed.items() if labels.get(image) != folder}
    _refuse(
        misfiled,
        f"{val_dir}: in another class folder than the labels say",
        "Is it the right label file? If so, move them back into the folder itself.",
    )
    return Plan(
        moves={flat[image]: labels[image] for image in sorted(flat)},
        num_done=len(filed),
        num_classes=len({labels[image] for image in [*flat, *filed]}),
        missing=sorted(labels.keys() - flat.keys() - filed.keys()),
    )


def move(val_dir: Path, plan: Plan) -> None:
    """Move each image of `plan` into its class folder: a rename each, so none is half moved."""
    for folder in sorted(set(plan.moves.values())):
        (val_dir / folder).mkdir(exist_ok=True)
    for name, folder in plan.moves.items():
        os.rename(val_dir / name, val_dir / folder / name)


def _labels_from_table(file: Path) -> dict[str, str]:
    """Kaggle's columns: ImageId, PredictionString = class and box, class and box ..."""
    labels = {}
    try:
        with open(file, newline="", encoding="utf-8") as stream:
            for row in csv.DictReader(stream):
                labels[row["ImageId"]] = row["PredictionString"].split()[0]
    except (UnicodeDecodeError, csv.Error, KeyError, AttributeError, IndexError) as error:
        raise UserError(
            f"{file}: not a table of labels ({error!r}). Give {LABELS_HELP}."
        ) from error
    return _checked(labels, str(file))


def _labels_from_devkit(meta: bytes, ground_truth: bytes) -> dict[str, str]:
    """`meta` gives the class of each ILSVRC2012_ID; line i of `ground_truth` the ID of image i."""
    import scipy.io

    try:
        synsets = scipy.io.loadmat(io.BytesIO(meta), squeeze_me=True)["synsets"]
        class_of_id = {int(synset["ILSVRC2012_ID"]): str(synset["WNID"]) for synset in synsets}
        ids = [int(line) for line in ground_truth.split()]
        labels = {f"ILSVRC2012_val_{i:08d}": class_of_id[id_] for i, id_ in enumerate(ids, start=1)}
    except Exception as error:  # scipy raises many kinds for a damaged file
        raise UserError(
            f"the development kit cannot be read ({error!r}). Download it again."
        ) from error
    return _checked(labels, "the development kit")


def _checked(labels: dict[str, str], source: str) -> dict[str, str]:
    for image, name in labels.items():
        if not VAL_IMAGE.fullmatch(f"{image}.JPEG") or not CLASS_NAME.fullmatch(name):
            raise UserError(
                f"{source}: {image!r} with class {name!r} is not one of ImageNet's validation "
                f"images. Give {LABELS_HELP}."
            )
    if not labels:
        raise UserError(f"{source}: holds no labels. Give {LABELS_HELP}.")
    return labels


def _find(folder: Path, name: str) -> bytes:
    found = sorted(folder.rglob(name))
    if not found:
        raise UserError(f"{folder}: has no {name}. Give {LABELS_HELP}.")
    return found[0].read_bytes()


def _refuse(images: set[str], what: str, remedy: str) -> None:
    if images:
        raise UserError(f"{what}: {first_few(sorted(images))} ({len(images):,} images). {remedy}")


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit code (`run_command`)."""
    parser = argparse.ArgumentParser(prog="python -m recipe.prepare_val", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("val_dir", type=Path, help="the folder with ILSVRC2012_val_*.JPEG")
    parser.add_argument("--labels", type=Path, required=True, metavar="FILE", help=LABELS_HELP)
    parser.add_argument("--dry-run", action="store_true", help="check all, move nothing")
    parser.add_argument(
        "--allow-missing", action="store_true", help="continue even if labelled images are missing"
    )
    options = parser.parse_args(arguments)
    return run_command(
        lambda: [prepare(options.val_dir, options.labels, options.dry_run, options.allow_missing)]
    )


def prepare(val_dir: Path, labels_file: Path, dry_run: bool, allow_missing: bool) -> str:
    """Sort `val_dir` into class folders and return one line that says what was done."""
    labels = read_labels(labels_file)
    plan = make_plan(val_dir, labels)
    if plan.missing and not allow_missing:
        raise UserError(
            f"{val_dir}: {len(plan.missing):,} of {len(labels):,} labelled images are missing "
            f"({first_few(plan.missing)}). Unpack the archive again, or give --allow-missing."
        )
    if not dry_run:
        try:
            move(val_dir, plan)
        except OSError as error:
            raise UserError(
                f"{error.filename}: cannot be moved ({error.strerror}). "
                "Fix that and run the same command again: it resumes where it stopped."
            ) from error
    return (
        f"{val_dir}: {'would move' if dry_run else 'moved'} {len(plan.moves):,} images, "
        f"{plan.num_done:,} were in place; {plan.num_classes:,} classes, "
        f"{len(plan.missing):,} images missing"
    )


if __name__ == "__main__":
    sys.exit(main())
