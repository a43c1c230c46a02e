"""A whole data set is read, and all that is wrong with it is told."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from making import write_images
from test_images import noisy_jpeg

from recipe.data import prepare as check_images
from recipe.data.image_folder import Listing
from recipe.data.prepare import main, make_shards


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Nine images for training and three for validation."""
    write_images(tmp_path / "set" / "train", 3)
    write_images(tmp_path / "set" / "val", 1)
    return tmp_path / "set"


@pytest.fixture
def check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """check(folder, words): the exit code, and what was written to standard output and error."""

    def run(folder: Path, *words: str) -> tuple[int, str, str]:
        code = main(["check", str(folder), "--cache-dir", str(tmp_path / "cache"), *words])
        return code, *capsys.readouterr()

    return run


@pytest.mark.parametrize(("part", "count"), [("", 12), ("train", 9), ("val", 3)])
@pytest.mark.parametrize("as_shards", [False, True])
def test_a_good_set(
    root: Path, part: str, count: int, as_shards: bool, check: Callable[..., Any], tmp_path: Path
) -> None:
    if as_shards:
        make_shards(root, tmp_path / "shards", tmp_path / "cache")
        root = tmp_path / "shards"
    line = f"{root / part}: {count} images, 0 bad, 0 that may be damaged\n"
    assert check(root / part) == (0, line, "")
    told = {"images": count, "left_out": [], "bad": [], "suspect": []}
    code, out, err = check(root / part, "--json", "-")
    assert (code, json.loads(out), err) == (0, told, "")


def test_what_file_servers_keep_is_passed_over_and_what_is_left_out_is_told(
    root: Path, check: Callable[..., Any], tmp_path: Path
) -> None:
    """Beside train/ and val/ as well. The shards have what the folder's listing takes."""
    for file in ("lost+found/1.txt", "train/@eaDir/1.jpg", "train/a/@eaDir/1.jpg", "val/a/1.heic"):
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).touch()
    line = f"{root}/val: left out: 1 file(s) without a known suffix (1 .heic)"
    good = f"{root}: 12 images, 0 bad, 0 that may be damaged; {line}\n"
    assert check(root) == (0, good, "")
    assert json.loads(check(root, "--json", "-")[1])["left_out"] == [line]
    train, val = make_shards(root, tmp_path / "shards", tmp_path / "cache")
    assert train.endswith(" GB") and val.endswith(f" GB; {line.partition(': ')[2]}")
    assert check(tmp_path / "shards")[1].startswith(f"{tmp_path}/shards: 12 images, 0 bad")


def test_all_that_is_wrong_is_told(root: Path, check: Callable[..., Any], tmp_path: Path) -> None:
    """On the console, and as JSON."""
    wrong = {
        root / "train" / "a" / "1.png": ("bad", b"", "It has 0 bytes"),
        root / "train" / "b" / "0.png": ("suspect", noisy_jpeg(bytes(64)), "more than its pixels"),
        root / "val" / "c" / "0.png": ("bad", b"\x89PNG\r\n\x1a\n", "cannot be read"),
    }
    for file, (_, content, _) in wrong.items():
        file.write_bytes(content)
    code, out, err = check(root, "--json", str(tmp_path / "found.json"))
    assert (code, out) == (1, "")
    *lines, last = err.splitlines()
    assert last.startswith(
        f"python -m recipe.data.prepare: {root}: 12 images, 2 bad, 1 that may be damaged. "
    )
    told = json.loads((tmp_path / "found.json").read_text())
    assert told["images"] == 12
    reasons = {
        (kind, one["image"]): one["reason"] for kind in ("bad", "suspect") for one in told[kind]
    }
    assert reasons.keys() == {(kind, str(file)) for file, (kind, _, _) in wrong.items()}
    for file, (kind, _, words) in wrong.items():
        assert words in reasons[kind, str(file)]
        assert f"{kind}: {reasons[kind, str(file)]}" in lines
    assert len(lines) == 3
    code, out, _ = check(root, "--json", "-")
    assert (code, json.loads(out)) == (1, told)


def test_a_shard_that_changed(root: Path, check: Callable[..., Any], tmp_path: Path) -> None:
    make_shards(root, tmp_path / "shards", tmp_path / "cache")
    shard = tmp_path / "shards" / "val" / "val-000000.tar"
    content = bytearray(shard.read_bytes())
    content[600] ^= 1
    shard.write_bytes(content)
    code, _, err = check(tmp_path / "shards")
    assert code == 1 and "val-000000.tar: a/0.png: the shard holds other bytes" in err


@pytest.mark.parametrize(("one_in", "code"), [(9, 0), (10, 1)])
def test_as_many_suspect_images_as_in_training(
    one_in: int, code: int, root: Path, check: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_images, "ONE_IN", one_in)
    (root / "train" / "b" / "0.png").write_bytes(noisy_jpeg(bytes(64)))
    assert check(root)[0] == code


def test_what_is_no_set(tmp_path: Path, check: Callable[..., Any]) -> None:
    code, out, err = check(tmp_path / "nowhere")
    assert (code, out) == (1, "") and "no such folder" in err and err.count("\n") == 1


def test_json_that_cannot_be_written(root: Path, check: Callable[..., Any]) -> None:
    code, out, err = check(root, "--json", "/nowhere/found.json")
    assert (code, out) == (1, "")
    assert (
        err == "python -m recipe.data.prepare: --json /nowhere/found.json: cannot be written "
        "(No such file or directory)\n"
    )


def test_an_interruption_ends_it_soon(
    tmp_path: Path, check: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[int] = []

    def look(listing: Listing, index: int) -> None:
        looked.append(index)
        if index == 10:  # as Ctrl-C ends the wait for an image
            raise KeyboardInterrupt

    listing = Listing(tmp_path, ("a",), np.zeros(10**6, "S1"), np.zeros(10**6))
    monkeypatch.setattr(check_images, "open_images", lambda *given: listing)
    monkeypatch.setattr(check_images, "fault_of", look)
    code, out, err = check(tmp_path, "--json", str(tmp_path / "found.json"))
    assert (code, out, err) == (130, "", "\ninterrupted: start the same command again\n")
    assert len(looked) < 10**6 and not (tmp_path / "found.json").exists()
