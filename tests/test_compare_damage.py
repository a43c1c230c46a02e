"""Records that were damaged: the report names the file and what is wrong with it, decides nothing
by what is left, and never ends with a traceback."""

import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from records import a_plan, make_turns
from test_compare_keep import kept_of
from test_compare_records import edit, make_comparison
from test_compare_turns import by_turns

from compare import report
from compare.evidence import packed
from compare.evidence.records import load_comparison
from compare.evidence.verdicts import judge

NAMES, BLOCK = ("ddp-mpi", "horovod-mpi"), "turns/2-workers/block-2"
LAST = "turns/2-workers/block-5"  # that it is missing, nothing shows
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
    """Change what a JSON file holds; what cannot be made of its text is a text of JSON."""
    record = json.loads(path.read_text())
    made(record)
    path.write_text(json.dumps(record).replace(f'"{DEEP}"', DEEP))


def of_turn(**fields: Any) -> Callable[[dict[str, Any]], object]:
    return lambda block: block["turns"][3].update(fields)


IN_BLOCK: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no turns": (lambda b: b.update(turns=None), "turns = None: expected `array`"),
    "turns of another kind": (lambda b: b.update(turns=[7, None]), r"turns\[0\] = 7: expected"),
    "no steps": (lambda b: b["steps"].update({"ddp-mpi": 0}), "steps.*expected `int` >= 1"),
    "steps of one side": (lambda b: b["steps"].pop("ddp-mpi"), "steps is of .'horovod-mpi'"),
    "steps not at all": (lambda b: b.pop("steps"), r"steps is of \[\]"),
    "a phase in some turns": (lambda b: b["turns"][2]["phases"].pop("data"), "not the same phases"),
    "phases in some turns": (of_turn(phases={}), "not the same phases"),
    "no backward": (
        lambda b: [turn["phases"].pop("backward") for turn in b["turns"]], "with backward among"
    ),
    "no turn of speed": (
        lambda b: [turn.update(purpose="trial") for turn in b["turns"]], "it holds no turn"
    ),
    "a side without turns": (
        lambda b: b.update(turns=[t for t in b["turns"] if t["side"] == "ddp-mpi"]), "is of .'ddp"
    ),
    "a turn of no side": (
        lambda b: next(t for t in b["turns"] if t["purpose"] == "ablation").update(side="x"),
        "one of its turns is of",
    ),
    "a command that ends in a text": (
        lambda b: b.update(commands=["python 'x", ""]), "and not that of the plan"
    ),
    **{
        f"seconds {value}": (of_turn(seconds=value), "seconds = ")
        for value in (float("nan"), float("inf"), 1e300, 5e-324, 0, -1.0, "1", None, [])
    },
    "many brackets": (of_turn(side=DEEP), "20 brackets"),
}  # fmt: skip


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("damage", IN_BLOCK)
def test_a_damaged_block_is_one_line_and_decides_nothing(damage, version, folder, capsys):
    """Of earlier versions, too, whose comparisons have ended by another rule."""
    edit(folder / "plan.json", format=version)
    assert decisions(folder) == {"faster"}
    made, message = IN_BLOCK[damage]
    change(folder / BLOCK / "block.json", made)
    if version == 2 or "command" not in damage:
        assert decisions(folder) == {"undecided"}
        assert report.main([str(folder), "--no-html"]) == 0
        [line] = [one for one in capsys.readouterr().out.splitlines() if "unreadable" in one]
        assert f"unreadable: {folder / BLOCK}/block.json" in line
        assert re.search(message, line), line


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda path: path.write_text(""), "is no JSON object"),
    "cut": (lambda path: path.write_text(path.read_text()[:99]), "is no JSON object"),
    "a list": (lambda path: path.write_text("[]"), "is no JSON object"),
    "not UTF-8": (lambda path: path.write_bytes(b'{"a": "\xff"}'), "can't decode byte 0xff"),
    "a folder": (replace_by_folder, "Is a directory"),
    "deep": (lambda path: path.write_text(DEEP), "20 brackets"),
    "one in another": (lambda path: path.write_text('{"a": [' * 999), "20 brackets"),
}  # fmt: skip


@pytest.mark.parametrize("damage", FILES)
@pytest.mark.parametrize("file", [
    f"{BLOCK}/block.json", f"{BLOCK}/ddp-mpi/0/run/config.json", "block-1/ddp-mpi-2/summary.json",
    "block-1/ddp-mpi-2/metrics.jsonl", "plan.json",
])  # fmt: skip
def test_a_damaged_file_is_one_line(file, damage, folder, capsys):
    made, message = FILES[damage]
    made(folder / file)
    code = report.main([str(folder), "--no-html"])
    told = capsys.readouterr()
    [line, *_] = [
        one for one in (told.out + told.err).splitlines()[::-1] if str(folder / file) in one
    ]
    if file != "plan.json":
        assert message in line and "unreadable" in line and code == 0
        if "turns" in file:
            assert decisions(folder) == {"undecided"}
            assert "nothing is decided, since part of the record cannot be read" in told.out
            assert "continues it" not in told.out
    else:
        assert code == 1 and told.out == "" and len(told.err.splitlines()) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming a user who may not read needs root")
@pytest.mark.parametrize("place", [LAST, f"{BLOCK}/block.json", f"{BLOCK}/ddp-mpi/0/run"])
def test_what_may_not_be_read_is_one_line(place, folder, capsys):
    for one in folder.resolve().parents:
        if one.owner() == "root" and str(one).startswith(os.environ.get("TMPDIR", "/tmp")):
            one.chmod(0o755)
    (folder / place).chmod(0)
    os.setresuid(65534, 65534, 0)
    try:
        assert decisions(folder) == {"undecided"}
        assert report.main([str(folder), "--no-html"]) == 0
    finally:
        os.setresuid(0, 0, 0)
    [line] = [one for one in capsys.readouterr().out.splitlines() if "unreadable" in one]
    assert str(folder / place) in line and "Permission denied" in line, line


@pytest.mark.parametrize(("name", "is_damage"), [
    ("block-5.failed-1", False), ("block-x", True), ("block-02", True),
])  # fmt: skip
def test_a_folder_of_another_name_is_no_block(name, is_damage, folder):
    before = load_comparison(folder)
    shutil.copytree(folder / BLOCK, folder / BLOCK / ".." / name)
    edit(folder / BLOCK / ".." / name / "block.json", weights={"ddp-mpi": "another"})
    after = load_comparison(folder)
    assert after.blocks("", 2) == before.blocks("", 2) and len(after.blocks("", 2)) == 5
    assert [name in why for *_, why in after.damaged_blocks] == [True] * is_damage


LINES: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "cut": lambda lines: [*lines[:-1], lines[-1][:40]],
    "no JSON": lambda lines: [*lines[:3], b"text", *lines[3:]],
    "no object": lambda lines: [*lines, b"[1]"],
    "no folder": lambda lines: [*lines, b'{"block.json": {}}'],
    "a folder again": lambda lines: [*lines, lines[2].replace(b'"seconds"', b'"second"')],
    "a folder of another kind": lambda lines: [*lines, b'{"folder": ["a"]}'],
    "not UTF-8": lambda lines: [*lines, b'{"folder": "\xff"}'],
    "deep": lambda lines: [*lines, DEEP.encode()],
}


@pytest.mark.parametrize("damage", LINES)
def test_a_damaged_line_of_a_packed_record_is_one_line(damage, folder, capsys):
    kept = kept_of(folder)
    assert decisions(kept) == {"faster"}
    path = kept / packed.PACKED
    path.write_bytes(b"\n".join(LINES[damage](path.read_bytes().splitlines())))
    os.utime(path, (1, 1))  # what is known of a file goes by the time of its change
    assert decisions(kept) == {"undecided"} and capsys.readouterr()
    assert report.main([str(kept), "--no-html"]) == 0
    told = capsys.readouterr().out
    assert (
        len(re.findall(rf"unreadable: {re.escape(str(path))}, line \d+, holds no folder", told))
        == 1
    )


def test_a_packed_record_that_cannot_be_read_is_one_message(folder, refusal):
    kept = kept_of(folder)
    replace_by_folder(kept / packed.PACKED)
    told = refusal(report.main, [str(kept)], code=1)
    assert f"{kept / packed.PACKED} cannot be read: Is a directory" in told


# A value in the place of each field, as JSON; None: the field is missing.
VALUES = (
    "null", '""', "-1", "0", "[]", "{}", DEEP, "[" * 15 + "]" * 15, '"text"', '[null]',
    '{"a": null}', "true", "NaN", "1e400", "1e300", "5e-324", "9" * 30, "9" * 400, None,
)  # fmt: skip


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


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    plan = a_plan(workers=(1,), blocks=1)
    runs = make_comparison(tmp_path_factory.mktemp("small") / "runs", plan)
    turns = shutil.copytree(runs, runs.with_name("turns"))
    make_turns(turns, {"ddp-torchrun": 100, "horovod-mpi": 95}, blocks=3, rounds=3)
    return runs.parent


@pytest.mark.parametrize("file", [
    *(f"runs/block-1/ddp-torchrun-1/{name}.json" for name in ("summary", "environment", "config",
                                                              "outcome")),
    "runs/plan.json", "turns/plan.json", "turns/turns/1-workers/block-2/block.json",
    "turns/turns/1-workers/block-2/horovod-mpi/0/run/config.json",
])  # fmt: skip
@pytest.mark.parametrize("most", [2, pytest.param(len(VALUES), marks=pytest.mark.full)])
def test_a_record_of_any_shape_is_no_traceback(file, most, small, capsys):
    """Each field in turn: the report is made, or one message says which file is to blame."""
    path, dice = small / file, random.Random(36)
    folder, original = small / Path(file).parts[0], path.read_text()
    forms = (["--no-html"], ["--markdown"], ["--csv"], ["--json"], ["--html", f"{small}/x.html"])
    try:
        for at in fields_of(json.loads(original)):
            for value in dice.sample(VALUES, most if len(at) == 1 else most // 2):
                path.write_text(with_value(original, at, value))
                words = forms[0] if dice.random() < 0.9 else dice.choice(forms)
                code = report.main([str(folder), *words])  # which ends the test if it raises
                told = capsys.readouterr()
                if code:
                    assert code == 1 and len(told.err.splitlines()) == 1, (at, value)
                    assert str(folder) in told.err, (at, value)
    finally:
        path.write_text(original)


def test_a_fault_of_our_own_shows_its_traceback(folder, monkeypatch):
    monkeypatch.setattr("compare.page.text.as_text", lambda reports: {}["missing"])
    with pytest.raises(KeyError, match="missing"):
        report.main([str(folder), "--no-html"])
