"""Mixup and CutMix: each image of a batch with the one before it, on the device."""

import zlib
from collections.abc import Iterable, Iterator

import torch

from recipe.config import Config
from recipe.data.images import seeded

Batch = tuple[torch.Tensor, torch.Tensor]


def mixed(
    batches: Iterable[Batch], config: Config, num_classes: int, keys: Iterable[tuple[int, ...]]
) -> Iterator[Batch]:
    """Normalised `batches` (float [N, 3, H, W], int64 [N]) mixed, and the shares of classes in each
    image for labels (float [N, num_classes]).

    What is drawn for a batch depends on its key alone: a resumed run and the other engine mix as
    this one does.
    """
    from torchvision.transforms import v2  # not for the loader's server: it takes two seconds

    kinds: list[v2.Transform] = []
    if config.mixup_alpha:
        kinds.append(v2.MixUp(alpha=config.mixup_alpha, num_classes=num_classes))
    if config.cutmix_alpha:
        kinds.append(v2.CutMix(alpha=config.cutmix_alpha, num_classes=num_classes))
    mix = v2.RandomChoice(kinds)
    layout = torch.channels_last if config.channels_last else torch.contiguous_format
    for (images, labels), key in zip(batches, keys, strict=False):
        with seeded(zlib.crc32(f"mix {key}".encode())):
            images, shares = mix(images, labels)
        yield images.contiguous(memory_format=layout), shares
