"""What a reader must know before trusting the figures: runs that are in none of them, and what
disturbed the others."""

from compare.evidence import packed
from compare.evidence.load import most_load
from compare.evidence.records import Comparison
from compare.evidence.words import count, run_text


def troubles(comparison: Comparison) -> list[str]:
    """Return a line for every configuration that could not run, for every planned run that is in
    no figure, and for every earlier failure."""
    lines = [
        f"{name}: Horovod is not installed there; python horovod_train/build_horovod.py builds it"
        for name in comparison.plan["left_out"]
    ]
    for run in (*comparison.runs, *comparison.phase_runs):
        if run.is_complete:
            continue
        if run.reason:
            lines.append(f"{run_text(run)}: unreadable: {run.reason}")
            continue
        what = run.status
        if what == "failed" and run.exit_code is not None:
            what += f" with exit code {run.exit_code}"
        where = (
            "" if run.status == "not run" else f"; see {packed.file_of(run.folder / 'output.log')}"
        )
        lines.append(f"{run_text(run)}: {what}{where}")
    for (case, _), blocks in comparison.turns.items():
        for one in blocks:
            if one.reason:
                lines.append(
                    f"{', '.join(filter(None, ['turns', case]))}: unreadable: {one.reason}"
                )
    for folder in comparison.earlier_failures:
        lines.append(
            f"{folder.relative_to(comparison.folder)}: failed, and was run again; "
            f"see {packed.file_of(folder / 'output.log')}"
        )
    return lines


def load_warnings(comparison: Comparison) -> list[str]:
    """Return what may make the figures worthless: what run.py warned of before it began, and the
    runs during which other processes kept too many cores busy."""
    lines = list(comparison.plan["warnings"])
    for run in (*comparison.runs, *comparison.phase_runs):
        if not run.is_complete or run.other_load is None:
            continue
        cores = run.environment.cores
        if run.other_load > most_load(cores):
            lines.append(
                f"{run_text(run)}: other processes kept {run.other_load:.1f} of "
                f"{count(cores, 'core')} busy"
            )
    return lines
