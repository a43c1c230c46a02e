"""Loading: worker processes read and decode the images of each batch, hand them over in shared
memory, and the trainer copies them to the device and normalises them there."""

import functools
import itertools
import multiprocessing
import multiprocessing.connection
import os
import shlex
import sys
import threading
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing import util
from multiprocessing.synchronize import SemLock
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from recipe.command import UNREAD_S, prepare_output
from recipe.data.decoding import ONE_SUSPECT_IN, suspect
from recipe.data.image_folder import Listing
from recipe.data.images import TrainTransform, ValTransform, empty_batch, uniform_numbers
from recipe.data.order import Sample
from recipe.device import keep_freed_memory
from recipe.errors import BadImage, UserError, memory_limit
from recipe.settings.config import Config

Batch = tuple[torch.Tensor, torch.Tensor]  # uint8 [N, 3, H, W] and int64 [N], until `to_device`
# Images and labels of a batch; the size of its files in bytes; (index, number of left-over bytes)
# of suspect images; and the bad images that were replaced, by index, with the reason.
Read = tuple[torch.Tensor, torch.Tensor, int, list[tuple[int, int]], dict[int, str]]
# How many images are tried for one place in a batch: the first one, then replacements. Few, because
# each takes 9 s if the file server is gone, and a rank without a batch for a minute counts as
# frozen.
MOST_TRIES = 6
# The run ends if more images are bad than 1 in ONE_REPLACED_IN, and more than MOST_REPLACED.
ONE_REPLACED_IN, MOST_REPLACED = 1000, 10


@dataclass
class InputMeter:
    """What this rank has received of the training or of the validation images so far, whether it
    or its loader processes read them."""

    files: int = 0
    bytes: int = 0  # encoded
    replaced: dict[int, str] = field(default_factory=dict)  # reason for each bad image, by index
    suspects: dict[int, str] = field(default_factory=dict)  # names of suspect images, by index


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


def counted(reads: Iterable[Read], listing: Listing, meter: InputMeter) -> Iterator[Batch]:
    """Yield the images and labels of `reads` from `listing`; record the rest in `meter`."""
    for images, labels, num_bytes, suspects, replaced in reads:
        for index, left_over in suspects:
            _note_suspect(listing, index, left_over, meter)
        meter.files += len(labels)
        meter.bytes += num_bytes
        meter.replaced |= replaced
        yield images, labels


def _note_suspect(listing: Listing, index: int, left_over: int, meter: InputMeter) -> None:
    """Record image `index`, and warn if it is new; UserError if there are too many."""
    if index in meter.suspects:
        return
    name = meter.suspects[index] = listing.name(index)
    allowed = len(listing) // ONE_SUSPECT_IN
    if len(meter.suspects) > allowed:
        note = f" ({allowed:,} such files in {len(listing):,} are allowed)"
        raise suspect(name, left_over, note if allowed else "")
    print(
        f"warning: {name}: {left_over:,} bytes more than its pixels need; it may be damaged",
        file=sys.stderr,
        flush=True,
    )


def load_batches(
    dataset: Dataset, batches: Iterable[Any], device: torch.device, workers: int
) -> Iterator[Any]:
    """Yield what `dataset` reads for each of `batches`; `workers` processes start at this call, or
    with 0 this process reads."""
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


def copied_ahead(batches: Iterable[Batch], config: Config, device: torch.device) -> Iterator[Batch]:
    """Yield `batches`; on a GPU each is copied there, and normalised, before it is needed."""
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


@functools.cache  # each stream keeps memory that other streams cannot use
def _copying_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream that copies batches to `device`, in training and evaluation."""
    return torch.cuda.Stream(device)


@functools.cache
def _on_device(channels: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """Return a number for each channel, scaled from 0..1 to 0..255, on `device`: [3, 1, 1]."""
    values = torch.tensor(channels).view(3, 1, 1) * 255
    return values.to(device)  # waits for the copy, so any stream may use them


def to_device(batch: Batch, config: Config, device: torch.device) -> Batch:
    """Move a batch as uint8, then normalise it there: float [N, 3, H, W] and int64 [N].

    With --channels-last only the images change their layout: convolutions then run in NHWC, and
    contiguous weights still get contiguous gradients, the only ones that Horovod accepts. Batches
    that are normalised already are returned unchanged.
    """
    if batch[0].is_floating_point():
        return batch
    images, targets = (tensor.to(device, non_blocking=True) for tensor in batch)
    mean, std = _on_device(config.image_mean, device), _on_device(config.image_std, device)
    layout = torch.channels_last if config.channels_last else torch.contiguous_format
    images = images.contiguous(memory_format=layout)
    return images.sub(mean).div_(std), targets  # two passes over float values instead of four
