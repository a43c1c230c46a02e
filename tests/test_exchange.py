"""When gradients were ready and exchanged: read from either engine's files, and listed."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from making import TinyNet, a_config
from torch.nn.parallel import DistributedDataParallel

from compare.evidence.profiles import TimedMessage, exchange_lines, read_exchange
from ddp_train import buckets
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
    trace = json.dumps(buckets.trace_of(messages, threads))
    (run / "profile" / "ddp-timeline.json").write_text(trace)
    return run


def a_horovod_run(run: Path) -> Path:
    """fc alone, then bn and conv fused; beside them figures, and a tensor of the next step."""
    write_times(run, 0, 0)
    write_times(run, 1, 0)
    first = {"start_time_since_epoch_in_micros": ZERO // 1000}
    events: list[dict[str, Any]] = [{"ph": "M", "name": "x", "pid": 0, "args": first}]
    tensors = {
        "fc": (12_000, 22_000),
        "bn": (42_000, 62_000),
        "conv": (42_002, 62_004),
        "figures": (70_000, 71_000),
    }
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


@pytest.mark.parametrize(("threads", "second_began"), [(1, 55), (2, 40)])
def test_buckets_of_ddp(threads: int, second_began: int, tmp_path: Path) -> None:
    """A backend with two threads sends two buckets at once."""
    second = TimedMessage(1, 4.0, 40, 45, second_began, 60)
    steps = read_exchange(a_ddp_run(tmp_path, threads))
    assert steps == [[TimedMessage(2, 8.004, 20, 25, 20, 55), second]] * 2


def test_gradients_that_horovod_fused_are_one_message(tmp_path: Path) -> None:
    [step] = read_exchange(a_horovod_run(tmp_path))  # the other step sent nothing
    assert step == [
        TimedMessage(1, 8.0, 10, 10, 12, 22),
        TimedMessage(2, 4.004, 40, 40, 42, 62.004),
    ]
    table, sentence = exchange_lines([step])
    assert [line.split() for line in table.splitlines()[2:]] == [
        ["1", "8.0", "10.0", "10.0", "12.0", "22.0"],
        ["2", "4.0", "40.0", "40.0", "42.0", "62.0"],
    ]
    assert "take 22 ms" in sentence


def test_runs_that_recorded_no_exchange(tmp_path: Path) -> None:
    assert read_exchange(tmp_path) == []
    write_times(tmp_path, 0, 0)
    assert read_exchange(tmp_path) == [], "one worker"


@pytest.mark.parametrize(
    "damaged",
    [
        '{"elements": {}, "steps": [{}]}',
        json.dumps({"elements": SIZES}),
        "[1]",
        "null",
        '{"steps"',
        json.dumps({"elements": SIZES, "steps": [{"backward": 1, "end": "x", "ready": {"fc": 1}}]}),
        json.dumps({"elements": SIZES, "steps": [{"backward": ZERO, "end": at(90), "ready": {}}]}),
    ],
)
def test_damaged_times_are_one_message(tmp_path: Path, damaged: str) -> None:
    run = a_horovod_run(tmp_path)
    (run / "profile" / "gradients-rank-0.json").write_text(damaged)
    with pytest.raises(UserError, match=r"gradients-rank-0|its files are damaged"):
        read_exchange(run)


def test_a_step_whose_messages_are_not_all_known_does_not_count(tmp_path: Path) -> None:
    """Such as of Horovod's groups, which do not name their tensors."""
    path = a_horovod_run(tmp_path) / "profile" / "horovod-timeline.json"
    path.write_text(path.read_text().replace("allreduce.fc", "grouped_allreduce.1"))
    assert read_exchange(tmp_path) == []


def test_on_a_gpu_buckets_are_not_noted() -> None:
    """Their futures are complete as soon as NCCL was called."""
    model = SimpleNamespace(parameters=lambda: iter([SimpleNamespace(device=torch.device("cuda"))]))
    assert bucket_hook(a_config(profile_steps=2), model) is None


def test_noting_its_buckets_does_not_change_ddp_s_averages(tmp_path: Path) -> None:
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
            buckets.start_timeline(str(tmp_path / "ddp-timeline.json"))
            for _ in range(2):
                network(torch.ones(2, 3, 8, 8)).square().mean().backward()
            buckets.stop_timeline()
            gradients.append([parameter.grad for parameter in model.parameters()])
    finally:
        dist.destroy_process_group()
    assert all(map(torch.equal, *gradients))
    events = json.loads((tmp_path / "ddp-timeline.json").read_text())
    ends = [event for event in events if event["ph"] == "E"]
    assert len(ends) == 4, "of each step QUEUE and ALLREDUCE"
    assert {*ends[1]["args"]["gradients"]} == {name for name, _ in model.named_parameters()}
