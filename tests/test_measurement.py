"""Blocks of turns until enough is known: made-up turns in the place of measured ones."""

from pathlib import Path

import pytest
from launching import read_json
from msgspec.structs import replace
from records import MadeUpBlocks

from compare import run as run_module
from compare.plan import plan_file
from compare.plan.configurations import DEFAULT_CONFIGURATIONS
from compare.plan.plan import Case, Plan
from compare.plan.plan_file import write_plan
from compare.run import parse_options
from compare.running import comparison
from compare.running.comparison import (
    checked_record,
    is_finished,
    measured,
    resumed,
)
from compare.running.scheduler import MeasurementError

FIRST, SECOND = DEFAULT_CONFIGURATIONS


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> MadeUpBlocks:
    """DDP is 1.1 times as fast as Horovod."""
    bench = MadeUpBlocks(lambda side: 1100.0 if side.side.startswith("ddp") else 1000.0, 0.01)
    monkeypatch.setattr(comparison, "run_block", bench)
    monkeypatch.setattr(plan_file, "trainers_sha256", lambda: "a")
    return bench


def measure(plan: Plan, folder: Path) -> Plan:
    """Do as run.py does behind the whole runs, of which there are none here."""
    plan = resumed(plan, folder)
    write_plan(folder / "plan.json", checked_record(plan, folder))
    return comparison.measure(plan, folder)[0]


PLAN = Plan(full_runs=0, order_seed=1)


def test_blocks_follow_until_the_intervals_are_narrow(bench, tmp_path, capsys):
    bench.scatter = 0.03
    plan = measure(PLAN, tmp_path)
    assert is_finished(plan, tmp_path)
    [group] = measured(plan, tmp_path)
    estimate = group.estimates[FIRST, SECOND]
    assert estimate.blocks == len(bench.folders) > 3 and estimate.relative_half_width <= 0.03
    *of_blocks, last = capsys.readouterr().out.splitlines()
    assert len(of_blocks) == len(bench.folders)
    assert of_blocks[0].startswith(f"block 1, 2 workers   {FIRST} / {SECOND} 1.")
    assert f" +-{100 * estimate.relative_half_width:.2g} %" in of_blocks[-1]
    assert "the interval of every pair is within" in last
    assert all(a == b[::-1] for a, b in zip(bench.orders[::2], bench.orders[1::2], strict=True))


def test_the_minutes_end_the_blocks_and_more_minutes_go_on(bench, tmp_path, capsys):
    bench.scatter, bench.disturbed = 0.3, 30.0
    measure(replace(PLAN, minutes=5), tmp_path)
    assert len(bench.folders) == 5  # of a minute each: disturbed time does not count
    told = capsys.readouterr().out
    # Of the 4 minutes that are left by then, half as much again will be disturbed.
    for words in ("up to 6 min left", "beside 2 min in which others used the cores",
                  "the widest interval is +-", "more --minutes"):  # fmt: skip
        assert words in told
    measure(replace(PLAN, minutes=7), tmp_path)
    _, extension = read_json(tmp_path / "plan.json")["ends"]
    assert (extension["blocks"], extension["minutes"]) == (None, 7) and len(bench.folders) == 7


def test_a_fixed_number_of_blocks_is_measured_whatever_they_show(bench, tmp_path):
    for blocks in (4, 6):
        measure(replace(PLAN, blocks=blocks), tmp_path)
        assert len(bench.folders) == len(set(bench.folders)) == blocks
    _, extension = read_json(tmp_path / "plan.json")["ends"]
    assert extension["blocks"] == 6
    with pytest.raises(run_module.UserError, match="blocks: 6 there, 5 now"):
        measure(replace(PLAN, blocks=5), tmp_path)


@pytest.mark.parametrize(("planned", "then", "told"), [
    ({}, {"blocks": 4}, "4 blocks"), ({}, {"blocks": 20}, "20 blocks"),
    ({}, {"minutes": 4}, r"\+-1.5% or 4 minutes"),
    ({}, {"until_interval": 0.2}, r"\+-20% or 10 minutes"),
    ({}, {"minutes": 20, "until_interval": 0.02}, r"\+-2% or 20 minutes"),
    ({"blocks": 9}, {"blocks": 4}, "4 blocks"),
    ({"blocks": 9}, {"blocks": None, "minutes": 20}, r"\+-1.5% or 20 minutes"),
])  # fmt: skip
def test_whoever_stops_when_pleased_decides_nothing(planned, then, told, bench, tmp_path):
    """An end that may come before the plan's is refused until that one is reached."""
    plan, bench.scatter = replace(PLAN, **planned), 0.1
    bench.error, bench.error_after = KeyboardInterrupt(), 4
    with pytest.raises(KeyboardInterrupt):
        measure(plan, tmp_path)
    before = (tmp_path / "plan.json").read_bytes()
    with pytest.raises(run_module.UserError, match=f"the end: .* there, {told} now.*do not exist"):
        measure(replace(plan, **then), tmp_path)
    assert (tmp_path / "plan.json").read_bytes() == before
    [group] = measured(plan, tmp_path)
    assert group.blocks == 4 and not is_finished(plan, tmp_path)
    bench.error = None
    later = {"blocks": 11} if planned else {"minutes": 11}
    measure(replace(plan, **later), tmp_path)  # which may come before this one is reached
    assert len(bench.folders) == 11
    _, extension = read_json(tmp_path / "plan.json")["ends"]
    assert later.items() <= extension.items()
    if then.get("blocks") != 4:  # once it is reached, any other one is an extension
        measure(replace(plan, **then), tmp_path)
        assert len(read_json(tmp_path / "plan.json")["ends"]) == 3


def test_groups_take_blocks_in_turn_until_each_is_narrow(bench, tmp_path):
    plan = replace(PLAN, case={"a": Case(), "b": Case()}, workers=(1, 2))
    measure(plan, tmp_path)
    names = [path.relative_to(tmp_path).as_posix() for path in bench.folders]
    assert names[:5] == ["turns/a/1-workers/block-1", "turns/a/2-workers/block-1",
                         "turns/b/1-workers/block-1", "turns/b/2-workers/block-1",
                         "turns/a/1-workers/block-2"]  # fmt: skip
    assert all(group.blocks >= 3 for group in measured(plan, tmp_path))
    bench.folders.clear()
    (tmp_path / "alone").mkdir()
    measure(replace(PLAN, configurations=(FIRST,)), tmp_path / "alone")  # nothing to compare
    assert not bench.folders


@pytest.mark.parametrize("error", [KeyboardInterrupt, MeasurementError])
def test_what_ends_the_blocks_loses_the_one_that_was_under_way_alone(error, bench, tmp_path):
    plan = replace(PLAN, blocks=3)
    measure(replace(plan, blocks=1), tmp_path)
    bench.error = error("horovod-mpi ended with exit code 1")
    with pytest.raises(error):
        measure(plan, tmp_path)
    bench.error = None
    measure(replace(plan, order_seed=None), tmp_path)  # the folder's own is taken
    assert [path.name for path in bench.folders] == ["block-1", "block-2", "block-3"]
    assert bench.orders[0] != bench.orders[1] == bench.orders[2]


@pytest.mark.parametrize(("gpus", "words", "plan", "workers"), [
    (0, [], "square", None), (0, ["--workers", "4"], "square", ["4"]),
    (1, [], "square-nccl", ["1"]), (8, [], "square-nccl", ["2"]),
    (8, ["--", "--no-cuda"], "square", None), (0, ["--null"], None, None),
    (0, ["wire-format"], "wire-format", None),
    (0, ["--hosts", "a:2,b:2"], None, None),
    (0, ["--configurations", "ddp-torchrun"], None, None),
])  # fmt: skip
def test_without_a_plan_the_engines_are_compared_over_each_transport(
    gpus, words, plan, workers, monkeypatch
):
    monkeypatch.setattr(run_module.checks, "visible_gpus", lambda: gpus)
    options = parse_options(words, "")
    run_module.take_default_plan(options)
    assert (options.plan, options.workers) == (plan, workers)
