"""Read images in IDX format, in which MNIST, Fashion-MNIST, KMNIST and EMNIST are published.

A file holds one array: two bytes of 0, its type (8: uint8), its number of dimensions, the length of
each as big-endian uint32, and the elements in row-major order (Y. LeCun, C. Cortes, C. Burges, "The
MNIST database", section "File formats"). It may be packed by gzip. A data set is four such files:
images and labels, each for training and for validation.

The images become listings as of a folder of class folders, so that training on one of them, on
class folders and on shards made from it (`python -m recipe.data.prepare idx`) is the same.
"""

import gzip
import hashlib
import math
import re
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from recipe.data.image_folder import UNREADABLE, first_few
from recipe.data.memory import ImagesInMemory
from recipe.errors import UserError, system_errors

GZIP, UINT8 = b"\x1f\x8b", 8
# MNIST's names of files, and those with a prefix: emnist-letters-test-images-idx3-ubyte.gz. Some
# programs unpack them to names with a dot: train-images.idx3-ubyte.
# Names that begin with a dot are a system's notes on such files.
FILE_NAME = re.compile(r"(?!\.)(.*?)(train|t10k|test)-(images|labels)[-.]idx[13]-ubyte(\.gz)?")
PARTS = {"train": "train", "t10k": "val", "test": "val"}

# Where Debian's package dataset-fashion-mnist puts its files.
FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
# The README of Fashion-MNIST; blanks and strokes became hyphens.
FASHION_NAMES = (
    "T-shirt-top", "Trouser", "Pullover", "Dress", "Coat",
    "Sandal", "Shirt", "Sneaker", "Bag", "Ankle-boot",
)  # fmt: skip
# Of the array of its 60,000 training labels, by which it is recognised.
FASHION_LABELS_SHA256 = "657fbd221bfc9f4198cc14b5619cc33ec57c58dd0e47af4d99d6650759e869a7"


@dataclass(frozen=True)
class IdxFiles:
    """The files of a data set, by part (train, val) and kind (images, labels)."""

    folder: Path
    prefix: str  # what the files' names begin with: "" or, for example, "emnist-letters-"
    files: dict[tuple[str, str], Path]

    @property
    def is_transposed(self) -> bool:
        """Whether images are stored column by column: all of EMNIST are (pytorch/vision, issue
        8783, quotes its README)."""
        return self.prefix.startswith("emnist-")


def find_idx(folder: Path, prefix: str | None = None) -> IdxFiles:
    """Find a data set's four files in `folder`; `prefix` chooses one of several data sets.

    UserError if there is no data set, if there are several, or if one of the files is missing.
    """
    found: dict[str, dict[tuple[str, str], Path]] = {}
    with system_errors(folder, *UNREADABLE):
        # A packed file comes before an unpacked one, whose name is shorter, and which is used.
        for path in sorted(folder.iterdir(), key=lambda path: path.name, reverse=True):
            # Kaggle's copy of MNIST also has a folder beside each file, with the same name.
            if (match := FILE_NAME.fullmatch(path.name)) and path.is_file():
                start, part, kind, _ = match.groups()
                found.setdefault(start, {})[PARTS[part], kind] = path
    names = first_few([f"--prefix '{name}'" for name in sorted(found)], 10)
    if prefix is None and len(found) > 1:
        raise UserError(f"{folder}: holds {len(found)} data sets; choose one with {names}")
    chosen = next(iter(found), "") if prefix is None else prefix
    if chosen not in found:
        known = f"; there is {names}" if found else ""
        raise UserError(
            f"{folder}: holds no files in IDX format named {chosen}train-images-idx3-ubyte.gz and "
            f"the like{known}. Name the folder with the files as they were downloaded, packed or "
            "unpacked."
        )
    files = found[chosen]
    for part, kind in ((part, kind) for part in ("train", "val") for kind in ("images", "labels")):
        if (part, kind) not in files:
            raise UserError(
                f"{folder}: the {kind} of {chosen}{part} are missing: it has only "
                f"{first_few(sorted(path.name for path in files.values()))}. Copy all four files."
            )
    return IdxFiles(folder, chosen, files)


def read_idx(file: Path, num_dimensions: int) -> np.ndarray:
    """Return the array of uint8 in an IDX file, which may be packed by gzip; UserError if it is
    damaged, or no such array."""
    with system_errors(file, *UNREADABLE):
        content = file.read_bytes()
    if content.startswith(GZIP):
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(f"{file}: cannot be unpacked ({error}). Copy it again.") from error
    expected = bytes((0, 0, UINT8, num_dimensions))
    start = len(expected) + 4 * num_dimensions
    if not content.startswith(expected) or len(content) < start:
        raise UserError(
            f"{file}: begins with {content[:4].hex(' ') or 'nothing'}, not with "
            f"{expected.hex(' ')}, as an IDX file of {num_dimensions}-dimensional uint8 does. Is "
            "it another file, or another format?"
        )
    shape = struct.unpack(f">{num_dimensions}I", content[len(expected) : start])
    size, elements = len(content) - start, math.prod(shape)
    if size != elements or not elements:
        raise UserError(
            f"{file}: has {size:,} bytes after its header, which says "
            f"{' x '.join(map(str, shape))} = {elements:,}. Copy it again."
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def open_idx(files: IdxFiles) -> tuple[ImagesInMemory, ImagesInMemory]:
    """Return the training and the validation images of a data set in IDX format.

    A class is named by its label, and by its name if that is known: "0-T-shirt-top", so that the
    order of names is that of the labels. UserError if a file is damaged, if files do not fit
    together, or if they have labels that cannot be right.
    """
    images = {part: read_idx(files.files[part, "images"], 3) for part in ("train", "val")}
    labels = {part: read_idx(files.files[part, "labels"], 1) for part in ("train", "val")}
    for part in ("train", "val"):
        if len(images[part]) != len(labels[part]):
            raise UserError(
                f"{files.files[part, 'images']}: has {len(images[part]):,} images, and "
                f"{files.files[part, 'labels'].name} has {len(labels[part]):,} labels. Are they of "
                "the same data set?"
            )
    classes = _classes(files, labels)
    train, val = (
        _listing(files.files[part, "images"], images[part], labels[part], classes, files)
        for part in ("train", "val")
    )
    return train, val


def _classes(files: IdxFiles, labels: dict[str, np.ndarray]) -> dict[int, str]:
    """Return the classes' names by their labels, in ascending order; UserError for labels that
    cannot be right. Labels begin at 0, or at 1 as EMNIST's letters do."""
    known = np.unique(labels["train"])
    first, last = int(known[0]), int(known[-1])
    if first > 1 or len(known) != last - first + 1:
        raise UserError(
            f"{files.files['train', 'labels']}: has {len(known)} different labels from {first} to "
            f"{last}; they must be 0, 1, 2 and so on, or 1, 2, 3 and so on, each with images. Is "
            "the file damaged, or of another kind?"
        )
    unknown = np.flatnonzero(~np.isin(labels["val"], known))
    if len(unknown):
        raise UserError(
            f"{files.files['val', 'labels']}: the label of image {unknown[0]} is "
            f"{labels['val'][unknown[0]]}, and those of the training images are {first} to {last}. "
            "Are they of the same data set?"
        )
    names, digits = _known_names(files, labels["train"]), len(str(last))
    return {
        label: "-".join([f"{label:0{digits}}", *filter(None, [names.get(label)])])
        for label in range(first, last + 1)
    }


def _known_names(files: IdxFiles, train_labels: np.ndarray) -> dict[int, str]:
    """Return what is known of the classes' names, by label: Fashion-MNIST's, and those in EMNIST's
    file of a label and the codes of its characters per line, as in emnist-letters-mapping.txt. A
    digit that is its own label needs no name."""
    if hashlib.sha256(train_labels.tobytes()).hexdigest() == FASHION_LABELS_SHA256:
        return dict(enumerate(FASHION_NAMES))
    mapping = files.folder / f"{files.prefix}mapping.txt"
    if not mapping.is_file():
        return {}
    with system_errors(mapping, *UNREADABLE):
        text = mapping.read_text(errors="replace")
    try:
        lines = [list(map(int, line.split())) for line in text.rstrip().splitlines()]
        names = {label: "".join(map(chr, codes)) for label, *codes in lines}
        if others := [name for name in names.values() if not name.isalnum()]:
            raise ValueError(f"{others[0]!r} is no letter or digit")
        return {label: name for label, name in names.items() if name != str(label)}
    except (ValueError, OverflowError) as error:
        raise UserError(
            f"{mapping}: cannot be read as EMNIST's table of labels and character codes ({error}). "
            "Copy it again, or remove it: classes are then named by their labels."
        ) from error


def _listing(
    file: Path, images: np.ndarray, labels: np.ndarray, classes: dict[int, str], files: IdxFiles
) -> ImagesInMemory:
    """Return the listing of `images` (uint8 [N, H, W]) by class and then by their place in the
    file. Each becomes a PGM file: a header and its pixels, unpacked, which cost nothing to write
    and little to read."""
    count, height, width = images.shape
    if files.is_transposed:
        images, height, width = images.transpose(0, 2, 1), width, height
    order = np.argsort(labels, kind="stable")
    header = np.frombuffer(b"P5 %d %d 255\n" % (width, height), np.uint8)
    encoded = np.empty((count, len(header) + height * width), np.uint8)
    encoded[:, : len(header)] = header
    encoded[:, len(header) :] = images[order].reshape(count, -1)
    digits = len(str(count - 1))
    paths = [b"%b/%0*d.pgm" % (classes[labels[i]].encode(), digits, i) for i in order.tolist()]
    return ImagesInMemory(
        file,
        tuple(classes.values()),
        np.array(paths, dtype=np.bytes_),
        labels[order].astype(np.int64) - min(classes),
        encoded.reshape(-1),
        np.arange(count + 1) * encoded.shape[1],
    )


def open_fashion_mnist() -> tuple[ImagesInMemory, ImagesInMemory]:
    """Return the training and the validation images of Fashion-MNIST (Xiao, Rasul and Vollgraf
    2017, arXiv 1708.07747; MIT licence), from the files of Debian's package. UserError if they are
    not there, or are others."""
    elsewhere = (
        "Elsewhere: put its four files into a folder, convert them with python -m "
        "recipe.data.prepare idx FOLDER OUT, and train with --data OUT and --preset."
    )
    if not FASHION_MNIST.is_dir():
        raise UserError(
            f"--data fashion-mnist: {FASHION_MNIST} is not there. Debian's and Ubuntu's package "
            f"dataset-fashion-mnist brings it: sudo apt-get install dataset-fashion-mnist. "
            f"{elsewhere}"
        )
    train, val = open_idx(find_idx(FASHION_MNIST))
    if not train.classes[0].endswith(FASHION_NAMES[0]):
        raise UserError(
            f"--data fashion-mnist: {FASHION_MNIST} holds other labels than Fashion-MNIST has. "
            f"Install the package dataset-fashion-mnist again. {elsewhere}"
        )
    return train, val
