"""The claim that all else rests on: both engines compute the same training, bit by bit."""

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import (
    ENGINES,
    SMALL,
    before_the_launchers_words,
    change_on_rank,
    launch,
    losses,
    rarely,
    read_json,
    read_lines,
    train,
)
from making import a_config, write_digits
from needs import needs_dali, needs_fashion_mnist, needs_timm

from recipe.data.prepare import make_shards
from recipe.record.checkpoint import step_in_name
from recipe.record.resume import find_checkpoint
from recipe.settings.presets import PRESETS
from recipe.settings.presets import preset as preset_of

pytestmark = pytest.mark.launch

Trained = Callable[..., Path]
DDP, HOROVOD, HOROVOD_GLOO = ENGINES
DDP_MPI, FLOOR = ("mpirun --transport mpi", "ddp"), ("mpirun", "mpi4py")
HOROVOD_MPIRUN_GLOO = ("mpirun --transport gloo", "horovod")
# Each adds something that an engine could do in its own way.
VARIANTS = {
    "fp32": "",
    "gradients of several buckets": "--arch resnet18 --max-steps 8",
    "fp16 wire": "--fp16-allreduce --max-steps 20",
    "fp16 with loss scaling": "--precision fp16 --clip-grad-norm 1 --max-steps 10",
    "accumulation, clipping, averaged BatchNorm, EMA": (
        "--batches-per-allreduce 2 --batch-size 6 --clip-grad-norm 1 --batch-norm average "
        "--model-ema --model-ema-decay 0.9 --label-smoothing 0.1 --nesterov "
        "--norm-weight-decay 0 --bias-weight-decay 0 --channels-last"
    ),
    "AdamW": "--optimizer adamw --max-steps 20",
    "LARS": "--optimizer lars --nesterov --norm-weight-decay 0 --bias-weight-decay 0 --max-steps 8",
    "LAMB of timm's network": "--optimizer lamb --arch timm:resnet10t --max-steps 4",
    "timm's RandAugment and stochastic depth": (
        "--arch timm:resnet10t --drop-path 0.5 --auto-augment rand-m7-mstd0.5-inc1"
    ),
    "SyncBatchNorm": "--batch-norm sync --max-steps 8",
    "O2": "--opt-level O2 --clip-grad-norm 1 --model-ema --max-steps 10",  # leaves out 8 steps
    "O3": "--opt-level O3 --keep-batchnorm-fp32 True --loss-scale 64 --max-steps 6",
    # What is done to order, batches, network, loss and evaluation.
    "recipes": (
        "--augment-repeats 2 --first-crop-size 12 --resize-epochs 0 1 --blur-pool "
        "--mixup-alpha 0.2 --cutmix-alpha 1 --loss bce --label-smoothing 0.1 "
        "--val-flip --model-ema --model-ema-decay 0.9 --model-ema-steps 3 --lr-restart-epochs 1"
    ),
    # 60 steps of 24 images, and 10 of 48.
    "batches that grow": "--batch-size 24 --batch-size-warmup-epochs 1",
    "batches of one rank that grow": "--batch-size 48 --batch-size-warmup-epochs 1",
    # ResNet-18's bf16 backward on a CPU differs from run to run, even in a single process.
    "bf16": "--precision bf16 --max-steps 20",
}
(
    FP32,
    BUCKETS,
    WIRE,
    SCALING,
    MANY,
    ADAMW,
    LARS,
    LAMB,
    TIMM,
    SYNC,
    O2,
    O3,
    RECIPES,
    GROWING,
    GROWING_ALONE,
    BF16,
) = VARIANTS
# All at once, over the end of an epoch, in few steps: what one does differently, the other does
# not hide.
VARIANTS[ALL := "all at once"] = (
    f"{VARIANTS[MANY]} {VARIANTS[RECIPES]} --batch-size 36 --batch-size-warmup-epochs 1 "
    "--fp16-allreduce --max-steps 24"
)
OFTEN = [WIRE, MANY]
RARELY = [
    BUCKETS,
    SCALING,
    O3,
    ADAMW,
    BF16,
]  # only in make test-all: BF16 is like FP32 to an engine


def check_equal(*folders: Path) -> None:
    """Nothing that two runs trained differs, nor what compare takes for a difference."""
    first, second = (read_json(folder / "summary.json") for folder in folders)
    assert first["weights_sha256"] == second["weights_sha256"]
    assert first["fingerprint"] == second["fingerprint"]
    assert first["skipped_steps"] == second["skipped_steps"] < first["steps"]
    assert first["weights_sha256"] != first["fingerprint"]["initial_weights_sha256"]
    variables = [read_json(folder / "environment.json")["variables"] for folder in folders]
    assert variables[0] == variables[1]
    assert len(losses(folders[0])) == first["steps"]
    assert losses(folders[0]) == losses(folders[1])


@pytest.mark.parametrize(
    ("variant", "first", "second"),
    [
        # Both engines over both transports.
        *((FP32, DDP, second) for second in [HOROVOD, HOROVOD_GLOO, HOROVOD_MPIRUN_GLOO, DDP_MPI]),
        (ALL, DDP_MPI, HOROVOD),  # each of which adds halves in its own way
        rarely(ALL, DDP, HOROVOD),
        *(rarely(variant, DDP, HOROVOD) for variant in [MANY, RECIPES, SYNC, O2]),
        *(
            pytest.param(variant, DDP, HOROVOD, marks=[needs_timm, pytest.mark.full])
            for variant in [LAMB, LARS, TIMM]
        ),
        *(rarely(variant, DDP_MPI, HOROVOD) for variant in [WIRE, MANY, *RARELY]),
        *(rarely(variant, DDP, second) for variant in RARELY for second in [HOROVOD, HOROVOD_GLOO]),
        *(rarely(variant, DDP, HOROVOD_GLOO) for variant in OFTEN),
        rarely(WIRE, DDP, HOROVOD),
        *(rarely(variant, DDP, FLOOR) for variant in [FP32, MANY]),
    ],
)
def test_engines_end_with_equal_weights(
    variant: str, first: tuple[str, str], second: tuple[str, str], trained: Trained
) -> None:
    check_equal(trained(*first, VARIANTS[variant]), trained(*second, VARIANTS[variant]))


@pytest.mark.full
@pytest.mark.parametrize(
    "preset",
    [
        pytest.param(name, marks=needs_timm) if preset_of(name).uses_timm else name
        for name in PRESETS
        if not name.startswith("digits")
    ],
)
def test_each_recipe_is_the_same_on_both_engines(preset: str, tmp_path: Path) -> None:
    """On images, batches and a network of this machine's size."""
    recipe = preset_of(preset)
    arch = "timm:resnet10t" if recipe.uses_timm else "shufflenet_v2_x0_5"
    arch = "resnet10" if recipe.small_stem else arch
    small = (
        f"--data digits --arch {arch} --train-crop-size 40 --val-resize-size 40 "
        "--val-crop-size 32 --batch-size 12 --threads 1 --max-steps 6"
    )
    if recipe.first_crop_size:
        small += " --first-crop-size 32"
    folders = []
    for launcher, engine in (DDP, HOROVOD):
        folders.append(tmp_path / engine)
        place = f"--log-dir {tmp_path} --name {engine}"
        launch(launcher, engine, f"--preset {preset} {small} {place}", warm=True).checked()
    check_equal(*folders)


@pytest.mark.parametrize("variant", [FP32, rarely(O2), rarely(RECIPES), rarely(GROWING_ALONE)])
def test_one_rank_equals_plain_training(variant: str, trained: Trained) -> None:
    plain, *others = (
        trained("python", engine, VARIANTS[variant], ranks=1)
        for engine in ("single_process", "ddp", "horovod")
    )
    for alone in others:
        check_equal(plain, alone)


SHARDS = "--preset digits --data {shards} --workers 1"
FASHION = "--preset fashion-quick --data fashion-mnist --workers 1"


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The digits as shards."""
    folder = tmp_path_factory.mktemp("data")
    make_shards(write_digits(folder / "files"), folder / "shards", folder, images_per_shard=100)
    return folder / "shards"


def cut(trained: Trained, launcher: str, engine: str, arguments: str, folder: Path) -> Path:
    """A run that was killed after step 55, and whose last checkpoint is of step 40: what such a
    training that was not killed had written until then."""
    shutil.copytree(trained(launcher, engine, arguments), folder)
    metrics = folder / "metrics.jsonl"
    written = metrics.read_text().splitlines(keepends=True)
    kept = itertools.takewhile(lambda line: '"step": 56,' not in line, written)
    metrics.write_text("".join(kept))
    assert len(losses(folder)) == 55
    assert read_lines(folder, "epoch") == [], "the first one was not over"
    (folder / "summary.json").unlink()
    for checkpoint in (folder / "checkpoints").glob("step-*"):
        if checkpoint.name > "step-000000040.pt":
            checkpoint.unlink()
    return folder


@pytest.mark.parametrize(
    ("first", "second", "arguments"),
    [
        (DDP, HOROVOD, ""),
        rarely(HOROVOD, DDP, VARIANTS[RECIPES]),
        rarely(HOROVOD, DDP, ""),
        rarely(HOROVOD, DDP, VARIANTS[GROWING]),
        rarely(DDP, HOROVOD, "--precision fp16 --model-ema"),
        rarely(HOROVOD, DDP, "--precision fp16 --model-ema"),
        rarely(DDP, HOROVOD, "--optimizer adamw"),
        rarely(HOROVOD, DDP, "--optimizer adamw"),
        rarely(DDP, HOROVOD, SHARDS),
        pytest.param(HOROVOD, DDP, VARIANTS[TIMM], marks=[needs_timm, pytest.mark.full]),
        pytest.param(DDP, HOROVOD, FASHION, marks=[needs_fashion_mnist, pytest.mark.full]),
    ],
)
def test_resume_in_mid_epoch_under_either_engine(
    first: tuple[str, str],
    second: tuple[str, str],
    arguments: str,
    trained: Trained,
    shards: Path,
    tmp_path: Path,
) -> None:
    """70 steps at once, under one engine, and the rest of them from step 40 on, in mid-epoch."""
    whole = trained(*DDP, "" if arguments == SHARDS else arguments)  # as from files
    arguments = arguments.format(shards=shards)
    folder = cut(trained, *first, arguments, tmp_path / "run")
    summary = train(folder, *second, f"{arguments} --resume auto")
    assert summary["steps"] == 70
    assert summary["weights_sha256"] == read_json(whole / "summary.json")["weights_sha256"]
    steps = read_lines(folder, "step")
    assert [step["step"] for step in steps] == list(range(1, 71)), "none is lost or told twice"
    assert losses(folder) == losses(whole)
    assert [line["samples_seen"] for line in read_lines(folder, "epoch")] == [
        line["samples_seen"] for line in read_lines(whole, "epoch")
    ]


# Makes the loss of one rank NaN in the 15th step that it makes, once.
POISON = """
real, calls = module.batch_sums, []
def batch_sums(outputs, targets, loss):
    calls.append(loss)
    return real(outputs, targets, loss * float("nan") if len(calls) == 15 else loss)
module.batch_sums = batch_sums
"""


@pytest.mark.parametrize("engine", [DDP, rarely(HOROVOD)])
def test_a_loss_that_is_not_finite(engine: tuple[str, str], tmp_path: Path) -> None:
    """Without --rollback the run ends, and --resume auto takes a checkpoint that a finite loss has
    followed; with it the run goes back there by itself, and leaves the images out."""
    poisoned = change_on_rank(1, "recipe.training.metrics", POISON, tmp_path)
    words = f"{SMALL} --max-steps 20 --checkpoint-steps 7 --log-interval 2 --log-dir {tmp_path}"
    ended = launch(*engine, f"{words} --name ended", warm=True, **poisoned)
    assert ended.returncode != 0
    said = before_the_launchers_words(ended.output)
    assert said.count("error: the loss is nan at step 15") == 1, ended.output
    good = find_checkpoint(a_config(resume="auto"), tmp_path / "ended")
    assert good is not None and step_in_name(good) == 7

    back = launch(*engine, f"{words} --rollback 2 --name back", warm=True, **poisoned).checked()
    assert back.output.count("the loss of step 15 was nan: back at step 7") == 1, back.output
    (event,) = (
        line for line in read_lines(tmp_path / "back", "event") if line["name"] == "rollback"
    )
    assert event["step"] == 7 and event["left_out"] == [[14 * 24, 24]]
    steps = read_lines(tmp_path / "back", "step")
    seen = {step["step"]: step["samples_seen"] for step in steps}
    # What is left out counts as seen, so that the schedule stays as it is: one step less.
    assert seen == {step: 24 * (step + (step > 14)) for step in range(1, 20)}
    launch(*engine, f"{words} --rollback 2 --name back --resume auto", warm=True).checked()
    again = read_lines(tmp_path / "back", "step")
    assert [step["step"] for step in again] == [*seen], "it had ended, and has not gone on"


def test_resume_at_another_world_size_sees_each_image_once(
    trained: Trained, tmp_path: Path
) -> None:
    """2 ranks of 12 until step 40, then 3 ranks of 8: the stream of samples goes on."""
    folder = cut(trained, *DDP, "", tmp_path / "run")
    summary = train(folder, "mpirun", "horovod", "--batch-size 8 --resume auto", ranks=3)
    assert summary["samples_seen"] == 70 * 24
    assert read_lines(folder, "eval")[-1]["num_images"] == 359


@pytest.mark.full
def test_adasum_trains_with_an_unscaled_rate_and_goes_on_exactly(tmp_path: Path) -> None:
    adasum = "--use-adasum --arch resnet18"
    whole = train(tmp_path / "run", *HOROVOD, adasum)
    steps = read_lines(tmp_path / "run", "step")
    assert max(step["learning_rate"] for step in steps) <= 0.01, "Adasum scales by itself"
    assert sum(step["loss"] for step in steps[-5:]) < 0.7 * sum(step["loss"] for step in steps[:5])
    (tmp_path / "run" / "checkpoints" / "step-000000070.pt").unlink()  # goes on from the epoch's
    resumed = train(tmp_path / "run", *HOROVOD, f"{adasum} --resume auto")
    assert resumed["weights_sha256"] == whole["weights_sha256"], "each rank has its own momentum"
    assert losses(tmp_path / "run") == [step["loss"] for step in steps]


def test_bad_images_are_replaced_alike_by_any_rank(tmp_path: Path) -> None:
    """Three of the digits are bad: both engines replace them by the same ones and list them."""
    write_digits(tmp_path / "data")
    bad = sorted((tmp_path / "data" / "train").glob("*/*.jpg"))[::500]
    for file in bad:
        file.write_bytes(file.read_bytes()[:200])
    arguments = f"--preset digits --data {tmp_path / 'data'} --bad-images replace"
    arguments += " --batch-size 48 --epochs 1"  # all images in 15 steps
    folders = [tmp_path / "ddp", tmp_path / "horovod"]
    for folder, start in zip(folders, (DDP, HOROVOD), strict=True):
        assert train(folder, *start, arguments)["replaced_images"] == len(bad) == 3
        events = [line for line in read_lines(folder, "event") if line["name"] == "replaced"]
        assert {line["image"] for line in events} == set(map(str, bad))
        assert all(line["reason"].startswith(line["image"]) for line in events)
    assert losses(folders[0]) == losses(folders[1])


@needs_dali
@pytest.mark.full
def test_resume_with_dali(trained: Trained, tmp_path: Path) -> None:
    """Which has pixels of its own, and so a training of its own; the order is the same."""
    arguments = "--dali --workers 1"
    in_one_go = train(tmp_path / "whole", *ENGINES[0], arguments)
    folder = tmp_path / "run"
    train(folder, *ENGINES[0], f"{arguments} --max-steps 20")
    summary = train(folder, *ENGINES[1], f"{arguments} --resume auto")
    assert summary["weights_sha256"] == in_one_go["weights_sha256"]
    assert losses(folder) == losses(tmp_path / "whole")
    plain = read_json(trained(*ENGINES[0]) / "summary.json")
    assert in_one_go["weights_sha256"] != plain["weights_sha256"]
    same = in_one_go["fingerprint"]["data_order_sha256"]
    assert same == plain["fingerprint"]["data_order_sha256"]
    assert abs(in_one_go["top1"] - plain["top1"]) < 15  # it learns as well
