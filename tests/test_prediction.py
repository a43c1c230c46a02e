"""The model of a step: its bounds, what must be equal, and the same figures in JavaScript."""

import json
import math
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launching import ROOT
from records import a_summary, an_environment
from test_compare_page import browser, opened  # noqa: F401

from compare import predict
from compare.evidence.collectives import Figure, Measurement
from compare.page.prediction import render_prediction
from compare.prediction import published
from compare.prediction.inputs import MIB, Inputs, read_inputs
from compare.prediction.networks import (
    BETWEEN,
    ISLANDS,
    Cluster,
    Link,
    Network,
    measured_link,
    named_network,
    on_cpus,
)
from compare.prediction.step import QUANTILE, UNCERTAIN, fit, predict_step, simulate
from recipe.errors import UserError
from recipe.training.phases import WARM_UP_STEPS

VECTORS = Path(__file__).with_name("prediction_vectors.json")
PHASES = {
    "data_seconds": 0.001, "forward_seconds": 0.1, "backward_seconds": 0.2,
    "optimizer_seconds": 0.01, "other_seconds": 0.002,
}  # fmt: skip


def inputs_of(sizes: list[float] | None = None, **changes) -> Inputs:
    own = sizes or [4e6, 1e6, 2e7, 3e7, 8e6]
    ready = tuple(0.2 * (number + 1) / len(own) for number in range(len(own)))
    told = {"engine": "ddp", "transport": "gloo", "arch": "a", "batch_size": 8, **PHASES}
    return Inputs(**{**told, "gradient_bytes": tuple(own), "ready_seconds": ready, **changes})


def cluster_of(hosts: int, own: int = 1, rate: float = 1.0, **changes) -> Cluster:
    return replace(Cluster(hosts, own, 2, on_cpus("gloo", rate)), **changes)


trainings = st.builds(
    inputs_of,
    st.lists(st.floats(1e3, 1e8), min_size=1, max_size=12),
    engine=st.sampled_from(["ddp", "horovod"]),
    algorithm=st.sampled_from(["ring", "halving", "tree", "two-level"]),
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
    step = simulate(inputs, cluster)
    assert step.seconds >= least / cluster.network.between.bytes_per_second * (1 - 1e-9)
    assert step.seconds >= inputs.step_seconds
    assert 1 <= step.messages <= len(inputs.gradient_bytes)  # however many workers there are


@settings(max_examples=50, deadline=None)
@given(trainings.filter(lambda one: one.engine == "ddp"), sizes, st.floats(1, 100))
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
    network = Network("", Link(0.001), Link(0.01))
    cluster = Cluster(4, 2, 16, network)
    at_once = inputs_of([1e6] * 5, ready_seconds=(0.2,) * 5, bucket_bytes=0, first_bucket_bytes=0)
    ddp = simulate(at_once, cluster)
    own = replace(at_once, engine="horovod", fusion_bytes=0, negotiates=True, cycle_seconds=0.02)
    round_trip = 2 * 2 * 0.01 + 2 * 1 * 0.001  # of a tree: log2 of 4 hosts, of 2 workers in each
    assert simulate(own, cluster).seconds == pytest.approx(ddp.seconds + 0.02 / 2 + round_trip)
    ring = simulate(replace(at_once, algorithm="ring"), cluster)  # 7 steps, 4 of them between hosts
    assert ring.seconds - at_once.step_seconds == pytest.approx(5 * 2 * (4 * 0.01 + 3 * 0.001))


def test_stragglers_cores_and_storage_hold_a_step_up():
    inputs = inputs_of(spread_seconds=0.01, image_bytes=1e5)
    few, many = simulate(inputs, cluster_of(2)), simulate(inputs, cluster_of(200))
    assert many.straggler_seconds - few.straggler_seconds == pytest.approx(0.01 * math.log(100))
    lone = replace(inputs, gradient_bytes=(), ready_seconds=(), spread_seconds=0.0)
    shared = simulate(lone, cluster_of(1, 4))  # 4 ranks on 2 cores
    assert shared.seconds == pytest.approx(2 * lone.step_seconds)
    assert simulate(inputs, cluster_of(8, storage_bytes_per_second=1e6)).seconds == pytest.approx(
        6.4
    )


def test_the_fit_makes_a_pair_take_what_it_was_measured_to():
    inputs, network = inputs_of(pair_seconds=0.6, cores=2, contention=1.1), on_cpus("gloo")
    pair = simulate(fit(inputs, network), Cluster(1, 2, 2, network))
    assert pair.seconds == pytest.approx(0.6, rel=1e-6)


@pytest.mark.parametrize("island", [None, *ISLANDS])
@pytest.mark.parametrize("name", BETWEEN)
def test_each_named_network_has_a_source(name, island):
    network = named_network(name, "mpi", island)
    assert network.source and 0 < network.between.latency_seconds < 1e-3


def vectors() -> list[dict]:
    """Inputs and clusters that take every way through the model."""
    changes = [
        {}, {"algorithm": "ring", "contention": 1.2, "spread_seconds": 0.01},
        {"algorithm": "halving"},
        {"wire_format": "fp16", "algorithm": "two-level"},
        {"engine": "horovod", "cycle_seconds": 0.001, "negotiates": True, "cached": False},
        {"engine": "horovod", "fusion_bytes": 1.2e7, "exchange_factor": 1.5, "image_bytes": 1e5,
         "wire_format": "fp16", "negotiates": True},
    ]  # fmt: skip
    places = [
        cluster_of(1, 1), cluster_of(1, 8), cluster_of(7, 1), cluster_of(4, 3, 0.1),
        cluster_of(512, 8, 25), cluster_of(4, 1, cores_per_host=0.5, hosts_per_machine=4),
        cluster_of(2, 1, storage_bytes_per_second=1e5),
        Cluster(16, 8, 64, named_network("100-infiniband", "nccl", "nvlink-a100")),
    ]  # fmt: skip
    return [
        {
            "inputs": msgspec.json.decode(msgspec.json.encode(inputs_of(**change))),
            "cluster": msgspec.json.decode(msgspec.json.encode(cluster)),
            "expected": msgspec.to_builtins(predict_step(inputs_of(**change), cluster)),
        }
        for change in changes
        for cluster in places
    ]


def test_the_vectors_are_what_the_model_says():
    """python -c "import test_prediction as t; t.write_vectors()" writes them anew."""
    for old, new in zip(json.loads(VECTORS.read_text()), vectors(), strict=True):
        assert (old["inputs"], old["cluster"]) == (new["inputs"], new["cluster"])
        assert old["expected"] == pytest.approx(new["expected"], rel=1e-9)


def write_vectors() -> None:
    VECTORS.write_text(json.dumps(vectors(), indent=0) + "\n")


def test_the_page_computes_the_same(browser, tmp_path):  # noqa: F811
    known, noted = json.loads(VECTORS.read_text()), []
    page_path = tmp_path / "prediction.html"
    own, of = {"ours": inputs_of()}, predict.Settings(images=1000, epochs=2)
    page_path.write_text(render_prediction(own, {"ours": cluster_of(1)}, of, "Past error: 7 %"))
    with opened(browser, page_path, noted=noted) as page:
        call = "([known, sd, q]) => known.map((v) => predictStep(v.inputs, v.cluster, sd, q))"
        found = page.evaluate(call, [known, UNCERTAIN, QUANTILE])
        before = page.inner_text("#predicted")
        page.evaluate("hosts.value = 10; hosts.dispatchEvent(new Event('input', {bubbles: true}))")
        assert page.inner_text("#predicted") != before
        assert "Past error: 7 %" in page.inner_text("header")
    for vector, one in zip(known, found, strict=True):
        expected = {name: vector["expected"][name] for name in one}
        assert one == pytest.approx(expected, rel=1e-9)
    assert noted == [page_path.as_uri()]  # asks for nothing, and has no error


def write_run(folder: Path, workers: int, seconds: float) -> Path:
    """A run of DDP as the trainer records it, with a profile of two gradients of 4 MB."""
    (folder / "profile").mkdir(parents=True)
    flags = {"profile_steps": 1, "bucket_cap_mb": 5.0}
    config = {"log_dir": "runs", "name": folder.name, "arch": "resnet18", "batch_size": 8}
    parts = {"data": 0.01, "forward": 0.25, "backward": 0.6, "optimizer": 0.1}  # of a step
    phases = {f"{name}_seconds": share * seconds for name, share in parts.items()}
    line = {"epoch": 0, "samples_seen": 8, "loss": 1.0, "top1": 1.0, "top5": 5.0,
            "learning_rate": 0.1, "seconds": seconds, "images_per_second": 8 * workers / seconds,
            **phases}  # fmt: skip
    steps = [{"kind": "step", **line, "step": step} for step in range(1, WARM_UP_STEPS + 7)]
    steps[-1]["seconds"] = 100 * seconds  # one disturbed step counts for nothing
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in steps))
    times = {"backward": 0, "end": 100, "ready": {"late": 80, "early": 20}}
    elements = {"late": 1_000_000, "early": 1_000_000}
    environment = an_environment(world_size=workers, local_size=workers, cores=2, threads=1)
    summary = a_summary(world_size=workers, fingerprint={"num_images": 1797})
    for name, record in {
        "config.json": {**config, "flags": flags}, "environment.json": environment,
        "summary.json": summary,
        "profile/gradients-rank-0.json": {"elements": elements, "steps": [times]},
    }.items():  # fmt: skip
        (folder / name).write_bytes(msgspec.json.encode(record))
    return folder


@pytest.fixture
def runs(tmp_path):
    write_run(tmp_path / "runs/one", 1, 0.1)
    write_run(tmp_path / "runs/two", 2, 0.16)
    return tmp_path / "runs"


def test_inputs_are_read_from_run_folders(runs):
    inputs = read_inputs([runs / "one", runs / "two"])
    assert inputs.gradient_bytes == (4e6, 4e6)
    assert inputs.ready_seconds == pytest.approx((0.06 * 0.25, 0.06))  # shares of backward
    assert inputs.step_seconds == pytest.approx(0.1)
    assert (inputs.pair_seconds, inputs.contention) == pytest.approx((0.16, 1.6))
    assert (inputs.bucket_bytes, inputs.first_bucket_bytes) == (5 * MIB, 5 * MIB)
    assert (inputs.transport, inputs.algorithm, inputs.cores, inputs.images) == (
        "gloo", "ring", 2, 1797,
    )  # fmt: skip
    with pytest.raises(UserError, match="starts from a run with one worker"):
        read_inputs([runs / "two"])


@pytest.mark.parametrize(
    "flags, hours",
    [
        ([], 90 * 1_281_167 * 0.1 / 8 / 3600),
        (["--preset", "digits"], 4 * 1797 * 0.1 / 8 / 3600),
        (["--preset", "dle-50", "--images", "1000"], 50 * 1000 * 0.1 / 8 / 3600),
    ],
)
def test_the_command_predicts_a_presets_training(runs, tmp_path, capsys, flags, hours):
    page = tmp_path / "page.html"
    assert predict.main([str(runs), "--html", str(page), *flags]) == 0
    out = capsys.readouterr().out
    one = next(line.split() for line in out.splitlines() if line.split()[:2] == ["1", "1"])
    assert float(one[-2].replace(",", "")) == pytest.approx(hours, rel=0.01)
    assert "Past error" in out and "Past error" in page.read_text()


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
        (["--network", "10-ethernt"], "did you mean 10-ethernet"),
        (["--images", "-1"], "above 0"),
        (["--collectives", "nowhere"], "holds no measurement"),
    ],
)
def test_the_command_says_what_is_wrong(runs, capsys, flags, message):
    assert predict.main([str(runs), *flags]) == 2
    assert message in capsys.readouterr().err


def test_the_past_error_is_that_of_the_newest_check(tmp_path):
    assert "not checked" in predict.past_error(tmp_path)
    for day, error in (("2026-11-25", 0.06), ("2026-11-24", 0.5)):
        folder = tmp_path / "results/machine" / f"{day}-prediction"
        folder.mkdir(parents=True)
        own = {"points": 3, "median": error, "worst": 0.12, "covered": 2 / 3, "turns": 0.01}
        (folder / "table.json").write_text(json.dumps({**own, "workers": 8}))
    told = predict.past_error(tmp_path / "results")
    for part in ("8 workers", "3 predictions", "6% in the median", "12% at worst", "67% of"):
        assert part in told


@pytest.mark.parametrize("hosts", [None, "a:1,b:1"])
def test_a_measured_link_is_fitted_and_takes_its_place(monkeypatch, hosts):
    figures = {
        ("torch.distributed", str(size), "fp32"): Figure(
            "torch.distributed", str(size), "fp32", size, 1, 2, (2 * 1e-3 + 2e-9 * size,)
        )
        for size in (4096, 1 << 20, 1 << 26)
    }
    measured = Measurement({"hosts": hosts}, {}, figures, [], 1, [])
    link = measured_link(measured, "ddp", "gloo")
    assert (link.latency_seconds, link.cpu_seconds_per_byte) == pytest.approx((1e-3, 2e-9))
    with pytest.raises(UserError, match="two sizes or more"):
        measured_link(measured, "horovod", "gloo")
    monkeypatch.setattr(predict, "read_measurement", lambda folder: measured)
    network = predict.network_of(inputs_of(), predict.Settings(collectives=Path("folder")))
    if hosts:
        assert network.between.bytes_per_second == pytest.approx(0.5e9)
        assert network.between.latency_seconds == pytest.approx(1e-3)
        assert network.between.cpu_seconds_per_byte == network.within.cpu_seconds_per_byte
    else:
        assert network.between.cpu_seconds_per_byte == pytest.approx(2e-9)
        assert network.within == link
        assert network.between.latency_seconds == pytest.approx(1e-3 + 48e-6)


def test_the_docs_show_the_published_scaling_as_it_is_predicted() -> None:
    def cells(text: str) -> list[list[str]]:
        return [[one.strip() for one in row.split("|")] for row in text.splitlines()]

    page = cells((ROOT / "docs" / "prediction.md").read_text())
    rows = cells(published.table())[2:]
    assert rows and not [row for row in rows if row not in page]
