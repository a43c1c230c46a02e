"""Where the time of a step goes, and which phase accounts for a difference in speed."""

from dataclasses import dataclass

from compare.evidence.records import Comparison, RunRecord
from compare.evidence.rows import CellRow, place
from compare.evidence.verdicts import Verdict

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


@dataclass(frozen=True)
class PhaseRow(CellRow):
    """Where the time of a cell's step goes, on rank 0, in seconds.

    Of the cell's run with ablation if there is one, else of that measured run whose step is the
    median one: the phases of one run belong together, medians of each would not add up.
    """

    steps: int  # that were averaged
    step_seconds: float
    data_seconds: float
    forward_seconds: float
    backward_seconds: float  # holds the exchange of gradients where that was not measured apart
    exposed_communication_seconds: float | None  # None: not measured; below 0 by noise alone
    optimizer_seconds: float

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
    def shares(self) -> dict[str, float]:
        """Each phase's share of the step, 0 to 1."""
        return {words: seconds / self.step_seconds for words, seconds in self.parts.items()}

    @property
    def note(self) -> str:
        """Say it if the phases do not add up to the step; empty if they do, within 2 %."""
        whole = sum(self.shares.values())
        if abs(whole - 1) <= PHASE_TOLERANCE:
            return ""
        return f"the phases add up to {100 * whole:.1f} % of the step"


def phase_rows(comparison: Comparison) -> list[PhaseRow]:
    """Return the phases of each cell in which they were measured, in the table's order."""
    rows = []
    for cell in comparison.cells:
        ablated = [run for run in comparison.complete_phase_runs(cell) if has_phases(run)]
        runs = ablated or [run for run in comparison.complete_runs(cell) if has_phases(run)]
        if runs:
            runs.sort(key=lambda run: run.summary.phases.step_seconds or 0.0)
            median_run = runs[(len(runs) - 1) // 2]
            rows.append(PhaseRow(**place(comparison, cell), **vars(median_run.summary.phases)))
    return rows


def has_phases(run: RunRecord) -> bool:
    """Tell whether a run measured its phases; exposed communication may be missing."""
    needed = PHASES.keys() - {"exposed_communication_seconds"} | {"step_seconds"}
    return all(getattr(run.summary.phases, field) is not None for field in needed)


def explain(verdict: Verdict, comparison: Comparison) -> str:
    """Say which phase accounts for most of a difference that was shown, or why that is not known;
    empty when no difference was shown."""
    if verdict.speed is None or verdict.is_null_test or verdict.is_interaction:
        return ""
    if verdict.decision not in ("faster", "slower"):
        return ""
    rows = {
        row.configuration: row
        for row in phase_rows(comparison)
        if (row.case, row.workers) == (verdict.case, verdict.workers)
    }
    slow, fast = verdict.second, verdict.first
    if verdict.speed.ratio < 1:
        slow, fast = fast, slow
    if slow not in rows or fast not in rows:
        return "Where the difference comes from is not known: the phases were not measured."
    sizes = {
        run.summary.samples_seen / run.summary.steps
        for name in (slow, fast)
        for run in comparison.complete_runs((verdict.case, verdict.workers, name))
    }
    if len(sizes) > 1:
        return (
            "Where the difference comes from is not shown: the two have different numbers of "
            "images per step, so their phases cannot be compared."
        )
    return where_from(rows[slow], rows[fast])


def where_from(slow: PhaseRow, fast: PhaseRow) -> str:
    """Say which phases of the slow one's step are longer, the one that accounts for most first."""
    told = (
        f"a step of {slow.label} took {1000 * slow.step_seconds:.1f} ms, "
        f"of {fast.label} {1000 * fast.step_seconds:.1f} ms"
    )
    longer = slow.step_seconds - fast.step_seconds
    if longer <= 0:
        return f"The runs that measured the phases do not show the difference: {told}."
    parts, other_parts = slow.parts, fast.parts
    if None in (slow.exposed_communication_seconds, fast.exposed_communication_seconds):
        parts, other_parts = with_exchange(slow), with_exchange(fast)
    gaps = {words: seconds - other_parts[words] for words, seconds in parts.items()}
    chief = max(gaps, key=lambda words: gaps[words])
    others = [
        f"{words} {1000 * abs(gap):.1f} ms {'more' if gap > 0 else 'less'}"
        for words, gap in gaps.items()
        if words != chief and abs(gap) >= longer / 5
    ]
    rest = f"; {', '.join(others)}" if others else ""
    share = gaps[chief] / longer
    share_text = f"{100 * share:.0f} %" if share <= 1 else "more than all of it"
    return (
        f"Where it comes from: {told}. Of these {1000 * longer:.1f} ms, {chief} accounts for "
        f"{1000 * gaps[chief]:.1f} ms ({share_text}){rest}."
    )


def with_exchange(row: PhaseRow) -> dict[str, float]:
    """Return the phases with the exchange of gradients as part of backward, whether or not it was
    measured apart."""
    exposed = row.exposed_communication_seconds or 0.0
    return {
        "data": row.data_seconds,
        "forward": row.forward_seconds,
        "backward with the exchange of gradients": row.backward_seconds + exposed,
        "optimizer": row.optimizer_seconds,
    }
