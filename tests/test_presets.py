"""The published recipes against their sources, value by value, and what decays as they say it does.

The sources, and what of them no flag can say, are in docs/recipe.md.
"""

from typing import Any

import pytest
import torch
from making import a_config
from torch import nn
from torchvision.ops._utils import split_normalization_params

from recipe.settings.config import Config
from recipe.settings.presets import PRESETS
from recipe.settings.presets import preset as preset_of
from recipe.training.model import build_model, parameter_groups
from recipe.training.optimizers import learning_rate

GOYAL = "arXiv 1706.02677, "
KERAS = "horovod, examples/keras/keras_imagenet_resnet50.py: "
VISION = "pytorch/vision, references/classification/train.py: "
VISION_TRANSFORMS = "pytorch/vision, references/classification/presets.py: "
VISION_V2 = "pytorch/vision, issue 3995, comment 1013906621, and README: "
VISION_README = "pytorch/vision, references/classification/README.md, AlexNet and VGG: "
DLE = "DeepLearningExamples, PyTorch/Classification/ConvNets/"
DLE_README = DLE + "resnet50v1.5/README.md: "
DLE_50 = DLE + "resnet50v1.5/training/AMP/DGX1_RN50_AMP_50E.sh: "
DLE_90 = DLE + "resnet50v1.5/training/AMP/DGX1V_resnet50_AMP_90E.sh: "
DLE_250 = DLE + "resnet50v1.5/training/AMP/DGXA100_resnet50_AMP_250E.sh: "
DLE_CONFIGS = DLE + "configs.yml: "
FFCV = "libffcv/ffcv-imagenet, train_imagenet.py: "
FFCV_16 = "libffcv/ffcv-imagenet, rn50_configs/rn50_16_epochs.yaml: "
FFCV_88 = "libffcv/ffcv-imagenet, rn50_configs/rn50_88_epochs.yaml: "
FASHION = "zalandoresearch/fashion-mnist, README: "
FASHION_PIXELS = "mean and deviation of the training pixels: tests/test_idx.py"
ERASING = "zhunzhong07/Random-Erasing, fashionmnist.py: "
HE = "arXiv 1512.03385, 4.2: "
OWN = "own choice, for 40 epochs instead of 300: "
RSB = "arXiv 2110.00476, table 2: "
MMPRETRAIN = (
    "open-mmlab/mmpretrain, configs/resnet/resnet50_8xb256-rsb-a1-600e_in1k.py and its bases: "
)
TIMM = "huggingface/pytorch-image-models, timm/"
ML_DECODER = "Alibaba-MIIL/ML_Decoder, README, A2 by timm's train.py: "

# preset, field, its value, and the line of the source.
VALUES: list[tuple[str, str, Any, str]] = [
    ("fashion-resnet18", "arch", "resnet18", FASHION + "ResNet18, 0.949"),
    ("fashion-resnet18", "small_stem", True, HE + "the first layer is 3x3, no pooling"),
    ("fashion-resnet18", "image_mean", (0.2860,) * 3, FASHION_PIXELS),
    ("fashion-resnet18", "image_std", (0.3530,) * 3, FASHION_PIXELS),
    ("fashion-resnet18", "train_crop_size", 28, ERASING + "RandomCrop(28, padding=4)"),
    ("fashion-resnet18", "random_crop_padding", 4, ERASING + "RandomCrop(28, padding=4)"),
    ("fashion-resnet18", "hflip_prob", 0.5, ERASING + "RandomHorizontalFlip()"),
    ("fashion-resnet18", "val_resize_size", 28, ERASING + "transform_test: no resizing"),
    ("fashion-resnet18", "val_crop_size", 28, ERASING + "transform_test: no crop"),
    ("fashion-resnet18", "batch_size", 128, ERASING + "--train-batch default=128"),
    ("fashion-resnet18", "val_batch_size", 250, "own choice: changes no result"),
    ("fashion-resnet18", "base_lr", 0.1, ERASING + "--lr default=0.1"),
    ("fashion-resnet18", "momentum", 0.9, ERASING + "--momentum default=0.9"),
    ("fashion-resnet18", "wd", 5e-4, ERASING + "--weight-decay default=5e-4"),
    ("fashion-resnet18", "epochs", 40, OWN + "--epochs default=300"),
    ("fashion-resnet18", "lr_scheduler", "cosine", OWN + "--schedule default=[150, 225]"),
    ("fashion-resnet18", "warmup_epochs", 2, OWN + "none with one worker"),
    ("goyal-90", "arch", "resnet50", GOYAL + "5.1: ResNet-50, stride 2 on the 3x3 layers"),
    ("goyal-90", "epochs", 90, GOYAL + "5.1: 90 epochs; " + KERAS + "--epochs default=90"),
    ("goyal-90", "batch_size", 32, GOYAL + "5.1: n = 32; " + KERAS + "--batch-size default=32"),
    ("goyal-90", "base_lr", 0.1 / 8, GOYAL + "5.1: 0.1 kn/256; " + KERAS + "--base-lr 0.0125"),
    ("goyal-90", "momentum", 0.9, GOYAL + "5.1: m of 0.9; " + KERAS + "--momentum default=0.9"),
    ("goyal-90", "nesterov", False, KERAS + "SGD(lr, momentum), nesterov not given"),
    ("goyal-90", "wd", 2 * 5e-5, GOYAL + "5.1: 0.0001; " + KERAS + "l2(0.00005), w^2 not w^2/2"),
    ("goyal-90", "norm_weight_decay", 0.0, GOYAL + "5.1: none on gamma and beta"),
    ("goyal-90", "bias_weight_decay", 0.0, KERAS + "kernel_regularizer only"),
    ("goyal-90", "zero_init_residual", True, GOYAL + "5.1: gamma = 0 in each block's last BN"),
    ("goyal-90", "lr_scheduler", "step", GOYAL + "5.1: by 1/10"),
    ("goyal-90", "lr_step_epochs", (30, 60, 80), GOYAL + "5.1: 30-th, 60-th, and 80-th epoch"),
    ("goyal-90", "lr_gamma", 0.1, GOYAL + "5.1: 1/10; " + KERAS + "multiplier=1e-1"),
    ("goyal-90", "warmup_epochs", 5, GOYAL + "2.2: 5; " + KERAS + "--warmup-epochs default=5"),
    ("goyal-90", "warmup_method", "gradual-256", GOYAL + "5.2: from 0.1 linearly to 3.2"),
    ("goyal-90", "label_smoothing", 0.0, KERAS + "categorical_crossentropy"),
    ("goyal-90", "train_crop_size", 224, GOYAL + "5.1: 224x224 random crop, or its flip"),
    ("tv-v1", "arch", "resnet50", "torchvision, README: --model $MODEL, no other flag"),
    ("tv-v1", "epochs", 90, VISION + "--epochs default=90"),
    ("tv-v1", "batch_size", 32, VISION + "--batch-size default=32, on 8 GPUs"),
    ("tv-v1", "base_lr", 0.1 / 8, VISION + "--lr default=0.1, of 8 workers together"),
    ("tv-v1", "momentum", 0.9, VISION + "--momentum default=0.9"),
    ("tv-v1", "nesterov", False, VISION + '--opt default="sgd"'),
    ("tv-v1", "wd", 1e-4, VISION + "--weight-decay default=1e-4"),
    ("tv-v1", "norm_weight_decay", None, VISION + "--norm-weight-decay default=None, as --wd"),
    ("tv-v1", "bias_weight_decay", None, VISION + "model.parameters() in one group"),
    ("tv-v1", "zero_init_residual", False, "torchvision.models.resnet50(): default"),
    ("tv-v1", "lr_scheduler", "step", VISION + '--lr-scheduler default="steplr"'),
    ("tv-v1", "lr_step_epochs", (30, 60), VISION + "--lr-step-size default=30, of 90 epochs"),
    ("tv-v1", "lr_gamma", 0.1, VISION + "--lr-gamma default=0.1"),
    ("tv-v1", "warmup_epochs", 0, VISION + "--lr-warmup-epochs default=0"),
    ("tv-v1", "label_smoothing", 0.0, VISION + "--label-smoothing default=0.0"),
    ("tv-v1", "model_ema", False, VISION + "--model-ema: not by default"),
    ("tv-v1", "train_crop_size", 224, VISION + "--train-crop-size default=224"),
    ("tv-v1", "val_resize_size", 256, VISION + "--val-resize-size default=256"),
    ("tv-v1", "val_crop_size", 224, VISION + "--val-crop-size default=224"),
    ("tv-v1", "interpolation", "bilinear", VISION + '--interpolation default="bilinear"'),
    ("tv-v1", "random_crop_scale", (0.08, 1.0), VISION_TRANSFORMS + "RandomResizedCrop, default"),
    ("tv-v1", "hflip_prob", 0.5, VISION_TRANSFORMS + "hflip_prob=0.5"),
    ("tv-v1", "auto_augment", None, VISION + "--auto-augment default=None"),
    ("tv-v1", "random_erase", 0.0, VISION + "--random-erase default=0.0"),
    ("tv-v2", "arch", "resnet50", "torchvision.models.ResNet50_Weights.IMAGENET1K_V2"),
    ("tv-v2", "epochs", 600, VISION_V2 + "--epochs 600"),
    ("tv-v2", "batch_size", 128, VISION_V2 + "--batch-size 128, on 8 GPUs"),
    ("tv-v2", "base_lr", 0.5 / 8, VISION_V2 + "--lr 0.5, of 8 workers together"),
    ("tv-v2", "momentum", 0.9, VISION + "--momentum default=0.9"),
    ("tv-v2", "nesterov", False, VISION + '--opt default="sgd"'),
    ("tv-v2", "wd", 0.00002, VISION_V2 + "--weight-decay 0.00002"),
    ("tv-v2", "norm_weight_decay", 0.0, VISION_V2 + "--norm-weight-decay 0.0"),
    ("tv-v2", "bias_weight_decay", None, VISION + "--bias-weight-decay default=None"),
    ("tv-v2", "zero_init_residual", False, "torchvision.models.resnet50(): default"),
    ("tv-v2", "lr_scheduler", "cosine", VISION_V2 + "--lr-scheduler cosineannealinglr"),
    ("tv-v2", "lr_min", 0.0, VISION + "--lr-min default=0.0"),
    ("tv-v2", "warmup_epochs", 5, VISION_V2 + "--lr-warmup-epochs 5"),
    ("tv-v2", "warmup_method", "linear", VISION_V2 + "--lr-warmup-method linear, from 0.01"),
    ("tv-v2", "loss", "cross-entropy", VISION + "nn.CrossEntropyLoss"),
    ("tv-v2", "label_smoothing", 0.1, VISION_V2 + "--label-smoothing 0.1"),
    ("tv-v2", "mixup_alpha", 0.2, VISION_V2 + "--mixup-alpha 0.2"),
    ("tv-v2", "cutmix_alpha", 1.0, VISION_V2 + "--cutmix-alpha 1.0, RandomChoice of the two"),
    ("tv-v2", "auto_augment", "ta_wide", VISION_V2 + "--auto-augment ta_wide"),
    ("tv-v2", "random_erase", 0.1, VISION_V2 + "--random-erase 0.1"),
    ("tv-v2", "augment_repeats", 4, VISION_V2 + "--ra-sampler --ra-reps 4"),
    ("tv-v2", "model_ema", True, VISION_V2 + "--model-ema"),
    ("tv-v2", "model_ema_steps", 32, VISION + "--model-ema-steps default=32"),
    ("tv-v2", "model_ema_decay", 1 - 2e-5 * (8 * 128 * 32 / 600), VISION + "adjust"),
    ("tv-v2", "train_crop_size", 176, VISION_V2 + "--train-crop-size 176"),
    ("tv-v2", "val_resize_size", 232, VISION_V2 + "--val-resize-size 232"),
    ("tv-v2", "val_crop_size", 224, VISION + "--val-crop-size default=224"),
    ("tv-v2", "interpolation", "bilinear", VISION + '--interpolation default="bilinear"'),
    ("tv-v2", "random_crop_scale", (0.08, 1.0), VISION_TRANSFORMS + "RandomResizedCrop, default"),
    ("tv-v2", "hflip_prob", 0.5, VISION_TRANSFORMS + "hflip_prob=0.5"),
    ("tv-v2", "precision", "fp32", VISION + "--amp: not given"),
    ("tv-alexnet", "arch", "alexnet", VISION_README + "--model $MODEL"),
    ("tv-alexnet", "base_lr", 1e-2 / 8, VISION_README + "--lr 1e-2, of 8 workers together"),
    ("tv-vgg16", "arch", "vgg16", VISION_README + "--model $MODEL"),
    ("tv-vgg16", "base_lr", 1e-2 / 8, VISION_README + "--lr 1e-2, of 8 workers together"),
    ("dle-90", "arch", "resnet50", DLE_90 + "--model resnet50"),
    ("dle-90", "epochs", 90, DLE_90 + "--epochs 90 --mixup 0.0"),
    ("dle-90", "batch_size", 256, DLE_CONFIGS + "batch_size: 256"),
    ("dle-90", "base_lr", 2.048 / 8, DLE_CONFIGS + "lr: 2.048, optimizer_batch_size: 2048"),
    ("dle-90", "momentum", 0.875, DLE_CONFIGS + "momentum: 0.875"),
    ("dle-90", "nesterov", False, DLE + "main.py: --nesterov default: false"),
    ("dle-90", "wd", 3.0517578125e-05, DLE_CONFIGS + "weight_decay: 3.0517578125e-05"),
    ("dle-90", "norm_weight_decay", 0.0, DLE_README + "no WD on Batch Norm (gamma/bias)"),
    ("dle-90", "bias_weight_decay", None, DLE + "image_classification/optimizers.py: rest_params"),
    ("dle-90", "zero_init_residual", False, DLE + "image_classification/models/resnet.py: False"),
    ("dle-90", "lr_scheduler", "cosine", DLE_CONFIGS + "lr_schedule: cosine"),
    ("dle-90", "lr_min", 0.0, DLE + "main.py: --end-lr default=0"),
    ("dle-90", "warmup_epochs", 8, DLE_CONFIGS + "warmup: 8"),
    ("dle-90", "warmup_method", "linear", DLE + "image_classification/optimizers.py: lr e/warmup"),
    ("dle-90", "label_smoothing", 0.1, DLE_CONFIGS + "label_smoothing: 0.1"),
    ("dle-90", "model_ema", False, DLE + "main.py: --use-ema default=None"),
    ("dle-90", "precision", "fp16", DLE_CONFIGS + "amp: True"),
    ("dle-90", "loss_scale", 128, DLE_CONFIGS + "static_loss_scale: 128"),
    ("dle-90", "channels_last", True, DLE_CONFIGS + "memory_format: nhwc"),
    ("dle-90", "train_crop_size", 224, DLE_CONFIGS + "image_size: 224"),
    ("dle-90", "val_resize_size", 256, DLE_README + "Scale to 256x256"),
    ("dle-90", "val_crop_size", 224, DLE_README + "Center crop to 224x224"),
    ("dle-90", "val_batch_size", 256, DLE + "main.py: args.batch_size for both loaders"),
    ("dle-90", "random_crop_scale", (0.08, 1.0), DLE_README + "Scale from 8% to 100%"),
    ("dle-90", "hflip_prob", 0.5, DLE + "image_classification/dataloaders.py: probability=0.5"),
    ("dle-50", "epochs", 50, DLE_50 + "--epochs 50"),
    ("dle-50", "base_lr", 2.048 / 8, DLE_50 + "--lr 2.048 --optimizer-batch-size 2048"),
    ("dle-50", "batch_size", 256, DLE_50 + "-b 256"),
    ("dle-50", "warmup_epochs", 8, DLE_50 + "--warmup 8"),
    ("dle-50", "momentum", 0.875, DLE_50 + "--mom 0.875"),
    ("dle-50", "wd", 3.0517578125e-05, DLE_50 + "--wd 3.0517578125e-05"),
    ("dle-50", "label_smoothing", 0.1, DLE_50 + "--label-smoothing 0.1"),
    ("dle-250", "epochs", 250, DLE_250 + "nothing said; " + DLE_CONFIGS + "epochs: 250"),
    ("dle-250", "mixup_alpha", 0.2, DLE_CONFIGS + "mixup: 0.2"),
    ("dle-250", "warmup_epochs", 8, DLE_CONFIGS + "warmup: 8"),
    ("dle-250", "label_smoothing", 0.1, DLE_CONFIGS + "label_smoothing: 0.1"),
    ("ffcv-rn50-16", "arch", "resnet50", FFCV_16 + "arch: resnet50"),
    ("ffcv-rn50-16", "epochs", 16, FFCV_16 + "epochs: 16"),
    ("ffcv-rn50-16", "batch_size", 512, FFCV_16 + "batch_size: 512, of each of 8 loaders"),
    ("ffcv-rn50-16", "val_batch_size", 512, FFCV + "validation.batch_size default=512"),
    ("ffcv-rn50-16", "base_lr", 1.7 / 8, FFCV_16 + "lr: 1.7, of 8 workers together"),
    ("ffcv-rn50-16", "momentum", 0.9, FFCV_16 + "momentum: 0.9"),
    ("ffcv-rn50-16", "nesterov", False, FFCV + "SGD(lr, momentum)"),
    ("ffcv-rn50-16", "wd", 1e-4, FFCV_16 + "weight_decay: 0.0001"),
    ("ffcv-rn50-16", "norm_weight_decay", 0.0, FFCV_16 + "bn_wd: 0; " + FFCV + "bn_params"),
    ("ffcv-rn50-16", "bias_weight_decay", None, FFCV + "other_params"),
    ("ffcv-rn50-16", "zero_init_residual", False, "torchvision.models.resnet50(): default"),
    ("ffcv-rn50-16", "lr_scheduler", "linear", FFCV_16 + "cyclic; " + FFCV + "get_cyclic_lr"),
    ("ffcv-rn50-16", "lr_min", 0.0, FFCV + "get_cyclic_lr: 0 at the end"),
    ("ffcv-rn50-16", "warmup_epochs", 2, FFCV + "lr_peak_epoch default=2"),
    ("ffcv-rn50-16", "warmup_method", "linear", FFCV + "get_cyclic_lr: from 1e-4 * lr"),
    ("ffcv-rn50-16", "label_smoothing", 0.1, FFCV_16 + "label_smoothing: 0.1"),
    ("ffcv-rn50-16", "blur_pool", True, FFCV_16 + "use_blurpool: 1"),
    ("ffcv-rn50-16", "first_crop_size", 160, FFCV_16 + "min_res: 160"),
    ("ffcv-rn50-16", "train_crop_size", 192, FFCV_16 + "max_res: 192"),
    ("ffcv-rn50-16", "resize_epochs", (11, 13), FFCV_16 + "start_ramp: 11, end_ramp: 13"),
    ("ffcv-rn50-16", "val_crop_size", 256, FFCV_16 + "resolution: 256"),
    ("ffcv-rn50-16", "val_resize_size", round(256 * 256 / 224), FFCV + "DEFAULT_CROP_RATIO"),
    ("ffcv-rn50-16", "val_flip", True, FFCV_16 + "lr_tta: true"),
    ("ffcv-rn50-16", "precision", "fp16", FFCV + "autocast(), GradScaler()"),
    ("ffcv-rn50-16", "channels_last", True, FFCV + "memory_format=ch.channels_last"),
    ("ffcv-rn50-16", "random_crop_scale", (0.08, 1.0), "ffcv, RandomResizedCrop: scale default"),
    ("ffcv-rn50-16", "hflip_prob", 0.5, "ffcv, RandomHorizontalFlip: flip_prob default"),
    ("ffcv-rn50-88", "epochs", 88, FFCV_88 + "epochs: 88"),
    ("ffcv-rn50-88", "resize_epochs", (65, 76), FFCV_88 + "start_ramp: 65, end_ramp: 76"),
    ("ffcv-rn50-88", "base_lr", 1.7 / 8, FFCV_88 + "lr: 1.7"),
    ("ffcv-rn50-88", "batch_size", 512, FFCV_88 + "batch_size: 512"),
    ("ffcv-rn50-88", "wd", 1e-4, FFCV_88 + "weight_decay: 0.0001"),
]

# A field, its values in the procedures A1, A2 and A3, and the line of the source.
RSB_PROCEDURES: list[tuple[str, Any, Any, Any, str]] = [
    ("arch", *["timm:resnet50"] * 3, RSB + "ResNet-50"),
    ("train_crop_size", 224, 224, 160, RSB + "Train Res"),
    ("val_crop_size", 224, 224, 224, RSB + "Test Res"),
    ("val_resize_size", *[int(224 / 0.95)] * 3, RSB + "Test crop ratio 0.95"),
    ("epochs", 600, 300, 100, RSB + "Epochs"),
    ("batch_size", *[2048 // 8] * 3, RSB + "Batch size 2048; " + MMPRETRAIN + "8 x 256"),
    ("val_batch_size", 256, 256, 256, MMPRETRAIN + "batch_size=256 for both loaders"),
    ("optimizer", "lamb", "lamb", "lamb", RSB + "Optimizer LAMB"),
    ("betas", *[(0.9, 0.999)] * 3, TIMM + "optim/lamb.py: betas=(0.9, 0.999)"),
    ("clip_grad_norm", 1.0, 1.0, 1.0, TIMM + "optim/lamb.py: max_grad_norm=1.0"),
    ("base_lr", 5e-3 / 8, 5e-3 / 8, 8e-3 / 8, RSB + "LR, of the whole batch"),
    ("lr_scheduler", "cosine", "cosine", "cosine", RSB + "LR decay"),
    ("lr_min", 1e-6, 1e-6, 1e-6, MMPRETRAIN + "eta_min=1.0e-6"),
    ("wd", 0.01, 0.02, 0.02, RSB + "Weight decay"),
    ("norm_weight_decay", 0.0, 0.0, 0.0, MMPRETRAIN + "norm_decay_mult=0."),
    ("bias_weight_decay", 0.0, 0.0, 0.0, MMPRETRAIN + "bias_decay_mult=0."),
    ("warmup_epochs", 5, 5, 5, RSB + "Warmup epochs"),
    ("warmup_method", *["linear"] * 3, MMPRETRAIN + "LinearLR"),
    ("label_smoothing", 0.1, 0.0, 0.0, RSB + "Label smoothing"),
    ("drop_path", 0.05, 0.05, 0.0, RSB + "Stoch. Depth"),
    ("augment_repeats", 3, 3, 1, RSB + "Repeated Aug; " + ML_DECODER + "--aug-repeats 3"),
    ("hflip_prob", 0.5, 0.5, 0.5, RSB + "H. flip; " + MMPRETRAIN + "RandomFlip prob=0.5"),
    ("random_crop_scale", *[(0.08, 1.0)] * 3, RSB + "RRC"),
    (
        "auto_augment",
        *["rand-m7-mstd0.5-inc1"] * 2,
        "rand-m6-mstd0.5-inc1",
        RSB + "Rand Augment 7/0.5, 6/0.5; " + ML_DECODER + "--aa=rand-m7-mstd0.5-inc1",
    ),
    ("mixup_alpha", 0.2, 0.1, 0.1, RSB + "Mixup alpha"),
    ("cutmix_alpha", 1.0, 1.0, 1.0, RSB + "Cutmix alpha"),
    ("random_erase", 0.0, 0.0, 0.0, RSB + "Erasing prob."),
    ("model_ema", False, False, False, RSB + "EMA"),
    ("loss", "bce", "bce", "bce", RSB + "BCE loss"),
    ("bce_target_threshold", *[0.2] * 3, ML_DECODER + "--bce-target-thresh 0.2"),
    ("precision", "fp16", "fp16", "fp16", RSB + "Mixed precision"),
    ("interpolation", *["bicubic"] * 3, TIMM + "models/resnet.py: resnet50.a1_in1k"),
]
VALUES += [
    (f"rsb-a{number}", field, value, source)
    for field, *values, source in RSB_PROCEDURES
    for number, value in enumerate(values, 1)
]

# Presets that follow no source, and the training images of each.
OURS = {"digits": 1438, "digits-resnet18": 1438, "fashion-quick": 60_000}
# preset: the one with which it shares its other values
SAME_BUT_FOR = {
    "tv-alexnet": "tv-v1",
    "tv-vgg16": "tv-v1",
    "dle-50": "dle-90",
    "dle-250": "dle-90",
    "ffcv-rn50-88": "ffcv-rn50-16",
    "rsb-a2": "rsb-a1",
    "rsb-a3": "rsb-a1",
}


@pytest.mark.parametrize(("preset", "field", "value", "source"), VALUES)
def test_a_preset_has_the_value_of_its_source(
    preset: str, field: str, value: Any, source: str
) -> None:
    assert getattr(preset_of(preset), field) == value, source


@pytest.mark.parametrize("preset", sorted(PRESETS.keys() - OURS.keys()))
def test_all_that_a_preset_sets_has_a_source(preset: str) -> None:
    """A new preset is refused until each value that it sets has a line in VALUES."""
    base = SAME_BUT_FOR.get(preset)
    default, config = vars(Config() if base is None else preset_of(base)), vars(preset_of(preset))
    changed = {name for name in config if config[name] != default[name]} - {"preset", "data"}
    sourced = {field for name, field, *_ in VALUES if name == preset}
    assert sourced, f"{preset}: no line in VALUES"
    assert changed <= sourced, f"no source: {changed - sourced}"


@pytest.mark.parametrize("preset", sorted(OURS))
def test_a_short_training_has_forgotten_what_batch_norm_began_with(preset: str) -> None:
    """A network that learns in few steps is otherwise evaluated far below what it can: 82 % at four
    workers where 97 % had been learned."""
    config = preset_of(preset)
    steps = config.epochs * OURS[preset] // (4 * config.batch_size)
    assert (1 - (config.batch_norm_momentum or 0.1)) ** steps < 0.01


# preset, epoch, workers, and the rate of the source. Goyal et al.: 0.1 for a batch of 256;
# torchvision's, FFCV's and timm's are those of 8 workers; NVIDIA's 0.256 per 256 images.
RATES = [
    ("goyal-90", 0, 256, 0.1),
    ("goyal-90", 2.5, 256, (0.1 + 3.2) / 2),
    ("goyal-90", 0, 16, 0.1),
    *[("goyal-90", epoch, 8, 0.1) for epoch in (0, 2.5, 5)],
    ("goyal-90", 0, 1, 0.1 / 8),
    ("goyal-90", 5, 256, 3.2),
    ("tv-v1", 0, 8, 0.1),
    ("tv-v1", 89.9, 8, 0.001),
    ("dle-90", 8, 8, 2.048),
    ("dle-90", 90, 8, 0),
    ("tv-v2", 0, 8, 0.5 * 0.01),
    ("tv-v2", 5, 8, 0.5),
    ("tv-vgg16", 0, 8, 0.01),
    ("ffcv-rn50-16", 2, 8, 1.7),
    ("ffcv-rn50-16", 9, 8, 0.85),
    ("ffcv-rn50-88", 88, 8, 0),
    ("rsb-a1", 5, 8, 5e-3),
    ("rsb-a3", 5, 8, 8e-3),
    ("rsb-a3", 100, 8, 1e-6),
]


@pytest.mark.parametrize(("preset", "epoch", "workers", "rate"), RATES)
def test_the_rates_of_the_sources_at_their_numbers_of_workers(
    preset: str, epoch: float, workers: int, rate: float
) -> None:
    assert learning_rate(preset_of(preset), epoch, workers) == pytest.approx(rate)


def test_the_decay_of_goyal_90_is_the_gradient_of_keras_penalty() -> None:
    """Keras adds 5e-5 times the sum of the kernels' squares to the loss: its gradient is 1e-4 w."""
    config = preset_of("goyal-90")
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
    kernels = [model[0].weight, model[3].weight]
    sum(5e-5 * kernel.square().sum() for kernel in kernels).backward()
    for group in parameter_groups(model, config):
        for parameter in group["params"]:
            penalty = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            assert torch.allclose(group["weight_decay"] * parameter, penalty)


@pytest.mark.parametrize("arch", ["resnet50", "vgg16_bn", "vit_b_16", "convnext_tiny"])
def test_what_counts_as_normalisation_is_what_torchvision_s_reference_counts(arch: str) -> None:
    config = a_config(
        arch=arch,
        wd=1.0,
        norm_weight_decay=0.0,
        **dict.fromkeys(("train_crop_size", "val_crop_size", "val_resize_size"), 224),
    )
    with torch.device("meta"):
        model = build_model(config, 10, download=True)
    ours = {
        id(parameter)
        for group in parameter_groups(model, config)
        if group["weight_decay"] == 0
        for parameter in group["params"]
    }
    assert ours == {id(parameter) for parameter in split_normalization_params(model)[0]}
