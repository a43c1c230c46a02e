"""Plans as people write them: a TOML file, or flags, and what in them cannot be meant.

A plan file names what `python compare/run.py --help` names, with _ in the place of -:

    question = "What do 16 bits on the wire bring?"
    time = "about 5 minutes on 2 cores"
    configurations = ["ddp-torchrun", "ddp-fp16"]
    workers = [2]
    flags = "--data synthetic --max-steps 50"     # the trainers', of all runs

    [configuration.ddp-fp16]                      # one of one's own
    base = "ddp-torchrun"
    flags = "--fp16-allreduce"                    # come after those of all runs, and win
    environment = { NCCL_ALGO = "Ring" }

    [case.vgg16]                                  # each case is compared by itself
    flags = "--arch vgg16"
"""

import argparse
import difflib
import math
import re
import shlex
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from compare.plan.configurations import CONFIGURATIONS, Configuration
from compare.plan.environment import RUN_MARK
from compare.plan.hosts import SLURM, read_hostfile, read_hosts
from compare.plan.plan import (
    ABLATION_STEPS,
    MEASURES,
    RESERVED_FLAGS,
    ROOT,
    Case,
    Plan,
    percentage,
)
from recipe.errors import UserError
from recipe.flags import flag_name, last_value

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PLANS = ROOT / "compare/plans"

# Keys of a plan file with the types of their values; a list's members are checked as well.
KEYS: dict[str, tuple[type, ...]] = {
    "question": (str,),
    "time": (str,),
    "configurations": (list, str),
    "pairs": (list, list),
    "workers": (list, int),
    "measure": (str,),
    "full_runs": (int,),
    "blocks": (int,),
    "minutes": (float,),
    "margin": (str,),
    "order_seed": (int,),
    "seed": (int,),
    "timeout": (int,),
    "flags": (str,),
    "hosts": (str,),
    "hostfile": (str,),
    "network_interface": (str,),
    "global_batch_size": (int,),
    "global_learning_rate": (float,),
    "null": (bool,),
    "until_interval": (str,),
    "phase_steps": (int,),
    "configuration": (dict, dict),
    "case": (dict, dict),
}
CONFIGURATION_KEYS: dict[str, tuple[type, ...]] = {
    "base": (str,),
    "flags": (str,),
    "environment": (dict, str),
}
CASE_KEYS: dict[str, tuple[type, ...]] = {"flags": (str,)}
TYPE_NAMES = {str: "a text", int: "a whole number", float: "a number", bool: "true or false",
              list: "a list", dict: "a table"}  # fmt: skip


def find_plan_file(name: str) -> Path:
    """Return the path of a plan: a file's, or a ready plan's name; raises UserError."""
    path = Path(name)
    if path.suffix == ".toml" or path.is_file():
        if not path.is_file():
            raise UserError(f"{name}: there is no such plan file; --list-plans shows ready ones")
        return path
    ready = {path.stem: path for path in PLANS.glob("*.toml")}
    if name not in ready:
        raise UserError(
            f"{name}: there is neither a plan file nor a ready plan of this name; "
            f"{near_match(name, sorted(ready))}"
        )
    return ready[name]


def read_table(path: Path) -> dict[str, Any]:
    """Read a plan file and check its keys and their types; raises UserError."""
    try:
        table = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not TOML: {error}") from None
    check_keys(path, "", table, KEYS)
    for kind, keys in (("configuration", CONFIGURATION_KEYS), ("case", CASE_KEYS)):
        for name, inner in table.get(kind, {}).items():
            check_keys(path, f"{kind}.{name}.", inner, keys)
    return table


def check_keys(
    path: Path, prefix: str, table: dict[str, Any], keys: dict[str, tuple[type, ...]]
) -> None:
    for key, value in table.items():
        if key not in keys:
            raise UserError(f"{path}: {prefix}{key}: there is no such key; {near_match(key, keys)}")
        outer, *inner = keys[key]
        if not is_of_type(value, outer):
            raise UserError(f"{path}: {prefix}{key} = {value!r}: must be {TYPE_NAMES[outer]}")
        members = value.values() if isinstance(value, dict) else value
        for member in members if inner else ():
            if not is_of_type(member, inner[0]):
                raise UserError(f"{path}: {prefix}{key}: {member!r} must be {TYPE_NAMES[inner[0]]}")


def is_of_type(value: Any, wanted: type) -> bool:
    if wanted is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if wanted is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, wanted)


def read_plan_file(path: Path) -> dict[str, Any]:
    """Return the fields of Plan that a file sets; raises UserError, which names file and key."""
    table = read_table(path)
    whole = path.resolve()
    values: dict[str, Any] = {
        "plan_file": str(whole.relative_to(ROOT) if whole.is_relative_to(ROOT) else path)
    }
    try:
        for key, value in table.items():
            values |= plan_fields(key, value)
        if "configurations" not in table and "configuration" in table:
            values["configurations"] = tuple(table["configuration"])
        check_end(values)
        check_plan(Plan(**values))
    except UserError as error:
        message = str(error)
        for key in KEYS:  # a file says blocks where a flag says --blocks
            message = re.sub(rf"--{key.replace('_', '-')}(?![\w-])", key, message)
        raise UserError(f"{path}: {message}") from None
    return values


def plan_fields(key: str, value: Any) -> dict[str, Any]:
    """Return the fields of Plan that a key of a plan file stands for."""
    if key == "flags":
        return {"trainer_arguments": tuple(split_words(value))}
    if key == "pairs":
        return {"judged_pairs": tuple(as_pair(pair) for pair in value)}
    if key in ("until_interval", "margin"):
        return {key: read_percentage(value, f"--{key.replace('_', '-')}")}
    if key == "hostfile":
        return {"hosts": read_hostfile(Path(value))}
    if key == "configuration":
        return {"defined": tuple(define(name, **inner) for name, inner in value.items())}
    if key == "case":
        return {
            "cases": tuple(
                Case(name, tuple(split_words(inner.get("flags", ""))))
                for name, inner in value.items()
            )
        }
    return {key: tuple(value) if isinstance(value, list) else value}


def split_words(text: str) -> list[str]:
    """Split flags as a shell does."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"flags {text!r}: {error}") from None


def as_pair(names: list[Any]) -> tuple[str, str]:
    if len(names) != 2 or not all(isinstance(name, str) for name in names):
        raise UserError(f"pairs: {names!r} must hold two names of configurations")
    return names[0], names[1]


def define(
    name: str, base: str = "", flags: str = "", environment: dict[str, str] | None = None
) -> Configuration:
    """Return a configuration of the plan's own, which is a ready one with flags and variables."""
    if base not in CONFIGURATIONS:
        given = f"its base {base!r} is no ready configuration" if base else "it has no base"
        raise UserError(f"configuration {name!r}: {given}; {near_match(base, CONFIGURATIONS)}")
    ready = CONFIGURATIONS[base]
    words = tuple(split_words(flags))
    return replace(ready, name=name, flags=words, environment=environment or {})


def read_definition(text: str) -> Configuration:
    """Read `NAME=BASE [VARIABLE=VALUE ...] [flags]`, a configuration as a flag tells it."""
    head, *rest = split_words(text) or [""]
    name, _, base = head.partition("=")
    environment: dict[str, str] = {}
    while rest and (found := re.fullmatch(r"([A-Za-z_]\w*)=(.*)", rest[0], re.DOTALL)):
        environment[found[1]] = found[2]
        rest = rest[1:]
    return define(name, base, shlex.join(rest), environment)


def read_case(text: str) -> Case:
    """Read `NAME=flags`."""
    name, _, flags = text.partition("=")
    return Case(name, tuple(split_words(flags)))


def read_pair(text: str) -> tuple[str, str]:
    """Read `FIRST:SECOND`."""
    return as_pair(text.split(":"))


def read_percentage(text: str, flag: str = "--until-interval") -> float:
    """Read `2%` as 0.02."""
    found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+) ?%", text)
    if found is None:
        raise UserError(f"{flag} {text}: write a percentage, as in 2%")
    return float(found[1]) / 100


def positive(text: str) -> int:
    """Read a flag's whole number from 1 on."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return value


def list_plans() -> str:
    """Return the ready plans: name, question and time of each."""
    lines = ["Ready plans, for python compare/run.py NAME (what they hold: compare/plans/):", ""]
    for path in sorted(PLANS.glob("*.toml")):
        table = read_table(path)
        lines += [path.stem, f"    {table.get('question', '')}", f"    {table.get('time', '')}"]
    return "\n".join(lines)


def near_match(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about a name that is not known."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(names)}"


def check_plan(plan: Plan) -> None:
    """Raise UserError when a plan cannot be meant."""
    check_names(plan)
    counts = {"workers": min(plan.workers, default=0), "timeout": plan.timeout}
    if plan.blocks is not None:
        counts["blocks"] = plan.blocks
    for name, value in counts.items():
        if value < 1:
            raise UserError(f"--{name} {value}: give a positive whole number")
    numbers = {"seed": plan.seed, "order-seed": plan.order_seed or 0, "full-runs": plan.full_runs}
    for name, value in numbers.items():
        if value < 0:
            raise UserError(f"--{name} {value}: give a whole number that is not negative")
    if plan.phase_steps and plan.phase_steps < 2 * ABLATION_STEPS:
        raise UserError(
            f"--phase-steps {plan.phase_steps}: stretches of {ABLATION_STEPS} steps with and "
            f"without communication alternate; give {2 * ABLATION_STEPS} or more, or --no-phases"
        )
    check_measure(plan)
    check_trainer_flags(plan)
    check_strong_scaling(plan)
    check_hosts(plan)


def check_names(plan: Plan) -> None:
    known = plan.known()
    if not plan.configurations:
        raise UserError("--configurations: name at least one")
    for name in plan.configurations:
        if name not in known:
            raise UserError(
                f"--configurations {name}: there is no such configuration; "
                f"{near_match(name, known)}"
            )
    own = [configuration.name for configuration in plan.defined]
    cases = [case.name for case in plan.cases]
    for kind, names in (("configuration", own), ("case", cases if cases != [""] else [])):
        for name in names:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) or ".failed-" in name:
                raise UserError(
                    f"{kind} {name!r}: a folder will bear this name; use letters, digits, '-', '_' "
                    "and '.'"
                )
            if names.count(name) > 1:
                raise UserError(f"{kind} {name!r} is there twice: give each a name of its own")
    for name in own:
        if name in CONFIGURATIONS:
            raise UserError(
                f"configuration {name!r} is a ready one: give yours another name, as in "
                f"'{name}-tuned'"
            )
    if plan.null and plan.judged_pairs:
        raise UserError("--null compares each configuration with itself: leave --pairs out")
    for pair in plan.judged_pairs:
        for name in pair:
            if name not in plan.configurations:
                raise UserError(
                    f"--pairs {':'.join(pair)}: {name} is not among the configurations of the "
                    f"plan; {near_match(name, plan.configurations)}"
                )
        if pair[0] == pair[1]:
            raise UserError(
                f"--pairs {':'.join(pair)}: nothing differs; to compare a configuration with "
                "itself use --null"
            )


def check_measure(plan: Plan) -> None:
    if plan.measure not in MEASURES:
        raise UserError(f"--measure {plan.measure}: {near_match(plan.measure, MEASURES)}")
    if plan.measure == "runs" and plan.full_runs != 1:
        raise UserError(
            f"--full-runs {plan.full_runs}: with --measure runs all runs are full ones; give "
            "--blocks, or leave it out"
        )
    shares = {"until-interval": plan.until_interval, "margin": plan.margin}
    for name, share in shares.items():
        if not 0 < share < 1:
            raise UserError(f"--{name} {percentage(share)}: give a share between 0 % and 100 %")
    if not 0 < plan.minutes < math.inf:
        raise UserError(f"--minutes {plan.minutes:g}: give a number above 0")


def check_end(given: Mapping[str, Any]) -> None:
    """Raise UserError if what somebody gave says twice when to stop."""
    for name in ("until_interval", "minutes"):
        if given.get("blocks") is not None and given.get(name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise UserError(
                f"--blocks {given['blocks']}: so many blocks are measured, however long they take "
                f"and whatever they show; leave {flag} out, or --blocks"
            )


def check_trainer_flags(plan: Plan) -> None:
    for words in (
        plan.trainer_arguments,
        *(case.flags for case in plan.cases),
        *(configuration.flags for configuration in plan.defined),
    ):
        for word in words:
            if reason := RESERVED_FLAGS.get(flag_name(word)):
                raise UserError(f"{word} cannot be passed to the trainers: {reason}")
    for configuration in plan.defined:
        if last_value(configuration.flags, "--seed") is not None:
            raise UserError(
                f"configuration {configuration.name!r}: its flags give a seed, which must be the "
                "same for all configurations, else they would not do the same training"
            )
        if RUN_MARK in configuration.environment:
            raise UserError(f"configuration {configuration.name!r}: {RUN_MARK} is run.py's own")


def check_strong_scaling(plan: Plan) -> None:
    size, rate = plan.global_batch_size, plan.global_learning_rate
    if size is None and rate is None:
        return
    if size is None or rate is None:
        given, missing = (
            ("--global-batch-size", "--global-learning-rate")
            if rate is None
            else ("--global-learning-rate", "--global-batch-size")
        )
        raise UserError(
            f"{given}: give {missing}, too. In strong scaling a global batch is shared by the "
            "workers and trained with one global rate, whatever their number"
        )
    if size < 1 or not rate > 0:
        raise UserError(
            f"--global-batch-size {size} --global-learning-rate {rate:g}: give numbers above 0"
        )
    reasons = {
        "--batch-size": "--global-batch-size sets it",
        "--base-lr": "--global-learning-rate sets it",
        "--use-adasum": "its learning rate follows another rule",
    }
    plan.block(1)  # which refuses what does not divide
    for words in (
        plan.trainer_arguments,
        *(case.flags for case in plan.cases),
        *(configuration.flags for configuration in plan.defined),
    ):
        for word in words:
            if reason := reasons.get(flag_name(word)):
                raise UserError(f"{word} does not go together with --global-batch-size: {reason}")
        if last_value(words, "--warmup-method") == "gradual":
            raise UserError(
                "--warmup-method gradual begins at one worker's learning rate, which is another "
                "one at each number of workers: with --global-batch-size use linear"
            )


def check_hosts(plan: Plan) -> None:
    if plan.hosts == SLURM:
        return  # of an allocation that is not known yet
    if plan.hosts is None and plan.is_allocation:
        return  # nor here: --slurm submits
    if plan.hosts is None:
        if plan.network_interface is not None:
            raise UserError(
                f"--network-interface {plan.network_interface}: without --hosts or --hostfile all "
                "workers are on this host, and use none"
            )
        return
    hosts = read_hosts(plan.hosts)
    if plan.most_ranks > sum(hosts.values()):
        raise UserError(
            f"--hosts {plan.hosts}: takes {sum(hosts.values())} ranks, but {plan.most_ranks} are "
            "asked for; give more slots, or fewer --workers"
        )
    for configuration in plan.members():
        if configuration.launcher == "srun" and not plan.is_allocation:
            raise UserError(
                f"{configuration.name}: srun takes the hosts of its Slurm allocation; start run.py "
                "inside salloc or sbatch, with --hosts slurm"
            )
        for workers in plan.workers:
            configuration.launch_words(workers, plan.hosts)  # which refuses what it cannot place
