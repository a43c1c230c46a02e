"""Files that are there whole or, as before, not at all."""

import os
from pathlib import Path

import pytest

from recipe.files import partial_name, replace_file


def test_a_file_is_whole_or_as_before(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    replace_file(path, "old")
    partial_name(path).symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, "new")
    assert path.read_text() == "old" and os.listdir(tmp_path) == [path.name]
    replace_file(path, "newer")
    assert path.read_text() == "newer" and os.listdir(tmp_path) == [path.name]


def test_a_partial_file_is_this_process_s_own(tmp_path: Path) -> None:
    name = partial_name(tmp_path / "best.pt").name
    assert name.startswith(".best.pt.") and name.endswith(f"-{os.getpid()}.partial")
