"""The benchmarks: goals and their verdicts, the plans that declare them, and that they run.

No test asserts a speed.
"""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from launching import ROOT, run
from PIL import Image
from records import a_block

from benchmarks import run as bench_run
from benchmarks.programs import decode
from benchmarks.programs.without_instruments import Nothing
from compare.evidence import goals
from compare.evidence.goals import Goal, goals_of, goals_table
from compare.evidence.paired import Estimate
from compare.evidence.reading import read_block
from compare.plan.options import make_plan, parse_options
from compare.running import take_turns
from compare.running.scheduler import make_turn, run_block
from compare.running.sides import MeasurementError, Side, side_of
from recipe.data.image_folder import Listing, list_images
from recipe.errors import UserError
from recipe.settings.config import Config

PLANS = sorted(path.relative_to(ROOT) for path in (ROOT / "benchmarks").rglob("*.toml"))

# ------------------------------------------------------------------------------ goals, the table


def verdict(least: float, low: float | None, high: float | None, unit: str = "") -> str:
    return Goal("?", "a:b", least, Estimate(least, low, high, ()), unit).verdict


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.98, 0.99, goals.REACHED),
        (0.96, 0.99, goals.OPEN),
        (0.96, 0.97, goals.MISSED),
        (0.971, 1.05, goals.AT_GOAL),
        (0.969, 1.05, goals.OPEN),
        (None, None, goals.OPEN),
    ],
)
def test_verdicts(low: float | None, high: float | None, expected: str) -> None:
    assert verdict(0.98, low, high) == expected


@pytest.mark.parametrize(
    ("least", "unit", "near"),
    [
        (0.995, "", 0.0025),  # a true 0.990 is twice the cost that is allowed
        (0.97, "", 0.015),
        (0.88, "", 0.0176),
        (1.0, "", 0),  # it allows no cost
        (1.01, "", 0.005),  # 1, no gain at all, is not near it
        (1.25, "", 0.025),
        (3200, "images/s", 64),
    ],
)
def test_at_the_goal_is_within_half_of_what_it_allows(least: float, unit: str, near: float) -> None:
    small = 1e-6 * least
    just, too_far = (verdict(least, least - near + e, 1.1 * least, unit) for e in (small, -small))
    assert (just, too_far) == (goals.AT_GOAL if near else goals.REACHED, goals.OPEN)


def test_goals_are_judged_by_the_blocks_that_have_their_sides() -> None:
    plan = SimpleNamespace(
        question="How fast?", goals={"a:b": 0.9, "a": 5.0, "a:c": 1.0}, groups=lambda: [("", 0)]
    )
    blocks = [a_block({"a": [9], "b": [10]})] * 3
    comparison: object = SimpleNamespace(
        plan=plan, confidence=0.95, unit="images", blocks=lambda *place: blocks
    )
    assert [(one.name, round(one.found.ratio, 3)) for one in goals_of(comparison)] == [
        ("a:b", 0.9), ("a", 9.0)
    ]  # fmt: skip
    text = goals_table([comparison, comparison])
    for pattern in (
        r"How fast\? +a / b +≥ 0.900 +0.900 +0.900 – 0.900 +3 +reached",
        r"\n +a +≥ 5 images/s +9 images/s .* reached",
    ):
        assert re.search(pattern, text)
    assert "|---" in goals_table([comparison], markdown=True) and goals_table([]) == ""


# ------------------------------------------------------------------------------------- the plans


@pytest.mark.parametrize("path", PLANS, ids=str)
def test_each_plan_is_valid_and_starts_what_is_there(path: Path, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    plan = make_plan(parse_options([str(path)], ""))
    assert plan.question and plan.goals and plan.pairs()
    page = (ROOT / "docs/performance.md").read_text()
    assert f"`{path.stem}`" in page
    for one in plan.in_order(1, "", plan.groups()[0][1]):
        side = side_of(one, plan, Path("/f"))
        words = side.command(Path("/f"), by_turns=True)
        assert all((ROOT / word).exists() for word in words if word.endswith(".py"))
        assert not any("{" in word for word in words)
        assert side.copies == 1 or "alone" in side.name


def test_flags_copies_and_folder_of_a_side() -> None:
    words = [
        "--side",
        "a=copies=2 X=1 python a.py {flags} --to {folder}",
        "--side",
        "b=python b.py",
    ]
    words += ["--goals", "a:b=0.9", "--steps", "7", "--turns", "3", "--warm-up-steps", "9"]
    plan = make_plan(parse_options([*words, "--", "--lr", "1"], ""))
    assert (plan.goals, plan.pairs(), plan.rounds) == ({"a:b": 0.9}, [("a", "b")], 3)
    side = side_of(plan.in_order(1, "", 0)[0], plan, Path("/block"))
    side = side if side.name == "a" else side_of(plan.in_order(1, "", 0)[1], plan, Path("/block"))
    assert (side.copies, side.steps, side.warm_up, side.environment) == (2, 7, 9, {"X": "1"})
    assert side.command(Path("/f"), by_turns=True) == ["python", "a.py", "--lr", "1", "--to", "/f"]
    assert side.shown().endswith("# 2 of them at once")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--goals", "ddp-torchrun:c=1"], "--goals ddp-torchrun:c: c: there is no such name"),
        (["--goals", "ddp-torchrun=fast"], "expected `float`, got `str`"),
    ],
)
def test_goals_of_what_is_not_there_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_plan(parse_options(words, ""))


def test_a_plan_that_is_not_there_is_refused(refusal: Callable[..., str]) -> None:
    text = refusal(bench_run.main, ["--only", "nothing"])
    assert text.startswith("benchmarks/run.py: --only nothing: take of best-configuration, ")


# --------------------------------------------------------------------------------- what is started


def test_a_side_may_have_no_phases(tmp_path: Path) -> None:
    """A bare loop beside a trainer: each side's turns have the same."""
    block = json.loads(json.dumps(asdict(a_block({"loop": [9.0, 9.0], "ddp": [8.0, 8.0]}))))
    block |= {"steps": {"loop": 1, "ddp": 1}}
    for turn in block["turns"][2:]:
        turn["phases"] = {"backward": 0.1}
    path = tmp_path / "block.json"
    path.write_text(json.dumps(block))
    assert read_block(path).phases("loop") == {}
    block["turns"][3]["phases"] = {}
    path.write_text(json.dumps(block))
    with pytest.raises(UserError, match="the turns of a side have not the same phases"):
        read_block(path)


def test_two_sides_of_one_name_are_refused(tmp_path: Path) -> None:
    sides = [Side(name, ("python",), ("p.py",), 8) for name in ("x", "y", "x")]
    for measure in (
        lambda _: run_block(sides, 1, tmp_path / "block-1", 1, "block 1"),
        lambda _: Measured([], sides),
    ):
        with pytest.raises(MeasurementError, match=r"^two sides have one name, of x, y, x"):
            record.measure_and_keep("memory", measure, Options(tmp_path))
        assert not [*tmp_path.iterdir()]


BENCHES = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("results/*/*-bench"))


@pytest.mark.parametrize("folders", [*([one] for one in BENCHES), BENCHES], ids=len)
def test_tables_are_what_the_command_makes_of_the_records(
    folders: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The one beside each record, with its notes; and the page's, of all records."""
    monkeypatch.chdir(ROOT)
    assert bench_run.main(["--table", *folders]) == 0
    page = Path("docs/performance.md" if len(folders) > 1 else f"{folders[0]}/table.md").read_text()
    made = [line for line in capsys.readouterr().out.splitlines() if line]
    if len(folders) > 1:
        made = [line for line in made if line[:2] != "- "]
    # Versions of tabulate differ in the widths of columns.
    table, shown = (re.sub("[ -]+", " ", text) for text in ("\n".join(made), page))
    assert table in re.sub("\n+", "\n", shown)
    assert page.count("| verdict") == 1


# --------------------------------------------------------------------------------------- run.py


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Benchmarks that take no time; the names of those that were measured."""
    names: list[str] = []

    def measure_and_keep(name: str, _: object, options: Options) -> list[Row]:
        names.append(name)
        if name == "memory":
            raise MeasurementError("no such luck")
        number = next(entry.row for entry in bench_run.entries() if entry.name == name)
        row = Row(number, name, 0.9, value=0.9)
        if name == "wire_format":
            row = Row(number, name, 0.97, needs="root")
        options.out.mkdir(parents=True, exist_ok=True)
        kept = {"rows": [{**vars(row), "verdict": row.verdict}]}
        (options.out / f"{name}.json").write_text(json.dumps(kept))
        return [row]

    monkeypatch.setattr(bench_run, "measure_and_keep", measure_and_keep)
    monkeypatch.setattr(bench_run, "gpu_name", lambda: None)
    return names


def test_what_has_its_record_is_not_measured_again(
    measured: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--out", str(tmp_path), "--only", "6,7"]
    for more, count in (([], 2), ([], 2), (["--again"], 4)):
        assert bench_run.main([*command, *more]) == 0
        assert len(measured) == count
    assert measured == ["instrumentation", "checkpoints"] * 2
    capsys.readouterr()
    assert bench_run.main(["--table", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "instrumentation" in shown and "needs a GPU" in shown


def test_of_several_records_the_newest_of_a_row_is_shown(
    measured: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = folders = [str(tmp_path / f"2026-01-0{day}-bench") for day in (1, 2)]
    for folder, only in zip(folders, ("6,7", "7"), strict=True):
        assert bench_run.main(["--out", folder, "--only", only]) == 0
    capsys.readouterr()
    assert bench_run.main(["--table", new, old]) == 0  # in any order
    shown = capsys.readouterr().out
    assert f"Recorded: rows 6 of {old}; rows 7 of {new}" in shown
    assert shown.count("| checkpoints ") == 1


def test_a_record_is_kept(measured: list[str], tmp_path: Path) -> None:
    out, results = tmp_path / "out", tmp_path / "results"
    assert bench_run.main(["--out", str(out), "--only", "6"]) == 0
    block = out / "blocks/instrumentation/1"
    (block / "on/0/run").mkdir(parents=True)
    for path in (block / "block.json", block / "on/0/run/metrics.jsonl"):
        path.write_text("{}")
    words = ["--machine", "m", "--question", "bench", "--results", str(results)]
    assert keep.main([str(out), *words]) == 0
    (kept,) = (results / "m").iterdir()
    assert kept.name.endswith("-bench") and "verdict" in (kept / "table.md").read_text()
    assert {path.name for path in kept.iterdir()} == {"bench.json", "table.md", packed.PACKED}
    assert packed.exists(kept / "blocks/instrumentation/1/block.json")
    assert "metrics.jsonl" not in (kept / packed.PACKED).read_text()
    assert bench_run.main(["--table", str(kept)]) == 0  # the rows are read from there


def test_what_needed_something_or_failed_is_measured_again_beside_the_others(
    measured: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        assert bench_run.main(["--out", str(tmp_path), "--only", "10,14,13"]) == 1
        shown = capsys.readouterr()
        assert "needs root" in shown.out and "needs mending" in shown.out
        assert "no such luck" in shown.err
    assert measured == ["wire_format", "start_time", "memory", "wire_format", "memory"]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["--gpu"], "--gpu: torch finds no GPU here"),
        (["--only", "12"], "--only 12: there is no row 12 without --gpu; take of 1, 2"),
        (["--blocks", "0"], "--blocks 0: must be at least 1"),
        (["--table", "nowhere"], "--table nowhere: holds no record of a benchmark"),
    ],
)
def test_what_a_user_got_wrong_is_one_message(
    measured: list[str], command: list[str], message: str, refusal: Callable[..., str]
) -> None:
    assert refusal(bench_run.main, command).startswith(f"benchmarks/run.py: {message}")
    assert not measured


def test_the_page_has_all_rows() -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    for entry in bench_run.entries():
        assert re.search(rf"\n\| +{entry.row} \| ", page), entry.name


# --------------------------------------------------------------------------------- what is started


def test_commands() -> None:
    work = "--arch resnet18 --train-crop-size 96 --batch-size 8 --threads 1"

    def made(contender: Contender, gpu: bool = False) -> Side:
        return make_side("x", contender, work, Options(Path("/o"), gpu=gpu))

    ddp = made(Contender(workers=2))
    assert (ddp.images_per_step, ddp.ranks) == (16, 2)
    pair = made(Contender("horovod-mpi", copies=2, environment={"A": "1"}))
    for side, begin, part in (
        (
            ddp,
            "torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 2 ddp_train/train.py",
            "",
        ),
        (made(Contender("ddp-mpi", workers=2)), "mpirun -np 2 ", "--transport mpi"),
        (pair, "A=1 python horovod_train/train.py", "# 2 of them at once"),
    ):
        assert side.shown().startswith(begin) and part in side.shown()
    command = pair.command(Path("/f"), by_turns=True)
    assert command[:3] == ["python", TAKE_TURNS, "horovod_train/train.py"]
    assert command[command.index("--log-dir") + 1] == "/f"
    kept = made(Contender(wrapper="w.py", flags="--checkpoint-steps {steps}", steps=7))
    assert kept.program[0] == "w.py" and kept.program[-2:] == ("--checkpoint-steps", "7")
    assert made(Contender(workers=2, gpu_steps=9), gpu=True).steps == 9


def test_every_goal_is_of_sides_that_are_declared(tmp_path: Path) -> None:
    for benchmark in by_turns.read_goals():
        assert benchmark.work or benchmark.gpu, benchmark.name
        for pair in benchmark.pair.values():
            assert {*pair.sides} <= benchmark.side.keys() and 1 <= len(pair.sides) <= 2
    wrong = tmp_path / "goals.toml"
    wrong.write_text(by_turns.GOALS.read_text().replace("goal = 0.985", 'goal = "high"', 1))
    with pytest.raises(MeasurementError, match=r"Expected `float \| null`, got `str`"):
        by_turns.read_goals(wrong)


def test_a_trainer_without_instruments_takes_turns() -> None:
    """It has no laps to tell, and no phases."""
    session = Mock(meter=Nothing(), progress=Mock(samples_seen=8))
    client = take_turns.Client(Mock(), warm_up=3)
    client.step_ended(session)
    client.step_ended(session)
    told = client.trained(session, None)
    assert told["phases"] == {}
    told |= {"seconds": 1.0, "busy": 1.0, "cpu_seconds": 1.0, "window": 1.0, "images": 16}
    side = Side("off", ("python",), ("p.py",), 8, steps=2)
    assert make_turn(side, 0, 0.0, [Mock(copy=0, machine=0, measured=told)], 1.0).phases == {}


@pytest.fixture
def jpegs(tmp_path: Path) -> Listing:
    for name in ("a/0.jpg", "a/1.jpg", "b/2.jpg"):
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((60, 40), 50).convert("RGB").save(path)
    return list_images(tmp_path / "images", tmp_path / "cache")


def test_all_pipelines_make_batches_but_raw_decoding(jpegs: Listing) -> None:
    names = ("raw", "pipeline", "first-epoch", "torchvision-v2", "pillow")
    raw, pipeline, first, by_v2, pillow = (
        decode.decoder(name, jpegs, Config())([0, 2]) for name in names
    )
    assert raw is None and pipeline[1].tolist() == [0, 1]
    assert not torch.equal(pipeline[0], first[0])  # other crops
    shapes = [pipeline[0], first[0], by_v2, pillow]
    assert [tuple(batch.shape) for batch in shapes] == [(2, 3, 224, 224)] * 4
    assert [batch.dtype for batch in shapes] == [torch.uint8] * 3 + [torch.float32]


@pytest.mark.launch
@pytest.mark.full
@pytest.mark.timeout(1200)
def test_benchmarks_run(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/run.py", "--quick", "--out", str(tmp_path)]
    done = run([*command, "--only", "trainer-overhead", "input-pipeline", "start-time"], 1200)
    assert done.returncode == 0, done.output
    assert "verdict" in done.output and done.output.count("not shown") == 4 + 1 + 2
