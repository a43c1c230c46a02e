"""Reading run folders; and made-up ones, which the other tests of compare/ use too."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from compare.plan import Plan, Run, plan_record
from compare.records import RecordError, load_comparison, newest_comparison

STEPS_PER_EPOCH, EPOCHS = 12, 6


def make_comparison(folder: Path, plan: Plan | None = None, ratio: float = 1.1) -> Path:
    """Write a whole comparison in which DDP is `ratio` times as fast as Horovod."""
    plan = plan or Plan()
    folder.mkdir(parents=True, exist_ok=True)
    record = plan_record(plan, "2026-11-21T12:00:00+00:00")
    (folder / "plan.json").write_text(json.dumps(record))
    for run in plan.runs():
        make_run(folder, run, ratio)
    return folder


def make_run(comparison: Path, run: Run, ratio: float = 1.1) -> Path:
    """Write one complete run folder, as a trainer and run.py write it."""
    folder = comparison / run.folder
    folder.mkdir(parents=True)
    noise = random.Random(f"{run.folder}")
    drift = random.Random(f"block {run.block}").uniform(0.9, 1.1)
    engine = run.configuration.engine
    speed = 1000 * drift * run.workers**0.8 * (ratio if engine == "ddp" else 1)
    speed *= noise.uniform(0.99, 1.01)
    transport = "Gloo" if engine == "ddp" else "MPI"
    seed = run.seed or 0
    lines: list[dict[str, Any]] = [{"kind": "event", "name": "start", "time_utc": "..."}]
    batch = 32 * run.workers
    curve = random.Random(f"{seed} {run.workers}")
    for epoch in range(EPOCHS):
        for _ in range(STEPS_PER_EPOCH):
            step = sum(line["kind"] == "step" for line in lines) + 1
            seconds = batch / speed * noise.uniform(0.9, 1.2)
            loss = 2.3 * math.exp(-step / 20) + curve.uniform(0, 0.1)
            lines.append({
                "kind": "step", "epoch": epoch, "step": step, "samples_seen": step * batch,
                "loss": loss, "top1": 100 - 30 * loss, "top5": 99.0, "learning_rate": 0.1,
                "seconds": seconds, "data_seconds": 0.0, "images_per_second": batch / seconds,
            })  # fmt: skip
        common = {"epoch": epoch, "step": step, "samples_seen": step * batch}
        lines.append({"kind": "epoch", **common, "loss": loss, "top1": 100 - 30 * loss,
                      "top5": 99.0, "seconds": 1.0, "images_per_second": speed})  # fmt: skip
        lines.append({"kind": "eval", **common, "loss": loss * 0.8, "top1": 100 - 20 * loss,
                      "top5": 99.5, "num_images": 360, "seconds": 0.1, "weights": "model",
                      "train_seconds_so_far": (epoch + 1) * STEPS_PER_EPOCH * batch / speed,
                      })  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write(folder / "config.json", {"arch": "resnet18", "batch_size": 32, "precision": "fp32",
                                   "data": "digits", "epochs": EPOCHS, "seed": seed,
                                   "log_dir": str(folder.parent), "name": run.name})  # fmt: skip
    write(folder / "environment.json", {
        "engine": engine, "launcher": run.configuration.launcher, "transport": transport,
        "world_size": run.workers, "local_size": run.workers, "hosts": ["node"], "device": "cpu",
        "device_name": "", "cpu_model": "A Processor 9000", "cores": 2, "threads": 2 // run.workers,
        "python": "3.11.7", "torch": "2.14.1", "torchvision": "0.29.2", "horovod": "0.28.1",
        "mpi": "Open MPI 4.1.8", "cuda": None, "command": ["python", "train.py"],
        "started_utc": "2026-11-21T12:00:00Z", "git_commit": "abc123",
    })  # fmt: skip
    digest = f"{seed:02d}{run.workers}".ljust(64, "a")
    steps = STEPS_PER_EPOCH * EPOCHS
    write(folder / "summary.json", {
        "engine": engine, "launcher": run.configuration.launcher, "transport": transport,
        "world_size": run.workers, "epochs": EPOCHS, "steps": steps,
        "samples_seen": steps * batch, "images_per_second": speed,
        "train_seconds": steps * batch / speed, "total_seconds": 12.0, "cpu_seconds": 11.0,
        "cpu_seconds_per_image": 1.0 / speed * run.workers, "peak_memory_bytes": 400_000_000,
        "loss": loss * 0.8, "top1": 97.5, "top5": 99.9, "best_top1": 97.8,
        "weights_sha256": digest,
        "fingerprint": {
            "data_order_sha256": digest, "initial_weights_sha256": digest,
            "learning_rates_sha256": "b" * 64, "world_size": run.workers, "batch_size": 32,
            "batches_per_allreduce": 1, "precision": "fp32", "wire_format": "fp32",
            "batch_norm": "local", "threads": 2 // run.workers, "arch": "resnet18",
            "num_images": 1437, "python": "3.11.7", "torch": "2.14.1", "torchvision": "0.29.2",
            "device": "cpu",
        },
    })  # fmt: skip
    write(folder / "outcome.json", {"status": "completed", "exit_code": 0, "seconds": 12.5,
                                    "leftover_processes": 0})  # fmt: skip
    (folder / "command.txt").write_text("torchrun ... train.py\n")
    (folder / "output.log").write_text("epoch 1\n")
    return folder


def write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value))


def edit(path: Path, **changes: Any) -> None:
    """Change fields of a JSON file; `...` removes one."""
    record = json.loads(path.read_text())
    for field, value in changes.items():
        record.pop(field, None)
        if value is not ...:
            record[field] = value
    path.write_text(json.dumps(record))


def edit_fingerprint(folder: Path, field: str, value: Any) -> None:
    fingerprint = json.loads((folder / "summary.json").read_text())["fingerprint"]
    edit(folder / "summary.json", fingerprint={**fingerprint, field: value})


def test_a_whole_comparison_is_read(tmp_path):
    comparison = load_comparison(make_comparison(tmp_path / "compare-1"))
    assert len(comparison.complete) == len(comparison.runs) == 12
    run = comparison.find(2, "horovod-mpi", 2)
    assert run.label == "Horovod (horovodrun, MPI)"
    assert len(run.metrics("step")) == STEPS_PER_EPOCH * EPOCHS


@pytest.mark.parametrize(
    ("file", "field"),
    [
        ("summary.json", "images_per_second"),
        ("summary.json", "weights_sha256"),
        ("summary.json", "fingerprint"),
        ("summary.json", "top1"),
        ("environment.json", "hosts"),
        ("environment.json", "git_commit"),
    ],
)
def test_a_missing_field_is_named_with_its_file(tmp_path, file, field):
    folder = make_comparison(tmp_path / "compare-1")
    edit(folder / "block-1/ddp-torchrun-1" / file, **{field: ...})
    with pytest.raises(RecordError, match=f"block-1/ddp-torchrun-1/{file}.*'{field}' is missing"):
        load_comparison(folder)


def test_more_fields_are_no_error(tmp_path):
    folder = make_comparison(tmp_path / "compare-1")
    edit(folder / "block-1/ddp-torchrun-1/summary.json", tomorrow=1)
    assert load_comparison(folder)


@pytest.mark.parametrize("value", ["fast", None, True, 0, -3.0])
def test_a_throughput_that_is_none_is_named(tmp_path, value):
    folder = make_comparison(tmp_path / "compare-1")
    edit(folder / "block-1/ddp-torchrun-1/summary.json", images_per_second=value)
    with pytest.raises(RecordError, match=r"summary\.json: images_per_second is"):
        load_comparison(folder)


def test_a_broken_line_of_the_metrics_is_named(tmp_path):
    folder = make_comparison(tmp_path / "compare-1")
    path = folder / "block-1/ddp-torchrun-1/metrics.jsonl"
    path.write_text(path.read_text() + '{"kind": "step", "ep')
    run = load_comparison(folder).find(1, "ddp-torchrun", 1)
    with pytest.raises(RecordError, match=r"metrics.jsonl, line 86 is not JSON"):
        run.metrics("step")


def test_failed_and_missing_runs_keep_their_place(tmp_path):
    folder = make_comparison(tmp_path / "compare-1")
    edit(folder / "block-1/ddp-torchrun-1/outcome.json", status="failed", exit_code=3)
    (folder / "block-2/ddp-torchrun-1/summary.json").unlink()
    (folder / "block-2/ddp-torchrun-1/outcome.json").unlink()
    comparison = load_comparison(folder)
    failed = comparison.find(1, "ddp-torchrun", 1)
    assert (failed.status, failed.exit_code) == ("failed", 3)
    assert comparison.find(2, "ddp-torchrun", 1).status == "not run"
    assert len(comparison.complete) == 10


def test_the_newest_comparison_is_found_by_its_name(tmp_path):
    make_comparison(tmp_path / "compare-20261121-120000", Plan(blocks=1))
    make_comparison(tmp_path / "compare-20261020-130000", Plan(blocks=1))
    (tmp_path / "compare-20261122-120000").mkdir()  # holds no plan
    assert newest_comparison(tmp_path).name == "compare-20261121-120000"


def test_nothing_to_report_is_one_message(tmp_path):
    with pytest.raises(RecordError, match="make compare"):
        newest_comparison(tmp_path)
    with pytest.raises(RecordError, match="is not a folder"):
        load_comparison(tmp_path / "nowhere")
