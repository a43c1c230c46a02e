"""Files that are replaced as a whole: a failed write leaves the earlier file, or none."""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

PARTIAL: set[Path] = set()  # temporary files that this process is writing


def partial_name(path: Path) -> Path:
    """Return a temporary name beside `path` that no other process uses, on any host."""
    return path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}.partial")


@contextmanager
def whole_file(path: Path, sync: bool = False) -> Iterator[IO[bytes]]:
    """Open a temporary file that replaces `path` when the body has ended without an error. With
    `sync` it also survives a power cut."""
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
    """Remove the files that this process has written only in part; for its end."""
    for temporary in list(PARTIAL):
        temporary.unlink(missing_ok=True)


def sync_folder(path: Path) -> None:
    """Make renames in a folder survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_proc(path: str | Path) -> str:
    """Return the text of a file in /proc; "" if there is none. Names in it may have any bytes, and
    the kernel may cut one off inside a character."""
    return os.fsdecode(Path(path).read_bytes()) if os.path.exists(path) else ""


def control_groups(
    controller: str,
    membership: Path = Path("/proc/self/cgroup"),
    root: Path = Path("/sys/fs/cgroup"),
) -> Iterator[Path]:
    """Yield the folders of this process's control group (v2 or v1) for "cpu", "memory" or "pids",
    and of its parents. Each of them may limit the process."""
    for line in read_proc(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or controller in controllers.split(","):
            top = root / controller if controllers else root
            inner = top / path.strip("/")
            yield from (group for group in (inner, *inner.parents) if group.is_relative_to(top))


def replace_file(path: Path, text: str) -> None:
    """Write `path` whole or not at all, in UTF-8. A byte of a name that is not UTF-8 becomes an
    escape such as \\udce9, which JSON reads back."""
    with whole_file(path) as file:
        file.write(text.encode(errors="backslashreplace"))


def write_json(path: Path, value: dict[str, Any], allow_nan: bool = True) -> None:
    """Write `path` whole or not at all, as indented JSON; ValueError for a NaN, which JSON does not
    have, unless it is allowed."""
    replace_file(path, json.dumps(value, indent=2, allow_nan=allow_nan) + "\n")


def json_for_readers(value: Any) -> str:
    """Return JSON for other programs: NaN and infinity, which JSON lacks, become null."""
    return json.dumps(
        json.loads(json.dumps(value), parse_constant=lambda _: None), indent=2, ensure_ascii=False
    )
