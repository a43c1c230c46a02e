"""Sorting ImageNet's flat validation folder: all is checked first, and it can be resumed."""

import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import scipy.io

from recipe.data.image_folder import list_images
from recipe.errors import UserError
from recipe.prepare_val import main, make_plan, read_labels

CLASSES = ["n01440764", "n01443537", "n01484850"]
LABELS = {f"ILSVRC2012_val_{i:08}": CLASSES[i * 7 % 3] for i in range(1, 11)}


def write_table(folder: Path) -> Path:
    file = folder / "LOC_val_solution.csv"
    rows = [f"{image},{name} 85 1 499 272 {name} 3 4 5 6 " for image, name in LABELS.items()]
    file.write_text("\n".join(["ImageId,PredictionString", *reversed(rows)]) + "\n")
    return file


def write_devkit(folder: Path) -> Path:
    """As ImageNet's: the struct's IDs are not in the order of the class names."""
    ids = {CLASSES[2]: 1, CLASSES[0]: 2, CLASSES[1]: 3}
    data = folder / "ILSVRC2012_devkit_t12" / "data"
    data.mkdir(parents=True)
    synsets = np.zeros((4, 1), dtype=[("ILSVRC2012_ID", "O"), ("WNID", "O"), ("words", "O")])
    for row, (name, id_) in enumerate([*ids.items(), ("n00001740", 4)]):  # the last: no leaf
        synsets[row, 0] = (id_, name, "a fish")
    scipy.io.savemat(data / "meta.mat", {"synsets": synsets})
    lines = [f"{ids[name]}\n" for name in LABELS.values()]
    (data / "ILSVRC2012_validation_ground_truth.txt").write_text("".join(lines))
    return data.parent


def write_packed_devkit(folder: Path) -> Path:
    devkit = write_devkit(folder)
    file = folder / "ILSVRC2012_devkit_t12.tar.gz"
    with tarfile.open(file, "w:gz") as archive:
        archive.add(devkit, devkit.name)
    return file


@pytest.fixture
def val(tmp_path: Path) -> Path:
    folder = tmp_path / "val"
    folder.mkdir()
    for image in LABELS:
        (folder / f"{image}.JPEG").write_text(image)
    return folder


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return write_table(tmp_path)


def tree(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }


SORTED = {f"{name}/{image}.JPEG": image for image, name in LABELS.items()}


def refused(val: Path, labels: Path, capsys: pytest.CaptureFixture[str]) -> str:
    before = tree(val)
    assert main([str(val), "--labels", str(labels)]) == 1
    assert tree(val) == before, "nothing may be moved"
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1
    return message


@pytest.mark.parametrize("write", [write_table, write_devkit, write_packed_devkit])
def test_each_kind_of_label_file(
    val: Path, tmp_path: Path, write: Callable[[Path], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    labels = write(tmp_path)
    assert read_labels(labels) == LABELS
    assert main([str(val), "--labels", str(labels)]) == 0
    assert tree(val) == SORTED
    output = capsys.readouterr().out
    assert output == (f"{val}: moved 10 images, 0 were in place; 3 classes, 0 images missing\n")
    assert list_images(val, tmp_path / "cache").classes == tuple(CLASSES)


def test_as_a_command(val: Path, table: Path) -> None:
    command = [sys.executable, "-m", "recipe.prepare_val", str(val), "--labels", str(table)]
    dry = subprocess.run([*command, "--dry-run"], capture_output=True, text=True, check=True)
    assert "would move 10 images" in dry.stdout
    assert sorted(tree(val)) == sorted(f"{image}.JPEG" for image in LABELS)
    assert not [path for path in val.iterdir() if path.is_dir()]
    subprocess.run(command, check=True)
    assert tree(val) == SORTED
    missing = subprocess.run([*command[:-1], "/no/such"], capture_output=True, text=True)
    assert missing.returncode == 1
    assert missing.stderr.startswith("error: /no/such: cannot be read (No such file")


@pytest.mark.parametrize("num_renames", range(len(LABELS)))
def test_interrupted_and_resumed(
    val: Path,
    table: Path,
    num_renames: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rename, left = os.rename, iter(range(num_renames))

    def interrupted(source: Path, target: Path) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", interrupted)
        assert main([str(val), "--labels", str(table)]) == 130
    assert "the same command resumes" in capsys.readouterr().err
    assert main([str(val), "--labels", str(table)]) == 0
    assert tree(val) == SORTED
    assert f"{num_renames} were in place" in capsys.readouterr().out


def test_again_when_all_is_done(val: Path, table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for moved, in_place in ((10, 0), (0, 10)):
        assert main([str(val), "--labels", str(table)]) == 0
        assert f"moved {moved} images, {in_place} were in place" in capsys.readouterr().out
    assert tree(val) == SORTED


def test_missing_images(val: Path, table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (val / "ILSVRC2012_val_00000004.JPEG").unlink()
    message = refused(val, table, capsys)
    assert "1 of 10 labelled images are missing (ILSVRC2012_val_00000004)" in message
    assert main([str(val), "--labels", str(table), "--allow-missing"]) == 0
    assert len(tree(val)) == 9
    assert "1 images missing" in capsys.readouterr().out


def test_image_without_label(val: Path, table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (val / "ILSVRC2012_val_00049999.JPEG").touch()
    assert "without a label: ILSVRC2012_val_00049999" in refused(val, table, capsys)


def test_image_in_both_places(val: Path, table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image, name = next(iter(LABELS.items()))
    (val / name).mkdir()
    (val / name / f"{image}.JPEG").touch()
    assert f"both in it and in a class folder: {image}" in refused(val, table, capsys)


def test_image_in_the_wrong_class(
    val: Path, table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image, name = next(iter(LABELS.items()))
    wrong = next(other for other in CLASSES if other != name)
    (val / wrong).mkdir()
    (val / f"{image}.JPEG").rename(val / wrong / f"{image}.JPEG")
    assert f"labels say: {image}" in refused(val, table, capsys)


def test_file_where_a_class_folder_must_be(
    val: Path, table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (val / CLASSES[0]).touch()
    assert "a file where a class folder must be" in refused(val, table, capsys)


def test_folder_that_is_not_the_validation_folder(tmp_path: Path, table: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        make_plan(tmp_path / "none", LABELS)
    with pytest.raises(UserError, match="holds no ILSVRC2012_val"):
        make_plan(tmp_path, LABELS)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"ImageId,PredictionString\n",
        b"a,b\n1,2\n",
        b"ImageId,PredictionString\nILSVRC2012_val_00000001\n",
        b"ImageId,PredictionString\nILSVRC2012_val_00000001, \n",
        b"ImageId,PredictionString\nILSVRC2012_val_00000001,cat 1 2 3 4\n",
        b"ImageId,PredictionString\n../../x,n01440764 1 2 3 4\n",
        b"ImageId,PredictionString\nILSVRC2012_val_00000001,n01440764/../../x 1\n",
        b"\xff\xfe\x00\x01",
    ],
)
def test_wrong_table(
    val: Path, tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "wrong.csv"
    file.write_bytes(content)
    assert "LOC_val_solution.csv" in refused(val, file, capsys)


def test_wrong_devkit(val: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "has no meta.mat" in refused(val, val, capsys)
    packed = write_packed_devkit(tmp_path)
    content = packed.read_bytes()
    for length in range(10, len(content) - 10, 97):
        packed.write_bytes(content[:length])
        refused(val, packed, capsys)
    with tarfile.open(packed, "w:gz") as archive:
        archive.add(val, "val")
    assert "lacks meta.mat" in refused(val, packed, capsys)
    (tmp_path / "ILSVRC2012_devkit_t12" / "data" / "meta.mat").write_bytes(b"\0" * 999)
    message = refused(val, tmp_path / "ILSVRC2012_devkit_t12", capsys)
    assert "development kit cannot be read" in message


def test_move_that_fails_says_how_to_go_on(
    val: Path, table: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(source: Path, target: Path) -> None:
        raise OSError(122, "Disk quota exceeded", str(source))

    monkeypatch.setattr(os, "rename", full)
    assert "the same command again" in refused(val, table, capsys)
