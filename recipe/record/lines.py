"""What the record says, as pure functions: lines of metrics.jsonl and the console, TensorBoard's
points."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from recipe.config import Config
from recipe.data.batches import Data, samples_per_step
from recipe.record.schema import Environment, RungFigures, StepLine, Summary
from recipe.training.metrics import Step, Sums, means
from recipe.world import World

Figures = dict[str, float]  # loss, top1 and top5


def lines_until(metrics: Path, step: int) -> list[str]:
    """The lines of an interrupted run up to the checkpoint that it goes on from; the rest will be
    made again."""
    if not metrics.exists():
        return []
    lines = metrics.read_text().splitlines(keepends=True)
    return [
        line for line in lines if line.endswith("\n") and json.loads(line).get("step", 0) <= step
    ]


def epoch_so_far(lines: Iterable[str], epoch: int) -> tuple[Sums, float]:
    """Sums and seconds of the steps that metrics.jsonl has of the epoch that a resumed run is in
    the middle of, so that its figures cover all of it."""
    sums, seconds = torch.zeros(4, dtype=torch.float64), 0.0
    samples_before = 0
    for step in map(json.loads, lines):
        if step["kind"] != "step":
            continue
        if step["epoch"] == epoch:
            # Not this run's images per step: the world may have had another size.
            images = step["samples_seen"] - samples_before
            figures = [step["loss"], step["top1"] / 100, step["top5"] / 100, 1.0]
            sums += images * torch.tensor(figures, dtype=torch.float64)
            seconds += step["seconds"]
        samples_before = step["samples_seen"]
    return sums, seconds


def introduction(
    config: Config, world: World, data: Data, environment: Environment, folder: Path
) -> list[str]:
    """The console's first lines: what is trained, and on what."""
    batch, first = samples_per_step(config, world), samples_per_step(config, world, epoch=0)
    at_first = f", {first} at first" if first < batch else ""
    return [
        f"{environment.engine} {environment.version} over {environment.transport}, "
        f"{world.size} worker(s) on {len(environment.hosts)} host(s) by {world.launcher}, "
        f"{environment.device_name}, {environment.threads} CPU thread(s) each",
        f"{config.arch} in {config.precision}, {data.num_train:,} training and "
        f"{data.num_val:,} validation images of {data.num_classes} classes, "
        f"global batch {batch}, {data.num_train / batch:,.1f} steps an epoch{at_first}; "
        f"run folder {folder}",
    ]


def rung_lines(figures: RungFigures) -> Iterator[str]:
    """What a script in baselines/ has measured of its way of training, for the console."""
    for what, sizes in ("optimizer", figures.optimizer_bytes), ("weights", figures.weight_bytes):
        if sizes is not None:
            each = ", ".join(f"rank {rank} {size / 1e6:.2f} MB" for rank, size in enumerate(sizes))
            yield f"memory of the {what}: {each}"
    if figures.bubble_share is not None:
        yield (
            f"bubble: {figures.bubble_share:.2f} of the steps; {figures.equal_bubble_share:.2f} if "
            "the stages were equal"
        )
    if figures.staleness is not None:
        yield (
            f"staleness: {figures.staleness:.2f} updates in the mean of all pushes, "
            f"{figures.largest_staleness} at most"
        )


def console_line(epoch: int, epochs: int, name: str, figures: Figures) -> str:
    """An epoch's figures (counted from 0) for the console."""
    return (
        f"epoch {epoch + 1:>3}/{epochs}  {name:<5}  loss {figures['loss']:.4f}  "
        f"top-1 {figures['top1']:6.2f} %  top-5 {figures['top5']:6.2f} %"
    )


def skipped_line(step: int, config: Config) -> str:
    """What the console says of a step that was left out."""
    scale = config.scales_loss_by
    then = "the loss scale is halved" if scale == "dynamic" else f"choose one below {scale:g}"
    return f"step {step} changed no weight: its gradients overflowed with this loss scale; {then}"


def step_line(step: Step, num_train: int) -> StepLine:
    """A step for metrics.jsonl; it belongs to the epoch that it begins in."""
    return StepLine(
        epoch=(step.samples_seen - step.images) // num_train,
        step=step.number,
        samples_seen=step.samples_seen,
        **means(step.sums),
        learning_rate=step.learning_rate,
        seconds=step.seconds,
        **{f"{phase}_seconds": value for phase, value in step.phases.items()},
        exchanged=step.exchanged,
        images_per_second=step.images / step.seconds,
    )


def epoch_points(part: str, figures: Figures, seconds: float, speed: float) -> Figures:
    """TensorBoard's points of an epoch's training, or of an evaluation."""
    return {
        f"Loss/{part}": figures["loss"],
        f"Top1/{part}": figures["top1"],
        f"Top5/{part}": figures["top5"],
        f"Time/{part}": seconds,
        f"Throughput/{part}": speed,
    }


def step_points(figures: Figures, learning_rate: float, speed: float) -> Figures:
    """TensorBoard's points of an interval of steps."""
    return {
        "Steps/Loss": figures["loss"],
        "Steps/Top1": figures["top1"],
        "Steps/Top5": figures["top5"],
        "Steps/Lr": learning_rate,
        "Steps/Throughput": speed,
    }


def hyper_parameters(
    config: Config, environment: Environment, summary: Summary
) -> tuple[dict[str, Any], Figures]:
    """A run's settings, and the figures that they led to, for TensorBoard."""
    of_the_world = ("engine", "launcher", "transport", "world_size", "threads")
    values = asdict(config) | {key: getattr(environment, key) for key in of_the_world}
    settings = {
        key: value if isinstance(value, (int, float, str, bool)) else str(value)
        for key, value in values.items()
    }
    results = {
        f"hparam/{key}": value
        for key in ("top1", "loss", "images_per_second")
        if (value := getattr(summary, key)) is not None
    }
    return settings, results
