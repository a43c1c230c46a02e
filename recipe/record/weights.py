"""Weights from files, of this project and of other trainers."""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import nn

from recipe.errors import UserError, refuse
from recipe.settings.config import Config
from recipe.training.model import last_layer, without_auxiliary_heads

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


STATE_KEYS = ("model", "state_dict", "model_state_dict")


def load_weights(model: nn.Module, config: Config, num_classes: int) -> None:
    """Weights from a file of this project, pytorch/examples, torchvision's reference, Horovod's
    example, a bare dict, or a .safetensors file; the prefixes that wrappers give are taken off.
    With --new-head the last layer keeps those that it began with."""
    file, name = Path(config.weights or ""), f"--weights {config.weights}"
    refuse((not file.is_file(), f"{name}: there is no such file"))
    if file.suffix == ".safetensors":
        contents = _read_safetensors(file, name)
    else:
        with file.open("rb") as content:
            contents = read_file(content, name)
    state = without_auxiliary_heads(state_in(contents, name))
    if config.new_head:
        state |= {
            key: model.get_parameter(key).data for key in last_layer(model, config, num_classes)
        }
    anew = "" if config.new_head else ", or start the last layer anew with --new-head"
    load_state(model, state, name, anew)


def state_in(contents: Any, name: str, keys: Sequence[str] = STATE_KEYS) -> dict[str, torch.Tensor]:
    """The state dict in a file's contents, under one of `keys` or at their top, without the
    prefixes that wrappers give; UserError, with `name` for the file, if there is none."""
    inner = [contents.get(key) for key in keys] if isinstance(contents, dict) else []
    state = next((one for one in inner if isinstance(one, dict)), contents)
    if not isinstance(state, dict) or not all(
        isinstance(key, str) and isinstance(value, torch.Tensor) for key, value in state.items()
    ):
        raise UserError(f"{name}: holds no state dict under {' or '.join(keys)}, or at its top")
    # DDP's, torch.compile's (also of parts of a network), and those of trainers around a network.
    # Of AlexNet and VGG pytorch/examples has wrapped the convolutions alone.
    return {
        re.sub(
            r"^((module|model)\.)+|(?<=^features\.)module\.", "", key.replace("_orig_mod.", "")
        ): value
        for key, value in state.items()
    }


def read_file(content: BinaryIO, name: str) -> Any:
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


def _read_safetensors(file: Path, name: str) -> Any:
    from safetensors import SafetensorError  # few read such files
    from safetensors.torch import load

    try:
        return load(file.read_bytes())
    except SafetensorError as error:
        raise UserError(f"{name}: is damaged ({first_line(error)}); fetch it again") from None


def load_state(
    model: nn.Module, state: dict[str, torch.Tensor], name: str, otherwise: str = ""
) -> None:
    expected = model.state_dict()
    # num_batches_tracked came with torch 0.4.1; older published files lack it, and inference does
    # not need it.
    needed = [key for key in expected if not key.endswith("num_batches_tracked")]
    problems = [f"lacks {key}" for key in needed if key not in state]
    problems += [f"has {key}, which the model lacks" for key in state if key not in expected]
    problems += [
        f"{key} is {list(state[key].shape)}, not {list(value.shape)}"
        for key, value in expected.items()
        if key in state and state[key].shape != value.shape
    ]
    if problems:
        raise UserError(
            f"{name}: does not fit the model ({len(problems)} problems): {'; '.join(problems[:3])};"
            f" check --arch and the number of classes{otherwise}"
        )
    model.load_state_dict(state, strict=False)


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
