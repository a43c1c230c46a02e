"""The benchmarks: what goals.toml declares, verdicts, records and tables; and that they run.

No test asserts a speed.
"""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from launching import ROOT, read_json, run
from PIL import Image
from records import a_block

from benchmarks import by_turns, input_pipeline, record
from benchmarks import run as bench_run
from benchmarks.by_turns import Contender, make_side, until_decided
from benchmarks.programs.without_instruments import Nothing
from benchmarks.record import Measured, Options, Row
from compare import keep
from compare.evidence import packed
from compare.evidence.reading import read_block
from compare.evidence.turns import Block
from compare.running import take_turns
from compare.running.scheduler import make_turn, run_block
from compare.running.sides import TAKE_TURNS, MeasurementError, Side
from recipe.data.image_folder import Listing, list_images
from recipe.errors import UserError
from recipe.settings.config import Config

# ------------------------------------------------------------------------- verdicts, table, record


@pytest.mark.parametrize(
    ("low", "high", "at_least", "verdict"),
    [
        (0.98, 0.99, True, record.REACHED),
        (0.96, 0.99, True, record.OPEN),
        (0.96, 0.97, True, record.MISSED),
        (0.96, 0.97, False, record.REACHED),
        (0.97, 1.00, False, record.OPEN),
        (0.971, 1.05, True, record.AT_GOAL),
        (0.969, 1.05, True, record.OPEN),
        (0.90, 0.989, False, record.AT_GOAL),
        (0.985, 0.99, False, record.MISSED),
        (None, None, True, record.OPEN),
    ],
)
def test_verdicts(low: float | None, high: float | None, at_least: bool, verdict: str) -> None:
    row = Row(1, "x", 0.98, at_least=at_least, value=0.98, low=low, high=high)
    assert row.verdict == verdict


@pytest.mark.parametrize(
    ("goal", "unit", "near"),
    [
        (0.995, "ratio", 0.0025),  # a true 0.990 is twice the cost that is allowed
        (0.97, "ratio", 0.015),
        (0.88, "ratio", 0.0176),
        (1.0, "ratio", 0),  # it allows no cost
        (1.01, "ratio", 0.005),  # 1, no gain at all, is not near it
        (1.25, "ratio", 0.025),
        (3200, "images/s", 64),
    ],
)
@pytest.mark.parametrize("at_least", [True, False])
def test_at_the_goal_is_within_half_of_what_it_allows(
    goal: float, unit: str, near: float, at_least: bool
) -> None:
    def verdict(off: float) -> str:
        """Of an interval that ends so far from the goal on its wrong side."""
        worse, better = (goal - off, goal * 1.1) if at_least else (goal + off, goal * 0.9)
        row = Row(1, "x", goal, unit, at_least, goal, min(worse, better), max(worse, better))
        return row.verdict

    small = 1e-6 * goal
    assert verdict(near - small) == (record.AT_GOAL if near else record.REACHED)
    assert verdict(near + small) == record.OPEN


@pytest.mark.parametrize(
    ("second", "spread", "count"),
    [(12.5, 1, 4), (10.9, 1, 8), (10.0, 1, 16), (9.53, 0.02, 4)],  # the last one: at the goal
)
def test_blocks_go_on_until_the_verdict_is_decided(
    second: float, spread: float, count: int, tmp_path: Path
) -> None:
    def measured(options: Options) -> int:
        def rows_of(blocks: list[Block]) -> list[Row]:
            row = Row(1, "x", 1.05)
            return [row.compared(blocks, "a", "b", confidence=options.confidence)]

        def block_of(number: int, label: str) -> Block:
            return a_block({"a": [10 + spread * ((number - 1) % 2)], "b": [second]})

        return len(until_decided(options, "row 1", block_of, rows_of))

    options, given = Options(tmp_path), Options(tmp_path, blocks=2)
    assert (measured(options), measured(given)) == (count, 2)
    assert (options.confidence, given.confidence) == (pytest.approx(1 - 0.05 / 3), 0.95)


def test_the_table_and_its_notes() -> None:
    same, slower = ([a_block({"a": [speed], "b": [10]})] * 3 for speed in (10, 9))
    rows = [
        Row(14, "memory", 1.01, at_least=False, notes=("tiny",)).compared(same, "a", "b"),
        Row(11, "speed", 3200, unit="images/s", needs="a GPU"),
        Row(3, "other", None).compared(slower, "a", "b"),
    ]
    text = record.show_rows(rows)
    for pattern in (
        "other .* 0.900 .*for reference", "speed .*≥ 3,200 images/s .*needs a GPU",
        "memory .*≤ 1.010 .*1.000 – 1.000",
    ):  # fmt: skip
        assert re.search(pattern, text)
    assert text.count("≥") == 1 and text.endswith("14, memory: tiny")
    assert text.index("other") < text.index("speed") < text.index("memory")
    assert "|---" in record.show_rows(rows, markdown=True)


def test_what_binds_is_told_where_turns_without_exchange_show_it() -> None:
    (turn,) = a_block({"a": [10]}).turns
    phases = {"data": 0.0, "forward": 0.3, "backward": 0.6}
    turns = [replace(turn, phases=phases)]
    turns += [replace(turn, purpose="ablation", phases=phases | {"backward": 0.4})]
    with_exchange, both = (Block(1, ("a",), (*own,), {"a": 1}) for own in (turns[:1], turns))
    assert by_turns.what_binds([with_exchange], "a") == []
    assert by_turns.what_binds([with_exchange, both], "a") == [
        "binds: of a step of 1000 ms data 0.0%, forward 30.0%, backward 40.0%, other 10.0%, "
        "exposed communication 20.0%"
    ]


def test_a_row_comes_back_from_its_record(tmp_path: Path) -> None:
    blocks = [a_block({"a": [9], "b": [10]})]
    row = Row(5, "x", 0.9).compared(blocks * 3, "a", "b")
    measured = Measured([row], [Side("x", ("python",), ("p.py",), 8)], {"5": blocks})
    options = Options(tmp_path / "new", blocks=3)
    assert record.measure_and_keep("checkpoints", lambda _: measured, options) == [row]
    assert record.read_record(options.out, "checkpoints").rows == [row]
    kept = read_json(options.out / "checkpoints.json")
    assert kept["rows"][0]["verdict"] == row.verdict and kept["machine"]["cpu_model"]
    assert kept["commands"] == {"x": "python p.py"}
    assert record.read_record(options.out, "memory").rows == []
    with pytest.raises(MeasurementError, match="was measured without --quick"):
        record.read_record(options.out, "checkpoints", Options(tmp_path, quick=True))
    (options.out / "memory.json").write_text("{}")
    with pytest.raises(MeasurementError, match=r"memory\.json: is no record"):
        record.read_record(options.out, "memory")


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
    """Where they take turns before anything is measured; in any case in the record."""
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
        assert f"\n| {entry.row} | " in page, entry.name


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
    """Row 6's other side: it has no laps to tell, and no phases."""
    session = Mock(meter=Nothing(), progress=Mock(samples_seen=8))
    client = take_turns.Client(Mock(), warm_up=3)
    client.step_ended(session)
    client.step_ended(session)
    told = client.trained(session, None)
    assert told["phases"] == {}
    told |= {"seconds": 1.0, "busy": 1.0, "cpu_seconds": 1.0, "window": 1.0, "images": 16}
    side = Side("off", ("python",), ("p.py",), 8, steps=2)
    assert make_turn(side, 0, 0.0, [Mock(copy=0, machine=0, measured=told)], 1.0).phases == {}


@pytest.mark.launch
@pytest.mark.full
def test_benchmarks_run(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/run.py", "--quick", "--out", str(tmp_path)]
    done = run([*command, "--only", "1,3,4,6"])
    assert done.returncode == 0, done.output
    rows, _ = bench_run.read_records([tmp_path])
    assert sorted(row.number for row in rows if row.value) == [1] * 4 + [3] * 4 + [4] * 3 + [6]
    assert "verdict" in done.output


# ------------------------------------------------------------------------------ the input pipeline


@pytest.fixture
def jpegs(tmp_path: Path) -> Listing:
    for name in ("a/0.jpg", "a/1.jpg", "b/2.jpg"):
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((60, 40), 50).convert("RGB").save(path)
    return list_images(tmp_path / "images", tmp_path / "cache")


def test_all_pipelines_make_batches_but_raw_decoding(jpegs: Listing) -> None:
    found = input_pipeline.contenders(jpegs, Config())
    batches = {name: contender([0, 2]) for name, contender in found.items()}
    assert set(found) == {input_pipeline.RAW, *input_pipeline.NAMES}
    assert batches.pop("raw") is None
    images, labels, *_ = batches["pipeline"]
    assert labels.tolist() == [0, 1]
    assert not torch.equal(images, batches["first-epoch"][0])  # other crops
    shapes = [images, batches["first-epoch"][0], batches["torchvision-v2"], batches["pillow"]]
    assert [tuple(batch.shape) for batch in shapes] == [(2, 3, 224, 224)] * 4
    assert [batch.dtype for batch in shapes] == [torch.uint8] * 3 + [torch.float32]


def test_a_pipelines_turn() -> None:
    turn = input_pipeline.take_turn("x", lambda indices: sum(range(100_000)), [[0, 1], [2]], 4)
    assert (turn.side, turn.round) == ("x", 4)
    assert turn.images_per_second == pytest.approx(3 / turn.seconds)
    assert turn.cpu_seconds_per_image > 0
