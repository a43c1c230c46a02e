"""What `run.py --tune FILE` does: find, on this machine, what makes each engine's exchange of
gradients faster, and write it into a file that both trainers read (`--knobs FILE`).

Knob by knob, those that promise most first. The values of a knob, and the best so far, are the
configurations of an ordinary comparison by turns, with a folder of its own: first in a few blocks,
then those that looked faster in `--rounds` new ones. The best that is proven is kept. At the end
all of it is compared with the defaults: what does not hold there is written as a comment.
"""

import argparse
import os
import platform
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from compare.evidence.paired import Estimate
from compare.evidence.records import ENGINES
from compare.evidence.run_folder import read_object
from compare.plan.configurations import Configuration
from compare.plan.hosts import placement
from compare.plan.options import SCRIPT, TUNING_ROUNDS
from compare.plan.plan import OwnConfiguration, Plan, Words
from compare.plan.plan_file import plan_words
from compare.plan.record import write_plan
from compare.plan.sources import path_from_here
from compare.running import checks
from compare.running.comparison import checked_record, measure, resumed
from compare.running.launch import print_line, utc_now, utc_stamp
from compare.running.measurement import measured
from compare.running.sides import MeasurementError
from recipe.config import read_flags
from recipe.errors import UserError
from recipe.files import replace_file
from recipe.flags import FLAGS, flag_name, spelled, without_flag
from recipe.knobs import SETTINGS, Knobs, knobs_text, read_all_knobs

Values = dict[str, Knobs]  # by their names; the engine's own default is not among them
MIB = 2**20
ALGORITHMS = {"recursive-doubling": "3", "ring": "4", "segmented-ring": "5", "Rabenseifner": "6"}
LEAST_GAIN = 1.01  # less is not worth a line in the file
LOOK_BLOCKS = 2  # before values that do not look faster are given up
NO_FLAGS = ("block", "measure", "until_interval", "minutes", "null", "blocks")


def tuning_plan(plan: Plan, options: argparse.Namespace) -> Plan:
    """Return the plan of the search: one configuration of each engine, one training, one number of
    workers. UserError where the flags ask for something else."""
    options.rounds = options.rounds or TUNING_ROUNDS
    words = (*plan.trainer_arguments, *plan.cases[0].flags)
    known = [plan.known()[name] for name in plan.configurations]
    chosen: dict[str, str] = {}
    # A plan for tuned against tuned has both: it is the plain one that is to be tuned.
    for one in sorted(known, key=lambda c: bool(c.flags or c.environment)):
        chosen.setdefault(one.engine, one.name)
    rest = [one.name for one in known if one.name not in chosen.values()]
    for is_wrong, told in (
        *((getattr(options, name), f"--{name.replace('_', '-')}: does not go together with --tune, "
           "which runs here, until it is done; leave it out (--rounds says how many blocks)")
          for name in NO_FLAGS),
        (options.tune.is_dir(), f"--tune {options.tune}: is a folder; name a file, as in "
         f"{options.tune / 'knobs.toml'}"),
        (options.rounds < 3, f"--rounds {options.rounds}: give at least 3"),
        (max(plan.workers) < 2, "--workers 1: a single worker exchanges nothing; give at least 2"),
        (len(plan.cases) > 1, "--tune: the plan has several cases ("
         f"{', '.join(case.name for case in plan.cases)}), and a file of knobs is for one; name "
         "it, as in --case 'NAME=flags'"),
        ("--knobs" in map(flag_name, words),
         "--knobs among the trainers' flags: --tune begins from the defaults"),
        (chosen.keys() - SETTINGS.keys(), "--tune: has no settings of "
         f"{', '.join(chosen.keys() - SETTINGS.keys())} to tune; leave it out"),
        (options.configurations and rest,
         f"--configurations: --tune takes one of each engine; leave out {' '.join(rest)}"),
    ):  # fmt: skip
        if is_wrong:
            raise UserError(told)
    return replace(
        plan,
        configurations=tuple(one.name for one in known if one.name in chosen.values()),
        configuration={
            name: replace(own, flags=Words(without_flag(own.flags, "--knobs")))
            for name, own in plan.configuration.items()
        },
        workers=(max(plan.workers),),
        judged_pairs=(),
        measure="turns",
        full_runs=0,
        phase_steps=0,
        null=False,
        order_seed=plan.seed,
    )


@dataclass
class Found:
    """What a search found for one engine."""

    configuration: Configuration
    knobs: Knobs = field(default_factory=Knobs)
    gains: list[str] = field(default_factory=list)  # a line for each knob that was kept
    outcome: str = "nothing was shown to be faster than the defaults"
    holds: bool = False  # the gain was there again in blocks that had no part in the choice


def is_gain(estimate: Estimate) -> bool:
    """Tell whether a value is proven to be faster, by more than nothing to speak of."""
    return estimate.ratio >= LEAST_GAIN and estimate.low is not None and estimate.low > 1


def ratio_words(one: Estimate) -> str:
    """Say a ratio with its interval and blocks."""
    interval = f", 95 % interval {one.low:.3f} to {one.high:.3f}" if one.low is not None else ""
    return f"{one.ratio:.3f} times the speed{interval}, {one.blocks} blocks"


def merged(knobs: Knobs, more: Knobs) -> Knobs:
    """Return `knobs` with `more` on top."""
    return Knobs({**knobs.settings, **more.settings}, {**knobs.variables, **more.variables})


def tune(plan: Plan, folder: Path, options: argparse.Namespace, argv: list[str]) -> int:
    """Search for each engine's knobs and write the file; return the exit code. `plan` is of
    `tuning_plan`."""
    if strange := {child.name for child in folder.iterdir()} - {"lock", *SETTINGS}:
        raise UserError(f"{folder} holds something else than a search ({strange.pop()}): take "
                        "another --out DIR")  # fmt: skip
    for engine in SETTINGS if options.new else ():
        shutil.rmtree(folder / engine, ignore_errors=True)
    print(f"what makes the exchange of gradients faster here, into {options.tune}; runs: {folder}")
    found = [tune_engine(c, plan, folder / c.engine, options.rounds) for c in plan.members()]
    environments = [read_object(path) for path in sorted(folder.glob("*/**/environment.json"))]
    write_file(options.tune, found, plan, head_of(plan, argv, environments))
    print(f"\nwritten: {options.tune}. To train with it:  --knobs {options.tune}")
    if len(found) > 1:
        print(f"to compare tuned with tuned:\n    {comparison_command(plan, options.tune)}")
    return 0


def tune_engine(one: Configuration, plan: Plan, folder: Path, rounds: int) -> Found:
    """Find one engine's knobs, and measure them once more against the defaults."""
    found, (knobs, lines) = Found(one), free_knobs(one, plan)
    print(f"\n{ENGINES[one.engine]} ({one.name}, {max(plan.workers)} workers)")
    print("".join(f"  {line}\n" for line in lines), end="")
    for knob, values in knobs.items():
        best, told = found.knobs, dict[str, Estimate]()
        for blocks in (LOOK_BLOCKS, rounds):
            tried = {name: merged(best, value) for name, value in values.items()}
            place = folder / knob / f"{blocks}-blocks"
            told = compare(one, plan, {"as-before": best, **tried}, blocks, place)
            values = {name: value for name, value in values.items()
                      if name in told and told[name].ratio > 1}  # fmt: skip
            if not values:
                break
        proven = [name for name in values if is_gain(told[name])]
        winner = max(proven, key=lambda name: told[name].ratio, default=None)
        for name, estimate in told.items():
            kept = "kept" if name == winner else "not kept"
            print(f"  {knob} {name}: {ratio_words(estimate)}: {kept}")
        if winner:
            found.knobs = merged(best, values[winner])
            found.gains.append(f"{knob}, {winner}: {ratio_words(told[winner])}")
    if found.gains:
        both = {"defaults": Knobs(), "tuned": found.knobs}
        if check := compare(one, plan, both, rounds, folder / "against-defaults").get("tuned"):
            found.holds = is_gain(check)
            found.outcome = f"all against the defaults: {ratio_words(check)}"
        if not found.holds:
            found.outcome += "; no gain: take the # away to use it all the same"
    print(f"  {found.outcome}")
    return found


def compare(
    one: Configuration, plan: Plan, candidates: Mapping[str, Knobs], blocks: int, folder: Path
) -> dict[str, Estimate]:
    """Return the speed of each candidate over that of the first, without those that fail: by an
    ordinary comparison of `one` with each of these knobs, which can be interrupted."""
    base = plan.configuration[one.name].base if one.name in plan.configuration else one.name
    while True:
        own = {
            name: OwnConfiguration(
                base, Words((*one.flags, *knob_flags(knobs))), one.environment | knobs.variables
            )
            for name, knobs in candidates.items()
            if not (folder / f"{name}.failed").exists()
        }
        first, *others = own
        if not others:
            return {}
        pairs = tuple((name, first) for name in others)
        place = folder / f"{len(others)}-values"
        place.mkdir(parents=True, exist_ok=True)
        asked = replace(plan, configurations=tuple(own), configuration=own, judged_pairs=pairs,
                        blocks=blocks)  # fmt: skip
        asked = resumed(asked, place)
        write_plan(place / "plan.json", checked_record(asked, place))
        print_line(f"  {folder.relative_to(folder.parents[1])}: {', '.join(others)}")
        try:
            asked, failed = measure(asked, place)
            names = [run.configuration.name for run in failed]
        except MeasurementError as error:
            print_line(f"    {error}")
            names = [error.side] if error.side else [first]
        if not names:
            [group] = measured(asked, place)
            return {name: group.estimates[name, first] for name in others}
        if first in names:
            raise UserError(f"{one.name}: what was best so far failed; its output is in {place}")
        for name in names:
            (folder / f"{name}.failed").touch()


def dry_tune_lines(plan: Plan, rounds: int) -> list[str]:
    """Return what would be tried, and at most how many blocks it takes."""
    lines = []
    for one in plan.members():
        knobs, left_out = free_knobs(one, plan)
        blocks = len(knobs) * (LOOK_BLOCKS + rounds) + rounds
        lines.append(f"{ENGINES[one.engine]} ({one.name}): at most {blocks} blocks")
        lines += [f"    {name}: {', '.join(values)}" for name, values in knobs.items()]
        lines += [f"    {line}" for line in left_out]
    return lines


def comparison_command(plan: Plan, path: Path) -> str:
    """Return the command that compares the tuned engines on the training they were tuned for."""
    arguments = Words((*plan.trainer_arguments, *plan.cases[0].flags, "--knobs", str(path)))
    steps = Plan().phase_steps
    plan = replace(plan, blocks=None, case={}, phase_steps=steps, trainer_arguments=arguments)
    return shlex.join(["python", path_from_here(SCRIPT), *plan_words(plan)])


def write_file(path: Path, found: Sequence[Found], plan: Plan, head: Sequence[str]) -> None:
    """Write the file of knobs. Tables of an engine that was not tuned now are taken over from the
    file that is there, which is kept as FILE.old."""
    kept: dict[str, Knobs] = {}
    if path.exists():
        try:
            kept = read_all_knobs(path)
        except UserError as error:
            print(f"warning: {error}; nothing is taken over from it")
        aside = path.with_name(f"{path.name}.old")
        if aside.exists():  # which may have been written by hand
            aside = path.with_name(f"{path.name}.old-{utc_stamp()}")
        shutil.copyfile(path, aside)
        print(f"the file that was there is now {aside}")
    blocks = [commented(*head)]
    for one in found:
        engine = one.configuration.engine
        kept.pop(engine, None)
        told = [f"{ENGINES[engine]} ({one.configuration.name})", *one.gains, one.outcome]
        tables = knobs_text({engine: one.knobs}) if one.gains else ""
        blocks.append(f"{commented(*told)}\n{tables if one.holds else commented(tables)}")
    for engine, knobs in kept.items():
        blocks.append(f"# As it was in the file before\n{knobs_text({engine: knobs})}")
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, "\n\n".join(block.rstrip() for block in blocks) + "\n")
    read_all_knobs(path)


def head_of(
    plan: Plan, argv: Sequence[str], environments: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Return what stands first in the file: where the knobs come from. `environments` are those of
    the runs."""
    facts: dict[str, Any] = {}
    for environment in environments:
        facts |= {name: value for name, value in environment.items() if value}
    hosts = facts.get("hosts", [platform.node()])
    names = {"torch": "torch", "horovod": "Horovod", "mpi": "MPI"}
    told = [f"{shown} {facts[name]}" for name, shown in names.items() if name in facts]
    return [
        f"Knobs of the two engines, for the trainers' --knobs. Found {utc_now()[:10]} by",
        f"    {shlex.join(['python', path_from_here(SCRIPT), *argv])}",
        f"with {max(plan.workers)} workers on {len(hosts)} host(s) ({', '.join(hosts)}), "
        f"{facts.get('device_name', 'a device that is not known')}; {', '.join(told)}.",
        "Each gain is a ratio of speeds, value / best before it, with its 95 % interval. On",
        "another machine or network, with another model or number of workers, other values are",
        "faster: make the file anew. Flags and variables of the environment win over it.",
    ]


def commented(*texts: str) -> str:
    """Return texts as lines of a comment; quoted words may have several."""
    return "\n".join(f"# {line}".rstrip() for text in texts for line in text.splitlines())


# The knobs, and how a run gets them.


def shown(value: bool | float | int) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}"


def settings_knobs(engine: str) -> dict[str, Values]:
    """An engine's knobs that are settings. NCCL's own variables are not among them: it chooses
    algorithm and protocol for each size by a model of the machine, and a variable would force one
    on all sizes."""
    return {
        name: {shown(value): Knobs({name: value}) for value in FLAGS[name].tries}
        for name in SETTINGS[engine]
        if FLAGS[name].tries
    }


def mpi_algorithm(number: str) -> Knobs:
    """Open MPI's variables for one of its all-reduces."""
    prefix = "OMPI_MCA_coll_tuned"
    variables = {f"{prefix}_use_dynamic_rules": "1", f"{prefix}_allreduce_algorithm": number}
    if number == "5":  # without a size it does not cut the message
        variables[f"{prefix}_allreduce_algorithm_segmentsize"] = str(MIB)
    return Knobs({}, variables)


def horovod_knobs(by_mpi: bool, by_nccl: bool, workers: int, hosts: int) -> dict[str, Values]:
    """Horovod's knobs; `by_mpi`: Open MPI moves the gradients, `by_nccl`: NCCL does."""
    # With fewer workers Open MPI takes another algorithm in Rabenseifner's place.
    algorithms = [name for name in ALGORITHMS if name != "Rabenseifner" or workers >= 4]
    sizes = [str(size * MIB) for size in (0, 1, 4, 16, 64)]
    hierarchical, idle = "HOROVOD_HIERARCHICAL_ALLREDUCE", "OMPI_MCA_mpi_yield_when_idle"
    variables = {
        hierarchical: ["1"] if by_nccl and hosts > 1 else [],
        "HOROVOD_FUSION_THRESHOLD": sizes,
        "HOROVOD_CYCLE_TIME": ["0.1", "0.5", "3.5"],
        **{name: [] for name in settings_knobs("horovod")},  # their place in the order
        idle: ["0"] if by_mpi else [],
        "HOROVOD_NUM_NCCL_STREAMS": ["2"] if by_nccl else [],
        "HOROVOD_CACHE_CAPACITY": ["0", "4096"],
    }
    knobs = {"MPI-allreduce": {n: mpi_algorithm(ALGORITHMS[n]) for n in algorithms if by_mpi}}
    knobs |= {name: {v: Knobs({}, {name: v}) for v in tried} for name, tried in variables.items()}
    knobs |= settings_knobs("horovod")
    return {name: values for name, values in knobs.items() if values}


def knobs_for(configuration: Configuration, plan: Plan) -> dict[str, Values]:
    """Return what is to be tried for a configuration, most promising first."""
    if configuration.engine == "ddp":
        return settings_knobs("ddp")
    workers = max(plan.workers)
    arguments = plan.run(0, plan.cases[0], configuration, workers).arguments
    on_gpus = "--no-cuda" not in arguments and checks.visible_gpus() > 0
    by_nccl = on_gpus and checks.horovod_facts().get("NCCL", False)
    is_open_mpi = "Open MPI" in (checks.mpi_version() or "")
    by_mpi = not by_nccl and configuration.controller != "gloo" and is_open_mpi
    hosts = 1 if plan.hosts is None else len(placement(workers, plan.hosts))
    return horovod_knobs(by_mpi, by_nccl, workers, hosts)


def free_knobs(configuration: Configuration, plan: Plan) -> tuple[dict[str, Values], list[str]]:
    """Return the knobs that the file may set, and a sentence for each that it may not: the user has
    set it by a flag or a variable, which would win, or the trainers refuse it."""
    run = plan.run(0, plan.cases[0], configuration, max(plan.workers))
    given = {flag_name(word) for word in run.arguments}
    free, lines = dict[str, Values](), []
    for knob, values in knobs_for(configuration, plan).items():
        flags = {spelled(name) for value in values.values() for name in value.settings}
        names = {name for value in values.values() for name in value.variables}
        own = sorted(f for f in flags if {f, f"--no-{f[2:]}"} & given)
        own += sorted(names & (os.environ.keys() | configuration.variables.keys()))
        if own:
            lines.append(f"{knob} is left as it is: {own[0]} is set already")
            continue
        words = [*run.arguments, *knob_flags(next(iter(values.values())))]
        try:
            read_flags(configuration.engine, run.workers, words, talk=False)
            free[knob] = values
        except UserError as error:
            lines.append(f"{knob} is left out: {error}")
    return free, lines


def knob_flags(knobs: Knobs) -> list[str]:
    """Return knobs' settings as flags: other hosts need no file for it."""
    pairs = [(spelled(name), value) for name, value in knobs.settings.items()]
    return [w for flag, v in pairs for w in ([flag] if v is True else [flag, shown(v)])]
