"""All flags of a run. A flag is one field here: its type, its default, its help text and its other
properties (see `Flag`). Everything else is derived from it: the parser and `--help`, the checks of
bounds, the run's fingerprint, what the ranks must share, and what `compare` knows.

Imports nothing slow, because reports read this module too.
"""

import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction
from functools import partial
from itertools import zip_longest
from typing import Any, Literal, NamedTuple

# The number formats in which gradients may be sent. The choices of --wire-format, the trial of
# `auto` and the measured formats follow from this table. Each engine implements the sending itself:
# ddp_train/buckets.py and horovod_train/engine.py.
WireFormat = Literal["fp32", "fp16"]


@dataclass(frozen=True)
class NumberFormat:
    """A number format on the wire."""

    dtype: str  # torch's name
    bytes: int  # per element
    exact_integers: int  # it represents every integer up to this one exactly


WIRE_FORMATS: dict[WireFormat, NumberFormat] = {
    "fp32": NumberFormat("float32", 4, 2**24),
    "fp16": NumberFormat("float16", 2, 2**11),
}
WIRE_BYTES: dict[str, int] = {name: wire.bytes for name, wire in WIRE_FORMATS.items()}


class Bound(NamedTuple):
    """A condition on a flag's value, and what to tell the user if it fails."""

    holds: Callable[[Any], bool]
    advice: str


def at_least(smallest: int) -> Bound:
    return Bound(lambda value: value >= smallest, f"must be at least {smallest}")


# NaN fails every one of these.
SHARE = Bound(lambda v: 0 <= v <= 1, "is a share or probability; give a number from 0 to 1")
SHARE_ABOVE_0 = Bound(lambda v: 0 < v <= 1, "is a share; give a number above 0 and up to 1")
NOT_NEGATIVE = Bound(lambda v: 0 <= v < math.inf, "give a finite number that is not negative")
ABOVE_0 = Bound(lambda v: 0 < v < math.inf, "give a finite number above 0")
SHARES = Bound(
    lambda v: all(0 <= share <= 1 for share in v), "are shares of full brightness; give 0 to 1"
)
SHARES_ABOVE_0 = Bound(
    lambda v: all(0 < share <= 1 for share in v),
    "are shares of full brightness; give numbers above 0 and up to 1",
)
PERCENTAGE = Bound(lambda v: 1 < v <= 100, "is a percentage; 75 percent is written 75")
LOSS_SCALE = Bound(
    lambda v: v == "dynamic" or 0 < v < math.inf, 'give "dynamic" or a number above 0'
)
AUTO_AUGMENTS = ("ra", "ta_wide", "autoaugment", "augmix")  # torchvision's
RAND_AUGMENT = r"rand(-(m|n|mmax)\d+|-(p|mstd)\d+(\.\d+)?|-inc[01])+"  # timm's
AUTO_AUGMENT = Bound(
    lambda v: v in AUTO_AUGMENTS or bool(re.fullmatch(RAND_AUGMENT, v)),
    f"choose {', '.join(AUTO_AUGMENTS)}, or RandAugment as timm writes it: rand-m7-mstd0.5-inc1",
)
SEED = Bound(lambda v: 0 <= v < 2**63, "must be at least 0 and less than 2^63")


Scope = Literal[
    "work",  # decides what is computed, or how: part of the fingerprint
    "speed",  # how fast gradients are exchanged, and nothing else
    "place",  # where files are, and what a host or launcher offers; a run records the outcome
    "measurement",  # what is measured during training: in the fingerprint, because it takes time
    "run",  # what is written, and when the run ends
]
# Conditions without which a flag has no effect; recipe/settings/config.py warns of it.
Need = Literal[
    "images", "training", "workers", "checkpoints", "synthetic data", "--data", "model EMA",
    "step schedule", "cosine schedule", "falling schedule", "warm-up", "residual blocks",
    "new weights", "resized crops", "progressive resizing", "Horovod's sum", "ddp", "horovod",
    "fp16 weights", "momentum", "betas", "LARS", "BCE",
]  # fmt: skip


@dataclass(frozen=True)
class Flag:
    """The properties of a flag beside its type and its default."""

    scope: Scope
    help: str = ""
    bound: Bound | None = None
    aliases: tuple[str, ...] = ()  # its other names on the command line
    needs: tuple[Need, ...] = ()
    # equal: the same on all ranks; own: each rank may have its own value; first: only rank 0 reads
    # the file that it names
    per_rank: Literal["equal", "own", "first"] = "equal"
    # Which other facts, as a report names them, differ between two runs that differ in this flag.
    # (Initial weights do not depend on the precision, nor the schedule on the batch: its unit is
    # the epoch.)
    decides: tuple[str, ...] = ()


def flag(
    scope: Scope, default: Any, bound: Bound | None = None, help: str = "", **others: Any
) -> Any:
    """Return a field for a section below. `others` are further fields of `Flag`; a tuple with one
    element may be given as that element."""
    for name in others.keys() & {"aliases", "needs", "decides"}:
        if not isinstance(others[name], tuple):
            others[name] = (others[name],)
    return field(default=default, metadata={"flag": Flag(scope, help, bound, **others)})


work, speed, measurement, run = (partial(flag, s) for s in ("work", "speed", "measurement", "run"))
place = partial(flag, "place", per_rank="own")
DATA = ("data_order_sha256", "num_images", "num_val_images")
STEPS = ("steps", "samples_seen")
RATES = ("learning_rates_sha256",)
WEIGHTS = ("initial_weights_sha256",)


# fmt: off
@dataclass(frozen=True)
class DataFlags:
    """Where the images come from, and how their pixels are processed."""

    data: str = place("digits", needs="--data", decides=(*DATA, *STEPS, *WEIGHTS), help=
        "`digits`: 1,797 handwritten digits, which are built in. `fashion-mnist`: 70,000 grey "
        "images of clothes, from Debian's package dataset-fashion-mnist. `synthetic`: random "
        "pixels, to measure speed (evaluated only with --evaluate or --desired-acc). Or a folder "
        "that holds train/ and val/, in ImageNet's layout or as shards (python -m "
        "recipe.data.prepare shards).")
    train_dir: str | None = place(None, decides=(*DATA, *STEPS, *WEIGHTS), help=
        "Folder of training images: one sub-folder per class, or shards. Overrides --data.")
    val_dir: str | None = place(None, decides="num_val_images", help=
        "Folder of validation images, with the same classes. Overrides --data.")
    cache_dir: str = place((os.environ.get("XDG_CACHE_HOME") or "~/.cache") +
        "/imagenet-horovod-ddp", help=
        "Folder in which the listings of image folders are cached.")
    dali: bool = work(False, needs=("images", "training"), help=
        "Let NVIDIA DALI decode, crop, resize and flip the training images, on the GPU if there "
        "is one (needs the extra `dali`). Crops and flips stay the same; pixels differ slightly, "
        "because DALI has another decoder.")
    bad_images: Literal["error", "replace"] = work("error", needs=("images", "training"),
        decides="replaced_images", help=
        "What happens if a training image cannot be read or decoded. error: the run ends. "
        "replace: another image takes its place, drawn from the seed, the epoch and the bad "
        "image's index. The run folder lists the bad images; the run ends if there are more than "
        "1 in 1,000 and more than 10. To find damage, every file is then decoded completely each "
        "time it is used.")
    workers: int | None = work(None, at_least(0), aliases="-j", needs="images", per_rank="own",
        help=
        "Loader processes per rank; 0: load in the training process. Default: with a GPU this "
        "rank's share of the CPU cores; without one 0, since training keeps the cores busy.")
    train_crop_size: int = work(224, at_least(1), help="Side length of training images, pixels.")
    val_resize_size: int = work(256, at_least(1), needs="images", help=
        "Shorter side of validation images before the centre crop, pixels.")
    val_crop_size: int = work(224, at_least(1), help="Side length of validation images, pixels.")
    interpolation: Literal["bilinear", "bicubic", "nearest"] = work("bilinear", needs="images",
        help="How images are resized.")
    image_mean: tuple[float, float, float] = work((0.485, 0.456, 0.406), SHARES, help=
        "Means of red, green and blue over the training images, as shares of full brightness: "
        "subtracted from each pixel. Default: ImageNet's. Grey images need three equal numbers.")
    image_std: tuple[float, float, float] = work((0.229, 0.224, 0.225), SHARES_ABOVE_0, help=
        "Standard deviations of red, green and blue over the training images, by which pixels are "
        "then divided. Default: ImageNet's.")
    random_crop_scale: tuple[float, float] = work((0.08, 1.0), needs=("images", "resized crops"),
        help=
        "Smallest and largest share of the image's area that a random crop takes.")
    random_crop_padding: int | None = work(None, at_least(0), needs=("images", "training"), help=
        "Crop training images without resizing them: add this many black pixels on each side, and "
        "cut a random square of --train-crop-size out (4 is usual for images of 32 pixels: He et "
        "al. 2015, arXiv 1512.03385, section 4.2). Default: cut out and resize a random part of "
        "--random-crop-scale.")
    hflip_prob: float = work(0.5, SHARE, needs="images", help="Probability of a horizontal flip.")
    auto_augment: str | None = work(None, AUTO_AUGMENT, aliases="--aa", needs="images", help=
        "Automatic augmentation: torchvision's `ra` (RandAugment), `ta_wide` (TrivialAugment), "
        "`autoaugment` or `augmix`; or timm's RandAugment in timm's notation, such as "
        "`rand-m7-mstd0.5-inc1` (needs the extra `timm`).")
    random_erase: float = work(0.0, SHARE, needs="images", help=
        "Probability that a random rectangle is erased.")
    augment_repeats: int = work(1, at_least(1), aliases="--ra-reps", needs=("images", "training"),
        decides="data_order_sha256", help=
        "Repeated augmentation: each image is used this many times in a row, with a new "
        "augmentation each time. An epoch keeps its length, so it has this many times fewer "
        "different images.")
    first_crop_size: int | None = work(None, at_least(1), needs=("images", "training"), help=
        "Progressive resizing: side length of training images at the start, pixels. During "
        "--resize-epochs it grows to --train-crop-size, rounded to multiples of 32.")
    resize_epochs: tuple[int, int] | None = work(None, needs="progressive resizing", help=
        "Progressive resizing: last epoch with --first-crop-size and first epoch with "
        "--train-crop-size, counted from 0.")
    mixup_alpha: float = work(0.0, NOT_NEGATIVE, needs="training", help=
        "Mixup: mix each image of a batch, and its label, with the image before it, in a "
        "proportion drawn from Beta(alpha, alpha). 0: off. If --cutmix-alpha is given too, each "
        "batch gets one of the two at random.")
    cutmix_alpha: float = work(0.0, NOT_NEGATIVE, needs="training", help=
        "CutMix: paste a rectangle of the image before it into each image of a batch, and mix the "
        "labels by area. The area is drawn from Beta(alpha, alpha). 0: off.")
    val_flip: bool = work(False, help=
        "Evaluate each image and its mirror image, and average the two outputs.")
    synthetic_images: int = work(12_800, at_least(1), needs="synthetic data",
        decides=(*DATA, *STEPS), help=
        "Images per epoch of --data synthetic (1,000 classes).")


@dataclass(frozen=True)
class ModelFlags:
    """What is trained."""

    arch: str = work("resnet50", aliases=("-a", "--model"), decides=WEIGHTS, help=
        "Any torchvision classification model, resnet10, or timm:NAME for a timm model (needs "
        "the extra `timm`).")
    pretrained: bool = work(False, decides=WEIGHTS, help=
        "Download torchvision's best published weights and start from them.")
    weights: str | None = place(None, per_rank="first", decides=WEIGHTS, help=
        "Start from the weights in this file: a checkpoint of this project, of pytorch/examples, "
        "of torchvision's reference or of Horovod's example, or a bare state dict.")
    new_head: bool = work(False, decides=WEIGHTS, help=
        "Load all layers but the last from --weights and initialise the last one anew, for "
        "example for another number of classes.")
    batch_norm: Literal["local", "average", "sync"] = work("local", needs="workers", help=
        "How ranks share BatchNorm statistics. local: each rank has its own; rank 0's are "
        "evaluated and saved (as by DDP's default, but they are sent once per evaluation, not in "
        "each forward pass). average: the running statistics are averaged over ranks before each "
        "evaluation and checkpoint. sync: SyncBatchNorm, which normalises over the batches of all "
        "ranks.")
    batch_norm_momentum: float | None = work(None, SHARE_ABOVE_0, help=
        "Weight of each new batch in BatchNorm's running statistics. Default: the network's own, "
        "mostly 0.1, which takes about fifty steps to forget the initial values.")
    small_stem: bool = work(False, decides=WEIGHTS, help=
        "For images of about 32 pixels: begin a ResNet with a 3x3 convolution of stride 1 and no "
        "max-pooling (He et al. 2015, arXiv 1512.03385, section 4.2), instead of a 7x7 "
        "convolution and max-pooling, both of stride 2.")
    zero_init_residual: bool = work(False, needs=("residual blocks", "new weights"), help=
        "Start with every residual block as the identity: initialise the scale of its last "
        "BatchNorm to 0 (ResNet, ResNeXt and Wide ResNet).")
    loss: Literal["cross-entropy", "bce"] = work("cross-entropy", needs="training", help=
        "Training loss. bce: binary cross-entropy of each class separately, averaged over images "
        "and classes.")
    bce_target_threshold: float | None = work(None, SHARE, needs="BCE", help=
        "With --loss bce: the target of a class is 1 if its share of a mixed image is above this, "
        "else 0. Default: the target is the share.")
    drop_path: float = work(0.0, SHARE, aliases="--drop-path-rate", needs="training", help=
        "Stochastic depth of timm models (--arch timm:NAME): the probability that an image skips "
        "the last residual block. It rises with depth, from 0 at the first block.")
    blur_pool: bool = work(False, help=
        "Blur the input of every convolution that has a stride and at least 16 input channels "
        "(Zhang 2019, arXiv 1904.11486).")
    label_smoothing: float = work(0.0, SHARE, needs="training", help=
        "Share of the target's probability that is spread over all classes.")
    model_ema: bool = work(False, help=
        "Also evaluate and save an exponential moving average (EMA) of the weights.")
    model_ema_decay: float = work(0.9999, SHARE, needs="model EMA", help=
        "Decay of the moving average per update.")
    model_ema_steps: int = work(1, at_least(1), needs="model EMA", help=
        "Optimizer steps between two updates of the moving average.")


@dataclass(frozen=True)
class OptimizationFlags:
    """How it is trained. Learning rates are per worker, and scaled by the number of workers."""

    epochs: int = work(90, at_least(1), needs="training", decides=(*STEPS, *RATES), help=
        "Passes over the training images.")
    batch_size: int = work(32, at_least(1), aliases="-b", needs="training", decides=STEPS, help=
        "Images per worker and forward pass.")
    val_batch_size: int = work(32, at_least(1), help=
        "Images per worker and forward pass in validation.")
    batch_size_warmup_epochs: int = work(0, at_least(0), needs="training", decides=(*STEPS, *RATES),
        help=
        "Epochs with smaller batches at the start. Their size grows by the same amount each epoch, "
        "up to --batch-size, and the learning rate grows with it. 0: none.")
    batches_per_allreduce: int = work(1, at_least(1), needs="training", decides=(*STEPS, *RATES),
        help=
        "Forward and backward passes per step, whose gradients are accumulated before they are "
        "exchanged.")
    base_lr: float = work(0.0125, NOT_NEGATIVE, needs="training", decides=RATES, help=
        "Learning rate of one worker. It is multiplied by workers x batches_per_allreduce (for "
        "Adasum see docs/recipe.md), but does not follow --batch-size: if you double the batch, "
        "double the rate.")
    optimizer: Literal["sgd", "adamw", "lars", "lamb", "apex-sgd", "apex-adam", "apex-lamb"] = work(
        "sgd", needs="training", help=
        "torch's SGD or AdamW, timm's LARS or LAMB (needs the extra `timm`), or NVIDIA Apex's "
        "fused ones (needs Apex and a GPU).")
    momentum: float = work(0.9, SHARE, needs=("training", "momentum"), help=
        "Momentum of SGD and LARS.")
    nesterov: bool = work(False, needs="momentum", help="Use Nesterov momentum.")
    betas: tuple[float, float] = work((0.9, 0.999), needs=("training", "betas"), help=
        "For AdamW and LAMB: decay rates of the running means of gradients and of squared "
        "gradients.")
    trust_coefficient: float = work(0.001, ABOVE_0, needs=("training", "LARS"), help=
        "For LARS: factor by which the ratio of a weight's norm to its gradient's norm is "
        "multiplied.")
    wd: float = work(5e-5, NOT_NEGATIVE, aliases="--weight-decay", needs="training", help=
        "Weight decay.")
    norm_weight_decay: float | None = work(None, NOT_NEGATIVE, help=
        "Weight decay of normalisation layers. Default: --wd.")
    bias_weight_decay: float | None = work(None, NOT_NEGATIVE, help=
        "Weight decay of biases outside normalisation layers. Default: --wd.")
    lr_scheduler: Literal["step", "cosine", "linear", "steplr", "cosineannealinglr"] = work("step",
        decides=RATES, help=
        "Learning rate after warm-up. step: multiplied by --lr-gamma at each of --lr-step-epochs. "
        "cosine, linear: falls to --lr-min at the end. steplr, cosineannealinglr: torchvision's "
        "names for step and cosine.")
    lr_step_epochs: tuple[int, ...] = work((30, 60, 80), needs="step schedule", decides=RATES, help=
        "Epochs at which the step schedule lowers the learning rate.")
    lr_gamma: float = work(0.1, NOT_NEGATIVE, needs="step schedule", decides=RATES, help=
        "Factor by which the step schedule multiplies the learning rate.")
    lr_min: float = work(0.0, NOT_NEGATIVE, needs="falling schedule", decides=RATES, help=
        "Learning rate at the end of the cosine and linear schedules, used as it is: not scaled "
        "by the number of workers.")
    lr_restart_epochs: tuple[int, ...] = work((), needs="cosine schedule", decides=RATES, help=
        "Epochs at which the cosine schedule has fallen to --lr-min and starts again from its "
        "highest rate.")
    warmup_epochs: float = work(5.0, NOT_NEGATIVE, aliases="--lr-warmup-epochs", needs="training",
        decides=RATES, help=
        "Epochs over which the learning rate rises to the scaled rate.")
    warmup_method: Literal["gradual", "gradual-256", "linear"] = work("gradual",
        aliases="--lr-warmup-method", needs="warm-up", decides=RATES, help=
        "Where the warm-up starts. gradual: at one worker's rate (Horovod's Keras example). "
        "gradual-256: at the rate for 256 images per step; constant if a step has no more (Goyal "
        "et al. 2017). linear: at 1 % of the scaled rate.")
    clip_grad_norm: float | None = work(None, ABOVE_0, needs="training", help=
        "Clip gradients so that their norm over all weights together is at most this.")
    seed: int = work(42, SEED, decides=("data_order_sha256", *WEIGHTS), help=
        "Random seed for weights, data order, augmentation and dropout.")


@dataclass(frozen=True)
class SpeedFlags:
    """Number formats, devices and communication."""

    precision: Literal["fp32", "tf32", "bf16", "fp16", "O2", "O3"] = work("fp32", help=
        "fp32: single precision. tf32: TF32 in matrix products (GPU). bf16: autocast. fp16: "
        "autocast with loss scaling. O2: fp16 weights with fp32 master weights, fp32 BatchNorm, "
        "loss scaling. O3: fp16 throughout.")
    opt_level: Literal["O0", "O1", "O2", "O3"] | None = work(None, decides="precision", help=
        "Apex's name for a precision: O0 is fp32 and O1 is fp16.")
    keep_batchnorm_fp32: bool | None = work(None, needs="fp16 weights", help=
        "Whether BatchNorm's weights and statistics stay fp32. Default: True under O2, False under "
        "O3.")
    loss_scale: float | Literal["dynamic"] | None = work(None, LOSS_SCALE, needs="training", help=
        "Multiply the loss, and with it fp16 gradients, by this number; dynamic: by a number that "
        "adapts to the gradients. Steps whose gradients overflow are skipped. Default: dynamic "
        "for fp16 and O2, else 1. With --precision fp32, tf32 or bf16 a preset's loss scale is "
        "ignored.")
    channels_last: bool = work(False, help=
        "Use NHWC images; the weights stay contiguous, which Horovod requires (docs/recipe.md).")
    compile: bool = work(False, help=
        "Compile the network with torch.compile, for GPUs (docs/gpu.md). This takes half a minute "
        "or more at the start, and again for evaluation and for each other size of batches or "
        "images.")
    wire_format: Literal[WireFormat, "auto"] = work("fp32", needs=("workers", "training"), help=
        "Number format in which gradients are sent. auto: measure both before training, at each "
        "start, and use the faster one.")
    fp16_allreduce: bool = work(False, decides="wire_format", help=
        "Horovod's name for --wire-format fp16.")
    transport: Literal["auto", "nccl", "gloo", "mpi"] = place("auto", per_rank="equal", help=
        "What carries the gradients. auto: NCCL between GPUs; otherwise Gloo for DDP, and for "
        "Horovod what its launcher uses. A transport that is not available is an error.")
    use_adasum: bool = work(False, needs="workers", decides=RATES, help=
        "Combine gradients with Adasum instead of averaging them (Horovod only).")
    gradient_predivide_factor: float | None = work(None, ABOVE_0, needs=("Horovod's sum",
        "workers"), help=
        "To average gradients over N workers, divide them by this before the sum and by N / this "
        "after it (Horovod only). Default: N, as DDP always does; it keeps fp16 sums from "
        "overflowing.")
    bucket_cap_mb: float | None = speed(None, ABOVE_0, needs=("workers", "ddp"), help=
        "Largest size of a bucket, the gradients that are exchanged together, MiB (DDP only). "
        "Default: 25, after a first bucket of 1. Horovod's counterpart is the variable "
        "HOROVOD_FUSION_THRESHOLD.")
    first_bucket_mb: float | None = speed(None, ABOVE_0, needs=("workers", "ddp"), help=
        "Size of the first bucket, whose gradients are ready first, MiB (DDP only). Default: "
        "--bucket-cap-mb if it is given, else 1.")
    gradient_as_bucket_view: bool = speed(True, needs=("workers", "ddp"), help=
        "Store gradients inside the buckets, which saves a copy and its memory (DDP only).")
    static_graph: bool = speed(False, needs=("workers", "ddp"), help=
        "Promise that every step uses the same parameters in the same order (DDP only).")
    num_groups: int | None = speed(None, at_least(1), needs=("workers", "horovod"), help=
        "Number of groups in which gradients are exchanged, each as soon as it is complete "
        "(Horovod only, fp32 only). Default: each of Horovod's cycles sends what is ready.")
    sleeping_poll: bool = speed(True, needs=("workers", "horovod"), help=
        "On a CPU, while waiting for the averaged gradients, sleep 0.2 ms between checks (Horovod "
        "only). Without it Horovod checks in a busy loop, which takes CPU time.")
    cuda: bool = place(True, decides=("device", "device_name", "CUDA version"), help=
        "Use GPUs if there are any.")
    share_gpu: bool = place(False, per_rank="equal", needs="workers", help=
        "Let the ranks of a host share its GPUs if it has fewer GPUs than ranks. This checks "
        "correctness, also of NCCL between ranks; speeds then mean nothing (docs/gpu.md).")
    deterministic: bool = work(False, help=
        "Compute the same bits in every run on the same machines. GPUs then use slower kernels, "
        "and Horovod sends each gradient separately; see docs/recipe.md.")
    threads: int | None = place(None, at_least(1), help=
        "CPU threads per rank. Default: this rank's share of the cores that it may use.")


@dataclass(frozen=True)
class RunFlags:
    """What a run writes, what it resumes from, and when it ends."""

    log_dir: str = place("runs", help="Folder that holds one folder per run.")
    name: str | None = run(None, help=
        "Name of the run's folder in --log-dir. Default: time, engine, model and number of "
        "workers, plus a number if that name is taken.")
    log_interval: int = run(10, at_least(1), help=
        "Steps between two logs of the training metrics; only then are they reduced over ranks.")
    resume: str | None = run(None, per_rank="first", help=
        "Resume from this checkpoint: a path, or `auto` for the newest complete checkpoint of the "
        "run --name; if that has none, the run starts from the beginning.")
    allow_changed_data: bool = run(False, help=
        "Resume from a checkpoint even if it was trained on other images (their order is then "
        "different), or if the classes have other names; their number must be the same.")
    checkpoint_steps: int | None = run(None, at_least(1), needs=("checkpoints", "training"), help=
        "Steps between two checkpoints, in addition to those after every epoch.")
    checkpoint_minutes: float = run(10.0, NOT_NEGATIVE, needs=("checkpoints", "training"), help=
        "Also write a checkpoint when the last one is this many minutes old. 0: never.")
    keep_checkpoints: int = run(2, at_least(0), help=
        "How many of the newest checkpoints to keep. Also kept are the best one, one that is at "
        "least an epoch older (at most 1,000 steps), to go back to, and the one that will be that "
        "old next. 0: write no checkpoints.")
    weight_check_steps: int = run(500, at_least(0), needs=("training", "workers"), help=
        "Steps between two checks that all ranks have the same weights; each checkpoint checks it, "
        "too. 0: only checkpoints do.")
    rollback: int = run(0, at_least(0), needs=("checkpoints", "training"), help=
        "If the loss of a step is not finite, go back to a checkpoint from before it, leave out "
        "that step's images, and train on; at most this many times.")
    evaluate: bool = run(False, aliases=("-e", "--test-only"), help=
        "Only evaluate, do not train; give --weights, --pretrained or --resume.")
    desired_acc: float | None = run(None, PERCENTAGE, needs="training", help=
        "End as soon as validation top-1 reaches this, percent.")
    max_steps: int | None = run(None, at_least(1), needs="training", decides=STEPS, help=
        "End after this many steps; the learning-rate schedule stays that of --epochs.")
    stall_timeout: int | None = run(None, at_least(0), help=
        "End the run as frozen if a rank gets no new batch for this many seconds. 0: never. "
        "Default: 60, or the usual time of 20 batches if that is longer; but 600 for the first 20 "
        "batches after the start, an evaluation, a profile or a rollback, and for the first 3 "
        "after a checkpoint.")


@dataclass(frozen=True)
class MeasurementFlags:
    """What is measured during training; all off by default, because it takes time."""

    tensor_steps: int | None = measurement(None, at_least(1), aliases="--trace-steps",
        needs="training", help=
        "How many steps, from the first on, to record on every rank for compare/parity.py: "
        "gradients, weights, BatchNorm statistics and loss.")
    profile_steps: int | None = measurement(None, at_least(1), needs="training", help=
        "How many steps to profile on every rank, after the first few, for compare/timeline.py.")
# fmt: on


SECTIONS = {
    "data": DataFlags,
    "model": ModelFlags,
    "optimization": OptimizationFlags,
    "speed": SpeedFlags,
    "measurement": MeasurementFlags,
    "run": RunFlags,
}


@dataclass(frozen=True)
class Config(
    RunFlags, MeasurementFlags, SpeedFlags, OptimizationFlags, ModelFlags, DataFlags
):  # the last base's fields come first
    """All settings of a run, flat; written to config.json and into each checkpoint."""

    preset: str = run("digits")

    def batch_share(self, epoch: float) -> Fraction:
        """Return the batch size of `epoch` (counted from 0) as a share of --batch-size."""
        steps = self.batch_size_warmup_epochs + 1
        return Fraction(int(min(epoch + 1, steps)), steps)

    @property
    def reads_images(self) -> bool:
        """Whether there are images to be read, and not random pixels."""
        return self.data != "synthetic" or bool(self.train_dir)

    @property
    def uses_timm(self) -> str:
        """The first flag, with its value, that needs the extra `timm`; "" if none does."""
        uses = {
            f"--arch {self.arch}": self.arch.startswith("timm:"),
            f"--optimizer {self.optimizer}": self.optimizer in ("lars", "lamb"),
            f"--auto-augment {self.auto_augment}": (self.auto_augment or "").startswith("rand-"),
        }
        return next((flag for flag, is_timms in uses.items() if is_timms), "")

    @property
    def has_fp16_weights(self) -> bool:
        """Whether the weights, and so their gradients, are fp16."""
        return self.precision in ("O2", "O3")

    @property
    def keeps_batch_norm_fp32(self) -> bool:
        """--keep-batchnorm-fp32, or its default."""
        default = self.precision != "O3"
        return default if self.keep_batchnorm_fp32 is None else self.keep_batchnorm_fp32

    @property
    def scales_loss_by(self) -> float | Literal["dynamic"]:
        """--loss-scale, or its default."""
        default: float | Literal["dynamic"] = "dynamic" if self.precision in ("fp16", "O2") else 1
        return self.loss_scale or default


FLAGS: dict[str, Flag] = {item.name: item.metadata["flag"] for item in fields(Config)}


def names_of(*scopes: Scope) -> list[str]:
    """Return the names of Config's fields in these scopes."""
    return [name for name, flag in FLAGS.items() if flag.scope in scopes]


def spelled(name: str) -> str:
    """Return the command-line flag of a field of Config."""
    return "--" + name.replace("_", "-")


def written(value: Any) -> str:
    """Return a flag's value as it stands on a command line."""
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _flag_names() -> dict[str, bool]:
    """Return every name of every flag, and whether the flag takes a value."""
    names = {}
    for name in FLAGS:
        takes_value = not isinstance(getattr(Config(), name), bool)
        negation = [] if takes_value else [spelled(f"no_{name}")]
        for spelling in (spelled(name), *negation, *FLAGS[name].aliases):
            names[spelling] = takes_value
    return names


FLAG_NAMES = _flag_names()
MAIN_NAMES = {alias: spelled(name) for name, flag in FLAGS.items() for alias in flag.aliases}
MAIN_NAMES["-h"] = "--help"


def given_flags(words: Sequence[str]) -> dict[str, str | None]:
    """Return the flags among the words of a command line, each by its field in Config with the text
    of its last value: what follows it, None if nothing does. A switch and its negation are the same
    field.

    This is the only place that reads words without the parser, for what the parser cannot tell:
    which preset's defaults it is to start from; whether a flag with the default's value was given;
    and the flags of a recorded plan, which a report reads without loading the parser, and which it
    may no longer know.
    """
    given = dict[str, str | None]()
    for word, following in zip_longest(words, words[1:]):
        flag, equals, value = word.partition("=")
        flag = flag.replace("_", "-")
        if found := re.fullmatch("--(?:no-)?([a-z0-9-]+)", MAIN_NAMES.get(flag, flag)):
            given[found[1].replace("-", "_")] = value if equals else following
    return given
