"""Write the weights of a training as .safetensors, for other tools.

    python -m recipe.record.export RUN WEIGHTS.safetensors

RUN is a run's folder, whose best checkpoint (best.pt) or else last one is used; or a checkpoint
file. If the training kept a moving average, and that did better in the evaluation after the
checkpoint's step, the average is written. The names are the network's own; the metadata have the
names of the classes, whether the network has --small-stem and --blur-pool, and the mean and
standard deviation by which pixels are normalised, as JSON. --weights reads the file, too.
"""

import json
import sys
from functools import partial
from pathlib import Path

import safetensors.torch
import torch
from tyro.conf import Positional

from recipe.command import run_tool
from recipe.errors import UserError
from recipe.files import whole_file
from recipe.record.checkpoint import (
    FORMAT,
    NETWORK,
    NORMALISATION,
    checkpoints_in,
    read_file,
    setting_in,
    state_in,
)
from recipe.record.folder import records


def checkpoint_of(run: Path) -> Path:
    """Return `run` if it is a checkpoint, else the checkpoint with the result of the run in that
    folder; UserError if there is none."""
    folder = run / "checkpoints"
    paths = [run, folder / "best.pt", *reversed(checkpoints_in(folder))]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        raise UserError(f"{run}: neither a checkpoint nor the folder of a run that has saved one")
    return path


def export(run: Positional[Path], file: Positional[Path]) -> list[str]:
    """Write the weights of a run; return a line about them.

    Args:
        run: A run's folder, or a checkpoint.
        file: The file to write; its name ends in .safetensors.
    """
    if file.suffix != ".safetensors":
        raise UserError(f"{file}: give it a name that ends in .safetensors, as its readers expect")
    path = checkpoint_of(run)
    try:
        with path.open("rb") as content:
            checkpoint = read_file(content, str(path))
        if not isinstance(checkpoint, dict) or checkpoint.get("format") != FORMAT:
            raise UserError(f"{path}: is not a checkpoint of this project")
        step, arch = checkpoint["progress"]["step"], str(checkpoint["config"]["arch"])
        # The weights that did better in the evaluation after this step; if there is none, the
        # model's.
        ranked = sorted(
            (line.top1, line.weights)
            for line in records(path.absolute().parent.parent, "eval")
            if line.step == step
        )
        whose = ranked[-1][1] if ranked else "model"
        state = state_in(checkpoint, str(path), [whose])
        # The format needs each tensor in memory of its own.
        state = {
            key: value.clone(memory_format=torch.contiguous_format) for key, value in state.items()
        }
        metadata = {"format": "pt", "arch": arch, "step": str(step), "weights": whose}
        metadata["classes"] = json.dumps(checkpoint.get("classes", []))
        for name in (*NETWORK, *NORMALISATION):
            metadata[name] = json.dumps(setting_in(checkpoint["config"], name))
        with whole_file(file) as out:
            out.write(safetensors.torch.save(state, metadata))
    except OSError as error:
        raise UserError(
            f"{error.filename or file}: cannot be read or written ({error.strerror})"
        ) from error
    return [f"{file}: {arch}, the weights of {whose} after step {step}, from {path}"]


main = partial(
    run_tool,
    "python -m recipe.record.export",
    export,
    __doc__,
    exit_code=1,
    interrupted="interrupted: nothing was written",
)


if __name__ == "__main__":
    sys.exit(main())
