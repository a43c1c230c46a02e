"""Tar files that are read at random: the same images in the same order as the folder's."""

import errno
import functools
import io
import os
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from making import CPU, a_world, folder_config, write_images
from PIL import Image

from recipe.data import decoding
from recipe.data import shards as shards_module
from recipe.data.batches import (
    Data,
    data_order_sha256,
    open_data,
    training_batches,
    validation_batches,
)
from recipe.data.image_folder import Listing, list_images, read_arrays
from recipe.data.prepare import main, make_shards
from recipe.data.shards import INDEX, Shards, open_shards
from recipe.errors import UserError, sentence


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
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def made(folder: Path, cache: Path, tmp_path: Path) -> Path:
    """Their shards: 4 images in each but the last."""
    make_shards(folder, tmp_path / "shards", cache, images_per_shard=4)
    return tmp_path / "shards"


def content(root: Path) -> dict[str, bytes]:
    files = (file for file in sorted(root.rglob("*")) if file.is_file())
    return {str(file.relative_to(root)): file.read_bytes() for file in files}


# ---- what is written ----


def test_files(folder: Path, made: Path, cache: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in made.rglob("*.*")}
    make_shards(folder, made, cache, images_per_shard=4)
    assert {file: file.stat().st_mtime_ns for file in made.rglob("*.*")} == before
    assert sorted(content(made)) == [
        "train/index.npz",
        *(f"train/train-{number:06}.tar" for number in range(3)),
        "val/index.npz",
        "val/val-000000.tar",
    ]
    with tarfile.open(made / "train" / "train-000001.tar") as tar:
        assert tar.getnames() == [
            "000000004.png", "000000004.cls", "000000005.png", "000000005.cls",
            "000000006.png", "000000006.cls", "000000007.png", "000000007.cls",
        ]  # fmt: skip
        assert {(member.mtime, member.uid, member.uname) for member in tar} == {(0, 0, "")}
        label = tar.extractfile("000000004.cls")
        assert label is not None and label.read() == b"1"
    with tarfile.open(made / "train" / "train-000000.tar") as tar:
        assert "000000003.jpg" in tar.getnames()  # b/0.JPEG


def test_the_webdataset_library_reads_them(folder: Path, made: Path, cache: Path) -> None:
    wds = pytest.importorskip("webdataset", reason="webdataset is missing: make setup installs it")
    listing = list_images(folder / "train", cache)
    urls = [str(made / "train" / f"train-{number:06}.tar") for number in range(3)]
    samples = list(wds.WebDataset(urls, shardshuffle=False).rename(image="jpg;png").decode())
    assert [sample["cls"] for sample in samples] == listing.labels.tolist()
    assert [sample["__key__"] for sample in samples] == [f"{i:09}" for i in range(len(listing))]
    raw = list(wds.WebDataset(urls, shardshuffle=False).to_tuple("jpg;png", "cls"))
    assert [image for image, _ in raw] == [listing.read(i) for i in range(len(listing))]


# ---- what is read ----


@pytest.mark.parametrize("workers", [0, 2])
def test_same_order_and_pixels_as_the_folder(
    folder: Path, made: Path, cache: Path, workers: int
) -> None:
    """Also where one part is shards, and the other a folder."""
    half = replace(folder_config(made, cache), val_dir=str(folder / "val"))
    seen = []
    for config in (folder_config(folder, cache), folder_config(made, cache), half):
        data = open_data(config)
        batches = [
            *training_batches(data, config, a_world(), CPU, workers, 4, 32),
            *validation_batches(data, config, a_world(), CPU, workers),
        ]
        tensors = [tensor for batch in batches for tensor in batch]
        identity = {name: it for name, it in data.identity.items() if "contents" not in name}
        parts = [name for name in data.identity if "contents" in name]
        assert len(parts) == sum(isinstance(one, Shards) for one in (data.train, data.val))
        seen.append((identity, data_order_sha256(data, config), tensors))
    assert isinstance(data.train, Shards) and not isinstance(data.val, Shards)
    for identity, order, tensors in seen[1:]:
        assert (identity, order) == seen[0][:2]
        assert all(map(torch.equal, tensors, seen[0][2]))
    assert data.train.paths.dtype == list_images(folder / "train", cache).paths.dtype
    assert data.train.name(5) == f"{made}/train/train-000001.tar: b/1.png"


def test_at_most_so_many_files_are_open(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = functools.lru_cache(maxsize=2)(shards_module._opened.__wrapped__)
    monkeypatch.setattr(shards_module, "_opened", opened)
    shards = open_shards(made / "train")
    before = len(os.listdir("/proc/self/fd"))
    order = [0, 10, 4, 9, 1, 5, 8, 2]
    assert len({shards.read(i) for i in order}) == len(order)
    assert len(os.listdir("/proc/self/fd")) == before + 2


# ---- what is refused ----


def refused(folder: Path) -> str:
    with pytest.raises(UserError) as error:
        open_shards(folder)
    return str(error.value)


def test_missing_and_truncated_shards(made: Path) -> None:
    os.truncate(made / "train" / "train-000002.tar", 512)
    (made / "train" / "train-000001.tar").unlink()
    message = refused(made / "train")
    assert "2 of its 3 shards are missing, or not as long as" in message
    assert "train-000001.tar, train-000002.tar. Copy them again" in message


def test_shard_that_changes_while_it_is_read(made: Path) -> None:
    shards = open_shards(made / "train")
    shard = made / "train" / "train-000000.tar"
    data = bytearray(shard.read_bytes())
    data[int(shards.offsets[1]) + 20] ^= 1
    shard.write_bytes(data)
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
    tried: list[int] = []

    def read(file: int, size: int, offset: int) -> bytes:
        tried.append(file)
        if file == held.fileno():
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return pread(file, size, offset)

    monkeypatch.setattr(os, "pread", read)
    assert shards.read(0) == expected
    assert tried[0] == held.fileno() and len(tried) == 2


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
    assert "cannot be read as an index of shards" in refused(made / "train")


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
    with pytest.raises(UserError, match="not all written yet"):
        open_data(folder_config(interrupted, cache))
    finished = interrupted / "train" / "train-000000.tar"
    before = finished.stat().st_mtime_ns
    if is_lost:
        finished.unlink()
    make_shards(folder, interrupted, cache, images_per_shard=4)
    assert (finished.stat().st_mtime_ns != before) == is_lost
    assert content(interrupted) == content(made)


def test_shards_of_another_folder_are_not_mixed_in(
    folder: Path, made: Path, interrupted: Path, cache: Path
) -> None:
    with pytest.raises(UserError, match="of other images than the folder has now, or with another"):
        make_shards(folder, made, cache, images_per_shard=5)
    (folder / "train" / "a" / "0.png").rename(folder / "train" / "a" / "9.png")
    for target in (made, interrupted):
        with pytest.raises(UserError, match="of other images than the folder has now"):
            make_shards(folder, target, cache, images_per_shard=4)


def test_command(
    folder: Path, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "shards"
    where = ["--cache-dir", str(cache)]
    assert main(["shards", str(folder), str(target), *where]) == 0
    output = capsys.readouterr().out
    assert f"{target}/train: 1 shards, 11 images of 3 classes" in output
    for wrong, message in [
        ([str(tmp_path / "nowhere"), str(target)], "no such folder"),
        ([str(folder), str(folder / "train" / "a" / "0.png")], "cannot be written"),
        ([str(folder), str(target), "--images-per-shard", "0"], "must be at least 1"),
    ]:
        assert main(["shards", *wrong, *where]) == 1
        error = capsys.readouterr().err
        assert error.startswith("python -m recipe.data.prepare: ")
        assert message in error
        assert error.count("\n") == 1


def test_what_is_no_image_is_refused(folder: Path, cache: Path, tmp_path: Path) -> None:
    (folder / "train" / "b" / "1.png").write_bytes(b"<html>404</html>")
    with pytest.raises(UserError, match=r"b/1\.png: cannot be read .*<html>404"):
        make_shards(folder, tmp_path / "shards", cache)


# ---- images that may be damaged: refused in a small set, counted and named in a large one ----


def damaged_jpeg(size: int = 64) -> bytes:
    """A JPEG with 64 zeroed bytes in its data."""
    buffer = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (size, size, 3), dtype=np.uint8)
    Image.fromarray(noise).save(buffer, "JPEG", quality=90)
    content = bytearray(buffer.getvalue())
    content[len(content) // 2 : len(content) // 2 + 64] = bytes(64)
    return bytes(content)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Six training images and two for validation, of which a/1.png and a/0.png are damaged JPEGs
    in truth."""
    write_images(tmp_path / "train", 3, "ab")
    write_images(tmp_path / "val", 1, "ab")
    for name in ("train/a/1.png", "val/a/0.png"):
        (tmp_path / name).write_bytes(damaged_jpeg())
    return tmp_path


def read_all(data: Data, root: Path, workers: int, epochs: int = 2) -> None:
    config, world = folder_config(root), a_world()
    list(training_batches(data, config, world, CPU, workers, 0, epochs * data.num_train))
    list(validation_batches(data, config, world, CPU, workers))


@pytest.mark.parametrize("workers", [0, 2])
def test_small_set(root: Path, workers: int) -> None:
    with pytest.raises(UserError) as error:
        read_all(open_data(folder_config(root)), root, workers)
    message = sentence(error.value)
    assert message.startswith(f"{root}/train/a/1.png: ") and "let pass" not in message
    assert "bytes more than its pixels need" in message


@pytest.mark.parametrize("workers", [0, 2])
def test_large_set(
    root: Path,
    workers: int,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """One is let pass; each is named once, however often it comes, and wherever it was met."""
    monkeypatch.setattr(decoding, "ONE_IN", 2)  # of six and of two images
    data = open_data(folder_config(root))
    read_all(data, root, workers)
    assert [len(found.found) for found in data.suspects] == [1, 1]
    expected = [f"{root}/train/a/1.png", f"{root}/val/a/0.png"]
    assert [name for found in data.suspects for name in found.names] == expected
    lines = capfd.readouterr().err.splitlines()
    warned = [line.split(": ")[1] for line in lines if line.startswith("warning: ")]
    assert warned == expected


def test_too_many_in_a_large_set(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "ONE_IN", 6)
    (root / "train" / "b" / "0.png").write_bytes(damaged_jpeg())
    message = r"train/[ab]/[01]\.png: .*\(1 such files in 6 are let pass\)"
    with pytest.raises(UserError, match=message):
        read_all(open_data(folder_config(root)), root, workers=0)
