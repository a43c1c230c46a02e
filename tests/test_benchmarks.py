"""The benchmarks: goals and their verdicts, the plans that declare them, and that they run.

No test asserts a speed.
"""

import math
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from launching import ROOT, run
from PIL import Image
from records import a_plan, drop_runs, edit
from test_compare_records import make_comparison

from benchmarks import run as bench_run
from benchmarks.programs import decode
from benchmarks.programs.trainer import Nothing
from compare.evidence import goals
from compare.evidence.goals import Goal
from compare.evidence.judgement import UNDECIDED, decided
from compare.evidence.paired import Estimate, student_quantile
from compare.evidence.record import contradictions_of_turns, read_comparison
from compare.evidence.turns import Block, Turn
from compare.page.formats import as_json, as_markdown, as_text
from compare.page.report import Report
from compare.page.tables import goals_tables, table_text
from compare.plan.configurations import CONFIGURATIONS
from compare.plan.launchers import launch_words
from compare.plan.plan import Run
from compare.run import make_plan, parse_options
from compare.running import take_turns
from compare.running.scheduler import make_turn
from recipe.data.image_folder import list_images
from recipe.settings.config import Config

RUNS_OF_HOROVOD = [f"block-{block}/horovod-mpi-2" for block in (1, 2, 3)]
PLANS = sorted(path.relative_to(ROOT) for path in (ROOT / "benchmarks").rglob("*.toml"))

# ------------------------------------------------------------------------------ goals, the table


def an_estimate(low: float, high: float) -> Estimate:
    """Ten blocks with this interval."""
    ratio, half = math.sqrt(low * high), math.log(high / low) / 2
    error = half / student_quantile(0.95, 9)
    return Estimate(ratio, low, high, (ratio,) * 10, error, 9)


def verdict(least: float, low: float | None, high: float | None, unit: str = "") -> str:
    has_interval = low is not None and high is not None
    found = an_estimate(low, high) if has_interval else Estimate(least, None, None, (least,) * 2)
    [goal] = decided([Goal(question="?", name="a:b", least=least, speed=found, unit=unit)])
    return goal.decision


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.9801, 0.99, goals.REACHED),
        (0.96, 0.99, UNDECIDED),
        (0.96, 0.97, goals.MISSED),
        (0.971, 1.05, goals.AT_GOAL),
        (0.969, 1.05, UNDECIDED),
        (None, None, UNDECIDED),
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
    assert (just, too_far) == (goals.AT_GOAL if near else goals.REACHED, UNDECIDED)


def test_several_goals_are_corrected_as_several_verdicts_are() -> None:
    """Each interval alone reaches its goal; of five such goals one is reached by chance in eight
    measurements."""
    barely = Goal(question="?", name="a:b", least=0.9, speed=an_estimate(0.9001, 1.1))
    assert [goal.decision for goal in decided([barely])] == [goals.REACHED]
    far = replace(barely, speed=an_estimate(0.95, 1.1))
    found = decided([barely] * 4 + [far])
    assert [goal.decision for goal in found] == [UNDECIDED] * 4 + [goals.REACHED]
    assert {goal.family for goal in found} == {5}


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished comparison of whole runs at two workers, DDP 1.1 times as fast, with goals."""
    monkeypatch.setenv("COLUMNS", "200")  # no table is cut into parts
    asked = {"ddp-torchrun:horovod-mpi": 1.05, "ddp-torchrun": 100.0}
    plan = a_plan(workers=(2,), goals=asked, question="How fast?")
    return make_comparison(tmp_path / "compare-1", plan)


def goal_lines(folder: Path) -> list[str]:
    """The lines of the table of goals."""
    [table] = goals_tables([Report(read_comparison(folder))])
    return [line for line in table_text(table).splitlines() if "≥" in line]


def test_goals_are_judged_and_shown(measured: Path) -> None:
    pair, side = goal_lines(measured)
    assert re.search(r"ddp-torchrun / horovod-mpi +≥ 1.050 +1.\d+ +1.\d+ – 1.\d+ +3 +reached", pair)
    assert re.search(r"ddp-torchrun +≥ 100 images/s +[\d,]+ images/s .* reached", side)
    report = Report(read_comparison(measured))
    [table] = goals_tables([report, report])
    assert table_text(table).count("How fast?") == 4
    for text in (as_text([report, report]), as_markdown([report, report])):
        assert text.count("How fast?") == 4, "side by side the goals are there, too"
    assert '"verdict": "reached"' in as_json([report])
    edit(measured / "plan.json", goals={})
    assert goals_tables([Report(read_comparison(measured))]) == []


def test_sides_that_differ_in_what_the_plan_does_not_vary_reach_no_goal(measured: Path) -> None:
    for place in RUNS_OF_HOROVOD:
        edit(measured / place / "environment.json", kernel="6.2")
    pair, side = goal_lines(measured)
    assert re.search(r"≥ 1.050 +– +– +0 +no verdict: kernel: 6", pair)
    assert "6.2" not in side and side.endswith("reached"), "it has one kernel in all blocks"


def test_a_side_that_changed_between_blocks_reaches_no_goal(measured: Path) -> None:
    for name in ("ddp-torchrun-2", "horovod-mpi-2"):
        edit(measured / f"block-2/{name}/environment.json", kernel="6.2")
    assert all("no verdict: kernel changed" in line for line in goal_lines(measured))


def test_a_goal_without_blocks_is_still_in_the_table(measured: Path) -> None:
    drop_runs(measured, *RUNS_OF_HOROVOD)
    pair, _ = goal_lines(measured)
    assert re.search(r"≥ 1.050 +– +– +0 +not finished", pair)


def test_a_pair_with_a_goal_is_judged_beside_other_pairs() -> None:
    words = ["--configurations", "ddp-gloo", "ddp-mpi", "horovod-mpi"]
    words += ["--pairs", "ddp-gloo:ddp-mpi", "--goals", "ddp-mpi:horovod-mpi=1"]
    plan = make_plan(parse_options(words, ""))
    assert plan.pairs() == [("ddp-gloo", "ddp-mpi"), ("ddp-mpi", "horovod-mpi")]


def test_an_unfinished_plan_reaches_no_goal(measured: Path) -> None:
    """Of two sides, and of one."""
    edit(measured / "plan.json", blocks=9)
    assert all(line.endswith("not finished") for line in goal_lines(measured))
    drop_runs(measured, *RUNS_OF_HOROVOD)
    edit(measured / "plan.json", configurations=["ddp-torchrun"], goals={"ddp-torchrun": 100})
    assert goal_lines(measured)[0].endswith("not finished")
    edit(measured / "plan.json", blocks=3)
    assert goal_lines(measured)[0].endswith("reached")


# ------------------------------------------------------------------------------------- the plans


@pytest.mark.parametrize("path", PLANS, ids=str)
def test_each_plan_is_valid_and_starts_what_is_there(path: Path, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    plan = make_plan(parse_options([str(path)], ""))
    assert plan.question and plan.goals and plan.pairs()
    page = (ROOT / "docs/performance.md").read_text()
    assert f"`{path.stem}`" in page
    for planned in plan.in_order(1, "", plan.groups()[0][1]):
        words = planned.command(Path("/f"))
        assert all((ROOT / word).exists() for word in words if word.endswith(".py"))
        assert not any("{" in word for word in words)
        launcher = {"torchrun": "ddp-torchrun", "mpirun": "ddp-mpi"}.get(words[1])
        if plan.side and launcher:  # the words by which a comparison starts two ranks
            assert words[1 : len(own := launch_words(CONFIGURATIONS[launcher], 2, None)) + 1] == own


def test_flags_and_folder_of_a_side() -> None:
    words = [
        "--side",
        "a=X=1 python a.py {flags} --to {folder}",
        "--side",
        "b=python b.py",
    ]
    words += ["--goals", "a:b=0.9", "--steps", "7", "--turns", "3", "--warm-up-steps", "9"]
    plan = make_plan(parse_options([*words, "--", "--lr", "1"], ""))
    assert (plan.goals, plan.pairs(), plan.rounds) == ({"a:b": 0.9}, [("a", "b")], 3)
    assert (plan.steps, plan.warm_up_steps) == (7, 9)
    (side,) = [planned for planned in plan.in_order(1, "", 0) if planned.side == "a"]
    assert side.command(Path("/f")) == ["env", "X=1", "python", "a.py", "--lr", "1", "--to", "/f"]


def test_unusable_flags_are_refused(refusal: Callable[..., str]) -> None:
    for words, message in {
        "--links 0.5 --gpu": "leave --only and --gpu out",
        "--links 1 0": "rates above 0",
        "--only nothing": "benchmarks/run.py: --only nothing: choose from best-configuration, ",
    }.items():
        assert message in refusal(bench_run.main, words.split())


# --------------------------------------------------------------------------------- what is started


def test_a_side_may_have_no_phases() -> None:
    """A bare loop beside a trainer."""
    turns = [Turn(side, 0, 1.0, 9.0, 0.1) for side in ("loop", "ddp")]
    turns[1] = replace(turns[1], phases={"backward": 0.1})
    block = Block(1, ("loop", "ddp"), tuple(turns), steps={"loop": 1, "ddp": 1})
    assert list(contradictions_of_turns(block, [])) == [] and block.phases("loop") == {}
    assert block.phases("ddp")["backward_seconds"] == 0.1


def test_a_trainer_without_instruments_takes_turns() -> None:
    """It has no laps to tell, and no phases."""
    session = Mock(meter=Nothing(), progress=Mock(samples_seen=8))
    client = take_turns.TrainerClient(Mock(fileno=lambda: 0), 3)
    client.trained(session)
    client.trained(session)
    told = client.measured()
    assert told["phases"] == {}
    told |= {"seconds": 1.0, "busy": 1.0, "cpu_seconds": 1.0, "window": 1.0, "images": 16}
    side = Run(1, CONFIGURATIONS["ddp-torchrun"], 1, 1, flags=("--batch-size", "8"))
    assert make_turn(side, 2, 0, 0.0, [Mock(machine=0, measured=told)], 1.0).phases == {}


def test_all_pipelines_make_batches_but_raw_decoding(tmp_path: Path) -> None:
    for name in ("a/0.jpg", "a/1.jpg", "b/2.jpg"):
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((60, 40), 50).convert("RGB").save(path)
    jpegs = list_images(tmp_path / "images", tmp_path / "cache")
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
def test_benchmarks_run(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/run.py", "--quick", "--out", str(tmp_path)]
    command += ["--only", "trainer-overhead", "input-pipeline", "start-time"]
    told = run(command, 1700).checked().output
    assert "verdict" in told and told.count("undecided") == 4 + 1 + 2
