"""Read what two runs, or the ranks of one, computed step by step: pairs of tensors."""

import json
import re
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from compare.evidence import packed
from compare.evidence.run_folder import read_object
from recipe.errors import UserError

# The arrays of a trace, in the order in which a step computes them; buffers never feed back into
# training, and so cannot be the cause of anything.
KINDS = ("loss", "gradient", "weight", "buffer")
READ_ERRORS = (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error)


@dataclass(frozen=True)
class Pair:
    """One tensor in both runs; None where a run lacks it."""

    step: int
    rank: int  # -1: a mean over all ranks
    kind: str
    layer: str
    position: int  # in the file, which has the order of the forward pass
    a: np.ndarray | None
    b: np.ndarray | None


def trace_files(run: Path) -> dict[int, dict[int, Path]]:
    """Return the files of a run's trace by rank and step."""
    files: dict[int, dict[int, Path]] = {}
    for path in run.glob("trace/rank-*/step-*.npz"):
        rank, step = re.fullmatch(r"rank-(\d+)", path.parent.name), re.findall(r"\d+", path.stem)
        if rank and step:
            files.setdefault(int(rank[1]), {})[int(step[0])] = path
    return files


def open_trace(path: Path) -> Any:
    """Open one step's arrays, each of which is read when it is asked for."""
    try:
        return np.load(path)
    except READ_ERRORS as error:
        raise unreadable(path, error) from None


def read_array(arrays: Any, name: str, path: Path) -> np.ndarray | None:
    """Return one array of an opened trace; None if there is no such."""
    if name not in arrays.files:
        return None
    try:
        return np.asarray(arrays[name])
    except READ_ERRORS as error:
        raise unreadable(path, error) from None


def unreadable(path: Path, error: Exception) -> UserError:
    return UserError(
        f"{path} cannot be read ({error}): it is damaged, or no trace; train again with "
        "--tensor-steps"
    )


def file_pairs(
    step: int, rank: int, path_a: Path, path_b: Path, kinds: tuple[str, ...]
) -> Iterator[Pair]:
    """Yield the tensors of one step of one rank, in the order of the files."""
    with open_trace(path_a) as a, open_trace(path_b) as b:
        for position, name in enumerate(dict.fromkeys([*a.files, *b.files])):
            kind, _, layer = name.partition("/")
            if kind in kinds:
                arrays = read_array(a, name, path_a), read_array(b, name, path_b)
                yield Pair(step, rank, kind, layer, position, *arrays)


def trace_pairs(a: dict[int, dict[int, Path]], b: dict[int, dict[int, Path]]) -> Iterator[Pair]:
    """Yield the tensors of the ranks and steps that two traces share, step by step."""
    ranks = sorted(a.keys() & b.keys())
    for step in sorted({step for rank in ranks for step in a[rank].keys() & b[rank].keys()}):
        for rank in ranks:
            if step in a[rank] and step in b[rank]:
                yield from file_pairs(step, rank, a[rank][step], b[rank][step], KINDS)


def rank_pairs(files: dict[int, dict[int, Path]]) -> Iterator[Pair]:
    """Yield the tensors of each rank beside those of the first; losses are each rank's own."""
    first, *others = sorted(files)
    for step in sorted(files[first]):
        for rank in others:
            if step in files[rank]:
                kinds = tuple(kind for kind in KINDS if kind != "loss")
                yield from file_pairs(step, rank, files[first][step], files[rank][step], kinds)


def metric_pairs(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> Iterator[Pair]:
    """Yield loss and top-1 of the steps that two metrics.jsonl share: means over all ranks."""
    of_b = {line["step"]: line for line in b}
    for line in a:
        if other := of_b.get(line["step"]):
            for position, kind in enumerate(("loss", "top1")):
                values = (np.float64(line[kind]), np.float64(other[kind]))
                yield Pair(line["step"], -1, kind, "", position, *map(np.asarray, values))


def read_steps(run: Path) -> list[dict[str, Any]]:
    """Return the step lines of a run's metrics.jsonl; its last line may be half written."""
    path = run / "metrics.jsonl"
    try:
        texts = packed.read_text(path).splitlines()
    except OSError as error:
        raise UserError(
            f"{run}: no run folder: it holds neither trace/ nor a readable metrics.jsonl "
            f"({error.strerror})"
        ) from None
    steps = []
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
            if line["kind"] == "step":
                float(line["loss"]), float(line["top1"])
                steps.append(line | {"step": int(line["step"])})
        except (ValueError, KeyError, TypeError):
            if number < len(texts):
                raise UserError(
                    f"{path}, line {number} is no record of a step: {text:.80}"
                ) from None
    return steps


def read_if_there(path: Path) -> dict[str, Any]:
    """Return a JSON file of a run; {} if there is none, as of a run that has not ended."""
    return read_object(path) if packed.exists(path) else {}
