"""The model of a step: its bounds, what must be equal, what is refused, and the page."""

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import msgspec
import published_scaling
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launching import ROOT
from making import a_config
from records import a_summary, an_environment, edit
from test_compare_page import browser, opened  # noqa: F401

from compare import predict
from compare.evidence.record import read_comparison
from compare.evidence.turns import Block, Turn
from compare.page.allreduce import figures_of
from compare.prediction.inputs import MIB, Inputs, by_turns, read_inputs, read_run, read_runs
from compare.prediction.model import (
    AS_TOLD,
    BETWEEN,
    CAST,
    GBIT,
    ISLANDS,
    ON_CPUS,
    Cluster,
    Link,
    Network,
    allreduce,
    at_batch,
    fit,
    named_network,
    negotiation,
    predict_step,
    simulate,
)
from recipe.data.batches import open_data
from recipe.errors import UserError
from recipe.record.schema import WARM_UP_STEPS
from recipe.settings.presets import PRESETS, preset

PHASES = {
    "data_seconds": 0.001,
    "forward_seconds": 0.1,
    "backward_seconds": 0.2,
    "optimizer_seconds": 0.01,
    "other_seconds": 0.002,
}


def inputs_of(sizes: list[float] | None = None, **changes) -> Inputs:
    own = sizes or [4e6, 1e6, 2e7, 3e7, 8e6]
    ready = tuple(0.2 * (number + 1) / len(own) for number in range(len(own)))
    told = {"engine": "ddp", "transport": "gloo", "batch_size": 8, **PHASES}
    return Inputs(**{**told, "gradient_bytes": tuple(own), "ready_seconds": ready, **changes})


def cluster_of(hosts: int, own: int = 1, rate: float = 1.0, **changes) -> Cluster:
    network = named_network("1-ethernet", "gloo")
    between = replace(network.between, bytes_per_second=rate * GBIT)
    return replace(Cluster(hosts, own, 2, replace(network, between=between)), **changes)


trainings = st.builds(
    inputs_of,
    st.lists(st.floats(1e3, 1e8), min_size=1, max_size=12),
    engine=st.sampled_from(["ddp", "horovod"]),
    algorithm=st.sampled_from(["ring", "halving", "tree"]),
    wire_format=st.sampled_from(["fp32", "fp16"]),
    contention=st.floats(1, 2),
    spread_seconds=st.floats(0, 0.05),
    cycle_seconds=st.floats(0, 0.01),
    negotiates=st.booleans(),
)
sizes = st.builds(cluster_of, st.integers(2, 4096), st.integers(1, 8), st.floats(0.1, 400))


@settings(max_examples=50, deadline=None)
@given(trainings, sizes)
def test_no_step_is_shorter_than_its_computation_or_its_gradients_on_the_link(inputs, cluster):
    bytes_sent = sum(inputs.gradient_bytes) * (0.5 if inputs.wire_format == "fp16" else 1)
    least = 2 * (cluster.hosts - 1) / cluster.hosts * bytes_sent
    step, _ = simulate(inputs, cluster)
    assert step >= least / cluster.network.between.bytes_per_second * (1 - 1e-9)
    assert step >= inputs.step_seconds


@settings(max_examples=50, deadline=None)
@given(trainings.filter(lambda inputs: inputs.engine == "ddp"), sizes, st.floats(1, 100))
def test_efficiency_never_rises_with_latency(inputs, cluster, factor):
    network = cluster.network
    slow = replace(network.between, latency_seconds=network.between.latency_seconds * factor)
    later = replace(cluster, network=replace(network, between=slow))
    assert predict_step(inputs, later).efficiency <= predict_step(inputs, cluster).efficiency * (
        1 + 1e-9
    )


@given(trainings)
def test_one_worker_takes_the_measured_step(inputs):
    assert predict_step(inputs, cluster_of(1)).step_seconds == pytest.approx(inputs.step_seconds)


@settings(max_examples=50, deadline=None)
@given(trainings, sizes)
def test_engines_with_equal_messages_and_transport_are_equal(inputs, cluster):
    own = {"first_bucket_bytes": 0, "bucket_bytes": 0, "fusion_bytes": 0}
    plain = {"cycle_seconds": 0.0, "negotiates": False}
    steps = [
        simulate(replace(inputs, engine=engine, **own, **plain), cluster)
        for engine in ("ddp", "horovod")
    ]
    assert steps[0] == steps[1]


def test_horovod_agrees_once_on_all_that_is_ready_when_a_cycle_begins():
    network = Network(Link(0.001), Link(0.01))
    cluster = Cluster(4, 2, 16, network)
    at_once = inputs_of([1e6] * 5, ready_seconds=(0.2,) * 5, bucket_bytes=0, first_bucket_bytes=0)
    ddp, _ = simulate(at_once, cluster)
    own = replace(at_once, engine="horovod", fusion_bytes=0, negotiates=True, cycle_seconds=0.02)
    round_trip = 2 * 2 * 0.01 + 2 * 1 * 0.001  # of a tree: log2 of 4 hosts, of 2 workers in each
    assert simulate(own, cluster)[0] == pytest.approx(ddp + 0.02 / 2 + round_trip)


def test_stragglers_and_cores_hold_a_step_up():
    lone = inputs_of(gradient_bytes=(), ready_seconds=())
    few, many = (
        simulate(replace(lone, spread_seconds=0.01), cluster_of(hosts))[0] for hosts in (2, 200)
    )
    assert many - few == pytest.approx(0.01 * math.log(100))
    shared, _ = simulate(lone, cluster_of(1, 4))  # 4 ranks on 2 cores
    assert shared == pytest.approx(2 * lone.step_seconds)


def test_after_the_fit_a_pair_takes_its_measured_time():
    inputs, network = inputs_of(pair_seconds=0.6, cores=2, contention=1.1), cluster_of(1).network
    pair, _ = simulate(fit(inputs, network), Cluster(1, 2, 2, network))
    assert pair == pytest.approx(0.6, rel=1e-6)


@pytest.mark.parametrize("island", [None, *ISLANDS])
@pytest.mark.parametrize("name", BETWEEN)
def test_each_named_network_carries_as_much_as_its_links(name, island):
    network = named_network(name, "nccl" if island else "mpi", island)
    assert 0 < network.between.latency_seconds < 1e-3
    twice = named_network(name, "nccl" if island else "mpi", island, links_per_host=2).between
    assert twice == replace(network.between, bytes_per_second=2 * network.between.bytes_per_second)


def test_gpus_need_an_island():
    with pytest.raises(UserError, match="give their connection within a host"):
        named_network("25-roce", "nccl")


def test_nccl_takes_the_faster_of_ring_and_tree_for_each_size():
    inputs = inputs_of(transport="nccl")
    cluster = Cluster(64, 8, 128, named_network("100-infiniband", "nccl", "nvlink-a100"))

    def seconds(algorithm: str, size: float) -> float:
        return sum(allreduce(replace(inputs, algorithm=algorithm), cluster, size, AS_TOLD)[:2])

    assert seconds("tree", 8.0) < seconds("ring", 8.0)  # few rounds
    assert seconds("tree", 1e9) == seconds("ring", 1e9)  # a message crosses a link once less
    least = 2 * 511 / 512 * 1e6 / cluster.network.between.bytes_per_second
    assert seconds("tree", 1e6) > least * 1.05  # never a tree's rounds at a ring's rate


def test_horovods_ranks_do_not_agree_over_nccl():
    own = inputs_of(engine="horovod", negotiates=True, transport="nccl")
    cluster = Cluster(16, 8, 128, named_network("100-infiniband", "nccl", "nvlink-a100"))
    over_mpi = replace(cluster, network=cluster.network.control)
    assert negotiation(own, cluster, AS_TOLD) == negotiation(own, over_mpi, AS_TOLD) > 0


def write_run(folder: Path, workers: int, seconds: float, batch_size: int = 8) -> Path:
    """A run of DDP as the trainer records it, with a profile of two gradients of 4 MB."""
    (folder / "profile").mkdir(parents=True)
    flags = {"profile_steps": 1, "bucket_cap_mb": 5.0}
    config = {"log_dir": "runs", "name": folder.name, "arch": "resnet18", "batch_size": batch_size}
    parts = {"data": 0.01, "forward": 0.25, "backward": 0.6, "optimizer": 0.1}  # of a step
    phases = {f"{name}_seconds": share * seconds for name, share in parts.items()}
    line = {
        "epoch": 0,
        "samples_seen": 8,
        "loss": 1.0,
        "top1": 1.0,
        "top5": 5.0,
        "learning_rate": 0.1,
        "seconds": seconds,
        "images_per_second": 8 * workers / seconds,
        **phases,
    }
    steps = [{"kind": "step", **line, "step": step} for step in range(1, WARM_UP_STEPS + 7)]
    steps[-1]["seconds"] = 100 * seconds  # one disturbed step counts for nothing
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    times = {"backward": 0, "end": 100, "ready": {"late": 80, "early": 20}}
    elements = {"late": 1_000_000, "early": 1_000_000}
    environment = an_environment(world_size=workers, local_size=workers, cores=2, threads=1)
    work = {"num_images": 1797, "epochs": 4, "train_crop_size": 20}
    summary = a_summary(world_size=workers, fingerprint=work)
    for name, record in {
        "config.json": config | flags,
        "environment.json": environment,
        "summary.json": summary,
        "profile/gradients-rank-0.json": {"elements": elements, "steps": [times]},
    }.items():
        (folder / name).write_bytes(msgspec.json.encode(record))
    return folder


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # no table is cut into parts
    write_run(tmp_path / "runs/one", 1, 0.1)
    write_run(tmp_path / "runs/two", 2, 0.16)
    return tmp_path / "runs"


def test_runs_whose_ranks_shared_a_gpu_are_doubted(runs):
    assert {run.doubt for run in read_runs(runs)} == {""}
    file = runs / "two/environment.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"ranks_per_gpu": 2}))
    doubts = [run.doubt for run in read_runs(runs)]
    assert doubts == ["", f"{runs / 'two'}: ranks share a GPU, so speeds mean nothing"]


def test_inputs_are_read_from_run_folders(runs):
    inputs = read_inputs(read_runs(runs))
    assert inputs.gradient_bytes == (4e6, 4e6)
    assert inputs.ready_seconds == pytest.approx((0.06 * 0.25, 0.06))  # shares of backward
    assert inputs.step_seconds == pytest.approx(0.1)
    assert (inputs.pair_seconds, inputs.contention) == pytest.approx((0.16, 1.6))
    assert (inputs.bucket_bytes, inputs.first_bucket_bytes) == (5 * MIB, 5 * MIB)
    assert (inputs.transport, inputs.algorithm, inputs.cores) == ("gloo", "ring", 2)
    with pytest.raises(UserError, match=r"needs a run of one worker.*python .*--name one"):
        read_inputs([read_run(runs / "two")])


def test_a_smaller_batch_shows_the_fixed_share_of_a_step(runs, capsys):
    words = [str(runs), "--global-batch", "16"]
    assert predict.main(words) == 0 and "Upper bound" in capsys.readouterr().out
    write_run(runs / "half", 1, 0.075, batch_size=4)  # half of a step's time is fixed
    inputs = read_inputs(read_runs(runs))
    assert (inputs.batch_size, inputs.fixed_share) == (8, pytest.approx(0.5))
    assert at_batch(inputs, 1).forward_seconds == pytest.approx(0.025 * (0.5 + 0.5 / 8))
    assert predict.main(words) == 0 and "Upper bound" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags, hours",
    [
        ([], 4 * 1797 * 0.1 / 8 / 3600),
        (["--preset", "digits", "--epochs", "7"], 7 * 1438 * 0.1 / 8 / 3600),
        (["--images", "1000"], 4 * 1000 * 0.1 / 8 / 3600),
    ],
)
def test_the_command_predicts_a_training(runs, capsys, flags, hours):
    assert predict.main([str(runs), *flags]) == 0
    out = capsys.readouterr().out
    row = next(line.split() for line in out.splitlines() if line.split()[:2] == ["1", "1"])
    assert float(row[-2].replace(",", "")) == pytest.approx(hours, rel=0.01)
    assert "Past error" in out


def test_a_presets_training_has_the_images_of_its_data_set(tmp_path):
    runs = read_runs(write_run(tmp_path / "run", 1, 0.1))
    fingerprint = runs[0].summary.fingerprint
    for name in PRESETS:
        fingerprint["train_crop_size"] = preset(name).train_crop_size
        if name.startswith("fashion"):
            images = 60_000
        elif name.startswith("digits"):
            images = open_data(a_config(data="digits")).num_train
        else:
            images = 1_281_167
        settings = predict.training_of(predict.Forecast(preset=name), runs)
        assert (settings.images, settings.epochs) == (images, preset(name).epochs)


def test_the_page_shows_a_line_for_each_network(browser, runs, tmp_path, capsys):  # noqa: F811
    path, noted = tmp_path / "prediction.html", []
    assert predict.main([str(runs), "--network", "25-ethernet", "--html", str(path)]) == 0
    with opened(browser, path, noted=noted) as page:
        assert page.locator("figure svg").count() == 1
        assert page.locator("table tbody tr").count() == 13  # 1 to 4,096 workers
        shown = page.inner_text("body")
        legend = page.locator("figure svg text").all_text_contents()
    assert "Past error" in shown and "resnet18, batch 8, ddp over Gloo" in shown
    assert {"1-ethernet", "10-ethernet", "25-ethernet", "100-ethernet"} <= {*legend}
    assert noted == [path.as_uri()]  # asks for nothing, and has no error


def test_a_shared_batch_ends_the_table_and_the_gain(runs, capsys):
    assert predict.main([str(runs), "--global-batch", "16", "--network", "1-ethernet"]) == 0
    out = capsys.readouterr().out
    table = [line.split() for line in out.splitlines() if line.lstrip()[:1].isdigit()]
    assert [row[0] for row in table] == ["1", "2", "4", "8", "16"]
    best = max(table, key=lambda row: float(row[6]))
    assert best != table[-1] and f"more than {best[0]} workers gain nothing" in out


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--preset", "dle-55"], "did you mean dle-50"),
        (["--preset", "goyal-90"], "on images of 224 pixels, but these runs on 20"),
        (["--island", "nvlink-v100"], "connects GPUs, but these runs exchanged gradients by gloo"),
        (["--links-per-host", "0"], "above 0"),
        (["--network", "10-ethernt"], "did you mean 10-ethernet"),
        (["--images", "-1"], "above 0"),
        (["--epochs", "nan"], "--epochs nan: give a number above 0"),
        (["--price-per-node-hour", "-1"], "above 0"),
    ],
)
def test_the_command_says_what_is_wrong(runs, capsys, flags, message):
    assert predict.main([str(runs), *flags]) == 2
    assert message in capsys.readouterr().err


def test_on_gpus_the_docs_errors_stand_beside_a_prediction(runs):
    cases = published_scaling.cases()
    above = sum(alone / step.step_seconds > share for _, _, share, step, alone in cases)
    (limit,) = predict.limits([inputs_of(transport="nccl")], predict.Forecast())
    assert f"above the published efficiency in {above} of {len(cases)}" in limit
    assert not predict.limits([inputs_of(pair_seconds=0.3)], predict.Forecast())
    (limit,) = predict.limits([inputs_of()], predict.Forecast())
    assert "No run of two workers on one host was given" in limit


def test_a_held_out_run_stands_beside_its_prediction_and_changes_none(runs, capsys):
    def predicted(seconds: float) -> list[str]:
        shutil.rmtree(runs / "four", ignore_errors=True)
        write_run(runs / "four", 4, seconds)
        assert predict.main([str(runs)]) == 0
        return capsys.readouterr().out.splitlines()

    near, far = predicted(0.4), predicted(0.8)
    differ = [(a, b) for a, b in zip(near, far, strict=True) if a != b]
    row, (summary, _) = differ[0], differ[-1]
    assert len(differ) == 2 and "resnet18, batch 8, ddp over Gloo " in row[0]
    measured, step, *_ = row[0].split()[8:]
    assert row[1].split()[8:10] == ["800", step] and measured == "400"
    assert "Checked here on 1 run of up to 4 workers" in summary


def test_steps_come_from_the_turns_of_a_comparison(runs):
    run, shares = read_run(runs / "one"), {"data": 0.1, "forward": 0.3, "backward": 0.5}
    turns = [
        Turn("a", 0, 2 * step, 8, 1.0, phases={n: x * step for n, x in shares.items()})
        for step in (0.2, 0.4, 0.3)
    ]
    for turn in turns:
        turn.phases["optimizer"] = 0.01
    own = by_turns(run, [Block(1, ("a",), (turn,), {"a": 2}) for turn in turns], "a")
    assert own.seconds == pytest.approx(0.3) and sum(own.phases.values()) == pytest.approx(0.3)
    assert own.phases["forward_seconds"] == pytest.approx(0.09)
    assert own.spread == pytest.approx(3 * run.spread)
    assert by_turns(run, [], "a") is run


def test_a_recorded_comparison_is_read():
    (folder,) = (ROOT / "results").glob("xeon-2-cores/*-scaling")
    assert {run.workers for run in read_runs(folder)} == {1, 2}


def test_the_past_error_is_that_of_the_recorded_check() -> None:
    (folder,) = (ROOT / "results").glob("*/*-prediction")
    recorded = json.loads((folder / "table.json").read_text())
    assert (
        "Past error: on CPUs, up to {workers} workers, {points} predictions were off by "
        "{median:.0%} in the median, {worst:.0%} at worst; {covered:.0%} of the steps lay in their "
        f"90 % interval ({folder.relative_to(ROOT)})."
    ).format(**recorded) == predict.PAST_ERROR
    page = (ROOT / "docs" / "prediction.md").read_text()
    assert f"({Path('..') / folder.relative_to(ROOT)}/table.md)" in page
    said = "the median error is {:.1f} % (goal 8 %) and the largest {:.0f} %".format(
        100 * recorded["median"], 100 * recorded["worst"]
    )
    assert said in page and f"; {recorded['covered']:.0%} are".replace("%", " %") in page


def test_the_docs_show_the_published_scaling_as_it_is_predicted() -> None:
    def cells(text: str) -> list[list[str]]:
        return [[cell.strip() for cell in row.split("|")] for row in text.splitlines()]

    page = cells((ROOT / "docs" / "prediction.md").read_text())
    rows = cells(published_scaling.table())[2:]
    assert rows and not [row for row in rows if row not in page]


def test_the_docs_tell_the_errors_of_the_recorded_check_by_turns(
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = "results/epyc-2-cores/2026-11-27-prediction-by-turns"
    assert predict.main([str(ROOT / folder)]) == 0
    found = re.search(
        r"Checked here on 8 runs of up to 4 workers .*: off by (\S+)% in the median, (\S+)% at "
        r"worst; 88% of the steps lay",  # seven of eight
        capsys.readouterr().out,
    )
    assert found
    page = " ".join((ROOT / "docs" / "prediction.md").read_text().split())
    assert (
        f"over eight held-out points the median error is {found[1]} % and the largest {found[2]} "
        f"%; seven are inside their interval (`{folder}`)"
    ) in page


def test_the_links_of_cpus_are_those_of_the_recorded_allreduce() -> None:
    record = read_comparison(ROOT / "results/epyc-2-cores/2026-11-28-allreduce")
    seconds = {(one.backend, one.message, one.wire): one.seconds for one in figures_of(record)}
    largest = 64 * MIB
    for transport, backend in {"gloo": "torch.distributed", "mpi": "mpi4py"}.items():
        link = ON_CPUS[transport]
        assert link.latency_seconds == pytest.approx(seconds[backend, "4 KiB", "fp32"] / 2, 0.02)
        per_byte = seconds[backend, "64 MiB", "fp32"] / largest
        assert link.cpu_seconds_per_byte == pytest.approx(per_byte, 0.02)
    full, half = (seconds["torch.distributed", "64 MiB", wire] for wire in ("fp32", "fp16"))
    assert pytest.approx((half - full / 2) / largest, 0.02) == CAST


def test_an_unfinished_comparison_checks_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If measuring could stop at any time, it could stop when the model's error is small."""
    folder = "results/epyc-2-cores/2026-11-27-prediction-by-turns"
    copy = Path(shutil.copytree(ROOT / folder, tmp_path / "check"))
    edit(copy / "plan.json", blocks=3)
    assert predict.main([str(copy)]) == 0
    told = capsys.readouterr().out
    assert "the measurement is not finished: 2 of 3 blocks" in told
    assert "Checked here" not in told and "Measured, and predicted without it" in told


def test_runs_that_one_prediction_must_not_mix_are_named(runs, capsys):
    path = runs / "two/environment.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "torch": "2.15.0"}))
    write_run(runs / "four", 4, 0.4)
    assert predict.main([str(runs)]) == 0
    told = capsys.readouterr().out
    assert "the runs differ in torch: 2.14.1, 2.15.0" in told and "Checked here" not in told
