"""Carry out a plan in its folder: what is missing of it, and what plan.json says of it."""

from pathlib import Path

from msgspec.structs import replace

from compare.evidence.run_folder import read_object, read_record
from compare.plan.blocks import seconds_left
from compare.plan.plan import Plan, Run
from compare.plan.record import (
    PlanRecord,
    plan_differences,
    plan_record,
    read_plan,
    write_plan,
)
from compare.plan.sources import trainers_sha256
from compare.running.launch import (
    REACH_QUESTION,
    Outcome,
    duration,
    last_step,
    print_line,
    print_tail,
    start_and_wait,
    utc_now,
)
from compare.running.measurement import (
    block_line,
    ending_lines,
    is_complete,
    measure_block,
    measured,
    missing,
    reason_to_end,
)
from compare.running.sides import NoTurns
from recipe.errors import UserError
from recipe.record.schema import Summary

NO_TURNS = "not by turns: "  # begins the warning of a plan that could not be as it was meant


def resumed(plan: Plan, folder: Path) -> Plan:
    """Return the plan with what is settled in this folder: the seed of its order, and the blocks of
    whole runs that were begun."""
    path = folder / "plan.json"
    if not path.exists():
        return plan
    old = read_plan(path)
    if any(line.startswith(NO_TURNS) for line in old.warnings):
        plan = plan.in_whole_runs()
    order_seed = old.order_seed if plan.order_seed is None else plan.order_seed
    return replace(plan, order_seed=order_seed, blocks_there=old.blocks_there)


def checked_record(plan: Plan, folder: Path) -> PlanRecord:
    """Return what plan.json is to hold, after a check that the folder's own plan is this one, with
    no more blocks; date and warnings are those of the start."""
    path = folder / "plan.json"
    record = plan_record(plan, utc_now())
    if path.exists():
        old = read_plan(path)
        differences = plan_differences(old, record)
        there, asked = old.blocks_there, plan.run_blocks
        if plan.measure == "turns" and plan.blocks is not None:
            there, asked = max(g.blocks for g in measured(plan, folder)), plan.blocks
        if there > asked:
            differences.append(f"blocks: {there} there, {asked} now")
        if differences:
            lines = "\n".join(f"    {line}" for line in differences)
            raise UserError(
                f"{folder} holds another plan:\n{lines}\ngo on with the plan's own flags, or take "
                "another --out DIR"
            )
        extensions = old.extensions
        if old.end != plan.end:
            later = {name: getattr(plan, name) for name in ("blocks", "until_interval", "minutes")}
            extensions = (*extensions, {"created_utc": utc_now(), **later})
        return replace(
            record, created_utc=old.created_utc, warnings=old.warnings, extensions=extensions
        )
    if any(child.name != "lock" for child in folder.iterdir()):
        raise UserError(
            f"{folder} is not empty and holds no plan.json: it is no comparison; take another "
            "--out DIR"
        )
    return record


def check_sources(folder: Path) -> None:
    """Raise UserError if the trainers are not those any more with which the measuring began."""
    if trainers_sha256() != read_plan(folder / "plan.json").trainers_sha256:
        raise UserError(
            "the sources of the recipe or the trainers were changed meanwhile: the runs would not "
            "be of one training. Put them back and go on, or start another with --new"
        )


def measure(plan: Plan, folder: Path) -> tuple[Plan, list[Run]]:
    """Measure blocks until enough is known, each written when it is done. Return the plan as it was
    carried out, and which whole runs failed; MeasurementError if a side of turns does."""
    groups = measured(plan, folder)
    while not (reason := reason_to_end(plan, groups)):
        check_sources(folder)
        if plan.measure == "turns":
            try:
                measure_block(plan, folder, groups)
            except NoTurns as error:
                if all(group.blocks for group in groups):
                    raise  # what could take turns before has failed for another reason
                plan = give_up_turns(plan, folder, str(error))
        else:
            plan = replace(plan, blocks_there=plan.run_blocks + 1)
            write_plan(folder / "plan.json", checked_record(plan, folder))
            if failed := make_missing(plan.runs(), plan, folder):
                return plan, failed
        before, groups = groups, measured(plan, folder)
        if line := block_line(plan, before, groups):
            print_line(line)
    for line in ending_lines(plan, groups, reason):
        print_line(line)
    return plan, []


def give_up_turns(plan: Plan, folder: Path, reason: str) -> Plan:
    """Say why whole runs are measured instead, here and in plan.json; return the plan of them."""
    warning = (
        f"{NO_TURNS}{reason}. Whole runs are measured instead, one after the other. Where others "
        "use the machine, too, their intervals are several times as wide: on two cores +-39 % in "
        "place of +-5 %, after as many minutes. Another comparison, with --new, tries turns again"
    )
    print_line(f"warning: {warning}")
    path, new = folder / "plan.json", plan.in_whole_runs()
    old = read_plan(path)
    warnings = (*old.warnings, warning)
    record = replace(old, measure=new.measure, full_runs=new.full_runs, warnings=warnings)
    write_plan(path, record)
    return new


def make_missing(runs: list[Run], plan: Plan, folder: Path, block: int | None = None) -> list[Run]:
    """Start those of the runs that are not complete, one after the other; return which failed.
    `block` names the only block that is wanted."""
    waiting, failed = [r for r in missing(runs, folder) if block in (None, r.block)], []
    cells = [run.cell for run in waiting]
    durations = [  # of those that an earlier start of run.py has made
        (run.cell, read_object(folder / run.folder / "outcome.json")["seconds"])
        for run in runs
        if is_complete(folder / run.folder) and (folder / run.folder / "outcome.json").exists()
    ]
    for index, run in enumerate(waiting):
        check_sources(folder)
        place = f"block {run.block}" if run.block else "phases"
        number = f"[{runs.index(run) + 1:{len(str(len(runs)))}}/{len(runs)}]"
        label = f"{number} {place}  {run_label(run, plan)}"
        left = seconds_left(durations, cells[index:])
        outcome = start_and_wait(run, folder, plan.timeout, label, seconds_left=left)
        durations.append((run.cell, outcome.seconds))
        left = seconds_left(durations, cells[index + 1 :])
        show_outcome(label, run, folder / run.folder, outcome, left)
        if outcome.status != "completed":
            failed.append(run)
    return failed


def run_label(run: Run, plan: Plan) -> str:
    """Return a run's case, configuration and workers, in columns."""
    width, case_width = (max(map(len, n)) for n in (plan.names, [c.name for c in plan.cases]))
    workers = f"{run.workers} worker{'s' if run.workers > 1 else ' '}"
    case = f"{run.case:{case_width}}  " if case_width else ""
    return f"{case}{run.configuration.name:{width}}  {workers:>10}"


def show_outcome(label: str, run: Run, folder: Path, outcome: Outcome, left: float | None) -> None:
    """Print a run's line, and the end of its output if it failed."""
    ending = f"   about {duration(left)} left" if left else ""
    after = duration(outcome.seconds)
    if outcome.status == "completed":
        speed = read_record(folder / "summary.json", Summary).images_per_second
        shown = f"   {speed:>9,.0f} images/s" if speed is not None else "   no images/s"
        # A speed that is in part one without communication would mislead.
        print_line(f"{label}{shown if run.block else ''}   {after:>6}{ending}")
    else:
        code = "" if outcome.status == "timed out" else f" (exit code {outcome.exit_code})"
        if outcome.status == "failed" and outcome.exit_code == 0:
            code = " (exit code 0, but no summary.json)"
        print_line(f"{label}   {outcome.status.upper()}{code} after {after}{ending}")
        if outcome.status == "timed out":
            print(f"        {timeout_sentence(folder, run.leaves_this_host)}")
        print_tail(folder / "output.log")
    if number := outcome.leftover_processes:
        noun = "process was" if number == 1 else "processes were"
        print(f"        {number} {noun} left behind and killed")


def timeout_sentence(folder: Path, over_hosts: bool) -> str:
    """Say what a run that took too long was doing, and what to do about it; `over_hosts`: the run
    may have been one over several hosts."""
    if step := last_step(folder / "metrics.jsonl"):
        return (
            f"ended by its time limit at step {step['step']:,}: give a larger --timeout, or the "
            "trainers fewer steps"
        )
    sentence = "ended by its time limit before its first step: give a larger --timeout"
    return f"{sentence}; or {REACH_QUESTION}" if over_hosts else sentence
