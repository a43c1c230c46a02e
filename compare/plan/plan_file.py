"""Plans as people write them: a TOML file, what is wrong in one, and the flags that make a plan."""

import difflib
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from compare.plan.configurations import CONFIGURATIONS
from compare.plan.environment import RUN_MARK
from compare.plan.hosts import SLURM, read_hostfile, read_hosts
from compare.plan.plan import (
    ABLATION_STEPS,
    FIELDS,
    KEYS,
    RESERVED_FLAGS,
    ROOT,
    OwnCase,
    OwnConfiguration,
    Plan,
    Share,
    decode,
    meta_of,
    percentage,
)
from recipe.errors import UserError
from recipe.flags import flag_name, last_value

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")
PLANS = ROOT / "compare/plans"
TYPE_NAMES = {"str": "a text", "int": "a whole number", "float": "a number", "array": "a list",
              "bool": "true or false", "object": "a table"}  # fmt: skip

# In strong scaling, flags that the plan sets itself.
OF_GLOBAL_BATCH = {
    "--batch-size": "--global-batch-size sets it",
    "--base-lr": "--global-learning-rate sets it",
    "--use-adasum": "its learning rate follows another rule",
}


def typed(table: dict[str, Any], kind: type[T], prefix: str = "", strict: bool = True) -> T:
    """Return a table of a file, or of flags, as `kind`; UserError names key and value."""
    try:
        return msgspec.convert(table, kind, strict=strict, dec_hook=decode)
    except msgspec.ValidationError as error:
        raise UserError(explanation(str(error), table, prefix)) from None


def explanation(message: str, table: dict[str, Any], prefix: str = "") -> str:
    """Return msgspec's message in the words of whoever wrote the table."""
    what, _, path = message.partition(" - at `$")
    if found := re.search("field `(.*)`", what):
        return f"{prefix}{found[1]}: {what[0].lower()}{what[1:]}"
    value: Any = table
    place = re.findall(r"\.(\w+)|\[(\d+)\]", path)
    for key, index in place if "..." not in path else ():
        value = value[key or int(index)]
    name = prefix + path.rstrip("`").removeprefix(".")
    name = name.replace("_", "-") if prefix == "--" else name
    what = re.sub(r"^Expected `(\w+)(?: \| null)?`(, got .*)?",
                  lambda f: f"must be {TYPE_NAMES.get(f[1], f[1])}", what)  # fmt: skip
    what = (
        "must be one of turns, runs" if what.startswith("Invalid") and name == "measure" else what
    )
    what = "holds a control character" if "matching regex" in what else what
    return f"{name} = {value!r}: {what}"


def read_table(path: Path) -> dict[str, Any]:
    """Read a plan file and check its keys and their types; raises UserError."""
    try:
        table = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not TOML: {error}") from None
    if isinstance(table.get("hostfile"), str):
        table["hosts"] = read_hostfile(Path(table.pop("hostfile")))
    check_keys(table, KEYS, path, "")
    kinds: dict[str, type[Struct]] = {"configuration": OwnConfiguration, "case": OwnCase}
    for key, kind in kinds.items():
        for name, inner in table.get(key, {}).items() if isinstance(table.get(key), dict) else ():
            place = f"{key}.{name}."
            check_keys(inner, kind.__struct_fields__, path, place)
            typed(inner, kind, f"{path}: {place}")
    if "configurations" not in table and "configuration" in table:
        table["configurations"] = list(table["configuration"])
    return table


def check_keys(table: Any, known: Any, path: Path, prefix: str) -> None:
    """Raise UserError about a key that is not known."""
    for key in set(table) - set(known) if isinstance(table, dict) else ():
        raise UserError(f"{path}: {prefix}{key}: there is no such key; {near_match(key, known)}")


def read_plan_file(path: Path) -> dict[str, Any]:
    """Return what a plan file says, checked; UserError names file and key."""
    try:
        table = read_table(path)
        check_end(table)
        check_plan(typed(table, Plan))
    except UserError as error:
        message = str(error).removeprefix(f"{path}: ")
        for key in KEYS:  # a file says blocks where a flag says --blocks
            message = re.sub(rf"--{key.replace('_', '-')}(?![\w-])", key, message)
        raise UserError(message if str(path) in message else f"{path}: {message}") from None
    whole = path.resolve()
    name = str(whole.relative_to(ROOT) if whole.is_relative_to(ROOT) else path)
    return {**table, "plan_file": name}


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


def list_plans() -> str:
    """Return the ready plans: name, question and time of each."""
    lines = ["Ready plans, for python compare/run.py NAME (what they hold: compare/plans/):", ""]
    for path in sorted(PLANS.glob("*.toml")):
        table = read_table(path)
        lines += [path.stem, f"    {table.get('question', '')}", f"    {table.get('time', '')}"]
    return "\n".join(lines)


def flag_of(field: msgspec.structs.FieldInfo) -> str:
    """Return the flag that gives a field."""
    name = (meta_of(field.type).extra or {}).get("flag") or field.encode_name.replace("_", "-")
    return f"--{name}"


def plan_words(plan: Plan) -> list[str]:
    """Return the flags of run.py that make this plan; those that would say what it does anyway are
    left out, and so is the seed of the order: who repeats a comparison draws another one."""
    words = []
    always = ["configurations", "workers", "seed"]
    always += ["until_interval", "minutes"] if plan.blocks is None else []
    never = ["order_seed"] if plan.blocks is None else ["order_seed", "until_interval", "minutes"]
    for field in FIELDS:
        value = getattr(plan, field.name)
        is_default = not value if field.default is msgspec.NODEFAULT else value == field.default
        is_told = field.name in always or not is_default
        if meta_of(field.type).description and field.name not in never and is_told:
            words += flag_words(flag_of(field), value)
    return [*words, "--", *plan.trainer_arguments] if plan.trainer_arguments else words


def flag_words(name: str, value: Any) -> list[str]:
    """Return the words of one flag with its value."""
    if isinstance(value, dict):
        return [word for key, own in value.items() for word in (name, f"{key}={own_text(own)}")]
    if isinstance(value, tuple):
        return [name, *(":".join(one) if isinstance(one, tuple) else str(one) for one in value)]
    if value is True:
        return [name]
    is_number = isinstance(value, float)
    text = percentage(value) if isinstance(value, Share) else f"{value:g}" if is_number else value
    return [name, str(text)]


def own_text(own: OwnConfiguration | OwnCase) -> str:
    """Return what follows NAME= in --define and --case."""
    if isinstance(own, OwnCase):
        return shlex.join(own.flags)
    variables = [f"{name}={value}" for name, value in own.environment.items()]
    return shlex.join([own.base, *variables, *own.flags])


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
    kinds: dict[str, Iterable[str]] = {"configuration": plan.configuration, "case": plan.case}
    yield from (
        f"{kind} {name!r}: a folder will bear this name; use letters, digits, '-', '_' and '.'"
        for kind, named in kinds.items()
        for name in named
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) or ".failed-" in name
    )
    yield from (
        f"configuration {name!r} is a ready one: give yours another name, as in '{name}-tuned'"
        for name in plan.configuration.keys() & CONFIGURATIONS.keys()
    )
    yield from (
        f"configuration {name!r}: its base {own.base!r} is no ready configuration; "
        f"{near_match(own.base, CONFIGURATIONS)}"
        for name, own in plan.configuration.items()
        if own.base not in CONFIGURATIONS
    )
    if not plan.configurations:
        yield "--configurations: name at least one"
    yield from (
        f"--configurations {name}: there is no such configuration; {near_match(name, plan.known())}"
        for name in plan.configurations
        if name not in plan.known()
    )
    if plan.null and plan.judged_pairs:
        yield "--null compares each configuration with itself: leave --pairs out"
    yield from (
        f"--pairs {':'.join(pair)}: {name} is not among the configurations of the plan; "
        f"{near_match(name, plan.configurations)}"
        for pair in plan.judged_pairs
        for name in pair
        if name not in plan.configurations
    )
    yield from (
        f"--pairs {first}:{second}: nothing differs; to compare a configuration with itself use "
        "--null"
        for first, second in plan.judged_pairs
        if first == second
    )


def flag_lists(plan: Plan) -> list[tuple[str, ...]]:
    """Return all lists of trainers' flags in a plan."""
    own = [one.flags for one in plan.configuration.values()]
    return [plan.trainer_arguments, *(case.flags for case in plan.cases), *own]


def wrong_trainer_flags(plan: Plan) -> Iterator[str]:
    yield from (
        f"{word} cannot be passed to the trainers: {RESERVED_FLAGS[flag_name(word)]}"
        for words in flag_lists(plan)
        for word in words
        if flag_name(word) in RESERVED_FLAGS
    )
    yield from (
        f"configuration {name!r}: its flags give a seed, which must be the same for all "
        "configurations, else they would not do the same training"
        for name, own in plan.configuration.items()
        if last_value(own.flags, "--seed") is not None
    )
    yield from (
        f"configuration {name!r}: {RUN_MARK} is run.py's own"
        for name, own in plan.configuration.items()
        if RUN_MARK in own.environment
    )


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
    yield from (
        f"{word} does not go together with --global-batch-size: {OF_GLOBAL_BATCH[flag_name(word)]}"
        for words in flag_lists(plan)
        for word in words
        if flag_name(word) in OF_GLOBAL_BATCH
    )
    if "gradual" in [last_value(words, "--warmup-method") for words in flag_lists(plan)]:
        yield (
            "--warmup-method gradual begins at one worker's learning rate, which is another one at "
            "each number of workers: with --global-batch-size use linear"
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
