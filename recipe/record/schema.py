"""What the files of a run folder hold: the trainers write these records, compare/ reads them.

    config.json        Settings, and every other setting of recipe.flags.Config
    environment.json   Environment
    metrics.jsonl      lines of METRICS, each with its "kind"
    summary.json       Summary

A figure's name ends in its unit where it has one; top1 and top5 are in percent. None, null in JSON,
is: not measured. A field with a default may be missing: trainers before it did not write it. All
others every trainer has written, and a reader may insist on them.
"""

from dataclasses import dataclass, field
from typing import Any

FORMAT = 1  # goes up where a reader of today's records would misread the new ones


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is asked of config.json by name; `flags` holds all of it, under the names of Config."""

    log_dir: str
    name: str | None  # None: a name was made of engine and time
    data: str | None = None
    train_dir: str | None = None
    arch: str | None = None
    batch_size: int | None = None  # images of one worker in one backward pass
    batch_size_warmup_epochs: int = 0
    precision: str | None = None
    seed: int | None = None
    knobs: str | None = None  # the file
    knob_variables: dict[str, str] = field(default_factory=dict)  # that the file has set
    flags: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What a run ran on, as rank 0 found it, and where its other ranks were."""

    format: int = 0  # FORMAT of whoever wrote it; 0: of before it was written
    engine: str  # "horovod" or "ddp"
    version: str  # of the engine
    launcher: str
    transport: str  # what really carried the gradients: "MPI", "Gloo", "NCCL"
    world_size: int
    local_size: int  # ranks on this host
    hosts: list[str]
    rank_hosts: list[str] | None = None  # by rank
    device: str  # "cpu" or "cuda"
    device_name: str
    cpu_model: str
    cores: int  # of the host
    threads: int  # of each rank
    affinity: list[str] | None = None  # by rank, the cores that it may use, as "0-3,8"
    allocator: str | None = None
    variables: dict[str, str] = field(default_factory=dict)  # that steer an engine
    python: str
    torch: str
    torchvision: str
    horovod: str | None  # None where it is not used; so mpi and cuda
    mpi: str | None
    cuda: str | None
    kernel: str | None = None
    command: list[str]
    started_utc: str
    git_commit: str | None  # with a + if files were changed since; None outside a checkout


@dataclass(frozen=True, kw_only=True)
class MetricsLine:
    """Metrics over images, and how far training had come."""

    epoch: int  # from 0; of a step, the one that it began in
    step: int  # from 1
    samples_seen: int  # of all ranks, with this step
    loss: float
    top1: float
    top5: float


@dataclass(frozen=True, kw_only=True)
class StepLine(MetricsLine):
    """A step: metrics over all ranks' images, durations of rank 0."""

    learning_rate: float
    seconds: float
    data_seconds: float
    forward_seconds: float | None = None
    backward_seconds: float | None = None
    optimizer_seconds: float | None = None
    exchanged: bool = True  # False: a step of --ablation-steps without the exchange of gradients
    images_per_second: float  # of all ranks

    @property
    def images(self) -> int:
        """Images of all ranks."""
        return round(self.images_per_second * self.seconds)


@dataclass(frozen=True, kw_only=True)
class EpochLine(MetricsLine):
    """A complete epoch's training."""

    seconds: float  # of its steps, evaluations and checkpoints left out
    images_per_second: float


@dataclass(frozen=True, kw_only=True)
class EvalLine(MetricsLine):
    """An evaluation of all validation images."""

    num_images: int
    seconds: float
    train_seconds_so_far: float  # the training clock, see Summary.total_seconds
    weights: str = "model"  # whose: "model", or "ema", their moving average


@dataclass(frozen=True, kw_only=True)
class EventLine:
    """Something that happened: start, resume, stop, end."""

    name: str
    time_utc: str
    step: int
    resumed_from: str | None = None


METRICS = {"step": StepLine, "epoch": EpochLine, "eval": EvalLine, "event": EventLine}


@dataclass(frozen=True, kw_only=True)
class Phases:
    """Where the time of a step goes, recipe/training/phases.py says how: means over `steps`."""

    steps: int = 0
    step_seconds: float | None = None
    data_seconds: float | None = None
    forward_seconds: float | None = None
    backward_seconds: float | None = None  # with the exchange where that was not measured apart
    exposed_communication_seconds: float | None = None  # below 0 by noise alone
    optimizer_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Rank(Phases):
    """What one rank used, and its own phases."""

    rank: int
    host: str
    cpu_seconds: float
    peak_memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class Input:
    """What was read for training, over all ranks."""

    images_per_second: float | None = None
    files_per_second: float | None = None
    megabytes_per_second: float | None = None
    wait_share: float | None = None  # of the step's time, 0 to 1, spent waiting for images


@dataclass(frozen=True, kw_only=True)
class Energy:
    """By the counters of GPUs (watts and utilization: their mean) and processors."""

    gpu_joules_per_image: float | None = None
    gpu_watts: float | None = None
    gpu_utilization_percent: float | None = None
    cpu_joules_per_image: float | None = None


@dataclass(frozen=True, kw_only=True)
class SuspectImages:
    """Images that were read with a warning."""

    count: int  # one that two ranks have met counts twice
    names: list[str]


@dataclass(frozen=True, kw_only=True)
class RungFigures:
    """What a script in baselines/ measures of its own way of training."""

    optimizer_bytes: list[int] | None = None  # by rank: what it holds of the optimizer's state
    weight_bytes: list[int] | None = None  # and of the weights
    bubble_share: float | None = None  # of a step, 0 to 1: the mean stage of a pipeline has no work
    equal_bubble_share: float | None = None  # the same for equal stages, and messages in no time
    staleness: float | None = None  # updates since the weights that a gradient is of: the mean
    largest_staleness: int | None = None


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a complete run measured, of all its ranks."""

    engine: str
    launcher: str
    transport: str
    world_size: int
    threads: int
    epochs: float
    steps: int
    skipped_steps: int = 0  # of these: their gradients overflowed, so they changed no weight
    samples_seen: int
    images_per_second: float | None  # warm-up and evaluations left out; None: too few steps
    train_seconds: float  # of the steps since the last resume
    total_seconds: float  # the training clock: with evaluations, checkpoints and earlier sessions
    cpu_seconds: float  # since the last resume
    cpu_seconds_per_image: float | None
    peak_memory_bytes: int  # of the rank that used most
    phases: Phases = Phases()  # of rank 0
    ranks: list[Rank] = field(default_factory=list)
    input: Input = Input()
    energy: Energy = Energy()
    suspect_images: SuspectImages | None = None
    gradient_bytes: int | None = None  # of one worker, for a step, as they travel
    # What the hosts' interfaces sent on the training clock, the loopback's among them, and whoever
    # sent it; what ranks of one host tell each other through its memory is not there.
    network_bytes_per_step: float | None = None
    rung: RungFigures = RungFigures()
    loss: float | None  # of the last evaluation; None if nothing was evaluated
    top1: float | None
    top5: float | None
    best_top1: float | None
    weights_sha256: str
    fingerprint: dict[str, Any]  # what two runs must share to be compared
    ended_utc: str
