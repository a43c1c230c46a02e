"""The trainers' sources: what they import of this project, and its digest."""

import ast
import hashlib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OURS = ("recipe", "ddp_train", "horovod_train")
PROGRAMS = ("ddp_train/train.py", "horovod_train/train.py", "baselines/*.py")


def trainers_sha256() -> str:
    """Return the digest of all that a trainer runs: runs of different code are not mixed.

    By what is imported, not by folder: a tool beside the recipe is no part of a training.
    """
    digest = hashlib.sha256()
    for path in trainers_sources():
        digest.update(f"{path.relative_to(ROOT)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def trainers_sources() -> list[Path]:
    """Return what trains, and each module of this project that they import, at whatever depth."""
    found = set[Path]()
    waiting = [path for pattern in PROGRAMS for path in ROOT.glob(pattern)]
    while waiting:
        path = waiting.pop()
        if path not in found and path.is_file():
            found.add(path)
            names = imported_names(path.read_bytes())
            waiting += [(ROOT / name.replace(".", "/")).with_suffix(".py") for name in names]
    return sorted(found)


@cache
def imported_names(source: bytes) -> list[str]:
    """Return what a source imports of this project: modules, and names of modules that may be
    modules themselves. Kept, as the digest is asked for at each run."""
    names = list[str]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return [name for name in names if name.split(".")[0] in OURS]
