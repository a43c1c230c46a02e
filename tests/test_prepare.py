"""From ImageNet's archives, or Kaggle's flat folder, to class folders: whole, or not there."""

import hashlib
import io
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, Mock

import numpy as np
import pytest
import scipy.io
from making import files_in, write_images
from PIL import Image
from test_images import noisy_jpeg
from torchvision.datasets import imagenet
from torchvision.datasets.imagenet import ARCHIVE_META

from compare.plan.environment import ROOT
from recipe.data import prepare
from recipe.data.image_folder import UNFINISHED, Listing, list_images
from recipe.data.prepare import main, make_shards, read_labels, sort_val, unpack
from recipe.errors import UserError

CLASSES = ["n01440764", "n01443537", "n01484850"]
LABELS = {f"ILSVRC2012_val_{i:08}": CLASSES[i * 7 % 3] for i in range(1, 11)}
VAL = {f"{name}/{image}.JPEG": image for image, name in LABELS.items()}
TRAIN = {f"{name}/{name}_{i}.JPEG": f"{name} {i}" for name in CLASSES for i in (10, 9, 1, 2)}


def tar(files: dict[str, bytes], mode: str = "w") -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode) as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return file.getvalue()


def write_devkit(folder: Path) -> Path:
    """As ImageNet's: the struct's IDs are not in the order of the class names."""
    ids = {CLASSES[2]: 1, CLASSES[0]: 2, CLASSES[1]: 3}
    names = ("ILSVRC2012_ID", "WNID", "words", "gloss", "num_children")
    synsets = np.zeros((4, 1), dtype=[(name, "O") for name in names])
    for row, (name, id_) in enumerate([*ids.items(), ("n00001740", 4)]):  # the last: no leaf
        synsets[row, 0] = (id_, name, "a fish", "swims", int(id_ == 4))
    meta = io.BytesIO()
    scipy.io.savemat(meta, {"synsets": synsets})
    truth = "".join(f"{ids[name]}\n" for name in LABELS.values()).encode()
    data, file = "ILSVRC2012_devkit_t12/data/", folder / ARCHIVE_META["devkit"][0]
    contents = {"meta.mat": meta.getvalue(), "ILSVRC2012_validation_ground_truth.txt": truth}
    file.write_bytes(tar({data + name: content for name, content in contents.items()}, "w:gz"))
    return file


@pytest.fixture
def archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Small ones, taken for the published ones."""
    folder = tmp_path / "archives"
    folder.mkdir()
    inner = {
        f"{name}.tar": tar({p[10:]: t.encode() for p, t in TRAIN.items() if p.startswith(name)})
        for name in reversed(CLASSES)
    }
    (folder / ARCHIVE_META["train"][0]).write_bytes(tar(inner))
    (folder / ARCHIVE_META["val"][0]).write_bytes(tar({p[10:]: VAL[p].encode() for p in VAL}))
    write_devkit(folder)
    for part, (name, _) in ARCHIVE_META.items():
        md5 = hashlib.md5((folder / name).read_bytes()).hexdigest()
        monkeypatch.setitem(ARCHIVE_META, part, (name, md5))
    return folder


@pytest.fixture
def val(tmp_path: Path) -> Path:
    folder = tmp_path / "val"
    folder.mkdir()
    for image in LABELS:
        (folder / f"{image}.JPEG").write_text(image)
    return folder


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Kaggle's, whose rows are in no order."""
    file = tmp_path / "LOC_val_solution.csv"
    rows = [f"{image},{name} 85 1 499 272 {name} 3 4 5 6 " for image, name in LABELS.items()]
    file.write_text("\n".join(["ImageId,PredictionString", *reversed(rows)]) + "\n")
    return file


def tree(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*.JPEG") if path.is_file())
    return {str(path.relative_to(folder)): path.read_text() for path in files}


# ---- archives ----


def check_whole(out: Path) -> None:
    assert (tree(out / "train"), tree(out / "val")) == (TRAIN, VAL)
    assert sorted(path.name for path in out.iterdir()) == [".lock", "train", "val"]


def test_archives(archives: Path, tmp_path: Path) -> None:
    before = files_in(archives)
    out = tmp_path / "new" / "out"
    for _ in range(2):  # the second time all is there
        assert unpack(archives, out) == [f"{out}/val: complete", f"{out}/train: complete"]
        check_whole(out)
    assert files_in(archives) == before


@pytest.mark.parametrize("part", ["val", "train"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_interrupted_and_started_again(
    archives: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    part: str,
    error: BaseException,
) -> None:
    """What was half written is not taken for whole, and is written anew."""
    out, name = tmp_path / "out", f"parse_{part}_archive"
    original = getattr(imagenet, name)

    def broken(*given: object) -> None:
        original(*given)
        next((out / UNFINISHED / part).rglob("*.JPEG")).write_text("half")
        raise error

    ended = (KeyboardInterrupt, UserError)
    with monkeypatch.context() as patch, pytest.raises(ended, match=r"^$|No space left on device"):
        patch.setattr(imagenet, name, broken)
        unpack(archives, out)
    assert not (out / part).exists()
    with pytest.raises(UserError, match=r"not complete yet.*prepare unpack"):
        list_images(out / part, tmp_path / "cache")
    unpack(archives, out)
    check_whole(out)


@pytest.mark.parametrize("part", ["train", "val", "devkit"])
def test_archives_that_are_missing_or_damaged(archives: Path, tmp_path: Path, part: str) -> None:
    name, md5 = ARCHIVE_META[part]
    with open(archives / name, "ab") as file:
        file.write(b"\0")
    with pytest.raises(UserError, match=rf"{name}: .*MD5 is not .*{md5}"):
        unpack(archives, tmp_path / "out")
    assert not (tmp_path / "out" / part).exists()
    (archives / name).unlink()
    with pytest.raises(UserError, match=rf"{name}: not there. Name the folder"):
        unpack(archives, tmp_path / "out")


def test_output_that_cannot_be_written(
    archives: Path, tmp_path: Path, refusal: Callable[..., str]
) -> None:
    (tmp_path / "file").touch()
    words = ["unpack", str(archives), str(tmp_path / "file" / "out")]
    assert "cannot be written (Not a directory)" in refusal(main, words, 1)


# ---- the flat validation folder ----


@pytest.mark.parametrize("kind", ["table", "a spreadsheet's table", "devkit"])
def test_flat_folder(val: Path, archives: Path, table: Path, kind: str) -> None:
    labels = archives / ARCHIVE_META["devkit"][0] if kind == "devkit" else table
    if "spreadsheet" in kind:  # it marks the encoding before the first column's name
        table.write_bytes(b"\xef\xbb\xbf" + table.read_bytes().replace(b"\n", b"\r\n"))
    assert read_labels(labels) == LABELS
    for moved, in_place in ((10, 0), (0, 10)):
        line = f"{val}: moved {moved} images, {in_place} were in place"
        assert sort_val(val, labels) == [line]
    assert sort_val(val) == [line]  # as far as names say; these hold no class
    assert tree(val) == VAL
    assert list_images(val, val.parent / "cache").classes == tuple(CLASSES)


@pytest.mark.parametrize(
    "pattern",
    ["ILSVRC2012_val_{:08}_{}.JPEG", "{1}_{0}.JPEG", "{1}_{0}_{1}.JPEG"],  # of train: its two
)
def test_names_that_hold_the_class(pattern: str, tmp_path: Path) -> None:
    """As in Hugging Face's archives; no file of labels is needed."""
    names = {pattern.format(number, CLASSES[number % 2]): CLASSES[number % 2] for number in (1, 2)}
    for name in names:
        (tmp_path / name).touch()
    assert main(["sort-val", str(tmp_path)]) == 0
    assert set(tree(tmp_path)) == {f"{label}/{name}" for name, label in names.items()}
    assert sort_val(tmp_path) == [f"{tmp_path}: moved 0 images, 2 were in place"]
    (tmp_path / "ILSVRC2012_val_00000003.JPEG").touch()
    with pytest.raises(UserError, match=r"without a label: .*3 \(1 in all\). Give a label file"):
        sort_val(tmp_path)


def test_tiny_imagenet(tmp_path: Path) -> None:
    labels = tmp_path / "val_annotations.txt"
    rows = (f"val_{number}.JPEG\t{CLASSES[1 - number]}\t0\t32\t44\t62\n" for number in (0, 1))
    labels.write_text("".join(rows))
    (tmp_path / "images").mkdir()
    for number in (0, 1):
        (tmp_path / f"images/val_{number}.JPEG").touch()
    assert sort_val(tmp_path, labels) == [f"{tmp_path}: moved 2 images, 0 were in place"]
    assert set(tree(tmp_path)) == {f"{CLASSES[1]}/val_0.JPEG", f"{CLASSES[0]}/val_1.JPEG"}
    assert not (tmp_path / "images").exists(), "it would count as a class"
    assert list_images(tmp_path, tmp_path.parent / "cache").classes == tuple(CLASSES[:2])


@pytest.mark.parametrize("num_renames", [0, 1, 9])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(122, "Disk quota exceeded")])
def test_sorting_that_is_interrupted_and_resumed(
    val: Path,
    table: Path,
    num_renames: int,
    error: BaseException,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    answers = [DEFAULT] * num_renames + [error]
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", Mock(wraps=os.rename, side_effect=answers))
        assert main(["sort-val", str(val), "--labels", str(table)]) in (1, 130)
    assert "the same command" in capsys.readouterr().err
    assert main(["sort-val", str(val), "--labels", str(table)]) == 0
    assert tree(val) == VAL
    assert f"{num_renames} were in place" in capsys.readouterr().out


def moved(val: Path, label: int) -> tuple[Path, Path]:
    """An image of the flat folder, and a class folder to which it goes."""
    (val / CLASSES[label]).mkdir()
    return val / "ILSVRC2012_val_00000001.JPEG", val / CLASSES[label]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda val: (val / "ILSVRC2012_val_00049999.JPEG").touch(), "without a label: .*49999"),
        (lambda val: shutil.copy(*moved(val, 1)), "both here and in a class folder: .*00000001"),
        (lambda val: shutil.move(*moved(val, 2)), "wrong class folder, .*00000001"),
        (lambda val: (val / CLASSES[1]).touch(), "cannot be written .File exists"),
        (lambda val: (val / "ILSVRC2012_val_00000004.JPEG").unlink(), r"missing: .*4 \(1 in all"),
        (shutil.rmtree, r"images missing: ILSVRC2012_val_00000001, .* \(10 in all\)"),
    ],
)
def test_folders_that_are_refused(
    val: Path, table: Path, change: Callable[[Path], None], message: str
) -> None:
    change(val)
    with pytest.raises(UserError, match=message):
        sort_val(val, table)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"ImageId,PredictionString\n",
        b"a,b\n1,2\n",
        b"ImageId,PredictionString\nILSVRC2012_val_00000001\n",
        b"ImageId,PredictionString\nILSVRC2012_val_00000001, \n",
        b"ImageId,PredictionString\nILSVRC2012_val_00000001,cat 1 2 3 4\n",
        b"ImageId,PredictionString\n../../x,n01440764 1 2 3 4\n",
        b"ImageId,PredictionString\nILSVRC2012_val_00000001,n01440764/../../x 1\n",
        b"\xff\xfe\x00\x01",
    ],
)
def test_wrong_table(
    val: Path, tmp_path: Path, content: bytes, refusal: Callable[..., str]
) -> None:
    file, before = tmp_path / "wrong.csv", tree(val)
    file.write_bytes(content)
    told = refusal(main, ["sort-val", str(val), "--labels", str(file)], 1)
    assert told.startswith("python -m recipe.data.prepare: ") and "LOC_val_solution.csv" in told
    assert tree(val) == before, "nothing may be moved"


def test_devkit_that_is_not_the_published_one(tmp_path: Path) -> None:
    for file in (write_devkit(tmp_path), tmp_path / "no.tar.gz"):
        with pytest.raises(UserError, match=r"is not there, or its MD5 is not .* published one"):
            read_labels(file)


# ---- files that stand in for ImageNet's ----


def make(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools/make_jpegs.py"), str(folder), *flags]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_folder_is_one_to_train_on(tmp_path: Path) -> None:
    done = make(tmp_path / "jpegs", "--images", "20", "--classes", "4")
    assert done.returncode == 0, done.stderr
    files = sorted(tmp_path.glob("jpegs/*/*/*.jpg"))
    places = Counter(file.parent.relative_to(tmp_path / "jpegs").as_posix() for file in files)
    assert places == {
        f"{part}/00{i}": n for part, n in (("train", 5), ("val", 1)) for i in range(4)
    }
    # As dear to read and decode as a photograph.
    assert 95_000 < sum(file.stat().st_size for file in files) / len(files) < 120_000
    assert len({file.read_bytes() for file in files}) == 24
    with Image.open(files[0]) as image:
        assert (image.size, image.mode) == ((500, 375), "RGB")
    again = make(tmp_path)
    assert again.returncode == 1 and again.stderr.endswith(f"{tmp_path}: File exists\n")


# ---- a whole data set is read, and all that is wrong with it is told ----


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Nine images for training and three for validation."""
    write_images(tmp_path / "set" / "train", 3)
    write_images(tmp_path / "set" / "val", 1)
    return tmp_path / "set"


@pytest.fixture
def check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """check(folder, words): the exit code, and what was written to standard output and error."""

    def run(folder: Path, *words: str) -> tuple[int, str, str]:
        code = main(["check", str(folder), "--cache-dir", str(tmp_path / "cache"), *words])
        return code, *capsys.readouterr()

    return run


@pytest.mark.parametrize(("part", "count"), [("", 12), ("train", 9), ("val", 3)])
@pytest.mark.parametrize("as_shards", [False, True])
def test_a_good_set(
    root: Path, part: str, count: int, as_shards: bool, check: Callable[..., Any], tmp_path: Path
) -> None:
    if as_shards:
        make_shards(root, tmp_path / "shards", tmp_path / "cache")
        root = tmp_path / "shards"
    line = f"{root / part}: {count} images, 0 bad, 0 that may be damaged\n"
    assert check(root / part) == (0, line, "")


def test_what_file_servers_keep_is_passed_over_and_what_is_left_out_is_told(
    root: Path, check: Callable[..., Any], tmp_path: Path
) -> None:
    """Beside train/ and val/ as well. The shards have what the folder's listing takes."""
    for file in ("lost+found/1.txt", "train/@eaDir/1.jpg", "train/a/@eaDir/1.jpg", "val/a/1.heic"):
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).touch()
    left_out = "left out: 1 file(s) without a known suffix (1 .heic)"
    told = {"images": 12, "left_out": [f"{root}/val: {left_out}"], "bad": [], "suspect": []}
    code, out, err = check(root, "--json", "-")
    assert (code, json.loads(out), err) == (0, told, "")
    assert check(root)[1].endswith(f"; {root}/val: {left_out}\n")
    train, val = make_shards(root, tmp_path / "shards", tmp_path / "cache")
    assert train.endswith(" GB") and val.endswith(f" GB; {left_out}")
    assert check(tmp_path / "shards")[1].startswith(f"{tmp_path}/shards: 12 images, 0 bad")


def test_all_that_is_wrong_is_told(root: Path, check: Callable[..., Any], tmp_path: Path) -> None:
    """On the console, and as JSON."""
    wrong = {
        root / "train" / "a" / "1.png": ("bad", b"", "It has 0 bytes"),
        root / "train" / "b" / "0.png": ("suspect", noisy_jpeg(bytes(64)), "more than its pixels"),
        root / "val" / "c" / "0.png": ("bad", b"\x89PNG\r\n\x1a\n", "cannot be read"),
    }
    for file, (_, content, _) in wrong.items():
        file.write_bytes(content)
    code, out, err = check(root, "--json", str(tmp_path / "found.json"))
    assert (code, out) == (1, "")
    *lines, last = err.splitlines()
    assert f"prepare: {root}: 12 images, 2 bad, 1 that may be damaged. " in last
    told = json.loads((tmp_path / "found.json").read_text())
    assert told["images"] == 12
    found = [(kind, *image.values()) for kind in ("bad", "suspect") for image in told[kind]]
    assert {image: kind for kind, image, _ in found} == {
        str(file): kind for file, (kind, _, _) in wrong.items()
    }
    assert all(wrong[Path(image)][2] in reason for _, image, reason in found)
    assert sorted(lines) == sorted(f"{kind}: {reason}" for kind, _, reason in found)


@pytest.mark.parametrize(("one_in", "code"), [(9, 0), (10, 1)])
def test_as_many_suspect_images_as_in_training(
    one_in: int, code: int, root: Path, check: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "ONE_SUSPECT_IN", one_in)
    (root / "train" / "b" / "0.png").write_bytes(noisy_jpeg(bytes(64)))
    assert check(root)[0] == code


@pytest.mark.parametrize(
    ("folder", "words", "message"),
    [
        ("nowhere", [], "no such folder"),
        ("set", ["--json", "/nowhere/found.json"], "/nowhere.* cannot be written .No such file"),
    ],
)
def test_what_is_no_set_and_what_cannot_be_written(
    root: Path, folder: str, words: list[str], message: str, check: Callable[..., Any]
) -> None:
    code, out, err = check(root.parent / folder, *words)
    assert (code, out) == (1, "") and re.search(message, err) and err.count("\n") == 1


def test_an_interruption_ends_it_soon(
    tmp_path: Path, check: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Ctrl-C ends the wait for an image."""
    listing = Listing(tmp_path, ("a",), np.zeros(10**6, "S1"), np.zeros(10**6))
    monkeypatch.setattr(prepare, "open_images", lambda *given: listing)
    answers = itertools.chain([None] * 10, [KeyboardInterrupt], itertools.repeat(None))
    look = Mock(side_effect=answers)
    monkeypatch.setattr(prepare, "fault_of", look)
    code, out, err = check(tmp_path, "--json", str(tmp_path / "found.json"))
    assert (code, out, err) == (130, "", "\ninterrupted: run the same command again\n")
    threads = prepare.THREADS_PER_CORE * len(os.sched_getaffinity(0))
    assert (
        look.call_count <= threads * prepare.CHECKED_AHEAD
        and not (tmp_path / "found.json").exists()
    )
