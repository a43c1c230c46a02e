"""What a reader must know before trusting the figures: runs that are in none of them, and what
disturbed the others."""

from compare.evidence import packed
from compare.evidence.records import Comparison, RunRecord
from compare.evidence.stopping import group_of, unfinished
from compare.evidence.words import count, place_text

WARNINGS = "Warnings: these figures may be unreliable"
MISSING = "Not in these figures"
WITHOUT_HOROVOD = "Horovod is not installed there; python horovod_train/build_horovod.py builds it"
WITHOUT_MPI = "mpi4py or mpirun is not installed there"
MOST_LOAD = 0.1  # that others may keep busy of the cores during a run whose figures are not doubted
ASIDE = "Runs that do not affect the speed verdicts"


def notices(comparison: Comparison) -> list[tuple[str, list[str]]]:
    """Return the headed lists of what a reader must know beside the figures; what touches no
    verdict on speed stands apart."""
    judged = {name for pair in comparison.plan.pairs() for name in pair}
    found: dict[str, list[str]] = {WARNINGS: [*comparison.plan.warnings], MISSING: [], ASIDE: []}
    damaged = {(case, workers) for case, workers, _ in comparison.damaged_blocks}
    found[WARNINGS] += [
        f"{place_text(*place)}: nothing is decided, since part of the record cannot be read"
        if place in damaged
        else f"{place_text(*place)}: the measurement is not finished, so nothing is decided; the "
        f"same command of run.py continues it: {so_far}"
        for place, so_far in unfinished(comparison).items()
    ]
    num_estimates = len(comparison.plan.pairs()) * len(comparison.plan.groups())
    found[WARNINGS] += [
        f"{place_text(*place)}, {first} / {second}: each block's ratio resembles the one before "
        f"(lag-1 correlation {lag:.2f}); its interval takes them as independent, and is too narrow"
        for place in comparison.plan.groups()
        for (first, second), one in group_of(
            comparison.plan, *place, comparison.blocks(*place), comparison.confidence
        ).estimates.items()
        for lag, p_value in [one.serial_correlation()]
        if p_value < 0.01 / num_estimates  # 1 %, in all of them together
    ]
    found[MISSING] += [
        f"{name}: {WITHOUT_HOROVOD if 'horovod' in name else WITHOUT_MPI}"
        for name in comparison.plan.left_out
    ]
    for run in comparison.runs:
        folder = run.folder.relative_to(comparison.folder)
        matters = not comparison.is_by_turns and run.block > 0 and run.configuration in judged
        if run.reason or not run.is_complete:
            found[MISSING if matters else ASIDE].append(f"{folder}: {trouble(run)}")
        elif (run.other_load or 0) > MOST_LOAD * (cores := run.environment.cores):
            found[WARNINGS if matters else ASIDE].append(
                f"{folder}: other processes kept {run.other_load:.1f} of "
                f"{count(cores, 'core')} busy"
            )
    found[MISSING] += dict.fromkeys(f"unreadable: {why}" for *_, why in comparison.damaged_blocks)
    found[WARNINGS] += [
        f"turns, {place_text(*place)}, block {block.number}: others kept up to "
        f"{block.other_load:.2f} cores busy in the rounds that count"
        for place, blocks in comparison.turns.items()
        for block in blocks
        if block.other_load > block.quiet_cores
    ]
    found[ASIDE] += [
        f"{folder.relative_to(comparison.folder)}: failed, and was run again; "
        f"see {packed.file_of(folder / 'output.log')}"
        for folder in comparison.earlier_failures
    ]
    return [(title, lines) for title, lines in found.items() if lines]


def trouble(run: RunRecord) -> str:
    """Say what became of a run that is not complete."""
    if run.reason:
        return f"unreadable: {run.reason}"
    if run.status == "not run":
        return run.status
    code = "" if run.exit_code is None else f" with exit code {run.exit_code}"
    return f"{run.status}{code}; see {packed.file_of(run.folder / 'output.log')}"
