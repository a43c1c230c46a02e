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
from benchmarks.programs.trainer import Nothing
from compare.evidence import goals
from compare.evidence.goals import Goal, goals_of
from compare.evidence.paired import Estimate
from compare.evidence.reading import read_block
from compare.page.tables import goals_tables, table_text
from compare.plan.configurations import CONFIGURATIONS
from compare.plan.plan import Run
from compare.run import make_plan, parse_options
from compare.running import take_turns
from compare.running.scheduler import make_turn
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
    (table,) = goals_tables([comparison, comparison])
    for pattern in (
        r"How fast\? +a / b +≥ 0.900 +0.900 +0.900 – 0.900 +3 +reached",
        r"How fast\? +a +≥ 5 images/s +9 images/s .* reached",
    ):
        assert re.search(pattern, table_text(table))
    assert "How fast" not in table_text(*goals_tables([comparison]))
    plan.goals = {}
    assert goals_tables([comparison]) == []


# ------------------------------------------------------------------------------------- the plans


@pytest.mark.parametrize("path", PLANS, ids=str)
def test_each_plan_is_valid_and_starts_what_is_there(path: Path, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    plan = make_plan(parse_options([str(path)], ""))
    assert plan.question and plan.goals and plan.pairs()
    page = (ROOT / "docs/performance.md").read_text()
    assert f"`{path.stem}`" in page
    for one in plan.in_order(1, "", plan.groups()[0][1]):
        words = one.command(Path("/f"))
        assert all((ROOT / word).exists() for word in words if word.endswith(".py"))
        assert not any("{" in word for word in words)
        launcher = {"torchrun": "ddp-torchrun", "mpirun": "ddp-mpi"}.get(words[1])
        if plan.side and launcher:  # the words by which a comparison starts two ranks
            assert words[1 : len(own := CONFIGURATIONS[launcher].launch_words(2, None)) + 1] == own


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
    (side,) = [one for one in plan.in_order(1, "", 0) if one.side == "a"]
    assert side.command(Path("/f")) == ["env", "X=1", "python", "a.py", "--lr", "1", "--to", "/f"]


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
    for words, said in {
        "--links 0.5 --gpu": "leave --only and --gpu out", "--links 1 0": "rates above 0"
    }.items():  # fmt: skip
        assert said in refusal(bench_run.main, words.split())
    text = refusal(bench_run.main, ["--only", "nothing"])
    assert text.startswith("benchmarks/run.py: --only nothing: choose from best-configuration, ")


# --------------------------------------------------------------------------------- what is started


def test_a_side_may_have_no_phases(tmp_path: Path) -> None:
    """A bare loop beside a trainer."""
    block = json.loads(json.dumps(asdict(a_block({"loop": [9.0, 9.0], "ddp": [8.0, 8.0]}))))
    block |= {"steps": {"loop": 1, "ddp": 1}}
    for turn in block["turns"][2:]:
        turn["phases"] = {"backward": 0.1}
    path = tmp_path / "block.json"
    path.write_text(json.dumps(block))
    assert read_block(path).phases("loop") == {}


def test_a_trainer_without_instruments_takes_turns() -> None:
    """It has no laps to tell, and no phases."""
    session = Mock(meter=Nothing(), progress=Mock(samples_seen=8))
    client = take_turns.Client(Mock(), warm_up=3)
    client.step_ended(session)
    client.step_ended(session)
    told = client.trained(session, None)
    assert told["phases"] == {}
    told |= {"seconds": 1.0, "busy": 1.0, "cpu_seconds": 1.0, "window": 1.0, "images": 16}
    side = Run(1, CONFIGURATIONS["ddp-torchrun"], 1, 1, arguments=("--batch-size", "8"))
    assert make_turn(side, 2, 0, 0.0, [Mock(machine=0, measured=told)], 1.0).phases == {}


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
