"""What is kept in results/: whole, small, and free of this machine's paths."""

import hashlib
import json
import subprocess
from pathlib import Path

import pytest
from records import edit, lines_of
from test_compare_records import make_comparison, make_square

from compare import keep, report
from compare.evidence.record import FILE, FailureLine, Record, read_comparison
from compare.plan.environment import ROOT
from compare.plan.plan import Outcome
from compare.running import checks
from recipe.errors import UserError


@pytest.fixture
def comparison(tmp_path: Path) -> Path:
    folder = make_comparison(tmp_path / "runs/compare-1")
    where = folder / "block-1/ddp-torchrun-1"
    edit(where / "config.json", cache_dir=str(Path.home() / ".cache/x"))
    command = [f"{ROOT}/ddp_train/train.py", f"{ROOT}2", str(folder / "block-1")]
    edit(where / "environment.json", command=command)
    return folder


def words(folder: Path, results: Path) -> list[str]:
    return [str(folder), "--machine", "m", "--question", "engines", "--results", str(results)]


def kept_of(folder: Path) -> Path:
    """Keep a comparison, and return where."""
    results = folder.parent.parent / "results"
    assert keep.main(words(folder, results)) == 0
    [kept] = results.glob("m/*-engines")
    return kept


def report_of(folder: Path, capsys) -> str:
    """All that the report says of a folder, without its name."""
    capsys.readouterr()
    for form in ("--json", "--csv", "--no-html"):
        assert report.main([str(folder), form]) == 0
    said = capsys.readouterr().out.replace(str(folder), "FOLDER")
    return keep.without_paths(said.replace(folder.name, "NAME"))


@pytest.mark.parametrize("home", [None, "/"])
def test_a_user_without_a_home_folder(home, monkeypatch):
    """As in a container that runs under a number which its passwd does not have."""
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("os.getuid", lambda: 123_456_789)
    if home:
        monkeypatch.setenv("HOME", home)
    assert keep.without_paths(f"https://a/b {ROOT}/c") == "https://a/b ./c"


def test_a_place_is_shortened_at_the_start_of_a_path_alone():
    places = {"/data": "...", "/data/x": "...1", "~/work": "...2"}
    for text, short in (
        ("/data/x/t.py --at=/data/y", "...1/t.py --at=.../y"),
        ("'PATH=/data/x/bin':\"$PATH\"", "'PATH=...1/bin':\"$PATH\""),
        ("~/work/t.py:/data", "...2/t.py:..."),
        *((other, other) for other in ("~/data/y", "/mnt/data/x", "/data2/x", "/data-x", "./data")),
    ):
        assert keep.shortened(text, places) == short
    with pytest.raises(UserError, match=r"two of .* are the same"):
        keep.shortened({"/data/a": 1, ".../a": 2}, places)


def test_the_names_of_a_machines_other_processes_are_not_kept(monkeypatch):
    monkeypatch.setattr(checks, "quiet_load", lambda cores: -1.0)  # any load is too much
    [warning] = checks.warning_texts([checks.check_load()])
    assert "(process " in warning and "cores are already busy, mostly by " in warning
    kept = keep.shortened(warning, {})
    assert "(process " not in kept and "cores are already busy. This slows runs" in kept


def test_a_comparison_is_kept_and_says_what_it_said(comparison, capsys):
    kept = kept_of(comparison)
    assert capsys.readouterr().out == f"kept: {kept}\n"
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]
    assert [path.name for path in kept.iterdir()] == [FILE]
    run = next(line for line in lines_of(kept) if line.get("place") == "block-1/ddp-torchrun-1")
    assert run["settings"]["cache_dir"] == "~/.cache/x"
    assert run["environment"]["command"] == [
        "./ddp_train/train.py",
        f"{ROOT}2",
        ".../compare-1/block-1",
    ]
    # The record says what the original says, but for its digest.
    said = [report_of(folder, capsys) for folder in (comparison, kept)]
    heads = [Record.open(folder).head for folder in (comparison, kept)]
    assert said[0].replace(heads[0], heads[1]) == said[1] and "block-2/horovod-mpi-2" in said[0]


def test_the_digest_of_what_is_kept_stands_beside_the_records(comparison, tmp_path):
    kept = kept_of(comparison)
    head = hashlib.sha256((kept / FILE).read_bytes()).hexdigest()
    assert Record.open(kept).head == head
    assert (tmp_path / "results" / keep.SUMS).read_text() == (
        f"{head}  m/2026-11-21-engines/{FILE}\n"
    )
    check = ["sha256sum", "--check", keep.SUMS]
    assert subprocess.run(check, cwd=tmp_path / "results", check=False).returncode == 0
    (kept / FILE).write_text((kept / FILE).read_text() + " ")
    assert subprocess.run(check, cwd=tmp_path / "results", check=False).returncode == 1


def test_a_failed_block_is_kept_with_the_end_of_its_output(tmp_path, capsys):
    folder = make_square(tmp_path / "runs/2026-11-21-engines")
    failed = FailureLine(
        place="turns/2-workers/block-7",
        block=7,
        outcome=Outcome("failed"),
        folder="turns/2-workers/block-7.failed-1",
        output=f"{ROOT}/x: out of memory",
    )
    Record.open(folder).append(failed)
    kept = kept_of(folder)
    [failure] = read_comparison(kept).earlier_failures
    assert failure.output == "./x: out of memory"
    told = report_of(kept, capsys)
    assert f"block-7: failed, and was run again; see FOLDER/{FILE}" in told.replace(
        json.dumps(str(kept))[1:-1], "FOLDER"
    )


def test_nothing_is_overwritten_and_nothing_half_written(comparison, tmp_path, refusal):
    kept_of(comparison)
    told = refusal(keep.main, words(comparison, tmp_path / "results"))
    assert "exists: give another --question" in told
    edit(comparison / "plan.json", workers=[7])
    refusal(keep.main, words(comparison, tmp_path / "other"))
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("name", ["a/b", "", "Big", "../x"])
def test_a_name_that_is_no_folder_name_is_refused(comparison, tmp_path, name, capsys):
    assert keep.main([str(comparison), "--machine", name, "--question", "q"]) == 2
    assert "write small letters" in capsys.readouterr().err


def test_a_folder_without_a_record_is_refused(tmp_path, refusal):
    told = refusal(keep.main, words(tmp_path, tmp_path / "results"))
    assert "holds no record.jsonl" in told
