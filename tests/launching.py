"""Starts the trainers through real launchers, and leaves no process behind."""

import atexit
import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from recipe import world

# Seconds after which something hangs: many times what it takes where nobody else uses the cores,
# and fewer than those after which a rank gives up by itself (recipe.watch.IRREGULAR_S).
GUARD_S = 500
ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
TRAINERS = {
    "ddp": str(ROOT / "ddp_train" / "train.py"),
    "horovod": str(ROOT / "horovod_train" / "train.py"),
    "mpi4py": str(ROOT / "baselines" / "mpi4py_train.py"),
    **{path.stem: str(path) for path in (ROOT / "baselines").glob("*.py")},
}
# The start lines of the README, for any number of ranks on this host.
LAUNCHERS = {
    "python": "{python} {trainer}",
    "torchrun": "torchrun --nproc-per-node {ranks} {trainer}",
    "torchrun --max-restarts": "torchrun --max-restarts 30 --nproc-per-node {ranks} {trainer}",
    "torchrun --max-restarts 1": "torchrun --max-restarts 1 --nproc-per-node {ranks} {trainer}",
    "torchrun --signals-to-handle": (
        "torchrun --signals-to-handle SIGTERM,SIGINT,SIGUSR1 --nproc-per-node {ranks} {trainer}"
    ),
    "horovodrun": "horovodrun -np {ranks} {python} {trainer}",
    "horovodrun --gloo": "horovodrun --gloo -np {ranks} {python} {trainer}",
    "horovodrun --mpi": "horovodrun --mpi -np {ranks} {python} {trainer}",
    "horovodrun --host-discovery-script": (
        "horovodrun -np {ranks} --min-np {ranks} --max-np {ranks} --network-interfaces lo "
        "--host-discovery-script tests/faults/slots.sh {python} {trainer}"
    ),
    "mpirun": "mpirun -np {ranks} {python} {trainer}",
    "mpirun --transport gloo": "mpirun -np {ranks} {python} {trainer} --transport gloo",
    "mpirun --transport mpi": "mpirun -np {ranks} {python} {trainer} --transport mpi",
}
# Each engine by the launchers whose transports differ.
ENGINES = [("torchrun", "ddp"), ("horovodrun --mpi", "horovod"), ("horovodrun --gloo", "horovod")]
# A training that has all that could differ between engines (BatchNorm, augmentation, momentum, a
# warm-up, the end of an epoch inside a step), and takes seconds.
SMALL = (
    "--arch shufflenet_v2_x0_5 --train-crop-size 16 --val-crop-size 16 --val-resize-size 16 "
    "--batch-size 12 --epochs 2 --base-lr 0.01 --momentum 0.9 --warmup-epochs 0.5 "
    "--lr-scheduler cosine --threads 1 --max-steps 70"
)


def rarely(*values: Any) -> Any:
    """Parameters of a test that only `make test-all` runs."""
    return pytest.param(*values, marks=pytest.mark.full)


@dataclass
class Finished:
    """A launched command that has ended."""

    returncode: int
    output: str
    seconds: float

    def checked(self) -> "Finished":
        """This, if its exit code is 0; else the test fails with its output."""
        assert self.returncode == 0, self.output
        return self


def words_of(launcher: str, script: str, ranks: int = 2, python: str = sys.executable) -> list[str]:
    """The command that starts a script."""
    return LAUNCHERS[launcher].format(python=python, trainer=script, ranks=ranks).split()


@functools.cache
def warm_python() -> str:
    """A program that does what Python does, by a fork of a process that has loaded torch. For tests
    whose subject is not how processes start or end."""
    program, name = Path(tempfile.mkdtemp(), "python"), f"tests-{os.getpid()}"
    server = [sys.executable, str(ROOT / "recipe/fork_server.py")]
    program.write_text(f'#!/bin/sh\nexec {server[0]} -IS {server[1]} run {name} "$@"\n')
    program.chmod(0o755)
    environ = {name: text for name, text in os.environ.items() if name != "OMP_NUM_THREADS"}
    modules = ("torch._dynamo", "torch.distributed.run", "torchvision.transforms.v2")
    serving = subprocess.Popen(
        [*server, "serve", name, "1e6", *modules], env=environ, stdin=subprocess.DEVNULL, cwd=ROOT
    )
    atexit.register(shutil.rmtree, program.parent)
    atexit.register(serving.wait)
    atexit.register(serving.kill)
    wait_until(lambda: f"@{name}\n" in Path("/proc/net/unix").read_text())
    return str(program)


def launch(
    launcher: str,
    engine: str,
    arguments: str,
    ranks: int = 2,
    warm: bool = False,
    timeout: float = GUARD_S,
    **environ: str,
) -> Finished:
    """Start a trainer, or another script, and wait for its end; fail if it hangs or leaves a
    process behind. With `warm` its processes are forks of one that has loaded torch. Use it only if
    a test is not about starting or ending: a fork that outlives its launcher is not noticed."""
    python = sys.executable
    if warm:
        environ["PYTHON_EXEC"] = python = warm_python()  # torchrun's variable
    command = words_of(launcher, TRAINERS.get(engine, engine), ranks, python)
    if command[0] == "torchrun":
        command[:1] = [python, str(BIN / "torchrun")]
    return run([*command, *arguments.split()], timeout, **environ)


def train(
    folder: Path,
    launcher: str,
    engine: str,
    arguments: str = "",
    ranks: int = 2,
    warm: bool = True,
    **environ: str,
) -> dict[str, Any]:
    """The summary of a small training in this run folder, whose exit code must be 0."""
    place = f"--log-dir {folder.parent} --name {folder.name}"
    launch(launcher, engine, f"{SMALL} {arguments} {place}", ranks, warm, **environ).checked()
    return read_json(folder / "summary.json")


def run(
    command: list[str],
    timeout: float = GUARD_S,
    meanwhile: Callable[[subprocess.Popen], None] = lambda process: None,
    **environ: str,
) -> Finished:
    """Run a command, and call `meanwhile` with its process. All processes that it starts have a
    mark in their environment, so that none is missed at the end."""
    mark = uuid.uuid4().hex
    environment = {
        **{key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"},
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",  # tests run as root in containers
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",  # 3 and 4 ranks on 2 cores
        "LAUNCH_MARK": mark,
        **environ,
    }
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=ROOT,
            start_new_session=True,
        )
        try:
            meanwhile(process)
            process.wait(timeout)
        except BaseException:  # the guard of pytest-timeout is none of Exception's
            output.seek(0)
            print(f"{shlex.join(command)}\nhad said when this test met a guard, or failed:\n")
            print(output.read())
            raise
        finally:
            seconds = time.monotonic() - started
            if process.poll() is not None:  # what it leaves may take its time to end
                with suppress(AssertionError):
                    wait_until(lambda: not marked(mark), 60, pause=0.1)
            left = marked(mark)
            for survivor in left:
                survivor.kill()
            process.wait()
        output.seek(0)
        text = re.sub(r"\x1b\[[\d;]*m", "", output.read())  # mpirun gives its ranks a terminal
    assert not left, f"{command} left {[survivor.pid for survivor in left]} behind:\n{text}"
    return Finished(process.returncode, text, seconds)


def wait_until(is_so: Callable[[], Any], seconds: float = GUARD_S, pause: float = 0.05) -> None:
    """Wait until this holds; fail after so many seconds."""
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "hangs"
        time.sleep(pause)


def marked(mark: str) -> list[psutil.Process]:
    """Live processes whose environment holds LAUNCH_MARK=mark."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            is_alive = process.status() != psutil.STATUS_ZOMBIE
            if is_alive and process.environ().get("LAUNCH_MARK") == mark:
                found.append(process)
    return found


def change_on_rank(rank: int | None, module: str, code: str, folder: Path) -> dict[str, str]:
    """The environment in which `code` runs on this rank, or on each (None), as soon as it has
    imported `module`."""
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE.format(rank, module, code, RANKS))
    return {"PYTHONPATH": f"{folder}:{ROOT}"}


RANKS = [launcher.variables[0] for launcher in world.LAUNCHERS.values()]
# As a sitecustomize: a disk that takes its time, for each file is synced for some seconds.
SLOW_DISK = """
import os, time
real_fsync = os.fsync
def fsync(file):
    time.sleep(3)
    real_fsync(file)
os.fsync = fsync
"""
# Runs in each Python process at its start.
SITECUSTOMIZE = """
import builtins, os, sys
real_import = builtins.__import__
def patched(name, *args, **kwargs):
    imported = real_import(name, *args, **kwargs)
    if name == "{1}" and builtins.__import__ is patched:
        builtins.__import__ = real_import
        exec({2!r}, {{"module": sys.modules[name]}})
    return imported
if "{0}" in ("None", *map(os.environ.get, {3!r})):
    builtins.__import__ = patched
"""


def before_the_launchers_words(output: str) -> str:
    """The ranks' output, without the tracebacks that torchrun and horovodrun add."""
    return re.split(LAUNCHERS_WORDS, output)[0]


LAUNCHERS_WORDS = (
    "torch/distributed/elastic|Terminating remaining workers"
    r'|Traceback .*\n  File ".*bin/(?:horovodrun|torchrun)"'
)


def read_json(path: Path) -> Any:
    """A JSON file's contents."""
    return json.loads(path.read_text())


def losses(run_folder: Path) -> list[float]:
    """The loss of each step of a run."""
    return [step["loss"] for step in read_lines(run_folder, "step")]


def resumed_at(run_folder: Path) -> list[int]:
    """The steps at which a run was resumed from a checkpoint."""
    return [event["step"] for event in read_lines(run_folder, "event") if event["name"] == "resume"]


def read_lines(run_folder: Path, kind: str) -> list[dict[str, Any]]:
    """The lines of one kind in a run's metrics.jsonl."""
    lines = map(json.loads, (run_folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]
