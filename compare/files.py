"""Files that are there whole or not at all, and names for new folders."""

import datetime
import json
from pathlib import Path
from typing import Any


def replace_file(path: Path, text: str) -> None:
    """Write a file so that it is there whole or, as before, not at all, whatever happens."""
    draft = path.with_name(f".{path.name}.draft")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def write_json(path: Path, value: dict[str, Any]) -> None:
    replace_file(path, json.dumps(value, indent=2) + "\n")


def utc_stamp() -> str:
    """Return the time as a part of a folder's name: 20260131-120000. Such names sort by age."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%d-%H%M%S")
