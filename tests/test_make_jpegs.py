"""The files that stand in for ImageNet's when the input is measured."""

import subprocess
import sys
from pathlib import Path

from PIL import Image

from compare.plan.sources import ROOT


def make(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools/make_jpegs.py"), str(folder), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def test_the_folder_is_one_to_train_on(tmp_path):
    done = make(tmp_path / "jpegs", "--images", "20", "--classes", "4")
    assert done.returncode == 0, done.stderr
    files = {part: sorted(tmp_path.glob(f"jpegs/{part}/*/*.jpg")) for part in ("train", "val")}
    assert {part: len(found) for part, found in files.items()} == {"train": 20, "val": 4}
    assert all(len({file.parent.name for file in found}) == 4 for found in files.values())
    mean = sum(file.stat().st_size for file in files["train"]) / 20
    assert 95_000 < mean < 120_000  # as dear to read and decode as a photograph
    contents = {file.read_bytes() for found in files.values() for file in found}
    assert len(contents) == 24
    with Image.open(files["train"][0]) as image:
        assert (image.size, image.mode) == ((500, 375), "RGB")


def test_a_folder_that_is_there_is_left_alone(tmp_path):
    done = make(tmp_path)
    assert done.returncode == 1
    assert done.stderr == f"tools/make_jpegs.py: {tmp_path}: File exists\n"
