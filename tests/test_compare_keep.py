"""What is kept in results/: whole, small, and free of this machine's paths."""

import json
from pathlib import Path
from typing import Any

import pytest
from records import edit
from test_compare_records import make_comparison, make_square

from compare import keep, parity, report, timeline
from compare.evidence import packed
from compare.evidence.records import load_comparison
from compare.plan.environment import ROOT


@pytest.fixture
def comparison(tmp_path: Path) -> Path:
    folder = make_comparison(tmp_path / "runs/compare-1")
    run = "block-1/ddp-torchrun-1"
    edit(folder / run / "config.json", cache_dir=str(Path.home() / ".cache/x"))
    for name, content in {
        f"{run}/output.log": f"{ROOT}/ddp_train/train.py in {ROOT}, not {ROOT}2\n".encode(),
        f"{run}/tensorboard/events.out.tfevents.1": b"\xff\xfe",
        f"{run}/trace/rank-0/notes.txt": b"large",
        f"{run}/model.pt": b"\xff" * 100,
        "warm-up/ddp-torchrun-1/output.log": b"warm",
        "lock": b"123",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def words(folder: Path, results: Path) -> list[str]:
    return [str(folder), "--machine", "m", "--question", "engines", "--results", str(results)]


def kept_of(folder: Path) -> Path:
    """Keep a comparison, and return where."""
    results = folder.parent.parent / "results"
    assert keep.main(words(folder, results)) == 0
    return results / "m/2026-11-21-engines"


def packed_runs(kept: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (kept / packed.PACKED).read_text().splitlines()]


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


def test_a_comparison_is_kept_and_says_what_it_said(comparison, capsys):
    kept = kept_of(comparison)
    assert capsys.readouterr().out == f"kept: {kept}\n"
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]
    files = {path.name for path in kept.iterdir()}
    assert files == {"plan.json", packed.PACKED}
    runs = {run.pop("folder"): run for run in packed_runs(kept)}
    assert list(runs) == sorted(
        str(path.parent.relative_to(comparison)) for path in comparison.glob("*/*/summary.json")
    )  # without the warm-up's and the trace's
    run = runs["block-1/ddp-torchrun-1"]
    assert set(run) == {
        "command.txt",
        "config.json",
        "environment.json",
        "metrics.jsonl",
        "outcome.json",
        "output.log",
        "summary.json",
    }
    assert run["config.json"]["cache_dir"] == "~/.cache/x"
    assert run["output.log"] == f"./ddp_train/train.py in ., not {ROOT}2\n"
    # The record says what the original says.
    said = [report_of(folder, capsys) for folder in (comparison, kept)]
    assert said[0] == said[1] and "block-2/horovod-mpi-2" in said[0]
    # Other commands find its runs, too.
    pair = [str(kept / "block-1" / name) for name in ("ddp-torchrun-1", "horovod-mpi-1")]
    assert (parity.main(pair), timeline.main(pair)) == (0, 2)
    told = capsys.readouterr()
    assert "final weights of the whole runs: bit-equal" in told.out
    assert "contains no profile/" in told.err


def test_turns_are_kept_without_their_sides_steps(tmp_path, capsys):
    folder = make_square(tmp_path / "runs/2026-11-21-engines")
    side, attempt = "block-3/ddp-mpi/0", "block-4.failed-1"
    for name in (
        f"{side}/output.log",
        f"{side}/run/metrics.jsonl",
        *(f"{attempt}/{one}output.log" for one in ("", "ddp-mpi/0/", "horovod-mpi/0/")),
    ):
        path = folder / "turns/2-workers" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"kind": "step"}\n')
    kept = kept_of(folder)
    runs = {run.pop("folder"): run for run in packed_runs(kept)}
    of_turns = {name: files for name, files in runs.items() if "turns" in name}
    assert len(of_turns) == 6 * (1 + 4) + 3
    assert load_comparison(kept).earlier_failures == [kept / "turns/2-workers" / attempt]
    assert set(of_turns["turns/2-workers/block-3"]) == {"block.json"}
    assert set(of_turns[f"turns/2-workers/{side}/run"]) == {"config.json", "environment.json"}
    said = [report_of(one, capsys) for one in (folder, kept)]
    # Where an output is to be found differs, and nothing else.
    said[0] = said[0].replace(f"turns/2-workers/{attempt}/output.log", packed.PACKED)
    assert said[0] == said[1] and "DDP over Gloo trained" in said[0]


def test_nothing_is_overwritten_and_nothing_half_written(comparison, tmp_path, refusal):
    kept_of(comparison)
    told = refusal(keep.main, words(comparison, tmp_path / "results"))
    assert "exists: give another --question" in told
    edit(comparison / "plan.json", workers=[7])
    refusal(keep.main, words(comparison, tmp_path / "other"))
    assert list((tmp_path / "other/m").iterdir()) == []


@pytest.mark.parametrize("name", ["a/b", "", "Big", "../x"])
def test_a_name_that_is_no_folder_name_is_refused(comparison, tmp_path, name, capsys):
    assert keep.main([str(comparison), "--machine", name, "--question", "q"]) == 2
    assert "write small letters" in capsys.readouterr().err


def test_a_folder_without_a_plan_is_refused(tmp_path, refusal):
    told = refusal(keep.main, words(tmp_path, tmp_path / "results"))
    assert "holds none of plan.json, collectives.json" in told
