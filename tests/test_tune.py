"""--tune: the search with made-up blocks, what it writes, and once with real launchers."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from launching import SMALL, rarely, read_json
from records import MadeUpBlocks
from test_compare_plan import plan_of

from compare import run as run_module
from compare.evidence.paired import estimate_ratio
from compare.evidence.records import load_comparison
from compare.evidence.verdicts import judge
from compare.plan.configurations import CONFIGURATIONS
from compare.plan.plan import Run
from compare.plan.plan_file import plan_differences, plan_record
from compare.run import main, parse_options
from compare.running import tune as tune_module
from compare.running.tune import Values, commented, free_knobs, knobs_for, tuning_plan
from recipe.errors import UserError
from recipe.settings.knobs import Knobs, knobs_text, read_knobs

BUCKETS: Values = {cap: Knobs({"bucket_cap_mb": float(cap)}) for cap in ("1", "50", "100")}
STATIC: Values = {"true": Knobs({"static_graph": True})}


SEARCH = ["--tune", "k.toml", "--rounds", "3"]


def search_only(knobs: dict[str, dict[str, Values]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a search of each engine try these knobs alone."""
    monkeypatch.setattr(
        "compare.running.tune.knobs_for", lambda run: knobs[run.configuration.engine]
    )


@pytest.mark.parametrize(
    ("ratios", "gains"),
    [
        ([1.2, 1.1, 1.3, 1.2, 1.15], True),
        ([1.005, 1.006, 1.004, 1.006, 1.005], False),  # sure, and too little
        ([1.2, 1.1, 0.9, 1.2, 1.1], False),
        ([0.8, 0.8, 0.8], False),
    ],
)
def test_what_is_a_gain(ratios: list[float], gains: bool) -> None:
    assert tune_module.is_gain(estimate_ratio(ratios, [1.0] * len(ratios))) is gains


@pytest.mark.parametrize(
    ("engine", "has_nccl", "first", "absent"),
    [
        ("ddp-torchrun", False, "bucket_cap_mb", "num_groups"),
        ("horovod-mpi", False, "MPI-allreduce", "HOROVOD_HIERARCHICAL_ALLREDUCE"),
        ("horovod-mpi", True, "HOROVOD_HIERARCHICAL_ALLREDUCE", "MPI-allreduce"),
        ("horovod-gloo", False, "HOROVOD_FUSION_THRESHOLD", "OMPI_MCA_mpi_yield_when_idle"),
    ],
)
def test_all_that_is_tried_may_stand_in_the_file(
    engine: str,
    has_nccl: bool,
    first: str,
    absent: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("compare.running.checks.visible_gpus", lambda: 8)
    monkeypatch.setattr("compare.running.checks.horovod_facts", lambda: {"NCCL": has_nccl})
    run = Run(0, one := CONFIGURATIONS[engine], 8, 1, hosts="a.invalid:4,b.invalid:4")
    knobs = knobs_for(run)
    assert next(iter(knobs)) == first and absent not in knobs
    for own in (own for values in knobs.values() for own in values.values()):
        (tmp_path / "k.toml").write_text(knobs_text({one.engine: own}))
        assert read_knobs(tmp_path / "k.toml") == {one.engine: own}


def test_what_the_user_has_set_is_not_searched(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_of("--", "--no-static-graph", "--bucket_cap_mb=3", "--fp16-allreduce")
    assert list(free_knobs(CONFIGURATIONS["ddp-torchrun"], plan)) == ["first_bucket_mb"]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and "--bucket-cap-mb is already set" in lines[0]
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "1")
    free = free_knobs(CONFIGURATIONS["horovod-mpi"], plan)
    assert len(capsys.readouterr().out.splitlines()) == 2 and "HOROVOD_FUSION_THRESHOLD" in free
    assert not free.keys() & {"HOROVOD_CYCLE_TIME", "num_groups"}


def tuned_plan(*words: str) -> Any:
    options = parse_options(["--tune", "k.toml", *words], "")
    return tuning_plan(run_module.make_plan(options), options)


@pytest.mark.parametrize(
    ("words", "configurations"),
    [
        (["--", "--arch", "resnet18"], ("ddp-torchrun", "horovod-mpi")),
        (["tuned-against-tuned"], ("ddp-torchrun", "horovod-mpi")),  # has no file of knobs yet
        (["tuned-against-tuned", "--configurations", "ddp-tuned"], ("ddp-tuned",)),
        (["--configurations", "horovod-gloo"], ("horovod-gloo",)),
        (["null-test"], ("ddp-torchrun", "horovod-mpi")),
    ],
)
def test_the_plan_of_a_search(words: list[str], configurations: tuple[str, ...]) -> None:
    plan = tuned_plan(*words)
    assert (plan.configurations, plan.workers) == (configurations, (2,))
    assert not plan.null  # or each would be tuned twice
    for member in plan.members():
        assert "--knobs" not in plan.run(0, plan.cases[0], member, 2).command(Path("x"))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--workers", "1"], "a single worker exchanges nothing"),
        (["--rounds", "2"], "at least 3"),
        (["--case", "a=--epochs 1", "--case", "b=--epochs 2"], "several cases (a, b)"),
        (["--null"], "--null: cannot be combined with --tune"),
        (["--blocks", "5"], "--rounds sets the number"),
        (["--tune", "."], "exists already; name a new file"),
        (["--new"], "--out the folder of a new search"),
        (["--case", "a=--knobs x.toml"], "begins from the defaults"),
        (["--configurations", "horovod-mpi", "horovod-gloo"], "leave out horovod-gloo"),
        (["--", "--knobs", "x.toml"], "begins from the defaults"),
    ],
)
def test_what_a_search_refuses(words: list[str], told: str) -> None:
    with pytest.raises(UserError) as refused:
        tuned_plan(*words)
    assert told in str(refused.value)


# --------------------------------------------------------------------------- with made-up blocks


def speed_of(side: Run) -> float:
    """A bucket of 50 makes DDP 1.3 times as fast, a cycle of 0.5 Horovod twice."""
    words = shlex.join(side.command(Path("x")))
    speed = 130.0 if "--bucket-cap-mb 50" in words else 100.0
    return speed * (2 if "HOROVOD_CYCLE_TIME=0.5" in words else 1)


@pytest.fixture
def blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MadeUpBlocks:
    blocks = MadeUpBlocks(speed_of, 0.001)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("compare.running.comparison.run_block", blocks)
    monkeypatch.setattr("compare.plan.plan_file.trainers_sha256", lambda: "as it is")
    monkeypatch.setattr(run_module.checks, "find_warnings", lambda plan, folder: [])
    monkeypatch.setattr(run_module, "check_tools", lambda plan: None)
    cycle = {value: Knobs({}, {"HOROVOD_CYCLE_TIME": value}) for value in ("0.5", "9")}
    knobs = {"ddp": {"buckets": BUCKETS, "static": STATIC}, "horovod": {"cycle": cycle}}
    search_only(knobs, monkeypatch)
    monkeypatch.delenv("HOROVOD_CYCLE_TIME", raising=False)
    return blocks


def test_a_whole_search(blocks: MadeUpBlocks, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(SEARCH) == 0
    assert read_knobs(Path("k.toml")) == {
        "ddp": Knobs({"bucket_cap_mb": 50.0}, {}),
        "horovod": Knobs({}, {"HOROVOD_CYCLE_TIME": "0.5"}),
    }
    told = Path("k.toml").read_text()
    for said in ("--tune k.toml", "2 workers on ", "# buckets 50: 1.3", "defaults: 1.3"):
        assert said in told, said
    assert commented("a 'b\nc'") == "# a 'b\n# c'"  # quoted words of several lines
    output = capsys.readouterr().out
    for said in ("buckets 50: 1.3", "kept: 50", "--knobs k.toml"):
        assert said in output, said
    on_top = read_json(Path("runs/tune-k/ddp/static/1-values/plan.json"))
    flags = on_top["configuration"]["true"]["flags"]
    assert flags == ["--bucket-cap-mb", "50", "--static-graph"]
    assert main(SEARCH) == 2 and "exists already" in capsys.readouterr().err
    other = ["--tune", "l.toml", "--out", "runs/tune-k", "--", "--arch", "vgg16"]
    assert main(other) == 2 and "holds another plan" in capsys.readouterr().err
    made = len(blocks.folders)
    Path("k.toml").unlink()
    assert main(SEARCH) == 0 and len(blocks.folders) == made  # all was measured already


def test_what_does_not_hold_against_the_defaults_is_a_comment(blocks: MadeUpBlocks) -> None:
    blocks.fails = "tuned"
    assert main(SEARCH) == 0
    told = Path("k.toml").read_text()
    assert "# bucket_cap_mb = 50.0" in told and "no gain was proven" in told
    assert read_knobs(Path("k.toml")) == {}


@pytest.mark.parametrize("after", [rarely(1), rarely(4), 9, rarely(14)])
def test_an_interrupted_search_goes_on_without_repeating_a_block(
    blocks: MadeUpBlocks, capsys: pytest.CaptureFixture[str], after: int
) -> None:
    blocks.error, blocks.error_after, blocks.fails = KeyboardInterrupt(), after, "100"
    assert main(SEARCH) == 130 and not Path("k.toml").exists()
    assert "--out runs/tune-k --tune k.toml" in capsys.readouterr().out
    blocks.error = None
    assert main(SEARCH) == 0
    assert len(blocks.folders) == len(set(blocks.folders)) == 15
    assert read_knobs(Path("k.toml"))["ddp"].settings == {"bucket_cap_mb": 50.0}


def test_a_base_that_fails_ends_the_search(
    blocks: MadeUpBlocks, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks.fails = "as-before"
    assert main(["--tune", "k.toml"]) == 2
    assert "best setting so far failed" in capsys.readouterr().err and not Path("k.toml").exists()


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["--tune", "k.toml", "--dry-run"], 2, "--dry-run: cannot be combined with --tune"),
        (["tuned-against-tuned"], 2, "--tune knobs.toml"),
        (["--rounds", "4"], 2, "here give --blocks"),
    ],
)
def test_what_is_told_before_the_first_run(
    words: list[str],
    code: int,
    told: str,
    blocks: MadeUpBlocks,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(words) == code
    assert told in "".join(capsys.readouterr())
    assert not blocks.folders and not Path("runs").exists()


def test_a_changed_file_of_knobs_makes_another_plan(blocks: MadeUpBlocks) -> None:
    records = []
    for value in ("true", "true", "false"):
        Path("knobs.toml").write_text(f"[ddp]\nstatic_graph = {value}\n")
        records.append(plan_record(plan_of("--", "--knobs", "knobs.toml"), ""))
    first, same, other = records
    assert plan_differences(first, same) == []
    [line] = plan_differences(first, other)
    assert line.startswith("knobs: ")


# --------------------------------------------------------------------------- with real launchers


@pytest.mark.launch
@pytest.mark.full
def test_tuning_and_training_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is asserted about speeds: of a search only that it comes to its end."""
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("OMPI_MCA_rmaps_base_oversubscribe", "1")
    monkeypatch.delenv("HOROVOD_CYCLE_TIME", raising=False)
    cycle = {"0.5": Knobs({}, {"HOROVOD_CYCLE_TIME": "0.5"})}
    search_only({"ddp": {"static": STATIC}, "horovod": {"cycle": cycle}}, monkeypatch)
    monkeypatch.setattr("compare.running.scheduler.TURN_SECONDS", 0.2)
    path, runs = tmp_path / "k.toml", tmp_path / "runs"
    words = ["--tune", str(path), "--rounds", "3", "--out", str(runs), "--", *SMALL.split()]
    assert main(words) == 0, capsys.readouterr()
    assert re.search("all against the defaults|nothing was shown", path.read_text())
    for engine, name, value in (("ddp", "static", "true"), ("horovod", "cycle", "0.5")):
        folder = runs / engine / name / "1-values"
        [verdict] = judge(load_comparison(folder))  # an ordinary comparison
        assert (verdict.first, verdict.second, verdict.speed is None) == (value, "as-before", False)
        run = folder / f"turns/2-workers/block-1/{value}/0/run"
        assert read_json(run / "config.json")["static_graph"] is (engine == "ddp")
        cycle_time = read_json(run / "environment.json")["variables"].get("HOROVOD_CYCLE_TIME")
        assert cycle_time == (None if engine == "ddp" else "0.5")
