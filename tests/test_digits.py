"""The embedded digits: written once, whole, and the same for everyone."""

import shutil
import sys
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
from making import at_once
from PIL import Image

from recipe.data import digits
from recipe.data.image_folder import check_train_and_val, list_images
from recipe.errors import UserError


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    digits.prepare_digits(folder)
    return folder


def test_layout_is_an_image_folder_with_a_stratified_split(cache: Path) -> None:
    root = digits.prepare_digits(cache)
    train = list_images(root / "train", cache)
    val = list_images(root / "val", cache)
    check_train_and_val(train, val)
    assert train.classes == tuple("0123456789")
    assert (len(train), len(val)) == (1438, 359)
    num_train, num_val = np.bincount(train.labels), np.bincount(val.labels)
    assert (abs(num_val / (num_train + num_val) - 0.2) < 0.004).all()
    names = [Path(part.name(i)).name for part in (train, val) for i in range(len(part))]
    assert len(set(names)) == 1797  # no image is in both parts


def test_pixels_are_the_digits(cache: Path) -> None:
    from sklearn.datasets import load_digits

    source = load_digits()
    root = digits.prepare_digits(cache)
    for file in sorted(root.glob("*/*/*.jpg"))[::97]:
        index = int(file.stem)
        assert source.target[index] == int(file.parent.name)
        with Image.open(file) as image:
            assert (image.size, image.mode, image.format) == ((32, 32), "L", "JPEG")
            shrunk = np.asarray(image.resize((8, 8), Image.Resampling.BOX), dtype=float)
        assert abs(shrunk - source.images[index] * 255 / 16).mean() < 20


def test_split_is_fixed() -> None:
    # Another split would make old accuracies incomparable: raise VERSION if it must change.
    labels = np.repeat(np.arange(10), 20)
    is_val = digits._validation_part(labels)
    assert np.flatnonzero(is_val[:20]).tolist() == [0, 5, 9, 11]
    assert (np.bincount(labels[is_val]) == 4).all()


def test_second_call_writes_nothing_and_needs_no_sklearn(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)  # an import would raise
    root = digits.prepare_digits(cache)
    before = {file: file.stat().st_mtime_ns for file in root.rglob("*")}
    assert digits.prepare_digits(cache) == root
    assert {file: file.stat().st_mtime_ns for file in root.rglob("*")} == before


@pytest.mark.parametrize("damage", ["file removed", "file emptied", "no stamp", "old stamp"])
def test_incomplete_folder_is_replaced(cache: Path, tmp_path: Path, damage: str) -> None:
    own = Path(shutil.copytree(cache, tmp_path / "copy"))
    root = digits.prepare_digits(own)
    victim = next(root.glob("train/3/*.jpg"))
    stamp = root / digits.STAMP
    {
        "file removed": victim.unlink,
        "file emptied": lambda: victim.write_bytes(b""),
        "no stamp": stamp.unlink,
        "old stamp": lambda: stamp.write_text('{"version": 0}'),
    }[damage]()
    assert digits.prepare_digits(own) == root
    assert {file.name: file.stat().st_size for file in root.glob("*/*/*.jpg")} == {
        file.name: file.stat().st_size for file in cache.glob("*/*/*/*.jpg")
    }
    assert sorted(path.name for path in own.iterdir() if path.is_dir()) == [root.name]


@pytest.mark.parametrize("with_lock", [True, False])
def test_processes_that_start_together(
    tmp_path: Path, with_lock: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the lock it is as on several hosts that share a file system."""
    if not with_lock:
        monkeypatch.setattr("fcntl.flock", MagicMock(side_effect=OSError("no locks here")))
    at_once(lambda: len(list(digits.prepare_digits(tmp_path).glob("*/*/*.jpg"))) == 1797)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["digits-v1", "digits-v1.lock"]
    assert not list(tmp_path.rglob("*.partial"))


def test_cache_that_cannot_be_written_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be written .* --cache-dir DIR"):
        digits.prepare_digits(tmp_path / "file" / "cache")
