"""The images of a run, and the batches of them that each rank gets: what the trainers call."""

import functools
import hashlib
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recipe import watch
from recipe.data.dali import EncodedImages, dali_batches
from recipe.data.digits import open_digits
from recipe.data.idx import open_fashion_mnist
from recipe.data.image_folder import Listing, check_train_and_val
from recipe.data.images import TrainTransform, ValTransform, seeded
from recipe.data.loading import (
    Batch,
    Images,
    InputMeter,
    copied_ahead,
    counted,
    load_batches,
    to_device,
)
from recipe.data.memory import ImagesInMemory
from recipe.data.order import (
    SampleStream,
    Spans,
    batch_places,
    next_step,
    permutation,
    training_end,
)
from recipe.data.shards import Shards, open_images
from recipe.settings.config import Config
from recipe.world import World

SYNTHETIC_CLASSES = 1000


@dataclass(frozen=True)
class Data:
    """The images of a run. `train` and `val` are None for synthetic data: random pixels, made once
    on the device."""

    train: Listing | None
    val: Listing | None
    num_train: int  # per epoch
    num_val: int
    num_classes: int

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, in the order of the labels; empty for synthetic data."""
        return self.train.classes if self.train is not None else ()

    @functools.cached_property
    def identity(self) -> dict[str, Any]:
        """What must be unchanged for a run to resume: the number of images, and a digest of their
        names, labels and classes, which is the same for files and shards. For shards and images in
        memory, also a digest of their checksums. A digest of one permutation shows that numpy still
        orders images the same way, which may change with its version."""
        digest = hashlib.sha256()
        facts = {
            "num_train": self.num_train,
            "num_val": self.num_val,
            "order_sha256": hashlib.sha256(permutation(10_000, 0, epoch=0).tobytes()).hexdigest(),
        }
        for part, listing in (("train", self.train), ("val", self.val)):
            if listing is not None:
                digest.update(os.fsencode("\0".join(listing.classes)))
                digest.update(listing.paths.tobytes() + listing.labels.tobytes())
            if isinstance(listing, (Shards, ImagesInMemory)):
                contents = hashlib.sha256(listing.checksums.tobytes()).hexdigest()
                facts[f"{part}_contents_sha256"] = contents
        return {**facts, "sha256": digest.hexdigest()}


def open_data(config: Config, epoch_images: int = 0) -> Data:
    """List the images and check the folders. An epoch has at least `epoch_images` samples: if there
    are fewer images, they are used again.

    UserError for anything wrong with a folder, before training starts.
    """
    if not config.reads_images:
        return Data(
            None,
            None,
            max(config.synthetic_images, epoch_images),
            min(config.synthetic_images, 1000),
            SYNTHETIC_CLASSES,
        )
    watch.begin("listing the images")
    if config.train_dir and config.val_dir:
        cache = Path(config.cache_dir)
        train, val = (open_images(Path(root), cache) for root in (config.train_dir, config.val_dir))
    elif config.data == "fashion-mnist":
        train, val = open_fashion_mnist()
    else:
        train, val = open_digits("train"), open_digits("val")
    check_train_and_val(train, val)
    return Data(train, val, max(len(train), epoch_images), len(val), len(train.classes))


def training_batches(
    data: Data,
    config: Config,
    world: World,
    device: torch.device,
    workers: int,
    start: int,
    stop: int,
    meter: InputMeter | None = None,
    left_out: Spans = (),
) -> Iterator[Batch]:
    """Return this rank's batches from stream position `start` until `stop`, both in samples over
    all ranks and where a step begins, without the steps that have `left_out` samples.

    One iterator serves the whole training: the loader's workers start once, at this call, and read
    ahead across epochs. `meter` counts the files that are read. With --mixup-alpha or
    --cutmix-alpha the batches are normalised and on the device, and their labels are shares of
    classes, float [N, classes].
    """
    if start >= stop:
        return iter(())
    meter = meter or InputMeter()
    num_files = data.num_train if data.train is None else len(data.train)
    stream = SampleStream(data.num_train, config.seed, num_files, config.augment_repeats)
    places = functools.partial(batch_places, config, world, data.num_train, start, stop, left_out)
    batches = stream.batches(places(), world.rank, world.size)
    if num_files < data.num_train:  # skip pass 0, in which files are decoded whole to find damage
        batches = ([(number + 1, index) for number, index in keys] for keys in batches)
    if data.train is None:
        ready = _synthetic_batches(
            config.batch_size, config.train_crop_size, map(len, batches), device
        )
    elif config.dali:
        # DALI takes memory that is not pinned, and prefetches by itself.
        encoded = load_batches(
            EncodedImages(data.train, config), batches, torch.device("cpu"), workers
        )
        ready = dali_batches(encoded, data.train, config, device, meter)
    else:
        transform = TrainTransform(config)
        sizes = (transform.size_in(epoch) for _, _, epoch in places())
        sized = zip(sizes, batches, strict=True)
        reads = load_batches(Images(data.train, config, transform), sized, device, workers)
        ready = copied_ahead(counted(reads, data.train, meter), config, device)
    if config.mixup_alpha or config.cutmix_alpha:
        keys = ((config.seed, position, world.rank) for position, _, _ in places())
        ready = (to_device(batch, config, device) for batch in ready)
        ready = mixed(ready, config, data.num_classes, keys)
    return ready


class BatchReader:
    """Reads this rank's training batches, from a place in the stream to the end of training.

    `world` is this rank's place among the ranks that read different images: among all ranks, except
    in a few rungs. The first batches are read while the network is built, unless only a checkpoint
    says where training begins.
    """

    def __init__(
        self, config: Config, data: Data, world: World, device: torch.device, workers: int
    ) -> None:
        self.config, self.data, self.world, self.device = config, data, world, device
        self.workers, self.meter = workers, InputMeter()
        self.left_out: list[tuple[int, int]] = []  # what --rollback leaves out, as in Spans
        watch.begin("building the network")
        if config.resume is None:
            self.begin(step=0, position=0)

    def next_step(self, position: int) -> int:
        """Return where the next step begins, from `position` on, behind what is left out there."""
        return next_step(self.config, self.world, self.data.num_train, position, self.left_out)

    def begin(self, step: int, position: int) -> None:
        """Read batches after `step`, from `position` on; loader workers start at once."""
        self.batches: Iterator[Batch] = iter(())  # ends earlier workers, and frees shared memory
        self.first_step = step
        self.last_step, self.stop = training_end(
            self.config, self.world, self.data.num_train, step, position, self.left_out
        )
        self.batches = training_batches(
            self.data,
            self.config,
            self.world,
            self.device,
            self.workers,
            position,
            self.stop,
            self.meter,
            self.left_out,
        )


def mixed(
    batches: Iterable[Batch], config: Config, num_classes: int, keys: Iterable[tuple[int, ...]]
) -> Iterator[Batch]:
    """Apply Mixup or CutMix to normalised `batches` (float [N, 3, H, W], int64 [N]). The labels
    become the shares of classes in each image (float [N, num_classes]).

    The random numbers for a batch depend on its key alone, so a resumed run and the other engine
    mix in the same way.
    """
    from torchvision.transforms import v2  # here, to spare the loader's server two seconds

    alphas = {v2.MixUp: config.mixup_alpha, v2.CutMix: config.cutmix_alpha}
    mix = v2.RandomChoice(
        [kind(alpha=alpha, num_classes=num_classes) for kind, alpha in alphas.items() if alpha]
    )
    layout = torch.channels_last if config.channels_last else torch.contiguous_format
    for (images, labels), key in zip(batches, keys, strict=False):
        with seeded(zlib.crc32(f"mix {key}".encode())):
            images, shares = mix(images, labels)
        yield images.contiguous(memory_format=layout), shares


def validation_batches(
    data: Data,
    config: Config,
    world: World,
    device: torch.device,
    workers: int,
    meter: InputMeter | None = None,
) -> Iterator[Batch]:
    """Yield this rank's share of the validation images; over all ranks each comes exactly once.
    `meter` counts what is read."""
    indices = range(world.rank, data.num_val, world.size)
    size = config.val_batch_size
    firsts = range(0, len(indices), size)
    batches = [[(0, index) for index in indices[first : first + size]] for first in firsts]
    if data.val is None:
        yield from _synthetic_batches(size, config.val_crop_size, map(len, batches), device)
    else:
        images = Images(data.val, config, ValTransform(config))
        sized = ((config.val_crop_size, samples) for samples in batches)
        reads = load_batches(images, sized, device, workers)
        yield from copied_ahead(counted(reads, data.val, meter or InputMeter()), config, device)


def _synthetic_batches(
    batch_size: int, image_size: int, counts: Iterable[int], device: torch.device
) -> Iterator[Batch]:
    """Yield the first images of one random batch again and again; they are already on the device.
    This shows the training speed without input."""
    generator = torch.Generator().manual_seed(0)
    shape = (batch_size, 3, image_size, image_size)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).to(device)
    targets = torch.randint(0, SYNTHETIC_CLASSES, (batch_size,), generator=generator).to(device)
    for count in counts:
        yield images[:count], targets[:count]


def data_order_sha256(data: Data, config: Config) -> str:
    """Return a digest of which images are trained on in which order: names, labels, and the order
    of epoch 0, but not pixels."""
    places = np.arange(data.num_train) // config.augment_repeats
    digest = hashlib.sha256(permutation(data.num_train, config.seed, 0)[places].tobytes())
    if data.train is not None:
        digest.update(data.train.paths.tobytes())
        digest.update(data.train.labels.tobytes())
    return digest.hexdigest()
