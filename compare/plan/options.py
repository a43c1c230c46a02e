"""The flags of run.py, derived from Plan, and the plan that they and a plan file make."""

import argparse
import os
import re
import shlex
import typing
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from compare.plan.configurations import DEFAULT_CONFIGURATIONS
from compare.plan.environment import path_from_here
from compare.plan.hosts import SLURM, most_on_a_host, read_allocation
from compare.plan.plan import (
    FIELDS,
    KEYS,
    Plan,
    Words,
    meta_of,
)
from compare.plan.plan_file import (
    FIELD_OF,
    check_plan,
    flag_of,
    read_plan_file,
    take_hostfile,
    typed,
)
from recipe.command import Flags, add_flags, parser_of
from recipe.errors import UserError, refuse
from recipe.settings.config import are_digits, check, read_flags
from recipe.settings.flags import flag_name, last_value, without_flag

SCRIPT = "compare/run.py"
TUNING_ROUNDS = 5
# What a flag takes the place of in a plan file, beside its own key.
REPLACED = {
    "blocks": ("until_interval", "minutes"),
    "until_interval": ("blocks",),
    "minutes": ("blocks",),
    "null": ("pairs",),
}
# The first field of each group of flags.
GROUPS = {
    "configurations": "what is compared",
    "workers": "with how many workers, and where",
    "measure": "how speed is measured, and how long",
    "seed": "the runs",
}


# Flags that are no part of a plan: those of the task, and how it is done.
TASK: Flags = {
    "plan": {"nargs": "?", "metavar": "plan", "help": "a ready plan's name or a plan file (TOML; "
             "compare/plans/ has them; or the plan.json of a comparison, to repeat it); flags win "
             "over it"},
    "--list-plans": {"action": "store_true", "help": "show the ready plans, and nothing else"},
    "--tune": {"type": Path, "metavar": "FILE", "help": "do not compare, but search for the "
               "settings with which each engine exchanges gradients fastest here, and write them "
               "into this file, for the trainers' --knobs"},
    "--rounds": {"dest": "tuning_rounds", "type": int, "metavar": "N", "help": "with --tune: in "
                 "how many blocks the values of a knob take turns with the best one so far "
                 f"(default: {TUNING_ROUNDS})"},
}  # fmt: skip
PROCEDURE: Flags = {
    "--hostfile": {"metavar": "FILE", "help": "hosts, in lines of the form 'name "
                   "slots=N', in place of --hosts"},
    "--no-warm-up": {"dest": "warm_up", "action": "store_false", "help": "leave out the short run "
                     "of each engine before the first measured one"},
    "--block": {"type": int, "metavar": "N", "help": "with --measure runs --blocks N: run this "
                "block alone (for job arrays)"},
    "--out": {"type": Path, "metavar": "DIR", "help": "the comparison's folder; one that exists is "
              "continued (default: runs/compare-<UTC time>, or the newest one there if it holds "
              "this plan unfinished)"},
    "--new": {"action": "store_true", "help": "start afresh, even if this plan is unfinished"},
    "--dry-run": {"action": "store_true", "help": "print the commands, and nothing else"},
    "--strict": {"action": "store_true", "help": "do not start when something would make the "
                 "result worthless (other load, unequal threads, ...), where otherwise a warning "
                 "is printed"},
}  # fmt: skip


def parse_options(argv: list[str], about: str) -> argparse.Namespace:
    """Read the flags; what stands after the first `--` is the trainers'. A flag that says something
    about the plan bears the name of its key and is None where it was not given."""
    own, trainer = split_words_at_dashes(argv)
    parser = parser_of(
        SCRIPT,
        about,
        TASK,
        usage=f"python {SCRIPT} [plan] [flags] [-- flags of the trainers]",
        allow_abbrev=False,
    )
    group: Any = parser
    for field in FIELDS:
        meta, key = meta_of(field.type), field.encode_name
        if key in GROUPS:
            group = parser.add_argument_group(GROUPS[key])
        if meta.description:
            kind, metavar = typing.get_args(field.type)[0], (meta.extra or {})["metavar"]
            more = {
                bool: {"action": "store_const", "const": True},
                dict: {"action": "append", "metavar": metavar, "type": partial(named, key)},
                tuple: {"nargs": "+", "metavar": metavar},
                typing.Literal: {"choices": typing.get_args(kind)},
            }.get(typing.get_origin(kind) or kind, {"metavar": metavar})
            group.add_argument(
                flag_of(field), dest=key, help=meta.description.replace("%", "%%"), **more
            )
    add_flags(parser.add_argument_group("how it is done"), PROCEDURE)
    return parser.parse_args(own, argparse.Namespace(arguments_after_dashes=trainer))


def split_words_at_dashes(argv: list[str]) -> tuple[list[str], list[str]]:
    """Return the command's own words, and those of the trainers after the first `--`."""
    place = argv.index("--") if "--" in argv else len(argv)
    return argv[:place], argv[place + 1 :]


def named(key: str, text: str) -> tuple[str, Any]:
    """Read what a flag says of a thing with a name: `NAME=BASE [VARIABLE=VALUE ...] [flags]`, a
    configuration; `NAME=[copies=N] [VARIABLE=VALUE ...] command`, a script of a user's own;
    `NAME=flags`, a case; `FIRST:SECOND=RATIO`, a goal or a margin."""
    if key in ("goals", "margins"):
        pair, _, value = text.rpartition("=")
        return pair, value
    name, _, rest = text.partition("=")
    words, variables = shlex.split(rest), dict[str, str]()
    if key == "case":
        return name, {"flags": words}
    base = words.pop(0) if key == "configuration" and words else ""
    while words and (found := re.fullmatch(r"([A-Za-z_]\w*)=(.*)", words[0], re.DOTALL)):
        variables[found[1]] = found[2]
        del words[0]
    if key == "configuration":
        return name, {"base": base, "flags": words, "environment": variables}
    copies = variables.pop("copies", 1)
    return name, {"command": words, "environment": variables, "copies": copies}


NAMED = ("configuration", "case", "side", "goals", "margins")


def given_table(options: argparse.Namespace) -> dict[str, Any]:
    """Return what the flags say about the plan, by the keys of a plan file."""
    given = {key: getattr(options, key, None) for key in KEYS}
    table = {key: value for key, value in given.items() if value is not None}
    for key in NAMED:
        names = [name for name, _ in table.get(key, ())]
        for name in {name for name in names if names.count(name) > 1}:
            raise UserError(f"{flag_of(FIELD_OF[key])} {name}: is given twice; name each once")
    table |= {key: dict(table[key]) for key in NAMED if key in table}
    if "pairs" in table:
        table["pairs"] = [text.split(":") for text in table["pairs"]]
    take_hostfile(table)
    return table


def merged(file: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return what a plan file says with what the flags say on top of it."""
    replaced = {other for key in given for other in REPLACED.get(key, ())}
    table = {key: value for key, value in file.items() if key not in replaced} | given
    if "configuration" in given:
        table["configuration"] = {**file.get("configuration", {}), **given["configuration"]}
        if "configurations" not in given:
            chosen = file.get("configurations", DEFAULT_CONFIGURATIONS)
            table["configurations"] = [*chosen, *given["configuration"]]
    if "side" in given:
        table["side"] = {**file.get("side", {}), **given["side"]}
        if "configurations" not in given:
            table["configurations"] = list(table["side"])
    if "configurations" in given and "pairs" in table and "pairs" not in given:
        chosen = set(given["configurations"])
        table["pairs"] = [pair for pair in file["pairs"] if chosen.issuperset(pair)]
    return table


def make_plan(options: argparse.Namespace) -> Plan:
    """Return the plan of the file, if one is named, with what the flags say on top of it."""
    file = read_plan_file(options.plan) if options.plan else {}
    after_dashes = options.arguments_after_dashes
    plan = typed(merged(file, given_table(options)), Plan, strict=False)
    words = list(plan.trainer_arguments)
    if last_value(words, "--data") == "digits" and not are_digits(after_dashes):
        words = without_flag(words, "--preset")  # other images have their own
    plan = replace(
        plan,
        configurations=tuple(dict.fromkeys(plan.configurations)),
        workers=tuple(sorted(set(plan.workers))),
        trainer_arguments=Words((*words, *after_dashes)),
        allocation=read_allocation() if plan.named_hosts == SLURM else None,
    )
    check_plan(plan)
    blocks = range(1, (plan.blocks or 0) + 1) if plan.measure == "runs" else ()
    refuse(
        (
            options.block is not None and options.block not in blocks,
            f"--block {options.block}: names one of the blocks 1 to N of --measure runs --blocks "
            "N, which this plan does not have",
        ),
        (
            options.tuning_rounds is not None and options.tune is None,
            f"--rounds {options.tuning_rounds}: belongs to --tune; here give --blocks",
        ),
    )
    if plan.side:
        return plan
    most = most_on_a_host(max(plan.workers), plan.hosts)
    return replace(plan, trainer_arguments=with_defaults(plan.trainer_arguments, most))


def with_defaults(trainer_arguments: Sequence[str], most_workers: int) -> Words:
    """Add what a comparison sets for the trainers, unless the user set it.

    `--threads`, the cores divided by the most workers on a host: by the trainers' own rule one
    worker would get all cores and each of two half of them, and a worker's work would not be the
    same. And no checkpoints: they are not measured, and would fill the disk.
    """
    given = {flag_name(word) for word in trainer_arguments}
    threads = max(1, len(os.sched_getaffinity(0)) // most_workers)
    added = {"--threads": str(threads), "--keep-checkpoints": "0"}
    more = (word for pair in added.items() if pair[0] not in given for word in pair)
    return Words((*trainer_arguments, *more))


def check_trainers(plan: Plan) -> None:
    """Raise UserError if a trainer would refuse its flags, before the first run finds that out.
    SystemExit after a value that they do not know, or --help: their parser has answered then."""
    program, runs = f"python {path_from_here(SCRIPT)} --", plan.block(1)
    for engine, arguments in dict.fromkeys((r.configuration.engine, r.arguments) for r in runs):
        try:
            config, *_ = read_flags(
                engine, plan.workers[0], list(arguments), talk=True, program=program
            )
            for workers in plan.workers[1:]:
                check(config, engine, workers)
        except UserError as error:
            raise UserError(f"the trainers refuse their flags: {error}") from None


def command_words(argv: list[str], folder: Path) -> list[str]:
    """Return the command that goes on in this very folder, from the flags of the first one."""
    own, trainer = split_words_at_dashes(argv)
    own = [word for word in own if word not in ("--new", "--dry-run")]
    if not any(word == "--out" or word.startswith("--out=") for word in own):
        own = ["--out", str(folder), *own]
    return ["python", path_from_here(SCRIPT), *own, *(["--"] if trainer else []), *trainer]
