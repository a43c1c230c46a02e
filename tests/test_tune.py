"""--tune: the search with made-up blocks, what it writes, and once with real launchers."""

import json
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from launching import SMALL, rarely, read_json
from test_compare_plan import plan_of

from compare import run as run_module
from compare.evidence.paired import estimate_ratio
from compare.evidence.records import load_comparison
from compare.evidence.turns import Block, Turn
from compare.evidence.verdicts import judge
from compare.plan.configurations import CONFIGURATIONS
from compare.plan.options import parse_options
from compare.plan.plan import Plan
from compare.run import main
from compare.running import tune as tune_module
from compare.running.sides import MeasurementError, Side
from compare.running.tune import (
    Found,
    Values,
    comparison_command,
    free_knobs,
    head_of,
    horovod_knobs,
    settings_knobs,
    tuning_plan,
    write_file,
)
from recipe.errors import UserError
from recipe.knobs import SETTINGS, Knobs, knobs_text, read_all_knobs, refusal

BUCKETS: Values = {cap: Knobs({"bucket_cap_mb": float(cap)}) for cap in ("1", "50", "100")}
STATIC: Values = {"true": Knobs({"static_graph": True})}


@pytest.mark.parametrize(
    ("ratios", "gains"),
    [
        ([1.2, 1.1, 1.3, 1.2, 1.15], True),
        ([1.005, 1.006, 1.004, 1.006, 1.005], False),  # sure, and too little
        ([1.2, 1.1, 0.9, 1.2, 1.1], False),
        ([1.2, 1.2], False),
        ([0.8, 0.8, 0.8], False),
    ],
)
def test_what_is_a_gain(ratios: list[float], gains: bool) -> None:
    assert tune_module.is_gain(estimate_ratio(ratios, [1.0] * len(ratios))) is gains


def test_all_that_is_tried_may_stand_in_the_file(tmp_path: Path) -> None:
    horovod = [horovod_knobs(True, False, 8, 2), horovod_knobs(False, True, 8, 2)]
    for engine, knobs in (("ddp", settings_knobs("ddp")), *(("horovod", k) for k in horovod)):
        for values in knobs.values():
            for own in values.values():
                (tmp_path / "k.toml").write_text(knobs_text({engine: own}))
                assert read_all_knobs(tmp_path / "k.toml") == {engine: own}
                assert not any(refusal(engine, name) for name in own.variables)
                assert own.settings.keys() <= SETTINGS[engine].keys()
    names = list(horovod_knobs(True, False, 2, 1))
    assert names[:3] == ["MPI-allreduce", "HOROVOD_FUSION_THRESHOLD", "HOROVOD_CYCLE_TIME"]
    assert names[3] == "num_groups" and "HOROVOD_HIERARCHICAL_ALLREDUCE" not in names
    assert "HOROVOD_HIERARCHICAL_ALLREDUCE" in horovod[1] and "MPI-allreduce" not in horovod[1]


def test_what_the_user_has_set_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of("--", "--no-static-graph", "--bucket_cap_mb=3", "--fp16-allreduce")
    free, lines = free_knobs(CONFIGURATIONS["ddp-torchrun"], plan)
    assert list(free) == ["first_bucket_mb"]
    assert len(lines) == 2 and "--bucket-cap-mb is set already" in lines[0]
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "1")
    free, lines = free_knobs(CONFIGURATIONS["horovod-mpi"], plan)
    assert len(lines) == 2 and not free.keys() & {"HOROVOD_CYCLE_TIME", "num_groups"}
    assert "HOROVOD_FUSION_THRESHOLD" in free


def tuned_plan(*words: str) -> Any:
    options = parse_options(["--tune", "k.toml", *words], "")
    return tuning_plan(run_module.make_plan(options), options)


def test_the_plan_of_a_search() -> None:
    plan = tuned_plan("--", "--arch", "resnet18")
    assert (plan.configurations, plan.workers) == (("ddp-torchrun", "horovod-mpi"), (2,))
    plan = tuned_plan("tuned-against-tuned")  # whose file of knobs is not there yet
    assert plan.configurations == ("ddp-torchrun", "horovod-mpi")
    alone = tuned_plan("tuned-against-tuned", "--configurations", "ddp-tuned")
    for one in (plan, alone):
        for member in one.members():
            assert "--knobs" not in one.run(0, one.cases[0], member, 2).command(Path("x"))
    assert tuned_plan("--configurations", "horovod-gloo").configurations == ("horovod-gloo",)
    assert not tuned_plan("null-test").null  # or each would be tuned twice


def test_the_comparison_is_of_the_training_that_was_tuned_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("k.toml").touch()
    own = "mine=horovod-mpi HOROVOD_CYCLE_TIME=1 --fp16-allreduce"
    words = ["--define", own, "--configurations", "ddp-torchrun", "mine"]
    words += ["--global-batch-size", "64", "--global-learning-rate", "0.1", "--", "--epochs", "2"]
    plan = tuned_plan(*words)
    command = shlex.split(comparison_command(plan, Path("k.toml")))
    same = run_module.make_plan(parse_options(command[2:], ""))
    assert same.members() == plan.members()
    assert (same.global_batch_size, same.global_learning_rate) == (64, 0.1)
    assert same.trainer_arguments == (*plan.trainer_arguments, "--knobs", "k.toml")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--workers", "1"], "a single worker exchanges nothing"),
        (["--rounds", "2"], "at least 3"),
        (["--case", "a=--epochs 1", "--case", "b=--epochs 2"], "several cases (a, b)"),
        (["--null"], "--null: does not go together with --tune"),
        (["--blocks", "5"], "--rounds says how many"),
        (["--tune", "."], "is a folder; name a file"),
        (["--case", "a=--knobs x.toml"], "begins from the defaults"),
        (["--configurations", "horovod-mpi", "horovod-gloo"], "leave out horovod-gloo"),
        (["--", "--knobs", "x.toml"], "begins from the defaults"),
    ],
)
def test_what_a_search_refuses(words: list[str], told: str) -> None:
    with pytest.raises(UserError) as refused:
        tuned_plan(*words)
    assert told in str(refused.value)


# --------------------------------------------------------------------------- what is written


def found(engine: str, knobs: Knobs, holds: bool = True) -> Found:
    name = {"ddp": "ddp-torchrun", "horovod": "horovod-mpi"}[engine]
    return Found(
        CONFIGURATIONS[name], knobs, ["bucket_cap_mb, 50: 1.200 times"], "all of it", holds
    )


WHERE = [{"hosts": ["a", "b"], "device_name": "A Processor 9000", "torch": "2.14.1"}]


def test_the_file_tells_where_it_is_from_and_what_each_knob_gained(tmp_path: Path) -> None:
    path = tmp_path / "k.toml"
    ddp = found("ddp", Knobs({"bucket_cap_mb": 50.0}, {"NCCL_ALGO": 'a\n"b"'}))
    horovod = found("horovod", Knobs({}, {"HOROVOD_CYCLE_TIME": "0.5"}), holds=False)
    words = ["--tune", "k.toml", "a b\n c"]  # quoted words of several lines stay in the comment
    write_file(path, [ddp, horovod], Plan(), head_of(plan_of("--workers", "4"), words, WHERE))
    text = path.read_text()
    for said in ("--tune k.toml 'a b\n", "4 workers on 2 host(s) (a, b)", "A Processor 9000",
                 "torch 2.14.1", "bucket_cap_mb, 50: 1.200 times",
                 '# HOROVOD_CYCLE_TIME = "0.5"'):  # fmt: skip
        assert said in text, said
    assert read_all_knobs(path) == {"ddp": ddp.knobs}
    write_file(path, [Found(CONFIGURATIONS["ddp-torchrun"])], Plan(), [])
    assert "nothing was shown to be faster" in path.read_text() and "[ddp]" not in path.read_text()


def test_a_file_that_was_written_by_hand_is_never_lost(tmp_path: Path) -> None:
    """And the other engine's table is taken over."""
    path = tmp_path / "k.toml"
    path.write_text("[ddp]\nstatic_graph = true\n[horovod]\nnum_groups = 3\n")
    for cap in (50.0, 60.0):
        write_file(path, [found("ddp", Knobs({"bucket_cap_mb": cap}))], Plan(), [])
    assert len(list(tmp_path.iterdir())) == 3
    assert "static_graph" in path.with_name("k.toml.old").read_text()
    assert read_all_knobs(path)["ddp"].settings == {"bucket_cap_mb": 60.0}
    assert read_all_knobs(path)["horovod"].settings == {"num_groups": 3}


# --------------------------------------------------------------------------- with made-up blocks


class Blocks:
    """Stands for blocks of turns: writes what one leaves, and notes each start. A bucket of 50
    makes DDP 1.3 times as fast, a cycle of 0.5 Horovod twice."""

    def __init__(self) -> None:
        self.starts: list[str] = []
        self.interrupt_after: int | None = None
        self.fails: str | None = None  # the name of a side

    def __call__(
        self, sides: Sequence[Side], rounds: int, folder: Path, number: int, *_: Any, **__: Any
    ) -> Block:
        if self.interrupt_after is not None and len(self.starts) >= self.interrupt_after:
            raise KeyboardInterrupt
        if self.fails in [one.name for one in sides]:
            raise MeasurementError(f"{self.fails} ended with exit code 1", self.fails)
        turns = [
            Turn(one.name, n, 64 / self.speed(one), self.speed(one), 0.1)
            for n in range(rounds)
            for one in sides
        ]
        order = tuple(one.name for one in sides)
        block = Block(number, order, 0.0, tuple(turns), seconds=60.0)
        for one in sides:
            self.starts.append(f"{folder} {one.name}")
            (folder / one.name / "0/run").mkdir(parents=True)
            environment = json.dumps({"hosts": ["here"], "torch": "2"})
            (folder / one.name / "0/run/environment.json").write_text(environment)
        (folder / "block.json").write_text(json.dumps(asdict(block)))
        return block

    def speed(self, side: Side) -> float:
        speed, words = 100 + len(self.starts) / 1000, side.program
        if "--bucket-cap-mb" in words and words[words.index("--bucket-cap-mb") + 1] == "50":
            speed *= 1.3
        return speed * (2 if "HOROVOD_CYCLE_TIME=0.5" in side.launcher else 1)


@pytest.fixture
def blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Blocks:
    blocks = Blocks()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("compare.running.measurement.run_block", blocks)
    for module in ("running.comparison", "plan.record"):
        monkeypatch.setattr(f"compare.{module}.trainers_sha256", lambda: "as it is")
    monkeypatch.setattr(run_module.checks, "find_warnings", lambda plan, folder: [])
    monkeypatch.setattr(run_module, "check_tools", lambda plan: None)
    cycle = {value: Knobs({}, {"HOROVOD_CYCLE_TIME": value}) for value in ("0.5", "9")}
    knobs = {"ddp": {"buckets": BUCKETS, "static": STATIC}, "horovod": {"cycle": cycle}}
    monkeypatch.setattr("compare.running.tune.knobs_for", lambda c, plan: knobs[c.engine])
    monkeypatch.delenv("HOROVOD_CYCLE_TIME", raising=False)
    return blocks


def test_a_whole_search(blocks: Blocks, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--tune", "k.toml", "--rounds", "3"]) == 0
    knobs = read_all_knobs(Path("k.toml"))
    assert knobs["ddp"] == Knobs({"bucket_cap_mb": 50.0}, {})
    assert knobs["horovod"] == Knobs({}, {"HOROVOD_CYCLE_TIME": "0.5"})
    output = capsys.readouterr().out
    assert "buckets 50: 1.3" in output and ": kept" in output and "left" in output
    assert "all against the defaults: 1.3" in output and "--knobs k.toml" in output
    counts = Counter(start.rpartition(" ")[2] for start in blocks.starts)
    assert counts["1"] in (2, 5) and counts["50"] == 2 + 3
    on_top = read_json(Path("runs/tune-k/ddp/static/2-blocks/1-values/plan.json"))
    flags = on_top["configuration"]["true"]["flags"]
    assert flags == ["--bucket-cap-mb", "50", "--static-graph"]
    made = len(blocks.starts)
    assert main(["--tune", "k.toml", "--rounds", "3"]) == 0  # everything is there
    assert len(blocks.starts) == made
    assert main(["--tune", "k.toml", "--rounds", "3", "--new"]) == 0
    assert len(blocks.starts) > made


@pytest.mark.parametrize("after", [rarely(1), rarely(4), 9, rarely(20)])
def test_an_interrupted_search_goes_on_without_repeating_a_block(
    blocks: Blocks, capsys: pytest.CaptureFixture[str], after: int
) -> None:
    words = ["--tune", "k.toml", "--rounds", "3"]
    blocks.interrupt_after, blocks.fails = after, "100"
    assert main(words) == 130
    assert "--out runs/tune-k --tune k.toml" in capsys.readouterr().out
    assert not Path("k.toml").exists()
    blocks.interrupt_after = None
    assert main(words) == 0
    assert max(Counter(blocks.starts).values()) == 1
    assert read_all_knobs(Path("k.toml"))["ddp"].settings == {"bucket_cap_mb": 50.0}


def test_a_base_that_fails_ends_the_search(
    blocks: Blocks, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks.fails = "as-before"
    assert main(["--tune", "k.toml"]) == 2
    assert "what was best so far failed" in capsys.readouterr().err and not Path("k.toml").exists()


def test_another_search_is_not_mixed_in(blocks: Blocks, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--tune", "k.toml", "--rounds", "3"]) == 0
    assert main(["--tune", "k.toml", "--rounds", "3", "--", "--arch", "vgg16"]) == 2
    assert "holds another plan" in capsys.readouterr().err
    Path("mine").mkdir()
    Path("mine/thesis.tex").touch()
    assert main(["--tune", "k.toml", "--out", "mine", "--new"]) == 2
    assert "holds something else" in capsys.readouterr().err and Path("mine/thesis.tex").exists()


def test_a_dry_run_tells_what_would_be_tried(
    blocks: Blocks, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--tune", "k.toml", "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert "at most 19 blocks" in output and "buckets: 1, 50, 100" in output
    assert not blocks.starts and not Path("runs").exists()


def test_a_missing_file_of_knobs_is_told_before_the_first_run(
    blocks: Blocks, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tuned-against-tuned"]) == 2
    assert "--tune knobs.toml" in capsys.readouterr().err


def test_rounds_are_of_a_search(blocks: Blocks, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--rounds", "4"]) == 2
    assert "here give --blocks" in capsys.readouterr().err


def test_a_changed_file_of_knobs_makes_another_plan(blocks: Blocks, tmp_path: Path) -> None:
    from compare.plan.record import plan_differences, plan_record

    path = tmp_path / "knobs.toml"
    path.write_text("[ddp]\nstatic_graph = true\n")
    old = plan_record(plan_of("--", "--knobs", "knobs.toml"), "")
    assert plan_differences(old, plan_record(plan_of("--", "--knobs", "knobs.toml"), "")) == []
    path.write_text("[ddp]\nstatic_graph = false\n")
    [line] = plan_differences(old, plan_record(plan_of("--", "--knobs", "knobs.toml"), ""))
    assert line.startswith("knobs: ")


# --------------------------------------------------------------------------- with real launchers


@pytest.mark.launch
@pytest.mark.full
@pytest.mark.timeout(900)  # ten starts, of which a busy machine makes four a minute
def test_tuning_and_training_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is asserted about speeds: of a search only that it comes to its end."""
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("OMPI_MCA_rmaps_base_oversubscribe", "1")
    monkeypatch.delenv("HOROVOD_CYCLE_TIME", raising=False)
    cycle = {"0.5": Knobs({}, {"HOROVOD_CYCLE_TIME": "0.5"})}
    knobs = {"ddp": {"static": STATIC}, "horovod": {"cycle": cycle}}
    monkeypatch.setattr("compare.running.tune.knobs_for", lambda c, plan: knobs[c.engine])
    monkeypatch.setattr("compare.running.scheduler.TURN_SECONDS", 0.2)
    monkeypatch.setattr(tune_module, "LOOK_BLOCKS", 1)
    path, runs = tmp_path / "k.toml", tmp_path / "runs"
    words = ["--tune", str(path), "--rounds", "3", "--out", str(runs), "--", *SMALL.split()]
    assert main(words) == 0, capsys.readouterr()
    assert "all against the defaults" in path.read_text() or "nothing was shown" in path.read_text()
    for engine, name, value in (("ddp", "static", "true"), ("horovod", "cycle", "0.5")):
        folder = runs / engine / name / "1-blocks/1-values"
        [verdict] = judge(load_comparison(folder))  # an ordinary comparison
        assert (verdict.first, verdict.second, verdict.speed is None) == (value, "as-before", False)
        run = folder / f"turns/2-workers/block-1/{value}/0/run"
        assert read_json(run / "config.json")["static_graph"] is (engine == "ddp")
        cycle_time = read_json(run / "environment.json")["variables"].get("HOROVOD_CYCLE_TIME")
        assert cycle_time == (None if engine == "ddp" else "0.5")
