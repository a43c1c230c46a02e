"""Files that are there whole or, as before, not at all, whatever happens while they are written."""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

PARTIAL: set[Path] = set()  # temporary files that this process is writing


def partial_name(path: Path) -> Path:
    """A temporary name beside `path` that no other process has, on any host."""
    return path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}.partial")


@contextmanager
def whole_file(path: Path, sync: bool = False) -> Iterator[IO[bytes]]:
    """Open a temporary file that takes `path`'s place when the body has ended well; `sync`: so that
    it is whole and there after a power cut, too."""
    temporary = partial_name(path)
    PARTIAL.add(temporary)
    try:
        with temporary.open("wb") as file:
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
        if sync:
            sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)
        PARTIAL.discard(temporary)


def remove_partial_files() -> None:
    """Remove what this process, which ends now, has not written whole."""
    for temporary in list(PARTIAL):
        temporary.unlink(missing_ok=True)


def sync_folder(path: Path) -> None:
    """Make what was renamed in there survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, text: str) -> None:
    """Write `path` whole or not at all."""
    with whole_file(path) as file:
        file.write(text.encode())


def write_json(path: Path, value: dict[str, Any], allow_nan: bool = True) -> None:
    """Write `path` whole or not at all, as JSON for readers; ValueError for a NaN, which JSON does
    not have, unless it is allowed."""
    replace_file(path, json.dumps(value, indent=2, allow_nan=allow_nan) + "\n")
