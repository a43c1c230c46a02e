"""When gradients were ready and exchanged: read from either engine's files, and one picture."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed as dist
from making import TinyNet, a_config
from torch.nn.parallel import DistributedDataParallel

from compare.evidence.exchange import Message, read_exchange
from compare.page.chart import standalone
from compare.page.exchange import plot_exchanges
from compare.page.plots import plot_exchange
from ddp_train import timeline
from ddp_train.buckets import bucket_hook
from recipe.errors import UserError

ZERO = 1_790_857_026_000_000_000  # of the Unix clock: the first step's backward pass begins
MS = 1_000_000
SIZES = {"conv": 1_000_000, "bn": 1_000, "fc": 2_000_000}  # elements
READY = {"fc": 10, "bn": 20, "conv": 40}  # ms after backward's begin


def at(ms: float) -> int:
    return ZERO + round(ms * MS)


def write_times(run: Path, rank: int, late: float, steps: int = 2) -> None:
    lines = [
        {
            "backward": at(100 * step),
            "end": at(100 * step + 90),
            "ready": {name: at(100 * step + ms + late) for name, ms in READY.items()},
        }
        for step in range(steps)
    ]
    path = run / "profile" / f"gradients-rank-{rank}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"elements": SIZES, "steps": lines}))


def a_ddp_run(run: Path, threads: int = 1) -> Path:
    """Two buckets a step: fc and bn, full at 20 ms, back at 55; conv, full at 40, back at 60."""
    messages = [
        (bucket, names, at(100 * step + full), at(100 * step + ended))
        for step in range(2)
        for bucket, names, full, ended in ((0, ["fc", "bn"], 20, 55), (1, ["conv"], 40, 60))
    ]
    write_times(run, 0, 0)
    write_times(run, 1, 5)
    trace = json.dumps(timeline.trace_of(messages, threads))
    (run / "profile" / "ddp-timeline.json").write_text(trace)
    return run


def a_horovod_run(run: Path) -> Path:
    """fc alone, then bn and conv fused; beside them figures, and a tensor of the next step."""
    write_times(run, 0, 0)
    write_times(run, 1, 0)
    first = {"start_time_since_epoch_in_micros": ZERO // 1000}
    events: list[dict[str, Any]] = [{"ph": "M", "name": "x", "pid": 0, "args": first}]
    tensors = {"fc": (12_000, 22_000), "bn": (42_000, 62_000), "conv": (42_002, 62_004),
               "figures": (70_000, 71_000)}  # fmt: skip
    for pid, (tensor, (begin, end)) in enumerate(tensors.items(), start=1):
        name = {"name": f"allreduce.{tensor}"}
        ended = {"ph": "E", "ts": end, "pid": pid}
        events += [
            {"ph": "M", "name": "process_name", "pid": pid, "args": name},
            {"ph": "B", "name": "ALLREDUCE", "ts": begin, "pid": pid},
            {"ph": "B", "name": "MPI_ALLREDUCE", "ts": begin, "pid": pid},
            ended,
            ended,
        ]
    (run / "profile" / "horovod-timeline.json").write_text(json.dumps(events))
    return run


def test_buckets_of_ddp(tmp_path: Path) -> None:
    exchange = read_exchange(a_ddp_run(tmp_path))
    assert exchange is not None and len(exchange.steps) == 2
    for step in exchange.steps:
        assert step.messages == (Message(2, 8.004, 20, 25, 20, 55), Message(1, 4.0, 40, 45, 55, 60))
        assert step.ready == ((10, 8.0), (20, 0.004), (40, 4.0))
        assert (step.computed, step.hidden, step.exposed) == (40, 20, 20)


def test_a_backend_with_two_threads_sends_two_buckets_at_once(tmp_path: Path) -> None:
    exchange = read_exchange(a_ddp_run(tmp_path, threads=2))
    assert exchange is not None
    assert [message.began for message in exchange.typical.messages] == [20, 40]
    assert exchange.typical.hidden == 20, "time, not the sum of messages"


def test_what_horovod_fused_is_one_message(tmp_path: Path) -> None:
    exchange = read_exchange(a_horovod_run(tmp_path))
    assert exchange is not None and len(exchange.steps) == 1, "the other sent nothing"
    assert exchange.typical.messages == (
        Message(1, 8.0, 10, 10, 12, 22), Message(2, 4.004, 40, 40, 42, 62.004),
    )  # fmt: skip
    hidden, exposed = exchange.typical.hidden, exchange.typical.exposed
    assert (hidden, exposed) == (10, pytest.approx(22.004, abs=0.001))
    assert exchange.sentence() == "10 ms hidden, 22 ms exposed"


def test_runs_that_recorded_no_exchange(tmp_path: Path) -> None:
    assert read_exchange(tmp_path) is None
    write_times(tmp_path, 0, 0)
    assert read_exchange(tmp_path) is None, "one worker"


@pytest.mark.parametrize("damaged", [
    '{"elements": {}, "steps": [{}]}', json.dumps({"elements": SIZES}), "[1]", "null", '{"steps"',
    json.dumps({"elements": SIZES, "steps": [{"backward": 1, "end": "x", "ready": {"fc": 1}}]}),
    json.dumps({"elements": SIZES, "steps": [{"backward": 1, "end": 2, "ready": {"x": 1}}]}),
])  # fmt: skip
def test_damaged_times_are_one_message(tmp_path: Path, damaged: str) -> None:
    run = a_horovod_run(tmp_path)
    (run / "profile" / "gradients-rank-0.json").write_text(damaged)
    with pytest.raises(UserError, match=r"gradients-rank-0|its files are damaged"):
        read_exchange(run)


def test_a_step_whose_messages_are_not_all_known_does_not_count(tmp_path: Path) -> None:
    """As of Horovod's groups, which do not name their tensors."""
    path = a_horovod_run(tmp_path) / "profile" / "horovod-timeline.json"
    path.write_text(path.read_text().replace("allreduce.fc", "grouped_allreduce.1"))
    assert read_exchange(tmp_path) is None


def test_one_picture_with_the_same_axes_for_all_runs(tmp_path: Path) -> None:
    runs = {"DDP": a_ddp_run(tmp_path / "a"), "Horovod": a_horovod_run(tmp_path / "b")}
    plot = plot_exchanges([(name, read_exchange(run)) for name, run in runs.items()])
    assert {t.split(", on all")[0] for layer in plot.layers for t in layer.texts if t} == {
        "1 gradients, 8.00 MB: ready 10.0 ms", "2 gradients, 4.00 MB: ready 40.0 ms",  # Horovod
        "2 gradients, 8.00 MB: ready 20.0 ms", "1 gradients, 4.00 MB: ready 40.0 ms",  # DDP
    }  # fmt: skip
    texts = [t for e in ElementTree.fromstring(standalone(plot.svg)).iter() if (t := e.text)]
    assert texts.count("10 MB") == 2 and {"DDP", "20 ms hidden, 20 ms exposed"} <= {*texts}


def test_the_page_shows_it_of_each_configurations_first_profiled_run(tmp_path: Path) -> None:
    runs: list[Any] = [
        SimpleNamespace(configuration=name, folder=tmp_path / folder)
        for name, folder in (("ddp", "plain"), ("ddp", "a"), ("horovod", "b"), ("other", "plain"))
    ]
    assert plot_exchange(runs) is None
    a_ddp_run(tmp_path / "a")
    a_horovod_run(tmp_path / "b")
    assert {row.name for row in plot_exchange(runs).rows} == {"ddp", "horovod"}


def test_ddp_notes_its_buckets_and_averages_as_without(tmp_path: Path) -> None:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        gradients = []
        for profile_steps in (None, 2):
            torch.manual_seed(0)
            model = TinyNet()
            network = DistributedDataParallel(model)
            if hook := bucket_hook(a_config(profile_steps=profile_steps), model):
                network.register_comm_hook(None, hook)
            timeline.start_timeline(str(tmp_path / "ddp-timeline.json"))
            for _ in range(2):
                network(torch.ones(2, 3, 8, 8)).square().mean().backward()
            timeline.stop_timeline()
            gradients.append([parameter.grad for parameter in model.parameters()])
    finally:
        dist.destroy_process_group()
    assert all(map(torch.equal, *gradients))
    events = json.loads((tmp_path / "ddp-timeline.json").read_text())
    ends = [event for event in events if event["ph"] == "E"]
    assert len(ends) == 4, "of each step QUEUE and ALLREDUCE"
    assert {*ends[1]["args"]["gradients"]} == {name for name, _ in model.named_parameters()}
