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


def read_proc(path: str | Path) -> str:
    """The text of a file in /proc, where the kernel writes names of any bytes, and may cut one off
    inside a character; "" if there is none."""
    return os.fsdecode(Path(path).read_bytes()) if os.path.exists(path) else ""


def replace_file(path: Path, text: str) -> None:
    """Write `path` whole or not at all, in UTF-8. A byte that is not, in a name, becomes \\udce9,
    say, which JSON reads back."""
    with whole_file(path) as file:
        file.write(text.encode(errors="backslashreplace"))


def write_json(path: Path, value: dict[str, Any], allow_nan: bool = True) -> None:
    """Write `path` whole or not at all, as JSON for readers; ValueError for a NaN, which JSON does
    not have, unless it is allowed."""
    replace_file(path, json.dumps(value, indent=2, allow_nan=allow_nan) + "\n")


def json_for_readers(value: Any) -> str:
    """JSON for other programs: NaN and infinity, which JSON lacks, become null."""
    return json.dumps(
        json.loads(json.dumps(value), parse_constant=lambda _: None), indent=2, ensure_ascii=False
    )
