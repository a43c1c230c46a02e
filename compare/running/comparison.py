"""Carry out a plan in its folder: make the missing runs, and add blocks until its end rule is met.
Each is a line of the comparison's record as soon as it has ended, and nothing is read back.

Estimates and decisions come from the functions that the report uses (compare/evidence), so both
always agree.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace as replace_outcome
from pathlib import Path
from statistics import mean

import msgspec
from msgspec.structs import replace

from compare.evidence.group import Group
from compare.evidence.reading import TimedSummary, read_record
from compare.evidence.record import (
    FILE,
    LOCK,
    FailureLine,
    NotWrittenError,
    PlanLine,
    Record,
    RunLine,
)
from compare.evidence.runs import read_run_folder
from compare.evidence.stopping import (
    MOST_STRETCH,
    estimates_of,
    is_enough,
    next_groups,
    reason_to_end,
    rounds_of_block,
)
from compare.evidence.words import count, counted_text, percent_text, place_text, ratio_text
from compare.plan.blocks import MIN_BLOCKS
from compare.plan.plan import Outcome, Plan, Run, block_place, percentage
from compare.plan.plan_file import PlanRecord, plan_differences, plan_record, sources_sha256
from compare.running.launch import (
    TAIL_INDENT,
    Launches,
    duration,
    failed_folder,
    last_step,
    print_line,
    print_live,
    shown_tail,
    start_and_wait,
    utc_now,
)
from compare.running.scheduler import MeasurementError, run_blocks
from recipe.errors import UserError
from recipe.record.schema import rate_text

REACH_QUESTION = (
    "do its workers reach each other? `python compare/doctor.py --hosts ...` tests the networks"
)


def resumed(plan: Plan, record: Record) -> Plan:
    """Return the plan with the values that its record has fixed: the seed of the order, what was
    left out, and the number of blocks of whole runs begun."""
    if record.is_empty:
        return plan
    old = record.plan
    order_seed = old.order_seed if plan.order_seed is None else plan.order_seed
    # A plan that is read from its record says no more what was left out of it.
    left_out = plan.left_out or old.left_out
    return replace(plan, order_seed=order_seed, left_out=left_out, blocks_there=old.blocks_there)


def check_same_plan(plan: Plan, record: Record) -> PlanRecord:
    """Return the plan as its record is to hold it. UserError if the record holds another plan, or
    more blocks than this one has; or if the folder is not a comparison's."""
    new = plan_record(plan, utc_now())
    if record.is_empty:
        if any(child.name not in (LOCK, FILE) for child in record.folder.iterdir()):
            raise UserError(
                f"{record.folder} is not empty and holds no comparison; give another --out DIR"
            )
        return new
    old = record.plan
    differences = plan_differences(old, new)
    there, asked = 0, plan.run_blocks
    if plan.measure == "runs":
        there = old.blocks_there
    elif plan.blocks is not None:
        there, asked = max(group.num_blocks for group in record.groups), plan.blocks
    if there > asked:
        differences.append(f"blocks: {there} there, {asked} now")
    may_be_earlier = any(now < then for now, then in zip(plan.end, old.end, strict=True))
    if may_be_earlier and not is_finished(old, record):
        differences.append(
            f"the end: {end_text(old)} there, {end_text(plan)} now. The new end may come earlier; "
            "stopping when the figures look good finds differences that do not exist"
        )
    if differences:
        lines = "\n".join(f"    {line}" for line in differences)
        raise UserError(
            f"{record.folder} holds another plan:\n{lines}\ncontinue with that plan's flags, or "
            "give another --out DIR"
        )
    return replace(new, warnings=old.warnings)


def end_text(plan: Plan) -> str:
    """Return the end rule of a plan in words."""
    if plan.blocks is not None:
        return count(plan.blocks, "block")
    return f"+-{percentage(plan.until_interval)} or {plan.minutes:g} minutes"


def record_plan(plan: PlanRecord, record: Record) -> None:
    """Add the plan to its record, unless its last line says the same."""
    table = msgspec.to_builtins(plan, enc_hook=float)
    if not record.is_empty:
        there = replace(record.plan, created_utc=plan.created_utc, blocks_there=0)
        if msgspec.to_builtins(there, enc_hook=float) == table:
            return
    record.append(PlanLine(plan=table))


def check_sources(plan: Plan, record: Record) -> None:
    """Raise UserError if the measured sources have changed since the comparison began."""
    if sources_sha256(plan) != record.plan.trainers_sha256:
        what = "the scripts" if plan.side else "the sources of the recipe or the trainers"
        raise UserError(
            f"{what} have changed since the comparison began, so new runs would be of another "
            "training. Restore them and run the same command, or start anew with --new"
        )


def measure(plan: Plan, record: Record) -> list[Run]:
    """Measure blocks until the end rule is met; each is recorded when it is done. Return the whole
    runs that failed. MeasurementError if a side fails in turns."""
    if plan.measure == "turns" and not reason_to_end(plan, record.groups):
        print_line(f"now blocks of turns: {time_left(plan, record.groups)}")
    while not (reason := reason_to_end(plan, record.groups)):
        check_sources(plan, record)
        before = record.groups
        if plan.measure == "turns":
            measure_block(plan, record)
        else:
            plan = replace(plan, blocks_there=plan.run_blocks + 1)
            runs = plan.runs()
            if not record.missing(runs):  # all were made, and some cannot be used
                return [run for run in runs if record.outcome(run).status == "unreadable"]
            if failed := make_missing(runs, plan, record):
                return failed
        left = time_left(plan, record.groups)
        if plan.shares_launch:
            print_line(f"block {record.groups[0].num_blocks}   {left}".rstrip())
            continue
        for old, new in zip(before, record.groups, strict=True):
            if new.num_blocks > old.num_blocks:
                label = block_label(new, new.num_blocks)
                print_line("   ".join([label, *ratio_texts(new), left]).rstrip())
    print_line(ending_text(plan, record.groups, reason))
    return []


def is_finished(plan: Plan, record: Record) -> bool:
    """Return whether nothing of the plan remains to be run."""
    return not record.missing(plan.runs()) and bool(reason_to_end(plan, record.groups))


def measure_block(plan: Plan, record: Record) -> None:
    """Measure the next block of turns, of all cases that share its launch; raises MeasurementError
    if a side fails."""
    groups = next_groups(plan, record.groups)
    first, left = groups[0], time_left(plan, record.groups)
    number = first.num_blocks + 1
    place = record.folder / block_place(*first.place, number)
    aside = failed_folder(place)  # where the scheduler puts a block that fails
    label, ratios = f"block {number}", list[str]()
    if not plan.shares_launch:
        label, ratios = block_label(first, number), ratio_texts(first)
    try:
        lines = run_blocks(
            [plan.in_order(group.num_blocks + 1, *group.place) for group in groups],
            plan,
            place,
            report=lambda text: print_live([f"{label}, {text}", *ratios, left]),
            choose_rounds=lambda cost, *place: rounds_of_block(plan, record.groups, place, cost),
        )
    except MeasurementError as error:
        where = str(place.relative_to(record.folder))
        record.append(failure_line(record, where, number, Outcome("failed"), aside, str(error)))
        raise
    for line in lines:
        record.append(line)


def block_label(group: Group, number: int) -> str:
    return f"block {number}, {place_text(*group.place)}"


def ratio_texts(group: Group) -> list[str]:
    """Return a text with each pair's speed ratio so far; the widest interval comes first."""
    by_width = sorted(group.estimates.items(), key=lambda item: -item[1].relative_half_width)
    texts = []
    for (first, second), ratio in by_width:
        text = f"{first} / {second} {ratio_text(ratio)}"
        if ratio.blocks >= MIN_BLOCKS:
            text += f" +-{percent_text(ratio.relative_half_width)}"
        texts.append(text)
    return texts


def time_left(plan: Plan, groups: Sequence[Group]) -> str:
    """Return a text with the longest time that the remaining blocks may take, or with what is known
    of it before the first block; "" if none remain."""
    used = sum(group.used_seconds for group in groups)
    if not all(group.num_blocks for group in groups):
        return (
            f"up to {duration(max(0.0, 60 * plan.minutes - used))}, but at least "
            f"{count(MIN_BLOCKS, 'block')}"
            if plan.blocks is None
            else f"{count(plan.blocks, 'block')} of unknown length"
        )
    disturbed = sum(group.disturbed_seconds for group in groups)
    # Assume the same share of disturbed time as so far.
    stretch, least = 1 + disturbed / used, plan.blocks or MIN_BLOCKS
    left = stretch * sum(max(0, least - group.num_blocks) * group.block_seconds for group in groups)
    if plan.blocks is None:
        most = MOST_STRETCH * 60 * plan.minutes - used - disturbed
        left = max(left, min(stretch * (60 * plan.minutes - used), most))
    return f"up to {duration(left)} left" if left > 0 else ""


def ending_text(plan: Plan, groups: Sequence[Group], reason: str) -> str:
    """Return a text that says why the measuring has ended, and how long it took."""
    text = (
        f"{reason}: {duration(sum(group.used_seconds for group in groups))} of measuring, plus "
        f"{duration(sum(group.disturbed_seconds for group in groups))} in which other processes "
        "used the cores"
    )
    if counted := counted_text(groups):
        text += f"\n{counted}"
    if plan.blocks is None and not is_enough(estimates_of(groups), plan):
        widest = max(ratio.relative_half_width for ratio in estimates_of(groups))
        text += (
            f"\nthe widest interval is +-{percent_text(widest)}; if that leaves a pair undecided, "
            "the report says how to go on"
        )
    return text


def make_missing(runs: list[Run], plan: Plan, record: Record) -> list[Run]:
    """Start the runs that are not complete, one after the other; return those that failed. Where
    turns measure speed, the runs need not show how long a start takes, and their ranks are
    forks."""
    failed, missing = [], record.missing(runs)
    if not missing:
        return []
    print_line(f"now {count(len(missing), 'full run')}, one after the other")
    with Launches() if plan.measure == "turns" else nullcontext() as servers:
        for run in missing:
            check_sources(plan, record)
            number = f"[{runs.index(run) + 1:{len(str(len(runs)))}}/{len(runs)}]"
            label = f"{number} block {run.block}  {run.cell}"
            fork_servers = servers.mark if servers else ""
            outcome = start_and_wait(
                run, record.folder, plan.timeout, label, fork_servers=fork_servers
            )
            outcome, folder = record_run(run, outcome, record)
            # From the mean time of the runs that have ended; 0 s means that a run was not started.
            done = [seconds for run in runs if (seconds := record.outcome(run).seconds)]
            left = mean(done) * len(record.missing(runs)) if done else None
            if outcome.status == "unreadable":
                print_line(f"{label}   unreadable: {record.failure(run.folder).output}")
            else:
                show_outcome(label, run, folder, outcome, left)
            # What turns measure does not need whole runs.
            is_needed = outcome.status != "unreadable" or plan.measure == "runs"
            if outcome.status != "completed" and is_needed:
                failed.append(run)
    return failed


def record_run(run: Run, outcome: Outcome, record: Record) -> tuple[Outcome, Path]:
    """Record a whole run that has ended. Return its outcome, "unreadable" if what its trainer wrote
    cannot be used or contradicts itself, and its folder, which is put aside if it failed."""
    folder, output = record.folder / run.folder, ""
    if outcome.status == "completed":
        try:
            record.append(
                RunLine(
                    place=run.folder,
                    block=run.block,
                    outcome=outcome,
                    command=(folder / "command.txt").read_text(errors="surrogateescape").strip(),
                    **read_run_folder(folder),
                )
            )
            return outcome, folder
        except NotWrittenError:
            raise
        except UserError as error:
            outcome, output = replace_outcome(outcome, status="unreadable"), str(error)
    aside = failed_folder(folder)
    output = output or shown_tail(folder, kept=aside)
    record.append(failure_line(record, run.folder, run.block, outcome, aside, output))
    folder.rename(aside)
    return outcome, aside


def failure_line(
    record: Record, place: str, block: int, outcome: Outcome, aside: Path, output: str
) -> FailureLine:
    where = str(aside.relative_to(record.folder))
    return FailureLine(place=place, block=block, outcome=outcome, folder=where, output=output)


def show_outcome(label: str, run: Run, folder: Path, outcome: Outcome, left: float | None) -> None:
    """Print a run's result as a line, and the end of its output if it failed."""
    ending = f"{duration(outcome.seconds)}{f'   about {duration(left)} left' if left else ''}"
    if outcome.leftover_processes:
        ending += f"   killed leftover processes: {outcome.leftover_processes}"
    if outcome.status == "completed":
        speed = read_record(folder / "summary.json", TimedSummary).images_per_second
        print_line(f"{label}   {rate_text(speed):>9} images/s   {ending:>6}")
        return
    reason = f"exit code {outcome.exit_code}{'' if outcome.exit_code else ', but no summary.json'}"
    step = last_step(folder / "metrics.jsonl")["step"]
    if outcome.status == "timed out":
        reason = f"at step {step:,}: give a larger --timeout"
    if step == 0 and run.leaves_this_host:
        reason += f"; or {REACH_QUESTION}"
    print_line(f"{label}   {outcome.status.upper()} after {ending} ({reason})")
    print(shown_tail(folder, TAIL_INDENT), flush=True)
