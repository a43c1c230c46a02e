"""How a training script starts, and the hooks that another program may give it."""

import importlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from typing import Any

from recipe import watch
from recipe.ancestors import nearest_launcher, own_world
from recipe.errors import one_message
from recipe.settings.config import Config, parse_args
from recipe.watch import start_watchdog
from recipe.world import NVIDIA_DRIVER, World

LONGEST_FOLDER = 107 - len("/pymp-12345678/listener-12345678")  # bytes: sun_path, man 7 unix
# Variables, or prefixes of them, by which Open MPI's mpirun passes on its user's choice of cores.
CHOICES = (
    "OMPI_MCA_hwloc_base_",
    "OMPI_MCA_orte_rankfile",
    "OMPI_MCA_rmaps_base_cpus_per",
    "OMPI_MCA_rmaps_base_mapping",
    "OMPI_MCA_rmaps_rank_file",
)


def start(engine: str, words: list[str] | None = None) -> tuple[Config, World]:
    """Return this rank's settings, by default from the command line, and its place; start the
    watchdog. Call this before torch is loaded, so that --help and mistyped flags are answered at
    once."""
    world = own_world()
    config = parse_args(engine, world, words)
    undo_mpirun_binding(world)
    workers = config.cuda and NVIDIA_DRIVER.exists() if config.workers is None else config.workers
    with one_message(world):
        if workers and config.reads_images:
            start_loaders_server()
        start_watchdog(world, config.stall_timeout)
    watch.begin("loading torch")
    return config, world


def start_loaders_server() -> None:
    """Start the server process from which loader workers are forked quickly, also those of each
    evaluation. It loads what they need while this process loads the same.

    They are not forked from this process: neither MPI nor CUDA survives that. A worker loads the
    trainer's script again, so everything that the script imports should already be loaded. A rank
    that was itself forked with torch (recipe/fork_server.py) forks the server in turn. The
    sockets of these processes are in the folder for temporary files, or in /tmp if names in that
    folder would be too long.
    """
    tempfile.tempdir = "/tmp" if len(os.fsencode(tempfile.gettempdir())) > LONGEST_FOLDER else None
    util.get_temp_dir()  # keeps this folder from now on, for workers, too
    tempfile.tempdir = None
    forkserver.set_forkserver_preload(["recipe.session"])
    spawn = util.spawnv_passfds
    util.spawnv_passfds = _in_own_session  # type: ignore[assignment]
    resource_tracker.ensure_running()
    is_loaded = "torch" in sys.modules
    util.spawnv_passfds = _fork_instead if is_loaded else spawn  # type: ignore[assignment]
    # torchrun sends signals to a rank's whole process group. They are for the rank alone: neither
    # the server nor the workers that it forks get them.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watch.SIGNALS)
    forkserver.ensure_running()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    util.spawnv_passfds = spawn


def _in_own_session(program: str, words: list[str], kept: list[int]) -> int:
    """Start the process that removes the workers' semaphores at the end, without a message, in a
    session of its own: mpirun kills a rank's whole process group. Return its process ID."""
    words = [program, "-Wignore", *words[1:]]
    return subprocess.Popen(words, pass_fds=kept, start_new_session=True).pid


def _fork_instead(_: object, words: list[str], kept: list[int]) -> int:
    """Fork this process to run the code that a new interpreter would run with `-c`, with only the
    standard streams and the files `kept` open. Return its process ID."""
    server = os.fork()
    if server == 0:
        try:
            for before, end in pairwise([2, *sorted(kept), os.sysconf("SC_OPEN_MAX")]):
                os.closerange(before + 1, end)
            exec(words[-1])
        finally:
            os._exit(0)
    return server


def undo_mpirun_binding(world: World) -> None:
    """Let this process use all cores of its mpirun, which by default binds each rank to one core.

    Open MPI binds the two ranks of every job to the same two cores: several jobs on a host would
    slow each other down, and a single job would leave the other cores idle. torchrun and horovodrun
    bind nothing. A binding that the user has chosen stays.
    """
    chosen = any(name.startswith(CHOICES) for name in os.environ)
    if "OMPI_MCA_orte_bound_at_launch" in os.environ and not chosen:
        with suppress(OSError):  # the launcher may be another user's
            os.sched_setaffinity(0, os.sched_getaffinity(nearest_launcher(world).pid))


@dataclass(frozen=True)
class Hooks:
    """What another program gives to a script's `main` to measure its steps."""

    # Called after everything that belongs to a step, such as its record or a checkpoint, and before
    # the clocks of the next step start. Gets the session, which counts samples and phases, and the
    # trained model where each rank holds all of it.
    step_ended: Callable[..., object] = lambda session, model=None: None
    # Whether the ranks exchange gradients in the next step; the same on all ranks.
    exchanges: Callable[[], bool] = lambda: True
    # The least number of images in an epoch: a smaller data set is repeated within it.
    epoch_images: int = 0


def run_script(
    path: str,
    words: list[str] | None = None,
    hooks: Hooks = Hooks(),
    end: Callable[[int], object] = sys.exit,
    **settings: Any,
) -> None:
    """Run the training script at this path: `start`, import its module, which loads torch, and call
    its `main`. `end` gets the exit code. `settings` override those of the command line. A user's
    error becomes one message, from one rank."""
    folder, script = Path(path).resolve().parent, Path(path).stem
    engine = (folder.name if script == "train" else script).removesuffix("_train")
    config, world = start(engine, words)
    sys.path.insert(0, str(folder.parent))  # one module name, for all that pickle its objects
    trainer = importlib.import_module(f"{folder.name}.{script}")
    with one_message(world):
        end(trainer.main(replace(config, **settings), world, hooks))
