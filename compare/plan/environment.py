"""What all runs of either engine share: the trainers' sources, and the variables of their
environment."""

import hashlib
import os
import sys
from pathlib import Path

from compare.plan.hosts import MPIRUN_VARIABLE, ssh_flags
from recipe.settings.knobs import steers

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("recipe", "baselines", "*_train")  # with all that trains, as patterns
# The trainers set their threads by one rule. A value left over from the shell would be
# overwritten by torchrun alone, and then the two engines would not run on equal terms.
REMOVED_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def run_environment() -> dict[str, str]:
    """Return the environment that every run of either engine is started with."""
    return {k: v for k, v in os.environ.items() if k not in REMOVED_VARIABLES} | set_variables()


def set_variables() -> dict[str, str]:
    """Return the variables that are set for every run, whatever the shell had in them."""
    here = str(Path(sys.executable).parent)
    variables = {
        # The launchers start `python`, `mpirun` and `orted` by name.
        "PATH": os.pathsep.join([here, os.environ.get("PATH", os.defpath)]),
        "PYTHONUNBUFFERED": "1",
        MPIRUN_VARIABLE: ssh_flags(),
        "PET_LOG_DIR": os.devnull,  # torchrun would leave an empty folder in TMPDIR
    }
    if hasattr(os, "geteuid") and os.geteuid() == 0:  # containers and CI
        variables |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return variables


def shell_lines() -> list[str]:
    """Return the shell lines that make this environment, for commands that a person pastes."""
    variables = set_variables() | {"PATH": f"{Path(sys.executable).parent}:$PATH"}
    exports = [f'export {name}="{value}"' for name, value in variables.items()]
    return [f"unset {' '.join(REMOVED_VARIABLES)}", *exports]


def steering_variables() -> dict[str, str]:
    """Return the variables of the user's shell that may change what the engines do or how fast.
    They are left as the user set them, the same for both engines, and written into the plan, so
    that a resumed comparison cannot mix them."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if steers(name)
        and not name.startswith("OMPI_ALLOW_RUN_AS_ROOT")
        and name not in REMOVED_VARIABLES
    }


def trainers_sha256() -> str:
    """Return the digest of the trainers' sources: runs of different code are not mixed."""
    digest = hashlib.sha256()
    for path in sorted(path for one in FOLDERS for path in ROOT.glob(f"{one}/**/*.py")):
        digest.update(f"{path.relative_to(ROOT)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def path_from_here(name: str) -> str:
    """Return the path of a file of this project as a person would type it in this folder."""
    path = ROOT / name
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
