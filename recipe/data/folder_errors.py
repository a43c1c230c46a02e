"""What to say of a folder of images that is not as it should be, and what to do about it."""

import difflib
import errno
import os
import re
import shlex
from pathlib import Path

from recipe.errors import UserError

# What Pillow reads and what image sets are made of. Compared in lower case.
SUFFIXES = frozenset(
    b".jpg .jpeg .jpe .jfif .png .webp .bmp .gif .tif .tiff .ppm .pgm .pbm .pnm .jp2 .avif".split()
)
# ImageNet's names.
CLASS_NAME = re.compile(r"n\d{8}")
CLASS_ARCHIVE = re.compile(r"(n\d{8})\.tar")
TRAIN_IMAGE = re.compile(r"(n\d{8})_\d+\.JPEG")
VAL_IMAGE = re.compile(r"(ILSVRC2012_val_\d{8})\.jpe?g", re.IGNORECASE)
# Where Kaggle's archive and common set-ups have train/ and val/, below the folder that users name.
LIKELY_INNER_FOLDERS = (
    "ILSVRC/Data/CLS-LOC",
    "Data/CLS-LOC",
    "CLS-LOC",
    "ILSVRC2012",
    "imagenet",
    "images",
)
# What `make_shards` and `prepare_imagenet` keep beside their output until all of it is there.
UNFINISHED = ".unfinished"
SPLIT_NAMES = frozenset({"train", "val", "valid", "validation", "test"})


def first_few(names: list[str], count: int = 3) -> str:
    """The first `count` names, and how many more there are: what an error message has room for."""
    if not names:
        return "none"
    more = f" and {len(names) - count:,} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more


def refuse_other_layouts(root: Path, folders: list[str], files: list[str]) -> None:
    """UserError unless the `folders` in `root` can be class folders: it may be one of ImageNet's
    archives half unpacked, hold train/ and val/, or images only."""
    flat_val_images = sum(bool(VAL_IMAGE.fullmatch(name)) for name in files)
    if flat_val_images:
        raise UserError(
            f"{root}: {flat_val_images:,} images of ImageNet's validation set are in it without "
            f"class folders, as its archive has them. Sort them with: "
            f"python -m recipe.prepare_val {shlex.quote(str(root))} --labels LOC_val_solution.csv "
            "(Kaggle's file, or ILSVRC2012_devkit_t12.tar.gz)"
        )
    archives = [match[1] for name in files if (match := CLASS_ARCHIVE.fullmatch(name))]
    still_packed = sorted(set(archives) - set(folders))
    if still_packed:
        raise UserError(
            f"{root}: {len(still_packed):,} classes are still packed ({first_few(still_packed)}). "
            f"Unpack each into a folder of its own: cd {shlex.quote(str(root))} && "
            'for f in n*.tar; do d="${f%.tar}"; mkdir -p "$d" '
            '&& tar -xf "$f" -C "$d" && rm "$f"; done'
        )
    if "train" in folders and len(folders) > 1 and SPLIT_NAMES.issuperset(folders):
        raise UserError(
            f"{root}: holds {' and '.join(sorted(folders))}, not class folders. "
            f"Name it with --data {root}, or its parts with --train-dir and --val-dir."
        )
    if not folders:
        images = sum(suffix_of(os.fsencode(name)) in SUFFIXES for name in files)
        found = f"{images:,} images are directly in it" if images else "it holds no folders"
        raise UserError(
            f"{root}: no class folders ({found}). Each class needs a folder with its images: "
            f"{root / 'CLASS' / 'image.jpg'}"
        )


def missing_folder(root: Path) -> str:
    """The message for a `root` that is not a folder, with a guess at what was meant."""
    file = next((path for path in (root, *root.parents) if path.is_file()), None)
    if file is not None:
        wanted = "of class folders" if file == root else "that holds train/ and val/"
        return f"{file}: a file, not a folder {wanted}. If it is an archive, unpack it first."
    parent = root.parent
    if not parent.is_dir():
        nearest = next(folder for folder in root.parents if folder.is_dir())
        missing = root.relative_to(nearest).parts[0]
        close = _close_name(nearest, missing)
        hint = f"did you mean {nearest / close}?" if close else "is the disk mounted?"
        return f"{root}: no such folder; {nearest} has no {missing}: {hint}"
    if (parent / UNFINISHED).is_dir():
        return (
            f"{root}: not complete yet. Run the same python -m recipe.prepare_imagenet command "
            "again."
        )
    for inner in LIKELY_INNER_FOLDERS:
        if (parent / inner / root.name).is_dir():
            return f"{root}: no such folder; did you mean --data {parent / inner}?"
    archives = sorted(path.name for path in parent.glob("ILSVRC2012_img_*.tar"))
    if archives:
        return (
            f"{root}: no such folder, but {parent} holds {first_few(archives)}. Unpack first: "
            f"python -m recipe.prepare_imagenet {shlex.quote(str(parent))} OUT"
        )
    close = _close_name(parent, root.name)
    if close:
        option = {"train": " (--train-dir)", "val": " (--val-dir)"}.get(root.name, "")
        return f"{root}: no such folder; did you mean {parent / close}{option}?"
    if parent.name in SPLIT_NAMES and (parent.parent / root.name).is_dir():
        return f"{root}: no such folder; did you mean --data {parent.parent}?"
    if root.name in SPLIT_NAMES:
        return (
            f"{root}: no such folder; {parent} has no {root.name}/ inside. --data wants a folder "
            "that holds train/ and val/; name them one by one with --train-dir and --val-dir."
        )
    return f"{root}: no such folder. Check the spelling, and whether the disk is mounted."


def _close_name(folder: Path, name: str) -> str | None:
    """A folder in `folder` whose name is close to `name`, also in another case; so far off that
    `validation` is close to `val`."""
    try:
        names = {path.name.lower(): path.name for path in folder.iterdir() if path.is_dir()}
    except OSError:
        return None
    close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.45)
    return names[close[0]] if close else None


def empty_classes(root: Path, folders: list[Path]) -> str:
    """About the `folders` of classes that hold no images."""
    names = first_few([folder.name for folder in folders])
    suffixes = {path.suffix for path in folders[0].iterdir() if path.is_file()}
    found = (
        f"{folders[0].name} holds files, but with {first_few(sorted(suffixes))} at their ends, "
        "which is no image suffix known here"
        if suffixes
        else f"{folders[0].name} holds no files"
    )
    return (
        f"{root}: {len(folders):,} of its classes without images: {names} ({found}). "
        "Add their images, or remove the folders in both train and val."
    )


def unreadable(path: str, error: OSError) -> str:
    """About an image that was listed and cannot be read."""
    if isinstance(error, FileNotFoundError):
        return f"{path}: no such file any more. Was it removed since the folder was listed?"
    return f"{path}: cannot be read ({error.strerror}). Check its permissions and its disk."


def endless_link(folder: Path) -> str:
    """About the last link on the way to `folder`, which led to a folder above itself."""
    link = next(filter(Path.is_symlink, (folder, *folder.parents)), folder)
    return (
        f"{link}: a link to {os.path.realpath(link)}, a folder above itself, so that its images "
        "would never end. Remove the link."
    )


def check_link(path: str | bytes) -> None:
    """UserError if `path` is a broken link, or leads to itself."""
    if not os.path.islink(path):
        return
    name = os.fsdecode(path)
    target = os.readlink(name)
    try:
        os.stat(path)
    except FileNotFoundError as error:
        raise UserError(
            f"{name}: a link to {target}, which is not there. "
            "Is the disk that it points to mounted? If so, remove the link."
        ) from error
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise UserError(
            f"{name}: a link to {target}, which leads back to it. Remove the link."
        ) from error


def suffix_of(name: bytes) -> bytes:
    """What SUFFIXES may hold of a file's name."""
    return name[name.rfind(b".") :].lower()


def no_file(path: bytes) -> str:
    """About an image that cannot be opened; UserError if it is a link that leads nowhere."""
    check_link(path)
    return (
        f"{os.fsdecode(path)}: cannot be read as a file: it is a named pipe, a socket or a device. "
        "Remove it."
    )
