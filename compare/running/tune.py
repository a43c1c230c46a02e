"""What `run.py --tune FILE` does: find, on this machine, what makes each engine's exchange of
gradients faster, and write it into a file that both trainers read (`--knobs FILE`).

Knob by knob, those that promise most first: all values take turns with the best so far, in blocks
of fresh starts (scheduler.py), and one is kept if its gain is more than noise (search.py). At
the end the file itself is measured against the defaults, in blocks that had no part in the choice:
what does not hold there is written as a comment.
"""

import argparse
import os
import re
import shlex
import shutil
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from msgspec import structs

from compare.evidence.paired import Estimate, estimate_ratio
from compare.evidence.records import ENGINES
from compare.evidence.run_folder import read_object
from compare.evidence.turns import Block, throughput
from compare.plan.blocks import drawn, seconds_left
from compare.plan.configurations import Configuration
from compare.plan.hosts import is_only_here
from compare.plan.options import TUNING_ROUNDS, command_words, script_path
from compare.plan.plan import Plan, Run, Words
from compare.plan.plan_file import plan_words
from compare.plan.record import PlanRecord, plan_differences, plan_record, read_plan, write_plan
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
from compare.running.launch import duration, print_line, utc_now
from compare.running.progress import another_plan, check_sources
from compare.running.scheduler import PATIENCE, finished_block, run_block
from compare.running.search import LEAST_ROUNDS, SearchError, Trial, is_gain, search
from compare.running.sides import MeasurementError, NoTurns, Side, training_side
from recipe.errors import UserError
from recipe.files import replace_file, write_json
from recipe.flags import flag_name, without_flag
from recipe.knobs import SETTINGS, Knobs, knobs_text

TURNS = 4  # of each candidate in a block


def tuning_plan(plan: Plan, options: argparse.Namespace) -> Plan:
    """Return the plan of the search: one configuration of each engine, one training, one number of
    workers. UserError where the flags ask for something else."""
    if options.rounds is None:
        options.rounds = TUNING_ROUNDS
    check_tuning(plan, options)
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
    cleared = {
        name: structs.replace(own, flags=Words(without_flag(own.flags, "--knobs")))
        for name, own in plan.configuration.items()
    }
    return structs.replace(
        plan,
        configurations=tuple(dict.fromkeys(order)),
        configuration=cleared,
        workers=(max(plan.workers),),
        judged_pairs=(),
        blocks=1,
        phase_steps=0,
        null=False,
    )


def check_tuning(plan: Plan, options: argparse.Namespace) -> None:
    """Raise UserError about what a search cannot do."""
    for name in ("block", "measure", "until_interval", "minutes", "null"):
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


@dataclass
class Runner:
    """Makes the blocks of a search; one that is there already, of the same commands and sources, is
    taken."""

    plan: Plan
    folder: Path
    sources: str  # digest of the trainers when the search began
    most: int  # blocks that may yet come
    by_turns: bool = True  # False once that has turned out not to be possible
    made: int = 0
    taken: int = 0
    durations: list[tuple[Hashable, float]] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)  # cores that others kept busy, by block

    def measure(self, place: str, candidates: Mapping[str, Configuration]) -> dict[str, float]:
        """Return images per second of each candidate, without those that failed."""
        check_sources(self.sources)
        [case], [workers] = self.plan.cases, self.plan.workers
        names = {folder_name(shown): shown for shown in candidates}
        runs = [
            self.plan.run(0, case, replace(one, name=folder_name(shown)), workers)
            for shown, one in candidates.items()
        ]
        began, made = time.monotonic(), self.made
        blocks = self.blocks(runs, place)
        self.most -= 1
        speeds = {
            names[name]: block.median(name, throughput) for block in blocks for name in block.order
        }
        self.loads += [block.other_load for block in blocks]
        told = ", ".join(f"{name} {speed:,.1f}" for name, speed in speeds.items())
        line = f"    {place}: {told} images/s"
        if self.made > made:
            seconds = time.monotonic() - began
            self.durations.append(("block", seconds))
            left = seconds_left(self.durations, ["block"] * self.most)
            line += f"   {duration(seconds)}"
            line += f"   at most {duration(left)} left" if left else ""
            print_line(line)
        return speeds

    def blocks(self, runs: Sequence[Run], place: str) -> list[Block]:
        """Return the block of these runs as sides; where they cannot take turns, one of each."""
        folder = self.folder / folder_name(place)
        sides = [training_side(run, folder) for run in runs]
        if any((folder / side.name / "block.json").exists() for side in sides):
            self.by_turns = False  # as an earlier start of the search has found
        if self.by_turns:
            try:
                return self.block(sides, folder, place)
            except NoTurns as error:
                print_line(f"    {place}: one after the other, because {error}")
                self.by_turns = False
        return [one for side in sides for one in self.block([side], folder / side.name, place)]

    def block(self, sides: Sequence[Side], folder: Path, place: str) -> list[Block]:
        """Return the block of those of these sides that do not fail; none if all do."""
        path = folder / "block.json"
        there = read_object(path)["order"] if path.exists() else []
        kept = finished_block([side for side in sides if side.name in there], TURNS, folder)
        if kept is not None:
            self.taken += 1
            return [kept]
        while sides:
            try:
                block = run_block(
                    sides, TURNS, folder, 1, place, PATIENCE, lambda text: None, self.plan.timeout
                )
                self.made += 1
                return [block]
            except NoTurns:
                raise
            except MeasurementError as error:
                print_line(f"    {place}: {error}")
                if error.side is None:
                    raise
                sides = [side for side in sides if side.name != error.side]
        return []


def folder_name(place: str) -> str:
    """Return a place's path: values and knobs have names with blanks and quotes in them."""
    return re.sub(r"[^A-Za-z0-9/._-]+", "-", place)


def tune_folder(options: argparse.Namespace) -> Path:
    """Return where the search's runs go: the same file, the same place, so that it can go on."""
    return options.out or options.runs / f"tune-{options.tune.stem}"


def tune(plan: Plan, folder: Path, options: argparse.Namespace, argv: list[str]) -> int:
    """Search for each engine's knobs and write the file; return the exit code. `plan` is of
    `tuning_plan`."""
    write_plan(folder / "plan.json", checked_record(plan, folder, options.new))
    preflight.warn(plan, folder, options.strict)
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
    """Return what would be tried, and at most how many blocks it takes."""
    lines = []
    for configuration in plan.members():
        knobs, left_out = free_knobs(
            knobs_for(configuration, plan), configuration, plan, os.environ
        )
        blocks = rounds * (len(knobs) + 1)
        lines.append(
            f"{ENGINES[configuration.engine]} ({configuration.name}): at most {blocks} blocks"
        )
        lines += [f"    {k.name}: {', '.join(v.shown for v in k.values)}" for k in knobs]
        lines += [f"    {line}" for line in left_out]
    return lines


def checked_record(plan: Plan, folder: Path, afresh: bool) -> PlanRecord:
    """Return what plan.json is to hold; UserError if the folder holds something else. With
    `afresh` what an earlier search left there is deleted."""
    record = structs.replace(plan_record(plan, utc_now()), is_search=True)
    path = folder / "plan.json"
    old = read_plan(path) if path.exists() else None
    left = [child for child in folder.iterdir() if child.name != "lock"]
    if left and not (old and old.is_search):
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
    return structs.replace(record, created_utc=(old or record).created_utc)


def tune_engine(
    configuration: Configuration, plan: Plan, folder: Path, rounds: int, sources: str
) -> Found:
    """Find one engine's knobs, and measure them once more against the defaults."""
    name = configuration.engine
    tried = knobs_for(configuration, plan)
    knobs, lines = free_knobs(tried, configuration, plan, os.environ)
    runner = Runner(plan, folder, sources, rounds * (len(knobs) + 1))
    print(f"\n{ENGINES[name]} ({configuration.name}, {max(plan.workers)} workers)")
    for line in lines:
        print(f"  {line}")
    left = list(knobs)

    def measure(place: str, wanted: Mapping[str, Knobs]) -> dict[str, float]:
        tried = {shown: with_knobs(configuration, one) for shown, one in wanted.items()}
        return runner.measure(f"{name}/{place}", tried)

    def tell(trials: list[Trial]) -> None:
        left.pop(0)
        runner.most = rounds * (len(left) + 1)
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
        print(f"  ({runner.taken} blocks were there already, {runner.made} were made)")
    written = sorted(folder.glob(f"{name}/**/environment.json"))
    environment = read_object(written[0]) if written else {}
    load = median(runner.loads) if runner.loads else None
    found = Found(configuration, best, tuple(done), check, environment, load)
    if line := load_line(found):
        print(f"  warning: {line}")
    return found


def check_against_defaults(
    configuration: Configuration, knobs: Knobs, runner: Runner, rounds: int
) -> Estimate:
    """Measure the knobs against none: in fresh blocks, since those by which they were chosen
    flatter them. The trainers read them from a file, as they will, unless hosts may not see the
    folder."""
    engine, plan = configuration.engine, runner.plan
    path, text = runner.folder / f"{engine}.toml", knobs_text({engine: knobs})
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        # Blocks with other knobs had the same commands: they must not be taken for these.
        shutil.rmtree(runner.folder / engine / "check", ignore_errors=True)
    replace_file(path, text)
    tuned = replace(configuration, flags=(*configuration.flags, "--knobs", str(path)))
    if not is_only_here(max(plan.workers), plan.hosts):
        tuned = with_knobs(configuration, knobs)
    candidates = {"defaults": configuration, "tuned": tuned}
    pairs = []
    for number in range(1, rounds + 1):
        order = drawn(candidates, plan.seed, "check", number)
        place = f"{engine}/check/round-{number}"
        speeds = runner.measure(place, {name: candidates[name] for name in order})
        if failed := candidates.keys() - speeds.keys():
            raise SearchError(f"{engine}: {failed.pop()} failed in the check at the end")
        pairs.append((speeds["tuned"], speeds["defaults"]))
    return estimate_ratio(*zip(*pairs, strict=True))


def comparison_command(plan: Plan, path: Path) -> str:
    """Return the command that compares the tuned engines on the training they were tuned for."""
    arguments = Words((*plan.trainer_arguments, *plan.cases[0].flags, "--knobs", str(path)))
    default = Plan()
    plan = structs.replace(
        plan,
        measure=default.measure,
        blocks=default.blocks,
        full_runs=0,
        case={},
        phase_steps=default.phase_steps,
        trainer_arguments=arguments,
    )
    return shlex.join(["python", script_path(), *plan_words(plan)])
