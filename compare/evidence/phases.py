"""Where the time of a step goes, phase by phase, and in which phases two configurations differ."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from compare.evidence.records import Comparison, RunRecord
from compare.evidence.rows import CellRow, places
from compare.evidence.verdicts import DIFFERENT, Verdict
from recipe.record.schema import Phases

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
        runs = [r for r in comparison.complete_phase_runs(cell) if has_phases(r)] or whole
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
