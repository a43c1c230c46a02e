"""Flags, presets, and what is said about settings that cannot be meant or do nothing."""

import itertools
import os
import re
import shlex
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from making import a_config, a_world

from ddp_train.buckets import bucket_sizes
from recipe import errors
from recipe.errors import UserError
from recipe.loop import Rung
from recipe.settings import config as config_module
from recipe.settings.config import Config, check, parse_args, read_flags, without_effect
from recipe.settings.flags import (
    FLAG_NAMES,
    FLAGS,
    SECTIONS,
    Need,
    Scope,
    given_flags,
    names_of,
    spelled,
)
from recipe.settings.other_trainers import OTHERS_FLAGS
from recipe.settings.presets import PRESETS, preset
from recipe.settings.presets import preset as preset_of

ROOT = Path(__file__).parent.parent
IMAGENET = "--data /imagenet "


GROWING = {"first_crop_size": 32, "train_crop_size": 64, "resize_epochs": (0, 1)}


@pytest.fixture(autouse=True)
def no_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the process is SystemExit, without a pause before it."""
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(errors, "OTHER_RANK_DELAY_S", 0.0)
    monkeypatch.setattr(errors, "LATE_RANK_0_S", 0.0)


def parse(line: str, engine: str = "ddp", size: int = 1, rank: int = 0) -> Config:
    return parse_args(engine, a_world(rank, size), line.split())


def code_of(line: str, **others: int) -> int:
    """The exit code that the command line `line` ends with."""
    with pytest.raises(SystemExit) as ended:
        parse(line, **others)
    return int(ended.value.code or 0)


def parsed(settings: dict[str, Any], engine: str, size: int) -> tuple[Config, Config]:
    """The config and its preset as `parse_args` makes them, without the parser's tenth of a
    second."""
    base = config_module._chosen_preset(settings)
    config = config_module._resolve(replace(base, **settings))
    check(config, engine, size)
    return config, base


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("-a vgg11", "arch", "vgg11"),
        ("--arch vgg11", "arch", "vgg11"),
        ("--model vgg11", "arch", "vgg11"),
        ("-b 7", "batch_size", 7),
        ("--batch-size 7", "batch_size", 7),
        ("--batch_size 7", "batch_size", 7),
        ("--batch-size=7", "batch_size", 7),
        ("--wd 0.25", "wd", 0.25),
        ("--weight-decay 0.25", "wd", 0.25),
        ("-j 3", "workers", 3),
        ("--lr-warmup-epochs 3", "warmup_epochs", 3.0),
        ("--lr-warmup-method linear", "warmup_method", "linear"),
        ("-e --weights f", "evaluate", True),
        ("--test-only --weights f", "evaluate", True),
        ("--opt-level O0", "precision", "fp32"),
        ("--opt-level O1", "precision", "fp16"),
        ("--opt-level O2", "precision", "O2"),
        ("--opt-level O3", "precision", "O3"),
        ("--opt-level O3", "keeps_batch_norm_fp32", False),
        ("--opt-level O3 --keep-batchnorm-fp32 True", "keeps_batch_norm_fp32", True),
        ("--opt-level O0", "scales_loss_by", 1),
        ("--opt-level O1", "scales_loss_by", "dynamic"),
        ("--opt-level O2", "scales_loss_by", "dynamic"),
        ("--opt-level O2 --loss-scale 128", "scales_loss_by", 128.0),
        ("--opt-level O3", "scales_loss_by", 1),
        ("--opt-level O3 --loss-scale dynamic", "scales_loss_by", "dynamic"),
        (IMAGENET + "--preset dle-90", "scales_loss_by", 128.0),
        (IMAGENET + "--preset dle-90 --opt-level O2", "scales_loss_by", 128.0),
        (IMAGENET + "--preset dle-90 --precision bf16", "loss_scale", None),
        (IMAGENET + "--preset dle-90 --opt-level O0", "loss_scale", None),
        (IMAGENET + "--preset dle-90 --precision bf16 --loss-scale=128", "loss_scale", 128.0),
        ("--no-cuda", "cuda", False),
        ("--fp16-allreduce", "wire_format", "fp16"),
        ("--no-fp16-allreduce --wire-format fp16", "wire_format", "fp16"),
        ("--lr-scheduler steplr", "lr_scheduler", "step"),
        ("--lr-scheduler cosineannealinglr", "lr_scheduler", "cosine"),
        ("--wire-format auto", "wire_format", "auto"),
        ("--nesterov --no-nesterov", "nesterov", False),
        ("--lr-step-epochs 1 2 3 4", "lr_step_epochs", (1, 2, 3, 4)),
        ("--lr-restart-epochs 2 3", "lr_restart_epochs", (2, 3)),
        ("--random-crop-scale 0.5 0.6", "random_crop_scale", (0.5, 0.6)),
        ("--random-crop-padding 4", "random_crop_padding", 4),
        ("--image-mean 0.3 0.3 0.3", "image_mean", (0.3, 0.3, 0.3)),
        ("--preset fashion-resnet18 --no-small-stem", "small_stem", False),
        ("--workers None", "workers", None),
        ("--desired-acc 75", "desired_acc", 75.0),
        ("--trace-steps 2", "tensor_steps", 2),
    ],
)
def test_flag(line: str, name: str, value: object) -> None:
    assert getattr(parse(line), name) == value


def test_a_flag_changes_nothing_else() -> None:
    assert parse("--epochs 3") == replace(parse(""), epochs=3)
    assert parse("--opt-level O1").opt_level is None  # else it would disagree with --precision


def test_a_flag_is_declared_once() -> None:
    """One field with a scope; all that follows from it is derived, and leaves no flag out."""
    names = [name for section in SECTIONS.values() for name in section.__dataclass_fields__]
    assert sorted([*names, "preset"]) == sorted(FLAGS)
    assert sorted(names_of(*get_args(Scope))) == sorted(FLAGS)
    aliases = [alias for flag in FLAGS.values() for alias in flag.aliases]
    assert len({*aliases, *map(spelled, FLAGS)}) == len(aliases) + len(FLAGS)
    assert config_module._unmet_needs(Config(), "ddp", 1).keys() == set(get_args(Need))
    for name, flag in FLAGS.items():
        assert set(flag.needs) <= set(get_args(Need)) and set(flag.decides).isdisjoint(aliases)
        assert bool({"ddp", "horovod"} & {*flag.needs}) == (flag.scope == "speed")
        assert (
            flag.bound is None
            or getattr(Config(), name) is None
            or flag.bound.holds(getattr(Config(), name))
        ), name


@pytest.mark.parametrize(
    ("line", "preset"),
    [
        ("", "digits"),
        ("--data digits", "digits"),
        ("--data fashion-mnist", "fashion-quick"),
        ("--data fashion-mnist --train-dir /t --val-dir /v", "goyal-90"),
        ("--data synthetic", "goyal-90"),
        ("--data=/imagenet", "goyal-90"),
        ("--train-dir /t --val-dir /v", "goyal-90"),
        ("--train_dir /t --val_dir /v", "goyal-90"),
        (IMAGENET + "--preset dle-90", "dle-90"),
        (IMAGENET + "--preset=tv-v1", "tv-v1"),
        ("--preset tv-v1 --data digits --preset digits", "digits"),
    ],
)
def test_chosen_preset(line: str, preset: str) -> None:
    assert config_module._chosen_preset(given_flags(line.split())).preset == preset


@pytest.mark.parametrize("name", PRESETS)
def test_preset_gives_the_defaults_and_flags_override_them(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config_module.importlib.util, "find_spec", lambda name: name)  # of timm
    preset = preset_of(name)
    assert preset.preset == name
    line = f"--preset {name} --data {preset.data or '/imagenet'}"
    config = parse(line, size=4)
    names = ("base_lr", "epochs", "wd", "precision")
    assert [vars(config)[field] for field in names] == [vars(preset)[field] for field in names]
    changed = parse(f"{line} --epochs 99 --no-channels-last", size=4)
    assert changed == replace(config, epochs=99, channels_last=False)


@pytest.mark.parametrize(
    ("line", "train_dir", "val_dir"),
    [
        ("", None, None),
        ("--data /imagenet", "/imagenet/train", "/imagenet/val"),
        ("--data /imagenet --val-dir /v2", "/imagenet/train", "/v2"),
        ("--data ~/imagenet --val-dir=~/v2", "~/imagenet/train", "~/v2"),
    ],
)
def test_folders(line: str, train_dir: str | None, val_dir: str | None) -> None:
    config = parse(f"{line} --cache-dir=~/cache")
    expected = [folder and os.path.expanduser(folder) for folder in (train_dir, val_dir, "~/cache")]
    assert [config.train_dir, config.val_dir, config.cache_dir] == expected


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"preset": "tv-v1"}, "--data DIR"),
        ({"preset": "tv-v1", "evaluate": True, "weights": "f"}, "--data DIR"),
        ({"train_dir": "/t"}, "--val-dir is missing"),
        ({"val_dir": "/v"}, "--train-dir is missing"),
        ({"val_dir": "/v", "evaluate": True, "weights": "f"}, "--train-dir is missing"),
        ({"opt_level": "O3", "model_ema": True}, "use --precision O2"),
        ({"opt_level": "O3", "optimizer": "adamw"}, "use --precision O2"),
        ({"betas": (0.9, 1.0)}, "from 0 to below 1"),
        ({"optimizer": "apex-lamb", "wd": 0.0}, "--wd 0: with --optimizer apex-lamb only weights"),
        ({"trust_coefficient": 0.0}, "above 0"),
        ({"loss_scale": 0.0}, "above 0"),
        ({"loss_scale": float("nan")}, "above 0"),
        ({"epochs": 0}, "at least 1"),
        ({"batch_size": 0}, "--batch-size 0: must be at least 1"),
        ({"val_batch_size": -1}, "at least 1"),
        ({"batches_per_allreduce": 0}, "at least 1"),
        ({"log_interval": 0}, "at least 1"),
        ({"train_crop_size": 0}, "at least 1"),
        ({"val_crop_size": 0}, "at least 1"),
        ({"val_resize_size": 0}, "at least 1"),
        ({"threads": 0}, "at least 1"),
        ({"workers": -1}, "at least 0"),
        ({"checkpoint_steps": 0}, "at least 1"),
        ({"keep_checkpoints": -1}, "at least 0"),
        ({"max_steps": 0}, "at least 1"),
        ({"synthetic_images": 0}, "at least 1"),
        ({"seed": -1}, "at least 0"),
        ({"seed": 2**63}, "less than 2^63"),
        ({"label_smoothing": 1.5}, "from 0 to 1"),
        ({"hflip_prob": -0.1}, "from 0 to 1"),
        ({"random_erase": 50.0}, "from 0 to 1"),
        ({"model_ema_decay": 2.0}, "from 0 to 1"),
        ({"momentum": float("nan")}, "from 0 to 1"),
        ({"batch_norm_momentum": 1.5}, "up to 1"),
        ({"batch_norm_momentum": 0.0}, "above 0"),
        ({"base_lr": -1.0}, "not negative"),
        ({"base_lr": float("nan")}, "not negative"),
        ({"base_lr": float("inf")}, "not negative"),
        ({"wd": -1.0}, "not negative"),
        ({"norm_weight_decay": -1.0}, "not negative"),
        ({"bias_weight_decay": -1.0}, "not negative"),
        ({"warmup_epochs": -1.0}, "not negative"),
        ({"lr_min": -1.0}, "not negative"),
        ({"lr_gamma": -1.0}, "not negative"),
        ({"clip_grad_norm": 0.0}, "above 0"),
        ({"gradient_predivide_factor": 0.0}, "above 0"),
        ({"first_bucket_mb": 0.0}, "above 0"),
        ({"num_groups": 0}, "at least 1"),
        ({"random_crop_scale": (0.9, 0.1)}, "smallest <= largest"),
        ({"random_crop_scale": (0, 1)}, "0 < smallest"),
        ({"image_mean": (0.5, 0.5, 1.5)}, "--image-mean 0.5 0.5 1.5: are shares"),
        ({"image_std": (0.0, 0.5, 0.5)}, "--image-std 0.0 0.5 0.5: are shares"),
        ({"random_crop_padding": -1}, "at least 0"),
        ({"random_crop_padding": 20}, "--train-crop-size 20 could miss the image"),
        ({"random_crop_padding": 0, "dali": True}, "cannot be combined with --dali"),
        ({**GROWING, "random_crop_padding": 0}, "which resizes nothing"),
        ({"small_stem": True, "arch": "alexnet"}, "--arch alexnet is none"),
        ({"small_stem": True, "pretrained": True}, "a ResNet's first convolution of 7x7"),
        ({"val_crop_size": 999}, "raise --val-resize-size"),
        ({"desired_acc": 0.75}, "75 percent is written 75"),
        ({"desired_acc": 101.0}, "percentage"),
        ({"nesterov": True, "momentum": 0.0}, "--momentum above 0"),
        ({"mixup_alpha": -0.1}, "not negative"),
        ({"mixup_alpha": 0.2, "batch_size": 1}, "--mixup-alpha 0.2: mixes the images of a batch"),
        ({"cutmix_alpha": 1.0, "batch_size": 1}, "raise --batch-size above 1"),
        ({"batch_size_warmup_epochs": -1}, "at least 0"),
        ({"batch_size_warmup_epochs": 4}, "give fewer than --epochs 4"),
        ({"batch_size_warmup_epochs": 3, "batch_size": 4}, "a larger --batch-size 4"),
        ({"model_ema_steps": 0}, "at least 1"),
        ({"augment_repeats": 0}, "at least 1"),
        ({"auto_augment": "randaugment"}, "choose ra, ta_wide"),
        ({"auto_augment": "rand-m7-x2"}, "as timm writes it: rand-m7-mstd0.5-inc1"),
        ({"drop_path": 0.1}, "such as --arch timm:resnet50"),
        ({"bce_target_threshold": 1.5}, "from 0 to 1"),
        ({"first_crop_size": 0}, "at least 1"),
        ({"first_crop_size": 64, "resize_epochs": (0, 1)}, "can only grow"),
        ({"first_crop_size": 32, "train_crop_size": 64}, "--resize-epochs BEGIN END"),
        ({**GROWING, "resize_epochs": (1, 1)}, "0 <= BEGIN < END <= 4"),
        ({**GROWING, "resize_epochs": (1, 5)}, "0 <= BEGIN < END <= 4"),
        ({**GROWING, "dali": True}, "--first-crop-size: cannot be combined with --dali"),
        ({"auto_augment": "ra", "dali": True}, "cannot be combined with --dali"),
        ({"random_erase": 0.1, "dali": True}, "cannot be combined with --dali"),
        ({"bad_images": "replace", "dali": True}, "--bad-images replace: cannot be combined with"),
        ({"lr_restart_epochs": (3, 2)}, "--lr-restart-epochs 3 2: give ascending"),
        ({"lr_restart_epochs": (1,)}, "between --warmup-epochs 1 and --epochs 4"),
        ({"lr_restart_epochs": (4,)}, "between --warmup-epochs 1 and --epochs 4"),
        ({"resume": "auto"}, "--name"),
        ({"name": "../outside"}, "without a slash"),
        ({"name": "a/b"}, "without a slash"),
        ({"name": ".."}, "without a slash"),
        ({"pretrained": True, "weights": "f"}, "one of the two"),
        ({"evaluate": True}, "--weights FILE"),
        ({"new_head": True}, "others from a file; add --weights FILE"),
        ({"new_head": True, "weights": "f", "evaluate": True}, "must be trained before"),
        ({"new_head": True, "weights": "f", "resume": "c.pt"}, "goes on with all layers"),
        ({"use_adasum": True}, "only Horovod"),
    ],
)
def test_what_cannot_be_meant(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=rf"\A(?=--)[^\n]*{re.escape(words)}[^\n]*\Z"):  # one line
        parsed(settings, "ddp", 1)


@pytest.mark.parametrize(
    ("line", "suggestion"),
    [
        ("--preset goyal90", "did you mean goyal-90?"),
        ("--preset tv_v1", "tv-v1?"),
        ("--preset zzz", "there are digits"),
        # A shorthand and what it stands for.
        ("--precision bf16 --opt-level O2", "--opt-level: stands for a value of --precision"),
        ("--opt_level=O2 --precision=fp32", "--opt-level: stands for a value of --precision"),
        ("--fp16-allreduce --wire-format auto", "--fp16-allreduce: stands for a value of --wire"),
        ("-b 0", "error: --batch-size 0: must be at least 1\n"),
    ],
)
def test_refusal_is_one_line_and_exit_code_2(
    line: str, suggestion: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of(line) == 2
    out, err = capsys.readouterr()
    assert suggestion in err
    assert (out, err.count("\n")) == ("", 1)


@pytest.mark.parametrize(
    ("line", "corrected"),
    [
        (  # of pytorch/examples
            "-a resnet50 -j 8 -b 256 --lr 0.1 --wd 1e-4 -p 5 --dist-url tcp://h:1 --world-size 1 "
            "--dist-backend nccl --multiprocessing-distributed --rank 0 --gpu 0 --seed 1 /images",
            "-a resnet50 -j 8/GPUS_OF_A_NODE -b 256/GPUS_OF_A_NODE --base-lr 0.0125 --wd 1e-4 "
            "--log-interval 5 --transport nccl --seed 1 --data /images",
        ),
        (
            "--dummy --no-accel --learning-rate=0.8 --start-epoch 3 --epochs 3",
            "--data synthetic --no-cuda --base-lr 0.1 --epochs 3",
        ),
        (  # of torchvision
            "--data-path /images --model resnet50 --lr 0.5 --amp --sync_bn --cache-dataset "
            "--ra-sampler --ra-reps 4 --use-deterministic-algorithms --opt sgd_nesterov "
            "--output-dir=. --backend tensor --use-v2 --device cuda --lr-scheduler steplr",
            "--data /images --model resnet50 --base-lr 0.0625 --precision fp16 --batch-norm sync "
            "--ra-reps 4 --deterministic --optimizer sgd --nesterov "
            "--log-dir . --lr-scheduler steplr",
        ),
        (
            "--data-dir /images --lr-step-size 30 --device cpu --print-freq 9",
            "--data /images --lr-step-epochs 30 60 --no-cuda --log-interval 9",
        ),
        (  # of Horovod
            "--train-dir /t --val-dir /v --checkpoint-format ./{epoch}.tar --fp16-allreduce",
            "--train-dir /t --val-dir /v --fp16-allreduce",
        ),
        (  # of imagenet_ddp_apex.py
            "--local_rank=0 -a resnet50 --b 208 --channels-last True --opt-level O2 '/my images'",
            "-a resnet50 --batch-size 208 --channels-last --opt-level O2 --data '/my images'",
        ),
        (  # whose rate is that of 256 images, and the last data count
            "--opt-level O2 -b 128 --lr 0.1 /images --dummy",
            "--opt-level O2 -b 128 --base-lr 0.05 --data synthetic",
        ),
        ("-b 4 --dali_cpu /images", "-b 4 --data /images"),  # not a value of what is not known
        ("--data=/i --dali_cpu /images", "--data=/i"),  # the images' folder is given
        ("--foo 3 --prof -b 4", "-b 4"),
        (  # mistyped
            "--batchsize 7 --epoch=3 --warm-up-epochs 1 --no-cude --xyz 5 --channels-last False",
            "--batch-size 7 --epochs 3 --warmup-epochs 1 --no-cuda --no-channels-last",
        ),
    ],
)
def test_another_trainers_line_is_corrected_at_once(line: str, corrected: str) -> None:
    with pytest.raises(UserError) as refused:
        read_flags("ddp", 8, shlex.split(line), talk=False, program="train.py")
    assert str(refused.value).splitlines()[-1] == f"corrected: train.py {corrected}"
    if "--data" in corrected:
        read_flags("ddp", 8, shlex.split(corrected.replace("/GPUS_OF_A_NODE", "")), talk=False)


def test_a_rate_of_a_job_is_to_be_divided_where_its_workers_are_not_known() -> None:
    with pytest.raises(UserError, match=r"divide .*\n.* --base-lr 0.8/WORKERS --data /images"):
        read_flags("ddp", 1, ["--dist-url", "env://", "--lr", "0.8", "/images"], talk=False)


@pytest.mark.parametrize(("rate", "ours"), [("1e-3", "0.001"), ("8e-1", "0.8")])
def test_a_rate_with_an_exponent(rate: str, ours: str) -> None:
    with pytest.raises(UserError, match=f"write --base-lr {ours};"):
        read_flags("ddp", 1, ["--lr", rate, "/images"], talk=False)


def test_only_the_first_rank_prints_which_value_is_wrong(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for talk in (False, True):
        with pytest.raises(SystemExit) as ended:
            read_flags("ddp", 2, ["--epochs", "x"], talk=talk)
        assert ended.value.code == 2
        assert ("--epochs" in capsys.readouterr().err) == talk


def test_an_empty_word_before_one_that_is_left_out() -> None:
    with pytest.raises(UserError, match="--xyz: leave it out"):
        read_flags("ddp", 1, ["", "--xyz"], talk=False)


def test_all_that_is_wrong_with_a_line_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of("--lr 0.1 --b 208 --gpu 0 /images --xyz --momentum 7 -j -1", size=8) == 2
    said = capsys.readouterr().err.splitlines()
    expected = [
        "error: this trainer does not know all",
        "  --lr 0.1: write --base-lr 0.0125; the rate of one worker: --lr / 8",
        "  --b 208: write --batch-size 208",
        "  --gpu 0: leave it out; each rank takes",
        "  /images: write --data /images",
        "  --xyz: leave it out; there is no such flag; --help lists all",
        "  --workers -1: must be",
        "  --momentum 7.0: is a share",
        "  defaults differ from the other trainer's, too: see docs/flags.md, or",
        "corrected: ",
    ]
    assert all(map(str.startswith, said, expected)) and len(said) == len(expected)


def test_others_flags_are_none_of_ours_and_those_in_the_docs_are_known() -> None:
    assert not OTHERS_FLAGS.keys() & FLAG_NAMES.keys()
    rows = re.findall(r"^\| (`-.*?) \| [EVHA ]+ \|", (ROOT / "docs/flags.md").read_text(), re.M)
    flags = {flag.replace("_", "-") for row in rows for flag in re.findall(r"`(-[\w-]+)", row)}
    assert len(flags) > 40 and flags <= OTHERS_FLAGS.keys() | FLAG_NAMES.keys()


VALUES = st.one_of(
    st.sampled_from(["0", "1", "-1", "3", "0.5", "1e400", "nan", "inf", "None", "True", "auto"]),
    st.sampled_from(["resnet18", "digits", "synthetic", "/nowhere"]),
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=6),
)
WORDS = st.one_of(
    st.sampled_from(sorted(FLAG_NAMES)),
    VALUES,
    st.tuples(st.sampled_from(sorted(FLAG_NAMES)), VALUES).map("=".join),
    st.text("-_=abc ", max_size=6),
)


@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.lists(WORDS, max_size=6), st.sampled_from(["ddp", "horovod", "mpi4py"]))
def test_any_words_are_settings_or_refused(words: list[str], engine: str) -> None:
    """In a sentence, or by the parser; and what is taken holds."""
    try:
        config, base = read_flags(engine, 2, words, talk=False)
    except UserError as error:
        assert str(error).strip()
    except SystemExit as ended:
        assert ended.code in (0, 2)
    else:
        check(config, engine, 2)
        assert all(without_effect(config, base, engine, 2))


@pytest.mark.parametrize(
    ("allowed", "settings", "engine", "size", "words"),
    [
        ({}, {"use_adasum": True}, "horovod", 3, "power-of-two"),
        # Two number formats in a group.
        *(
            ({"num_groups": 2}, other, "horovod", 2, "cannot be combined with --num-groups")
            for other in (
                {"wire_format": "fp16"},
                {"wire_format": "auto"},
                {"gradient_predivide_factor": 2},
                {"precision": "O2"},
            )
        ),
        *(
            ({"use_adasum": True}, other, "horovod", 2, words)
            for other, words in (
                ({"precision": "fp16"}, "--precision fp16: cannot be combined"),
                ({"precision": "O3"}, "--precision O3: cannot be combined"),
                ({"optimizer": "adamw"}, "--optimizer adamw: cannot be combined"),
                ({"loss_scale": 8.0}, "--loss-scale 8.0: cannot be combined"),
                ({"clip_grad_norm": 1.0}, "--clip-grad-norm: cannot be combined"),
                ({"gradient_predivide_factor": 2.0}, "does not average"),
            )
        ),
        # Otherwise torch stops at an internal assertion.
        (
            {"static_graph": True},
            {"batches_per_allreduce": 2},
            "ddp",
            2,
            "--static-graph: cannot be combined with --batches-per",
        ),
    ],
)
def test_what_cannot_be_combined(
    allowed: dict[str, Any], settings: dict[str, Any], engine: str, size: int, words: str
) -> None:
    """The first of these settings may be without the others, and all under the other engine, which
    says that it lacks them."""
    parsed(allowed, engine, size)
    if "use_adasum" not in allowed | settings:
        parsed({**allowed, **settings}, "horovod" if engine == "ddp" else "ddp", size)
    with pytest.raises(UserError, match=re.escape(words)):
        parsed({**allowed, **settings}, engine, size)


@pytest.mark.parametrize(
    ("settings", "flag", "engine", "size"),
    [
        ({"gradient_predivide_factor": 2.0}, "gradient-predivide-factor", "ddp", 2),
        ({"gradient_predivide_factor": 2.0}, "gradient-predivide-factor", "horovod", 1),
        ({"num_groups": 2}, "num-groups", "ddp", 2),
        ({"sleeping_poll": False}, "sleeping-poll", "ddp", 2),
        ({"bucket_cap_mb": 2.0}, "bucket-cap-mb", "horovod", 2),
        ({"first_bucket_mb": 2.0}, "first-bucket-mb", "horovod", 2),
        ({"wire_format": "fp16"}, "wire-format", "ddp", 1),
        ({"use_adasum": True}, "use-adasum", "horovod", 1),
        ({"batch_norm": "average"}, "batch-norm", "ddp", 1),
        ({"keep_batchnorm_fp32": True}, "keep-batchnorm-fp32", "ddp", 2),
        ({"optimizer": "adamw", "momentum": 0.5}, "momentum", "ddp", 2),
        ({"betas": (0.5, 0.5)}, "betas", "ddp", 2),
        ({"trust_coefficient": 0.5}, "trust-coefficient", "ddp", 2),
        ({"lr_step_epochs": (3,)}, "lr-step-epochs", "ddp", 2),
        ({"lr_gamma": 0.5}, "lr-gamma", "ddp", 2),
        ({"lr_scheduler": "step", "lr_min": 0.5}, "lr-min", "ddp", 2),
        ({"warmup_epochs": 0.0, "warmup_method": "linear"}, "warmup-method", "ddp", 2),
        ({"model_ema_decay": 0.5}, "model-ema-decay", "ddp", 2),
        ({"model_ema_steps": 2}, "model-ema-steps", "ddp", 2),
        ({"resize_epochs": (0, 1)}, "resize-epochs", "ddp", 2),
        ({"evaluate": True, "weights": "f", "augment_repeats": 2}, "augment-repeats", "ddp", 2),
        ({"lr_scheduler": "linear", "lr_restart_epochs": (2,)}, "lr-restart-epochs", "ddp", 2),
        ({"evaluate": True, "weights": "f", "mixup_alpha": 0.2}, "mixup-alpha", "ddp", 2),
        ({"evaluate": True, "weights": "f", "cutmix_alpha": 1.0}, "cutmix-alpha", "ddp", 2),
        ({"evaluate": True, "weights": "f", "loss": "bce"}, "loss", "ddp", 2),
        ({"bce_target_threshold": 0.2}, "bce-target-threshold", "ddp", 2),
        ({"zero_init_residual": True, "arch": "alexnet"}, "zero-init-residual", "ddp", 2),
        ({"zero_init_residual": True, "weights": "f"}, "zero-init-residual", "ddp", 2),
        ({"gradient_predivide_factor": 2.0}, "gradient-predivide-factor", "ddp", 1),
        ({"synthetic_images": 5}, "synthetic-images", "ddp", 2),
        ({"checkpoint_steps": 5, "keep_checkpoints": 0}, "checkpoint-steps", "ddp", 2),
        ({"data": "synthetic", "workers": 2}, "workers", "ddp", 2),
        ({"data": "synthetic", "random_erase": 0.5}, "random-erase", "ddp", 2),
        ({"data": "synthetic", "augment_repeats": 2}, "augment-repeats", "ddp", 2),
        ({"data": "synthetic", "bad_images": "replace"}, "bad-images", "ddp", 2),
        ({"data": "synthetic", "auto_augment": "ra"}, "auto-augment", "ddp", 2),
        ({"data": "synthetic", "hflip_prob": 0.1}, "hflip-prob", "ddp", 2),
        ({"data": "synthetic", "random_crop_scale": (0.5, 1)}, "random-crop-scale", "ddp", 2),
        ({"data": "synthetic", "interpolation": "bicubic"}, "interpolation", "ddp", 2),
        ({"data": "synthetic", "val_resize_size": 333}, "val-resize-size", "ddp", 2),
        ({"data": "synthetic", "random_crop_padding": 4}, "random-crop-padding", "ddp", 2),
        (
            {"random_crop_padding": 4, "random_crop_scale": (0.5, 1)},
            "random-crop-scale",
            "ddp",
            2,
        ),
        ({"data": "synthetic", "train_dir": "/t", "val_dir": "/v"}, "data", "ddp", 2),
        ({"evaluate": True, "weights": "f", "epochs": 99}, "epochs", "ddp", 2),
        ({"evaluate": True, "weights": "f", "base_lr": 9.0}, "base-lr", "ddp", 2),
        ({"evaluate": True, "weights": "f", "batch_size": 9}, "batch-size", "ddp", 2),
        ({"evaluate": True, "weights": "f", "desired_acc": 90.0}, "desired-acc", "ddp", 2),
        ({"evaluate": True, "weights": "f", "max_steps": 9}, "max-steps", "ddp", 2),
        ({"evaluate": True, "weights": "f", "checkpoint_steps": 9}, "checkpoint-steps", "ddp", 2),
    ],
)
def test_warning_of_what_has_no_effect(
    settings: dict[str, Any], flag: str, engine: str, size: int
) -> None:
    warnings = without_effect(*parsed(settings, engine, size), engine, size)
    assert len(warnings) == 1, warnings
    assert warnings[0].startswith(f"--{flag} has no effect: ")


@pytest.mark.parametrize(
    ("line", "engine"),
    [
        ("--gradient-predivide-factor 2 --fp16-allreduce", "horovod"),
        ("--use-adasum", "horovod"),
        ("--batch-norm average --lr-scheduler step --lr-step-epochs 3 --lr-gamma 0.5", "ddp"),
        ("--lr-min 0.001 --warmup-method linear --model-ema --model-ema-decay 0.9", "ddp"),
        ("--lr-scheduler linear --lr-min 0.001 --model-ema --model-ema-steps 2", "ddp"),
        ("--data synthetic --synthetic-images 99", "ddp"),
        ("--workers 2 --random-erase 0.1 --checkpoint-steps 5", "ddp"),
        (IMAGENET + "--epochs 6", "ddp"),
        (IMAGENET + "--preset dle-90", "ddp"),
        (IMAGENET + "--arch vgg16", "ddp"),
    ],
)
def test_no_warning(line: str, engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    parse(line, engine, size=2)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("line", "rate"),
    [
        (IMAGENET + "-b 208", "0.08125"),
        (IMAGENET + "--batch_size=16", "0.00625"),
        (IMAGENET + "--preset dle-90 -b 128", "0.128"),
        (IMAGENET + "-b 208 --base-lr 0.0125", ""),
        (IMAGENET + "-b 32", ""),
        (IMAGENET + "-b 208 -e --weights f", ""),
        ("--data synthetic -b 208", ""),
        ("--data synthetic --train-dir t --val-dir v -b 208", "0.08125"),
    ],
)
def test_a_batch_without_its_rate_is_said(
    line: str, rate: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parse(line, size=8)
    assert (f"give --base-lr {rate} to" in capsys.readouterr().err) == bool(rate)


def test_nhwc_under_horovods_sync_batch_norm() -> None:
    settings = {"channels_last": True, "batch_norm": "sync"}
    (warning,) = without_effect(*parsed(settings, "horovod", 2), "horovod", 2)
    assert "Horovod's SyncBatchNorm turns its images back to NCHW" in warning
    assert without_effect(*parsed(settings, "ddp", 2), "ddp", 2) == []


def test_only_rank_0_talks_and_not_after_its_watcher(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    parse("--lr-gamma 0.5", size=2, rank=0)
    assert "warning" in capsys.readouterr().err
    with monkeypatch.context() as watched:
        watched.setattr(config_module.marks, "is_watched", True)
        parse("--lr-gamma 0.5", size=2, rank=0)
    parse("--lr-gamma 0.5", size=2, rank=1)
    codes = [code_of(line, size=2, rank=1) for line in ("--help", "--precision fp8")]
    assert (codes, capsys.readouterr()) == ([0, 2], ("", ""))


def test_presets_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of("--list-presets") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["--preset", *PRESETS]
    [line] = [line for line in lines if line.startswith("dle-50 ")]
    assert re.fullmatch(r"dle-50 +50 +76.25 \+- 0.04 +8 V100 +DeepLearningExamples", line)


@pytest.mark.parametrize(("flags", "count"), [("5", 1), ("6", 0), ("5 --evaluate --weights f", 0)])
def test_a_warm_up_that_lasts_until_the_end_is_said(flags: str, count: int) -> None:
    config, base = read_flags("ddp", 1, f"{IMAGENET} --epochs {flags}".split(), talk=False)
    lines = [line for line in without_effect(config, base, "ddp", 1) if "warmup" in line]
    assert len(lines) == count and all("never falls" in line for line in lines)


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"XDG_CACHE_HOME": ""}, "/home/me/.cache/"),
        ({}, "/home/me/.cache/"),
        ({"XDG_CACHE_HOME": "/scratch"}, "/scratch/"),
    ],
)
def test_cache_folder(environ: dict[str, str], folder: str) -> None:
    """An empty variable counts as none (XDG Base Directory Specification)."""
    environ = {"HOME": "/home/me", "PYTHONPATH": str(ROOT), **environ}
    code = "import recipe.settings.config as c; print(c.home_path('', c.Config.cache_dir))"
    text = subprocess.check_output([sys.executable, "-c", code], env=environ, text=True)
    assert text == f"{folder}imagenet-horovod-ddp\n"


@pytest.mark.parametrize(
    ("user", "reason"),
    [
        ("~", "HOME is not set, and user 123456789 has no home folder: set HOME, or"),
        ("~nosuchuser", "there is no user nosuchuser: correct it, or"),
    ],
)
@pytest.mark.parametrize("flag", [*map(spelled, config_module.PATHS)])
def test_a_home_that_there_is_not(
    flag: str, user: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also this user's, in a container that runs under a number that its passwd does not have."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 123_456_789)
    with pytest.raises(UserError, match=f"^{flag} {user}/x: {reason} give {flag} a"):
        read_flags("ddp", 1, ["--cache-dir", "/c", flag, f"{user}/x"], talk=False)


@pytest.fixture(scope="module")
def help_text() -> str:
    """What a user sees on a terminal of 80 columns, and, last, whether torch was imported."""
    code = (
        "import os, runpy, sys; sys.argv = ['train.py', '--help']\n"
        "def exit_with(code):\n"
        "    print('slow imports:', {'torch', 'torchvision', 'horovod'} & set(sys.modules))\n"
        "    print('exit code:', code, flush=True)\n"
        "    real_exit(0)\n"
        "real_exit, os._exit = os._exit, exit_with\n"
        f"runpy.run_path({str(ROOT / 'ddp_train' / 'train.py')!r}, run_name='__main__')\n"
    )
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "COLUMNS": "80"},
        capture_output=True,
        text=True,
    ).stdout


def test_help_is_grouped_and_has_every_flag_with_its_default(help_text: str) -> None:
    """And it is answered before torch is loaded."""
    assert "slow imports: set()" in help_text and "exit code: 0" in help_text
    for title in SECTIONS:
        assert f"─ {title} options ─" in help_text
    assert help_text.count("(default:") >= len(FLAGS) - 13
    for name in sorted(FLAG_NAMES):
        assert re.search(rf"(?<!\S){name}\b", help_text), name
    assert "Passes over the training images. (default: 90)" in help_text  # ImageNet's


def test_help_fits_its_columns(help_text: str) -> None:
    """Each line of a paragraph is full: the line breaks of the source are not kept. Each flag has
    such a paragraph."""
    body = [line for line in help_text.splitlines() if line.startswith("│")]
    assert max(map(len, body)) == 80
    for above, below in itertools.pairwise(body):
        if re.match(r"│ -.*[A-Z}\]] *│$", above):  # a flag and what it takes
            assert re.match(r"│  +[^-( ]", below), above
        if above.startswith("│       ") and below.startswith("│       "):
            first_word = below.strip("│ ").split()[0]
            assert len(above.rstrip("│ ")) + 1 + len(first_word) > 78, above


# ---- what the scripts in baselines/ refuse before they begin ----


def a_rung(launcher: str, lacks: tuple[str, ...] = (), has: tuple[str, ...] = ()) -> type[Rung]:
    return type("ARung", (Rung,), {"launcher": launcher, "lacks": lacks, "has": has})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"bucket_cap_mb": 5.0}, "--bucket-cap-mb 5.0"),  # no rung has it
        ({"transport": "gloo"}, "--transport gloo"),
        ({"precision": "O2"}, "--precision O2"),
        ({"precision": "fp16"}, "--precision fp16"),  # this one lacks it
        ({"model_ema": True}, "--model-ema True"),
        ({"precision": "bf16"}, None),  # another value than the one that it lacks
        ({"profile_steps": 4}, None),  # it has what others lack
    ],
)
def test_what_a_rung_lacks_is_refused(given: dict[str, Any], message: str | None) -> None:
    refused = pytest.raises(UserError, match=f"^{message}: not supported by this script")
    with refused if message else nullcontext():
        a_rung("none", ("precision fp16", "model_ema"), ("profile_steps",))(
            a_config(**given), a_world()
        )


@pytest.mark.parametrize(
    ("launcher", "ranks", "message"),
    [
        ("torchrun", 1, "was started by python: start it with torchrun"),
        ("none", 2, "was started by torchrun: start it with python"),
    ],
)
def test_a_rung_that_another_launcher_started_is_refused(
    launcher: str, ranks: int, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        a_rung(launcher)(a_config(), a_world(0, ranks))


def test_settings_of_the_exchange_are_the_engines_defaults_but_for_two() -> None:
    changed = {name for name in names_of("speed") if getattr(preset("digits"), name)}
    assert changed == {"gradient_as_bucket_view", "sleeping_poll"}, "the same bits, in less time"


@pytest.mark.parametrize(
    ("settings", "arguments"),
    [
        ({}, {"bucket_cap_mb": None}),
        ({"bucket_cap_mb": 5.0}, {"bucket_cap_mb": 5.0}),
        ({"first_bucket_mb": 2.0}, {"bucket_cap_mb_list": [2.0, 25.0]}),
        ({"first_bucket_mb": 2.0, "bucket_cap_mb": 9.0}, {"bucket_cap_mb_list": [2.0, 9.0]}),
    ],
)
def test_bucket_sizes(settings: dict[str, Any], arguments: dict[str, Any]) -> None:
    assert bucket_sizes(Config(**settings)) == arguments
