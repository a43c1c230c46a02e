"""`run.py --tune FILE`: find the settings (knobs) with which each engine exchanges gradients
fastest on this machine, and write them into a file for both trainers (`--knobs FILE`).

The search goes knob by knob, the most promising first. The values of a knob and the best setting so
far are the configurations of an ordinary comparison by turns, of `--rounds` blocks, in a folder of
its own. The fastest value with a proven gain is kept. At the end all kept values are compared with
the defaults in new blocks, because the blocks that selected them overestimate their gain. If that
shows no gain, the values are written as comments.
"""

import os
import platform
import shlex
from pathlib import Path
from types import SimpleNamespace

from msgspec.structs import replace

from compare.evidence.paired import Estimate
from compare.plan.configurations import Configuration
from compare.plan.environment import path_from_here
from compare.plan.plan import OwnConfiguration, Plan, Run, Words
from compare.plan.plan_file import write_plan
from compare.running import checks
from compare.running.comparison import checked_record, measure, measured, resumed
from compare.running.launch import print_line, utc_now
from compare.running.scheduler import MeasurementError
from recipe.errors import UserError, refuse
from recipe.files import replace_file
from recipe.settings.config import read_flags
from recipe.settings.flags import FLAGS, flag_name, spelled, without_flag
from recipe.settings.knobs import SETTINGS, Knobs, knobs_text

Values = dict[str, Knobs]  # the values of a knob by name, without the engine's own default
TUNING_ROUNDS = 5
MIB = 2**20
ALGORITHMS = {"recursive-doubling": "3", "ring": "4", "segmented-ring": "5", "Rabenseifner": "6"}
# Variables that select one of them in Open MPI. Without a segment size the segmented ring does not
# divide the message.
MPI_VARIABLES = [f"OMPI_MCA_coll_tuned_{name}" for name in (
    "use_dynamic_rules", "allreduce_algorithm", "allreduce_algorithm_segmentsize",
)]  # fmt: skip
LEAST_GAIN = 1.01  # speed ratio; a smaller gain is not worth a line in the file
NO_FLAGS = (
    "measure", "until_interval", "minutes", "null", "blocks", "new", "dry_run",
)  # fmt: skip


def tuning_plan(plan: Plan, options: SimpleNamespace) -> Plan:
    """Return the plan of the search: one configuration of each engine, one training, one number of
    workers. UserError if the flags ask for something else."""
    options.tuning_rounds = options.tuning_rounds or TUNING_ROUNDS
    words = [*plan.trainer_arguments, *(w for case in plan.case.values() for w in case.flags)]
    known = [plan.known()[name] for name in plan.configurations]
    # The first of each engine, which in the plan tuned-against-tuned is the untuned one.
    chosen = {one.engine: one.name for one in reversed(known)}
    rest = [one.name for one in known if one.name not in chosen.values()]
    refuse(
        *(
            (
                getattr(options, name),
                f"--{name.replace('_', '-')}: cannot be combined with --tune; "
                "leave it out (--rounds sets the number of blocks, --out the folder of a new "
                "search)",
            )
            for name in NO_FLAGS
        ),
        (
            options.tune.exists(),
            f"--tune {options.tune}: exists already; name a new file, such as "
            "knobs.toml, or move the old one away",
        ),
        (options.tuning_rounds < 3, f"--rounds {options.tuning_rounds}: give at least 3"),
        (max(plan.workers) < 2, "--workers 1: a single worker exchanges nothing; give at least 2"),
        (
            len(plan.cases) > 1,
            "--tune: the plan has several cases ("
            f"{', '.join(plan.cases)}), but a file of knobs is for one; name "
            "it, as in --case 'NAME=flags'",
        ),
        (
            "--knobs" in map(flag_name, words),
            "--knobs among the trainers' flags: --tune begins from the defaults; leave it out",
        ),
        (
            chosen.keys() - SETTINGS.keys(),
            "--tune: there are no settings of "
            f"{', '.join(chosen.keys() - SETTINGS.keys())} to tune; leave it out",
        ),
        (
            options.configurations and rest,
            f"--configurations: --tune takes one of each engine; leave out {' '.join(rest)}",
        ),
    )
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
        no_phases=True,
        null=False,
        control=None,
        order_seed=plan.seed,
    )


def tune(plan: Plan, folder: Path, options: SimpleNamespace, argv: list[str]) -> int:
    """Search for each engine's best knobs and write the file; return the exit code. `plan` comes
    from `tuning_plan`."""
    parts = [
        commented(
            f"Knobs of the two engines, for the trainers' --knobs. Found {utc_now()[:10]} by",
            f"    {shlex.join(['python', path_from_here('compare/run.py'), *argv])}",
            f"with {max(plan.workers)} workers on {plan.hosts or platform.node()}, in {folder}.",
            "Each gain is a speed ratio, value / best before it, with its 95 % interval. On",
            "another machine or network, with another model or number of workers, other values are",
            "faster: make the file anew. Flags and environment variables override it.",
        )
    ]
    parts += [
        tune_engine(c, plan, folder / c.engine, options.tuning_rounds) for c in plan.members()
    ]
    options.tune.parent.mkdir(parents=True, exist_ok=True)
    replace_file(options.tune, "\n\n".join(parts) + "\n")
    print(
        f"\nwritten: {options.tune}. To train with it, add  --knobs {options.tune}\n"
        "To compare the tuned engines, repeat this command without --tune and add that flag to the "
        "trainers' flags"
    )
    return 0


def tune_engine(one: Configuration, plan: Plan, folder: Path, rounds: int) -> str:
    """Find one engine's best knobs, compare them with the defaults, and return the engine's part of
    the file."""
    best, comments = Knobs(), [one.name]
    for knob, values in free_knobs(one, plan).items():
        tried = {
            name: Knobs(best.settings | more.settings, best.variables | more.variables)
            for name, more in values.items()
        }
        speeds = compare(one, plan, {"as-before": best, **tried}, rounds, folder / knob)
        if gains := {name: speed.ratio for name, speed in speeds.items() if is_gain(speed)}:
            winner = max(gains, key=lambda name: gains[name])
            best = tried[winner]
            comments.append(f"{knob} {winner}: {ratio_words(speeds[winner])}")
            print(f"  kept: {winner}")
    if best == Knobs():
        return commented(*comments, "nothing was shown to be faster than the defaults")
    both = {"defaults": Knobs(), "tuned": best}
    check = compare(one, plan, both, rounds, folder / "against-defaults").get("tuned")
    comments.append(f"all against the defaults: {ratio_words(check) if check else 'failed'}")
    tables = knobs_text({one.engine: best}).rstrip()
    if not check or not is_gain(check):
        comments.append("no gain was proven; remove the # to use these values all the same")
        tables = commented(tables)
    return f"{commented(*comments)}\n{tables}"


def is_gain(estimate: Estimate) -> bool:
    """Return whether a value is proven to be faster, by at least LEAST_GAIN."""
    return estimate.ratio >= LEAST_GAIN and (estimate.low or 0.0) > 1


def ratio_words(one: Estimate) -> str:
    """Return a speed ratio and its interval in words; `--rounds` blocks always have an interval."""
    return f"{one.ratio:.3f} times the speed, 95 % interval {one.low:.3f} to {one.high:.3f}"


def commented(*texts: str) -> str:
    """Return texts as comment lines; a text may have several lines."""
    return "\n".join(f"# {line}".rstrip() for text in texts for line in text.splitlines())


def compare(
    one: Configuration, plan: Plan, candidates: Values, blocks: int, folder: Path
) -> dict[str, Estimate]:
    """Return the speed ratio of each candidate to the first, without candidates that fail. This is
    an ordinary comparison of `one` with each candidate's knobs, and can be interrupted."""
    first, *others = candidates
    if not others:
        return {}
    base = plan.configuration[one.name].base if one.name in plan.configuration else one.name
    with_knobs = {
        name: OwnConfiguration(
            base, Words((*one.flags, *knob_flags(knobs))), one.environment | knobs.variables
        )
        for name, knobs in candidates.items()
    }
    place = folder / f"{len(others)}-values"
    place.mkdir(parents=True, exist_ok=True)
    asked = replace(
        plan,
        configurations=tuple(with_knobs),
        configuration=with_knobs,
        judged_pairs=tuple((name, first) for name in others),
        blocks=blocks,
    )
    asked = resumed(asked, place)
    write_plan(place / "plan.json", checked_record(asked, place))
    print_line(f"  {folder.relative_to(folder.parents[1])}: {', '.join(others)}")
    try:
        measure(asked, place)
    except MeasurementError as error:
        print_line(f"    {error}")
        problem = f"{one.name}: the best setting so far failed; its output is in {place}"
        if error.side in (None, first):
            raise UserError(problem) from error
        rest = {name: knobs for name, knobs in candidates.items() if name != error.side}
        return compare(one, plan, rest, blocks, folder)
    [group] = measured(asked, place)
    speeds = {name: group.estimates[name, first] for name in others}
    for name, estimate in speeds.items():
        print(f"  {folder.name} {name}: {ratio_words(estimate)}")
    return speeds


# The knobs, and how they reach a run.


def knobs_for(run: Run) -> dict[str, Values]:
    """Return the knobs and values to try for a run's engine, the most promising first.

    NCCL's own variables are left out: NCCL chooses algorithm and protocol for each size by a model
    of the machine, and a variable would force one choice on all sizes.
    """
    settings = {
        name: {str(value).lower(): Knobs({name: value}) for value in FLAGS[name].tries}
        for name in SETTINGS[run.configuration.engine]
        if FLAGS[name].tries
    }
    if run.configuration.engine == "ddp":
        return settings
    on_gpus = "--no-cuda" not in run.arguments and checks.visible_gpus() > 0
    by_nccl = on_gpus and checks.horovod_facts().get("NCCL", False)
    is_open_mpi = "Open MPI" in (checks.mpi_version() or "")
    over_gloo = "gloo" in (run.configuration.controller, run.configuration.transport)
    by_mpi = is_open_mpi and not by_nccl and not over_gloo
    # With fewer workers Open MPI uses another algorithm instead of Rabenseifner's.
    algorithms = [name for name in ALGORITHMS if name != "Rabenseifner" or run.workers >= 4]
    variables = {
        "HOROVOD_HIERARCHICAL_ALLREDUCE": ["1"] if by_nccl and run.leaves_this_host else [],
        "HOROVOD_FUSION_THRESHOLD": [str(size * MIB) for size in (0, 1, 4, 16, 64)],
        "HOROVOD_CYCLE_TIME": ["0.1", "0.5", "3.5"],
        **{name: [] for name in settings},  # fixes their place in the order
        # The GPU's stream waits for a message, instead of a CPU thread.
        "HOROVOD_ENABLE_ASYNC_COMPLETION": ["1"] if by_nccl else [],
        "OMPI_MCA_mpi_yield_when_idle": ["0"] if by_mpi else [],
        "HOROVOD_NUM_NCCL_STREAMS": ["2"] if by_nccl else [],
        "HOROVOD_CACHE_CAPACITY": ["0", "4096"],
    }
    knobs = {
        "MPI-allreduce": {
            name: Knobs(
                {}, dict(zip(MPI_VARIABLES, ("1", ALGORITHMS[name], str(MIB)), strict=True))
            )
            for name in algorithms
            if by_mpi
        }
    }
    knobs |= {name: {v: Knobs({}, {name: v}) for v in tried} for name, tried in variables.items()}
    return {name: values for name, values in (knobs | settings).items() if values}


def free_knobs(one: Configuration, plan: Plan) -> dict[str, Values]:
    """Return the knobs that the file may set, and print the others with the reason: the user has
    set the knob by a flag or a variable, which would override the file, or the trainers refuse it.
    """
    run = plan.run(0, plan.cases[0], one, max(plan.workers))
    given = {flag_name(word).replace("--no-", "--") for word in run.arguments}
    free = dict[str, Values]()
    for knob, values in knobs_for(run).items():
        [first, *_] = values.values()
        names = {*first.variables, *map(spelled, first.settings)}  # the same for all values
        if taken := names & {*given, *os.environ, *one.variables}:
            print(f"{one.name}: {knob} is not tuned: {min(taken)} is already set")
            continue
        try:
            read_flags(one.engine, run.workers, [*run.arguments, *knob_flags(first)], talk=False)
            free[knob] = values
        except UserError as error:
            print(f"{one.name}: {knob} is not tuned: {error}")
    return free


def knob_flags(knobs: Knobs) -> list[str]:
    """Return knobs' settings as flags, so that other hosts need no file."""
    return [
        word
        for name, value in knobs.settings.items()
        for word in (spelled(name), *(() if value is True else [f"{value:g}"]))
    ]
