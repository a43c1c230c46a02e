"""The inputs of a prediction, from the measured runs of one configuration (model, batch, engine,
transport)."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from compare.evidence.group import Group
from compare.evidence.judgement import find
from compare.evidence.profiles import BYTES, RecordedGradients
from compare.evidence.reading import metrics_of, parse
from compare.evidence.record import FILE, Record, read_comparison
from compare.evidence.runs import read_run_folder
from compare.evidence.turns import Block
from compare.evidence.words import SHARED_GPU, difference_text, place_text, short
from compare.plan.configurations import PEERS
from recipe.errors import UserError
from recipe.record.schema import WARM_UP_STEPS, Environment, Settings, StepLine, Summary

MIB = 1 << 20
# What the runs of one prediction share. Numbers of threads may differ, as those of workers do.
ALIKE = (
    "precision",
    "train_crop_size",
    "channels_last",
    "compile",
    "cpu_model",
    "device_name",
    "torch",
)


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Durations are in seconds, for one worker that has its cores to itself."""

    engine: str  # "ddp" | "horovod"
    transport: str  # "gloo" | "mpi" | "nccl"
    batch_size: float  # of one worker
    wire_format: str = "fp32"
    gradient_bytes: tuple[float, ...]  # in fp32, in the order in which gradients get ready
    ready_seconds: tuple[float, ...]  # since the backward pass began
    data_seconds: float
    forward_seconds: float
    backward_seconds: float
    optimizer_seconds: float
    other_seconds: float = 0.0
    spread_seconds: float = 0.0  # scale of the Gumbel distribution of a rank's step
    contention: float = 1.0  # computing time with two workers on one host / with one
    pair_seconds: float | None = None  # measured step of two workers on one host
    exchange_factor: float = 1.0  # latency and CPU time of messages / the network's figures
    first_bucket_bytes: float = 1.0 * MIB
    bucket_bytes: float = 25.0 * MIB
    fusion_bytes: float = 128.0 * MIB
    cycle_seconds: float = 0.0  # Horovod's cycle time: it looks for gradients once per cycle
    negotiates: bool = False  # Horovod's ranks agree on which gradients are ready
    algorithm: str = "tree"  # of the all-reduce: "ring" | "halving" | "tree"
    threads: int = 1  # computing threads of a rank
    cores: int = 1  # of the measured host
    fixed_share: float | None = None  # the part of forward and backward pass that no batch shrinks

    @property
    def step_seconds(self) -> float:
        """The measured step of one worker."""
        phases = self.data_seconds + self.forward_seconds + self.backward_seconds
        return phases + self.optimizer_seconds + self.other_seconds


# Variables that make Horovod exchange in ways that are not in the model.
UNMODELLED = {"HOROVOD_HIERARCHICAL_ALLREDUCE": "1", "HOROVOD_CACHE_CAPACITY": "0"}


def read_inputs(runs: Sequence["MeasuredRun"]) -> Inputs:
    """Return the inputs from the runs of one training.

    Runs of one worker give the phases. Runs of two workers on one host, if any, show how much
    workers slow each other down. Runs of more workers give settings only. Repeated runs count by
    their medians. Runs of one worker with a smaller batch show which part of a step does not shrink
    with the batch.

    UserError if no run has one worker and the batch of the others.
    """
    largest = max(run.batch_size for run in runs)
    lone = [run for run in runs if run.workers == 1 and run.batch_size == largest]
    pairs = [run for run in runs if run.is_pair]
    of = next(iter([*pairs, *(run for run in runs if run.workers > 1), *lone]))
    command = [*of.environment.command, "--profile-steps", "8", "--name", "one"]
    variables = of.environment.variables
    if not lone or of.batch_size != largest:
        raise UserError(
            f"{', '.join(str(run.folder) for run in runs)}: a prediction needs a run of one "
            "worker, with the same model and batch as the others; these have "
            f"{sorted(run.workers for run in runs)} workers. Make it with: {shlex.join(command)}"
        )
    for name, value in UNMODELLED.items():
        if variables.get(name) == value:
            raise UserError(
                f"{of.folder}: ran with {name}={value}, which is not in the model; measure without "
                "it"
            )
    phases = {name: median(run.phases[name] for run in lone) for name in lone[0].phases}
    sizes, shares = gradients_of(lone, float(of.summary.gradient_bytes or 0))
    both = [run.phases["forward_seconds"] for run in pairs]
    first, cap = of.config.first_bucket_mb, of.config.bucket_cap_mb
    is_horovod, transport = of.environment.engine == "horovod", of.environment.transport.lower()
    return Inputs(
        engine=of.environment.engine,
        transport=transport,
        batch_size=largest,
        wire_format=of.config.wire_format or "fp32",
        gradient_bytes=sizes,
        ready_seconds=tuple(share * phases["backward_seconds"] for share in shares),
        **phases,
        spread_seconds=median(run.spread for run in lone),
        contention=max(1.0, median(both) / phases["forward_seconds"]) if both else 1.0,
        pair_seconds=median(run.seconds for run in pairs) if pairs else None,
        first_bucket_bytes=MIB * (first or cap or 1.0),
        bucket_bytes=MIB * (cap or 25.0),
        fusion_bytes=float(variables.get("HOROVOD_FUSION_THRESHOLD", 128 * MIB)),
        cycle_seconds=is_horovod * float(variables.get("HOROVOD_CYCLE_TIME", 1.0)) / 1000,
        negotiates=is_horovod,
        # Gloo uses a ring, Open MPI halving and doubling; NCCL chooses a ring or a tree.
        algorithm={"gloo": "ring", "mpi": "halving"}.get(transport, "tree"),
        # On a GPU one thread feeds it.
        threads=of.environment.threads if of.environment.device == "cpu" else 1,
        cores=of.environment.cores,
        fixed_share=fixed_share([run for run in runs if run.workers == 1]),
    )


def fixed_share(lone: Sequence["MeasuredRun"]) -> float | None:
    """Return the share of forward and backward pass that does not shrink with the batch, from a
    straight line through the measured batches; None if there is only one batch."""
    batches = [run.batch_size for run in lone]
    if len({*batches}) == 1:
        return None
    seconds = [run.phases["forward_seconds"] + run.phases["backward_seconds"] for run in lone]
    slope, least = np.polyfit(batches, seconds, 1)
    return float(np.clip(least / (least + slope * max(batches)), 0, 1))


@dataclass(frozen=True)
class MeasuredRun:
    """The records of one run, with the phases of its typical step."""

    folder: Path
    config: Settings
    environment: Environment
    summary: Summary
    phases: dict[str, float]  # seconds of a step, by the names of Inputs
    spread: float
    gradients: dict[str, Any] | None = None  # when each was ready, if the run was profiled
    doubt: str = ""  # why its comparison may conclude nothing from it

    @property
    def seconds(self) -> float:
        return sum(self.phases.values())

    @property
    def workers(self) -> int:
        return self.summary.world_size

    @property
    def is_pair(self) -> bool:
        """Whether two workers share one host."""
        return self.workers == self.environment.local_size == 2

    @property
    def batch_size(self) -> int:
        return int(self.config.batch_size or 1)

    @property
    def kind(self) -> tuple[int, str]:
        """Batch and transport, which all runs of a configuration share."""
        return self.batch_size, self.environment.transport


def read_runs(path: Path) -> list[MeasuredRun]:
    """Read the runs below a path. Of a comparison, read the complete runs of DDP and Horovod, with
    the times from their turns if there are any."""
    if not (path / FILE).exists():
        return [read_run(summary.parent) for summary in sorted(path.rglob("summary.json"))]
    record = read_comparison(path)
    found = []
    for group in record.groups:
        for run in group.complete:
            if run.engine in PEERS:
                lone = MeasuredRun(
                    run.folder,
                    run.config,
                    run.environment,
                    run.summary,
                    *steps_of(run.metrics, run.config, run.folder),
                    gradients=run.gradients,
                    doubt=doubt_of(record, group, run.configuration),
                )
                blocks = group.blocks_with([run.configuration])
                found.append(by_turns(lone, blocks, run.configuration))
    return found


def doubt_of(record: Record, group: Group, configuration: str) -> str:
    """Return why nothing may be concluded from a configuration's runs, by the judgement that
    verdicts obey; "" if something may."""
    found = find(record, group, {configuration: 1})
    why = [*map(difference_text, found.differences)]
    if not found.is_finished:
        why.append(f"the measurement is not finished: {record.unfinished[group.place]}")
    if found.ranks_per_gpu:
        why.append(SHARED_GPU)
    return f"{record.folder}, {place_text(*group.place)}: {'; '.join(why)}" if why else ""


def unequal_in(runs: Sequence[MeasuredRun]) -> list[str]:
    """Return in what runs differ that one prediction must not mix, in words."""
    unequal = list[str]()
    for name in ALIKE:
        values = {
            short(run.config.flags.get(name, getattr(run.environment, name, None))) for run in runs
        }
        if len(values) > 1:
            unequal.append(f"{name}: {', '.join(sorted(values))}")
    return unequal


def by_turns(run: MeasuredRun, blocks: Sequence[Block], side: str) -> MeasuredRun:
    """Return the run with the step of its side's turns, by medians over the blocks. The run stays
    unchanged if no block has phases."""
    by_block = [phases for block in blocks if (phases := block.phases(side))]
    if not by_block:
        return run
    for phases in by_block:
        phases["backward_seconds"] += phases.get("exposed_communication_seconds", 0.0)
    phases = typical(by_block)
    return replace(run, phases=phases, spread=run.spread * sum(phases.values()) / run.seconds)


def typical(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the phases of a step, as medians over these, and the rest of the median step."""
    names = ("data_seconds", "forward_seconds", "backward_seconds", "optimizer_seconds")
    phases = {name: median(step[name] for step in steps) for name in names}
    rest = median(step["step_seconds"] for step in steps) - sum(phases.values())
    return {**phases, "other_seconds": rest}


def read_run(folder: Path) -> MeasuredRun:
    """Read a run folder."""
    written = read_run_folder(folder)
    config = parse(written["settings"], Settings, folder / "config.json")
    environment = parse(written["environment"], Environment, folder / "environment.json")
    return MeasuredRun(
        folder,
        config,
        environment,
        parse(written["summary"], Summary, folder / "summary.json"),
        *steps_of(written["metrics"], config, folder),
        gradients=written["gradients"],
        doubt=f"{folder}: {SHARED_GPU}" if environment.ranks_per_gpu else "",
    )


def steps_of(
    metrics: Sequence[dict[str, Any]], config: Settings, folder: Path
) -> tuple[dict[str, float], float]:
    """Return the phases of the typical step, and the spread of steps; steps of the warm-up and
    profiled steps do not count."""
    skipped = WARM_UP_STEPS + (-1 if config.profile_steps is None else config.profile_steps) + 1
    steps = metrics_of(metrics, StepLine, folder / "metrics.jsonl")[skipped:]
    steps = [step for step in steps if step.backward_seconds is not None]
    if not steps:
        raise UserError(f"{folder}: has no step after its first {skipped}: train longer")
    seconds = [{**vars(step), "step_seconds": step.seconds} for step in steps]
    # The quartiles of Gumbel's distribution are 1.573 times its scale apart.
    low, high = np.quantile([step.seconds for step in steps], [0.25, 0.75])
    return typical(seconds), float(high - low) / 1.573


def gradients_of(
    runs: Sequence[MeasuredRun], total: float
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the sizes of gradients, in bytes, and when each is ready, as a share of the backward
    pass. Without a profile: pieces of 1 MiB at equal distances."""
    for run in runs:
        if run.gradients is not None:
            times = parse(run.gradients, RecordedGradients, f"{run.folder}, its gradients")
            ready = {
                name: median(
                    (step.ready[name] - step.backward) / (max(step.ready.values()) - step.backward)
                    for step in times.steps
                )
                for name in times.elements
            }
            names = sorted(ready, key=ready.__getitem__)
            return (
                tuple(float(BYTES * times.elements[name]) for name in names),
                tuple(ready[name] for name in names),
            )
    pieces = max(1, round(total / MIB))
    return (total / pieces,) * pieces, tuple((i + 1) / pieces for i in range(pieces))
