"""The knobs that --tune tries, most promising first: of each its values, and what they set."""

import os
import shutil

from compare.plan.configurations import Configuration
from compare.plan.environment import set_variables
from compare.plan.hosts import placement
from compare.plan.plan import Plan
from compare.running import preflight
from recipe.config import read_flags
from recipe.errors import UserError
from recipe.flags import FLAGS, flag_name, spelled
from recipe.knobs import SETTINGS, Knobs

Values = dict[str, Knobs]  # by their names; the engine's own default is not among them
MIB = 2**20
ALGORITHMS = {"recursive-doubling": "3", "ring": "4", "segmented-ring": "5", "Rabenseifner": "6"}


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
    on_gpus = "--no-cuda" not in arguments and preflight.visible_gpus() > 0
    by_nccl = on_gpus and preflight.horovod_has_nccl()
    mpirun = shutil.which("mpirun", path=set_variables()["PATH"])
    is_open_mpi = mpirun and "Open MPI" in preflight.command_output([mpirun, "--version"], 30)
    by_mpi = not by_nccl and configuration.controller != "gloo" and bool(is_open_mpi)
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
