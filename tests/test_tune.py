"""--tune: the search with made-up runs, what it writes, and once with real launchers."""

import json
import random
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from launching import SMALL, rarely, read_json
from test_compare_plan import plan_of

from compare import run as run_module
from compare.evidence.paired import estimate_ratio
from compare.evidence.turns import Block, Turn
from compare.plan.configurations import CONFIGURATIONS
from compare.plan.options import parse_options
from compare.run import main
from compare.running import tune as tune_module
from compare.running.knobs_found import Found, file_text, write_file
from compare.running.knobs_to_try import (
    free_knobs,
    horovod_knobs,
    settings_knob,
    settings_knobs,
    variable_knob,
    with_knobs,
)
from compare.running.scheduler import origin
from compare.running.search import SearchError, Trial, Value, is_gain, search, try_knob
from compare.running.sides import MeasurementError, NoTurns, Side
from compare.running.tune import comparison_command, tuning_plan
from recipe.errors import UserError
from recipe.knobs import SETTINGS, Knobs, knobs_text, read_all_knobs, refusal

BUCKETS = settings_knob("bucket_cap_mb", 1.0, 50.0, 100.0)
STATIC = settings_knob("static_graph", True)


class Machine:
    """Measures by a table: the speed of each setting, times noise."""

    def __init__(self, gains: dict[tuple[str, Any], float], noise: float = 0.0, seed: int = 0):
        self.gains, self.noise, self.lot = gains, noise, random.Random(seed)
        self.calls: list[tuple[str, Knobs]] = []

    def __call__(self, place: str, wanted: Mapping[str, Knobs]) -> dict[str, float]:
        speeds = {}
        for name, knobs in wanted.items():
            self.calls.append((f"{place}/{name}", knobs))
            speed = 100.0
            for item in (knobs.settings | knobs.variables).items():
                speed *= self.gains.get(item, 1.0)
            if speed:
                speeds[name] = speed * (1 + self.lot.gauss(0, self.noise))
        return speeds


def test_the_search_finds_the_planted_best_and_builds_on_it() -> None:
    gains = {("bucket_cap_mb", 50.0): 1.2, ("bucket_cap_mb", 100.0): 1.1, ("static_graph", True): 1}
    machine = Machine(gains, noise=0.005)
    told: list[str] = []
    best, tried = search(
        [BUCKETS, STATIC], machine, 5, 0, lambda trials: told.append(trials[0].knob)
    )
    assert best == Knobs({"bucket_cap_mb": 50.0}, {}) and told == ["bucket_cap_mb", "static_graph"]
    assert [trial.value.shown for trial in tried if trial.kept] == ["50"]
    on_top = [knobs.settings for place, knobs in machine.calls if place.endswith("/true")]
    assert on_top[0] == {"bucket_cap_mb": 50.0, "static_graph": True}
    assert len(machine.calls) <= 5 * 4 + 5 * 2
    assert len({place for place, _ in machine.calls}) == len(machine.calls)


@pytest.mark.parametrize("rounds", [3, 5, 8])
def test_noise_keeps_the_defaults(rounds: int) -> None:
    """On a machine whose runs differ by 8 % from each other, nothing that gains nothing is kept
    more often than the rule says: one value in 32 at most."""
    searches, values = 200, 3
    kept = sum(
        search([BUCKETS], Machine({}, 0.08, seed), rounds, seed)[0] != Knobs()
        for seed in range(searches)
    )
    assert kept <= searches * values / 32 * 1.3


def test_a_real_gain_is_found_on_a_noisy_machine() -> None:
    gains = {("bucket_cap_mb", 50.0): 1.25}
    found = sum(
        search([BUCKETS], Machine(gains, 0.05, seed), 5, seed)[0].settings.get("bucket_cap_mb")
        == 50.0
        for seed in range(50)
    )
    assert found >= 45


def test_each_round_holds_the_best_so_far_and_losers_leave() -> None:
    machine = Machine({("bucket_cap_mb", 50.0): 1.2, ("bucket_cap_mb", 1.0): 0.7}, 0.001)
    try_knob(BUCKETS, Knobs(), machine, 5, 0)
    counts = Counter(place.rpartition("/")[2] for place, _ in machine.calls)
    assert counts["as before"] == counts["50"] == 5 and counts["1"] == 2
    orders = [[p.split("/")[2] for p, _ in machine.calls[i : i + 4]] for i in (0, 4)]
    assert orders[0] != orders[1]  # by lot


def test_a_value_that_fails_is_left_out_and_a_base_that_fails_ends_the_search() -> None:
    best, tried = search([BUCKETS], Machine({("bucket_cap_mb", 50.0): 0.0}), 5, 0)
    assert best == Knobs() and [trial.failed for trial in tried] == [False, True, False]
    assert tried[1].estimate is None
    with pytest.raises(SearchError, match="best knobs so far"):
        try_knob(STATIC, Knobs({"x": 1}), Machine({("x", 1): 0.0}), 5, 0)


@pytest.mark.parametrize(
    ("ratios", "gains"),
    [
        ([1.2, 1.1, 1.3, 1.2, 1.05], True),
        ([1.005, 1.006, 1.004, 1.006, 1.005], False),  # sure, and too little
        ([1.2, 2.9, 1.1, 1.15, 1.1], True),  # one disturbed run makes Student's interval wide
        ([1.2, 1.1, 0.9, 1.2, 1.1], False),
        ([1.2, 1.9, 1.1], False),
        ([1.2, 1.2], False),
        ([0.8, 0.8, 0.8], False),
    ],
)
def test_what_is_a_gain(ratios: list[float], gains: bool) -> None:
    assert is_gain(estimate_ratio(ratios, [1.0] * len(ratios))) is gains


def test_all_that_is_tried_may_stand_in_the_file(tmp_path: Path) -> None:
    horovod = horovod_knobs(True, False, 8, 2) + horovod_knobs(False, True, 8, 2)
    for engine, knobs in {"ddp": settings_knobs("ddp"), "horovod": horovod}.items():
        for knob in knobs:
            assert len({value.shown for value in knob.values}) == len(knob.values) > 0
            for value in knob.values:
                own = value.on(Knobs())
                (tmp_path / "k.toml").write_text(knobs_text({engine: own}))
                assert read_all_knobs(tmp_path / "k.toml") == {engine: own}
                assert not any(refusal(engine, name) for name in own.variables)
                assert own.settings.keys() <= SETTINGS[engine].keys()
    names = [knob.name for knob in horovod_knobs(True, False, 2, 1)]
    assert "HOROVOD_HIERARCHICAL_ALLREDUCE" not in names and "MPI's allreduce" in names
    assert "HOROVOD_HIERARCHICAL_ALLREDUCE" in [k.name for k in horovod_knobs(False, True, 8, 2)]


def test_a_candidate_is_started_with_flags_and_variables() -> None:
    knobs = Knobs({"bucket_cap_mb": 0.25, "static_graph": True}, {"NCCL_ALGO": "Ring"})
    tuned = with_knobs(CONFIGURATIONS["ddp-torchrun"], knobs)
    assert tuned.flags == ("--bucket-cap-mb", "0.25", "--static-graph")
    assert tuned.launch_words(2, None)[:2] == ["env", "NCCL_ALGO=Ring"]


def test_what_the_user_has_set_is_not_searched() -> None:
    plan = plan_of("--", "--no-static-graph", "--bucket_cap_mb=3", "--fp16-allreduce")
    free, lines = free_knobs(settings_knobs("ddp"), CONFIGURATIONS["ddp-torchrun"], plan, {})
    assert [k.name for k in free] == ["first_bucket_mb"]
    assert len(lines) == 2 and "--bucket-cap-mb is set already" in lines[0]
    knobs = horovod_knobs(True, False, 2, 1)
    shell = {"HOROVOD_CYCLE_TIME": "1"}
    free, lines = free_knobs(knobs, CONFIGURATIONS["horovod-mpi"], plan, shell)
    left_out = {k.name for k in knobs} - {k.name for k in free}
    assert left_out == {"HOROVOD_CYCLE_TIME", "num_groups"} and len(lines) == 2


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
    command = tune_module.shlex.split(comparison_command(plan, Path("k.toml")))
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
        (["--null"], "--null True: does not go together with --tune"),
        (["--blocks", "5"], "with --tune give --rounds"),
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


def found(engine: str, knobs: Knobs, ratios: list[float] | None) -> Found:
    name = {"ddp": "ddp-torchrun", "horovod": "horovod-mpi"}[engine]
    check = estimate_ratio(ratios, [1.0] * len(ratios)) if ratios else None
    value = Value("50", knobs.settings, knobs.variables)
    kept = Trial("bucket_cap_mb", value, check, False, kept=True)
    record = {"hosts": ["a", "b"], "device_name": "A Processor 9000", "torch": "2.14.1"}
    tried = (kept,) if knobs != Knobs() else ()
    return Found(CONFIGURATIONS[name], knobs, tried, check, record)


GAIN, NO_GAIN = [1.2, 1.21, 1.19], [1.2, 0.8, 1.0]


def test_the_file_tells_where_it_is_from_and_what_each_knob_gained(tmp_path: Path) -> None:
    ddp = found("ddp", Knobs({"bucket_cap_mb": 50.0}), GAIN)
    horovod = found("horovod", Knobs({}, {"HOROVOD_CYCLE_TIME": "0.5"}), NO_GAIN)
    text = file_text([ddp, horovod], {}, plan_of("--workers", "4"), ["--tune", "k.toml", "a b"])
    for words in ("--tune k.toml 'a b'", "4 workers on 2 host(s) (a, b)", "A Processor 9000",
                  "torch 2.14.1", "bucket_cap_mb, 50: 1.200 times", "shows no gain",
                  '# HOROVOD_CYCLE_TIME = "0.5"'):  # fmt: skip
        assert words in text, words
    (tmp_path / "k.toml").write_text(text)
    assert read_all_knobs(tmp_path / "k.toml") == {"ddp": Knobs({"bucket_cap_mb": 50.0}, {})}
    none = file_text([found("ddp", Knobs(), None)], {}, plan_of(), [])
    assert "nothing was shown to be faster" in none and "[ddp]" not in none


def test_quoted_words_of_several_lines_stay_in_the_comment(tmp_path: Path) -> None:
    ddp = found("ddp", Knobs({}, {"NCCL_ALGO": 'a\n"b"'}), GAIN)
    text = file_text([ddp], {}, plan_of(), ["--case", "big=--arch resnet50\n --epochs 2"])
    (tmp_path / "k.toml").write_text(text)
    assert read_all_knobs(tmp_path / "k.toml") == {"ddp": ddp.knobs}


def test_a_file_that_was_written_by_hand_is_never_lost(tmp_path: Path) -> None:
    path = tmp_path / "k.toml"
    path.write_text("[ddp]\nstatic_graph = true\n")
    for cap in (50.0, 60.0):
        write_file(path, [found("ddp", Knobs({"bucket_cap_mb": cap}), GAIN)], plan_of(), [])
    assert len(list(tmp_path.iterdir())) == 3
    assert "static_graph" in path.with_name("k.toml.old").read_text()


def test_the_other_engine_s_table_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "k.toml"
    path.write_text("[ddp]\nstatic_graph = true\n[horovod]\nnum_groups = 3\n")
    ddp = found("ddp", Knobs({"bucket_cap_mb": 50.0}), GAIN)
    write_file(path, [ddp], plan_of(), [])
    assert read_all_knobs(path)["ddp"].settings == {"bucket_cap_mb": 50.0}
    assert read_all_knobs(path)["horovod"].settings == {"num_groups": 3}
    assert "num_groups" in path.with_name("k.toml.old").read_text()


# --------------------------------------------------------------------------- with made-up runs


class Starts:
    """Stands for blocks of turns: writes what one leaves, and notes each start."""

    def __init__(self) -> None:
        self.commands: list[str] = []
        self.interrupt_after: int | None = None
        self.by_turns = True
        self.fails: str | None = None  # the name of a side

    def __call__(self, sides: Sequence[Side], rounds: int, folder: Path, *_: Any) -> Block:
        if self.interrupt_after is not None and len(self.commands) >= self.interrupt_after:
            raise KeyboardInterrupt
        shutil.rmtree(folder, ignore_errors=True)
        if len(sides) > 1 and not self.by_turns:
            raise NoTurns("the sides do not fit into the GPU's memory at once", sides[0].name)
        if self.fails in [one.name for one in sides]:
            raise MeasurementError(f"{self.fails} ended with exit code 1", self.fails)
        turns = [Turn(one.name, n, 1.0, self.speed(one), 0.1, 1.5) for n in (0, 1) for one in sides]
        block = Block(1, tuple(one.name for one in sides), 0.0, tuple(turns))
        for one in sides:
            self.commands.append(f"{folder} {one.shown()}")
            (folder / one.name).mkdir(parents=True, exist_ok=True)
            environment = json.dumps({"hosts": ["here"], "torch": "2"})
            (folder / one.name / "environment.json").write_text(environment)
        record = {**origin(sides, rounds), **asdict(block)}
        (folder / "block.json").write_text(json.dumps(record))
        return block

    def speed(self, side: Side) -> float:
        words = side.program
        speed = 100 + len(self.commands) / 100
        knobs = Path(words[words.index("--knobs") + 1]).read_text() if "--knobs" in words else ""
        caps = words[words.index("--bucket-cap-mb") + 1] if "--bucket-cap-mb" in words else ""
        if caps == "50" or "bucket_cap_mb = 50.0" in knobs:
            speed *= 1.3
        if "HOROVOD_CYCLE_TIME=0.5" in side.launcher or 'CYCLE_TIME = "0.5"' in knobs:
            speed *= 2
        return speed


@pytest.fixture
def starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Starts:
    starts = Starts()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tune_module, "run_block", starts)
    for name in ("tune", "progress", "scheduler"):
        monkeypatch.setattr(f"compare.running.{name}.trainers_sha256", lambda: "as it is")
    monkeypatch.setattr(tune_module.preflight, "find_warnings", lambda plan, folder: [])
    monkeypatch.setattr(run_module, "check_tools", lambda plan: None)
    cycle = variable_knob("HOROVOD_CYCLE_TIME", "0.5", "9")
    knobs = {"ddp": [BUCKETS, STATIC], "horovod": [cycle]}
    monkeypatch.setattr(tune_module, "knobs_for", lambda c, plan: knobs[c.engine])
    monkeypatch.delenv("HOROVOD_CYCLE_TIME", raising=False)
    return starts


def test_a_whole_search(starts: Starts, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--tune", "k.toml", "--rounds", "3"]) == 0
    knobs = read_all_knobs(Path("k.toml"))
    assert knobs["ddp"] == Knobs({"bucket_cap_mb": 50.0}, {})
    assert knobs["horovod"] == Knobs({}, {"HOROVOD_CYCLE_TIME": "0.5"})
    output = capsys.readouterr().out
    assert "bucket_cap_mb/round-1: " in output and "left" in output and ": kept" in output
    assert "warning: other processes kept 1.5 of" in output
    assert "other processes kept 1.5 of" in Path("k.toml").read_text()
    assert "all of it against the defaults: 1.3" in output and "--knobs k.toml" in output
    record = read_json(Path("runs/tune-k/tuned.json"))
    assert [one["holds"] for one in record["engines"]] == [True, True]
    made = len(starts.commands)
    assert main(["--tune", "k.toml", "--rounds", "3"]) == 0  # everything is there
    assert len(starts.commands) == made
    assert main(["--tune", "k.toml", "--rounds", "3", "--new"]) == 0
    assert len(starts.commands) == 2 * made


def test_other_knobs_are_checked_by_runs_of_their_own(starts: Starts) -> None:
    """Though their commands, which name the file, are those of the runs before."""
    assert main(["--tune", "k.toml", "--rounds", "3"]) == 0
    stale = Path("runs/tune-k/ddp.toml")
    stale.write_text(stale.read_text().replace("50", "9"))
    made = len(starts.commands)
    assert main(["--tune", "k.toml", "--rounds", "3"]) == 0
    assert len(starts.commands) == made + 2 * 3
    assert read_all_knobs(stale)["ddp"].settings == {"bucket_cap_mb": 50.0}


def test_sides_that_cannot_take_turns_are_measured_one_after_the_other(
    starts: Starts, capsys: pytest.CaptureFixture[str]
) -> None:
    starts.by_turns = False
    assert main(["--tune", "k.toml", "--rounds", "3"]) == 0
    assert read_all_knobs(Path("k.toml"))["ddp"] == Knobs({"bucket_cap_mb": 50.0}, {})
    assert capsys.readouterr().out.count("one after the other, because the sides do not fit") == 2


@pytest.mark.parametrize("by_turns", [True, False])
@pytest.mark.parametrize("after", [rarely(1), rarely(4), 9, rarely(20)])
def test_an_interrupted_search_goes_on_without_repeating_a_block(
    starts: Starts, capsys: pytest.CaptureFixture[str], after: int, by_turns: bool
) -> None:
    words = ["--tune", "k.toml", "--rounds", "3"]
    starts.interrupt_after, starts.by_turns, starts.fails = after, by_turns, "100"
    assert main(words) == 130
    assert "--out runs/tune-k --tune k.toml" in capsys.readouterr().out
    assert not Path("k.toml").exists()
    starts.interrupt_after = None
    assert main(words) == 0
    counts = Counter(starts.commands)
    assert max(counts.values()) == 1
    assert read_all_knobs(Path("k.toml"))["ddp"].settings == {"bucket_cap_mb": 50.0}


def test_another_search_is_not_mixed_in(starts: Starts, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--tune", "k.toml", "--rounds", "3"]) == 0
    assert main(["--tune", "k.toml", "--rounds", "3", "--", "--arch", "vgg16"]) == 2
    assert "holds another plan" in capsys.readouterr().err
    Path("mine").mkdir()
    Path("mine/thesis.tex").touch()
    assert main(["--tune", "k.toml", "--out", "mine", "--new"]) == 2
    assert "holds something else" in capsys.readouterr().err and Path("mine/thesis.tex").exists()


def test_a_dry_run_tells_what_would_be_tried(
    starts: Starts, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--tune", "k.toml", "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert "at most 15 blocks" in output and "bucket_cap_mb: 1, 50, 100" in output
    assert not starts.commands and not Path("runs").exists()


def test_a_missing_file_of_knobs_is_told_before_the_first_run(
    starts: Starts, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tuned-against-tuned"]) == 2
    assert "--tune knobs.toml" in capsys.readouterr().err


def test_rounds_are_of_a_search(starts: Starts, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--rounds", "4"]) == 2
    assert "here give --blocks" in capsys.readouterr().err


def test_a_changed_file_of_knobs_makes_another_plan(starts: Starts, tmp_path: Path) -> None:
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
@pytest.mark.timeout(900)  # eight starts, of which a busy machine makes four a minute
def test_tuning_and_training_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is asserted about speeds: of a search only that it comes to its end."""
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("OMPI_MCA_rmaps_base_oversubscribe", "1")
    monkeypatch.delenv("HOROVOD_CYCLE_TIME", raising=False)
    knobs = {"ddp": STATIC, "horovod": variable_knob("HOROVOD_CYCLE_TIME", "0.5")}
    monkeypatch.setattr(tune_module, "knobs_for", lambda c, plan: [knobs[c.engine]])
    monkeypatch.setattr(tune_module, "is_gain", lambda estimate: True)
    monkeypatch.setattr("compare.running.search.is_gain", lambda estimate: True)
    monkeypatch.setattr("compare.running.knobs_found.is_gain", lambda estimate: True)
    monkeypatch.setattr("compare.running.search.TELLING_ROUNDS", 9)
    monkeypatch.setattr(tune_module, "LEAST_ROUNDS", 1)
    path, runs = tmp_path / "k.toml", tmp_path / "runs"
    words = ["--tune", str(path), "--rounds", "1", "--out", str(runs), "--", *SMALL.split()]
    assert main(words) == 0, capsys.readouterr()
    assert read_all_knobs(path) == {
        "ddp": Knobs({"static_graph": True}, {}),
        "horovod": Knobs({}, {"HOROVOD_CYCLE_TIME": "0.5"}),
    }
    for engine in ("ddp", "horovod"):
        assert read_all_knobs(runs / f"{engine}.toml") == {engine: read_all_knobs(path)[engine]}
        tuned = runs / engine / "check/round-1/tuned/0/run"  # trained with that file
        config = read_json(tuned / "config.json")
        assert config["static_graph"] is (engine == "ddp")
        cycle = {} if engine == "ddp" else {"HOROVOD_CYCLE_TIME": "0.5"}
        assert config["knob_variables"] == cycle
        variables = read_json(tuned / "environment.json")["variables"]
        assert variables.get("HOROVOD_CYCLE_TIME") == cycle.get("HOROVOD_CYCLE_TIME")
