"""The network, its optimizer, its loss and its moving average; nothing here depends on ranks."""

import difflib
import itertools
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from pickle import UnpicklingError
from typing import Any

import torch
import torchvision
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torchvision.models.resnet import BasicBlock, ResNet

from recipe.errors import UserError, first_line
from recipe.settings.config import Config, is_resnet
from recipe.training.optimizers import optimizer_class_and_arguments
from recipe.training.state import LossScaler, make_half

NORMS = (
    nn.modules.batchnorm._BatchNorm,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.modules.instancenorm._InstanceNorm,
    nn.LocalResponseNorm,
)
# ResNet-18 with half its blocks, as in Simon et al. 2016 (arXiv 1612.01452): 4.9 million weights.
# torchvision has the parts of it, but no model of this name.
RESNET10 = "resnet10"
Criterion = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# The number format into which autocast turns the inputs of convolutions and matrix products.
AUTOCAST = {
    "fp32": None,
    "tf32": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "O2": None,
    "O3": None,
}


def build_model(config: Config, num_classes: int, download: bool) -> nn.Module:
    """Build the network of --arch with `num_classes` outputs; --seed decides its weights.

    With --pretrained only the rank with `download` loads the published weights; the engine
    broadcasts them.
    """
    check_arch(config.arch)
    published = _published_weights(config, num_classes) if config.pretrained else None
    torch.manual_seed(config.seed)
    try:
        model = _new_network(config, num_classes)
    except (AssertionError, TypeError, ValueError) as error:
        raise UserError(
            f"--arch {config.arch}: cannot be built with --train-crop-size "
            f"{config.train_crop_size} and --drop-path {config.drop_path} ({error}); choose "
            "another value, or another network"
        ) from None
    if config.batch_norm_momentum is not None:
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.momentum = config.batch_norm_momentum
    if config.blur_pool:
        blur_before_strides(model, config)
    if published is not None and download:
        _load_published(model, published, config)
    _check_image_sizes(model, config)
    if config.precision == "O3":
        make_half(model, config)
    if config.channels_last:
        give_gradients_their_layout(model)
    return model


def _published_weights(config: Config, num_classes: int) -> torchvision.models.WeightsEnum:
    """Return torchvision's best weights of --arch; UserError if there are none, or if they are for
    another number of classes."""
    if config.arch == RESNET10:
        raise UserError(
            f"--pretrained: torchvision has no weights of --arch {RESNET10}; choose another "
            "network, or give a file with --weights"
        )
    published = torchvision.models.get_model_weights(config.arch).DEFAULT
    count = len(published.meta["categories"])
    if count != num_classes:
        raise UserError(
            f"--pretrained: {config.arch}'s published weights are for {count} classes, and the "
            f"data has {num_classes}; train from scratch, or give their file with --weights "
            "and add --new-head"
        )
    return published


def check_arch(arch: str) -> None:
    """Raise UserError for a network that its library does not have."""
    if arch.startswith("timm:"):
        import timm

        library, name, names = "timm", arch.removeprefix("timm:"), timm.list_models()
        is_known = timm.is_model(name)  # also with a tag of published weights: resnet50.a1_in1k
    else:
        library, name = "torchvision", arch
        names = [RESNET10, *torchvision.models.list_models(module=torchvision.models)]
        is_known = name in names
    if not is_known:
        close = ", ".join(difflib.get_close_matches(name, names, n=3, cutoff=0))
        raise UserError(
            f"--arch {arch}: {library} has no such classification model; the closest names are "
            f"{close}"
        )


def _new_network(config: Config, num_classes: int) -> nn.Module:
    settings = _settings(config)
    if not config.arch.startswith("timm:"):
        model: nn.Module = (
            ResNet(BasicBlock, [1, 1, 1, 1], num_classes=num_classes, **settings)
            if config.arch == RESNET10
            else torchvision.models.get_model(
                config.arch, weights=None, num_classes=num_classes, **settings
            )
        )
        if config.small_stem:
            make_stem_small(model)
        return model
    import timm

    if config.drop_path:
        settings["drop_path_rate"] = config.drop_path
    return timm.create_model(config.arch.removeprefix("timm:"), num_classes=num_classes, **settings)


def make_stem_small(model: Any) -> None:
    """Have a ResNet keep the size of its images up to its first stage: replace its first
    convolution by one of 3x3 and stride 1, initialised as torchvision does, and leave out its
    max-pooling. (He et al. 2015, arXiv 1512.03385, section 4.2.)"""
    model.conv1 = nn.Conv2d(3, model.conv1.out_channels, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()


def _load_published(
    model: nn.Module, published: torchvision.models.WeightsEnum, config: Config
) -> None:
    try:
        state = published.get_state_dict(progress=False, check_hash=True, weights_only=True)
        model.load_state_dict(without_auxiliary_heads(state))
    # No network connection; a wrong checksum or other shapes; a file that needs full unpickling.
    except (OSError, RuntimeError, UnpicklingError) as error:
        reason = str(error).splitlines()[-1].strip()
        raise UserError(
            f"--pretrained: {config.arch}'s weights from {published.url} could not be loaded "
            f"({reason}); give their file with --weights, or train from scratch"
        ) from None


def blur_before_strides(model: nn.Module, config: Config) -> None:
    """Blur the input of each convolution that has a stride and at least 16 input channels, as
    FFCV's ImageNet training does; UserError if there is none. The weights keep their names."""
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    strided = [conv for conv in convolutions if max(conv.stride) > 1 and conv.in_channels >= 16]
    if not strided:
        raise UserError(
            f"--blur-pool: --arch {config.arch} has no convolution with a stride and at least 16 "
            "channels; leave it out"
        )
    for convolution in strided:
        convolution.register_forward_pre_hook(_blurred)


def _blurred(_: nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
    """Return the input filtered by (1, 2, 1) / 4 in both directions, with zeros beyond the border:
    averaging two neighbours twice gives this filter."""
    twice = nn.functional.avg_pool2d(inputs[0], 2, stride=1, padding=1)
    return nn.functional.avg_pool2d(twice, 2, stride=1)


def give_gradients_their_layout(model: nn.Module) -> None:
    """Give weights the strides that their gradients will have for NHWC images; no value moves.

    A kernel of 1x1, or of one channel, has the same order in memory in both layouts; only its
    strides differ. NHWC convolutions return its gradient with channels_last strides, DDP's buckets
    use the weight's strides, and DDP warns about each difference.
    """
    for weight in model.parameters():
        if weight.dim() == 4 and weight.is_contiguous(memory_format=torch.channels_last):
            strides = torch.empty_like(weight, memory_format=torch.channels_last).stride()
            weight.data = weight.data.as_strided(weight.shape, strides)


def _check_image_sizes(model: nn.Module, config: Config) -> None:
    """Raise UserError if images of the run's sizes are too small for the network, or refused by it.

    The forward passes run on the meta device: shapes without values, in milliseconds.
    """
    state = {name: value.detach().to("meta") for name, value in model.named_parameters()}
    state |= {name: value.to("meta") for name, value in model.named_buffers()}
    sizes = {
        "--train-crop-size": config.train_crop_size,
        "--first-crop-size": config.first_crop_size or config.train_crop_size,
        "--val-crop-size": config.val_crop_size,
    }
    if config.evaluate:
        sizes = {"--val-crop-size": config.val_crop_size}
    # In training, BatchNorm refuses a single value per channel, which has no variance.
    is_alone = config.batch_size == 1 and config.batch_norm != "sync"
    for option, size in sizes.items():
        model.train(is_alone and option != "--val-crop-size")
        images = torch.empty(1, 3, size, size, device="meta")
        try:
            with torch.no_grad(), suppress(NotImplementedError):  # operations without meta kernels
                torch.func.functional_call(model, state, (images,))
        except (RuntimeError, ValueError, AssertionError) as error:  # the last from timm
            larger = "size or --batch-size" if model.training else "size"
            raise UserError(
                f"{option} {size}: --arch {config.arch} cannot take images of {size} pixels "
                f"({first_line(error)}); choose a larger {larger}, or another network"
            ) from None
    model.train()


def _settings(config: Config) -> dict[str, Any]:
    """Return the arguments that some architectures need to fit the recipe and published weights."""
    size = config.train_crop_size
    if is_resnet(config.arch):
        return {"zero_init_residual": config.zero_init_residual}
    if config.arch in ("googlenet", "inception_v3"):
        # Their published weights come from TensorFlow, which normalises images differently.
        return {"aux_logits": False, "transform_input": True, "init_weights": True}
    is_fixed_in_size = config.arch.startswith(("vit_", "maxvit"))
    if config.arch.startswith("timm:"):
        import timm

        published = timm.get_pretrained_cfg(config.arch.removeprefix("timm:"))
        is_fixed_in_size = bool(published and published.fixed_input_size)
    if not is_fixed_in_size:
        return {}
    if size != config.val_crop_size or config.first_crop_size not in (None, size):
        raise UserError(
            f"--arch {config.arch}: works for one image size only; give --train-crop-size {size} "
            f"and --val-crop-size {config.val_crop_size} the same value, and no --first-crop-size"
        )
    if config.arch.startswith("timm:"):
        return {"img_size": size}
    return {"image_size": size} if config.arch.startswith("vit_") else {"input_size": (size, size)}


def last_layer(model: nn.Module, config: Config, num_classes: int) -> set[str]:
    """Return the names of the weights whose shape depends on the number of classes; UserError if
    there are none. A few networks have two such layers."""
    with torch.device("meta"):
        with_one_more = _new_network(config, num_classes + 1).state_dict()
    weights = model.state_dict().items()
    names = {name for name, weight in weights if weight.shape != with_one_more[name].shape}
    if not names:
        raise UserError(
            f"--new-head: no layer of --arch {config.arch} has a row for each class; leave it out"
        )
    return names


def without_auxiliary_heads(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return `state` without the auxiliary classifiers of GoogLeNet and Inception."""
    heads = ("aux1.", "aux2.", "AuxLogits.")
    return {key: value for key, value in state.items() if not key.startswith(heads)}


def parameter_groups(model: nn.Module, config: Config) -> list[dict]:
    """Return the optimizer's groups: weights with --wd, normalisation layers with
    --norm-weight-decay, other biases with --bias-weight-decay.

    Horovod names an optimizer's parameters by their position, so both engines keep the model's
    order.
    """
    decays = {
        "weights": config.wd,
        "norms": config.wd if config.norm_weight_decay is None else config.norm_weight_decay,
        "biases": config.wd if config.bias_weight_decay is None else config.bias_weight_decay,
    }
    groups: dict[str, list[nn.Parameter]] = {kind: [] for kind in decays}
    for path, parameter in model.named_parameters():
        owner, _, name = path.rpartition(".")
        is_norm = isinstance(model.get_submodule(owner), NORMS)
        is_bias = name == "bias" or name.endswith("_bias")  # attention has an in_proj_bias
        if parameter.requires_grad:
            groups["norms" if is_norm else "biases" if is_bias else "weights"].append(parameter)
    return [
        {"params": groups[kind], "weight_decay": decay}
        for kind, decay in decays.items()
        if groups[kind]
    ]


def build_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """Build the optimizer of --optimizer; its learning rate is set before every step."""
    device = next(model.parameters()).device
    optimizer_class, arguments = optimizer_class_and_arguments(config, device)
    try:
        return optimizer_class(parameter_groups(model, config), lr=config.base_lr, **arguments)
    except RuntimeError as error:  # from an Apex that was built without its kernels
        raise UserError(
            f"--optimizer {config.optimizer}: {error}; install Apex as docs/recipe.md says"
        ) from None


def autocast(config: Config, device: torch.device) -> AbstractContextManager:
    """Return a context in which forward passes use the number format of --precision."""
    dtype = AUTOCAST[config.precision]
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


def build_scaler(config: Config, device: torch.device) -> LossScaler:
    """Build the loss scaling of --loss-scale; with a scale of 1 it does nothing."""
    scale = config.scales_loss_by
    return LossScaler(device.type, None if scale == "dynamic" else scale)


def build_criterion(config: Config) -> Criterion:
    """Return the training loss: a function of outputs [N, classes] and of labels [N] or shares of
    classes [N, classes]; it returns the mean."""
    losses: dict[str, Any] = {
        "cross-entropy": nn.functional.cross_entropy,
        "bce": partial(binary_cross_entropy, threshold=config.bce_target_threshold),
    }
    return partial(losses[config.loss], label_smoothing=config.label_smoothing)


def binary_cross_entropy(
    outputs: torch.Tensor, targets: torch.Tensor, label_smoothing: float, threshold: float | None
) -> torch.Tensor:
    """Binary cross-entropy of each class separately, as in Wightman et al. 2021 (arXiv 2110.00476).
    With a `threshold`, the target of a class is 1 if its share is above it, else 0. Label smoothing
    then spreads a share of the targets over all classes, as for cross-entropy."""
    if targets.dim() == 1:
        targets = nn.functional.one_hot(targets, outputs.shape[1])
    if threshold is not None:
        targets = targets > threshold
    smoothed = targets * (1 - label_smoothing) + label_smoothing / outputs.shape[1]
    return nn.functional.binary_cross_entropy_with_logits(outputs.float(), smoothed)


def build_ema(model: nn.Module, config: Config) -> AveragedModel | None:
    """Build the exponential moving average of the weights. It needs the model's BatchNorm
    statistics, which are copied to it before it is evaluated or saved."""
    return AveragedModel(model) if config.model_ema else None


@torch.no_grad()
def update_ema(ema: AveragedModel | None, model: nn.Module, config: Config, step: int) -> None:
    """Update the moving average with the weights after `step` (from 1), if an update is due.

    `update_parameters` would also copy each buffer separately, and wait for the GPU to read a
    number from it.
    """
    if ema is None or step % config.model_ema_steps:
        return
    averages, weights = tuple(ema.module.parameters()), tuple(model.parameters())
    if ema.n_averaged:  # this counter is in the CPU's memory
        torch._foreach_lerp_(averages, weights, 1 - config.model_ema_decay)
    else:
        torch._foreach_copy_(averages, weights)
    ema.n_averaged += 1


def seed_step(config: Config, step: int, rank: int) -> None:
    """Seed dropout, and everything else that draws random numbers on the device, for one step.

    So a resumed run draws the same numbers, and no generator state needs to be saved.
    """
    seed = zlib.crc32(f"{config.seed} {step} {rank}".encode())
    # As torch.manual_seed does for CPU and GPUs; it would also look for other devices every time.
    for generator in (torch.default_generator, *torch.cuda.default_generators):
        generator.manual_seed(seed)


def split_resnet(model: Any, config: Config, ranks: int) -> list[nn.Sequential]:
    """Split a ResNet into one piece per rank; each piece takes the output of the one before it. All
    have about the same number of residual blocks, which cost about the same. UserError for other
    networks, and if there are more ranks than blocks."""
    if not is_resnet(config.arch):
        raise UserError(f"--arch {config.arch}: this script can split only a ResNet; choose one")
    blocks = [*model.layer1, *model.layer2, *model.layer3, *model.layer4]
    if ranks > len(blocks):
        raise UserError(f"{ranks} ranks: the network has {len(blocks)} blocks; start fewer")
    ends = [len(blocks) * rank // ranks for rank in range(ranks + 1)]
    pieces = [blocks[begin:end] for begin, end in itertools.pairwise(ends)]
    pieces[0] = [model.conv1, model.bn1, model.relu, model.maxpool, *pieces[0]]
    pieces[-1] += [model.avgpool, nn.Flatten(1), model.fc]
    return [nn.Sequential(*piece) for piece in pieces]
