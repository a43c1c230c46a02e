"""What in a plan is not valid, beside the types and bounds of its fields."""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from compare.plan.configurations import CONFIGURATIONS
from compare.plan.environment import RUN_MARK
from compare.plan.hosts import SLURM, read_hosts
from compare.plan.plan import ABLATION_STEPS, RESERVED_FLAGS, Plan
from recipe.errors import UserError
from recipe.flags import flag_name, last_value

# In strong scaling, flags that the plan sets itself.
OF_GLOBAL_BATCH = {
    "--batch-size": "--global-batch-size sets it",
    "--base-lr": "--global-learning-rate sets it",
    "--use-adasum": "its learning rate follows another rule",
}


def near_match(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about a name that is not known."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(names)}"


def check_plan(plan: Plan) -> None:
    """Raise UserError if the plan is invalid."""
    if problem := next(problems(plan), None):
        raise UserError(problem)


def problems(plan: Plan) -> Iterator[str]:
    """Yield what is wrong with a plan, in the words of the command line; what comes later may rely
    on what was checked before."""
    yield from wrong_names(plan)
    if not plan.workers:
        yield "--workers: give a positive whole number"
    if plan.phase_steps and plan.phase_steps < 2 * ABLATION_STEPS:
        yield (
            f"--phase-steps {plan.phase_steps}: stretches of {ABLATION_STEPS} steps with and "
            f"without communication alternate; give {2 * ABLATION_STEPS} or more, or 0 for none"
        )
    if plan.measure == "runs" and plan.full_runs != 1:
        yield (
            f"--full-runs {plan.full_runs}: with --measure runs all runs are full ones; give "
            "--blocks, or leave it out"
        )
    yield from wrong_trainer_flags(plan)
    yield from wrong_scaling(plan)
    yield from wrong_hosts(plan)


def wrong_names(plan: Plan) -> Iterator[str]:
    """Yield what is wrong with the names of configurations, cases and pairs."""
    for kind, names in (("configuration", plan.configuration), ("case", plan.case)):
        for name in names:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) or ".failed-" in name:
                yield (
                    f"{kind} {name!r}: a folder will bear this name; use letters, digits, '-', '_' "
                    "and '.'"
                )
    for name, own in plan.configuration.items():
        if name in CONFIGURATIONS:
            yield (
                f"configuration {name!r} is a ready one: give yours another name, as in "
                f"'{name}-tuned'"
            )
        if own.base not in CONFIGURATIONS:
            near = near_match(own.base, CONFIGURATIONS)
            yield f"configuration {name!r}: its base {own.base!r} is no ready configuration; {near}"
    if not plan.configurations:
        yield "--configurations: name at least one"
    for name in plan.configurations:
        if name not in plan.known():
            near = near_match(name, plan.known())
            yield f"--configurations {name}: there is no such configuration; {near}"
    if plan.null and plan.judged_pairs:
        yield "--null compares each configuration with itself: leave --pairs out"
    for first, second in plan.judged_pairs:
        pair = f"--pairs {first}:{second}"
        for name in {first, second} - set(plan.configurations):
            near = near_match(name, plan.configurations)
            yield f"{pair}: {name} is not among the configurations of the plan; {near}"
        if first == second:
            yield f"{pair}: nothing differs; to compare a configuration with itself use --null"


def flag_lists(plan: Plan) -> list[tuple[str, ...]]:
    """Return all lists of trainers' flags in a plan."""
    own = [one.flags for one in plan.configuration.values()]
    return [plan.trainer_arguments, *(case.flags for case in plan.cases), *own]


def wrong_trainer_flags(plan: Plan) -> Iterator[str]:
    for words in flag_lists(plan):
        for word in words:
            if reason := RESERVED_FLAGS.get(flag_name(word)):
                yield f"{word} cannot be passed to the trainers: {reason}"
    for name, own in plan.configuration.items():
        if last_value(own.flags, "--seed") is not None:
            yield (
                f"configuration {name!r}: its flags give a seed, which must be the same for all "
                "configurations, else they would not do the same training"
            )
        if RUN_MARK in own.environment:
            yield f"configuration {name!r}: {RUN_MARK} is run.py's own"


def wrong_scaling(plan: Plan) -> Iterator[str]:
    size, rate = plan.global_batch_size, plan.global_learning_rate
    if size is None and rate is None:
        return
    if size is None or rate is None:
        both = ("--global-batch-size", "--global-learning-rate")
        given, missing = both if rate is None else both[::-1]
        yield (
            f"{given}: give {missing}, too. In strong scaling a global batch is shared by the "
            "workers and trained with one global rate, whatever their number"
        )
    for words in flag_lists(plan):
        for word in words:
            if reason := OF_GLOBAL_BATCH.get(flag_name(word)):
                yield f"{word} does not go together with --global-batch-size: {reason}"
        if last_value(words, "--warmup-method") == "gradual":
            yield (
                "--warmup-method gradual begins at one worker's learning rate, which is another "
                "one at each number of workers: with --global-batch-size use linear"
            )
    plan.block(1)  # which refuses what does not divide


def wrong_hosts(plan: Plan) -> Iterator[str]:
    if plan.hosts is None:
        if plan.network_interface is not None and plan.named_hosts != SLURM:
            yield (
                f"--network-interface {plan.network_interface}: without --hosts or --hostfile all "
                "workers are on this host, and use none"
            )
        return  # here, or in an allocation that is not known yet
    slots = sum(read_hosts(plan.hosts).values())
    if plan.most_ranks > slots:
        yield (
            f"--hosts {plan.hosts}: takes {slots} ranks, but {plan.most_ranks} are asked for; give "
            "more slots, or fewer --workers"
        )
    for configuration in plan.members():
        if configuration.launcher == "srun" and not plan.is_allocation:
            yield (
                f"{configuration.name}: srun takes the hosts of its Slurm allocation; start run.py "
                "inside salloc or sbatch, with --hosts slurm"
            )
        for workers in plan.workers:
            configuration.launch_words(workers, plan.hosts)  # which refuses what it cannot place


def check_end(given: Mapping[str, Any]) -> None:
    """Raise UserError if what somebody gave says twice when to stop."""
    for name in ("until_interval", "minutes"):
        if given.get("blocks") is not None and given.get(name) is not None:
            raise UserError(
                f"--blocks {given['blocks']}: so many blocks are measured, however long they take "
                f"and whatever they show; leave --{name.replace('_', '-')} out, or --blocks"
            )
