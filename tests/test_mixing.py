"""Mixup and CutMix: pixels and labels are mixed alike, and the same in each engine and resume."""

from pathlib import Path

import pytest
import torch
from making import CPU, a_config, a_world, folder_config, write_images

from recipe.data.batches import mixed, open_data, to_device, training_batches

KINDS = {"mixup": {"mixup_alpha": 0.7}, "cutmix": {"cutmix_alpha": 1.0}}
BOTH = {"mixup_alpha": 0.2, "cutmix_alpha": 1.0}


def batch(size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Each image is of one value, its number; so are the labels."""
    numbers = torch.arange(4)
    return numbers.float().view(4, 1, 1, 1).expand(4, 3, size, size).clone(), numbers


@pytest.mark.parametrize("kind", KINDS)
def test_labels_have_the_shares_of_the_pixels(kind: str) -> None:
    """Image n keeps some of its value, and has the rest of n - 1."""
    config, kept = a_config(**KINDS[kind]), set()
    for images, shares in mixed([batch()] * 20, config, 4, ((key,) for key in range(20))):
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
        for images, _ in mixed([batch()] * 30, a_config(**BOTH), 4, keys)
    ]
    assert 5 < sum(pasted) < 25


@pytest.mark.parametrize("channels_last", [False, True])
def test_the_key_alone_decides_and_the_layout_stays(channels_last: bool) -> None:
    config = a_config(**BOTH, channels_last=channels_last)
    ((images, shares),) = mixed([batch()], config, 4, [(42, 0, 1)])
    torch.rand(5)
    before = torch.get_rng_state()
    ((again, same),) = mixed([batch()], config, 4, [(42, 0, 1)])
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
