"""How a training script starts, and what whoever starts it from Python may hook into it."""

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
from recipe.errors import one_message
from recipe.settings.config import Config, parse_args
from recipe.watch import nearest_launcher, own_world, start_watchdog
from recipe.world import NVIDIA_DRIVER, World

LONGEST_FOLDER = 107 - len("/pymp-12345678/listener-12345678")  # bytes: sun_path, man 7 unix
# Variables, or families of them, by which Open MPI's mpirun passes on its user's choice of cores.
CHOICES = (
    "OMPI_MCA_hwloc_base_", "OMPI_MCA_orte_rankfile", "OMPI_MCA_rmaps_base_cpus_per",
    "OMPI_MCA_rmaps_base_mapping", "OMPI_MCA_rmaps_rank_file",
)  # fmt: skip


def start(engine: str, words: list[str] | None = None) -> tuple[Config, World]:
    """This rank's settings, by default those of the command line, and its place; from now on the
    watchdog ends it in time. Call it before torch is loaded: --help and typing errors are answered
    at once, and the knobs' variables are set in time."""
    world = own_world()
    config = parse_args(engine, world, words)
    undo_mpirun_binding(world)
    workers = config.cuda and NVIDIA_DRIVER.exists() if config.workers is None else config.workers
    with one_message(world):
        if workers and config.data != "synthetic":
            start_loaders_server()
        start_watchdog(world, config.stall_timeout)
    watch.begin("loading torch")
    return config, world


def start_loaders_server() -> None:
    """Start the process from which loader workers are forked in a moment, those of each evaluation,
    too; it loads what they need while this one loads the same.

    They are not forked from this process: neither MPI nor CUDA survives that. A worker loads the
    trainer's script again, so all that it imports is to be there already: in a rank that was forked
    with all of that the server is forked in its turn. The sockets at which all of these are reached
    are in a folder for temporary files, if names in it are not too long.
    """
    tempfile.tempdir = "/tmp" if len(os.fsencode(tempfile.gettempdir())) > LONGEST_FOLDER else None
    util.get_temp_dir()  # from now on it is this one, for workers, too
    tempfile.tempdir = None
    forkserver.set_forkserver_preload(["recipe.session"])
    spawn = util.spawnv_passfds
    util.spawnv_passfds = _in_own_session  # type: ignore[assignment]
    resource_tracker.ensure_running()
    # A fork of a process that has loaded it all, if this is one.
    is_loaded = "recipe.session" in sys.modules
    util.spawnv_passfds = _fork_instead if is_loaded else spawn  # type: ignore[assignment]
    # What torchrun sends to a rank's whole group is for the rank: neither the server nor workers
    # that it forks get these signals.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watch.SIGNALS)
    forkserver.ensure_running()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    util.spawnv_passfds = spawn


def _in_own_session(program: str, words: list[str], kept: list[int]) -> int:
    """Start what in the end removes the workers' semaphores, and says nothing of it, where it
    outlives them: mpirun kills a rank's whole group of processes. Its process ID."""
    words = [program, "-Wignore", *words[1:]]
    return subprocess.Popen(words, pass_fds=kept, start_new_session=True).pid


def _fork_instead(_: object, words: list[str], kept: list[int]) -> int:
    """Have a fork of this process run what an interpreter was to run by `-c`, with no other files
    than the first three and `kept`; its process ID."""
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
    """Let this process use the cores of its mpirun, which has bound it to one of them unasked.

    Open MPI binds the two ranks of each job to the same two cores: of jobs beside each other on a
    host none would get on, and one alone would leave the other cores idle. torchrun and horovodrun
    bind nothing. What the user has chosen stays.
    """
    chosen = any(name.startswith(CHOICES) for name in os.environ)
    if "OMPI_MCA_orte_bound_at_launch" in os.environ and not chosen:
        with suppress(OSError):  # it may be another user's
            os.sched_setaffinity(0, os.sched_getaffinity(nearest_launcher(world).pid))


@dataclass(frozen=True)
class Hooks:
    """What a `main` takes from another program that starts it, to measure its steps."""

    # Called when all that a step entails is over, be it a line of the record or a checkpoint, and
    # before the clocks of the next one start: with the session, which counts samples and phases,
    # and with the trained model where each rank holds all of it.
    step_ended: Callable[..., object] = lambda session, model=None: None
    # Whether the ranks exchange gradients in the next step, on all of them alike.
    exchanges: Callable[[], bool] = lambda: True
    # An epoch has at least so many images: those that there are come again in it.
    epoch_images: int = 0


def run_script(
    path: str,
    words: list[str] | None = None,
    hooks: Hooks = Hooks(),
    end: Callable[[int], object] = sys.exit,
    **settings: Any,
) -> None:
    """Be the training script at this path: `start`, then import its module, which loads torch, and
    call its `main`; `end` gets the exit code. `settings` win over those of the command line. A
    user's error becomes one message, from one rank."""
    folder, script = Path(path).resolve().parent, Path(path).stem
    engine = (folder.name if script == "train" else script).removesuffix("_train")
    config, world = start(engine, words)
    sys.path.insert(0, str(folder.parent))  # by one name for all that pickle what is in it
    trainer = importlib.import_module(f"{folder.name}.{script}")
    with one_message(world):
        end(trainer.main(replace(config, **settings), world, hooks))
