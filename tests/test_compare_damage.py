"""Records that were damaged or changed: the digests name the line, nothing is decided by what is
left, and nothing ends with a traceback."""

import hashlib
import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs
from records import a_plan, lines_of, make_turns, verdicts_of, write_lines
from test_compare_keep import words
from test_compare_records import make_comparison
from test_compare_turns import by_turns

from compare import keep, report
from compare.evidence.record import FILE, BlockLine, Record, read_comparison, record_to_write
from compare.page.report import Report
from compare.plan.plan_file import plan_record
from compare.running.comparison import record_plan
from recipe.errors import UserError

NAMES = ("ddp-mpi", "horovod-mpi")
BLOCK = Path("turns/2-workers/block-2/block.json")
# Lines of the record: the plan, two whole runs, five blocks.
DEEP = "[" * 2000 + "]" * 2000
Lines = list[bytes]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    return by_turns(tmp_path_factory.mktemp("recorded") / "compare-1", blocks=5, names=NAMES)


@pytest.fixture
def folder(tmp_path, recorded):
    return Path(shutil.copytree(recorded, tmp_path / "runs/compare-1"))


def decisions(folder: Path) -> set[str]:
    return {verdict.decision for verdict in verdicts_of(read_comparison(folder))}


def unreadable(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of a report that names what cannot be read."""
    capsys.readouterr()
    assert report.main([str(folder), "--no-html"]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if "unreadable" in line]
    return line


def change_bytes(folder: Path, made: Callable[[Lines], Lines]) -> None:
    path = folder / FILE
    path.write_bytes(b"".join(made(path.read_bytes().splitlines(keepends=True))))


def edited(at: int, old: bytes, new: bytes) -> Callable[[Lines], Lines]:
    """Edit a line of the file, by its number."""

    def made(lines: Lines) -> Lines:
        assert old in lines[at - 1]
        return [*lines[: at - 1], lines[at - 1].replace(old, new, 1), *lines[at:]]

    return made


# What is done to the file, the line that is named, what is said of it, and how many are whole.
CHANGED: dict[str, tuple[Callable[[Lines], Lines], int, str, int]] = {
    "a figure of a block": (edited(5, b'"seconds": ', b'"seconds": 1'), 6, "line 5 was changed", 4),
    "a figure of a run": (edited(2, b'"top1": 9', b'"top1": 8'), 3, "line 2 was changed", 1),
    "a digest": (edited(5, b'"above": "', b'"above": "0'), 5, "line 4 was changed", 3),
    "dropped": (lambda lines: [*lines[:4], *lines[5:]], 5, "or a line is missing above it", 3),
    "twice": (lambda lines: [*lines[:5], *lines[4:]], 6, "line 5 was changed", 4),
    "in another order": (lambda lines: [*lines[:4], lines[5], lines[4], *lines[6:]], 5, "line", 3),
    "cut off": (lambda lines: [*lines[:-1], lines[-1][:99]], 8, "the file was cut off there", 7),
    "empty line": (lambda lines: [*lines[:4], b"\n", *lines[4:]], 5, "is not a JSON object", 4),
    "a list": (lambda lines: [*lines[:4], b"[]\n"], 5, "is not a JSON object", 4),
    "deep": (lambda lines: [*lines[:4], DEEP.encode() + b"\n"], 5, "is not a JSON object", 4),
    "bytes": (lambda lines: [*lines[:4], b'"\xff"\n'], 5, "is not a JSON object", 4),
}


@pytest.mark.parametrize("damage", CHANGED)
def test_a_changed_record_is_one_line_and_decides_nothing(damage, folder, capsys):
    assert decisions(folder) == {"faster"}
    made, number, message, whole = CHANGED[damage]
    change_bytes(folder, made)
    assert decisions(folder) == {"undecided"}
    told = Report(Record.open(folder))
    assert told.headline == ["Nothing is decided: part of the record cannot be read."]
    assert told.next_step == ("", "")
    line = unreadable(folder, capsys)
    assert f"{folder / FILE}, line {number}: " in line and message in line
    assert report.main([str(folder), "--csv"]) == 0
    assert f"line {number}: " in capsys.readouterr().err  # the lines below it are missing
    with (
        pytest.raises(UserError, match=f"head -n {whole} ")
        if damage != "cut off"
        else (pytest.raises(AssertionError))
    ):
        assert record_to_write(folder).problem


def test_of_a_changed_plan_nothing_is_reported(folder, refusal):
    """All was measured by it."""
    change_bytes(folder, edited(1, b'"margin": 0.03', b'"margin": 0.5'))
    assert "line 2: does not follow" in refusal(report.main, [str(folder)], code=1)


def test_what_a_crash_cut_off_is_removed_and_the_rest_goes_on(folder):
    before = (folder / FILE).read_bytes()
    change_bytes(folder, lambda lines: [*lines[:-1], lines[-1][:99]])
    record = record_to_write(folder)
    assert record.problem == "" and record.num_blocks == 4
    assert before.startswith((folder / FILE).read_bytes())


def test_only_the_head_finds_a_change_of_the_last_line(folder):
    """Which is why the report prints it, and results/ has it in a file of its own."""
    head = Record.open(folder).head
    number = len(lines_of(folder))
    change_bytes(folder, edited(number, b'"seconds": 40.0', b'"seconds": 41.0'))
    assert Record.open(folder).problem == "" and Record.open(folder).head != head


def test_a_report_prints_the_head_and_the_number_of_blocks(folder, capsys):
    head = f"5 blocks, SHA-256 {Record.open(folder).head}"
    page = folder / "page.html"
    for words_ in (["--no-html"], ["--markdown"], ["--html", str(page)]):
        assert report.main([str(folder), *words_]) == 0
    assert capsys.readouterr().out.count(head) >= 2 and head in page.read_text()


def test_a_plan_may_get_a_later_end_and_its_blocks_stay_good(folder):
    record = Record.open(folder)
    later = plan_record(record.plan, "2026-11-22T12:00:00+00:00")
    record_plan(structs.replace(record.plan, blocks=9, created_utc=later.created_utc), record)
    record = read_comparison(folder)
    assert record.problem == "" and record.confidence == 0.975
    assert record.plan.created_utc == "2026-11-21T12:00:00+00:00"
    assert decisions(folder) == {"undecided"}, "5 of 9 blocks"


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda b: b["turns"][3].update(purpose="disturbed"), "no other process had disturbed it"),
        (lambda b: b["turns"][3].update(images=7), "has 7 images, but its steps have 128"),
        (lambda b: b["turns"][2]["phases"].pop("data"), "do not all have the same phases"),
        (lambda b: b["turns"][3].update(seconds=0), "seconds = 0"),
        (lambda b: b.update(number=3), "is block 3, but 1 are above it"),
    ],
)
def test_a_block_that_contradicts_itself_is_neither_written_nor_read(made, message, folder, capsys):
    lines = lines_of(folder)
    made(lines[4]["block"])
    write_lines(folder, lines)
    assert decisions(folder) == {"undecided"}
    assert message in unreadable(folder, capsys)
    write_lines(folder, lines[:4])
    record, before = Record.open(folder), (folder / FILE).read_bytes()
    if "seconds = 0" not in message:  # no type forbids it before it is written
        with pytest.raises(UserError, match=message):
            record.append(msgspec.convert(lines[4], BlockLine))
        assert (folder / FILE).read_bytes() == before and Record.open(folder).problem == ""


def test_a_run_twice_and_a_failure_that_did_not_fail_are_refused(folder):
    lines = lines_of(folder)
    write_lines(folder, [*lines, lines[1]])
    assert "is complete above" in Record.open(folder).problem
    failed = {"place": "block-1/x", "block": 1, "folder": "x", "output": ""}
    write_lines(folder, [*lines, {"line": "failure", **failed, "outcome": {}}])
    assert "its status is completed" in Record.open(folder).problem


def test_a_record_that_cannot_be_read_is_one_message(folder, refusal):
    (folder / FILE).unlink()
    (folder / FILE).mkdir()
    told = refusal(report.main, [str(folder)], code=1)
    assert f"{folder / FILE} cannot be read: Is a directory" in told


def test_a_changed_record_is_not_kept(folder, tmp_path, refusal):
    change_bytes(folder, edited(5, b'"seconds": ', b'"seconds": 1'))
    told = refusal(keep.main, words(folder, tmp_path / "results"))
    assert "not kept" in told and "line 5 was changed" in told


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


def test_a_record_of_any_shape_is_no_traceback(tmp_path, capsys):
    """Each field of the plan's line and of a run's outcome in turn: the report is made, or one
    message says which line is to blame."""
    folder = make_comparison(tmp_path / "runs", a_plan(workers=(1,), blocks=1))
    make_turns(folder, {"ddp-torchrun": 100, "horovod-mpi": 95}, blocks=3, rounds=3)
    dice, lines = random.Random(36), lines_of(folder)
    forms = (["--no-html"], ["--markdown"], ["--csv"], ["--json"], ["--html", f"{folder}/x.html"])
    places = [(0, at) for at in fields_of({"plan": lines[0]["plan"]})]
    places += [(2, at) for at in fields_of({"outcome": lines[2]["outcome"]})]
    for number, at in places:
        for value in dice.sample(VALUES, 2 if len(at) == 2 else 1):
            texts = [json.dumps(line) for line in lines]
            texts[number] = with_value(texts[number], at, value)
            (folder / FILE).write_text(with_right_digests(texts))
            words = forms[0] if dice.random() < 0.9 else dice.choice(forms)
            code = report.main([str(folder), *words])  # which ends the test if it raises
            told = capsys.readouterr()
            if code:
                assert code == 1 and len(told.err.splitlines()) == 1, (at, value)
                assert str(folder) in told.err, (at, value)


def with_right_digests(texts: list[str]) -> str:
    """The text of a record with these lines, each with the digest of those above it."""
    whole = ""
    for text in texts:
        digest = hashlib.sha256(whole.encode()).hexdigest()
        whole += re.sub('"above": "[^"]*"', f'"above": "{digest}"', text, count=1) + "\n"
    return whole


def test_a_fault_of_our_own_shows_its_traceback(folder, monkeypatch):
    monkeypatch.setattr("compare.page.formats.as_text", lambda reports: {}["missing"])
    with pytest.raises(KeyError, match="missing"):
        report.main([str(folder), "--no-html"])
