"""Checkpoints: written as a whole or not at all, without wrappers, so that they fit either engine.

Training waits only for a copy in memory, which a thread of rank 0 writes to disk. The second part
reads weights from other trainers' files.
"""

import argparse
import copy
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import nn

from recipe.data.batches import Data
from recipe.data.image_folder import first_few
from recipe.data.order import samples_per_step
from recipe.errors import WRITES, UserError, first_line, system_errors
from recipe.files import partial_name, sync_folder, whole_file
from recipe.marks import marks
from recipe.ranks import Ranks
from recipe.record.folder import one_sentence
from recipe.record.formats import SAFETENSORS, format_of
from recipe.settings.config import Config
from recipe.settings.flags import spelled, written
from recipe.training.model import last_layer, without_auxiliary_heads
from recipe.training.state import Progress, Trainables, copy_buffers

FORMAT = 1
EXPORTED = {"arch", "step", "weights"}  # metadata of `recipe.record.export`, beside the classes
# The settings with which pixels are normalised, which whoever uses the weights must know.
NORMALISATION = ("image_mean", "image_std")
# The settings that change the network of --arch.
NETWORK = ("small_stem", "blur_pool")
# The settings of both kinds that weights do not show by their names and shapes.
NOT_IN_WEIGHTS = ("blur_pool", *NORMALISATION)
WRITER = ThreadPoolExecutor(1, "checkpoint")


def contents_of(
    parts: Trainables,
    progress: Progress,
    config: Config,
    data: Data,
    world_size: int = 1,
    momenta: list[torch.Tensor] | None = None,
) -> dict[str, Any]:
    """Return a checkpoint's contents: copies in the CPU's memory, which later steps leave alone."""
    if parts.ema is not None:
        copy_buffers(parts.model, parts.ema.module)
    return {
        "format": FORMAT,
        "model": _copied(parts.model.state_dict()),
        "ema": _copied(parts.ema.state_dict()) if parts.ema is not None else None,
        "optimizer": _copied(parts.optimizer.state_dict()),
        "scaler": parts.scaler.state_dict(),
        "progress": asdict(progress),
        "config": asdict(config),
        "world_size": world_size,
        "data": data.identity,
        "classes": list(data.classes),
        "numpy": np.__version__,
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


def save_checkpoint(
    path: Path, contents: dict[str, Any], keep: int | None = None, older_by: int = 0
) -> None:
    """Write to a temporary file beside `path`, sync it, rename it: a crash or a full disk leaves
    the old file intact. Then delete the `outdated` checkpoints, unless `keep` is None."""
    if bad := not_finite(contents):
        raise UserError(
            f"{path}: was not written, since {bad} is not finite: training has diverged; resume "
            "from an earlier checkpoint with a lower --base-lr, a longer --warmup-epochs or "
            "--clip-grad-norm"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path, sync=True) as file:  # the next run removes what a killed one leaves
            torch.save(contents, file)
        for old in outdated(path.parent, keep, older_by) if keep is not None else ():
            old.unlink()
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"{path}: the checkpoint could not be written ({_reason(error)}); earlier ones, if "
            "there are any, are intact"
        ) from error


def _reason(error: BaseException) -> str:
    """Return what went wrong, in a line: on a full disk torch's own error hides the system's."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__context__
    error = cause or error
    return getattr(error, "strerror", None) or first_line(error)


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints of steps, the oldest first; best.pt is not among them."""
    try:
        names = os.listdir(folder)  # not glob, which treats an unreadable folder as empty
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(folder / name for name in names if re.fullmatch(r"step-\d{9}\.pt", name))


def outdated(folder: Path, keep: int, older_by: int) -> list[Path]:
    """Return the checkpoints to delete. Kept are the newest `keep`, the newest that is at least
    `older_by` steps older than the last, and the oldest of the rest, which will be that later."""
    files = checkpoints_in(folder)
    older = files[:-keep]
    limit = step_path(folder, max(0, step_in_name(files[-1]) - older_by))
    old_enough = sum(file <= limit for file in older)
    return [*older[: max(0, old_enough - 1)], *older[old_enough + 1 :]]


def step_in_name(path: Path) -> int:
    """Return the step in a checkpoint's name."""
    return int(path.stem.removeprefix("step-"))


def step_path(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of `step`."""
    return folder / f"step-{step:09d}.pt"


def keep_checkpoint(
    parts: Trainables,
    progress: Progress,
    config: Config,
    ranks: Ranks,
    data: Data,
    run_folder: Path,
) -> None:
    """Save a checkpoint: rank 0 copies its contents, writes them while training continues, and
    deletes outdated checkpoints.

    The previous checkpoint must be on disk (`finish_checkpoint`): two copies would take twice the
    memory.
    """
    world, momenta = ranks.world, None
    if config.use_adasum and world.size > 1:
        momenta = _momentum_of_each(parts.optimizer, ranks)
    if not world.is_first:
        return
    path = step_path(run_folder / "checkpoints", progress.step)
    contents = contents_of(parts, progress, config, data, world.size, momenta)
    # Old enough to be from before the start of any divergence that is noticed now.
    older_by = min(1000, data.num_train // samples_per_step(config, world))
    _write_meanwhile(save_checkpoint, path, contents, config.keep_checkpoints, older_by)


def _write_meanwhile(task: Callable[..., None], *arguments: Any) -> None:
    """Let the writer's thread do this. A watcher waits for the end of it before it kills a rank."""
    marks.is_writing = True
    WRITES.append(WRITER.submit(task, *arguments))


def finish_checkpoint(timeout: float | None = None) -> bool:
    """Wait until the checkpoint that is being written, if any, is on disk, at most `timeout`
    seconds. Return whether it is. UserError if it could not be written."""
    if not wait(WRITES, timeout).not_done:
        marks.is_writing = False
        while WRITES:
            WRITES.pop().result()
    return not WRITES


def _momentum_of_each(optimizer: torch.optim.Optimizer, ranks: Ranks) -> list[torch.Tensor]:
    """Return, on rank 0, each rank's momentum, float32 [weights]: under Adasum they differ."""
    buffers = [buffer.flatten() for buffer in momentum(optimizer)]
    if not buffers:
        return []
    bits = torch.cat(buffers).view(torch.int32)  # summed as numbers, -0.0 would lose its sign
    momenta = []
    for rank in range(ranks.world.size):
        total = ranks.sum(bits if rank == ranks.world.rank else torch.zeros_like(bits)).cpu()
        if ranks.world.is_first:
            momenta.append(total.view(torch.float32))
    return momenta


def momentum(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the optimizer's momentum buffers, in the order of the weights; none before the first
    step, or without --momentum."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    buffers = (optimizer.state.get(weight, {}).get("momentum_buffer") for weight in weights)
    return [buffer for buffer in buffers if buffer is not None]


def not_finite(contents: Any, name: str = "") -> str | None:
    """Return the name of the first tensor in `contents` that holds a NaN or an infinity, or None.

    NumPy checks on one thread: in the writer's thread, torch would take the training's cores.
    """
    if isinstance(contents, torch.Tensor):
        is_finite = not contents.is_floating_point() or np.isfinite(contents.float().numpy()).all()
        return None if is_finite else name
    if isinstance(contents, (dict, list)):
        items = contents.items() if isinstance(contents, dict) else enumerate(contents)
        names = (not_finite(value, f"{name}.{key}".lstrip(".")) for key, value in items)
        return next(filter(None, names), None)
    return None


def mark_best(path: Path) -> None:
    """Make best.pt a second name of the checkpoint `path`, once that is written: it takes no space
    while `path` exists. Do nothing if there is no checkpoint of this step."""
    _write_meanwhile(_mark_best, path, path.with_name("best.pt"))


def _mark_best(path: Path, best: Path) -> None:
    if not path.exists():
        return
    temporary = partial_name(best)
    with one_sentence(best):
        temporary.unlink(missing_ok=True)
        try:
            os.link(path, temporary)
        except OSError:  # a file system without hard links
            with path.open("rb") as original, whole_file(best, sync=True) as file:
                shutil.copyfileobj(original, file)
        else:
            temporary.replace(best)
            sync_folder(best.parent)


# -- Weights from files of this project and of other trainers --------------------------------------

# Plain values that other trainers' checkpoints hold beside tensors: their flags and best accuracy.
HARMLESS: list[Any] = [
    argparse.Namespace,
    np.dtype,
    *(type(np.dtype(code)) for code in "?bhilqBHILQefdU"),  # numbers, truth values and text
    (np.float64(0).__reduce__()[0], "numpy.core.multiarray.scalar"),
    (np.float64(0).__reduce__()[0], "numpy._core.multiarray.scalar"),
]
SUFFIXES = {".pt", ".pth", ".tar", ".bin", ".ckpt", ".safetensors"}  # that files of weights have
STATE_KEYS = ("model", "state_dict", "model_state_dict")
# What counters, of averaging and of thop's profiler, add to a network's state.
COUNTERS = {"n_averaged", "total_ops", "total_params"}


def load_weights(model: nn.Module, config: Config, data: Data) -> None:
    """Load the weights of --weights, if it is given: a file of this project, pytorch/examples,
    torchvision's reference or Horovod's example, a bare dict, or a safetensors file. Prefixes of
    wrappers are removed. With --new-head the last layer keeps its initial weights; else weights
    that are known to be of other classes than the data's are refused."""
    if config.weights is None:
        if config.pretrained:
            _warn_of_text_order("--pretrained", data)
        return
    name = f"--weights {config.weights}"
    contents = _read_weights(Path(config.weights), name)
    state = without_auxiliary_heads(state_in(contents, name))
    is_own = isinstance(contents, dict) and contents.get("format") == FORMAT
    if config.new_head:
        head = last_layer(model, config, data.num_classes)
        state |= {key: model.get_parameter(key).data for key in head}
    elif is_own and (problem := other_classes(contents.get("classes"), data)):
        raise UserError(f"{name}: {problem}, or train a new last layer with --new-head")
    elif not is_own:
        _warn_of_text_order(name, data)
    if is_own:
        _warn_of_other_settings(name, contents.get("config", {}), config)
    otherwise = "" if config.new_head else ", or replace the last layer with --new-head"
    load_state(model, state, name, otherwise)
    _say_which(contents, name)


def other_classes(trained: Any, data: Data) -> str:
    """Return, in words, how the data's classes differ from those on which weights were `trained`,
    and what to do; "" if they do not, or if either are not known: of random pixels, and in files
    from before November 2026."""
    if not (isinstance(trained, list) and trained and data.classes):
        return ""
    if tuple(trained) == data.classes:
        return ""
    in_one = sorted(set(map(str, trained)) ^ set(data.classes))
    return (
        f"was trained on other classes ({len(trained):,}) than the data has "
        f"({len(data.classes):,}), so its outputs would be taken for others. Only in one of them: "
        f"{first_few(in_one)}. Give the class folders the names that they had in training"
    )


def _warn_of_text_order(name: str, data: Data) -> None:
    """Warn if the data's classes are numbers that are not in the order of numbers, and nothing says
    in which order those of the weights `name` are."""
    classes = list(data.classes)
    if all(map(str.isdecimal, classes)) and classes != sorted(classes, key=int):
        print(
            f"warning: {name}: does not say which class each output is for, and the class folders "
            f"are read in the order of text: {first_few(classes, 5)}. If the weights are from a "
            "program with the order of numbers, give the folders leading zeros (00, 01, 02).",
            flush=True,
        )


def _warn_of_other_settings(name: str, trained: Mapping[str, Any], config: Config) -> None:
    """Warn if the weights `name` were trained with other settings that they do not show; `trained`
    has the settings of that training."""
    for setting in NOT_IN_WEIGHTS:
        then, now = setting_in(trained, setting), getattr(config, setting)
        then = tuple(then) if isinstance(then, list) else then
        if then != now:
            print(
                f"warning: {name}: was trained with {spelled(setting)} {written(then)}, and this "
                f"run has {written(now)}",
                flush=True,
            )


def setting_in(trained: Mapping[str, Any], name: str) -> Any:
    """Return the setting `name` of a training of ours. Older files do not have the settings that
    were added later, whose default is what they had."""
    return trained.get(name, getattr(Config, name))


def _say_which(contents: Any, name: str) -> None:
    """If a file holds several networks' weights, say which were loaded."""
    loaded = _state_key(contents, STATE_KEYS)
    if loaded is None:
        return
    others = [
        key for key, value in contents.items() if key != loaded and _is_state(value) and value
    ]
    if others:
        print(
            f"{name}: loaded its `{loaded}`; it also holds `{'`, `'.join(map(str, others))}`, such "
            "as a moving average of the weights. To use that, save it alone to a file (of this "
            "project's: python -m recipe.record.export writes the better one).",
            flush=True,
        )


def _state_key(contents: Any, keys: Sequence[str]) -> str | None:
    """Return the first of `keys` under which a file's contents have a dict, or None."""
    if not isinstance(contents, dict):
        return None
    return next((key for key in keys if isinstance(contents.get(key), dict)), None)


def _is_state(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(key, str) and isinstance(tensor, torch.Tensor) for key, tensor in value.items()
    )


def state_in(contents: Any, name: str, keys: Sequence[str] = STATE_KEYS) -> dict[str, torch.Tensor]:
    """Return the state dict in a file's contents, under one of `keys` or at the top level, without
    prefixes of wrappers and without counters. UserError, which calls the file `name`, if there is
    none."""
    key = _state_key(contents, keys)
    state = contents if key is None else contents[key]
    if not _is_state(state):
        has = f"a {type(state).__name__}"
        if isinstance(state, dict):
            has = first_few([f"{key} ({type(value).__name__})" for key, value in state.items()], 5)
        where = "" if key is None else f"under {key} "
        raise UserError(
            f"{name}: holds no state dict under {' or '.join(keys)}, or at its top; it has "
            f"{where}{has or 'nothing'}"
        )
    # Prefixes of DDP, of torch.compile (also inside a network), and of trainers around a network.
    # Of AlexNet and VGG pytorch/examples wraps the convolutions alone.
    return {
        re.sub(
            r"^((module|model)\.)+|(?<=^features\.)module\.", "", key.replace("_orig_mod.", "")
        ): value
        for key, value in state.items()
        if key.rpartition(".")[2] not in COUNTERS
    }


def _read_weights(file: Path, name: str) -> Any:
    """Return the contents of a file of --weights; of a safetensors file either the state dict, or,
    if `recipe.record.export` wrote it, what a checkpoint has of that."""
    with system_errors(file, "cannot be read", "Check its permissions, and the disk."):
        if file.is_dir():
            paths = [
                path
                for path in (*file.glob("*"), *file.glob("checkpoints/*"))
                if path.suffix in SUFFIXES
            ]
            names = first_few(sorted(str(path.relative_to(file)) for path in paths))
            raise UserError(
                f"{name}: is a folder; name a file of weights in it ({names or 'none seen'})"
            )
        if not file.is_file():
            raise UserError(f"{name}: there is no such file")
        with file.open("rb") as content:
            if format_of(content) != SAFETENSORS:
                return read_file(content, name)
            whole = content.read()
    return _read_safetensors(whole, name)


def read_file(content: BinaryIO, name: str) -> Any:
    if words := format_of(content):
        raise UserError(f"{name}: {words}")
    try:
        with torch.serialization.safe_globals(HARMLESS):
            return torch.load(content, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises several kinds, none of which names the file
        refused = re.search(r"GLOBAL (\S+) (was not an allowed global|whose module)", str(error))
        if refused:
            raise UserError(
                f"{name}: holds a Python object ({refused[1]}), and reading it would run code from "
                "the file; save it again with tensors and plain values only"
            ) from None
        raise UserError(f"{name}: is damaged, or was not written by torch.save") from None


def _read_safetensors(content: bytes, name: str) -> Any:
    from safetensors import SafetensorError  # few read such files
    from safetensors.torch import load

    try:
        state = load(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        metadata = header.get("__metadata__", {})
        if not EXPORTED.issubset(metadata):
            return state
        classes = json.loads(metadata.get("classes", "[]"))
        config = {name: json.loads(metadata[name]) for name in NOT_IN_WEIGHTS if name in metadata}
    except (SafetensorError, ValueError) as error:
        raise UserError(f"{name}: is damaged ({first_line(error)}); fetch it again") from None
    return {"format": FORMAT, "model": state, "classes": classes, "config": config}


def load_state(
    model: nn.Module, state: dict[str, torch.Tensor], name: str, otherwise: str = ""
) -> None:
    expected = model.state_dict()
    # num_batches_tracked came with torch 0.4.1: older published files lack it, and inference does
    # not need it.
    needed = [key for key in expected if not key.endswith("num_batches_tracked")]
    lacking = [key for key in needed if key not in state]
    unknown = [key for key in state if key not in expected]
    shapes = [
        f"{key} is {list(state[key].shape)}, not {list(value.shape)}"
        for key, value in expected.items()
        if key in state and state[key].shape != value.shape
    ]
    problems = [f"lacks {first_few(lacking)}"] if lacking else []
    problems += [f"has {first_few(unknown)}, which the model lacks"] if unknown else []
    problems += [first_few(shapes)] if shapes else []
    if problems:
        has_other_stem = any(shape.startswith("conv1.weight is") for shape in shapes)
        stem = ", --small-stem" if has_other_stem else ""
        raise UserError(
            f"{name}: does not fit the model: {'; '.join(problems)}; check --arch{stem} and the "
            f"number of classes{otherwise}"
        )
    if empty := [key for key, value in state.items() if value.is_meta]:
        raise UserError(
            f"{name}: has only the shapes of {first_few(empty)}, not the values (tensors on the "
            "device `meta`); save it again from a model whose weights were loaded"
        )
    model.load_state_dict(state, strict=False)
