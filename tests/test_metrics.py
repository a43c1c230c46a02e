"""Sums that add up to the same figures however the images are split."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from making import CPU, TinyNet, a_config, a_world
from torch import nn

from recipe.data.batches import open_data, to_device
from recipe.ranks import Ranks
from recipe.settings.config import Config
from recipe.training.metrics import batch_sums, evaluate, means, validate


def sums_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return batch_sums(outputs, targets, nn.functional.cross_entropy(outputs, targets))


def test_figures() -> None:
    outputs = torch.tensor([[9.0, 8, 7, 6, 5, 4], [1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1]])
    targets = torch.tensor([0, 0, 4])  # the best guess; the last of six; the fifth
    sums = sums_of(outputs, targets)
    loss = nn.functional.cross_entropy(outputs, targets, reduction="sum").item()
    assert sums.tolist() == pytest.approx([loss, 1, 2, 3], rel=1e-6)
    assert means(sums) == pytest.approx({"loss": loss / 3, "top1": 100 / 3, "top5": 200 / 3})


def test_the_label_of_a_mixed_image_is_its_largest_share() -> None:
    outputs = torch.tensor([[3.0, 2, 1], [3, 2, 1], [1, 2, 3]])
    shares = torch.tensor([[0.6, 0.4, 0], [0, 0.3, 0.7], [0.1, 0, 0.9]])
    _, top1, _, count = sums_of(outputs, shares).tolist()
    assert (top1, count) == (2, 3)


def test_a_flipped_evaluation_takes_the_mean_of_both_outputs() -> None:
    model, config = TinyNet(6), a_config(val_flip=True)
    images = torch.randint(0, 256, (5, 3, 5, 5), dtype=torch.uint8)
    targets = torch.arange(5)
    whole = [(images, targets)], [(images.flip(-1), targets)]
    one, other = (evaluate(model, batches, config, CPU) for batches in whole)
    assert torch.equal(one, other), "left and right no longer count"
    normalised, _ = to_device((images, targets), config, CPU)
    with torch.no_grad():
        outputs = (model.eval()(normalised) + model(normalised.flip(-1))) / 2
    assert torch.equal(one, sums_of(outputs, targets))
    assert not torch.equal(one, evaluate(model, whole[0], a_config(), CPU))


@pytest.mark.parametrize("broken", ["all", "its own", "another"])
def test_a_nan_is_no_hit(broken: str) -> None:
    """topk takes NaN for the greatest number, and the first of several for the best guess."""
    outputs = torch.arange(12.0).flip(0).repeat(2, 1)
    outputs[:, {"all": slice(None), "its own": 0, "another": 3}[broken]] = math.nan
    _, top1, top5, count = sums_of(outputs, torch.zeros(2, dtype=torch.int64)).tolist()
    assert (top1, top5, count) == (0, 2 if broken == "another" else 0, 2)


@pytest.mark.parametrize("classes", [1, 2, 4, 5])
def test_top_5_of_five_classes_or_fewer(classes: int) -> None:
    outputs = torch.randn(7, classes)
    assert means(sums_of(outputs, torch.zeros(7, dtype=torch.int64)))["top5"] == 100


def batches(images: torch.Tensor, targets: torch.Tensor, size: int, rank: int, ranks: int):
    mine = images[rank::ranks], targets[rank::ranks]
    return list(zip(*(part.split(size) for part in mine), strict=True)) if len(mine[1]) else []


@pytest.mark.parametrize(("size", "ranks"), [(37, 1), (1, 1), (8, 1), (8, 2), (5, 3), (4, 50)])
def test_evaluation_is_exact_at_any_split(size: int, ranks: int) -> None:
    """Fault 2 of other trainers: no image twice, and none left out, at any world size."""
    torch.manual_seed(1)
    model = TinyNet(6)
    images = torch.randint(0, 256, (37, 3, 5, 5), dtype=torch.uint8)
    targets = torch.randint(0, 6, (37,))
    config = a_config()
    alone = evaluate(model, batches(images, targets, 37, 0, 1), config, CPU)
    split = torch.stack(
        [
            evaluate(model, batches(images, targets, size, rank, ranks), config, CPU)
            for rank in range(ranks)
        ]
    ).sum(dim=0)
    assert split[1:].tolist() == alone[1:].tolist()
    assert split[3] == 37
    assert split[0].item() == pytest.approx(alone[0].item(), rel=1e-5)


@pytest.mark.parametrize("training", [True, False])
def test_evaluation_changes_nothing(training: bool) -> None:
    model = TinyNet().train(training)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    images = torch.zeros(4, 3, 5, 5, dtype=torch.uint8)
    sums = evaluate(model, [(images, torch.zeros(4, dtype=torch.int64))], a_config(), CPU)
    assert not sums.requires_grad
    assert model.training == training
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_loss_of_half_precision_is_summed_in_full() -> None:
    config = a_config(precision="bf16")
    images = torch.randint(0, 256, (64, 3, 5, 5), dtype=torch.uint8)
    sums = evaluate(TinyNet(), [(images, torch.zeros(64, dtype=torch.int64))], config, CPU)
    assert sums.dtype == torch.float64
    assert sums[0] / 64 != (sums[0] / 64).bfloat16()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_sums_of_a_batch_do_not_wait_for_the_gpu() -> None:
    device = torch.device("cuda", 0)
    outputs = torch.randn(8, 10, device=device)
    targets = torch.zeros(8, dtype=torch.int64, device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        sums = sums_of(outputs, targets)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sums[3].item() == 8


def test_synthetic_data_is_evaluated_only_when_asked() -> None:
    config = a_config(data="synthetic", synthetic_images=10, batch_norm="sync", val_crop_size=8)
    parts = SimpleNamespace(model=TinyNet(1000), ema=None)

    def validated(config: Config) -> list[str]:
        data = open_data(config)
        return [e.weights for e in validate(parts, config, Ranks(a_world()), data, CPU, 0)]

    assert validated(config) == []
    assert validated(replace(config, desired_acc=75.0)) == ["model"]
