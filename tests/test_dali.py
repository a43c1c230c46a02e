"""DALI shows the same part of the same images in the same order; its pixels are nearly the same."""

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from making import CPU, a_world, folder_config, write_images
from needs import needs_dali, needs_gpu
from PIL import Image

from recipe.data.batches import open_data, training_batches
from recipe.data.loading import InputMeter, to_device
from recipe.errors import UserError
from recipe.settings.config import Config

DALI_CANNOT = ", .* DALI says: nvImageCodec"
DEVICES = [
    CPU,
    pytest.param(
        torch.device("cuda", 0),
        marks=[pytest.mark.gpu, needs_gpu],
    ),
]


def write_photographs(root: Path, per_class: int) -> Path:
    """A folder of smooth JPEG pictures of several sizes, in three classes."""
    rng = np.random.default_rng(0)
    for label in "abc":
        (root / label).mkdir(parents=True)
        for index in range(per_class):
            coarse = Image.fromarray(rng.integers(0, 256, (4, 5, 3), dtype=np.uint8))
            size = (90 + 10 * index, 70 + 5 * index)
            picture = coarse.resize(size, Image.Resampling.BICUBIC)
            exif = Image.Exif()
            exif[0x0112] = 6  # an orientation, which is ignored
            picture.save(root / label / f"{index}.jpg", quality=95, exif=exif)
    return root


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Settings that name a training folder of 12 JPEG files, and a validation folder."""
    root = tmp_path_factory.mktemp("images")
    write_photographs(root / "train", 4)
    write_images(root / "val", 2)
    return folder_config(root, train_crop_size=32, hflip_prob=0.5, random_crop_scale=(0.08, 1.0))


def batches_of(
    config: Config,
    device: torch.device = CPU,
    workers: int = 0,
    start: int = 4,
    stop: int = 44,
    rank: int = 0,
    size: int = 1,
    meter: InputMeter | None = None,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    data = open_data(config)
    world = a_world(rank, size)
    return list(training_batches(data, config, world, device, workers, start, stop, meter))


@needs_dali
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("interpolation", "workers"), [("bilinear", 2), ("bicubic", 0), ("nearest", 0)]
)
def test_same_order_crops_and_flips(
    folders: Config, device: torch.device, workers: int, interpolation: str
) -> None:
    config = replace(folders, interpolation=interpolation)
    plain = batches_of(config)
    by_dali = batches_of(replace(config, dali=True), device, workers)
    assert len(plain) == len(by_dali) == 10
    for (images, labels), (others, other_labels) in zip(plain, by_dali, strict=True):
        assert other_labels.tolist() == labels.tolist()
        assert (others.dtype, others.shape, others.device) == (torch.uint8, images.shape, device)
        difference = (images.int() - others.cpu().int()).abs().float()
        # Of 255 levels. Another crop, another flip or another image: 20 at least.
        assert difference.mean() < 4  # colours of JPEGs are upsampled in another way
        assert (images - images.flip(-1)).float().abs().mean() > 10
        moved, targets = to_device((others, other_labels), config, device)
        assert moved.is_floating_point()
        assert moved.device == targets.device == device


@needs_dali
def test_goes_on_anywhere_at_any_number_of_ranks(folders: Config) -> None:
    config, meter = replace(folders, dali=True), InputMeter()
    whole, later, *halves = (
        torch.cat([images for images, _ in batches_of(config, stop=48, **others)])
        for others in (
            {"start": 0, "meter": meter},
            {"start": 20},
            {"start": 0, "rank": 0, "size": 2},
            {"start": 0, "rank": 1, "size": 2},
        )
    )
    assert torch.equal(later, whole[20:])
    assert torch.equal(halves[0], whole[0::2])
    assert torch.equal(halves[1], whole[1::2])
    files = (Path(folders.data) / "train").rglob("*.jpg")
    assert (meter.files, meter.bytes) == (48, 4 * sum(file.stat().st_size for file in files))


@needs_dali
@pytest.mark.parametrize("device", DEVICES)
def test_batches_grow(folders: Config, device: torch.device) -> None:
    config = replace(folders, batch_size_warmup_epochs=1, dali=True)
    assert {len(labels) for _, labels in batches_of(config, device, start=0)} == {2, 4}


@needs_dali
@pytest.mark.parametrize(
    ("mode", "image_format", "options", "levels"),
    [
        ("RGB", "PNG", {}, 2),
        ("RGB", "BMP", {}, 2),
        ("RGB", "WEBP", {"lossless": True}, 2),
        ("L", "JPEG", {}, 2),
        ("CMYK", "JPEG", {}, 16),
    ],
)
def test_other_formats(
    folders: Config, tmp_path: Path, mode: str, image_format: str, options: dict, levels: int
) -> None:
    """Where the decoders agree, what is left is the rounding of the resize."""
    config = replace(folders, train_dir=str(tmp_path / "train"))
    for file in write_photographs(tmp_path / "train", 4).rglob("*.jpg"):
        Image.open(file).convert(mode).save(file, image_format, **options)
    plain, by_dali = batches_of(config), batches_of(replace(config, dali=True))
    for (images, _), (others, _) in zip(plain, by_dali, strict=True):
        assert (images.int() - others.int()).abs().max() <= levels


@needs_dali
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda file: file.write_bytes(b"no image"), ": cannot be read as an image"),
        (lambda file: os.truncate(file, file.stat().st_size // 8), ": cannot be read as an image"),
        (lambda file: Image.open(file).save(file, "GIF"), DALI_CANNOT),
        (lambda file: Image.open(file).save(file, "AVIF"), DALI_CANNOT),
        # Of no known range.
        (lambda file: Image.open(file).convert("F").save(file, "TIFF"), ": .*convert it to 8 bits"),
    ],
)
def test_what_dali_does_not_read_is_named(
    folders: Config, tmp_path: Path, change: Callable[[Path], object], words: str
) -> None:
    config = replace(folders, train_dir=str(tmp_path / "train"), dali=True)
    change(write_photographs(tmp_path / "train", 4) / "b" / "2.jpg")
    with pytest.raises(UserError, match=rf"b/2\.jpg{words}") as raised:
        batches_of(config)
    assert ("--dali" in str(raised.value)) == (words == DALI_CANNOT)


def test_refused_without_dali(folders: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    with pytest.raises(UserError, match=r"--dali: .*imagenet-horovod-ddp\[dali\]"):
        batches_of(replace(folders, dali=True))
