"""Going on from a checkpoint: found, read by all ranks, checked, and taken up."""

import errno
import io
import math
import shutil
import zipfile
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recipe.config import Config
from recipe.data.batches import Data
from recipe.errors import UserError
from recipe.record.checkpoint import FORMAT, checkpoints_in, momentum, not_finite, step_path
from recipe.record.run_folder import new_folder, one_sentence
from recipe.record.weights import first_line, load_state, read_file
from recipe.training.half_weights import round_weights
from recipe.training.state import Progress, Trainables
from recipe.world import World

PIECE_BYTES = 2**28  # sent at once: MPI's counts end at 2 GiB


def resume(
    parts: Trainables,
    config: Config,
    world: World,
    data: Data,
    run_folder: Path,
    from_rank_0: Callable[[torch.Tensor], torch.Tensor],
) -> Progress:
    """Go on from the checkpoint that --resume means, on all ranks alike; the start of training if
    there is none. Rank 0 then makes the folder ready for what will be written."""
    progress = Progress()
    if config.resume is not None:
        path = None
        try:
            if world.is_first:
                path = find_checkpoint(config, run_folder)
            contents = load_on_all_ranks(path, world, from_rank_0)
        except OSError as error:
            raise UserError(
                f"--resume {config.resume}: {error.filename or path or run_folder} cannot be read "
                f"({error.strerror}); nothing was changed, start again when it can be read"
            ) from error
        if contents is not None:
            name = str(path or config.resume)
            progress = restore(contents, parts, config, world, data, name)
    if world.is_first:
        take_over(run_folder, config, progress)
    return progress


def take_over(run_folder: Path, config: Config, progress: Progress) -> None:
    """Make rank 0's folder ready for a run that goes on from `progress`; UserError if it holds
    another one."""
    metrics, checkpoints = run_folder / "metrics.jsonl", run_folder / "checkpoints"
    if config.evaluate and metrics.exists():
        return  # the record of the training that is evaluated stays as it is
    with one_sentence(run_folder):
        holds_run = metrics.exists() or checkpoints_in(checkpoints)
        if holds_run and not _goes_on_here(config, run_folder):
            raise UserError(
                f"{run_folder}: already holds a run; choose another --name, or go on with it "
                "by --resume auto"
            )
        if not config.evaluate and set_aside(run_folder, progress.step):
            progress.best_top1 = Progress.best_top1


def _goes_on_here(config: Config, run_folder: Path) -> bool:
    """Whether --resume means a checkpoint of this folder, and not another run's."""
    if config.resume in ("auto", None):
        return config.resume == "auto"
    path = Path(config.resume or "").expanduser().resolve()
    return path.is_relative_to(run_folder.resolve())


def set_aside(run_folder: Path, step: int) -> bool:
    """Before a run goes on from `step`: move what an earlier one left of later steps, and a copy of
    its metrics, into a folder of their own, so that this run neither takes it for its own nor
    deletes it. Whether best.pt was among it.

    A run that was lost before its first checkpoint (step 0) leaves metrics only.
    """
    folder = run_folder / "checkpoints"
    later = [file for file in checkpoints_in(folder) if file > step_path(folder, step)]
    best = folder / "best.pt"
    was_later = best.exists() and _step_in(best) > step
    metrics = run_folder / "metrics.jsonl"
    if later or was_later or (step == 0 and metrics.exists()):
        aside = new_folder(folder / datetime.now().strftime("set-aside-%Y%m%d-%H%M%S"))
        if metrics.exists():
            shutil.copyfile(metrics, aside / metrics.name)
        for file in [*later, best] if was_later else later:
            file.rename(aside / file.name)
        print(f"warning: what an earlier start left of steps after {step} is now in {aside}")
    return was_later


def _step_in(path: Path) -> float:
    """The step that a checkpoint is of; infinity if it is damaged."""
    progress = _glance(path).get("progress")
    step = progress.get("step") if isinstance(progress, dict) else None
    return step if isinstance(step, int) else math.inf


def _glance(path: Path) -> dict[str, Any]:
    """A checkpoint of this project, most of it still on disk; empty if it is damaged."""
    try:
        return dict(torch.load(path, mmap=True, weights_only=True))
    except OSError:
        raise
    except Exception:  # torch raises several kinds
        return {}


def find_checkpoint(config: Config, run_folder: Path) -> Path | None:
    """The file that --resume means, or None for a fresh start (`auto` where nothing was done yet).

    `auto` passes over a newest file that is damaged and takes the one before it, saying so. What
    cannot be read is not damaged: OSError. UserError where no file is whole, since to start again
    would be to destroy the run.
    """
    if config.resume is None:
        return None
    return _newest(run_folder) if config.resume == "auto" else _named(config.resume)


def _named(name: str) -> Path:
    path = Path(name).expanduser()
    if not path.is_file():
        raise UserError(f"--resume {name}: there is no such file")
    if not _is_whole(path):
        raise UserError(f"--resume {name}: is damaged, or is no checkpoint of this project")
    return path


def _newest(run_folder: Path) -> Path | None:
    folder = run_folder / "checkpoints"
    best, metrics = folder / "best.pt", run_folder / "metrics.jsonl"
    files = checkpoints_in(folder)
    for path in reversed(files):
        if _is_whole(path):
            return path
        print(f"warning: {path} is damaged; trying the one before it")
    if best.exists() and _is_whole(best):
        raise UserError(
            f"--resume auto: of the checkpoints in {folder} only the best is whole; go on from it "
            f"with --resume {best}, or start anew under another --name"
        )
    # Each epoch ends with a checkpoint. A run that was lost before its first one, as a preempted
    # job may be, begins anew; its metrics are set aside.
    if files or best.exists() or (metrics.exists() and b'"kind": "epoch"' in metrics.read_bytes()):
        raise UserError(
            f"--resume auto: {run_folder} holds a run, but no whole checkpoint to go on from; "
            "bring one back from a copy, or start anew: under another --name, or with that folder "
            "moved away"
        )
    return None


def _is_whole(path: Path) -> bool:
    """Whether every checksum in the archive that torch.save wrote holds. OSError if it cannot be
    read, which is no damage."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except MemoryError:
        raise
    except Exception as error:  # damage can look like encryption, an unknown method, ...
        # ... and a wrong length sends the reader to a place before the file's start (EINVAL).
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            error.filename = error.filename or str(path)
            raise
        return False


def load_on_all_ranks(
    path: Path | None, world: World, broadcast: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, Any] | None:
    """Rank 0's file, on every rank, whether or not the others can read it; None if rank 0 has no
    `path`.

    `broadcast` returns rank 0's tensor on all ranks. Only bytes travel, in pieces, of which no rank
    holds more than one beside the file; and each rank reads them with weights_only=True: nothing
    that came over the network is ever unpickled freely.
    """
    size = path.stat().st_size if path is not None else 0
    size = int(broadcast(torch.tensor([size], dtype=torch.int64)))
    if size == 0:
        return None
    content = io.BytesIO()
    with path.open("rb") if path is not None else nullcontext() as file:
        while (left := size - content.tell()) > 0:
            piece = np.zeros(min(left, PIECE_BYTES), dtype=np.uint8)
            if file is not None and file.readinto(piece.data) < len(piece):
                raise UserError(f"{path}: was cut short while it was read; start again")
            content.write(broadcast(torch.from_numpy(piece)).numpy().data)
    content.seek(0)
    return read_file(content, str(path))


def restore(
    checkpoint: Any, parts: Trainables, config: Config, world: World, data: Data, name: str
) -> Progress:
    """Put a checkpoint's contents into `parts`; the wrapper-free keys fit either engine. UserError
    if it does not fit this run, or holds what no training writes."""
    if not isinstance(checkpoint, dict) or checkpoint.get("format") != FORMAT:
        raise UserError(
            f"--resume {name}: is not a checkpoint of this project; to start from its weights use "
            "--weights"
        )
    try:
        _check_fits(checkpoint, parts, config, world, data, f"--resume {name}")
        if bad := not_finite(checkpoint):
            instead = _finite_beside(Path(name)) if world.is_first else None
            raise UserError(
                f"--resume {name}: {bad} is not finite, for the training that wrote it had "
                "diverged; "
                + (f"use --resume {instead}" if instead else "start anew under another --name")
            )
        load_state(parts.model, checkpoint["model"], f"--resume {name}")
        if parts.ema is not None:
            load_state(parts.ema, checkpoint["ema"], f"--resume {name}")
        if not config.evaluate:
            _load_optimizer(parts.optimizer, checkpoint["optimizer"], f"--resume {name}")
            if checkpoint.get("momenta"):
                _load_momentum(parts.optimizer, checkpoint["momenta"][world.rank])
        if checkpoint["scaler"] and parts.scaler.is_enabled():
            _check(0 < checkpoint["scaler"]["scale"] < math.inf, "the loss scale is not above 0")
            parts.scaler.load_state_dict(checkpoint["scaler"])
        round_weights(parts.fp16_model, parts.model)
        progress = _progress_in(checkpoint)
        parts.scaler.skipped_steps = progress.skipped_steps
        return progress
    except UserError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise UserError(
            f"--resume {name}: holds what this project does not write ({type(error).__name__}: "
            f"{first_line(error)}); go on from another checkpoint"
        ) from None


def _check(holds: bool, complaint: str) -> None:
    if not holds:
        raise ValueError(complaint)


def _progress_in(checkpoint: dict[str, Any]) -> Progress:
    """ValueError for what no training comes to."""
    values = {"skipped_steps": 0, **checkpoint["progress"]}  # which older ones lack
    _check(values.keys() == asdict(Progress()).keys(), f"progress has the keys {sorted(values)}")
    progress = Progress(**values)
    step, seen = progress.step, progress.samples_seen
    _check(
        type(step) is int and type(seen) is int and 0 <= step <= seen,
        f"step {step!r} with {seen!r} images seen",
    )
    _check(0 <= progress.skipped_steps <= step, f"{progress.skipped_steps!r} skipped steps")
    if checkpoint.get("data"):  # which older ones lack, and today's data may be of another size
        # The last step may go beyond the end, by its images: a mean step's, or more of a warm-up.
        end = (checkpoint["config"]["epochs"] + 1) * checkpoint["data"]["num_train"]
        growth = 1 + checkpoint["config"].get("batch_size_warmup_epochs", 0)
        _check(
            seen <= end + growth * seen / max(step, 1),
            f"{seen:,} images seen in {step:,} steps are more than --epochs allowed",
        )
    _check(-1 <= progress.best_top1 <= 100, f"a best top-1 of {progress.best_top1!r} %")
    _check(0 <= progress.train_seconds < math.inf, f"{progress.train_seconds!r} s of training")
    return progress


def _check_fits(
    checkpoint: dict[str, Any],
    parts: Trainables,
    config: Config,
    world: World,
    data: Data,
    name: str,
) -> None:
    """UserError where this run cannot go on from it."""
    saved = checkpoint["config"]
    if saved["arch"] != config.arch:
        raise UserError(
            f"{name}: holds a {saved['arch']}, and this run trains a {config.arch}; add --arch "
            f"{saved['arch']}"
        )
    if saved.get("blur_pool", False) != config.blur_pool:  # which the weights do not show
        how, remedy = ("without", "leave it out") if config.blur_pool else ("with", "add it")
        raise UserError(f"{name}: was trained {how} --blur-pool; {remedy}")
    if config.evaluate:
        if checkpoint["ema"] is None and parts.ema is not None:
            raise UserError(
                f"{name}: holds no moving average of the weights to evaluate; leave out --model-ema"
            )
        return
    if (then := saved.get("optimizer", "sgd")) != config.optimizer:
        raise UserError(
            f"{name}: has the state of --optimizer {then}, and this run has {config.optimizer}; "
            f"add --optimizer {then}, or start from its weights with --weights"
        )
    if saved["seed"] != config.seed:
        raise UserError(
            f"{name}: was trained with --seed {saved['seed']}; with another seed some images of "
            "its epoch would come twice and some not at all"
        )
    if (checkpoint["ema"] is None) != (parts.ema is None):
        has = "no" if checkpoint["ema"] is None else "a"
        raise UserError(
            f"{name}: holds {has} moving average of the weights; start with --model-ema as that "
            "run did"
        )
    then, now = checkpoint.get("data") or data.identity, data.identity
    if then != now and not config.allow_changed_data:
        counts, here = (
            f"{images['num_train']:,} training and {images['num_val']:,} validation images"
            for images in (then, now)
        )
        raise UserError(
            f"{name}: was trained on {counts}, and here are "
            + (here if here != counts else "as many, of other names or classes")
            + "; bring the old data back, or add --allow-changed-data"
        )
    _check_momenta(checkpoint, config, world, name)


def _check_momenta(checkpoint: dict[str, Any], config: Config, world: World, name: str) -> None:
    """UserError where AdaSum's momentum of each worker cannot be carried on."""
    momenta = checkpoint.get("momenta")
    if momenta and (not config.use_adasum or len(momenta) != world.size):
        raise UserError(
            f"{name}: holds the momentum of each of {len(momenta)} workers under --use-adasum; go "
            "on with as many and with that flag, or start from its weights with --weights"
        )
    if (
        checkpoint["config"].get("use_adasum")
        and world.size > 1
        and config.momentum
        and not momenta
    ):
        raise UserError(
            f"{name}: was trained with --use-adasum and holds one worker's momentum only, from "
            "which others cannot go on exactly; start from its weights with --weights"
        )


def _finite_beside(path: Path) -> Path | None:
    """The newest checkpoint in the folder of `path` that is whole and finite, or else the best."""
    for file in reversed([path.with_name("best.pt"), *checkpoints_in(path.parent)]):
        with suppress(OSError):  # it is no more than advice
            if file.exists() and _is_whole(file) and not not_finite(_glance(file)):
                return file
    return None


def _load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any], name: str) -> None:
    """Take up the momentum of `state`; --momentum, --wd and the like stay what this run's flags
    say, and what its config.json tells."""
    settings = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    try:
        optimizer.load_state_dict(state)
    except ValueError as error:
        raise UserError(
            f"{name}: its optimizer state does not fit ({first_line(error)}); check --arch"
        ) from None
    for weight, values in optimizer.state.items():
        for key, value in values.items():
            fits = value is None or key == "step" or value.shape == weight.shape
            _check(fits, f"{key} of another shape")
    for group, values in zip(optimizer.param_groups, settings, strict=True):
        group.update(values)


def _load_momentum(optimizer: torch.optim.Optimizer, own: torch.Tensor) -> None:
    """Take up this rank's part of what `_momentum_of_each` has gathered."""
    buffers = momentum(optimizer)
    parts = own.split([buffer.numel() for buffer in buffers])
    for buffer, part in zip(buffers, parts, strict=True):
        buffer.copy_(part.view_as(buffer))
