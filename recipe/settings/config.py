"""Parse the command line of a run into its settings, and refuse settings that do not fit together.

The flags are in flags.py, the presets in presets.py. Imports nothing slow: `--help` and a mistyped
flag are answered before torch is loaded.
"""

import importlib.util
import io
import os
import shlex
import sys
from collections.abc import Mapping
from contextlib import nullcontext, redirect_stderr
from dataclasses import asdict, field, make_dataclass, replace
from itertools import pairwise
from typing import Annotated, Any, Literal, NoReturn, get_type_hints

import tyro
from tyro.conf import arg

from recipe.errors import UserError, fail, near_match, refuse
from recipe.marks import marks
from recipe.settings.flags import FLAGS, SECTIONS, Config, Need, given_flags, spelled, written
from recipe.settings.other_trainers import in_our_words, is_others, with_open_numbers
from recipe.settings.presets import PRESETS, preset, table
from recipe.world import World

PATHS = ("data", "train_dir", "val_dir", "cache_dir", "log_dir", "weights", "resume")
# The presets of the data sets that --data knows by name, and the one of all other images.
PRESET_OF_DATA = {"digits": "digits", "fashion-mnist": "fashion-quick"}
PRESET_OF_OTHER_IMAGES = "goyal-90"
NOT_FOLDERS = (*PRESET_OF_DATA, "synthetic", "")  # values of --data that name no folder; "": none


def parse_args(engine: str, world: World, argv: list[str] | None = None) -> Config:
    """Return the settings of the command line. If they are wrong, the process ends with one
    message, from rank 0.

    `engine`: "horovod", "ddp", or the name of a script in baselines/. A few settings belong to one
    of the first two.
    """
    argv = sys.argv[1:] if argv is None else argv
    try:
        config, base = read_flags(engine, world.size, argv, talk=world.is_first)
    except UserError as error:
        fail(world, f"error: {error}", exit_code=2)
    except SystemExit as ended:  # tyro has printed --help, or what is wrong with the flags
        fail(world, "", exit_code=int(ended.code or 0))
    if world.is_first and not marks.is_watched:  # else the watcher has printed them
        unscaled = rate_of_another_batch(config, base, argv)
        for line in [*without_effect(config, base, engine, world.size), *unscaled]:
            print(f"warning: {line}", file=sys.stderr)
    return config


def read_flags(
    engine: str, world_size: int, argv: list[str], talk: bool, program: str | None = None
) -> tuple[Config, Config]:
    """Return the settings, and the defaults that the command line started from.

    `program` is the script that messages name, by default this process's. UserError if the
    settings are wrong; SystemExit after --help, or for a value that the parser does not accept.
    """
    given = given_flags(argv)
    base = _chosen_preset(given)
    parsed, unknown = _parse_flags(base, argv, talk, program)
    for shorthand, name in (("opt_level", "precision"), ("fp16_allreduce", "wire_format")):
        if getattr(parsed, shorthand) and name in given:
            raise UserError(
                f"{spelled(shorthand)}: stands for a value of {spelled(name)}; give one of the two"
            )
    if unknown:
        _refuse_words(engine, world_size, argv, unknown, program)
    config = _resolve(parsed)
    # In formats that need no loss scale, a preset's is ignored.
    if "loss_scale" not in given and config.precision in ("fp32", "tf32", "bf16"):
        config = replace(config, loss_scale=None)
    check(config, engine, world_size)
    return config, base


def _chosen_preset(given: Mapping[str, str | None]) -> Config:
    name = given.get("preset")
    if name is None:  # --help shows ImageNet's
        name = PRESET_OF_OTHER_IMAGES if "help" in given else default_preset(given)
    if name not in PRESETS:
        raise UserError(f"--preset {name}: there is no such preset; {near_match(name, PRESETS)}")
    return preset(name)


def default_preset(given: Mapping[str, str | None]) -> str:
    """Return the preset whose defaults apply if none is named: that of the images which the given
    flags select, by default the embedded digits."""
    data = given.get("data") or Config.data
    is_named = given.get("train_dir") is None
    return PRESET_OF_DATA.get(data, PRESET_OF_OTHER_IMAGES) if is_named else PRESET_OF_OTHER_IMAGES


def _parse_flags(
    base: Config, argv: list[str], talk: bool, program: str | None
) -> tuple[Config, list[str]]:
    """Parse `argv` into one group of flags per section, and these into the flat Config. Also return
    the words that belong to no flag."""
    types = get_type_hints(Config)
    sections: list[Any] = []
    for title, section in SECTIONS.items():
        flags: list[Any] = []
        for name in section.__annotations__:
            shown = arg(help=FLAGS[name].help, aliases=FLAGS[name].aliases)
            flags.append((name, Annotated[types[name], shown], getattr(base, name)))
        group: Any = make_dataclass(section.__name__, flags, frozen=True)
        group.__doc__ = section.__doc__
        sections.append((title, group, field(default_factory=group)))
    names = arg(help="Defaults for all other flags: " + ", ".join(PRESETS))
    presets = arg(help="Show each preset's epochs, and the top-1 and time that were published.")
    chosen = PRESETS[base.preset]
    parsed: Any
    # With console_outputs=False tyro would still print which value a flag does not accept.
    with nullcontext() if talk else redirect_stderr(io.StringIO()):
        parsed, unknown = tyro.cli(
            make_dataclass(
                "Flags",
                [
                    *sections,
                    ("preset", Annotated[str, names], base.preset),
                    ("list_presets", Annotated[tyro.conf.FlagCreatePairsOff[bool], presets], False),
                ],
                frozen=True,
            ),
            args=argv,
            prog=program,
            description=(
                f"Defaults are those of --preset {base.preset}; without --data and --preset they "
                f"are those of digits.\n\n{chosen.about} Published: {chosen.top1} % top-1 "
                f"({chosen.source})."
            ),
            config=(tyro.conf.OmitArgPrefixes,),
            return_unknown_args=True,
            console_outputs=talk,
        )
    if parsed.list_presets:
        if talk:
            print(table())
        raise SystemExit(0)
    values = {
        name: value for title in SECTIONS for name, value in asdict(getattr(parsed, title)).items()
    }
    return Config(preset=parsed.preset, **values), unknown


def _refuse_words(
    engine: str, world_size: int, argv: list[str], unknown: list[str], program: str | None
) -> NoReturn:
    """Raise a UserError that lists everything wrong with a command line of which the parser does
    not know the `unknown` words, and gives the line in this project's flags."""
    base = _chosen_preset({"data": "", **given_flags(argv)})  # other trainers' are about ImageNet
    config, _ = _parse_flags(base, argv, talk=False, program=None)
    line, _ = in_our_words(argv, unknown, config, world_size)
    more = []
    try:
        config, _ = _parse_flags(_chosen_preset(given_flags(line)), line, talk=False, program=None)
        check(_resolve(config), engine, world_size)
    except UserError as error:
        more = str(error).splitlines()
    except SystemExit:  # the parser does not accept a value, and will say so
        pass
    line, advice = in_our_words(argv, unknown, config, world_size)
    lines = ["this trainer does not know all of this command line:", *advice, *more]
    if any(is_others(word) for word in unknown):
        lines.append(
            "defaults differ from the other trainer's, too: see docs/flags.md, or take a preset of "
            "--list-presets"
        )
    if (open_line := with_open_numbers(line, unknown, world_size)) != line:
        lines.append("divide a node's numbers by its GPUs, and the job's numbers by its workers")
    corrected = f"corrected: {program or f'python {sys.argv[0]}'} {shlex.join(open_line)}"
    raise UserError("\n  ".join(lines) + f"\n{corrected}")


OPT_LEVELS: dict[str, Literal["fp32", "fp16", "O2", "O3"]] = {
    "O0": "fp32",
    "O1": "fp16",
    "O2": "O2",
    "O3": "O3",
}
SCHEDULES: dict[str, Literal["step", "cosine"]] = {"steplr": "step", "cosineannealinglr": "cosine"}


def _resolve(config: Config) -> Config:
    """Replace shorthands by what they stand for, and expand paths."""
    if config.opt_level:
        config = replace(config, precision=OPT_LEVELS[config.opt_level], opt_level=None)
    if config.fp16_allreduce:
        config = replace(config, wire_format="fp16", fp16_allreduce=False)
    if config.lr_scheduler in SCHEDULES:
        config = replace(config, lr_scheduler=SCHEDULES[config.lr_scheduler])
    paths: dict[str, Any] = {
        name: home_path(spelled(name), path) for name in PATHS if (path := getattr(config, name))
    }
    if config.data not in NOT_FOLDERS:
        paths = {
            f"{part}_dir": os.path.join(paths["data"], part) for part in ("train", "val")
        } | paths
    return replace(config, **paths)


def home_path(flag: str, name: str) -> str:
    """Return the path that a flag names, with `~` and `~user` expanded. UserError if there is no
    such home folder."""
    path = os.path.expanduser(name)
    if path.startswith("~"):
        user = name.partition("/")[0].removeprefix("~")
        problem = f"there is no user {user}: correct it"
        if not user:
            problem = f"HOME is not set, and user {os.getuid()} has no home folder: set HOME"
        raise UserError(f"{flag} {name}: {problem}, or give {flag} a path without ~")
    return path


def check(config: Config, engine: str, world_size: int) -> None:
    """Raise UserError for values that are invalid or do not fit together."""
    refuse(
        *(
            (not flag.bound.holds(value), f"{spelled(name)} {written(value)}: {flag.bound.advice}")
            for name, flag in FLAGS.items()
            if flag.bound and (value := getattr(config, name)) is not None
        )
    )
    refuse(
        *_mistakes_of_the_data(config),
        *_mistakes_of_the_crops(config),
        *_mistakes_of_the_network(config),
        *_mistakes_of_the_start(config),
        *_mistakes_of_the_schedule(config),
        *_mistakes_of_the_optimization(config),
        *_mistakes_of_the_precision(config),
        *_mistakes_of_the_exchange(config, engine, world_size),
    )


# Possible mistakes in a run's settings, as (is it wrong, message), for `refuse`.
Mistakes = list[tuple[Any, str]]


def _mistakes_of_the_data(config: Config) -> Mistakes:
    folders = {"--train-dir": config.train_dir, "--val-dir": config.val_dir}
    given, missing = sorted(folders, key=lambda flag: not folders[flag])
    return [
        (
            not (config.data or config.train_dir or config.val_dir),
            f"--preset {config.preset}: is a recipe for ImageNet; say where it is with --data DIR",
        ),
        (
            bool(folders[given]) != bool(folders[missing]),
            f"{given} {folders[given]}: {missing} is missing; give both, or --data DIR",
        ),
        (
            config.dali and config.bad_images == "replace",
            "--bad-images replace: cannot be combined with --dali, which does not say which image "
            "it could not decode; leave one of the two out",
        ),
    ]


def _mistakes_of_the_crops(config: Config) -> Mistakes:
    low, high = config.random_crop_scale
    first_size, padding = config.first_crop_size, config.random_crop_padding
    begin, end = config.resize_epochs or (0, 0)
    not_by_dali = {
        "--auto-augment": config.auto_augment,
        "--random-erase": config.random_erase,
        "--first-crop-size": first_size,
        "--random-crop-padding": padding is not None,
    }
    return [
        (
            not 0 < low <= high <= 1,
            f"--random-crop-scale {low} {high}: give shares of the area with 0 < smallest <= "
            "largest <= 1",
        ),
        (
            (padding or 0) >= config.train_crop_size,
            f"--random-crop-padding {padding}: crops of --train-crop-size "
            f"{config.train_crop_size} could miss the image; give fewer pixels",
        ),
        (
            config.val_crop_size > config.val_resize_size,
            f"--val-crop-size {config.val_crop_size}: larger than the resized image "
            f"({config.val_resize_size}); raise --val-resize-size",
        ),
        (
            first_size is not None and padding is not None,
            f"--first-crop-size {first_size}: cannot be combined with --random-crop-padding, "
            "which resizes nothing; leave one of the two out",
        ),
        (
            first_size is not None and first_size > config.train_crop_size,
            f"--first-crop-size {first_size}: larger than --train-crop-size "
            f"{config.train_crop_size}; images can only grow",
        ),
        (
            first_size is not None and not 0 <= begin < end <= config.epochs,
            f"--first-crop-size {first_size}: needs the epochs in which images grow; give "
            f"--resize-epochs BEGIN END with 0 <= BEGIN < END <= {config.epochs}",
        ),
        *(
            (
                config.dali and value,
                f"{flag}: cannot be combined with --dali, which crops, resizes to one size and "
                "flips",
            )
            for flag, value in not_by_dali.items()
        ),
    ]


def _mistakes_of_the_network(config: Config) -> Mistakes:
    return [
        (
            config.uses_timm and importlib.util.find_spec("timm") is None,
            f"{config.uses_timm}: needs timm, which is not installed here: pip install "
            "'imagenet-horovod-ddp[timm]' (in a checkout: pip install -e '.[timm]')",
        ),
        (
            config.arch.startswith("timm:") and config.pretrained,
            "--pretrained: loads torchvision's weights, which do not fit timm's networks; give a "
            "file of timm's weights with --weights",
        ),
        (
            config.drop_path and not config.arch.startswith("timm:"),
            f"--drop-path {config.drop_path}: torchvision's {config.arch} has no setting for "
            "stochastic depth; use one of timm's networks, such as --arch timm:resnet50",
        ),
        (
            config.small_stem and not is_resnet(config.arch),
            f"--small-stem: belongs to torchvision's ResNets, and --arch {config.arch} is none; "
            "leave it out, or use a network such as resnet18",
        ),
        (
            config.pretrained and config.small_stem,
            "--small-stem: torchvision's weights are for a ResNet's first convolution of 7x7; "
            "leave out --small-stem or --pretrained",
        ),
    ]


def _mistakes_of_the_start(config: Config) -> Mistakes:
    return [
        (
            config.name is not None and ("/" in config.name or config.name in (".", "..")),
            f"--name {config.name}: give the name of a folder in --log-dir, without a slash",
        ),
        (config.resume == "auto" and not config.name, "--resume auto: needs the run's --name"),
        (
            config.pretrained and config.weights,
            f"--weights {config.weights}: --pretrained names other weights; give one of the two",
        ),
        (
            config.new_head and not config.weights,
            "--new-head: starts the last layer anew, and the others from a file; add --weights "
            "FILE",
        ),
        (
            config.new_head and (config.evaluate or config.resume not in (None, "auto")),
            "--new-head: a new last layer must be trained before it is evaluated, and --resume "
            "FILE goes on with all layers; leave it out",
        ),
        (
            config.evaluate and not (config.weights or config.pretrained or config.resume),
            "--evaluate: there are no weights to evaluate; add --weights FILE, --pretrained or "
            "--resume",
        ),
    ]


def _mistakes_of_the_schedule(config: Config) -> Mistakes:
    warmup = config.batch_size_warmup_epochs
    turns = (config.warmup_epochs, *config.lr_restart_epochs, config.epochs)
    return [
        (
            warmup >= config.epochs,
            f"--batch-size-warmup-epochs {warmup}: the training would end before --batch-size is "
            f"reached; give fewer than --epochs {config.epochs}",
        ),
        (
            0 < warmup >= config.batch_size - 1,
            f"--batch-size-warmup-epochs {warmup}: the first batches would have one image a "
            "worker, and BatchNorm needs two images per worker; give fewer, or a larger "
            f"--batch-size {config.batch_size}",
        ),
        (
            config.lr_restart_epochs and any(epoch >= later for epoch, later in pairwise(turns)),
            f"--lr-restart-epochs {' '.join(map(str, config.lr_restart_epochs))}: give ascending "
            f"epochs between --warmup-epochs {config.warmup_epochs:g} and --epochs {config.epochs}",
        ),
    ]


def _mistakes_of_the_optimization(config: Config) -> Mistakes:
    mixing = {"--mixup-alpha": config.mixup_alpha, "--cutmix-alpha": config.cutmix_alpha}
    return [
        (config.nesterov and config.momentum == 0, "--nesterov: needs --momentum above 0"),
        (
            not all(0 <= beta < 1 for beta in config.betas),
            f"--betas {config.betas[0]} {config.betas[1]}: give two numbers from 0 to below 1",
        ),
        (
            config.wd == 0 and config.optimizer in ("lars", "lamb", "apex-lamb"),
            f"--wd 0: with --optimizer {config.optimizer} only weights that decay get a trust "
            "ratio; give --wd above 0, or use sgd or adamw",
        ),
        *(
            (
                alpha and config.batch_size == 1,
                f"{flag} {alpha}: mixes the images of a batch; raise --batch-size above 1",
            )
            for flag, alpha in mixing.items()
        ),
    ]


def _mistakes_of_the_precision(config: Config) -> Mistakes:
    return [
        (
            config.precision == "O3" and config.optimizer not in ("sgd", "lars", "apex-sgd"),
            f"--optimizer {config.optimizer}: cannot be combined with --precision O3: it divides "
            "by the mean of squared gradients, which fp16 rounds to 0; use --precision O2",
        ),
        (
            config.precision == "O3" and config.model_ema,
            "--model-ema: cannot be combined with --precision O3: rounded to fp16, a moving "
            "average would not change; use --precision O2",
        ),
    ]


def _mistakes_of_the_exchange(config: Config, engine: str, world_size: int) -> Mistakes:
    predivides = config.gradient_predivide_factor is not None
    groups = engine == "horovod" and config.num_groups is not None
    static = engine == "ddp" and config.static_graph
    not_in_groups = {
        f"--wire-format {config.wire_format}": config.wire_format != "fp32",
        "--gradient-predivide-factor": predivides,
        "--use-adasum": config.use_adasum,
        f"--precision {config.precision}": config.has_fp16_weights,
    }
    not_with_adasum = {
        f"--optimizer {config.optimizer}": config.optimizer != "sgd",
        "--clip-grad-norm": config.clip_grad_norm is not None,
        f"--precision {config.precision}": config.precision in ("fp16", "O2", "O3"),
        f"--loss-scale {config.loss_scale}": config.scales_loss_by != 1,
    }
    return [
        (
            static and config.batches_per_allreduce > 1,
            "--static-graph: cannot be combined with --batches-per-allreduce: DDP must see an "
            "exchange in its first backward pass; leave one of the two out",
        ),
        (
            config.use_adasum and engine != "horovod",
            "--use-adasum: only Horovod has it; start horovod_train/train.py",
        ),
        (
            config.use_adasum and world_size & (world_size - 1),
            f"--use-adasum: needs a power-of-two number of workers, and there are {world_size}; "
            "start 2, 4 or 8, for example",
        ),
        (
            config.use_adasum and predivides,
            "--gradient-predivide-factor: belongs to averaging, and --use-adasum does not average",
        ),
        *(
            (
                groups and is_given,
                f"{flag}: cannot be combined with --num-groups: for groups Horovod only averages, "
                "and divides after the sum, which overflows in fp16; leave one of the two out",
            )
            for flag, is_given in not_in_groups.items()
        ),
        *(
            (
                config.use_adasum and is_given,
                f"{flag}: cannot be combined with --use-adasum, which steps in the backward pass",
            )
            for flag, is_given in not_with_adasum.items()
        ),
    ]


def without_effect(config: Config, base: Config, engine: str, world_size: int) -> list[str]:
    """Return warnings about settings that differ from the preset `base` but have no effect in this
    run, and about settings that are probably a mistake."""
    unmet = _unmet_needs(config, engine, world_size)
    lines = [
        f"{spelled(name)} has no effect: {reasons[0]}"
        for name, flag in FLAGS.items()
        if (reasons := [unmet[need] for need in flag.needs if unmet[need]])
        and getattr(config, name) != getattr(base, name)
    ]
    is_as_imagenet = (config.image_mean, config.image_std) == (Config.image_mean, Config.image_std)
    mistakes: Mistakes = [
        (
            config.pretrained and not is_as_imagenet,
            "--image-mean and --image-std differ from those of the images that torchvision's "
            "weights (--pretrained) were trained on",
        ),
        (
            engine == "horovod" and config.channels_last and config.batch_norm == "sync",
            "--channels-last gains little: Horovod's SyncBatchNorm turns its images back to NCHW",
        ),
        (
            config.warmup_epochs >= config.epochs and not config.evaluate,
            f"--warmup-epochs {config.warmup_epochs:g}: the learning rate never falls, as warm-up "
            f"lasts for all of --epochs {config.epochs}; give fewer epochs of warm-up",
        ),
    ]
    return lines + [line for is_likely, line in mistakes if is_likely]


def rate_of_another_batch(config: Config, base: Config, argv: list[str]) -> list[str]:
    """Return a warning if `argv` changes the preset's batch size but not its learning rate. (For
    synthetic images any learning rate will do.)"""
    is_left = config.batch_size != base.batch_size and "base_lr" not in given_flags(argv)
    if not is_left or config.evaluate or not config.reads_images:
        return []
    scaled = f"{base.base_lr * config.batch_size / base.batch_size:.4g}"
    return [
        f"--batch-size {config.batch_size}: the learning rate of --preset {config.preset} is for "
        f"batches of {base.batch_size}, and does not grow with them; give --base-lr {scaled} to "
        f"scale it in proportion, or --base-lr {base.base_lr:.4g} to keep it"
    ]


def _unmet_needs(config: Config, engine: str, world_size: int) -> dict[Need, str]:
    """For each thing that some flags need, return why this run lacks it, or ""."""
    schedule = f"--lr-scheduler is {config.lr_scheduler}"
    needs: dict[Need, tuple[Any, str]] = {
        "images": (config.reads_images, "--data synthetic reads no images"),
        "synthetic data": (not config.reads_images, "--data is not synthetic"),
        "--data": (
            config.data not in NOT_FOLDERS or not config.train_dir,
            "--train-dir and --val-dir say where the images are",
        ),
        "training": (not config.evaluate, "--evaluate does not train"),
        "workers": (world_size > 1, "there is only one worker"),
        "checkpoints": (config.keep_checkpoints, "--keep-checkpoints is 0"),
        "model EMA": (config.model_ema, "--model-ema is not given"),
        "step schedule": (config.lr_scheduler == "step", schedule),
        "cosine schedule": (config.lr_scheduler == "cosine", schedule),
        "falling schedule": (config.lr_scheduler != "step", schedule),
        "warm-up": (config.warmup_epochs, "--warmup-epochs is 0"),
        "residual blocks": (is_resnet(config.arch), f"--arch {config.arch} has no such blocks"),
        "resized crops": (
            config.random_crop_padding is None,
            "--random-crop-padding cuts out without resizing",
        ),
        "progressive resizing": (config.first_crop_size, "--first-crop-size is not given"),
        "new weights": (not (config.pretrained or config.weights), "the weights are loaded"),
        "Horovod's sum": (
            engine == "horovod",
            "without Horovod gradients are always divided by the number of workers before the sum",
        ),
        "fp16 weights": (config.has_fp16_weights, "--precision is neither O2 nor O3"),
        "momentum": (
            config.optimizer in ("sgd", "lars", "apex-sgd"),
            f"--optimizer {config.optimizer} has --betas",
        ),
        "betas": (
            config.optimizer in ("adamw", "lamb", "apex-adam", "apex-lamb"),
            f"--optimizer {config.optimizer} has --momentum",
        ),
        "BCE": (config.loss == "bce", f"--loss is {config.loss}"),
        "LARS": (config.optimizer == "lars", f"--optimizer is {config.optimizer}"),
        "ddp": (engine == "ddp", "only DDP has such a setting"),
        "horovod": (engine == "horovod", "only Horovod has such a setting"),
    }
    return {need: "" if is_there else words for need, (is_there, words) in needs.items()}


def is_resnet(arch: str) -> bool:
    """Return whether torchvision builds `arch` from its class ResNet, the only one that
    --zero-init-residual applies to."""
    return arch.startswith(("resnet", "resnext", "wide_resnet"))
