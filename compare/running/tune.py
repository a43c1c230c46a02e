"""What `run.py --tune FILE` does: find, on this machine, what makes each engine's exchange of
gradients faster, and write it into a file that both trainers read (`--knobs FILE`).

Knob by knob, those that promise most first: each value is measured against the best so far, in
interleaved rounds of fresh runs, and kept if its gain is more than noise (search.py). At
the end the file itself is measured against the defaults, in runs that had no part in the choice:
what does not hold there is written as a comment.
"""

import argparse
import os
import platform
import re
import shlex
import shutil
import textwrap
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import recipe.errors
from compare.errors import UserError
from compare.evidence.paired import Estimate, estimate_ratio
from compare.plan.blocks import drawn, seconds_left
from compare.plan.configurations import Configuration
from compare.plan.environment import set_variables
from compare.plan.hosts import is_only_here, placement
from compare.plan.options import TUNING_ROUNDS, command_words, script_path
from compare.plan.plan import Plan, Run
from compare.plan.record import plan_differences, plan_record
from compare.plan.sources import trainers_sha256
from compare.running import preflight
from compare.running.launch import (
    duration,
    print_line,
    print_tail,
    start_and_wait,
    utc_now,
    utc_stamp,
)
from compare.running.progress import another_plan, images_per_second, is_complete, read_json
from compare.running.search import (
    LEAST_ROUNDS,
    Knob,
    SearchError,
    Trial,
    Value,
    is_gain,
    most_runs,
    search,
)
from recipe.config import read_flags
from recipe.files import replace_file, write_json
from recipe.flags import FLAGS, flag_name, last_value, spelled, without_flag
from recipe.knobs import SETTINGS, Knobs, knobs_text, read_all_knobs

MAX_STEPS = 40  # of a run, unless the user says otherwise; the first five do not count
LEAST_STEPS = 10
WARM_UP_STEPS = 5
MIB = 2**20
BUSY_SHARE = 0.1  # of the cores: what others may use before it is told
ENGINES = {"ddp": "DDP", "horovod": "Horovod"}


# -- What is tried -------------------------------------------------------------------------------


def settings_knob(name: str, *values: bool | float | int) -> Knob:
    """Return a knob that is a setting of a trainer."""
    return Knob(name, tuple(Value(shown(value), {name: value}) for value in values))


def variable_knob(name: str, *values: str) -> Knob:
    """Return a knob that is a variable."""
    return Knob(name, tuple(Value(value, {}, {name: value}) for value in values))


def shown(value: bool | float | int) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}"


def settings_knobs(engine: str) -> list[Knob]:
    """An engine's knobs that are settings. NCCL's own variables are not among them: it chooses
    algorithm and protocol for each size by a model of the machine, and a variable would force one
    on all sizes."""
    return [settings_knob(name, *FLAGS[name].tries) for name in SETTINGS[engine]]


def horovod_knobs(by_mpi: bool, by_nccl: bool, workers: int, hosts: int) -> list[Knob]:
    """Horovod's knobs; `by_mpi`: Open MPI moves the gradients, `by_nccl`: NCCL does."""
    knobs = []
    if by_mpi:
        algorithms = {"recursive doubling": "3", "ring": "4", "segmented ring": "5"}
        if workers >= 4:  # with fewer Open MPI takes another one in its place
            algorithms["Rabenseifner"] = "6"
        prefix = "OMPI_MCA_coll_tuned"
        values = []
        for name, number in algorithms.items():
            variables = {f"{prefix}_use_dynamic_rules": "1"}
            variables[f"{prefix}_allreduce_algorithm"] = number
            if number == "5":  # without a size it does not cut the message
                variables[f"{prefix}_allreduce_algorithm_segmentsize"] = str(MIB)
            values.append(Value(name, {}, variables))
        knobs.append(Knob("MPI's allreduce", tuple(values)))
    if by_nccl and hosts > 1:
        knobs.append(variable_knob("HOROVOD_HIERARCHICAL_ALLREDUCE", "1"))
    sizes = [str(size * MIB) for size in (0, 1, 4, 16, 64)]
    knobs.append(variable_knob("HOROVOD_FUSION_THRESHOLD", *sizes))
    knobs.append(variable_knob("HOROVOD_CYCLE_TIME", "0.1", "0.5", "3.5"))
    knobs += settings_knobs("horovod")
    if by_mpi:
        knobs.append(variable_knob("OMPI_MCA_mpi_yield_when_idle", "0"))
    if by_nccl:
        knobs.append(variable_knob("HOROVOD_NUM_NCCL_STREAMS", "2"))
    knobs.append(variable_knob("HOROVOD_CACHE_CAPACITY", "0", "4096"))
    return knobs


def knobs_for(configuration: Configuration, plan: Plan) -> list[Knob]:
    """Return what is to be tried for a configuration, most promising first."""
    if configuration.engine == "ddp":
        return settings_knobs("ddp")
    workers = max(plan.workers)
    arguments = plan.run(0, plan.cases[0], configuration, workers).arguments
    on_gpus = "--no-cuda" not in arguments and preflight.visible_gpus() > 0
    by_nccl = on_gpus and preflight.horovod_has_nccl()
    by_mpi = not by_nccl and configuration.controller != "gloo" and is_open_mpi()
    hosts = 1 if plan.hosts is None else len(placement(workers, plan.hosts))
    return horovod_knobs(by_mpi, by_nccl, workers, hosts)


def is_open_mpi() -> bool:
    found = shutil.which("mpirun", path=set_variables()["PATH"])
    return found is not None and "Open MPI" in preflight.command_output([found, "--version"], 30)


def free_knobs(
    knobs: Sequence[Knob], configuration: Configuration, plan: Plan, environ: Mapping[str, str]
) -> tuple[list[Knob], list[str]]:
    """Return the knobs that the file may set, and a sentence for each that the user has set by a
    flag or a variable, which would win over the file."""
    case = plan.cases[0]
    words = (*plan.trainer_arguments, *case.flags, *configuration.flags)
    given = {flag_name(word) for word in words}
    set_already = environ.keys() | configuration.variables.keys()
    free, lines = [], []
    for knob in knobs:
        names = {name for value in knob.values for name in (*value.settings, *value.variables)}
        flags = {spelled(name) for value in knob.values for name in value.settings}
        own = sorted(flags & given or {f for f in flags if f"--no-{f[2:]}" in given})
        own += sorted(names & set_already)
        if own:
            lines.append(f"{knob.name} is left as it is: {own[0]} is set already")
        elif flags and (reason := why_refused(knob, configuration, plan)):
            lines.append(f"{knob.name} is left out: {reason}")
        else:
            free.append(knob)
    return free, lines


def why_refused(knob: Knob, configuration: Configuration, plan: Plan) -> str:
    """Return why the trainers do not take a knob beside the plan's flags; "" if they do."""
    candidate = with_knobs(configuration, knob.values[0].on(Knobs()))
    run = plan.run(0, plan.cases[0], candidate, max(plan.workers))
    try:
        read_flags(candidate.engine, run.workers, list(run.arguments), talk=False)
    except recipe.errors.UserError as error:
        return str(error)
    return ""


def with_knobs(configuration: Configuration, knobs: Knobs) -> Configuration:
    """Return the configuration with knobs as flags and variables of its own: other hosts need no
    file for it."""
    flags = list(configuration.flags)
    for name, value in knobs.settings.items():
        flags += [spelled(name)] if value is True else [spelled(name), shown(value)]
    environment = configuration.environment | knobs.variables
    return replace(configuration, flags=tuple(flags), environment=environment)


# -- The plan ------------------------------------------------------------------------------------


def tuning_plan(plan: Plan, options: argparse.Namespace) -> Plan:
    """Return the plan of the search: one configuration of each engine, one training, one number of
    workers. UserError where the flags ask for something else."""
    for name in ("slurm", "block", "until_interval", "null"):
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
    if options.rounds is None:
        options.rounds = TUNING_ROUNDS
    if options.rounds < LEAST_ROUNDS:
        raise UserError(f"--rounds {options.rounds}: give at least {LEAST_ROUNDS}")
    if max(plan.workers) < 2:
        raise UserError("--workers 1: a single worker exchanges nothing; give at least 2")
    if len(plan.cases) > 1:
        names = ", ".join(case.name for case in plan.cases)
        raise UserError(
            f"--tune: the plan has several cases ({names}), and a file of knobs is for one; name "
            "it, as in --case 'NAME=flags'"
        )
    arguments = list(plan.trainer_arguments)
    if "--knobs" in map(flag_name, (*arguments, *plan.cases[0].flags)):
        raise UserError("--knobs among the trainers' flags: --tune begins from the defaults")
    steps = last_value((*arguments, *plan.cases[0].flags), "--max-steps")
    if steps is None:
        arguments += ["--max-steps", str(MAX_STEPS)]
    elif steps.isdecimal() and int(steps) < LEAST_STEPS:
        raise UserError(
            f"--max-steps {steps}: the first steps of a run do not count; give {LEAST_STEPS} or "
            f"more ({MAX_STEPS} without the flag)"
        )
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
        blocks=1,
        phase_steps=0,
        until_interval=None,
        null=False,
        trainer_arguments=tuple(arguments),
    )


# -- Runs ----------------------------------------------------------------------------------------


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
            return images_per_second(target)
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
        speed = images_per_second(target)
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


# -- The search ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """What a search found for one engine."""

    configuration: Configuration
    knobs: Knobs
    tried: tuple[Trial, ...]
    against_defaults: Estimate | None  # speed of the file's knobs over the defaults; None: no knobs
    environment: dict[str, Any]  # environment.json of one of its runs
    other_load: float | None = None  # cores that others kept busy in the median run

    @property
    def holds(self) -> bool:
        """Tell whether the gain was there again in the runs that had no part in the choice."""
        return self.against_defaults is not None and is_gain(self.against_defaults)


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


def load_line(found: Found) -> str:
    """Say that others used the machine meanwhile, if they did so more than a little."""
    cores = found.environment.get("cores") or os.cpu_count() or 1
    if found.other_load is None or found.other_load <= BUSY_SHARE * cores:
        return ""
    return (
        f"other processes kept {found.other_load:.1f} of {cores} cores busy in the median run: "
        "while they rest, smaller gains can be shown"
    )


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


# -- What is told --------------------------------------------------------------------------------


def ratio_words(estimate: Estimate) -> str:
    """Say a ratio with its interval and rounds."""
    interval = ""
    if estimate.low is not None and estimate.high is not None:
        interval = f", 95 % interval {estimate.low:.3f} to {estimate.high:.3f}"
    return f"{estimate.ratio:.3f} times the speed{interval}, {estimate.blocks} rounds"


def trial_lines(trials: Sequence[Trial]) -> list[str]:
    """Return the lines that tell what became of a knob's values."""
    lines = [f"  {trials[0].knob}"] if trials else []
    for trial in trials:
        if trial.failed or trial.estimate is None:
            what = "a run failed: left out"
        else:
            what = f"{ratio_words(trial.estimate)}: {'kept' if trial.kept else 'not kept'}"
        lines.append(f"    {trial.value.shown:<18} {what}")
    return lines


def found_record(found: Found) -> dict[str, Any]:
    """Return all that was tried for one engine, for a reader of tuned.json."""
    check = found.against_defaults
    return {
        "configuration": found.configuration.name,
        "settings": found.knobs.settings,
        "variables": found.knobs.variables,
        "against_defaults": check and estimate_record(check),
        "holds": found.holds,
        "other_load": found.other_load,
        "tried": [
            {
                "knob": trial.knob,
                "value": trial.value.shown,
                "settings": dict(trial.value.settings),
                "variables": dict(trial.value.variables),
                "estimate": trial.estimate and estimate_record(trial.estimate),
                "failed": trial.failed,
                "kept": trial.kept,
            }
            for trial in found.tried
        ],
    }


def estimate_record(estimate: Estimate) -> dict[str, Any]:
    return {
        "ratio": estimate.ratio,
        "low": estimate.low,
        "high": estimate.high,
        "ratios": list(estimate.ratios),
    }


def write_file(path: Path, found: Sequence[Found], plan: Plan, argv: Sequence[str]) -> None:
    """Write the file of knobs. Tables of an engine that was not tuned now are taken over from the
    file that is there, which is kept as FILE.old."""
    kept: dict[str, Knobs] = {}
    if path.exists():
        tuned = {one.configuration.engine for one in found}
        try:
            old = read_all_knobs(path)
        except recipe.errors.UserError as error:
            print(f"warning: {error}; nothing is taken over from it")
            old = {}
        kept = {engine: knobs for engine, knobs in old.items() if engine not in tuned}
        aside = path.with_name(f"{path.name}.old")
        if aside.exists():  # which may have been written by hand
            aside = path.with_name(f"{path.name}.old-{utc_stamp()}")
        shutil.copyfile(path, aside)
        print(f"the file that was there is now {aside}")
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, file_text(found, kept, plan, argv))
    read_all_knobs(path)


def file_text(
    found: Sequence[Found], kept: Mapping[str, Knobs], plan: Plan, argv: Sequence[str]
) -> str:
    """Return the text of a file of knobs: where they come from, what each gained, the tables."""
    where = next((one.environment for one in found if one.environment), {})
    hosts = where.get("hosts") or [platform.node()]
    versions = {
        "torch": where.get("torch"),
        "Horovod": next((v for one in found if (v := one.environment.get("horovod"))), None),
        "MPI": next((v for one in found if (v := one.environment.get("mpi"))), None),
    }
    told = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    facts = [
        f"Knobs of the two engines, for the trainers' --knobs. Found {utc_now()[:10]} by",
        f"    {shlex.join(['python', script_path(), *argv])}",
        f"with {max(plan.workers)} workers on {len(hosts)} host(s) ({', '.join(hosts)}), "
        f"{where.get('device_name', 'a device that is not known')}; {told}.",
        "Each gain is a ratio of speeds, value / best before it, with its 95 % interval. On "
        "another machine or network, with another model or number of workers, other values are "
        "faster: make the file anew. Flags and variables of the environment win over it.",
    ]
    blocks = ["\n".join(line for fact in facts for line in commented(fact))]
    for one in found:
        engine = one.configuration.engine
        lines = [f"{ENGINES[engine]} ({one.configuration.name})"]
        for trial in one.tried:
            if trial.kept and trial.estimate is not None:
                lines.append(
                    f"    {trial.knob}, {trial.value.shown}: {ratio_words(trial.estimate)}"
                )
        if one.against_defaults is None:
            lines.append("    nothing was shown to be faster than the defaults")
        else:
            lines.append(f"    all against the defaults: {ratio_words(one.against_defaults)}")
        if line := load_line(one):
            lines.append(f"    {line}")
        if one.against_defaults is not None and not one.holds:
            lines.append("    which shows no gain: take the # away to use them all the same")
        tables = knobs_text({engine: one.knobs}).rstrip("\n")
        if not one.holds:
            tables = "\n".join(f"# {line}".rstrip() for line in tables.splitlines())
        head = "\n".join(line for text in lines for line in commented(text))
        blocks.append(head if one.knobs == Knobs() else f"{head}\n{tables}")
    for engine, knobs in kept.items():
        blocks.append(f"# As it was in the file before\n{knobs_text({engine: knobs})}".rstrip("\n"))
    return "\n\n".join(blocks) + "\n"


def commented(text: str) -> list[str]:
    """Return a text as lines of a comment; one that is indented is a command or a row, and stays
    whole."""
    if text.startswith(" "):
        return [f"# {line}" for line in text.splitlines()]  # quoted words may have several
    return textwrap.wrap(text, 98, initial_indent="# ", subsequent_indent="# ")


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
