"""Training images decoded, cropped, resized and flipped by NVIDIA DALI, on the GPU if there is one.

DALI decides nothing about randomness or order. As for every other source, loader workers read the
encoded images and draw each image's crop and flip from its key; they pass both to DALI with the
bytes. So the same seed shows the same part of the same image in the same step, and a run resumes
exactly. Only the last bits of the pixels differ, because decoder and resampling are different.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from recipe.data.decoding import decode, image_size, suspect
from recipe.data.image_folder import Listing, first_few
from recipe.data.images import TrainTransform
from recipe.data.loading import InputMeter
from recipe.data.order import Sample
from recipe.errors import UserError
from recipe.settings.config import Config

# The images of a batch: their bytes end to end (uint8), the length of each, their crops (int32
# [N, 4]: left, top, width, height), whether each is flipped (int32 [N]), labels and indices.
Encoded = tuple[torch.Tensor, ...]


class EncodedImages(Dataset):
    """Encoded training images with the crop and flip drawn for each; a batch's keys are samples
    (recipe/data/order.py)."""

    def __init__(self, listing: Listing, config: Config) -> None:
        self.listing, self.seed = listing, config.seed
        self.transform = TrainTransform(config)

    def __getitems__(self, keys: list[Sample]) -> Encoded:
        contents = [self.listing.read(index) for _, index in keys]
        draws = [
            self.transform.draw(
                *image_size(content, self.listing.name(index)), (self.seed, number, index)
            )
            for content, (number, index) in zip(contents, keys, strict=True)
        ]
        crops = [[drawn.left, drawn.top, drawn.width, drawn.height] for drawn in draws]
        indices = torch.tensor([index for _, index in keys])
        # One tensor for all bytes: each tensor costs an open file on its way from a worker.
        return (
            torch.frombuffer(bytearray(b"".join(contents)), dtype=torch.uint8),
            torch.tensor([len(content) for content in contents]),
            torch.tensor(crops, dtype=torch.int32),
            torch.tensor([drawn.flip for drawn in draws], dtype=torch.int32),
            torch.from_numpy(self.listing.labels)[indices],
            indices,
        )


def dali_batches(
    batches: Iterable[Encoded],
    listing: Listing,
    config: Config,
    device: torch.device,
    meter: InputMeter,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the images (uint8 [N, 3, size, size], channels-last, on `device`) and labels (int64
    [N]) of `batches`, which have at most --batch-size images; `meter` counts what is read.

    UserError if DALI is missing, or if an image cannot be decoded; it names the image.
    """
    reading = iter(batches)
    under_way: deque[Encoded] = deque()

    def source() -> tuple[list[np.ndarray], np.ndarray, np.ndarray, np.ndarray]:
        encoded = next(reading)
        under_way.append(encoded)
        contents, sizes, crops, flips, _, _ = encoded
        meter.files += len(sizes)
        meter.bytes += len(contents)
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
    try:
        from nvidia.dali import Pipeline, fn, types
    except ImportError as error:
        raise UserError(
            f"--dali: NVIDIA DALI cannot be imported here ({error}). Install it with: pip install "
            "'imagenet-horovod-ddp[dali]' (in a checkout: pip install -e '.[dali]'), or leave "
            "--dali out."
        ) from None
    interpolations = {
        "nearest": types.INTERP_NN,
        "bilinear": types.INTERP_LINEAR,
        "bicubic": types.INTERP_CUBIC,
    }
    on_gpu = device.type == "cuda"
    pipeline = Pipeline(
        batch_size=config.batch_size,
        num_threads=torch.get_num_threads(),
        device_id=device.index if on_gpu else None,
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
            # By default DALI pins its threads to the first cores, the same ones for all ranks.
            **({"affine": False} if on_gpu else {}),
        )
        images = fn.resize(
            images,
            size=[config.train_crop_size] * 2,
            interp_type=interpolations[config.interpolation],
            antialias=config.interpolation != "nearest",
        )
        pipeline.set_outputs(fn.flip(images, horizontal=flips))
    pipeline.build()
    return pipeline


def _to_torch(outputs: Any, device: torch.device) -> torch.Tensor:
    """Return a copy of DALI's batch, since DALI reuses its memory: uint8 [N, size, size, 3].

    DALI decodes on its own stream, while the previous step computes. The copy runs on torch's
    stream, so no other stream ever uses the tensor; DALI waits for its end before it reuses the
    memory. A separate stream for the copy would save nothing noticeable: 256 images of 224 pixels
    are 39 MB, which a GPU reads and writes in far less than 0.1 ms.
    """
    if device.type != "cuda":
        return torch.from_numpy(np.array(outputs.as_array()))
    from nvidia.dali.plugin.pytorch import feed_ndarray

    tensor = outputs.as_tensor()
    images = torch.empty(tensor.shape(), dtype=torch.uint8, device=device)
    feed_ndarray(tensor, images, cuda_stream=torch.cuda.current_stream(device))
    return images


def _about_an_image(under_way: Iterable[Encoded], listing: Listing, error: Exception) -> Exception:
    """Return the exception to raise for an error of DALI, which does not say which image it is
    about: decode all images that are under way, to find the bad one."""
    contents = {
        listing.name(index): listing.read(index)
        for encoded in under_way
        for index in encoded[5].tolist()
    }
    for name, content in contents.items():
        if left_over := decode(content, name)[1]:  # or `decode` raises an error with its name
            return suspect(name, left_over)
    if "decoders.image_slice" not in str(error):
        return error
    formats = Counter(content[:2] for content in contents.values())
    rarest = sorted(contents, key=lambda name: formats[contents[name][:2]])
    return UserError(
        "--dali: DALI cannot decode an image that can be decoded without it: one of these, the "
        f"rarest format first: {first_few(rarest)}. Convert it, or leave --dali out. DALI says: "
        + " ".join(str(error).partition("encountered:")[2].split())
    )
