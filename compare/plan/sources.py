"""The trainers' sources, and their digest."""

import hashlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("recipe", "ddp_train", "horovod_train", "baselines")  # with all that trains


def trainers_sha256() -> str:
    """Return the digest of the trainers' sources: runs of different code are not mixed."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        digest.update(f"{path.relative_to(ROOT)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def path_from_here(name: str) -> str:
    """Return the path of a file of this project as a person would type it in this folder."""
    path = ROOT / name
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
