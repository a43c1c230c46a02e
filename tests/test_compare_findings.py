"""What a comparison may conclude: only from runs that differ in what the plan varies, within one
case, and with the reason where it was measured."""

import itertools
import json
import math
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from making import CPU, a_world
from records import (
    a_plan,
    anew,
    drop_runs,
    edit,
    fail_run,
    find,
    lines_of,
    make_turns,
    part_of,
    verdicts_of,
)
from test_compare_records import TWO_CASES, change, edit_fingerprint, make_comparison
from test_environment import CONFIG, print_of

from compare.evidence.equality import (
    COMMIT,
    CONDITIONS,
    EQUAL_IN_SUMMARY,
    EQUAL_WHERE_USED,
    OF_SCRIPT,
    PLACES,
    START,
)
from compare.evidence.record import Record, read_comparison
from compare.evidence.rows import (
    Row,
    phase_rows,
    subtract_phases,
    training_rows,
)
from compare.page.formats import as_markdown, as_page, as_text
from compare.page.labels import labels_of
from compare.page.plots import ALONE, draw_plots
from compare.page.report import MISSING, Report, notices
from compare.page.sentences import sentence
from compare.page.tables import PHASES
from compare.plan.configurations import Configuration
from compare.plan.plan import Share
from recipe.record.fingerprint import describe
from recipe.record.schema import Energy, Input, Phases
from recipe.settings.flags import FLAGS

HOROVOD_TUNED = Configuration(
    "horovod-tuned", "horovod", "horovodrun", "mpi", environment={"HOROVOD_CYCLE_TIME": "1"}
)
DDP_FP16 = Configuration("ddp-fp16", "ddp", "torchrun", flags=("--fp16-allreduce",))
HOROVOD_FP16 = Configuration(
    "horovod-fp16", "horovod", "horovodrun", "mpi", flags=("--fp16-allreduce",)
)
DDP_TUNED = Configuration("ddp-tuned", "ddp", "torchrun", flags=("--static-graph",))
DDP_BATCH = Configuration("ddp-64", "ddp", "torchrun", flags=("--batch-size", "64"))


def compare(tmp_path, ratio: float = 1.1, **plan: Any) -> Record:
    """Make a comparison and load it: of one number of workers unless told otherwise."""
    settings = {"workers": (2,), "blocks": 3, **plan}
    return read_comparison(make_comparison(tmp_path / "compare-1", a_plan(**settings), ratio))


def differing(comparison: Record) -> list[list[str]]:
    """Return the fields that forbid each verdict."""
    verdicts = verdicts_of(anew(comparison))
    assert all((verdict.speed is None) == bool(verdict.differences) for verdict in verdicts)
    return [[fact.field for fact in verdict.differences] for verdict in verdicts]


def another(value: Any) -> Any:
    """Return a value that is not equal."""
    return {**value, "MALLOC_ARENA_MAX": "1"} if isinstance(value, dict) else f"not {value}"


# ------------------------------------------------------------------------- what must be equal


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> Record:
    """A comparison of the two engines in which every run says of itself what real ones do."""
    comparison = compare(tmp_path_factory.mktemp("real"), blocks=1)
    told = json.loads(json.dumps(print_of(CONFIG)))
    surroundings = describe(a_world(0, 2), "ddp", "Gloo", CPU, 1, [("here", [0, 1])] * 2)
    of_horovod = {
        "engine": "horovod",
        "transport": "MPI",
        "launcher": "mpirun",
        "version": "0.28.1",
        "horovod": "0.28.1",
        "mpi": "Open MPI 4.1.8",
    }
    for run in comparison.runs:
        own = of_horovod if run.engine == "horovod" else {"mpi": None}
        run.config = replace(run.config, flags=json.loads(json.dumps(asdict(CONFIG))))
        run.environment = replace(surroundings, **own)
        run.summary = replace(run.summary, fingerprint=dict(told))
    return comparison


def caught_in(comparison: Record, record: dict[str, Any], field: str) -> list[str]:
    """Change one field of one run, and return what then forbids the verdict."""
    with mock.patch.dict(record, {field: another(record[field])}):
        [fields] = differing(comparison)
    return fields


def test_every_field_of_a_real_fingerprint_changed_alone_is_caught(real):
    assert differing(real) == [[]]
    told = real.runs[0].summary.fingerprint
    assert len(told) > 40
    assert all(caught_in(real, told, field) == [field] for field in told)


def test_every_setting_of_a_real_trainer_changed_alone_is_caught(real):
    """Those of the fingerprint are there as they are in effect; the others in config.json."""
    run = real.runs[-1]
    settings = run.config.flags.keys() - run.summary.fingerprint.keys()
    assert {"log_interval", "cuda"} <= settings
    caught = {field: caught_in(real, run.config.flags, field) for field in settings}
    # The transport is compared by what really carried the gradients, not by what was asked for.
    alike = {*PLACES, "transport"}
    assert caught == {field: [] if field in alike else [field] for field in settings}


def test_every_condition_of_a_real_environment_changed_alone_is_caught(real):
    run = real.runs[0]
    environment = vars(run.environment)
    told_twice = {*START, *EQUAL_WHERE_USED, *run.summary.fingerprint}
    shown = {"cuda": "CUDA version", "variables": "MALLOC_ARENA_MAX"}
    for field in {*CONDITIONS, "variables"} - told_twice - {"ranks_per_gpu"}:
        assert caught_in(real, environment, field) == [shown.get(field, field)]
    with mock.patch.dict(environment, ranks_per_gpu=2):  # no text: it is counted with
        assert differing(real) == [["ranks_per_gpu"]]
    for field in EQUAL_IN_SUMMARY:
        told = [] if field in run.summary.fingerprint else [field]
        assert caught_in(real, vars(run.summary), field) == told


@pytest.mark.parametrize(
    ("plan", "fields"),
    [
        (
            {"configurations": ("horovod-mpi", "horovod-mpirun")},
            {*EQUAL_WHERE_USED} - {*OF_SCRIPT, COMMIT, "timm"},
        ),
        ({"configurations": ("horovod-mpi",), "null": True}, START),
        ({"configurations": ("ddp-gloo", "horovod-mpirun-gloo")}, START - {"engine"}),
        ({"configurations": ("ddp-mpi", "ddp-gloo")}, START - {"transport"}),
        ({"configurations": ("horovod-mpi", "horovod-mpirun-mpi")}, {"engine"}),
        (
            {"configurations": ("horovod-mpi", "horovod-tuned"), "defined": (HOROVOD_TUNED,)},
            ("affinity", "allocator"),
        ),
    ],
)
def test_what_must_be_equal_between_configurations_that_share_it(tmp_path, plan, fields):
    """Versions of what both use; of the start all that the plan does not vary, in a null test the
    whole of it; beside a variable that the plan varies all others."""
    comparison = compare(tmp_path, blocks=1, **plan)
    for run in comparison.runs:
        change(run.environment, nccl="2.27.3")
    assert differing(comparison) == [[]]
    for field in fields:
        assert caught_in(comparison, vars(comparison.runs[0].environment), field) == [field]


def test_a_package_that_only_one_side_uses_is_no_difference(tmp_path):
    """As in SGD against LAMB."""
    comparison = compare(tmp_path, blocks=1)
    of_horovod = [run for run in comparison.runs if run.engine == "horovod"]
    for run in of_horovod:
        run.summary.fingerprint["timm"] = "1.0.31"
    assert differing(comparison) == [[]]
    for run in comparison.runs:
        run.summary.fingerprint.setdefault("timm", "1.0.30")
    assert differing(comparison) == [["timm"]]


CORNERS = ("ddp-gloo", "horovod-mpirun-gloo", "ddp-mpi", "horovod-mpirun-mpi")
OWN = VIEWS, BACKEND, SLEEP, YIELD = (
    "DDP's gradients are views",
    "runs on mpi4py",
    "Horovod sleeps",
    "yields its core",
)


@pytest.mark.parametrize(
    ("names", "device", "flags", "variables", "said"),
    [
        (CORNERS, "cpu", {"sleeping_poll": True}, {}, {BACKEND, SLEEP, YIELD}),
        (CORNERS, "cpu", {}, {}, {BACKEND}),  # an earlier trainer's
        (CORNERS[::2], "cuda", {"gradient_as_bucket_view": True}, {}, {BACKEND, VIEWS}),
        (CORNERS[:2], "cpu", {"sleeping_poll": True}, {}, {SLEEP}),
        (CORNERS[:2], "cuda", {"sleeping_poll": True}, {}, set()),
        (
            CORNERS[1::2],
            "cpu",
            {"sleeping_poll": False},
            {"OMPI_MCA_mpi_yield_when_idle": "0"},
            set(),
        ),
        (CORNERS[1::2], "cpu", {"sleeping_poll": False}, {}, {YIELD}),
    ],
)
def test_a_report_says_what_is_this_projects_own(tmp_path, names, device, flags, variables, said):
    comparison = compare(tmp_path, configurations=names, blocks=1)
    for run in comparison.runs:
        run.config.flags.update(flags)
        change(run.environment, device=device, variables=variables)
    report = Report(anew(comparison))
    assert {text for text in OWN if text in report.ours} == said
    for written in (as_text([report]), as_markdown([report]), as_page([report])):
        assert ("Not stock: " in written) is bool(said)
    assert sorted(comparison.square.values()) == (sorted(names) if names == CORNERS else [])


# ------------------------------------------------------------------------- what the plan varies


FP16 = ("ddp-torchrun", "ddp-fp16", "horovod-mpi", "horovod-fp16")


@pytest.mark.parametrize(
    ("names", "pairs", "defined", "varied"),
    [
        (
            FP16,
            (FP16[:2], FP16[::2], FP16[1::2]),
            (DDP_FP16, HOROVOD_FP16),
            {"wire_format", "fp16_allreduce"},
        ),
        (("ddp-torchrun", "ddp-64"), (), (DDP_BATCH,), {"batch_size", "samples_seen"}),
    ],
)
def test_a_setting_that_the_plan_varies_may_differ(tmp_path, names, pairs, defined, varied):
    """With what follows from it."""
    comparison = compare(tmp_path, configurations=names, defined=defined, judged_pairs=pairs)
    assert differing(comparison) == [[]] * (len(pairs) or 1)
    assert varied_in(comparison) == varied


@pytest.mark.parametrize(
    ("pair", "run", "field", "value"),
    [
        # The plan varies the wire format, but not within this pair.
        (("ddp-fp16", "horovod-fp16"), "block-2/horovod-fp16-2", "wire_format", "fp32"),
        (("ddp-torchrun", "ddp-fp16"), "block-1/ddp-fp16-2", "batch_norm", "sync"),
    ],
)
def test_nothing_but_the_varied_setting_may_differ(tmp_path, pair, run, field, value):
    comparison = compare(tmp_path, configurations=pair, defined=(DDP_FP16, HOROVOD_FP16))
    edit_fingerprint(comparison.folder / run, field, value)
    comparison = read_comparison(comparison.folder)
    assert differing(comparison) == [[field]]
    assert sentence(verdicts_of(comparison)[0]).endswith("differ in more than the plan varies.")


def varied_in(comparison: Record) -> set[str]:
    """Return the fields that differ as the plan has them differ."""
    facts = anew(comparison).groups[0].facts
    return {fact.field for fact in facts if fact.is_varied and not fact.is_confounder}


CHANGES: dict[str, Any] = {
    "wire_format": "fp16",
    "batch_size": 5,
    "batches_per_allreduce": 2,
    "epochs": 9,
    "max_steps": 3,
    "seed": 1,
    "arch": "squeezenet1_0",
    "synthetic_images": 41,
    "base_lr": 0.5,
    "lr_scheduler": "cosine",
    "lr_step_epochs": (1, 2),
    "lr_gamma": 0.3,
    "lr_min": 0.01,
    "warmup_epochs": 1.5,
    "warmup_method": "linear",
    "precision": "bf16",
    "bucket_cap_mb": 1.0,
    "channels_last": True,
    "batch_norm": "sync",
    "workers": 2,
    "momentum": 0.5,
    "loss": "bce",
    "mixup_alpha": 0.2,
    "lr_restart_epochs": (2,),
    "augment_repeats": 2,
    "batch_size_warmup_epochs": 1,
}


@pytest.mark.parametrize("field", CHANGES)
def test_a_setting_decides_what_it_is_said_to_decide_and_no_more(field):
    base = replace(CONFIG, warmup_epochs=1.0, epochs=4, lr_scheduler="step", lr_step_epochs=(3,))
    if field in ("lr_min", "lr_restart_epochs"):  # which only this schedule has
        base = replace(base, lr_scheduler="cosine")
    first = print_of(base)
    second = print_of(replace(base, **{field: CHANGES[field]}))
    found = {name for name in first if first[name] != second[name]}
    expected = {field, *FLAGS[field].decides} - {"steps", "samples_seen"}
    assert found == expected & first.keys()


@pytest.mark.parametrize(
    ("second", "fields"), [("horovod-gloo", []), ("horovod-tuned", ["LD_LIBRARY_PATH"])]
)
def test_what_a_launcher_may_set_differs_with_the_launcher_alone(tmp_path, second, fields):
    """horovod-gloo is not started by mpirun, which sets it for its ranks."""
    plan = {"configurations": ("horovod-mpi", second), "defined": (HOROVOD_TUNED,)}
    comparison = compare(tmp_path, **plan)
    for run in comparison.runs:
        if run.configuration == "horovod-mpi":
            change(run.environment, variables={"LD_LIBRARY_PATH": "/opt/openmpi/lib"})
    assert differing(comparison) == [fields]


def test_two_engines_with_settings_of_their_own_are_judged(tmp_path):
    """One by a flag, the other by a variable; another variable must still be equal."""
    names = ("ddp-tuned", "horovod-tuned")
    comparison = compare(tmp_path, configurations=names, defined=(DDP_TUNED, HOROVOD_TUNED))
    for run in comparison.runs:
        is_horovod = run.engine == "horovod"
        change(run.environment, variables=HOROVOD_TUNED.environment if is_horovod else {})
        run.config.flags.update(static_graph=not is_horovod)
    assert differing(comparison) == [[]]
    assert varied_in(comparison) == {"HOROVOD_CYCLE_TIME", "static_graph"}
    environment = comparison.runs[0].environment
    change(environment, variables=environment.variables | {"NCCL_ALGO": "Ring"})  # of the shell
    assert differing(comparison) == [["NCCL_ALGO"]]


def test_a_commit_is_checked_out_without_the_mark_of_changed_files(tmp_path):
    comparison = compare(tmp_path, blocks=1)
    for run in comparison.runs:
        change(run.environment, git_commit="abc123+")
    first, *_ = Report(anew(comparison)).reproduce
    assert first == "git checkout abc123  # files were changed since"


def test_the_version_of_cuda_is_a_fact_of_the_machine_and_the_flag_a_setting(tmp_path):
    comparison = compare(tmp_path, blocks=1)
    for run in comparison.runs:
        change(run.environment, cuda="12.9")
        run.config.flags.update(cuda=True)
    facts = as_page([Report(anew(comparison))]).partition(">What was equal<")[2]
    machine, _, settings = facts.partition(">Settings and digests<")
    assert "<dt>CUDA version</dt><dd>12.9</dd>" in machine
    assert "<dt>cuda</dt><dd>yes</dd>" in settings and "<dt>cuda</dt>" not in machine


def test_labels_say_what_a_configuration_has_of_its_own(tmp_path):
    twin = Configuration("ddp-twin", "ddp", "torchrun")
    stock = Configuration(
        "horovod-stock",
        "horovod",
        "horovodrun",
        "mpi",
        flags=("--no-sleeping-poll",),
        environment={"OMPI_MCA_mpi_yield_when_idle": "0"},
    )
    labels = {
        "ddp-torchrun": "DDP over Gloo by torchrun",
        "ddp-mpirun": "DDP over Gloo by mpirun",
        "ddp-twin": "DDP over Gloo by torchrun as ddp-twin",
        "ddp-fp16": "DDP over Gloo with --fp16-allreduce",
        "ddp-tuned": "DDP over Gloo with --static-graph",
        "horovod-tuned": "Horovod over MPI with HOROVOD_CYCLE_TIME=1",
        "horovod-stock": "stock Horovod over MPI",
    }
    defined = (twin, DDP_FP16, DDP_TUNED, HOROVOD_TUNED, stock)
    comparison = compare(tmp_path, configurations=tuple(labels), defined=defined, blocks=1)
    assert labels_of(anew(comparison)) == labels


def test_each_pair_of_a_null_test_has_labels_of_its_own(tmp_path):
    plan = {"configurations": ("ddp-torchrun", "ddp-mpirun"), "null": True}
    labels = {
        "ddp-torchrun": "DDP over Gloo by torchrun",
        "ddp-torchrun-again": "DDP over Gloo by torchrun, again",
        "ddp-mpirun": "DDP over Gloo by mpirun",
        "ddp-mpirun-again": "DDP over Gloo by mpirun, again",
    }
    assert labels_of(compare(tmp_path, blocks=1, **plan)) == labels


# ------------------------------------------------------------------------- the null test


def set_speeds(comparison: Record, pairs: list[tuple[float, float]], case: str = "") -> None:
    """Set the throughputs of the plan's first pair, block by block."""
    for block, speeds in enumerate(pairs, start=1):
        for name, speed in zip(comparison.plan.pairs()[0], speeds, strict=True):
            for workers in comparison.plan.workers:
                run = find(comparison, block, name, workers, case)
                change(run.summary, images_per_second=speed)


@pytest.mark.parametrize(
    ("speeds", "words"),
    [
        (
            [(100.0, 101.0), (103.0, 100.0), (99.0, 100.0)],
            "At 2 workers no difference was shown between DDP over Gloo and itself, as it "
            "should be (speed ratio 1.003, 95 % interval 0.948 to 1.062, 3 blocks).",
        ),
        (
            [(105.0, 100.0), (104.9, 100.0), (105.1, 100.0)],
            "At 2 workers a difference was shown between DDP over Gloo and itself (speed "
            "ratio 1.050, 95 % interval 1.048 to 1.052, 3 blocks). This machine or this plan is "
            "not fit to measure differences of 5 % (",
        ),
        (  # any difference, be it within the margin
            [(101.0, 100.0), (101.1, 100.0), (100.9, 100.0)],
            "At 2 workers a difference was shown between DDP over Gloo and itself",
        ),
        (
            [(100.5, 100.0), (100.0, 100.5), (100.1, 100.0)],
            "At 2 workers no difference was shown between DDP over Gloo and itself, as it "
            "should be: equal within 1.3 % (",
        ),
    ],
)
def test_a_null_test_says_whether_all_is_well(tmp_path, speeds, words):
    comparison = compare(tmp_path, configurations=("ddp-torchrun",), null=True)
    set_speeds(comparison, speeds)
    [verdict] = verdicts_of(anew(comparison))
    assert (verdict.first, verdict.second) == ("ddp-torchrun", "ddp-torchrun-again")
    assert verdict.second_label == "DDP over Gloo, again"
    assert sentence(verdict).startswith(words)
    assert explained(comparison) == []


DELAYED = "in DDP over Gloo (speed ratio "


@pytest.mark.parametrize(
    ("speed", "noise", "blocks", "decision", "words"),
    [
        (103.0, 0.001, 6, "faster", f"a delay of 3 % was found {DELAYED}1.029, "),
        (101.0, 0.001, 6, "undecided", f"a delay of 3 % was not found {DELAYED}1.009, "),
        (106.0, 0.001, 6, "undecided", f"a delay of 3 % was not found {DELAYED}1.059, "),
        (103.0, 0.05, 6, "undecided", f"a delay of 3 % was not found {DELAYED}1.0"),
        (103.0, 0.001, 7, "undecided", "nothing is decided between DDP over Gloo and"),
    ],
)
def test_a_known_delay_is_found_or_not(tmp_path, speed, noise, blocks, decision, words):
    """It is no verdict of the report's family."""
    names = ("ddp-torchrun", "ddp-torchrun-again", "ddp-torchrun-delayed")
    plan = a_plan(
        configurations=names[:1], null=True, control=Share(0.03), measure="turns", workers=(2,)
    )
    folder = make_comparison(tmp_path / "compare-1", plan)
    make_turns(folder, dict(zip(names, (speed, speed, 100.0), strict=True)), noise=noise)
    edit(folder / "plan.json", blocks=blocks)
    comparison = read_comparison(folder)
    null, control = verdicts_of(comparison)
    assert (control.first, control.second) == names[::2]
    assert control.second_label == "DDP over Gloo, delayed"
    assert (control.decision, null.family) == (decision, 1)
    assert null.decision in ("equal", "undecided")
    assert sentence(control).startswith(f"At 2 workers {words}")


# ------------------------------------------------------------------------- cases


def test_the_runs_of_two_cases_are_never_compared(tmp_path):
    """They differ in model and batch, and each has its verdict all the same."""
    comparison = compare(tmp_path, cases=TWO_CASES)
    assert differing(comparison) == [[], []]
    find(comparison, 2, "horovod-mpi", 2, "VGG-16").summary.fingerprint["arch"] = "resnet18"
    assert differing(comparison) == [[], ["arch"]]
    # A run that failed is missed in its own case alone.
    fail_run(comparison.folder, "block-1/VGG-16/horovod-mpi-2", exit_code=3)
    comparison = read_comparison(comparison.folder)
    assert [verdict.speed.blocks for verdict in verdicts_of(comparison)] == [3, 2]
    [line] = dict(notices(comparison))[MISSING]
    assert "block-1/VGG-16/horovod-mpi-2: failed with exit code 3" in line


def test_a_case_whose_runs_all_failed_leaves_the_others_report(tmp_path):
    comparison = compare(tmp_path, cases=TWO_CASES)
    for block, name in itertools.product((1, 2, 3), ("ddp-torchrun", "horovod-mpi")):
        fail_run(comparison.folder, f"block-{block}/VGG-16/{name}-2", exit_code=3)
    report = Report(read_comparison(comparison.folder))
    names = {plot.name for plot in draw_plots(report)}
    assert "drift-ResNet-18" in names and "drift-VGG-16" not in names
    assert re.search("VGG-16.*: nothing is decided between .* yet", as_page([report]))


# ------------------------------------------------------------------------- phases


def test_phases_of_whole_runs_are_means_in_which_the_exchange_is_part_of_backward(tmp_path):
    comparison = compare(tmp_path)
    for block, seconds in enumerate((0.3, 0.1, 0.2), start=1):
        phases = find(comparison, block, "horovod-mpi", 2).summary.phases
        change(phases, step_seconds=seconds, data_seconds=seconds / 2)
    told = phase_rows(anew(comparison))[1]
    assert (told["step_seconds"], told["data_seconds"]) == pytest.approx((0.2, 0.1))
    assert "exposed_communication_seconds" not in told
    for run in comparison.runs:  # phases that were not measured have no row
        change(run.summary, phases=Phases())
    assert (phase_rows(anew(comparison)), explained(comparison)) == ([], [])


def by_turns(folder: Path, speeds: dict[str, float], workers: int = 2) -> Record:
    """A comparison whose steps differ in the exchange of gradients alone; see `make_turns`."""
    plan = a_plan(configurations=tuple(speeds), workers=(workers,), blocks=1)
    return read_comparison(make_turns(make_comparison(folder, plan), speeds))


def explained(comparison: Record) -> list[Row]:
    """Return in which phases the verdicts' differences are."""
    return Report(anew(comparison)).phase_differences


SPEEDS = {"ddp-torchrun": 100.0, "horovod-mpi": 80.0}


def test_phases_of_turns_add_up_to_the_verdicts_difference(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # no table is cut into parts
    comparison = by_turns(tmp_path / "compare-1", SPEEDS)
    [row], [verdict] = explained(comparison), verdicts_of(comparison)
    differences = {name: row[name] for name in row if name.endswith("_seconds")}
    whole = differences.pop("step_seconds")
    assert set(differences) == set(PHASES)
    assert math.fsum(one.mean for one in differences.values()) == pytest.approx(whole.mean)
    # The step is that of the verdict: images over its seconds are the throughput.
    fast, slow = (row["step_seconds"] for row in phase_rows(comparison))
    assert slow / fast == pytest.approx(verdict.speed.ratio, rel=1e-3)
    # Stragglers are found in computing without exchange: with it the fast ones wait in backward.
    assert training_rows(comparison)[0]["straggler_ratio"] == pytest.approx(1.1)
    exchange = differences["exposed_communication_seconds"]
    assert whole.mean < 0 and exchange.mean + exchange.half_width < 0  # as the turns have it
    text = as_text([Report(comparison)])
    assert re.search(r"ddp-torchrun − horovod-mpi .* −\d+\.\d ±\d", text)


def test_phases_add_up_if_a_block_has_no_quiet_turns_without_exchange(tmp_path):
    """The exchange is then part of backward in all blocks, not in that one alone."""
    comparison = by_turns(tmp_path / "compare-1", SPEEDS)
    file = Path("turns/2-workers/block-2/block.json")
    turns = part_of(lines_of(comparison.folder), file)["turns"]
    disturbed = [
        turn | {"other_load": 0.8} if turn["purpose"] == "ablation" else turn for turn in turns
    ]
    edit(comparison.folder / file, turns=disturbed)
    comparison = read_comparison(comparison.folder)
    for row in phase_rows(comparison):
        phases = {name: row[name] for name in row if name.endswith("_seconds")}
        whole = phases.pop("step_seconds")
        assert math.fsum(phases.values()) == pytest.approx(whole)
    [row] = explained(comparison)
    means = {name: row[name].mean for name in row if name.endswith("_seconds")}
    whole = means.pop("step_seconds")
    assert math.fsum(means.values()) == pytest.approx(whole)
    assert "exposed_communication_seconds" not in means


def test_with_one_worker_no_communication_is_to_blame(tmp_path):
    comparison = by_turns(tmp_path / "compare-1", SPEEDS, workers=1)
    [plot] = [one for one in draw_plots(Report(comparison)) if one.name == "step-breakdown"]
    told = str([layer.texts for layer in plot.layers])
    assert ALONE in plot.caption and f": {ALONE} " in told and ": exposed" not in told


def test_where_one_did_not_measure_the_exchange_it_is_part_of_backward_in_both():
    own = {"backward_seconds": 5.0, "exposed_communication_seconds": 1.0, "step_seconds": 7.0}
    other = {"backward_seconds": 8.0, "step_seconds": 9.0}
    assert subtract_phases(own, other) == {"backward_seconds": -2.0, "step_seconds": -2.0}
    assert subtract_phases(other, own) == {"backward_seconds": 2.0, "step_seconds": 2.0}


def test_what_could_not_run_for_want_of_horovod_is_not_in_the_figures(tmp_path):
    plan = {"configurations": ("ddp-torchrun",), "left_out": ("horovod-mpi", "mpi4py-mpirun")}
    comparison = compare(tmp_path, **plan)
    assert verdicts_of(comparison) == []
    horovod, mpi4py = dict(notices(comparison))[MISSING]
    assert "horovod-mpi: Horovod is not installed there" in horovod
    assert mpi4py == "mpi4py-mpirun: mpi4py or mpirun is not installed there"
    assert Report(comparison).title == "The training under DDP alone"


@pytest.mark.parametrize(
    ("other", "speeds", "shown"),
    [
        ("ddp-64", [(100.0, 120.0), (100.0, 121.0), (100.0, 122.0)], True),
        ("horovod-mpi", [(100.0, 101.0), (103.0, 100.0), (99.0, 100.0)], False),
    ],
)
def test_steps_of_different_size_and_no_difference_are_not_explained(
    tmp_path, other, speeds, shown
):
    pair = ("ddp-torchrun", other)
    comparison = compare(tmp_path, configurations=pair, defined=(DDP_BATCH,))
    set_speeds(comparison, speeds)
    assert (verdicts_of(anew(comparison))[0].decision == "slower") == shown
    assert explained(comparison) == []


# ------------------------------------------------------------------------- resources, input, load


def test_resources_are_medians_and_memory_has_an_interval(tmp_path):
    comparison = compare(tmp_path)
    figures = [(300, 5e9, 0.1), (100, 7e9, 0.5), (200, 6e9, 0.2)]
    for block, (watts, memory, share) in enumerate(figures, start=1):
        summary = find(comparison, block, "ddp-torchrun", 2).summary
        change(summary, energy=Energy(gpu_watts=watts), peak_memory_bytes=memory)
        change(summary.input, files_per_second=100.0 * block, wait_share=share)
    for block in (1, 2, 3):
        change(find(comparison, block, "horovod-mpi", 2).summary, input=Input())
    ddp, horovod = training_rows(anew(comparison))
    assert (ddp["gpu_watts"], ddp["gpu_joules_per_image"], horovod["gpu_watts"]) == (
        200,
        None,
        None,
    )
    assert ddp["peak_memory"].low < 5e9 < ddp["peak_memory"].ratio < 7e9 < ddp["peak_memory"].high
    assert (ddp["files_per_second"], ddp["megabytes_per_second"], ddp["wait_share"]) == (
        200.0,
        None,
        0.2,
    )
    assert (horovod["images_per_second"], horovod["wait_share"]) == (None, None)
    # A run that others disturbed has no times, and what is left are the others'.
    change(find(comparison, 3, "ddp-torchrun", 2), other_load=1.5)
    ddp, _ = training_rows(anew(comparison))
    assert (ddp["gpu_watts"], ddp["files_per_second"], ddp["wait_share"]) == (
        200,
        150.0,
        pytest.approx(0.3),
    )
    assert ddp["peak_memory"].blocks == ddp["runs"] == 3


def test_equal_weights_are_claimed_only_for_the_blocks_that_all_pairs_have(tmp_path):
    """At one worker a block is missing."""
    folder = make_comparison(tmp_path / "compare-1", a_plan())
    drop_runs(folder, "block-3/ddp-torchrun-1")
    told = Report(read_comparison(folder)).equal_weights
    assert told == "The trainings of each pair ended with identical weights (2 blocks)."
