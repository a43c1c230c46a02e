"""All settings of a run: the flags, their defaults, the presets, and what does not fit together.

Imports nothing slow: `--help` and a mistyped flag are answered before torch is loaded.
"""

import difflib
import inspect
import math
import os
import sys
from dataclasses import asdict, dataclass, field, fields, make_dataclass, replace
from typing import Annotated, Any, Literal, get_type_hints

import docstring_parser
import tyro
from tyro.conf import arg

from recipe.errors import UserError, fail
from recipe.knobs import SETTINGS as KNOBS
from recipe.knobs import Knobs, read_knobs, set_variables
from recipe.world import World


@dataclass(frozen=True)
class DataFlags:
    """Where the images come from and what is done to their pixels."""

    data: str = "digits"
    """`digits` (embedded: 1,797 handwritten digits), `synthetic` (random pixels, to measure speed;
    evaluated only with --evaluate or --desired-acc), or a folder with train/ and val/ in ImageNet's
    layout, or as shards (python -m recipe.make_shards)."""
    train_dir: str | None = None
    """Training folder, one sub-folder a class, or shards; overrides --data."""
    val_dir: str | None = None
    """Validation folder, with the same classes; overrides --data."""
    cache_dir: str = (os.environ.get("XDG_CACHE_HOME") or "~/.cache") + "/imagenet-horovod-ddp"
    """Where the digits and the listings of large folders are kept."""
    in_memory: bool = False
    """Read all images' files at the start, into memory that the ranks of a host share; refused
    where they do not fit."""
    dali: bool = False
    """Let NVIDIA DALI decode, crop, resize and flip the training images, on the GPU if there is one
    (needs the extra `dali`): the same crops and flips, the pixels of another decoder."""
    workers: Annotated[int | None, arg(aliases=["-j"])] = None
    """Loader processes per rank. Default: this rank's share of the cores with a GPU; 0 (in the
    training process) on the CPU, where training itself keeps the cores busy."""
    train_crop_size: int = 224
    """Side of training images, pixels."""
    val_resize_size: int = 256
    """Shorter side of validation images before their centre is cropped, pixels."""
    val_crop_size: int = 224
    """Side of validation images, pixels."""
    interpolation: Literal["bilinear", "bicubic", "nearest"] = "bilinear"
    """How images are resized."""
    random_crop_scale: tuple[float, float] = (0.08, 1.0)
    """Share of the image's area that a random crop takes: smallest and largest."""
    hflip_prob: float = 0.5
    """Probability of a horizontal flip."""
    auto_augment: Literal["ra", "ta_wide", "autoaugment", "augmix"] | None = None
    """Automatic augmentation: RandAugment, TrivialAugment (wide), AutoAugment, AugMix."""
    random_erase: float = 0.0
    """Probability that a random rectangle is erased."""
    synthetic_images: int = 12_800
    """Images an epoch of --data synthetic (1,000 classes)."""


@dataclass(frozen=True)
class ModelFlags:
    """What is trained."""

    arch: Annotated[str, arg(aliases=["-a", "--model"])] = "resnet50"
    """Any torchvision classification model."""
    pretrained: bool = False
    """Start from torchvision's best published weights (a download)."""
    weights: str | None = None
    """Start from this file: a checkpoint of this project, of pytorch/examples, of torchvision's
    reference, of Horovod's example, or a bare state dict."""
    batch_norm: Literal["local", "average", "sync"] = "local"
    """BatchNorm statistics over ranks. local: each rank its own, rank 0's are evaluated and saved
    (DDP's default, done once an evaluation instead of once a forward). average: the running
    statistics are averaged over ranks before each evaluation and checkpoint. sync: SyncBatchNorm,
    one batch over all ranks (GPU only)."""
    batch_norm_momentum: float | None = None
    """Share of each batch in BatchNorm's running statistics. Default: the network's own, mostly
    0.1, which takes some fifty steps to forget what it began with."""
    zero_init_residual: bool = False
    """Begin with each residual block as the identity: the scale of its last BatchNorm starts at 0
    (ResNet, ResNeXt and Wide ResNet)."""
    label_smoothing: float = 0.0
    """Share of the target's probability that is spread over all classes."""
    model_ema: bool = False
    """Evaluate and keep an exponential moving average of the weights, too."""
    model_ema_decay: float = 0.9999
    """Its decay per optimizer step."""


@dataclass(frozen=True)
class OptimizationFlags:
    """How it is trained. Learning rates are per worker: they are scaled by the number of
    workers."""

    epochs: int = 90
    """Passes over the training images."""
    batch_size: Annotated[int, arg(aliases=["-b"])] = 32
    """Images per worker and forward pass."""
    val_batch_size: int = 32
    """Images per worker and forward pass in validation."""
    batches_per_allreduce: int = 1
    """Forward and backward passes whose gradients are accumulated before they are exchanged."""
    base_lr: float = 0.0125
    """Learning rate for one worker; multiplied by workers x batches_per_allreduce (Adasum: see
    docs/recipe.md)."""
    momentum: float = 0.9
    """Of SGD."""
    nesterov: bool = False
    """Nesterov's momentum."""
    wd: Annotated[float, arg(aliases=["--weight-decay"])] = 5e-5
    """Weight decay."""
    norm_weight_decay: float | None = None
    """Weight decay of normalisation layers; default: --wd."""
    bias_weight_decay: float | None = None
    """Weight decay of biases outside normalisation layers; default: --wd."""
    lr_scheduler: Literal["step", "cosine"] = "step"
    """step: times --lr-gamma at each of --lr-step-epochs. cosine: down to --lr-min at the end."""
    lr_step_epochs: tuple[int, ...] = (30, 60, 80)
    """Epochs at which the step schedule goes down."""
    lr_gamma: float = 0.1
    """Factor of the step schedule."""
    lr_min: float = 0.0
    """Where the cosine schedule ends (after scaling)."""
    warmup_epochs: Annotated[float, arg(aliases=["--lr-warmup-epochs"])] = 5.0
    """Epochs of warm-up."""
    warmup_method: Annotated[Literal["gradual", "linear"], arg(aliases=["--lr-warmup-method"])] = (
        "gradual"
    )
    """gradual: from one worker's rate to the scaled rate (Goyal et al. 2017). linear: from 1 % of
    the scaled rate."""
    clip_grad_norm: float | None = None
    """Largest norm of the gradient of all weights together."""
    seed: int = 42
    """Of weights, data order, augmentation and dropout."""


@dataclass(frozen=True)
class SpeedFlags:
    """Number formats, devices and communication."""

    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    """fp32; tf32 in matrix products (GPU); autocast to bf16; autocast to fp16 with loss scaling."""
    opt_level: Literal["O0", "O1", "O2", "O3"] | None = None
    """Apex's name for a precision: O0 is fp32 and O1 is fp16; O2 and O3 have no counterpart
    here."""
    channels_last: bool = False
    """NHWC images; the weights stay contiguous, which Horovod requires (docs/recipe.md)."""
    compile: bool = False
    """Compile the network's blocks by torch.compile: for GPUs. It takes minutes at the start, and
    on CPUs it is slower than without (docs/performance.md)."""
    wire_format: Literal["fp32", "fp16", "auto"] = "fp32"
    """Number format in which gradients are sent. auto: the faster of the two here, as measured
    before training (a resumed run measures anew)."""
    fp16_allreduce: bool = False
    """Horovod's name for --wire-format fp16."""
    use_adasum: bool = False
    """Combine gradients by Adasum instead of averaging them (Horovod only)."""
    gradient_predivide_factor: float | None = None
    """Divide gradients by this before they are summed and by the rest afterwards (Horovod only).
    Default: the number of workers, which is what DDP always does, and which keeps fp16 sums from
    overflowing."""
    knobs: str | None = None
    """A file of settings and variables that make the exchange of gradients faster here, as
    `compare/run.py --tune FILE` finds and writes them. Flags and the environment win over it."""
    bucket_cap_mb: float | None = None
    """Largest bucket of gradients that are exchanged together, MiB (DDP only; its default is 25
    after a first one of 1). Horovod's counterpart is the variable HOROVOD_FUSION_THRESHOLD."""
    first_bucket_mb: float | None = None
    """Size of the first bucket, whose gradients are ready first, MiB (DDP only). Default: that of
    the others if --bucket-cap-mb is given, else 1."""
    gradient_as_bucket_view: bool = False
    """Let gradients live in the buckets: saves a copy and their memory (DDP only)."""
    static_graph: bool = False
    """Promise that every step uses the same parameters in the same order (DDP only)."""
    num_groups: int | None = None
    """Exchange the gradients in so many groups, each as soon as all of it is ready (Horovod only,
    fp32 only). Default: each cycle sends what is ready."""
    cuda: bool = True
    """Use GPUs where there are any."""
    deterministic: bool = False
    """The same bits in every run on the same machines, for which GPUs take slower kernels and
    Horovod sends each gradient by itself; see docs/recipe.md."""
    threads: int | None = None
    """CPU threads per rank. Default: this rank's share of the cores that it may use."""


@dataclass(frozen=True)
class RunFlags:
    """What is written, where it goes on, and when it ends."""

    log_dir: str = "runs"
    """Holds a folder for each run."""
    name: str | None = None
    """The run's folder under --log-dir. Default: time, engine, model and number of workers, and a
    number where that is taken."""
    log_interval: int = 10
    """Steps between two reductions of the training metrics."""
    resume: str | None = None
    """A checkpoint's path, or `auto`: the newest whole checkpoint of the run --name, or a fresh
    start."""
    allow_changed_data: bool = False
    """Go on from a checkpoint although there are other images than it was trained on: the order of
    the images is then another one."""
    checkpoint_steps: int | None = None
    """Also write a checkpoint every so many steps; one is written after every epoch."""
    keep_checkpoints: int = 2
    """Newest checkpoints to keep, beside the best; 0 writes none at all."""
    evaluate: Annotated[bool, arg(aliases=["-e", "--test-only"])] = False
    """Only evaluate: --weights, --pretrained or --resume."""
    desired_acc: float | None = None
    """End as soon as validation top-1 reaches this, percent."""
    max_steps: int | None = None
    """End after this many steps; the schedule stays that of --epochs."""
    stall_timeout: int = 600
    """Seconds since a rank's last batch after which it takes the run for frozen and ends it; 0:
    never. Longer than one rank may keep the others waiting, and than --compile takes."""


@dataclass(frozen=True)
class MeasurementFlags:
    """What is measured beside the training; all of it off unless asked for, since it takes time."""

    ablation_steps: int | None = None
    """Measure exposed communication: stretches of so many steps alternate in which gradients are
    exchanged, and in which they are computed but thrown away. The training learns half as much."""
    trace_steps: int | None = None
    """Write gradients, weights, BatchNorm statistics and loss of the first steps, on every rank,
    for compare/parity.py."""
    profile_steps: int | None = None
    """Profile so many steps after the first few, on every rank, for compare/timeline.py."""


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

    preset: str = "digits"
    knob_variables: dict[str, str] = field(default_factory=dict)  # that --knobs has set

    @property
    def sends_fp16(self) -> bool:
        """Whether gradients are sent as fp16."""
        return self.wire_format == "fp16"


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


NOT_FOLDERS = ("digits", "synthetic", "")  # values of --data, the last for "not told"
PRESETS = {
    "digits": digits,
    "goyal-90": goyal_90,
    "tv-v1": tv_v1,
    "dle-50": dle_50,
    "dle-90": dle_90,
}


def parse_args(engine: str, world: World, argv: list[str] | None = None) -> Config:
    """Settings from the command line; ends the process with one message, from rank 0, if they do
    not make sense.

    `engine` is "horovod" or "ddp": a few settings belong to one of them.
    """
    argv = sys.argv[1:] if argv is None else argv
    try:
        config, base, knobs = read_flags(engine, world.size, argv, talk=world.is_first)
    except UserError as error:
        fail(world, f"error: {error}", exit_code=2)
    except SystemExit as ended:  # tyro answered --help, or said what is wrong with the flags
        fail(world, "", exit_code=int(ended.code or 0))
    variables, overruled = set_variables(knobs)  # before an engine is loaded, which reads them
    if world.is_first:
        for line in [*without_effect(config, base, engine, world.size), *overruled]:
            print(f"warning: {line}", file=sys.stderr)
    return replace(config, knob_variables=variables)


def read_flags(
    engine: str, world_size: int, argv: list[str], talk: bool, program: str | None = None
) -> tuple[Config, Config, Knobs]:
    """The settings, those without the command line, and the knobs; UserError if they do not make
    sense, and SystemExit after --help or a value that the parser does not know. `program`: what
    these say that --help is given to, if not this process's script."""
    knobs = read_knobs(_value_of(argv, "--knobs"), engine)
    base = replace(_chosen_preset(argv), **knobs.settings)
    config = _resolve(_parse_flags(base, argv, talk, program))
    check(config, engine, world_size)
    return config, base, knobs


def _chosen_preset(argv: list[str]) -> Config:
    name = _value_of(argv, "--preset")
    if name is None:
        embedded = (
            _value_of(argv, "--data") in (None, "digits") and _value_of(argv, "--train-dir") is None
        )
        name = "digits" if embedded else "goyal-90"
    if name not in PRESETS:
        close = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(PRESETS)}"
        raise UserError(f"--preset {name}: there is no such preset; {hint}")
    return PRESETS[name]()


def _value_of(argv: list[str], flag: str) -> str | None:
    """The last value that `argv` gives to `flag`, before the real parser runs."""
    value = None
    for index, word in enumerate(argv):
        name, equals, rest = word.partition("=")
        if name.replace("_", "-") != flag:  # the real parser takes --train_dir, too
            continue
        if equals:
            value = rest
        elif index + 1 < len(argv):
            value = argv[index + 1]
    return value


def _parse_flags(base: Config, argv: list[str], talk: bool, program: str | None) -> Config:
    """Parse into one group of flags a section, then into the flat Config."""
    sections: list[Any] = [
        (title, section, field(default_factory=section))
        for title, section in ((title, _with_defaults(SECTIONS[title], base)) for title in SECTIONS)
    ]
    preset_help = "Defaults for all other flags: " + ", ".join(PRESETS)
    preset = ("preset", Annotated[str, arg(help=preset_help)], base.preset)
    about = inspect.cleandoc(PRESETS[base.preset].__doc__ or "")
    parsed: Any
    parsed, unknown = tyro.cli(
        make_dataclass("Flags", [*sections, preset], frozen=True),
        args=argv,
        prog=program,
        description=f"Defaults are those of --preset {base.preset}:\n\n{about}",
        config=(tyro.conf.OmitArgPrefixes,),
        console_outputs=talk,
        return_unknown_args=True,
    )
    if unknown:
        raise UserError(_about_unknown(unknown[0]))
    values = {
        name: value for title in SECTIONS for name, value in asdict(getattr(parsed, title)).items()
    }
    return Config(preset=parsed.preset, **values)


# What other trainers call it, and what is closest to it here.
OTHERS_FLAGS = {
    "--amp": "--precision bf16 or fp16",
    "--data-dir": "--data DIR",
    "--data-path": "--data DIR",
    "--output-dir": "--log-dir DIR",
    "--print-freq": "--log-interval N",
    "--sync-bn": "--batch-norm sync",
    "--dist-backend": "--cuda or --no-cuda, which decides between NCCL and Gloo",
    "--dist-url": "the launcher's flags (docs/launching.md)",
    "--world-size": "the launcher's flags (docs/launching.md)",
}


def _about_unknown(word: str) -> str:
    """What to say about a word of the command line that is no flag."""
    if not word.startswith("-"):
        return f"{word}: belongs to no flag; if the images are there, say --data {word}"
    word = word.partition("=")[0]
    if word in ("--lr", "--learning-rate"):
        return (
            f"{word}: there is no such flag; --base-lr is the rate of one worker, and multiplied "
            "by the number of workers and --batches-per-allreduce"
        )
    close = difflib.get_close_matches(word, _flag_names(), n=1)
    meant = OTHERS_FLAGS.get(word) or (close[0] if close else None)
    hint = f"did you mean {meant}?" if meant else "--help lists all"
    return f"{word}: there is no such flag; {hint}"


def _flag_names() -> list[str]:
    """All flags, under each of their names."""
    names = ["--preset"]
    for section in SECTIONS.values():
        for name, kind in get_type_hints(section, include_extras=True).items():
            aliases = [a for meta in getattr(kind, "__metadata__", ()) for a in meta.aliases or ()]
            names += [f"--{_flag(name)}", f"--no-{_flag(name)}"][: 1 + (kind is bool)] + aliases
    return names


def _with_defaults(section: type, base: Config) -> type:
    """`section` with the values of `base` as defaults and the docs of its fields as help.

    tyro would find the docs by itself, but it keeps the line breaks of the source in them.
    """
    types = get_type_hints(section, include_extras=True)
    docs = {
        item.arg_name: " ".join((item.description or "").split())
        for item in docstring_parser.parse_from_object(section).params
    }
    flags: list[Any] = [
        (name, Annotated[types[name], arg(help=docs[name])], getattr(base, name))
        for name in (item.name for item in fields(section))
    ]
    return make_dataclass(
        section.__name__, flags, frozen=True, namespace={"__doc__": section.__doc__}
    )


OPT_LEVELS: dict[str, Literal["fp32", "fp16"]] = {"O0": "fp32", "O1": "fp16"}


def _resolve(config: Config) -> Config:
    """Replace shorthands by what they stand for."""
    if config.opt_level in ("O2", "O3"):
        raise UserError(
            f"--opt-level {config.opt_level}: keeps the weights themselves in fp16, which "
            "torch.amp does not do; use --precision fp16 (Apex's O1) or --precision bf16"
        )
    if config.opt_level:
        config = replace(config, precision=OPT_LEVELS[config.opt_level], opt_level=None)
    if config.fp16_allreduce:
        config = replace(config, wire_format="fp16", fp16_allreduce=False)
    train_dir, val_dir = config.train_dir, config.val_dir
    if config.data not in NOT_FOLDERS:
        train_dir = train_dir or os.path.join(config.data, "train")
        val_dir = val_dir or os.path.join(config.data, "val")
    return replace(
        config,
        train_dir=train_dir and os.path.expanduser(train_dir),
        val_dir=val_dir and os.path.expanduser(val_dir),
        cache_dir=cache_folder(config.cache_dir),
    )


def cache_folder(name: str) -> str:
    """The folder that --cache-dir names; UserError if it is below a home that there is not."""
    folder = os.path.expanduser(name)
    if folder.startswith("~"):
        raise UserError(
            f"--cache-dir {name}: this user has no home folder (HOME is not set); name a folder "
            "that can be written"
        )
    return folder


SMALLEST = {
    "epochs": 1,
    "batch_size": 1,
    "val_batch_size": 1,
    "batches_per_allreduce": 1,
    "log_interval": 1,
    "train_crop_size": 1,
    "val_crop_size": 1,
    "val_resize_size": 1,
    "threads": 1,
    "workers": 0,
    "checkpoint_steps": 1,
    "keep_checkpoints": 0,
    "max_steps": 1,
    "stall_timeout": 0,
    "num_groups": 1,
    "synthetic_images": 1,
    "seed": 0,
    "ablation_steps": 2,
    "trace_steps": 1,
    "profile_steps": 1,
}
SHARES = (
    "label_smoothing",
    "hflip_prob",
    "random_erase",
    "model_ema_decay",
    "momentum",
    "batch_norm_momentum",
)
NOT_NEGATIVE = (
    "base_lr",
    "wd",
    "norm_weight_decay",
    "bias_weight_decay",
    "warmup_epochs",
    "lr_min",
    "lr_gamma",
)


def check(config: Config, engine: str, world_size: int) -> None:
    """Raise UserError for values that cannot be meant."""
    if not config.data and not config.train_dir and not config.val_dir:
        raise UserError(
            f"--preset {config.preset}: is a recipe for ImageNet; say where it is with --data DIR"
        )
    if bool(config.train_dir) != bool(config.val_dir):
        given, missing = (
            ("--train-dir", "--val-dir") if config.train_dir else ("--val-dir", "--train-dir")
        )
        raise UserError(
            f"{given} {config.train_dir or config.val_dir}: {missing} is missing; give both, or "
            "--data DIR"
        )
    for name, smallest in SMALLEST.items():
        value = getattr(config, name)
        if value is not None and value < smallest:
            raise UserError(f"--{_flag(name)} {value}: must be at least {smallest}")
    if config.seed >= 2**63:
        raise UserError(f"--seed {config.seed}: must be less than 2^63")
    for name in SHARES:
        value = getattr(config, name)
        if value is not None and not 0 <= value <= 1:
            raise UserError(
                f"--{_flag(name)} {value}: is a share or probability; give a number from 0 to 1"
            )
    for name in NOT_NEGATIVE:
        value = getattr(config, name)
        if value is not None and not 0 <= value < math.inf:  # which a nan is not, either
            raise UserError(f"--{_flag(name)} {value}: give a number that is not negative")
    above_0 = (
        "clip_grad_norm",
        "gradient_predivide_factor",
        "bucket_cap_mb",
        "first_bucket_mb",
        "batch_norm_momentum",
    )
    for name in above_0:
        value = getattr(config, name)
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"--{_flag(name)} {value}: give a number above 0")
    low, high = config.random_crop_scale
    if not 0 < low <= high <= 1:
        raise UserError(
            f"--random-crop-scale {low} {high}: give shares of the area with 0 < smallest <= "
            "largest <= 1"
        )
    if config.val_crop_size > config.val_resize_size:
        raise UserError(
            f"--val-crop-size {config.val_crop_size}: larger than the resized image "
            f"({config.val_resize_size}); raise --val-resize-size"
        )
    if config.desired_acc is not None and not 1 < config.desired_acc <= 100:
        raise UserError(
            f"--desired-acc {config.desired_acc}: is a percentage; 75 percent is written 75"
        )
    if config.nesterov and config.momentum == 0:
        raise UserError("--nesterov: needs --momentum above 0")
    if config.name is not None and ("/" in config.name or config.name in (".", "..")):
        raise UserError(
            f"--name {config.name}: give the name of a folder in --log-dir, without a slash"
        )
    if config.resume == "auto" and not config.name:
        raise UserError("--resume auto: needs the --name of the run that is to go on")
    if config.pretrained and config.weights:
        raise UserError(
            f"--weights {config.weights}: --pretrained names other weights; give one of the two"
        )
    if config.evaluate and not (config.weights or config.pretrained or config.resume):
        raise UserError(
            "--evaluate: says nothing about what to evaluate; add --weights FILE, --pretrained or "
            "--resume"
        )
    if config.dali and (config.auto_augment or config.random_erase):
        flag = "--auto-augment" if config.auto_augment else "--random-erase"
        raise UserError(f"{flag}: cannot be combined with --dali, which crops and flips only")
    if engine == "horovod" and config.num_groups is not None:
        _check_groups(config)
    if engine == "ddp" and config.static_graph and config.batches_per_allreduce > 1:
        raise UserError(
            "--static-graph: cannot be combined with --batches-per-allreduce, since DDP wants to "
            "see the exchange in its first backward pass; leave one of the two out"
        )
    if engine == "ddp" and config.static_graph and config.ablation_steps and config.resume:
        raise UserError(
            f"--resume {config.resume}: cannot be combined with --static-graph and "
            "--ablation-steps, since DDP wants to see the exchange in its first step, and a run "
            "may go on with one that has none; leave --static-graph out"
        )
    if config.use_adasum:
        _check_adasum(config, engine, world_size)


def _check_groups(config: Config) -> None:
    """Horovod leaves the predivide factor out where gradients are grouped: they are summed first
    and divided then. In fp32 that is rounding at most; fp16 sums would overflow."""
    for flag, is_given in {
        f"--wire-format {config.wire_format}": config.wire_format != "fp32",
        "--gradient-predivide-factor": config.gradient_predivide_factor is not None,
        "--use-adasum": config.use_adasum,
    }.items():
        if is_given:
            raise UserError(
                f"{flag}: cannot be combined with --num-groups, with which Horovod only averages, "
                "and divides after the sum, where fp16 overflows; leave one of the two out"
            )


def _check_adasum(config: Config, engine: str, world_size: int) -> None:
    if engine != "horovod":
        raise UserError("--use-adasum: only Horovod has it; start horovod_train/train.py")
    if world_size & (world_size - 1):
        raise UserError(
            f"--use-adasum: halves the world again and again, which {world_size} workers do not "
            "allow; use a power of two"
        )
    if config.precision == "fp16" or config.clip_grad_norm is not None:
        flag = "--clip-grad-norm" if config.clip_grad_norm is not None else "--precision fp16"
        raise UserError(
            f"{flag}: cannot be combined with --use-adasum, which steps inside the backward pass"
        )
    if config.gradient_predivide_factor is not None:
        raise UserError(
            "--gradient-predivide-factor: belongs to averaging, and --use-adasum does not average"
        )
    if config.ablation_steps is not None:
        raise UserError(
            "--ablation-steps: cannot be combined with --use-adasum, which has no gradients to "
            "leave unexchanged: it combines the ranks' updates"
        )


OF_REAL_IMAGES = (
    "in_memory",
    "dali",
    "workers",
    "random_erase",
    "auto_augment",
    "hflip_prob",
    "random_crop_scale",
    "interpolation",
    "val_resize_size",
)
OF_TRAINING = (
    "dali",
    "epochs",
    "batch_size",
    "batches_per_allreduce",
    "base_lr",
    "momentum",
    "wd",
    "warmup_epochs",
    "clip_grad_norm",
    "label_smoothing",
    "wire_format",
    "desired_acc",
    "max_steps",
    "checkpoint_steps",
    "ablation_steps",
    "trace_steps",
    "profile_steps",
)


def without_effect(config: Config, base: Config, engine: str, world_size: int) -> list[str]:
    """What was asked for and does nothing here, in sentences; compared with the preset `base`."""
    changed = {
        item.name
        for item in fields(config)
        if getattr(config, item.name) != getattr(base, item.name)
    }
    lines = []

    def note(name: str, reason: str, condition: bool = True) -> None:
        if name in changed and condition:
            lines.append(f"--{_flag(name)} has no effect: {reason}")

    predivide = "gradient_predivide_factor"
    note(predivide, "DDP always divides by the number of workers before the sum", engine == "ddp")
    note(predivide, "one worker divides by 1", engine != "ddp" and world_size == 1)
    note("wire_format", "one worker sends nothing", world_size == 1)
    note("use_adasum", "one worker has nothing to combine", world_size == 1)
    note("batch_norm", "one worker's statistics are all there are", world_size == 1)
    note("lr_step_epochs", "--lr-scheduler is cosine", config.lr_scheduler == "cosine")
    note("lr_gamma", "--lr-scheduler is cosine", config.lr_scheduler == "cosine")
    note("lr_min", "--lr-scheduler is step", config.lr_scheduler == "step")
    note("warmup_method", "--warmup-epochs is 0", config.warmup_epochs == 0)
    note("model_ema_decay", "--model-ema is not given", not config.model_ema)
    others = not is_resnet(config.arch)
    note("zero_init_residual", f"--arch {config.arch} has no such blocks", others)
    loaded = bool(config.pretrained or config.weights)
    note("zero_init_residual", "the weights are loaded", loaded)
    synthetic = config.data == "synthetic" and not config.train_dir
    note("synthetic_images", "--data is not synthetic", not synthetic)
    named = config.data in NOT_FOLDERS and bool(config.train_dir)
    note("data", "--train-dir and --val-dir say where the images are", named)
    note("checkpoint_steps", "--keep-checkpoints is 0", config.keep_checkpoints == 0)
    if engine == "horovod" and config.channels_last and config.batch_norm == "sync":
        lines.append(
            "--channels-last gains little: Horovod's SyncBatchNorm turns its images back to NCHW"
        )
    for name in KNOBS["ddp"]:
        note(name, "Horovod has no such setting", engine == "horovod")
    for name in KNOBS["horovod"]:
        note(name, "DDP has no such setting", engine == "ddp")
    for name in OF_REAL_IMAGES:
        note(name, "--data synthetic reads no images", synthetic)
    for name in OF_TRAINING:
        note(name, "--evaluate does not train", config.evaluate)
    return lines


def is_resnet(arch: str) -> bool:
    """Whether torchvision's `arch` is of its class ResNet, the one that --zero-init-residual
    concerns."""
    return arch.startswith(("resnet", "resnext", "wide_resnet"))


def _flag(name: str) -> str:
    return name.replace("_", "-")
