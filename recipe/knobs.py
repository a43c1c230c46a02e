"""Knobs: settings that change how fast gradients are exchanged, and not what is computed.

`--knobs FILE` reads them from a TOML file, which `python compare/run.py --tune FILE` writes and
which may be written by hand. Both trainers read the same file, each its own tables:

    [ddp]
    bucket_cap_mb = 50.0
    static_graph = true

    [horovod]
    num_groups = 4

    [horovod.environment]
    HOROVOD_CYCLE_TIME = "0.5"
    OMPI_MCA_coll_tuned_use_dynamic_rules = "1"

Settings become defaults, over those of the preset: a flag on the command line wins. Variables are
set before the engine reads them (Horovod and MPI read theirs when they are initialised): one that
the environment has already wins. Only the order in which gradients are added up may depend on a
knob, so that tuned runs can be compared with others.
"""

import difflib
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipe.errors import UserError
from recipe.flags import FLAGS, knob_types
from recipe.variables import HOROVOD_VARIABLES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# Settings of each engine that are knobs, as Config names them, with what a file may give them.
SETTINGS = {engine: knob_types(engine) for engine in ("ddp", "horovod")}
# Of Open MPI's parameters those of the libraries that carry messages. The others (ess_, orte_,
# plm_, rmaps_, ...) start and place the processes: mpirun reads them, and it is too late for them.
# Of torch's variables those of its process groups: others choose number formats.
FAMILIES = (
    "OMPI_MCA_allocator_",
    "OMPI_MCA_btl",
    "OMPI_MCA_coll",
    "OMPI_MCA_mpi_",
    "OMPI_MCA_mtl",
    "OMPI_MCA_opal_",
    "OMPI_MCA_pml",
    "GLOO_",
    "NCCL_",
    "TORCH_GLOO_",
    "TORCH_NCCL_",
)
NOT_KNOBS = {  # of those families
    "NCCL_COMM_ID": "it is where the ranks meet",
    "NCCL_HOSTID": "it tells hosts apart",
}


@dataclass(frozen=True)
class Knobs:
    """What a file says for one engine."""

    settings: dict[str, Any] = field(default_factory=dict)  # fields of Config
    variables: dict[str, str] = field(default_factory=dict)


def read_knobs(path: str | None, engine: str) -> Knobs:
    """Read the tables of `engine` ("horovod" or "ddp"); UserError, with file and key, if any table
    of the file cannot be meant. None is no file, and an engine without tables has no knobs."""
    if path is None:
        return Knobs()
    tables = read_all_knobs(Path(path).expanduser())
    return tables.get(engine, Knobs())


def read_all_knobs(path: Path) -> dict[str, Knobs]:
    """Read and check a whole file: the knobs of each engine that it names."""
    try:
        tables = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(
            f"--knobs {path}: there is no such file; `python compare/run.py --tune {path}` makes "
            "one for this machine"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--knobs {path}: cannot be read ({error}); name a TOML file") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"--knobs {path}: is not TOML: {error}") from None
    for engine, table in tables.items():
        if engine not in SETTINGS:
            raise _unknown(path, engine, "table", SETTINGS)
        if not isinstance(table, dict):
            raise UserError(
                f"--knobs {path}: {engine} = {table!r}: write it as a table, [{engine}]"
            )
    return {engine: _read_table(path, engine, table) for engine, table in tables.items()}


def _read_table(path: Path, engine: str, table: dict[str, Any]) -> Knobs:
    settings = {name: value for name, value in table.items() if name != "environment"}
    for name, value in settings.items():
        if name not in SETTINGS[engine]:
            elsewhere = [other for other in SETTINGS if name in SETTINGS[other]]
            if elsewhere:
                raise UserError(
                    f"--knobs {path}: {engine}.{name}: {engine} has no such setting; it belongs "
                    f"under [{elsewhere[0]}]"
                )
            raise _unknown(path, f"{engine}.{name}", "knob", (*SETTINGS[engine], "environment"))
        _check_value(path, engine, name, value)
    variables = table.get("environment", {})
    if not isinstance(variables, dict):
        raise UserError(
            f"--knobs {path}: {engine}.environment = {variables!r}: write it as a table, "
            f"[{engine}.environment]"
        )
    for name, value in variables.items():
        _check_variable(path, engine, name, value)
    numbers = {name: SETTINGS[engine][name](value) for name, value in settings.items()}
    return Knobs(numbers, dict(variables))


def _check_value(path: Path, engine: str, name: str, value: Any) -> None:
    types, kind = {
        bool: ((bool,), "true or false"),
        int: ((int,), "a whole number"),
        float: ((int, float), "a number"),
    }[SETTINGS[engine][name]]
    wrong = f"--knobs {path}: {engine}.{name} = {value!r}: "
    if type(value) not in types:
        raise UserError(f"{wrong}give {kind}")
    bound = FLAGS[name].bound
    if bound and not bound.holds(value):
        raise UserError(wrong + bound.advice)


def _check_variable(path: Path, engine: str, name: str, value: Any) -> None:
    key = f"{engine}.environment.{name}"
    if reason := refusal(engine, name):
        raise UserError(f"--knobs {path}: {key}: {reason}")
    if not isinstance(value, str):
        raise UserError(f"--knobs {path}: {key} = {value!r}: is a variable; give a text, in quotes")
    if "\0" in value:
        raise UserError(f"--knobs {path}: {key}: no variable can hold a zero byte; leave it out")


def refusal(engine: str, name: str) -> str | None:
    """Why a variable is no knob of this engine, with the remedy; None if it is one."""
    if name.startswith("HOROVOD_"):
        if engine != "horovod":
            return "only Horovod reads it; put it under [horovod.environment]"
        if name in HOROVOD_VARIABLES:
            return None
        close = difflib.get_close_matches(name, HOROVOD_VARIABLES, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(HOROVOD_VARIABLES)}"
        return f"is none of the variables that only steer Horovod's speed; {hint}"
    if name in NOT_KNOBS:
        return f"is no knob: {NOT_KNOBS[name]}; set it in the shell"
    if name.startswith(FAMILIES) and re.fullmatch(r"\w+", name):
        return None
    return (
        "a file of knobs sets only variables that Horovod, MPI, Gloo or NCCL read in the ranks and "
        f"that do not change what is computed ({', '.join(('HOROVOD_', *FAMILIES))}); set it in "
        "the shell"
    )


def _unknown(path: Path, key: str, kind: str, known: Iterable[str]) -> UserError:
    names = list(known)
    close = difflib.get_close_matches(key.rpartition(".")[2], names, n=1)
    hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(names)}"
    return UserError(f"--knobs {path}: {key}: there is no such {kind}; {hint}")


def set_variables(
    knobs: Knobs, environ: MutableMapping[str, str] = os.environ
) -> tuple[dict[str, str], list[str]]:
    """Set the variables that the environment has not yet; return them, and a sentence for each that
    it has with another value."""
    lines = [
        f"{name}={value} of --knobs has no effect: the environment says {name}={environ[name]}"
        for name, value in knobs.variables.items()
        if environ.get(name, value) != value
    ]
    mine = {name: value for name, value in knobs.variables.items() if name not in environ}
    environ.update(mine)
    return mine, lines


def knobs_text(knobs: Mapping[str, Knobs]) -> str:
    """The file's text: what `read_all_knobs` reads back as `knobs`."""
    # JSON's numbers, strings, true and false are TOML's, too.
    parts = []
    for engine, own in knobs.items():
        if own.settings or not own.variables:
            lines = [
                f"{name} = {json.dumps(value, ensure_ascii=False)}"
                for name, value in own.settings.items()
            ]
            parts.append("\n".join([f"[{engine}]", *lines]))
        if own.variables:
            lines = [
                f"{name} = {json.dumps(value, ensure_ascii=False)}"
                for name, value in own.variables.items()
            ]
            parts.append("\n".join([f"[{engine}.environment]", *lines]))
    return "\n\n".join(parts) + "\n"
