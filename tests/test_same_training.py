"""The claim that all else rests on: both engines compute the same training, bit by bit."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import SMALL, launch, read_json, read_lines, run

pytestmark = [pytest.mark.launch, pytest.mark.timeout(600)]

ENGINES = [("torchrun", "ddp"), ("horovodrun --mpi", "horovod"), ("horovodrun --gloo", "horovod")]
# Each adds something that an engine could do in its own way.
VARIANTS = {
    "fp32, gradients of several buckets": "--arch resnet18 --max-steps 20",
    "fp16 wire": "--fp16-allreduce",
    "accumulation, clipping, averaged BatchNorm, EMA": (
        "--batches-per-allreduce 2 --batch-size 6 --clip-grad-norm 1 --batch-norm average "
        "--model-ema --model-ema-decay 0.9 --label-smoothing 0.1 --nesterov "
        "--norm-weight-decay 0 --bias-weight-decay 0 --channels-last"
    ),
    # ResNet-18's bf16 backward on a CPU differs from run to run, even in a single process.
    "bf16": "--precision bf16",
    "fp16 with loss scaling": "--precision fp16 --clip-grad-norm 1",
}


@contextlib.contextmanager
def when(is_so: Callable[[], Any], act: Callable[[], Any]) -> Iterator[None]:
    """Act once something is so, while the body runs."""
    over = threading.Event()

    def wait() -> None:
        while not over.wait(0.01):
            with contextlib.suppress(OSError, ValueError):  # not there yet, or half a line
                if is_so():
                    act()
                    return

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def train(folder: Path, launcher: str, engine: str, arguments: str = "", ranks: int = 2) -> dict:
    """The summary of one training."""
    finished = launch(
        launcher,
        engine,
        f"{SMALL} {arguments} --log-dir {folder.parent} --name {folder.name}",
        ranks,
    )
    assert finished.returncode == 0, finished.output
    return read_json(folder / "summary.json")


@pytest.mark.parametrize("variant", VARIANTS)
def test_engines_end_with_equal_weights(variant: str, tmp_path: Path) -> None:
    summaries = [
        train(tmp_path / f"run{number}", launcher, engine, VARIANTS[variant])
        for number, (launcher, engine) in enumerate(ENGINES)
    ]
    steps = 20 if "resnet18" in VARIANTS[variant] else 70
    assert {summary["steps"] for summary in summaries} == {steps}
    assert len({summary["weights_sha256"] for summary in summaries}) == 1
    assert len({str(summary["fingerprint"]) for summary in summaries}) == 1
    # Nor do they differ in what a comparison of engines takes for a difference in settings.
    environments = [read_json(path) for path in tmp_path.glob("run*/environment.json")]
    assert len(environments) == 3
    assert len({str(environment["variables"]) for environment in environments}) == 1
    assert summaries[0]["weights_sha256"] != summaries[0]["fingerprint"]["initial_weights_sha256"]
    losses = [
        [step["loss"] for step in read_lines(tmp_path / f"run{number}", "step")]
        for number in range(len(ENGINES))
    ]
    assert len(losses[0]) == steps
    assert losses[0] == losses[1] == losses[2]


def test_one_rank_equals_plain_training(tmp_path: Path) -> None:
    plain = run(["python", "baselines/single_process.py", *SMALL.split()], 240)
    assert plain.returncode == 0, plain.output
    digest = plain.output.split("weights ")[-1].strip()
    assert train(tmp_path / "ddp", "torchrun", "ddp", ranks=1)["weights_sha256"] == digest
    assert (
        train(tmp_path / "horovod", "horovodrun --mpi", "horovod", ranks=1)["weights_sha256"]
        == digest
    )


def test_loader_workers_change_nothing(tmp_path: Path) -> None:
    few = "--max-steps 20"
    alone = train(tmp_path / "alone", "torchrun", "ddp", few)
    with_workers = train(tmp_path / "workers", "torchrun", "ddp", f"{few} --workers 2")
    assert alone["weights_sha256"] == with_workers["weights_sha256"]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_resume_in_mid_epoch_under_either_engine(precision: str, tmp_path: Path) -> None:
    """70 steps at once; 35 under one engine, and under each the rest from step 20, in mid-epoch."""
    arguments = f"--precision {precision}" + (" --model-ema" if precision == "fp16" else "")
    whole = train(tmp_path / "whole", *ENGINES[0], arguments)
    for first, second in [
        (ENGINES[0], ENGINES[0]),
        (ENGINES[0], ENGINES[1]),
        (ENGINES[1], ENGINES[0]),
    ]:
        folder = tmp_path / f"{first[1]}-{second[1]}"
        train(
            folder, *first, f"{arguments} --checkpoint-steps 20 --max-steps 35 --keep-checkpoints 5"
        )
        for later in folder.glob("checkpoints/step-000000035.pt"):
            later.unlink()  # as if it had been killed before it got there
        summary = train(folder, *second, f"{arguments} --resume auto")
        assert summary["steps"] == 70
        assert summary["weights_sha256"] == whole["weights_sha256"]
        steps = read_lines(folder, "step")
        assert [step["step"] for step in steps] == list(range(1, 71)), (
            "no step is lost or told twice"
        )
        assert [step["loss"] for step in steps] == [
            step["loss"] for step in read_lines(tmp_path / "whole", "step")
        ]
        epochs = [
            {**line, "seconds": 0, "images_per_second": 0} for line in read_lines(folder, "epoch")
        ]
        assert [line["samples_seen"] for line in epochs] == [
            line["samples_seen"] for line in read_lines(tmp_path / "whole", "epoch")
        ]


def test_a_run_that_is_asked_to_stop_goes_on(tmp_path: Path) -> None:
    """By a file in its folder: it keeps a checkpoint there and then, and ends in order."""
    whole = train(tmp_path / "whole", *ENGINES[0])
    for launcher, engine in ENGINES:
        folder = tmp_path / launcher.replace(" ", "")
        with when(lambda folder=folder: read_lines(folder, "step"), (folder / "stop").touch):
            place = f"--log-dir {tmp_path} --name {folder.name} --log-interval 2"
            finished = launch(launcher, engine, f"{SMALL} {place}")
        assert finished.returncode == 0, finished.output
        assert finished.output.count("stopped after step") == 1, finished.output
        assert not (folder / "summary.json").exists()
        steps = read_lines(folder, "step")
        assert [path.name for path in (folder / "checkpoints").glob("step-*")] == [
            f"step-{len(steps):09d}.pt"
        ]
        assert 0 < len(steps) < 70
        summary = train(folder, launcher, engine, "--resume auto")
        assert summary["steps"] == 70
        assert summary["weights_sha256"] == whole["weights_sha256"]
        events = [event["name"] for event in read_lines(folder, "event")]
        assert events == ["start", "stop", "resume", "end"]


def test_resume_at_another_world_size_sees_each_image_once(tmp_path: Path) -> None:
    """2 ranks of 12 until step 20, then 3 ranks of 8: the stream of samples goes on."""
    folder = tmp_path / "run"
    train(folder, "torchrun", "ddp", "--max-steps 20")
    finished = launch(
        "mpirun", "horovod",
        f"{SMALL} --batch-size 8 --log-dir {tmp_path} --name run --resume auto", ranks=3,
    )  # fmt: skip
    assert finished.returncode == 0, finished.output
    summary = read_json(folder / "summary.json")
    assert summary["samples_seen"] == 70 * 24
    assert read_lines(folder, "eval")[-1]["num_images"] == 359


def test_adasum_trains_with_an_unscaled_rate_and_goes_on_exactly(tmp_path: Path) -> None:
    adasum = "horovodrun --mpi", "horovod", "--use-adasum --arch resnet18"
    whole = train(tmp_path / "run", *adasum)
    steps = read_lines(tmp_path / "run", "step")
    assert max(step["learning_rate"] for step in steps) <= 0.01, "Adasum scales by itself"
    assert sum(step["loss"] for step in steps[-5:]) < 0.7 * sum(step["loss"] for step in steps[:5])
    (tmp_path / "run" / "checkpoints" / "step-000000070.pt").unlink()  # goes on from the epoch's
    resumed = train(tmp_path / "run", *adasum[:2], f"{adasum[2]} --resume auto")
    assert resumed["weights_sha256"] == whole["weights_sha256"], "each rank has its own momentum"
    losses = [step["loss"] for step in read_lines(tmp_path / "run", "step")]
    assert losses == [step["loss"] for step in steps]
