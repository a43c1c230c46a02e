"""Presets: defaults for all flags, each with its published accuracy and the source of it."""

from dataclasses import replace
from typing import Any

from recipe.settings.flags import Config


class Preset:
    """The settings of a recipe that differ from the preset `like`. `top1` is the accuracy that
    `source` publishes, in percent, and `time` how long the training took there."""

    def __init__(
        self, about: str, *, top1: str, source: str, time: str = "", like: str = "", **settings: Any
    ) -> None:
        self.about, self.like, self.settings = " ".join(about.split()), like, settings
        self.top1, self.source, self.time = top1, source, time


PRESETS = {
    "digits": Preset(
        "The embedded handwritten digits; accuracy over ten seeds each with 1, 2 and 4 workers.",
        top1="97.8 to 99.7",
        source="CHANGELOG.md",
        time="half a minute, 1 core",
        arch="resnet10",
        train_crop_size=20,
        val_resize_size=20,
        val_crop_size=20,
        random_crop_scale=(0.85, 1.0),
        hflip_prob=0.0,
        epochs=4,
        batch_size=16,
        val_batch_size=64,
        base_lr=0.005,
        warmup_epochs=1.0,
        lr_scheduler="cosine",
        label_smoothing=0.1,
    ),
    "digits-resnet18": Preset(
        """The digits as the comparisons in results/ have trained them since 22 November 2026
        (python compare/run.py square): a network twice as large in less than half the steps, with
        4 workers.""",
        top1="96.1 to 98.6",
        source="CHANGELOG.md",
        like="digits",
        arch="resnet18",
        batch_size=40,
        base_lr=0.01,
        batch_norm_momentum=0.25,
    ),
    "fashion-resnet18": Preset(
        """Fashion-MNIST on a GPU, with the settings of Zhong et al. 2017 (arXiv 1708.04896; they
        got 95.6 to 95.8 % with other ResNets in 300 epochs), but 40 epochs, a warm-up, a cosine
        and the pixels' own mean and deviation. The published figure is of K. Efthymiadis's
        ResNet-18 with other settings; Fashion-MNIST's authors have not tested it.""",
        top1="94.9",
        source="Fashion-MNIST, README; other settings",
        data="fashion-mnist",
        arch="resnet18",
        small_stem=True,
        image_mean=(0.2860, 0.2860, 0.2860),
        image_std=(0.3530, 0.3530, 0.3530),
        train_crop_size=28,
        val_resize_size=28,
        val_crop_size=28,
        random_crop_padding=4,
        epochs=40,
        batch_size=128,
        val_batch_size=250,
        base_lr=0.1,
        wd=5e-4,
        lr_scheduler="cosine",
        warmup_epochs=2.0,
    ),
    "fashion-quick": Preset(
        """Fashion-MNIST on two CPU cores: half the blocks of ResNet-18, behind ImageNet's stem,
        which shrinks images to 7x7 pixels.""",
        top1="90.85 (90.65 to 91.20)",
        source="docs/results.md, 5 seeds",
        time="6 min, 2 cores",
        like="fashion-resnet18",
        arch="resnet10",
        small_stem=False,
        random_crop_padding=2,
        epochs=5,
        batch_size=64,
        base_lr=0.05,
        nesterov=True,
        warmup_epochs=1.0,
    ),
    "goyal-90": Preset(
        """ResNet-50 by the linear scaling rule of Goyal et al. 2017, for 8 workers of 32 images;
        with 256 workers they got 76.26 +- 0.09 %. Horovod's Keras example has the same weight
        decay, and the same rates after warm-up: 75.66-75.88 % on 128 GPUs (horovod issue 191).""",
        top1="76.40 +- 0.12",
        source="arXiv 1706.02677",
        time="1 h, 256 P100",
        data="",
        wd=1e-4,
        norm_weight_decay=0.0,
        bias_weight_decay=0.0,
        zero_init_residual=True,
        warmup_method="gradual-256",
    ),
    "tv-v1": Preset(
        """torchvision's first recipe, ResNet-50 with 8 workers of 32 (others got 75.4 to 75.9 %
        from the same settings, vision issue 5593).""",
        top1="76.130",
        source="torchvision, IMAGENET1K_V1",
        data="",
        wd=1e-4,
        base_lr=0.0125,
        warmup_epochs=0.0,
        lr_step_epochs=(30, 60),
    ),
    "tv-v2": Preset(
        """torchvision's second recipe, ResNet-50 with 8 workers of 128; the top-1 is that of the
        weights' moving average (vision issue 3995, pull request 5201).""",
        top1="80.858",
        source="torchvision, IMAGENET1K_V2",
        data="",
        epochs=600,
        batch_size=128,
        base_lr=0.5 / 8,
        wd=2e-5,
        norm_weight_decay=0.0,
        lr_scheduler="cosine",
        warmup_method="linear",
        label_smoothing=0.1,
        mixup_alpha=0.2,
        cutmix_alpha=1.0,
        auto_augment="ta_wide",
        random_erase=0.1,
        augment_repeats=4,
        model_ema=True,
        # torchvision scales the decay by batch, steps and epochs.
        model_ema_decay=1 - 2e-5 * (8 * 128 * 32 / 600),
        model_ema_steps=32,
        train_crop_size=176,
        val_resize_size=232,
    ),
    "tv-alexnet": Preset(
        "AlexNet by torchvision's first recipe, at AlexNet's learning rate, 8 workers of 32.",
        top1="56.522",
        source="torchvision, IMAGENET1K_V1",
        like="tv-v1",
        arch="alexnet",
        base_lr=0.01 / 8,
    ),
    "tv-vgg16": Preset(
        """VGG-16 by torchvision's first recipe, at VGG's learning rate, 8 workers of 32. It sends
        many bytes of gradients for little computation.""",
        top1="71.592",
        source="torchvision, IMAGENET1K_V1",
        like="tv-v1",
        arch="vgg16",
        base_lr=0.01 / 8,
    ),
    "dle-90": Preset(
        "NVIDIA's ResNet-50 in mixed precision, 8 workers of 256; 76.88 +- 0.16 % on 8 V100.",
        top1="77.12 +- 0.11",
        source="DeepLearningExamples",
        time="8 A100",
        data="",
        batch_size=256,
        val_batch_size=256,
        base_lr=0.256,
        momentum=0.875,
        wd=1 / 32768,
        norm_weight_decay=0.0,
        lr_scheduler="cosine",
        warmup_epochs=8.0,
        warmup_method="linear",
        label_smoothing=0.1,
        precision="fp16",
        loss_scale=128.0,
        channels_last=True,
    ),
    "dle-50": Preset(
        "dle-90 in 50 epochs.",
        top1="76.25 +- 0.04",
        source="DeepLearningExamples",
        time="8 V100",
        like="dle-90",
        epochs=50,
    ),
    "dle-250": Preset(
        "dle-90 in 250 epochs and with mixup; 78.25 +- 0.12 % on 8 V100.",
        top1="78.43 +- 0.11",
        source="DeepLearningExamples",
        time="8 A100, 16,621 images/s",
        like="dle-90",
        epochs=250,
        mixup_alpha=0.2,
    ),
    "ffcv-rn50-16": Preset(
        "FFCV's ImageNet training, ResNet-50 with 8 workers of 512.",
        top1="73.8",
        source="libffcv/ffcv-imagenet",
        time="14.9 min, 8 A100",
        data="",
        epochs=16,
        batch_size=512,
        val_batch_size=512,
        base_lr=1.7 / 8,
        wd=1e-4,
        norm_weight_decay=0.0,
        lr_scheduler="linear",
        warmup_epochs=2.0,
        warmup_method="linear",
        label_smoothing=0.1,
        blur_pool=True,
        first_crop_size=160,
        train_crop_size=192,
        resize_epochs=(11, 13),
        val_resize_size=293,
        val_crop_size=256,
        val_flip=True,
        precision="fp16",
        channels_last=True,
    ),
    "ffcv-rn50-88": Preset(
        "ffcv-rn50-16 in 88 epochs.",
        top1="78.4",
        source="libffcv/ffcv-imagenet",
        time="77.2 min, 8 A100",
        like="ffcv-rn50-16",
        epochs=88,
        resize_epochs=(65, 76),
    ),
    "rsb-a1": Preset(
        """Procedure A1 of "ResNet strikes back" (Wightman et al. 2021, table 2), ResNet-50; here 8
        workers of 256. Needs the extra `timm`.""",
        top1="80.4",
        source="arXiv 2110.00476",
        time="4.6 days, 4 V100",
        data="",
        arch="timm:resnet50",
        epochs=600,
        batch_size=256,
        val_batch_size=256,
        base_lr=5e-3 / 8,
        optimizer="lamb",
        clip_grad_norm=1.0,
        wd=0.01,
        norm_weight_decay=0.0,
        bias_weight_decay=0.0,
        lr_scheduler="cosine",
        lr_min=1e-6,
        warmup_method="linear",
        loss="bce",
        bce_target_threshold=0.2,
        label_smoothing=0.1,
        drop_path=0.05,
        mixup_alpha=0.2,
        cutmix_alpha=1.0,
        auto_augment="rand-m7-mstd0.5-inc1",
        augment_repeats=3,
        val_resize_size=235,
        interpolation="bicubic",
        precision="fp16",
    ),
    "rsb-a2": Preset(
        "Procedure A2.",
        top1="79.8",
        source="arXiv 2110.00476",
        like="rsb-a1",
        epochs=300,
        wd=0.02,
        label_smoothing=0.0,
        mixup_alpha=0.1,
    ),
    "rsb-a3": Preset(
        "Procedure A3, with smaller images.",
        top1="78.1",
        source="arXiv 2110.00476",
        like="rsb-a2",
        epochs=100,
        base_lr=8e-3 / 8,
        drop_path=0.0,
        auto_augment="rand-m6-mstd0.5-inc1",
        augment_repeats=1,
        train_crop_size=160,
    ),
}


def preset(name: str) -> Config:
    """Return the settings of this preset."""
    entry = PRESETS[name]
    return replace(preset(entry.like) if entry.like else Config(), preset=name, **entry.settings)


def table() -> str:
    """Return a table of all presets with their epochs, published top-1, time and source."""
    rows = [("--preset", "epochs", "top-1, %", "time there", "source")]
    for name, entry in PRESETS.items():
        rows.append((name, str(preset(name).epochs), entry.top1, entry.time or "-", entry.source))
    return "\n".join("{:<15}  {:>6}  {:<13}  {:<23}  {}".format(*row) for row in rows)
