"""The knobs that --tune tries, most promising first, and how a run gets them."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace

from compare.plan.configurations import Configuration
from compare.plan.environment import set_variables
from compare.plan.hosts import placement
from compare.plan.plan import Plan
from compare.running import preflight
from compare.running.search import Knob, Value
from recipe.config import read_flags
from recipe.errors import UserError
from recipe.flags import FLAGS, flag_name, spelled
from recipe.knobs import SETTINGS, Knobs

MIB = 2**20


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
    tried = [name for name in SETTINGS[engine] if FLAGS[name].tries]
    return [settings_knob(name, *FLAGS[name].tries) for name in tried]


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
    except UserError as error:
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
