"""Plans as people write them: a TOML file, what is wrong in one, and the flags that make a plan."""

import re
import shlex
import sys
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from compare.plan.checks import check_end, check_plan, near_match
from compare.plan.hosts import read_hostfile
from compare.plan.plan import (
    FIELDS,
    KEYS,
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

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")
PLANS = ROOT / "compare/plans"
TYPE_NAMES = {"str": "a text", "int": "a whole number", "float": "a number", "array": "a list",
              "bool": "true or false", "object": "a table"}  # fmt: skip


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
