"""Knobs: settings that change how fast gradients are exchanged, and not what is computed.

`--knobs FILE` reads them from a TOML file. `python compare/run.py --tune FILE` writes one; you can
also write it by hand. Both trainers read the same file, each its own tables:

    [ddp]
    bucket_cap_mb = 50.0
    static_graph = true

    [horovod]
    num_groups = 4

    [horovod.environment]
    HOROVOD_CYCLE_TIME = "0.5"
    OMPI_MCA_coll_tuned_use_dynamic_rules = "1"

Settings replace the preset's defaults; flags on the command line take precedence over them.
Variables are set before the engine reads them (Horovod and MPI read theirs at initialisation);
variables that are already set take precedence. A knob may change only the order in which gradients
are added up, so that tuned runs can be compared with others.
"""

import json
import os
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

from recipe.errors import UserError, near_match
from recipe.settings.flags import FLAGS, knob_types
from recipe.world import LAUNCHERS

# Environment variables that change what an engine does or how fast. One list serves the plan of a
# comparison, a run's environment.json and files of knobs.
STEERING_PREFIXES = (
    "HOROVOD_", "NCCL_", "GLOO_", "OMPI_", "PMIX_", "UCX_", "FI_", "TORCH_", "PYTORCH_", "CUDA_",
    "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "DNNL_", "ONEDNN_", "MALLOC_", "LD_PRELOAD",
    "LD_LIBRARY_PATH", "ATEN_CPU_CAPABILITY", "THP_MEM_ALLOC_ENABLE",
    "SLURM_MPI_TYPE", "SLURM_PMIX_FENCE", "SLURM_CPU_BIND",
)  # fmt: skip
# Horovod's variables that affect only its speed. They are listed by name so that a typing error in
# a file of knobs is found, and because others are no knobs, such as HOROVOD_RANK.
HOROVOD_VARIABLES = (
    "HOROVOD_FUSION_THRESHOLD",
    "HOROVOD_CYCLE_TIME",
    "HOROVOD_CACHE_CAPACITY",
    "HOROVOD_HIERARCHICAL_ALLREDUCE",
    "HOROVOD_HIERARCHICAL_ALLGATHER",
    "HOROVOD_TORUS_ALLREDUCE",
    "HOROVOD_NUM_NCCL_STREAMS",
    "HOROVOD_BATCH_D2D_MEMCOPIES",
    "HOROVOD_ENABLE_ASYNC_COMPLETION",
    "HOROVOD_DISABLE_GROUP_FUSION",
    "HOROVOD_THREAD_AFFINITY",
    "HOROVOD_MPI_THREADS_DISABLE",
    "HOROVOD_AUTOTUNE",
    "HOROVOD_AUTOTUNE_LOG",
    "HOROVOD_AUTOTUNE_WARMUP_SAMPLES",
    "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE",
    "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
    "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
)

# Launchers set variables with these prefixes for each rank, too: its number, and where the ranks
# meet. Of them, only those in the second list come from the user. (The trainers set the threads of
# MKL and OpenBLAS themselves.)
SHARED_WITH_LAUNCHERS = (
    *(family for launcher in LAUNCHERS.values() for family in launcher.sets),
    "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS",
)  # fmt: skip
OF_THE_USER = (
    *HOROVOD_VARIABLES, "HOROVOD_CCL", "HOROVOD_TIMELINE", "OMPI_MCA_coll",
    "OMPI_MCA_mpi_yield_when_idle", "OMP_WAIT_POLICY", "OMP_PROC_BIND", "OMP_PLACES",
    "CUDA_LAUNCH_BLOCKING",
)  # fmt: skip


def steers(name: str) -> bool:
    """Return whether this variable in the user's shell changes what an engine does or how fast."""
    return name.startswith(STEERING_PREFIXES)


def steers_rank(name: str) -> bool:
    """Return whether this variable in a rank's environment steers an engine, and the user rather
    than a launcher has set it."""
    return name.startswith(OF_THE_USER) if name.startswith(SHARED_WITH_LAUNCHERS) else steers(name)


# The settings that are knobs, by engine: fields of Config with the type of their value.
SETTINGS = {engine: knob_types(engine) for engine in ("ddp", "horovod")}
# Open MPI: only parameters of the parts that carry messages. The others (ess_, orte_, plm_, rmaps_,
# ...) start and place processes; mpirun has read them before a rank starts, so it is too late.
# torch: only variables of its process groups; others choose number formats.
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
    "NCCL_COMM_ID": "it says where the ranks meet",
    "NCCL_HOSTID": "it tells hosts apart",
}


@dataclass(frozen=True)
class Knobs:
    """The knobs that a file gives for one engine."""

    settings: dict[str, Any] = field(default_factory=dict)  # fields of Config
    variables: dict[str, str] = field(default_factory=dict)


def _table_of(engine: str) -> Any:
    """Return the type of an engine's table: its settings, and a table of variables."""
    settings: list[Any] = [(name, kind | None, None) for name, kind in SETTINGS[engine].items()]
    text = Annotated[str, msgspec.Meta(pattern="^[^\0]*$")]  # no variable can hold a zero byte
    variables: Any = ("environment", dict[str, text], msgspec.field(default_factory=dict))
    return msgspec.defstruct(engine, [*settings, variables], forbid_unknown_fields=True)


FILE: Any = msgspec.defstruct(
    "File",
    [(engine, _table_of(engine) | None, None) for engine in SETTINGS],
    forbid_unknown_fields=True,
)


def read_knobs(path: Path) -> dict[str, Knobs]:
    """Read a file and return the knobs of each engine that it names. UserError, with file and key,
    if a table has an unknown key, or a value that is not allowed."""
    try:
        file = msgspec.toml.decode(path.read_bytes(), type=FILE)
    except FileNotFoundError:
        raise UserError(
            f"--knobs {path}: there is no such file; `python compare/run.py --tune {path}` makes "
            "one for this machine"
        ) from None
    except (OSError, ValueError) as error:  # no TOML, an unknown key, or a value of a wrong type
        known = "; ".join(f"[{engine}] {', '.join(names)}" for engine, names in SETTINGS.items())
        raise UserError(
            f"--knobs {path}: {error}; a file may have {known}, and for each a table of "
            'variables, such as [ddp.environment] with NCCL_ALGO = "Ring"'
        ) from None
    knobs = {}
    for engine, names in SETTINGS.items():
        if (table := getattr(file, engine)) is not None:
            given = {name: v for name in names if (v := getattr(table, name)) is not None}
            place = f"--knobs {path}: {engine}"
            for name, value in given.items():
                bound = FLAGS[name].bound
                if bound is not None and not bound.holds(value):
                    raise UserError(f"{place}.{name} = {value!r}: {bound.advice}")
            for name in table.environment:
                if reason := refusal(engine, name):
                    raise UserError(f"{place}.environment.{name}: {reason}")
            knobs[engine] = Knobs(given, table.environment)
    return knobs


def refusal(engine: str, name: str) -> str | None:
    """Return why a variable is no knob of this engine, and what to do; None if it is one."""
    if name in NOT_KNOBS:
        return f"is no knob: {NOT_KNOBS[name]}; set it in the shell"
    is_common = name.startswith(FAMILIES) and re.fullmatch(r"\w+", name)
    if is_common or (engine == "horovod" and name in HOROVOD_VARIABLES):
        return None
    remedy = near_match(name, HOROVOD_VARIABLES) if "HOROVOD_" in name else "set it in the shell"
    return (
        "a file of knobs sets only variables that Horovod, MPI, Gloo or NCCL read in the ranks and "
        f"that do not change what is computed ({', '.join(FAMILIES)}, and some of HOROVOD_ under "
        f"[horovod.environment]); {remedy}"
    )


def set_variables(
    knobs: Knobs, environ: MutableMapping[str, str] = os.environ
) -> tuple[dict[str, str], list[str]]:
    """Set the variables that the environment does not have yet. Return these, and a sentence for
    each variable that it already has with another value."""
    lines = [
        f"{name}={value} of --knobs has no effect: the environment says {name}={environ[name]}"
        for name, value in knobs.variables.items()
        if environ.get(name, value) != value
    ]
    mine = {name: value for name, value in knobs.variables.items() if name not in environ}
    environ.update(mine)
    return mine, lines


def knobs_text(knobs: Mapping[str, Knobs]) -> str:
    """Return the text of a file that `read_knobs` reads back as `knobs`."""
    # JSON numbers, strings, true and false are also valid TOML.
    parts = []
    for engine, given in knobs.items():
        for table, values in {"": given.settings, ".environment": given.variables}.items():
            if values or not table:
                lines = [f"{n} = {json.dumps(v, ensure_ascii=False)}" for n, v in values.items()]
                parts.append("\n".join([f"[{engine}{table}]", *lines]))
    return "\n\n".join(parts) + "\n"
