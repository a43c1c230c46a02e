"""Reading run folders; and made-up ones, which the other tests of compare/ use too."""

import errno
import itertools
import json
import math
import random
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from records import (
    a_plan,
    a_summary,
    an_environment,
    edit,
    lines_of,
    make_turns,
    write_lines,
)

from compare.evidence import record as record_module
from compare.evidence.reading import TimedSummary, contradictions
from compare.evidence.record import Record, read_comparison, record_to_write
from compare.evidence.runs import with_few_steps
from compare.plan.plan import Outcome, Plan, Run
from compare.plan.plan_file import plan_record
from compare.running.comparison import record_plan, record_run
from recipe.errors import UserError
from recipe.record.schema import Input, Phases, Settings

STEPS, EPOCHS = 72, 6
# What share of a step each phase takes; the exchange of gradients is the rest.
SHARES = {"data": 0.05, "forward": 0.3, "backward": 0.45, "optimizer": 0.05}


def make_comparison(folder: Path, plan: Plan | None = None, ratio: float = 1.1) -> Path:
    """Write a whole comparison in which DDP is `ratio` times as fast as Horovod, which loses its
    time in the exchange of gradients."""
    plan = plan or a_plan()
    folder.mkdir(parents=True, exist_ok=True)
    record = Record(folder)
    record_plan(plan_record(plan, "2026-11-21T12:00:00+00:00"), record)
    outcome = Outcome("completed", 0, other_load=0.05, seconds=12.5)
    for run in plan.runs():
        make_run(folder, run, ratio)
        record_run(run, outcome, record)
    return folder


def make_square(folder: Path, **plan: Any) -> Path:
    """Write a comparison by turns of both engines over Gloo and MPI: DDP is the faster one, and
    MPI faster than Gloo."""
    speeds = {"ddp-torchrun": 100, "ddp-mpi": 108, "horovod-gloo": 95, "horovod-mpi": 102}
    pairs = (
        ("ddp-torchrun", "horovod-gloo"),
        ("ddp-mpi", "horovod-mpi"),
        ("ddp-mpi", "ddp-torchrun"),
        ("horovod-mpi", "horovod-gloo"),
    )
    asked = {"workers": (2,), "blocks": 1, **plan}
    make_comparison(folder, a_plan(configurations=tuple(speeds), judged_pairs=pairs, **asked))
    return make_turns(folder, speeds)


def settings_of(run: Run) -> dict[str, Any]:
    """Return the settings that a run's arguments make, and defaults for others."""
    settings: dict[str, Any] = {
        "arch": "resnet18",
        "batch_size": 32,
        "precision": "fp32",
        "data": "digits",
        "epochs": EPOCHS,
        "seed": run.seed or 0,
        "fp16_allreduce": False,
        "bucket_cap_mb": None,
    }
    for flag, value in itertools.pairwise((*run.arguments, "--")):
        field = flag.removeprefix("--").replace("-", "_")
        if flag.startswith("--") and field in settings:
            given: Any = True if value.startswith("--") else value
            settings[field] = int(given) if str(given).isdigit() else given
    return settings


def make_run(comparison: Path, run: Run, ratio: float = 1.1) -> Path:
    """Write one complete run folder, as a trainer and run.py write it."""
    folder, settings, own = comparison / run.folder, settings_of(run), run.configuration
    folder.mkdir(parents=True)
    noise, drift = random.Random(f"{run.folder}"), random.Random(f"block {run.block}")
    common = 1000 * drift.uniform(0.9, 1.1) * run.workers**0.8
    speed = common * (ratio if own.engine == "ddp" else 1) * noise.uniform(0.99, 1.01)
    batch = settings["batch_size"] * run.workers
    # All that the slower one takes longer goes into the exchange, which is part of backward.
    phases = {
        f"{name}_seconds": share * batch / (common * max(ratio, 1))
        for name, share in SHARES.items()
    }
    phases["backward_seconds"] += batch / speed - sum(phases.values())
    over_mpi = (own.controller or own.transport or own.engine) in ("mpi", "horovod")
    started: dict[str, Any] = {
        "engine": own.engine,
        "launcher": "mpirun" if own.controller == "mpi" else own.launcher,
        "transport": "MPI" if over_mpi else "Gloo",
        "world_size": 1 if own.trained_by.is_one_worker else run.workers,
        "threads": 2 // run.workers,
    }
    digest = f"{settings['seed']:02d}{run.workers}{run.case}".encode().hex().ljust(64, "a")[:64]
    lines: list[dict[str, Any]] = [
        {"kind": "event", "name": "start", "time_utc": "...", "step": 0},
        {
            "kind": "step",
            "epoch": 0,
            "step": 1,
            "samples_seen": batch,
            "loss": 2.3,
            "top1": 10.0,
            "top5": 50.0,
            "learning_rate": 0.1,
            "seconds": batch / speed,
            "images_per_second": speed,
            "data_seconds": phases["data_seconds"],
        },
        *(
            {
                "kind": "eval",
                "epoch": epoch,
                "step": 12 * (epoch + 1),
                "loss": 1 / (epoch + 1),
                "samples_seen": 12 * (epoch + 1) * batch,
                "top1": 99.0 - 9 / (epoch + 1),
                "top5": 99.5,
                "num_images": 360,
                "seconds": 0.1,
                "train_seconds_so_far": epoch + 1.0,
            }
            for epoch in range(EPOCHS)
        ),
    ]
    fingerprint = {
        "data_order_sha256": digest,
        "initial_weights_sha256": digest,
        "learning_rates_sha256": "b" * 64,
        "world_size": run.workers,
        "batches_per_allreduce": 1,
        "wire_format": "fp16" if settings["fp16_allreduce"] else "fp32",
        "batch_norm": "local",
        "threads": 2 // run.workers,
        "num_images": 1437,
        "device": "cpu",
        **{
            field: settings[field]
            for field in ("arch", "batch_size", "precision", "fp16_allreduce", "bucket_cap_mb")
        },
    }
    write(folder / "config.json", {**settings, "log_dir": str(folder.parent), "name": run.name})
    write(
        folder / "environment.json",
        asdict(
            an_environment(
                **started,
                local_size=run.workers,
                rank_hosts=["node"] * run.workers,
                affinity=["0-1"] * run.workers,
                variables=own.environment,
                horovod="0.28.1" if own.engine == "horovod" else None,
                mpi="Open MPI 4.1.8" if over_mpi else None,
            )
        ),
    )
    write(
        folder / "summary.json",
        asdict(
            a_summary(
                **started,
                steps=STEPS,
                samples_seen=STEPS * batch,
                images_per_second=speed,
                train_seconds=STEPS * batch / speed,
                cpu_seconds_per_image=1.0 / speed * run.workers,
                loss=lines[-1]["loss"],
                weights_sha256=digest,
                fingerprint=fingerprint,
                phases=Phases(**phases, steps=STEPS - 5, step_seconds=batch / speed),
                input=Input(images_per_second=speed, wait_share=SHARES["data"]),
                gradient_bytes=44_700_000,
            )
        ),
    )
    for name, text in {
        "metrics.jsonl": "".join(json.dumps(line) + "\n" for line in lines),
        "command.txt": "torchrun ... train.py\n",
        "output.log": "epoch 1\n",
    }.items():
        (folder / name).write_text(text)
    return folder


def write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value))


def change(record: Any, **fields: Any) -> None:
    """Change fields of a record that was read."""
    vars(record).update(fields)


def edit_fingerprint(folder: Path, field: str, value: Any) -> None:
    fingerprint = json.loads((folder / "summary.json").read_text())["fingerprint"]
    edit(folder / "summary.json", fingerprint={**fingerprint, field: value})


TWO_CASES = {
    "ResNet-18": ("--arch", "resnet18"),
    "VGG-16": ("--arch", "vgg16", "--batch-size", "16"),
}


RESULTS = Path(__file__).resolve().parent.parent / "results"


@pytest.mark.parametrize("folder", sorted(path.parent for path in RESULTS.glob("*/*/record.jsonl")))
def test_recorded_comparisons_are_whole(folder):
    record = read_comparison(folder)
    assert record.problem == ""
    kept = dict(reversed(line.split()) for line in (RESULTS / "sha256sums.txt").open())
    assert record.head == kept[str(record.path.relative_to(RESULTS))]
    for run in record.complete:
        assert run.summary.phases.step_seconds
        assert bool(run.evaluations) == (run.summary.top1 is not None)


OF_32 = "72 steps have 32 images each"


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        *(
            ("summary.json", {"images_per_second": value}, "images_per_second")
            for value in ("fast", None, True, 0, math.nan, math.inf, 12345.0)
        ),
        ("summary.json", {"weights_sha256": ...}, "missing required field `weights_sha256`"),
        ("environment.json", {"hosts": "node"}, "hosts = .*expected `array`"),
        ("environment.json", {"format": 1000}, "format = 1000: expected `int` <= 1"),
        ("environment.json", {"world_size": 2}, "world_size is 2, but the plan has 1"),
        ("summary.json", {"phases": {"step_seconds": "long"}}, r"phases\.step_seconds = "),
        ("summary.json", {"ranks": [{"forward_seconds": True}]}, r"ranks\[0\]\.forward_seconds = "),
        ("summary.json", {"samples_seen": 7}, f"samples_seen is 7, but {OF_32}"),
        ("summary.json", {"transport": "MPI\nverdict"}, "holds a control character"),
        ("outcome.json", {"status": "fine"}, "status = 'fine'"),
    ],
)
def test_figures_that_do_not_fit_together_are_named(tmp_path, file, changes, message):
    folder = make_comparison(tmp_path / "compare-1", a_plan(blocks=1))
    edit(folder / "block-1/ddp-torchrun-1" / file, **changes)
    assert re.search(rf"line \d+: .*{message}", Record.open(folder).problem)


TOOK = "images_per_second is {}, but a step of 32 to 64 images took 0.1 s"


@pytest.mark.parametrize(
    ("images", "speed", "message"),
    [
        (72 * 32, 320.0, ""),
        (72 * 64, 640.0, ""),
        (72 * 31, 500.0, "samples_seen is 2232, but 72 steps have 32 to 64 images each"),
        (72 * 50, 290.0, TOOK.format(290)),
        (72 * 50, 700.0, TOOK.format(700)),
    ],
)
def test_steps_grow_as_the_settings_say(images, speed, message):
    settings = Settings(log_dir="", name=None, batch_size_warmup_epochs=1)
    work = {"batch_size": 32, "world_size": 2, "batches_per_allreduce": 1}
    fields = {"samples_seen": images, "images_per_second": speed, "fingerprint": work}
    summary = TimedSummary(**vars(a_summary(**fields, phases=Phases(step_seconds=0.1))))
    assert message in next(contradictions(settings, summary, 72), "")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: "", "its last line is of step None"),
        (lambda text: text + '{"kind": "step", "ep', "line 9 is not a JSON object"),
        (lambda text: text[: len(text) // 2].rpartition("\n")[0], "but the run had 72 steps"),
        (
            lambda text: text.replace('"seconds": 0.1', '"seconds": -1.0'),
            "line 3: seconds = -1.0: expected `float`",
        ),
    ],
)
def test_a_run_whose_metrics_are_damaged_is_unreadable_and_not_made_again(
    tmp_path, damage, message
):
    plan, folder = a_plan(blocks=1), tmp_path / "compare-1"
    record = Record(folder)
    folder.mkdir()
    record_plan(plan_record(plan, "2026-11-21T12:00:00+00:00"), record)
    run = plan.runs()[0]
    metrics = make_run(folder, run) / "metrics.jsonl"
    metrics.write_text(damage(metrics.read_text()))
    outcome, aside = record_run(run, Outcome("completed"), record)
    assert outcome.status == "unreadable" and (aside / "metrics.jsonl").exists()
    again = Record.open(folder)
    assert again.problem == "" and again.complete == []
    assert re.search(message, again.failure(run.folder).output)
    assert run not in again.missing(plan.runs())


def test_of_a_long_training_few_steps_are_recorded():
    """At equal distances; all else stays, in its order."""
    events = [{"kind": "event", "name": name} for name in ("start", "end")]
    steps = [{"kind": "step", "step": number} for number in range(1, 1201)]
    evaluation = {"kind": "eval", "step": 600}
    lines = [events[0], *steps[:600], evaluation, *steps[600:], events[1]]
    kept = [events[0], *steps[:600:3], evaluation, *steps[600::3], events[1]]
    assert with_few_steps(lines) == kept
    assert with_few_steps(kept) == kept


def test_a_full_disk_loses_no_run(tmp_path, monkeypatch):
    """Its folder stays where it is, and after the torn line is removed it is not "unreadable"."""
    plan, folder = a_plan(blocks=1), tmp_path / "compare-1"
    record = Record(folder)
    folder.mkdir()
    record_plan(plan_record(plan, "2026-11-21T12:00:00+00:00"), record)
    run = plan.runs()[0]
    made, before = make_run(folder, run), record.path.read_bytes()

    def fail(_: int) -> None:
        with record.path.open("r+b") as file:
            file.truncate(len(before) + 50)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("compare.evidence.record.os.fsync", fail)
    with pytest.raises(UserError, match="cannot be written"):
        record_run(run, Outcome("completed"), record)
    monkeypatch.undo()
    again = record_to_write(folder)
    assert made.exists() and record.path.read_bytes() == before
    assert run in again.missing(plan.runs())


def test_a_run_in_the_wrong_place_is_refused(tmp_path):
    """Within each case runs would be equal, and look like a fair comparison of the other one."""
    cases = {"A": ("--seed", "1"), "B": ("--seed", "2")}
    folder = make_comparison(tmp_path / "compare-1", a_plan(cases=cases, blocks=1))
    lines = lines_of(folder)
    lines[1]["place"] = lines[1]["place"].replace("A", "C")
    write_lines(folder, lines)
    assert "is no run of the plan" in Record.open(folder).problem


def test_a_third_peer_leaves_the_square_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_module, "PEERS", {"deepspeed": "DeepSpeed", **record_module.PEERS})
    folder = Path(__file__).parent.parent / "results" / "xeon-amx-2-cores/2026-11-25-square-1"
    corners = read_comparison(folder).square
    assert [*corners] == [("ddp", "MPI"), ("horovod", "MPI"), ("ddp", "Gloo"), ("horovod", "Gloo")]
