"""All flags of a run. A flag is one field here: its type, its default, what else there is to know
about it (see `Flag`), and its documentation. Everything else follows: the parser and
`--help`, the bounds that are checked, the run's fingerprint, what the ranks must share, the knobs,
what `compare` knows.

Imports nothing slow: a report reads this, too.
"""

import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction
from functools import partial
from itertools import zip_longest
from typing import Any, Literal, NamedTuple, get_args, get_type_hints

# The number formats in which gradients may be sent: from this table follow the choices of
# --wire-format, the trial of `auto`, and what is measured. What sends each is the engine's:
# ddp_train/buckets.py and horovod_train/engine.py.
WireFormat = Literal["fp32", "fp16"]


@dataclass(frozen=True)
class NumberFormat:
    """What there is to know of a number format on the wire."""

    dtype: str  # torch's name
    bytes: int  # of an element
    exact_integers: int  # it holds each whole number up to here


WIRE_FORMATS: dict[WireFormat, NumberFormat] = {
    "fp32": NumberFormat("float32", 4, 2**24),
    "fp16": NumberFormat("float16", 2, 2**11),
}
WIRE_BYTES: dict[str, int] = {name: one.bytes for name, one in WIRE_FORMATS.items()}


class Bound(NamedTuple):
    """What a flag's number or word must be."""

    holds: Callable[[Any], bool]
    advice: str


def at_least(smallest: int) -> Bound:
    return Bound(lambda value: value >= smallest, f"must be at least {smallest}")


# Not a number lies within none of them.
SHARE = Bound(lambda v: 0 <= v <= 1, "is a share or probability; give a number from 0 to 1")
SHARE_ABOVE_0 = Bound(lambda v: 0 < v <= 1, "is a share; give a number above 0 and up to 1")
NOT_NEGATIVE = Bound(lambda v: 0 <= v < math.inf, "give a number that is not negative")
ABOVE_0 = Bound(lambda v: 0 < v < math.inf, "give a number above 0")
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
    "speed",  # a knob: how fast gradients are exchanged, and nothing else
    "place",  # where files lie, and what a host or a launcher has: a run records what came of it
    "measurement",  # what is measured beside the training: in the fingerprint, for it takes time
    "run",  # what is written, and when the run ends
]
# What a flag has an effect with; recipe/settings/config.py has the words for a run that lacks it.
Need = Literal[
    "images", "training", "workers", "checkpoints", "synthetic data", "--data", "model EMA",
    "step schedule", "cosine schedule", "falling schedule", "warm-up", "residual blocks",
    "new weights", "progressive resizing", "Horovod's sum", "ddp", "horovod",
    "fp16 weights", "momentum", "betas", "LARS", "BCE",
]  # fmt: skip


@dataclass(frozen=True)
class Flag:
    """What there is to know of a flag beside its type and its default."""

    scope: Scope
    help: str = ""
    bound: Bound | None = None
    aliases: tuple[str, ...] = ()  # its other names on the command line
    needs: tuple[Need, ...] = ()
    # equal: on all ranks; own: of each rank; first: rank 0 alone reads the file that it names
    per_rank: Literal["equal", "own", "first"] = "equal"
    engine: Literal["ddp", "horovod"] | None = None  # of a knob
    tries: tuple[float, ...] = ()  # of a knob: the values that `compare/run.py --tune` measures
    # What else differs, as a report calls it, between two runs that differ in this flag. (The
    # initial weights are of one precision, the schedule of one batch: its unit is the epoch.)
    decides: tuple[str, ...] = ()
    chief: bool = False  # says what was compared; a report's page folds the others away


def flag(
    scope: Scope, default: Any, bound: Bound | None = None, help: str = "", **others: Any
) -> Any:
    """A field of a section below; `others` are those of `Flag`, a tuple of one without its
    brackets."""
    for name in others.keys() & {"aliases", "needs", "tries", "decides"}:
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
    """Where the images come from and what is done to their pixels."""

    data: str = place("digits", needs="--data", decides=(*DATA, *STEPS, *WEIGHTS), help=
        "`digits` (embedded: 1,797 handwritten digits), `synthetic` (random pixels, to measure "
        "speed; evaluated only with --evaluate or --desired-acc), or a folder with train/ and "
        "val/ in ImageNet's layout, or as shards (python -m recipe.data.prepare shards).")
    train_dir: str | None = place(None, decides=(*DATA, *STEPS, *WEIGHTS), help=
        "Training folder, one sub-folder a class, or shards; overrides --data.")
    val_dir: str | None = place(None, decides="num_val_images", help=
        "Validation folder, with the same classes; overrides --data.")
    cache_dir: str = place((os.environ.get("XDG_CACHE_HOME") or "~/.cache") +
        "/imagenet-horovod-ddp", help=
        "Where the listings of large folders are kept.")
    dali: bool = work(False, needs=("images", "training"), help=
        "Let NVIDIA DALI decode, crop, resize and flip the training images, on the GPU if there "
        "is one (needs the extra `dali`): the same crops and flips, the pixels of another "
        "decoder.")
    bad_images: Literal["error", "replace"] = work("error", needs=("images", "training"),
        decides="replaced_images", help=
        "What a training image that cannot be read or decoded does. error: it ends the run. "
        "replace: another one takes its place, drawn from the seed, the pass and its own place in "
        "the listing; the run folder lists it, and more than 1 in 1,000, or than 10, end the run. "
        "Each file is then decoded whole each time that it comes.")
    workers: int | None = work(None, at_least(0), aliases="-j", needs="images", per_rank="own",
        help=
        "Loader processes per rank. Default: this rank's share of the cores with a GPU; 0 (in the "
        "training process) on the CPU, where training itself keeps the cores busy.")
    train_crop_size: int = work(224, at_least(1), help="Side of training images, pixels.")
    val_resize_size: int = work(256, at_least(1), needs="images", help=
        "Shorter side of validation images before their centre is cropped, pixels.")
    val_crop_size: int = work(224, at_least(1), help="Side of validation images, pixels.")
    interpolation: Literal["bilinear", "bicubic", "nearest"] = work("bilinear", needs="images",
        help="How images are resized.")
    random_crop_scale: tuple[float, float] = work((0.08, 1.0), needs="images", help=
        "Share of the image's area that a random crop takes: smallest and largest.")
    hflip_prob: float = work(0.5, SHARE, needs="images", help="Probability of a horizontal flip.")
    auto_augment: str | None = work(None, AUTO_AUGMENT, aliases="--aa", needs="images", help=
        "Automatic augmentation: torchvision's `ra` (RandAugment), `ta_wide` (TrivialAugment), "
        "`autoaugment` or `augmix`; timm's, such as `rand-m7-mstd0.5-inc1` (needs the extra "
        "`timm`).")
    random_erase: float = work(0.0, SHARE, needs="images", help=
        "Probability that a random rectangle is erased.")
    augment_repeats: int = work(1, at_least(1), aliases="--ra-reps", needs=("images", "training"),
        decides="data_order_sha256", help=
        "Repeated augmentation: each image comes so many times in a row, augmented anew each "
        "time, and an epoch, as long as ever, has as many times fewer images.")
    first_crop_size: int | None = work(None, at_least(1), needs=("images", "training"), help=
        "Progressive resizing: side of training images at first, pixels; they grow to "
        "--train-crop-size during --resize-epochs, to the nearest multiple of 32.")
    resize_epochs: tuple[int, int] | None = work(None, needs="progressive resizing", help=
        "Last epoch, counted from 0, of --first-crop-size, and first of --train-crop-size.")
    mixup_alpha: float = work(0.0, NOT_NEGATIVE, needs="training", help=
        "Mix each image of a batch with the one before it, images and labels alike, by a share "
        "drawn from Beta(alpha, alpha); 0: not. With --cutmix-alpha, too, each batch takes one of "
        "the two.")
    cutmix_alpha: float = work(0.0, NOT_NEGATIVE, needs="training", help=
        "Paste a rectangle of the image before it into each image of a batch, and mix the labels "
        "by area; the area is drawn from Beta(alpha, alpha); 0: not.")
    val_flip: bool = work(False, help=
        "Evaluate each image and its mirror image, and take the mean of the two outputs.")
    synthetic_images: int = work(12_800, at_least(1), needs="synthetic data",
        decides=(*DATA, *STEPS), help=
        "Images an epoch of --data synthetic (1,000 classes).")


@dataclass(frozen=True)
class ModelFlags:
    """What is trained."""

    arch: str = work("resnet50", aliases=("-a", "--model"), decides=WEIGHTS, chief=True, help=
        "Any torchvision classification model, resnet10, or timm:NAME for one of timm's (needs "
        "the extra `timm`).")
    pretrained: bool = work(False, decides=WEIGHTS, help=
        "Start from torchvision's best published weights (a download).")
    weights: str | None = place(None, per_rank="first", decides=WEIGHTS, help=
        "Start from this file: a checkpoint of this project, of pytorch/examples, of "
        "torchvision's reference, of Horovod's example, or a bare state dict.")
    new_head: bool = work(False, decides=WEIGHTS, help=
        "Of --weights: start the last layer anew, as for another number of classes.")
    batch_norm: Literal["local", "average", "sync"] = work("local", needs="workers", chief=True,
        help=
        "BatchNorm statistics over ranks. local: each rank its own, rank 0's are evaluated and "
        "saved (DDP's default, done once an evaluation instead of once a forward). average: the "
        "running statistics are averaged over ranks before each evaluation and checkpoint. sync: "
        "SyncBatchNorm, one batch over all ranks.")
    batch_norm_momentum: float | None = work(None, SHARE_ABOVE_0, help=
        "Share of each batch in BatchNorm's running statistics. Default: the network's own, "
        "mostly 0.1, which takes some fifty steps to forget what it began with.")
    zero_init_residual: bool = work(False, needs=("residual blocks", "new weights"), help=
        "Begin with each residual block as the identity: the scale of its last BatchNorm starts "
        "at 0 (ResNet, ResNeXt and Wide ResNet).")
    loss: Literal["cross-entropy", "bce"] = work("cross-entropy", needs="training", help=
        "Training loss. bce: binary cross-entropy of each class by itself, averaged over images "
        "and classes.")
    bce_target_threshold: float | None = work(None, SHARE, needs="BCE", help=
        "Of --loss bce: each class with a larger share of a mixed image than this is wholly in "
        "it, any other not at all. Default: the target is the share.")
    drop_path: float = work(0.0, SHARE, aliases="--drop-path-rate", needs="training", help=
        "Stochastic depth of timm's networks (--arch timm:NAME): the probability that an image "
        "skips the last residual block; it rises with depth, from 0 at the first.")
    blur_pool: bool = work(False, help=
        "Blur what convolutions with a stride read, if it has at least 16 channels (Zhang 2019, "
        "arXiv 1904.11486).")
    label_smoothing: float = work(0.0, SHARE, needs="training", help=
        "Share of the target's probability that is spread over all classes.")
    model_ema: bool = work(False, help=
        "Evaluate and keep an exponential moving average of the weights, too.")
    model_ema_decay: float = work(0.9999, SHARE, needs="model EMA", help=
        "Its decay at each update.")
    model_ema_steps: int = work(1, at_least(1), needs="model EMA", help=
        "Optimizer steps between two of its updates.")


@dataclass(frozen=True)
class OptimizationFlags:
    """How it is trained. Learning rates are per worker: they are scaled by the number of
    workers."""

    epochs: int = work(90, at_least(1), needs="training", decides=(*STEPS, *RATES), chief=True,
        help=
        "Passes over the training images.")
    batch_size: int = work(32, at_least(1), aliases="-b", needs="training", decides=STEPS,
        chief=True, help=
        "Images per worker and forward pass.")
    val_batch_size: int = work(32, at_least(1), help=
        "Images per worker and forward pass in validation.")
    batch_size_warmup_epochs: int = work(0, at_least(0), needs="training", decides=(*STEPS, *RATES),
        chief=True, help=
        "Epochs with smaller batches at the start: from epoch to epoch they grow by equal steps, "
        "to --batch-size, and the learning rate with them; 0: none.")
    batches_per_allreduce: int = work(1, at_least(1), needs="training", decides=(*STEPS, *RATES),
        chief=True, help=
        "Forward and backward passes whose gradients are accumulated before they are exchanged.")
    base_lr: float = work(0.0125, NOT_NEGATIVE, needs="training", decides=RATES, help=
        "Learning rate of one worker; multiplied by workers x batches_per_allreduce (Adasum: see "
        "docs/recipe.md), but not by --batch-size: for a batch twice as large give twice the rate.")
    optimizer: Literal["sgd", "adamw", "lars", "lamb", "apex-sgd", "apex-adam", "apex-lamb"] = work(
        "sgd", needs="training", chief=True, help=
        "torch's SGD or AdamW, timm's LARS or LAMB (needs the extra `timm`), or NVIDIA Apex's "
        "fused ones (needs Apex and a GPU).")
    momentum: float = work(0.9, SHARE, needs=("training", "momentum"), help="Of SGD and LARS.")
    nesterov: bool = work(False, needs="momentum", help="Nesterov's momentum.")
    betas: tuple[float, float] = work((0.9, 0.999), needs=("training", "betas"), help=
        "Of AdamW and LAMB: how much stays, a step, of the means of gradients and of their "
        "squares.")
    trust_coefficient: float = work(0.001, ABOVE_0, needs=("training", "LARS"), help=
        "Of LARS: what the ratio of a weight's norm to its gradient's is multiplied by.")
    wd: float = work(5e-5, NOT_NEGATIVE, aliases="--weight-decay", needs="training", help=
        "Weight decay.")
    norm_weight_decay: float | None = work(None, NOT_NEGATIVE, help=
        "Weight decay of normalisation layers; default: --wd.")
    bias_weight_decay: float | None = work(None, NOT_NEGATIVE, help=
        "Weight decay of biases outside normalisation layers; default: --wd.")
    lr_scheduler: Literal["step", "cosine", "linear", "steplr", "cosineannealinglr"] = work("step",
        decides=RATES, help=
        "step: times --lr-gamma at each of --lr-step-epochs. cosine, linear: down to --lr-min at "
        "the end. steplr, cosineannealinglr: torchvision's names.")
    lr_step_epochs: tuple[int, ...] = work((30, 60, 80), needs="step schedule", decides=RATES, help=
        "Epochs at which the step schedule goes down.")
    lr_gamma: float = work(0.1, NOT_NEGATIVE, needs="step schedule", decides=RATES, help=
        "Factor of the step schedule.")
    lr_min: float = work(0.0, NOT_NEGATIVE, needs="falling schedule", decides=RATES, help=
        "Where the cosine and the linear schedule end (after scaling).")
    lr_restart_epochs: tuple[int, ...] = work((), needs="cosine schedule", decides=RATES, help=
        "Epochs at which the cosine schedule has reached --lr-min and begins again from the top.")
    warmup_epochs: float = work(5.0, NOT_NEGATIVE, aliases="--lr-warmup-epochs", needs="training",
        decides=RATES, help=
        "Epochs of warm-up.")
    warmup_method: Literal["gradual", "gradual-256", "linear"] = work("gradual",
        aliases="--lr-warmup-method", needs="warm-up", decides=RATES, help=
        "gradual: from one worker's rate to the scaled rate (Horovod's Keras example). "
        "gradual-256: from the rate of 256 images a step; constant if a step has no more (Goyal "
        "et al. 2017). linear: from 1 % of the scaled rate.")
    clip_grad_norm: float | None = work(None, ABOVE_0, needs="training", help=
        "Largest norm of the gradient of all weights together.")
    seed: int = work(42, SEED, decides=("data_order_sha256", *WEIGHTS), chief=True, help=
        "Of weights, data order, augmentation and dropout.")


@dataclass(frozen=True)
class SpeedFlags:
    """Number formats, devices and communication."""

    precision: Literal["fp32", "tf32", "bf16", "fp16", "O2", "O3"] = work("fp32", chief=True, help=
        "fp32; tf32 in matrix products (GPU); autocast to bf16; autocast to fp16 with loss "
        "scaling; O2: fp16 weights and fp32 masters of them, fp32 BatchNorm, loss scaling; O3: "
        "fp16 throughout.")
    opt_level: Literal["O0", "O1", "O2", "O3"] | None = work(None, help=
        "Apex's name for a precision: O0 is fp32 and O1 is fp16.")
    keep_batchnorm_fp32: bool | None = work(None, needs="fp16 weights", help=
        "Whether BatchNorm's weights and statistics are fp32. Default: under O2, not under O3.")
    loss_scale: float | Literal["dynamic"] | None = work(None, LOSS_SCALE, needs="training", help=
        "Multiply the loss, and so the gradients that fp16 holds, by this number, or by one that "
        "adapts to them (dynamic). Steps whose gradients overflow are left out. Default: dynamic "
        "for fp16 and O2, else 1. A preset's is for fp16: --precision fp32, tf32 or bf16 has 1, "
        "unless this is given.")
    channels_last: bool = work(False, help=
        "NHWC images; the weights stay contiguous, which Horovod requires (docs/recipe.md).")
    compile: bool = work(False, help=
        "Compile the network's stages by torch.compile: for GPUs. It takes half a minute or more "
        "at the start, and on CPUs it is slower than without (docs/performance.md).")
    wire_format: Literal[WireFormat, "auto"] = work("fp32", needs=("workers", "training"), help=
        "Number format in which gradients are sent. auto: the faster of the two here, as measured "
        "before training (a resumed run measures anew).")
    fp16_allreduce: bool = work(False, decides="wire_format", help=
        "Horovod's name for --wire-format fp16.")
    transport: Literal["auto", "nccl", "gloo", "mpi"] = place("auto", per_rank="equal", help=
        "What carries the gradients. auto: NCCL between GPUs; elsewhere Gloo for DDP, and for "
        "Horovod what its launcher passes messages by. An unavailable transport is an error.")
    use_adasum: bool = work(False, needs="workers", decides=RATES, help=
        "Combine gradients by Adasum instead of averaging them (Horovod only).")
    gradient_predivide_factor: float | None = work(None, ABOVE_0, needs=("Horovod's sum",
        "workers"), help=
        "Divide gradients by this before they are summed and by the rest afterwards (Horovod "
        "only). Default: the number of workers, which is what DDP always does, and which keeps "
        "fp16 sums from overflowing.")
    knobs: str | None = place(None, help=
        "A file of settings and variables that make the exchange of gradients faster here, as "
        "`compare/run.py --tune FILE` finds and writes them. Flags and the environment win over "
        "it.")
    bucket_cap_mb: float | None = speed(None, ABOVE_0, needs="workers", engine="ddp", tries=(1.0,
        5.0, 25.0, 50.0, 100.0), help=
        "Largest bucket of gradients that are exchanged together, MiB (DDP only; its default is "
        "25 after a first one of 1). Horovod's counterpart is the variable "
        "HOROVOD_FUSION_THRESHOLD.")
    first_bucket_mb: float | None = speed(None, ABOVE_0, needs="workers", engine="ddp", tries=(0.25,
        4.0), help=
        "Size of the first bucket, whose gradients are ready first, MiB (DDP only). Default: that "
        "of the others if --bucket-cap-mb is given, else 1.")
    gradient_as_bucket_view: bool = speed(True, needs="workers", engine="ddp", help=
        "Let gradients live in the buckets: saves a copy and their memory (DDP only).")
    static_graph: bool = speed(False, needs="workers", engine="ddp", tries=True, help=
        "Promise that every step uses the same parameters in the same order (DDP only).")
    num_groups: int | None = speed(None, at_least(1), needs="workers", engine="horovod", tries=(1,
        4), help=
        "Exchange the gradients in so many groups, each as soon as all of it is ready (Horovod "
        "only, fp32 only). Default: each cycle sends what is ready.")
    sleeping_poll: bool = speed(True, needs="workers", engine="horovod", help=
        "On a CPU, sleep 0.2 ms between two looks at whether the gradients are averaged (Horovod "
        "only). Without it the wait is Horovod's own, which looks again and again.")
    cuda: bool = place(True, decides=("device", "device_name", "CUDA version"), help=
        "Use GPUs where there are any.")
    deterministic: bool = work(False, help=
        "The same bits in every run on the same machines, for which GPUs take slower kernels and "
        "Horovod sends each gradient by itself; see docs/recipe.md.")
    threads: int | None = place(None, at_least(1), chief=True, help=
        "CPU threads per rank. Default: this rank's share of the cores that it may use.")


@dataclass(frozen=True)
class RunFlags:
    """What is written, where it goes on, and when it ends."""

    log_dir: str = place("runs", help="Holds a folder for each run.")
    name: str | None = run(None, help=
        "The run's folder under --log-dir. Default: time, engine, model and number of workers, "
        "and a number where that is taken.")
    log_interval: int = run(10, at_least(1), help=
        "Steps between two reductions of the training metrics.")
    resume: str | None = run(None, per_rank="first", help=
        "A checkpoint's path, or `auto`: the newest whole checkpoint of the run --name, or a "
        "fresh start.")
    allow_changed_data: bool = run(False, help=
        "Go on from a checkpoint although there are other images than it was trained on: the "
        "order of the images is then another one.")
    checkpoint_steps: int | None = run(None, at_least(1), needs=("checkpoints", "training"), help=
        "Also write a checkpoint every so many steps; one is written after every epoch.")
    checkpoint_minutes: float = run(10.0, NOT_NEGATIVE, needs=("checkpoints", "training"), help=
        "Also write a checkpoint when the last one is so many minutes old; 0: never.")
    keep_checkpoints: int = run(2, at_least(0), help=
        "Newest checkpoints to keep, beside the best, one that is an epoch (1,000 steps at most) "
        "older, and the one that will follow it; 0 writes none at all.")
    weight_check_steps: int = run(500, at_least(0), needs=("training", "workers"), help=
        "Compare the ranks' weights every so many steps, as with each checkpoint; 0: only then.")
    rollback: int = run(0, at_least(0), needs=("checkpoints", "training"), help=
        "On a loss that is not finite go back to a checkpoint from before it, leave that step's "
        "images out, and train on, at most so many times.")
    evaluate: bool = run(False, aliases=("-e", "--test-only"), help=
        "Only evaluate: --weights, --pretrained or --resume.")
    desired_acc: float | None = run(None, PERCENTAGE, needs="training", help=
        "End as soon as validation top-1 reaches this, percent.")
    max_steps: int | None = run(None, at_least(1), needs="training", decides=STEPS, help=
        "End after this many steps; the schedule stays that of --epochs.")
    stall_timeout: int | None = run(None, at_least(0), help=
        "Seconds since a rank's last batch after which it takes the run for frozen and ends it; "
        "0: never. Default: 60, or what 20 batches usually take if that is longer; but 600 until "
        "20 batches have come since the start, an evaluation, a profile or a rollback, and 3 "
        "since a checkpoint.")


@dataclass(frozen=True)
class MeasurementFlags:
    """What is measured beside the training; all of it off unless asked for, since it takes time."""

    tensor_steps: int | None = measurement(None, at_least(1), aliases="--trace-steps",
        needs="training", help=
        "Write gradients, weights, BatchNorm statistics and loss of the first steps, on every "
        "rank, for compare/parity.py.")
    profile_steps: int | None = measurement(None, at_least(1), needs="training", help=
        "Profile so many steps after the first few, on every rank, for compare/timeline.py.")
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
    """Every setting of a run, flat; written to config.json and into each checkpoint."""

    preset: str = run("digits")
    knob_variables: dict[str, str] = field(default_factory=dict, metadata={"flag": Flag("speed")})

    def batch_share(self, epoch: float) -> Fraction:
        """How much of --batch-size the batches of an epoch, counted from 0, are to have."""
        steps = self.batch_size_warmup_epochs + 1
        return Fraction(int(min(epoch + 1, steps)), steps)

    @property
    def uses_timm(self) -> str:
        """A flag, with its value, for which the extra `timm` has to be installed; or ""."""
        uses = {
            f"--arch {self.arch}": self.arch.startswith("timm:"),
            f"--optimizer {self.optimizer}": self.optimizer in ("lars", "lamb"),
            f"--auto-augment {self.auto_augment}": (self.auto_augment or "").startswith("rand-"),
        }
        return next((flag for flag, is_timms in uses.items() if is_timms), "")

    @property
    def has_fp16_weights(self) -> bool:
        """Whether the weights themselves are fp16, and so their gradients."""
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
    """The fields of Config in these scopes."""
    return [name for name, flag in FLAGS.items() if flag.scope in scopes]


def knob_types(engine: str) -> dict[str, type]:
    """The settings of an engine that are knobs, with the type of their values."""
    hints = get_type_hints(Config)
    return {
        name: (get_args(hints[name]) or (hints[name],))[0]  # of `int | None` the first
        for name, flag in FLAGS.items()
        if flag.engine == engine
    }


def spelled(name: str) -> str:
    """A field of Config as it is written on the command line."""
    return "--" + name.replace("_", "-")


def _flag_names() -> dict[str, bool]:
    """All flags, under each of their names, and whether they take a value."""
    names = {}
    for name in FLAGS.keys() - {"knob_variables"}:  # which --knobs sets
        takes_value = not isinstance(getattr(Config(), name), bool)
        negation = [] if takes_value else [spelled(f"no_{name}")]
        for one in (spelled(name), *negation, *FLAGS[name].aliases):
            names[one] = takes_value
    return names


FLAG_NAMES = _flag_names()
# Second names; one is a shorthand.
ALIASES = {alias: spelled(name) for name, flag in FLAGS.items() for alias in flag.aliases}
ALIASES["--opt-level"] = "--precision"


def flag_name(word: str) -> str:
    """A word's flag by its first name, without a value; "" if the word is no flag."""
    name = word.split("=")[0].replace("_", "-")
    name = ALIASES.get(name, name)
    return name if name.startswith("--") else ""


def last_value(words: Sequence[str], flag: str) -> str | None:
    """The value that a trainer would take for a flag: the last one given."""
    value = None
    for word, following in zip_longest(words, words[1:]):
        if flag_name(word) == flag:
            value = word.partition("=")[2] if "=" in word else following
    return value


def without_flag(words: Sequence[str], flag: str) -> list[str]:
    """The words without a flag that takes one value."""
    kept, rest = list[str](), iter(words)
    for word in rest:
        if flag_name(word) != flag:
            kept.append(word)
        elif "=" not in word:
            next(rest, None)  # its value
    return kept
