"""Networks, parameter groups, number formats, moving averages, and seeds."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from pickle import UnpicklingError
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torchvision
from making import CPU, TinyNet, a_config, a_world, in_ranks
from needs import needs_timm
from torch import nn

from recipe.data.batches import open_data
from recipe.data.loading import to_device
from recipe.errors import UserError
from recipe.ranks import Ranks
from recipe.record.fingerprint import weights_sha256
from recipe.settings.config import Config, is_resnet
from recipe.training.batch_norm import SyncBatchNorm, align_batch_norm, replace_batch_norm
from recipe.training.metrics import batch_sums, evaluate, means, validate
from recipe.training.model import (
    NORMS,
    autocast,
    build_criterion,
    build_ema,
    build_model,
    build_optimizer,
    build_scaler,
    parameter_groups,
    seed_step,
    split_resnet,
    update_ema,
)
from recipe.training.state import copy_buffers


def sizes(pixels: int) -> dict[str, Any]:
    return dict.fromkeys(("train_crop_size", "val_crop_size", "val_resize_size"), pixels)


SMALL = {"arch": "squeezenet1_1", **sizes(32)}


def test_weights_come_from_the_seed_alone() -> None:
    first = weights_sha256(build_model(a_config(**SMALL), 10, download=True))
    torch.rand(5)
    assert weights_sha256(build_model(a_config(**SMALL), 10, download=False)) == first
    assert weights_sha256(build_model(a_config(**SMALL, seed=43), 10, download=True)) != first


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"arch": "resnet5O"}, "--arch resnet5O: .*closest names are resnet50"),
        ({"arch": "fcn_resnet50"}, "--arch fcn_resnet50: .*no such"),
        pytest.param(
            {"arch": "timm:resnet5Od"}, "timm has no such .* names are resnet50d", marks=needs_timm
        ),
        pytest.param(
            {"arch": "timm:vgg11", "drop_path": 0.5},
            r"timm:vgg11: .* --drop-path 0.5 .*drop_path_rate",
            marks=needs_timm,
        ),
        pytest.param(
            {"arch": "timm:vit_tiny_patch16_224", **sizes(32), "val_crop_size": 48},
            "works for one image size only",
            marks=needs_timm,
        ),
        ({"arch": "resnet10", "pretrained": True}, "torchvision has no weights .* resnet10;"),
        ({"arch": "vgg11", "blur_pool": True, **sizes(32)}, "--arch vgg11 has no convolution"),
        (
            {"arch": "vit_b_16", **sizes(32), "val_crop_size": 24},
            "--train-crop-size 32 and --val-crop-size 24",
        ),
        ({"arch": "vit_b_16", **sizes(33)}, "cannot be built with --train-crop-size 33"),
        (
            {"arch": "resnet10", "batch_size": 1, **sizes(32)},
            r"--train-crop-size 32: .* 1 value per channel .* a larger size or --batch-size,",
        ),
    ],
)
def test_networks_that_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_model(a_config(**settings), 10, download=True)


@pytest.mark.parametrize("settings", [{"batch_norm": "sync"}, {"evaluate": True}, sizes(33)])
def test_batches_of_one_image_that_can_be_normalised(settings: dict[str, Any]) -> None:
    config = a_config(arch="resnet10", batch_size=1, **{**sizes(32), **settings})
    assert build_model(config, 10, download=True).training


@pytest.mark.parametrize("arch", ["googlenet", "inception_v3"])
def test_no_auxiliary_classifiers(arch: str, recwarn: pytest.WarningsRecorder) -> None:
    with torch.device("meta"):
        model = build_model(a_config(arch=arch, **sizes(96)), 10, download=True)
    assert not any(key.startswith(("aux", "Aux")) for key in model.state_dict())
    assert isinstance(model.eval()(torch.zeros(1, 3, 96, 96, device="meta")), torch.Tensor)
    assert not recwarn.list


def test_resnet10_has_half_the_blocks_of_resnet18() -> None:
    ten, eighteen = (
        build_model(a_config(arch=arch, **sizes(32)), 10, True).state_dict()
        for arch in ("resnet10", "resnet18")
    )
    second = ("layer1.1.", "layer2.1.", "layer3.1.", "layer4.1.")
    shapes = {name: value.shape for name, value in eighteen.items() if not name.startswith(second)}
    assert {name: value.shape for name, value in ten.items()} == shapes


@pytest.mark.parametrize("arch", ["resnet10", "resnet18", "wide_resnet50_2"])
def test_a_small_stem_keeps_the_size_of_the_image(arch: str) -> None:
    """Up to the first stage; all other layers keep their names and shapes, and begin alike."""
    config = a_config(arch=arch, **sizes(28))
    plain, small = (
        build_model(replace(config, small_stem=is_small), 10, True) for is_small in (0, 1)
    )
    before, after = plain.state_dict(), small.state_dict()
    assert after["conv1.weight"].shape == (64, 3, 3, 3)
    assert list(before) == list(after)
    assert all(torch.equal(before[name], after[name]) for name in before.keys() - {"conv1.weight"})
    images, seen = torch.randn(2, 3, 28, 28), []
    for model in (plain, small):
        model.layer1.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape[2:]))
        model.eval()(images)
    assert seen == [(7, 7), (28, 28)]
    # Kaiming's deviation for what it sends out, as torchvision's.
    deviation = float(small.conv1.weight.detach().std())
    assert deviation == pytest.approx(math.sqrt(2 / (64 * 9)), rel=0.1)
    pieces = split_resnet(small, config, 2)
    assert torch.equal(nn.Sequential(*pieces)(images), small(images))


@pytest.mark.parametrize(("arch", "last"), [("resnet18", "bn2"), ("wide_resnet50_2", "bn3")])
def test_residual_blocks_that_begin_as_the_identity(arch: str, last: str) -> None:
    for zero in (False, True):
        model = build_model(a_config(arch=arch, zero_init_residual=zero, **sizes(32)), 10, True)
        scales = [getattr(block, last).weight for block in model.modules() if hasattr(block, last)]
        blocks = [block for block in model.modules() if hasattr(block, "downsample")]
        assert len(scales) == len(blocks) > 0
        assert {float(scale.detach().abs().max()) for scale in scales} == {0.0 if zero else 1.0}


def test_the_networks_whose_blocks_can_begin_as_the_identity() -> None:
    """torchvision's own class ResNet, which alone knows `zero_init_residual`."""
    for arch in torchvision.models.list_models(module=torchvision.models):
        builder = torchvision.models.get_model_builder(arch)
        assert is_resnet(arch) == (builder.__module__ == "torchvision.models.resnet"), arch


def test_blur_before_strides() -> None:
    """By the binomial filter, where there are 16 channels; and the checkpoint does not show it."""
    config = a_config(arch="resnet18", **sizes(32))
    plain = build_model(config, 10, download=True).eval()
    blurred = build_model(replace(config, blur_pool=True), 10, download=True).eval()
    assert weights_sha256(plain) == weights_sha256(blurred)
    images = torch.randn(2, 64, 9, 8)
    strided, first = blurred.layer2[0].conv1, blurred.conv1
    binomial = torch.tensor([[1.0, 2, 1], [2, 4, 2], [1, 2, 1]]).expand(64, 1, 3, 3) / 16
    expected = plain.layer2[0].conv1(nn.functional.conv2d(images, binomial, padding=1, groups=64))
    assert torch.allclose(strided(images), expected, atol=1e-5)
    assert torch.equal(first(images[:, :3]), plain.conv1(images[:, :3])), "of three channels only"
    assert torch.equal(blurred.layer1[0].conv1(images), plain.layer1[0].conv1(images))


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_the_pieces_of_a_network_compute_what_it_computes(ranks: int) -> None:
    config = a_config(arch="resnet18", **sizes(32))
    model = build_model(config, 10, download=True).eval()
    pieces, images = split_resnet(model, config, ranks), torch.randn(2, 3, 32, 32)
    assert len(pieces) == ranks
    assert torch.equal(nn.Sequential(*pieces)(images), model(images))


@pytest.mark.parametrize(
    ("arch", "message"),
    [("resnet18", "9 ranks: the network has 8 blocks"), ("vgg11", ".*split only a ResNet")],
)
def test_a_network_that_cannot_be_cut_is_refused(arch: str, message: str) -> None:
    config = a_config(arch=arch, **sizes(32))
    with torch.device("meta"), pytest.raises(UserError, match=message):
        split_resnet(build_model(config, 10, download=True), config, 9)


def test_momentum_of_batch_norm() -> None:
    for momentum, expected in ((None, 0.1), (0.3, 0.3)):
        model = build_model(a_config(arch="resnet18", batch_norm_momentum=momentum), 10, True)
        norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
        assert {norm.momentum for norm in norms} == {expected}
        synced = replace_batch_norm(model, nn.SyncBatchNorm, lambda values: values)
        assert isinstance(synced.bn1, SyncBatchNorm), "neither engine's works on the CPU"
        assert synced.bn1.momentum == expected


class NormAndActivation(nn.BatchNorm2d):
    """One layer, as in some of timm's networks."""


@pytest.mark.parametrize(
    "layer",
    [
        NormAndActivation(3),
        nn.BatchNorm2d(3, track_running_stats=False),
        nn.BatchNorm2d(3, affine=False, track_running_stats=False),
        nn.BatchNorm2d(3, momentum=None),
    ],
    ids=str,
)
def test_layers_that_a_synchronised_one_cannot_replace(layer: nn.Module) -> None:
    words = f"--batch-norm sync: the network's {type(layer).__name__} does more .* use average"
    with pytest.raises(UserError, match=words):
        replace_batch_norm(nn.Sequential(layer), nn.SyncBatchNorm, lambda values: values)


def test_batch_norm_without_weights_is_synchronised() -> None:
    """It has statistics alone."""
    plain = nn.Sequential(nn.BatchNorm2d(3, affine=False))
    images = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(0)) + 5
    plain(images)
    synced = replace_batch_norm(copy.deepcopy(plain), nn.SyncBatchNorm, lambda values: values)
    assert isinstance(synced[0], SyncBatchNorm) and not list(synced.parameters())
    torch.testing.assert_close(synced(images), plain(images))
    torch.testing.assert_close(dict(synced.named_buffers()), dict(plain.named_buffers()))


@pytest.mark.parametrize(
    "arch", ["vit_b_16", pytest.param("timm:vit_tiny_patch16_224", marks=needs_timm)]
)
def test_vision_transformers_take_the_image_size(arch: str) -> None:
    with torch.device("meta"):
        model = build_model(a_config(arch=arch, **sizes(32)), 10, download=True)
        assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize("arch", ["alexnet", "squeezenet1_1", "convnext_tiny", "inception_v3"])
def test_images_that_a_network_pools_away(arch: str) -> None:
    with pytest.raises(UserError, match=rf"--train-crop-size 16: --arch {arch} .*(small|greater)"):
        build_model(a_config(arch=arch, **sizes(16)), 10, download=True)
    for_one = sizes(96) | {"val_crop_size": 16}
    with pytest.raises(UserError, match=f"--val-crop-size 16: --arch {arch} cannot take"):
        build_model(a_config(arch=arch, **for_one), 10, download=True)
    # An evaluation trains on no image.
    only_val = a_config(arch=arch, evaluate=True, **sizes(96) | {"train_crop_size": 16})
    assert build_model(only_val, 10, download=True).training


@pytest.mark.parametrize("settings", [{"arch": "resnet18", **sizes(8)}, {**SMALL, "batch_size": 1}])
def test_checking_sizes_changes_no_model(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = a_config(**settings)
    model = build_model(config, 10, download=True)
    drawn = torch.rand(5)
    monkeypatch.setattr("recipe.training.model._check_image_sizes", lambda model, config: None)
    unchecked = build_model(config, 10, download=True)
    assert torch.equal(torch.rand(5), drawn)
    assert weights_sha256(unchecked) == weights_sha256(model)
    assert all(module.training for module in model.modules())


def publish(monkeypatch: pytest.MonkeyPatch, state: dict[str, Any] | Exception) -> Mock:
    """What stands in for torchvision's published weights of squeezenet1_1."""
    weights = Mock(url="https://example/weights.pth", meta={"categories": ["cat"] * 10})
    weights.get_state_dict.side_effect = [state]
    monkeypatch.setattr(torchvision.models, "get_model_weights", lambda _: Mock(DEFAULT=weights))
    return weights


def test_pretrained(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = build_model(a_config(**SMALL, seed=9), 10, download=True)
    heads = dict.fromkeys(("aux1.w", "aux2.w", "AuxLogits.w"), torch.zeros(1))
    published = publish(monkeypatch, theirs.state_dict() | heads)
    config = a_config(**SMALL, pretrained=True)
    assert weights_sha256(build_model(config, 10, download=True)) == weights_sha256(theirs)
    published.get_state_dict.assert_called_once_with(
        progress=False, check_hash=True, weights_only=True
    )
    # The other ranks hold a model of the same shape, and do not touch the network.
    publish(monkeypatch, AssertionError("downloaded"))
    assert weights_sha256(build_model(config, 10, download=False)) != weights_sha256(theirs)


def test_pretrained_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    config = a_config(**SMALL, pretrained=True)
    publish(monkeypatch, {})
    for download in (True, False):  # all ranks end, and none waits for the others
        with pytest.raises(UserError, match="for 10 classes, and the data has 3"):
            build_model(config, 3, download)
    for error in (OSError("no route"), RuntimeError("no route"), UnpicklingError("no route")):
        publish(monkeypatch, error)
        with pytest.raises(UserError, match=r"example/weights.pth .*no route.*--weights"):
            build_model(config, 10, download=True)


@pytest.mark.parametrize("arch", ["resnet18", "vgg11_bn", "vit_b_16", "convnext_tiny", "swin_t"])
def test_parameter_groups(arch: str) -> None:
    """Each parameter once, norms and biases apart."""
    config = a_config(arch=arch, wd=0.1, norm_weight_decay=0.2, bias_weight_decay=0.3, **sizes(224))
    with torch.device("meta"):
        model = build_model(config, 10, download=True)
    decays = [
        (id(parameter), group["weight_decay"])
        for group in parameter_groups(model, config)
        for parameter in group["params"]
    ]
    norms = {id(p) for m in model.modules() if isinstance(m, NORMS) for p in m.parameters()}
    kinds = {id(p): 0.3 if name.endswith("bias") else 0.1 for name, p in model.named_parameters()}
    assert sorted(decays) == sorted((kinds | dict.fromkeys(norms, 0.2)).items())
    assert norms


@pytest.mark.parametrize(
    ("norms", "biases", "expected"),
    [(None, None, [0.1] * 3), (0.0, None, [0.1, 0.0, 0.1]), (0.2, 0.3, [0.1, 0.2, 0.3])],
)
def test_decay_is_that_of_weights_unless_told(
    norms: float | None, biases: float | None, expected: list[float]
) -> None:
    """And a parameter that is tied comes once, a frozen one not at all."""
    model = nn.Sequential(TinyNet(), TinyNet())
    model[1].conv.weight = model[0].conv.weight
    model[1].head.bias.requires_grad = False
    groups = parameter_groups(
        model, a_config(wd=0.1, norm_weight_decay=norms, bias_weight_decay=biases)
    )
    assert [group["weight_decay"] for group in groups] == expected
    assert sum(len(group["params"]) for group in groups) == 2 * 6 - 2


@pytest.mark.parametrize(
    ("precision", "dtype", "scales"),
    [("fp32", torch.float32, False), ("bf16", torch.bfloat16, False), ("fp16", torch.half, True)],
)
def test_number_formats(precision: str, dtype: torch.dtype, scales: bool) -> None:
    config = a_config(precision=precision)
    with autocast(config, CPU):
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype == dtype
    assert build_scaler(config, CPU).is_enabled() == scales


def test_moving_average_of_every_third_step() -> None:
    model, config = TinyNet(), a_config(model_ema=True, model_ema_decay=0.5, model_ema_steps=3)
    assert build_ema(model, a_config()) is None
    ema = build_ema(model, config)
    for step in range(1, 7):
        with torch.no_grad():
            model.head.bias.fill_(step)
            model.norm.running_mean.fill_(step)
        update_ema(ema, model, config, step)
    assert ema.module.head.bias.tolist() == [4.5] * 3, "the mean of those after steps 3 and 6"
    copy_buffers(model, ema.module)
    assert torch.equal(ema.module.norm.running_mean, torch.full((4,), 6.0))
    assert ema.module.norm.running_mean is not model.norm.running_mean
    update_ema(None, model, config, 3)


BCE = {"loss": "bce", "label_smoothing": 0.1}


def test_binary_cross_entropy() -> None:
    """Of labels as of shares; smoothed, a target is (1 - s) x its share + s / classes."""
    outputs, labels = torch.randn(6, 4), torch.tensor([0, 1, 2, 3, 0, 1])
    shares = nn.functional.one_hot(labels, 4).float()
    targets = 0.9 * shares + 0.1 / 4
    chance = outputs.sigmoid()
    losses = -targets * chance.log() - (1 - targets) * (1 - chance).log()
    criterion = build_criterion(a_config(**BCE))
    assert torch.allclose(criterion(outputs, labels), losses.mean())
    assert torch.equal(criterion(outputs, shares), criterion(outputs, labels))
    half = outputs.half()
    assert torch.equal(criterion(half, shares), criterion(half.float(), shares)), "as autocast's"


def test_binary_cross_entropy_with_a_threshold() -> None:
    """Both classes of a mixed image count in full, unless one has hardly a share in it."""
    outputs = torch.randn(2, 4)
    plain, criterion = (
        build_criterion(a_config(**BCE, bce_target_threshold=threshold))
        for threshold in (None, 0.2)
    )
    mixed = torch.tensor([[0.7, 0.3, 0.0, 0.0], [0.0, 0.2, 0.0, 0.8]])
    whole = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
    for targets, counted in ((mixed, whole), (torch.tensor([2, 0]),) * 2):
        assert torch.equal(criterion(outputs, targets), plain(outputs, counted))


@pytest.mark.parametrize("batch_norm", ["local", "average", "sync"])
def test_statistics_of_batch_norm_travel_in_one_message(batch_norm: str) -> None:
    model = nn.Sequential(nn.BatchNorm2d(2), nn.Conv2d(1, 1, 1), nn.BatchNorm1d(3))
    exchange = Mock(return_value=torch.arange(10.0))
    ranks = Ranks(a_world(0, 1), exchange, exchange)
    align_batch_norm(nn.Linear(1, 1), a_config(batch_norm=batch_norm), ranks)
    assert exchange.call_count == 0
    align_batch_norm(model, a_config(batch_norm=batch_norm), ranks)
    assert exchange.call_count == int(batch_norm != "sync")
    if batch_norm != "sync":
        assert exchange.call_args.args[0].tolist() == [0, 0, 1, 1, 0, 0, 0, 1, 1, 1]
        assert model[0].running_var.tolist() == [2, 3]
        assert model[2].running_mean.tolist() == [4, 5, 6]
    assert model[0].num_batches_tracked == 0


def draw(step: int, rank: int, seed: int = 42) -> float:
    seed_step(a_config(seed=seed), step, rank)
    return torch.rand(()).item()


def test_seed_of_a_step() -> None:
    """Another for each step and rank, and the same again in another process or engine."""
    first = draw(0, 0)
    others = {draw(step, rank) for step in range(20) for rank in range(4)}
    assert len(others) == 80
    assert draw(0, 0, seed=43) != first
    torch.rand(3)
    assert draw(0, 0) == first
    torch.manual_seed(0xC2CC515E)  # what "42 0 0" gives for ever
    assert torch.rand(()).item() == first


def test_steps_that_loss_scaling_leaves_out_leave_nothing_behind() -> None:
    """As torch's fused SGD does: it keeps a momentum that was never written."""
    config = a_config(precision="fp16")
    model = nn.Linear(64, 64)
    optimizer, scaler = build_optimizer(model, config), build_scaler(config, CPU)
    scaler.scale(torch.ones(1))
    for gradient in (float("inf"), 0.0):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, gradient)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    for parameter in model.parameters():
        momentum = optimizer.state[parameter]["momentum_buffer"]
        assert torch.allclose(momentum, config.wd * parameter, atol=1e-6)


# ---- BatchNorm over several ranks on the CPU ----


CHANNELS = 5


@pytest.mark.parametrize("shares", [(4, 4), (2, 3, 7)])
@pytest.mark.parametrize("shape", [(), (3,), (3, 2)])
def test_sync_batch_norm_equals_a_single_process(
    shares: tuple[int, ...], shape: tuple[int, ...], momentum: float = 0.3
) -> None:
    """Forward, backward and running statistics, over two steps; values far from zero."""
    draw = torch.Generator().manual_seed(0)
    batches = [torch.randn(sum(shares), CHANNELS, *shape, generator=draw) + 100 for _ in range(2)]
    wanted = torch.randn(batches[0].shape, generator=draw)
    kinds = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}
    whole = kinds[wanted.dim()](CHANNELS, momentum=momentum).double()
    with torch.no_grad():
        whole.weight.uniform_(0.5, 2, generator=draw)
        whole.bias.uniform_(-1, 1, generator=draw)
    start = {name: value.clone() for name, value in whole.state_dict().items()}

    def train(
        norm: nn.Module, batches: list[torch.Tensor], wanted: torch.Tensor
    ) -> list[torch.Tensor]:
        found = []
        for batch in batches:
            batch = batch.clone().requires_grad_()
            outputs = norm(batch)
            (outputs * wanted).sum().backward()
            found += [outputs.detach(), batch.grad]
        return found

    expected = train(whole, [batch.double() for batch in batches], wanted.double())

    def rank_of(rank: int, sum_over_ranks: Callable) -> tuple[list[torch.Tensor], nn.Module]:
        norm = SyncBatchNorm(sum_over_ranks, CHANNELS, 1e-5, momentum)
        norm.load_state_dict(start)
        own = [batch.split(shares)[rank] for batch in batches]
        return train(norm, own, wanted.split(shares)[rank]), norm

    outputs, norms = zip(*in_ranks(len(shares), rank_of), strict=True)
    joined = [torch.cat(parts) for parts in zip(*outputs, strict=True)]
    joined += [sum(getattr(norm, name).grad for norm in norms) for name in ("weight", "bias")]
    whole.float()
    wholes = [*(values.float() for values in expected), whole.weight.grad, whole.bias.grad]
    torch.testing.assert_close(joined, wholes, rtol=1e-4, atol=1e-4)
    for norm in norms:
        torch.testing.assert_close(dict(norm.named_buffers()), dict(whole.named_buffers()))
        assert torch.equal(norm.running_var, norms[0].running_var), "equal on all ranks"


def test_sync_batch_norm_exchanges_nothing_in_an_evaluation() -> None:
    def refuse(values: torch.Tensor) -> torch.Tensor:
        raise AssertionError

    norm = SyncBatchNorm(refuse, CHANNELS).eval()
    images = torch.randn(2, CHANNELS, 3, 3)
    assert torch.equal(norm(images), nn.BatchNorm2d(CHANNELS).eval()(images))


@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16])
def test_other_number_formats_are_normalised_in_fp32(dtype: torch.dtype) -> None:
    images = torch.randn(4, CHANNELS, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    norm = SyncBatchNorm(lambda values: values, CHANNELS)
    torch.testing.assert_close(norm(images), norm(images.float()).to(dtype), rtol=0, atol=0)


# ---- sums that add up to the same figures however the images are split ----


def sums_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return batch_sums(outputs, targets, nn.functional.cross_entropy(outputs, targets))


SIX = torch.tensor([[9.0, 8, 7, 6, 5, 4], [1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1]])
SHARES = torch.tensor([[0.6, 0.4, 0], [0, 0.3, 0.7], [0.1, 0, 0.9]])


def with_nan(*places: int) -> torch.Tensor:
    return SIX[:1].index_fill(1, torch.tensor(places), math.nan)


@pytest.mark.parametrize(
    ("outputs", "targets", "hits"),
    [
        (SIX, [0, 0, 4], [1, 2, 3]),  # the best guess; the last of six; the fifth
        # The label of a mixed image is its largest share.
        (torch.tensor([[3.0, 2, 1], [3, 2, 1], [1, 2, 3]]), SHARES, [2, 3, 3]),
        # topk takes NaN for the greatest number, and the first of several for the best guess.
        (with_nan(0, 1, 2, 3, 4, 5), [0], [0, 0, 1]),
        (with_nan(0), [0], [0, 0, 1]),
        (with_nan(3), [0], [0, 1, 1]),
        *((torch.arange(n).float()[None], [0], [int(n == 1), 1, 1]) for n in (1, 2, 4, 5)),
    ],
)
def test_figures(outputs: torch.Tensor, targets: Any, hits: list[int]) -> None:
    targets = torch.as_tensor(targets)
    sums = sums_of(outputs, targets)
    loss = nn.functional.cross_entropy(outputs, targets, reduction="sum").item()
    assert sums.tolist() == pytest.approx([loss, *hits], rel=1e-6, nan_ok=True)
    shares = {
        "loss": loss / hits[2],
        "top1": 100 * hits[0] / hits[2],
        "top5": 100 * hits[1] / hits[2],
    }
    assert means(sums) == pytest.approx(shares, nan_ok=True)


def test_a_flipped_evaluation_takes_the_mean_of_both_outputs() -> None:
    model, config = TinyNet(6), a_config(val_flip=True)
    images = torch.randint(0, 256, (5, 3, 5, 5), dtype=torch.uint8)
    targets = torch.arange(5)
    whole = [(images, targets)], [(images.flip(-1), targets)]
    plain, other = (evaluate(model, batches, config, CPU) for batches in whole)
    assert torch.equal(plain, other), "left and right no longer count"
    normalised, _ = to_device((images, targets), config, CPU)
    with torch.no_grad():
        outputs = (model.eval()(normalised) + model(normalised.flip(-1))) / 2
    assert torch.equal(plain, sums_of(outputs, targets))
    assert not torch.equal(plain, evaluate(model, whole[0], a_config(), CPU))


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


def test_synthetic_data_is_evaluated_only_when_asked() -> None:
    config = a_config(data="synthetic", synthetic_images=10, batch_norm="sync", val_crop_size=8)
    parts = SimpleNamespace(model=TinyNet(1000), ema=None)

    def validated(config: Config) -> list[str]:
        data = open_data(config)
        return [e.weights for e in validate(parts, config, Ranks(a_world()), data, CPU, 0)]

    assert validated(config) == []
    assert validated(replace(config, desired_acc=75.0)) == ["model"]


def test_an_evaluation_shows_the_images_of_all_ranks() -> None:
    """Also in baselines/pipeline.py, where each rank reads all images for training."""
    config = a_config(data="synthetic", synthetic_images=10, batch_norm="sync", desired_acc=75.0)
    parts, shown = SimpleNamespace(model=TinyNet(1000), ema=None), list[int]()
    ranks = Ranks(a_world(0, 2))
    validate(parts, config, ranks, open_data(config), CPU, 0, show=shown.append)
    assert shown == [8, 2]
