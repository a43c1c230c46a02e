"""Carry out a plan in its folder: keep its plan.json, make the missing runs, and add blocks until
the plan's end rule is met.

Estimates and decisions come from the functions that the report uses (compare/evidence), so both
always agree.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import mean

from msgspec.structs import replace

from compare.evidence.chain import read_sealed, sealed
from compare.evidence.paired import MIN_BLOCKS, confidence_after
from compare.evidence.reading import (
    TimedSummary,
    blocks_of_runs,
    parse_block,
    read_object,
    read_outcome,
    read_record,
)
from compare.evidence.stopping import (
    Group,
    estimates_of,
    group_of,
    is_enough,
    next_group,
    reason_to_end,
)
from compare.evidence.turns import Block
from compare.evidence.words import count, percent_text, place_text, ratio_text
from compare.plan.plan import Outcome, Plan, Run, percentage, turns_place
from compare.plan.plan_file import (
    PlanRecord,
    plan_differences,
    plan_record,
    read_plan,
    sources_sha256,
    write_plan,
)
from compare.running.launch import (
    TAIL_INDENT,
    duration,
    last_step,
    print_line,
    print_live,
    shown_tail,
    start_and_wait,
    utc_now,
)
from compare.running.scheduler import run_block
from recipe.errors import UserError
from recipe.files import write_json
from recipe.record.schema import Summary, rate_text

REACH_QUESTION = (
    "do its workers reach each other? `python compare/doctor.py --hosts ...` tests the networks"
)


def resumed(plan: Plan, folder: Path) -> Plan:
    """Return the plan with the values that this folder has fixed: the seed of the order, and the
    number of blocks of whole runs begun."""
    path = folder / "plan.json"
    if not path.exists():
        return plan
    old = read_plan(path)
    order_seed = old.order_seed if plan.order_seed is None else plan.order_seed
    return replace(plan, order_seed=order_seed, blocks_there=old.blocks_there)


def checked_record(plan: Plan, folder: Path) -> PlanRecord:
    """Return the new content of plan.json. UserError if the folder holds another plan, or more
    blocks than this one has. Date and warnings stay those of the first start."""
    path, record = folder / "plan.json", plan_record(plan, utc_now())
    if not path.exists():
        if any(child.name != "lock" for child in folder.iterdir()):
            raise UserError(
                f"{folder} is not empty and has no plan.json, so it is no comparison; give another "
                "--out DIR"
            )
        return record
    old = read_plan(path)
    differences = plan_differences(old, record)
    there, asked = old.blocks_there, plan.run_blocks
    if plan.measure == "turns" and plan.blocks is not None:
        there, asked = max(group.blocks for group in measured(plan, folder)), plan.blocks
    if there > asked:
        differences.append(f"blocks: {there} there, {asked} now")
    may_be_earlier = any(now < then for now, then in zip(plan.end, old.end, strict=True))
    if may_be_earlier and not is_finished(old, folder):
        then, now = (
            f"+-{percentage(one.until_interval)} or {one.minutes:g} minutes"
            if one.blocks is None
            else count(one.blocks, "block")
            for one in (old, plan)
        )
        differences.append(
            f"the end: {then} there, {now} now. The new end may come earlier; stopping when the "
            "figures look good finds differences that do not exist"
        )
    if differences:
        lines = "\n".join(f"    {line}" for line in differences)
        raise UserError(
            f"{folder} holds another plan:\n{lines}\ncontinue with that plan's flags, or give "
            "another --out DIR"
        )
    later = record.ends if old.end != plan.end else ()
    return replace(
        record, created_utc=old.created_utc, warnings=old.warnings, ends=(*old.ends, *later)
    )


def check_sources(plan: Plan, folder: Path) -> None:
    """Raise UserError if the measured sources have changed since the comparison began."""
    if sources_sha256(plan) != read_plan(folder / "plan.json").trainers_sha256:
        what = "the scripts" if plan.side else "the sources of the recipe or the trainers"
        raise UserError(
            f"{what} have changed since the comparison began, so new runs would be of another "
            "training. Restore them and run the same command, or start anew with --new"
        )


def measure(plan: Plan, folder: Path) -> tuple[Plan, list[Run]]:
    """Measure blocks until the end rule is met; each is written when it is done. Return the plan as
    it was carried out, and the whole runs that failed. MeasurementError if a side fails in turns.
    """
    groups = measured(plan, folder)
    while not (reason := reason_to_end(plan, groups)):
        check_sources(plan, folder)
        if plan.measure == "turns":
            measure_block(plan, folder, groups)
        else:
            plan = replace(plan, blocks_there=plan.run_blocks + 1)
            write_plan(folder / "plan.json", checked_record(plan, folder))
            if failed := make_missing(plan.runs(), plan, folder):
                return plan, failed
        before, groups = groups, measured(plan, folder)
        for old, new in zip(before, groups, strict=True):
            if new.blocks > old.blocks:
                parts = [block_label(new, new.blocks), *ratio_texts(new), time_left(plan, groups)]
                print_line("   ".join(parts).rstrip())
    print_line(ending_text(plan, groups, reason))
    return plan, []


def is_complete(folder: Path) -> bool:
    """Return whether a run is complete: it ended well and was sealed."""
    return bool(read_outcome(folder).digest)


def missing(runs: Sequence[Run], folder: Path) -> list[Run]:
    """Return the runs that are not complete."""
    return [run for run in runs if not is_complete(folder / run.folder)]


def measured(plan: Plan, folder: Path) -> list[Group]:
    """Return the measurements in this folder so far, for each case and number of workers."""
    path, read = folder / "plan.json", read_turns if plan.measure == "turns" else read_runs
    extensions = len(read_plan(path).ends) - 1 if path.exists() else 0
    confidence = confidence_after(extensions)  # of the intervals, as in the report
    return [
        group_of(plan, case, workers, read(plan, folder, case, workers), confidence)
        for case, workers in plan.groups()
    ]


def block_folder(folder: Path, case: str, workers: int, number: int) -> Path:
    return folder / turns_place(case, workers) / f"block-{number}"


def read_turns(plan: Plan, folder: Path, case: str, workers: int) -> list[Block]:
    """Return the blocks of turns in the folder; UserError if their chain of digests is broken."""
    blocks, before = list[Block](), ""
    while (path := block_folder(folder, case, workers, len(blocks) + 1) / "block.json").exists():
        try:
            sealed_block = read_sealed(path, folder, before)
        except UserError as error:
            raise UserError(
                f"{error}; delete this block's folder and those of the later blocks, and give the "
                "same command to measure them anew"
            ) from None
        blocks.append(parse_block(sealed_block, path))
        before = sealed_block["digest"]
    return blocks


def read_runs(plan: Plan, folder: Path, case: str, workers: int) -> list[Block]:
    """Return the blocks of whole runs, from the runs that are complete."""
    complete = []
    for run in plan.runs():
        place = folder / run.folder
        if (run.case, run.workers) == (case, workers) and is_complete(place):
            summary, seconds = (
                read_record(place / "summary.json", TimedSummary),
                read_outcome(place).seconds,
            )
            complete.append((run.block, run.configuration.name, summary, seconds))
    return blocks_of_runs(complete)


def is_finished(plan: Plan, folder: Path) -> bool:
    """Return whether nothing of the plan remains to be run in this folder."""
    return not missing(plan.runs(), folder) and bool(reason_to_end(plan, measured(plan, folder)))


def measure_block(plan: Plan, folder: Path, groups: Sequence[Group]) -> None:
    """Measure the next block of turns; raises MeasurementError if a side fails."""
    group = next_group(plan, groups)
    number = group.blocks + 1
    so_far = [*ratio_texts(group), time_left(plan, groups)]
    place = block_folder(folder, group.case, group.workers, number)
    path = place.with_name(f"block-{number - 1}") / "block.json"
    before = read_object(path)["digest"] if path.exists() else ""
    label = block_label(group, number)
    run_block(
        plan.in_order(number, group.case, group.workers),
        plan,
        place,
        number,
        report=lambda text: print_live([f"{label}, {text}", *so_far]),
        seal=partial(sealed, comparison=folder, folder=place, before=before),
    )


def block_label(group: Group, number: int) -> str:
    return f"block {number}, {place_text(group.case, group.workers)}"


def ratio_texts(group: Group) -> list[str]:
    """Return a text with each pair's speed ratio so far; the widest interval comes first."""
    return [
        f"{first} / {second} {ratio_text(one)}"
        + (f" +-{percent_text(one.relative_half_width)}" if one.blocks >= MIN_BLOCKS else "")
        for (first, second), one in sorted(
            group.estimates.items(), key=lambda item: -item[1].relative_half_width
        )
    ]


def time_left(plan: Plan, groups: Sequence[Group]) -> str:
    """Return a text with the longest time that the remaining blocks may take; "" if unknown."""
    if not all(group.blocks for group in groups):
        return ""
    used = sum(group.seconds for group in groups)
    left = (
        60 * plan.minutes - used
        if plan.blocks is None
        else sum((plan.blocks - group.blocks) * group.block_seconds for group in groups)
    )
    # Assume the same share of disturbed time as so far.
    left *= 1 + sum(group.disturbed_seconds for group in groups) / used
    return f"up to {duration(left)} left" if left > 0 else ""


def ending_text(plan: Plan, groups: Sequence[Group], reason: str) -> str:
    """Return a text that says why the measuring has ended, and how long it took."""
    text = (
        f"{reason}: {duration(sum(group.seconds for group in groups))} of measuring, plus "
        f"{duration(sum(group.disturbed_seconds for group in groups))} in which other processes "
        "used the cores"
    )
    if plan.blocks is None and not is_enough(estimates_of(groups), plan):
        widest = max(one.relative_half_width for one in estimates_of(groups))
        text += (
            f"\nthe widest interval is +-{percent_text(widest)}: the same command with more "
            "--minutes narrows it"
        )
    return text


def make_missing(runs: list[Run], plan: Plan, folder: Path) -> list[Run]:
    """Start the runs that are not complete, one after the other; return those that failed."""
    failed = []
    for run in missing(runs, folder):
        check_sources(plan, folder)
        number = f"[{runs.index(run) + 1:{len(str(len(runs)))}}/{len(runs)}]"
        label = f"{number} block {run.block}  {run.cell}"
        outcome = start_and_wait(run, folder, plan.timeout, label)
        # From the mean time of the runs that have ended; 0 s means that a run was not started.
        done = [seconds for one in runs if (seconds := read_outcome(folder / one.folder).seconds)]
        left = mean(done) * len(missing(runs, folder)) if done else None
        show_outcome(label, run, folder / run.folder, outcome, left)
        if outcome.status != "completed":
            failed.append(run)
            continue
        path = folder / run.folder / "outcome.json"
        write_json(path, sealed(read_object(path), folder, path.parent))
    return failed


def show_outcome(label: str, run: Run, folder: Path, outcome: Outcome, left: float | None) -> None:
    """Print a run's result as a line, and the end of its output if it failed."""
    ending = f"{duration(outcome.seconds)}{f'   about {duration(left)} left' if left else ''}"
    if outcome.leftover_processes:
        ending += f"   killed leftover processes: {outcome.leftover_processes}"
    if outcome.status == "completed":
        speed = read_record(folder / "summary.json", Summary).images_per_second
        shown = f"   {rate_text(speed):>9} images/s" if speed is not None else ""
        print_line(f"{label}{shown}   {ending:>6}")
        return
    reason = f"exit code {outcome.exit_code}{'' if outcome.exit_code else ', but no summary.json'}"
    step = (last_step(folder / "metrics.jsonl") or {"step": 0})["step"]
    if outcome.status == "timed out":
        reason = f"at step {step:,}: give a larger --timeout"
    if step == 0 and run.leaves_this_host:
        reason += f"; or {REACH_QUESTION}"
    print_line(f"{label}   {outcome.status.upper()} after {ending} ({reason})")
    print(shown_tail(folder, TAIL_INDENT), flush=True)
