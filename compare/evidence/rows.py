"""The rows of the report's tables: a line for each cell that was measured."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from compare.evidence.paired import Estimate, estimate_ratio
from compare.evidence.records import CellKey, Comparison, RunRecord
from compare.evidence.turns import throughput, work_per_cpu_second
from compare.evidence.verdicts import DIFFERENT, Verdict
from compare.evidence.words import label_of
from recipe.record.schema import Energy, Input, Phases

EPOCHS, IMAGES = 90, 1_281_167  # of ImageNet (Russakovsky et al., IJCV 115, 2015, table 2)
BLOCKS_IN_DETAIL = 8  # whose single steps and epochs are read: of hundreds nobody sees more


@dataclass(frozen=True, kw_only=True)
class CellRow:
    """A line of a table; a figure in it that is None was not measured."""

    case: str
    workers: int
    configuration: str
    label: str


@dataclass(frozen=True, kw_only=True)
class SpeedRow(CellRow):
    """How fast a cell trained: by turns, or in whole runs, as the plan measures."""

    images_per_second: float  # median of the blocks
    lowest: float
    highest: float
    scaling: Estimate | None  # images/s a worker over that at the fewest workers, block by block
    cpu_ms_per_image: float  # median
    blocks: int
    planned_blocks: int | None  # None: as many as it takes


@dataclass(frozen=True, kw_only=True)
class TrainingRow(Energy, Input, CellRow):
    """What whole trainings of a cell show, used and read: medians over its complete runs."""

    startup_seconds: float | None  # and the end: all that is not on the training clock
    train_seconds: float
    evaluation_seconds: float  # with checkpoints
    top1: float | None
    top5: float | None
    loss: float | None
    weights: str  # are the final weights those of the other configurations?
    runs: int
    planned_runs: int
    peak_memory: Estimate  # bytes of the largest rank
    straggler_ratio: float | None  # slowest rank's computing time a step over the median rank's
    straggler_phases: str  # what that time is of: "forward and backward" or "data and forward"
    engine: str
    network_bytes_per_step: float | None
    bubble_share: float | None  # of a pipeline
    staleness: float | None  # of a parameter server, in updates
    # Bit-equal to those of the plan's first configuration in each block? None: a block lacks that.
    has_firsts_weights: bool | None


@dataclass(frozen=True, kw_only=True)
class StepRow(CellRow):
    """How long the single steps of a cell's runs took, in milliseconds."""

    steps: int
    median: float
    p95: float
    p99: float
    longest: float


@dataclass(frozen=True)
class Speed:
    """What one block measured of a cell."""

    images_per_second: float
    cpu_seconds_per_image: float


def speeds(comparison: Comparison, cell: CellKey) -> dict[int, Speed]:
    """Return what each block measured of a cell."""
    case, workers, name = cell
    return {
        block.number: Speed(
            block.median(name, throughput), 1 / block.median(name, work_per_cpu_second)
        )
        for block in comparison.blocks(case, workers)
        if name in block.order
    }


def places(comparison: Comparison) -> Iterator[tuple[CellKey, dict[str, Any]]]:
    """Yield each cell in the tables' order, and the fields of its CellRow."""
    labels = {name: label_of(comparison, name) for name in comparison.configurations}
    for cell in comparison.cells:
        case, workers, name = cell
        yield (
            cell,
            {"case": case, "workers": workers, "configuration": name, "label": labels[name]},
        )


def speed_rows(comparison: Comparison) -> list[SpeedRow]:
    """Return the speed of each cell."""
    found = {cell: speeds(comparison, cell) for cell in comparison.cells}
    fewest = min(comparison.workers)
    rows = []
    for cell, place in places(comparison):
        if not (own := found[cell]):
            continue
        rates = [speed.images_per_second for speed in own.values()]
        base = found.get((cell[0], fewest, cell[2]), {}) if cell[1] > fewest else {}
        common = [block for block in own if block in base]
        planned = sum(run.cell == cell for run in comparison.runs)
        rows.append(
            SpeedRow(
                **place,
                images_per_second=median(rates),
                lowest=min(rates),
                highest=max(rates),
                scaling=estimate_ratio(
                    [own[block].images_per_second / cell[1] for block in common],
                    [base[block].images_per_second / fewest for block in common],
                    confidence=comparison.confidence,
                )
                if common
                else None,
                cpu_ms_per_image=1000 * median(s.cpu_seconds_per_image for s in own.values()),
                blocks=len(own),
                planned_blocks=comparison.plan.blocks if comparison.is_by_turns else planned,
            )
        )
    return rows


def hours(images_per_second: float) -> float:
    """Return how long 90 epochs of ImageNet take at a speed."""
    return EPOCHS * IMAGES / images_per_second / 3600


def training_rows(comparison: Comparison) -> list[TrainingRow]:
    """Return what the whole trainings of each cell show."""
    digests: dict[tuple[int, str, int], dict[str, str]] = {}
    for run in comparison.complete:
        group = digests.setdefault((run.block, run.case, run.workers), {})
        group[run.configuration] = run.summary.weights_sha256
    rows = []
    for cell, place in places(comparison):
        if not (runs := comparison.complete_runs(cell)):
            continue
        measured = [figures_of(run) for run in runs]
        groups = [digests[run.block, run.case, run.workers] for run in runs]
        equal = [len(set(group.values())) == 1 for group in groups if len(group) > 1]
        weights = "equal" if all(equal) else f"{sum(equal)} of {len(equal)} equal"
        firsts = [group.get(next(iter(comparison.configurations))) for group in groups]
        memory = [float(run.summary.peak_memory_bytes) for run in runs]
        ratio, phases = straggler(comparison.complete_runs(cell, of_phases=True), runs)
        medians = {name: median_or_none([one[name] for one in measured]) for name in measured[0]}
        own = [run.summary.weights_sha256 for run in runs]
        rows.append(
            TrainingRow(
                **place,
                **medians,  # type: ignore[arg-type]  # None only where that may be
                weights=weights if equal else "–",
                runs=len(runs),
                planned_runs=sum(run.cell == cell for run in comparison.runs),
                peak_memory=estimate_ratio(
                    memory, [1.0] * len(memory), confidence=comparison.confidence
                ),
                straggler_ratio=ratio,
                straggler_phases=phases,
                engine=runs[0].engine,
                has_firsts_weights=None if None in firsts else firsts == own,
            )
        )
    return rows


def figures_of(run: RunRecord) -> dict[str, float | None]:
    """Return what the table of trainings shows the median of, by the names of its row."""
    summary = run.summary
    seconds = run.seconds  # None of one that was started by hand
    return {
        "startup_seconds": None if seconds is None else seconds - summary.total_seconds,
        "train_seconds": summary.train_seconds,
        "evaluation_seconds": summary.total_seconds - summary.train_seconds,
        "top1": summary.top1,
        "top5": summary.top5,
        "loss": summary.loss,
        "network_bytes_per_step": summary.network_bytes_per_step,
        "bubble_share": summary.rung.bubble_share,
        "staleness": summary.rung.staleness,
        **vars(summary.input),
        **vars(summary.energy),
    }


def straggler(
    phase_runs: Sequence[RunRecord], runs: Sequence[RunRecord]
) -> tuple[float | None, str]:
    """Return how much longer than the median rank the slowest one computes, and in which phases;
    None for a single rank, and where the ranks' phases were not measured.

    Without ablation the backward of a rank says nothing of its own speed: in it the fast ranks
    wait for the slow.
    """
    ablated = [
        run
        for run in phase_runs
        if all(rank.exposed_communication_seconds is not None for rank in run.summary.ranks)
    ]

    def ratio(run: RunRecord, fields: tuple[str, str]) -> float | None:
        times = [[getattr(rank, field) for field in fields] for rank in run.summary.ranks]
        if len(times) < 2 or any(None in time for time in times):
            return None
        seconds = [sum(time) for time in times]
        return max(seconds) / median(seconds) if median(seconds) > 0 else None

    found = median_or_none([ratio(r, ("forward_seconds", "backward_seconds")) for r in ablated])
    if found is not None:
        return found, "forward and backward"
    own = median_or_none([ratio(run, ("data_seconds", "forward_seconds")) for run in runs])
    return own, "data and forward"


def step_rows(comparison: Comparison) -> list[StepRow]:
    """Return how long the steps of each cell took, over all steps of its runs `in_detail`."""
    rows = []
    for cell, place in places(comparison):
        runs = in_detail(comparison.complete_runs(cell))
        if times := sorted(1000 * line.seconds for run in runs for line in run.steps):
            n = len(times)
            half, p95, p99 = (times[min(int(part * n), n - 1)] for part in (0.5, 0.95, 0.99))
            rows.append(StepRow(**place, steps=n, median=half, p95=p95, p99=p99, longest=times[-1]))
    return rows


def in_detail(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Return the runs whose single steps and epochs are shown: of some blocks, evenly chosen."""
    blocks = sorted({run.block for run in runs})
    chosen = set(blocks[:: -(-len(blocks) // BLOCKS_IN_DETAIL) or 1])
    return [run for run in runs if run.block in chosen]


def median_or_none(values: Sequence[float | None]) -> float | None:
    """Return the median; None if there is no value, or one was not measured."""
    known = [value for value in values if value is not None]
    return median(known) if known and len(known) == len(values) else None


# ------------------------------------------------------------------------------------- the phases

# A step's phases: the field of PhaseRow and of summary.json's `phases`, and the words for it.
PHASES = {
    "data_seconds": "data",
    "forward_seconds": "forward",
    "backward_seconds": "backward",
    "exposed_communication_seconds": "exposed communication",
    "optimizer_seconds": "optimizer",
}
# What leaving the exchange out shows with one worker, who has nobody to exchange gradients with.
ALONE = {"exposed_communication_seconds": "the engine's own work"}
PHASE_TOLERANCE = 0.02  # the phases must add up to the step within so much of it


@dataclass(frozen=True, kw_only=True)
class PhaseRow(Phases, CellRow):
    """Where the time of a cell's step goes, on rank 0, in seconds.

    Of the cell's run with ablation if there is one, else of that measured run whose step is the
    median one: the phases of one run belong together, medians of each would not add up.
    """

    step_seconds: float
    images_per_step: float
    gradient_bytes: int | None = None  # of a worker, a step, as they travel
    is_difference: bool = False  # of two cells: the first's seconds less the second's

    @property
    def words(self) -> dict[str, str]:
        """The words for each phase by its field."""
        return PHASES | ALONE if self.workers == 1 else PHASES

    @property
    def parts(self) -> dict[str, float]:
        """The seconds of each phase by its words, without those that were not measured."""
        parts = {words: getattr(self, field) for field, words in self.words.items()}
        return {words: seconds for words, seconds in parts.items() if seconds is not None}

    @property
    def note(self) -> str:
        """Say it if the phases do not add up to the step; empty if they do, within 2 %."""
        whole = sum(self.parts.values()) / self.step_seconds
        if abs(whole - 1) <= PHASE_TOLERANCE:
            return ""
        return f"the phases add up to {100 * whole:.1f} % of the step"

    @property
    def sent_bytes(self) -> float | None:
        """What each worker sends in a step if its all-reduce is a ring (the factor of nccl-tests,
        doc/PERFORMANCE.md); None if there is nobody to send to, or it was not recorded."""
        if self.gradient_bytes is None or self.workers == 1:
            return None
        return 2 * (self.workers - 1) / self.workers * self.gradient_bytes

    @property
    def exposed_bandwidth(self) -> float | None:
        """What was sent over the exposed time, bytes/s: no link was faster, since what overlaps
        with the backward pass took time as well."""
        exposed = self.exposed_communication_seconds
        if self.sent_bytes is None or exposed is None or exposed <= 0:
            return None
        return self.sent_bytes / exposed


def phase_rows(comparison: Comparison) -> list[PhaseRow]:
    """Return the phases of each cell in which they were measured, in the table's order."""
    rows = []
    for cell, place in places(comparison):
        whole = [run for run in comparison.complete_runs(cell) if has_phases(run)]
        runs = [r for r in comparison.complete_runs(cell, of_phases=True) if has_phases(r)] or whole
        if runs:
            runs.sort(key=lambda run: run.summary.phases.step_seconds or 0.0)
            summary = runs[(len(runs) - 1) // 2].summary
            rows.append(
                PhaseRow(
                    **place,
                    **vars(summary.phases),
                    images_per_step=summary.samples_seen / summary.steps,
                    gradient_bytes=summary.gradient_bytes,
                )
            )
    return rows


def has_phases(run: RunRecord) -> bool:
    """Tell whether a run measured its phases; exposed communication may be missing."""
    needed = PHASES.keys() - {"exposed_communication_seconds"} | {"step_seconds"}
    return all(getattr(run.summary.phases, field) is not None for field in needed)


def phase_differences(rows: Sequence[PhaseRow], verdicts: Iterable[Verdict]) -> list[PhaseRow]:
    """Return, for each verdict that shows a difference, in which phases it is: first less second,
    as the verdicts' ratios are first over second. Steps of different size are not compared."""
    found = {(row.case, row.workers, row.configuration): row for row in rows}
    differences = []
    for verdict in verdicts:
        first = found.get((verdict.case, verdict.workers, verdict.first))
        second = found.get((verdict.case, verdict.workers, verdict.second))
        if verdict.is_null_test or verdict.decision not in DIFFERENT:
            continue
        if first and second and first.images_per_step == second.images_per_step:
            differences.append(subtract_phases(first, second))
    return differences


def subtract_phases(first: PhaseRow, second: PhaseRow) -> PhaseRow:
    """Return one row's seconds less another's; where one of them did not measure the exchange
    apart, it is part of backward in both."""
    own, other = ({name: getattr(row, name) for name in ("step_seconds", *PHASES)}
                  for row in (first, second))  # fmt: skip
    exposed, backward = "exposed_communication_seconds", "backward_seconds"
    if None in (own[exposed], other[exposed]):
        for seconds in (own, other):
            seconds[backward] += seconds[exposed] or 0.0
            seconds[exposed] = None
    return replace(
        first,
        configuration=f"{first.configuration} − {second.configuration}",
        label=f"{first.label} − {second.label}",
        steps=min(first.steps, second.steps),
        gradient_bytes=None,
        is_difference=True,
        **{name: None if own[name] is None else own[name] - other[name] for name in own},  # type: ignore[arg-type]
    )
