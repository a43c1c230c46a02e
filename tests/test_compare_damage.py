"""Records that were damaged or changed: the chain names the place, nothing is decided by what is
left, and nothing ends with a traceback."""

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from records import a_plan, edit, make_turns
from test_compare_keep import kept_of, words
from test_compare_records import make_comparison
from test_compare_turns import by_turns

from compare import keep, report
from compare.evidence import packed
from compare.evidence.records import load_comparison
from compare.evidence.verdicts import judge

NAMES, TURNS = ("ddp-mpi", "horovod-mpi"), Path("turns/2-workers")
BLOCK, RUN = TURNS / "block-2/block.json", Path("block-1/ddp-mpi-2/outcome.json")
SIDE = BLOCK.parent / "ddp-mpi/0/run"
DEEP = "[" * 2000 + "]" * 2000


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    return by_turns(tmp_path_factory.mktemp("recorded") / "compare-1", blocks=5, names=NAMES)


@pytest.fixture
def folder(tmp_path, recorded):
    return Path(shutil.copytree(recorded, tmp_path / "runs/compare-1"))


def decisions(folder: Path) -> set[str]:
    return {verdict.decision for verdict in judge(load_comparison(folder))}


def change(path: Path, made: Callable[[dict[str, Any]], object]) -> None:
    """Change what a JSON file holds, and leave its seal as it was."""
    record = json.loads(path.read_text())
    made(record)
    path.write_text(json.dumps(record))


def unreadable(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of a report that names what cannot be read."""
    capsys.readouterr()
    assert report.main([str(folder), "--no-html"]) == 0
    [line] = [one for one in capsys.readouterr().out.splitlines() if "unreadable" in one]
    return line


def copy_of_another(folder: Path, place: Path) -> None:
    """Put the same block of another comparison there: by its plan it is another one."""
    other = by_turns(folder.parent / "compare-2", blocks=5, names=NAMES)
    edit(other / "plan.json", order_seed=4)
    shutil.rmtree(folder / place)
    shutil.copytree(other / place, folder / place)


def copy_of(folder: Path, source: str, target: str) -> None:
    shutil.rmtree(folder / TURNS / target)
    shutil.copytree(folder / TURNS / source, folder / TURNS / target)


# What is done to a comparison, which file is named, and what is said of it.
BROKEN: dict[str, tuple[Callable[[Path], object], Path, str]] = {
    "a figure": (
        lambda folder: change(folder / BLOCK, lambda b: b["turns"][3].update(seconds=1.0)),
        BLOCK,
        "changed since it was measured",
    ),
    "its digest": (
        lambda folder: change(folder / BLOCK, lambda b: b.update(digest="")),
        BLOCK,
        "changed since it was measured",
    ),
    "no seal": (
        lambda folder: change(folder / BLOCK, lambda b: b.pop("before")),
        BLOCK,
        "run.py has not sealed it",
    ),
    "what a side says": (
        lambda folder: change(folder / SIDE / "config.json", lambda one: one.update(lr=1)),
        BLOCK,
        "these files beside it were changed since it was measured: ddp-mpi/0/run/config",
    ),
    "a side's file is missing": (
        lambda folder: (folder / SIDE / "environment.json").unlink(),
        SIDE / "environment.json",
        "No such file",
    ),
    "dropped": (
        lambda folder: shutil.rmtree(folder / BLOCK.parent),
        TURNS / "block-3/block.json",
        "the block before it is missing, or is another one",
    ),
    "copied": (
        lambda folder: copy_of(folder, "block-1", "block-2"),
        BLOCK,
        "it was measured as turns/2-workers/block-1 of its comparison",
    ),
    "of another comparison": (
        lambda folder: copy_of_another(folder, BLOCK.parent),
        BLOCK,
        "under another plan",
    ),
    "the plan": (
        lambda folder: change(folder / "plan.json", lambda plan: plan.update(margin=0.5)),
        TURNS / "block-1/block.json",
        "under another plan, or the plan was changed afterwards",
    ),
    "an end taken back": (
        lambda folder: change(
            folder / "plan.json",
            lambda plan: (plan.update(blocks=3), plan["ends"][0].update(blocks=3)),
        ),
        TURNS / "block-1/block.json",
        "under another plan, or the plan was changed afterwards",
    ),
    "empty": (lambda folder: (folder / BLOCK).write_text(""), BLOCK, "is not a JSON object"),
    "a list": (lambda folder: (folder / BLOCK).write_text("[]"), BLOCK, "is not a JSON object"),
    "deep": (lambda folder: (folder / BLOCK).write_text(DEEP), BLOCK, "is not a JSON object"),
    "bytes": (lambda folder: (folder / BLOCK).write_bytes(b'"\xff"'), BLOCK, "can't decode byte"),
    "a folder": (
        lambda folder: ((folder / BLOCK).unlink(), (folder / BLOCK).mkdir()),
        BLOCK,
        "Is a directory",
    ),
}


@pytest.mark.parametrize("damage", BROKEN)
def test_a_broken_chain_is_one_line_and_decides_nothing(damage, folder, capsys):
    assert decisions(folder) == {"faster"}
    made, file, message = BROKEN[damage]
    made(folder)
    if "the plan was changed" in message:  # by which all was measured
        assert report.main([str(folder), "--no-html"]) == 1
        assert message in capsys.readouterr().err
        return
    assert decisions(folder) == {"undecided"}
    line = unreadable(folder, capsys)
    assert str(folder / file) in line and message in line


def test_a_plan_may_get_a_later_end_and_its_blocks_stay_good(folder):
    first = json.loads((folder / "plan.json").read_text())["ends"][0]
    plan = {"blocks": 9, "ends": [first, {**first, "blocks": 9}]}
    change(folder / "plan.json", lambda told: told.update(plan))
    comparison = load_comparison(folder)
    assert comparison.damaged_blocks == [] and comparison.confidence == 0.975
    assert decisions(folder) == {"undecided"}, "5 of 9 blocks"
    change(folder / "plan.json", lambda told: told.update(blocks=5))
    with pytest.raises(ValueError, match="differ from the last entry of ends"):
        load_comparison(folder)


@pytest.mark.parametrize("name", ["block-5.failed-1", "block-x", "block-0"])
def test_a_folder_of_another_name_is_no_block(name, folder):
    shutil.copytree(folder / BLOCK.parent, folder / TURNS / name)
    after = load_comparison(folder)
    assert after.damaged_blocks == [] and len(after.blocks("", 2)) == 5


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda b: b["turns"][3].update(purpose="disturbed"), "no other process had disturbed it"),
        (lambda b: b["turns"][3].update(images=7), "has 7 images, but its steps have 128"),
        (lambda b: b["turns"][2]["phases"].pop("data"), "do not all have the same phases"),
        (lambda b: b["turns"][3].update(seconds=0), "seconds = 0"),
    ],
)
def test_an_honest_mistake_is_found_under_a_whole_seal(made, message, folder, capsys):
    block = json.loads((folder / BLOCK).read_text())
    made(block)
    edit(folder / BLOCK, **block)
    assert decisions(folder) == {"undecided"}
    assert message in unreadable(folder, capsys)


@pytest.mark.parametrize("place", [BLOCK, SIDE / "environment.json"])
def test_what_cannot_be_read_is_one_line(place, folder, capsys):
    (folder / place).unlink()
    (folder / place).mkdir()
    assert f"{folder / place} cannot be read: Is a directory" in unreadable(folder, capsys)


def cut_a_line(path: Path) -> None:
    """Lose the end of a line in the middle, as of a file of which a block was lost."""
    lines = path.read_text().splitlines()
    at = len(lines) // 2
    lines[at] = lines[at][: len(lines[at]) // 2]
    path.write_text("\n".join(lines))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut in half": lambda path: path.write_text(path.read_text()[: path.stat().st_size // 2]),
    "a line cut": cut_a_line,
    "empty": lambda path: path.write_text(""),
    "bytes": lambda path: path.write_bytes(b'{"\xff": 1}\n'),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}
RECORD_FILES = (
    "plan.json",
    "block-1/ddp-mpi-2/outcome.json",
    "block-1/ddp-mpi-2/config.json",
    "block-1/ddp-mpi-2/environment.json",
    "block-1/ddp-mpi-2/summary.json",
    "block-1/ddp-mpi-2/metrics.jsonl",
    str(BLOCK),
    str(SIDE / "config.json"),
    str(SIDE / "environment.json"),
)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", RECORD_FILES)
def test_each_file_that_is_damaged_is_named_once(file, damage, folder, capsys):
    """On the terminal and on the page: what the page reads was read before it names damage."""
    DAMAGES[damage](folder / file)
    code = report.main([str(folder)])
    told = capsys.readouterr()
    lines = [line for line in (told.out + told.err).splitlines() if str(folder / file) in line]
    assert len(lines) == 1 and (file == "plan.json") == (code == 1)
    if code == 0:
        page = (folder / "report.html").read_text()
        assert page.count(f"unreadable: {folder / file}") == 1


def test_the_list_of_a_records_files_is_whole(folder):
    """But for what no report reads: what a run printed. (What started it is any text.)"""
    there = {path.name for path in folder.rglob("*") if path.is_file()}
    assert there - {Path(file).name for file in RECORD_FILES} == {"output.log", "command.txt"}


LINES: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "cut": lambda lines: [*lines[:-1], lines[-1][:40]],
    "no object": lambda lines: [*lines, b"[1]"],
    "no folder": lambda lines: [*lines, b'{"block.json": {}}'],
    "a folder again": lambda lines: [*lines, lines[2]],
    "not UTF-8": lambda lines: [*lines, b'{"folder": "\xff"}'],
    "deep": lambda lines: [*lines, DEEP.encode()],
}


@pytest.mark.parametrize("damage", LINES)
def test_a_damaged_line_of_a_packed_record_is_one_message(damage, folder, refusal):
    kept = kept_of(folder)
    assert decisions(kept) == {"faster"}
    path = kept / packed.PACKED
    path.write_bytes(b"\n".join(LINES[damage](path.read_bytes().splitlines())))
    os.utime(path, (1, 1))  # what is known of a file goes by the time of its change
    assert f"{path}, line " in refusal(report.main, [str(kept)], code=1)
    path.unlink()
    path.mkdir()
    assert "cannot be read: Is a directory" in refusal(report.main, [str(kept)], code=1)


def test_a_changed_record_is_not_kept(folder, tmp_path, refusal):
    change(folder / RUN, lambda one: one.update(seconds=1))
    told = refusal(keep.main, words(folder, tmp_path / "results"))
    assert "not kept" in told and str(RUN) in told


# A value in the place of each field of plan.json, as JSON; None: the field is missing.
VALUES = (
    "null",
    '""',
    "-1",
    "0",
    "[]",
    "{}",
    DEEP,
    '"text"',
    "[null]",
    '{"a": null}',
    "true",
    "NaN",
    "1e400",
    "9" * 30,
    "9" * 400,
    None,
)


def fields_of(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the places of all that a JSON value holds; of a list its first and last."""
    if at:
        yield at
    found = value if isinstance(value, dict) else {}
    if isinstance(value, list) and value:
        found = {0: value[0], len(value) - 1: value[-1]}
    for key, inner in found.items():
        yield from fields_of(inner, (*at, key))


def with_value(original: str, at: tuple[Any, ...], value: str | None) -> str:
    record = inner = json.loads(original)
    for key in at[:-1]:
        inner = inner[key]
    if value is None:
        del inner[at[-1]]
    else:
        inner[at[-1]] = "HERE"
    return json.dumps(record).replace('"HERE"', value or "")


@pytest.mark.parametrize("file", ["plan.json", "block-1/ddp-torchrun-1/outcome.json"])
def test_a_record_of_any_shape_is_no_traceback(file, tmp_path, capsys):
    """Each field in turn: the report is made, or one message says which file is to blame."""
    folder = make_comparison(tmp_path / "runs", a_plan(workers=(1,), blocks=1))
    make_turns(folder, {"ddp-torchrun": 100, "horovod-mpi": 95}, blocks=3, rounds=3)
    path, dice = folder / file, random.Random(36)
    original = path.read_text()
    forms = (["--no-html"], ["--markdown"], ["--csv"], ["--json"], ["--html", f"{folder}/x.html"])
    for at in fields_of(json.loads(original)):
        for value in dice.sample(VALUES, 2 if len(at) == 1 else 1):
            path.write_text(with_value(original, at, value))
            words = forms[0] if dice.random() < 0.9 else dice.choice(forms)
            code = report.main([str(folder), *words])  # which ends the test if it raises
            told = capsys.readouterr()
            if code:
                assert code == 1 and len(told.err.splitlines()) == 1, (at, value)
                assert str(folder) in told.err, (at, value)


def test_a_fault_of_our_own_shows_its_traceback(folder, monkeypatch):
    monkeypatch.setattr("compare.page.formats.as_text", lambda reports: {}["missing"])
    with pytest.raises(KeyError, match="missing"):
        report.main([str(folder), "--no-html"])
