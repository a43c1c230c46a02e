"""What `run.py --tune FILE` does: find, on this machine, what makes each engine's exchange of
gradients faster, and write it into a file that both trainers read (`--knobs FILE`).

Knob by knob, those that promise most first: each value is measured against the best so far, in
interleaved rounds of fresh runs, and kept if its gain is more than noise (search.py). At
the end the file itself is measured against the defaults, in runs that had no part in the choice:
what does not hold there is written as a comment.
"""

import argparse
import os
import re
import shlex
import shutil
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from compare.errors import UserError
from compare.evidence.paired import Estimate, estimate_ratio
from compare.evidence.records import ENGINES
from compare.evidence.run_folder import read_summary
from compare.plan.blocks import drawn, seconds_left
from compare.plan.configurations import Configuration
from compare.plan.hosts import is_only_here
from compare.plan.options import TUNING_ROUNDS, command_words, script_path
from compare.plan.plan import Plan, Run
from compare.plan.record import plan_differences, plan_record
from compare.plan.sources import trainers_sha256
from compare.running import preflight
from compare.running.knobs_found import (
    Found,
    found_record,
    load_line,
    ratio_words,
    trial_lines,
    write_file,
)
from compare.running.knobs_to_try import free_knobs, knobs_for, with_knobs
from compare.running.launch import duration, print_line, print_tail, start_and_wait, utc_now
from compare.running.progress import another_plan, is_complete, read_json
from compare.running.search import LEAST_ROUNDS, SearchError, Trial, is_gain, most_runs, search
from recipe.files import replace_file, write_json
from recipe.flags import flag_name, last_value, without_flag
from recipe.knobs import SETTINGS, Knobs, knobs_text

MAX_STEPS = 40  # of a run, unless the user says otherwise; the first five do not count
LEAST_STEPS = 10
WARM_UP_STEPS = 5


def tuning_plan(plan: Plan, options: argparse.Namespace) -> Plan:
    """Return the plan of the search: one configuration of each engine, one training, one number of
    workers. UserError where the flags ask for something else."""
    if options.rounds is None:
        options.rounds = TUNING_ROUNDS
    check_tuning(plan, options)
    arguments = list(plan.trainer_arguments)
    steps = last_value((*arguments, *plan.cases[0].flags), "--max-steps")
    if steps is None:
        arguments += ["--max-steps", str(MAX_STEPS)]
    chosen: dict[str, Configuration] = {}
    # A plan for tuned against tuned has both: it is the plain one that is to be tuned.
    known = [plan.known()[name] for name in plan.configurations]
    for configuration in sorted(known, key=lambda c: bool(c.flags or c.environment)):
        chosen.setdefault(configuration.engine, configuration)
    order = [c.name for c in known if c in chosen.values()]
    if options.configurations and (rest := [c.name for c in known if c.name not in order]):
        raise UserError(
            f"--configurations: --tune takes one of each engine; leave out {' '.join(rest)}"
        )
    cleared = [replace(c, flags=tuple(without_flag(c.flags, "--knobs"))) for c in plan.defined]
    return replace(
        plan,
        configurations=tuple(dict.fromkeys(order)),
        defined=tuple(cleared),
        workers=(max(plan.workers),),
        judged_pairs=(),
        measure="runs",
        blocks=1,
        phase_steps=0,
        null=False,
        trainer_arguments=tuple(arguments),
    )


def check_tuning(plan: Plan, options: argparse.Namespace) -> None:
    """Raise UserError about what a search cannot do."""
    for name in ("slurm", "block", "measure", "until_interval", "minutes", "null"):
        if value := getattr(options, name):
            raise UserError(
                f"--{name.replace('_', '-')} {value}: does not go together with --tune, which runs "
                "here, until it is done; leave it out (inside salloc take --hosts slurm)"
            )
    if options.blocks is not None:
        raise UserError(f"--blocks {options.blocks}: with --tune give --rounds")
    if options.tune.is_dir():
        raise UserError(
            f"--tune {options.tune}: is a folder; name a file, as in {options.tune / 'knobs.toml'}"
        )
    if options.rounds < LEAST_ROUNDS:
        raise UserError(f"--rounds {options.rounds}: give at least {LEAST_ROUNDS}")
    for configuration in plan.members():
        if configuration.engine not in SETTINGS:
            raise UserError(f"{configuration.name}: has no settings to tune; leave it out")
    if max(plan.workers) < 2:
        raise UserError("--workers 1: a single worker exchanges nothing; give at least 2")
    if len(plan.cases) > 1:
        names = ", ".join(case.name for case in plan.cases)
        raise UserError(
            f"--tune: the plan has several cases ({names}), and a file of knobs is for one; name "
            "it, as in --case 'NAME=flags'"
        )
    words = (*plan.trainer_arguments, *plan.cases[0].flags)
    if "--knobs" in map(flag_name, words):
        raise UserError("--knobs among the trainers' flags: --tune begins from the defaults")
    steps = last_value(words, "--max-steps")
    if steps is not None and steps.isdecimal() and int(steps) < LEAST_STEPS:
        raise UserError(
            f"--max-steps {steps}: the first steps of a run do not count; give {LEAST_STEPS} or "
            f"more ({MAX_STEPS} without the flag)"
        )


@dataclass
class Runner:
    """Makes the runs of a search; one that is there already, by the same command, is taken."""

    plan: Plan
    folder: Path
    sources: str  # digest of the trainers when the search began
    most: int  # runs that may yet come
    made: int = 0
    taken: int = 0
    durations: list[tuple[Hashable, float]] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)  # cores that others kept busy, run by run

    def run(self, place: str, configuration: Configuration) -> float | None:
        """Return images per second of one run; None if it failed."""
        [case], [workers] = self.plan.cases, self.plan.workers
        run = self.plan.run(0, case, configuration, workers)
        log_dir = self.folder / folder_name(place)
        target = log_dir / run.name
        self.most -= 1
        if is_complete(target) and command_of(target) == shlex.join(run.command(log_dir)):
            self.taken += 1
            if (outcome := target / "outcome.json").exists():  # not if stopped at its very end
                self.note_load(read_json(outcome).get("other_load"))
            return read_summary(target).images_per_second
        return self.start(run, log_dir, target, place)

    def start(self, run: Run, log_dir: Path, target: Path, place: str) -> float | None:
        if trainers_sha256() != self.sources:
            raise UserError(
                "the sources of the recipe or the trainers were changed while the search was "
                "running: put them back and go on, or start afresh with --new"
            )
        label = f"    {place}"
        outcome = start_and_wait(run, self.folder, self.plan.timeout, label, log_dir=log_dir)
        self.made += 1
        self.durations.append(("run", outcome.seconds))
        self.note_load(outcome.other_load)
        if outcome.status != "completed":
            print_line(f"{label}   {outcome.status.upper()} after {duration(outcome.seconds)}")
            print_tail(target / "output.log")
            return None
        speed = read_summary(target).images_per_second
        left = seconds_left(self.durations, ["run"] * self.most)
        ending = f"   at most {duration(left)} left" if left else ""
        print_line(f"{label:<66} {speed:>9,.1f} images/s {duration(outcome.seconds):>6}{ending}")
        return speed

    def note_load(self, cores: float | None) -> None:
        if cores is not None:
            self.loads.append(cores)


def folder_name(place: str) -> str:
    """Return a place's path: values and knobs have names with blanks and quotes in them."""
    return re.sub(r"[^A-Za-z0-9/._-]+", "-", place)


def command_of(folder: Path) -> str:
    path = folder / "command.txt"
    return path.read_text().strip() if path.exists() else ""


def tune_folder(options: argparse.Namespace) -> Path:
    """Return where the search's runs go: the same file, the same place, so that it can go on."""
    return options.out or options.runs / f"tune-{options.tune.stem}"


def tune(plan: Plan, folder: Path, options: argparse.Namespace, argv: list[str]) -> int:
    """Search for each engine's knobs and write the file; return the exit code. `plan` is of
    `tuning_plan`."""
    write_json(folder / "plan.json", checked_record(plan, folder, options.new))
    warnings = preflight.find_warnings(plan, folder)
    if options.strict and warnings:
        lines = "\n".join(f"    {line}" for line in warnings)
        raise UserError(f"not started (--strict), because of\n{lines}")
    for line in warnings:
        print(f"warning: {line}")
    sources = trainers_sha256()
    print(f"what makes the exchange of gradients faster here, into {options.tune}; runs: {folder}")
    try:
        found = [tune_engine(c, plan, folder, options.rounds, sources) for c in plan.members()]
    except SearchError as error:
        print(f"{error}: its output is above. To go on from there:")
        print(f"    {shlex.join(command_words(argv, folder))}")
        return 1
    except KeyboardInterrupt:
        print("\nstopped: what was measured is kept. To go on where it stopped:")
        print(f"    {shlex.join(command_words(argv, folder))}")
        return 130
    write_json(folder / "tuned.json", {"engines": [found_record(one) for one in found]})
    write_file(options.tune, found, plan, argv)
    print(f"\nwritten: {options.tune}. To train with it:  --knobs {options.tune}")
    if len(found) > 1:
        print(f"to compare tuned with tuned:\n    {comparison_command(plan, options.tune)}")
    return 0


def dry_tune_lines(plan: Plan, rounds: int) -> list[str]:
    """Return what would be tried, and at most how many runs it takes."""
    lines = []
    for configuration in plan.members():
        knobs, left_out = free_knobs(
            knobs_for(configuration, plan), configuration, plan, os.environ
        )
        runs = most_runs(knobs, rounds) + 2 * rounds
        lines.append(f"{ENGINES[configuration.engine]} ({configuration.name}): at most {runs} runs")
        lines += [f"    {k.name}: {', '.join(v.shown for v in k.values)}" for k in knobs]
        lines += [f"    {line}" for line in left_out]
    return lines


def checked_record(plan: Plan, folder: Path, afresh: bool) -> dict[str, Any]:
    """Return what plan.json is to hold; UserError if the folder holds something else. With
    `afresh` what an earlier search left there is deleted."""
    record = {"is_search": True, **plan_record(plan, utc_now())}
    path = folder / "plan.json"
    old = read_json(path) if path.exists() else {}
    left = [child for child in folder.iterdir() if child.name != "lock"]
    if left and not old.get("is_search"):
        raise UserError(f"{folder} holds something else than a search: take another --out DIR")
    if afresh:
        for child in left:
            if child.is_dir():
                shutil.rmtree(child)
            else:
                child.unlink()
        return record
    if old and (differences := plan_differences(old, record)):
        raise another_plan(folder, [*differences, "(or start afresh with --new)"])
    return {**record, "created_utc": old.get("created_utc", record["created_utc"])}


def tune_engine(
    configuration: Configuration, plan: Plan, folder: Path, rounds: int, sources: str
) -> Found:
    """Find one engine's knobs, and measure them once more against the defaults."""
    name = configuration.engine
    tried = knobs_for(configuration, plan)
    knobs, lines = free_knobs(tried, configuration, plan, os.environ)
    runner = Runner(plan, folder, sources, most_runs(knobs, rounds) + 2 * rounds)
    print(f"\n{ENGINES[name]} ({configuration.name}, {max(plan.workers)} workers)")
    for line in lines:
        print(f"  {line}")
    warm_up(configuration, plan, folder)
    left = list(knobs)

    def measure(place: str, wanted: Knobs) -> float | None:
        return runner.run(f"{name}/{place}", with_knobs(configuration, wanted))

    def tell(trials: list[Trial]) -> None:
        left.pop(0)
        runner.most = most_runs(left, rounds) + 2 * rounds
        print("\n".join(trial_lines(trials)))

    best, done = search(knobs, measure, rounds, plan.seed, tell)
    check = None
    if best != Knobs():
        check = check_against_defaults(configuration, best, runner, rounds)
        print(f"  all of it against the defaults: {ratio_words(check)}")
        if not is_gain(check):
            print("  which is no gain that was shown: it is written as a comment")
    else:
        print("  nothing was shown to be faster than the defaults")
    if runner.taken:
        print(f"  ({runner.taken} runs were there already, {runner.made} were made)")
    written = sorted(folder.glob(f"{name}/**/environment.json"))
    environment = read_json(written[0]) if written else {}
    load = median(runner.loads) if runner.loads else None
    found = Found(configuration, best, tuple(done), check, environment, load)
    if line := load_line(found):
        print(f"  warning: {line}")
    return found


def warm_up(configuration: Configuration, plan: Plan, folder: Path) -> None:
    """Start the engine for a few steps, for caches' sake; SearchError if it cannot train."""
    run = plan.run(0, plan.cases[0], configuration, max(plan.workers))
    log_dir = folder / "warm-up"
    if is_complete(log_dir / run.name) or (folder / configuration.engine).exists():
        return
    outcome = start_and_wait(
        run,
        folder,
        plan.warm_up_timeout,
        "    warm-up",
        log_dir=log_dir,
        end_after_steps=WARM_UP_STEPS,
    )
    if outcome.status != "completed":
        print_tail(log_dir / run.name / "output.log")
        raise SearchError("the warm-up failed, and so would all runs")
    print_line(f"    warm-up   {duration(outcome.seconds)}, thrown away")


def check_against_defaults(
    configuration: Configuration, knobs: Knobs, runner: Runner, rounds: int
) -> Estimate:
    """Measure the knobs against none: in fresh runs, since those by which they were chosen flatter
    them. The trainers read them from a file, as they will, unless hosts may not see the folder."""
    engine, plan = configuration.engine, runner.plan
    path, text = runner.folder / f"{engine}.toml", knobs_text({engine: knobs})
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        # Runs with other knobs had the same command: they must not be taken for these.
        shutil.rmtree(runner.folder / engine / "check", ignore_errors=True)
    replace_file(path, text)
    tuned = replace(configuration, flags=(*configuration.flags, "--knobs", str(path)))
    if not is_only_here(max(plan.workers), plan.hosts):
        tuned = with_knobs(configuration, knobs)
    speeds: dict[str, list[float]] = {"defaults": [], "tuned": []}
    for number in range(1, rounds + 1):
        for name in drawn(speeds, plan.seed, "check", number):
            start = tuned if name == "tuned" else configuration
            speed = runner.run(f"{engine}/check/round-{number}/{name}", start)
            if speed is None:
                raise SearchError(f"{engine}: a run with {name} failed in the check at the end")
            speeds[name].append(speed)
    return estimate_ratio(speeds["tuned"], speeds["defaults"])


def comparison_command(plan: Plan, path: Path) -> str:
    """Return the command that compares the tuned engines on the training they were tuned for."""
    arguments = (*plan.trainer_arguments, *plan.cases[0].flags, "--knobs", str(path))
    default = Plan()
    plan = replace(
        plan,
        blocks=7,
        cases=default.cases,
        phase_steps=default.phase_steps,
        trainer_arguments=arguments,
    )
    return shlex.join(["python", script_path(), *plan.words()])
