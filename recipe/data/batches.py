"""From images to batches: what each rank reads, in which order, and how it reaches the device."""

import functools
import hashlib
import itertools
import math
import multiprocessing
import multiprocessing.connection
import os
import shlex
import sys
import threading
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import util
from multiprocessing.synchronize import SemLock
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from recipe import watch
from recipe.command import UNREAD_S, prepare_output
from recipe.data.decoding import SuspectImages, suspect
from recipe.data.digits import open_digits
from recipe.data.image_folder import Listing, check_train_and_val
from recipe.data.images import (
    TrainTransform,
    ValTransform,
    empty_batch,
    seeded,
    uniform_numbers,
)
from recipe.data.shards import Shards, open_images
from recipe.device import keep_freed_memory
from recipe.errors import BadImage, UserError, memory_limit
from recipe.settings.config import Config
from recipe.world import World

Batch = tuple[torch.Tensor, torch.Tensor]  # uint8 [N, 3, H, W] and int64 [N], until `to_device`
SYNTHETIC_CLASSES = 1000
# Images and labels of a batch; the size of its files in bytes; (index, number of left-over bytes)
# of suspect images; and the bad images that were replaced, by index, with the reason.
Read = tuple[torch.Tensor, torch.Tensor, int, list[tuple[int, int]], dict[int, str]]
# How many images are tried for one place in a batch: the first one, then replacements. Few, because
# each takes 9 s if the file server is gone, and a rank without a batch for a minute counts as
# frozen.
MOST_TRIES = 6
# The run ends if more images are bad than 1 in ONE_REPLACED_IN, and more than MOST_REPLACED.
ONE_REPLACED_IN, MOST_REPLACED = 1000, 10


# -- The order of the training images: one endless stream, the same for any number of ranks --------

# (number of the pass, index of the image in the listing): both seed the augmentation. An epoch is
# one pass; with repeats it is several, one for each repeat of its images.
Sample = tuple[int, int]
# Spans of the stream whose images are not trained on (--rollback): position and number of samples.
Spans = Sequence[tuple[int, int]]


class Place(NamedTuple):
    """Where a batch comes from: its position in the stream, its images on each rank, and the epoch
    in which its step begins."""

    position: int
    batch_size: int
    epoch: int


@functools.lru_cache(maxsize=2)  # a batch may span two epochs
def permutation(num_images: int, seed: int, epoch: int) -> np.ndarray:
    """Return the order of the images in one epoch: int64 [num_images]."""
    return np.random.default_rng([seed, epoch]).permutation(num_images)


@dataclass(frozen=True)
class SampleStream:
    """Permutations of `num_images` images, one per epoch, one after the other.

    A position is a count of samples since the start of training, over all ranks. A global batch is
    the next samples of the stream, across the end of an epoch if necessary. So each image is seen
    exactly once per epoch at any world size, no batch is short or padded, and a run resumes where
    it stopped, even at another world size.

    With `repeats` each image comes that many times in a row, so the copies go to different ranks.
    An epoch has the same length as without, and uses only the first images of its permutation
    (Hoffer et al. 2020, arXiv 1901.09335; the order is that of torchvision's RASampler).
    """

    num_images: int
    seed: int
    num_files: int | None = None  # if there are fewer files, they are used several times per epoch
    repeats: int = 1

    def samples(self, positions: np.ndarray) -> list[Sample]:
        """Return the sample at each of `positions` (int64, ascending)."""
        epochs, offsets = np.divmod(positions, self.num_images)
        places, copies = np.divmod(offsets, self.repeats)
        passes = epochs * self.repeats + copies
        indices = np.concatenate(
            [
                permutation(self.num_images, self.seed, int(epoch))[places[epochs == epoch]]
                for epoch in np.unique(epochs)
            ]
        ) % (self.num_files or self.num_images)
        return list(zip(passes.tolist(), indices.tolist(), strict=True))

    def batches(self, places: Iterable[Place], rank: int, size: int) -> Iterator[list[Sample]]:
        """Yield this rank's batches: one for each of `places`.

        Of the `batch_size * size` samples from a position on, rank r takes every `size`-th,
        starting with number r.
        """
        for position, batch_size, _ in places:
            yield self.samples(position + rank + size * np.arange(batch_size))


# -- The images of a run, and the position of each step -------------------------------------------


@dataclass(frozen=True)
class Data:
    """The images of a run. `train` and `val` are None for synthetic data: random pixels, made once
    on the device."""

    train: Listing | None
    val: Listing | None
    num_train: int  # per epoch
    num_val: int
    num_classes: int
    suspects: tuple[SuspectImages, ...] = ()  # for train and for val

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, in the order of the labels; empty for synthetic data."""
        return self.train.classes if self.train is not None else ()

    @functools.cached_property
    def identity(self) -> dict[str, Any]:
        """What must be unchanged for a run to resume: the number of images, and a digest of their
        names, labels and classes, which is the same for files and shards. For shards, also a digest
        of their checksums. A digest of one permutation shows that numpy still orders images the
        same way, which may change with its version."""
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
            if isinstance(listing, Shards):
                contents = hashlib.sha256(listing.checksums.tobytes()).hexdigest()
                facts[f"{part}_contents_sha256"] = contents
        return {**facts, "sha256": digest.hexdigest()}


def open_data(config: Config, epoch_images: int = 0) -> Data:
    """List the images and check the folders. An epoch has at least `epoch_images` samples: if there
    are fewer images, they are used again.

    UserError for anything wrong with a folder, before training starts.
    """
    if config.data == "synthetic" and not config.train_dir:
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
    else:
        train, val = open_digits("train"), open_digits("val")
    check_train_and_val(train, val)
    suspects = SuspectImages(train), SuspectImages(val)
    return Data(train, val, max(len(train), epoch_images), len(val), len(train.classes), suspects)


def samples_per_step(config: Config, world: World, epoch: float = math.inf) -> int:
    """Return the global batch: the images over all ranks of an optimizer step that begins in
    `epoch`; by default the final one, after any batch-size warm-up."""
    share = config.batch_share(epoch)
    return math.ceil(config.batch_size * share) * config.batches_per_allreduce * world.size


def next_step(config: Config, world: World, num_train: int, position: int, left_out: Spans) -> int:
    """Return where the next step begins, from `position` on. Steps that would have any of the
    `left_out` samples are not made; their other samples count as seen, too."""
    while True:
        end = position + samples_per_step(config, world, position // num_train)
        if not any(begin < end and position < begin + count for begin, count in left_out):
            return position
        position = end


def training_end(
    config: Config, world: World, data: Data, step: int, samples_seen: int, left_out: Spans = ()
) -> tuple[int, int]:
    """Return the step and stream position at which training ends, from its current `step` and
    position `samples_seen`: when all epochs are complete, or --max-steps is reached. Each of the
    spans `left_out` that training has passed counts as a step towards --max-steps."""
    last = math.inf if config.max_steps is None else config.max_steps
    end = 0 if config.evaluate else config.epochs * data.num_train
    begins = [begin for begin, _ in left_out]
    while samples_seen < end:
        left = last - step - sum(begin < samples_seen for begin in begins)
        if left <= 0:
            break
        epoch = samples_seen // data.num_train
        step_samples = samples_per_step(config, world, epoch)
        until_epoch_ends = math.ceil(((epoch + 1) * data.num_train - samples_seen) / step_samples)
        until_left_out = [(b - samples_seen) // step_samples for b in begins if b >= samples_seen]
        steps = int(min(left, until_epoch_ends, *until_left_out))
        position = samples_seen + steps * step_samples
        samples_seen = next_step(config, world, data.num_train, position, left_out)
        step += steps
    return step, samples_seen


def batch_places(
    config: Config,
    world: World,
    num_train: int,
    start: int,
    stop: int,
    left_out: Spans = (),
) -> Iterator[Place]:
    """Yield the place of each batch from `start` until `stop` is reached or passed, both where a
    step begins. All batches of a step have the same size."""
    while start < stop:
        epoch = start // num_train
        step_samples = samples_per_step(config, world, epoch)
        batch_samples = step_samples // config.batches_per_allreduce
        end = start + step_samples
        for position in range(start, end, batch_samples):
            yield Place(position, batch_samples // world.size, epoch)
        start = next_step(config, world, num_train, end, left_out)


@dataclass
class InputMeter:
    """Counts the training images, and their encoded bytes, that this rank has received so far,
    whether it or its loader processes read them."""

    files: int = 0
    bytes: int = 0
    replaced: dict[int, str] = field(default_factory=dict)  # reason for each bad image, by index


class Images(Dataset):
    """Images in batches. A batch is given as the side length of its images in pixels, and their
    samples (`SampleStream`). A sample alone decides an image's pixels, except for their number.

    With --bad-images replace, another image of the same pass replaces a bad training image, pixels
    and label. Its index is drawn from the bad image's sample, so it is the same on any rank, at any
    world size, and after a resume."""

    def __init__(
        self, listing: Listing, config: Config, transform: TrainTransform | ValTransform
    ) -> None:
        self.listing, self.transform, self.seed = listing, transform, config.seed
        # Never in validation: accuracy on other images would not be comparable.
        self.replaces = config.bad_images == "replace" and isinstance(transform, TrainTransform)

    def __getitems__(self, batch: tuple[int, list[Sample]]) -> Read:
        size, samples = batch
        images = empty_batch(len(samples), size, size)
        num_bytes, suspects, replaced, indices = 0, [], dict[int, str](), []
        for out, (number, index) in zip(images, samples, strict=True):
            draws = uniform_numbers((self.seed, number, index))
            for _ in range(MOST_TRIES):
                try:
                    file_bytes, left_over = self._read(number, index, out)
                    break
                except BadImage as error:
                    if not self.replaces:
                        raise
                    replaced[index] = message = str(error)
                index = int(next(draws) * len(self.listing))
            else:
                raise UserError(f"{message} {MOST_TRIES - 1} replacements failed, too.")
            if left_over:
                suspects.append((index, left_over))
            num_bytes += file_bytes
            indices.append(index)
        labels = torch.from_numpy(self.listing.labels[indices])
        return images, labels, num_bytes, suspects, replaced

    def _read(self, number: int, index: int, out: torch.Tensor) -> tuple[int, int]:
        """Read image `index` in pass `number` into `out`; return the size of its file and the
        number of bytes left over."""
        content, name = self.listing.read(index), self.listing.name(index)
        left_over = self.transform(content, name, (self.seed, number, index), out)
        if left_over and self.replaces:
            raise suspect(name, left_over)
        return len(content), left_over


def check_replaced(listing: Listing, replaced: Collection[int]) -> None:
    """Raise UserError if more images of `listing` were replaced than --bad-images allows."""
    most = max(MOST_REPLACED, len(listing) // ONE_REPLACED_IN)
    if len(replaced) > most:
        raise UserError(
            f"--bad-images replace: {len(replaced):,} of {len(listing):,} training images are bad, "
            f"and {most:,} are allowed; metrics.jsonl in the run folder lists them. Find all with "
            f"python -m recipe.data.prepare check {shlex.quote(str(listing.root))}, and replace "
            "them by good copies."
        )


def _noted(reads: Iterable[Read], suspects: SuspectImages, meter: InputMeter) -> Iterator[Batch]:
    """Yield the images and labels of `reads`; record the rest in `suspects` and `meter`."""
    for images, labels, num_bytes, suspect_images, replaced in reads:
        for index, left_over in suspect_images:
            suspects.add(index, left_over)
        meter.files += len(labels)
        meter.bytes += num_bytes
        meter.replaced |= replaced
        yield images, labels


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
        from recipe.data.dali import EncodedImages, dali_batches  # here, as it imports this module

        # DALI takes memory that is not pinned, and prefetches by itself.
        encoded = _loaded(EncodedImages(data.train, config), batches, torch.device("cpu"), workers)
        ready = dali_batches(encoded, data.train, config, device, meter)
    else:
        transform = TrainTransform(config)
        sizes = (transform.size_in(epoch) for _, _, epoch in places())
        sized = zip(sizes, batches, strict=True)
        reads = _loaded(Images(data.train, config, transform), sized, device, workers)
        ready = _on_device(_noted(reads, data.suspects[0], meter), config, device)
    if config.mixup_alpha or config.cutmix_alpha:
        keys = ((config.seed, position, world.rank) for position, _, _ in places())
        ready = (to_device(batch, config, device) for batch in ready)
        ready = mixed(ready, config, data.num_classes, keys)
    return ready


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
    data: Data, config: Config, world: World, device: torch.device, workers: int
) -> Iterator[Batch]:
    """Yield this rank's share of the validation images; over all ranks each comes exactly once."""
    indices = range(world.rank, data.num_val, world.size)
    size = config.val_batch_size
    firsts = range(0, len(indices), size)
    batches = [[(0, index) for index in indices[first : first + size]] for first in firsts]
    if data.val is None:
        yield from _synthetic_batches(size, config.val_crop_size, map(len, batches), device)
    else:
        images = Images(data.val, config, ValTransform(config))
        sized = ((config.val_crop_size, samples) for samples in batches)
        reads = _loaded(images, sized, device, workers)
        yield from _on_device(_noted(reads, data.suspects[1], InputMeter()), config, device)


def _loaded(
    dataset: Dataset, batches: Iterable[Any], device: torch.device, workers: int
) -> Iterator[Any]:
    loader = DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        generator=torch.Generator(),  # the global one would change the first step's dropout
        multiprocessing_context="forkserver" if workers else None,  # see start_loaders_server
        collate_fn=_in_shared_memory if workers else lambda batch: batch,  # it is already a batch
        worker_init_fn=_begin_worker if workers else None,
    )
    finalizers: dict[Any, Any] = vars(util)["_finalizer_registry"]
    known = set(finalizers)
    reading = iter(loader)  # starts the workers now, and not with the first batch
    made = [finalizer for key, finalizer in finalizers.items() if key not in known]
    removal = vars(SemLock)["_cleanup"].__func__
    return _handed_over(reading, [item for item in made if item._callback is removal])


def _handed_over(reading: Iterator[Any], names: Iterable[util.Finalize] = ()) -> Iterator[Any]:
    """Yield what loader workers read; UserError if one of them was killed.

    The finalizers `names` remove the workers' semaphores from /dev/shm. They run as soon as every
    worker has opened them, so that no file is left behind even if all processes are killed.
    """
    try:
        for number, batch in enumerate(reading, 1):
            if number == len(getattr(reading, "_workers", [])):
                for remove in names:
                    remove()
            yield batch
    except (RuntimeError, OSError, EOFError) as error:  # depends on what the worker was doing
        sentinels = [worker.sentinel for worker in getattr(reading, "_workers", [])]
        if not multiprocessing.connection.wait(sentinels, timeout=1.0):
            raise
        raise UserError(
            "a loader worker was killed, usually because memory ran out (the limit here is "
            f"{memory_limit()}): use fewer --workers, or --workers 0, or give the job more memory"
        ) from error


def _on_device(batches: Iterable[Batch], config: Config, device: torch.device) -> Iterator[Batch]:
    return _one_ahead(batches, config, device) if device.type == "cuda" else iter(batches)


def _one_ahead(batches: Iterable[Batch], config: Config, device: torch.device) -> Iterator[Batch]:
    """Yield normalised batches on a GPU, each copied there while the previous step computes.

    The copy runs on its own stream, and starts before the previous batch is returned. So it is in
    time even if the host waits for the GPU in each step, as loss scaling does.
    """
    side = _copying_stream(device)
    coming: tuple[Batch, torch.cuda.Event] | None = None
    for batch in itertools.chain(batches, [None]):
        with torch.cuda.stream(side):
            following = batch and (to_device(batch, config, device), side.record_event())
        if coming is not None:
            ready, on_device = coming
            current = torch.cuda.current_stream(device)
            current.wait_event(on_device)
            for tensor in ready:
                # The memory belongs to the side stream, which must not reuse it before the current
                # stream has finished with it.
                tensor.record_stream(current)
            yield ready
        coming = following


def _in_shared_memory(read: Any) -> Any:
    """Move the tensors that a worker has read into shared memory, which the trainer can read.

    The worker's sending thread would do the same, but if there is no room it would silently lose
    the batch, and the trainer would wait for ever.
    """
    tensors = [part for part in read if torch.is_tensor(part)]
    try:
        for tensor in tensors:
            tensor.share_memory_()
    except RuntimeError as error:
        raise UserError(
            f"a loader worker cannot hand over a batch of {sum(t.nbytes for t in tensors):,} "
            f"bytes in /dev/shm ({error}): if that is full, make it larger (docker run --shm-size "
            "32g, or --ipc host), or use fewer --workers, or --workers 0"
        ) from error
    return read


def _begin_worker(worker: int) -> None:
    """Set up a loader worker, and make it end as soon as the trainer is gone.

    torch's workers watch for the end of their parent process. Here that is the forkserver, which
    never ends before them, so they would stay for ever if the trainer was killed or used os._exit.
    """
    keep_freed_memory()
    prepare_output(UNREAD_S)
    sys.excepthook = _show_error
    trainer = multiprocessing.parent_process()
    assert trainer is not None

    def wait() -> None:
        trainer.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _show_error(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Print an error of the thread by which a loader worker hands its batches over; but not that
    the trainer has closed the connection: it was killed, or tells its own error."""
    if not issubclass(kind, (EOFError, ConnectionError)):
        sys.__excepthook__(kind, error, trace)


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


@functools.cache  # each stream keeps memory that other streams cannot use
def _copying_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream that copies batches to `device`, in training and evaluation."""
    return torch.cuda.Stream(device)


@functools.cache
def _mean_and_std(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ImageNet's means and standard deviations of channels, scaled to 0..255: [3, 1, 1]."""
    mean = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1) * 255
    std = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1) * 255
    return mean.to(device), std.to(device)  # waits for the copies, so any stream may use them


def to_device(batch: Batch, config: Config, device: torch.device) -> Batch:
    """Move a batch as uint8, then normalise it there: float [N, 3, H, W] and int64 [N].

    With --channels-last only the images change their layout: convolutions then run in NHWC, and
    contiguous weights still get contiguous gradients, the only ones that Horovod accepts. Batches
    that are normalised already are returned unchanged.
    """
    if batch[0].is_floating_point():
        return batch
    images, targets = (tensor.to(device, non_blocking=True) for tensor in batch)
    mean, std = _mean_and_std(device)
    layout = torch.channels_last if config.channels_last else torch.contiguous_format
    images = images.contiguous(memory_format=layout)
    return images.sub(mean).div_(std), targets  # two passes over float values instead of four


def data_order_sha256(data: Data, config: Config) -> str:
    """Return a digest of which images are trained on in which order: names, labels, and the order
    of epoch 0, but not pixels."""
    places = np.arange(data.num_train) // config.augment_repeats
    digest = hashlib.sha256(permutation(data.num_train, config.seed, 0)[places].tobytes())
    if data.train is not None:
        digest.update(data.train.paths.tobytes())
        digest.update(data.train.labels.tobytes())
    return digest.hexdigest()
