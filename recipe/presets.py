"""Presets: defaults for all flags, each with its command, its expected accuracy, and the source of
that figure."""

from dataclasses import replace

from recipe.flags import Config


def digits() -> Config:
    """The embedded handwritten digits, half a minute on a CPU core: 97.8 to 99.4 % top-1 with 1 or
    2 workers, 96.1 to 98.3 % with 4.

    python ddp_train/train.py
    """
    return Config(
        preset="digits",
        arch="resnet18",
        train_crop_size=20,
        val_resize_size=20,
        val_crop_size=20,
        random_crop_scale=(0.85, 1.0),
        hflip_prob=0.0,
        epochs=4,
        batch_size=40,
        val_batch_size=64,
        base_lr=0.01,
        warmup_epochs=1.0,
        lr_scheduler="cosine",
        label_smoothing=0.1,
        batch_norm_momentum=0.25,
    )


def goyal_90() -> Config:
    """ResNet-50 in 90 epochs as Goyal et al. 2017 (arXiv 1706.02677) scaled it: 76.40 +- 0.12 %
    with 8 workers of 32, 76.26 +- 0.09 % with 256. Horovod's Keras example has the same rates and
    decay: 75.66-75.88 % on 128 GPUs (horovod issue 191).

    horovodrun -np 128 ... python horovod_train/train.py --data IMAGENET --preset goyal-90
    """
    return Config(
        preset="goyal-90",
        data="",
        wd=1e-4,
        norm_weight_decay=0.0,
        bias_weight_decay=0.0,
        zero_init_residual=True,
    )


def tv_v1() -> Config:
    """torchvision's first recipe: ResNet-50 76.130 % with 8 workers of 32 (torchvision's weights,
    IMAGENET1K_V1; others got 75.4 to 75.9 % from the same settings, vision issue 5593).

    torchrun --nproc-per-node 8 ddp_train/train.py --data IMAGENET --preset tv-v1
    """
    return Config(
        preset="tv-v1", data="", wd=1e-4, base_lr=0.0125, warmup_epochs=0.0, lr_step_epochs=(30, 60)
    )


def dle_90() -> Config:
    """NVIDIA DeepLearningExamples' 90 epochs: ResNet-50 77.12 +- 0.11 % in mixed precision on 8
    A100, 76.88 +- 0.16 % on 8 V100; 8 workers of 256.

    torchrun --nproc-per-node 8 ddp_train/train.py --data IMAGENET --preset dle-90
    """
    return Config(
        preset="dle-90",
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
        channels_last=True,
    )


def dle_50() -> Config:
    """The same in 50 epochs: 76.25 +- 0.04 % on 8 V100.

    torchrun --nproc-per-node 8 ddp_train/train.py --data IMAGENET --preset dle-50
    """
    return replace(dle_90(), preset="dle-50", epochs=50)


PRESETS = {
    "digits": digits,
    "goyal-90": goyal_90,
    "tv-v1": tv_v1,
    "dle-50": dle_50,
    "dle-90": dle_90,
}
