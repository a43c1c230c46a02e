"""Images that may be damaged: refused in a small set, counted and named in a large one."""

import io
from pathlib import Path

import numpy as np
import pytest
from making import CPU, a_world, folder_config, write_images
from PIL import Image

from recipe.data import images
from recipe.data.batches import Data, open_data, training_batches, validation_batches
from recipe.errors import UserError, sentence
from recipe.make_shards import make_shards, verify_shards


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
    monkeypatch.setattr(images, "ONE_IN", 2)  # of six and of two images
    data = open_data(folder_config(root))
    read_all(data, root, workers)
    assert [len(found.found) for found in data.suspects] == [1, 1]
    expected = [f"{root}/train/a/1.png", f"{root}/val/a/0.png"]
    assert [name for found in data.suspects for name in found.names] == expected
    lines = capfd.readouterr().err.splitlines()
    warned = [line.split(": ")[1] for line in lines if line.startswith("warning: ")]
    assert warned == expected


def test_too_many_in_a_large_set(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "ONE_IN", 6)
    (root / "train" / "b" / "0.png").write_bytes(damaged_jpeg())
    message = r"train/[ab]/[01]\.png: .*\(1 such files in 6 are let pass\)"
    with pytest.raises(UserError, match=message):
        read_all(open_data(folder_config(root)), root, workers=0)


def test_shards_with_a_suspect_image(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_shards(root, tmp_path / "shards", tmp_path / "cache")
    with pytest.raises(UserError, match=r"a/1\.png: .* bytes more than its pixels need"):
        verify_shards(tmp_path / "shards")
    monkeypatch.setattr(images, "ONE_IN", 2)
    lines = verify_shards(tmp_path / "shards")
    assert lines[0].endswith("train: 6 images are whole and can be decoded, 1 may be damaged")
