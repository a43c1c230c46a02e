"""All small files of a record in one readable file: runs.jsonl, with a line for each folder.

    {"folder": "block-1/ddp-torchrun-1", "command.txt": "torchrun ...", "summary.json": {...},
     "metrics.jsonl": [{...}, ...]}

Runs write open folders; keep.py packs them for results/. `read_text` reads files of both forms.
"""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from recipe.errors import UserError

PACKED = "runs.jsonl"
Lines = dict[str, dict[str, Any]]


def lines_of(texts: dict[Path, str]) -> str:
    """Return the lines of runs.jsonl for files, given their texts by path within the record."""
    folders: dict[str, dict[str, Any]] = {}
    for path, text in sorted(texts.items()):
        folder = path.parent.as_posix()
        folders.setdefault(folder, {"folder": folder})[path.name] = content(path.suffix, text)
    return "".join(f"{json.dumps(files, ensure_ascii=False)}\n" for files in folders.values())


def content(suffix: str, text: str) -> Any:
    """Return the content of a file: a JSON object, or a list of the objects in its lines; for any
    other file, or an incomplete one, its text."""
    try:
        if suffix == ".jsonl":
            return [json.loads(line) for line in text.splitlines()]
        return dict(json.loads(text)) if suffix == ".json" else text
    except (TypeError, ValueError, RecursionError):
        return text


def exists(path: Path) -> bool:
    """Return whether a record has this file, open or packed."""
    return path.exists() or path.name in files_in(path.parent)


def read_text(path: Path) -> str:
    """Return the text of a record's file, open or packed; UserError if it cannot be read."""
    files = {} if path.exists() else files_in(path.parent)
    if path.name not in files:
        # JSON escapes the bytes of a name that are not UTF-8; a command contains them as they are.
        is_json = path.suffix in (".json", ".jsonl")
        try:
            return path.read_text("utf-8", "strict" if is_json else "surrogateescape")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", error)
            raise UserError(f"{path} cannot be read: {reason}") from None
    value = files[path.name]
    if isinstance(value, str):
        return value
    lines = value if path.suffix == ".jsonl" and isinstance(value, list) else [value]
    return "".join(f"{json.dumps(line)}\n" for line in lines)


def file_of(path: Path) -> Path:
    """Return the file that a person must open to see this one: itself, or runs.jsonl."""
    packs = (record / PACKED for record in path.parents if (record / PACKED).exists())
    return path if path.exists() else next(packs, path)


def find(record: Path, pattern: str) -> list[Path]:
    """Return the files of a record whose paths within it match a pattern, open or packed."""
    inside = [Path(folder, name) for folder, files in folders(record).items() for name in files]
    return [*record.glob(pattern), *(record / name for name in inside if name.match(pattern))]


def files_in(folder: Path) -> dict[str, Any]:
    """Return the packed files of a folder, by name; empty if it is not packed."""
    records = [record for record in (folder, *folder.parents) if (record / PACKED).exists()]
    files = [folders(record).get(folder.relative_to(record).as_posix()) for record in records]
    return next(filter(None, files), {})


def folders(record: Path) -> Lines:
    """Return the packed files of a record, by folder and name; UserError names a line that cannot
    be read."""
    path = record / PACKED
    return read_lines(path, path.stat().st_mtime_ns) if path.exists() else {}


@lru_cache(maxsize=4)
def read_lines(path: Path, changed_ns: int) -> Lines:
    """Read runs.jsonl. `changed_ns` makes the cache read it again after a change."""
    lines: Lines = {}
    try:
        for line in path.read_bytes().splitlines():
            files = json.loads(line)
            if lines.setdefault(Path(files["folder"]).as_posix(), files) is not files:
                raise ValueError("two lines have the same folder")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        number = len(lines) + 1
        raise UserError(f"{path}, line {number}, holds no folder: {error!r}") from None
    return lines
