"""Checkpoints: whole or not at all, and free of wrappers, so that they fit either engine.

Training waits only for a copy in memory; a thread of rank 0 writes it to disk meanwhile.
"""

import argparse
import copy
import errno
import io
import math
import os
import re
import shutil
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from recipe.config import Config
from recipe.data.batches import Data
from recipe.errors import UNFINISHED, UserError
from recipe.files import partial_name, whole_file
from recipe.record.run_folder import new_folder
from recipe.training.model import without_auxiliary_heads
from recipe.world import World

FORMAT = 1
PIECE_BYTES = 2**28  # sent at once: MPI's counts end at 2 GiB
WRITER = ThreadPoolExecutor(1, "checkpoint")


@dataclass
class Progress:
    """How far training has come; all ranks hold the same."""

    step: int = 0  # optimizer steps
    samples_seen: int = 0  # over all ranks: the position in the stream of samples
    best_top1: float = -1.0  # percent; below 0 before the first evaluation
    train_seconds: float = 0.0  # on the training clock, over all the run's sessions


@dataclass
class Trainables:
    """Everything that training changes, without any engine's wrapper."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    ema: AveragedModel | None


def contents_of(
    parts: Trainables,
    progress: Progress,
    config: Config,
    data: Data,
    momenta: list[torch.Tensor] | None = None,
) -> dict[str, Any]:
    """What a checkpoint holds, copied into the CPU's memory: later steps do not change it."""
    return {
        "format": FORMAT,
        "model": _copied(parts.model.state_dict()),
        "ema": _copied(parts.ema.state_dict()) if parts.ema is not None else None,
        "optimizer": _copied(parts.optimizer.state_dict()),
        "scaler": parts.scaler.state_dict(),
        "progress": asdict(progress),
        "config": asdict(config),
        "data": data.identity,
        "momenta": momenta,
    }


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        copied = copy.copy(value)  # with the versions of modules, an attribute of state dicts
        copied.update((key, _copied(item)) for key, item in value.items())
        return copied
    return [_copied(item) for item in value] if isinstance(value, list) else value


def save_checkpoint(path: Path, contents: dict[str, Any]) -> None:
    """Write to a temporary file beside `path`, sync it, rename it: a crash or a full disk leaves
    the old file whole."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path, sync=True) as file:  # the next run removes what a killed one leaves
            torch.save(contents, file)
        _sync(path.parent)
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"{path}: the checkpoint could not be written ({_reason(error)}); the earlier ones "
            "are intact"
        ) from error


def _reason(error: BaseException) -> str:
    """What went wrong, in a line: on a full disk torch's own error hides the system's."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__context__
    error = cause or error
    return getattr(error, "strerror", None) or _first_line(error)


def _sync(path: Path) -> None:
    """Make a file's contents, or a rename in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checkpoints_in(folder: Path) -> list[Path]:
    """Checkpoints by step, oldest first; the best is not among them."""
    try:
        names = os.listdir(folder)  # not glob, which takes a folder that cannot be read for empty
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(folder / name for name in names if re.fullmatch(r"step-\d{9}\.pt", name))


def step_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of `step` is kept."""
    return folder / f"step-{step:09d}.pt"


def keep_checkpoint(
    parts: Trainables,
    progress: Progress,
    config: Config,
    world: World,
    data: Data,
    run_folder: Path,
    figures: dict[str, float],
    sum_over_ranks: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Rank 0 copies what a checkpoint holds, and writes it while training goes on: makes it best.pt
    if the last evaluation's `figures` are the best yet, and deletes the oldest ones.

    UserError if the one before could not be written, or held what is not finite.
    """
    is_best = figures.get("top1", -1.0) > progress.best_top1
    progress.best_top1 = max(progress.best_top1, figures.get("top1", -1.0))
    if config.keep_checkpoints == 0:
        return
    momenta = None
    if config.use_adasum and world.size > 1:
        momenta = _momentum_of_each(parts.optimizer, world, sum_over_ranks)
    if not world.is_first:
        return
    finish_checkpoint()
    path = step_path(run_folder / "checkpoints", progress.step)
    contents = contents_of(parts, progress, config, data, momenta)
    write = partial(_write_and_tidy, path, contents, is_best, config.keep_checkpoints)
    UNFINISHED.append((WRITER.submit(write), write))


def finish_checkpoint(timeout: float | None = None) -> bool:
    """Wait until the checkpoint that is being written, if any, is on disk, for `timeout` seconds at
    most; whether it is. UserError if it could not be written."""
    if not wait([future for future, _ in UNFINISHED], timeout).not_done:
        while UNFINISHED:
            UNFINISHED.pop()[0].result()
    return not UNFINISHED


def _momentum_of_each(
    optimizer: torch.optim.Optimizer,
    world: World,
    sum_over_ranks: Callable[[torch.Tensor], torch.Tensor],
) -> list[torch.Tensor]:
    """On rank 0 every rank's momentum, float32 [weights] each: under Adasum each has its own."""
    buffers = [buffer.flatten() for buffer in _momentum(optimizer)]
    if not buffers:
        return []
    bits = torch.cat(buffers).view(torch.int32)  # as numbers -0.0 + 0.0 would lose its sign
    momenta = []
    for rank in range(world.size):
        total = sum_over_ranks(bits if rank == world.rank else torch.zeros_like(bits)).cpu()
        if world.is_first:
            momenta.append(total.view(torch.float32))
    return momenta


def _momentum(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The optimizer's own buffers, in the order of the weights; none before the first step, nor
    without --momentum."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    buffers = (optimizer.state.get(weight, {}).get("momentum_buffer") for weight in weights)
    return [buffer for buffer in buffers if buffer is not None]


def _not_finite(contents: Any, name: str = "") -> str | None:
    """The first tensor in there that holds a NaN or an infinity; None if there is none.

    By NumPy, on one thread: in the writer's, torch would take the cores of the training.
    """
    if isinstance(contents, torch.Tensor):
        is_finite = not contents.is_floating_point() or np.isfinite(contents.float().numpy()).all()
        return None if is_finite else name
    if isinstance(contents, (dict, list)):
        items = contents.items() if isinstance(contents, dict) else enumerate(contents)
        found = (_not_finite(value, f"{name}.{key}".lstrip(".")) for key, value in items)
        return next(filter(None, found), None)
    return None


def _write_and_tidy(path: Path, contents: dict[str, Any], is_best: bool, keep: int) -> None:
    folder = path.parent
    if bad := _not_finite(contents):
        raise UserError(
            f"{path}: was not written, for {bad} is not finite: training has diverged; go on from "
            "an earlier checkpoint with a lower --base-lr, a longer --warmup-epochs or "
            "--clip-grad-norm"
        )
    save_checkpoint(path, contents)
    try:
        if is_best:
            _mark_best(folder, path)
        for file in checkpoints_in(folder)[:-keep]:
            file.unlink()
    except OSError as error:
        raise UserError(
            f"{path}: was written, but the files beside it could not be renewed ({_reason(error)})"
        ) from error


def _mark_best(folder: Path, path: Path) -> None:
    """Make best.pt a second name of `path`, which costs no space while the original is kept."""
    temporary = partial_name(folder / "best.pt")
    temporary.unlink(missing_ok=True)
    try:
        os.link(path, temporary)
    except OSError:  # a file system without hard links
        shutil.copyfile(path, temporary)
        _sync(temporary)
    os.replace(temporary, folder / "best.pt")
    _sync(folder)


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


def resume(
    parts: Trainables,
    config: Config,
    world: World,
    data: Data,
    run_folder: Path,
    from_rank_0: Callable[[torch.Tensor], torch.Tensor],
) -> Progress:
    """Go on from the checkpoint that --resume means, on all ranks alike; the start of training if
    there is none."""
    if config.resume is None:
        return Progress()
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
    return (
        restore(contents, parts, config, world, data, str(path or config.resume))
        if contents is not None
        else Progress()
    )


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
    return _read(content, str(path))


# Plain values that other trainers' checkpoints hold beside tensors: their flags and best accuracy.
HARMLESS: list[Any] = [
    argparse.Namespace,
    np.dtype,
    type(np.dtype("float32")),
    type(np.dtype("float64")),
    type(np.dtype("int64")),
    (np.float64(0).__reduce__()[0], "numpy.core.multiarray.scalar"),
    (np.float64(0).__reduce__()[0], "numpy._core.multiarray.scalar"),
]


def _read(content: BinaryIO, name: str) -> Any:
    try:
        with torch.serialization.safe_globals(HARMLESS):
            return torch.load(content, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises several kinds, none of which names the file
        refused = re.search(r"GLOBAL (\S+) (was not an allowed global|whose module)", str(error))
        if refused:
            raise UserError(
                f"{name}: holds a Python object ({refused[1]}), and to read it would be to run "
                "code from the file; save it again with tensors and plain values only"
            ) from None
        raise UserError(f"{name}: is damaged, or is no file that torch.save wrote") from None


def _read_safetensors(file: Path, name: str) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError  # few read such files
    from safetensors.torch import load_file

    try:
        return load_file(file)
    except SafetensorError as error:
        raise UserError(f"{name}: is damaged ({_first_line(error)}); fetch it again") from None


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


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
        if bad := _not_finite(checkpoint):
            instead = _finite_beside(Path(name)) if world.is_first else None
            raise UserError(
                f"--resume {name}: {bad} is not finite, for the training that wrote it had "
                "diverged; "
                + (f"use --resume {instead}" if instead else "start anew under another --name")
            )
        _load_state(parts.model, checkpoint["model"], f"--resume {name}")
        if parts.ema is not None:
            _load_state(parts.ema, checkpoint["ema"], f"--resume {name}")
        if not config.evaluate:
            _load_optimizer(parts.optimizer, checkpoint["optimizer"], f"--resume {name}")
            if checkpoint.get("momenta"):
                _load_momentum(parts.optimizer, checkpoint["momenta"][world.rank])
        if checkpoint["scaler"] and parts.scaler.is_enabled():
            _check(0 < checkpoint["scaler"]["scale"] < math.inf, "the loss scale is not above 0")
            parts.scaler.load_state_dict(checkpoint["scaler"])
        return _progress_in(checkpoint)
    except UserError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise UserError(
            f"--resume {name}: holds what this project does not write ({type(error).__name__}: "
            f"{_first_line(error)}); go on from another checkpoint"
        ) from None


def _check(holds: bool, complaint: str) -> None:
    if not holds:
        raise ValueError(complaint)


def _progress_in(checkpoint: dict[str, Any]) -> Progress:
    """ValueError for what no training comes to."""
    values = checkpoint["progress"]
    _check(values.keys() == asdict(Progress()).keys(), f"progress has the keys {sorted(values)}")
    progress = Progress(**values)
    step, seen = progress.step, progress.samples_seen
    _check(
        type(step) is int and type(seen) is int and 0 <= step <= seen,
        f"step {step!r} with {seen!r} images seen",
    )
    if checkpoint.get("data"):  # which older ones lack, and today's data may be of another size
        # The last step may go beyond the end, by the images of a step.
        end = (checkpoint["config"]["epochs"] + 1) * checkpoint["data"]["num_train"]
        _check(
            seen <= end + seen / max(step, 1),
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
    if config.evaluate:
        if checkpoint["ema"] is None and parts.ema is not None:
            raise UserError(
                f"{name}: holds no moving average of the weights to evaluate; leave out --model-ema"
            )
        return
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
    momenta = checkpoint.get("momenta")
    if momenta and (not config.use_adasum or len(momenta) != world.size):
        raise UserError(
            f"{name}: holds the momentum of each of {len(momenta)} workers under --use-adasum; go "
            "on with as many and with that flag, or start from its weights with --weights"
        )
    if saved.get("use_adasum") and world.size > 1 and config.momentum and not momenta:
        raise UserError(
            f"{name}: was trained with --use-adasum and holds one worker's momentum only, from "
            "which others cannot go on exactly; start from its weights with --weights"
        )


def _finite_beside(path: Path) -> Path | None:
    """The newest checkpoint in the folder of `path` that is whole and finite, or else the best."""
    for file in reversed([path.with_name("best.pt"), *checkpoints_in(path.parent)]):
        with suppress(OSError):  # it is no more than advice
            if file.exists() and _is_whole(file) and not _not_finite(_glance(file)):
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
            f"{name}: its optimizer state does not fit ({_first_line(error)}); check --arch"
        ) from None
    for weight, values in optimizer.state.items():
        buffer = values.get("momentum_buffer")
        _check(buffer is None or buffer.shape == weight.shape, "momentum of another shape")
    for group, values in zip(optimizer.param_groups, settings, strict=True):
        group.update(values)


def _load_momentum(optimizer: torch.optim.Optimizer, own: torch.Tensor) -> None:
    """Take up this rank's part of what `_momentum_of_each` has gathered."""
    buffers = _momentum(optimizer)
    parts = own.split([buffer.numel() for buffer in buffers])
    for buffer, part in zip(buffers, parts, strict=True):
        buffer.copy_(part.view_as(buffer))


def load_weights(model: nn.Module, path: str) -> None:
    """Weights from a file of this project, pytorch/examples, torchvision's reference, Horovod's
    example, a bare dict, or a .safetensors file; the prefixes that wrappers give are taken off."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(f"--weights {path}: there is no such file")
    state: Any
    if file.suffix == ".safetensors":
        state = _read_safetensors(file, f"--weights {path}")
    else:
        with file.open("rb") as content:
            state = _read(content, f"--weights {path}")
    for key in ("model", "state_dict", "model_state_dict"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
            break
    if not isinstance(state, dict) or not all(
        isinstance(key, str) and isinstance(value, torch.Tensor) for key, value in state.items()
    ):
        raise UserError(
            f"--weights {path}: holds no state dict under 'model', 'state_dict' or at its top"
        )
    # DDP's, torch.compile's (also of parts of a network), and those of trainers around a network.
    state = {
        re.sub(r"^((module|model)\.)+", "", key.replace("_orig_mod.", "")): value
        for key, value in state.items()
    }
    _load_state(model, without_auxiliary_heads(state), f"--weights {path}")


def _load_state(model: nn.Module, state: dict[str, torch.Tensor], name: str) -> None:
    expected = model.state_dict()
    # num_batches_tracked came with torch 0.4.1; older published files lack it, and inference does
    # not need it.
    missing = [
        key for key in expected if key not in state and not key.endswith("num_batches_tracked")
    ]
    unexpected = [key for key in state if key not in expected]
    shapes = [key for key in expected if key in state and expected[key].shape != state[key].shape]
    problems = []
    if missing:
        problems.append(f"lacks {missing[0]} (and {len(missing) - 1} more)")
    if unexpected:
        problems.append(
            f"has {unexpected[0]} (and {len(unexpected) - 1} more), which the model lacks"
        )
    for key in shapes[:2]:
        problems.append(f"{key} is {list(state[key].shape)}, not {list(expected[key].shape)}")
    if problems:
        raise UserError(
            f"{name}: does not fit the model: {'; '.join(problems)}; check --arch and the number "
            "of classes"
        )
    model.load_state_dict(state, strict=False)
