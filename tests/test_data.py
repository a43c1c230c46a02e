"""From folders to batches on the device."""

import builtins
import contextlib
import errno
import itertools
import math
import re
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, MagicMock, Mock, call

import numpy as np
import psutil
import pytest
import simplejpeg
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from launching import ROOT, rarely
from making import CPU, a_config, a_world, folder_config, in_ranks, write_images
from needs import needs_gpu, skip_if_missing
from PIL import Image
from test_images import encoded, noisy_jpeg, picture

from recipe.data import batches as batches_module
from recipe.data import images as images_module
from recipe.data import loading as loading_module
from recipe.data.batches import (
    SYNTHETIC_CLASSES,
    Data,
    data_order_sha256,
    mixed,
    open_data,
    training_batches,
    validation_batches,
)
from recipe.data.decoding import decode
from recipe.data.image_folder import Listing
from recipe.data.images import TrainTransform
from recipe.data.loading import Batch, InputMeter, _one_ahead, check_replaced, to_device
from recipe.data.order import (
    Place,
    Sample,
    SampleStream,
    batch_places,
    next_step,
    permutation,
    samples_per_step,
    training_end,
)
from recipe.data.prepare import fault_of
from recipe.errors import BadImage, UserError, sentence
from recipe.ranks import Ranks
from recipe.record.meter import StepMeter
from recipe.settings.config import Config
from recipe.training.optimizers import learning_rate
from recipe.training.state import Progress
from tools.namespaces import is_root


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


def test_open_data(folders: Config) -> None:
    made_up = open_data(a_config(data="synthetic", synthetic_images=5000))
    assert made_up.train is None
    assert (made_up.num_train, made_up.num_val, made_up.num_classes) == (5000, 1000, 1000)
    # Folders that are named come first.
    data = open_data(replace(folders, data="synthetic"))
    assert (data.num_train, data.num_val, data.num_classes) == (9, 6, 3)


def read_training(
    data: Data, config: Config, size: int, start: int, stop: int
) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    return [
        list(training_batches(data, config, a_world(rank, size), CPU, 0, start, stop))
        for rank in range(size)
    ]


def test_who_measures_steps_gets_none_of_the_first_epoch(
    folders: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In which each file is decoded whole, to look for damage."""
    loaded = Mock(return_value=[])
    monkeypatch.setattr(batches_module, "load_batches", loaded)
    data = open_data(folders, epoch_images=1000)
    assert data.num_train == 1000
    read_training(data, folders, 1, 0, 36)
    keys = [key for _, samples in loaded.call_args.args[1] for key in samples]
    assert sorted(set(keys)) == [(1, index) for index in range(9)], "epoch 1 is not the first"


def pixels(data: Data, config: Config, size: int, start: int = 0) -> Counter[bytes]:
    """Those of the images that all ranks read until position 36."""
    return Counter(
        image.numpy().tobytes()
        for rank in read_training(data, config, size, start, 36)
        for images, _ in rank
        for image in images
    )


@pytest.mark.parametrize("padding", [None, 4])
@pytest.mark.parametrize("is_damaged", [False, True])
def test_pixels_do_not_depend_on_ranks(
    is_damaged: bool, padding: int | None, folders: Config, colored: Config
) -> None:
    """Augmentation, and what takes the place of a bad image, is drawn from (seed, epoch, index)
    alone: any split sees the same images."""
    config = replace(colored if is_damaged else folders, random_crop_padding=padding)
    data = damage(config) if is_damaged else open_data(config)
    alone = pixels(data, config, 1)
    assert pixels(data, replace(config, batch_size=2), 2) == alone
    assert pixels(data, replace(config, batch_size=6), 3) == alone
    assert pixels(data, replace(config, seed=1), 1) != alone
    rest = pixels(data, config, 1, start=20)
    assert rest <= alone and rest.total() == 16
    assert is_damaged or len(alone) > 30  # another crop in each epoch


def test_a_repeated_image_is_augmented_anew(data: Data, folders: Config) -> None:
    """Of a batch of 4 each image comes twice."""
    repeated = replace(folders, augment_repeats=2)
    (batches,) = read_training(data, repeated, 1, 0, 16)
    for images, labels in batches[:2]:
        assert labels[0] == labels[1] and labels[2] == labels[3]
        assert not torch.equal(images[0], images[1])
    assert data_order_sha256(data, repeated) != data_order_sha256(data, folders)


@pytest.mark.parametrize(
    ("size", "batch_size", "passes", "repeats"), [(1, 4, 1, 1), (2, 4, 1, 1), (2, 2, 2, 2)]
)
def test_images_grow_with_the_epochs(
    size: int, batch_size: int, passes: int, repeats: int, data: Data, folders: Config
) -> None:
    """All of a step are of one size, on all ranks and in all its batches, though an epoch ends
    within it: also where the first image of rank 1 is of the next epoch."""
    config = replace(
        folders,
        first_crop_size=32,
        train_crop_size=40,
        resize_epochs=(0, 1),
        batch_size=batch_size,
        batches_per_allreduce=passes,
        augment_repeats=repeats,
    )
    stop, step_samples = 3 * data.num_train, samples_per_step(config, a_world(0, size))
    expected = [
        32 if start < data.num_train else 40
        for start in range(0, stop, step_samples)
        for _ in range(passes)
    ]
    for batches in read_training(data, config, size, 0, stop):
        assert [images.shape[2] for images, _ in batches] == expected


def test_images_that_are_used_several_times_an_epoch_grow_with_it(folders: Config) -> None:
    """As in trainings that are measured: their samples skip the pass in which files are checked."""
    config = replace(folders, first_crop_size=32, train_crop_size=40, resize_epochs=(0, 1))
    (batches,) = read_training(open_data(config, epoch_images=20), config, 1, 0, 40)
    assert [images.shape[2] for images, _ in batches] == [32] * 5 + [40] * 5


@pytest.mark.parametrize("epochs", [(11, 13), (65, 76)])
def test_growth_is_that_of_ffcv(epochs: tuple[int, int]) -> None:
    """numpy's interpolation, divided by 32, rounded (to even) and multiplied again."""
    config = a_config(first_crop_size=160, train_crop_size=192, resize_epochs=epochs)
    sizes = [TrainTransform(config).size_in(epoch) for epoch in range(88)]
    assert sizes == (np.round(np.interp(range(88), epochs, (160, 192)) / 32) * 32).tolist()


def test_workers_change_nothing(folders: Config, tmp_path: Path) -> None:
    """Neither what is read nor what is counted of it."""
    files = sorted(write_images(tmp_path, 3).glob("*/*.png"))
    for index, file in enumerate(files):  # random images are all of one size
        file.write_bytes(file.read_bytes() + bytes(10 * index**2))
    config = replace(folders, train_dir=str(tmp_path), auto_augment="ta_wide")
    data, before, seen = open_data(config), torch.get_rng_state(), list[list[torch.Tensor]]()
    keys = SampleStream(data.num_train, config.seed).samples(np.arange(4, 24))
    sizes = [files[index].stat().st_size for _, index in keys]
    for workers in (0, 2):
        meter = InputMeter()
        batches = training_batches(data, config, a_world(), CPU, workers, 4, 24, meter)
        first = next(batches)
        assert (first[0].dtype, first[0].shape) == (torch.uint8, (4, 3, 8, 8))
        assert (meter.files, meter.bytes) == (4, sum(sizes[:4]))
        seen.append([tensor for batch in (first, *batches) for tensor in batch])
        assert (meter.files, meter.bytes) == (20, sum(sizes))
    assert len(seen[0]) == len(seen[1]) == 10 and all(map(torch.equal, *seen))
    # The loader starts in a session's first step, and a run that goes on has another one.
    assert torch.equal(torch.get_rng_state(), before), "dropout draws from it"


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


GREY = {"image_mean": (0.286,) * 3, "image_std": (0.353,) * 3}


@pytest.mark.parametrize("others", [{}, GREY])
@pytest.mark.parametrize("channels_last", [False, True])
def test_to_device(channels_last: bool, others: dict[str, Any]) -> None:
    images, labels = torch.randint(0, 256, (2, 3, 5, 5), dtype=torch.uint8), torch.tensor([1, 2])
    config = a_config(channels_last=channels_last, **others)
    moved, targets = to_device((images, labels), config, CPU)
    mean = torch.tensor(others.get("image_mean", [0.485, 0.456, 0.406]))
    std = torch.tensor(others.get("image_std", [0.229, 0.224, 0.225]))
    expected = (images.float() / 255 - mean.view(3, 1, 1)) / std.view(3, 1, 1)
    assert torch.allclose(moved, expected, atol=1e-5)
    assert moved.is_contiguous(memory_format=torch.channels_last) == channels_last
    assert torch.equal(targets, labels)


def test_each_batch_is_copied_while_the_one_before_is_used(
    folders: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of things, without a GPU."""
    told: list[str] = []
    side = Mock(record_event=Mock(side_effect=["copy 1", "copy 2", "copy 3"]))
    main = Mock(wait_event=lambda event: told.append(f"waits for {event}"))

    def copied(batch: Batch, config: Config, device: torch.device) -> Batch:
        told.append(f"copies {int(batch[1])}")
        return batch

    loading_module._copying_stream.cache_clear()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "stream", on := MagicMock())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda _, stream: told.append("kept"))
    monkeypatch.setattr(loading_module, "to_device", copied)
    batches = [(torch.zeros(1), torch.tensor(number)) for number in (1, 2, 3)]
    for _, label in _one_ahead(batches, folders, CPU):
        told.append(f"step {int(label)}")
    assert told == [
        "copies 1",
        "copies 2",
        "waits for copy 1",
        "kept",
        "kept",
        "step 1",
        "copies 3",
        "waits for copy 2",
        "kept",
        "kept",
        "step 2",
        "waits for copy 3",
        "kept",
        "kept",
        "step 3",
    ]
    assert set(map(str, on.call_args_list)) == {str(call(side))}
    assert list(_one_ahead([], folders, CPU)) == []


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("channels_last", [False, True])
def test_batches_on_a_gpu(data: Data, folders: Config, channels_last: bool, workers: int) -> None:
    """As on the CPU, and whole while the streams work side by side."""
    device, config = torch.device("cuda", 0), replace(folders, channels_last=channels_last)
    load, seen = torch.rand(4096, 4096, device=device), []
    for batch in training_batches(data, config, a_world(), device, workers, 0, 200):
        images, labels = to_device(batch, config, device)
        assert images.device == labels.device == device
        assert images.is_contiguous(memory_format=torch.channels_last) == channels_last
        load = torch.mm(load, load).clamp_(0, 1)  # the main stream is late
        seen.append((images.clone(), labels.clone()))
        images.fill_(math.nan)  # and the memory is used again
        del images, labels, batch
    on_cpu = training_batches(data, config, a_world(), CPU, 0, 0, 200)
    expected = [to_device(batch, config, CPU) for batch in on_cpu]
    assert len(seen) == len(expected) == 50
    for ours, theirs in zip(seen, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6, check_device=False)


LOADING = """
import itertools, multiprocessing.synchronize, os, sys, time
sys.path.insert(0, {tests!r})
import psutil
from making import *
from recipe.data.batches import open_data, training_batches
from recipe.errors import one_message
if __name__ == "__main__":
    numbers = itertools.count()
    semaphore = multiprocessing.synchronize.SemLock
    semaphore._make_name = staticmethod(lambda: f"/{{os.getpid()}}-{{next(numbers)}}")
    config = folder_config(Path({root!r}), train_crop_size=400)
    with one_message(a_world()):
        batches = training_batches(open_data(config), config, a_world(), CPU, 1, 0, 10**9)
        assert "torchvision" not in sys.modules  # two seconds of each loader's server
        next(batches)
        assert next(numbers) > 9
        print("loading", flush=True)
        {then}
"""


@pytest.fixture
def loading(folders: Config, tmp_path: Path) -> Callable[[str], Path]:
    """loading(then): a program that starts a loader worker, and then does that."""

    def written(then: str) -> Path:
        script, tests = tmp_path / "loading.py", str(Path(__file__).parent)
        script.write_text(LOADING.format(tests=tests, root=folders.data, then=then))
        return script

    return written


def test_workers_end_with_a_killed_trainer(loading: Callable[[str], Path]) -> None:
    """torch's own watch does not notice: a forkserver, their parent, outlives the trainer."""
    command = [sys.executable, str(loading("time.sleep(60)"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout.readline() == b"loading\n"
        processes = psutil.Process(trainer.pid).children(recursive=True)
        assert len(processes) >= 2  # the server and a worker
        assert not [*Path("/dev/shm").glob(f"sem.{trainer.pid}-*")], "names are left"
        trainer.kill()
    _, alive = psutil.wait_procs(processes, timeout=300)
    for process in alive:
        process.kill()
    assert not alive


KILLED_AS_A_GROUP = """
import multiprocessing, os
from recipe.start import start_loaders_server
start_loaders_server()
lock = multiprocessing.get_context("forkserver").Lock()
print(lock._semlock.name.removeprefix("/"), flush=True)
os.killpg(0, 9)
"""


def test_a_launcher_that_kills_all_processes_of_a_rank_leaves_no_semaphore() -> None:
    """As mpirun does, when workers may not have begun, and the semaphores still have names."""
    command = [sys.executable, "-c", KILLED_AS_A_GROUP]
    done = subprocess.run(command, capture_output=True, start_new_session=True, text=True, cwd=ROOT)
    assert done.returncode == -signal.SIGKILL and not done.stderr
    name = done.stdout.strip()
    assert name and not Path(f"/dev/shm/sem.{name}").exists()


# In the midst of fetching a batch: the worker has sent its challenge.
DIES_FETCHING = """
        multiprocessing.connection.answer_challenge = lambda *_: os.kill(os.getpid(), 9)
        next(batches)
"""


def test_a_worker_says_nothing_of_a_trainer_that_was_killed(
    loading: Callable[[str], Path],
) -> None:
    """Whose end comes to it as an error, if it was just handing over a batch."""
    command = [sys.executable, str(loading(DIES_FETCHING))]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL
    assert not done.stderr


def test_a_worker_says_what_else_keeps_it_from_handing_over(
    capsys: pytest.CaptureFixture[str],
) -> None:
    loading_module._show_error(OSError, OSError(errno.EMFILE, "Too many open files"), None)
    assert "Too many open files" in capsys.readouterr().err


SMALL_SHM = "mount -t tmpfs -o size=1m tmpfs /dev/shm && exec {python} {script}"


@pytest.mark.parametrize("is_small", [True, rarely(False)])
def test_workers_that_cannot_hand_over_are_one_sentence(
    is_small: bool, loading: Callable[[str], Path]
) -> None:
    """A batch larger than /dev/shm; and a worker that was killed."""
    script = loading("psutil.Process().children(recursive=True)[-1].kill(); list(batches)")
    command = [sys.executable, str(script)]
    if is_small:
        mount = SMALL_SHM.format(python=sys.executable, script=script)
        command = ["unshare", "--mount", "sh", "-c", mount]
        skip_if_missing([] if is_root() else ["root"], "a small /dev/shm")
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    words = "cannot hand over a batch of 1,9" if is_small else "a loader worker was killed"
    assert done.stderr.startswith("error: ") and words in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and "--workers 0" in done.stderr


# ---- bad images ----


@pytest.mark.parametrize("repeats", [1, 2, 3])
def test_a_file_is_decoded_whole_when_it_first_comes(
    folders: Config, repeats: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whichever epoch that is: with repeats each has only some of the files."""
    decoded = Mock(wraps=decode)
    monkeypatch.setattr(images_module, "decode", decoded)
    config, asked = replace(folders, augment_repeats=repeats), defaultdict[str, list[int]](list)
    read_training(open_data(config), config, 1, 0, 20 * 9)
    for _, name, rows in (asking.args for asking in decoded.call_args_list):
        asked[name].append(rows)
    assert [rows[0] for rows in asked.values()] == [10] * 9, "the whole height"
    partly = [min(rows[1:]) < 10 for rows in asked.values()]
    assert sum(partly) > 6, "later no more than the crop needs, which is seldom all"


@pytest.fixture
def colored(tmp_path: Path) -> Config:
    """Nine images of one colour each; the largest of its parts tells the class."""
    for file in write_images(tmp_path / "train", 3).glob("*/*.png"):
        color = [50 * int(file.stem)] * 3
        color["abc".index(file.parent.name)] = 200 + int(file.stem)
        Image.new("RGB", (12, 10), tuple(color)).save(file)
    write_images(tmp_path / "val", 1)
    return folder_config(tmp_path, bad_images="replace")


# By index: no image, one that is cut off, and one whose data has been zeroed in part.
BAD = {
    1: (b"", "It has 0 bytes"),
    4: (b"\x89PNG\r\n", "begins with"),
    8: (noisy_jpeg(bytes(64)), "more than its pixels"),
}


def damage(config: Config) -> Data:
    """Nine images of which three are bad."""
    data = open_data(config)
    for index, (content, _) in BAD.items():
        Path(data.train.name(index)).write_bytes(content)
    return data


def test_another_image_takes_the_place_of_a_bad_one(colored: Config) -> None:
    """And of no other; with its own label; a loader worker, too, says why. Damage is looked for in
    each epoch."""
    before = read_training(open_data(colored), colored, 1, 0, 36)[0]
    data, meter = damage(colored), InputMeter()
    after = list(training_batches(data, colored, a_world(), CPU, 1, 0, 36, meter))
    positions = SampleStream(9, colored.seed).samples(np.arange(36))
    pairs = zip(
        *(
            itertools.chain(*(zip(*batch, strict=True) for batch in batches))
            for batches in (before, after)
        ),
        strict=True,
    )
    for (_, index), ((was, old_label), (image, label)) in zip(positions, pairs, strict=True):
        assert torch.equal(was, image) == (index not in BAD)
        assert image.amax(dim=(1, 2)).argmax() == label
        assert old_label == index // 3
    assert meter.replaced.keys() == BAD.keys()
    for index, (_, words) in BAD.items():
        assert re.match(f"{data.train.name(index)}: .*{words}", meter.replaced[index])


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
    derandomize=True,
    deadline=None,
    max_examples=100,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(content=contents())
@pytest.mark.filterwarnings("ignore")  # Pillow's
def test_any_bytes_are_an_image_or_replaced(colored: Config, content: bytes) -> None:
    """Where they end a run under the one policy, the other one replaces them."""
    data, meter = open_data(colored), InputMeter()
    Path(data.train.name(4)).write_bytes(content)
    batches = training_batches(data, colored, a_world(), CPU, 0, 0, 9, meter)
    assert sum(len(labels) for _, labels in batches) == 12
    strict = replace(colored, bad_images="error")
    is_bad = pytest.raises(UserError, match=re.escape(data.train.name(4)))
    with is_bad if meter.replaced else contextlib.nullcontext():
        list(training_batches(data, strict, a_world(), CPU, 0, 0, 9))


@pytest.mark.parametrize("error", [KeyError(), Image.DecompressionBombError("bomb")])
def test_whatever_an_image_raises_names_it_or_replaces_it(
    colored: Config, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In training; in validation none is replaced."""
    owner, name = Image, "open"
    works, data, meter = getattr(owner, name), open_data(colored), InputMeter()
    message = rf"\.png: cannot be read as an image \({str(error) or 'KeyError'}"
    strict = replace(colored, bad_images="error")
    for batches in (
        training_batches(data, colored, a_world(), CPU, 0, 0, 9, meter),
        training_batches(data, strict, a_world(), CPU, 0, 0, 9),
        validation_batches(data, colored, a_world(), CPU, 0),
    ):
        fails_first = Mock(
            wraps=works, side_effect=itertools.chain([error], itertools.repeat(DEFAULT))
        )
        monkeypatch.setattr(owner, name, fails_first)
        is_replaced = not meter.replaced
        with contextlib.nullcontext() if is_replaced else pytest.raises(UserError, match=message):
            list(batches)
    ((_, reason),) = meter.replaced.items()
    assert re.search(message, reason)


LIMIT = "Insufficient memory (case 4)"  # libjpeg-turbo's words


@pytest.mark.parametrize(
    ("owner", "name", "error", "raised"),
    [
        (Image, "open", MemoryError(), MemoryError),
        (Image, "open", OSError(errno.EMFILE, "Too many open files"), OSError),
        (Image, "open", KeyboardInterrupt(), KeyboardInterrupt),
        (simplejpeg, "decode_jpeg", ValueError(LIMIT), ValueError),
        (images_module, "resize", MemoryError(), MemoryError),
        (images_module, "resize", RuntimeError("a bug of ours"), RuntimeError),
        (TrainTransform, "draw", ValueError("a bug of ours"), ValueError),
        (Listing, "read", UserError("a bug of ours"), UserError),
        (builtins, "open", OSError(errno.EMFILE, "Too many open files"), UserError),
        (builtins, "open", OSError(errno.ENOMEM, "Cannot allocate memory"), UserError),
    ],
)
def test_what_is_no_fault_of_an_image_replaces_none(
    owner: Any,
    name: str,
    error: BaseException,
    raised: type[BaseException],
    colored: Config,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It ends the run, as it is; a check does not list the image either."""
    data, meter = open_data(colored), InputMeter()
    if owner is simplejpeg:
        Path(data.train.name(4)).write_bytes(noisy_jpeg())
    monkeypatch.setattr(owner, name, Mock(side_effect=error))
    with pytest.raises(raised) as caught:
        list(training_batches(data, colored, a_world(), CPU, 0, 0, 9, meter))
    assert not isinstance(caught.value, BadImage) and not meter.replaced
    if owner is not images_module and owner is not TrainTransform:
        with pytest.raises(raised) as caught:
            fault_of(data.train, 4)
        assert not isinstance(caught.value, BadImage)


def test_a_file_that_is_gone_or_forbidden_is_replaced(colored: Config) -> None:
    data, meter = open_data(colored), InputMeter()
    Path(data.train.name(4)).unlink()
    assert list(training_batches(data, colored, a_world(), CPU, 1, 0, 9, meter))
    assert re.search(r"cannot be read \(No such file", meter.replaced[4])
    strict = replace(colored, bad_images="error")
    with pytest.raises(BadImage) as caught:  # in a loader worker: one sentence
        list(training_batches(data, strict, a_world(), CPU, 1, 0, 9))
    assert re.match(rf"{data.train.name(4)}: cannot be read \(No such file", sentence(caught.value))


def test_where_no_good_image_is_found_training_ends(colored: Config) -> None:
    for file in Path(str(colored.train_dir)).glob("*/*.png"):
        file.write_bytes(b"")
    with pytest.raises(UserError, match=r"It has 0 bytes.* 5 replacements failed, too"):
        read_training(open_data(colored), colored, 1, 0, 4)


def test_bad_images_are_counted_over_ranks(colored: Config) -> None:
    """Each is told once, whoever meets it, and however often."""
    data = open_data(colored)

    def of(rank: int, sum_over_ranks: Callable) -> list[dict[int, str]]:
        world, told = a_world(rank, 2), []
        meter = StepMeter(colored, world, CPU, data, Progress())
        for met in ({0: "empty", rank: "small"}, {0: "empty", rank + 1: "cut off"}):
            meter.train_input.replaced |= met
            told.append(meter.take_replaced(Ranks(world, sum_over_ranks)))
        return [*told, meter.replaced]

    for first, second, both in in_ranks(2, of):
        assert (first.keys(), second, both.keys()) == ({0, 1}, {2: "cut off"}, {0, 1, 2})


@pytest.mark.parametrize(("num_images", "most"), [(9, 10), (10_999, 10), (20_000, 20)])
def test_too_many_bad_images_end_the_run(num_images: int, most: int) -> None:
    listing = Listing(Path("/a b"), ("a",), np.zeros(num_images, "S1"), np.zeros(num_images))
    check_replaced(listing, range(most))
    words = rf"{most + 1} of {num_images:,} .* {most} are allowed.*prepare check '/a b',"
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
    kept = set()
    keys = ((key,) for key in range(20))
    for images, shares in mixed([numbered_images()] * 20, a_config(**KINDS[kind]), 4, keys):
        share = float(shares[3, 3])
        kept.add(share)
        expected = share * torch.eye(4) + (1 - share) * torch.eye(4).roll(-1, dims=1)
        assert torch.allclose(shares, expected)
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
def test_training_goes_on_with_the_batches_that_it_would_have_had(
    tmp_path: Path, channels_last: bool
) -> None:
    """Also where they grow. 24 images over two ranks: 3 batches of 4 each, and then of 8. The key
    alone decides what Mixup and CutMix draw, and dropout draws what it would have drawn."""
    write_images(tmp_path / "train", 8)
    write_images(tmp_path / "val", 1)
    growing = {"batch_size": 8, "batch_size_warmup_epochs": 1, "channels_last": channels_last}
    config = folder_config(tmp_path, **BOTH, **growing)
    data, world = open_data(config), a_world(1, 2)
    whole = list(training_batches(data, config, world, CPU, 0, 0, 56))
    assert [len(labels) for _, labels in whole] == [4] * 3 + [8] * 2
    kept = {float(shares[shares > 0].min()) for _, shares in whole}
    assert len(kept) > 2, "each batch is mixed in its own way"
    layout = torch.channels_last if channels_last else torch.contiguous_format
    torch.rand(5)
    before = torch.get_rng_state()
    for step, position in {2: 16, 4: 40}.items():
        rest = list(training_batches(data, config, world, CPU, 0, position, 56))
        for batch, other in zip(whole[step:], rest, strict=True):
            assert all(map(torch.equal, batch, other))
            images, shares = to_device(batch, config, CPU)
            assert images is batch[0] and shares.shape == (len(images), 3)
            assert images.is_contiguous(memory_format=layout)
    assert torch.equal(torch.get_rng_state(), before)


# ---- which images each step reads, how many, and at which learning rate ----


counts = st.integers(1, 200)
small = st.integers(1, 8)
quick = settings(max_examples=60, deadline=None)


def read(stream: SampleStream, start: int, stop: int, batch: int, size: int) -> list[Sample]:
    """The samples that all ranks together read, step by step."""
    places = [Place(position, batch, 0) for position in range(start, stop, batch * size)]
    ranks = [list(stream.batches(places, rank, size)) for rank in range(size)]
    assert all(len(samples) == batch for batches in ranks for samples in batches)
    return [sample for step in zip(*ranks, strict=True) for samples in step for sample in samples]


@quick
@given(counts, small, small, st.integers(1, 5), small, small, st.integers(0, 20))
def test_each_image_of_an_epoch_so_many_times(
    num_images: int, batch: int, size: int, repeats: int, new_batch: int, new_size: int, steps: int
) -> None:
    """Once, or as often as it repeats: one after the other, each time in another pass; also over a
    resume at another world size."""
    stream, position = SampleStream(num_images, 7, repeats=repeats), steps * batch * size
    before = read(stream, 0, position, batch, size) if steps else []
    end = (position // num_images + 2) * num_images
    seen = before + read(stream, position, end, new_batch, new_size)
    assert len(set(seen)) == len(seen), "no image twice with the same augmentation"
    for epoch in range(end // num_images):
        passes = range(epoch * repeats, (epoch + 1) * repeats)
        order = np.repeat(permutation(num_images, 7, epoch), repeats)[:num_images].tolist()
        assert sorted(index for number, index in seen if number in passes) == sorted(order)
    ahead = stream.samples(np.arange(num_images))
    assert [index for _, index in ahead] == np.repeat(permutation(num_images, 7, 0), repeats)[
        :num_images
    ].tolist()


def test_ranks_take_turns() -> None:
    stream = SampleStream(100, 0)
    ahead = stream.samples(np.arange(12))
    assert list(stream.batches([Place(0, 3, 0), Place(6, 3, 0)], 1, 2)) == [
        ahead[1:6:2],
        ahead[7:12:2],
    ]


def test_order_depends_on_seed_and_epoch_alone() -> None:
    """And is fixed: else runs of older versions could not be resumed."""
    others = [permutation(8, 1, 0), permutation(8, 42, 1)]
    np.random.seed(5)
    assert permutation(8, 42, 0).tolist() == [3, 4, 2, 7, 6, 1, 5, 0]
    assert not any(np.array_equal(permutation(8, 42, 0), other) for other in others)


# ---- batches that grow from epoch to epoch ----


@pytest.mark.parametrize(
    ("batch_size", "warmup", "expected"),
    [
        (12, 2, [4, 8, 12, 12, 12]),
        (10, 2, [4, 7, 10, 10, 10]),
        (49, 47, [2, 3, 4, 5, 6]),
        (10, 0, [10] * 5),
    ],
)
def test_batches_grow_by_equal_steps_and_are_rounded_up(
    batch_size: int, warmup: int, expected: list[int]
) -> None:
    config = a_config(batch_size=batch_size, batch_size_warmup_epochs=warmup)
    assert [samples_per_step(config, a_world(), epoch) for epoch in range(5)] == expected
    several = replace(config, batches_per_allreduce=3)
    assert samples_per_step(several, a_world(0, 5), 0) == 15 * expected[0]
    assert samples_per_step(several, a_world(0, 5)) == 15 * batch_size


def places_of(config: Config, size: int, count: int, start: int, stop: int) -> list[Place]:
    return list(batch_places(config, a_world(0, size), count, start, stop))


def test_steps_that_are_left_out_are_not_made() -> None:
    config = a_config(batch_size=2, batches_per_allreduce=2)
    left_out = [(12, 12), (48, 12)]
    places = [*batch_places(config, a_world(0, 3), 100, 0, 60, left_out)]
    assert places == [(start, 2, 0) for start in (0, 6, 24, 30, 36, 42)]
    others = [*batch_places(config, a_world(0, 5), 100, 0, 80, [(25, 12)])]
    assert others == [(start, 2, 0) for start in (0, 10, 40, 50, 60, 70)]


@quick
@given(
    st.integers(1, 150),
    st.integers(1, 9),
    small,
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(1, 40) | st.none(),
    st.lists(st.integers(1, 99), max_size=6),
    st.data(),
)
def test_a_run_leaves_out_the_same_images_and_ends_at_the_same_step_however_often_it_is_resumed(
    count: int,
    batch: int,
    size: int,
    passes: int,
    warmup: int,
    max_steps: int | None,
    gaps: list[int],
    drawn: st.DataObject,
) -> None:
    """Also at another number of workers. A step that was left out counts towards --max-steps."""
    config = a_config(
        batch_size=batch,
        batches_per_allreduce=passes,
        batch_size_warmup_epochs=warmup,
        epochs=5,
        max_steps=max_steps,
    )
    bounds = [*itertools.accumulate(gaps)]
    left_out = [(begin, end - begin) for begin, end in zip(bounds[::2], bounds[1::2], strict=False)]

    def run(size: int, step: int, position: int) -> list[int]:
        """Return where each step begins, and where training ends."""
        world = a_world(0, size)
        position = next_step(config, world, count, position, left_out)
        last_step, stop = training_end(config, world, count, step, position, left_out)
        places = list(batch_places(config, world, count, position, stop, left_out))
        starts = [place.position for place in places[::passes]]
        assert len(starts) == last_step - step
        for number, start in enumerate(starts):
            end = start + samples_per_step(config, world, start // count)
            assert not any(begin < end and start < begin + num for begin, num in left_out)
            assert start < 5 * count and not is_last(step + number, start)
        assert stop >= 5 * count or is_last(last_step, stop)
        return [*starts, stop]

    def is_last(step: int, position: int) -> bool:
        made_or_left_out = step + sum(begin < position for begin, _ in left_out)
        return max_steps is not None and made_or_left_out >= max_steps

    whole = run(size, 0, 0)
    step = drawn.draw(st.integers(0, len(whole) - 1))
    assert run(size, step, whole[step]) == whole[step:]
    run(drawn.draw(small), step, whole[step])


@quick
@given(st.integers(1, 150), st.integers(3, 9), small, small, st.integers(0, 3), st.data())
def test_a_resumed_run_goes_on_exactly(
    count: int, batch: int, size: int, passes: int, warmup: int, drawn: st.DataObject
) -> None:
    """Where each step begins, how many images it has, and where training ends; at another number
    of workers each image still comes once an epoch."""
    config = a_config(
        batch_size=batch, batches_per_allreduce=passes, batch_size_warmup_epochs=warmup, epochs=5
    )
    world = a_world(0, size)
    last_step, stop = training_end(config, world, count, 0, 0)
    whole = places_of(config, size, count, 0, stop)
    starts = [place.position for place in whole[::passes]]
    assert len(starts) == last_step and starts[-1] < 5 * count <= stop
    for start, end in pairwise([*starts, stop]):
        assert end - start == samples_per_step(config, world, start // count)
    step = drawn.draw(st.integers(0, last_step - 1))
    assert training_end(config, world, count, step, starts[step]) == (last_step, stop)
    assert places_of(config, size, count, starts[step], stop) == whole[step * passes :]

    other = drawn.draw(small)
    _, end = training_end(config, a_world(0, other), count, step, starts[step])
    stream, seen = SampleStream(count, 7), list[Sample]()
    for places, ranks in (
        (whole[: step * passes], size),
        (places_of(config, other, count, starts[step], end), other),
    ):
        for rank in range(ranks):
            seen += itertools.chain(*stream.batches(places, rank, ranks))
    assert len(set(seen)) == len(seen)
    assert {(epoch, index) for epoch in range(5) for index in range(count)} <= set(seen)


@pytest.mark.parametrize(
    ("max_steps", "step", "seen", "end"),
    [
        (None, 0, 0, (5 + 5, 5 * 4 + 5 * 8)),  # of 20 images an epoch
        (None, 5, 20, (10, 60)),
        (7, 0, 0, (7, 20 + 16)),
        (7, 7, 36, (7, 36)),
        (7, 9, 52, (9, 52)),  # a run that went on with fewer steps has had them
        (None, 10, 60, (10, 60)),
    ],
)
def test_training_ends(max_steps: int | None, step: int, seen: int, end: tuple[int, int]) -> None:
    """What is only evaluated has ended."""
    config = a_config(batch_size=8, batch_size_warmup_epochs=1, epochs=3, max_steps=max_steps)
    assert training_end(config, a_world(), 20, step, seen) == end
    evaluation = replace(config, evaluate=True)
    assert training_end(evaluation, a_world(), 20, step, seen) == (step, seen)


def test_the_rate_grows_with_the_batch() -> None:
    """Also where the batch is rounded: the schedule knows epochs alone."""
    base = a_config(base_lr=0.1, warmup_epochs=2.0, epochs=5, batch_size=10)
    growing = replace(base, batch_size_warmup_epochs=2)
    for epoch, share in {0: 1 / 3, 0.9: 1 / 3, 1: 2 / 3, 1.9: 2 / 3, 2: 1, 4.5: 1}.items():
        for scale in (1, 8):
            rate = learning_rate(base, epoch, scale)
            assert learning_rate(growing, epoch, scale) == pytest.approx(share * rate)


# ---- the learning rate ----


STEP = a_config(
    lr_scheduler="step",
    base_lr=0.1,
    warmup_epochs=5.0,
    lr_step_epochs=(30, 60, 80),
    lr_gamma=0.1,
    epochs=90,
)
COSINE = a_config(lr_scheduler="cosine", base_lr=0.1, warmup_epochs=5.0, epochs=25, lr_min=0.01)
JUST_BELOW = 1 - 1e-12


QUARTER = 0.5 * (1 + math.cos(math.pi / 4))
# Settings, and the rates of eight workers by epoch.
RATES: dict[str, tuple[Config, dict[str, Any], dict[float, float]]] = {
    **{
        f"gradual warm-up, from one worker's rate, {config.lr_scheduler}": (
            config,
            {},
            {0: 0.1, 2.5: 0.45, 5 * JUST_BELOW: 0.8, 5: 0.8},
        )
        for config in (STEP, COSINE)
    },
    "linear warm-up, from near zero": (
        STEP,
        {"warmup_method": "linear"},
        {0: 0.008, 2.5: 0.404, 5: 0.8},
    ),
    "none": (STEP, {"warmup_epochs": 0.0}, {0: 0.8}),
    "steps": (
        STEP,
        {},
        {
            30 * JUST_BELOW: 0.8,
            30: 0.08,
            60 * JUST_BELOW: 0.08,
            60: 0.008,
            80 * JUST_BELOW: 0.008,
            80: 0.0008,
            90: 0.0008,
        },
    ),
    # The last batch may pass the end.
    "cosine": (COSINE, {}, {5: 0.8, 10: 0.01 + 0.79 * QUARTER, 15: 0.405, 25: 0.01, 26: 0.01}),
    "linear": (
        COSINE,
        {"lr_scheduler": "linear"},
        {5: 0.8, 10: 0.6025, 15: 0.405, 25: 0.01, 26: 0.01},
    ),
    "a cosine with restarts is several: of the lengths 5, 10 and 5": (
        COSINE,
        {"lr_restart_epochs": (10, 20)},
        {
            5: 0.8,
            7.5: 0.405,
            10 * JUST_BELOW: 0.01,
            10: 0.8,
            15: 0.405,
            20 * JUST_BELOW: 0.01,
            20: 0.8,
            22.5: 0.405,
            25: 0.01,
            26: 0.01,
        },
    ),
    "warm-up to the end": (
        COSINE,
        {"warmup_epochs": 25.0},
        {25 * JUST_BELOW: 0.8, 25: 0.8},  # no time is left
    ),
}


@pytest.mark.parametrize("case", RATES)
def test_rates(case: str) -> None:
    base, settings, rates = RATES[case]
    config = replace(base, **settings)
    assert {at: learning_rate(config, at, 8) for at in rates} == pytest.approx(rates)


def test_one_worker_needs_no_gradual_warm_up() -> None:
    assert {learning_rate(STEP, epoch / 10, 1) for epoch in range(50)} == {0.1}
