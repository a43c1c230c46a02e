"""Tar files that are read at random: the same images in the same order as the folder's."""

import functools
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from making import CPU, a_world, folder_config, write_images

from recipe.data import shards as shards_module
from recipe.data.batches import (
    data_order_sha256,
    open_data,
    training_batches,
    validation_batches,
)
from recipe.data.image_folder import Listing, list_images, read_arrays
from recipe.data.shards import INDEX, UNFINISHED, Shards, open_shards
from recipe.errors import UserError
from recipe.make_shards import main, make_shards, read_ahead, verify_shards


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
    return {
        str(file.relative_to(root)): file.read_bytes()
        for file in sorted(root.rglob("*"))
        if file.is_file()
    }


# ---- what is written ----


def test_files(made: Path) -> None:
    assert sorted(content(made)) == [
        "train/index.npz",
        *(f"train/train-{number:06}.tar" for number in range(3)),
        "val/index.npz",
        "val/val-000000.tar",
    ]
    with tarfile.open(made / "train" / "train-000001.tar") as tar:
        members = {member.name: member for member in tar}
        assert list(members) == [
            "000000004.png", "000000004.cls", "000000005.png", "000000005.cls",
            "000000006.png", "000000006.cls", "000000007.png", "000000007.cls",
        ]  # fmt: skip
        assert {(member.mtime, member.uid, member.uname) for member in members.values()} == {
            (0, 0, "")
        }
        label = tar.extractfile("000000004.cls")
        assert label is not None
        assert label.read() == b"1"
    with tarfile.open(made / "train" / "train-000000.tar") as tar:
        assert "000000003.jpg" in tar.getnames()  # b/0.JPEG


def test_the_same_images_give_the_same_bytes(
    folder: Path, made: Path, cache: Path, tmp_path: Path
) -> None:
    for file in folder.rglob("*.png"):
        os.utime(file, (1, 1))
    make_shards(folder, tmp_path / "again", cache, images_per_shard=4)
    assert content(tmp_path / "again") == content(made)


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
        seen.append((data.identity, data_order_sha256(data, config), tensors))
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


def test_read_ahead(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "a").mkdir()
    for i in range(150):
        (tmp_path / "a" / f"{i:03}.jpg").write_bytes(b"%d" % i)
    listing = list_images(tmp_path, cache)
    assert list(read_ahead(listing, range(5, 150))) == [b"%d" % i for i in range(5, 150)]
    (tmp_path / "a" / "001.jpg").unlink()
    with pytest.raises(UserError, match=r"001\.jpg: no such file any more"):
        list(read_ahead(listing, range(150)))


# ---- what is refused ----


def refused(folder: Path) -> str:
    with pytest.raises(UserError) as error:
        open_shards(folder)
    return str(error.value)


def test_missing_and_truncated_shards(made: Path) -> None:
    shard = made / "train" / "train-000002.tar"
    size = shard.stat().st_size
    os.truncate(shard, size - 512)
    assert f"train-000002.tar ({size - 512:,} bytes instead of {size:,})" in refused(made / "train")
    (made / "train" / "train-000001.tar").unlink()
    message = refused(made / "train")
    assert "1 of its 3 shards are missing: train-000001.tar. Copy them again" in message


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
    with pytest.raises(UserError, match="the shard ends too early"):
        shards.read(1)
    (made / "train" / "train-000001.tar").unlink()
    with pytest.raises(UserError, match=r"train-000001\.tar: b/1\.png: cannot be read"):
        shards.read(5)


def test_shards_of_another_folder_with_this_index(made: Path, cache: Path, tmp_path: Path) -> None:
    """As long as before, so that only the checksums tell."""
    other = tmp_path / "other"
    write_images(other / "train", 4, "abc")
    write_images(other / "val", 1)
    make_shards(other, tmp_path / "others", cache, images_per_shard=4)
    size = (made / "train" / "train-000001.tar").stat().st_size
    shutil.copy(tmp_path / "others" / "train" / "train-000002.tar", made / "train/train-000001.tar")
    assert (made / "train" / "train-000001.tar").stat().st_size == size
    with pytest.raises(UserError, match=r"train-000001\.tar: .*python -m recipe\.make_shards"):
        verify_shards(made)


@pytest.mark.parametrize(
    "damage", ["cut", "changed", "empty", "text", "lacks an entry", "other version"]
)
def test_damaged_index(made: Path, damage: str) -> None:
    index = made / "train" / INDEX
    whole, arrays = index.read_bytes(), read_arrays(index)
    if damage == "other version":
        np.savez(index, **{**arrays, "version": np.int64(99)})
        assert "is of version 99, and version 1 is read here" in refused(made / "train")
        return
    if damage == "lacks an entry":
        del arrays["offsets"]
        np.savez(index, **arrays)
    else:
        contents = {
            "cut": whole[: len(whole) // 2],
            "changed": whole[:200] + bytes([whole[200] ^ 255]) + whole[201:],
            "empty": b"",
            "text": b"<html>404</html>",
        }
        index.write_bytes(contents[damage])
    assert "cannot be read as an index of shards" in refused(made / "train")


# ---- going on, and other folders ----


def reading_until(stop: int, error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the tool read `stop` images in all, and then fail."""
    read, count = Listing.read, iter(range(10**9))

    def counted(listing: Listing, index: int) -> bytes:
        if next(count) >= stop:
            raise error("enough")
        return read(listing, index)

    monkeypatch.setattr(Listing, "read", counted)


@pytest.fixture
def interrupted(folder: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Shards as those that are `made`, of which the first two are written."""
    target = tmp_path / "interrupted"
    with monkeypatch.context() as patch:
        reading_until(9, OSError, patch)  # in the third shard
        with pytest.raises(UserError, match="the same command again"):
            make_shards(folder, target, cache, images_per_shard=4)
    return target


@pytest.mark.parametrize("damage", ["none", "shard", "index"])
def test_an_interrupted_run_goes_on(
    folder: Path, made: Path, interrupted: Path, cache: Path, damage: str
) -> None:
    """What was damaged meanwhile is made again."""
    assert not (interrupted / "train" / INDEX).exists()
    with pytest.raises(UserError, match="not all written yet"):
        open_data(folder_config(interrupted, cache))
    finished = interrupted / "train" / "train-000000.tar"
    if damage == "shard":
        os.truncate(finished, 100)
    elif damage == "index":
        (interrupted / "train" / UNFINISHED / INDEX).write_bytes(b"half")
    before = finished.stat().st_mtime_ns
    make_shards(folder, interrupted, cache, images_per_shard=4)
    assert (finished.stat().st_mtime_ns == before) == (damage == "none")
    assert content(interrupted) == content(made)


def test_killed_and_started_again(folder: Path, made: Path, cache: Path, tmp_path: Path) -> None:
    """At any moment, by a signal that nothing can catch."""
    target = tmp_path / "killed"
    slow = (
        "import sys, time; from recipe.data.image_folder import Listing; "
        "from recipe.make_shards import main; read = Listing.read; "
        "Listing.read = lambda *args: (time.sleep(0.03), read(*args))[1]; "
        "sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", slow, str(folder), str(target), "--images-per-shard", "4"]
    command += ["--cache-dir", str(cache)]
    process = subprocess.Popen(command)
    deadline = time.monotonic() + 60
    while not list((target / "train" / UNFINISHED).glob(".train-000001.tar.*")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (target / "train" / INDEX).exists()
    make_shards(folder, target, cache, images_per_shard=4)
    assert content(target) == content(made)


def test_the_same_command_again_changes_nothing(folder: Path, made: Path, cache: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in made.rglob("*.*")}
    make_shards(folder, made, cache, images_per_shard=4)
    assert {file: file.stat().st_mtime_ns for file in made.rglob("*.*")} == before


def test_shards_of_another_folder_are_not_mixed_in(
    folder: Path, made: Path, interrupted: Path, cache: Path
) -> None:
    with pytest.raises(UserError, match="of other images than the folder has now, or with another"):
        make_shards(folder, made, cache, images_per_shard=5)
    (folder / "train" / "a" / "0.png").rename(folder / "train" / "a" / "9.png")
    for target in (made, interrupted):
        with pytest.raises(UserError, match="of other images than the folder has now"):
            make_shards(folder, target, cache, images_per_shard=4)


def test_a_file_that_is_no_image(folder: Path, cache: Path, tmp_path: Path) -> None:
    (folder / "train" / "b" / "1.png").write_bytes(b"<html>404</html>")
    with pytest.raises(UserError, match=r"b/1\.png: is a page of text"):
        make_shards(folder, tmp_path / "shards", cache)


def test_command(
    folder: Path, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "shards"
    where = ["--cache-dir", str(cache)]
    assert main([str(folder), str(target), *where]) == 0
    output = capsys.readouterr().out
    assert f"{target}/train: 1 shards, 11 images of 3 classes" in output
    assert main([str(target), "--verify"]) == 0
    assert "11 images are whole and can be decoded" in capsys.readouterr().out
    for wrong, message in [
        ([str(tmp_path / "nowhere"), str(target)], "no such folder"),
        ([str(folder), "--verify"], "holds no shards to verify"),
        ([str(folder)], "name the folder and where to write its shards"),
        ([str(folder), str(target), "--verify"], "or the shards and --verify"),
        ([str(folder), str(target), "--images-per-shard", "0"], "must be at least 1"),
    ]:
        assert main([*wrong, *where]) == 1
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert message in error
        assert error.count("\n") == 1


def test_verify_finds_an_image_that_is_cut_off(folder: Path, cache: Path, tmp_path: Path) -> None:
    """Whose head is whole: it passed when the shards were made, and is found by decoding it."""
    file = folder / "train" / "b" / "1.png"
    file.write_bytes(file.read_bytes()[:200])
    make_shards(folder, tmp_path / "shards", cache)
    with pytest.raises(UserError, match=r"train-000000\.tar: b/1\.png: cannot be read as an image"):
        verify_shards(tmp_path / "shards")


def test_target_that_cannot_be_written(folder: Path, cache: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file.*cannot be written"):
        make_shards(folder, tmp_path / "file" / "shards", cache)
