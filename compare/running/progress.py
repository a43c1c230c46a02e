"""How far a plan has come, from the files that its runs leave, and the lines that tell it."""

import datetime
from collections.abc import Hashable
from pathlib import Path

from msgspec.structs import replace

from compare.evidence.run_folder import read_object, read_record
from compare.plan.plan import Plan, Run
from compare.plan.record import read_plan
from compare.plan.sources import trainers_sha256
from compare.running.launch import (
    REACH_QUESTION,
    Outcome,
    duration,
    last_step,
    print_line,
    print_tail,
)
from recipe.errors import UserError
from recipe.record.schema import Summary

NO_TURNS = "not by turns: "  # begins the warning of a plan that could not be as it was meant


def new_folder(runs: Path) -> Path:
    """Return a name for a new comparison: its date and time, so that names sort by age."""
    now = datetime.datetime.now(datetime.timezone.utc)
    folder = runs / now.strftime("compare-%Y%m%d-%H%M%S")
    while folder.exists():  # two comparisons begun within a second
        now += datetime.timedelta(seconds=1)
        folder = runs / now.strftime("compare-%Y%m%d-%H%M%S")
    return folder


def is_complete(folder: Path) -> bool:
    """Tell whether a run is complete: its trainer wrote the summary, and nothing failed after."""
    if not (folder / "summary.json").exists():
        return False
    outcome = folder / "outcome.json"
    return not outcome.exists() or read_object(outcome).get("status") == "completed"


def missing(runs: list[Run], folder: Path) -> list[Run]:
    return [run for run in runs if not is_complete(folder / run.folder)]


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


def check_sources(sources: str) -> None:
    """Raise UserError if the trainers are not those any more with which the measuring began."""
    if trainers_sha256() != sources:
        raise UserError(
            "the sources of the recipe or the trainers were changed meanwhile: the runs would not "
            "be of one training. Put them back and go on, or start another with --new"
        )


def another_plan(folder: Path, differences: list[str]) -> UserError:
    """Return the error of a folder that holds another plan than the one that is asked for."""
    lines = "\n".join(f"    {line}" for line in differences)
    return UserError(
        f"{folder} holds another plan:\n{lines}\ngo on with the plan's own flags, or take "
        "another --out DIR"
    )


def recorded_seconds(folder: Path, runs: list[Run]) -> list[tuple[Hashable, float]]:
    """Return how long the runs took that an earlier start of run.py has made, with their cells."""
    return [
        (run.cell, read_object(folder / run.folder / "outcome.json")["seconds"])
        for run in runs
        if is_complete(folder / run.folder) and (folder / run.folder / "outcome.json").exists()
    ]


def run_label(run: Run, plan: Plan) -> str:
    width = max(len(configuration.name) for configuration in plan.members())
    workers = f"{run.workers} worker{'s' if run.workers > 1 else ' '}"
    case_width = max(len(case.name) for case in plan.cases)
    case = f"{run.case:{case_width}}  " if case_width else ""
    return f"{case}{run.configuration.name:{width}}  {workers:>10}"


def numbered_label(run: Run, runs: list[Run], plan: Plan) -> str:
    """Return what stands in front of a run's line: its number among `runs`, its block, itself."""
    number = f"[{runs.index(run) + 1:{len(str(len(runs)))}}/{len(runs)}]"
    place = f"block {run.block}" if run.block else "phases"
    return f"{number} {place}  {run_label(run, plan)}"


def show_outcome(
    label: str,
    folder: Path,
    outcome: Outcome,
    left: float | None,
    over_hosts: bool,
    with_speed: bool = True,
) -> None:
    """Print a run's line, and the end of its output if it failed; `over_hosts`: the run may have
    been one over several hosts."""
    ending = f"   about {duration(left)} left" if left else ""
    if outcome.status == "completed":
        speed = read_record(folder / "summary.json", Summary).images_per_second
        shown = f"{speed:>9,.0f} images/s" if speed is not None else "no images/s"
        shown = f"   {shown}" if with_speed else ""
        print_line(f"{label}{shown}   {duration(outcome.seconds):>6}{ending}")
    else:
        code = "" if outcome.status == "timed out" else f" (exit code {outcome.exit_code})"
        if outcome.status == "failed" and outcome.exit_code == 0:
            code = " (exit code 0, but no summary.json)"
        after = duration(outcome.seconds)
        print_line(f"{label}   {outcome.status.upper()}{code} after {after}{ending}")
        if outcome.status == "timed out":
            print(f"        {timeout_sentence(folder, over_hosts)}")
        print_tail(folder / "output.log")
    if outcome.leftover_processes:
        number = outcome.leftover_processes
        noun = "process was" if number == 1 else "processes were"
        print(f"        {number} {noun} left behind and killed")


def timeout_sentence(folder: Path, over_hosts: bool) -> str:
    """Say what a run that took too long was doing, and what to do about it."""
    if step := last_step(folder / "metrics.jsonl"):
        return (
            f"ended by its time limit at step {step['step']:,}: give a larger --timeout, or the "
            "trainers fewer steps"
        )
    sentence = "ended by its time limit before its first step: give a larger --timeout"
    return f"{sentence}; or {REACH_QUESTION}" if over_hosts else sentence
