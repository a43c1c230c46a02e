"""The records in a run folder's files: trainers write them, and compare/ reads them.

    config.json        Settings, and every other setting of recipe.settings.flags.Config
    environment.json   Environment
    metrics.jsonl      lines of METRICS, each with its "kind"
    summary.json       Summary

The name of a figure ends in its unit, if it has one; top1 and top5 are in percent. None (null in
JSON) means: not measured. A field with a default may be missing, since earlier trainers did not
write it. All other fields every trainer has written, so a reader may require them.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any

from msgspec import Meta

from recipe.errors import CONTROL

PHASES = ("data", "forward", "backward", "optimizer")  # of a step: see `Phases`
# Steps after a start or a resume that do not count for throughput and phases: caches fill and
# kernels are chosen.
WARM_UP_STEPS = 5
FORMAT = 1  # to be raised when today's readers would misread the new records

# The values of fields, checked when a record is read. No measurement is infinite or NaN, or so
# large or small that a quotient of two would be. A plain float may be, if a training diverged.
Finite = Annotated[float, Meta(gt=-1e18, lt=1e18)]
Amount = Annotated[float, Meta(ge=0, lt=1e18)]
Positive = Annotated[float, Meta(ge=1e-18, lt=1e18)]
Whole = Annotated[int, Meta(ge=0, le=2**62)]
Count = Annotated[int, Meta(ge=1, le=2**62)]
Text = Annotated[str, Meta(pattern=f"^[^{CONTROL}]*$")]


def rate_text(per_second: float) -> str:
    """Print a rate, such as images per second: whole, or with two digits if it is below 10."""
    return f"{per_second:#.2g}" if per_second < 9.95 else f"{per_second:,.0f}"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings in config.json that are read by name; `flags` holds all, by Config's names."""

    log_dir: Text
    name: Text | None  # None: the name was made of time and engine
    data: Text | None = None
    train_dir: Text | None = None
    arch: Text | None = None
    batch_size: Whole | None = None  # images of one worker in one backward pass
    batch_size_warmup_epochs: Whole = 0
    batches_per_allreduce: Count = 1
    precision: Text | None = None
    seed: int | None = None
    wire_format: Text | None = None
    bucket_cap_mb: Amount | None = None
    first_bucket_mb: Amount | None = None
    profile_steps: Whole | None = None
    flags: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What a run ran on, as rank 0 found it, and where its other ranks were."""

    format: Annotated[int, Meta(ge=0, le=FORMAT)] = 0  # FORMAT of its writer; 0: not yet recorded
    engine: Text  # "horovod" or "ddp"
    version: Text  # of the engine
    launcher: Text
    transport: Text  # what really carried the gradients: "MPI", "Gloo", "NCCL"
    world_size: Count
    local_size: Count  # ranks on this host
    hosts: list[Text]
    rank_hosts: list[Text] | None = None  # by rank
    device: Text  # "cpu" or "cuda"
    device_name: Text
    ranks_per_gpu: Count | None = None  # on the GPU that most ranks share; None: none is shared
    cpu_model: Text
    cores: Whole  # of the host
    threads: Whole  # of each rank
    affinity: list[Text] | None = None  # by rank, the cores that it may use, as "0-3,8"
    allocator: Text | None = None
    variables: dict[str, str] = field(default_factory=dict)  # that steer an engine
    python: Text
    torch: Text
    torchvision: Text
    horovod: Text | None  # None if it is not used; likewise mpi and cuda
    mpi: Text | None
    cuda: Text | None
    nccl: Text | None = None  # None if it does not carry the gradients
    driver: Text | None = None  # of the GPU
    gpu_clock_mhz: Amount | None = None  # of its multiprocessors, as the run began
    gpu_clock_limit_mhz: Amount | None = None  # the clock that is set, or else the highest
    kernel: Text | None = None
    cpu_quota_cores: Amount | None = None  # granted by the control group; None: no limit
    command: list[Text]
    started_utc: Text
    git_commit: Text | None  # with a + if files were changed since; None outside a checkout
    # Of a user's own script, whose git_commit is that of its own repository.
    interpreter: Text | None = None
    script: Text | None = None
    script_sha256: Text | None = None
    code_sha256: Text | None = None  # of all loaded modules from the script's work tree


@dataclass(frozen=True, kw_only=True)
class MetricsLine:
    """Metrics over images, and how far training had come."""

    epoch: Whole  # from 0; for a step, the epoch in which it began
    step: Whole  # from 1
    samples_seen: Whole  # by all ranks, including this step
    loss: float
    top1: float
    top5: float


@dataclass(frozen=True, kw_only=True)
class StepLine(MetricsLine):
    """A step: metrics over all ranks' images, durations of rank 0."""

    learning_rate: float
    seconds: Positive
    data_seconds: Amount
    forward_seconds: Amount | None = None
    backward_seconds: Amount | None = None
    optimizer_seconds: Amount | None = None
    images_per_second: Positive  # of all ranks

    @property
    def images(self) -> int:
        """Images of all ranks."""
        return round(self.images_per_second * self.seconds)


@dataclass(frozen=True, kw_only=True)
class EpochLine(MetricsLine):
    """A complete epoch's training."""

    seconds: Positive  # of its steps, evaluations and checkpoints left out
    images_per_second: Positive


@dataclass(frozen=True, kw_only=True)
class EvalLine(MetricsLine):
    """An evaluation of all validation images."""

    num_images: Whole
    seconds: Amount
    train_seconds_so_far: Amount  # Summary.total_seconds at its end
    weights: Text = "model"  # whose: "model", or "ema", their moving average


@dataclass(frozen=True, kw_only=True)
class EventLine:
    """An event: start, resume, stop, end, diverged, rollback, or replaced (for a bad image)."""

    name: Text
    time_utc: Text
    step: Whole
    resumed_from: Text | None = None
    # Of each left-out step: where it begins, in samples, and its images.
    left_out: list[tuple[Whole, Whole]] = field(default_factory=list)
    image: str | None = None  # the bad image's name on rank 0
    reason: str | None = None  # why it is bad; for a resume, which steps have no figures


METRICS = {"step": StepLine, "epoch": EpochLine, "eval": EvalLine, "event": EventLine}


@dataclass(frozen=True, kw_only=True)
class Phases:
    """Where the time of a step goes: means over `steps`.

    Each phase begins where the last one ends, so the phases always add up to the step:

        data       until the batch is on the device, normalised: waiting for the loader, the copy
        forward    network, loss and its metrics
        backward   until the gradients are ready, averaged over the ranks: their computation, and
                   the part of their exchange that does not overlap with it
        optimizer  the rest: unscaling, clipping, the update, the moving average

    No clock in the trainer shows how much of `backward` is exposed communication, since the
    exchange runs beside the computation and slows it. compare/run.py measures it with turns in
    which the same gradients are computed but not exchanged. The difference in `backward` is what
    the exchange costs a step: waiting for messages and for slower ranks, copies into buffers, and
    cores or memory taken from the computation.
    """

    steps: Whole = 0
    step_seconds: Amount | None = None
    data_seconds: Amount | None = None
    forward_seconds: Amount | None = None
    backward_seconds: Amount | None = None  # including exposed communication
    exposed_communication_seconds: Finite | None = None  # in older records only
    optimizer_seconds: Amount | None = None


@dataclass(frozen=True, kw_only=True)
class RankUsage(Phases):
    """What one rank used, and its phases."""

    rank: Whole
    host: Text
    cpu_seconds: Amount
    peak_memory_bytes: Whole


@dataclass(frozen=True, kw_only=True)
class Input:
    """What was read for training, over all ranks."""

    images_per_second: Amount | None = None
    files_per_second: Amount | None = None
    megabytes_per_second: Amount | None = None
    wait_share: Amount | None = None  # of the step's time, 0 to 1, spent waiting for images


@dataclass(frozen=True, kw_only=True)
class Energy:
    """Energy by the counters of GPUs and processors; watts and utilization are the ranks' means."""

    gpu_joules_per_image: Amount | None = None
    gpu_watts: Amount | None = None
    gpu_utilization_percent: Amount | None = None
    cpu_joules_per_image: Amount | None = None


@dataclass(frozen=True, kw_only=True)
class SuspectImages:
    """Images that were read with a warning."""

    count: Whole  # an image that two ranks have read counts twice
    names: list[str]


@dataclass(frozen=True, kw_only=True)
class RungFigures:
    """What a script in baselines/ measures of its own way of training."""

    optimizer_bytes: list[Whole] | None = None  # each rank's part of the optimizer's state
    weight_bytes: list[Whole] | None = None  # each rank's part of the weights
    bubble_share: Amount | None = None  # of a step, 0 to 1, in which a mean pipeline stage is idle
    equal_bubble_share: Amount | None = None  # the same, for equal stages and instant messages
    staleness: Amount | None = None  # mean number of updates since a gradient's weights
    largest_staleness: Whole | None = None


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a complete run measured, over all its ranks."""

    engine: Text
    launcher: Text
    transport: Text
    world_size: Count
    threads: Whole
    epochs: Positive
    steps: Count
    skipped_steps: Whole = 0  # of these: their gradients overflowed, so they changed no weight
    samples_seen: Count
    images_per_second: Positive | None  # without warm-up and evaluations; None: too few steps
    # The same by wall-clock time: including what lies between steps, such as writing the record.
    wall_images_per_second: Positive | None = None
    train_seconds: Positive  # of the steps since the last resume
    total_seconds: Amount  # the training clock: with evaluations, checkpoints and earlier sessions
    cpu_seconds: Amount  # since the last resume
    cpu_seconds_per_image: Positive | None
    peak_memory_bytes: Count  # of the rank that used most
    phases: Phases = Phases()  # of rank 0
    ranks: list[RankUsage] = field(default_factory=list)
    input: Input = Input()
    energy: Energy = Energy()
    suspect_images: SuspectImages | None = None
    replaced_images: Whole = 0  # bad images that were replaced by others since the last resume
    gradient_bytes: Whole | None = None  # of one worker's gradients on the wire, in a step
    # What the hosts' network interfaces, including the loopback, sent during training, by any
    # process. Messages through a host's shared memory are not included.
    network_bytes_per_step: Amount | None = None
    rung: RungFigures = RungFigures()
    loss: float | None  # of the last evaluation; None if nothing was evaluated
    top1: float | None
    top5: float | None
    best_top1: float | None
    weights_sha256: Text
    fingerprint: dict[str, Any]  # what two runs must share to be compared
    ended_utc: Text
