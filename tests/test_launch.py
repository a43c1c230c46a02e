"""Every launcher starts the trainers, and every mistake ends in one clear message."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import (
    SMALL,
    before_the_launchers_words,
    change_on_rank,
    launch,
    rarely,
    read_json,
    read_lines,
)

from recipe.device import core_ranges

pytestmark = pytest.mark.launch

STARTS = [
    ("python", "horovod", 1),
    ("python", "ddp", 1),
    ("horovodrun --gloo", "horovod", 2),
    ("horovodrun --mpi", "horovod", 2),
    ("torchrun", "ddp", 2),
    ("mpirun --transport mpi", "ddp", 2),
    # The first is --mpi by default, and the second is tried with a resume on 3 ranks.
    rarely("horovodrun", "horovod", 2),
    rarely("mpirun", "ddp", 2),
    rarely("mpirun", "horovod", 2),
    rarely("torchrun", "ddp", 3),
]
TRANSPORTS = {
    "horovodrun": "MPI",
    "horovodrun --gloo": "Gloo",
    "horovodrun --mpi": "MPI",
    "mpirun": "MPI",
    "python": "MPI",
}
DDP_TRANSPORTS = {"mpirun --transport mpi": "MPI"}  # the others: Gloo


@pytest.mark.parametrize(("launcher", "engine", "ranks"), STARTS)
def test_launcher(launcher: str, engine: str, ranks: int, trained: Callable[..., Path]) -> None:
    folder = trained(launcher, engine, ranks=ranks)
    environment = read_json(folder / "environment.json")
    assert environment["engine"] == engine
    assert environment["world_size"] == ranks
    transports = TRANSPORTS if engine == "horovod" else DDP_TRANSPORTS
    assert environment["transport"] == transports.get(launcher, "Gloo")
    assert environment["threads"] == 1
    own_cores = core_ranges(sorted(os.sched_getaffinity(0)))
    assert environment["affinity"] == [own_cores] * ranks, "mpirun binds unasked"
    summary = read_json(folder / "summary.json")
    assert summary["samples_seen"] == 70 * 12 * ranks
    for evaluation in read_lines(folder, "eval"):
        assert evaluation["num_images"] == 359, "each image counts once, at any number of ranks"
    steps = read_lines(folder, "step")
    assert [step["step"] for step in steps] == list(range(1, 71))
    shown = {"epoch", "samples_seen", "loss", "learning_rate", "images_per_second"}
    assert shown <= steps[0].keys()


# ---- mistakes: one message from one rank, exit code not 0, no process left (`launch` looks) ----


@pytest.mark.parametrize(
    ("launcher", "engine"),
    [
        ("torchrun", "ddp"),
        rarely("mpirun --transport mpi", "ddp"),
        rarely("horovodrun --gloo", "horovod"),
        rarely("mpirun", "horovod"),
    ],
)
def test_one_rank_raises(launcher: str, engine: str, tmp_path: Path) -> None:
    """Only rank 1 fails, while rank 0 waits for it in a collective."""
    changed = change_on_rank(1, "recipe.training.model", BREAK, tmp_path)
    arguments = f"{SMALL} --log-dir {tmp_path}/runs"
    finished = launch(launcher, engine, arguments, warm=True, **changed)
    assert finished.returncode != 0
    said = before_the_launchers_words(finished.output)
    assert said.count("RuntimeError: rank 1 is out of order") == 1
    assert "[rank 1 on " in finished.output
    assert "Connection closed" not in finished.output, "rank 0 printed its own error, too"


BREAK = """
real_seed_step = module.seed_step
def seed_step(config, step, rank):
    if step == 5:
        raise RuntimeError("rank 1 is out of order")
    real_seed_step(config, step, rank)
module.seed_step = seed_step
"""


GLOO = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
# By another job.
LEFT = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}


@pytest.mark.parametrize(
    ("launcher", "engine", "variables", "flags", "said"),
    [
        *(
            (launcher, engine, {}, "--batchsize 3", "write --batch-size 3")
            for launcher, engine in (("torchrun", "ddp"), ("horovodrun --gloo", "horovod"))
        ),
        rarely("mpirun", "horovod", {}, "--batchsize 3", "write --batch-size 3"),
        ("torchrun", "horovod", {}, "", "2 independent copies"),
        rarely("horovodrun --gloo", "ddp", {}, "", "start ddp_train/train.py with torchrun"),
        rarely("python", "horovod", GLOO, "--use-adasum", "error: --use-adasum: needs MPI, not G"),
        ("python", "ddp", {"GLOO_SOCKET_IFNAME": "eth99"}, "", "IFNAME=eth99: this host has"),
        # On two hosts each rank would train alone, without an error.
        ("mpirun", "ddp", LEFT, "", "LOCAL_RANK=0 MASTER_ADDR=localhost: left over from"),
        rarely("mpirun", "horovod", LEFT, "", "LOCAL_RANK=0 MASTER_ADDR=localhost: left over from"),
    ],
)
def test_a_mistake_is_refused_at_once(
    launcher: str, engine: str, variables: dict[str, str], flags: str, said: str, tmp_path: Path
) -> None:
    arguments = f"{SMALL} {flags} --log-dir {tmp_path}/runs"
    finished = launch(launcher, engine, arguments, warm=True, **variables)
    assert finished.returncode != 0 and before_the_launchers_words(finished.output).count(said) == 1
    assert "Traceback" not in before_the_launchers_words(finished.output)
    assert not (tmp_path / "runs").exists(), "nothing was trained or written"


@pytest.mark.parametrize(
    ("changes", "engine", "flags", "message"),
    [
        (
            "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))\n",
            "ddp",
            "--workers 2",
            "the limit here is 40 open files in a process",
        ),
        (
            "",
            "ddp",
            "--data synthetic --batch-size 1000000000000",
            r"error: memory ran out: you tried to allocate .* GiB of ",
        ),
        (
            "import sys\nsys.modules['horovod'] = None\n",
            "horovod",
            "",
            "build it: python horovod_train/build_horovod.py",
        ),
    ],
)
def test_what_the_host_lacks_is_one_message(
    changes: str, engine: str, flags: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(changes)
    words = f"{SMALL} {flags} --log-dir {tmp_path}"
    finished = launch("python", engine, words, warm=True, PYTHONPATH=str(tmp_path))
    assert finished.returncode != 0
    assert len(re.findall(message, finished.output)) == 1, finished.output
    assert "recipe/" not in finished.output, "no traceback of this project"


def test_the_debug_level_that_crashes_gloo_is_lowered(tmp_path: Path) -> None:
    """torch 2.14 ended by SIGSEGV. Not warm: torch reads the variable as it is loaded."""
    flags = f"{SMALL} --max-steps 2 --log-dir {tmp_path}"
    finished = launch("torchrun", "ddp", flags, TORCH_DISTRIBUTED_DEBUG="DETAIL")
    assert finished.checked().output.count("INFO is used instead") == 1


def test_a_long_name_of_the_folder_for_temporary_files(tmp_path: Path) -> None:
    """Loader workers' sockets have names of 107 bytes at most."""
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    flags = f"{SMALL} --max-steps 2 --workers 1 --log-dir {tmp_path}"
    launch("python", "ddp", flags, warm=True, TMPDIR=str(folder)).checked()
    assert not any(folder.glob("pymp-*")), "they are elsewhere"
