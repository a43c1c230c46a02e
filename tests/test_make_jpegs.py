"""The files that stand in for ImageNet's when the input is measured."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

from PIL import Image

from compare.plan.environment import ROOT


def make(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools/make_jpegs.py"), str(folder), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def test_the_folder_is_one_to_train_on(tmp_path: Path) -> None:
    done = make(tmp_path / "jpegs", "--images", "20", "--classes", "4")
    assert done.returncode == 0, done.stderr
    files = sorted(tmp_path.glob("jpegs/*/*/*.jpg"))
    places = Counter(file.parent.relative_to(tmp_path / "jpegs").as_posix() for file in files)
    assert places == {
        f"{part}/00{i}": n for part, n in (("train", 5), ("val", 1)) for i in range(4)
    }
    # As dear to read and decode as a photograph.
    assert 95_000 < sum(file.stat().st_size for file in files) / len(files) < 120_000
    assert len({file.read_bytes() for file in files}) == 24
    with Image.open(files[0]) as image:
        assert (image.size, image.mode) == ((500, 375), "RGB")
    again = make(tmp_path)
    assert (again.returncode, again.stderr) == (
        1,
        f"tools/make_jpegs.py: {tmp_path}: File exists\n",
    )
