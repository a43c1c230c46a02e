"""What is kept in results/: whole, small, and free of this machine's paths."""

import json
from pathlib import Path

import pytest
from test_compare_records import edit, make_comparison, make_square

from compare import keep, parity, report, timeline
from compare.evidence import packed
from compare.evidence.notices import notices
from compare.evidence.records import load_comparison
from compare.plan.sources import ROOT


@pytest.fixture
def comparison(tmp_path: Path) -> Path:
    folder = make_comparison(tmp_path / "runs/compare-1")
    run = folder / "block-1/ddp-torchrun-1"
    edit(run / "config.json", cache_dir=str(Path.home() / ".cache/x"))
    (run / "output.log").write_text(f"{ROOT}/ddp_train/train.py in {ROOT}, not {ROOT}2\n")
    (run / "tensorboard").mkdir()
    (run / "tensorboard/events.out.tfevents.1").write_bytes(b"\xff\xfe")
    (run / "trace/rank-0").mkdir(parents=True)
    (run / "trace/rank-0/notes.txt").write_text("large")
    (run / "model.pt").write_bytes(b"\xff" * 100)
    (folder / "warm-up/ddp-torchrun-1").mkdir(parents=True)
    (folder / "warm-up/ddp-torchrun-1/output.log").write_text("warm")
    (folder / "lock").write_text("123")
    return folder


def words(folder: Path, results: Path) -> list[str]:
    return [str(folder), "--machine", "m", "--question", "engines", "--results", str(results)]


def report_of(folder: Path, capsys) -> str:
    """All that the report says of a folder, without its name."""
    capsys.readouterr()
    for form in ("--json", "--csv", "--no-html"):
        assert report.main([str(folder), form]) == 0
    said = capsys.readouterr().out.replace(str(folder), "FOLDER")
    return keep.without_paths(said.replace(folder.name, "NAME"))


def test_a_comparison_is_kept_with_its_report(comparison, tmp_path, capsys):
    assert keep.main(words(comparison, tmp_path / "results")) == 0
    kept = tmp_path / "results/m/2026-11-21-engines"
    assert capsys.readouterr().out == f"kept: {kept}\n"
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]
    files = {path.name for path in kept.iterdir()}
    assert files == {"plan.json", "report.md", "report.html", packed.PACKED}
    runs = [json.loads(line) for line in (kept / packed.PACKED).read_text().splitlines()]
    assert [run["folder"] for run in runs] == sorted(
        str(path.parent.relative_to(comparison)) for path in comparison.glob("*/*/summary.json")
    )  # without the warm-up's and the trace's
    run = next(run for run in runs if run["folder"] == "block-1/ddp-torchrun-1")
    assert set(run) == {"folder", "command.txt", "config.json", "environment.json",
                        "metrics.jsonl", "outcome.json", "output.log", "summary.json"}  # fmt: skip
    assert run["config.json"]["cache_dir"] == "~/.cache/x"
    assert run["output.log"] == f"./ddp_train/train.py in ., not {ROOT}2\n"
    assert "draft" not in (kept / "report.html").read_text()
    # The record says what the original says.
    said = [report_of(folder, capsys) for folder in (comparison, kept)]
    assert said[0] == said[1] and "block-2/horovod-mpi-2" in said[0]
    # Other commands find its runs, too.
    pair = [str(kept / "block-1" / name) for name in ("ddp-torchrun-1", "horovod-mpi-1")]
    assert parity.main(pair) == 0
    assert "final weights of the whole runs: bit-equal" in capsys.readouterr().out
    assert timeline.main(pair) == 2
    assert "is no run folder with a profile/" in capsys.readouterr().err


def test_turns_are_kept_without_their_sides_steps(tmp_path, capsys):
    folder = make_square(tmp_path / "runs/2026-11-21-engines")
    side = folder / "turns/2-workers/block-3/ddp-mpi/0"
    (side / "output.log").write_text("epoch 1\n")
    (side / "run/metrics.jsonl").write_text('{"kind": "step"}\n')
    for place in ("", "ddp-mpi/0", "horovod-mpi/0"):
        failed = folder / "turns/2-workers/block-4.failed-1" / place
        failed.mkdir(parents=True, exist_ok=True)
        (failed / "output.log").write_text("ddp-mpi ended with exit code 1\n")
    assert keep.main(words(folder, tmp_path / "results")) == 0
    kept = tmp_path / "results/m/2026-11-21-engines"
    runs = map(json.loads, (kept / packed.PACKED).read_text().splitlines())
    of_turns = {name: files for files in runs if "turns" in (name := files.pop("folder"))}
    assert len(of_turns) == 6 * (1 + 4) + 3
    earlier = [path.relative_to(kept) for path in load_comparison(kept).earlier_failures]
    assert earlier == [Path("turns/2-workers/block-4.failed-1")]
    assert set(of_turns["turns/2-workers/block-3"]) == {"block.json"}
    assert set(of_turns["turns/2-workers/block-3/ddp-mpi/0/run"]) == {
        "config.json", "environment.json",
    }  # fmt: skip
    said = [report_of(one, capsys) for one in (folder, kept)]
    # Where an output is to be found differs, and nothing else.
    said[0] = said[0].replace("turns/2-workers/block-4.failed-1/output.log", packed.PACKED)
    assert said[0] == said[1] and "not beaten: DDP over MPI" in said[0]


def test_an_earlier_failure_stays_one_and_half_a_line_a_text(comparison, tmp_path):
    attempt = comparison / "block-1/ddp-torchrun-1.failed-1"
    attempt.mkdir()
    half = '{"kind": "step"}\n{"ki'
    texts = {"metrics.jsonl": half, "null.json": "null", "text.json": '"text"'}
    for name, text in texts.items():
        (attempt / name).write_text(text)
    assert keep.main(words(comparison, tmp_path / "results")) == 0
    kept = tmp_path / "results/m/2026-11-21-engines"
    lost = kept / "block-1/ddp-torchrun-1.failed-1"
    assert load_comparison(kept).earlier_failures == [lost]
    assert not packed.exists(lost / "summary.json")
    assert {name: packed.read_text(lost / name) for name in texts} == texts
    [(_, [trouble])] = notices(load_comparison(kept))
    assert trouble.endswith(f"; see {kept / packed.PACKED}")


def test_nothing_is_overwritten_and_nothing_half_written(comparison, tmp_path, capsys):
    results = tmp_path / "results"
    assert keep.main(words(comparison, results)) == 0
    assert keep.main(words(comparison, results)) == 2
    assert "exists: take another --question" in capsys.readouterr().err
    edit(comparison / "plan.json", workers=[7])
    other = [*words(comparison, results)[:-1], str(tmp_path / "other")]
    assert keep.main(other) == 2
    assert list((tmp_path / "other/m").iterdir()) == []


@pytest.mark.parametrize("name", ["a/b", "", "Big", "../x"])
def test_a_name_that_is_no_folder_name_is_refused(comparison, tmp_path, name, capsys):
    assert keep.main([str(comparison), "--machine", name, "--question", "q"]) == 2
    assert "write small letters" in capsys.readouterr().err


def test_a_folder_without_a_plan_is_refused(tmp_path, capsys):
    assert keep.main(words(tmp_path, tmp_path / "results")) == 2
    assert "holds none of plan.json, collectives.json" in capsys.readouterr().err
