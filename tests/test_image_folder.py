"""Listing a folder of class folders: what counts as an image, the cache, and the clear refusals."""

import errno
import functools
import io
import itertools
import multiprocessing
import os
import pickle
import re
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, MagicMock, patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from making import CPU, a_world, at_once, files_in, folder_config, write_images
from PIL import Image
from test_images import noisy_jpeg

from recipe.data import image_folder, loading
from recipe.data import shards as shards_module
from recipe.data.batches import (
    Data,
    data_order_sha256,
    open_data,
    training_batches,
    validation_batches,
)
from recipe.data.digits import open_digits
from recipe.data.image_folder import Listing, check_train_and_val, list_images, read_arrays
from recipe.data.loading import InputMeter
from recipe.data.prepare import main, make_shards
from recipe.data.shards import INDEX, Shards, open_shards
from recipe.errors import UserError


def make(root: Path, *files: str) -> Path:
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).touch()
    return root


N = 10**5
FILES = Path("/x"), ("a",), np.full(N, b"a/\xff.jpg"), np.arange(N)
IN_SHARDS = Shards(*FILES, ("0.tar",), np.array([1]), N, *(np.arange(N) for _ in range(3)))


@pytest.mark.parametrize("listing", [Listing(*FILES), IN_SHARDS], ids=["files", "shards"])
def test_loader_workers_share_the_arrays(listing: Listing) -> None:
    """Of ImageNet each would hold 67 MB, of its shards 93 MB."""
    message = bytes(ForkingPickler.dumps(listing))  # as for a process that is started
    theirs = pickle.loads(message)
    assert len(message) < 2000
    assert theirs.name(9) == listing.name(9) and len(theirs) == N
    assert theirs.name(9).endswith("a/\udcff.jpg")
    before, listing.labels[3] = listing.labels, 7
    assert list(theirs.labels[2:5]) == [2, 7, 4], "the same memory"
    ForkingPickler.dumps(listing)
    assert listing.labels is before, "one copy for all workers"


TICK_S = 0.02  # in which the clock of a file system moves on


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was made just now may be cached at once, as what a data set has been for long."""
    monkeypatch.setattr(image_folder, "YOUNGEST_TRUSTED_NS", 0)


def times(root: Path) -> dict[Path, int]:
    """When each file below `root` was written (ns), but for locks."""
    return {file: file.stat().st_mtime_ns for file in root.rglob("*.*") if file.suffix != ".lock"}


def names(listing: Listing) -> list[str]:
    return [os.fsdecode(path) for path in listing.paths]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """Counts true listings, so that a test can tell them from a cached one."""
    scan = MagicMock(side_effect=image_folder._scan)
    monkeypatch.setattr(image_folder, "_scan", scan)
    return scan


# ---- what is listed ----


TREES = {
    "suffixes, hidden and stray files": (
        "b/1.JPEG b/2.jpg b/3.Png b/4.WEBP b/5.tif b/6.bmp b/7.ppm b/notes.txt b/.5.jpg b/jpg "
        "a/z.jpeg .hidden/1.jpg a/.thumbs/1.jpg stray.jpg",
        "a/z.jpeg b/1.JPEG b/2.jpg b/3.Png b/4.WEBP b/5.tif b/6.bmp b/7.ppm",
    ),
    "sub-folders of a class": (
        "a/2.jpg a/10/1.jpg a/10/deep/1.jpg b/only/below/1.jpg",
        "a/10/1.jpg a/10/deep/1.jpg a/2.jpg b/only/below/1.jpg",
    ),
    "an unpacked archive that was kept": ("n01440764.tar n01440764/1.JPEG", "n01440764/1.JPEG"),
    "what file servers and systems keep there": (
        "a/1.jpg a/@eaDir/1.jpg/SYNOPHOTO_THUMB_M.jpg a/sub/@EADIR/2.jpg a/.ipynb_checkpoints/2.jpg"
        " a/Thumbs.db @eaDir/a/1.jpg #recycle/1.jpg lost+found/1.jpg __MACOSX/a/._1.jpg "
        ".thumbnails/1.jpg $RECYCLE.BIN/1.jpg a/@eaDirs/3.jpg not@eaDir/4.jpg",
        "a/1.jpg a/@eaDirs/3.jpg not@eaDir/4.jpg",
    ),
    "train as a class": ("train/1.jpg val/1.jpg bus/1.jpg", "bus/1.jpg train/1.jpg val/1.jpg"),
}


@pytest.mark.parametrize("tree", TREES)
def test_what_is_listed(tmp_path: Path, cache: Path, tree: str) -> None:
    files, expected = (words.split() for words in TREES[tree])
    root = make(tmp_path / "train", *files)
    listing = list_images(root, cache)
    assert (listing.root, len(listing), names(listing)) == (root, len(expected), expected)
    classes = [name.partition("/")[0] for name in expected]
    assert [listing.classes[label] for label in listing.labels] == classes
    assert listing.labels.dtype == np.int64
    assert listing.name(0) == str(root / expected[0])


LEFT_OUT = (
    r"left out: 5 file\(s\) without a known suffix \(2 \.heic, 1 [a-z.]+, 1 [a-z.]+ and 1 more\)"
)


@pytest.mark.usefixtures("settled")
def test_files_without_a_known_suffix_are_counted(tmp_path: Path, cache: Path) -> None:
    """By kind, at each start: also from the cache. What is passed over is not."""
    counted, not_counted = "1.heic sub/2.HEIC 3 a.txt b.csv", ".hidden Thumbs.db @eaDir/1.xmp"
    files = [f"b/{file}" for file in f"{counted} {not_counted}".split()]
    root = make(tmp_path / "train", "a/1.jpg", *files)
    message = refused(root, cache)
    assert re.search(f"1 of its classes without images: b.*{LEFT_OUT}$", message.lower())
    make(root, "b/1.jpg")
    for _ in range(2):
        assert re.fullmatch(LEFT_OUT, list_images(root, cache).left_out)


def test_links_to_folders_and_files_are_followed_from_a_relative_root(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make(tmp_path / "store", "one/1.jpg", "two/x.jpg")
    root = make(tmp_path / "train", "b/0.jpg")
    (root / "a").symlink_to(store / "one")
    (root / "b" / "1.jpg").symlink_to(store / "two" / "x.jpg")
    monkeypatch.chdir(tmp_path)
    listing = list_images(Path("train"), cache)
    assert names(listing) == ["a/1.jpg", "b/0.jpg", "b/1.jpg"]
    assert listing.name(0) == str(root / "a/1.jpg")


NAME = (
    st.binary(min_size=1, max_size=12)
    .filter(lambda name: not set(name) & set(b"/\0") and not name.startswith(b"."))
    .map(os.fsdecode)
)


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(NAME, st.sets(NAME, min_size=1, max_size=5), min_size=1, max_size=5))
def test_order_and_content_for_any_names(tree: dict[str, set[str]]) -> None:
    """Listed, and from the cache."""
    pairs = sorted((os.fsencode(c), os.fsencode(f"{c}/{f}.jpg")) for c in tree for f in tree[c])
    with tempfile.TemporaryDirectory() as folder:
        root = make(Path(folder) / "set", *(os.fsdecode(path) for _, path in pairs))
        for _ in range(2):
            with patch.object(image_folder, "YOUNGEST_TRUSTED_NS", 0):
                listing = list_images(root, Path(folder) / "cache")
            assert listing.paths.tolist() == [path for _, path in pairs]
            classes = [os.fsencode(listing.classes[label]) for label in listing.labels]
            assert classes == [name for name, _ in pairs]


# ---- the cache ----


def back_in_time(root: Path, change: Callable[[], object]) -> None:
    """Make a change after which all folders have the times of modification that they had before: as
    some archives and copies do."""
    folders = [path for path in root.rglob("*") if path.is_dir()]
    before = [(folder, folder.stat().st_mtime_ns) for folder in folders]
    change()
    for folder, time_ns in before:
        os.utime(folder, ns=(time_ns, time_ns))


def replace_folder(root: Path) -> None:
    """Put a folder with one image more, but with the same times, in the place of class a."""
    shutil.copytree(root / "a", root / ".a")
    make(root, ".a/2.jpg")
    shutil.rmtree(root / "a")
    (root / ".a").rename(root / "a")


CHANGES = {
    "file added": lambda root: make(root, "a/2.jpg"),
    "file added, times restored": lambda root: back_in_time(root, lambda: make(root, "a/2.jpg")),
    "folder replaced, times restored": lambda root: back_in_time(
        root, lambda: replace_folder(root)
    ),
    "file removed": lambda root: (root / "b" / "3.jpg").unlink(),
    "file renamed": lambda root: (root / "b" / "3.jpg").rename(root / "b" / "4.jpg"),
    "file added in a sub-folder": lambda root: make(root, "b/sub/9.jpg"),
    "class added": lambda root: make(root, "c/1.jpg"),
    "class renamed": lambda root: (root / "a").rename(root / "z"),
    "class removed": lambda root: ((root / "a" / "1.jpg").unlink(), (root / "a").rmdir()),
}


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("change", CHANGES)
def test_change_is_noticed(tmp_path: Path, cache: Path, scans: MagicMock, change: str) -> None:
    root = make(tmp_path / "train", "a/1.jpg", "b/sub/2.jpg", "b/3.jpg")
    for _ in range(2):
        assert names(list_images(root, cache)) == ["a/1.jpg", "b/3.jpg", "b/sub/2.jpg"]
    assert scans.call_count == 1, "the second came from the cache"
    time.sleep(TICK_S)
    CHANGES[change](root)
    expected = sorted(str(path.relative_to(root)) for path in root.rglob("*.jpg"))
    assert names(list_images(root, cache)) == expected


def test_what_has_just_changed_is_not_cached(tmp_path: Path, cache: Path, scans: MagicMock) -> None:
    """Coarse clocks: the folder may change again within one step, and keep its times."""
    root = make(tmp_path / "train", "a/1.jpg")
    back_in_time(root, lambda: os.utime(root / "a", (1, 1)))
    os.utime(root / "a", (1, 1))  # only ctime is new
    for _ in range(2):
        assert names(list_images(root, cache)) == ["a/1.jpg"]
    assert scans.call_count == 2


def test_another_disk_is_another_folder_but_another_host_s_number_is_not() -> None:
    """Of a disk at the same place with the same inodes and times; and of a file server."""
    status = os.stat("/")

    def state(major: int, minor: int) -> bytes:
        values = [*status]
        values[2] = os.makedev(major, minor)
        times = {"st_mtime_ns": 1, "st_ctime_ns": 1}
        return image_folder._state(os.stat_result(values, times))

    assert state(8, 1) != state(8, 2)
    assert state(0, 41) == state(0, 52)


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("kind", ["fuse.s3fs", "fuse", "squashfs", "ext4"])
@pytest.mark.parametrize("is_linked", [False, True])
def test_no_cache_where_times_need_not_show_a_change(
    kind: str,
    is_linked: bool,
    tmp_path: Path,
    cache: Path,
    scans: MagicMock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Object stores: also if only a class is linked to there."""
    root, elsewhere = make(tmp_path / "train", "a/1.jpg"), Path("/dev/shm")
    if is_linked:
        if elsewhere.stat().st_dev == root.stat().st_dev:
            pytest.skip("needs a temporary folder that is not in /dev/shm: set TMPDIR")
        store = tempfile.TemporaryDirectory(dir=elsewhere)
        make(Path(store.name), "2.jpg")
        (root / "b").symlink_to(store.name)
    device = os.stat(root / "b" if is_linked else root).st_dev
    mounts = f"9 1 {os.major(device)}:{os.minor(device)} / /a\\040b rw shared:1 - {kind} s3 rw\n"
    monkeypatch.setattr(
        image_folder, "read_proc", lambda path: f"1 1 0:1 / / rw - proc p rw\n{mounts}"
    )
    for _ in range(2):
        assert len(list_images(root, cache)) == 1 + is_linked
    assert scans.call_count == (1 if kind == "ext4" else 2)
    assert len([*cache.glob("*.npz")]) == (kind == "ext4")


@pytest.mark.usefixtures("settled")
def test_a_missing_file_s_message_names_the_cache(tmp_path: Path, cache: Path) -> None:
    """It may be the cache that is wrong; without one it is not."""
    root = make(tmp_path / "train", "a/1.jpg")
    listings = [list_images(root, cache), list_images(root, cache)]
    (file,) = cache.glob("*.npz")
    shutil.rmtree(root / "a")
    for listing in listings:
        with pytest.raises(
            UserError, match=rf"a/1\.jpg: .*No such file.*cached in {file}\. .*remove"
        ):
            listing.read(0)
    with pytest.raises(UserError, match=r"a/1\.jpg: cannot be read \(No such file[^)]*\)\. Check"):
        replace(listings[0], cache=None).read(0)


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04", b"not a zip", "cut", "an older rule's"])
def test_damaged_cache_is_listed_anew(
    tmp_path: Path, cache: Path, scans: MagicMock, damage: bytes | str
) -> None:
    root = make(tmp_path / "train", "a/1.jpg")
    list_images(root, cache)
    (file,) = cache.glob("*.npz")
    if damage == "an older rule's":
        older = {"version": np.array(1), "paths": np.array([b"a/2.jpg"])}
        np.savez(file, **{**read_arrays(file), **older})
    else:
        file.write_bytes(file.read_bytes()[:-30] if damage == "cut" else damage)
    for _ in range(2):  # the damaged file is replaced
        assert names(list_images(root, cache)) == ["a/1.jpg"]
    assert scans.call_count == 2


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("is_full", [False, True])
def test_cache_that_cannot_be_written_gives_a_warning(
    tmp_path: Path,
    cache: Path,
    is_full: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if is_full:
        error = OSError(28, "No space left on device")
        monkeypatch.setattr(np, "savez", MagicMock(side_effect=error))
    else:
        cache.touch()
    root = make(tmp_path / "train", "a/1.jpg")
    assert names(list_images(root, cache)) == ["a/1.jpg"]
    line = capsys.readouterr().err
    assert re.fullmatch("warning: .* cannot be cached .*--cache-dir DIR.*\n", line)
    assert not is_full or [path.suffix for path in cache.iterdir()] == [".lock"]


@pytest.mark.usefixtures("settled")
def test_of_processes_that_start_together_one_lists(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make(tmp_path / "train", *(f"{c}/{i}.jpg" for c in range(20) for i in range(20)))
    num_scans, scan = multiprocessing.Value("i", 0), image_folder._scan

    def counted(root: Path, classes: list[bytes]) -> tuple[dict[str, Any], bool]:
        with num_scans.get_lock():
            num_scans.value += 1
        return scan(root, classes)

    monkeypatch.setattr(image_folder, "_scan", counted)
    at_once(lambda: len(list_images(root, cache)) == 400)
    assert num_scans.value == 1


# ---- refusals ----


def refused(root: Path, cache: Path) -> str:
    with pytest.raises(UserError) as error:
        list_images(root, cache)
    assert str(root) in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("there", "asked", "said"),
    [
        (
            "imagenet/train/a",
            "imagnet/train",
            "{} has no imagnet; the closest names in it are i",
        ),
        (
            "imagenet/train/a",
            "imagenet/val",
            "has no val; the closest names in it are t",
        ),
        ("imagenet/train/a", "imagenet/train/train", "--data needs a folder that holds train/ and"),
        ("valid/a", "val", "in it are valid"),
        ("Val/a", "val", "in it are Val"),
        ("ILSVRC/Data/CLS-LOC/train/a", "train", "in it are ILSVRC"),
        ("imagenet/train/a", "imagenet/train/1/2", "{}/imagenet/train has no 1; the closest"),
    ],
)
def test_folder_missing(tmp_path: Path, cache: Path, there: str, asked: str, said: str) -> None:
    make(tmp_path, f"{there}/1.jpg")
    assert said.format(tmp_path) in refused(tmp_path / asked, cache)


# Files, links, and what is said of them.
TREES_REFUSED: dict[str, tuple[str, dict[str, str], list[str]]] = {
    "nothing": ("train/.keep", {}, ["holds no class folders"]),
    "images only": ("train/1.jpg train/2.jpg", {}, ["holds no class folders"]),
    "a file": ("train", {}, ["{train}: a file, not a folder.", "unpack it first"]),
    "archives beside": (
        "ILSVRC2012_img_train.tar",
        {},
        ["in it are ILSVRC2012_img_train.tar", "recipe.data.prepare unpack"],
    ),
    "empty classes": (
        "train/a/1.jpg train/bare/.keep train/c/sub/.keep train/other/1.txt",
        {},
        ["3 of its classes without images: bare, c, other"],
    ),
    "the flat validation folder": (
        "train/ILSVRC2012_val_00000001.JPEG train/ILSVRC2012_val_00000002.JPEG",
        {},
        ["python -m recipe.data.prepare sort-val {train} --labels"],
    ),
    "the same with classes in names": (
        "train/ILSVRC2012_val_00000001_n01440764.JPEG",
        {},
        ["python -m recipe.data.prepare sort-val {train}"],
    ),
    "flat training images": (
        "train/n01440764_10026.JPEG train/n01440764_10027_n01440764.JPEG",
        {},
        ["python -m recipe.data.prepare sort-val {train}"],
    ),
    "Tiny ImageNet's val": (
        "train/images/val_0.JPEG train/val_annotations.txt",
        {},
        ["sort-val {train} --labels {train}/val_annotations.txt"],
    ),
    "half of it sorted": (
        "train/ILSVRC2012_val_00000001.JPEG train/n01440764/ILSVRC2012_val_00000004.JPEG",
        {},
        ["python -m recipe.data.prepare sort-val {train} --labels"],
    ),
    "train and val inside": ("train/train/a/1.jpg train/val/a/1.jpg", {}, ["--data {train}"]),
    "a broken link": ("train/a/1.jpg", {"train/a/2.jpg": "/no/2.jpg"}, ["2.jpg: cannot be read"]),
    "and to a folder": ("train/a/1.jpg", {"train/b": "/no/such"}, ["b: cannot be read (No"]),
    **{
        f"a link to {target}": (
            "train/ant/1.jpg train/bee/1.jpg",
            {"train/ant/loop": target},
            ["{train}/ant/loop: a link to ", "a folder above it"],
        )
        for target in ("{train}/ant", "{train}", "{root}", "/")
    },
    "a link upwards behind another link": (
        "train/bee/1.jpg disk/ant/1.jpg",
        {"train/ant": "{root}/disk/ant", "disk/ant/up": ".."},
        ["{train}/ant/up: a link to {root}/disk"],
    ),
    **{
        f"a link {name} to itself": (
            "train/a/1.jpg",
            {f"train/{name}": f"{{train}}/{name}"},
            [f"{{train}}/{name}: cannot be read (Too many levels of symbolic links)"],
        )
        for name in ("a/2.jpg", "a/sub", "c")
    },
    "archives of classes": ("train/n01440764.tar", {}, ["recipe.data.prepare unpack"]),
    "a named pipe": ("train/a/1.jpg train/a/2.pipe", {}, ["a/2.jpg: is not a regular file"]),
    "a link to one": (
        "train/a/1.jpg 2.pipe",
        {"train/a/2.jpg": "{root}/2.jpg"},
        ["{train}/a/2.jpg: is not a regular file"],
    ),
}


@pytest.mark.parametrize("tree", TREES_REFUSED)
def test_trees_that_are_refused(tmp_path: Path, cache: Path, tree: str) -> None:
    files, links, words = TREES_REFUSED[tree]
    where = {"root": tmp_path, "train": tmp_path / "train"}
    for file in files.split():
        if file.endswith(".pipe"):  # to read it would wait for ever
            os.mkfifo((tmp_path / file).with_suffix(".jpg"))
        else:
            make(tmp_path, file)
    for link, target in links.items():
        (tmp_path / link).symlink_to(target.format(**where))
    message = refused(tmp_path / "train", cache)
    assert all(word.format(**where) in message for word in words), message


@pytest.mark.parametrize("folder", ["train", "train/a"])
def test_folder_without_rights(
    tmp_path: Path, cache: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, "train/a/1.jpg")
    denied = PermissionError(13, "Permission denied", str(tmp_path / folder))
    answers = {"train": [denied], "train/a": [DEFAULT, denied]}[folder]
    monkeypatch.setattr(os, "scandir", MagicMock(wraps=os.scandir, side_effect=answers))
    assert f"{folder}: cannot be read (Permission denied)" in refused(tmp_path / "train", cache)


def test_classes_of_train_and_val_must_agree(tmp_path: Path) -> None:
    def of(name: str, classes: str) -> Listing:
        return Listing(tmp_path / name, tuple(classes), np.array([b"a"]), np.array([0]))

    train, val, single = of("t", "abcdefg"), of("v", "gxy"), of("single", "a")
    check_train_and_val(train, of("s", "abcdefg"))
    with pytest.raises(UserError, match=r"Only in one of them: a, b, c and 5 more\."):
        check_train_and_val(train, val)
    with pytest.raises(UserError, match="holds a single class, a"):
        check_train_and_val(single, single)  # it would be learned to 100 % at once


# ---- reading ----


def test_files_that_cannot_be_read(
    tmp_path: Path, pauses: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    """With no patience: what is not there, and a folder, will not pass."""
    listing = Listing(tmp_path, ("a",), np.array([b"1.jpg", b"2.jpg"]), np.zeros(2))
    (tmp_path / "2.jpg").mkdir()
    for index, words in enumerate(("No such file", "Is a directory")):
        with pytest.raises(UserError, match=rf"{index + 1}\.jpg: cannot be read .{words}"):
            listing.read(index)
    assert (pauses, capsys.readouterr().err) == ([], "")


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Those that are made before another try, without making them."""
    made: list[float] = []
    monkeypatch.setattr(image_folder.time, "sleep", made.append)
    monkeypatch.setattr(image_folder, "WARNED_OF", set())
    return made


PASSING = [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN]


@pytest.mark.parametrize("failures", [1, 4, 5])
@pytest.mark.parametrize("number", [*PASSING, None])
def test_an_error_that_may_pass_is_met_with_patience(
    number: int | None,
    failures: int,
    tmp_path: Path,
    pauses: list[float],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Four times, and it is said once, though two files are concerned. (A file that has nothing
    to read for now reads as None.)"""
    make(tmp_path, "1.jpg", "2.jpg")
    listing = Listing(tmp_path, ("a",), np.array([b"1.jpg", b"2.jpg"]), np.zeros(2))
    nothing_yet = MagicMock(**{"__enter__.return_value.read.return_value": None})
    failure = OSError(number, os.strerror(number)) if number else nothing_yet
    words = re.escape(os.strerror(number or errno.EAGAIN))
    for index in range(2):
        answers = itertools.chain([failure] * failures, itertools.repeat(DEFAULT))
        opened = MagicMock(wraps=open, side_effect=answers)
        monkeypatch.setattr(image_folder, "open", opened, raising=False)
        refused = pytest.raises(UserError, match=rf"{index + 1}\.jpg: cannot be read \({words}\)")
        with refused if failures > 4 else nullcontext():
            assert listing.read(index) == b""
    assert pauses == 2 * [0.1, 0.4, 1.6, 6.4][:failures]
    assert re.fullmatch(rf"warning: .*1\.jpg: .*{words}.*trying again.*\n", capsys.readouterr().err)


# ---- the embedded digits ----


def test_the_digits_are_scikit_learns() -> None:
    from sklearn.datasets import load_digits

    source, (train, val) = load_digits(), map(open_digits, ("train", "val"))
    check_train_and_val(train, val)
    assert (len(train), len(val)) == (1438, 359)
    names = [Path(part.name(i)) for part in (train, val) for i in range(len(part))]
    assert len({name.name for name in names}) == 1797  # no image is in both parts
    # Another split would make old accuracies incomparable.
    assert [name.name for name in sorted(names[1438:], key=lambda path: path.name)][:2] == [
        "0008.jpg",
        "0023.jpg",
    ]
    for number in range(0, 1438, 97):
        index = int(names[number].stem)
        assert source.target[index] == int(names[number].parent.name) == train.labels[number]
        with Image.open(io.BytesIO(train.read(number))) as image:
            assert (image.size, image.mode, image.format) == ((32, 32), "L", "JPEG")
            shrunk = np.asarray(image.resize((8, 8), Image.Resampling.BOX), dtype=float)
        assert abs(shrunk - source.images[index] * 255 / 16).mean() < 20


# ---- tar files that are read at random: the same images in the same order as the folder's ----


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """11 images for training in three classes, 3 for validation."""
    root = tmp_path / "images"
    write_images(root / "train", 3)
    write_images(root / "val", 1)
    for name in ("two.dots.PNG", "0.JPEG"):  # whose stem, for a tar file, is `two`; and 0.png's
        shutil.copy(root / "train" / "a" / "1.png", root / "train" / "b" / name)
    return root


@pytest.fixture
def made(folder: Path, cache: Path, tmp_path: Path) -> Path:
    """Their shards: 4 images in each but the last."""
    make_shards(folder, tmp_path / "shards", cache, images_per_shard=4)
    return tmp_path / "shards"


# ---- what is written ----


def test_files(folder: Path, made: Path, cache: Path) -> None:
    """As the webdataset library has them; a second time nothing is written."""
    import webdataset

    before = times(made)
    make_shards(folder, made, cache, images_per_shard=4)
    assert times(made) == before
    shards = [f"train/train-{number:06}.tar" for number in range(3)]
    assert sorted(files_in(made)) == [
        "train/index.npz",
        *shards,
        "val/index.npz",
        "val/val-000000.tar",
    ]
    with tarfile.open(made / shards[1]) as tar:
        numbers = range(4, 8)
        assert tar.getnames() == [f"{i:09}.{end}" for i in numbers for end in ("png", "cls")]
        assert {(member.mtime, member.uid, member.uname) for member in tar} == {(0, 0, "")}
    listing, urls = list_images(folder / "train", cache), [str(made / shard) for shard in shards]
    raw = webdataset.WebDataset(urls, shardshuffle=False).to_tuple("__key__", "jpg;png", "cls")
    assert list(raw) == [
        (f"{i:09}", listing.read(i), b"%d" % label) for i, label in enumerate(listing.labels)
    ]


# ---- what is read ----


def test_same_order_and_pixels_as_the_folder(folder: Path, made: Path, cache: Path) -> None:
    """Also by a loader worker, and where one part is shards, and the other a folder."""
    half = replace(folder_config(made, cache), val_dir=str(folder / "val"))
    seen = []
    for config, workers, num_of_shards in (
        (folder_config(folder, cache), 0, 0),
        (folder_config(made, cache), 1, 2),
        (half, 0, 1),
    ):
        data = open_data(config)
        batches = [
            *training_batches(data, config, a_world(), CPU, workers, 4, 32),
            *validation_batches(data, config, a_world(), CPU, workers),
        ]
        identity = {name: it for name, it in data.identity.items() if "contents" not in name}
        assert len(data.identity) - len(identity) == num_of_shards
        pixels = [tensor.tolist() for batch in batches for tensor in batch]
        seen.append((identity, data_order_sha256(data, config), pixels))
    assert data.train.name(5) == f"{made}/train/train-000001.tar: b/1.png"
    assert seen[0] == seen[1] == seen[2]


def test_at_most_so_many_files_are_open(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most = shards_module._opened.cache_parameters()["maxsize"]
    assert most and most < 1024  # what a process may usually have
    opened = functools.lru_cache(maxsize=2)(shards_module._opened.__wrapped__)
    monkeypatch.setattr(shards_module, "_opened", opened)
    shards = open_shards(made / "train")
    before = len(os.listdir("/proc/self/fd"))
    for index in range(len(shards)):
        shards.read(index)
    assert len(os.listdir("/proc/self/fd")) == before + 2


# ---- shards that are refused ----


def test_missing_and_truncated_shards(made: Path) -> None:
    os.truncate(made / "train" / "train-000002.tar", 512)
    (made / "train" / "train-000001.tar").unlink()
    words = "2 of its 3 shards are missing, .*train-000001.tar, train-000002.tar. Copy them again"
    with pytest.raises(UserError, match=words):
        open_shards(made / "train")


def test_shard_that_changes_while_it_is_read(made: Path) -> None:
    shards, shard = open_shards(made / "train"), made / "train" / "train-000000.tar"
    with open(shard, "r+b") as file:
        file.seek(shards.offsets[1] + 20)
        file.write(b"other")
    assert shards.read(0)
    with pytest.raises(UserError, match=r"train-000000\.tar: a/1\.png: the shard holds other"):
        shards.read(1)
    os.truncate(shard, 1000)
    (made / "train" / "train-000001.tar").unlink()
    for index, words in {1: "the shard ends too early", 5: r"000001\.tar: cannot be read"}.items():
        with pytest.raises(UserError, match=words):
            shards.read(index)


def test_a_stale_handle_is_opened_anew(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a file server gives when it has started again."""
    shards, pread = open_shards(made / "train"), os.pread
    expected = shards.read(0)
    held = shards_module._opened(str(made / "train" / "train-000000.tar"))  # keeps its number
    stale = OSError(errno.ESTALE, os.strerror(errno.ESTALE))
    read = MagicMock(wraps=pread, side_effect=[stale, DEFAULT])
    monkeypatch.setattr(os, "pread", read)
    assert shards.read(0) == expected
    first, second = (call.args[0] for call in read.call_args_list)
    assert first == held.fileno() != second


@pytest.mark.parametrize("damage", ["cut", "changed", "text", "lacks an entry", "version"])
def test_damaged_index(made: Path, damage: str) -> None:
    index = made / "train" / INDEX
    file, arrays = index.read_bytes(), read_arrays(index)
    if damage == "version":
        np.savez(index, **{**arrays, "version": np.int64(99)})
    elif damage == "lacks an entry":
        np.savez(index, **{name: array for name, array in arrays.items() if name != "offsets"})
    else:
        changed = file[:200] + bytes([file[200] ^ 255]) + file[201:]
        content = {"cut": file[: len(file) // 2], "changed": changed, "text": b"<html>404</html>"}
        index.write_bytes(content[damage])
    with pytest.raises(UserError, match="cannot be read as an index of shards"):
        open_shards(made / "train")


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("images_per_shard", lambda old: np.int64(0)),
        ("images_per_shard", lambda old: np.int64(1)),
        ("labels", lambda old: old + 99),
        ("labels", lambda old: old - 1),
        ("offsets", lambda old: old[:-1]),
        ("checksums", lambda old: old[:-1]),
        ("shard_bytes", lambda old: old[:-1]),
    ],
)
def test_an_index_that_contradicts_itself(made: Path, name: str, wrong: Callable) -> None:
    """Not all that is opened was written here."""
    index = made / "train" / INDEX
    arrays = read_arrays(index)
    np.savez(index, **{**arrays, name: wrong(arrays[name])})
    with pytest.raises(UserError, match=f"{name}.* contradict its"):
        open_shards(made / "train")


# ---- going on, and other folders ----


@pytest.fixture
def interrupted(folder: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Shards as those that are `made`, of which the first two are written; from files with other
    times."""
    target, read, left = tmp_path / "interrupted", Listing.read, iter(range(9))
    for file in folder.rglob("*.png"):
        os.utime(file, (1, 1))
    with monkeypatch.context() as patch, pytest.raises(UserError, match="the same command again"):
        patch.setattr(
            Listing,
            "read",
            lambda *given: read(*given) if next(left, None) is not None else os.stat("/no/such"),
        )
        make_shards(folder, target, cache, images_per_shard=4)
    return target


@pytest.mark.parametrize("is_lost", [False, True])
def test_an_interrupted_run_goes_on(
    folder: Path, made: Path, interrupted: Path, cache: Path, is_lost: bool
) -> None:
    """A shard that was lost meanwhile is made again."""
    assert not (interrupted / "train" / INDEX).exists()
    with pytest.raises(UserError, match="unfinished shards"):
        open_data(folder_config(interrupted, cache))
    finished = interrupted / "train" / "train-000000.tar"
    before = finished.stat().st_mtime_ns
    if is_lost:
        finished.unlink()
    make_shards(folder, interrupted, cache, images_per_shard=4)
    assert (finished.stat().st_mtime_ns != before) == is_lost
    assert files_in(interrupted) == files_in(made)


def test_shards_of_another_folder_are_not_mixed_in(
    folder: Path, made: Path, interrupted: Path, cache: Path
) -> None:
    with pytest.raises(UserError, match="than the image folder has now, or with another"):
        make_shards(folder, made, cache, images_per_shard=5)
    (folder / "train" / "a" / "0.png").rename(folder / "train" / "a" / "9.png")
    for target in (made, interrupted):
        with pytest.raises(UserError, match="of other images than the image folder has now"):
            make_shards(folder, target, cache, images_per_shard=4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("{root}/nowhere {root}/shards", "no such folder"),
        ("{root} {root}/train/a/0.png", "cannot be written"),
        ("{root} {root}/shards --images-per-shard 0", "must be at least 1"),
    ],
)
def test_command(
    folder: Path, cache: Path, words: str, message: str, refusal: Callable[..., str]
) -> None:
    command = ["shards", *words.format(root=folder).split(), "--cache-dir", str(cache)]
    told = refusal(main, command, 1)
    assert told.startswith("python -m recipe.data.prepare: ") and message in told


def test_what_is_no_image_is_refused(folder: Path, cache: Path, tmp_path: Path) -> None:
    (folder / "train" / "b" / "1.png").write_bytes(b"<html>404</html>")
    with pytest.raises(UserError, match=r"b/1\.png: cannot be read .*<html>404"):
        make_shards(folder, tmp_path / "shards", cache)


# ---- images that may be damaged: refused in a small set, counted and named in a large one ----


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Six training images and two for validation, of which a/1.png and a/0.png are damaged JPEGs
    in truth."""
    write_images(tmp_path / "train", 3, "ab")
    write_images(tmp_path / "val", 1, "ab")
    for name in ("train/a/1.png", "val/a/0.png"):
        (tmp_path / name).write_bytes(noisy_jpeg(bytes(64)))
    return tmp_path


def read_all(data: Data, root: Path, workers: int, epochs: int = 2) -> list[InputMeter]:
    config, world, train, val = folder_config(root), a_world(), InputMeter(), InputMeter()
    list(training_batches(data, config, world, CPU, workers, 0, epochs * data.num_train, train))
    for _ in range(2):
        list(validation_batches(data, config, world, CPU, workers, val))
    return [train, val]


def test_large_set(
    root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One is let pass; each is named once, however often it comes, and wherever it was met."""
    monkeypatch.setattr(loading, "ONE_SUSPECT_IN", 2)  # of six and of two images
    data = open_data(folder_config(root))
    meters = read_all(data, root, workers=1)
    expected = [f"{root}/train/a/1.png", f"{root}/val/a/0.png"]
    assert [[*meter.suspects.values()] for meter in meters] == [[name] for name in expected]
    lines = capfd.readouterr().err.splitlines()
    assert [line.split(": ")[1] for line in lines if line.startswith("warning: ")] == expected


@pytest.mark.parametrize(
    ("one_in", "words"),
    [
        (6, r"\(1 such files in 6 are allowed\)"),
        (10_000, r"bytes more than its pixels(?!.*allowed)"),
    ],
)
def test_too_many_in_a_set(
    root: Path, one_in: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a small one none is let pass."""
    monkeypatch.setattr(loading, "ONE_SUSPECT_IN", one_in)
    (root / "train" / "b" / "1.png").write_bytes(noisy_jpeg(bytes(64)))
    with pytest.raises(UserError, match=rf"/train/[ab]/1\.png: .*{words}"):
        read_all(open_data(folder_config(root)), root, workers=0)
