"""Training images decoded, cropped, resized and flipped by NVIDIA DALI, on the GPU if there is one.

Randomness and order stay here. Loader workers read the encoded images and draw each one's crop and
flip from its key, as for every other source, and pass both to DALI with the bytes. So the same seed
shows the same part of the same image in the same step, and a run resumes exactly. Only the last
bits of the pixels differ, by another decoder and another resampling.
"""

import importlib.util
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from recipe.config import Config
from recipe.data.image_folder import Listing
from recipe.data.images import TrainTransform, decode, image_size, suspect
from recipe.data.order import Sample
from recipe.errors import UserError

# The bytes of a batch's images end to end (uint8), the length of each, its crop (int32 [N, 4]:
# left, top, width, height), whether it is flipped (int32 [N]), label and index.
Encoded = tuple[torch.Tensor, ...]
BATCHES_AHEAD = 2  # DALI's own default


def check_dali() -> None:
    """UserError unless DALI is installed; does not load it."""
    try:
        found = importlib.util.find_spec("nvidia.dali") is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        raise UserError(
            "--dali: NVIDIA DALI is not installed here. Install it with: pip install "
            "'imagenet-horovod-ddp[dali]' (in a checkout: pip install -e '.[dali]'), or leave "
            "--dali out."
        )


class EncodedImages(Dataset):
    """Training images as they are stored, with what was drawn for them; a batch's keys are samples
    (recipe/data/order.py).

    `count` is called with the size of each image that is read.
    """

    def __init__(self, listing: Listing, config: Config, count: Any) -> None:
        self.listing, self.seed, self.count = listing, config.seed, count
        self.transform = TrainTransform(config)

    def __getitems__(self, keys: list[Sample]) -> Encoded:
        contents, crops, flips = [], [], []
        for number, index in keys:
            content = self.listing.read(index)
            size = image_size(content, self.listing.name(index))
            drawn = self.transform.draw(*size, (self.seed, number, index))
            contents.append(content)
            crops.append([drawn.left, drawn.top, drawn.width, drawn.height])
            flips.append(drawn.flip)
            if self.count is not None:
                self.count(len(content))
        indices = torch.tensor([index for _, index in keys])
        # One tensor for all: each travels from a worker as an open file.
        return (
            torch.frombuffer(bytearray(b"".join(contents)), dtype=torch.uint8),
            torch.tensor([len(content) for content in contents]),
            torch.tensor(crops, dtype=torch.int32),
            torch.tensor(flips, dtype=torch.int32),
            torch.from_numpy(self.listing.labels)[indices],
            indices,
        )


def dali_batches(
    batches: Iterable[Encoded], listing: Listing, config: Config, device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Images (uint8 [N, 3, size, size], in channels-last order) on `device` and labels (int64 [N])
    of `batches`, which are of --batch-size images at most.

    UserError, which names the image, if one cannot be decoded.
    """
    reading = iter(batches)
    under_way: deque[Encoded] = deque()

    def source() -> tuple[list[np.ndarray], np.ndarray, np.ndarray, np.ndarray]:
        encoded = next(reading)
        under_way.append(encoded)
        contents, sizes, crops, flips, _, _ = encoded
        ends = np.cumsum(sizes.numpy())
        return (
            np.split(contents.numpy(), ends[:-1]),
            np.ascontiguousarray(crops[:, :2]),
            np.ascontiguousarray(crops[:, 2:]),
            flips.numpy(),
        )

    pipeline = _pipeline(source, config, device)
    while True:
        try:
            (outputs,) = pipeline.run()
        except StopIteration:
            return
        except RuntimeError as error:
            raise _about_an_image(under_way, listing, error) from error
        labels = under_way.popleft()[4]
        yield _to_torch(outputs, device).permute(0, 3, 1, 2), labels


def _pipeline(source: Any, config: Config, device: torch.device) -> Any:
    from nvidia.dali import Pipeline, fn, types

    interpolations = {
        "nearest": types.INTERP_NN,
        "bilinear": types.INTERP_LINEAR,
        "bicubic": types.INTERP_CUBIC,
    }
    on_gpu = device.type == "cuda"
    # Without: by default DALI ties its threads to the first cores, those of all ranks to the same.
    threads = {"affine": False} if on_gpu else {}
    pipeline = Pipeline(
        batch_size=config.batch_size,
        num_threads=torch.get_num_threads(),
        device_id=device.index if on_gpu else None,
        prefetch_queue_depth=BATCHES_AHEAD,
    )
    with pipeline:
        contents, starts, shapes, flips = fn.external_source(source=source, num_outputs=4)
        images = fn.decoders.image_slice(
            contents,
            start=starts,
            shape=shapes,
            axis_names="WH",
            device="mixed" if on_gpu else "cpu",
            output_type=types.RGB,
            adjust_orientation=False,
            **threads,
        )
        size = config.train_crop_size
        images = fn.resize(
            images,
            size=[size, size],
            interp_type=interpolations[config.interpolation],
            antialias=config.interpolation != "nearest",
        )
        pipeline.set_outputs(fn.flip(images, horizontal=flips))
    pipeline.build()
    return pipeline


def _to_torch(outputs: Any, device: torch.device) -> torch.Tensor:
    """A copy of DALI's batch, whose memory it uses again: uint8 [N, size, size, 3]."""
    if device.type != "cuda":
        return torch.from_numpy(np.array(outputs.as_array()))
    from nvidia.dali.plugin.pytorch import feed_ndarray

    tensor = outputs.as_tensor()
    images = torch.empty(tensor.shape(), dtype=torch.uint8, device=device)
    feed_ndarray(tensor, images, cuda_stream=torch.cuda.current_stream(device))
    return images


def _about_an_image(under_way: Iterable[Encoded], listing: Listing, error: Exception) -> Exception:
    """What to raise for an error of DALI, which does not say which image it is about."""
    indices = [int(index) for encoded in under_way for index in encoded[5]]
    for index in indices:
        _, left_over = decode(listing.read(index), listing.name(index))  # or an error that names it
        if left_over:
            raise suspect(listing.name(index), left_over)
    text = str(error).rpartition("encountered:")[2]  # after where in the pipeline it happened
    reason = next((line for line in text.splitlines() if line.strip()), "no reason given")
    return RuntimeError(
        f"DALI has failed ({reason.strip()}) at one of the images {listing.name(indices[0])} to "
        f"{listing.name(indices[-1])}, which the decoder used without --dali can decode"
        if indices
        else f"DALI has failed ({reason.strip()})"
    )
