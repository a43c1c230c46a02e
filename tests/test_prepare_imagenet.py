"""From ImageNet's archives to a folder to train on: whole or not there, and it can be resumed."""

import hashlib
import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from test_prepare_val import CLASSES, LABELS, write_packed_devkit

from recipe import prepare_imagenet
from recipe.data.image_folder import list_images
from recipe.data.shards import UNFINISHED
from recipe.errors import UserError
from recipe.make_shards import make_shards, verify_shards
from recipe.prepare_imagenet import ILSVRC2012, Archive, PackedImages, Release, main, prepare


def jpeg(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (9, 8 + seed, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG")
    return file.getvalue()


TRAIN = {
    f"{name}/{name}_{number}.JPEG": jpeg(row * 4 + number)
    for row, name in enumerate(CLASSES)
    for number in (10, 9, 1, 2)  # neither in the order of numbers nor of names, as in ImageNet's
}
VAL = {f"{name}/{image}.JPEG": jpeg(row) for row, (image, name) in enumerate(LABELS.items())}


def tar(files: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return file.getvalue()


def as_released(archives: Path) -> Release:
    """What a release says that has the files in `archives`."""

    def archive(like: Archive, num_images: int) -> Archive:
        data = (archives / like.name).read_bytes()
        return Archive(like.name, hashlib.md5(data).hexdigest(), len(data), num_images)

    return Release(
        archive(ILSVRC2012.train, len(TRAIN)),
        archive(ILSVRC2012.val, len(VAL)),
        archive(ILSVRC2012.devkit, 0),
    )


@pytest.fixture
def archives(tmp_path: Path) -> Path:
    folder = tmp_path / "archives"
    folder.mkdir()
    inner = {
        name: tar({path[10:]: data for path, data in TRAIN.items() if path.startswith(name)})
        for name in reversed(CLASSES)
    }
    train = tar({f"{name}.tar": data for name, data in inner.items()})
    (folder / ILSVRC2012.train.name).write_bytes(train)
    (folder / ILSVRC2012.val.name).write_bytes(tar({path[10:]: VAL[path] for path in VAL}))
    write_packed_devkit(folder)
    shutil.rmtree(folder / "ILSVRC2012_devkit_t12")
    return folder


@pytest.fixture
def release(archives: Path) -> Release:
    return as_released(archives)


def content(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


WHOLE = {
    **{f"train/{path}": data for path, data in TRAIN.items()},
    **{f"val/{path}": data for path, data in VAL.items()},
}


def test_class_folders(archives: Path, release: Release, tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    assert prepare(archives, out, False, release) == [
        f"{out}/val: 10 images of 3 classes",
        f"{out}/train: 12 images of 3 classes",
    ]
    assert content(out) == WHOLE
    assert sorted(path.name for path in out.iterdir()) == ["train", "val"]


def test_shards_are_those_of_the_class_folders(
    archives: Path, release: Release, tmp_path: Path
) -> None:
    prepare(archives, tmp_path / "folders", False, release)
    make_shards(tmp_path / "folders", tmp_path / "expected", tmp_path / "cache")
    prepare(archives, tmp_path / "shards", True, release)
    assert content(tmp_path / "shards") == content(tmp_path / "expected")
    assert "12 images are whole" in verify_shards(tmp_path / "shards")[0]


@pytest.mark.parametrize("shards", [False, True])
def test_the_same_command_again_changes_nothing(
    archives: Path, release: Release, tmp_path: Path, shards: bool
) -> None:
    for _ in range(2):
        lines = prepare(archives, tmp_path / "out", shards, release)
        state = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.*")}
    assert shards or all("were there already" in line for line in lines)
    prepare(archives, tmp_path / "out", shards, release)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.*")} == state


# ---- interrupted ----


@pytest.mark.parametrize("num_reads", [0, 5, 10, 15, 21])
@pytest.mark.parametrize("shards", [False, True])
def test_interrupted_and_resumed(
    archives: Path,
    release: Release,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_reads: int,
    shards: bool,
) -> None:
    out, read, left = tmp_path / "out", PackedImages.read, iter(range(num_reads))

    def interrupted(images: PackedImages, index: int) -> bytes:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return read(images, index)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(PackedImages, "read", interrupted)
        prepare(archives, out, shards, release)
    assert not (out / "train" / "index.npz").exists()
    assert shards or not (out / "train").exists()
    for half in (out / UNFINISHED).rglob("*.JPEG"):
        half.write_bytes(half.read_bytes()[:-1])
        break
    with monkeypatch.context() as patch:
        patch.setattr(prepare_imagenet, "_members", lambda stream: pytest.fail("was read before"))
        prepare(archives, out, shards, release)
    prepare(archives, tmp_path / "at once", shards, release)
    assert content(out) == content(tmp_path / "at once")


def test_killed_and_started_again(archives: Path, tmp_path: Path) -> None:
    """By a signal that nothing can catch, while class folders are written."""
    out = tmp_path / "out"
    slow = (
        "import sys, time; from pathlib import Path; from recipe import prepare_imagenet as this; "
        "from test_prepare_imagenet import as_released; read = this.PackedImages.read; "
        "this.PackedImages.read = lambda *args: (time.sleep(0.1), read(*args))[1]; "
        "archives, out = map(Path, sys.argv[1:]); "
        "this.prepare(archives, out, False, as_released(archives))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", slow, str(archives), str(out)]
    process = subprocess.Popen(command, env=environment)
    try:
        deadline = time.monotonic() + 60
        while not list((out / UNFINISHED / "train").rglob("*.JPEG")):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.001)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert content(out / "val") == VAL
    assert not (out / "train").exists()
    with pytest.raises(UserError, match=r"not complete yet.*prepare_imagenet"):
        list_images(out / "train", tmp_path / "cache")
    prepare(archives, out, False, as_released(archives))
    assert content(out) == WHOLE


def test_two_at_once(
    archives: Path, release: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second waits for the lock, which the first deletes with all that it kept."""

    @contextmanager
    def after_another(lock: Path) -> Iterator[None]:
        monkeypatch.undo()
        prepare(archives, tmp_path / "out", False, release)
        assert not lock.parent.exists()
        yield

    monkeypatch.setattr(prepare_imagenet, "locked", after_another)
    lines = prepare(archives, tmp_path / "out", False, release)
    assert all("were there already" in line for line in lines)
    assert content(tmp_path / "out") == WHOLE


# ---- refused ----


def refused(archives: Path, out: Path, release: Release, shards: bool = False) -> str:
    with pytest.raises(UserError) as raised:
        prepare(archives, out, shards, release)
    assert not (out / "train").exists()
    return str(raised.value)


@pytest.mark.parametrize("part", ["train", "val", "devkit"])
def test_archives_that_are_missing_short_or_damaged(
    archives: Path, release: Release, tmp_path: Path, part: str
) -> None:
    out = tmp_path / "out"
    path = archives / getattr(release, part).name
    whole = path.read_bytes()
    path.write_bytes(whole[:-512])
    message = refused(archives, out, release)
    assert f"{path}: has {len(whole) - 512:,} bytes instead of {len(whole):,}" in message
    for position in range(0, min(len(whole), 4096), 97):  # in headers as well as in images
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x5A]) + whole[position + 1 :])
        message = refused(archives, out, release)
        assert f"{path}: has the MD5 " in message
        assert getattr(release, part).md5 in message
    path.unlink()
    assert f"{path}: cannot be read (No such file" in refused(archives, out, release)


def test_archives_of_another_release(archives: Path, release: Release, tmp_path: Path) -> None:
    more = replace(release, train=replace(release.train, num_images=13))
    assert "holds 12 images with a class instead of 13" in refused(archives, tmp_path / "a", more)
    (archives / release.val.name).write_bytes(tar({"ILSVRC2012_val_00000077.JPEG": b"", **VAL}))
    message = refused(archives, tmp_path / "b", as_released(archives))
    assert "others: ILSVRC2012_val_00000077.JPEG. Is it" in message
    (archives / release.val.name).write_bytes(b"\1" * 5000)
    assert "holds 0 images" in refused(archives, tmp_path / "c", as_released(archives))


def test_output_that_holds_something_else(archives: Path, release: Release, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare(archives, out, False, release)
    first, *_ = sorted((out / "train").rglob("*.JPEG"))
    with pytest.raises(UserError, match=r"out/val: holds class folders\..*make_shards"):
        prepare(archives, out, True, release)
    first.write_bytes(b"")
    (out / "train" / CLASSES[1] / "other.jpg").touch()
    with pytest.raises(UserError, match="is there already, and 2 of its files are others"):
        prepare(archives, out, False, release)


def test_disk_without_room(
    archives: Path, release: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=22 * 4096 - 1))
    message = refused(archives, tmp_path / "out", release)
    assert "needs 0.0 GB more, and its disk has 0.0 GB" in message
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=22 * 4096))
    prepare(archives, tmp_path / "out", False, release)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0))
    prepare(archives, tmp_path / "out", False, release)  # nothing is missing


@pytest.mark.parametrize("shards", [False, True])
def test_disk_that_fills_up(
    archives: Path,
    release: Release,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shards: bool,
) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        patch.setattr("recipe.make_shards._write_shard", full)
        with pytest.raises(UserError, match=r"out: cannot be written \(No space left.*resumes"):
            prepare(archives, tmp_path / "out", shards, release)
    prepare(archives, tmp_path / "out", shards, release)


def test_output_that_cannot_be_written(archives: Path, release: Release, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    message = refused(archives, tmp_path / "file" / "out", release)
    assert "cannot be written (Not a directory)" in message


def test_as_a_command(archives: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(archives), str(tmp_path / "out")]) == 1  # small archives are not ImageNet's
    message = capsys.readouterr().err
    assert message.startswith(f"error: {archives}/ILSVRC2012_img_val.tar: has ")
    assert not (tmp_path / "out").exists()
