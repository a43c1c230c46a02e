"""What is known of one configuration (model, batch, engine, transport) from its measured runs."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np

from compare.evidence import packed
from compare.evidence.profiles import BYTES, RecordedGradients
from compare.evidence.reading import read_metrics, read_record
from compare.evidence.records import ENGINES, load_comparison
from compare.evidence.turns import Block
from recipe.errors import refuse
from recipe.record.schema import WARM_UP_STEPS, Environment, Settings, StepLine, Summary

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Durations in seconds, of one worker that has its cores to itself."""

    engine: str  # "ddp" | "horovod"
    transport: str  # "gloo" | "mpi" | "nccl"
    batch_size: float  # of one worker
    wire_format: str = "fp32"
    gradient_bytes: tuple[float, ...]  # of fp32, in the order in which they get ready
    ready_seconds: tuple[float, ...]  # after the backward pass began
    data_seconds: float
    forward_seconds: float
    backward_seconds: float
    optimizer_seconds: float
    other_seconds: float = 0.0
    spread_seconds: float = 0.0  # scale of the Gumbel distribution of a rank's step
    contention: float = 1.0  # computing time of two workers on one host, in that of one
    pair_seconds: float | None = None  # measured step of two workers on one host
    exchange_factor: float = 1.0  # latency and CPU time of messages, in what the network says
    first_bucket_bytes: float = 1.0 * MIB
    bucket_bytes: float = 25.0 * MIB
    fusion_bytes: float = 128.0 * MIB
    cycle_seconds: float = 0.0  # Horovod's: it looks for gradients that often
    negotiates: bool = False  # Horovod: the ranks agree on what is ready
    algorithm: str = "tree"  # of the all-reduce: "ring" | "halving" | "tree"
    threads: int = 1  # that compute, of a rank
    cores: int = 1  # of the measured host
    fixed_share: float | None = None  # of forward and backward pass: of a batch of no image

    @property
    def step_seconds(self) -> float:
        """The measured step of one worker."""
        phases = self.data_seconds + self.forward_seconds + self.backward_seconds
        return phases + self.optimizer_seconds + self.other_seconds


# Variables by which Horovod exchanges in ways that the model does not know.
UNLIKE = {"HOROVOD_HIERARCHICAL_ALLREDUCE": "1", "HOROVOD_CACHE_CAPACITY": "0"}


def read_inputs(runs: Sequence["MeasuredRun"]) -> Inputs:
    """What the runs of one training say: with one worker and, if there are such, with two on one
    host, which tell how far they disturb each other; runs of more say only what they are. Repeated
    ones count by their medians. Lone runs with a smaller batch tell which part of a step no batch
    makes shorter.

    UserError if none has one worker and the batch of the others.
    """
    largest = max(run.batch_size for run in runs)
    lone = [run for run in runs if run.workers == 1 and run.batch_size == largest]
    pairs = [run for run in runs if run.is_pair]
    of = next(iter([*pairs, *(run for run in runs if run.workers > 1), *lone]))
    command = [*of.environment.command, "--profile-steps", "8", "--name", "one"]
    variables = {**of.environment.variables, **of.config.knob_variables}
    refuse((
        not lone or of.batch_size != largest,
        f"{', '.join(str(run.folder) for run in runs)}: a prediction starts from a run with one "
        "worker, of the same model and batch as the others; these have "
        f"{sorted(run.workers for run in runs)} workers. Make it with: {shlex.join(command)}",
    ))  # fmt: skip
    for name, value in UNLIKE.items():
        refuse((variables.get(name) == value, f"{of.folder}: the model knows no {name}={value}"))
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
        # Gloo's ranks stand in a ring; Open MPI halves and doubles; NCCL chooses ring or tree.
        algorithm={"gloo": "ring", "mpi": "halving"}.get(transport, "tree"),
        threads=of.environment.threads if of.environment.device == "cpu" else 1,  # it feeds a GPU
        cores=of.environment.cores,
        fixed_share=fixed_share([run for run in runs if run.workers == 1]),
    )


def fixed_share(lone: Sequence["MeasuredRun"]) -> float | None:
    """The part of forward and backward pass that does not shrink with the batch, by a straight line
    through the batches; None where only one was measured."""
    batches = [run.batch_size for run in lone]
    if len({*batches}) == 1:
        return None
    seconds = [run.phases["forward_seconds"] + run.phases["backward_seconds"] for run in lone]
    slope, least = np.polyfit(batches, seconds, 1)
    return float(np.clip(least / (least + slope * max(batches)), 0, 1))


@dataclass(frozen=True)
class MeasuredRun:
    """What one run says."""

    folder: Path
    config: Settings
    environment: Environment
    summary: Summary
    phases: dict[str, float]  # seconds of a step, by the names of Inputs
    spread: float

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
        """What a run of several workers has in common with others of its configuration."""
        return self.batch_size, self.environment.transport


def read_runs(path: Path) -> list[MeasuredRun]:
    """Read the runs below a path; of a comparison those of DDP and Horovod that are complete, each
    with the times of its turns if it has some."""
    if not (path / "plan.json").exists():
        return [read_run(one.parent) for one in sorted(path.rglob("summary.json"))]
    comparison = load_comparison(path)
    return [
        by_turns(read_run(run.folder), comparison.blocks_of(run.cell), run.configuration)
        for run in comparison.complete
        if run.engine in ENGINES
    ]


def by_turns(run: MeasuredRun, blocks: Sequence[Block], side: str) -> MeasuredRun:
    """The run with a step as it was in its side's turns: medians over the blocks. Unchanged where
    there are none that tell phases."""
    found = [phases for block in blocks if (phases := block.phases(side))]
    if not found:
        return run
    for one in found:
        one["backward_seconds"] += one.get("exposed_communication_seconds", 0.0)
    phases = typical(found)
    return replace(run, phases=phases, spread=run.spread * sum(phases.values()) / run.seconds)


def typical(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The phases of a step: medians over these, with the rest of the median step."""
    names = ("data_seconds", "forward_seconds", "backward_seconds", "optimizer_seconds")
    phases = {name: median(step[name] for step in steps) for name in names}
    rest = median(step["step_seconds"] for step in steps) - sum(phases.values())
    return {**phases, "other_seconds": rest}


def read_run(folder: Path) -> MeasuredRun:
    """Read a run folder; steps of the warm-up, and those that were profiled, do not count."""
    config = read_record(folder / "config.json", Settings)
    environment = read_record(folder / "environment.json", Environment)
    summary = read_record(folder / "summary.json", Summary)
    skipped = WARM_UP_STEPS + (-1 if config.profile_steps is None else config.profile_steps) + 1
    steps: list[StepLine] = read_metrics(folder / "metrics.jsonl")[StepLine][skipped:]
    steps = [step for step in steps if step.exchanged and step.backward_seconds is not None]
    refuse((not steps, f"{folder}: has no step after its first {skipped}: train longer"))
    told = [{**vars(step), "step_seconds": step.seconds} for step in steps]
    # Between the quartiles of Gumbel's distribution lie 1.573 of its scale.
    low, high = np.quantile([step.seconds for step in steps], [0.25, 0.75])
    spread = float(high - low) / 1.573
    return MeasuredRun(folder, config, environment, summary, typical(told), spread)


def gradients_of(
    runs: Sequence[MeasuredRun], total: float
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Sizes of gradients, and when they are ready in shares of the backward pass: as profiled; else
    evenly, in pieces of 1 MiB."""
    for run in runs:
        path = run.folder / "profile" / "gradients-rank-0.json"
        if packed.exists(path):
            times = read_record(path, RecordedGradients)
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
