"""Going on from a checkpoint: found, read by all ranks, checked, and taken up."""

import errno
import io
import math
import shutil
import zipfile
from collections.abc import Callable
from contextlib import nullcontext, suppress
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
    goes_on_here = config.resume == "auto" or (
        config.resume is not None
        and Path(config.resume).expanduser().resolve().is_relative_to(run_folder.resolve())
    )
    with one_sentence(run_folder):
        if (metrics.exists() or checkpoints_in(checkpoints)) and not goes_on_here:
            raise UserError(
                f"{run_folder}: already holds a run; choose another --name, or go on with it "
                "by --resume auto"
            )
        if not config.evaluate and set_aside(run_folder, progress.step):
            progress.best_top1 = Progress.best_top1


def set_aside(run_folder: Path, step: int) -> bool:
    """Before a run goes on from `step`: move what an earlier one left of later steps, and a copy of
    its metrics, into a folder of their own, so that this run neither takes it for its own nor
    deletes it. Whether best.pt was among it.

    A run that was lost before its first checkpoint (step 0) leaves metrics only.
    """
    folder = run_folder / "checkpoints"
    later = [file for file in checkpoints_in(folder) if file > step_path(folder, step)]
    best = folder / "best.pt"
    was_later = best.exists() and _step_of(_glance(best)) > step
    metrics = run_folder / "metrics.jsonl"
    if later or was_later or (step == 0 and metrics.exists()):
        aside = new_folder(folder / datetime.now().strftime("set-aside-%Y%m%d-%H%M%S"))
        if metrics.exists():
            shutil.copyfile(metrics, aside / metrics.name)
        for file in [*later, best] if was_later else later:
            file.rename(aside / file.name)
        print(f"warning: what an earlier start left of steps after {step} is now in {aside}")
    return was_later


def _step_of(contents: dict[str, Any]) -> float:
    """The step that a checkpoint is of; infinity if it is damaged."""
    progress = contents.get("progress")
    return progress.get("step", math.inf) if isinstance(progress, dict) else math.inf


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
    if config.resume != "auto":
        path = Path(config.resume).expanduser()
        if not path.is_file():
            raise UserError(f"--resume {config.resume}: there is no such file")
        if not _is_whole(path):
            raise UserError(
                f"--resume {config.resume}: is damaged, or is no checkpoint of this project"
            )
        return path
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
        if misfit := _misfit(checkpoint, parts, config, world, data):
            raise UserError(f"--resume {name}: {misfit}")
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
            _load_optimizer(parts.optimizer, checkpoint, world)
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
    """ValueError or TypeError for what no training comes to."""
    progress = Progress(**checkpoint["progress"])
    step, seen = progress.step, progress.samples_seen
    is_sound = (
        checkpoint["progress"].keys() | {"skipped_steps"} == vars(progress).keys()  # older: without
        and type(step) is int
        and type(seen) is int
        and 0 <= progress.skipped_steps <= step <= seen
        and -1 <= progress.best_top1 <= 100
        and 0 <= progress.train_seconds < math.inf
    )
    if is_sound and checkpoint.get("data"):  # which older ones lack, and now it may be another's
        # The last step may go beyond the end, by its images: a mean step's, or more of a warm-up.
        end = (checkpoint["config"]["epochs"] + 1) * checkpoint["data"]["num_train"]
        growth = 1 + checkpoint["config"].get("batch_size_warmup_epochs", 0)
        is_sound = seen <= end + growth * seen / max(step, 1)
    _check(is_sound, f"no training comes to {checkpoint['progress']}")
    return progress


def _misfit(
    checkpoint: dict[str, Any], parts: Trainables, config: Config, world: World, data: Data
) -> str | None:
    """Why this run cannot go on from it, and what to do instead; None if it can."""
    saved, momenta = checkpoint["config"], checkpoint.get("momenta")
    optimizer, has_ema = saved.get("optimizer", "sgd"), checkpoint["ema"] is not None
    was_blurred = saved.get("blur_pool", False)  # which the weights do not show
    then, now = checkpoint.get("data") or data.identity, data.identity
    counts, here = (
        f"{images['num_train']:,} training and {images['num_val']:,} validation images"
        for images in (then, now)
    )
    always = [
        (
            saved["arch"] != config.arch,
            f"holds a {saved['arch']}, and this run trains a {config.arch}; add --arch "
            f"{saved['arch']}",
        ),
        (
            was_blurred and not config.blur_pool,
            "was trained with --blur-pool; add it",
        ),
        (
            config.blur_pool and not was_blurred,
            "was trained without --blur-pool; leave it out",
        ),
        (
            config.evaluate and parts.ema is not None and not has_ema,
            "holds no moving average of the weights to evaluate; leave out --model-ema",
        ),
    ]
    to_train = [
        (
            optimizer != config.optimizer,
            f"has the state of --optimizer {optimizer}, and this run has {config.optimizer}; add "
            f"--optimizer {optimizer}, or start from its weights with --weights",
        ),
        (
            saved["seed"] != config.seed,
            f"was trained with --seed {saved['seed']}; with another seed some images of its epoch "
            "would come twice and some not at all",
        ),
        (
            has_ema != (parts.ema is not None),
            f"holds {'a' if has_ema else 'no'} moving average of the weights; start with "
            "--model-ema as that run did",
        ),
        (
            then != now and not config.allow_changed_data,
            f"was trained on {counts}, and here are "
            + (here if here != counts else "as many, of other names or classes")
            + "; bring the old data back, or add --allow-changed-data",
        ),
        (
            momenta and not (config.use_adasum and len(momenta) == world.size),
            f"holds the momentum of each of {len(momenta or ())} workers under --use-adasum; go "
            "on with as many and with that flag, or start from its weights with --weights",
        ),
        (
            saved.get("use_adasum") and world.size > 1 and config.momentum and not momenta,
            "was trained with --use-adasum and holds one worker's momentum only, from which "
            "others cannot go on exactly; start from its weights with --weights",
        ),
    ]
    reasons = always if config.evaluate else always + to_train
    return next((reason for is_so, reason in reasons if is_so), None)


def _finite_beside(path: Path) -> Path | None:
    """The newest checkpoint in the folder of `path` that is whole and finite, or else the best."""
    for file in reversed([path.with_name("best.pt"), *checkpoints_in(path.parent)]):
        with suppress(OSError):  # it is no more than advice
            if file.exists() and _is_whole(file) and not not_finite(_glance(file)):
                return file
    return None


def _load_optimizer(
    optimizer: torch.optim.Optimizer, checkpoint: dict[str, Any], world: World
) -> None:
    """Take up the optimizer's state; --momentum, --wd and the like stay what this run's flags say,
    and what its config.json tells."""
    settings = [dict(group, params=None) for group in optimizer.param_groups]
    optimizer.load_state_dict(checkpoint["optimizer"])
    for group, values in zip(optimizer.param_groups, settings, strict=True):
        group.update(values | {"params": group["params"]})
    for weight, values in optimizer.state.items():
        for key, value in values.items():
            fits = value is None or key == "step" or value.shape == weight.shape
            _check(fits, f"{key} of another shape")
    if checkpoint.get("momenta"):  # of each rank, as `_momentum_of_each` has gathered it
        buffers = momentum(optimizer)
        own = checkpoint["momenta"][world.rank].split([buffer.numel() for buffer in buffers])
        for buffer, part in zip(buffers, own, strict=True):
            buffer.copy_(part.view_as(buffer))
