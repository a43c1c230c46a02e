"""From folders to batches on the device."""

import contextlib
import itertools
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import psutil
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from launching import rarely
from making import CPU, a_config, a_world, folder_config, in_ranks, write_images
from PIL import Image
from test_images import TIMMS, encoded, noisy_jpeg, picture

from recipe.data import batches as data_module
from recipe.data import images as images_module
from recipe.data.batches import (
    SYNTHETIC_CLASSES,
    Batch,
    Data,
    InputMeter,
    SampleStream,
    _one_ahead,
    check_replaced,
    data_order_sha256,
    mixed,
    open_data,
    to_device,
    training_batches,
    validation_batches,
)
from recipe.data.decoding import decode
from recipe.data.image_folder import Listing
from recipe.data.images import TrainTransform
from recipe.errors import UserError
from recipe.ranks import Ranks
from recipe.record.meter import StepMeter
from recipe.settings.config import Config
from recipe.training.state import Progress


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Settings that name a training folder of 9 images and a validation folder of 6."""
    root = tmp_path_factory.mktemp("images")
    write_images(root / "train", 3)
    write_images(root / "val", 2)
    return folder_config(root)


@pytest.fixture(scope="module")
def data(folders: Config) -> Data:
    return open_data(folders)


def test_open_data(data: Data, folders: Config) -> None:
    assert (data.num_train, data.num_val, data.num_classes) == (9, 6, 3)
    made_up = open_data(a_config(data="synthetic", synthetic_images=5000))
    assert made_up.train is None
    assert (made_up.num_train, made_up.num_val, made_up.num_classes) == (5000, 1000, 1000)
    # Folders that are named come first.
    assert open_data(replace(folders, data="synthetic")).train is not None


def read_training(
    data: Data, config: Config, size: int, start: int, stop: int, workers: int = 0
) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    return [
        list(training_batches(data, config, a_world(rank, size), CPU, workers, start, stop))
        for rank in range(size)
    ]


def test_training_batches(data: Data, folders: Config) -> None:
    ((images, labels), *others) = read_training(data, folders, 1, 0, 36)[0]
    assert (images.dtype, images.shape) == (torch.uint8, (4, 3, 8, 8))
    assert (labels.dtype, labels.shape) == (torch.int64, (4,))
    seen = torch.cat([labels, *(labels for _, labels in others)])
    assert seen.bincount().tolist() == [12, 12, 12]  # four epochs of three images a class


def test_who_measures_steps_gets_none_of_the_first_epoch(
    folders: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In which each file is decoded whole, to look for damage."""
    keys: list[tuple[int, int]] = []
    original = data_module.Images.__getitems__

    def read(self: data_module.Images, wanted: list[tuple[int, int]]) -> Batch:
        keys.extend(wanted)
        return original(self, wanted)

    monkeypatch.setattr(data_module.Images, "__getitems__", read)
    data = open_data(folders, epoch_images=1000)
    assert data.num_train == 1000
    read_training(data, folders, 1, 0, 36)
    assert sorted({index for _, index in keys}) == list(range(9))
    assert {epoch for epoch, _ in keys} == {1}, "not the first, 0"


def pixels(
    data: Data, config: Config, size: int, start: int = 0, workers: int = 0
) -> Counter[bytes]:
    """Those of the images that all ranks read until position 36."""
    return Counter(
        image.numpy().tobytes()
        for rank in read_training(data, config, size, start, 36, workers)
        for images, _ in rank
        for image in images
    )


def test_pixels_do_not_depend_on_ranks(data: Data, folders: Config) -> None:
    """Augmentation draws from (seed, epoch, index) alone: any split sees the same images."""
    alone = pixels(data, folders, 1)
    assert pixels(data, replace(folders, batch_size=2), 2) == alone
    assert pixels(data, replace(folders, batch_size=6), 3) == alone
    assert pixels(data, replace(folders, seed=1), 1) != alone
    assert len(alone) > 30  # another crop in each epoch


def test_a_repeated_image_is_augmented_anew(data: Data, folders: Config) -> None:
    """Of a batch of 4 each image comes twice; an epoch later other images do."""
    repeated = replace(folders, augment_repeats=2)
    (batches,) = read_training(data, repeated, 1, 0, 36)
    for images, labels in batches[:2]:
        assert labels[0] == labels[1] and labels[2] == labels[3]
        assert not torch.equal(images[0], images[1])
    (resumed,) = read_training(data, repeated, 1, 12, 16)
    assert all(map(torch.equal, batches[3], resumed[0]))
    assert data_order_sha256(data, repeated) != data_order_sha256(data, folders)


def test_images_grow_with_the_epochs(data: Data, folders: Config) -> None:
    """By steps of 32, and all of a batch are of one size though an epoch ends within it."""
    growing = a_config(first_crop_size=40, train_crop_size=80, resize_epochs=(1, 4))
    sizes = [TrainTransform(growing).size_in(epoch) for epoch in range(6)]
    assert sizes == [40, 40, 64, 64, 80, 80]
    config = replace(folders, first_crop_size=32, train_crop_size=40, resize_epochs=(0, 1))
    for workers in (0, 2):
        (batches,) = read_training(data, config, 1, 0, 3 * data.num_train, workers)
        assert {images.shape[2:] for images, _ in batches} == {(32, 32), (40, 40)}
        grown = [images.shape[2] == 40 for images, _ in batches]
        assert grown == sorted(grown)
        assert grown.index(True) == -(-data.num_train // config.batch_size)


@pytest.mark.parametrize("epochs", [(11, 13), (65, 76)])
def test_growth_is_that_of_ffcv(epochs: tuple[int, int]) -> None:
    """numpy's interpolation, divided by 32, rounded (to even) and multiplied again."""
    config = a_config(first_crop_size=160, train_crop_size=192, resize_epochs=epochs)
    sizes = [TrainTransform(config).size_in(epoch) for epoch in range(88)]
    assert sizes == (np.round(np.interp(range(88), epochs, (160, 192)) / 32) * 32).tolist()


@pytest.mark.parametrize("auto_augment", [None, "ta_wide", TIMMS])
def test_workers_change_nothing(data: Data, folders: Config, auto_augment: str | None) -> None:
    config, before = replace(folders, auto_augment=auto_augment), torch.get_rng_state()
    plain, forked = (
        [tensor for batch in read_training(data, config, 1, 4, 20, workers)[0] for tensor in batch]
        for workers in (0, 2)
    )
    assert len(plain) == len(forked) == 8 and all(map(torch.equal, plain, forked))
    # The loader starts in a session's first step, and a run that goes on has another one.
    assert torch.equal(torch.get_rng_state(), before), "dropout draws from it"


@pytest.mark.parametrize("workers", [0, 2])
def test_input_meter(folders: Config, tmp_path: Path, workers: int) -> None:
    files = sorted(write_images(tmp_path, 3).glob("*/*.png"))
    for index, file in enumerate(files):  # random images are all of one size
        file.write_bytes(file.read_bytes() + bytes(10 * index**2))
    data, meter = open_data(replace(folders, train_dir=str(tmp_path))), InputMeter()
    keys = SampleStream(data.num_train, folders.seed).samples(np.arange(4, 24))
    sizes = [files[index].stat().st_size for _, index in keys]
    batches = training_batches(data, folders, a_world(), CPU, workers, 4, 24, meter)
    next(batches)
    assert (meter.files, meter.bytes) == (4, sum(sizes[:4]))
    list(batches)
    assert (meter.files, meter.bytes) == (20, sum(sizes))


@pytest.mark.parametrize("size", [1, 2, 4, 7])
def test_validation_batches(data: Data, folders: Config, size: int) -> None:
    batches = [
        batch
        for rank in range(size)
        for batch in validation_batches(data, folders, a_world(rank, size), CPU, 0)
    ]
    assert torch.cat([labels for _, labels in batches]).bincount().tolist() == [2, 2, 2]
    assert len({image.numpy().tobytes() for images, _ in batches for image in images}) == 6


def test_synthetic_batches() -> None:
    config = a_config(data="synthetic", synthetic_images=10)
    made_up = open_data(config)
    (first, labels), (second, _) = read_training(made_up, config, 1, 0, 8)[0]
    assert torch.equal(first, second)
    assert (first.dtype, first.shape) == (torch.uint8, (4, 3, 8, 8))
    assert 0 <= labels.min() <= labels.max() < SYNTHETIC_CLASSES
    counts = [
        len(labels)
        for rank in range(3)
        for _, labels in validation_batches(made_up, config, a_world(rank, 3), CPU, 0)
    ]
    assert sum(counts) == 10  # as many as the summary tells


@pytest.mark.parametrize("channels_last", [False, True])
def test_to_device(channels_last: bool) -> None:
    images = torch.randint(0, 256, (2, 3, 5, 5), dtype=torch.uint8)
    before = images.clone()
    labels = torch.tensor([1, 2])
    moved, targets = to_device((images, labels), a_config(channels_last=channels_last), CPU)
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    expected = (images.float() / 255 - mean.view(3, 1, 1)) / std.view(3, 1, 1)
    assert torch.allclose(moved, expected, atol=1e-5)
    assert moved.is_contiguous(memory_format=torch.channels_last) == channels_last
    assert torch.equal(targets, labels)
    assert torch.equal(images, before)


def test_each_batch_is_copied_while_the_one_before_is_used(
    folders: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of things, without a GPU."""
    told: list[str] = []
    side = Mock(record_event=Mock(side_effect=["copy 1", "copy 2", "copy 3"]))
    main = Mock(wait_event=lambda event: told.append(f"waits for {event}"))
    active = [main]

    @contextlib.contextmanager
    def on(stream: Mock) -> Iterator[None]:
        active.append(stream)
        yield
        active.pop()

    def copied(batch: Batch, config: Config, device: torch.device) -> Batch:
        assert active[-1] is side
        told.append(f"copies {int(batch[1])}")
        return batch

    data_module._copying_stream.cache_clear()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: active[-1])
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda _, stream: told.append("kept"))
    monkeypatch.setattr(data_module, "to_device", copied)
    batches = [(torch.zeros(1), torch.tensor(number)) for number in (1, 2, 3)]
    for _, label in _one_ahead(batches, folders, CPU):
        told.append(f"step {int(label)}")
    assert told == [
        "copies 1",
        "copies 2",
        "waits for copy 1", "kept", "kept", "step 1",
        "copies 3",
        "waits for copy 2", "kept", "kept", "step 2",
        "waits for copy 3", "kept", "kept", "step 3",
    ]  # fmt: skip
    assert list(_one_ahead([], folders, CPU)) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("channels_last", [False, True])
def test_batches_on_a_gpu(data: Data, folders: Config, channels_last: bool, workers: int) -> None:
    """As on the CPU, and whole while the streams work side by side."""
    device = torch.device("cuda", 0)
    config = replace(folders, channels_last=channels_last)
    load = torch.rand(4096, 4096, device=device)
    expected = [
        to_device(batch, config, CPU)
        for batch in training_batches(data, config, a_world(), CPU, 0, 0, 200)
    ]
    sums = []
    for batch in training_batches(data, config, a_world(), device, workers, 0, 200):
        images, labels = to_device(batch, config, device)
        assert images.device == labels.device == device
        assert images.is_contiguous(memory_format=torch.channels_last) == channels_last
        load = torch.mm(load, load).clamp_(0, 1)  # the main stream is late
        sums.append((images.clone(), labels.clone()))
        images.fill_(math.nan)  # and the memory is used again
        del images, labels, batch
    assert len(sums) == len(expected) == 50
    for (images, labels), (others, other_labels) in zip(sums, expected, strict=True):
        torch.testing.assert_close(images.cpu(), others, rtol=0, atol=1e-6)
        assert torch.equal(labels.cpu(), other_labels)


def test_data_order(data: Data, folders: Config, tmp_path: Path) -> None:
    first = data_order_sha256(data, folders)
    assert data_order_sha256(data, folders) == first
    assert data_order_sha256(data, replace(folders, seed=1)) != first
    # The same images elsewhere are the same data.
    write_images(tmp_path / "train", 3)
    write_images(tmp_path / "val", 2)
    moved = replace(folders, train_dir=str(tmp_path / "train"), val_dir=str(tmp_path / "val"))
    assert data_order_sha256(open_data(moved), moved) == first
    (tmp_path / "train" / "a" / "0.png").rename(tmp_path / "train" / "a" / "9.png")
    assert data_order_sha256(open_data(moved), moved) != first


LOADING = """
import os, sys, time
sys.path.insert(0, {tests!r})
from making import *
from recipe.data.batches import open_data, training_batches
if __name__ == "__main__":
    root = {root!r}
    config = a_config(train_dir=root + "/train", val_dir=root + "/val", cache_dir=root + "/cache")
    batches = training_batches(open_data(config), config, a_world(), CPU, 1, 0, 10**9)
    assert "torchvision" not in sys.modules  # two seconds of each loader's server
    next(batches)
    print("loading", flush=True)
    time.sleep(60)
"""


def test_workers_end_with_a_killed_trainer(folders: Config, tmp_path: Path) -> None:
    """torch's own watch does not notice: a forkserver, their parent, outlives the trainer."""
    script = tmp_path / "loading.py"
    script.write_text(LOADING.format(tests=str(Path(__file__).parent), root=folders.data))
    trainer = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE)
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == b"loading\n"
    processes = psutil.Process(trainer.pid).children(recursive=True)
    assert len(processes) >= 2  # the server and a worker
    os.kill(trainer.pid, signal.SIGKILL)
    trainer.wait()
    _, alive = psutil.wait_procs(processes, timeout=60)
    for process in alive:
        process.kill()
    assert not alive


HANDED_OVER = """
import sys
sys.path.insert(0, {tests!r})
import psutil
from making import *
from recipe.data.batches import open_data, training_batches
from recipe.errors import one_message
if __name__ == "__main__":
    root = {root!r}
    config = a_config(
        train_dir=root + "/train", val_dir=root + "/val", cache_dir=root + "/cache",
        train_crop_size=400,
    )
    with one_message(a_world()):
        batches = training_batches(open_data(config), config, a_world(), CPU, 1, 0, 10**9)
        next(batches)
        psutil.Process().children(recursive=True)[-1].kill()
        list(batches)
"""


SMALL_SHM = "mount -t tmpfs -o size=1m tmpfs /dev/shm && exec {python} {script}"


@pytest.mark.parametrize("is_small", [True, rarely(False)])
def test_workers_that_cannot_hand_over_are_one_sentence(
    is_small: bool, folders: Config, tmp_path: Path
) -> None:
    """A batch larger than /dev/shm; and a worker that was killed."""
    script = tmp_path / "handed_over.py"
    script.write_text(HANDED_OVER.format(tests=str(Path(__file__).parent), root=folders.data))
    command = [sys.executable, str(script)]
    if is_small:
        mount = SMALL_SHM.format(python=sys.executable, script=script)
        command = ["unshare", "--mount", "sh", "-c", mount]
        if os.getuid() or shutil.which("unshare") is None:
            pytest.skip("a small /dev/shm needs root and unshare")
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 1
    words = "cannot hand over a batch of 1,9" if is_small else "a loader worker was killed"
    assert done.stderr.startswith("error: ") and words in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and "--workers 0" in done.stderr


# Both images become pipes when they are listed; the network is made when a worker has read them.
BEFORE_THE_NETWORK = """
import os, sys
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from recipe.errors import one_message
from recipe.start import Hooks, start
if __name__ == "__main__":
    engine, folder, image, *words = sys.argv[1:]
    pipes = [Path(folder, label, "0.png") for label in "ab"]
    config, world = start(engine, words)
    train = import_module(f"{engine}_train.train")
    build_model, open_data = train.build_model, train.open_data
    def listed(*args):
        data = open_data(*args)
        for pipe in pipes:
            os.unlink(pipe)
            os.mkfifo(pipe)
        return data
    def build(*args, **kwargs):
        content = Path(image).read_bytes()
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda pipe: pipe.write_bytes(content), pipes))
        print("read", flush=True)
        return build_model(*args, **kwargs)
    train.build_model, train.open_data = build, listed
    with one_message(world):
        sys.exit(train.main(config, world, Hooks()))
"""


@pytest.mark.launch
@pytest.mark.parametrize("engine", ["ddp", rarely("horovod")])
def test_the_first_batches_are_read_before_there_is_a_network(engine: str, tmp_path: Path) -> None:
    write_images(tmp_path / "train", 1, "ab")
    image = next(write_images(tmp_path / "val", 1, "ab").rglob("*.png"))
    script = tmp_path / "before.py"
    script.write_text(BEFORE_THE_NETWORK)
    words = ["--data", str(tmp_path), "--cache-dir", str(tmp_path / "cache"), "--max-steps", "1"]
    words += ["--arch", "resnet10", "--workers", "1", "--batch-size", "2", "--no-cuda"]
    words += ["--train-crop-size", "32", "--log-dir", str(tmp_path / "runs")]
    command = [sys.executable, str(script), engine, str(tmp_path / "train"), str(image), *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        try:
            assert "read\n" in trainer.stdout
        finally:
            trainer.kill()


# ---- bad images ----


@pytest.mark.parametrize("repeats", [1, 2, 3])
def test_a_file_is_decoded_whole_when_it_first_comes(
    folders: Config, repeats: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whichever epoch that is: with repeats each has only some of the files."""
    asked: dict[str, list[int]] = {}

    def decoded(content: bytes, name: str, rows: int) -> tuple[np.ndarray, int]:
        asked.setdefault(name, []).append(rows)
        return decode(content, name, rows)

    monkeypatch.setattr(images_module, "decode", decoded)
    config = replace(folders, augment_repeats=repeats)
    read_training(open_data(config), config, 1, 0, 20 * 9)
    assert len(asked) == 9
    assert {rows[0] for rows in asked.values()} == {10}, "the whole height"
    partly = [min(rows[1:]) < 10 for rows in asked.values()]
    assert sum(partly) > 6, "later no more than the crop needs, which is seldom all"


@pytest.fixture
def colored(tmp_path: Path) -> Config:
    """Nine images of one colour each; the largest of its parts tells the class."""
    for label, index in itertools.product(range(3), range(3)):
        file = tmp_path / "train" / "abc"[label] / f"{index}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        color = [50 * index] * 3
        color[label] = 200 + index
        Image.new("RGB", (12, 10), tuple(color)).save(file)
    write_images(tmp_path / "val", 1)
    return folder_config(tmp_path, bad_images="replace")


# By index: no image, one that is cut off, and one whose data has been zeroed in part.
BAD = {1: b"", 4: b"\x89PNG\r\n", 8: noisy_jpeg(bytes(64))}


def damage(config: Config) -> Data:
    """Nine images of which three are bad."""
    data = open_data(config)
    assert data.train is not None
    for index, content in BAD.items():
        Path(data.train.name(index)).write_bytes(content)
    return data


def test_another_image_takes_the_place_of_a_bad_one(colored: Config) -> None:
    """And of no other; with its own label. Damage is looked for in each epoch."""
    before = read_training(open_data(colored), colored, 1, 0, 36)[0]
    after = read_training(damage(colored), colored, 1, 0, 36)[0]
    positions = SampleStream(9, colored.seed).samples(np.arange(36))
    pairs = zip(*(itertools.chain(*(zip(*batch, strict=True) for batch in batches))
                  for batches in (before, after)), strict=True)  # fmt: skip
    for (_, index), ((was, old_label), (image, label)) in zip(positions, pairs, strict=True):
        assert torch.equal(was, image) == (index not in BAD)
        assert image.amax(dim=(1, 2)).argmax() == label
        assert old_label == index // 3


def test_the_same_one_at_any_number_of_ranks(colored: Config) -> None:
    data = damage(colored)
    alone = pixels(data, colored, 1)
    assert pixels(data, replace(colored, batch_size=2), 2) == alone
    assert pixels(data, replace(colored, batch_size=6), 3) == alone
    assert pixels(data, colored, 1, workers=2) == alone
    rest = pixels(data, colored, 1, start=20)
    assert rest <= alone and rest.total() == 16


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_images_are_told_with_their_reasons(colored: Config, workers: int) -> None:
    data, meter = damage(colored), InputMeter()
    list(training_batches(data, colored, a_world(), CPU, workers, 0, 36, meter))
    assert data.train is not None
    assert meter.replaced.keys() == BAD.keys()
    for index, words in {1: "It has 0 bytes", 4: "begins with", 8: "more than its pix"}.items():
        assert meter.replaced[index].startswith(f"{data.train.name(index)}: ")
        assert words in meter.replaced[index]


@st.composite
def contents(draw: st.DrawFn) -> bytes:
    """Any bytes, or an image that is cut off or changed."""
    content = bytearray(encoded(picture(), draw(st.sampled_from(["JPEG", "PNG", "GIF", "TIFF"]))))
    if draw(st.booleans()):
        return draw(st.binary(max_size=100))
    for _ in range(draw(st.integers(0, 20))):
        content[draw(st.integers(0, len(content) - 1))] = draw(st.integers(0, 255))
    return bytes(content[: draw(st.integers(0, len(content)))])


@settings(
    derandomize=True, deadline=None, max_examples=100,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(content=contents())
@pytest.mark.filterwarnings("ignore")  # Pillow's
def test_any_bytes_are_an_image_or_replaced(colored: Config, content: bytes) -> None:
    """Where they end a run under the one policy, the other one replaces them."""
    data, meter = open_data(colored), InputMeter()
    assert data.train is not None
    Path(data.train.name(4)).write_bytes(content)
    batches = training_batches(data, colored, a_world(), CPU, 0, 0, 9, meter)
    assert sum(len(labels) for _, labels in batches) == 12
    strict = replace(colored, bad_images="error")
    is_bad = pytest.raises(UserError, match=re.escape(data.train.name(4)))
    with is_bad if meter.replaced else contextlib.nullcontext():
        list(training_batches(data, strict, a_world(), CPU, 0, 0, 9))


class Failing:
    """A transform's last step fails for one image, whose pixels are all 201."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        if (image[2] == 201).all():
            raise self.error
        return image


@pytest.mark.parametrize("where", ["decoding", "transforming"])
@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "MemoryError"),
        (RuntimeError("can't allocate memory"), "can't allocate memory"),
        (OverflowError("too large"), "too large"),
        (zlib.error("bad"), "bad"),
        (Image.DecompressionBombError("bomb"), "bomb"),
    ],
)
def test_whatever_an_image_raises_names_it_or_replaces_it(
    colored: Config, where: str, error: Exception, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, opened = open_data(colored), Image.open
    assert data.train is not None
    content = data.train.read(7)
    if where == "decoding":
        fail = Mock(side_effect=error)
        monkeypatch.setattr(
            Image, "open", lambda file: fail() if file.getvalue() == content else opened(file)
        )
    else:
        monkeypatch.setattr(images_module, "_steps_after_crop", lambda config: [Failing(error)])
    meter = InputMeter()
    list(training_batches(data, colored, a_world(), CPU, 0, 0, 9, meter))
    reason = f"{data.train.name(7)}: cannot be read as an image ({words})"
    assert list(meter.replaced) == [7] and meter.replaced[7].startswith(reason)
    strict = replace(colored, bad_images="error")
    with pytest.raises(UserError, match=re.escape(reason)):
        list(training_batches(data, strict, a_world(), CPU, 0, 0, 9))


def test_an_error_in_validation_names_the_image(
    folders: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images_module, "resize", Mock(side_effect=RuntimeError("no memory")))
    with pytest.raises(UserError, match=r"val/a/0\.png: .*\(no memory\)"):
        list(validation_batches(open_data(folders), folders, a_world(), CPU, 0))


def test_where_no_good_image_is_found_training_ends(colored: Config) -> None:
    for file in Path(str(colored.train_dir)).glob("*/*.png"):
        file.write_bytes(b"")
    with pytest.raises(UserError, match=r"It has 0 bytes.* 5 replacements failed, too"):
        read_training(open_data(colored), colored, 1, 0, 4)


def test_validation_images_are_never_replaced(colored: Config) -> None:
    data = open_data(colored)
    assert data.val is not None
    Path(data.val.name(1)).write_bytes(b"")
    with pytest.raises(UserError, match=r"val/b/0\.png: cannot be read as an image"):
        list(validation_batches(data, colored, a_world(), CPU, 0))


def test_bad_images_are_counted_over_ranks(colored: Config) -> None:
    """Each is told once, whoever meets it, and however often."""
    data = open_data(colored)

    def of(rank: int, sum_over_ranks: Callable) -> list[dict[int, str]]:
        world, told = a_world(rank, 2), []
        meter = StepMeter(colored, world, CPU, data, Progress(), InputMeter())
        assert meter.input is not None
        for met in ({0: "empty", rank: "small"}, {0: "empty", rank + 1: "cut off"}):
            meter.input.replaced |= met
            told.append(meter.take_replaced(Ranks(world, sum_over_ranks)))
        return [*told, meter.replaced]

    expected = [{0: "small", 1: "small"}, {2: "cut off"}, {0: "small", 1: "small", 2: "cut off"}]
    for found in in_ranks(2, of):
        assert [dict.fromkeys(one) for one in found] == [dict.fromkeys(one) for one in expected]
        assert found[1] == expected[1]


@pytest.mark.parametrize(("num_images", "most"), [(9, 10), (10_999, 10), (20_000, 20)])
def test_too_many_bad_images_end_the_run(num_images: int, most: int) -> None:
    listing = Listing(Path("/a b"), ("a",), np.zeros(num_images, "S1"), np.zeros(num_images))
    check_replaced(listing, range(most))
    words = rf"{most + 1} of {num_images:,} .* {most} are let pass.*prepare check '/a b',"
    with pytest.raises(UserError, match=words):
        check_replaced(listing, range(most + 1))


# ---- Mixup and CutMix ----


KINDS = {"mixup": {"mixup_alpha": 0.7}, "cutmix": {"cutmix_alpha": 1.0}}
BOTH = {"mixup_alpha": 0.2, "cutmix_alpha": 1.0}


def numbered_images() -> tuple[torch.Tensor, torch.Tensor]:
    """Each image is of one value, its number; so are the labels."""
    numbers = torch.arange(4)
    return numbers.float().view(4, 1, 1, 1).expand(4, 3, 8, 8).clone(), numbers


@pytest.mark.parametrize("kind", KINDS)
def test_labels_have_the_shares_of_the_pixels(kind: str) -> None:
    """Image n keeps some of its value, and has the rest of n - 1."""
    config, kept = a_config(**KINDS[kind]), set()
    for images, shares in mixed([numbered_images()] * 20, config, 4, ((key,) for key in range(20))):
        share = float(shares[3, 3])
        kept.add(share)
        assert shares.sum(dim=1).tolist() == pytest.approx([1.0] * 4)
        assert shares[0, 3] == pytest.approx(1 - share)
        means = images.mean(dim=(1, 2, 3))
        assert means.tolist() == pytest.approx((shares @ torch.arange(4.0)).tolist(), abs=1e-5)
        assert images.unique().numel() == 4 or kind == "mixup", "a rectangle has whole pixels"
    assert len(kept) > 5, "another share for each batch"


def test_of_two_kinds_each_batch_takes_one() -> None:
    keys = ((key,) for key in range(30))
    pasted = [
        bool((images == images.round()).all())
        for images, _ in mixed([numbered_images()] * 30, a_config(**BOTH), 4, keys)
    ]
    assert 5 < sum(pasted) < 25


@pytest.mark.parametrize("channels_last", [False, True])
def test_the_key_alone_decides_and_the_layout_stays(channels_last: bool) -> None:
    config = a_config(**BOTH, channels_last=channels_last)
    ((images, shares),) = mixed([numbered_images()], config, 4, [(42, 0, 1)])
    torch.rand(5)
    before = torch.get_rng_state()
    ((again, same),) = mixed([numbered_images()], config, 4, [(42, 0, 1)])
    assert torch.equal(images, again) and torch.equal(shares, same)
    assert torch.equal(torch.get_rng_state(), before), "dropout draws what it would have drawn"
    layout = torch.channels_last if channels_last else torch.contiguous_format
    assert images.is_contiguous(memory_format=layout)


def test_training_goes_on_with_the_batches_that_it_would_have_had(tmp_path: Path) -> None:
    """Also where they grow. 24 images over two ranks: 3 batches of 4 each, and then of 8."""
    write_images(tmp_path / "train", 8)
    write_images(tmp_path / "val", 1)
    growing = {"batch_size": 8, "batch_size_warmup_epochs": 1}
    config = folder_config(tmp_path, **BOTH, **growing)
    data, world = open_data(config), a_world(1, 2)
    whole = list(training_batches(data, config, world, CPU, 0, 0, 56))
    assert [len(labels) for _, labels in whole] == [4] * 3 + [8] * 2
    for step, position in {2: 16, 4: 40}.items():
        rest = list(training_batches(data, config, world, CPU, 0, position, 56))
        for one, other in zip(whole[step:], rest, strict=True):
            assert all(map(torch.equal, one, other))
            images, shares = to_device(one, config, CPU)
            assert images is one[0] and shares.shape == (len(images), 3)
