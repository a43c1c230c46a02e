"""Checkpoints: whole or not at all, and good for either engine at any world size."""

import argparse
import copy
import errno
import functools
import gzip
import io
import itertools
import json
import math
import operator
import os
import pickle
import re
import resource
import threading
import warnings
import zipfile
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from making import CPU, TinyNet, a_config, a_world, files_in
from needs import needs_timm
from safetensors import safe_open
from safetensors.torch import save, save_file
from torch import nn
from torch.utils._pytree import tree_map_only

from recipe.data.batches import Data
from recipe.data.image_folder import Listing
from recipe.errors import UserError
from recipe.files import partial_name
from recipe.ranks import Ranks
from recipe.record import export
from recipe.record import resume as resuming
from recipe.record.checkpoint import (
    checkpoints_in,
    contents_of,
    finish_checkpoint,
    keep_checkpoint,
    load_state,
    load_weights,
    mark_best,
    save_checkpoint,
    step_in_name,
    step_path,
)
from recipe.record.resume import (
    find_checkpoint,
    load_on_all_ranks,
    repair_best,
    restore,
    resume,
    set_aside,
)
from recipe.settings.config import Config
from recipe.training.model import build_ema, build_model, build_optimizer, build_scaler, update_ema
from recipe.training.state import Progress, Trainables
from recipe.world import World

CONFIG = a_config(precision="fp16", model_ema=True, name="run", arch="tiny")
AUTO = replace(CONFIG, resume="auto")
ALONE = a_world()
UNREADABLE = [errno.ENOENT, errno.ESTALE, errno.EACCES]
DATA = Data(None, None, num_train=100, num_val=8, num_classes=3)


def trainables(config: Config = CONFIG, seed: int = 0, steps: int = 0) -> Trainables:
    """A model, after `steps` steps of training."""
    torch.manual_seed(seed)
    model = TinyNet()
    parts = Trainables(
        model, build_optimizer(model, config), build_scaler(config, CPU), build_ema(model, config)
    )
    train(parts, steps)
    return parts


def train(parts: Trainables, steps: int) -> None:
    images = torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(steps))
    for _ in range(steps):
        loss = nn.functional.cross_entropy(parts.model(images), torch.arange(8) % 3)
        parts.scaler.scale(loss).backward()
        parts.scaler.step(parts.optimizer)
        parts.scaler.update()
        parts.optimizer.zero_grad()
        update_ema(parts.ema, parts.model, CONFIG, 1)


def bits(values: torch.Tensor) -> tuple[Any, ...]:
    """What can be compared bit by bit."""
    return values.dtype, values.shape, values.numpy().tobytes()


def plain(value: Any) -> Any:
    return tree_map_only(torch.Tensor, bits, value)


def everything(parts: Trainables) -> Any:
    """All state, as comparable values, bit by bit."""
    modules = [parts.model, parts.optimizer, parts.scaler, *filter(None, [parts.ema])]
    return plain([module.state_dict() for module in modules])


def begin(
    folder: Path,
    progress: Progress,
    parts: Trainables | None = None,
    world: World = ALONE,
    config: Config = CONFIG,
) -> None:
    """Begin to write a checkpoint, as a session does."""
    finish_checkpoint()
    keep_checkpoint(parts or trainables(), progress, config, Ranks(world), DATA, folder)


def read(path: Path) -> dict[str, Any]:
    return load_on_all_ranks(path, Ranks(a_world()))


def saved(path: Path, parts: Trainables | None = None, config: Config = CONFIG) -> dict[str, Any]:
    """A checkpoint that was written to `path` and read again."""
    save_checkpoint(path, contents_of(parts or trainables(config), PROGRESS, config, DATA))
    return read(path)


os.umask(UMASK := os.umask(0))
PROGRESS = Progress(step=3, samples_seen=24, best_top1=12.5, total_seconds=1.25)


def test_flags_win_over_the_checkpoint_s_settings() -> None:
    """Before its state is loaded: whether Adam is fused decides where torch puts its counts of
    steps, on GPUs or not."""
    then, found = replace(CONFIG, optimizer="adamw"), set[tuple[bool, float]]()
    contents = contents_of(trainables(then, steps=1), Progress(1, 4), then, DATA)
    now = replace(then, precision="fp32", wd=0.5)
    fresh = trainables(now)
    fresh.optimizer.register_load_state_dict_pre_hook(
        lambda _, state: found.update(
            (g["fused"], g["weight_decay"]) for g in state["param_groups"]
        )
    )
    restore(contents, fresh, now, a_world(), DATA, "c.pt")
    assert found == {(True, 0.5)}


def keep(folder: Path, step: int, top1: float | None, progress: Progress, **others: Any) -> None:
    """A checkpoint, and then, with a `top1`, its evaluation: recorded, and marked if it is best."""
    progress.step, progress.samples_seen = step, 4 * step
    begin(folder, progress, config=replace(CONFIG, **others))
    if top1 is not None:
        record(folder, step, top1)
        if progress.take_best(top1):
            mark_best(step_path(folder / "checkpoints", step))
    finish_checkpoint()


FIGURES = (
    "epoch samples_seen loss top1 top5 seconds images_per_second num_images train_seconds_so_far"
)


def a_line(kind: str, step: int, **fields: Any) -> str:
    """A line of metrics.jsonl."""
    others = {"name": "start", "time_utc": "", **dict.fromkeys(FIGURES.split(), 1), **fields}
    return json.dumps({"kind": kind, "step": step, **others}) + "\n"


def record(folder: Path, step: int, *top1: float) -> None:
    """Write the lines of an epoch that ended at this step, and of its evaluations."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(a_line("epoch", step))
        for accuracy in top1:
            file.write(a_line("eval", step, top1=accuracy, train_seconds_so_far=step))


def steps_of(folder: Path) -> list[int]:
    return [read(path)["progress"]["step"] for path in checkpoints_in(folder / "checkpoints")]


def test_training_goes_on_while_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written is the state of its step, however far training has come meanwhile."""
    may_write, save = threading.Event(), torch.save

    def late(contents: object, file: Any) -> None:
        assert may_write.wait(300)
        save(contents, file)

    monkeypatch.setattr(torch, "save", late)
    parts, progress = trainables(steps=2), Progress(2, 8)
    begin(tmp_path, progress, parts)  # the moving average gets the model's statistics
    before = everything(parts)
    train(parts, 3)
    progress.step = 5
    assert everything(parts) != before and steps_of(tmp_path) == []
    assert not finish_checkpoint(timeout=0)  # and no waiting
    may_write.set()
    finish_checkpoint()
    assert steps_of(tmp_path) == [2]
    fresh, (file,) = trainables(seed=1), checkpoints_in(tmp_path / "checkpoints")
    assert file.stat().st_mode & 0o777 == 0o666 & ~UMASK  # others may read it
    contents = read(file)
    assert set(contents["model"]) == set(TinyNet().state_dict())  # free of wrappers
    assert Config(**contents["config"]) == CONFIG
    restore(contents, fresh, CONFIG, a_world(), DATA, "c.pt")
    assert everything(fresh) == before


def test_a_checkpoint_that_could_not_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the next look at it, and before the next one is begun."""
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(torch, "save", mock.Mock(side_effect=full))
    for look in (finish_checkpoint, functools.partial(begin, tmp_path, Progress(3))):
        begin(tmp_path, Progress(2))
        with pytest.raises(UserError, match=r"02.pt: .*written \(No space left on device\)"):
            look()
    assert finish_checkpoint() and steps_of(tmp_path) == []


@pytest.mark.parametrize("limit", [100, 2000, 9000])  # in the first write, in between, at the end
def test_the_system_s_reason_is_told(limit: int, tmp_path: Path) -> None:
    """Which torch hides behind "enforce fail at inline_container.cc"."""
    contents = contents_of(trainables(), PROGRESS, CONFIG, DATA)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with ExitStack() as limited, pytest.raises(UserError, match=r"written \(File too large\)"):
        limited.callback(resource.setrlimit, resource.RLIMIT_FSIZE, before)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        save_checkpoint(tmp_path / "c.pt", contents)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("part", ["model", "ema", "optimizer"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_never_written(part: str, value: float, tmp_path: Path) -> None:
    keep(tmp_path, 10, 50.0, Progress())
    before, parts = files_in(tmp_path), trainables(steps=1)
    bias, average = parts.model.head.bias, parts.ema.module.head.bias
    momentum = parts.optimizer.state[bias]["momentum_buffer"]
    {"model": bias, "ema": average, "optimizer": momentum}[part].data[1] = value
    begin(tmp_path, Progress(20, 80), parts)
    with pytest.raises(UserError, match=rf"20.pt: was not written, since {part}\..* not finite"):
        finish_checkpoint()
    assert files_in(tmp_path) == before


@pytest.mark.parametrize(
    ("evaluations", "count", "kept"),
    [
        # One is kept that is older by an epoch, 25 steps, and the one that will follow it.
        (
            {10: 50.0, 20: 70.0, 30: 60.0, 40: 65.0, 50: 65.0, 60: 65.0},
            2,
            {"best.pt": 20, "30.pt": 30, "40.pt": 40, "50.pt": 50, "60.pt": 60},
        ),
        # Nothing right, as at first of 1,000 classes; step 15 is of --checkpoint-steps.
        ({10: 0.0, 15: 0.0}, 2, {"best.pt": 10, "10.pt": 10, "15.pt": 15}),
        ({5: None}, 2, {"05.pt": 5}),
    ],
)
def test_what_is_kept_and_which_is_the_best(
    evaluations: dict[int, float | None], count: int, kept: dict[str, int], tmp_path: Path
) -> None:
    progress = Progress()
    for step, top1 in evaluations.items():
        keep(tmp_path, step, top1, progress, keep_checkpoints=count)
    files = tmp_path.rglob("*.pt")
    steps = {
        path.name.removeprefix("step-0000000"): read(path)["progress"]["step"] for path in files
    }
    assert steps == kept
    assert progress.best_top1 == max(
        -1.0 if top1 is None else top1 for top1 in evaluations.values()
    )
    begin(tmp_path / "none", progress, world=a_world(1, 2))
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("best_at", [10, 40])
def test_going_back_sets_the_future_aside(best_at: int, tmp_path: Path) -> None:
    """A run that goes on from step 10 neither takes what another left of later steps for its own
    nor deletes it: checkpoints, the best if it is later, and the metrics."""
    progress = Progress()
    for step in (10, 30, 40):
        keep(tmp_path, step, 50.0 if step == best_at else None, progress, keep_checkpoints=5)
    set_aside(tmp_path, 10)
    (aside,) = (tmp_path / "checkpoints").glob("set-aside-*")
    moved = {"metrics.jsonl", "step-000000030.pt", "step-000000040.pt"}
    assert set(os.listdir(aside)) == moved | ({"best.pt"} if best_at == 40 else set())
    keep(tmp_path, 20, None, Progress(), keep_checkpoints=2)
    assert steps_of(tmp_path) == [10, 20]
    set_aside(tmp_path, 20)
    assert [*(tmp_path / "checkpoints").glob("set-aside-*")] == [aside]


def known_of(folder: Path, step: int, **others: Any) -> tuple[float, bool, float]:
    """What is known of a checkpoint from which a run goes on, and the best top-1 before it."""
    progress = Progress(step, 4 * step, best_top1=99.0)  # an earlier version kept it in there
    set_aside(folder, step)
    known = repair_best(replace(CONFIG, **{"model_ema": False, **others}), folder, progress)
    finish_checkpoint()
    return *known, progress.best_top1


@pytest.mark.parametrize("evaluated", [[], [60.0], [60.0, 90.0]])
def test_an_evaluation_that_was_cut_off_is_made_up_for(
    evaluated: list[float], tmp_path: Path
) -> None:
    """The checkpoint is there; the second evaluation, of the moving average, may be missing."""
    keep(tmp_path, 10, 50.0, Progress())
    begin(tmp_path, Progress(20, 80))
    record(tmp_path, 20, *evaluated)
    best = max(evaluated, default=-1.0)
    assert known_of(tmp_path, 20, model_ema=True) == (best, len(evaluated) < 2, max(best, 50.0))
    assert known_of(tmp_path, 20, model_ema=False)[1] == (not evaluated)
    best_pt = tmp_path / "checkpoints" / "best.pt"
    assert read(best_pt)["progress"]["step"] == (20 if evaluated else 10)
    assert known_of(tmp_path, 20, evaluate=True)[:2] == (-1.0, False)


def test_the_best_is_the_one_that_is_there(tmp_path: Path) -> None:
    """Whatever other checkpoints knew: of another run, or of steps that are set aside."""
    progress = Progress()
    for step, top1 in ((10, 40.0), (20, 90.0), (30, 50.0)):
        keep(tmp_path, step, top1, progress, keep_checkpoints=5)
    best = tmp_path / "checkpoints" / "best.pt"
    assert known_of(tmp_path, 30) == (50.0, False, 90.0)
    assert known_of(tmp_path, 10) == (40.0, False, 40.0), "a later one's is no longer there"
    assert read(best)["progress"]["step"] == 10
    assert known_of(tmp_path / "new", 10) == (-1.0, False, -1.0)
    (tmp_path / "metrics.jsonl").unlink()
    known_of(tmp_path, 10)
    assert not best.exists(), "nobody knows how good it is; it is set aside"
    assert len([*best.parent.glob("set-aside-*/best.pt")]) == 2


def test_best_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", mock.Mock(side_effect=OSError("not supported")))
    synced, fsync = [], os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda file: (synced.append(os.readlink(f"/proc/self/fd/{file}")), fsync(file))
    )
    keep(tmp_path, 10, 50.0, Progress())
    folder = tmp_path / "checkpoints"
    assert read(folder / "best.pt")["progress"]["step"] == 10
    partial = [partial_name(folder / name) for name in ("step-000000010.pt", "best.pt")]
    assert synced == [str(path) for path in (partial[0], folder, partial[1], folder)]
    partial[1].symlink_to("/dev/full")
    monkeypatch.setattr(Path, "unlink", mock.Mock())  # which would make room
    mark_best(step_path(folder, 10))
    with pytest.raises(UserError, match=r"best.pt: .*written there \(No space left on device\)"):
        finish_checkpoint()


def test_auto_passes_over_a_damaged_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (10, 20):
        keep(tmp_path, step, None, Progress())
    before, newest = checkpoints_in(tmp_path / "checkpoints")
    newest.write_bytes(newest.read_bytes()[:-100])
    assert find_checkpoint(AUTO, tmp_path) == before
    assert f"{newest} is damaged" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("older_by", "kept"),
    [(0, [80, 90, 100]), (30, [70, 80, 90, 100]), (35, [50, 70, 90, 100]), (500, [10, 90, 100])],
)
def test_one_checkpoint_is_kept_that_is_older(
    older_by: int, kept: list[int], tmp_path: Path
) -> None:
    """And the one that will take its place."""
    contents = contents_of(trainables(), PROGRESS, CONFIG, DATA)
    for step in range(10, 101, 10):
        save_checkpoint(step_path(tmp_path, step), contents, 2, older_by)
    assert [step_in_name(path) for path in checkpoints_in(tmp_path)] == kept


@pytest.mark.parametrize("at", [21, 20])  # the next step's loss, or its own evaluation's
def test_auto_passes_over_a_checkpoint_after_which_the_loss_was_not_finite(
    at: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (10, 20):
        keep(tmp_path, step, None, Progress())
    before, newest = checkpoints_in(tmp_path / "checkpoints")
    for step, found in ((22, newest), (at, before), (11, before)):
        with (tmp_path / "metrics.jsonl").open("a") as metrics:
            metrics.write(a_line("event", step, name="diverged"))
        assert find_checkpoint(AUTO, tmp_path) == found
    assert capsys.readouterr().out.count(f"{newest}: a loss after it was not finite") == 2


@pytest.mark.parametrize("best", ["whole", "damaged", "missing"])
def test_auto_never_starts_over(best: str, tmp_path: Path) -> None:
    """Where a run was recorded and no checkpoint of a step is whole: the user decides."""
    keep(tmp_path, 10, 50.0, Progress())
    best_pt, (newest,) = tmp_path / "checkpoints/best.pt", checkpoints_in(tmp_path / "checkpoints")
    whole = best_pt.read_bytes()
    best_pt.unlink()  # a link to what is damaged now
    newest.write_bytes(b"damaged")
    if best != "missing":
        best_pt.write_bytes(whole if best == "whole" else b"damaged")
    before = files_in(tmp_path)
    words = f"--resume {best_pt}" if best == "whole" else "restore one from a backup"
    with pytest.raises(UserError, match=f"no intact checkpoint of a step; .*{words}"):
        find_checkpoint(AUTO, tmp_path)
    assert files_in(tmp_path) == before


@pytest.mark.parametrize("last", ["event", "step", "epoch", "eval"])
def test_auto_begins_anew_before_the_first_checkpoint(last: str, tmp_path: Path) -> None:
    """What was recorded is set aside; at an epoch's end, too, if the first write was cut off."""
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(a_line("eval", 0) + a_line(last, 45))
    assert find_checkpoint(AUTO, tmp_path) is None
    set_aside(tmp_path, 0)
    (aside,) = tmp_path.glob("checkpoints/set-aside-*/metrics.jsonl")
    assert aside.read_text() == metrics.read_text()


@pytest.mark.parametrize("shows", [a_line("eval", 45), a_line("event", 37, name="end")])
def test_auto_begins_nothing_anew_whose_checkpoints_are_gone(shows: str, tmp_path: Path) -> None:
    """Of a record which shows that there was one; under --keep-checkpoints 0 there never was."""
    (tmp_path / "metrics.jsonl").write_text(a_line("eval", 30) + shows)
    with pytest.raises(UserError, match="no intact checkpoint of a step; restore one"):
        find_checkpoint(AUTO, tmp_path)
    assert find_checkpoint(replace(AUTO, keep_checkpoints=0), tmp_path) is None


def test_a_run_that_goes_on_says_what_it_does_otherwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep(tmp_path, 10, None, Progress())
    same_again = replace(CONFIG, resume="auto", workers=3, log_interval=7, threads=1)
    resume(trainables(), same_again, Ranks(a_world()), DATA, tmp_path)
    assert "warning" not in capsys.readouterr().out
    other = replace(same_again, batch_size=32, label_smoothing=0.25)
    resume(trainables(), other, Ranks(a_world(size=3)), DATA, tmp_path)
    said = capsys.readouterr().out
    assert "workers 3 (was 1), " in said and said.count("(was ") == 3
    assert f"--batch-size 32 (was {CONFIG.batch_size})" in said


# A folder that is not there is a run that has not begun.
@pytest.mark.parametrize(
    ("owner", "name", "number"),
    [
        *itertools.product([zipfile], ["ZipFile"], UNREADABLE),
        *itertools.product([resuming], ["read_file"], UNREADABLE),
        *itertools.product([os], ["listdir"], UNREADABLE[1:]),
    ],
)
def test_what_cannot_be_read_is_not_damaged(
    number: int, owner: Any, name: str, tmp_path: Path
) -> None:
    for step in (10, 20):
        keep(tmp_path, step, 50.0, Progress())
    before, error = files_in(tmp_path), OSError(number, os.strerror(number))
    with (
        mock.patch.object(owner, name, side_effect=error),
        pytest.raises(UserError, match=rf"--resume auto: .* cannot be read \({error.strerror}\)"),
    ):
        resume(trainables(), AUTO, Ranks(a_world()), DATA, tmp_path)
    assert files_in(tmp_path) == before


def test_a_folder_in_place_of_a_file(tmp_path: Path) -> None:
    """It can be read; what is missing is which file of it."""
    config = replace(CONFIG, name="second", resume=str(tmp_path))
    with pytest.raises(UserError, match=r"is a folder; give a file, .* --resume auto$"):
        find_checkpoint(config, tmp_path / "second")


@pytest.fixture
def whole(tmp_path: Path) -> bytes:
    save_checkpoint(tmp_path / "c.pt", contents_of(trainables(), PROGRESS, CONFIG, DATA))
    return (tmp_path / "c.pt").read_bytes()


FUZZED = settings(
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@settings(FUZZED, max_examples=100)
@given(data=st.data())
def test_no_damage_gets_out_of_hand(data: st.DataObject, whole: bytes, tmp_path: Path) -> None:
    """Any bytes, a whole file with some of them changed, and one that was cut off: the answer is
    whole or not, and a UserError at most. A run that goes on has all that was saved."""
    content = bytearray(whole)
    kind = data.draw(st.sampled_from(["any", "changed", "cut off", "both"]))
    if kind == "any":
        content = bytearray(data.draw(st.binary(max_size=500)))
    if kind in ("changed", "both"):
        for _ in range(data.draw(st.integers(1, 4))):
            content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    if kind in ("cut off", "both"):
        del content[data.draw(st.integers(0, len(content))) :]
    path, parts = tmp_path / "c.pt", trainables(seed=1)
    path.write_bytes(content)
    config = replace(CONFIG, resume=str(path))
    if not resuming._is_whole(path):
        with pytest.raises(UserError, match=r"--resume .*c\.pt: is "):
            find_checkpoint(config, tmp_path)
    try:
        progress, _ = resume(parts, config, Ranks(a_world()), DATA, tmp_path / "run")
        assert progress == PROGRESS and everything(parts) == everything(trainables())
    except UserError as error:
        assert "\n" not in str(error)
    try:
        load_weights(TinyNet(), replace(CONFIG, weights=str(path)), DATA)
    except UserError as error:
        assert "\n" not in str(error)


WRONG = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text("ab-1", max_size=3),
    st.sampled_from([[], {}, [1], {"a": 1}, torch.zeros(0), torch.zeros(2), torch.tensor(1)]),
)


@settings(FUZZED, max_examples=120)
@given(data=st.data())
def test_any_wrong_value_is_refused_or_does_no_harm(data: st.DataObject) -> None:
    """Anywhere in a checkpoint."""
    inner: Any = copy.deepcopy(contents_of(trainables(steps=1), PROGRESS, CONFIG, DATA))
    contents, key = inner, data.draw(st.sampled_from(sorted(inner)))
    while isinstance(inner[key], (dict, list)) and inner[key] and data.draw(st.booleans()):
        inner = inner[key]
        keys = list(inner) if isinstance(inner, dict) else range(len(inner))
        key = data.draw(st.sampled_from(keys))
    inner[key] = data.draw(WRONG)
    try:
        progress = restore(contents, trainables(), CONFIG, a_world(), DATA, "c.pt")
        assert 0 <= progress.skipped_steps <= progress.step <= progress.samples_seen
        assert -1 <= progress.best_top1 <= 100 and 0 <= progress.total_seconds < math.inf
    except UserError as error:
        assert "\n" not in str(error)


def test_all_ranks_get_rank_0_s_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only rank 0 reads; nothing but bytes, in pieces, and their number is sent."""
    monkeypatch.setattr(resuming, "PIECE_BYTES", 1000)
    save_checkpoint(tmp_path / "c.pt", contents_of(trainables(), PROGRESS, CONFIG, DATA))
    sent: list[torch.Tensor] = []

    def receive(values: torch.Tensor) -> torch.Tensor:
        assert (values.shape, values.dtype) == (sent[0].shape, sent[0].dtype)
        return sent.pop(0)

    def send(values: torch.Tensor) -> torch.Tensor:
        sent.append(values.clone())
        return values

    first = load_on_all_ranks(tmp_path / "c.pt", Ranks(a_world(0, 2), from_first=send))
    size = (tmp_path / "c.pt").stat().st_size
    forms = [(values.dtype, len(values)) for values in sent]
    pieces = [1000] * (size // 1000) + [size % 1000]  # MPI refuses messages of 2 GiB and more
    assert forms == [(torch.int64, 1), *((torch.int64, math.ceil(size / 8)) for size in pieces)]
    assert plain(load_on_all_ranks(None, Ranks(a_world(1, 2), from_first=receive))) == plain(first)
    # Of another rank than the first the others add zeros.
    assert plain(load_on_all_ranks(tmp_path / "c.pt", Ranks(a_world(1, 2)), 1)) == plain(first)


def test_resume(tmp_path: Path) -> None:
    for config in (CONFIG, AUTO):
        assert resume(trainables(), config, Ranks(a_world()), DATA, tmp_path) == (Progress(), False)
    keep(tmp_path, 10, 33.0, Progress())
    file = str(step_path(tmp_path / "checkpoints", 10))
    for config in (AUTO, replace(CONFIG, resume=file)):
        progress, _ = resume(trainables(), config, Ranks(a_world()), DATA, tmp_path)
        assert progress == Progress(10, 40)
    with pytest.raises(UserError, match=r"--resume /nowhere.pt: /nowhere.pt cannot be read \(No "):
        resume(trainables(), replace(AUTO, resume="/nowhere.pt"), Ranks(a_world()), DATA, tmp_path)


@pytest.mark.parametrize(
    ("saved", "now", "words"),
    [
        ({}, {"arch": "resnet18"}, "--arch tiny, but this run has resnet18; give the same value,"),
        ({}, {"model_ema": False}, "--model-ema True, but this run has False"),
        ({"model_ema": False}, {}, "--model-ema False, but this run has True"),
        ({"model_ema": False}, {"evaluate": True}, "--model-ema False, but this run has True"),
        ({}, {"blur_pool": True}, "--blur-pool False, but this run has True"),
        ({}, {"blur_pool": True, "evaluate": True}, "--blur-pool False, but this run has True"),
        ({}, {"small_stem": True}, "--small-stem False, but this run has True"),
        ({}, {"image_mean": (0.3,) * 3}, "--image-mean 0.485 0.456 0.406, but this run has 0.3 "),
        ({}, {"seed": 1}, "--seed 42, but this run has 1; .* or start from the weights alone"),
        ({}, {"optimizer": "adamw"}, "--optimizer sgd, but this run has adamw"),
        # An evaluation of the weights needs no more than the weights.
        ({}, {"evaluate": True, "model_ema": False, "seed": 1, "optimizer": "adamw"}, None),
    ],
)
def test_mismatch(saved: dict[str, Any], now: dict[str, Any], words: str | None) -> None:
    then, config = replace(CONFIG, **saved), replace(CONFIG, **now)
    contents = contents_of(trainables(then), PROGRESS, then, DATA)
    parts = trainables(replace(config, optimizer="sgd"))
    refused = pytest.raises(UserError, match=f"--resume c.pt: was trained with {words}")
    with refused if words else nullcontext():
        assert restore(contents, parts, config, a_world(), DATA, "c.pt") == PROGRESS


@pytest.mark.parametrize(
    ("now", "is_refused"),
    [
        ({"epochs": 2}, True),
        ({"epochs": 3}, False),
        ({"epochs": 4}, False),
        ({"epochs": 2, "evaluate": True}, False),
        ({"max_steps": 74}, True),
        ({"max_steps": 75}, False),
    ],
)
def test_a_run_that_is_past_the_end_that_is_asked_for(
    now: dict[str, Any], is_refused: bool
) -> None:
    """It would be evaluated as if it were at that end. One that is at its end may be."""
    config = replace(CONFIG, epochs=3)
    progress = Progress(75, 3 * DATA.num_train + 3)  # the last step passes the end
    contents = contents_of(trainables(), progress, config, DATA)
    config = replace(config, **now)
    refused = pytest.raises(UserError, match=r"c.pt: is of step 75, past the end.* nothing is left")
    with refused if is_refused else nullcontext():
        restore(contents, trainables(), config, a_world(), DATA, "c.pt")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"num_train": 99}, "100 training and 8 validation images, but this run has 99 training "),
        ({"num_val": 9}, "training and 8 validation images, but this run has 100 training and 9"),
        (
            {"order_sha256": "other"},
            f"the order of numpy {np.__version__}, but numpy {np.__version__} here",
        ),
        ({"sha256": "other"}, "or as many with other names, classes or contents"),
        ({"train_contents_sha256": "other"}, "or as many with other names, classes or contents"),
    ],
)
def test_changed_data(data: dict[str, Any], words: str) -> None:
    """Contents are compared where both are known: those of shards."""
    contents = contents_of(trainables(), PROGRESS, CONFIG, DATA)
    assert restore(contents, trainables(), CONFIG, a_world(), DATA, "c.pt") == PROGRESS
    if "train_contents_sha256" in data:
        contents["data"] = {**DATA.identity, "train_contents_sha256": "of shards"}
        assert restore(contents, trainables(), CONFIG, a_world(), DATA, "c.pt") == PROGRESS
    now = replace(DATA)
    vars(now)["identity"] = {**DATA.identity, **data}
    with pytest.raises(UserError, match=f"{words}.*; .* add --allow-changed-data"):
        restore(contents, trainables(), CONFIG, a_world(), now, "c.pt")
    old = {key: value for key, value in contents.items() if key not in ("data", "momenta")}
    allowed, evaluating = replace(CONFIG, allow_changed_data=True), replace(CONFIG, evaluate=True)
    for config, saved in ((allowed, contents), (evaluating, contents), (CONFIG, old)):
        assert restore(saved, trainables(), config, a_world(), now, "c.pt") == PROGRESS


MISSING = object()
MALFORMED: dict[str, tuple[tuple[str, ...], Any]] = {
    "negative step": (("progress", "step"), -3),
    "step of text": (("progress", "step"), "3"),
    "step of a float": (("progress", "step"), 3.0),
    "position before its steps": (("progress", "samples_seen"), 2),
    "step beyond the position": (("progress", "step"), 10**12),
    "best of NaN": (("progress", "best_top1"), math.nan),
    "best of text": (("progress", "best_top1"), "12"),
    "endless training": (("progress", "total_seconds"), math.inf),
    "lone progress": (("progress",), {"step": 3}),
    "progress of a number": (("progress",), 3),
    "empty config": (("config",), {}),
    "config of None": (("config",), None),
    "model of None": (("model",), None),
    "model of a list": (("model",), [1, 2]),
    "weights that diverged": (("model", "conv.weight"), torch.full((4, 3, 3, 3), math.nan)),
    "weights of a number": (("model", "conv.weight"), 1.0),
    "average of a number": (("ema",), 1),
    "optimizer of None": (("optimizer",), None),
    "optimizer without groups": (("optimizer", "param_groups"), []),
    "optimizer of other groups": (("optimizer", "param_groups"), [{}, {}]),
    "momentum of another shape": (("optimizer", "state", 0, "momentum_buffer"), torch.zeros(2)),
    "momentum of text": (("optimizer", "state", 0, "momentum_buffer"), "fast"),
    "loss scale of NaN": (("scaler", "scale"), math.nan),
    "loss scale of None": (("scaler", "scale"), None),
    "data of a list": (("data",), [1]),
    **{
        f"no {key}": ((key,), MISSING)
        for key in ("model", "ema", "optimizer", "scaler", "progress", "config")
    },
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_values_are_one_sentence(name: str) -> None:
    contents = contents_of(trainables(steps=1), PROGRESS, CONFIG, DATA)
    (*path, last), value = MALFORMED[name]
    inner: Any = functools.reduce(operator.getitem, path, contents)
    inner[last] = value
    if value is MISSING:
        del inner[last]
    with pytest.raises(UserError, match=r"^--resume c.pt: [^\n]*$"):
        restore(contents, trainables(), CONFIG, a_world(), DATA, "c.pt")


def test_each_rank_s_momentum_under_adasum(tmp_path: Path) -> None:
    """Which is its own: all are in the checkpoint, and each rank gets its own back."""
    config = replace(CONFIG, use_adasum=True)
    ranks = [trainables(config, seed=7, steps=steps) for steps in (2, 3)]
    next(iter(ranks[1].optimizer.state.values()))["momentum_buffer"].view(-1)[0] = -0.0
    own = [
        torch.cat([state["momentum_buffer"].flatten() for state in parts.optimizer.state.values()])
        for parts in ranks
    ]
    for rank in (1, 0):
        turns = [values.view(torch.int32) for values in own]

        def summed(values: torch.Tensor, rank: int = rank, turns: Any = turns) -> torch.Tensor:
            assert values.any() == (len(turns) == 2 - rank)
            return turns.pop(0)

        world = Ranks(a_world(rank, 2), summed)
        keep_checkpoint(ranks[rank], PROGRESS, config, world, DATA, tmp_path)
        assert not turns
    finish_checkpoint()
    (path,) = checkpoints_in(tmp_path / "checkpoints")
    contents = read(path)
    for rank, parts in enumerate(ranks):
        fresh = trainables(config, seed=1)
        restore(contents, fresh, config, a_world(rank, 2), DATA, "c.pt")
        assert plain(fresh.optimizer.state_dict()) == plain(parts.optimizer.state_dict())
    for other, size in ((config, 4), (replace(config, use_adasum=False), 2)):
        with pytest.raises(UserError, match="of each of 2 workers under --use-adasum"):
            restore(contents, trainables(other), other, a_world(0, size), DATA, "c.pt")


def wrapped(state: dict[str, Any], prefix: str = "module.") -> dict[str, Any]:
    return {f"{prefix}{key}": value for key, value in state.items()}


STATE = trainables(steps=2).model.state_dict()
OPTIMIZER = trainables(steps=2).optimizer.state_dict()
FORMATS: dict[str, Any] = {
    "safetensors, in a file of another name": STATE,
    "this project": contents_of(trainables(steps=2), PROGRESS, CONFIG, DATA),
    **{f"safetensors, '{p}'": wrapped(STATE, p) for p in ("", "module.", "_orig_mod.")},
    "before torch 0.4.1, with a head more": {
        key: value
        for key, value in (STATE | {"aux1.weight": torch.zeros(1)}).items()
        if key != "norm.num_batches_tracked"
    },
    "bare": STATE,
    "bare, from DDP": wrapped(STATE),
    "torch.compile": wrapped(STATE, "_orig_mod."),
    "torch.compile in DDP": wrapped(STATE, "module._orig_mod."),
    "a layer compiled": {
        key.replace("conv.", "conv._orig_mod."): value for key, value in STATE.items()
    },
    "Lightning": {"state_dict": wrapped(STATE, "model."), "epoch": 3},
    "pytorch/examples": {
        "epoch": 90,
        "arch": "resnet50",
        "state_dict": wrapped(STATE),
        "best_acc1": torch.tensor(76.1),
        "optimizer": OPTIMIZER,
        "scheduler": {"step_size": 30},
    },
    "torchvision's reference": {
        "model": STATE,
        "optimizer": OPTIMIZER,
        "lr_scheduler": {"last_epoch": 90},
        "epoch": 89,
        "args": argparse.Namespace(lr=0.1, model="resnet50", output_dir=".", clip=None),
    },
    "Horovod's example": {"model": STATE, "optimizer": OPTIMIZER},
    "a numpy accuracy": {
        "state_dict": STATE,
        "best": np.float64(76.1),
        "top5": np.float32(93.0),
        "epoch": np.int64(3),
        "others": [np.int32(1), np.float16(1), np.bool_(True), np.uint8(1), np.str_("sgd")],
    },
    "a moving average, alone": {"model": wrapped(STATE) | {"n_averaged": torch.tensor(9)}},
    "profiled by thop": STATE
    | {f"{part}total_{of}": torch.zeros(1) for part in ("", "conv.") for of in ("ops", "params")},
}


@pytest.mark.parametrize(
    ("parts", "contents", "words"),
    [
        (TinyNet(7), None, r"head.weight is \[3, 4\], not \[7, 4\].*classes"),
        (TinyNet(), {"state_dict": STATE}, "use --weights"),
    ],
)
def test_what_is_of_another_network(parts: Any, contents: Any, words: str) -> None:
    here, contents = trainables(), contents or contents_of(trainables(), PROGRESS, CONFIG, DATA)
    here.model = parts
    with pytest.raises(UserError, match=words):
        restore(contents, here, CONFIG, a_world(), DATA, "c.pt")


def read_back(file: Path) -> nn.Module:
    """A network with the weights of a file."""
    model = TinyNet()
    load_weights(model, replace(CONFIG, weights=str(file)), DATA)
    return model


def loaded(file: Path) -> bool:
    """Whether a network gets from this file the weights that STATE holds."""
    parameters = read_back(file).named_parameters()
    return all(torch.equal(STATE[name], value) for name, value in parameters)


@pytest.mark.parametrize("name", FORMATS)
def test_weights_of_other_trainers(name: str, tmp_path: Path) -> None:
    if name.startswith("safetensors"):
        file = tmp_path / ("w.bin" if "another name" in name else "w.safetensors")
        save_file(FORMATS[name], file)
        assert loaded(file)
    else:
        torch.save(
            FORMATS[name], tmp_path / "w.pth", _use_new_zipfile_serialization="0" not in name
        )
        assert loaded(tmp_path / "w.pth")


def a_zip(*names: str) -> bytes:
    """An archive with files of these names."""
    with zipfile.ZipFile(file := io.BytesIO(), "w") as archive:
        for name in names:
            archive.writestr(name, b"any")
    return file.getvalue()


class Evil:
    """Unpickled freely, it would call a function of its writer's choice."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("hacked",)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("w.pth", None, "there is no such file"),
        ("w.pth", b"not found", "is damaged, or was not written by torch.save"),
        ("w.pth", b"", "is empty"),
        ("w.pth", b"<html>not found</html>", "is a web page"),
        ("w.pth", b"version https://git-lfs.github.com/spec/v1", "is Git LFS's pointer"),
        ("w.pth", gzip.compress(b"any", mtime=0), "is compressed by gzip; unpack it first"),
        ("w.pth", a_zip("w.npy", "v.npy"), r"is an archive of NumPy arrays \(\.npz\)"),
        ("w.pth", a_zip("w.pth"), "is a zip archive of other files; unpack it first"),
        ("w.pth", a_zip("w/constants.pkl", "w/data.pkl"), "is a TorchScript archive; .*state_dict"),
        ("w.pth", a_zip("w/archive_format", "w/models/model.json"), "is a program of torch.export"),
        ("w.pth", a_zip("w/data.pkl")[:-9], "is damaged, or was not written by torch.save"),
        ("w.safetensors", save(STATE)[:-1], r"is damaged \(.*\); fetch it again"),
        ("w.pth", pickle.dumps(Evil(), protocol=2), ""),
        ("w.pth", {"state_dict": STATE, "extra": Evil()}, ".*posix.mkdir.*run code"),
        # A model that was only described.
        (
            "w.pth",
            {key: value.to("meta") for key, value in STATE.items()},
            "has only the shapes of .*conv.*`meta`",
        ),
    ],
)
def test_weights_that_are_no_weights(
    name: str, content: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if isinstance(content, bytes):
        Path(name).write_bytes(content)
    elif content:
        torch.save(content, name)
    with pytest.raises(UserError, match=f"{name}: {words}"):
        loaded(Path(name))
    assert not Path("hacked").exists()


@pytest.mark.parametrize(
    ("contents", "words"),
    [
        ([1, 2], "holds no state dict .* it has a list"),
        (
            {"epoch": 3, "net": STATE},
            r"holds no state dict .* has epoch \(int\), net \(OrderedDict\)",
        ),
        ({"state_dict": {"x": 1}}, r"holds no state dict .* has under state_dict x \(int\)"),
        ({"model": {}}, "lacks conv.weight"),
        (
            wrapped(TinyNet().state_dict(), "net."),
            "lacks conv.weight.* 5 more; has net.conv.weight",
        ),
        ({"state_dict": {1: torch.zeros(1)}}, "holds no state dict"),
        (TinyNet().state_dict() | {"more": torch.zeros(1)}, "has more"),
        (TinyNet(5).state_dict(), r"head.weight is \[5, 4\], not \[3, 4\]"),
    ],
)
def test_weights_that_do_not_fit(contents: Any, words: str, tmp_path: Path) -> None:
    torch.save(contents, tmp_path / "w.pth")
    with pytest.raises(UserError, match=f"--weights .*w.pth: .*{words}") as error:
        loaded(tmp_path / "w.pth")
    assert re.search(r"--new-head$|or at its top; it has", str(error.value))


def test_a_torchscript_archive_is_named(tmp_path: Path) -> None:
    """One that torch itself has written."""
    with warnings.catch_warnings(action="ignore"):  # torch.jit is deprecated
        torch.jit.trace(TinyNet().eval(), torch.zeros(1, 3, 8, 8)).save(str(tmp_path / "w.pt"))
    with pytest.raises(UserError, match=r"w\.pt: is a TorchScript archive"):
        loaded(tmp_path / "w.pt")


def test_the_format_of_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    """Also where a run is to resume from it."""
    (tmp_path / "c.pt").write_bytes(gzip.compress(b"any"))
    config = replace(CONFIG, resume=str(tmp_path / "c.pt"))
    with pytest.raises(UserError, match=r"--resume .*c\.pt: is compressed by gzip"):
        resume(trainables(), config, Ranks(a_world()), DATA, tmp_path / "run")


def test_a_folder_is_named_with_its_files(tmp_path: Path) -> None:
    run = kept(tmp_path / "run", trainables(), 3).parent.parent
    with pytest.raises(
        UserError, match=r"run: is a folder; .* in it \(checkpoints/step-000000003.pt\)"
    ):
        loaded(run)


def test_weights_that_cannot_be_read_are_one_sentence(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "w.pth")
    denied = PermissionError(errno.EACCES, "Permission denied")
    with (
        mock.patch.object(Path, "open", side_effect=denied),
        pytest.raises(UserError, match=r"w.pth: cannot be read \(Permission denied\)"),
    ):
        loaded(tmp_path / "w.pth")


@pytest.mark.parametrize(
    ("contents", "words"),
    [
        ({"model": STATE, "model_ema": wrapped(STATE), "epoch": 3}, "its `model`; .* `model_ema`"),
        ({"state_dict_ema": STATE, "state_dict": STATE}, "its `state_dict`; .* `state_dict_ema`"),
        (FORMATS["this project"], "its `model`; .* `ema`.*recipe.record.export"),
        (FORMATS["torchvision's reference"], None),
        ({"state_dict": STATE, "rng_state": torch.arange(9)}, None),
        (STATE, None),
    ],
)
def test_of_several_weights_it_is_said_which_were_loaded(
    contents: Any, words: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(contents, tmp_path / "w.pth")
    assert loaded(tmp_path / "w.pth")
    assert re.fullmatch(
        f"--weights .*w.pth: loaded {words}.*\n" if words else "", capsys.readouterr().out
    )


# ---- classes ----


def data_of(*classes: str) -> Data:
    """As many images as DATA has, of these classes."""
    listing = Listing(Path("/x"), classes, np.array([b"1.jpg"]), np.array([0]))
    return replace(DATA, train=listing, val=listing, num_classes=len(classes))


CATS, APPLES = data_of("cat", "dog", "\udcff"), data_of("apple", "bee", "dog")


@pytest.mark.parametrize("now", [{}, {"evaluate": True}])
def test_a_checkpoint_of_other_classes_is_refused(now: dict[str, Any], tmp_path: Path) -> None:
    """Each output would mean another class. Files of earlier versions do not know theirs."""
    save_checkpoint(tmp_path / "c.pt", contents_of(trainables(), PROGRESS, CONFIG, CATS))
    contents, config = read(tmp_path / "c.pt"), replace(CONFIG, **now)
    assert restore(contents, trainables(), config, a_world(), CATS, "c.pt") == PROGRESS
    words = (
        r"on other classes \(3\) than the data has \(3\).* one of them: apple, bee, cat and 1 more"
    )
    with pytest.raises(UserError, match=f"--resume c.pt: was trained {words}.*--new-head"):
        restore(contents, trainables(), config, a_world(), APPLES, "c.pt")
    renamed, allowed = data_of("chat", "chien", "loup"), replace(config, allow_changed_data=True)
    assert restore(contents, trainables(), allowed, a_world(), renamed, "c.pt") == PROGRESS
    with pytest.raises(UserError, match=r"on other classes .3. than the data has .2."):
        restore(contents, trainables(), allowed, a_world(), data_of("chat", "chien"), "c.pt")
    del contents["classes"]
    if now:
        assert restore(contents, trainables(), config, a_world(), APPLES, "c.pt") == PROGRESS


@pytest.mark.parametrize("is_exported", [False, True])
def test_weights_of_other_classes_need_a_new_head(is_exported: bool, tmp_path: Path) -> None:
    file, checkpoint = tmp_path / "w.safetensors", tmp_path / "c.pt"
    config = replace(CONFIG, arch="resnet10", weights=str(file if is_exported else checkpoint))
    parts = trainables()
    parts.model = build_model(config, 3, download=False)
    contents = contents_of(replace(parts, ema=None), PROGRESS, config, CATS)
    for is_earlier in (False, True):
        save_checkpoint(checkpoint, contents)
        if is_exported:
            assert export.main([str(checkpoint), str(file)]) == 0
        load_weights(parts.model, config, CATS)
        words = "c.pt|w.safetensors: was trained on other classes .*, or train a new .* --new-head"
        with nullcontext() if is_earlier else pytest.raises(UserError, match=words):
            load_weights(parts.model, config, APPLES)
        load_weights(parts.model, replace(config, new_head=True), APPLES)
        contents.pop("classes", None)


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("is_exported", [False, True])
def test_weights_that_were_trained_with_other_settings_are_warned_of(
    is_exported: bool, is_old: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An old checkpoint does not say how: as ImageNet's."""
    file, checkpoint = tmp_path / "w.safetensors", tmp_path / "c.pt"
    config = replace(CONFIG, arch="resnet10", weights=str(file if is_exported else checkpoint))
    model = build_model(config, 3, download=False)
    parts = replace(trainables(), model=model, ema=None)
    contents = contents_of(parts, PROGRESS, config, CATS)
    if is_old:
        del contents["config"]["image_mean"], contents["config"]["image_std"]
    save_checkpoint(checkpoint, contents)
    assert export.main([str(checkpoint), str(file)]) == 0
    capsys.readouterr()
    load_weights(model, config, CATS)
    assert capsys.readouterr().out == ""
    load_weights(model, replace(config, image_std=(0.3, 0.3, 0.3)), CATS)
    assert re.fullmatch(
        r"warning: --weights .*: was trained with --image-std 0.229 0.224 0.225, and this run has "
        r"0.3 0.3 0.3\n",
        capsys.readouterr().out,
    )
    load_weights(model, replace(config, blur_pool=True), CATS)
    assert "was trained with --blur-pool False, and this run has True" in capsys.readouterr().out


def test_exported_weights_that_do_not_say_how_pixels_were_normalised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that were exported before the settings were added."""
    file = tmp_path / "w.safetensors"
    config = replace(CONFIG, arch="resnet10", weights=str(file))
    model = build_model(config, 3, download=False)
    metadata = {"format": "pt", "arch": "resnet10", "step": "3", "weights": "model"}
    file.write_bytes(save(model.state_dict(), metadata))
    load_weights(model, config, CATS)
    assert capsys.readouterr().out == ""
    load_weights(model, replace(config, image_mean=(0.3, 0.3, 0.3)), CATS)
    assert "was trained with --image-mean 0.485 0.456 0.406, and" in capsys.readouterr().out


def test_weights_of_another_stem_name_its_flag() -> None:
    config = replace(CONFIG, arch="resnet10")
    ours, small, wider = (
        build_model(replace(config, **others), classes, download=False)
        for others, classes in (({}, 3), ({"small_stem": True}, 3), ({}, 4))
    )
    with pytest.raises(UserError, match=r"conv1\.weight is .*; check --arch, --small-stem and the"):
        load_state(ours, small.state_dict(), "w.pt")
    with pytest.raises(
        UserError, match=r"fc\.weight is .*; check --arch and the number of classes"
    ):
        load_state(ours, wider.state_dict(), "w.pt")


@pytest.mark.parametrize(
    ("classes", "now", "warns"),
    [
        ("0 1 10 11 2", {}, True),
        ("0 1 10 11 2", {"weights": None, "pretrained": True}, True),
        ("0 1 10 11 2", {"weights": None}, False),
        ("0 1 10 11 2", {"new_head": True}, False),
        ("00 01 02 10 11", {}, False),
        ("0 1 2 3 4", {}, False),
        ("0 1 10 11 2a", {}, False),
    ],
)
def test_numbers_in_the_order_of_text_are_warned_of(
    classes: str,
    now: dict[str, Any],
    warns: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Weights of others may have them in the order of numbers; those of this project do not."""
    config = replace(CONFIG, **{"arch": "resnet10", "weights": str(tmp_path / "w.pth"), **now})
    model, data = (
        build_model(replace(config, pretrained=False), 5, download=False),
        data_of(*classes.split()),
    )
    torch.save(model.state_dict(), tmp_path / "w.pth")
    load_weights(model, config, data)
    words = r"warning: --(weights|pretrained).*: does not say .* of text: 0, 1, 10, 11, 2\. .*\n"
    assert re.fullmatch(words if warns else "", capsys.readouterr().out)
    parts = replace(trainables(), model=model, ema=None)
    contents = contents_of(parts, PROGRESS, config, data)
    del contents["classes"]  # as in an earlier version
    torch.save(contents, tmp_path / "w.pth")
    load_weights(model, replace(config, weights=str(tmp_path / "w.pth"), pretrained=False), data)
    assert capsys.readouterr().out == ""


# The part of a network that pytorch/examples wraps, and the weights of its last layer.
HEADS = {
    "resnet18": ("", {"fc.weight", "fc.bias"}),
    "vgg11_bn": ("features.", {"classifier.6.weight", "classifier.6.bias"}),
    "mobilenet_v3_small": ("", {"classifier.3.weight", "classifier.3.bias"}),
    "squeezenet1_1": ("", {"classifier.1.weight", "classifier.1.bias"}),
    "vit_b_16": ("", {"heads.head.weight", "heads.head.bias"}),
    "timm:resnet10t": ("", {"fc.weight", "fc.bias"}),
    "timm:deit_tiny_distilled_patch16_224": (
        "",
        {"head.weight", "head.bias", "head_dist.weight", "head_dist.bias"},
    ),
}


@pytest.mark.parametrize(
    ("arch", "classes"),
    [
        *(pytest.param(x, 5, marks=needs_timm if "timm:" in x else ()) for x in HEADS),
        ("resnet18", 3),
    ],
)
def test_all_but_the_last_layer_of_a_file(arch: str, classes: int, tmp_path: Path) -> None:
    """--new-head; without it the file of another number of classes is refused."""
    (part, head), pixels = HEADS[arch], {"train_crop_size": 224, "val_crop_size": 224}
    config = a_config(arch=arch, **pixels, weights=str(tmp_path / "w.pth"), seed=1)
    theirs = build_model(config, classes, download=False).state_dict()
    wrapped = {re.sub(f"^{part}", f"{part}module.", key): theirs[key] for key in theirs}
    torch.save({"state_dict": wrapped}, config.weights)
    config = replace(config, new_head=True, seed=2)
    own = build_model(config, 3, download=False)
    fresh = copy.deepcopy(own.state_dict())
    load_weights(own, config, DATA)
    for key, value in own.state_dict().items():
        assert torch.equal(value, (fresh if key in head else theirs)[key]), key
    config = replace(config, new_head=False)
    with nullcontext() if classes == 3 else pytest.raises(UserError, match=r"--new-head$"):
        load_weights(own, config, DATA)


# ---- weights for other tools ----


def kept(folder: Path, parts: Trainables, step: int) -> Path:
    """The checkpoint of a step in a run folder."""
    begin(folder, Progress(step, 4 * step), parts)
    finish_checkpoint()
    return step_path(folder / "checkpoints", step)


@pytest.mark.parametrize(
    ("evaluations", "whose"),
    [
        ([], "model"),
        ([(3, "model", 50), (3, "ema", 60)], "ema"),
        ([(3, "model", 60), (3, "ema", 50)], "model"),
        ([(2, "ema", 90), (3, "model", 50), (3, "ema", 40), (4, "ema", 90)], "model"),
    ],
)
def test_the_better_weights_come_back(
    evaluations: list[tuple[int, str, float]],
    whose: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Under the network's own names, however they are wrapped in training."""
    parts, run, out = trainables(steps=3), tmp_path / "run", tmp_path / "w.safetensors"
    kept(run, parts, 3)
    lines = [
        a_line("eval", step, weights=weights, top1=top1) for step, weights, top1 in evaluations
    ]
    (run / "metrics.jsonl").write_text("".join([*lines, '{"kind": "eval", "st']))
    assert export.main([str(run), str(out)]) == 0
    assert f"tiny, the weights of {whose} after step 3" in capsys.readouterr().out
    both = [parts.ema.module, parts.model]
    expected, other = both if whose == "ema" else reversed(both)
    assert (
        plain(read_back(out).state_dict())
        == plain(expected.state_dict())
        != plain(other.state_dict())
    )
    with safe_open(out, "pt") as file:
        assert set(file.keys()) == set(TinyNet().state_dict())
        told = {"format": "pt", "arch": "tiny", "step": "3", "weights": whose, "classes": "[]"}
        told |= {"image_mean": "[0.485, 0.456, 0.406]", "image_std": "[0.229, 0.224, 0.225]"}
        told |= {"small_stem": "false", "blur_pool": "false"}
        assert file.metadata() == told


def test_the_best_checkpoint_is_taken_or_the_one_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, out = tmp_path / "run", tmp_path / "w.safetensors"
    models = {step: trainables(seed=step) for step in (3, 6, 9)}
    for step, parts in models.items():
        path = kept(run, parts, step)
    mark_best(step_path(run / "checkpoints", 6))
    finish_checkpoint()
    monkeypatch.chdir(path.parent)
    for source, step in ((run, 6), (path, 9), (path.name, 9)):
        assert export.main([str(source), str(out)]) == 0
        assert plain(read_back(out).state_dict()) == plain(models[step].model.state_dict())
    (run / "checkpoints" / "best.pt").unlink()
    assert export.main([str(run), str(out)]) == 0
    assert plain(read_back(out).state_dict()) == plain(models[9].model.state_dict())


@pytest.mark.parametrize(
    ("run", "out", "words"),
    [
        ("empty", "w.safetensors", "empty: neither a checkpoint nor the folder of a run"),
        ("run", "w.pt", "w.pt: give it a name that ends in .safetensors"),
        ("bare.pt", "w.safetensors", "bare.pt: is not a checkpoint of this project"),
        ("text.pt", "w.safetensors", "text.pt: is damaged, or was not written by torch.save"),
        ("run", "nowhere/w.safetensors", "cannot be read or written (No such file or directory)"),
    ],
)
def test_what_cannot_be_exported(
    run: str, out: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    kept(tmp_path / "run", trainables(), 3)
    torch.save(TinyNet().state_dict(), tmp_path / "bare.pt")
    (tmp_path / "text.pt").write_text("weights")
    assert export.main([str(tmp_path / run), str(tmp_path / out)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("python -m recipe.record.export: ") and words in error
    assert error.count("\n") == 1
    assert not (tmp_path / out).exists()
